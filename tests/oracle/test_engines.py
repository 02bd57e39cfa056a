# SPDX-License-Identifier: Apache-2.0
"""Engines, batches and streams: every byte is right at every turn (`engines.py`), and turns are the oracle's."""

import collections
import dataclasses
import itertools

import jax
import pytest

from tests.drafters import WRONG, Guesses
from tests.oracle.bytes_machine import SIZE, VOCAB, live
from tests.oracle.drivers import Driven
from tests.oracle.engines import CONFIGS
from tests.oracle.serving import COUNTS, MODEL, OPTIONS

STEPS = 400  # of a history
OF_ENGINES = (
    "turns of engines", "closed in the middle", "broken step", "refused by the engine", "cleared",
    "finish row_full", "finish stop", "finish cancelled", "scored",
)  # fmt: skip
OF_BATCHES = "turns of batches", "beside other rows", "closed stream", "broken batch"
OF_MOVES = "failed in a turn", "failed in generate", "offloaded", "onboarded", "dropped by the host"
OF_GRAMMARS = "under a grammar stop", "under a grammar length", "new grammar"
OF_REPLICAS = "by replica 0", "by replica 1", "turns of batches", "lost replica", "failed", "generate hit", "scored"
HAPPENS = {
    "plain": (
        *OF_ENGINES,
        *OF_BATCHES,
        *OF_GRAMMARS,
        "lent anew",
        "penalized after a preemption",
        "under a grammar preempted",
    ),
    "host": (*OF_ENGINES, *OF_BATCHES, *OF_MOVES, *OF_GRAMMARS, "preempted"),
    "store": (*OF_ENGINES, "from the store"),
    "host, store": (*OF_ENGINES, *OF_MOVES, "from the store"),
    "backups": (*OF_ENGINES, *OF_BATCHES, *OF_MOVES, "preempted"),
    "backups, store": (*OF_ENGINES, *OF_MOVES, "from the store"),
    "replicas": OF_REPLICAS,
    "canonical": tuple(thing for thing in OF_ENGINES if thing != "scored"),
}


def assert_happened(tally, *things):
    rare = [thing for thing in things if not tally[thing]]
    assert not rare, f"never happened: {rare} in {dict(tally)}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("plain", marks=pytest.mark.long),
        *[pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "plain"],
    ],
)
def test_bytes_at_every_turn(name):
    jax.clear_caches()  # the programs of the configuration before: see `forget_programs`
    drafts = ("accepted drafts", "rejected drafts") if CONFIGS[name].drafts else ()
    happens = *HAPPENS.get(name, OF_ENGINES), *drafts
    assert_happened(live(CONFIGS[name], seed=3, steps=STEPS).tally, *happens, "generate hit")


OF_TURNS = (
    "admitted", "mixed", "many steps", "stored", "removed", "copied", "cancel OK", "submit NO_BLOCKS",
    "refused bad_request", "refused row_full", "finish cancelled", "finish length", "finish no_blocks",
    "finish row_full", "finish stop",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, SIZE])
@pytest.mark.parametrize("name", OPTIONS)
def test_turns_of_engines_and_batches_are_those_of_the_oracle(name, k):
    tally = collections.Counter()
    for num_blocks, seed in itertools.product(COUNTS, range(4)):
        driven = Driven(dataclasses.replace(OPTIONS[name], k=k), num_blocks, seed)
        driven.engine(turns=60)
        for _ in range(3):
            driven.batch()
        tally += driven.tally
    assert_happened(tally, *OF_TURNS)
    assert bool(tally["preempted"]) == (OPTIONS[name].reserve == "num_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "canonical"])  # each pass of it is wide
def test_turns_with_wrong_drafts_are_those_of_the_oracle(name):
    """No pass verifies drafts after wrong drafts, so blocks, events and finishes are those without a drafter."""
    tally = collections.Counter()
    drafter = Guesses.of(MODEL, VOCAB, WRONG, pass_cost=0.5)
    for num_blocks, seed in itertools.product(COUNTS, range(2)):
        driven = Driven(OPTIONS[name], num_blocks, seed, drafter)
        driven.engine(turns=60)
        driven.batch()
        tally += driven.tally
    assert_happened(tally, "admitted", "mixed", "many steps", "stored", "removed", "finish length", "finish stop")
