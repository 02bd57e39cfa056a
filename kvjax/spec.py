# SPDX-License-Identifier: Apache-2.0
"""What a cache is made of: static, hashable descriptions that `jit` can close over."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

QUANTISED = ("int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The K/V shape of one attention layer: K kv heads of width D, and its window (None: full attention)."""

    kv_heads: int
    head_dim: int
    window: int | None = None


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
    """

    num_blocks: int
    pools: tuple[PoolSpec, ...] = ()
    window: int | None = None
    num_host_blocks: int = 0

    @property
    def num_ids(self) -> int:
        """N + H: device blocks are 0..N-1, host blocks N..N+H-1."""
        return self.num_blocks + self.num_host_blocks


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about a cache.

    Attributes:
      groups: one per distinct attention window.
      block_size: P, token positions per block.
      max_seqs: S, rows of the block table.
      max_blocks_per_seq: M, blocks that one row can hold.
      extra_ids: whether tokens carry an extra id (an image's identity) beside the token id.
      partial_reuse: whether reuse goes on token by token inside the block after the last whole match.
      retention: whether blocks have priorities and times to live (`retention.py`).
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    max_seqs: int
    max_blocks_per_seq: int
    extra_ids: bool = False
    partial_reuse: bool = True
    retention: bool = False

    def __post_init__(self):
        for name in ("block_size", "max_seqs", "max_blocks_per_seq"):
            _positive(name, getattr(self, name))
        if not self.groups:
            raise ValueError("groups: got none, wanted at least one GroupSpec")
        for group in self.groups:
            _positive("num_blocks", group.num_blocks)
            if group.window is not None or group.num_host_blocks or len(self.groups) > 1:
                raise ValueError(
                    f"groups: got {len(self.groups)} with window={group.window} and num_host_blocks="
                    f"{group.num_host_blocks}; this version serves one full-attention group on the device "
                    "(a model's sliding window is a mask in its attention call)"
                )
            for pool in group.pools:
                _positive("kv_heads", pool.kv_heads)
                _positive("head_dim", pool.head_dim)

    @property
    def max_length(self) -> int:
        """Tokens that one row can hold."""
        return self.max_blocks_per_seq * self.block_size

    def locate(self, layer: int) -> tuple[int, int, int]:
        """Where a model's layer keeps its K/V: (group, pool in the group, index in the pool)."""
        for g, group in enumerate(self.groups):
            for p, pool in enumerate(group.pools):
                if layer in pool.layers:
                    return g, p, pool.layers.index(layer)
        raise ValueError(f"layer: got {layer}, which no pool of this spec holds")


def make_spec(
    layers: Sequence[LayerSpec] = (),
    *,
    num_blocks: int,
    max_seqs: int,
    max_length: int,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = "bfloat16",
    extra_ids: bool = False,
    partial_reuse: bool = True,
    retention: bool = False,
) -> CacheSpec:
    """Describes a cache for a model's layers.

    Args:
      layers: one entry per attention layer, in the model's order; none for a cache of metadata alone.
      num_blocks: N, device blocks.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold, rounded up to whole blocks.
      block_size: P, tokens per block.
      dtype: element type of the K/V bytes; int8 and float8_e4m3fn with a scale for each token and head. On CPU XLA
        converts all of a float8_e4m3fn pool at every use: take int8 there.
      extra_ids: whether tokens carry extra ids.
      partial_reuse: whether to reuse part of a block by a copy.
      retention: whether blocks have priorities and times to live.

    Returns:
      The spec: layers grouped by window, and inside a group one pool per (kv heads, head width).

    Raises:
      ValueError: naming the argument, what came and what was wanted.
    """
    _positive("block_size", block_size)
    _positive("max_length", max_length)
    try:
        name = np.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype: got {dtype!r}, wanted the name or type of a number format") from None
    shapes: dict[tuple[int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.window is not None:
            raise ValueError(
                f"layers[{number}].window: got {layer.window}, wanted None (pass it to `attend` as a mask)"
            )
        shapes.setdefault((layer.kv_heads, layer.head_dim), []).append(number)
    pools = tuple(PoolSpec(tuple(numbers), k, d, name) for (k, d), numbers in shapes.items())
    return CacheSpec(
        groups=(GroupSpec(num_blocks, pools),),
        block_size=block_size,
        max_seqs=max_seqs,
        max_blocks_per_seq=-(-max_length // block_size),
        extra_ids=extra_ids,
        partial_reuse=partial_reuse,
        retention=retention,
    )


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: got {value!r}, wanted an int of at least 1")
