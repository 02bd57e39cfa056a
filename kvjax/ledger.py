# SPDX-License-Identifier: Apache-2.0
"""The bytes of a cache, line by line, and the number of sequences that fit into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from kvjax.spec import CacheSpec, GroupSpec, Kind, PoolSpec
from kvjax.state import EvictionPolicy
from kvjax.verbs.init import init


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a ledger."""

    name: str
    num_bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The bytes of a budget by purpose. `print` it for a table.

    Attributes:
      budget_bytes: bytes to spend on the device.
      entries: the uses of the budget: the model, an entry per pool, the scratch rows, the metadata.
      spec: the cache. If devices divide the kv heads, it has the heads of a single device.
      parts: the number of devices sharing each block of layers with full attention. All bytes are for one device.
      host_budget_bytes: bytes to spend on the host. None means no budget was given.
      host_entries: the uses of the host's budget, an entry per pool. Empty without a host tier.
    """

    budget_bytes: int
    entries: tuple[Entry, ...]
    spec: CacheSpec
    host_budget_bytes: int | None = None
    host_entries: tuple[Entry, ...] = ()
    parts: int = 1

    @property
    def used_bytes(self) -> int:
        """Bytes of the device used by the entries."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def unused_bytes(self) -> int:
        """Bytes of the device left over, too few for another block of the largest group."""
        return self.budget_bytes - self.used_bytes

    @property
    def host_used_bytes(self) -> int:
        """Bytes of the host used by the entries."""
        return sum(entry.num_bytes for entry in self.host_entries)

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences can hold at once on the device, if they share nothing and are as long as possible.

        With windows there can be more tokens than slots, because tokens outside a window take no slot in its group.
        """
        spec = self.spec
        num_full = self.num_full_seqs
        remaining = [spec.max_blocks_per_seq]  # blocks for one more sequence, shorter than the others
        for group in spec.groups:
            per_seq = blocks_per_seq(spec, group)
            unused = group.num_blocks - num_full * per_seq
            remaining += [unused] if unused < per_seq else []
        return (num_full * spec.max_blocks_per_seq + min(remaining)) * spec.block_size

    @property
    def num_full_seqs(self) -> int:
        """Sequences of `max_length` that fit on the device at once, if they share nothing; may be 0."""
        return min(group.num_blocks // blocks_per_seq(self.spec, group) for group in self.spec.groups)

    def __str__(self) -> str:
        """A table with a line per entry, then the sequences that fit."""
        lines = [Entry("budget", self.budget_bytes), *_inset(self.entries), Entry("left over", self.unused_bytes)]
        if self.host_entries:
            budget = self.host_budget_bytes
            lines.append(Entry("host", self.host_used_bytes) if budget is None else Entry("host budget", budget))
            lines += _inset(self.host_entries)
            lines += [] if budget is None else [Entry("left over", budget - self.host_used_bytes)]
        return "\n".join([*table(lines), *self._what_fits()])

    def _what_fits(self) -> list[str]:
        spec = self.spec
        groups = [(group, group.block_bytes(own_size(group, spec.block_size, self.parts))) for group in spec.groups]
        kv_bytes = sum(num_bytes for group, num_bytes in groups if group.kind is not Kind.RECURRENT) // spec.block_size
        full_bytes = sum(num_bytes for group, num_bytes in groups if group.kind is Kind.FULL) // spec.block_size
        fits = f"holds {self.num_tokens:,} tokens" + (f" of {kv_bytes:,} K/V bytes each" if kv_bytes else "")
        notes = [fits + (f", {full_bytes:,} once they have left every window" if full_bytes < kv_bytes else "")]
        notes += [
            f"each sequence holds up to {blocks_per_seq(spec, group)} snapshots of {human(num_bytes, 1000)}"
            for group, num_bytes in groups
            if group.kind is Kind.RECURRENT
        ]
        notes += [
            f"each sequence holds up to {blocks_per_seq(spec, group):,} blocks{_window(group)}; a chunk of its prompt "
            f"takes one more for each {spec.block_size:,} tokens beyond the first {spec.block_size:,}"
            for group in spec.groups
            if group.kind is Kind.WINDOW
        ]
        if self.num_full_seqs < spec.max_seqs:
            notes.append(
                f"note: {self.num_full_seqs:,} of {spec.max_seqs:,} sequences can be {spec.max_length:,} tokens long "
                "at the same time; more wait until blocks are released"
            )
        if self.num_full_seqs == 0:
            notes.append(f"note: no sequence can be longer than {self.num_tokens:,} tokens")
        return notes


def blocks_per_seq(spec: CacheSpec, group: GroupSpec) -> int:
    """The largest number of a group's blocks that a sequence of `max_length` holds, growing by at most P tokens a step.

    A row that computes its prompt in longer chunks holds more blocks in a window group: if there is a single chunk, the
    whole prompt. For recurrent layers the number counts the first snapshot, and a snapshot for each block completed by
    a step.
    """
    return group.max_blocks(spec.max_blocks_per_seq, spec.block_size, step=spec.block_size)


def own_size(group: GroupSpec, block_size: int, parts: int) -> int:
    """The tokens of each block on a device, if `parts` devices divide the blocks of layers with full attention."""
    return block_size // parts if group.kind is Kind.FULL else block_size


def make_ledger(
    spec: CacheSpec,
    budget_bytes: int,
    policy: EvictionPolicy | None,
    model_bytes: int,
    host_budget_bytes: int | None,
    parts: int = 1,
) -> Ledger:
    """Makes the ledger of a cache."""
    entries = [Entry("model", model_bytes)] if model_bytes else []
    entries += _pools(spec, [group.num_blocks for group in spec.groups], parts)
    scratch = sum(group.block_bytes(own_size(group, spec.block_size, parts)) for group in spec.groups)
    entries += [Entry("scratch row" if len(spec.groups) == 1 else "scratch rows", scratch)] if scratch else []
    state = jax.eval_shape(lambda: init(spec, policy))
    entries.append(Entry("metadata", sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))))
    host = _pools(spec, [group.num_host_blocks for group in spec.groups], parts)
    return Ledger(budget_bytes, tuple(entries), spec, host_budget_bytes, tuple(host), parts)


def _pools(spec: CacheSpec, num_blocks: Sequence[int], parts: int) -> list[Entry]:
    """Lists an entry for each pool, with the given number of blocks in each group."""
    entries = []
    for group, blocks in zip(spec.groups, num_blocks, strict=True):
        for pool in group.pools if blocks else ():
            block = pool.block_bytes(own_size(group, spec.block_size, parts))
            entries.append(Entry(_described(pool, block) + _window(group), blocks * block, f"{blocks:,} x {block:,}"))
    return entries


def _described(pool: PoolSpec, block_bytes: int) -> str:
    """Describes a pool by its kind, the number of its layers and the size of each layer's part."""
    layers = plural(len(pool.layers), "layer")
    if pool.arrays:
        return f"snapshots, {layers} x {human(block_bytes // len(pool.layers), 1000)}"
    if pool.values is not None:
        return f"latents, {layers} x {pool.head_dim} {pool.dtype}"
    return f"K/V, {layers} x {plural(pool.kv_heads, 'head')} x {pool.head_dim} {pool.dtype}"


def _window(group: GroupSpec) -> str:
    sinks = f" and {plural(group.sink_tokens, 'sink')}" if group.sink_tokens else ""
    return f", window {group.window:,}{sinks}" if group.kind is Kind.WINDOW else ""


def pool_bytes(spec: CacheSpec) -> tuple[int, int]:
    """Bytes of the pools, with scratch rows, and of the host pools."""
    sizes = [(group, group.block_bytes(spec.block_size)) for group in spec.groups]
    on_device = sum((group.num_blocks + 1) * size for group, size in sizes)
    return on_device, sum(group.num_host_blocks * size for group, size in sizes)


def _inset(entries: Sequence[Entry]) -> list[Entry]:
    return [dataclasses.replace(entry, name="  " + entry.name) for entry in entries]


def table(lines: Sequence[Entry]) -> list[str]:
    """Formats the entries as lines of equal columns."""
    name_width = max(len(entry.name) for entry in lines)
    bytes_width = max(len(f"{entry.num_bytes:,}") for entry in lines)

    def line(entry: Entry) -> str:
        num_bytes = f"{entry.num_bytes:>{bytes_width},} {human(entry.num_bytes):>10}"
        return f"{entry.name:<{name_width}}  {num_bytes}  {entry.note}".rstrip()

    return [line(entry) for entry in lines]


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def human(num_bytes: int, base: int = 1024) -> str:
    """Formats bytes in a fitting unit, such as KiB or MiB; with base 1000, kB or MB."""
    size = float(num_bytes)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB") if base == 1024 else ("kB", "MB", "GB", "TB"):
        if abs(size) < base:
            break
        size = size / base
        unit = larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
