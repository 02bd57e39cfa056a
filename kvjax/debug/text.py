# SPDX-License-Identifier: Apache-2.0
"""Draws a cache as text: counts, rows, the tree of its contents, and a map of its blocks. It also draws changes."""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.checks import on_state
from kvjax.debug.counts import change, count_lines, one_line, tally, uncounted
from kvjax.debug.inspect import Condition, Inspection, inspect_group
from kvjax.spec import Kind
from kvjax.state import NO_BLOCK, CacheState

_MAX_SINGLES = 4  # rows that continue alone after a branch, and get a line each
_Branch = tuple[int, list[int], list[int]]  # depth, blocks, rows; no blocks if each row continues alone
_MAX_DIGIT = 9  # the most holders of a block that a digit shows
_SIGNS = {
    Condition.UNUSED: " ",
    Condition.EMPTY: ".",
    Condition.CACHED: "c",
    Condition.ACTIVE: "a",
    Condition.ON_HOST_EMPTY: "-",
    Condition.ON_HOST_CACHED: "h",
    Condition.ON_HOST_ACTIVE: "s",
    Condition.ON_HOST_BACKUP: "b",
}
_TO_DEVICE = "<"
_TO_HOST = ">"
_ALIKE = {
    Condition.EMPTY: "empty",
    Condition.ON_HOST_EMPTY: "empty, on the host",
    Condition.UNUSED: "not in use",
}
_WORDS = {
    Condition.UNUSED: "not in use",
    Condition.EMPTY: "empty",
    Condition.CACHED: "cached",
    Condition.ON_HOST_EMPTY: "empty",
    Condition.ON_HOST_CACHED: "cached",
}


@on_state
def show(state: CacheState, *, since: CacheState | None = None, width: int = 100, max_lines: int = 16) -> str:
    """Draws a cache as text. It can draw broken caches, and `check` puts the drawing into its message.

    A running loop has donated its arrays. In another thread, draw a copy, such as `progress.state` of a `stream`.

    Args:
      state: the cache, not traced.
      since: an earlier state of the same spec, to draw only rows and blocks changed since. None draws everything.
      width: maximum width in columns.
      max_lines: maximum number of lines for each part of a group. Further rows and blocks are only counted, and the
        characters of a map stand for several blocks.

    Returns:
      Several lines. If a group has more active and cached blocks than `max_lines`, a line says so in place of the tree
      of contents. Groups with windows have neither this tree nor the tree of shared prefixes, because their tokens are
      in the first group.

    Raises:
      ValueError: if `since` is no state, or a state of another spec.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> print(kvjax.show(state))
      blocks of 4 tokens, rows of up to 8 blocks
      8 blocks: 3 active, 0 cached, 5 empty; 10 of 32 slots filled; 1 of 2 rows in use
      <BLANKLINE>
      seq 0  10 tokens  blocks 0-2
      <BLANKLINE>
      findable, namespace 0:
          0 [0 1 2 3]  1 holder
             1 [4 5 6 7]  1 holder
      held, not yet findable:
          2 [8 9 . .]  1 holder
      <BLANKLINE>
      blocks (digit: holders (+: more than 9), c: cached, .: empty)
      0 111.....
    """
    if since is not None:
        return _changes(since, state, width, max_lines)
    drawings = []
    for group_index, group in enumerate(state.spec.groups):
        seen = inspect_group(state, group_index)
        shape = f"blocks of {state.spec.block_size} tokens, rows of up to {state.spec.max_blocks_per_seq:,} blocks"
        parts = [_rows(seen, width, max_lines)]
        if group.kind is Kind.FULL:
            parts.append(_shared(seen, width, max_lines))
            parts.append(_contents(seen, width, max_lines))
        heads = (state.spec.group_name(group_index) + shape, *tally(state, seen).lines)
        drawings.append(_drawing(heads, [*parts, _map(seen, width, max_lines)], width))
    return "\n\n".join(drawings)


def _drawing(heads: Iterable[str], parts: Iterable[Iterable[str]], width: int) -> str:
    """The heads, and the parts with any lines, wrapped to a width."""
    lines = [words for head in heads for words in textwrap.wrap(head, width)]
    for part in map(list, parts):
        lines += ["", *part] if part else []
    return "\n".join(line[:width].rstrip() for line in lines)


def page(cache: Any) -> str:
    """HTML for a notebook: the line of a state or its owner, with a drawing if its blocks can be counted."""
    state = cache if isinstance(cache, CacheState) else cache.state
    drawing = ""
    if not uncounted(cache, state):
        drawing = "\n\n" + show(state)
    return f"<pre>{html.escape(repr(cache) + drawing)}</pre>"


# Lets a state print itself without importing this package.
setattr(CacheState, "__repr__", lambda state: one_line(state, state))  # noqa: B010
setattr(CacheState, "_repr_html_", page)  # noqa: B010


def _rows(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """Lines for the rows in use: tokens, written tokens, block table."""
    used = np.flatnonzero(seen.in_use)
    digits = len(str(len(seen.length) - 1))
    for seq in used[:max_lines]:
        length = int(seen.length[seq])
        committed = int(seen.committed[seq])
        written = "" if committed == length else f" ({committed:,} written)"
        swapped_out = ", swapped out" if seen.swapped[seq] else ""
        num_holes = int(seen.holes[seq].sum())
        holes = f", {num_holes:,} holes" if num_holes else ""
        head = f"seq {seq:>{digits}}  {length:,} tokens{written}{swapped_out}{holes}  blocks "
        table = seen.table[seq]
        last = np.flatnonzero(table != NO_BLOCK)
        yield head + fit(runs(table[: last[-1] + 1] if len(last) else table[:0]), width - len(head))
    if len(used) > max_lines:
        yield f"and {len(used) - max_lines:,} more rows in use"
    if len(used) == 0:
        yield "no row in use"


def _shared(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """Lines for the shared prefixes and their branches: blocks, rows, tokens. Empty if no row shares a block."""
    tables = {seq: row[row >= 0].tolist() for seq, row in enumerate(seen.table) if (row >= 0).any()}
    shared_rows = [rows for rows in _by_block(tables, list(tables), 0) if len(rows) > 1]
    all_branches = itertools.chain.from_iterable(_branches(tables, rows, 0, 0) for rows in shared_rows)
    branches = list(itertools.islice(all_branches, max_lines + 1))
    if not branches:
        return
    yield "shared prefixes and their branches:"
    drawn = branches[:max_lines]
    indents = ["   " * depth for depth, *_ in drawn]
    heads = [
        indent + (fit(runs(blocks), width // 2 - len(indent)) if blocks else "...")
        for indent, (_, blocks, _) in zip(indents, drawn, strict=True)
    ]
    owners = [seqs(rows) if blocks else f"{seqs(rows)}, each alone" for _, blocks, rows in drawn]
    first, second = (min(max(map(len, texts)), width // 3) for texts in (heads, owners))
    for (_, blocks, _), head, owner in zip(drawn, heads, owners, strict=True):
        line = f"{head:<{first}}  {fit(owner.split(' '), width // 2):<{second}}  "
        yield line + (_text(seen, blocks, width - len(line)) if blocks else "")
    if len(branches) > max_lines:
        yield "and more branches"


def _by_block(tables: dict[int, list[int]], rows: Sequence[int], column: int) -> list[list[int]]:
    """The rows with a block in a column, grouped by this block."""
    parts: dict[int, list[int]] = {}
    for seq in rows:
        if len(tables[seq]) > column:
            parts.setdefault(tables[seq][column], []).append(seq)
    return list(parts.values())


def _branches(tables: dict[int, list[int]], rows: list[int], start: int, depth: int) -> Iterator[_Branch]:
    """The shared prefix of rows from a column on, then the branches after it, shared branches first."""
    end = start
    while len(parts := _by_block(tables, rows, end)) == 1 and len(parts[0]) == len(rows):
        end += 1
    yield depth, tables[rows[0]][start:end], rows
    singles = [part for part in parts if len(part) == 1]
    for part in sorted(parts, key=len, reverse=True):
        if len(part) > 1 or len(singles) <= _MAX_SINGLES:
            yield from _branches(tables, part, end, depth + 1)
    if len(singles) > _MAX_SINGLES:
        yield depth + 1, [], [seq for (seq,) in singles]


def _text(seen: Inspection, blocks: list[int], width: int) -> str:
    """The written tokens of blocks, as many as fit."""
    inside = np.clip(blocks, 0, len(seen.tokens) - 1)
    tokens = [str(token) for block in inside for token in seen.tokens[block, : seen.written[block]]]
    count = f"{len(tokens):,} tokens  " if tokens else "nothing written"
    return count + fit([*tokens[:width], *tokens[width:][-1:]], width - len(count))


def _contents(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """The findable blocks as trees of prefixes, then the blocks still being filled by rows."""
    if (num_used := int(np.sum(seen.used))) > max_lines:
        text = f"the tree of {num_used:,} blocks is left out; show(state, max_lines={num_used}) draws it"
        yield from textwrap.wrap(text, width)
        return
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
    """The findable block before a block, NO_BLOCK at a root, -2 for a dangling link."""
    parent, generation = map(int, seen.parent[block])
    if parent == NO_BLOCK:
        return NO_BLOCK
    alive = 0 <= parent < len(seen.fill) and seen.fill[parent] > 0 and seen.generation[parent] == generation
    return parent if alive else -2


def _block(seen: Inspection, block: int, indent: str, width: int) -> str:
    """A block with its tokens, and a dot for each unwritten slot."""
    size = seen.tokens.shape[1]
    written = int(seen.written[block])
    count = int(seen.refcount[block])
    tail = f"  {holders(str(count)) if count else 'cached'}{tier_of(seen, block)}"
    head = f"{indent}{block:>3} ["
    slots = [str(token) for token in seen.tokens[block, :written]] + ["."] * (size - written)
    return head + fit(slots, width - len(head) - len(tail) - 1) + "]" + tail


def _map(seen: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """A character for each block, or for each run of blocks if many are used. Unused lines are described in words."""
    num_blocks = len(seen.condition)
    digits = len(f"{num_blocks - 1:,}")
    columns = max((width - digits - 1) // 11 * 10, 10)  # tens, with a blank before each
    per_cell = 1
    while len(parts := _parts(seen, columns * per_cell)) > max_lines and columns * per_cell < num_blocks:
        per_cell *= 2
    host = bool((seen.condition >= Condition.ON_HOST_EMPTY).any())
    if per_cell == 1:
        legend = f"digit: holders (+: more than {_MAX_DIGIT}), c: cached, .: empty"
    else:
        legend = f"a character for {per_cell:,} blocks; most of them a: active, c: cached, .: empty"
    if host:
        has_backups = bool((seen.condition == Condition.ON_HOST_BACKUP).any())
        copies = ", b: copies of device blocks" if has_backups else ""
        legend += f"; on the host s: swapped out, h: cached{copies}, -: empty"
    if host and per_cell == 1:
        legend += f"; {_TO_HOST}: on the way there, {_TO_DEVICE}: back"
    yield from textwrap.wrap(f"blocks ({legend})", width)
    for start, end, alike in parts:
        if alike:
            yield f"{start:>{digits},} to {end - 1:,}: {alike}"
            continue
        cells = "".join(_cell(seen, range(cell, min(cell + per_cell, end))) for cell in range(start, end, per_cell))
        yield f"{start:>{digits},} " + " ".join(cells[i : i + 10] for i in range(0, len(cells), 10))


def _parts(seen: Inspection, size: int) -> list[tuple[int, int, str]]:
    """(from, to, "") for each line of `size` blocks. Several empty or unused lines are joined to (from, to, words)."""
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
    """The character of a block, or of the most frequent condition of several blocks."""
    if len(blocks) > 1:
        conditions = seen.condition[blocks.start : blocks.stop]
        return _SIGNS[Condition(int(np.argmax(np.bincount(conditions, minlength=len(Condition)))))]
    block = blocks.start
    condition = int(seen.condition[block])
    count = int(seen.refcount[block])
    if seen.moving[block]:
        return _TO_HOST if condition >= Condition.ON_HOST_EMPTY else _TO_DEVICE
    if condition != Condition.ACTIVE:
        return _SIGNS[Condition(condition)]
    return str(count) if count <= _MAX_DIGIT else "+"


def _changes(before: Any, after: CacheState, width: int, max_lines: int) -> str:
    """Draws the differences of two states of the same spec. See `show`."""
    if not isinstance(before, CacheState):
        raise ValueError(f"since: got a {type(before).__name__}, wanted a CacheState, such as an earlier cache.state")
    if before.spec != after.spec:
        raise ValueError("since: got a state of another spec, wanted a state of the same spec as `state`")
    drawings = []
    for group_index in range(len(after.groups)):
        old = inspect_group(before, group_index)
        new = inspect_group(after, group_index)
        parts = [[*_changed_rows(old, new, width, max_lines)], [*_changed_blocks(old, new, width, max_lines)]]
        counts = [tally(before, old), tally(after, new)]
        if counts[0] != counts[1] or any(parts):
            first, *others = count_lines(counts[1], counts[0])
            drawings.append(_drawing([after.spec.group_name(group_index) + first, *others], parts, width))
    return "\n\n".join(drawings) or "\n".join(textwrap.wrap(_nothing(before, after), width))


def _nothing(before: CacheState, after: CacheState) -> str:
    """A line about states with equal rows and blocks: whether all their arrays are equal."""
    leaves = lambda state: jax.tree_util.tree_leaves_with_path(jax.device_get(state))  # noqa: E731
    old, new = ({jax.tree_util.keystr(path): leaf for path, leaf in leaves(state)} for state in (before, after))
    is_equal = lambda name: name in old and name in new and np.array_equal(old[name], new[name])  # noqa: E731
    changed = [name for name in old | new if not is_equal(name)]
    if not changed:
        return "nothing has changed"
    return f"no row and no block has changed, but {fit(changed, 200)}"


def _changed_rows(old: Inspection, new: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """Lines for the changed rows: tokens, written tokens, blocks gained and lost."""
    fields = ("length", "committed", "swapped")
    differs = np.any([getattr(old, name) != getattr(new, name) for name in fields], axis=0)
    changed = np.flatnonzero(differs | np.any(old.table != new.table, axis=1))
    digits = len(str(len(new.length) - 1))
    for seq in changed[:max_lines].tolist():
        line = f"seq {seq:>{digits}}  {_tokens(old, new, seq)}"
        moved = {"gains": _without(new.table[seq], old.table[seq]), "loses": _without(old.table[seq], new.table[seq])}
        moved = {verb: runs(blocks) for verb, blocks in moved.items() if blocks}
        part = (width - len(line)) // max(len(moved), 1)
        yield line + "".join(f"  {verb} {fit(words, part - len(verb) - 3)}" for verb, words in moved.items())
    if len(changed) > max_lines:
        yield f"and {len(changed) - max_lines:,} more rows"


def _tokens(old: Inspection, new: Inspection, seq: int) -> str:
    """The tokens of a row before and after."""
    if not new.in_use[seq]:
        return f"free, had {int(old.length[seq]):,} tokens"
    came = not old.in_use[seq]
    since = new if came else old
    lengths = (int(since.length[seq]), int(new.length[seq]))
    written = (int(since.committed[seq]), int(new.committed[seq]))
    tokens = f"{'new, ' if came else ''}{change(*lengths)} tokens"
    if written != lengths:
        tokens += f" ({change(*written)} written)"
    if old.swapped[seq] != new.swapped[seq]:
        tokens += ", swapped out" if new.swapped[seq] else ", swapped in"
    return tokens


def _without(blocks: np.ndarray, others: np.ndarray) -> list[int]:
    return [block for block in blocks.tolist() if block != NO_BLOCK and block not in others]


def _changed_blocks(old: Inspection, new: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """Lines for the blocks with the same change of condition. Empty blocks that change the tier are left out."""
    replaced = (old.fill > 0) & (new.fill > 0) & (old.generation != new.generation)
    fields = ("condition", "moving", "refcount")
    differs = np.any([getattr(old, name) != getattr(new, name) for name in fields], axis=0)
    changes: dict[tuple[str, str], list[int]] = {}
    out_of_use = (old.condition == Condition.UNUSED) != (new.condition == Condition.UNUSED)
    differs |= replaced | ((old.fill > 0) != (new.fill > 0))
    for block in np.flatnonzero(differs & (old.used | new.used | out_of_use)).tolist():
        pair = (_condition(old, block), _condition(new, block) + (", other contents" if replaced[block] else ""))
        changes.setdefault(pair, []).append(block)
    first, second = (max((len(pair[i]) for pair in changes), default=0) for i in range(2))
    for was, now in list(changes)[:max_lines]:
        line = f"{was:>{first}} -> {now:<{second}}  "
        yield line + fit(runs(changes[was, now]), width - len(line))
    if len(changes) > max_lines:
        num_more = sum(map(len, list(changes.values())[max_lines:]))
        yield f"and {num_more:,} more blocks"


def _condition(seen: Inspection, block: int) -> str:
    condition = Condition(int(seen.condition[block]))
    if condition in (Condition.ACTIVE, Condition.ON_HOST_ACTIVE):
        words = holders(f"{seen.refcount[block]:,}") + ("" if seen.fill[block] > 0 else ", not findable")
    else:
        words = _WORDS[condition]
    return words + tier_of(seen, block)


def runs(ids: Iterable[int]) -> list[str]:
    """Block ids in short form: runs of three or more, upwards or downwards, and gaps, as in 2 7-9 - x12, 4."""
    id_runs: list[list[int]] = []
    for block in map(int, ids):
        run = id_runs[-1] if id_runs else []
        step = block - run[-1] if run else 0
        straight = abs(step) == 1 and min(block, run[-1]) >= 0 and (len(run) == 1 or run[1] - run[0] == step)
        if straight or (run and block == run[0] == NO_BLOCK):
            run.append(block)
        else:
            id_runs.append([block])
    words: list[str] = []
    for run in id_runs:
        if run[0] == NO_BLOCK:
            words += ["-"] if len(run) == 1 else [f"- x{len(run)},"]
        else:
            words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return words


def fit(words: list[str], width: int) -> str:
    """The words joined by blanks, without the middle if they are too wide."""
    num_words = len(words)
    text = " ".join(words)
    while len(text) > max(width, 12) and num_words > 2:
        num_words -= 1
        text = " ".join([*words[: num_words - 1], "...", words[-1]])
    return text


def seqs(rows: Iterable[int]) -> str:
    """Rows in words: seq 2, seqs 0 1 3."""
    rows = list(rows)
    return f"seq{'s' if len(rows) > 1 else ''} {' '.join(runs(rows))}"


def holders(count: str) -> str:
    """Holders in words: 1 holder, 2 holders."""
    return f"{count} holder{'' if count == '1' else 's'}"


def tier_of(seen: Inspection, block: int) -> str:
    """The tier of a block in words, or "" if it is on the device and not moving."""
    on_host = seen.condition[block] >= Condition.ON_HOST_EMPTY
    if seen.moving[block]:
        return ", on its way to the host" if on_host else ", on its way to the device"
    return ", on the host" if on_host else ""
