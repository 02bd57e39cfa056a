# SPDX-License-Identifier: Apache-2.0
"""A cache on trial, which verifies itself after each request."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from kvjax.checks import static_options
from kvjax.debug.invariants import check
from kvjax.events.mirror import Mirror, Node, fold, index_of, to_list
from kvjax.events.records import COLUMNS, EventKind, Events, Records, Status
from kvjax.state import CacheState
from kvjax.testing.expected import Expected, Fields, Row, adopt, arguments_of, pool_rows
from kvjax.testing.requests import Request
from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.backup import backup
from kvjax.verbs.commit import commit
from kvjax.verbs.control import evict, forget_namespaces, pin, reset, unpin
from kvjax.verbs.extend import extend
from kvjax.verbs.fork import fork
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
    backup,
    swap_out,
    swap_in,
    complete,
)
# In a call of these verbs, the rows are separate transitions, in order.
ROW_BY_ROW = ("admit", "fork", "truncate", "release", "swap_out", "swap_in")


@functools.cache
def jitted_verbs() -> dict[str, Callable[..., Any]]:
    """The verbs by name, jitted for fast compilation rather than fast execution."""
    quick = {"xla_backend_optimization_level": 0}
    return {
        verb.__name__: jax.jit(verb, static_argnames=static_options(verb), compiler_options=quick) for verb in VERBS
    }


class Trial:
    """A cache that is verified after each request.

    In plain Python it also tracks the text of each row and the K/V in each slot of the pools of both tiers
    (`Expected`). A trial fails if a row would read the K/V of another text, if a findable block does not hold its
    tokens' K/V, or if a block has holders other than rows and pins.

    Attributes:
      state: the cache.
      mirror: the index, built only from the events.
      tally: counts of successful requests by verb ("admit"), statuses ("NO_BLOCKS") and events ("removed").
    """

    def __init__(
        self, state: CacheState, *, must_admit: bool = False, verbs: dict[str, Callable[..., Any]] | None = None
    ):
        """Begins with an empty cache.

        Args:
          state: an empty state from `init`.
          must_admit: whether every prompt must be admitted if it fits into the free blocks. Not for caches with windows
            or a host tier, where the number of free blocks does not decide.
          verbs: jitted verbs by name; defaults to the library's.

        Raises:
          ValueError: for `must_admit` with such a cache.
        """
        if must_admit and (len(state.spec.groups) > 1 or state.spec.has_host):
            raise ValueError("must_admit: got True, wanted False for a cache with windows or a host tier")
        self.state = state
        self.must_admit = must_admit
        self.verbs = jitted_verbs() if verbs is None else verbs
        self.mirror = Mirror()
        self.tally: collections.Counter[str] = collections.Counter()
        self._expected = Expected(state.spec)

    def do(self, request: Request) -> Events | None:
        """Carries out a request (see `Request`). Returns None if it is empty (no row to extend, no pin).

        Raises:
          AssertionError: if the cache differs from the expected cache afterwards.
        """
        verb = request["verb"]
        fields = cast(Fields, request)
        arguments = arguments_of(fields, self.state, self._expected)
        if arguments is None:
            return None
        before = jax.device_get(self.state)
        mirror = self.mirror
        must_succeed = verb == "admit" and self.must_admit and self._fits(arguments)
        self.state, events = self.verbs[verb](self.state, **arguments)
        events = jax.device_get(events)
        status = [Status(s) for s in events.status.tolist()]
        records = to_list(events)
        self.tally.update(s.name for s in status if s)
        self.tally.update([verb] * all(s == Status.OK for s in status) + [record["kind"] for record in records])
        assert not must_succeed or status == [Status.OK], f"{status[0].name}, though there are enough blocks"
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
        self,
        fn: Callable[..., Any],
        *args: Any,
        partial: bool = False,
        cut: Mapping[int, int] | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ) -> Any:
        """Carries out a composite of verbs, and verifies the cache afterwards as `do` does after a request.

            def step(state, seq, tokens, length):
                state, admitted = kvjax.admit(state, seq, tokens, length)
                ...
                return state, [admitted, committed]

            trial.apply(jax.jit(step), 0, tokens, 5)

        It verifies these rules. The state is sound. The events, folded in order, give its index, and remove no block
        before its children. A refused composite has changed nothing. Every row and every findable block holds the right
        K/V, after the ordered moves and copies, and after the new tokens were written. A token is new if neither the
        row itself nor a possible source of a fork had it before. With admissions, tokens after the lowest reported
        number of cached tokens are new. Blocks that no row holds count as pinned.

        Args:
          fn: from `(state, *args)` to `(state, events)`, jitted or not. The events are an `Events`, or several in their
            order, in a list, tuple or dict. Events stacked by `scan` stand for its steps.
          args: arguments of `fn`.
          partial: whether `fn` may do a part of its work. By default nothing may have changed unless all statuses are
            OK. With `partial`, nothing may have changed unless some status is OK.
          cut: {row: remaining tokens} of rows cut back by `truncate`, so the same tokens are new again.
          prompts: all prompts that `fn` computes. With them, a stored text must be the beginning of a prompt, or go on
            after a whole prompt. A prompt committed from its start after a hit is neither.

        Returns:
          The events of `fn`, on the host.

        Raises:
          AssertionError: if the cache differs from the expected cache, with the name of `fn`.
          ValueError: if `fn` does not return a state of the same spec, and events.
        """
        name = getattr(fn, "__name__", type(fn).__name__)
        before = jax.device_get(self.state)
        mirror = self.mirror
        name = getattr(fn, "__name__", type(fn).__name__)
        state, returned = _result(fn(self.state, *args), before)
        events = _transitions(returned)
        self.state = state
        try:
            self._apply(name, events, before, partial)
            after = jax.device_get(state)
            new = {node: entry for node, entry in self.mirror.nodes.items() if node not in mirror.nodes}
            adopt(self._expected, before, after, new, events, cut or {})
            self._verify_prompts(new, prompts)
            self.verify()
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{name}: {error}") from error
        return jax.device_get(returned)

    def _apply(self, name: str, events: Sequence[Events], before: CacheState, partial: bool) -> None:
        """Counts and folds the events of a composite. The composite must have been done or refused, and be sound."""
        status = [Status(s) for transition in events for s in transition.status.tolist()]
        done = all(s == Status.OK for s in status)
        self.tally.update([s.name for s in status if s] + [name] * done)
        if Status.OK not in status or not (done or partial):
            assert_equal(before, jax.device_get(self.state), f"refused with {[s.name for s in status]}")
        self.sound()
        for transition in events:
            records = to_list(transition)
            self.tally.update(record["kind"] for record in records)
            mirror = fold(records, self.mirror)
            self._verify_removed(records)
            self.mirror = mirror
        self._verify_index()

    def verify(self) -> None:
        """Compares the cache with the expected cache."""
        self.sound()
        state = jax.device_get(self.state)
        self._verify_index()
        self._verify_rows(state)
        self._verify_cached(state)
        self._verify_holders(state)

    def _verify_prompts(self, new: Mapping[Node, tuple], prompts: Sequence[Sequence[int]]) -> None:
        """Verifies the stored texts: each begins or continues a prompt, if prompts are given."""
        texts = [list(prompt) for prompt in prompts]
        for (_, block, _), (_, path, *_) in new.items():
            text = [token for token, _ in self._expected.items(path)]
            belongs = any(text[: len(prompt)] == prompt[: len(text)] for prompt in texts)
            assert belongs or not texts, f"block {block} was stored as the text {text}, which continues no prompt"

    def _verify_index(self) -> None:
        """Verifies the fold law."""
        index = index_of(self.state)
        folded = self.mirror.index
        assert index == folded, f"the events do not give the index: {_differing(index, folded)}"

    def _verify_rows(self, state: CacheState) -> None:
        """Verifies the length of each row, and the text to be read."""
        for seq in range(state.spec.max_seqs):
            row = self._expected.rows.get(seq, Row(0, [], [], 0))
            actual = tuple(int(x[seq]) for x in (state.seqs.length, state.seqs.committed, state.seqs.namespace))
            assert actual == (row.length, len(row.items), row.namespace), f"row {seq} has {actual}"
            kv_ids = np.array(self._expected.kv_ids(row.namespace, row.items), int)
            for group_index, group in enumerate(state.groups if not row.lost else ()):
                index, seen = self._expected.locate(group, seq, np.arange(len(row.items)))
                held = self._expected.slots[group_index][index]
                assert np.array_equal(held, kv_ids[seen]), f"row {seq} would read K/V of another text"

    def _verify_cached(self, state: CacheState) -> None:
        """Verifies the K/V of each findable block by the tokens in its event."""
        size = state.spec.block_size
        for (group_index, block, _), (namespace, path, *_) in self.mirror.nodes.items():
            items = self._expected.items(path)
            start = (len(items) - 1) // size * size
            pool_row = pool_rows(state.groups[group_index])[block]
            held = self._expected.slots[group_index][pool_row, : len(items) - start]
            kv_ids = self._expected.kv_ids(namespace, items)[start:]
            assert held.tolist() == kv_ids, f"block {block} does not hold the K/V of its tokens"

    def _verify_holders(self, state: CacheState) -> None:
        """Verifies the holders of each block: rows and pins."""
        pinned = [self._expected.pins, *[[]] * (len(state.groups) - 1)]  # pins hold blocks of the first group
        for group, pins in zip(state.groups, pinned, strict=True):
            holders = np.concatenate([group.table.reshape(-1), *pins])
            counts = np.bincount(holders[holders >= 0], minlength=len(group.blocks.refcount))
            assert np.array_equal(group.blocks.refcount, counts), "a block has other holders than rows and pins"

    def sound(self) -> None:
        """Verifies the invariants of the state. Override it in a more lenient subclass."""
        check(self.state)

    def _fits(self, arguments: dict[str, Any]) -> bool:
        """Whether a prompt is valid, its row is free, and there are enough free blocks for its uncached part."""
        spec = self.state.spec
        group = jax.device_get(self.state.groups[0])
        length = int(arguments["length"])
        seq = int(arguments["seq"])
        tokens = arguments["tokens"][:length]
        if seq in self._expected.rows or seq >= spec.max_seqs or not 1 <= length <= spec.max_length or tokens.min() < 0:
            return False
        match = jax.device_get(self.verbs["lookup"](self.state, **{k: v for k, v in arguments.items() if k != "seq"}))
        matched = match.blocks[match.blocks >= 0]
        num_idle = int(np.sum(group.blocks.refcount[matched] == 0))
        num_free = int(group.num_empty) + int(group.num_cached) - num_idle
        return -(-length // spec.block_size) - len(matched) <= num_free

    def _verify_removed(self, records: Sequence[dict[str, Any]]) -> None:
        """Verifies the order of removals: children before their parents."""
        size = self.state.spec.block_size
        remaining = dict(self.mirror.nodes)
        for record in records:
            if record["kind"] != "removed":
                continue
            group_index = record["group"]
            block = record["block"]
            namespace, path, *_ = remaining.pop((group_index, block, record["generation"]))
            for (other_group, *_), (other_namespace, longer, *_) in remaining.items():
                below = len(path) % size == 0 and len(longer) > len(path) and longer[: len(path)] == path
                is_parent = (group_index, other_group, other_namespace) == (0, 0, namespace) and below
                assert not is_parent, f"block {block} was removed before its child"

    def _verify_unheld(self, records: Sequence[dict[str, Any]], before: CacheState, verb: str) -> None:
        """Verifies the removed blocks: none was held, unless a move failed."""
        max_holders = 1 if verb == "truncate" else 0
        for record in records:
            if record["kind"] == "removed" and verb != "complete":
                holders = int(before.groups[record["group"]].blocks.refcount[record["block"]])
                assert holders <= max_holders, f"block {record['block']} was removed, which {holders} hold"


def _transitions(result: Any) -> list[Events]:
    """The events of a composite, an `Events` for each transition in their order. Divides events stacked by `scan`.

    Raises:
      ValueError: if there are no events, or stacked and other events without a clear order.
    """
    events = jax.tree.leaves(jax.device_get(result), is_leaf=lambda part: isinstance(part, Records))
    kinds = [type(part).__name__ for part in events if not isinstance(part, Events)]
    if kinds or not events:
        raise ValueError(f"fn: got events of {kinds or 'no transition'}, wanted an Events, or several in their order")
    axes = max(transition.records.ndim for transition in events) - 2
    if axes == 0:
        return events
    if len(events) > 1:
        raise ValueError("fn: got events stacked by scan together with others, wanted all in their order")
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), events[0])
    return [jax.tree.map(lambda x, i=i: x[i], flat) for i in range(len(flat.records))]


def verify_order(verb: str, events: Events) -> None:
    """Verifies the order removed, updated, stored, copied in each transition, with a single change of each block."""
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
        num_more = len(words) - 3
        suffix = f"; and {num_more} more" if num_more > 0 else ""
        parts += [f"{where} alone: {'; '.join(words[:3])}{suffix}"] if words else []
    return "; ".join(parts)


def _result(result: Any, before: CacheState) -> tuple[CacheState, Any]:
    """The state and the events returned by a composite. Other results are a ValueError."""
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not isinstance(result[0], CacheState) or result[0].spec != before.spec:
        parts = result if isinstance(result, tuple) else (result,)
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"fn: got ({kinds}), wanted (a CacheState of the same spec, its events)")
    return result


def assert_equal(old: Any, new: Any, reason: str) -> None:
    """Asserts the equality of two pytrees' leaves. `reason` begins the message."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        assert np.array_equal(a, b), f"{reason}, yet changed {jax.tree_util.keystr(path) or 'the state'}"
