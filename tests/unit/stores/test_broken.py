# SPDX-License-Identifier: Apache-2.0
"""Saves and stores when a process is killed, and when files are not what was written."""

import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import stat
import tempfile
import threading
import time
import zlib

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import kvjax
from kvjax import Cache, Namespaces
from kvjax.stores import file, load, manifest, save
from kvjax.stores.contents import Contents, contents_of
from kvjax.stores.values import Values
from tests.unit.stores import forms
from tests.unit.stores.forms import BYTES, MODEL, ROOT, SPEC, VALUES, Save, Store, blocks_of, cache_of, opened

TEXTS = [[1] * 12, [1, 1, 1, 1, 2, 2, 2], [3] * 6], [[4] * 8, [5] * 13, [1] * 12, [6]]
FIRST, SECOND = (cache_of(*texts) for texts in TEXTS)
WANTED = [blocks_of(FIRST), blocks_of(SECOND)]
FORMS = {"save": Save(), "store": Store([text for texts in TEXTS for text in texts])}
each_form = pytest.mark.parametrize("form", FORMS)
KILLS = [pytest.param(10, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.slow)]


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.long
def test_a_save_is_the_old_one_or_the_new_one_at_each_step(tmp_path, monkeypatch):
    steps = [(os, "fsync"), (os, "replace"), (pathlib.Path, "unlink"), (manifest, "create"), (Values, "encode")]
    left, seen = [0], []

    def counted(function):
        def call(*args, **options):
            left[0] -= 1
            if left[0] < 0:  # for whatever cleans up after it too
                raise Killed
            return function(*args, **options)

        return call

    for step in range(1000):
        folder = tmp_path / str(step)
        save(FIRST, folder, model=MODEL)
        with monkeypatch.context() as patch:
            for home, name in steps:
                patch.setattr(home, name, counted(getattr(home, name)))
            left[0] = step
            try:
                save(SECOND, folder, model=MODEL)
            except Killed:
                pass
            else:
                break
        blocks, broken = FORMS["save"].read(folder)
        assert blocks in WANTED and broken == 0
        seen.append(WANTED.index(blocks))
        save(SECOND, folder, model=MODEL)
        name = manifest.read_manifest(folder)["name"]
        files = {"manifest.json", "save.lock", f"{name}.index", f"{name}.values"}
        assert {path.name for path in folder.iterdir()} == files
    assert len(seen) > 12 and seen == sorted(seen) and set(seen) == {0, 1}


def test_a_save_that_fails_leaves_the_old_one_and_no_files(tmp_path, monkeypatch):
    save(FIRST, tmp_path, model=MODEL)
    before, calls, whole = {path.name for path in tmp_path.iterdir()}, [], Values.encode

    def full(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("no space left")
        return whole(*args)

    monkeypatch.setattr(Values, "encode", full)
    with pytest.raises(OSError, match="no space left"):
        save(SECOND, tmp_path, model=MODEL)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.long
@pytest.mark.parametrize("opened_before", [0, 1])
def test_a_reader_gets_the_new_save_when_it_comes_in_between(opened_before, tmp_path, monkeypatch):
    save(FIRST, tmp_path, model=MODEL)
    calls, whole = [], file.open_regular

    def opening(*args):
        calls.append(args)
        if len(calls) == 1 + opened_before:
            save(SECOND, tmp_path, model=MODEL)
        return whole(*args)

    monkeypatch.setattr(file, "open_regular", opening)
    assert FORMS["save"].read(tmp_path) == (WANTED[1], 0)


# Both forms.


@each_form
def test_files_are_their_users_alone(form, tmp_path):
    """Prompts and salts are in them. A folder of a save that was there keeps its mode."""
    before = os.umask(0)
    try:
        (tmp_path / "there").mkdir(mode=0o755)
        for name in ("there", "new"):
            for cache in (FIRST, SECOND):
                FORMS[form].write(tmp_path / name, cache)
    finally:
        os.umask(before)
    paths = [*(tmp_path / "new").rglob("*"), *(tmp_path / "there").rglob("*")]
    wide = [path for path in paths if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)]
    assert len(paths) >= 8 and wide == []
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("there", "new")]
    assert modes == [0o755 if form == "save" else 0o700, 0o700]


@each_form
def test_a_folder_has_one_writer(form, tmp_path):
    refused = pytest.raises(ValueError, match=f"{FORMS[form].location}: got .*, which has a writer, wanted")
    folder = tmp_path / "new" / "folder"
    with manifest.written_by_one(folder) if form == "save" else opened(folder), refused:
        FORMS[form].write(folder, FIRST)
    FORMS[form].write(folder, FIRST)


def test_a_save_is_a_pack_of_the_values_of_a_store(tmp_path):
    """Byte for byte."""
    found = []
    for name, form in FORMS.items():
        form.write(tmp_path / name, FIRST)
        found.append(read_values(form.slices(tmp_path / name)))
    saved, stored = found
    assert len(stored) >= 5 and stored.items() <= saved.items()


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([forms.__name__])
    return context


@pytest.fixture(scope="module")
def caches():
    return pickle.dumps([jax.device_get(FIRST), jax.device_get(SECOND)])


def started(context, function, *args):
    process = context.Process(target=function, args=args)
    process.start()
    return process


@pytest.mark.parametrize("kills", KILLS)
@each_form
def test_a_folder_survives_kill_9(form, kills, tmp_path, context, caches):
    """A save is the old one or the new one. A store has sound blocks, amid evictions and flushes."""
    folder, rng, seen = tmp_path / "folder", np.random.default_rng(kills), []
    form = FORMS["save"] if form == "save" else Store(FORMS["store"].texts, max_bytes=8 * BYTES)
    for _ in range(kills):
        ready, stop = context.Event(), context.Event()
        process = started(context, forms.write_for_ever, form, folder, caches, ready, stop)
        assert ready.wait(60)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        blocks, broken = form.read(folder)
        assert broken == 0
        seen.append(blocks)
        if isinstance(form, Store):
            assert blocks <= WANTED[0] | WANTED[1] and len(form.slices(folder)) <= 8
    if isinstance(form, Store):
        assert sum(map(len, seen)) > 3 * kills
    else:
        assert all(blocks in seen for blocks in WANTED) and all(blocks in WANTED for blocks in seen)


@pytest.mark.long
def test_two_processes_read_while_a_writer_evicts(tmp_path, context, caches):
    ready, stop, counts = context.Event(), context.Event(), context.Queue()
    form = Store(FORMS["store"].texts, max_bytes=8 * BYTES)
    writer = started(context, forms.write_for_ever, form, tmp_path, caches, ready, stop)
    assert ready.wait(60)
    readers = [started(context, forms.read_for_ever, form, tmp_path, 40, counts) for _ in range(2)]
    results = [counts.get(timeout=120) for _ in readers]
    stop.set()
    for process in (writer, *readers):
        process.join(60)
        assert process.exitcode == 0
    assert all(found > 100 and broken == 0 for found, broken in results)


# Files that are not what was written.


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{form: folder} of the first cache."""
    folders = {name: tmp_path_factory.mktemp(name) / "folder" for name in FORMS}
    for name, form in FORMS.items():
        form.write(folders[name], FIRST)
    return folders


def read_values(slices):
    """{(group, hash): bytes}."""
    return {key: path.read_bytes()[where] for key, (path, where) in slices.items()}


def write_value(path, where, value):
    data = bytearray(path.read_bytes())
    data[where] = value
    path.write_bytes(data)


def damage(kind, slices, a, b):
    """Damages a value or the end of its file, or exchanges two values of a group."""
    keys = sorted(slices)
    key = keys[a % len(keys)]
    group = [other for other in keys if other[0] == key[0]]
    value, (path, where) = read_values(slices)[key], slices[key]
    at = b % BYTES
    if kind == "swap":
        other = group[b % len(group)]
        write_value(path, where, read_values(slices)[other])
        write_value(*slices[other], value)
    elif kind == "flip":
        write_value(path, where, value[:at] + bytes(byte ^ 1 for byte in value[at : at + 1]) + value[at + 1 :])
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: (where.start or 0) + at])
    else:
        path.write_bytes(path.read_bytes() + b"\0")


DAMAGE = st.sampled_from(["flip", "cut", "longer", "swap"])


@pytest.mark.long
@each_form
@settings(max_examples=40)
@given(st.lists(st.tuples(DAMAGE, st.integers(0, 2**20), st.integers(0, 2**20)), min_size=1, max_size=6))
def test_damaged_values_are_never_read_as_others(form, written, damages):
    """A store has all others; a save lacks what follows a damaged block of the first group."""
    with tempfile.TemporaryDirectory() as home:
        folder = shutil.copytree(written[form], pathlib.Path(home) / "damaged")
        slices = FORMS[form].slices(folder)
        before = read_values(slices)
        for kind, a, b in damages:
            damage(kind, slices, a, b)
        intact = {key for key, value in read_values(slices).items() if value == before[key]}
        found, num_broken = FORMS[form].read(folder)
        if form == "store":
            assert found == intact and all(path.exists() == (key in intact) for key, (path, _) in slices.items())
        else:
            assert found == {key for key in intact if prefix_of(key) <= intact}
            assert num_broken == len(slices) - len(found)


def prefix_of(key):
    """{(0, hash)} of the whole prefix of a block of the first cache."""
    contents, _ = contents_of(jax.device_get(FIRST.state))
    hashes = [block.hash for block in contents.blocks(VALUES, {0: ROOT})]
    return {(0, hashes[at]) for at in contents.path(hashes.index(key[1]))}


def no_file(kind, path):
    """Puts something in place of a file that must not be opened, or not be read as a whole."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as sparse:
            sparse.truncate(1 << 40)


def in_time(function):
    """The result of a function, or its ValueError, unless it waits for ever."""
    results = []

    def call():
        try:
            results.append(function())
        except ValueError as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    return results[0]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_nothing_but_a_regular_file_is_read_of_a_save(kind, written, tmp_path):
    name = manifest.read_manifest(written["save"])["name"]
    for number, path in enumerate([f"{name}.index", f"{name}.values", "manifest.json"]):
        folder = shutil.copytree(written["save"], tmp_path / str(number))
        if kind == "huge" and path == "manifest.json":
            continue
        no_file(kind, folder / path)
        result = in_time(lambda folder=folder: FORMS["save"].read(folder))
        if kind == "huge" and path.endswith(".values"):
            assert result == (set(), len(WANTED[0]))
        else:
            assert isinstance(result, ValueError) and "folder: got" in str(result) and path in str(result)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
@pytest.mark.filterwarnings("ignore:.*not written.*:RuntimeWarning")  # a folder cannot be deleted or written
def test_nothing_but_a_regular_file_is_read_of_a_store(kind, written, tmp_path):
    folder = shutil.copytree(written["store"], tmp_path / "store")
    slices = FORMS["store"].slices(folder)
    path, _ = slices.pop(min(slices))
    no_file(kind, path)
    no_file(kind, folder / "recency")
    (folder / "folder.__lock").mkdir()
    (folder / "recency.__lock").write_text("")
    found, num_broken = in_time(lambda: FORMS["store"].read(folder))
    assert found == slices.keys() and num_broken >= 1
    assert path.exists() == (kind == "folder") and not (folder / "recency.__lock").exists()


@each_form
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_lock_that_is_no_file_is_refused(form, kind, written, tmp_path):
    folder = shutil.copytree(written[form], tmp_path / "folder")
    no_file(kind, folder / f"{form}.lock")
    result = in_time(lambda: FORMS[form].write(folder, SECOND))
    assert f"{FORMS[form].location}: got" in str(result) and f"{form}.lock that is no file" in str(result)


# Saves whose manifest or index is not what was written.


def forge(folder, forged_arrays=dict, forged_save=dict):
    """Changes a save's index and manifest; all checksums and lengths are right."""
    saved = manifest.read_manifest(folder)
    index = folder / f"{saved['name']}.index"
    saved_contents = Contents.from_bytes(index.read_bytes(), SPEC, saved["num_blocks"])
    arrays = forged_arrays(saved_contents._asdict())
    data = Contents(**arrays).to_bytes()
    index.write_bytes(data)
    manifest.commit_manifest(
        folder, forged_save(saved | {"num_blocks": len(arrays["parent"]), "crc32": zlib.crc32(data)})
    )


@pytest.mark.parametrize("name", ["tokens", "namespace"])
def test_bytes_of_another_prefix_are_noticed(name, tmp_path):
    """A value has the hash of its whole prefix, salt included: here the index has another one."""
    names = Namespaces()
    names(salt="a")
    save(FIRST, tmp_path, names=names, model=MODEL)
    others = {"tokens": lambda array: array ^ (array > 0), "namespace": lambda array: array ^ 1}  # or those of salt a
    forge(tmp_path, lambda arrays: arrays | {name: others[name](arrays[name])})
    cache, counts = load(Cache.create(SPEC), tmp_path, names=Namespaces(), model=MODEL)
    assert blocks_of(cache) == set() and counts == (0, 0, len(WANTED[0]))


def test_a_broken_manifest_or_index_is_refused(tmp_path):
    save(FIRST, tmp_path, model=MODEL)
    path, cache = tmp_path / "manifest.json", Cache.create(SPEC)
    good = path.read_text()
    index = tmp_path / f"{json.loads(good)['save']['name']}.index"

    def refused(name, message):
        with pytest.raises(ValueError, match=f"folder: got .*{name}.*{message}"):
            load(cache, tmp_path, model=MODEL)

    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(good), 40).tolist():
        changed = good[:at] + chr(ord(good[at]) ^ 1) + good[at + 1 :]
        path.write_text(changed)
        if json_of(changed) != json_of(good):  # not a mere change of spaces
            refused("manifest.json", "wanted")
    path.write_text(good[:-20])
    refused("manifest.json", "cannot be read")
    saved = json.loads(good)
    for change in ({"num_blocks": -1}, {"num_blocks": True}, {"model": None}, {"name": "../x"}, {"another": 1}):
        save_of = saved["save"] | change
        crc = zlib.crc32(json.dumps(save_of, sort_keys=True).encode())
        path.write_text(json.dumps(saved | {"save": save_of, "crc32": crc}))
        refused("manifest.json", "wanted what")
    path.write_text(json.dumps(saved | {"version": 1}))
    refused("manifest.json", "of version 1, wanted 2: a save of another version of kvjax can neither be loaded nor")
    path.write_text(good)
    whole = index.read_bytes()
    for changed, message in ((whole[:-1] + b"\1", "checksum"), (whole[:-1], "bytes, not")):
        index.write_bytes(changed)
        refused(index.name, message)
    index.write_bytes(whole)
    for gone in (index.with_suffix(".values"), index):
        gone.unlink()
        refused(gone.name, "cannot be read")
    assert blocks_of(cache) == set() and int(cache.state.groups[0].num_empty) == SPEC.groups[0].num_blocks


def json_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


# Saves that were forged: all checksums are right, since these have no key.

EDGES = [-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2**31 - 1]


@st.composite
def forged_array(draw, array):
    """An array with other numbers, in another order, or of another shape."""
    how, entry = draw(st.sampled_from(["set", "copy", "shape", "order"])), st.integers(0, max(array.size - 1, 0))
    if how == "shape":
        return draw(st.sampled_from((array[..., :-1], array[1:], np.repeat(array, 2, axis=-1))))
    flat = array.reshape(-1).copy()
    if how == "order":
        flat = flat[draw(st.permutations(range(array.size)))]
    elif array.size:
        flat[draw(entry)] = flat[draw(entry)] if how == "copy" else draw(st.sampled_from(EDGES))
    return flat.reshape(array.shape)


@st.composite
def forged_arrays(draw, arrays):
    """The arrays of an index, of which some are forged, or all have other blocks."""
    blocks = len(arrays["parent"])
    if draw(st.booleans()):
        chosen = np.array(draw(st.lists(st.integers(0, blocks - 1), max_size=2 * blocks)), np.int64)
        arrays = {name: x[:, chosen] if name == "order" else x[chosen] for name, x in arrays.items()}
    for name in draw(st.lists(st.sampled_from(sorted(arrays)), max_size=3)):
        arrays = arrays | {name: draw(forged_array(arrays[name]))}
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
    """A save with two salts and a LoRA."""
    folder, names = tmp_path_factory.mktemp("sound"), Namespaces()
    names(salt="a", lora=3)
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


@pytest.mark.long
@pytest.mark.parametrize("what", ["index", "manifest"])
@given(data=st.data())
@settings(max_examples=150)
def test_a_forged_save_is_refused_or_leaves_a_sound_cache(what, sound, data):
    with tempfile.TemporaryDirectory() as home:
        folder = shutil.copytree(sound, pathlib.Path(home) / "forged")
        if what == "index":
            forge(folder, lambda arrays: data.draw(forged_arrays(arrays)))
        else:
            forge(folder, forged_save=lambda saved: data.draw(forged_json(saved)))
        assert_refused_or_sound(folder)


def twice(arrays):
    return {name: np.concatenate([x, x], axis=-1 if name == "order" else 0) for name, x in arrays.items()}


def changed(name, change):
    return lambda arrays: arrays | {name: change(arrays[name].copy())}


FORGERIES = {
    "each block twice": (twice, "no prefix is there twice"),
    "a rank twice": (changed("order", lambda order: np.maximum(order, order.max() - 1)), "order has each rank"),
    "a block before its parent": (changed("parent", lambda parent: parent[::-1]), "parents come before"),
    "a part before more tokens": (changed("fill", lambda fill: fill - (fill > 1)), "parents are whole|tokens end"),
    "another tenant's child": (changed("namespace", lambda n: n + (np.arange(len(n)) == 1)), "namespace of their"),
    "a negative token": (changed("tokens", lambda tokens: -tokens), "tokens from"),
    "parents leave first": (changed("order", lambda order: len(order[0]) - 1 - order), "children before|once"),
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
    for written in (text, f'{{"format": "kvjax cache", "version": 2, "crc32": 0, "save": {text}}}'):
        (folder / "manifest.json").write_text(written)
        assert assert_refused_or_sound(folder)


def test_two_loras_of_one_name_are_refused(sound, tmp_path):
    """Else two namespaces of a save would be one of the cache."""
    folder, pairs = shutil.copytree(sound, tmp_path / "forged"), [[0, None, None], [1, "a", 3], [2, "a", 4]]
    spaces = {"loras": {"3": "x", "4": "x"}}
    forge(folder, forged_save=lambda saved: saved | spaces | {
        "namespaces": saved["namespaces"] | {"namespaces": pairs, "next": 3}
    })  # fmt: skip
    assert assert_refused_or_sound(folder)
