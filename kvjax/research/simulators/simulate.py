# SPDX-License-Identifier: Apache-2.0
"""A trace in caches of several sizes at once, without the verbs: a block is cached if its id is.

Arrays of blocks that a policy does not read cost nothing: XLA drops arrays that only serve themselves.

Requests follow one another, so a cache has at most one empty block besides those that were never used: each request
leaves at most one, and the next one takes it first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import partial_eval

from kvjax._arrays import Pytree, add, count, fence, pick, put, rank
from kvjax.research.simulators.hits import Hits, Rule, check_rule, check_sizes
from kvjax.research.simulators.replay import in_blocks, request_arrays
from kvjax.research.traces.trace import Trace
from kvjax.spec import CacheSpec, make_spec
from kvjax.state import NO_BLOCK, Blocks, EvictionPolicy
from kvjax.verbs._request import checked_policy
from kvjax.verbs.init import init

_FIELDS_OF_A_TRACE = frozenset(
    ("children", "clock", "depth", "fill", "generation", "hits", "parent", "refcount", "released", "stored")
)


def simulate(
    trace: Trace,
    policy: EvictionPolicy | None,
    sizes: Sequence[int] | np.ndarray,
    *,
    rule: Rule = "full",
    policy_state: Any = None,
) -> Hits:
    """Finds the same blocks as `replay`, request by request, in a fraction of its time: nothing is hashed or compared.

    For LRU `lru_curve` is faster still. The policy gets the same blocks under the same numbers, but no tokens, keys and
    retention: one that reads these is refused by name, and `replay` takes it. Its choices are not rechecked one by one,
    as the verbs do: a policy that names a block that may not leave is an error here, if it is noticed.
    `kvjax.testing.check_policy` is the proof.

    All caches run in one program, compiled for each policy, rule, number of sizes, largest size, length of the longest
    prompt to a factor of 4, and number of requests and blocks. It takes 4 bytes for each block of the trace and size.

    Args:
      trace: the requests; the time in ms since the first one is the policy's `now`.
      policy: the eviction policy, `lru()` if None. The balance of `cost_aware` is divided as in `replay`.
      sizes: i32[Z]; blocks of each cache.
      rule: what counts as a hit; see `RULES`.
      policy_state: the policy's own state to begin with, with a leading axis Z, as for `replay`.

    Returns:
      Hits of every request, blocks i32[Z, R]. One that is longer than a cache is refused there and finds none.

    Raises:
      ValueError: for a rule that does not exist; for no sizes, or one below 1; for a policy or a state that `init`
        refuses; for a policy that reads other fields of blocks, or names blocks that may not leave.

    Example:
      >>> from kvjax import policies, research
      >>> prompts = [[1, 2], [1, 3], [4, 5], [6, 7], [1, 8]]  # ids of blocks
      >>> trace = research.make_trace(range(5), [8] * 5, [0] * 5, prompts, block_size=4)
      >>> research.simulate(trace, policies.lru(), sizes=[4]).blocks.tolist()
      [[0, 1, 0, 0, 0]]
    """
    arguments = _arguments(trace, policy, sizes, rule, policy_state)
    found, sound = _serve_all(*arguments) if len(trace) else (np.zeros((0, len(sizes)), np.int32), True)
    if not np.all(sound):
        raise ValueError(
            f"policy: got {arguments[1]}, which named blocks that may not leave, or too few; wanted a policy that "
            "kvjax.testing.check_policy finds right"
        )
    return Hits(trace, rule, check_sizes(sizes), np.asarray(found).T)


def _arguments(
    trace: Trace, policy: EvictionPolicy | None, sizes: Sequence[int] | np.ndarray, rule: Rule, states: Any
) -> tuple[Any, ...]:
    """Those of `_serve_all`."""
    check_rule(rule)
    blocks = check_sizes(sizes)
    policy = in_blocks(checked_policy(policy), trace.block_size)
    spec = make_spec(num_blocks=int(blocks.max()), max_seqs=1, max_length=1, block_size=1, partial_reuse=False)
    missing = missing_fields(policy, spec.groups[0].num_blocks)
    if missing:
        raise ValueError(
            f"policy: got {policy}, which reads {', '.join(missing)} of blocks, wanted one that reads only "
            f"{', '.join(sorted(_FIELDS_OF_A_TRACE))} (replay takes any policy)"
        )
    widths = [16]  # 64, 256, ...: a request is served in as many columns as the least of them that it fits into
    while widths[-1] < trace.lengths.max(initial=1):
        widths.append(4 * widths[-1])
    width = np.append(np.searchsorted(widths, trace.lengths), -1).astype(np.int32)  # behind the last request none
    requests = request_arrays(trace, rule) | {"width": width}
    ids = np.concatenate([trace.ids, np.zeros(widths[-1], np.int32)])  # a slice of any width is never cut off
    return spec, policy, rule == "papers", tuple(widths), blocks, states, requests, ids


@functools.lru_cache(maxsize=64)
def missing_fields(policy: EvictionPolicy, num_blocks: int) -> tuple[str, ...]:
    """The arrays of `Blocks` that a policy for so many blocks reads, and a trace does not have."""
    spec = make_spec(num_blocks=num_blocks, max_seqs=1, max_length=1, block_size=1, extra_ids=True, retention=True)
    group = jax.eval_shape(lambda: init(spec, policy).groups[0])

    def both(blocks, pstate, ids, wanted, now):
        pstate = policy.touched(pstate, blocks, ids, now)
        return policy.chosen(pstate, blocks, lambda ids: ids >= 0, wanted, now, ids.shape[0])

    number = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(both)(group.blocks, group.policy, jax.ShapeDtypeStruct((4,), jnp.int32), number, number)
    _, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    paths, _ = jax.tree_util.tree_flatten_with_path(group.blocks)
    read = {path[-1].name for (path, _), is_used in zip(paths, used, strict=False) if is_used}
    return tuple(sorted(read - _FIELDS_OF_A_TRACE))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _serve_all(
    spec: CacheSpec,
    policy: EvictionPolicy,
    last_may_hit: bool,
    widths: tuple[int, ...],
    sizes: jax.Array,
    states: Any,
    requests: dict[str, jax.Array],
    ids: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """i32[R, Z]; blocks that each request found in a cache of each size. And bool[Z]; whether all went well there."""

    def begin(size: jax.Array, state: Any) -> _IdCache:
        group = init(spec, policy, size, policy_state=state).groups[0]
        none = jnp.full(group.blocks.fill.shape, NO_BLOCK, jnp.int32)
        return _IdCache(
            group.blocks, none, group.num_blocks, jnp.int32(0), jnp.int32(NO_BLOCK), group.policy, jnp.bool_(True)
        )

    def step(width: int, carry):
        """The next request, which fits into so many columns."""
        at, caches, last_block, found = carry
        fields = {name: values[at] for name, values in requests.items()}
        own = lax.dynamic_slice_in_dim(ids, fields["start"], width)
        is_own = fields["length"] > np.arange(width, dtype=np.int32)
        # The ids are the same for all caches: so `last_block` is gathered and scattered by whole rows.
        hints = last_block.at[own].get(mode="clip")
        request = _Request(own, fields["length"], fields["cached"], fields["now"])
        one = functools.partial(_serve, policy=policy, last_may_hit=last_may_hit)
        caches, served = jax.vmap(one, in_axes=(0, None, 1))(caches, request, hints)
        last_block = put(last_block, own, jnp.where(served.stored, served.table, hints.T).T, is_own)
        return at + 1, caches, last_block, found.at[at].set(served.found)

    def turn(carry):
        for number, width in enumerate(widths):
            # A loop, since at a branch XLA would copy the caches.
            is_of_width = lambda carry, number=number: requests["width"][carry[0]] == number  # noqa: E731
            carry = lax.while_loop(is_of_width, functools.partial(step, width), carry)
        return carry

    total, number = requests["start"].shape[0], sizes.shape[0]
    caches = jax.vmap(begin)(sizes, states)
    last_block = jnp.full((ids.shape[0], number), NO_BLOCK, jnp.int32)  # there are at least as many blocks as ids
    start = (jnp.int32(0), caches, last_block, jnp.zeros((total, number), jnp.int32))
    _, caches, _, found = lax.while_loop(lambda carry: carry[0] < total, turn, start)
    return found, caches.sound


class _Request(Pytree):
    ids: jax.Array  # i32[K]; the ids of its blocks, then anything
    length: jax.Array  # i32[]; the number of its blocks
    cached: jax.Array  # i32[]; the number of them that are cached when it is over
    now: jax.Array  # i32[] ms


class _IdCache(Pytree):
    """A cache."""

    blocks: Blocks  # as policies see them
    id: jax.Array  # i32[B]; the id that each block held last
    size: jax.Array  # i32[]; blocks in use
    used: jax.Array  # i32[]; blocks 0..used-1 were used already
    spare: jax.Array  # i32[]; one of them that is empty, or NO_BLOCK
    policy: Any  # the policy's own state
    sound: jax.Array  # bool[]; whether the policy named only blocks that might leave


class _Served(Pytree):
    """The outcome of a request, beside the cache."""

    found: jax.Array  # i32[]; blocks that it found
    table: jax.Array  # i32[K]; its blocks
    stored: jax.Array  # bool[K]; those that are cached now and were not before


def _serve(
    cache: _IdCache, request: _Request, hints: jax.Array, policy: EvictionPolicy, last_may_hit: bool
) -> tuple[_IdCache, _Served]:
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
    blocks = blocks.replace(refcount=put(blocks.refcount, hints, 1, hit), hits=add(blocks.hits, hints, 1, hit))
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
    return cache.replace(blocks=blocks, id=ids, spare=spare, policy=pstate), _Served(found, table, stored)


def _take(
    cache: _IdCache, need: jax.Array, policy: EvictionPolicy, now: jax.Array, column: np.ndarray
) -> tuple[_IdCache, jax.Array, jax.Array]:
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
    blocks = blocks.replace(refcount=refcount, fill=fill, parent=parents, children=children)
    used, spare = cache.used + jnp.maximum(from_empty - spares, 0), jnp.where(need > 0, NO_BLOCK, cache.spare)
    return cache.replace(blocks=blocks, used=used, spare=spare, policy=pstate, sound=sound), taken, victims


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
