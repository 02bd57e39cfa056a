# SPDX-License-Identifier: Apache-2.0
"""The node map: the same index as `fold`, from arrays, logs, lists and states; impossible events are refused."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.events import NodeMap
from kvjax.events.host_events import arrays, host_events
from kvjax.interop import combine_listeners
from kvjax.interop.hashing import Hashing
from kvjax.interop.vllm import Encoder
from tests.unit.interop.forest import SHAPES, Forest, arrays_of, spec_of
from tests.wire_kit import removed, stored, updated

PLAIN = spec_of("plain")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_map_has_the_index_that_fold_has(shape):
    spec = spec_of(shape)
    for seed in range(4):
        forest, nodes = Forest(spec, seed), [NodeMap(spec) for _ in range(3)]
        for _ in range(12):
            events = forest.draw(forest.rng.randrange(1, 30))
            nodes[0].fold(events)
            nodes[1].fold(arrays_of(events, spec))
            nodes[2].fold(arrays_of(events, spec, log=True))
            for one in nodes:
                assert one.index == forest.mirror.index and len(one) == len(forest.mirror.nodes)


def test_a_map_takes_what_its_copy_has_not_seen():
    nodes = NodeMap(PLAIN)
    nodes.fold([stored(1, 1, 0, [1, 2, 3, 4])])
    other = nodes.copy()
    nodes.fold([removed(1, 1), stored(1, 2, 2, [5])])
    assert other.index == {(0, 0, (1, 2, 3, 4)): (0, 35)} and nodes.index == {(0, 2, (5,)): (0, 35)}


STORED = [stored(1, 5, 0, [1, 2, 3, 4]), stored(2, 1, (1, 5), [5])]
NEW, LACKS = "wanted a new node", r"wanted a node of the map: begin with `attach\(state\)`"


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([removed(3, 1)], rf"events: got removed of node \(0, 3, 1\), {LACKS}"),
        ([removed(1, 4)], rf"events: got removed of node \(0, 1, 4\), {LACKS}"),
        ([updated(1, 6, 0)], rf"events: got updated of node \(0, 1, 6\), {LACKS}"),
        ([updated(1, 5, 2)], r"events: got updated of node \(0, 1, 5\), wanted level 0 or 1"),
        ([stored(1, 6, 0, [1])], rf"events: got stored of node \(0, 1, 6\), {NEW}"),
        ([stored(3, 1, (3, 1), [1])], rf"events: got stored under node \(0, 3, 1\), {LACKS}"),
        ([stored(3, 1, (1, 4), [1])], rf"events: got stored under node \(0, 1, 4\), {LACKS}"),
        ([stored(3, 1, (99, 4), [1])], rf"events: got stored under node \(0, 99, 4\), {LACKS}"),
        ([stored(4, 1, (3, 1), [1]), stored(3, 1, 0, [1])], rf"events: got stored under node \(0, 3, 1\), {LACKS}"),
        ([stored(3, 1, 0, [])], r"events: got stored of node \(0, 3, 1\), wanted 1 to 4 tokens at level 0 or 1"),
        ([stored(3, 1, 0, [1], level=2)], r"events: got stored of node \(0, 3, 1\), wanted 1 to 4 tokens"),
        ([stored(16, 1, 0, [1])], r"events: got stored of node \(0, 16, 1\), wanted block 0 to 15"),
        ([removed(-1, 1)], r"events: got removed of node \(0, -1, 1\), wanted block 0 to 15"),
        ([removed(0, 1, group=1)], "events: got group 1, wanted 0 to 0"),
        ([{"kind": "cleared", "group": 2}], "events: got group 2, wanted 0 to 0"),
        ([removed(2, 1), removed(2, 1)], "events: got removed of one node twice in group 0, wanted it once"),
        ([stored(3, 1, 0, [1]), stored(3, 1, 0, [1])], rf"events: got stored of node \(0, 3, 1\), {NEW}|.* twice"),
    ],
)
def test_what_cannot_have_happened_is_refused(events, complaint):
    for given in (events, arrays_of(events, PLAIN)):
        nodes = NodeMap(PLAIN)
        nodes.fold(STORED)
        with pytest.raises(ValueError, match=f"^({complaint})"):
            nodes.fold(given)


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        (None, "events: got NoneType, wanted Events, an EventLog or a list from to_list"),
        ("stored", "events: got str, wanted Events"),
        ([{"kind": "gone"}], "events: got .*, wanted an event of to_list"),
        ([{"kind": "stored", "block": 1}], "events: got .*, wanted an event of to_list"),
        ([stored(1, 1, 0, [1, 2, 3, 4, 5])], "events: got .*, wanted an event of to_list"),
        (
            arrays_of([], spec_of("extra ids")),
            r"events: got blocks of {'tokens': 4, 'extra_ids': 4}, wanted",
        ),
        (kvjax.events.init_log(3, 8), r"events: got blocks of {'tokens': 8}, wanted {'tokens': 4}"),
    ],
)
def test_what_is_no_event_is_refused(events, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        NodeMap(PLAIN).fold(events)


def test_events_may_have_leading_axes_and_are_copied():
    events = arrays_of(STORED, PLAIN)
    stacked = events.replace(
        records=events.records.reshape(1, -1, 9), text=events.text.replace(tokens=events.text.tokens[None])
    )
    nodes = NodeMap(PLAIN)
    nodes.fold(stacked)
    index = nodes.index
    events.records[:], events.text.tokens[:] = -1, -1
    assert nodes.index == index == kvjax.fold(STORED).index


@pytest.mark.parametrize("log", [False, True])
def test_listeners_together_get_one_batch_and_a_copy_on_the_host(log):
    got, nodes = [], [NodeMap(PLAIN) for _ in range(2)]
    listener = combine_listeners(PLAIN, got.append, *(one.fold for one in nodes))
    listener(jax.device_put(arrays_of(STORED, PLAIN, log=log)))
    listener(jax.device_put(arrays_of([removed(2, 1)], PLAIN, log=log)))
    first, second = got
    assert host_events(first, PLAIN) is first and len(first.records) == 2 and len(second.records) == 1
    assert arrays(first) is first.events and all(isinstance(x, np.ndarray) for x in jax.tree.leaves(first.events))
    assert nodes[0].index == nodes[1].index == kvjax.fold(STORED[:1]).index
    other = spec_of("plain", blocks=11)
    assert host_events(first, other) is not first and len(host_events(first, other).records) == 2
    with pytest.raises(ValueError, match=r"^events: got list, wanted Events or an EventLog"):
        listener(STORED)


class Listener:
    """A follower of a cache with an encoder. It shows its index, as `Publisher` does."""

    def __init__(self, **options):
        self.encoder, self.payloads, self.errors = Encoder(PLAIN, **options), [], []

    nodes = property(lambda self: self.encoder.nodes)

    def write(self, events):
        try:
            self.payloads += self.encoder.encode(events, 0.0)
        except ValueError as error:
            self.errors.append(error)


def test_listeners_together_fold_once_and_hash_once_for_each_key(monkeypatch):
    hashed, hash_rows = [], Hashing.hash

    def counted(self, rows, *rest):
        hashed.append(len(rows))
        hash_rows(self, rows, *rest)

    monkeypatch.setattr(Hashing, "hash", counted)
    one, same, other, nodes = Listener(), Listener(form="array"), Listener(key=b"secret"), NodeMap(PLAIN)
    listener = combine_listeners(PLAIN, nodes.fold, one.write, same.write, other.write)
    listener(arrays_of(STORED, PLAIN))
    assert hashed == [2, 2] and nodes.groups is one.nodes.groups is same.nodes.groups is not other.nodes.groups
    assert [len(each.payloads) for each in (one, same, other)] == [1, 1, 1] and one.payloads != other.payloads
    assert nodes.index == other.nodes.index == kvjax.fold(STORED).index


def test_maps_that_share_part_when_one_gets_events_alone_or_is_attached():
    maps = [NodeMap(PLAIN) for _ in range(3)]
    listener = combine_listeners(PLAIN, *(one.fold for one in maps))
    listener(arrays_of(STORED, PLAIN))
    assert maps[0].groups is maps[1].groups is maps[2].groups
    maps[0].fold([removed(2, 1)])
    maps[1].attach(kvjax.init(PLAIN))
    assert [len(one) for one in maps] == [1, 0, 2]
    later = [stored(4, 1, 0, [7])]
    maps[1].fold(STORED)
    listener(arrays_of(later, PLAIN))
    assert [len(one) for one in maps] == [2, 3, 3] and maps[2].index == kvjax.fold([*STORED, *later]).index


def test_events_that_change_no_index_leave_those_who_share_together():
    """A publisher skips them, and a trace folds them."""

    class Publisher:
        def __init__(self):
            self.nodes = NodeMap(PLAIN)

        def publish(self, events):
            if len(events.records):
                self.nodes.fold(events)

    source, nodes = Publisher(), NodeMap(PLAIN)
    listener = combine_listeners(PLAIN, nodes.fold, source.publish)
    for events in (STORED, [], [removed(2, 1)]):
        listener(arrays_of(events, PLAIN))
    assert source.nodes.groups is nodes.groups and len(nodes) == 1


def test_maps_of_other_contents_do_not_share():
    one, other = NodeMap(PLAIN), NodeMap(PLAIN)
    one.fold(STORED)
    combine_listeners(PLAIN, one.fold, other.fold)
    assert one.groups is not other.groups and len(other) == 0


def test_a_map_that_missed_events_of_those_who_share_says_so():
    one, other = NodeMap(PLAIN), NodeMap(PLAIN)
    combine_listeners(PLAIN, one.fold, other.fold)
    shared = dataclasses.replace(host_events(arrays_of(STORED, PLAIN), PLAIN), is_shared=True)
    one.fold(shared)
    with pytest.raises(ValueError, match=r"^events: got events after others that were left out, wanted `attach"):
        other.fold(host_events(arrays_of([removed(2, 1)], PLAIN), PLAIN))


def test_impossible_events_are_impossible_for_all_who_share():
    one, other = Listener(), Listener()
    combine_listeners(PLAIN, one.write, other.write)(arrays_of([removed(2, 1)], PLAIN))
    assert one.errors == other.errors and "removed of node (0, 2, 1)" in str(one.errors[0])


def test_events_on_the_host_are_read_as_they_are():
    events = arrays_of(STORED, PLAIN)
    host_events(events, PLAIN)
    events.records[:] = 0
    assert not len(host_events(events, PLAIN).records)


def test_a_path_is_read_at_any_depth_and_circles_end():
    spec = kvjax.make_spec(num_blocks=2048, max_seqs=1, max_length=32_768)
    nodes = NodeMap(spec)
    nodes.fold([stored(b, 1, (b - 1, 1) if b else 0, [b]) for b in range(2048)])
    assert nodes.path(0, 2047) == tuple(range(2048))
    nodes = NodeMap(PLAIN)
    nodes.fold([*STORED, removed(1, 5), stored(1, 5, (2, 1), [6])])
    assert len(nodes.index) == 2 and nodes.path(0, 2)[-1] == 5


def test_memory_does_not_grow_with_the_length_of_prefixes():
    """One row of 32,768 tokens: `fold` holds 269 MB of paths."""
    spec = kvjax.make_spec(num_blocks=2048, max_seqs=1, max_length=32_768)
    nodes = NodeMap(spec)
    chain = [stored(0, 1, 0, [0] * 16), *(stored(b, 1, (b - 1, 1), [b] * 16) for b in range(1, 2048))]
    nodes.fold(chain)
    assert len(nodes) == 2048 and sum(group.table.nbytes for group in nodes.groups) < 2048 * 200
    assert np.array_equal(nodes.groups[0].table[:, 7], np.arange(2048))  # depths
