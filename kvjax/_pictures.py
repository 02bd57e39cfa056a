# SPDX-License-Identifier: Apache-2.0
"""The style of every picture: colours, numbers, axes and legends. matplotlib is imported only to draw."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#4f8fcf"
VIOLET = "#45308c"
AMBER = "#e8a53a"
TEAL = "#2f8f83"
PINK = "#c2417f"
OLIVE = "#7a9a2d"
RED = "#d62728"
GREEN = "#9ccf8f"
INK = "#2b2f36"
FAINT = "#7d848e"
PALE = "#dfe3ea"
LINES = (VIOLET, AMBER, TEAL, PINK, BLUE, OLIVE, RED, FAINT)
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "figure.facecolor": "white",
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "savefig.dpi": 150,
}


def picture[**P, R](draw: Callable[P, R]) -> Callable[P, R]:
    """Makes a function draw in this style, and name the extra to install if matplotlib is missing."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            import matplotlib.figure
        except ImportError as error:
            raise ImportError(f'{draw.__name__} needs matplotlib: pip install "kvjax[plot]"') from error
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


def new_figure(width: float, height: float) -> Figure:
    """Makes an empty figure. `width` and `height` are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Returns the figure, after saving it if there is a path, whose suffix chooses the format."""
    if path is not None:
        figure.savefig(path)
    return figure


def finish(ax: Axes, x: str = "", y: str = "", *, percent: bool = False) -> None:
    """Labels the axes and formats the numbers at their ticks. `percent` shows shares on the y axis as percents."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if ax.get_xscale() == "linear":
        ax.xaxis.set_major_formatter(as_number)
    ax.yaxis.set_major_formatter(lambda value, _: as_number(100 * value if percent else value))


def as_number(value: float, _: object = None) -> str:
    """Formats a number at a tick, such as 10,000 or 0.05."""
    return f"{round(value, 6) + 0.0:,.6f}".rstrip("0").rstrip(".").replace("-", "\N{MINUS SIGN}")


def round_ticks(ax: Axes, *marked: float) -> None:
    """Labels a logarithmic x axis with the marked numbers, and with round numbers where there is space."""
    from matplotlib.ticker import NullFormatter

    low, high = ax.get_xlim()
    ticks = [*marked]
    inches = lambda value: ax.transData.transform((value, 0))[0] / ax.figure.dpi  # noqa: E731
    wide = lambda value: 0.04 * len(as_number(value)) + 0.05  # half a number and its margin, in inches  # noqa: E731
    decades = range(math.floor(math.log10(max(low, 1e-6))), math.ceil(math.log10(high)) + 1)
    for value in (first * 10.0**decade for first in (1, 5, 2) for decade in decades):
        free = all(abs(inches(value) - inches(tick)) > wide(value) + wide(tick) for tick in ticks)
        if low <= value <= high and free:
            ticks.append(value)
    ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter(as_number)
    ax.xaxis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure) -> None:
    """Draws one legend for all axes of a figure, below them."""
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    named = {label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = max(2, int(figure.bbox.width / figure.dpi / 1.6))
    figure.legend([*named.values()], [*named], loc="outside lower left", ncols=columns)
