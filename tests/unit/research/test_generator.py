# SPDX-License-Identifier: Apache-2.0
"""Random traces: equal for equal seeds, and with the properties of their options."""

import collections
import dataclasses

import numpy as np
import pytest

from kvjax.research import Workload, draw_trace

TRACE = draw_trace(5, 600)


def test_a_seed_gives_one_trace():
    again, other = draw_trace(5, 600), draw_trace(6, 600)
    for field in dataclasses.fields(TRACE):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(TRACE, field.name))
    assert len(TRACE) == 600 and TRACE.ids.tolist() != other.ids.tolist()
    assert "seed 5" in TRACE.notes[0] and "think_ms=20000.0" in TRACE.notes[0]


def test_a_turn_goes_on_with_the_prompt_before_it_and_its_answer():
    last, kinds = {}, collections.Counter()
    for number, session in enumerate(TRACE.session.tolist()):
        kind, before = TRACE.kinds[TRACE.kind[number]], last.get(session)
        kinds[kind] += 1
        assert (kind == "later") == (before is not None)
        if before is not None:
            grown = TRACE.input_length[before] + TRACE.output_length[before]
            assert TRACE.input_length[number] > grown and TRACE.time[number] >= TRACE.time[before]
            shared = TRACE.full[before]
            assert TRACE.blocks(number)[:shared].tolist() == TRACE.blocks(before)[:shared].tolist()
            assert not set(TRACE.blocks(number)[shared:]) & set(TRACE.blocks(before)[shared:])
        last[session] = number
    assert set(kinds) == {"first", "later", "one-shot"} and min(kinds.values()) > 50


def test_one_shot_prompts_share_nothing():
    uses = np.bincount(TRACE.ids)
    alone = [number for number in range(600) if TRACE.kinds[TRACE.kind[number]] == "one-shot"]
    assert all((uses[TRACE.blocks(number)] == 1).all() for number in alone)


def roots(workload, requests=400):
    """The first block of each first turn, which identifies its system prompt."""
    trace = draw_trace(0, requests, dataclasses.replace(workload, one_shot=0.0, turns=1.0))
    return trace.ids[trace.starts[:-1]].tolist()


def test_popularity_drifts():
    fixed = Workload(system_prompts=40, system_tokens=2000, drift=0)
    most = [collections.Counter(part).most_common(1)[0][0] for part in np.split(np.array(roots(fixed)), 2)]
    assert most[0] == most[1]
    moved = roots(dataclasses.replace(fixed, drift=200))
    most = [collections.Counter(part).most_common(2) for part in np.split(np.array(moved), 2)]
    assert most[1][0][0] != most[0][0][0] == most[1][1][0]  # the first one became the second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0.5}, "turns: got 0.5, wanted at least 1"),
        ({"system_prompts": 0}, "system_prompts: got 0"),
        ({"one_shot": 1.5}, "one_shot: got 1.5"),
        ({"gap_ms": -1.0}, "gap_ms: got -1.0"),
    ],
)
def test_bad_options_of_a_random_trace_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Workload(**options)
    with pytest.raises(ValueError, match="requests: got 0"):
        draw_trace(0, 0)
