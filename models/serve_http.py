# SPDX-License-Identifier: Apache-2.0
"""The connections of a server: uvicorn's, with limits on requests, open connections and unread answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http
import json
import re
import socket
import struct
import uuid
from collections.abc import Callable, Collection
from typing import Any

from .openai_api import ApiError

try:
    import uvicorn
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.middleware.cors import CORSMiddleware
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[serve]"') from error

HEADER_BYTES = 64 << 10  # limit before the body, and between two parts of the body
MIN_READ = 64 << 10  # bytes that a client must read in `read_seconds`, unless it has read all
REQUEST_ID = "x-request-id"
_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
WRITE_SECONDS = 5  # time for clients to read their last bytes when the server ends


@dataclasses.dataclass(frozen=True)
class Patience:
    """Limits on the connections of a server."""

    connections: int = 512  # open at a time; a further connection closes the longest idle one
    header_seconds: float = 10  # until the headers end, from the request's first byte or from the connection
    body_seconds: float = 30  # until the body ends, from the end of the headers
    read_seconds: float = 30  # for a client to read `MIN_READ` bytes, or all bytes
    grace: float = 5  # seconds for open answers when the server ends


class Clients(ServerState):
    """All connections of a server, and their limits."""

    def __init__(self, patience: Patience):
        super().__init__()
        self.patience = patience
        self.waiting = dict[Connection, None]()  # connections without a whole request, the longest wait first


class Connection(HttpToolsProtocol):
    """A connection which ends if its client is too slow, or sends too many headers."""

    server_state: Clients

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._patience = self.server_state.patience
        self._waiting = self.server_state.waiting
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begins to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # calls `pause_writing` whenever bytes are unread
        if len(self.connections) > self._patience.connections:
            next(iter(self._waiting), self)._refuse(503, "too many connections are open")
        if not transport.is_closing():
            self._wait(self._patience.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        self._end_wait()
        self._end_read_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads some bytes of a request."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._request_timer is None and not is_answering:
            self._wait(self._patience.header_seconds)
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > HEADER_BYTES:
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        """Begins an answer, and waits for the body."""
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEADER_BYTES:
            self._refuse_headers()
        if not self.transport.is_closing():
            self._header_bytes = 0
            super().on_headers_complete()
            self._wait(self._patience.body_seconds)

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        if not self.transport.is_closing():
            self._header_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the wait for a request."""
        if not self.transport.is_closing():
            self._header_bytes = 0
            super().on_message_complete()
            self._end_wait()

    def pause_writing(self) -> None:
        """Begins to wait for the client to read."""
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._patience.read_seconds, self._check_read)

    def resume_writing(self) -> None:
        """Ends the wait, since the client has read all."""
        self._end_read_timer()
        super().resume_writing()

    def _check_read(self) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes > self._unread_bytes - MIN_READ:
            self._reset()
        else:
            self._unread_bytes = unread_bytes
            self._read_timer = self.loop.call_later(self._patience.read_seconds, self._check_read)

    def _reset(self) -> None:
        """Ends the connection at once, and drops all unread bytes, also in the kernel."""
        unlingering = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, unlingering)
        self.transport.abort()

    def _end_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _wait(self, seconds: float) -> None:
        """Sets the time for the next part of the request."""
        if self._request_timer is not None:
            self._request_timer.cancel()
        message = f"the request did not come within {seconds:g} s"
        self._request_timer = self.loop.call_later(seconds, self._refuse, 408, message)
        self._waiting[self] = None

    def _end_wait(self) -> None:
        self._waiting.pop(self, None)
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not HTTP."""
        self._refuse(400, "the request is not valid HTTP")

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers have more than {HEADER_BYTES:,} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection. A client which waits for an answer gets an error, unless the answer has begun."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_idle = cycle is not None and cycle.response_complete and not self._header_bytes
        is_answered = cycle is not None and cycle.response_started and not cycle.response_complete
        if not is_idle and not is_answered:
            body = json.dumps(ApiError(status, message).body).encode()
            head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def only_hosts(app: ASGIApp, hosts: Collection[str]) -> ASGIApp:
    """Wraps an application: it then refuses requests for other hosts.

    Otherwise a page of another site could read all answers, if the site's name points to the loopback address.
    """
    allowed = {host.lower() for host in hosts}

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":\d*$", "", host).strip("[]")
        if scope["type"] != "http" or not host or name in allowed:
            return await app(scope, receive, send)
        refusal = ApiError(403, f"the host {host[:80]!r} is not one of --allowed-hosts", code="host_not_allowed")
        return await JSONResponse(refusal.body, refusal.status)(scope, receive, send)

    return guarded


def only_origins(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Wraps an application: pages of these origins may then call it. Browsers hide its answers from other pages."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=[REQUEST_ID]
    )


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """Wraps an application: each response then has an id, which the request's state has too.

    The id is the client's. A new id replaces an id which is long, or could spoil a line of a log.
    """

    async def identified(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        ids = Headers(scope=scope).getlist(REQUEST_ID)
        request_id = ids[0] if len(ids) == 1 and _ID_PATTERN.fullmatch(ids[0]) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        return await app(scope, receive, send_with_id)

    return identified


class HttpServer(uvicorn.Server):
    """A server for an application. Its caller handles signals by `handle_exit`.

    The server calls `opened` when it accepts connections. At its end, after the grace period, it calls `close`, which
    ends the open answers and may take long.
    """

    def __init__(self, app: Any, patience: Patience, *, opened: Callable[[], Any], close: Callable[[], Any]):
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_level="error",
                timeout_graceful_shutdown=int(patience.grace) + WRITE_SECONDS,
            )
        )
        self.server_state = Clients(patience)
        self._patience = patience
        self._opened = opened
        self._close = close
        self.has_ended = False

    @contextlib.contextmanager
    def capture_signals(self):
        """Leaves signals to the caller."""
        try:
            yield
        finally:
            self.has_ended = True

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        self._opened()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Accepts no more connections, and ends open answers after the grace period."""
        closing = asyncio.create_task(self._close_later())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_later(self) -> None:
        await asyncio.sleep(self._patience.grace)
        await asyncio.to_thread(self._close)
