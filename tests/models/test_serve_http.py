# SPDX-License-Identifier: Apache-2.0
"""Connections of the server against clients that send without an end, say nothing, or do not read; without a model."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time

import pytest

from models.serve_http import HEADER_BYTES, MIN_READ, HttpServer, Patience, only_hosts

SOON, LONG = 0.3, 30.0  # seconds of a limit that is to be reached, and of the others
PIECE = b"a" * MIN_READ
NUM_PIECES = 256  # more bytes than the buffers of a connection hold


async def app(scope, receive, send):
    """Answers with the number of bytes of the body, or with many bytes, at once or piece by piece."""
    if scope["type"] == "lifespan":
        return
    size, message = 0, {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * SOON)
    pieces = {"/whole": [PIECE * NUM_PIECES], "/pieces": [PIECE] * NUM_PIECES}.get(scope["path"], [str(size).encode()])
    headers = [(b"content-length", str(sum(map(len, pieces))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, piece in enumerate(pieces, 1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})


class Serving:
    """A server of `app` in a thread."""

    def __init__(self, patience, hosts=None):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.address = listening.getsockname()
        is_open = threading.Event()
        served = app if hosts is None else only_hosts(app, hosts)
        self.server = HttpServer(served, patience, opened=is_open.set, close=lambda: None)
        self._thread = threading.Thread(target=self.server.run, args=([listening],))
        self._thread.start()
        assert is_open.wait(10)

    def connect(self, *, receives=None):
        connection = socket.socket()
        if receives is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        connection.settimeout(10)
        connection.connect(self.address)
        return connection

    def ask(self, path="/", body=b"abc"):
        """The answer to a whole request."""
        with self.connect() as connection:
            connection.sendall(request_of(path, body, "connection: close"))
            return read_all(connection)

    @property
    def num_connections(self):
        return len(self.server.server_state.connections)

    def wait_for(self, holds):
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self):
        self.server.handle_exit(15, None)
        self._thread.join()


@contextlib.contextmanager
def serving(hosts=None, **patience):
    patience = {"header_seconds": LONG, "body_seconds": LONG, "read_seconds": LONG, "grace": 0, **patience}
    running = Serving(Patience(**patience), hosts)
    try:
        yield running
        running.wait_for(lambda: not running.num_connections and not running.server.server_state.waiting)
    finally:
        running.close()


def request_of(path, body, *headers):
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_all(connection):
    """The bytes up to the end of a connection, or to its reset."""
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return bytes(found)


def read_answer(connection):
    """One answer on a connection that stays open; its head and its body may come one after the other."""
    found = b""
    while not re.search(rb"\r\n\r\n\d+$", found):
        data = connection.recv(1 << 16)
        assert data, found
        found += data
    return found


def error_of(answer, status):
    """The error of an answer, which has the API's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    return json.loads(body)["error"]["message"]


def fits_limit(sent):
    return sent <= HEADER_BYTES + (4 << 20)  # the buffers of both sides


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", b"a" * 4096),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n" * 500),
        (b"GET /", b"a" * 4096),
        (b"", b"\r\n" * 1000),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 500),
    ],
    ids=["value", "headers", "path", "lines", "extension", "trailers"],
)
def test_headers_without_an_end_are_refused_while_others_are_answered(start, piece):
    with serving() as server, server.connect() as connection:
        sent = 0
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            while fits_limit(sent):
                connection.sendall(piece)
                sent += len(piece)
                if sent % (64 * len(piece)) == 0:
                    assert server.ask().endswith(b"3")
        assert fits_limit(sent)
        server.wait_for(lambda: not server.num_connections)


@pytest.mark.parametrize(("size", "status"), [(HEADER_BYTES - 100, b"200"), (HEADER_BYTES + 1, b"431")])
def test_headers_that_come_at_once_have_the_same_limit(size, status):
    with serving() as server, server.connect() as connection:
        connection.sendall(request_of("/", b"abc", f"x: {'a' * (size - 1)}", "connection: close"))
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 " + status)
        if status == b"431":
            assert error_of(answer, 431) == "the headers have more than 65,536 bytes"


HALF_HEADER, HALF_BODY = b"POST / HTTP/1.1\r\nhost", request_of("/", b"a" * 100)[:-1]
HALF_CHUNK = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab"


@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second of a connection"])
@pytest.mark.parametrize(
    ("limit", "data"),
    [
        ("header_seconds", b"\r\n"),
        ("header_seconds", HALF_HEADER),
        ("body_seconds", HALF_BODY),
        ("body_seconds", HALF_CHUNK),
    ],
)
def test_a_request_without_its_end_has_some_seconds(limit, data, is_second):
    with serving(**{limit: SOON}) as server:
        begun = time.monotonic()  # the limit of a first request counts from the connection
        with server.connect() as connection:
            if is_second:
                connection.sendall(request_of("/", b"abc"))
                assert read_answer(connection).endswith(b"3")
                time.sleep(2 * SOON)  # the limit is none on a connection without a request
                begun = time.monotonic()
            connection.sendall(data)
            assert error_of(read_all(connection), 408) == "the request did not come within 0.3 s"
            assert time.monotonic() - begun < LONG / 2
            assert is_second or time.monotonic() - begun >= SOON


def test_a_connection_that_says_nothing_has_some_seconds():
    with serving(header_seconds=SOON) as server, server.connect() as connection:
        assert error_of(read_all(connection), 408)


@pytest.mark.parametrize(("limit", "data"), [("header_seconds", HALF_HEADER), ("body_seconds", HALF_BODY)])
def test_bytes_one_by_one_give_no_more_time(limit, data):
    with serving(**{limit: SOON}) as server, server.connect() as connection:
        connection.sendall(data[:-5])
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in data[-5:]:
                connection.sendall(bytes([byte]))
                time.sleep(SOON / 2)
            connection.sendall(b"x" * 100)
        read_all(connection)
        assert time.monotonic() - begun < LONG / 2


def test_a_request_that_begins_during_an_answer_does_not_cut_it():
    with serving(header_seconds=SOON, body_seconds=SOON) as server, server.connect() as connection:
        connection.sendall(request_of("/slow", b"abc") + HALF_HEADER)
        answer = read_answer(connection)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"3")


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@pytest.mark.parametrize("reads", [False, True], ids=["nothing", "byte by byte"])
def test_a_client_that_hardly_reads_loses_its_connection(path, reads):
    with serving(read_seconds=SOON) as server, server.connect(receives=4096) as connection:
        connection.sendall(request_of(path, b""))
        server.wait_for(lambda: server.num_connections)
        begun = time.monotonic()
        while server.num_connections:
            assert time.monotonic() - begun < LONG / 2 and (not reads or connection.recv(1))
            time.sleep(SOON / 20)
        server.wait_for(lambda: not server.server.server_state.tasks)


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
def test_a_slow_one_gets_all(path):
    with serving(read_seconds=SOON) as server, server.connect() as connection:
        connection.sendall(request_of(path, b"", "connection: close"))
        found, begun = 0, time.monotonic()
        while data := connection.recv(1 << 17):
            found += len(data)
            time.sleep(SOON / 50)
        assert found > NUM_PIECES * MIN_READ and time.monotonic() - begun > 2 * SOON


def test_too_many_connections_end_the_one_that_has_waited_longest():
    with serving(connections=3) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(2)]
        silent[0].sendall(HALF_BODY)
        server.wait_for(lambda: server.num_connections == 2)
        slow = stack.enter_context(server.connect())
        slow.sendall(request_of("/slow", b"abc"))
        server.wait_for(lambda: len(server.server.server_state.waiting) == 2)
        assert server.ask().endswith(b"3")
        assert error_of(read_all(silent[0]), 503) == "too many connections are open"
        assert read_answer(slow).endswith(b"3")
        slow.sendall(request_of("/", b"abcd"))
        assert read_answer(slow).endswith(b"4")
        silent[1].sendall(request_of("/", b"ab", "connection: close"))
        assert read_all(silent[1]).endswith(b"2")
        slow.close()


def test_where_all_are_answered_the_next_connection_is_refused():
    with serving(connections=1) as server, server.connect() as slow:
        slow.sendall(request_of("/slow", b"abc", "connection: close"))
        server.wait_for(lambda: server.server.server_state.tasks)
        with server.connect() as other:
            assert error_of(read_all(other), 503)
        assert read_all(slow).endswith(b"3")


@pytest.mark.parametrize(
    "data",
    [b"hello\r\n\r\n", b"BREW / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03"],
)
def test_bytes_that_are_not_http_get_an_error_of_the_api(data):
    with serving() as server, server.connect() as connection:
        connection.sendall(data + b"\r\n\r\n")
        assert error_of(read_all(connection), 400) == "the request is not valid HTTP"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LocalHost:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("[::1]", 200),
        ("evil.example", 403), ("localhost.evil.example:80", 403), ("127.0.0.1.evil.example", 403),
    ],
)  # fmt: skip
def test_another_host_is_refused(host, status):
    with serving(hosts=["localhost", "127.0.0.1", "::1"]) as server, server.connect() as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        answer = read_all(connection)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        if status == 403:
            assert error_of(answer, 403).endswith("is not one of --allowed-hosts")
