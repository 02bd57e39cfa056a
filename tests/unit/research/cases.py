# SPDX-License-Identifier: Apache-2.0
"""Traces that the tests use: a cut of the conversation trace, the whole one where it is, small forests at random."""

import os
import pathlib

import hypothesis.strategies as st
import pytest

from kvjax.research import make_trace, read_mooncake
from tests.drive import ROOT

CUT = ROOT / "benchmarks" / "data" / "mooncake_requests.csv"  # its first 2,000 requests, ids in runs: 14x3 is 14 15 16
FOLDER = pathlib.Path(os.environ.get("KVJAX_TRACES", ROOT.parent / "shared" / "traces"))


def cut(number=2000):
    """The first requests of the conversation trace."""
    rows = [line.split(",") for line in CUT.read_text().splitlines() if line[0].isdigit()][:number]
    runs = [[map(int, run.split("x")) for run in row[3].split()] for row in rows]
    ids = [[first + i for first, length in prompt for i in range(length)] for prompt in runs]
    time, lengths, answers = ([int(row[column]) for row in rows] for column in range(3))
    return make_trace(time, lengths, answers, ids, 512)


def whole_path():
    """The file of the whole conversation trace; skips where it is not."""
    path = FOLDER / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there (KVJAX_TRACES names its folder)")
    return path


def whole():
    """The whole conversation trace."""
    return read_mooncake(whole_path())


@st.composite
def forests(draw, most=12, block_size=4):
    """Traces whose prompts begin like one before them, at random."""
    prompts, fresh = [], 0
    for _ in range(draw(st.integers(1, most))):
        before = draw(st.sampled_from([[], *prompts]))
        prompt = before[: draw(st.integers(0, len(before)))]
        new = draw(st.integers(0 if prompt else 1, 3))
        prompts.append([*prompt, *range(fresh, fresh + new)])
        fresh += new
    lengths = [block_size * len(prompt) - draw(st.integers(0, block_size - 1)) for prompt in prompts]
    time = sorted(draw(st.lists(st.integers(0, 50), min_size=len(prompts), max_size=len(prompts))))
    answers = [draw(st.integers(0, 9)) for _ in prompts]
    return make_trace(time, lengths, answers, prompts, block_size)
