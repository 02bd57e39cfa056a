# SPDX-License-Identifier: Apache-2.0
"""Effects and guarantees of other systems' calls, reached with kvjax: a test for each row of the vocabulary's page.

Requests run in the programs of three schedulers, with the spec and model of `tests/oracle/serving.py`. Rows that verbs
alone reach are in `test_vocabulary_verbs.py`.
"""

import ast
import pathlib
import re

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax import Cache, Status
from kvjax.events import init_log
from kvjax.serving import Scheduler, cancel, drain, init_serving, results, submit
from kvjax.serving.requests import Stage
from tests import drive
from tests.drive import PLAIN, TIERS, Driver, holders, table
from tests.oracle.bytes_machine import SIZE
from tests.oracle.serving import COLUMNS, LINE, LOG, MODEL, OPTIONS, ROWS, SLOTS, config, program

VLLM = Scheduler(reserve="num_tokens", chunk=3, chunk_rows=2, budget=ROWS + 5, k=4, k_waiting=2, watermark=1)
TRT = OPTIONS["max_tokens"]
STATIC = Scheduler(reserve="batch", chunk=6, chunk_rows=2, k=4)
TESTS = {}
_submit = jax.jit(submit, static_argnames="scheduler")


def row(theirs):
    """Marks the test of a row of the page, by the text of its left column."""

    def mark(test):
        assert theirs not in TESTS
        TESTS[theirs] = test
        return pytest.mark.long(test)

    return mark


def of_rows(path):
    """{the text of a row: the source of its test} of a file."""
    text = path.read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    marks = [(mark, function) for function in functions for mark in function.decorator_list]
    return {
        mark.args[0].value: "\n".join(text.splitlines()[function.lineno : function.end_lineno])
        for mark, function in marks
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "row"
    }


def test_each_row_of_the_page_has_its_test_which_uses_what_it_names():
    page = (drive.ROOT / "docs/reference/vocabulary.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [(theirs, ours) for theirs, ours, _ in cells if theirs != "theirs"]
    path = pathlib.Path(__file__)
    tests = {**of_rows(path), **of_rows(path.with_name("test_vocabulary_verbs.py"))}
    assert [theirs for theirs, _ in rows] == [*tests] and [*TESTS] == [*of_rows(path)]
    for theirs, ours in rows:
        names = re.findall(r"[a-zA-Z_]+", " ".join(re.findall(r"`([^`]+)`", ours)))
        assert names and all(re.search(rf"\b{name}\b", tests[theirs]) for name in names), (theirs, names)


class Desk:
    """Requests to a scheduler, over a cache of so many blocks."""

    def __init__(self, scheduler, num_blocks=24):
        self.scheduler = scheduler
        cache = Cache.create(config("full").spec(), num_blocks=np.int32(num_blocks))
        self.serving = init_serving(cache, [COLUMNS * SIZE + 1] * SLOTS)

    def submit(self, *prompts, new=4, priority=0):
        """Statuses, slots and generations of up to three requests."""
        lengths = drive.padded([len(prompt) for prompt in prompts], 3)
        self.serving, *answers = _submit(
            self.serving, drive.padded([token for prompt in prompts for token in prompt], LINE), lengths,
            np.full(3, new, np.int32), scheduler=self.scheduler, priority=np.full(3, priority, np.int32),
        )  # fmt: skip
        status, slots, generations = (np.asarray(answer).tolist()[: len(prompts)] for answer in answers)
        return [Status(one).name for one in status], slots, generations

    def step(self, number=1):
        for _ in range(number):
            self.serving, _, served = program(self.scheduler)(MODEL, self.serving, init_log(LOG, SIZE))
            kvjax.check(self.serving.cache.state)
        return jax.device_get(served)

    def steps(self):
        """The `Served` of each step, until all requests are over."""
        for _ in range(200):
            if not bool(self.serving.busy):
                return
            yield self.step()
        raise AssertionError("requests do not end")

    def cancel(self, slot, generation):
        self.serving, status = cancel(self.serving, np.array([slot], np.int32), np.array([generation], np.int32))
        return Status(int(status[0])).name

    def stage(self, slot):
        return Stage(int(self.serving.requests.stage[slot]))

    @property
    def rows(self):
        """The request of each row."""
        return np.asarray(self.serving.row).tolist()

    @property
    def num_pending(self):
        """The number of tokens of each row's request that the cache has not committed."""
        num_tokens = np.asarray(self.serving.requests.num_tokens)[self.serving.row]
        return np.where(np.array(self.rows) >= 0, num_tokens - self.serving.cache.state.seqs.committed, 0).tolist()

    @property
    def held(self):
        return int(np.sum(np.asarray(self.serving.cache.state.groups[0].blocks.refcount) > 0))


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


def of_blocks(number):
    """A cache of so many blocks."""
    return Driver(kvjax.init(PLAIN, num_blocks=np.int32(number)))


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


@row("v1 `allocate_slots`: None")
def test_blocks_that_cannot_be_had_are_refused_and_nothing_changes():
    driver = of_blocks(3)
    driver.start(0, A)
    driver.start(1, A[::-1][:4])
    assert driver.admit(2, B) == ["NO_BLOCKS"] and int(driver.events.shortfall) == 2  # the driver compares the states
    next_token = np.array([True, False, False, False]), np.array([1, 0, 0, 0], np.int32)
    assert driver.status("extend", *next_token, max_tokens=drive.MOST)[0] == "NO_BLOCKS"
    driver.do("release", 1)
    driver.do("extend", *next_token, max_tokens=drive.MOST)  # by the block that the other gave back


@row("v0 `append_slots`")
def test_a_block_is_taken_when_the_last_one_is_full_and_copied_when_it_is_shared():
    driver = of_blocks(12)
    driver.start(0, A[:6])
    for text, number in ((A[6:], 2), ([1], 3)):
        count = np.array([len(text), 0, 0, 0], np.int32)
        driver.do("extend", count > 0, count, max_tokens=drive.MOST)
        driver.write({0: text})
        assert len(table(driver, 0)) == number
    driver.do("fork", 0, 1)
    shared = table(driver, 0)[2]
    assert driver.grow(1, 1, 0, 0) == ["OK"] * 4
    (copy,) = [event for event in driver.recorded if event["kind"] == "copied"]
    ours, theirs = table(driver, 0), table(driver, 1)
    assert ours[:2] == theirs[:2] and {ours[2], theirs[2]} == {shared, copy["block"]} and copy["source"] == shared


@row("v0 `fork`")
def test_a_fork_takes_no_block_and_holds_each():
    driver = of_blocks(3)
    driver.start(0, [*A, 1])
    driver.do("fork", 0, 1)
    assert table(driver, 1) == table(driver, 0) and holders(driver, 0) == [2, 2, 2]


@row("`free`")
def test_freed_blocks_stay_findable_and_shared_ones_held():
    driver = of_blocks(12)
    driver.start(0, [*A, 1])
    driver.do("fork", 0, 1)
    driver.do("release", 0)
    assert holders(driver, 1) == [1, 1, 1]
    driver.do("release", 1)
    assert driver.found([*A, 1, 1]) == 9
    assert driver.status("release", 1) == ["BAD_REQUEST"]


@row("v0 `mark_blocks_as_computed`")
def test_a_block_is_found_once_it_is_committed():
    driver = of_blocks(12)
    driver.admit(0, A)
    assert driver.found([*A, 1]) == 0
    driver.do("commit", *drive.lines({0: A}, ROWS, PLAIN.max_length))
    assert driver.found([*A, 1]) == 8


@row("v0 `get_block_table`")
def test_a_view_has_the_block_tables():
    driver = of_blocks(12)
    driver.start(0, [*A, 1])
    tables = kvjax.pools.view(driver.state, 1).tables[0]
    assert tables[0].tolist() == [*table(driver, 0), 12, 12]  # the scratch row for a column without a block
    assert (np.asarray(tables[1:]) == 12).all()


@pytest.mark.slow
@row("v0 `swap_out`, `swap_in`")
def test_a_row_goes_to_the_host_and_comes_back_as_a_whole():
    driver = Driver(kvjax.init(TIERS, num_blocks=np.int32(3)))
    driver.start(0, [*A, 1])
    device = table(driver, 0)
    orders = driver.do("swap_out", 0).transfer
    sources = [int(s) for s, b in zip(orders.source, orders.block, strict=True) if b >= 0]
    assert set(device) <= set(sources)  # (source, target) of each move
    driver.start(1, C)
    assert driver.status("swap_in", 0) == ["NO_BLOCKS"]  # 1 block of 3 is free: none moves
    driver.do("release", 1)
    driver.do("swap_in", 0)
    assert not np.asarray(driver.state.seqs.swapped_out).any()
    assert driver.grow(1, 0, 0, 0) == ["OK"] * 4


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


@row("`prefetch`, `alloc`")
def test_a_prompt_gets_all_of_its_blocks_or_none():
    driver = of_blocks(3)
    driver.start(0, A)
    assert driver.admit(1, B) == ["NO_BLOCKS"]
    assert driver.admit(1, [*A, 1]) == ["OK"]  # two blocks of three are free


@row("`fetch`, `runtime_inputs`")
def test_a_view_has_the_positions_lengths_and_slots_of_the_next_tokens():
    driver = of_blocks(12)
    driver.start(0, A)
    driver.admit(1, [*A[:6], 2])
    seen = jax.device_get(kvjax.pools.view(driver.state, np.array([0, 1, 0, 0], np.int32), 1))
    first, second = table(driver, 1)
    assert first == table(driver, 0)[0] and seen.tables[0][1, :2].tolist() == [first, second]
    assert (seen.positions[1].tolist(), seen.lengths.tolist()) == ([6], [0, 7, 0, 0])
    assert seen.slots[0][1].tolist() == [second * 4 + 2]


@row("`step`")
def test_what_is_committed_is_found_and_equal_blocks_become_one():
    driver = of_blocks(12)
    driver.admit(0, A)
    driver.admit(1, A)
    assert not set(table(driver, 0)) & set(table(driver, 1))
    driver.do("commit", *drive.lines({0: A, 1: A}, ROWS, PLAIN.max_length))
    assert table(driver, 0) == table(driver, 1) and holders(driver, 0) == [2, 2]
    assert driver.found([*A, 1]) == 8


@row("`release`")
def test_released_blocks_are_the_next_requests():
    driver = of_blocks(12)
    driver.start(0, A)
    driver.do("release", 0)
    assert driver.start(2, [*A, 1]) == 8


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
