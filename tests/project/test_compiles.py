# SPDX-License-Identifier: Apache-2.0
"""The report of `tests/compiles.py` at the end of a run, and the cache of programs for the next one."""

import os
import re
import sys
import time

import pytest

from tests.compiles import forget_old_programs
from tests.drive import output_of

CONFTEST = """
import jax
from tests.compiles import Compiles
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
pytest_configure = lambda config: config.pluginmanager.register(Compiles())
"""
TEST = """
import jax

def test():
    for number in range({count}):
        jax.jit(lambda x: x * number + {count})(3.0)
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
        return sorted(re.findall(r"s in (\d) compiles  (\S+)", report))

    assert reported("2") == [("2", "test_2.py"), ("3", "test_3.py")]
    assert reported("0") == []


def test_programs_are_cached_for_as_long_as_somebody_reads_them(tmp_path):
    now = time.time()
    for name, read, written in (("read", 13, 90), ("forgotten", 15, 15)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - read * 86_400, now - written * 86_400))
    forget_old_programs(tmp_path)
    forget_old_programs(tmp_path / "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["read"]
