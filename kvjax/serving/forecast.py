# SPDX-License-Identifier: Apache-2.0
"""`what_if`: the scheduler on the metadata alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree
from kvjax.cache import Cache
from kvjax.events.log import init_log
from kvjax.pools.device import Pools
from kvjax.pools.views import View
from kvjax.serving.capacity import admission_events, worst_step
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Requests, Serving
from kvjax.serving.serve import serve


class _NoModel(Pytree):
    """Chooses token 0 and writes nothing."""

    def __call__(
        self, tokens: jax.Array, pools: Pools, view: View, /, *, last: jax.Array | None
    ) -> tuple[jax.Array, Pools]:
        del view
        last = tokens if last is None else last
        return jnp.zeros((*last.shape, 1), jnp.float32), pools


def what_if(serving: Serving, *, scheduler: Scheduler, steps: int, now: int = 0) -> Requests:
    """The requests as they would be after some steps, if nobody submitted or cancelled anything; jit it.

    When each is admitted and with how many cached tokens, and when it ends, are what then happens, but for what depends
    on the tokens that a model chooses: stop tokens, and generated text that is found in the cache. Every token that is
    generated here is 0. What is on the host is not found. Costs a step's bookkeeping, and no bytes.

    Args:
      serving: the requests and their cache; a batch that is not wanted yet can be `submit`ted to it first.
      scheduler: static; perhaps another than the one that runs.
      steps: static; of the model.
      now: i32[] ms.
    """
    spec, state = serving.cache.state.spec, serving.cache.state
    groups = tuple(dataclasses.replace(group, pools=()) for group in spec.groups)
    pools = Pools(tuple(() for _ in groups), dataclasses.replace(spec, groups=groups))
    # No blocks come from the host or go there.
    scheduler = dataclasses.replace(scheduler, preempt="recompute")
    requests = serving.requests.replace(onboard=jnp.zeros_like(serving.requests.onboard))
    serving = serving.replace(cache=Cache(state, pools), requests=requests, onboard_slot=jnp.int32(-1))
    capacity = 4 * worst_step(spec, scheduler) + admission_events(spec, serving.width)
    end = serving.steps + steps

    def going(serving: Serving) -> jax.Array:
        return serving.busy & (serving.steps < end)

    def some(serving: Serving) -> Serving:
        log = init_log(capacity, spec.block_size, spec.extra_ids)
        return serve(_NoModel(), serving, log, scheduler=scheduler, steps=end - serving.steps, now=now)[0]

    return jax.lax.while_loop(going, some, serving).requests
