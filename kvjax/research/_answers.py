# SPDX-License-Identifier: Apache-2.0
"""The hits of a cache that stores answers: an estimate, since traces do not say which prompt has an answer."""

from __future__ import annotations

import numpy as np

from kvjax.research.rules import Rule
from kvjax.research.traces import Trace

_SHARED = 2  # full blocks that make a later prompt the next turn; one alone may be a system prompt


def found_in_answers(trace: Trace, rule: Rule, found: np.ndarray) -> tuple[int, int]:
    """Blocks that prompts would find beside i32[R], those found already, and how many prompts they are of.

    A prompt is taken for the next turn of an earlier request if it begins with the full blocks of its prompt, at least
    two, not with a last block that was filled in part, and is no shorter than its prompt and answer together. Then it
    would find all blocks that these fill.
    """
    # Last full block of a prompt -> (tokens of prompt and answer, block filled in part, -1 if none) of its requests.
    ends: dict[int, list[tuple[int, int]]] = {}
    blocks, prompts = 0, 0
    full, tokens = trace.full.tolist(), trace.input_length.tolist()
    most = trace.lengths if rule == "papers" else trace.lengths - 1
    for request, answer in enumerate(trace.output_length.tolist()):
        ids = trace.blocks(request).tolist()
        mine = set(ids)
        turns = (before for block in ids for before in ends.get(block, ()))
        reach = [total // trace.block_size for total, last in turns if total <= tokens[request] and last not in mine]
        more = min(max(reach, default=0), int(most[request])) - int(found[request])
        blocks, prompts = blocks + max(more, 0), prompts + (more > 0)
        if full[request] >= _SHARED:
            partial = ids[-1] if full[request] < len(ids) else -1
            ends.setdefault(ids[full[request] - 1], []).append((tokens[request] + answer, partial))
    return blocks, prompts
