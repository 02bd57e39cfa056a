# SPDX-License-Identifier: Apache-2.0
"""Beam search over the cache against one that recomputes every hypothesis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from tests.drive import Driver, lines

WIDTH, STEPS, PROMPT = 3, 11, [5, 3, 7, 1, 2, 9]
CONFIG = ModelConfig("llama", 24, 32, 64, 4, (LayerConfig(2, 16),) * 2)

pytestmark = [pytest.mark.long]


def best(scores, logits):
    """The `WIDTH` best continuations of hypotheses with these scores: (scores, parents, tokens)."""
    total = np.asarray(scores)[:, None] + np.asarray(jax.nn.log_softmax(logits, axis=-1))
    order = np.argsort(-total, axis=None, kind="stable")[:WIDTH]
    parents, tokens = np.unravel_index(order, total.shape)
    return total[parents, tokens], parents.astype(np.int32), tokens.astype(np.int32)


def recomputed(model):
    """The tokens of each hypothesis at each step, best first, by recomputation."""
    dense = jax.jit(Decoder.dense)
    scores, texts, history = np.zeros(1), [PROMPT], []
    for _ in range(STEPS):
        padded = jnp.asarray([text + [0] * (len(PROMPT) + STEPS - len(text)) for text in texts], jnp.int32)
        logits = dense(model, padded, jnp.array([len(texts[0]) - 1]))[:, 0]
        scores, parents, tokens = best(scores, logits)
        texts = [texts[p] + [int(t)] for p, t in zip(parents, tokens, strict=True)]
        history.append(texts)
    return history


def cached(model, size):
    """The same through the cache, and the number of blocks that each step copied."""
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=24, max_seqs=WIDTH, max_length=20, block_size=size, dtype="float32"
    )
    cache, rows, jitted = Driver(kvjax.Cache.create(spec)), np.arange(WIDTH, dtype=np.int32), jax.jit(kvjax.step)

    def step(tokens, count):
        cache.cache, logits, events = jitted(model, cache.cache, tokens, count)
        cache.follow(events)
        return logits

    assert cache.admit(0, PROMPT) == ["OK"]
    logits = step(*lines({0: PROMPT}, WIDTH, len(PROMPT)))
    for row in rows[1:]:
        cache.do("fork", 0, row)
    scores, _, tokens = best(np.zeros(1), logits[:1])
    texts, copies = [[*PROMPT, int(t)] for t in tokens], []
    history = [texts]
    for _ in range(STEPS - 1):
        copies.append(int(kvjax.events.counts(cache.do("extend", np.ones(WIDTH, bool)))["copied"]))
        logits = step(tokens[:, None], np.ones(WIDTH, np.int32))
        scores, parents, tokens = best(scores, logits)
        cache.do("beam_step", rows, parents)
        texts = [texts[p] + [int(t)] for p, t in zip(parents, tokens, strict=True)]
        history.append(texts)
    return history, copies


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_equal_to_a_search_that_computes_everything_anew(size):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    (got, copies), wanted = cached(model, size), recomputed(model)
    assert got == wanted
    assert len({tuple(text[:9]) for text in wanted[-1]}) < WIDTH  # they did fork on the way
    full = [length % size == 0 for length in range(len(PROMPT), len(PROMPT) + STEPS - 1)]
    assert all(number == 0 for number, at_edge in zip(copies, full, strict=True) if at_edge)
    assert sum(copies) > 0 and max(copies) <= WIDTH - 1


def test_a_beam_of_rows_that_cannot_be_one_is_refused():
    cache = Driver(kvjax.init(kvjax.make_spec(num_blocks=4, max_seqs=3, max_length=8, block_size=4)))
    assert cache.admit(0, range(4)) == ["OK"]
    for seqs, parents in [([0, 1], [0, 0]), ([0, 0], [0, 0]), ([0], [0]), ([0], [1]), ([3], [0])]:
        refused = cache.status("beam_step", np.asarray(seqs, np.int32), np.asarray(parents, np.int32))
        assert refused == ["BAD_REQUEST"] * len(seqs)
