# SPDX-License-Identifier: Apache-2.0
"""Requests to a cache on trial (`Trial`): their form, random ones without end, and a Hypothesis strategy."""

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
    draws = Draws(seed, spec, num_namespaces)
    while True:
        yield draws.next()


class Draws:
    """Draws requests at random, one by one.

    A subclass that knows the cache tells which rows are in use, and may override `prompt` and `following`.

    Attributes:
      spec: of the cache.
      num_namespaces: tenants.
      rng: numpy's generator.
      documents: i32[3, max_length + 1]: the texts that prompts begin like.
      used: the rows in use, a guess by the requests alone.
      aim: the share of rows that suit their request.
    """

    aim = 0.9

    def __init__(self, seed: int, spec: CacheSpec, num_namespaces: int = 2):
        self.spec, self.num_namespaces, self.rng = spec, num_namespaces, np.random.default_rng(seed)
        self.documents = self.rng.integers(0, 3, (3, spec.max_length + 1))
        self.used: set[int] = set()

    def next(self) -> Request:
        """A request of any verb of the first table of `Request`, perhaps with a flaw."""
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
        """A request of this verb, without extra ids."""
        spec, number = self.spec, self.number
        match verb:
            case "admit":
                fields: Fields = {"seq": self.row(free=True)} | self.prompt()
            case "extend":
                fields = {"num_tokens": [number(MAX_TOKENS + 1) * number(2) for _ in range(spec.max_seqs)]}
            case "commit":
                longest, rows = spec.max_length, range(spec.max_seqs)
                fields = {"num_tokens": [longest if self.chance(0.6) else number(6) for _ in rows]}
                fields["tokens"] = [self.following(seq) for seq in rows]
            case "fork":
                fields = {"src": self.row(), "dst": self.row(free=True)}
            case "truncate":
                fields = {"seq": self.row(), "drop": number(1, 2 * spec.block_size)}
            case "evict":
                fields = {"block": number(spec.groups[0].num_ids)}
            case "forget_namespaces":
                fields = {"keep": [number(self.num_namespaces)]}
            case "pin":
                fields = {"seq": self.row(), "num_blocks": number(1, spec.max_blocks_per_seq + 1)}
            case "unpin":
                fields = {"which": number(1000)}
            case "release" | "swap_out" | "swap_in":
                fields = {"seq": self.row()}
            case "offload" | "onboard":
                fields = {"which": number(1, 16), "group": self.host_group()}
            case "watermark":
                group = self.host_group()
                fields = {"empty": number(spec.groups[group].num_blocks + 1), "group": group}
            case "complete":
                fields = {"ok": self.chance(0.75)}
            case _:
                fields = {}
        return {"verb": verb} | fields

    def number(self, low: int, high: int | None = None) -> int:
        """An integer from `low` to below `high`; with one bound, from 0 to below it."""
        return int(self.rng.integers(low, high))

    def chance(self, probability: float) -> bool:
        """Whether something with this probability happens."""
        return bool(self.rng.random() < probability)

    def row(self, free: bool = False) -> int:
        """Mostly a row in use, or one that is free."""
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
        """The tokens that a row goes on with."""
        del seq
        return self.text(self.spec.max_length)

    def text(self, length: int) -> list[int]:
        """So many tokens, which mostly begin like a document."""
        begun = self.number(length + 1) if self.chance(0.7) else length
        document = self.documents[self.number(3)]
        return [*document[:begun].tolist(), *self.rng.integers(0, 3, length - begun).tolist()]

    def extra_ids(self, request: Fields) -> Any:
        """Extra ids for the tokens of a request."""

        def ids(text: Sequence[int]) -> list[int]:
            return [int(token == 2 and self.chance(0.5)) for token in text]

        tokens = request["tokens"]
        return ids(tokens) if request["verb"] == "admit" else [ids(text) for text in tokens]


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


def _flaw(request: Fields, which: int, spec: CacheSpec) -> Fields:
    if "seq" in request and which == 0:
        return {"seq": spec.max_seqs}
    if request["verb"] == "admit":
        return {"tokens": [[], [-1, 0], [0] * (spec.max_length + 1)][which]}
    return {"src": -1} if request["verb"] == "fork" else {}
