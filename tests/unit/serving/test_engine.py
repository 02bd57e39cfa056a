# SPDX-License-Identifier: Apache-2.0
"""Steps and the decode loop of a decoder: their logits, what they read, and what a model has to return."""

import functools
import inspect
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.serving import Rows, decode, decode_log
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from tests.poison import poisoned

pytestmark = pytest.mark.long
VOCAB, STEPS = 61, 5
PROMPT = np.arange(20, dtype=np.int32)


@functools.cache
def model():
    layers = (LayerConfig(kv_heads=1, head_dim=16),) * 2
    config = ModelConfig(
        model_type="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_heads=2, layers=layers
    )
    return Decoder(config, rngs=nnx.Rngs(3))


def empty_cache(blocks=64, num_blocks=64, max_seqs=3, max_length=48):
    """A cache with `blocks` of its `num_blocks` in use. Programs are compiled for the latter."""
    spec = kvjax.make_spec(
        model().layer_specs(), num_blocks=num_blocks, max_seqs=max_seqs, max_length=max_length, block_size=4,
        dtype="float32",
    )  # fmt: skip
    return kvjax.Cache.create(spec, num_blocks=blocks)


def greedy(steps):
    """The greedy tokens after the prompt, by the whole text for each."""
    tokens, forward = PROMPT.tolist(), jax.jit(lambda m, t, n: m.dense(t)[0, n - 1])
    for _ in range(steps):
        text = np.resize(np.array(tokens, np.int32), (1, 48))
        tokens.append(int(jnp.argmax(forward(model(), text, np.int32(len(tokens))))))
    return tokens[PROMPT.size :]


@pytest.mark.parametrize("layers", [[None], [None, 6], [5, 6, 9]])
@pytest.mark.parametrize("host", [0, 8])
def test_logs_can_hold_the_worst_step(layers, host):
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(1, 1, window) for window in layers], num_blocks=8, num_host_blocks=host, max_seqs=3,
        max_length=32, block_size=4,
    )  # fmt: skip

    def step_and_release():
        """The events of a step, in arrays that can hold the worst case."""
        state, extended = kvjax.extend(kvjax.init(spec), jnp.ones(3, bool))
        _, committed = kvjax.commit(state, jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))
        return extended.records, committed.records

    worst = sum(records.shape[0] for records in jax.eval_shape(step_and_release))
    assert decode_log(spec, 0).records.shape[0] >= 2 * worst


def test_each_step_takes_the_same_arguments():
    steps = [
        inspect.signature(step).parameters for step in (kvjax.step, kvjax.Cache.step, kvjax.tiers.TieredCache.step)
    ]
    names = [[(name, parameter.default) for name, parameter in parameters.items()] for parameters in steps]
    assert names[0][2:] == names[1][2:] == names[2][2:]
    assert [name for name, _ in names[0][:2]] == ["model", "cache"]


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda logits, pools: logits[:, 0], r"float32\[1, 61\]"),
        (lambda logits, pools: (logits[:, 0], pools), r"logits float32\[1, 61\]"),  # not for a flat batch
        (lambda logits, pools: (logits, pools), r"logits float32\[1, 131, 61\]"),
        (lambda logits, pools: (logits[0, 0], pools), r"logits float32\[61\]"),
        (lambda logits, pools: (pools, logits[:, 0]), r"\(Pools, float32\[1, 61\]\)"),
        (lambda logits, pools: None, "NoneType"),
    ],
)
def test_a_model_that_returns_something_else_is_named(returns, got):
    def wrong(tokens, pools, view, *, last):
        return returns(jnp.zeros((*tokens.shape, VOCAB)), pools)

    wanted = r" for last=i32\[3\], wanted a pair of logits f32\[3, V\] and pools"
    with pytest.raises(ValueError, match=f"^model: got {got}{wanted}"):
        kvjax.generate(jax.tree_util.Partial(wrong), empty_cache(), [[1, 2, 3]])


def all_logits(cache, tokens, count):
    return cache.step(model(), tokens, count, logits="all")


def test_a_step_gives_the_logits_of_every_token():
    cache = empty_cache()
    prompt, count = PROMPT[:8], np.asarray([8, 0, 0], np.int32)
    cache, _ = jax.jit(kvjax.Cache.admit)(cache, np.asarray([0]), prompt[None], np.asarray([8]))
    cache, logits, _ = jax.jit(all_logits)(cache, np.stack([prompt] * 3), count)
    assert logits.shape == (3, 8, VOCAB)
    assert int(cache.state.seqs.committed[0]) == 8
    np.testing.assert_allclose(logits[0], jax.jit(lambda m, t: m.dense(t))(model(), prompt[None])[0], atol=1e-4)


def finite_loop(model, cache, rows, log):
    """The decode loop, with a check that the logits of every step are finite, also those of idle rows."""

    def same(logits, tokens, positions):
        chex.assert_tree_all_finite(logits)
        return logits

    return decode(model, cache, rows, log, steps=STEPS, stop=jnp.zeros((1,), jnp.int32), sampling=None, logits_fn=same)


@pytest.mark.slow
def test_no_step_reads_what_was_never_written():
    idle, cache = [0, 0], empty_cache()
    cache = cache.replace(pools=poisoned(cache.pools))
    cache, _ = jax.jit(kvjax.Cache.admit)(cache, np.asarray([0]), PROMPT[None], np.asarray([20]))
    cache, logits, _ = jax.jit(kvjax.step)(model(), cache, np.stack([PROMPT] * 3), np.asarray([20, *idle]))
    chex.assert_tree_all_finite(logits)
    first, *wanted = greedy(STEPS + 1)
    token, left = np.asarray([first, *idle], np.int32), np.asarray([8, *idle], np.int32)
    rows = Rows(token, left > 0, left, np.zeros(3, np.uint32))
    # At exit chex warns of pending checks, even if there are none.
    logging.getLogger("absl").addFilter(lambda record: "chexify" not in record.getMessage())
    loop, log = chex.chexify(jax.jit(finite_loop), async_check=False), decode_log(cache.state.spec, STEPS)
    _, _, _, decoded = loop(model(), cache, rows, log)
    assert decoded.tokens[0].tolist() == wanted
    with pytest.raises(AssertionError, match="assert_tree_all_finite"):
        loop(model(), cache.replace(pools=poisoned(cache.pools)), rows, log)


def test_a_model_that_cannot_give_all_logits_is_named():
    def one(tokens, pools, view, *, last):
        return jnp.zeros((*tokens.shape, VOCAB))[jnp.arange(tokens.shape[0]), last], pools

    def another(tokens, pools, view, *, last):
        return jnp.zeros((*last.shape, VOCAB)), pools

    tokens, count = jax.ShapeDtypeStruct((3, 2), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    step = functools.partial(jax.eval_shape, lambda m, *args: kvjax.step(m, *args, logits="all"))
    with pytest.raises(
        ValueError, match=r"^model: got logits float32\[3, 1, 2, 61\] for last=None, wanted .*\[3, 2, V\]"
    ):
        step(jax.tree_util.Partial(one), empty_cache(), tokens, count)
    with pytest.raises(ValueError, match=r"^model: got AttributeError.*last=None, wanted all logits"):
        step(jax.tree_util.Partial(another), empty_cache(), tokens, count)
    with pytest.raises(ValueError, match=r"^logits: got 'both', wanted 'last' or 'all'"):
        kvjax.step(model(), empty_cache(), np.zeros((3, 2), np.int32), np.zeros(3, np.int32), logits="both")
    with pytest.raises(ValueError, match=r"^cache: got a CacheState, wanted a Cache"):
        kvjax.step(model(), empty_cache().state, np.zeros((3, 2), np.int32), np.zeros(3, np.int32))
