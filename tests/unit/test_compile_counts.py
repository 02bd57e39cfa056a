# SPDX-License-Identifier: Apache-2.0
"""XLA's fusions do not grow unnoticed. `benchmarks.compile` says what the numbers mean."""

import jax
import pytest

from benchmarks import compile as compiled
from scripts import fusions

# The distinct fusions of each program, by default of the verbs. Lower a number when its count falls.
BUDGETS = {
    "serve": 760, "submit": 66, "lookup": 27, "admit": 120, "extend": 113, "commit": 106, "trim": 12, "release": 82,
    "fork": 8, "truncate": 63,
}  # fmt: skip


# Of `serve`, which takes long to compile; the oldest jax lowers the same program to some more.
SERVE_OPS = 10_750 if jax.version.__version_info__ >= (0, 12) else 11_250


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("admit", "extend") else pytest.mark.long) for name in BUDGETS]
)
def test_programs_stay_within_their_budgets_which_stay_close(name):
    lowered, program, _ = compiled.compile_program(compiled.programs()[name]())
    assert 0.97 * BUDGETS[name] <= compiled.count(lowered, program).distinct <= BUDGETS[name]


def test_the_operations_of_serve_stay_within_their_budget():
    function, args = compiled.programs()["serve"]()
    assert 0.97 * SERVE_OPS <= compiled.operations(jax.jit(function).lower(*args)) <= SERVE_OPS


def test_every_program_has_a_budget():
    assert compiled.programs().keys() == BUDGETS.keys()


def test_fusions_that_differ_in_names_alone_are_one():
    """Those that call another computation differ by its body."""
    text = """
%add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] add(%a, %b)
}

%max (a.1: s32[], b.1: s32[]) -> s32[] {
  %a.1 = s32[] parameter(0)
  %b.1 = s32[] parameter(1)
  ROOT %c.1 = s32[] maximum(%a.1, %b.1)
}

%one (p: s32[4]) -> s32[] {
  %p = s32[4]{0} parameter(0)
  ROOT %r = s32[] reduce(%p, %p), to_apply=%add, metadata={op_name="x" stack_frame_id=3}
}

%two (q: s32[4]) -> s32[] {
  %q = s32[4]{0} parameter(0)
  ROOT %s = s32[] reduce(%q, %q), to_apply=%add, backend_config={"outer":{"inner":["1"]}}
}

%three (q: s32[4]) -> s32[] {
  %q = s32[4]{0} parameter(0)
  ROOT %s = s32[] reduce(%q, %q), to_apply=%max
}

ENTRY %main (x: s32[4]) -> (s32[], s32[], s32[]) {
  %x = s32[4]{0} parameter(0)
  %f = s32[] fusion(%x), kind=kLoop, calls=%one
  %g = s32[] fusion(%x), kind=kLoop, calls=%two
  %h = s32[] fusion(%x), kind=kLoop, calls=%three
  ROOT %t = (s32[], s32[], s32[]) tuple(%f, %g, %h)
}
"""
    found = [body for _, body in compiled.bodies(text)]
    assert len(found) == 3 and found[0] == found[1] != found[2]


def test_fusions_are_listed_by_the_functions_that_they_come_from(capsys):
    _, program, _ = compiled.compile_program(compiled.programs()["fork"]())
    fusions.print_functions(program, 30)
    assert "distinct fusions" in (out := capsys.readouterr().out) and "  kvjax/verbs/fork.py fork" in out
