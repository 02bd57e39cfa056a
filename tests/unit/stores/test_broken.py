# SPDX-License-Identifier: Apache-2.0
"""`save` and `load` when a process is killed, and when files are not what was saved."""

import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import tempfile
import threading
import time
import zlib

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings

import kvjax
from kvjax import Cache, LayerSpec, Namespaces
from kvjax.stores import file, load, manifest, save
from kvjax.stores.contents import contents_of
from tests.drive import METHODS, lines, padded
from tests.unit.stores import saver

SIZE, WIDTH, MODEL = 4, 16, "a model"
SPEC = kvjax.make_spec(
    [LayerSpec(1, 2), LayerSpec(1, 2, window=6)], num_blocks=16, max_seqs=2, max_length=WIDTH, block_size=SIZE,
    dtype="float32",
)  # fmt: skip


def cache_of(*texts):
    """A cache whose K/V are its tokens."""
    cache = Cache.create(SPEC)
    for text in texts:
        cache, _ = METHODS["admit"](cache, np.int32(0), padded(text, WIDTH), np.int32(len(text)))
        start = int(cache.state.seqs.committed[0])
        cache, _ = METHODS["commit"](cache, *lines({0: text[start:]}, 2, WIDTH))
        cache, _ = METHODS["release"](cache, np.int32(0))
    state, arrays = jax.device_get(cache.state), []
    for pool, group in zip(cache.pools.arrays, state.groups, strict=True):
        array, blocks = np.full(pool[0].shape, np.nan, np.float32), np.flatnonzero(group.blocks.fill > 0)
        tokens = state.groups[0].blocks.tokens[np.asarray(group.group0_blocks(blocks))]
        array[blocks] = tokens[:, None, None, None, :, None]
        arrays.append((jax.numpy.asarray(array),))
    return cache.replace(pools=cache.pools.replace(arrays=tuple(arrays)))


def texts_of(cache):
    """The prefixes of a cache, whose bytes are verified, by their numbers of groups that have them."""
    kvjax.check(cache.state)
    state, found = jax.device_get(cache.state), {}
    contents, ids = contents_of(state)
    for at in range(len(contents.parent)):
        fill, text = contents.fill[at], contents.tokens[at, : contents.fill[at]]
        for number, block in enumerate(ids[:, at].tolist()):
            kv = (
                np.asarray(cache.pools.arrays[number][0][block])[0, :, 0, :fill, :]
                if block >= 0
                else text[None, :, None]
            )
            assert np.array_equal(kv, np.broadcast_to(text[None, :, None], kv.shape))
        prefix = tuple(contents.tokens[contents.path(at)].reshape(-1).tolist())
        found[prefix] = tuple(np.flatnonzero(ids[:, at] >= 0).tolist())
    return found


def loaded_from(folder):
    cache, counts = load(Cache.create(SPEC), folder, names=Namespaces(), model=MODEL)
    return texts_of(cache), counts


FIRST = cache_of([1] * 12, [1, 1, 1, 1, 2, 2, 2], [3] * 6)
SECOND = cache_of([4] * 8, [5] * 13, [1] * 12, [6])


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(file, "PART_BYTES", 256)


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.long
def test_a_save_is_the_old_one_or_the_new_one_at_each_step(tmp_path, monkeypatch):
    wanted = [texts_of(FIRST), texts_of(SECOND)]
    steps = [(manifest, "_sync"), (file, "write_part"), (manifest.PartWriter, "write"), (manifest.os, "replace"),
             (pathlib.Path, "unlink"), (pathlib.Path, "write_text")]  # fmt: skip
    left, seen = [0], []

    def counted(function):
        def call(*args, **options):
            left[0] -= 1
            if left[0] < 0:  # for whatever cleans up behind it too
                raise Killed
            return function(*args, **options)

        return call

    for step in range(1000):
        folder = tmp_path / str(step)
        save(FIRST, folder, names=Namespaces(), model=MODEL)
        with monkeypatch.context() as patch:
            for home, name in steps:
                patch.setattr(home, name, counted(getattr(home, name)))
            left[0] = step
            try:
                save(SECOND, folder, names=Namespaces(), model=MODEL)
            except Killed:
                pass
            else:
                break
        texts, counts = loaded_from(folder)
        assert texts in wanted and counts.broken == 0
        seen.append(wanted.index(texts))
        save(SECOND, folder, names=Namespaces(), model=MODEL)
        named = json.loads((folder / "manifest.json").read_text())["save"]
        parts = {"manifest.json", "save.lock", named["index"]["file"], *(part["file"] for part in named["parts"])}
        assert {path.name for path in folder.iterdir()} == parts
    assert len(seen) > 12 and seen == sorted(seen) and set(seen) == {0, 1}


def test_a_save_that_fails_leaves_the_old_one_and_no_files(tmp_path, monkeypatch, small_parts):
    save(FIRST, tmp_path, names=Namespaces(), model=MODEL)
    before = {path.name for path in tmp_path.iterdir()}
    whole = manifest.PartWriter.write

    def full(part, *args):
        if part.path.name.endswith("00003.safetensors"):
            raise OSError("no space left")
        whole(part, *args)

    monkeypatch.setattr(manifest.PartWriter, "write", full)
    with pytest.raises(OSError, match="no space left"):
        save(SECOND, tmp_path, names=Namespaces(), model=MODEL)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_one_save_at_a_time_writes_to_a_folder(tmp_path):
    with manifest.written_by_one(tmp_path / "save"), pytest.raises(ValueError, match="to which another save writes"):
        save(FIRST, tmp_path / "save", names=Namespaces(), model=MODEL)


@pytest.mark.long
def test_a_reader_gets_the_new_save_when_it_comes_in_between(tmp_path, monkeypatch, small_parts):
    save(FIRST, tmp_path, names=Namespaces(), model=MODEL)
    waiting, whole = [SECOND], file.open_part

    def opened(*args):
        if waiting:
            save(waiting.pop(), tmp_path, names=Namespaces(), model=MODEL)
        return whole(*args)

    monkeypatch.setattr(file, "open_part", opened)
    texts, counts = loaded_from(tmp_path)
    assert texts == texts_of(SECOND) and counts.broken == 0


@pytest.mark.parametrize("kills", [pytest.param(10, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.slow)])
def test_a_save_survives_kill_9(kills, tmp_path):
    wanted, rng = [texts_of(FIRST), texts_of(SECOND)], np.random.default_rng(kills)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([saver.__name__])
    caches, seen = pickle.dumps([jax.device_get(FIRST), jax.device_get(SECOND)]), []
    for _ in range(kills):
        ready = context.Event()
        process = context.Process(target=saver.run, args=(str(tmp_path / "save"), caches, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        texts, counts = loaded_from(tmp_path / "save")
        assert texts in wanted and counts.broken == 0
        seen.append(wanted.index(texts))
    assert set(seen) == {0, 1}


# Files that are not what was saved.


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def parts_of(folder, group):
    named = json.loads((folder / "manifest.json").read_text())["save"]
    return [folder / part["file"] for part in named["parts"] if part["group"] == group]


@pytest.mark.long
def test_broken_blocks_and_what_follows_them_are_left_out(tmp_path, small_parts):
    """Also when bytes were exchanged for those of another block, and when files are cut or gone."""
    wanted, total = texts_of(FIRST), sum(len(groups) for groups in texts_of(FIRST).values())
    save(FIRST, tmp_path / "sound", names=Namespaces(), model=MODEL)
    number_of_parts = [len(parts_of(tmp_path / "sound", group)) for group in (0, 1)]
    assert min(number_of_parts) >= 2

    def broken(group, part, damage):
        folder = tmp_path / f"{group} {part} {damage.__name__}"
        save(FIRST, folder, names=Namespaces(), model=MODEL)
        damage(parts_of(folder, group)[part])
        texts, counts = loaded_from(folder)
        assert counts.broken > 0 and counts.left == 0
        assert counts.taken + counts.broken == total
        assert all(set(groups) <= set(wanted[prefix]) for prefix, groups in texts.items())
        assert all(len(prefix) == SIZE or prefix[:-SIZE] in texts for prefix in texts)
        return texts

    def last_byte(path):
        flip(path, -1)

    def header(path):
        flip(path, 9)

    def cut(path):
        path.write_bytes(path.read_bytes()[:-5])

    def exchanged(path):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        middle = (start + len(data)) // 2
        path.write_bytes(data[:start] + data[middle:] + data[start:middle])

    for damage in (last_byte, header, cut, exchanged, pathlib.Path.unlink):
        for part in range(number_of_parts[0]) if damage is last_byte else (0,):
            assert len(broken(0, part, damage)) < len(wanted)
        assert broken(1, 0, damage).keys() == wanted.keys()


def forge(folder, forged_arrays=dict, forged_save=dict):
    """Changes a save's index and manifest; all checksums and lengths are right."""
    saved = manifest.read_manifest(folder)
    index = folder / saved["index"]["file"]
    arrays = forged_arrays(safetensors.numpy.load_file(index))
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, index)
    described = {"bytes": index.stat().st_size, "crc32": zlib.crc32(index.read_bytes())}
    saved |= {"index": saved["index"] | described, "num_blocks": len(arrays.get("parent", ()))}
    manifest.commit_manifest(folder, forged_save(saved))


@pytest.mark.parametrize("name", ["tokens", "namespace"])
def test_bytes_of_another_prefix_are_noticed(name, tmp_path):
    """The checksum of a block's bytes is one of its whole prefix, salt included: here the index has another one."""
    names = Namespaces()
    names(salt="a")
    save(FIRST, tmp_path, names=names, model=MODEL)
    others = {"tokens": lambda array: array ^ (array > 0), "namespace": lambda array: array ^ 1}  # or those of salt a
    forge(tmp_path, lambda arrays: arrays | {name: others[name](arrays[name])})
    texts, counts = loaded_from(tmp_path)
    assert texts == {} and counts.broken > 0 and counts.taken == 0


def test_a_broken_manifest_or_index_is_refused(tmp_path):
    save(FIRST, tmp_path, names=Namespaces(), model=MODEL)
    path, cache = tmp_path / "manifest.json", Cache.create(SPEC)
    good, index = path.read_text(), tmp_path / json.loads(path.read_text())["save"]["index"]["file"]

    def refused(name, message):
        with pytest.raises(ValueError, match=f"folder: got .*{name}.*{message}"):
            load(cache, tmp_path, names=Namespaces(), model=MODEL)

    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(good), 40).tolist():
        changed = good[:at] + chr(ord(good[at]) ^ 1) + good[at + 1 :]
        path.write_text(changed)
        if json_of(changed) != json_of(good):  # not a mere change of spaces
            refused("manifest.json", "wanted")
    path.write_text(good[:-20])
    refused("manifest.json", "no JSON")
    saved = json.loads(good)
    for change in ({"index": 3}, {"parts": [{"file": "../x"}]}, {"model": None}, {"index": named("/etc/passwd")}):
        save_of = saved["save"] | change
        crc = zlib.crc32(json.dumps(save_of, sort_keys=True).encode())
        path.write_text(json.dumps(saved | {"save": save_of, "crc32": crc}))
        refused("manifest.json", "wanted what")
    path.write_text(good)
    flip(index, index.stat().st_size // 2)
    refused(index.name, "checksum")
    index.unlink()
    refused(index.name, "cannot be read")
    assert texts_of(cache) == {} and int(cache.state.groups[0].num_empty) == 16


def named(name):
    return {"file": name, "bytes": 1, "crc32": 1}


def json_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


# Saves that were forged: all checksums are right, since these have no key.

EDGES = [-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2**31 - 1]
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float16", "float32", "float64"]


@st.composite
def forged_array(draw, array):
    """An array with other numbers, in another order, or of another dtype or shape."""
    size, how = array.size, draw(st.sampled_from(["set", "copy", "cast", "shape", "order"]))
    if how == "cast":
        with np.errstate(all="ignore"):
            return array.astype(draw(st.sampled_from(DTYPES)))
    if how == "shape":
        shapes = array.reshape(-1), array[..., :-1], array[1:], array[None], array.T, np.repeat(array, 2, axis=-1)
        return draw(st.sampled_from(shapes))
    flat, entry = array.reshape(-1).copy(), st.integers(0, max(size - 1, 0))
    if how == "order":
        return flat[draw(st.permutations(range(size)))].reshape(array.shape)
    if size and how == "copy":
        flat[draw(entry)] = flat[draw(entry)]
    elif size:
        with np.errstate(all="ignore"):
            flat[draw(entry)] = np.array(draw(st.sampled_from(EDGES))).astype(array.dtype)
    return flat.reshape(array.shape)


@st.composite
def forged_arrays(draw, arrays):
    """The arrays of an index, of which some are forged, missing or new, or all have other blocks."""
    blocks = len(arrays["parent"])
    if draw(st.booleans()):
        chosen = np.array(draw(st.lists(st.integers(0, blocks - 1), max_size=2 * blocks)), np.int64)
        arrays = {name: x[:, chosen] if name in ("order", "crc32") else x[chosen] for name, x in arrays.items()}
    for name in draw(st.lists(st.sampled_from(sorted(arrays)), max_size=3)):
        arrays = arrays | {name: draw(forged_array(arrays[name]))}
    if draw(st.integers(0, 9)) == 0:
        arrays = arrays | {"another": arrays.pop(draw(st.sampled_from(sorted(arrays))))}
    return arrays


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400)
values = st.recursive(scalars, lambda one: st.lists(one, max_size=2) | st.dictionaries(st.text(max_size=3), one))


@st.composite
def forged_json(draw, value):
    """A value with another one somewhere in it."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 4)) == 0:
        return draw(values)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    copied, at = value.copy(), draw(st.sampled_from(keys))
    if draw(st.integers(0, 4)) == 0:
        del copied[at]
    else:
        copied[at] = draw(forged_json(value[at]))
    return copied


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A save with two salts, a LoRA and several files of each group."""
    folder, names = tmp_path_factory.mktemp("sound"), Namespaces()
    names(salt="a", lora=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "PART_BYTES", 256)
        save(FIRST, folder, names=names, model=MODEL, loras={3: "x"})
    return folder


def assert_refused_or_sound(folder):
    """Loads a save; returns whether it was refused."""
    cache, names = Cache.create(SPEC), Namespaces()
    try:
        cache, _ = load(cache, folder, names=names, model=MODEL, loras={7: "x"})
    except ValueError:
        assert len(names) == 1
        return True
    finally:
        kvjax.check(cache.state)  # also of one that was refused: it is not donated
    return False


def assert_forgeries_harm_nothing(sound, data, *, arrays=True):
    with tempfile.TemporaryDirectory() as home:
        folder = shutil.copytree(sound, pathlib.Path(home) / "forged")
        if arrays:
            forge(folder, lambda arrays: data.draw(forged_arrays(arrays)))
        else:
            forge(folder, forged_save=lambda saved: data.draw(forged_json(saved)))
        assert_refused_or_sound(folder)


@given(data=st.data())
@settings(max_examples=150)
def test_a_forged_index_is_refused_or_leaves_a_sound_cache(sound, data):
    assert_forgeries_harm_nothing(sound, data)


@given(data=st.data())
@settings(max_examples=100)
def test_a_forged_manifest_is_refused_or_leaves_a_sound_cache(sound, data):
    assert_forgeries_harm_nothing(sound, data, arrays=False)


def twice(arrays):
    return {name: np.concatenate([x, x], axis=-1 if name in ("order", "crc32") else 0) for name, x in arrays.items()}


def changed(name, change):
    return lambda arrays: arrays | {name: change(arrays[name].copy())}


FORGERIES = {
    "each block twice": (twice, "no prefix is there twice"),
    "a rank twice": (changed("order", lambda order: np.maximum(order, order.max() - 1)), "order has each rank"),
    "parents of floats": (changed("parent", lambda parent: parent.astype(np.float32)), "parent float32"),
    "a block before its parent": (changed("parent", lambda parent: parent[::-1]), "parents come before"),
    "a part before more tokens": (changed("fill", lambda fill: fill - (fill > 1)), "parents are whole|tokens end"),
    "another tenant's child": (changed("namespace", lambda n: n + (np.arange(len(n)) == 1)), "namespace of their"),
    "a negative token": (changed("tokens", lambda tokens: -tokens), "tokens from"),
    "an order of bools": (changed("order", lambda order: order.astype(bool)), "order bool"),
    "parents leave first": (changed("order", lambda order: len(order[0]) - 1 - order), "children before|once"),
    "checksums of float16": (changed("crc32", lambda crc: (crc % 9).astype(np.float16)), "crc32 float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_refused_by_the_rule_that_it_breaks(name, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "forged")
    change, message = FORGERIES[name]
    forge(folder, change)
    with pytest.raises(ValueError, match=f"folder: got .*cannot be read .*({message}).*wanted what kvjax"):
        load(Cache.create(SPEC), folder, names=Namespaces(), model=MODEL)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' * 100_000, "9" * 5000, "1e999", '"\\ud800"'])
def test_a_manifest_of_any_json_is_refused(text, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "forged")
    for written in (text, f'{{"format": "kvjax cache", "version": 1, "crc32": 0, "save": {text}}}'):
        (folder / "manifest.json").write_text(written)
        assert assert_refused_or_sound(folder)


def two_loras_of_a_name(saved):
    pairs = [[0, None, None], [1, "a", 3], [2, "a", 4]]
    return saved | {"loras": {"3": "x", "4": "x"}, "namespaces": saved["namespaces"] | {"namespaces": pairs, "next": 3}}


def test_two_loras_of_one_name_are_refused(sound, tmp_path):
    """Else two namespaces of a save would be one of the cache."""
    folder = shutil.copytree(sound, tmp_path / "forged")
    forge(folder, forged_save=two_loras_of_a_name)
    assert assert_refused_or_sound(folder)


def replaced_by(kind, path):
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_no_pipes_and_devices_are_read(kind, sound, tmp_path):
    named = manifest.read_manifest(sound)
    paths = {"index": named["index"]["file"], "part": named["parts"][0]["file"], "manifest": "manifest.json"}
    for which, path in paths.items():
        folder = shutil.copytree(sound, tmp_path / f"forged {which}")
        replaced_by(kind, folder / path)
        refused = []
        thread = threading.Thread(
            target=lambda to=folder, found=refused: found.append(assert_refused_or_sound(to)), daemon=True
        )
        thread.start()
        thread.join(60)
        assert refused == [which != "part"], f"{path} is a {kind}"
