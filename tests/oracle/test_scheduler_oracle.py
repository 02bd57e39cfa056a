# SPDX-License-Identifier: Apache-2.0
"""Stories of the scheduler, told by the one in plain Python and by the library; then laws of the first by itself.

Random histories of both: `test_machine_serving.py`. More of the library: `tests/unit/serving/test_scheduler.py`.
"""

import collections
import itertools
import random

import pytest

from tests.oracle import serving
from tests.oracle.blocks import Result, Status
from tests.oracle.bytes_machine import SIZE
from tests.oracle.cache import Oracle
from tests.oracle.histories import VOCAB, Watch, choose
from tests.oracle.requests import Ask, Finish, Options, Stage
from tests.oracle.scheduler import Scheduler
from tests.oracle.serving import BLOCKS, COLUMNS, OPTIONS, ROWS, SLOTS, TENANTS, Both, oracle_options

# Stories.

LONGEST = COLUMNS * SIZE  # tokens of a row


def on_the_oracle(name, num_blocks=BLOCKS):
    cache = Oracle(num_blocks, SIZE, ROWS, COLUMNS)
    return Watch(Scheduler(cache, oracle_options(OPTIONS[name]), serving.choose, [LONGEST + 1] * SLOTS))


def on_both(name, num_blocks=BLOCKS):
    """Each step of the library's scheduler is the oracle's, with every byte compared."""
    return Both(OPTIONS[name], "full", num_blocks, seed=0)


def ask(tokens, more, priority=0, **options):
    """A request of the tenant that its first token tells the model."""
    return Ask(tokens, len(tokens) + more, priority, int(TENANTS[tokens[0]]), **options)


def family(number, tokens, more):
    """Samples of one prompt."""
    return [ask(tokens, more, seed=seed, sample_of=min(seed, 1) - 1) for seed in range(number)]


def slots(*requests):
    return [request.slot for request in requests]


def admitted(report):
    return [slot for slot, *_ in report.admitted]


def the_last_in_order_is_preempted_and_keeps_its_turn(begin):
    """Three rows of two blocks each fill the cache. Each then wants one more."""
    story = begin("num_tokens", 6)
    first, last, second = story.submit(ask([0] * 8, 6, 1), ask([1] * 8, 6), ask([2] * 8, 6, 1))
    assert admitted(story.step()) == slots(first, second, last)
    while not (report := story.step()).preempted:
        pass
    assert report.preempted == slots(last) and not report.admitted
    assert (last.stage, last.preemptions, last.arrival) == (Stage.WAITING, 1, 1)
    story.finish()
    assert last.ended > max(first.ended, second.ended) and first.preemptions == 0


def a_block_of_steps_is_shorter_while_somebody_waits(begin):
    story = begin("num_tokens")
    story.submit(ask([0], 4), ask([1], 19), ask([2], 19))
    *_, waiting = story.submit(ask([1, 2], 19), ask([2, 1], 9))
    assert story.step().n == 1  # an admission was tried
    report = story.step()
    assert (report.n, len(report.chosen[1])) == (2, 2) and waiting.stage == Stage.WAITING
    while waiting.stage == Stage.WAITING:
        report = story.step()
    assert report.n == 1 and report.admitted
    while not (report := story.step()).released and not (report.n == 4 and not report.mixed):
        pass
    assert report.n == 4
    story.finish()


def reserving_leaves_blocks_for_all_that_running_rows_can_become(begin, name="max_tokens", number=2):
    """Each request needs one block at first and three at its end."""
    story = begin(name, 8)
    story.submit(*(ask([first], 9) for first in range(3)))
    assert len(story.step().admitted) == number
    story.finish()


def without_reserving_more_rows_run(begin):
    reserving_leaves_blocks_for_all_that_running_rows_can_become(begin, "num_tokens", 3)


def a_batch_is_admitted_when_no_row_runs(begin):
    story, reports = begin("batch"), []
    first = story.submit(ask([0], 2), ask([1], 5), ask([2], 2))
    second = story.submit(ask([1, 2], 2), ask([2, 1], 2))
    while not all(request.over for request in first + second):
        reports.append(story.step())
    begun = [report for report in reports if report.admitted]
    assert list(map(admitted, begun)) == [slots(*first, second[0]), slots(second[1])]
    story.finish()


def few_are_passed_over_in_one_step(begin):
    """Prompts of five blocks do not fit beside a row, and after two of them nobody looks any further."""
    for big, number in (([[1] * LONGEST], 1), ([[1] * LONGEST, [2] * LONGEST], 0)):
        story = begin("num_tokens", 6)
        story.submit(ask([0] * 8, 9, 1))
        while story.step().mixed:
            pass
        story.submit(*(ask(tokens, 1) for tokens in big), ask([1], 2))
        assert len(story.step().admitted) == number
        story.finish()


def samples_fork_when_their_prompt_is_computed(begin):
    story = begin("num_tokens")
    parent, *samples = story.submit(*family(3, [0] * 8, 6))
    (other,) = story.submit(ask([1], 8))
    report = story.step()
    assert admitted(report) == slots(parent, other) and report.chunks == {0: 6} and set(report.chosen) == {3}
    assert story.scheduler.rows == [parent, *samples, other]
    report = story.step()
    assert report.chunks == {0: 2} and set(report.chosen) == {0, 1, 2, 3}
    assert [sample.cached for sample in samples] == [8, 8] and story.scheduler.cache.counts()["active"] == 2 + 1
    story.finish()
    assert len({tuple(request.tokens) for request in (parent, *samples)}) == 1  # the model is greedy


def samples_of_a_cancelled_prompt_go_on_by_themselves(begin, is_running=True):
    story = begin("num_tokens")
    parent, *samples = story.submit(*family(3, [0] * 12, 6))
    if is_running:
        story.step()
    assert story.cancel(parent) and not story.cancel(parent)
    report = story.step()
    assert [sample.parent for sample in samples] == [None, None]
    assert admitted(report) == slots(samples[0])  # the other waits for its prefix
    story.finish()


def samples_of_a_waiting_prompt_that_is_cancelled_do_so_too(begin):
    samples_of_a_cancelled_prompt_go_on_by_themselves(begin, is_running=False)


def a_stop_token_ends_a_row_inside_a_block_of_steps(begin):
    """The model's third token after the prompt is its first 0."""
    story = begin("num_tokens")
    short, other = story.submit(ask([1, 0], 19, stop=[0]), ask([2], 19))
    story.finish()
    assert (short.finish, short.tokens) == (Finish.STOP, [1, 0, 1, 1, 0])
    assert (short.first_token, short.ended, other.ended) == (1, 3, 19)


STORIES = {
    the_last_in_order_is_preempted_and_keeps_its_turn: pytest.mark.long,
    a_block_of_steps_is_shorter_while_somebody_waits: pytest.mark.long,
    without_reserving_more_rows_run: pytest.mark.long,
    few_are_passed_over_in_one_step: pytest.mark.long,
    samples_fork_when_their_prompt_is_computed: pytest.mark.long,
    samples_of_a_cancelled_prompt_go_on_by_themselves: pytest.mark.long,
    samples_of_a_waiting_prompt_that_is_cancelled_do_so_too: pytest.mark.long,
    a_stop_token_ends_a_row_inside_a_block_of_steps: pytest.mark.long,
    # A program each.
    reserving_leaves_blocks_for_all_that_running_rows_can_become: pytest.mark.slow,
    a_batch_is_admitted_when_no_row_runs: pytest.mark.slow,
}


@pytest.mark.parametrize("story", [pytest.param(story, id=story.__name__) for story in STORIES])
def test_a_story_on_the_oracle(story):
    story(on_the_oracle)


@pytest.mark.parametrize("story", [pytest.param(one, id=one.__name__, marks=mark) for one, mark in STORIES.items()])
def test_a_story_on_the_library(story):
    story(on_both)


# Laws of the oracle.

GREEDY = Options(k=1)


def watch(num_blocks=40, size=4, rows=3, most=6, slots=9, options=GREEDY, cache=Oracle, **more):
    """A `Watch` over a scheduler with an empty cache."""
    max_tokens = (most * size + 1,) * slots
    return Watch(Scheduler(cache(num_blocks, size, rows, most, **more), options, choose, max_tokens))


def text(length, start=0):
    """Tokens that occur nowhere else, unless they start with the same number."""
    return list(range(start, start + length))


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


def test_samples_need_a_parent_with_the_same_prompt_that_is_nobodys_sample():
    first, sample = Ask([1, 2], 5), Ask([1, 2], 5, sample_of=0)
    asks = [first, sample, Ask([1, 2], 5, sample_of=1), Ask([1, 3], 5, sample_of=0), Ask([1, 2], 5, 0, 1, 2)]
    statuses = [status for status, *_ in watch().scheduler.submit([*asks, Ask([1, 2], 5, sample_of=4)])]
    bad = Status.BAD_REQUEST
    assert statuses == [Status.OK, Status.OK, bad, bad, Status.OK, bad]  # the last one has another namespace


def test_a_preempted_prompt_takes_its_samples_along():
    watched = watch(num_blocks=6, rows=4, options=Options(reserve="num_tokens", k=1, chunk=1))
    (first,) = watched.submit(Ask(text(8, 50), 20, priority=1))
    while first.num_tokens < 12:
        watched.step()
    parent, sample = watched.submit(Ask(text(8), 9), Ask(text(8), 9, sample_of=0))
    watched.step()
    assert [parent.stage, sample.stage] == [Stage.RUNNING] * 2
    while not parent.preemptions:
        watched.step()
    assert [parent.stage, sample.stage] == [Stage.WAITING] * 2 and sample.parent is parent
    assert sample.preemptions == 0
    watched.finish()
    assert parent.finish == sample.finish == Finish.LENGTH


def test_a_request_that_is_alone_and_does_not_fit_is_over():
    """Its blocks were free when it was submitted. Then the blocks that others have left are pinned."""
    watched = watch(num_blocks=4, options=Options(k=1, chunk=8))
    watched.submit(Ask(text(8, 50), 9))
    watched.finish()
    (request,) = watched.submit(Ask(text(4), 16))
    while request.num_tokens < 7:
        watched.step()
    rng = random.Random(3)
    while len(watched.pins[0]) < 2:
        watched.pin(rng)
    while not request.over:
        watched.step()
    assert request.finish == Finish.NO_BLOCKS and request.num_tokens == 9 and not any(watched.scheduler.rows)
    watched.finish()


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
    watched.finish()
    assert first.finish == Finish.NO_BLOCKS
    assert second.finish == Finish.LENGTH  # `admit`, which is not refused, reserves one token each time


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_documents_that_many_ask_about_are_computed_once(chunk):
    documents = [text(16, 100 * number) for number in range(3)]
    asks = [Ask([*document, 500 + number, 7], 22) for number in range(6) for document in documents]
    computed = {}
    for waits in (True, False):
        watched = watch(200, rows=8, slots=18, options=Options(k=4, chunk=chunk, max_skips=18, wait_for_prefix=waits))
        watched.submit(*asks)
        watched.finish()
        computed[waits] = watched.computed
    generated = sum(ask.max_tokens - len(ask.tokens) - 1 for ask in asks)
    assert computed[True] == 3 * 16 + 18 * 2 + generated < computed[False]


@pytest.mark.parametrize("reserve", ["max_tokens", "num_tokens", "batch"])
@pytest.mark.parametrize("max_deferrals", [1, 4])
@pytest.mark.parametrize("why", ["priority", "size", "prefix"])
def test_nobody_starves(reserve, max_deferrals, why):
    """At every step requests come that are more important, or smaller, or need not wait for a prefix."""
    options = Options(reserve, 1, 1, k=1, max_deferrals=max_deferrals, max_skips=2, watermark=1)
    watched = watch(num_blocks=7 if why == "size" else 12, rows=4, slots=12, options=options)
    victim, bound = None, 80 + 40 * max_deferrals
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
        assert watched.passed[victim] == max_deferrals
    watched.finish()


def test_nobody_starves_in_a_row():
    """It never waited for a row. Then the prompts of more important requests take all chunks."""
    watched = watch(rows=4, options=Options(chunk=1, k=1, max_deferrals=4))
    (victim,) = watched.submit(Ask(text(9), 12))
    for _ in range(80):
        watched.step()
        while len(watched.waiting) < 3:
            watched.submit(Ask([100 + watched.scheduler.arrivals, 99, 98, 97], 5, 1))
    assert victim.finish == Finish.LENGTH and victim.passed == 0
    watched.finish()


def test_nobody_starves_by_being_preempted():
    """More important requests keep coming. Some run all the time, and fill the cache."""
    options = Options("num_tokens", 4, k=1, max_deferrals=4, max_skips=2)
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
        watched.finish()


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
        watched.finish()


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


@pytest.mark.parametrize("pinned", [0, 1])
def test_rows_with_a_window_are_counted_as_if_they_shared_nothing(pinned):
    """Two rows hold the same blocks. When one drops them, the other still holds them."""
    for blocks, number in ((5, 1), (6, 2)):  # each may need ceil((3 + 1) / 2) + 1
        watched = watch(40, 2, options=Options(k=1, chunk=1), windows=[(4, 0, blocks + pinned)])
        watched.submit(Ask([*text(6), 90], 9))
        watched.finish()
        rng = random.Random(1)
        while len(watched.pins[1]) != pinned:
            watched.pin(rng)
        watched.submit(Ask([*text(6), 91], 12), Ask([*text(6), 92], 12))
        assert len(watched.step().admitted) == number
        watched.finish()


def test_a_row_needs_the_snapshots_of_a_chunk_and_that_before_it():
    """A chunk of 8 tokens is in up to 3 blocks of 4. After each step the row holds one, or two while it decodes."""
    for snapshots, status in ((2, Status.NO_BLOCKS), (3, Status.OK)):
        watched = watch(recurrent=snapshots, partial_reuse=False, options=Options(k=4, chunk=8))
        assert [status] == [status for status, *_ in watched.scheduler.submit([Ask(text(13), 24)])]
    while not watched.idle:
        watched.step()
        assert watched.cache.counts(1)["active"] <= 2


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
    watched.finish()
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


@pytest.mark.slow
@pytest.mark.parametrize("reserve", ["max_tokens", "num_tokens", "batch"])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.long)], ids=["", "more"])
def test_a_scheduler_whose_blocks_are_single_steps_is_one_without_blocks(seeds, reserve, monkeypatch):
    for seed in seeds:
        single, blocks = (steps_of(kind, seed, reserve, True, monkeypatch=monkeypatch) for kind in (Single, Scheduler))
        assert single == blocks
        assert all(report.n <= 1 for report, _ in blocks)
