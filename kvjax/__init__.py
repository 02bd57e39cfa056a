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
    from kvjax import grammar as grammar
    from kvjax import serving as serving
    from kvjax import stores as stores
    from kvjax.serving import Sampling, generate, rollout, run_batch, score, step, stream
else:
    _LATER = ("grammar", "serving", "stores")

    def __getattr__(name: str) -> Any:
        """Loads `serving` and the modules below it when they are first used: that takes as long as all the rest."""
        if name not in _LATER and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _LATER:
            return importlib.import_module(f"{__name__}.{name}")
        return getattr(importlib.import_module(f"{__name__}.serving"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_LATER})


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
