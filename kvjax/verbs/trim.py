# SPDX-License-Identifier: Apache-2.0
"""`trim` gives back unused reserved blocks of rows, in all groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import fence, put, runs, skip_unless
from kvjax.blocks import windows
from kvjax.blocks.rows import table_entry
from kvjax.blocks.tiers import push_empty
from kvjax.checks import on_state, row_mask, static_int32
from kvjax.events.records import Events, Status
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy, Group
from kvjax.verbs._request import assemble, first_failure


@on_state
def trim(state: CacheState, active: ArrayLike, *, max_tokens: int | None = None) -> tuple[CacheState, Events]:
    """Gives back the reserved blocks beyond the committed tokens of rows, for example after a stop token.

    Blocks without a committed token become empty. Nothing else changes, and the policy is not called, because no cached
    block is involved.

    Args:
      state: the cache.
      active: bool[S]; rows to trim.
      max_tokens: static; the largest number of reserved tokens of a row, which determines the cost. None means no
        limit.

    Returns:
      The cache, and no events. Status BAD_REQUEST for a row that is free, has no committed token, or has reserved more
      than `max_tokens`. Status HELD for a swapped-out row. The other rows are trimmed.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, _ = kvjax.extend(state, [True, False], 4)  # a block for four steps, none of which is run
      >>> after, _ = kvjax.trim(state, [True, False])
      >>> [(s.seqs.length.tolist(), s.groups[0].num_empty.item()) for s in (state, after)]
      [([14, 0], 4), ([10, 0], 5)]

    Source: MAX's multi-step decoding, which commits the computed tokens and keeps no blocks beyond them.
    """
    spec = state.spec
    seqs = state.seqs
    active = row_mask("active", active, spec.max_seqs)
    max_tokens = spec.max_length if max_tokens is None else static_int32("max_tokens", max_tokens, 1)
    bad = active & ((seqs.committed == 0) | (seqs.length - seqs.committed > max_tokens))
    status = first_failure((bad, Status.BAD_REQUEST), (active & seqs.swapped_out, Status.HELD))
    length = jnp.where(active & (status == Status.OK), seqs.committed, seqs.length)
    return cut(state, length, max_tokens), assemble(state, status)


def cut(state: CacheState, length: jax.Array, max_tokens: int) -> CacheState:
    """Shortens rows to length i32[S], at most `max_tokens` below their reserved tokens."""
    block_size = state.spec.block_size
    columns = runs(-(-length // block_size), -(-max_tokens // block_size))
    beyond = columns * block_size < state.seqs.length[:, None]
    policies = [windows.policy_of(state, group_index) for group_index in range(len(state.groups))]
    groups = skip_unless(
        lambda: jnp.any(beyond),
        lambda groups: tuple(_discard(*each, columns, beyond) for each in zip(groups, policies, strict=True)),
        state.groups,
    )
    return state.replace(groups=groups, seqs=state.seqs.replace(length=length))


def _discard(group: Group, policy: EvictionPolicy, columns: jax.Array, where: jax.Array) -> Group:
    """Empties the blocks in columns i32[S, F] of all rows, where bool[S, F]. They are private and not findable."""
    rows = np.arange(columns.shape[0], dtype=np.int32)[:, None]
    table, ids = fence(group.table, table_entry(group, rows, columns))
    table = put(table, (jnp.broadcast_to(rows, columns.shape), columns), NO_BLOCK, where)
    ids = ids.reshape(-1)
    where = where.reshape(-1)
    blocks = group.blocks.replace(refcount=put(group.blocks.refcount, ids, 0, where))
    return push_empty(group.replace(blocks=blocks, table=table), policy, ids, where)
