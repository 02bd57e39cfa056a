# SPDX-License-Identifier: Apache-2.0
"""Eviction policies choose the blocks to evict when blocks run short. The core checks every choice again.

This line makes a policy. The block with the lowest score leaves first, and a score can use all of `state.Blocks`:

    smallest_first = by_score(lambda blocks: blocks.fill)
"""

from kvjax.policies.adaptive import adaptive
from kvjax.policies.classes import by_class, lfu, t_lru
from kvjax.policies.retention import Retention, TokenRange
from kvjax.policies.ring import lru, vllm_v1
from kvjax.policies.scores import by_score, cost_aware, fifo, lfu_da, priority, random, trt_leaf

__all__ = [
    "Retention",
    "TokenRange",
    "adaptive",
    "by_class",
    "by_score",
    "cost_aware",
    "fifo",
    "lfu",
    "lfu_da",
    "lru",
    "priority",
    "random",
    "t_lru",
    "trt_leaf",
    "vllm_v1",
]
