# SPDX-License-Identifier: Apache-2.0
"""Drawings: hit rates by size, and which blocks they come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvjax.research.curves import reuse_distances
from kvjax.research.figures import hits_by_age, hits_by_depth, reuse_times
from kvjax.research.rules import Hits, Rule
from kvjax.research.splits import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#45308c", "#e8a53a", "#2f8f83", "#c2417f", "#4f8fcf", "#7a9a2d", "#d62728", "#7d848e")
_INK, _FAINT, _PALE = "#2b2f36", "#7d848e", "#dfe3ea"


def plot_rates(
    curves: Mapping[str, Hits],
    path: str | os.PathLike[str] | None = None,
    *,
    bound: Hits | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the share of blocks found by the size of the cache.

    Args:
      curves: hits by the name of their policy, under one rule.
      path: where to save the picture; None: nowhere.
      bound: of `belady`, drawn dashed.
      ax: axes to draw on; None: those of a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for no curves, or curves under several rules.
    """
    title = _told(curves)
    if ax is None:
        ax = _figure("plot_rates", (8, 4.6)).subplots()
    for number, (name, hits) in enumerate(curves.items()):
        _draw(ax, hits, name, color=_COLOURS[number % len(_COLOURS)], marker="o")
    if bound is not None:
        _draw(ax, bound, f'Belady, rule "{bound.rule}": an upper bound', color=_INK, linestyle="--")
    _log_scale(ax)
    _finish(ax, "blocks of the cache", "blocks found of blocks asked for")
    ax.set_title(title, loc="left", color=_FAINT, fontsize=10)
    ax.legend(frameon=False, labelcolor=_INK)
    if path is not None:
        ax.figure.savefig(path, dpi=150)  # pyright: ignore[reportAttributeAccessIssue]
    return ax


def plot_reuse(
    curves: Mapping[str, Hits], path: str | os.PathLike[str] | None = None, *, figure: Figure | None = None
) -> Figure:
    """Draws which blocks come again: at what reuse distance, how deep in their prompt, and after what time.

    Beside what is asked for stands what each cache finds, so that one sees which hits a small one loses.

    Args:
      curves: hits of one trace by the name of their policy, under one rule; see `unbounded` for all there are.
      path: where to save the picture; None: nowhere.
      figure: where to draw; None: a new figure.

    Returns:
      The figure, of three axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for no hits, or hits under several rules.
    """
    rule = _one_rule(curves)
    some = next(iter(curves.values()))
    figure = _figure("plot_reuse", (12, 4)) if figure is None else figure
    distance, depth, age = figure.subplots(1, 3)
    needed = np.geomspace(1, some.trace.num_ids + 1, 41)
    distance.stairs(np.histogram(reuse_distances(some.trace, rule), needed)[0], needed, fill=True, color=_PALE)
    _log_scale(distance)
    _against(depth, np.arange(1, int(some.trace.lengths.max(initial=0)) + 2), curves, hits_by_depth)
    _log_scale(depth)
    oldest = max(2.0, float(np.max(reuse_times(some.trace), initial=0)) / 1000 + 1)
    seconds = np.append(0, np.geomspace(1, oldest, 31))
    _against(age, seconds, curves, lambda hits: hits_by_age(hits, seconds * 1000))
    age.set_xscale("symlog", linthresh=1)
    _finish(distance, "blocks that LRU needs to find it", "blocks that come again")
    _finish(depth, "place in its prompt", "blocks")
    _finish(age, "seconds since its last use", "blocks")
    age.legend(frameon=False, labelcolor=_INK)
    figure.suptitle(_told(curves), x=0.01, ha="left", color=_FAINT, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def plot_gains(found: Comparison, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws what a learned policy finds more than LRU by the size of the cache, with its 95 % interval, for each part.

    Args:
      found: of `compare_learned`.
      path: where to save the picture; None: nowhere.

    Returns:
      The figure, of as many axes as there are parts.

    Raises:
      ImportError: without matplotlib.
    """
    figure = _figure("plot_gains", (4 * len(found.parts), 3.6))
    order = np.argsort(found.sizes)
    sizes = found.sizes[order]
    axes = figure.subplots(1, len(found.parts), sharey=True, squeeze=False)[0]
    for ax, (first, last), learned_from, gain, low, high in zip(
        axes, found.parts, found.learned_from, found.gain, found.low, found.high, strict=True
    ):
        ax.axhline(0, color=_FAINT, linewidth=0.8)
        ax.fill_between(sizes, 100 * low[order], 100 * high[order], color=_PALE)
        ax.plot(sizes, 100 * gain[order], color=_COLOURS[0], marker="o", markersize=3.5, linewidth=1.6)
        _log_scale(ax)
        _label(ax, "blocks of the cache", "% more blocks found than by LRU" if ax is axes[0] else "")
        told = f"learned from {learned_from:,}, counted in {first:,} to {last - 1:,}"
        ax.set_title(told, loc="left", color=_FAINT, fontsize=10)
    figure.suptitle(f'Rule "{found.rule}"; requests follow one another', x=0.01, ha="left", color=_FAINT, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _against(
    ax: Axes, edges: np.ndarray, curves: Mapping[str, Hits], counted: Callable[[Hits], tuple[np.ndarray, np.ndarray]]
) -> None:
    """Draws what is asked for, filled, and what each cache finds of it, as a line."""
    counts = {name: counted(hits) for name, hits in curves.items()}
    ax.stairs(next(iter(counts.values()))[1], edges, fill=True, color=_PALE, label="asked for")
    lines = [(name, *line) for name in curves for line in zip(curves[name].sizes, counts[name][0], strict=True)]
    for number, (name, size, found) in enumerate(lines):
        ax.stairs(found, edges, color=_COLOURS[number % len(_COLOURS)], label=f"{name}, {size:,} blocks")


def _one_rule(curves: Mapping[str, Hits]) -> Rule:
    rules: set[Rule] = {hits.rule for hits in curves.values()}
    if len(rules) != 1:
        raise ValueError(f"curves: got {len(rules)} rules, wanted one or more curves under one rule")
    return rules.pop()


def _told(curves: Mapping[str, Hits]) -> str:
    """What a picture's figures are worth."""
    overlap = any(hits.unserved is not None for hits in curves.values())
    return f'Rule "{_one_rule(curves)}"; requests {"run at the same time" if overlap else "follow one another"}'


def _figure(name: str, size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'{name} needs matplotlib: pip install "kvjax[plot]"') from error
    return Figure(figsize=size, layout="constrained", facecolor="white")


def _finish(ax: Axes, x: str, y: str) -> None:
    ax.set_ylim(bottom=0)
    _label(ax, x, y)


def _label(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, color=_INK)
    ax.set_ylabel(y, color=_INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(colors=_FAINT)


def _log_scale(ax: Axes) -> None:
    from matplotlib import ticker

    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    ax.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())


def _draw(ax: Axes, hits: Hits, label: str, **style: str) -> None:
    order = np.argsort(hits.sizes)
    ax.plot(hits.sizes[order], hits.rate[order], label=label, linewidth=1.6, markersize=3.5, **style)  # pyright: ignore
