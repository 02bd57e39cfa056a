# SPDX-License-Identifier: Apache-2.0
"""Random requests to the library's scheduler and to the scheduler in plain Python. Both must do the same in every step.

The model's K/V identify their tokens (`bytes_machine.Chain`), and the choices depend on them: a wrong byte gives a
wrong token. After each step every readable byte is compared, and all others are NaN (`bytes_machine.Life`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import Cache, CacheSpec, Status
from kvjax.events.log import init_log
from kvjax.serving.capacity import worst_step
from kvjax.serving.options import Scheduler as Options
from kvjax.serving.requests import Stage, init_serving, results
from kvjax.serving.serve import serve_step
from kvjax.serving.submit import cancel, drain, submit
from tests import drive
from tests.oracle.bytes_machine import (
    LATENT,
    RECURRENT,
    SIZE,
    TWO,
    VOCAB,
    Chain,
    Config,
    Faults,
    Life,
    Row,
    name_of,
)  # fmt: skip
from tests.oracle.cache import Oracle
from tests.oracle.events import named, without_copied_paths
from tests.oracle.requests import Ask, Finish, Report, Request
from tests.oracle.requests import Options as OracleOptions
from tests.oracle.scheduler import Scheduler

ROWS, COLUMNS, SLOTS, BLOCKS, LINE, AT_ONCE = 4, 5, 7, 24, 64, 3
LAYERS = {"full": ((None, 0), (None, 0)), "windows": ((None, 0), (6, 1)), "recurrent": (LATENT, RECURRENT)}
TENANTS = np.array([0, 1, 0], np.int32)  # the namespace of a prompt by its first token, for the model
LOG = 4_000
MODEL = Chain(np.array([name_of(tenant, ()) for tenant in TENANTS.tolist()], np.int32), TWO)

OPTIONS = {
    "num_tokens": Options(reserve="num_tokens", chunk=6, chunk_rows=2, k_waiting=2, max_deferrals=3, max_skips=2),
    "max_tokens": Options(chunk=6, chunk_rows=3, k=3, k_waiting=3, chunks="equal", max_deferrals=4, coalesce=2),
    "batch": Options(reserve="batch", chunk=20, chunk_rows=4, k=1, max_skips=1, wait_for_prefix=False),
    "tight": Options(reserve="num_tokens", chunk=3, chunk_rows=1, budget=6, k=4, watermark=1, max_deferrals=2),
    "canonical": Options(canonical=True, chunk=2 * SIZE, k_waiting=2, max_deferrals=3, max_skips=2),
}
COUNTS = (COLUMNS, COLUMNS + 3, BLOCKS)  # blocks: enough for one row, some more, plenty
SNAPSHOTS = COLUMNS + 3

_submit = jax.jit(submit, static_argnames="scheduler")
_cancel, _drain = jax.jit(cancel), jax.jit(drain)


@functools.cache
def program(options: Options, layers: str = "full") -> Any:
    """A jitted step with these options. There is a program for each kind of cache, so a test can count its compiles."""
    del layers
    step = functools.partial(serve_step, scheduler=options)
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


def config(layers: str) -> Config:
    """The options of the caches."""
    return Config(layers=LAYERS[layers], rows=ROWS, width=COLUMNS * SIZE, blocks=BLOCKS)


def choose(request: Request, position: int) -> int:
    """The model's greedy choice."""
    assert position == len(request.tokens)
    return name_of(request.namespace, tuple(request.tokens)) % VOCAB


def alone(request: Request) -> list[int]:
    """A request's prompt and the model's whole output, if it ran by itself."""
    whole = dataclasses.replace(request, tokens=request.tokens[: request.prompt])
    while whole.num_tokens < request.max_tokens:
        if whole.num_tokens > request.prompt and whole.tokens[-1] in request.stop:
            break
        whole.tokens.append(choose(whole, whole.num_tokens))
    return whole.tokens


def oracle_options(options: Options) -> OracleOptions:
    """The same options for the oracle, with its own order."""
    names = {field.name for field in dataclasses.fields(OracleOptions)} - {"k", "order"}
    return OracleOptions(k=options.k or SIZE, **{name: getattr(options, name) for name in names})


def make_cache(spec: CacheSpec, num_blocks: int) -> tuple[Cache, int]:
    """An empty cache with `num_blocks` blocks, and its number of snapshots: few, to have them evicted often."""
    cache = Cache.create(spec, num_blocks=np.int32(num_blocks))
    if not spec.has_recurrent:
        return cache, 0
    snapshots = min(num_blocks, SNAPSHOTS)
    groups = *cache.state.groups[:-1], kvjax.init(spec, num_blocks=np.int32(snapshots)).groups[-1]
    return cache.replace(state=cache.state.replace(groups=groups)), snapshots


class Both:
    """The library's scheduler and the oracle's.

    Attributes:
      tally: a count of each kind of happening.
    """

    def __init__(self, options: Options, layers: str, num_blocks: int, seed: int):
        self.options, self.layers, self.life = options, layers, Life(config(layers), Faults())
        self.spec, self.rng = self.life.spec, np.random.default_rng(seed)
        self.model = MODEL.replace(layers=LAYERS[layers])
        self.life.cache, snapshots = make_cache(self.spec, num_blocks)
        serving = init_serving(self.life.cache, [COLUMNS * SIZE + 1] * SLOTS)
        self.serving = jax.device_put(serving, jax.devices()[0])  # as later, or it is another program
        others = [group for group in self.spec.groups[1:] if not group.recurrent]
        windows = [(group.window, group.sink_tokens, num_blocks) for group in others]
        oracle = Oracle(
            num_blocks, SIZE, ROWS, COLUMNS, self.spec.partial_reuse, windows=windows,
            recurrent=snapshots,
        )  # fmt: skip
        self.oracle = Scheduler(oracle, oracle_options(options), choose, [COLUMNS * SIZE + 1] * SLOTS)
        self.documents = self.rng.integers(0, VOCAB, (3, COLUMNS * SIZE)).tolist()
        self.tally: collections.Counter[str] = collections.Counter()

    @property
    def scheduler(self) -> Scheduler:
        """The oracle's, as in `histories.Watch`."""
        return self.oracle

    def run(self, steps: int) -> None:
        """Random requests come and go, and steps run."""
        for _ in range(steps):
            kind = str(self.rng.choice(["submit", "cancel", "drain", "step"], p=(0.25, 0.06, 0.12, 0.57)))
            if kind == "submit":
                self.submit(*self.draw())
            elif kind == "cancel":  # perhaps a request that has left its slot
                request = self.oracle.requests[self.rng.integers(SLOTS)]
                self.cancel(request, request.generation - int(self.rng.random() < 0.1))
            else:
                getattr(self, kind)()

    def finish(self) -> None:
        """Runs steps until nothing is left to do."""
        for _ in range(400):
            if all(request.stage in (Stage.EMPTY, Stage.DONE, Stage.CANCELLED) for request in self.oracle.requests):
                break
            self.step()
        else:
            raise AssertionError("requests do not end")
        self.step()  # the last rows are released
        self.drain()
        assert not np.asarray(self.serving.cache.state.seqs.length).any()

    # Requests.

    def draw(self) -> list[Ask]:
        """A few requests to submit together. They often begin alike or are samples. Some cannot be accepted."""
        batch: list[Ask] = []
        for number in range(AT_ONCE):
            tokens, lead = self.prompt(), -1
            new = int(self.rng.integers(0 if self.rng.random() < 0.1 else 1, 9))
            if number and self.rng.random() < 0.3:
                lead = int(self.rng.integers(-1, number + 1)) if self.rng.random() < 0.1 else 0
                tokens = batch[max(min(lead, number - 1), 0)].tokens
            stop = (1,) if self.rng.random() < 0.3 else ()
            options = {"priority": int(self.rng.integers(3)), "namespace": int(TENANTS[tokens[0]]) if tokens else 0}
            batch.append(Ask(tokens, len(tokens) + new, **options, stop=stop, sample_of=lead))
        return batch

    def submit(self, *asks: Ask) -> list[Request | None]:
        """Submits requests at once, up to AT_ONCE. Returns the oracle's requests, with None for a refusal."""
        batch = [*asks, *[Ask([], 0)] * (AT_ONCE - len(asks))]
        wanted = self.oracle.submit(batch)
        line = drive.padded([token for ask in batch for token in ask.tokens], LINE)

        def column(values: Iterable[int]) -> np.ndarray:
            return np.array(list(values), np.int32)

        lengths = column(len(ask.tokens) for ask in batch)
        self.serving, *answers = _submit(
            self.serving, line, lengths, column(ask.max_tokens for ask in batch) - lengths, scheduler=self.options,
            priority=column(ask.priority for ask in batch), namespace=column(ask.namespace for ask in batch),
            sample_of=column(ask.sample_of for ask in batch),
            stop_tokens=np.array([[*ask.stop, -1][:1] for ask in batch], np.int32),
        )  # fmt: skip
        assert np.stack(answers, axis=1).tolist() == [list(map(int, answer)) for answer in wanted]
        statuses = [status for status, *_ in wanted]
        self.tally.update(f"submit {status.name}" for status in statuses)
        self.tally["sample"] += sum(
            ask.sample_of >= 0 and s == Status.OK for ask, s in zip(batch, statuses, strict=True)
        )
        self.agree()
        return [self.oracle.requests[slot] if s == Status.OK else None for s, slot, _ in wanted[: len(asks)]]

    def prompt(self) -> list[int]:
        """Tokens which mostly begin like a document, and mostly do not fill a row."""
        length = int(self.rng.integers(0 if self.rng.random() < 0.1 else 1, COLUMNS * SIZE - 3))
        shared = int(self.rng.integers(length + 1)) if self.rng.random() < 0.7 else length
        document = self.documents[self.rng.integers(3)]
        return [*document[:shared], *self.rng.integers(0, VOCAB, length - shared).tolist()]

    def cancel(self, request: Request, generation: int | None = None) -> bool:
        """Cancels a request, or a request of another generation in its slot. Returns False if it is too late."""
        slot, generation = request.slot, request.generation if generation is None else generation
        wanted = self.oracle.cancel(slot, generation)
        self.serving, status = _cancel(self.serving, np.array([slot], np.int32), np.array([generation], np.int32))
        assert int(status[0]) == wanted
        self.tally["cancelled"] += wanted == Status.OK
        self.agree()
        return wanted == Status.OK

    def drain(self) -> None:
        found = results(self.serving)
        self.serving = _drain(self.serving)
        for request in self.oracle.drain():
            output = found[request.slot, request.generation]
            assert output.tokens == request.tokens[request.prompt :]
            assert (output.finish, output.cached_tokens) == (request.finish.name.lower(), request.cached)
            assert output.preemptions == request.preemptions
            whole = alone(request)
            assert request.tokens == whole[: request.num_tokens]
            assert request.tokens == whole or request.finish in (Finish.CANCELLED, Finish.NO_BLOCKS)
            self.tally[f"finish {request.finish.name}"] += 1
        self.agree()

    def step(self) -> Report:
        """Runs a step of both. Returns the report."""
        log = init_log(LOG, SIZE)
        self.serving, log, served = program(self.options, self.layers)(self.model, self.serving, log)
        wanted, served = self.oracle.step(LOG - worst_step(self.spec, self.options)), jax.device_get(served)
        slots = served.admitted.slots
        admitted = np.stack([slots, served.admitted.rows, served.admitted.cached], axis=1)[slots >= 0].tolist()
        assert [tuple(one) for one in admitted] == wanted.admitted
        assert served.retired.preempted[served.retired.preempted >= 0].tolist() == wanted.preempted
        assert np.flatnonzero(served.retired.released).tolist() == sorted(set(wanted.released))
        assert (int(served.n), bool(served.mixed)) == (wanted.n, wanted.mixed)
        chunks = zip(served.chunks.rows.tolist(), served.chunks.count.tolist(), strict=True)
        assert [(row, number) for row, number in chunks if number] == list(wanted.chunks.items())
        chosen = {row: tokens[tokens >= 0].tolist() for row, tokens in enumerate(served.chosen.tokens)}
        assert {row: tokens for row, tokens in chosen.items() if tokens} == wanted.chosen
        decoded = kvjax.to_list(log)
        assert named(decoded, self.life.mirror) == without_copied_paths(self.oracle.events, SIZE)
        self.life.follow(decoded)
        self.tally.update(event["kind"] for event in decoded)
        self.tally.update(admitted=len(admitted), preempted=len(wanted.preempted), mixed=wanted.mixed)
        self.tally.update(out_of_blocks=len(wanted.out_of_blocks), refused=wanted.n == 0)
        self.tally[f"n={wanted.n}"] += 1
        self.agree()
        return wanted

    def agree(self) -> None:
        """Asserts a sound state, the same in both."""
        serving = jax.device_get(self.serving)
        state, requests, oracle = serving.cache.state, serving.requests, self.oracle
        assert state.seqs.length.tolist() == [row.length for row in oracle.cache.rows]
        assert state.seqs.committed.tolist() == [len(row.tokens) for row in oracle.cache.rows]
        for number, group in enumerate(state.groups):
            counts = oracle.cache.counts(number)
            assert (int(group.num_empty), int(group.num_cached)) == (counts["empty"], counts["cached"])
        assert int(serving.steps) == oracle.steps
        assert serving.row.tolist() == [-1 if request is None else request.slot for request in oracle.rows]
        assert np.flatnonzero(serving.leads).tolist() == sorted(oracle.leads)
        assert np.flatnonzero(serving.out_of_blocks).tolist() == sorted(oracle.out_of_blocks)
        assert serving.skipped_steps.tolist() == oracle.passed
        assert (int(serving.refused), int(serving.chunks_deferred)) == (oracle.refused, oracle.chunks_deferred)
        assert bool(serving.dirty) == oracle.changed
        for slot, request in enumerate(oracle.requests):
            assert (requests.stage[slot], requests.generation[slot]) == (request.stage, request.generation)
            if request.stage == Stage.EMPTY:
                continue
            start = requests.start[slot]
            assert requests.text[start : start + requests.num_tokens[slot]].tolist() == request.tokens
            assert request.over or requests.parent[slot] == (request.parent.slot if request.parent else -1)
            for name in ("arrival", "passed", "submitted", "first_token", "ended", "preemptions"):
                assert getattr(requests, name)[slot] == getattr(request, name), name
        self.verify_bytes()

    def verify_bytes(self) -> None:
        """Asserts the index by the events, and right bytes wherever a row may read. Makes all other bytes NaN."""
        life, life.cache, life.rows = self.life, self.serving.cache, {}
        for seq, (row, request) in enumerate(zip(self.oracle.cache.rows, self.oracle.rows, strict=True)):
            if row.length:
                assert request is not None
                items = tuple(request.tokens[: len(row.tokens)])
                life.rows[seq] = Row(request.namespace, tuple(request.tokens), items)
        life.inspect()
        life.verify()
        life.poison()
        self.serving = self.serving.replace(cache=life.cache)
