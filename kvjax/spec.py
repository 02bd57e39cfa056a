# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a cache: static and hashable, so that `jit` can close over them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

QUANTISED = ("int8", "float8_e4m3fn")
RECURRENT = "recurrent"  # key of the group of recurrent layers, where others have their window
NUM_TOKENS = "num_tokens"  # the array of a snapshot that says how many tokens it is after


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
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    sink_tokens: int = 0
    values: int | None = None
    arrays: tuple[StateArray, ...] = ()

    def __post_init__(self):
        if not self.arrays:
            _positive("kv_heads", self.kv_heads)
            _positive("head_dim", self.head_dim)
        _window(self.window, self.sink_tokens)

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
        _positive("width", width)
        _positive("values", values)
        if values > width:
            raise ValueError(f"values: got {values} of a latent of {width} columns, wanted at most {width}")
        return cls(1, width, values=values)

    @classmethod
    def recurrent(cls, arrays: Mapping[str, Any], *, axes: Mapping[str, int] | None = None) -> LayerSpec:
        """A layer that carries a state from token to token (gated delta rule, Mamba), which `kvjax.recur` computes.

        Args:
          arrays: the arrays of the state of one sequence by their names: shapes of float32, or
            `jax.ShapeDtypeStruct`s.
          axes: for each array that a mesh divides the axis, such as that of the heads.

        Raises:
          ValueError: naming the argument.
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
    for size in shape:
        _positive(where, size)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where}: got {_dtype_name(dtype)}, wanted a floating dtype")
    if axis is not None and not (isinstance(axis, int) and 0 <= axis < len(shape)):
        raise ValueError(f"axes[{name!r}]: got {axis!r}, wanted an axis of shape {tuple(shape)}")
    return StateArray(name, tuple(shape), _dtype_name(dtype), axis)


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
        """The axis of the pool's array, [N + 1, L, *`block_shape`], that a mesh divides; -1: none, as of latents."""
        if self.arrays:
            return {NUM_TOKENS: -1} | {one.name: -1 if one.axis is None else 2 + one.axis for one in self.arrays}
        return 3 if self.values is None else -1

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in every layer of the pool: `block_size` positions, or a snapshot; scales included."""
        blocks = jax.tree.leaves(self.block_shape(block_size))
        scales = math.prod(blocks[0].shape[:-1]) * 4 if self.quantised else 0
        return len(self.layers) * (sum(block.size * block.dtype.itemsize for block in blocks) + scales)


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """All layers that share one attention window, or all recurrent ones: one set of block ids and block tables.

    Attributes:
      num_blocks: N, device blocks.
      pools: one per distinct shape of a block among the layers; empty for a cache of metadata alone.
      window: attention window in tokens, None for full attention. Of recurrent layers 2: the next token needs the
        block of the token before, which holds the state after it.
      num_host_blocks: H, blocks of the host tier.
      sink_tokens: how many first tokens of a sequence stay whatever the window.
      recurrent: whether its layers are recurrent.
    """

    num_blocks: int
    pools: tuple[PoolSpec, ...] = ()
    window: int | None = None
    num_host_blocks: int = 0
    sink_tokens: int = 0
    recurrent: bool = False

    @property
    def key(self) -> int | str | None:
        """The group's name in `num_blocks`, `num_host_blocks` and `shares`: its window, or "recurrent"."""
        return RECURRENT if self.recurrent else self.window

    @property
    def num_ids(self) -> int:
        """N + H: device blocks are 0..N-1, host blocks N..N+H-1."""
        return self.num_blocks + self.num_host_blocks

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all pools, on either tier."""
        return sum(pool.block_bytes(block_size) for pool in self.pools)

    def first_column(self, written: jax.Array, size: int) -> jax.Array:
        """i32[...]; the first column of a block table that the token after `written` i32[...] ones still sees."""
        return jnp.zeros_like(written) if self.window is None else jnp.maximum(written - self.window + 1, 0) // size

    def keeps(self, column: jax.Array | np.ndarray, written: jax.Array, size: int) -> jax.Array:
        """bool[...]; whether a row with `written` tokens holds its block in `column`; always without a window."""
        return (jnp.asarray(column) * size < self.sink_tokens) | (column >= self.first_column(written, size))


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about a cache.

    Attributes:
      groups: one per distinct attention window. Group 0 is always full attention and holds the prefix tree for all
        groups. If no layer uses full attention it exists without pools ("bare").
      block_size: P, token positions per block.
      max_seqs: S, rows of the block table.
      max_blocks_per_seq: M, blocks that one row can hold.
      extra_ids: whether tokens carry an extra id (an image's identity) beside the token id; on wires 0 is text.
      partial_reuse: whether reuse goes on token by token inside the block after the last whole match.
      retention: whether blocks have priorities and times to live (`policies/retention.py`).
      offload_min_priority: blocks of lower priority that have to leave the device are removed, not offloaded.
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    max_seqs: int
    max_blocks_per_seq: int
    extra_ids: bool = False
    partial_reuse: bool = True
    retention: bool = False
    offload_min_priority: int = 0

    def __post_init__(self):
        for name in ("block_size", "max_seqs", "max_blocks_per_seq"):
            _positive(name, getattr(self, name))
        if not self.groups:
            raise ValueError("groups: got none, wanted at least one GroupSpec")
        seen = [(group.key, group.sink_tokens) for group in self.groups]
        if seen[0] != (None, 0) or any(key is None for key, _ in seen[1:]) or len(set(seen)) < len(seen):
            raise ValueError(f"groups: got windows and sinks {seen}, wanted (None, 0) first and then different windows")
        if self.partial_reuse and self.has_recurrent:
            raise ValueError(
                "partial_reuse: got True with recurrent layers, wanted False: their state inside a block is not kept"
            )
        for group in self.groups:
            _positive("num_blocks", group.num_blocks)
            _int("num_host_blocks", group.num_host_blocks, 0)
            _window(group.window, group.sink_tokens)
            for pool in group.pools:
                if bool(pool.arrays) != group.recurrent:
                    raise ValueError(f"groups: got {pool} in a group with recurrent={group.recurrent}, wanted another")
                if not pool.arrays:
                    _positive("kv_heads", pool.kv_heads)
                    _positive("head_dim", pool.head_dim)

    @property
    def has_recurrent(self) -> bool:
        """Whether a group has recurrent layers."""
        return any(group.recurrent for group in self.groups)

    @property
    def has_host(self) -> bool:
        """Whether a group has blocks on the host."""
        return bool(self.host_groups)

    @property
    def host_groups(self) -> tuple[int, ...]:
        """The numbers of the groups that have blocks on the host."""
        return tuple(number for number, group in enumerate(self.groups) if group.num_host_blocks)

    @property
    def bare(self) -> bool:
        """Whether the first group has no pools, because every layer has a window."""
        return len(self.groups) > 1 and not self.groups[0].pools

    @property
    def max_length(self) -> int:
        """Tokens that one row can hold."""
        return self.max_blocks_per_seq * self.block_size

    def group_name(self, number: int) -> str:
        """The beginning of a line about one of several groups; "" for the only one."""
        group = self.groups[number]
        if len(self.groups) == 1:
            return ""
        if group.window is None:
            return f"group {number}, full attention{', without K/V' if self.bare else ''}: "
        if group.recurrent:
            return f"group {number}, recurrent: "
        sinks = f" and the first {group.sink_tokens:,}" if group.sink_tokens else ""
        return f"group {number}, window of {group.window:,}{sinks}: "

    def locate(self, layer: int | jax.Array) -> tuple[int, int, int]:
        """The location of a model's layer: (group, pool in the group, index in the pool), from a static number.

        A scan over the layers of one pool takes their indices as an array: `write` and `attend` have `index=`.
        """
        if isinstance(layer, Tracer):
            raise ValueError("layer: got a traced value, wanted an int; a traced position in a pool is `index=`")
        for number, group in enumerate(self.groups):
            for pool_number, pool in enumerate(group.pools):
                if layer in pool.layers:
                    return number, pool_number, pool.layers.index(layer)
        raise ValueError(f"layer: got {layer}, which no pool of this spec holds")


def make_spec(
    layers: Sequence[LayerSpec] = (),
    *,
    num_blocks: int | Mapping[int | str | None, int],
    max_seqs: int,
    max_length: int,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = "bfloat16",
    num_host_blocks: int | Mapping[int | str | None, int] = 0,
    extra_ids: bool = False,
    partial_reuse: bool | None = None,
    retention: bool = False,
    offload_min_priority: int = 0,
) -> CacheSpec:
    """Describes a cache for a model's layers.

    Args:
      layers: one entry per layer that keeps something of the tokens before, in the model's order; none for a cache of
        metadata alone.
      num_blocks: N, device blocks of each group, or of each window {window: N} with None for full attention and
        "recurrent" for recurrent layers.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold, rounded up to whole blocks.
      block_size: P, tokens per block.
      dtype: element type of the K/V bytes; int8 and float8_e4m3fn with a scale for each token and head. XLA on
        CPU converts all of a float8_e4m3fn pool at every use: take int8 there.
      num_host_blocks: H, blocks of the host tier, given like num_blocks.
      extra_ids: whether tokens carry extra ids. To readers of events outside (`kvjax.interop`) 0 is text.
      partial_reuse: whether to reuse part of a block by a copy. None: where it can be, which is not with recurrent
        layers; True with these is refused.
      retention: whether blocks have priorities and times to live.
      offload_min_priority: blocks of lower priority that have to leave the device are removed, not offloaded.

    Returns:
      The spec: layers grouped by window, the full one first, then from small to large, then recurrent layers; inside a
      group one pool per shape of a block. If no layer has full attention, a bare first group has blocks for all rows
      and all cached blocks.

    Raises:
      ValueError: naming the argument, what was given and what was wanted.
    """
    _positive("block_size", block_size)
    _positive("max_length", max_length)
    _positive("max_seqs", max_seqs)
    max_blocks = -(-max_length // block_size)
    groups = _groups(layers, _dtype_name(dtype), num_blocks, num_host_blocks, max_held=max_seqs * max_blocks)
    return CacheSpec(
        groups, block_size, max_seqs, max_blocks, extra_ids,
        not any(group.recurrent for group in groups) if partial_reuse is None else partial_reuse,
        retention, offload_min_priority,
    )  # fmt: skip


def _dtype_name(dtype: jax.typing.DTypeLike) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype: got {dtype!r}, wanted the name or type of a number format") from None


_Key = tuple[bool, int | None, int]  # of a group: whether it is recurrent, its window, its sinks


def _groups(
    layers: Sequence[LayerSpec],
    dtype: str,
    num_blocks: int | Mapping[int | str | None, int],
    num_host_blocks: int | Mapping[int | str | None, int],
    max_held: int,
) -> tuple[GroupSpec, ...]:
    """The groups of a model's layers: the full one first, from small windows to large, then the recurrent one.

    A bare first group has `max_held` blocks, as many as all rows can hold, plus as many as the other groups.
    """
    pools = _pools(layers, dtype)

    def group(key: _Key) -> GroupSpec:
        recurrent, window, sink_tokens = key
        of_key = GroupSpec(1, tuple(pools.get(key, ())), window, 0, sink_tokens, recurrent)
        return dataclasses.replace(
            of_key,
            num_blocks=_of_group("num_blocks", num_blocks, of_key),
            num_host_blocks=_of_group("num_host_blocks", num_host_blocks, of_key),
        )

    full = (False, None, 0)
    others = [group(key) for key in sorted(pools.keys() - {full})]
    _check_keys("num_blocks", num_blocks, others)
    _check_keys("num_host_blocks", num_host_blocks, others)
    if others and full not in pools:
        return GroupSpec(max_held + sum(one.num_ids for one in others)), *others
    return group(full), *others


def _pools(layers: Sequence[LayerSpec], dtype: str) -> dict[_Key, list[PoolSpec]]:
    """The pools of each group's layers."""
    numbers: dict[_Key, dict[tuple[Any, ...], list[int]]] = {}
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers: got {layers!r}, wanted one LayerSpec for each layer")
    for number, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            raise ValueError(f"layers[{number}]: got {layer!r}, wanted a LayerSpec")
        if layer.window is None and layer.sink_tokens:
            raise ValueError(f"layers[{number}].sink_tokens: got {layer.sink_tokens} without a window, wanted 0")
        key = (True, 2, 0) if layer.arrays else (False, layer.window, layer.sink_tokens)
        shape = layer.kv_heads, layer.head_dim, layer.values, layer.arrays
        numbers.setdefault(key, {}).setdefault(shape, []).append(number)
    return {
        key: [
            PoolSpec(tuple(of_shape), heads, width, dtype, values, arrays)
            for (heads, width, values, arrays), of_shape in shapes.items()
        ]
        for key, shapes in numbers.items()
    }


def _of_group(argument: str, numbers: int | Mapping[int | str | None, int], group: GroupSpec) -> int:
    if not isinstance(numbers, Mapping):
        return numbers
    if group.key not in numbers:
        raise ValueError(f"{argument}: got {dict(numbers)}, wanted a number for {_described(group)}")
    return numbers[group.key]


def _check_keys(argument: str, numbers: Any, groups: Sequence[GroupSpec]) -> None:
    if isinstance(numbers, Mapping) and RECURRENT in numbers and not any(group.recurrent for group in groups):
        raise ValueError(f"{argument}: got a number for {RECURRENT!r} without recurrent layers, wanted none")


def _described(group: GroupSpec) -> str:
    return "recurrent layers" if group.recurrent else f"window {group.window}"


def _window(window: int | None, sink_tokens: int) -> None:
    if window is not None:
        _positive("window", window)
    _int("sink_tokens", sink_tokens, 0)


def _positive(name: str, value: int) -> None:
    _int(name, value, 1)


def _int(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, wanted an int of at least {minimum}")
