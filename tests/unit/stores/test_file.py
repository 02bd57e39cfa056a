# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: what a cache has found by prefix, it finds after a restart, in other caches too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.stores
from kvjax import Cache, Namespaces
from kvjax.policies.retention import UNSTATED
from kvjax.pools import host as host_pool
from kvjax.stores import Loaded, check_folder, load, save
from kvjax.stores.contents import contents_of
from kvjax.stores.layout import leaves_of
from kvjax.stores.transport import read
from kvjax.tiers import FailedTransfer, TieredCache
from models import load as load_model
from models.golden import read_golden
from tests.drive import Driver, lines, padded
from tests.mesh import AUTO, EXPLICIT, mesh_of
from tests.models.families import GOLDENS
from tests.unit.stores.kinds import OPTIONS, ROWS, WIDTH, each_kind, make_spec, random_bytes

MODEL = "a model"


def create(spec, **options):
    return (TieredCache if spec.has_host else Cache).create(spec, **options)


def computed(cache, text, namespace=0, *, release=True):
    """The cache after a row has computed a text."""
    driver = Driver(cache, verified=False)
    driver.start(0, text, namespace=namespace)
    if release:
        driver.do("release", 0)
    return driver.cache


def history(cache, seed=0, steps=30, leave=True):
    """The cache after random requests, some of which still have their rows if `leave` is False."""
    rng, spec, active = np.random.default_rng(seed), cache.state.spec, set()
    driver = Driver(cache, verified=False)
    for step in range(steps):
        seq, now = int(rng.integers(ROWS)), np.int32(step)
        if seq in active:
            if leave or step < steps - 6:
                driver.do("release", seq, now=now)
                active.discard(seq)
            continue
        text, ids, options = rng.integers(0, 2, rng.integers(2, WIDTH + 1)), {}, {}
        if spec.extra_ids:
            ids = {"extra_ids": padded(np.repeat(rng.integers(0, 2), len(text)), WIDTH + 1)}
        if spec.retention:
            options["retention"] = kvjax.Retention.of([(0, 4, int(rng.integers(0, 90)), 50)], decode_priority=20)
        if driver.admit(seq, text.tolist(), now=now, **ids, **options) == ["OK"]:
            active.add(seq)
            start = int(driver.state.seqs.committed[seq])
            if ids:
                ids = {"extra_ids": lines({seq: ids["extra_ids"][start : len(text)]}, ROWS, WIDTH)[0]}
            driver.write({seq: text[start:]}, now=now, **ids)
    for seq in active if leave else ():
        driver.do("release", seq, now=np.int32(steps))
    return random_bytes(driver.cache, seed)


def findable(cache):
    """{prefix: (bytes of each group, hits, priority and time to live)} of a cache's findable blocks."""
    state = jax.device_get(cache.state)
    contents, ids = contents_of(state)
    host, found = getattr(cache, "host", None), {}
    for at in range(len(contents.parent)):
        path = contents.path(at)
        prefix = int(contents.namespace[at]), *(contents.text(block) for block in path)
        found[prefix] = [{}, int(contents.hits[at]), contents.retention[at].tolist()]
    prefixes = list(found)
    for number, group in enumerate(state.groups):
        (at,) = np.nonzero(ids[number] >= 0)
        leaves = leaves_of(state.spec, number)
        for piece, arrays in read(cache.pools, host, number, np.asarray(group.pool_row(ids[number][at]))):
            for row, index in enumerate(at[piece]):
                words = [
                    leaf.words(array[row], contents.fill[index]) for leaf, array in zip(leaves, arrays, strict=True)
                ]
                found[prefixes[index]][0][number] = b"".join(one.tobytes() for one in words)
    return found


def in_order(cache):
    """The prefixes of a cache in the order of release, on the device and on the host."""
    contents, _ = contents_of(jax.device_get(cache.state))
    names = [b"".join(contents.text(block) for block in contents.path(at)) for at in range(len(contents.parent))]
    return [[names[at] for at in np.argsort(order) if order[at] >= 0] for order in contents.order]


def total(cache):
    return sum(int(np.sum(ids >= 0)) for ids in contents_of(jax.device_get(cache.state))[1])


@pytest.mark.long
@each_kind
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6)]])
def test_a_restart_finds_the_same(kind, seed, tmp_path):
    spec = make_spec(kind)
    cache = history(create(spec), seed)
    wanted = findable(cache)
    save(cache, tmp_path, names=Namespaces(), model=MODEL)
    assert findable(cache) == wanted, "save changes nothing"
    loaded, counts = load(create(spec), tmp_path, names=Namespaces(), model=MODEL)
    kvjax.check(loaded.state)
    assert counts == Loaded(total(cache), 0, 0)
    assert len(wanted) > 8 and findable(loaded) == wanted
    assert in_order(loaded) == in_order(cache)


def closed(prefixes):
    return all(len(prefix) == 2 or prefix[:-1] in prefixes for prefix in prefixes)


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6)]])
def test_a_smaller_cache_takes_whole_prefixes_released_last(kind, seed, tmp_path):
    """With another policy, fewer rows, and rows that hold blocks while it was saved."""
    cache = history(create(make_spec(kind)), seed, leave=False)
    wanted, order = findable(cache), in_order(cache)[0]
    assert np.any(np.asarray(cache.state.seqs.length) > 0)
    save(cache, tmp_path, names=Namespaces(), model=MODEL)
    host = {"num_host_blocks": 3} if make_spec(kind).has_host else {}
    spec = make_spec(kind, num_blocks=4 if host else 6, max_seqs=1, **host)
    loaded, counts = load(create(spec, policy=kvjax.policies.fifo()), tmp_path, names=Namespaces(), model=MODEL)
    kvjax.check(loaded.state)
    found = findable(loaded)
    assert counts == Loaded(total(loaded), total(cache) - total(loaded), 0) and counts.left > 0
    assert closed(found) and len(found) >= (4 if host else 6)
    for prefix, (arrays, *numbers) in found.items():
        assert numbers == wanted[prefix][1:]
        assert arrays.items() <= wanted[prefix][0].items()
    if not host:
        assert set(in_order(loaded)[0]) == set(order[-len(found) :])


@pytest.mark.slow
def test_a_cache_that_is_not_empty_keeps_its_rows(tmp_path):
    spec = make_spec("plain", num_blocks=10)
    saved = history(create(make_spec("plain")), 1)
    save(saved, tmp_path, names=Namespaces(), model=MODEL)
    cache = random_bytes(computed(create(spec), [2] * 15, release=False))
    before = findable(cache)
    cache, counts = load(cache, tmp_path, names=Namespaces(), model=MODEL)
    kvjax.check(cache.state)
    after = findable(cache)
    assert counts.taken == 6 and counts.broken == 0 and before.items() <= after.items()
    again, counts = load(cache, tmp_path, names=Namespaces(), model=MODEL)
    assert counts.taken == 6 and findable(again) == after


@pytest.mark.long
def test_a_folder_is_tried_before_something_is_saved(tmp_path):
    """Files of an interrupted save are no save, are counted, and go; the older save stays."""
    folder, names = tmp_path / "new" / "saved", Namespaces()
    assert check_folder(folder) == (False, 0) == check_folder(folder)
    part = f"{'0' * 16}.values"
    for name in (part, f"{'1' * 16}.index", "manifest.json.tmp"):
        (folder / name).write_bytes(b"half")
    assert check_folder(folder) == (False, 3)
    assert check_folder(folder) == (False, 0)
    cache = history(create(make_spec("plain")), steps=8)
    assert save(cache, folder, names=names, model=MODEL) == load(
        create(make_spec("plain")), folder, names=names, model=MODEL
    )[1].taken > 0  # fmt: skip
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / part).write_bytes(b"half")
    assert check_folder(folder) == (True, 1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    (tmp_path / "other").write_text("not a save")
    no_save, is_file = "without manifest.json, wanted a saved cache, an empty folder or none", "which is a file"
    for wrong, message in ((tmp_path, no_save), (tmp_path / "other", is_file)):
        with pytest.raises(ValueError, match=message):
            check_folder(wrong)
    with pytest.raises(OSError, match="other"):
        check_folder(tmp_path / "other" / "folder")
    assert (tmp_path / "other").read_text() == "not a save"


@pytest.mark.long
def test_namespaces_keep_apart_what_they_did_before(tmp_path):
    """Two salts, versions and LoRAs with the same tokens, whose numbers are others after the restart."""
    names, loras = Namespaces(), {0: "french", 5: "legal"}
    pairs = [("a", None, None), ("b", None, None), ("a", None, 2), ("a", 0, None), ("a", 5, None), (None, 5, None)]
    numbers = [names(salt, lora, weights=weights) for salt, lora, weights in pairs]
    text, cache = [1, 2, 3, 4, 5], create(make_spec("plain"))
    for number in numbers[::2]:
        cache = computed(cache, text, number)
    save(cache, tmp_path, names=names, model=MODEL, loras=loras)
    assert not any(salt in path.name for path in tmp_path.iterdir() for salt in ("french", "legal"))
    after, loras = Namespaces(), {7: "french", 1: "legal", 0: "another"}
    after("b")
    after("c")
    loaded, counts = load(create(make_spec("plain")), tmp_path, names=after, model=MODEL, loras=loras)
    assert counts == Loaded(6, 0, 0)
    swap = {None: None, 0: 7, 5: 1}
    for at, (salt, lora, weights) in enumerate(pairs):
        number = after(salt, swap[lora], weights=weights)
        assert int(loaded.lookup(padded(text, WIDTH), 5, namespace=number).cached_tokens) == (0 if at % 2 else 4)
    for other in (after("a", 0), after("c"), after(), after("a", 5), after("a", weights=3)):
        assert int(loaded.lookup(padded(text, WIDTH), 5, namespace=other).cached_tokens) == 0
    _, counts = load(create(make_spec("plain")), tmp_path, names=Namespaces(), model=MODEL, loras={2: "french"})
    assert counts == Loaded(4, 2, 0)
    with pytest.raises(ValueError, match="loras: got no name for adapter 5"):
        save(cache, tmp_path, names=names, model=MODEL, loras={0: "french"})


def test_a_cache_without_namespaces_needs_no_names(tmp_path):
    text, cache, names = [1, 2, 3, 4, 5], create(make_spec("plain")), Namespaces()
    for folder, number in (("plain", 0), ("salted", names("a"))):
        cache = computed(cache, text, number)
        save(cache, tmp_path / folder, model=MODEL, **({"names": names} if number else {}))
    _, counts = load(create(make_spec("plain")), tmp_path / "plain", model=MODEL)
    assert counts == Loaded(2, 0, 0)
    with pytest.raises(ValueError, match="names: got no entry for namespace 1, wanted"):
        save(cache, tmp_path / "plain", model=MODEL)
    empty = create(make_spec("plain"))
    with pytest.raises(ValueError, match="names: got None, wanted a kvjax"):
        load(empty, tmp_path / "salted", model=MODEL)
    assert load(empty, tmp_path / "salted", names=Namespaces(), model=MODEL)[1] == Loaded(4, 0, 0)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bad_input_is_refused_before_anything_is_touched(tmp_path):
    spec, names = make_spec("plain"), Namespaces()
    cache, folder = history(create(spec), 1), tmp_path / "save"
    save(cache, folder, names=names, model=MODEL)
    before, wanted = bytes_of(folder), findable(cache)
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "an app"}')
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "manifest.json").write_text('{"format": "kvjax cache", "version": 1}')
    good = {"cache": cache, "folder": folder, "names": names, "model": MODEL}
    tenant = computed(create(spec), [1] * 5, 3, release=False)
    both = [
        ({"cache": cache.state}, "cache: got a CacheState, wanted a Cache"),
        ({"cache": create(make_spec("tiers")).cache}, "cache: got a Cache whose spec has a host tier"),
        ({"cache": jax.tree.map(lambda x: np.stack([x, x]), cache)}, "cache: got a batch"),
        ({"names": 3}, "names: got 3, wanted the kvjax.Namespaces"),
        ({"model": ""}, "model: got '', wanted the name"),
        ({"model": 3}, "model: got 3, wanted the name"),
        ({"loras": {"a": 1}}, "loras: got 'a': 1, wanted numbers with names"),
        ({"loras": {1: "a", 2: "a"}}, "loras: .* wanted a different name"),
        ({"loras": 3}, "loras: got 3, wanted"),
        ({"folder": None}, "folder: got None, wanted the path"),
        ({"folder": tmp_path / "file"}, "folder: got .* which is a file"),
        ({"folder": tmp_path / "other"}, "folder: got .*manifest.json' of something else"),
        (
            {"folder": tmp_path / "older"},
            "folder: got .*manifest.json' of version 1, wanted 2: a save of",
        ),
    ]
    for change, message in [*both, ({"cache": tenant}, "names: got no entry for namespace 3, wanted")]:
        with pytest.raises(ValueError, match=message):
            save(**{**good, **change})
    others = {"block_size": 8, "extra_ids": True, "dtype": "float32"}
    layouts = [
        ({"cache": create(make_spec("plain", **{name: value}))}, f"cache: got one with .*{name}.*, wanted that of")
        for name, value in others.items()
    ]
    layouts += [
        ({"cache": create(make_spec("windows"))}, "cache: got one with groups=.*, wanted that of the save"),
        ({"model": "another"}, "model: got 'another', wanted that of the save, 'a model'"),
        ({"folder": tmp_path / "nothing"}, "folder: got .*nothing' without manifest.json, wanted a saved cache"),
        ({"now": 0.5}, "now: got dtype"),
    ]
    for change, message in both + layouts:
        with pytest.raises(ValueError, match=message):
            load(**{**good, **change})
    assert bytes_of(folder) == before and not (tmp_path / "nothing").exists()
    assert findable(cache) == wanted and len(list((tmp_path / "older").iterdir())) == 1


@pytest.mark.slow
def test_a_tiered_cache_is_a_pytree_of_arrays():
    tiered = history(create(make_spec("tiers")), 0)
    leaves, structure = jax.tree.flatten(tiered)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = jax.tree.unflatten(structure, [jax.device_put(np.array(leaf), leaf.sharding) for leaf in leaves])
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(again.host)} == {"pinned_host"}
    assert findable(again) == findable(tiered)


@pytest.mark.slow
def test_a_move_that_fails_leaves_a_sound_cache(tmp_path, monkeypatch):
    cache = history(create(make_spec("tiers")), 0)
    save(cache, tmp_path, names=Namespaces(), model=MODEL)
    copies, whole = [3], host_pool._copy

    def failing(*args):
        copies[0] -= 1
        if copies[0] < 0:
            raise RuntimeError("a copy that fails on purpose")
        return whole(*args)

    monkeypatch.setattr(host_pool, "_copy", failing)
    with pytest.raises(FailedTransfer, match="on purpose") as caught:
        load(create(make_spec("tiers")), tmp_path, names=Namespaces(), model=MODEL)
    monkeypatch.undo()
    kvjax.check(caught.value.tiered.state, rows=())
    wanted, found = findable(cache), findable(caught.value.tiered)
    assert found and all(arrays.items() <= wanted[prefix][0].items() for prefix, (arrays, *_) in found.items())
    loaded, counts = load(caught.value.tiered, tmp_path, names=Namespaces(), model=MODEL)
    assert counts == Loaded(total(cache), 0, 0) and findable(loaded).keys() == wanted.keys()


# From one device to several and back; and real models.


HEADS, BLOCKS = (1, 2), (2, 1)  # devices that divide blocks by token, and heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axes", "shape"),
    [
        ("int8", AUTO, HEADS), ("windows", EXPLICIT, HEADS), ("int8", AUTO, BLOCKS), ("windows", EXPLICIT, (2, 2)),
        ("latents", AUTO, BLOCKS), ("tiers", AUTO, HEADS), ("tiers", AUTO, BLOCKS),
    ],
)  # fmt: skip
def test_from_one_device_to_a_mesh_and_back(kind, axes, shape, tmp_path):
    spec, names = make_spec(kind), Namespaces()
    cache = history(create(spec), 4)
    wanted = findable(cache)
    save(cache, tmp_path, names=names, model=MODEL)
    with mesh_of(*shape, axes, ("context", "heads")) as mesh:
        where = {"mesh": mesh, "heads": "heads"} | ({"context": "context"} if shape[0] > 1 else {})
        divided, counts = load(create(spec, **where), tmp_path, names=names, model=MODEL)
        assert counts == Loaded(total(cache), 0, 0) and findable(divided) == wanted
        assert all(len(pool.sharding.device_set) == mesh.size for pool in jax.tree.leaves(divided.pools.arrays))
        assert not divided.pools.arrays[0][0].is_fully_replicated
        save(divided, tmp_path, names=names, model=MODEL)
    whole, counts = load(create(spec), tmp_path, names=names, model=MODEL)
    assert counts == Loaded(total(cache), 0, 0) and findable(whole) == wanted and in_order(whole) == in_order(cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "deepseek_v3"])
def test_golden_logits_after_a_restart(family, tmp_path):
    model, _ = load_model(GOLDENS / family)
    golden = read_golden(GOLDENS / family, 256 if family == "gemma3" else 128)
    steps, rows = 8, [row for row in range(len(golden.lengths)) if golden.lengths[row] > 40]
    prompts = [golden.prompts[row, : golden.lengths[row]].tolist() for row in rows]
    options = {"max_seqs": 2, "max_length": max(map(len, prompts)) + steps, "block_size": 4, "dtype": "float32"}
    spec, names = kvjax.make_spec(model.layer_specs(), num_blocks=200, **options), Namespaces()
    _, cache, _ = kvjax.generate(model, Cache.create(spec), prompts, max_new_tokens=steps)
    save(cache, tmp_path, names=names, model=family)
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype.kind == "f" else x, Cache.create(spec).pools)
    cache, counts = load(Cache.create(spec).replace(pools=nan), tmp_path, names=names, model=family)
    assert counts.left == counts.broken == 0
    outputs, _, _ = kvjax.generate(model, cache, prompts, max_new_tokens=steps)
    for row, output in zip(rows, outputs, strict=True):
        assert output.cached_tokens >= (golden.lengths[row] // 4 * 4 - 4 if family == "gemma3" else 1)
        count = len(output.tokens)
        logits = np.asarray(golden.greedy_logits[row, :count], np.float64)
        wanted = logits - np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1, keepdims=True))
        wanted = (wanted - logits.max(-1, keepdims=True))[np.arange(count), golden.greedy[row, :count]]
        assert output.tokens == golden.greedy[row, :count].tolist()
        np.testing.assert_allclose(output.logprobs, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_an_empty_cache_and_one_without_bytes(tmp_path):
    spec = make_spec("plain")
    save(create(spec), tmp_path, names=Namespaces(), model=MODEL)
    loaded, counts = load(create(spec), tmp_path, names=Namespaces(), model=MODEL)
    assert counts == Loaded(0, 0, 0) and findable(loaded) == {}
    bare = kvjax.make_spec([], num_blocks=24, **OPTIONS)
    cache = history(create(bare), 0)
    save(cache, tmp_path, names=Namespaces(), model=MODEL)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock", ".index", ".values"}
    loaded, counts = load(create(bare), tmp_path, names=Namespaces(), model=MODEL)
    assert counts == Loaded(24, 0, 0) and findable(loaded) == findable(cache)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [True, False])
def test_retention_tiers_and_policy_may_differ(saved, tmp_path):
    specs = [
        make_spec("plain", retention=True), make_spec("plain", num_blocks=10, num_host_blocks=16),
    ]  # fmt: skip
    before, after = specs if saved else specs[::-1]
    cache = history(create(before), 2)
    save(cache, tmp_path, names=Namespaces(), model=MODEL)
    policy = None if saved else kvjax.policies.priority()
    loaded, counts = load(create(after, policy=policy), tmp_path, names=Namespaces(), model=MODEL, now=1000)
    kvjax.check(loaded.state)
    wanted, found = findable(cache), findable(loaded)
    assert wanted.keys() >= found.keys() and closed(found) and counts.taken == len(found) >= 20
    for prefix, (arrays, hits, retention) in found.items():
        assert (arrays, hits) == tuple(wanted[prefix][:2]) and retention == [UNSTATED if saved else 35, UNSTATED]
