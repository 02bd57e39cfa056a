# SPDX-License-Identifier: Apache-2.0
"""The contract of all ways of serving: same requests, same answers, events, refusals and caches.

The other files of tests say only what is of one way alone. The model and its answers without a cache are in
`serving_kit.py`, the ways in `ways.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax import Namespaces, Sampling
from kvjax.events import Listeners, listeners
from kvjax.serving import Engine, EngineError, GenerationInterrupted, Request, Scheduler, driver
from kvjax.stores import DiskStore
from tests.serving_kit import (
    BASE,
    BLOCKS,
    DIM,
    HOST,
    LENGTH,
    MODEL,
    NEW,
    ROWS,
    SIZE,
    VOCAB,
    ask,
    assert_alike,
    assert_scored,
    ctrl_c_acts,
    make_cache,
    make_spec,
    press,
    wanted,
)
from tests.unit.serving.ways import WAYS, Session

__all__ = ["ctrl_c_acts"]
DOCUMENT = np.random.default_rng(1).integers(0, VOCAB, 30).tolist()


def ways(but: str = "") -> Any:
    """A test of each way of serving, but for some."""
    names = [name for name in WAYS if name not in but.split()]
    return pytest.mark.parametrize("way", [pytest.param(name, marks=mark_of(name)) for name in names])


def mark_of(way: str) -> Any:
    """The ways that compile the loop once more: for a second device, or with the rollout around it."""
    return pytest.mark.long if way in ("Replicas", "rollout", "drafts") else ()


# Requests that are served: as without a cache, and the second time with all of the prompt from the cache.


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests, and why they end.

    Attributes:
      requests: of a run.
      finish: of all outputs, or of each.
      but: ways that do not take them, or to which they are others.
      num_blocks: of the cache.
      options: of the run, beside those of `BASE`.
    """

    requests: list[Request]
    finish: str | list[str] = "length"
    but: str = ""
    num_blocks: int = BLOCKS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


PROMPTS = [[5], [*DOCUMENT[:9], 1, 2], [*DOCUMENT[:9], 3, 4], DOCUMENT[:13]]
GREEDY = [ask(prompt) for prompt in PROMPTS]
STOP = 27  # the second token after the second prompt
SAMPLINGS = [Sampling(1.5), Sampling(0.8, top_k=3), Sampling(1.2, top_p=0.7), Sampling(1.0, min_tokens=NEW)]
SAMPLED = [ask(prompt, sampling=sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
MIN_P = [one.replace(min_p=share) for one, share in zip(SAMPLINGS, [0.2, 0.05, 0.4, 0.0], strict=True)]
SEEDS = [3, 2**32 - 1, np.int64(2**40 + 5), -7]


def changed(requests: list[Request], **columns: Any) -> list[Request]:
    """Requests with a field of each replaced by its own of a list."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [dataclasses.replace(request, **row) for request, row in zip(requests, rows, strict=True)]


CASES = {
    "greedy": Case(GREEDY),
    "prompts of whole blocks": Case([ask(DOCUMENT[: 2 * SIZE]), ask(DOCUMENT[:SIZE])]),
    "stop tokens": Case([ask(prompt, stop_tokens=[STOP, 29]) for prompt in PROMPTS[1:]], ["stop", "length", "length"]),
    "no stop before min_tokens": Case([ask(PROMPTS[1], stop_tokens=[STOP], sampling=Sampling(min_tokens=NEW))]),
    "samplings without seeds": Case(SAMPLED, but="Engine"),  # whose seed is 0 then
    "seeds": Case(changed(SAMPLED, seed=SEEDS), but="generate"),
    "samples": Case([ask(PROMPTS[1], sampling=SAMPLINGS[0], samples=3, seed=2**32 - 2)], but="generate"),
    "samples of a key": Case([ask(PROMPTS[1], sampling=SAMPLINGS[0], samples=3, seed=jax.random.key(3))]),
    "samples of a key's words": Case([ask(PROMPTS[2], sampling=SAMPLINGS[0], samples=3, seed=jax.random.PRNGKey(3))]),
    "priorities": Case(changed(GREEDY, priority=[0, -2, 2**31 - 1, 1]), but="generate rollout"),
    "a full row": Case([ask(DOCUMENT), ask([7])], ["row_full", "length"], but="rollout"),
    "few blocks": Case([ask(DOCUMENT[:13], max_new_tokens=12), ask([7])], ["no_blocks", "length"], "rollout", 5),
    "rows that wait for blocks": Case([ask([n] * 9, max_new_tokens=9) for n in range(4)], "length", "rollout", 7),
    "more samples than rows": Case(
        [ask(PROMPTS[1], sampling=SAMPLINGS[0], samples=5), ask([7])], but="generate Engine rollout"
    ),
    "steps that Python calls": Case(GREEDY, but="generate rollout", options={"loop": False}),
    "preempted rows": Case(
        changed(SAMPLED, seed=SEEDS, max_new_tokens=[12] * 4), "length", "generate rollout", 8,
        {"scheduler": Scheduler(chunk=8, reserve="num_tokens")},
    ),
    "min-p": Case(changed(SAMPLED, sampling=MIN_P, seed=SEEDS), but="generate"),
    "preempted rows, some with a min-p": Case(
        changed(SAMPLED, sampling=[*MIN_P[:2], *SAMPLINGS[2:]], seed=SEEDS, max_new_tokens=[12] * 4), "length",
        "generate rollout", 8, {"scheduler": Scheduler(chunk=8, reserve="num_tokens")},
    ),
    "samples with a min-p": Case(
        [ask(PROMPTS[1], sampling=MIN_P[0], samples=3, seed=9), ask([7], sampling=MIN_P[0], seed=4)],
        but="generate rollout",
    ),
    "log-probabilities of the sampling": Case(
        changed(SAMPLED, seed=SEEDS), but="generate", options={"logprobs": "sampling"}
    ),
}  # fmt: skip


def mark_of_case(name: str, way: str) -> Any:
    """Cases with a program of their own, which all batches share."""
    if name in ("steps that Python calls", "log-probabilities of the sampling") or (name, way) == (
        "samples",
        "rollout",
    ):
        return pytest.mark.slow
    return of_own_programs(way) if name.startswith("preempted rows") or "min-p" in name else mark_of(way)


def of_own_programs(way: str) -> Any:
    """The mark of a case with a program of its own. Other ways than batches need one more, by night."""
    return pytest.mark.long if way in ("generate", "stream", "run_batch") else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=mark_of_case(name, way))
        for name, case in CASES.items()
        for way in WAYS
        if way not in case.but.split()
    ],
)
def test_answers_are_those_without_a_cache(name, way):
    case, session = CASES[name], WAYS[way](CASES[name].num_blocks)
    expected = wanted(case.requests, most_tokens=min(case.num_blocks * SIZE, LENGTH), **case.options)
    finishes = case.finish if isinstance(case.finish, list) else [case.finish] * len(expected)
    assert [output.finish for output in expected] == finishes
    for turn in range(2):
        outputs = session.run(case.requests, **case.options)
        assert_alike(outputs, expected, has_top=way != "rollout")
        if name.startswith("preempted rows") and way != "Replicas":
            assert any(output.preemptions for output in outputs)
        if turn and case.num_blocks == BLOCKS:
            assert all(output.cached_tokens >= output.prompt_tokens - 1 for output in outputs)


SCORED = changed(
    [ask(prompt) for prompt in [*PROMPTS, DOCUMENT[:21]]], prompt_logprobs_from=[0, 4, None, 13, 0],
    max_new_tokens=[2, NEW, NEW, 0, 0],
)  # fmt: skip


@pytest.mark.long
@ways(but="rollout")
def test_prompts_are_scored_whatever_is_cached_and_requests_go_on(way):
    session, answered = WAYS[way](), [request for request in SCORED if request.max_new_tokens]
    for turn in range(2):
        outputs = session.run(SCORED)
        for request, output in zip(SCORED, outputs, strict=True):
            assert_scored(request, output)
        assert [output.finish for output in outputs] == ["length"] * len(SCORED)
        assert_alike([output for output in outputs if output.tokens], wanted(answered))
        cached = [output.cached_tokens for output in outputs]
        assert cached[0] == cached[4] == 0 and (not turn or cached[1] == 3)  # none of the tokens that were scored


def test_samplings_and_seeds_make_a_difference():
    for name in ("seeds", "min-p", "samples", "samples of a key"):
        tokens = [tuple(output.tokens) for output in wanted(CASES[name].requests)]
        assert len(set(tokens)) == len(tokens) and tokens[0] != tuple(wanted(GREEDY)[0].tokens)


@ways(but="rollout")
def test_samples_share_their_prompt_and_end_together(way):
    """Those of `generate` are prompts, which share whole blocks."""
    (output, *others), shared = WAYS[way]().run([ask(DOCUMENT[:14], samples=3)]), 12 if way == "generate" else 14
    assert output.cached_tokens == 0 and [one.cached_tokens for one in others] == [shared] * 2
    if way != "generate":
        few, requests = WAYS[way](9), [ask([1, 2, 3], max_new_tokens=20, samples=3), ask([4])]
        assert [output.finish for output in few.run(requests)] == ["no_blocks"] * 3 + ["length"]


@ways()
def test_namespaces_share_nothing(way):
    session, prompt = WAYS[way](), DOCUMENT[:13]
    for namespaces, cached in (([1, 2, 1], [0, 0, 12]), ([2, 1, 3], [12, 12, 0])):
        outputs = session.run([ask(prompt, namespace=namespace) for namespace in namespaces])
        assert_alike(outputs, wanted([ask(prompt)] * 3), has_top=way != "rollout")
        assert [output.cached_tokens for output in outputs] == cached


@ways(but="rollout")
def test_a_prompt_that_the_whole_cache_cannot_hold_gets_no_token(way, caplog):
    first, other, second = WAYS[way](5).run([ask([1] * 24), ask([2] * 24), ask([7])])
    assert (first.finish, first.tokens, second.finish) == ("no_blocks", [], "length")
    wanted_blocks = -(-(24 + NEW) // 4)
    for output in (first, other):
        assert re.match(rf"(group 0, .*: )?{wanted_blocks} blocks wanted for {24 + NEW} tokens, 5 in", output.reason)
    assert second.reason is None
    lines = [record.getMessage() for record in caplog.records if "no_blocks" in record.getMessage()]
    assert 1 <= len(lines) <= (2 if way == "Replicas" else 1)  # each replica has a run
    end = f"ended with no_blocks: {first.reason}; only the first such request of a run is reported"
    assert all(line.endswith(end) for line in lines)


@ways(but="Engine")
def test_a_prompt_that_cannot_be_served_ends_with_the_reason(way):
    prompts, finishes = [[], [2, -1]], ["bad_request"] * 2
    if way != "rollout":  # it knows no vocabulary, and its prompts have one width
        prompts, finishes = [*prompts, [2, VOCAB], [1] * (LENGTH + 1)], [*finishes, "bad_request", "row_full"]
    *refused, output = WAYS[way]().run([ask(prompt) for prompt in [*prompts, [5]]])
    assert [one.finish for one in refused] == finishes and not any(one.tokens for one in refused)
    assert_alike([output], wanted(GREEDY[:1]), has_top=way != "rollout")


@pytest.mark.long
def test_an_engine_says_so_at_once():
    session = WAYS["Engine"]()
    for fields, message in [
        ({"prompt": []}, "prompt: got [], wanted tokens of 0..30, at least one"),
        ({"prompt": [-1]}, "prompt: got [-1], wanted tokens of 0..30, at least one"),
        ({"prompt": [2, VOCAB]}, "prompt: got [2, 31], wanted tokens of 0..30, at least one"),
        ({"prompt": [1] * 33}, "prompt: got 33 tokens, wanted at most 32"),
        ({"prompt": [1], "samples": ROWS + 1}, "samples: got 4, wanted at most 3"),
        ({"prompt": [1], "stop_tokens": range(5)}, "stop_tokens: got 5, wanted at most num_stop_tokens, 4"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            session.run([ask(**fields)])
    assert_alike(session.run(GREEDY), wanted(GREEDY))
    message = "sampling.min_p: got one, wanted None (the engine was made without min_p=True)"
    with (
        Engine(MODEL, make_cache(), kvjax.serving.RunOptions(**BASE), num_ranges=1) as engine,
        pytest.raises(ValueError, match=f"^{re.escape(message)}$"),
    ):  # fmt: skip
        engine.submit(ask([1], sampling=MIN_P[3]))


# Refusals: by the same text in all ways, before anything is donated.

TOKEN_IDS, WIDE = "wanted a list of token ids", "got numbers from 2147483648 to 2147483648, wanted 32-bit integers"
OF_REQUESTS = [
    *(({"prompt": wrong}, f"prompt: got {wrong!r}, {TOKEN_IDS}") for wrong in ("text", 5, [1.0], ["a"], [True])),
    *(({"prompt": wrong}, f"prompt: got {wrong!r}, {TOKEN_IDS}") for wrong in ([[1, 2], [3]], [10**30])),
    *(({"max_new_tokens": wrong}, f"max_new_tokens: got {wrong!r}, wanted an int of at least 1") for wrong in (0, "9")),
    *(({"stop_tokens": wrong}, f"stop_tokens: got {wrong!r}, {TOKEN_IDS}") for wrong in (5, [0.5])),
    *(({"namespace": wrong}, f"namespace: got {wrong!r}, wanted an int of at least 0") for wrong in (-1, 0.5)),
    ({"namespace": 2**31}, f"namespace: {WIDE}"),
    *(
        ({"prompt_logprobs_from": wrong}, f"prompt_logprobs_from: got {wrong!r}, wanted an int of")
        for wrong in (-1, 0.5)
    ),
    ({"prompt_logprobs_from": 3}, "prompt_logprobs_from: got 3, wanted at most the prompt's length, 2"),
    ({"sampling": 3}, "sampling: got 3, wanted a kvjax.Sampling of numbers or None"),
    ({"retention": 3}, "retention: got 3, wanted a kvjax.Retention or None"),
    *(({"seed": wrong}, f"seed: got {wrong!r}, wanted an integer or a jax key") for wrong in (0.5, "a", True)),
]
NOT_OF_GENERATE = [
    *(({"samples": wrong}, f"samples: got {wrong!r}, wanted an int of at least 1") for wrong in (0, 1.5)),
    ({"priority": 2**31}, f"priority: {WIDE}"),
]
OF_RUNS = [
    *(({"steps": wrong}, f"steps: got {wrong!r}, wanted an int of at least 1") for wrong in (0, "9")),
    *(({"top_logprobs": wrong}, f"top_logprobs: got {wrong!r}, wanted an int of at least 0") for wrong in (-1, "3")),
    ({"top_logprobs": VOCAB + 1}, "top_logprobs: got 32, wanted at most the vocabulary, 31"),
    ({"logprobs": "all"}, "logprobs: got 'all', wanted 'raw' or 'sampling'"),
    ({"listener": "log.txt"}, "listener: got 'log.txt', wanted a function or None"),
    ({"logits_fn": np.ones(1)}, "logits_fn: got array([1.]), wanted a function or None"),
    ({"clock": 5}, "clock: got 5, wanted a function or None"),
    *(
        ({"clock": lambda reading=reading: reading}, f"clock: got {reading}, wanted an int of milliseconds")
        for reading in (0.5, None, True)
    ),
    ({"store": 3}, "store: got 3, wanted a kvjax.stores.DiskStore or None"),
    ({"names": {}}, "names: got {}, wanted a kvjax.Namespaces or None"),
]
OF_SCHEDULERS = [
    ("x", "scheduler: got 'x', wanted a kvjax.serving.Scheduler"),
    (Scheduler(k=9), "k: got 9, wanted at most the block size, 4"),
    (Scheduler(budget=2), "budget: got 2, wanted more than the 3 rows"),
    (Scheduler(chunk=6, canonical=True), "chunk: got 6, wanted a multiple of the block size, 4"),
    (Scheduler(preempt="swap"), "preempt: got 'swap', wanted 'recompute'"),
]


@ways(but="rollout")
def test_a_value_that_does_not_fit_is_named_and_the_cache_goes_on(way):
    session = WAYS[way]()
    refusals = [(fields, {}, message) for fields, message in OF_REQUESTS]
    refusals += [({}, options, message) for options, message in OF_RUNS]
    if way != "generate":
        refusals += [(fields, {}, message) for fields, message in NOT_OF_GENERATE]
        refusals += [({}, {"scheduler": scheduler}, message) for scheduler, message in OF_SCHEDULERS]
    for fields, options, message in refusals:
        with pytest.raises(ValueError, match=f"^(prompt 0: )?{re.escape(message)}"):
            session.refuse({"prompt": [1, 2]} | fields, options)
    session.run(GREEDY)


@ways(but="rollout")
def test_a_request_that_a_run_does_not_know_is_named_before_anything_runs(way):
    names = Namespaces()
    own, session = names("own"), WAYS[way]()
    prompt = "" if way == "Engine" else "prompt 4: "
    with pytest.raises(ValueError, match=f"^{prompt}namespace: got 2, wanted a number of the 2 that names gave"):
        session.run([*GREEDY, ask([1, 2], namespace=2)], names=names)
    assert way == "Engine" or not any(session.events)
    assert_alike(session.run(changed(GREEDY, namespace=[own] * 4), names=names), wanted(GREEDY))


@ways(but="rollout")
def test_retention_is_refused_where_the_spec_has_none(way):
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(1, DIM)], num_blocks=4, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE, dtype="float32"
    )
    session = WAYS[way](4, spec=spec)
    with pytest.raises(ValueError, match=r"(retention|num_ranges): got .*, wanted None .*retention=False"):
        session.run([ask([1, 2])])


OPEN = {
    "generate": lambda model, cache: kvjax.generate(model, cache, [[1]]),
    "stream": lambda model, cache: next(kvjax.stream(model, cache, [Request([1])])),
    "run_batch": lambda model, cache: kvjax.run_batch(model, cache, [Request([1])]),
    "Engine": Engine,
}


@pytest.mark.parametrize("way", OPEN)
def test_wrong_models_and_caches_are_named(way):
    def wrong(tokens, pools, view, *, last):
        return None

    gone, cache = make_cache(), make_cache()
    jax.tree.map(lambda leaf: leaf.delete(), gone)
    for model, given, message in (
        (MODEL, cache.state, r"cache: got a CacheState, wanted a Cache\(state, pools\) or a TieredCache"),
        *([(cache, MODEL, "model: got a Cache, wanted a kvjax.serving.Model")] if way != "Engine" else []),
        (MODEL, gone, "cache: was donated to an earlier call: go on with the result of that call"),
        (wrong, cache, r"model: got wrong, which is no pytree: wrap a function as jax\.tree_util\.Partial\(fn\)"),
        (jax.tree_util.Partial(wrong), cache, r"model: got NoneType for last=.*, wanted a pair of logits f32\[3, V\]"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            OPEN[way](model, given)
    kvjax.check(cache.state)


# Events.


@pytest.mark.parametrize(
    ("way", "kind", "host"),
    [
        *[pytest.param(way, "plain", 0, marks=mark_of(way)) for way in WAYS],
        *[
            pytest.param(way, "plain", HOST, marks=of_own_programs(way))
            for way in WAYS
            if way != "rollout"  # it moves nothing
        ],
        pytest.param("run_batch", "windows", 0, marks=pytest.mark.slow),
    ],
)
def test_events_come_once_and_in_order(way, kind, host):
    """With a host tier some blocks go there, and come back."""
    session, reused, queried = WAYS[way](8 if host else BLOCKS, spec=make_spec(kind, host)), 0, 0
    others = [ask([token, *DOCUMENT[9:20]]) for token in range(4)]
    for number, requests in enumerate([GREEDY, others, GREEDY]):
        before = len(session.events[0])
        outputs = session.run(requests, log_events=number < 2)
        assert_alike(outputs, wanted(requests, kind=kind), has_top=way != "rollout")
        reused += sum(output.cached_tokens for output in outputs)
        queried += sum(output.prompt_tokens for output in outputs)
        if way in ("generate", "stream", "run_batch"):
            assert session.decoded == (session.events[0][before:] if number < 2 else [])
    totals = session.totals
    assert (totals.queried_tokens, totals.reused_tokens) == (queried, reused) and reused
    assert not host or (totals.offloaded_blocks and totals.onboarded_blocks)


@ways(but="rollout")
def test_a_new_cache_finds_what_an_earlier_one_has_stored(way, tmp_path):
    """Of a prompt of whole blocks all but the last token, and of each block one is read for all."""
    options = {"model": "m", "names": Namespaces(), "max_bytes": 1 << 30, "read_timeout_ms": 60_000}
    requests = [ask(DOCUMENT[:16]), ask([*DOCUMENT[:16], 1]), ask(DOCUMENT[20:30])]
    for turn in range(2):
        session = WAYS[way]()
        with DiskStore(tmp_path, make_spec(), **options) as store:
            outputs = session.run(requests, store=store)
            assert_alike(outputs, wanted(requests))
            assert not any(store.counters[name] for name in ("broken", "failed", "dropped"))
            if turn:
                assert all(output.stored_tokens <= output.cached_tokens for output in outputs)
                assert [output.stored_tokens for output in outputs] == [15, 16, 8]


def listener_counts(session: Session) -> dict[str, int]:
    """The counts of a session's listener, for all caches."""
    numbers = [(0,), (1,)] if len(session.caches) > 1 else [()]
    counts = [Listeners(session.listener, leading=number).counts for number in numbers]
    return {name: sum(one[name] for one in counts) for name in counts[0]}


@ways(but="rollout")
@pytest.mark.parametrize("chance", [0.4, 1.0])
def test_a_listener_that_fails_costs_nothing_and_has_the_index_when_it_is_back(way, chance, monkeypatch):
    monkeypatch.setattr(listeners, "_FIRST_WAIT", 0.001)
    session, rng = WAYS[way](), random.Random(3)
    session.away, session.has_index = lambda: rng.random() < chance, False
    for _ in range(3):
        assert_alike(session.run(GREEDY), wanted(GREEDY))
    failures = listener_counts(session)["failures"]
    assert failures and (chance < 1 or not any(session.events))
    session.away, session.has_index = lambda: False, True
    assert_alike(session.run(GREEDY), wanted(GREEDY))
    counts = listener_counts(session)
    assert counts["failures"] == failures and counts["snapshots"]


# Ends in the middle.


def assert_goes_on(session: Session, error: GenerationInterrupted) -> None:
    """Asserts that an interrupted run has a part of the outputs, and that its cache serves."""
    for output, other in zip(error.outputs, wanted(GREEDY), strict=True):
        assert output.tokens == other.tokens[: len(output.tokens)]
    # Replicas may be done when the interrupt comes.
    assert len(session.caches) > 1 or any(output.finish is None for output in error.outputs)
    assert_alike(session.run(GREEDY), wanted(GREEDY))


@ways(but="rollout")
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_error_in_the_middle_costs_no_more_than_its_run(way, is_lost, monkeypatch):
    """An engine goes on with an empty cache, others with all that was computed; requests of a replica go elsewhere.

    A loop that fails on the device takes the cache with it.
    """
    turn, turns = driver.turn, itertools.count()

    def fails_once(model, serving, **options):
        has_requests = jax.device_get(serving.requests.stage).any()  # it has none where an engine compiles
        if has_requests and next(turns) == (way != "Engine"):
            if is_lost:
                jax.tree.map(lambda leaf: leaf.delete(), serving)
            raise MemoryError("no memory")
        return turn(model, serving, **options)

    monkeypatch.setattr(driver, "turn", functools.update_wrapper(fails_once, turn))
    session = WAYS[way]()
    if way == "Replicas":
        with pytest.warns(RuntimeWarning, match="requests of replicas that failed go to others: .*no memory"):
            assert_alike(session.run(GREEDY), wanted(GREEDY))
        assert_alike(session.run(GREEDY), wanted(GREEDY))
        return
    with pytest.raises((EngineError, GenerationInterrupted), match="MemoryError: no memory") as caught:
        session.run(GREEDY)
    assert isinstance(caught.value.__cause__, MemoryError)
    if way == "Engine":
        assert [event["kind"] for event in session.events[0]].count("cleared") == 1
        assert_alike(session.run(GREEDY), wanted(GREEDY))
    elif is_lost:
        assert session.caches == [None]
    else:
        assert_goes_on(session, caught.value)


def leave() -> None:
    raise SystemExit("enough")


@ways(but="rollout Engine")
@pytest.mark.parametrize(("act", "cause"), [(press, KeyboardInterrupt), (leave, SystemExit)])
def test_ctrl_c_and_an_interrupt_of_the_listener_leave_a_cache_that_goes_on(way, act, cause):
    session = WAYS[way]()
    session.then, session.has_index = act, way != "Replicas"
    with pytest.raises(GenerationInterrupted) as caught:
        session.run(GREEDY)
    assert isinstance(caught.value.__cause__, cause)
    assert_goes_on(session, caught.value)


@pytest.mark.long
def test_the_listener_of_replicas_has_the_index_of_each_in_the_run_after_ctrl_c():
    session = WAYS["Replicas"]()
    session.then, session.has_index = press, False
    with pytest.raises(GenerationInterrupted):
        session.run(GREEDY)
    session.has_index = True
    session.run(GREEDY)
