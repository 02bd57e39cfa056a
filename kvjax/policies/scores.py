# SPDX-License-Identifier: Apache-2.0
"""Policies that are a score: the lowest leaves first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import count, in_any, mix, pick, put
from kvjax.checks import array_of, check_functions
from kvjax.policies.retention import later, priority_at
from kvjax.state import Blocks, Eligible, EvictionPolicy
from pallas_kernels.loops import fori_loop

_AGES = 1 << 24


def by_score(
    fn: Callable[..., jax.Array],
    *,
    timed: bool = False,
    init: Callable[[int], Any] | None = None,
    touch: Callable[..., Any] | None = None,
    name: str | None = None,
) -> EvictionPolicy:
    """Evicts the leaf of the lowest score, again and again; NaN leaves last.

    Costs one pass over all blocks in a call that evicts. There are two cliffs. Only `lru()` has GPU kernels: with any
    other policy, a decode step on a GPU runs as many small kernels. And window groups always use `lru`.

    Made again of the same functions it is an equal policy, which reuses compiled programs: what else the functions read
    must not change. Functions that can be imported let it pickle. A score may have a state, here how often each block
    was released:

        often = by_score(
            lambda blocks, seen: seen,
            init=lambda num_ids: jnp.zeros(num_ids, jnp.int32),
            touch=lambda seen, blocks, ids, now: seen.at[jnp.where(ids >= 0, ids, len(seen))].add(1, mode="drop"),
        )

    A learned score keeps its weights in that state: `init(spec, policy, policy_state=weights)`. Numbers that make a
    policy another one are bound by name, as in `by_score(functools.partial(fn, scale=3), name="scaled")`, which reads
    `scaled(scale=3)`; two such partials of equal numbers make equal policies.

    Args:
      fn: from `Blocks` to a score per block, f32[B] or i32[B] (exact up to 2.1e9), no coarser or unsigned numbers; with
        `init` it takes the policy's state too, `fn(blocks, pstate)`. Of equal scores the lower block id leaves first,
        and a parent takes the place of its last child; `blocks.released - blocks.clock` in a score breaks ties by age.
      timed: whether fn takes the time, i32[] ms, too, as its last argument.
      init: num_ids to the policy's state, a pytree of arrays; None: no state. Block ids may be reused for other
        contents; `blocks.generation` tells.
      touch: (pstate, blocks, ids i32[K], now i32[]) to the policy's state after a release, as in `EvictionPolicy`;
        None: nothing changes it.
      name: what `repr` shows; None: the qualified name of fn.

    Raises:
      ValueError: for `touch` without `init`; for a function that cannot be hashed.

    Example:
      >>> from kvjax import research
      >>> prompts = [[1, 2], [1, 3], [4, 5], [6, 7], [1, 8]]  # ids of blocks
      >>> trace = research.make_trace(range(5), [8] * 5, [0] * 5, prompts, block_size=4)
      >>> def least_reused(blocks):
      ...     return blocks.hits
      >>> for policy in (kvjax.lru(), kvjax.by_score(least_reused)):  # each over four blocks
      ...     print(policy, research.simulate(trace, policy, [4]).blocks.tolist())
      lru() [[0, 1, 0, 0, 0]]
      least_reused() [[0, 1, 0, 0, 1]]
    """
    if touch is not None and init is None:
        raise ValueError("touch: got a function, wanted None (without init= there is no state that it could change)")
    score = Bound.of("fn", fn)
    check_functions(init=init, touch=touch)
    check_hash("init", init)
    check_hash("touch", touch)
    lowest = _Lowest(score, timed, init is not None)
    return EvictionPolicy(
        init or _no_state,
        touch or _untouched,
        lowest,
        idle=touch is None,
        name=name or score.name,
        parameters=score.parameters,
    )


def _no_state(num_ids: int) -> tuple[()]:
    del num_ids
    return ()


def _untouched(pstate: Any, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Any:
    del blocks, ids, now
    return pstate


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function and what it takes by name, as a value: partials are equal to nothing else, their parts may be."""

    fn: Callable[..., jax.Array]
    parameters: tuple[tuple[str, Any], ...]
    types: tuple[type, ...]  # of the parameters; 1, 1.0 and True are equal, but may give different programs

    @classmethod
    def of(cls, argument: str, fn: Callable[..., jax.Array]) -> Bound:
        """The parts of a partial; one that binds by position, or an array, stays a function like any other."""
        parameters: tuple[tuple[str, Any], ...] = ()
        if isinstance(fn, functools.partial) and not fn.args and _is_hashable(tuple(fn.keywords.values())):
            fn, parameters = fn.func, tuple(sorted(fn.keywords.items()))
        if not callable(fn):
            raise ValueError(f"{argument}: got {fn!r:.80}, wanted a function")
        check_hash(argument, fn)
        return cls(fn, parameters, tuple(type(value) for _, value in parameters))

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        return getattr(self.fn, "__qualname__", type(self.fn).__qualname__)

    def __call__(self, *args: Any) -> jax.Array:
        """Calls the function."""
        return self.fn(*args, **dict(self.parameters))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def check_hash(argument: str, function: Any) -> None:
    """Raises a ValueError for a function that cannot be part of a policy."""
    if not _is_hashable(function):
        raise ValueError(f"{argument}: got {function!r}, which has no hash, wanted a function")


@dataclasses.dataclass(frozen=True)
class _Lowest:
    """`victims` by score, as a value: a closure would be equal to no other closure over the same function."""

    fn: Bound  # the score
    timed: bool  # whether fn takes the time
    has_state: bool  # whether fn takes the policy's state

    def __call__(
        self, pstate: Any, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Any]:
        """See `EvictionPolicy.victims`."""

        def choose():
            extra = [*([pstate] if self.has_state else []), *([now] if self.timed else [])]
            score = ordered(self.fn.name, self.fn(blocks, *extra), blocks.fill.shape)
            return _pop_leaves(score, blocks, eligible, wanted, size)

        return lax.cond(in_any(wanted > 0), choose, lambda: jnp.full((size,), -1, jnp.int32)), pstate


def _pop_leaves(score: jax.Array, blocks: Blocks, eligible: Eligible, wanted: jax.Array, size: int) -> jax.Array:
    """i32[size]; the `wanted` lowest, leaf by leaf; a removal can make the parent a leaf."""
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

    return fori_loop(0, jnp.minimum(wanted, size), step, (front, jnp.full((size,), -1, jnp.int32)))[1]


def ordered(name: str, score: Any, shape: tuple[int, ...]) -> jax.Array:
    """f32 in the same order, NaN last. Integers become the bits of floats: a conversion is exact up to 2^24 only.

    Raises:
      ValueError: naming the function, unless it is a score of this shape, f32 or i32; or 64 bits wide, which is cut.
    """
    largest, wanted = np.float32(np.finfo(np.float32).max), f"f32{list(shape)} or i32{list(shape)}"
    score = array_of(f"score of {name}", score, wanted)
    if score.shape != shape or score.dtype not in (jnp.float32, jnp.int32, jnp.float64, jnp.int64):
        raise ValueError(f"score of {name}: got {score.dtype}{list(score.shape)}, wanted {wanted}")
    if jnp.issubdtype(score.dtype, jnp.floating):
        score = score.astype(jnp.float32)
        return jnp.clip(jnp.where(jnp.isnan(score), largest, score), -largest, largest)
    score = jnp.clip(score, -(2**31) + 1, 2**31 - 1).astype(jnp.int32)
    size = jnp.minimum(jnp.abs(score), 0x7E000000)
    normal = lax.bitcast_convert_type(size + 0x00800000, jnp.float32)
    return jnp.where(score < 0, -normal, normal)


@functools.lru_cache(maxsize=None, typed=True)  # a balance of 1.0 is not one of 1
def cost_aware(balance: float = 24_576) -> EvictionPolicy:
    """Evicts the lowest cost / age, where cost = fill * (balance + position): what a block's tokens took to compute.

    The cost of a token is that of the layers that see it alone plus that of attention, which grows with its position:
    a block that costs twice as much may stay twice as long. Among equal costs the least recently released leaves first;
    a tail of few tokens leaves early, since it takes a whole block. This is GreedyDual without a state: in GreedyDual
    too a block of cost c leaves after c turnovers of the pool.

    Args:
      balance: the position at which attention costs as much as all else; about six times the model's width.

    Example:
      >>> from kvjax import policies
      >>> policies.cost_aware(balance=6 * 4096) == policies.cost_aware()  # the default is for a width of 4,096
      True

    Source: GreedyDual-Size (Cao and Irani 1997); cost / age as in Hyperbolic Caching (Blankstein et al. 2017).
    """
    return by_score(functools.partial(_cost_by_age, balance=balance), name="cost_aware")


def _cost_by_age(blocks: Blocks, *, balance: float) -> jax.Array:
    fill = blocks.fill.astype(jnp.float32)
    middle = blocks.depth.astype(jnp.float32) * blocks.tokens.shape[1] + fill / 2
    age = jnp.maximum(blocks.clock - blocks.released, 1).astype(jnp.float32)
    return fill * (balance + middle) / age


@functools.cache
def fifo() -> EvictionPolicy:
    """Evicts the block that was stored first."""
    return by_score(_stored, name="fifo")


def _stored(blocks: Blocks) -> jax.Array:
    return blocks.stored - blocks.clock


def then_age(rank: jax.Array, blocks: Blocks) -> jax.Array:
    """i32[B]; a score that orders by rank i32[B], 0..120, and among equals by age, the oldest release first.

    Ranks up to 120 keep it exact (2.1e9). Blocks released over 16.7 million releases ago count as equally old.
    """
    age = jnp.minimum(blocks.clock - blocks.released, _AGES - 1)
    return rank * _AGES + (_AGES - 1 - age)


class Counts(NamedTuple):
    """Counts of uses, which `lfu_da` compares."""

    of_block: jax.Array  # i32[B]; uses of each block's contents, and the age of the cache when it was released last
    age: jax.Array  # i32[]; the largest count of a block that was evicted


@functools.cache
def lfu_da() -> EvictionPolicy:
    """Evicts the block that was used least often, where uses long ago count less: LFU with dynamic aging.

    A block's uses are added to the age of the cache when it is released, and the age is the largest such count that was
    evicted. So new blocks pass the ones that were popular once. Of equal blocks, and of those that are over 120 ahead
    of the age, the least recently released leaves first. The policy hears of evictions because `victims` returns its
    state too. Costs a pass over all blocks in a call that evicts.

    Source: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques for Web proxy
    caches" (2000).
    """
    return _least_count()._replace(victims=_evict_and_age)


@functools.cache
def _least_count() -> EvictionPolicy:
    return by_score(_count_then_age, init=_no_counts, touch=_recount, name="lfu_da")._replace(idle=True)


def _no_counts(num_ids: int) -> Counts:
    return Counts(jnp.zeros((num_ids,), jnp.int32), jnp.int32(0))


def _recount(counts: Counts, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Counts:
    del now
    return counts._replace(of_block=put(counts.of_block, ids, counts.age + pick(blocks.hits, ids) + 1, ids >= 0))


def _count_then_age(blocks: Blocks, counts: Counts) -> jax.Array:
    return then_age(jnp.clip(counts.of_block - counts.age, 0, 120), blocks)  # a difference, since counts may wrap


def _evict_and_age(
    counts: Counts, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
) -> tuple[jax.Array, Counts]:
    ids, counts = _least_count().victims(counts, blocks, eligible, wanted, now, size)
    ahead = jnp.max(jnp.where(ids >= 0, pick(counts.of_block, ids) - counts.age, 0), initial=0)
    return ids, counts._replace(age=counts.age + ahead)


@functools.cache
def random() -> EvictionPolicy:
    """Evicts any leaf, by a hash of when it was released: the same history gives the same victims."""
    return by_score(_mixed, name="random")


def _mixed(blocks: Blocks) -> jax.Array:
    return (mix(blocks.released.astype(jnp.uint32)) >> np.uint32(1)).astype(jnp.int32)


@functools.cache
def priority() -> EvictionPolicy:
    """Evicts the block of the lowest priority, among equals the least recently released; needs a spec with `retention`.

    A parent outlives its cached children, so a tail of high priority protects its whole prefix. Blocks that were
    released more than 16.7 million releases ago count as equally old.

    Source: TensorRT-LLM's LRUEvictionPolicy, one queue for each priority.
    """
    return by_score(_priority_then_age, timed=True, name="priority")


def _priority_then_age(blocks: Blocks, now: jax.Array) -> jax.Array:
    return then_age(priority_at(blocks, now), blocks)


@functools.cache
def trt_leaf() -> EvictionPolicy:
    """The order of TensorRT-LLM, for study: that of `priority()`, but a time to live that ends counts as a release.

    A block whose time is over goes to the back of the queue of priority 35 and begins to age there; `priority()` counts
    on from its release. A call that evicts sorts all blocks; needs a spec with `retention`.

    Source: TensorRT-LLM's LRUEvictionPolicy that evicts leaves alone, with `refresh` before every request.
    """
    return by_score(_queue_position, timed=True, name="trt_leaf")


def _queue_position(blocks: Blocks, now: jax.Array) -> jax.Array:
    current = priority_at(blocks, now)
    assert blocks.retention is not None and blocks.expiry is not None
    over = current != blocks.retention[:, 0]
    # The expiry is the release plus the time to live, which is -1 where there is none.
    queued = later(blocks.expiry, jnp.where(over, 0, -blocks.retention[:, 1]))
    order = jnp.lexsort((blocks.released - blocks.clock, queued[:, 1], queued[:, 0], current)).astype(jnp.int32)
    return put(jnp.zeros_like(order), order, np.arange(order.shape[0], dtype=np.int32), order >= 0)
