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

from kvjax.ledger import Ledger, make_ledger, table
from kvjax.pools.placement import num_shards
from kvjax.spec import CacheSpec, GroupSpec, LayerSpec, make_spec
from kvjax.state import EvictionPolicy

# Slots, (block, kv head) rows of a pool and handles of the index (under eight a block) are int32.
_MOST_SLOTS = 2**31 - 1
_Window = int | None
_Counts = tuple[int, ...]  # blocks of each window


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
    shares: str | Mapping[int | None, float] = "equal",
    model_bytes: int = 0,
    device: Any = None,
    policy: EvictionPolicy | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    heads: str | None = None,
    **options: Any,
) -> Plan:
    """Sizes a cache: as many blocks as a budget holds, with their scratch rows and metadata.

    The budget covers what stays in memory: the model, the pools (N blocks and a scratch row), the metadata. It does
    not cover a compiled step's temporaries, so leave room for them.

    Args:
      layers: one entry per attention layer, in the model's order.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold. It sizes the block tables; a budget too small for one such
        sequence is planned for all the same, and the ledger says so.
      budget_bytes: bytes to spend on the device, or
      device_fraction: the share of the device's memory to spend, above 0 and at most 1. On a GPU the memory is what
        jax may allocate (three quarters of it unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise).
      host_budget_bytes: bytes to spend on the host, for the K/V of a host tier; None: no host tier, or the one that
        `num_host_blocks` describes. The metadata of host blocks is on the device.
      shares: how the bytes of both budgets are divided among the windows: "equal" gives each of them as many bytes,
        "bytes" each in proportion to the K/V that it keeps of a sequence of `max_length`, and a mapping {window:
        weight}, with None for full attention, in proportion to the weights. A window keeps the same part of a
        sequence whatever its share: a larger share means more rows, or more cached blocks.
      model_bytes: bytes of the budget that the model's parameters take.
      device: the `jax.Device` whose memory `device_fraction` means; None for the first local one.
      policy: the eviction policy of the state, which costs metadata of its own; default as in `init`.
      mesh: the devices among which the kv heads are divided, as in `Cache.create`. All bytes, given and planned, are
        then those of one device: its heads of every block, and the whole metadata.
      heads: the mesh's axis that divides them.
      **options: passed to `make_spec`: block_size, dtype, extra_ids, partial_reuse, num_host_blocks, ...

    Returns:
      The spec and the ledger.

    Raises:
      ValueError: if a budget is too small, with the least that would do; or an argument is wrong.

    Source: TensorRT-LLM, which shares equally by default; its calculateWindowSizeToShare weighs by bytes.
    """
    name, budget = _budget(budget_bytes, device_fraction, device)
    if not isinstance(model_bytes, int) or model_bytes < 0:
        raise ValueError(f"model_bytes: got {model_bytes!r}, wanted an int of at least 0")
    shape = {"max_seqs": max_seqs, "max_length": max_length, **options}
    one = make_spec(layers, num_blocks=1, **shape)
    shards = 1 if mesh is None and heads is None else num_shards(one, mesh, heads)
    own = [dataclasses.replace(layer, kv_heads=layer.kv_heads // shards) for layer in layers]  # of one device
    one = make_spec(own, num_blocks=1, **shape)
    windows = list(dict.fromkeys(group.window for group in one.groups[one.bare :]))  # those that share a budget
    prices = _by_window(one, windows, lambda group: group.block_bytes(one.block_size))
    weights = _weights(one, windows, shares)
    if host_budget_bytes is not None:
        if options.get("num_host_blocks"):
            raise ValueError("num_host_blocks, host_budget_bytes: wanted at most one of the two")
        shape["num_host_blocks"] = _host_blocks(host_budget_bytes, one, windows, prices, weights)

    @functools.cache
    def ledger(counts: _Counts) -> Ledger:
        spec = make_spec(own, num_blocks=dict(zip(windows, counts, strict=True)), **shape)
        return make_ledger(spec, budget, policy, model_bytes, host_budget_bytes)

    least = ledger((1,) * len(windows))
    if least.left_bytes < 0:
        message = _too_little(name, budget, least.used_bytes, least.spec)
        raise ValueError("\n".join([f"{message}:", *table(least.entries)]))
    hosts = {group.window: group.num_host_blocks for group in least.spec.groups}
    most = [_most_blocks(least.spec, window) - hosts[window] for window in windows]

    def fits(counts: _Counts) -> bool:
        return all(n <= m for n, m in zip(counts, most, strict=True)) and ledger(counts).left_bytes >= 0

    best = _largest(fits, budget, prices, weights)
    return Plan(make_spec(layers, num_blocks=dict(zip(windows, best, strict=True)), **shape), ledger(best))


def _by_window(spec: CacheSpec, windows: Sequence[_Window], num_bytes: Callable[[GroupSpec], int]) -> list[int]:
    """The bytes of all groups of each window; 1 where there are none."""
    return [sum(num_bytes(group) for group in spec.groups if group.window == window) or 1 for window in windows]


def _weights(spec: CacheSpec, windows: Sequence[_Window], shares: str | Mapping[int | None, float]) -> list[int]:
    """The exact weight of each window's share."""
    if shares == "equal":
        return [1] * len(windows)
    if shares == "bytes":

        def held(group: GroupSpec) -> int:
            length = spec.max_length if group.window is None else group.window + group.sink_tokens
            return min(spec.max_length, length) * group.block_bytes(spec.block_size)

        return _by_window(spec, windows, held)
    wanted = f"wanted 'equal', 'bytes' or a weight for each of the windows {windows}"
    if not isinstance(shares, Mapping) or set(shares) != set(windows):
        raise ValueError(f"shares: got {shares!r}, {wanted}")
    for window, weight in shares.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise ValueError(f"shares[{window}]: got {weight!r}, wanted a number above 0")
    exact = [Fraction(shares[window]) for window in windows]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def _largest(fits: Callable[[_Counts], bool], budget: int, prices: list[int], weights: list[int]) -> _Counts:
    """The most blocks that fit, divided by the weights: the next block by the weights would not fit.

    (1, 1, ...) fits, and counts that fit still do with fewer blocks.
    """
    total = sum(weights)

    def divide(spent: int) -> _Counts:
        """Blocks for so many bytes of K/V; from one number to the next no count grows by more than one."""
        return tuple(max(1, spent * w // (total * p)) for p, w in zip(prices, weights, strict=True))

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


def _most_blocks(spec: CacheSpec, window: _Window) -> int:
    """The most blocks of one window that int32 can count, those of the host included."""
    pools = [pool for group in spec.groups if group.window == window for pool in group.pools]
    return _MOST_SLOTS // max([8, spec.block_size, *(pool.kv_heads for pool in pools)]) - 1


def _host_blocks(
    budget: Any, one: CacheSpec, windows: Sequence[_Window], prices: list[int], weights: list[int]
) -> dict[_Window, int]:
    """Host blocks of each window, by a budget of their own, which pays for nothing but their K/V."""
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise ValueError(f"host_budget_bytes: got {budget!r}, wanted an int")
    if not any(group.pools for group in one.groups):
        raise ValueError(
            f"host_budget_bytes: got {budget:,} without layers, wanted None; num_host_blocks counts blocks"
        )
    if budget < sum(prices):
        raise ValueError(_too_little("host_budget_bytes", budget, sum(prices), one))
    most = [_most_blocks(one, window) - 1 for window in windows]  # and one on the device

    def fits(counts: _Counts) -> bool:
        pairs = zip(counts, prices, strict=True)
        return all(n <= m for n, m in zip(counts, most, strict=True)) and sum(n * p for n, p in pairs) <= budget

    return dict(zip(windows, _largest(fits, budget, prices, weights), strict=True))


def _too_little(name: str, budget: int, least: int, spec: CacheSpec) -> str:
    each = "" if len(spec.groups) == 1 else " in each group"
    least_of = f"the least for one block of {spec.block_size} tokens{each}"
    return f"{name}: got {budget:,} bytes, wanted at least {least:,}, {least_of}"


def _budget(budget_bytes: int | None, device_fraction: float | None, device: Any) -> tuple[str, int]:
    """The argument that gave the budget, and the budget in bytes."""
    if (budget_bytes is None) == (device_fraction is None):
        raise ValueError("budget_bytes, device_fraction: wanted exactly one of the two")
    if budget_bytes is not None:
        if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
            raise ValueError(f"budget_bytes: got {budget_bytes!r}, wanted an int")
        return "budget_bytes", budget_bytes
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
