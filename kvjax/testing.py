# SPDX-License-Identifier: Apache-2.0
"""A conformance kit: requests, and a cache that verifies itself after each of them.

    from kvjax.testing import check_policy
    check_policy(kvjax.by_score(lambda blocks: blocks.fill))

A failure is an AssertionError that names the step and its request; the same seed gives the same requests again. Only
`requests`, a strategy for property tests of your own, needs Hypothesis.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax._workload import MOST, SMALL, Request, random_requests, requests
from kvjax.debug.invariants import check
from kvjax.events.mirror import Mirror, fold, index_of, to_list
from kvjax.events.records import Events, Status
from kvjax.events.transfer import Transfer
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy
from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.commit import commit
from kvjax.verbs.complete import complete
from kvjax.verbs.control import evict, pin, reset, unpin
from kvjax.verbs.extend import extend
from kvjax.verbs.fork import fork
from kvjax.verbs.init import init
from kvjax.verbs.offload import offload, onboard, swap_in, swap_out, watermark
from kvjax.verbs.release import release
from kvjax.verbs.truncate import truncate

__all__ = ["SMALL", "Request", "Trial", "check_policy", "jitted_verbs", "random_requests", "requests"]
FUNCTIONS = (
    admit, lookup, extend, commit, fork, truncate, release, pin,
    unpin, evict, reset, offload, onboard, watermark,
    swap_out, swap_in, complete,
)  # fmt: skip
NAMES = 4  # blocks that one `offload` or `onboard` names, at most
NOTHING = -1  # in a slot that nobody has written, or whose move failed
Item = tuple[int, int]  # a token and its extra id


@dataclasses.dataclass
class _Row:
    """What a sequence should hold: `items` are written, of `length` that it has room for.

    A row that rests is on the host; one that is lost has lost K/V to a failed move, and can only be released.
    """

    namespace: int
    prompt: list[Item]
    items: list[Item]
    length: int
    rests: bool = False
    lost: bool = False


class Trial:
    """A cache that carries out requests and verifies itself after each.

    Beside the cache it keeps, in plain Python, the text of each row and what each slot of the pools of both tiers would
    hold: K/V depend on all tokens up to their own, so a slot's contents are named by (namespace, path). A row that
    would read anything but its own text, and a findable block that does not hold what it claims, are failures; so is a
    block with other holders than the rows and pins there are.

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
          delivers: whether to demand that a prompt which fits by the free count is admitted; not for caches with
            windows or a host tier, where the count does not tell.
          verbs: jitted verbs by name, None for the library's.

        Raises:
          ValueError: for `delivers` with such a cache.
        """
        if delivers and (len(state.spec.groups) > 1 or state.spec.has_host):
            raise ValueError("delivers: got True, wanted False for a cache with windows or a host tier")
        self.state, self.delivers = state, delivers
        self.verbs = jitted_verbs() if verbs is None else verbs
        self.mirror = Mirror()
        self.tally: collections.Counter[str] = collections.Counter()
        self._rows: dict[int, _Row] = {}
        self._pins: list[np.ndarray] = []
        self._names: dict[tuple[int, tuple[Item, ...]], int] = {}
        self._slots = [np.full((group.num_ids, state.spec.block_size), NOTHING) for group in state.spec.groups]
        self._moves: list[tuple[Transfer, bool]] = []  # ordered, with whether nothing else was done since

    def do(self, request: Request) -> Events | None:
        """Carries out one request as in `random_requests`; None if it asks for nothing (no row to extend, no pin).

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
        if verb != "complete" and (Status.OK not in status or (verb == "extend" and any(status))):
            _assert_equal(before, jax.device_get(self.state), f"refused with {[s.name for s in status]}")
        self._hear(heard, before, verb)
        self.mirror = fold(heard, mirror)
        if verb in ("commit", "complete") or all(s == Status.OK for s in status):
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
            path = np.array(self._path(row.namespace, row.items), int)
            for number, group in enumerate(host.groups if not row.lost else ()):
                places, seen = self._places(group, seq, np.arange(len(row.items)))
                assert np.array_equal(self._slots[number][places], path[seen]), (
                    f"row {seq} would read what is not its own"
                )
        for (number, block, _), (namespace, path, *_) in self.mirror.nodes.items():
            items = path if self.state.spec.extra_ids else [(token, 0) for token in path]
            start = (len(items) - 1) // size * size
            held = self._slots[number][_pool_rows(host.groups[number])[block], : len(items) - start]
            assert held.tolist() == self._path(namespace, items)[start:], f"block {block} does not hold what it claims"
        for number, group in enumerate(host.groups):
            pins = self._pins if number == 0 else []
            holders = np.concatenate([group.table.reshape(-1), *pins])
            counts = np.bincount(holders[holders >= 0], minlength=len(group.blocks.refcount))
            assert np.array_equal(group.blocks.refcount, counts), "a block has other holders than rows and pins"

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
            **_tiers(request),
        }  # fmt: skip

    def _extend(self, request: Request) -> dict[str, Any] | None:
        grows = [seq for seq, row in self._rows.items() if not row.rests and not row.lost]
        counts = np.array([n if seq in grows else 0 for seq, n in enumerate(request["num_tokens"])], np.int32)
        if not counts.any():
            return None
        return {"active": counts > 0, "num_tokens": counts, "max_tokens": MOST, **_tiers(request)}

    def _commit(self, request: Request) -> dict[str, Any] | None:
        new = self._written(request)
        width = self.state.spec.max_length
        columns = [np.stack([_padded([item[i] for item in line], width) for line in new]) for i in range(2)]
        extra = {"extra_ids": columns[1]} if self.state.spec.extra_ids else {}
        counts = np.array([len(line) for line in new], np.int32)
        return {"tokens": columns[0], "num_tokens": counts, **extra} if counts.any() else None

    def _fork(self, request: Request) -> dict[str, Any] | None:
        if self._is_lost(request["src"]):
            return None
        return {"src": np.int32(request["src"]), "dst": np.int32(request["dst"])}

    def _truncate(self, request: Request) -> dict[str, Any] | None:
        row = self._rows.get(request["seq"])
        if self._is_lost(request["seq"]):
            return None
        return {"seq": np.int32(request["seq"]), "length": np.int32((row.length if row else 1) - request["drop"])}

    def _release(self, request: Request) -> dict[str, Any]:
        return {"seq": np.int32(request["seq"])}

    def _evict(self, request: Request) -> dict[str, Any]:
        return {"blocks": np.array([request["block"]], np.int32)}

    def _pin(self, request: Request) -> dict[str, Any] | None:
        if self._is_lost(request["seq"]):
            return None
        table = np.asarray(self.state.groups[0].table)[min(request["seq"], self.state.spec.max_seqs - 1)]
        there = (np.asarray(self.state.groups[0].blocks.fill)[table] > 0) & (table >= 0)
        return {"blocks": np.where(there & (np.arange(len(table)) < request["num_blocks"]), table, NO_BLOCK)}

    def _unpin(self, request: Request) -> dict[str, Any] | None:
        return {"blocks": self._pins[request["which"] % len(self._pins)]} if self._pins else None

    def _reset(self, request: Request) -> dict[str, Any]:
        del request
        return {}

    def _offload(self, request: Request, on_host: bool = False) -> dict[str, Any]:
        group = jax.device_get(self.state.groups[request["group"]])
        there = (_pool_rows(group) >= len(group.empty)) == on_host
        blocks = np.flatnonzero(there & (group.blocks.fill > 0) & (group.blocks.refcount == 0))[:NAMES]
        named = [block for i, block in enumerate(blocks.tolist()) if request["which"] >> i & 1]
        return {"blocks": np.array([*named, *[NO_BLOCK] * (NAMES - len(named))], np.int32), "group": request["group"]}

    def _onboard(self, request: Request) -> dict[str, Any]:
        return self._offload(request, True)

    def _watermark(self, request: Request) -> dict[str, Any]:
        return {"empty": np.int32(request["empty"]), "most": NAMES, "group": request["group"]}

    def _swap_out(self, request: Request) -> dict[str, Any] | None:
        return None if self._is_lost(request["seq"]) else {"seq": np.int32(request["seq"])}

    def _swap_in(self, request: Request) -> dict[str, Any] | None:
        return self._swap_out(request)

    def _complete(self, request: Request) -> dict[str, Any] | None:
        if not self._moves:
            return None
        transfer, fresh = self._moves.pop(0)
        return {"transfer": transfer, "ok": np.bool_(request["ok"] or not fresh)}

    def _is_lost(self, seq: int) -> bool:
        return seq in self._rows and self._rows[seq].lost

    def _written(self, request: Request) -> list[list[Item]]:
        """What each row writes: the rest of its prompt, then the request's tokens, as far as there is room."""
        new: list[list[Item]] = [[] for _ in range(self.state.spec.max_seqs)]
        for seq, row in self._rows.items():
            if row.rests or row.lost:
                continue
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
        """Verifies what was removed: nothing that is held, unless a move failed, and no parent before its children."""
        size, left = self.state.spec.block_size, dict(self.mirror.nodes)
        for event in heard:
            if event["kind"] != "removed":
                continue
            number, block = event["group"], event["block"]
            most = 1 if verb == "truncate" else 0
            holders = int(before.groups[number].blocks.refcount[block])
            assert holders <= most or verb == "complete", f"block {block} was removed, which {holders} hold"
            namespace, path, *_ = left.pop((number, block, event["generation"]))
            for (other, *_), (ns, longer, *_) in left.items() if number == 0 else ():
                below = len(path) % size == 0 and len(longer) > len(path) and longer[: len(path)] == path
                assert (other, ns) != (0, namespace) or not below, f"block {block} was removed before its child"

    def _note(self, request: Request, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Brings rows, slots and pins up to date with a request that was done."""
        verb = request["verb"]
        seq = request.get("seq", 0)
        if verb == "commit":
            for at, (line, status) in enumerate(zip(self._written(request), events.status, strict=True)):
                assert status == Status.OK, f"row {at} may not commit {len(line)} tokens: {Status(status).name}"
                if line:
                    row, start = self._rows[at], len(self._rows[at].items)
                    row.items = row.items + line
                    path = np.array(self._path(row.namespace, row.items)[start:])
                    for number, group in enumerate(before.groups):
                        places, seen = self._places(group, at, np.arange(start, len(row.items)))
                        self._slots[number][places] = path[seen]
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
        elif verb in ("swap_out", "swap_in"):
            self._rows[seq].rests = verb == "swap_out"
        elif verb == "complete":
            self._fail(arguments, events, before)
        self._move(events)

    def _move(self, events: Events) -> None:
        """Does with the slots what a transition ordered: moves between tiers, then copies."""
        self._moves = [(transfer, False) for transfer, _ in self._moves]
        moves = [] if events.transfer is None else [m for m in events.transfer.records.tolist() if m[1] >= 0]
        sources = [self._slots[number][source].copy() for number, _, _, source, _ in moves]
        for (number, _, _, _, target), slots in zip(moves, sources, strict=True):
            self._slots[number][target] = slots
        if moves:
            orders: Any = np.array(moves + [[-1] * 5] * (-len(moves) % 64), np.int32)  # one program for all
            self._moves.append((Transfer(orders), True))
        for event in to_list(events):
            if event["kind"] == "copied":
                slots, n = self._slots[event["group"]], event["num_tokens"]
                slots[event["block"], :n] = slots[event["source"], :n]

    def _fail(self, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Takes the K/V from where failed moves should have brought them."""
        for number, block, which, _, target in arguments["transfer"].records.tolist() if not arguments["ok"] else ():
            host = before.groups[number].host if block >= 0 else None
            if host is not None and host.arriving[block] == which:
                self._slots[number][target] = NOTHING
        for seq in np.flatnonzero(events.status == Status.HELD).tolist():
            self._rows[seq].lost = True

    def _places(self, group: Any, seq: int, positions: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Where in a group's slots those of a row's positions are that it still has; and bool[.], which these are."""
        size = self.state.spec.block_size
        blocks = group.table[seq][positions // size]
        seen = blocks >= 0
        return (_pool_rows(group)[blocks[seen]], positions[seen] % size), seen

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
    evicted, and no block before its children; a refused verb changed nothing; every row would read its own K/V. In the
    end a policy that is `idle` must be so.

    Args:
      policy: on trial.
      seed: of the requests.
      steps: how many requests.
      spec: of the cache; keep it small, so that blocks run short. With windows or a host tier `delivers` must be False.
      delivers: whether the policy claims always to find the victims that there are: then a prompt that fits by the
        count of empty and cached blocks must be admitted.
      pstate: the policy's own state to begin with, None for what its `init` makes.

    Returns:
      How often each verb was done, each status came and each kind of event; `["removed"]` tells whether the policy
      had anything to choose.

    Raises:
      AssertionError: naming the step and its request.
    """
    trial = Trial(init(spec, policy, policy_state=pstate), delivers=delivers)
    for step, request in enumerate(itertools.islice(random_requests(seed, spec), steps)):
        try:
            trial.do(request)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"step {step} of seed {seed}, {request}: {error}") from error
    if policy.idle:
        _check_idle(policy, trial.state)
    return trial.tally


def _check_idle(policy: EvictionPolicy, state: CacheState) -> None:
    """Verifies that a policy that is asked for nothing returns its state as it was."""
    group, nobody, zero = state.groups[0], np.full(3, NO_BLOCK, np.int32), np.int32(0)
    asked = {
        "touch": lambda pstate, blocks: policy.touch(pstate, blocks, nobody, zero),
        "victims": lambda pstate, blocks: policy.victims(pstate, blocks, lambda ids: ids >= 0, zero, zero, 3)[1],
        "forget": lambda pstate, blocks: pstate if policy.forget is None else policy.forget(pstate, nobody),
    }
    for name, ask in asked.items():
        after = jax.jit(ask)(group.policy, group.blocks)
        _assert_equal(
            jax.device_get(group.policy), jax.device_get(after), f"{name}: asked for nothing by an idle policy"
        )


@functools.cache
def jitted_verbs() -> dict[str, Callable[..., Any]]:
    """The verbs by name, jitted for short compile times rather than speed."""
    static = {"admit": "tiers", "extend": ("max_tokens", "tiers"), "watermark": ("most", "group")}
    static |= dict.fromkeys(("offload", "onboard"), "group")
    return {
        verb.__name__: jax.jit(
            verb,
            static_argnames=static.get(verb.__name__),
            compiler_options={"xla_backend_optimization_level": 0},
        )
        for verb in FUNCTIONS
    }


def _tiers(request: Request) -> dict[str, Any]:
    return {"tiers": ("device", "host")} if request.get("host") else {}


def _pool_rows(group: Any) -> np.ndarray:
    """i32[B]; the pool row of each block."""
    return np.arange(len(group.blocks.fill)) if group.host is None else np.asarray(group.host.slot)


def _padded(values: Sequence[int], width: int) -> np.ndarray:
    return np.array([*values, *[0] * (width - len(values))], np.int32)


def _assert_equal(old: Any, new: Any, why: str) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        assert np.array_equal(a, b), f"{why}, yet changed {jax.tree_util.keystr(path)}"
