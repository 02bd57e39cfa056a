# SPDX-License-Identifier: Apache-2.0
"""`submit`: requests come in, are checked, and wait in slots."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from kvjax._arrays import Pytree, compact, count, pick, put, rank
from kvjax._checks import each_row, integers
from kvjax.blocks.keys import chain, prefix_keys, root_key
from kvjax.events.records import Status
from kvjax.policies.retention import UNSTATED, Retention, is_retention
from kvjax.serving.capacity import for_samples, most_blocks
from kvjax.serving.requests import Finish, Requests, Serving, Stage
from kvjax.serving.sampling import Sampling
from kvjax.serving.scheduler import Scheduler
from kvjax.state import CacheState, Group, Text
from kvjax.verbs._request import first_failure


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
      retention: arrays with a leading axis R, where `init_serving` was asked for room.
      sample_of: i32[R]; another sample of the prompt that this earlier entry of the batch has, or -1. Both run at the
        same time, and share what is computed of the prompt.

    Returns:
      The requests; and for each entry i32[R]: its status, its slot (-1 if refused) and the slot's generation. The first
      status that fits: BAD_REQUEST (no tokens, negative ones or more than there are, nothing to generate; for a sample
      also another prompt, or a refused one), HELD (no slot is empty), ROW_FULL (it has no room in a row or in its slot,
      or its samples have no rows), NO_BLOCKS (they do not fit alone into the cache beside pinned blocks, even if
      as many of these as possible are its own prefix). A refused entry takes no slot.
    """
    spec, requests = serving.cache.state.spec, serving.requests
    tokens, lengths = integers("tokens", tokens, ("T",)), integers("lengths", lengths, ("R",))
    (number,) = lengths.shape
    new, priority, namespace, parent = (
        each_row(name, value, (number,))
        for name, value in (
            ("max_new_tokens", max_new_tokens), ("priority", priority), ("namespace", namespace),
            ("sample_of", sample_of),
        )
    )  # fmt: skip
    line, stop = _Line.of(tokens, lengths), _stop_tokens(stop_tokens, number, requests.stop.shape[1])
    goal = lengths + jnp.clip(new, 0, spec.max_length + 2)  # beyond that it is refused, and must not overflow
    bad = (lengths < 1) | (line.start + lengths > tokens.shape[0]) | (new < 1)
    bad = bad | (namespace < 0) | line.any(line.tokens < 0) | _no_sample(line, lengths, namespace, parent)
    samples = parent[None] == np.arange(number, dtype=np.int32)[:, None]
    full = (goal - 1 > min(spec.max_length, serving.width)) | (jnp.sum(samples, axis=1) >= spec.max_seqs)
    large = _never_fits(serving.cache.state, scheduler, lengths, goal, samples)
    status, slots = _place(requests, _Asked(parent, goal, bad, full, large), slots)
    good, zero = status == Status.OK, jnp.zeros((number,), jnp.int32)
    seed = jnp.broadcast_to(jnp.asarray(seed).astype(jnp.uint32), (number,))
    requests = _write_prompts(requests, slots, good, line, lengths, namespace, spec.block_size)
    requests = requests.at(
        slots, good, stage=int(Stage.WAITING), prompt=lengths, known=lengths, goal=goal, priority=priority,
        arrival=serving.arrivals + rank(good), passed=zero, parent=jnp.where(parent >= 0, pick(slots, parent), -1),
        namespace=namespace, seed=seed, stop=stop, onboard=True,
        finish=int(Finish.NONE), cached=zero, preemptions=zero, submitted=zero + serving.steps, admitted=zero - 1,
        first_token=zero - 1, ended=zero - 1,
    )  # fmt: skip
    if requests.sampling is not None:
        requests = requests.at(slots, good, sampling=(sampling or Sampling()).each_row(number))
    elif sampling is not None:
        raise ValueError("sampling: got one, wanted None (init_serving was asked for greedy=True)")
    requests = _state_retention(requests, slots, good, retention)
    serving = serving.replace(
        requests=requests, arrivals=serving.arrivals + count(good), dirty=serving.dirty | jnp.any(good)
    )
    return serving, status, jnp.where(good, slots, -1), jnp.where(good, pick(requests.generation, slots), -1)


class _Line(NamedTuple):
    """Entries of several lists on one line, one list after the other.

    Attributes:
      tokens: i32[T].
      start: i32[R]; where each list starts.
      owner: i32[T]; whose entry it is.
      offset: i32[T]; its place in the list.
      real: bool[T]; whether it belongs to a list.
    """

    tokens: jax.Array
    start: jax.Array
    owner: jax.Array
    offset: jax.Array
    real: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, lengths: jax.Array) -> _Line:
        ends = jnp.cumsum(jnp.maximum(lengths, 0), dtype=jnp.int32)
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        owner = jnp.searchsorted(ends, place, side="right").astype(jnp.int32)
        start = ends - jnp.maximum(lengths, 0)
        return cls(tokens, start, owner, place - pick(start, owner), owner < lengths.shape[0])

    def any(self, where: jax.Array) -> jax.Array:
        """bool[R]; whether it holds for some entry of each list, where bool[T]."""
        found = jnp.zeros(self.start.shape, jnp.bool_)
        return put(found, self.owner, True, where & self.real, unique=False)


def _no_sample(line: _Line, lengths: jax.Array, namespace: jax.Array, parent: jax.Array) -> jax.Array:
    """bool[R]; entries that say they are samples of another one, and have another prompt, or name no such entry."""
    lead = jnp.maximum(parent, 0)
    same = pick(line.tokens, pick(line.start, pick(lead, line.owner)) + line.offset) == line.tokens
    alike = (pick(lengths, lead) == lengths) & (pick(namespace, lead) == namespace) & ~line.any(~same)
    first = (pick(parent, lead) < 0) & (parent < np.arange(parent.shape[0], dtype=np.int32))
    return (parent >= 0) & ~(alike & first)


def _never_fits(
    state: CacheState, scheduler: Scheduler, length: jax.Array, goal: jax.Array, samples: jax.Array
) -> jax.Array:
    """bool[R]; requests that, with their samples bool[R, R], need more blocks than a group has besides those pinned.

    Pinned blocks may be their own: as many as a prompt has whole blocks, where it keeps what it shares.
    """
    fits = jnp.ones(goal.shape, jnp.bool_)
    whole, more = most_blocks(state.spec, scheduler, goal), for_samples(state.spec, scheduler, goal, length, samples)
    for group, spec, most, of_samples in zip(state.groups, state.spec.groups, whole, more, strict=True):
        pinned = _pinned(group)
        shared = jnp.minimum(pinned, length // state.spec.block_size) if spec.window is None else 0
        fits = fits & (most + of_samples <= group.num_blocks - pinned + shared)
    return ~fits


def _pinned(group: Group) -> jax.Array:
    """i32[]; blocks that are held, but by no row."""
    table = group.table.reshape(-1)
    of_rows = put(jnp.zeros(group.blocks.refcount.shape, jnp.bool_), table, True, table >= 0, unique=False)
    return count((group.blocks.refcount > 0) & ~of_rows & group.on_device(group.ids))


class _Asked(Pytree):
    """The checks of each entry, all [R].

    Attributes:
      parent: i32; the entry that it is a sample of, or -1.
      goal: i32.
      bad: bool; it is no request.
      full: bool; it does not fit into a row.
      large: bool; it does not fit into the cache.
    """

    parent: jax.Array
    goal: jax.Array
    bad: jax.Array
    full: jax.Array
    large: jax.Array


def _place(requests: Requests, asked: _Asked, given: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    """Statuses and slots of the entries, both i32[R]: those given, or the first empty ones; one entry by another."""
    number = asked.goal.shape[0]
    empty = requests.stage == Stage.EMPTY
    if given is None:
        slots, _ = compact(jnp.where(empty, np.arange(requests.size, dtype=np.int32), -1))
    else:
        slots = integers("slots", given, asked.goal.shape)
        slots = jnp.where((slots >= 0) & (slots < requests.size) & pick(empty, slots), slots, -1)

    def place(carry: tuple[jax.Array, jax.Array], entry: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        taken, placed = carry
        one = pick(asked, entry)
        at = entry if given is not None else taken
        slot = jnp.where(at < slots.shape[0], pick(slots, at), -1)
        alone = (one.parent >= 0) & (pick(placed, one.parent) < 0)
        status = first_failure(
            (one.bad | alone, Status.BAD_REQUEST), (slot < 0, Status.HELD),
            (one.full | (one.goal > pick(requests.room, slot)), Status.ROW_FULL), (one.large, Status.NO_BLOCKS),
        )  # fmt: skip
        good = status == Status.OK
        placed = put(placed, entry[None], slot, good[None])
        return (taken + good.astype(jnp.int32), placed), status

    start = jnp.int32(0), jnp.full((number,), -1, jnp.int32)
    (_, slots), status = lax.scan(place, start, jnp.arange(number, dtype=jnp.int32))
    return status, slots


def _write_prompts(
    requests: Requests,
    slots: jax.Array,
    good: jax.Array,
    line: _Line,
    lengths: jax.Array,
    namespace: jax.Array,
    size: int,
) -> Requests:
    """Stores prompts, and the keys of their whole blocks."""
    start = pick(requests.start, slots)
    where = line.real & pick(good, line.owner)
    text = put(requests.text, pick(start, line.owner) + line.offset, line.tokens, where)
    blocks = _Line.of(jnp.zeros((max(line.tokens.shape[0] // size, 1),), jnp.int32), lengths // size)
    at = pick(start, blocks.owner) // size + blocks.offset
    none, contents = jnp.zeros((1, 2), jnp.uint32), Text(pick(text.reshape(-1, size), at), None)
    words = prefix_keys(none, contents, size, blocks.offset, chain)
    # Sums over all blocks of the line; a prompt's begin after those of the prompts before it.
    before = jnp.where((blocks.start > 0)[:, None], pick(words, blocks.start - 1), np.uint32(0))
    keys = words + pick(root_key(namespace) - before, blocks.owner)
    keys = put(requests.keys, at, keys, blocks.real & pick(good, blocks.owner))
    return requests.replace(text=text, keys=keys)


def _stop_tokens(given: ArrayLike | None, number: int, room: int) -> jax.Array:
    """i32[R, K]; the stop tokens of each entry, padded with -1."""
    if given is None:
        return jnp.full((number, room), -1, jnp.int32)
    stop = integers("stop_tokens", given)
    stop = jnp.broadcast_to(stop, (number, *stop.shape)) if stop.ndim == 1 else stop
    if stop.ndim != 2 or stop.shape[0] != number or stop.shape[1] > room:
        raise ValueError(
            f"stop_tokens: got shape {list(stop.shape)}, wanted at most {room} for each of {number} entries"
        )
    return jnp.pad(stop, ((0, 0), (0, room - stop.shape[1])), constant_values=-1)


def _state_retention(requests: Requests, slots: jax.Array, good: jax.Array, given: Retention | None) -> Requests:
    """Stores what the entries state of their blocks, where `init_serving` was asked for room."""
    if jax.tree.leaves(given) and not jax.tree.leaves(requests.retention):
        raise ValueError("retention: got one, wanted None (init_serving was asked for no ranges)")
    stated = jax.tree.map(
        lambda room: _stated(given, slots.shape[0], room.ranges.shape[1]), requests.retention, is_leaf=is_retention
    )
    return requests.at(slots, good, retention=stated)


def _stated(given: Retention | None, number: int, room: int) -> Retention:
    """The retention of each entry, padded with empty ranges."""
    if given is None:
        given = Retention(np.zeros((number, 0, 4), np.int32), np.tile(Retention.of().decode, (number, 1)))
    ranges, decode = integers("retention.ranges", given.ranges), integers("retention.decode", given.decode)
    if ranges.shape[0] != number or ranges.shape[1] > room or decode.shape != (number, 2):
        raise ValueError(
            f"retention: got ranges {list(ranges.shape)}, wanted at most {room} for each of {number} entries"
        )
    empty = jnp.broadcast_to(np.array([0, 0, UNSTATED, UNSTATED], np.int32), (number, room - ranges.shape[1], 4))
    return Retention(jnp.concatenate([ranges, empty], axis=1), decode)
