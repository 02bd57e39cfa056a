# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of generation: a model that reads the cached K/V, a spec for each kind of cache, and ways to run.

Up to 8 prompts with `OPTIONS` share one program for each spec, by any of the ways. It takes long to compile.
"""

import functools
import gc
import itertools
import signal

import jax
import numpy as np
import pytest

import kvjax
from kvjax.pools import host as host_pool
from kvjax.serving import Scheduler, driver, host_tier
from kvjax.testing.trial import verify_order
from tests import drive
from tests.drive import VERBS, padded
from tests.oracle.bytes_machine import SIZE, TWO, VOCAB, Chain, name_of

MODEL = Chain(np.full(VOCAB, name_of(0, ()), np.int32), TWO)
OPTIONS = {"max_new_tokens": 6, "chunk": 8, "steps": 4}
LAYERS = {"plain": (None, None), "windows": (None, 6)}
BLOCKS, HOST, ROWS, LENGTH, BEFORE = 16, 12, 3, 32, 7


@functools.cache
def make_spec(kind="plain", host=0):
    """A spec of three rows of 32 tokens, with `host` blocks on the second tier."""
    layers = [kvjax.LayerSpec(1, 2, window) for window in LAYERS[kind]]
    return kvjax.make_spec(
        layers, num_blocks=BLOCKS, num_host_blocks=host, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE,
        dtype="float32",
    )  # fmt: skip


def make_cache(num_blocks=BLOCKS, host=0, kind="plain"):
    """An empty cache. Its number of blocks in use is traced, so that it shares programs."""
    create = kvjax.tiers.TieredCache.create if host else kvjax.Cache.create
    return create(make_spec(kind, host), num_blocks=np.int32(num_blocks))


def start(kind="plain", host=0):
    """A cache with two rows in use, which are not the generation's. So its prompts run one at a time."""
    cache = make_cache(BLOCKS - 4 if host else BLOCKS, host, kind)
    admit = kvjax.tiers.TieredCache.admit if host else ADMIT
    rows, tokens = np.array([1, 2], np.int32), np.zeros((2, 16), np.int32) + np.array([[1], [2]], np.int32)
    return admit(
        cache, rows, tokens, np.full(2, BEFORE, np.int32), namespace=np.zeros(2, np.int32), retention=None,
        reserve_tokens=None if kind == "plain" else OPTIONS["chunk"], now=np.int32(0),
    )[0]  # fmt: skip


ADMIT = jax.jit(kvjax.Cache.admit, static_argnames="reserve_tokens", donate_argnums=0)
RELEASE = jax.jit(kvjax.Cache.release, donate_argnums=0)


def state_of(cache):
    return cache.state


def prompts_of(number):
    """Two prompts of 13 tokens, which share no blocks with those of another number; numbers go up to 39."""
    pair = (2 * number, 2 * number + 1)
    return [[*(one // VOCAB**digit % VOCAB for digit in range(SIZE)), 1, 2, 0, 2, 1, 0, 0, 1, 2] for one in pair]


def assert_chained(prompts, outputs):
    """Asserts that each token is the model's choice after its prompt, so that no byte that it read was wrong."""
    for prompt, output in zip(prompts, outputs, strict=True):
        path = tuple(prompt)
        for token in output.tokens:
            assert token == name_of(0, path) % VOCAB
            path += (token,)


def assert_whole(cache, events, prompts=(), outputs=()):
    """Asserts that the cache is sound, just the generation's rows are released, and their tokens are found."""
    state = state_of(cache)
    kvjax.check(state)
    assert state.seqs.length.tolist() == [0, BEFORE, BEFORE]
    assert kvjax.fold(events).index == kvjax.events.index_of(state)
    assert_chained(prompts, outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.tokens:
            text = [*prompt, *output.tokens]
            found = VERBS["lookup"](state, padded(text, LENGTH), np.int32(len(text)))
            assert int(found.cached_tokens) == len(text) - 1  # the last token is chosen and not computed


# Three ways to run prompts.


def together(cache, prompts, model=MODEL, **options):
    return kvjax.generate(model, cache, prompts, **OPTIONS, **options)


def spread(cache, prompts, **options):
    """`generate`, by `stream`."""
    events, progress = [], None
    try:
        for progress in drive.stream(MODEL, cache, prompts, **OPTIONS, **options):
            events += progress.events
    except kvjax.serving.GenerationInterrupted as error:
        error.events[:0] = events
        raise
    return progress.outputs, progress.cache, events


def batched(cache, prompts, **options):
    options = {"max_new_tokens": OPTIONS["max_new_tokens"], "steps": OPTIONS["steps"], **options}
    return drive.run_batch(MODEL, cache, prompts, scheduler=Scheduler(chunk=OPTIONS["chunk"]), **options)


WAYS = (together, spread, batched)


# What happens meanwhile.


def press():
    signal.raise_signal(signal.SIGINT)


def fail():
    raise MemoryError("no memory")


@pytest.fixture(autouse=True)
def ctrl_c_acts():
    """Lets Ctrl-C act, because a shell's background jobs begin with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def count_swaps(monkeypatch):
    """For "swap_out" and "swap_in" a list that grows with each call, by whether it was done."""
    moved = {"swap_out": [], "swap_in": []}

    def counting(method, calls):
        def counted(cache, row, **options):
            cache, events = method(cache, row, **options)
            calls.append(bool(events.ok))
            return cache, events

        return counted

    for name, calls in moved.items():
        method = getattr(kvjax.tiers.TieredCache, name)
        monkeypatch.setattr(kvjax.tiers.TieredCache, name, counting(method, calls))
    return moved


class Calls:
    """The jitted calls of generations. Something may happen before or after one of them."""

    def __init__(self, monkeypatch, inner=False):
        self.count, self.at, self.before, self.after = 0, 0, None, None
        targets = [(driver, "apply"), (driver, "turn"), (host_tier, "_has_row")]
        targets += [(kvjax.tiers.TieredCache, "admit"), (kvjax.tiers.TieredCache, "watermark")]
        if inner:
            targets += [(kvjax.tiered, "_finish"), (host_pool, "_copy")]
        for where, name in targets:
            monkeypatch.setattr(where, name, self.wrap(getattr(where, name)))

    def wrap(self, program):
        def call(*args, **kwargs):
            self.count += 1
            is_due = self.count == self.at
            if is_due and self.before:
                self.before()
            result = program(*args, **kwargs)
            if is_due and self.after:
                self.after()
            return result

        return functools.update_wrapper(call, program)  # with `lower`, which compiles and calls nothing

    def each(self, before=None, after=None):
        """Yields the number of each call in turn. The caller then runs a generation, until one has fewer calls."""
        self.before, self.after = before, after
        for self.at in itertools.count(1):
            self.count = 0
            yield self.at
            if self.count < self.at:
                break
        self.at = 0


class Listener:
    """A listener that acts at some of its calls, after it has collected the events.

    Attributes:
      events: all events, decoded.
      totals: the totals of all events.
      calls: the number of its calls.
    """

    def __init__(self, do=None, at=()):
        self.do, self.at = do, at
        self.events, self.totals, self.calls = [], kvjax.events.Totals(), 0

    def __call__(self, events):
        assert not any(x.is_deleted() for x in jax.tree.leaves(events) if isinstance(x, jax.Array))
        self.calls += 1
        if isinstance(events, kvjax.Events):  # of one transition, where a log has many
            verify_order("", events)
        self.events += kvjax.to_list(events)
        self.totals = self.totals.add(events)
        if self.calls in self.at:
            self.do()


def collect_in_a_trace(streams):
    """Drops the last reference to streams while a function is traced."""

    @jax.jit
    def traced(x):
        streams.clear()
        gc.collect()
        return x + 1

    assert int(traced(np.int32(1))) == 2
