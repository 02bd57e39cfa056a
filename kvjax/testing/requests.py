# SPDX-License-Identifier: Apache-2.0
"""Requests to a cache on trial (`Trial`): their form, random ones without end, and a Hypothesis strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict, cast

import numpy as np

from kvjax.spec import CacheSpec, make_spec
from kvjax.testing.expected import MAX_TOKENS, Fields

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SMALL = make_spec(num_blocks=12, max_seqs=4, max_length=20, block_size=4)
_WEIGHTS = {"admit": 30, "commit": 32, "extend": 26, "release": 14, "fork": 6, "truncate": 4, "pin": 2, "unpin": 3,
          "evict": 2, "forget_namespaces": 1, "reset": 1}  # fmt: skip


class Request(TypedDict, total=False):
    """One request to a cache on trial: a plain dict with "verb" and the fields of that verb, which JSON can hold.

        trial.do({"verb": "admit", "seq": 0, "tokens": [5, 6, 7], "namespace": 0})
        trial.do({"verb": "commit", "num_tokens": [20] * 4, "tokens": [[]] * 4})  # writes as much as is reserved
        trial.do({"verb": "release", "seq": 0})

    The fields of each verb:

        verb                fields
        admit               seq; tokens; namespace; extra_ids, one per token (where the spec has them)
        extend              num_tokens, one per row, 0 for a row that does not grow, as all free rows
        commit              num_tokens, one per row, at most those reserved;
                            tokens, extra_ids: lists, used after the prompt
        fork                src; dst
        truncate            seq; drop: how many tokens to cut off
        release             seq
        evict               block
        forget_namespaces   keep
        pin                 seq; num_blocks: how many of the row's first blocks, those that are findable
        unpin               which: number of the pin among those that last, modulo how many these are
        reset

    Those of caches with a host tier; there "admit" and "extend" also have host: whether both tiers are used.

        verb                fields
        offload, onboard    which: a bit for each of the first blocks that could go, in order; group
        watermark           empty; group
        swap_out, swap_in   seq
        complete            ok: whether the oldest moves were done, not heeded if something else was done
                            since they were ordered
    """

    verb: Required[str]
    seq: int
    src: int
    dst: int
    block: int
    keep: Sequence[int]
    tokens: Sequence[int] | Sequence[Sequence[int]]
    extra_ids: Sequence[int] | Sequence[Sequence[int]]
    num_tokens: Sequence[int]
    num_blocks: int
    namespace: int
    drop: int
    which: int
    group: int
    empty: int
    host: bool
    ok: bool


def random_requests(seed: int, spec: CacheSpec = SMALL, *, num_namespaces: int = 2) -> Iterator[Request]:
    """Yields requests without end, as plain data that JSON can hold; the same seed gives the same requests.

    Prompts begin like one of a few documents, so that prefixes are shared. One request in 25 has a flaw: an unknown
    row, no tokens, a negative token, or more tokens than a row can hold.

    They have the verbs of the first table of `Request`.

    Args:
      seed: of numpy's generator.
      spec: of the cache on trial.
      num_namespaces: tenants.

    Example:
      >>> from kvjax.testing import random_requests
      >>> requests, again = random_requests(seed=5), random_requests(seed=5)
      >>> [next(requests) for _ in range(100)] == [next(again) for _ in range(100)]
      True
    """
    rng = np.random.default_rng(seed)
    documents = rng.integers(0, 3, (3, spec.max_length + 1))
    verbs, weights = list(_WEIGHTS), np.array(list(_WEIGHTS.values())) / sum(_WEIGHTS.values())

    used: set[int] = set()  # the rows in use, as a guess without the cache

    def row(free: bool = False) -> int:
        rows = [r for r in range(spec.max_seqs) if (r in used) != free]
        return int(rng.choice(rows)) if rows and rng.random() < 0.9 else int(rng.integers(spec.max_seqs))

    def text(length: int) -> list[int]:
        begun = int(rng.integers(length + 1)) if rng.random() < 0.7 else length
        return [*documents[rng.integers(3)][:begun].tolist(), *rng.integers(0, 3, length - begun).tolist()]

    def extra(tokens: list[int]) -> list[int]:
        return [int(t == 2 and rng.random() < 0.5) for t in tokens]

    make: dict[str, Callable[[], Fields]] = {
        "admit": lambda: {
            "seq": row(free=True), "tokens": text(int(rng.integers(1, spec.max_length + 1))),
            "namespace": int(rng.integers(num_namespaces)),
        },
        "extend": lambda: {"num_tokens": _per_row(spec, lambda: int(rng.integers(MAX_TOKENS + 1) * rng.integers(2)))},
        "commit": lambda: {
            "num_tokens": _per_row(spec, lambda: spec.max_length if rng.random() < 0.6 else int(rng.integers(6))),
            "tokens": _per_row(spec, lambda: text(spec.max_length)),
        },
        "fork": lambda: {"src": row(), "dst": row(free=True)},
        "truncate": lambda: {"seq": row(), "drop": int(rng.integers(1, 2 * spec.block_size))},
        "release": lambda: {"seq": row()},
        "evict": lambda: {"block": int(rng.integers(spec.groups[0].num_ids))},
        "forget_namespaces": lambda: {"keep": [int(rng.integers(num_namespaces))]},
        "pin": lambda: {"seq": row(), "num_blocks": int(rng.integers(1, spec.max_blocks_per_seq + 1))},
        "unpin": lambda: {"which": int(rng.integers(1000))},
        "reset": dict,
    }  # fmt: skip
    while True:
        request: dict[str, Any] = {"verb": str(rng.choice(verbs, p=weights))}
        request |= make[request["verb"]]()
        if rng.random() < 0.04:
            request |= _flaw(request, int(rng.integers(3)), spec)
        if spec.extra_ids and "tokens" in request:
            tokens = request["tokens"]
            request["extra_ids"] = extra(tokens) if request["verb"] == "admit" else [extra(text) for text in tokens]
        used |= {request[name] for name in ("seq", "dst") if request["verb"] in ("admit", "fork") and name in request}
        used -= {request["seq"]} if request["verb"] == "release" else set()
        yield cast(Request, request)


def requests(spec: CacheSpec = SMALL, *, num_namespaces: int = 2, max_size: int = 40) -> SearchStrategy[list[Request]]:
    """A Hypothesis strategy for property tests of your own: lists of requests, which shrink to the few that matter.

        @hypothesis.given(requests(spec))
        def test_something(story):
            trial = Trial(kvjax.init(spec))
            for request in story:
                trial.do(request)

    `Request` says which requests there are, and their fields: those of its first table, and of its second where the
    spec has a host tier. Tokens are 0, 1 or 2, so that prefixes are shared; a row may be unknown, a prompt too long.

    Args:
      spec: of the cache on trial; keep it small.
      num_namespaces: tenants.
      max_size: the most requests in a list.

    Raises:
      ImportError: without hypothesis, which `pip install "kvjax[test]"` brings.
    """
    try:
        import hypothesis.strategies as st
    except ImportError as error:
        raise ImportError('requests: needs hypothesis (pip install "kvjax[test]")') from error

    from kvjax.testing import strategies  # which imports hypothesis

    # Lists of lists are longer on average than a flat list, and shrink as well.
    lists = st.lists(st.lists(strategies.parts(spec, num_namespaces)).map(_joined)).map(_joined)
    return lists.map(lambda story: story[:max_size])


def _joined(lists: list[list[Any]]) -> list[Any]:
    return [request for part in lists for request in part]


def _per_row(spec: CacheSpec, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(spec.max_seqs)]


def _flaw(request: Fields, which: int, spec: CacheSpec) -> Fields:
    if "seq" in request and which == 0:
        return {"seq": spec.max_seqs}
    if request["verb"] == "admit":
        return {"tokens": [[], [-1, 0], [0] * (spec.max_length + 1)][which]}
    return {"src": -1} if request["verb"] == "fork" else {}
