# SPDX-License-Identifier: Apache-2.0
"""A cache drawn in text: counts, rows, the tree of its contents, and a map of its blocks, for each group."""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax._summary import Condition, uncounted
from kvjax.checks import on_state
from kvjax.debug.changes import changes
from kvjax.debug.counts import tally
from kvjax.debug.inspect import Inspection, inspect_group
from kvjax.debug.words import fit, holders, runs, seqs, tier_of
from kvjax.state import NO_BLOCK, CacheState

_ALONE = 4  # rows without company that each get a line, at one branching
_Branch = tuple[int, int, int, list[int], bool]  # depth, columns from and to, rows, whether they go on together
_MANY = 9  # the most holders that one digit shows
_SIGNS = {
    Condition.UNUSED: " ", Condition.EMPTY: ".", Condition.CACHED: "c", Condition.ACTIVE: "a",
    Condition.ON_HOST_EMPTY: "-", Condition.ON_HOST_CACHED: "h", Condition.ON_HOST_ACTIVE: "s",
}  # fmt: skip
_TO_DEVICE, _TO_HOST = "<", ">"
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
      max_lines: the most lines for each part of a group; the rest is counted, and a map of many used blocks gives one
        character to several.

    Returns:
      Several lines. The tree of contents is left out of a group with more blocks in use (active or cached) than
      `max_lines`. It and the tree of what rows share are left out of all groups with windows, whose blocks hold the
      same tokens as the first group's.

    Raises:
      ValueError: if `since` is no state, or one of another spec.
    """
    if since is not None:
        return changes(since, state, width, max_lines)
    lines = []
    for number, group in enumerate(state.spec.groups):
        seen = inspect_group(state, number)
        shape = f"blocks of {state.spec.block_size} tokens, rows of up to {state.spec.max_blocks_per_seq:,} blocks"
        for line in (state.spec.group_name(number) + shape, *tally(state, seen).lines):
            lines += textwrap.wrap(line, width)
        parts = [_rows(seen, width, max_lines)]
        if group.window is None:
            parts.append(_shared(seen, width, max_lines))
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


def _rows(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
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


def _shared(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """The shared prefixes and their branches, one line each: blocks, rows, tokens; nothing if no row shares a block."""
    tables = {seq: row[row >= 0].tolist() for seq, row in enumerate(seen.table) if (row >= 0).any()}
    together = [rows for rows in _by_block(tables, list(tables), 0) if len(rows) > 1]
    branches = itertools.chain.from_iterable(_branches(tables, rows, 0, 0) for rows in together)
    found = list(itertools.islice(branches, max_lines + 1))
    if not found:
        return
    yield "shared prefixes and their branches:"
    drawn = found[:max_lines]
    heads = [_head(tables, branch, width // 2) for branch in drawn]
    owners = [seqs(rows) if one else f"{seqs(rows)}, each alone" for *_, rows, one in drawn]
    first, second = (min(max(map(len, texts)), width // 3) for texts in (heads, owners))
    for branch, head, owner in zip(drawn, heads, owners, strict=True):
        line = f"{head:<{first}}  {fit(owner.split(' '), width // 2):<{second}}  "
        yield line + _text(seen, tables, branch, width - len(line))
    if len(found) > max_lines:
        yield "and more branches"


def _by_block(tables: dict[int, list[int]], rows: Sequence[int], column: int) -> list[list[int]]:
    """The rows that reach a column, those with the same block there together."""
    parts: dict[int, list[int]] = {}
    for seq in rows:
        if len(tables[seq]) > column:
            parts.setdefault(tables[seq][column], []).append(seq)
    return list(parts.values())


def _branches(tables: dict[int, list[int]], rows: list[int], start: int, depth: int) -> Iterator[_Branch]:
    """The prefix that the rows share from a column on, then what goes on from there, shared parts first."""
    end = start
    while len(parts := _by_block(tables, rows, end)) == 1 and len(parts[0]) == len(rows):
        end += 1
    yield depth, start, end, rows, True
    alone = [part for part in parts if len(part) == 1]
    for part in sorted(parts, key=len, reverse=True):
        if len(part) > 1 or len(alone) <= _ALONE:
            yield from _branches(tables, part, end, depth + 1)
    if len(alone) > _ALONE:
        yield depth + 1, end, end, [seq for (seq,) in alone], False


def _head(tables: dict[int, list[int]], branch: _Branch, width: int) -> str:
    depth, start, end, rows, one = branch
    indent = "   " * depth
    return indent + (fit(runs(tables[rows[0]][start:end]), width - len(indent)) if one else "...")


def _text(seen: Inspection, tables: dict[int, list[int]], branch: _Branch, width: int) -> str:
    """The tokens that are written in a branch, or as many as fit."""
    _, start, end, rows, one = branch
    if not one:
        return ""
    blocks = np.clip(tables[rows[0]][start:end], 0, len(seen.tokens) - 1)
    tokens = [str(token) for block in blocks for token in seen.tokens[block, : seen.written[block]]]
    count = f"{len(tokens):,} tokens  " if tokens else "nothing written"
    return count + fit([*tokens[:width], *tokens[width:][-1:]], width - len(count))


def _contents(seen: Inspection, width: int) -> Iterator[str]:
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


def _parent(seen: Inspection, block: int) -> int:
    """The findable block before this one, NO_BLOCK at a root, -2 where the link leads nowhere."""
    parent, generation = map(int, seen.parent[block])
    if parent == NO_BLOCK:
        return NO_BLOCK
    alive = 0 <= parent < len(seen.fill) and seen.fill[parent] > 0 and seen.generation[parent] == generation
    return parent if alive else -2


def _block(seen: Inspection, block: int, indent: str, width: int) -> str:
    """One block with its tokens; a dot for an unwritten slot."""
    size, written = seen.tokens.shape[1], int(seen.written[block])
    count = int(seen.refcount[block])
    tail = f"  {holders(str(count)) if count else 'cached'}{tier_of(seen, block)}"
    head = f"{indent}{block:>3} ["
    slots = [str(token) for token in seen.tokens[block, :written]] + ["."] * (size - written)
    return head + fit(slots, width - len(head) - len(tail) - 1) + "]" + tail


def _map(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
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
        legend += f"; {_TO_HOST}: on the way there, {_TO_DEVICE}: back"
    yield from textwrap.wrap(f"blocks ({legend})", width)
    for start, end, alike in parts:
        if alike:
            yield f"{start:>{digits},} to {end - 1:,}: {alike}"
            continue
        cells = "".join(_cell(seen, range(at, min(at + per_cell, end))) for at in range(start, end, per_cell))
        yield f"{start:>{digits},} " + " ".join(cells[i : i + 10] for i in range(0, len(cells), 10))


def _parts(seen: Inspection, size: int) -> list[tuple[int, int, str]]:
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


def _cell(seen: Inspection, blocks: range) -> str:
    """The character of a block, or of the condition that most of several have."""
    if len(blocks) > 1:
        conditions = seen.condition[blocks.start : blocks.stop]
        return _SIGNS[Condition(int(np.argmax(np.bincount(conditions, minlength=len(Condition)))))]
    block = blocks.start
    condition, count = int(seen.condition[block]), int(seen.refcount[block])
    if seen.moving[block]:
        return _TO_HOST if condition >= Condition.ON_HOST_EMPTY else _TO_DEVICE
    if condition != Condition.ACTIVE:
        return _SIGNS[Condition(condition)]
    return str(count) if count <= _MANY else "+"
