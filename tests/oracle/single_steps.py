# SPDX-License-Identifier: Apache-2.0
"""The decode loop with metadata updated after every step, as `kvjax.serving.decode` was before it ran in blocks.

It shares only the verbs, `step`, `sample` and the types of its arguments and results with the loop of blocks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.events.log import append
from kvjax.serving.decode import Decoded, step
from kvjax.serving.sampling import sample


def most_events(spec: Any) -> int:
    """The most events of a step in which every row enters, copies and fills a block in each group."""
    groups, host_groups = len(spec.groups), sum(group.num_host_blocks > 0 for group in spec.groups)
    removed, copied, stored, updated = 2 * groups - 1, groups, groups, host_groups
    return spec.max_seqs * (removed + copied + stored + updated)


def decode(
    model: Any, cache: Any, rows: Any, log: Any, *, steps: int, stop: Any, sampling: Any, logits_fn: Any = None, now=0
) -> Any:
    """Up to `steps` steps for all active rows: extend, copies, model, commit, sampling, stop check."""
    spec = cache.state.spec

    def going(carry):
        step_index, _, rows, log, decoded = carry
        has_room = log.num_free >= most_events(spec)
        return (step_index < steps) & jnp.any(rows.active) & ~decoded.out_of_blocks & has_room

    def one(carry):
        step_index, cache, rows, log, decoded = carry
        cache, extended = cache.extend(rows.active, now=now)
        active = rows.active & extended.ok
        cache, logits, committed = step(model, cache, rows.token[:, None], active.astype(jnp.int32), now=now)
        positions = cache.state.seqs.committed
        if logits_fn is not None:
            logits = logits_fn(logits, rows.token, positions)
        counted = {} if sampling is None else {"stop": stop, "generated": positions - rows.prompt}
        token, logprob, *_ = sample(logits, sampling, rows.seed, positions, **counted)
        decoded = Decoded(
            decoded.tokens.at[:, step_index].set(jnp.where(active, token, -1)),
            decoded.logprobs.at[:, step_index].set(jnp.where(active, logprob, 0.0)),
            ~extended.ok,
        )
        remaining = rows.remaining - active.astype(jnp.int32)
        stopped = jnp.any(token[:, None] == stop[None], axis=1)
        goes_on = ~stopped & (remaining > 0) & (cache.state.seqs.length < spec.max_length)
        rows = rows.replace(
            token=jnp.where(active, token, rows.token), remaining=remaining, active=rows.active & (~active | goes_on)
        )
        return (
            step_index + extended.ok.astype(jnp.int32),
            cache,
            rows,
            append(append(log, extended), committed),
            decoded,
        )

    shape = (spec.max_seqs, steps)
    decoded = Decoded(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.bool_(False))
    _, cache, rows, log, decoded = lax.while_loop(going, one, (jnp.int32(0), cache, rows, log, decoded))
    return cache, rows, log, decoded
