# SPDX-License-Identifier: Apache-2.0
"""Draws a cache as a picture: a map of its blocks, and the rows' block tables as lanes below it."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING

import numpy as np

from kvjax._pictures import AMBER, BLUE, FAINT, GREEN, INK, PINK, RED, TEAL, VIOLET, new_figure, picture
from kvjax.checks import on_state
from kvjax.debug.counts import tally
from kvjax.debug.inspect import Condition, Inspection, inspect_group
from kvjax.spec import Kind
from kvjax.state import NO_BLOCK, CacheState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "active": BLUE,
    "shared": VIOLET,
    "cached": AMBER,
    "empty": "#e9ecef",
    "unknown": RED,
    "host active": TEAL,
    "host cached": GREEN,
    "host backup": "#9fd0b8",
    "host empty": "#dcebe4",
    "moving": PINK,
    "gap": "#ffffff",
}
_KINDS = {
    Condition.ACTIVE: "active",
    Condition.CACHED: "cached",
    Condition.EMPTY: "empty",
    Condition.ON_HOST_ACTIVE: "host active",
    Condition.ON_HOST_CACHED: "host cached",
    Condition.ON_HOST_EMPTY: "host empty",
    Condition.ON_HOST_BACKUP: "host backup",
}
_NAMES = {
    "active": "active, one holder",
    "shared": "active, shared",
    "cached": "cached",
    "empty": "empty",
    "host active": "on the host, swapped out",
    "host cached": "on the host, cached",
    "host backup": "on the host, a copy",
    "host empty": "on the host, empty",
    "moving": "on the move",
}
_PARTIAL = ("active", "shared", "cached", "host active", "host cached")
_UNWRITTEN = 0.3  # strength of the colour of unwritten slots
_MAX_CELLS = 2048
_MAX_LANES = 24
_MAX_LABELLED_COLUMNS = 32
_INCHES = 10.0  # width of a new figure
_GAP = 0.1  # between cells, in cells

# How a cell is filled: stretches (from, to, colour, strength) on 0..1. Later stretches cover earlier stretches.
_Stretches = list[tuple[float, float, str, float]]


@on_state
@picture
def plot_blocks(
    state: CacheState,
    path: str | os.PathLike[str] | None = None,
    *,
    ax: Axes | None = None,
    group: int = 0,
    title: str = "",
) -> Axes:
    """Draws the blocks of a cache, coloured by condition and filled up to their last token.

    A cell of the map is a block. In a cache of more than 2,048 blocks it is a run of blocks, divided according to their
    conditions. Each lane is a row's block table, in the colours of the map. A run of blocks outside the window is a
    single cell with the number of blocks. A block on the move has a mark at its left.

    Args:
      state: the cache, not traced.
      path: saves the picture to this file, in the format of its suffix; None disables saving.
      ax: the axes to draw on; defaults to the axes of a new figure.
      group: index of the group.
      title: a heading above the counts.

    Returns:
      The axes. `ax.figure` is the figure.

    Raises:
      ImportError: without matplotlib.
    """
    seen = inspect_group(state, group)
    num_blocks = len(seen.condition)
    per_cell = 1 << (-(-num_blocks // _MAX_CELLS) - 1).bit_length()
    wide = 2 * math.sqrt(-(-num_blocks // per_cell))  # makes a map about four times as wide as it is high
    columns = min(max(1 << math.ceil(math.log2(wide)), 16), 64)
    lanes = np.flatnonzero(seen.in_use).tolist()
    kinds = [kind for kind in _NAMES if kind != "host backup" or state.spec.backups]
    if not state.spec.groups[group].num_host_blocks:
        kinds = kinds[:4]
    drawing = _Drawing(columns, numbered=columns <= _MAX_LABELLED_COLUMNS and per_cell == 1, kinds=kinds)
    _draw_map(drawing, seen, per_cell)
    _draw_lanes(drawing, seen, lanes, gaps=state.spec.groups[group].kind is not Kind.FULL)
    if ax is None:
        ax = new_figure(_INCHES, 1 + drawing.inches * drawing.bottom).subplots()
    drawing.finish(ax, ([title] if title else []) + tally(state, seen).lines)
    if path is not None:
        ax.get_figure(root=True).savefig(path, bbox_inches="tight", pad_inches=0.15)  # pyright: ignore[reportOptionalMemberAccess]
    return ax


class _Drawing:
    """Collects cells and labels in units of cells, y downwards, and passes all of them to matplotlib at the end."""

    def __init__(self, columns: int, numbered: bool, kinds: list[str]):
        self.columns = columns
        self.numbered = numbered
        self.kinds = kinds
        self.bottom = 0.0
        self.margin = 1 + columns / 24  # left of the cells, for the labels of lines
        self.inches = _INCHES / (columns + self.margin)  # width of a cell, in a figure of `_INCHES`
        self.boxes: list[np.ndarray] = []
        self.colours: list[tuple[float, ...]] = []
        self.labels: list[tuple[float, float, str, dict]] = []

    def cell(self, x: float, y: float, width: float, stretches: _Stretches, label: str = "") -> None:
        from matplotlib.colors import to_rgba

        gap = _GAP if width > 0.5 else 0.0
        for start, end, colour, strength in stretches:
            x0 = x + (width - gap) * start
            x1 = x + (width - gap) * end
            bottom = y + 1 - _GAP
            self.boxes.append(np.array([(x0, y), (x1, y), (x1, bottom), (x0, bottom)]))
            self.colours.append(to_rgba(_COLOURS[colour], strength))
        if self.numbered and label and width > 0.6:
            size = min(9.0, 72 * self.inches * width / (0.9 * max(len(label), 2)))  # points; fits the cell
            self.text(x + (width - gap) / 2, y + (1 - _GAP) / 2, label, ha="center", size=size, halo=True)

    def text(self, x: float, y: float, label: str, **style) -> None:
        self.labels.append((x, y, label, {"va": "center", "color": INK, "size": 8} | style))

    def finish(self, ax: Axes, headings: list[str]) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.legend_handler import HandlerTuple
        from matplotlib.patches import Patch
        from matplotlib.patheffects import withStroke

        ax.add_collection(PolyCollection(self.boxes, facecolors=self.colours, linewidths=0))
        halo = [withStroke(linewidth=2, foreground="white", alpha=0.75)]
        for x, y, label, style in self.labels:
            ax.text(x, y, label, path_effects=halo if style.pop("halo", False) else None, **style)
        ax.set(xlim=(-self.margin, self.columns), ylim=(self.bottom, 0), aspect="equal", anchor="NW")
        ax.set_axis_off()
        ax.set_title("\n".join(headings))
        swatch = lambda kind, strength=1.0: Patch(facecolor=_COLOURS[kind], alpha=strength)  # noqa: E731
        keys = {_NAMES[kind]: (swatch(kind),) for kind in self.kinds}
        partial = tuple(swatch(kind, _UNWRITTEN) for kind in self.kinds if kind in _PARTIAL)
        keys = dict([*[*keys.items()][:4], ("not written", partial), *[*keys.items()][4:]])
        ax.legend(
            [*keys.values()],
            [*keys],
            loc="upper left",
            bbox_to_anchor=(0, 0),
            ncols=5,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )


def _draw_map(drawing: _Drawing, seen: Inspection, per_cell: int) -> None:
    """Draws a cell for each block, or for each run of `per_cell` blocks."""
    drawing.bottom += 0.1
    for first in range(0, len(seen.condition), per_cell):
        line, column = divmod(first // per_cell, drawing.columns)
        y = drawing.bottom + line
        if column == 0:
            drawing.text(-0.3, y + 0.45, f"{first:,}", ha="right", color=FAINT)
        stretches = _block(seen, first) if per_cell == 1 else _shares(seen, slice(first, first + per_cell))
        drawing.cell(column, y, 1.0, stretches, str(first))
    drawing.bottom += -(-len(seen.condition) // (per_cell * drawing.columns))
    if per_cell > 1:
        drawing.text(0, drawing.bottom + 0.6, f"a cell is {per_cell:,} blocks, by their shares", color=FAINT)
        drawing.bottom += 1.2


def _draw_lanes(drawing: _Drawing, seen: Inspection, lanes: list[int], gaps: bool) -> None:
    """Draws a lane for each row in use, with its blocks in order. `gaps` says whether rows may lack blocks."""
    if not lanes:
        return
    drawing.bottom += 0.6
    used = [seen.table[seq][: 1 + np.flatnonzero(seen.table[seq] != NO_BLOCK).max(initial=-1)] for seq in lanes]
    used = [_join_gaps(table) if gaps else [(int(block), 1) for block in table] for table in used]
    width = min(1.0, drawing.columns / max(1, max(map(len, used[:_MAX_LANES]))))
    for seq, cells in zip(lanes[:_MAX_LANES], used, strict=False):
        drawing.text(-0.3, drawing.bottom + 0.45, f"seq {seq}", ha="right")
        for index, (block, repeats) in enumerate(cells):
            if gaps and block == NO_BLOCK:
                stretches = [(0.0, 1.0, "gap", 1.0)]
                label = f"- x{repeats}"
            elif 0 <= block < len(seen.condition):
                stretches = _block(seen, block)
                label = str(block)
            else:
                stretches = [(0.0, 1.0, "unknown", 1.0)]
                label = str(block)
            drawing.cell(index * width, drawing.bottom, width, stretches, label)
        drawing.bottom += 1
    if len(lanes) > _MAX_LANES:
        drawing.text(0, drawing.bottom + 0.5, f"and {len(lanes) - _MAX_LANES:,} more rows", color=FAINT)
        drawing.bottom += 1


def _join_gaps(table: np.ndarray) -> list[tuple[int, int]]:
    """The table as (block, 1) for each block, and (NO_BLOCK, length) for each run of missing blocks."""
    runs = [(block, len(list(run))) for block, run in itertools.groupby(table.tolist())]
    return [(b, k) for block, n in runs for b, k in ([(block, n)] if block == NO_BLOCK else [(block, 1)] * n)]


def _kind(condition: int, holders: int) -> str:
    kind = _KINDS[Condition(condition)]
    return "shared" if kind == "active" and holders > 1 else kind


def _block(seen: Inspection, block: int) -> _Stretches:
    """A block's stretches: its written part in full colour, the rest faint."""
    if seen.condition[block] == Condition.UNUSED:
        return []
    kind = _kind(seen.condition[block], seen.refcount[block])
    if kind in ("empty", "host empty"):
        return [(0.0, 1.0, kind, 1.0)]
    share = float(seen.written[block]) / seen.tokens.shape[1]
    mark = [(0.0, 0.15, "moving", 1.0)] if seen.moving[block] else []
    return [(0.0, 1.0, kind, _UNWRITTEN), (0.0, share, kind, 1.0), *mark]


def _shares(seen: Inspection, run: slice) -> _Stretches:
    """The stretches of a run of blocks: a stretch for each condition."""
    counts = dict.fromkeys(("shared", *_KINDS.values()), 0)
    for condition, holders in zip(seen.condition[run], seen.refcount[run], strict=True):
        if condition != Condition.UNUSED:
            counts[_kind(condition, holders)] += 1
    length = len(seen.condition[run])
    start = 0.0
    stretches = []
    for kind, count in counts.items():
        stretches.append((start, start + count / length, kind, 1.0))
        start += count / length
    return stretches
