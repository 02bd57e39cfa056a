# SPDX-License-Identifier: Apache-2.0
"""The ring: an exact LRU order, with O(1) work for a release."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, loop, pick, put, rank, ranked
from kvjax.state import COPYING, Blocks, Eligible, EvictionPolicy
from pallas_kernels.loops import while_loop


class Ring(NamedTuple):
    """Cached blocks in order of release. An entry is live while its block is cached and was not released since."""

    order: jax.Array  # i32[R]; block ids; R is a power of two of at least 2B; position p is at index p mod R
    stamp: jax.Array  # i32[B]; position of each block's newest entry
    head: jax.Array  # i32[]; position of the oldest entry; positions are compared by difference and may wrap
    tail: jax.Array  # i32[]; position after the newest entry


@functools.cache
def lru() -> EvictionPolicy:
    """Evicts the least recently released block. Costs O(blocks touched).

    Parents are released after their children, so leaves come first in the order of release.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state = kvjax.init(spec, kvjax.lru(), num_blocks=6)
      >>> for prompt in (np.arange(10), np.arange(50, 60)):  # three blocks each
      ...     state, _ = kvjax.admit(state, 0, prompt, 10)
      ...     state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      ...     state, _ = kvjax.release(state, 0)
      >>> state, events = kvjax.admit(state, 0, np.arange(90, 100), 10)
      >>> [(event["kind"], event["block"]) for event in kvjax.to_list(events)]  # the first prompt's, tail first
      [('removed', 2), ('removed', 1), ('removed', 0)]

    Source: vLLM's free queue, with lazy deletion in place of a linked list.
    """
    return EvictionPolicy(_init_ring, _push, _pop, _drop, idle=True, name="lru")


def _init_ring(num_ids: int) -> Ring:
    size = 1 << (2 * num_ids - 1).bit_length()
    return Ring(jnp.zeros((size,), jnp.int32), jnp.zeros((num_ids,), jnp.int32), jnp.int32(0), jnp.int32(0))


def _read(ring: Ring, blocks: Blocks, start: jax.Array, size: int):
    """Reads `size` positions from `start` on: (position, block, whether the entry is live), each [size]."""
    position = start + np.arange(size, dtype=np.int32)
    ids = pick(ring.order, position & (ring.order.shape[0] - 1))
    idle = pick(blocks.refcount, ids) % COPYING == 0  # a block that is being copied keeps its turn
    live = (pick(ring.stamp, ids) == position) & idle & (pick(blocks.fill, ids) > 0)
    return position, ids, live & (position - ring.tail < 0)


def _push(ring: Ring, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Ring:
    del now
    is_new = ids >= 0
    num_before, num_new = ranked(is_new)
    capacity = ring.order.shape[0]
    chunk = min(1024, capacity)

    def squeeze(carry):
        # Moves live entries forward over dead entries, a chunk at a time. The write position never passes the read
        # position.
        order, stamp, read, write = carry
        _, block, live = _read(ring._replace(order=order, stamp=stamp), blocks, read, chunk)
        live = live & full
        num_before, num_live = ranked(live, small=True)
        position = write + num_before
        order = put(order, position & (capacity - 1), block, live)
        stamp = put(stamp, block, position, live)
        return order, stamp, read + chunk, write + num_live

    full = ring.tail - ring.head + num_new > capacity
    start = (ring.order, ring.stamp, ring.head, ring.head)
    order, stamp, _, end = loop(lambda carry: full & (carry[2] - ring.tail < 0), squeeze, start)
    tail = jnp.where(full, end, ring.tail)
    position = tail + num_before
    order = put(order, position & (capacity - 1), ids, is_new)
    stamp = put(stamp, ids, position, is_new)
    return Ring(order, stamp, ring.head, tail + num_new)


def _pop(ring: Ring, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int):
    del now
    chunk = min(max(size, 16), ring.order.shape[0])

    def scan(carry):
        read, num_victims, ids, head, passed_over = carry
        position, block, live = _read(ring, blocks, read, chunk)
        free = live & eligible(block)
        index = num_victims + rank(free)
        take = free & (index < wanted)
        ids = put(ids, index, block, take)
        # The head stops at the first live but ineligible entry, so the entry keeps its turn.
        spared = live & ~free & (index < wanted)
        first = jnp.min(jnp.where(spared, position - read, chunk))
        head = jnp.where(passed_over, head, read + first)
        num_victims = num_victims + count(take)
        read = jnp.where(num_victims < wanted, read + chunk, jnp.max(jnp.where(take, position - read, -1)) + 1 + read)
        passed_over = passed_over | jnp.any(spared)
        return read, num_victims, ids, jnp.where(passed_over, head, read), passed_over

    start = (ring.head, jnp.int32(0), jnp.full((size,), -1, jnp.int32), ring.head, jnp.bool_(False))
    _, _, ids, head, _ = while_loop(lambda c: (c[1] < wanted) & (c[0] - ring.tail < 0), scan, start)
    return ids, ring._replace(head=jnp.where(head - ring.tail > 0, ring.tail, head))


def _drop(ring: Ring, ids: jax.Array) -> Ring:
    return ring._replace(stamp=put(ring.stamp, ids, ring.head - 1, ids >= 0))


def vllm_v1() -> EvictionPolicy:
    """Evicts in the order of vLLM v1, for study. It equals `lru()`: a single queue, tails of requests before heads.

    It is exact for vLLM 0.33, which puts blocks without contents at the front of the queue, as kvjax takes empty blocks
    first. vLLM 0.11 put them at the end, so cached blocks left in the same order, but sooner.

    Source: vLLM's FreeKVCacheBlockQueue.
    """
    return lru()
