# SPDX-License-Identifier: Apache-2.0
"""Sizes a cache: finds the number of blocks for a model's layers and a budget, with a ledger of the bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from kvjax.layers import static_int
from kvjax.ledger import Ledger, blocks_per_seq, make_ledger, own_size, table
from kvjax.pools.placement import num_shards
from kvjax.spec import CacheSpec, GroupSpec, Kind, LayerSpec, make_spec
from kvjax.state import EvictionPolicy

__all__ = ["Plan", "plan"]

# Slots, (block, kv head) rows of a pool and handles of the index (under eight a block) are int32.
_MAX_SLOTS = 2**31 - 1
_Key = int | str | None  # the key of a group
_Counts = tuple[int, ...]  # the number of blocks of each key


class Plan(NamedTuple):
    """A cache for a budget.

    Attributes:
      spec: the cache, ready for `init` and `init_pools`.
      ledger: the use of the bytes.
    """

    spec: CacheSpec
    ledger: Ledger

    def __str__(self) -> str:
        """The ledger."""
        return str(self.ledger)


def plan(
    layers: Sequence[LayerSpec],
    *,
    max_seqs: int,
    max_length: int,
    budget_bytes: int | None = None,
    device_fraction: float | None = None,
    host_budget_bytes: int | None = None,
    shares: str | Mapping[int | str | None, float] = "equal",
    model_bytes: int = 0,
    device: Any = None,
    policy: EvictionPolicy | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    **options: Any,
) -> Plan:
    """Sizes a cache: as many blocks as a budget holds, with their scratch rows and metadata.

    The budget covers everything that stays in memory: the model, the pools (N blocks and a scratch row) and the
    metadata. It does not cover a compiled step's temporaries, so leave room for them.

    Args:
      layers: an entry per layer that remembers earlier tokens, in the model's order.
      max_seqs: S, sequences held at once.
      max_length: the largest number of tokens of a sequence, which sizes the block tables. If the budget is too small
        for such a sequence, `plan` still returns a plan, and its ledger has a note.
      budget_bytes: bytes to spend on the device. Give this or `device_fraction`.
      device_fraction: the share of the device's memory to spend, above 0 and at most 1. On a GPU jax may allocate three
        quarters of the memory unless you set `XLA_PYTHON_CLIENT_MEM_FRACTION`, and the share is of this part.
      host_budget_bytes: bytes to spend on the host, for the K/V of a host tier. None means no host tier, or the tier
        that `num_host_blocks` describes. The metadata of host blocks is on the device.
      shares: the division of both budgets among the windows. "equal" gives each window the same bytes. "bytes" divides
        in proportion to the bytes kept by a window for a sequence of `max_length`. A mapping {window: weight}, with
        None for full attention and "recurrent" for recurrent layers, divides by the weights. A window with a larger
        share holds more rows or more cached blocks. It keeps the same part of each sequence.
      model_bytes: bytes of the budget for the model's parameters.
      device: the `jax.Device` of `device_fraction`. None means the first local device.
      policy: the eviction policy of the state, which costs metadata of its own. Defaults to the policy of `init`.
      mesh: the devices to divide the kv heads among; see `Cache.create`. All bytes, given and planned, are then for one
        device: its heads of every block, all of every latent, and the whole metadata.
      heads: the mesh's axis for the kv heads.
      context: the mesh's axis that divides the tokens of blocks; see `init_pools`. None divides no blocks.
      **options: further options of `make_spec`: block_size, dtype, extra_ids, partial_reuse, num_host_blocks, ...

    Returns:
      The spec and the ledger.

    Raises:
      ValueError: if an argument is wrong or a budget is too small. The error names the smallest budget.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=8, head_dim=128)] * 32
      >>> plan = kvjax.plan(layers, budget_bytes=8 << 30, max_seqs=16, max_length=4096)
      >>> plan.ledger.num_full_seqs  # of 512 MiB each, not counting the metadata
      15
      >>> plan.ledger.used_bytes <= 8 << 30
      True

    Source: TensorRT-LLM, which shares equally by default; its calculateWindowSizeToShare weighs by bytes.
    """
    name, budget = _budget(budget_bytes, device_fraction, device)
    model_bytes = static_int("model_bytes", model_bytes, 0)
    shape = {"max_seqs": max_seqs, "max_length": max_length, **options}
    # No group needs more blocks than a row has tokens.
    device_layers, parts = _of_one_device(
        layers, make_spec(layers, num_blocks=max_length, **shape), mesh, heads, context
    )
    device_spec = make_spec(device_layers, num_blocks=max_length, **shape)
    keys, prices = _prices(device_spec, parts)
    fewest = tuple(
        max(device_spec.least_blocks(group) for group in device_spec.groups if group.key == key) for key in keys
    )
    weights = _weights(device_spec, keys, shares, parts)
    if host_budget_bytes is not None:
        if options.get("num_host_blocks"):
            raise ValueError("num_host_blocks, host_budget_bytes: wanted at most one of the two")
        shape["num_host_blocks"] = _host_blocks(host_budget_bytes, device_spec, keys, prices, weights)

    @functools.cache
    def ledger(counts: _Counts) -> Ledger:
        spec = make_spec(device_layers, num_blocks=dict(zip(keys, counts, strict=True)), **shape)
        return make_ledger(spec, budget, policy, model_bytes, host_budget_bytes, parts)

    smallest = ledger(fewest)
    if smallest.unused_bytes < 0:
        rows = " and for the windows of one row" if smallest.spec.window_groups else ""
        message = _too_little(name, budget, smallest.used_bytes, smallest.spec, rows)
        raise ValueError("\n".join([f"{message}:", *table(smallest.entries)]))
    hosts = {group.key: group.num_host_blocks for group in smallest.spec.groups}
    max_blocks = [_most_blocks(smallest.spec, key) - hosts[key] for key in keys]

    def fits(counts: _Counts) -> bool:
        return (
            all(count <= limit for count, limit in zip(counts, max_blocks, strict=True))
            and ledger(counts).unused_bytes >= 0
        )

    best = _largest(fits, budget, prices, weights, fewest)
    return Plan(make_spec(layers, num_blocks=dict(zip(keys, best, strict=True)), **shape), ledger(best))


def _of_one_device(
    layers: Sequence[LayerSpec],
    spec: CacheSpec,
    mesh: Mesh | AbstractMesh | None,
    heads: str | None,
    context: str | None,
) -> tuple[list[LayerSpec], int]:
    """Returns the layers of a device (its kv heads, whole latents, its part of a recurrent state).

    Also returns the number of devices sharing each block.
    """
    alone = mesh is None and heads is None and context is None
    shards, parts = (1, 1) if alone else num_shards(spec, mesh, heads, context)
    return [_part_of(layer, shards) for layer in layers], parts


def _part_of(layer: LayerSpec, shards: int) -> LayerSpec:
    if layer.values is not None:
        return layer
    arrays = tuple(array._replace(shape=_divided(array.shape, array.axis, shards)) for array in layer.arrays)
    return dataclasses.replace(layer, kv_heads=layer.kv_heads // shards, arrays=arrays)


def _divided(shape: tuple[int, ...], axis: int | None, shards: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], shape[axis] // shards, *shape[axis + 1 :])


def _prices(spec: CacheSpec, parts: int) -> tuple[list[_Key], list[int]]:
    """Returns the keys that share a budget, and the price of a block of each: its pool bytes, or 1 without pools."""
    keys = list(dict.fromkeys(group.key for group in spec.groups[spec.bare :]))
    sizes = [(group.key, group.block_bytes(own_size(group, spec.block_size, parts))) for group in spec.groups]
    prices = [sum(size for group_key, size in sizes if group_key == key) for key in keys]
    return keys, [price or 1 for price in prices]


def _weights(
    spec: CacheSpec, keys: Sequence[_Key], shares: str | Mapping[int | str | None, float], parts: int
) -> list[int]:
    """Returns the exact weight of each key's share."""
    if shares == "equal":
        return [1] * len(keys)
    if shares == "bytes":
        sizes = [(group, group.block_bytes(own_size(group, spec.block_size, parts))) for group in spec.groups]
        held = [(group.key, _tokens_held(spec, group) * size) for group, size in sizes]
        return [sum(num_bytes for group_key, num_bytes in held if group_key == key) or 1 for key in keys]
    wanted = f"wanted 'equal', 'bytes' or a weight for each of the windows {keys}"
    if not isinstance(shares, Mapping) or set(shares) != set(keys):
        raise ValueError(f"shares: got {shares!r}, {wanted}")
    for key, weight in shares.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise ValueError(f"shares[{key}]: got {weight!r}, wanted a number above 0")
    fractions = [Fraction(shares[key]) for key in keys]
    scale = math.lcm(*(weight.denominator for weight in fractions))
    return [int(weight * scale) for weight in fractions]


def _tokens_held(spec: CacheSpec, group: GroupSpec) -> int:
    """The tokens of a sequence of `max_length` in a group; for snapshots, the tokens of their blocks."""
    if group.window is None or group.kind is Kind.RECURRENT:
        return blocks_per_seq(spec, group) * spec.block_size
    return min(spec.max_length, group.window + group.sink_tokens)


def _largest(
    fits: Callable[[_Counts], bool], budget: int, prices: list[int], weights: list[int], fewest: _Counts
) -> _Counts:
    """Returns the largest counts of blocks that fit, divided by the weights. The next block would not fit.

    The counts `fewest` fit. If some counts fit, smaller counts fit too.
    """
    total = sum(weights)

    def divide(spent: int) -> _Counts:
        """Block counts for `spent` bytes of K/V. If `spent` grows by 1, no count grows by more than 1."""
        return tuple(
            max(count, spent * weight // (total * price))
            for count, price, weight in zip(fewest, prices, weights, strict=True)
        )

    low = 0
    high = budget + sum(prices) + 1  # `low` fits, `high` does not
    while high - low > 1 and sum(divide(high)) > sum(divide(low)) + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(divide(middle)) else (low, middle)
    best = divide(low)
    # If several counts would grow together, one of them may fit alone.
    tied = [index for index, (old, new) in enumerate(zip(best, divide(high), strict=True)) if new > old]
    for index in sorted(tied, key=lambda index: -prices[index]):
        larger = (*best[:index], best[index] + 1, *best[index + 1 :])
        best = larger if fits(larger) else best
    return best


def _most_blocks(spec: CacheSpec, key: _Key) -> int:
    """The largest number of blocks of a key that int32 can count, host blocks included."""
    kv_heads = [pool.kv_heads for group in spec.groups if group.key == key for pool in group.pools]
    widest = max([8, spec.block_size, *kv_heads])
    return _MAX_SLOTS // widest - 1


def _host_blocks(
    budget: Any, spec: CacheSpec, keys: Sequence[_Key], prices: list[int], weights: list[int]
) -> dict[_Key, int]:
    """Sizes the host blocks of each key. Their budget is separate, and pays only for their pools."""
    budget = static_int("host_budget_bytes", budget, 0)
    if not any(group.pools for group in spec.groups):
        raise ValueError(
            f"host_budget_bytes: got {budget:,} without layers, wanted None; num_host_blocks counts blocks"
        )
    if budget < sum(prices):
        raise ValueError(_too_little("host_budget_bytes", budget, sum(prices), spec))
    max_blocks = [_most_blocks(spec, key) - 1 for key in keys]  # and one on the device

    def fits(counts: _Counts) -> bool:
        pairs = zip(counts, prices, strict=True)
        return (
            all(count <= limit for count, limit in zip(counts, max_blocks, strict=True))
            and sum(count * price for count, price in pairs) <= budget
        )

    return dict(zip(keys, _largest(fits, budget, prices, weights, (1,) * len(keys)), strict=True))


def _too_little(name: str, budget: int, min_bytes: int, spec: CacheSpec, suffix: str = "") -> str:
    scope = "" if len(spec.groups) == 1 else " in each group"
    reason = f"the least for one block of {spec.block_size} tokens{scope}{suffix}"
    return f"{name}: got {budget:,} bytes, wanted at least {min_bytes:,}, {reason}"


def _budget(budget_bytes: int | None, device_fraction: float | None, device: Any) -> tuple[str, int]:
    """Returns the argument that gave the budget, and the budget in bytes."""
    if (budget_bytes is None) == (device_fraction is None):
        raise ValueError("budget_bytes, device_fraction: wanted exactly one of the two")
    if budget_bytes is not None:
        return "budget_bytes", static_int("budget_bytes", budget_bytes, 0)
    assert device_fraction is not None
    if not 0 < device_fraction <= 1:
        raise ValueError(f"device_fraction: got {device_fraction!r}, wanted more than 0 and at most 1")
    device = device or jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(
            f"device_fraction: got {device_fraction}, but {device} does not report how much memory it has; "
            "pass budget_bytes"
        )
    return "device_fraction", int(limit * device_fraction)
