# SPDX-License-Identifier: Apache-2.0
"""Traces for tests: small ones drawn at random, and what of a production trace is at hand."""

import functools

import pytest
from hypothesis import strategies as st

from benchmarks.trace import TRACE, WHOLE, as_published
from kvjax.research import Trace, make_trace

BLOCK = 4


@st.composite
def traces(draw: st.DrawFn, most: int = 30, longest: int = 6) -> Trace:
    """Each prompt begins as an earlier one or a new one, and may go on with new blocks, or with no more than begin.

    Prompts are repeated, many have one block, and a block that is full in one prompt may be filled in part in another.
    """
    prompts: list[list[int]] = []
    lengths = []
    new = 0
    for _ in range(draw(st.integers(1, most))):
        prompt = draw(st.sampled_from([[], *prompts[-8:]]))
        prompt = prompt[: draw(st.integers(0, len(prompt)))]
        more = draw(st.integers(0 if prompt else 1, max(longest - len(prompt), 0)))
        prompts.append([*prompt, *range(new, new + more)])
        new += more
        lengths.append(len(prompts[-1]) * BLOCK - draw(st.sampled_from([0, 0, 1])))
    requests = range(len(prompts))
    return make_trace(requests, lengths, [0 for _ in requests], prompts, BLOCK)


@functools.cache
def cut() -> Trace:
    """The first 2,000 requests."""
    return as_published(TRACE)


@functools.cache
def whole() -> Trace:
    """All of it, where it is there."""
    if not WHOLE.exists():
        pytest.skip(f"no {WHOLE.name} (KVJAX_TRACES names its folder)")
    return as_published(WHOLE)


def prompts_of(trace: Trace) -> list[list[int]]:
    return [trace.blocks(request).tolist() for request in range(len(trace))]
