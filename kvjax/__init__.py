# SPDX-License-Identifier: Apache-2.0
"""kvjax: a functional paged KV cache for JAX."""

from kvjax._interrupt import GenerationInterrupted
from kvjax.attention import attend
from kvjax.beam import beam_step
from kvjax.cache import admit, commit, extend, fork, init, lookup, release, truncate
from kvjax.control import evict, pin, reset, unpin
from kvjax.debug import RequestError, check, checked, index_of, snapshot
from kvjax.engine import step
from kvjax.events import EventKind, EventLog, Events, Mirror, Status, append, counts, fold, init_log, to_list
from kvjax.generation import Output, Progress, generate, stream
from kvjax.host_pool import HostPools, TransferError, init_host_pools, move
from kvjax.keys import Namespaces
from kvjax.match import Match
from kvjax.model import Model
from kvjax.movement import complete, offload, onboard, swap_in, swap_out, watermark
from kvjax.paired import Cache
from kvjax.plan import Ledger, Plan, plan
from kvjax.plots import plot_blocks
from kvjax.policies import EvictionPolicy, by_score, cost_aware, fifo, lfu, lru, priority, random, trt_leaf, vllm_v1
from kvjax.pool import Pools, apply, init_pools, write
from kvjax.retention import Retention, TokenRange
from kvjax.sampling import Sampling
from kvjax.show import show
from kvjax.spec import CacheSpec, GroupSpec, LayerSpec, PoolSpec, make_spec
from kvjax.state import NO_BLOCK, Blocks, CacheState, Group, Sequences
from kvjax.stats import Stats, Totals, stats
from kvjax.tiered import FailedTransfer, TieredCache
from kvjax.transfer import Transfer
from kvjax.view import View, ragged, view

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # states and specs
    "CacheSpec",
    "GroupSpec",
    "LayerSpec",
    "PoolSpec",
    "make_spec",
    "Plan",
    "Ledger",
    "plan",
    "Cache",
    "TieredCache",
    "FailedTransfer",
    "CacheState",
    "Group",
    "Blocks",
    "Sequences",
    "NO_BLOCK",
    # verbs
    "init",
    "admit",
    "lookup",
    "extend",
    "commit",
    "fork",
    "truncate",
    "release",
    "beam_step",
    "evict",
    "pin",
    "unpin",
    "reset",
    "offload",
    "onboard",
    "watermark",
    "swap_out",
    "swap_in",
    "complete",
    "Transfer",
    "Match",
    "Namespaces",
    # events
    "Events",
    "EventKind",
    "EventLog",
    "Status",
    "Mirror",
    "append",
    "counts",
    "fold",
    "init_log",
    "to_list",
    "snapshot",
    # eviction policies
    "EvictionPolicy",
    "by_score",
    "cost_aware",
    "fifo",
    "lfu",
    "lru",
    "priority",
    "random",
    "trt_leaf",
    "vllm_v1",
    "Retention",
    "TokenRange",
    # bytes
    "Pools",
    "View",
    "apply",
    "attend",
    "init_pools",
    "init_host_pools",
    "HostPools",
    "move",
    "TransferError",
    "ragged",
    "view",
    "write",
    # generation
    "GenerationInterrupted",
    "Model",
    "Output",
    "Progress",
    "Sampling",
    "generate",
    "step",
    "stream",
    # looking inside
    "RequestError",
    "Stats",
    "Totals",
    "check",
    "checked",
    "index_of",
    "plot_blocks",
    "show",
    "stats",
]
