# SPDX-License-Identifier: Apache-2.0
"""The `Trace` value: its makers, its slices, and its figures on the conversation trace."""

import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kvjax.research import belady, lru_curve, make_trace, replay, simulate
from tests.unit.research.cases import cut, forests, whole


def test_by_hand():
    trace = make_trace([0, 5], [9, 8], [3, 0], [[50, 60, 7], [50, 8]], 4, kind=["a", "b"], session=["x", "x"])
    assert len(trace) == 2 and trace.num_ids == 4 and trace.block_size == 4
    assert trace.ids.tolist() == [0, 1, 2, 0, 3] and trace.starts.tolist() == [0, 3, 5]
    assert trace.parent.tolist() == [-1, 0, 1, 0]
    assert trace.lengths.tolist() == [3, 2] and trace.full.tolist() == [2, 2]
    assert trace.kinds == ("a", "b") and trace.kind.tolist() == [0, 1] and trace.session.tolist() == [0, 0]
    assert trace.blocks(1).tolist() == [0, 3]


@pytest.mark.parametrize("ids", [[[1, 2], [3, 2]], [[1, 2], [2, 1]], [[1, 1], [1, 2]]])
def test_an_id_with_two_parents_is_refused_or_renamed(ids):
    with pytest.raises(ValueError, match="wanted the same parent for each id"):
        make_trace([0, 0], [8, 8], [0, 0], ids, 4)
    trace = make_trace([0, 0], [8, 8], [0, 0], ids, 4, two_parents="rename")
    paths = {tuple(prompt[: end + 1]) for prompt in ids for end in range(2)}
    assert trace.num_ids == len(paths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [8, 8], [0, 0], [[1, 2], [3, 4]], 4), "time: got 1 values, wanted a value for each of 2 prompts"),
        (([1, 0], [8, 8], [0, 0], [[1, 2], [3, 4]], 4), "request 1: time: got 0 ms after 1"),
        (([0, 0], [8, 0], [0, 0], [[1, 2], []], 4), "request 1: input_length: got 0, wanted an integer from 1"),
        (([0, 0], [8, 5.5], [0, 0], [[1, 2], [3, 4]], 4), r"request 1: input_length: got 5\.5, wanted an integer"),
        (([0, 0], [8, "5"], [0, 0], [[1, 2], [3, 4]], 4), "request 1: input_length: got '5', wanted an integer"),
        (([0, 0], [8, 10**10], [0, 0], [[1, 2], [3, 4]], 4), "request 1: input_length: got 10000000000, wanted"),
        (([0, 0], [8, 8], [0, -5], [[1, 2], [3, 4]], 4), "request 1: output_length: got -5, wanted an integer from 0"),
        (([0, 0], [8, 8], [True, 0], [[1, 2], [3, 4]], 4), "request 0: output_length: got True, wanted an integer"),
        (([0, float("nan")], [8, 8], [0, 0], [[1, 2], [3, 4]], 4), "request 1: time: got nan, wanted a finite number"),
        (([0, float("inf")], [8, 8], [0, 0], [[1, 2], [3, 4]], 4), "request 1: time: got inf, wanted a finite number"),
        ((["0", 1], [8, 8], [0, 0], [[1, 2], [3, 4]], 4), "request 0: time: got '0', wanted a finite number"),
        (([0, 0], [8, 8], [0, 0], [[1, 2], [3, 4]], 4.0), r"block_size: got 4\.0, wanted an int"),
        (([0, 0], [8, 9], [0, 0], [[1, 2], [3, 4]], 4), "request 1: hash_ids: got 2, wanted 3 for 9 tokens"),
        (([0, 0], [8, 8], [0, 0], [[1, 2], [3, 4]], 0), "block_size: got 0"),
    ],
)
def test_what_is_no_trace_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trace(*arguments)


def test_numpys_numbers_make_the_same_trace():
    given = [0, 5.5], [8, 7], [0, 3], [[1, 2], [3, 4]]
    of_numpy = make_trace(*map(np.asarray, given), np.int64(4))
    for name, array in vars(make_trace(*given, 4)).items():
        np.testing.assert_array_equal(vars(of_numpy)[name], array)


@pytest.mark.parametrize("sizes", [[], [5.5], ["5"], "5", 5, [[5]], [10**10], [-5], [5, 0], [True], None])
def test_sizes_are_checked_alike(sizes):
    trace = make_trace([0, 1], [8, 8], [0, 0], [[1, 2], [1, 3]], 4)
    calls = belady, lru_curve, *(functools.partial(count, policy=None) for count in (simulate, replay))
    for call in calls:
        with pytest.raises(ValueError, match=r"^sizes: got .*, wanted at least one number of blocks, each at least 1"):
            call(trace, sizes=sizes)


@hypothesis.given(trace=forests(), data=st.data())
def test_a_slice_is_the_trace_of_its_requests(trace, data):
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(trace))] * 2)))
    part = trace[first:last]
    made = make_trace(
        trace.time[first:last], trace.input_length[first:last], trace.output_length[first:last],
        [trace.blocks(number).tolist() for number in range(first, last)], trace.block_size,
    )  # fmt: skip
    for name in ("time", "input_length", "output_length", "ids", "starts", "parent"):
        np.testing.assert_array_equal(getattr(part, name), getattr(made, name), err_msg=name)
        assert getattr(part, name).dtype == getattr(made, name).dtype


@pytest.mark.parametrize("part", [3, slice(0, 4, 2)])
def test_a_part_that_is_no_run_of_requests_is_refused(part):
    with pytest.raises(ValueError, match="wanted a slice without a step"):
        cut(10)[part]


def test_the_conversation_trace():
    trace = whole()
    assert len(trace) == 12_031 and len(trace.ids) == 288_500 and trace.num_ids == 182_790
    assert np.median(trace.lengths) == 14 and trace.lengths.max() == 247
    assert np.sum(trace.full < trace.lengths) == 12_009
    part, begun = cut(), trace[:2000]
    for name in ("time", "input_length", "output_length", "ids", "starts", "parent"):
        np.testing.assert_array_equal(getattr(part, name), getattr(begun, name), err_msg=name)
