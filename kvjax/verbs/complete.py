# SPDX-License-Identifier: Apache-2.0
"""`complete`: moves between the tiers have been made, or have failed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import fence, pick, put
from kvjax._checks import on_state, static_int
from kvjax.blocks import windows
from kvjax.blocks.publish import children_first, descendants, forget_all, remove
from kvjax.blocks.tiers import find_unevictable, host_of
from kvjax.events.records import Events, Records, Status
from kvjax.events.transfer import Transfer
from kvjax.state import LOST, NO_BLOCK, CacheState, EvictionPolicy, Group
from kvjax.verbs._request import assemble, replace_group


@on_state
def complete(
    state: CacheState, transfer: Transfer | None, ok: ArrayLike, *, max_removed: int | None = None
) -> tuple[CacheState, Events]:
    """Reports that moves have been made, so that their blocks are findable on the new tier; or that they have failed.

    Blocks whose move has failed are removed with all their descendants, on both tiers; rows that hold one of them have
    lost K/V and must be released. Lost contents are never stored.

    Args:
      state: the cache.
      transfer: of the events that ordered the moves; None: there is nothing to do.
      ok: bool[]; whether all have been made.
      max_removed: static; the most blocks that a failure may remove in a group, None for N + H. Blocks beyond it
        stay in the index, so give a number only where `ok` is always True.

    Returns:
      The cache; and events, E = max_removed a group: removed. Status i32[S] HELD for the rows that must be released.
    """
    hurt = jnp.zeros((state.spec.max_seqs,), jnp.bool_)
    if transfer is None:
        return state, assemble(state, hurt.astype(jnp.int32))
    ok, removed = jnp.asarray(ok, jnp.bool_), []
    for number in state.spec.host_groups:
        group, host = state.groups[number], host_of(state.groups[number])
        ids = jnp.where(transfer.group == number, transfer.block, NO_BLOCK)
        current = (ids >= 0) & (transfer.number == pick(host.pending_transfer, ids))
        pending_transfer, current = fence(host.pending_transfer, current)
        # A block whose move has failed stays on the move until it is empty, so that its row's writes are not stored.
        host = host.replace(pending_transfer=put(pending_transfer, ids, 0, current & ok, unique=False))
        lost = put(jnp.zeros(group.blocks.fill.shape, jnp.bool_), ids, True, current & ~ok, unique=False)
        hurt = hurt | jnp.any((group.table >= 0) & pick(lost, group.table), axis=1)
        most = lost.shape[0] if max_removed is None else min(static_int("max_removed", max_removed, 1), lost.shape[0])
        policy = windows.policy_of(number, state.policy)
        group, gone = _lose(group.replace(host=host), number, policy, lost, most)
        group = find_unevictable(group)
        after, records = forget_all(replace_group(state, number, group), number, gone)
        state = _mark_lost(state, after)
        removed += records
    return state, assemble(state, jnp.where(hurt, Status.HELD, Status.OK).astype(jnp.int32), removed=removed)


def _mark_lost(before: CacheState, after: CacheState) -> CacheState:
    """Marks held blocks that have left the index as LOST: their pins outlast their index entry."""
    for number, (old, new) in enumerate(zip(before.groups, after.groups, strict=True)):
        lost = (old.blocks.fill > 0) & (new.blocks.fill == 0) & (new.blocks.refcount > 0)
        blocks = new.blocks.replace(hits=jnp.where(lost, LOST, new.blocks.hits))
        after = replace_group(after, number, new.replace(blocks=blocks))
    return after


def _lose(group: Group, number: int, policy: EvictionPolicy, lost: jax.Array, most: int) -> tuple[Group, Records]:
    """Removes the findable ones of lost bool[B] and their descendants from the index; `most` records, removed."""
    blocks = group.blocks
    marked = descendants(blocks, lost & (blocks.fill > 0))
    order = children_first(blocks, group.ids, marked)[:most]
    return remove(group, number, policy, order, pick(marked, order))
