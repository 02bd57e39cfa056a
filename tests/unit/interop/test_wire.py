# SPDX-License-Identifier: Apache-2.0
"""Publishers and subscribers over real sockets: messages, replays, and restarted, foreign, slow and silent peers."""

import contextlib
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
import zmq

import kvjax
from kvjax.interop.sockets import END
from kvjax.interop.vllm import Curve, Subscriber
from kvjax.interop.vllm import publisher as publishers
from tests.drive import ROOT
from tests.unit.interop.forest import Forest, arrays_of, namespaces, projected
from tests.wire_kit import (
    ANY,
    CHAIN,
    LONG,
    PLAIN,
    Lossy,
    agrees,
    eventually,
    hurried,
    publisher,
    removed,
    stored,
    subscriber,
    whole,
)

__all__ = ["hurried"]


@contextlib.contextmanager
def raw(kind, endpoint, **options):
    """A plain socket, of a reader without kvjax."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        yield socket


def ask(socket, start=0):
    socket.send_multipart([b"", start.to_bytes(8, "big")])


def answers(socket, timeout=LONG):
    """The (number, payload) of a replay, up to its end."""
    found = []
    while socket.poll(int(1000 * timeout)):
        *_, number, payload = socket.recv_multipart()
        if number == END:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError(f"the end does not come after {len(found)} answers")


def decoded(payload):
    return msgspec.msgpack.decode(payload)[1]


# The law.


# Publishers.


def test_subscribers_follow_a_publisher_that_replaces_another():
    """Its cache has changed meanwhile. One of them loses messages."""
    forest, names = Forest(PLAIN, 1), namespaces()
    with publisher(names=names) as first, contextlib.ExitStack() as stack:
        subs = [stack.enter_context(subscriber(first, replay_timeout=1.0)) for _ in range(2)]
        Lossy(subs[1], 1)
        first.publish(arrays_of(forest.draw(30), PLAIN))
        assert all(agrees(sub, projected(forest.mirror, PLAIN, names)) for sub in subs)
        stack = stack.pop_all()
    with publisher(names=names, bind=first.endpoint, replay=first.replay_endpoint) as second, stack:
        forest.draw(20)  # nobody gets these
        for node in whole(forest):
            second.publish([node])
        second.publish(arrays_of(forest.draw(10), PLAIN))
        assert all(agrees(sub, projected(forest.mirror, PLAIN, names)) for sub in subs)


def test_the_first_message_clears_and_empty_batches_follow():
    with publisher(first_seq=1000, topic="kv@pod@model") as source, raw(zmq.DEALER, source.replay_endpoint) as socket:
        with raw(zmq.SUB, source.endpoint) as listener:
            listener.subscribe(b"kv@")
            assert listener.poll(int(1000 * LONG))
            topic, number, payload = listener.recv_multipart()
        is_first = int.from_bytes(number, "big") == 1000  # a subscriber may be there before anything is sent
        assert topic == b"kv@pod@model" and decoded(payload) == ([{"type": "AllBlocksCleared"}] if is_first else [])
        ask(socket)
        found = answers(socket)
    assert found[0][0] == 1000 and decoded(found[0][1]) == [{"type": "AllBlocksCleared"}]
    assert [number for number, _ in found] == list(range(1000, 1000 + len(found)))
    assert all(isinstance(msgspec.msgpack.decode(payload)[0], float) for _, payload in found)


def test_numbers_begin_at_the_clock_and_topics_name_the_pod():
    before = time.time_ns() // 1000
    with publisher(model="llama") as source, raw(zmq.DEALER, source.replay_endpoint) as socket:
        ask(socket)
        assert before <= answers(socket)[0][0] <= time.time_ns() // 1000
        assert source.topic.decode() == f"kv@{source.endpoint.removeprefix('tcp://')}@llama"
    with publisher(bind=None, replay=None, connect="tcp://127.0.0.1:9") as source:
        assert source.topic.startswith(b"kv@") and source.topic.endswith(b"@") and source.replay_endpoint is None


def test_answers_of_0_11_have_no_topic():
    with publisher(replay_form="0.11") as source, raw(zmq.DEALER, source.replay_endpoint) as socket:
        ask(socket)
        assert socket.poll(int(1000 * LONG)) and len(socket.recv_multipart()) == 3
        with subscriber(source) as sub:
            source.publish(CHAIN)
            assert sub.wait(lambda one: one.complete and len(one) == 2, LONG)


def test_one_call_is_one_batch_and_events_may_be_donated():
    with publisher(heartbeat=None) as source, raw(zmq.DEALER, source.replay_endpoint) as socket:
        events = arrays_of(CHAIN, PLAIN)
        source.publish(events)
        events.records[:] = -1
        source.publish([])
        source.publish([stored(2, 1, 0, [1])])  # nothing for this wire
        source.publish(removed(1, 1) for _ in range(1))
        assert source.flush(LONG)
        ask(socket)
        kinds = [[event["type"] for event in decoded(payload)] for _, payload in answers(socket)]
    assert kinds == [["AllBlocksCleared"], ["BlockStored"], ["BlockRemoved"]]


def test_a_reader_has_followed_when_its_last_number_is_the_publishers():
    with publisher(heartbeat=None) as source, subscriber(source) as sub:
        for event in CHAIN:
            source.publish([event])
        assert source.flush(LONG) and source.last > 0
        assert sub.wait(lambda one: one.last == source.last, LONG) and len(sub) == 2


def test_sockets_of_this_machine_and_encrypted_ones(tmp_path):
    local = {"bind": f"ipc://{tmp_path}/events", "replay": f"ipc://{tmp_path}/replay"}
    server, client = (zmq.curve_keypair() for _ in range(2))
    for options, theirs in ((local, None), ({"curve": Curve(*server)}, Curve(*client, server[0]))):
        with publisher(**options) as source, subscriber(source, curve=theirs) as sub:
            source.publish(CHAIN)
            assert sub.wait(lambda one: one.complete and len(one) == 2, LONG)
            if theirs:
                with subscriber(source, curve=Curve(*client, client[0])) as stranger:
                    assert not stranger.wait(lambda one: one.counts["messages"] or one.complete, 0.5)


def test_a_subscriber_may_bind_for_publishers_that_connect():
    with Subscriber(ANY, bind=True) as sub, publisher(bind=None, connect=sub.endpoint, replay=None) as source:
        assert sub.wait(lambda one: one.counts["messages"] > 0, LONG)
        source.publish(CHAIN)
        assert sub.wait(lambda one: len(one) == 2, LONG)


def test_lookups_name_salts_as_the_publisher_does():
    names = kvjax.Namespaces()
    store = [stored(1, 1, names(salt="tenant a"), [1] * 4), stored(2, 1, names(lora=3), [2] * 4)]
    for options in ({}, {"key": b"secret"}, {"salts": "plain"}):
        with publisher(names=names, lora_names={3: "sql"}, **options) as source, subscriber(source, **options) as sub:
            source.publish(store)
            assert sub.wait(lambda one: len(one) == 2, LONG)
            assert sub.lookup([1] * 5, salt="tenant a") == (4, {"GPU": 4}) == sub.lookup([2] * 4, lora="sql")
            assert sub.lookup([1] * 5).tokens == sub.lookup([1] * 5, salt="b").tokens == sub.lookup([2] * 4).tokens == 0


# Replays.


def test_replays_wait_their_turn_and_always_end(monkeypatch):
    monkeypatch.setattr(publishers, "WAITING_OF_PEER", 2)
    monkeypatch.setattr(publishers, "INTERVAL", 0.3)
    with publisher() as source, raw(zmq.DEALER, source.replay_endpoint) as socket:
        source.publish(CHAIN)
        assert source.flush(LONG)
        for _ in range(8):
            ask(socket)
        found = [len(answers(socket)) for _ in range(8)]
        assert found.count(0) >= 4 and sum(map(bool, found)) >= 2
        assert source.counts["replays_refused"] == found.count(0)
        assert eventually(lambda: source.counts["replays"] == 8 - found.count(0))


def test_many_peers_at_once_are_answered():
    with publisher() as source, contextlib.ExitStack() as stack:
        source.publish(CHAIN)
        assert source.flush(LONG)
        peers = [stack.enter_context(raw(zmq.DEALER, source.replay_endpoint)) for _ in range(12)]
        for peer in peers:
            ask(peer)
        assert all(len(answers(peer)) >= 2 for peer in peers)


@pytest.mark.long
def test_four_replays_run_at_a_time_and_peers_that_do_not_read_are_given_up():
    """A peer that reads late gets all. A plain ROUTER silently drops messages beyond its queue."""
    spec, small = kvjax.make_spec(num_blocks=2, max_seqs=1, max_length=2048, block_size=2048), {"rcvhwm": 10}
    with publisher(spec, replay_timeout=1.5, heartbeat=None) as source, contextlib.ExitStack() as stack:
        for number in range(1000):  # 10 MB: more than the system buffers between the two
            source.publish([stored(0, number, 0, [2**20 + number] * 2048), removed(0, number)])
        assert source.flush(LONG)
        late, *deaf, fifth = (
            stack.enter_context(raw(zmq.DEALER, source.replay_endpoint, rcvbuf=4096, **small)) for _ in range(5)
        )
        for peer in (late, *deaf):
            ask(peer)
        time.sleep(0.3)  # they have the messages that the system buffered
        ask(fifth, 2**64 - 1)
        assert not fifth.poll(500)
        numbers = [number for number, _ in answers(late)]
        assert len(numbers) == 1001 and numbers == list(range(numbers[0], numbers[0] + 1001))
        assert answers(fifth) == [] and eventually(lambda: source.counts["replays_given_up"] == 3)


def test_what_is_no_request_is_refused():
    with publisher() as source, raw(zmq.DEALER, source.replay_endpoint) as socket:
        for frames in ([b""], [b"", b"1234567"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", b""], [bytes(8)]):
            socket.send_multipart(frames)
        socket.send_multipart([b""] * 1000)
        ask(socket, 2**63)
        assert answers(socket) == [] and source.counts["requests_refused"] == 7
        with raw(zmq.DEALER, source.replay_endpoint) as large:
            large.send_multipart([b"", bytes(65)])  # the connection ends
            ask(socket)
            assert answers(socket) and not large.poll(200)


# Messages of others.


@pytest.fixture(scope="module")
def beset():
    """A subscriber to which others can publish, too, and the publisher whose cache it mirrors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishers, "INTERVAL", 0.01)
        with Subscriber(ANY, bind=True, max_message=1 << 16) as placed:
            endpoint = placed.endpoint
        with publisher(bind=None, connect=endpoint) as source, contextlib.ExitStack() as stack:
            sub = stack.enter_context(Subscriber(endpoint, source.replay_endpoint, bind=True, max_message=1 << 16))
            stranger = stack.enter_context(raw(zmq.PUB, endpoint))
            source.publish(CHAIN)
            assert sub.wait(lambda one: one.complete and len(one) == 2, LONG)
            until = time.monotonic() + LONG
            while not sub.counts["refused"] and time.monotonic() < until:
                stranger.send(b"")
                time.sleep(0.01)
            yield source, sub, stranger


RIGHT = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None,
                                       "token_ids": [9] * 4, "block_size": 4, "lora_id": None, "medium": "GPU",
                                       "lora_name": None}], 0])  # fmt: skip


@st.composite
def strange(draw):
    """Messages that are truncated, oversized or foreign, or have false lengths or numbers."""
    payload = draw(st.one_of(st.just(RIGHT), st.binary(max_size=40), st.just(b"\xdd\xff\xff\xff\xff" + bytes(9))))
    payload = bytearray(payload[: draw(st.integers(0, len(payload)))])
    for _ in range(draw(st.integers(0, 3)) if payload else 0):
        payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
    number = draw(st.sampled_from([0, 1, 5, 2**40, 2**63, 2**64 - 1])).to_bytes(8, "big")
    number = number[: draw(st.sampled_from([8, 8, 8, 8, 7, 0]))]
    frames = [b"kv@x@y", number, bytes(payload) * draw(st.sampled_from([1, 1, 1, 2]))]
    return [*frames[: draw(st.integers(1, 3))], *draw(st.sampled_from([[], [], [b""], [b"x"] * 500]))]


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(strange(), min_size=1, max_size=4))
def test_messages_of_others_leave_the_mirror_right(beset, messages):
    source, sub, stranger = beset
    wanted, before = projected(kvjax.fold(CHAIN), PLAIN, kvjax.Namespaces()), sub.counts
    for frames in messages:
        stranger.send_multipart(frames)
    stranger.send_multipart([b"the", b"last", b"one"])

    def followed(one):
        return sum(one.counts.values()) > sum(before.values()) and one.complete and one.index == wanted

    assert sub.wait(followed, LONG), (sub.counts, sub.index)
    assert source.counts["replays_given_up"] == 0


def test_a_message_that_is_too_large_ends_its_connection_alone(beset):
    source, sub, stranger = beset
    stranger.send_multipart([b"kv@x@y", bytes(8), bytes(1 << 17)])
    source.publish([stored(2, 1, 0, [3] * 4)])
    assert sub.wait(lambda one: one.complete and len(one) == 3, LONG)
    source.publish([removed(2, 1)])
    assert sub.wait(lambda one: one.complete and len(one) == 2, LONG)


KILLED = """
import sys, time
from kvjax.interop.vllm import Publisher
from tests.wire_kit import PLAIN, stored

source = Publisher(PLAIN, bind=sys.argv[1], replay=sys.argv[2], heartbeat=0.1)
source.publish([stored(0, 1, 0, [1] * 4)])
print(source.endpoint, source.replay_endpoint, flush=True)
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "given", [pytest.param({}, marks=pytest.mark.slow), {"heartbeat": 0.1}], ids=["as they come", "given"]
)
def test_a_mirror_of_a_publisher_that_is_killed_is_not_complete(given):
    """Its last mirror stays, and is complete again when a publisher comes back at the same address."""
    addresses = [ANY, ANY]
    with contextlib.ExitStack() as stack:
        for run in range(2):
            command = [sys.executable, "-c", KILLED, *addresses]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            addresses = process.stdout.readline().split()
            if not run:
                sub = stack.enter_context(Subscriber(*addresses, **given))
            assert sub.wait(lambda one: one.complete and len(one) == 1 and one.counts["messages"] > 3, LONG)
            time.sleep(0.6)
            assert sub.complete and not sub.is_silent and sub.age < 0.3
            process.kill()
            process.wait()
            assert sub.wait(lambda one: not one.complete, 5.0) and sub.is_silent and sub.age > 0.3 and len(sub) == 1


def test_a_publisher_without_heartbeats_is_never_silent():
    with publisher(heartbeat=None) as source, subscriber(source) as sub:
        source.publish([stored(0, 1, 0, [1] * 4)])
        assert sub.wait(lambda one: one.complete and len(one) == 1, LONG)
        time.sleep(0.5)
        assert sub.complete and not sub.is_silent and sub.age > 0.4
    with pytest.raises(ValueError, match=r"^heartbeat: got 0, wanted more than 0"):
        Subscriber("tcp://127.0.0.1:9", heartbeat=0)
