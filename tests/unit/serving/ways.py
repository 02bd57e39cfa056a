# SPDX-License-Identifier: Apache-2.0
"""The ways of serving behind the same interface, with the model and the specs of `serving_kit.py`.

Every run goes on with the cache of the run before. After each run the cache is sound, no row of it is in use, and all
events so far give its index.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import Sampling
from kvjax.serving import (
    Engine,
    EngineError,
    Finish,
    GenerationInterrupted,
    Output,
    Replicas,
    Request,
    RunOptions,
)
from tests.drafters import Guesses
from tests.serving_kit import BASE, BLOCKS, MODEL, NEW, NUM_STOP_TOKENS, VOCAB, empty, make_spec, streams_of


class Session:
    """Runs of `run_batch` over a cache, or of another way, or over the caches of replicas.

    Attributes:
      caches: the caches after the last run.
      events: of each cache, all events of the listener, decoded.
      totals: totals of these events.
      decoded: events returned by the last run.
      then: called once, by the listener at its next events.
      away: the listener raises where this is true.
      has_index: whether the listener has the index after each run.
      listener: listener of all runs.
    """

    def __init__(self, num_blocks: int = BLOCKS, spec: Any = None):
        self.spec, self.then, self.away, self.has_index = spec or make_spec(), None, lambda: False, True
        self.caches = self.create(np.int32(num_blocks))
        self.events: list[list[dict[str, Any]]] = [[] for _ in self.caches]
        self.totals, self.decoded = kvjax.events.Totals(), list[dict[str, Any]]()
        self.listener = self.hear if len(self.caches) > 1 else functools.partial(self.hear, 0)

    guard: str | None = "disallow"

    def create(self, num_blocks: Any) -> list[Any]:
        return [empty(self.spec, num_blocks)]

    def hear(self, number: int, events: Any) -> None:
        if self.away():
            raise ConnectionError("away")
        self.events[number] += kvjax.to_list(events)
        self.totals = self.totals.add(events)
        then, self.then = self.then, None
        if then is not None:
            then()

    def run(self, requests: list[Request], **options: Any) -> list[Output]:
        """The outputs, a sample after the other. No array moves unasked between the host and the device."""
        jax.config.update("jax_transfer_guard", self.guard)  # for all threads
        try:
            return self.serve(requests, BASE | {"listener": self.listener} | options)
        except GenerationInterrupted as error:
            self.caches = list(error.cache) if isinstance(error.cache, tuple) else [error.cache]
            self.decoded = error.events
            raise
        finally:
            jax.config.update("jax_transfer_guard", None)
            self.verify()

    def verify(self) -> None:
        for cache, events in zip(self.caches, self.events, strict=True):
            if cache is None:
                continue
            kvjax.check(cache.state, rows=())
            assert not self.has_index or kvjax.fold(events).index == kvjax.events.index_of(cache.state)

    def refuse(self, fields: dict[str, Any], options: dict[str, Any]) -> None:
        """Runs a request which has to be refused."""
        self.serve([Request(**fields)], BASE | options)

    def serve(self, requests: list[Request], options: dict[str, Any]) -> list[Output]:
        """Runs the requests, and goes on with the cache."""
        (cache,) = self.caches
        outputs, cache, self.decoded = kvjax.run_batch(MODEL, cache, requests, RunOptions(**options))
        self.caches = [cache]
        return outputs


class Drafted(Session):
    """`run_batch` with random drafts: each pass may write several tokens of a row."""

    def serve(self, requests, options):
        return super().serve(requests, options | {"drafter": Guesses.of(MODEL, VOCAB)})


class Generates(Session):
    """`generate`: a prompt for each sample. All have the same stop tokens and key, and no priority."""

    def serve(self, requests, options):
        options = dict(options)
        scheduler, seed, stop_tokens = options.pop("scheduler"), requests[0].seed, requests[0].stop_tokens
        each = [request for request in requests for _ in range(request.samples)]
        assert all(request.priority == 0 and [*request.stop_tokens] == [*stop_tokens] for request in each)
        names = "max_new_tokens", "sampling", "retention", "prompt_logprobs_from"
        columns = {name: [getattr(one, name) for one in each] for name in names}
        outputs, cache, self.decoded = kvjax.generate(
            MODEL, self.caches[0], [one.prompt for one in each], **columns, seed=seed, stop_tokens=stop_tokens,
            namespace=[one.namespace for one in each], chunk=scheduler.chunk, k=scheduler.k, **options,
        )  # fmt: skip
        self.caches = [cache]
        return outputs

    def refuse(self, fields, options):
        prompt, others = fields["prompt"], {name: value for name, value in fields.items() if name != "prompt"}
        kvjax.generate(MODEL, self.caches[0], [prompt], **others, **options)


class Streams(Session):
    """`stream`, whose `Progress` says all tokens and events in parts."""

    def serve(self, requests, options):
        self.decoded, new, states, progress = [], {}, [], None
        try:
            for progress in kvjax.stream(MODEL, self.caches[0], requests, RunOptions(**options)):
                self.decoded += progress.events
                states.append(progress.state)
                for number, tokens in progress.new.items():
                    assert len(tokens) <= options["steps"]
                    new[number] = new.get(number, []) + tokens
        except GenerationInterrupted as error:
            error.events[:0] = self.decoded
            raise
        assert [new.get(number, []) for number in range(len(progress.outputs))] == [o.tokens for o in progress.outputs]
        self.caches = [progress.cache]
        for state in states:  # no later loop has taken them
            kvjax.check(state)
        return progress.outputs


class Engines(Session):
    """An `Engine` for each run, which gets all requests at once."""

    def serve(self, requests, options):
        num_ranges = 1 if any(request.retention for request in requests) else None
        min_p = any(request.has_min_p for request in requests)
        engine = Engine(MODEL, self.caches[0], RunOptions(**options), num_ranges=num_ranges, min_p=min_p)
        try:
            handles = [one for request in requests for one in engine.submit(request).samples]
            return [handle.result(60) for handle in handles]
        except EngineError:
            assert engine.submit(requests[0]).result(60).finish == "length"  # it goes on
            raise
        finally:
            engine.drain(60)
            self.caches = [engine.close()]


class InReplicas(Session):
    """`Replicas` on two devices."""

    def create(self, num_blocks):
        self.replicas = Replicas(MODEL, self.spec, jax.devices()[:2], num_blocks=num_blocks)
        return list(self.replicas.caches)

    def serve(self, requests, options):
        try:
            return self.replicas.run_batch(requests, RunOptions(**options))
        finally:
            self.caches = list(self.replicas.caches)


class Rollouts(Session):
    """`rollout`: four prompts of at most 16 tokens, NEW tokens, equally many samples. Unused prompts are empty."""

    guard = None  # the caller's program takes arrays of the host

    def serve(self, requests, options):
        number, samples, most = 4, requests[0].samples, 16
        prompts, lengths = np.zeros((number, most), np.int32), np.zeros(number, np.int32)
        streams = np.zeros((number, samples), np.uint32)
        for at, request in enumerate(requests):
            assert request.samples == samples and request.max_new_tokens == NEW
            lengths[at] = len(request.prompt)
            prompts[at, : lengths[at]] = request.prompt
            streams[at] = streams_of(request, at * samples)
        own = [*requests, *[requests[0]] * (number - len(requests))]
        stop = np.resize([*requests[0].stop_tokens, -1], NUM_STOP_TOKENS).astype(np.int32)
        log = kvjax.serving.rollout_log(self.spec, (number, most), NEW, samples)
        found, cache, log = _rollout(
            MODEL, self.caches[0], prompts, lengths, seeds=streams, stop_tokens=stop, log=log, samples=samples,
            sampling=jax.tree.map(lambda *leaves: np.stack(leaves), *[one.sampling or Sampling() for one in own]),
            namespace=np.array([one.namespace for one in own], np.int32), scheduler=options["scheduler"],
            logprobs=options.get("logprobs", "raw"),
        )  # fmt: skip
        self.hear(0, log)
        self.caches, found = [cache], jax.device_get(found)
        outputs = []
        for at in np.ndindex(len(requests), samples):
            outputs.append(output := Output(int(lengths[at[0]]), cached_tokens=int(found.cached[at])))
            output.add(found.tokens[at][found.mask[at]].tolist(), found.logprobs[at][found.mask[at]].tolist())
            output.finish = Finish(found.finish[at]).name.lower()
        return outputs


_rollout = jax.jit(
    lambda *arguments, **options: kvjax.rollout(*arguments, max_new_tokens=NEW, **options),
    static_argnames=("samples", "logprobs", "scheduler"),
)
WAYS = {
    "generate": Generates, "stream": Streams, "run_batch": Session, "Engine": Engines, "Replicas": InReplicas,
    "rollout": Rollouts, "drafts": Drafted,
}  # fmt: skip
