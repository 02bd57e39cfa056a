# SPDX-License-Identifier: Apache-2.0
"""Policies that sort blocks into classes. Each class is a queue, and the head with the lowest score is evicted.

The queues are chains in a log. The log has the cached blocks in order of release, and each entry points to the next
entry of its class:

    position   0    1    2    3    4    5          class 0   first 0, then 1, 4
    block      7    2    9    4    3    2          class 1   first 2, then 3, 5
    class      0    0    1    1    0    1          block 2 was released again: entry 1 is dead, and skipped
    follows    1    4    3    5    -    -

Dead entries stay in place. When the log is full, the live entries move to its front, so a release costs O(1) on
average. A live entry before the first entry of its class is parked: its block had cached children when its turn came.
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
_DEAD = -2  # in place of a head: the entry is dead, and the class has to go on to its next entry
_MAX_HITS = 120
_CHUNK = 16  # the entries of the lowest class inspected in a step, if there is no score


def by_class(
    fn: Callable[..., jax.Array],
    score: Callable[..., jax.Array] | None = None,
    *,
    classes: int,
    timed: bool = False,
    init: Callable[[int], Any] | None = None,
    name: str | None = None,
) -> EvictionPolicy:
    """Evicts the head of a class, repeatedly: the head with the lowest score. NaN leaves last.

        by_reuse = by_class(lambda blocks, ids: blocks.hits[ids], classes=8)  # rarely reused blocks first

    A block gets its class on release, and goes to the end of the class. So the blocks of a class leave in order of
    release, whatever their scores. A head with cached children cannot leave yet, so the next block of the class leaves
    in its place. The head leaves right after its last child.

    Costs O(blocks touched + classes), while `by_score` costs a pass over all blocks. Without a `score`, many blocks
    leave in a step. With a score, each victim costs a call of it.

    Args:
      fn: from (blocks, ids i32[K]) to i32[K], the classes of released blocks, cut to 0..classes-1. NO_BLOCK is padding.
      score: from (blocks, heads i32[C]) to f32[C] or i32[C], the score of each class's head. Among equal scores the
        lower class loses its head. A class without blocks has the head NO_BLOCK, and any score. None evicts lower
        classes first.
      classes: the number of classes, C.
      timed: whether both functions also take the time, i32[] ms, as their last argument.
      init: from num_ids to a state for the functions, a pytree of arrays such as weights; both functions take it after
        their other arguments. For other weights, pass `policy.init(num_ids)._replace(state=weights)` as
        `policy_state`. None means no state.
      name: the name that `repr` shows; defaults to the qualified name of fn.

    Raises:
      ValueError: for fewer classes than 1, or for a function without a hash.
    """
    classes = static_int("classes", classes, 1)
    label = Bound.of("fn", fn)
    priced = None if score is None else Bound.of("score", score)
    check_functions(init=init)
    check_hash("init", init)
    options = (label, priced, classes, timed, init)
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
    """The arguments of `by_class` as a value: a closure over them would not equal another closure."""

    fn: Bound
    score: Bound | None
    classes: int
    timed: bool
    init: Callable[[int], Any] | None

    def extra_arguments(self, state: Any, now: jax.Array) -> list[Any]:
        """The arguments after the blocks and ids: the policy's state, the time, or both."""
        return [*([] if self.init is None else [state]), *([now] if self.timed else [])]


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
            state=() if self.init is None else self.init(num_ids),
        )


class _Push(_Options):
    def __call__(self, chains: Chains, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Chains:
        """See `EvictionPolicy.touch`."""
        label = integers(
            f"classes of {self.fn.name}", self.fn(blocks, ids, *self.extra_arguments(chains.state, now)), ids.shape
        )
        label = jnp.clip(label, 0, self.classes - 1)
        return _append(_make_space(chains, blocks, count(ids >= 0)), ids, label, ids >= 0)


class _Choice(NamedTuple):
    """The progress of a choice of victims."""

    cursor: jax.Array  # i32[C]; position of the next entry of each class to inspect, -1 after the last entry
    first: jax.Array  # i32[C]; as in `Chains`: equal to `cursor`, unless the class has skipped an ineligible leaf
    heads: jax.Array  # i32[C]; the block at `cursor`: NO_BLOCK after the last entry, _DEAD for a dead entry
    ids: jax.Array  # i32[size]; the victims so far
    parents: jax.Array  # i32[size]; the parent of each victim
    num_victims: jax.Array  # i32[]
    num_open: jax.Array  # i32[]; classes with entries to inspect
    # i32[]; a skipped block that has just lost its last child, or NO_BLOCK. It is the next victim.
    exposed: jax.Array
    parked: jax.Array  # bool[]; as in `Chains`; skipped leaves count too


class _Pop(_Options):
    def __call__(
        self, chains: Chains, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Chains]:
        """See `EvictionPolicy.victims`."""
        wanted = jnp.minimum(wanted, size)
        due = functools.partial(_due, chains, blocks, eligible)
        step = functools.partial(self.step, chains, blocks, eligible, wanted, now)
        none = jnp.full((size,), NO_BLOCK, jnp.int32)
        start = _Choice(
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
            # If there are too few victims, parked blocks have lost their children in another way. Start again.
            choice, passes = carry
            again = (passes > 0) & (choice.num_victims < wanted)
            cursor = jnp.where(again, chains.begin, choice.cursor)
            first = jnp.where(again, chains.begin, choice.first)
            heads = self.head(chains, blocks, cursor)
            choice = choice._replace(cursor=cursor, first=first, heads=heads, num_open=count(cursor >= 0))
            return loop(lambda choice: _continues(choice, wanted), step, choice), passes + 1

        is_short = lambda carry: (carry[0].num_victims < wanted) & (carry[1] < 2)  # noqa: E731
        choice, _ = loop(is_short, pass_through, (start, jnp.int32(0)))
        exposed = jnp.where(wanted > 0, choice.exposed, chains.exposed)
        return choice.ids, chains._replace(first=choice.first, exposed=exposed, parked=choice.parked)

    def step(
        self, chains: Chains, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, choice: _Choice
    ) -> _Choice:
        """Names a victim, or several of the lowest class, or skips an entry."""
        index = np.arange(_CHUNK if self.score is None else 1, dtype=np.int32)
        is_running = _continues(choice, wanted)
        label = self.lowest(chains, blocks, choice, now)
        is_exposed = choice.exposed >= 0
        cursor = pick(choice.cursor, label)
        position = jnp.where(is_exposed, pick(chains.stamp, choice.exposed), cursor) + index
        block, live = _read(chains, blocks, position)
        after = pick(chains.follows, position)
        parent = pick(blocks.parent, block)[:, 0]
        # Takes the entries before the first entry that is not next in its class, or is ineligible. If entries are
        # parked, a victim may expose a parked entry, so a step takes only a single entry.
        is_next = (after[:-1] == position[1:]) & ~is_exposed & ~choice.parked
        adjacent = jnp.concatenate([jnp.ones((1,), bool), is_next])
        # A named child no longer counts, and a named block is no leaf: a second pass meets it again.
        named = (choice.parents[None] == block[:, None]) | (choice.ids[None] == block[:, None])
        gone = jnp.sum(named, axis=1, dtype=jnp.int32)
        earlier = (index[None] < index[:, None]) & live[None] & (parent[None] == block[:, None])
        leaf = pick(blocks.children, block) == gone + jnp.sum(earlier, axis=1, dtype=jnp.int32)
        free = live & leaf & eligible(block)
        has_quota = choice.num_victims + rank(live) < wanted
        passes = jnp.cumprod(adjacent & (free | ~live) & has_quota, dtype=jnp.int32) > 0
        taken = passes & live & is_running
        target = choice.num_victims + rank(taken)
        ids = put(choice.ids, target, block, taken)
        parents = put(choice.parents, target, parent, taken)
        moves = (is_running & ~is_exposed)[None]
        spared = ~passes[0] & leaf[0]
        next_cursor = pick(after, jnp.maximum(count(passes) - 1, 0))
        moves_first = moves & ~spared & (pick(choice.first, label) == cursor)
        first = put(choice.first, label[None], next_cursor[None], moves_first)
        cursors = put(choice.cursor, label[None], next_cursor[None], moves)
        heads = put(choice.heads, label[None], self.head(chains, blocks, next_cursor)[None], moves)
        num_victims = choice.num_victims + count(taken)
        num_open = choice.num_open - count(moves & (next_cursor < 0))
        candidate = jnp.where(taken[0] & choice.parked, parent[0], NO_BLOCK)
        due = _due(chains, blocks, eligible, cursors, parents, candidate)
        exposed = jnp.where(is_running, due, choice.exposed)
        parked = choice.parked | (is_running & ~passes[0])
        return _Choice(cursors, first, heads, ids, parents, num_victims, num_open, exposed, parked)

    def head(self, chains: Chains, blocks: Blocks, cursor: jax.Array) -> jax.Array:
        """i32[...]; the blocks at positions cursor i32[...], as in `_Choice.heads`. Unused without a score."""
        if self.score is None:
            return cursor
        block, live = _read(chains, blocks, cursor)
        return jnp.where(live, block, jnp.where(cursor < 0, NO_BLOCK, _DEAD))

    def lowest(self, chains: Chains, blocks: Blocks, choice: _Choice, now: jax.Array) -> jax.Array:
        """i32[]; the class to inspect: a class with a dead head, else a class of the lowest score."""
        classes = np.arange(self.classes, dtype=np.int32)
        is_lowest = choice.cursor >= 0
        if self.score is not None:
            heads = jnp.where(choice.heads == _DEAD, NO_BLOCK, choice.heads)
            score = self.score(blocks, heads, *self.extra_arguments(chains.state, now))
            score = ordered(self.score.name, score, classes.shape)
            score = jnp.where(choice.heads == _DEAD, -jnp.inf, jnp.where(choice.cursor < 0, jnp.inf, score))
            is_lowest = score == jnp.min(score)
        return jnp.min(jnp.where(is_lowest, classes, classes[-1]))


def _continues(choice: _Choice, wanted: jax.Array) -> jax.Array:
    return (choice.num_victims < wanted) & ((choice.exposed >= 0) | (choice.num_open > 0))


def _due(
    chains: Chains, blocks: Blocks, eligible: Eligible, cursors: jax.Array, parents: jax.Array, block: jax.Array
) -> jax.Array:
    """i32[]; the block i32[] if it stands before its class's position in cursors i32[C] and is a leaf, else NO_BLOCK.

    The parents i32[size] of the victims so far count the children that are gone.
    """
    position = pick(chains.stamp, block)
    _, live = _read(chains, blocks, position)
    parked = live & _is_parked(cursors, position, pick(chains.label, block))
    leaf = (pick(blocks.children, block) == count(parents == block)) & eligible(block)
    return jnp.where((block >= 0) & parked & leaf, block, NO_BLOCK)


def _drop(chains: Chains, ids: jax.Array) -> Chains:
    return chains._replace(stamp=put(chains.stamp, ids, _NONE, ids >= 0))


@functools.cache
def lfu() -> EvictionPolicy:
    """Evicts the block reused least often since it was stored, and among equals the least recently released.

    A merge with an equal block counts as a reuse, as in `Blocks.hits`. Blocks reused more than 120 times count as
    equal. Costs O(blocks touched).
    """
    return by_class(_hits, classes=_MAX_HITS + 1, name="lfu")


def _hits(blocks: Blocks, ids: jax.Array) -> jax.Array:
    return pick(blocks.hits, ids)


@functools.cache
def t_lru(tail_blocks: int = 2) -> EvictionPolicy:
    """Evicts the ends of prompts first, then the least recently released block: fewer requests compute many tokens.

    The last `tail_blocks` blocks of a prompt leave before all other blocks. If the prompt comes back it computes these
    blocks and its new tokens, within a budget that you choose. So space goes to prompts that would miss the budget. The
    hit rate may fall together with the 95th and 99th percentile of uncached tokens: `python -m kvjax.research compare`
    prints all of them. Costs O(blocks touched).

    Args:
      tail_blocks: blocks at the end of a prompt, at least 1: the tokens that a request may compute within your latency
        budget, minus the usual number of new tokens, in blocks.

    Raises:
      ValueError: for fewer than 1 block.

    Example:
      >>> kvjax.policies.t_lru(tail_blocks=4)
      t_lru(tail_blocks=4)

    Source: T-LRU in "Tail-Optimized Caching for LLM Inference" (Zhang, Li, Moallemi and Peng 2025), with a constant
    estimate of the next turn's tokens.
    """
    tail_blocks = static_int("tail_blocks", tail_blocks, 1)
    return by_class(functools.partial(_is_before_tail, tail_blocks=tail_blocks), classes=2, name="t_lru")


def _is_before_tail(blocks: Blocks, ids: jax.Array, *, tail_blocks: int) -> jax.Array:
    depth = pick(blocks.depth, ids)
    num_blocks = jnp.max(jnp.where(ids >= 0, depth + 1, 0))
    return (depth < num_blocks - tail_blocks).astype(jnp.int32)


class Chains(NamedTuple):
    """The log and the classes in it. An entry is live while its block is cached and was not released since."""

    order: jax.Array  # i32[2B]; the block of each entry, in order of release
    follows: jax.Array  # i32[2B]; position of the next entry of the same class, -1 after the last entry
    stamp: jax.Array  # i32[B]; position of each block's newest entry, -1 if the block has gone to another tier
    label: jax.Array  # i32[B]; the class of that entry
    begin: jax.Array  # i32[C]; position of each class's oldest entry, or -1
    first: jax.Array  # i32[C]; position of its first entry that is not parked and may be live, or -1
    last: jax.Array  # i32[C]; position of its last entry, if it has any
    end: jax.Array  # i32[]; length of the log
    exposed: jax.Array  # i32[]; a parked block whose last child left in the last call, or NO_BLOCK. It is next
    parked: jax.Array  # bool[]; whether any entry was ever parked
    state: Any  # the state of the policy's functions


def _make_space(chains: Chains, blocks: Blocks, num_entries: jax.Array) -> Chains:
    """The log with space for num_entries i32[] more entries. If space is short, live entries move to the front."""
    full = chains.end + num_entries > chains.order.shape[0]
    end = chains.end
    chunk = np.arange(min(1024, chains.order.shape[0]), dtype=np.int32)

    def move(carry):
        # Moves a chunk at a time, in order. The write position never passes the read position.
        chains, start = carry
        block, live = _read(chains, blocks, start + chunk)
        live = live & full & (start + chunk < end)
        label = pick(chains.label, block)
        return _append(chains, block, label, live, _is_parked(first, start + chunk, label)), start + chunk.size

    first = chains.first
    begin = jnp.where(full, _NONE, chains.begin)
    no_first = jnp.where(full, _NONE, first)
    emptied = chains._replace(end=jnp.where(full, 0, end), begin=begin, first=no_first)
    return loop(lambda carry: full & (carry[1] < end), move, (emptied, jnp.int32(0)))[0]


def _append(
    chains: Chains, ids: jax.Array, label: jax.Array, where: jax.Array, parked: jax.Array | None = None
) -> Chains:
    """Appends blocks ids i32[K] of classes label i32[K], where bool[K]. There must be space for them.

    Blocks that are parked, bool[K], come before all other blocks of their class, and stay there.
    """
    position = chains.end + rank(where)
    total = count(where)
    order = put(chains.order, position, ids, where)
    follows = put(chains.follows, position, position + 1, where)
    stamp = put(chains.stamp, ids, position, where)
    labels = put(chains.label, ids, label, where)
    # Consecutive entries of a class are a run. Runs are linked one after the other.
    kind = 2 * label + (0 if parked is None else parked.astype(jnp.int32))
    packed = put(jnp.full_like(kind, -1), rank(where), kind, where)
    index = np.arange(label.shape[0], dtype=np.int32)
    starts = packed != jnp.concatenate([packed[:1] - 1, packed[:-1]])

    def link(carry):
        follows, begin, first, last, start = carry
        stop = jnp.min(jnp.where(starts & (index > start), index, total))
        is_run = start < total
        kind = pick(packed, start)
        head = chains.end + start
        tail = chains.end + stop - 1
        run_class = kind // 2
        is_counted = kind % 2 == 0
        continues = pick(begin, run_class) >= 0
        ends = jnp.stack([pick(last, run_class), tail])
        follows = put(follows, ends, jnp.stack([head, jnp.int32(_NONE)]), jnp.stack([is_run & continues, is_run]))
        begin = put(begin, run_class[None], head[None], (is_run & ~continues)[None])
        first = put(first, run_class[None], head[None], (is_run & is_counted & (pick(first, run_class) < 0))[None])
        last = put(last, run_class[None], tail[None], is_run[None])
        return follows, begin, first, last, jnp.where(is_run, stop, start)

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
    start = pick(first, label)
    return (start < 0) | (position < start)


def _read(chains: Chains, blocks: Blocks, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The blocks of entries at position i32[...], and bool[...], whether they are live."""
    ids = pick(chains.order, position)
    idle = pick(blocks.refcount, ids) % COPYING == 0  # a block that is being copied keeps its turn
    return ids, (position >= 0) & (pick(chains.stamp, ids) == position) & idle & (pick(blocks.fill, ids) > 0)
