# SPDX-License-Identifier: Apache-2.0
"""Policies to choose the blocks of a layer, by scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import put
from kvjax.pools.device import Pools
from kvjax.pools.scores import block_mass, key_bounds
from kvjax.pools.selection import select_blocks
from kvjax.pools.views import View


class SparsityPolicy(NamedTuple):
    """A policy: it chooses blocks for each layer with full attention, from scores and a state of its own.

    Attributes:
      choose: (scores, state) -> (columns bool[R, M], state), for a layer. The blocks of the step's own tokens are read
        anyway. It is called for prompts too (`scores.is_prompt`): return `scores.all` there to read a prompt fully.
      init: (rows, columns, kv_heads, width) -> the state of a layer. None means there is no state.
      returns: whether an unread block may be read later. If not, a cache could free it.

    Example:
      >>> from kvjax.research import sparsity
      >>> def every_other(scores, state):  # a policy of your own
      ...     return scores.all if scores.is_prompt else scores.all & (np.arange(scores.num_columns) % 2 == 0), state
      >>> sparsity.SparsityPolicy(every_other).init is None
      True
    """

    choose: Callable[[Scores, Any], tuple[jax.Array, Any]]
    init: Callable[[int, int, int, int], Any] | None = None
    returns: bool = True


class Scores:
    """The scores of a layer's blocks for a step's tokens. Nothing is computed unless a policy asks for it.

    Attributes:
      is_prompt: static; whether a row may have several tokens in this step.
      num_columns: static; M, the columns of the block table.
      num_blocks: i32[R]; the blocks of each row with tokens, the step's own included.
      first_own: i32[R]; the first column with tokens of the step. It and all after it are read anyway.
      budget: i32[R]; the number of blocks to read, the step's own included.
      position: i32[R]; the position of each row's last token.
      layer: the model's layer number; static, except in a scan over layers.
    """

    def __init__(
        self, q: jax.Array, pools: Pools, layer: int | jax.Array, view: View, budget: float | jax.Array, **options: Any
    ):
        assert view.spec is not None
        self._call = q, pools, layer
        self._view = view
        self._options = options
        size = view.spec.block_size
        lengths = view.lengths_of(0)
        self.is_prompt = view.starts is not None or q.shape[1] > 1
        self.num_columns = view.tables[0].shape[1]
        self.num_blocks = -(-lengths // size)
        self.first_own = (lengths - view.num_tokens) // size
        self.budget = jnp.ceil(self.num_blocks.astype(jnp.float32) * jnp.float32(budget)).astype(jnp.int32)
        self.position = view.lengths - 1
        self.layer = layer

    @property
    def column(self) -> Any:
        """i32[1, M]; the number of each column."""
        return np.arange(self.num_columns, dtype=np.int32)[None]

    @property
    def all(self) -> jax.Array:
        """bool[R, M]; the blocks with tokens."""
        return self.column < self.num_blocks[:, None]

    def first(self, count: Any) -> jax.Array:
        """bool[R, M]; the first `count` blocks, an int or i32[R]."""
        return self.column < jnp.broadcast_to(count, self.num_blocks.shape)[:, None]

    def recent(self, count: Any) -> jax.Array:
        """bool[R, M]; the last `count` blocks, an int or i32[R], the step's own included."""
        return self.column >= (self.num_blocks - count)[:, None]

    def best(self, score: jax.Array, among: jax.Array | None = None) -> jax.Array:
        """bool[R, M]; the blocks with the highest score f32[R, M], as many as the budget leaves.

        The step's own blocks count, and so do blocks where `among` bool[R, M] is False: the others compete. A block
        with a score of -inf is not chosen, though the budget has room.
        """
        taken = self.column >= self.first_own[:, None]
        taken = taken if among is None else taken | ~among
        taken = taken & self.all
        num_others = self.budget - jnp.sum(taken, axis=1, dtype=jnp.int32)
        order = jnp.argsort(jnp.where(taken | ~self.all, jnp.inf, -score), axis=1).astype(jnp.int32)
        row = np.broadcast_to(np.arange(order.shape[0], dtype=np.int32)[:, None], order.shape)
        is_best = jnp.broadcast_to(self.column < num_others[:, None], order.shape)
        best = put(jnp.zeros(order.shape, bool), (row, order), True, is_best)
        return taken | (best & self.all & (score > -jnp.inf))

    def mass(self, columns: jax.Array | None = None, last: int | None = None) -> jax.Array:
        """f32[R, M]; attention mass of each block, summed over heads, as `block_mass`.

        With `columns` bool[R, M] the softmax is over these blocks and the step's own alone, and costs their number.
        """
        if columns is None:
            return jnp.sum(block_mass(*self._call, self._view, **self._options, last=last), axis=1)
        read: jax.Array = columns | (self.column >= self.first_own[:, None])
        view = select_blocks(self._view, read)
        packed = jnp.sum(block_mass(*self._call, view, **self._options, last=last), axis=1)
        scored = read & self.all
        source = jnp.cumsum(scored, axis=1, dtype=jnp.int32) - 1
        return jnp.where(scored, jnp.take_along_axis(packed, jnp.maximum(source, 0), axis=1), 0.0)

    def bounds(self, before: tuple[jax.Array, jax.Array] | None = None) -> tuple[jax.Array, jax.Array]:
        """The smallest and the largest keys of the blocks, f32[R, K, M, D] each, as `key_bounds`.

        With the bounds `before` this step only the blocks of the step's tokens are computed: one, for a step of a
        token.
        """
        _, pools, layer = self._call
        index = self._options.get("index")
        if before is None or self.is_prompt:
            return key_bounds(pools, layer, self._view, index=index)
        view = select_blocks(self._view, np.zeros(self.num_columns, bool))
        view = view.replace(tables=(view.tables[0][:, :1], *view.tables[1:]))
        is_own = (self.column == self.first_own[:, None])[:, None, :, None]
        new = key_bounds(pools, layer, view, index=index)
        return tuple(jnp.where(is_own, part, old) for part, old in zip(new, before, strict=True))  # pyright: ignore

    def bound(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """f32[R, M]; the mass of the blocks if each key had the largest score within its block's bounds.

        Each of the R rows has a single token.
        """
        q = self._call[0][:, 0].astype(jnp.float32)
        scale = self._options.get("scale")
        q = q.reshape(q.shape[0], low.shape[1], -1, q.shape[-1]) * (q.shape[-1] ** -0.5 if scale is None else scale)
        is_block = self.all[:, None, :, None]
        low = jnp.where(is_block, low, 0.0)
        high = jnp.where(is_block, high, 0.0)
        score = jnp.einsum("rkgd,rkmd->rkgm", jnp.maximum(q, 0), high)
        score = score + jnp.einsum("rkgd,rkmd->rkgm", jnp.minimum(q, 0), low)
        score = jnp.where(self.all[:, None, None], score, -jnp.inf)
        return jnp.sum(jax.nn.softmax(score, axis=-1), axis=(1, 2))


def streaming(sinks: int = 1) -> SparsityPolicy:
    """The first `sinks` blocks and the most recent blocks. Source: StreamingLLM."""

    def choose(scores: Scores, state: None) -> tuple[jax.Array, None]:
        return scores.first(sinks) | scores.recent(jnp.maximum(scores.budget - sinks, 1)), state

    return SparsityPolicy(_after_prompt(choose), returns=False)


def random(seed: int = 0) -> SparsityPolicy:
    """Random blocks, drawn anew at each step, as a lower bound for the others."""

    def choose(scores: Scores, state: None) -> tuple[jax.Array, None]:
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(scores.position)
        noise = jax.vmap(lambda key: jax.random.uniform(key, (scores.num_columns,), jnp.float32))(keys)
        return scores.best(noise), state

    return SparsityPolicy(_after_prompt(choose))


def quest() -> SparsityPolicy:
    """The blocks whose keys may have the highest scores, by their smallest and largest elements. Source: Quest."""

    def choose(scores: Scores, state: Any) -> tuple[jax.Array, Any]:
        if scores.is_prompt:
            return scores.all, scores.bounds()
        state = scores.bounds(state)
        return scores.best(scores.bound(*state)), state

    def init(rows: int, columns: int, kv_heads: int, width: int) -> tuple[jax.Array, jax.Array]:
        shape = rows, kv_heads, columns, width
        return jnp.full(shape, jnp.inf, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)

    return SparsityPolicy(choose, init)


def h2o(recent: float = 0.5) -> SparsityPolicy:
    """The blocks with the largest mass so far, and a share `recent` of the budget for recent blocks. Source: H2O.

    A block has mass from the prompt, and from the steps that read it. A block that a step did not read is dropped.
    """

    def choose(scores: Scores, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        if scores.is_prompt:
            mass = scores.mass()
            return scores.all, jnp.where((scores.first_own > 0)[:, None], state, 0.0) + mass
        last = scores.recent(_part(scores.budget, recent))
        columns = scores.best(state, among=~last)
        return columns, _dropped(scores, columns, state + scores.mass(columns))

    return SparsityPolicy(choose, _zeros, returns=False)


def snapkv(window: int = 32, since: float = 0.5) -> SparsityPolicy:
    """The blocks to which the last `window` tokens of the prompt attended, and the blocks since. Source: SnapKV.

    The blocks since have at most a share `since` of the budget (SnapKV has no limit for them), and the oldest of them
    are dropped first. A block that a step did not read is dropped.
    """

    def choose(scores: Scores, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        if scores.is_prompt:
            return scores.all, jnp.where(scores.all, scores.mass(last=window), jnp.inf)
        is_new = state == jnp.inf
        last = is_new & scores.recent(_part(scores.budget, since))
        columns = scores.best(jnp.where(is_new, 0.0, state), among=~last)
        return columns, _dropped(scores, columns, state)

    return SparsityPolicy(choose, _zeros, returns=False)


def attention_mass() -> SparsityPolicy:
    """The blocks with the largest mass in this very step: a bound for the others, as it reads every key to know."""

    def choose(scores: Scores, state: None) -> tuple[jax.Array, None]:
        return scores.best(scores.mass()), state

    return SparsityPolicy(_after_prompt(choose))


def _after_prompt(choose: Callable[[Scores, Any], tuple[jax.Array, Any]]) -> Callable[..., tuple[jax.Array, Any]]:
    """A choice which reads a prompt fully."""
    return lambda scores, state: (scores.all, state) if scores.is_prompt else choose(scores, state)


def _zeros(rows: int, columns: int, kv_heads: int, width: int) -> jax.Array:
    return jnp.zeros((rows, columns), jnp.float32)


def _part(budget: jax.Array, share: float) -> jax.Array:
    """i32[R]; a share of the budget, rounded up."""
    return jnp.ceil(budget.astype(jnp.float32) * share).astype(jnp.int32)


def _dropped(scores: Scores, columns: jax.Array, state: jax.Array) -> jax.Array:
    """The scores f32[R, M] of a policy after a step, with -inf for each block that the step did not read."""
    return jnp.where(scores.all & ~columns, -jnp.inf, state)
