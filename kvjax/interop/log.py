# SPDX-License-Identifier: Apache-2.0
"""A log of events, in a file of JSON lines. `python -m kvjax.research log FILE` prints a report of it.

Each transition is a line: ts in seconds since 1970, events in the form of `to_list`, queried, cached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

from kvjax._files import LineFile
from kvjax.events.host_events import arrays
from kvjax.events.log import EventLog
from kvjax.events.mirror import snapshot_log, to_list
from kvjax.events.records import Events
from kvjax.state import CacheState

__all__ = ["Log", "entry"]


class Log:
    """Writes a cache's events to a file. Use `write` as a listener of `generate`, `stream` and `run_batch`.

    The file has prompts as plain text.

    Args:
      file: a text file. You close it yourself.
      clock: returns the time in seconds.

    Example:
      >>> import io
      >>> from kvjax.interop.log import Log
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> file = io.StringIO()
      >>> Log(file, clock=lambda: 5.0).write(events)
      >>> print(file.getvalue(), end="")
      {"ts": 5.0, "events": [], "queried": 10, "cached": 0}
    """

    def __init__(self, file: TextIO, *, clock: Callable[[], float] = time.time):
        self._file = LineFile(file)
        self._clock = clock

    def write(self, events: Events | EventLog) -> None:
        """Writes a line; for use as a listener."""
        self._file.write([json.dumps(entry(events, self._clock()))])

    def attach(self, state: CacheState) -> None:
        """Takes over a cache that is not empty: writes a line with the events that build its index."""
        self.write(snapshot_log(state))


def entry(events: Events | EventLog, now: float | None = None) -> dict[str, Any]:
    """The fields of a line, for a transition or a jitted loop. Without `now`, the ts is the present time.

    Example:
      >>> from kvjax.interop.log import entry
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, events = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> entry(events, now=5.0)
      {'ts': 5.0, 'events': [], 'queried': 10, 'cached': 0}
    """
    events = arrays(events)
    sums = {name: int(np.sum(getattr(events, name))) for name in ("queried", "cached")}
    return {"ts": time.time() if now is None else now, "events": to_list(events), **sums}
