# SPDX-License-Identifier: Apache-2.0
"""Making blocks findable and taking that back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import add, count, pick, put, rank
from kvjax.blocks import index
from kvjax.events.records import EventKind, record
from kvjax.state import DEFAULT_PRIORITY, Group


def publish(
    group: Group,
    ids: jax.Array,
    where: jax.Array,
    key: jax.Array,
    parent: jax.Array,
    depth: jax.Array,
    fill: jax.Array | int,
) -> tuple[Group, jax.Array]:
    """Makes blocks findable by what `blocks.tokens` says they hold; a parent may be among them.

    Args:
      group: the group.
      ids: i32[K]; all different, none findable.
      where: bool[K]; those to publish.
      key: u32[K, 2]; not the key of any findable block.
      parent: i32[K, 2]; (block, namespace): the second counts where the block is NO_BLOCK.
      depth: i32[K]; blocks before each.
      fill: i32[] or i32[K]; tokens that each holds.

    Returns:
      The group and records i32[K, 9], stored.
    """
    blocks = group.blocks
    generation = add(blocks.generation, ids, 1, where)
    above = jnp.where(parent[:, 0] >= 0, pick(generation, parent[:, 0]), parent[:, 1])
    parent = jnp.stack([parent[:, 0], above], axis=-1)
    blocks = blocks.replace(
        generation=generation,
        fill=put(blocks.fill, ids, fill, where),
        key=put(blocks.key, ids, key, where),
        parent=put(blocks.parent, ids, parent, where),
        depth=put(blocks.depth, ids, depth, where),
        children=add(blocks.children, parent[:, 0], 1, where & (parent[:, 0] >= 0), unique=False),
        hits=put(blocks.hits, ids, 0, where),
        stored=put(blocks.stored, ids, blocks.clock + rank(where), where),
        clock=blocks.clock + count(where),
    )
    stored = record(
        EventKind.STORED, where, block=ids, generation=pick(generation, ids), source=parent[:, 0],
        source_generation=parent[:, 1], num_tokens=fill,
        priority=DEFAULT_PRIORITY if blocks.retention is None else pick(blocks.retention, ids)[:, 0],
    )  # fmt: skip
    return group.replace(blocks=blocks, links=index.insert(group.links, blocks, ids, where)), stored


def withdraw(group: Group, ids: jax.Array, where: jax.Array) -> tuple[Group, jax.Array]:
    """Makes findable blocks ids i32[K] without findable children outside the set unfindable; records, removed."""
    blocks = group.blocks
    parent, generation = pick(blocks.parent, ids)[:, 0], pick(blocks.generation, ids)
    here, host = group.on_device(ids), group.host
    blocks = blocks.replace(
        fill=put(blocks.fill, ids, 0, where),
        children=add(blocks.children, parent, -1, where & here & (parent >= 0), unique=False),
    )
    if host is not None:
        below = add(host.below, parent, -1, where & ~here & (parent >= 0), unique=False)
        host = host.replace(below=below)
    removed = record(EventKind.REMOVED, where, block=ids, generation=generation)
    links = index.remove(group.links, blocks.fill, ids, where)
    return group.replace(blocks=blocks, host=host, links=links), removed
