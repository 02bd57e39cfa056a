# SPDX-License-Identifier: Apache-2.0
"""The README and CONTRIBUTING are front doors: short, their code runs unchanged, figures come from commands."""

import re

import pytest

import kvjax
from tests.drive import ROOT

README = (ROOT / "README.md").read_text()
MODEL, POLICY = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def run(code, **names):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme", **names})


@pytest.mark.slow
def test_the_model_generates_and_a_second_prompt_hits(capsys):
    run(MODEL)
    assert "8 cached" in capsys.readouterr().out


@pytest.mark.long
def test_a_policy_is_a_line_and_no_policy_passes_the_bound(capsys):
    run(POLICY, kvjax=kvjax)
    own, lru, bound = (map(float, rates.split()) for rates in re.findall(r"\[(.+?)\]", capsys.readouterr().out))
    assert all(0 < lru <= bound and own <= bound for own, lru, bound in zip(own, lru, bound, strict=True))


def test_it_has_less_than_160_lines():
    assert len(README.splitlines()) < 160


def test_contributing_has_at_most_80_lines():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 80


def test_its_figures_name_the_commands_that_print_them():
    begin, end = (f"<!-- numbers: {edge} -->" for edge in ("begin", "end"))
    table = README.partition(begin)[2].partition(end)[0]
    commands = re.findall(r"`python -m benchmarks\.(\w+)[^`]*` \|$", table, re.M)
    assert len(commands) == 6 and all((ROOT / f"benchmarks/{name}.py").exists() for name in commands)
