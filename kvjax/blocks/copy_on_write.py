# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write: which rows must not write into the block they are in, decided for a whole batch at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, add, count, fence, last_of_each, pick, put
from kvjax.blocks.holders import stamp_release
from kvjax.state import NO_BLOCK, EvictionPolicy, Group


class Writers(Pytree):
    """Rows that want to write into a block which is not theirs alone, all [S].

    Attributes:
      block: i32; the block that each row is in.
      shared: bool; it has other holders, or it is findable and must keep its contents.
      before: i32; its refcount.
      left: i32; its holders if every such row lets go of it.
      last: bool; this is the last of the rows that leave a block without holders.
      copies: bool; the row takes a private copy. The last holder of a block that is not findable keeps it instead.
    """

    block: jax.Array
    shared: jax.Array
    before: jax.Array
    left: jax.Array
    last: jax.Array
    copies: jax.Array


def unshare(group: Group, block: jax.Array, writes: jax.Array) -> tuple[Group, Writers]:
    """Finds the rows that must copy `block` i32[S] before they write, where writes bool[S].

    The group comes back in between: `settle` must follow. Meanwhile no block at issue looks unheld.
    """
    before = pick(group.blocks.refcount, block)
    findable = pick(group.blocks.fill, block) > 0
    shared = writes & ((before > 1) | findable)
    refcount, before, shared, findable = fence(group.blocks.refcount, before, shared, findable)
    refcount = add(refcount, block, -1, shared, unique=False)
    left = pick(refcount, block)
    refcount, last = last_of_each(refcount, block, shared & (left == 0))
    shares = Writers(block, shared, before, left, last, copies=shared & ~(last & ~findable))
    return group.replace(blocks=group.blocks.replace(refcount=refcount)), shares


def settle(group: Group, policy: EvictionPolicy, shares: Writers, had: jax.Array, now: jax.Array) -> Group:
    """Ends what `unshare` began: rows that copied let go of the old block, or all is as before if not `had`."""
    blocks = group.blocks
    findable = pick(blocks.fill, shares.block) > 0
    fill, findable = fence(blocks.fill, findable)
    blocks = blocks.replace(fill=fill)
    kept = jnp.where((shares.left == 0) & ~findable, 1, shares.left)
    refcount = put(blocks.refcount, shares.block, jnp.where(had, kept, shares.before), shares.shared, unique=False)
    cached = had & shares.last & findable
    blocks = stamp_release(blocks.replace(refcount=refcount), shares.block, cached, now)
    return group.replace(
        blocks=blocks,
        num_cached=group.num_cached + count(cached),
        policy=policy.touched(group.policy, blocks, jnp.where(cached, shares.block, NO_BLOCK), now),
    )
