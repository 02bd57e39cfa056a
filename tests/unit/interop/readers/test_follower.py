# SPDX-License-Identifier: Apache-2.0
"""A follower without sockets: gaps, duplicates, restarts, messages of others, and replays."""

import dataclasses
import tracemalloc

import msgspec
import pytest

from kvjax.interop.readers import subscriber
from kvjax.interop.readers.subscriber import Follower
from kvjax.interop.sockets import END
from kvjax.interop.vllm import Encoder
from tests.unit.interop.forest import spec_of
from tests.wire_kit import stored

SPEC = spec_of("plain")
EMPTY = msgspec.msgpack.encode([1.0, [], 0])


def message(number, payload=EMPTY):
    return [b"topic", number.to_bytes(8, "big"), payload]


def stores(first, count):
    """The payloads that store so many prompts of one block, each in its own message."""
    encoder = Encoder(SPEC)
    cleared = encoder.snapshot()
    found = [encoder.encode([stored(b, 1, 0, [b] * 4)])[0] for b in range(first + count)]
    return [*cleared, *found]


PAYLOADS = stores(0, 6)


def follower(replays=True, upto=0):
    """A follower that has everything up to a message; numbers begin at 100."""
    one = Follower(replays, 1000)
    if replays:
        replay(one, range(upto))
    else:
        for at in range(upto):
            one.receive(message(100 + at, PAYLOADS[at]))
    return one


def replay(one, which, end=True, frames=4):
    for at in which:
        one.receive_replay([b"", *message(100 + at, PAYLOADS[at])][-frames:] if frames == 4 else
                   [b"", *message(100 + at, PAYLOADS[at])[1:]])  # fmt: skip
    if end:
        one.receive_replay([b"", b"topic", END, b""] if frames == 4 else [b"", END, b""])


def mirrored(one):
    """The first tokens of the mirrored blocks."""
    return sorted(prefix.tokens[0] for prefix in one.mirror.index)


@pytest.mark.parametrize("frames", [4, 3])
def test_it_begins_with_a_replay(frames):
    one = Follower(True, 1000)
    assert one.replay_from == 0 and not one.complete
    one.receive(message(103, PAYLOADS[3]))
    one.receive(message(104, PAYLOADS[4]))
    assert mirrored(one) == []
    replay(one, range(4), frames=frames)
    assert one.replay_from is None and one.complete and one.last == 104 and mirrored(one) == [0, 1, 2, 3]


def test_a_gap_is_filled():
    one = follower(upto=2)
    one.receive(message(104, PAYLOADS[4]))
    assert one.replay_from == 102 and mirrored(one) == [0]
    one.receive(message(105, PAYLOADS[5]))
    replay(one, range(2, 5))
    assert one.complete and mirrored(one) == [0, 1, 2, 3, 4] and one.counts["gaps"] == 1


def test_what_the_publisher_no_longer_has_comes_as_a_resync():
    one = follower(upto=2)
    one.receive(message(105, PAYLOADS[5]))
    encoder = Encoder(SPEC)
    encoder.encode([stored(b, 1, 0, [b] * 4) for b in (1, 2, 3)])  # 0 was dropped
    [resync] = encoder.snapshot()
    one.receive_replay([b"", *message(104, resync)])
    replay(one, [5])
    assert one.complete and mirrored(one) == [1, 2, 3, 4] and one.last == 105


def test_a_message_of_the_future_is_not_believed():
    one = follower(upto=3)
    one.receive(message(900, PAYLOADS[5]))
    assert one.replay_from == 103
    replay(one, [])
    assert one.complete and one.last == 102 and mirrored(one) == [0, 1] and one.counts["refused"] == 1
    one.receive(message(103, PAYLOADS[3]))
    assert mirrored(one) == [0, 1, 2] and one.replay_from is None


def test_a_publisher_that_counts_anew_is_believed_if_its_replay_says_so():
    one = follower(upto=4)
    encoder = Encoder(SPEC)
    first, second = encoder.encode([stored(1, 1, 0, [9] * 4)]), encoder.encode([stored(2, 1, 0, [8] * 4)])
    one.receive(message(1, second[0]))
    assert one.replay_from == 0 and mirrored(one) == [0, 1, 2]
    one.receive_replay([b"", *message(0, first[0])])
    one.receive_replay([b"", *message(1, second[0])])
    replay(one, [])
    assert one.complete and mirrored(one) == [8, 9] and one.last == 1 and one.counts["restarts"] == 1


def test_an_old_message_changes_nothing():
    one = follower(upto=4)
    one.receive(message(103, PAYLOADS[1]))
    assert one.replay_from is None and one.counts["duplicates"] == 1
    one.receive(message(101, PAYLOADS[5]))
    replay(one, range(4))
    assert one.complete and mirrored(one) == [0, 1, 2] and one.last == 103 and one.counts["restarts"] == 0


def test_a_replay_that_does_not_come_leaves_a_mirror_that_says_so():
    one = follower(upto=2)
    one.receive(message(104, PAYLOADS[4]))
    one.fail_replay()
    assert not one.complete and one.replay_from is None and mirrored(one) == [0, 3] and one.last == 104
    one.request_replay(0)
    replay(one, range(5))
    assert one.complete and mirrored(one) == [0, 1, 2, 3]


@pytest.mark.parametrize("which", [[3, 4], [2, 4]])
def test_a_replay_with_a_hole_is_not_complete(which):
    """vLLM's own publisher drops old messages from a ring."""
    one = follower(upto=2)
    one.receive(message(105, PAYLOADS[5]))
    replay(one, [*which, 5])
    assert not one.complete and one.last == 105 and set(mirrored(one)) == {0, *(at - 1 for at in which), 4}
    one.receive(message(106, PAYLOADS[0]))
    assert one.complete and mirrored(one) == []  # AllBlocksCleared: nothing before matters


def test_a_broken_answer_is_not_complete():
    one = follower(upto=2)
    one.receive(message(104, PAYLOADS[4]))
    one.receive_replay([b"", b"topic", (102).to_bytes(8, "big"), b"\xff"])
    one.receive_replay([b"", b"x"])
    replay(one, [3, 4])
    assert not one.complete and mirrored(one) == [0, 2, 3] and one.counts["refused"] == 2


def test_messages_that_wait_for_a_replay_are_bounded(monkeypatch):
    """Messages without events have few bytes, but are objects all the same."""
    monkeypatch.setattr(subscriber, "_WAITING_BYTES", 10_000)
    one = Follower(True, 1000)
    for _ in range(2):
        for number in range(100, 200):
            one.receive(message(number))
        assert 10 < len(one._waiting) < 20
        one.fail_replay()
        assert not one._waiting and one.last == 117
        one.request_replay(0)


def test_two_gaps_during_a_replay_are_filled_one_after_the_other():
    one = follower(upto=1)
    one.receive(message(102, PAYLOADS[2]))
    one.receive(message(105, PAYLOADS[5]))
    replay(one, range(1, 3))
    assert one.replay_from == 103 and one.num_requests == 3
    replay(one, range(3, 6))
    assert one.complete and mirrored(one) == [0, 1, 2, 3, 4]


NO_MESSAGES = [[], [b"t"], [b"t", b"1"], message(3)[:2], message(3, b"\xc1"), [*message(3), b""],
               [b"t", b"1234567", EMPTY], [b"t", b"123456789", EMPTY]]  # fmt: skip


@pytest.mark.parametrize("frames", NO_MESSAGES)
def test_a_message_that_is_refused_counts_as_missed(frames):
    one = follower(False, upto=3)
    one.receive(frames)
    assert not one.complete and mirrored(one) == [0, 1] and one.counts["refused"] == 1
    one.receive(message(103, PAYLOADS[3]))
    assert not one.complete and mirrored(one) == [0, 1, 2]
    one.receive(message(104, PAYLOADS[0]))
    assert one.complete and mirrored(one) == []  # AllBlocksCleared


@pytest.mark.parametrize("frames", NO_MESSAGES)
def test_a_replay_makes_up_for_a_message_that_was_refused(frames):
    one = follower(upto=3)
    one.receive(frames)
    assert not one.complete and one.replay_from == 103 and mirrored(one) == [0, 1] and one.counts["refused"] == 1
    one.receive(message(103, PAYLOADS[3]))
    one.receive(frames)
    replay(one, [])
    assert not one.complete and one.replay_from == 104 and mirrored(one) == [0, 1, 2] and one.counts["refused"] == 2
    replay(one, [])
    assert one.complete and one.replay_from is None and one.counts["replays"] == 3


def test_a_replay_with_the_message_that_was_refused_is_not_complete():
    one = follower(upto=3)
    one.receive(message(103, b"\xc1"))
    one.receive_replay([b"", *message(103, b"\xc1")])
    replay(one, [])
    assert not one.complete and one.replay_from is None and one.counts["refused"] == 2
    one.request_replay(0)
    replay(one, range(5))
    assert one.complete and mirrored(one) == [0, 1, 2, 3]


def test_messages_that_are_refused_once_no_replay_comes_are_counted():
    one = follower(upto=2)
    one.receive(message(104, PAYLOADS[4]))
    one.receive([b"t"])
    one.fail_replay()
    assert not one.complete and one.counts["refused"] == 1 and mirrored(one) == [0, 3] and one.replay_from is None


@pytest.mark.parametrize("replays", [True, False])
def test_an_event_that_is_skipped_costs_no_other(replays):
    one = follower(replays, upto=2)
    ts, events, rank = msgspec.msgpack.decode(PAYLOADS[2])
    one.receive(message(102, msgspec.msgpack.encode([ts, [["BlockMoved", 3], *events, {}], rank])))
    assert mirrored(one) == [0, 1] and one.counts["skipped"] == 2 and one.counts["refused"] == 0
    assert one.last == 102 and not one.complete
    one.receive(message(103, PAYLOADS[0]))
    assert one.complete and one.counts["skipped"] == 2


@pytest.mark.parametrize("replays", [True, False])
def test_unknown_blocks_of_offloading_are_counted(replays):
    one = follower(replays, upto=2)
    hashes = msgspec.msgpack.decode(PAYLOADS[1])[1][0]["block_hashes"]
    one.receive(message(102, msgspec.msgpack.encode([1.0, [["BlockStored", [*hashes, 7], None, [], 0, None, "DISK"]]])))
    assert one.complete and one.counts["unknown"] == 1
    assert list(one.mirror.index.values()) == [("GPU", "DISK")]


def test_the_limits_hold_for_each_of_its_mirrors():
    one = Follower(False, 2, 1 << 20)
    for restart in range(2):
        for number, payload in enumerate(PAYLOADS[:4]):
            one.receive(message(number, payload))
        assert len(one.mirror) == 2 and not one.complete and one.counts["skipped"] == restart + 1


def test_messages_that_wait_for_a_replay_take_the_memory_of_their_bytes():
    """A batch takes several times the bytes of its payload, here a byte a token."""
    event = ["BlockStored", list(range(1, 101)), None, [7] * 6400, 64, None, "GPU"]
    payload = msgspec.msgpack.encode([1.0, [event]])
    one = Follower(True, 1000)
    tracemalloc.start()
    try:
        for number in range(100):
            one.receive([b"", number.to_bytes(8, "big"), bytes(bytearray(payload))])
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert traced < 100 * (len(payload) + subscriber._OVERHEAD)


def test_without_replays_it_says_what_is_missing():
    one = Follower(False, 1000)
    one.receive(message(101, PAYLOADS[1]))
    assert not one.complete and mirrored(one) == [0]
    one.receive(message(102, PAYLOADS[0]))
    assert one.complete and mirrored(one) == []
    one.receive(message(105, PAYLOADS[5]))
    assert not one.complete and mirrored(one) == [4] and one.counts["gaps"] == 1


def test_without_replays_a_restart_is_seen_by_its_numbers():
    one = follower(False, upto=4)
    one.receive(message(50, PAYLOADS[5]))
    one.receive(message(50, PAYLOADS[5]))
    assert mirrored(one) == [0, 1, 2] and one.counts["duplicates"] == 2
    one.receive(message(51, PAYLOADS[5]))
    assert not one.complete and mirrored(one) == [4] and one.counts["restarts"] == 1
    other = follower(False, upto=4)
    other.receive(message(0, PAYLOADS[1]))
    assert other.complete and mirrored(other) == [0] and other.last == 0


def test_an_event_that_cannot_belong_is_skipped():
    one = follower(False, upto=3)
    other = Encoder(dataclasses.replace(SPEC, block_size=8))
    one.receive(message(103, other.encode([stored(1, 1, 0, [1] * 8)])[0]))
    assert not one.complete and mirrored(one) == [0, 1] and one.counts["skipped"] == 1 and one.last == 103


def test_heartbeats_come_as_often_as_their_times_say():
    one = follower(replays=False, upto=1)
    assert one.heartbeat is None
    for number, time, events in ((101, 5.0, [["AllBlocksCleared"]]), (102, 6.5, []), (103, 8.0, []), (104, 8.0, [])):
        one.receive(message(number, msgspec.msgpack.encode([time, events, 0])))
    assert one.heartbeat == 1.5 and one.complete
