# SPDX-License-Identifier: Apache-2.0
"""A JSON line for each transition: ts in seconds since 1970, events as `to_list` gives them, queried, cached."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

from kvjax.events.log import EventLog
from kvjax.events.mirror import snapshot, to_list
from kvjax.events.records import Events
from kvjax.interop.events import arrays
from kvjax.state import CacheState


class Log:
    """Writes a cache's events to a file; `write` is a listener of `generate`, `stream` and `run_batch`.

    The file has prompts in clear.
    """

    def __init__(self, file: TextIO, *, clock: Callable[[], float] = time.time):
        """Begins with an empty cache.

        Args:
          file: a text file, which the caller closes.
          clock: gives the time in seconds.
        """
        self._file, self._clock = file, clock

    def write(self, events: Events | EventLog) -> None:
        """Writes a line: a listener.

        Raises:
          ValueError: for anything but `Events` and an `EventLog`.
        """
        self._save(entry(events, self._clock()))

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty: writes a line of what would build its index."""
        self._save({"ts": self._clock(), "events": snapshot(state), "queried": 0, "cached": 0})

    def _save(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def entry(events: Events | EventLog, now: float | None = None) -> dict[str, Any]:
    """The fields of a line, of a transition or of a jitted loop.

    Args:
      events: of the transition.
      now: the ts; None: by the clock.

    Raises:
      ValueError: for anything but `Events` and an `EventLog`.
    """
    events = arrays(events)
    sums = {name: int(np.sum(getattr(events, name))) for name in ("queried", "cached")}
    return {"ts": time.time() if now is None else now, "events": to_list(events), **sums}
