# SPDX-License-Identifier: Apache-2.0
"""Tables of all policies and verbs, read by the tests of both. Add an entry here for a new policy or verb."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import kvjax
from kvjax import CacheSpec, EvictionPolicy, LayerSpec
from tests import drive
from tests.drive import BOTH, PLAIN, RETENTION


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy of the library, by its maker's name in `POLICIES`.

    Attributes:
      make: returns the policy.
      shows: its `repr`.
      evicts: the order in which documents 1, 2 and 3, of two blocks each, leave. They were last used in the order 3, 2,
        1, document 1 was used twice and document 2 three times. None means another test covers it.
      spec: spec of the cache to verify it on.
    """

    make: Callable[[], EvictionPolicy]
    shows: str
    evicts: tuple[int, ...] | None = None
    spec: CacheSpec = PLAIN


POLICIES = {
    "lru": Policy(kvjax.lru, "lru()", (3, 3, 2, 2, 1, 1)),
    "fifo": Policy(kvjax.policies.fifo, "fifo()", (1, 1, 2, 2, 3, 3)),
    "lfu": Policy(kvjax.policies.lfu, "lfu()", (3, 3, 1, 1, 2, 2)),
    "lfu_da": Policy(kvjax.policies.lfu_da, "lfu_da()", (3, 3, 1, 1, 2, 2)),
    "random": Policy(kvjax.policies.random, "random()"),
    "cost_aware": Policy(kvjax.policies.cost_aware, "cost_aware(balance=24576)"),
    "priority": Policy(kvjax.policies.priority, "priority()", spec=RETENTION),
    "trt_leaf": Policy(kvjax.policies.trt_leaf, "trt_leaf()", spec=RETENTION),
    "adaptive": Policy(kvjax.policies.adaptive, "adaptive()"),
    "t_lru": Policy(kvjax.policies.t_lru, "t_lru(tail_blocks=2)", (3, 3, 2, 2, 1, 1)),
}


ROWS, WIDTH = 3, 16
OPTIONS = {"num_blocks": 8, "max_seqs": ROWS, "max_length": WIDTH, "block_size": 4}
LAYERS = [LayerSpec(2, 16), LayerSpec(1, 16, window=8, sink_tokens=2)]
# Caches for calls of which only the shapes are used.
SPECS = {
    "plain": kvjax.make_spec(LAYERS[:1], dtype="float32", thinning=True, sparse=True, **OPTIONS),
    "all of it": kvjax.make_spec(
        LAYERS,
        num_host_blocks=4,
        extra_ids=True,
        retention=True,
        thinning=True,
        sparse=True,
        backups=True,
        dtype="int8",
        **OPTIONS,
    ),
}
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb, by its name in `VERBS`.

    Attributes:
      arguments: positional arguments after the state, in order.
      calls: {variant: (positional arguments, options)} on any of `SPECS`. The variant "" is the plain call.
      host_calls: the same for calls which order moves, on "all of it".
    """

    arguments: str
    calls: dict[str, Call] = dataclasses.field(default_factory=dict)
    host_calls: dict[str, Call] = dataclasses.field(default_factory=dict)


IDS, ACTIVE = np.arange(2), np.ones(ROWS, bool)
TEXT, TEXTS = np.ones(WIDTH, np.int64), np.ones((2, WIDTH), np.int64)
TIERS, HAVE = {"tiers": BOTH}, np.ones(WIDTH // 4, bool)
VERBS = {
    "admit": Verb(
        "seq tokens length",
        {"": ((0, TEXT, 9), {"now": 5}), "several": ((IDS, TEXTS, IDS), {"reserve_tokens": 4})},
        {"on both tiers": ((0, TEXT, 9), TIERS)},
    ),
    "adopt": Verb(
        "tokens length have",
        {"": ((TEXT, 9, HAVE), {"now": 5}), "with its hits": ((TEXT, 9, HAVE), {"hits": np.arange(HAVE.size)})},
        {"on both tiers": ((TEXT, 9, HAVE), TIERS)},
    ),
    "finish_adoption": Verb("adopted arrived"),  # each of these calls is landed
    "lookup": Verb("tokens length", {"": ((TEXT, 9), {})}),
    "extend": Verb(
        "active num_tokens",
        {
            "": ((ACTIVE,), {}),
            "by numbers": ((ACTIVE, np.arange(ROWS)), {"max_tokens": 5}),
            "some": ((ACTIVE[:2], IDS), {"seqs": IDS, "max_tokens": 5}),
        },
        {"on both tiers": ((ACTIVE,), TIERS), "some on both tiers": ((ACTIVE[:2],), {"seqs": IDS, **TIERS})},
    ),
    "commit": Verb(
        "tokens num_tokens",
        {
            "": ((np.ones((ROWS, WIDTH), np.int64), np.full(ROWS, 3)), {}),
            "some": ((TEXTS, IDS), {"seqs": IDS, "exact": np.arange(2) > 0}),
        },
    ),
    "fork": Verb("src dst", {"": ((0, 1), {}), "into many": ((0, IDS), {})}),
    "truncate": Verb("seq length", {"": ((0, 3), {}), "several": ((IDS, IDS), {})}),
    "thin": Verb(
        "seq columns",
        {
            "": ((0, np.zeros(WIDTH // 4, bool)), {"now": 5}),
            "several": ((IDS, np.zeros((2, WIDTH // 4), bool)), {"max_removed": 2}),
        },
    ),
    "trim": Verb("active", {"": ((ACTIVE,), {"max_tokens": 4}), "any room": ((ACTIVE,), {})}),
    "release": Verb("seq", {"": ((0,), {}), "several": ((np.arange(ROWS),), {})}),
    "beam_step": Verb("seqs parents", {"": ((IDS, np.zeros(2, np.int64)), {})}),
    "pin": Verb("blocks", {"": ((IDS,), {})}),
    "unpin": Verb("blocks", {"": ((IDS,), {})}),
    "evict": Verb("blocks", {"": ((IDS,), {})}),
    "forget_namespaces": Verb("keep", {"": ((IDS,), {})}),
    "reset": Verb("", {"": ((), {})}),
    "offload": Verb("blocks", host_calls={"": ((IDS,), {})}),
    "onboard": Verb("blocks", host_calls={"": ((IDS,), {"group": 1})}),
    "backup": Verb("", host_calls={"": ((), {"max_blocks": 3})}),
    "watermark": Verb("empty", host_calls={"": ((2,), {"max_blocks": 3})}),
    "swap_out": Verb("seq", host_calls={"": ((0,), {}), "several": ((IDS,), {})}),
    "swap_in": Verb("seq", host_calls={"": ((0,), {}), "several": ((IDS,), {})}),
    "complete": Verb("transfer ok"),  # each of the host calls is completed
}
# By "VERB" or "VERB VARIANT".
CALLS = {f"{name} {variant}".strip(): call for name, verb in VERBS.items() for variant, call in verb.calls.items()}
HOST_CALLS = {
    f"{name} {variant}".strip(): call for name, verb in VERBS.items() for variant, call in verb.host_calls.items()
}
HOST_VERBS = tuple(name for name, verb in VERBS.items() if verb.host_calls and not verb.calls)
# Other functions of a state that are methods of a cache, too.
VIEWS = ("view", "ragged", "mixed", "free_rows")
TIMED = tuple(name for name in VERBS if "now" in inspect.signature(drive.verb(name)).parameters)
