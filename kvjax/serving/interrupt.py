# SPDX-License-Identifier: Apache-2.0
"""The interruption of a generation: Ctrl-C, put off until it does no harm, and the error with the cache."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any


class GenerationInterrupted(RuntimeError):
    """A generation that ended by an error or Ctrl-C, which is this error's `__cause__`.

    Attributes:
      cache: the cache to go on with, of the kind that was given: the generation's own rows are released, and all that
        was committed is cached. None if a call to which the cache had been donated died on the device.
      outputs: one `Output` per prompt, so far; `finish` is None for unfinished ones.
      events: decoded, those of the releases included: since the last `Progress` of `stream`, or all of `generate`.
    """

    def __init__(self, message: str, cache: Any, outputs: list[Any], events: list[dict[str, Any]]):
        super().__init__(message)
        self.cache, self.outputs, self.events = cache, outputs, events


class CtrlC:
    """Ctrl-C inside `with`: noted, and acted on by `act` and where the `with` ends; a second one acts at once.

    To act is to call the handler that was in force before the `with` and is restored after it. Only the main thread
    gets signals, so nothing is put off in others.
    """

    def __init__(self) -> None:
        self._handler: Callable[..., Any] | None = None  # the caller's, while ours is installed
        self._pending: Callable[[], Any] | None = None
        self._noted = False

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if kind is None:  # an error ends the generation already
            self.act()

    def act(self) -> None:
        """Acts on a Ctrl-C that was noted and not yet acted on."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _note(self, number: int, frame: Any) -> None:
        handler = self._handler
        assert handler is not None
        if self._noted:
            handler(number, frame)
        else:
            self._noted, self._pending = True, functools.partial(handler, number, frame)
