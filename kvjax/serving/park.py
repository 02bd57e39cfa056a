# SPDX-License-Identifier: Apache-2.0
"""Requests without their K/V: they wait in a `Parked` while the memory of the pools is used for something else.

    Serving   cache: state, pools     row   2 0 - -     0 RUNNING  p p p p g g     1 RUNNING  p p p     2 WAITING  p p
    park      cache: state            row   - - - -     0 WAITING  p p p p g g     1 WAITING  p p p     2 WAITING  p p
    unpark    cache: state, pools     as after `park`; the next steps admit the requests again

A request keeps its tokens, their log-probabilities, the state of `logits_fn` and its random stream, whose numbers
depend only on positions. So it goes on as if nothing had happened.

Source: vLLM's sleep mode, which drops the K/V of a server, and its preemption by recomputation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, either, is_among, pick
from kvjax.blocks import windows
from kvjax.blocks.keys import root_key
from kvjax.blocks.publish import descendants, remove
from kvjax.cache import Cache
from kvjax.checks import integers
from kvjax.events.records import EventKind, Events, Status
from kvjax.pools.device import Pools
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import leave
from kvjax.serving.program_tier import moved
from kvjax.serving.requests import Serving, Stage
from kvjax.state import CacheState
from kvjax.verbs._request import assemble
from kvjax.verbs.control import leave_index_with, reset
from kvjax.verbs.offload import complete, watermark
from pallas_kernels.loops import while_loop


class Parked(Pytree):
    """Requests and the metadata of their cache, without pools: small arrays, which you can save.

    Attributes:
      serving: the requests. All wait, and the pools of the cache have no arrays. With `keep="host"` the host's pools
        are in it.
    """

    serving: Serving


def without_pools(serving: Serving) -> Serving:
    """The requests and the metadata of their cache. Programs over them neither take nor return K/V."""
    spec = serving.cache.state.spec
    groups = tuple(dataclasses.replace(group, pools=()) for group in spec.groups)
    pools = Pools(tuple(() for _ in groups), dataclasses.replace(spec, groups=groups))
    return serving.replace(cache=Cache(serving.cache.state, pools))


def park(
    serving: Serving,
    *,
    scheduler: Scheduler,
    keep: Literal["none", "host"] = "none",
    kept: ArrayLike | None = None,
    logits_state: Any = None,
    now: ArrayLike = 0,
) -> tuple[Parked, Events]:
    """Takes all requests from their rows, and empties the device, so you can free its pools. It is pure: use `jit`.

    With a canonical scheduler a request goes back to its prompt, and makes the same tokens again after `unpark`, with
    the same bits: K/V of generated tokens come from another program than K/V of prompts. Otherwise it keeps its tokens,
    and computes their K/V like a prompt's.

    Args:
      serving: the requests and their cache. Do not donate it, and free the pools yourself (`jax.Array.delete`).
      scheduler: static; the scheduler of the steps.
      keep: static; "none" empties the cache. "host" moves cached blocks to the host, as far as it has space, and
        requests find them after `unpark`. It needs a `TieredCache` in `init_serving`.
      kept: i32[W]; number of tokens that each request keeps. None means its prompt's tokens with a canonical scheduler,
        and otherwise all.
      logits_state: a tree of arrays [W, ...], the state of `logits_fn` after these tokens. None leaves it as it is.
      now: i32[]; the time in ms.

    Returns:
      The parked requests, and events: stored, removed, and updated or cleared. Status HELD if a pin, or a row without a
      request, holds K/V that would be lost. Then nothing has changed, and you can go on with `unpark` and the same
      pools.

    Raises:
      ValueError: if a canonical scheduler needs a `logits_state`, `kept` has another shape, or `keep` is "host" without
        the host's pools.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> scheduler = kvjax.serving.Scheduler(chunk=8)
      >>> serving = kvjax.serving.init_serving(kvjax.Cache.create(spec), [20, 20])
      >>> serving, *_ = kvjax.serving.submit(serving, np.arange(10), [10], [4], scheduler=scheduler)
      >>> parked, events = kvjax.serving.park(serving, scheduler=scheduler)
      >>> serving = kvjax.serving.unpark(parked, kvjax.pools.init_pools(spec))
      >>> serving.requests.stage.tolist()  # the request waits, and the other slot is empty
      [1, 0]

    Source: vLLM's sleep mode.
    """
    if keep not in ("none", "host"):
        raise ValueError(f"keep: got {keep!r}, wanted 'none' or 'host'")
    if keep == "host" and serving.host_pools is None:
        raise ValueError("keep: got 'host', but the requests have no host pools; wanted init_serving(a TieredCache)")
    before = without_pools(serving)
    requests = serving.requests
    if kept is None and scheduler.canonical:
        if requests.logits_state is not None and logits_state is None:
            raise ValueError("logits_state: got None, wanted the requests' first states with a canonical scheduler")
        kept = requests.prompt
    after, released = preempt(before, jnp.ones(serving.row.shape, jnp.bool_), now=now)
    if kept is not None:
        after = back_to(after, integers("kept", kept, requests.stage.shape), logits_state)
    if keep == "host":
        is_held = jnp.any(jnp.stack([jnp.any(group.blocks.refcount > 0) for group in after.cache.state.groups]))
        after, moves = _to_host(after.replace(cache=Cache(after.cache.state, serving.cache.pools)), ~is_held, now)
        released = released.followed_by(moves)
        state, cleared = leave_device(after.cache.state)
        after = without_pools(after)
    else:
        state, cleared = reset(after.cache.state)
        is_held = ~cleared.ok
    after = after.replace(cache=after.cache.replace(state=state))
    events = released.followed_by(cleared)
    kinds = jnp.where(is_held, int(EventKind.NONE), events.kind)
    records = events.records.at[:, 0].set(kinds)
    status = jnp.where(is_held, int(Status.HELD), jnp.zeros_like(events.status))
    host_pools = after.host_pools  # equal in both if nothing may move, and a choice would copy them
    parked = either(is_held, before.replace(host_pools=None), after.replace(host_pools=None))
    return Parked(parked.replace(host_pools=host_pools)), events.replace(records=records, status=status)


def _to_host(serving: Serving, where: jax.Array, now: ArrayLike) -> tuple[Serving, Events]:
    """Moves all cached blocks to the host if bool[] `where` holds, as far as the host has space."""
    spec = serving.cache.state.spec
    events = list[Events]()
    for group_index in spec.host_groups:
        num_blocks = spec.groups[group_index].num_blocks
        num_empty = jnp.where(where, num_blocks, 0)
        state, left = watermark(serving.cache.state, num_empty, max_blocks=num_blocks, now=now, group=group_index)
        serving = moved(serving.replace(cache=serving.cache.replace(state=state)), left)
        state, _ = complete(serving.cache.state, left.transfer, True, max_removed=1)
        serving = serving.replace(cache=serving.cache.replace(state=state))
        events.append(left)
    return serving, functools.reduce(Events.followed_by, events)


def unpark(parked: Parked, pools: Pools) -> Serving:
    """Gives parked requests a cache again. The next steps admit them. Pure, and free of computation.

    Args:
      parked: the result of `park`.
      pools: pools of the same spec, whose contents nobody reads, such as `kvjax.pools.init_pools(spec)`.

    Returns:
      The requests and their cache.

    Raises:
      ValueError: if the pools have another spec.
    """
    spec = parked.serving.cache.state.spec
    if not isinstance(pools, Pools) or pools.spec != spec:
        got = pools.spec if isinstance(pools, Pools) else pools
        raise ValueError(f"pools: got pools of {got!r:.80}, wanted pools of {spec!r:.80}")
    return with_pools(parked.serving, pools)


def with_pools(serving: Serving, pools: Pools) -> Serving:
    """Gives the requests a cache with these pools."""
    return serving.replace(cache=Cache(serving.cache.state, pools))


def preempt(serving: Serving, where: jax.Array, now: ArrayLike = 0) -> tuple[Serving, Events]:
    """Takes the requests from rows where bool[S]. Running requests wait again, and the rows' tokens stay cached."""
    rows = np.arange(serving.row.shape[0], dtype=np.int32)
    leaves = where & (serving.row >= 0)

    def take(serving: Serving) -> Serving:
        row = jnp.argmax(leaves & (serving.row >= 0)).astype(jnp.int32)
        return leave(serving, row, jnp.bool_(False))

    serving = while_loop(lambda serving: jnp.any(leaves & (serving.row >= 0)), take, serving)
    has_tokens = leaves & (serving.cache.state.seqs.length > 0)
    cache, events = serving.cache.release(jnp.where(has_tokens, rows, -1), now=integers("now", now, ()))
    return serving.replace(cache=cache), events.replace(status=jnp.zeros_like(events.status))


def back_to(serving: Serving, num_tokens: jax.Array, logits_state: Any = None) -> Serving:
    """Sets the number of tokens i32[W] of waiting requests, and their state of `logits_fn`, a tree of [W, ...]."""
    requests = serving.requests
    slots = jnp.arange(requests.size, dtype=jnp.int32)
    waits = requests.stage == Stage.WAITING
    values = {"num_tokens": jnp.clip(num_tokens, requests.prompt, requests.max_tokens - 1)}
    if logits_state is not None:
        values["logits_state"] = logits_state
    return serving.replace(requests=requests.at(slots, waits, **values))


def renumber(serving: Serving, namespace: jax.Array) -> Serving:
    """Gives the requests other namespaces i32[W]. Rows stay in their own, so this is for their requests' next rows."""
    requests = serving.requests
    block_size = serving.cache.state.spec.block_size
    first_token = jnp.arange(requests.keys.shape[0], dtype=jnp.int32) * block_size
    slot = jnp.searchsorted(requests.start, first_token, side="right").astype(jnp.int32) - 1
    # A key is a sum, which begins with the key of its namespace. No request waits for a prefix of a running row.
    change = jnp.where(
        (requests.stage == Stage.WAITING)[:, None], root_key(namespace) - root_key(requests.namespace), 0
    )
    keys = requests.keys + pick(change, slot)
    return serving.replace(requests=requests.replace(namespace=namespace, keys=keys))


def withdraw(serving: Serving, where: jax.Array) -> tuple[Serving, jax.Array]:
    """Empties the slots where bool[W] of waiting requests. Also returns these slots, bool[W]."""
    requests = serving.requests
    withdrawn = where & (requests.stage == Stage.WAITING)
    stage = jnp.where(withdrawn, int(Stage.EMPTY), requests.stage)
    generation = requests.generation + withdrawn.astype(jnp.int32)
    parent = jnp.where(withdrawn, -1, requests.parent)
    requests = requests.replace(stage=stage, generation=generation, parent=parent)
    return serving.replace(requests=requests), withdrawn


def disown(serving: Serving) -> tuple[Serving, Events]:
    """Takes the blocks of all rows out of the index, with their descendants. The rows go on, and publish nothing more.

    A block is published only after the block before it, so preempt the rows without a whole block before.
    """
    state = serving.cache.state
    group = state.groups[0]
    table = group.table.reshape(-1)
    is_in_row = is_among(group.ids.shape[0], table, table >= 0)
    doomed = descendants(group.blocks, is_in_row & (group.blocks.fill > 0))
    state, removed = leave_index_with(state, doomed, group.ids.shape[0], jnp.bool_(True))
    events = assemble(state, jnp.zeros((1,), jnp.int32), removed=removed)
    return serving.replace(cache=serving.cache.replace(state=state)), events


def leave_device(state: CacheState) -> tuple[CacheState, Events]:
    """Empties the blocks of the device, of which no row or pin holds any, with their descendants on the host."""
    group = state.groups[0]
    doomed = descendants(group.blocks, group.on_device(group.ids) & (group.blocks.fill > 0))
    state, removed = leave_index_with(state, doomed, group.ids.shape[0], jnp.bool_(True))
    groups = [state.groups[0]]
    for index, window_group in enumerate(state.window_groups, 1):  # the host may have had no space for these
        ids = window_group.ids
        is_left = window_group.on_device(ids) & (window_group.blocks.fill > 0)
        window_group, left_index = remove(window_group, index, windows.own_policy(window_group.blocks), ids, is_left)
        groups.append(window_group)
        removed = [*removed, left_index]
    state = state.replace(groups=tuple(groups))
    return state, assemble(state, jnp.zeros((1,), jnp.int32), removed=removed)
