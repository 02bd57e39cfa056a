# SPDX-License-Identifier: Apache-2.0
"""Requests go: `cancel` and `drain`; and their outputs on the host, `results`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._arrays import pick, put
from kvjax._checks import integers
from kvjax.events.records import Status
from kvjax.serving.output import Output
from kvjax.serving.requests import Finish, Serving, Stage


def cancel(serving: Serving, slots: ArrayLike, generations: ArrayLike) -> tuple[Serving, jax.Array]:
    """Ends requests; one that runs keeps its row until the next step begins.

    Args:
      serving: where.
      slots: i32[R].
      generations: i32[R]; as `submit` returned them.

    Returns:
      The requests; and i32[R], the status of each: BAD_REQUEST if it is over, or its slot has another request by now.
    """
    slots, requests = integers("slots", slots, ("R",)), serving.requests
    generations = integers("generations", generations, slots.shape)
    there = (slots >= 0) & (slots < requests.size) & (pick(requests.generation, slots) == generations)
    stage = pick(requests.stage, slots)
    there = there & ((stage == Stage.WAITING) | (stage == Stage.RUNNING))
    gone = put(jnp.zeros((requests.size,), jnp.bool_), slots, True, there, unique=False)
    orphans = (requests.parent >= 0) & pick(gone, requests.parent)
    requests = requests.replace(
        stage=jnp.where(gone, int(Stage.CANCELLED), requests.stage),
        finish=jnp.where(gone, int(Finish.CANCELLED), requests.finish),
        ended=jnp.where(gone, serving.steps, requests.ended),
        parent=jnp.where(orphans & (requests.stage == Stage.WAITING), -1, requests.parent),
    )
    serving = serving.replace(requests=requests, dirty=serving.dirty | jnp.any(gone))
    return serving, jnp.where(there, int(Status.OK), int(Status.BAD_REQUEST))


def drain(serving: Serving) -> Serving:
    """Empties the slots of requests that are over and have no row; read their `results` before."""
    requests = serving.requests
    over = (requests.stage == Stage.DONE) | (requests.stage == Stage.CANCELLED)
    of_rows = put(jnp.zeros_like(over), serving.row, True, serving.row >= 0)
    over = over & ~of_rows
    return serving.replace(
        requests=requests.replace(
            stage=jnp.where(over, int(Stage.EMPTY), requests.stage),
            generation=requests.generation + over.astype(jnp.int32),
        )
    )


_FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NO_BLOCKS: "no_blocks", Finish.CANCELLED: "cancelled"}


def results(serving: Serving) -> dict[tuple[int, int], Output]:
    """The output of each request so far, by (slot, generation), on the host."""
    requests: Any = jax.device_get(serving.requests)
    found = {}
    for slot in np.flatnonzero(requests.stage != Stage.EMPTY).tolist():
        start, prompt, end = (int(x[slot]) for x in (requests.start, requests.prompt, requests.num_tokens))
        generated = slice(start + prompt, start + end)
        found[slot, int(requests.generation[slot])] = Output(
            prompt_tokens=prompt,
            tokens=requests.text[generated].tolist(),
            logprobs=requests.logprobs[generated].tolist(),
            cached_tokens=int(requests.cached[slot]),
            finish=_FINISH.get(Finish(int(requests.finish[slot]))),
            preemptions=int(requests.preemptions[slot]),
            top_logprobs=top_of(requests, generated),
        )
    return found


def top_of(requests: Any, where: slice) -> list[dict[int, float]]:
    """The likeliest tokens in some places of the text of requests on the host, with their log-probabilities."""
    if requests.top is None:
        return []
    tokens, logprobs = (column[where].tolist() for column in requests.top)
    return [dict(zip(*one, strict=True)) for one in zip(tokens, logprobs, strict=True)]
