# SPDX-License-Identifier: Apache-2.0
"""Policies of classes: an order of release for each, and the class whose head scores least loses it.

The orders are chains in one log. Cached blocks stand in it in order of release, each entry pointing to the next one of
its class:

    position   0    1    2    3    4    5          class 0   first 0, then 1, 4
    block      7    2    9    4    3    2          class 1   first 2, then 3, 5
    class      0    0    1    1    0    1          block 2 was released again: entry 1 is dead, and skipped
    follows    1    4    3    5    -    -

Entries die where they stand. Once the log is full the live ones move to its front, so a release costs O(1) over time.
Live entries before the first one of their class are parked: they had cached children when their turn came.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, loop, pick, put, rank
from kvjax.checks import check_functions, integers, static_int
from kvjax.policies.scores import Bound, check_hash, ordered
from kvjax.state import COPYING, NO_BLOCK, Blocks, Eligible, EvictionPolicy

_NONE = -1  # no position
_DEAD = -2  # in place of a head: the entry is dead, and the class has to go on to the next one
_MOST_HITS = 120
_CHUNK = 16  # entries of the lowest class that are looked at at once, where classes themselves are the order


def by_class(
    fn: Callable[..., jax.Array],
    score: Callable[..., jax.Array] | None = None,
    *,
    classes: int,
    timed: bool = False,
    init: Callable[[int], Any] | None = None,
    name: str | None = None,
) -> EvictionPolicy:
    """Evicts the head of a class, again and again: of the class whose head scores least; NaN leaves last.

    A block gets its class when it is released, and stands behind all of its class. So the blocks of a class leave in
    order of release, whatever they score. A head that may not be named, because it has cached children, keeps its turn,
    and the next of its class takes its place; it leaves right after the last of its children.

    Costs O(blocks touched + classes) where `by_score` costs a pass over all blocks. Without a `score` many blocks leave
    at once; with one, each costs a call of it.

        by_reuse = by_class(lambda blocks, ids: blocks.hits[ids], classes=8)  # rarely reused ones first

    Args:
      fn: (blocks, ids i32[K]) to i32[K], the classes of released blocks, cut to 0..classes-1. NO_BLOCK is padding.
      score: (blocks, heads i32[C]) to f32[C] or i32[C], the score of each class's head; of equal ones the lower class
        loses its head. Where a class has none heads has NO_BLOCK, and no score matters. None: lower classes first.
      classes: C.
      timed: whether both functions take the time, i32[] ms, too, as their last argument.
      init: num_ids to a state of the functions' own, a pytree of arrays such as weights; both take it after their other
        arguments. As `policy_state` others are `policy.init(num_ids)._replace(own=weights)`. None: no state.
      name: what `repr` shows; None: the qualified name of fn.

    Raises:
      ValueError: for less than one class; for a function that cannot be hashed.
    """
    classes = static_int("classes", classes, 1)
    label, priced = Bound.of("fn", fn), None if score is None else Bound.of("score", score)
    check_functions(init=init)
    check_hash("init", init)
    options = label, priced, classes, timed, init
    return EvictionPolicy(
        _Init(*options),
        _Push(*options),
        _Pop(*options),
        _drop,
        idle=True,
        name=name or label.name,
        parameters=(*label.parameters, *(priced.parameters if priced else ())),
    )


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `by_class` as a value: closures over them would be equal to no others."""

    fn: Bound
    score: Bound | None
    classes: int
    timed: bool
    init: Callable[[int], Any] | None

    def extra_arguments(self, own: Any, now: jax.Array) -> list[Any]:
        """The arguments that both functions take after their others."""
        return [*([] if self.init is None else [own]), *([now] if self.timed else [])]


class _Init(_Options):
    def __call__(self, num_ids: int) -> Chains:
        """See `EvictionPolicy.init`."""
        none = lambda size: jnp.full((size,), _NONE, jnp.int32)  # noqa: E731
        return Chains(
            order=jnp.zeros((2 * num_ids,), jnp.int32),
            follows=none(2 * num_ids),
            stamp=none(num_ids),
            label=jnp.zeros((num_ids,), jnp.int32),
            begin=none(self.classes),
            first=none(self.classes),
            last=none(self.classes),
            end=jnp.int32(0),
            exposed=jnp.int32(NO_BLOCK),
            parked=jnp.bool_(False),
            own=() if self.init is None else self.init(num_ids),
        )


class _Push(_Options):
    def __call__(self, chains: Chains, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Chains:
        """See `EvictionPolicy.touch`."""
        label = integers(
            f"classes of {self.fn.name}", self.fn(blocks, ids, *self.extra_arguments(chains.own, now)), ids.shape
        )
        label = jnp.clip(label, 0, self.classes - 1)
        return _append(_make_space(chains, blocks, count(ids >= 0)), ids, label, ids >= 0)


class _Turn(NamedTuple):
    """The state of a choice of victims."""

    at: jax.Array  # i32[C]; position of the entry that each class looks at next, -1 behind its last one
    first: jax.Array  # i32[C]; as in `Chains`: where `at` is, unless a leaf was passed over that may not be named now
    heads: jax.Array  # i32[C]; the block at `at`: NO_BLOCK behind the last one, _DEAD for an entry that is not live
    ids: jax.Array  # i32[size]; the victims so far
    above: jax.Array  # i32[size]; the parent of each
    found: jax.Array  # i32[]; how many there are
    left: jax.Array  # i32[]; classes that have entries to look at
    # i32[]; a block that was passed over and has lost its last child just now, or NO_BLOCK. It is next
    exposed: jax.Array
    parked: jax.Array  # bool[]; as in `Chains`; leaves that were passed over count, too


class _Pop(_Options):
    def __call__(
        self, chains: Chains, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Chains]:
        """See `EvictionPolicy.victims`."""
        wanted = jnp.minimum(wanted, size)
        due = functools.partial(_due, chains, blocks, eligible)
        step = functools.partial(self.step, chains, blocks, eligible, wanted, now)
        none = jnp.full((size,), NO_BLOCK, jnp.int32)
        start = _Turn(
            chains.first,
            chains.first,
            chains.first,
            none,
            none,
            jnp.int32(0),
            jnp.int32(0),
            due(chains.first, none, chains.exposed),
            chains.parked,
        )

        def pass_through(carry):
            # If too few are found, parked ones have lost their children otherwise: then all are looked at again.
            turn, passes = carry
            again = (passes > 0) & (turn.found < wanted)
            at, first = (jnp.where(again, chains.begin, positions) for positions in (turn.at, turn.first))
            turn = turn._replace(at=at, first=first, heads=self.head(chains, blocks, at), left=count(at >= 0))
            return loop(lambda turn: _going(turn, wanted), step, turn), passes + 1

        turn, _ = loop(lambda carry: (carry[0].found < wanted) & (carry[1] < 2), pass_through, (start, jnp.int32(0)))
        exposed = jnp.where(wanted > 0, turn.exposed, chains.exposed)
        return turn.ids, chains._replace(first=turn.first, exposed=exposed, parked=turn.parked)

    def step(
        self, chains: Chains, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, turn: _Turn
    ) -> _Turn:
        """Names a victim, or some of the lowest class, or passes an entry over."""
        index = np.arange(_CHUNK if self.score is None else 1, dtype=np.int32)
        on, own = _going(turn, wanted), self.lowest(chains, blocks, turn, now)
        apart, at = turn.exposed >= 0, pick(turn.at, own)
        position = jnp.where(apart, pick(chains.stamp, turn.exposed), at) + index
        block, live = _read(chains, blocks, position)
        after, parent = pick(chains.follows, position), pick(blocks.parent, block)[:, 0]
        # The entries up to the first one that is not next in its class, or that may not be named. Where entries are
        # parked, a victim may expose one: then one at a time.
        adjacent = jnp.concatenate([jnp.ones((1,), bool), (after[:-1] == position[1:]) & ~apart & ~turn.parked])
        # Neither a child that is named counts, nor is a block that is named a leaf: a second pass meets it again.
        named = (turn.above[None] == block[:, None]) | (turn.ids[None] == block[:, None])
        gone = jnp.sum(named, axis=1, dtype=jnp.int32)
        earlier = (index[None] < index[:, None]) & live[None] & (parent[None] == block[:, None])
        leaf = pick(blocks.children, block) == gone + jnp.sum(earlier, axis=1, dtype=jnp.int32)
        free = live & leaf & eligible(block)
        passes = jnp.cumprod(adjacent & (free | ~live) & (turn.found + rank(live) < wanted), dtype=jnp.int32) > 0
        taken = passes & live & on
        target = turn.found + rank(taken)
        ids, above = (put(x, target, y, taken) for x, y in ((turn.ids, block), (turn.above, parent)))
        moves, spared = (on & ~apart)[None], ~passes[0] & leaf[0]
        behind = pick(after, jnp.maximum(count(passes) - 1, 0))
        first = put(turn.first, own[None], behind[None], moves & ~spared & (pick(turn.first, own) == at))
        at = put(turn.at, own[None], behind[None], moves)
        heads = put(turn.heads, own[None], self.head(chains, blocks, behind)[None], moves)
        found, left = turn.found + count(taken), turn.left - count(moves & (behind < 0))
        above_it = jnp.where(taken[0] & turn.parked, parent[0], NO_BLOCK)
        exposed = jnp.where(on, _due(chains, blocks, eligible, at, above, above_it), turn.exposed)
        return _Turn(at, first, heads, ids, above, found, left, exposed, turn.parked | (on & ~passes[0]))

    def head(self, chains: Chains, blocks: Blocks, at: jax.Array) -> jax.Array:
        """i32[...]; the blocks at positions at i32[...], as in `_Turn.heads`; nobody asks if there is no score."""
        if self.score is None:
            return at
        block, live = _read(chains, blocks, at)
        return jnp.where(live, block, jnp.where(at < 0, NO_BLOCK, _DEAD))

    def lowest(self, chains: Chains, blocks: Blocks, turn: _Turn, now: jax.Array) -> jax.Array:
        """i32[]; the class whose head is looked at: one with a dead head, else one of the lowest score."""
        classes = np.arange(self.classes, dtype=np.int32)
        least = turn.at >= 0
        if self.score is not None:
            heads = jnp.where(turn.heads == _DEAD, NO_BLOCK, turn.heads)
            score = self.score(blocks, heads, *self.extra_arguments(chains.own, now))
            score = ordered(self.score.name, score, classes.shape)
            score = jnp.where(turn.heads == _DEAD, -jnp.inf, jnp.where(turn.at < 0, jnp.inf, score))
            least = score == jnp.min(score)
        return jnp.min(jnp.where(least, classes, classes[-1]))


def _going(turn: _Turn, wanted: jax.Array) -> jax.Array:
    return (turn.found < wanted) & ((turn.exposed >= 0) | (turn.left > 0))


def _due(
    chains: Chains, blocks: Blocks, eligible: Eligible, at: jax.Array, above: jax.Array, block: jax.Array
) -> jax.Array:
    """i32[]; the block i32[], or NO_BLOCK, if it stands before at i32[C], and is a leaf now; otherwise NO_BLOCK.

    The children that are gone already have their parents in above i32[size].
    """
    position = pick(chains.stamp, block)
    _, live = _read(chains, blocks, position)
    parked = live & _is_parked(at, position, pick(chains.label, block))
    leaf = (pick(blocks.children, block) == count(above == block)) & eligible(block)
    return jnp.where((block >= 0) & parked & leaf, block, NO_BLOCK)


def _drop(chains: Chains, ids: jax.Array) -> Chains:
    return chains._replace(stamp=put(chains.stamp, ids, _NONE, ids >= 0))


@functools.cache
def lfu() -> EvictionPolicy:
    """Evicts the block that was reused least often since it was stored, among equals the least recently released.

    A merge with an equal block counts as a reuse, as in `Blocks.hits`. Blocks that were reused more than 120 times
    count as equals. Costs O(blocks touched).
    """
    return by_class(_hits, classes=_MOST_HITS + 1, name="lfu")


def _hits(blocks: Blocks, ids: jax.Array) -> jax.Array:
    return pick(blocks.hits, ids)


class Chains(NamedTuple):
    """The log and the classes in it. An entry is live while its block is cached and was not released since."""

    order: jax.Array  # i32[2B]; the block of each entry, in order of release
    follows: jax.Array  # i32[2B]; position of the next entry of the same class, -1 after the last one
    stamp: jax.Array  # i32[B]; position of each block's newest entry, -1 if it has gone to another tier
    label: jax.Array  # i32[B]; the class of that entry
    begin: jax.Array  # i32[C]; position of each class's oldest entry, -1 if it has none
    first: jax.Array  # i32[C]; position of its first entry that is not parked and may be live, -1 if there is none
    last: jax.Array  # i32[C]; position of its last entry, if it has any
    end: jax.Array  # i32[]; length of the log
    exposed: jax.Array  # i32[]; a parked block whose last child left in the last call, or NO_BLOCK. It is next
    parked: jax.Array  # bool[]; whether any entry was ever parked
    own: Any  # a state of the policy's functions


def _make_space(chains: Chains, blocks: Blocks, number: jax.Array) -> Chains:
    """The log with space for a number i32[] of entries: if there is too little, live entries move to the front."""
    full, end = chains.end + number > chains.order.shape[0], chains.end
    chunk = np.arange(min(1024, chains.order.shape[0]), dtype=np.int32)

    def move(carry):
        # A chunk at a time, in order; the end of what is written never passes what is read.
        chains, at = carry
        block, live = _read(chains, blocks, at + chunk)
        live, label = live & full & (at + chunk < end), pick(chains.label, block)
        return _append(chains, block, label, live, _is_parked(first, at + chunk, label)), at + chunk.size

    first = chains.first
    begin, none = (jnp.where(full, _NONE, positions) for positions in (chains.begin, first))
    start = chains._replace(end=jnp.where(full, 0, end), begin=begin, first=none)
    return loop(lambda carry: full & (carry[1] < end), move, (start, jnp.int32(0)))[0]


def _append(
    chains: Chains, ids: jax.Array, label: jax.Array, where: jax.Array, parked: jax.Array | None = None
) -> Chains:
    """Appends blocks ids i32[K] of classes label i32[K], where bool[K], for which there is space.

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
        follows = put(follows, ends, jnp.stack([head, jnp.int32(_NONE)]), jnp.stack([going & continues, going]))
        begin = put(begin, own[None], head[None], (going & ~continues)[None])
        first = put(first, own[None], head[None], (going & counts & (pick(first, own) < 0))[None])
        return follows, begin, first, put(last, own[None], tail[None], going[None]), jnp.where(going, stop, at)

    start = (follows, chains.begin, chains.first, chains.last, jnp.int32(0))
    follows, begin, first, last, _ = loop(lambda carry: carry[-1] < total, link, start)
    return chains._replace(
        order=order,
        follows=follows,
        stamp=stamp,
        label=labels,
        begin=begin,
        first=first,
        last=last,
        end=chains.end + total,
    )


def _is_parked(first: jax.Array, position: jax.Array, label: jax.Array) -> jax.Array:
    """bool[...]; whether live entries at position i32[...], of classes label i32[...], stand before first i32[C]."""
    at = pick(first, label)
    return (at < 0) | (position < at)


def _read(chains: Chains, blocks: Blocks, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of entries at position i32[...], and bool[...], which of them are live."""
    ids = pick(chains.order, position)
    idle = pick(blocks.refcount, ids) % COPYING == 0  # a block that is copied keeps its turn
    return ids, (position >= 0) & (pick(chains.stamp, ids) == position) & idle & (pick(blocks.fill, ids) > 0)
