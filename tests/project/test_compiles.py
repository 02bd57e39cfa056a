# SPDX-License-Identifier: Apache-2.0
"""The report of `tests/compiles.py` at the end of a run, its budget, and the cache of programs for the next run."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.compiles import forget_old_programs
from tests.drive import ROOT, TIMEOUT, output_of

CONFTEST = """
import jax
from tests.compiles import Compiles
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
pytest_configure = lambda config: config.pluginmanager.register(Compiles(max_loops=3))
"""
TEST = """
import jax

def test():
    for number in range({count}):
        jax.jit(lambda x: x * number + {count})(3.0)

    def serve(x):
        return x - {count}

    jax.jit(serve)(3.0)
"""


@pytest.mark.slow
def test_the_programs_of_all_processes_are_reported_without_those_from_the_cache(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for count in (2, 3):
        (tmp_path / f"test_{count}.py").write_text(TEST.format(count=count))
    run, programs = (
        (sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", str(tmp_path)),
        str(tmp_path / "programs"),
    )

    def reported(processes):
        report = output_of(*run, "-n", processes, JAX_COMPILATION_CACHE_DIR=programs)
        return sorted(re.findall(r"s in (\d) compiles \(1 of serve\)  (\S+)", report)), report

    found, report = reported("2")
    assert found == [("3", "test_2.py"), ("4", "test_3.py")] and "2 serve programs; CI may compile 3" in report
    assert reported("0")[0] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "mark", "status", "report"),
    [
        ("true", "slow", 1, "serve programs: got 4, wanted at most 3"),
        ("", "slow", 0, "4 serve"),
        ("true", "long", 0, "0 serve"),
    ],
)
def test_a_run_of_ci_that_compiles_more_loops_than_its_budget_fails(ci, mark, status, report, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for count in range(4):
        marked = f"import pytest\npytestmark = pytest.mark.{mark}\n{TEST.format(count=count)}"
        (tmp_path / f"test_{count}.py").write_text(marked)
    run = sys.executable, "-m", "pytest", "-q", "-n", "2", f"--rootdir={tmp_path}", str(tmp_path)
    env = {**os.environ, "CI": ci, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    done = subprocess.run(run, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == status and report in done.stdout


def test_programs_are_cached_for_as_long_as_somebody_reads_them(tmp_path):
    now = time.time()
    for name, read, written in (("read", 13, 90), ("forgotten", 15, 15)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - read * 86_400, now - written * 86_400))
    forget_old_programs(tmp_path)
    forget_old_programs(tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["read"]
