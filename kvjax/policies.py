# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: who leaves when room is needed. A policy only chooses; the core rechecks every choice.

A policy in one line (the lowest score leaves first; see `state.Blocks` for what a score can use):

    smallest_first = by_score(lambda blocks: blocks.fill)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import count, pick, put, rank
from kvjax.keys import mix
from kvjax.retention import later, priority_at

if TYPE_CHECKING:
    from kvjax.state import Blocks

Eligible = Callable[[jax.Array], jax.Array]

# What a copy in progress adds to the refcount of its source, more than holders can: see `group.hold_source`.
COPYING = 1 << 20


class EvictionPolicy(NamedTuple):
    """A policy: a few pure functions over a state of its own.

    A function that is asked for nothing (no id named, nothing wanted) changes nothing, so that a refused verb leaves
    the cache as it was, bit for bit. A policy that obeys this by itself says so (`idle`); for any other the core
    selects the old state in such a call, at the cost of one pass over the policy's state.

    Attributes:
      init: (num_ids: int) -> pstate.
      touch: (pstate, blocks, ids i32[K], now i32[]) -> pstate; called when the blocks `ids` (NO_BLOCK is padding)
        lost their last holder and stay cached, the one to leave first in front.
      victims: (pstate, blocks, eligible, wanted i32[], now i32[], size) -> (ids i32[size], pstate); names `wanted`
        blocks to evict, in order, then padding. `eligible(ids) -> bool[...]` tells which may be named; a block may
        be named only with all its findable children before it. What is not eligible now may be at the next call:
        it keeps its place.
      forget: (pstate, ids i32[K]) -> pstate; called when blocks go to another tier, which has a state of its own, and
        with all blocks by `reset`; None: there is nothing to forget.
      idle: static; whether the functions themselves return the pstate as it was where they are asked for nothing:
        `touch` and `forget` for padding alone, `victims` where wanted is 0. `kvjax.testing.check_policy` verifies it.
    """

    init: Callable[[int], Any]
    touch: Callable[..., Any]
    victims: Callable[..., tuple[jax.Array, Any]]
    forget: Callable[..., Any] | None = None
    idle: bool = False

    def touched(self, pstate: Any, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Any:
        """The policy's state after `touch`; the old one if no id is named."""
        return self._where(lambda: jnp.any(ids >= 0), self.touch(pstate, blocks, ids, now), pstate)

    def chosen(
        self, pstate: Any, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Any]:
        """The victims, and the policy's state after `victims`; the old one if none is wanted."""
        ids, new = self.victims(pstate, blocks, eligible, wanted, now, size)
        return ids, self._where(lambda: wanted > 0, new, pstate)

    def forgot(self, pstate: Any, ids: jax.Array) -> Any:
        """The policy's state after `forget`; the old one if no id is named."""
        if self.forget is None:
            return pstate
        return self._where(lambda: jnp.any(ids >= 0), self.forget(pstate, ids), pstate)

    def _where(self, asked: Callable[[], jax.Array], new: Any, old: Any) -> Any:
        if self.idle:
            return new
        return jax.tree.map(lambda n, o: n if n is o else jnp.where(asked(), n, o), new, old)


class Ring(NamedTuple):
    """Cached blocks in order of release. An entry is live while its block is cached and was not released since.

    Attributes:
      order: i32[R]; block ids, R a power of two of at least 2B; position p is kept at p mod R.
      stamp: i32[B]; position of each block's newest entry.
      head, tail: i32[]; the entries are at head..tail-1, compared by difference so that they may wrap.
    """

    order: jax.Array
    stamp: jax.Array
    head: jax.Array
    tail: jax.Array


@functools.cache
def lru() -> EvictionPolicy:
    """Evicts the least recently released block; costs O(blocks touched).

    Parents are released after their children, so the order of release has leaves first.

    Source: vLLM's free queue, with lazy deletion in place of a linked list.
    """
    return EvictionPolicy(_init_ring, _push, _pop, _drop, idle=True)


def _init_ring(num_ids: int) -> Ring:
    size = 1 << (2 * num_ids - 1).bit_length()
    return Ring(jnp.zeros((size,), jnp.int32), jnp.zeros((num_ids,), jnp.int32), jnp.int32(0), jnp.int32(0))


def _read(ring: Ring, blocks: Blocks, start: jax.Array, size: int):
    """Positions start..start+size-1: (position, block, whether the entry is live), each [size]."""
    position = start + np.arange(size, dtype=np.int32)
    ids = pick(ring.order, position & (ring.order.shape[0] - 1))
    idle = pick(blocks.refcount, ids) % COPYING == 0  # what is copied from keeps its place
    live = (pick(ring.stamp, ids) == position) & idle & (pick(blocks.fill, ids) > 0)
    return position, ids, live & (position - ring.tail < 0)


def _push(ring: Ring, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Ring:
    del now
    new = ids >= 0
    capacity, chunk = ring.order.shape[0], min(1024, ring.order.shape[0])

    def squeeze(carry):
        # Moves live entries forward over dead ones, a chunk at a time; the write end never passes the read end.
        order, stamp, read, write = carry
        _, block, live = _read(ring._replace(order=order, stamp=stamp), blocks, read, chunk)
        place = write + rank(live)
        order, stamp = put(order, place & (capacity - 1), block, live), put(stamp, block, place, live)
        return order, stamp, read + chunk, write + count(live)

    full = ring.tail - ring.head + count(new) > capacity
    order, stamp, _, end = lax.while_loop(
        lambda carry: full & (carry[2] - ring.tail < 0), squeeze, (ring.order, ring.stamp, ring.head, ring.head)
    )
    tail = jnp.where(full, end, ring.tail)
    place = tail + rank(new)
    order, stamp = put(order, place & (capacity - 1), ids, new), put(stamp, ids, place, new)
    return Ring(order, stamp, ring.head, tail + count(new))


def _pop(ring: Ring, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int):
    del now
    chunk = min(max(size, 16), ring.order.shape[0])

    def scan(carry):
        read, found, ids, head, passed_over = carry
        position, block, live = _read(ring, blocks, read, chunk)
        free = live & eligible(block)
        place = found + rank(free)
        take = free & (place < wanted)
        ids = put(ids, place, block, take)
        # A live entry that may not be named now keeps its place: the head stops there.
        spared = live & ~free & (place < wanted)
        first = jnp.min(jnp.where(spared, position - read, chunk))
        head = jnp.where(passed_over, head, read + first)
        found = found + count(take)
        read = jnp.where(found < wanted, read + chunk, jnp.max(jnp.where(take, position - read, -1)) + 1 + read)
        passed_over = passed_over | jnp.any(spared)
        return read, found, ids, jnp.where(passed_over, head, read), passed_over

    start = (ring.head, jnp.int32(0), jnp.full((size,), -1, jnp.int32), ring.head, jnp.bool_(False))
    _, _, ids, head, _ = lax.while_loop(lambda c: (c[1] < wanted) & (c[0] - ring.tail < 0), scan, start)
    return ids, ring._replace(head=jnp.where(head - ring.tail > 0, ring.tail, head))


def _drop(ring: Ring, ids: jax.Array) -> Ring:
    return ring._replace(stamp=put(ring.stamp, ids, ring.head - 1, ids >= 0))


def by_score(
    fn: Callable[..., jax.Array],
    *,
    timed: bool = False,
    init: Callable[[int], Any] | None = None,
    touch: Callable[..., Any] | None = None,
) -> EvictionPolicy:
    """Evicts the block of the lowest score among the leaves, again and again; NaN leaves last.

    Costs one pass over all blocks in a call that evicts. Pass the same object again to reuse compiled programs.
    A score may have a state of its own, here how often each block was released:

        often = by_score(
            lambda blocks, seen: seen,
            init=lambda num_ids: jnp.zeros(num_ids, jnp.int32),
            touch=lambda seen, blocks, ids, now: seen.at[jnp.where(ids >= 0, ids, len(seen))].add(1, mode="drop"),
        )

    A learned score has its weights there: `init(spec, policy, policy_state=weights)`.

    Args:
      fn: from `Blocks` to a score per block, f32[B] or i32[B] (exact up to 2.1e9); with `init` it takes the policy's
        state too, `fn(blocks, pstate)`.
      timed: whether fn takes the time, i32[] ms, too, as its last argument.
      init: num_ids to the policy's state, a pytree of arrays; None: there is none. Block ids may be reused for other
        contents; `blocks.generation` tells.
      touch: (pstate, blocks, ids i32[K], now i32[]) to the policy's state after a release, as in `EvictionPolicy`;
        None: nothing changes it.

    Raises:
      ValueError: for `touch` without `init`.
    """
    if touch is not None and init is None:
        raise ValueError("touch: got a function, wanted None (without init= there is no state that it could change)")

    def victims(pstate, blocks, eligible, wanted, now, size):
        def choose():
            score = fn(blocks, *([] if init is None else [pstate]), *([now] if timed else []))
            if score.shape != blocks.fill.shape:
                raise ValueError(
                    f"by_score: the score has shape {score.shape}, wanted one per block {blocks.fill.shape}"
                )
            score = _as_ordered_float(score)
            return _pop_leaves(score, blocks, eligible, wanted, size)

        return lax.cond(wanted > 0, choose, lambda: jnp.full((size,), -1, jnp.int32)), pstate

    return EvictionPolicy(
        init or (lambda num_ids: ()), touch or (lambda pstate, blocks, ids, now: pstate), victims, idle=touch is None
    )


def _pop_leaves(score: jax.Array, blocks: Blocks, eligible: Eligible, wanted: jax.Array, size: int) -> jax.Array:
    """The `wanted` lowest by repeated removal of the lowest leaf, where a removal can make its parent a leaf."""
    num_ids = score.shape[0]
    leaf = eligible(jnp.arange(num_ids, dtype=jnp.int32)) & (blocks.children == 0)
    _, front = lax.top_k(jnp.where(leaf, -score, -jnp.inf), min(size, num_ids))
    front = jnp.where(pick(leaf, front), front.astype(jnp.int32), -1)

    def step(i, carry):
        front, ids = carry
        at = jnp.argmin(jnp.where(front >= 0, pick(score, front), jnp.inf))
        block = front[at]
        ids = ids.at[i].set(block)
        parent = pick(blocks.parent, block)[0]
        gone = count((ids >= 0) & (pick(blocks.parent, ids)[:, 0] == parent))
        exposed = (block >= 0) & (parent >= 0) & eligible(parent) & (pick(blocks.children, parent) == gone)
        return front.at[at].set(jnp.where(exposed, parent, -1)), ids

    return lax.fori_loop(0, jnp.minimum(wanted, size), step, (front, jnp.full((size,), -1, jnp.int32)))[1]


def _as_ordered_float(score: jax.Array) -> jax.Array:
    """f32 in the same order: integers keep all their bits (as floats above 2^24 they would not), NaN goes last."""
    largest = np.float32(np.finfo(np.float32).max)
    if jnp.issubdtype(score.dtype, jnp.floating):
        score = score.astype(jnp.float32)
        return jnp.clip(jnp.where(jnp.isnan(score), largest, score), -largest, largest)
    size = jnp.minimum(jnp.abs(jnp.maximum(score.astype(jnp.int32), -(2**31) + 1)), 0x7E000000)
    normal = lax.bitcast_convert_type(size + 0x00800000, jnp.float32)
    return jnp.where(score < 0, -normal, normal)


@functools.cache
def priority() -> EvictionPolicy:
    """Evicts the block that is worth least, of equals the least recently released; needs a spec with `retention`.

    A parent outlives its cached children, so a valuable tail protects its whole prefix. Of blocks that were released
    more than 16.7 million releases ago any may count as the older.

    Source: TensorRT-LLM's LRUEvictionPolicy, one queue for each priority.
    """
    ages = 1 << 24

    def score(blocks: Blocks, now: jax.Array) -> jax.Array:
        age = jnp.minimum(blocks.clock - blocks.released, ages - 1)
        return priority_at(blocks, now) * ages + (ages - 1 - age)

    return by_score(score, timed=True)


@functools.cache
def trt_leaf() -> EvictionPolicy:
    """The order of TensorRT-LLM, for study: that of `priority()`, but a time to live that ends counts as a release.

    A block whose time is over goes to the back of the queue of priority 35 and begins to age there; `priority()` goes
    on counting from its release. Empty blocks are taken first, as everywhere in kvjax. Costs a sort of all blocks in
    a call that evicts; needs a spec with `retention`.

    Source: TensorRT-LLM's LRUEvictionPolicy with `refresh` before every request, in its form where only leaves are
    evicted.
    """

    def score(blocks: Blocks, now: jax.Array) -> jax.Array:
        worth = priority_at(blocks, now)
        assert blocks.retention is not None and blocks.expiry is not None
        over = worth != blocks.retention[:, 0]
        # The expiry is the release plus the time to live, which is -1 where there is none.
        queued = later(blocks.expiry, jnp.where(over, 0, -blocks.retention[:, 1]))
        order = jnp.lexsort((blocks.released - blocks.clock, queued[:, 1], queued[:, 0], worth)).astype(jnp.int32)
        return put(jnp.zeros_like(order), order, np.arange(order.shape[0], dtype=np.int32), order >= 0)

    return by_score(score, timed=True)


def vllm_v1() -> EvictionPolicy:
    """The order of vLLM v1, for study, which is exactly `lru()`: one queue, of a request the tails before the heads.

    Exact for a vLLM that puts blocks without contents in front of the queue (0.33): kvjax takes empty blocks first
    too. Before that (0.11) they went to its end, so that cached blocks left in the same order, but sooner.

    Source: vLLM's FreeKVCacheBlockQueue.
    """
    return lru()


@functools.cache
def cost_aware(balance: int = 24_576) -> EvictionPolicy:
    """Evicts the lowest cost / age, where cost = fill * (balance + position): what a block's tokens took to compute.

    The cost of a token is that of the layers that see it alone plus that of attention, which grows with its position:
    of two blocks the one that costs twice as much may lie twice as long. Of equal costs the least recently released
    leaves first; a tail of few tokens leaves early, since it takes a whole block. This is GreedyDual with nothing to
    remember: there too a block of cost c leaves after c turnovers of the pool.

    Args:
      balance: the position at which attention costs as much as all else; about six times the model's width.

    Source: GreedyDual-Size (Cao and Irani 1997); cost / age as in Hyperbolic Caching (Blankstein et al. 2017).
    """

    def score(blocks: Blocks) -> jax.Array:
        fill = blocks.fill.astype(jnp.float32)
        middle = blocks.depth.astype(jnp.float32) * blocks.tokens.shape[1] + fill / 2
        age = jnp.maximum(blocks.clock - blocks.released, 1).astype(jnp.float32)
        return fill * (balance + middle) / age

    return by_score(score)


@functools.cache
def fifo() -> EvictionPolicy:
    """Evicts the block that was stored first."""
    return by_score(lambda blocks: blocks.stored - blocks.clock)


@functools.cache
def lfu() -> EvictionPolicy:
    """Evicts the block that was reused least often since it was stored."""
    return by_score(lambda blocks: blocks.hits)


@functools.cache
def random() -> EvictionPolicy:
    """Evicts any leaf, by a hash of when it was released: the same history gives the same victims."""
    return by_score(lambda blocks: (mix(blocks.released.astype(jnp.uint32)) >> np.uint32(1)).astype(jnp.int32))
