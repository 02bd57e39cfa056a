# SPDX-License-Identifier: Apache-2.0
"""A decoder for all families. The cache is an argument and a result.

A layer has a mixer, which mixes tokens through a `Mixing`, and then an MLP or experts. The config chooses them. Modules
have the names of Hugging Face checkpoints, so loading needs no table of names. Shapes use the legend of `kvjax.state`,
with R rows of C tokens in a call, E the width of the residual stream and P the width of an input for a single layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

from .attention import Dense, LayerConfig, Mixing, Paged
from .config import ModelConfig
from .experts import ACTIVATIONS, MLP
from .norm import RMSNorm
from .placement import under_auto_axes
from .rope import Angles, rotary_tables
from .scan import Run, ScanPosition, longest_run, over_layers, parted, stacked


class Layer(nnx.Module):
    """A mixer, then an MLP or experts. Each reads the normalised stream, and its output is added to the stream.

    With post norms, both outputs are normalised before they are added. `post_attention_layernorm` is then a post norm.
    Without post norms it is the norm before the MLP. A layer with an input of its own gates it and adds it last.
    """

    self_attn: Any  # if the mixer has this name

    def __init__(self, config: ModelConfig, layer_index: int, dtype, rngs: nnx.Rngs):
        width = config.hidden_size
        mixer = config.layers[layer_index]
        norm = partial(RMSNorm, width, config, dtype)
        self.config = config
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        experts = None if layer_index in config.dense else config.experts
        self.names = mixer.name, "mlp" if experts is None else experts.name
        setattr(self, mixer.name, mixer.module(config, mixer, dtype, rngs))
        if experts is None:
            inner = config.intermediate_size * (2 if config.double_wide_mlp and mixer.reuses is not None else 1)
            self.mlp = MLP(width, inner, dtype, rngs, bias=config.mlp_bias, activation=config.activation)
        else:
            setattr(self, experts.name, experts.module(width, experts, dtype, rngs))
        if config.post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        if config.per_layer_width:
            linear = partial(nnx.Linear, use_bias=False, param_dtype=dtype, rngs=rngs)
            self.per_layer_input_gate = linear(width, config.per_layer_width)
            self.per_layer_projection = linear(config.per_layer_width, width)
            self.post_per_layer_input_norm = norm()
        if config.layer_scalar:
            self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(self, x: jax.Array, layer_input: jax.Array | None, angles: Angles, mixing: Mixing, cache):
        """Runs the layer on the stream x [R, C, E] and, if the family has it, the layer's own input [R, C, P].

        Returns:
          The stream [R, C, E] after this layer, and the cache.
        """
        mixer, mlp = (getattr(self, name) for name in self.names)
        mixed, cache = mixer(self.input_layernorm(x), angles, mixing, cache)
        if self.config.post_norms:
            x = x + self.post_attention_layernorm(mixed)
            x = x + self.post_feedforward_layernorm(mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + mixed
            x = x + mlp(self.post_attention_layernorm(x))
        if layer_input is not None:
            gate = ACTIVATIONS[self.config.activation](self.per_layer_input_gate(x))
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * layer_input))
        if self.config.layer_scalar:
            x = x * self.layer_scalar[...][None, None]
        return x, cache


class Decoder(nnx.Module):
    """A decoder-only transformer.

    It holds weights and nothing else. Under `jit`, pass it as an argument like any pytree.

    Args:
      config: the decoder to build.
      dtype: dtype for weights and activations; norms, softmax, routing, recurrences and logits are always float32.
      scan: whether to scan the longest run of equal layer patterns (see `scanned`), for fast compiles.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, scan: bool = False, rngs: nnx.Rngs):
        width = config.hidden_size
        num_layers = len(config.layers)
        embed = partial(nnx.Embed, param_dtype=dtype, rngs=rngs)
        linear = partial(nnx.Linear, width, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.config = config
        self.run = longest_run(config.layers, config.dense) if scan else None
        self.embed_tokens = embed(config.vocab_size, width)
        layers = [Layer(config, layer_index, dtype, rngs) for layer_index in range(num_layers)]
        self.layers = nnx.List(stacked(layers, self.run))
        self.norm = RMSNorm(width, config, dtype)
        if config.per_layer_width:
            total_width = config.per_layer_width * num_layers
            self.embed_tokens_per_layer = embed(config.per_layer_vocab, total_width)
            self.per_layer_model_projection = linear(total_width)
            self.per_layer_projection_norm = RMSNorm(config.per_layer_width, config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.vocab_size)

    def layer_specs(self) -> list[kvjax.LayerSpec]:
        """Specs of the layers that use the cache, for `kvjax.make_spec` and `kvjax.plan`.

        Layers with reused K/V are left out. They are the last layers, so the others keep their indices.
        """
        return [layer.spec() for layer in self.config.layers if layer.reuses is None]

    def vocabulary(self) -> tuple[jax.Array, int]:
        """The matrix for the logits, and the axis of its vocabulary."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.embedding[...], 0
        return self.lm_head.kernel[...], 1

    @under_auto_axes
    def __call__(self, tokens: jax.Array, pools, view, *, last: jax.Array | None = None):
        """Runs the next tokens of every row through the paged cache.

        Args:
          tokens: i32[R, C]; ids in 0..V-1, also where the view has padding. A line of tokens is i32[1, T].
          pools: the K/V written so far.
          view: `kvjax.view` of the cache for these tokens, or for a line `ragged` or `mixed`.
          last: i32[R]; the position in 0..C-1 of each row to compute logits for. For a line it is i32[n], any n
            positions. None computes logits for all positions.

        Returns:
          Logits f32[R, C, V], or f32[R, V] or f32[n, V] with `last`, and the pools with the K/V of these tokens.
        """

        def mixing(layer_index: int, turn: ScanPosition | None) -> Mixing:
            return Paged(view, layer_index, turn)

        x, pools = self._stream(tokens, view.positions, mixing, pools, pools.spec.max_length)
        if last is not None:
            return self._logits(x[jnp.arange(x.shape[0]), last]), pools
        return self._logits(x), pools

    def dense(self, tokens: jax.Array, at: jax.Array | None = None) -> jax.Array:
        """Computes the same logits without a cache, from whole sequences. Training and the tests use it.

        Args:
          tokens: i32[B, T].
          at: i32[A]; positions to compute logits for. None computes them for all T.

        Returns:
          f32[B, T, V], or f32[B, A, V] with `at`.
        """
        reused = {layer.reuses for layer in self.config.layers}

        def mixing(layer_index: int, _: ScanPosition | None) -> Mixing:
            layer = self.config.layers[layer_index]
            window = getattr(layer, "window", None)  # other mixers have none
            return Dense(layer_index, layer_index in reused, positions, window, getattr(layer, "sink_tokens", 0))

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x, _ = self._stream(tokens, positions, mixing, {}, tokens.shape[1])
        return self._logits(x if at is None else x[:, at])

    def _logits(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("logits"):
            matrix, vocabulary = self.vocabulary()
            axes = (((x.ndim - 1,), (1 - vocabulary,)), ((), ()))
            logits = jax.lax.dot_general(self.norm(x), matrix, axes, preferred_element_type=jnp.float32)
            cap = self.config.logit_soft_cap
            return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _stream(self, tokens, positions, mixing: Callable[[int, ScanPosition | None], Mixing], cache, max_length: int):
        """The residual stream [R, C, E] after all layers, and the cache."""
        angles = rotary_tables(self.config, positions, max_length)
        x = _scaled(self.embed_tokens(tokens), self.config.embed_scale)
        layer_inputs = self._layer_inputs(tokens, x)

        def step(carry, layer, layer_index, layer_input, turn):
            x, cache = carry
            with jax.named_scope(f"layer{layer_index}"):
                return layer(x, layer_input, angles[layer_index], mixing(layer_index, turn), cache)

        return over_layers(step, (x, cache), self.layers, layer_inputs, self.run)

    def _layer_inputs(self, tokens: jax.Array, x: jax.Array) -> list[jax.Array | None]:
        """The input [R, C, P] of each layer: the sum of a lookup by token and a projection of the embeddings."""
        width = self.config.per_layer_width
        num_layers = len(self.config.layers)
        if not width:
            return [None] * num_layers
        shape = (*tokens.shape, num_layers, width)
        looked_up = _scaled(self.embed_tokens_per_layer(tokens), width**0.5).reshape(shape)
        projected = _scaled(self.per_layer_model_projection(x), self.config.hidden_size**-0.5).reshape(shape)
        layer_inputs = _scaled(self.per_layer_projection_norm(projected) + looked_up, 2**-0.5)
        return [layer_inputs[:, :, layer_index] for layer_index in range(num_layers)]


def scanned[M: Decoder](model: M) -> M:
    """Returns the model with its longest run of equal layer patterns scanned, or the model if no pattern repeats.

    A scanned model compiles faster. Its steps may take longer, since XLA copies each layer's weights out of the stack.
    Logits differ only by rounding, and `save` writes the same file. The weights of the run are copied, so memory holds
    them twice while both models exist.
    """
    run = longest_run(model.config.layers, model.config.dense)
    if model.run is not None or run is None:
        return model
    return _with_layers(model, stacked([*model.layers], run), run)


def unrolled[M: Decoder](model: M) -> M:
    """The inverse of `scanned`: a module for each layer, with the names of Hugging Face checkpoints."""
    run = model.run
    if run is None:
        return model
    before, phases, after = parted(model.layers, run)
    unstacked = [jax.tree.map(lambda x, i=i: x[i], phase) for i in range(run.repeats) for phase in phases]
    return _with_layers(model, [*before, *unstacked, *after], None)


def first_layers[M: Decoder](model: M, num_layers: int) -> M:
    """Returns a model of the first layers of another, for `kvjax.serving.early_exit`.

    The final norm and the vocabulary follow the last of these layers. Both models share their weights, except that the
    layers of a scanned model are copied.

    Raises:
      ValueError: if there are not as many layers, or the family has an input for each layer.
    """
    if not 0 < num_layers <= len(model.config.layers):
        raise ValueError(f"num_layers: got {num_layers}, wanted 1 to {len(model.config.layers)}")
    if model.config.per_layer_width:
        raise ValueError("model: got a model with an input for each layer, wanted one without them")
    whole = unrolled(model)
    part = _with_layers(whole, [*whole.layers][:num_layers], None)
    part.config = dataclasses.replace(model.config, layers=model.config.layers[:num_layers])
    return part


def streaming[M: Decoder](model: M, window: int, sink_tokens: int = 4) -> M:
    """Returns a model whose tokens see the last `window` tokens and the first `sink_tokens`, as in StreamingLLM.

    Positions are places inside the cache: no distance is larger than `window + sink_tokens`, however long the text is.
    A row holds the blocks of these tokens alone. The models share their weights, except that the layers of a scanned
    model are copied. A layer that has a window keeps it.

    Raises:
      ValueError: if a layer does not have attention over keys and values.

    Source: StreamingLLM.
    """
    layers = []
    for layer_index, layer in enumerate(model.config.layers):
        if not isinstance(layer, LayerConfig):
            raise ValueError(
                f"model: got a layer {layer_index} of {type(layer).__name__}, wanted attention in all layers"
            )
        layers.append(layer if layer.window else dataclasses.replace(layer, window=window, sink_tokens=sink_tokens))
    model = _with_layers(model, [*unrolled(model).layers], None)
    model.config = dataclasses.replace(model.config, layers=tuple(layers))
    for module, layer in zip(model.layers, layers, strict=True):
        module.config = model.config
        module.self_attn.layer = layer
    return model


def _with_layers[M: Decoder](model: M, layers: Sequence[Layer], run: Run | None) -> M:
    """A model with these layers: new modules over the same arrays."""
    model, layers = jax.tree.map(lambda x: x, (model, layers))
    model.layers = nnx.List(layers)
    model.run = run
    return model


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies x by a factor rounded to x's dtype."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
