# SPDX-License-Identifier: Apache-2.0
"""Queries of their own for the first tokens that a window has passed: places in the cache, as in StreamingLLM."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from kvjax.pools import attend, select_blocks, write
from pallas_kernels.rotary import rotate
from tests.kernels.attention import how
from tests.mesh import mesh_of
from tests.unit.pools.grown import FORMS, HEADS, SINKS, WINDOW, kv_of, on_view, states, without, written

WIDTH = 16


def weights_of(q, sink_q, keys, position, sinks=None):
    """The softmax f64[Q, position + 1] of a query [Q, D] over the tokens that it sees, by its own queries for sinks."""
    distance = position - np.arange(position + 1)
    is_passed = (distance >= WINDOW) & (np.arange(position + 1) < SINKS)
    keys = np.repeat(keys[: position + 1].astype(np.float64), HEADS // keys.shape[1], axis=1)
    scores = [np.einsum("qd,tqd->qt", np.asarray(x, np.float64), keys) * WIDTH**-0.5 for x in (q, sink_q)]
    score = np.where(is_passed, scores[1], np.where(distance < WINDOW, scores[0], -np.inf))
    weight = np.exp(score)
    return weight / (weight.sum(axis=1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None]))


def check(form, implementation=None, sinks=None, packs=False, **mesh):
    """Compares all tokens of a view. All blocks that a row no longer holds have NaN."""
    make, _, seqs = FORMS[form]
    now, kv = make(states("sinks", form)[1]), kv_of("sinks")
    pools = written("sinks", form, **mesh)
    now = now.replace(spec=pools.spec)
    pools = without(write(pools, 0, *on_view(kv, now, seqs), now), 1, np.arange(21) == 20)
    seen = select_blocks(now, np.ones((len(seqs), 16), bool), 1) if packs else now
    q, sink_q = np.random.default_rng(2).standard_normal((2, *now.positions.shape, HEADS, WIDTH)).astype(np.float32)
    run = jax.jit(functools.partial(attend, layer=0, implementation=implementation))
    out = np.asarray(run(q, pools, view=seen, sink_q=sink_q, sinks=sinks)).reshape(-1, HEADS, WIDTH)
    q, sink_q = (x.reshape(-1, HEADS, WIDTH) for x in (q, sink_q))
    starts = np.arange(len(seqs)) * now.positions.shape[1] if now.starts is None else np.asarray(now.starts)
    is_padding = np.ones(len(out), bool)
    for row, (seq, start, count) in enumerate(zip(seqs, starts, np.asarray(now.num_tokens), strict=True)):
        for token in range(start, start + count):
            position = int(now.lengths[row]) - count + token - start
            weight = weights_of(q[token], sink_q[token], kv[0, seq], position, sinks)
            values = np.repeat(kv[1, seq, : position + 1], HEADS // kv.shape[3], axis=1)
            np.testing.assert_allclose(out[token], np.einsum("qt,tqd->qd", weight, values), atol=2e-6)
            is_padding[token] = False
    assert not np.any(out[is_padding])


@pytest.mark.parametrize(
    "form", ["decode", *(pytest.param(form, marks=pytest.mark.long) for form in ("mixed", "padded"))]
)
def test_the_first_tokens_are_seen_by_queries_of_their_own(form):
    check(form)


@pytest.mark.long
def test_a_packed_view_and_a_logit_without_a_value_change_nothing():
    check("ragged", packs=True, sinks=np.array([0.5, -1.0, 2.0, 0.0], np.float32))


@pytest.mark.long
def test_devices_that_divide_heads():
    with mesh_of(1, 2) as mesh:
        check("mixed", mesh=mesh, heads="heads")


@pytest.mark.long
@pytest.mark.parametrize("form", ["decode", "mixed"])
def test_the_triton_kernels(form, monkeypatch):
    call = functools.partial(pallas_kernels.call, **how("triton"))
    monkeypatch.setattr(pallas_kernels, "call", lambda *args, implementation, **options: call(*args, **options))
    check(form, "triton")


def turned(x, positions):
    """x [T, heads, D], rotated for positions [T]."""
    angle = np.asarray(positions)[None, :, None, None] * 100.0 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))
    angles = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    return np.asarray(rotate(jnp.asarray(x)[None], angles))[0]


@pytest.mark.parametrize("position", [4, WINDOW + SINKS - 1, WINDOW + SINKS, 49])
def test_positions_are_places_in_the_cache_of_streamingllm(position):
    """StreamingLLM keeps K without a rotation, and rotates what is in the cache by its place there."""
    rng = np.random.default_rng(0)
    keys, q = rng.standard_normal((50, 2, WIDTH), np.float32), rng.standard_normal((1, HEADS, WIDTH), np.float32)
    kept = np.flatnonzero((np.arange(50) <= position) & ((np.arange(50) > position - WINDOW) | (np.arange(50) < SINKS)))
    places = np.arange(len(kept))
    in_cache = np.repeat(turned(keys[kept], places), HEADS // 2, axis=1)
    score = np.einsum("qd,tqd->qt", turned(q, places[-1:])[0], in_cache) * WIDTH**-0.5
    wanted = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
    own, for_sinks = (turned(q, [place])[0] for place in (position, min(position, WINDOW + SINKS - 1)))
    got = weights_of(own, for_sinks, turned(keys, np.arange(50)), position)
    np.testing.assert_allclose(got[:, kept], wanted, atol=2e-5)


def test_the_derivative_of_queries_for_sinks():
    """Without them the derivative is that of queries alone."""
    make, _, seqs = FORMS["decode"]
    now, kv = make(states("sinks", "decode")[1]), kv_of("sinks")
    pools = written("sinks", "decode")
    now = now.replace(spec=pools.spec)
    pools = without(write(pools, 0, *on_view(kv, now, seqs), now), 1, np.arange(21) == 20)
    pools = jax.tree.map(lambda x: jnp.nan_to_num(x), pools)
    q = np.random.default_rng(2).standard_normal((3, 1, HEADS, WIDTH)).astype(np.float32)
    both = jax.jit(jax.grad(lambda q, sink_q: attend(q, pools, 0, now, sink_q=sink_q).sum(), argnums=(0, 1)))(q, q)
    alone = jax.jit(jax.grad(lambda q: attend(q, pools, 0, now).sum()))(q)
    np.testing.assert_allclose(both[0] + both[1], alone, atol=2e-5)
    assert np.abs(both[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("window", (3, 1, HEADS, WIDTH), "sink_q: got queries for layer 0, wanted None: its LayerSpec has no sink_tok"),
        ("sinks", (3, 1, 2, WIDTH), r"sink_q: got float32\[3, 1, 2, 16\], wanted float32\[3, 1, 4, 16\] as q"),
    ],
)
def test_refusals_name_the_argument(kind, shape, message):
    now, pools = FORMS["decode"][0](states(kind, "decode")[1]), written(kind, "decode")
    with pytest.raises(ValueError, match=f"^{message}"):
        attend(jnp.zeros((3, 1, HEADS, WIDTH)), pools, 0, now.replace(spec=pools.spec), sink_q=jnp.zeros(shape))
