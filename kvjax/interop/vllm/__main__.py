# SPDX-License-Identifier: Apache-2.0
"""Prints the events of any engine that publishes as vLLM does, an event a line.

python -m kvjax.interop.vllm tcp://127.0.0.1:5557
"""

from __future__ import annotations

import argparse
import array
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kvjax.interop._wires import zmq
from kvjax.interop.readers.vllm import Cleared, Event, Removed, Skipped, decode
from kvjax.interop.sockets import attach_socket, open_socket, receive

_SHOWN = 8  # tokens and hashes


def lines(frames: Sequence[bytes]) -> Iterator[str]:
    """The lines for a message."""
    if len(frames) != 3 or len(frames[1]) != 8:
        yield f"refused: {len(frames)} frames, wanted a topic, a number of 8 bytes and a payload"
        return
    sequence = int.from_bytes(frames[1], "big")
    try:
        batch = decode(frames[2])
    except ValueError as error:
        yield f"{sequence} refused: {error}"
        return
    if not batch.events:
        yield f"{sequence} idle"
    for event in batch.events:
        yield f"{sequence} {_text(event)}"


def _text(event: Event) -> str:
    if isinstance(event, Cleared):
        return "cleared"
    if isinstance(event, Skipped):
        return f"skipped: {event.reason}"
    hashes = _first_of([_hex(block_hash) for block_hash in event.hashes])
    if isinstance(event, Removed):
        return f"removed {event.medium} group {event.group}: {hashes}"
    after = "" if event.parent is None else f" after {_hex(event.parent)}"
    named = {"lora": event.lora, "salt": event.salt, "keys": event.keys or None}
    tenant = "".join(f" {name} {value!r}" for name, value in named.items() if value is not None)
    where = f"stored {event.medium} group {event.group}: {hashes}{after}"
    if not event.tokens:
        return f"{where} without tokens"
    tokens = _first_of([str(token) for token in array.array("q", event.tokens)])
    return f"{where} of {event.size} tokens{tenant}: {tokens}"


def _hex(block_hash: Any) -> str:
    return block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash:016x}"


def _first_of(parts: Sequence[str]) -> str:
    num_more = len(parts) - _SHOWN
    return " ".join(parts[:_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.vllm", description=__doc__)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the engine's endpoint, such as tcp://127.0.0.1:5557")
    parser.add_argument("--topic", default="", help="print only messages whose topic begins with this")
    parser.add_argument("--bind", action="store_true", help="bind the endpoint, for engines that connect")
    args = parser.parse_args(arguments)
    with zmq.Context() as context, open_socket(context, zmq.SUB, None, 64 << 20, 100_000) as socket:
        socket.subscribe(args.topic.encode())
        try:
            attach_socket(socket, "ENDPOINT", args.endpoint, bind=args.bind)
            while True:
                socket.poll()
                for frames in receive(socket, 1):
                    print(*lines(frames), sep="\n", flush=True)
        except (KeyboardInterrupt, BrokenPipeError):
            sys.exit(130)
        except (ValueError, OSError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
