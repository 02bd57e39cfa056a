# SPDX-License-Identifier: Apache-2.0
"""The time of a pass with drafts in units of a plain step: an estimate from its positions, and a measurement."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pallas_kernels
from kvjax.cache import Cache
from kvjax.checks import static_int
from kvjax.model import Model, forward
from kvjax.spec import CacheSpec

# To read the weights takes as long as to compute this number of positions: measured with SmolLM2 in float32 on two
# cores, and estimated for bfloat16 from the memory and the products of a GPU of a data center.
_WEIGHTS_ON_CPU = 16
_WEIGHTS_ON_GPU = 180


def estimated_pass_cost(num_rows: int, num_drafts: int) -> np.float32:
    """f32[]; the additional time of a pass with space for drafts, as a share of a plain step's time."""
    weights = _WEIGHTS_ON_GPU if pallas_kernels.lowers_for("cuda") else _WEIGHTS_ON_CPU
    return np.float32(num_drafts / (num_rows + weights))


def measured_pass_cost(model: Model, spec: CacheSpec, num_drafts: int, *, rounds: int = 5) -> float:
    """Measures the additional time of a pass with space for drafts, as a share of a plain step's time.

    It times your model on this machine for all rows of the spec, in a cache of its own with a block for each group. The
    rows are empty, so the time of long contexts is not included. Tokens do not depend on it, only the number of passes.

    Args:
      model: see `kvjax.step`.
      spec: the spec of your cache.
      num_drafts: the maximum drafts of all rows in a pass: `max_drafts` of the drafter, or at most its `num_tokens` for
        each row.
      rounds: the number of times each pass is timed. The median counts.

    Returns:
      A number of at least 0, for the option `pass_cost` of a drafter.

    Raises:
      ValueError: naming the argument.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=8)
      >>> def next_number(tokens, pools, view, *, last):  # no layers: the next token is the last token plus 1
      ...     positions = jnp.take_along_axis(tokens, last.reshape(tokens.shape[0], -1), axis=1).reshape(-1)
      ...     return jax.nn.one_hot(positions + 1, 50), pools
      >>> model = jax.tree_util.Partial(next_number)
      >>> drafter = kvjax.serving.ngram(4, pass_cost=kvjax.serving.measured_pass_cost(model, spec, 8))
    """
    num_drafts = static_int("num_drafts", num_drafts, 1)
    rounds = static_int("rounds", rounds, 1)
    groups = tuple(dataclasses.replace(group, num_blocks=1, num_host_blocks=0) for group in spec.groups)
    cache = Cache.create(dataclasses.replace(spec, groups=groups))
    size = spec.max_seqs + num_drafts
    nobody: Any = np.zeros((spec.max_seqs,), np.int32)

    def plain(model: Model, cache: Cache) -> tuple[jax.Array, Cache]:
        logits, pools = forward(model, nobody[:, None], cache.pools, cache.view(nobody, 1), nobody)
        return logits, cache.replace(pools=pools)

    def wide(model: Model, cache: Cache) -> tuple[jax.Array, Cache]:
        tokens: Any = np.zeros((1, size), np.int32)
        positions: Any = np.arange(size, dtype=np.int32)
        logits, pools = forward(model, tokens, cache.pools, cache.ragged(nobody, size), positions)
        return logits, cache.replace(pools=pools)

    passes: list[Callable[..., Any]] = [jax.jit(run_pass, donate_argnums=1) for run_pass in (plain, wide)]
    seconds: list[list[float]] = [[], []]
    for round_index in range(rounds + 1):
        for run_pass, took in zip(passes, seconds, strict=True):
            begin = time.perf_counter()
            _, cache = jax.block_until_ready(run_pass(model, cache))
            if round_index:  # the first round compiles
                took.append(time.perf_counter() - begin)
    plain_time, wide_time = map(statistics.median, seconds)
    return max(wide_time / plain_time - 1, 0.0)


def share_of(name: str, value: float | None) -> np.float32 | None:
    """Returns a share of a time as f32[]. None stays None. Raises a ValueError unless it is a number of at least 0."""
    if value is None:
        return None
    if not isinstance(value, int | float | np.floating) or not value >= 0:
        raise ValueError(f"{name}: got {value!r}, wanted a number of at least 0 or None")
    return np.float32(value)
