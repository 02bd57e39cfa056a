# SPDX-License-Identifier: Apache-2.0
"""Endpoints for the operator of a server: new weights from a folder, and sleep and wake.

    POST /v1/weights  {"path": "step-7", "in_flight": "recompute"}   a folder under --weights
    POST /sleep       {"keep": "none"}
    POST /wake        {}

They exist only with an operator's key, which no client has: other keys of the server do not open them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
from collections.abc import Callable
from typing import Any

from kvjax.serving import Engine

from . import commands
from .openai_api import ApiError, Fields, read_json, refuse
from .tenants import Keys

KEY = "KVJAX_OPERATOR_KEY"  # in the environment, since other users can read a command line
MODES = ("finish", "recompute", "continue")
_MAX_BODY = 4096  # bytes


def add_operator(parser: argparse.ArgumentParser) -> None:
    """Adds the options for `Operator`."""
    parser.add_argument(
        "--weights", metavar="DIR", type=pathlib.Path, help="folder whose folders POST /v1/weights may load (none)"
    )
    parser.add_argument(
        "--operator-key", metavar="KEY", help=f"key for /v1/weights, /sleep and /wake (default: ${KEY}, or none)"
    )


def operator_keys(parser: commands.Parser, args: argparse.Namespace) -> Keys:
    """Returns the operator's key of the options or of the environment, or no keys."""
    key = args.operator_key or os.environ.get(KEY)
    if key is not None and not (key.isascii() and key.isprintable()):
        parser.error("--operator-key: got a key that no header can have, wanted ASCII letters, digits and signs")
    if args.weights is not None and not key:
        parser.error(f"--weights: got a folder without a key, wanted --operator-key or ${KEY}")
    if args.weights is not None and not args.weights.is_dir():
        parser.error(f"--weights: {args.weights} is no folder")
    return Keys([key] if key else [])


class Operator:
    """Changes the weights of a server's engine, and lets it sleep.

    Args:
      engine: the engine.
      folder: the folder of all checkpoints that may be loaded. None allows no new weights.
      load: loads the model of a checkpoint, like the server's.
    """

    def __init__(self, engine: Engine[Any], folder: pathlib.Path | None, load: Callable[[pathlib.Path], Any]):
        self._engine = engine
        self._folder = None if folder is None else folder.resolve()
        self._load = load
        self._lock = asyncio.Lock()

    async def weights(self, body: bytearray) -> dict[str, Any]:
        """Loads a folder's weights, and returns when the engine uses them. If it fails, the old weights stay."""
        fields = _fields(body, "path", "in_flight", "forget", "name")
        path = self._checked(fields.get("path"))
        in_flight = fields.get("in_flight", "recompute")
        forget = fields.get("forget", True)
        name = fields.get("name")
        if in_flight not in MODES:
            raise refuse("in_flight", in_flight, f"one of {', '.join(MODES)}")
        if not isinstance(forget, bool):
            raise refuse("forget", forget, "true or false")
        if not isinstance(name, str | None):
            raise refuse("name", name, "a text or null")
        async with self._lock:
            try:
                model = await asyncio.to_thread(self._load, path)
                version = await asyncio.to_thread(
                    self._engine.update, model, in_flight=in_flight, weights=name, forget=forget
                )
            except (ImportError, OSError, ValueError) as error:
                raise ApiError(400, f"path: {commands.reason(error, path)}", "path") from None
            except RuntimeError as error:
                raise ApiError(409, str(error)) from None
        return {"weights": version}

    def _checked(self, path: Any) -> pathlib.Path:
        """Returns the folder of a request. Links and dots may not lead out of the operator's folder."""
        if self._folder is None:
            raise ApiError(403, "the server has no --weights", "path")
        if not isinstance(path, str) or not path or "\0" in path:
            raise refuse("path", path, "the name of a folder")
        folder = (self._folder / path).resolve()
        if not folder.is_relative_to(self._folder) or folder == self._folder or not folder.is_dir():
            raise ApiError(404, "path: there is no such folder", "path")
        return folder

    async def sleep(self, body: bytearray) -> dict[str, Any]:
        """Frees the memory of the pools."""
        keep = _fields(body, "keep").get("keep", "none")
        if keep not in ("none", "host"):
            raise refuse("keep", keep, "none or host")
        async with self._lock:
            try:
                await asyncio.to_thread(self._engine.sleep, keep=keep)
            except ValueError as error:
                raise ApiError(400, str(error), "keep") from None
            except RuntimeError as error:
                raise ApiError(409, str(error)) from None
        return state_of(self._engine)

    async def wake(self, body: bytearray) -> dict[str, Any]:
        """Makes the pools again."""
        _fields(body)
        async with self._lock:
            await asyncio.to_thread(self._engine.wake)
        return state_of(self._engine)


def state_of(engine: Engine[Any]) -> dict[str, Any]:
    """Whether an engine sleeps, and the number of updates of its weights."""
    return {"asleep": engine.is_asleep, "weights": engine.version}


def _fields(body: bytearray, *names: str) -> Fields:
    """Reads a short body that has no other fields."""
    if len(body) > _MAX_BODY:
        raise ApiError(413, f"the body has more than {_MAX_BODY:,} bytes", code="body_too_large")
    fields = read_json(body or bytearray(b"{}"))
    fields.check_names(names)
    return fields
