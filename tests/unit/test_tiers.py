# SPDX-License-Identifier: Apache-2.0
"""The host tier: who leaves it, and moves that fail. `tests/oracle/test_bytes.py` compares all bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.pools import host as host_pool
from tests.drive import Driver, lines, padded

ROWS, SIZE, WIDTH = 3, 4, 24
LAYERS = [kvjax.LayerSpec(1, 1), kvjax.LayerSpec(1, 1, window=6)]
OPTIONS = {"max_seqs": ROWS, "max_length": WIDTH, "block_size": SIZE, "dtype": "float32"}
SMALL = {**OPTIONS, "max_length": 12, "num_blocks": 4, "num_host_blocks": 4}
ONE = kvjax.make_spec([kvjax.LayerSpec(1, 1)], **SMALL)


def make_spec(**options):
    return kvjax.make_spec(LAYERS, **{"num_blocks": 8, "num_host_blocks": 6, **OPTIONS, **options})


@pytest.mark.long
def test_a_block_on_the_move_cannot_be_found():
    cache, prompt = Driver(kvjax.init(ONE)), [*range(1, 10)]
    cache.start(0, prompt[:8])
    cache.do("release", 0)
    blocks = np.flatnonzero(np.asarray(cache.state.groups[0].blocks.fill)).astype(np.int32)
    assert cache.found(prompt) == 8
    transfer = cache.do("offload", blocks, complete=False).transfer
    assert cache.found(prompt) == 0
    assert cache.status("offload", blocks) == ["BAD_REQUEST"]  # not on the device
    assert cache.status("onboard", blocks) == ["HELD"]
    assert cache.status("evict", blocks) == ["HELD"]
    assert cache.status("reset") == ["HELD"]
    moving = cache.state
    cache.do("complete", transfer, True)
    assert cache.found(prompt) == 8
    cache.do("complete", transfer, False)  # a second `complete` has no effect
    assert cache.found(prompt) == 8
    cache = Driver(moving)
    cache.ask("complete", transfer, False)
    assert cache.found(prompt) == 0
    assert [event["kind"] for event in cache.recorded] == ["removed", "removed"]
    assert int(cache.state.groups[0].host.num_empty) == 4
    cache.start(0, prompt[:8])
    assert cache.grow(1, 0, 0)[0] == "OK"
    transfer = cache.do("swap_out", 0, complete=False).transfer
    assert cache.status("swap_in", 0) == ["HELD"]
    cache.do("complete", transfer, True)
    assert cache.status("commit", np.ones((1, 1), np.int32), np.ones(1, np.int32), seqs=[0]) == ["BAD_REQUEST"]
    cache.do("swap_in", 0)


class Tenants(Driver):
    """A cache of one layer over two tiers, whose K/V identify tenants. All have spec `ONE`, to share programs."""

    def __init__(self, num_blocks):
        super().__init__(kvjax.tiers.TieredCache.create(ONE, num_blocks=num_blocks))
        self.width = ONE.max_length

    def admit_all(self, seqs, texts, namespaces):
        tokens = np.stack([padded(text, self.width, text) for text in texts])
        lengths = np.asarray([len(text) for text in texts], np.int32)
        return self.ask(
            "admit", np.asarray(seqs, np.int32), tokens, lengths, namespace=np.asarray(namespaces, np.int32)
        )

    def compute(self, seq, text, namespace):
        new = text[int(self.state.seqs.committed[seq]) :]
        cache, events = _compute(self.cache.cache, *lines({seq: new}, 3, self.width), namespace)
        self.cache = self.cache.replace(cache)
        self.follow(events)

    def serve(self, text, namespace=0, seq=2):
        assert self.admit_all([seq], [text], [namespace]).ok
        self.compute(seq, text, namespace)
        self.do("release", seq)

    def read(self, seq):
        """The keys that a row reads, of its committed tokens."""
        cache = self.cache.cache
        (table,), count = cache.view(0, 1).tables, int(cache.state.seqs.committed[seq])
        return np.asarray(cache.pools.arrays[0][0])[table[seq], 0, 0, 0, :, 0].reshape(-1)[:count].tolist()


@jax.jit
def _compute(cache, tokens, count, namespace):
    view = cache.view(count, tokens.shape[1])
    kv = (tokens + 100 * namespace).astype(jnp.float32)[..., None, None]
    return kvjax.Cache(cache.state, kvjax.write(cache.pools, 0, kv, kv, view)).commit(tokens, count)


@pytest.mark.slow
def test_what_a_row_copies_from_is_held_until_the_call_ends():
    """A bug: a later row of the call onboarded another tenant's block into the pool row that an earlier one copied."""
    life = Tenants(num_blocks=3)
    life.serve([2, 2, 2, 2], namespace=1)
    filled = np.flatnonzero(np.asarray(life.state.groups[0].blocks.fill)).astype(np.int32)
    life.do("offload", filled)
    life.serve([1, 1, 1, 1])
    life.serve([3, 3, 3, 3])
    stamps = np.asarray(life.state.groups[0].blocks.released)
    events = life.admit_all([0, 1], [[1, 1, 1, 9], [2, 2, 2, 2, 5]], [0, 1])
    assert events.status.tolist() == [kvjax.Status.OK, kvjax.Status.NO_BLOCKS]
    assert (events.cached.tolist(), life.read(0)) == ([3, 0], [1, 1, 1])
    assert np.array_equal(life.state.groups[0].blocks.released, stamps)  # being a source is no release
    life.compute(0, [1, 1, 1, 9], 0)
    assert life.read(0) == [1, 1, 1, 9]
    events = life.admit_all([1], [[2, 2, 2, 2, 5]], [1])  # alone it fits
    assert (events.status.tolist(), events.cached.tolist()) == ([kvjax.Status.OK], [4])
    assert life.read(1) == [102] * 4


def of_documents(number, policy=None, **options):
    """A cache that has as many documents of a block each, the first one the oldest; and their blocks."""
    cache = Driver(kvjax.init(kvjax.make_spec([kvjax.LayerSpec(1, 1)], **{**SMALL, **options}), policy))
    for n in range(number):
        cache.start(0, [10 * n + 1] * 4)
        cache.do("release", 0)
    first = np.asarray(cache.state.groups[0].blocks.tokens)[:, 0].tolist()
    return cache, [first.index(10 * n + 1) for n in range(number)]


def changes(events):
    return [(event["kind"], event["block"]) for event in kvjax.to_list(events)]


def findable(cache):
    return set(np.flatnonzero(np.asarray(cache.state.groups[0].blocks.fill)).tolist())


@pytest.mark.slow
def test_a_full_host_keeps_the_blocks_that_are_sent_to_it():
    """Its victims are others. Where it has none, `offload` is refused, and nothing is lost."""
    cache, ids = of_documents(4, num_host_blocks=2)
    assert cache.status("offload", np.array([*ids[:3], -1], np.int32)) == ["NO_BLOCKS"]
    cache.do("offload", np.array([*ids[:2], -1, -1], np.int32))
    events = cache.do("offload", np.array([*ids[2:], -1, -1], np.int32))
    assert sorted(changes(events)[:2]) == [("removed", block) for block in sorted(ids[:2])]
    assert sorted(changes(events)[2:]) == [("updated", block) for block in sorted(ids[2:])]
    assert findable(cache) == set(ids[2:])


@pytest.mark.slow
def test_watermark_leaves_on_the_device_what_the_host_has_no_space_for():
    cache, ids = of_documents(4, num_host_blocks=2)
    cache.do("watermark", 4, max_blocks=4)
    assert findable(cache) == set(ids) and int(cache.state.groups[0].num_empty) == 2
    assert cache.found([31] * 5, tiers=("device",)) == 4  # the youngest
    events = cache.do("watermark", 4, max_blocks=4)
    assert sorted(kind for kind, _ in changes(events)) == ["removed"] * 2 + ["updated"] * 2
    assert findable(cache) == set(ids[2:])
    for row in (0, 1):  # rows that are swapped out take all of the host
        cache.start(row, [50 + row] * 4)
    for row in (0, 1):
        cache.do("swap_out", row)
    assert findable(cache) >= set(cache.state.groups[0].table[:2, 0].tolist())
    cache.start(2, [99] * 4)
    cache.do("release", 2)
    assert not changes(cache.do("watermark", 4, max_blocks=4)) and cache.found([99] * 5, tiers=("device",)) == 4


@pytest.mark.slow
def test_a_block_that_is_the_hosts_victim_at_once_is_removed_and_never_arrives():
    """The youngest block leaves a tier first, so that the host keeps its own: readers hear that the other is gone."""
    youngest = kvjax.by_score(lambda blocks: (blocks.clock - blocks.stored).astype(np.float32))
    cache, ids = of_documents(2, youngest, num_host_blocks=2)
    cache.do("offload", np.array([*ids, -1, -1], np.int32))
    for n in range(5, 10):
        cache.start(0, [10 * n + 1] * 4, tiers=("device", "host"))
        cache.do("release", 0)
    assert {event["block"] for event in cache.recorded if event["kind"] == "updated"} == set(ids)
    assert sum(event["kind"] == "removed" for event in cache.recorded) == 1
    assert findable(cache) >= set(ids)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["swap_out", "swap_in"])
def test_a_row_whose_swap_fails_stays_where_it_is(verb, monkeypatch):
    """A host block that the copies may have overwritten is lost, and the row is not."""
    cache, text = Tenants(num_blocks=4), [1, 1, 1, 1, 2, 2, 2, 2, 3]
    for document in ([5] * 4, [6] * 4, [7] * 4, [8] * 4):
        cache.serve(document)
    cache.do("watermark", 4, max_blocks=4)
    assert cache.admit_all([1], [text], [0]).ok
    cache.compute(1, text, 0)
    if verb == "swap_in":
        cache.do("swap_out", 1)
        cache.serve([9] * 4)
    row = jax.device_get((cache.state.seqs, cache.state.groups[0].table))
    copy, calls = host_pool._copy, []

    def second_fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no more pinned memory")
        return copy(*args)

    monkeypatch.setattr(host_pool, "BATCHES", (1,))
    with monkeypatch.context() as patch:
        patch.setattr(host_pool, "_copy", second_fails)
        with pytest.raises(kvjax.tiers.FailedTransfer) as caught:
            cache.ask(verb, 1)
    failure = caught.value
    cache.cache = failure.tiered
    assert failure.lost == [] and failure.events.status.tolist() == [kvjax.Status.NO_BLOCKS]
    assert not changes(failure.events)
    cache.follow(failure.events)
    cache.follow(failure.removed)
    kvjax.check(cache.state)
    assert kvjax.events.index_of(cache.state) == cache.mirror.index
    jax.tree.map(np.testing.assert_array_equal, row, (cache.state.seqs, cache.state.groups[0].table))
    assert verb == "swap_in" or changes(failure.removed)  # the host was full
    cache.do(verb, 1)
    if verb == "swap_out":
        cache.do("swap_in", 1)
    assert cache.read(1) == text


def test_errors_name_the_argument():
    state = kvjax.init(kvjax.make_spec(num_blocks=4, **OPTIONS))
    with pytest.raises(ValueError, match=r"^group: got 0, which has no host tier"):
        kvjax.tiers.offload(state, np.asarray([0]))
    with pytest.raises(ValueError, match=r"^state: got a cache without a host tier"):
        kvjax.tiers.swap_out(state, 0)
    with pytest.raises(ValueError, match=r"^tiers: got \('host',\), wanted"):
        kvjax.admit(state, 0, padded([1], WIDTH), 1, tiers=("host",))
    with pytest.raises(ValueError, match=r"^spec: got a spec without host blocks"):
        kvjax.tiers.TieredCache.create(state.spec)
    with pytest.raises(ValueError, match=r"^max_blocks: got 0"):
        kvjax.tiers.watermark(kvjax.init(make_spec()), 1, max_blocks=0)
