# SPDX-License-Identifier: Apache-2.0
"""Brings blocks back from the host inside a loop: each trades pool rows with a free block on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, fence, pick, put, rank
from kvjax.blocks.backups import has_backup
from kvjax.blocks.tiers import host_of, mark_unevictable, updates
from kvjax.events.records import Records
from kvjax.events.transfer import Transfer, orders
from kvjax.state import NO_BLOCK, EvictionPolicy, Group


def bring_back(
    group: Group, group_index: int, policy: EvictionPolicy, ids: jax.Array, free: jax.Array
) -> tuple[Group, Records, Transfer]:
    """Gives held blocks ids i32[K] on the host the device rows of blocks free i32[K]. NO_BLOCK is padding in both.

    The free blocks have a holder each, and no contents. They are empty on the host afterwards, or backups.

    The caller makes the moves before anything reads these blocks, and before it calls another verb. So the blocks are
    on the device at once, and cannot fail. The K/V in their old rows become their backups (`backups.py`), unless the
    block before the first has none. Costs O(K).

    Also returns K records, updated, and the moves.
    """
    blocks = group.blocks
    host = host_of(group)
    assert host.backup is not None
    where = (ids >= 0) & (free >= 0)
    device_row = pick(host.pool_row, free)
    host_row = pick(host.pool_row, ids)
    parent = pick(blocks.parent, ids)[:, 0]
    has_parent = where & (parent >= 0)
    # The blocks of a prompt follow each other, so only the first can have its parent on the device.
    is_bare = has_parent & group.on_device(parent) & ~has_backup(group, parent)
    keeps = where & ~jnp.any(is_bare)
    updated = updates(blocks, group_index, ids, where, 0)
    moves = orders(where, group=group_index, block=ids, source=host_row, target=device_row)
    (pool_row, backup, empty), device_row, host_row, keeps, updated, moves = fence(
        (host.pool_row, host.backup, host.empty), device_row, host_row, keeps, updated, moves
    )
    pair = jnp.concatenate([ids, free])
    both = jnp.concatenate([where, where])
    partners = jnp.concatenate([jnp.where(keeps, free, NO_BLOCK), jnp.where(keeps, ids, NO_BLOCK)])
    is_empty = where & ~keeps
    host = host.replace(
        pool_row=put(pool_row, pair, jnp.concatenate([device_row, host_row]), both),
        backup=put(backup, pair, partners, both),
        empty=put(empty, host.num_empty + rank(is_empty), free, is_empty),
        num_empty=host.num_empty + count(is_empty),
        num_host_children=add(host.num_host_children, parent, -1, has_parent, unique=False),
        policy=policy.forgot(host.policy, blocks, jnp.where(where, ids, NO_BLOCK)),
    )
    stays = is_empty & (pick(host.num_host_children, ids) > 0)
    host = host.replace(unevictable=mark_unevictable(host, blocks.parent[:, 0], ids, stays))
    blocks = blocks.replace(
        refcount=put(blocks.refcount, free, 0, where),
        children=add(blocks.children, parent, 1, has_parent, unique=False),
    )
    return group.replace(blocks=blocks, host=host), updated, moves
