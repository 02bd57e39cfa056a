# SPDX-License-Identifier: Apache-2.0
"""Who is told of the cache while text is generated, wires and files: the options, and what they open."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

import kvjax
from kvjax.interop import together
from kvjax.interop.log import Log
from kvjax.interop.trace import Trace

from . import commands
from .commands import number

# The options that need a checkpoint, and the extras that they need; `--events` is the demo's too.
_OPTIONS = {"trace": None, "publish": "wires", "agent": "agent", "metrics": "metrics"}


def add_wires(parser: commands.Parser) -> None:
    """The options that `check` and `Wires` read, but for `--events` (`commands.add_outputs`)."""
    port = number(int, 0, 65_535)
    parser.add_argument(
        "--trace", metavar="FILE.json", type=pathlib.Path, help="write a trace there, which Perfetto and Chrome open"
    )
    parser.add_argument(
        "--publish", metavar="ENDPOINT", help="publish the cache's events there as vLLM does, such as tcp://*:5557"
    )
    parser.add_argument("--replay", metavar="ENDPOINT", help="answer there who missed some of them")
    parser.add_argument(
        "--agent", metavar="PORT", type=port, help="serve over gRPC what is cached, as MAX does; 0 chooses a port"
    )
    parser.add_argument(
        "--metrics", metavar="PORT", type=port, help="serve Prometheus numbers about the cache; 0 chooses a port"
    )


def check(parser: commands.Parser, args: argparse.Namespace) -> None:
    """Refuses options without what they need."""
    for option, extra in _OPTIONS.items():
        if getattr(args, option) is not None:
            if args.checkpoint is None:
                parser.error("--checkpoint: got none, wanted the folder of a model")
            if extra is not None:
                commands.check_extra(parser, extra, f"--{option}")
    if args.replay and not args.publish:
        parser.error("--replay: got one without --publish")


class Wires:
    """What the options opened; the end of a `with` closes it.

    Attributes:
      listener: of the generation; None if nobody listens.
    """

    def __init__(
        self,
        parser: commands.Parser,
        args: argparse.Namespace,
        spec: kvjax.CacheSpec,
        note: Callable[[str], None],
    ):
        """Opens them, or refuses an option; `note` is told where they are."""
        self._listeners: list[Callable[[Any], object]] = []
        self._watchers: list[Callable[[Any], object]] = []
        self._feeds: dict[str, Any] = {}
        self._note = note
        openers = {
            "events": self._log, "trace": self._trace, "publish": self._publish, "agent": self._serve,
            "metrics": self._export,
        }  # fmt: skip
        with contextlib.ExitStack() as self._stack:  # closed if one of them cannot be had
            for option, open_ in openers.items():
                if getattr(args, option) is None:
                    continue
                try:
                    open_(args, spec)
                except (OSError, ValueError) as error:
                    said = str(error).replace("replay: ", "--replay: ", 1)
                    parser.error(said if said.startswith("--replay") else f"--{option}: {said.split(': ', 1)[-1]}")
            self._stack = self._stack.pop_all()
        self.listener = together(spec, *self._listeners) if self._listeners else None

    def see(self, progress: Any) -> None:
        """To be called with each `Progress`, as it comes."""
        for watcher in self._watchers:
            watcher(progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        return self._stack.__exit__(kind, error, trace)

    def _watch(self, setter: Callable[[Any], object]) -> None:
        """Tells a setter how the cache stands."""
        self._watchers.append(lambda progress: setter(progress.cache.state))

    def _open(self, path: pathlib.Path) -> TextIO:
        try:
            return self._stack.enter_context(path.open("w"))
        except OSError as error:
            raise ValueError(f"path: {commands.reason(error)}") from error

    def _log(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        self._listeners.append(Log(self._open(args.events)).write)

    def _trace(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        trace = self._stack.enter_context(Trace(spec, self._open(args.trace)))
        self._listeners.append(trace.write)
        self._watchers.append(trace.show)
        self._watch(trace.set)

    def _publish(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        from kvjax.interop.vllm import Publisher  # late, as those below: they need extras

        publisher = Publisher(spec, bind=args.publish, replay=args.replay, model=_name(args))
        self._feeds["publish"] = self._stack.enter_context(publisher)
        self._note(" and ".join(filter(None, (f"publishing at {publisher.endpoint}", publisher.replay_endpoint))))
        self._listeners.append(publisher.publish)

    def _serve(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        from kvjax.interop.agent import Agent

        agent = self._feeds["agent"] = self._stack.enter_context(Agent(spec, port=args.agent, model=_name(args)))
        self._note(f"an agent listens at {agent.address}")
        self._listeners.append(agent.publish)
        self._watch(agent.set)

    def _export(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        import prometheus_client

        from kvjax.interop.metrics import Metrics

        metrics = Metrics(prometheus_client.CollectorRegistry(), spec, wires=self._feeds)
        self._stack.enter_context(metrics)
        self._note(f"metrics are at {metrics.serve(args.metrics)}")
        self._listeners.append(metrics.observe)
        self._watch(metrics.set)


def _name(args: argparse.Namespace) -> str:
    """The model's, part of all names of blocks."""
    return os.path.basename(os.path.abspath(args.checkpoint))
