# SPDX-License-Identifier: Apache-2.0
"""A report of the files that compile longest, over all processes of a run; and the cache of programs on disk."""

import collections
import pathlib
import threading
import time

import jax
import pytest

# jax also records the first event where a program comes from the cache on disk. The second one then precedes it.
COMPILED = "/jax/core/compile/backend_compile_duration"
RETRIEVED = "/jax/compilation_cache/cache_retrieval_time_sec"
MOST = 10  # files that are reported


def forget_old_programs(folder: pathlib.Path, days: float = 14) -> None:
    """Deletes programs that no run has read for so long. A file system may note a reading only once a day."""
    for path in folder.glob("*"):
        if time.time() - path.stat().st_atime > days * 86_400:
            path.unlink(missing_ok=True)


class ProgramLimit:
    """A plugin of pytest that forgets compiled programs before a process has too many memory maps (65,530 on Linux).

    Each program takes some. A process without room for another one dies by a segmentation fault. To count the maps
    takes 0.1 s, so it is done once in a while; no test adds more than 25,000.
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
    """A plugin of pytest that counts what its process compiles. Processes that a test starts are not counted.

    Attributes:
      file: of the test that runs.
      seconds: the time of each compile, by file.
    """

    def __init__(self):
        self.file = "(imported)"
        self.seconds = collections.defaultdict(list)
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event, seconds, **_):
        if event == COMPILED and not getattr(self._thread, "retrieved", False):
            self.seconds[self.file].append(seconds)
        if event in (COMPILED, RETRIEVED):
            self._thread.retrieved = event == RETRIEVED

    def pytest_runtest_logstart(self, nodeid):
        self.file = nodeid.split("::")[0]

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist, which reports to the one that began it
            session.config.workeroutput["compiles"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        for file, seconds in getattr(node, "workeroutput", {}).get("compiles", {}).items():
            self.seconds[file] += seconds

    def pytest_terminal_summary(self, terminalreporter):
        costliest = sorted(self.seconds.items(), key=lambda item: -sum(item[1]))[:MOST]
        if costliest:
            terminalreporter.section(f"{MOST} files that compiled longest")
        for file, seconds in costliest:
            terminalreporter.write_line(f"{sum(seconds):.2f}s in {len(seconds)} compiles  {file}")
