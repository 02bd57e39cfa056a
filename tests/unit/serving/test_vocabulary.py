# SPDX-License-Identifier: Apache-2.0
"""Effects and guarantees of other systems' calls, reached with kvjax: the rows of the vocabulary's page.

Here are the rows of the scheduler, which runs three sets of options; those that verbs alone reach are in
`test_vocabulary_verbs.py`. A test may have several rows.
"""

import ast
import pathlib
import re

import chex
import numpy as np
import pytest

import kvjax
from kvjax.serving import Scheduler, drain, results
from kvjax.serving.requests import Stage
from tests import drive
from tests.drive import TIERS, Driver
from tests.oracle.serving import OPTIONS, ROWS, SLOTS
from tests.unit.serving.stories import Desk

VLLM = Scheduler(reserve="num_tokens", chunk=3, chunk_rows=2, budget=ROWS + 5, k=4, k_waiting=2, watermark=1)
TRT = OPTIONS["max_tokens"]
STATIC = Scheduler(reserve="batch", chunk=6, chunk_rows=2, k=4)


def row(*theirs):
    """Marks the test of rows of the page, by the texts of their left columns."""
    del theirs
    return pytest.mark.long


def of_rows(path):
    """{the text of a row: the source of its test} of a file."""
    text = path.read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    marks = [(mark, function) for function in functions for mark in function.decorator_list]
    return {
        theirs.value: "\n".join(text.splitlines()[function.lineno : function.end_lineno])
        for mark, function in marks
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "row"
        for theirs in mark.args
    }


def test_each_row_of_the_page_has_a_test_which_uses_what_it_names():
    page = (drive.ROOT / "docs/reference/vocabulary.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [(theirs, ours) for theirs, ours, _ in cells if theirs != "theirs"]
    path = pathlib.Path(__file__)
    studies = drive.ROOT / "tests/unit/research/test_sparsity.py"
    tests = {**of_rows(path), **of_rows(path.with_name("test_vocabulary_verbs.py")), **of_rows(studies)}
    assert sorted(theirs for theirs, _ in rows) == sorted(tests)
    for theirs, ours in rows:
        names = re.findall(r"[a-zA-Z_]\w*", " ".join(re.findall(r"`([^`]+)`", ours)))
        assert names and all(re.search(rf"\b{name}\b", tests[theirs]) for name in names), (theirs, names)


def admitted(served):
    return served.admitted.slots[served.admitted.slots >= 0].tolist()


def preempted(served):
    return served.retired.preempted[served.retired.preempted >= 0].tolist()


def chunks(served):
    """The numbers of tokens of a step's chunks, in order."""
    return served.chunks.count[served.chunks.rows >= 0].tolist()


def decoded(served):
    """Rows that chose without a chunk."""
    chose = np.flatnonzero((served.chosen.tokens >= 0).any(axis=1)).tolist()
    return [row for row in chose if row not in served.chunks.rows]


A, B, C = [1, 2, 0, 1, 1, 2, 2, 0], [2, 0, 1, 1, 2, 2, 0, 0], [0, 0, 2, 1, 0, 1, 2, 2]


# vLLM.


@pytest.mark.slow
@row("`add_request`")
def test_a_request_waits_until_a_step_admits_it():
    desk = Desk(VLLM)
    before = desk.serving.cache
    status, slots, _ = desk.submit(A, B, C)
    assert (status, slots) == (["OK"] * 3, [0, 1, 2])
    chex.assert_trees_all_equal(desk.serving.cache, before)
    assert [desk.stage(slot) for slot in slots] == [Stage.WAITING] * 3
    desk.submit([2, 2], priority=1)
    assert admitted(desk.step()) == [3, 0, 1, 2]  # by priority, then by arrival


@pytest.mark.slow
@row("`abort_request`")
def test_an_aborted_request_gives_back_what_it_holds():
    desk = Desk(VLLM)
    _, (first, second), (generation, _) = desk.submit(A, B, new=8)
    desk.step()
    assert desk.rows[:2] == [first, second] and desk.held == 4
    assert desk.cancel(first, generation) == "OK" and desk.cancel(first, generation) == "BAD_REQUEST"
    _, (third,), (generation,) = desk.submit(C)
    assert desk.cancel(third, generation) == "OK" and desk.stage(third) == Stage.CANCELLED  # it waited
    desk.step()
    assert desk.rows[:2] == [-1, second] and desk.held == 2
    list(desk.steps())
    desk.serving = drain(desk.serving)
    assert desk.cancel(second, 0) == "BAD_REQUEST" and desk.held == 0
    assert desk.submit(C)[1:] == ([0], [1])  # the slot's next request has another generation


@pytest.mark.slow
@row("v0 waiting, running, swapped")
def test_the_stages_of_a_request_and_a_row_that_is_swapped_out():
    desk = Desk(VLLM)
    _, (slot,), _ = desk.submit(A)
    stages = [desk.stage(slot)] + [desk.stage(slot) for _ in desk.steps()]
    assert stages == [Stage.WAITING, *[Stage.RUNNING] * 3, *[Stage.DONE] * 2]
    driver = Driver(kvjax.init(TIERS))
    driver.start(0, A)
    driver.do("swap_out", 0)
    assert np.asarray(driver.state.seqs.swapped_out).tolist() == [True, False, False, False]
    assert driver.grow(1, 0, 0, 0) == ["HELD", "OK", "OK", "OK"]
    driver.do("swap_in", 0)
    assert driver.grow(1, 0, 0, 0) == ["OK"] * 4


@row("v0 `can_allocate`: OK, LATER, NEVER")
def test_a_request_is_admitted_or_waits_or_is_refused():
    desk = Desk(VLLM, num_blocks=4)
    status, (now, later, _), _ = desk.submit([1] * 10, [2] * 5, [0] * 14)
    assert status == ["OK", "OK", "NO_BLOCKS"]  # 17 tokens to be written, in 16 slots
    assert admitted(desk.step()) == [now] and desk.stage(later) == Stage.WAITING
    list(desk.steps())
    assert {output.finish for output in results(desk.serving).values()} == {"length"}


@row("`max_num_seqs`")
def test_no_more_requests_run_than_a_cache_has_rows():
    desk = Desk(VLLM)
    desk.submit(A, B, C)
    desk.submit(A[1:], B[1:], C[1:])
    most = max(sum(slot >= 0 for slot in desk.rows) for _ in desk.steps())
    assert most == desk.serving.cache.state.spec.max_seqs == ROWS
    assert [output.finish for output in results(desk.serving).values()] == ["length"] * 6


@row("`max_num_batched_tokens`")
def test_a_mixed_step_computes_at_most_the_budget():
    desk = Desk(VLLM)
    for number in range(2):
        desk.submit([*A, number], [*B, number], [*C, number])
    computed = [(len(decoded(served)), sum(chunks(served))) for served in desk.steps() if served.mixed]
    assert VLLM.budget is not None and max(map(sum, computed)) <= VLLM.budget
    assert max(number for _, number in computed) == VLLM.budget - ROWS < VLLM.chunk_rows * VLLM.chunk


@row("`long_prefill_token_threshold`")
def test_a_long_prompt_is_computed_in_chunks():
    desk = Desk(VLLM)
    desk.submit(A + B[:3])
    found = [chunks(served) for served in desk.steps() if served.mixed]
    assert VLLM.chunk == 3 and found == [[3], [3], [3], [2]]  # although five positions are free


@row("watermark")
def test_some_blocks_are_left_to_the_requests_that_run():
    desk = Desk(VLLM, num_blocks=5)
    assert VLLM.watermark == 1
    _, (first,), _ = desk.submit([1] * 7)
    desk.step()
    _, (second,), _ = desk.submit([2] * 9, new=12)
    desk.step()
    assert desk.held == 2 and desk.stage(second) == Stage.WAITING  # three blocks are free for it, and no more
    desk.cancel(first, 0)
    assert admitted(desk.step()) == [second]
    list(desk.steps())
    desk.submit([0] * 17)
    assert len(admitted(desk.step())) == 1  # all five blocks, if no row runs


# TensorRT-LLM.


def under_pressure(scheduler):
    """Four requests need three of eight blocks each; returns how many were admitted first, and the preempted ones."""
    desk = Desk(scheduler, num_blocks=8)
    desk.submit([1] * 5, [2] * 5, [0] * 5, new=8)
    desk.submit([1, 2] * 3, new=7)
    steps = list(desk.steps())
    found = results(desk.serving).values()
    assert [output.finish for output in found] == ["length"] * 4
    paused = [slot for served in steps for slot in preempted(served)]
    assert sum(output.preemptions for output in found) == len(paused)
    return len(admitted(steps[0])), paused, [output.tokens for output in found]


@pytest.mark.slow
@row("CapacityScheduler, `GUARANTEED_NO_EVICT`")
def test_an_admitted_request_is_never_preempted():
    assert TRT.reserve == "max_tokens" and Scheduler().reserve == "max_tokens"
    number, paused, _ = under_pressure(TRT)
    assert (number, paused) == (2, [])


@pytest.mark.slow
@row("CapacityScheduler, `MAX_UTILIZATION`")
def test_more_are_admitted_and_some_preempted():
    assert VLLM.reserve == "num_tokens"
    number, paused, tokens = under_pressure(VLLM)
    assert number == 3 and paused and tokens == under_pressure(TRT)[2]


@pytest.mark.slow
@row("CapacityScheduler, `STATIC_BATCH`")
def test_a_batch_is_admitted_when_the_one_before_is_over():
    assert STATIC.reserve == "batch"
    desk, running = Desk(STATIC), 0
    desk.submit(A, B, C)
    desk.submit(A[::-1], B[::-1], new=2)
    for served in desk.steps():
        assert not admitted(served) or running == served.retired.released.sum()
        running = sum(slot >= 0 for slot in desk.rows)


@row("`paused_requests`")
def test_a_preempted_request_keeps_its_tokens_and_its_turn():
    desk = Desk(VLLM, num_blocks=8)
    desk.submit([1] * 5, [2] * 5, [0] * 5, new=8)
    served = next(served for served in desk.steps() if preempted(served))
    (slot,) = preempted(served)
    requests = desk.serving.requests
    assert desk.stage(slot) == Stage.WAITING and int(requests.preemptions[slot]) == 1
    assert int(requests.num_tokens[slot]) > 5 and int(requests.arrival[slot]) == slot
    desk.submit([2] * 3)
    assert next(admitted(served) for served in desk.steps() if admitted(served))[0] == slot


@pytest.mark.slow
@row("MicroBatchScheduler, its chunking policies")
def test_rows_that_decode_run_with_chunks_given_in_order_or_in_equal_shares():
    for scheduler, dealt in ((VLLM, [3, 2]), (TRT, [2, 2, 2])):
        desk = Desk(scheduler)
        desk.submit([2], new=8)
        desk.step()
        desk.submit(A, B, C)
        served = desk.step()
        assert scheduler.chunks == ("fcfs" if scheduler is VLLM else "equal")
        assert (chunks(served), decoded(served)) == (dealt, [0])


# MAX.


@row("`claim`")
def test_a_request_has_a_slot_of_its_own():
    desk = Desk(VLLM)
    slots = [slot for _ in range(3) for slot in desk.submit(A, B, C)[1]]
    assert slots == [*range(SLOTS), -1, -1]
    assert desk.submit(A)[0] == ["HELD"]


@row("CE and TG")
def test_a_row_with_more_than_one_pending_token_is_prefill_and_with_one_decode():
    desk = Desk(VLLM)
    desk.submit([2], A)
    served = desk.step()
    assert desk.num_pending[:2] == [1, 8 - 3] and chunks(served) == [3]
    served = desk.step()
    assert (decoded(served), chunks(served)) == ([0], [3])  # both in one step
    desk.step()
    num_tokens, committed = desk.serving.requests.num_tokens[1], desk.serving.cache.state.seqs.committed[1]
    assert desk.num_pending[1] == int(num_tokens - committed) == 1


@row("`num_steps`")
def test_several_tokens_of_each_row_are_reserved_and_computed_at_once():
    desk = Desk(VLLM)
    desk.submit([2] * 2, [1] * 2, new=16)
    desk.step()
    served = desk.step()
    assert int(served.n) == VLLM.k == 4
    assert (served.chosen.tokens[:2] >= 0).sum(axis=1).tolist() == [4, 4]
    desk.submit(A, B, C, new=8)
    desk.submit(A[::-1])
    waiting = [int(served.n) for served in desk.steps() if Stage.WAITING in desk.serving.requests.stage.tolist()]
    assert set(waiting) == {1, VLLM.k_waiting} == {1, 2}


@pytest.mark.slow
@row("`prefill_coalesce_min_pending`")
def test_chunks_wait_for_others_or_for_so_many_blocks_of_steps():
    desk = Desk(TRT)
    desk.submit([2], new=16)
    desk.step()
    desk.submit(A)
    assert TRT.coalesce == 2 and [bool(desk.step().mixed) for _ in range(3)] == [False, False, True]
    desk.step()
    desk.submit(B, C)
    assert bool(desk.step().mixed)
