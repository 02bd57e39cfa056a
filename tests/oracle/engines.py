# SPDX-License-Identifier: Apache-2.0
"""Engines, batches and streams over the cache whose K/V identify their tokens, with all bytes compared at each turn.

A history goes on with verbs (`bytes_machine.Life`) until it runs a batch, or opens an engine, which it then turns by
hand. Requests come and go meanwhile. Moves, steps and listeners fail. Answers and log-probabilities are the model's.

    python -m tests.oracle.engines host --seed 3 --steps 500  # cuts a failure down to the requests it takes
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax import Cache
from kvjax.events import Listeners, Mirror
from kvjax.policies import priority
from kvjax.serving import (
    Constraints,
    Engine,
    EngineError,
    GenerationInterrupted,
    Penalties,
    QueueFull,
    Replicas,
    RunOptions,
    Scheduler,
    chain,
    penalize,
    replica,
    replicas,
)
from kvjax.serving.batch import Batch
from kvjax.serving.constraints import NONE
from kvjax.serving.driver import Driver
from kvjax.serving.engine_thread import EngineThread
from kvjax.stores import DiskStore
from kvjax.tiered import joined
from tests.constraint_kit import LIMITS, Grammar
from tests.drafters import Guesses
from tests.oracle import bytes_machine
from tests.oracle.bytes_machine import (
    ROWS,
    SIZE,
    TENANTS,
    VERSIONS,
    VOCAB,
    WIDTH,
    Chain,
    Config,
    Faults,
    Life,
    Row,
    name_of,
    retention_of,
    score_of,
)
from tests.oracle.engine_changes import Changing, Spaces, draw_change, note_spaces
from tests.serving_kit import Calls

SALTS, WAITING, STEPS = 6, 7, 4  # salts of a history; requests that may wait; steps of a batch's loop
MAX_BIASES = 2  # of a request
GRAMMARS, STOP = 3, 1  # grammars that requests may have, and the token that ends an answer
VERBS = ("admit", "commit", "release", "pin", "unpin", "generate")
AMPLE, SHORT = Scheduler(chunk=8, k=SIZE), Scheduler(chunk=8, k=SIZE, reserve="num_tokens")
SWAPS = Scheduler(chunk=8, k=SIZE, reserve="num_tokens", preempt="swap")


class Broken(RuntimeError):
    """A call made to fail."""


def fail() -> None:
    raise Broken("on purpose")


@dataclasses.dataclass(frozen=True)
class Serves(Config):
    """The options of a cache, and of everything which serves with it.

    Attributes:
      scheduler: scheduler of batches and engines.
      salts: whether an engine's tenants come by salts, which it gives back when nothing has them.
      store: whether there is a `DiskStore`.
      limits: other arguments of an engine.
      replicas: whether `Replicas` serve.
      penalties: whether requests have penalties, biases and a min-p.
      grammars: whether requests may have a grammar.
    """

    verbs: tuple[str, ...] | None = VERBS
    scheduler: Scheduler = AMPLE
    salts: bool = False
    store: bool = False
    limits: dict[str, Any] = dataclasses.field(default_factory=dict)
    replicas: bool = False
    penalties: bool = False
    grammars: bool = False

    def life(self, faults: Faults) -> Any:
        return Replicated(self, faults) if self.replicas else Served(self, faults)

    def requests(self, seed: int) -> Asks:
        return Asks(seed, self)


class Away:
    """A listener which is away at times."""

    def __init__(self, mirror: Mirror):
        self.mirror, self.is_away = mirror, False

    def listen(self, events: Any) -> None:
        if self.is_away:
            raise ConnectionError("away")
        self.mirror = kvjax.fold(kvjax.to_list(events), self.mirror)


@dataclasses.dataclass(eq=False)
class Sent:
    """A request to an engine: its handle, and how many turns it has had since it was cancelled."""

    request: kvjax.serving.Request
    handle: Any
    sample: int
    turns: int = 0
    is_cancelled: bool = False
    spaces: dict[int, int] = dataclasses.field(default_factory=dict)  # its namespace under each version
    is_scored: bool = False  # whether its prompt is scored
    scored_in: int = 0  # the namespace in which it was scored


def under(grammar: Grammar, answer: Sequence[int], likeliest: int, token: int) -> tuple[float, int]:
    """The log-probability of a token after an answer under a grammar, and the greedy token, by `Chain`."""
    allowed = grammar.allowed(answer, VOCAB)
    logits = np.where(allowed, (np.arange(VOCAB) == likeliest).astype(np.float64), -np.inf)
    return float(logits[token] - np.log(np.sum(np.exp(logits)))), int(np.argmax(logits))


class Served(Changing, Life):
    """A cache for verbs, batches and engines in turn.

    Attributes:
      engine: the engine with the cache, or None.
      requests: its requests in progress.
      published: the index by the events of listeners.
      space_of: the namespace of each first token of a prompt, which tells a model the tenant.
      others: the rows outside of all requests, while a batch runs.
      grammars: grammars for requests, with their constraints.
      bound: the grammar of each request with a grammar.
    """

    config: Serves

    def __init__(self, config: Serves, faults: Faults):
        self.patch, self.folder, self.engine = pytest.MonkeyPatch(), tempfile.TemporaryDirectory(), None
        self.calls, turn = Calls(self.patch), Batch.turn
        self.patch.setattr(Batch, "turn", lambda batch: self._watched(batch, turn))
        self.patch.setattr(logging.getLogger("kvjax"), "disabled", True)  # which says that listeners fail
        self.patch.setattr(EngineThread, "start", lambda thread: None)  # its steps are called by hand
        self.names, self.store = kvjax.Namespaces(), None
        for number in range(VERSIONS * TENANTS):
            self.names(f"tenant {number}")
        self.numbers: dict[Any, int] = {}  # of the salts and weights, the last that was lent
        self.tenant_of: list[Any] = [(0, None)] * VOCAB  # the namespace or the salt of each first token
        self.answers: dict[Any, list[int]] = {}  # by all that they depend on
        self.requests: list[Sent] = []
        self.space_of, self.others = [0] * VOCAB, dict[int, Row]()
        self.change, self.updates = None, 0
        self.grammars, self.constraints = list[Grammar](), None
        self.bound = weakref.WeakKeyDictionary[kvjax.serving.Request, Grammar]()
        if config.grammars:
            self.constraints = Constraints.create(GRAMMARS, VOCAB, **LIMITS)
            for number in range(GRAMMARS):
                self.grammars.append(Grammar.random(number, VOCAB, (STOP,)))
                self.constraints = self.constraints.put(number, self.grammars[number].constraint)
        super().__init__(config, faults)
        self.devices = self.cache.state.seqs.length.devices()
        if config.store:
            options = {"model": "m", "names": self.names, "max_bytes": 1 << 26, "read_timeout_ms": 60_000}
            self.store = DiskStore(self.folder.name, self.spec, **options)

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()
        if self.engine is not None:
            self.mirror = self.published
            self.engine._thread._end()
        if self.store is not None:
            self.store.close()
        self.folder.cleanup()

    def do(self, request: dict[str, Any]) -> None:
        if self.engine is not None and request["verb"] not in ("turn", "close"):
            self._close(request)  # the history was cut down
        super().do(request)

    @property
    def model(self) -> Chain:
        roots = np.array([name_of(space, ()) for space in self.space_of], np.int32)
        return Chain(roots, self.config.layers)

    def run_options(self, *listeners: Any, **options: Any) -> RunOptions:
        listener = Listeners(self.follow, *listeners)
        return RunOptions(
            scheduler=self.config.scheduler, clock=lambda: self.time, names=self.names, store=self.store,
            log_events=False, listener=listener, logits_fn=self.logits_fn, drafter=self.drafter,
            reuse="any",  # each call makes an equal model anew
            **options,
        )  # fmt: skip

    @property
    def drafter(self) -> Any:
        """A drafter of the model, with another mode after each turn of the clock."""
        return Guesses.of(self.model, VOCAB, self.time % 3) if self.config.drafts else None

    # The cache goes to a driver and comes back.

    def give(self, driver: Driver) -> None:
        """Gives the cache, in which NaN is wherever nobody may read, to a driver."""
        driver.state.serving = driver.state.serving.replace(cache=self.cache)
        driver.state.host = self.host

    def take(self, driver: Driver, others: dict[int, Row]) -> None:
        """Takes a driver's cache after the present loops, with their events, and adds its rows to the others."""
        state, self.rows = driver.state, dict(others)
        self.cache, self.host = state.cache, state.host
        for events in state.unpublished:
            self.mirror = kvjax.fold(kvjax.to_list(events), self.mirror)
        wanted = state.serving.requests, state.serving.row, self.cache.state.seqs
        requests, rows, seqs = jax.tree.map(np.array, jax.device_get(wanted))
        for seq, slot in enumerate(rows.tolist()):
            if slot >= 0:
                job = driver.active[slot]
                text = tuple(requests.text[requests.start[slot] :][: requests.num_tokens[slot]].tolist())
                begins = (*job.tokens.tolist(), *job.output.tokens)
                is_canonical = self.config.scheduler.canonical  # it may make its last tokens again
                assert is_canonical or len(text) >= len(begins), f"slot {slot} has {text}, wanted {begins}"
                assert text[: len(begins)] == begins[: len(text)], f"slot {slot} has {text}, wanted {begins}"
                assert requests.namespace[slot] == job.namespace, f"slot {slot} has another namespace than {job}"
                if seqs.length[seq]:
                    items, swapped = text[: seqs.committed[seq]], bool(seqs.swapped_out[seq])
                    self.rows[seq] = Row(self.space_in(seq, job), items, items, swapped)

    # Batches.

    def _watched(self, batch: Batch, turn: Any) -> bool:
        """A turn of a batch. If the batch has this cache, all bytes are compared."""
        more, published = turn(batch), self.mirror
        if batch.state.cache.state.seqs.length.devices() != self.devices:
            return more
        self.take(batch.driver, self.others)
        self.tally["turns of batches"] += 1
        self.inspect()
        self.verify()
        self.poison()
        self.mirror = published
        self.give(batch.driver)
        return more

    def _generate(self, request: dict[str, Any]) -> None:
        """Runs a batch or a stream, which may end early or fail."""
        if len(self.rows) == ROWS:
            return
        self.others, self.space_of = dict(self.rows), request["space_of"]
        asks = [self.described(ask) for ask in request["asks"]]
        cache = joined(self.cache, self.host)
        self.tally["beside other rows"] += bool(self.rows)
        self.arm(request["breaks"])
        with warnings.catch_warnings(record=True) as failed:
            warnings.simplefilter("always")
            try:
                outputs, cache = self._run(request, cache, asks)
            except GenerationInterrupted as error:
                if not isinstance(error.__cause__, Broken):
                    raise
                outputs, cache = error.outputs, error.cache
                self.tally["broken batch"] += 1
        self.arm(None)
        self.tally["failed in generate"] += len(failed)
        self.rows = self.others
        if cache is None:
            self.tally["lost by a batch"] += 1
            self.begin()
            return
        self.put(cache)
        self.check_all(asks, outputs)

    def put(self, cache: Any) -> None:
        """Goes on with a cache."""
        self.cache, self.host = (cache, None) if isinstance(cache, Cache) else (cache.cache, cache.host)

    def check_all(self, asks: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Checks the outputs of all requests of a batch."""
        numbers = iter(outputs)
        for one in asks:
            space = self.space_of[one.prompt[0] % VOCAB] if len(one.prompt) else 0
            for sample in range(one.samples):
                self.check(one, space, next(numbers), sample)

    def _run(self, request: dict[str, Any], cache: Any, asks: Sequence[Any]) -> tuple[list[Any], Any]:
        options = self.run_options(steps=STEPS)
        if request["ends"] is None:
            outputs, cache, _ = kvjax.run_batch(self.model, cache, asks, options)
            assert all(output.finish for output in outputs)
            return outputs, cache
        stream, number = kvjax.stream(self.model, cache, asks, options), 0
        for progress in stream:
            found, number = progress, number + 1
            if number == request["ends"]:
                stream.close()
                self.tally["closed stream"] += 1
        return found.outputs, found.cache

    def arm(self, breaks: Any) -> None:
        """Lets one of the next jitted calls fail before it or after it. `breaks` is [its number, when]."""
        self.calls.count, self.calls.at = 0, breaks[0] if breaks else 0
        self.calls.before, self.calls.after = (fail, None) if breaks and breaks[1] else (None, fail)

    def described(self, ask: dict[str, Any], **namespace: int) -> kvjax.serving.Request:
        names = "prompt", "max_new_tokens", "seed", "priority", "stop_tokens", "samples", "prompt_logprobs_from"
        fields = {name: ask[name] for name in names}
        if self.spec.retention:
            fields["retention"] = jax.tree.map(lambda values: values[0], retention_of([ask["requested_priority"]]))
        min_p = ask["min_p"] if self.config.penalties else None
        sampling = kvjax.Sampling(temperature=ask["temperature"], min_p=min_p) if ask["temperature"] else None
        if not namespace and ask["prompt"]:
            namespace = {"namespace": self.space_of[ask["prompt"][0] % VOCAB]}
        number = ask.get("grammar") if self.config.grammars else None
        if number is not None:
            fields["stop_tokens"] = [STOP]
        state = self.logits_state(ask["prompt"], number, **ask["penalties"])
        request = kvjax.serving.Request(sampling=sampling, logits_state=state, **fields, **namespace)
        if number is not None:
            self.bound[request] = self.grammars[number]
        return request

    @property
    def logits_fn(self) -> Any:
        """The penalties and the grammars of requests, combined by `chain` if requests may have both."""
        functions = [penalize] if self.config.penalties else []
        if self.constraints is not None:
            functions.append(self.constraints)
        return chain(*functions) if len(functions) > 1 else functions[0] if functions else None

    def logits_state(self, prompt: Sequence[int] = (), grammar: int | None = None, **penalties: Any) -> Any:
        """The state of a request for `logits_fn`. Its penalties come first."""
        states: list[Any] = []
        if self.config.penalties:
            penalties = {"repetition": 1.0, **penalties}
            states.append(Penalties.of(2 * WIDTH, **penalties, prompt=prompt, max_biases=MAX_BIASES))
        if self.constraints is not None:
            states.append(np.int32(NONE) if grammar is None else self.constraints.state(grammar))
        return tuple(states) if len(states) > 1 else states[0] if states else None

    def check(self, request: Any, spaces: Any, output: Any, sample: int) -> None:
        """Requires each token to be the model's after the text before it, by its probability, and a right end.

        `spaces` is the namespace of the prompt, or the `Spaces` of the output.
        """
        spaces = spaces if isinstance(spaces, Spaces) else Spaces({0: spaces}, output, spaces)
        space = spaces.first
        path, new, stop = tuple(request.prompt.tolist()), output.tokens, request.stop_tokens.tolist()
        prompt = path
        grammar = self.bound.get(request)
        options = [leaf.tobytes() for leaf in jax.tree.leaves((request.sampling, request.logits_state))]
        if spaces.is_single:
            wanted = self.answers.setdefault((space, path, *options, request.seed + sample, grammar), [])
            same = min(len(wanted), len(new))
            assert wanted[:same] == new[:same], f"{request} has {new} after {wanted}"
            wanted += new[same:]
        penalties = None
        if self.config.penalties:
            penalties = request.logits_state[0] if self.config.grammars else request.logits_state
        for at, (token, logprob) in enumerate(zip(new, output.logprobs, strict=True)):
            found = []
            for space in spaces.of_token(at):
                logits = penalized(path, len(prompt), name_of(space, path) % VOCAB, penalties)
                if grammar is not None:
                    logits = np.where(grammar.allowed(path[len(prompt) :], VOCAB), logits, -np.inf)
                score = logits[token] - np.log(np.sum(np.exp(logits)))
                found.append((abs(logprob - score), space, score, logits))
            error, space, score, logits = min(found, key=lambda one: one[0])
            assert error < 1e-4, f"{token} after {path} of {space} has {logprob}, wanted {score}"
            if request.sampling is None:
                assert token == np.argmax(logits), f"{request} has {new}"
            elif request.has_min_p:
                share = np.exp(logits[token] - max(logits))
                assert share >= request.sampling.min_p - 1e-5, f"{request} has {new}"
            path += (token,)
        if grammar is not None and new:
            assert grammar.accepts(output), f"{request} has {output}"
            self.tally[f"under a grammar {output.finish}"] += 1
            self.tally["under a grammar preempted"] += output.preemptions
        self.check_scores(request, spaces.of_scores, output)
        self.tally["generated"] += len(new)
        self.tally["accepted drafts"] += output.accepted_tokens
        self.tally["rejected drafts"] += output.drafted_tokens - output.accepted_tokens
        self.tally["preempted"] += output.preemptions
        self.tally["generate hit"] += output.cached_tokens > 0
        self.tally["from the store"] += output.stored_tokens > 0
        self.tally[f"finish {output.finish}"] += 1
        self.tally["penalized after a preemption"] += self.config.penalties and output.preemptions > 0
        most = len(request.prompt) - (request.samples == 1)  # samples that fork have all of it
        assert 0 <= output.cached_tokens <= max(most, 0), f"{request} has {output}"
        assert not any(token in stop for token in new[:-1])
        is_bad = not len(request.prompt) or request.prompt.max() >= VOCAB
        right = {
            "stop": bool(new) and new[-1] in stop, "length": len(new) == request.max_new_tokens,
            "row_full": len(path) == WIDTH + 1 or not new, "bad_request": is_bad, "no_blocks": True,
        }  # fmt: skip
        assert right.get(str(output.finish), True), f"{request} has {output}"

    def check_scores(self, request: Any, space: int, output: Any) -> None:
        """Requires the model's log-probability for each scored prompt token, and in the end for all requested."""
        prompt, first, scored = request.prompt.tolist(), request.prompt_logprobs_from, output.prompt_logprobs
        for at, logprob in enumerate(scored, first or 0):
            if at == 0:
                assert logprob is None, f"the first token of {request} has {logprob}"
                continue
            score = score_of(tuple(prompt[:at]), space, prompt[at])
            assert abs(logprob - score) < 1e-4, f"{request} has {logprob} at {at}, wanted {score}"
            assert (output.prompt_ranks[at - first] == 1) == (score > -1)
        is_over = output.finish in ("stop", "length")
        assert not is_over or first is None or len(scored) == len(prompt) - first, f"{request} has {output}"
        self.tally["scored"] += first is not None and is_over
        self.tally["scored without blocks"] += first is not None and output.finish == "no_blocks"

    # Engines.

    def _open(self, request: dict[str, Any]) -> None:
        del request
        if self.rows or self.engine is not None:
            return
        cache = joined(self.cache, self.host)
        self.away, self.published = Away(self.mirror), self.mirror
        options = self.run_options(self.away.listen, steps=self.config.limits.get("steps"))
        limits = {name: value for name, value in self.config.limits.items() if name != "steps"}
        if self.config.penalties:
            limits |= {"min_p": True, "logits_state": self.logits_state()}
        self.engine = Engine(self.model, cache, options, max_waiting=WAITING, **limits)
        self.standing = options.listeners._listeners[1][1]
        self.engine._thread._max_lent = 2 if self.config.salts and not self.config.store else 64
        self.take(self.engine._thread.driver, {})

    def _turn(self, request: dict[str, Any]) -> None:
        """Submits requests to the engine and ends others, makes a turn, and looks at all answers."""
        if self.engine is None:
            return
        thread = self.engine._thread
        self.mirror, self.away.is_away = self.published, request["away"]
        if request["retry"]:
            self.standing.retry_at = 0.0
        self.give(thread.driver)
        self._replace_grammar(request.get("grammar"))
        for ask in request["asks"]:
            self._submit(ask)
        for number, is_late in request["ends"]:
            if self.requests:
                one = self.requests[number % len(self.requests)]
                one.is_cancelled = True
                if is_late:
                    one.handle.job.deadline = 0.0
                else:
                    one.handle.cancel()
        self._await_reads(thread)
        self.begin_change(request.get("change"))
        self.arm(request["breaks"])
        with warnings.catch_warnings(record=True) as failed:
            warnings.simplefilter("always")
            try:
                thread._step()
            except Broken as error:
                self.faults.left = None
                thread._recover(error)
                self.tally["broken step"] += 1
        self.arm(None)
        self.tally["turns of engines"] += 1
        self.tally["failed in a turn"] += len(failed)
        self.published = self.mirror
        self.end_change()
        self.take(thread.driver, {})
        if not self.standing.is_behind:
            assert self.away.mirror.index == self.published.index, "a listener has another index"
        self._verify_answers(thread)

    def _replace_grammar(self, new: Any) -> None:
        """Puts a new grammar in the place of a grammar without requests. `new` is [its number, a seed]."""
        if self.constraints is None or new is None:
            return
        number, seed = new[0] % GRAMMARS, new[1]
        if any(self.bound.get(one.request) is self.grammars[number] for one in self.requests):
            return
        self.grammars[number] = Grammar.random(seed, VOCAB, (STOP,))
        self.constraints = self.constraints.put(number, self.grammars[number].constraint)
        self.engine.replace_logits_fn(self.logits_fn)
        self.tally["new grammar"] += 1

    def _await_reads(self, thread: EngineThread) -> None:
        """Waits for reads from the store, so a history does not depend on threads."""
        prefixes = thread.driver.stored.waiting.values() if thread.driver.stored else ()
        wait([future for prefix in prefixes for future in prefix.reads.values() if future is not None])

    def _verify_answers(self, thread: EngineThread) -> None:
        """Looks at all answers. Finished requests leave."""
        for one in self.requests:
            one.turns += one.is_cancelled
            if one.handle.error is not None:
                assert isinstance(one.handle.error, EngineError), one.handle.error
                assert isinstance(one.handle.error.__cause__, Broken), one.handle.error.__cause__
            note_spaces(one, thread.version)
            spaces = Spaces(one.spaces, one.handle.output, one.scored_in)
            self.check(one.request, spaces, one.handle.output, one.sample)
            assert one.turns < 5 or one.handle.done, f"{one.request} was cancelled and goes on"
            assert one.is_cancelled or one.handle.output.finish != "cancelled", f"nobody cancelled {one.request}"
        self.requests = [one for one in self.requests if not one.handle.done]
        handles = {job.handle for job in [*thread.active.values(), *thread.waiting, *self.engine._inbox.queue]}
        assert all(one.handle in handles for one in self.requests), "a request is lost"

    def _submit(self, ask: dict[str, Any]) -> None:
        """Submits a request of a tenant. Another tenant has a first token once no request begins with it."""
        engine, thread, prompt = self.engine, self.engine._thread, ask["prompt"]
        jobs = [*thread.active.values(), *thread.waiting, *engine._inbox.queue]
        is_bad = not prompt or max(prompt) >= VOCAB
        salt = None
        if not is_bad:
            begun = [job for job in jobs if job.tokens[0] == prompt[0]]
            salt = f"salt {ask['salt']}" if self.config.salts else None
            if begun and salt is not None:
                salt = begun[0].salt
            elif not begun and salt is None:
                self.tenant_of[prompt[0]] = ask["space"], None
        space = 0 if salt or is_bad else self.tenant_of[prompt[0]][0]
        request = self.described(ask, namespace=space)
        full = len(engine._inbox.queue) + request.samples > WAITING
        try:
            handle = engine.submit(request, salt=salt, timeout=None if ask["timeout"] else 1e6)
        except QueueFull:
            assert full
            self.tally["queue full"] += 1
            return
        except ValueError as error:
            if not is_bad:
                raise
            self.tally["refused by the engine"] += str(error).startswith("prompt: got")
            return
        assert not full and not is_bad
        if salt is not None:
            self._note_salt(salt, handle.job.namespace)
            self.tenant_of[prompt[0]] = 0, salt
        self.space_of[prompt[0]] = handle.job.namespace
        thread.model = thread.driver._model = self.model
        thread.driver._options = dataclasses.replace(thread.driver._options, drafter=self.drafter)
        self.requests += [Sent(request, one, sample) for sample, one in enumerate(handle.samples)]

    def _note_salt(self, salt: str, number: int) -> None:
        """Requires the same number for a salt, unless nothing has its earlier number any more."""
        salt = salt, self.engine._inbox.weights
        before = self.numbers.get(salt, number)
        used = {node[0] for node in self.mirror.nodes.values()}
        assert before == number or before not in used, f"{salt} has number {number}, and blocks have {before}"
        self.tally["lent anew"] += before != number
        self.numbers[salt] = number

    def _close(self, request: dict[str, Any]) -> None:
        """Ends the engine, in the middle or idle. Its cache goes on."""
        del request
        if self.engine is None:
            return
        self.mirror, self.away.is_away = self.published, False
        thread, self.engine, self.change = self.engine._thread, None, None
        self.give(thread.driver)
        thread._end()
        self.rows = {}
        self.put(thread.last)
        assert self.away.mirror.index == self.mirror.index, "a listener has another index at the end"
        assert all(one.handle.done for one in self.requests)
        self.tally["closed in the middle"] += bool(self.requests)
        self.requests = []


def penalized(path: Sequence[int], num_prompt: int, name: int, state: Penalties | None) -> np.ndarray:
    """The logits [V] of `Chain` after a path, which has this name, with penalties in plain Python."""
    logits = np.zeros(VOCAB)
    logits[name] = 1.0
    if state is None:
        return logits
    for token, value in zip(state.bias_tokens.tolist(), state.bias.tolist(), strict=True):
        if token >= 0:
            logits[token] += value
    for token in set(path):
        logits[token] *= state.repetition if logits[token] < 0 else 1 / state.repetition
    answer = path[num_prompt:]
    for token in set(answer):
        logits[token] -= state.frequency * answer.count(token) + state.presence
    return logits


class Replicated:
    """Replicas on two devices, each a `Served`. Their bytes are compared at each of their turns."""

    def __init__(self, config: Serves, faults: Faults):
        self.lives, self.devices = list[Served](), jax.devices()[:2]
        for device in self.devices:
            with jax.default_device(device):
                self.lives.append(Served(config, faults))
        first, self.patch = self.lives[0], pytest.MonkeyPatch()
        self.tally = first.tally
        self.replicas = Replicas(first.model, first.spec, self.devices)
        self.clients, self.is_away = [Away(Mirror()) for _ in self.lives], False
        send, recover = replicas._Run._send, replica.Replica.recover

        def sent(run: Any, number: int, events: Any) -> None:
            self.lives[number].follow(events)
            send(run, number, events)

        def recovered(own: replica.Replica) -> bool:
            is_lost = recover(own)
            if is_lost:
                self.lives[self.replicas._replicas.index(own)].mirror = Mirror()
            self.tally["lost replica"] += is_lost
            return is_lost

        self.patch.setattr(replicas._Run, "_send", sent)
        self.patch.setattr(replica.Replica, "recover", recovered)

    def __enter__(self) -> Replicated:
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()
        for life in reversed(self.lives):
            life.__exit__()

    def hear(self, number: int, events: Any) -> None:
        self.clients[number].is_away = self.is_away
        self.clients[number].listen(events)

    def do(self, request: dict[str, Any]) -> None:
        """Runs requests on the replicas, one of which may fail."""
        first, self.is_away = self.lives[0], request["away"]
        for life in self.lives:
            life.time, life.space_of = life.time + 1, request["space_of"]
        asks = [first.described(ask) for ask in request["asks"]]
        for own, device, life in zip(self.replicas._replicas, self.devices, self.lives, strict=True):
            own.model, own.cache = replica.with_weights(first.model, device), joined(life.cache, life.host)
        self.compare_routes(asks)
        options = dataclasses.replace(first.run_options(steps=STEPS), listener=self.hear)
        first.arm(request["breaks"])
        with warnings.catch_warnings(record=True) as failed:
            warnings.simplefilter("always")
            try:
                outputs = self.replicas.run_batch(asks, options)
            except GenerationInterrupted as error:
                causes = error.__cause__, getattr(error.__cause__, "__cause__", None)
                if not any(isinstance(cause, Broken) for cause in causes):
                    raise
                outputs = error.outputs
        first.arm(None)
        self.tally["failed"] += len(failed)
        for life, cache, client in zip(self.lives, self.replicas.caches, self.clients, strict=True):
            life.put(cache)
            life.rows = {}
            life.inspect()
            life.verify()
            life.poison()
            assert self.is_away or client.mirror.index == life.mirror.index, "a listener has another index"
        first.check_all(asks, outputs)
        self.tally.update(f"by replica {output.replica}" for output in outputs)

    def compare_routes(self, asks: Sequence[Any]) -> None:
        """Compares the cached tokens of each route with the replica's cache, in whole blocks."""
        asks = [one for one in asks if len(one.prompt)]
        for one, route in zip(asks, self.replicas.route(asks), strict=True):
            life, length = self.lives[route.replica], len(one.prompt)
            tokens, namespace = np.zeros(WIDTH, np.int32), np.int32(one.namespace)
            tokens[:length] = one.prompt
            found = life.programs["lookup"](life.cache.state, tokens, np.int32(length), namespace=namespace)
            assert route.tokens == int(found.cached_tokens) // SIZE * SIZE, f"{one} goes to {route}"


class Asks(bytes_machine.Requests):
    """Draws requests to a `Served`."""

    config: Serves

    def __init__(self, seed: int, config: Serves):
        super().__init__(seed, config)
        # Apart, so that a seed's other requests stay as they are.
        self.of_scores, self.of_penalties, self.of_grammars, self.of_changes = (
            np.random.default_rng((seed, number)) for number in (2, 3, 4, 5)
        )

    def ask(self) -> dict[str, Any]:
        prompt = self.text(self.number(1, 13))
        if self.chance(0.03):
            prompt = [[], [VOCAB + 2]][self.number(2)]
        answer = 40 if self.chance(0.05) else self.number(1, 6)
        scores = int(self.of_scores.integers(len(prompt) + 1)) if self.of_scores.random() < 0.1 else None
        if self.config.scheduler.canonical:  # which refuses to score a prompt
            scores = None
        if scores is not None and self.of_scores.random() < 0.3:
            answer = 0
        grammar = int(self.of_grammars.integers(GRAMMARS)) if self.of_grammars.random() < 0.3 else None
        return {
            "grammar": grammar, "prompt": prompt, "max_new_tokens": answer, "prompt_logprobs_from": scores,
            "temperature": float(self.chance(0.3)), "seed": self.number(4), "priority": self.number(-1, 3),
            "stop_tokens": [1] if self.chance(0.2) else [], "samples": self.number(1, 4) if self.chance(0.2) else 1,
            "salt": self.number(SALTS), "space": self.number(TENANTS), "timeout": self.chance(0.5),
            "requested_priority": self.rng.integers(0, 101, 3).tolist(), **self.penalties(),
        }  # fmt: skip

    def penalties(self) -> dict[str, Any]:
        """A min-p, and arguments of `Penalties.of`: multiples of 1/4, whose sums are the same in float32."""
        random = self.of_penalties
        frequency, presence = (random.integers(-2, 3, 2) / 4).tolist() if random.random() < 0.3 else (0.0, 0.0)
        tokens = random.integers(0, VOCAB, int(random.integers(MAX_BIASES + 1))).tolist()
        repetition = random.choice([0.5, 2.0, 4.0]).item() if random.random() < 0.5 else 1.0
        bias = {token: float(random.integers(-3, 4)) / 2 for token in tokens}
        penalties = {"frequency": frequency, "presence": presence, "bias": bias, "repetition": repetition}
        return {"penalties": penalties, "min_p": random.choice([None, 0.125, 0.5, 1.0])}

    def breaks(self, chance: float) -> list[int] | None:
        """The number of a jitted call to fail, and whether it fails before it began."""
        return [self.number(1, 4), self.number(2)] if self.chance(chance) else None

    def draw(self, life: Any) -> dict[str, Any]:
        if isinstance(life, Replicated):
            return {
                "verb": "replicas", "asks": [self.ask() for _ in range(self.number(1, 6))], "away": self.chance(0.2),
                "breaks": self.breaks(0.1), "space_of": [self.number(TENANTS) for _ in range(VOCAB)],
            }  # fmt: skip
        if life.engine is None:
            if not life.rows and self.chance(0.2):
                return {"verb": "open", "poison": self.chance(0.7)}
            request = super().draw(life)
            if request["verb"] == "generate":
                asks = [self.ask() for _ in range(self.number(1, 6))]
                ends = self.number(1, 8) if self.chance(0.5) else None
                request |= {"asks": asks, "ends": ends, "breaks": self.breaks(0.1)}
            return request
        if self.chance(0.03):
            return {"verb": "close", "poison": True}
        return {
            "verb": "turn", "asks": [self.ask() for _ in range(self.number(3) if self.chance(0.5) else 0)],
            "ends": [(self.number(100), self.chance(0.5)) for _ in range(self.number(3) if self.chance(0.2) else 0)],
            "away": self.chance(0.2), "retry": self.chance(0.5), "breaks": self.breaks(0.02), "poison": True,
            "fault": self.number(4) if life.has_host and self.chance(0.3) else None,
            "grammar": self.of_grammars.integers(100, size=2).tolist() if self.of_grammars.random() < 0.1 else None,
            "change": draw_change(self.of_changes, life.engine._thread.is_asleep),
        }  # fmt: skip


FULL = (None, 0)
CONFIGS = {
    "plain": Serves(salts=True, scheduler=SHORT, penalties=True, grammars=True),
    "replicas": Serves(replicas=True),
    "host": Serves(host=8, scheduler=SWAPS, limits={"max_requests": 5}, grammars=True),
    "store": Serves(salts=True, store=True, limits={"steps": 8}),
    "host, store": Serves(host=6, store=True, scheduler=SHORT),
    "backups": Serves(
        host=10,
        scheduler=dataclasses.replace(SWAPS, stop_before_loss=True),
        limits={"max_requests": 5},
        options={"backups": True},
    ),
    "backups, store": Serves(host=8, store=True, scheduler=SHORT, options={"backups": True}),
    "canonical": Serves(scheduler=dataclasses.replace(AMPLE, canonical=True), penalties=True, grammars=True),
    "windows, int8": Serves(
        (FULL, (6, 1)), dtype="int8", policy=priority(), options={"retention": True}, limits={"num_ranges": 2}
    ),
    "drafts": Serves(scheduler=SHORT, penalties=True, grammars=True, drafts=True),
    "drafts, host": Serves(host=8, scheduler=SWAPS, limits={"max_requests": 5}, drafts=True),
    "drafts, windows, int8": Serves((FULL, (6, 1)), dtype="int8", drafts=True),
    "drafts, recurrent, latents": Serves((FULL, bytes_machine.RECURRENT, bytes_machine.LATENT), drafts=True),
    "recurrent, host": Serves((FULL, bytes_machine.RECURRENT, bytes_machine.LATENT), host=5, scheduler=SHORT),
}

if __name__ == "__main__":
    bytes_machine.main(CONFIGS)
