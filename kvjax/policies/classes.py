# SPDX-License-Identifier: Apache-2.0
"""Policies of classes: an order of release for each, and the class whose head scores least loses it.

Cached blocks stand in a log in order of release, and each entry points to the next one of its class:

    position   0    1    2    3    4    5          class 0   first 0, then 1, 4
    block      7    2    9    4    3    2          class 1   first 2, then 3, 5
    class      0    0    1    1    0    1          block 2 was released again: entry 1 is dead, and skipped
    follows    1    4    3    5    -    -

Entries die where they stand. Once the log is full the live ones move to its front, so a release costs O(1) over time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, loop, pick, put, rank
from kvjax.policies.scores import is_hashable, ordered, unbound
from kvjax.state import COPYING, NO_BLOCK, Blocks, Eligible, EvictionPolicy

_NONE = -1  # no position
_DEAD = -2  # in place of a head: the entry is dead, and the class has to go on to the next one
_CHUNK = 16  # entries of the lowest class that are looked at at once, where classes themselves are the order


class Classes(NamedTuple):
    """The log and the classes in it. An entry is live while its block is cached and was not released since.

    Attributes:
      order: i32[2B]; the block of each entry, in order of release.
      follows: i32[2B]; position of the next entry of the same class, -1 after the last one.
      stamp: i32[B]; position of each block's newest entry, -1 if it has gone to another tier.
      label: i32[B]; the class of that entry.
      first: i32[C]; position of each class's first entry that may be live, -1 if there is none.
      last: i32[C]; position of its last entry, if it has a first one.
      end: i32[]; length of the log.
      own: the state of `fn` and `score`.
    """

    order: jax.Array
    follows: jax.Array
    stamp: jax.Array
    label: jax.Array
    first: jax.Array
    last: jax.Array
    end: jax.Array
    own: Any


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

    Costs O(blocks touched + classes) where `by_score` costs a pass over all blocks. Entries that keep their turn are
    passed over in each call that evicts: let parents score no less than their children. Without a `score` many blocks
    leave at once; with one, each costs a call of it.

        by_reuse = by_class(lambda blocks, ids: blocks.hits[ids], classes=8)  # rarely reused ones first

    Args:
      fn: (blocks, ids i32[K]) to i32[K], the classes of released blocks, cut to 0..classes-1. NO_BLOCK is padding.
      score: (blocks, heads i32[C]) to f32[C] or i32[C], the score of each class's head; of equal ones the lower class
        loses its head. Where a class has none heads has NO_BLOCK, and the score does not matter. None: lower classes
        leave before higher ones.
      classes: C.
      timed: whether both functions take the time, i32[] ms, too, as their last argument.
      init: num_ids to a state of the functions' own, a pytree of arrays such as weights; both take it after their other
        arguments. `policy.init(num_ids)._replace(own=weights)` is a `policy_state` that has others. None: no state.
      name: what `repr` shows; None: the qualified name of fn.

    Raises:
      ValueError: for less than one class; for a function that cannot be hashed.
    """
    if classes < 1:
        raise ValueError(f"classes: got {classes}, wanted at least 1")
    parts = {"fn": unbound(fn), "score": (None, ()) if score is None else unbound(score)}
    for argument, function in (*((key, value) for key, (value, _) in parts.items()), ("init", init)):
        if not is_hashable(function):
            raise ValueError(f"{argument}: got {function!r}, which has no hash, wanted a function")
    asked = _Asked(*parts["fn"], *parts["score"], classes, timed, init)
    return EvictionPolicy(
        _Init(asked),
        _Push(asked),
        _Pop(asked),
        _drop,
        idle=True,
        name=name or getattr(parts["fn"][0], "__qualname__", type(fn).__qualname__),
        parameters=(*parts["fn"][1], *parts["score"][1]),
    )


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What `by_class` was asked for, as a value: closures over it would be equal to no others."""

    fn: Callable[..., jax.Array]
    fn_parameters: tuple[tuple[str, Any], ...]
    score: Callable[..., jax.Array] | None
    score_parameters: tuple[tuple[str, Any], ...]
    classes: int
    timed: bool
    init: Callable[[int], Any] | None
    types: tuple[type, ...] = dataclasses.field(init=False)  # 1, 1.0 and True are equal, but may differ as programs

    def __post_init__(self) -> None:
        types = tuple(type(value) for _, value in (*self.fn_parameters, *self.score_parameters))
        object.__setattr__(self, "types", types)

    def given(self, own: Any, now: jax.Array) -> list[Any]:
        """What both functions take after their other arguments."""
        return [*([] if self.init is None else [own]), *([now] if self.timed else [])]


@dataclasses.dataclass(frozen=True)
class _Init:
    asked: _Asked

    def __call__(self, num_ids: int) -> Classes:
        """See `EvictionPolicy.init`."""
        none, number = lambda size: jnp.full((size,), _NONE, jnp.int32), self.asked.classes
        own = () if self.asked.init is None else self.asked.init(num_ids)
        entries = [jnp.zeros((2 * num_ids,), jnp.int32) for _ in range(2)]
        return Classes(
            *entries, none(num_ids), jnp.zeros((num_ids,), jnp.int32), none(number), none(number), jnp.int32(0), own
        )


@dataclasses.dataclass(frozen=True)
class _Push:
    asked: _Asked

    def __call__(self, state: Classes, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Classes:
        """See `EvictionPolicy.touch`."""
        given = self.asked.given(state.own, now)
        label = self.asked.fn(blocks, ids, *given, **dict(self.asked.fn_parameters))
        if label.shape != ids.shape or not jnp.issubdtype(label.dtype, jnp.integer):
            raise ValueError(
                f"by_class: fn returns {label.dtype}{list(label.shape)}, wanted integers of shape {list(ids.shape)}"
            )
        label = jnp.clip(label.astype(jnp.int32), 0, self.asked.classes - 1)
        return _append(_make_room(state, blocks, count(ids >= 0)), ids, label, ids >= 0)


def _make_room(state: Classes, blocks: Blocks, number: jax.Array) -> Classes:
    """The log with room for a number i32[] of entries: if there is too little, live entries move to the front."""
    full, end = state.end + number > state.order.shape[0], state.end
    chunk = np.arange(min(1024, state.order.shape[0]), dtype=np.int32)

    def move(carry):
        # A chunk at a time, in order; the end of what is written never passes what is read.
        state, read = carry
        block, live = _read(state, blocks, read + chunk)
        live = live & full & (read + chunk < end)
        return _append(state, block, pick(state.label, block), live), read + chunk.size

    none = jnp.where(full, _NONE, state.first)
    start = state._replace(end=jnp.where(full, 0, end), first=none)
    return loop(lambda carry: full & (carry[1] < end), move, (start, jnp.int32(0)))[0]


def _append(state: Classes, ids: jax.Array, label: jax.Array, where: jax.Array) -> Classes:
    """Appends blocks ids i32[K] of classes label i32[K], where bool[K], for which there is room."""
    position, total = state.end + rank(where), count(where)
    order = put(state.order, position, ids, where)
    follows = put(state.follows, position, position + 1, where)
    stamp, labels = put(state.stamp, ids, position, where), put(state.label, ids, label, where)
    # Entries of one class that come one after the other are a run. Runs are linked, one after the other.
    packed = put(jnp.full_like(label, -1), rank(where), label, where)
    index = np.arange(label.shape[0], dtype=np.int32)
    begins = packed != jnp.concatenate([packed[:1] - 1, packed[:-1]])

    def link(carry):
        follows, first, last, at = carry
        stop = jnp.min(jnp.where(begins & (index > at), index, total))
        going, own, begin, end = at < total, pick(packed, at), state.end + at, state.end + stop - 1
        follower = pick(first, own) >= 0
        ends = jnp.stack([pick(last, own), end])
        follows = put(follows, ends, jnp.stack([begin, jnp.int32(_NONE)]), jnp.stack([going & follower, going]))
        first = put(first, own[None], begin[None], (going & ~follower)[None])
        return follows, first, put(last, own[None], end[None], going[None]), jnp.where(going, stop, at)

    start = (follows, state.first, state.last, jnp.int32(0))
    follows, first, last, _ = loop(lambda carry: carry[3] < total, link, start)
    return Classes(order, follows, stamp, labels, first, last, state.end + total, state.own)


def _read(state: Classes, blocks: Blocks, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of entries at position i32[...], and bool[...], which of them are live."""
    ids = pick(state.order, position)
    idle = pick(blocks.refcount, ids) % COPYING == 0  # a block that is copied keeps its turn
    return ids, (position >= 0) & (pick(state.stamp, ids) == position) & idle & (pick(blocks.fill, ids) > 0)


class _Turn(NamedTuple):
    """Where a choice of victims stands.

    Attributes:
      at: i32[C]; position of the entry that each class looks at next, -1 behind its last one.
      first: i32[C]; as in `Classes`: where `at` is, unless entries were passed over.
      heads: i32[C]; the block at `at`: NO_BLOCK behind the last one, _DEAD for an entry that is not live.
      ids: i32[size]; the victims so far.
      above: i32[size]; the parent of each.
      found: i32[]; how many there are.
      exposed: i32[]; a block that was passed over and has lost its last child just now, or NO_BLOCK. It is next.
      spared: bool[]; whether entries were passed over.
    """

    at: jax.Array
    first: jax.Array
    heads: jax.Array
    ids: jax.Array
    above: jax.Array
    found: jax.Array
    exposed: jax.Array
    spared: jax.Array


@dataclasses.dataclass(frozen=True)
class _Pop:
    asked: _Asked

    def __call__(
        self, state: Classes, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Classes]:
        """See `EvictionPolicy.victims`."""
        wanted = jnp.minimum(wanted, size)
        index = np.arange(_CHUNK if self.asked.score is None else 1, dtype=np.int32)

        def going(turn: _Turn) -> jax.Array:
            return (turn.found < wanted) & ((turn.exposed >= 0) | jnp.any(turn.at >= 0))

        def step(turn: _Turn) -> _Turn:
            on, own = going(turn), self.lowest(state, blocks, turn, now)
            apart, at = turn.exposed >= 0, pick(turn.at, own)
            position = jnp.where(apart, pick(state.stamp, turn.exposed), at) + index
            block, live = _read(state, blocks, position)
            after, parent = pick(state.follows, position), pick(blocks.parent, block)[:, 0]
            # The entries up to the first one that is not next in its class, or that may not be named. Where entries
            # were passed over, a victim may expose one: then one at a time.
            near = jnp.concatenate([jnp.ones((1,), bool), (after[:-1] == position[1:]) & ~apart & ~turn.spared])
            gone = jnp.sum(turn.above[None] == block[:, None], axis=1, dtype=jnp.int32)
            earlier = (index[None] < index[:, None]) & live[None] & (parent[None] == block[:, None])
            leaf = pick(blocks.children, block) == gone + jnp.sum(earlier, axis=1, dtype=jnp.int32)
            free = live & leaf & eligible(block)
            passes = jnp.cumprod(near & (free | ~live) & (turn.found + rank(live) < wanted), dtype=jnp.int32) > 0
            taken = passes & live & on
            target = turn.found + rank(taken)
            ids, above = (put(x, target, y, taken) for x, y in ((turn.ids, block), (turn.above, parent)))
            moves, stays = (on & ~apart)[None], ~passes[0]
            behind = pick(after, jnp.maximum(count(passes) - 1, 0))
            first = put(turn.first, own[None], behind[None], moves & ~stays & (pick(turn.first, own) == at))
            new = _Turn(
                put(turn.at, own[None], behind[None], moves),
                first,
                put(turn.heads, own[None], self.head(state, blocks, behind)[None], moves),
                ids,
                above,
                turn.found + count(taken),
                jnp.int32(NO_BLOCK),
                turn.spared | (on & stays),
            )
            return new._replace(exposed=_exposed(state, blocks, eligible, new, taken[0], parent[0]))

        none = jnp.full((size,), NO_BLOCK, jnp.int32)
        start = _Turn(
            state.first, state.first, self.head(state, blocks, state.first), none, none, jnp.int32(0),
            jnp.int32(NO_BLOCK), jnp.bool_(False),
        )  # fmt: skip
        turn = loop(going, step, start)
        return turn.ids, state._replace(first=turn.first)

    def head(self, state: Classes, blocks: Blocks, at: jax.Array) -> jax.Array:
        """i32[...]; the blocks at positions at i32[...], as in `_Turn.heads`; nobody asks if there is no score."""
        if self.asked.score is None:
            return at
        block, live = _read(state, blocks, at)
        return jnp.where(live, block, jnp.where(at < 0, NO_BLOCK, _DEAD))

    def lowest(self, state: Classes, blocks: Blocks, turn: _Turn, now: jax.Array) -> jax.Array:
        """i32[]; the class whose head is looked at: one with a dead head, else one of the lowest score."""
        classes = np.arange(self.asked.classes, dtype=np.int32)
        least = turn.at >= 0
        if self.asked.score is not None:
            heads = jnp.where(turn.heads == _DEAD, NO_BLOCK, turn.heads)
            given = self.asked.given(state.own, now)
            score = self.asked.score(blocks, heads, *given, **dict(self.asked.score_parameters))
            if score.shape != classes.shape:
                raise ValueError(f"by_class: the score has shape {score.shape}, wanted one per class {classes.shape}")
            score = jnp.where(turn.heads == _DEAD, -jnp.inf, jnp.where(turn.at < 0, jnp.inf, ordered(score)))
            least = score == jnp.min(score)
        return jnp.min(jnp.where(least, classes, classes[-1]))


def _exposed(
    state: Classes, blocks: Blocks, eligible: Eligible, turn: _Turn, taken: jax.Array, parent: jax.Array
) -> jax.Array:
    """i32[]; the parent i32[] of a victim, where taken bool[], if it was passed over and is a leaf now; or NO_BLOCK."""
    position = pick(state.stamp, parent)
    _, live = _read(state, blocks, position)
    at = pick(turn.at, pick(state.label, parent))
    gone = count(turn.above == parent)
    passed_over = live & ((at < 0) | (position < at))
    is_leaf = (pick(blocks.children, parent) == gone) & eligible(parent)
    return jnp.where(taken & turn.spared & (parent >= 0) & passed_over & is_leaf, parent, NO_BLOCK)


def _drop(state: Classes, ids: jax.Array) -> Classes:
    return state._replace(stamp=put(state.stamp, ids, _NONE, ids >= 0))
