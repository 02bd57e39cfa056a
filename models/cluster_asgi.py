# SPDX-License-Identifier: Apache-2.0
"""Requests of a front to applications in other processes: a call of an application, and the response to its client.

`call_app` runs beside the application, and yields its ASGI messages. `Forwarded` sends them to the client, on the
front. Between the two is anything that carries lists of messages, such as a call of a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from .openai_api import ApiError, busy
from .serve_http import REQUEST_ID
from .serve_job import while_connected

try:
    from starlette.responses import JSONResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[serve]"') from error

PACE = 0.05  # seconds between two lists of messages: each list costs as much as one message
TRIES = 3  # replicas that get a request, while none of them has sent anything
RETRY_SECONDS = 5  # until a client asks again, if there is no replica
_SCOPE = "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"
_GET = {"type": "http", "method": "GET", "headers": [], "query_string": b""}


class ReplicaEnded(Exception):
    """The replica which has a request has ended."""


class NoReplica(Exception):
    """No replica can take a request."""


class Busy(Exception):
    """Too many requests wait for the replicas."""


type Messages = AsyncGenerator[list[Message]]


def scope_of(scope: Scope, request_id: str) -> Scope:
    """Returns the part of a request's scope which another process understands, with the id of the request."""
    headers = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID.encode()]
    part = {name: scope[name] for name in _SCOPE if name in scope}
    return {**part, "headers": [*headers, (REQUEST_ID.encode(), request_id.encode())]}


async def call_app(app: ASGIApp, scope: Scope, body: bytes) -> Messages:
    """Calls an application, and yields the messages which it sends, in lists: at most one list in `PACE` seconds.

    The first list has a part of the body too. A message after a pause and the last one are not delayed. If the caller
    closes the generator, the application's task is cancelled, as if its client had left.
    """
    sent = asyncio.Queue[Message | None]()
    received = asyncio.Queue[Message]()
    received.put_nowait({"type": "http.request", "body": body, "more_body": False})
    task = asyncio.ensure_future(app(dict(scope), received.get, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        messages: list[Message | None] = [await sent.get()]
        if messages[0] is not None:  # the head of the response
            messages.append(await sent.get())
        while True:
            while not sent.empty():
                messages.append(sent.get_nowait())
            next_time = time.monotonic() + PACE
            if found := [message for message in messages if message is not None]:
                yield _joined(found)
            if messages[-1] is None:
                break
            messages = [await sent.get()]
            await asyncio.wait([task], timeout=max(next_time - time.monotonic(), 0.0))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # an application's failure is in its own response


def _joined(messages: list[Message]) -> list[Message]:
    """Returns the messages with all parts of the body in one."""
    parts = [message for message in messages if message["type"] == "http.response.body"]
    if len(parts) < 2:
        return messages
    others = [message for message in messages if message["type"] != "http.response.body"]
    return [*others, {**parts[-1], "body": b"".join(part.get("body", b"") for part in parts)}]


async def fetch(app: ASGIApp, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, list[Any], bytes]:
    """Gets a page of an application: its status, headers and body. Without a response the status is 500."""
    status = 500
    answer_headers = list[Any]()
    body = b""
    scope = {**_GET, "path": path, "raw_path": path.encode(), "headers": headers}
    async with contextlib.aclosing(call_app(app, scope, b"")) as lists:
        async for messages in lists:
            for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    answer_headers = list(message["headers"])
                body += message.get("body", b"")
    return status, answer_headers, body


class Forwarded(Response):
    """The response which a replica makes. Until a replica has sent something, another replica may take its place."""

    def __init__(self, call: Callable[[], Messages], *, timeout: float, request_id: str, has_types: bool):
        """Prepares the response.

        Args:
          call: puts the request to a replica; the messages' generator raises the exceptions of this module.
          timeout: seconds until a replica has to send something.
          request_id: the id of the request, for an error at the end of a stream.
          has_types: whether the events of a stream have types, as those of /v1/responses.
        """
        super().__init__()
        self._make_call = call
        self._timeout = timeout
        self._request_id = request_id
        self._has_types = has_types
        self._has_started = False
        self._is_stream = False
        self._is_complete = False
        self._first_event = b""
        self._num_events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, and ends the call if the client leaves."""
        for num_left in reversed(range(TRIES)):
            try:
                await while_connected(receive, self._pump(send))
                return
            except (ReplicaEnded, NoReplica, Busy, TimeoutError) as error:
                if self._has_started:
                    return await self._end(send, _failure(error))
                if not num_left or not isinstance(error, ReplicaEnded):
                    return await self._refuse(error, scope, receive, send)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        failed = _failure(error)
        body = {**failed.body, "request_id": self._request_id}
        await JSONResponse(body, failed.status, failed.headers)(scope, receive, send)

    async def _pump(self, send: Send) -> None:
        """Passes the messages of a replica on.

        Raises:
          ReplicaEnded: if the replica sends only a part of a response.
        """
        async with contextlib.aclosing(self._make_call()) as lists:
            async for messages in self._in_time(lists):
                for message in messages:
                    self._see(message)
                    await send(message)
        if not self._is_complete:
            raise ReplicaEnded("the replica sent only a part of its response")

    async def _in_time(self, lists: Messages) -> Messages:
        """Yields the same, and raises a TimeoutError if the first list takes too long."""
        async with asyncio.timeout(self._timeout):
            first = await anext(lists, None)
        if first is not None:
            yield first
        async for messages in lists:
            yield messages

    def _see(self, message: Message) -> None:
        self._has_started = True
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_stream = any(value.startswith(b"text/event-stream") for value in kinds)
            return
        self._is_complete = not message.get("more_body", False)
        if message.get("body"):
            self._first_event = self._first_event or message["body"].partition(_EVENT_END)[0]
            self._num_events += message["body"].count(_EVENT_END)

    async def _end(self, send: Send, failed: ApiError) -> None:
        """Ends a response that has begun: a stream by an event, any other response by the end of the connection."""
        if not self._is_stream:
            raise failed
        data = json.dumps(self._failed_event(failed))
        type_line = f"event: {_FAILED}\n" if self._has_types else ""
        await send({"type": "http.response.body", "body": f"{type_line}data: {data}\n\n".encode(), "more_body": False})

    def _failed_event(self, failed: ApiError) -> dict[str, Any]:
        """Returns the last event, as the server of a failed engine sends it."""
        if not self._has_types:
            return {**failed.body, "request_id": self._request_id}
        response = dict[str, Any]()
        with contextlib.suppress(ValueError):
            _, _, first = self._first_event.partition(b"data: ")
            response = json.loads(first or b"{}").get("response", {})
        return {
            "type": _FAILED,
            "response": {**response, "status": "failed", "error": {"code": "server_error", "message": str(failed)}},
            "request_id": self._request_id,
            "sequence_number": self._num_events,
        }


_FAILED = "response.failed"
_EVENT_END = b"\n\n"  # no data contain it


def _failure(error: Exception) -> ApiError:
    """Returns the API's error for a request which no replica has answered."""
    if isinstance(error, Busy):
        return busy(str(error))
    if isinstance(error, TimeoutError):
        headers = {"x-should-retry": "false"}
        return ApiError(504, "no replica answers", code="timeout", kind="server_error", headers=headers)
    headers = {"retry-after": str(RETRY_SECONDS)}
    return ApiError(503, str(error), code="engine_error", kind="server_error", headers=headers)
