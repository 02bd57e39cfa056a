# SPDX-License-Identifier: Apache-2.0
"""Caches that know beforehand what comes: blocks have ids, so nothing is hashed, compared or kept in a table.

What a policy is given is what the verbs give it, block numbers included, but for what a trace does not tell. Of that
only the arrays that it reads are kept.

Requests follow one another, so a cache has at most one empty block besides those that were never used: each request
leaves at most one, and the next one takes it first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, add, count, fence, pick, put, rank
from kvjax.state import NO_BLOCK, Blocks, EvictionPolicy


class Ask(Pytree):
    """A request.

    Attributes:
      ids: i32[K]; the ids of its blocks, then anything.
      length: i32[]; how many blocks it has.
      kept: i32[]; how many of them are cached when it is over.
      now: i32[] ms.
    """

    ids: jax.Array
    length: jax.Array
    kept: jax.Array
    now: jax.Array


class Known(Pytree):
    """A cache.

    Attributes:
      blocks: as policies see them.
      id: i32[B]; the id that each block held last.
      size: i32[]; blocks in use.
      used: i32[]; blocks 0..used-1 were used already.
      spare: i32[]; one of them that is empty, or NO_BLOCK.
      policy: the policy's own state.
      sound: bool[]; whether the policy named only blocks that might leave.
    """

    blocks: Blocks
    id: jax.Array
    size: jax.Array
    used: jax.Array
    spare: jax.Array
    policy: Any
    sound: jax.Array


class Served(Pytree):
    """What became of a request, beside the cache.

    Attributes:
      found: i32[]; blocks that it found.
      table: i32[K]; its blocks.
      stored: bool[K]; those that are cached now and were not before.
    """

    found: jax.Array
    table: jax.Array
    stored: jax.Array


def serve(
    cache: Known, ask: Ask, hints: jax.Array, policy: EvictionPolicy, reads: frozenset[str], whole: bool
) -> tuple[Known, Served]:
    """Admits a request, commits its blocks and releases it, as the verbs do; see `replay`.

    Args:
      cache: where.
      ask: what.
      hints: i32[K]; the block that each id had last, which may hold another one now; or NO_BLOCK.
      policy: chooses who leaves.
      reads: the arrays of `Blocks` that are kept.
      whole: whether the last block of a prompt may hit.
    """
    blocks, column = cache.blocks, np.arange(hints.shape[0], dtype=np.int32)
    fits, last = ask.length <= cache.size, column == ask.length - 1
    known = (column < ask.length) & (hints >= 0) & (pick(cache.id, hints) == ask.ids) & (pick(blocks.fill, hints) > 0)
    prefix = jnp.cumprod(known, dtype=jnp.int32) > 0
    hit = fits & prefix & (column < (ask.length if whole else ask.length - 1))
    found = count(hit)
    need = jnp.where(fits, ask.length - found, 0)
    blocks = _put(blocks, reads, "refcount", hints, 1, hit)
    blocks = _add(blocks, reads, "hits", hints, 1, hit)
    cache, taken, victims = _take(cache.replace(blocks=blocks), need, policy, reads, ask.now, column)
    cache = cache.replace(sound=cache.sound & jnp.all(prefix | ~known))  # else a block left before its child

    new = (column >= found) & (column < found + need)
    own = jnp.where(hit, hints, pick(taken, column - found))
    # A last block that is cached by now merges with its copy, unless that has left for it.
    merged = last & new & known & (ask.kept == ask.length) & ~jnp.any(victims == pick(hints, ask.length - 1))
    stored = new & (column < ask.kept) & ~merged
    table = jnp.where(merged, hints, own)
    blocks = _put(cache.blocks, reads, "fill", own, stored.astype(jnp.int32), new)
    blocks = _publish(blocks, reads, table, stored, column)
    blocks = _add(blocks, reads, "hits", hints, 1, merged)
    blocks = _put(blocks, reads, "refcount", hints, 0, hit)
    cached = fits & (column < ask.kept)
    blocks = _release(blocks, reads, table[::-1], cached[::-1])
    spare = jnp.max(jnp.where(last & new & ~stored, own, cache.spare))
    pstate = policy.touched(cache.policy, blocks, jnp.where(cached, table, NO_BLOCK)[::-1], ask.now)
    held = put(cache.id, table, ask.ids, stored)
    return cache.replace(blocks=blocks, id=held, spare=spare, policy=pstate), Served(found, table, stored)


def _take(
    cache: Known, need: jax.Array, policy: EvictionPolicy, reads: frozenset[str], now: jax.Array, column: np.ndarray
) -> tuple[Known, jax.Array, jax.Array]:
    """Takes blocks, empty ones first: the cache, the blocks i32[K], and those among them that had to leave, i32[K]."""
    blocks, spares = cache.blocks, (cache.spare >= 0).astype(jnp.int32)
    empty = spares + cache.size - cache.used
    from_empty = jnp.minimum(need, empty)
    wanted = need - from_empty

    def eligible(ids: jax.Array) -> jax.Array:
        return (ids >= 0) & (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    victims, pstate = policy.chosen(cache.policy, blocks, eligible, wanted, now, column.shape[0])
    leaves = column < wanted
    sound = cache.sound & jnp.all(eligible(victims) | ~leaves)
    (refcount, fill), victims, sound = fence((blocks.refcount, blocks.fill), victims, sound)
    victims = jnp.where(leaves, victims, NO_BLOCK)
    blocks = blocks.replace(refcount=refcount, fill=fill)
    if "children" in reads:
        parents, parent = fence(blocks.parent, pick(blocks.parent, victims)[:, 0])
        blocks = blocks.replace(parent=parents)
        blocks = _add(blocks, reads, "children", parent, -1, leaves & (parent >= 0), unique=False)
    fresh = jnp.where(column < spares, cache.spare, cache.used + column - spares)
    taken = jnp.where(column < empty, fresh, pick(victims, column - empty))
    cache = cache.replace(
        blocks=blocks, used=cache.used + jnp.maximum(from_empty - spares, 0),
        spare=jnp.where(need > 0, NO_BLOCK, cache.spare), policy=pstate, sound=sound,
    )  # fmt: skip
    return cache, taken, victims


def _publish(
    blocks: Blocks, reads: frozenset[str], table: jax.Array, where: jax.Array, column: np.ndarray
) -> Blocks:
    """Blocks of a request table i32[K], where bool[K], become findable; the same as `blocks.publish`."""
    blocks = _add(blocks, reads, "generation", table, 1, where)
    if "parent" in reads:
        above = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), table[:-1]])
        generation = jnp.where(above >= 0, pick(blocks.generation, above), 0)
        blocks = _put(blocks, reads, "parent", table, jnp.stack([above, generation], axis=-1), where)
        blocks = _add(blocks, reads, "children", above, 1, where & (above >= 0))
    blocks = _put(blocks, reads, "depth", table, column, where)
    blocks = _put(blocks, reads, "hits", table, 0, where)
    blocks = _put(blocks, reads, "stored", table, blocks.clock + rank(where), where)
    return blocks.replace(clock=blocks.clock + count(where))


def _release(blocks: Blocks, reads: frozenset[str], ids: jax.Array, where: jax.Array) -> Blocks:
    """Notes when ids i32[K], where bool[K], lost their last holder."""
    blocks = _put(blocks, reads, "released", ids, blocks.clock + rank(where), where)
    return blocks.replace(clock=blocks.clock + count(where))


def _put(blocks: Blocks, reads: frozenset[str], name: str, ids: jax.Array, values: Any, where: jax.Array) -> Blocks:
    """Writes into an array of blocks, if somebody reads it."""
    return blocks.replace(**{name: put(getattr(blocks, name), ids, values, where)}) if name in reads else blocks


def _add(
    blocks: Blocks, reads: frozenset[str], name: str, ids: jax.Array, value: int, where: jax.Array, unique: bool = True
) -> Blocks:
    """Adds to an array of blocks, if somebody reads it."""
    if name not in reads:
        return blocks
    return blocks.replace(**{name: add(getattr(blocks, name), ids, value, where, unique=unique)})
