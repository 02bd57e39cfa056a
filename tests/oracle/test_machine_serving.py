# SPDX-License-Identifier: Apache-2.0
"""The library's scheduler does the same in every step as the one in plain Python (`serving.py`)."""

import collections
import dataclasses
import itertools
import os

import jax
import pytest

from tests.oracle.bytes_machine import SIZE
from tests.oracle.serving import COUNTS, LAYERS, OPTIONS, Both, program

LONG = [("canonical", SIZE, "windows")]
ALL = itertools.product(OPTIONS, (1, 3, SIZE), LAYERS)
BY_NIGHT = [case for case in ALL if case not in LONG]
NIGHTLY = 10_000  # steps of the machine, of all cases together
LENGTH = 60  # steps of a history, without those that finish its requests
HAPPENS = (
    "admitted", "mixed", "sample", "cancelled", "stored", "removed", "copied", "finish STOP", "finish LENGTH",
    "submit ROW_FULL", "submit BAD_REQUEST", "submit HELD",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "k", "layers"),
    [
        *[pytest.param(*case, marks=pytest.mark.long) for case in LONG],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in BY_NIGHT],
    ],
)
def test_both_schedulers_do_the_same(name, k, layers):
    jax.clear_caches()  # the programs of the case before: see `forget_programs`
    options, tally = dataclasses.replace(OPTIONS[name], k=k), collections.Counter()
    seeds = 2
    if os.environ.get("HYPOTHESIS_PROFILE") == "nightly":
        seeds = -(-NIGHTLY // ((len(LONG) + len(BY_NIGHT)) * len(COUNTS) * LENGTH))
    for num_blocks in COUNTS:
        for seed in range(seeds):
            both = Both(options, layers, num_blocks, seed)
            try:
                both.run(LENGTH)
                both.finish()
            except AssertionError as error:
                raise AssertionError(f"{num_blocks} blocks, seed {seed}: {error}") from error
            tally += both.tally
    rare = [thing for thing in HAPPENS if not tally[thing]]
    assert not rare, f"never happened: {rare} in {dict(tally)}"
    assert bool(tally["preempted"]) == (options.reserve == "num_tokens")
    assert program(options, layers)._cache_size() == 1
