# SPDX-License-Identifier: Apache-2.0
"""Triton's decode: shares of all tiles, rows that are cut, and pools of bytes that are read in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.triton import attention as triton_attention
from pallas_kernels.triton import words as triton_words
from pallas_kernels.triton.decode import share_tiles
from tests.kernels.attention import Case, check_decode, decode, options_for

TILE = 16


def shares_of(lengths, programs, window=None, part=None):
    """The rows' tiles, (row, number), of each program; and the shares."""
    lengths = jnp.asarray(lengths, jnp.int32)
    shares = jax.tree.map(np.asarray, share_tiles(lengths, TILE, programs, window, part, interpret=True))
    each, rows, found = int(shares.tiles_per_program[0]), len(lengths), []
    for program in range(programs):
        begin, limit = program * each, min((program + 1) * each, int(shares.ends[rows]))
        entry, tile, own = int(shares.first[program]), begin, []
        while tile < limit:
            start, end = int(shares.ends[entry]), int(shares.ends[entry + 1])
            assert start <= tile < end
            stop = min(end, limit)
            own += [(int(shares.order[entry]), number - start) for number in range(tile, stop)]
            entry, tile = entry + 1, stop
        found.append(own)
    return found, shares


LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 3000)), min_size=9, max_size=9)


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from([1, 5, 66]), st.sampled_from([None, 40]))
def test_programs_share_all_tiles_evenly(lengths, programs, window):
    found, shares = shares_of(lengths, programs, window)
    first = [0 if window is None else max(length - window, 0) // TILE * TILE for length in lengths]
    wanted = [-(-(length - begin) // TILE) for length, begin in zip(lengths, first, strict=True)]
    assert sorted(tile for own in found for tile in own) == [
        (row, tile) for row, count in enumerate(wanted) for tile in range(count)
    ]
    assert max(map(len, found)) == -(-sum(wanted) // programs)
    order = shares.order[: len(lengths)].tolist()
    assert sorted(order) == list(range(len(lengths)))
    assert [row for row in order if wanted[row]] == order[: sum(map(bool, wanted))]  # rows without tiles are last


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from([1, 3]), st.sampled_from([None, 40]))
def test_fixed_parts_are_of_one_row_and_do_not_depend_on_the_others(lengths, part, window):
    most = 3000 if window is None else window + TILE
    per_row = -(-most // (part * TILE))
    found, _ = shares_of(lengths, per_row * len(lengths), window, part)
    parts = [own for own in found if own]
    assert all(len({row for row, _ in own}) == 1 and own[0][1] % part == 0 for own in parts)
    alone, _ = shares_of(lengths[-1:], per_row, window, part)
    last = [[tile for _, tile in own] for own in parts if own[0][0] == len(lengths) - 1]
    assert last == [[tile for _, tile in own] for own in alone if own]


@pytest.mark.long
@pytest.mark.parametrize(
    "programs", [5, pytest.param(1, marks=pytest.mark.long), pytest.param(66, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", ["plain", pytest.param("all", marks=pytest.mark.long), "sinks"])
def test_one_long_row_among_short_ones(programs, name, monkeypatch):
    monkeypatch.setattr(tuning, "resident_programs", lambda _: programs)
    case = Case([3, 0, 700, 1, 90, 0, 64, 65], kv_heads=1, group=3, width=24, block_size=12)  # no power of two
    check_decode(case, "triton", **options_for(case, name))


WORDS = [(64, "int8", "bfloat16", "all"), (128, "float8_e4m3fn", "bfloat16", "plain")]
MORE = [
    (192, "int8", "float16", "sinks"), (256, "float8_e4m3fn", "float16", "all"), (512, "int8", "bfloat16", "window"),
    (128, "int8", "bfloat16", "soft_cap"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "stored", "dtype", "name"), [*WORDS, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_bytes_are_read_in_words(width, stored, dtype, name, monkeypatch):
    read = []

    def unpack(words, *args):
        read.append(words.dtype)
        return triton_words.unpack(words, *args)

    monkeypatch.setattr(triton_attention, "unpack", unpack)
    monkeypatch.setattr(tuning, "resident_programs", lambda _: 6)
    case = Case([3, 0, 200, 70], kv_heads=2, group=2, width=width, block_size=8, stored=stored, dtype=dtype)
    check_decode(case, "triton", **options_for(case, name))
    assert set(read) == {jnp.dtype("int32")}


@pytest.mark.slow
def test_bytes_under_vmap(monkeypatch):
    """Several lengths over one pool: each has its own shares."""
    monkeypatch.setattr(tuning, "resident_programs", lambda _: 6)
    case = Case([200, 70, 130], kv_heads=2, group=2, width=64, block_size=8, stored="int8", dtype="bfloat16")
    q, lengths = case.queries(3), jnp.array([[200, 70, 130], [0, 70, 3]], jnp.int32)

    def run(lengths):
        return decode(q, case.pool, case.layer, jnp.asarray(case.tables), lengths, "triton", 0.125, scales=case.scales)

    for number, mapped in enumerate(zip(*jax.vmap(run)(lengths), strict=True)):
        for one, wanted in zip(mapped, run(lengths[number]), strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_words_hold_each_byte_in_its_column(stored):
    numbers = np.arange(256, dtype=np.uint8).view(np.dtype(jnp.dtype(stored)))
    numbers = np.where(np.isfinite(numbers.astype(np.float32)), numbers, numbers[:1])
    parts = triton_words.unpack(triton_words.as_words(jnp.asarray(numbers)), jnp.dtype(stored), interpret=True)
    got = np.stack(parts, axis=-1).reshape(-1)
    np.testing.assert_array_equal(got.astype(np.float32), numbers.astype(np.float32))


@pytest.mark.parametrize(("q_size", "growth"), [(1e30, 1.3), pytest.param(1e-30, 0.7, marks=pytest.mark.long)])
def test_words_of_any_size_neither_overflow_nor_vanish(q_size, growth, monkeypatch):
    """Products are of float16, whose largest number is 65,504: q and V's scales are taken relative to the largest."""
    monkeypatch.setattr(tuning, "resident_programs", lambda _: 2)  # so that a program has several tiles
    case = Case([40, 90], kv_heads=2, group=1, width=64, stored="int8", dtype="bfloat16")
    sizes = np.array([1e-6, 1e6])  # of V in each head
    for row, kv in enumerate(case.kv):
        block = np.arange(len(kv)) // case.pool.shape[4]  # V grows from block to block
        kv[:, 1] *= (growth**block)[:, None, None]
        used, number = case.tables[row, : block[-1] + 1], np.arange(block[-1] + 1)
        factors = jnp.asarray(growth ** number[:, None] * sizes, jnp.float32)
        case.scales = case.scales.at[used, :, 1].multiply(factors[:, None, :, None])
    q = case.queries(2) * jnp.asarray(q_size, case.dtype)
    out, _ = decode(
        q, case.pool, case.layer, jnp.asarray(case.tables), jnp.asarray(case.lengths, jnp.int32), "triton", 1 / q_size,
        scales=case.scales,
    )  # fmt: skip
    for row in range(2):
        wanted, _ = case.expect(q[row][None], row, 1, scale=1 / q_size)
        largest = np.abs(wanted).max()
        case.close(np.asarray(out[row], np.float64) / sizes[:, None] / largest, wanted[0] / largest)


def test_powers_of_two_below():
    x = np.array([1.0, 1.5, 2.0, 3.9, 1e-20, 1e20, 0.0, 3e38], np.float32)
    power, inverse = map(np.asarray, triton_words.power_below(jnp.asarray(x)))
    np.testing.assert_array_equal(power * inverse, 1)
    usual = (x > 1e-30) & (x < 1e38)
    assert np.all((power <= x)[usual]) and np.all((x < 2 * power)[usual])
    assert np.all(np.isfinite(x * inverse)) and np.all(x * inverse < 8)
