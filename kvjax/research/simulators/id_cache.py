# SPDX-License-Identifier: Apache-2.0
"""A cache whose blocks have the ids of a trace, so that nothing is hashed or compared.

A policy gets the blocks that the verbs would give it, under the same numbers, but no tokens, keys and retention. Arrays
that it does not read cost nothing: XLA drops arrays that only serve themselves.

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


class Request(Pytree):
    """A request."""

    ids: jax.Array  # i32[K]; the ids of its blocks, then anything
    length: jax.Array  # i32[]; the number of its blocks
    cached: jax.Array  # i32[]; the number of them that are cached when it is over
    now: jax.Array  # i32[] ms


class IdCache(Pytree):
    """A cache."""

    blocks: Blocks  # as policies see them
    id: jax.Array  # i32[B]; the id that each block held last
    size: jax.Array  # i32[]; blocks in use
    used: jax.Array  # i32[]; blocks 0..used-1 were used already
    spare: jax.Array  # i32[]; one of them that is empty, or NO_BLOCK
    policy: Any  # the policy's own state
    sound: jax.Array  # bool[]; whether the policy named only blocks that might leave


class Served(Pytree):
    """The outcome of a request, beside the cache."""

    found: jax.Array  # i32[]; blocks that it found
    table: jax.Array  # i32[K]; its blocks
    stored: jax.Array  # bool[K]; those that are cached now and were not before


def serve(
    cache: IdCache, request: Request, hints: jax.Array, policy: EvictionPolicy, last_may_hit: bool
) -> tuple[IdCache, Served]:
    """Admits a request, commits its blocks and releases it, as the verbs do; see `replay`.

    Hints i32[K] are the block that each id had last, which may hold another one now, or NO_BLOCK.
    """
    blocks, column, length = cache.blocks, np.arange(hints.shape[0], dtype=np.int32), request.length
    fits, last = length <= cache.size, column == length - 1
    is_cached = (column < length) & (hints >= 0)
    is_cached &= (pick(cache.id, hints) == request.ids) & (pick(blocks.fill, hints) > 0)
    prefix = jnp.cumprod(is_cached, dtype=jnp.int32) > 0
    hit = fits & prefix & (column < (length if last_may_hit else length - 1))
    found = count(hit)
    need = jnp.where(fits, length - found, 0)
    blocks = blocks.replace(
        refcount=put(blocks.refcount, hints, 1, hit),
        hits=add(blocks.hits, hints, 1, hit),
    )
    cache, taken, victims = _take(cache.replace(blocks=blocks), need, policy, request.now, column)
    cache = cache.replace(sound=cache.sound & jnp.all(prefix | ~is_cached))  # else a block left before its child

    new = (found <= column) & (column < found + need)
    own = jnp.where(hit, hints, pick(taken, column - found))
    # A last block that is cached by now merges with its copy, unless that has left for it.
    merged = last & new & is_cached & (request.cached == length) & ~jnp.any(victims == pick(hints, length - 1))
    stored = new & (column < request.cached) & ~merged
    table = jnp.where(merged, hints, own)
    blocks = cache.blocks.replace(fill=put(cache.blocks.fill, own, stored.astype(jnp.int32), new))
    blocks = _publish(blocks, table, stored, column)
    cached = fits & (request.cached > column)
    blocks = blocks.replace(
        hits=add(blocks.hits, hints, 1, merged),
        refcount=put(blocks.refcount, hints, 0, hit),
        released=put(blocks.released, table[::-1], blocks.clock + rank(cached[::-1]), cached[::-1]),
        clock=blocks.clock + count(cached),
    )
    spare = jnp.max(jnp.where(last & new & ~stored, own, cache.spare))
    pstate = policy.touched(cache.policy, blocks, jnp.where(cached, table, NO_BLOCK)[::-1], request.now)
    ids = put(cache.id, table, request.ids, stored)
    return cache.replace(blocks=blocks, id=ids, spare=spare, policy=pstate), Served(found, table, stored)


def _take(
    cache: IdCache, need: jax.Array, policy: EvictionPolicy, now: jax.Array, column: np.ndarray
) -> tuple[IdCache, jax.Array, jax.Array]:
    """Takes blocks, empty ones first: the cache, the blocks i32[K], and those among them that had to leave, i32[K]."""
    blocks, spares = cache.blocks, (cache.spare >= 0).astype(jnp.int32)
    empty = spares + cache.size - cache.used
    from_empty = jnp.minimum(need, empty)
    wanted = need - from_empty

    def eligible(ids: jax.Array) -> jax.Array:
        return (ids >= 0) & (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    victims, pstate = policy.chosen(cache.policy, blocks, eligible, wanted, now, column.shape[0])
    leaves = column < wanted
    sound, parent = cache.sound & jnp.all(eligible(victims) | ~leaves), pick(blocks.parent, victims)[:, 0]
    (refcount, fill, parents), victims, sound, parent = fence(
        (blocks.refcount, blocks.fill, blocks.parent), jnp.where(leaves, victims, NO_BLOCK), sound, parent
    )
    children = add(blocks.children, parent, -1, leaves & (parent >= 0), unique=False)
    empties = jnp.where(column < spares, cache.spare, cache.used + column - spares)
    taken = jnp.where(column < empty, empties, pick(victims, column - empty))
    cache = cache.replace(
        blocks=blocks.replace(refcount=refcount, fill=fill, parent=parents, children=children),
        used=cache.used + jnp.maximum(from_empty - spares, 0),
        spare=jnp.where(need > 0, NO_BLOCK, cache.spare),
        policy=pstate,
        sound=sound,
    )
    return cache, taken, victims


def _publish(blocks: Blocks, table: jax.Array, where: jax.Array, column: np.ndarray) -> Blocks:
    """Makes blocks of a request, table i32[K], findable where bool[K]; the same as `blocks.publish`."""
    above = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), table[:-1]])
    generations = add(blocks.generation, table, 1, where)
    generation = jnp.where(above >= 0, pick(generations, above), 0)
    return blocks.replace(
        generation=generations,
        parent=put(blocks.parent, table, jnp.stack([above, generation], axis=-1), where),
        children=add(blocks.children, above, 1, where & (above >= 0)),
        depth=put(blocks.depth, table, column, where),
        hits=put(blocks.hits, table, 0, where),
        stored=put(blocks.stored, table, blocks.clock + rank(where), where),
        clock=blocks.clock + count(where),
    )
