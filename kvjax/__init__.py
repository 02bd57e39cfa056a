# SPDX-License-Identifier: Apache-2.0
"""kvjax: a functional paged KV cache for JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from kvjax import debug as debug
from kvjax import events as events
from kvjax import policies as policies
from kvjax import pools as pools
from kvjax import sizing as sizing
from kvjax import spec as spec
from kvjax import state as state
from kvjax import tiers as tiers
from kvjax._compile import enable_compilation_cache
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.debug import check, show
from kvjax.events import Events, Status, fold, to_list
from kvjax.policies import Retention, by_score, lru
from kvjax.pools import apply, attend, init_pools, ragged, recur, rest, rope_write, view, write
from kvjax.sizing import plan
from kvjax.spec import CacheSpec, LayerSpec, make_spec
from kvjax.state import CacheState, EvictionPolicy
from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.commit import commit
from kvjax.verbs.control import evict, forget_namespaces, pin, reset, unpin
from kvjax.verbs.extend import extend
from kvjax.verbs.fork import beam_step, fork
from kvjax.verbs.init import init
from kvjax.verbs.release import release
from kvjax.verbs.thin import thin
from kvjax.verbs.trim import trim
from kvjax.verbs.truncate import truncate

if TYPE_CHECKING:
    from kvjax import serving as serving
    from kvjax.serving import Sampling, generate, rollout, run_batch, score, step, stream
else:

    def __getattr__(name: str) -> Any:
        """`serving` and its names, which are loaded when first used: that takes as long as all the rest."""
        if name != "serving" and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        serving = importlib.import_module("kvjax.serving")
        return serving if name == "serving" else getattr(serving, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "serving"})


__version__ = "0.1.0"
__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # states and specs
    "LayerSpec", "CacheSpec", "make_spec", "plan", "Cache", "CacheState", "Namespaces",
    # verbs
    "init", "admit", "lookup", "extend", "commit", "fork", "truncate", "thin", "trim", "release", "beam_step", "pin",
    "unpin", "evict", "forget_namespaces", "reset",
    # bytes
    "init_pools", "write", "rope_write", "apply", "attend", "recur", "view", "ragged", "rest",
    # events
    "Events", "Status", "to_list", "fold",
    # eviction
    "lru", "by_score", "EvictionPolicy", "Retention",
    # generation
    "generate", "rollout", "score", "run_batch", "stream", "step", "Sampling", "enable_compilation_cache",
    # looking inside
    "show", "check",
]  # fmt: skip
