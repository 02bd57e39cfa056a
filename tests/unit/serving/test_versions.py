# SPDX-License-Identifier: Apache-2.0
"""Weights that change: random histories of a model whose K/V have its version, so that it notices any other's.

A version has a namespace. The model chooses a token of its own, BAD, once a row of it sees a slot of another version
or of another position, and writes NaN from then on.
"""

import collections
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

import kvjax
from kvjax import Sampling
from kvjax._arrays import Pytree
from kvjax.serving import Finish, Rollout, Scheduler
from kvjax.state import NO_BLOCK
from tests import drive
from tests.drive import METHODS, padded
from tests.oracle.bytes_machine import SIZE, read, visible

TOKENS, BAD = 3, 3  # a prompt's first token says whose it is
ROWS, WIDTH, NEW, SAMPLES, PROMPTS, BLOCKS = 8, 20, 4, 2, 2, 26
DOCUMENTS = [[first, *np.random.default_rng(first).integers(0, TOKENS, 11).tolist()] for first in range(TOKENS)]
SCHEDULER = Scheduler(chunk=8, k=SIZE)
SWAPPING = Scheduler(chunk=8, k=SIZE, reserve="num_tokens", preempt="swap")


def excluded(version, token):
    """The token that never follows another."""
    return (version + 2 * token) % TOKENS


class Versioned(Pytree):
    """A model that is of one version for each first token of a prompt, i32[3]."""

    versions: jax.Array

    def __call__(self, tokens, pools, view, *, last):
        rows, width = view.num_tokens.shape[0], tokens.shape[1]
        first = jnp.where(view.num_tokens > 0, view.lengths - view.num_tokens, 0)
        if view.starts is None:
            opening, owner = tokens[:, 0], jnp.broadcast_to(jnp.arange(rows)[:, None], tokens.shape)
        else:
            opening = tokens[0, jnp.minimum(view.starts, width - 1)]
            after = jnp.arange(width)[:, None] - view.starts[None]
            owner = jnp.argmax((after >= 0) & (after < view.num_tokens[None]), axis=1)[None]
        stored = read(pools, 0, 0)[view.tables[0][:, 0], 0, 1, 0, 0, 0]
        opening = jnp.where(first > 0, jnp.nan_to_num(stored).astype(jnp.int32), opening)
        version = self.versions[jnp.clip(opening, 0, TOKENS - 1)]
        is_wrong = self.is_wrong(version, pools, view, first)
        tag = jnp.where(is_wrong, jnp.nan, (version + 1).astype(jnp.float32))[owner]
        k = jnp.stack([tag, view.positions.astype(jnp.float32)], axis=-1)[:, :, None]
        v = jnp.stack([tokens, tokens], axis=-1).astype(jnp.float32)[:, :, None]
        for layer in range(len(pools.spec.groups)):
            pools = kvjax.write(pools, layer, k, v, view)
        token = jnp.arange(TOKENS + 1)[None, None]
        allowed = (token != BAD) & (token != excluded(version[owner], tokens)[..., None])
        logits = jnp.where(jnp.where(is_wrong[owner][..., None], token == BAD, allowed), 0.0, -50.0)
        return logits if last is None else logits[jnp.arange(rows) if view.starts is None else 0, last], pools

    def is_wrong(self, version, pools, view, first):
        """bool[R]: whether a row sees a slot that is not its own."""
        found = jnp.zeros(first.shape, jnp.bool_)
        for number, (spec, table) in enumerate(zip(pools.spec.groups, view.tables, strict=True)):
            position = jnp.arange(table.shape[1] * SIZE, dtype=jnp.int32)[None]
            seen = (position < first[:, None]) & visible(spec, position, first[:, None])
            keys = read(pools, number, 0)[table, 0, 0, 0].reshape(*seen.shape, 2)
            wanted = jnp.stack(jnp.broadcast_arrays(version[:, None] + 1, position), axis=-1).astype(jnp.float32)
            found = found | jnp.any(seen & jnp.any(keys != wanted, axis=-1), axis=1)
        return found


def make_spec(windows=(None,), blocks=BLOCKS, host=0):
    layers = [kvjax.LayerSpec(1, 2, window) for window in windows]
    return kvjax.make_spec(
        layers, num_blocks=blocks, num_host_blocks=host, max_seqs=ROWS, max_length=WIDTH + NEW, block_size=SIZE,
        dtype="float32",
    )  # fmt: skip


@functools.cache
def rollout():
    options = {"samples": SAMPLES, "max_new_tokens": NEW, "hold": True, "scheduler": SCHEDULER}
    return jax.jit(functools.partial(kvjax.rollout, **options), donate_argnums=1)


@functools.cache
def score():
    return jax.jit(functools.partial(kvjax.score, chunk=8), donate_argnums=1)


class Held:
    """A row that is in use between calls: its version, and its text, of which the last token is not computed."""

    def __init__(self, row, version, text):
        self.row, self.version, self.text = row, version, text


class Life:
    """A cache, and the newest version of the weights; `number_of` gives a version's namespace, 0 of the first one."""

    def __init__(self, windows=(None,), number_of=None):
        names = kvjax.Namespaces()
        self.number_of = number_of or (lambda version: names(weights=version or None))
        self.cache = self.create(windows)
        self.newest, self.held, self.pins, self.tally = 0, [], [], collections.Counter()

    def create(self, windows):
        return kvjax.Cache.create(make_spec(windows))

    @property
    def state(self):
        return self.cache.state

    def do(self, history):
        for name, *arguments in history:
            getattr(self, name)(*arguments)
            self.tally[name] += 1
            kvjax.check(self.state)
        return self

    def update(self):
        self.newest += 1

    def versions(self, ages):
        return [max(self.newest - age, 0) for age in ages]

    def call(self, verb, *arguments):
        """Calls a verb, and says whether it was done."""
        self.cache, events = METHODS[verb](self.cache, *arguments)
        self.tally["removed"] += sum(event["kind"] == "removed" for event in kvjax.to_list(events))
        return bool(events.ok)

    def rollout(self, ages, texts, seed, hold, follow):
        """Samples from prompts, of which the first may go on from a row that is held, under its version."""
        versions, prompts = self.versions(ages), [self.prompt(*text) for text in texts]
        continues = []
        if follow is not None and self.held:
            continues = [held := self.held.pop(follow % len(self.held))]
            prompts[0] = [*held.text, *prompts[0]][:WIDTH]
            versions[prompts[0][0]] = held.version
            self.tally["old rows went on"] += held.version < self.newest
        found = self.sampled(versions, prompts, seed, [held.row for held in continues])
        for number, prompt in enumerate(prompts):
            version = versions[prompt[0]]
            self.tally["reused"] += int(found.cached[number, 0] > 0)
            self.tally["old versions"] += version < self.newest
            for sample in range(SAMPLES):
                tokens = found.tokens[number, sample][found.mask[number, sample]].tolist()
                self.verify(version, prompt, tokens)
                assert np.allclose(found.logprobs[number, sample][: len(tokens)], np.log(0.5))
                self.tally["complete"] += found.finish[number, sample] == Finish.LENGTH
                if (row := int(found.rows[number, sample])) >= 0:
                    self.held.append(Held(row, version, [*prompt, *tokens]))
        for _ in range(0 if hold else len(self.held)):
            self.release(0)

    def prompt(self, document, shared, more):
        return [*DOCUMENTS[document][:shared], *more]

    def sampled(self, versions, prompts, seed, continues):
        tokens = np.stack([np.pad(prompt, (0, WIDTH - len(prompt))) for prompt in prompts]).astype(np.int32)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        found, self.cache, _ = rollout()(
            Versioned(np.array(versions, np.int32)), self.cache, tokens, lengths, seed=np.uint32(seed),
            namespace=np.array([self.number_of(versions[prompt[0]]) for prompt in prompts], np.int32),
            continues=np.array([*continues, -1][:1], np.int32),
        )  # fmt: skip
        return jax.device_get(found)

    def verify(self, version, prompt, tokens):
        """Asserts that the model of a version has chosen the tokens, and has seen nothing wrong."""
        for before, token in zip([prompt[-1], *tokens], tokens, strict=False):
            assert token != BAD, f"version {version} saw a slot of another one, after {prompt}"
            assert token != excluded(version, before), f"{token} is not of version {version}"

    def score(self, ages, texts, seed):
        """Log-probabilities of random completions, of which some can't be."""
        versions, prompts = self.versions(ages), [self.prompt(*text) for text in texts]
        tokens = np.stack([np.pad(prompt, (0, WIDTH - len(prompt))) for prompt in prompts]).astype(np.int32)
        completions = np.random.default_rng(seed).integers(0, TOKENS, (PROMPTS, SAMPLES, NEW)).astype(np.int32)
        found, self.cache, _ = score()(
            Versioned(np.array(versions, np.int32)), self.cache, tokens, completions,
            np.array([len(prompt) for prompt in prompts], np.int32),
            namespace=np.array([self.number_of(versions[prompt[0]]) for prompt in prompts], np.int32),
        )  # fmt: skip
        for prompt, group, scores in zip(prompts, completions.tolist(), np.asarray(found), strict=True):
            if np.isnan(scores).all():  # too few rows or blocks
                self.tally["not scored"] += 1
                continue
            version = versions[prompt[0]]
            before = [[prompt[-1], *text[:-1]] for text in group]
            is_excluded = np.array(group) == excluded(version, np.array(before))
            np.testing.assert_allclose(scores, np.where(is_excluded, -50, 0) + np.log(0.5), atol=1e-4)
            self.tally["scored"] += 1

    def release(self, which):
        if self.held:
            assert self.call("release", np.array([self.held.pop(which % len(self.held)).row], np.int32))

    def fork(self, which):
        """Forks a row that is held."""
        free = np.flatnonzero(np.asarray(self.state.seqs.length) == 0)
        if self.held and free.size:
            held = self.held[which % len(self.held)]
            assert self.call("fork", np.int32(held.row), np.int32(free[0]))
            self.held.append(Held(int(free[0]), held.version, held.text))

    def evict(self, which):
        blocks = self.state.groups[0].blocks
        cached = np.flatnonzero((np.asarray(blocks.fill) > 0) & (np.asarray(blocks.refcount) == 0))
        if cached.size:
            self.tally["evicted"] += self.call("evict", np.array([cached[which % cached.size]], np.int32))

    def pin(self, which):
        """Pins the first block of a row that is held."""
        if self.held:
            block = int(self.state.groups[0].table[self.held[which % len(self.held)].row, 0])
            if self.call("pin", np.array([block, NO_BLOCK], np.int32)):
                self.pins.append(block)

    def unpin(self, which):
        if self.pins:
            block = self.pins.pop(which % len(self.pins))
            assert self.call("unpin", np.array([block, NO_BLOCK], np.int32))

    def forget(self, ages):
        """Empties what no row and no pin holds of all but two versions."""
        keep = [self.number_of(version) for version in self.versions(ages)]
        self.tally["forgotten"] += self.call("forget_namespaces", np.array(keep, np.int32))


class OnTwoTiers(Life):
    """The same with a host tier. `run_batch` samples, and holds no rows; it swaps rows out where blocks run out."""

    def create(self, windows):
        return kvjax.tiers.TieredCache.create(make_spec(windows, blocks=15, host=12))

    @property
    def state(self):
        return self.cache.cache.state

    def call(self, verb, *arguments, **options):
        self.cache, events = getattr(self.cache, verb)(*arguments, **options)
        return bool(events.ok)

    def sampled(self, versions, prompts, seed, continues):
        model = Versioned(np.array(versions, np.int32))
        outputs, self.cache, events = drive.run_batch(
            model, self.cache, prompts, max_new_tokens=NEW, samples=SAMPLES, sampling=Sampling(temperature=1.0),
            seed=seed, logprobs="sampling", steps=4, scheduler=SWAPPING,
            namespace=[self.number_of(versions[prompt[0]]) for prompt in prompts],
        )  # fmt: skip
        self.tally["onboarded"] += sum(event["kind"] == "updated" and not event["level"] for event in events)
        self.tally["preempted"] += sum(output.preemptions for output in outputs)
        shape = len(prompts), SAMPLES
        return Rollout(
            tokens=np.array([padded(output.tokens, NEW) for output in outputs]).reshape(*shape, NEW),
            logprobs=np.array([[*output.logprobs, *[0] * NEW][:NEW] for output in outputs]).reshape(*shape, NEW),
            mask=np.array([np.arange(NEW) < len(output.tokens) for output in outputs]).reshape(*shape, NEW),
            lengths=None, preemptions=None, rows=np.full(shape, -1),
            finish=np.array([Finish[output.finish.upper()] for output in outputs]).reshape(shape),
            cached=np.array([output.cached_tokens for output in outputs]).reshape(shape),
        )  # fmt: skip

    def offload(self, which):
        self.call("watermark", np.int32(which + 1), most=8)


SMALL = st.integers(0, 5)
AGES = st.tuples(*[st.sampled_from([0, 0, 0, 1, 2])] * TOKENS)
TEXT = st.tuples(st.integers(0, TOKENS - 1), st.integers(1, 12), st.lists(st.integers(0, TOKENS - 1), max_size=4))
TEXTS = st.tuples(*[TEXT] * PROMPTS)
ROLLOUT = st.tuples(st.just("rollout"), AGES, TEXTS, SMALL, st.booleans(), st.none() | SMALL)
VERBS = [st.tuples(st.just(name), SMALL) for name in ("release", "fork", "evict", "pin", "unpin")]
FORGET = st.tuples(st.just("forget"), AGES.map(lambda ages: ages[:2]))
UPDATE, SCORE = st.tuples(st.just("update")), st.tuples(st.just("score"), AGES, TEXTS, SMALL)


def histories(*requests):
    """Lists of requests, of which those that are named more than once come more often."""
    return st.lists(st.sampled_from(requests).flatmap(lambda request: request), min_size=8, max_size=24)


def live(history, examples, tallied, make=Life, **options):
    """Runs random histories, in which some things must happen."""
    tally = collections.Counter()

    @settings(max_examples=examples, **options)
    @given(history)
    def run(history):
        tally.update(make().do(history).tally)

    run()
    assert not [name for name in tallied if not tally[name]], dict(tally)


AT_ONCE = {"phases": [Phase.generate], "database": None, "print_blob": False}  # a failure is not cut down
MANY = *[ROLLOUT] * 5, *[UPDATE] * 2, *VERBS, FORGET
HAPPENS = "update", "reused", "old versions", "old rows went on", "complete", "removed", "evicted", "pin", "forgotten"


@pytest.mark.long
def test_no_row_reads_another_version():
    live(histories(*MANY), 12, HAPPENS)


TWICE = [
    ("rollout", (0, 0, 0), ((0, 12, []), (1, 9, [])), 0, True, None),
    ("update",),
    ("rollout", (0, 0, 0), ((0, 12, []), (1, 9, [])), 0, True, None),
    ("rollout", (0, 0, 0), ((0, 1, []), (1, 9, [])), 0, False, 0),
]


def one_for_all(version):
    return 0


class Hasty(Life):
    """A training loop that goes on from old rows with the newest weights."""

    def sampled(self, versions, *arguments):
        number_of = self.number_of
        self.number_of = lambda version: number_of(versions[0])
        found = super().sampled([self.newest] * TOKENS, *arguments)
        self.number_of = number_of
        return found


@pytest.mark.parametrize("make", [functools.partial(Life, number_of=one_for_all), Hasty])
@pytest.mark.long
def test_mistakes_are_noticed(make):
    life = Life().do(TWICE)
    assert life.tally["old rows went on"] == 1
    with pytest.raises(AssertionError, match=r"version [01] saw a slot of another one"):
        make().do(TWICE)
    with pytest.raises(AssertionError, match=r"saw a slot of another one|is not of version"):
        live(histories(*MANY), 12, (), make, **AT_ONCE)


@pytest.mark.slow
def test_scores_among_rows_of_other_versions():
    requests = histories(*MANY, *[SCORE] * 3)
    live(requests, 20, (*HAPPENS, "scored", "not scored"))
    shared = functools.partial(Life, number_of=one_for_all)
    with pytest.raises(AssertionError):
        live(histories(SCORE, UPDATE), 20, (), shared, **AT_ONCE)


@pytest.mark.slow
def test_batches_of_several_versions_over_two_tiers():
    six = st.tuples(st.just("rollout"), AGES, st.tuples(*[TEXT] * 6), SMALL, st.just(False), st.none())
    offload = st.tuples(st.just("offload"), SMALL)
    requests = histories(*[six] * 5, *[UPDATE] * 2, VERBS[2], FORGET, offload)
    live(requests, 20, ("reused", "old versions", "forgotten", "onboarded", "preempted"), OnTwoTiers, **AT_ONCE)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_no_row_reads_another_version_at_length(windows):
    live(histories(*MANY, SCORE), 200, (*HAPPENS, "scored", "not scored"), functools.partial(Life, windows))
