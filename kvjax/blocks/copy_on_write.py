# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write: finds the rows that must copy their last block before they write, for a whole batch at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, add, count, fence, last_of_each, pick, put, skip_unless
from kvjax.blocks.holders import stamp_release
from kvjax.state import NO_BLOCK, EvictionPolicy, Group


class Writers(Pytree):
    """Rows about to write into a block, all [R]."""

    block: jax.Array  # i32; the block that each row writes into
    shared: jax.Array  # bool; the block has other holders, or it is findable and must keep its contents
    holders: jax.Array  # i32; the block's refcount
    remaining: jax.Array  # i32; the block's holders after every row of this batch has released it
    last: jax.Array  # bool; the row is the last holder to leave the block
    # bool; the row takes a private copy. The last holder of a block that is not findable keeps the block instead
    copies: jax.Array


def unshare(group: Group, block: jax.Array, writes: jax.Array) -> tuple[Group, Writers]:
    """Finds the rows that must copy `block` i32[R] before they write, where writes bool[R].

    Call `settle` afterwards. Until then, `last_of_each` keeps a mark in place of each refcount that would be 0, so no
    such block looks unheld. You may call `claim` in between: its victims are fewer than the blocks, so their marks
    differ from these marks.
    """
    holders = pick(group.blocks.refcount, block)
    findable = pick(group.blocks.fill, block) > 0
    shared = writes & ((holders > 1) | findable)
    refcount, holders, shared, findable = fence(group.blocks.refcount, holders, shared, findable)

    def release(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        refcount = add(carry[0], block, -1, shared, unique=False)
        remaining = pick(refcount, block)
        refcount, last = last_of_each(refcount, block, shared & (remaining == 0), below=refcount.shape[0])
        return refcount, remaining, last

    start = refcount, holders, shared  # arrays of the right shapes, which are not read if no row shares its block
    refcount, remaining, last = skip_unless(lambda: jnp.any(shared), release, start)
    writers = Writers(block, shared, holders, remaining, last, copies=shared & ~(last & ~findable))
    return group.replace(blocks=group.blocks.replace(refcount=refcount)), writers


def settle(group: Group, policy: EvictionPolicy, writers: Writers, ok: jax.Array, now: jax.Array) -> Group:
    """Completes `unshare`: rows that copied release the old block if ok bool[], else the refcounts are restored."""
    return skip_unless(lambda: jnp.any(writers.shared), lambda group: _settle(group, policy, writers, ok, now), group)


def _settle(group: Group, policy: EvictionPolicy, writers: Writers, ok: jax.Array, now: jax.Array) -> Group:
    """Releases old blocks, or restores refcounts."""
    blocks = group.blocks
    findable = pick(blocks.fill, writers.block) > 0
    fill, findable = fence(blocks.fill, findable)
    blocks = blocks.replace(fill=fill)
    remaining = jnp.where((writers.remaining == 0) & ~findable, 1, writers.remaining)
    refcount = jnp.where(ok, remaining, writers.holders)
    refcount = put(blocks.refcount, writers.block, refcount, writers.shared, unique=False)
    cached = ok & writers.last & findable
    blocks = stamp_release(blocks.replace(refcount=refcount), writers.block, cached, now)
    return group.replace(
        blocks=blocks,
        num_cached=group.num_cached + count(cached),
        policy=policy.touched(group.policy, blocks, jnp.where(cached, writers.block, NO_BLOCK), now),
    )
