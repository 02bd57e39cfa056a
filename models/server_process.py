# SPDX-License-Identifier: Apache-2.0
"""`models.serve` in a process of its own, for the program that starts it; both end together."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import secrets
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from .tenants import KEY

SECONDS = 300.0  # that a server may take to start, with compiling, and to answer
PATIENCE = 15.0  # for a server that has to end by itself


class ServerEnded(ConnectionError):
    """A server that could not start, has ended or does not answer."""


class Answer(NamedTuple):
    """The answer of a server.

    Attributes:
      text: the generated text.
      num_cached: tokens of the prompt that were cached.
    """

    text: str
    num_cached: int


class ServerProcess:
    """A server with a key of its own, at a port that it chooses; the end of this process ends it too.

    Args:
      options: more options of `models.serve`.
      variables: more variables of its environment.
    """

    def __init__(self, *options: str, **variables: str):
        self._key, self._options, self._variables = secrets.token_hex(16), options, variables
        self._process: subprocess.Popen[str] | None = None
        self._notes, self._noted = list[str](), threading.Event()

    def ready(self) -> list[str]:
        """Starts the server unless it runs, and waits until it answers.

        Returns:
          The endpoints at which it publishes events and answers requests for replays, if its options have them.

        Raises:
          ServerEnded: with the reason, if it has ended or takes too long.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        if not self._noted.wait(SECONDS):
            raise ServerEnded(f"the server has not started within {SECONDS:.0f} s")
        if not self._said("serving at "):
            raise ServerEnded(self._notes[-1] if self._notes else "the server has ended")
        return self._said("publishing at ").split(" and ")

    def complete(self, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> Answer:
        """Asks for the likeliest tokens after a prompt of token ids, also those after a stop token.

        Raises:
          ServerEnded: if the server does not run, or ends before it has answered.
          ValueError: if it refuses the request.
        """
        fields = {"prompt": [*prompt], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "cache_salt": salt})
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        address = urllib.parse.urlsplit(self._said("serving at ")).netloc
        if not address:
            raise ServerEnded("the server does not run")
        try:
            with contextlib.closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
                connection.request("POST", "/v1/completions", body, headers)
                response = connection.getresponse()
                answer = json.load(response)
        except (OSError, http.client.HTTPException) as error:
            raise ServerEnded(f"the server does not answer: {error or type(error).__name__}") from error
        if response.status != http.client.OK:
            raise (ServerEnded if response.status >= 500 else ValueError)(answer["error"]["message"])
        return Answer(answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def close(self) -> None:
        """Ends the server."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with self._process:  # closes its pipes
            pass

    def _start(self) -> None:
        command = [sys.executable, "-m", f"{__package__}.serve", "--port", "0", "--share-prefixes", "--until-eof"]
        root = str(pathlib.Path(__file__).parents[1])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [*command, *self._options], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths, KEY: self._key, **self._variables},
            start_new_session=True,  # Ctrl-C is for this process
        )  # fmt: skip
        self._notes, self._noted = list[str](), threading.Event()
        threading.Thread(target=self._read, args=(self._process.stderr, self._notes, self._noted), daemon=True).start()

    @staticmethod
    def _read(lines: TextIO, notes: list[str], noted: threading.Event) -> None:
        """Takes all that the server prints, so that it never waits for a reader."""
        with contextlib.suppress(ValueError):  # `close` was called
            for line in lines:
                notes.append(line.strip().removeprefix(f"python -m {__package__}.serve: "))
                if line.startswith("serving at "):
                    noted.set()
        noted.set()

    def _said(self, start: str) -> str:
        """The rest of the line that begins so; empty if the server has printed none."""
        return next((note.removeprefix(start) for note in self._notes if note.startswith(start)), "")
