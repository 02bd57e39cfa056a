# SPDX-License-Identifier: Apache-2.0
"""`DiskStore` by itself: what was written is read, whatever becomes of the files and of the processes."""

import importlib.util
import multiprocessing
import os
import resource
import stat
import threading
import time
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings

import kvjax
from kvjax import Cache, Namespaces
from kvjax.stores import DiskStore
from tests.unit.stores import storer
from tests.unit.stores.kinds import KINDS, make_spec, random_bytes
from tests.unit.stores.storer import MODEL, SIZE, chain, pools_of, words_of

SPEC = storer.SPEC
FOUR = 4 * DiskStore("memory://", SPEC, model=MODEL, names=Namespaces(), max_bytes=1 << 20).values.sizes[0]


def opened(location, spec=SPEC, **options):
    return DiskStore(location, spec, **{"model": MODEL, "names": Namespaces(), "max_bytes": 1 << 20, **options})


def wrote(store, texts, number=0):
    """Writes the blocks of texts, and waits for it; returns them."""
    blocks = [block for text in texts for block in chain(store, text)]
    for start in range(0, len(blocks), storer.ROWS):
        some = blocks[start : start + storer.ROWS]
        store.write(pools_of(some), number, some, range(len(some)))
    assert store.flush(60)
    return blocks


def is_right(store, block, number=0):
    """Whether a block is read as it was written; False: it is missing."""
    found = store.read(block, number).result(60)
    if found is None:
        return False
    assert np.array_equal(found[0].view(np.float32), words_of(block)), "wrong bytes"
    return True


def values_in(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder]


@pytest.mark.parametrize(
    "kind", [kind if kind == "plain" else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_blocks_of_all_kinds_come_back(kind, tmp_path):
    spec = make_spec(kind, num_host_blocks=0)
    pools = random_bytes(Cache.create(spec)).pools
    text = {"extra_ids": np.arange(24) % 3} if spec.extra_ids else {}
    with opened(tmp_path / "store", spec) as store:
        blocks = store.blocks(np.arange(24), 0, **text)
        for number in range(len(spec.groups)):
            assert store.has(blocks[0], number) != store.values.has_bytes(number)
            store.write(pools, number, blocks, range(5, 11))
    with opened(tmp_path / "store", spec, readonly=True) as store:
        for number in range(len(spec.groups)):
            assert all(store.has(block, number) for block in blocks)
            if store.values.has_bytes(number):
                for row, block in enumerate(blocks, 5):
                    found = store.read(block, number).result()
                    wanted = kvjax.stores.gather(pools, [np.array([row], np.int32)] * len(spec.groups))
                    arrays = wanted.arrays[number], (wanted.scales or [()] * len(spec.groups))[number]
                    assert [x.tobytes() for x in found] == [np.asarray(x).tobytes() for x in leaves(arrays)]
        other = store.blocks(np.arange(24), 0, extra_ids=np.zeros(24, np.int32)) if text else []
        assert not any(store.has(block, 0) for block in other)


def leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_values_are_their_users_alone(tmp_path):
    """tensorstore makes files and folders with the umask's mode."""
    before = os.umask(0)
    try:
        with opened(tmp_path / "store") as store:
            wrote(store, [[1, 2, 3, 4], [5, 6, 7, 8]])
    finally:
        os.umask(before)
    paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    wide = [path for path in paths if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)]
    assert len(paths) >= 5 and wide == []


def test_a_folder_is_its_owners_and_has_one_writer_and_any_number_of_readers(tmp_path):
    folder = tmp_path / "a" / "store"
    with opened(folder) as store:
        blocks = wrote(store, [[1, 2, 3, 4]])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(ValueError, match=r"location: got .* another store writes, wanted .* readonly=True"):
            opened(folder)
        with opened(folder, readonly=True) as one, opened(f"file://{folder}", readonly=True) as other:
            assert is_right(one, blocks[0]) and is_right(other, blocks[0])
            one.write(pools_of(blocks), 0, chain(one, [5, 6, 7, 8]), [0])
            assert one.flush() and one.counters["written"] == 0
            more = wrote(store, [[5, 6, 7, 8]])
            assert not one.has(more[0], 0)
            one.refresh()
            assert one.has(more[0], 0) and is_right(one, more[0])
    (folder / "left.__lock").write_text("")
    opened(folder).close()
    assert not (folder / "left.__lock").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("")
    with pytest.raises(ValueError, match=r"location: got .*mine' without store.lock, wanted a folder of a store"):
        opened(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"location: got .*nothing', wanted"):
        opened(tmp_path / "nothing", readonly=True)


def test_an_open_kvstore_is_a_location_too():
    memory = tensorstore.KvStore.open("memory://").result()
    with opened(memory) as store:
        blocks = wrote(store, [[1, 2, 3, 4]])
    assert all(is_right(opened(memory, readonly=True), block) for block in blocks)


def test_least_recently_used_blocks_leave(tmp_path):
    with opened(tmp_path, max_bytes=FOUR) as store:
        blocks = wrote(store, [[n] * SIZE for n in range(4)])
        assert is_right(store, blocks[0])
        store.touch([blocks[1], blocks[2]])
        assert store.flush()
        more = wrote(store, [[7] * SIZE, [8] * SIZE])  # blocks 3 and 0 leave
        assert [store.has(block, 0) for block in [*blocks, *more]] == [False, True, True, False, True, True]
        assert store.counters["evicted"] == 2 and len(values_in(tmp_path)) == 4
        assert sum(path.stat().st_size for path in values_in(tmp_path)) == FOUR
    with opened(tmp_path, max_bytes=FOUR) as store:  # which has what was used last
        first, second = blocks[1:3]
        wrote(store, [[9] * SIZE])
        assert store.has(first, 0) and not store.has(second, 0)  # the end of a prefix leaves before its beginning
    with opened(tmp_path, max_bytes=FOUR // 2) as store:
        assert len(values_in(tmp_path)) == 2


def test_blocks_that_were_written_after_the_last_flush_are_oldest(tmp_path):
    with opened(tmp_path, max_bytes=FOUR) as store:
        wrote(store, [[1] * SIZE])
        recency = (tmp_path / "recency").read_bytes()
        late = wrote(store, [[2] * SIZE])
    (tmp_path / "recency").write_bytes(recency)
    with opened(tmp_path, max_bytes=FOUR) as store:
        wrote(store, [[n] * SIZE for n in (3, 4, 5)])
        assert not store.has(late[0], 0)
    (tmp_path / "recency").write_bytes(b"broken")
    with opened(tmp_path, max_bytes=FOUR) as store:
        assert len(values_in(tmp_path)) == 4


def test_what_waits_beyond_max_in_flight_is_not_written(tmp_path):
    with opened(tmp_path, max_in_flight=FOUR) as store:
        blocks, gate = chain(store, range(7 * SIZE)), threading.Event()
        store._writer.submit(gate.wait)
        store.write(pools_of(blocks), 0, blocks, range(7))
        assert not store.flush(0.01)
        assert store.counters["dropped"] == 3 and store.counters["written"] == 0
        store.write(pools_of(blocks), 0, blocks[:2], range(2))  # which wait already
        gate.set()
        assert store.flush(60)
        assert store.counters["written"] == 4 and store.counters["dropped"] == 3
        assert [store.has(block, 0) for block in blocks] == [True] * 4 + [False] * 3
        wrote(store, [list(range(7 * SIZE))])
        assert store.counters["written"] == 7


def test_a_full_disk_is_counted_and_warned_of_once(tmp_path):
    with opened(tmp_path) as store:
        blocks = wrote(store, [[1] * SIZE])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # nobody else in this process may write more either
        try:
            late = chain(store, [2] * SIZE)
            store.write(pools_of(late), 0, late, [0])
            with pytest.warns(RuntimeWarning, match="blocks were not read or not written"):
                store.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.counters["failed"] >= 1 and not store.has(late[0], 0)
        assert is_right(store, blocks[0])
        store.flush()
        assert all(is_right(store, block) for block in wrote(store, [[2] * SIZE]))
        assert store.counters["written"] == 2


def test_a_value_of_which_any_byte_differs_is_a_miss_and_is_deleted(tmp_path):
    with opened(tmp_path) as store:
        block = wrote(store, [[1, 2, 3, 4]])[0]
        (path,) = values_in(tmp_path)
        good = path.read_bytes()
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
            assert not is_right(store, block) and not path.exists()
        assert store.counters["broken"] == store.counters["missed"] == len(good)
        path.write_bytes(good)
        assert is_right(store, block)


DAMAGE = st.sampled_from(["flip", "cut", "longer", "empty", "swap", "remove"])


@settings(max_examples=40)
@given(st.lists(st.tuples(DAMAGE, st.integers(0, 2**20), st.integers(0, 2**20)), min_size=1, max_size=6))
def test_damaged_values_are_never_read_as_others(tmp_path_factory, damages):
    folder = tmp_path_factory.mktemp("store")
    with opened(folder) as store:
        blocks = wrote(store, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 0, 0, 0, 0], [5, 6, 7, 8]])
        wrote(store, [[1, 2, 3, 4]], 1)
        intact = {path: path.read_bytes() for path in values_in(folder)}
        for kind, a, b in damages:
            path, other = (values_in(folder)[n % len(values_in(folder))] for n in (a, b))
            data, second = path.read_bytes(), other.read_bytes()
            at = b % max(len(data), 1)
            path.write_bytes({
                "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else data, "cut": data[:at],
                "longer": data + b"\0", "empty": b"", "swap": second, "remove": data,
            }[kind])  # fmt: skip
            if kind == "swap":
                other.write_bytes(data)
            if kind == "remove" and len(values_in(folder)) > 1:
                path.unlink()
        for number, of_group in ((0, blocks), (1, blocks[:1])):
            for block in of_group:
                path = folder / store.values.name(block, number)
                is_whole = path.exists() and path.read_bytes() == intact[path]
                assert is_right(store, block, number) or not is_whole
                assert store.has(block, number) == path.exists()


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


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_what_is_no_file_is_a_miss(kind, tmp_path):
    with opened(tmp_path) as store:
        blocks = wrote(store, [[1, 2, 3, 4], [5, 6, 7, 8]])
    no_file(kind, tmp_path / store.values.name(blocks[0], 0))
    no_file(kind, tmp_path / "recency")
    (tmp_path / "folder.__lock").mkdir()
    (tmp_path / "recency.__lock").write_text("")
    store = opened(tmp_path)
    assert not is_right(store, blocks[0]) and is_right(store, blocks[1])
    assert store.counters["missed"] == 1 and not store.has(blocks[0], 0)
    if kind == "folder":  # which cannot be deleted
        with pytest.warns(RuntimeWarning, match="not written"):
            store.close()
        return
    wrote(store, [[1, 2, 3, 4]])
    assert is_right(store, blocks[0]) and store.counters["failed"] == 0
    store.close()


def test_a_forged_list_of_names_is_nothing(tmp_path):
    names = b"\xff\n" + b"9" * 5000 + b"\n../../etc/passwd"
    with opened(tmp_path) as store:
        blocks = wrote(store, [[1, 2, 3, 4]])
    (tmp_path / "recency").write_bytes(zlib.crc32(names).to_bytes(4, "little") + names)
    with opened(tmp_path) as store:
        assert is_right(store, blocks[0])


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_lock_that_is_no_file_is_refused(kind, tmp_path):
    opened(tmp_path).close()
    no_file(kind, tmp_path / "store.lock")
    with pytest.raises(ValueError, match=r"location: got .* with a store.lock that is no file"):
        opened(tmp_path)


def test_salts_loras_models_and_keys_have_blocks_of_their_own(tmp_path):
    names, loras = Namespaces(), {0: "french", 5: "legal"}
    numbers = [names(), names("a"), names("b"), names("a", 0), names("a", 5), names(weights=1), names("a", weights=1)]
    others = {"model": {"model": "another"}, "key": {"key": b"secret"}, "loras": {"loras": {0: "legal", 5: "french"}}}
    tokens, seen = [1, 2, 3, 4], set()
    for options in [{}, *others.values()]:
        with opened(tmp_path, names=names, **{"loras": loras, **options}) as store:
            for number in numbers:
                block = store.blocks(tokens, number)[0]
                assert store.has(block, 0) == (block.hash in seen)
                seen.add(block.hash)
                store.write(pools_of([block]), 0, [block], [0])
            store.flush()
    assert len(seen) == 3 * len(numbers)  # the two LoRAs have each other's names, and are found under them
    after = Namespaces()
    with opened(tmp_path, names=after, loras={9: "french"}) as store:  # another process numbers them anew
        assert store.has(store.blocks(tokens, after("b"))[0], 0)
        assert store.has(store.blocks(tokens, after("a", 9))[0], 0)
        assert not store.has(store.blocks(tokens, after("c"))[0], 0)
        assert not store.has(store.blocks(tokens, after("b", 9))[0], 0)
        with pytest.raises(ValueError, match="loras: got no name of adapter 5"):
            store.blocks(tokens, after("a", 5))
        with pytest.raises(ValueError, match="names: got none of namespace 99"):
            store.blocks(tokens, 99)


def started(context, function, *args):
    process = context.Process(target=function, args=args)
    process.start()
    return process


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([storer.__name__])
    return context


@pytest.mark.parametrize("kills", [pytest.param(10, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.slow)])
def test_a_store_survives_kill_9_amid_writes_evictions_and_flushes(kills, tmp_path, context):
    rng, found = np.random.default_rng(kills), 0
    for _ in range(kills):
        ready = context.Event()
        process = started(
            context, storer.write_for_ever, str(tmp_path / "store"), 8 * FOUR, int(rng.integers(99)), ready
        )
        assert ready.wait(60)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
        with opened(tmp_path / "store", max_bytes=8 * FOUR) as store:
            for text in storer.TEXTS:
                found += sum(is_right(store, block) for block in chain(store, text) if store.has(block, 0))
            assert store.counters["broken"] == 0
            assert sum(path.stat().st_size for path in values_in(tmp_path / "store")) <= 8 * FOUR
    assert found > 10 * kills


@pytest.mark.long
def test_two_processes_read_while_a_writer_evicts(tmp_path, context):
    ready, stop, found = context.Event(), context.Event(), context.Queue()
    writer = started(context, storer.write_for_ever, str(tmp_path), 8 * FOUR, 0, ready, stop)
    assert ready.wait(60)
    readers = [started(context, storer.read_for_ever, str(tmp_path), 60, seed, found) for seed in range(2)]
    counters = [found.get(timeout=120) for _ in readers]
    stop.set()
    for process in (writer, *readers):
        process.join(60)
        assert process.exitcode == 0
    assert all(one["read"] > 100 and one["missed"] > 0 and one["broken"] == 0 for one in counters)


def test_bad_input_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    for change, message in [
        ({"location": None}, "location: got None, wanted a folder"),
        ({"location": tmp_path / "file" / "store"}, "location: got .*, wanted a folder of a store"),
        ({"location": "s4://bucket"}, "location: got 's4://bucket', wanted one that can be opened"),
        ({"spec": None}, "spec: got a NoneType, wanted a CacheSpec"),
        ({"names": None}, "names: got None, wanted the kvjax.Namespaces"),
        ({"model": ""}, "model: got '', wanted the name"),
        ({"loras": {1: "a", 2: "a"}}, "loras: .* wanted a name of its own"),
        ({"key": "text"}, "key: got a str, wanted at most 64 bytes"),
        ({"key": b"x" * 65}, "key: got 65 bytes, wanted at most 64 bytes"),
        ({"max_bytes": None}, "max_bytes: got None, wanted an int of at least"),
        ({"max_bytes": FOUR // 4 - 1}, "max_bytes: got .*, wanted an int of at least"),
        ({"max_in_flight": 10}, "max_in_flight: got 10, wanted an int of at least"),
        ({"patience_ms": -1}, "patience_ms: got -1, wanted an int of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            opened(**{"location": tmp_path / "store", **change})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    store = opened(tmp_path / "store")
    blocks = chain(store, [1] * SIZE)
    store.close()
    store.close()
    for use in (store.flush, lambda: store.read(blocks[0], 0), lambda: store.write(pools_of(blocks), 0, blocks, [0])):
        with pytest.raises(ValueError, match="store: got one that is closed, wanted an open one"):
            use()
    assert repr(store) == f"DiskStore({str(tmp_path / 'store')!r}; 0 blocks, 0 B of 1.0 MiB)"


def test_without_tensorstore_the_error_names_the_extra(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorstore" else find(name))
    with pytest.raises(ImportError, match=r'needs tensorstore \(pip install "kvjax\[stores\]"\)'):
        opened(tmp_path)
