# SPDX-License-Identifier: Apache-2.0
"""The style of pictures: numbers at ticks, and their positions."""

import itertools

import pytest

from kvjax._pictures import as_number, finish, legend_below, new_figure, picture, round_ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-1e-17, "0"),
        (0.05, "0.05"),
        (0.1 + 0.2, "0.3"),
        (1720, "1,720"),
        (1e6, "1,000,000"),
        (-8, "\N{MINUS SIGN}8"),
    ],
)
def test_a_number_has_one_form(value, text):
    assert as_number(value) == text


@picture
def axes_of(scale, *marked, **scaled):
    ax = new_figure(3, 2).subplots()
    ax.set_xscale(scale, **scaled)
    ax.plot([marked[0], 100_000], [0, 0.5], label="a line")
    round_ticks(ax, *marked)
    finish(ax, "x", "y", percent=True)
    return ax


@pytest.mark.parametrize(("scale", "marked", "scaled"), [
    ("log", (1720, 100_000), {}), ("log", (9, 100_000), {}), ("symlog", (0, 100_000), {"linthresh": 1}),
])  # fmt: skip
def test_the_least_and_the_largest_have_their_numbers_and_none_overlap(scale, marked, scaled):
    ax = axes_of(scale, *marked, **scaled)
    legend_below(ax.figure)
    ax.figure.draw_without_rendering()
    low, high = ax.get_xlim()
    shown = [label for label in ax.get_xticklabels() if low <= label.get_position()[0] <= high]
    assert {as_number(value) for value in marked} < {label.get_text() for label in shown}
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
    assert len(boxes) > 2 and all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_shares_are_percents_and_the_legend_is_off_the_data():
    ax = axes_of("log", 10, 100_000)
    legend_below(ax.figure)
    ax.figure.draw_without_rendering()
    assert ax.yaxis.get_major_formatter()(0.05) == "5"
    [legend] = ax.figure.legends
    assert not legend.get_window_extent().overlaps(ax.get_window_extent()) and ax.get_legend() is None
