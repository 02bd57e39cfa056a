# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a cache: static and hashable, so that `jit` can close over them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.layers import LayerSpec as LayerSpec
from kvjax.layers import PoolSpec as PoolSpec
from kvjax.layers import StateArray as StateArray
from kvjax.layers import kv_dtype, set_ints, static_int

__all__ = ["CacheSpec", "GroupSpec", "Kind", "LayerSpec", "PoolSpec", "StateArray", "make_spec"]

RECURRENT = "recurrent"  # key of the group of recurrent layers, where others have their window


class Kind(enum.Enum):
    """The blocks of a sequence that the next token needs of a group."""

    FULL = "all"
    WINDOW = "those of the last tokens"
    RECURRENT = "the one of the last token, which holds the state after it"


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
        """The blocks that the next token needs."""
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
        """Bytes of one block in all pools, on either tier."""
        return sum(pool.block_bytes(block_size) for pool in self.pools)

    def max_blocks(self, num_blocks: Any, size: int, step: int) -> Any:
        """The most blocks that a row with `num_blocks` columns, an int or i32[...], holds at once.

        `step` is the most tokens that it is written at a time. Of recurrent layers each block that the step ends is a
        snapshot, and one more the step begins with.
        """
        if self.window is None:
            return num_blocks
        seen = self.window - 1 + step  # of tokens, which may start anywhere in a block
        held = 1 + -(-(seen - 1) // size) + -(-self.sink_tokens // size)
        return min(num_blocks, held) if isinstance(num_blocks, int) else jnp.minimum(num_blocks, held)

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
        for group in self.groups:
            for pool in group.pools:
                if bool(pool.arrays) != group.recurrent:
                    raise ValueError(f"groups: got {pool} in a group with recurrent={group.recurrent}, wanted another")

    def seen_columns(self, written: int, end: int) -> list[tuple[int, int]]:
        """(group, column) of the window groups' blocks below column `end` that the token after `written` ones sees."""
        columns = np.arange(self.max_blocks_per_seq, dtype=np.int32)  # all of them: another shape is compiled anew
        tokens: Any = np.int32(written)
        seen = [np.asarray(group.keeps(columns, tokens, self.block_size)) for group in self.window_groups]
        return [(number, at) for number, one in enumerate(seen, 1) for at in np.flatnonzero(one[:end]).tolist()]

    def least_blocks(self, group: GroupSpec) -> int:
        """The blocks that a group needs for one row of any length, written a token at a time; 1 without a window."""
        return 1 if group.window is None else group.max_blocks(self.max_blocks_per_seq, self.block_size, step=1)

    @property
    def window_groups(self) -> tuple[GroupSpec, ...]:
        """The groups but the first: those of windows, and of recurrent layers."""
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
        if group.kind is Kind.FULL:
            return f"group {number}, full attention{', without K/V' if self.bare else ''}: "
        if group.kind is Kind.RECURRENT:
            return f"group {number}, recurrent: "
        sinks = f" and the first {group.sink_tokens:,}" if group.sink_tokens else ""
        return f"group {number}, window of {group.window:,}{sinks}: "

    def locate(self, layer: int | jax.Array) -> tuple[int, int, int]:
        """The location of a model's layer: (group, pool in the group, index in the pool), from a static number.

        A scan over the layers of one pool takes their indices as an array: `write` and `attend` have `index=`.

        Example:
          >>> layers = [kvjax.LayerSpec(2, 16), kvjax.LayerSpec(2, 16, window=8)] * 3
          >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=2, max_length=32, block_size=4)
          >>> [spec.locate(layer) for layer in range(6)]
          [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 0, 2), (1, 0, 2)]
        """
        if isinstance(layer, Tracer):
            raise ValueError("layer: got a traced value, wanted an int; a traced position in a pool is `index=`")
        for number, group in enumerate(self.groups):
            for pool_number, pool in enumerate(group.pools):
                if layer in pool.layers:
                    return number, pool_number, pool.layers.index(layer)
        most = sum(len(pool.layers) for group in self.groups for pool in group.pools)
        wanted = f"one of the spec's {most} layers, 0..{most - 1}" if most else "a spec that was made with layers"
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
) -> CacheSpec:
    """Describes a cache for a model's layers.

    Args:
      layers: one entry per layer that keeps something of the tokens before, in the model's order; none for a cache of
        metadata alone.
      num_blocks: N, device blocks of each group, or of each window {window: N} with None for full attention and
        "recurrent" for recurrent layers. A group with a window needs the blocks that its last `window` tokens lie in,
        or no row could outgrow it: ceil((window - 1) / P) + 1, and those of its sinks. A chunk of a prompt needs more
        while it is computed, as the ledger of `plan` says.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold, rounded up to whole blocks.
      block_size: P, tokens per block.
      dtype: element type of the K/V bytes: bfloat16, float16, float32; or int8 and float8_e4m3fn with a scale for each
        token and head. XLA on CPU converts all of a float8_e4m3fn pool at every use: take int8 there.
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

    Example:
      >>> layers = [kvjax.LayerSpec(8, 128), kvjax.LayerSpec(8, 128, window=512)] * 2
      >>> spec = kvjax.make_spec(layers, num_blocks=64, max_seqs=2, max_length=1000)
      >>> [(group.window, group.pools[0].layers) for group in spec.groups]  # layers by window
      [(None, (0, 2)), (512, (1, 3))]
      >>> spec.max_length, spec.max_blocks_per_seq
      (1008, 63)
    """
    block_size, max_length = static_int("block_size", block_size, 1), static_int("max_length", max_length, 1)
    max_seqs = static_int("max_seqs", max_seqs, 1)
    max_blocks = -(-max_length // block_size)
    groups = _groups(layers, kv_dtype(dtype), num_blocks, num_host_blocks, max_held=max_seqs * max_blocks)
    spec = CacheSpec(
        groups, block_size, max_seqs, max_blocks, extra_ids,
        not any(group.recurrent for group in groups) if partial_reuse is None else partial_reuse,
        retention, offload_min_priority,
    )  # fmt: skip
    for group in spec.groups:
        if group.num_blocks < (least := spec.least_blocks(group)):
            raise ValueError(
                f"num_blocks: got {group.num_blocks} for {_described(group)}, wanted at least {least}: the blocks that "
                f"one row holds at a time"
            )
    return spec


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
            num_blocks=of_group("num_blocks", num_blocks, of_key),
            num_host_blocks=of_group("num_host_blocks", num_host_blocks, of_key),
        )

    full = (False, None, 0)
    others = [group(key) for key in sorted(pools.keys() - {full})]
    check_keys("num_blocks", num_blocks, others)
    check_keys("num_host_blocks", num_host_blocks, others)
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


def of_group(argument: str, numbers: Any, group: GroupSpec) -> Any:
    """A group's part of an argument: the same number for all groups, or {window: number}, which has to name its own."""
    if not isinstance(numbers, Mapping):
        return numbers
    if group.key not in numbers:
        raise ValueError(f"{argument}: got {dict(numbers)}, wanted a number for {_described(group)}")
    return numbers[group.key]


def check_keys(argument: str, numbers: Any, groups: Sequence[GroupSpec]) -> None:
    """Raises a ValueError for a number of a window that no group has; None stands for full attention in every spec."""
    keys = {None, *(group.key for group in groups)}
    for key in numbers if isinstance(numbers, Mapping) else ():
        if key not in keys:
            described = (
                f"{key!r} without recurrent layers" if key == RECURRENT else f"window {key!r}, which no layer has"
            )
            raise ValueError(f"{argument}: got a number for {described}, wanted none")


def _described(group: GroupSpec) -> str:
    return "recurrent layers" if group.recurrent else f"window {group.window}"
