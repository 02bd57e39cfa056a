# SPDX-License-Identifier: Apache-2.0
"""Descriptions of layers, and of the pools that store their K/V or states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.by_token import token_rows

QUANTISED = ("int8", "float8_e4m3fn")
DTYPES = ("bfloat16", "float16", "float32", *QUANTISED)  # of K/V
LAYOUTS = ("heads", "tokens")  # of K/V in a pool
TPU_LANES = 128  # a TPU's minor axes are multiples of this number of elements
NUM_TOKENS = "num_tokens"  # the array of a snapshot with the number of tokens before it


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The axes of an array divided by the devices of a mesh.

    Attributes:
      heads: the axis of the heads. None leaves all of them on each device.
      slots: the axis of the P tokens of a block. None leaves all of them on each device.
    """

    heads: int | None = None
    slots: int | None = None


class StateArray(NamedTuple):
    """An array of a recurrent layer's state.

    Attributes:
      name: the name of the array.
      shape: the shape of the array for a sequence.
      dtype: the name of its dtype.
      axis: the axis to divide on a mesh. None leaves the whole array on each device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    axis: int | None = None


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The data that a layer keeps in the cache: K/V of K heads of width D, latents (`latent`), or states (`recurrent`).

    Attributes:
      kv_heads: K, or 0 for a recurrent layer.
      head_dim: D, or 0 for a recurrent layer.
      window: the number of tokens seen by a token, up to and including itself. None means full attention.
      sink_tokens: the number of first tokens to keep in the cache, and visible, even when the window has passed them.
      values: for a layer of latents, the number of columns of K that serve as V. None stores V separately.
      arrays: the arrays of a recurrent layer's state.

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
        """Describes a layer of multi-head latent attention: one array of `width` columns a token for all query heads.

        Args:
          width: columns of the latent, including the rotated key (DeepSeek V3: 512 + 64).
          values: the number of first columns of K that are V (DeepSeek V3: 512).

        Raises:
          ValueError: if `values` is not in 1..width.

        Source: DeepSeek-V2, whose attention is computed over latents with the projections absorbed.
        """
        width = static_int("width", width, 1)
        values = static_int("values", values, 1)
        if values > width:
            raise ValueError(f"values: got {values} of a latent of {width} columns, wanted at most {width}")
        return cls(1, width, values=values)

    @classmethod
    def recurrent(cls, arrays: Mapping[str, Any], *, axes: Mapping[str, int] | None = None) -> LayerSpec:
        """Describes a layer that carries a state from token to token (gated delta rule, Mamba); see `kvjax.recur`.

        Args:
          arrays: the state of a sequence, {name: array}. Give a shape for float32, or a `jax.ShapeDtypeStruct`.
          axes: the axis to divide on a mesh, {name: axis}, such as the axis of the heads.

        Raises:
          ValueError: if an argument is wrong.

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
        return cls(0, 0, arrays=tuple(_state_array(name, array, axes.get(name)) for name, array in arrays.items()))


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
    """A pool: layers of a group whose blocks have the same shape, with the dtype of their K/V.

    Attributes:
      layers: the model's layer numbers, in the order in which the pool stacks them.
      kv_heads: K.
      head_dim: D.
      dtype: the name of the dtype of K/V. An int8 or float8_e4m3fn pool is quantised, with a float32 scale for each
        token and head. A recurrent layer's arrays have dtypes of their own.
      values, arrays: see `LayerSpec`.
      layout: the order of a block's bytes in a pool: "heads" or "tokens". See `make_spec`.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    values: int | None = None
    arrays: tuple[StateArray, ...] = ()
    layout: str = "heads"

    def __post_init__(self):
        if not self.arrays:
            set_ints(self, 1, "kv_heads", "head_dim")
        object.__setattr__(self, "dtype", kv_dtype(self.dtype))

    @property
    def quantised(self) -> bool:
        """Whether the pool has scales."""
        return self.dtype in QUANTISED and not self.arrays

    @property
    def by_token(self) -> bool:
        """Whether a block in the pool is [P, R, W], as in `pallas_kernels.by_token`."""
        return self.layout == "tokens"

    def block_shape(self, block_size: int) -> Any:
        """The shape and dtype of a layer's block, a `jax.ShapeDtypeStruct`: [2, K, P, D], or [1, 1, P, D] for latents.

        Blocks outside of pools have this shape whatever the layout. A block of a recurrent layer is a snapshot: a dict
        of its arrays and the number of tokens before it, i32[].
        """
        if self.arrays:
            arrays = {array.name: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)) for array in self.arrays}
            return {NUM_TOKENS: jax.ShapeDtypeStruct((), jnp.int32), **arrays}
        parts = 2 if self.values is None else 1
        return jax.ShapeDtypeStruct((parts, self.kv_heads, block_size, self.head_dim), jnp.dtype(self.dtype))

    def pool_shape(self, block_size: int) -> Any:
        """`block_shape`, or the shape [P, R, W] of a block in a pool by token."""
        block = self.block_shape(block_size)
        if not self.by_token:
            return block
        return jax.ShapeDtypeStruct((block_size, *token_rows(self.kv_heads, self.head_dim)), block.dtype)

    @property
    def mesh_axes(self) -> Any:
        """The `MeshAxes` of the pool's arrays, `[N + 1, L, *pool_shape]`. The single head of latents is not divided.

        Pools of layers with a window or a state are never divided by tokens, whatever these axes say.
        """
        if self.arrays:
            axes = {array.name: MeshAxes(None if array.axis is None else 2 + array.axis) for array in self.arrays}
            return {NUM_TOKENS: MeshAxes()} | axes
        if self.by_token:
            return MeshAxes(3)
        return MeshAxes(3 if self.values is None else None, 4)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block (`block_size` positions, or a snapshot) in all layers of the pool, scales included."""
        blocks = jax.tree.leaves(self.block_shape(block_size))
        scales = math.prod(blocks[0].shape[:-1]) * 4 if self.quantised else 0
        return len(self.layers) * (sum(block.size * block.dtype.itemsize for block in blocks) + scales)


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """Returns the name of a dtype, or raises a ValueError."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype: got {dtype!r}, wanted the name or type of a number format") from None


def kv_dtype(dtype: jax.typing.DTypeLike) -> str:
    """Returns the name of a dtype of K/V, or raises a ValueError for any other."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype: got {name!r}, wanted one of {', '.join(DTYPES)}")
    return name


def is_integer(value: Any) -> bool:
    """Whether a value is an int of Python or numpy, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def static_int(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as a Python int of at least `minimum`."""
    if not is_integer(value) or value < minimum:
        raise ValueError(f"{name}: got {value!r:.80}, wanted an int of at least {minimum}")
    return int(value)


def set_ints(spec: Any, minimum: int, *names: str) -> None:
    """Makes fields of a frozen dataclass Python ints of at least `minimum`. Numpy's ints are accepted too."""
    for name in names:
        object.__setattr__(spec, name, static_int(name, getattr(spec, name), minimum))
