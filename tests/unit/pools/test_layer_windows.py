# SPDX-License-Identifier: Apache-2.0
"""`attend` masks by the window of the layer's spec, with a static and with a traced layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.unit.pools.hand_made import normal

WINDOW, LENGTH = 6, 20


def dense(q, k, v, window):
    """Attention of the last tokens over all tokens, in plain numpy."""
    length = k.shape[0]
    score = np.einsum("chd,thd->hct", q, np.repeat(k, 2, 1)) * q.shape[-1] ** -0.5
    distance = np.arange(length - q.shape[0], length)[:, None] - np.arange(length)
    score = np.where((distance >= 0) & (distance < window), score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hct,thd->chd", weight / weight.sum(-1, keepdims=True), np.repeat(v, 2, 1))


def row_of(layers):
    """Pools with K/V of a row in all layers, written without `commit`, so that no block is released."""
    spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=1, max_length=32, block_size=4, dtype="float32")
    state, _ = jax.jit(kvjax.admit)(kvjax.init(spec), 0, np.arange(LENGTH), LENGTH)
    view = kvjax.view(state, LENGTH)
    kv = [np.asarray(normal(layer, 2, LENGTH, 2, 8)) for layer in range(len(layers))]
    pools = kvjax.init_pools(spec)
    for layer, (k, v) in enumerate(kv):
        pools = kvjax.write(pools, layer, k[None], v[None], view)
    return pools, view, kv, np.asarray(normal(9, LENGTH, 4, 8))


def test_each_layer_has_its_window():
    pools, view, kv, q = row_of([kvjax.LayerSpec(2, 8), kvjax.LayerSpec(2, 8, window=WINDOW)])
    for layer, window in enumerate((LENGTH, WINDOW)):
        got = kvjax.attend(q[None], pools, layer, view)
        np.testing.assert_allclose(got[0], dense(q, *kv[layer], window), atol=1e-5)
    same = kvjax.attend(q[None], pools, 1, view, window=WINDOW)
    np.testing.assert_array_equal(same, got)


def test_a_traced_layer_has_the_window_of_its_pool():
    pools, view, kv, q = row_of([kvjax.LayerSpec(2, 8, window=WINDOW)] * 2)
    got = jax.jit(lambda layer: kvjax.attend(q[None], pools, layer, view))(jnp.int32(1))
    np.testing.assert_allclose(got[0], dense(q, *kv[1], WINDOW), atol=1e-5)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, 100])
def test_another_window_than_the_layers_is_refused(window):
    pools, view, _, q = row_of([kvjax.LayerSpec(2, 8, window=WINDOW)])
    with pytest.raises(ValueError, match=f"^window: got {window} for layer 0, wanted {WINDOW} as in its LayerSpec, or"):
        kvjax.attend(q[None], pools, 0, view, window=window)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_a_window_of_a_layer_without_one_is_refused(transform):
    """Its rows would hold all blocks for ever."""
    pools, view, _, q = row_of([kvjax.LayerSpec(2, 8)])
    attend = transform(lambda layer: kvjax.attend(q[None], pools, layer, view, window=WINDOW))
    with pytest.raises(
        ValueError, match=r"^window: got 6 for (layer 0|a traced layer), wanted kvjax.LayerSpec\(window=6\), or None"
    ):
        attend(0)
