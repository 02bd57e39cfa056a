# SPDX-License-Identifier: Apache-2.0
"""A cache on trial: it carries out requests and verifies itself after each. And a policy on trial in one."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from kvjax.checks import static_options
from kvjax.debug.invariants import check
from kvjax.events.mirror import Mirror, fold, index_of, to_list
from kvjax.events.records import COLUMNS, EventKind, Events, Records, Status
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy
from kvjax.testing.expected import Expected, Fields, Row, adopt, arguments_of, pool_rows
from kvjax.testing.requests import SMALL, Request, random_requests
from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.commit import commit
from kvjax.verbs.control import evict, forget_namespaces, pin, reset, unpin
from kvjax.verbs.extend import extend
from kvjax.verbs.fork import fork
from kvjax.verbs.init import init
from kvjax.verbs.offload import complete, offload, onboard, watermark
from kvjax.verbs.release import release
from kvjax.verbs.swap import swap_in, swap_out
from kvjax.verbs.truncate import truncate

VERBS = (
    admit,
    lookup,
    extend,
    commit,
    fork,
    truncate,
    release,
    pin,
    unpin,
    evict,
    forget_namespaces,
    reset,
    offload,
    onboard,
    watermark,
    swap_out,
    swap_in,
    complete,
)
# Of these verbs, several rows are as many transitions, one after the other.
ROW_BY_ROW = ("admit", "fork", "truncate", "release", "swap_out", "swap_in")


@functools.cache
def jitted_verbs() -> dict[str, Callable[..., Any]]:
    """The verbs by name, jitted for short compile times rather than speed."""
    quick = {"xla_backend_optimization_level": 0}
    return {
        verb.__name__: jax.jit(verb, static_argnames=static_options(verb), compiler_options=quick) for verb in VERBS
    }


class Trial:
    """A cache that carries out requests and verifies itself after each.

    Beside the cache it has, in plain Python, the text of each row and the K/V in each slot of the pools of both tiers
    (`Expected`). A row that would read other K/V than its own, and a findable block that does not hold its tokens' K/V,
    are failures; so is a block with other holders than rows and pins.

    Attributes:
      state: the cache.
      mirror: the index by the events alone.
      tally: how often each verb was done ("admit"), each status came ("NO_BLOCKS") and each event ("removed").
    """

    def __init__(
        self, state: CacheState, *, delivers: bool = False, verbs: dict[str, Callable[..., Any]] | None = None
    ):
        """Begins with an empty cache.

        Args:
          state: from `init`.
          delivers: whether to demand that a prompt which fits by the free count is admitted; not for caches with
            windows or a host tier, where the count does not decide.
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
        self._expected = Expected(state.spec)

    def do(self, request: Request) -> Events | None:
        """Carries out one request (see `Request`); None if it is empty (no row to extend, no pin).

        Raises:
          AssertionError: if the cache is not as it should be afterwards.
        """
        verb, fields = request["verb"], cast(Fields, request)
        arguments = arguments_of(fields, self.state, self._expected)
        if arguments is None:
            return None
        before, mirror = jax.device_get(self.state), self.mirror
        wanted = self._fits(arguments) if verb == "admit" and self.delivers else False
        self.state, events = self.verbs[verb](self.state, **arguments)
        events = jax.device_get(events)
        status = [Status(s) for s in events.status.tolist()]
        records = to_list(events)
        self.tally.update(s.name for s in status if s)
        self.tally.update([verb] * all(s == Status.OK for s in status) + [record["kind"] for record in records])
        assert not wanted or status == [Status.OK], f"{status[0].name}, though there are blocks enough"
        if verb != "complete" and (Status.OK not in status or (verb == "extend" and any(status))):
            assert_equal(before, jax.device_get(self.state), f"refused with {[s.name for s in status]}")
        verify_order(verb, events)
        self._verify_unheld(records, before, verb)
        self._verify_removed(records)
        self.mirror = fold(records, mirror)
        if verb in ("commit", "complete") or all(s == Status.OK for s in status):
            self._expected.note(fields, arguments, events, before)
        self.verify()
        return events

    def apply(
        self, fn: Callable[..., Any], *args: Any, partial: bool = False, cut: Mapping[int, int] | None = None
    ) -> Any:
        """Carries out a composite of verbs, and verifies the cache after it as `do` does after a request.

            def step(state, seq, tokens, length):
                state, admitted = kvjax.admit(state, seq, tokens, length)
                ...
                return state, [admitted, committed]

            trial.apply(jax.jit(step), 0, tokens, 5)

        The law: the state is sound; the events, folded in their order, give its index, and remove no block before its
        children; a refused composite has changed nothing; every row and every findable block holds what it claims,
        after the moves and copies that the events order, and the K/V of the tokens that are new. Tokens are new that
        neither the row had before, nor a row that it may be a fork of; with admissions those after the fewest tokens
        that one of them reports as cached. What is held beside the rows counts as pinned.

        Args:
          fn: `(state, *args) -> (state, events)`: an `Events`, or several in their order, in a list, tuple or dict;
            one that `scan` stacked stands for its steps. Jitted or not.
          args: handed on to `fn`.
          partial: whether a part may be done. By default nothing may have changed if any status is not OK; with
            `partial`, if none is.
          cut: {row: tokens left of it} for rows that it cuts back (`truncate`), so that the same tokens are new again.

        Returns:
          The events as `fn` returned them, on the host.

        Raises:
          AssertionError: naming `fn` and what differs.
          ValueError: if `fn` does not return a state of the same spec, and events.
        """
        name = getattr(fn, "__name__", type(fn).__name__)
        before, mirror = jax.device_get(self.state), self.mirror
        state, returned = _result(fn(self.state, *args), before)
        events = _transitions(returned)
        self.state = state
        try:
            self._apply(name, events, before, partial)
            after = jax.device_get(state)
            new = {node: entry for node, entry in self.mirror.nodes.items() if node not in mirror.nodes}
            adopt(self._expected, before, after, new, events, cut or {})
            self.verify()
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{name}: {error}") from error
        return jax.device_get(returned)

    def _apply(self, name: str, events: Sequence[Events], before: CacheState, partial: bool) -> None:
        """Counts and folds the events of a composite, after verifying that it was done or refused, and is sound."""
        status = [Status(s) for one in events for s in one.status.tolist()]
        done = all(s == Status.OK for s in status)
        self.tally.update([s.name for s in status if s] + [name] * done)
        if Status.OK not in status or not (done or partial):
            assert_equal(before, jax.device_get(self.state), f"refused with {[s.name for s in status]}")
        self.sound()
        for one in events:
            records = to_list(one)
            self.tally.update(record["kind"] for record in records)
            mirror = fold(records, self.mirror)
            self._verify_removed(records)
            self.mirror = mirror
        self._verify_index()

    def verify(self) -> None:
        """Compares the cache with the expected one."""
        self.sound()
        state = jax.device_get(self.state)
        self._verify_index()
        self._verify_rows(state)
        self._verify_cached(state)
        self._verify_holders(state)

    def _verify_index(self) -> None:
        """The fold law."""
        found, folded = index_of(self.state), self.mirror.index
        assert found == folded, f"the events do not give the index: {_differing(found, folded)}"

    def _verify_rows(self, state: CacheState) -> None:
        """Each row has the right length, and would read its own text."""
        for seq in range(state.spec.max_seqs):
            row = self._expected.rows.get(seq, Row(0, [], [], 0))
            found = tuple(int(x[seq]) for x in (state.seqs.length, state.seqs.committed, state.seqs.namespace))
            assert found == (row.length, len(row.items), row.namespace), f"row {seq} has {found}"
            kv_ids = np.array(self._expected.kv_ids(row.namespace, row.items), int)
            for number, group in enumerate(state.groups if not row.lost else ()):
                index, seen = self._expected.locate(group, seq, np.arange(len(row.items)))
                held = self._expected.slots[number][index]
                assert np.array_equal(held, kv_ids[seen]), f"row {seq} would read what is not its own"

    def _verify_cached(self, state: CacheState) -> None:
        """Each findable block holds the K/V of the tokens in its event."""
        size = state.spec.block_size
        for (number, block, _), (namespace, path, *_) in self.mirror.nodes.items():
            items = self._expected.items(path)
            start = (len(items) - 1) // size * size
            held = self._expected.slots[number][pool_rows(state.groups[number])[block], : len(items) - start]
            kv_ids = self._expected.kv_ids(namespace, items)[start:]
            assert held.tolist() == kv_ids, f"block {block} does not hold what it claims"

    def _verify_holders(self, state: CacheState) -> None:
        """The holders of a block are rows and pins."""
        pinned = [self._expected.pins, *[[]] * (len(state.groups) - 1)]  # blocks of the first group alone
        for group, pins in zip(state.groups, pinned, strict=True):
            holders = np.concatenate([group.table.reshape(-1), *pins])
            counts = np.bincount(holders[holders >= 0], minlength=len(group.blocks.refcount))
            assert np.array_equal(group.blocks.refcount, counts), "a block has other holders than rows and pins"

    def sound(self) -> None:
        """Verifies the state on its own; for a subclass that must be more lenient."""
        check(self.state)

    def _fits(self, arguments: dict[str, Any]) -> bool:
        """Whether a prompt is sound, its row free, and empty and cached blocks enough for its uncached part."""
        spec, group, length = self.state.spec, jax.device_get(self.state.groups[0]), int(arguments["length"])
        seq, tokens = int(arguments["seq"]), arguments["tokens"][:length]
        if seq in self._expected.rows or seq >= spec.max_seqs or not 1 <= length <= spec.max_length or tokens.min() < 0:
            return False
        match = jax.device_get(self.verbs["lookup"](self.state, **{k: v for k, v in arguments.items() if k != "seq"}))
        whole = match.blocks[match.blocks >= 0]
        idle = int(np.sum(group.blocks.refcount[whole] == 0))
        return -(-length // spec.block_size) - len(whole) <= int(group.num_empty) + int(group.num_cached) - idle

    def _verify_removed(self, records: Sequence[dict[str, Any]]) -> None:
        """No parent was removed before its children."""
        size, left = self.state.spec.block_size, dict(self.mirror.nodes)
        for record in records:
            if record["kind"] != "removed":
                continue
            number, block = record["group"], record["block"]
            namespace, path, *_ = left.pop((number, block, record["generation"]))
            for (other, *_), (ns, longer, *_) in left.items():
                below = len(path) % size == 0 and len(longer) > len(path) and longer[: len(path)] == path
                parent = (number, other, ns) == (0, 0, namespace) and below
                assert not parent, f"block {block} was removed before its child"

    def _verify_unheld(self, records: Sequence[dict[str, Any]], before: CacheState, verb: str) -> None:
        """Nothing was removed that is held, unless a move failed."""
        most = 1 if verb == "truncate" else 0
        for record in records:
            if record["kind"] == "removed" and verb != "complete":
                holders = int(before.groups[record["group"]].blocks.refcount[record["block"]])
                assert holders <= most, f"block {record['block']} was removed, which {holders} hold"


def _transitions(result: Any) -> list[Events]:
    """The events of a composite, one for each transition in their order; those that `scan` stacked taken apart.

    Raises:
      ValueError: if they are no events, or stacked beside others, so that their order is not clear.
    """
    found = jax.tree.leaves(jax.device_get(result), is_leaf=lambda part: isinstance(part, Records))
    kinds = [type(part).__name__ for part in found if not isinstance(part, Events)]
    if kinds or not found:
        raise ValueError(f"fn: got events of {kinds or 'no transition'}, wanted an Events, or several in their order")
    axes = max(events.records.ndim for events in found) - 2
    if axes == 0:
        return found
    if len(found) > 1:
        raise ValueError("fn: got events that scan stacked beside others, wanted all in their order")
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), found[0])
    return [jax.tree.map(lambda x, i=i: x[i], flat) for i in range(len(flat.records))]


def verify_order(verb: str, events: Events) -> None:
    """Each transition reports removed, updated, stored, then copied blocks, and a block as removed or updated once."""
    rows = len(events.status) if verb in ROW_BY_ROW else 1
    for records in np.asarray(events.records).reshape(rows, -1, len(COLUMNS)):
        records = records[records[:, 0] != EventKind.NONE]
        kinds = [EventKind(kind).name.lower() for kind in records[:, 0]]
        assert np.all(np.diff(records[:, 0]) >= 0), f"{verb}: the events come in another order: {kinds}"
        changed = records[np.isin(records[:, 0], (EventKind.REMOVED, EventKind.UPDATED)), 1:4]
        assert len(np.unique(changed, axis=0)) == len(changed), f"{verb}: a block was removed or updated twice: {kinds}"


def _differing(cache: Mapping[Any, Any], events: Mapping[Any, Any]) -> str:
    """The differences of two indexes, in words."""
    alone = {"in the cache": cache.items() - events.items(), "by the events": events.items() - cache.items()}
    parts = []
    for where, entries in alone.items():
        words = [
            f"group {group}, namespace {namespace}, tokens {list(path)}, level {level}, priority {priority}"
            for (group, namespace, path), (level, priority) in sorted(entries, key=str)
        ]
        more = f"; and {len(words) - 3} more" if len(words) > 3 else ""
        parts += [f"{where} alone: {'; '.join(words[:3])}{more}"] if words else []
    return "; ".join(parts)


def _result(result: Any, before: CacheState) -> tuple[CacheState, Any]:
    """The state and the events that a composite returned, or a ValueError."""
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not isinstance(result[0], CacheState) or result[0].spec != before.spec:
        parts = result if isinstance(result, tuple) else (result,)
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"fn: got ({kinds}), wanted (a CacheState of the same spec, its events)")
    return result


def assert_equal(old: Any, new: Any, why: str) -> None:
    """Asserts that two pytrees have equal leaves; `why` begins the message."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        assert np.array_equal(a, b), f"{why}, yet changed {jax.tree_util.keystr(path) or 'the state'}"


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
    evicted, and no block before its children; a refused verb changed nothing; every row would read its own K/V. At the
    end a policy that says `idle` must be idle, and NO_BLOCK among the ids of `touch` and `forget` must change nothing.

    Args:
      policy: on trial.
      seed: of the requests.
      steps: how many requests.
      spec: of the cache; keep it small, so that blocks run short. With windows or a host tier `delivers` must be False.
      delivers: whether the policy finds every victim: a prompt that fits into empty and cached blocks is admitted.
      pstate: the policy's own state to begin with, None for what its `init` makes.

    Returns:
      How often each verb was done, each status came and each kind of event; `["removed"]`: the policy's choices.

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
    _check_padding(policy, trial.state)
    return trial.tally


def _check_padding(policy: EvictionPolicy, state: CacheState) -> None:
    """Verifies that padding among the ids changes nothing: as an index, NO_BLOCK is the last block."""
    group, zero = state.groups[0], np.int32(0)
    cached = np.flatnonzero((np.asarray(group.blocks.fill) > 0) & (np.asarray(group.blocks.refcount) == 0))[:3]
    ids = cached.astype(np.int32) if len(cached) else np.zeros(1, np.int32)
    padded = np.concatenate(
        [np.stack([ids, np.full_like(ids, NO_BLOCK)], axis=1).reshape(-1), [NO_BLOCK]], dtype=np.int32
    )
    calls = {"touch": lambda ids: policy.touch(group.policy, group.blocks, ids, zero)}
    if policy.forget is not None:
        calls["forget"] = functools.partial(policy.forget, group.policy)
    for name, call in calls.items():
        alone, together = jax.device_get((jax.jit(call)(ids), jax.jit(call)(padded)))
        assert_equal(alone, together, f"{name}: NO_BLOCK is padding among the ids")


def _check_idle(policy: EvictionPolicy, state: CacheState) -> None:
    """Verifies that a policy returns its state unchanged for an empty request."""
    group, nobody, zero = state.groups[0], np.full(3, NO_BLOCK, np.int32), np.int32(0)
    calls = {
        "touch": lambda pstate, blocks: policy.touch(pstate, blocks, nobody, zero),
        "victims": lambda pstate, blocks: policy.victims(pstate, blocks, lambda ids: ids >= 0, zero, zero, 3)[1],
        "forget": lambda pstate, blocks: pstate if policy.forget is None else policy.forget(pstate, nobody),
    }
    for name, call in calls.items():
        after = jax.jit(call)(group.policy, group.blocks)
        assert_equal(jax.device_get(group.policy), jax.device_get(after), f"{name}: an idle policy, an empty request")
