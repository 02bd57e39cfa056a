# SPDX-License-Identifier: Apache-2.0
"""The strategy for a user's own property tests, and the trial that carries it out on any cache."""

import collections
import sys
import time

import hypothesis
import numpy as np
import pytest
from hypothesis.internal.conjecture import engine

import kvjax
from kvjax.testing import SMALL, Trial, jitted_verbs, requests
from tests.unit.trials import SPECS, TIERS


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_verb_obeys_the_law(name):
    tally, spec = collections.Counter(), SPECS[name]

    @hypothesis.settings(max_examples=150)
    @hypothesis.given(requests(spec))
    def property_test(history):
        trial = Trial(kvjax.init(spec))
        for request in history:
            trial.do(request)
        tally.update(trial.tally)

    property_test()
    verbs = set(jitted_verbs()) - {"lookup"}
    verbs -= set() if spec.has_host else {"offload", "onboard", "watermark", "swap_out", "swap_in", "complete"}
    verbs -= set() if spec.backups else {"backup"}
    assert all(tally[verb] for verb in verbs) and tally["updated"] >= spec.has_host, tally


def test_what_fails_shrinks_to_the_request_that_matters():
    history = hypothesis.find(requests(TIERS), lambda found: any(request["verb"] == "swap_in" for request in found))
    assert history == [{"verb": "swap_in", "seq": 0}]
    history = hypothesis.find(requests(SMALL), lambda found: any(r["verb"] == "admit" and r["tokens"] for r in found))
    assert history == [{"verb": "admit", "seq": 0, "tokens": [0], "namespace": 0}]


def test_shrinking_ends_after_its_time():
    calls = []

    @hypothesis.settings(database=None, derandomize=True, deadline=None, max_examples=50)
    @hypothesis.given(requests(SMALL, shrink_seconds=0.2))
    def slow_and_wrong(history):
        calls.append(len(history))
        time.sleep(0.02)
        assert sum(len(request.get("tokens", ())) for request in history) < 8

    begin = time.monotonic()
    with pytest.raises(AssertionError):
        slow_and_wrong()
    assert time.monotonic() - begin < 10 and len(calls) < 200
    requests(SMALL)
    assert engine.MAX_SHRINKING_SECONDS == 60


@pytest.mark.slow
def test_specs_get_what_they_can_do():
    @hypothesis.settings(max_examples=10)
    @hypothesis.given(requests(SMALL))
    def plain(history):
        for request in history:
            assert not {"host", "group", "extra_ids"} & set(request)

    plain()
    hypothesis.find(requests(SPECS["extra ids"]), lambda found: any("extra_ids" in request for request in found))
    hypothesis.find(requests(SPECS["windows, tiers"]), lambda found: any(r.get("group") == 1 for r in found))


def test_without_hypothesis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)
    with pytest.raises(ImportError, match=r"^requests: needs hypothesis \(pip install \"kvjax\[test\]\"\)"):
        requests()


def test_a_trial_cannot_tell_whether_a_prompt_fits_where_the_count_does_not():
    for spec in (TIERS, SPECS["windows"]):
        with pytest.raises(ValueError, match=r"^must_admit: got True, wanted False for a cache with windows or a host"):
            Trial(kvjax.init(spec), must_admit=True)


TEXT = [1, 1, 1, 1, 2, 2, 2, 2]
LIFE = [
    {"verb": "admit", "seq": 0, "tokens": TEXT, "namespace": 0},
    {"verb": "commit", "num_tokens": [16] * 3, "tokens": [[]] * 3},
    {"verb": "release", "seq": 0},
    {"verb": "offload", "which": 3, "group": 0},
    {"verb": "complete", "ok": True},
]


def disobeying(name):
    """The verbs, of which one loses its orders to move or copy."""

    def verb(*args, **kwargs):
        state, events = jitted_verbs()[name](*args, **kwargs)
        records = np.where((events.kind == kvjax.events.EventKind.COPIED)[:, None], 0, events.records)
        nothing = None if events.transfer is None else kvjax.tiers.Transfer(np.full_like(events.transfer.records, -1))
        return state, events.replace(records=records, transfer=nothing)

    return jitted_verbs() | {name: verb}


@pytest.mark.long
def test_a_trial_sees_bytes_that_are_not_where_they_should_be():
    good, after = Trial(kvjax.init(TIERS)), {"verb": "admit", "seq": 1, "tokens": [1, 1, 1, 3], "namespace": 0}
    for request in [*LIFE[:3], after]:
        good.do(request)
    assert good.tally["copied"] == 1
    bad = Trial(kvjax.init(TIERS), verbs=disobeying("admit"))
    for request in LIFE[:3]:
        bad.do(request)
    with pytest.raises(AssertionError, match="row 1 would read K/V of another text"):
        bad.do(after)
    bad = Trial(kvjax.init(TIERS), verbs=disobeying("offload"))
    for request in LIFE[:3]:
        bad.do(request)
    with pytest.raises(AssertionError, match=r"block \d does not hold the K/V of its tokens"):
        bad.do(LIFE[3])
