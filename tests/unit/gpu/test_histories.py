# SPDX-License-Identifier: Apache-2.0
"""The kernels against plain jax, bit by bit, over histories that reach every part of them."""

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax._arrays import mix
from kvjax.blocks import twins
from kvjax.events.records import COLUMNS
from kvjax.gpu import choice
from kvjax.gpu import twins as gpu_twins
from tests import drive
from tests.drive import EXTRA, PLAIN
from tests.unit.gpu.histories import Both, History, interpreted

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


@pytest.mark.parametrize(
    ("spec", "seed"), [(PLAIN, 5), pytest.param(EXTRA, 5, marks=pytest.mark.long)], ids=["plain", "extra ids"]
)
def test_kernels_are_equal_to_plain_jax(spec, seed):
    reached = History(spec, seed, num_blocks=9).run(250)
    assert reached.keys() >= REACHED, REACHED - reached.keys()


SHAPES = {
    "blocks of one token": (spec_of(7, 3, 5, 1), 1),
    "of three": (spec_of(11, 5, 4, 3, extra_ids=True), 2),
    "more rows than blocks": (spec_of(5, 9, 3, 4), 4),
    "one token at a time": (spec_of(24, 12, 3, 16, partial_reuse=False), 1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_equal_to_plain_jax_in_other_shapes(name):
    spec, most = SHAPES[name]
    reached = History(spec, 1, most=most).run(200)
    assert reached.keys() >= OFTEN, OFTEN - reached.keys()


def functions(name):
    """A verb as a function of its own: jit would find programs that were traced with good hashes."""
    return lambda *args, **options: drive.verb(name)(*args, **options)


@pytest.fixture
def fresh():
    """Kernels are jitted themselves, and so are kept."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.long
@pytest.mark.parametrize("mask", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_crowded_buckets(mask, monkeypatch, fresh):
    monkeypatch.setattr("kvjax.blocks.index.mix", lambda x: mix(x) & np.uint32(mask))
    verbs = Both(0, drive.Verbs(interpreted), drive.Verbs(functions))
    reached = History(PLAIN, 3, verbs=verbs).run(150)
    assert reached.keys() >= OFTEN, OFTEN - reached.keys()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "reached"), [pytest.param(0, (), marks=pytest.mark.slow), (1, ("merged",)), (7, ("merged",))]
)
def test_equal_keys_of_other_contents(mask, reached, monkeypatch, fresh):
    plain_keys, kernel_keys = twins.prefix_keys, gpu_twins.key_of
    for module in ("kvjax.blocks.twins", "kvjax.blocks.match", "kvjax.verbs.release"):
        monkeypatch.setattr(f"{module}.prefix_keys", lambda *args: plain_keys(*args) & np.uint32(mask))
    monkeypatch.setattr(gpu_twins, "key_of", lambda *args: [key & np.uint32(mask) for key in kernel_keys(*args)])
    verbs = Both(0, drive.Verbs(interpreted), drive.Verbs(functions))
    wanted = {"commit: stored", "collided", *reached}
    assert wanted <= History(PLAIN, 4, verbs=verbs).run(200).keys()


@pytest.mark.parametrize("extra_ids", [False, True])
def test_logs_are_equal(extra_ids):
    """Transitions with gaps, into a log that one of them fills."""
    rng, log = np.random.default_rng(0), kvjax.events.init_log(7, 3, extra_ids)
    _, empty = kvjax.release(kvjax.init(EXTRA if extra_ids else PLAIN), 0)
    for _ in range(4):
        both = [events_of(empty, rng, size, log) for size in (5, 1)]
        with choice.interpreted():
            kernel = kvjax.events.append(log, *both)
        log = kvjax.events.append(log, *both)
        chex.assert_trees_all_equal(kernel, log)
    assert int(log.room) == 0


def events_of(empty, rng, size, log):
    """Events like `empty`, of which some are of kind NONE."""
    records = rng.integers(1, 9, (size, len(COLUMNS)), np.int32)
    records[:, 0] *= rng.random(size) < 0.6
    text = jax.tree.map(lambda x: rng.integers(0, 99, (size, x.shape[1]), np.int32), log.text)
    return empty.replace(records=records, text=text)


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
