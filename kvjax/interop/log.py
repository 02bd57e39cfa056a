# SPDX-License-Identifier: Apache-2.0
"""Events as they happen, in a file of JSON lines. `python -m kvjax.research log FILE` prints a report of it.

A line for each transition: ts in seconds since 1970, events as `to_list` gives them, queried, cached.
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
    """Writes a cache's events to a file; `write` is a listener of `generate`, `stream` and `run_batch`.

    The file has prompts in clear.

    Args:
      file: a text file, which the caller closes.
      clock: gives the time in seconds.

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
        self._file, self._clock = LineFile(file), clock

    def write(self, events: Events | EventLog) -> None:
        """Writes a line: a listener."""
        self._file.write([json.dumps(entry(events, self._clock()))])

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty: writes a line of what would build its index."""
        self.write(snapshot_log(state))


def entry(events: Events | EventLog, now: float | None = None) -> dict[str, Any]:
    """The fields of a line, of a transition or of a jitted loop; `now` is the ts, None: by the clock.

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
