# SPDX-License-Identifier: Apache-2.0
"""`thin` lets go of blocks in the middle of rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import count, either, pick, put, repeated
from kvjax.blocks import holes
from kvjax.checks import flags, integers, on_state, one_or_more, static_int32
from kvjax.events.records import Events, Status
from kvjax.state import CacheState
from kvjax.verbs._request import assemble, first_failure, replace_group
from kvjax.verbs.control import leave_index_with


@on_state
def thin(
    state: CacheState, seq: ArrayLike, columns: ArrayLike, *, max_removed: int | None = None, now: ArrayLike = 0
) -> tuple[CacheState, Events]:
    """Lets go of blocks in the middle of rows, to free their memory. The rows keep their positions and lengths.

    Views no longer read these blocks: attention of a full-attention layer equals dense attention over the other blocks.
    K/V computed after such a hole are approximate, so a row with a hole publishes nothing any more, and neither do its
    forks. A cut by `truncate` to the tokens before its first hole makes it a row like any other.

    A block is freed if no row reads it and no pin holds it. If it is findable, it stays cached. The findable blocks
    after it leave the index with their descendants if rows still hold them, because a holder must hold the whole
    prefix. A block with other readers stays theirs, and findable. If they release it later, your next call of `thin`
    frees it, even a call without columns.

    The call costs a pass over all blocks. It needs a cache with `make_spec(thinning=True)`. Window layers and recurrent
    layers keep their blocks.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; different rows in use.
      columns: bool[R, M]; the columns of the block table to let go of. Their blocks must be written to the end. A hole
        may be named again. bool[M] applies to all rows.
      max_removed: static; the largest number of blocks to remove. None means N + H.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with E = max_removed records a group: removed, children first. Status BAD_REQUEST for a row
      free, unknown or named twice, or for a column not written to its end. Status HELD for a swapped-out row. The other
      rows are thinned. No row is thinned if more than `max_removed` blocks would leave the index
      (BAD_REQUEST, and `events.shortfall` is the number beyond it), or if a block to remove is on the move (HELD).

    Raises:
      ValueError: if the spec has no thinning.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4, thinning=True)
      >>> state, prompt = kvjax.init(spec), np.arange(18)
      >>> state, _ = kvjax.admit(state, 0, prompt, 18)
      >>> state, _ = kvjax.commit(state, prompt[None], [18], seqs=[0])
      >>> state, events = kvjax.thin(state, 0, np.isin(np.arange(8), [1, 2]))
      >>> state.groups[0].table[0].tolist(), int(state.groups[0].available)
      ([0, -1, -1, 3, 4, -1, -1, -1], 5)
      >>> [(event["kind"], event["block"]) for event in kvjax.to_list(events)]  # blocks 1 and 2 stay cached
      [('removed', 3)]
      >>> view = kvjax.view(kvjax.extend(state, [True, False])[0], [1, 0], 1)
      >>> view.positions[0].tolist(), view.tables[0][0, :4].tolist(), view.lengths_of(0)[0].item()
      ([18], [0, 3, 4, 8], 11)

    Source: H2O and SnapKV drop K/V of a dense cache. Here whole blocks of a paged cache leave.
    """
    spec = state.spec
    rows_holes = state.seqs.holes
    if rows_holes is None:
        raise ValueError("state: got a cache whose spec has thinning=False, wanted make_spec(..., thinning=True)")
    seqs = jnp.atleast_1d(one_or_more("seq", seq))
    columns = flags("columns", columns, (*seqs.shape, spec.max_blocks_per_seq))
    now = integers("now", now, ())
    group = state.groups[0]
    num_ids = group.ids.size
    max_removed = num_ids if max_removed is None else min(static_int32("max_removed", max_removed, 1), num_ids)

    rows = pick(state.seqs, seqs)
    num_whole = rows.committed // spec.block_size
    unwritten = columns & (np.arange(spec.max_blocks_per_seq, dtype=np.int32)[None] >= num_whole[:, None])
    exists = (seqs >= 0) & (seqs < spec.max_seqs) & (rows.length > 0)
    bad = ~exists | repeated(seqs) | jnp.any(unwritten, axis=1)
    thinned = put(rows_holes, seqs, pick(rows_holes, seqs) | columns, ~bad & ~rows.swapped_out)

    freed = holes.unread(group, thinned)
    doomed = holes.stranded(state, freed)
    over = jnp.maximum(count(doomed) - max_removed, 0)
    moving = jnp.any(doomed & group.moving(group.ids))
    status = first_failure((bad | (over > 0), Status.BAD_REQUEST), (rows.swapped_out | moving, Status.HELD))
    ok = jnp.any(status == Status.OK)

    after = replace_group(state, 0, holes.free(group, state.policy, thinned, freed, now))
    after, removed = leave_index_with(after, doomed, max_removed, ok)
    after = after.replace(seqs=after.seqs.replace(holes=thinned))
    return either(ok, after, state), assemble(state, status, removed=removed, shortfall=over)
