# SPDX-License-Identifier: Apache-2.0
"""`DiskStore` by itself: writers and readers, the order in which blocks leave, limits, namespaces."""

import importlib.util
import resource
import threading

import jax
import numpy as np
import pytest
import tensorstore

import kvjax
from kvjax import Cache, Namespaces
from kvjax.stores import values
from tests.unit.stores.forms import BYTES, ROWS, SIZE, chain, is_right, opened, pools_of
from tests.unit.stores.kinds import make_spec, random_bytes

FOUR = 4 * BYTES


def wrote(store, texts, number=0):
    """Writes the blocks of texts, and waits for it; returns them."""
    blocks = [block for text in texts for block in chain(store, text)]
    for start in range(0, len(blocks), ROWS):
        some = blocks[start : start + ROWS]
        store.write(pools_of(some), number, some, range(len(some)))
    assert store.flush(60)
    return blocks


def values_in(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent != folder]


@pytest.mark.parametrize("kind", ["plain", pytest.param("bare", marks=pytest.mark.long)])
def test_blocks_come_back(kind, tmp_path):
    spec = make_spec(kind, num_host_blocks=0)
    pools = random_bytes(Cache.create(spec)).pools
    with opened(tmp_path / "store", spec) as store:
        blocks = store.blocks(np.arange(24))
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
                    assert [x.tobytes() for x in found] == [np.asarray(x).tobytes() for x in jax.tree.leaves(arrays)]


def test_a_folder_has_one_writer_and_any_number_of_readers(tmp_path):
    folder = tmp_path / "a" / "store"
    with opened(folder) as store:
        blocks = wrote(store, [[1, 2, 3, 4]])
        with pytest.raises(ValueError, match=r"location: got .*, which has a writer, wanted .* readonly=True"):
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


def test_a_forged_list_of_names_is_nothing(tmp_path):
    names = b"\xff\n" + b"9" * 5000 + b"\n../../etc/passwd\n"
    with opened(tmp_path) as store:
        blocks = wrote(store, [[1, 2, 3, 4]])
    (tmp_path / "recency").write_bytes(names)
    with opened(tmp_path) as store:
        assert is_right(store, blocks[0])


def test_values_of_another_version_are_never_found_and_leave_first(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, opened(tmp_path) as store:
        patch.setattr(values, "VERSION", 1)
        store.values = values.Values(store.spec)
        wrote(store, [[1] * SIZE])
    with opened(tmp_path, max_bytes=FOUR) as store:
        assert not store.has(chain(store, [1] * SIZE)[0], 0)
        wrote(store, [[n] * SIZE for n in range(4)])
        assert len(values_in(tmp_path)) == 4 and store.counters["evicted"] == 1


def test_another_process_finds_the_blocks_of_a_salt_and_a_lora_by_their_names(tmp_path):
    names = Namespaces()
    with opened(tmp_path, names=names, loras={0: "french", 5: "legal"}) as store:
        for number in (names("b"), names("a", 0), names("a", 5)):
            block = store.blocks([1, 2, 3, 4], number)[0]
            assert not store.has(block, 0)
            store.write(pools_of([block]), 0, [block], [0])
    after = Namespaces()
    with opened(tmp_path, names=after, loras={9: "french"}) as store:
        for number, wanted in ((after("a", 9), 1), (after("b"), 1), (after("c"), 0), (after("b", 9), 0), (after(), 0)):
            assert store.has(store.blocks([1, 2, 3, 4], number)[0], 0) == wanted
        with pytest.raises(ValueError, match="loras: got no name for adapter 5"):
            store.blocks([1, 2, 3, 4], after("a", 5))
        with pytest.raises(ValueError, match="names: got no entry for namespace 99"):
            store.blocks([1, 2, 3, 4], 99)


def test_bad_input_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    for change, message in [
        ({"location": None}, "location: got None, wanted a folder"),
        ({"location": tmp_path / "file" / "store"}, "location: got .*, wanted a folder of a store"),
        ({"location": "s4://bucket"}, "location: got 's4://bucket', wanted one that can be opened"),
        ({"spec": None}, "spec: got a NoneType, wanted a CacheSpec"),
        ({"names": None}, "names: got None, wanted the kvjax.Namespaces"),
        ({"model": ""}, "model: got '', wanted the name"),
        ({"loras": {1: "a", 2: "a"}}, "loras: .* wanted a different name"),
        ({"key": "text"}, "key: got a str, wanted at most 64 bytes"),
        ({"key": b"x" * 65}, "key: got 65 bytes, wanted at most 64 bytes"),
        ({"max_bytes": None}, "max_bytes: got None, wanted an int of at least"),
        ({"max_bytes": FOUR // 4 - 1}, "max_bytes: got .*, wanted an int of at least"),
        ({"max_in_flight": 10}, "max_in_flight: got 10, wanted an int of at least"),
        ({"read_timeout_ms": -1}, "read_timeout_ms: got -1, wanted an int of at least 0"),
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
