# SPDX-License-Identifier: Apache-2.0
"""`submit` checks requests and gives them slots, `cancel` ends requests, and `drain` empties slots."""

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
from kvjax.serving.capacity import max_blocks, sample_blocks
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Finish, Requests, Serving, Stage
from kvjax.serving.sampling import Sampling
from kvjax.serving.speculation_stats import DraftStats
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
    """Submits requests, which then wait in empty slots. A request is refused if it can never run.

    Args:
      serving: the requests and their cache.
      tokens: i32[T]; the prompts, concatenated, with any padding at the end.
      lengths: i32[R]; number of tokens of each prompt.
      max_new_tokens: i32[R]; maximum tokens to generate, unless a stop token comes before.
      scheduler: static; the scheduler of the steps.
      slots: i32[R]; slot of each request, all different. None means the first empty slots.
      priority: i32[R]; higher first.
      namespace: i32[R]; see `Namespaces`.
      seed: u32[R]; seed of each request's random stream.
      sampling: leaves [R], or scalars for all entries. None means greedy.
      stop_tokens: i32[K'] for all, or i32[R, K'], at most K; padded with -1.
      retention: arrays with a leading axis R, at most the `num_ranges` of `init_serving`.
      sample_of: i32[R]; an earlier entry of the batch with the same prompt, to make this entry another sample of it, or
        -1 for none. Both run at the same time and share the computation of the prompt.
      logits_state: a tree of arrays [R, ...]; state that `logits_fn` gets with the first logits of each request.

    Returns:
      The requests; and for each entry i32[R]: its status, its slot (-1 if refused) and the slot's generation. The
      status is the first that applies. BAD_REQUEST: no tokens, negative tokens or more tokens than there are, nothing
      to generate, or a sample with another prompt. The status of the parent, if it was refused. HELD: no slot is empty.
      ROW_FULL: the request does not fit into a row or its slot, or its samples have no rows. NO_BLOCKS: the request and
      its samples do not fit into the cache next to the pinned blocks, even if they run alone and share as many pinned
      blocks as possible. A refused entry takes no slot.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> scheduler = kvjax.serving.Scheduler(chunk=8)
      >>> serving = kvjax.serving.init_serving(kvjax.Cache.create(spec), [20, 20, 20])  # three slots of 20 tokens
      >>> results = kvjax.serving.submit(serving, np.arange(18), [10, 8], [4, 40], scheduler=scheduler)
      >>> serving, status, slots, generations = results
      >>> [kvjax.Status(number) for number in status.tolist()], slots.tolist()  # the second request fits into no slot
      ([Status.OK, Status.ROW_FULL], [0, -1])
    """
    spec = serving.cache.state.spec
    requests = serving.requests
    tokens = integers("tokens", tokens, ("T",))
    lengths = integers("lengths", lengths, ("R",))
    (num_entries,) = lengths.shape
    max_new = each_row("max_new_tokens", max_new_tokens, (num_entries,))
    priority = each_row("priority", priority, (num_entries,))
    namespace = each_row("namespace", namespace, (num_entries,))
    parent = each_row("sample_of", sample_of, (num_entries,))
    flat = _Flat.of(tokens, lengths)
    stop_ids = _stop_tokens(stop_tokens, num_entries, requests.stop.shape[1])
    max_tokens = lengths + jnp.clip(max_new, 0, spec.max_length + 2)  # beyond that it is refused, and must not overflow
    is_bad = (lengths < 1) | (flat.start + lengths > tokens.shape[0]) | (max_new < 1)
    is_bad = is_bad | (namespace < 0) | flat.any(flat.tokens < 0) | _no_sample(flat, namespace, parent)
    samples = parent[None] == np.arange(num_entries, dtype=np.int32)[:, None]
    is_too_long = (max_tokens - 1 > min(spec.max_length, serving.width)) | (jnp.sum(samples, axis=1) >= spec.max_seqs)
    is_too_large = _never_fits(serving.cache.state, scheduler, lengths, max_tokens, samples)
    status, slots = _take_slots(requests, (parent, max_tokens, is_bad, is_too_long, is_too_large), slots)
    is_accepted = status == Status.OK
    zero = jnp.zeros((num_entries,), jnp.int32)
    seed = jnp.broadcast_to(jnp.asarray(seed).astype(jnp.uint32), (num_entries,))
    requests = _write_prompts(requests, slots, is_accepted, flat, namespace, spec.block_size)
    requests = requests.at(
        slots,
        is_accepted,
        stage=int(Stage.WAITING),
        prompt=lengths,
        num_tokens=lengths,
        max_tokens=max_tokens,
        priority=priority,
        arrival=serving.arrivals + rank(is_accepted),
        passed=zero,
        parent=jnp.where(parent >= 0, pick(slots, parent), -1),
        namespace=namespace,
        seed=seed,
        stop=stop_ids,
        onboard=True,
        finish=int(Finish.NONE),
        cached=zero,
        preemptions=zero,
        submitted=zero + serving.steps,
        admitted=zero - 1,
        first_token=zero - 1,
        ended=zero - 1,
    )
    if requests.sampling is not None:
        sampling = Sampling() if sampling is None else sampling
        if requests.sampling.min_p is not None:
            sampling = sampling.with_min_p()
        elif sampling.min_p is not None:
            raise ValueError("sampling.min_p: got a number, wanted None (init_serving had no min_p=True)")
        requests = requests.at(slots, is_accepted, sampling=sampling.each_row(num_entries))
    elif sampling is not None:
        raise ValueError("sampling: got a Sampling, wanted None (init_serving had greedy=True)")
    if requests.logits_state is not None:
        requests = requests.at(slots, is_accepted, logits_state=logits_state)
    if requests.draft_stats is not None:
        requests = requests.at(slots, is_accepted, draft_stats=DraftStats.start(num_entries))
    requests = _write_retention(requests, slots, is_accepted, retention)
    serving = serving.replace(
        requests=requests, arrivals=serving.arrivals + count(is_accepted), dirty=serving.dirty | jnp.any(is_accepted)
    )
    return serving, status, jnp.where(is_accepted, slots, -1), jnp.where(is_accepted, requests[slots].generation, -1)


def cancel(serving: Serving, slots: ArrayLike, generations: ArrayLike) -> tuple[Serving, jax.Array]:
    """Ends requests. A running request keeps its row until the next step begins.

    Args:
      serving: the requests and their cache.
      slots: i32[R]; slots, as `submit` returned them.
      generations: i32[R]; generations, as `submit` returned them.

    Returns:
      The requests; and i32[R], the status of each: BAD_REQUEST if it is over, or its slot has another request by now.
    """
    slots = integers("slots", slots, ("R",))
    requests = serving.requests
    generations = integers("generations", generations, slots.shape)
    is_valid = (slots >= 0) & (slots < requests.size) & (pick(requests.generation, slots) == generations)
    stage = pick(requests.stage, slots)
    is_valid = is_valid & ((stage == Stage.WAITING) | (stage == Stage.RUNNING))
    is_cancelled = is_among(requests.size, slots, is_valid)
    followers = (requests.parent >= 0) & pick(is_cancelled, requests.parent)
    requests = requests.replace(
        stage=jnp.where(is_cancelled, int(Stage.CANCELLED), requests.stage),
        finish=jnp.where(is_cancelled, int(Finish.CANCELLED), requests.finish),
        ended=jnp.where(is_cancelled, serving.steps, requests.ended),
        parent=jnp.where(followers & (requests.stage == Stage.WAITING), -1, requests.parent),
    )
    serving = serving.replace(requests=requests, dirty=serving.dirty | jnp.any(is_cancelled))
    return serving, jnp.where(is_valid, int(Status.OK), int(Status.BAD_REQUEST))


def drain(serving: Serving) -> Serving:
    """Empties the slots of finished requests without a row. Read their `results` first."""
    requests = serving.requests
    is_over = (requests.stage == Stage.DONE) | (requests.stage == Stage.CANCELLED)
    has_row = put(jnp.zeros_like(is_over), serving.row, True, serving.row >= 0)
    is_over = is_over & ~has_row
    stage = jnp.where(is_over, int(Stage.EMPTY), requests.stage)
    generation = requests.generation + is_over.astype(jnp.int32)
    return serving.replace(requests=requests.replace(stage=stage, generation=generation))


class _Flat(NamedTuple):
    """Several lists on a single axis, concatenated."""

    tokens: jax.Array  # i32[T]
    lengths: jax.Array  # i32[R]; lengths of the lists
    start: jax.Array  # i32[R]; index of each list's first entry
    owner: jax.Array  # i32[T]; list of each entry
    offset: jax.Array  # i32[T]; index of each entry in its list
    is_valid: jax.Array  # bool[T]; whether the entry belongs to a list

    @classmethod
    def of(cls, tokens: jax.Array, lengths: jax.Array) -> _Flat:
        ends = jnp.cumsum(jnp.maximum(lengths, 0), dtype=jnp.int32)
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        start = ends - jnp.maximum(lengths, 0)
        return cls(tokens, lengths, start, owner, index - pick(start, owner), owner < lengths.shape[0])

    def any(self, where: jax.Array) -> jax.Array:
        """bool[R]; whether some entry of each list has bool[T] `where`."""
        return is_among(self.start.shape[0], self.owner, where & self.is_valid)


def _no_sample(flat: _Flat, namespace: jax.Array, parent: jax.Array) -> jax.Array:
    """bool[R]; entries with a `sample_of` of a missing entry, or of an entry with another prompt."""
    leader = jnp.maximum(parent, 0)
    is_same = pick(flat.tokens, pick(flat.start, pick(leader, flat.owner)) + flat.offset) == flat.tokens
    is_alike = (pick(flat.lengths, leader) == flat.lengths) & (pick(namespace, leader) == namespace)
    is_alike = is_alike & ~flat.any(~is_same)
    is_leader = (pick(parent, leader) < 0) & (parent < np.arange(parent.shape[0], dtype=np.int32))
    return (parent >= 0) & ~(is_alike & is_leader)


def _never_fits(
    state: CacheState, scheduler: Scheduler, prompt: jax.Array, max_tokens: jax.Array, samples: jax.Array
) -> jax.Array:
    """bool[R]; requests that need, with samples bool[R, R], more blocks than a group has besides pinned blocks."""
    fits = jnp.ones(max_tokens.shape, jnp.bool_)
    request_blocks = max_blocks(state.spec, scheduler, max_tokens)
    added_blocks = sample_blocks(state.spec, scheduler, max_tokens, prompt, samples)
    groups = zip(state.groups, state.spec.groups, request_blocks, added_blocks, strict=True)
    for group, spec, num_blocks, num_added in groups:
        table = group.table.reshape(-1)
        refcount = group.blocks.refcount
        is_in_row = is_among(refcount.shape[0], table, table >= 0)
        pinned = count((refcount > 0) & ~is_in_row & group.on_device(group.ids))
        # Pinned blocks may be its prefix: at most its whole blocks, if the group keeps shared blocks.
        shared = jnp.minimum(pinned, prompt // state.spec.block_size) if spec.kind is Kind.FULL else 0
        fits = fits & (num_blocks + num_added <= group.num_blocks - pinned + shared)
    return ~fits


def _take_slots(
    requests: Requests, entries: tuple[jax.Array, ...], slots: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """The status and slot of each entry, both i32[R]. Entries take the given slots, or the first empty slots."""
    num_entries = entries[0].shape[0]
    is_empty = requests.stage == Stage.EMPTY
    if slots is None:
        free, _ = compact(jnp.where(is_empty, np.arange(requests.size, dtype=np.int32), -1))
    else:
        free = integers("slots", slots, (num_entries,))
        free = jnp.where((free >= 0) & (free < requests.size) & pick(is_empty, free), free, -1)

    def take(carry, entry):
        num_taken, statuses, taken = carry
        parent, max_tokens, is_bad, is_too_long, is_too_large = pick(entries, entry)
        index = num_taken if slots is None else entry
        slot = jnp.where(index < free.shape[0], pick(free, index), -1)
        status = first_failure(
            (is_bad, Status.BAD_REQUEST),
            (slot < 0, Status.HELD),
            (is_too_long | (max_tokens > requests[slot].capacity), Status.ROW_FULL),
            (is_too_large, Status.NO_BLOCKS),
        )
        parent_status = jnp.where((parent >= 0) & ~is_bad, pick(statuses, parent), int(Status.OK))
        status = jnp.where(parent_status == Status.OK, status, parent_status)
        is_accepted = status == Status.OK
        statuses, taken = put((statuses, taken), entry, (status, jnp.where(is_accepted, slot, -1)), jnp.bool_(True))
        return (num_taken + is_accepted.astype(jnp.int32), statuses, taken), None

    start = jnp.int32(0), jnp.full((num_entries,), int(Status.OK), jnp.int32), jnp.full((num_entries,), -1, jnp.int32)
    (_, statuses, taken), _ = scan(take, varying(entries)(start), jnp.arange(num_entries, dtype=jnp.int32))
    return statuses, taken


def _write_prompts(
    requests: Requests, slots: jax.Array, is_accepted: jax.Array, flat: _Flat, namespace: jax.Array, block_size: int
) -> Requests:
    """Stores prompts, and the keys of their whole blocks."""
    start = requests[slots].start
    where = flat.is_valid & pick(is_accepted, flat.owner)
    text = put(requests.text, pick(start, flat.owner) + flat.offset, flat.tokens, where)
    blocks = _Flat.of(jnp.zeros((max(flat.tokens.shape[0] // block_size, 1),), jnp.int32), flat.lengths // block_size)
    columns = pick(start, blocks.owner) // block_size + blocks.offset
    no_keys = jnp.zeros((1, 2), jnp.uint32)
    contents = Text(pick(text.reshape(-1, block_size), columns), None)
    words = prefix_keys(no_keys, contents, block_size, blocks.offset, chain)
    # The words are sums over all blocks of the batch, so the sum over earlier prompts is subtracted.
    keys_before = jnp.where((blocks.start > 0)[:, None], pick(words, blocks.start - 1), np.uint32(0))
    keys = words + pick(root_key(namespace) - keys_before, blocks.owner)
    keys = put(requests.keys, columns, keys, blocks.is_valid & pick(is_accepted, blocks.owner))
    return requests.replace(text=text, keys=keys)


def _stop_tokens(stop_tokens: ArrayLike | None, num_entries: int, max_stop_tokens: int) -> jax.Array:
    """i32[R, K]; stop tokens of each entry, padded with -1."""
    if stop_tokens is None:
        return jnp.full((num_entries, max_stop_tokens), -1, jnp.int32)
    stop = integers("stop_tokens", stop_tokens)
    stop = jnp.broadcast_to(stop, (num_entries, *stop.shape)) if stop.ndim == 1 else stop
    if stop.ndim != 2 or stop.shape[0] != num_entries or stop.shape[1] > max_stop_tokens:
        raise ValueError(
            f"stop_tokens: got shape {list(stop.shape)}, wanted at most {max_stop_tokens} for each of "
            f"{num_entries} entries"
        )
    return jnp.pad(stop, ((0, 0), (0, max_stop_tokens - stop.shape[1])), constant_values=-1)


def _write_retention(requests: Requests, slots: jax.Array, is_accepted: jax.Array, new: Retention | None) -> Requests:
    """Stores the retention of the entries, padded with empty ranges."""
    stored = requests.retention
    num_entries = slots.shape[0]
    if stored is None:
        if new is not None:
            raise ValueError("retention: got a Retention, wanted None (init_serving had no num_ranges)")
        return requests
    if new is None:
        new = Retention(np.zeros((num_entries, 0, 4), np.int32), np.tile(Retention.of().decode, (num_entries, 1)))
    ranges = integers("retention.ranges", new.ranges)
    decode = integers("retention.decode", new.decode)
    max_ranges = stored.ranges.shape[1]
    if ranges.shape[0] != num_entries or ranges.shape[1] > max_ranges or decode.shape != (num_entries, 2):
        raise ValueError(
            f"retention: got ranges {list(ranges.shape)}, wanted at most {max_ranges} for each of {num_entries} entries"
        )
    num_empty = max_ranges - ranges.shape[1]
    empty = jnp.broadcast_to(np.array([0, 0, UNSTATED, UNSTATED], np.int32), (num_entries, num_empty, 4))
    return requests.at(slots, is_accepted, retention=Retention(jnp.concatenate([ranges, empty], axis=1), decode))
