# SPDX-License-Identifier: Apache-2.0
"""The views of a step: which tokens they have, where these are written, and what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pools.views import View, mixed, ragged, view
from tests.unit.pools.hand_made import TABLE, hand_made_state


def test_padded_view():
    got = jax.jit(functools.partial(view, max_tokens=3))(hand_made_state(), jnp.asarray([2, 1, 1, 3], jnp.int32))
    np.testing.assert_array_equal(got.num_tokens, [2, 0, 0, 3])  # rows 1 and 2 have nothing reserved
    np.testing.assert_array_equal(got.lengths, [5, 0, 0, 13])
    np.testing.assert_array_equal(np.where(np.asarray(TABLE) < 0, 12, TABLE), got.tables[0])
    np.testing.assert_array_equal(got.positions[0, :2], [3, 4])
    np.testing.assert_array_equal(got.positions[3], [10, 11, 12])
    np.testing.assert_array_equal(got.slots[0][0, :2], [2 * 4 + 3, 0 * 4 + 0])
    np.testing.assert_array_equal(got.slots[0][3], [6 * 4 + 2, 6 * 4 + 3, 8 * 4 + 0])
    padding = np.asarray([[0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    np.testing.assert_array_equal(np.asarray(got.slots[0]) >= 12 * 4, padding)


def test_view_of_some_rows_and_of_padding_rows():
    got = view(hand_made_state(), jnp.asarray([1, 1, 1], jnp.int32), 1, seqs=jnp.asarray([3, -1, 4], jnp.int32))
    np.testing.assert_array_equal(got.num_tokens, [1, 0, 0])
    np.testing.assert_array_equal(got.lengths, [11, 0, 0])
    np.testing.assert_array_equal(got.tables[0], [TABLE[3], [12] * 5, [12] * 5])


def test_an_int_of_tokens_stands_for_all_rows():
    got, wanted = view(hand_made_state(), 2), view(hand_made_state(), jnp.full(4, 2, jnp.int32), 2)
    chex.assert_trees_all_equal(got, wanted)


def test_host_blocks_become_scratch():
    state = hand_made_state(table=[*TABLE[:3], [12 + 3, *TABLE[3][1:]]])
    np.testing.assert_array_equal(view(state, 1).tables[0][3], [12, 4, 6, 8, 9])


def test_ragged_view():
    got = jax.jit(functools.partial(ragged, size=8))(hand_made_state(), jnp.asarray([2, 1, 1, 9], jnp.int32))
    np.testing.assert_array_equal(got.starts, [0, 2, 2, 2])
    np.testing.assert_array_equal(got.num_tokens, [2, 0, 0, 6])  # 6 of 9, because no more fit on the line
    np.testing.assert_array_equal(got.lengths, [5, 0, 0, 16])
    np.testing.assert_array_equal(got.positions, [[3, 4, 10, 11, 12, 13, 14, 15]])
    np.testing.assert_array_equal(got.slots[0], [[11, 0, 26, 27, 32, 33, 34, 35]])
    short = ragged(hand_made_state(), jnp.asarray([2, 1, 1, 3], jnp.int32), 8)
    assert np.all(np.asarray(short.slots[0])[0, 5:] >= 12 * 4)


# Rows 0 and 3 have 3 and 10 more tokens reserved. Written tokens that are not committed use them up.
WRITTEN = jnp.asarray([1, 0, 0, 4], jnp.int32)


@pytest.mark.parametrize("form", [functools.partial(view, max_tokens=3), functools.partial(ragged, size=8)])
def test_a_view_goes_on_after_what_is_written(form):
    """As if it were committed."""
    counts = jnp.asarray([9, 1, 1, 4], jnp.int32)
    got = jax.jit(form)(hand_made_state(), counts, written=WRITTEN)
    chex.assert_trees_all_equal(got, form(hand_made_state(committed=[4, 0, 9, 14]), counts))
    assert got.lengths.tolist() == ([6, 0, 0, 17] if got.starts is None else [6, 0, 0, 18])


@pytest.mark.parametrize("form", [functools.partial(view, max_tokens=2), functools.partial(ragged, size=6)])
def test_no_slots_are_beyond_what_is_written_and_nothing_is_written_twice(form):
    state, two = hand_made_state(), jnp.full(4, 2, jnp.int32)
    for written in (3, 4, 2**20):
        got = form(state, two, written=jnp.asarray([written, 0, 0, 0], jnp.int32))
        assert int(got.num_tokens[0]) == int(got.lengths[0]) == 0
        slots = np.asarray(got.slots[0]).reshape(-1)
        assert set(slots[slots < 12 * 4]) == {26, 27}  # those of row 3
    chex.assert_trees_all_equal(form(state, two, written=-WRITTEN), form(state, two))  # committed K/V stay
    some, one = jnp.asarray([3, -1], jnp.int32), jnp.ones(2, jnp.int32)
    got = form(state, one, seqs=some, written=jnp.asarray([9, 9], jnp.int32))  # like num_tokens, a number per row named
    np.testing.assert_array_equal(got.lengths, [20, 0])
    chex.assert_trees_all_equal(got, form(state, one, seqs=some, written=9))  # an int stands for all of them


def ints(*values):
    return np.array(values, np.int32)


S, SIZE = 4, 8
# Rows that decode, and chunks. Rows 0 and 3 have 3 and 10 more tokens reserved, rows 1 and 2 none.
CASES = {
    "a row of each": (ints(1, 0, 0, 0), ints(3, -1, -1, -1), ints(6, 0, 0, 0)),
    "rows without room": (ints(1, 1, 1, 0), ints(1, 3, 2, -1), ints(4, 6, 1, 0)),
    "padding between chunks": (ints(0, 0, 0, 0), ints(-1, 0, S, 3), ints(9, 2, 9, 6)),
    "a line that is too short": (ints(0, 0, 0, 0), ints(3, -1, 0, -1), ints(7, 1, 3, 1)),
    "no chunk": (ints(1, 0, 0, 1), ints(-1, -1, 2, -1), ints(1, 1, 1, 1)),
}
mixed_view = jax.jit(mixed, static_argnames="size")


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_view_is_a_decode_view_and_a_ragged_one(case):
    (on, seqs, counts), state = CASES[case], hand_made_state()
    got = mixed_view(state, on > 0, seqs, counts, size=SIZE)
    first, rest = view(state, on, 1), ragged(state, counts, SIZE, seqs)
    assert got.decodes == S and got.positions.shape == (1, S + SIZE)
    pairs = {
        name: (getattr(first, name), getattr(rest, name))
        for name in ("tables", "positions", "lengths", "slots", "num_tokens")
    }
    pairs["positions"] = first.positions.T, rest.positions
    pairs["slots"] = (first.slots[0].T,), rest.slots
    pairs["starts"] = np.arange(S), rest.starts + S
    for name, pair in pairs.items():
        axis = 1 if name in ("positions", "slots") else 0
        wanted = jax.tree.map(lambda *parts, axis=axis: np.concatenate(parts, axis), *pair)
        chex.assert_trees_all_equal(getattr(got, name), wanted)


def test_a_mixed_view_by_hand():
    got = mixed(hand_made_state(), np.array([True, True, False, False]), ints(3, -1), ints(4, 1), 5)
    np.testing.assert_array_equal(got.positions, [[3, 0, 0, 0, 10, 11, 12, 13, 0]])
    np.testing.assert_array_equal(got.slots[0], [[11, 48, 48, 48, 26, 27, 32, 33, 48]])
    np.testing.assert_array_equal(got.lengths, [4, 0, 0, 0, 14, 0])
    np.testing.assert_array_equal(got.num_tokens, [1, 0, 0, 0, 4, 0])
    np.testing.assert_array_equal(got.starts, [0, 1, 2, 3, 4, 8])


def test_a_row_that_decodes_has_no_chunk():
    """Otherwise its next token would be on the line twice, and in one slot twice."""
    state, on = hand_made_state(), np.array([True, False, False, False])
    got = mixed(state, on, ints(0, 3), ints(3, 4), 8)
    chex.assert_trees_all_equal(got.replace(tables=()), mixed(state, on, ints(-1, 3), ints(3, 4), 8).replace(tables=()))
    np.testing.assert_array_equal(got.num_tokens, [1, 0, 0, 0, 0, 4])
    slots = np.asarray(got.slots[0])[0]
    assert len(set(slots[slots < 48])) == 5
    chex.assert_trees_all_equal(mixed(state, on, ints(3), 4, 8), mixed(state, on, ints(3), ints(4), 8))


ON = np.ones(S, bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: view(s, 1, written=jnp.ones(3, jnp.int32)), r"written: got shape \[3\], wanted \[4\]"),
        (lambda s: ragged(s, jnp.ones(4, jnp.int32), 4, written=jnp.ones(4)), "written: got dtype float32"),
        (lambda s: view(s, jnp.ones(4, jnp.int32)), "max_tokens: got None"),
        (lambda s: view(s, 0), "num_tokens: got 0"),
        (lambda s: view(s, jnp.ones(3, jnp.int32), 1), r"num_tokens: got shape \[3\], wanted \[4\]"),
        (lambda s: view(s, jnp.ones(4), 1), "num_tokens: got dtype float32, wanted integers"),
        (lambda s: view(s, 1, seqs=jnp.zeros((2, 2), jnp.int32)), r"seqs: got shape \[2, 2\], wanted \[R\]"),
        (lambda s: ragged(s, jnp.ones(4, jnp.int32), 0), "size: got 0"),
        (lambda s: mixed(s, ON[:3], ints(0), ints(1), 4), r"decode: got bool\[3\], wanted bool\[4\]"),
        (lambda s: mixed(s, ints(1, 1, 1, 1), ints(0), ints(1), 4), r"decode: got int32\[4\], wanted bool\[4\]"),
        (lambda s: mixed(s, ON, 0, ints(1), 4), r"seqs: got shape \[\], wanted \[R\]"),
        (lambda s: mixed(s, ON, np.zeros(1, np.float32), ints(1), 4), "seqs: got dtype float32, wanted integers"),
        (lambda s: mixed(s, ON, ints(0), ints(1, 1), 4), r"num_tokens: got shape \[2\], wanted \[1\]"),
        (lambda s: mixed(s, ON, ints(0), ints(1), 0), "size: got 0, wanted an int of at least 1"),
        (lambda s: mixed(s, ON, ints(0), ints(1), jnp.int32(4)), "size: got .*wanted an int of at least 1"),
    ],
)
def test_views_refuse(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(hand_made_state())


def test_a_view_is_a_pytree():
    assert isinstance(jax.tree.map(lambda x: x, view(hand_made_state(), 1)), View)
