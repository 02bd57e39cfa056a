# SPDX-License-Identifier: Apache-2.0
"""An Equinox module whose leaves are all arrays: it is a model as it is."""

import equinox as eqx
import jax
import jax.numpy as jnp

import kvjax


class Layer(eqx.Module):
    """The weights of a layer."""

    down: jax.Array
    out: jax.Array
    qkv: jax.Array
    up: jax.Array


class Model(eqx.Module):
    """A decoder."""

    embed: jax.Array
    head: jax.Array
    layers: tuple[Layer, ...]

    def __call__(self, tokens, pools, view, *, last):
        """The logits after the positions `last`, and the pools."""
        x = jnp.take(self.embed, tokens, axis=0)
        for number, layer in enumerate(self.layers):
            heads = (x @ layer.qkv).reshape(*x.shape[:2], 8, 16)
            q, k, v = jnp.split(heads, [4, 6], axis=2)
            pools = kvjax.write(pools, number, k, v, view)
            y = kvjax.attend(q, pools, number, view)
            x = x + y.reshape(*x.shape[:2], -1) @ layer.out
            x = x + jax.nn.gelu(x @ layer.up) @ layer.down
        return x[jnp.arange(x.shape[0]), last] @ self.head, pools
