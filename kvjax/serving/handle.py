# SPDX-License-Identifier: Apache-2.0
"""`Handle`: a request in an engine, from the side of whoever has submitted it."""

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
    """When things happened to a request, in seconds of `time.monotonic`; None before.

    Attributes:
      queued: it was submitted.
      admitted: it had got a row.
      first_token: its first token was there.
      ended: it was over.
    """

    queued: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


class EngineError(RuntimeError):
    """The end of a request by a failure of its engine, which is this error's `__cause__`, or by the engine's end."""


class Handle:
    """A request: an iterator of its tokens, for threads and for asyncio, and its output.

    Attributes:
      output: so far; another thread may be adding to it, one list after the other.
      times: of the request.
      samples: the handles of all samples of the prompt, this one included.
    """

    def __init__(self, output: Output, cancel: Callable[[Handle], None]):
        self.output = output
        self.times = Times(time.monotonic())
        self.samples: list[Handle] = [self]
        self.error: BaseException | None = None  # of the engine, that has ended it
        self.is_streaming = False  # whether somebody waits for its next tokens
        self.job: Any = None  # of the engine
        self._changed = threading.Condition()
        self._callbacks = list[Callable[[], Any]]()
        self._cancel = cancel

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.times.ended is not None

    def cancel(self) -> None:
        """Ends the request, unless it is over; its row is free behind the turns that are under way."""
        if not self.done:
            self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Waits until the request is over; returns its output.

        Raises:
          TimeoutError: if it goes on after `timeout` seconds.
          EngineError: if the engine has failed it.
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
        number = 0
        while True:
            with self._changed:
                while not (self.done or len(self.output.tokens) > number):
                    self._changed.wait()
                new = self.output.tokens[number:]
            if not new:
                self._ended()
                return
            number += len(new)
            yield from new

    async def __aiter__(self) -> AsyncGenerator[int]:
        number = 0
        async for _ in self.changes():
            new = self.output.tokens[number:]
            number += len(new)
            for token in new:
                yield token

    async def changes(self, *, is_streaming: bool = True, period: float = 0.0) -> AsyncGenerator[Output]:
        """The output each time that it has changed, for asyncio; the last time it is over.

        Args:
          listens: whether the engine is to make few tokens at a time.
          period: seconds from one time to the next, at least, but for the first tokens and the end.

        Raises:
          EngineError: if the engine has failed the request.
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
                is_done = self.done  # before the output is read: what comes later is read the next time
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
        """Waits until the request is over, for asyncio; returns its output."""
        async for _ in self.changes(is_streaming=False):
            pass
        return self._ended()

    def end(self, finish: str | None, error: BaseException | None = None) -> None:
        """Ends the request, unless it is over."""
        if not self.done:
            self.update(lambda output: setattr(output, "finish", finish), error)

    def update(self, change: Callable[[Output], Any], error: BaseException | None = None) -> None:
        """Changes the output, and wakes whoever waits; for the engine's thread."""
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
