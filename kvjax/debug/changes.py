# SPDX-License-Identifier: Apache-2.0
"""Two states of a cache compared in text: counts, rows and blocks, only what has changed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from kvjax._summary import Condition
from kvjax.debug.counts import Stats, tally
from kvjax.debug.inspect import Inspection, inspect_group
from kvjax.debug.words import fit, holders, runs, tier_of
from kvjax.state import NO_BLOCK, CacheState


def changes(before: Any, after: CacheState, width: int, max_lines: int) -> str:
    """Draws the differences of two states of one spec; see `show`."""
    if not isinstance(before, CacheState):
        raise ValueError(f"since: got a {type(before).__name__}, wanted a CacheState, such as an earlier cache.state")
    if before.spec != after.spec:
        raise ValueError("since: got a state of another spec, wanted one of the spec of `state`")
    drawings = []
    for number in range(len(after.groups)):
        old, new = inspect_group(before, number), inspect_group(after, number)
        parts = [[*part] for part in (_rows(old, new, width, max_lines), _blocks(old, new, width, max_lines))]
        counts = [tally(before, old), tally(after, new)]
        if counts[0] == counts[1] and not any(parts):
            continue
        first, *others = _counts(*counts)
        first = after.spec.group_name(number) + first
        lines = [words for line in (first, *others) for words in textwrap.wrap(line, width)]
        for part in parts:
            lines += ["", *part] if part else []
        drawings.append("\n".join(line[:width].rstrip() for line in lines))
    return "\n\n".join(drawings) or "\n".join(textwrap.wrap(_nothing(before, after), width))


def _nothing(before: CacheState, after: CacheState) -> str:
    """Whether states with equal rows and blocks are equal in all arrays."""
    leaves = lambda state: jax.tree_util.tree_leaves_with_path(jax.device_get(state))  # noqa: E731
    old, new = ({jax.tree_util.keystr(path): leaf for path, leaf in leaves(state)} for state in (before, after))
    other = [name for name in old | new if not (name in old and name in new and np.array_equal(old[name], new[name]))]
    if not other:
        return "nothing has changed"
    return f"no row and no block has changed, but {fit(other, 200)}"


def _counts(old: Stats, new: Stats) -> Iterator[str]:
    """Counts before and after, as in the lines of `Stats`."""

    def both(*names: str) -> str:
        return ", ".join(f"{_arrow(getattr(old, name), getattr(new, name))} {name.split('_')[-2]}" for name in names)

    rows = f"{_arrow(old.active_rows, new.active_rows)} of {new.num_rows:,} rows in use"
    blocks = both("active_blocks", "cached_blocks", "empty_blocks")
    yield f"{_arrow(old.num_blocks, new.num_blocks)} blocks: {blocks}; {rows}"
    if new.host_blocks:
        blocks = both("host_active_blocks", "host_cached_blocks", "host_empty_blocks")
        moving = _arrow(old.in_transit_blocks, new.in_transit_blocks)
        yield f"on the host {new.host_blocks:,} blocks: {blocks}; {moving} on the move"


def _arrow(old: int, new: int) -> str:
    return f"{new:,}" if old == new else f"{old:,} -> {new:,}"


def _rows(old: Inspection, new: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """One line per row that has changed: tokens, tokens written, blocks gained and lost."""
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
    lengths = int(since.length[seq]), int(new.length[seq])
    written = int(since.committed[seq]), int(new.committed[seq])
    tokens = f"{'new, ' if came else ''}{_arrow(*lengths)} tokens"
    if written != lengths:
        tokens += f" ({_arrow(*written)} written)"
    if old.swapped[seq] != new.swapped[seq]:
        tokens += ", swapped out" if new.swapped[seq] else ", swapped in"
    return tokens


def _without(blocks: np.ndarray, others: np.ndarray) -> list[int]:
    return [block for block in blocks.tolist() if block != NO_BLOCK and block not in others]


def _blocks(old: Inspection, new: Inspection, width: int, max_lines: int) -> Iterator[str]:
    """One line for the blocks that changed from one condition to another; empty ones that change the tier have none."""
    replaced = (old.fill > 0) & (new.fill > 0) & (old.generation != new.generation)
    fields = ("condition", "moving", "refcount")
    differs = np.any([getattr(old, name) != getattr(new, name) for name in fields], axis=0)
    changes: dict[tuple[str, str], list[int]] = {}
    out_of_use = (old.condition == Condition.UNUSED) != (new.condition == Condition.UNUSED)
    differs |= replaced | ((old.fill > 0) != (new.fill > 0))
    for block in np.flatnonzero(differs & (old.used | new.used | out_of_use)).tolist():
        what = _condition(old, block), _condition(new, block) + (", other contents" if replaced[block] else "")
        changes.setdefault(what, []).append(block)
    first, second = (max((len(pair[i]) for pair in changes), default=0) for i in range(2))
    for was, now in list(changes)[:max_lines]:
        line = f"{was:>{first}} -> {now:<{second}}  "
        yield line + fit(runs(changes[was, now]), width - len(line))
    if len(changes) > max_lines:
        left = sum(map(len, list(changes.values())[max_lines:]))
        yield f"and {left:,} more blocks"


def _condition(seen: Inspection, block: int) -> str:
    condition = Condition(int(seen.condition[block]))
    if condition in (Condition.ACTIVE, Condition.ON_HOST_ACTIVE):
        words = holders(f"{seen.refcount[block]:,}") + ("" if seen.fill[block] > 0 else ", not findable")
    else:
        words = _WORDS[condition]
    return words + tier_of(seen, block)


_WORDS = {
    Condition.UNUSED: "not in use", Condition.EMPTY: "empty", Condition.CACHED: "cached",
    Condition.ON_HOST_EMPTY: "empty", Condition.ON_HOST_CACHED: "cached",
}  # fmt: skip
