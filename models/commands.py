# SPDX-License-Identifier: Apache-2.0
"""Common parts of the command lines: single-line errors, output files, and the compilation cache."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import jax

import kvjax
from kvjax._files import create

INTERRUPTED = 130  # the shells' exit status for a command ended by Ctrl-C
DTYPES = ("float32", "bfloat16", "float16")  # of weights
EXTRAS = {
    "wires": ("msgspec and pyzmq", ("msgspec", "zmq")),
    "agent": ("grpcio, grpcio-tools and protobuf", ("grpc", "grpc_tools", "google")),
    "metrics": ("prometheus-client", ("prometheus_client",)),
    "stores": ("tensorstore", ("tensorstore",)),
    "cluster": ("ray, msgspec and pyzmq", ("ray", "msgspec", "zmq")),
    "serve": ("starlette, uvicorn and prometheus-client", ("starlette", "uvicorn", "prometheus_client")),
}


class Parser(argparse.ArgumentParser):
    """A parser of `python -m PACKAGE.COMMAND`, under the package's present name. Its errors are single lines."""

    def __init__(self, command: str, description: str | None):
        assert __spec__ is not None
        super().__init__(prog=f"python -m {__spec__.parent}.{command}", description=description)

    def error(self, message: str) -> NoReturn:
        """Prints the message as a single line and exits with 2."""
        line = " ".join(message.removeprefix("argument ").split())
        self.exit(2, f"{self.prog}: {line}\n")


class Refusing(NamedTuple):
    """A `with` for an option. If a file, a value or a package fails, the command ends with a line about the option."""

    parser: Parser
    option: str = ""
    path: Any = None  # file to name in errors without a name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ImportError | OSError | ValueError):
            self.parser.error(f"{self.option}{': ' if self.option else ''}{reason(error, self.path)}")


def number[T: (int, float)](kind: type[T], least: T, most: T | None = None) -> Callable[[str], T]:
    """The type of an argument with a number from `least` to `most`."""
    wanted = f"wanted {'an int' if kind is int else 'a number'} of at least {least}"
    wanted += "" if most is None else f" and at most {most}"

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, {wanted}") from None
        if not least <= value <= (value if most is None else most):
            raise argparse.ArgumentTypeError(f"got {text!r}, {wanted}")
        return value

    return read


def size(text: str) -> int:
    """The type of an argument with a number of bytes, with or without a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]i?)?B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a size such as 500MB or 10GiB")
    count, unit = match.groups(default="")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(count) * base ** " KMGT".index(unit[:1].upper() or " "))


def add_scan(parser: Parser) -> None:
    """Adds the option for `load(..., scan=)`."""
    parser.add_argument("--scan", action="store_true", help="scan layers that repeat: compiles faster, may run slower")


def add_outputs(parser: Parser) -> None:
    """Adds the options for `prepare`, `save` and `draw`."""
    events_help = "write the cache's events there; `python -m kvjax.research log FILE` tells what they say"
    parser.add_argument("--events", metavar="FILE.jsonl", type=pathlib.Path, help=events_help)
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw the blocks there when done")
    add_compile_cache(parser)


def add_compile_cache(parser: Parser) -> None:
    """Adds the option that disables the compilation cache."""
    folder = "in JAX_COMPILATION_CACHE_DIR, or ~/.cache/kvjax"
    parser.add_argument("--no-compile-cache", action="store_true", help=f"compile anew (programs are kept {folder})")


def prepare(parser: Parser, args: argparse.Namespace) -> None:
    """Runs before any computation. Refuses files in missing folders, and sets the compilation cache."""
    for option in ("events", "plot", "trace"):
        path = getattr(args, option, None)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{option}: {path.parent}: no such folder")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot: needs matplotlib: pip install "kvjax[plot]"')
    enable_compilation_cache(not args.no_compile_cache)


def enable_compilation_cache(is_enabled: bool) -> None:
    """Switches the compilation cache on or off. The process ends if its folder cannot be used."""
    if not is_enabled:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    try:
        kvjax.enable_compilation_cache()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{reason(error)}; --no-compile-cache needs no folder") from error


def check_extra(parser: Parser, extra: str, option: str = "") -> None:
    """Refuses an option, or a command, if the packages of an extra are missing."""
    needs, modules = EXTRAS[extra]
    if any(importlib.util.find_spec(module) is None for module in modules):
        parser.error(f'{option}{": " if option else ""}needs {needs}: pip install "kvjax[{extra}]"')


def save(parser: Parser, args: argparse.Namespace, entries: Iterable[dict[str, Any]]) -> None:
    """Writes the events, as lines of `kvjax.interop.log`."""
    if args.events is not None:
        with Refusing(parser, "--events", args.events), create(args.events) as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)


def draw(parser: Parser, args: argparse.Namespace, cache: Any) -> None:
    """Draws the cache if it is not None."""
    if cache is not None:
        save_picture(parser, args, lambda path: kvjax.debug.plot_blocks(cache.state, path))


def save_picture(parser: Parser, args: argparse.Namespace, plot: Callable[[pathlib.Path], Any]) -> None:
    """Calls `plot` with the file in `--plot`, if given."""
    if args.plot is not None:
        with Refusing(parser, "--plot", args.plot):
            plot(args.plot)


def model_name(args: argparse.Namespace) -> str:
    """The model's name, the last part of its checkpoint's path. Names of blocks contain it."""
    return os.path.basename(os.path.abspath(args.checkpoint))


def reason(error: Exception, path: Any = None) -> str:
    """The error's message, without errno. `path` is the file's name for errors without it."""
    if isinstance(error, UnicodeDecodeError) and path is not None:
        return f"{path}: not UTF-8 at byte {error.start}"
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename or path}: {error.strerror.lower()}"
    return str(error)
