# SPDX-License-Identifier: Apache-2.0
"""Policies that use the priorities which requests state (`retention.py`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import put
from kvjax.policies.retention import later, priority_at
from kvjax.policies.scores import by_score, then_age
from kvjax.state import Blocks, EvictionPolicy


@functools.cache
def priority() -> EvictionPolicy:
    """Evicts the block of the lowest priority, among equals the least recently released; needs a spec with `retention`.

    A parent outlives its cached children, so a tail of high priority protects its whole prefix. Blocks that were
    released more than 16.7 million releases ago count as equally old.

    Source: TensorRT-LLM's LRUEvictionPolicy, one queue for each priority.
    """
    return by_score(_priority_then_age, timed=True, name="priority")


def _priority_then_age(blocks: Blocks, now: jax.Array) -> jax.Array:
    return then_age(priority_at(blocks, now), blocks)


@functools.cache
def trt_leaf() -> EvictionPolicy:
    """The order of TensorRT-LLM, for study: that of `priority()`, but a time to live that ends counts as a release.

    A block whose time is over goes to the back of the queue of priority 35 and begins to age there; `priority()` counts
    on from its release. Empty blocks are taken first, as everywhere in kvjax. Costs a sort of all blocks in
    a call that evicts; needs a spec with `retention`.

    Source: TensorRT-LLM's LRUEvictionPolicy with `refresh` before every request, in its form where only leaves are
    evicted.
    """
    return by_score(_queue_position, timed=True, name="trt_leaf")


def _queue_position(blocks: Blocks, now: jax.Array) -> jax.Array:
    current = priority_at(blocks, now)
    assert blocks.retention is not None and blocks.expiry is not None
    over = current != blocks.retention[:, 0]
    # The expiry is the release plus the time to live, which is -1 where there is none.
    queued = later(blocks.expiry, jnp.where(over, 0, -blocks.retention[:, 1]))
    order = jnp.lexsort((blocks.released - blocks.clock, queued[:, 1], queued[:, 0], current)).astype(jnp.int32)
    return put(jnp.zeros_like(order), order, np.arange(order.shape[0], dtype=np.int32), order >= 0)
