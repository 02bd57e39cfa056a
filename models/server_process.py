# SPDX-License-Identifier: Apache-2.0
"""A process that runs `models.serve`, and ends together with the program that started it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

from .tenants import KEY

SECONDS = 300.0  # for a server to compile and start, and for an answer
PATIENCE = 15.0  # seconds for a server to end by itself
POLL = 0.05  # seconds between two reads of a server's output


class ServerEnded(ConnectionError):
    """A server could not start, has ended, or does not answer."""


class Answer(NamedTuple):
    """The answer of a server."""

    text: str
    num_cached: int  # tokens of the prompt that were cached


class ServerProcess:
    """A server in another process, with a random key and a free port. It ends with this process.

    `options` are added to the command line of `models.serve`, and `variables` to its environment.
    """

    def __init__(self, *options: str, **variables: str):
        self._key = secrets.token_hex(16)
        self._options = options
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._notes = ""  # the server's output until it answered

    def ready(self) -> list[str]:
        """Starts the server unless it runs, and waits until it answers.

        Returns:
          The endpoints for events and for replays of events, if the server's options have them.

        Raises:
          ServerEnded: if the server has ended or takes too long. The message has the reason.
        """
        if self._process is None or self._process.poll() is not None or not self._noted("serving at "):
            self.close()
            self._start()
        return self._noted("publishing at ").split(" and ")

    def complete(self, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> Answer:
        """Asks for the likeliest tokens after a prompt of token ids. A stop token does not end the answer.

        Raises:
          ServerEnded: if the server does not run, or ends before it answers.
          ValueError: if the server refuses the request.
        """
        fields = {"prompt": [*prompt], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "cache_salt": salt})
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        address = urllib.parse.urlsplit(self._noted("serving at ")).netloc
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
        with self._process:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
            self._process.kill()  # unless it has ended
        self._notes = ""

    def _start(self) -> None:
        command = [sys.executable, "-m", f"{__package__}.serve", "--port", "0", "--share-prefixes", "--until-eof"]
        command += ["--generation-config", "none"]  # `complete` wants the likeliest tokens
        paths = [str(pathlib.Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), KEY: self._key, **self._variables}
        with tempfile.TemporaryFile() as notes:  # a pipe would need a reader
            self._process = subprocess.Popen(
                [*command, *self._options],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stderr=notes,
                start_new_session=True,  # Ctrl-C is for this process
            )
            deadline = time.monotonic() + SECONDS
            while not self._noted("serving at "):
                has_ended = self._process.poll() is not None
                self._notes = os.pread(notes.fileno(), 1 << 20, 0).decode(errors="replace")
                if has_ended:
                    last = self._notes.strip().rpartition("\n")[-1].removeprefix(f"python -m {__package__}.serve: ")
                    raise ServerEnded(last or "the server has ended")
                if time.monotonic() > deadline:
                    raise ServerEnded(f"the server has not started within {SECONDS:.0f} s")
                time.sleep(POLL)

    def _noted(self, start: str) -> str:
        """Returns the rest of the output's line that begins with `start`, or an empty text if there is no such line."""
        return next((line.removeprefix(start) for line in self._notes.split("\n")[:-1] if line.startswith(start)), "")
