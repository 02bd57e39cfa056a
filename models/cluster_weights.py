# SPDX-License-Identifier: Apache-2.0
"""New weights of a replica while it serves, from the `user_config` of its deployment.

{"weights": "/models/step-7", "in_flight": "recompute"}
"""

from __future__ import annotations

import collections
import os
import pathlib
import threading
from typing import Any, Literal, NamedTuple

from . import commands
from .serve import Server
from .serve_weights import MODES
from .stores import checkpoint_name


class Wanted(NamedTuple):
    """The weights that a replica should have.

    Attributes:
      folder: the checkpoint with the weights, on the replica's machine.
      in_flight: what happens to requests that have tokens, see `Engine.update`.
    """

    folder: str
    in_flight: Literal["finish", "recompute", "continue"]


def read_config(user_config: Any, first_folder: str) -> Wanted:
    """Reads the `user_config` of a deployment. None stands for the weights of `first_folder`.

    Raises:
      ValueError: naming what is unknown or wrong.
    """
    config = {"weights": first_folder} if user_config is None else user_config
    if not isinstance(config, dict):
        raise ValueError(f"user_config: got {config!r:.80}, wanted weights and in_flight")
    unknown = sorted(str(name) for name in config.keys() - {"weights", "in_flight"})
    if unknown:
        raise ValueError(f"user_config: got {', '.join(unknown)}, wanted weights and in_flight")
    folder = config.get("weights")
    if not isinstance(folder, str) or not os.path.isabs(folder):
        raise ValueError(f"user_config: weights: got {folder!r:.80}, wanted the absolute path of a checkpoint")
    in_flight = config.get("in_flight", "recompute")
    if in_flight not in MODES:
        raise ValueError(f"user_config: in_flight: got {in_flight!r:.80}, wanted one of {', '.join(MODES)}")
    return Wanted(os.path.normpath(folder), in_flight)


class Updates:
    """Gives the engine of a replica the weights of its `user_config`.

    Attributes:
      name: the name of the weights in the salts of published events. None stands for the weights of the first folder.
    """

    def __init__(self, server: Server, first_folder: str):
        """Begins with the weights of the first folder, which the engine has."""
        self.name: str | None = None
        self._server = server
        self._first_folder = self._folder = os.path.normpath(first_folder)
        self._num_uses = collections.Counter[str]()
        self._lock = threading.Lock()

    @property
    def folder(self) -> str:
        """The checkpoint whose weights the engine uses."""
        return self._folder

    def update(self, user_config: Any) -> bool:
        """Loads the wanted weights, and returns when the engine uses them. Does nothing if it uses the folder already.

        If the folder cannot be loaded, the engine goes on with its weights.

        Returns:
          Whether the weights are new.

        Raises:
          ValueError: naming what is wrong.
        """
        wanted = read_config(user_config, self._first_folder)
        with self._lock:
            if wanted.folder == self._folder:
                return False
            folder = pathlib.Path(wanted.folder)
            try:
                name = self._new_name(folder)
                model = self._server.load_weights(folder)
                self._server.engine.update(model, in_flight=wanted.in_flight, weights=name)
            except (ImportError, OSError, ValueError) as error:
                raise ValueError(f"user_config: weights: {folder}: {commands.reason(error, folder)}") from error
            self.name = name
            self._folder = wanted.folder
            return True

    def _new_name(self, folder: pathlib.Path) -> str:
        """Returns a name that all replicas have for these weights, so that they find each other's blocks in a store.

        An engine refuses a name that other arrays had, so the name has a number when the weights come back.
        """
        name = checkpoint_name(folder)
        self._num_uses[name] += 1
        return name if self._num_uses[name] == 1 else f"{name} {self._num_uses[name]}"
