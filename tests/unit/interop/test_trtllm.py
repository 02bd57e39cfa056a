# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON: the written bytes, the law, and refusals of a reader."""

import gc
import io
import json
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import pytest

import kvjax
from kvjax import LayerSpec
from kvjax.blocks.hashes import first_64_bits
from kvjax.interop import hashing
from kvjax.interop.trtllm import Block, Created, Diff, Event, Mirror, Prefix, Removed, Stored, Updated, Writer, parse
from tests.unit.interop.forest import namespaces, spec_of
from tests.wire_kit import removed, stored, updated

SPEC = spec_of("plain")
ROOT = hashing.root_hash()
A = hashing.block_hash(ROOT, [1, 2, 3, 300])
B = hashing.block_hash(A, [70_000, 127, 128, 65_535])
PART = hashing.block_hash(A, [9, 8])
STORE_A, STORE_B = stored(1, 1, 0, [1, 2, 3, 300]), stored(2, 1, (1, 1), [70_000, 127, 128, 65_535])
STORE_PART = stored(3, 1, (1, 1), [9, 8], level=1, priority=80)
CREATED = '{"event_id":0,"data":{"type":"created","num_blocks_per_cache_level":[10,6]},"window_size":32'


def h(digest):
    return first_64_bits(digest)


def token(number, extra=0):
    return f'{{"type":"unique_token","token_id":{number},"token_extra_id":{extra}}}'


def block(digest, tokens, level=0, priority=35):
    text = ",".join(token(*(one if isinstance(one, tuple) else (one,))) for one in tokens)
    return (
        f'{{"type":"stored_block","block_hash":{h(digest)},"tokens":[{text}],"cache_level":{level},'
        f'"priority":{priority}}}'
    )


def lines(*batches, spec=SPEC, **options):
    """The lines of some lists of events, without those that create the groups."""
    writer = Writer(spec, **options)
    return [line for events in batches for line in writer.lines(events)][len(writer.groups) :]


# The form, by hand.


def test_lines_by_hand():
    writer = Writer(SPEC)
    found = writer.lines([STORE_A, STORE_B])
    assert found == [
        CREATED + ',"layer_group_id":0}',
        '{"event_id":1,"data":{"type":"stored","parent_hash":null,"blocks":['
        + block(A, [1, 2, 3, 300]) + "," + block(B, [70_000, 127, 128, 65_535])
        + ']},"window_size":32,"layer_group_id":0}',
    ]  # fmt: skip
    assert writer.lines([updated(2, 1, 1), updated(1, 1, 1, 80), updated(1, 1, 0, 80)]) == [
        f'{{"event_id":2,"data":{{"type":"updated","block_hash":{h(B)},'
        '"cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":null},'
        '"window_size":32,"layer_group_id":0}',
        f'{{"event_id":3,"data":{{"type":"updated","block_hash":{h(A)},"cache_level":null,'
        '"priority":{"type":"event_diff","new_value":80,"old_value":35}},"window_size":32,"layer_group_id":0}',
    ]
    assert writer.lines([removed(2, 1), removed(1, 1)]) == [
        f'{{"event_id":4,"data":{{"type":"removed","block_hashes":[{h(B)},{h(A)}]}},"window_size":32,'
        '"layer_group_id":0}'
    ]
    assert writer.lines([]) == [] and writer.next_id == 5


def test_partly_filled_blocks_end_their_event():
    found = lines([STORE_A, STORE_PART, STORE_B, removed(3, 1)])
    part = block(PART, [9, 8], 1, 80)
    assert [json.loads(line)["data"] for line in found] == [
        {"type": "stored", "parent_hash": None, "blocks": [json.loads(block(A, [1, 2, 3, 300])), json.loads(part)]},
        {"type": "stored", "parent_hash": h(A), "blocks": [json.loads(block(B, [70_000, 127, 128, 65_535]))]},
        {"type": "removed", "block_hashes": [h(PART)]},
    ]
    assert part in found[0]
    assert lines([stored(3, 1, 0, [7])])[0].count(block(hashing.block_hash(ROOT, [7]), [7])) == 1


def test_salts_adapters_ranks_and_extra_ids_by_hand():
    names = namespaces()
    [_, line] = Writer(SPEC, names=names, rank=3, lora_names={3: 'the "100 %d" one'}, salts="plain").lines(
        [stored(1, 1, 3, [5])]
    )
    digest = hashing.block_hash(hashing.root_hash(None, "tenant b", 'the "100 %d" one'), [5])
    assert line == (
        '{"event_id":1,"data":{"type":"stored","parent_hash":null,"blocks":[' + block(digest, [5])
        + '],"cache_salt":"tenant b","lora_name":"the \\"100 %d\\" one"},"window_size":32,"attention_dp_rank":3,'
        '"layer_group_id":0}'
    )  # fmt: skip
    [line] = lines([stored(1, 1, 0, [5, 6], extra_ids=[0, 7])], spec=spec_of("extra ids"))
    assert block(hashing.block_hash(ROOT, [5, 6], [0, 7]), [(5, 0), (6, 7)]) in line


def test_each_group_with_kv_is_created_by_ascending_window():
    """Two of these groups differ only in sinks. Full attention has the largest window."""
    layers = [LayerSpec(1, 4, window=w, sink_tokens=s) for w, s in ((None, 0), (8, 0), (8, 4), (100, 0))]
    spec = kvjax.make_spec(layers, num_blocks={None: 9, 8: 7, 100: 8}, max_seqs=1, max_length=32, block_size=4)
    found = [json.loads(line) for line in Writer(spec).lines([])]
    blocks = [one["data"]["num_blocks_per_cache_level"] for one in found]
    groups = [(one["window_size"], one["layer_group_id"]) for one in found]
    assert groups == [(8, 1), (8, 2), (31, 3), (32, 0)] and blocks == [[7, 0], [7, 0], [8, 0], [9, 0]]
    bare = [json.loads(line) for line in Writer(spec_of("bare")).lines([stored(1, 1, 0, [1] * 4)])]
    assert [(one["window_size"], one["layer_group_id"]) for one in bare] == [(8, 1), (12, 2)]


def test_snapshots_have_no_window():
    """A recurrent group has the number that TensorRT-LLM gives it, which is below any window."""
    layers = [LayerSpec(1, 4), LayerSpec.recurrent({"state": (2, 3)}), LayerSpec(1, 4, window=2)]
    spec = kvjax.make_spec(layers, num_blocks=9, max_seqs=1, max_length=32, block_size=4)
    [*events] = parse("\n".join(Writer(spec).lines([])))
    assert [(event.window, event.group) for event in events] == [(-1, 2), (2, 1), (32, 0)]


def test_clearing_removes_all_children_first_and_the_group_begins_anew():
    clear = [{"kind": "cleared", "group": 0}]
    [_, gone, created] = lines([STORE_A, STORE_B], clear)
    assert json.loads(gone)["data"] == {"type": "removed", "block_hashes": [h(B), h(A)]}
    assert json.loads(created)["data"]["type"] == "created"
    assert [json.loads(line)["data"]["type"] for line in lines([], clear)] == ["created"]


def test_long_chains_are_several_events():
    spec = kvjax.make_spec(num_blocks=5000, max_seqs=1, max_length=5000 * 16)
    chain = [stored(0, 1, 0, [0] * 16), *(stored(b, 1, (b - 1, 1), [b] * 16) for b in range(1, 5000))]
    found = lines(chain, spec=spec)
    events = parse(found)
    assert [len(event.data.blocks) for event in events] == [4096, 904] and max(map(len, found)) < 6_000_000
    assert events[1].data.parent == events[0].data.blocks[-1].block_hash


# Files, and caches with contents.


def test_a_file_gets_the_lines():
    file = io.StringIO()
    writer = Writer(SPEC, file)
    writer.write([STORE_A])
    writer.write([removed(1, 1)])
    assert [event.event_id for event in parse(file.getvalue())] == [0, 1, 2]
    again = Writer(SPEC)
    assert again.dicts([STORE_A]) + again.dicts([removed(1, 1)]) == [
        json.loads(line) for line in file.getvalue().splitlines()
    ]
    with pytest.raises(ValueError, match=r"^file: got None, wanted a file to write to"):
        Writer(SPEC).write([STORE_A])


def test_the_blocks_in_use_are_the_states():
    state = kvjax.init(SPEC, num_blocks=7)
    [line] = Writer(SPEC).attach(state)
    assert json.loads(line)["data"]["num_blocks_per_cache_level"] == [7, 6]
    with pytest.raises(ValueError, match=r"^state: got a cache of CacheSpec"):
        Writer(spec_of("windows")).attach(state)


def test_namespaces_that_were_never_given_out_and_omitted_salts_are_left_out():
    store = [stored(1, 1, 1, [1] * 4), stored(2, 1, (1, 1), [2] * 4), stored(3, 1, (2, 1), [2]), removed(3, 1)]
    writer = Writer(SPEC, names=kvjax.Namespaces())
    assert len(writer.lines(store)) == 1 and writer.unpublished_counts == {"unknown_namespace": 3}
    writer = Writer(SPEC, names=namespaces(), salts="omit")
    assert len(writer.lines(store)) == 1 and writer.unpublished_counts == {"salt_omitted": 3}


# Reading.

EVENTS = [
    Event(0, Created((10, 6)), 32, 0, None),
    Event(1, Stored(None, (Block(h(A), ((1, 0), (2, 0), (3, 0), (300, 0)), 0, 35),), None, None), 32, 0, None),
    Event(2, Updated(h(A), Diff(1, 0), None), 32, 0, None),
    Event(3, Removed((h(A),)), 32, 0, None),
]
LINES = Writer(SPEC).lines([STORE_A, updated(1, 1, 1), removed(1, 1)])
V1 = {"event_id": 5, "window_size": 128, "data": {"type": "stored", "parent_hash": 4, "blocks": [
    {"type": "stored_block", "block_hash": 7, "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 2}],
     "cache_level": 0, "priority": 35, "mm_keys": []}]}, "attention_dp_rank": 1}  # fmt: skip


def test_lines_are_read():
    assert parse(LINES) == parse("\n".join(LINES)) == parse("\n\n".join(LINES).encode()) == EVENTS
    assert parse([V1]) == [Event(5, Stored(4, (Block(7, ((1, 2),), 0, 35),), None, None), 128, None, 1)]


def changed(**fields):
    return {**V1, **fields}


def data(**fields):
    return changed(data={**V1["data"], **fields})


def entry(**fields):
    return data(blocks=[{**V1["data"]["blocks"][0], **fields}])


NO_EVENTS = [
    "", "null", "7", "[]", "{}", '"x"', "{", LINES[1][:-1], "[" * 100_000, b"\xff\xfe", "9" * 5000,
    changed(event_id=None), changed(event_id=-1), changed(event_id=True), changed(event_id=1.0),
    changed(attention_dp_rank="0"), '{"event_id": 2, "data": ' + "[" * 100_000,
]  # fmt: skip
UNREADABLE = [
    {"event_id": 5}, changed(window_size="8"), changed(layer_group_id=1 << 11), changed(data=[]),
    changed(data={"type": "moved"}), changed(data={"type": ["stored"]}), data(parent_hash=1.5),
    data(parent_hash=1 << 64), data(parent_hash="x" * 5000), data(blocks=None), data(blocks=[7]),
    data(blocks=V1["data"]["blocks"] * 2), data(cache_salt=7), data(lora_name="x" * 5000), entry(block_hash=None),
    entry(tokens=[1]), entry(tokens="1"), entry(tokens=[{}]), entry(tokens=[{"token_id": "1"}]),
    entry(cache_level=-1), entry(priority=None), changed(data={"type": "removed", "block_hashes": [1.5]}),
    changed(data={"type": "updated", "block_hash": 7, "cache_level": 1, "priority": None}),
    changed(data={"type": "updated", "block_hash": 7, "priority": {"new_value": 1}}),
    changed(data={"type": "created", "num_blocks_per_cache_level": [-1]}),
]  # fmt: skip


@pytest.mark.parametrize("line", NO_EVENTS, ids=range(len(NO_EVENTS)))
def test_what_is_no_event_is_refused_and_counted(line):
    with pytest.raises(ValueError, match=r"^lines: got no event in line 1: "):
        parse([line])
    mirror = Mirror()
    mirror.follow(LINES[:2])
    before = mirror.index
    mirror.follow([line])
    assert mirror.index == before != {} and mirror.counts["refused"] == 1 and not mirror.complete
    assert mirror.last == 1


@pytest.mark.parametrize("line", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_event_that_cannot_be_read_is_skipped_and_counted(line):
    """It has a number, so that the next event follows it."""
    with pytest.raises(ValueError, match=r"^lines: got no event in line 1: "):
        parse([line])
    mirror = Mirror()
    mirror.follow(LINES[:2])
    before = mirror.index
    mirror.follow([line | {"event_id": 2}])
    assert mirror.index == before != {} and mirror.counts["skipped"] == 1 and not mirror.complete
    mirror.follow([changed(event_id=3, window_size=32, layer_group_id=0)])
    assert len(mirror) == 2 and mirror.counts["refused"] == mirror.counts["gaps"] == 0 and mirror.last == 3
    mirror.follow([line | {"event_id": number} for number in (0, 3, 900)])  # no process that begins anew
    assert len(mirror) == 2 and mirror.counts["skipped"] == 4 and mirror.last == 3
    others = Mirror(rank=4)
    others.follow([line])
    assert others.counts["skipped"] == 0 and others.counts["others"] == 1 and others.last is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (changed(event_id=-1), "Expected `int` >= 0 - at `$.event_id`"),
        (entry(priority=None), "Expected `int`, got `null` - at `$.data.blocks[0].priority`"),
        (entry(tokens=[{"token_id": "1"}]), "at `$[0].token_id` - at `$.data.blocks[0].tokens`"),
        (data(parent_hash=1 << 64), "parent_hash: got 18446744073709551616, wanted an int of 64 bits"),
        (data(blocks=V1["data"]["blocks"] * 2), "block_hash: got the same hash twice, wanted each once"),
    ],
)
@pytest.mark.parametrize("form", [dict, json.dumps])
def test_a_refusal_names_line_and_field(form, line, complaint):
    with pytest.raises(ValueError, match=r"^lines: got no event in line 2: ") as caught:
        parse([V1, form(line)])
    assert complaint in str(caught.value)


@hypothesis.given(st.data())
def test_any_bytes_are_read_or_refused(data):
    """Parts of valid lines with some bytes changed, and arbitrary bytes."""
    given = bytearray(data.draw(st.one_of(*map(st.just, [line.encode() for line in LINES]), st.binary(max_size=60))))
    for _ in range(data.draw(st.integers(0, 4))):
        if given:
            given[data.draw(st.integers(0, len(given) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(given[: data.draw(st.integers(0, len(given)))])
    mirror = Mirror()
    mirror.follow(LINES[:2])
    before = mirror.index
    mirror.follow([cut])
    assert sum(mirror.counts[what] for what in ("events", "refused", "skipped", "duplicates")) == 3
    wrong = mirror.counts["refused"] + mirror.counts["skipped"]
    assert not wrong or (mirror.index == before and not mirror.complete)


# Mirrors.


def block_of(name, *tokens):
    return Block(name, tuple((token, 0) for token in tokens), 0, 35)


def event(number, data, window=32, group=0, rank=None):
    return Event(number, data, window, group, rank)


def mirror_of(*events, **options):
    mirror = Mirror(**options)
    for one in events:
        mirror.apply(one)
    return mirror


def test_a_gap_is_counted_until_all_groups_are_created_anew():
    mirror = mirror_of(event(0, Created((9, 0))), event(1, Created((9, 0)), 8, 1))
    assert mirror.complete
    mirror.apply(event(3, Stored(None, (block_of(7, 1),), None, None)))
    assert not mirror.complete and mirror.counts["gaps"] == 1 and len(mirror) == 1
    mirror.apply(event(3, Removed((7,))))
    assert len(mirror) == 1 and mirror.counts["duplicates"] == 1
    mirror.apply(event(4, Created((9, 0))))
    assert not mirror.complete and len(mirror) == 0
    mirror.apply(event(5, Created((9, 0)), 8, 1))
    assert mirror.complete


def test_another_process_begins_anew():
    mirror = mirror_of(event(0, Created((9, 0))), event(1, Stored(None, (block_of(7, 1),), None, None)))
    mirror.apply(event(0, Created((9, 0))))
    assert len(mirror) == 0 and mirror.complete


def test_groups_are_distinguished_by_number_and_window_and_ranks_by_choice():
    store = Stored(None, (block_of(7, 1),), None, None)
    mirror = mirror_of(event(0, store, 8, 1), event(1, store, 8, 2), event(2, Removed((7,)), 8, 1))
    assert mirror.index == {Prefix(8, 2, None, None, ((1, 0),)): (0, 35)}
    mirror = mirror_of(event(0, store, rank=0), event(0, store, rank=1), rank=1)
    assert len(mirror) == 1 and mirror.counts["others"] == 1


def test_an_unknown_prefix_is_named_and_circles_end():
    chain = Stored(4, (block_of(5, 1), block_of(6, 2)), None, None)
    mirror = mirror_of(event(0, chain))
    assert Prefix(32, 0, None, None, ((1, 0), (2, 0)), 4) in mirror.index
    mirror.apply(event(1, Stored(6, (block_of(4, 3),), None, None)))
    assert len(mirror.index) == 3
    mirror.apply(event(2, Updated(99, Diff(1, 0), None)))
    assert len(mirror) == 3


def test_blocks_without_tokens_get_a_level_and_are_else_counted():
    """Engines that move a block store it again, and a line may name blocks without saying what they hold."""
    store = Stored(None, (block_of(7, 1), block_of(8, 2)), None, None)
    moved = Stored(None, tuple(Block(name, (), 1, 50) for name in (7, 9, 8)), None, None)
    mirror = mirror_of(event(0, Created((9, 0))), event(1, store), event(2, moved), event(3, Updated(99, Diff(1, 0))))
    assert sorted(mirror.index.values()) == [(1, 50), (1, 50)] and mirror.complete
    assert mirror.counts["unknown"] == 2 and mirror.counts["skipped"] == 0
    mirror.apply(event(4, Removed((7, 8, 7))))
    assert len(mirror) == 0 and mirror.num_bytes == 0


@pytest.mark.parametrize(
    "data",
    [
        Stored(None, tuple(block_of(n, n) for n in range(3)), None, None),
        Stored(None, (block_of(7, 1),), "s" * 5000, None),
        Stored(None, (block_of(7, *range(40)),), None, None),
    ],
    ids=["blocks", "salt", "tokens"],
)  # fmt: skip
def test_an_event_that_exceeds_a_limit_is_skipped(data):
    mirror = mirror_of(event(0, Created((9, 0))), max_blocks=2, max_bytes=4000)
    mirror.apply(event(1, data))
    assert len(mirror) == 0 and mirror.last == 1 and mirror.counts["skipped"] == 1 and not mirror.complete
    store = Stored(None, (block_of(7, 1), block_of(8, 1)), None, None)
    mirror.apply(event(2, store))
    mirror.apply(event(3, store))  # needs no more room
    assert len(mirror) == 2 and mirror.counts["skipped"] == 1 and mirror.counts["gaps"] == 0
    mirror.apply(event(4, Created((9, 0))))
    assert mirror.complete and mirror.num_bytes == 0


def test_groups_are_limited():
    mirror = mirror_of(*(event(n, Created((9, 0)), n, 0) for n in range(1030)))
    assert mirror.counts["skipped"] == 6 and not mirror.complete


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 32])
def test_a_mirror_takes_no_more_memory_than_it_may(size):
    mirror, most = Mirror(max_bytes=1 << 20), 0
    tracemalloc.start()
    try:
        for number in range(4000):
            tokens = [{"token_id": 300 + number + at, "token_extra_id": 0} for at in range(size)]
            block = {"block_hash": number + 2**40, "tokens": tokens, "cache_level": 0, "priority": 35}
            stored = {"type": "stored", "parent_hash": number + 2**40 - 1 if number else None, "blocks": [block]}
            mirror.follow([json.dumps({"event_id": number, "window_size": 32, "data": stored})])
            most = max(most, mirror.num_bytes)
        del tokens, block, stored
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert mirror.counts["skipped"] and 0.95 * mirror.max_bytes < most <= mirror.max_bytes
    assert 0.4 * most < traced < most
