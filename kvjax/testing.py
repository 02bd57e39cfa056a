# SPDX-License-Identifier: Apache-2.0
"""A conformance kit for eviction policies: random requests, and a cache that verifies itself after each of them.

    from kvjax.testing import check_policy
    check_policy(kvjax.by_score(lambda blocks: blocks.fill))

Needs neither pytest nor Hypothesis. A failure is an AssertionError that names the step and its request; the same
seed gives the same requests again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import cache, control
from kvjax.debug import check, index_of
from kvjax.events import Events, Mirror, Status, fold, to_list
from kvjax.policies import EvictionPolicy
from kvjax.spec import CacheSpec, make_spec
from kvjax.state import NO_BLOCK, CacheState

SMALL = make_spec(num_blocks=12, max_seqs=4, max_length=20, block_size=4)
_MOST = 6  # tokens that one `extend` asks for, per row
_VERBS = {"admit": 30, "commit": 32, "extend": 26, "release": 14, "fork": 6, "truncate": 4, "pin": 2, "unpin": 3,
          "evict": 2, "reset": 1}  # fmt: skip

Request = dict[str, Any]
Item = tuple[int, int]  # a token and its extra id


def random_requests(seed: int, spec: CacheSpec = SMALL, *, num_namespaces: int = 2) -> Iterator[Request]:
    """Yields requests without end, as plain data that JSON can hold; the same seed gives the same requests.

    Prompts begin like one of a few documents, so that prefixes are shared. One request in 25 has a flaw: an unknown
    row, no tokens, a negative token, or more tokens than a row can hold.

    Each request is a dict with "verb" and:

    | verb | fields |
    |---|---|
    | admit | seq; tokens; extra_ids (where the spec has them); namespace |
    | extend | num_tokens, one per row, 0 for a row that does not grow; rows that are free are left out |
    | commit | num_tokens, one per row, cut to the row's room; tokens, extra_ids: lists, used after the prompt |
    | fork | src; dst |
    | truncate | seq; drop: how many tokens to cut off |
    | release | seq |
    | evict | block |
    | pin | seq; num_blocks: how many of the row's first blocks, those that are findable |
    | unpin | which: number of the pin among those that last, modulo how many these are |
    | reset | |

    Args:
      seed: of numpy's generator.
      spec: of the cache that will be asked.
      num_namespaces: tenants.
    """
    rng = np.random.default_rng(seed)
    documents = rng.integers(0, 3, (3, spec.max_length + 1))
    verbs, weights = list(_VERBS), np.array(list(_VERBS.values())) / sum(_VERBS.values())

    used: set[int] = set()  # as far as can be told without the cache

    def row(free: bool = False) -> int:
        rows = [r for r in range(spec.max_seqs) if (r in used) != free]
        return int(rng.choice(rows)) if rows and rng.random() < 0.9 else int(rng.integers(spec.max_seqs))

    def text(length: int) -> list[int]:
        kept = int(rng.integers(length + 1)) if rng.random() < 0.7 else length
        return [*documents[rng.integers(3)][:kept].tolist(), *rng.integers(0, 3, length - kept).tolist()]

    def extra(tokens: list[int]) -> list[int]:
        return [int(t == 2 and rng.random() < 0.5) for t in tokens]

    make: dict[str, Callable[[], Request]] = {
        "admit": lambda: {
            "seq": row(free=True), "tokens": text(int(rng.integers(1, spec.max_length + 1))),
            "namespace": int(rng.integers(num_namespaces)),
        },
        "extend": lambda: {"num_tokens": _per_row(spec, lambda: int(rng.integers(_MOST + 1) * rng.integers(2)))},
        "commit": lambda: {
            "num_tokens": _per_row(spec, lambda: spec.max_length if rng.random() < 0.6 else int(rng.integers(6))),
            "tokens": _per_row(spec, lambda: text(spec.max_length)),
        },
        "fork": lambda: {"src": row(), "dst": row(free=True)},
        "truncate": lambda: {"seq": row(), "drop": int(rng.integers(1, 2 * spec.block_size))},
        "release": lambda: {"seq": row()},
        "evict": lambda: {"block": int(rng.integers(spec.groups[0].num_ids))},
        "pin": lambda: {"seq": row(), "num_blocks": int(rng.integers(1, spec.max_blocks_per_seq + 1))},
        "unpin": lambda: {"which": int(rng.integers(1000))},
        "reset": dict,
    }  # fmt: skip
    while True:
        request: dict[str, Any] = {"verb": str(rng.choice(verbs, p=weights))}
        request |= make[request["verb"]]()
        if rng.random() < 0.04:
            request |= _flaw(request, int(rng.integers(3)), spec)
        if spec.extra_ids and request["verb"] == "admit":
            request["extra_ids"] = extra(request["tokens"])
        if spec.extra_ids and request["verb"] == "commit":
            request["extra_ids"] = [extra(line) for line in request["tokens"]]
        used |= {request[name] for name in ("seq", "dst") if request["verb"] in ("admit", "fork") and name in request}
        used -= {request["seq"]} if request["verb"] == "release" else set()
        yield request


def _per_row(spec: CacheSpec, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(spec.max_seqs)]


def _flaw(request: Request, which: int, spec: CacheSpec) -> Request:
    if "seq" in request and which == 0:
        return {"seq": spec.max_seqs}
    if request["verb"] == "admit":
        return {"tokens": [[], [-1, 0], [0] * (spec.max_length + 1)][which]}
    return {"src": -1} if request["verb"] == "fork" else {}


@dataclasses.dataclass
class _Row:
    """What a sequence should hold: `items` are written, of `length` that it has room for."""

    namespace: int
    prompt: list[Item]
    items: list[Item]
    length: int


class Trial:
    """A cache that carries out requests and verifies itself after each.

    Beside the cache it keeps, in plain Python, the text of each row and what each slot of the pool would hold: K/V
    depend on all tokens up to their own, so a slot's contents are named by (namespace, path). A row that would read
    anything but its own text, and a findable block that does not hold what it claims, are failures.

    Attributes:
      state: the cache.
      mirror: the index by the events alone.
      tally: how often each verb was done ("admit"), each status came ("NO_BLOCKS") and each event ("removed").
    """

    def __init__(
        self,
        state: CacheState,
        *,
        delivers: bool = False,
        verbs: dict[str, Callable[..., Any]] | None = None,
    ):
        """Begins with an empty cache.

        Args:
          state: from `init`.
          delivers: whether to demand that a prompt which fits by the free count is admitted.
          verbs: jitted verbs by name, None for the library's.

        Raises:
          ValueError: if the cache has windows, whose blocks no policy of yours has to do with.
        """
        groups = len(state.spec.groups)
        if groups > 1:
            raise ValueError(f"spec: got {groups} groups, wanted one of full attention")
        self.state, self.delivers = state, delivers
        self.verbs = jitted_verbs() if verbs is None else verbs
        self.mirror = Mirror()
        self.tally: collections.Counter[str] = collections.Counter()
        self._rows: dict[int, _Row] = {}
        self._pins: list[np.ndarray] = []
        self._names: dict[tuple[int, tuple[Item, ...]], int] = {}
        self._slots = np.full((state.spec.groups[0].num_ids, state.spec.block_size), -1)

    def do(self, request: Request) -> Events | None:
        """Carries out one request of `random_requests`; None if it asks for nothing (no row to extend, no pin).

        Raises:
          AssertionError: if the cache is not as it should be afterwards.
        """
        verb = request["verb"]
        arguments = getattr(self, f"_{verb}")(request)
        if arguments is None:
            return None
        before, mirror = jax.device_get(self.state), self.mirror
        wanted = self._fits(arguments) if verb == "admit" and self.delivers else False
        self.state, events = self.verbs[verb](self.state, **arguments)
        events = jax.device_get(events)
        status = [Status(s) for s in events.status.tolist()]
        heard = to_list(events)
        self.tally.update(s.name for s in status if s)
        self.tally.update([verb] * all(s == Status.OK for s in status) + [event["kind"] for event in heard])
        assert not wanted or status == [Status.OK], f"{status[0].name}, though there are blocks enough"
        if Status.OK not in status or (verb == "extend" and any(status)):
            _assert_equal(before, jax.device_get(self.state), f"refused with {[s.name for s in status]}")
        self._hear(heard, before, verb)
        self.mirror = fold(heard, mirror)
        if verb == "commit" or all(s == Status.OK for s in status):
            self._note(request, arguments, events, before)
        self.verify()
        return events

    def verify(self) -> None:
        """Compares the cache with all that is known of it."""
        self.sound()
        host, size = jax.device_get(self.state), self.state.spec.block_size
        assert index_of(self.state) == self.mirror.index, "the events do not give the index"
        for seq in range(self.state.spec.max_seqs):
            row = self._rows.get(seq, _Row(0, [], [], 0))
            found = tuple(int(x[seq]) for x in (host.seqs.length, host.seqs.committed, host.seqs.namespace))
            assert found == (row.length, len(row.items), row.namespace), f"row {seq} has {found}"
            where = np.arange(len(row.items))
            held = self._slots[host.groups[0].table[seq][where // size], where % size]
            assert held.tolist() == self._path(row.namespace, row.items), f"row {seq} would read what is not its own"
        for (_, block, _), (namespace, path, *_) in self.mirror.nodes.items():
            items = path if self.state.spec.extra_ids else [(token, 0) for token in path]
            start = (len(items) - 1) // size * size
            held = self._slots[block, : len(items) - start]
            assert held.tolist() == self._path(namespace, items)[start:], f"block {block} does not hold what it claims"

    def sound(self) -> None:
        """Verifies the state on its own; for a subclass that must be more lenient."""
        check(self.state)

    # From a request to the arguments of its verb.

    def _admit(self, request: Request) -> dict[str, Any]:
        width = self.state.spec.max_length + 1
        extra = {"extra_ids": _padded(request["extra_ids"], width)} if self.state.spec.extra_ids else {}
        return {
            "seq": np.int32(request["seq"]), "tokens": _padded(request["tokens"], width),
            "length": np.int32(len(request["tokens"])), "namespace": np.int32(request["namespace"]), **extra,
        }  # fmt: skip

    def _extend(self, request: Request) -> dict[str, Any] | None:
        counts = [n if seq in self._rows else 0 for seq, n in enumerate(request["num_tokens"])]
        active = np.array(counts) > 0
        return (
            {"active": active, "num_tokens": np.array(counts, np.int32), "max_tokens": _MOST} if any(counts) else None
        )

    def _commit(self, request: Request) -> dict[str, Any] | None:
        new = self._written(request)
        width = self.state.spec.max_length
        columns = [np.stack([_padded([item[i] for item in line], width) for line in new]) for i in range(2)]
        extra = {"extra_ids": columns[1]} if self.state.spec.extra_ids else {}
        counts = np.array([len(line) for line in new], np.int32)
        return {"tokens": columns[0], "num_tokens": counts, **extra} if counts.any() else None

    def _fork(self, request: Request) -> dict[str, Any]:
        return {"src": np.int32(request["src"]), "dst": np.int32(request["dst"])}

    def _truncate(self, request: Request) -> dict[str, Any]:
        row = self._rows.get(request["seq"])
        return {"seq": np.int32(request["seq"]), "length": np.int32((row.length if row else 1) - request["drop"])}

    def _release(self, request: Request) -> dict[str, Any]:
        return {"seq": np.int32(request["seq"])}

    def _evict(self, request: Request) -> dict[str, Any]:
        return {"blocks": np.array([request["block"]], np.int32)}

    def _pin(self, request: Request) -> dict[str, Any]:
        table = np.asarray(self.state.groups[0].table)[min(request["seq"], self.state.spec.max_seqs - 1)]
        there = (np.asarray(self.state.groups[0].blocks.fill)[table] > 0) & (table >= 0)
        return {"blocks": np.where(there & (np.arange(len(table)) < request["num_blocks"]), table, NO_BLOCK)}

    def _unpin(self, request: Request) -> dict[str, Any] | None:
        return {"blocks": self._pins[request["which"] % len(self._pins)]} if self._pins else None

    def _reset(self, request: Request) -> dict[str, Any]:
        del request
        return {}

    def _written(self, request: Request) -> list[list[Item]]:
        """What each row writes: the rest of its prompt, then the request's tokens, as far as there is room."""
        new: list[list[Item]] = [[] for _ in range(self.state.spec.max_seqs)]
        for seq, row in self._rows.items():
            extra = request["extra_ids"][seq] if self.state.spec.extra_ids else itertools.repeat(0)
            rest = row.prompt[len(row.items) :] + list(zip(request["tokens"][seq], extra, strict=False))
            new[seq] = rest[: min(request["num_tokens"][seq], row.length - len(row.items))]
        return new

    # What a request should have done.

    def _fits(self, arguments: dict[str, Any]) -> bool:
        """Whether a prompt is sound, its row free, and empty and cached blocks enough for what is not found of it."""
        spec, group, length = self.state.spec, jax.device_get(self.state.groups[0]), int(arguments["length"])
        seq, tokens = int(arguments["seq"]), arguments["tokens"][:length]
        if seq in self._rows or seq >= spec.max_seqs or not 1 <= length <= spec.max_length or tokens.min() < 0:
            return False
        asked = {name: value for name, value in arguments.items() if name != "seq"}
        match = jax.device_get(self.verbs["lookup"](self.state, **asked))
        whole = match.blocks[match.blocks >= 0]
        idle = int(np.sum(group.blocks.refcount[whole] == 0))
        return -(-length // spec.block_size) - len(whole) <= int(group.num_empty) + int(group.num_cached) - idle

    def _hear(self, heard: Sequence[dict[str, Any]], before: CacheState, verb: str) -> None:
        """Verifies what was removed: nothing that somebody holds, and no parent before its children."""
        size, left = self.state.spec.block_size, dict(self.mirror.nodes)
        for event in heard:
            if event["kind"] != "removed":
                continue
            block = event["block"]
            most = 1 if verb == "truncate" else 0
            holders = int(before.groups[0].blocks.refcount[block])
            assert holders <= most, f"block {block} was removed, which {holders} hold"
            namespace, path, *_ = left.pop((0, block, event["generation"]))
            for ns, longer, *_ in left.values():
                below = len(path) % size == 0 and len(longer) > len(path) and longer[: len(path)] == path
                assert ns != namespace or not below, f"block {block} was removed before its child"

    def _note(self, request: Request, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Brings rows, slots and pins up to date with a request that was done."""
        verb, size = request["verb"], self.state.spec.block_size
        seq = request.get("seq", 0)
        if verb == "commit":
            for at, (line, status) in enumerate(zip(self._written(request), events.status, strict=True)):
                assert status == Status.OK, f"row {at} may not commit {len(line)} tokens: {Status(status).name}"
                if line:
                    row, start = self._rows[at], len(self._rows[at].items)
                    row.items = row.items + line
                    where = np.arange(start, len(row.items))
                    table = before.groups[0].table[at]
                    self._slots[table[where // size], where % size] = self._path(row.namespace, row.items)[start:]
        elif verb == "admit":
            extra = request.get("extra_ids", [0] * len(request["tokens"]))
            prompt = list(zip(request["tokens"], extra, strict=True))
            self._rows[seq] = _Row(request["namespace"], prompt, prompt[: int(events.cached[0])], len(prompt))
        elif verb == "extend":
            for at in np.flatnonzero(arguments["active"]).tolist():
                self._rows[at].length += int(arguments["num_tokens"][at])
        elif verb == "fork":
            self._rows[request["dst"]] = dataclasses.replace(self._rows[request["src"]])
        elif verb == "truncate":
            row, length = self._rows[seq], int(arguments["length"])
            self._rows[seq] = _Row(row.namespace, row.prompt[:length], row.items[:length], length)
        elif verb == "release":
            del self._rows[seq]
        elif verb == "pin":
            self._pins.append(arguments["blocks"])
        elif verb == "unpin":
            self._pins.pop(request["which"] % len(self._pins))
        for event in to_list(events):
            if event["kind"] == "copied":
                n = event["num_tokens"]
                self._slots[event["block"], :n] = self._slots[event["source"], :n]

    def _path(self, namespace: int, items: Sequence[Item]) -> list[int]:
        """Names of the K/V at each position of a text."""
        items = tuple(items)
        return [self._names.setdefault((namespace, items[: i + 1]), len(self._names)) for i in range(len(items))]


def check_policy(
    policy: EvictionPolicy,
    *,
    seed: int = 0,
    steps: int = 300,
    spec: CacheSpec = SMALL,
    delivers: bool = True,
    pstate: Any = None,
) -> collections.Counter[str]:
    """Runs random requests on a small cache under a policy and verifies the cache after each; see `Trial`.

    After every step: `check(state)` holds; the events so far give the index; nothing that was held or pinned was
    evicted, and no block before its children; a refused verb changed nothing; every row would read its own K/V.

    Args:
      policy: on trial.
      seed: of the requests.
      steps: how many requests.
      spec: of the cache; keep it small, so that blocks run short.
      delivers: whether the policy claims always to find the victims that there are: then a prompt that fits by the
        count of empty and cached blocks must be admitted.
      pstate: the policy's own state to begin with, None for what its `init` makes.

    Returns:
      How often each verb was done, each status came and each kind of event; `["removed"]` tells whether the policy
      had anything to choose.

    Raises:
      AssertionError: naming the step and its request.
    """
    state = cache.init(spec, policy)
    if pstate is not None:
        state = dataclasses.replace(state, groups=(dataclasses.replace(state.groups[0], policy=pstate),))
    trial = Trial(state, delivers=delivers)
    for step, request in enumerate(itertools.islice(random_requests(seed, spec), steps)):
        try:
            trial.do(request)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"step {step} of seed {seed}, {request}: {error}") from error
    return trial.tally


@functools.cache
def jitted_verbs() -> dict[str, Callable[..., Any]]:
    """The verbs by name, jitted for short compile times rather than speed."""
    return {
        name: jax.jit(
            getattr(cache, name, None) or getattr(control, name),
            static_argnames="max_tokens" if name == "extend" else None,
            compiler_options={"xla_backend_optimization_level": 0},
        )
        for name in ("lookup", *_VERBS)
    }


def _padded(values: Sequence[int], width: int) -> np.ndarray:
    return np.array([*values, *[0] * (width - len(values))], np.int32)


def _assert_equal(old: Any, new: Any, why: str) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        assert np.array_equal(a, b), f"{why}, yet changed {jax.tree_util.keystr(path)}"
