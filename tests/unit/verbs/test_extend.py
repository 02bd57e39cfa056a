# SPDX-License-Identifier: Apache-2.0
"""`extend` for some rows: its effects on them and on rows that share their blocks, and its cost."""

import functools
import re

import chex
import jax
import numpy as np
import pytest

import kvjax
from tests.drive import MOST, PLAIN, VERBS, Driver

S, P = PLAIN.max_seqs, PLAIN.block_size


def ints(*values):
    return np.array(values, np.int32)


def shared():
    """A cache of three rows that share all of their blocks. The last block has two free slots."""
    cache = Driver(kvjax.init(PLAIN, num_blocks=9))
    cache.start(0, range(1, P + 3))
    for seq in (1, 2):
        cache.do("fork", 0, seq)
    return cache


@pytest.mark.parametrize(
    ("seqs", "keeps"),
    [((2, 0, -1, -1), 1), ((2, 1, 0, -1), 0), ((-1, 0, 1, 2), 2), ((1, -1, 2, 0), 0)],
)
def test_a_block_that_several_rows_share_stays_the_last_ones(seqs, keeps):
    """The last one in the order of `seqs` keeps it, or else a holder that is not among them."""
    cache = shared()
    block = int(cache.state.groups[0].table[0, 1])
    assert cache.grow(*(seq >= 0 for seq in seqs), seqs=ints(*seqs)) == ["OK"] * S
    tables = np.asarray(cache.state.groups[0].table)[:3, 1]
    assert [seq for seq in range(3) if tables[seq] == block] == [keeps] and len(set(tables)) == 3
    copies = [event for event in kvjax.to_list(cache.events) if event["kind"] == "copied"]
    assert {event["source"] for event in copies} == {block} and len(copies) == 2
    assert cache.state.seqs.length.tolist() == [P + 2 + (seq in seqs) for seq in range(3)] + [0]


@pytest.mark.parametrize(
    "counts", [(1, 1, 1, 0), (6, 0, 5, 0), (0, 2, 3, 0), (3, 3, 3, 0), (6, 6, 6, 0), (0, 0, 0, 1), (1, 7, 0, 0)]
)
def test_all_rows_by_name_are_all_rows(counts):
    """Results are equal in every bit, with the events, whether the call succeeds, lacks blocks or is invalid."""
    state = shared().state
    counted = np.array(counts) > 0, ints(*counts)
    chex.assert_trees_all_equal(
        VERBS["extend"](state, *counted, max_tokens=MOST, seqs=np.arange(S, dtype=np.int32)),
        VERBS["extend"](state, *counted, max_tokens=MOST),
    )


def test_the_order_of_the_rows_is_that_of_the_status():
    cache = shared()
    assert cache.grow(6, 0, 0, 6, seqs=ints(2, -1, 1, 0)) == ["OK"] * S
    assert cache.state.seqs.length.tolist() == [P + 8, P + 2, P + 8, 0]
    assert cache.grow(1, 1, 1, 1, seqs=ints(2, 3, 0, 1)) == ["OK", "BAD_REQUEST", "OK", "OK"]
    assert cache.grow(6, 6, 1, 0, seqs=ints(2, 0, 1, -1)) == ["NO_BLOCKS"] * 3 + ["OK"]
    assert cache.grow(6, 0, 0, 0, seqs=ints(2, 0, 1, -1)) == ["OK"] * S
    assert cache.grow(0, 1, 3, 0, seqs=ints(-1, 0, 2, 1)) == ["OK", "OK", "ROW_FULL", "OK"]


def test_the_cost_follows_the_rows_that_are_named():
    """Only their events fit. Arrays with an entry for each row are updated, and no other such array is made."""
    for most in (S, 1_009):  # a number that no other array has in its shape
        spec = kvjax.make_spec(num_blocks=12, max_seqs=most, max_length=16, block_size=P)
        state = jax.eval_shape(lambda spec=spec: kvjax.init(spec))
        run = functools.partial(kvjax.extend, active=np.ones(3, bool), seqs=ints(2, 0, 1))
        program, (_, events) = jax.make_jaxpr(run, return_shape=True)(state)
        assert events.records.shape[0] == 2 * 3
    made = re.findall(r"^ +\w+:\w+\[1009[,\]].* = (\w+)", str(program), re.MULTILINE)
    assert made == ["scatter"] * 2  # the table and the lengths
