# SPDX-License-Identifier: Apache-2.0
"""A program in a process of its own, with the system's limits of time and memory: for the work on data of others."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any


class Stopped(Exception):
    """The end of the process, with the reason: the request was too much for its limits."""


class LimitedProcess:
    """A process of `program`, a file without imports of this package, for requests one after the other.

    It gets its limits as arguments, `seconds` of CPU time for a request and `most_bytes` of memory, and then lines of
    JSON: `first`, when it starts, and the requests. It answers each by a line of JSON; an error is the field `error`.
    It starts anew if a request has ended it.

    Attributes:
      process: the latest; None before the start.
    """

    def __init__(self, program: pathlib.Path, *arguments: str, seconds: float, most_bytes: int, first: dict[str, Any]):
        self._command = [sys.executable, "-P", str(program), str(seconds), str(most_bytes), *arguments]
        self._seconds, self._first, self._lock = seconds, json.dumps(first).encode() + b"\n", threading.Lock()
        self.process: Any = None

    def start(self) -> dict[str, Any]:
        """Starts it; returns its answer to `first`.

        Raises:
          Stopped: with the reason.
        """
        with self._lock:
            return self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; any thread may call it, and waits for the answers of the others.

        Raises:
          Stopped: with the reason.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self._start()
            return self._answer(line)

    def close(self) -> None:
        """Ends the process; it has no request, or has ended by itself."""
        if self.process is not None:
            self._end()

    def _start(self) -> dict[str, Any]:
        pipe = subprocess.PIPE
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each thread of numpy would take memory
        self.process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env)
        self._end = weakref.finalize(self, _end, self.process)
        return self._answer(self._first)

    def _answer(self, line: bytes) -> dict[str, Any]:
        process = self.process
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except KeyboardInterrupt:  # the answer would be taken for the next request's
            self._end()
            raise
        if not answer:
            process.wait()
            self._end()
            has_run_out = process.returncode == -signal.SIGPROF
            raise Stopped(f"it takes more than {self._seconds:g} s" if has_run_out else "its process ended")
        return json.loads(answer)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()
