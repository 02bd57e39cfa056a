# SPDX-License-Identifier: Apache-2.0
"""Mixed views: decode tokens and chunks on one line equal those in views of their own, and so does attention."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import pallas_kernels
from kvjax import LayerSpec
from kvjax.model import forward
from kvjax.pools import mixed, ragged, view
from tests.kernels.attention import how
from tests.poison import poisoned
from tests.unit.pools.hand_made import hand_made_state


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
    ("arguments", "message"),
    [
        ((ON[:3], ints(0), ints(1), 4), r"decode: got bool\[3\], wanted bool\[4\]"),
        ((ints(1, 1, 1, 1), ints(0), ints(1), 4), r"decode: got int32\[4\], wanted bool\[4\]"),
        ((ON, 0, ints(1), 4), r"seqs: got shape \[\], wanted \[R\]"),
        ((ON, np.zeros(1, np.float32), ints(1), 4), "seqs: got dtype float32, wanted integers"),
        ((ON, ints(0), ints(1, 1), 4), r"num_tokens: got shape \[2\], wanted \[1\]"),
        ((ON, ints(0), ints(1), 0), "size: got 0, wanted an int of at least 1"),
        ((ON, ints(0), ints(1), jnp.int32(4)), "size: got .*wanted an int of at least 1"),
    ],
)
def test_a_mixed_view_refuses(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mixed(hand_made_state(), *arguments)


# Attention. Row 3 is free; rows 0 and 1 decode, rows 4 and 2 have chunks.

ROWS, WIDTH = 5, 12
LENGTHS, COMMITTED = ints(9, 17, 20, 0, 24), ints(8, 16, 13, 0, 20)
ALL = {"window": 7, "soft_cap": 2.0, "sinks": jnp.linspace(-1.0, 1.0, 4), "scale": 0.3}


def cache_of(dtype):
    """A poisoned cache with hand-made rows, in shuffled blocks."""
    spec = kvjax.make_spec(
        [LayerSpec(2, 16)] * 2, num_blocks=30, max_seqs=ROWS, max_length=24, block_size=4, dtype=dtype
    )
    state, blocks = kvjax.init(spec), np.random.default_rng(0).permutation(30).reshape(ROWS, 6)
    table = np.where(np.arange(6)[None] * 4 < LENGTHS[:, None], blocks, -1).astype(np.int32)
    seqs = state.seqs.replace(length=jnp.asarray(LENGTHS), committed=jnp.zeros(ROWS, jnp.int32))
    state = state.replace(groups=(state.groups[0].replace(table=jnp.asarray(table)),), seqs=seqs)
    return kvjax.Cache(state, poisoned(kvjax.init_pools(spec)))


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def one_line_and_apart(cache, q, kv, **options):
    """(pools, attention) of one step on a mixed line; on the same line in ragged form; and in two calls."""
    before = numbers(1, 2, ROWS, 20, 2, 16)
    pools = kvjax.write(cache.pools, 1, *before, cache.view(COMMITTED, 20))
    state = cache.state.replace(seqs=cache.state.seqs.replace(committed=jnp.asarray(COMMITTED)))
    on, seqs, counts = LENGTHS - COMMITTED == 1, ints(4, -1, 2), ints(4, 9, 7)
    line = mixed(state, on, seqs, counts, WIDTH)
    written = kvjax.write(pools, 1, *kv, line)
    attend = functools.partial(kvjax.attend, layer=1, **options)
    together, as_ragged = (attend(q, pools=written, view=form) for form in (line, line.replace(decodes=0)))

    first, rest = view(state, on.astype(np.int32), 1), ragged(state, counts, WIDTH, seqs)
    pools = kvjax.write(pools, 1, *kv[:, 0, :ROWS, None], first)
    pools = kvjax.write(pools, 1, *kv[:, :, ROWS:], rest)
    parts = attend(q[0, :ROWS, None], pools=pools, view=first), attend(q[:, ROWS:], pools=pools, view=rest)
    apart = jax.tree.map(lambda a, b: jnp.concatenate([a[:, 0], b[0]])[None], *parts)
    return (written, together), as_ragged, (pools, apart)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "options", "implementation"),
    [
        ("float32", {}, "xla"),
        pytest.param("int8", {**ALL, "return_lse": True}, "xla", marks=pytest.mark.long),
        pytest.param("float32", {**ALL, "return_lse": True}, "xla", marks=pytest.mark.long),
        pytest.param("float8_e4m3fn", ALL, "xla", marks=pytest.mark.long),
        pytest.param("float32", {"return_lse": True}, "triton", marks=pytest.mark.long),
        pytest.param("int8", ALL, "triton", marks=pytest.mark.long),
    ],
)
def test_attention_on_a_mixed_line_is_that_of_two_calls(dtype, options, implementation, monkeypatch):
    call = functools.partial(pallas_kernels.call, **how(implementation))
    monkeypatch.setattr(pallas_kernels, "call", lambda *args, implementation, **options: call(*args, **options))
    q, kv = numbers(2, 1, ROWS + WIDTH, 4, 16), numbers(3, 2, 1, ROWS + WIDTH, 2, 16)
    run = jax.jit(functools.partial(one_line_and_apart, **options))
    (written, together), as_ragged, (pools, apart) = run(cache_of(dtype), q, kv)
    for got, wanted in zip(*map(jax.tree.leaves, (written, pools)), strict=True):  # except the row of the padding
        np.testing.assert_array_equal(np.asarray(got[:-1], np.float32), np.asarray(wanted[:-1], np.float32))
    real = np.array([1, 1, 0, 0, 0] + [1] * 11 + [0]) > 0
    for got in (together, as_ragged):
        for x, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(apart), strict=True):
            np.testing.assert_allclose(x[0, real], wanted[0, real], rtol=2e-5, atol=2e-5)
    out = np.asarray(jax.tree.leaves(together)[0])
    assert np.all(out[0, real] != 0) and not np.any(out[0, ~real])


def attend_once(cache, q, implementation=None, decodes=ROWS):
    line = cache.mixed(np.ones(ROWS, bool), ints(-1), ints(0), 4).replace(decodes=decodes)
    return kvjax.attend(q, cache.pools, 0, line, implementation=implementation)


def test_each_part_has_the_kernel_that_suits_it(monkeypatch):
    called, call = [], pallas_kernels.call

    def record(name, q, *args, **options):
        called.append((name, len(q)))
        return call(name, q, *args, **options)

    monkeypatch.setattr(pallas_kernels, "call", record)
    for decodes in (ROWS, 0):
        run = functools.partial(attend_once, decodes=decodes)
        jax.eval_shape(run, cache_of("int8"), numbers(2, 1, ROWS + 4, 4, 16))
    assert called == [("decode_attention", ROWS), ("prefill_attention", 4), ("prefill_attention", ROWS + 4)]


def test_what_cannot_be_served_is_refused():
    cache, q = cache_of("int8"), numbers(2, 1, ROWS + 4, 4, 16)
    with pytest.raises(NotImplementedError):
        jax.eval_shape(functools.partial(attend_once, implementation="mosaic"), cache, q)
    with pytest.raises(ValueError, match=r"^q: got shape .*wanted \[1, 9, a multiple of 2, 16\]"):
        jax.eval_shape(attend_once, cache, q[:, :4])


def test_a_model_gives_logits_of_as_many_positions_as_are_requested():
    cache, tokens = cache_of("float32"), np.zeros((1, ROWS + 4), np.int32)
    line = cache.mixed(np.ones(ROWS, bool), ints(-1), ints(0), 4)
    shapes = {"line": (7, 32), "rows": (1, 32), "all": (1, ROWS + 4, 32)}

    def compute(what, last):
        def model(tokens, pools, view, *, last):
            return jnp.zeros(shapes[what]), pools

        return forward(model, tokens, cache.pools, line, last)[0].shape

    last = np.zeros(7, np.int32)
    assert compute("line", last) == (7, 32) and compute("all", None) == (1, ROWS + 4, 32)
    for what, got in (("rows", r"\[1, 32\]"), ("all", r"\[1, 9, 32\]")):
        with pytest.raises(
            ValueError, match=rf"^model: got logits float32{got} for last=i32\[7\], wanted .*f32\[7, V\]"
        ):
            compute(what, last)
