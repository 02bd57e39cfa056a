# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a cache. They are static and hashable, so `jit` can close over them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.layers import LAYOUTS, QUANTISED, TPU_LANES, kv_dtype, set_ints, static_int
from kvjax.layers import LayerSpec as LayerSpec
from kvjax.layers import PoolSpec as PoolSpec
from kvjax.layers import StateArray as StateArray
from pallas_kernels import lowers_for

__all__ = ["CacheSpec", "GroupSpec", "Kind", "LayerSpec", "PoolSpec", "StateArray", "make_spec"]

RECURRENT = "recurrent"  # key of the group of recurrent layers; the key of every other group is its window


class Kind(enum.Enum):
    """The blocks of a sequence that the next token needs from a group."""

    FULL = "all"
    WINDOW = "blocks of the last tokens"
    RECURRENT = "the block of the last token, which holds the state after it"


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """All layers with the same attention window, or all recurrent layers: they share block ids and block tables.

    Attributes:
      num_blocks: N, device blocks.
      pools: a pool for each distinct shape of a block among the layers; empty for a cache without K/V.
      window: attention window in tokens. None means full attention. Recurrent layers have a window of 2, because the
        next token needs the block of the previous token, which holds the state after it.
      num_host_blocks: H, blocks of the host tier.
      sink_tokens: the number of first tokens to keep even when the window has passed them.
      recurrent: whether the layers are recurrent.

    Example:
      >>> layers = [kvjax.LayerSpec(2, 16), kvjax.LayerSpec(2, 16, window=8)]
      >>> blocks = {None: 8, 8: 6}
      >>> spec = kvjax.make_spec(layers, num_blocks=blocks, max_seqs=2, max_length=32, block_size=4, num_host_blocks=4)
      >>> [(group.window, group.num_blocks, group.num_ids) for group in spec.groups]
      [(None, 8, 12), (8, 6, 10)]
    """

    num_blocks: int
    pools: tuple[PoolSpec, ...] = ()
    window: int | None = None
    num_host_blocks: int = 0
    sink_tokens: int = 0
    recurrent: bool = False

    def __post_init__(self):
        set_ints(self, 1, "num_blocks")
        if self.window is not None:
            set_ints(self, 1, "window")
        set_ints(self, 0, "num_host_blocks", "sink_tokens")

    @property
    def kind(self) -> Kind:
        """The blocks needed by the next token."""
        return Kind.RECURRENT if self.recurrent else Kind.FULL if self.window is None else Kind.WINDOW

    @property
    def key(self) -> int | str | None:
        """The group's name in `num_blocks`, `num_host_blocks` and `shares`: its window, or "recurrent"."""
        return RECURRENT if self.recurrent else self.window

    @property
    def num_ids(self) -> int:
        """N + H: device blocks are 0..N-1, host blocks N..N+H-1."""
        return self.num_blocks + self.num_host_blocks

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block in all pools, on either tier."""
        return sum(pool.block_bytes(block_size) for pool in self.pools)

    def max_blocks(self, num_blocks: Any, block_size: int, step: int) -> Any:
        """The largest number of blocks that a row with `num_blocks` columns, an int or i32[...], holds at once.

        `step` is the largest number of tokens written at a time. In recurrent layers a step needs the snapshot it
        starts from, and writes a snapshot for each completed block.
        """
        if self.window is None:
            return num_blocks
        num_seen = self.window - 1 + step  # tokens, which may start anywhere in a block
        max_held = 1 + -(-(num_seen - 1) // block_size) + -(-self.sink_tokens // block_size)
        return min(num_blocks, max_held) if isinstance(num_blocks, int) else jnp.minimum(num_blocks, max_held)

    def first_column(self, written: jax.Array, block_size: int) -> jax.Array:
        """i32[...]; the first column of a block table that the next token after `written` i32[...] tokens sees."""
        return (
            jnp.zeros_like(written) if self.window is None else jnp.maximum(written - self.window + 1, 0) // block_size
        )

    def keeps(self, column: jax.Array | np.ndarray, written: Any, block_size: int) -> jax.Array:
        """bool[...]; whether a row with `written` tokens holds its block in `column`; always true without a window."""
        return (jnp.asarray(column) * block_size < self.sink_tokens) | (
            column >= self.first_column(written, block_size)
        )


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about a cache.

    Attributes:
      groups: a group for each distinct attention window. Group 0 is always full attention and holds the prefix tree for
        all groups. If no layer uses full attention, group 0 has no pools ("bare").
      block_size: P, token positions per block.
      max_seqs: S, rows of the block table.
      max_blocks_per_seq: M, the largest number of blocks of a row.
      extra_ids: whether tokens have an extra id, such as the id of an image, besides the token id. On wires 0 means
        text.
      partial_reuse: whether reuse continues token by token inside the block after the last whole match.
      retention: whether blocks have priorities and times to live (`policies/retention.py`).
      offload_min_priority: a victim with a lower priority is removed from the device, not offloaded.
      thinning: whether `thin` may let go of blocks in the middle of rows.
      sparse: whether rows may read a part of their blocks (`select_blocks`), and publish nothing after that.
      backups: whether blocks on the device can have copies on the host.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=30, block_size=4)
      >>> spec.max_length, spec.max_blocks_per_seq  # whole blocks
      (32, 8)
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    max_seqs: int
    max_blocks_per_seq: int
    extra_ids: bool = False
    partial_reuse: bool = True
    retention: bool = False
    offload_min_priority: int = 0
    thinning: bool = False
    sparse: bool = False
    backups: bool = False

    def __post_init__(self):
        set_ints(self, 1, "block_size", "max_seqs", "max_blocks_per_seq")
        set_ints(self, 0, "offload_min_priority")
        if not self.groups:
            raise ValueError("groups: got none, wanted at least one GroupSpec")
        seen = [(group.key, group.sink_tokens) for group in self.groups]
        if seen[0] != (None, 0) or any(key is None for key, _ in seen[1:]) or len(set(seen)) < len(seen):
            raise ValueError(f"groups: got windows and sinks {seen}, wanted (None, 0) first and then different windows")
        if self.partial_reuse and self.has_recurrent:
            raise ValueError(
                "partial_reuse: got True with recurrent layers, wanted False: their state inside a block is not kept"
            )
        if self.thinning and len(self.groups) > 1 and not self.groups[0].pools:
            raise ValueError("thinning: got True without a layer of full attention, wanted False: `thin` has no blocks")
        for group in self.groups:
            for pool in group.pools:
                if bool(pool.arrays) != group.recurrent:
                    raise ValueError(f"groups: got {pool} in a group with recurrent={group.recurrent}, wanted another")
        if self.backups and not self.host_groups:
            raise ValueError("backups: got True without blocks on the host, wanted num_host_blocks above 0")

    def seen_columns(self, written: int, end: int) -> list[tuple[int, int]]:
        """Lists (group, column) of the window blocks before column `end` that the token after `written` tokens sees."""
        columns = np.arange(self.max_blocks_per_seq, dtype=np.int32)  # all of them: another shape compiles again
        tokens: Any = np.int32(written)
        seen = [np.asarray(group.keeps(columns, tokens, self.block_size)) for group in self.window_groups]
        return [
            (group_index, column)
            for group_index, sees in enumerate(seen, 1)
            for column in np.flatnonzero(sees[:end]).tolist()
        ]

    def least_blocks(self, group: GroupSpec) -> int:
        """The blocks that a group needs for a row of any length, written a token at a time; 1 without a window."""
        return 1 if group.window is None else group.max_blocks(self.max_blocks_per_seq, self.block_size, step=1)

    @property
    def window_groups(self) -> tuple[GroupSpec, ...]:
        """All groups except the first: groups of windows and of recurrent layers."""
        return self.groups[1:]

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
        """The indices of the groups with blocks on the host."""
        return tuple(group_index for group_index, group in enumerate(self.groups) if group.num_host_blocks)

    @property
    def bare(self) -> bool:
        """Whether the first group has no pools, because every layer has a window."""
        return len(self.groups) > 1 and not self.groups[0].pools

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a row."""
        return self.max_blocks_per_seq * self.block_size

    def group_name(self, group_index: int) -> str:
        """The beginning of a line about one of several groups, or "" for the only group."""
        group = self.groups[group_index]
        if len(self.groups) == 1:
            return ""
        if group.kind is Kind.FULL:
            return f"group {group_index}, full attention{', without K/V' if self.bare else ''}: "
        if group.kind is Kind.RECURRENT:
            return f"group {group_index}, recurrent: "
        sinks = f" and the first {group.sink_tokens:,}" if group.sink_tokens else ""
        return f"group {group_index}, window of {group.window:,}{sinks}: "

    def locate(self, layer: int | jax.Array) -> tuple[int, int, int]:
        """Finds a model's layer by its static number: (group, pool in the group, index in the pool).

        A scan over the layers of a pool has a traced index: pass it to `write` and `attend` as `index=`.

        Example:
          >>> layers = [kvjax.LayerSpec(2, 16), kvjax.LayerSpec(2, 16, window=8)] * 3
          >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=2, max_length=32, block_size=4)
          >>> [spec.locate(layer) for layer in range(6)]
          [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 0, 2), (1, 0, 2)]
        """
        if isinstance(layer, Tracer):
            raise ValueError("layer: got a traced value, wanted an int; a traced position in a pool is `index=`")
        for group_index, group in enumerate(self.groups):
            for pool_index, pool in enumerate(group.pools):
                if layer in pool.layers:
                    return group_index, pool_index, pool.layers.index(layer)
        num_layers = sum(len(pool.layers) for group in self.groups for pool in group.pools)
        wanted = (
            f"one of the spec's {num_layers} layers, 0..{num_layers - 1}"
            if num_layers
            else "a spec that was made with layers"
        )
        raise ValueError(f"layer: got {layer!r}, wanted {wanted}")


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
    thinning: bool = False,
    sparse: bool = False,
    backups: bool = False,
    layout: str | None = None,
) -> CacheSpec:
    """Describes a cache for a model's layers.

    Args:
      layers: an entry per layer that remembers earlier tokens, in the model's order. Empty for a cache without K/V.
      num_blocks: N, device blocks of each group, or {window: N} with None for full attention and "recurrent" for
        recurrent layers. A group with a window needs at least ceil((window - 1) / P) + 1 blocks, and the blocks of its
        sinks, so a row can grow longer than the window. It needs more while a chunk of a prompt is computed: see the
        ledger of `plan`.
      max_seqs: S, sequences held at once.
      max_length: the largest number of tokens of a sequence, rounded up to whole blocks.
      block_size: P, tokens per block.
      dtype: element type of the K/V bytes: bfloat16, float16, float32, or int8 and float8_e4m3fn with a scale for each
        token and head. On CPU XLA converts a whole float8_e4m3fn pool at every use, so use int8 there.
      num_host_blocks: H, blocks of the host tier, in the same form as `num_blocks`.
      extra_ids: whether tokens have extra ids. Readers of events in other systems (`kvjax.interop`) take 0 for text.
      partial_reuse: whether to reuse part of a block by a copy. None enables it except with recurrent layers, where
        True is an error.
      retention: whether blocks have priorities and times to live.
      offload_min_priority: a victim with a lower priority is removed from the device, not offloaded.
      thinning: whether `thin` may let go of blocks in the middle of rows. Each view then packs the blocks that its rows
        still read.
      sparse: whether views may read a part of a row (`select_blocks`). K/V computed from such a view are approximate.
        So a row publishes nothing after a `commit` that does not say `exact=True`, and no other request can find its
        K/V.
      backups: whether blocks on the device can have copies on the host (`kvjax.tiers.backup`). A block with a copy
        leaves the device without a move, inside a jitted loop too. Needs `num_host_blocks`.
      layout: the order of a block's K/V in a pool: "heads", or "tokens", in which a TPU's attention kernel reads them.
        Blocks outside of pools, such as those of a save, are the same for both. Latents, states and quantised K/V have
        "heads" alone. None chooses "tokens" in a process with a TPU where it can, else "heads", and refuses quantised
        heads there if their width is no multiple of 128.

    Returns:
      The spec. Layers are grouped by window: full attention first, then windows from small to large, then recurrent
      layers. A group has a pool per shape of a block. If no layer has full attention, a bare first group has blocks for
      all rows and all cached blocks.

    Raises:
      ValueError: if an argument is wrong. The error names it, with the value given and the value wanted.

    Example:
      >>> layers = [kvjax.LayerSpec(8, 128), kvjax.LayerSpec(8, 128, window=512)] * 2
      >>> spec = kvjax.make_spec(layers, num_blocks=64, max_seqs=2, max_length=1000)
      >>> [(group.window, group.pools[0].layers) for group in spec.groups]  # layers by window
      [(None, (0, 2)), (512, (1, 3))]
      >>> spec.max_length, spec.max_blocks_per_seq
      (1008, 63)
    """
    block_size = static_int("block_size", block_size, 1)
    max_length = static_int("max_length", max_length, 1)
    max_seqs = static_int("max_seqs", max_seqs, 1)
    max_blocks = -(-max_length // block_size)
    dtype = kv_dtype(dtype)
    chosen_layout = _layout(layout, dtype)
    groups = _groups(layers, dtype, chosen_layout, num_blocks, num_host_blocks, max_held=max_seqs * max_blocks)
    if layout is None and lowers_for("tpu"):
        _refuse_narrow(groups)
    if partial_reuse is None:
        partial_reuse = not any(group.recurrent for group in groups)
    spec = CacheSpec(
        groups,
        block_size,
        max_seqs,
        max_blocks,
        extra_ids,
        partial_reuse,
        retention,
        offload_min_priority,
        thinning,
        sparse,
        backups,
    )
    for group in spec.groups:
        if group.num_blocks < (min_blocks := spec.least_blocks(group)):
            raise ValueError(
                f"num_blocks: got {group.num_blocks} for {_described(group)}, wanted at least {min_blocks}: the blocks "
                f"that one row holds at a time"
            )
    return spec


_Key = tuple[bool, int | None, int]  # of a group: whether it is recurrent, its window, its sinks


def _groups(
    layers: Sequence[LayerSpec],
    dtype: str,
    layout: str,
    num_blocks: int | Mapping[int | str | None, int],
    num_host_blocks: int | Mapping[int | str | None, int],
    max_held: int,
) -> tuple[GroupSpec, ...]:
    """Returns the groups of a model's layers: full attention, then windows from small to large, then recurrent layers.

    A bare first group has `max_held` blocks, enough for all rows, plus as many as the other groups.
    """
    pools = _pools(layers, dtype, layout)

    def group(key: _Key) -> GroupSpec:
        recurrent, window, sink_tokens = key
        new_group = GroupSpec(1, tuple(pools.get(key, ())), window, 0, sink_tokens, recurrent)
        return dataclasses.replace(
            new_group,
            num_blocks=of_group("num_blocks", num_blocks, new_group),
            num_host_blocks=of_group("num_host_blocks", num_host_blocks, new_group),
        )

    full = (False, None, 0)
    rest = [group(key) for key in sorted(pools.keys() - {full})]
    check_keys("num_blocks", num_blocks, rest)
    check_keys("num_host_blocks", num_host_blocks, rest)
    if rest and full not in pools:
        return GroupSpec(max_held + sum(group_spec.num_ids for group_spec in rest)), *rest
    return group(full), *rest


def _layout(layout: str | None, dtype: str) -> str:
    """Returns the layout of K/V, or raises a ValueError."""
    if layout is None:
        return "tokens" if lowers_for("tpu") and dtype not in QUANTISED else "heads"
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted None or one of {LAYOUTS}")
    if layout == "tokens" and dtype in QUANTISED:
        raise ValueError(f"layout: got 'tokens' for K/V in {dtype}, wanted 'heads', the layout of quantised K/V")
    return layout


def _refuse_narrow(groups: Sequence[GroupSpec]) -> None:
    """Raises a ValueError for quantised K/V of which a TPU would copy whole pools."""
    for pool in (pool for group in groups if not group.recurrent for pool in group.pools):
        width = pool.head_dim
        if pool.dtype in QUANTISED and pool.values is None and width % TPU_LANES:
            wide = -(-width // TPU_LANES) * TPU_LANES
            raise ValueError(
                f"layers: got heads of {width} for K/V in {pool.dtype}, wanted a multiple of {TPU_LANES} on a TPU, "
                f"which would copy the whole pool in each program. Pad the heads to {wide}, choose another dtype, or "
                f"say layout='heads' to have them nevertheless"
            )


def _pools(layers: Sequence[LayerSpec], dtype: str, layout: str) -> dict[_Key, list[PoolSpec]]:
    """Returns the pools of each group's layers."""
    layer_indices: dict[_Key, dict[tuple[Any, ...], list[int]]] = {}
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers: got {layers!r}, wanted a LayerSpec for each layer")
    for layer_index, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            raise ValueError(f"layers[{layer_index}]: got {layer!r}, wanted a LayerSpec")
        if layer.window is None and layer.sink_tokens:
            raise ValueError(f"layers[{layer_index}].sink_tokens: got {layer.sink_tokens} without a window, wanted 0")
        key = (True, 2, 0) if layer.arrays else (False, layer.window, layer.sink_tokens)
        shape = layer.kv_heads, layer.head_dim, layer.values, layer.arrays
        layer_indices.setdefault(key, {}).setdefault(shape, []).append(layer_index)
    return {
        key: [
            PoolSpec(
                tuple(of_shape),
                heads,
                width,
                dtype,
                values,
                arrays,
                "heads" if arrays or values is not None else layout,
            )
            for (heads, width, values, arrays), of_shape in shapes.items()
        ]
        for key, shapes in layer_indices.items()
    }


def of_group(argument: str, values: Any, group: GroupSpec) -> Any:
    """Returns a group's part of an argument: a number for all groups, or {window: number} with an entry for each."""
    if not isinstance(values, Mapping):
        return values
    if group.key not in values:
        raise ValueError(f"{argument}: got {dict(values)}, wanted a number for {_described(group)}")
    return values[group.key]


def check_keys(argument: str, values: Any, groups: Sequence[GroupSpec]) -> None:
    """Raises a ValueError if a number is given for a window that no group has. None is full attention in every spec."""
    keys = {None, *(group.key for group in groups)}
    for key in values if isinstance(values, Mapping) else ():
        if key not in keys:
            described = (
                f"{key!r} without recurrent layers" if key == RECURRENT else f"window {key!r}, which no layer has"
            )
            raise ValueError(f"{argument}: got a number for {described}, wanted none")


def _described(group: GroupSpec) -> str:
    return "recurrent layers" if group.recurrent else f"window {group.window}"
