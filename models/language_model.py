# SPDX-License-Identifier: Apache-2.0
"""A language model whose layers keep different things in the cache: keys and values, latents, or recurrent states.

`deepseek.py`, `qwen3_next.py` and `kimi_linear.py` say which layers there are. A layer has a mixer, which mixes tokens
through a `Mixing`, and an MLP or experts. Modules are named as in Hugging Face checkpoints. Shapes as in `decoder.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from pallas_kernels.rotary import rotate

from .decoder import Logits, dense_attention
from .language_config import LanguageConfig
from .norm import RMSNorm
from .rope import Angles, rotary_tables
from .scan import Turn, longest_run, over_layers, parted, stacked


class Mixing(Protocol):
    """The way in which one layer's tokens reach each other: through the cache, or in whole sequences without one."""

    def attend(
        self,
        cache,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        angles: Angles = None,
        window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """The mixed values [R, C, Q, D] of q [R, C, Q, D], k and v [R, C, K, D]; and the cache.

        `angles` are those by which q and k are yet to be rotated; None: they have no position, or their own already.
        `window` and `sinks` f32[Q] are those of `kvjax.attend`.
        """
        ...

    def attend_latents(
        self, cache, q: jax.Array, latents: jax.Array, values: int, scale: float
    ) -> tuple[jax.Array, Any]:
        """The mixed latents [R, C, Q, values] of q [R, C, Q, L] and latents [R, C, 1, L]; and the cache."""
        ...

    def recur(self, cache, cell: Any, inputs: Any) -> tuple[jax.Array, Any]:
        """The cell's outputs [R, C, ...]; and the cache."""
        ...


@dataclasses.dataclass(frozen=True)
class Paged:
    """The mixing of a layer through the paged cache; in a scan `turn` tells which of several layers it is."""

    view: kvjax.pools.View
    layer: int
    turn: Turn | None = None

    def attend(self, cache, q, k, v, *, angles=None, window=None, sinks=None):
        """See `Mixing`."""
        index = self._index(cache)
        if angles is None:
            cache = kvjax.write(cache, self.layer, k, v, self.view, index=index)
        else:
            q, cache = kvjax.rope_write(cache, self.layer, q, k, v, angles, self.view, index=index)
        return kvjax.attend(q, cache, self.layer, self.view, index=index, window=window, sinks=sinks), cache

    def attend_latents(self, cache, q, latents, values, scale):
        """See `Mixing`; the cache knows how many columns are values."""
        index = self._index(cache)
        cache = kvjax.write(cache, self.layer, latents, None, self.view, index=index)
        return kvjax.attend(q, cache, self.layer, self.view, index=index, scale=scale), cache

    def recur(self, cache, cell, inputs):
        """See `Mixing`."""
        return kvjax.recur(cell, cache, self.layer, self.view, inputs, index=self._index(cache))

    def _index(self, cache) -> jax.Array | None:
        return None if self.turn is None else self.turn.index(cache.spec)


class Dense:
    """The mixing of a layer in whole sequences; there is no cache."""

    def attend(self, cache, q, k, v, *, angles=None, window=None, sinks=None):
        """See `Mixing`."""
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return dense_attention(q, k, v, window, sinks=sinks), cache

    def attend_latents(self, cache, q, latents, values, scale):
        """See `Mixing`."""
        return dense_attention(q, latents, latents[..., :values], scale=scale), cache

    def recur(self, cache, cell, inputs):
        """See `Mixing`."""
        rows, length = jax.tree.leaves(inputs)[0].shape[:2]
        outputs, _ = cell(cell.zeros(rows), inputs, jnp.full(rows, length, jnp.int32))
        return outputs, cache


class Layer(nnx.Module):
    """A mixer, then an MLP or experts, each on the normalised stream and added to it; both by their names."""

    def __init__(self, config: LanguageConfig, dtype, mixer: tuple[str, Any], mlp: tuple[str, Any]):
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm, dtype)
        self.names = mixer[0], mlp[0]
        for name, module in (mixer, mlp):
            setattr(self, name, module)

    @property
    def mixer(self) -> Any:
        """The module that mixes tokens."""
        return getattr(self, self.names[0])

    def __call__(self, x: jax.Array, angles: Angles, mixing: Mixing, cache):
        """The stream [R, C, E] after this layer; and the cache."""
        mixed, cache = self.mixer(self.input_layernorm(x), angles, mixing, cache)
        x = x + mixed
        return x + getattr(self, self.names[1])(self.post_attention_layernorm(x)), cache


class LanguageModel(Logits):
    """A decoder-only model. It holds weights and nothing else: under `jit` pass it as an argument like any pytree.

    Args:
      config: what to build.
      dtype: of weights and activations; norms, softmax, routing, recurrences and logits are always float32.
      scan: whether the longest run of equal layer patterns is scanned, as in `Decoder`.
      rngs: source of the initial weights.
    """

    def __init__(self, config: Any, *, dtype=jnp.float32, scan: bool = False, rngs: nnx.Rngs):
        self.config, self.run = config, longest_run(config.layers) if scan else None
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs)
        layers = [self.make_layer(number, dtype, rngs) for number in range(config.num_layers)]
        self.layers = nnx.List(stacked(layers, self.run))
        self.norm = RMSNorm(config.hidden_size, config.norm, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, param_dtype=dtype, rngs=rngs
            )

    def make_layer(self, number: int, dtype, rngs: nnx.Rngs) -> Layer:
        """The layer of this number; each family has its own."""
        raise NotImplementedError

    def layer_specs(self) -> list[kvjax.LayerSpec]:
        """Each layer's part of the cache, for `kvjax.make_spec` and `kvjax.plan`."""
        before, phases, after = parted(self.layers, self.run)
        repeats = self.run.repeats if self.run is not None else 0
        return [layer.mixer.spec() for layer in [*before, *phases * repeats, *after]]

    def __call__(self, tokens: jax.Array, pools, view: kvjax.pools.View, *, last: jax.Array | None = None):
        """Runs the next tokens of every row through the paged cache; as `Decoder.__call__`."""
        x, pools = self._stream(
            tokens, view.positions, lambda number, turn: Paged(view, number, turn), pools, pools.spec.max_length
        )
        if last is not None:
            x = x[jnp.arange(x.shape[0]), last]
        return self._logits(x), pools

    def dense(self, tokens: jax.Array, at: jax.Array | None = None) -> jax.Array:
        """The same logits without a cache, from whole sequences; as `Decoder.dense`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x, _ = self._stream(tokens, positions, lambda number, turn: Dense(), None, tokens.shape[1])
        return self._logits(x if at is None else x[:, at])

    def _stream(self, tokens, positions, mixing: Callable[[int, Turn | None], Mixing], cache, max_length: int):
        """The residual stream [R, C, E] after all layers, and the cache."""
        angles = rotary_tables(self.config, positions, max_length)

        def step(carry, layer, number, own, turn):
            x, cache = carry
            with jax.named_scope(f"layer{number}"):
                return layer(x, angles[number], mixing(number, turn), cache)

        no_inputs = [None] * self.config.num_layers
        return over_layers(step, (self.embed_tokens(tokens), cache), self.layers, no_inputs, self.run)
