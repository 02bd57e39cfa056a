# SPDX-License-Identifier: Apache-2.0
"""Orders to move blocks between tiers. A transition returns them, `move` executes and `complete` confirms them."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree
from kvjax.state import NO_BLOCK

COLUMNS = ("group", "block", "move_id", "source", "target")


class Transfer(Pytree):
    """The moves of one transition. All sources are read before any target is written, so two blocks can swap.

    Attributes:
      records: i32[K, 5]; a record for each move, with the columns below, each also a property. Padding has NO_BLOCK
        as its block.

    Columns:
      group: index of the group of layers.
      block: the block to move, or the block to copy to.
      move_id: distinguishes this move from other moves of the block.
      source, target: pool rows, 0..N-1 on the device, N..N+H-1 on the host.
    """

    records: jax.Array

    group = property(lambda self: self.records[..., 0])
    block = property(lambda self: self.records[..., 1])
    move_id = property(lambda self: self.records[..., 2])
    source = property(lambda self: self.records[..., 3])
    target = property(lambda self: self.records[..., 4])

    def only(self, where: jax.Array) -> Self:
        """These moves if where bool[] holds, and else padding."""
        return self.replace(records=jnp.where(where, self.records, NO_BLOCK))


def orders(where: jax.Array, **columns: jax.Array | int) -> Transfer:
    """A move for each entry where bool[K] holds, and padding elsewhere."""
    values = [jnp.broadcast_to(jnp.asarray(columns.get(c, 0), jnp.int32), where.shape) for c in COLUMNS]
    return Transfer(jnp.where(where[:, None], jnp.stack(values, axis=-1), NO_BLOCK))


def no_moves() -> Transfer:
    """A transfer without moves, for a group with a single tier."""
    return Transfer(jnp.zeros((0, len(COLUMNS)), jnp.int32))
