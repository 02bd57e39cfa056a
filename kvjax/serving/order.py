# SPDX-License-Identifier: Apache-2.0
"""The order of the queue, by which requests are admitted and get chunks; the last one is preempted.

It is lexicographic, by arrays of sort keys: late requests first, then those with the smallest `Scheduler.order`, then
the earliest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._arrays import pick
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Serving

SortKeys = tuple[jax.Array, ...]  # of one shape; the first decides


def sort_keys(serving: Serving, scheduler: Scheduler) -> SortKeys:
    """The sort keys of the requests, all [W]."""
    requests = serving.requests
    key = scheduler.order(requests, serving.cache.state)
    return late_first(requests.passed >= scheduler.patience, key, requests.arrival)


def sort_keys_by_row(serving: Serving, scheduler: Scheduler) -> SortKeys:
    """The sort keys of the rows' requests, all [S]."""
    return pick(sort_keys(serving, scheduler), serving.row)


def late_first(late: jax.Array, *keys: jax.Array) -> SortKeys:
    """Sort keys, of which the last is the arrival, with those that are late, bool[W], before the others."""
    *others, arrival = keys
    return (~late).astype(jnp.int32), *(jnp.where(late, jnp.zeros_like(key), key) for key in others), arrival


def first(keys: SortKeys, where: jax.Array) -> jax.Array:
    """i32[]; the first entry in order, of those where bool[W]; -1 if none."""
    return _extreme(keys, where, jnp.min, jnp.max)


def last(keys: SortKeys, where: jax.Array) -> jax.Array:
    """i32[]; the last entry in order, of those where bool[W]; -1 if none."""
    return _extreme(keys, where, jnp.max, jnp.min)


def _extreme(keys: SortKeys, where: jax.Array, best, worst) -> jax.Array:
    for key in keys:
        where = where & (key == best(jnp.where(where, key, worst(key))))
    return jnp.where(jnp.any(where), jnp.argmax(where).astype(jnp.int32), -1)
