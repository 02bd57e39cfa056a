# SPDX-License-Identifier: Apache-2.0
"""Requests come in by `submit`, which checks them and gives them slots; `cancel` ends them, `drain` empties slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import compact, count, is_among, pick, put, rank
from kvjax.blocks.keys import chain, prefix_keys, root_key
from kvjax.checks import each_row, integers
from kvjax.events.records import Status
from kvjax.policies.retention import UNSTATED, Retention
from kvjax.serving.capacity import most_blocks, sample_blocks
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Finish, Requests, Serving, Stage
from kvjax.serving.sampling import Sampling
from kvjax.spec import Kind
from kvjax.state import CacheState, Text
from kvjax.verbs._request import first_failure
from pallas_kernels.loops import scan, varying


def submit(
    serving: Serving,
    tokens: ArrayLike,
    lengths: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    scheduler: Scheduler,
    slots: ArrayLike | None = None,
    priority: ArrayLike = 0,
    namespace: ArrayLike = 0,
    seed: ArrayLike = 0,
    sampling: Sampling | None = None,
    stop_tokens: ArrayLike | None = None,
    retention: Retention | None = None,
    sample_of: ArrayLike = -1,
    logits_state: Any = None,
) -> tuple[Serving, jax.Array, jax.Array, jax.Array]:
    """Requests wait from now on, each in an empty slot; one that could never run is refused.

    Args:
      serving: where.
      tokens: i32[T]; the prompts, one after the other; anything behind them.
      lengths: i32[R]; tokens of each prompt.
      max_new_tokens: i32[R]; how many tokens to generate, unless a stop token comes before.
      scheduler: static; what the steps are run with.
      slots: i32[R]; the slot of each, all different; None: the first empty ones.
      priority: i32[R]; higher first.
      namespace: i32[R]; see `Namespaces`.
      seed: u32[R]; of each request's random stream.
      sampling: leaves [R], or scalars for all; None: greedy.
      stop_tokens: i32[K'] for all, or i32[R, K'], at most K; -1 is none.
      retention: arrays with a leading axis R, at most the `num_ranges` of `init_serving`.
      sample_of: i32[R]; another sample of the prompt that this earlier entry of the batch has, or -1. Both run at the
        same time, and share what is computed of the prompt.
      logits_state: a tree of arrays [R, ...]; what `logits_fn` gets with the first logits of each.

    Returns:
      The requests; and for each entry i32[R]: its status, its slot (-1 if refused) and the slot's generation. The first
      status that fits: BAD_REQUEST (no tokens, negative ones or more than there are, nothing to generate; for a sample
      also another prompt), for a sample of a refused entry that one's, HELD (no slot is empty), ROW_FULL (it does not
      fit into a row or its slot, or its samples have no rows), NO_BLOCKS (they do not fit alone into the cache beside
      pinned blocks, even if as many of these as possible are its own prefix). A refused entry takes no slot.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> scheduler = kvjax.serving.Scheduler(chunk=8)
      >>> serving = kvjax.serving.init_serving(kvjax.Cache.create(spec), [20, 20, 20])  # three slots of 20 tokens
      >>> results = kvjax.serving.submit(serving, np.arange(18), [10, 8], [4, 40], scheduler=scheduler)
      >>> serving, status, slots, generations = results
      >>> [kvjax.Status(number) for number in status.tolist()], slots.tolist()  # the second one fits into no slot
      ([Status.OK, Status.ROW_FULL], [0, -1])
    """
    spec, requests = serving.cache.state.spec, serving.requests
    tokens, lengths = integers("tokens", tokens, ("T",)), integers("lengths", lengths, ("R",))
    (number,) = lengths.shape
    new, priority = each_row("max_new_tokens", max_new_tokens, (number,)), each_row("priority", priority, (number,))
    namespace, parent = each_row("namespace", namespace, (number,)), each_row("sample_of", sample_of, (number,))
    flat, stop = _Flat.of(tokens, lengths), _stop_tokens(stop_tokens, number, requests.stop.shape[1])
    max_tokens = lengths + jnp.clip(new, 0, spec.max_length + 2)  # beyond that it is refused, and must not overflow
    bad = (lengths < 1) | (flat.start + lengths > tokens.shape[0]) | (new < 1)
    bad = bad | (namespace < 0) | flat.any(flat.tokens < 0) | _no_sample(flat, namespace, parent)
    samples = parent[None] == np.arange(number, dtype=np.int32)[:, None]
    full = (max_tokens - 1 > min(spec.max_length, serving.width)) | (jnp.sum(samples, axis=1) >= spec.max_seqs)
    large = _never_fits(serving.cache.state, scheduler, lengths, max_tokens, samples)
    status, slots = _take_slots(requests, (parent, max_tokens, bad, full, large), slots)
    good, zero = status == Status.OK, jnp.zeros((number,), jnp.int32)
    seed = jnp.broadcast_to(jnp.asarray(seed).astype(jnp.uint32), (number,))
    requests = _write_prompts(requests, slots, good, flat, namespace, spec.block_size)
    requests = requests.at(
        slots, good, stage=int(Stage.WAITING), prompt=lengths, num_tokens=lengths, max_tokens=max_tokens,
        priority=priority, arrival=serving.arrivals + rank(good), passed=zero,
        parent=jnp.where(parent >= 0, pick(slots, parent), -1), namespace=namespace, seed=seed, stop=stop, onboard=True,
        finish=int(Finish.NONE), cached=zero, preemptions=zero, submitted=zero + serving.steps, admitted=zero - 1,
        first_token=zero - 1, ended=zero - 1,
    )  # fmt: skip
    if requests.sampling is not None:
        sampling = Sampling() if sampling is None else sampling
        if requests.sampling.min_p is not None:
            sampling = sampling.with_min_p()
        elif sampling.min_p is not None:
            raise ValueError("sampling.min_p: got one, wanted None (init_serving was not asked for min_p=True)")
        requests = requests.at(slots, good, sampling=sampling.each_row(number))
    elif sampling is not None:
        raise ValueError("sampling: got one, wanted None (init_serving was asked for greedy=True)")
    if requests.logits_state is not None:
        requests = requests.at(slots, good, logits_state=logits_state)
    requests = _write_retention(requests, slots, good, retention)
    serving = serving.replace(
        requests=requests, arrivals=serving.arrivals + count(good), dirty=serving.dirty | jnp.any(good)
    )
    return serving, status, jnp.where(good, slots, -1), jnp.where(good, requests[slots].generation, -1)


def cancel(serving: Serving, slots: ArrayLike, generations: ArrayLike) -> tuple[Serving, jax.Array]:
    """Ends requests; one that runs keeps its row until the next step begins.

    Args:
      serving: where.
      slots: i32[R].
      generations: i32[R]; as `submit` returned them.

    Returns:
      The requests; and i32[R], the status of each: BAD_REQUEST if it is over, or its slot has another request by now.
    """
    slots, requests = integers("slots", slots, ("R",)), serving.requests
    generations = integers("generations", generations, slots.shape)
    is_valid = (slots >= 0) & (slots < requests.size) & (pick(requests.generation, slots) == generations)
    stage = pick(requests.stage, slots)
    is_valid = is_valid & ((stage == Stage.WAITING) | (stage == Stage.RUNNING))
    gone = is_among(requests.size, slots, is_valid)
    followers = (requests.parent >= 0) & pick(gone, requests.parent)
    requests = requests.replace(
        stage=jnp.where(gone, int(Stage.CANCELLED), requests.stage),
        finish=jnp.where(gone, int(Finish.CANCELLED), requests.finish),
        ended=jnp.where(gone, serving.steps, requests.ended),
        parent=jnp.where(followers & (requests.stage == Stage.WAITING), -1, requests.parent),
    )
    serving = serving.replace(requests=requests, dirty=serving.dirty | jnp.any(gone))
    return serving, jnp.where(is_valid, int(Status.OK), int(Status.BAD_REQUEST))


def drain(serving: Serving) -> Serving:
    """Empties the slots of requests that are over and have no row; read their `results` before."""
    requests = serving.requests
    over = (requests.stage == Stage.DONE) | (requests.stage == Stage.CANCELLED)
    of_rows = put(jnp.zeros_like(over), serving.row, True, serving.row >= 0)
    over = over & ~of_rows
    stage, generation = jnp.where(over, int(Stage.EMPTY), requests.stage), requests.generation + over.astype(jnp.int32)
    return serving.replace(requests=requests.replace(stage=stage, generation=generation))


class _Flat(NamedTuple):
    """Several lists on one axis, one after the other."""

    tokens: jax.Array  # i32[T]
    lengths: jax.Array  # i32[R]; of the lists
    start: jax.Array  # i32[R]; the index of each list's first entry
    owner: jax.Array  # i32[T]; the list of each entry
    offset: jax.Array  # i32[T]; its index in the list
    is_valid: jax.Array  # bool[T]; whether it belongs to a list

    @classmethod
    def of(cls, tokens: jax.Array, lengths: jax.Array) -> _Flat:
        ends = jnp.cumsum(jnp.maximum(lengths, 0), dtype=jnp.int32)
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        start = ends - jnp.maximum(lengths, 0)
        return cls(tokens, lengths, start, owner, index - pick(start, owner), owner < lengths.shape[0])

    def any(self, where: jax.Array) -> jax.Array:
        """bool[R]; whether it holds for some entry of each list, where bool[T]."""
        return is_among(self.start.shape[0], self.owner, where & self.is_valid)


def _no_sample(flat: _Flat, namespace: jax.Array, parent: jax.Array) -> jax.Array:
    """bool[R]; entries that say they are samples of another one, and have another prompt, or name no such entry."""
    lead = jnp.maximum(parent, 0)
    same = pick(flat.tokens, pick(flat.start, pick(lead, flat.owner)) + flat.offset) == flat.tokens
    alike = (pick(flat.lengths, lead) == flat.lengths) & (pick(namespace, lead) == namespace) & ~flat.any(~same)
    first = (pick(parent, lead) < 0) & (parent < np.arange(parent.shape[0], dtype=np.int32))
    return (parent >= 0) & ~(alike & first)


def _never_fits(
    state: CacheState, scheduler: Scheduler, prompt: jax.Array, max_tokens: jax.Array, samples: jax.Array
) -> jax.Array:
    """bool[R]; requests that, with their samples bool[R, R], need more blocks than a group has besides those pinned."""
    fits, most = jnp.ones(max_tokens.shape, jnp.bool_), most_blocks(state.spec, scheduler, max_tokens)
    more = sample_blocks(state.spec, scheduler, max_tokens, prompt, samples)
    for group, spec, own, of_samples in zip(state.groups, state.spec.groups, most, more, strict=True):
        table, refcount = group.table.reshape(-1), group.blocks.refcount
        of_rows = is_among(refcount.shape[0], table, table >= 0)
        pinned = count((refcount > 0) & ~of_rows & group.on_device(group.ids))
        # They may be its own: as many as its prompt has whole blocks, where it keeps what it shares.
        shared = jnp.minimum(pinned, prompt // state.spec.block_size) if spec.kind is Kind.FULL else 0
        fits = fits & (own + of_samples <= group.num_blocks - pinned + shared)
    return ~fits


def _take_slots(
    requests: Requests, entries: tuple[jax.Array, ...], slots: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Statuses and slots of the entries, both i32[R]: these slots, or the first empty ones; one entry by another."""
    number, empty = entries[0].shape[0], requests.stage == Stage.EMPTY
    if slots is None:
        free, _ = compact(jnp.where(empty, np.arange(requests.size, dtype=np.int32), -1))
    else:
        free = integers("slots", slots, (number,))
        free = jnp.where((free >= 0) & (free < requests.size) & pick(empty, free), free, -1)

    def take(carry, entry):
        num_taken, statuses, taken = carry
        parent, max_tokens, bad, full, large = pick(entries, entry)
        index = num_taken if slots is None else entry
        slot = jnp.where(index < free.shape[0], pick(free, index), -1)
        status = first_failure(
            (bad, Status.BAD_REQUEST), (slot < 0, Status.HELD),
            (full | (max_tokens > requests[slot].capacity), Status.ROW_FULL), (large, Status.NO_BLOCKS),
        )  # fmt: skip
        of_parent = jnp.where((parent >= 0) & ~bad, pick(statuses, parent), int(Status.OK))
        status = jnp.where(of_parent == Status.OK, status, of_parent)
        good = status == Status.OK
        statuses, taken = put((statuses, taken), entry, (status, jnp.where(good, slot, -1)), jnp.bool_(True))
        return (num_taken + good.astype(jnp.int32), statuses, taken), None

    start = jnp.int32(0), jnp.full((number,), int(Status.OK), jnp.int32), jnp.full((number,), -1, jnp.int32)
    (_, statuses, taken), _ = scan(take, varying(entries)(start), jnp.arange(number, dtype=jnp.int32))
    return statuses, taken


def _write_prompts(
    requests: Requests, slots: jax.Array, good: jax.Array, flat: _Flat, namespace: jax.Array, size: int
) -> Requests:
    """Stores prompts, and the keys of their whole blocks."""
    start = requests[slots].start
    where = flat.is_valid & pick(good, flat.owner)
    text = put(requests.text, pick(start, flat.owner) + flat.offset, flat.tokens, where)
    blocks = _Flat.of(jnp.zeros((max(flat.tokens.shape[0] // size, 1),), jnp.int32), flat.lengths // size)
    at = pick(start, blocks.owner) // size + blocks.offset
    none, contents = jnp.zeros((1, 2), jnp.uint32), Text(pick(text.reshape(-1, size), at), None)
    words = prefix_keys(none, contents, size, blocks.offset, chain)
    # Sums over all blocks of the batch; a prompt's begin after those of the prompts before it.
    before = jnp.where((blocks.start > 0)[:, None], pick(words, blocks.start - 1), np.uint32(0))
    keys = words + pick(root_key(namespace) - before, blocks.owner)
    keys = put(requests.keys, at, keys, blocks.is_valid & pick(good, blocks.owner))
    return requests.replace(text=text, keys=keys)


def _stop_tokens(stop_tokens: ArrayLike | None, number: int, most: int) -> jax.Array:
    """i32[R, K]; the stop tokens of each entry, padded with -1."""
    if stop_tokens is None:
        return jnp.full((number, most), -1, jnp.int32)
    stop = integers("stop_tokens", stop_tokens)
    stop = jnp.broadcast_to(stop, (number, *stop.shape)) if stop.ndim == 1 else stop
    if stop.ndim != 2 or stop.shape[0] != number or stop.shape[1] > most:
        raise ValueError(
            f"stop_tokens: got shape {list(stop.shape)}, wanted at most {most} for each of {number} entries"
        )
    return jnp.pad(stop, ((0, 0), (0, most - stop.shape[1])), constant_values=-1)


def _write_retention(requests: Requests, slots: jax.Array, good: jax.Array, new: Retention | None) -> Requests:
    """Stores the retention of the entries, padded with empty ranges."""
    stored, number = requests.retention, slots.shape[0]
    if stored is None:
        if new is not None:
            raise ValueError("retention: got one, wanted None (init_serving was asked for no ranges)")
        return requests
    if new is None:
        new = Retention(np.zeros((number, 0, 4), np.int32), np.tile(Retention.of().decode, (number, 1)))
    ranges, decode = integers("retention.ranges", new.ranges), integers("retention.decode", new.decode)
    most = stored.ranges.shape[1]
    if ranges.shape[0] != number or ranges.shape[1] > most or decode.shape != (number, 2):
        raise ValueError(
            f"retention: got ranges {list(ranges.shape)}, wanted at most {most} for each of {number} entries"
        )
    empty = jnp.broadcast_to(np.array([0, 0, UNSTATED, UNSTATED], np.int32), (number, most - ranges.shape[1], 4))
    return requests.at(slots, good, retention=Retention(jnp.concatenate([ranges, empty], axis=1), decode))
