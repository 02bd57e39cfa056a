# SPDX-License-Identifier: Apache-2.0
"""Tools of many tests to drive a cache: jitted verbs, shared specs, padding, processes, and `Driver`."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import numpy as np

import kvjax
import kvjax.stores
from kvjax import Events, LayerSpec, Status
from kvjax.checks import static_options
from kvjax.testing import SMALL
from kvjax.testing.trial import verify_order

ROOT = pathlib.Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
# Seconds that a process started by a test may take, enough for a busy machine. One that takes longer hangs.
TIMEOUT = float(os.environ.get("KVJAX_TEST_TIMEOUT", "600"))

# Tests that need no shape of their own use these, and so share compiled programs.
PLAIN = SMALL
EXTRA = dataclasses.replace(PLAIN, extra_ids=True)
RETENTION = dataclasses.replace(PLAIN, retention=True)
TIERS = kvjax.make_spec(
    [LayerSpec(1, 4), LayerSpec(1, 4, window=8, sink_tokens=2)], num_blocks=12, max_seqs=4, max_length=24,
    block_size=4, num_host_blocks={None: 10, 8: 8},
)  # fmt: skip
BOTH = ("device", "host")
MOST = 6  # tokens that `Driver.grow` asks for, per row

HOMES = (kvjax, kvjax.tiers, kvjax.stores, kvjax.pools, kvjax.debug, kvjax.events, kvjax.serving)


# Requests and options of a run, from keyword arguments.
RUN_OPTIONS = {field.name for field in dataclasses.fields(kvjax.serving.RunOptions)}


def _described(prompts: Any, options: dict[str, Any]) -> tuple[list[kvjax.serving.Request], kvjax.serving.RunOptions]:
    """The requests and the options of a run. `chunk`, `k` and `canonical` belong to its scheduler."""
    of_scheduler = {name: options.pop(name) for name in ("chunk", "k", "canonical") if name in options}
    if of_scheduler:
        scheduler = options.get("scheduler") or kvjax.serving.Scheduler()
        options["scheduler"] = dataclasses.replace(scheduler, **of_scheduler)
    of_run = {name: options.pop(name) for name in RUN_OPTIONS & options.keys()}
    return kvjax.serving.make_requests(prompts, **options), kvjax.serving.RunOptions(**of_run)


def run_batch(model: Any, cache: Any, prompts: Any, *, progress: Any = None, **options: Any) -> Any:
    """`kvjax.run_batch` of prompts."""
    return kvjax.run_batch(model, cache, *_described(prompts, options), progress=progress)


def stream(model: Any, cache: Any, prompts: Any, **options: Any) -> Any:
    """`kvjax.stream` of prompts."""
    return kvjax.stream(model, cache, *_described(prompts, options))


def engine(model: Any, cache: Any, **options: Any) -> kvjax.serving.Engine:
    """An engine with these options."""
    of_run = {name: options.pop(name) for name in RUN_OPTIONS & options.keys()}
    return kvjax.serving.Engine(model, cache, kvjax.serving.RunOptions(**of_run), **options)


def ask(engine: Any, prompt: Any, *, salt: str | None = None, timeout: float | None = None, **fields: Any) -> Any:
    """Submits a prompt to an engine."""
    return engine.submit(kvjax.serving.Request(prompt, **fields), salt=salt, timeout=timeout)


def verb(name: str) -> Callable[..., Any]:
    """A verb or another function of a state, by its name, from the module which exports it."""
    return next(getattr(home, name) for home in HOMES if hasattr(home, name))


@functools.cache
def static(name: str) -> tuple[str, ...]:
    """The static options of a verb, by its name."""
    return static_options(verb(name))


class Verbs(dict[str, Callable[..., Any]]):
    """Jitted verbs by name, each made at its first use. They compile in half the time, and run slowly.

    Attributes:
      find: the function with a name.
    """

    def __init__(self, find: Callable[[str], Callable[..., Any]]):
        super().__init__()
        self.find = find

    def __missing__(self, name: str) -> Callable[..., Any]:
        quick = {"xla_backend_optimization_level": 0}
        self[name] = jax.jit(self.find(name), static_argnames=static(name), compiler_options=quick)
        return self[name]


VERBS = Verbs(verb)
METHODS = Verbs(lambda name: getattr(kvjax.Cache, name))


def padded(values: Any, width: int, fill: Any = 0) -> np.ndarray:
    """i32[width]: the values, then `fill`, which may be several numbers, again and again."""
    values = np.asarray(values, np.int32)
    return np.concatenate([values, np.resize(np.asarray(fill, np.int32), width - len(values))])


def lines(texts: Mapping[int, Sequence[int]], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """i32[rows, width] and i32[rows]: the tokens of the texts {row: text}, padded, and their lengths."""
    row_texts = [texts.get(row, ()) for row in range(rows)]
    return np.stack([padded(text, width) for text in row_texts]), np.array([len(text) for text in row_texts], np.int32)


class Driver:
    """A cache whose verbs are called by name, with its events. It is verified after each verb.

    `check` has to pass, the events have to give the index, and a refused verb may change nothing. The requests of each
    verb have the same width, so the requests of a file share a program. A prompt may be a token longer than a row.

    Attributes:
      cache: a `CacheState`, a `Cache` or a `TieredCache`. All have the same verbs.
      events: events of the last verb.
      recorded: all events, decoded.
      mirror: the index by all events.
      totals: the totals of all events.
    """

    def __init__(self, cache: Any, verbs: Mapping[str, Callable[..., Any]] | None = None, *, verified: bool = True):
        """Begins with a cache, which may contain blocks. `verified` is False if a test verifies it in another way."""
        self.cache, self.verified = cache, verified
        self.verbs = (METHODS if isinstance(cache, kvjax.Cache) else VERBS) if verbs is None else verbs
        self.mirror = kvjax.fold(kvjax.events.snapshot(self.state))
        self.totals = kvjax.events.Totals()
        self.events: Any = None
        self.recorded: list[dict[str, Any]] = []

    @property
    def state(self) -> Any:
        return getattr(self.cache, "state", self.cache)

    def ask(self, verb: str, *args: Any, complete: bool = True, **options: Any) -> Events:
        """Calls a verb, which may be refused, and completes the moves between tiers which it orders."""
        args = tuple(map(_typed, args))
        options = {name: value if name in static(verb) else _typed(value) for name, value in options.items()}
        before = jax.tree.map(np.array, self.state) if self.verified else None  # copies: the cache may be donated
        if isinstance(self.cache, kvjax.tiers.TieredCache):
            self.cache, events = getattr(self.cache, verb)(*args, **options)
        else:
            self.cache, events = self.verbs[verb](self.cache, *args, **options)
        self.follow(events)
        if self.verified:
            self.verify(verb, before)
        if complete and events.transfer is not None and self.cache is self.state:
            self.cache, done = self.verbs["complete"](self.cache, events.transfer, True)
            self.follow(done)
            if self.verified:
                self.verify("complete", before)
            self.events = events
        return events

    def do(self, verb: str, *args: Any, **options: Any) -> Events:
        """Calls a verb, and requires success."""
        events = self.ask(verb, *args, **options)
        assert bool(events.ok), (verb, names(events))
        return events

    def follow(self, events: Events) -> None:
        decoded = kvjax.to_list(events)
        self.mirror, self.totals = kvjax.fold(decoded, self.mirror), self.totals.add(events)
        self.events = events
        self.recorded += decoded

    def verify(self, verb: str, before: Any) -> None:
        """Verifies the cache after the last verb, which was called in the state `before`."""
        kvjax.check(self.state)
        verify_order(verb, self.events)
        assert kvjax.events.index_of(self.state) == self.mirror.index, "the events do not give the index"
        refused = np.asarray(self.events.status) != Status.OK
        if verb != "complete" and (refused.all() or (verb == "extend" and refused.any())):
            chex.assert_trees_all_equal(before, self.state)
            assert not np.any(self.events.kind) and not np.any(self.events.cached) and not np.any(self.events.queried)

    # Requests.

    def status(self, verb: str, *args: Any, **options: Any) -> list[str]:
        """Calls a verb, and returns the status of each row."""
        return names(self.ask(verb, *args, **options))

    def admit(self, seq: int, tokens: Sequence[int], namespace: int = 0, **options: Any) -> list[str]:
        """Admits a prompt. The padding after it repeats its tokens, which no verb may read."""
        width = self.state.spec.max_length + 1
        if self.state.spec.extra_ids:
            options = {"extra_ids": np.zeros(width, np.int32), **options}
        return self.status("admit", seq, padded(tokens, width, tokens), len(tokens), namespace=namespace, **options)

    def write(self, texts: Mapping[int, Sequence[int]], **options: Any) -> list[str]:
        """Commits tokens {row: text}."""
        tokens, counts = lines(texts, self.state.spec.max_seqs, self.state.spec.max_length)
        if self.state.spec.extra_ids:
            options = {"extra_ids": np.zeros_like(tokens), **options}
        return self.status("commit", tokens, counts, **options)

    def grow(self, *counts: int, **options: Any) -> list[str]:
        """Reserves slots for so many more tokens of each row."""
        num_tokens = np.array(counts, np.int32)
        return self.status("extend", num_tokens > 0, num_tokens, max_tokens=MOST, **options)

    def start(self, seq: int, tokens: Sequence[int], **options: Any) -> int:
        """Admits a prompt and commits its uncached part. Returns the number of cached tokens."""
        assert self.admit(seq, tokens, **options) == ["OK"], names(self.events)
        cached = int(self.state.seqs.committed[seq])
        assert set(self.write({seq: tokens[cached:]})) == {"OK"}, names(self.events)
        return cached

    def found(self, tokens: Sequence[int], **options: Any) -> int:
        """The number of tokens which `admit` would find."""
        text, length = padded(tokens, self.state.spec.max_length + 1, tokens), np.int32(len(tokens))
        cache = self.cache if self.verbs is METHODS else self.state
        return int(self.verbs["lookup"](cache, text, length, namespace=np.int32(0), **options).cached_tokens)


def table(driver: Driver, seq: int) -> list[int]:
    """The blocks of a row."""
    blocks = np.asarray(driver.state.groups[0].table[seq])
    return blocks[blocks >= 0].tolist()


def holders(driver: Driver, seq: int) -> list[int]:
    """The number of holders of each block of a row."""
    return np.asarray(driver.state.groups[0].blocks.refcount)[table(driver, seq)].tolist()


def names(events: Events) -> list[str]:
    """The status of each row by its name."""
    return [Status(status).name for status in np.asarray(events.status).tolist()]


def _typed(value: Any) -> Any:
    """Python's integers as i32, because jit would give them a type of their own."""
    return np.int32(value) if type(value) is int else value


def output_of(*command: str, **environment: str) -> str:
    """The output of a process which runs in the checkout, on the CPU, and succeeds."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout
