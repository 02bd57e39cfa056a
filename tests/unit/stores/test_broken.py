# SPDX-License-Identifier: Apache-2.0
"""`save` and `load` when a process is killed, and when files are not what was saved."""

import json
import multiprocessing
import pathlib
import pickle
import time
import zlib

import jax
import numpy as np
import pytest
import safetensors.numpy

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


@pytest.mark.parametrize("name", ["tokens", "namespace"])
def test_bytes_of_another_prefix_are_noticed(name, tmp_path):
    """The checksum of a block's bytes is one of its whole prefix, salt included: here the index has another one."""
    names = Namespaces()
    names(salt="a")
    save(FIRST, tmp_path, names=names, model=MODEL)
    path = tmp_path / "manifest.json"
    saved = json.loads(path.read_text())["save"]
    index = tmp_path / saved["index"]["file"]
    tensors = safetensors.numpy.load_file(index)
    tensors[name] = tensors[name] ^ 1  # other tokens, or salt a's
    safetensors.numpy.save_file(tensors, index)
    saved["index"]["crc32"] = zlib.crc32(index.read_bytes())
    manifest.commit_manifest(tmp_path, saved)
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
