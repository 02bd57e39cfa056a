# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a cache: static and hashable, so that `jit` can close over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

QUANTISED = ("int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The K/V shape of one attention layer: K kv heads of width D, and which tokens it can see.

    Attributes:
      kv_heads: K.
      head_dim: D.
      window: how many last tokens a token attends to, itself included; None: full attention.
      sink_tokens: how many first tokens of a sequence stay in the cache whatever the window.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    sink_tokens: int = 0

    def __post_init__(self):
        _positive("kv_heads", self.kv_heads)
        _positive("head_dim", self.head_dim)
        _window(self.window, self.sink_tokens)


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """One pool: the layers of a group that share (K, D), with the dtype of their K/V.

    Attributes:
      layers: the model's layer numbers, in the order in which the pool stacks them.
      kv_heads: K.
      head_dim: D.
      dtype: element type of the K/V bytes, by name. An int8 or float8_e4m3fn pool is quantised: it has a float32
        scale for each token and head beside it.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def quantised(self) -> bool:
        """Whether the pool has scales."""
        return self.dtype in QUANTISED

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of `block_size` positions in every layer of the pool, their scales included."""
        vector = self.head_dim * jnp.dtype(self.dtype).itemsize + (4 if self.quantised else 0)
        return 2 * len(self.layers) * self.kv_heads * block_size * vector


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """All layers that share one attention window: one set of block ids and block tables.

    Attributes:
      num_blocks: N, device blocks.
      pools: one per distinct (kv heads, head width) among the layers; empty for a cache of metadata alone.
      window: attention window in tokens, None for full attention.
      num_host_blocks: H, blocks of the host tier.
      sink_tokens: how many first tokens of a sequence stay whatever the window.
    """

    num_blocks: int
    pools: tuple[PoolSpec, ...] = ()
    window: int | None = None
    num_host_blocks: int = 0
    sink_tokens: int = 0

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
        seen = [(group.window, group.sink_tokens) for group in self.groups]
        if seen[0] != (None, 0) or any(window is None for window, _ in seen[1:]) or len(set(seen)) < len(seen):
            raise ValueError(f"groups: got windows and sinks {seen}, wanted (None, 0) first and then different windows")
        for group in self.groups:
            _positive("num_blocks", group.num_blocks)
            _int("num_host_blocks", group.num_host_blocks, 0)
            _window(group.window, group.sink_tokens)
            for pool in group.pools:
                _positive("kv_heads", pool.kv_heads)
                _positive("head_dim", pool.head_dim)

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
    num_blocks: int | Mapping[int | None, int],
    max_seqs: int,
    max_length: int,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = "bfloat16",
    num_host_blocks: int | Mapping[int | None, int] = 0,
    extra_ids: bool = False,
    partial_reuse: bool = True,
    retention: bool = False,
    offload_min_priority: int = 0,
) -> CacheSpec:
    """Describes a cache for a model's layers.

    Args:
      layers: one entry per attention layer, in the model's order; none for a cache of metadata alone.
      num_blocks: N, device blocks of each group, or of each window {window: N} with None for full attention.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold, rounded up to whole blocks.
      block_size: P, tokens per block.
      dtype: element type of the K/V bytes; int8 and float8_e4m3fn with a scale for each token and head. XLA on
        CPU converts all of a float8_e4m3fn pool at every use: take int8 there.
      num_host_blocks: H, blocks of the host tier, given like num_blocks.
      extra_ids: whether tokens carry extra ids. To readers of events outside (`kvjax.interop`) 0 is text.
      partial_reuse: whether to reuse part of a block by a copy.
      retention: whether blocks have priorities and times to live.
      offload_min_priority: blocks of lower priority that have to leave the device are removed, not offloaded.

    Returns:
      The spec: layers grouped by window, the full one first and then from small to large; inside a group one pool per
      (kv heads, head width). If all layers have windows, a bare first group has blocks for all rows and all
      cached blocks.

    Raises:
      ValueError: naming the argument, what was given and what was wanted.
    """
    _positive("block_size", block_size)
    _positive("max_length", max_length)
    _positive("max_seqs", max_seqs)
    max_blocks = -(-max_length // block_size)
    groups = _groups(layers, _dtype_name(dtype), num_blocks, num_host_blocks, max_held=max_seqs * max_blocks)
    return CacheSpec(
        groups, block_size, max_seqs, max_blocks, extra_ids, partial_reuse, retention, offload_min_priority
    )


def _dtype_name(dtype: jax.typing.DTypeLike) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype: got {dtype!r}, wanted the name or type of a number format") from None


def _groups(
    layers: Sequence[LayerSpec],
    dtype: str,
    num_blocks: int | Mapping[int | None, int],
    num_host_blocks: int | Mapping[int | None, int],
    max_held: int,
) -> tuple[GroupSpec, ...]:
    """The groups of a model's layers, the full one first and then from small windows to large.

    A bare first group has `max_held` blocks, as many as all rows can hold, plus as many as the other groups.
    """
    shapes = _shapes(layers)

    def group(pools: Mapping[tuple[int, int], list[int]], window: int | None = None, sink_tokens: int = 0) -> GroupSpec:
        blocks = _of_window("num_blocks", num_blocks, window)
        host = _of_window("num_host_blocks", num_host_blocks, window)
        return GroupSpec(blocks, _pools(pools, dtype), window, host, sink_tokens)

    full = shapes.pop((None, 0), {})
    windows = [group(pools, window, sinks) for (window, sinks), pools in sorted(shapes.items())]
    if windows and not full:
        return GroupSpec(max_held + sum(one.num_ids for one in windows)), *windows
    return group(full), *windows


def _shapes(layers: Sequence[LayerSpec]) -> dict[tuple[int | None, int], dict[tuple[int, int], list[int]]]:
    """The numbers of a model's layers: {(window, sink tokens): {(kv heads, head width): layer numbers}}."""
    shapes: dict[tuple[int | None, int], dict[tuple[int, int], list[int]]] = {}
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers: got {layers!r}, wanted one LayerSpec for each attention layer")
    for number, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            raise ValueError(f"layers[{number}]: got {layer!r}, wanted a LayerSpec")
        if layer.window is None and layer.sink_tokens:
            raise ValueError(f"layers[{number}].sink_tokens: got {layer.sink_tokens} without a window, wanted 0")
        group = shapes.setdefault((layer.window, layer.sink_tokens), {})
        group.setdefault((layer.kv_heads, layer.head_dim), []).append(number)
    return shapes


def _of_window(argument: str, numbers: int | Mapping[int | None, int], window: int | None) -> int:
    if not isinstance(numbers, Mapping):
        return numbers
    if window not in numbers:
        raise ValueError(f"{argument}: got {dict(numbers)}, wanted a number for window {window}")
    return numbers[window]


def _pools(shapes: Mapping[tuple[int, int], list[int]], dtype: str) -> tuple[PoolSpec, ...]:
    return tuple(PoolSpec(tuple(numbers), k, d, dtype) for (k, d), numbers in shapes.items())


def _window(window: int | None, sink_tokens: int) -> None:
    if window is not None:
        _positive("window", window)
    _int("sink_tokens", sink_tokens, 0)


def _positive(name: str, value: int) -> None:
    _int(name, value, 1)


def _int(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, wanted an int of at least {minimum}")
