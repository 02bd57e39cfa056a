# SPDX-License-Identifier: Apache-2.0
"""A batch of prompts about a few documents, and the ways to run it: one program, or steps that Python calls.

All prompts about a document come one after the other, so that those that could share it want to run together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kvjax
from benchmarks import common
from kvjax import Cache
from kvjax.events import EventLog, init_log
from kvjax.serving import Scheduler, Serving, init_serving, results, serve, serve_step, submit, worst_step
from models import recall
from tests.oracle import requests as oracle

BLOCK = 16
TIE = 2e-3  # difference of log-probabilities below which sums in another order may choose the other token
NEVER = np.int32(1 << 30)  # more steps than a batch takes


class Size(NamedTuple):
    """The batch, the cache, and how often everything is timed; answers of `new_tokens`, or of drawn `lengths`."""

    documents: int = 32
    questions: int = 16
    facts: int = 24
    new_tokens: int = 64
    lengths: tuple[int, int] = (33, 95)
    rows: int = 32
    num_blocks: int = 512
    scheduler: Scheduler = Scheduler(max_skips=32, chunk=64, chunk_rows=8, budget=32 + 64)
    rounds: int = 5

    @property
    def requests(self) -> int:
        return self.documents * self.questions

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        return self.facts * recall.FACT_TOKENS + recall.QUESTION_TOKENS + max(self.new_tokens, self.lengths[1])

    def drawn_lengths(self) -> list[int]:
        """The length of each answer, drawn from `lengths`."""
        low, high = self.lengths
        return np.random.default_rng(1).integers(low, high + 1, self.requests).tolist()


QUICK = Size(2, 3, 4, 6, (3, 9), rows=2, num_blocks=24, scheduler=Scheduler(chunk=8, budget=2 + 8), rounds=1)


def questions(size: Size) -> list[list[int]]:
    """The prompts: a document and a question, whose answer is in it."""
    rng, prompts = np.random.default_rng(0), []
    for _ in range(size.documents):
        document = recall.make_document(rng, size.facts)
        people = rng.permutation(list(document.facts))[: size.questions]
        prompts += [document.ids + recall.encode(recall.question(person)) for person in people]
    return prompts


def make_cache(model: Any, size: Size) -> Cache:
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=size.num_blocks, max_seqs=size.rows, block_size=BLOCK, dtype="float32",
        max_length=-(-size.longest // BLOCK) * BLOCK,
    )  # fmt: skip
    return Cache.create(spec)


@functools.cache
def _submit(scheduler: Scheduler) -> Callable[..., Any]:
    return jax.jit(functools.partial(submit, scheduler=scheduler), donate_argnums=0)


def submitted(
    model: Any, size: Size, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[Serving, EventLog]:
    """All prompts as requests that wait, and a log that holds the events of all of them."""
    cache = make_cache(model, size)
    spec, scheduler = cache.state.spec, size.scheduler
    serving = init_serving(cache, [size.longest] * len(prompts), greedy=True)
    line, counts = np.concatenate(prompts).astype(np.int32), np.array([len(prompt) for prompt in prompts], np.int32)
    serving, status, *_ = _submit(scheduler)(serving, line, counts, np.array(lengths, np.int32))
    common.require(not np.any(status), "a prompt was refused")
    blocks = len(prompts) * spec.max_blocks_per_seq
    return serving, init_log(3 * blocks + 8 * worst_step(spec, scheduler), BLOCK)


@functools.cache
def one_program(scheduler: Scheduler) -> Callable[..., Any]:
    """(model, serving, log) -> (serving, log); all steps."""
    loop = functools.partial(serve, scheduler=scheduler, steps=NEVER)
    return jax.jit(loop, donate_argnums=(1, 2), compiler_options=kvjax.serving.compiler_options())


@functools.cache
def one_step(scheduler: Scheduler) -> Callable[..., Any]:
    """(model, serving, log) -> (serving, log, what was done, whether there is more to do)."""

    def step(model, serving, log):
        serving, log, served = serve_step(model, serving, log, scheduler=scheduler)
        return serving, log, served, serving.busy

    return jax.jit(step, donate_argnums=(1, 2), compiler_options=kvjax.serving.compiler_options())


def from_python(scheduler: Scheduler, model: Any, serving: Serving, log: EventLog) -> tuple[Serving, list[Any]]:
    """Steps that Python calls, as a scheduler on the host does: it reads what a step chose while the next one runs.

    Returns:
      The requests, and what each step did.
    """
    step, steps, flags = one_step(scheduler), [], []
    while True:
        serving, log, served, busy = step(model, serving, log)
        steps.append(served)
        flags.append(busy)
        if len(steps) > 1:
            _, goes_on = jax.device_get((steps[-2].chosen.bits, flags[-2]))  # what a server would send now
            if not goes_on:
                return serving, steps


def answers(serving: Serving) -> list[list[int]]:
    """The tokens of each request."""
    outputs = results(serving)
    common.require(all(output.finish == "length" for output in outputs.values()), "a request is not done")
    return [outputs[name].tokens for name in sorted(outputs)]


def oracle_options(scheduler: Scheduler) -> oracle.Options:
    """The same options for the scheduler in plain Python."""
    same = [field.name for field in dataclasses.fields(oracle.Options) if field.name not in ("k", "order")]
    common.require(scheduler.order == Scheduler().order, "the scheduler in plain Python has the default order only")
    return oracle.Options(k=scheduler.k or BLOCK, **{name: getattr(scheduler, name) for name in same})


def margin(model: Any, size: Size, tokens: Sequence[int]) -> float:
    """By how much the most probable token behind these is ahead of the second one, as a log-probability."""
    cache, line = make_cache(model, size), np.array([tokens], np.int32)
    cache, _ = cache.admit(np.zeros(1, np.int32), line, np.array([len(tokens)], np.int32))
    _, logits, _ = kvjax.step(model, cache, line, np.array([len(tokens)], np.int32), np.zeros(1, np.int32))
    second, first = np.sort(np.asarray(logits[0]))[-2:]
    return float(first - second)


def require_same(model: Any, size: Size, prompts: Sequence[list[int]], outputs: dict[str, list[list[int]]]) -> None:
    """Ends the benchmark if ways to run a batch chose different tokens, but where two tokens were as good as equal."""
    (first, ours), *others = outputs.items()
    for other, theirs in others:
        for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            same = [a == b for a, b in zip(one, two, strict=True)]
            if not all(same):
                ahead = margin(model, size, [*prompts[number], *one[: same.index(False)]])
                otherwise = f"{first} and {other} chose different tokens for prompt {number}, {ahead:.1e} apart"
                common.require(ahead < TIE, otherwise)
