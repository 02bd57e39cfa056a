# SPDX-License-Identifier: Apache-2.0
"""One line for a cache, whatever jax makes of it: traced, donated, batched, shapes alone. `state` is a `CacheState`."""

from __future__ import annotations

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
    blocks, ids = group.blocks, np.arange(len(group.blocks.fill), dtype=np.int32)
    on_device, active = np.asarray(group.on_device(ids)), blocks.refcount > 0
    cached = ~active & (blocks.fill > 0)
    unused = on_device & ~active & ~cached & (ids >= group.num_blocks) & (ids < len(group.empty))
    written = np.maximum(slots_reached(group.table, seqs.committed, len(ids), state.spec.block_size), blocks.fill)
    counts: dict[str, Any] = {
        f"{tier}{kind}blocks": int(np.sum(where & in_tier))
        for tier, in_tier in (("", on_device & ~unused), ("host_", ~on_device))
        for kind, where in (("", True), ("active_", active), ("cached_", cached), ("empty_", ~active & ~cached))
    }
    return "; ".join(
        count_lines(
            types.SimpleNamespace(
                num_blocks=counts["blocks"], total_slots=counts["blocks"] * state.spec.block_size,
                filled_slots=int(np.sum(np.where(active, written, np.where(cached, blocks.fill, 0))[on_device])),
                active_rows=int(np.sum(seqs.length > 0)), num_rows=state.spec.max_seqs,
                in_transit_blocks=int(np.sum(group.moving(ids))), **counts,
            )
        )
    )  # fmt: skip


def slots_reached(table: np.ndarray, num_tokens: np.ndarray, num_ids: int, size: int) -> np.ndarray:
    """i32[B]; slots from each block's start that the first num_tokens i32[S] tokens of rows with this table reach."""
    inside = np.clip(num_tokens[:, None] - np.arange(table.shape[1]) * size, 0, size)
    in_range, slots = (table >= 0) & (table < num_ids), np.zeros(num_ids, np.int32)
    np.maximum.at(slots, table[in_range], inside[in_range])
    return slots


def count_lines(stats: Any) -> list[str]:
    """Counts in words, of the device and of the host if there is one; stats has the fields of `kvjax.debug.Stats`."""
    if not stats.num_blocks:
        return ["num_blocks out of range: no block is in use"]
    lines = [
        f"{stats.num_blocks:,} blocks: {stats.active_blocks:,} active, {stats.cached_blocks:,} cached, "
        f"{stats.empty_blocks:,} empty; {stats.filled_slots:,} of {stats.total_slots:,} slots filled; "
        f"{stats.active_rows:,} of {stats.num_rows:,} rows in use"
    ]
    if stats.host_blocks:
        lines.append(
            f"on the host {stats.host_blocks:,} blocks: {stats.host_active_blocks:,} active, "
            f"{stats.host_cached_blocks:,} cached, {stats.host_empty_blocks:,} empty; "
            f"{stats.in_transit_blocks:,} on the move"
        )
    return lines
