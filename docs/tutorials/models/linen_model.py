# SPDX-License-Identifier: Apache-2.0
"""A Flax Linen module."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import kvjax


def dense(name, width):
    """A product with a matrix."""
    return nn.Dense(width, use_bias=False, name=name)


class Layer(nn.Module):
    """Attention through the cache, and an MLP."""

    number: int

    @nn.compact
    def __call__(self, x, pools, view):
        """The stream after this layer, and the pools."""
        heads = dense("qkv", 8 * 16)(x).reshape(*x.shape[:2], 8, 16)
        q, k, v = jnp.split(heads, [4, 6], axis=2)
        pools = kvjax.write(pools, self.number, k, v, view)
        y = kvjax.attend(q, pools, self.number, view)
        x = x + dense("out", x.shape[-1])(y.reshape(*x.shape[:2], -1))
        return x + dense("down", x.shape[-1])(nn.gelu(dense("up", 64)(x))), pools


class Model(nn.Module):
    """A decoder of two layers."""

    @nn.compact
    def __call__(self, tokens, pools, view, *, last):
        """The logits after the positions `last`, and the pools."""
        x = nn.Embed(50, 32, name="embed")(tokens)
        for number in range(2):
            x, pools = Layer(number, name=f"layer_{number}")(x, pools, view)
        return dense("head", 50)(x[jnp.arange(x.shape[0]), last]), pools


MODULE = Model()  # made once: a bound method of another module compiles anew


def model_of(params):
    """The model of these parameters, as kvjax takes it."""
    return jax.tree_util.Partial(MODULE.apply, params)
