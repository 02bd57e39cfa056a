# SPDX-License-Identifier: Apache-2.0
"""The reader of vLLM's wire: every form and kind of hash, other engines' too, and what becomes of malformed bytes."""

import array
import gc
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from kvjax.interop.vllm import Batch, Cleared, Encoder, Mirror, Prefix, Removed, Skipped, Stored, decode
from tests.unit.interop.forest import Forest, arrays_of, namespaces, spec_of

pack = msgspec.msgpack.encode
A = {"block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None,
     "medium": "GPU", "lora_name": None}  # fmt: skip
STORED = Stored([7, 8], None, array.array("q", [1, 2, 3, 4]).tobytes(), 2, None, None, [], "GPU", 0, None, None)


def batch(*events, rank=0):
    return pack([1.5, events, rank])


def as_array(fields):
    return ["BlockStored", *fields.values()]


@pytest.mark.parametrize("make", [lambda e: {"type": "BlockStored", **e}, as_array], ids=["map", "array"])
def test_each_form_is_read(make):
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 2}
    cleared = {"type": "AllBlocksCleared"}
    if make is as_array:
        removed, cleared = ["BlockRemoved", [7], "CPU", 2], ["AllBlocksCleared"]
    assert decode(batch(make(A), removed, cleared)) == Batch(1.5, [STORED, Removed([7], "CPU", 2), Cleared()], 0)


def test_older_and_other_engines_are_read():
    oldest = ["BlockStored", [b"\x01" * 32], b"\x02" * 32, [1, 2], 2, 5]  # no medium: 0.9 and 0.10
    [event] = decode(batch(oldest, rank=None)).events
    assert (event.hashes, event.parent, event.medium, event.lora) == ([b"\x01" * 32], b"\x02" * 32, "GPU", "5")
    assert decode(pack({"ts": 1, "events": [], "data_parallel_rank": None})) == Batch(1.0, [], None)
    assert decode(pack([1, []])) == Batch(1.0, [], None)
    newer = {"type": "BlockStored", **A, "session_id": "x", "locality": "LOCAL"}
    assert decode(batch(newer)).events == [STORED]


@pytest.mark.parametrize(
    ("fields", "keys", "salt"),
    [
        ({"extra_keys": [None, None]}, [], None),
        ({"extra_keys": [[["image", 0]], None]}, [(("image", 0),), ()], None),
        ({"extra_keys": [["sql"], ["sql"]], "lora_name": "sql"}, [], None),
        ({"extra_keys": [["sql", "tenant"], ["sql"]], "lora_name": "sql"}, [], "tenant"),
        ({"extra_keys": [["dynamo-cache-salt:a", ["i", 1]], None]}, [(("i", 1),), ()], "a"),
        ({"extra_keys": [["text"], ["text"]], "parent_block_hash": 3}, [("text",), ("text",)], None),
        ({"cache_salt": "a"}, [], "a"),
    ],
)
def test_extra_keys_without_names_are_distinguished(fields, keys, salt):
    [event] = decode(batch({"type": "BlockStored", **A, **fields})).events
    assert (event.keys, event.salt) == (keys, salt)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\x00", b"hello", b"\xc1", pack([1.5]), pack([1.5, [], 0])[:-1], pack(["x", [], 0]), pack([1.5, [], "0"]),
        b"\xdd\xff\xff\xff\xff", batch()[:9] + b"\xdd\xff\xff\xff\xff", b"\x93" * 100_000, pack({"ts": 1.5}),
        batch({"type": "BlockStored", **A})[:-3], pack([1.5, [None] * ((1 << 20) + 1), 0]),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(ValueError, match=r"^payload: got .*, wanted a KVEventBatch"):
        decode(payload)


MALFORMED = [
    {"type": "BlockMoved"}, ["BlockMoved"], {"type": "BlockStored"}, [], 7, None, "BlockStored", [7],
    *({"type": "BlockStored", **A, **wrong} for wrong in (
        {"block_hashes": [7, 8, 9]}, {"block_hashes": [7, 7]}, {"block_hashes": "78"}, {"block_hashes": [7.0, 8.0]},
        {"block_hashes": [7, b"8" * 5000]}, {"parent_block_hash": "7"}, {"parent_block_hash": [7]},
        {"token_ids": [1, 2, 3]}, {"token_ids": [[1, 2], [3, 4]]}, {"token_ids": [1, 2, 3, 2**63]},
        {"token_ids": None}, {"block_size": 0}, {"block_size": -2}, {"block_size": 2**40}, {"medium": 7},
        {"medium": "x" * 5000}, {"lora_name": 7}, {"lora_name": "x" * 5000}, {"group_idx": -1},
        {"group_idx": 2**40}, {"extra_keys": [None]}, {"extra_keys": 7}, {"extra_keys": [7, 8]},
        {"extra_keys": [[[["deep"]]], None]}, {"extra_keys": [[{"a": 1}], None]}, {"cache_salt": 7},
        {"cache_salt": "x" * 5000}, {"kv_cache_spec_sliding_window": "8"}, {"extra_keys": [[None], None]},
    )),
    {"type": "BlockRemoved", "block_hashes": 7},
]  # fmt: skip


@pytest.mark.parametrize("event", MALFORMED, ids=range(len(MALFORMED)))
def test_an_event_that_cannot_be_read_costs_no_other(event):
    more = {**A, "block_hashes": [9], "parent_block_hash": 8, "token_ids": [5, 6]}
    found = decode(batch({"type": "BlockStored", **A}, event, as_array(more)))
    assert found.events[0] == STORED and found.events[2].hashes == [9] and isinstance(found.events[1], Skipped)
    assert found.events[1].reason
    mirror = Mirror()
    mirror.apply(found)
    assert mirror.lookup(range(1, 7), None, None, None) == (6, {"GPU": 6})
    assert mirror.counts == {"skipped": 1, "unknown": 0} and not mirror.complete
    mirror.apply(Batch(0.0, [Cleared(), STORED], 0))
    assert mirror.complete and len(mirror) == 2


def test_a_text_that_is_no_utf_8_costs_its_event_alone():
    wrong = batch({"type": "BlockStored", **A}, ["AllBlocksCleared"]).replace(b"\xa3GPU", b"\xa3GP\xff")
    assert [type(event) for event in decode(wrong).events] == [Skipped, Cleared]


@hypothesis.given(st.data())
def test_any_bytes_are_read_or_refused(data):
    """Parts of valid messages with some bytes changed, and arbitrary bytes."""
    right = batch({"type": "BlockStored", **A, "extra_keys": [[["i", 0]], None]}, ["BlockRemoved", [7], "GPU"][:0] or
                  {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"})  # fmt: skip
    given_ = bytearray(data.draw(st.one_of(st.just(right), st.binary(max_size=60))))
    for _ in range(data.draw(st.integers(0, 4))):
        if given_:
            given_[data.draw(st.integers(0, len(given_) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(given_[: data.draw(st.integers(0, len(given_)))])
    try:
        found = decode(cut)
    except ValueError:
        return
    mirror = Mirror()
    mirror.apply(found)
    assert len(mirror.index) <= 2 and mirror.num_bytes >= 0


# Mirrors.


def stored(hashes, parent, tokens, **more):
    event = dict(zip(Stored._fields, STORED, strict=True)) | {"hashes": hashes, "parent": parent, **more}
    return Stored(**event | {"tokens": array.array("q", tokens).tobytes()})


def mirror_of(*events):
    mirror = Mirror()
    mirror.apply(Batch(0.0, list(events), 0))
    return mirror


def test_prefixes_are_found_by_tokens_salt_adapter_and_keys():
    mirror = mirror_of(
        stored([b"a", b"b"], None, [1, 2, 3, 4]),
        stored([5], b"b", [5, 6], medium="CPU"),
        stored([6], None, [1, 2], salt="s"),
        stored([7], None, [1, 2], lora="l"),
        stored([8], 6, [3, 4], keys=[(("image", 1),)]),
    )
    assert mirror.lookup([1, 2, 3, 4, 5, 6, 7], None, None, None) == (6, {"GPU": 4, "CPU": 2})
    assert mirror.lookup([1, 2, 3], None, None, None) == (2, {"GPU": 2})
    assert mirror.lookup([1], None, None, None) == mirror.lookup([2, 1], None, None, None) == (0, {})
    assert (
        mirror.lookup([1, 2, 3, 4], "s", None, None) == mirror.lookup([1, 2, 3, 4], None, "l", None) == (2, {"GPU": 2})
    )
    assert mirror.lookup([1, 2, 3, 4], "s", None, [None, [["image", 1]]]) == (4, {"GPU": 4})
    assert mirror.lookup([1, 2], "s", "l", None) == (0, {})
    assert Prefix(0, None, "s", (1, 2, 3, 4), ((3, "image"),)) in mirror.index


def test_a_window_is_not_looked_up_and_its_removals_leave_the_full_block():
    window = {"group": 1, "kind": "sliding_window", "window": 8}
    mirror = mirror_of(stored([1], None, [1, 2], kind="full_attention"), stored([1], None, [1, 2], **window))
    mirror.apply(Batch(0.0, [Removed([1], "GPU", 1)], 0))
    assert mirror.lookup([1, 2], None, None, None) == (2, {"GPU": 2}) and len(mirror) == 1
    assert mirror_of(stored([1], None, [1, 2], **window)).lookup([1, 2], None, None, None) == (0, {})


def test_a_hash_with_new_contents_replaces_the_old_one():
    mirror = mirror_of(stored([1], None, [1, 2]), stored([1], None, [3, 4]))
    assert mirror.lookup([1, 2], None, None, None)[0] == 0 and mirror.lookup([3, 4], None, None, None)[0] == 2
    assert len(mirror) == 1


def test_an_unknown_prefix_is_named():
    mirror = mirror_of(stored([2], 1, [3, 4]))
    assert mirror.index == {Prefix(0, None, None, (3, 4), (), 1): ("GPU",)}
    mirror.apply(Batch(0.0, [stored([1], None, [1, 2])], 0))
    assert mirror.lookup([1, 2, 3, 4], None, None, None)[0] == 4


@pytest.mark.parametrize("group", [0, 1])
def test_circles_end(group):
    """Blocks of other engines may name each other, or themselves, as parents."""
    mirror = mirror_of(stored([1], 2, [1, 2]), stored([2], 1, [3, 4], group=group), stored([3], 3, [5, 6]))
    assert set(mirror.index) == {
        Prefix(0, None, None, (3, 4, 1, 2), (), 1),
        Prefix(group, None, None, (1, 2, 3, 4), (), 2),
        Prefix(0, None, None, (5, 6), (), 3),
    }
    assert mirror.lookup([1, 2, 3, 4], None, None, None) == (0, {})


def offloaded(hashes, medium="CPU", size=0, group=0):
    """As vLLM's offloading connector sends it, without tokens."""
    return stored(hashes, None, [], size=size, medium=medium, group=group)


def test_an_event_without_tokens_adds_its_medium_to_mirrored_blocks():
    mirror = mirror_of(stored([1, 2], None, [1, 2, 3, 4]), offloaded([1, 2, 9]), offloaded([1], "DISK", size=2))
    assert mirror.lookup([1, 2, 3, 4], None, None, None) == (4, {"GPU": 4, "CPU": 4, "DISK": 2})
    assert mirror.counts == {"skipped": 0, "unknown": 1} and mirror.complete and len(mirror) == 2
    mirror.apply(Batch(0.0, [Removed([2, 1], "GPU", 0), Removed([1], "DISK", 0)], 0))
    assert mirror.lookup([1, 2, 3, 4], None, None, None) == (4, {"CPU": 4})
    mirror.apply(Batch(0.0, [offloaded([1, 2], group=3), Removed([1, 2, 1], "CPU", 0)], 0))
    assert len(mirror) == 0 and mirror.num_bytes == 0 and mirror.counts["unknown"] == 3


@pytest.mark.parametrize("make", [lambda e: {"type": "BlockStored", **e}, as_array], ids=["map", "array"])
def test_blocks_that_a_group_has_skipped_are_counted(make):
    """Groups of Mamba layers, and of windows, hash some of the blocks whose tokens an event has, and not which."""
    skipped = {**A, "block_hashes": [5], "extra_keys": None, "group_idx": 1, "kv_cache_spec_kind": "mamba"}
    mirror = Mirror()
    mirror.apply(decode(batch(make(A), make(skipped), make({**A, "block_size": 0, "token_ids": [], "medium": "CPU"}))))
    assert mirror.lookup([1, 2, 3, 4], None, None, None) == (4, {"GPU": 4, "CPU": 4})
    assert mirror.counts == {"skipped": 0, "unknown": 1} and mirror.complete


def test_contents_are_those_that_the_gpu_has():
    """Events of vLLM's offloading connector have no salts and no extra keys, even those that have tokens."""
    keys = [(("image", 0),), ()]
    mirror = mirror_of(
        stored([1, 2], None, [1, 2, 3, 4], salt="s", keys=keys), stored([1, 2], None, [1, 2, 3, 4], medium="CPU")
    )
    assert mirror.lookup([1, 2, 3, 4], None, None, None) == (0, {})
    assert mirror.lookup([1, 2, 3, 4], "s", None, keys) == (4, {"GPU": 4, "CPU": 4})
    late = mirror_of(stored([1], None, [1, 2], medium="CPU"), stored([1], None, [1, 2], salt="s"))
    assert late.lookup([1, 2], None, None, None) == (0, {}) and late.lookup([1, 2], "s", None, None) == (2, {"GPU": 2})


@pytest.mark.parametrize(
    "event",
    [
        stored([2], None, [3, 4, 5], size=3), stored(list(range(20, 29)), None, [0] * 18),
        stored([2], None, [3, 4], salt="x" * 5000), stored([2], None, [3, 4], keys=[("x" * 5000,)]),
        stored([b"x" * 5000], None, [3, 4]),
    ],
)  # fmt: skip
def test_an_event_that_exceeds_a_limit_is_skipped(event):
    mirror = Mirror(max_blocks=8, max_bytes=5000)
    mirror.apply(Batch(0.0, [STORED, event, stored([9], 8, [5, 6])], 0))
    assert mirror.lookup(range(1, 7), None, None, None)[0] == 6 and len(mirror) == 3
    assert mirror.counts == {"skipped": 1, "unknown": 0} and not mirror.complete
    mirror.apply(Batch(0.0, [Cleared(), STORED], 0))
    assert mirror.complete


def test_media_are_limited():
    mirror = mirror_of(*(stored([at], None, [at, 0], medium=str(at)) for at in range(40)))
    assert len(mirror) == 32 and mirror.counts["skipped"] == 8 and not mirror.complete


def test_blocks_that_are_sent_again_take_nothing():
    mirror = Mirror(max_blocks=2, max_bytes=2000)
    mirror.apply(Batch(0.0, [STORED, STORED, STORED._replace(medium="CPU")], 0))
    assert mirror.complete and len(mirror) == 2
    mirror.apply(Batch(0.0, [Removed([8], "GPU", 0), Removed([8], "CPU", 0), stored([9], 7, [3, 4])], 0))
    assert mirror.complete and mirror.lookup(range(1, 5), None, None, None)[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("hash_of", [lambda n: n + 2**40, lambda n: n.to_bytes(32, "big")], ids=["int", "bytes"])
def test_a_mirror_takes_no_more_memory_than_it_may(size, hash_of):
    """Without the limit, small blocks would take 500 times the bytes of their messages."""
    mirror, most = Mirror(max_bytes=2 << 20), 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for first in range(0, 10_000, 50):
            hashes = [hash_of(n) for n in range(first, first + 50)]
            parent, tokens = hash_of(first - 1) if first else None, [first % 100] * 50 * size
            event = ["BlockStored", hashes, parent, tokens, size, None]
            mirror.apply(decode(pack([1.5, [event], 0])))
            most = max(most, mirror.num_bytes)
        del event, hashes
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert mirror.counts["skipped"] and 0.95 * mirror.max_bytes < most <= mirror.max_bytes
    assert 0.4 * most < traced < most


MEDIA = ("GPU", "CPU", "DISK")


@st.composite
def histories(draw):
    """Events of a chain of six blocks of two tokens, as several engines send them, and malformed ones."""
    events = []
    for _ in range(draw(st.integers(1, 25))):
        first = draw(st.integers(0, 5))
        hashes = list(range(first + 1, draw(st.integers(first + 1, 6)) + 1))
        medium, kind = draw(st.sampled_from(MEDIA)), draw(st.integers(0, 9))
        if kind < 4:
            tokens = [token for block in hashes for token in (block, 0)]
            events.append(["BlockStored", hashes, first or None, tokens, 2, None, medium])
        elif kind < 6:
            events.append(["BlockStored", hashes, None, [], draw(st.sampled_from((0, 2, 7))), None, medium])
        elif kind < 8:
            events.append(["BlockRemoved", hashes, medium])
        else:
            events.append(draw(st.sampled_from((MALFORMED[1], ["BlockStored", [1], None, [9, 9], 0], None, ["", 1]))))
    return events


@hypothesis.given(histories(), st.integers(1, 8))
def test_a_mirror_is_what_plain_python_makes_of_the_events(events, at_once):
    """Blocks that are known have the media that events said; a block's first event with tokens makes it known."""
    wanted, unknown, skipped, mirror = {}, 0, 0, Mirror()
    for event in events:
        kind = event[0] if event else None
        if kind == "BlockStored" and len(event) > 6:
            for block in event[1]:
                if event[3] or block in wanted:
                    wanted.setdefault(block, set()).add(event[6])
                else:
                    unknown += 1
        elif kind == "BlockRemoved":
            for block in event[1]:
                wanted.get(block, set()).discard(event[2])
            wanted = {block: media for block, media in wanted.items() if media}
        else:
            skipped += 1
    for start in range(0, len(events), at_once):
        mirror.apply(decode(batch(*events[start : start + at_once])))
    assert mirror.counts == {"skipped": skipped, "unknown": unknown} and mirror.complete == (skipped == 0)
    assert {prefix.tokens[-2]: set(media) for prefix, media in mirror.index.items()} == wanted
    length = next((block for block in range(6) if block + 1 not in wanted), 6)
    media = {name: 2 * sum(name in wanted[block] for block in range(1, length + 1)) for name in MEDIA}
    found = mirror.lookup([token for block in range(1, 7) for token in (block, 0)], None, None, None)
    assert found == (2 * length, {name: count for name, count in media.items() if count})


def test_what_lookup_finds_is_what_the_cache_has():
    spec, names = spec_of("plain", 20), namespaces()
    encoder, mirror, forest = (
        Encoder(spec, names=names, salts="plain", lora_names={3: "sql"}),
        Mirror(),
        Forest(spec, 5),
    )
    for _ in range(20):
        for payload in encoder.encode(arrays_of(forest.draw(15), spec)):
            mirror.apply(decode(payload))
        for namespace, path, *_ in list(forest.mirror.nodes.values()):
            salt, lora = names.describe(namespace)
            levels = [
                forest.mirror.index[0, namespace, path[:end]][0] for end in range(spec.block_size, len(path) + 1, 4)
            ]
            found = mirror.lookup([*path, 3], salt, "sql" if lora else None, None)
            media = {name: 4 * levels.count(level) for level, name in enumerate(("GPU", "CPU")) if level in levels}
            assert found.tokens >= 4 * len(levels)
            if found.tokens == 4 * len(levels):  # and no further block by chance
                assert found.media == media
