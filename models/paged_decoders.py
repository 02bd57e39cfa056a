# SPDX-License-Identifier: Apache-2.0
"""Uses Flax NNX decoders of Tunix and of jax-ml/bonsai as models: their own modules, with K/V in the pools.

A decoder passes its `cache` argument on to the attention of each layer. `paged` turns the decoder into a model. Each
call of the model merges a new module, in which

    module.layers[i].attn   projects and rotates by the layer's own weights, then writes and attends through the cache
    module.final_norm       takes only the positions in `last`, so logits are computed for no others

The class and the caller's module do not change, so a trainer may trace the same class at the same time. Supported
kinds of attention:

    Qwen3, Llama 3 of Tunix    block(x, segment_pos, cache, attn_mask): q_proj, k_proj, v_proj, o_proj, q_norm, k_norm
    Gemma 3 of Tunix           the same call: q_einsum and kv_einsum, or qkv_einsum; attn_vec_einsum; sliding windows
    Qwen3 of bonsai            __call__(x, cache, segment_ids): q_proj, k_proj, v_proj, o_proj, q_norm, k_norm
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax._arrays import Pytree
from kvjax.layers import LayerSpec
from kvjax.pools.attention import attend
from kvjax.pools.device import Pools, write
from kvjax.pools.views import View

__all__ = ["PagedModel", "paged"]


class PagedModel(Pytree, static=("decoder",)):
    """A decoder with its weights: a `kvjax.serving.Model`.

    Attributes:
      arrays: the leaves of the module's state; `with_weights` replaces them.
      decoder: static; the same object for all weights, so new weights compile nothing.
    """

    arrays: list[jax.Array]
    decoder: Decoder

    def __call__(
        self, tokens: jax.Array, pools: Pools, view: View, *, last: jax.Array | None = None
    ) -> tuple[jax.Array, Pools]:
        """See `kvjax.serving.Model`."""

        def mix(layer_index: int, heads: Heads) -> jax.Array:
            nonlocal pools
            pools = write(pools, layer_index, heads.k, heads.v, view)
            return attend(heads.q, pools, layer_index, view, scale=heads.scale)

        logits = self.decoder.logits(self.arrays, tokens, _Cache(view.positions, mix), last)
        return logits.astype(jnp.float32), pools

    def layer_specs(self) -> list[LayerSpec]:
        """The layers, for `kvjax.make_spec` and `kvjax.plan`."""
        return self._shapes()[0]

    @property
    def dtype(self) -> Any:
        """The dtype of keys."""
        return self._shapes()[1]

    def with_weights(self, module: nnx.Module) -> PagedModel:
        """The same decoder with the weights of a module of equal structure.

        Raises:
          ValueError: the structure differs.
        """
        arrays, tree = jax.tree.flatten(nnx.state(module))
        if tree != self.decoder.tree:
            raise ValueError(f"module: got a {type(module).__name__} of another structure, wanted that of `paged`")
        return self.replace(arrays=arrays)

    def _shapes(self) -> tuple[list[LayerSpec], Any]:
        """The layers and the dtype of keys, noted during an abstract call, which computes nothing."""
        layers: list[LayerSpec] = []
        dtypes: list[Any] = []

        def mix(layer_index: int, heads: Heads) -> jax.Array:
            layers.append(LayerSpec(heads.k.shape[2], heads.k.shape[3], heads.window))
            dtypes.append(heads.k.dtype)
            return jnp.zeros_like(heads.q)

        def call(arrays: list[Any]) -> jax.Array:
            tokens = positions = jnp.zeros((1, 1), jnp.int32)
            return self.decoder.logits(arrays, tokens, _Cache(positions, mix))

        jax.eval_shape(call, [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.arrays])
        return layers, dtypes[-1]


def paged(module: nnx.Module) -> PagedModel:
    """Makes a model of a decoder and its present weights, which are shared and not copied.

    Args:
      module: Qwen3, Llama 3 or Gemma 3 of Tunix, Qwen3 of bonsai, or a module with the same parts.

    Raises:
      ValueError: the module lacks a part, or its attention has unsupported parts. The message names them.
    """
    layers = getattr(module, "layers", None)
    class_name = type(module).__name__
    if layers is None or not callable(getattr(module, "final_norm", None)):
        raise ValueError(f"module: got a {class_name}, wanted a decoder with `layers` and `final_norm`")
    parameters = inspect.signature(type(module).__call__).parameters
    if "cache" not in parameters or not {"positions", "segment_ids"} & set(parameters):
        raise ValueError(
            f"module: got a {class_name} that is called with {list(parameters)[1:]}, wanted (tokens, positions, cache, "
            "attention_mask) or (tokens, *, cache, segment_ids)"
        )
    for layer_index, layer in enumerate(layers):
        attention = getattr(layer, "attn", None)
        if attention is None:
            raise ValueError(f"module.layers[{layer_index}]: got a {type(layer).__name__}, wanted one with `attn`")
        _form_of(attention, f"module.layers[{layer_index}].attn")
    graph, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return PagedModel(arrays, Decoder(graph, tree, "positions" in parameters))


class Decoder:
    """A module without its arrays. It equals only itself, because NNX's graph may have no hash."""

    def __init__(self, graph: Any, tree: Any, has_positions: bool):
        self.graph = graph
        self.tree = tree
        self.has_positions = has_positions

    def logits(self, arrays: list[Any], tokens: jax.Array, cache: _Cache, last: jax.Array | None = None) -> jax.Array:
        """The logits of the positions `last`, or of all positions. The cache takes the K/V of all tokens."""
        module: Any = nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays))
        for layer in module.layers:
            layer.attn = (_Attention if self.has_positions else _AttentionOfBonsai)(layer.attn)
            # Rematerialisation only saves memory for gradients, and would trace the layer separately from the cache.
            if hasattr(getattr(layer, "config", None), "remat_config"):
                layer.config = dataclasses.replace(layer.config, remat_config=None)
        if last is not None:  # i32[n]: a position of each row, or any n positions of a flat batch
            norm = module.final_norm
            module.final_norm = lambda x: norm(x[jnp.arange(x.shape[0]), last][:, None])
        if self.has_positions:
            logits, _ = module(tokens, cache.positions, cache, None)
        else:
            logits = module(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))
        return logits if last is None else logits[:, 0]


@dataclasses.dataclass
class _Cache:
    """The argument `cache` of a decoder. Its items are the `cache` of layers, where `mix` has the layer's index."""

    positions: jax.Array  # i32[R, C]
    mix: Callable[..., jax.Array]  # (layer index, heads) -> the mixed values [R, C, Q, D] of a layer

    def __getitem__(self, layer: str | int) -> _Cache:
        """The cache of a layer, which is named `layer_3` or 3."""
        return _Cache(self.positions, functools.partial(self.mix, int(str(layer).removeprefix("layer_"))))


class Heads(NamedTuple):
    """Rotated queries [R, C, Q, D], rotated keys and values [R, C, K, D] of some tokens, with attention's options."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    scale: float
    window: int | None = None


class _Attention:
    """The replacement of a layer's attention in Tunix, with the same weights, and K/V in the cache."""

    def __init__(self, attention: Any):
        self.attention = attention
        self.form = _form_of(attention, "attn")

    def __call__(self, x: jax.Array, positions: jax.Array, cache: _Cache, *_: Any, **__: Any) -> Any:
        heads = self.form.heads(self.attention, x, positions)
        return cache, self.form.output(self.attention, cache.mix(heads))


class _AttentionOfBonsai(_Attention):
    """The replacement of a layer's attention in bonsai, where the cache has the positions."""

    def __call__(self, x: jax.Array, cache: _Cache, *_: Any, **__: Any) -> Any:
        return super().__call__(x, cache.positions, cache)[1]


class _Form(NamedTuple):
    """A kind of attention: its weights, its other attributes, and functions from x to heads and back."""

    weights: frozenset[str]
    others: frozenset[str]  # among them optional weights
    heads: Callable[[Any, jax.Array, jax.Array], Heads]
    output: Callable[[Any, jax.Array], jax.Array]


_LIBRARY_PREFIXES = ("_pytree_", "_object_", "qwix_", "disable_quant_")  # attributes that NNX and qwix add


def _form_of(attention: Any, name: str) -> _Form:
    """The form of an attention. Attributes outside the form, such as a soft cap, are refused, not ignored."""
    names = {name for name, value in vars(attention).items() if value is not None}
    names = {name for name in names if not name.startswith(_LIBRARY_PREFIXES)}
    forms = [form for form in _FORMS if form.weights <= names]
    unheeded = min((sorted(names - form.weights - form.others) for form in forms), key=len, default=None)
    if unheeded is None:
        wanted = " or ".join(str(sorted(form.weights)) for form in _FORMS)
        raise ValueError(f"{name}: got a {type(attention).__name__} with {sorted(names)}, wanted {wanted}")
    if unheeded:
        raise ValueError(f"{name}: got a {type(attention).__name__} with {unheeded}, wanted one without them")
    return forms[0]


def _rotation(attention: Any, positions: jax.Array, width: int, **options: Any) -> Callable[[jax.Array], jax.Array]:
    """The rotary embedding from the file with the attention's class, at positions i32[R, C]."""
    modules = [sys.modules.get(parent.__module__) for parent in type(attention).__mro__]
    rotate, angles = (
        next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        for name in ("apply_rope", "_generate_pos_embeddings")
    )
    if rotate is None:
        raise ValueError(f"attn: got a {type(attention).__name__}, wanted one with `apply_rope` in its file")
    if angles is None:
        return lambda x: rotate(x, positions, head_dim=width, **options)
    sin, cos = angles(positions, width)
    return lambda x: rotate(x, sin, cos)


def _projected(attention: Any, x: jax.Array, positions: jax.Array) -> Heads:
    options = _sharding(attention, "act_btnh")
    q, k, v = (getattr(attention, f"{name}_proj")(x, **options) for name in "qkv")
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    rotate = _rotation(attention, positions, q.shape[-1])
    return Heads(rotate(q), rotate(k), v, attention.scale)


def _by_einsum(attention: Any, x: jax.Array, positions: jax.Array) -> Heads:
    if hasattr(attention, "qkv_einsum"):
        q, k, v = attention.qkv_einsum(x)
    else:
        q = attention.q_einsum(x)
        k, v = attention.kv_einsum(x)
    rotate = _rotation(
        attention,
        positions,
        q.shape[-1],
        base_frequency=attention.rope_base_frequency,
        scale_factor=attention.rope_scale_factor,
    )
    window = attention.sliding_window_size if attention.attn_type.name == "LOCAL_SLIDING" else None
    q = rotate(attention._query_norm(q))
    k = rotate(attention._key_norm(k))
    return Heads(q, k, v, attention.query_pre_attn_scalar, window)


def _sharding(attention: Any, name: str) -> dict[str, Any]:
    """The argument for dividing a projection's result, if bonsai's module has its name."""
    sharding = getattr(getattr(attention, "shd_cfg", None), name, None)
    return {} if sharding is None else {"out_sharding": sharding}


_FORMS = (
    _Form(
        frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "scale"}),
        frozenset({"q_norm", "k_norm", "n_rep", "config", "shd_config", "shd_cfg"}),
        _projected,
        lambda attention, y: attention.o_proj(y, **_sharding(attention, "act_btd")),
    ),
    *(
        _Form(
            frozenset({*projections, "_query_norm", "_key_norm", "attn_vec_einsum", "query_pre_attn_norm"}),
            frozenset(
                {
                    "attn_type",
                    "sliding_window_size",
                    "rope_base_frequency",
                    "rope_scale_factor",
                    "shd_config",
                    "remat_config",
                }
            ),
            _by_einsum,
            lambda attention, y: attention.attn_vec_einsum(y),
        )
        for projections in (("q_einsum", "kv_einsum"), ("qkv_einsum",))
    ),
)
