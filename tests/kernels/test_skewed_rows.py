# SPDX-License-Identifier: Apache-2.0
"""XLA's decode attention where one row is much longer than the others: it is cut into parts, which are merged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import schedule
from tests.kernels.attention import Case, check_decode, decode, options_for
from tests.mesh import mesh_of

SKEWED, EQUAL = [3, 2500, 0, 16, 200, 1, 37, 64], [2500] * 8
OPTIONS = {
    "plain": {},
    "window": {"window": 2048},
    "soft_cap_sinks": {"soft_cap": 3.0, "sinks": True},
    "all": {"window": 2100, "soft_cap": 3.0, "sinks": True, "scale": 0.3},
}
CASES = [
    ("all", {}),
    *(pytest.param(name, {}, marks=pytest.mark.long) for name in OPTIONS if name != "all"),
    pytest.param("all", {"stored": "int8", "dtype": "bfloat16"}, marks=pytest.mark.long),
    pytest.param("plain", {"kv_heads": 1, "group": 5, "width": 24, "values": 16}, marks=pytest.mark.long),
    pytest.param("all", {"kv_heads": 1, "width": 40, "values": 24, "stored": "int8"}, marks=pytest.mark.long),
]


def run(case, lengths=None, **options):
    """The results and the lse of all rows, the same queries each time."""
    q = jnp.asarray(np.random.default_rng(1).standard_normal((len(case.lengths), case.heads, case.width)), case.dtype)
    lengths = jnp.asarray(case.lengths if lengths is None else lengths, jnp.int32)
    return decode(q, case.pool, case.layer, jnp.asarray(case.tables), lengths, "xla", scale=0.25, **options)


def conditions(rows, columns, **options):
    """The number of conditions in a program for blocks of 16, two kv heads of 16 elements, and tiles of 128 slots."""
    pool, q = jnp.zeros((4, 1, 2, 2, 16, 16)), jnp.zeros((rows, 4, 16))
    call = functools.partial(pallas_kernels.call, "decode_attention", implementation="xla", scale=1.0, **options)
    traced = jax.make_jaxpr(call)(q, pool, 0, jnp.zeros((rows, columns), jnp.int32), jnp.zeros((rows,), jnp.int32))
    return str(traced).count(" cond[")


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_parts_of_a_long_row_merge_to_the_whole(name, shape):
    case = Case(SKEWED, **shape)
    case.rng = np.random.default_rng(7)
    options = {**OPTIONS[name], **({"sinks": options_for(case, "sinks")["sinks"]} if "sinks" in OPTIONS[name] else {})}
    check_decode(case, "xla", **options)


def test_bits_tell_which_branch_computes_the_rows():
    """Only a long row among short ones differs from the loop's bits, which a fixed split keeps."""
    case = Case(EQUAL)
    for lengths, has_parts in ((SKEWED, True), (EQUAL, False)):
        chosen, loop = run(case, lengths), run(case, lengths, fixed_split=True)
        assert np.any(chosen[0][1] != loop[0][1]) == has_parts
        for got, wanted in zip(chosen, loop, strict=True):
            np.testing.assert_allclose(got, wanted, 2e-5, 2e-5)
            short = np.flatnonzero(np.array(lengths) <= 128)  # of one part
            np.testing.assert_array_equal(got[short], wanted[short])


def test_only_programs_that_can_gain_have_a_condition():
    assert conditions(8, 128) == conditions(256, 128) == conditions(8, 128, window=2048) == 1
    assert conditions(7, 128) == conditions(257, 128) == conditions(8, 127) == conditions(8, 127, window=2048) == 0
    assert conditions(8, 128, window=2047) == conditions(8, 128, fixed_split=True) == 0


@pytest.mark.parametrize(("lengths", "window", "wanted"), [
    ([4096, *[128] * 31], None, True), ([1000] * 32, None, False), ([0] * 32, None, False),
    ([300] + [300 // 3] * 31, None, False),  # less than three tiles
    ([1201, *[400] * 3], None, False), ([6001, *[400] * 3], None, True), ([6001, *[400] * 3], 1024, False),
])  # fmt: skip
def test_rows_are_skewed_by_the_slots_that_they_read(lengths, window, wanted):
    assert schedule.is_skewed(jnp.asarray(lengths, jnp.int32), 128, window) == wanted


def test_skewed_rows_take_fewer_steps_in_parts():
    """Whatever the lengths, the loops over the parts take fewer steps than the loop over the longest row."""
    rng, found = np.random.default_rng(0), 0
    split = jax.jit(lambda lengths: (schedule.is_skewed(lengths, 64), schedule.split_lengths(lengths, 64, 32)))
    for _ in range(200):
        lengths = (4096 * rng.random(16) ** rng.integers(1, 9) * (rng.random(16) < rng.choice([0.2, 1]))).astype(int)
        is_skewed, (work, _) = split(jnp.asarray(lengths, jnp.int32))
        slots = np.maximum(work.end - work.begin, 0)
        assert slots.sum() == lengths.sum()
        if is_skewed:
            found += 1
            assert (-(-slots.reshape(3, 16).max(axis=1) // 64)).sum() < -(-lengths.max() // 64)
    assert 50 < found < 200


@pytest.mark.long
def test_under_vmap_the_loop_serves_all_caches():
    """The second cache has the same rows in another order; the K/V that both read are unmapped."""
    case = Case(SKEWED)
    order = jnp.asarray([[0, 1, 2, 3, 4, 5, 6, 7], [5, 4, 1, 0, 2, 7, 3, 6]])
    q = case.queries(8)[order]
    rows = q, jnp.asarray(case.tables)[order], jnp.asarray(case.lengths, jnp.int32)[order]

    def attend(q, tables, lengths, fixed_split):
        return decode(q, case.pool, 1, tables, lengths, "xla", scale=0.25, fixed_split=fixed_split)

    mapped, loop = (jax.vmap(functools.partial(attend, fixed_split=fixed))(*rows) for fixed in (False, True))
    one_by_one = [attend(*(x[i] for x in rows), fixed_split=False) for i in range(2)]
    for got, of_loop, wanted in zip(mapped, loop, map(jnp.stack, zip(*one_by_one, strict=True)), strict=True):
        np.testing.assert_array_equal(got, of_loop)
        np.testing.assert_allclose(got, wanted, 2e-5, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
def test_each_device_of_a_mesh_chooses_for_its_own_rows(check_vma):
    """Two devices with rows of their own, only one of which has a long one; and two with heads of their own."""
    case = Case([*SKEWED, *[100] * 8])
    q, tables, lengths = case.queries(16), jnp.asarray(case.tables), jnp.asarray(case.lengths, jnp.int32)

    def attend(q, pool, tables, lengths):
        return decode(q, pool, 1, tables, lengths, "xla", scale=0.25)

    wanted = attend(q, case.pool, tables, lengths)
    with mesh_of(1, 2) as mesh:
        heads, rows = P(None, "heads"), P("heads")
        for of_q, of_pool, of_rows in ((heads, P(None, None, None, "heads"), P()), (rows, P(), rows)):
            specs = of_q, of_pool, of_rows, of_rows
            divided = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(of_q, of_q), check_vma=check_vma)
            for got, whole in zip(jax.jit(divided)(q, case.pool, tables, lengths), wanted, strict=True):
                np.testing.assert_allclose(got, whole, 2e-5, 2e-5)


@pytest.mark.long
def test_with_64_bit_types_the_parts_stay_narrow():
    case = Case(SKEWED)
    wanted = run(case)
    with jax.enable_x64(True):
        for got, narrow in zip(run(case), wanted, strict=True):
            assert got.dtype == narrow.dtype == jnp.float32
            np.testing.assert_allclose(got, narrow, 2e-5, 2e-5)
