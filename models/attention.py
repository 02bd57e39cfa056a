# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values, through a paged cache (`Paged`) or over whole sequences (`Dense`).

`ModelConfig.layers` has an entry for each layer: a `LayerConfig` for attention, or another `Mixer` of the family.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from pallas_kernels.rotary import rotate

from .norm import RMSNorm
from .rope import Angles, Rope
from .scan import ScanPosition

# Types of layers in a config.json.
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


class Mixer:
    """The config of a module that mixes a layer's tokens.

    It is a frozen dataclass, because layers with equal configs are scanned.

    Attributes:
      name: the module's name in the layer and in checkpoints.
      layer_type: the layer's type in a config.json.
      reuses: index of the earlier layer whose keys and values this layer attends to; None gives it its own.
      rotation: the rope, and the width of the heads it rotates; None leaves tokens without a position.
      module: class of the module, made from a `ModelConfig`, this config, a dtype and `nnx.Rngs`, as `Attention` is.
    """

    name: ClassVar[str] = "self_attn"
    layer_type: str = FULL
    reuses: int | None = None
    rotation: tuple[Rope, int] | None = None
    module: ClassVar[type[Any]]

    def spec(self) -> kvjax.LayerSpec:
        """The layer's part of the cache."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Paged:
    """Mixing of a layer's tokens through the paged cache.

    Attributes:
      view: the cache's view for these tokens.
      layer_index: the layer, or in a scan the first layer of its phase.
      turn: the layer of the phase; None outside a scan.
    """

    view: kvjax.pools.View
    layer_index: int
    turn: ScanPosition | None = None

    @property
    def positions(self) -> jax.Array:
        """i32[R, C]; the position of each token."""
        return self.view.positions

    def attend(self, cache, q, kv, angles, *, scale, sinks, sink_angles=None):
        """Attends from q [R, C, Q, D] to the cache after writing `kv`, which is k and v [R, C, K, D].

        `angles` rotate q and k here, and `sink_angles` rotate q for the first tokens that a window has passed. If `kv`
        is the index of an earlier layer, q attends to that layer's keys and values, and nothing is written. `scale` and
        `sinks` go to `kvjax.attend`, which knows the layer's window.

        Returns:
          The mixed values [R, C, Q, D], and the cache.
        """
        options: dict[str, Any] = {"scale": scale, "sinks": sinks}
        if sink_angles is not None:
            options["sink_q"] = rotate(q, sink_angles)
        if isinstance(kv, int):
            return kvjax.attend(rotate(q, angles), cache, kv, self.view, **options), cache
        k, v = kv
        index = self._index(cache)
        q, cache = kvjax.rope_write(cache, self.layer_index, q, k, v, angles, self.view, index=index)
        return kvjax.attend(q, cache, self.layer_index, self.view, index=index, **options), cache

    def attend_latents(self, cache, q, latents, values, scale):
        """Attends from q [R, C, Q, L] to the cached latents after writing latents [R, C, 1, L].

        The first `values` columns of a latent are its values, as the cache's spec says too.

        Returns:
          The mixed values [R, C, Q, values], and the cache.
        """
        index = self._index(cache)
        cache = kvjax.write(cache, self.layer_index, latents, None, self.view, index=index)
        return kvjax.attend(q, cache, self.layer_index, self.view, index=index, scale=scale), cache

    def recur(self, cache, cell, inputs):
        """Runs a cell from the states in the cache. Returns its outputs [R, C, ...] and the cache."""
        return kvjax.recur(cell, cache, self.layer_index, self.view, inputs, index=self._index(cache))

    def _index(self, cache) -> jax.Array | None:
        return None if self.turn is None else self.turn.index(cache.spec)


@dataclasses.dataclass(frozen=True)
class Dense:
    """Mixing of a layer's tokens in whole sequences, with the methods of `Paged`.

    `cache` is a dict here. It maps the index of a layer to its keys and values, if other layers reuse them.

    Attributes:
      layer_index: the layer.
      is_reused: whether other layers attend to its keys and values.
      positions: i32[1, T]; the position of each token.
      window: the layer's window. None means no limit.
      sink_tokens: the number of first tokens that the window leaves visible.
    """

    layer_index: int
    is_reused: bool
    positions: jax.Array
    window: int | None = None
    sink_tokens: int = 0

    def attend(self, cache, q, kv, angles, *, scale, sinks, sink_angles=None):
        """See `Paged`."""
        k, v = cache[kv] if isinstance(kv, int) else (rotate(kv[0], angles), kv[1])
        cache = {**cache, self.layer_index: (k, v)} if self.is_reused else cache
        first = None if sink_angles is None else (rotate(q, sink_angles), self.sink_tokens)
        return dense_attention(rotate(q, angles), k, v, self.window, scale, sinks, first), cache

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
    """Grouped-query attention, perhaps with norms of queries and keys, a gate on its output, and sinks.

    A sink is an extra logit of a query head. It takes weight from the other logits, but has no value.
    """

    def __init__(self, config: Any, layer: LayerConfig, dtype, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, config.hidden_size, use_bias=config.qkv_bias, param_dtype=dtype, rngs=rngs)
        norm = partial(RMSNorm, layer.head_dim, config, dtype)
        self.layer = layer
        self.scale = config.attention_scale
        self.is_gated = config.output_gate
        queries = config.num_heads * layer.head_dim
        keys = layer.kv_heads * layer.head_dim
        self.q_proj = linear(queries * (2 if self.is_gated else 1))  # a query, then its gate
        if layer.reuses is None:
            self.k_proj = linear(keys)
            if not layer.keys_are_values:
                self.v_proj = linear(keys)
            self.k_norm = norm() if config.qk_norm else None
            self.v_norm = norm(weights=False) if config.value_norm else None
        self.o_proj = nnx.Linear(queries, config.hidden_size, use_bias=config.out_bias, param_dtype=dtype, rngs=rngs)
        self.q_norm = norm() if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(config.num_heads, dtype)) if config.sinks else None

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """Mixes x [R, C, E]. Returns the mixed values [R, C, E] and the cache."""
        layer = self.layer
        kv = layer.reuses
        q = self.q_proj(x)
        gate = None
        if self.is_gated:
            q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * layer.head_dim), 2, axis=-1)
        q = self._heads(q, self.q_norm)
        if kv is None:
            k = self.k_proj(x)
            v = k if layer.keys_are_values else self.v_proj(x)
            kv = self._heads(k, self.k_norm), self._heads(v, self.v_norm)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        sink_angles = layer.sink_angles(mixing.positions) if layer.sink_tokens else None
        y, cache = mixing.attend(cache, q, kv, angles, scale=self.scale, sinks=sinks, sink_angles=sink_angles)
        y = y if gate is None else y * jax.nn.sigmoid(gate)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def _heads(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1, self.layer.head_dim)
        return x if norm is None else norm(x)


@dataclasses.dataclass(frozen=True)
class LayerConfig(Mixer):
    """An attention layer.

    Attributes:
      kv_heads: K.
      head_dim: D, the width of queries, keys and values.
      window: number of tokens a token attends to, itself included; None means no limit.
      rope: the rotation of queries and keys.
      keys_are_values: whether the values are the keys before norm and rope, instead of a separate projection.
      reuses: index of the earlier layer whose keys and values this layer attends to; None gives it its own.
      sink_tokens: the number of first tokens that stay visible when the window has passed them. Their distance then
        stays what it was, as in StreamingLLM.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: Rope = dataclasses.field(default_factory=Rope)
    keys_are_values: bool = False
    reuses: int | None = None
    sink_tokens: int = 0
    module: ClassVar[type[Any]] = Attention

    def check(self, num_heads: int) -> LayerConfig:
        """Returns this config. Raises a ValueError if K does not divide the heads, D is odd, or the rope is unfit."""
        if num_heads % self.kv_heads:
            wanted = f"a divisor of num_attention_heads={num_heads}"
            raise ValueError(f"num_key_value_heads: got {self.kv_heads}, wanted {wanted}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, wanted an even number")
        self.rope.check(self.head_dim)
        return self

    @property
    def layer_type(self) -> str:
        """The type of a layer with or without a window."""
        return FULL if self.window is None else SLIDING

    @property
    def rotation(self) -> tuple[Rope, int]:
        """The rope, and the width of a head."""
        return self.rope, self.head_dim

    def spec(self) -> kvjax.LayerSpec:
        """The data that the layer keeps in the cache. Blocks outside the window are released."""
        return kvjax.LayerSpec(self.kv_heads, self.head_dim, self.window, self.sink_tokens)

    def sink_angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine that rotate queries at `positions i32[R, C]` for the first tokens.

        A token whose window has passed them sees them just before its window, at positions inside of the cache.

        Source: StreamingLLM.
        """
        assert self.window is not None
        return self.rope.angles(jnp.minimum(positions, self.window + self.sink_tokens - 1), self.head_dim)


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, window=None, scale=None, sinks=None, first=None
) -> jax.Array:
    """Attention over whole sequences, with the options of `kvjax.attend`, which computes the same from a cache.

    Args:
      q: [B, T, Q, D].
      k: [B, T, K, D].
      v: [B, T, K, V].
      window: number of tokens a token attends to; None means no limit.
      scale: factor on the scores; None defaults to 1 / sqrt(D).
      sinks: f32[Q]; None disables sinks.
      first: queries [B, T, Q, D] for the first tokens that a window has passed, and the number of these tokens. None
        means nobody sees them.

    Returns:
      The mixed values [B, T, Q, V].
    """
    batch, length, heads, width = q.shape

    def scores_of(q):
        q = q.reshape(batch, length, k.shape[2], -1, width)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
        return scores * (width**-0.5 if scale is None else scale)

    scores = scores_of(q)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (length if window is None else window))
    if first is not None:
        assert window is not None
        sink_q, sink_tokens = first
        is_passed = (distance >= window) & (jnp.arange(length)[None] < sink_tokens)
        scores = jnp.where(is_passed[None, None, None], scores_of(sink_q), scores)
        seen = seen | is_passed
    scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(1, k.shape[2], -1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, length, heads, v.shape[-1])
