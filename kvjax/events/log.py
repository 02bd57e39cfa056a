# SPDX-License-Identifier: Apache-2.0
"""Events of many steps, packed, for the carry of a jitted loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree, count, put, rank
from kvjax.events.records import COLUMNS, EventKind, Events


class EventLog(Pytree):
    """Events of many steps, packed without padding, for the carry of a jitted loop.

    Attributes:
      records: i32[C, 9]; as in `Events`.
      tokens: i32[C, P].
      extra_ids: i32[C, P] or None.
      size: i32[]; events in the log.
    """

    records: jax.Array
    tokens: jax.Array
    extra_ids: jax.Array | None
    size: jax.Array

    @property
    def room(self) -> jax.Array:
        """i32[]; events that still fit; a loop stops while this is at least its step's worst case."""
        return self.records.shape[0] - self.size


def init_log(capacity: int, block_size: int, extra_ids: bool = False) -> EventLog:
    """An empty log for `capacity` events."""
    return EventLog(
        records=jnp.zeros((capacity, len(COLUMNS)), jnp.int32),
        tokens=jnp.zeros((capacity, block_size), jnp.int32),
        extra_ids=jnp.zeros((capacity, block_size), jnp.int32) if extra_ids else None,
        size=jnp.int32(0),
    )


def append(log: EventLog, events: Events) -> EventLog:
    """Adds a transition's events to the log. The caller has checked `log.room`: what does not fit is lost."""
    real = events.kind != EventKind.NONE
    place = log.size + rank(real)
    where = real & (place < log.records.shape[0])
    return EventLog(
        records=put(log.records, place, events.records, where),
        tokens=put(log.tokens, place, events.tokens, where),
        extra_ids=None if log.extra_ids is None else put(log.extra_ids, place, events.extra_ids, where),
        size=jnp.minimum(log.size + count(real), log.records.shape[0]),
    )
