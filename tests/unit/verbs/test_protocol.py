# SPDX-License-Identifier: Apache-2.0
"""The common form of all verbs: names and order of arguments, documentation, and results."""

import inspect
import re

import chex
import jax
import pytest

import kvjax
import kvjax.stores
from tests import cases

VERBS = {
    name: getattr(home, name)
    for home in (kvjax, kvjax.tiers, kvjax.stores)
    for name in home.__all__
    if getattr(home, name).__module__.startswith("kvjax.verbs.") and name != "init"
}
# Keyword-only arguments, with the same annotation and default in all verbs, in this order. `cases` has the positional
# ones.
OPTIONS = {
    "namespace": ("ArrayLike", 0),
    "extra_ids": ("ArrayLike | None", None),
    "retention": ("Retention | None", None),
    "requested_priority": ("ArrayLike", -1),
    "hits": ("ArrayLike", 0),
    "seqs": ("ArrayLike | None", None),
    "exact": ("ArrayLike | None", None),
    "num_blocks": ("ArrayLike | None", None),
    "max_blocks": ("int", inspect.Parameter.empty),
    "max_tokens": ("int | None", None),
    "max_removed": ("int | None", None),
    "now": ("ArrayLike", 0),
    "reserve_tokens": ("int | None", None),
    "alignment_tokens": ("int | None", None),
    "group": ("int", 0),
    "tiers": ("tuple[str, ...]", ("device",)),
}
# `lookup` orders no moves, so it looks on both tiers by default.
OTHER_TYPES = {"transfer": "Transfer | None", "adopted": "Adopted"}
OTHER_DEFAULTS = {("lookup", "tiers"): ("device", "host")}

every_verb = pytest.mark.parametrize("name", VERBS)


def parameters(name):
    """The parameters after the state."""
    return list(inspect.signature(VERBS[name]).parameters.values())[1:]


def documented(name):
    """The sections of the docstring: {section: text}."""
    parts = re.split(r"^(Args|Returns|Raises|Source):", inspect.getdoc(VERBS[name]), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_these_are_the_verbs():
    assert VERBS.keys() == cases.VERBS.keys()


@every_verb
def test_the_state_is_first(name):
    state, *_ = inspect.signature(VERBS[name]).parameters.values()
    assert (state.name, state.annotation, state.default) == ("state", "CacheState", state.empty)
    assert state.kind is state.POSITIONAL_OR_KEYWORD


@every_verb
def test_what_a_verb_needs_is_positional(name):
    positional = [p for p in parameters(name) if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == cases.VERBS[name].arguments.split()
    for p in positional:
        assert p.annotation == OTHER_TYPES.get(p.name, "ArrayLike")
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
    described = dict(re.findall(r"^  (\w+): (.+)$", sections["Args"], re.MULTILINE))
    assert list(described) == list(inspect.signature(VERBS[name]).parameters)
    assert all("static" in described[p.name] for p in parameters(name) if p.annotation.startswith(("int", "tuple")))
    assert sections["Returns"].strip()


# Results, by shapes alone: nothing is compiled.


def test_the_calls_are_of_all_verbs():
    called = {call.split()[0] for call in cases.CALLS | cases.HOST_CALLS}
    assert called == VERBS.keys() - {
        "complete",
        "finish_adoption",
    }  # each call that orders moves is completed, each adoption lands


CALLS = {call: arguments for call, arguments in cases.CALLS.items() if call != "lookup"}


@pytest.mark.parametrize(
    ("call", "spec"), [(call, "plain") for call in CALLS] + [(call, "all of it") for call in CALLS | cases.HOST_CALLS]
)
def test_the_state_keeps_its_shapes_and_dtypes(call, spec):
    args, options = (CALLS | cases.HOST_CALLS)[call]
    state = jax.eval_shape(lambda: kvjax.init(cases.SPECS[spec]))
    after, events = jax.eval_shape(lambda state: VERBS[call.split()[0]](state, *args, **options), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert (events.transfer is not None) == (call in cases.HOST_CALLS)
    if call in cases.HOST_CALLS:
        done, _ = jax.eval_shape(kvjax.tiers.complete, after, events.transfer, True)
        chex.assert_trees_all_equal_shapes_and_dtypes(done, state)
