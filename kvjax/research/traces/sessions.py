# SPDX-License-Identifier: Apache-2.0
"""Sessions of a trace, known or inferred from its blocks, and two halves of a trace without a session in common."""

from __future__ import annotations

import numpy as np

from kvjax.research.traces.trace import Trace

_SHARED = 8  # a block with more children than this belongs to a prompt that sessions share


def sessions_of(trace: Trace) -> np.ndarray:
    """i64[R]; the session of each request, numbered from 0 by first request.

    Without `Trace.session`, sessions are inferred. A block with more than eight different next blocks, and all blocks
    before it, belong to a shared prompt. The first other block of a request names its session.

    Example:
      >>> from kvjax import research
      >>> prompts = [[1, 2], [3], [1, 2, 4], [3, 5]]
      >>> trace = research.make_trace(range(4), [8, 4, 12, 8], [0] * 4, prompts, block_size=4)
      >>> research.sessions_of(trace).tolist()
      [0, 1, 0, 1]
    """
    names = trace.session
    if names is None:
        is_shared = np.bincount(trace.parent[trace.parent >= 0], minlength=trace.num_ids) > _SHARED
        for block in np.flatnonzero(is_shared):
            while (block := trace.parent[block]) >= 0 and not is_shared[block]:
                is_shared[block] = True
        is_shared = is_shared[trace.ids]
        num_shared = np.add.reduceat(is_shared, trace.starts[:-1]) if len(trace) else np.zeros(0, np.int64)
        column = np.minimum(num_shared, trace.lengths - 1)  # a prompt of shared blocks alone is named by its last
        names = trace.ids[trace.starts[:-1] + column]
    _, first_request, name_index = np.unique(names, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_request))[name_index]


def split_sessions(trace: Trace) -> tuple[Trace, Trace]:
    """Splits a trace into two halves: the sessions that begin first, with half of the requests, and the rest.

    No session is in both halves. A shared prompt may be.

    Raises:
      ValueError: for a trace of a single session.

    Example:
      >>> from kvjax import research
      >>> first, second = research.split_sessions(research.draw_trace(seed=0, requests=100))
      >>> len(first) + len(second), set(first.session) & set(second.session)
      (100, set())
    """
    session = sessions_of(trace)
    requests = np.bincount(session)
    if len(requests) < 2:
        raise ValueError(f"trace: got {len(requests)} session, wanted at least 2")
    num_first = min(int(np.searchsorted(np.cumsum(requests), len(trace) / 2)) + 1, len(requests) - 1)
    is_first = session < num_first
    return trace.select(np.flatnonzero(is_first)), trace.select(np.flatnonzero(~is_first))
