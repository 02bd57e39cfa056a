# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of simulators of any policy: policies with their oracles, forests, and checks of programs."""

import re

import hypothesis.strategies as st
import numpy as np

import kvjax
from kvjax.policies import by_class, cost_aware, fifo, lfu, lru
from kvjax.research import make_trace
from tests.oracle import research
from tests.oracle import research_policies as oracle
from tests.unit.research import cases

BLOCK = 4
LENGTHS = [1] * 8 + [2] * 8 + [3] * 6 + [5] * 6 + [7] * 4 + [9] * 4 + [10] * 4
LONGEST, MOST = 10, 48


def often(blocks):
    """A score with many ties, which go by block number."""
    return blocks.hits - blocks.depth


def by_classes():
    """Three classes by depth. In each the newest leave first, so parents are often passed over."""
    return by_class(depth_class, newest, classes=3, name="by_classes")


def depth_class(blocks, ids):
    return blocks.depth[ids] // 3


def newest(blocks, heads):
    return blocks.clock - blocks.stored[heads]


# Each policy, and its function in plain Python.
POLICIES = {
    "lru": (lru(), oracle.lru),
    "lfu": (lfu(), oracle.lfu),
    "fifo": (fifo(), oracle.fifo),
    "cost_aware": (cost_aware(balance=5 * BLOCK), oracle.cost_aware(5)),
    "in one line": (kvjax.by_score(often), lambda cache: cache.hits - cache.depth),
}


@st.composite
def forests(draw):
    """Traces with equal numbers of requests and blocks, so all share a program.

    A prompt begins with some or all blocks of an earlier prompt, and continues with new blocks. Its last block is often
    partial.
    """
    prompts, tokens, ids = [], [], iter(range(sum(LENGTHS)))
    for length in draw(st.permutations(LENGTHS)):
        earlier = draw(st.sampled_from([[], *prompts]))
        shared = earlier[: draw(st.integers(0, length))]
        prompts.append([*shared, *(next(ids) for _ in range(length - len(shared)))])
        tokens.append(length * BLOCK - draw(st.sampled_from([0, 0, 1, BLOCK - 1])))
    return make_trace(range(len(prompts)), tokens, [0] * len(prompts), prompts, BLOCK)


def small_trace():
    """Four prompts of a block, then the first and the last of them again, each with another block after it."""
    prompts = [[0], [1], [2], [3], [0, 4], [3, 5]]
    return make_trace(range(6), [BLOCK * len(prompt) for prompt in prompts], [0] * 6, prompts, BLOCK)


def lru_hits(trace, size, rule):
    return research.lru(cases.prompts_of(trace), trace.full.tolist(), size, rule)


def assert_same(run, trace, policy, score, sizes, rule):
    """Asserts the same blocks found by every request in caches of all sizes."""
    hits = run(trace, policy, sizes, rule=rule)
    assert hits.sizes.tolist() == sizes and hits.rule == rule and hits.blocks.dtype == np.int32
    wanted = [oracle.score_hits(trace, size, rule, score) for size in sizes]
    np.testing.assert_array_equal(hits.blocks, wanted)
    return hits


def lines_of_size(text, most):
    """The lines of a compiled program's loops which select or copy an array with a dimension of `most` or more."""
    lines = re.finditer(r"^ *(?:ROOT )?%?\S+ = \(?\w+\[([\d,]*)\]\S* (?:copy|select)\(.*$", text, re.M)
    large = [line[0] for line in lines if any(int(size) >= most for size in line[1].split(",") if size)]
    return [line for line in large if "/while/" in line]
