# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values, and the ways in which one layer's tokens reach each other.

A layer of a `ModelConfig` is the config of what mixes its tokens: a `LayerConfig`, or another `Mixer` of its family.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from pallas_kernels.rotary import rotate

from .norm import RMSNorm
from .rope import Angles, Rope
from .scan import Turn


class Mixer:
    """The config of a module that mixes a layer's tokens; a frozen dataclass, since layers of equal ones are scanned.

    Attributes:
      name: of the module in the layer, as in checkpoints.
      reuses: number of the earlier layer whose keys and values this one attends to; it has none itself.
    """

    name: ClassVar[str] = "self_attn"
    reuses: int | None = None

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """The rope, and the width of the heads that it rotates; None: tokens have no position."""
        return None

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        raise NotImplementedError

    def module(self, config: Any, dtype, rngs: nnx.Rngs) -> nnx.Module:
        """The module in a model of this `ModelConfig`, which is called like `Attention`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LayerConfig(Mixer):
    """One attention layer: K kv heads of width D, its window (None: full attention) and its rope.

    A token attends to the last `window` tokens, itself included.

    Attributes:
      kv_heads: K.
      head_dim: D, of queries, keys and values.
      window: in tokens.
      rope: how queries and keys are rotated.
      keys_are_values: whether the values are the keys' projection (before norm and rope) instead of their own.
      reuses: number of the earlier layer whose keys and values this one attends to; it has none itself.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: Rope = dataclasses.field(default_factory=Rope)
    keys_are_values: bool = False
    reuses: int | None = None

    def check(self, num_heads: int) -> LayerConfig:
        """Returns itself; ValueError if K does not divide the query heads, D is odd, or the rope does not fit."""
        if num_heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads: got {self.kv_heads}, wanted a divisor of num_attention_heads={num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, wanted an even number")
        self.rope.check(self.head_dim)
        return self

    @property
    def rotation(self) -> tuple[Rope, int]:
        """The rope, and the width of a head."""
        return self.rope, self.head_dim

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache; blocks that have left the window are released."""
        return kvjax.LayerSpec(self.kv_heads, self.head_dim, self.window)

    def module(self, config: Any, dtype, rngs: nnx.Rngs) -> Attention:
        """The module."""
        return Attention(config, self, dtype, rngs)


@dataclasses.dataclass(frozen=True)
class Paged:
    """The way in which one layer's tokens reach each other: through the paged cache.

    Attributes:
      view: of the cache.
      layer: number of the layer.
      owner: number of the layer whose keys and values it attends to.
      turn: tells in a scan which of several layers it is.
    """

    view: kvjax.pools.View
    layer: int
    owner: int
    turn: Turn | None = None

    def attend(self, cache, q, kv, angles, *, window, scale, sinks):
        """The mixed values [R, C, Q, D] of q [R, C, Q, D], and k and v [R, C, K, D]; and the cache.

        q and k are yet to be rotated by `angles`. Without `kv` the layer attends to those of `owner`. The other
        arguments are those of `kvjax.attend`.
        """
        index = None if kv is None else self._index(cache)
        if kv is None:
            q = rotate(q, angles)
        else:
            q, cache = kvjax.rope_write(cache, self.layer, q, kv[0], kv[1], angles, self.view, index=index)
        options: dict[str, Any] = {"index": index, "scale": scale, "window": window, "sinks": sinks}
        return kvjax.attend(q, cache, self.owner, self.view, **options), cache

    def attend_latents(self, cache, q, latents, values, scale):
        """The mixed latents [R, C, Q, values] of q [R, C, Q, L] and latents [R, C, 1, L]; and the cache.

        The cache knows how many columns are values.
        """
        index = self._index(cache)
        cache = kvjax.write(cache, self.layer, latents, None, self.view, index=index)
        return kvjax.attend(q, cache, self.layer, self.view, index=index, scale=scale), cache

    def recur(self, cache, cell, inputs):
        """The outputs [R, C, ...] of a cell; and the cache."""
        return kvjax.recur(cell, cache, self.layer, self.view, inputs, index=self._index(cache))

    def _index(self, cache) -> jax.Array | None:
        return None if self.turn is None else self.turn.index(cache.spec)


@dataclasses.dataclass(frozen=True)
class Dense:
    """The same in whole sequences, where `cache` is a dict of the keys and values that other layers reuse, by number.

    Attributes:
      layer: number of the layer.
      owner: number of the layer whose keys and values it attends to.
      is_reused: whether others attend to those of this layer.
    """

    layer: int
    owner: int
    is_reused: bool

    def attend(self, cache, q, kv, angles, *, window, scale, sinks):
        """See `Paged`."""
        k, v = cache[self.owner] if kv is None else (rotate(kv[0], angles), kv[1])
        cache = {**cache, self.layer: (k, v)} if self.is_reused else cache
        return dense_attention(rotate(q, angles), k, v, window, scale, sinks), cache

    def attend_latents(self, cache, q, latents, values, scale):
        """See `Paged`."""
        return dense_attention(q, latents, latents[..., :values], scale=scale), cache

    def recur(self, cache, cell, inputs):
        """See `Paged`."""
        rows, length = jax.tree.leaves(inputs)[0].shape[:2]
        outputs, _ = cell(cell.zeros(rows), inputs, jnp.full(rows, length, jnp.int32))
        return outputs, cache


type Mixing = Paged | Dense


class Attention(nnx.Module):
    """Grouped-query attention; perhaps with norms of queries and keys, a gate on its output, and sinks.

    A sink is a logit of a query head that has no value.
    """

    def __init__(self, config: Any, layer: LayerConfig, dtype, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=dtype, rngs=rngs)

        def norm(wanted: bool, weights: bool = True) -> RMSNorm | None:
            return RMSNorm(layer.head_dim, config, dtype, weights) if wanted else None

        self.layer, self.scale, self.is_gated = layer, config.attention_scale, config.output_gate
        width, heads = config.hidden_size, config.num_heads
        queries = heads * layer.head_dim
        self.q_proj = linear(width, queries * (2 if self.is_gated else 1), config.qkv_bias)  # a query, then its gate
        if layer.reuses is None:
            self.k_proj = linear(width, layer.kv_heads * layer.head_dim, config.qkv_bias)
            if not layer.keys_are_values:
                self.v_proj = linear(width, layer.kv_heads * layer.head_dim, config.qkv_bias)
            self.k_norm, self.v_norm = norm(config.qk_norm), norm(config.value_norm, weights=False)
        self.o_proj = linear(queries, width, config.out_bias)
        self.q_norm = norm(config.qk_norm)
        self.sinks = nnx.Param(jnp.zeros(heads, dtype)) if config.sinks else None

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        layer, q, gate, kv = self.layer, self.q_proj(x), None, None
        if self.is_gated:
            q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * layer.head_dim), 2, axis=-1)
        q = self._heads(q, self.q_norm)
        if layer.reuses is None:
            k = self.k_proj(x)
            v = k if layer.keys_are_values else self.v_proj(x)
            kv = self._heads(k, self.k_norm), self._heads(v, self.v_norm)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        y, cache = mixing.attend(cache, q, kv, angles, window=layer.window, scale=self.scale, sinks=sinks)
        y = y if gate is None else y * jax.nn.sigmoid(gate)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def _heads(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1, self.layer.head_dim)
        return x if norm is None else norm(x)


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention over whole sequences, softmax in float32.

    Args:
      q: [B, T, Q, D].
      k: [B, T, K, D]; each kv head serves Q / K query heads.
      v: [B, T, K, V]; likewise.
      window: a token attends to the last `window` tokens, itself included. None: to all before it.
      scale: factor on the scores; None: 1 / sqrt(D).
      sinks: f32[Q]; per query head one more logit in the softmax's denominator, with no value.

    Returns:
      [B, T, Q, V].
    """
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = scores * (width**-0.5 if scale is None else scale)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (length if window is None else window))
    scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(1, k.shape[2], -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, length, heads, v.shape[-1])
