# SPDX-License-Identifier: Apache-2.0
"""A report of compilations in a run, over all its processes, a budget for CI, and the cache of programs on disk."""

import collections
import contextlib
import os
import pathlib
import threading
import time

import jax
import pytest

# jax also records the first event where a program comes from the cache on disk. The second one then precedes it.
COMPILED = "/jax/core/compile/backend_compile_duration"
RETRIEVED = "/jax/compilation_cache/cache_retrieval_time_sec"
MOST = 10  # files that are reported
# The functions whose programs have the loop of a scheduler, by far the longest to compile: that of a driver, and those
# that tests jit themselves.
LOOPS = {"_turn", "serve", "serve_step", "rollout", "what_if"}
# Such programs that the default tests may compile in a run of CI. Long tests are not counted, because a change decides
# which of them run. Lower the number when the count falls. Before it is raised: a test that takes the model, specs and
# options of `serving_kit.py` compiles none of its own. Two processes may compile a program at the same time.
MAX_LOOPS = 14


@contextlib.contextmanager
def no_compiles():
    """Requires the code inside to compile nothing."""
    compiled = []

    def note(event, *_, **__):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert COMPILED not in compiled


def forget_old_programs(folder: pathlib.Path, days: float = 14) -> None:
    """Deletes programs which no run has read for `days` days. A file system may note a reading only once a day."""
    for path in folder.glob("*"):
        if time.time() - path.stat().st_atime > days * 86_400:
            path.unlink(missing_ok=True)


class ProgramLimit:
    """A plugin of pytest which forgets compiled programs before a process has too many memory maps (65,530 on Linux).

    Each program takes some. A process without room for another program dies by a segmentation fault. Counting the maps
    takes 0.1 s, so the plugin counts them once in a while. No test adds more than 25,000.
    """

    MAPS, MAX_MAPS, PROGRAMS_PER_CHECK = pathlib.Path("/proc/self/maps"), 30_000, 10

    def __init__(self):
        self._num_programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event, seconds, **_):
        self._num_programs += event == COMPILED

    def pytest_runtest_teardown(self):
        if self._num_programs >= self.PROGRAMS_PER_CHECK:
            self._num_programs = 0
            if self.MAPS.exists() and self.MAPS.read_bytes().count(b"\n") > self.MAX_MAPS:
                jax.clear_caches()


class Compiles:
    """A plugin of pytest which counts the compilations of its process, without processes which a test starts.

    A run of CI fails if tests that are not long compile more than `max_loops` programs with the loop of a scheduler.

    Attributes:
      file: file of the running test.
      is_long: whether it is a long test.
      seconds: times of the compilations, by file.
      loops: the number of programs with a scheduler's loop, by file.
      num_loops: their number in all tests that are not long.
    """

    def __init__(self, max_loops=MAX_LOOPS):
        self.file, self.is_long, self.max_loops = "(imported)", False, max_loops
        self.seconds = collections.defaultdict(list)
        self.loops = collections.Counter()
        self.num_loops = 0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event, seconds, *, fun_name="", **_):
        if event == COMPILED and not getattr(self._thread, "retrieved", False):
            self.seconds[self.file].append(seconds)
            is_loop = fun_name.removeprefix("jit(").removesuffix(")") in LOOPS
            self.loops[self.file] += is_loop
            self.num_loops += is_loop and not self.is_long
        if event in (COMPILED, RETRIEVED):
            self._thread.retrieved = event == RETRIEVED

    @property
    def is_over(self):
        return bool(os.environ.get("CI")) and self.num_loops > self.max_loops

    @pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
    def pytest_runtest_setup(self, item):
        self.is_long = item.get_closest_marker("long") is not None

    def pytest_runtest_logstart(self, nodeid):
        self.file = nodeid.split("::")[0]

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist, which reports to the one that began it
            session.config.workeroutput["compiles"] = dict(self.seconds), dict(self.loops), self.num_loops
        elif self.is_over:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        seconds_of_files, loops, num_loops = getattr(node, "workeroutput", {}).get("compiles", ({}, {}, 0))
        self.loops.update(loops)
        self.num_loops += num_loops
        for file, seconds in seconds_of_files.items():
            self.seconds[file] += seconds

    def pytest_terminal_summary(self, terminalreporter):
        costliest = sorted(self.seconds.items(), key=lambda item: -sum(item[1]))[:MOST]
        if costliest:
            terminalreporter.section(f"{MOST} files that compiled longest")
        for file, seconds in costliest:
            loops = f" ({self.loops[file]} of serve)" if self.loops[file] else ""
            terminalreporter.write_line(f"{sum(seconds):.2f}s in {len(seconds)} compiles{loops}  {file}")
        if self.is_over:
            terminalreporter.write_line(f"serve programs: got {self.num_loops}, wanted at most {self.max_loops}")
        elif costliest:
            terminalreporter.write_line(f"{self.num_loops} serve programs; CI may compile {self.max_loops}")
