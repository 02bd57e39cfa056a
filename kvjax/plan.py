# SPDX-License-Identifier: Apache-2.0
"""From a model's layers and a number of bytes to a cache that fits, with a ledger of where the bytes go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from kvjax import cache
from kvjax.policies import EvictionPolicy
from kvjax.spec import CacheSpec, LayerSpec, make_spec

# Slots, (block, kv head) rows of a pool and handles of the index (under eight a block) are int32.
_MOST_SLOTS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a ledger."""

    name: str
    num_bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Where the bytes of a budget go. `print` it for a table.

    Attributes:
      budget_bytes: what there was to spend.
      entries: what it is spent on: the model, one entry per pool, the scratch rows, the metadata.
      spec: the cache.
    """

    budget_bytes: int
    entries: tuple[Entry, ...]
    spec: CacheSpec

    @property
    def used_bytes(self) -> int:
        """Bytes that are spoken for."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def left_bytes(self) -> int:
        """Bytes left over, fewer than another block would take."""
        return self.budget_bytes - self.used_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, when no block is shared."""
        return min(group.num_blocks for group in self.spec.groups) * self.spec.block_size

    @property
    def num_full_seqs(self) -> int:
        """Sequences of `max_length` that fit at once, when they share nothing; may be 0."""
        return min(group.num_blocks for group in self.spec.groups) // self.spec.max_blocks_per_seq

    def __str__(self) -> str:
        """A table: one line per entry, then what fits."""
        spent = [dataclasses.replace(entry, name="  " + entry.name) for entry in self.entries]
        lines = [Entry("budget", self.budget_bytes), *spent, Entry("left over", self.left_bytes)]
        return "\n".join([*_table(lines), *self._what_fits()])

    def _what_fits(self) -> list[str]:
        spec = self.spec
        block_bytes = sum(pool.block_bytes(spec.block_size) for group in spec.groups for pool in group.pools)
        each = f" of {block_bytes // spec.block_size:,} K/V bytes each" if block_bytes else ""
        fits = [f"holds {self.num_tokens:,} tokens{each}"]
        if self.num_full_seqs < spec.max_seqs:
            fits.append(
                f"note: {self.num_full_seqs:,} of {spec.max_seqs:,} sequences can be {spec.max_length:,} tokens long "
                "at the same time; more wait until blocks are released"
            )
        if self.num_full_seqs == 0:
            fits.append(f"note: no sequence can be longer than {self.num_tokens:,} tokens")
        return fits


class Plan(NamedTuple):
    """A cache that fits a budget.

    Attributes:
      spec: the cache, ready for `init` and `init_pools`.
      ledger: where the bytes go.
    """

    spec: CacheSpec
    ledger: Ledger


def plan(
    layers: Sequence[LayerSpec],
    *,
    max_seqs: int,
    max_length: int,
    budget_bytes: int | None = None,
    device_fraction: float | None = None,
    model_bytes: int = 0,
    device: Any = None,
    policy: EvictionPolicy | None = None,
    **options: Any,
) -> Plan:
    """Sizes a cache: as many blocks as a budget holds, with everything that comes with them.

    The budget covers what stays in memory: the model, the pools (N blocks and a scratch row), the metadata. It does
    not cover a compiled step's temporaries, so leave room for them.

    Args:
      layers: one entry per attention layer, in the model's order.
      max_seqs: S, sequences held at once.
      max_length: tokens that one sequence can hold. It sizes the block tables; a smaller budget than one such
        sequence needs is planned for all the same, and the ledger says so.
      budget_bytes: bytes to spend, or
      device_fraction: the share of the device's memory to spend, above 0 and at most 1. On a GPU the memory is what
        jax may allocate (three quarters of it unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise).
      model_bytes: bytes of the budget that the model's parameters take.
      device: the `jax.Device` whose memory `device_fraction` means; None for the first local one.
      policy: the eviction policy that the state will have, which has a state of its own; default as in `init`.
      **options: passed to `make_spec`: block_size, dtype, extra_ids, partial_reuse.

    Returns:
      The spec and the ledger.

    Raises:
      ValueError: if the budget is too small, with the least that would do; or an argument is wrong.
    """
    name, budget = _budget(budget_bytes, device_fraction, device)
    if not isinstance(model_bytes, int) or model_bytes < 0:
        raise ValueError(f"model_bytes: got {model_bytes!r}, wanted an int of at least 0")
    shape = {"max_seqs": max_seqs, "max_length": max_length, **options}

    def ledger(num_blocks: int) -> Ledger:
        spec = make_spec(layers, num_blocks=num_blocks, **shape)
        return Ledger(budget, _entries(spec, policy, model_bytes), spec)

    least = ledger(1)
    if least.left_bytes < 0:
        raise ValueError(
            f"{name}: got {budget:,} bytes, wanted at least {least.used_bytes:,}, the least for one block of "
            f"{least.spec.block_size} tokens:\n" + "\n".join(_table(least.entries))
        )
    best = _largest(ledger, least)
    return Plan(best.spec, best)


def _largest(ledger: Callable[[int], Ledger], least: Ledger) -> Ledger:
    """The ledger of the most blocks that leaves nothing negative; what it takes grows with the blocks."""
    size, pools = least.spec.block_size, [pool for group in least.spec.groups for pool in group.pools]
    # A block takes its K/V and, of metadata, its token ids at the very least.
    block_bytes = sum(pool.block_bytes(size) for pool in pools) + 4 * size
    widest = max([8, size, *(pool.kv_heads for pool in pools)])
    low, high, best = 1, min(1 + least.left_bytes // block_bytes, _MOST_SLOTS // widest - 1), least
    while low < high:
        middle = (low + high + 1) // 2
        candidate = ledger(middle)
        if candidate.left_bytes >= 0:
            low, best = middle, candidate
        else:
            high = middle - 1
    return best


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


def _entries(spec: CacheSpec, policy: EvictionPolicy | None, model_bytes: int) -> tuple[Entry, ...]:
    entries = [Entry("model", model_bytes)] if model_bytes else []
    scratch = 0
    for group in spec.groups:
        window = "" if group.window is None else f", window {group.window:,}"
        for pool in group.pools:
            block = pool.block_bytes(spec.block_size)
            scratch += block
            layers, heads = _plural(len(pool.layers), "layer"), _plural(pool.kv_heads, "head")
            name = f"K/V, {layers} x {heads} x {pool.head_dim} {pool.dtype}{window}"
            entries.append(Entry(name, group.num_blocks * block, f"{group.num_blocks:,} x {block:,}"))
    if scratch:
        entries.append(Entry("scratch row", scratch))
    return (*entries, Entry("metadata", _metadata_bytes(spec, policy)))


def _metadata_bytes(spec: CacheSpec, policy: EvictionPolicy | None) -> int:
    """Bytes of the state itself, asked of `init` without running it."""
    state = jax.eval_shape(lambda: cache.init(spec, policy))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _table(lines: Sequence[Entry]) -> list[str]:
    names, numbers = max(len(e.name) for e in lines), max(len(f"{e.num_bytes:,}") for e in lines)
    return [f"{e.name:<{names}}  {e.num_bytes:>{numbers},} {_human(e.num_bytes):>10}  {e.note}".rstrip() for e in lines]


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _human(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
