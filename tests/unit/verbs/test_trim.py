# SPDX-License-Identifier: Apache-2.0
"""`trim`: the blocks that it gives back, the fields that it leaves alone, and the rows that it refuses."""

import chex
import numpy as np
import pytest

import kvjax
from tests.drive import MOST, PLAIN, TIERS, Driver

TEXT = [1, 2, 3, 4, 5, 6]


def rows(*names):
    return np.isin(np.arange(4), names)


def test_rows_give_back_what_they_have_not_used():
    cache = Driver(kvjax.init(PLAIN))
    for seq in (0, 2, 3):
        cache.start(seq, [10 + seq, *TEXT[1:]])
    before = cache.state
    assert cache.grow(6, 0, 6, 1) == ["OK"] * 4  # rows 0 and 2 enter a block, row 3 stays in its own
    assert cache.write({0: [7], 2: [7, 8, 9]}) == ["OK"] * 4
    assert cache.status("trim", rows(0, 3), max_tokens=MOST) == ["OK"] * 4
    assert cache.state.seqs.length.tolist() == [7, 0, 12, 6]  # row 2 is not active
    group = cache.state.groups[0]
    assert np.sum(np.asarray(group.table) >= 0, axis=1).tolist() == [2, 0, 3, 2]
    assert int(group.num_empty) == int(before.groups[0].num_empty) - 1
    assert group.table[0].tolist() == before.groups[0].table[0].tolist()
    assert cache.status("trim", rows(2), max_tokens=MOST) == ["OK"] * 4
    assert cache.state.seqs.length.tolist() == cache.state.seqs.committed.tolist() == [7, 0, 9, 6]
    assert np.sum(np.asarray(cache.state.groups[0].table[2]) >= 0) == 3  # its third block has one token
    assert not [event for event in cache.recorded if event["kind"] != "stored"]


def test_what_is_trimmed_was_never_cached():
    """The order of eviction, the clock and the index do not change, so unused reserved blocks cost nothing later."""
    cache = Driver(kvjax.init(PLAIN))
    for seq in (0, 1):
        cache.start(seq, [20 + seq, *TEXT])
    cache.do("release", 0)
    before = cache.state
    assert cache.grow(0, 5, 0, 0) == ["OK"] * 4
    assert cache.status("trim", rows(1), max_tokens=MOST) == ["OK"] * 4
    after, group = cache.state, before.groups[0]
    same = after.groups[0].replace(empty=group.empty)
    chex.assert_trees_all_equal(after.replace(groups=(same,)), before)
    height = int(group.num_empty)
    assert sorted(after.groups[0].empty[:height].tolist()) == sorted(group.empty[:height].tolist())
    again, _ = kvjax.trim(after, rows(1))
    chex.assert_trees_all_equal(again, after)  # nothing more can be given back


def test_rows_that_cannot_be_trimmed():
    cache = Driver(kvjax.init(PLAIN))
    cache.start(0, TEXT)
    assert cache.admit(1, [9] * 5) == ["OK"]  # no slot of it is written
    cache.start(3, [8, *TEXT])
    assert cache.grow(5, 0, 0, 5) == ["OK"] * 4
    assert cache.write({3: [7]}) == ["OK"] * 4
    wanted = ["BAD_REQUEST", "BAD_REQUEST", "BAD_REQUEST", "OK"]  # too much reserved, no token, free
    assert cache.status("trim", rows(0, 1, 2, 3), max_tokens=4) == wanted
    assert cache.state.seqs.length.tolist() == [11, 5, 0, 8]  # the other rows are done
    assert cache.status("trim", rows()) == ["OK"] * 4
    assert cache.status("trim", rows(0)) == ["OK"] * 4  # any number of reserved tokens
    assert cache.state.seqs.length.tolist() == [6, 5, 0, 8]


@pytest.mark.long
def test_windows_give_back_their_blocks_too_and_rows_that_rest_are_held():
    cache = Driver(kvjax.init(TIERS))
    cache.start(0, [*TEXT, *TEXT])
    cache.start(1, [7, *TEXT, *TEXT])
    before = [int(group.num_empty) for group in cache.state.groups]
    assert cache.grow(6, 6, 0, 0) == ["OK"] * 4
    cache.do("swap_out", 0)
    assert cache.status("trim", rows(0, 1), max_tokens=MOST) == ["HELD", "OK", "OK", "OK"]
    assert cache.state.seqs.length.tolist() == [18, 13, 0, 0]
    cache.do("swap_in", 0, complete=False)
    assert cache.status("trim", rows(0), max_tokens=MOST) == ["OK"] * 4  # its K/V are still being moved
    assert [int(group.num_empty) for group in cache.state.groups] == before
