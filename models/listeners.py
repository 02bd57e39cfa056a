# SPDX-License-Identifier: Apache-2.0
"""What listens to a generation, as the command line asks: files of events, and publishers."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import kvjax
from kvjax.interop.log import Log
from kvjax.interop.trace import Trace

from . import commands


class Listeners(contextlib.ExitStack):
    """All of them; the end of a `with` closes what they write to.

    Attributes:
      heard: what is called with all events.
      seen: what is called with each `Progress`.
    """

    def __init__(self, parser: commands.Parser, args: argparse.Namespace, spec: kvjax.CacheSpec):
        super().__init__()
        self.heard: list[Callable[[Any], object]] = []
        self.seen: list[Callable[[Any], object]] = []
        with contextlib.ExitStack() as opened:  # closed if one of them cannot be had
            if args.events is not None:
                self.heard.append(Log(opened.enter_context(_opened(parser, "--events", args.events))).write)
            if args.trace is not None:
                file = opened.enter_context(_opened(parser, "--trace", args.trace))
                trace = opened.enter_context(Trace(spec, file))
                self.heard.append(trace.write)
                self.seen += [trace.show, lambda progress: trace.set(progress.cache.state)]
            if args.publish:
                self.heard.append(opened.enter_context(_publisher(parser, args, spec)).publish)
            self.push(opened.pop_all())

    def hear(self, events: Any) -> None:
        """The listener of the generation."""
        for listener in self.heard:
            listener(events)

    def see(self, progress: Any) -> None:
        """To be called with each `Progress`."""
        for listener in self.seen:
            listener(progress)


def _opened(parser: commands.Parser, option: str, path: Any) -> Any:
    try:
        return path.open("w")
    except OSError as error:
        parser.error(f"{option}: {commands.reason(error)}")


def _publisher(parser: commands.Parser, args: argparse.Namespace, spec: kvjax.CacheSpec) -> Any:
    """A publisher of the cache's events."""
    from kvjax.interop.vllm import Publisher  # late: it needs an extra

    name = os.path.basename(os.path.abspath(args.checkpoint))
    try:
        publisher = Publisher(spec, bind=args.publish, replay=args.replay, model=name)
    except (OSError, ValueError) as error:
        parser.error(str(error).replace("bind: ", "--publish: ", 1).replace("replay: ", "--replay: ", 1))
    places = filter(None, (publisher.endpoint, publisher.replay_endpoint))
    print(f"publishing at {' and '.join(places)}", file=sys.stderr, flush=True)
    return publisher
