# SPDX-License-Identifier: Apache-2.0
"""A model that is a function of its weights."""

import jax
import jax.numpy as jnp

import kvjax


def forward(weights, tokens, pools, view, *, last):
    """The logits after the positions `last`, and the pools."""
    x = jnp.take(weights["embed"], tokens, axis=0)
    for number, layer in enumerate(weights["layers"]):
        heads = (x @ layer["qkv"]).reshape(*x.shape[:2], 8, 16)
        q, k, v = jnp.split(heads, [4, 6], axis=2)
        pools = kvjax.write(pools, number, k, v, view)
        y = kvjax.attend(q, pools, number, view)
        x = x + y.reshape(*x.shape[:2], -1) @ layer["out"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x[jnp.arange(x.shape[0]), last] @ weights["head"], pools


def model_of(weights):
    """The model of these weights, as kvjax takes it."""
    return jax.tree_util.Partial(forward, weights)
