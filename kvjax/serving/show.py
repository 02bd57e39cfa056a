# SPDX-License-Identifier: Apache-2.0
"""Drawings of the scheduler as text: the progress of each request, and the parts of a step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.debug.counts import stats
from kvjax.ledger import plural
from kvjax.serving.requests import Serving, Stage, finish_of
from kvjax.serving.serve import Served

_LEGEND = "P: prompt, G: generated, in lower case where its row has not computed it; .: still to generate"
_OVER = (Stage.DONE, Stage.CANCELLED)


class _Line(NamedTuple):
    """A line of a drawing."""

    where: str  # the row, or the stage of a request without a row
    slot: int  # slot of the request; -1 for no request
    state: str  # state of the request, in words
    computed: int = 0  # number of the request's tokens in its row

    @property
    def texts(self) -> tuple[str, str, str]:
        """The texts of the columns before the tokens."""
        return self.where, f"request {self.slot}" if self.slot >= 0 else "", self.state


def show_requests(serving: Serving, *, width: int = 100, max_lines: int = 16) -> str:
    """Draws requests as text: first the rows' requests in order, then waiting requests, then finished requests.

    `show(serving.cache.state)` draws their blocks.

    Args:
      serving: the requests; not traced.
      width: maximum columns of the drawing. If a request has more tokens, a letter stands for several tokens, and shows
        the last of them.
      max_lines: maximum lines for each of the three parts. Further requests are only counted.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> scheduler = kvjax.serving.Scheduler(chunk=8)
      >>> serving = kvjax.serving.init_serving(kvjax.Cache.create(spec), [20, 20, 20])
      >>> serving, *_ = kvjax.serving.submit(serving, np.arange(18), [10, 8], [4, 6], scheduler=scheduler)
      >>> print(kvjax.serving.show_requests(serving))
      after 0 steps of the model: 0 run, 2 wait, 0 are over
      8 blocks: 0 active, 0 cached, 8 empty; 0 of 32 slots filled; 0 of 2 rows in use
      P: prompt, G: generated, in lower case where its row has not computed it; .: still to generate
      waits  request 0  10 of 14 tokens  pppp pppp pp.. ..
      waits  request 1  8 of 14 tokens   pppp pppp .... ..
    """
    requests: Any = jax.device_get(serving.requests)
    state = serving.cache.state
    stages = requests.stage.tolist()
    running = stages.count(Stage.RUNNING)
    waiting = stages.count(Stage.WAITING)
    num_over = sum(map(stages.count, _OVER))
    steps = plural(int(serving.steps), "step")
    lines = [f"after {steps} of the model: {running:,} run, {waiting:,} wait, {num_over:,} are over"]
    for group_index in range(len(state.groups)):
        lines.append((f"group {group_index}: " if len(state.groups) > 1 else "") + str(stats(state, group_index)))
    parts = {
        "rows in use": list(_in_rows(serving, requests)),
        "that wait": list(_waiting(requests)),
        "that are over": list(_over(serving, requests)),
    }
    shown = [line for part in parts.values() for line in part[:max_lines]]
    columns = [max(map(len, texts)) for texts in zip(*(line.texts for line in shown), strict=True)]
    block_size = state.spec.block_size
    per_letter = 1
    while any(
        len(_tokens(line, requests, block_size, per_letter)) > max(width - sum(columns) - 6, 1) for line in shown
    ):
        per_letter *= 2
    lines.append(_LEGEND + (f"; a letter for {per_letter:,} tokens" if per_letter > 1 else ""))
    lines = [part for line in lines for part in textwrap.wrap(line, width)]
    for name, part in parts.items():
        for line in part[:max_lines]:
            texts = [text.ljust(column) for text, column in zip(line.texts, columns, strict=True)]
            lines.append("  ".join([*texts, _tokens(line, requests, block_size, per_letter)]))
        if len(part) > max_lines:
            lines.append(f"and {len(part) - max_lines:,} more {name}")
    return "\n".join(line[:width].rstrip() for line in lines)


def _in_rows(serving: Serving, requests: Any) -> Iterator[_Line]:
    """Lines for rows in use."""
    seqs = serving.cache.state.seqs
    columns: Any = jax.device_get(
        (serving.row, seqs.length, seqs.committed, serving.num_pending, serving.leads, serving.out_of_blocks)
    )
    for row, (slot, length, committed, pending, leads, out_of_blocks) in enumerate(zip(*columns, strict=True)):
        if slot < 0:
            if length > 0:
                yield _Line(f"row {row}", -1, f"{length:,} tokens, of no request here")
            continue
        if requests.stage[slot] != Stage.RUNNING:
            state = f"over ({finish_of(requests.finish[slot])})"
        elif requests.parent[slot] >= 0:
            state = f"waits for the prompt of request {requests.parent[slot]}"
        else:
            state = "decodes" if pending == 1 and not leads else f"{pending:,} pending"
        state += _drafts(requests, slot)
        state += f"{', leads samples' if leads else ''}{', out of blocks' if out_of_blocks else ''}"
        yield _Line(f"row {row}", int(slot), f"{_num_tokens(requests, slot)}: {state}", int(committed))


def _waiting(requests: Any) -> Iterator[_Line]:
    """Lines for waiting requests, the highest priority first, then the earliest."""
    for slot in np.lexsort((requests.arrival, -requests.priority)):
        if requests.stage[slot] == Stage.WAITING:
            counts = {name: getattr(requests, name)[slot] for name in ("priority", "passed", "preemptions")}
            details = [f", {name} {times:,}" for name, times in counts.items() if times != 0]
            yield _Line("waits", int(slot), "".join([_num_tokens(requests, slot), *details]))


def _over(serving: Serving, requests: Any) -> Iterator[_Line]:
    """Lines for finished requests without a row."""
    in_rows = np.asarray(serving.row).tolist()
    for slot, stage in enumerate(requests.stage):
        if stage in _OVER and slot not in in_rows:
            finish = finish_of(requests.finish[slot])
            num_generated = requests.num_tokens[slot] - requests.prompt[slot]
            state = f"{finish}, {num_generated:,} generated, {requests.cached[slot]:,} cached"
            yield _Line("over", slot, state + _drafts(requests, slot))


def _drafts(requests: Any, slot: int) -> str:
    """The part of a request's state about its drafts, if it has any."""
    stats = requests.draft_stats
    if stats is None or not stats.drafted[slot]:
        return ""
    return f", {stats.accepted[slot]:,} of {stats.drafted[slot]:,} drafts accepted"


def _tokens(line: _Line, requests: Any, block_size: int, per_letter: int) -> str:
    """The letters of a request up to `max_tokens`, with a blank between blocks, or nothing if it is over."""
    if line.slot < 0 or line.where == "over":
        return ""
    names = "prompt", "num_tokens", "max_tokens"
    prompt, num_tokens, max_tokens = (int(getattr(requests, name)[line.slot]) for name in names)
    letters = ""
    for start in range(0, max_tokens, per_letter):
        if start > 0 and start % block_size == 0 and per_letter < block_size:
            letters += " "
        last = min(start + per_letter, max_tokens) - 1
        letter = "." if last >= num_tokens else "p" if last < prompt else "g"
        letters += letter.upper() if last < line.computed else letter
    return letters


def show_step(served: Served, *, width: int = 100) -> str:
    """Draws a step of the scheduler: its five parts in order, with "-" for an idle part.

    Args:
      served: the result of `serve_step`; not traced.
      width: maximum columns of the drawing.
    """
    did: Any = jax.device_get(served)
    released = np.flatnonzero(did.retired.released)
    preempted = did.retired.preempted[did.retired.preempted >= 0]
    admitted = zip(did.admitted.slots, did.admitted.rows, did.admitted.cached, strict=True)
    chosen = {row: tokens[tokens >= 0] for row, tokens in enumerate(did.chosen.tokens)}
    steps = max(map(len, chosen.values()))
    if did.mixed:
        chunks = zip(did.chunks.rows, did.chunks.count, strict=True)
        computed = ["a mixed step", *(f"row {row} a chunk of {count:,}" for row, count in chunks if row >= 0)]
    else:
        computed = [f"a block of {plural(steps, 'step')}"] if steps else []
    parts = {
        "retire": [f"row {row} released" for row in released] + [f"request {slot} preempted" for slot in preempted],
        "grow": [f"blocks for {plural(int(did.n), 'step')}" if did.n else "blocks refused"],
        "admit": [f"request {slot} in row {row}, {cached:,} cached" for slot, row, cached in admitted if slot >= 0],
        "compute": computed,
        "choose": [f"row {row}: {' '.join(map(str, tokens))}" for row, tokens in chosen.items() if tokens.size],
    }
    lines = [
        textwrap.fill("; ".join(texts) or "-", width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)
        for name, texts in parts.items()
    ]
    return "\n".join(lines)


def _num_tokens(requests: Any, slot: int) -> str:
    return f"{requests.num_tokens[slot]:,} of {requests.max_tokens[slot]:,} tokens"
