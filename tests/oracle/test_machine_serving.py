# SPDX-License-Identifier: Apache-2.0
"""The library's scheduler does in every step what the one in plain Python does (`serving.py`)."""

import collections
import os

import pytest

from kvjax.serving.scheduler import Scheduler
from tests.oracle.serving import BLOCKS, Both, program

OPTIONS = {
    "known": Scheduler(reserve="known", chunk=6, chunk_rows=2, k_waiting=2, patience=3, look=2),
    "goal": Scheduler(chunk=6, chunk_rows=3, k=3, k_waiting=3, chunks="equal", patience=4, coalesce=2),
    "batch": Scheduler(reserve="batch", chunk=20, chunk_rows=4, k=1, look=1, wait_for_prefix=False),
    "tight": Scheduler(reserve="known", chunk=3, chunk_rows=1, budget=6, k=4, watermark=1, patience=2),
}
LONG = [("goal", "full"), ("known", "windows")]
BY_NIGHT = [("batch", "full"), ("tight", "full"), ("tight", "windows"), ("goal", "windows"), ("batch", "windows")]
FEWEST = {"full": 6, "windows": 7}  # blocks: enough for one row
LENGTH = 60  # of a history
HAPPENS = (
    "admitted", "mixed", "sample", "cancelled", "stored", "removed", "copied", "finish STOP", "finish LENGTH",
    "submit ROW_FULL", "submit BAD_REQUEST", "submit HELD",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("known", "full"),
        *[pytest.param(*case, marks=pytest.mark.long) for case in LONG],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in BY_NIGHT],
    ],
)
def test_both_schedulers_do_the_same(name, layers):
    options, tally = OPTIONS[name], collections.Counter()
    seeds = range(50 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 2)
    for num_blocks in (FEWEST[layers], FEWEST[layers] + 3, BLOCKS):
        for seed in seeds:
            both = Both(options, layers, num_blocks, seed)
            try:
                both.run(LENGTH)
                both.finish()
            except AssertionError as error:
                raise AssertionError(f"{num_blocks} blocks, seed {seed}: {error}") from error
            tally += both.tally
    rare = [thing for thing in HAPPENS if not tally[thing]]
    assert not rare, f"never happened: {rare} in {dict(tally)}"
    assert bool(tally["preempted"]) == (options.reserve == "known")
    assert program(options, layers)._cache_size() == 1
