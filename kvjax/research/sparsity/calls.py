# SPDX-License-Identifier: Apache-2.0
"""Calls of a model whose layers read the blocks that a policy chooses."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from kvjax.model import Model, call
from kvjax.pools.device import Pools
from kvjax.pools.selection import select_blocks, sparse_attention
from kvjax.pools.views import View
from kvjax.research.sparsity.policies import Scores, SparsityPolicy
from kvjax.spec import CacheSpec

type States = dict[int, Any]


def init_states(policy: SparsityPolicy, spec: CacheSpec) -> States:
    """The state of a policy for each layer with full attention, {layer: state}, and {} for a policy without states."""
    if policy.init is None:
        return {}
    return {
        layer: policy.init(spec.max_seqs, spec.max_blocks_per_seq, pool.kv_heads, pool.head_dim)
        for pool in spec.groups[0].pools
        for layer in pool.layers
    }


def check_budget(budget: float | jax.Array) -> None:
    """Raises a ValueError for a share of blocks out of range, unless it is traced."""
    if not isinstance(budget, Tracer) and not 0 < budget <= 1:
        raise ValueError(f"budget: got {budget}, wanted a share of the blocks in (0, 1]")


def call_sparse(
    model: Model,
    tokens: jax.Array,
    pools: Pools,
    view: View,
    *,
    last: jax.Array | None = None,
    policy: SparsityPolicy,
    budget: float | jax.Array,
    states: States,
) -> tuple[jax.Array, Pools, States]:
    """Calls a model whose layers with full attention read the blocks that a policy chooses. For use inside of `jit`.

    The model needs no change. Layers with windows read all blocks. The rows of the view are all S rows of the cache.

    Args:
      model: any model; if the policy has a state, its layers must not be in a scan.
      tokens: i32[R, C]; the tokens, for a `Model`.
      pools: the K/V written so far.
      view: the positions of these tokens.
      last: i32[R], or None for the logits of all tokens.
      policy: the policy.
      budget: the share of a row's blocks to read, in (0, 1], perhaps traced.
      states: the policy's states so far, from `init_states`.

    Returns:
      The logits, the pools and the new states.

    Raises:
      ValueError: if the budget is out of range, or a policy with a state meets a scan of layers.

    Example:
      >>> from kvjax.research import sparsity
      >>> from models import loading, recall
      >>> model, _ = loading.load(recall.CHECKPOINT)
      >>> spec = kvjax.make_spec(
      ...     model.layer_specs(),
      ...     num_blocks=16,
      ...     max_seqs=1,
      ...     max_length=64,
      ...     block_size=4,
      ...     dtype="float32",
      ...     sparse=True,
      ... )
      >>> prompt = np.array([recall.encode("alice is in paris . bob is in oslo . where is alice ?")])
      >>> cache = kvjax.Cache.create(spec)
      >>> cache, _ = cache.admit(0, prompt[0], prompt.size)
      >>> policy = sparsity.quest()
      >>> states = sparsity.init_states(policy, spec)
      >>> logits, pools, states = sparsity.call_sparse(
      ...     model, prompt, cache.pools, cache.view(prompt.size), policy=policy, budget=0.5, states=states
      ... )
      >>> recall.decode([int(logits[0, -1].argmax())])
      'paris'
    """
    check_budget(budget)
    states = dict(states)

    def choose(q: jax.Array, pools: Pools, layer: int | jax.Array, view: View, **options: Any) -> View:
        if policy.init is not None and any(isinstance(value, Tracer) for value in (layer, options["index"])):
            raise ValueError("model: got a scan of layers, wanted an unrolled model: the policy has a state per layer")
        scores = Scores(q, pools, layer, view, budget, **options)
        if policy.init is None:
            columns, _ = policy.choose(scores, None)
        else:
            assert isinstance(layer, int)
            # The choice waits for the state. Else the next layer might write to the pools before the state has read
            # them, and XLA would copy the pools in each layer.
            columns, states[layer] = jax.lax.optimization_barrier(policy.choose(scores, states.get(layer)))
        return select_blocks(view, columns)

    with sparse_attention(choose):
        logits, pools = call(model, tokens, pools, view, last)
    return logits, pools, states
