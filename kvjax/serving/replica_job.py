# SPDX-License-Identifier: Apache-2.0
"""Requests that run in several replicas at a time, a thread for each: none waits for another, nor fails with it."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Container, Sequence
from typing import Any

import jax

from kvjax.events.listeners import Listeners
from kvjax.serving.generation import run_batch
from kvjax.serving.interrupt import CtrlC, GenerationInterrupted
from kvjax.serving.replica_devices import on
from kvjax.serving.request import Request, RunOptions
from kvjax.serving.requests import Output
from kvjax.serving.routing import CachedPrefixes
from kvjax.state import CacheState

_POLL = 0.1  # seconds of waiting for a report until Ctrl-C acts


class _Stop(BaseException):
    """The end of a replica's run, because its caller is interrupted. An `Exception` of a listener would end nothing."""


class ReplicaJob:
    """Requests for several replicas.

    Args:
      requests: all of them, each with a seed.
      spans: the outputs of each.
      outputs: of all, which are replaced as they come.
      options: of `run_batch`.
      prefixes: of each replica, to which its events are told.

    Attributes:
      cause: Ctrl-C, or an interrupt of the listener, that has ended all; or None.
    """

    def __init__(
        self, requests: Sequence[Request], spans: Sequence[range], outputs: list[Output], options: RunOptions,
        prefixes: Sequence[CachedPrefixes],
    ):  # fmt: skip
        self._requests, self._spans, self._outputs = requests, spans, outputs
        self._options, self._prefixes = options, prefixes
        self._reports: queue.Queue[tuple[int, Any]] = queue.Queue()  # of a replica: events, an error, or None: done
        listeners, numbers = [options.listener] if options.listener else [], range(len(prefixes))
        # On this thread the caller's listener, and on a replica's own the function that sends its events here.
        self._listeners = [Listeners(*listeners, leading=(number,)) for number in numbers]
        self._senders = [Listeners(self._send, leading=(number,)) for number in numbers]
        self.cause: BaseException | None = None

    def run(self, chosen: dict[int, tuple[Any, Any, list[int]]], caches: list[Any]) -> dict[int, BaseException]:
        """Runs {replica: (its device, its model, the numbers of its prompts)}; returns the errors of those that failed.

        Args:
          chosen: of each replica.
          caches: are replaced by those that come of it, a lost one by None.
        """
        threads = [threading.Thread(target=self._work, args=(number, caches, *one)) for number, one in chosen.items()]
        failed, left = dict[int, BaseException](), len(threads)
        with CtrlC() as ctrl_c:  # it acts between two reports, so that none is lost
            for thread in threads:
                thread.start()
            while left:
                try:
                    ctrl_c.act()
                    number, report = self._reports.get(timeout=_POLL)
                    if report is None or isinstance(report, BaseException):
                        left -= 1
                        failed |= {} if report is None else {number: report}
                    else:
                        self._tell(number, report)
                except queue.Empty:
                    pass
                except BaseException as error:  # Ctrl-C, or an interrupt of the listener
                    self.cause = self.cause or error
            for thread in threads:
                thread.join()
            try:
                ctrl_c.act()
            except BaseException as error:
                self.cause = self.cause or error
        for error in failed.values():
            if not isinstance(error, GenerationInterrupted):  # of an argument: nothing was donated
                raise error
        return failed

    def catch_up(self, states: Sequence[CacheState], anew: Container[int]) -> None:
        """Gives the caller's listener a snapshot of each replica whose events it has missed, and of those in `anew`."""
        for number, (listeners, state) in enumerate(zip(self._listeners, states, strict=True)):
            if number in anew:
                listeners.lose()
            try:
                listeners.catch_up(state)
            except BaseException as error:  # an interrupt of the listener
                self.cause = self.cause or error

    def _tell(self, number: int, events: Any) -> None:
        self._prefixes[number].observe(events)
        self._listeners[number](events)
        if self._listeners[number].is_due:
            self._senders[number].lose()  # the replica's thread sends a snapshot

    def _send(self, number: int, events: Any) -> None:
        """Sends a replica's events to the caller's thread."""
        self._reports.put((number, jax.device_get(events)))  # a later call may take the arrays
        if self.cause is not None:
            raise _Stop

    def _work(self, number: int, caches: list[Any], device: Any, model: Any, numbers: list[int]) -> None:
        """The thread of a replica."""
        outputs, report = list[Output](), None
        at = [output for n in numbers for output in self._spans[n]]
        try:  # all of it: `run` waits for a report
            options = dataclasses.replace(self._options, listener=self._senders[number], log_events=False)
            with on(device):
                outputs, caches[number], _ = run_batch(
                    model, caches[number], [self._requests[n] for n in numbers], options
                )
        except GenerationInterrupted as error:
            report, outputs, caches[number] = error, error.outputs, error.cache
        except BaseException as error:
            report = error
        for output, one in zip(at, outputs, strict=False):
            one.replica, self._outputs[output] = number, one
        self._reports.put((number, report))
