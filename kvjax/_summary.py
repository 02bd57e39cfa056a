# SPDX-License-Identifier: Apache-2.0
"""One line for a cache, whatever jax makes of it: traced, donated, batched, shapes alone. `state` is a `CacheState`."""

from __future__ import annotations

import enum
import types
from typing import Any

import jax
import numpy as np

from kvjax._arrays import unreadable


def one_line(owner: Any, state: Any, *sizes: str) -> str:
    """One line for a state or for its owner, traced or donated too: shapes, sizes, and counts if it has any."""
    spec, why = state.spec, uncounted(owner, state)
    line = f"blocks of {spec.block_size:,} tokens, {spec.max_seqs:,} rows of up to {spec.max_blocks_per_seq:,} blocks"
    line = ", ".join([line, *sizes])
    for number, group in enumerate(spec.groups):
        host = f" and {group.num_host_blocks:,} on the host" if group.num_host_blocks else ""
        counts = f"{group.num_blocks:,} blocks{host}" if why else _counted(state, number)
        line += f"; {spec.group_name(number)}{counts}"
    return f"{type(owner).__name__}({line}{f'; {why}' if why else ''})"


def uncounted(owner: Any, state: Any) -> str:
    """Why the blocks of an owner's state cannot be counted; "" if they can."""
    if why := unreadable((state, getattr(owner, "pools", None), getattr(owner, "host", None))):
        return why
    shapes = [state.seqs.length.shape, *(group.blocks.refcount.shape for group in state.groups)]
    if shapes == [(state.spec.max_seqs,), *((group.num_ids,) for group in state.spec.groups)]:
        return ""
    return f"batched, {list(shapes[0][:-1])}" if shapes[0][:-1] else "of other shapes"


def _counted(state: Any, number: int) -> str:
    """The counts of a group as `kvjax.debug.stats` has them, without a view of each block; of broken contents too."""
    group, seqs = jax.device_get((state.groups[number], state.seqs))
    blocks, condition, size = group.blocks, conditions(group), state.spec.block_size
    written = np.maximum(slots_reached(group.table, seqs.committed, len(condition), size), blocks.fill)
    counts = block_counts(condition)
    stats = types.SimpleNamespace(
        total_slots=counts["num_blocks"] * size,
        filled_slots=int(
            np.sum(written[condition == Condition.ACTIVE]) + np.sum(blocks.fill[condition == Condition.CACHED])
        ),
        active_rows=int(np.sum(seqs.length > 0)), num_rows=state.spec.max_seqs,
        in_transit_blocks=int(np.sum(group.moving(np.arange(len(condition), dtype=np.int32)))), **counts,
    )  # fmt: skip
    return "; ".join(count_lines(stats))


class Condition(enum.IntEnum):
    """The condition of a block. UNUSED blocks lie beyond the capacity that the state was made with.

    The last three are the same on the host; swapped-out rows and pins hold ON_HOST_ACTIVE blocks.
    """

    UNUSED = 0
    EMPTY = 1
    CACHED = 2
    ACTIVE = 3
    ON_HOST_EMPTY = 4
    ON_HOST_CACHED = 5
    ON_HOST_ACTIVE = 6


def conditions(group: Any) -> np.ndarray:
    """i32[B]; the `Condition` of each block of a group on the host; tolerates broken contents."""
    ids, blocks = np.arange(len(group.blocks.fill), dtype=np.int32), group.blocks
    on_device = np.asarray(group.on_device(ids))
    cached_or_empty = np.where(blocks.fill > 0, Condition.CACHED, Condition.EMPTY)
    condition = np.where(blocks.refcount > 0, Condition.ACTIVE, cached_or_empty)
    unused = (condition == Condition.EMPTY) & (ids >= group.num_blocks) & (ids < len(group.empty)) & on_device
    to_host = Condition.ON_HOST_EMPTY - Condition.EMPTY
    return np.where(unused, Condition.UNUSED, np.where(on_device, condition, condition + to_host))


def block_counts(condition: np.ndarray) -> dict[str, int]:
    """The numbers of blocks of each condition and tier, under the names of their fields in `kvjax.debug.Stats`."""
    count = np.bincount(condition, minlength=len(Condition)).tolist()
    device, host = count[Condition.EMPTY : Condition.ON_HOST_EMPTY], count[Condition.ON_HOST_EMPTY :]
    kinds = ("empty_blocks", "cached_blocks", "active_blocks")
    counts = dict(zip((*kinds, *(f"host_{kind}" for kind in kinds)), (*device, *host), strict=True))
    return {"num_blocks": sum(device), "host_blocks": sum(host), **counts}


def slots_reached(table: np.ndarray, num_tokens: np.ndarray, num_ids: int, size: int) -> np.ndarray:
    """i32[B]; slots from each block's start that the first num_tokens i32[S] tokens of rows with this table reach."""
    inside = np.clip(num_tokens[:, None] - np.arange(table.shape[1]) * size, 0, size)
    in_range, slots = (table >= 0) & (table < num_ids), np.zeros(num_ids, np.int32)
    np.maximum.at(slots, table[in_range], inside[in_range])
    return slots


def count_lines(stats: Any, since: Any = None) -> list[str]:
    """Counts in words, as `kvjax.debug.Stats` has them, of both tiers; with `since`, earlier counts, their changes."""
    if since is None and not stats.num_blocks:
        return ["num_blocks out of range: no block is in use"]
    number = lambda name: change(getattr(since or stats, name), getattr(stats, name))  # noqa: E731
    blocks, on_host = (
        ", ".join(f"{number(f'{tier}{kind}_blocks')} {kind}" for kind in ("active", "cached", "empty"))
        for tier in ("", "host_")
    )
    slots = "" if since else f"; {stats.filled_slots:,} of {stats.total_slots:,} slots filled"
    lines = [
        f"{number('num_blocks')} blocks: {blocks}{slots}; {number('active_rows')} of {stats.num_rows:,} rows in use"
    ]
    if stats.host_blocks:
        moving = number("in_transit_blocks")
        lines.append(f"on the host {stats.host_blocks:,} blocks: {on_host}; {moving} on the move")
    return lines


def change(old: int, new: int) -> str:
    """The new number, behind the old one if that differs."""
    return f"{new:,}" if old == new else f"{old:,} -> {new:,}"
