# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a separate process with limits on time and memory, for work on data from clients."""

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
    """The process has ended, for example because a request has passed a limit. The message is the reason."""


class LimitedProcess:
    """A process which answers requests in turn. If a request has ended it, it starts again.

    The program reads lines of JSON and answers each by a line of JSON. In an answer, the field `error` is an error.

    Attributes:
      process: The latest process. None means it has not started.
    """

    def __init__(self, program: pathlib.Path, *arguments: str, seconds: float, max_bytes: int, first: dict[str, Any]):
        """Prepares the process without starting it.

        Args:
          program: A Python file without imports from this package. Its arguments are `seconds`, `max_bytes` and
            `arguments`, and it has to keep the limits.
          arguments: More arguments of the program.
          seconds: The most CPU time for a request.
          max_bytes: Limit of the process's memory.
          first: The first line for the program, whenever it starts.
        """
        self._command = [sys.executable, "-P", str(program), str(seconds), str(max_bytes), *arguments]
        self._seconds = seconds
        self._first = json.dumps(first).encode() + b"\n"
        self._lock = threading.Lock()
        self.process: Any = None

    def start(self) -> dict[str, Any]:
        """Starts the process. Returns its answer to `first`.

        Raises:
          Stopped: if the process has ended.
        """
        with self._lock:
            return self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request. Any thread may call it, and waits until earlier requests have their answers.

        Raises:
          Stopped: if the process has ended.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self._start()
            return self._answer(line)

    def close(self) -> None:
        """Ends the process. Call it while no request is running."""
        if self.process is not None:
            self._end()

    def _start(self) -> dict[str, Any]:
        pipe = subprocess.PIPE
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # more threads of numpy would take more memory
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
        except KeyboardInterrupt:  # otherwise the next request would get this answer
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
