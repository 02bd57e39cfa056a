# SPDX-License-Identifier: Apache-2.0
"""Sends a cache's events to wires and files during a generation, and has the options for this."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO, cast

import kvjax
from kvjax._files import create
from kvjax.interop import combine_listeners
from kvjax.interop.log import Log
from kvjax.interop.trace import Trace

from . import commands
from .commands import number

MAX_PORT = 65_535
PORT = number(int, 0, MAX_PORT)  # of an option
CURVE_KEY = "KVJAX_CURVE_KEY"  # an environment variable, since other users can read a command line
# The options that need a checkpoint, with their extras. The demo also has `--events`.
_OPTIONS = {"trace": None, "publish": "wires", "agent": "agent", "metrics": "metrics"}


def add_wires(parser: commands.Parser) -> None:
    """Adds the options for `check` and `Wires`, except `--events` (`commands.add_outputs`)."""
    parser.add_argument(
        "--trace", metavar="FILE.json", type=pathlib.Path, help="write a trace there, which Perfetto and Chrome open"
    )
    add_publishers(parser)
    parser.add_argument(
        "--metrics", metavar="PORT", type=PORT, help="serve Prometheus numbers about the cache; 0 chooses a port"
    )
    parser.add_argument("--stay", action="store_true", help="serve on after the answers, until Ctrl-C")


def add_publishers(parser: commands.Parser) -> None:
    """Adds the options for publishing a cache's contents. The other options keep their defaults."""
    parser.set_defaults(events=None, trace=None, metrics=None, stay=False)
    parser.add_argument(
        "--publish", metavar="ENDPOINT", help="publish the cache's events there as vLLM does, such as tcp://*:5557"
    )
    parser.add_argument("--replay", metavar="ENDPOINT", help="answer there who missed some of them")
    parser.add_argument(
        "--curve", action="store_true", help=f"encrypt both, with the secret key of zmq.curve_keypair() in ${CURVE_KEY}"
    )
    parser.add_argument(
        "--agent", metavar="PORT", type=PORT, help="serve over gRPC what is cached, as MAX does; 0 chooses a port"
    )


def check(parser: commands.Parser, args: argparse.Namespace) -> None:
    """Refuses options without their extras, and options without the options that they depend on."""
    for option, extra in _OPTIONS.items():
        if getattr(args, option) is not None:
            if args.checkpoint is None:
                parser.error("--checkpoint: got none, wanted the folder of a model")
            if extra is not None:
                commands.check_extra(parser, extra, f"--{option}")
    for option in ("publish", "replay"):
        port = re.search(r":(\d+)$", getattr(args, option) or "")
        if port is not None and int(port[1]) > MAX_PORT:  # ZeroMQ would take it modulo 2**16
            parser.error(f"--{option}: got port {port[1]}, wanted at most {MAX_PORT}")
    for option in ("replay", "curve"):
        if getattr(args, option) and not args.publish:
            parser.error(f"--{option}: got one without --publish")
    if args.stay and (args.publish, args.agent, args.metrics) == (None, None, None):
        parser.error("--stay: got none of --publish, --agent and --metrics")


class Wires:
    """The wires for the given options. The end of a `with` closes them."""

    def __init__(
        self,
        parser: commands.Parser,
        args: argparse.Namespace,
        spec: kvjax.CacheSpec,
        note: Callable[[str], None],
        names: kvjax.Namespaces | None = None,
    ):
        """Opens the wires, or refuses an option.

        Args:
          parser: the command's parser, for refusals.
          args: the options.
          spec: the cache's spec.
          note: gets a line with the address of each wire.
          names: the namespaces to send blocks of; None disables the check.
        """
        self._names = names
        self._note = note
        self._listeners: list[Callable[[Any], object]] = []  # of events
        self._watchers: list[Callable[[Any], object]] = []  # of a `Progress`
        self._setters: list[Callable[[Any], object]] = []  # of the state
        self.feeds: dict[str, Any] = {}  # the wires with a queue, by their options' names
        self._files: list[_File] = []
        openers = {
            "events": self._log,
            "trace": self._trace,
            "publish": self._publish,
            "agent": self._serve,
            "metrics": self._export,
        }
        with contextlib.ExitStack() as self._stack:  # closes all wires if an opener fails
            for option, open_ in openers.items():
                if getattr(args, option) is None:
                    continue
                try:
                    open_(args, spec)
                except (OSError, ValueError) as error:
                    message = str(error).replace("replay: ", "--replay: ", 1)
                    if not message.startswith("--replay"):
                        message = f"--{option}: {message.split(': ', 1)[-1]}"
                    parser.error(message)
            self._stack = self._stack.pop_all()
        # The listener for a generation, or None.
        self.listener = combine_listeners(spec, *self._listeners) if self._listeners else None

    def see(self, progress: Any) -> None:
        """Shows a `Progress` to the wires. Call it for each `Progress` of the generation."""
        for watcher in self._watchers:
            watcher(progress)
        self.set(progress.cache.state)

    def set(self, state: kvjax.CacheState) -> None:
        """Passes the cache's state to the wires."""
        for setter in self._setters:
            setter(state)

    @property
    def unwritten(self) -> bool:
        """Whether writing a file has failed. The answer is final after closing."""
        return any(file.failed for file in self._files)

    def flush(self) -> None:
        """Writes the files' buffers to disk."""
        for file in self._files:
            file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        return self._stack.__exit__(kind, error, trace)

    def _open(self, option: str, path: pathlib.Path) -> TextIO:
        try:
            file = _File(path, lambda error: self._note(f"--{option}: {error}; the rest is not written"))
        except OSError as error:
            raise ValueError(f"path: {commands.reason(error)}") from error
        self._files.append(file)
        return cast(TextIO, self._stack.enter_context(file))

    def _log(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        self._listeners.append(Log(self._open("events", args.events)).write)

    def _trace(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        trace = self._stack.enter_context(Trace(spec, self._open("trace", args.trace)))
        self._listeners.append(trace.write)
        self._watchers.append(trace.show)
        self._setters.append(trace.set)

    def _publish(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        from kvjax.interop.vllm import Publisher  # imported late because it needs an extra

        publisher = Publisher(
            spec,
            bind=args.publish,
            replay=args.replay,
            model=commands.model_name(args),
            names=self._names,
            curve=_server_keys() if args.curve else None,
        )
        self.feeds["publish"] = self._stack.enter_context(publisher)
        self._note(" and ".join(filter(None, (f"publishing at {publisher.endpoint}", publisher.replay_endpoint))))
        self._listeners.append(publisher.publish)

    def _serve(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        from kvjax.interop.agent import Agent

        agent = self.feeds["agent"] = self._stack.enter_context(
            Agent(spec, port=args.agent, model=commands.model_name(args), names=self._names)
        )
        self._note(f"an agent listens at {agent.address}")
        self._listeners.append(agent.publish)
        self._setters.append(agent.set)

    def _export(self, args: argparse.Namespace, spec: kvjax.CacheSpec) -> None:
        import prometheus_client

        from kvjax.interop.metrics import Metrics

        metrics = Metrics(prometheus_client.CollectorRegistry(), spec, wires=self.feeds)
        self._stack.enter_context(metrics)
        self._note(f"metrics are at {metrics.serve(args.metrics)}")
        self._listeners.append(metrics.observe)
        self._setters.append(metrics.set)


class _File(io.TextIOBase):
    """A text file on a disk that may be full. It reports the first error, and writes nothing more."""

    def __init__(self, path: pathlib.Path, note: Callable[[str], None]):
        self._path = path
        self._note = note
        self._file = create(path, encoding="utf-8")
        self.failed = False

    def write(self, text: str, /) -> int:
        self._do(self._file.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self._file.flush)

    def close(self) -> None:
        self._do(self._file.close)
        super().close()

    def _do(self, action: Callable[..., object], *args: str) -> None:
        if self.failed or self._file.closed:
            return
        try:
            action(*args)
        except OSError as error:
            self.failed = True
            self._note(commands.reason(error, self._path))
            with contextlib.suppress(OSError):  # what is left in the buffer
                self._file.close()


def _server_keys() -> Any:
    """The keys of `--curve`."""
    import zmq

    from kvjax.interop.vllm import Curve

    secret = os.environ.get(CURVE_KEY, "").encode()
    try:
        return Curve(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise ValueError(f"curve: got no secret key in ${CURVE_KEY}, wanted that of zmq.curve_keypair()") from None
