# SPDX-License-Identifier: Apache-2.0
"""The two hash tables against dicts: batches in and out, removals of neighbours together, crowded buckets."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.blocks import index, keys
from kvjax.state import Blocks, Text

NUM, SIZE, BATCH = 24, 4, 8


@functools.cache
def tables(kind):
    """insert, remove, find, longest_child, traced under one kind of hash: many buckets, two, or one."""
    mask = {"many buckets": 0xFFFFFFFF, "two buckets": 1, "one bucket": 0}[kind]

    def under(fn):
        jitted = jax.jit(lambda *args: fn(*args))

        def call(*args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kvjax.blocks.index.mix", lambda x: keys.mix(x) & np.uint32(mask))
                return jitted(*args)

        return call

    return tuple(map(under, (index.insert, index.remove, index.find, index.longest_child)))


HASHES = pytest.mark.parametrize("kind", ["many buckets", "two buckets", "one bucket"])


class Table:
    """The library's tables and their right contents: blocks in order of insertion, the newest last."""

    def __init__(self, kind, extra_ids=False):
        self.insert_, self.remove_, self.find_, self.longest_ = tables(kind)
        spec = kvjax.make_spec(num_blocks=NUM, max_seqs=1, max_length=SIZE, block_size=SIZE, extra_ids=extra_ids)
        self.blocks: Blocks = jax.device_get(kvjax.init(spec).groups[0].blocks)
        self.links, self.inside = index.init_links(NUM), []

    def insert(self, ids, *, tokens, parent, fill=None, extra_ids=None):
        """Gives the blocks `ids` contents and distinct keys, and links them in one batch, in this order."""
        ids = np.asarray(ids, np.int32)
        fields = {name: np.array(getattr(self.blocks, name)) for name in ("parent", "fill", "key")}
        text = jax.tree.map(np.array, self.blocks.text)
        text.tokens[ids], fields["parent"][ids] = tokens, parent
        fields["fill"][ids] = SIZE if fill is None else fill
        fields["key"][ids] = np.stack([ids * 7919 + 1, np.full(len(ids), len(self.inside))], axis=1)
        if extra_ids is not None:
            text.extra_ids[ids] = extra_ids
        self.blocks = dataclasses.replace(self.blocks, text=text, **fields)
        self.links = self.insert_(self.links, self.blocks, *batch(ids))
        self.inside += ids.tolist()
        self.verify()

    def remove(self, ids):
        fill = np.array(self.blocks.fill)
        fill[np.asarray(ids, int)] = 0
        self.blocks = dataclasses.replace(self.blocks, fill=fill)
        self.links = self.remove_(self.links, fill, *batch(ids))
        self.inside = [block for block in self.inside if block not in set(ids)]
        self.verify()

    def verify(self):
        """Verifies that both tables hold the right blocks, that neighbours are linked, and that every key is found."""
        following, preceding = np.asarray(self.links.next), np.asarray(self.links.prev)
        seen = []
        for bucket in range(2 * NUM, len(following)):
            before, node = bucket, following[bucket]
            while node >= 0:
                assert preceding[node] == before and len(seen) < 2 * NUM
                seen.append(int(node))
                before, node = node, following[node]
        assert sorted(seen) == sorted([*self.inside, *(b + NUM for b in self.inside)])
        found = np.asarray(self.find_(self.blocks, self.links, self.blocks.key))
        assert found[self.inside].tolist() == self.inside
        absent = np.array(self.blocks.key) + np.array([0, 1000], np.uint32)
        assert np.all(np.asarray(self.find_(self.blocks, self.links, absent)) == kvjax.state.NO_BLOCK)

    def longest(self, parent, tokens, limit, extra_ids=None):
        """(block, tokens shared) by the table, and the same by trying all blocks."""
        wanted = [np.asarray(tokens, np.int32), None if extra_ids is None else np.asarray(extra_ids, np.int32)]
        got = self.longest_(self.blocks, self.links, np.array(parent, np.int32), Text(*wanted), jnp.int32(limit))
        best, shared = -1, 0
        for block in reversed(self.inside):
            if self.blocks.parent[block].tolist() == list(parent):
                same = self.blocks.tokens[block] == wanted[0]
                if extra_ids is not None:
                    same = same & (self.blocks.extra_ids[block] == wanted[1])
                run = int(np.cumprod(same[: min(self.blocks.fill[block], limit)]).sum())
                best, shared = (block, run) if run > shared else (best, shared)
        return tuple(int(x) for x in got), (best, shared)


def batch(ids):
    """A batch of fixed size: the real ones first, then padding that must be ignored."""
    ids = list(ids)
    return np.array(ids + [0] * (BATCH - len(ids)), np.int32), np.arange(BATCH) < len(ids)


@HASHES
@pytest.mark.parametrize("seed", range(3))
def test_batches_in_and_out(kind, seed):
    rng, table = np.random.default_rng(seed), Table(kind)
    for _ in range(40):
        outside = [b for b in range(NUM) if b not in table.inside]
        count = int(rng.integers(1, BATCH + 1))
        if rng.random() < 0.5 and outside:
            ids = rng.permutation(outside)[:count]
            tokens = rng.integers(0, 2, (len(ids), SIZE))
            parent = np.stack([rng.integers(-1, 2, len(ids)), rng.integers(0, 2, len(ids))], axis=1)
            table.insert(ids, tokens=tokens, parent=parent, fill=rng.integers(1, SIZE + 1, len(ids)))
        elif table.inside:
            table.remove(rng.permutation(table.inside)[:count].tolist())
        for _ in range(3):
            parent, tokens = rng.integers(-1, 2, 2), rng.integers(0, 2, SIZE)
            got, wanted = table.longest([parent[0], abs(parent[1])], tokens, int(rng.integers(0, SIZE + 1)))
            assert got == wanted


def test_the_best_child_and_among_equals_the_newest():
    table = Table("many buckets")
    contents = [[5, 1, 2, 3], [5, 1, 2, 9], [5, 1, 0, 0], [6, 1, 2, 3]]
    table.insert([0, 1, 2, 3], tokens=contents, parent=[[-1, 0]] * 4)
    table.insert([4], tokens=[[5, 1, 2, 8]], parent=[[-1, 0]], fill=3)
    table.insert([5], tokens=[[5, 1, 2, 3]], parent=[[0, 1]])
    for tokens, limit, wanted in (
        ([5, 1, 2, 3], 4, (0, 4)),
        ([5, 1, 2, 3], 3, (4, 3)),  # the newest of three
        ([5, 1, 2, 9], 4, (1, 4)),
        ([5, 1, 2, 8], 4, (4, 3)),  # its fourth token differs
        ([5, 1, 7, 7], 4, (4, 2)),
        ([5, 7, 7, 7], 1, (4, 1)),
        ([7, 1, 2, 3], 4, (-1, 0)),
        ([5, 1, 2, 3], 0, (-1, 0)),
    ):
        assert table.longest([-1, 0], tokens, limit) == (wanted, wanted)
    assert table.longest([0, 1], [5, 1, 2, 3], 4)[0] == (5, 4)
    assert table.longest([0, 2], [5, 1, 2, 3], 4)[0] == (-1, 0)  # another generation of the parent
    assert table.longest([-1, 1], [5, 1, 2, 3], 4)[0] == (-1, 0)  # another tenant


def test_extra_ids_are_part_of_what_is_compared():
    table = Table("two buckets", extra_ids=True)
    table.insert([0, 1], tokens=[[5, 5, 5, 5]] * 2, parent=[[-1, 0]] * 2, extra_ids=[[0, 0, 0, 0], [0, 0, 1, 1]])
    for extra, wanted in (
        ([0, 0, 1, 0], (1, 3)),
        ([0, 0, 0, 1], (0, 3)),
        ([1, 0, 0, 0], (-1, 0)),
        ([0, 0, 2, 2], (1, 2)),
    ):
        assert table.longest([-1, 0], [5] * 4, SIZE, extra) == (wanted, wanted)


def test_padding_touches_nothing():
    table = Table("many buckets")
    table.insert([3], tokens=[[1] * SIZE], parent=[[-1, 0]])
    before = jax.device_get(table.links)
    table.insert([], tokens=np.zeros((0, SIZE)), parent=np.zeros((0, 2)))
    table.remove([])
    chex.assert_trees_all_equal(before, jax.device_get(table.links))


@pytest.mark.parametrize("num_ids", [1, 2, 3, 8, 9])
def test_tables_have_a_power_of_two_of_buckets_and_hold_all(num_ids):
    links = index.init_links(num_ids)
    buckets = (links.next.shape[0] - 2 * num_ids) // 2
    assert buckets >= num_ids and buckets & (buckets - 1) == 0 and links.prev.shape == (2 * num_ids,)
