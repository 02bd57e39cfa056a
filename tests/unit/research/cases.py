# SPDX-License-Identifier: Apache-2.0
"""Traces for tests: a cut of the conversation trace, the whole trace if its file exists, and small random forests."""

import functools
import json

import hypothesis.strategies as st
import numpy as np
import pytest

from benchmarks.trace import TRACE, WHOLE, read_blocks
from kvjax.research import Comparison, make_trace, read_mooncake


@functools.cache
def cut(num_requests=2000):
    """The first requests of the conversation trace."""
    return read_blocks(TRACE, num_requests)


def whole_path():
    """The file of the whole conversation trace. Skips the test if it does not exist."""
    if not WHOLE.exists():
        pytest.skip(f"{WHOLE} is not there (KVJAX_TRACES names its folder)")
    return WHOLE


@functools.cache
def whole():
    """The whole conversation trace."""
    return read_mooncake(whole_path())


def comparison(name, gain, shares=(0.02, 0.3)):
    """A result of `compare` with made-up figures."""
    found = np.array([0.2, 0.4])
    rates = {"lru": found, "mine": found + gain, "bound": found + 0.2}
    tokens = np.array([[10.0, 200.0, 3000.0], [0.0, 100.0, 1500.0]])
    return Comparison(
        name,
        "full",
        np.array(shares),
        np.array([100, 1500]),
        rates,
        {"mine": np.full(2, gain - 0.01)},
        {"mine": np.full(2, gain + 0.01)},
        {"lru": tokens, "mine": tokens / 2},
    )


def prompts_of(trace):
    return [trace.blocks(request).tolist() for request in range(len(trace))]


@st.composite
def forests(draw, max_requests=12, longest=6, block_size=4):
    """Traces whose prompts begin like an earlier prompt, and may continue with new blocks.

    Prompts are repeated, many have a single block, and a full block of a prompt may be partial in another.
    """
    prompts, next_id = [], 0
    for _ in range(draw(st.integers(1, max_requests))):
        before = draw(st.sampled_from([[], *prompts[-8:]]))
        prompt = before[: draw(st.integers(0, len(before)))]
        new = draw(st.integers(0 if prompt else 1, max(longest - len(prompt), 0)))
        prompts.append([*prompt, *range(next_id, next_id + new)])
        next_id += new
    lengths = [block_size * len(prompt) - draw(st.sampled_from([0, 0, 1, block_size - 1])) for prompt in prompts]
    time = sorted(draw(st.lists(st.integers(0, 50), min_size=len(prompts), max_size=len(prompts))))
    answers = [draw(st.integers(0, 9)) for _ in prompts]
    return make_trace(time, lengths, answers, prompts, block_size)


MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]},
    {"timestamp": 3000, "input_length": 1300, "output_length": 0, "hash_ids": [7, 9, 4]},
]
BAILIAN = [
    {"chat_id": 5, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 3, "type": "text",
     "turn": 1, "hash_ids": [1, 2]},
    {"chat_id": 6, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 32, "output_length": 3, "type": "image",
     "turn": 1, "hash_ids": [3, 2]},
    {"chat_id": 8, "parent_chat_id": 5, "timestamp": 1.25, "input_length": 33, "output_length": 3, "type": "text",
     "turn": 2, "hash_ids": [1, 2, 2]},
    {"chat_id": 9, "parent_chat_id": 8, "timestamp": 2, "input_length": 1, "output_length": 3, "type": "text",
     "turn": 3, "hash_ids": [1]},
    {"chat_id": 12, "parent_chat_id": 4, "timestamp": 3, "input_length": 1, "output_length": 3, "type": "text",
     "turn": 2, "hash_ids": [1]},
]  # fmt: skip


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(path, lines):
    path.write_text(lines)
    return path
