# SPDX-License-Identifier: Apache-2.0
"""Trials of a user's own composites: those that obey the law, and each way to break it."""

import itertools
import re

import hypothesis
import jax
import numpy as np
import pytest

import kvjax
from kvjax.testing import SMALL, Request, Trial, jitted_verbs, random_requests, requests
from kvjax.testing.requests import Draws
from tests.unit.trials import SPECS, TIERS

VERBS = jitted_verbs()
TEXT, ROWS = [1, 1, 1, 1, 2, 2, 2], SMALL.max_seqs


def padded(tokens):
    return np.array([*tokens, *[0] * (21 - len(tokens))], np.int32)


def prefill(state, seq, tokens):
    """Admits and computes a prompt."""
    state, admitted = VERBS["admit"](
        state, seq=np.int32(seq), tokens=padded(tokens), length=np.int32(len(tokens)), namespace=np.int32(0)
    )
    cached = int(admitted.cached[0])
    if not bool(admitted.ok):
        return state, admitted
    new = np.zeros((ROWS, 20), np.int32)
    new[seq, : len(tokens) - cached] = tokens[cached:]
    counts = np.where(np.arange(ROWS) == seq, len(tokens) - cached, 0).astype(np.int32)
    state, committed = VERBS["commit"](state, tokens=new, num_tokens=counts)
    return state, [admitted, committed]


def decode(state, seq, token):
    """Extends a row by one token, and commits it."""
    counts = (np.arange(ROWS) == seq).astype(np.int32)
    state, extended = VERBS["extend"](state, active=counts > 0, num_tokens=counts, max_tokens=6)
    if not bool(extended.ok):
        return state, [extended]
    state, committed = VERBS["commit"](state, tokens=np.full((ROWS, 20), token, np.int32), num_tokens=counts)
    return state, {"extended": extended, "then": committed}


def release(state, seq):
    return VERBS["release"](state, seq=np.int32(seq))


def fork(state, src, dst):
    return VERBS["fork"](state, src=np.int32(src), dst=np.int32(dst))


def begun():
    trial = Trial(kvjax.init(SMALL))
    trial.apply(prefill, 0, TEXT)
    return trial


@pytest.mark.long
def test_a_composite_that_obeys_is_followed():
    trial = begun()
    trial.apply(release, 0)
    events = trial.apply(prefill, 1, [*TEXT[:6], 0])
    assert events[0].cached.tolist() == [6] and isinstance(events[0].cached, np.ndarray)
    trial.apply(fork, 1, 2)
    trial.apply(decode, 2, 0)  # copies on write
    assert (trial.tally["prefill"], trial.tally["decode"], trial.tally["copied"]) == (2, 1, 2)
    trial.do({"verb": "release", "seq": 2})  # and requests can follow
    trial.do({"verb": "truncate", "seq": 1, "drop": 2})
    assert trial.apply(prefill, 1, TEXT).status.tolist() == [kvjax.Status.HELD]
    pin = np.where(np.arange(5) == 0, np.asarray(trial.state.groups[0].table)[1], -1).astype(np.int32)
    trial.apply(lambda state: VERBS["pin"](state, blocks=pin))
    trial.do({"verb": "release", "seq": 1})
    assert trial.do({"verb": "unpin", "which": 0}).status.tolist() == [kvjax.Status.OK]


@pytest.mark.long
def test_stacked_events_are_taken_one_after_the_other():
    def both(state):
        state, first = release(state, 0)
        state, second = release(state, 1)
        return state, jax.tree.map(lambda *x: np.stack(x), first, second)

    trial = begun()
    trial.apply(prefill, 1, [0] * 5)
    trial.apply(both)
    assert trial.tally["stored"] == 4 and not np.asarray(trial.state.seqs.length).any()
    with pytest.raises(ValueError, match="stacked by scan together with others, wanted all in their order"):
        trial.apply(lambda state: (state, [both(state)[1], release(state, 0)[1]]))


def without(kind, composite):
    """The composite without its events of one kind."""

    def lossy(state, *args):
        state, events = composite(state, *args)
        is_events = lambda part: isinstance(part, kvjax.Events)  # noqa: E731
        keep = lambda one: one.replace(records=np.where((one.kind == kind)[:, None], 0, one.records))  # noqa: E731
        return state, jax.tree.map(keep, events, is_leaf=is_events)

    return lossy


def test_a_composite_that_breaks_the_law_is_named_with_what_differs():
    kinds = kvjax.events.EventKind
    trial = Trial(kvjax.init(SMALL))
    lost = r"^lossy: the events do not give the index: in the cache alone: group 0, namespace 0, tokens \[1, 1, 1, 1\]"
    with pytest.raises(AssertionError, match=lost):
        trial.apply(without(kinds.STORED, prefill), 0, TEXT)

    trial = begun()
    trial.apply(release, 0)
    with pytest.raises(AssertionError, match=r"^lossy: row 1 would read K/V of another text"):
        trial.apply(without(kinds.COPIED, prefill), 1, [*TEXT[:6], 0])

    trial = begun()
    trial.apply(fork, 0, 1)
    with pytest.raises(AssertionError, match=r"^lossy: row \d would read K/V of another text"):
        trial.apply(without(kinds.COPIED, decode), 1, 0)

    def backwards(state):
        state, events = prefill(state, 0, TEXT)
        state, end = release(state, 0)
        return state, [end, *events]

    with pytest.raises(AssertionError, match=r"^backwards: events: got stored under node"):
        Trial(kvjax.init(SMALL)).apply(backwards)

    def leaky(state):
        return state.replace(seqs=state.seqs.replace(length=state.seqs.length.at[0].set(0))), release(state, 1)[1]

    with pytest.raises(AssertionError, match=r"^leaky: refused with \['BAD_REQUEST'\], yet changed \.seqs\.length"):
        begun().apply(leaky)

    def unsound(state):
        _, events = release(state, 0)
        return leaky(state)[0], events

    with pytest.raises(AssertionError, match=r"^unsound: broken: committed lies within length"):
        begun().apply(unsound)


def test_a_composite_is_done_as_a_whole_or_says_otherwise():
    def move_on(state):
        state, released = release(state, 0)
        state, refused = release(state, 0)
        return state, [released, refused]

    with pytest.raises(AssertionError, match=r"^move_on: refused with \['OK', 'BAD_REQUEST'\], yet changed"):
        begun().apply(move_on)
    trial = begun()
    trial.apply(move_on, partial=True)
    assert (trial.tally["move_on"], trial.tally["BAD_REQUEST"]) == (0, 1)


def test_the_same_tokens_may_be_committed_again():
    def again(state):
        state, cut = VERBS["truncate"](state, seq=np.int32(1), length=np.int32(4))
        state, extended = VERBS["extend"](
            state, active=np.arange(ROWS) == 1, num_tokens=3 * (np.arange(ROWS) == 1).astype(np.int32), max_tokens=6
        )
        tokens = np.zeros((ROWS, 20), np.int32)
        tokens[1, :3] = TEXT[4:]
        state, committed = VERBS["commit"](state, tokens=tokens, num_tokens=3 * (np.arange(ROWS) == 1).astype(np.int32))
        return state, [cut, extended, committed]

    trial = begun()
    trial.apply(fork, 0, 1)
    trial.apply(again, cut={1: 4})
    trial = begun()
    trial.apply(fork, 0, 1)
    with pytest.raises(AssertionError, match=r"^again: row 1 would read K/V of another text"):
        trial.apply(again)


def test_a_prompt_committed_from_its_start_after_a_hit_continues_no_prompt():
    other = [*TEXT[:4], 3, 3, 3, 3]

    def whole_prompt(state, seq, tokens):
        """Forgets `cached`: the next tokens of the row are not the first tokens of its prompt."""
        state, admitted = VERBS["admit"](
            state, seq=np.int32(seq), tokens=padded(tokens), length=np.int32(len(tokens)), namespace=np.int32(0)
        )
        counts = np.where(np.arange(ROWS) == seq, len(tokens) - int(admitted.cached[0]), 0).astype(np.int32)
        new = np.zeros((ROWS, 20), np.int32)
        new[seq, : len(tokens)] = tokens
        state, committed = VERBS["commit"](state, tokens=new, num_tokens=counts)
        return state, [admitted, committed]

    trial = begun()
    trial.apply(prefill, 1, other, prompts=[other])
    trial = begun()
    with pytest.raises(AssertionError, match=r"^whole_prompt: block \d was stored as .* continues no prompt$"):
        trial.apply(whole_prompt, 1, other, prompts=[other])
    begun().apply(whole_prompt, 1, other)  # the index follows its events: without the prompt nothing is wrong


def test_what_a_composite_returns_is_checked():
    trial = begun()
    for returned, got in (
        (lambda state: state, "CacheState"),
        (lambda state: (state, state, state), "CacheState, CacheState, CacheState"),
        (lambda state: (kvjax.init(TIERS), []), "CacheState, list"),
    ):
        with pytest.raises(ValueError, match=rf"^fn: got \({got}\), wanted \(a CacheState of the same spec, its ev"):
            trial.apply(returned)
    with pytest.raises(ValueError, match=r"^fn: got events of \['int'\], wanted an Events, or several in their order"):
        trial.apply(lambda state: (state, 3))


def follow(spec, history, rng):
    """Runs requests, some at a time as one composite: `apply` accepts what `do` accepts."""
    calls = []

    def recorded(name):
        def call(state, **arguments):
            calls.append((name, arguments))
            return VERBS[name](state, **arguments)

        return call

    def composite(state):
        events = []
        for name, arguments in calls:
            state, more = VERBS[name](state, **arguments)
            events.append(more)
        return state, events

    one, many = Trial(kvjax.init(spec), verbs={name: recorded(name) for name in VERBS}), Trial(kvjax.init(spec))
    history = iter(history)
    while part := list(itertools.islice(history, int(rng.integers(1, 6)))):
        calls.clear()
        for request in part:
            one.do(request)
        if calls:
            cuts = [(int(with_["seq"]), max(int(with_["length"]), 0)) for name, with_ in calls if name == "truncate"]
            many.apply(composite, partial=True, cut=dict(sorted(cuts, reverse=True)))
    return many


def test_what_requests_may_do_a_composite_may():
    many = follow(SMALL, itertools.islice(random_requests(3), 150), np.random.default_rng(3))
    assert many.tally["copied"] and many.tally["removed"] and many.tally["composite"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiers", "windows, tiers", "extra ids"])
def test_what_requests_may_do_a_composite_may_on_any_cache(name):
    @hypothesis.settings(max_examples=100)
    @hypothesis.given(requests(SPECS[name]))
    def property_test(history):
        follow(SPECS[name], history, np.random.default_rng(len(history)))

    property_test()


def test_a_request_says_its_form():
    """The tables of `Request` name the fields of each verb's random requests."""
    # A line of a table: verbs, two spaces or more, fields; further lines of the fields are indented as far as these.
    lines = re.findall(r"^ {8}(\w[\w, ]*?)(?: {2,}(\S.*(?:\n {12,}\S.*)*))?$", Request.__doc__, re.MULTILINE)
    fields = {
        verb: {part.split("(")[0].strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()}
        for verbs, text in lines
        for verb in verbs.split(", ")
    }
    del fields["verb"]
    for verb in ("extend", "commit", "pin", "unpin"):
        assert verb in fields
    assert set(fields) == set(VERBS) - {"lookup"}
    of_tiers = Draws(0, TIERS)
    for request in (*itertools.islice(random_requests(0), 300), *map(of_tiers.make, fields)):
        assert set(request) - {"verb"} == fields[request["verb"]] - {"extra_ids"}, request
    assert set().union(*fields.values(), {"verb", "host"}) == set(Request.__annotations__)
