# SPDX-License-Identifier: Apache-2.0
"""The bytes on vLLM's wire, and each rule that its readers have."""

import random
import struct

import msgspec
import numpy as np
import pytest

import kvjax
from kvjax.blocks.hashes import first_64_bits
from kvjax.interop import hashing
from kvjax.interop.vllm import Encoder, Mirror, decode
from tests.unit.interop.forest import SHAPES, Forest, arrays_of, namespaces, projected, spec_of, with_foreign
from tests.wire_kit import removed, stored, updated

SPEC = spec_of("plain")
NOW = 1.5
BEFORE = b"\x93\xcb" + struct.pack(">d", NOW)
ROOT = hashing.root_hash()


def name(tokens, parent=ROOT, ids=None, key=b""):
    return hashing.block_hash(parent, tokens, ids, key=key)


def u64(digest):
    return b"\xcf" + digest[:8]


A = name([1, 2, 3, 300])
B = name([70_000, 127, 128, 65_535], A)
STORE_A = stored(1, 1, 0, [1, 2, 3, 300])
STORE_B = stored(2, 1, (1, 1), [70_000, 127, 128, 65_535])
TOKENS_A = b"\x01\x02\x03\xcd\x01\x2c"
TOKENS_B = b"\xce\x00\x01\x11\x70\x7f\xcc\x80\xcd\xff\xff"


def text(value):
    return bytes([0xA0 | len(value)]) + value.encode()


def encoded(events, **options):
    """The payloads of some events."""
    return Encoder(SPEC, **options).encode(events, NOW)


# The forms, by hand.


def test_maps_by_hand():
    [payload] = encoded([STORE_A, STORE_B, stored(3, 1, (2, 1), [9])])
    assert payload == BEFORE + b"\x91" + b"\x8a" + b"".join([
        text("type"), text("BlockStored"),
        text("block_hashes"), b"\x92", u64(A), u64(B),
        text("parent_block_hash"), b"\xc0",
        text("token_ids"), b"\x98", TOKENS_A, TOKENS_B,
        text("block_size"), b"\x04",
        text("lora_id"), b"\xc0",
        text("medium"), text("GPU"),
        text("lora_name"), b"\xc0",
        text("group_idx"), b"\x00",
        text("kv_cache_spec_kind"), text("full_attention"),
    ]) + b"\x00"  # fmt: skip


def test_arrays_by_hand():
    [payload] = encoded([STORE_A, stored(2, 1, (1, 1), [70_000, 127, 128, 65_535], level=1)], form="array", rank=3)
    first = [
        b"\x9b", text("BlockStored"), b"\x91", u64(A), b"\xc0", b"\x94", TOKENS_A, b"\x04\xc0", text("GPU"),
        b"\xc0\xc0\x00", text("full_attention"),
    ]  # fmt: skip
    second = [
        b"\x9b", text("BlockStored"), b"\x91", u64(B), u64(A), b"\x94", TOKENS_B, b"\x04\xc0", text("CPU"),
        b"\xc0\xc0\x00", text("full_attention"),
    ]  # fmt: skip
    assert payload == BEFORE + b"\x92" + b"".join(first + second) + b"\x03"


def test_arrays_of_0_11_by_hand():
    encoder = Encoder(SPEC, form="array-0.11")
    first = [b"\x97", text("BlockStored"), b"\x91", u64(A), b"\xc0", b"\x94", TOKENS_A, b"\x04\xc0", text("GPU")]
    gone = [b"\x93", text("BlockRemoved"), b"\x91", u64(A), text("GPU")]
    assert encoder.encode([STORE_A], NOW) == [BEFORE + b"\x91" + b"".join(first) + b"\x00"]
    assert encoder.encode([removed(1, 1)], NOW) == [BEFORE + b"\x91" + b"".join(gone) + b"\x00"]


@pytest.mark.parametrize("form", ["map", "array", "array-0.11"])
def test_removals_and_resets_by_hand(form):
    encoder = Encoder(SPEC, form=form)
    encoder.encode([STORE_A, STORE_B])
    [payload] = encoder.encode([{"kind": "cleared", "group": 0}], NOW)
    hashes = b"\x92" + u64(B) + u64(A)  # children first
    gone, cleared = {
        "map": (
            [b"\x84", text("type"), text("BlockRemoved"), text("block_hashes"), hashes, text("medium"), text("GPU"),
             text("group_idx"), b"\x00"],
            [b"\x81", text("type"), text("AllBlocksCleared")],
        ),
        "array": (
            [b"\x94", text("BlockRemoved"), hashes, text("GPU"), b"\x00"], [b"\x91", text("AllBlocksCleared")],
        ),
        "array-0.11": ([b"\x93", text("BlockRemoved"), hashes, text("GPU")], [b"\x91", text("AllBlocksCleared")]),
    }[form]  # fmt: skip
    assert payload == BEFORE + b"\x92" + b"".join(gone + cleared) + b"\x00"
    assert encoder.encode([{"kind": "cleared", "group": 0}], NOW) == [BEFORE + b"\x91" + b"".join(cleared) + b"\x00"]


def test_the_ints_of_long_events_have_headers_of_their_own():
    spec = kvjax.make_spec(num_blocks=4096, max_seqs=1, max_length=4096 * 16)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**31, (4096, 16)).tolist()
    chain = [stored(0, 1, 0, tokens[0]), *(stored(b, 1, (b - 1, 1), tokens[b]) for b in range(1, 4096))]
    encoder = Encoder(spec)
    [payload] = encoder.encode(chain, NOW)
    [event] = msgspec.msgpack.decode(payload)[1]
    assert len(event["block_hashes"]) == 4096 and event["token_ids"] == np.ravel(tokens).tolist()
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(payload)) == payload  # the shortest ints, as usual
    [payload] = encoder.encode([removed(b, 1) for b in range(4095, -1, -1)], NOW)
    assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == event["block_hashes"][::-1]


# The rules.


def events_of(payloads):
    return [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]


def sent(events, **options):
    """(kind, medium, hashes) of each event of the last of some lists of events."""
    encoder = Encoder(SPEC, **options)
    for some in events:
        payloads = encoder.encode(some)
    return [
        (event["type"].removeprefix("Block"), event.get("medium"), event.get("block_hashes"))
        for event in events_of(payloads)
    ]


def h(digest):
    return first_64_bits(digest)


def test_partly_filled_blocks_and_their_removals_are_left_out():
    part = stored(3, 1, (1, 1), [7])
    assert sent([[STORE_A, part, updated(3, 1, 1), removed(3, 1)]]) == [("Stored", "GPU", [h(A)])]
    assert encoded([stored(3, 1, 0, [7]), updated(3, 1, 1), removed(3, 1)]) == []
    assert encoded([]) == []


def test_stored_blocks_that_chain_are_one_event():
    """A block that is left out between them does not end the event. Another branch, level or namespace does."""
    branch, below = stored(4, 1, (1, 1), [5, 5, 5, 5]), stored(5, 1, (4, 1), [6, 6, 6, 6], level=1)
    part = stored(3, 1, (1, 1), [7])
    c, d = name([5, 5, 5, 5], A), name([6, 6, 6, 6], name([5, 5, 5, 5], A))
    assert sent([[STORE_A, part, STORE_B, branch, below]]) == [
        ("Stored", "GPU", [h(A), h(B)]), ("Stored", "GPU", [h(c)]), ("Stored", "CPU", [h(d)])
    ]  # fmt: skip
    names = namespaces()
    other = events_of(encoded([STORE_A, stored(2, 1, 1, [1, 2, 3, 300])], names=names))
    assert [len(event["block_hashes"]) for event in other] == [1, 1]
    assert other[0]["block_hashes"] != other[1]["block_hashes"]


def test_a_change_of_level_is_a_removal_and_a_store_and_one_of_priority_is_nothing():
    encoder = Encoder(SPEC)
    encoder.encode([STORE_A])
    assert encoder.encode([updated(1, 1, 0, 80)]) == []
    assert encoder.encode([updated(1, 1, 1), updated(1, 1, 0)]) == []  # back and forth
    moved = events_of(encoder.encode([updated(1, 1, 1)]))
    assert [event["type"] for event in moved] == ["BlockRemoved", "BlockStored"]
    assert [event["medium"] for event in moved] == ["GPU", "CPU"]
    assert moved[1]["token_ids"] == [1, 2, 3, 300] and moved[1]["parent_block_hash"] is None
    assert events_of(encoder.encode([removed(1, 1)]))[0]["medium"] == "CPU"


def test_moves_in_any_order_are_published_children_first_and_then_parents_first():
    """`onboard([2, 1, 0])` has events of the child first. A reader would lose a block stored before its parent."""
    c = name([5, 5, 5, 5], B)
    chain = [STORE_A, STORE_B, stored(3, 1, (2, 1), [5, 5, 5, 5])]
    host = [updated(b, 1, 1) for b in (3, 1, 2)]
    assert sent([chain, host]) == [("Removed", "GPU", [h(c), h(B), h(A)]), ("Stored", "CPU", [h(A), h(B), h(c)])]
    back = [updated(b, 1, 0) for b in (3, 2, 1)]
    assert sent([chain, host, back]) == [("Removed", "CPU", [h(c), h(B), h(A)]), ("Stored", "GPU", [h(A), h(B), h(c)])]
    mixed = [updated(3, 1, 0), updated(2, 1, 0), updated(1, 1, 1)]
    of_mixed = sent([chain, [updated(3, 1, 1), updated(2, 1, 1)], mixed])
    assert of_mixed == [
        ("Removed", "GPU", [h(A)]), ("Removed", "CPU", [h(c), h(B)]), ("Stored", "CPU", [h(A)]),
        ("Stored", "GPU", [h(B), h(c)]),
    ]  # fmt: skip


def test_all_is_cleared_only_when_no_group_keeps_anything():
    spec = spec_of("windows")
    encoder = Encoder(spec)
    encoder.encode([STORE_A, stored(0, 1, 0, [1, 2, 3, 300], group=1)])
    gone = events_of(encoder.encode([{"kind": "cleared", "group": 0}]))
    assert [(event["type"], event.get("group_idx")) for event in gone] == [("BlockRemoved", 0)]
    gone = events_of(encoder.encode([{"kind": "cleared", "group": 1}]))
    assert [(event["type"], event.get("group_idx")) for event in gone] == [
        ("BlockRemoved", 1),
        ("AllBlocksCleared", None),
    ]


def test_window_groups_say_so():
    encoder = Encoder(spec_of("windows"), form="array")
    [full, window] = events_of(encoder.encode([STORE_A, stored(5, 1, 0, [1, 2, 3, 300], group=1)]))
    assert full[8:] == [None, 0, "full_attention"] and window[8:] == [None, 1, "sliding_window", 8]
    assert full[1] == window[1] == [h(A)]
    assert events_of(encoder.encode([removed(5, 1, 1)])) == [["BlockRemoved", [h(A)], "GPU", 1]]
    oldest = Encoder(spec_of("windows"), form="array-0.11")
    assert len(events_of(oldest.encode([STORE_A, stored(5, 1, 0, [1, 2, 3, 300], group=1)]))) == 1
    assert oldest.encode([removed(5, 1, 1)]) == []


@pytest.mark.parametrize("form", ["array", "map"])
def test_kinds_of_layers_have_vllms_words(form):
    """Recurrent layers are no window."""
    latent, recurrent = kvjax.LayerSpec.latent(24, 16), kvjax.LayerSpec.recurrent({"state": (2, 3)})
    for layers, wanted in (
        ([latent, recurrent], ["mla_attention", "mamba"]),
        ([latent, kvjax.LayerSpec(1, 24), recurrent], ["full_attention", "mamba"]),
        ([latent, kvjax.LayerSpec(1, 24, window=2)], ["mla_attention", "sliding_window"]),
    ):
        spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=2, max_length=16, block_size=4)
        found = events_of(Encoder(spec, form=form).encode([STORE_A, stored(5, 1, 0, [1, 2, 3, 300], group=1)]))
        if form == "array":
            assert [event[10] for event in found] == wanted
            assert [event[11:] for event in found] == [[], [2] if wanted[1] == "sliding_window" else []]
        else:
            assert [event["kv_cache_spec_kind"] for event in found] == wanted
            windows = [event.get("kv_cache_spec_sliding_window") for event in found]
            assert windows == [None, 2 if wanted[1] == "sliding_window" else None]


def test_adapters_and_salts():
    names, sql = namespaces(), {3: "sql"}
    store = [stored(b, 1, b, [1] * 4) for b in range(4)] + [
        stored(4, 1, (1, 1), [2] * 4),
        stored(5, 1, (3, 1), [2] * 4),
    ]
    found = events_of(Encoder(SPEC, names=names, lora_names=sql).encode(store))
    spaces = {(e.get("lora_id"), e["lora_name"], e.get("cache_salt")): e["block_hashes"] for e in found[:4]}
    a, b = hashing.salt_hash("tenant a"), hashing.salt_hash("tenant b")
    assert a == "3a779d9a0f9d58a66187a31f5f83e267"
    wanted = [(None, None, None), (None, None, a), (3, "sql", None), (3, "sql", b)]
    roots = [hashing.root_hash(None, salt, lora) for salt, lora in ((None, None), ("tenant a", None), (None, "sql"),
                                                            ("tenant b", "sql"))]  # fmt: skip
    assert spaces == {space: [h(name([1] * 4, root))] for space, root in zip(wanted, roots, strict=True)}
    assert [event.get("cache_salt") for event in found[4:]] == [a, b]  # those of children, too
    keyed = events_of(Encoder(SPEC, names=names, key=b"secret").encode(store))
    assert keyed[1]["cache_salt"] == "1d9158e1b151eb6f8c248bd7de249b81" and keyed[2]["lora_name"] == "3"
    assert keyed[0]["block_hashes"] == [h(name([1] * 4, hashing.root_hash(key=b"secret"), key=b"secret"))]
    plain = events_of(Encoder(SPEC, names=names, salts="plain").encode(store))
    assert [event.get("cache_salt") for event in plain[:4]] == [None, "tenant a", None, "tenant b"]
    omitted = Encoder(SPEC, names=names, salts="omit")
    assert len(events_of(omitted.encode(store))) == 2 and omitted.unpublished_counts == {"salt_omitted": 4}


def test_a_form_without_fields_leaves_out_who_needs_them():
    names, encoder = namespaces(), Encoder(SPEC, names=namespaces(), form="array-0.11")
    store = [stored(b, 1, b, [1] * 4) for b in range(4)]
    assert len(events_of(encoder.encode(store))) == 1 and encoder.unpublished_counts == {"form_without_field": 3}
    assert names.describe(3) == ("tenant b", 3)


def test_namespaces_that_were_never_given_out_are_left_out_with_all_below():
    names = kvjax.Namespaces()
    encoder = Encoder(SPEC, names=names)
    store = [stored(1, 1, 1, [1] * 4), stored(2, 1, (1, 1), [2] * 4), stored(3, 1, (2, 1), [2])]
    assert encoder.encode(store) == [] and encoder.unpublished_counts == {"unknown_namespace": 2}
    names(salt="late")
    assert encoder.encode([stored(4, 1, (1, 1), [3] * 4)]) == []  # a child stays with its parent
    assert encoder.encode([stored(5, 1, 1, [3] * 4)]) != []
    assert encoder.encode([removed(3, 1), removed(2, 1), removed(4, 1), removed(1, 1)]) == []


EXTRA = spec_of("extra ids")


def with_ids(block, parent, ids, tokens=(1, 2, 3, 4)):
    return stored(block, 1, parent, list(tokens)[: len(ids)], extra_ids=ids)


@pytest.mark.parametrize(
    ("ids", "keys"),
    [
        ([0, 0, 0, 0], None),
        ([7, 7, 7, 7], [["image 7", 0]]),
        ([0, 7, 7, 0], [["image 7", 1]]),
        ([7, 7, 9, 7], [["image 7", 0], ["image 9", 2], ["image 7", 3]]),
        ([7, 0, 7, 9], [["image 7", 0], ["image 7", 2], ["image 9", 3]]),
    ],
)
@pytest.mark.parametrize("form", ["map", "array"])
def test_runs_of_extra_ids_are_keys_with_offsets(ids, keys, form):
    encoder = Encoder(EXTRA, extra_name="image {}".format, form=form)
    store = [with_ids(1, 0, [0, 0, 0, 0]), with_ids(2, (1, 1), ids)]
    [event] = events_of(encoder.encode(store))
    assert (event.get("extra_keys") if form == "map" else event[8]) == (keys and [None, keys])
    digest = name([1, 2, 3, 4], name([1, 2, 3, 4], ids=[0] * 4), ids)
    assert (event["block_hashes"] if form == "map" else event[1])[1] == h(digest)


def test_blocks_with_extra_ids_are_left_out_where_these_have_no_names():
    store = [with_ids(1, 0, [0] * 4), with_ids(2, (1, 1), [0, 7, 0, 0]), with_ids(3, (2, 1), [0] * 4)]
    for options, reason in (({}, "extra_id_without_name"), ({"form": "array-0.11"}, "form_without_field")):
        encoder = Encoder(EXTRA, **options)
        assert len(events_of(encoder.encode(store))) == 1 and encoder.unpublished_counts == {reason: 2}


def test_a_salt_and_extra_ids_in_arrays():
    encoder = Encoder(EXTRA, names=namespaces(), salts="plain", form="array", extra_name=str)
    [event] = events_of(encoder.encode([with_ids(1, 1, [0, 7, 0, 0]), with_ids(2, (1, 1), [0] * 4)]))
    assert event[8] == [["dynamo-cache-salt:tenant a", ["7", 1]], None]


def test_names_of_extra_ids_are_text():
    with pytest.raises(ValueError, match=r"^extra_name: got 7 for extra id 7, wanted text"):
        Encoder(EXTRA, extra_name=lambda number: number).encode([with_ids(1, 0, [7, 0, 0, 0])])


def test_of_two_blocks_with_one_name_the_second_is_left_out_with_all_below(monkeypatch):
    """Two adapters have one name, so that the second's blocks would pass for the first's."""
    names = kvjax.Namespaces()
    one, two = names(lora=3), names(lora=4)
    encoder = Encoder(SPEC, names=names, lora_names={3: "4"})
    store = [stored(1, 1, one, [1] * 4), stored(2, 1, two, [1] * 4), stored(3, 1, (2, 1), [2] * 4)]
    assert len(events_of(encoder.encode(store))) == 1 and encoder.unpublished_counts == {"collision": 2}
    later = [stored(4, 1, two, [2] * 4), stored(5, 1, one, [2] * 4)]
    assert len(events_of(encoder.encode(later[:1]))) == 1 and encoder.encode(later[1:]) == []
    below = [stored(6, 1, (2, 1), [5] * 4), removed(6, 1), stored(7, 1, (1, 1), [5] * 4)]  # 6 takes no hash from 7
    assert encoder.encode(below[:2]) == [] and len(events_of(encoder.encode(below[2:]))) == 1
    assert encoder.encode([removed(5, 1), removed(3, 1), removed(2, 1)]) == []
    assert len(events_of(encoder.encode([removed(7, 1), removed(4, 1), removed(1, 1)]))) == 1


def test_messages_are_split_below_the_most_bytes():
    spec = kvjax.make_spec(num_blocks=400, max_seqs=1, max_length=1600, block_size=4)
    encoder = Encoder(spec, max_message=2500, names=namespaces(), salts="plain", lora_names={3: "l" * 600})
    chain = [stored(0, 1, 2, [9] * 4), *(stored(b, 1, (b - 1, 1), [b] * 4) for b in range(1, 400))]
    for events in (chain, [updated(b, 1, 1) for b in range(400)], [removed(b, 1) for b in range(399, -1, -1)]):
        payloads = encoder.encode(events)
        assert len(payloads) > 1 and max(map(len, payloads)) <= 2500
    encoder.encode([stored(b, 2, 2, [b] * 4) for b in range(400)])
    snapshot, mirror = encoder.snapshot(), Mirror()
    assert max(map(len, snapshot)) <= 2500
    for payload in snapshot:
        mirror.apply(decode(payload))
    assert len(mirror) == 400


# The law: the bytes give the index, as far as the wire carries it.


@pytest.mark.parametrize("form", ["map", "array", "array-0.11"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_tells_the_index(shape, form):
    spec, names = spec_of(shape), namespaces()
    extra = {"extra_name": "image {}".format} if shape == "extra ids" else {}
    options = {"salts": "plain", **extra} if form == "array" else extra
    for seed in range(3):
        encoder, mirror, forest = Encoder(spec, names=names, form=form, **options), Mirror(), Forest(spec, seed)
        among_others, rng = Mirror(), random.Random(seed)
        expected_names = names
        if form == "array-0.11":
            expected_names, options = kvjax.Namespaces(), {}
        for _ in range(15):
            events = forest.draw(forest.rng.randrange(1, 25))
            for payload in encoder.encode(arrays_of(events, spec)):
                mirror.apply(decode(payload))
                among_others.apply(decode(with_foreign(payload, rng)))
            groups = {0} - set(range(int(spec.bare))) if form == "array-0.11" else None
            assert mirror.index == projected(forest.mirror, spec, expected_names, groups=groups, **options)
            assert among_others.index == mirror.index
        assert mirror.complete and mirror.counts == {"skipped": 0, "unknown": 0}
        late = Mirror()
        for payload in encoder.snapshot():
            late.apply(decode(payload))
        assert late.index == mirror.index


def test_names_may_forget_a_pair_while_copies_of_its_blocks_wait_to_be_sent():
    """A queue and a history have rows of blocks that are gone, and send them with their salts."""
    names, base = kvjax.Namespaces(), None
    encoder = Encoder(SPEC, names=names, salts="plain")
    for generation in range(1, 400):
        salt = f"salt {generation}"
        number = names.lend(salt)
        changes = encoder.follow([stored(0, generation, number, [generation] * 4)])
        moved = encoder.follow([updated(0, generation, 1)])
        if base is None:
            base = encoder.nodes.copy()
        base.write(changes[0])  # as a history's base learns of batches that it drops
        gone = encoder.follow([removed(0, generation)])
        names.give_back(number)
        (payload,) = encoder.payloads(encoder.messages([*changes, *moved, *gone]))
        first, *_, last = decode(payload).events
        assert first.salt == salt and first.hashes == last.hashes
        (payload,) = encoder.snapshot_of(base)
        assert [event.salt for event in decode(payload).events[1:]] == [salt]
    assert len(encoder.nodes._contents.spaces) < 200 and len(base._contents.spaces) < 200
    assert len(names) == 1
