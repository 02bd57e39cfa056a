# SPDX-License-Identifier: Apache-2.0
"""Caches and models which several benchmarks begin with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from benchmarks import common
from kvjax._arrays import Pytree
from models.config import LayerConfig, ModelConfig

LLAMA = ModelConfig("llama", 8192, 256, 768, 8, (LayerConfig(4, 32),) * 8)  # 10 million parameters
TINY = ModelConfig("llama", 128, 32, 64, 4, (LayerConfig(2, 8),) * 2)
CONFIGS = LLAMA, TINY  # of a run, and of a quick one


class NoModel(Pytree, static=("vocabulary",)):
    """A model without weights. It chooses token 0, and leaves the pools as they are."""

    vocabulary: int = 1

    def __call__(self, _tokens, pools, _view, /, *, last):
        return jnp.zeros((*last.shape, self.vocabulary), jnp.float32), pools


@jax.tree_util.Partial
def reads_the_view(tokens: jax.Array, pools: Any, view: Any, *, last: jax.Array) -> tuple[jax.Array, Any]:
    """Logits of a model without weights. It reads the view, so a loop has to compute it."""
    seen = sum(jnp.sum(x, dtype=jnp.int32) for x in jax.tree.leaves(view))
    return jnp.stack([tokens[:, 0] + seen, last], axis=1).astype(jnp.float32), pools


def spec_of(model: Any, rows: int, length: int, num_blocks: int | None = None, block_size: int = 16) -> kvjax.CacheSpec:
    """A float32 cache for rows of `length` tokens. `num_blocks` of None means just enough blocks for them."""
    return kvjax.make_spec(
        model.layer_specs(), num_blocks=num_blocks or rows * -(-length // block_size), max_seqs=rows,
        max_length=length, block_size=block_size, dtype="float32",
    )  # fmt: skip


def random_prompts(vocabulary: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """i32[shape]; random tokens."""
    return np.random.default_rng(seed).integers(0, vocabulary, shape, np.int32)


def serve_alone(
    state: kvjax.CacheState, tokens: jax.Array, length: int
) -> tuple[kvjax.CacheState, tuple[jax.Array, kvjax.Events]]:
    """Admits a prompt into row 0, commits its uncached tokens and releases it.

    Returns:
      The state, whether the cache did all of it, and the events of the admission.
    """
    zero = jnp.zeros((1,), jnp.int32)
    state, admitted = kvjax.admit(state, 0, tokens, length)
    cached = admitted.cached[0]
    state, committed = kvjax.commit(state, jnp.roll(tokens, -cached)[None], zero + length - cached, seqs=zero)
    state, released = kvjax.release(state, 0)
    return state, (admitted.ok & committed.ok & released.ok, admitted)


@functools.partial(jax.jit, donate_argnums=0)
def hold(state: kvjax.CacheState, tokens: jax.Array, lengths: jax.Array) -> tuple[kvjax.CacheState, jax.Array]:
    """Admits tokens i32[S, T] into all rows. Returns the state, and whether the cache did all of it."""
    state, admitted = kvjax.admit(state, jnp.arange(state.spec.max_seqs, dtype=jnp.int32), tokens, lengths)
    state, committed = kvjax.commit(state, tokens, lengths)
    return state, admitted.ok & committed.ok


def full_state(spec: kvjax.CacheSpec, prompt: Callable[[jax.Array], jax.Array]) -> kvjax.CacheState:
    """A cache with free rows, all of whose blocks are findable: the blocks of the last prompts i32[max_length]."""

    def fill(state: kvjax.CacheState, prompt_index: jax.Array) -> tuple[kvjax.CacheState, jax.Array]:
        state, (ok, _) = serve_alone(state, prompt(prompt_index), spec.max_length)
        return state, ok

    blocks = spec.groups[0].num_blocks
    size = spec.block_size
    numbers = jnp.arange(-(-blocks * size // spec.max_length), dtype=jnp.int32)
    state, ok = jax.jit(lambda state: lax.scan(fill, state, numbers), donate_argnums=0)(kvjax.init(spec))
    common.require(bool(jnp.all(ok)) and int(state.groups[0].num_empty) == 0, "the cache could not be filled")
    return state


def copy_of(state: Any) -> Callable[[], Any]:
    """Returns a function which copies a state, for a program which donates it."""
    return lambda: jax.tree.map(jnp.copy, state)
