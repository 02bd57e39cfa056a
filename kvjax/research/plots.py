# SPDX-License-Identifier: Apache-2.0
"""Plots of hit rates by size, of reused blocks, and of a log of events."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax._pictures import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    LINES,
    PALE,
    PINK,
    finish,
    legend_below,
    new_figure,
    picture,
    round_ticks,
    saved,
)
from kvjax.research.comparison import Comparison
from kvjax.research.figures import hits_by_age, hits_by_depth, reuse_times
from kvjax.research.log_report import NO_HITS, LogReport, duration
from kvjax.research.simulators.hits import Hits, Rule
from kvjax.research.simulators.lru_curve import reuse_distances

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_closed", "plot_log", "plot_rates", "plot_reuse"]

_MARKED = 40  # curves of up to this many sizes get markers
_BARS = 40  # spans of a log
_LOWEST = -50  # percent of the distance to the bound


@picture
def plot_rates(
    curves: Mapping[str, Hits],
    path: str | os.PathLike[str] | None = None,
    *,
    bound: Hits | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Draws the share of blocks found against the size of the cache. Lower axes show each curve minus LRU's.

    A curve of up to 40 sizes has markers. The lower axes need a curve named "lru", and show its sizes. Their scale is
    linear up to a percent of the blocks requested, then logarithmic.

    Args:
      curves: hits by the name of their policy, under the same rule.
      path: saves the picture to this file; None disables saving.
      bound: hits of `belady`, drawn dashed.
      figure: the figure to draw in; defaults to a new figure.

    Returns:
      The figure, with single axes, or with two if there are more curves than "lru".

    Raises:
      ImportError: without matplotlib.
      ValueError: for no curves, or curves under several rules.
    """
    caption = _caption(curves)
    styled = {name: (hits, {"color": colour}) for (name, hits), colour in zip(curves.items(), itertools.cycle(LINES))}
    if bound is not None:
        styled[f'Belady, rule "{bound.rule}": an upper bound'] = (bound, {"color": INK, "linestyle": "--"})
    two = "lru" in curves and len(styled) > 1
    figure = new_figure(8, 6.2 if two else 4.6) if figure is None else figure
    axes = figure.subplots(1 + two, sharex=True, squeeze=False, height_ratios=[3, 2] if two else None)[:, 0]
    axes[0].set_xscale("log")
    for below in axes[1:]:
        below.set_yscale("symlog", linthresh=0.01)
    for name, (hits, style) in styled.items():
        _draw(axes[0], hits.sizes, hits.rate, label=name, **style)
        if two:
            sizes, curve_index, lru_index = np.intersect1d(hits.sizes, curves["lru"].sizes, return_indices=True)
            _draw(axes[1], sizes, hits.rate[curve_index] - curves["lru"].rate[lru_index], **style)
    sizes = np.concatenate([hits.sizes for hits in curves.values()])
    round_ticks(axes[0], sizes.min(), sizes.max())
    axes[0].set_ylim(bottom=0)
    axes[0].set_title(caption, color=FAINT)
    finish(axes[0], y="blocks found, % of those requested", percent=True)
    if two:
        finish(axes[1], y="the same, less LRU's", percent=True)
    axes[-1].set_xlabel("blocks of the cache")
    legend_below(figure)
    return saved(figure, path)


@picture
def plot_reuse(
    curves: Mapping[str, Hits], path: str | os.PathLike[str] | None = None, *, figure: Figure | None = None
) -> Figure:
    """Draws reused blocks by reuse distance, by depth in their prompt, and by time since the last use.

    Filled areas are blocks requested. Lines are blocks found by each cache, so you see the hits that a small cache
    loses.

    Args:
      curves: hits of a trace by the name of their policy, under the same rule; `unbounded` has all possible hits.
      path: saves the picture to this file; None disables saving.
      figure: the figure to draw in; defaults to a new figure.

    Returns:
      The figure, with three axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for no hits, or hits under several rules.
    """
    rule = _one_rule(curves)
    trace = next(iter(curves.values())).trace
    figure = new_figure(12, 4) if figure is None else figure
    distance, depth, age = figure.subplots(1, 3)
    distance.set_xscale("log")
    depth.set_xscale("log")
    age.set_xscale("symlog", linthresh=1)
    needed = np.geomspace(1, trace.num_ids + 1, 41)
    distance.stairs(np.histogram(reuse_distances(trace, rule), needed)[0], needed, fill=True, color=PALE)
    _against(depth, np.arange(1, int(trace.lengths.max(initial=0)) + 2), curves, hits_by_depth)
    oldest = max(2.0, float(np.max(reuse_times(trace), initial=0)) / 1000 + 1)
    seconds = np.append(0, np.geomspace(1, oldest, 31))
    _against(age, seconds, curves, lambda hits: hits_by_age(hits, seconds * 1000))
    for ax in (distance, depth, age):
        ax.set_ylim(bottom=0)
        round_ticks(ax, 0 if ax is age else 1)
    finish(distance, "blocks that LRU needs to find it", "blocks that come again")
    finish(depth, "depth in its prompt", "blocks")
    finish(age, "seconds since its last use", "blocks")
    distance.set_title(_caption(curves), color=FAINT)
    legend_below(figure)
    return saved(figure, path)


@picture
def plot_closed(comparisons: Sequence[Comparison], path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws the closed share of the distance from LRU to Belady's bound, for each trace, policy and size.

    Bars below -50 % are cut off there.

    Args:
      comparisons: results of `compare`, one for each axes, with the same policies.
      path: saves the picture to this file; None disables saving.

    Returns:
      The figure, with axes for each trace.

    Raises:
      ImportError: without matplotlib.
      ValueError: without comparisons.
    """
    if not comparisons:
        raise ValueError("comparisons: got none, wanted at least one")
    figure = new_figure(max(2.4 * len(comparisons), 5), 3.6)
    axes = figure.subplots(1, len(comparisons), sharey=True, squeeze=False)[0]
    for ax, comparison in zip(axes, comparisons, strict=True):
        policies = list(comparison.low)
        position = np.arange(len(comparison.sizes))
        width = 0.8 / max(len(policies), 1)
        for index, policy in enumerate(policies):
            shift = width * (index - (len(policies) - 1) / 2)
            color = LINES[index % len(LINES)]
            ax.bar(position + shift, 100 * comparison.closed(policy), width, color=color, label=policy)
        ax.axhline(0, color=FAINT, linewidth=0.8)
        finish(ax, "blocks of the cache", "% closed of LRU to the bound" if ax is axes[0] else "")
        ax.set_xticks(position, [f"{size:,}" for size in comparison.sizes])
        ax.set_title(comparison.name.split(",")[0], color=FAINT)
    bottom, _ = axes[0].get_ylim()
    axes[0].set_ylim(bottom=max(bottom, _LOWEST))
    legend_below(figure)
    return saved(figure, path)


@picture
def plot_log(report: LogReport, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a report: reuse and blocks over time, lifetimes, and times until blocks were stored again.

    Args:
      report: a result of `log_report`.
      path: saves the picture to this file; None disables saving.

    Returns:
      The figure, with four axes, and a twin of the first axes for the share.

    Raises:
      ImportError: without matplotlib.
    """
    figure = new_figure(11, 7)
    (reuse, blocks), (lives, again) = figure.subplots(2, 2)
    if report.times:
        _draw_reuse(reuse, report)
        levels = np.array(report.blocks).T
        labels = ["on the device", "on the host"] if levels[1].any() else []
        blocks.stackplot(report.times, levels, colors=[AMBER, GREEN], labels=labels, step="post")
        blocks.set_ylim(bottom=0)
    blocks.set_title("Findable blocks")
    finish(blocks, "seconds", "blocks")
    _draw_lengths(lives, report.lifetimes, "Lifetimes of blocks, from stored to removed", AMBER)
    _draw_lengths(again, report.again, "Stored again after it was evicted: the time between", PINK)
    for ax in (reuse, blocks, lives, again):
        ax.yaxis.get_major_locator().set_params(integer=True)
    legend_below(figure)
    figure.suptitle(NO_HITS, x=0.01, ha="left", fontsize=9, color=FAINT)
    return saved(figure, path)


def _against(
    ax: Axes, edges: np.ndarray, curves: Mapping[str, Hits], counted: Callable[[Hits], tuple[np.ndarray, np.ndarray]]
) -> None:
    """Draws the blocks requested as a filled area, and the blocks found by each cache as a line."""
    counts = {name: counted(hits) for name, hits in curves.items()}
    ax.stairs(next(iter(counts.values()))[1], edges, fill=True, color=PALE, label="requested")
    lines = [(name, *line) for name in curves for line in zip(curves[name].sizes, counts[name][0], strict=True)]
    for index, (name, size, num_found) in enumerate(lines):
        ax.stairs(num_found, edges, color=LINES[index % len(LINES)], label=f"{name}, {size:,} blocks")


def _one_rule(curves: Mapping[str, Hits]) -> Rule:
    rules: set[Rule] = {hits.rule for hits in curves.values()}
    if len(rules) != 1:
        raise ValueError(f"curves: got {len(rules)} rules, wanted one or more curves under one rule")
    return rules.pop()


def _caption(curves: Mapping[str, Hits]) -> str:
    """The caption of a picture: the rule of its hits, and whether requests overlap."""
    overlap = any(hits.unserved is not None for hits in curves.values())
    return f'Rule "{_one_rule(curves)}"; requests {"run at the same time" if overlap else "follow one another"}'


def _draw(ax: Axes, sizes: np.ndarray, shares: np.ndarray, **style: str) -> None:
    order = np.argsort(sizes)
    ax.plot(sizes[order], shares[order], marker="o" if len(sizes) <= _MARKED else "", **style)  # pyright: ignore


def _draw_reuse(ax: Axes, report: LogReport) -> None:
    """Draws the looked-up and the reused tokens in each span of a log, and the reused share so far."""
    edges = np.linspace(0, report.times[-1] or 1.0, _BARS + 1)
    looked_up = np.array([report.queried, report.cached], float)  # large counts would wrap as integers
    queried, cached = (np.histogram(report.times, edges, weights=tokens)[0] for tokens in looked_up)
    ax.bar(edges[:-1], cached, edges[1], align="edge", color=BLUE, label="reused")
    ax.bar(edges[:-1], queried - cached, edges[1], bottom=cached, align="edge", color=PALE, label="computed")
    ax.set_title("Prompt tokens" if report.share is None else f"Prompt tokens: {report.share:.1%} reused")
    finish(ax, "seconds", "tokens")
    share_ax = ax.twinx()
    total, reused = np.cumsum(looked_up, axis=1)
    begun = total > 0
    share_ax.plot(
        np.array(report.times)[begun], reused[begun] / total[begun], color=INK, linewidth=1.2, drawstyle="steps-post"
    )
    share_ax.set_ylim(0, 1.02)
    share_ax.spines["left"].set_visible(False)
    share_ax.spines["right"].set_visible(True)
    finish(share_ax, "", "reused so far, %", percent=True)


def _draw_lengths(ax: Axes, lengths: Sequence[float], title: str, colour: str) -> None:
    """Draws a histogram of lengths of time, on a logarithmic axis."""
    ax.set_title(title if lengths else f"{title}: none")
    if not lengths:
        return
    values = np.array(lengths)
    shortest = max(float(values[values > 0].min(initial=1.0)), float(values.max()) / 1e6, 1e-6)
    longest = max(float(values.max()), 2 * shortest)
    ax.hist(np.clip(values, shortest, longest), np.geomspace(shortest, longest, 31).tolist(), color=colour)
    middle = float(np.median(values))
    ax.axvline(max(middle, shortest), color=INK, linewidth=1.0, linestyle="--")
    ax.set_xscale("log")
    round_ticks(ax)
    finish(ax, f"seconds; median {duration(middle)} of {len(lengths):,}", "blocks")
