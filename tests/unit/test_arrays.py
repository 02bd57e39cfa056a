# SPDX-License-Identifier: Apache-2.0
"""Array helpers with a form of their own for small sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import pallas_kernels
from kvjax._arrays import add, leading, pick, put, rank, sum_before


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_sums_before_each_entry(size):
    rng = np.random.default_rng(size)
    x, where = rng.integers(-5, 9, (3, size)).astype(np.int32), rng.random((3, size)) < 0.5
    np.testing.assert_array_equal(jax.vmap(sum_before)(x), np.cumsum(x, axis=1) - x)
    np.testing.assert_array_equal(jax.vmap(rank)(where), np.cumsum(where, axis=1) - where)


@pytest.mark.parametrize("x64", [False, True])
def test_how_many_hold_before_the_first_that_does_not(x64):
    where = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    with jax.enable_x64(x64):
        got = leading(jnp.asarray(where))
        assert got.tolist() == [2, 0, 4, 0] and got.dtype == jnp.int32
        assert leading(jnp.zeros((2, 0), jnp.bool_)).tolist() == [0, 0]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("size", [6, 5000])
def test_one_entry_is_written_for_each_of_several_caches(size, x64):
    """Results are equal below and above the size up to which a write is a select; bad indices write nothing."""
    x = np.arange(3 * size, dtype=np.int32).reshape(3, size)
    index, values = np.array([[2], [0], [size]], np.int32), np.array([[7], [-4], [9]], np.int32)
    where = np.array([[True], [False], [True]])
    wanted, added = x.copy(), x.copy()
    wanted[0, 2], added[0, 2] = 7, added[0, 2] + 7
    with jax.enable_x64(x64):
        np.testing.assert_array_equal(jax.vmap(put)(x, index, values, where), wanted)
        np.testing.assert_array_equal(jax.vmap(add)(x, index, values, where), added)
        block = jnp.zeros((4, size // 2, 2), jnp.float32)
        got = put(block, (np.array([3], np.int32), 1), jnp.ones((1, 2), jnp.float32), np.array([True]))
        assert float(got.sum()) == 2 and got[3, 1].tolist() == [1, 1]


@pytest.mark.parametrize("unique", [True, False])
def test_pairs_are_read_and_written_by_element_for_a_tpu(unique):
    pairs = jnp.arange(40, dtype=jnp.uint32).reshape(20, 2)
    tables = jnp.arange(48, dtype=jnp.int32).reshape(4, 6, 2)
    index = jnp.array([3, 19, 0], jnp.int32)
    row = jnp.array([1, 3, 0], jnp.int32)
    where = jnp.array([True, True, False])
    values = jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32)

    def compute(pairs, tables):
        read = pick((pairs, tables), index), pick(pairs, index[:, None]), pick(pairs, index[1]), pick(tables, (row, 2))
        few = put(pairs, index[:1], jnp.uint32(7), where[:1])
        many = put(pairs, index, values.astype(jnp.uint32), where, unique=unique)
        return read, few, many, put(tables, (row, index % 6), values, where, unique=unique)

    plain = jax.jit(lambda *args: compute(*args))(pairs, tables)
    with pallas_kernels.lowering_for("tpu"):
        for_tpu = jax.jit(lambda *args: compute(*args))
        text = for_tpu.lower(pairs, tables).as_text()
        by_element = for_tpu(pairs, tables)
    jax.tree.map(np.testing.assert_array_equal, plain, by_element)
    of_pairs = [line for line in text.splitlines() if "stablehlo.gather" in line and "tensor<20x2xui32>" in line]
    assert len(of_pairs) == 3 and all("slice_sizes = array<i64: 1, 1>" in line for line in of_pairs)


@pytest.mark.long
def test_verbs_run_one_after_the_other_in_a_scan():
    """With scalars picked by `dynamic_slice`, jaxlib 0.12 compiles this to a program that overflows the stack."""
    length, rows, blocks = 32, 2, 64
    state = kvjax.init(kvjax.make_spec(num_blocks=blocks, max_seqs=rows, max_length=length, block_size=4))

    def compute(state, number):
        tokens, zero = jnp.arange(length, dtype=jnp.int32) * 7 + number * 104_729, jnp.zeros((1,), jnp.int32)
        state, admitted = kvjax.admit(state, 0, tokens, length)
        state, committed = kvjax.commit(state, tokens[None], zero + length, seqs=zero)
        state, released = kvjax.release(state, 0)
        return state, admitted.ok & committed.ok & released.ok

    state, ok = jax.jit(lambda state: jax.lax.scan(compute, state, jnp.arange(12, dtype=jnp.int32)))(state)
    assert bool(jnp.all(ok)) and int(state.groups[0].num_cached) == blocks
    kvjax.check(state)


def test_a_scalar_picks_by_a_gather():
    lowered = jax.jit(pick).lower(jnp.zeros((3, 2)), jnp.int32(1)).as_text()
    assert "gather" in lowered and "dynamic_slice" not in lowered
    assert pick(jnp.arange(4), jnp.int32(2)) == 2 and pick(jnp.arange(4), 9) == 3
