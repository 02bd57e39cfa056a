# SPDX-License-Identifier: Apache-2.0
"""Traces: events in Perfetto's form, and their contents, by hand and of a generation."""

import io
import itertools
import json
import types

import numpy as np
import pytest

import kvjax
from kvjax.events import Transfer
from kvjax.interop.trace import Trace
from kvjax.serving import Output
from tests import drive
from tests.serving_kit import HOST, MODEL, OPTIONS, batched, make_spec, prompts_of, start, state_of
from tests.unit.debug import stories
from tests.unit.interop.forest import arrays_of, spec_of
from tests.wire_kit import removed, stored, updated

PLAIN = spec_of("plain")
FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "args", "ts", "dur"},
    "C": {"name", "ph", "pid", "tid", "args", "ts"},
    "i": {"name", "ph", "pid", "tid", "args", "ts", "s"},
}


def checked(text):
    """The events of a trace, by the schema of Chrome's JSON."""
    events = json.loads(text)
    for event in events:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"]
        assert all(type(event[name]) is int and event[name] >= 0 for name in {"pid", "tid", "ts", "dur"} & set(event))
        assert event.get("s", "t") == "t" and isinstance(event["args"], dict)
        if event["ph"] == "M":
            argument = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
            assert set(event["args"]) == {argument[event["name"]]}
        if event["ph"] == "C":
            assert event["args"] and all(type(number) is int and number >= 0 for number in event["args"].values())
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"} <= tracks
    slices = [event for event in events if event["ph"] == "X"]
    for _, own in itertools.groupby(sorted(slices, key=lambda e: (e["pid"], e["tid"])), lambda e: (e["pid"], e["tid"])):
        ends = [(one["ts"], one["ts"] + one["dur"]) for one in own]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(ends)))
    return events


def only(events, phase):
    return [event for event in events if event["ph"] == phase]


def ticks(step=0.5):
    return map(float, itertools.count(100, step)).__next__


A, B = stored(1, 1, 0, [1, 2, 3, 4]), stored(2, 1, (1, 1), [5, 6])


def test_a_trace_by_hand():
    file = io.StringIO()
    with Trace(PLAIN, file, clock=ticks()) as trace:
        trace.write(arrays_of([A, B], PLAIN, log=True))
        trace.write(arrays_of([removed(2, 1), updated(1, 1, 1)], PLAIN))
    head, tracks = '{"ph": "M", "name": "', ["admissions", "loops", "moves", "other transitions"]
    lines = [
        head + 'process_name", "pid": 1, "tid": 0, "args": {"name": "cache"}}',
        *(line for track, name in enumerate(tracks, 1) for line in (
            f'{head}thread_name", "pid": 1, "tid": {track}, "args": {{"name": "{name}"}}}}',
            f'{head}thread_sort_index", "pid": 1, "tid": {track}, "args": {{"sort_index": {track}}}}}',
        )),
        '{"ph": "X", "name": "loop", "ts": 0, "dur": 500000, "pid": 1, "tid": 2, "args": {"stored": 2}}',
        '{"ph": "C", "name": "findable blocks, device", "ts": 500000, "pid": 1, "tid": 0, '
        '"args": {"whole": 1, "partly filled": 1}}',
        '{"ph": "C", "name": "findable blocks, host", "ts": 500000, "pid": 1, "tid": 0, '
        '"args": {"whole": 0, "partly filled": 0}}',
        '{"ph": "X", "name": "transition", "ts": 500000, "dur": 500000, "pid": 1, "tid": 4, '
        '"args": {"removed": 1, "updated": 1}}',
        '{"ph": "i", "name": "evicted", "ts": 1000000, "pid": 1, "tid": 4, "s": "t", '
        '"args": {"group": 0, "count": 1, "blocks": [2]}}',
        '{"ph": "C", "name": "findable blocks, device", "ts": 1000000, "pid": 1, "tid": 0, '
        '"args": {"whole": 0, "partly filled": 0}}',
        '{"ph": "C", "name": "findable blocks, host", "ts": 1000000, "pid": 1, "tid": 0, '
        '"args": {"whole": 1, "partly filled": 0}}',
    ]  # fmt: skip
    assert file.getvalue() == "[\n" + ",\n".join(lines) + "\n]\n"
    checked(file.getvalue())
    with pytest.raises(ValueError, match=r"^write: got events for a closed trace, wanted an open trace"):
        trace.write(arrays_of([], PLAIN))


def test_a_file_that_was_not_closed_lacks_its_end_alone():
    file = io.StringIO()
    Trace(PLAIN, file).write(arrays_of([A], PLAIN))
    assert len(checked(file.getvalue() + "]")) == 12


def test_admissions_moves_and_other_transitions_have_tracks():
    """Their slices say what was looked up, moved and refused."""
    file, one = io.StringIO(), np.ones(1, np.int32)
    back = Transfer(np.array([[0, 1, 1, 12, 3], [0, 2, 2, 3, 13], [-1] * 5], np.int32))
    empty = arrays_of([], PLAIN)
    with Trace(PLAIN, file, clock=ticks()) as trace:
        for change in ({"queried": 9 * one, "cached": 4 * one}, {"queried": 9 * one, "transfer": back},
                       {"transfer": back}, {"status": one}):  # fmt: skip
            trace.write(empty.replace(**change))
    assert [(one["tid"], one["name"], one["args"]) for one in only(checked(file.getvalue()), "X")] == [
        (1, "admission", {"queried": 9, "cached": 4}), (1, "admission", {"queried": 9, "to_host": 1, "to_device": 1}),
        (3, "move", {"to_host": 1, "to_device": 1}), (4, "transition", {"refused": 1}),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", ["windows", "bare"])
def test_each_group_with_kv_and_each_tier_has_a_counter(shape):
    spec, file = spec_of(shape), io.StringIO()
    with Trace(spec, file) as trace:
        trace.write(arrays_of([A, stored(5, 1, 0, [1, 2, 3, 4], group=1)], spec))
        trace.set(kvjax.init(spec))
    counters = {one["name"]: one["args"] for one in only(checked(file.getvalue()), "C")}
    groups = range(int(spec.bare), len(spec.groups))
    assert set(counters) == {
        f"{what}, {level}, group {group}" for what in ("findable blocks", "blocks") for level in ("device", "host")
        for group in groups
    }  # fmt: skip
    assert counters["findable blocks, device, group 1"] == {"whole": 1, "partly filled": 0}
    assert counters["blocks, device, group 1"] == {"active": 0, "cached": 0, "empty": 10}
    assert counters["blocks, host, group 1"] == {"active": 0, "cached": 0, "empty": 6}


def test_a_trace_is_attached_to_a_cache():
    state, file = stories.plain().state, io.StringIO()
    with Trace(state.spec, file, clock=ticks()) as trace:
        trace.attach(state)
    [counter] = only(checked(file.getvalue()), "C")
    whole = [path for _, _, path in kvjax.events.index_of(state) if len(path) % state.spec.block_size == 0]
    assert counter["args"]["whole"] == len(whole) > 0
    with pytest.raises(ValueError, match=r"^state: got a cache of CacheSpec"):
        Trace(PLAIN, file).attach(state)


def test_what_is_no_transition_is_refused():
    with pytest.raises(ValueError, match=r"^events: got list, wanted Events or an EventLog"):
        Trace(PLAIN, io.StringIO()).write([A])


def test_prompts_have_tracks_by_hand():
    """A pause is no part of the next slice. The prompts of two streams share tracks."""
    file, outputs = io.StringIO(), [Output(7, [1, 2], cached_tokens=4), Output(5)]
    with Trace(PLAIN, file, clock=ticks()) as trace:
        trace.show(types.SimpleNamespace(new={0: [1, 2]}, outputs=outputs))
        trace.mark()
        outputs[0].tokens.append(3)
        outputs[1].tokens.append(4)
        outputs[1].finish = "stop"
        trace.show(types.SimpleNamespace(new={0: [3], 1: [4]}, outputs=outputs))
        trace.show(types.SimpleNamespace(new={0: [9]}, outputs=[Output(2, [9])]))
    events = checked(file.getvalue())
    assert [*only(events, "M")[9]["args"].values()] == ["prompts"]
    assert [(one["tid"], *one["args"].values()) for one in only(events, "M")[10:]] == [
        (1, "prompt 0"), (1, 1), (2, "prompt 1"), (2, 2)
    ]  # fmt: skip
    found = [(one["name"], one["tid"], one["ts"], one["dur"], one["args"]) for one in only(events, "X")]
    assert found == [
        ("prefill and decode", 1, 0, 500_000, {"tokens": 2, "prompt_tokens": 7, "cached_tokens": 4}),
        ("decode", 1, 1_500_000, 500_000, {"tokens": 1, "prompt_tokens": 7, "cached_tokens": 4}),
        ("prefill and decode", 2, 1_500_000, 500_000,
         {"tokens": 1, "prompt_tokens": 5, "cached_tokens": 0, "finish": "stop"}),
        ("prefill and decode", 1, 2_500_000, 500_000, {"tokens": 1, "prompt_tokens": 2, "cached_tokens": 0}),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", pytest.param("windows", marks=pytest.mark.slow)])
def test_a_trace_of_a_stream(kind):
    file, cache, new = io.StringIO(), start(kind, host=HOST), {}
    with Trace(make_spec(kind, host=HOST), file) as trace:
        trace.attach(state_of(cache))
        for progress in drive.stream(MODEL, cache, prompts_of(0), **OPTIONS, listener=trace.write):
            trace.show(progress)
            trace.set(state_of(progress.cache))
            for number, tokens in progress.new.items():
                new[number] = new.get(number, 0) + len(tokens)
        assert trace.nodes.index == kvjax.events.index_of(state_of(progress.cache))
    events, counted = checked(file.getvalue()), {}
    for one in only(events, "X"):
        if one["pid"] == 2:
            counted[one["tid"] - 1] = counted.get(one["tid"] - 1, 0) + one["args"]["tokens"]
    assert counted == new == {0: 6, 1: 6}
    assert {one["name"] for one in only(events, "X")} >= {"loop", "prefill and decode"}


@pytest.mark.long
def test_a_trace_of_a_batch_has_a_slice_for_each_loop():
    """The slice does not divide the loop into steps."""
    file, cache, kinds = io.StringIO(), start(), []

    def listen(events):
        kinds.append(type(events))
        trace.write(events)

    with Trace(make_spec(), file) as trace:
        trace.attach(state_of(cache))
        _, cache, _ = batched(cache, prompts_of(0), listener=listen)
        assert trace.nodes.index == kvjax.events.index_of(state_of(cache))
    slices = [one["name"] for one in only(checked(file.getvalue()), "X")]
    assert len(slices) == len(kinds) and slices.count("loop") == kinds.count(kvjax.events.EventLog) > 0
