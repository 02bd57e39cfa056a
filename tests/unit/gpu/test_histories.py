# SPDX-License-Identifier: Apache-2.0
"""The form of the verbs for a GPU against that for a CPU, bit by bit, over histories that reach every part of it."""

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax._arrays import mix
from kvjax.blocks import dedup
from kvjax.events.records import COLUMNS
from kvjax.serving.decode import append_events
from pallas_kernels import lowering_for
from tests import drive
from tests.drive import EXTRA, PLAIN
from tests.unit.gpu.histories import Both, History, lowered

REACHED = {
    "extend: OK", "extend: NO_BLOCKS", "extend: BAD_REQUEST", "extend: removed", "extend: copied", "squeezed",
    "copied twice", "a victim refused", "commit: OK", "commit: BAD_REQUEST", "commit: stored", "merged",
    "merged with a cached block", "trim: OK", "trim: BAD_REQUEST", "trimmed",
}  # fmt: skip
OFTEN = {"extend: OK", "extend: NO_BLOCKS", "extend: removed", "commit: OK", "commit: stored"}


def spec_of(num_blocks, max_seqs, columns, size, **options):
    return kvjax.make_spec(
        num_blocks=num_blocks, max_seqs=max_seqs, max_length=columns * size, block_size=size, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "seed"),
    [pytest.param(PLAIN, 5, marks=pytest.mark.long), pytest.param(EXTRA, 5, marks=pytest.mark.slow)],
    ids=["plain", "extra ids"],
)
def test_both_forms_are_equal(spec, seed):
    reached = History(spec, seed, num_blocks=9).run(250)
    assert reached.keys() >= REACHED, REACHED - reached.keys()


SHAPES = {
    "blocks of one token": (spec_of(7, 3, 5, 1), 1),
    "of three": (spec_of(11, 5, 4, 3, extra_ids=True), 2),
    "more rows than blocks": (spec_of(7, 9, 3, 4), 4),
    "one token at a time": (spec_of(9, 6, 3, 4, partial_reuse=False), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_are_equal_in_other_shapes(name):
    spec, most = SHAPES[name]
    reached = History(spec, 1, most=most).run(200)
    assert reached.keys() >= OFTEN, OFTEN - reached.keys()


def functions(name):
    """A verb as a new function, or jit would find programs that were traced with good hashes."""
    return lambda *args, **options: drive.verb(name)(*args, **options)


@pytest.fixture
def no_programs():
    """Clears jax's caches of what is jitted inside."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_crowded_buckets(mask, monkeypatch, no_programs):
    monkeypatch.setattr("kvjax.blocks.index.mix", lambda x: mix(x) & np.uint32(mask))
    verbs = Both(0, drive.Verbs(lowered), drive.Verbs(functions))
    reached = History(PLAIN, 3, verbs=verbs).run(150)
    assert reached.keys() >= OFTEN, OFTEN - reached.keys()


@pytest.fixture
def colliding(monkeypatch, no_programs):
    """A function that masks the bits of keys, and makes verbs with such keys."""
    plain_keys = dedup.prefix_keys

    def verbs(mask):
        for module in ("kvjax.blocks.dedup", "kvjax.blocks.match", "kvjax.verbs.release"):
            monkeypatch.setattr(f"{module}.prefix_keys", lambda *args: plain_keys(*args) & np.uint32(mask))
        return Both(0, drive.Verbs(lowered), drive.Verbs(functions))

    return verbs


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "reached"), [(1, ()), pytest.param(15, ("merged",), marks=pytest.mark.slow)])
def test_equal_keys_of_other_contents(mask, reached, colliding):
    wanted = {"commit: stored", "collided", *reached}
    assert wanted <= History(PLAIN, 10, verbs=colliding(mask)).run(150).keys()


@pytest.mark.slow
def test_equal_keys_in_one_call(colliding):
    """Rows 0 and 2 differ only in the tenant. Row 1 equals a cached block, but row 0 comes first."""
    verbs, seqs = colliding(0), np.arange(4, dtype=np.int32)
    tokens = np.repeat(np.array([[1], [2], [1], [2]], np.int32), 5, axis=1)
    for cached in (False, True):
        cache = drive.Driver(kvjax.init(PLAIN), verbs)
        for seq in seqs:
            cache.admit(seq, tokens[seq], namespace=int(seq == 2))
        cache.do("commit", tokens[:, :4], np.where((seqs == 3) & cached, 4, 0), seqs=seqs)
        cache.do("commit", tokens[:, :4], np.where((seqs == 2) | (seqs < 1 + cached), 4, 0), seqs=seqs)
        held = np.asarray(cache.state.groups[0].table)[:, 0]
        assert len(set(held.tolist())) == 4 and not verbs.reached["merged"]


@pytest.mark.long
def test_rows_that_merge_with_one_cached_block_hold_it_together():
    verbs = Both(0)
    cache = drive.Driver(kvjax.init(PLAIN), verbs)
    rows, zeros = np.arange(4, dtype=np.int32), np.zeros((4, 4), np.int32)
    for seq in rows[:3]:
        cache.admit(seq, [0] * 3)
    cache.do("commit", zeros, np.maximum(cache.state.seqs.length - cache.state.seqs.committed, 0), seqs=rows)
    cache.do("extend", rows < 3, (rows < 3).astype(np.int32), max_tokens=4)
    cache.admit(3, [0] * 5)
    cache.do("commit", zeros, np.where(rows == 3, 4 - np.asarray(cache.state.seqs.committed), 0), seqs=rows)
    cache.do("release", 3)
    assert int(cache.state.groups[0].num_cached) == 1
    cache.do("commit", zeros, (rows < 3).astype(np.int32), seqs=rows)
    group = cache.state.groups[0]
    assert len(set(np.asarray(group.table)[:3, 0].tolist())) == 1 and int(group.num_cached) == 0
    assert verbs.reached["merged with a cached block"] == 1


@pytest.mark.long
@pytest.mark.parametrize("extra_ids", [False, True])
def test_logs_are_equal(extra_ids):
    """Transitions with gaps, into a log that one of them fills."""
    rng, log = np.random.default_rng(0), kvjax.events.init_log(7, 3, extra_ids)
    _, empty = kvjax.release(kvjax.init(EXTRA if extra_ids else PLAIN), 0)
    for _ in range(4):
        both = [events_of(empty, rng, size, log) for size in (5, 1)]
        with lowering_for("cuda"):
            on_gpu = append_events(log, *both)
        log = kvjax.events.append(log, *both)
        chex.assert_trees_all_equal(on_gpu, log)
    assert int(log.num_free) == 0


def events_of(empty, rng, size, log):
    """Events like `empty`, of which some are of kind NONE."""
    records = rng.integers(1, 9, (size, len(COLUMNS)), np.int32)
    records[:, 0] *= rng.random(size) < 0.6
    text = jax.tree.map(lambda x: rng.integers(0, 99, (size, x.shape[1]), np.int32), log.text)
    counts = {name: rng.integers(0, 99, getattr(empty, name).shape, np.int32) for name in ("queried", "cached")}
    return empty.replace(records=records, text=text, **counts)


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True])
def test_more_rows_fill_a_block_than_one_pass_looks_at(same):
    rows, verbs = 40, Both(0)
    cache = drive.Driver(kvjax.init(spec_of(2 * rows, rows, 2, 4)), verbs, verified=False)
    tokens = np.zeros((rows, 8), np.int32) if same else np.arange(8 * rows, dtype=np.int32).reshape(rows, 8)
    cache.do("admit", np.arange(rows), tokens, np.full(rows, 5))
    for step in range(5):
        cache.do("commit", tokens[:, step : step + 1], np.ones(rows, np.int32))
    assert verbs.reached["commit: stored"] == 1 and bool(verbs.reached["merged"]) == same
    kvjax.check(cache.state)
