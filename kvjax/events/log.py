# SPDX-License-Identifier: Apache-2.0
"""Events of many steps, packed, for the carry of a jitted loop."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from kvjax._arrays import padded, put, ranked
from kvjax.events.records import COLUMNS, EventKind, Events, Records, joined, one_line
from kvjax.state import Text


class EventLog(Records):
    """Events of many steps, packed without padding, for the carry of a jitted loop.

    Attributes:
      text: i32[C, P]; the contents of stored blocks.
      appended: i32[]; appended events, including lost events.
      queried: i32[]; prompt tokens looked up by the logged admissions.
      cached: i32[]; queried tokens found in the cache.
      unusable: i32[]; cached tokens without a usable snapshot, as in `Events`, or None.
    """

    text: Text
    appended: jax.Array
    queried: jax.Array
    cached: jax.Array
    unusable: jax.Array | None = None

    @property
    def size(self) -> jax.Array:
        """i32[]; events in the log."""
        return jnp.minimum(self.appended, self.records.shape[0])

    @property
    def lost(self) -> jax.Array:
        """i32[]; events beyond the capacity. Above 0, an index built from the log is wrong."""
        return self.appended - self.size

    @property
    def num_free(self) -> jax.Array:
        """i32[]; further events that fit. A loop may continue while this is at least the worst case of its step."""
        return self.records.shape[0] - self.size

    tokens = property(lambda self: self.text.tokens)
    extra_ids = property(lambda self: self.text.extra_ids)

    def __repr__(self) -> str:
        def size(log: EventLog) -> str:
            lost = f", {int(log.lost):,} lost" if log.lost else ""
            return f"{int(log.size):,} of {len(log.records):,}{lost}"

        return one_line(self, size)


Log = EventLog | None  # None disables the log


def num_free(log: Log) -> jax.Array:
    """i32[]; further events that fit. A large number without a log."""
    return jnp.int32(1 << 30) if log is None else log.num_free


def init_log(capacity: int, block_size: int, extra_ids: bool = False, recurrent: bool = False) -> EventLog:
    """An empty log for `capacity` events.

    Args:
      capacity: the maximum number of events.
      block_size: tokens of a block.
      extra_ids: whether tokens have extra ids.
      recurrent: whether the cache has recurrent layers.

    Example:
      >>> log = kvjax.events.init_log(16, block_size=4)
      >>> log.size.item(), log.num_free.item(), log.text.tokens.shape
      (0, 16, (16, 4))
    """

    def empty() -> jax.Array:
        return jnp.zeros((capacity, block_size), jnp.int32)

    text = Text(empty(), empty() if extra_ids else None)
    zeros = [jnp.int32(0) for _ in range(4)]
    return EventLog(
        jnp.zeros((capacity, len(COLUMNS)), jnp.int32), text, *zeros[:3], unusable=zeros[3] if recurrent else None
    )


def append(log: EventLog, *events: Events) -> EventLog:
    """Adds the events of transitions to the log, in a single pass.

    Check `log.num_free` first: events beyond it are lost, and `log.lost` counts them.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, admitted = kvjax.admit(state, 0, prompt, 10)
      >>> state, committed = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> log = kvjax.events.append(kvjax.events.init_log(16, block_size=4), admitted, committed)
      >>> log.size.item(), log.num_free.item(), log.queried.item()
      (2, 14, 10)
    """
    text = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(transition.text for transition in events))
    records, text = jax.tree.map(padded, (joined(*events), text))
    is_event = records.kind != EventKind.NONE
    num_before, num_appended = ranked(is_event, small=True, start=log.appended)
    index = log.appended + num_before
    where = is_event & (index < log.records.shape[0])
    return EventLog(
        records=put(log.records, index, records.records, where),
        text=put(log.text, index, text, where),
        appended=num_appended,
        **lookups(log, events),
    )


def lookups(log: EventLog, events: Iterable[Events]) -> dict[str, jax.Array]:
    """The log's `queried`, `cached` and `unusable`, plus the counts of transitions."""

    def total(name: str) -> jax.Array:  # verbs that admit nothing add zeros, and XLA removes them
        counts = (jnp.sum(getattr(transition, name), dtype=jnp.int32) for transition in events)
        return sum(counts, getattr(log, name))

    return {name: total(name) for name in ("queried", "cached", "unusable") if getattr(log, name) is not None}
