# SPDX-License-Identifier: Apache-2.0
"""Who is told of the cache while text is generated: the options, and what they open."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import kvjax

from . import commands
from .commands import number

_OPTIONS = {"publish": "wires", "agent": "agent", "metrics": "metrics"}  # and the extras that they need


def add_wires(parser: commands.Parser) -> None:
    """The options that `check` and `Wires` read."""
    port = number(int, 0, 65_535)
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
            commands.check_extra(parser, extra, f"--{option}")
    if args.replay and not args.publish:
        parser.error("--replay: got one without --publish")


class Wires:
    """What the options opened.

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
        self._setters: list[Callable[[Any], object]] = []
        self._note, self._stack = note, contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            open_ = {"publish": self._publish, "agent": self._serve, "metrics": self._export}
            wires: dict[str, Any] = {}
            for option, how in open_.items():
                if getattr(args, option) is None:
                    continue
                try:
                    wires[option] = opened.enter_context(how(args, spec, wires))
                except (OSError, ValueError) as error:
                    said = str(error).replace("replay: ", "--replay: ", 1)
                    parser.error(said if said.startswith("--replay") else f"--{option}: {said.split(': ', 1)[-1]}")
            self._stack = opened.pop_all()
        self.listener = self._listen if self._listeners else None

    def set(self, cache: Any) -> None:
        """Tells those who want it how the cache stands."""
        for setter in self._setters:
            setter(cache.state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        return self._stack.__exit__(kind, error, trace)

    def _listen(self, events: Any) -> None:
        for listener in self._listeners:
            listener(events)

    def _publish(self, args: argparse.Namespace, spec: kvjax.CacheSpec, wires: dict[str, Any]) -> Any:
        from kvjax.interop.vllm import Publisher  # late, as all of these: they need extras

        publisher = Publisher(spec, bind=args.publish, replay=args.replay, model=_name(args))
        self._note(" and ".join(filter(None, (f"publishing at {publisher.endpoint}", publisher.replay_endpoint))))
        self._listeners.append(publisher.publish)
        return publisher

    def _serve(self, args: argparse.Namespace, spec: kvjax.CacheSpec, wires: dict[str, Any]) -> Any:
        from kvjax.interop.agent import Agent

        agent = Agent(spec, port=args.agent, model=_name(args))
        self._note(f"an agent listens at {agent.address}")
        self._listeners.append(agent.publish)
        self._setters.append(agent.set)
        return agent

    def _export(self, args: argparse.Namespace, spec: kvjax.CacheSpec, wires: dict[str, Any]) -> Any:
        import prometheus_client

        from kvjax.interop.metrics import Metrics

        metrics = Metrics(prometheus_client.CollectorRegistry(), spec, wires=dict(wires))
        self._note(f"metrics are at {metrics.serve(args.metrics)}")
        self._listeners.append(metrics.observe)
        self._setters.append(metrics.set)
        return metrics


def _name(args: argparse.Namespace) -> str:
    """The model's, part of all names of blocks."""
    return os.path.basename(os.path.abspath(args.checkpoint))
