# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of generation: a model, a spec for each kind of cache, and ways to run.

Up to 8 prompts with `OPTIONS` share a program for each spec, in any way to run. It takes long to compile.
"""

import functools
import gc
import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Sampling
from kvjax._arrays import Pytree
from kvjax.pools import host as host_pool
from kvjax.serving import Output, Request, Scheduler, driver, host_tier, prompt_scores
from kvjax.serving.sampling import sample
from kvjax.testing.trial import verify_order
from tests import drive
from tests.drive import VERBS, padded
from tests.poison import poisoned

VOCAB, DIM, NUMBERS = 31, 8, 1000
ROWS, LENGTH, SIZE, BLOCKS, HOST, NEW, BEFORE = 3, 32, 4, 24, 20, 6, 7
WINDOWS = {"plain": (None,), "windows": (None, 6)}
SCHEDULER, STEPS, NUM_STOP_TOKENS, TOP_LOGPROBS = Scheduler(chunk=8), 4, 4, 2
RETAINED = kvjax.Retention.of([(0, 8, 60)])  # every request has one, so that runs share programs
BASE = {"scheduler": SCHEDULER, "steps": STEPS, "top_logprobs": TOP_LOGPROBS}  # of all runs
OPTIONS = {
    "max_new_tokens": NEW, "retention": RETAINED, "chunk": SCHEDULER.chunk, "steps": STEPS,
    "top_logprobs": TOP_LOGPROBS,
}  # fmt: skip


class Attention(Pytree):
    """Layers of attention with random weights, as many as the pools have. A token depends on all before it."""

    embed: jax.Array  # f32[V, D]
    project: jax.Array  # f32[L, 3, D, D]
    head: jax.Array  # f32[D, V]

    @classmethod
    def create(cls):
        rng = np.random.default_rng(0)
        shapes = (VOCAB, DIM), (3, DIM, DIM), (DIM, VOCAB), (3, DIM, DIM)
        embed, first, head, second = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
        return cls(embed, jnp.stack([first, second]), head)

    def inputs(self, tokens, positions):
        """The embeddings f32[..., D]."""
        angles = jnp.multiply.outer(positions.astype(jnp.float32), jnp.arange(1, DIM + 1, dtype=jnp.float32))
        return self.embed[tokens] + jnp.sin(angles)

    def projected(self, layer, x):
        """The queries, keys and values f32[3, ..., D] of a layer."""
        return jnp.einsum("...d,nde->n...e", x, self.project[layer]) * DIM**-0.5

    def __call__(self, tokens, pools, view, *, last):
        x = self.inputs(tokens, view.positions)
        for layer in range(sum(len(pool.layers) for group in pools.spec.groups for pool in group.pools)):
            queries, keys, values = self.projected(layer, x)
            pools = kvjax.write(pools, layer, keys[:, :, None], values[:, :, None], view)
            x = x + kvjax.attend(queries[:, :, None], pools, layer, view)[:, :, 0]
        logits = x @ self.head
        return logits if last is None else logits[jnp.arange(tokens.shape[0]), last], pools

    def dense(self, tokens, windows=WINDOWS["plain"]):
        """The logits f32[T, V] of a whole text i32[T], without a cache."""
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        x = self.inputs(tokens, positions)
        for layer, window in enumerate(windows):
            queries, keys, values = self.projected(layer, x)
            distance = positions[:, None] - positions[None]
            is_seen = (distance >= 0) & (distance < (len(tokens) if window is None else window))
            scores = jnp.where(is_seen, queries @ keys.T * DIM**-0.5, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ values
        return x @ self.head


def successor(tokens, pools, view, *, last):
    """A model which always predicts the next number, and stores nothing."""
    del view
    return jax.nn.one_hot((tokens[jnp.arange(tokens.shape[0]), last] + 1) % NUMBERS, NUMBERS), pools


MODEL = jax.device_put(Attention.create(), jax.local_devices()[0])


@functools.cache
def make_spec(kind="plain", host=0):
    """A spec of three rows of 32 tokens, with `host` blocks on the second tier."""
    layers = [kvjax.LayerSpec(1, DIM, window) for window in WINDOWS[kind]]
    return kvjax.make_spec(
        layers, num_blocks=BLOCKS, num_host_blocks=host, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE,
        dtype="float32", retention=True,
    )  # fmt: skip


def empty(spec, num_blocks=None):
    """An empty cache, with NaN in all its slots.

    The number of blocks in use is traced, and the arrays are committed to their device like arrays left by a run, so
    all runs share programs.
    """
    options = {} if num_blocks is None else {"num_blocks": np.int32(num_blocks)}
    cache = (kvjax.tiers.TieredCache if spec.has_host else kvjax.Cache).create(spec, **options)
    own = cache.cache if spec.has_host else cache
    own = own.replace(pools=poisoned(own.pools))
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), cache.replace(own) if spec.has_host else own)


def make_cache(num_blocks=BLOCKS, host=0, kind="plain"):
    """An empty cache with a spec of this kind."""
    return empty(make_spec(kind, host), num_blocks)


def start(kind="plain", host=0):
    """A cache with two rows in use outside of the generation, so its prompts run in turn."""
    cache = make_cache(12 if host else 16, host, kind)
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


def kind_of(cache):
    return "windows" if len(state_of(cache).spec.groups) > 1 else "plain"


def prompts_of(number):
    """Two prompts of 13 tokens, which share no blocks with prompts of another number. Numbers go up to 39."""
    pair = (2 * number, 2 * number + 1)
    return [[*(one // 3**digit % 3 for digit in range(SIZE)), 1, 2, 0, 2, 1, 0, 0, 1, 2] for one in pair]


def ask(prompt, **fields):
    """A request with the programs of the others."""
    return Request(prompt, **{"max_new_tokens": NEW, "retention": RETAINED} | fields)


# The model's answers, without a cache.


@functools.partial(jax.jit, static_argnames=("logprobs", "windows"))
def _choose(tokens, number, sampling, stream, stop, generated, allowed, logprobs, windows):
    logits = jnp.where(allowed, MODEL.dense(tokens, windows)[number - 1], -jnp.inf)
    return sample(
        logits[None], sampling, stream[None], number[None], stop=stop, generated=generated[None],
        top_logprobs=TOP_LOGPROBS, logprobs=logprobs,
    )  # fmt: skip


def streams_of(request, number):
    """The random stream of each sample, the first of which is output `number`, as the docs have it."""
    seed, samples = request.seed, range(request.samples)
    if isinstance(seed, jax.Array):
        key = jax.random.wrap_key_data(seed) if seed.dtype == jnp.uint32 else seed
        return [int(jax.random.bits(jax.random.fold_in(key, sample))) for sample in samples]
    return [(int(number if seed is None else seed) + sample) % 2**32 for sample in samples]


def wanted(requests, *, kind="plain", most_tokens=LENGTH, logprobs="raw", grammars=(), **_):
    """The outputs, sample by sample, by a computation of the whole text for every token.

    Args:
      requests: requests which can all be served.
      kind: kind of the cache.
      most_tokens: maximum tokens of a request, limited by the blocks.
      logprobs: the same as in `RunOptions`.
      grammars: a `constraint_kit.Grammar` or None for each request, or () for none.
    """
    outputs = []
    for request, grammar in zip(requests, grammars or [None] * len(requests), strict=True):
        stop = np.resize([*request.stop_tokens, -1], NUM_STOP_TOKENS).astype(np.int32)
        for stream in streams_of(request, len(outputs)):
            outputs.append(output := Output(len(request.prompt)))
            while output.finish is None:
                text = [*request.prompt, *output.tokens]
                tokens = np.resize(np.array(text, np.int32), LENGTH)
                of_row = np.int32(len(text)), request.sampling or Sampling(), np.uint32(stream), stop
                allowed = np.ones(VOCAB, np.bool_) if grammar is None else grammar.allowed(output.tokens, VOCAB)
                of_row = *of_row, np.int32(len(output.tokens)), allowed
                choice = jax.device_get(_choose(tokens, *of_row, logprobs=logprobs, windows=WINDOWS[kind]))
                top = choice.top_tokens.tolist(), choice.top_logprobs.tolist()
                output.add(choice.tokens.tolist(), choice.logprobs.tolist(), *top)
                if output.tokens[-1] in request.stop_tokens:
                    output.finish = "stop"
                elif len(output.tokens) == request.max_new_tokens:
                    output.finish = "length"
                elif len(text) + 1 > most_tokens:
                    output.finish = "row_full" if most_tokens == LENGTH else "no_blocks"
    return outputs


@functools.cache
def _answer(prompt, number, kind):
    return wanted([ask(prompt, max_new_tokens=number)], kind=kind)[0]


def answer(prompt, number=NEW, kind="plain"):
    """The output of a greedy request."""
    return _answer(tuple(map(int, prompt)), number, kind)


@functools.partial(jax.jit, static_argnames="windows")
def _scores(tokens, windows):
    return jax.nn.log_softmax(MODEL.dense(tokens, windows), axis=-1)


def assert_scored(request, output, kind="plain"):
    """Asserts all requested log-probabilities of the prompt in an output, by the whole text."""
    first, length = request.prompt_logprobs_from, len(request.prompt)
    columns = output.prompt_logprobs, output.prompt_ranks, output.prompt_top_logprobs
    assert [len(column) for column in columns] == [0 if first is None else length - first] * 3
    scores = np.asarray(_scores(np.resize(request.prompt, LENGTH).astype(np.int32), WINDOWS[kind]))
    for position, (logprob, rank, top) in enumerate(zip(*columns, strict=True), first or 0):
        if position == 0:
            assert logprob is rank is top is None
            continue
        before, token = scores[position - 1], request.prompt[position]
        np.testing.assert_allclose(logprob, before[token], atol=1e-4)
        assert rank == 1 + np.sum(before > before[token])
        assert [*top] == np.argsort(-before)[:TOP_LOGPROBS].tolist()
        np.testing.assert_allclose([*top.values()], before[[*top]], atol=1e-4)


def assert_alike(outputs, others, *, has_top=True):
    """Asserts that outputs say the same, but for what was found in the cache."""
    for output, other in zip(outputs, others, strict=True):
        assert (output.tokens, output.finish, output.prompt_tokens) == (
            other.tokens, other.finish, other.prompt_tokens
        )  # fmt: skip
        np.testing.assert_allclose(output.logprobs, other.logprobs, atol=1e-4)
        if has_top:
            assert [list(top) for top in output.top_logprobs] == [list(top) for top in other.top_logprobs]
            for top, same in zip(output.top_logprobs, other.top_logprobs, strict=True):
                np.testing.assert_allclose(list(top.values()), list(same.values()), atol=1e-4)


def assert_chained(prompts, outputs, kind="plain"):
    """Asserts outputs to be the model's choices after their prompts, so no byte it read was wrong."""
    for prompt, output in zip(prompts, outputs, strict=True):
        number = len(output.tokens)
        if number:
            whole = answer(prompt, max(number, NEW), kind)
            assert output.tokens == whole.tokens[:number]
            np.testing.assert_allclose(output.logprobs, whole.logprobs[:number], atol=1e-4)


def assert_whole(cache, events, prompts=(), outputs=()):
    """Asserts a sound cache, where just the generation's rows are released, and their tokens are found."""
    state = state_of(cache)
    kvjax.check(state)
    assert state.seqs.length.tolist() == [0, BEFORE, BEFORE]
    assert kvjax.fold(events).index == kvjax.events.index_of(state)
    assert_chained(prompts, outputs, kind_of(cache))
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.tokens:
            text = [*prompt, *output.tokens]
            found = VERBS["lookup"](state, padded(text, LENGTH), np.int32(len(text)))
            assert int(found.cached_tokens) == len(text) - 1  # the last token is chosen and not computed


# Three ways to run prompts.


def together(cache, prompts, model=MODEL, **options):
    return kvjax.generate(model, cache, prompts, **OPTIONS | options)


def spread(cache, prompts, **options):
    """`generate`, by `stream`."""
    events, progress = [], None
    try:
        for progress in drive.stream(MODEL, cache, prompts, **OPTIONS | options):
            events += progress.events
    except kvjax.serving.GenerationInterrupted as error:
        error.events[:0] = events
        raise
    return progress.outputs, progress.cache, events


def batched(cache, prompts, **options):
    return drive.run_batch(MODEL, cache, prompts, **OPTIONS | options)


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
    """For "swap_out" and "swap_in" a list which grows with each call, by whether it was done."""
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
    """The jitted calls of generations. A test may act before or after any of them."""

    def __init__(self, monkeypatch, inner=False):
        self.count, self.at, self.before, self.after = 0, 0, None, None
        targets = [(driver, "apply"), (driver, "turn"), (prompt_scores, "_score_prompt"), (host_tier, "_has_row")]
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
        """Yields the number of each call. The caller then runs a generation, until a generation has fewer calls."""
        self.before, self.after = before, after
        for self.at in itertools.count(1):
            self.count = 0
            yield self.at
            if self.count < self.at:
                break
        self.at = 0


class Listener:
    """A listener which acts at some of its calls, after it has collected the events.

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
