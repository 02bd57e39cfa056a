# SPDX-License-Identifier: Apache-2.0
"""A policy that learns while the cache runs: it evicts the block with the fewest expected hits per block and time.

The policy remembers the contents of released blocks, also after their eviction. So it knows which contents were
used again, at which age, and their properties at the release before:

    property   values                                                    an example
    turns      uses of the conversation's last block, in 8 ranges        a third turn is mostly followed by a fourth
    new        blocks added by the request, in powers of two             a long new document is seldom asked about twice
    uses       uses of the block itself, in 7 ranges                     the blocks of a shared prefix
    gap        age of the conversation's last block, in powers of two    an agent's steps follow each other quickly

Each value has a share of blocks used again, so a block has log odds: a sum over its four values. They choose its level
on release, from 0 to 7. The ages at reuse are a histogram for all levels, and a level multiplies it. Histogram and
multiplier give the expected hits per block and time at each age, f32[LEVELS, AGES]. The levels are the classes of a
`by_class`, so the oldest leaves of eight queues are compared. LRU would evict the oldest of them. Another leaves in its
place if its density is below 0.6 times as much.

Ages are readings of `Blocks.clock`: blocks released or published since. All counts are halved every 64 turnovers of the
cache. The policy has no parameter, no training, and needs no time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import count, fence, last_of_each, mix, pick, put
from kvjax.policies.classes import Chains, by_class
from kvjax.state import DEFAULT_PRIORITY, Blocks, EvictionPolicy

LEVELS = 8
PROPERTIES = 4  # turns, new, uses, gap
VALUES = 16  # of each property, at most
_BITS = 4  # of a value in a record
_TURNS = (1, 2, 3, 4, 6, 10, 20)  # the first number of turns in each range but the lowest
_USES = (1, 2, 3, 4, 8, 16)
_MAX_USES = 255
_ENDED = LEVELS  # the class of blocks whose request stated a priority below the default
_CLASSES = LEVELS + 1
_LOW = 5  # ages below 1.5 * 2^_LOW are a range, then there are two ranges an octave
AGES = 2 * (31 - _LOW)
_SLOTS = 16  # remembered contents, for each block of the cache
_HALF_LIFE = 64  # turnovers of the cache
_HORIZON = 16  # turnovers of the cache; a hit farther in the future counts e times less
_REQUESTS = 4  # a value's share of reuse is drawn to the average, as if by average requests
_OLDEST = 0.6  # the density of the oldest head is multiplied by this
_CAUTION = 0.7  # the four properties are not independent, so their log odds are added with this weight


class Note(NamedTuple):
    """The last release of contents."""

    clock: jax.Array  # i32[...]; the reading of `Blocks.clock`
    record: jax.Array  # i32[...]; the value of each property and the level, of 4 bits each, then the number of uses


class Counts(NamedTuple):
    """Releases and reuses so far, with exponential forgetting."""

    released: jax.Array  # f32[PROPERTIES + 1, VALUES]; blocks released with each value. The last row counts levels
    reused: jax.Array  # f32[PROPERTIES + 1, VALUES]; blocks used again after such a release
    ages: jax.Array  # f32[AGES]; blocks used again at an age
    squares: jax.Array  # f32[]; the sum over requests of the square of their blocks


class Memory(NamedTuple):
    """Everything the policy knows."""

    counts: Counts
    blocks: Note  # [B]; of each block
    generation: jax.Array  # i32[B]; the generation of the block's note; another generation has no note
    num_blocks: jax.Array  # i32[]; blocks with a note
    contents: Note  # [slots]; of contents by their key, evicted or not
    tag: jax.Array  # i32[slots]; a hash of these contents; a mistaken one costs a wrong count, never a wrong hit
    density: jax.Array  # f32[LEVELS, AGES]; expected hits per block and tick of the clock


@functools.cache
def adaptive() -> EvictionPolicy:
    """Evicts the block with the fewest expected hits per block and time, learned while the cache runs.

    You choose nothing and train nothing. The policy counts which released blocks are used again, and at which age, for
    blocks with similar histories. Until it has seen reuse it is LRU. It remembers contents after their eviction, 16
    to 32 for each block of the cache, of 12 bytes each. Costs O(blocks touched), more than `lru`: a score of nine
    queues for each victim.

    If a session ends, you may state so: with `retention=True` in the spec, blocks released with a priority below
    the default of 35 leave first. Higher priorities change nothing.

    `python -m kvjax.research compare` prints its hits next to other policies.

    Example:
      >>> from kvjax import policies, research
      >>> trace = research.draw_trace(seed=0, requests=300)
      >>> sizes = [2000]
      >>> bool(research.simulate(trace, policies.adaptive(), sizes).rate > research.lru_curve(trace, sizes).rate)
      True

    Source: hit density as in LHD (Beckmann, Chen and Cidon 2018). ARC (Megiddo and Modha 2003) remembers evicted
    contents too.
    """
    return _levels()._replace(touch=_learn_and_queue)


@functools.cache
def _levels() -> EvictionPolicy:
    return by_class(_class_of, _density_of, classes=_CLASSES, init=_no_memory, name="adaptive")


def _no_memory(num_ids: int) -> Memory:
    slots = 1 << (_SLOTS * num_ids - 1).bit_length()
    table = jnp.zeros((PROPERTIES + 1, VALUES), jnp.float32)
    zeros = lambda size: jnp.zeros((size,), jnp.int32)  # noqa: E731
    return Memory(
        counts=Counts(table, table, jnp.zeros((AGES,), jnp.float32), jnp.float32(0)),
        blocks=Note(zeros(num_ids), zeros(num_ids)),
        generation=zeros(num_ids),
        num_blocks=jnp.int32(0),
        contents=Note(zeros(slots), zeros(slots)),
        tag=zeros(slots),
        density=jnp.zeros((LEVELS, AGES), jnp.float32),
    )


def _learn_and_queue(chains: Chains, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Chains:
    """See `EvictionPolicy.touch`."""
    return _levels().touch(chains._replace(state=learn(chains.state, blocks, ids)), blocks, ids, now)


def _class_of(blocks: Blocks, ids: jax.Array, memory: Memory) -> jax.Array:
    """i32[K]; see `by_class`. `learn` has just noted these blocks."""
    level = pick(memory.blocks.record, ids) >> (_BITS * PROPERTIES) & (VALUES - 1)
    return jnp.where(blocks.requested_priority(ids) < DEFAULT_PRIORITY, _ENDED, level)


def _density_of(blocks: Blocks, heads: jax.Array, memory: Memory) -> jax.Array:
    """f32[C]; see `by_class`. Between the beginnings of two ranges of ages it is interpolated.

    LRU's choice, the oldest head, leaves unless another head is clearly worse.
    """
    age = jnp.where(heads >= 0, blocks.clock - pick(blocks.released, heads), -1)[:LEVELS]
    index = age_range(age)
    level = np.arange(LEVELS, dtype=np.int32)
    begin = pick(jnp.asarray(_LIMITS), index)
    end = pick(jnp.asarray(_LIMITS), index + 1)
    here = pick(memory.density, (level, index))
    after = pick(memory.density, (level, jnp.minimum(index + 1, AGES - 1)))
    density = here + (after - here) * (age.astype(jnp.float32) - begin) / (end - begin)
    density *= jnp.where(age == jnp.max(age), _OLDEST, 1)
    return jnp.append(density, jnp.float32(-1))


class Reuse(NamedTuple):
    """The known history of a request's blocks at their release, padded as their ids are."""

    is_known: jax.Array  # bool[K]; whether there is a note of the contents
    age: jax.Array  # i32[K]; ticks from that note to the beginning of this request
    record: jax.Array  # i32[K]; the noted record
    uses: jax.Array  # i32[K]; uses of the contents, this one too
    turns: jax.Array  # i32[]; uses of the deepest known block, 0 if none is known
    gap: jax.Array  # i32[]; age of the deepest known block, -1 if none is known
    num_new: jax.Array  # i32[]; blocks deeper than that


def learn(memory: Memory, blocks: Blocks, ids: jax.Array) -> Memory:
    """The memory after the release of a request's blocks, ids i32[K] padded with NO_BLOCK."""
    is_released = ids >= 0
    num_released = count(is_released)
    slot, tag = _place(blocks, ids, memory.tag.shape[0])
    kept = is_released & (pick(memory.generation, ids) == pick(blocks.generation, ids))
    reuse = _reuse(memory, blocks, ids, kept, slot, tag)
    num_blocks = memory.num_blocks + count(is_released & (pick(memory.generation, ids) == 0))
    memory, reuse, num_blocks = fence(memory, reuse, num_blocks)

    turnover = jnp.maximum(num_blocks, 1).astype(jnp.float32)
    decay = jnp.exp2(-num_released.astype(jnp.float32) / (_HALF_LIFE * turnover))
    counts = jax.tree.map(lambda x: x * decay, memory.counts)
    counts = counts._replace(
        reused=counts.reused + _tally(values_of(reuse.record), VALUES, reuse.is_known),
        ages=counts.ages + _tally(age_range(reuse.age)[:, None], AGES, reuse.is_known)[0],
    )
    values = properties(reuse)
    level = levels(counts, values)
    values = jnp.concatenate([values, level[:, None]], axis=1)
    counts = counts._replace(
        released=counts.released + _tally(values, VALUES, is_released),
        squares=counts.squares + num_released.astype(jnp.float32) ** 2,
    )

    shifts = np.arange(0, _BITS * (PROPERTIES + 1), _BITS, dtype=np.int32)
    record = jnp.sum(values << shifts[None], axis=1, dtype=jnp.int32) + (reuse.uses << (_BITS * (PROPERTIES + 1)))
    note = Note(pick(blocks.released, ids), record)
    marked, is_last = last_of_each(memory.tag, slot, is_released)
    new = Memory(
        counts,
        put(memory.blocks, ids, note, is_released),
        put(memory.generation, ids, pick(blocks.generation, ids), is_released),
        num_blocks,
        put(memory.contents, slot, note, is_last),
        put(marked, slot, tag, is_last),
        densities(counts, turnover),
    )
    return new._replace(
        counts=jax.tree.map(lambda n, o: jnp.where(num_released > 0, n, o), new.counts, memory.counts),
        density=jnp.where(num_released > 0, new.density, memory.density),
    )


def _place(blocks: Blocks, ids: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """i32[K], the slots of the contents of blocks ids i32[K], and their tags i32[K], at least 0."""
    key = pick(blocks.key, ids)
    slot = (mix(key[:, 0]) & np.uint32(num_slots - 1)).astype(jnp.int32)
    return slot, (mix(key[:, 1]) >> np.uint32(1)).astype(jnp.int32)


def _reuse(memory: Memory, blocks: Blocks, ids: jax.Array, kept: jax.Array, slot: jax.Array, tag: jax.Array) -> Reuse:
    is_released = ids >= 0
    is_known = kept | (is_released & (pick(memory.tag, slot) == tag))
    noted = jax.tree.map(
        lambda of_block, of_content: jnp.where(kept, pick(of_block, ids), pick(of_content, slot)),
        memory.blocks,
        memory.contents,
    )
    # The request began before it published its new blocks, and these before the first release.
    first_release = jnp.max(jnp.where(is_released, blocks.clock - pick(blocks.released, ids), 0))
    begin = blocks.clock - first_release - count(is_released & ~kept)
    age = jnp.maximum(begin - noted.clock, 0)
    depth = pick(blocks.depth, ids)
    deepest = jnp.argmax(jnp.where(is_known, depth, -1))
    any_known = is_known[deepest]
    last_known = jnp.where(any_known, depth[deepest], -1)
    uses = jnp.minimum((noted.record >> (_BITS * (PROPERTIES + 1))) + 1, _MAX_USES)
    turns = jnp.where(any_known, uses[deepest], 0)
    # A parent is used whenever its child is, so its use is known even if its slot was lost.
    uses = jnp.where(is_known, uses, jnp.where(depth < last_known, turns, 0))
    return Reuse(
        is_known,
        age,
        noted.record,
        uses,
        turns,
        jnp.where(any_known, age[deepest], -1),
        count(is_released & (depth > last_known)),
    )


def values_of(record: jax.Array) -> jax.Array:
    """i32[K, PROPERTIES + 1]; the values and the level in records i32[K]."""
    shifts = np.arange(0, _BITS * (PROPERTIES + 1), _BITS, dtype=np.int32)
    return (record[:, None] >> shifts[None]) & (VALUES - 1)


def properties(reuse: Reuse) -> jax.Array:
    """i32[K, PROPERTIES]; the value of each property of a request's blocks."""
    turns = _in_ranges(reuse.turns[None], _TURNS)
    new = jnp.minimum(_num_bits(reuse.num_new), VALUES - 1)
    uses = _in_ranges(reuse.uses, _USES)
    gap = jnp.where(reuse.gap < 0, 0, 1 + jnp.minimum(_num_bits(reuse.gap >> _LOW), VALUES - 2))
    return jnp.stack([jnp.broadcast_to(value, uses.shape) for value in (turns[0], new, uses, gap)], axis=1)


def _in_ranges(x: jax.Array, limits: tuple[int, ...]) -> jax.Array:
    """i32[K]; the range of each x i32[K]: the number of limits up to x."""
    return jnp.sum(x[:, None] >= np.array(limits, np.int32)[None], axis=1, dtype=jnp.int32)


def _num_bits(x: jax.Array) -> jax.Array:
    """i32[...]; the number of bits of x i32[...], 0 for 0."""
    return 32 - lax.clz(x)


def levels(counts: Counts, values: jax.Array) -> jax.Array:
    """i32[K]; the levels of blocks with these values i32[K, PROPERTIES]: their log odds of reuse, rounded down."""
    released = jnp.sum(counts.released[0])
    average = (jnp.sum(counts.ages) + 1) / (released + 2)
    weight = _weight(counts, released)
    share = (counts.reused + weight * average) / (counts.released + weight)
    base = _log_odds(jnp.clip(average, 1e-3, 1 - 1e-3))
    gain = _CAUTION * (_log_odds(jnp.clip(share, 1e-4, 1 - 1e-4)) - base)
    row = np.arange(PROPERTIES, dtype=np.int32)
    odds = base + jnp.sum(pick(gain, (row[None], values)), axis=1)
    odds = jnp.where(jnp.sum(counts.ages) > 0, odds, 0)  # a single level, so LRU, until something is used again
    return jnp.clip(jnp.floor(odds).astype(jnp.int32) + LEVELS // 2, 0, LEVELS - 1)


def _weight(counts: Counts, released: jax.Array) -> jax.Array:
    """f32[]; blocks of average reuse added to the blocks of each value. Blocks of a request are not independent."""
    return _REQUESTS * jnp.maximum(counts.squares / jnp.maximum(released, 1), 1)


def _log_odds(share: jax.Array) -> jax.Array:
    return jnp.log(share) - jnp.log1p(-share)


def densities(counts: Counts, turnover: jax.Array) -> jax.Array:
    """f32[LEVELS, AGES]; expected hits per block and tick of a block at the beginning of each range of ages.

    A cached block yields a hit with probability `hazard` in each range, and takes a block of space until then. Both
    sums are discounted over 16 turnovers, f32[], of the cache. The density never rises with age, so a level is a queue.
    """
    released = jnp.maximum(jnp.sum(counts.released[0]), 1)
    average = jnp.maximum(jnp.sum(counts.ages) / released, 1e-6)
    weight = _weight(counts, released)
    share = (counts.reused[-1] + weight * average) / (counts.released[-1] + weight)
    multiplier = jnp.minimum(share[:LEVELS] / average, 0.98 / average)
    reused = multiplier[:, None] * (counts.ages / released)[None]
    remaining = jnp.maximum(1 - (jnp.cumsum(reused, axis=1) - reused), 1e-3)
    hazard = jnp.minimum(reused / remaining, 1 - 1e-6)
    discount = jnp.exp(-jnp.asarray(_LIMITS[:-1]) / (_HORIZON * turnover))[None]
    hits = discount * remaining * hazard
    time = discount * remaining * np.diff(_LIMITS)[None] * (1 - hazard / 2)
    from_here = lambda x: jnp.cumsum(x[:, ::-1], axis=1)[:, ::-1]  # noqa: E731
    time = from_here(time)
    density = jnp.where(time > 0, from_here(hits) / jnp.where(time > 0, time, 1), 0)
    return lax.cummin(density, axis=1)


def age_range(age: jax.Array) -> jax.Array:
    """i32[...]; the range of ages i32[...]: [2^k, 1.5 * 2^k) and [1.5 * 2^k, 2^(k + 1)) alternate."""
    age = jnp.maximum(age, 1 << _LOW)
    octave = 31 - lax.clz(age)
    return 2 * (octave - _LOW) + (lax.shift_right_logical(age, octave - 1) & 1)


def _limits() -> np.ndarray:
    octave, half = np.divmod(np.arange(AGES + 1), 2)
    limits = 2.0 ** (_LOW + octave) * (1 + half / 2)
    limits[0] = 0
    return limits.astype(np.float32)


_LIMITS = _limits()  # f32[AGES + 1]; the first age of each range, and the end of the last range


def _tally(values: jax.Array, num_values: int, where: jax.Array) -> jax.Array:
    """f32[P, num_values]; how often each value occurs in each column of i32[K, P], where bool[K]."""
    is_value = values[..., None] == np.arange(num_values, dtype=np.int32)[None, None]
    return jnp.sum(is_value & where[:, None, None], axis=0, dtype=jnp.int32).astype(jnp.float32)
