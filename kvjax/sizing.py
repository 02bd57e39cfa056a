# SPDX-License-Identifier: Apache-2.0
"""From a model's layers and a number of bytes to a cache that fits, with a ledger of where the bytes go."""

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
_MOST_SLOTS = 2**31 - 1
_Key = int | str | None  # of a group
_Counts = tuple[int, ...]  # blocks of each key


class Plan(NamedTuple):
    """A cache that fits a budget.

    Attributes:
      spec: the cache, ready for `init` and `init_pools`.
      ledger: where the bytes go.
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

    The budget covers what stays in memory: the model, the pools (N blocks and a scratch row), the metadata. It does
    not cover a compiled step's temporaries, so leave room for them.

    Args:
      layers: one entry per layer that keeps something of the tokens before, in the model's order.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold. It sizes the block tables; a budget too small for one such
        sequence is planned for all the same, and the ledger says so.
      budget_bytes: bytes to spend on the device, or
      device_fraction: the share of the device's memory to spend, above 0 and at most 1. On a GPU the memory is what
        jax may allocate (three quarters of it unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise).
      host_budget_bytes: bytes to spend on the host, for the K/V of a host tier; None: no host tier, or the one that
        `num_host_blocks` describes. The metadata of host blocks is on the device.
      shares: how the bytes of both budgets are divided among the windows: "equal" gives each of them as many bytes,
        "bytes" each in proportion to what it keeps of a sequence of `max_length`, and a mapping {window: weight}, with
        None for full attention and "recurrent" for recurrent layers, in proportion to the weights. A window keeps the
        same part of a sequence whatever its share: a larger share means more rows, or more cached blocks.
      model_bytes: bytes of the budget that the model's parameters take.
      device: the `jax.Device` whose memory `device_fraction` means; None for the first local one.
      policy: the eviction policy of the state, which costs metadata of its own; default as in `init`.
      mesh: the devices among which the kv heads are divided, as in `Cache.create`. All bytes, given and planned, are
        then those of one device: its heads of every block, all of every latent, and the whole metadata.
      heads: the mesh's axis that divides them.
      context: the mesh's axis that divides blocks, as in `init_pools`; None: none.
      **options: passed to `make_spec`: block_size, dtype, extra_ids, partial_reuse, num_host_blocks, ...

    Returns:
      The spec and the ledger.

    Raises:
      ValueError: if a budget is too small, with the least that would do; or an argument is wrong.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=8, head_dim=128)] * 32
      >>> plan = kvjax.plan(layers, budget_bytes=8 << 30, max_seqs=16, max_length=4096)
      >>> plan.ledger.num_full_seqs  # of 512 MiB each, without those of the metadata
      15
      >>> plan.ledger.used_bytes <= 8 << 30
      True

    Source: TensorRT-LLM, which shares equally by default; its calculateWindowSizeToShare weighs by bytes.
    """
    name, budget = _budget(budget_bytes, device_fraction, device)
    model_bytes = static_int("model_bytes", model_bytes, 0)
    shape = {"max_seqs": max_seqs, "max_length": max_length, **options}
    # No group needs more blocks than a row has tokens.
    own, parts = _of_one_device(layers, make_spec(layers, num_blocks=max_length, **shape), mesh, heads, context)
    one = make_spec(own, num_blocks=max_length, **shape)
    keys, prices = _prices(one, parts)
    fewest = tuple(max(one.least_blocks(group) for group in one.groups if group.key == key) for key in keys)
    weights = _weights(one, keys, shares, parts)
    if host_budget_bytes is not None:
        if options.get("num_host_blocks"):
            raise ValueError("num_host_blocks, host_budget_bytes: wanted at most one of the two")
        shape["num_host_blocks"] = _host_blocks(host_budget_bytes, one, keys, prices, weights)

    @functools.cache
    def ledger(counts: _Counts) -> Ledger:
        spec = make_spec(own, num_blocks=dict(zip(keys, counts, strict=True)), **shape)
        return make_ledger(spec, budget, policy, model_bytes, host_budget_bytes, parts)

    least = ledger(fewest)
    if least.unused_bytes < 0:
        rows = " and for the windows of one row" if least.spec.window_groups else ""
        message = _too_little(name, budget, least.used_bytes, least.spec, rows)
        raise ValueError("\n".join([f"{message}:", *table(least.entries)]))
    hosts = {group.key: group.num_host_blocks for group in least.spec.groups}
    most = [_most_blocks(least.spec, key) - hosts[key] for key in keys]

    def fits(counts: _Counts) -> bool:
        return all(n <= m for n, m in zip(counts, most, strict=True)) and ledger(counts).unused_bytes >= 0

    best = _largest(fits, budget, prices, weights, fewest)
    return Plan(make_spec(layers, num_blocks=dict(zip(keys, best, strict=True)), **shape), ledger(best))


def _of_one_device(
    layers: Sequence[LayerSpec],
    spec: CacheSpec,
    mesh: Mesh | AbstractMesh | None,
    heads: str | None,
    context: str | None,
) -> tuple[list[LayerSpec], int]:
    """The layers with what one device has of them: its kv heads, whole latents, its part of a recurrent state.

    And the number of devices that divide each block.
    """
    alone = mesh is None and heads is None and context is None
    shards, parts = (1, 1) if alone else num_shards(spec, mesh, heads, context)
    return [_part_of(layer, shards) for layer in layers], parts


def _part_of(layer: LayerSpec, shards: int) -> LayerSpec:
    if layer.values is not None:
        return layer
    arrays = tuple(one._replace(shape=_divided(one.shape, one.axis, shards)) for one in layer.arrays)
    return dataclasses.replace(layer, kv_heads=layer.kv_heads // shards, arrays=arrays)


def _divided(shape: tuple[int, ...], axis: int | None, shards: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], shape[axis] // shards, *shape[axis + 1 :])


def _prices(spec: CacheSpec, parts: int) -> tuple[list[_Key], list[int]]:
    """The keys that share a budget, and what a block of each takes of it: bytes of pools, or 1 where there are none."""
    keys = list(dict.fromkeys(group.key for group in spec.groups[spec.bare :]))
    sizes = [(group.key, group.block_bytes(own_size(group, spec.block_size, parts))) for group in spec.groups]
    prices = [sum(size for of, size in sizes if of == key) for key in keys]
    return keys, [price or 1 for price in prices]


def _weights(
    spec: CacheSpec, keys: Sequence[_Key], shares: str | Mapping[int | str | None, float], parts: int
) -> list[int]:
    """The exact weight of each key's share."""
    if shares == "equal":
        return [1] * len(keys)
    if shares == "bytes":
        sizes = [(group, group.block_bytes(own_size(group, spec.block_size, parts))) for group in spec.groups]
        held = [(group.key, _tokens_held(spec, group) * size) for group, size in sizes]
        return [sum(num_bytes for of, num_bytes in held if of == key) or 1 for key in keys]
    wanted = f"wanted 'equal', 'bytes' or a weight for each of the windows {keys}"
    if not isinstance(shares, Mapping) or set(shares) != set(keys):
        raise ValueError(f"shares: got {shares!r}, {wanted}")
    for key, weight in shares.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise ValueError(f"shares[{key}]: got {weight!r}, wanted a number above 0")
    exact = [Fraction(shares[key]) for key in keys]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def _tokens_held(spec: CacheSpec, group: GroupSpec) -> int:
    """The tokens of a sequence of `max_length` that a group holds; where it has snapshots those of their blocks."""
    if group.window is None or group.kind is Kind.RECURRENT:
        return blocks_per_seq(spec, group) * spec.block_size
    return min(spec.max_length, group.window + group.sink_tokens)


def _largest(
    fits: Callable[[_Counts], bool], budget: int, prices: list[int], weights: list[int], fewest: _Counts
) -> _Counts:
    """The most blocks that fit, divided by the weights: the next block by the weights would not fit.

    The fewest blocks fit, and counts that fit still do with fewer blocks.
    """
    total = sum(weights)

    def divide(spent: int) -> _Counts:
        """Blocks for so many bytes of K/V; from one number to the next no count grows by more than one."""
        return tuple(max(n, spent * w // (total * p)) for n, p, w in zip(fewest, prices, weights, strict=True))

    low, high = 0, budget + sum(prices) + 1  # that fits; that does not
    while high - low > 1 and sum(divide(high)) > sum(divide(low)) + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(divide(middle)) else (low, middle)
    best = divide(low)
    # Where several counts would grow together, one of them may fit alone.
    tied = [at for at, (old, new) in enumerate(zip(best, divide(high), strict=True)) if new > old]
    for at in sorted(tied, key=lambda at: -prices[at]):
        more = (*best[:at], best[at] + 1, *best[at + 1 :])
        best = more if fits(more) else best
    return best


def _most_blocks(spec: CacheSpec, key: _Key) -> int:
    """The most blocks of one key that int32 can count, those of the host included."""
    kv_heads = [pool.kv_heads for group in spec.groups if group.key == key for pool in group.pools]
    widest = max([8, spec.block_size, *kv_heads])
    return _MOST_SLOTS // widest - 1


def _host_blocks(
    budget: Any, one: CacheSpec, keys: Sequence[_Key], prices: list[int], weights: list[int]
) -> dict[_Key, int]:
    """Host blocks of each key, by a budget of their own, which pays for nothing but their pools."""
    budget = static_int("host_budget_bytes", budget, 0)
    if not any(group.pools for group in one.groups):
        raise ValueError(
            f"host_budget_bytes: got {budget:,} without layers, wanted None; num_host_blocks counts blocks"
        )
    if budget < sum(prices):
        raise ValueError(_too_little("host_budget_bytes", budget, sum(prices), one))
    most = [_most_blocks(one, key) - 1 for key in keys]  # and one on the device

    def fits(counts: _Counts) -> bool:
        pairs = zip(counts, prices, strict=True)
        return all(n <= m for n, m in zip(counts, most, strict=True)) and sum(n * p for n, p in pairs) <= budget

    return dict(zip(keys, _largest(fits, budget, prices, weights, (1,) * len(keys)), strict=True))


def _too_little(name: str, budget: int, least: int, spec: CacheSpec, more: str = "") -> str:
    each = "" if len(spec.groups) == 1 else " in each group"
    least_of = f"the least for one block of {spec.block_size} tokens{each}{more}"
    return f"{name}: got {budget:,} bytes, wanted at least {least:,}, {least_of}"


def _budget(budget_bytes: int | None, device_fraction: float | None, device: Any) -> tuple[str, int]:
    """The argument that gave the budget, and the budget in bytes."""
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
