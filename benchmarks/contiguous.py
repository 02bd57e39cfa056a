# SPDX-License-Identifier: Apache-2.0
"""A decode step over contiguous K/V: what `decode_loop` compares the paged cache with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import kvjax
from models.decoder import Decoder
from pallas_kernels.rotary import rotate


def contiguous_kv(cache: kvjax.Cache) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """The rows' K/V without blocks, zeros where nothing is written."""
    kv = cache.pools.arrays[0][0][cache.view(1).tables[0]]  # [S, M, L, 2, K, P, D]
    rows, _, layers, _, heads, _, width = kv.shape
    kv = kv.transpose(2, 3, 0, 4, 1, 5, 6).reshape(layers, 2, rows, heads, -1, width)
    written = jnp.arange(kv.shape[4])[None] < cache.state.seqs.committed[:, None]
    kv = jnp.where(written[None, None, :, None, :, None], kv, 0)
    return tuple((k, v) for k, v in kv)


def attend_contiguous(q, layer, lengths, plain: bool):
    """Attention of q [S, Q, D] to the first lengths i32[S] tokens of a layer; like q."""
    (keys, values), (rows, heads, width) = layer, q.shape
    kv_heads, capacity = keys.shape[1:3]
    q = (q * width**-0.5).reshape(rows, kv_heads, heads // kv_heads, width)
    if plain:
        score = jnp.einsum("skgd,sktd->skgt", q, keys)
    else:
        score = jnp.stack([jnp.einsum("skd,sktd->skt", one, keys) for one in jnp.unstack(q, axis=2)], axis=2)
    seen = jnp.arange(capacity)[None] < lengths[:, None]
    weight = jax.nn.softmax(jnp.where(seen[:, None, None], score, -jnp.inf), axis=-1)
    return jnp.einsum("skgt,sktd->skgd", weight, values).reshape(rows, heads, width)


def contiguous_step(model: Decoder, layers, token, position, plain: bool = True):
    """Logits f32[S, V] after one more token of each row, and the K/V with it."""
    row = jnp.arange(token.size)

    def write(array, x):
        return array.at[row, :, position].set(x[:, 0], unique_indices=True, mode="promise_in_bounds")

    def mix(number, _, layers, q, kv, angles):
        layer = write(layers[number][0], rotate(kv[0], angles)), write(layers[number][1], kv[1])
        y = attend_contiguous(rotate(q, angles)[:, 0], layer, position + 1, plain)
        return y[:, None], (*layers[:number], layer, *layers[number + 1 :])

    x, layers = model._stream(token[:, None], position[:, None], mix, layers)
    return model._logits(x[:, 0]), layers
