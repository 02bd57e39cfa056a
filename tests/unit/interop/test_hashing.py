# SPDX-License-Identifier: Apache-2.0
"""Digests: equal in every process for equal prefixes, after any history, and different for all others."""

import hashlib
import itertools

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.blocks.hashes import first_64_bits
from kvjax.interop.hashing import block_hash, block_hashes, root_hash, salt_hash, with_hashes
from kvjax.testing import Trial, random_requests, requests
from tests.drive import EXTRA, PLAIN, TIERS
from tests.unit.debug import stories
from tests.unit.interop.forest import digest_of
from tests.wire_kit import removed, stored, updated

ROOT = root_hash()
FIRST = block_hash(ROOT, range(16))


def test_vectors():
    """Other programs compute these too, so they never change."""
    assert ROOT.hex() == "6491c07cd16c1d744f87c7c119f077ef"
    assert FIRST.hex() == "3accded638a12057a4208d66d88c63eb"
    assert block_hash(FIRST, range(16, 32)).hex() == "6c33524770d343bbc33de176cb79d7be"
    assert root_hash(None, "tenant a", "sql").hex() == "14c45be0db6ba256a7f714fc723e017e"
    assert root_hash(key=b"secret").hex() == "d5fd2f97f0f9b380e7d98bac4480ff13"


def test_a_digest_is_the_hash_of_these_bytes():
    person, text = b"kvjax-root", b"\x01\x03\x00\x00\x00\xc3\xa4b" + b"\x00" + b"\x01\x00\x00\x00\x00"
    assert root_hash("\u00e4b", None, "") == hashlib.blake2b(text, digest_size=16, person=person).digest()
    content = FIRST + bytes([2, 0, 0, 0, 5, 0, 0, 0, 255, 255, 255, 255, 7, 0, 0, 0, 0, 1, 0, 0])
    wanted = hashlib.blake2b(content, digest_size=16, key=b"k", person=b"kvjax-block").digest()
    assert block_hash(FIRST, [5, -1], [7, 256], key=b"k") == wanted


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        (b"", (7246784917737839988, 4237006361103245399, 7796665846697509819, 1496421997505913430,
               12795676230018591169)),
        (b"secret", (15419533028815909760, 1454926397626537458, 7378549307543600783, 489366106497186708,
                     10382008296132330191)),
    ],
)  # fmt: skip
def test_vectors_of_64_bits(key, wanted):
    first, tenant, llama = root_hash(key=key), root_hash(None, "tenant a", "sql", key=key), root_hash("llama", key=key)
    second = block_hash(first, range(16), key=key)
    third = block_hash(second, range(16, 32), key=key)
    assert tuple(map(first_64_bits, (first, second, third, tenant, llama))) == wanted
    if not key:
        assert first_64_bits(block_hash(first, range(4), [0, 7, 7, 0])) == 8814008483422612467


def test_the_first_64_bits_are_big_endian_and_never_0():
    assert first_64_bits(bytes(range(16))) == 0x0001020304050607
    assert first_64_bits(b"\xff" * 16) == 2**64 - 1
    assert first_64_bits(bytes(16)) == 1


def test_whatever_differs_gives_another_digest():
    texts = (None, "", "a", "b", "ab")
    roots = [root_hash(*three, key=key) for three in itertools.product(texts, repeat=3) for key in (b"", b"k")]
    blocks = [
        block_hash(parent, tokens, extra, key=key)
        for parent in (ROOT, FIRST) for key in (b"", b"k")
        for tokens, extra in (
            ([], None), ([1], None), ([1, 2], None), ([2, 1], None), ([1, 0], None), ([1], [2]), ([1], [0]), ([0], [1]),
        )
    ]  # fmt: skip
    assert len({*roots, *blocks}) == len(roots) + len(blocks)
    for same in (np.array([1, 2]), np.array([1, 2], np.uint8), jnp.array([1, 2]), (1, 2), iter([1, 2])):
        assert block_hash(ROOT, same) == block_hash(ROOT, [1, 2])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: root_hash(3), "model: got 3, wanted text or None"),
        (lambda: root_hash(salt=b"a"), "salt: got b'a', wanted text or None"),
        (lambda: root_hash(lora="\ud800"), "lora: got .*, wanted text or None"),
        (lambda: salt_hash(None), "salt: got None, wanted text"),
        (lambda: root_hash(key=b"k" * 65), "key: got 65 bytes, wanted at most 64 bytes"),
        (lambda: root_hash(key="secret"), "key: got a str, wanted at most 64 bytes"),
        (lambda: block_hash(b"", [1]), "parent: got b'', wanted a hash of 16 bytes"),
        (lambda: block_hash(FIRST.hex(), [1]), "parent: got '3acc.*, wanted a hash of 16 bytes"),
        (lambda: block_hash(ROOT, [2**31]), r"tokens: got \[2147483648\], wanted a list of integers"),
        (lambda: block_hash(ROOT, [1.0]), r"tokens: got \[1.0\], wanted a list of integers"),
        (lambda: block_hash(ROOT, [[1], [2, 3]]), r"tokens: got \[\[1\], \[2, 3\]\], wanted a list of integers"),
        (lambda: block_hash(ROOT, [1, 2], [1]), "extra_ids: got 1, wanted an id for each of 2 tokens"),
        (lambda: block_hash(ROOT, [1], ["a"]), r"extra_ids: got \['a'\], wanted a list of integers"),
    ],
)
def test_what_is_wrong_is_named(make, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        make()


# From events.

A, B, C = (2, 5), (3, 1), (2, 6)
ONE = block_hash(ROOT, [1, 2])
TWO = block_hash(ONE, [3])


def test_digests_follow_the_events():
    first = block_hashes([{"kind": "created", "group": 0}, stored(*A, 0, [1, 2]), stored(*B, A, [3])])
    assert first == {(0, *A): ONE, (0, *B): TWO}
    moved = updated(*B, 1, priority=9)
    # Block 2 is used again within the same events, after another prefix.
    events = [moved, removed(*B), removed(*A), stored(*C, 0, [7]), {"kind": "copied", "group": 0, "block": 2}]
    labelled, second = with_hashes(events, first)
    assert second == {(0, *C): block_hash(ROOT, [7])} and len(first) == 2
    assert [event.get("block_hash") for event in labelled] == [TWO, TWO, ONE, block_hash(ROOT, [7]), None]
    assert [event.get("parent_hash") for event in labelled] == [None, None, None, ROOT, None]
    assert [{k: v for k, v in event.items() if "_hash" not in k} for event in labelled] == events
    assert "block_hash" not in events[0] and with_hashes([], second) == ([], second)


def test_a_window_groups_block_has_the_digest_of_the_whole_prefix():
    events = [stored(*A, 0, [1, 2]), stored(*B, A, [3]), stored(*A, A, [3], group=1)]
    hashes = block_hashes(events)
    assert hashes[1, *A] == hashes[0, *B] == TWO
    assert block_hashes([removed(*A, 1), {"kind": "cleared", "group": 1}], hashes) == block_hashes(events[:2])
    assert block_hashes([{"kind": "cleared", "group": 0}], hashes) == {(1, *A): TWO}


def test_salts_and_adapters_are_hashed_by_their_names():
    names = kvjax.Namespaces()
    number = names("tenant a", 3)
    events = [stored(*A, number, [1, 2])]
    found = block_hashes(events, names=names, loras={3: "sql", 4: "chat"}, model="m", key=b"k")
    assert found[0, *A] == block_hash(root_hash("m", "tenant a", "sql", key=b"k"), [1, 2], key=b"k")
    other = kvjax.Namespaces()
    other("tenant b"), other("tenant a", 0)
    assert (
        block_hashes([stored(*B, 2, [1, 2])], names=other, loras={0: "sql"}, model="m", key=b"k")[0, *B] == found[0, *A]
    )


@pytest.mark.parametrize(
    ("events", "options", "complaint"),
    [
        ([removed(*A)], {}, r"events: got removed of node \(0, 2, 5\), wanted a node of `hashes`"),
        ([stored(*B, A, [1])], {}, r"events: got stored under node \(0, 2, 5\), wanted a node of `hashes`"),
        ([stored(*A, 0, [1])] * 2, {}, r"events: got stored of node \(0, 2, 5\), wanted a new node"),
        ([stored(*A, 2, [1])], {}, "names: got no entry for namespace 2, wanted the Namespaces that issued it"),
        ([stored(*A, 1, [1])], {"lora": 3}, "loras: got no name for adapter 3, wanted a name for each adapter in use"),
        ([stored(*A, 1, [1])], {"lora": 3, "loras": {3: None}}, "loras: got no name for adapter 3"),
        ([], {"loras": {3: "sql", 4: "sql"}}, "loras: got .*, wanted a different name for each adapter"),
    ],
)
def test_events_without_a_name_are_refused(events, options, complaint):
    names = kvjax.Namespaces()
    names(lora=options.get("lora", 9))
    hashes = {(0, 9, 9): FIRST}
    with pytest.raises(ValueError, match=f"^{complaint}"):
        with_hashes(events, hashes, names=names, loras=options.get("loras"))
    assert hashes == {(0, 9, 9): FIRST}


def test_digests_want_decoded_events():
    with pytest.raises(ValueError, match=r"^events: got EventLog, wanted a list from to_list"):
        block_hashes(kvjax.events.init_log(3, 4))


# From caches with random histories.


def of_path(namespace, path, spec, names):
    """The digest of a token path, by `root_hash` and `block_hash` alone."""
    return digest_of(path, spec.block_size, root_hash("m", *names.describe(namespace)), extra=spec.extra_ids)


def after(trial, history, names):
    """Verifies the digests of events after requests; returns {(salt, token path): digest} of all stored blocks."""
    spec, hashes, ever = trial.state.spec, {}, {}
    for request in history:
        before, events = trial.mirror, trial.do(request)
        if events is None:
            continue
        labelled, hashes = with_hashes(kvjax.to_list(events), hashes, names=names, model="m")
        for event in labelled:
            if event["kind"] in ("removed", "updated"):
                node = event["group"], event["block"], event["generation"]
                entry = before.nodes.get(node) or trial.mirror.nodes[node]
                assert event["block_hash"] == of_path(*entry[:2], spec, names)
        assert hashes == block_hashes(kvjax.events.snapshot(trial.state), names=names, model="m")
        assert hashes.keys() == trial.mirror.nodes.keys()
        for node, digest in hashes.items():
            namespace, path, *_ = trial.mirror.nodes[node]
            assert digest == of_path(namespace, path, spec, names)
            ever[names.describe(namespace), path] = digest
    return ever


@pytest.mark.slow
@pytest.mark.parametrize("spec", [PLAIN, EXTRA], ids=["plain", "extra ids"])
def test_equal_prefixes_have_equal_digests_in_caches_that_differ_in_all_else(spec):
    """The second cache has served other requests before, so that blocks differ, and numbers tenants the other way."""
    found = []
    for salts, others in (("ab", 0), ("ba", 40)):
        names, numbers = kvjax.Namespaces(), [0]
        for salt in salts:
            names(salt)
        numbers += [names("a"), names("b")]
        history = itertools.islice(random_requests(1, spec, num_namespaces=3), 200)
        ours = [{**request, "namespace": numbers[request.get("namespace", 0)]} for request in history]
        before = itertools.islice(random_requests(2, spec, num_namespaces=3), others)
        over = [{"verb": "release", "seq": seq} for seq in range(spec.max_seqs)]
        found.append(after(Trial(kvjax.init(spec)), [*before, *over, *ours], names))
    one, other = found
    both = one.keys() & other.keys()
    assert {pair for pair, _ in both} == {(None, None), ("a", None), ("b", None)} and len(both) > 20
    assert all(one[prefix] == other[prefix] for prefix in both)
    union = one | other
    assert len(set(union.values())) == len(union) > len(one)


@pytest.mark.slow
def test_digests_are_those_of_the_paths_over_windows_and_a_host_tier():
    story, names = stories.tiers(), kvjax.Namespaces()
    hashes = block_hashes(story.recorded, names=names, model="m")
    assert hashes == block_hashes(kvjax.events.snapshot(story.state), names=names, model="m")
    assert {group for group, *_ in hashes} == {0, 1} and hashes.keys() == story.mirror.nodes.keys()
    assert {event["kind"] for event in story.recorded} >= {"stored", "updated"}
    for node, digest in hashes.items():
        namespace, path, *_ = story.mirror.nodes[node]
        assert digest == of_path(namespace, path, TIERS, names)


@pytest.mark.slow
@hypothesis.settings(max_examples=30, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(requests(TIERS, num_namespaces=1))
def test_digests_survive_windows_and_a_host_tier(history):
    after(Trial(kvjax.init(TIERS)), history, kvjax.Namespaces())
