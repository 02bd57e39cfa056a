# SPDX-License-Identifier: Apache-2.0
"""What a file of events tells, drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax.interop.log.report import NO_HITS, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REUSED, _COMPUTED, _DEVICE, _HOST, _AGAIN = "#4f8fcf", "#c9ced6", "#e8a53a", "#9ccf8f", "#c2417f"
_INK, _FAINT = "#2b2f36", "#7d848e"
_BARS = 40


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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('kvjax.interop.log: plot needs matplotlib: pip install "kvjax[plot]"') from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    (reuse, blocks), (lives, again) = figure.subplots(2, 2)
    end = max(report.times, default=0.0) or 1.0
    _draw_reuse(reuse, report, end)
    _draw_blocks(blocks, report, end)
    _draw_lengths(lives, report, report.lifetimes, "Lifetimes of blocks, from stored to removed", _DEVICE)
    _draw_lengths(again, report, report.again, "Stored again after it was evicted: the time between", _AGAIN)
    for ax in (reuse, blocks, lives, again):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=_INK, labelsize=9)
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel(NO_HITS, fontsize=8, color=_FAINT)
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure


def _draw_reuse(ax: Axes, report: Report, end: float) -> None:
    """Tokens looked up in each of some spans, those reused among them, and the share so far."""
    share = report.share
    _title(ax, "Prompt tokens" if share is None else f"Prompt tokens: {share:.1%} reused")
    if share is None:
        return _nothing(ax, "the file does not tell what was looked up")
    edges = np.linspace(0, end, _BARS + 1)
    looked_up = np.array([report.queried, report.cached], float)  # large ones would wrap as integers
    queried, cached = (np.histogram(report.times, edges, weights=w)[0] for w in looked_up)
    width = edges[1] - edges[0]
    ax.bar(edges[:-1], cached, width, align="edge", color=_REUSED, label="reused")
    ax.bar(edges[:-1], queried - cached, width, bottom=cached, align="edge", color=_COMPUTED, label="computed")
    ax.set_xlim(0, end)
    ax.set_ylabel("tokens", color=_INK)
    ax.set_xlabel(_unit(report), color=_INK)
    line = ax.twinx()
    total, reused = np.cumsum(looked_up, axis=1)
    some = total > 0
    so_far = reused[some] / total[some]
    line.plot(np.array(report.times)[some], so_far, color=_INK, linewidth=1.2, drawstyle="steps-post")
    line.set_ylabel("share reused so far", color=_INK)
    line.tick_params(colors=_INK, labelsize=9)
    line.set_ylim(0, 1.02)
    line.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    line.spines[["top", "left"]].set_visible(False)
    _legend(ax)


def _draw_blocks(ax: Axes, report: Report, end: float) -> None:
    _title(ax, "Findable blocks")
    if not report.times:
        return _nothing(ax, "no events")
    levels = np.array(report.blocks).T
    ax.stackplot(report.times, levels, colors=[_DEVICE, _HOST], labels=["on the device", "on the host"], step="post")
    ax.set_xlim(0, end)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("blocks", color=_INK)
    ax.set_xlabel(_unit(report), color=_INK)
    if levels[1].any():
        _legend(ax)


def _draw_lengths(ax: Axes, report: Report, lengths: Sequence[float], title: str, colour: str) -> None:
    """How often which length of time occurred, on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    _title(ax, title)
    if not lengths:
        return _nothing(ax, "none")
    known = np.array(lengths)
    least = max(float(known[known > 0].min(initial=1.0)), float(known.max()) / 1e6, 1e-6)
    most = max(float(known.max()), 2 * least)
    ax.hist(np.clip(known, least, most), np.geomspace(least, most, 31).tolist(), color=colour)
    middle = float(np.median(known))
    ax.axvline(max(middle, least), color=_INK, linewidth=1.0, linestyle="--")
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < 1000 * least else (1,)))
    ax.xaxis.set_major_formatter(lambda length, _: f"{length:,g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("blocks", color=_INK)
    ax.set_xlabel(f"{_unit(report)}; median {report.duration(middle)} of {len(lengths):,}", color=_INK)


def _unit(report: Report) -> str:
    return "seconds" if report.unit == "s" else "events"


def _title(ax: Axes, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=11, color=_INK)


def _legend(ax: Axes) -> None:
    """A legend above the axes, at the right of the title."""
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=9, frameon=False, borderaxespad=0.2)


def _nothing(ax: Axes, text: str) -> None:
    ax.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    ax.text(0.5, 0.5, text, ha="center", va="center", color=_FAINT, transform=ax.transAxes)
