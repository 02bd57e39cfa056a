# SPDX-License-Identifier: Apache-2.0
"""Sockets of ZMQ with limits."""

from __future__ import annotations

import contextlib
import os
import re
import socket as network
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvjax.interop._wires import zmq

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
_HANDSHAKE = 1024  # bytes of what CURVE sends of itself, more than it adds to a message
LOOPBACK = "tcp://127.0.0.1:5557"  # vLLM's port


class Curve(NamedTuple):
    """Keys of an encrypted socket, from `zmq.curve_keypair()`; who knows the public key of a server may connect."""

    public: bytes
    secret: bytes
    server: bytes | None = None  # the public key of the server to connect to; None: this is the server, and binds


def open_socket(context: Any, kind: int, curve: Curve | None, most: int, queued: int) -> Any:
    """A socket that takes messages of at most `most` bytes and queues at most `queued` of them for a peer."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = most if curve is None else most + _HANDSHAKE
    socket.set_hwm(queued)
    if curve is not None:
        socket.curve_publickey, socket.curve_secretkey, server = Curve(*curve)
        socket.curve_server = server is None
        if server is not None:
            socket.curve_serverkey = server
    return socket


def attach_socket(socket: Any, name: str, endpoint: str, *, bind: bool) -> str:
    """Binds or connects a socket, and returns the endpoint with the port that was chosen.

    Errors begin with `name`: a ValueError for what is no endpoint of TCP or of this machine, an OSError for one that
    cannot be bound.
    """
    if not isinstance(endpoint, str) or not re.match(r"(tcp://.+:(\d+|\*)|ipc://.+)$", endpoint):
        raise ValueError(f"{name}: got {endpoint!r}, wanted tcp://HOST:PORT or ipc://PATH")
    socket.ipv6 = "[" in endpoint
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"{name}: {endpoint}: {error}") from error
    return socket.last_endpoint.rstrip(b"\0").decode() if bind else endpoint


def receive(socket: Any, most: int) -> Iterator[list[bytes]]:
    """The frames of each message that has come, of at most `most` messages."""
    with contextlib.suppress(zmq.Again):
        for _ in range(most):
            yield socket.recv_multipart(zmq.NOBLOCK)


def default_topic(endpoint: str, model: str | None, *, bound: bool) -> bytes:
    """`kv@<host>:<port>@<model>`, as llm-d wants it; a publisher that connects is called by its process."""
    host, port = "", str(os.getpid())
    if bound:
        address = re.sub("^(tcp|ipc)://", "", endpoint)
        host, _, port = address.rpartition(":") if endpoint.startswith("tcp") else ("", "", address)
    if host in ("", "*", "0.0.0.0", "[::]"):
        host = network.gethostname()
    return f"kv@{host}:{port}@{model or ''}".encode()
