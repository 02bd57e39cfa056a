# SPDX-License-Identifier: Apache-2.0
"""Clients that go away at any stage of a request: what is done for them ends within two turns, and leaves nothing."""

import collections
import concurrent.futures
import random
import socket
import struct
import time

import httpx
import pytest

from tests import drive
from tests.models.serve_kit import GREEDY, LONG, MAX_OPEN, ON, PATIENCE, idle, request_of

N, NEW = 4, 40


def body_of(prompt="alice is in", *, streams=False, **fields):
    return {"prompt": prompt, "n": N, "max_tokens": NEW, "stream": streams, **ON, **GREEDY, **fields}


STAGES = {
    "prefill": lambda watch: watch.handles and watch.handles[0].times.admitted and not any(watch.lengths),
    "the first token": lambda watch: max(watch.lengths, default=0) >= 1,
    "the middle": lambda watch: max(watch.lengths, default=0) >= NEW // 2,
    "the last tokens": lambda watch: max(watch.lengths, default=0) >= NEW - 2,
}
each_way = pytest.mark.parametrize("streams", [False, True])


@pytest.mark.long
@each_way
@pytest.mark.parametrize("stage", STAGES)
def test_two_turns_after_a_client_has_gone_its_rows_are_free(server, watch, stage, streams):
    watch.hold(lambda: STAGES[stage](watch))
    prompt = LONG if stage == "prefill" else "alice is in"
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(prompt, streams=streams)))
        watch.wait()
        assert server.engine.running == N
    server.wait_for(lambda: len(watch.cancels) == N)
    assert {*watch.cancels} == {len(watch.rows)} and watch.rows[-1] > 0
    watch.go()
    idle(server)
    assert watch.rows[watch.cancels[0] + 1] == 0
    if stage != "the last tokens":
        assert {handle.output.finish for handle in watch.handles} == {"cancelled"}
    assert len(watch.cancels) == N


@pytest.mark.long
@each_way
@pytest.mark.parametrize("has_slot", [False, True])
def test_a_client_that_goes_away_while_it_waits_gets_no_row(server, watch, has_slot, streams):
    """It waits for the scheduler, or has a slot of it already and waits for one of the rows, which others have."""
    others = [drive.ask(server.engine, [5], max_new_tokens=1000) for _ in range(8)]
    server.wait_for(lambda: all(handle.output.tokens for handle in others))
    watch.handles.clear()

    def holds():
        return not has_slot or (len(watch.handles) == N and server.engine.running == len(others) + N)

    watch.hold(holds)
    if not has_slot:
        watch.wait()
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(streams=streams)))
        if has_slot:
            watch.wait()
        server.wait_for(lambda: len(watch.handles) == N)
        assert server.engine.waiting == (0 if has_slot else N)
    server.wait_for(lambda: len(watch.cancels) == N)
    watch.go()
    for handle in watch.handles:
        output = handle.result(PATIENCE)
        assert (output.finish, output.tokens, handle.times.admitted) == ("cancelled", [], None)
    assert not any(handle.done for handle in others)
    for handle in others:
        handle.cancel()
    idle(server)


@pytest.mark.long
def test_a_client_that_goes_away_amid_its_request_has_submitted_nothing(server, watch):
    data = request_of("/v1/completions", body_of())
    for size in (10, data.index(b"\r\n\r\n") + 4, len(data) - 1):
        with server.connect() as connection:
            connection.sendall(data[:size])
        assert httpx.get(f"{server.url}/health").status_code == 200
    server.wait_for(lambda: server.connections == (0, 0))
    idle(server)
    assert watch.handles == watch.rows == []


@pytest.mark.long
@each_way
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_goes_away_after_the_end_cancels_nothing(server, watch, reads, streams):
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(streams=streams)))
        if reads:
            found = b""
            while not found.rstrip().endswith(b"\r\n0" if streams else b"}"):
                found += connection.recv(1 << 16)
            assert found.count(b'"length"') == N and (b"[DONE]" in found) == streams
        server.wait_for(lambda: len(watch.handles) == N and all(handle.done for handle in watch.handles))
    idle(server)
    assert not watch.cancels
    assert {handle.output.finish for handle in watch.handles} == {"length"}


@pytest.mark.long
@each_way
def test_also_while_turns_are_long_they_are_free_two_turns_after(server, watch, streams):
    """If all rows are in use turns have many steps, the most where nobody reads the tokens as they come."""
    watch.hold(lambda: min(watch.lengths, default=0) > 40)
    with server.connect() as connection:
        connection.sendall(request_of("/v1/completions", body_of(n=8, max_tokens=900, streams=streams)))
        watch.wait()
    server.wait_for(lambda: len(watch.cancels) == 8)
    watch.go()
    idle(server)
    assert watch.rows[watch.cancels[0] + 1] == 0
    assert max(watch.lengths) < 900 and (streams or max(watch.lengths) > 100)


LESS, MORE = pytest.param(100, marks=pytest.mark.long), pytest.param(2000, marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [LESS, MORE])
def test_many_clients_that_go_away_at_random_leave_nothing(server, watch, number):
    """Some end their requests amid them, some connections with a reset, and one in ten stays until its answer's end."""

    def leave(seed):
        rng = random.Random(seed)
        body = body_of(streams=rng.random() < 0.5, n=rng.randint(1, N), max_tokens=rng.randint(1, 60))
        with server.connect() as connection:
            if seed % 10 == 0:
                connection.sendall(request_of("/v1/completions", body, "connection: close"))
                while connection.recv(1 << 16):
                    pass
                return
            data = request_of("/v1/completions", body)
            connection.sendall(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
            time.sleep(rng.choice([0, rng.uniform(0, 0.3)]))
            if rng.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with concurrent.futures.ThreadPoolExecutor(MAX_OPEN // N) as threads:
        list(threads.map(leave, range(number)))
    server.wait_for(lambda: server.connections == (0, 0))
    idle(server)
    finishes = collections.Counter(handle.output.finish for handle in watch.handles)
    print(finishes)
    assert set(finishes) == {"cancelled", "length"}
    assert finishes["cancelled"] <= len(watch.cancels) <= len(watch.handles)
