# SPDX-License-Identifier: Apache-2.0
"""Orders to move blocks between tiers: what a transition returns, `move` executes and `complete` confirms."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree
from kvjax.state import NO_BLOCK

COLUMNS = ("group", "block", "number", "source", "target")


class Transfer(Pytree):
    """The moves of one transition. All sources are read before any target is written, so that two blocks can swap.

    Attributes:
      records: i32[K, 5]; the columns below, each also a property, a record a move; padding has NO_BLOCK for a block.

    Columns:
      group: which attention window.
      block: the block that moves, or that takes a copy.
      number: tells this move of the block from others.
      source, target: pool rows, 0..N-1 on the device, N..N+H-1 on the host.
    """

    records: jax.Array

    group = property(lambda self: self.records[..., 0])
    block = property(lambda self: self.records[..., 1])
    number = property(lambda self: self.records[..., 2])
    source = property(lambda self: self.records[..., 3])
    target = property(lambda self: self.records[..., 4])

    def only(self, where: jax.Array) -> Self:
        """These moves where bool[], else padding."""
        return self.replace(records=jnp.where(where, self.records, NO_BLOCK))


def orders(where: jax.Array, **columns: jax.Array | int) -> Transfer:
    """One move for each entry of where bool[K], padding where it does not hold."""
    values = [jnp.broadcast_to(jnp.asarray(columns.get(c, 0), jnp.int32), where.shape) for c in COLUMNS]
    return Transfer(jnp.where(where[:, None], jnp.stack(values, axis=-1), NO_BLOCK))


def no_moves() -> Transfer:
    """A transfer without moves, of a group that has one tier."""
    return Transfer(jnp.zeros((0, len(COLUMNS)), jnp.int32))
