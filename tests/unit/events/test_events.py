# SPDX-License-Identifier: Apache-2.0
"""Events: packing, decoding and replaying; impossible ones are refused."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax.events.host_events import host_events
from kvjax.events.log import append, init_log
from kvjax.events.records import COLUMNS, EventKind, Events, Status, joined, record
from kvjax.events.totals import Totals
from kvjax.serving.requests import Finish, Stage
from kvjax.state import Text
from tests.drive import PLAIN, VERBS

SPEC = kvjax.make_spec(num_blocks=4, max_seqs=2, max_length=16, block_size=4)
A = {"kind": "stored", "group": 0, "block": 2, "generation": 5, "parent": None, "namespace": 7,
     "tokens": [1, 2, 3, 4], "level": 0, "priority": 35}  # fmt: skip
B = {"kind": "stored", "group": 0, "block": 3, "generation": 1, "parent": (2, 5),
     "tokens": [9], "level": 0, "priority": 35}  # fmt: skip


def made(*records, tokens):
    """Events of single records."""
    none = jnp.zeros((1,), jnp.int32)
    return Events(joined(*records).records, Text(jnp.array(tokens, jnp.int32), None), none, none, none, none[0])


def one(kind, **columns):
    return record(kind, jnp.array([True]), **columns)


MOVED = {"kind": "updated", "group": 0, "block": 2, "generation": 5, "level": 1, "priority": 80}
NOTHING = record(EventKind.STORED, jnp.array([False]), block=3)
SOME = made(
    one(EventKind.REMOVED, block=1, generation=4),
    NOTHING,
    one(EventKind.STORED, block=2, generation=5, source=-1, source_generation=7, num_tokens=4),
    one(EventKind.STORED, block=3, generation=1, source=2, source_generation=5, num_tokens=1),
    one(EventKind.COPIED, block=0, source=2, num_tokens=3),
    one(EventKind.UPDATED, block=2, generation=5, level=1, priority=80),
    one(EventKind.CLEARED),
    one(EventKind.CREATED),
    tokens=[[0] * 4, [0] * 4, [1, 2, 3, 4], [9, 8, 8, 8], *[[0] * 4] * 4],
)
DECODED = [
    {"kind": "removed", "group": 0, "block": 1, "generation": 4},
    A,
    B,
    {"kind": "copied", "group": 0, "block": 0, "source": 2, "num_tokens": 3},
    MOVED,
    {"kind": "cleared", "group": 0},
    {"kind": "created", "group": 0},
]


def test_decoding_drops_padding_and_names_everything():
    assert kvjax.to_list(SOME) == DECODED
    extra = jnp.arange(32, dtype=jnp.int32).reshape(8, 4)
    decoded = kvjax.to_list(dataclasses.replace(SOME, text=SOME.text.replace(extra_ids=extra)))
    assert [event.get("extra_ids") for event in decoded[1:3]] == [[8, 9, 10, 11], [12]]
    for name, column in zip(COLUMNS, SOME.records.T, strict=True):
        np.testing.assert_array_equal(getattr(SOME, name), column)


@pytest.mark.parametrize("capacity", [20, 9])
def test_events_of_several_transitions_are_appended_at_once(capacity):
    log = init_log(capacity, 4)
    chex.assert_trees_all_equal(append(log, SOME, SOME), append(append(log, SOME), SOME))


def test_a_log_packs_and_tells_how_many_are_free():
    log = append(append(init_log(20, 4), SOME), SOME)
    assert kvjax.to_list(log) == DECODED * 2
    assert (int(log.size), int(log.num_free)) == (14, 6)
    assert kvjax.to_list(init_log(3, 4)) == []


def test_a_log_counts_what_its_admissions_looked_up_and_found():
    looked_up = SOME.replace(status=jnp.zeros(2, jnp.int32), queried=jnp.array([9, 5]), cached=jnp.array([4, 0]))
    log = append(append(init_log(40, 4), looked_up, SOME), looked_up)
    assert (int(log.queried), int(log.cached)) == (28, 8)
    totals = Totals().add(looked_up).add(SOME).add(looked_up)
    assert Totals().add(log) == totals and totals.reused_share == 8 / 28
    stacked = jax.tree.map(lambda *logs: jnp.stack(logs), log, init_log(40, 4), log)
    assert Totals().add(stacked) == totals.add(log)


def test_what_a_log_cannot_hold_is_lost_and_nothing_else():
    log = append(append(init_log(9, 4), SOME), SOME)
    assert (int(log.size), int(log.num_free), int(log.lost)) == (9, 0, 5)
    assert kvjax.to_list(log) == (DECODED * 2)[:9]
    assert repr(log).startswith("EventLog(9 of 9, 5 lost; ")
    full = append(init_log(7, 4), SOME)
    assert int(full.lost) == 0 and repr(full).startswith("EventLog(7 of 7; ")
    assert (host_events(log, SPEC).lost, host_events(full, SPEC).lost, host_events(SOME, SPEC).lost) == (5, 0, 0)


def test_events_stacked_by_scan_decode_in_order():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), SOME)
    assert kvjax.to_list(stacked) == DECODED * 2


def test_counts_under_jit():
    got = jax.tree.map(int, jax.jit(kvjax.events.counts)(SOME))
    assert got == {"created": 1, "removed": 1, "updated": 1, "stored": 2, "copied": 1, "cleared": 1}
    assert jax.tree.map(int, kvjax.events.counts(append(init_log(9, 4), SOME))) == got


def test_fold_replays_and_leaves_the_old_mirror_alone():
    first = kvjax.fold([A])
    second = kvjax.fold(
        [B, {"kind": "updated", "group": 0, "block": 2, "generation": 5, "level": 1, "priority": 80}], first
    )
    assert first.index == {(0, 7, (1, 2, 3, 4)): (0, 35)}
    assert second.index == {(0, 7, (1, 2, 3, 4)): (1, 80), (0, 7, (1, 2, 3, 4, 9)): (0, 35)}
    gone = kvjax.fold([{"kind": "removed", "group": 0, "block": 3, "generation": 1}], second)
    assert list(gone.index) == [(0, 7, (1, 2, 3, 4))]
    assert kvjax.fold([], second) == second


def test_cleared_is_about_one_group():
    other = {**A, "group": 1}
    assert list(kvjax.fold([A, other, {"kind": "cleared", "group": 0}]).index) == [(1, 7, (1, 2, 3, 4))]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([A, A], r"got stored of node \(0, 2, 5\), wanted a new node"),
        ([B], r"got stored under node \(0, 2, 5\), wanted a node of the mirror: fold\(events, mirror\)"),
        (
            [{**A, "kind": "removed"}],
            r"got removed of node \(0, 2, 5\), wanted a node of the mirror: fold\(events, mirror\)",
        ),
        ([{**A, "kind": "updated"}], r"got updated of node \(0, 2, 5\), wanted a node of the mirror"),
        (
            [A, {**A, "kind": "removed", "generation": 4}],
            r"got removed of node \(0, 2, 4\), wanted a node of the mirror",
        ),
    ],
)
def test_what_cannot_have_happened_is_refused(events, complaint):
    with pytest.raises(ValueError, match=f"^events: {complaint}"):
        kvjax.fold(events)


def test_fold_wants_decoded_events():
    for events in (SOME, init_log(3, 4)):
        with pytest.raises(ValueError, match=r"^events: got Event\w+, wanted a list from to_list"):
            kvjax.fold(events)


@pytest.mark.long
def test_a_log_in_a_loop_tells_what_the_steps_tell():
    """Four prompts run through two rows of a pool too small for them, once in a scan and once step by step."""
    prompts = np.stack([np.full(12, n, np.int32) for n in (1, 2, 1, 3)])

    def step(state, prompt):
        state, admitted = kvjax.admit(state, 0, prompt, 9)
        left = 9 - admitted.cached[0]
        tokens = jnp.stack([jnp.roll(prompt, -admitted.cached[0]), prompt])
        state, committed = kvjax.commit(state, tokens, jnp.array([1, 0], jnp.int32) * left)
        state, released = kvjax.release(state, 0)
        return state, (admitted, committed, released)

    def logged(carry, prompt):
        state, log = carry
        state, events = step(state, prompt)
        for each in events:
            log = append(log, each)
        return (state, log), None

    state = kvjax.init(SPEC)
    (end, log), _ = jax.jit(lambda s: lax.scan(logged, (s, init_log(40, 4)), prompts))(state)
    records, totals, jitted = [], Totals(), jax.jit(step)
    for prompt in prompts:
        state, events = jitted(state, prompt)
        for each in events:
            records += kvjax.to_list(each)
            totals = totals.add(each)
    assert kvjax.to_list(log) == records
    assert Totals().add(log) == totals and totals.queried_tokens == 36 and totals.reused_tokens == 4
    assert {event["kind"] for event in records} >= {"stored", "removed"}
    assert kvjax.fold(records).index == kvjax.events.index_of(state) == kvjax.events.index_of(end)
    chex.assert_trees_all_equal(state, end)


def test_events_are_shown_in_one_line():
    kinds = "1 removed, 2 stored, 1 copied, 1 updated, 1 cleared, 1 created"
    assert repr(SOME) == str(SOME) == f"Events(rows: 1 OK; {kinds})"
    refused = SOME.only(np.bool_(False)).replace(
        status=jnp.array([3, 1, 1]), shortfall=jnp.int32(2), queried=jnp.array([40, 9, 0]), cached=jnp.array([39, 0, 0])
    )
    counts = "rows: 1 BAD_REQUEST, 2 NO_BLOCKS, 2 blocks missing; 39 of 49 tokens cached"
    assert repr(refused) == repr(jax.device_get(refused)) == f"Events({counts}; no events)"
    log = append(init_log(20, 4), SOME)
    assert repr(log) == f"EventLog(7 of 20; {kinds})"
    match = VERBS["lookup"](kvjax.init(PLAIN), np.arange(8), 8)
    assert repr(match) == "Match(0 tokens cached, 0 of them on the host)"
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), match)
    assert repr(twice) == "Match([0, 0] tokens cached, [0, 0] of them on the host)"
    _, events = VERBS["admit"](kvjax.init(PLAIN), 0, np.arange(8), 8)
    assert repr(events).startswith("Events(rows: 1 OK; 0 of 8 tokens cached; ")


@pytest.mark.parametrize("value", [SOME, init_log(20, 4), VERBS["lookup"](kvjax.init(PLAIN), np.arange(8), 8)])
def test_what_cannot_be_counted_is_shown_too(value):
    name, shown = type(value).__name__, []
    jax.eval_shape(lambda value: shown.append(repr(value)), value)
    jax.vmap(lambda value: shown.append(repr(value)))(jax.tree.map(lambda x: jnp.stack([x, x]), value))
    assert shown == [f"{name}(traced)"] * 2
    assert repr(jax.eval_shape(lambda x: x, value)) == f"{name}(shapes alone)"
    for odd in (lambda x: None, lambda x: object(), lambda x: 0):
        assert repr(jax.tree.map(odd, value)) == f"{name}(shapes alone)"
    if name != "Match":  # its tokens are shown for each row
        assert repr(jax.tree.map(lambda x: jnp.stack([x, x]), value)) == f"{name}(batched, [2])"
        assert repr(jax.tree.map(jnp.sum, value)) == f"{name}(of other shapes)"
    gone = jax.tree.map(jnp.copy, value)
    jax.tree.map(lambda x: x.delete(), gone)
    assert repr(gone) == f"{name}(donated)"


@pytest.mark.parametrize("names", [EventKind, Status, Stage, Finish])
def test_enumerations_print_their_names(names):
    for member in names:
        assert (str(member), f"{member}", repr(member)) == (*[member.name] * 2, f"{names.__name__}.{member.name}")
        assert member == member.value == json.loads(json.dumps(member)) and f"{member:d}" == str(member.value)
    assert not isinstance(member, Status) or str(AssertionError(Status(np.int32(3)))) == "BAD_REQUEST"  # as README's
