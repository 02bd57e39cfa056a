# SPDX-License-Identifier: Apache-2.0
"""Plots of a file of events."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax._pictures import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    PALE,
    PINK,
    finish,
    legend_below,
    new_figure,
    picture,
    round_ticks,
)
from kvjax.interop.log.report import NO_HITS, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REUSED, _COMPUTED, _DEVICE, _HOST, _AGAIN = BLUE, PALE, AMBER, GREEN, PINK
_BARS = 40


@picture
def plot(report: Report, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a report: reuse and blocks over time, lifetimes, and times until blocks were stored again.

    Args:
      report: from `report`.
      path: where to save the picture, if anywhere; the suffix chooses the format.

    Returns:
      The figure.

    Raises:
      ImportError: without matplotlib.
    """
    figure = new_figure(11, 7)
    (reuse, blocks), (lives, again) = figure.subplots(2, 2)
    end = max(report.times, default=0.0) or 1.0
    _draw_reuse(reuse, report, end)
    _draw_blocks(blocks, report, end)
    _draw_lengths(lives, report, report.lifetimes, "Lifetimes of blocks, from stored to removed", _DEVICE)
    _draw_lengths(again, report, report.again, "Stored again after it was evicted: the time between", _AGAIN)
    for ax in (reuse, blocks, lives, again):
        ax.yaxis.get_major_locator().set_params(integer=True)
    legend_below(figure)
    figure.suptitle(NO_HITS, x=0.01, ha="left", fontsize=9, color=FAINT)
    if path is not None:
        figure.savefig(path)
    return figure


def _draw_reuse(ax: Axes, report: Report, end: float) -> None:
    """Tokens looked up in each of some spans, those reused among them, and the share so far."""
    share = report.share
    ax.set_title("Prompt tokens" if share is None else f"Prompt tokens: {share:.1%} reused")
    if share is None:
        return _nothing(ax, "the file does not have what was looked up")
    edges = np.linspace(0, end, _BARS + 1)
    looked_up = np.array([report.queried, report.cached], float)  # large ones would wrap as integers
    queried, cached = (np.histogram(report.times, edges, weights=w)[0] for w in looked_up)
    width = edges[1] - edges[0]
    ax.bar(edges[:-1], cached, width, align="edge", color=_REUSED, label="reused")
    ax.bar(edges[:-1], queried - cached, width, bottom=cached, align="edge", color=_COMPUTED, label="computed")
    ax.set_xlim(0, end)
    finish(ax, _unit(report), "tokens")
    share_ax = ax.twinx()
    total, reused = np.cumsum(looked_up, axis=1)
    some = total > 0
    so_far = reused[some] / total[some]
    share_ax.plot(np.array(report.times)[some], so_far, color=INK, linewidth=1.2, drawstyle="steps-post")
    share_ax.set_ylim(0, 1.02)
    finish(share_ax, "", "reused so far, %", percent=True)
    share_ax.spines["left"].set_visible(False)
    share_ax.spines["right"].set_visible(True)


def _draw_blocks(ax: Axes, report: Report, end: float) -> None:
    ax.set_title("Findable blocks")
    if not report.times:
        return _nothing(ax, "no events")
    levels = np.array(report.blocks).T
    labels = ["on the device", "on the host"] if levels[1].any() else []
    ax.stackplot(report.times, levels, colors=[_DEVICE, _HOST], labels=labels, step="post")
    ax.set_xlim(0, end)
    ax.set_ylim(bottom=0)
    finish(ax, _unit(report), "blocks")


def _draw_lengths(ax: Axes, report: Report, lengths: Sequence[float], title: str, colour: str) -> None:
    """A histogram of lengths of time, on a logarithmic axis."""
    ax.set_title(title)
    if not lengths:
        return _nothing(ax, "none")
    values = np.array(lengths)
    least = max(float(values[values > 0].min(initial=1.0)), float(values.max()) / 1e6, 1e-6)
    most = max(float(values.max()), 2 * least)
    ax.hist(np.clip(values, least, most), np.geomspace(least, most, 31).tolist(), color=colour)
    middle = float(np.median(values))
    ax.axvline(max(middle, least), color=INK, linewidth=1.0, linestyle="--")
    ax.set_xscale("log")
    round_ticks(ax)
    finish(ax, f"{_unit(report)}; median {report.duration(middle)} of {len(lengths):,}", "blocks")


def _unit(report: Report) -> str:
    return "seconds" if report.unit == "s" else "events"


def _nothing(ax: Axes, text: str) -> None:
    ax.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    ax.text(0.5, 0.5, text, ha="center", va="center", color=FAINT, transform=ax.transAxes)
