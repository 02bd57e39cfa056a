# SPDX-License-Identifier: Apache-2.0
"""Requests as data: prompts, options and progress, and the row of the cache for each request.

    slot  stage    tokens                                row
    0     RUNNING  p p p p p p p g g  .  .               2     9 of at most 11 tokens: decode
    1     RUNNING  p p p p p p p p p  .  .               0     nothing committed yet: prefill
    2     WAITING  p p p p  .  .                         -
    3     EMPTY    .  .  .  .  .  .                      -

A request has no phase. Its row has `num_tokens - committed` pending tokens: a single pending token means decode, and
more mean prefill. When `committed` reaches `num_tokens`, the row chooses a token, and `num_tokens` grows. The same rule
covers a preempted request that returns, perhaps with its computed tokens still in the cache.

Source: vLLM v1's scheduler, which knows no phases either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, pick, put, runs
from kvjax.cache import AnyCache, Cache
from kvjax.checks import static_int
from kvjax.events.records import Named
from kvjax.policies.retention import Retention
from kvjax.pools.host import HostPools
from kvjax.serving.sampling import Sampling
from kvjax.serving.speculation_stats import DraftStats


class Stage(Named):
    """The stage of a request. EMPTY means the slot is free."""

    EMPTY = 0
    WAITING = 1
    RUNNING = 2
    DONE = 3
    CANCELLED = 4


class Finish(Named):
    """The reason for which a request ended.

    Example:
      >>> [kvjax.serving.Finish(number).name for number in (1, 2)]  # numbers in Rollout.finish
      ['STOP', 'LENGTH']
    """

    NONE = 0
    STOP = 1
    LENGTH = 2
    NO_BLOCKS = 3
    CANCELLED = 4
    ROW_FULL = 5
    BAD_REQUEST = 6


def finish_of(finish: int) -> str | None:
    """The `finish` of an `Output`, from a number of `Finish`."""
    return None if finish == Finish.NONE else Finish(finish).name.lower()


class Requests(Pytree):
    """W slots for requests. A slot and its generation identify a request, so a late cancel never hits the next request.

    `requests[slots]` has the fields of some requests. Each field is gathered when you read it.

    Attributes:
      text: i32[F]; tokens of all requests. Each request has its prompt from `start` on, then its generated tokens.
      logprobs: f32[F]; log-probabilities of the generated tokens.
      top: i32[F, T] and f32[F, T]; the likeliest tokens at each position, and their log-probabilities. None disables
        them.
      keys: u32[F / P, 2]; keys of the whole blocks of prompts (`blocks/keys.py`).
      start: i32[W]; index of the request's first token, a multiple of P.
      capacity: i32[W]; number of tokens with space in `text`.
      generation, namespace, preemptions: i32[W].
      stage: i32[W]; a `Stage`.
      prompt: i32[W]; number of prompt tokens.
      num_tokens: i32[W]; number of tokens so far, including the prompt.
      max_tokens: i32[W]; number of tokens at which it ends. The last token is chosen, but never written into the cache.
      priority: i32[W]; higher first.
      arrival: i32[W]; position in the order of submission.
      passed: i32[W]; number of later requests admitted while this request waited.
      parent: i32[W]; slot of the request whose prompt this request samples too, until the prompt is computed; or -1.
      seed: u32[W].
      sampling: leaves [W]. None means all requests are greedy.
      stop: i32[W, K]; tokens ending the request, padded with -1.
      retention: leaves [W, ...]. None means no request has a retention.
      logits_state: a tree of arrays [W, ...]; state of `logits_fn` for each request. None means it has no state.
      onboard: bool[W]; whether blocks on the host are brought back before the request is admitted.
      finish: i32[W]; a `Finish`.
      cached: i32[W]; number of tokens found in the cache when the request was first admitted.
      draft_stats: leaves [W]; counts of each request's drafts. None without a drafter.
      submitted, admitted, first_token, ended: i32[W]; number of model steps before the event; -1 if it has not
        happened.
    """

    text: jax.Array
    logprobs: jax.Array
    top: tuple[jax.Array, jax.Array] | None
    keys: jax.Array
    start: jax.Array
    capacity: jax.Array
    generation: jax.Array
    stage: jax.Array
    prompt: jax.Array
    num_tokens: jax.Array
    max_tokens: jax.Array
    priority: jax.Array
    arrival: jax.Array
    passed: jax.Array
    parent: jax.Array
    namespace: jax.Array
    seed: jax.Array
    sampling: Sampling | None
    stop: jax.Array
    retention: Retention | None
    onboard: jax.Array
    finish: jax.Array
    cached: jax.Array
    preemptions: jax.Array
    submitted: jax.Array
    admitted: jax.Array
    first_token: jax.Array
    ended: jax.Array
    logits_state: Any = None
    draft_stats: DraftStats | None = None

    @property
    def size(self) -> int:
        """W."""
        return self.stage.shape[0]

    @property
    def num_top(self) -> int:
        """T; 0 if log-probabilities of the likeliest tokens are not noted."""
        return 0 if self.top is None else self.top[0].shape[1]

    @property
    def waiting(self) -> jax.Array:
        """bool[W]; requests waiting for a row, except samples waiting for their prompt."""
        return (self.stage == Stage.WAITING) & (self.parent < 0)

    def samples_of(self, slot: jax.Array) -> jax.Array:
        """bool[W]; requests waiting for the prompt of request slot i32[]."""
        return (self.parent == slot) & (self.stage == Stage.WAITING)

    def __getitem__(self, slots: jax.Array) -> Requests:
        """The fields [W, ...] of the requests in slots i32[...]. An index out of range reads an arbitrary request."""
        return cast(Any, _Gathered(self, slots))

    def tokens(self, slots: jax.Array, first: jax.Array, width: int) -> jax.Array:
        """i32[R, width]; tokens of requests slots i32[R] from token first i32[R] on; arbitrary beyond their end."""
        return pick(self.text, runs(self[slots].start + first, width))

    def at(self, slots: jax.Array, where: jax.Array, **values: Any) -> Requests:
        """Sets values of distinct requests slots i32[R] where bool[R]; or of a request slot i32[] where bool[]."""
        slots = jnp.reshape(slots, -1)
        where = jnp.reshape(where, -1)
        return self.replace(**{name: put(getattr(self, name), slots, new, where) for name, new in values.items()})

    def without_parent(self, slot: jax.Array, where: jax.Array) -> Requests:
        """Makes the samples of request slot i32[] independent requests, where bool[]."""
        return self.replace(parent=jnp.where((self.parent == slot) & (slot >= 0) & where, -1, self.parent))


class _Gathered:
    """Requests in some slots. Unread fields are not traced."""

    def __init__(self, requests: Requests, slots: jax.Array):
        self._requests = requests
        self._slots = slots

    def __getattr__(self, name: str) -> Any:
        return pick(getattr(self._requests, name), self._slots)


class Serving(Pytree, static=("width", "logprobs")):
    """Requests and the cache whose rows they run in: all data changed by a step of the scheduler.

    Attributes:
      cache: the cache. Rows in use without a request here are left alone.
      requests: the requests.
      row: i32[S]; slot of each row's request; -1 for no request.
      leads: bool[S]; rows for whose prompts samples wait in other rows.
      steps: i32[]; steps of the model so far.
      arrivals: i32[]; requests submitted so far.
      dirty: bool[]; whether something has changed since no more requests could be admitted.
      skipped_steps: i32[S]; mixed steps since each row's last chunk, in which it had tokens for a chunk.
      out_of_blocks: bool[S]; rows without a block for their chunk in the last mixed step.
      refused: i32[]; number of steps whose blocks were refused in the last step in spite of the count, 1 for a chunk;
        or 0.
      chunks_deferred: i32[]; blocks of steps for which chunks have waited for more chunks.
      onboard_slot: i32[]; slot of the request whose blocks on the host are brought back between loops; or -1.
      kept_rows: i32[W]; rows kept by finished requests, or -1. None releases all rows.
      host_pools: the host's pools, for steps that move blocks themselves. None means steps move nothing.
      width: static; maximum tokens of a request when it is admitted.
      logprobs: static; "raw" or "sampling", the distribution of the log-probabilities (`sample`).
    """

    cache: Cache
    requests: Requests
    row: jax.Array
    leads: jax.Array
    steps: jax.Array
    arrivals: jax.Array
    dirty: jax.Array
    skipped_steps: jax.Array
    out_of_blocks: jax.Array
    refused: jax.Array
    chunks_deferred: jax.Array
    onboard_slot: jax.Array
    width: int
    logprobs: str = "raw"
    kept_rows: jax.Array | None = None
    host_pools: HostPools | None = None

    @property
    def by_row(self) -> Requests:
        """The requests of the rows, fields [S, ...]; an arbitrary request for a row without a request."""
        return self.requests[self.row]

    def with_logits_state(self, state: Any) -> Serving:
        """Sets the state of `logits_fn` for each row, a tree of arrays [S, ...]."""
        if state is None:
            return self
        return self.replace(requests=self.requests.at(self.row, self.row >= 0, logits_state=state))

    @property
    def free(self) -> jax.Array:
        """bool[S]; rows free for a request. Rows in use without a request here belong to other code."""
        return (self.row < 0) & (self.cache.state.seqs.length == 0)

    @property
    def running(self) -> jax.Array:
        """bool[S]; rows whose request runs."""
        return (self.row >= 0) & (self.by_row.stage == Stage.RUNNING)

    @property
    def finished(self) -> jax.Array:
        """bool[S]; rows whose request is over."""
        return (self.row >= 0) & ~self.running

    @property
    def num_pending(self) -> jax.Array:
        """i32[S]; number of tokens still to compute in each row, 0 if it waits for its parent or is swapped out."""
        request = self.by_row
        seqs = self.cache.state.seqs
        computes = self.running & (request.parent < 0) & ~seqs.swapped_out
        return jnp.where(computes, request.num_tokens - seqs.committed, 0)

    @property
    def decoding(self) -> jax.Array:
        """bool[S]; rows with a single pending token, for whose prompt no samples wait."""
        return (self.num_pending == 1) & ~self.leads

    @property
    def prefilling(self) -> jax.Array:
        """bool[S]; rows whose pending tokens are computed in chunks."""
        pending = self.num_pending
        return (pending > 0) & ~((pending == 1) & ~self.leads)

    @property
    def busy(self) -> jax.Array:
        """bool[]; whether a step would do something: a request has a row, or a request waits and a row is free."""
        waits = jnp.any(self.requests.stage == Stage.WAITING)
        return jnp.any(self.row >= 0) | (waits & jnp.any(self.free))


def init_serving(
    cache: AnyCache,
    max_tokens: Sequence[int],
    *,
    capacity: int | None = None,
    width: int | None = None,
    num_stop_tokens: int = 1,
    num_ranges: int | None = None,
    greedy: bool = False,
    min_p: bool = False,
    top_logprobs: int = 0,
    logprobs: str = "raw",
    logits_state: Any = None,
    speculates: bool = False,
) -> Serving:
    """Makes empty slots for requests, W = len(max_tokens), over a cache.

    Args:
      cache: the cache. Rows in use are left alone. With a `TieredCache`, whose spec has backups, the program of a step
        also moves blocks between the tiers, and `serving.host_pools` has the host's pools afterwards.
      max_tokens: maximum tokens of a request in each slot, including generated tokens.
      capacity: F, to reserve more than the slots need, so few shapes are compiled.
      width: maximum tokens of a request when it is admitted, including generated tokens of a preempted request. The
        cost of an admission follows it. None means the size of the largest slot.
      num_stop_tokens: K.
      num_ranges: maximum ranges of a request's retention. None means no request has a retention.
      greedy: whether all requests are greedy, so only this case is compiled.
      min_p: whether a request may have a `Sampling.min_p`; otherwise programs contain nothing for it.
      top_logprobs: T; see `RunOptions`.
      logprobs: static; see `RunOptions`.
      logits_state: a tree of arrays [W, ...]; initial state of `logits_fn` for each request.
      speculates: whether the steps have a `drafter`; then the requests have counts of their drafts.
    """
    block_size = cache.state.spec.block_size
    rows = cache.state.spec.max_seqs
    slot_tokens = [static_int("max_tokens", limit, 0) for limit in max_tokens]
    capacities: Any = np.array([-(-limit // block_size) * block_size for limit in slot_tokens], np.int32)
    total = int(capacities.sum())
    if capacity is not None and (capacity < total or capacity % block_size):
        raise ValueError(f"capacity: got {capacity}, wanted a multiple of {block_size}, at least {total}")
    total = max(capacity or total, block_size)

    default = None if greedy else Sampling(min_p=0.0 if min_p else None)
    num_top = static_int("top_logprobs", top_logprobs, 0)
    requests = _empty_requests(capacities, total, block_size, num_stop_tokens, num_ranges, default, num_top)
    state = {
        "requests": requests.replace(
            logits_state=logits_state, draft_stats=DraftStats.start(len(slot_tokens)) if speculates else None
        ),
        "row": np.full(rows, -1, np.int32),
        "leads": np.zeros(rows, np.bool_),
        "steps": np.zeros((), np.int32),
        "arrivals": np.zeros((), np.int32),
        "dirty": np.zeros((), np.bool_),
        "skipped_steps": np.zeros(rows, np.int32),
        "out_of_blocks": np.zeros(rows, np.bool_),
        "refused": np.zeros((), np.int32),
        "chunks_deferred": np.zeros((), np.int32),
        "onboard_slot": np.full((), -1, np.int32),
    }
    largest = min(int(capacities.max(initial=1)), cache.state.spec.max_length)
    width = largest if width is None else static_int("width", width, 1)
    state = jax.device_put(state)
    return Serving(cache=cache.cache, width=width, logprobs=logprobs, host_pools=_host_pools(cache), **state)


def _host_pools(cache: AnyCache) -> HostPools | None:
    """The host's pools of a cache, for a program that moves blocks. None without a host tier."""
    if not isinstance(cache, Cache) and not cache.state.spec.backups:
        raise ValueError("cache: got a TieredCache without backups, wanted a Cache or make_spec(backups=True)")
    return cache.host


def _empty_requests(
    capacities: Any,
    text_size: int,
    block_size: int,
    num_stop_tokens: int,
    num_ranges: int | None,
    sampling: Sampling | None,
    num_top: int,
) -> Requests:
    """Makes empty slots with these capacities i32[W], in numpy: `init_serving` moves all arrays to the device together.

    `sampling` is the default of each request.
    """
    num_slots = len(capacities)

    def full(shape: tuple[int, ...] = (num_slots,), value: Any = 0, dtype: Any = np.int32) -> Any:
        return np.full(shape, value, dtype)

    top = retention = None
    if num_top:
        top = full((text_size, num_top)), full((text_size, num_top), dtype=np.float32)
    if num_ranges is not None:
        retention = Retention(full((num_slots, num_ranges, 4)), full((num_slots, 2)))
    return Requests(
        text=full((text_size,)),
        logprobs=full((text_size,), dtype=np.float32),
        top=top,
        keys=full((text_size // block_size, 2), dtype=np.uint32),
        start=np.cumsum(capacities, dtype=np.int32) - capacities,
        capacity=capacities,
        generation=full(),
        stage=full(value=int(Stage.EMPTY)),
        prompt=full(),
        num_tokens=full(),
        max_tokens=full(),
        priority=full(),
        arrival=full(),
        passed=full(),
        parent=full(value=-1),
        namespace=full(),
        seed=full(dtype=np.uint32),
        sampling=jax.tree.map(lambda leaf: full(value=leaf, dtype=leaf.dtype), sampling),
        stop=full((num_slots, num_stop_tokens), -1),
        retention=retention,
        onboard=full(value=True, dtype=np.bool_),
        finish=full(),
        cached=full(),
        preemptions=full(),
        submitted=full(),
        admitted=full(value=-1),
        first_token=full(value=-1),
        ended=full(value=-1),
    )


@dataclasses.dataclass
class Output:
    """The result of a prompt.

    Attributes:
      tokens: generated tokens, including the stop token.
      logprobs: log-probabilities of `tokens`; see `RunOptions`.
      versions: for each token, the number of updates of the engine's weights before it was chosen; empty in `results`.
      mixed: whether it went on over K/V of older weights after an update (`Engine.update`).
      top_logprobs: for each token, the likeliest tokens in order with their log-probabilities; empty unless requested.
      prompt_tokens: number of prompt tokens.
      prompt_logprobs: log-probability of each prompt token from `Request.prompt_logprobs_from` on, from the raw logits;
        None for the first token of a prompt.
      prompt_ranks: ranks of these prompt tokens among all tokens, 1 for the likeliest; None for the first token.
      prompt_top_logprobs: likeliest tokens at these positions, as in `top_logprobs`; None for the first token.
      cached_tokens: number of prompt tokens found in the cache, and not computed, when the prompt was first admitted.
      stored_tokens: number of cached tokens from the store in this generation.
      preemptions: number of times it gave its row up and waited again.
      drafted_tokens: number of drafts that a pass verified; 0 without a drafter.
      accepted_tokens: number of verified drafts that are in `tokens`, each of which saved a step.
      replica: number of its replica. None without replicas.
      finish: "stop" (a stop token), "length" (all `max_new_tokens`), "row_full", "no_blocks", "cancelled" or
        "bad_request". None while it runs, or if the generation was interrupted.
      reason: for "no_blocks", the group that lacks blocks, with the blocks wanted and there. None for any other finish.
    """

    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    stored_tokens: int = 0
    finish: str | None = None
    preemptions: int = 0
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    replica: int | None = None
    prompt_logprobs: list[float | None] = dataclasses.field(default_factory=list)
    prompt_ranks: list[int | None] = dataclasses.field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float] | None] = dataclasses.field(default_factory=list)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    versions: list[int] = dataclasses.field(default_factory=list)
    mixed: bool = False
    reason: str | None = dataclasses.field(default=None, compare=False)  # depends on the other requests of a run

    def add(
        self, tokens: list[int], logprobs: list[float], top_tokens: Sequence = (), top_logprobs: Sequence = ()
    ) -> None:
        """Adds new tokens, and for each the likeliest tokens at its position, if these are noted."""
        self.tokens += tokens
        self.logprobs += logprobs
        likeliest = zip(top_tokens, top_logprobs, strict=True)
        self.top_logprobs += [dict(zip(*columns, strict=True)) for columns in likeliest]

    def forget_scores(self) -> None:
        """Forgets the log-probabilities of the prompt, to compute them again."""
        self.prompt_logprobs = []
        self.prompt_ranks = []
        self.prompt_top_logprobs = []


def results(serving: Serving) -> dict[tuple[int, int], Output]:
    """The output of each request so far, by (slot, generation), on the host."""
    requests: Any = jax.device_get(serving.requests)
    outputs = {}
    for slot in np.flatnonzero(requests.stage != Stage.EMPTY).tolist():
        start = int(requests.start[slot])
        prompt = int(requests.prompt[slot])
        new = slice(start + prompt, start + int(requests.num_tokens[slot]))
        output = Output(
            prompt,
            cached_tokens=int(requests.cached[slot]),
            preemptions=int(requests.preemptions[slot]),
            finish=finish_of(requests.finish[slot]),
        )
        if (stats := requests.draft_stats) is not None:
            output.drafted_tokens = int(stats.drafted[slot])
            output.accepted_tokens = int(stats.accepted[slot])
        top = [] if requests.top is None else [column[new].tolist() for column in requests.top]
        output.add(requests.text[new].tolist(), requests.logprobs[new].tolist(), *top)
        outputs[slot, int(requests.generation[slot])] = output
    return outputs
