# SPDX-License-Identifier: Apache-2.0
"""Generation as a user calls it: prompts wait, rows come and go on the host, the loops of `engine.py` do the rest."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax._run import Output, Run
from kvjax.engine import LogitsFn
from kvjax.paired import Cache
from kvjax.retention import Retention
from kvjax.sampling import Sampling
from kvjax.tiered import TieredCache


@dataclasses.dataclass(frozen=True)
class Progress[C: (Cache, TieredCache)]:
    """Where a generation stands after a jitted loop.

    Attributes:
      outputs: one per prompt, so far; the same objects every time.
      new: {prompt number: tokens since the last Progress}.
      cache: the cache as it is now, with its host tier if it has one; the one before has been donated.
      events: decoded, since the last Progress.
    """

    outputs: list[Output]
    new: dict[int, list[int]]
    cache: C
    events: list[dict[str, Any]]


def generate[C: (Cache, TieredCache)](
    model: Any, cache: C, prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Generates for all prompts, as many at a time as there are rows and blocks.

    Args:
      model: as for `stream`.
      cache: likewise; donated.
      prompts: likewise.
      **options: likewise.

    Returns:
      list of `Output`, one per prompt; the cache, with everything released and cached; and the decoded events.
    """
    events: list[dict[str, Any]] = []
    outputs: list[Output] = []
    for progress in stream(model, cache, prompts, **options):
        outputs, cache = progress.outputs, progress.cache
        events += progress.events
    return outputs, cache, events


def stream[C: (Cache, TieredCache)](
    model: Any,
    cache: C,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop_tokens: Sequence[int] = (),
    namespaces: Sequence[int] | None = None,
    retention: Retention | Sequence[Retention | None] | None = None,
    clock: Callable[[], int] | None = None,
    logits_fn: LogitsFn | None = None,
    chunk: int = 64,
    steps: int = 32,
    log_events: bool = True,
) -> Iterator[Progress[C]]:
    """Generates for all prompts, handing out tokens after every `steps` steps.

    Prompts wait until a row and blocks are free. If a running batch needs a block and there is none, the row that
    was admitted last ends with what it has and finish "no_blocks". With windows a prompt has blocks for its next
    chunk only, and one that finds none for a chunk goes back to wait, with what is computed of it in the cache.

    Args:
      model: see the top of `engine.py`; a function closed over its weights goes in as `jax.tree_util.Partial`.
      cache: is donated: use `progress.cache` from then on. Rows in use already are left alone. With a host tier,
        prompts find what is there too, and what has to leave the device goes there; before each decode loop, so much
        as it may need. What the chunks of a long prompt push out of a window's blocks is lost.
      prompts: token ids.
      max_new_tokens: for each prompt.
      sampling: how tokens are chosen; greedy if None.
      seeds: of each prompt's random stream; its number if None.
      stop_tokens: end a row when chosen.
      namespaces: of each prompt; 0 if None.
      retention: what each prompt's blocks are worth, or one for all of them, where the spec has it.
      clock: () -> ms since any origin, such as `lambda: time.monotonic_ns() // 1_000_000`; read when prompts are
        admitted, before each jitted loop and at release. None: it is always 0, and no time to live ends.
      logits_fn: static; (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits.
      chunk: prompt tokens of each row that one model call computes.
      steps: the most decode steps of one jitted loop.
      log_events: whether to decode the events for `Progress.events`.

    Yields:
      A `Progress`; the last one has every output finished and every row released.

    Raises:
      ValueError: if the cache has pools for no layer, an option is out of range, there is not one of it for each
        prompt, or the spec has no retention.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")
    run = Run(
        model, cache, prompts, max_new_tokens, tuple(stop_tokens), seeds, namespaces, retention, clock, log_events
    )
    options = {"sampling": sampling or Sampling(), "logits_fn": logits_fn}
    while run.waiting or run.live:
        run.new, run.events = collections.defaultdict(list), []
        run.admit(chunk, options)
        if run.live:
            run.decode(steps, options)
        run.release()
        yield Progress(run.outputs, dict(run.new), run.result, run.events)
