# SPDX-License-Identifier: Apache-2.0
"""Backups: copies on the host of blocks that stay on the device, so they can leave it later without a move.

A backup of a device block is a host block without contents, whose pool row has a copy of the K/V:

                     Host.backup   pool row
    block 3          7             2 (device)   findable, with its K/V
    block 7          3             9 (host)     empty, on no stack: the backup of block 3

To leave the device, block 3 trades pool rows with its backup. This needs no copy, so it is possible inside a loop too:

    block 3          LEFT          9 (host)     findable, with the same K/V
    block 7          NO_BLOCK      2 (device)   empty, free for the next K/V

The K/V of a findable block never change, so its copy stays right until the block leaves the index. The parent of a
block with a backup has one. So a block without one has no descendants on the host, unless moves have brought them
there.

A loop cannot maintain the host policy's order at a low cost. It marks blocks as LEFT, and the next verb between loops
tells the policy about all of them, in the order of their release.

Source: write-through as in SGLang's HiCache, and vLLM's offloading of finished blocks.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, fence, is_among, loop, pick, put, rank
from kvjax.events.records import EventKind, Records, record
from kvjax.state import COPYING, NO_BLOCK, EvictionPolicy, Group, Host

LEFT = -2  # `Host.backup` of a block that left the device by its backup, until the host's policy knows it
_LONGEST = jnp.iinfo(jnp.int32).max


def backs_up(group: Group) -> bool:
    """Whether blocks of the group can have backups."""
    return group.backup is not None


def with_backups(group: Group) -> tuple[Host, jax.Array]:
    """The host tier of a group with backups, and `Host.backup`."""
    return group.host_tier, cast(jax.Array, group.backup)


def has_backup(group: Group, ids: jax.Array) -> jax.Array:
    """bool[...]; whether blocks ids i32[...] on the device have backups whose K/V have arrived."""
    if not backs_up(group):
        return jnp.zeros(ids.shape, jnp.bool_)
    _, backup = with_backups(group)
    copy = pick(backup, ids)
    return (ids >= 0) & (copy >= 0) & group.arrived(copy) & (pick(group.blocks.fill, ids) > 0)


def is_backup(group: Group) -> jax.Array:
    """bool[B]; the blocks that are backups."""
    _, backup = with_backups(group)
    return (backup >= 0) & (group.blocks.fill == 0)


def drop_backups(group: Group, ids: jax.Array, where: jax.Array) -> Group:
    """Empties the backups of blocks ids i32[K], all different, where bool[K]. Blocks without one are skipped."""
    if not backs_up(group):
        return group
    host, backup = with_backups(group)
    copy = pick(backup, ids)
    marked = where & (copy != NO_BLOCK)
    where = where & (copy >= 0)
    (backup, empty, pending_transfer), copy, marked, where = fence(
        (backup, host.empty, host.pending_transfer), copy, marked, where
    )
    host = host.replace(
        backup=put(backup, jnp.concatenate([ids, copy]), NO_BLOCK, jnp.concatenate([marked, where])),
        empty=put(empty, host.num_empty + rank(where), copy, where),
        num_empty=host.num_empty + count(where),
        pending_transfer=put(pending_transfer, copy, 0, where),  # a copy on the move belongs to no block
    )
    return group.replace(host=host)


def leave_by_backup(
    group: Group,
    group_index: int,
    ids: jax.Array,
    where: jax.Array,
    *,
    holders: int = 0,
    mark: int = LEFT,
) -> tuple[Group, jax.Array, Records]:
    """Moves claimed blocks ids i32[K], where bool[K], to the host without a copy: each trades rows with its backup.

    All have backups that have arrived. `holders`, static, hold each of them afterwards. Their `Host.backup` becomes
    `mark`, static. The caller lets the device's policy forget them. Also returns ids i32[K] with the backups, now free
    blocks on the device, in place of the blocks; and K records, updated.
    """
    blocks = group.blocks
    host, backup = with_backups(group)
    copy = pick(backup, ids)
    device_row = pick(host.pool_row, ids)
    host_row = pick(host.pool_row, copy)
    parent = pick(blocks.parent, ids)[:, 0]
    updated = record(
        EventKind.UPDATED,
        where,
        group=group_index,
        block=ids,
        generation=pick(blocks.generation, ids),
        priority=blocks.requested_priority(ids),
        level=1,
    )
    (pool_row, backup), copy, device_row, host_row, updated = fence(
        (host.pool_row, backup), copy, device_row, host_row, updated
    )
    pair = jnp.concatenate([ids, copy])
    both = jnp.concatenate([where, where])
    marks = jnp.where(jnp.arange(pair.size, dtype=jnp.int32) < ids.size, mark, NO_BLOCK)
    host = host.replace(
        pool_row=put(pool_row, pair, jnp.concatenate([host_row, device_row]), both),
        backup=put(backup, pair, marks, both),
        num_host_children=add(host.num_host_children, parent, 1, where & (parent >= 0), unique=False),
    )
    group = group.replace(
        host=host,
        blocks=blocks.replace(refcount=put(blocks.refcount, ids, holders, where)),
    )
    return group, jnp.where(where, copy, ids), updated


def would_lose(
    group: Group, policy: EvictionPolicy, need: jax.Array, size: int, now: jax.Array, spared: jax.Array | None = None
) -> jax.Array:
    """bool[]; whether `take` of `need` i32[] blocks, at most `size`, in a loop would remove blocks without backups.

    Blocks `spared` i32[M] would be held by then.
    """
    blocks = group.blocks
    num_victims = jnp.clip(need - group.num_empty, 0, size)

    def eligible(ids: jax.Array) -> jax.Array:
        cached = group.evictable(ids) & (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)
        return cached if spared is None else cached & ~jnp.any(ids[:, None] == spared[None], axis=1)

    victims, _ = policy.chosen(group.policy, blocks, eligible, num_victims, now, size)
    return jnp.any((jnp.arange(size, dtype=jnp.int32) < num_victims) & ~has_backup(group, victims))


def lacks_backups(
    group: Group, policy: EvictionPolicy, size: int, now: jax.Array, is_kept: jax.Array | None = None
) -> jax.Array:
    """bool[]; whether a victim for `size` blocks has no backup. Blocks that a loop cannot evict are victims too.

    Victims outside bool[B] `is_kept` get no backup, so they do not count.
    """
    blocks = group.blocks
    num_victims = jnp.clip(size - group.num_empty, 0, group.num_cached)

    def eligible(ids: jax.Array) -> jax.Array:
        cached = (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)
        return cached & group.arrived(ids) & group.on_device(ids)

    victims, _ = policy.chosen(group.policy, blocks, eligible, num_victims, now, size)
    is_named = (jnp.arange(size, dtype=jnp.int32) < num_victims) & eligible(victims)
    if is_kept is not None:
        is_named = is_named & pick(is_kept, victims)
    return jnp.any(is_named & ~has_backup(group, victims))


def settle(group: Group, policy: EvictionPolicy, now: jax.Array, when: jax.Array | bool = True) -> Group:
    """Tells the host's policy about all LEFT blocks, in the order of their release, if `when`.

    It costs a pass over all blocks, so it is for use between loops.
    """
    blocks = group.blocks
    host, backup = with_backups(group)
    has_left = (backup == LEFT) & when
    waited = blocks.clock - blocks.released
    order = jnp.lexsort((-waited, ~has_left)).astype(jnp.int32)
    cached = pick(has_left & (blocks.refcount % COPYING == 0), order)  # the source of a copy has a turn too
    seen = blocks.replace(children=host.num_host_children)
    host = host.replace(
        backup=jnp.where(has_left, NO_BLOCK, backup),
        policy=policy.touched(host.policy, seen, jnp.where(cached, order, NO_BLOCK), now),
    )
    return group.replace(host=host)


def droppable(group: Group, exempt: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """bool[B]; blocks whose backups may be dropped. Also i32[B], the longest wait of each block and its followers.

    A backup stays if the block or a follower has children on the host or is `exempt` bool[B].
    """
    blocks = group.blocks
    host, backup = with_backups(group)
    parent = blocks.parent[:, 0]
    backed = (backup >= 0) & (blocks.fill > 0)
    waited = jnp.where(blocks.refcount % COPYING > 0, -1, blocks.clock - blocks.released)
    waited = jnp.where(host.num_host_children > 0, _LONGEST, waited)
    if exempt is not None:
        waited = jnp.where(exempt, _LONGEST, waited)

    def up(waited: jax.Array) -> jax.Array:
        above = jnp.where(backed & (parent >= 0), parent, waited.shape[0])
        return waited.at[above].max(waited, mode="drop")

    waited = loop(lambda waited: jnp.any(up(waited) != waited), up, waited)
    return backed & (waited < _LONGEST), waited


def make_room(group: Group, wanted: jax.Array, size: int, exempt: jax.Array | None = None) -> Group:
    """Drops `wanted` i32[] backups, at most `size`, or all `droppable` backups. Blocks leaving last lose theirs first.

    Held blocks leave last, and before them the blocks released last. A prefix waits as long as its followers.
    """
    blocks = group.blocks
    may_drop, waited = droppable(group, exempt)
    age = blocks.clock - blocks.stored
    order = jnp.lexsort((age, -blocks.depth, waited, ~may_drop)).astype(jnp.int32)[:size]
    index = jnp.arange(order.shape[0], dtype=jnp.int32)
    return drop_backups(group, order, pick(may_drop, order) & (index < wanted))


def drop_failed(group: Group, copies: jax.Array) -> Group:
    """Empties backups copies bool[B], whose K/V are lost, and the backups of all followers."""
    blocks = group.blocks
    _, backup = with_backups(group)
    parent = blocks.parent[:, 0]
    backed = (backup >= 0) & (blocks.fill > 0)
    bare = backed & pick(copies, backup)

    def down(bare: jax.Array) -> jax.Array:
        return bare | (backed & (parent >= 0) & pick(bare, parent))

    bare = loop(lambda bare: jnp.any(down(bare) != bare), down, bare)
    return drop_backups(group, group.ids, bare)


def keep_rows(group: Group, blocks_back: jax.Array, hosts: jax.Array) -> Group:
    """Makes blocks hosts i32[K] the backups of blocks_back i32[K], which came back from these pool rows.

    NO_BLOCK is padding. A block keeps its row only if its parent has a backup, or keeps its own.
    """
    blocks = group.blocks
    host, backup = with_backups(group)
    parent = blocks.parent[:, 0]
    keeps = is_among(
        group.ids.size, blocks_back, (blocks_back >= 0) & (hosts >= 0) & (pick(blocks.fill, blocks_back) > 0)
    )
    is_rooted = (parent < 0) | has_backup(group, parent)

    def rooted(keeps: jax.Array) -> jax.Array:
        return keeps & (is_rooted | pick(keeps, parent))

    keeps = loop(lambda keeps: jnp.any(rooted(keeps) != keeps), rooted, keeps)
    where = (blocks_back >= 0) & (hosts >= 0) & pick(keeps, blocks_back)
    pair = jnp.concatenate([blocks_back, hosts])
    partners = jnp.concatenate([hosts, blocks_back])
    return group.replace(host=host.replace(backup=put(backup, pair, partners, jnp.concatenate([where, where]))))
