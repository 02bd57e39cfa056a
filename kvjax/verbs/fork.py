# SPDX-License-Identifier: Apache-2.0
"""`fork` and `beam_step`: rows become copies of each other without moving a byte."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import add, fence, pick, put, repeated
from kvjax.blocks import windows
from kvjax.blocks.holders import give_back_shared
from kvjax.blocks.rows import read_row, write_row
from kvjax.checks import each_row, integers, on_state, one_or_more
from kvjax.events.records import Events, Status
from kvjax.state import CacheState
from kvjax.verbs._request import assemble, first_failure, scan_rows


@on_state
def fork(state: CacheState, src: ArrayLike, dst: ArrayLike) -> tuple[CacheState, Events]:
    """Makes the free row `dst` share all blocks of row `src`; the first row to write into the last block copies it.

    Several forks in a call run in order, each all or nothing, so a later fork may use the new row of an earlier fork.

    Args:
      state: the cache.
      src: i32[] or i32[R]; a row in use whose tokens are all committed. A single number stands for all forks.
      dst: i32[] or i32[R]; a free row.

    Returns:
      The cache, and no events. Status BAD_REQUEST or HELD (`dst` in use).

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.fork(state, 0, 1)
      >>> state.groups[0].table[:, :3].tolist(), state.groups[0].blocks.refcount[:3].tolist()
      ([[0, 1, 2], [0, 1, 2]], [2, 2, 2])
      >>> state, _ = kvjax.extend(state, [False, True], 4)  # row 1 is going to write: it gets a copy of the last block
      >>> state.groups[0].table[:, :3].tolist(), state.groups[0].blocks.refcount[:3].tolist()
      ([[0, 1, 2], [0, 1, 3]], [2, 2, 1])

    Source: vLLM's BlockSpaceManager.fork.
    """
    dst = one_or_more("dst", dst)
    src = each_row("src", src, dst.shape)
    if dst.ndim > 0:
        return scan_rows(fork, state, src, dst)
    old = read_row(state, src)
    new = read_row(state, dst)
    bad = ~old.exists | ~new.exists | (old.length == 0) | (old.length != old.committed) | (src == dst) | old.swapped_out
    status = first_failure((bad, Status.BAD_REQUEST), (new.length > 0, Status.HELD))
    ok = status == Status.OK
    groups = []
    for group, table in zip(state.groups, old.tables, strict=True):
        refcount = add(group.blocks.refcount, table, 1, ok & (table >= 0))
        groups.append(group.replace(blocks=group.blocks.replace(refcount=refcount)))
    state = state.replace(groups=tuple(groups))
    state = write_row(state, dst, ok, old.metadata, old.tables)
    return state, assemble(state, status)


@on_state
def beam_step(
    state: CacheState, seqs: ArrayLike, parents: ArrayLike, *, now: ArrayLike = 0
) -> tuple[CacheState, Events]:
    """Lets each row of a beam continue a row of the beam: row seqs[i] becomes a copy of row seqs[parents[i]].

    The rows share blocks. Only a partly filled last block that two rows continue is copied, when the first of them
    writes into it (`extend`). Rows without a successor are dropped: their findable blocks stay cached, and their other
    blocks become empty.

    Args:
      state: the cache.
      seqs: i32[W]; the beam's rows, all different and in use, with all tokens committed.
      parents: i32[W]; indices into `seqs`. A row's own index leaves the row unchanged.
      now: i32[]; the time in ms.

    Returns:
      The cache, and no events. Status BAD_REQUEST for all rows or none.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.fork(state, 0, 1)
      >>> state, _ = kvjax.truncate(state, 1, 8)
      >>> state, _ = kvjax.beam_step(state, [0, 1], [0, 0])  # both rows go on from row 0
      >>> state.seqs.length.tolist(), state.groups[0].table[:, :3].tolist()
      ([10, 10], [[0, 1, 2], [0, 1, 2]])

    Source: vLLM's and TensorRT-LLM's beam search, which fork and free single rows.
    """
    seqs = integers("seqs", seqs, ("W",))
    parents = integers("parents", parents, seqs.shape)
    now = integers("now", now, ())
    old = state.seqs
    is_valid = (seqs >= 0) & (seqs < state.spec.max_seqs) & ~repeated(seqs)
    length = pick(old.length, seqs)
    bad = ~is_valid | (length == 0) | (length != pick(old.committed, seqs))
    bad = jnp.any(bad | pick(old.swapped_out, seqs) | (parents < 0) | (parents >= seqs.shape[0]))
    ok = jnp.broadcast_to(~bad, seqs.shape)
    num_heirs = jnp.sum(parents[None, :] == np.arange(seqs.shape[0], dtype=np.int32)[:, None], axis=1, dtype=jnp.int32)

    groups = []
    for group_index, group in enumerate(state.groups):
        table = pick(group.table, seqs)
        moved = pick(group.table, pick(seqs, parents))
        all_rows, table, moved = fence(group.table, table, moved)
        # Blocks are freed from the tail of a row to its head.
        ids = table.T[::-1].reshape(-1)
        less = jnp.broadcast_to(1 - num_heirs, table.T.shape).reshape(-1)
        group = group.replace(table=put(all_rows, seqs, moved, ok))
        policy = windows.policy_of(state, group_index)
        groups.append(give_back_shared(group, policy, ids, less, (ids >= 0) & ~bad, now))

    state = state.replace(groups=tuple(groups), seqs=put(old, seqs, pick(old, pick(seqs, parents)), ok))
    return state, assemble(state, first_failure((jnp.broadcast_to(bad, seqs.shape), Status.BAD_REQUEST)))
