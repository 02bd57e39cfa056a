# SPDX-License-Identifier: Apache-2.0
"""`Handle`: gives the code that submitted a request its output."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from kvjax.serving.requests import Output


@dataclasses.dataclass
class Times:
    """Times of a request's events, in seconds of `time.monotonic`, or None before the event.

    Attributes:
      queued: the request was submitted.
      admitted: the request had got a row.
      first_token: its first token arrived.
      ended: the request was over.
    """

    queued: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


class EngineError(RuntimeError):
    """A request ended because its engine failed, with the failure as this error's `__cause__`, or was closed."""


class Handle:
    """A request: its output, and an iterator of its tokens for threads and for asyncio.

    Attributes:
      output: the output so far. Another thread may be appending to its lists, list after list.
      times: times of the request.
      samples: handles of all samples of the prompt, including this handle.
    """

    def __init__(self, output: Output, cancel: Callable[[Handle], None]):
        self.output = output
        self.times = Times(time.monotonic())
        self.samples: list[Handle] = [self]
        self.error: BaseException | None = None  # failure of the engine that ended it
        self.is_streaming = False  # whether a client reads tokens as they arrive
        self.job: Any = None  # the engine's job
        self._changed = threading.Condition()
        self._callbacks = list[Callable[[], Any]]()
        self._cancel = cancel

    @property
    def done(self) -> bool:
        """Whether the request is over."""
        return self.times.ended is not None

    def cancel(self) -> None:
        """Ends the request, unless it is over. Its row is free after the started turns."""
        if not self.done:
            self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Waits until the request is over. Returns its output.

        Raises:
          TimeoutError: if it goes on after `timeout` seconds.
          EngineError: if the engine failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request goes on after {timeout} s")
        return self._ended()

    def _ended(self) -> Output:
        if self.error is not None:
            raise self.error
        return self.output

    def __iter__(self) -> Iterator[int]:
        self.is_streaming = True
        num_read = 0
        while True:
            with self._changed:
                while not (self.done or len(self.output.tokens) > num_read):
                    self._changed.wait()
                new = self.output.tokens[num_read:]
            if not new:
                self._ended()
                return
            num_read += len(new)
            yield from new

    async def __aiter__(self) -> AsyncGenerator[int]:
        num_read = 0
        async for _ in self.changes():
            new = self.output.tokens[num_read:]
            num_read += len(new)
            for token in new:
                yield token

    async def changes(self, *, is_streaming: bool = True, period: float = 0.0) -> AsyncGenerator[Output]:
        """Yields the output each time it has changed, for asyncio. At the last time the request is over.

        Args:
          is_streaming: whether the engine should make only a few tokens at a time.
          period: minimum seconds between two changes, except for the first tokens and the end.

        Raises:
          EngineError: if the engine failed.
        """
        self.is_streaming = self.is_streaming or is_streaming
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._callbacks.append(notify)
        try:
            while True:
                is_done = self.done  # read before the output, so later tokens come next time
                yield self._ended()
                if is_done:
                    return
                seconds = period if self.output.tokens else 0.0
                await changed.wait()
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        while seconds and not self.done:
                            await changed.wait()
                            changed.clear()
        finally:
            with self._changed:
                self._callbacks.remove(notify)

    async def wait(self) -> Output:
        """Waits in asyncio until the request is over. Returns its output."""
        async for _ in self.changes(is_streaming=False):
            pass
        return self._ended()

    def end(self, finish: str | None, error: BaseException | None = None) -> None:
        """Ends the request, unless it is over."""
        if not self.done:
            self.update(lambda output: setattr(output, "finish", finish), error)

    def update(self, change: Callable[[Output], Any], error: BaseException | None = None) -> None:
        """Changes the output, and wakes waiting threads. The engine's thread calls it."""
        with self._changed:
            change(self.output)
            now = time.monotonic()
            if self.output.tokens and self.times.first_token is None:
                self.times.first_token = now
            if self.output.finish is not None or error is not None:
                self.error = error
                self.times.ended = now
            self._changed.notify_all()
            for notify in self._callbacks:
                notify()
