# SPDX-License-Identifier: Apache-2.0
"""What all verbs have in common: how arguments are named and placed, what is documented, and what comes back."""

import inspect
import re

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax import LayerSpec

VERBS = {
    name: getattr(home, name)
    for home in (kvjax, kvjax.tiers)
    for name in home.__all__
    if getattr(home, name).__module__.startswith("kvjax.verbs.") and name != "init"
}
# What a verb is asked for: positional after the state, in this order. Only `num_tokens` of `extend` has a default.
ASKED = {
    "admit": "seq tokens length", "lookup": "tokens length", "extend": "active num_tokens",
    "commit": "tokens num_tokens", "fork": "src dst", "truncate": "seq length", "trim": "active", "release": "seq",
    "beam_step": "seqs parents", "pin": "blocks", "unpin": "blocks", "evict": "blocks", "reset": "",
    "offload": "blocks", "onboard": "blocks", "watermark": "empty", "swap_out": "seq", "swap_in": "seq",
    "complete": "transfer ok",
}  # fmt: skip
# How it is done: by keyword alone, with the same annotation and default in all verbs, in this order.
OPTIONS = {
    "namespace": ("ArrayLike", 0),
    "extra_ids": ("ArrayLike | None", None),
    "retention": ("Retention | None", None),
    "seqs": ("ArrayLike | None", None),
    "most": ("int", inspect.Parameter.empty),
    "max_tokens": ("int | None", None),
    "max_removed": ("int | None", None),
    "now": ("ArrayLike", 0),
    "reserve_tokens": ("int | None", None),
    "group": ("int", 0),
    "tiers": ("tuple[str, ...]", ("device",)),
}
# `lookup` orders no moves: it looks on both tiers unless told otherwise.
OTHER_DEFAULTS = {("lookup", "tiers"): ("device", "host")}

every_verb = pytest.mark.parametrize("name", VERBS)


def parameters(name):
    """Those after the state."""
    return list(inspect.signature(VERBS[name]).parameters.values())[1:]


def documented(name):
    """{section: text} of the docstring."""
    parts = re.split(r"^(Args|Returns|Raises|Source):", inspect.getdoc(VERBS[name]), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_these_are_the_verbs():
    assert VERBS.keys() == ASKED.keys()


@every_verb
def test_the_state_is_first(name):
    state, *_ = inspect.signature(VERBS[name]).parameters.values()
    assert (state.name, state.annotation, state.default) == ("state", "CacheState", state.empty)
    assert state.kind is state.POSITIONAL_OR_KEYWORD


@every_verb
def test_what_is_asked_for_is_positional(name):
    asked = [p for p in parameters(name) if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in asked] == ASKED[name].split()
    for p in asked:
        assert p.annotation == ("Transfer | None" if p.name == "transfer" else "ArrayLike")
        assert p.default == (1 if (name, p.name) == ("extend", "num_tokens") else p.empty)


@every_verb
def test_options_are_by_keyword_and_the_same_everywhere(name):
    options = [p for p in parameters(name) if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in options] == [option for option in OPTIONS if option in {p.name for p in options}]
    for p in options:
        annotation, default = OPTIONS[p.name]
        assert p.kind is p.KEYWORD_ONLY and p.annotation == annotation
        assert p.default == OTHER_DEFAULTS.get((name, p.name), default)


@every_verb
def test_a_verb_returns_a_state_and_events(name):
    returned = "Match" if name == "lookup" else "tuple[CacheState, Events]"
    assert inspect.signature(VERBS[name]).return_annotation == returned


@every_verb
def test_the_docstring_tells_of_every_parameter_and_of_what_is_returned(name):
    sections = documented(name)
    told = dict(re.findall(r"^  (\w+): (.+)$", sections["Args"], re.MULTILINE))
    assert list(told) == list(inspect.signature(VERBS[name]).parameters)
    assert all("static" in told[p.name] for p in parameters(name) if p.annotation.startswith(("int", "tuple")))
    assert sections["Returns"].strip()


# What comes back, by shapes alone: nothing is compiled.

ROWS, WIDTH = 3, 16
SHAPE = {"num_blocks": 8, "max_seqs": ROWS, "max_length": WIDTH, "block_size": 4}
SPECS = {
    "plain": kvjax.make_spec(**SHAPE),
    "all of it": kvjax.make_spec(
        [LayerSpec(1, 4), LayerSpec(1, 4, window=8)], num_host_blocks=4, extra_ids=True, retention=True, **SHAPE
    ),
}  # fmt: skip
ID, IDS, BOTH = np.int32(1), np.arange(2), ("device", "host")
LINE, LINES, ACTIVE = np.ones(WIDTH, int), np.ones((2, WIDTH), int), np.ones(ROWS, bool)
CALLS = {
    "admit": ((ID, LINE, ID), {}),
    "admit several": ((IDS, LINES, IDS), {"reserve_tokens": 4}),
    "extend": ((ACTIVE,), {}),
    "extend by numbers": ((ACTIVE, np.arange(ROWS)), {"max_tokens": 5}),
    "extend some": ((ACTIVE[:2], IDS), {"seqs": IDS, "max_tokens": 5}),
    "commit": ((LINES, IDS), {"seqs": IDS}),
    "fork": ((ID, ID), {}),
    "fork into many": ((ID, IDS), {}),
    "truncate": ((ID, ID), {}),
    "truncate several": ((IDS, IDS), {}),
    "trim": ((ACTIVE,), {"max_tokens": 4}),
    "trim any room": ((ACTIVE,), {}),
    "release": ((ID,), {}),
    "release several": ((IDS,), {}),
    "beam_step": ((IDS, IDS), {}),
    "pin": ((IDS,), {}),
    "unpin": ((IDS,), {}),
    "evict": ((IDS,), {}),
    "reset": ((), {}),
}
HOST_CALLS = {
    "admit on both tiers": ((ID, LINE, ID), {"tiers": BOTH}),
    "extend on both tiers": ((ACTIVE,), {"tiers": BOTH}),
    "extend some on both tiers": ((ACTIVE[:2],), {"seqs": IDS, "tiers": BOTH}),
    "offload": ((IDS,), {"group": 1}),
    "onboard": ((IDS,), {}),
    "watermark": ((ID,), {"most": 3}),
    "swap_out": ((ID,), {}),
    "swap_in": ((ID,), {}),
}


def test_the_calls_are_of_all_verbs_that_return_a_state():
    called = {call.split()[0] for call in CALLS | HOST_CALLS}
    assert called == VERBS.keys() - {"lookup", "complete"}  # each call that orders moves is completed


@pytest.mark.parametrize(
    ("call", "spec"), [(call, "plain") for call in CALLS] + [(call, "all of it") for call in CALLS | HOST_CALLS]
)
def test_the_state_keeps_its_shapes_and_dtypes(call, spec):
    args, options = (CALLS | HOST_CALLS)[call]
    state = jax.eval_shape(lambda: kvjax.init(SPECS[spec]))
    after, events = jax.eval_shape(lambda state: VERBS[call.split()[0]](state, *args, **options), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert (events.transfer is not None) == (call in HOST_CALLS)
    if call in HOST_CALLS:
        done, _ = jax.eval_shape(kvjax.tiers.complete, after, events.transfer, True)
        chex.assert_trees_all_equal_shapes_and_dtypes(done, state)
