# SPDX-License-Identifier: Apache-2.0
"""Simulates a trace in caches of several sizes at once, without the verbs. It compares ids instead of tokens.

Arrays of blocks cost nothing unless a policy reads them, because XLA drops arrays that nothing reads. Requests follow
one another. Each leaves at most one empty block, and the next request takes it first. So a cache has at most one empty
block besides its unused blocks.
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

from kvjax._arrays import Pytree, add, count, fence, mix, pick, put, rank
from kvjax.research.simulators.hits import Hits, Rule, check_rule, check_sizes
from kvjax.research.simulators.replay import check_sound, in_blocks, request_arrays
from kvjax.research.traces.trace import Trace
from kvjax.spec import CacheSpec, make_spec
from kvjax.state import NO_BLOCK, Blocks, EvictionPolicy
from kvjax.verbs._request import checked_policy
from kvjax.verbs.init import init

_FIELDS_OF_A_TRACE = frozenset(
    ("children", "clock", "depth", "fill", "generation", "hits", "key", "parent", "refcount", "released", "stored")
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

    For LRU `lru_curve` is faster still. The policy gets the same blocks with the same ids, but no tokens and retention.
    A policy that reads any of these is refused with an error that names them. Use `replay` for such a policy. Keys are
    hashes of the trace's ids: equal for equal prefixes, as in the verbs, but other numbers. So a policy with a table of
    hashed keys, such as `adaptive`, may find a few other blocks than by `replay`. Unlike the verbs, `simulate` does not
    check all choices of a policy, and raises an error only if it notices an ineligible choice. Verify your policy with
    `kvjax.testing.check_policy`.

    All caches run in a single program, compiled for each policy, rule, number of sizes, largest size, length of the
    longest prompt to a factor of 4, and number of requests and blocks. It takes 4 bytes for each block of the trace and
    size.

    Args:
      trace: the requests. The time in ms since the first request is the policy's `now`.
      policy: the eviction policy; defaults to `lru()`. The balance of `cost_aware` is divided as in `replay`.
      sizes: i32[Z]; blocks of each cache.
      rule: the rule of hits; see `RULES`.
      policy_state: the policy's initial state, with a leading axis Z, as for `replay`.

    Returns:
      Hits of every request, blocks i32[Z, R]. A request longer than a cache is refused there and finds nothing.

    Raises:
      ValueError: for an unknown rule, no sizes, a size below 1, a policy or state that `init` refuses, and a policy
        that reads other fields of blocks or names ineligible blocks.

    Example:
      >>> from kvjax import policies, research
      >>> prompts = [[1, 2], [1, 3], [4, 5], [6, 7], [1, 8]]  # ids of blocks
      >>> trace = research.make_trace(range(5), [8] * 5, [0] * 5, prompts, block_size=4)
      >>> research.simulate(trace, policies.lru(), sizes=[4]).blocks.tolist()
      [[0, 1, 0, 0, 0]]
    """
    arguments = _arguments(trace, policy, sizes, rule, policy_state)
    num_found, sound = _serve_all(*arguments) if len(trace) else (np.zeros((0, len(sizes)), np.int32), True)
    check_sound(arguments[1], sound)
    return Hits(trace, rule, check_sizes(sizes), np.asarray(num_found).T)


def _arguments(
    trace: Trace, policy: EvictionPolicy | None, sizes: Sequence[int] | np.ndarray, rule: Rule, states: Any
) -> tuple[Any, ...]:
    """The arguments of `_serve_all`."""
    check_rule(rule)
    blocks = check_sizes(sizes)
    policy = in_blocks(checked_policy(policy), trace.block_size)
    spec = make_spec(num_blocks=int(blocks.max()), max_seqs=1, max_length=1, block_size=1, partial_reuse=False)
    missing = missing_fields(policy, spec.groups[0].num_blocks)
    if missing:
        raise ValueError(
            f"policy: got {policy}, which reads {', '.join(missing)} of blocks, wanted a policy that reads only "
            f"{', '.join(sorted(_FIELDS_OF_A_TRACE))} (replay takes any policy)"
        )
    widths = [16]  # 64, 256, ...: the numbers of columns; a request uses the smallest that fits
    while widths[-1] < trace.lengths.max(initial=1):
        widths.append(4 * widths[-1])
    width = np.append(np.searchsorted(widths, trace.lengths), -1).astype(np.int32)  # no width after the last request
    requests = request_arrays(trace, rule) | {"width": width}
    ids = np.concatenate([trace.ids, np.zeros(widths[-1], np.int32)])  # padded, so no slice is cut off
    return spec, policy, rule == "papers", tuple(widths), blocks, states, requests, ids


@functools.lru_cache(maxsize=64)
def missing_fields(policy: EvictionPolicy, num_blocks: int) -> tuple[str, ...]:
    """The arrays of `Blocks` read by a policy, for a number of blocks, but missing in a trace."""
    try:
        return _missing_fields(policy, num_blocks, retention=False)
    except ValueError:  # a policy that needs retention
        return _missing_fields(policy, num_blocks, retention=True)


def _missing_fields(policy: EvictionPolicy, num_blocks: int, retention: bool) -> tuple[str, ...]:
    spec = make_spec(num_blocks=num_blocks, max_seqs=1, max_length=1, block_size=1, extra_ids=True, retention=retention)
    group = jax.eval_shape(lambda: init(spec, policy).groups[0])

    def use_policy(blocks, policy_state, ids, wanted, now):
        policy_state = policy.touched(policy_state, blocks, ids, now)
        return policy.chosen(policy_state, blocks, lambda ids: ids >= 0, wanted, now, ids.shape[0])

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    jaxpr = jax.make_jaxpr(use_policy)(group.blocks, group.policy, ids, scalar, scalar)
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
    """i32[R, Z]; blocks found by each request in a cache of each size, and bool[Z], whether the cache stayed sound."""

    def begin(size: jax.Array, state: Any) -> _IdCache:
        group = init(spec, policy, size, policy_state=state).groups[0]
        none = jnp.full(group.blocks.fill.shape, NO_BLOCK, jnp.int32)
        return _IdCache(
            group.blocks, none, group.num_blocks, jnp.int32(0), jnp.int32(NO_BLOCK), group.policy, jnp.bool_(True)
        )

    def step(width: int, carry):
        """Serves the next request, which fits this number of columns."""
        index, caches, last_block, num_found = carry
        fields = {name: values[index] for name, values in requests.items()}
        request_ids = lax.dynamic_slice_in_dim(ids, fields["start"], width)
        is_id = fields["length"] > np.arange(width, dtype=np.int32)
        # The ids are the same for all caches, so `last_block` is gathered and scattered by whole rows.
        hints = last_block.at[request_ids].get(mode="clip")
        request = _Request(request_ids, fields["length"], fields["cached"], fields["now"])
        serve = functools.partial(_serve, policy=policy, last_may_hit=last_may_hit)
        caches, served = jax.vmap(serve, in_axes=(0, None, 1))(caches, request, hints)
        last_block = put(last_block, request_ids, jnp.where(served.stored, served.table, hints.T).T, is_id)
        return index + 1, caches, last_block, num_found.at[index].set(served.num_found)

    def serve_each_width(carry):
        for width_index, width in enumerate(widths):
            # Uses a loop instead of a branch, because XLA would copy the caches at a branch.
            is_of_width = lambda carry, index=width_index: requests["width"][carry[0]] == index  # noqa: E731
            carry = lax.while_loop(is_of_width, functools.partial(step, width), carry)
        return carry

    num_requests = requests["start"].shape[0]
    num_caches = sizes.shape[0]
    caches = jax.vmap(begin)(sizes, states)
    last_block = jnp.full((ids.shape[0], num_caches), NO_BLOCK, jnp.int32)  # there are at least as many blocks as ids
    start = (jnp.int32(0), caches, last_block, jnp.zeros((num_requests, num_caches), jnp.int32))
    _, caches, _, num_found = lax.while_loop(lambda carry: carry[0] < num_requests, serve_each_width, start)
    return num_found, caches.sound


class _Request(Pytree):
    ids: jax.Array  # i32[K]; the ids of its blocks, then any values
    length: jax.Array  # i32[]; the number of its blocks
    cached: jax.Array  # i32[]; the number of its blocks to cache at its end
    now: jax.Array  # i32[] ms


class _IdCache(Pytree):
    """A cache of ids."""

    blocks: Blocks  # as policies see them
    id: jax.Array  # i32[B]; the last id of each block
    size: jax.Array  # i32[]; blocks in use
    used: jax.Array  # i32[]; blocks 0..used-1 were used already
    spare: jax.Array  # i32[]; an empty block among these, or NO_BLOCK
    policy: Any  # the policy's own state
    sound: jax.Array  # bool[]; whether the policy named only eligible blocks


class _Served(Pytree):
    """The outcome of a request, besides the cache."""

    num_found: jax.Array  # i32[]; blocks found
    table: jax.Array  # i32[K]; its blocks
    stored: jax.Array  # bool[K]; its newly cached blocks


def _serve(
    cache: _IdCache, request: _Request, hints: jax.Array, policy: EvictionPolicy, last_may_hit: bool
) -> tuple[_IdCache, _Served]:
    """Admits a request, commits its blocks and releases it, as the verbs do. See `replay`.

    Hints i32[K] are the last block of each id, or NO_BLOCK. The block may hold another id now.
    """
    blocks = cache.blocks
    column = np.arange(hints.shape[0], dtype=np.int32)
    length = request.length
    fits = length <= cache.size
    is_last = column == length - 1
    is_cached = (column < length) & (hints >= 0)
    is_cached &= (pick(cache.id, hints) == request.ids) & (pick(blocks.fill, hints) > 0)
    prefix = jnp.cumprod(is_cached, dtype=jnp.int32) > 0
    hit = fits & prefix & (column < (length if last_may_hit else length - 1))
    num_found = count(hit)
    need = jnp.where(fits, length - num_found, 0)
    blocks = blocks.replace(refcount=put(blocks.refcount, hints, 1, hit), hits=add(blocks.hits, hints, 1, hit))
    cache, taken, victims = _take(cache.replace(blocks=blocks), need, policy, request.now, column)
    cache = cache.replace(sound=cache.sound & jnp.all(prefix | ~is_cached))  # else a block was evicted before its child

    new = (num_found <= column) & (column < num_found + need)
    block = jnp.where(hit, hints, pick(taken, column - num_found))
    # If a last block is still cached, it merges with its cached copy. It is not if the copy was evicted for it.
    merged = is_last & new & is_cached & (request.cached == length) & ~jnp.any(victims == pick(hints, length - 1))
    stored = new & (column < request.cached) & ~merged
    table = jnp.where(merged, hints, block)
    blocks = cache.blocks.replace(fill=put(cache.blocks.fill, block, stored.astype(jnp.int32), new))
    blocks = _publish(blocks, table, request.ids, stored, column)
    cached = fits & (request.cached > column)
    blocks = blocks.replace(
        hits=add(blocks.hits, hints, 1, merged),
        refcount=put(blocks.refcount, hints, 0, hit),
        released=put(blocks.released, table[::-1], blocks.clock + rank(cached[::-1]), cached[::-1]),
        clock=blocks.clock + count(cached),
    )
    spare = jnp.max(jnp.where(is_last & new & ~stored, block, cache.spare))
    policy_state = policy.touched(cache.policy, blocks, jnp.where(cached, table, NO_BLOCK)[::-1], request.now)
    ids = put(cache.id, table, request.ids, stored)
    return cache.replace(blocks=blocks, id=ids, spare=spare, policy=policy_state), _Served(num_found, table, stored)


def _take(
    cache: _IdCache, need: jax.Array, policy: EvictionPolicy, now: jax.Array, column: np.ndarray
) -> tuple[_IdCache, jax.Array, jax.Array]:
    """Takes blocks, empty blocks first. Returns the cache, the blocks i32[K], and the evicted blocks i32[K]."""
    blocks = cache.blocks
    spares = (cache.spare >= 0).astype(jnp.int32)
    empty = spares + cache.size - cache.used
    from_empty = jnp.minimum(need, empty)
    wanted = need - from_empty

    def eligible(ids: jax.Array) -> jax.Array:
        return (ids >= 0) & (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)

    victims, policy_state = policy.chosen(cache.policy, blocks, eligible, wanted, now, column.shape[0])
    leaves = column < wanted
    sound = cache.sound & jnp.all(eligible(victims) | ~leaves)
    parent = pick(blocks.parent, victims)[:, 0]
    (refcount, fill, parents), victims, sound, parent = fence(
        (blocks.refcount, blocks.fill, blocks.parent), jnp.where(leaves, victims, NO_BLOCK), sound, parent
    )
    children = add(blocks.children, parent, -1, leaves & (parent >= 0), unique=False)
    empties = jnp.where(column < spares, cache.spare, cache.used + column - spares)
    taken = jnp.where(column < empty, empties, pick(victims, column - empty))
    blocks = blocks.replace(refcount=refcount, fill=fill, parent=parents, children=children)
    used = cache.used + jnp.maximum(from_empty - spares, 0)
    spare = jnp.where(need > 0, NO_BLOCK, cache.spare)
    return cache.replace(blocks=blocks, used=used, spare=spare, policy=policy_state, sound=sound), taken, victims


def _publish(blocks: Blocks, table: jax.Array, ids: jax.Array, where: jax.Array, column: np.ndarray) -> Blocks:
    """Makes blocks of a request, table i32[K], findable where bool[K], like `blocks.publish`.

    Their keys are hashes of their ids i32[K].
    """
    above = jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), table[:-1]])
    generations = add(blocks.generation, table, 1, where)
    generation = jnp.where(above >= 0, pick(generations, above), 0)
    word = ids.astype(jnp.uint32)
    return blocks.replace(
        key=put(blocks.key, table, jnp.stack([mix(word), mix(~word)], axis=-1), where),
        generation=generations,
        parent=put(blocks.parent, table, jnp.stack([above, generation], axis=-1), where),
        children=add(blocks.children, above, 1, where & (above >= 0)),
        depth=put(blocks.depth, table, column, where),
        hits=put(blocks.hits, table, 0, where),
        stored=put(blocks.stored, table, blocks.clock + rank(where), where),
        clock=blocks.clock + count(where),
    )
