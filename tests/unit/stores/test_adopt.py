# SPDX-License-Identifier: Apache-2.0
"""`Cache.adopt` and `TieredCache.adopt`: K/V from another cache are found, and nothing is half done."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Cache, LayerSpec, Status
from kvjax.blocks.keys import prefix_keys
from kvjax.stores import Staged, adopt, finish_adoption
from kvjax.tiers import TieredCache
from tests.drive import Driver, Verbs, verb
from tests.poison import poisoned

ADOPT = jax.jit(Cache.adopt, donate_argnums=0)


# Bytes by hand: a token's K is its number, its V less than 0.

SIZE, WIDTH, COLUMNS = 4, 16, 4
LAYERS = [LayerSpec(1, 1), LayerSpec(1, 1, window=6)]
OPTIONS = {"max_seqs": 2, "max_length": WIDTH, "block_size": SIZE, "dtype": "float32"}
SPEC = kvjax.make_spec(LAYERS, num_blocks=8, **OPTIONS)
HAVE = np.ones(COLUMNS, bool)
TEXT = np.arange(1, WIDTH + 1, dtype=np.int32)


def staged(text):
    kv = np.asarray(text, np.float32).reshape(COLUMNS, 1, 1, 1, SIZE, 1) * np.array([1, -1]).reshape(1, 1, 2, 1, 1, 1)
    return Staged(((kv.astype(np.float32),),) * 2, SPEC)


def assert_bytes(cache):
    """Asserts that all findable blocks hold the K/V of their tokens; returns how many they are."""
    state = jax.device_get(cache.state)
    kvjax.check(state)
    tree, count = state.groups[0], 0
    for number, group in enumerate(state.groups):
        for block in np.flatnonzero(group.blocks.fill > 0).tolist():
            group0_block = block if number == 0 else group.group0_block[block]
            tokens = tree.blocks.tokens[group0_block, : group.blocks.fill[block]]
            kv = np.asarray(cache.pools.arrays[number][0][block])
            np.testing.assert_array_equal(kv[0, :, 0, : len(tokens), 0], [tokens, -tokens])
            count += 1
    return count


def empty():
    """An empty cache whose K/V are NaN."""
    cache = Cache.create(SPEC)
    return cache.replace(pools=poisoned(cache.pools))


def test_a_prefix_is_found_with_its_bytes():
    cache, events = ADOPT(empty(), TEXT, np.int32(WIDTH), staged(TEXT), HAVE)
    assert assert_bytes(cache) == 2 * COLUMNS
    assert kvjax.fold(kvjax.to_list(events)).index == kvjax.events.index_of(cache.state)
    assert int(cache.lookup(TEXT, WIDTH).cached_tokens) == WIDTH - 1
    assert events.adopted is None


# Wrong arguments.


def changed(kv, arrays=lambda x: x, **fields):
    return kv.replace(arrays=jax.tree.map(arrays, kv.arrays), **fields)


KV, SCALES = staged(TEXT), ((np.ones((COLUMNS, 1, 2, 1, SIZE), np.float32),),) * 2
INT8 = kvjax.make_spec(LAYERS, num_blocks=8, **(OPTIONS | {"dtype": "int8"}))
BAD = [
    ("kv", SPEC, {"kv": KV.arrays}, "a tuple"),
    (r"kv\.arrays\[0\]\[0\]", SPEC, {"kv": changed(KV, lambda x: x[:3])}, ""),
    (r"kv\.arrays\[0\]\[0\]", SPEC, {"kv": changed(KV, lambda x: x[..., None])}, ""),
    (r"kv\.arrays\[0\]\[0\]", SPEC, {"kv": changed(KV, lambda x: x.astype(np.float16))}, ""),
    (r"kv\.arrays\[1\]\[0\]", SPEC, {"kv": KV.replace(arrays=(KV.arrays[0], (KV.arrays[0][0][:, :, :1],)))}, ""),
    (r"kv\.arrays", SPEC, {"kv": KV.replace(arrays=KV.arrays[:1])}, r"pools of groups \[1\]"),
    (r"kv\.arrays", SPEC, {"kv": KV.replace(arrays=((), KV.arrays[1]))}, r"pools of groups \[0, 1\]"),
    (r"kv\.scales", SPEC, {"kv": KV.replace(scales=SCALES)}, r"pools of groups \[1, 1\]"),
    (r"kv\.scales", INT8, {"kv": changed(KV, lambda x: x.astype(np.int8))}, r"pools of groups \[\]"),
    (
        r"kv\.scales\[0\]\[0\]", INT8,
        {"kv": changed(KV, lambda x: x.astype(np.int8), scales=jax.tree.map(lambda x: x[:, :, :1], SCALES))}, "",
    ),
    ("have", SPEC, {"have": np.ones(COLUMNS, np.int32)}, ""),
    ("have", SPEC, {"have": np.ones(COLUMNS + 1, bool)}, ""),
    ("have", SPEC, {"have": np.ones((3, COLUMNS), bool)}, ""),
    ("tokens", SPEC, {"tokens": TEXT.astype(np.float32)}, ""),
    ("length", SPEC, {"length": np.zeros(2, np.int32)}, ""),
    ("hits", SPEC, {"hits": np.zeros(COLUMNS + 1, np.int32)}, ""),
    ("now", SPEC, {"now": np.float32(1)}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spec", "change", "got"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_argument_is_named_and_nothing_is_donated(name, spec, change, got):
    arguments = {"tokens": TEXT, "length": np.int32(WIDTH), "kv": KV, "have": HAVE} | change
    tiered = spec if spec.has_host else kvjax.make_spec(
        LAYERS, num_blocks=8, num_host_blocks=2, **(OPTIONS | {"dtype": "int8" if spec is INT8 else "float32"})
    )  # fmt: skip
    cache, both = Cache.create(spec), TieredCache.create(tiered)
    for call, owner in ((functools.partial(ADOPT, cache), cache), (both.adopt, both)):
        with pytest.raises(ValueError, match=f"^{name}: got .*{got}.*wanted "):
            call(**arguments)
        assert "donated" not in repr(owner)


def test_events_and_arrived_of_a_landing():
    cache = Cache.create(SPEC)
    state, events = jax.jit(adopt)(cache.state, TEXT, np.int32(WIDTH), HAVE)
    for arrived in (np.ones(COLUMNS, np.int32), np.ones(COLUMNS - 1, bool), np.ones((1, COLUMNS), bool)):
        with pytest.raises(ValueError, match=r"^arrived: got .*wanted "):
            finish_adoption(state, events.adopted, arrived)
    other = jax.eval_shape(kvjax.admit, state, 0, TEXT, 4)[1]
    for adopted in (None, other, other.adopted):
        with pytest.raises(ValueError, match=r"^adopted: got .*wanted "):
            finish_adoption(state, adopted, HAVE)
    with pytest.raises(ValueError, match=r"^events: got events of another verb, wanted "):
        cache._finish_adoption(other, KV, HAVE)


# The oracles' machines have random adoptions and landings.


@pytest.mark.long
def test_blocks_land_once():
    state, events = jax.jit(adopt)(Cache.create(SPEC).state, TEXT, np.int32(WIDTH), HAVE)
    step = jax.jit(finish_adoption)
    landed, done = step(state, events.adopted, HAVE)
    assert bool(done.ok) and len(kvjax.to_list(done)) == 2 * COLUMNS
    landed, _ = jax.jit(kvjax.admit)(landed, np.int32(0), TEXT, np.int32(WIDTH))  # counts hits in every group
    again, refused = step(landed, events.adopted, HAVE)
    assert refused.status.tolist() == [Status.BAD_REQUEST] and kvjax.to_list(refused) == []
    chex.assert_trees_all_equal(again, landed)
    dropped, done = step(state, events.adopted, ~HAVE)
    assert bool(done.ok) and kvjax.to_list(done) == []
    assert [int(group.num_empty) for group in dropped.groups] == [8, 8]


@pytest.mark.slow
def test_two_caches_under_vmap():
    """They have different texts, and one lacks a block."""
    caches = [empty(), empty()]
    texts, kvs = np.stack([TEXT, TEXT + 100]), jax.tree.map(lambda *x: np.stack(x), KV, staged(TEXT + 100))
    lengths, have = np.array([WIDTH, WIDTH - 1], np.int32), np.array([[True] * 4, [True, True, False, True]])
    both, events = jax.jit(jax.vmap(Cache.adopt))(
        jax.tree.map(lambda *x: jnp.stack(x), *caches), texts, lengths, kvs, have
    )
    assert events.status.tolist() == [[Status.OK]] * 2
    for number, cache in enumerate(caches):
        wanted, _ = ADOPT(cache, texts[number], lengths[number], staged(texts[number]), have[number])
        one = jax.tree.map(lambda x, number=number: x[number], both)
        chex.assert_trees_all_equal(one.state, wanted.state)
        assert assert_bytes(one) == 2 * (4, 2)[number]


@pytest.mark.long
@pytest.mark.parametrize("mask", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.long)])
def test_keys_of_other_contents_end_a_prefix(mask, monkeypatch):
    """Keys have only a few values. A hit may be missed, and none is wrong."""

    def colliding(*args):
        return prefix_keys(*args) & np.uint32(mask)

    for module in (kvjax.blocks.match, kvjax.blocks.dedup, kvjax.verbs.release, kvjax.verbs.adopt):
        monkeypatch.setattr(module, "prefix_keys", colliding)
    step = jax.jit(lambda *args: Cache.adopt(*args))
    verbs = Verbs(lambda name: lambda *args, **options: verb(name)(*args, **options))
    cache, rng, reused = empty(), np.random.default_rng(0), 0
    for _ in range(20):
        text, length = rng.integers(0, 2, WIDTH).astype(np.int32), np.int32(rng.integers(1, WIDTH + 1))
        cache, events = step(cache, text, length, staged(text), HAVE)
        assert bool(events.ok)
        assert_bytes(cache)
        reused += Driver(cache.state, verbs, verified=False).found(text.tolist())
    assert reused > 0
