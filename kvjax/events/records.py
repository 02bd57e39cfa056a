# SPDX-License-Identifier: Apache-2.0
"""Records: one line of numbers for each event, and the `Events` of a transition."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, unreadable
from kvjax._compile import own_transfers
from kvjax.events.transfer import Transfer, no_moves
from kvjax.state import DEFAULT_PRIORITY, Text


class Named(enum.IntEnum):
    """Integers that print as their names, also in messages: `assert events.ok, Status(...)`."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class EventKind(Named):
    """The kind of change of a block. NONE marks padding."""

    NONE = 0
    CREATED = 1
    REMOVED = 2
    UPDATED = 3
    STORED = 4
    COPIED = 5
    CLEARED = 6


class Status(Named):
    """The outcome of a row's request: OK, or the reason for a refusal. A refused request changes nothing.

    Example:
      >>> state = kvjax.init(kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4))
      >>> _, events = kvjax.admit(state, 7, np.arange(10), 10)  # the rows are 0 and 1
      >>> bool(events.ok), kvjax.Status(int(events.status[0]))
      (False, Status.BAD_REQUEST)
    """

    OK = 0
    NO_BLOCKS = 1
    ROW_FULL = 2
    BAD_REQUEST = 3
    HELD = 4


COLUMNS = (
    "kind",
    "group",
    "block",
    "generation",
    "source",
    "source_generation",
    "num_tokens",
    "level",
    "priority",
)


class Records(Pytree):
    """Changes of blocks, each as a record.

    Attributes:
      records: i32[E, 9]; one record for each change, with the columns below, each also a property. Records of kind
        NONE are padding.

    Columns:
      kind: an `EventKind`.
      group: index of the group of layers.
      block, generation: the changed node, or the pool row to copy to.
      source, source_generation: the pool row to copy from, or the parent node of a stored block in the first group,
        or (NO_BLOCK, namespace) at a root.
      num_tokens: tokens stored, or leading tokens to copy.
      level: 0 on the device, 1 on the host.
      priority: the requested retention priority.
    """

    records: jax.Array

    kind = property(lambda self: self.records[..., 0])
    group = property(lambda self: self.records[..., 1])
    block = property(lambda self: self.records[..., 2])
    generation = property(lambda self: self.records[..., 3])
    source = property(lambda self: self.records[..., 4])
    source_generation = property(lambda self: self.records[..., 5])
    num_tokens = property(lambda self: self.records[..., 6])
    level = property(lambda self: self.records[..., 7])
    priority = property(lambda self: self.records[..., 8])

    def only(self, where: jax.Array) -> Self:
        """These records if where bool[] holds, and else padding."""
        return self.replace(records=jnp.where(where, self.records, 0))


class Adopted(Pytree):
    """The blocks that `adopt` has reserved for a prefix, for the writer of the bytes and for `finish_adoption`.

    Attributes:
      text: i32[F, P]; the prefix's text, padded.
      fill: i32[F]; tokens of each block of the prefix, 0 after its end.
      namespace: i32[]; the prefix's namespace.
      pinned: i32[F]; cached blocks of the first group, pinned for this adoption.
      blocks: i32[G, F]; each group's reserved blocks, or NO_BLOCK.
      pool_rows: i32[G, F]; the pool rows to write, or the scratch row.
      hits: i32[F]; initial `Blocks.hits` of each block. Merged duplicates add theirs.
      stamps: i32[G]; distinguish these reservations from later reservations of the same blocks.
    """

    text: Text
    fill: jax.Array
    namespace: jax.Array
    pinned: jax.Array
    blocks: jax.Array
    pool_rows: jax.Array
    hits: jax.Array
    stamps: jax.Array


class Events(Records):
    """The events of one transition, in the order removed, updated, stored, copied.

    Attributes:
      text: i32[E, P]; the contents of stored blocks.
      status: i32[R]; a `Status` for each row of the request.
      queried: i32[R]; prompt tokens looked up in the cache.
      cached: i32[R]; queried tokens found in the cache.
      unusable: i32[R]; further tokens that the first group has cached, but the recurrent layers have no snapshot for.
        None without recurrent layers.
      shortfall: i32[]; the number of missing blocks.
      transfer: moves between tiers, to be executed before all else; None without a host tier.
      adopted: the reserved blocks after `adopt`; None after all other verbs.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> _, events = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> events
      Events(rows: 1 OK; 2 stored)
      >>> bool(events.ok), events.status.tolist()
      (True, [0])
    """

    text: Text
    status: jax.Array
    queried: jax.Array
    cached: jax.Array
    shortfall: jax.Array
    transfer: Transfer | None = None
    unusable: jax.Array | None = None
    adopted: Adopted | None = None

    @property
    @own_transfers()
    def ok(self) -> jax.Array:
        """bool[]; whether every row of the request succeeded."""
        return jnp.all(self.status == Status.OK)

    @property
    def moves(self) -> Transfer:
        """The moves of `transfer`, or no moves."""
        return no_moves() if self.transfer is None else self.transfer

    tokens = property(lambda self: self.text.tokens)
    extra_ids = property(lambda self: self.text.extra_ids)

    def followed_by(self, later: Events) -> Events:
        """The events of this transition and of a later transition without copies, with the status of the first."""
        records, text = jax.tree.map(
            lambda *parts: jnp.concatenate(parts), (self.records, self.text), (later.records, later.text)
        )
        return self.replace(records=records, text=text, adopted=None)

    def __repr__(self) -> str:
        def rows(host: Events) -> str:
            moves = int(np.sum(host.moves.block >= 0))
            missing = f", {host.shortfall:,} blocks missing" if host.shortfall else ""
            return f"rows: {_tally(Status, host.status)}{missing}{f'; {moves:,} moves' if moves else ''}"

        return one_line(self, rows)


def one_line(events: Any, begin: Callable[[Any], str]) -> str:
    """A line about `Events` or an `EventLog`: its `begin`, then counts, or the reason for their absence."""
    text = unreadable(events)
    shape = np.shape(events.records)
    if not text and shape[1:] != (len(COLUMNS),):
        text = f"batched, {list(shape[:-2])}" if shape[2:] else "of other shapes"
    if not text:
        host = jax.device_get(events)
        queried = np.sum(host.queried)
        parts = [begin(host), f"{np.sum(host.cached):,} of {queried:,} tokens cached" if queried else ""]
        parts.append(_tally(EventKind, host.kind[host.kind != EventKind.NONE]).lower() or "no events")
        text = "; ".join(filter(None, parts))
    return f"{type(events).__name__}({text})"


def _tally(names: type[Named], values: Any) -> str:
    """The number of occurrences of each value, by name."""
    labels = {member.value: member.name for member in names}
    tally = Counter(np.ravel(values).tolist())
    return ", ".join(f"{count:,} {labels.get(value, value)}" for value, count in tally.items())


def record(kind: EventKind, where: jax.Array, **columns: jax.Array | int) -> Records:
    """A record for each entry of where bool[K]. Its kind is NONE where the entry is false."""
    values = {"kind": jnp.where(where, np.int32(kind), 0), "priority": DEFAULT_PRIORITY, **columns}
    arrays = [jnp.broadcast_to(jnp.asarray(values.get(c, 0), jnp.int32), where.shape) for c in COLUMNS]
    return Records(jnp.stack(arrays, axis=-1))


def joined(*parts: Records) -> Records:
    """The records of all parts, in this order."""
    return Records(jnp.concatenate([part.records for part in parts]))


def no_records(size: int = 0) -> Records:
    """A list of `size` records that are padding."""
    empty: Any = np.zeros((size, len(COLUMNS)), np.int32)
    return Records(empty)
