# SPDX-License-Identifier: Apache-2.0
"""A store of several replicas: each writes to a folder of its own, and finds the blocks of all."""

import contextlib

import numpy as np
import pytest

import kvjax
from kvjax.stores import DiskStore
from models import shared_store
from models.shared_store import SharedStore
from tests.wire_kit import eventually

pytest.importorskip("tensorstore")
SPEC = kvjax.make_spec([kvjax.LayerSpec(1, 4)], num_blocks=8, max_seqs=1, max_length=32, block_size=8, dtype="float32")
OPTIONS = {"model": "a model", "max_bytes": 1 << 20}


def opened(folder):
    return SharedStore(folder, SPEC, names=kvjax.Namespaces(), **OPTIONS)


def write(store, tokens):
    """Writes the blocks of a prompt, whose bytes are those of empty pools."""
    blocks = store.blocks(np.array(tokens))
    store.write(kvjax.Cache.create(SPEC).pools, 0, blocks, list(range(len(blocks))))
    store.flush()
    return blocks


def reads(store, blocks):
    return [store.has(block, 0) and store.read(block, 0).result() is not None for block in blocks]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(shared_store, "REFRESH_SECONDS", 0.02)


def test_writers_find_the_blocks_of_each_other_and_of_a_server_before_them(tmp_path):
    with DiskStore(tmp_path / "store", SPEC, names=kvjax.Namespaces(), **OPTIONS) as server:
        old = write(server, range(16))
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(opened(tmp_path / "store")) for _ in range(2))
        assert reads(first, old) == reads(second, old) == [True, True]
        ours = write(first, range(100, 124))
        assert len(ours) == 3 and reads(first, ours) == [True] * 3
        eventually(lambda: reads(second, ours) == [True] * 3)
        theirs = write(second, range(200, 216))
        eventually(lambda: reads(first, theirs) == [True] * 2)
        assert not second.has(first.blocks(np.arange(300, 308))[0], 0)
        assert first.counters["read"] >= 7 and second.counters["written"] == 2
    assert sorted(path.name for path in (tmp_path / "store").iterdir() if path.name.isdecimal()) == ["0", "1"]


def test_a_writer_takes_the_folder_of_one_that_has_ended(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    ours, theirs = write(first, range(8)), write(second, range(8, 16))
    first.close()
    first.close()
    with second, opened(tmp_path) as third:
        assert reads(third, [*ours, *theirs]) == [True, True] and third._own_folder.name == "0"
        assert set(third._others) == {tmp_path / "1"}


def test_other_refusals_are_those_of_a_store(tmp_path):
    (tmp_path / "0").write_text("a file")
    with pytest.raises(ValueError, match=r"^location: got .*wanted a folder of a store"):
        opened(tmp_path)
