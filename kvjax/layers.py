# SPDX-License-Identifier: Apache-2.0
"""Descriptions of layers, and of the pools that hold what they keep of the tokens before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

QUANTISED = ("int8", "float8_e4m3fn")
DTYPES = ("bfloat16", "float16", "float32", *QUANTISED)  # of K/V
NUM_TOKENS = "num_tokens"  # the array of a snapshot that says how many tokens it is after


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The axes of an array that the devices of a mesh divide.

    Attributes:
      heads: the axis of the heads; None: each device has all.
      slots: the axis of the P tokens of a block; likewise.
    """

    heads: int | None = None
    slots: int | None = None


class StateArray(NamedTuple):
    """One array of a recurrent layer's state.

    Attributes:
      name: of the array.
      shape: its shape.
      dtype: its dtype, by name.
      axis: the axis that a mesh divides; None: each device has all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A layer's part of the cache: K/V of K heads of width D, latents (`latent`), or states (`recurrent`).

    Attributes:
      kv_heads: K; 0 of a recurrent layer.
      head_dim: D; 0 likewise.
      window: how many last tokens a token attends to, itself included; None: full attention.
      sink_tokens: how many first tokens of a sequence stay in the cache whatever the window.
      values: of a layer of latents: V is the first `values` columns of K. None: K and V are apart.
      arrays: of a recurrent layer: the arrays of its state.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=8, head_dim=128), kvjax.LayerSpec.latent(576, values=512)]
      >>> for layer in layers:  # bytes of a token in bfloat16
      ...     spec = kvjax.make_spec([layer], num_blocks=8, max_seqs=2, max_length=64, block_size=16)
      ...     print(spec.groups[0].block_bytes(16) // 16)
      4096
      1152
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    sink_tokens: int = 0
    values: int | None = None
    arrays: tuple[StateArray, ...] = ()

    def __post_init__(self):
        if not self.arrays:
            set_ints(self, 1, "kv_heads", "head_dim")
        if self.window is not None:
            set_ints(self, 1, "window")
        set_ints(self, 0, "sink_tokens")

    @classmethod
    def latent(cls, width: int, values: int) -> LayerSpec:
        """A layer of multi-head latent attention: one array of `width` columns a token, read by all query heads.

        Args:
          width: columns of the latent, those of the rotated key included (DeepSeek V3: 512 + 64).
          values: V is the first so many columns of K (DeepSeek V3: 512).

        Raises:
          ValueError: if `values` is not in 1..width.

        Source: DeepSeek-V2, whose attention is computed over latents with the projections absorbed.
        """
        width, values = static_int("width", width, 1), static_int("values", values, 1)
        if values > width:
            raise ValueError(f"values: got {values} of a latent of {width} columns, wanted at most {width}")
        return cls(1, width, values=values)

    @classmethod
    def recurrent(cls, arrays: Mapping[str, Any], *, axes: Mapping[str, int] | None = None) -> LayerSpec:
        """A layer that carries a state from token to token (gated delta rule, Mamba), which `kvjax.recur` computes.

        Args:
          arrays: the arrays of the state of one sequence by their names: a shape of float32 each, or a
            `jax.ShapeDtypeStruct`.
          axes: for each array that a mesh divides the axis, such as that of the heads.

        Raises:
          ValueError: naming the argument.

        Example:
          >>> layers = [kvjax.LayerSpec.recurrent({"state": (4, 8, 8)}), kvjax.LayerSpec(2, 16)]
          >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=2, max_length=32, block_size=4)
          >>> [group.key for group in spec.groups]  # full attention first
          [None, 'recurrent']
        """
        if not isinstance(arrays, Mapping) or not arrays:
            raise ValueError(f"arrays: got {arrays!r}, wanted the shape of at least one array by its name")
        axes = {} if axes is None else axes
        if unknown := [name for name in axes if name not in arrays]:
            raise ValueError(f"axes: got {unknown[0]!r}, wanted one of the arrays {sorted(arrays)}")
        return cls(0, 0, arrays=tuple(_state_array(name, of, axes.get(name)) for name, of in arrays.items()))


def _state_array(name: str, array: Any, axis: int | None) -> StateArray:
    shape, dtype = (array.shape, array.dtype) if isinstance(array, jax.ShapeDtypeStruct) else (array, "float32")
    where = f"arrays[{name!r}]"
    if not isinstance(name, str) or name == NUM_TOKENS:
        raise ValueError(f"arrays: got an array {name!r}, wanted a name other than {NUM_TOKENS!r}")
    if not isinstance(shape, Sequence) or not shape:
        raise ValueError(f"{where}: got {array!r}, wanted a shape of at least one axis")
    shape = tuple(static_int(where, size, 1) for size in shape)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype_name(dtype) == "float64":
        raise ValueError(f"{where}: got {dtype_name(dtype)}, wanted a floating dtype of at most 32 bits")
    axis = None if axis is None else static_int(f"axes[{name!r}]", axis, 0)
    if axis is not None and axis >= len(shape):
        raise ValueError(f"axes[{name!r}]: got {axis!r}, wanted an axis of shape {shape}")
    return StateArray(name, shape, dtype_name(dtype), axis)


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """One pool: the layers of a group that keep arrays of equal shapes, with the dtype of their K/V.

    Attributes:
      layers: the model's layer numbers, in the order in which the pool stacks them.
      kv_heads: K.
      head_dim: D.
      dtype: element type of the K/V bytes, by name. An int8 or float8_e4m3fn pool is quantised: it has a float32
        scale for each token and head beside it. A recurrent layer's arrays have their own.
      values, arrays: as in `LayerSpec`.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    values: int | None = None
    arrays: tuple[StateArray, ...] = ()

    def __post_init__(self):
        if not self.arrays:
            set_ints(self, 1, "kv_heads", "head_dim")
        object.__setattr__(self, "dtype", kv_dtype(self.dtype))

    @property
    def quantised(self) -> bool:
        """Whether the pool has scales."""
        return self.dtype in QUANTISED and not self.arrays

    def block_shape(self, block_size: int) -> Any:
        """The shape and dtype of one layer's block, a `jax.ShapeDtypeStruct`: [2, K, P, D], or [1, 1, P, D] of latents.

        A block of a recurrent layer is a snapshot: a dict of its arrays, and how many tokens it is after, i32[].
        """
        if self.arrays:
            arrays = {array.name: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)) for array in self.arrays}
            return {NUM_TOKENS: jax.ShapeDtypeStruct((), jnp.int32), **arrays}
        parts = 2 if self.values is None else 1
        return jax.ShapeDtypeStruct((parts, self.kv_heads, block_size, self.head_dim), jnp.dtype(self.dtype))

    @property
    def mesh_axes(self) -> Any:
        """The `MeshAxes` of the pool's arrays, `[N + 1, L, *block_shape]`; latents have one head, which is not divided.

        What has a window or a state is not divided by tokens, whatever these say.
        """
        if self.arrays:
            axes = {one.name: MeshAxes(None if one.axis is None else 2 + one.axis) for one in self.arrays}
            return {NUM_TOKENS: MeshAxes()} | axes
        return MeshAxes(3 if self.values is None else None, 4)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in every layer of the pool: `block_size` positions, or a snapshot; scales included."""
        blocks = jax.tree.leaves(self.block_shape(block_size))
        scales = math.prod(blocks[0].shape[:-1]) * 4 if self.quantised else 0
        return len(self.layers) * (sum(block.size * block.dtype.itemsize for block in blocks) + scales)


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """The name of a dtype; a ValueError if it is none."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype: got {dtype!r}, wanted the name or type of a number format") from None


def kv_dtype(dtype: jax.typing.DTypeLike) -> str:
    """The name of a dtype of K/V; a ValueError for any other."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype: got {name!r}, wanted one of {', '.join(DTYPES)}")
    return name


def is_integer(value: Any) -> bool:
    """Whether a value is a number of Python or of numpy without a fraction; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def static_int(name: str, value: Any, minimum: int) -> int:
    """`value` as a Python int of at least `minimum`."""
    if not is_integer(value) or value < minimum:
        raise ValueError(f"{name}: got {value!r:.80}, wanted an int of at least {minimum}")
    return int(value)


def set_ints(spec: Any, minimum: int, *names: str) -> None:
    """Makes fields of a frozen dataclass Python ints of at least `minimum`, of which numpy's are taken too."""
    for name in names:
        object.__setattr__(spec, name, static_int(name, getattr(spec, name), minimum))
