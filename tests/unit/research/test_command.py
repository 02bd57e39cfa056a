# SPDX-License-Identifier: Apache-2.0
"""The command line: its figures are those of the functions, and bad input ends it with a message."""

import dataclasses
import json

import numpy as np
import pytest

from kvjax import by_score, policies
from kvjax.research import (
    __main__,
    belady,
    draw_trace,
    hits_by_depth,
    lru_curve,
    replay,
    reuse_distances,
    split_sessions,
    summary,
    write_mooncake,
)
from kvjax.research.__main__ import _POLICIES, main
from kvjax.research.plots import plot_closed, plot_rates, plot_reuse
from tests.unit.research.cases import comparison, cut

# A policy of a user's own, in one line.
LONGEST_FIRST = by_score(lambda blocks: -blocks.depth)
# It reads tokens, which a trace does not have: the id of a block is its token.
SMALLEST_FIRST = by_score(lambda blocks: blocks.tokens[:, 0])
SIZES = [240, 400]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_mooncake(cut(100), path)
    return path


def run(file, tmp_path, capsys, command, *options):
    """The output of a command, and the figures that it saves."""
    saved = tmp_path / "figures.json"
    main([command, str(file), "--json", str(saved), *options])
    return capsys.readouterr().out, json.loads(saved.read_text())


def test_a_summary_is_printed_and_saved(file, tmp_path, capsys):
    printed, saved = run(file, tmp_path, capsys, "summary", "--rule", "papers")
    wanted = summary(cut(100), "papers")
    assert printed == f"{wanted}\n" and saved["rate"] == wanted.rate and saved["held"] == wanted.held


def test_a_summary_draws_which_blocks_come_again(file, tmp_path, capsys):
    picture = tmp_path / "reuse.png"
    run(file, tmp_path, capsys, "summary", "--plot", str(picture), "--sizes", *map(str, SIZES))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    hits = lru_curve(cut(100), SIZES)
    distance, depth, age = plot_reuse({"lru": hits}).axes
    assert sum(distance.patches[0].get_data().values) == len(reuse_distances(cut(100), "full"))
    for ax, (found, requested) in ((depth, hits_by_depth(hits)), (age, (hits.blocks, hits.blocks[:0]))):
        filled, *lines = ax.patches
        assert [line.get_label() for line in lines] == ["lru, 240 blocks", "lru, 400 blocks"]
        assert [sum(line.get_data().values) for line in lines] == found.sum(axis=1).tolist()
        assert not len(requested) or filled.get_data().values.tolist() == requested.tolist()


@pytest.mark.parametrize("rule", ["full", "kvjax", "papers"])
def test_a_curve_is_lru_with_the_bound_above_it(rule, file, tmp_path, capsys):
    sizes = [str(size) for size in SIZES]
    printed, saved = run(file, tmp_path, capsys, "curve", "--rule", rule, "--sizes", *sizes)
    wanted = {"lru": lru_curve(cut(100), SIZES, rule), "bound": belady(cut(100), SIZES)}
    assert saved["rates"] == {name: hits.rate.tolist() for name, hits in wanted.items()}
    assert f'Rule "{rule}"' in printed and ("perhaps not reached" in printed) == (rule != "papers")
    assert all(f"{rate:.4f}" in printed for hits in wanted.values() for rate in hits.rate)


def test_without_sizes_they_go_from_the_longest_request_to_the_whole_trace(file, tmp_path, capsys):
    _, saved = run(file, tmp_path, capsys, "bound")
    longest = int(cut(100).lengths.max())
    assert saved["sizes"][0] == longest and saved["sizes"][-1] == cut(100).num_ids + longest
    assert saved["rule"] == "papers" and list(saved["rates"]) == ["Belady", "with bypass"]


@pytest.mark.slow
def test_a_policy_of_ones_own_runs_along_with_kvjaxs(file, tmp_path, capsys):
    own, picture = f"{__name__}:LONGEST_FIRST", tmp_path / "rates.png"
    reads = f"{__name__}:SMALLEST_FIRST"
    options = ["--policies", "lru", own, reads, "--plot", str(picture), "--sizes", *map(str, SIZES)]
    printed, saved = run(file, tmp_path, capsys, "sweep", *options)
    assert "bound" in saved["rates"] and "No bound" not in printed
    assert f"{own}: without the verbs" in printed and f"{reads}: through the verbs, since it reads tokens" in printed
    for name, policy in (("lru", policies.lru()), (own, LONGEST_FIRST), (reads, SMALLEST_FIRST)):
        assert saved["rates"][name] == replay(cut(100), policy, SIZES).rate.tolist()
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_requests_of_a_sweep_may_overlap(file, tmp_path, capsys, monkeypatch):
    """Tests of `replay` cover their hits."""

    def found(trace, policy, sizes, *, rule, overlap):
        assert (policy, overlap) == (policies.lru(), [10_000, 50])
        return dataclasses.replace(lru_curve(trace, sizes, rule), unserved=np.array([7, 0]))

    monkeypatch.setattr("kvjax.research.__main__.replay", found)
    options = ["--policies", "lru", "--sizes", *map(str, SIZES), "--overlap", "10000", "50"]
    printed, saved = run(file, tmp_path, capsys, "sweep", *options)
    assert saved["refused"] == [7, 0]
    assert "lru: through the verbs, in " in printed
    assert "run at the same time" in printed and "follow one another" not in printed


@pytest.mark.long
def test_a_sweep_tells_the_requests_that_a_small_cache_refuses(file, tmp_path, capsys):
    printed, saved = run(file, tmp_path, capsys, "sweep", "--policies", "lru", "--sizes", "100", "400")
    assert saved["refused"] == [int((cut(100).lengths > 100).sum()), 0] and saved["refused"][0] > 0
    assert "No bound: the longest request has" in printed and "bound" not in saved["rates"]


@pytest.mark.parametrize("half", [0, 1])
def test_a_comparison_counts_one_half_of_the_sessions(half, file, tmp_path, capsys, monkeypatch):
    calls = []

    def compare(trace, policies, **options):
        calls.append((trace.ids.tolist(), list(policies), options))
        return comparison(options["name"], gain=0.05)

    monkeypatch.setattr(__main__, "compare", compare)
    picture = tmp_path / "closed.png"
    figures = tmp_path / "figures.json"
    options = ["--policies", "lru", "t_lru", "--shares", "0.02", "0.3", *["--final"] * half]
    main(["compare", str(file), "drawn:0", *options, "--plot", str(picture), "--json", str(figures)])
    printed = capsys.readouterr().out
    saved = json.loads(figures.read_text())
    for (ids, names, given), trace in zip(calls, (cut(100), draw_trace(0)), strict=True):
        assert ids == split_sessions(trace)[half].ids.tolist() and names == ["t_lru"]
        assert given["shares"] == [0.02, 0.3] and given["rule"] == "full"
    name = f"trace, {('first', 'second')[half]} half"
    assert calls[0][2]["name"] == name and saved[0]["name"] == name
    assert ("no clean test" in printed) == bool(half) and picture.read_bytes()[:4] == b"\x89PNG"
    line = "       100  mine            25.00%   +5.00    +4.00 to +6.00     25%            5      100    1,500"
    assert line in printed.split("\n")


def test_the_closed_distance_is_drawn_for_each_trace():
    figure = plot_closed([comparison("a, first half", 0.05), comparison("b, first half", -0.02)])
    for ax, closed, name in zip(figure.axes, (25, -10), "ab", strict=True):
        assert [bar.get_height() for bar in ax.patches] == pytest.approx([closed] * 2)
        assert ax.get_title(loc="left") == name
    with pytest.raises(ValueError, match="comparisons: got none"):
        plot_closed([])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["sweep", "--policies", "nobody"], f"got 'nobody', wanted {', '.join(_POLICIES)}, or MODULE:NAME"),
        (["sweep", "--policies", f"{__name__}:SIZES"], "wanted an EvictionPolicy"),
        (["sweep", "--policies", "kvjax:nothing"], "kvjax:nothing is None"),
        (["sweep", "--rule", "papers", "--policies", f"{__name__}:SMALLEST_FIRST"], 'rule: got "papers"'),
        *(
            ([command, "--sizes", size], f"--sizes: got {got}")
            for command in ("curve", "bound", "sweep")
            for size, got in (
                ("-5", "[-5], wanted at least one number of blocks"),
                ("10000000000", "[10000000000], want"),
            )
        ),
        *(([command, "--sizes", "1"], "--sizes: got 1, wanted at least") for command in ("curve", "bound")),
        (["curve", "--sizes", "5.5"], "argument --sizes: invalid int value: '5.5'"),
        (["compare", "--shares", "0"], "shares: got [0.0], wanted shares of the distinct blocks"),
        (["compare", "drawn:-1"], "TRACE: got 'drawn:-1', wanted drawn:SEED"),
    ],
)
def test_bad_input_is_named(arguments, wanted, file, capsys):
    with pytest.raises(SystemExit) as ended:
        main([arguments[0], str(file), *arguments[1:]])
    assert ended.value.code == 2 and wanted in capsys.readouterr().err


def test_a_plot_has_a_curve_for_each_policy_and_one_rule(tmp_path):
    full, kvjax = (lru_curve(cut(100), SIZES, rule) for rule in ("full", "kvjax"))
    [rates] = plot_rates({"mine": full}, tmp_path / "plot.png").axes
    assert rates.lines[0].get_ydata().tolist() == full.rate.tolist()
    with pytest.raises(ValueError, match="got 2 rules"):
        plot_rates({"a": full, "b": kvjax})


def test_a_plot_compares_curves_with_lru_at_the_sizes_of_both():
    trace, bound = cut(100), belady(cut(100), [400])
    lru, own = lru_curve(trace, range(240, 500)), lru_curve(trace, SIZES, "full")
    own.blocks[:, 0] += 1
    figure = plot_rates({"lru": lru, "mine": own}, bound=bound)
    rates, gains = figure.axes
    assert [line.get_marker() for line in rates.lines] == ["", "o", "o"] and rates.get_xticks()[0] == 240
    wanted = [(lru.sizes, 0 * lru.rate), (SIZES, [1 / len(trace.ids)] * 2), ([400], bound.rate - lru.rate[160:161])]
    for line, (sizes, rate) in zip(gains.lines, wanted, strict=True):
        assert line.get_xdata().tolist() == list(sizes)
        assert line.get_ydata() == pytest.approx(rate)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["lru", "mine"]


def test_a_curve_is_plotted_at_every_size(file, tmp_path, capsys, monkeypatch):
    plotted = []
    monkeypatch.setattr(__main__, "plot_rates", lambda curves, path, **more: plotted.append(curves | more))
    _, saved = run(file, tmp_path, capsys, "curve", "--plot", "x.png", "--sizes", *map(str, SIZES))
    [(lru, bound)] = [curves.values() for curves in plotted]
    assert saved["sizes"] == SIZES and lru.sizes.tolist() == bound.sizes.tolist() == list(range(240, 401))
    assert lru.rate[[0, -1]].tolist() == saved["rates"]["lru"]


@pytest.mark.parametrize("command", [name for name in __main__._COMMANDS if name != "compare"])
def test_every_command_takes_a_random_trace(command, monkeypatch):
    calls = []
    monkeypatch.setitem(__main__._COMMANDS, command, ("", lambda trace, _: calls.append(trace)))
    main([command, "drawn:3"])
    assert calls[0].ids.tolist() == draw_trace(3).ids.tolist()
