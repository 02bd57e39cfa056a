# SPDX-License-Identifier: Apache-2.0
"""Latents and states in one model: `run_batch` chooses the tokens of a computation from scratch, without a cache.

The prompts share prefixes and are sampled several times. Rows are few, and so are the blocks of one group or the other.
`tests/oracle/` has such layers with every scheduler, and with a host tier, by night.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._arrays import Pytree
from kvjax.serving import Request, RunOptions, Sampling, Scheduler
from kvjax.serving.sampling import sample
from tests import drive
from tests.poison import poisoned
from tests.serving_kit import state_of

SIZE, ROWS, LENGTH, BLOCKS, NEW = 8, 4, 56, 40, 18
VOCAB, DIM, HEADS, WIDTH, VALUES = 31, 16, 2, 12, 8
SAMPLING = Sampling(temperature=1.0)
SAMPLES = [1, 2, 1, 2, 2, 1]
FEW = {"blocks": (10, BLOCKS), "snapshots": (BLOCKS, 7)}  # of the first group, and of the recurrent one


def turn(states, inputs, count):
    """A cell whose state goes round by one column at each token, and fades so slowly that the first one matters."""

    def step(state, at):
        new = 0.97 * jnp.roll(state, 1, axis=-1) + inputs[:, at]
        state = jnp.where((at < count)[:, None], new, state)
        return state, state

    state, outputs = jax.lax.scan(step, states["sum"], jnp.arange(inputs.shape[1]))
    return jnp.moveaxis(outputs, 0, 1), {"sum": state}


class Hybrid(Pytree):
    """A recurrent layer, then one of latents, which so depend on all tokens before; random weights."""

    embed: jax.Array  # f32[V, D]
    down: jax.Array  # f32[D, W]
    queries: jax.Array  # f32[D, H * W]
    head: jax.Array  # f32[H * values, V]

    @classmethod
    def create(cls):
        rng = np.random.default_rng(0)
        shapes = (VOCAB, DIM), (DIM, WIDTH), (DIM, HEADS * WIDTH), (HEADS * VALUES, VOCAB)
        return cls(*(jnp.asarray(rng.standard_normal(shape) * 0.7, jnp.float32) for shape in shapes))

    def project(self, x):
        """The latents [..., W] and queries [..., H, W] of the recurrent layer's outputs [..., D]."""
        x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))
        return x @ self.down, (x @ self.queries).reshape(*x.shape[:-1], HEADS, WIDTH)

    def logits(self, values):
        return values.reshape(*values.shape[:-2], HEADS * VALUES) @ self.head

    def __call__(self, tokens, pools, view, *, last):
        x, pools = kvjax.recur(turn, pools, 0, view, self.embed[tokens], width=3)
        latents, queries = self.project(x)
        pools = kvjax.write(pools, 1, latents[:, :, None], None, view)
        values = kvjax.attend(queries, pools, 1, view)
        logits = self.logits(values)
        return logits if last is None else logits[jnp.arange(tokens.shape[0]), last], pools

    def dense(self, tokens):
        """The logits f32[T, V] of a whole text i32[T]."""
        x, _ = turn({"sum": jnp.zeros((1, DIM))}, self.embed[tokens][None], jnp.full((1,), len(tokens), jnp.int32))
        latents, queries = self.project(x[0])
        scores = jnp.einsum("qhw,kw->hqk", queries, latents) * WIDTH**-0.5
        causal = jnp.arange(len(tokens))[:, None] >= jnp.arange(len(tokens))[None]
        weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
        return self.logits(jnp.einsum("hqk,kv->qhv", weights, latents[:, :VALUES]))


MODEL = Hybrid.create()


@jax.jit
def choices(tokens, seed):
    """The next token and its log-probability after each token of a text i32[T], by the whole text before."""
    after = jnp.arange(len(tokens), dtype=jnp.int32) + 1
    chosen = sample(MODEL.dense(tokens), SAMPLING, jnp.full(after.shape, seed), after)
    return chosen.tokens, chosen.logprobs


def assert_recomputed(prompts, outputs, seeds):
    """Asserts that all tokens and log-probabilities are those of a computation of the whole text before them."""
    for prompt, output, seed in zip(prompts, outputs, seeds, strict=True):
        text = [*prompt, *output.tokens]
        tokens, logprobs = choices(np.resize(text, LENGTH), np.uint32(seed))  # whatever comes later
        chosen = slice(len(prompt) - 1, len(text) - 1)
        assert (output.tokens, output.finish) == (tokens[chosen].tolist(), "length")
        np.testing.assert_allclose(output.logprobs, logprobs[chosen], atol=1e-4)


def make_cache(numbers=(BLOCKS, BLOCKS)):
    """An empty cache, with NaN in its pools, and so many blocks of each group in use."""
    layers = [kvjax.LayerSpec.recurrent({"sum": (DIM,)}), kvjax.LayerSpec.latent(WIDTH, VALUES)]
    spec = kvjax.make_spec(
        layers, num_blocks=BLOCKS, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE, dtype="float32"
    )  # fmt: skip
    cache = kvjax.Cache.create(spec)
    groups = (kvjax.init(spec, num_blocks=np.int32(n)).groups[at] for at, n in enumerate(numbers))
    return cache.replace(state=cache.state.replace(groups=tuple(groups)), pools=poisoned(cache.pools))


def make_prompts():
    """Prompts that begin like one of two documents; most part from it inside a block."""
    rng = np.random.default_rng(1)
    documents = rng.integers(0, VOCAB, (2, 24))
    cuts = (17, 21, 3, 24, 16, 24)
    prompts = [[*documents[i % 2][:n], *rng.integers(0, VOCAB, 1 + i)] for i, n in enumerate(cuts)]
    return [list(map(int, prompt)) for prompt in prompts]


def run(cache, scheduler, prompts, first_seed=0):
    """Runs the prompts with their samples and compares all outputs with recomputation."""
    starts = [first_seed + sum(SAMPLES[:number]) for number in range(len(SAMPLES))]
    seeds = [first_seed + number for number in range(sum(SAMPLES))]
    outputs, cache, events = drive.run_batch(
        MODEL, cache, prompts, samples=SAMPLES, sampling=SAMPLING, seed=starts, max_new_tokens=NEW,
        scheduler=scheduler, steps=40,
    )  # fmt: skip
    each = [prompt for prompt, number in zip(prompts, SAMPLES, strict=True) for _ in range(number)]
    assert_recomputed(each, outputs, seeds)
    kvjax.check(state_of(cache))
    return outputs, cache, events


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(BLOCKS, BLOCKS), *FEW.values()], ids=["plenty", *FEW])
def test_prompts_are_scored_from_any_token_on(numbers):
    """A recurrent state cannot restart at every token; what lies before is computed again."""
    cache, scores = make_cache(numbers), jax.jit(lambda tokens: jax.nn.log_softmax(MODEL.dense(tokens), axis=-1))
    for first in (0, 9, 2, 16):
        requests = [
            Request(prompt, max_new_tokens=0, prompt_logprobs_from=min(first, len(prompt))) for prompt in make_prompts()
        ]
        outputs, cache, _ = kvjax.run_batch(MODEL, cache, requests, RunOptions(scheduler=Scheduler(chunk=5)))
        for request, output in zip(requests, outputs, strict=True):
            wanted = scores(np.resize(request.prompt, LENGTH))
            at = np.arange(max(first, 1), len(request.prompt))
            found = [logprob for logprob in output.prompt_logprobs if logprob is not None]
            np.testing.assert_allclose(found, wanted[at - 1, request.prompt[at]], atol=1e-4)
        kvjax.check(state_of(cache))


@pytest.mark.slow
def test_tokens_are_those_of_a_computation_from_scratch():
    """With plenty of blocks, over what the cache has then, and with few blocks of either group."""
    scheduler, prompts = Scheduler("num_tokens", chunk=12, chunk_rows=2, k=4), make_prompts()
    outputs, cache, events = run(make_cache(), scheduler, prompts)
    assert not any(output.preemptions for output in outputs)
    again, cache, more = run(cache, scheduler, prompts, first_seed=50)
    first, second = (sum(output.cached_tokens for output in each) for each in (outputs, again))
    assert second > first > 0
    assert kvjax.fold(events + more).index == kvjax.events.index_of(state_of(cache))
    for name, numbers in FEW.items():
        outputs, _, events = run(make_cache(numbers), scheduler, prompts)
        assert any(event["kind"] == "removed" and event["group"] == (name == "snapshots") for event in events)
        assert name == "snapshots" or any(output.preemptions for output in outputs)
