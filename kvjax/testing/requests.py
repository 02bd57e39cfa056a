# SPDX-License-Identifier: Apache-2.0
"""Requests to a cache on trial (`Trial`): their format, endless random requests, and a Hypothesis strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Required, TypedDict, cast

import numpy as np

from kvjax.spec import CacheSpec, make_spec
from kvjax.testing.expected import MAX_TOKENS, Fields

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SMALL = make_spec(num_blocks=12, max_seqs=4, max_length=20, block_size=4)
_WEIGHTS = {
    "admit": 30,
    "commit": 32,
    "extend": 26,
    "release": 14,
    "fork": 6,
    "truncate": 4,
    "pin": 2,
    "unpin": 3,
    "evict": 2,
    "forget_namespaces": 1,
    "reset": 1,
}
_VERBS = list(_WEIGHTS)
_SHARES = np.array(list(_WEIGHTS.values())) / sum(_WEIGHTS.values())


class Request(TypedDict, total=False):
    """A request to a cache on trial: a plain dict of JSON values with "verb" and the verb's fields.

        trial.do({"verb": "admit", "seq": 0, "tokens": [5, 6, 7], "namespace": 0})
        trial.do({"verb": "commit", "num_tokens": [20] * 4, "tokens": [[]] * 4})  # writes all reserved tokens
        trial.do({"verb": "release", "seq": 0})

    The fields of each verb:

        verb                fields
        admit               seq, tokens, namespace, extra_ids (an id for each token, if the spec has them)
        extend              num_tokens (for each row, 0 for a row that does not grow and for free rows)
        commit              num_tokens (for each row, at most the reserved tokens),
                            tokens, extra_ids (lists for each row, used after the prompt)
        fork                src, dst
        truncate            seq, drop (number of tokens to cut off)
        release             seq
        evict               block
        forget_namespaces   keep
        pin                 seq, num_blocks (number of the row's first blocks, of which findable blocks are pinned)
        unpin               which (index of the pin, modulo the number of pins)
        reset

    Caches with a host tier have more verbs, and "admit" and "extend" also have host: whether to use both tiers.

        verb                fields
        offload, onboard    which (a bit for each of the first movable blocks, in order), group
        watermark           empty, group
        backup              group (only in caches with backups)
        swap_out, swap_in   seq
        complete            ok (whether the oldest moves succeeded, True if other requests came after their order)
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
    """Yields endless requests, as plain data of JSON values. The same seed gives the same requests.

    Requests have the verbs of the first table of `Request`. Prompts begin like a few documents, so they share prefixes.
    A request in 25 has a flaw: an unknown row, no tokens, a negative token, or more tokens than a row can hold.

    Args:
      seed: the seed of numpy's generator.
      spec: the spec of the cache on trial.
      num_namespaces: number of tenants.

    Example:
      >>> from kvjax.testing import random_requests
      >>> requests, again = random_requests(seed=5), random_requests(seed=5)
      >>> [next(requests) for _ in range(100)] == [next(again) for _ in range(100)]
      True
    """
    draws = Draws(seed, spec, num_namespaces)
    while True:
        yield draws.next()


class Draws:
    """Draws random requests.

    A subclass that knows the cache sets the rows in use, and may override `prompt` and `following`.

    Attributes:
      spec: the spec of the cache.
      num_namespaces: number of tenants.
      rng: numpy's generator.
      documents: i32[3, max_length + 1]; texts with which prompts begin.
      used: the rows in use, guessed only from the requests.
      aim: the share of requests that name a suitable row.
    """

    aim = 0.9

    def __init__(self, seed: int, spec: CacheSpec, num_namespaces: int = 2):
        self.spec = spec
        self.num_namespaces = num_namespaces
        self.rng = np.random.default_rng(seed)
        self.documents = self.rng.integers(0, 3, (3, spec.max_length + 1))
        self.used: set[int] = set()

    def next(self) -> Request:
        """A request with any verb of the first table of `Request`, perhaps with a flaw."""
        request = self.make(str(self.rng.choice(_VERBS, p=_SHARES)))
        if self.chance(0.04):
            request |= _flaw(request, self.number(3), self.spec)
        if self.spec.extra_ids and "tokens" in request:
            request |= {"extra_ids": self.extra_ids(request)}
        self.used |= {
            request[name] for name in ("seq", "dst") if request["verb"] in ("admit", "fork") and name in request
        }
        self.used -= {request["seq"]} if request["verb"] == "release" else set()
        return cast(Request, request)

    def make(self, verb: str) -> Fields:
        """A request with a given verb, without extra ids."""
        spec = self.spec
        integer = self.number
        match verb:
            case "admit":
                fields: Fields = {"seq": self.row(free=True)} | self.prompt()
            case "extend":
                fields = {"num_tokens": [integer(MAX_TOKENS + 1) * integer(2) for _ in range(spec.max_seqs)]}
            case "commit":
                longest = spec.max_length
                rows = range(spec.max_seqs)
                fields = {"num_tokens": [longest if self.chance(0.6) else integer(6) for _ in rows]}
                fields["tokens"] = [self.following(seq) for seq in rows]
            case "fork":
                fields = {"src": self.row(), "dst": self.row(free=True)}
            case "truncate":
                fields = {"seq": self.row(), "drop": integer(1, 2 * spec.block_size)}
            case "evict":
                fields = {"block": integer(spec.groups[0].num_ids)}
            case "forget_namespaces":
                fields = {"keep": [integer(self.num_namespaces)]}
            case "pin":
                fields = {"seq": self.row(), "num_blocks": integer(1, spec.max_blocks_per_seq + 1)}
            case "unpin":
                fields = {"which": integer(1000)}
            case "release" | "swap_out" | "swap_in":
                fields = {"seq": self.row()}
            case "offload" | "onboard":
                fields = {"which": integer(1, 16), "group": self.host_group()}
            case "watermark":
                group = self.host_group()
                fields = {"empty": integer(spec.groups[group].num_blocks + 1), "group": group}
            case "backup":
                fields = {"group": self.host_group()}
            case "complete":
                fields = {"ok": self.chance(0.75)}
            case _:
                fields = {}
        return {"verb": verb} | fields

    def number(self, low: int, high: int | None = None) -> int:
        """An integer from `low` to below `high`. With a single bound, from 0 to below it."""
        return int(self.rng.integers(low, high))

    def chance(self, probability: float) -> bool:
        """A random bool, which is True with this probability."""
        return bool(self.rng.random() < probability)

    def row(self, free: bool = False) -> int:
        """A row that is mostly in use, or mostly free."""
        rows = [seq for seq in range(self.spec.max_seqs) if (seq in self.used) != free]
        return int(self.rng.choice(rows)) if rows and self.chance(self.aim) else self.number(self.spec.max_seqs)

    def host_group(self) -> int:
        """A group with a host tier."""
        return int(self.rng.choice(self.spec.host_groups))

    def prompt(self) -> Fields:
        """The tokens of a prompt, and their namespace."""
        return {
            "tokens": self.text(self.number(1, self.spec.max_length + 1)),
            "namespace": self.number(self.num_namespaces),
        }

    def following(self, seq: int) -> list[int]:
        """Further tokens of a row."""
        del seq
        return self.text(self.spec.max_length)

    def text(self, length: int) -> list[int]:
        """A text of this length, which mostly begins like a document."""
        begun = self.number(length + 1) if self.chance(0.7) else length
        document = self.documents[self.number(3)]
        return [*document[:begun].tolist(), *self.rng.integers(0, 3, length - begun).tolist()]

    def extra_ids(self, request: Fields) -> Any:
        """Extra ids for the tokens of a request."""

        def ids(text: Sequence[int]) -> list[int]:
            return [int(token == 2 and self.chance(0.5)) for token in text]

        tokens = request["tokens"]
        return ids(tokens) if request["verb"] == "admit" else [ids(text) for text in tokens]


def requests(
    spec: CacheSpec = SMALL, *, num_namespaces: int = 2, max_size: int = 40, shrink_seconds: float = 60
) -> SearchStrategy[list[Request]]:
    """A Hypothesis strategy for your own property tests: lists of requests, which shrink to the few that matter.

        @hypothesis.given(requests(spec))
        def test_something(story):
            trial = Trial(kvjax.init(spec))
            for request in story:
                trial.do(request)

    `Request` describes the requests: the first table, and if the spec has a host tier also the second. Tokens are 0, 1
    or 2, so prompts share prefixes. A row may be unknown, and a prompt too long.

    Args:
      spec: the spec of the cache on trial; keep it small.
      num_namespaces: number of tenants.
      max_size: the maximum number of requests in a list.
      shrink_seconds: the time that Hypothesis may take to shrink a failing example. It has no setting for this, so the
        limit holds for all tests of this process, until another call sets it. Hypothesis' own limit is 300.

    Raises:
      ImportError: without hypothesis. To install it, run `pip install "kvjax[test]"`.
    """
    try:
        import hypothesis.strategies as st
    except ImportError as error:
        raise ImportError('requests: needs hypothesis (pip install "kvjax[test]")') from error

    from kvjax.testing import strategies  # imports hypothesis

    strategies.limit_shrinking(shrink_seconds)
    # Lists of lists are longer on average than a flat list, and shrink equally well.
    lists = st.lists(st.lists(strategies.parts(spec, num_namespaces)).map(_joined)).map(_joined)
    return lists.map(lambda story: story[:max_size])


def _joined(lists: list[list[Any]]) -> list[Any]:
    return [request for part in lists for request in part]


def _flaw(request: Fields, which: int, spec: CacheSpec) -> Fields:
    if "seq" in request and which == 0:
        return {"seq": spec.max_seqs}
    if request["verb"] == "admit":
        return {"tokens": [[], [-1, 0], [0] * (spec.max_length + 1)][which]}
    return {"src": -1} if request["verb"] == "fork" else {}
