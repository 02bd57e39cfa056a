# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts: a driver computes them between its loops, before a request enters the scheduler.

    call   a free row gets the prompt with the cached part before the first token to score; the tokens after it are
           computed in chunks, whose logits become log-probabilities on the device; the row is released
    next   the request's next call finds these tokens in the cache, so no row is held between two calls

The cache has no logits, so the tokens to score are always computed. A call holds blocks only while it runs, so the
blocks that the scheduler has reserved for running requests are available again before its next loop.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import pick, put
from kvjax._compile import OutermostJit
from kvjax.cache import Cache
from kvjax.events.log import Log, init_log
from kvjax.model import Model
from kvjax.serving.capacity import admission_events, worst_events
from kvjax.serving.decode import append_events
from kvjax.serving.host_tier import HostTier
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Output
from kvjax.serving.score import prefill
from kvjax.serving.stored import StoredPrefixes
from kvjax.serving.turns import Job
from kvjax.spec import CacheSpec

MAX_CHUNK = 128  # tokens whose logits are in memory at a time
CHUNKS = 8  # maximum chunks of a call, while running requests wait


class Notes(NamedTuple):
    """The log-probabilities of N prompt tokens."""

    logprobs: jax.Array  # f32[N]
    ranks: jax.Array  # i32[N]; 1 for the likeliest token
    top: tuple[jax.Array, jax.Array] | None  # i32[N, T], the likeliest tokens, and f32[N, T], or None if T is 0

    @classmethod
    def none(cls, size: int, num_top: int) -> Notes:
        """Space for the notes of `size` tokens."""
        ids = jnp.zeros((size, num_top), jnp.int32)
        top = (ids, jnp.zeros((size, num_top), jnp.float32)) if num_top else None
        return cls(jnp.zeros((size,), jnp.float32), jnp.zeros((size,), jnp.int32), top)

    @classmethod
    def of(cls, logits: jax.Array, tokens: jax.Array, num_top: int) -> Notes:
        """The notes of tokens i32[C] after logits f32[C, V]."""
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        logprobs = jnp.take_along_axis(scores, tokens[:, None], axis=-1)
        ranks = 1 + jnp.sum(scores > logprobs, axis=-1, dtype=jnp.int32)
        if not num_top:
            return cls(logprobs[:, 0], ranks, None)
        likeliest, ids = jax.lax.top_k(scores, num_top)
        return cls(logprobs[:, 0], ranks, (ids.astype(jnp.int32), likeliest))


class Scored(NamedTuple):
    """The result of a call."""

    count: jax.Array  # i32[]; number of scored tokens
    cached: jax.Array  # i32[]; number of tokens found in the cache
    notes: Notes


def _score_prompt(
    model: Model,
    cache: Cache,
    slots: jax.Array,
    prompt: Any,
    bounds: Any,
    now: Any,
    *,
    chunk: int,
    size: int,
    num_top: int,
    log_size: int,
) -> tuple[Cache, Log, Scored]:
    """Scores the next tokens of a prompt.

    `slots` i32[S] are the rows' requests, -1 for none. `prompt` i32[N + chunk] is padded. `bounds` i32[3] has the
    position of the first token to score, from 1 on, the end of the last token, at most `size` later, and the namespace.
    """
    spec = cache.state.spec
    log = init_log(log_size, spec.block_size, spec.extra_ids, spec.has_recurrent) if log_size else None
    first, end, namespace = bounds
    width = prompt.shape[0] - chunk
    is_free = (slots < 0) & (cache.state.seqs.length == 0)
    row = jnp.where(jnp.any(is_free), jnp.argmax(is_free), -1).astype(jnp.int32)
    # The last of a prompt's `first` tokens is never taken from the cache, because its logits score the next token.
    cache, admitted = cache.admit(
        row[None], prompt[None, :width], first[None], namespace=namespace[None], reserve_tokens=chunk, now=now
    )
    log = append_events(log, admitted)

    def note_logits(notes: Notes, start: jax.Array, count: jax.Array, logits: jax.Array) -> Notes:
        scored = start + 1 + np.arange(chunk, dtype=np.int32)  # positions of the tokens that follow the chunk's
        where = (scored >= first) & (scored <= start + count)
        return put(notes, scored - first, Notes.of(logits, pick(prompt, scored), num_top), where)

    cache, log, _, notes = prefill(
        model,
        cache,
        log,
        admitted.ok,
        row,
        prompt,
        end - 1,
        Notes.none(size, num_top),
        note_logits,
        chunk=chunk,
        now=now,
        logits="all",
    )
    reached = jnp.where(admitted.ok, pick(cache.state.seqs.committed, row), 0)
    cache, events = cache.release(jnp.where(admitted.ok, row, -1)[None], now=now)
    return cache, append_events(log, events), Scored(jnp.maximum(reached + 1 - first, 0), admitted.cached[0], notes)


_score_prompt = OutermostJit(
    _score_prompt, static_argnames=("chunk", "size", "num_top", "log_size"), donate_argnames="cache"
)


def check_all_logits(model: Model, cache: Cache, chunk: int = 1) -> None:
    """Raises a ValueError if a model cannot give the logits after each token. The arrays may be shapes."""

    def compute(model: Model, cache: Cache) -> Any:
        row = jnp.zeros((1,), jnp.int32)
        return cache.step(model, jnp.zeros((1, chunk), jnp.int32), row, row, logits="all")[1]

    jax.eval_shape(compute, model, cache)


class Step(enum.Enum):
    """The outcome of a step of `PromptScores`."""

    DONE = enum.auto()  # the prompt is scored
    MORE = enum.auto()  # a part of the prompt is scored
    NO_BLOCKS = enum.auto()  # no row or too few blocks were free


class PromptScores:
    """Scores the prompts of a driver's requests.

    Source: `prompt_logprobs` of vLLM, which also computes cached prompts again.
    """

    def __init__(
        self,
        state: GenerationState[Any],
        host_tier: HostTier[Any],
        stored: StoredPrefixes | None,
        scheduler: Scheduler,
        *,
        num_top: int,
        has_log: bool,
    ):
        self._state = state
        self._host_tier = host_tier
        self._stored = stored
        self._spec = state.cache.state.spec
        self._num_top = num_top
        self._chunk = min(scheduler.chunk, MAX_CHUNK)
        self._width = state.serving.width
        self._size = min(CHUNKS * self._chunk, self._width)
        self._log_size = _log_size(self._spec, self._width, self._chunk) if has_log else 0

    def step(self, model: Model, jobs: Sequence[Job]) -> Step:
        """Scores the next tokens of the prompt of jobs, which are the unfinished samples of a request."""
        leader = jobs[0]
        if leader.next_score == 0:  # no token comes before the first token
            _add(jobs, [None], [None], [None])
        if leader.num_unscored == 0:
            return Step.DONE
        first = leader.next_score
        end = min(first + self._size, len(leader.tokens))
        if self._host_tier.groups:
            self._host_tier.prepare(-(-end // self._spec.block_size) + 1)
        scored = self._score(model, leader, first, end)
        if leader.found_tokens is None and scored.count:
            for job in jobs:
                job.found_tokens = job.output.cached_tokens = int(scored.cached)
        notes = jax.tree.map(lambda column: column[: scored.count].tolist(), scored.notes)
        top = [] if notes.top is None else [dict(zip(*pair, strict=True)) for pair in zip(*notes.top, strict=True)]
        _add(jobs, notes.logprobs, notes.ranks, top)
        if leader.num_unscored == 0:
            return Step.DONE
        return Step.MORE if scored.count else Step.NO_BLOCKS

    def _score(self, model: Model, job: Job, first: int, end: int) -> Any:
        """The `Scored` of tokens `first` to `end`, in numpy arrays."""
        state = self._state
        prompt = np.zeros((self._width + self._chunk,), np.int32)
        prompt[: len(job.tokens)] = job.tokens
        now = state.now()
        bounds = np.array([first, end, job.namespace], np.int32)
        cache, log, scored = _score_prompt(
            model,
            state.cache,
            state.serving.row,
            prompt,
            bounds,
            now,
            chunk=self._chunk,
            size=self._size,
            num_top=self._num_top,
            log_size=self._log_size,
        )
        state.serving = state.serving.replace(cache=cache)
        if log is not None:
            state.unpublished.append(log)
            if self._stored:
                self._stored.write(log)
        return jax.device_get(scored)


def _log_size(spec: CacheSpec, width: int, chunk: int) -> int:
    """The maximum events of a call."""
    entered = -(-width // spec.block_size) + -(-width // chunk) + 2
    return admission_events(spec, width) + worst_events(spec, entered + 1)


def _add(jobs: Sequence[Job], logprobs: list[Any], ranks: list[Any], top: list[Any]) -> None:
    """Adds columns of the next prompt tokens to the outputs of jobs."""

    def change(output: Output) -> None:
        output.prompt_top_logprobs += top
        output.prompt_ranks += ranks
        output.prompt_logprobs += logprobs

    for job in jobs:
        job.change(change)
