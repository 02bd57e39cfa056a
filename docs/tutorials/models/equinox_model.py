# SPDX-License-Identifier: Apache-2.0
"""An Equinox module. Its arrays are weights; all other leaves are static."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

import kvjax


class Layer(eqx.Module):
    """Attention through the cache, and an MLP."""

    down: jax.Array
    out: jax.Array
    qkv: jax.Array
    up: jax.Array
    activation: Callable

    def __call__(self, x, number, pools, view):
        """The stream after this layer, and the pools."""
        heads = (x @ self.qkv).reshape(*x.shape[:2], 8, 16)
        q, k, v = jnp.split(heads, [4, 6], axis=2)
        pools = kvjax.write(pools, number, k, v, view)
        y = kvjax.attend(q, pools, number, view)
        x = x + y.reshape(*x.shape[:2], -1) @ self.out
        return x + self.activation(x @ self.up) @ self.down, pools


class Model(eqx.Module):
    """A decoder."""

    embed: jax.Array
    head: jax.Array
    layers: tuple[Layer, ...]

    def __call__(self, tokens, pools, view, *, last):
        """The logits after the positions `last`, and the pools."""
        x = jnp.take(self.embed, tokens, axis=0)
        for number, layer in enumerate(self.layers):
            x, pools = layer(x, number, pools, view)
        return x[jnp.arange(x.shape[0]), last] @ self.head, pools


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["static"])
@dataclasses.dataclass(frozen=True)
class EquinoxModel:
    """A module in two halves, as `eqx.partition` divides it."""

    arrays: eqx.Module
    static: eqx.Module

    def __call__(self, *args, **options):
        """Calls the whole module."""
        return eqx.combine(self.arrays, self.static)(*args, **options)


def model_of(module):
    """The model of this module, as kvjax takes it."""
    return EquinoxModel(*eqx.partition(module, eqx.is_array))
