# SPDX-License-Identifier: Apache-2.0
"""Reuse of released blocks: their age when they are used again, by class; and the hit density that follows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.research.learning.learned import NUM_AGES, NUM_CLASSES, NUM_LENGTHS, age_limits, age_range, class_number
from kvjax.research.simulators.hits import Rule, check_rule, num_cached
from kvjax.research.traces.trace import Trace, next_uses


class Releases(NamedTuple):
    """The release of each block by each request, in a cache that throws nothing out."""

    request: np.ndarray  # i32[K]; the request that releases it
    classes: np.ndarray  # i32[K]; its class then
    released: np.ndarray  # i64[K]; the clock then, which counts releases and publications, as `Blocks.clock` does
    used: np.ndarray  # i64[K]; the clock when the next request uses it, or at the end
    again: np.ndarray  # bool[K]; whether one does
    start: np.ndarray  # i64[R + 1]; the clock when each request comes, and at the end
    lengths: np.ndarray  # i32[NUM_LENGTHS - 1]; see `Densities`


class Counts(NamedTuple):
    """Counts of each class at each age."""

    used: np.ndarray  # f64[NUM_CLASSES, NUM_AGES]; blocks that were used again at that age
    # f64[NUM_CLASSES, NUM_AGES]; blocks that became as old as that, those half that the trace leaves there
    seen: np.ndarray


def releases(trace: Trace, rule: Rule) -> Releases:
    """All releases of a trace. Prompts are divided into ranges of lengths that are equally frequent."""
    check_rule(rule)
    stored, request, depth = num_cached(trace, rule), trace.owners, trace.depths
    is_stored = depth < stored[request]
    request, depth, ids = request[is_stored], depth[is_stored], trace.ids[is_stored]
    following = next_uses(ids)
    again = following >= 0
    order = np.argsort(ids, kind="stable")
    first = np.flatnonzero(np.diff(ids[order], prepend=-1))
    hits = np.empty(len(ids), np.int64)  # uses before this one
    hits[order] = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    new = np.bincount(request[hits == 0], minlength=len(trace))
    start = np.concatenate([[0], np.cumsum(new + stored)])
    released = start[request] + new[request] + stored[request] - 1 - depth
    used = np.where(again, start[request[following]], start[-1])
    cuts = np.arange(1, NUM_LENGTHS) / NUM_LENGTHS
    lengths = np.ceil(np.quantile(stored, cuts)).astype(np.int32) if len(trace) else np.zeros(len(cuts), np.int32)
    length = stored[request]
    classes = class_number(hits, length, depth + 1 == length, lengths)
    return Releases(request, classes, released, used, again, start, lengths)


def count(all_releases: Releases, first: int, last: int) -> Counts:
    """Counts of the releases of requests first..last-1, until the last of them is over."""
    chosen = (all_releases.request >= first) & (all_releases.request < last)
    end = all_releases.start[last]
    again = all_releases.again[chosen] & (all_releases.used[chosen] < end)
    age = np.minimum(all_releases.used[chosen], end) - all_releases.released[chosen]
    cell = all_releases.classes[chosen] * NUM_AGES + np.asarray(age_range(np.minimum(age, 2**31 - 1)))
    table = lambda weights: np.bincount(  # noqa: E731
        cell, weights, NUM_CLASSES * NUM_AGES
    ).reshape(NUM_CLASSES, NUM_AGES)
    ended = table(np.ones(len(cell)))
    later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    return Counts(table(again * 1.0), later + table(np.where(again, 1.0, 0.5)))


def counted(counts: Counts, prior: float = 20.0) -> np.ndarray:
    """f64[NUM_CLASSES, NUM_AGES]; the share of blocks that are used again at an age, of those that become as old.

    To the blocks of each class it adds `prior` blocks of all classes together.
    """
    together = counts.used.sum(axis=0) / np.maximum(counts.seen.sum(axis=0), 1)
    return (counts.used + prior * together) / (counts.seen + prior)


def density(hazard: np.ndarray) -> np.ndarray:
    """f64[C, NUM_AGES]; the expected hits per block and time of a block, by its hazard f64[C, NUM_AGES]; see `counted`.

    A block of some age that stays until it is used again, or else until a later age, yields a share of a hit and takes
    a block for some time. Its hit density is the most of hits over time that any later age gives. It is the Gittins
    index of a block that is evicted for good at that age.

    Source: LHD's hit density (Beckmann et al. 2018), whose horizon is one for all; Gittins 1979.
    """
    hazard = np.minimum(hazard, 1 - 1e-6)  # some always stay: the share that is left never becomes 0
    left = np.cumprod(1 - hazard, axis=1)
    left = np.concatenate([np.ones((len(hazard), 1)), left[:, :-1]], axis=1)
    hits, time = left * hazard, left * np.diff(age_limits()) * (1 - hazard / 2)
    best = np.empty_like(hazard)
    for age in range(NUM_AGES):
        best[:, age] = np.max(np.cumsum(hits[:, age:], axis=1) / np.cumsum(time[:, age:], axis=1), axis=1)
    return best
