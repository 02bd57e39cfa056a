# SPDX-License-Identifier: Apache-2.0
"""Chooses the version of a transition: a GPU kernel if it supports the cache, and else plain jax."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap

import pallas_kernels
from kvjax.policies.ring import lru
from kvjax.state import CacheState
from pallas_kernels import tuning

MAX_ROWS = 1024  # a kernel has a lane or two for each row
MAX_RECORDS = 4 * MAX_ROWS  # of a transition's events, with a lane for each record

_interpreted = jax.make_user_context(False)  # a part of the keys of jax's caches


def serves(state: CacheState, rows: int, num_tokens: int) -> bool:
    """Whether the kernels serve a cache, for `rows` rows with at most num_tokens tokens each. All of this is static."""
    spec = state.spec
    other_features = (
        len(spec.groups) > 1,
        spec.has_host,
        spec.retention,
        spec.thinning,
        spec.sparse,
        state.policy != lru(),
    )
    fits = 0 < num_tokens <= spec.block_size and 0 < rows <= MAX_ROWS and spec.max_seqs <= MAX_ROWS
    return fits and not any(other_features)


def fused[T](kernel: Callable[..., T], plain: Callable[..., T], *args: Any) -> T:
    """Calls kernel(*args) in a program for a CUDA GPU. Other platforms and `vmap` get plain(*args), with equal results.

    The kernel, which also takes `interpret`, is traced only if this process has such a GPU, or within `lowering_for`.
    It is not traced if `tuning.switched` disables it, or if jax lacks Triton. The arguments are pytrees of all arrays
    for both.
    """
    if _interpreted.value:
        return kernel(*args, interpret=True)
    if not pallas_kernels.lowers_for("cuda") or "transitions" in tuning.SWITCHED or not _has_triton():
        return plain(*args)
    leaves, tree = jax.tree.flatten(args)

    @custom_vmap
    def call(*leaves):
        return lax.platform_dependent(*jax.tree.unflatten(tree, leaves), cuda=kernel, default=plain)

    @call.def_vmap
    def _batched(axis_size, in_batched, *leaves):
        # A kernel is a single program for a single cache. The programs of a grid would wait for the slowest, and share
        # no memory.
        def call_plain(*leaves):
            return plain(*jax.tree.unflatten(tree, leaves))

        in_axes = [0 if batched else None for batched in in_batched]
        out = jax.vmap(call_plain, in_axes=in_axes, axis_size=axis_size)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    return call(*leaves)


@functools.cache
def _has_triton() -> bool:
    """Whether jax still has Pallas's Triton, which is deprecated."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return True


def interpreted() -> contextlib.AbstractContextManager[None]:
    """A context for tests, in which traces use the kernels, run as plain jax on any platform."""
    return _interpreted(True)
