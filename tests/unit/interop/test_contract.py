# SPDX-License-Identifier: Apache-2.0
"""The contract of all wires: what readers have, attach, impossible events, queues, ends, options, addresses.

The wires and their readers are in `tests/wire_kit.py`; the other files of tests say only what is of one wire alone.
"""

import re
import threading
import time

import hypothesis
import hypothesis.strategies as st
import pytest

import kvjax
from kvjax.events import NodeMap
from tests.drive import PLAIN
from tests.unit.debug import stories
from tests.unit.interop.forest import SHAPES, Forest, arrays_of, namespaces, spec_of
from tests.wire_kit import CHAIN, LONG, File, Grpc, Zmq, all_wires, eventually, hurried, removed, stored

__all__ = ["hurried"]
OTHER = kvjax.make_spec(num_blocks=1, max_seqs=1, max_length=1)
each = pytest.mark.parametrize("wire", [Zmq, Grpc, File])
each_with_a_thread = pytest.mark.parametrize("wire", [Zmq, Grpc])
each_story = pytest.mark.parametrize(
    "story", [stories.plain, pytest.param(stories.tiers, marks=pytest.mark.slow)], ids=["plain", "tiers"]
)
NO_NODE = r"^events: got removed of node \(0, 7, 7\), wanted a node of the map"


# The law: readers have what is cached.


def law(shape, seed, rounds, **options):
    """Runs a history whose readers are early, late, or lose messages; returns the counts of both threads."""
    spec, names, forest = spec_of(shape), namespaces(), Forest(spec_of(shape), seed)
    extra_name = "image {}".format if shape == "extra ids" else None
    with all_wires(spec, names, key=b"secret", extra_name=extra_name, **options) as wires:
        for number in range(rounds):
            for _ in range(5):
                wires.publish(arrays_of(forest.draw(forest.rng.randrange(1, 8)), spec))
            if number == rounds // 2:
                wires.join()
            if number % 3 == 2 or number == rounds - 1:
                wires.agree(forest.mirror)
        assert wires.agent.counts["subscriptions"] == len(wires.readers) and (wires.lossy.lost or rounds > 4)
        return wires.source.counts, wires.agent.counts


@pytest.mark.parametrize("shape", SHAPES)
def test_readers_have_what_is_cached(shape):
    law(shape, 1, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"buffer_batches": 3}, {"buffer_bytes": 1500}, {"max_message": 2200}, {"queue_bytes": 1}],
    ids=["few batches are kept", "few bytes are kept", "small messages", "no queue"],
)
def test_it_is_so_with_short_queues(options):
    for counts in law("windows", 2, 4, **options):
        assert counts["overflows"] > 10 if "queue_bytes" in options else counts["overflows"] == 0


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    st.sampled_from(sorted(SHAPES)), st.integers(0, 10**6),
    st.sampled_from([{}, {"buffer_batches": 2}, {"queue_bytes": 1}]),
)  # fmt: skip
def test_it_is_so_for_other_histories(shape, seed, options):
    law(shape, seed, 8, **options)


# Caches with contents.


@each
@each_story
def test_a_wire_is_attached_to_a_cache(wire, story):
    """Also a wire that had another cache, and one that got impossible events."""
    state, mirror, nothing = story().state, story().mirror, kvjax.events.Mirror()
    with wire.make(state.spec) as source, wire.read(source) as reader:
        source.publish([stored(0, 9, 0, [1] * state.spec.block_size)])
        source.attach(state)
        assert mirror.index and wire.agrees(reader, mirror, state.spec)
        if wire is File:
            with pytest.raises(ValueError, match=r"^events: got removed of node"):
                source.publish([removed(77, 1)])
        else:
            source.publish([removed(77, 1)])
            assert wire.agrees(reader, nothing, state.spec)
        source.attach(state)
        assert wire.agrees(reader, mirror, state.spec)
        with pytest.raises(ValueError, match=r"^state: got a cache of CacheSpec.*, wanted one of CacheSpec"):
            source.attach(kvjax.init(OTHER))
        assert wire.agrees(reader, mirror, state.spec)
    if wire is not File:
        with pytest.raises(ValueError, match=r"^publish: got events after `close`, wanted an open"):
            source.attach(state)


@each_story
def test_a_map_is_attached_to_a_cache(story):
    state, mirror = story().state, story().mirror
    nodes = NodeMap(state.spec)
    nodes.fold([stored(0, 9, 0, [1] * state.spec.block_size)])  # which the cache does not have
    nodes.attach(state)
    assert nodes.index == kvjax.events.index_of(state)
    children_first = sorted(mirror.nodes, key=lambda node: (-len(mirror.nodes[node][1]), -node[0]))
    nodes.fold([removed(*node[1:], node[0]) for node in children_first])
    assert not nodes.index
    with pytest.raises(ValueError, match=r"^state: got a cache of CacheSpec.*, wanted one of CacheSpec"):
        NodeMap(OTHER).attach(state)
    with pytest.raises(ValueError, match=r"^state: got a Cache"):
        NodeMap(PLAIN).attach(kvjax.Cache.create(PLAIN))


# Events that cannot have happened, and what is none.


@each_with_a_thread
@pytest.mark.parametrize("queue_bytes", [64 << 20, 1], ids=["queued", "folded by the caller"])
def test_impossible_events_never_reach_the_caller(wire, queue_bytes, caplog):
    source, whole, nothing = wire.make(queue_bytes=queue_bytes), kvjax.fold(CHAIN), kvjax.events.Mirror()
    with wire.read(source) as reader:
        source.publish(CHAIN)
        assert wire.agrees(reader, whole)
        source.publish([removed(7, 7)])
        assert wire.agrees(reader, nothing)
        source.publish(CHAIN)
        assert source.flush(LONG) and source.counts["ignored"] == 1 and wire.agrees(reader, nothing)
    assert [record.name for record in caplog.records] == ["kvjax.interop"]
    with pytest.raises(ValueError, match=NO_NODE):
        source.close()
    source.close()


def test_impossible_events_reach_the_caller_of_a_file():
    with File.make() as source:
        source.publish(CHAIN)
        with pytest.raises(ValueError, match=NO_NODE):
            source.publish([removed(7, 7)])
        with pytest.raises(ValueError, match=r"^events: got events after impossible events, wanted `attach"):
            source.publish([])


@each
def test_what_is_no_event_is_the_callers_error(wire):
    with wire.make() as source, pytest.raises(ValueError, match=r"^events: got NoneType, wanted Events"):
        source.publish(None)
    if wire is not File:
        with pytest.raises(ValueError, match=r"^publish: got events after `close`, wanted an open"):
            source.publish(CHAIN)


@each_with_a_thread
def test_an_error_in_a_with_block_is_not_hidden(wire):
    def fails():
        with wire.make() as source:
            source.publish([removed(7, 7)])
            assert source.flush(LONG)
            raise KeyError

    with pytest.raises(KeyError):
        fails()


# Queues and ends.


@each_with_a_thread
def test_the_caller_does_not_wait_for_a_resync(wire, monkeypatch):
    """A snapshot replaces the messages that do not fit the queue. It is updated while it waits."""
    with wire.make(queue_bytes=1) as source, wire.read(source) as reader:
        assert source.flush(LONG)
        resync, began, go_on = source._resync, threading.Event(), threading.Event()

        def slow(nodes):
            began.set()
            assert go_on.wait(LONG)
            resync(nodes)

        monkeypatch.setattr(source, "_resync", slow)
        source.publish(CHAIN[:1])
        assert began.wait(LONG)
        source.publish(CHAIN[1:])  # would wait for ever
        source.publish(last := [stored(2, 1, 0, [9] * 4), removed(1, 1)])
        assert source.counts["overflows"] == 3
        go_on.set()
        assert wire.agrees(reader, kvjax.fold([*CHAIN, *last]))


@each_with_a_thread
def test_close_sends_what_is_queued_within_its_time(wire, monkeypatch):
    source = wire.make(heartbeat=None)
    with wire.read(source) as reader:
        assert wire.agrees(reader, kvjax.events.Mirror())
        for event in CHAIN:
            source.publish([event])
        source.close()
        assert wire.agrees(reader, kvjax.fold(CHAIN))
    slow = wire.make()
    assert slow.flush(LONG)
    monkeypatch.setattr(slow._encoder, "messages", lambda changes: time.sleep(0.3) or [])
    for event in [*CHAIN, removed(1, 1)]:
        slow.publish([event])
    with pytest.raises(TimeoutError, match=r"^close: timed out after 0.1 s with [123] batches unsent"):
        slow.close(0.1)


@each_with_a_thread
def test_threads_end_with_their_owners(wire):
    before = set(threading.enumerate())
    with wire.make() as source, wire.read(source) as reader:
        assert wire.agrees(reader, kvjax.events.Mirror())
        assert {thread.name for thread in set(threading.enumerate()) - before} >= wire.threads
    assert eventually(lambda: set(threading.enumerate()) <= before)


# Options.


@each_with_a_thread
def test_an_address_that_is_taken_is_named(wire):
    with wire.make() as source:
        options, complaint = wire.taken(source)
        with pytest.raises(OSError, match=f"^{re.escape(complaint)}"):
            wire.make(**options)


KEY = {"key": b"k" * 65}, "key: got 65 bytes, wanted at most 64 bytes"
SALTS = {"salts": "md5"}, "salts: got 'md5', wanted 'digest' or 'plain' or 'omit'"
RANK = {"rank": -1}, "rank: got -1, wanted an int of at least 0"
HEARTBEAT = {"heartbeat": 0}, "heartbeat: got 0, wanted more than 0"
QUEUE = {"queue_bytes": -1}, "queue_bytes: got -1, wanted more than 0"
WRONG = {
    Zmq: [
        KEY, SALTS, RANK, HEARTBEAT, QUEUE, ({"rank": None}, "rank: got None, wanted an int of at least 0"),
        ({"bind": "127.0.0.1:5557"}, "bind: got '127.0.0.1:5557', wanted tcp://HOST:PORT or ipc://PATH"),
        ({"bind": "inproc://a"}, "bind: got 'inproc://a', wanted"),
        ({"connect": "tcp://127.0.0.1:9"}, "connect: got 'tcp://127.0.0.1:9' and bind="),
        ({"replay": "tcp://nobody"}, "replay: got 'tcp://nobody', wanted"),
        ({"replay_form": "0.10"}, "replay_form: got '0.10', wanted '' or '0.11'"),
        ({"form": "json"}, "form: got 'json', wanted 'map' or 'array' or 'array-0.11'"),
        ({"first_seq": -1}, "first_seq: got -1, wanted an int of at least 0"),
        ({"buffer_bytes": None, "buffer_batches": 1.5}, "buffer_batches: got 1.5, wanted an int of at least 0"),
        ({"lora_names": {1: "a", 2: "a"}}, "lora_names: got .*, wanted a different name for each adapter"),
        ({"model": 3}, "model: got 3, wanted text or None"),
        ({"max_message": 100}, "max_message: got 100, wanted an int of at least 2164"),
    ],
    Grpc: [
        KEY, HEARTBEAT, QUEUE, ({"port": "50051"}, "port: got '50051', wanted an int of at least 0"),
        ({"max_subscribers": 0}, "max_subscribers: got 0, wanted an int of at least 1"),
        ({"max_behind": True}, "max_behind: got True, wanted an int of at least 1"),
    ],
    File: [KEY, SALTS, RANK, ({"rank": True}, "rank: got True, wanted")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("wire", "options", "complaint"), [(wire, *wrong) for wire, wrongs in WRONG.items() for wrong in wrongs]
)
def test_options_are_checked(wire, options, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        wire.make(**options)
