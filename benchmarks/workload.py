# SPDX-License-Identifier: Apache-2.0
"""The batch of the serving benchmarks, prompts about a few documents, and ways to run it.

Prompts about the same document follow each other, so requests which can share it want to run together. Clients of a
server run in a separate process, which reads a job from each line of its standard input: {"port", "prompts",
"new_tokens", "open", "streams"}. They have up to "open" prompts answered greedily at a time, and print the texts of the
answers.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from benchmarks import caches, common
from benchmarks.common import Size
from kvjax import Cache
from kvjax.events import EventLog, init_log
from kvjax.serving import Scheduler, Serving, init_serving, results, serve, serve_step, submit, worst_step
from models import loading, recall
from tests.oracle import requests as oracle

BLOCK = 16
TIE = 2e-3  # difference of log-probabilities below which sums in another order may choose the other token
NEVER = np.int32(1 << 30)  # more steps than a batch takes
BATCH = {
    "documents": (32, 2),
    "questions": (16, 3),
    "facts": (24, 4),
    "new_tokens": (64, 6),
    "shortest": (33, 3),  # of answers of drawn lengths
    "longest": (95, 9),
    "rows": (32, 2),
    "num_blocks": (512, 24),
    "scheduler": (Scheduler(max_skips=32, chunk=64, chunk_rows=8, budget=32 + 64), Scheduler(chunk=8, budget=2 + 8)),
}


@functools.cache
def load_recall() -> Any:
    """The bundled model and its tokenizer."""
    return loading.load(recall.CHECKPOINT)


def questions(size: Size) -> list[list[int]]:
    """The prompts: a document, and a question about it."""
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(size.documents):
        document = recall.make_document(rng, size.facts)
        people = rng.permutation(list(document.facts))[: size.questions]
        prompts += [document.ids + recall.encode(recall.question(person)) for person in people]
    return prompts


def spec_of(model: Any, size: Size) -> kvjax.CacheSpec:
    """The cache of the batch. A row holds a prompt and its answer, in whole blocks."""
    tokens = size.facts * recall.FACT_TOKENS + recall.QUESTION_TOKENS + max(size.new_tokens, size.longest)
    return caches.spec_of(model, size.rows, -(-tokens // BLOCK) * BLOCK, size.num_blocks, BLOCK)


def make_cache(model: Any, size: Size) -> Cache:
    return Cache.create(spec_of(model, size))


def run_batch(model: Any, size: Size, prompts: Sequence[Sequence[int]], cache: Cache) -> list[list[int]]:
    """The tokens of each answer, by the public function."""
    requests = kvjax.serving.make_requests(prompts, max_new_tokens=size.new_tokens)
    options = kvjax.serving.RunOptions(scheduler=size.scheduler, log_events=False)
    outputs, _, _ = kvjax.run_batch(model, cache, requests, options)
    return [output.tokens for output in outputs]


_submit = jax.jit(submit, static_argnames="scheduler", donate_argnums=0)


def submitted(
    model: Any, size: Size, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[Serving, EventLog]:
    """All prompts as waiting requests, and a log with space for all their events."""
    spec = spec_of(model, size)
    scheduler = size.scheduler
    serving = init_serving(Cache.create(spec), [spec.max_length] * len(prompts), greedy=True)
    line = np.concatenate(prompts).astype(np.int32)
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    serving, status, *_ = _submit(serving, line, counts, np.array(lengths, np.int32), scheduler=scheduler)
    common.require(not np.any(status), "a prompt was refused")
    blocks = len(prompts) * spec.max_blocks_per_seq
    return serving, init_log(3 * blocks + 8 * worst_step(spec, scheduler), BLOCK)


@functools.cache
def one_program(scheduler: Scheduler) -> Callable[..., Any]:
    """(model, serving, log) -> (serving, log), with all steps."""
    loop = functools.partial(serve, scheduler=scheduler, steps=NEVER)
    return jax.jit(loop, donate_argnums=(1, 2), compiler_options=kvjax.serving.compiler_options())


@functools.cache
def _one_step(scheduler: Scheduler) -> Callable[..., Any]:
    """(model, serving, log) -> (serving, log, work of the step, whether there is more to do)."""

    def step(model, serving, log):
        serving, log, served = serve_step(model, serving, log, scheduler=scheduler)
        return serving, log, served, serving.busy

    return jax.jit(step, donate_argnums=(1, 2), compiler_options=kvjax.serving.compiler_options())


def from_python(scheduler: Scheduler, model: Any, serving: Serving, log: EventLog) -> tuple[Serving, list[Any]]:
    """Calls steps from Python, as a scheduler on the host does. It reads a step's tokens while the next step runs.

    Returns:
      The requests, and the work of each step.
    """
    step = _one_step(scheduler)
    steps = []
    flags = []
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
    """The log-probability of the likeliest next token after these tokens, less the second likeliest's."""
    cache = make_cache(model, size)
    line = np.array([tokens], np.int32)
    cache, _ = cache.admit(np.zeros(1, np.int32), line, np.array([len(tokens)], np.int32))
    _, logits, _ = kvjax.step(model, cache, line, np.array([len(tokens)], np.int32), np.zeros(1, np.int32))
    second, first = np.sort(np.asarray(logits[0]))[-2:]
    return float(first - second)


def require_same(model: Any, size: Size, prompts: Sequence[list[int]], outputs: dict[str, list[list[int]]]) -> None:
    """Ends the benchmark if programs chose different tokens, unless two tokens were equally likely within `TIE`."""
    (first, ours), *others = outputs.items()
    for name, answers in others:
        for prompt_index, (expected, tokens) in enumerate(zip(ours, answers, strict=True)):
            same = [a == b for a, b in zip(expected, tokens, strict=True)]
            if not all(same):
                ahead = margin(model, size, [*prompts[prompt_index], *expected[: same.index(False)]])
                otherwise = f"{first} and {name} chose different tokens for prompt {prompt_index}, {ahead:.1e} apart"
                common.require(ahead < TIE, otherwise)


class Clients:
    """Clients of a server, in a separate process."""

    def __init__(self):
        command = [sys.executable, "-c", "from benchmarks import workload; workload.be_clients()"]
        self._process = subprocess.Popen(
            command, cwd=common.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answers(self, port: int, prompts: Sequence[Sequence[int]], new_tokens: int, open: int, streams: bool) -> Any:
        """The texts of the answers."""
        assert self._process.stdin and self._process.stdout
        job = {"port": port, "prompts": prompts, "new_tokens": new_tokens, "open": open, "streams": streams}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        common.require(bool(line), "the clients have failed")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()  # closes its standard input, and waits


def be_clients() -> None:
    """Does the jobs from standard input."""
    for line in sys.stdin:
        job = json.loads(line)
        texts = [""] * len(job["prompts"])
        waiting = iter(enumerate(job["prompts"]))
        threads = job["open"]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for client in [pool.submit(_be_client, job, waiting, texts) for _ in range(threads)]:
                client.result()
        print(json.dumps(texts), flush=True)


def _be_client(job: dict[str, Any], waiting: Iterator[tuple[int, Any]], texts: list[str]) -> None:
    """Has prompts answered through a connection, one after the other, until none is left."""
    connection = http.client.HTTPConnection("127.0.0.1", job["port"])
    fields = {"model": "recall", "temperature": 0, "ignore_eos": True, "max_tokens": job["new_tokens"]}
    for prompt_index, prompt in waiting:
        body = json.dumps({**fields, "prompt": prompt, "stream": job["streams"]})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if job["streams"]:
            answers = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        else:
            answers = [json.load(response)]
        texts[prompt_index] = "".join(answer["choices"][0]["text"] for answer in answers)
    connection.close()
