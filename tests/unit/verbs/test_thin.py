# SPDX-License-Identifier: Apache-2.0
"""`thin` lets go of blocks in the middle of rows: what it frees, what views read, and what nobody finds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.drive import PLAIN, Driver

SPEC = dataclasses.replace(PLAIN, thinning=True)
SIZE, COLUMNS = SPEC.block_size, SPEC.max_blocks_per_seq
TEXT = list(range(1, 21))


def columns(*chosen):
    return np.isin(np.arange(COLUMNS), chosen)


def started(*texts, spec=SPEC):
    driver = Driver(kvjax.init(spec))
    for seq, text in enumerate(texts):
        driver.start(seq, text)
    return driver


def table(driver, seq):
    return driver.state.groups[0].table[seq].tolist()


def counts(driver):
    """The numbers of empty and of cached blocks."""
    group = driver.state.groups[0]
    return int(group.num_empty), int(group.num_cached)


def removed(driver):
    return [event["block"] for event in kvjax.to_list(driver.events) if event["kind"] == "removed"]


def test_the_named_blocks_are_free_and_no_others():
    driver = started(TEXT[:18])
    first, *_, last = table(driver, 0)
    driver.grow(2, 0, 0, 0)
    assert counts(driver) == (7, 0)
    assert driver.status("thin", 0, columns(1, 3)) == ["OK"]
    assert table(driver, 0) == [first, -1, 2, -1, last]
    # Block 1 stays cached. Block 2, which the row still holds, left the index, and so did its descendant, block 3.
    assert counts(driver) == (8, 1)
    assert removed(driver) == [3, 2]
    assert driver.found(TEXT) == 8


def test_blocks_that_are_in_no_index_become_empty():
    driver = started(TEXT[:8])
    driver.do("thin", 0, columns(0))
    for start in (8, 14):
        driver.grow(6, 0, 0, 0)
        driver.write({0: TEXT[start : start + 6]})
    before = counts(driver)
    driver.do("thin", 0, columns(2, 3))
    assert counts(driver) == (before[0] + 2, before[1])


def test_a_block_that_another_row_reads_stays_its():
    driver = started(TEXT[:16], TEXT[:16])
    before = table(driver, 1), counts(driver)
    driver.do("thin", 0, columns(1))
    assert (table(driver, 1), counts(driver)) == before
    assert driver.found(TEXT) == 16
    assert driver.state.seqs.holes[0].tolist() == columns(1).tolist()
    driver.do("release", 1)
    assert counts(driver) == before[1]  # the hole still has the block
    driver.do("thin", 0, columns())
    assert counts(driver) == (before[1][0], 1) and table(driver, 0)[1] == -1


def test_samples_of_a_prompt_free_what_all_of_them_let_go():
    driver = started(TEXT[:12])
    for seq in (1, 2):
        driver.do("fork", 0, seq)
    before = counts(driver)
    driver.do("thin", np.arange(2, dtype=np.int32), np.stack([columns(0, 1)] * 2))
    assert counts(driver) == before
    driver.do("thin", 2, columns(1, 2))
    assert counts(driver) == (before[0], before[1] + 1)
    assert [table(driver, seq)[1] for seq in range(3)] == [-1] * 3


def test_a_pinned_block_stays():
    driver = started(TEXT[:12])
    driver.do("pin", np.array(table(driver, 0)[:2]))
    before = counts(driver)
    driver.do("thin", 0, columns(1))
    assert counts(driver) == before and driver.found(TEXT[:12]) == 11


@pytest.mark.parametrize("forked", [False, True])
def test_nothing_written_after_a_hole_is_found(forked):
    driver = started(TEXT[:8])
    driver.do("thin", 0, columns(1))
    if forked:
        driver.do("fork", 0, 1)
        driver.do("release", 0)
    row = int(forked)
    driver.grow(*(6 * (seq == row) for seq in range(4)))
    driver.write({row: TEXT[8:14]})
    assert not any(event["kind"] == "stored" for event in kvjax.to_list(driver.events))
    driver.do("release", row)
    assert not any(event["kind"] == "stored" for event in kvjax.to_list(driver.events))
    assert driver.found(TEXT) == 8
    assert counts(driver)[1] == 2


def test_a_row_that_is_cut_to_before_its_holes_is_whole_again():
    driver = started(TEXT[:16])
    driver.do("thin", 0, columns(2))
    driver.do("truncate", 0, 8)
    assert not driver.state.seqs.holes.any()
    driver.grow(4, 0, 0, 0)
    driver.write({0: TEXT[8:12]})
    assert driver.found(TEXT[:16]) == 12


def test_a_cut_between_holes_keeps_the_first():
    driver = started(TEXT[:20])
    driver.do("thin", 0, columns(1, 3))
    for length, status in ((6, "BAD_REQUEST"), (13, "BAD_REQUEST"), (16, "OK"), (10, "OK")):
        assert driver.status("truncate", 0, length) == [status]
    assert driver.state.seqs.holes[0].tolist() == columns(1).tolist()
    driver.grow(2, 0, 0, 0)
    driver.write({0: TEXT[10:12]})
    assert driver.found(TEXT[:16]) == 8


def test_rows_are_refused_one_by_one():
    driver = started(TEXT[:10], TEXT[:8])
    seqs = np.array([0, 1, 2, -1], np.int32)
    chosen = np.stack([columns(1), columns(2), columns(), columns()])  # column 2 of row 1 is not reserved
    assert driver.status("thin", seqs, chosen) == ["OK"] + ["BAD_REQUEST"] * 3
    assert driver.status("thin", 0, columns(2)) == ["BAD_REQUEST"]  # not written to its end
    assert driver.status("thin", np.zeros(2, np.int32), np.stack([columns()] * 2)) == ["BAD_REQUEST"] * 2


@pytest.mark.long
def test_too_many_blocks_to_remove_are_refused():
    driver = started(TEXT[:20])
    assert driver.status("thin", 0, columns(1), max_removed=2) == ["BAD_REQUEST"]
    assert int(driver.events.shortfall) == 1
    assert driver.status("thin", 0, columns(1), max_removed=3) == ["OK"]


def test_a_cached_branch_after_a_freed_block_stays_findable():
    branch = [*TEXT[:8], *TEXT[4:8]]
    driver = started(branch)
    driver.do("release", 0)
    driver.start(0, TEXT[:12])
    driver.do("thin", 0, columns(1))
    assert driver.found(branch) == 11 and driver.found(TEXT[:12]) == 8


@pytest.mark.long
def test_a_swapped_out_row_is_refused_and_its_holes_come_back():
    spec = dataclasses.replace(SPEC, groups=(dataclasses.replace(SPEC.groups[0], num_host_blocks=6),))
    driver = started(TEXT[:16], spec=spec)
    driver.do("thin", 0, columns(1))
    driver.do("swap_out", 0)
    assert driver.status("thin", 0, columns(2)) == ["HELD"]
    driver.do("swap_in", 0)
    assert [block >= 0 for block in table(driver, 0)] == [True, False, True, True, False]


@pytest.mark.long
def test_a_block_of_a_window_in_a_hole_leaves_the_index_too():
    layers = [kvjax.LayerSpec(1, 4), kvjax.LayerSpec(1, 4, window=9)]
    spec = kvjax.make_spec(layers, num_blocks=12, max_seqs=4, max_length=20, block_size=SIZE, thinning=True)
    driver = started(TEXT[:16], spec=spec)
    driver.do("thin", 0, columns(2))  # which the window sees
    assert {event["group"] for event in kvjax.to_list(driver.events)} == {0, 1}
    assert driver.found(TEXT) == 8
    assert (driver.state.groups[1].table[0] >= 0).tolist() == columns(2, 3).tolist()


def test_a_cache_without_thinning_is_refused():
    with pytest.raises(ValueError, match=r"^state: got a cache whose spec has thinning=False, wanted make_spec"):
        kvjax.thin(kvjax.init(PLAIN), 0, columns(1))
    with pytest.raises(ValueError, match=r"^thinning: got True without a layer of full attention"):
        kvjax.make_spec([kvjax.LayerSpec(1, 4, window=4)], num_blocks=8, max_seqs=1, max_length=8, thinning=True)


# Views of rows with holes.

ROWS, HEADS, WIDTH = 3, 2, 8
LENGTHS, HOLES = (18, 13, 9), ((1, 2), (0,), ())
VIEWS = {
    "view": jax.jit(kvjax.view, static_argnames="max_tokens"),
    "mixed": jax.jit(kvjax.pools.mixed, static_argnames="size"),
}
ATTEND = jax.jit(lambda q, pools, view: kvjax.attend(q, pools, 0, view))


def dense(q, k, v, tokens):
    """Attention of a query f32[H, D] over some tokens of a row, in numpy."""
    scores = np.einsum("hd,thd->ht", q, k[tokens]) / np.sqrt(WIDTH)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v[tokens])


@pytest.fixture(scope="module")
def thinned():
    """A cache whose rows have holes, with NaN in all that nobody reads; the K and V of each row's tokens."""
    layer = kvjax.LayerSpec(HEADS, WIDTH)
    sizes = {"num_blocks": 16, "max_seqs": ROWS, "max_length": 20, "block_size": SIZE}
    spec = kvjax.make_spec([layer], dtype="float32", thinning=True, sparse=True, **sizes)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, ROWS, 20, HEADS, WIDTH)).astype(np.float32)
    texts = rng.integers(0, 99, (ROWS, 20), dtype=np.int32)
    lengths = np.array(LENGTHS)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(cache):
        cache, _ = cache.admit(np.arange(ROWS), texts, lengths)
        cache = cache.replace(pools=kvjax.write(cache.pools, 0, k, v, cache.view(lengths, 20)))
        cache, _ = cache.commit(texts, lengths - 2)
        cache, events = cache.thin(np.arange(ROWS), np.stack([columns(*chosen) for chosen in HOLES]))
        table = cache.state.groups[0].table
        dead = ~jnp.any(jnp.arange(17)[:, None] == table.reshape(1, -1), axis=1)
        arrays = jax.tree.map(lambda x: jnp.where(dead.reshape(-1, 1, 1, 1, 1, 1), jnp.nan, x), cache.pools.arrays)
        return cache.replace(pools=cache.pools.replace(arrays=arrays)), events.status

    cache, status = run(kvjax.Cache.create(spec))
    assert status.tolist() == [0] * ROWS
    return cache, k, v


def wanted(q, k, v, seq, position):
    tokens = [t for t in range(position + 1) if t // SIZE not in HOLES[seq]]
    return dense(q, k[seq], v[seq], tokens)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_attention_reads_what_is_left(thinned, num_tokens):
    cache, k, v = thinned
    view = VIEWS["view"](cache.state, np.full(ROWS, num_tokens), max_tokens=num_tokens)
    q = np.random.default_rng(1).normal(size=(ROWS, num_tokens, HEADS, WIDTH)).astype(np.float32)
    read = ATTEND(q, cache.pools, view)
    for seq, length in enumerate(LENGTHS):
        for token in range(num_tokens):
            position = length - 2 + token
            assert int(view.positions[seq, token]) == position
            np.testing.assert_allclose(read[seq, token], wanted(q[seq, token], k, v, seq, position), atol=2e-6)


def test_a_mixed_view_reads_what_is_left(thinned):
    cache, k, v = thinned
    view = VIEWS["mixed"](cache.state, np.array([True, False, True]), np.array([1]), np.array([2]), size=2)
    q = np.random.default_rng(2).normal(size=(1, ROWS + 2, HEADS, WIDTH)).astype(np.float32)
    read = ATTEND(q, cache.pools, view)[0]
    for at, seq, position in ((0, 0, 16), (2, 2, 7), (3, 1, 11), (4, 1, 12)):
        np.testing.assert_allclose(read[at], wanted(q[0, at], k, v, seq, position), atol=2e-6)


def test_blocks_are_selected_among_those_that_are_left(thinned):
    """The columns of a choice are the view's, which is packed."""
    cache, k, v = thinned
    view = VIEWS["view"](cache.state, np.ones(ROWS, np.int32), max_tokens=1)
    choice = np.zeros((ROWS, COLUMNS), bool)
    choice[:, 1] = True
    q = np.random.default_rng(3).normal(size=(ROWS, 1, HEADS, WIDTH)).astype(np.float32)
    read = ATTEND(q, cache.pools, kvjax.pools.select_blocks(view, choice))
    for seq, length in enumerate(LENGTHS):
        chosen = np.flatnonzero(~cache.state.seqs.holes[seq])[1]  # as the page says
        position = length - 2
        tokens = [t for t in range(position + 1) if t // SIZE in (chosen, position // SIZE)]
        np.testing.assert_allclose(read[seq, 0], dense(q[seq, 0], k[seq], v[seq], tokens), atol=2e-6)


WINDOW, SINKS, END = 6, 2, 18  # the sinks are in column 0, the window of the last tokens in columns 3 and 4


@pytest.mark.parametrize("hole", [0, 1, 3], ids=["of the sinks", "of nobody else", "of the window"])
def test_a_window_with_sinks_reads_the_blocks_that_full_attention_let_go(hole):
    """A hole is of the full-attention group alone, and the other group has its holes in front."""
    layers = [kvjax.LayerSpec(HEADS, WIDTH), kvjax.LayerSpec(HEADS, WIDTH, window=WINDOW, sink_tokens=SINKS)]
    sizes = {"num_blocks": 8, "max_seqs": 1, "max_length": 20, "block_size": SIZE}
    spec = kvjax.make_spec(layers, dtype="float32", thinning=True, sparse=True, **sizes)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, END, HEADS, WIDTH)).astype(np.float32)
    q = rng.normal(size=(1, 1, HEADS, WIDTH)).astype(np.float32)
    text = rng.integers(0, 99, END, dtype=np.int32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(cache):
        cache, _ = cache.admit(0, text, END)
        pools = cache.pools
        for layer in range(2):
            pools = kvjax.write(pools, layer, k, v, cache.view(END, END))
        cache, _ = cache.replace(pools=pools).commit(text[None], [END - 1])
        before = cache.state
        cache, events = cache.thin(0, columns(hole))
        arrays = []
        for group, (array,) in zip(cache.state.groups, cache.pools.arrays, strict=True):
            is_held = jnp.any(np.arange(len(array))[:, None] == group.table, axis=1)
            arrays.append((jnp.where(is_held.reshape(-1, *[1] * (array.ndim - 1)), array, jnp.nan),))
        pools, view = cache.pools.replace(arrays=tuple(arrays)), cache.view(1)
        out = [kvjax.attend(q, pools, layer, view, window=layers[layer].window)[0, 0] for layer in range(2)]
        return before, cache.state, events, out

    before, after, events, out = run(kvjax.Cache.create(spec))
    assert events.ok
    kvjax.check(after)
    assert [int(block) < 0 for block in after.groups[0].table[0]] == columns(hole).tolist()
    np.testing.assert_array_equal(after.groups[1].table, before.groups[1].table)
    token = np.arange(END)
    np.testing.assert_allclose(out[0], dense(q[0, 0], k[0], v[0], token[token // SIZE != hole]), atol=2e-6)
    in_window = (token < SINKS) | (token > END - 1 - WINDOW)
    np.testing.assert_allclose(out[1], dense(q[0, 0], k[0], v[0], token[in_window]), atol=2e-6)


@pytest.mark.long
def test_caches_of_a_batch_are_thinned_each():
    states = jax.vmap(lambda size: kvjax.init(SPEC, num_blocks=size))(np.array([10, 12]))
    text = np.array(TEXT, np.int32)

    def run(state, chosen):
        state, _ = kvjax.admit(state, 0, text, 20)
        state, _ = kvjax.commit(state, text[None], np.array([20]), seqs=np.array([0]))
        state, events = kvjax.thin(state, 0, chosen)
        return state.groups[0].num_cached, events.status

    cached, status = jax.jit(jax.vmap(run))(states, np.stack([columns(0, 1), columns(2)]))
    assert cached.tolist() == [2, 1] and status.tolist() == [[0], [0]]
