# SPDX-License-Identifier: Apache-2.0
"""One decoder for Llama 3, Mistral, Qwen2 and Qwen3: the cache goes in as an argument and comes out as a result.

Modules are named as in Hugging Face checkpoints, so that loading needs no table of names. Shapes use the legend
of `kvjax.state`, with R rows of C tokens in a call and E the width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from models.config import ModelConfig
from models.rope import rotate

# (cache, layer number, q [R, C, Q, D], k [R, C, K, D], v [R, C, K, D]) -> (mixed values [R, C, Q, D], cache)
Mix = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class RMSNorm(nnx.Module):
    """Scales the last axis to mean square one, in float32."""

    def __init__(self, width: int, eps: float, dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] in its own dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.expand_dims(self.scale[...], range(x.ndim - 1))


class Attention(nnx.Module):
    """Grouped-query attention; how queries meet keys, and where keys are kept, is the caller's `mix`."""

    def __init__(self, config: ModelConfig, number: int, dtype, rngs: nnx.Rngs):
        layer = config.layers[number]
        width, heads, self.head_dim, self.number = config.hidden_size, config.num_heads, layer.head_dim, number

        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=dtype, rngs=rngs)

        self.q_proj = linear(width, heads * layer.head_dim, config.qkv_bias)
        self.k_proj = linear(width, layer.kv_heads * layer.head_dim, config.qkv_bias)
        self.v_proj = linear(width, layer.kv_heads * layer.head_dim, config.qkv_bias)
        self.o_proj = linear(heads * layer.head_dim, width, config.out_bias)
        self.q_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def __call__(self, x: jax.Array, angles, mix: Mix, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        y, cache = mix(cache, self.number, rotate(q, angles), rotate(k, angles), v)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class MLP(nnx.Module):
    """Gated with silu."""

    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.up_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.down_proj = nnx.Linear(inner, width, use_bias=bias, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[R, C, E] to [R, C, E]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention, then the MLP, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, number: int, dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, number, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: jax.Array, angles, mix: Mix, cache):
        """The stream [R, C, E] after this layer; and the cache."""
        mixed, cache = self.self_attn(self.input_layernorm(x), angles, mix, cache)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """A decoder-only transformer.

    It holds weights and nothing else: under `jit` pass it as an argument like any pytree.

    Args:
      config: what to build.
      dtype: of weights and activations; norms, softmax and logits are float32 whatever it is.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, number, dtype, rngs) for number in range(len(config.layers))])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, param_dtype=dtype, rngs=rngs
            )

    def layer_specs(self) -> list[kvjax.LayerSpec]:
        """The K/V shape of every layer, for `kvjax.make_spec` and `kvjax.plan`.

        All are of full attention: a window is a mask here, and the cache keeps what is outside it.
        """
        return [kvjax.LayerSpec(layer.kv_heads, layer.head_dim) for layer in self.config.layers]

    def __call__(self, tokens: jax.Array, pools, view, *, last: jax.Array | None = None):
        """Runs the next tokens of every row through the paged cache.

        Args:
          tokens: i32[R, C]; ids in 0..V-1, also where the view has padding.
          pools: the K/V written so far.
          view: `kvjax.view` of the cache for these tokens.
          last: i32[R]; the one position in 0..C-1 of each row whose logits are wanted. None: all of them.

        Returns:
          logits f32[R, C, V], or f32[R, V] with `last`; and the pools with these tokens' K/V.
        """

        def mix(pools, number, q, k, v):
            pools = kvjax.write(pools, number, k, v, view)
            return kvjax.attend(q, pools, number, view, window=self.config.layers[number].window), pools

        x, pools = self._stream(tokens, view.positions, mix, pools)
        if last is not None:
            return self._logits(x[jnp.arange(x.shape[0]), last]), pools
        return self._logits(x), pools

    def dense(self, tokens: jax.Array, places: jax.Array | None = None) -> jax.Array:
        """The same logits without a cache, from whole sequences: for training, and as the tests' reference.

        Args:
          tokens: i32[B, T].
          places: i32[A]; positions whose logits are wanted. None: all T.

        Returns:
          f32[B, T, V], or f32[B, A, V] with `places`.
        """

        def mix(cache, number, q, k, v):
            return dense_attention(q, k, v, self.config.layers[number].window), cache

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x, _ = self._stream(tokens, positions, mix, None)
        return self._logits(x if places is None else x[:, places])

    def _stream(self, tokens, positions, mix: Mix, cache):
        """The residual stream [R, C, E] after all layers, and the cache."""
        shapes = {(layer.rope, layer.head_dim) for layer in self.config.layers}
        angles = {(rope, width): rope.angles(positions, width) for rope, width in shapes}
        x = self.embed_tokens(tokens)
        for layer, shape in zip(self.layers, self.config.layers, strict=True):
            with jax.named_scope(f"layer{layer.self_attn.number}"):
                x, cache = layer(x, angles[shape.rope, shape.head_dim], mix, cache)
        return x, cache

    def _logits(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("logits"):
            if self.config.tie_word_embeddings:
                matrix, contract = self.embed_tokens.embedding[...], 1
            else:
                matrix, contract = self.lm_head.kernel[...], 0
            axes = (((x.ndim - 1,), (contract,)), ((), ()))
            return jax.lax.dot_general(self.norm(x), matrix, axes, preferred_element_type=jnp.float32)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    """Causal attention over whole sequences, softmax in float32.

    Args:
      q: [B, T, Q, D].
      k: [B, T, K, D]; each kv head serves Q / K query heads.
      v: likewise.
      window: a token attends to the last `window` tokens, itself included. None: to all before it.

    Returns:
      [B, T, Q, D].
    """
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * width**-0.5
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (length if window is None else window))
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, length, heads, width)
