# SPDX-License-Identifier: Apache-2.0
"""Requests as data: prompts, options and progress, and the row of the cache that each one has.

    slot  stage    tokens                                row
    0     RUNNING  p p p p p p p g g  .  .               2     9 of at most 11 tokens: decode
    1     RUNNING  p p p p p p p p p  .  .               0     nothing committed yet: prefill
    2     WAITING  p p p p  .  .                         -
    3     EMPTY    .  .  .  .  .  .                      -

A request has no phase. Its row has `num_tokens - committed` pending tokens: one is decode, more is prefill. When
`committed` reaches `num_tokens`, the row chooses a token, and `num_tokens` grows. A preempted request that comes back,
its computed tokens perhaps still in the cache, is the same case.

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
from kvjax.cache import Cache
from kvjax.checks import static_int
from kvjax.events.records import Named
from kvjax.policies.retention import Retention
from kvjax.serving.sampling import Sampling


class Stage(Named):
    """The stage of a request; EMPTY: the slot is free."""

    EMPTY = 0
    WAITING = 1
    RUNNING = 2
    DONE = 3
    CANCELLED = 4


class Finish(Named):
    """Why a request ended.

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


def finish_of(number: int) -> str | None:
    """The `finish` of an `Output`, of a number of `Finish`."""
    return None if number == Finish.NONE else Finish(number).name.lower()


class Requests(Pytree):
    """W slots for requests. A slot and its generation name a request: a late cancel never hits the slot's next one.

    `requests[slots]` has the fields of some, each gathered where it is read.

    Attributes:
      text: i32[F]; the tokens of all requests, each from its `start` on: its prompt, then what was generated.
      logprobs: f32[F]; of the tokens that were generated.
      top: i32[F, T] and f32[F, T]; the likeliest tokens instead of each, and their log-probabilities; or None.
      keys: u32[F / P, 2]; of the whole blocks of prompts (`blocks/keys.py`).
      start: i32[W]; the index of its first token, a multiple of P.
      capacity: i32[W]; how many tokens fit there.
      generation, namespace, preemptions: i32[W].
      stage: i32[W]; `Stage`.
      prompt: i32[W]; tokens of the prompt.
      num_tokens: i32[W]; tokens so far, those of the prompt included.
      max_tokens: i32[W]; tokens at which it ends. The last one is chosen and never written into the cache.
      priority: i32[W]; higher first.
      arrival: i32[W]; a number in order of submission.
      passed: i32[W]; later requests that were admitted while this one waited.
      parent: i32[W]; slot of the request whose prompt this one is another sample of, until that is computed; or -1.
      seed: u32[W].
      sampling: of each, [W]; None: all are greedy.
      stop: i32[W, K]; tokens that end it; -1 is none.
      retention: of each, [W, ...]; None if none may have one.
      logits_state: a tree of arrays [W, ...]; what `logits_fn` keeps of each; None: nothing.
      onboard: bool[W]; whether its blocks on the host, if there are any, are brought back before it is admitted.
      finish: i32[W]; `Finish`.
      cached: i32[W]; tokens that were found in the cache when it was first admitted.
      submitted, admitted, first_token, ended: i32[W]; steps of the model that had been run then; -1 before.
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

    @property
    def size(self) -> int:
        """W."""
        return self.stage.shape[0]

    @property
    def num_top(self) -> int:
        """T; 0 if no log-probabilities of others are noted."""
        return 0 if self.top is None else self.top[0].shape[1]

    @property
    def waiting(self) -> jax.Array:
        """bool[W]; requests that wait for a row of their own."""
        return (self.stage == Stage.WAITING) & (self.parent < 0)

    def samples_of(self, slot: jax.Array) -> jax.Array:
        """bool[W]; requests that wait for the prompt of request slot i32[]."""
        return (self.parent == slot) & (self.stage == Stage.WAITING)

    def __getitem__(self, slots: jax.Array) -> Requests:
        """The fields [W, ...] of the requests in slots i32[...]; an index out of range reads some request."""
        return cast(Any, _Gathered(self, slots))

    def tokens(self, slots: jax.Array, first: jax.Array, width: int) -> jax.Array:
        """i32[R, width]; tokens of requests slots i32[R] from token first i32[R] on; anything beyond their end."""
        return pick(self.text, runs(self[slots].start + first, width))

    def at(self, slots: jax.Array, where: jax.Array, **values: Any) -> Requests:
        """These, with new values for requests slots i32[R], all different, where bool[R]; or i32[], where bool[]."""
        slots, where = jnp.reshape(slots, -1), jnp.reshape(where, -1)
        return self.replace(**{name: put(getattr(self, name), slots, new, where) for name, new in values.items()})

    def without_parent(self, slot: jax.Array, where: jax.Array) -> Requests:
        """These, where bool[]: the samples of request slot i32[] are requests like any other."""
        return self.replace(parent=jnp.where((self.parent == slot) & (slot >= 0) & where, -1, self.parent))


class _Gathered:
    """Requests in some slots; a field that is not read is not traced."""

    def __init__(self, requests: Requests, slots: jax.Array):
        self._requests, self._slots = requests, slots

    def __getattr__(self, name: str) -> Any:
        return pick(getattr(self._requests, name), self._slots)


class Serving(Pytree, static=("width", "logprobs")):
    """Requests and the cache whose rows they run in: all that a step of the scheduler changes.

    Attributes:
      cache: rows in use that have no request here are left alone.
      requests: what is to be done.
      row: i32[S]; the slot of each row's request; -1: none.
      leads: bool[S]; rows for whose prompts samples wait in other rows.
      steps, arrivals: i32[]; steps of the model so far, and requests.
      dirty: bool[]; whether something has happened since nobody more could be admitted.
      skipped_steps: i32[S]; mixed steps since each row last got a chunk, in which it had tokens for one.
      out_of_blocks: bool[S]; rows that found no block for their chunk in the last mixed step.
      refused: i32[]; steps for which blocks, though counted, could not be had in the last step, 1 for a chunk; or 0.
      chunks_deferred: i32[]; blocks of steps for which chunks have waited for others.
      onboard_slot: i32[]; slot of the request whose blocks on the host are to be brought back, between loops; or -1.
      held: i32[W]; rows that requests hold when they are done, as the caller wanted; -1: none. None: all are released.
      width: static; the most tokens that a request has when it is admitted.
      logprobs: static; "raw" or "sampling": what the log-probabilities of chosen tokens are of (`sample`).
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
    held: jax.Array | None = None

    @property
    def by_row(self) -> Requests:
        """The requests of the rows, fields [S, ...]; anything for a row without one."""
        return self.requests[self.row]

    def with_logits_state(self, state: Any) -> Serving:
        """These, with what `logits_fn` keeps of each row, a tree of arrays [S, ...]."""
        if state is None:
            return self
        return self.replace(requests=self.requests.at(self.row, self.row >= 0, logits_state=state))

    @property
    def free(self) -> jax.Array:
        """bool[S]; rows that a request can have; those in use without a request here are somebody else's."""
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
        """i32[S]; tokens that each row has yet to compute; 0 where it waits for its parent, or is swapped out."""
        request, seqs = self.by_row, self.cache.state.seqs
        computes = self.running & (request.parent < 0) & ~seqs.swapped_out
        return jnp.where(computes, request.num_tokens - seqs.committed, 0)

    @property
    def decoding(self) -> jax.Array:
        """bool[S]; rows with one pending token, and whose prompt no samples wait for."""
        return (self.num_pending == 1) & ~self.leads

    @property
    def prefilling(self) -> jax.Array:
        """bool[S]; rows whose pending tokens are computed in chunks."""
        pending = self.num_pending
        return (pending > 0) & ~((pending == 1) & ~self.leads)

    @property
    def busy(self) -> jax.Array:
        """bool[]; whether a step would do something: a request has a row, or waits and there is a row to have."""
        waits = jnp.any(self.requests.stage == Stage.WAITING)
        return jnp.any(self.row >= 0) | (waits & jnp.any(self.free))


def init_serving(
    cache: Cache,
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
) -> Serving:
    """Empty slots for requests, W = len(max_tokens), over a cache.

    Args:
      cache: rows in use already are left alone.
      max_tokens: for each slot, how many tokens a request may have, generated ones included.
      capacity: F, if more than the slots take together, so that few shapes are compiled.
      width: the most tokens that a request has when it is admitted, generated ones of a preempted one included; the
        cost of an admission follows it. None: that of the largest slot.
      num_stop_tokens: K.
      num_ranges: of each request's retention; None: no request has one.
      greedy: whether no request samples; then nothing else is compiled.
      min_p: whether a request may have a `Sampling.min_p`; else programs have nothing for it.
      top_logprobs: T; see `RunOptions`.
      logprobs: static; see `RunOptions`.
      logits_state: a tree of arrays [W, ...]; what a `logits_fn` keeps of each request, in any empty slot at first.
    """
    size, rows, num = cache.state.spec.block_size, cache.state.spec.max_seqs, len(max_tokens)
    tokens = [static_int("max_tokens", one, 0) for one in max_tokens]
    capacities: Any = np.array([-(-one // size) * size for one in tokens], np.int32)
    total, starts = int(capacities.sum()), np.cumsum(capacities, dtype=np.int32) - capacities
    if capacity is not None and (capacity < total or capacity % size):
        raise ValueError(f"capacity: got {capacity}, wanted a multiple of {size}, at least {total}")
    total = max(capacity or total, size)

    def full(shape: tuple[int, ...] = (num,), value: Any = 0, dtype: Any = np.int32) -> Any:
        """An array of the host, each a new one: all are moved at once, without a program for each, and donated."""
        return np.full(shape, value, dtype)

    top = retention = None
    if static_int("top_logprobs", top_logprobs, 0):
        top = full((total, top_logprobs)), full((total, top_logprobs), dtype=np.float32)
    if num_ranges is not None:
        retention = Retention(full((num, num_ranges, 4)), full((num, 2)))
    default = Sampling(min_p=0.0 if min_p else None)
    sampling = None if greedy else jax.tree.map(lambda leaf: full(value=leaf, dtype=leaf.dtype), default)
    requests = Requests(
        text=full((total,)), logprobs=full((total,), dtype=np.float32), top=top,
        keys=full((total // size, 2), dtype=np.uint32), start=starts, capacity=capacities, generation=full(),
        stage=full(value=int(Stage.EMPTY)), prompt=full(), num_tokens=full(), max_tokens=full(), priority=full(),
        arrival=full(), passed=full(), parent=full(value=-1), namespace=full(), seed=full(dtype=np.uint32),
        sampling=sampling, stop=full((num, num_stop_tokens), -1), retention=retention,
        onboard=full(value=True, dtype=np.bool_), finish=full(), cached=full(), preemptions=full(), submitted=full(),
        admitted=full(value=-1), first_token=full(value=-1), ended=full(value=-1), logits_state=logits_state,
    )  # fmt: skip
    state = {
        "requests": requests, "row": full((rows,), -1), "leads": full((rows,), False, np.bool_), "steps": full(()),
        "arrivals": full(()), "dirty": full((), False, np.bool_), "skipped_steps": full((rows,)),
        "out_of_blocks": full((rows,), False, np.bool_), "refused": full(()), "chunks_deferred": full(()),
        "onboard_slot": full((), -1),
    }  # fmt: skip
    largest = min(int(capacities.max(initial=1)), cache.state.spec.max_length)
    width = largest if width is None else static_int("width", width, 1)
    return Serving(cache=cache, width=width, logprobs=logprobs, **jax.device_put(state))


@dataclasses.dataclass
class Output:
    """One prompt's result.

    Attributes:
      tokens: the generated tokens, the stop token included.
      logprobs: their log-probabilities; see `RunOptions`.
      top_logprobs: for each of them the likeliest tokens in order, with log-probabilities; empty unless asked for.
      prompt_tokens: tokens of the prompt.
      prompt_logprobs: the log-probability of each prompt token from `Request.prompt_logprobs_from` on, of the logits as
        they came; None for the first token of a prompt.
      prompt_ranks: their ranks among all tokens, 1 for the likeliest; None likewise.
      prompt_top_logprobs: the likeliest tokens for each of them, as in `top_logprobs`; None likewise.
      cached_tokens: tokens of the prompt that were found in the cache and not computed, when it was first admitted.
      stored_tokens: those of the cached tokens that came from the store, in this generation.
      preemptions: how often it had to give its row up and wait again.
      replica: the number of the replica that made it; None without replicas.
      finish: "stop" (a stop token), "length" (as many as wanted), "row_full", "no_blocks", "cancelled", "bad_request";
        None while it goes on, and if the generation was interrupted.
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

    def add(
        self, tokens: list[int], logprobs: list[float], top_tokens: Sequence = (), top_logprobs: Sequence = ()
    ) -> None:
        """Adds new tokens, and of each the likeliest tokens instead, if these are noted."""
        self.tokens += tokens
        self.logprobs += logprobs
        likeliest = zip(top_tokens, top_logprobs, strict=True)
        self.top_logprobs += [dict(zip(*columns, strict=True)) for columns in likeliest]


def results(serving: Serving) -> dict[tuple[int, int], Output]:
    """The output of each request so far, by (slot, generation), on the host."""
    requests: Any = jax.device_get(serving.requests)
    found = {}
    for slot in np.flatnonzero(requests.stage != Stage.EMPTY).tolist():
        start, prompt = int(requests.start[slot]), int(requests.prompt[slot])
        new = slice(start + prompt, start + int(requests.num_tokens[slot]))
        output = Output(
            prompt, cached_tokens=int(requests.cached[slot]), preemptions=int(requests.preemptions[slot]),
            finish=finish_of(requests.finish[slot]),
        )  # fmt: skip
        top = [] if requests.top is None else [column[new].tolist() for column in requests.top]
        output.add(requests.text[new].tolist(), requests.logprobs[new].tolist(), *top)
        found[slot, int(requests.generation[slot])] = output
    return found
