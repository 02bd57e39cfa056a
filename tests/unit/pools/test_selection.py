# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen blocks: equal to dense attention over the chosen tokens, with NaN in all other blocks."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
import pallas_kernels
from kvjax.pools import attend, select_blocks, view, write
from tests.kernels.attention import how
from tests.mesh import mesh_of
from tests.unit.pools.grown import (
    FORMS,
    HEADS,
    KINDS,
    LENGTHS,
    SINKS,
    SIZE,
    WINDOW,
    kv_of,
    on_view,
    spec_of,
    states,
    stored,
    without,
    written,
)


def expected(q, kv, position, is_read, kind):
    """Attention in float64 of a query [Q, D] over the tokens of a row that it sees and that are read."""
    seen = np.flatnonzero(is_read[: position + 1])
    keys, values = (np.repeat(part[seen].astype(np.float64), HEADS // kv.shape[2], axis=1) for part in (kv[0], kv[-1]))
    score = np.einsum("qd,tqd->qt", np.asarray(q, np.float64), keys) * q.shape[-1] ** -0.5
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    weight = weight / weight.sum(axis=1, keepdims=True)
    return np.einsum("qt,tqd->qd", weight, values)[:, : KINDS[kind].values]


def compare(out, q, kv, form, kind, is_read, now):
    """Checks the results of a view's tokens. `is_read` bool[3, 50, 50]; whether a position reads another one."""
    _, _, seqs = FORMS[form]
    starts = np.arange(len(seqs)) * now.positions.shape[1] if now.starts is None else np.asarray(now.starts)
    out, q = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (out, q))
    is_padding = np.ones(len(out), bool)
    for row, (seq, start, count) in enumerate(zip(seqs, starts, np.asarray(now.num_tokens), strict=True)):
        for token in range(count):
            position = int(now.lengths[row]) - count + token
            wanted = expected(q[start + token], kv[:, seq], position, is_read[seq, position], kind)
            np.testing.assert_allclose(out[start + token], wanted, atol=2e-6, rtol=2e-5)
            is_padding[start + token] = False
    assert not np.any(out[is_padding])


def check(kind, form, dtype, choices, implementation=None, **mesh):
    """Attention of a view whose rows read the blocks of each of the choices, bool[3, 16]."""
    group = 1 if KINDS[kind].window else 0
    make, counts, seqs = FORMS[form]
    kv = kv_of(kind)
    pools = written(kind, form, dtype, **mesh)
    now = make(states(kind, form)[1]).replace(spec=pools.spec)
    q = np.random.default_rng(2).standard_normal((*now.positions.shape, HEADS, kv.shape[-1])).astype(np.float32)
    lines = on_view(kv, now, seqs)
    block = np.arange(max(LENGTHS)) // SIZE
    table = np.asarray(now.tables[group])[:3]

    @jax.jit
    def run(pools, chosen, unread):
        pools = without(write(pools, 0, *lines, now), group, unread)
        return attend(q, pools, 0, select_blocks(now, chosen, group), implementation=implementation)

    for columns in choices:
        is_read = columns[:, block] | (block >= (LENGTHS - np.array(counts))[:, None] // SIZE)
        unread = np.zeros(spec_of(kind).groups[group].num_blocks + 1, bool)
        for row in range(3):
            unread[table[row, block[: LENGTHS[row]]][~is_read[row, : LENGTHS[row]]]] = True
        out = run(pools, columns[np.array(seqs)], unread)
        compare(out, q, stored(kv, dtype), form, kind, np.broadcast_to(is_read[:, None], (3, 50, 50)), now)


def some_columns(share, seed=3):
    return np.random.default_rng(seed).random((3, 16)) < share


@pytest.fixture
def interpreted(monkeypatch):
    call = functools.partial(pallas_kernels.call, **how("triton"))
    monkeypatch.setattr(pallas_kernels, "call", lambda *args, implementation, **options: call(*args, **options))


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [
        ("kv", "decode", "float32"),
        ("kv", "mixed", "float32"),
        pytest.param("kv", "padded", "float32", marks=pytest.mark.long),
        pytest.param("kv", "ragged", "int8", marks=pytest.mark.long),
        pytest.param("kv", "decode", "int8", marks=pytest.mark.long),
        pytest.param("latents", "mixed", "float32", marks=pytest.mark.long),
    ],
)
def test_attention_is_dense_over_the_chosen_blocks(kind, form, dtype):
    check(kind, form, dtype, [some_columns(share) for share in (0.0, 0.4, 1.0)])


@pytest.mark.parametrize("form", ["decode", pytest.param("mixed", marks=pytest.mark.long)])
def test_the_triton_kernels_read_chosen_blocks(form, interpreted):
    check("kv", form, "float32", [some_columns(0.4)], "triton")


@pytest.mark.parametrize("form", ["decode", pytest.param("mixed", marks=pytest.mark.long)])
def test_64_bit_types_stay_out_of_a_choice(form):
    now = FORMS[form][0](states("kv", form)[1])
    chosen = np.arange(16) % 2 == 0
    wanted = [(x.shape, x.dtype) for x in jax.tree.leaves(select_blocks(now, chosen))]
    with jax.enable_x64(True):
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(select_blocks(now, chosen))] == wanted
        check("kv", form, "float32", [some_columns(0.4)])


def test_one_program_serves_every_choice():
    """Whatever its number of blocks, and though it is made outside of the program."""
    now, pools = view(states("kv", "decode")[1], 1), written("kv", "decode")
    run = jax.jit(lambda q, pools, now: attend(q, pools, 0, now))
    q = np.ones((3, 1, HEADS, 16), np.float32)
    for columns in (np.zeros(16, bool), np.arange(16) < 3, some_columns(0.5), np.ones((3, 16), bool)):
        run(q, pools, select_blocks(now, columns))
    assert run._cache_size() == 1


def test_several_caches_choose_different_blocks():
    """Under vmap each cache has columns of its own."""
    chosen = np.stack([some_columns(0.4, seed) for seed in (3, 4)])
    state, kv = states("kv", "decode")[1], kv_of("kv")
    now, pools = view(state, 1), written("kv", "decode")
    pools = write(pools, 0, *on_view(kv, now, range(3)), now.replace(spec=None))
    q = np.random.default_rng(2).standard_normal((3, 1, HEADS, 16)).astype(np.float32)
    run = jax.jit(jax.vmap(lambda chosen: attend(q, pools, 0, select_blocks(now, chosen))))
    for out, columns in zip(run(chosen), chosen, strict=True):
        block = np.arange(max(LENGTHS)) // SIZE
        is_read = columns[:, block] | (block >= (LENGTHS[:, None] - 1) // SIZE)
        compare(out, q, kv, "decode", "kv", np.broadcast_to(is_read[:, None], (3, 50, 50)), now)


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"heads": "heads"}, {"heads": "heads", "context": "context"}])
def test_devices_that_divide_heads_or_blocks_read_chosen_blocks(axes):
    with mesh_of(2, 2, names=("heads", "context")) as mesh:
        check("kv", "mixed", "float32", [some_columns(0.4)], mesh=mesh, **axes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "form", "implementation"),
    [
        ("sinks", "mixed", "xla"),
        ("sinks", "mixed", "triton"),
        ("sinks", "decode", "xla"),
        ("sinks", "decode", "triton"),
        ("window", "mixed", "xla"),
    ],
)
def test_a_window_and_the_first_tokens_are_seen_to_the_token(kind, form, implementation, request):
    """Sinks and window are exact, while the blocks between them belong to other rows by now."""
    if implementation == "triton":
        request.getfixturevalue("interpreted")
    make, _, seqs = FORMS[form]
    now, kv = make(states(kind, form)[1]), kv_of(kind)
    pools = written(kind, form)
    pools = write(pools, 0, *on_view(kv, now, seqs), now.replace(spec=None))
    pools = without(pools, 1, np.arange(21) == 20)
    q = np.random.default_rng(2).standard_normal((*now.positions.shape, HEADS, 16)).astype(np.float32)
    position = np.arange(50)
    is_read = position[None] > position[:, None] - WINDOW
    if kind == "sinks":
        is_read |= position < SINKS
    whole = select_blocks(now, np.ones((len(seqs), 16), bool), 1)
    run = jax.jit(functools.partial(attend, layer=0, window=WINDOW, implementation=implementation))
    for seen in (now, whole):
        out = run(q, pools, view=seen)
        compare(out, q, kv, form, kind, np.broadcast_to(is_read, (3, 50, 50)), now)


def test_a_choice_of_a_choice_has_the_columns_of_the_view():
    """The second choice names the columns that the first has left."""
    now = view(states("kv", "decode")[1], 1)
    columns = np.zeros((3, 16), bool)
    columns[:, [0, 2, 3]] = True
    once = select_blocks(now, columns)
    twice = select_blocks(once, np.arange(16) == 1)
    wanted = select_blocks(now, np.arange(16) == 2)
    for got, of in ((twice.tables, wanted.tables), (twice.packed_lengths, wanted.packed_lengths)):
        np.testing.assert_array_equal(got[0], of[0])
    assert twice.is_packed(0) and not now.is_packed(0)


def test_a_free_row_stays_empty():
    state = kvjax.init(spec_of("kv"))
    chosen = select_blocks(view(state, 1), np.ones(16, bool))
    assert chosen.lengths_of(0).tolist() == [0, 0, 0] and set(np.ravel(chosen.tables[0])) == {40}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": np.ones((3, 15), bool)}, r"columns: got bool\[3, 15\], wanted bool\[3, 16\]"),
        ({"columns": np.ones((3, 16), np.int32)}, r"columns: got int32\[3, 16\], wanted bool\[3, 16\]"),
        ({"group": 1}, "group: got 1, wanted one of the 1 groups"),
        ({"group": -1}, "group: got -1, wanted an int of at least 0"),
        ({"view": None}, "view: got None, wanted a View of a cache"),
        ({"sparse": False}, r"view: got one of a cache with sparse=False, wanted make_spec\(..., sparse=True\)"),
    ],
)
def test_refusals_name_the_argument(change, message):
    spec = dataclasses.replace(spec_of("kv"), sparse=change.pop("sparse", True))
    given = {"view": view(kvjax.init(spec), 1), "columns": np.ones((3, 16), bool), **change}
    with pytest.raises(ValueError, match=f"^{message}"):
        select_blocks(**given)
