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
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

from .tenants import KEY

SECONDS = 300.0  # that a server may take to start, with compiling, and to answer
PATIENCE = 15.0  # for a server that has to end by itself
POLL = 0.05  # seconds between two looks at the lines that a server prints


class ServerEnded(ConnectionError):
    """A server that could not start, has ended or does not answer."""


class Answer(NamedTuple):
    """The answer of a server."""

    text: str
    num_cached: int  # tokens of the prompt that were cached


class ServerProcess:
    """A server with a key of its own, at a port that it chooses; the end of this process ends it too.

    `options` are more options of `models.serve`, and `variables` more variables of its environment.
    """

    def __init__(self, *options: str, **variables: str):
        self._key, self._options, self._variables = secrets.token_hex(16), options, variables
        self._process: subprocess.Popen[bytes] | None = None
        self._notes = ""  # all that it has printed until it answered

    def ready(self) -> list[str]:
        """Starts the server unless it runs, and waits until it answers.

        Returns:
          The endpoints at which it publishes events and answers requests for replays, if its options have them.

        Raises:
          ServerEnded: with the reason, if it has ended or takes too long.
        """
        if self._process is None or self._process.poll() is not None or not self._noted("serving at "):
            self.close()
            self._start()
        return self._noted("publishing at ").split(" and ")

    def complete(self, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> Answer:
        """Asks for the likeliest tokens after a prompt of token ids, also those after a stop token.

        Raises:
          ServerEnded: if the server does not run, or ends before it has answered.
          ValueError: if it refuses the request.
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
        command += ["--generation-config", "none"]  # the likeliest tokens are wanted
        paths = [str(pathlib.Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), KEY: self._key, **self._variables}
        with tempfile.TemporaryFile() as notes:  # a pipe would need somebody who reads it
            self._process = subprocess.Popen(
                [*command, *self._options], env={**os.environ, **variables}, stdin=subprocess.PIPE, stderr=notes,
                start_new_session=True,  # Ctrl-C is for this process
            )  # fmt: skip
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
        """The rest of the line that begins so; empty if the server has not printed it."""
        return next((line.removeprefix(start) for line in self._notes.split("\n")[:-1] if line.startswith(start)), "")
