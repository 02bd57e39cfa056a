# SPDX-License-Identifier: Apache-2.0
"""The host tier with bytes: whatever is findable holds the K/V of its tokens, also when moves fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.pools import host as host_pool
from tests import drive

ROWS, SIZE, WIDTH = 3, 4, 24
LAYERS = [kvjax.LayerSpec(1, 1), kvjax.LayerSpec(1, 1, window=6)]
OPTIONS = {"max_seqs": ROWS, "max_length": WIDTH, "block_size": SIZE, "dtype": "float32"}


def make_spec(**options):
    return kvjax.make_spec(LAYERS, **{"num_blocks": 8, "num_host_blocks": 6, **OPTIONS, **options})


@jax.jit
def feed(cache, tokens, count):
    """Computes the rows' next tokens; the K/V of a token is its number."""
    view = cache.view(count, tokens.shape[1])
    pools, kv = cache.pools, tokens.astype(jnp.float32)[..., None, None]
    for layer in range(len(LAYERS)):
        pools = kvjax.write(pools, layer, kv, -kv, view)
    return kvjax.Cache(cache.state, pools).commit(tokens, count)


def padded(tokens):
    return np.pad(np.asarray(tokens, np.int32), (0, WIDTH - len(tokens)))


def holds(tiered, group, row, tokens):
    """Whether a pool row, of the device or the host, holds the K/V of these tokens."""
    n = tiered.cache.state.spec.groups[group].num_blocks
    pool = tiered.cache.pools.arrays[group][0] if row < n else tiered.host.arrays[group][0]
    kv = np.asarray(pool[row if row < n else row - n])[0, :, 0, : len(tokens), 0]
    return np.array_equal(kv, [tokens, [-t for t in tokens]])


def assert_true_bytes(tiered, texts):
    """Everything that can be found, and all that rows can read, holds what it says."""
    state = tiered.cache.state
    kvjax.check(state)
    host = jax.device_get(state)
    tree = host.groups[0]
    for g, group in enumerate(host.groups):
        for block in np.flatnonzero((group.blocks.fill > 0) & (group.host.arriving == 0)):
            anchor = block if group.anchor is None else group.anchor[block]
            tokens = tree.blocks.tokens[anchor, : group.blocks.fill[block]].tolist()
            assert holds(tiered, g, group.host.slot[block], tokens), f"group {g}, block {block}"
        for seq, text in texts.items():
            written = text[: host.seqs.committed[seq]]
            for place, block in enumerate(group.table[seq]):
                part = written[place * SIZE : (place + 1) * SIZE]
                if block >= 0 and part:
                    assert holds(tiered, g, group.host.slot[block], part), f"row {seq}, place {place}"


class Life:
    """Rows come and go at random, and with them what is cached."""

    def __init__(self, seed, **options):
        self.rng = np.random.default_rng(seed)
        self.tiered = kvjax.tiers.TieredCache.create(make_spec(**options))
        self.texts, self.failures, self.mirror = {}, 0, kvjax.events.Mirror()
        self.documents = self.rng.integers(1, 50, (3, WIDTH)).tolist()

    def do(self, verb, *args, **kwargs):
        """A verb that moves; False if it was refused or its moves have failed."""
        try:
            self.tiered, events = getattr(self.tiered, verb)(*args, **kwargs)
        except kvjax.tiers.FailedTransfer as error:
            self.tiered, self.failures = error.tiered, self.failures + 1
            for row in error.lost:
                self.texts.pop(row, None)
            return False
        return bool(events.ok)

    def step(self):
        rng, rows = self.rng, sorted(self.texts)
        free = [row for row in range(ROWS) if row not in self.texts]
        kind = rng.choice(["start", "start", "start", "end", "end", "grow", "swap", "shift", "watermark"])
        if kind == "start" and free:
            kept = int(rng.integers(1, WIDTH - 2))
            text = [*self.documents[rng.integers(3)][:kept], *rng.integers(1, 50, int(rng.integers(0, 3))).tolist()]
            if self.do("admit", free[0], padded(text), len(text)):
                self.texts[free[0]] = text
                self.feed(free[0])
        elif kind == "end" and rows:
            row = int(rng.choice(rows))
            self.tiered = self.tiered.replace(self.tiered.cache.release(row)[0])
            del self.texts[row]
        elif kind == "grow" and rows:
            row = int(rng.choice(rows))
            mask = np.arange(ROWS) == row
            if len(self.texts[row]) < WIDTH and self.do("extend", mask):
                self.texts[row] = [*self.texts[row], int(rng.integers(1, 50))]
                self.feed(row)
        elif kind == "swap" and rows:
            row = int(rng.choice(rows))
            self.do("swap_in" if self.tiered.cache.state.seqs.swapped[row] else "swap_out", row)
        elif kind == "shift":
            group = int(rng.integers(2))
            block = np.full(2, kvjax.state.NO_BLOCK, np.int32)
            block[0] = rng.integers(14)
            self.do(str(rng.choice(["offload", "onboard"])), block, group=group)
        elif kind == "watermark":
            self.do("watermark", int(rng.integers(6)), most=4, group=int(rng.integers(2)))

    def feed(self, row):
        start = int(self.tiered.cache.state.seqs.committed[row])
        new = self.texts[row][start:]
        tokens, count = np.zeros((ROWS, WIDTH), np.int32), np.zeros(ROWS, np.int32)
        tokens[row, : len(new)], count[row] = new, len(new)
        cache, events = feed(self.tiered.cache, tokens, count)
        assert bool(events.ok)
        self.tiered = self.tiered.replace(cache)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "dangerous"), [(3, True), pytest.param(0, False, marks=pytest.mark.slow)])
def test_what_is_findable_holds_its_tokens(seed, dangerous, monkeypatch):
    life, copy = Life(seed), host_pool._copy

    def failing(*args):  # of several copies of one transfer, those before have been made
        if life.rng.random() < 0.15:
            raise MemoryError("no more pinned memory")
        return copy(*args)

    if dangerous:
        monkeypatch.setattr(host_pool, "_copy", failing)
    moved = 0
    for _ in range(70):
        life.step()
        assert_true_bytes(life.tiered, life.texts)
        moved = max(moved, int(life.tiered.cache.state.groups[0].host.moves))
    assert moved > 5
    assert (life.failures > 0) == dangerous


def serve(tiered, seq, text):
    """A whole life of a sequence; how many tokens it found."""
    tiered, events = tiered.admit(seq, padded(text), len(text))
    assert bool(events.ok)
    start = int(events.cached[0])
    tokens, count = np.zeros((ROWS, WIDTH), np.int32), np.zeros(ROWS, np.int32)
    tokens[seq, : len(text) - start], count[seq] = text[start:], len(text) - start
    cache, _ = feed(tiered.cache, tokens, count)
    return tiered.replace(cache.release(seq)[0]), start


@pytest.mark.long
@pytest.mark.slow
def test_evicted_documents_come_back():
    tiered = kvjax.tiers.TieredCache.create(make_spec(num_host_blocks=24))
    texts = [list(range(100 * n + 1, 100 * n + WIDTH)) for n in range(4)]  # 6 blocks each, where there are 8
    for text in texts:
        tiered, found = serve(tiered, 0, text)
        assert found == 0
    for text in texts:
        tiered, found = serve(tiered, 0, text)
        assert found == WIDTH - 2  # all but the last token
        assert_true_bytes(tiered, {})
    alone = kvjax.lookup(tiered.cache.state, padded(texts[0]), len(texts[0]), tiers=("device",))
    both = kvjax.lookup(tiered.cache.state, padded(texts[0]), len(texts[0]))
    assert int(alone.cached_tokens) < int(both.cached_tokens)
    assert int(both.host_tokens) > 0


@pytest.mark.slow
def test_after_a_watermark_a_loop_evicts_nothing():
    tiered = kvjax.tiers.TieredCache.create(make_spec(num_host_blocks=24))
    text = list(range(1, 9))
    for n in range(4):
        tiered, _ = serve(tiered, 0, [100 * n + t for t in text])
    tiered, events = tiered.admit(0, padded([5]), 1)
    for group in range(2):
        tiered, events = tiered.watermark(4, most=8, group=group)
        assert bool(events.ok)
        assert int(tiered.cache.state.groups[group].num_empty) >= 4

    @jax.jit
    def loop(cache):
        def one(cache, token):
            tokens, active = jnp.zeros((ROWS, 1), jnp.int32) + token, jnp.arange(ROWS) == 0
            cache, extended = cache.extend(active)
            cache, committed = feed(cache, tokens, active.astype(jnp.int32))
            return cache, (kvjax.events.counts(extended)["removed"], extended.ok & committed.ok)

        cache, _ = feed(cache, jnp.full((ROWS, 1), 5, jnp.int32), (jnp.arange(ROWS) == 0).astype(jnp.int32))
        return jax.lax.scan(one, cache, jnp.arange(12, dtype=jnp.int32))

    cache, (removed, ok) = loop(tiered.cache)
    assert bool(jnp.all(ok))
    assert int(jnp.sum(removed)) == 0
    for n in range(4):  # and nothing is lost
        found = kvjax.lookup(cache.state, padded([*(100 * n + t for t in text), 1]), 9)
        assert int(found.cached_tokens) == 8


@pytest.mark.long
@pytest.mark.slow
def test_a_sequence_goes_and_comes_back():
    tiered = kvjax.tiers.TieredCache.create(make_spec())
    text = list(range(1, 20))
    tiered, _ = tiered.admit(1, padded(text), len(text))
    tokens, count = np.zeros((ROWS, WIDTH), np.int32), np.asarray([0, len(text), 0], np.int32)
    tokens[1, : len(text)] = text
    tiered = tiered.replace(feed(tiered.cache, tokens, count)[0])
    tiered, events = tiered.swap_out(1)
    assert bool(events.ok)
    state = tiered.cache.state
    assert int(state.groups[0].num_empty) == 8
    assert kvjax.extend(state, np.asarray([False, True, False]))[1].status.tolist() == [0, kvjax.Status.HELD, 0]
    for verb, args in (("fork", (1, 2)), ("truncate", (1, 5)), ("swap_out", (1,))):
        verb = drive.verb(verb)
        assert verb(state, *args)[1].status.tolist() == [kvjax.Status.BAD_REQUEST]
    other = [900 + t for t in range(22)]
    tiered, _ = serve(tiered, 0, other)  # uses the room
    tiered, events = tiered.swap_in(1)
    assert bool(events.ok)
    assert_true_bytes(tiered, {1: text})
    tiered, events = tiered.extend(np.asarray([False, True, False]))
    assert bool(events.ok)


@pytest.mark.slow
def test_a_block_on_the_move_cannot_be_found():
    state = kvjax.init(kvjax.make_spec(num_blocks=4, num_host_blocks=4, **OPTIONS))
    tokens = padded(range(1, 9))
    state, _ = kvjax.admit(state, 0, tokens, 8)
    state, _ = kvjax.commit(state, tokens[None, :8], np.asarray([8]), seqs=np.asarray([0]))
    state, _ = kvjax.release(state, 0)
    blocks = np.flatnonzero(np.asarray(state.groups[0].blocks.fill)).astype(np.int32)

    def found(state):
        return int(kvjax.lookup(state, padded(range(1, 10)), 9).cached_tokens)

    moving, events = kvjax.tiers.offload(state, blocks)
    assert bool(events.ok)
    assert (found(state), found(moving)) == (8, 0)
    assert kvjax.tiers.offload(moving, blocks)[1].status.tolist() == [kvjax.Status.BAD_REQUEST]  # not on the device
    assert kvjax.tiers.onboard(moving, blocks)[1].status.tolist() == [kvjax.Status.HELD]
    assert kvjax.evict(moving, blocks)[1].status.tolist() == [kvjax.Status.HELD]
    assert kvjax.reset(moving)[1].status.tolist() == [kvjax.Status.HELD]
    done, _ = kvjax.tiers.complete(moving, events.transfer, True)
    assert found(done) == 8
    lost, gone = kvjax.tiers.complete(moving, events.transfer, False)
    assert found(lost) == 0
    assert [event["kind"] for event in kvjax.to_list(gone)] == ["removed", "removed"]
    assert int(lost.groups[0].host.num_empty) == 4
    again, _ = kvjax.tiers.complete(done, events.transfer, False)  # said twice: what is over is over
    assert found(again) == 8


PLAIN = {"layers": [kvjax.LayerSpec(1, 1)], "max_seqs": 3, "max_length": 8, "block_size": 4, "dtype": "float32"}


class Tenants:
    """A cache of one layer over two tiers whose K/V say whose they are; whole lives of rows, at -O0 where it can be."""

    def __init__(self, **options):
        self.tiered = kvjax.tiers.TieredCache.create(kvjax.make_spec(**{**PLAIN, **options}))
        self.width = self.tiered.cache.state.spec.max_length

    def admit(self, seqs, texts, namespaces):
        tokens = np.stack([np.resize(text, self.width) for text in texts]).astype(np.int32)
        lengths = np.asarray([len(text) for text in texts], np.int32)
        self.tiered, events = self.tiered.admit(
            np.asarray(seqs, np.int32), tokens, lengths, namespace=np.asarray(namespaces, np.int32)
        )
        return events

    def compute(self, seq, text, namespace):
        cache = self.tiered.cache
        start = int(cache.state.seqs.committed[seq])
        tokens, count = np.zeros((3, self.width), np.int32), np.zeros(3, np.int32)
        tokens[seq, : len(text) - start], count[seq] = text[start:], len(text) - start
        self.tiered = self.tiered.replace(_compute(cache, tokens, count, namespace))

    def serve(self, text, namespace=0, seq=2):
        assert self.admit([seq], [text], [namespace]).ok
        self.compute(seq, text, namespace)
        self.tiered = self.tiered.replace(self.tiered.cache.release(seq)[0])

    def read(self, seq):
        """The keys that a row reads, of its committed tokens."""
        cache = self.tiered.cache
        (table,), count = cache.view(0, 1).tables, int(cache.state.seqs.committed[seq])
        return np.asarray(cache.pools.arrays[0][0])[table[seq], 0, 0, 0, :, 0].reshape(-1)[:count].tolist()


@jax.jit
def _compute(cache, tokens, count, namespace):
    view = cache.view(count, tokens.shape[1])
    kv = (tokens + 100 * namespace).astype(jnp.float32)[..., None, None]
    return kvjax.Cache(cache.state, kvjax.write(cache.pools, 0, kv, kv, view)).commit(tokens, count)[0]


@pytest.mark.slow
def test_what_a_row_copies_from_is_held_until_the_call_ends():
    """A later row of the call brought another tenant's block into the pool row that an earlier one copied from."""
    life = Tenants(num_blocks=3, num_host_blocks=4)
    life.serve([2, 2, 2, 2], namespace=1)
    filled = np.flatnonzero(np.asarray(life.tiered.cache.state.groups[0].blocks.fill)).astype(np.int32)
    life.tiered, _ = life.tiered.offload(filled)
    life.serve([1, 1, 1, 1])
    life.serve([3, 3, 3, 3])
    stamps = np.asarray(life.tiered.cache.state.groups[0].blocks.released)
    events = life.admit([0, 1], [[1, 1, 1, 9], [2, 2, 2, 2, 5]], [0, 1])
    assert events.status.tolist() == [kvjax.Status.OK, kvjax.Status.NO_BLOCKS]
    assert (events.cached.tolist(), life.read(0)) == ([3, 0], [1, 1, 1])
    state = life.tiered.cache.state
    kvjax.check(state)
    assert np.array_equal(state.groups[0].blocks.released, stamps)  # to be copied from is no release
    life.compute(0, [1, 1, 1, 9], 0)
    assert life.read(0) == [1, 1, 1, 9]
    events = life.admit([1], [[2, 2, 2, 2, 5]], [1])  # alone it can be had
    assert (events.status.tolist(), events.cached.tolist()) == ([kvjax.Status.OK], [4])
    assert life.read(1) == [102] * 4


@pytest.mark.slow
def test_contents_computed_again_keep_their_children_on_the_host():
    """What a loop may evict is known after a commit has brought a block back from over its children."""
    life = Tenants(num_blocks=4, num_host_blocks=4, max_length=12)
    life.serve([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    blocks = np.flatnonzero(np.asarray(life.tiered.cache.state.groups[0].blocks.fill)).astype(np.int32)
    life.tiered, events = life.tiered.offload(blocks)
    assert events.ok
    prompt = np.asarray([1, 1, 1, 1, 2, 2, 2, 2], np.int32)
    state, _ = kvjax.admit(life.tiered.cache.state, 0, prompt, 8)
    state, _ = kvjax.commit(state, prompt[None], np.asarray([8]), seqs=np.asarray([0]))
    state, _ = kvjax.release(state, 0)
    kvjax.check(state)
    assert int(state.groups[0].num_cached) == 2  # over the last block, which is on the host
    filled, events = kvjax.admit(state, 0, np.full(12, 7, np.int32), 12)
    assert events.status.tolist() == [kvjax.Status.NO_BLOCKS]
    jax.tree.map(np.testing.assert_array_equal, state, filled)
    kvjax.events.index_of(filled)


@pytest.mark.slow
def test_a_tail_on_the_host_is_not_stored_as_if_it_were_on_the_device():
    layers = [kvjax.LayerSpec(1, 1, window=6)]
    state = kvjax.init(kvjax.make_spec(**{**PLAIN, "layers": layers}, num_blocks=4, num_host_blocks=4))
    tokens = np.arange(1, 7, dtype=np.int32)
    state, admitted = kvjax.admit(state, 0, tokens, 6)
    state, committed = kvjax.commit(state, tokens[None], np.asarray([6]), seqs=np.asarray([0]))
    state, swapped = kvjax.tiers.swap_out(state, 0)
    state, done = kvjax.tiers.complete(state, swapped.transfer, True)
    state, released = kvjax.release(state, 0)
    kvjax.check(state)
    heard = [event for each in (admitted, committed, swapped, done, released) for event in kvjax.to_list(each)]
    assert kvjax.fold(heard).index == kvjax.events.index_of(state)


def test_errors_name_the_argument():
    state = kvjax.init(kvjax.make_spec(num_blocks=4, **OPTIONS))
    with pytest.raises(ValueError, match=r"^group: got 0, which has no host tier"):
        kvjax.tiers.offload(state, np.asarray([0]))
    with pytest.raises(ValueError, match=r"^state: got a cache without a host tier"):
        kvjax.tiers.swap_out(state, 0)
    with pytest.raises(ValueError, match=r"^tiers: got \('host',\), wanted"):
        kvjax.admit(state, 0, padded([1]), 1, tiers=("host",))
    with pytest.raises(ValueError, match=r"^spec: got one without host blocks"):
        kvjax.tiers.TieredCache.create(state.spec)
    with pytest.raises(ValueError, match=r"^most: got 0"):
        kvjax.tiers.watermark(kvjax.init(make_spec()), 1, most=0)
