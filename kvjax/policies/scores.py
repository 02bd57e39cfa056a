# SPDX-License-Identifier: Apache-2.0
"""Policies defined by a score: the block with the lowest score leaves first."""

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
    """Evicts the leaf with the lowest score, repeatedly. NaN leaves last.

    A score may have a state, here the number of releases of each block:

        often = by_score(
            lambda blocks, seen: seen,
            init=lambda num_ids: jnp.zeros(num_ids, jnp.int32),
            touch=lambda seen, blocks, ids, now: seen.at[jnp.where(ids >= 0, ids, len(seen))].add(1, mode="drop"),
        )

    A learned score keeps its weights in such a state: `init(spec, policy, policy_state=weights)`.

    A call that evicts makes a pass over all blocks. There are two limits. Only `lru()` has fused GPU kernels: with any
    other policy, a decode step on a GPU runs as many small kernels. Window groups always use `lru`.

    Two policies of the same functions are equal and share compiled programs, so global values that the functions read
    must not change. A policy pickles if you can import its functions. Bind numbers by name to get a different policy:
    `by_score(functools.partial(fn, scale=3), name="scaled")` prints as `scaled(scale=3)`, and two such partials with
    equal numbers make equal policies.

    Args:
      fn: from `Blocks` to a score per block, f32[B] or i32[B]. Integers are exact up to 2.1e9. Narrower and unsigned
        dtypes are refused. With `init` it also takes the policy's state: `fn(blocks, policy_state)`. Among equal scores
        the lower block id leaves first, and a parent takes the place of its last child. Add `blocks.released -
        blocks.clock` to a score to break ties by age.
      timed: whether fn also takes the time, i32[] ms, as its last argument.
      init: from num_ids to the policy's state, a pytree of arrays; None for no state. Block ids may be reused for
        other contents, with another `blocks.generation`.
      touch: from (policy_state, blocks, ids i32[K], now i32[]) to the state after a release, as in `EvictionPolicy`;
        None keeps the state.
      name: the name that `repr` shows; defaults to the qualified name of fn.

    Raises:
      ValueError: for `touch` without `init`, or for a function without a hash.

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
        raise ValueError("touch: got a function, wanted None (without init= there is no state to change)")
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


def _untouched(policy_state: Any, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Any:
    del blocks, ids, now
    return policy_state


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function and its keyword arguments, as a value. Two partials are never equal, but their parts may be."""

    fn: Callable[..., jax.Array]
    parameters: tuple[tuple[str, Any], ...]
    types: tuple[type, ...]  # of the parameters: 1, 1.0 and True are equal, but may give different programs

    @classmethod
    def of(cls, argument: str, fn: Callable[..., jax.Array]) -> Bound:
        """The parts of a partial. A partial of positional arguments or of arrays is used like any other function."""
        parameters: tuple[tuple[str, Any], ...] = ()
        if isinstance(fn, functools.partial) and not fn.args and _is_hashable(tuple(fn.keywords.values())):
            parameters = tuple(sorted(fn.keywords.items()))
            fn = fn.func
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
    """Refuses a function that cannot be part of a policy.

    Raises:
      ValueError: if the function has no hash.
    """
    if not _is_hashable(function):
        raise ValueError(f"{argument}: got {function!r}, which has no hash, wanted a function")


@dataclasses.dataclass(frozen=True)
class _Lowest:
    """`victims` by score, as a value: a closure would not equal another closure over the same function."""

    fn: Bound  # the score
    timed: bool  # whether fn takes the time
    has_state: bool  # whether fn takes the policy's state

    def __call__(
        self, policy_state: Any, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Any]:
        """See `EvictionPolicy.victims`."""

        def choose():
            extra = [*([policy_state] if self.has_state else []), *([now] if self.timed else [])]
            score = ordered(self.fn.name, self.fn(blocks, *extra), blocks.fill.shape)
            return _pop_leaves(score, blocks, eligible, wanted, size)

        return lax.cond(in_any(wanted > 0), choose, lambda: jnp.full((size,), -1, jnp.int32)), policy_state


def _pop_leaves(score: jax.Array, blocks: Blocks, eligible: Eligible, wanted: jax.Array, size: int) -> jax.Array:
    """i32[size]; the `wanted` lowest blocks, leaf by leaf. A removal can make the parent a leaf."""
    num_ids = score.shape[0]
    leaf = eligible(jnp.arange(num_ids, dtype=jnp.int32)) & (blocks.children == 0)
    _, front = lax.top_k(jnp.where(leaf, -score, -jnp.inf), min(size, num_ids))
    front = jnp.where(pick(leaf, front), front.astype(jnp.int32), -1)

    def step(i, carry):
        front, ids = carry
        lowest = jnp.argmin(jnp.where(front >= 0, pick(score, front), jnp.inf))
        block = front[lowest]
        ids = ids.at[i].set(block)
        parent = pick(blocks.parent, block)[0]
        gone = count((ids >= 0) & (pick(blocks.parent, ids)[:, 0] == parent))
        exposed = (block >= 0) & (parent >= 0) & eligible(parent) & (pick(blocks.children, parent) == gone)
        return front.at[lowest].set(jnp.where(exposed, parent, -1)), ids

    return fori_loop(0, jnp.minimum(wanted, size), step, (front, jnp.full((size,), -1, jnp.int32)))[1]


def ordered(name: str, score: Any, shape: tuple[int, ...]) -> jax.Array:
    """Converts a score to f32 in the same order, NaN last. Integers become bits of floats: casts are exact to 2^24.

    Raises:
      ValueError: naming the function, unless the score has this shape and is f32, i32, f64 or i64.
    """
    largest = np.float32(np.finfo(np.float32).max)
    wanted = f"f32{list(shape)} or i32{list(shape)}"
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


@functools.lru_cache(maxsize=None, typed=True)  # a balance of 1.0 differs from a balance of 1
def cost_aware(balance: float = 24_576) -> EvictionPolicy:
    """Evicts the block with the lowest cost / age. The cost is the work to compute it, fill * (balance + position).

    The cost of a token is a constant for the layers without attention, plus the cost of attention, which grows with the
    token's position. A block that costs twice as much may stay twice as long. Among equal costs the least recently
    released block leaves first. A tail of few tokens leaves early, since it takes a whole block. The policy is
    GreedyDual without its state: there too, a block of cost c leaves after c turnovers of the pool.

    Args:
      balance: the position at which attention costs as much as everything else, about six times the model's width.

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
    """Evicts the block stored first."""
    return by_score(_stored, name="fifo")


def _stored(blocks: Blocks) -> jax.Array:
    return blocks.stored - blocks.clock


def then_age(rank: jax.Array, blocks: Blocks) -> jax.Array:
    """i32[B]; a score that orders by rank i32[B], 0..120, and then by age, the oldest release first.

    Ranks up to 120 keep it exact (2.1e9). Blocks released over 16.7 million releases ago count as equally old.
    """
    age = jnp.minimum(blocks.clock - blocks.released, _AGES - 1)
    return rank * _AGES + (_AGES - 1 - age)


class Counts(NamedTuple):
    """Counts of uses, for `lfu_da`."""

    block_counts: jax.Array  # i32[B]; uses of each block's contents, plus the age of the cache at its last release
    age: jax.Array  # i32[]; the largest count of an evicted block


@functools.cache
def lfu_da() -> EvictionPolicy:
    """Evicts the block used least often, where old uses count less: LFU with dynamic aging.

    On release, a block's count becomes its uses plus the age of the cache. The age is the largest count of an evicted
    block, so new blocks overtake formerly popular blocks. Among equal blocks, and among blocks more than 120 ahead of
    the age, the least recently released leaves first. The policy learns of evictions because `victims` returns its
    state too. A call that evicts makes a pass over all blocks.

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
    return counts._replace(
        block_counts=put(counts.block_counts, ids, counts.age + pick(blocks.hits, ids) + 1, ids >= 0)
    )


def _count_then_age(blocks: Blocks, counts: Counts) -> jax.Array:
    return then_age(jnp.clip(counts.block_counts - counts.age, 0, 120), blocks)  # a difference, since counts may wrap


def _evict_and_age(
    counts: Counts, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
) -> tuple[jax.Array, Counts]:
    ids, counts = _least_count().victims(counts, blocks, eligible, wanted, now, size)
    ahead = jnp.max(jnp.where(ids >= 0, pick(counts.block_counts, ids) - counts.age, 0), initial=0)
    return ids, counts._replace(age=counts.age + ahead)


@functools.cache
def random() -> EvictionPolicy:
    """Evicts any leaf, chosen by a hash of its release: the same history gives the same victims."""
    return by_score(_mixed, name="random")


def _mixed(blocks: Blocks) -> jax.Array:
    return (mix(blocks.released.astype(jnp.uint32)) >> np.uint32(1)).astype(jnp.int32)


@functools.cache
def priority() -> EvictionPolicy:
    """Evicts the block with the lowest priority, and the oldest release among equals. Needs `retention` in the spec.

    A parent outlives its cached children, so a tail of high priority protects its whole prefix. Blocks released more
    than 16.7 million releases ago count as equally old.

    Source: TensorRT-LLM's LRUEvictionPolicy, one queue for each priority.
    """
    return by_score(_priority_then_age, timed=True, name="priority")


def _priority_then_age(blocks: Blocks, now: jax.Array) -> jax.Array:
    return then_age(priority_at(blocks, now), blocks)


@functools.cache
def trt_leaf() -> EvictionPolicy:
    """Evicts in TensorRT-LLM's order, for study: like `priority()`, but the end of a time to live counts as a release.

    When its time is over, a block goes to the back of the queue of priority 35 and begins to age there. With
    `priority()` its age still counts from the release. A call that evicts sorts all blocks. Needs `retention` in the
    spec.

    Source: TensorRT-LLM's LRUEvictionPolicy, evicting only leaves, with `refresh` before every request.
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
