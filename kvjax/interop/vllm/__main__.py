# SPDX-License-Identifier: Apache-2.0
"""Prints the events of any engine that publishes as vLLM does, a line an event.

python -m kvjax.interop.vllm tcp://127.0.0.1:5557
"""

from __future__ import annotations

import argparse
import array
import sys
from collections.abc import Iterator, Sequence

from kvjax.interop.vllm._wires import zmq
from kvjax.interop.vllm.decode import Cleared, Removed, Stored, decode
from kvjax.interop.vllm.sockets import attach_socket, open_socket, receive

_SHOWN = 8  # tokens and names


def lines(frames: Sequence[bytes]) -> Iterator[str]:
    """The lines for a message."""
    if len(frames) != 3 or len(frames[1]) != 8:
        yield f"refused: {len(frames)} frames, wanted a topic, a number of 8 bytes and a payload"
        return
    number = int.from_bytes(frames[1], "big")
    try:
        batch = decode(frames[2])
    except ValueError as error:
        yield f"{number} refused: {error}"
        return
    if not batch.events:
        yield f"{number} idle"
    for event in batch.events:
        yield f"{number} {_text(event)}"


def _text(event: Stored | Removed | Cleared) -> str:
    if isinstance(event, Cleared):
        return "cleared"
    names = _some([name.hex() if isinstance(name, bytes) else f"{name:016x}" for name in event.hashes])
    if isinstance(event, Removed):
        return f"removed {event.medium} group {event.group}: {names}"
    after = "" if event.parent is None else f" after {_some([_name(event.parent)])}"
    tenant = "".join(
        f" {what} {value!r}"
        for what, value in (("lora", event.lora), ("salt", event.salt), ("keys", event.keys or None))
        if value is not None
    )
    text = _some([str(token) for token in array.array("q", event.tokens)])
    return f"stored {event.medium} group {event.group}: {names}{after} of {event.size} tokens{tenant}: {text}"


def _name(name: int | bytes) -> str:
    return name.hex() if isinstance(name, bytes) else f"{name:016x}"


def _some(parts: Sequence[str]) -> str:
    more = len(parts) - _SHOWN
    return " ".join(parts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.vllm", description=__doc__)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="where the engine publishes, such as tcp://127.0.0.1:5557")
    parser.add_argument("--topic", default="", help="print messages whose topic begins so")
    parser.add_argument("--bind", action="store_true", help="bind the endpoint, for engines that connect")
    asked = parser.parse_args(arguments)
    with zmq.Context() as context, open_socket(context, zmq.SUB, None, 64 << 20, 100_000) as socket:
        socket.subscribe(asked.topic.encode())
        try:
            attach_socket(socket, "ENDPOINT", asked.endpoint, bind=asked.bind)
            while True:
                socket.poll()
                for line in lines(receive(socket, 3) or []):
                    print(line, flush=True)
        except (KeyboardInterrupt, BrokenPipeError):
            sys.exit(130)
        except (ValueError, OSError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
