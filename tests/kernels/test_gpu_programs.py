# SPDX-License-Identifier: Apache-2.0
"""Counts of a GPU's work around the kernels, compared with tests/data/gpu_step_budgets.json from both sides.

A count over its budget is a loss. A budget far over its count would let a gain be lost again.
"""

import functools
import json

import pytest

from tests.kernels import gpu_programs
from tests.kernels.gpu_programs import BUDGETS, HELD, PROGRAMS, Budgets
from tests.kernels.toolchain import needs_toolchain, results_of

pytestmark = pytest.mark.long
# CI runs a layer of kernels and the loop of the scheduler, with its block of steps; a night runs the others.
QUICK = ("layer", "scheduled")
ALL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PROGRAMS]
BUFFERED = {name for name, (_, buffers, _) in PROGRAMS.items() if buffers} - {"loop_sharded"}


@functools.cache
def measured(*names):
    return dict(zip(names, results_of("tests.kernels.gpu_programs", "--json", *names), strict=True))


def parts_of(name):
    """The counts of a program. The default ones share a process."""
    return measured(*(QUICK if name in QUICK else (name,)))[name]


@needs_toolchain
@pytest.mark.parametrize("name", ALL)
def test_programs_stay_within_their_budgets_which_stay_close(name):
    """The kernels of the model are distinguished from those of the loop. With command buffers a whole loop is one."""
    parts, budgets = parts_of(name), Budgets()
    faults = [fault for part, counts in parts.items() for fault in budgets.faults(f"{name} {part}", counts)]
    assert not faults, "\n".join(faults)
    if name in BUFFERED:
        assert sum(counts.get("command_buffers", 0) for counts in parts.values()) == 1
        assert not any(counts["stops"] for counts in parts.values())
    if name.startswith(("extend", "block")):
        assert not any(counts.get("large_copies") for counts in parts.values())
    if name.startswith("extend"):
        assert set(parts) == {"all"}
    elif name.startswith("step"):
        assert set(parts) == {"all", "middle"} and 10 < 3 * parts["middle"]["kernels"] < parts["all"]["kernels"]
    elif name == "layer":
        assert set(parts) == {"model", "around"} and parts["model"]["kernels"] > 10
    elif name == "scheduled":
        assert set(parts) == {"start", "block", "step", "mixed", "seldom"}
        assert parts["step"]["kernels"] < parts["mixed"]["kernels"] < parts["block"]["kernels"]
    else:
        assert set(parts) == {"model", "start", "block", "step"}
        kernels = parts["model"]["kernels"]
        assert kernels == 1 if name.startswith("block") else kernels > 10


@needs_toolchain
@pytest.mark.slow
def test_a_loop_of_steps_whose_length_is_fixed_does_not_stop():
    assert parts_of("loop_fixed")["step"]["stops"] == 0
    assert parts_of("loop_unbuffered")["step"]["stops"] == 1


@needs_toolchain
def test_a_pass_with_a_drafter_has_few_more_kernels_than_a_step():
    """A plain step with `ngram` looks up its drafts too. A pass that verifies drafts has a ragged view in addition."""
    plain, drafted = parts_of("scheduled")["step"], parts_of("drafted")
    assert 0 < drafted["narrow"]["kernels"] - plain["kernels"] <= 12
    assert 0 < drafted["wide"]["kernels"] - plain["kernels"] <= 16
    assert not drafted["narrow"]["stops"] and not drafted["wide"]["stops"]


def write(tmp_path, budgets, **more):
    file = tmp_path / "budgets.json"
    file.write_text(json.dumps({"rare": [], "bars": {}, "budgets": budgets, **more}))
    return file


@needs_toolchain
@pytest.mark.slow
@pytest.mark.parametrize(("plain", "backed"), [("loop_host", "loop_backups"), ("scheduled", "scheduled_tiers")])
def test_a_loop_with_backups_or_with_moves_has_few_more_kernels_and_never_stops(plain, backed):
    counts = parts_of(backed)
    assert counts["block"]["kernels"] - parts_of(plain)["block"]["kernels"] <= 10
    assert not any(part["stops"] for part in counts.values())


def numbers(stops=0, kernels=0, copies=0, launches=0):
    return dict(zip(HELD, (stops, kernels, copies, launches), strict=True))


def test_a_count_over_its_budget_and_a_loose_budget_are_faults(tmp_path):
    file = write(tmp_path, {"1.2.0": {"loop step": numbers(1, 100, 3, 103)}})
    budgets = Budgets(file, "1.2.0")
    assert budgets.faults("loop step", numbers(1, 100, 3, 103)) == []
    assert budgets.faults("loop step", numbers(1, 91, 1, 94)) == []
    assert budgets.faults("loop step", numbers(2, 101, 0, 103)) == [
        "loop step: 2 stops, the budget is 1",
        "loop step: 101 kernels, the budget is 100",
        "loop step: 0 copies, the budget of 3 is too loose",
    ]
    assert budgets.faults("loop step", numbers(1, 90, 3, 93)) == [
        "loop step: 90 kernels, the budget of 100 is too loose",
        "loop step: 93 launches, the budget of 103 is too loose",
    ]
    assert budgets.faults("loop block", {"kernels": 3})[1] == "loop block: 3 kernels, and no budget"


def test_another_jaxlib_is_held_to_the_budgets_of_the_latest_before_it_less_strictly(tmp_path):
    file = write(tmp_path, {"1.10.0": {"a": numbers(kernels=20)}, "1.9.0": {"a": numbers(kernels=50)}})
    for jaxlib, wanted in [("1.9.0", "1.9.0"), ("1.9.7", "1.9.0"), ("1.10.1", "1.10.0"), ("1.8.0", "1.9.0")]:
        budgets = Budgets(file, jaxlib)
        assert (budgets.jaxlib, budgets.exact) == (wanted, jaxlib == wanted)
    later = Budgets(file, "2.0.0")
    assert later.faults("a", numbers(2, 22)) == later.faults("a", numbers(kernels=3)) == []
    assert later.faults("a", numbers(3, 23)) == ["a: 3 stops, the budget is 0", "a: 23 kernels, the budget is 20"]


def test_an_update_keeps_what_was_not_measured_and_a_line_for_each_part(tmp_path):
    bars = {"layer around": {"kernels": {"bar": 9}}}
    old = {"layer around": numbers(kernels=8), "block_1 step": numbers(1), "gone step": numbers(1)}
    file = write(tmp_path, {"1.0": {"layer model": numbers(7)}, "2.0": old}, bars=bars)
    Budgets(file, "2.0").update({"layer around": {"kernels": 5, "rare": 2}, "block_1 block": numbers(2)})
    assert json.loads(file.read_text()) == {
        "rare": [], "bars": bars,
        "budgets": {
            "1.0": {"layer model": numbers(7)},
            "2.0": {"block_1 block": numbers(2), "block_1 step": numbers(1), "layer around": numbers(kernels=5)},
        },
    }  # fmt: skip
    assert '\n      "layer around": {"stops": 0, "kernels": 5, "copies": 0, "launches": 0}\n' in file.read_text()


def test_every_part_has_budgets_and_what_has_a_bar_is_a_part():
    read = json.loads(BUDGETS.read_text())
    first, *others = (set(parts) for parts in read["budgets"].values())
    assert others and all(parts == first for parts in others), "the budgets of some jaxlib lack a part"
    assert first >= set(read["bars"]) and {part.split()[0] for part in first} == set(PROGRAMS)
    assert all(list(budget) == list(HELD) for parts in read["budgets"].values() for budget in parts.values())


def test_no_budget_is_over_its_bar():
    read = json.loads(BUDGETS.read_text())
    for jaxlib, parts in read["budgets"].items():
        for part, bars in read["bars"].items():
            over = {what: parts[part][what] for what, bar in bars.items() if parts[part][what] > bar["bar"]}
            assert not over, f"{jaxlib} {part}: {over}, wanted at most {bars}"


def test_the_table_shows_counts_with_their_budgets_and_bars(tmp_path):
    bars = {"layer around": {"kernels": {"bar": 9, "aim": 4}}}
    budgets = Budgets(write(tmp_path, {"1.0": {"layer around": numbers(1, 12)}}, bars=bars), "1.0")
    line = gpu_programs.line("layer around", {"stops": 1, "kernels": 11, "whiles": 3}, budgets)
    assert " ".join(line.split()) == "layer around 1 of 1 11 of 12 0 of 0 0 of 0 3 0 0 0 kernels bar 9, kernels aim 4"
