# SPDX-License-Identifier: Apache-2.0
"""Priorities and times to live: the form of a request, its effect on blocks, and the victims."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.testing
from kvjax.policies.retention import later, priority_at
from tests.drive import RETENTION, Driver


@pytest.mark.parametrize(
    ("ranges", "options", "message"),
    [
        ([(0, 4, 50), (3, 8, 50)], {}, r"ranges\[1\].start: got 3, wanted at least 4"),
        ([(4, 4, 50)], {}, r"ranges\[0\].end: got 4, wanted more than the start 4"),
        ([(-1, 4, 50)], {}, r"ranges\[0\].start: got -1, wanted at least 0"),
        ([(0, None, 50), (8, 9, 50)], {}, r"ranges\[0\]: got an open range"),
        ([(0, 4, 101)], {}, r"ranges\[0\].priority: got 101, wanted 0..100"),
        ([(0, 4, 50, -5)], {}, r"ranges\[0\].ttl: got -5 ms"),
        ([], {"decode_priority": -1}, r"decode_priority: got -1"),
        ([], {"decode_ttl": -1}, r"decode_ttl: got -1 ms"),
        ([(0, 4, 50)], {"max_ranges": 0}, r"ranges: got 1, wanted at most max_ranges=0"),
    ],
)
def test_bad_ranges_are_refused_by_name(ranges, options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.Retention.of(ranges, **options)


@pytest.mark.long
def test_a_spec_without_retention_takes_none():
    state = kvjax.init(kvjax.make_spec(num_blocks=2, max_seqs=1, max_length=8, block_size=4))
    with pytest.raises(ValueError, match="retention: got a value, wanted None"):
        kvjax.admit(state, 0, np.zeros(4, np.int32), 4, retention=kvjax.Retention.of())
    with pytest.raises(ValueError, match="retention: got a spec made with retention=False, wanted retention=True"):
        kvjax.admit(kvjax.init(state.spec, kvjax.policies.priority()), 0, np.zeros(4, np.int32), 4)


def cache_of(num_blocks):
    return Driver(kvjax.init(RETENTION, kvjax.policies.priority(), num_blocks=num_blocks))


def serve(cache, seq, tokens, retention=None, now=0):
    """Runs one request from admit to release; returns its events."""
    before = len(cache.recorded)
    cache.start(seq, tokens, retention=retention, now=now)
    cache.do("release", seq, now=now)
    return cache.recorded[before:]


def retention_of(*ranges, **options):
    return kvjax.Retention.of(ranges, max_ranges=2, **options)


@pytest.mark.slow
def test_a_time_to_live_that_ended_stays_over():
    """2^31 ms are 24 days. By the difference alone it would seem to begin anew from day 25 to 49."""
    day = 24 * 60 * 60 * 1000
    cache, ms = cache_of(3), 2**31 - 2 * day
    serve(cache, 0, [1] * 4, retention_of((0, None, 90, 10)), now=wrapped(ms))
    found, findable = [], np.asarray(cache.state.groups[0].blocks.fill) > 0
    for _ in range(12):
        ms += 10 * day
        serve(cache, 1, [2] * 4, now=wrapped(ms))
        blocks = cache.state.groups[0].blocks
        (block,) = np.flatnonzero(findable & (np.asarray(blocks.tokens)[:, 0] == 1))
        found.append(int(priority_at(blocks, jnp.int32(wrapped(ms)))[block]))
    assert found == [35] * 12


@pytest.mark.long
def test_an_earlier_time_changes_nothing():
    """A verb that does not get the time (0 by default) neither ends a time to live nor prolongs one."""
    for start in (1000, 2**31 + 1000, 3 * 2**30):
        cache = cache_of(3)
        serve(cache, 0, [1] * 4, retention_of((0, None, 90, 10)), now=wrapped(start))
        serve(cache, 1, [2] * 4)
        blocks = cache.state.groups[0].blocks
        for after, wanted in ((9, 90), (10, 35), (2**30, 35)):
            assert int(priority_at(blocks, jnp.int32(wrapped(start + after)))[blocks.tokens[:, 0] == 1][0]) == wanted


@pytest.mark.parametrize("a", [0, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -1, -(2**31), -(2**31) - 1, 2**40 + 7])
def test_times_are_added_in_64_bits(a):
    def words(x):
        return jnp.array([(x + 2**31) >> 32, wrapped(x)], jnp.int32)

    for ms in (0, 1, -1, 2**31 - 1, -(2**31), 12345):
        assert later(words(a), jnp.int32(ms)).tolist() == words(a + ms).tolist()


def wrapped(ms):
    return (ms + 2**31) % 2**32 - 2**31
