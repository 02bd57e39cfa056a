# SPDX-License-Identifier: Apache-2.0
"""Requests of a production trace, shrunk: lengths are divided by 16, and prompts are made of the trace's ids of blocks.

The trace is Mooncake's (USENIX FAST '25). For each request it has an arrival time, the lengths of its prompt and
answer, and an id for each block of 512 tokens of the prompt, where equal ids stand for equal tokens. Here such a block
is 32 tokens made of its id.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import NamedTuple

import numpy as np

from benchmarks import common
from kvjax.research import Trace, make_trace

TRACE = pathlib.Path(__file__).parent / "data" / "mooncake_requests.csv"
# The whole trace, where somebody has put it.
TRACES = pathlib.Path(os.environ.get("KVJAX_TRACES", pathlib.Path(__file__).parents[2] / "shared" / "traces"))
WHOLE = TRACES / "conversation_trace.jsonl"
SHRINK, HASHED, MS_A_STEP = 16, 512, 250


class Request(NamedTuple):
    """A request: the step in which it is due, its prompt, and the number of tokens to generate."""

    due: int
    prompt: np.ndarray
    new_tokens: int


def read_trace(path: pathlib.Path, count: int) -> list[Request]:
    """The first requests of a trace, in Mooncake's JSON lines or in the form of the table in `benchmarks/data`."""
    requests = []
    of_an_id = np.arange(HASHED // SHRINK, dtype=np.int32)
    for timestamp, input_length, output_length, ids in _read_fields(path, count):
        tokens = np.array(ids, np.int32)[:, None] * of_an_id.size + of_an_id
        prompt = tokens.reshape(-1)[: -(-input_length // SHRINK)]
        requests.append(Request(timestamp // MS_A_STEP, prompt, -(-output_length // SHRINK)))
    return requests


def read_blocks(path: pathlib.Path, count: int | None = None, longest: int | None = None) -> Trace:
    """The first requests, or all, with their real lengths. Prompts are cut to their first `longest` blocks."""
    times, inputs, outputs, ids = zip(*_read_fields(path, count), strict=True)
    inputs = [tokens if longest is None else min(tokens, longest * HASHED) for tokens in inputs]
    return make_trace(times, inputs, outputs, [block_ids[:longest] for block_ids in ids], HASHED)


def _read_fields(path: pathlib.Path, count: int | None) -> list[tuple[int, int, int, list[int]]]:
    with path.open() as file:
        if path.suffix == ".jsonl":
            lines = (json.loads(line) for line in itertools.islice(file, count))
            fields = [(x["timestamp"], x["input_length"], x["output_length"], x["hash_ids"]) for x in lines]
        else:
            rows = (line.split(",") for line in file if line[0].isdigit())
            fields = [(*map(int, row[:3]), _ids(row[3])) for row in itertools.islice(rows, count)]
    common.require(count in (None, len(fields)), f"{path}: got {len(fields)} requests, wanted {count}")
    return fields


def _ids(runs: str) -> list[int]:
    """Ids from text, in which runs are written as first x number."""
    pairs = [map(int, run.split("x")) for run in runs.split()]
    return [first + i for first, count in pairs for i in range(count)]
