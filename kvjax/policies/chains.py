# SPDX-License-Identifier: Apache-2.0
"""Chains: an order of release for each of several classes of blocks, all in one log.

Cached blocks stand in the log in order of release, and each entry points to the next one of its class:

    position   0    1    2    3    4    5          class 0   first 0, then 1, 4
    block      7    2    9    4    3    2          class 1   first 2, then 3, 5
    class      0    0    1    1    0    1          block 2 was released again: entry 1 is dead, and skipped
    follows    1    4    3    5    -    -

Entries die where they stand. Once the log is full the live ones move to its front, so a release costs O(1) over time.
Live entries before the first one of their class are parked: they had cached children when their turn came.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, loop, pick, put, rank
from kvjax.state import COPYING, NO_BLOCK, Blocks

NONE = -1  # no position


class Chains(NamedTuple):
    """The log and the classes in it. An entry is live while its block is cached and was not released since.

    Attributes:
      order: i32[2B]; the block of each entry, in order of release.
      follows: i32[2B]; position of the next entry of the same class, -1 after the last one.
      stamp: i32[B]; position of each block's newest entry, -1 if it has gone to another tier.
      label: i32[B]; the class of that entry.
      begin: i32[C]; position of each class's oldest entry, -1 if it has none.
      first: i32[C]; position of its first entry that is not parked and may be live, -1 if there is none.
      last: i32[C]; position of its last entry, if it has any.
      end: i32[]; length of the log.
      exposed: i32[]; a parked block whose last child left in the last call, or NO_BLOCK. It is next.
      parked: bool[]; whether any entry was ever parked.
      own: a state of the policy's functions.
    """

    order: jax.Array
    follows: jax.Array
    stamp: jax.Array
    label: jax.Array
    begin: jax.Array
    first: jax.Array
    last: jax.Array
    end: jax.Array
    exposed: jax.Array
    parked: jax.Array
    own: Any


def init_chains(num_ids: int, classes: int, own: Any) -> Chains:
    """The chains of C classes, without blocks."""
    none = lambda size: jnp.full((size,), NONE, jnp.int32)  # noqa: E731
    return Chains(
        order=jnp.zeros((2 * num_ids,), jnp.int32), follows=none(2 * num_ids),
        stamp=none(num_ids), label=jnp.zeros((num_ids,), jnp.int32),
        begin=none(classes), first=none(classes), last=none(classes), end=jnp.int32(0),
        exposed=jnp.int32(NO_BLOCK), parked=jnp.bool_(False), own=own,
    )  # fmt: skip


def make_room(chains: Chains, blocks: Blocks, number: jax.Array) -> Chains:
    """The log with room for a number i32[] of entries: if there is too little, live entries move to the front."""
    full, end = chains.end + number > chains.order.shape[0], chains.end
    chunk = np.arange(min(1024, chains.order.shape[0]), dtype=np.int32)

    def move(carry):
        # A chunk at a time, in order; the end of what is written never passes what is read.
        chains, at = carry
        block, live = read(chains, blocks, at + chunk)
        live, label = live & full & (at + chunk < end), pick(chains.label, block)
        return append(chains, block, label, live, is_parked(first, at + chunk, label)), at + chunk.size

    first = chains.first
    begin, none = (jnp.where(full, NONE, positions) for positions in (chains.begin, first))
    start = chains._replace(end=jnp.where(full, 0, end), begin=begin, first=none)
    return loop(lambda carry: full & (carry[1] < end), move, (start, jnp.int32(0)))[0]


def append(
    chains: Chains, ids: jax.Array, label: jax.Array, where: jax.Array, parked: jax.Array | None = None
) -> Chains:
    """Appends blocks ids i32[K] of classes label i32[K], where bool[K], for which there is room.

    Those that are parked, bool[K], stand before all others of their class, and stay so.
    """
    position, total = chains.end + rank(where), count(where)
    order = put(chains.order, position, ids, where)
    follows = put(chains.follows, position, position + 1, where)
    stamp, labels = put(chains.stamp, ids, position, where), put(chains.label, ids, label, where)
    # Entries of one class that come one after the other are a run. Runs are linked, one after the other.
    kind = 2 * label + (0 if parked is None else parked.astype(jnp.int32))
    packed = put(jnp.full_like(kind, -1), rank(where), kind, where)
    index = np.arange(label.shape[0], dtype=np.int32)
    starts = packed != jnp.concatenate([packed[:1] - 1, packed[:-1]])

    def link(carry):
        follows, begin, first, last, at = carry
        stop = jnp.min(jnp.where(starts & (index > at), index, total))
        going, kind, head, tail = at < total, pick(packed, at), chains.end + at, chains.end + stop - 1
        own, counts = kind // 2, kind % 2 == 0
        continues = pick(begin, own) >= 0
        ends = jnp.stack([pick(last, own), tail])
        follows = put(follows, ends, jnp.stack([head, jnp.int32(NONE)]), jnp.stack([going & continues, going]))
        begin = put(begin, own[None], head[None], (going & ~continues)[None])
        first = put(first, own[None], head[None], (going & counts & (pick(first, own) < 0))[None])
        return follows, begin, first, put(last, own[None], tail[None], going[None]), jnp.where(going, stop, at)

    start = (follows, chains.begin, chains.first, chains.last, jnp.int32(0))
    follows, begin, first, last, _ = loop(lambda carry: carry[-1] < total, link, start)
    return chains._replace(
        order=order, follows=follows, stamp=stamp, label=labels, begin=begin, first=first, last=last,
        end=chains.end + total,
    )  # fmt: skip


def is_parked(first: jax.Array, position: jax.Array, label: jax.Array) -> jax.Array:
    """bool[...]; whether live entries at position i32[...], of classes label i32[...], stand before first i32[C]."""
    at = pick(first, label)
    return (at < 0) | (position < at)


def read(chains: Chains, blocks: Blocks, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of entries at position i32[...], and bool[...], which of them are live."""
    ids = pick(chains.order, position)
    idle = pick(blocks.refcount, ids) % COPYING == 0  # a block that is copied keeps its turn
    return ids, (position >= 0) & (pick(chains.stamp, ids) == position) & idle & (pick(blocks.fill, ids) > 0)
