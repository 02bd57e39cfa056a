# SPDX-License-Identifier: Apache-2.0
"""ZMQ sockets with limits."""

from __future__ import annotations

import contextlib
import os
import re
import socket as network
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvjax.interop._wires import zmq

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
_HANDSHAKE = 1024  # bytes; an upper bound for CURVE's handshake messages, and for its overhead per message
LOOPBACK = "tcp://127.0.0.1:5557"  # vLLM's port


class Curve(NamedTuple):
    """Keys of an encrypted socket, from `zmq.curve_keypair()`. Anyone with a server's public key may connect."""

    public: bytes
    secret: bytes
    server: bytes | None = None  # the public key of the server to connect to; None for the server, which binds


def open_socket(context: Any, kind: int, curve: Curve | None, max_bytes: int, max_queued: int) -> Any:
    """A socket with limits on the bytes of a frame and on the messages queued for each peer."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = max_bytes if curve is None else max_bytes + _HANDSHAKE
    socket.set_hwm(max_queued)
    if curve is not None:
        socket.curve_publickey, socket.curve_secretkey, server = Curve(*curve)
        socket.curve_server = server is None
        if server is not None:
            socket.curve_serverkey = server
    return socket


def attach_socket(socket: Any, name: str, endpoint: str, *, bind: bool) -> str:
    """Binds or connects a socket. Returns the endpoint, with the chosen port if it was bound.

    Raises:
      ValueError: unless the endpoint is of TCP or of this machine; the message begins with `name`.
      OSError: if the endpoint cannot be bound; the message begins with `name`.
    """
    if not isinstance(endpoint, str) or not re.match(r"(tcp://.+:(\d+|\*)|ipc://.+)$", endpoint):
        raise ValueError(f"{name}: got {endpoint!r}, wanted tcp://HOST:PORT or ipc://PATH")
    socket.ipv6 = "[" in endpoint
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"{name}: {endpoint}: {error}") from error
    return socket.last_endpoint.rstrip(b"\0").decode() if bind else endpoint


def receive(socket: Any, max_messages: int) -> Iterator[list[bytes]]:
    """The frames of each waiting message, up to a number of messages."""
    with contextlib.suppress(zmq.Again):
        for _ in range(max_messages):
            yield socket.recv_multipart(zmq.NOBLOCK)


def default_topic(endpoint: str, model: str | None, *, bound: bool) -> bytes:
    """`kv@<host>:<port>@<model>`, as llm-d expects. A connecting publisher has its process id as the port."""
    host = ""
    port = str(os.getpid())
    if bound:
        address = re.sub("^(tcp|ipc)://", "", endpoint)
        host, _, port = address.rpartition(":") if endpoint.startswith("tcp") else ("", "", address)
    if host in ("", "*", "0.0.0.0", "[::]"):
        host = network.gethostname()
    return f"kv@{host}:{port}@{model or ''}".encode()
