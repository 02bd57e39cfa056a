# SPDX-License-Identifier: Apache-2.0
"""The scheduler in plain Python by itself: rules with numbers, then random histories."""

import collections
import itertools
import random

import pytest

from tests.oracle.blocks import Priority, Result, Retention, Status
from tests.oracle.cache import Oracle
from tests.oracle.histories import VOCAB, Watch, choose
from tests.oracle.requests import Ask, Finish, Options, Stage
from tests.oracle.scheduler import Scheduler, cached_tokens

GREEDY = Options(k=1)


def watch(num_blocks=40, size=4, rows=3, most=6, slots=9, options=GREEDY, cache=Oracle, **more):
    """A `Watch` over a scheduler with an empty cache."""
    max_tokens = (most * size + 1,) * slots
    return Watch(Scheduler(cache(num_blocks, size, rows, most, **more), options, choose, max_tokens))


def text(length, start=0):
    """Tokens that occur nowhere else, unless they start with the same number."""
    return list(range(start, start + length))


def slots(*requests):
    return [request.slot for request in requests]


def admitted(report):
    return [slot for slot, *_ in report.admitted]


# Submit, cancel, drain.


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        (Ask([], 3), Status.BAD_REQUEST),
        (Ask([3, -1], 3), Status.BAD_REQUEST),
        (Ask([3, 4], 2), Status.BAD_REQUEST),
        (Ask([3, 4], 3, namespace=-1), Status.BAD_REQUEST),
        (Ask(text(26), 27), Status.ROW_FULL),  # more tokens than a slot has
        (Ask([3], 26), Status.ROW_FULL),
        (Ask([3], 25), Status.OK),  # the last token is not written
        (Ask([3], 3, sample_of=0), Status.BAD_REQUEST),  # of itself
    ],
)
def test_what_could_never_run_is_refused(ask, status):
    assert watch().scheduler.submit([ask])[0][0] == status


def test_what_never_fits_is_refused_and_pinned_blocks_count():
    scheduler = watch(num_blocks=5).scheduler
    assert [scheduler.submit([Ask([1], max_tokens)])[0][0] for max_tokens in (22, 21)] == [Status.NO_BLOCKS, Status.OK]
    drained = watch(num_blocks=5)
    drained.submit(Ask(text(5), 6))
    drained.run()
    drained.pin(random.Random(0))
    pinned = len(drained.pins[0])
    assert pinned in (1, 2)
    fits = 4 * (5 - pinned) + 1
    assert drained.scheduler.submit([Ask([9], fits + 1)])[0][0] == Status.NO_BLOCKS
    assert drained.scheduler.submit([Ask([9], fits)])[0][0] == Status.OK


def test_slots_are_taken_in_order_and_a_refusal_takes_none():
    watched = watch(slots=2)
    answers = watched.scheduler.submit([Ask([1], 3), Ask([], 3), Ask([2], 3), Ask([3], 3)])
    assert answers == [(Status.OK, 0, 0), (Status.BAD_REQUEST, -1, -1), (Status.OK, 1, 0), (Status.HELD, -1, -1)]


def test_a_late_cancel_hits_nobody():
    watched = watch(slots=1)
    (first,) = watched.submit(Ask([1], 3))
    assert watched.cancel(first) and not watched.cancel(first)
    assert watched.scheduler.drain() == [first]
    (second,) = watched.scheduler.submit([Ask([2], 3)])
    assert second == (Status.OK, 0, 1)
    assert watched.scheduler.cancel(0, 0) == Status.BAD_REQUEST
    assert watched.scheduler.cancel(0, 1) == Status.OK
    assert watched.scheduler.cancel(1, 0) == watched.scheduler.cancel(-1, 0) == Status.BAD_REQUEST


def test_a_cancelled_row_is_free_after_the_next_step_and_drained_then():
    watched = watch()
    (request,) = watched.submit(Ask([1], 9))
    watched.step()
    assert watched.cancel(request) and watched.scheduler.drain() == []
    report = watched.step()
    assert report.released == [0] and watched.over == [request] and watched.cache.counts()["active"] == 0
    assert request.finish == Finish.CANCELLED and request.ended == 1


# Retire.


def test_the_last_in_order_is_preempted_and_keeps_its_turn():
    """Three rows of two blocks each fill the cache; each then wants one more."""
    watched = watch(num_blocks=6, options=Options(reserve="num_tokens", k=1, chunk=8))
    first, last, second = watched.submit(Ask(text(8, 10), 14, 1), Ask(text(8, 20), 14), Ask(text(8, 30), 14, 1))
    assert admitted(watched.step()) == slots(first, second, last)
    report = watched.step()
    assert report.preempted == slots(last) and not report.admitted
    assert (last.stage, last.preemptions, last.arrival) == (Stage.WAITING, 1, 1)
    watched.run()
    assert watched.over[-1] is last and first.preemptions == 0


def test_what_a_request_finds_when_it_comes_back_is_not_counted():
    options = Options(reserve="num_tokens", k=1, chunk=16, wait_for_prefix=False)
    watched = watch(num_blocks=4, options=options)
    _, last = watched.submit(Ask(text(5), 14), Ask(text(5), 14))
    watched.step()
    while last.stage == Stage.WAITING or not last.preemptions:
        report = watched.step()
    assert report.admitted[0][2] >= 4 and last.cached == 0
    watched.run()


def test_a_request_that_is_alone_and_does_not_fit_is_over():
    """Its blocks were free when it was submitted. Then the blocks that others have left are pinned."""
    watched = watch(num_blocks=4, options=Options(k=1, chunk=8))
    watched.submit(Ask(text(8, 50), 9))
    watched.run()
    (request,) = watched.submit(Ask(text(4), 16))
    while request.num_tokens < 7:
        watched.step()
    rng = random.Random(3)
    while len(watched.pins[0]) < 2:
        watched.pin(rng)
    while not request.over:
        watched.step()
    assert request.finish == Finish.NO_BLOCKS and request.num_tokens == 9 and not any(watched.scheduler.rows)
    watched.run()


# Grow.


@pytest.mark.parametrize(("k_waiting", "n"), [(2, 2), (4, 3)])
def test_a_block_of_steps_is_shorter_while_somebody_waits(k_waiting, n):
    watched = watch(rows=2, options=Options(k=4, k_waiting=k_waiting, chunk=8))
    watched.submit(Ask([1], 5), Ask([2], 20), Ask([3], 9))
    assert watched.step().n == 1  # an admission was tried
    report = watched.step()
    assert (report.n, len(report.chosen[1])) == (n, n)  # three tokens are left of the first row's
    while watched.waiting:
        report = watched.step()
    assert report.n == 1 and report.admitted
    assert watched.step().n == 4


def test_blocks_of_steps_are_long_again_once_nobody_more_can_be_admitted():
    watched = watch(num_blocks=6, options=Options(k=4, k_waiting=4, chunk=8))
    watched.submit(Ask([1], 22), Ask([2], 9))
    assert [watched.step().n for _ in range(3)] == [1, 1, 4]  # the first token counts as a change


def test_num_steps_counts_from_what_rows_have_reserved():
    cache = Oracle(2, 4, 2, 2)
    assert cache.admit(0, text(8), reserve_tokens=None).ok and cache.rows[0].length == 8
    assert cache.num_steps([4, 0], 4, 100) == 4  # nothing to take
    cache = Oracle(1, 4, 2, 2)
    assert cache.admit(0, text(4)).ok
    assert cache.commit([text(3), []], [3, 0]).ok
    assert cache.num_steps([4, 0], 4, 100) == 1  # one reserved token, and then another block
    cache = Oracle(3, 4, 2, 2)
    assert cache.admit(0, text(8)).ok and cache.admit(1, text(4, 50)).ok
    assert cache.commit([[], text(4, 50)], [0, 4]).ok
    assert cache.num_steps([4, 4], 4, 100) == 1  # one row's reserved tokens are not another's


def test_the_log_limits_a_block_of_steps():
    watched = watch(options=Options(k=4, chunk=8))
    watched.submit(Ask([1], 20))
    watched.step()
    assert watched.scheduler.step(log_room=0).n == 2  # with three, a block would be filled, and stored
    assert watched.scheduler.step().n == 4


class Refusing(Oracle):
    """A cache that refuses to extend although enough blocks are counted, as with unevictable ones over a host tier."""

    rng, often = random.Random(0), 1.0

    def extend(self, active, num_tokens=1, tiers=False):
        if any(active) and self.rng.random() < self.often:
            return Result([Status.NO_BLOCKS if on else Status.OK for on in active], shortfall=1)
        return super().extend(active, num_tokens, tiers)


def test_a_refused_block_of_steps_is_followed_by_one_step_and_that_by_a_preemption():
    watched = watch(cache=Refusing, options=Options(k=4, chunk=8))
    first, second = watched.submit(Ask([1], 9), Ask([2], 9))
    reports = [watched.step() for _ in range(4)]
    assert [report.n for report in reports] == [1, 0, 0, 0]
    assert [report.preempted for report in reports] == [[], [], [], slots(second)]
    assert [report.chosen for report in reports[1:]] == [{}] * 3
    watched.run()
    assert first.finish == Finish.NO_BLOCKS
    assert second.finish == Finish.LENGTH  # `admit`, which is not refused, reserves one token each time


# Admit.


def test_max_tokens_leaves_blocks_for_all_that_running_rows_can_become():
    """Each of them needs one block at first and three at its end, so two of three run."""
    for reserve, number in (("max_tokens", 2), ("num_tokens", 3)):
        watched = watch(num_blocks=8, options=Options(reserve=reserve, k=1))
        watched.submit(*(Ask([number], 10) for number in range(3)))
        assert len(watched.step().admitted) == number
        watched.run()


def test_max_tokens_counts_a_shared_prefix_once():
    watched = watch(num_blocks=7, options=Options(k=1, chunk=16))
    watched.submit(Ask([*text(16), 90], 18), Ask([*text(16), 91], 22))
    assert len(watched.step().admitted) == 1  # 5 and then 6, 4 of them the same: one waits for the other's prefix
    assert len(watched.step().admitted) == 1
    watched.run()


def test_num_tokens_leaves_the_watermark_unless_no_row_runs():
    watched = watch(num_blocks=4, options=Options(reserve="num_tokens", watermark=2, k=1, chunk=8))
    first, second, third = watched.submit(Ask(text(8, 10), 9), Ask([1], 3), Ask([2], 3))
    assert admitted(watched.step()) == slots(first)
    assert admitted(watched.step()) == slots(second, third)


def test_batch_admits_when_no_row_runs():
    watched = watch(rows=2, options=Options(reserve="batch", k=1))
    requests = watched.submit(Ask([1], 3), Ask([2], 6), Ask([3], 3))
    reports = []
    while not watched.idle:
        reports.append(admitted(watched.step()))
    assert reports[0] == slots(*requests[:2]) and reports[5] == slots(requests[2]) and sum(map(bool, reports)) == 2


def test_max_skips_limits_how_many_are_passed_over():
    big, small = Ask(text(20, 50), 22), Ask([1], 3)
    for max_skips, number in ((1, 1), (2, 1), (3, 2)):
        watched = watch(num_blocks=7, rows=4, options=Options(k=1, max_skips=max_skips))
        watched.submit(Ask([2], 6), big, big, small)  # 2 blocks, 6, 6 and 1
        assert len(watched.step().admitted) == number
        watched.run()


def test_an_order_of_ones_own():
    watched = watch(rows=1, options=Options(k=1, order=lambda request, cache: request.max_tokens))
    requests = watched.submit(Ask([1], 9), Ask([2], 3), Ask([3], 6), Ask([4], 3))
    watched.run()
    assert watched.over == [requests[number] for number in (1, 3, 2, 0)]


def test_who_waits_for_a_prefix_goes_on_when_a_decode_step_has_computed_it():
    """Seven tokens of eight are found by a copy, so that the eighth is no chunk."""
    watched = watch(options=Options(k=4, chunk=8))
    watched.submit(Ask([*text(7), 90], 10))
    watched.run()
    first, second = watched.submit(Ask(text(8), 24), Ask(text(10), 14))
    report = watched.step()
    assert report.admitted == [(first.slot, 0, 7)] and not report.mixed
    assert watched.step().admitted == [(second.slot, 1, 8)]


def test_nobody_waits_for_what_it_has_generated():
    """It was preempted, and a row computes a prompt of the same tokens."""
    watched = watch(options=Options(k=1, chunk=2))
    _, request = watched.submit(Ask(text(12), 14), Ask(text(4), 20))
    request.tokens += text(8, 4)
    watched.step()
    assert watched.scheduler._waits_for_prefix(request)
    watched.step()
    assert watched.cache.lookup(request.tokens) == 4 and not watched.scheduler._waits_for_prefix(request)


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_documents_that_many_ask_about_are_computed_once(chunk):
    documents = [text(16, 100 * number) for number in range(3)]
    asks = [Ask([*document, 500 + number, 7], 22) for number in range(6) for document in documents]
    computed = {}
    for waits in (True, False):
        watched = watch(200, rows=8, slots=18, options=Options(k=4, chunk=chunk, max_skips=18, wait_for_prefix=waits))
        watched.submit(*asks)
        watched.run()
        computed[waits] = watched.computed
    generated = sum(ask.max_tokens - len(ask.tokens) - 1 for ask in asks)
    assert computed[True] == 3 * 16 + 18 * 2 + generated < computed[False]


@pytest.mark.parametrize("reserve", ["max_tokens", "num_tokens", "batch"])
@pytest.mark.parametrize("patience", [1, 4])
@pytest.mark.parametrize("why", ["priority", "size", "prefix"])
def test_nobody_starves(reserve, patience, why):
    """At every step requests come that are more important, or smaller, or need not wait for a prefix."""
    options = Options(reserve, 1, 1, k=1, patience=patience, max_skips=2, watermark=1)
    watched = watch(num_blocks=7 if why == "size" else 12, rows=4, slots=12, options=options)
    victim, bound = None, 80 + 40 * patience
    for number in range(bound):
        if number == 8:
            _, victim = watched.submit(Ask([*text(12), 90], 14, 2), Ask(text(16), 20))
        while len(watched.waiting) < 3:
            prompt = [100 + watched.scheduler.arrivals, 99]  # more important ones want the chunks, too
            max_tokens = 3 + len(watched.asks) % 3
            watched.submit(Ask([*prompt, 98, 97], 6, 1) if why == "priority" else Ask(prompt[:1], max_tokens))
        watched.step()
        if victim and victim.over:
            break
    assert victim and victim.finish == Finish.LENGTH
    if reserve != "batch":  # which admits nobody while a row runs
        assert watched.passed[victim] == patience
    watched.run()


def test_nobody_starves_in_a_row():
    """It never waited for a row. Then the prompts of more important requests take all chunks."""
    watched = watch(rows=4, options=Options(chunk=1, k=1, patience=4))
    (victim,) = watched.submit(Ask(text(9), 12))
    for _ in range(80):
        watched.step()
        while len(watched.waiting) < 3:
            watched.submit(Ask([100 + watched.scheduler.arrivals, 99, 98, 97], 5, 1))
    assert victim.finish == Finish.LENGTH and victim.passed == 0
    watched.run()


def test_nobody_starves_by_being_preempted():
    """More important requests keep coming. Some run all the time, and fill the cache."""
    options = Options("num_tokens", 4, k=1, patience=4, max_skips=2)
    for blocks in (6, 7, 8, 9):
        watched = watch(blocks, rows=4, options=options)
        victim = None
        for number in range(200):
            if number == 8:
                (victim,) = watched.submit(Ask(text(8), 16))
            while len(watched.waiting) < 3:
                watched.submit(Ask([100 + watched.scheduler.arrivals, 99, 98, 97], 12, 1))
            watched.step()
        assert victim and victim.finish == Finish.LENGTH and watched.happened["preempted"]
        watched.run()


# Compute and choose.


def test_chunks_are_dealt_out():
    tokens = (text(9, 10), text(2, 30), text(9, 50), text(9, 70))
    for chunks, budget, limit, wanted in (
        ("fcfs", 18, 4, {0: 6, 1: 2, 2: 6}),
        ("fcfs", 11, 4, {0: 6, 1: 1}),
        ("equal", 18, 4, {0: 4, 1: 2, 2: 4, 3: 4}),
        ("equal", 18, 2, {0: 6, 1: 2}),
        ("equal", 7, 4, {0: 1, 1: 1, 2: 1}),
    ):
        options = Options(k=1, chunk=6, chunk_rows=limit, chunks=chunks, budget=budget)
        watched = watch(rows=4, options=options)
        watched.submit(*(Ask(prompt, 12) for prompt in tokens))
        assert watched.step().chunks == wanted
        watched.run()


def test_decode_rows_run_in_each_mixed_step():
    watched = watch(options=Options(k=4, chunk=2))
    watched.submit(Ask([1], 20))
    watched.step()
    watched.submit(Ask(text(6, 40), 9))
    for _ in range(3):
        report = watched.step()
        assert (report.mixed, report.n, report.decoded) == (True, 1, [0])
        assert list(report.chunks.values()) == [2]


def test_chunks_wait_for_each_other():
    watched = watch(options=Options(k=2, chunk=8, coalesce=2))
    watched.submit(Ask([1], 25))
    watched.step()
    watched.submit(Ask(text(6, 40), 9))
    assert [watched.step().mixed for _ in range(3)] == [False, False, True]  # it has waited for two blocks
    watched.submit(Ask(text(6, 50), 9), Ask(text(6, 60), 9))
    while not watched.idle and not (report := watched.step()).admitted:
        pass
    assert report.mixed == (len(report.admitted) > 1)


def test_a_stop_token_ends_a_row_inside_a_block_of_steps():
    watched = watch(options=Options(k=4))
    stop = choose_alone([1], 3)[-1]
    short, long = watched.submit(Ask([1], 20, stop=[stop]), Ask([2], 20))
    watched.run()
    number = choose_alone([1], 24).index(stop) + 1
    assert short.finish == Finish.STOP and short.num_tokens == 1 + number
    assert (short.first_token, short.ended, long.ended) == (1, number, 19)


def choose_alone(tokens, number):
    request = watch().scheduler.requests[0]
    request.tokens = list(tokens)
    for _ in range(number):
        request.tokens.append(choose(request, request.num_tokens))
    return request.tokens[len(tokens) :]


@pytest.mark.parametrize("mixed", [True, False])
def test_of_equal_blocks_the_first_decode_rows_stays(mixed):
    watched = watch(options=Options(k=1, chunk=8))
    watched.submit(Ask(text(3), 8), Ask(text(3), 8), *([Ask(text(9, 50), 12)] * mixed))
    watched.step()
    tables = watched.cache.tables()
    assert tables[0] != tables[1]
    report = watched.step()
    assert (report.mixed, report.decoded) == (mixed, [0, 1])
    assert [table[0] for table in watched.cache.tables()[:2]] == tables[0] * 2


def test_of_equal_blocks_of_chunks_that_of_the_first_in_order_stays():
    watched = watch(options=Options(k=1, chunk=10, wait_for_prefix=False))
    watched.submit(Ask(text(10, 50), 20, 2), Ask(text(5), 8))
    watched.step()
    before = watched.cache.rows[1].tables[0][0]
    watched.submit(Ask(text(5), 8, 1))
    assert watched.step().chunks == {2: 5, 1: 5}
    first, second = (watched.cache.rows[row].tables[0][0] for row in (2, 1))
    assert first == second != before


def test_of_equal_blocks_of_one_call_the_first_rows_stays():
    cache = Oracle(4, 4, 2, 2)
    assert cache.admit(0, text(5)).ok and cache.admit(1, text(5)).ok
    blocks = [cache.rows[row].tables[0][0] for row in (0, 1)]
    assert cache.commit([text(5)] * 2, [5, 5], seqs=[1, 0]).ok
    assert [cache.rows[row].tables[0][0] for row in (0, 1)] == [blocks[1]] * 2


def test_a_request_that_comes_back_states_what_it_stated():
    """Its generated tokens keep their priority, though they are admitted with its prompt."""
    watched = watch(num_blocks=4, rows=2, options=Options(reserve="num_tokens", k=1, chunk=8))
    stated = Retention([(0, None, Priority(80))], Priority(20))
    watched.submit(Ask(text(4, 10), 17, priority=1), Ask(text(4, 20), 17, retention=stated))
    request = watched.scheduler.requests[1]
    while request.stage != Stage.RUNNING or not request.preemptions:
        watched.step()
    table = watched.cache.rows[watched.scheduler.rows.index(request)].tables[0]
    assert [watched.cache.blocks[block].stated.priority for block in table[:2]] == [80, 20]
    watched.run()


# Windows.


@pytest.mark.parametrize("pinned", [0, 1])
def test_rows_with_a_window_are_counted_as_if_they_shared_nothing(pinned):
    """Two rows hold the same blocks. When one drops them, the other still holds them."""
    for blocks, number in ((5, 1), (6, 2)):  # each may need ceil((3 + 1) / 2) + 1
        watched = watch(40, 2, options=Options(k=1, chunk=1), windows=[(4, 0, blocks + pinned)])
        watched.submit(Ask([*text(6), 90], 9))
        watched.run()
        rng = random.Random(1)
        while len(watched.pins[1]) != pinned:
            watched.pin(rng)
        watched.submit(Ask([*text(6), 91], 12), Ask([*text(6), 92], 12))
        assert len(watched.step().admitted) == number
        watched.run()


def test_a_short_request_needs_less_than_a_window_sees():
    """The next token of a long request sees 7 tokens, in up to 3 blocks."""
    watched = watch(windows=[(8, 0, 2)], options=Options(k=1, chunk=1))
    statuses = [watched.scheduler.submit([Ask([1], max_tokens)])[0][0] for max_tokens in (10, 9)]
    assert statuses == [Status.NO_BLOCKS, Status.OK]


def test_a_chunk_without_blocks_stalls_and_then_others_are_preempted():
    options = Options(reserve="num_tokens", k=1, chunk=4, chunk_rows=4)
    watched = watch(40, 4, rows=3, options=options, windows=[(8, 0, 4)])
    first, *others = watched.submit(*(Ask(text(16, 40 * number), 20) for number in range(3)))
    reports = []
    while not watched.idle:
        reports.append(watched.step())
    stalls = [number for number, report in enumerate(reports) if report.out_of_blocks]
    assert stalls and reports[stalls[0] + 1].preempted
    assert first.preemptions == 0 and sum(other.preemptions for other in others)
    watched.run()


# Recurrent layers.


def test_a_prompt_goes_on_at_the_end_of_a_block_with_a_snapshot():
    """Of the first text's three snapshots two are of blocks that it has gone past. Another text takes the first."""
    first, other = text(14), text(6, 50)
    watched = watch(recurrent=4, partial_reuse=False, options=Options(k=4, chunk=4))
    for tokens, cached in ((first, 0), (other, 0), ([*first[:7], 90], 0), ([*first, 91], 12)):
        watched.submit(Ask(tokens, len(tokens) + 1))
        assert watched.step().admitted[0][2] == cached
        watched.run()


def test_a_row_needs_the_snapshots_of_a_chunk_and_that_before_it():
    """A chunk of 8 tokens is in up to 3 blocks of 4. After each step the row holds one, or two while it decodes."""
    for snapshots, status in ((2, Status.NO_BLOCKS), (3, Status.OK)):
        watched = watch(recurrent=snapshots, partial_reuse=False, options=Options(k=4, chunk=8))
        assert [status] == [status for status, *_ in watched.scheduler.submit([Ask(text(13), 24)])]
    while not watched.idle:
        watched.step()
        assert watched.cache.counts(1)["active"] <= 2


# Samples.


def family(number, tokens, max_tokens, **more):
    return [Ask(tokens, max_tokens, seed=seed, sample_of=min(seed, 1) - 1, **more) for seed in range(number)]


def test_samples_fork_when_their_prompt_is_computed():
    watched = watch(rows=4, options=Options(k=4, chunk=3))
    parent, *samples = watched.submit(*family(3, text(6), 12))
    (other,) = watched.submit(Ask([50], 9))
    report = watched.step()
    assert admitted(report) == slots(parent, other)
    assert watched.scheduler.rows == [parent, *samples, other]
    assert report.chunks == {0: 3} and set(report.chosen) == {3}
    report = watched.step()
    assert report.chunks == {0: 3} and set(report.chosen) == {0, 1, 2, 3}
    assert watched.cache.counts()["active"] == 2 + 1
    assert [sample.cached for sample in samples] == [6, 6]
    watched.run()
    assert watched.computed == 6 + 3 * 5 + 8


def test_the_last_token_of_a_prompt_that_samples_wait_for_is_a_chunk():
    watched = watch(options=Options(k=4, chunk=8))
    watched.submit(Ask([*text(7), 90], 10))
    watched.run()
    watched.submit(*family(2, text(8), 20))
    report = watched.step()
    assert report.admitted == [(0, 0, 7)] and report.chunks == {0: 1} and set(report.chosen) == {0, 1}


def test_samples_are_counted_as_copying_the_last_block_all():
    """ceil(11 / 4) = 3 blocks; a sample adds 3 - 1, since one is whole; and one more for the copies."""
    for blocks, status in ((5, Status.NO_BLOCKS), (6, Status.OK)):
        watched = watch(blocks)
        watched.submit(*family(2, text(6), 12))
        assert watched.happened[f"submit {status.name}"] == 2
        watched.run()


def test_until_samples_fork_their_copies_are_counted_too():
    """A prompt of part of a block has 2 blocks at the end. A sample adds 2, the copies 1; another request wants 1."""
    for blocks, window, number in ((5, 6, 1), (6, 5, 1), (6, 6, 2)):
        watched = watch(blocks, rows=4, options=Options(k=1, chunk=1), windows=[(8, 0, window)])
        watched.submit(*family(2, text(3), 8), Ask([50], 4))
        assert len(watched.step().admitted) == number
        watched.run()


def test_more_samples_than_rows_are_refused():
    asks = family(4, text(6), 12)
    assert [status for status, *_ in watch().scheduler.submit(asks)] == [Status.ROW_FULL] * 4
    assert [status for status, *_ in watch().scheduler.submit(asks[:3])] == [Status.OK] * 3


def test_samples_need_a_parent_with_the_same_prompt_that_is_nobodys_sample():
    asks = [*family(2, [1, 2], 5), Ask([1, 2], 5, sample_of=1), Ask([1, 3], 5, sample_of=0), Ask([1, 2], 5, 0, 1, 2)]
    statuses = [status for status, *_ in watch().scheduler.submit([*asks, Ask([1, 2], 5, sample_of=4)])]
    bad = Status.BAD_REQUEST
    assert statuses == [Status.OK, Status.OK, bad, bad, Status.OK, bad]  # the last one has another namespace


@pytest.mark.parametrize("running", [True, False])
def test_samples_of_a_cancelled_prompt_go_on_by_themselves(running):
    watched = watch(options=Options(k=1, chunk=2))
    parent, *samples = watched.submit(*family(3, text(6), 12))
    if running:
        watched.step()
    assert watched.cancel(parent)
    if running:
        assert watched.scheduler.rows == [parent, *samples]
    report = watched.step()
    assert [sample.parent for sample in samples] == [None, None]
    assert admitted(report) == slots(samples[0])  # the other waits for its prefix
    watched.run()


def test_a_preempted_prompt_takes_its_samples_along():
    watched = watch(num_blocks=6, rows=4, options=Options(reserve="num_tokens", k=1, chunk=1))
    (first,) = watched.submit(Ask(text(8, 50), 20, priority=1))
    while first.num_tokens < 12:
        watched.step()
    parent, sample = watched.submit(*family(2, text(8), 9))
    watched.step()
    assert [parent.stage, sample.stage] == [Stage.RUNNING] * 2
    while not parent.preemptions:
        watched.step()
    assert [parent.stage, sample.stage] == [Stage.WAITING] * 2 and sample.parent is parent
    assert sample.preemptions == 0
    watched.run()
    assert parent.finish == sample.finish == Finish.LENGTH


# A whole batch at once.


def test_the_cached_tokens_of_prompts_that_arrive_at_once():
    prompts = [[*text(16, 100 * (number % 4)), 900 + number] for number in range(16)]
    outputs = [[number] * 4 for number in range(16)]
    for waits, wanted in ((True, 12 * 16), (False, 8 * 16)):  # the first four prompts are computed, or the first eight
        options = Options(k=4, wait_for_prefix=waits, max_skips=16)
        assert cached_tokens(Oracle(200, 4, 8, 6), options, prompts, outputs) == wanted


# At random.


def draw(rng, reserve, waits, tight, recurrent=False):
    """A scheduler with random options. The cache has blocks for one row, some more, or plenty; so of snapshots."""
    size, rows, most = rng.choice((2, 4, 5)), rng.choice((2, 3, 4)), rng.choice((4, 6))
    chunk, k = (rng.choice((1, 2)), 1) if tight else (rng.choice((1, 3, 8)), rng.choice((1, min(4, size), size)))
    options = Options(
        reserve, chunk, rng.choice((1, 2, 4)), rng.choice((None, rows + 1, rows + 5)), rng.choice(("fcfs", "equal")), k,
        rng.choice((1, 4)), rng.choice((0, 0, 1)), rng.choice((1, 3, 64)), rng.choice((1, 2, 4)), waits,
        rng.choice((1, 1, 2)),
    )  # fmt: skip
    windows = []
    if tight or rng.random() < 0.4:
        window, sinks = rng.choice((2, 3, 6)), rng.choice((0, 3))
        seen = -(-(window - 2 + max(chunk, k)) // size) + 1 - (-sinks // size)
        windows = [(window, sinks, min(most, seen) + rng.choice((0, 1, 2, 3, 5, 20)))]
    blocks = most + (40 if tight else rng.choice((0, 0, 1, 2, 5, 40)))
    cache = Refusing if reserve == "num_tokens" and rng.random() < 0.2 else Oracle
    kinds = {"windows": windows, "partial_reuse": rng.random() < 0.8}
    slots = rng.choice((5, 9))
    if recurrent:
        seen = -(-max(chunk, k) // size) + 1
        kinds |= {"partial_reuse": False, "recurrent": min(most, seen) + rng.choice((0, 1, 2, 3, 5, 20))}
    watched = watch(blocks, size, rows, most, slots, options, cache, **kinds)
    if cache is Refusing:
        watched.cache.rng, watched.cache.often = rng, 0.1
    elif rng.random() < 0.1:  # somebody else uses a row
        assert (
            watched.cache.admit(rows - 1, [0, 1]).ok
            and watched.cache.commit([[0, 1]] * rows, [0] * (rows - 1) + [2]).ok
        )
        watched.others.append(rows - 1)
    return watched


def batch(rng, watched, documents, tight):
    """A request, perhaps with samples. Most begin like others."""
    longest = watched.cache.max_blocks_per_seq * watched.cache.block_size
    tokens = rng.choice(documents)[: rng.randint(0, longest)]
    tokens = (tokens + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))])[:longest]
    stop, namespace = rng.choice(((), (), (1,))), rng.choice((0, 0, 1))
    samples = rng.randint(1, 3) if rng.random() < (0.8 if tight else 0.25) else 0
    for number in range(1 + samples):
        max_tokens = min(len(tokens) + rng.randint(1, longest), longest + 1)
        yield Ask(
            tokens,
            max_tokens,
            rng.choice((0, 0, 1, 2)),
            namespace,
            rng.randrange(9),
            stop,
            sample_of=min(number, 1) - 1,
        )


def history(seed, reserve, waits, tight=False, recurrent=False):
    """Runs a random history: requests come, some are cancelled, and pins hold blocks."""
    rng = random.Random(f"{seed} {reserve} {waits}")
    watched = draw(rng, reserve, waits, tight, recurrent)
    longest = watched.cache.max_blocks_per_seq * watched.cache.block_size
    documents = [[rng.randrange(VOCAB) for _ in range(longest - 2)] for _ in range(2)]
    pins = rng.random() < 0.3 and not tight
    for _ in range(rng.randint(3, 12)):
        for _ in range(rng.choice((0, 0, 1, 3))):
            watched.submit(*batch(rng, watched, documents, tight))
        if rng.random() < 0.1 and watched.asks:
            watched.cancel(rng.choice(list(watched.asks)))
        if pins and rng.random() < 0.3:
            watched.pin(rng)
        watched.step()
    watched.run()
    ends = collections.Counter(request.finish.name for request in watched.asks)
    if not pins and not watched.others and not isinstance(watched.cache, Refusing):
        assert not ends["NO_BLOCKS"]
        if reserve != "num_tokens":
            assert not any(watched.happened[what] for what in ("preempted", "refused", "out_of_blocks"))
    return watched.happened + ends


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "computes twice"])
@pytest.mark.parametrize("reserve", ["max_tokens", "num_tokens", "batch"])
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 600), marks=pytest.mark.slow)], ids=["", "more"])
def test_histories(seeds, reserve, waits):
    """Each accepted request ends once, in bounded time, with the tokens that it has alone, and no block is held."""
    happened = sum((history(seed, reserve, waits) for seed in seeds), collections.Counter())
    expected = {"mixed", "block of steps", "forked", "STOP", "LENGTH", "CANCELLED", "NO_BLOCKS", "submit NO_BLOCKS"}
    assert expected | ({"preempted", "out_of_blocks", "refused"} if reserve == "num_tokens" else set()) <= set(
        +happened
    )


@pytest.mark.parametrize("reserve", ["max_tokens", "num_tokens", "batch"])
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 600), marks=pytest.mark.slow)], ids=["", "more"])
def test_histories_with_recurrent_layers(seeds, reserve):
    """With and without windows beside them, few blocks and few snapshots."""
    both = itertools.product(seeds, (False, True))
    happened = sum(
        (history(seed, reserve, seed % 2 == 0, *tight, True) for seed, *tight in both), collections.Counter()
    )
    expected = {"mixed", "block of steps", "forked", "STOP", "LENGTH"}
    assert expected | ({"preempted", "out_of_blocks"} if reserve == "num_tokens" else set()) <= set(+happened)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)], ids=["", "more"])
def test_histories_of_samples_and_windows_with_few_blocks(seeds):
    """Even where the most blocks are shared, "max_tokens" never preempts."""
    happened = sum((history(seed, "max_tokens", seed % 2 == 0, tight=True) for seed in seeds), collections.Counter())
    assert 2 * happened["forked"] > len(seeds)


class Single(Scheduler):
    """A scheduler without blocks of steps: each row that decodes reserves one token and computes it."""

    def grow(self, report, single, log_room, steps=None):
        decoding = self.decoding()
        full = [row in decoding and not self._reserved(row) for row in range(len(self.rows))]
        ok = self._record(self.cache.extend(full, full)).ok
        report.n, self.refused = int(ok), int(not ok)

    def compute_block(self, report):
        report.decoded = [row for row in self.decoding() if self._reserved(row)]
        self.steps += bool(report.decoded)
        for row in report.decoded:
            self._choose(row, self.steps, report)
        self._commit({}, dict.fromkeys(report.decoded, 1))
        self.chunks_deferred = self.chunks_deferred + 1 if self.prefilling() else 0


def steps_of(kind, *args, monkeypatch):
    """The reports of a kind of scheduler in each step of a history, with the cache's events."""
    found = []

    def step(watched, step=Watch.step):
        found.append((step(watched), watched.scheduler.events))
        return found[-1][0]

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "step", step)
        patch.setitem(globals(), "Scheduler", kind)
        history(*args, tight=True)
    return found


@pytest.mark.parametrize("reserve", ["max_tokens", "num_tokens", "batch"])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.long)], ids=["", "more"])
def test_a_scheduler_whose_blocks_are_single_steps_is_one_without_blocks(seeds, reserve, monkeypatch):
    for seed in seeds:
        single, blocks = (steps_of(kind, seed, reserve, True, monkeypatch=monkeypatch) for kind in (Single, Scheduler))
        assert single == blocks
        assert all(report.n <= 1 for report, _ in blocks)
