# SPDX-License-Identifier: Apache-2.0
"""Studies of sparse attention over the paged cache: which blocks a decoder has to read."""

from kvjax.research.sparsity.calls import call_sparse, init_states
from kvjax.research.sparsity.measure import POLICIES, Followed, Measurement, Texts, follow, plot_study, study, table
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
    "POLICIES",
    "Followed",
    "Measurement",
    "Scores",
    "SparsityPolicy",
    "Texts",
    "attention_mass",
    "call_sparse",
    "follow",
    "h2o",
    "init_states",
    "plot_study",
    "quest",
    "random",
    "snapkv",
    "streaming",
    "study",
    "table",
]
