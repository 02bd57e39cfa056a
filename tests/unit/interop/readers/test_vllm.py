# SPDX-License-Identifier: Apache-2.0
"""The reader of vLLM's wire: every form and kind of hash, other engines' too, and refusals of malformed bytes."""

import array

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from kvjax.interop.vllm import Batch, Cleared, Encoder, Mirror, Prefix, Removed, Stored, decode
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
        batch({"type": "BlockMoved"}), batch(["BlockMoved"]), batch({"type": "BlockStored"}), batch([]), batch(7),
        b"\xdd\xff\xff\xff\xff", batch()[:9] + b"\xdd\xff\xff\xff\xff", b"\x93" * 100_000,
        *(batch({"type": "BlockStored", **A, **wrong}) for wrong in (
            {"block_hashes": [7]}, {"block_hashes": [7, 7]}, {"block_hashes": "78"}, {"block_hashes": [7.0, 8.0]},
            {"block_hashes": [7, b"8" * 5000]}, {"parent_block_hash": "7"}, {"parent_block_hash": [7]},
            {"token_ids": [1, 2, 3]}, {"token_ids": [[1, 2], [3, 4]]}, {"token_ids": [1, 2, 3, 2**63]},
            {"token_ids": None}, {"block_size": 0}, {"block_size": -2}, {"block_size": 2**40}, {"medium": 7},
            {"medium": "x" * 5000}, {"lora_name": 7}, {"lora_name": "x" * 5000}, {"group_idx": -1},
            {"group_idx": 2**40}, {"extra_keys": [None]}, {"extra_keys": 7}, {"extra_keys": [7, 8]},
            {"extra_keys": [[[["deep"]]], None]}, {"extra_keys": [[{"a": 1}], None]}, {"cache_salt": 7},
            {"cache_salt": "x" * 5000}, {"kv_cache_spec_sliding_window": "8"}, {"extra_keys": [[None], None]},
        )),
        batch({"type": "BlockRemoved", "block_hashes": [7, 7], "medium": "GPU"}),
        batch({"type": "BlockStored", **A}).replace(b"\xa3GPU", b"\xa3GP\xff"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused(payload):
    with pytest.raises(ValueError, match=r".+"):
        decode(payload)


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
    assert len(mirror.index) <= 2


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


def test_a_block_may_be_on_several_media_and_goes_with_the_last():
    mirror = mirror_of(stored([1], None, [1, 2]), stored([1], None, [1, 2], medium="STORAGE"))
    assert mirror.lookup([1, 2], None, None, None) == (2, {"GPU": 2, "STORAGE": 2})
    mirror.apply(Batch(0.0, [Removed([1], "GPU", 0), Removed([9], "GPU", 0), Removed([1], "CPU", 0)], 0))
    assert mirror.lookup([1, 2], None, None, None) == (2, {"STORAGE": 2})
    mirror.apply(Batch(0.0, [Removed([1], "STORAGE", 0), Removed([1], "GPU", 3)], 0))
    assert len(mirror) == 0 and mirror.index == {} and mirror.lookup([1, 2], None, None, None) == (0, {})


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


@pytest.mark.parametrize(
    "events",
    [[stored([2], None, [3, 4, 5], size=3)], [stored([at], None, [at, 0], medium=str(at)) for at in range(40)],
     [stored(list(range(9)), None, [0] * 18)]],
)  # fmt: skip
def test_what_cannot_belong_to_a_mirror_changes_nothing(events):
    mirror = Mirror(max_blocks=8)
    mirror.apply(Batch(0.0, [STORED], 0))
    before = mirror.index
    with pytest.raises(ValueError, match=r"block_size: got 3, wanted 2|events: got .* media, wanted at most 8"):
        mirror.apply(Batch(0.0, [Removed([7], "GPU", 0), *events], 0))
    assert mirror.index == before


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
