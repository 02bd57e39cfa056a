# SPDX-License-Identifier: Apache-2.0
"""Attention mass and bounds of keys, block by block, against sums over each token in numpy."""

import jax
import numpy as np
import pytest

from kvjax.pools import block_mass, key_bounds, select_blocks, write
from tests.mesh import mesh_of
from tests.unit.pools.grown import FORMS, HEADS, LENGTHS, SIZE, kv_of, on_view, states, stored, written


def step(kind, form, dtype="float32", **mesh):
    """Queries, the pools with all K/V, the view of the last tokens, and the K/V as the pools hold them."""
    kv, pools = kv_of(kind), written(kind, form, dtype, **mesh)
    now = FORMS[form][0](states(kind, form)[1]).replace(spec=pools.spec)
    lines = on_view(kv, now, FORMS[form][2])
    pools = jax.jit(lambda pools: write(pools, 0, *lines, now))(pools)
    q = np.random.default_rng(2).standard_normal((*now.positions.shape, HEADS, kv.shape[-1])).astype(np.float32)
    return q, pools, now, stored(kv, dtype)


def masses(q, kv, seqs, now, last=None, scale=None, cap=None):
    """f64[R, K, 16]; the mass of each block, token by token."""
    kv_heads, starts = kv.shape[3], now.starts
    starts = np.arange(len(now.lengths)) * now.positions.shape[1] if starts is None else np.asarray(starts)
    total = np.zeros((len(starts), kv_heads, 16))
    flat = q.reshape(-1, *q.shape[2:]).astype(np.float64)
    for row, (seq, start, count) in enumerate(zip(seqs, starts, np.asarray(now.num_tokens), strict=True)):
        for token in range(max(count - (last or count), 0), count):
            seen = int(now.lengths[row]) - count + token + 1
            for head in range(HEADS):
                kv_head = head * kv_heads // HEADS
                score = kv[0, seq, :seen, kv_head].astype(np.float64) @ flat[start + token, head]
                score = score * (q.shape[-1] ** -0.5 if scale is None else scale)
                score = score if cap is None else cap * np.tanh(score / cap)
                weight = np.exp(score - score.max())
                np.add.at(total[row, kv_head], np.arange(seen) // SIZE, weight / weight.sum())
    return total


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [
        ("kv", "padded", "float32"),
        pytest.param("kv", "mixed", "float32", marks=pytest.mark.long),
        pytest.param("latents", "decode", "float32", marks=pytest.mark.long),
        pytest.param("kv", "ragged", "int8", marks=pytest.mark.long),
    ],
)
def test_mass_is_the_sum_of_the_weights_of_a_blocks_tokens(kind, form, dtype):
    q, pools, now, kv = step(kind, form, dtype)
    for options in ({}, {"last": 2, "scale": 0.3, "soft_cap": 1.5}):
        got = jax.jit(lambda q, pools, options=options: block_mass(q, pools, 0, now, **options))(q, pools)
        wanted = masses(q, kv, FORMS[form][2], now, options.get("last"), options.get("scale"), options.get("soft_cap"))
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_mass_within_a_choice_is_that_of_its_tokens_alone():
    """The columns are the packed view's."""
    q, pools, now, kv = step("kv", "decode")
    seen = select_blocks(now, np.arange(16) == 2)
    got = block_mass(q, pools, 0, seen)
    tokens = [*range(8, 12), *range(36, 37)]  # of row 0: block 2, then its own
    short = now.replace(lengths=np.array([5]), num_tokens=np.array([1]))
    wanted = masses(q[:1], kv[:, :1, tokens], [0], short)
    np.testing.assert_allclose(got[0], wanted[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("kind", "dtype"), [("kv", "float32"), pytest.param("kv", "int8", marks=pytest.mark.long)])
def test_bounds_are_the_smallest_and_largest_keys(kind, dtype):
    _, pools, now, kv = step(kind, "decode", dtype)
    low, high = key_bounds(pools, 0, now)
    for row, length in enumerate(LENGTHS):
        for column in range(16):
            keys = kv[0, row, column * SIZE : min((column + 1) * SIZE, length)]
            np.testing.assert_array_equal(low[row, :, column], keys.min(axis=0, initial=np.inf))
            np.testing.assert_array_equal(high[row, :, column], keys.max(axis=0, initial=-np.inf))


@pytest.mark.long
def test_heads_may_be_divided_and_tokens_of_blocks_not():
    q, pools, now, _ = step("kv", "padded")
    with mesh_of(2, 2, names=("heads", "context")) as mesh:
        _, divided, _, _ = step("kv", "padded", mesh=mesh, heads="heads")
        got = jax.jit(lambda q, pools: (block_mass(q, pools, 0, now), *key_bounds(pools, 0, now)))(q, divided)
        wanted = block_mass(q, pools, 0, now), *key_bounds(pools, 0, now)
        for part, of in zip(got, wanted, strict=True):
            np.testing.assert_allclose(part, of, rtol=1e-6, atol=1e-6)
        _, parts, _, _ = step("kv", "padded", mesh=mesh, heads="heads", context="context")
        for call in (lambda: block_mass(q, parts, 0, now), lambda: key_bounds(parts, 0, now)):
            with pytest.raises(ValueError, match="pools: got blocks whose tokens axis 'context' divides"):
                call()


def test_queries_have_to_fit():
    q, pools, now, _ = step("kv", "decode")
    with pytest.raises(ValueError, match=r"q: got shape \(3, 2, 4, 16\), wanted \(3, 1, 'Q', 16\)"):
        block_mass(np.concatenate([q, q], axis=1), pools, 0, now)
