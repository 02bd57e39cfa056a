# SPDX-License-Identifier: Apache-2.0
"""Generation through the cache: its choices, its end, and the cache after it."""

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
from kvjax.serving.sampling import restrict, sample
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from tests import drive
from tests.poison import poisoned

pytestmark = pytest.mark.long
VOCAB, STEPS = 61, 5
PROMPTS = [[1, 2, 3], list(range(20)), [*range(20), 33, 34], [7] * 9, [50]]
THREE = PROMPTS[:3]  # one batch; prompts of other numbers and lengths are other programs


WINDOW = 6


@functools.cache
def model(windows=(None, None)):
    layers = tuple(LayerConfig(kv_heads=1, head_dim=16, window=window) for window in windows)
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


def windowed_cache(blocks, windows=(WINDOW, None), max_length=96):
    """A cache for a model with windows, with so many of 64 blocks of each window group in use."""
    spec = kvjax.make_spec(
        model(windows).layer_specs(), num_blocks=64, max_seqs=3, max_length=max_length, block_size=4, dtype="float32"
    )
    cache, small = kvjax.Cache.create(spec), kvjax.init(spec, num_blocks=jnp.int32(blocks))
    state = cache.state.replace(groups=(cache.state.groups[0], *small.groups[1:]))
    return kvjax.Cache(state, cache.pools)


def generate(cache, prompts=PROMPTS, windows=(None, None), **options):
    options = {"max_new_tokens": 8, "chunk": 8, "steps": STEPS, **options}
    return kvjax.generate(model(windows), cache, prompts, **options)


def batch(prompts, **options):
    return drive.run_batch(model(), empty_cache(), prompts, **{"chunk": 8, "steps": STEPS, **options})


forward = jax.jit(lambda m, t, n: m.dense(t)[0, n - 1])


@functools.cache
def plain(prompt, steps=8, windows=(None, None), width=48):
    """Greedy generation without a cache, which computes the whole sequence anew for every token."""
    tokens = list(prompt)
    logprobs = []
    for _ in range(steps):
        padded = jnp.zeros((1, width), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
        logits = forward(model(windows), padded, len(tokens))
        tokens.append(int(jnp.argmax(logits)))
        logprobs.append(float(jax.nn.log_softmax(logits)[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@pytest.mark.slow
def test_two_prompts_are_computed_in_one_step():
    """Each is half a chunk long, and the second one does not wait for the first."""
    prompts = [list(range(first, first + 8)) for first in (0, 20, 40)]
    new = [set(one.new) for one in drive.stream(model(), empty_cache(), prompts, max_new_tokens=8, chunk=16, steps=1)]
    assert new[0] == {0, 1}
    assert new[1] == {0, 1, 2}


LONG = [list(range(55)), [*range(40), 7, 8], [5] * 51]


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(WINDOW, None), (WINDOW, WINDOW)])
def test_windows_take_no_more_blocks_than_their_rows_see(windows):
    """Three rows have up to 16 blocks, and 5 of the window group's are counted for each."""
    cache = windowed_cache(15, windows)
    outputs, cache, events = generate(cache, LONG, windows)
    for prompt, output in zip(LONG, outputs, strict=True):
        tokens, logprobs = plain(tuple(prompt), 8, windows, 96)
        assert (output.tokens, output.finish) == (tokens, "length")
        np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)
    assert [o.cached_tokens for o in outputs] == [0, 40, 0]  # the second waits for its shared prefix
    # Prompts that continue the answers find all that was written. The prompts alone would not find their windows.
    longer = [prompt + output.tokens for prompt, output in zip(LONG, outputs, strict=True)]
    again, cache, more = generate(cache, longer, windows)
    assert [o.cached_tokens for o in again] == [len(tokens) - 1 for tokens in longer]
    for prompt, output in zip(longer, again, strict=True):
        assert output.tokens == plain(tuple(prompt), 8, windows, 96)[0]
    kvjax.check(cache.state)
    assert kvjax.fold(events + more).index == kvjax.events.index_of(cache.state)


@pytest.mark.slow
def test_prompts_wait_for_the_blocks_of_their_windows():
    """One row runs at a time. It has 16 blocks, and at most 5 of the window group's."""
    windows = (WINDOW, None)
    outputs, cache, events = generate(windowed_cache(7), LONG, windows)
    assert [o.finish for o in outputs] == ["length"] * 3
    for prompt, output in zip(LONG, outputs, strict=True):
        assert output.tokens == plain(tuple(prompt), 8, windows, 96)[0]
    kvjax.check(cache.state)
    assert not np.any(cache.state.seqs.length)
    assert kvjax.fold(events).index == kvjax.events.index_of(cache.state)

    # All blocks together are too few: the prompt is refused, or ends with the tokens that fit.
    outputs, cache, _ = generate(windowed_cache(3), [*LONG[:1], [1, 2, 3]], windows, max_new_tokens=20)
    assert [(o.finish, len(o.tokens)) for o in outputs] == [("no_blocks", 0), ("no_blocks", 10)]
    kvjax.check(cache.state)


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


@pytest.mark.slow
def test_a_user_function_sees_the_logits():
    def only_even(logits, tokens, positions):
        assert logits.shape[1:] == (VOCAB,)
        assert tokens.shape == positions.shape == logits.shape[:1]
        return jnp.where((jnp.arange(VOCAB) % 2 == 0)[None], logits, -jnp.inf)

    outputs, _, _ = generate(empty_cache(), THREE, logits_fn=only_even)
    assert all(token % 2 == 0 for output in outputs for token in output.tokens)


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
        kvjax.generate(jax.tree_util.Partial(wrong), empty_cache(), PROMPTS)


def all_logits(cache, tokens, count):
    return cache.step(model(), tokens, count, logits="all")


def test_a_step_gives_the_logits_of_every_token():
    cache = empty_cache()
    prompt, count = np.asarray(PROMPTS[1][:8], np.int32), np.asarray([8, 0, 0], np.int32)
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


def test_no_step_reads_what_was_never_written():
    prompt, idle, cache = PROMPTS[1], [0, 0], empty_cache()
    cache = cache.replace(pools=poisoned(cache.pools))
    cache, _ = jax.jit(kvjax.Cache.admit)(cache, np.asarray([0]), np.asarray([prompt], np.int32), np.asarray([20]))
    cache, logits, _ = jax.jit(kvjax.step)(model(), cache, np.asarray([prompt] * 3, np.int32), np.asarray([20, *idle]))
    chex.assert_tree_all_finite(logits)
    first, *wanted = plain(tuple(prompt))[0]
    token, left = np.asarray([first, *idle], np.int32), np.asarray([8, *idle], np.int32)
    rows = Rows(token, left > 0, left, np.zeros(3, np.uint32))
    # At exit chex warns of pending checks, even if there are none.
    logging.getLogger("absl").addFilter(lambda record: "chexify" not in record.getMessage())
    loop, log = chex.chexify(jax.jit(finite_loop), async_check=False), decode_log(cache.state.spec, STEPS)
    _, _, _, decoded = loop(model(), cache, rows, log)
    assert decoded.tokens[0].tolist() == wanted[:STEPS]
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


def test_top_k_and_top_p_leave_out_the_unlikely():
    logits = jnp.log(jnp.array([[0.5, 0.2, 0.2, 0.06, 0.04]]))
    survivors = lambda **options: np.isfinite(restrict(logits, kvjax.Sampling(1.0, **options)))[0].tolist()  # noqa: E731
    assert survivors(top_k=1) == [True, False, False, False, False]
    assert survivors(top_k=9) == [True] * 5
    assert survivors(top_p=0.5) == [True, False, False, False, False]
    assert survivors(top_p=0.8) == [True, True, True, False, False]
    assert survivors(top_p=1.0) == [True] * 5
    chosen = jax.vmap(lambda seed: sample(logits, kvjax.Sampling(1.0), seed[None], jnp.zeros(1, jnp.int32)))(
        jnp.arange(4000, dtype=jnp.uint32)
    )
    np.testing.assert_allclose(np.bincount(chosen.tokens[:, 0], minlength=5) / 4000, np.exp(logits[0]), atol=0.03)
