# SPDX-License-Identifier: Apache-2.0
"""Hit rates by size, drawn: a curve for each policy, and above them what no policy can pass."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvjax.research.rules import Hits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#45308c", "#e8a53a", "#2f8f83", "#c2417f", "#4f8fcf", "#7a9a2d", "#d62728", "#7d848e")
_INK, _FAINT = "#2b2f36", "#7d848e"


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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plot_rates needs matplotlib: pip install "kvjax[plot]"') from error
    rules = {hits.rule for hits in curves.values()}
    if len(rules) != 1:
        raise ValueError(f"curves: got {len(rules)} rules, wanted one or more curves under one rule")
    if ax is None:
        ax = Figure(figsize=(8, 4.6), layout="constrained", facecolor="white").subplots()
    for number, (name, hits) in enumerate(curves.items()):
        _draw(ax, hits, name, color=_COLOURS[number % len(_COLOURS)], marker="o")
    if bound is not None:
        _draw(ax, bound, f'Belady, rule "{bound.rule}": an upper bound', color=_INK, linestyle="--")
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("blocks of the cache", color=_INK)
    ax.set_ylabel("blocks found of blocks asked for", color=_INK)
    ax.set_title(f'Rule "{rules.pop()}"; requests follow one another', loc="left", color=_FAINT, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(colors=_FAINT)
    ax.legend(frameon=False, labelcolor=_INK)
    if path is not None:
        ax.figure.savefig(path, dpi=150)  # pyright: ignore[reportAttributeAccessIssue]
    return ax


def _draw(ax: Axes, hits: Hits, label: str, **style: str) -> None:
    order = np.argsort(hits.sizes)
    ax.plot(hits.sizes[order], hits.rate[order], label=label, linewidth=1.6, markersize=3.5, **style)  # pyright: ignore
