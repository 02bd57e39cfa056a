# SPDX-License-Identifier: Apache-2.0
"""The scheduler drawn in text: where each request stands, and what a step did."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.debug.counts import stats
from kvjax.serving.requests import Finish, Serving, Stage
from kvjax.serving.scheduler import wanted
from kvjax.serving.serve import Served

_LEGEND = "P: prompt, G: generated, in lower case where its row has not computed it; .: up to the goal"
_OVER = (Stage.DONE, Stage.CANCELLED)


class _Line(NamedTuple):
    """A line of a drawing.

    Attributes:
      where: the row, or the stage of a request without one.
      slot: of the request; -1: none.
      said: of it.
      computed: tokens of the request that are in its row.
    """

    where: str
    slot: int
    said: str
    computed: int = 0


def show_requests(serving: Serving, *, width: int = 100, max_lines: int = 16) -> str:
    """Draws requests in text: those in rows, in the order of the rows, then those that wait, then those that are over.

    `show(serving.cache.state)` draws the blocks that they hold.

    Args:
      serving: the requests; not traced.
      width: columns to stay within; where a request has more tokens, a letter stands for several, by the last of them.
      max_lines: the most lines for each of the three; requests beyond them are counted.
    """
    requests: Any = jax.device_get(serving.requests)
    groups, stages = serving.cache.state.groups, requests.stage.tolist()
    runs, waits, over = stages.count(Stage.RUNNING), stages.count(Stage.WAITING), sum(map(stages.count, _OVER))
    steps = _number(int(serving.steps), "step")
    lines = [f"after {steps} of the model: {runs:,} run, {waits:,} wait, {over:,} are over"]
    for number, _ in enumerate(groups):
        lines.append((f"group {number}: " if len(groups) > 1 else "") + str(stats(serving.cache.state, number)))
    parts = [list(_in_rows(serving, requests)), list(_waiting(requests)), list(_over(serving, requests))]
    kept = [line for part in parts for line in part[:max_lines]]
    columns = [max((len(text) for text in texts), default=0) for texts in zip(*map(_texts, kept), strict=True)]
    tokens = _Tokens(requests, serving.cache.state.spec.block_size, 1)
    while any(len(tokens.of(line)) > max(width - sum(columns) - 6, 1) for line in kept):
        tokens = tokens._replace(per_letter=2 * tokens.per_letter)
    lines.append(_LEGEND + (f"; a letter for {tokens.per_letter:,} tokens" if tokens.per_letter > 1 else ""))
    lines = [part for line in lines for part in textwrap.wrap(line, width)]
    for part, name in zip(parts, ("rows in use", "that wait", "that are over"), strict=True):
        for line in part[:max_lines]:
            texts = [text.ljust(column) for text, column in zip(_texts(line), columns, strict=True)]
            lines.append("  ".join([*texts, tokens.of(line)]))
        if len(part) > max_lines:
            lines.append(f"and {len(part) - max_lines:,} more {name}")
    return "\n".join(line[:width].rstrip() for line in lines)


def _texts(line: _Line) -> tuple[str, str, str]:
    return line.where, f"request {line.slot}" if line.slot >= 0 else "", line.said


def _in_rows(serving: Serving, requests: Any) -> Iterator[_Line]:
    """One line for each row in use."""
    seqs = serving.cache.state.seqs
    found: Any = jax.device_get(
        (serving.row, seqs.length, seqs.committed, wanted(serving), serving.leads, serving.out_of_blocks)
    )
    for row, (slot, length, committed, want, leads, out_of_blocks) in enumerate(zip(*found, strict=True)):
        if slot < 0:
            if length > 0:
                yield _Line(f"row {row}", -1, f"{length:,} tokens, of no request here")
            continue
        says = f"known {requests.known[slot]:,} of {requests.goal[slot]:,}: "
        if requests.stage[slot] != Stage.RUNNING:
            says += f"over ({_finish(requests, slot)})"
        elif requests.parent[slot] >= 0:
            says += f"waits for the prompt of request {requests.parent[slot]}"
        else:
            says += "decodes" if want == 1 and not leads else f"wants {want:,}"
        says += f"{', leads samples' if leads else ''}{', out of blocks' if out_of_blocks else ''}"
        yield _Line(f"row {row}", int(slot), says, int(committed))


def _waiting(requests: Any) -> Iterator[_Line]:
    """One line for each request that waits, the highest priority first, then the earliest."""
    for slot in np.lexsort((requests.arrival, -requests.priority)):
        if requests.stage[slot] == Stage.WAITING:
            says = f"known {requests.known[slot]:,} of {requests.goal[slot]:,}"
            for name in ("priority", "passed", "preemptions"):
                times = getattr(requests, name)[slot]
                says += f", {name} {times:,}" if times != 0 else ""
            yield _Line("waits", int(slot), says)


def _over(serving: Serving, requests: Any) -> Iterator[_Line]:
    """One line for each request that is over and has no row."""
    in_rows = np.asarray(serving.row).tolist()
    for slot, stage in enumerate(requests.stage):
        if stage in _OVER and slot not in in_rows:
            finish, number = _finish(requests, slot), requests.known[slot] - requests.prompt[slot]
            yield _Line("over", slot, f"{finish}, {number:,} generated, {requests.cached[slot]:,} cached")


class _Tokens(NamedTuple):
    """Draws the tokens of requests.

    Attributes:
      requests: on the host.
      size: P.
      per_letter: tokens that one letter stands for.
    """

    requests: Any
    size: int
    per_letter: int

    def of(self, line: _Line) -> str:
        """The letters of a request up to its goal, with a blank between blocks; nothing where it is over."""
        if line.slot < 0 or line.where == "over":
            return ""
        prompt, known, goal = (int(getattr(self.requests, name)[line.slot]) for name in ("prompt", "known", "goal"))
        letters = ""
        for start in range(0, goal, self.per_letter):
            if start > 0 and start % self.size == 0 and self.per_letter < self.size:
                letters += " "
            last = min(start + self.per_letter, goal) - 1
            letter = "." if last >= known else "p" if last < prompt else "g"
            letters += letter.upper() if last < line.computed else letter
        return letters


def show_step(served: Served, *, width: int = 100) -> str:
    """Draws what a step of the scheduler did: its five parts in their order, "-" where one did nothing.

    Args:
      served: as `serve_step` returned it; not traced.
      width: columns to stay within.
    """
    did: Any = jax.device_get(served)
    released, preempted = np.flatnonzero(did.retired.released), did.retired.preempted[did.retired.preempted >= 0]
    admitted = zip(did.admitted.slots, did.admitted.rows, did.admitted.cached, strict=True)
    chosen = {row: tokens[tokens >= 0] for row, tokens in enumerate(did.chosen.tokens)}
    steps = max(map(len, chosen.values()))
    if did.mixed:
        chunks = zip(did.chunks.rows, did.chunks.count, strict=True)
        computed = ["a mixed step", *(f"row {row} a chunk of {count:,}" for row, count in chunks if row >= 0)]
    else:
        computed = [f"a block of {_number(steps, 'step')}"] if steps else []
    parts = {
        "retire": [f"row {row} let go" for row in released] + [f"request {slot} preempted" for slot in preempted],
        "grow": [f"room for {_number(int(did.n), 'step')}" if did.n else "blocks refused"],
        "admit": [f"request {slot} in row {row}, {cached:,} cached" for slot, row, cached in admitted if slot >= 0],
        "compute": computed,
        "choose": [f"row {row}: {' '.join(map(str, tokens))}" for row, tokens in chosen.items() if tokens.size],
    }
    lines = [
        textwrap.fill("; ".join(said) or "-", width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)
        for name, said in parts.items()
    ]
    return "\n".join(lines)


def _finish(requests: Any, slot: int) -> str:
    return Finish(int(requests.finish[slot])).name.lower()


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
