# SPDX-License-Identifier: Apache-2.0
"""The tree of what rows share: a prefix of blocks that several rows hold, and below it their branches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax.debug.survey import Survey
from kvjax.debug.words import fit, runs, seqs

_ALONE = 4  # rows without company that each get a line, at one branching
Branch = tuple[int, int, int, list[int], bool]  # depth, columns from and to, rows, whether they go on together


def shared(seen: Survey, width: int, max_lines: int) -> Iterator[str]:
    """The shared prefixes and their branches, one line each: blocks, rows, tokens; nothing if no row shares a block."""
    tables = {seq: row[row >= 0].tolist() for seq, row in enumerate(seen.table) if (row >= 0).any()}
    together = [rows for rows in _parted(tables, list(tables), 0) if len(rows) > 1]
    branches = itertools.chain.from_iterable(_branches(tables, rows, 0, 0) for rows in together)
    drawn = list(itertools.islice(branches, max_lines + 1))
    if not drawn:
        return
    yield "shared prefixes and their branches:"
    drawn, cut = drawn[:max_lines], len(drawn) > max_lines
    heads = [_head(tables, branch, width // 2) for branch in drawn]
    known = [seqs(rows) if one else f"{seqs(rows)}, each alone" for *_, rows, one in drawn]
    first, second = (min(max(map(len, texts)), width // 3) for texts in (heads, known))
    for branch, head, who in zip(drawn, heads, known, strict=True):
        line = f"{head:<{first}}  {fit(who.split(' '), width // 2):<{second}}  "
        yield line + _text(seen, tables, branch, width - len(line))
    if cut:
        yield "and more branches"


def _parted(tables: dict[int, list[int]], rows: Sequence[int], column: int) -> list[list[int]]:
    """The rows that reach a column, those with the same block there together."""
    parts: dict[int, list[int]] = {}
    for seq in rows:
        if len(tables[seq]) > column:
            parts.setdefault(tables[seq][column], []).append(seq)
    return list(parts.values())


def _branches(tables: dict[int, list[int]], rows: list[int], start: int, depth: int) -> Iterator[Branch]:
    """The prefix that the rows share from a column on, then what goes on from there, shared parts first."""
    end = start
    while len(parts := _parted(tables, rows, end)) == 1 and len(parts[0]) == len(rows):
        end += 1
    yield depth, start, end, rows, True
    alone = [part for part in parts if len(part) == 1]
    for part in sorted(parts, key=len, reverse=True):
        if len(part) > 1 or len(alone) <= _ALONE:
            yield from _branches(tables, part, end, depth + 1)
    if len(alone) > _ALONE:
        yield depth + 1, end, end, [seq for (seq,) in alone], False


def _head(tables: dict[int, list[int]], branch: Branch, width: int) -> str:
    depth, start, end, rows, one = branch
    indent = "   " * depth
    return indent + (fit(runs(tables[rows[0]][start:end]), width - len(indent)) if one else "...")


def _text(seen: Survey, tables: dict[int, list[int]], branch: Branch, width: int) -> str:
    """The tokens that are written in a branch, or as many as fit."""
    _, start, end, rows, one = branch
    if not one:
        return ""
    blocks = np.clip(tables[rows[0]][start:end], 0, len(seen.tokens) - 1)
    tokens = [str(token) for block in blocks for token in seen.tokens[block, : seen.written[block]]]
    count = f"{len(tokens):,} tokens  " if tokens else "nothing written"
    return count + fit([*tokens[:width], *tokens[width:][-1:]], width - len(count))
