# SPDX-License-Identifier: Apache-2.0
"""A Flax Linen module."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import kvjax


class Model(nn.Module):
    """A decoder of two layers."""

    @nn.compact
    def __call__(self, tokens, pools, view, *, last):
        """The logits after the positions `last`, and the pools."""
        x = nn.Embed(50, 32, name="embed")(tokens)
        for number in range(2):
            qkv, out, up, down = (
                nn.Dense(width, use_bias=False, name=f"{name}_{number}")
                for name, width in {"qkv": 128, "out": 32, "up": 64, "down": 32}.items()
            )
            q, k, v = jnp.split(qkv(x).reshape(*x.shape[:2], 8, 16), [4, 6], axis=2)
            pools = kvjax.write(pools, number, k, v, view)
            y = kvjax.attend(q, pools, number, view)
            x = x + out(y.reshape(*x.shape[:2], -1))
            x = x + down(nn.gelu(up(x)))
        return nn.Dense(50, use_bias=False, name="head")(x[jnp.arange(x.shape[0]), last]), pools


MODULE = Model()  # made once: a bound method of another module compiles anew


def model_of(params):
    """The model of these parameters, as kvjax takes it."""
    return jax.tree_util.Partial(MODULE.apply, params)
