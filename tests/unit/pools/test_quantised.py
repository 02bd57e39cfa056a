# SPDX-License-Identifier: Apache-2.0
"""int8 and fp8 pools: the K/V come back with small errors, and their scales move with them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from models import load, recall, verify
from tests.drive import DATA, METHODS
from tests.poison import poisoned

DTYPES = {"int8": 0.01, "float8_e4m3fn": 0.06}  # relative error of attention
EACH = ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)]  # tests/kernels/ has both
LAYERS = [kvjax.LayerSpec(2, 32), kvjax.LayerSpec(2, 32)]


def make(dtype, **options):
    options = {"num_blocks": 8, "max_seqs": 2, "max_length": 24, "block_size": 4} | options
    return kvjax.Cache.create(kvjax.make_spec(LAYERS, dtype=dtype, **options))


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, tokens, count, kv, q):
    """Writes K/V [2, L, R, C, K, D] of each row's next tokens, and attends to them."""
    view = cache.view(count, tokens.shape[1])
    pools, out = cache.pools, []
    for layer in range(2):
        pools = kvjax.write(pools, layer, kv[0, layer], kv[1, layer], view)
        out.append(kvjax.attend(q, pools, layer, view))
    cache, _ = kvjax.Cache(cache.state, pools).commit(tokens, count)
    return cache, jnp.stack(out)


def history(dtype):
    """A prompt, a fork, a copy on write, and steps of both rows, with attention at each. V has two sizes."""
    rng, cache, seen = np.random.default_rng(0), make(dtype), []
    cache = cache.replace(pools=poisoned(cache.pools))

    def run(cache, length, count):
        kv = rng.standard_normal((2, 2, 2, length, 2, 32))
        kv[1] *= rng.choice([10, 20], (2, 2, length, 2, 1))
        q = rng.standard_normal((2, length, 4, 32))
        tokens = jnp.asarray(rng.integers(0, 9, (2, length)), jnp.int32)
        cache, out = step(cache, tokens, jnp.asarray(count, jnp.int32), *(jnp.asarray(x, jnp.float32) for x in (kv, q)))
        seen.append(np.asarray(out))
        return cache

    cache, events = METHODS["admit"](cache, 0, jnp.arange(6, dtype=jnp.int32), 6)
    assert events.ok
    cache = run(cache, 6, [6, 0])
    cache, _ = METHODS["fork"](cache, 0, 1)
    for _ in range(3):
        cache, events = METHODS["extend"](cache, jnp.array([True, True]))
        assert events.ok
        cache = run(cache, 1, [1, 1])
    return cache, seen


@pytest.mark.long
@pytest.mark.parametrize("dtype", EACH)
def test_attention_is_nearly_that_over_float32_after_writes_and_copies(dtype):
    (cache, got), (_, wanted) = history(dtype), history("float32")
    assert cache.pools.arrays[0][0].dtype == dtype and cache.pools.scales is not None
    chex.assert_tree_all_finite((got, wanted))  # from poisoned pools, also for rows without a token
    for a, b in zip(got, wanted, strict=True):
        error = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-6)
        assert np.max(error) < 3 * DTYPES[dtype] and 0 < np.mean(error) < DTYPES[dtype]


@pytest.mark.long
@pytest.mark.parametrize("dtype", EACH)
def test_scales_are_part_of_a_block_and_of_what_is_donated(dtype):
    cache = make(dtype)
    (group,) = cache.state.spec.groups
    total = sum(x.nbytes for x in jax.tree.leaves(cache.pools))
    assert total == (group.num_blocks + 1) * sum(pool.block_bytes(4) for pool in group.pools)
    zeros = jnp.zeros((2, 2, 2, 1, 2, 32)), jnp.zeros((2, 1, 4, 32))
    args = cache, jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32), *zeros
    assert step.lower(*args).compile().memory_analysis().alias_size_in_bytes >= total


def test_an_index_finds_the_layers_scales():
    """Bytes and scales of each layer are written and read in a scan over layers, from poisoned pools."""
    rng = np.random.default_rng(1)
    spec = kvjax.make_spec(LAYERS, num_blocks=8, max_seqs=2, max_length=8, block_size=4, dtype="int8")
    kv = jnp.asarray(rng.standard_normal((2, 2, 2, 6, 2, 32)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((2, 6, 4, 32)), jnp.float32)
    tables, positions = jnp.array([[3, 5], [0, 6]]), jnp.stack([jnp.arange(6, dtype=jnp.int32)] * 2)
    slots = jnp.take_along_axis(tables, positions // 4, axis=1) * 4 + positions % 4
    six = jnp.array([6, 6])
    view = kvjax.pools.View((tables,), positions, six, (slots,), six)

    def layer(pools, number, named, index=None):
        pools = kvjax.write(pools, named, kv[0][number], kv[1][number], view, index=index)
        return pools, kvjax.attend(q, pools, named, view, index=index)

    @jax.jit
    def scanned(pools):
        return jax.lax.scan(lambda pools, i: layer(pools, i, 1, i), pools, jnp.arange(2, dtype=jnp.int32))

    @jax.jit
    def unrolled(pools):
        pools, first = layer(pools, 0, 0)
        pools, second = layer(pools, 1, 1)
        return pools, jnp.stack([first, second])

    (pools, out), wanted = (run(poisoned(kvjax.init_pools(spec))) for run in (scanned, unrolled))
    chex.assert_trees_all_equal(pools, wanted[0])
    chex.assert_trees_all_close(out, wanted[1], rtol=1e-6, atol=1e-6)
    chex.assert_tree_all_finite(out)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EACH)
def test_recall_is_as_accurate_as_over_float32(dtype):
    assert abs(accuracy(dtype) - accuracy("float32")) <= 0.01


@functools.cache
def accuracy(dtype):
    """The accuracy of the bundled model's answers to questions about all facts of 4 documents of 64."""
    model, _ = load(recall.CHECKPOINT, dtype=jnp.float32)
    tokens, marks = recall.make_batch(np.random.default_rng(0), 4, 64, 64)
    rows, length = tokens.shape
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=rows * -(-length // 16), max_seqs=rows, max_length=length, dtype=dtype
    )
    cache = kvjax.Cache.create(spec)
    cache, events = METHODS["admit"](cache, np.arange(rows, dtype=np.int32), tokens, np.full(rows, length))
    assert events.ok

    @jax.jit
    def answers(model, cache):
        logits, _ = model(jnp.asarray(tokens), cache.pools, cache.view(length))
        return jnp.argmax(logits[:, marks], axis=-1)

    return float(np.mean(np.asarray(answers(model, cache)) == tokens[:, marks + 1]))


@pytest.mark.slow
def test_verify_reports_the_error_of_the_logits(capsys):
    folder = DATA / "goldens" / "llama"
    assert verify.main(["--kv-dtype", "int8", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "not judged: largest logit error" in out and "e-01" in out


def test_pools_of_floats_have_no_scales():
    assert make("bfloat16").pools.scales is None
