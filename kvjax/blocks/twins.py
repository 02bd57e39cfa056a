# SPDX-License-Identifier: Apache-2.0
"""Finds cached blocks that equal those which have just been filled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import Pytree, mix, pick, put, runs
from kvjax.blocks import index
from kvjax.blocks.keys import prefix_keys, root_key
from kvjax.state import NO_BLOCK, Blocks, Group, Sequences, Text


def link(blocks: Blocks, block: jax.Array, namespace: jax.Array) -> jax.Array:
    """i32[..., 2]; the node of each block i32[...], or the root of `namespace` where it is NO_BLOCK."""
    return jnp.stack([block, jnp.where(block >= 0, pick(blocks.generation, block), namespace)], axis=-1)


def same_content(blocks: Blocks, ids: jax.Array, text: Text, fill: jax.Array | None = None) -> jax.Array:
    """bool[...]; whether ids are findable blocks that hold exactly this text i32[..., P], or its first `fill`."""
    size, same = text.tokens.shape[-1], pick(blocks.text, ids).equals(text)
    if fill is not None:
        same = same | (np.arange(size, dtype=np.int32) >= fill)
    return (ids >= 0) & (pick(blocks.fill, ids) == (size if fill is None else fill)) & jnp.all(same, axis=-1)


class Resolution(Pytree):
    """What becomes of blocks that have just been filled, all [R * F].

    Attributes:
      own: i32; the block that was filled.
      target: i32; the block that the row holds from now on: its own, or an equal one.
      publish: bool; own becomes findable.
      merge: bool; own is given back for the target.
      first: bool; no earlier entry has the same key (so a count of these counts each block once).
      key: u32[R * F, 2].
      parent: i32[R * F, 2]; (block, namespace) as `publish` wants it.
    """

    own: jax.Array
    target: jax.Array
    publish: jax.Array
    merge: jax.Array
    first: jax.Array
    key: jax.Array
    parent: jax.Array


def resolve(group: Group, seqs: Sequences, rows: jax.Array, first: jax.Array, filled: jax.Array) -> Resolution:
    """Decides for each filled block whether to publish it or to merge it with an equal one, cached or filled just now.

    Among equal blocks filled in one call, the first row's is published. A key that already belongs to other contents
    is a collision: the row then publishes nothing in this call, which can cost a hit later and never gives a wrong one.

    Args:
      group: the group, `blocks.text` up to date.
      seqs: the rows' namespaces.
      rows: i32[R]; the rows.
      first: i32[R]; each row's first column whose block may have been filled.
      filled: bool[R, F]; whether the block in column `first + f` was.
    """
    blocks, num = group.blocks, filled.shape[1]
    depth = runs(first, num)
    own = group.table.at[rows[:, None], depth].get(mode="clip", wrap_negative_indices=False)
    text = pick(blocks.text, own)
    before = group.table.at[rows, first - 1].get(mode="clip", wrap_negative_indices=False)
    before = jnp.where(first > 0, before, NO_BLOCK)
    filled = filled & ((before < 0) | (pick(blocks.fill, before) > 0))[:, None]  # no children of unpublished blocks
    if group.tiered:  # nor a block whose K/V have not arrived, which a failed move may lose, nor its descendants
        filled = filled & (jnp.cumsum(filled & ~group.arrived(own), axis=1, dtype=jnp.int32) == 0)
    namespace = pick(seqs.namespace, rows)
    start = jnp.where((before >= 0)[:, None], pick(blocks.key, before), root_key(namespace))
    key = prefix_keys(start, text, blocks.tokens.shape[1], depth).reshape(-1, 2)

    found = index.find(blocks, group.links, key).reshape(filled.shape)
    earliest = _earliest(key, filled.reshape(-1)).reshape(filled.shape)
    is_first = earliest == np.arange(filled.size, dtype=np.int32).reshape(filled.shape)
    target = jnp.where(found >= 0, found, pick(own.reshape(-1), earliest))
    parent = jnp.concatenate([before[:, None], target[:, :-1]], axis=1)

    # So far equal keys counted as equal contents; now compare.
    findable_parent = (parent < 0) | (pick(blocks.fill, parent) > 0)
    same_parent = jnp.all(pick(blocks.parent, found) == link(blocks, parent, namespace[:, None]), axis=-1)
    as_found = same_content(blocks, found, text) & findable_parent & same_parent
    twin = jnp.all(key == pick(key, earliest.reshape(-1)), axis=-1).reshape(filled.shape)
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), text)
    twin = twin & jnp.all(text.equals(pick(flat, earliest)), axis=-1)
    twin = twin & (parent == pick(parent.reshape(-1), earliest))
    twin = twin & (namespace[:, None] == pick(namespace, earliest // num))
    sound = jnp.where(found >= 0, as_found, twin)
    broken = jnp.any(filled & ~sound, axis=1)
    broken = lax.while_loop(  # a row that depends on a broken row is broken
        lambda b: jnp.any(~b & jnp.any(filled & pick(b, earliest // num), axis=1)),
        lambda b: b | jnp.any(filled & pick(b, earliest // num), axis=1),
        broken,
    )
    good = (filled & ~broken[:, None]).reshape(-1)
    spaces = jnp.broadcast_to(namespace[:, None], parent.shape)
    own, target, is_first = own.reshape(-1), target.reshape(-1), is_first.reshape(-1)
    return Resolution(
        own=own,
        target=target,
        publish=good & (found.reshape(-1) < 0) & is_first,
        merge=good & (target != own),
        first=is_first,
        key=key,
        parent=jnp.stack([parent.reshape(-1), spaces.reshape(-1)], axis=-1),
    )


def _earliest(key: jax.Array, where: jax.Array) -> jax.Array:
    """i32[K]; the first entry, where bool[K], with an equal digest of its key u32[K, 2]; each other entry itself."""
    at = jnp.arange(where.size, dtype=jnp.int32)
    digest = jnp.where(
        where, mix(key[:, 0] ^ mix(key[:, 1])) >> np.uint32(1), at.astype(jnp.uint32) | np.uint32(1 << 31)
    )
    digest, order = lax.sort((digest, at), num_keys=1)
    starts = jnp.pad(digest[1:] != digest[:-1], (1, 0), constant_values=True)
    return put(at, order, pick(order, lax.cummax(jnp.where(starts, at, 0))), where=jnp.ones_like(where))
