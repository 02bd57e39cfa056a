# SPDX-License-Identifier: Apache-2.0
"""A cache drawn in text: counts, rows, the tree of its contents, and a map of its blocks, for each group."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax._checks import on_state
from kvjax._summary import uncounted
from kvjax.debug.changes import changes
from kvjax.debug.counts import tally
from kvjax.debug.sharing import shared
from kvjax.debug.survey import Condition, Survey, read_blocks
from kvjax.debug.words import fit, runs
from kvjax.state import NO_BLOCK, CacheState

_MANY = 9  # holders that one digit can tell
_SIGNS = {
    Condition.UNUSED: " ", Condition.EMPTY: ".", Condition.CACHED: "c", Condition.ACTIVE: "a",
    Condition.ON_HOST_EMPTY: "-", Condition.ON_HOST_CACHED: "h", Condition.ON_HOST_ACTIVE: "s",
}  # fmt: skip
_ARRIVING, _LEAVING = "<", ">"
_ALIKE = {
    Condition.EMPTY: "empty", Condition.ON_HOST_EMPTY: "empty, on the host", Condition.UNUSED: "not in use",
}  # fmt: skip


@on_state
def show(state: CacheState, *, since: CacheState | None = None, width: int = 100, max_lines: int = 16) -> str:
    """Draws a cache in text, a broken one too: `check` puts the drawing into its message.

    A loop that runs has donated its arrays: another thread draws a copy, such as `progress.state` of a `stream`.

    Args:
      state: the cache; not traced.
      since: an earlier state of the same spec: then only what has changed since is drawn, its rows and its blocks.
      width: columns to stay within.
      max_lines: the most lines for each part of a group; what lies beyond them is counted, and a map of many used
        blocks gives one character to several.

    Returns:
      Several lines. The tree of contents is left out of a group with more blocks in use (active or cached) than
      `max_lines`. It and the tree of what rows share are left out of all groups with windows, whose blocks hold the
      same tokens as the first group's beside them.

    Raises:
      ValueError: if `since` is no state, or one of another spec.
    """
    if since is not None:
        return changes(since, state, width, max_lines)
    lines = []
    for number, group in enumerate(state.spec.groups):
        seen = read_blocks(state, number)
        shape = f"blocks of {state.spec.block_size} tokens, rows of up to {state.spec.max_blocks_per_seq:,} blocks"
        for line in (state.spec.group_name(number) + shape, *tally(state, seen).lines):
            lines += textwrap.wrap(line, width)
        parts = [_rows(seen, width, max_lines)]
        if group.window is None:
            parts.append(shared(seen, width, max_lines))
            parts += [_contents(seen, width)] if np.sum(seen.used) <= max_lines else []
        for part in map(list, [*parts, _map(seen, width, max_lines)]):
            lines += ["", *part] if part else []
        lines.append("")
    return "\n".join(line[:width].rstrip() for line in lines[:-1])


def page(cache: Any) -> str:
    """The line of a state, or of its owner, for a notebook; with a drawing where there are counts."""
    state, drawing = (cache if isinstance(cache, CacheState) else cache.state), ""
    if not uncounted(cache, state):
        drawing = "\n\n" + show(state)
    return f"<pre>{html.escape(repr(cache) + drawing)}</pre>"


setattr(CacheState, "_repr_html_", page)  # noqa: B010 (a state has it from here, since it imports nothing of this room)


def _rows(seen: Survey, width: int, max_lines: int) -> Iterator[str]:
    """One line per row in use: tokens, tokens written, block table."""
    used = np.flatnonzero(seen.in_use)
    digits = len(str(len(seen.length) - 1))
    for seq in used[:max_lines]:
        length, committed = int(seen.length[seq]), int(seen.committed[seq])
        written = "" if committed == length else f" ({committed:,} written)"
        swapped_out = ", swapped out" if seen.swapped[seq] else ""
        head = f"seq {seq:>{digits}}  {length:,} tokens{written}{swapped_out}  blocks "
        table = seen.table[seq]
        last = np.flatnonzero(table != NO_BLOCK)
        yield head + fit(runs(table[: last[-1] + 1] if len(last) else table[:0]), width - len(head))
    if len(used) > max_lines:
        yield f"and {len(used) - max_lines:,} more rows in use"
    if len(used) == 0:
        yield "no row in use"


def _contents(seen: Survey, width: int) -> Iterator[str]:
    """The findable blocks as trees of prefixes, then the blocks that rows are still filling."""
    findable = [int(block) for block in np.flatnonzero(seen.fill > 0)]
    parents = {block: _parent(seen, block) for block in findable}
    drawn: set[int] = set()

    def branch(block: int, indent: str) -> Iterator[str]:
        if block in drawn:  # a cycle of parent links: a broken state
            return
        drawn.add(block)
        yield _block(seen, block, indent, width)
        for child in findable:
            if parents[child] == block:
                yield from branch(child, indent + "   ")

    roots = sorted((b for b in findable if parents[b] == NO_BLOCK), key=lambda b: int(seen.parent[b, 1]))
    for n, block in enumerate(roots):
        namespace = int(seen.parent[block, 1])
        if n == 0 or namespace != int(seen.parent[roots[n - 1], 1]):
            yield f"findable, namespace {namespace}:"
        yield from branch(block, "  ")
    lost = [block for block in findable if block not in drawn]
    yield from (_block(seen, block, "  NO WAY TO A ROOT ", width) for block in lost)
    private = np.flatnonzero((seen.refcount > 0) & (seen.fill == 0))
    if len(private):
        yield "held, not yet findable:"
    yield from (_block(seen, int(block), "  ", width) for block in private)


def _parent(seen: Survey, block: int) -> int:
    """The findable block before this one, NO_BLOCK at a root, -2 where the link leads nowhere."""
    parent, generation = map(int, seen.parent[block])
    if parent == NO_BLOCK:
        return NO_BLOCK
    alive = 0 <= parent < len(seen.fill) and seen.fill[parent] > 0 and seen.generation[parent] == generation
    return parent if alive else -2


def _block(seen: Survey, block: int, indent: str, width: int) -> str:
    """One block with its tokens; a dot for an unwritten slot."""
    size, written = seen.tokens.shape[1], int(seen.written[block])
    holders = int(seen.refcount[block])
    tail = f"  {holders} holder{'' if holders == 1 else 's'}" if holders else "  cached"
    on_host = seen.condition[block] >= Condition.ON_HOST_EMPTY
    if seen.moving[block]:
        tail += ", on its way to the host" if on_host else ", on its way to the device"
    elif on_host:
        tail += ", on the host"
    head = f"{indent}{block:>3} ["
    slots = [str(token) for token in seen.tokens[block, :written]] + ["."] * (size - written)
    return head + fit(slots, width - len(head) - len(tail) - 1) + "]" + tail


def _map(seen: Survey, width: int, max_lines: int) -> Iterator[str]:
    """One character per block, or per run of blocks where too many are used; lines without used blocks in words."""
    num_blocks = len(seen.condition)
    digits = len(f"{num_blocks - 1:,}")
    columns = max((width - digits - 1) // 11 * 10, 10)  # tens, with a blank before each
    per_cell = 1
    while len(parts := _parts(seen, columns * per_cell)) > max_lines and columns * per_cell < num_blocks:
        per_cell *= 2
    host = bool((seen.condition >= Condition.ON_HOST_EMPTY).any())
    if per_cell == 1:
        legend = f"digit: holders (+: more than {_MANY}), c: cached, .: empty"
    else:
        legend = f"a character for {per_cell:,} blocks; most of them a: active, c: cached, .: empty"
    if host:
        legend += "; on the host s: swapped out, h: cached, -: empty"
    if host and per_cell == 1:
        legend += f"; {_LEAVING}: on the way there, {_ARRIVING}: back"
    yield from textwrap.wrap(f"blocks ({legend})", width)
    for start, end, alike in parts:
        if alike:
            yield f"{start:>{digits},} to {end - 1:,}: {alike}"
            continue
        cells = "".join(_cell(seen, range(at, min(at + per_cell, end))) for at in range(start, end, per_cell))
        yield f"{start:>{digits},} " + " ".join(cells[i : i + 10] for i in range(0, len(cells), 10))


def _parts(seen: Survey, size: int) -> list[tuple[int, int, str]]:
    """(from, to, "") for each line of `size` blocks; two or more lines in one where all are empty, or out of use."""
    parts: list[tuple[int, int, str]] = []
    for start in range(0, len(seen.condition), size):
        end = min(start + size, len(seen.condition))
        kinds = np.unique(seen.condition[start:end])
        alike = "" if len(kinds) > 1 or seen.moving[start:end].any() else _ALIKE.get(Condition(int(kinds[0])), "")
        if alike and parts and parts[-1][2] == alike:
            start = parts.pop()[0]
        parts.append((start, end, alike))
    return [(start, end, alike if end - start > size else "") for start, end, alike in parts]


def _cell(seen: Survey, blocks: range) -> str:
    """The character of a block, or of the condition that most of several have."""
    if len(blocks) > 1:
        conditions = seen.condition[blocks.start : blocks.stop]
        return _SIGNS[Condition(int(np.argmax(np.bincount(conditions, minlength=len(Condition)))))]
    block = blocks.start
    condition, holders = int(seen.condition[block]), int(seen.refcount[block])
    if seen.moving[block]:
        return _LEAVING if condition >= Condition.ON_HOST_EMPTY else _ARRIVING
    if condition != Condition.ACTIVE:
        return _SIGNS[Condition(condition)]
    return str(holders) if holders <= _MANY else "+"
