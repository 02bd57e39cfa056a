# SPDX-License-Identifier: Apache-2.0
"""Studies of sparse attention over the paged cache: which blocks a decoder has to read."""

from kvjax.research.sparsity.calls import call_sparse, init_states
from kvjax.research.sparsity.policies import (
    Scores,
    SparsityPolicy,
    attention_mass,
    h2o,
    quest,
    random,
    snapkv,
    streaming,
)

__all__ = [
    "Scores",
    "SparsityPolicy",
    "attention_mass",
    "call_sparse",
    "h2o",
    "init_states",
    "quest",
    "random",
    "snapkv",
    "streaming",
]
