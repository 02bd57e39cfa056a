# SPDX-License-Identifier: Apache-2.0
"""Records: one line of numbers for each event, and the `Events` of a transition."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree
from kvjax.events.transfer import Transfer
from kvjax.state import DEFAULT_PRIORITY


class EventKind(enum.IntEnum):
    """What happened to a block. NONE marks padding."""

    NONE = 0
    CREATED = 1
    REMOVED = 2
    UPDATED = 3
    STORED = 4
    COPIED = 5
    CLEARED = 6


class Status(enum.IntEnum):
    """Why a row's request was done (OK) or not; a request that was not done has changed nothing."""

    OK = 0
    NO_BLOCKS = 1
    ROW_FULL = 2
    BAD_REQUEST = 3
    HELD = 4


COLUMNS = (
    "kind", "group", "block", "generation", "source", "source_generation", "num_tokens", "level", "priority",
)  # fmt: skip


class Events(Pytree):
    """The events of one transition, in the order removed, updated, stored, copied.

    Attributes:
      records: i32[E, 9]; the columns below, one event a row, rows of kind NONE are padding.
      tokens: i32[E, P]; the contents of stored blocks.
      extra_ids: i32[E, P]; likewise, or None.
      status: i32[R]; a `Status` for each row of the request.
      queried: i32[R]; prompt tokens that were looked up.
      cached: i32[R]; those of them that were found.
      shortfall: i32[]; blocks that were missing.
      transfer: moves between tiers to be executed before anything else; None where there can be none.

    Columns, each also a property of this class:
      kind: an `EventKind`.
      group: which attention window.
      block, generation: the node that the event is about; of a copy, the pool row to copy to.
      source, source_generation: of a stored block its parent node in the first group, or (NO_BLOCK, namespace) at a
        root; of a copy the pool row to copy from.
      num_tokens: tokens stored, or leading tokens to copy.
      level: 0 on the device, 1 on the host.
      priority: the stated retention priority.
    """

    records: jax.Array
    tokens: jax.Array
    extra_ids: jax.Array | None
    status: jax.Array
    queried: jax.Array
    cached: jax.Array
    shortfall: jax.Array
    transfer: Transfer | None = None

    @property
    def ok(self) -> jax.Array:
        """bool[]; whether every row of the request was done."""
        return jnp.all(self.status == Status.OK)

    kind = property(lambda self: self.records[..., 0])
    group = property(lambda self: self.records[..., 1])
    block = property(lambda self: self.records[..., 2])
    generation = property(lambda self: self.records[..., 3])
    source = property(lambda self: self.records[..., 4])
    source_generation = property(lambda self: self.records[..., 5])
    num_tokens = property(lambda self: self.records[..., 6])
    level = property(lambda self: self.records[..., 7])
    priority = property(lambda self: self.records[..., 8])


def record(kind: EventKind, where: jax.Array, **columns: jax.Array | int) -> jax.Array:
    """i32[K, 9]; one row for each entry of where bool[K], of kind NONE where it does not hold."""
    values = {"kind": jnp.where(where, np.int32(kind), 0), "priority": DEFAULT_PRIORITY, **columns}
    return jnp.stack(
        [jnp.broadcast_to(jnp.asarray(values.get(c, 0), jnp.int32), where.shape) for c in COLUMNS], axis=-1
    )
