# SPDX-License-Identifier: Apache-2.0
"""Clients of a server of completions, for a process of their own: `main`.

Each line of standard input is a job as JSON: {"port", "prompts", "new_tokens", "open", "streams"}. The prompts are
answered greedily, so many at a time; a line of standard output is the texts of the answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def answer(job: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: Any) -> str:
    """The text of one answer."""
    fields = {
        "model": "recall", "prompt": prompt, "max_tokens": job["new_tokens"], "temperature": 0, "ignore_eos": True,
        "stream": job["streams"],
    }  # fmt: skip
    body = json.dumps(fields).encode()
    names = b"host: 127.0.0.1\r\ncontent-type: application/json"  # a server at a loopback address refuses other hosts
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%b\r\ncontent-length: %d\r\n\r\n" % (names, len(body)) + body)
    if not job["streams"]:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return json.loads(await reader.readexactly(int(length.split(b":")[1])))["choices"][0]["text"]
    text = ""
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if not line:
            raise ConnectionError("the server has closed the connection")
        if line.startswith(b"data: "):
            text += json.loads(line[6:])["choices"][0]["text"]
    while await reader.readline() != b"0\r\n":  # the end of a chunked body
        pass
    await reader.readline()
    return text


async def answers(job: dict[str, Any]) -> list[str]:
    """The texts of all answers, in the order of the prompts."""
    found, left = [""] * len(job["prompts"]), iter(enumerate(job["prompts"]))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", job["port"])
        for number, prompt in left:
            found[number] = await answer(job, reader, writer, prompt)
        writer.close()

    await asyncio.gather(*(client() for _ in range(job["open"])))
    return found


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(answers(json.loads(line)))), flush=True)
