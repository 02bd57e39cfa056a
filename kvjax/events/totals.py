# SPDX-License-Identifier: Apache-2.0
"""Counting events."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.events.log import EventLog
from kvjax.events.records import EventKind, Events


def counts(events: Events | EventLog) -> dict[str, jax.Array]:
    """The number of events of each kind, as i32[] scalars. Works under `jit`.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> _, events = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> {kind: int(count) for kind, count in kvjax.events.counts(events).items() if count}
      {'stored': 2}
    """
    kinds = events.kind
    return {k.name.lower(): jnp.sum(kinds == k.value, dtype=jnp.int32) for k in EventKind if k}


@dataclasses.dataclass(frozen=True)
class Totals:
    """Totals of the events so far, added up on the host, transition by transition.

    Attributes:
      queried_tokens: prompt tokens looked up in the cache.
      reused_tokens: queried tokens found in the cache, which need no computation.
      unusable_tokens: further cached tokens for which the recurrent layers have no snapshot.
      stored_blocks: blocks made findable.
      removed_blocks: blocks no longer findable, after an eviction or because a row was cut inside them.
      copied_blocks: blocks copied on the device, for partial reuse or before a write into a shared block.
      offloaded_blocks: ordered moves to the host. A block evicted from both tiers at once counts only as removed.
      onboarded_blocks: ordered moves to the device, including copies of part of a block on the host.
      refused: rows whose request was refused.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> totals = kvjax.events.Totals()
      >>> for seq in range(2):
      ...     state, events = kvjax.admit(state, seq, prompt, 10)
      ...     totals = totals.add(events)
      ...     state, _ = kvjax.commit(state, prompt[None], [10], seqs=[seq])
      >>> totals.queried_tokens, totals.reused_tokens, totals.reused_share
      (20, 8, 0.4)
    """

    queried_tokens: int = 0
    reused_tokens: int = 0
    unusable_tokens: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    copied_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    refused: int = 0

    @property
    def reused_share(self) -> float:
        """Share of the queried tokens found in the cache."""
        return self.reused_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def add(self, events: Events | EventLog) -> Totals:
        """These totals plus `events`, which may have leading axes of a scan or a vmap."""
        events = jax.device_get(events)
        kinds = events.kind
        new = {
            "queried_tokens": np.sum(events.queried),
            "reused_tokens": np.sum(events.cached),
            "unusable_tokens": 0 if events.unusable is None else np.sum(events.unusable),
            "stored_blocks": np.sum(kinds == EventKind.STORED),
            "removed_blocks": np.sum(kinds == EventKind.REMOVED),
            "copied_blocks": np.sum(kinds == EventKind.COPIED),
        }
        if isinstance(events, Events):
            moves = events.moves  # the host has the greater pool rows
            new["offloaded_blocks"] = np.sum((moves.block >= 0) & (moves.target > moves.source))
            new["onboarded_blocks"] = np.sum((moves.block >= 0) & (moves.target < moves.source))
            new["refused"] = np.sum(events.status != 0)
        return dataclasses.replace(self, **{name: getattr(self, name) + int(n) for name, n in new.items()})
