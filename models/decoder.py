# SPDX-License-Identifier: Apache-2.0
"""One decoder for Llama 3, Mistral, Qwen and Gemma: the cache goes in as an argument and comes out as a result.

Modules are named as in Hugging Face checkpoints, so that loading needs no table of names. Shapes use the legend
of `kvjax.state`, with R rows of C tokens in a call and E the width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from pallas_kernels.rotary import rotate

from .config import ModelConfig
from .norm import RMSNorm
from .placement import under_auto_axes
from .rope import rotary_tables
from .scan import Run, longest_run, over_layers, parted, stacked

Pair = tuple[jax.Array, jax.Array]
# (cache, q [R, C, Q, D], k and v [R, C, K, D] or None, cosine and sine by which q and k are yet to be rotated)
# -> (mixed values [R, C, Q, D], cache), of one layer
Mix = Callable[[Any, jax.Array, Pair | None, Pair], tuple[jax.Array, Any]]
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


class Attention(nnx.Module):
    """Grouped-query attention; the caller's `mix` keeps keys and values, and mixes the values."""

    def __init__(self, config: ModelConfig, number: int, dtype, rngs: nnx.Rngs):
        self.layer = layer = config.layers[number]
        width, heads = config.hidden_size, config.num_heads

        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=dtype, rngs=rngs)

        def norm(wanted: bool, weights: bool = True) -> RMSNorm | None:
            return RMSNorm(layer.head_dim, config, dtype, weights) if wanted else None

        self.q_proj = linear(width, heads * layer.head_dim, config.qkv_bias)
        if layer.reuses is None:
            self.k_proj = linear(width, layer.kv_heads * layer.head_dim, config.qkv_bias)
            if not layer.keys_are_values:
                self.v_proj = linear(width, layer.kv_heads * layer.head_dim, config.qkv_bias)
            self.k_norm, self.v_norm = norm(config.qk_norm), norm(config.value_norm, weights=False)
        self.o_proj = linear(heads * layer.head_dim, width, config.out_bias)
        self.q_norm = norm(config.qk_norm)

    def __call__(self, x: jax.Array, angles, mix: Mix, cache):
        """The mixed values [R, C, E] of x [R, C, E]; and the cache."""
        q, kv = self._heads(self.q_proj(x), self.q_norm), None
        if self.layer.reuses is None:
            k = self.k_proj(x)
            v = k if self.layer.keys_are_values else self.v_proj(x)
            kv = self._heads(k, self.k_norm), self._heads(v, self.v_norm)
        y, cache = mix(cache, q, kv, angles)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def _heads(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        x = x.reshape(*x.shape[:2], -1, self.layer.head_dim)
        return x if norm is None else norm(x)


class MLP(nnx.Module):
    """The gated MLP, from the stream's width to an inner one and back."""

    def __init__(self, width: int, inner: int, dtype, rngs: nnx.Rngs, *, bias: bool = False, activation: str = "silu"):
        self.gate_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.up_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.down_proj = nnx.Linear(inner, width, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[R, C, E] to [R, C, E]."""
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention, then the MLP, each on the normalised stream and added to it.

    With post norms both outputs are normalised before they are added; `post_attention_layernorm` is then a post norm,
    without them the norm before the MLP. The layer's own input is gated and added last.
    """

    def __init__(self, config: ModelConfig, number: int, dtype, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype)

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.config = config
        self.input_layernorm = norm()
        self.self_attn = Attention(config, number, dtype, rngs)
        self.post_attention_layernorm = norm()
        inner = config.intermediate_size
        if config.double_wide_mlp and config.layers[number].reuses is not None:
            inner *= 2
        self.mlp = MLP(
            config.hidden_size, inner, dtype, rngs, bias=config.mlp_bias, activation=config.activation
        )  # fmt: skip
        if config.post_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        if config.per_layer_width:
            self.per_layer_input_gate = linear(config.hidden_size, config.per_layer_width)
            self.per_layer_projection = linear(config.per_layer_width, config.hidden_size)
            self.post_per_layer_input_norm = norm()
        if config.layer_scalar:
            self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(self, x: jax.Array, own: jax.Array | None, angles, mix: Mix, cache):
        """The stream [R, C, E] after this layer; and the cache. `own`: the layer's own input [R, C, P]."""
        mixed, cache = self.self_attn(self.input_layernorm(x), angles, mix, cache)
        if self.config.post_norms:
            x = x + self.post_attention_layernorm(mixed)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + mixed
            x = x + self.mlp(self.post_attention_layernorm(x))
        if own is not None:
            gate = ACTIVATIONS[self.config.activation](self.per_layer_input_gate(x))
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * own))
        if self.config.layer_scalar:
            x = x * self.layer_scalar[...][None, None]
        return x, cache


class Logits(nnx.Module):
    """The last part of a model: from the stream to logits, by the embedding or a matrix of their own."""

    config: Any
    embed_tokens: nnx.Embed
    lm_head: nnx.Linear
    norm: RMSNorm

    def vocabulary(self) -> tuple[jax.Array, int]:
        """The matrix that the logits are products with, and which of its axes is the vocabulary."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.embedding[...], 0
        return self.lm_head.kernel[...], 1

    def _logits(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("logits"):
            matrix, vocabulary = self.vocabulary()
            axes = (((x.ndim - 1,), (1 - vocabulary,)), ((), ()))
            logits = jax.lax.dot_general(self.norm(x), matrix, axes, preferred_element_type=jnp.float32)
            cap = self.config.logit_soft_cap
            return logits if cap is None else cap * jnp.tanh(logits / cap)


class Decoder(Logits):
    """A decoder-only transformer.

    It holds weights and nothing else: under `jit` pass it as an argument like any pytree.

    Args:
      config: what to build.
      dtype: of weights and activations; norms, softmax and logits are always float32.
      scan: whether the longest run of equal layer patterns is scanned (`scan.scanned`), for fast compiles.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, scan: bool = False, rngs: nnx.Rngs):
        self.config, self.run = config, longest_run(config.layers) if scan else None
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs)
        layers = [Layer(config, number, dtype, rngs) for number in range(len(config.layers))]
        self.layers = nnx.List(stacked(layers, self.run))
        self.norm = RMSNorm(config.hidden_size, config, dtype)
        if config.per_layer_width:
            width, own = config.hidden_size, config.per_layer_width * len(config.layers)
            self.embed_tokens_per_layer = nnx.Embed(config.per_layer_vocab, own, param_dtype=dtype, rngs=rngs)
            self.per_layer_model_projection = nnx.Linear(width, own, use_bias=False, param_dtype=dtype, rngs=rngs)
            self.per_layer_projection_norm = RMSNorm(config.per_layer_width, config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, param_dtype=dtype, rngs=rngs
            )

    def layer_specs(self) -> list[kvjax.LayerSpec]:
        """The layers that keep K/V in the cache, for `kvjax.make_spec` and `kvjax.plan`.

        Blocks that have left a layer's window are released. Layers that reuse the K/V of others are left out; they are
        the last ones, so the others keep their numbers.
        """
        layers = self.config.layers
        return [
            kvjax.LayerSpec(layer.kv_heads, layer.head_dim, layer.window) for layer in layers if layer.reuses is None
        ]

    @under_auto_axes
    def __call__(self, tokens: jax.Array, pools, view, *, last: jax.Array | None = None):
        """Runs the next tokens of every row through the paged cache.

        Args:
          tokens: i32[R, C]; ids in 0..V-1, also where the view has padding. On one line i32[1, T].
          pools: the K/V written so far.
          view: `kvjax.view` of the cache for these tokens; `ragged` or `mixed` for those on one line.
          last: i32[R]; the one position in 0..C-1 of each row whose logits are wanted; on one line i32[n], any n
            positions of it. None: all of them.

        Returns:
          logits f32[R, C, V], or f32[R, V] or f32[n, V] with `last`; and the pools with these tokens' K/V.
        """

        def mix(number, turn, pools, q, kv, angles):
            layer, scale = self.config.layers[number], self.config.attention_scale
            index = None if turn is None or kv is None else turn.index(pools.spec)
            if kv is None:
                q = rotate(q, angles)
            else:
                q, pools = kvjax.rope_write(pools, number, q, kv[0], kv[1], angles, view, index=index)
            owner = number if layer.reuses is None else layer.reuses
            return kvjax.attend(q, pools, owner, view, index=index, scale=scale, window=layer.window), pools

        x, pools = self._stream(tokens, view.positions, mix, pools, pools.spec.max_length)
        if last is not None:
            return self._logits(x[jnp.arange(x.shape[0]), last]), pools
        return self._logits(x), pools

    def dense(self, tokens: jax.Array, at: jax.Array | None = None) -> jax.Array:
        """The same logits without a cache, from whole sequences: for training, and as the tests' reference.

        Args:
          tokens: i32[B, T].
          at: i32[A]; positions whose logits are wanted. None: all T.

        Returns:
          f32[B, T, V], or f32[B, A, V] with `at`.
        """
        reused = {layer.reuses for layer in self.config.layers}

        def mix(number, _, cache, q, kv, angles):
            layer = self.config.layers[number]
            k, v = cache[layer.reuses] if kv is None else (rotate(kv[0], angles), kv[1])
            cache = {**cache, number: (k, v)} if number in reused else cache
            return dense_attention(rotate(q, angles), k, v, layer.window, self.config.attention_scale), cache

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x, _ = self._stream(tokens, positions, mix, {}, tokens.shape[1])
        return self._logits(x if at is None else x[:, at])

    def _stream(self, tokens, positions, mix: Callable, cache, max_length: int):
        """The residual stream [R, C, E] after all layers, and the cache. A layer mixes by `mix(number, turn, ...)`."""
        angles = rotary_tables(self.config, positions, max_length)
        x = _scaled(self.embed_tokens(tokens), self.config.embed_scale)
        own = self._own_inputs(tokens, x)

        def step(carry, layer, number, own, turn):
            x, cache = carry
            with jax.named_scope(f"layer{number}"):
                return layer(x, own, angles[number], partial(mix, number, turn), cache)

        return over_layers(step, (x, cache), self.layers, own, self.run)

    def _own_inputs(self, tokens: jax.Array, x: jax.Array) -> list[jax.Array | None]:
        """Each layer's own input [R, C, P]: half looked up by token, half projected from the embeddings."""
        width, num_layers = self.config.per_layer_width, len(self.config.layers)
        if not width:
            return [None] * num_layers
        shape = (*tokens.shape, num_layers, width)
        looked_up = _scaled(self.embed_tokens_per_layer(tokens), width**0.5).reshape(shape)
        projected = _scaled(self.per_layer_model_projection(x), self.config.hidden_size**-0.5).reshape(shape)
        both = _scaled(self.per_layer_projection_norm(projected) + looked_up, 2**-0.5)
        return [both[:, :, number] for number in range(num_layers)]


def scanned[M: nnx.Module](model: M) -> M:
    """The same model with its longest run of equal layer patterns scanned; itself if no pattern repeats.

    It is a `Decoder` or a `LanguageModel`. It compiles faster. Its steps may take longer, since XLA copies each layer's
    weights out of the stack. Logits are equal but for rounding, and `save` writes the same file. The run's weights are
    copied: as long as both models live, there are two of each.
    """
    held: Any = model
    run = longest_run(held.config.layers)
    if held.run is not None or run is None:
        return model
    return _with_layers(held, stacked([*held.layers], run), run)


def unrolled[M: nnx.Module](model: M) -> M:
    """The inverse of `scanned`: one module for each layer, named as in Hugging Face checkpoints."""
    held: Any = model
    run = held.run
    if run is None:
        return model
    before, phases, after = parted(held.layers, run)
    each = [jax.tree.map(lambda x, i=i: x[i], phase) for i in range(run.repeats) for phase in phases]
    return _with_layers(held, [*before, *each, *after], None)


def _with_layers(model: Any, layers: Sequence[nnx.Module], run: Run | None) -> Any:
    """The model with these layers, as modules of its own over the same arrays."""
    model, layers = jax.tree.map(lambda x: x, (model, layers))
    model.layers, model.run = nnx.List(layers), run
    return model


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies x by a factor rounded to x's dtype."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


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
