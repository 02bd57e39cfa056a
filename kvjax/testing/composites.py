# SPDX-License-Identifier: Apache-2.0
"""A composite of verbs on trial: its rows, pins and bytes, from the states and the events."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.events.mirror import Node
from kvjax.events.records import Events, Records
from kvjax.state import LOST, NO_BLOCK, CacheState
from kvjax.testing.expected import Expected, Item, Row, pool_rows


def transitions(result: Any) -> list[Events]:
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


def adopt(
    expected: Expected, before: CacheState, after: CacheState, new: Mapping[Node, tuple], events: Sequence[Events],
    cut: Mapping[int, int],
) -> None:  # fmt: skip
    """Updates the expected cache by a composite: the bytes moved and copied, then the tokens written.

    The state after is sound. `new` are nodes of the mirror that the composite has stored, `events` those of its
    transitions, and `cut` {row: tokens that were left of it} for rows that it has cut back.
    """
    held = [
        set(slots[_pool_rows_in_use(group)].flat) for slots, group in zip(expected.slots, before.groups, strict=True)
    ]
    cached = [int(n) for one in events for n, queried in zip(one.cached, one.queried, strict=True) if queried > 0]
    old = expected.rows
    for one in events:
        expected.move(one)
    expected.rows = dict(_rows(expected, after))
    claims = []  # group, indices of slots, the ids of their K/V, whether they are new
    for seq, row in expected.rows.items():
        start = min([*_starts(old, row, seq, before, after), *cached], default=0)
        start, positions = min(start, cut.get(seq, start)), np.arange(len(row.items))
        kv_ids = np.array(expected.kv_ids(row.namespace, row.items), int)
        for number, group in enumerate(after.groups if not row.lost else ()):
            index, seen = expected.locate(group, seq, positions)
            claims.append((number, index, kv_ids[seen], positions[seen] >= start))
    for (number, block, _), (namespace, path, *_) in new.items():
        items = expected.items(path)
        start = min([*_starts(old, Row(namespace, items, items, len(items))), *cached], default=0)
        positions = np.arange((len(items) - 1) // expected.spec.block_size * expected.spec.block_size, len(items))
        index = np.full(len(positions), pool_rows(after.groups[number])[block]), positions % expected.spec.block_size
        claims.append((number, index, np.array(expected.kv_ids(namespace, items))[positions], positions >= start))
    computed = {kv_id for *_, kv_ids, is_new in claims for kv_id in kv_ids[is_new].tolist()}
    for number, index, kv_ids, is_new in claims:  # also copies that were made after they had been computed
        is_new = is_new | np.array([kv_id in computed or kv_id not in held[number] for kv_id in kv_ids.tolist()], bool)
        expected.slots[number][index[0][is_new], index[1][is_new]] = kv_ids[is_new]
    expected.pins = _pins(expected, after)


def _pool_rows_in_use(group: Any) -> np.ndarray:
    """The pool rows of blocks that are active or cached."""
    return pool_rows(group)[(group.blocks.refcount > 0) | (group.blocks.fill > 0)]


def _starts(
    old: Mapping[int, Row], row: Row, seq: int = -1, before: CacheState | None = None, after: CacheState | None = None
) -> Iterator[int]:
    """The tokens of a text that rows had before: the row itself, or those that it may be a fork of."""
    own = old.get(seq)
    if own and own.namespace == row.namespace:
        common = _common(own.items, row.items)
        if common == min(len(own.items), len(row.items)):
            yield common
            return
    for other, source in old.items():
        if source.namespace != row.namespace:
            continue
        common = _common(source.items, row.items)
        forked = before is None or after is None or _first(before, other) == _first(after, seq)
        if forked and (common > 0 or (not source.items and source.prompt[:1] == row.items[:1])):
            yield common


def _first(state: CacheState, seq: int) -> int:
    return int(state.groups[0].table[seq][0])


def _common(first: Sequence[Item], second: Sequence[Item]) -> int:
    """Leading items that two texts have in common."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rows(expected: Expected, state: CacheState) -> Iterator[tuple[int, Row]]:
    """The rows in use, with the text that the blocks of the first group hold."""
    tree, size = state.groups[0], expected.spec.block_size
    for seq in np.flatnonzero(state.seqs.length).tolist():
        namespace, length, committed = (
            int(x[seq]) for x in (state.seqs.namespace, state.seqs.length, state.seqs.committed)
        )
        blocks = tree.table[seq][: -(-committed // size)]
        parts = [x[blocks].reshape(-1)[:committed].tolist() for x in tree.blocks.text.parts().values()]
        items: list[Any] = [(token, *extra, 0)[:2] for token, *extra in zip(*parts, strict=True)]
        own = expected.rows.get(seq, Row(namespace, [], [], 0))
        prompt = own.prompt[:length] if _common(own.prompt, items) == min(len(own.prompt), committed) else items
        lost = own.lost or any(_has_lost(group, seq) for group in state.groups)
        yield (
            seq,
            Row(namespace, prompt, items, length, swapped_out=bool(np.asarray(state.seqs.swapped_out)[seq]), lost=lost),
        )


def _has_lost(group: Any, seq: int) -> bool:
    held = group.table[seq][group.table[seq] >= 0]
    return bool(np.any(group.blocks.hits[held] == LOST))


def _pins(expected: Expected, state: CacheState) -> list[np.ndarray]:
    """The pins that still hold, and all other blocks held beside the rows, a row's length at a time."""
    group, width = state.groups[0], expected.spec.max_blocks_per_seq
    left = np.asarray(group.blocks.refcount) - np.bincount(
        group.table[group.table >= 0], minlength=len(group.blocks.refcount)
    )
    pins = []
    for pin in expected.pins:
        if np.all(left[pin[pin >= 0]] > 0):
            left[pin[pin >= 0]] -= 1
            pins.append(pin)
    more = np.repeat(np.arange(len(left), dtype=np.int32), np.maximum(left, 0))
    parts = [more[i : i + width] for i in range(0, len(more), width)]
    return [*pins, *(np.pad(part, (0, width - len(part)), constant_values=NO_BLOCK) for part in parts)]


def differing(cache: Mapping[Any, Any], events: Mapping[Any, Any]) -> str:
    """The differences of two indexes, in words."""
    alone = {"in the cache": cache.items() - events.items(), "by the events": events.items() - cache.items()}
    parts = []
    for where, entries in alone.items():
        words = [_entry(*entry) for entry in sorted(entries, key=str)]
        more = f"; and {len(words) - 3} more" if len(words) > 3 else ""
        parts += [f"{where} alone: {'; '.join(words[:3])}{more}"] if words else []
    return "; ".join(parts)


def _entry(key: tuple[int, int, tuple], value: Collection[int]) -> str:
    group, namespace, path = key
    level, priority = value
    return f"group {group}, namespace {namespace}, tokens {list(path)}, level {level}, priority {priority}"
