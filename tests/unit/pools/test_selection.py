# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen blocks: equal to dense attention over the chosen tokens, with NaN in all other blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import pallas_kernels
from kvjax import LayerSpec, make_spec
from kvjax.pools import attend, init_pools, mixed, ragged, select_blocks, view, write
from pallas_kernels.quantise import quantise
from tests.kernels.attention import how
from tests.mesh import mesh_of
from tests.poison import poisoned

SIZE, HEADS, WINDOW, SINKS = 4, 4, 11, 5
LENGTHS = np.array([37, 18, 50])
KINDS = {
    "kv": LayerSpec(2, 16),
    "latents": LayerSpec.latent(24, 16),
    "window": LayerSpec(2, 16, window=WINDOW),
    "sinks": LayerSpec(2, 16, window=WINDOW, sink_tokens=SINKS),
}
FORMS = {  # the view of the last tokens, the number of each row's, and the cache's row of each row of the view
    "decode": (lambda state: view(state, 1), [1, 1, 1], [0, 1, 2]),
    "padded": (lambda state: view(state, [1, 3, 7], 7), [1, 3, 7], [0, 1, 2]),
    "ragged": (lambda state: ragged(state, [2, 1, 6], 11), [2, 1, 6], [0, 1, 2]),
    "mixed": (lambda state: mixed(state, [True, True, False], [2, -1], [7, 0], 9), [1, 1, 7], [0, 1, 2, 2, -1]),
}


def spec_of(kind, dtype="float32"):
    num_blocks = {None: 40, **({WINDOW: 20} if KINDS[kind].window else {})}
    return make_spec([KINDS[kind]], num_blocks=num_blocks, max_seqs=3, max_length=64, block_size=SIZE, dtype=dtype)


@functools.cache
def states(kind, form):
    """The views of three rows that grow in chunks, and the state before the last tokens are written."""
    counts = np.array(FORMS[form][1])
    extend = jax.jit(functools.partial(kvjax.extend, max_tokens=6))
    commit = jax.jit(kvjax.commit)
    state = kvjax.init(spec_of(kind))
    for row in range(3):
        state, _ = kvjax.admit(state, row, np.array([100 + row]), 1)
    look = jax.jit(functools.partial(view, max_tokens=6))
    chunks, done, texts = [], np.zeros(3, np.int32), np.random.default_rng(1).integers(0, 99, (3, 64))
    while np.any(done < LENGTHS - counts):
        now = np.minimum(6, LENGTHS - counts - done)
        state, events = extend(state, now > 0, np.maximum(now - (done == 0), 0))
        assert events.ok
        chunks.append(look(state, now))
        tokens = np.array([texts[row, done[row] :][:6] for row in range(3)], np.int32)
        state, _ = commit(state, tokens, now)
        done = done + now
    for part in (np.minimum(counts, 6), counts - np.minimum(counts, 6)):
        state, events = extend(state, np.ones(3, bool), part)
        assert events.ok
    return chunks, state


def kv_of(kind):
    """K and V f32[parts, 3, 50, K, D] of all tokens."""
    layer = KINDS[kind]
    shape = (1 if layer.values else 2, 3, max(LENGTHS), layer.kv_heads, layer.head_dim)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def on_view(kv, now, seqs):
    """The K and V, or K and None, of a view's tokens, shaped like its positions."""
    starts = np.arange(len(seqs)) * now.positions.shape[1] if now.starts is None else np.asarray(now.starts)
    lines = np.zeros((kv.shape[0], now.positions.size, *kv.shape[3:]), np.float32)
    for row, (seq, start, count) in enumerate(zip(seqs, starts, np.asarray(now.num_tokens), strict=True)):
        first = int(now.lengths[row]) - count
        lines[:, start : start + count] = kv[:, seq, first : first + count]
    lines = lines.reshape(kv.shape[0], *now.positions.shape, *kv.shape[3:])
    return lines[0], (lines[1] if len(lines) > 1 else None)


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


def written(kind, form, dtype="float32", **mesh):
    """Pools with the K/V of all tokens but those of the last view, and NaN elsewhere."""
    spec, kv = spec_of(kind, dtype), kv_of(kind)
    pools = poisoned(init_pools(spec, **mesh))
    put = jax.jit(lambda pools, k, v, now: write(pools, 0, k, v, now))
    for now in states(kind, form)[0]:
        pools = put(pools, *on_view(kv, now, range(3)), now.replace(spec=None))
    return pools


def without(pools, group, rows):
    """Pools with NaN in the pool rows bool[N + 1] of a group, and -128 with scales of NaN in a quantised pool."""
    blank = poisoned(pools)
    mix = lambda old, new: jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new, old)  # noqa: E731
    arrays = list(pools.arrays)
    arrays[group] = jax.tree.map(mix, pools.arrays[group], blank.arrays[group])
    pools = pools.replace(arrays=tuple(arrays))
    return pools if pools.scales is None else pools.replace(scales=jax.tree.map(mix, pools.scales, blank.scales))


def stored(kv, dtype):
    if dtype != "int8":
        return kv
    words, scales = quantise(jnp.asarray(kv), jnp.int8)
    return np.asarray(words, np.float32) * np.asarray(scales).reshape(*kv.shape[:-1], 1)


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


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.long)])
@pytest.mark.parametrize("form", ["decode", "mixed"])
def test_a_window_and_the_first_tokens_are_seen_to_the_token(form, implementation, request):
    """Sinks and window are exact, while the blocks between them belong to other rows by now."""
    if implementation == "triton":
        request.getfixturevalue("interpreted")
    for kind in ("window", "sinks"):
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
    ],
)
def test_refusals_name_the_argument(change, message):
    given = {"view": view(kvjax.init(spec_of("kv")), 1), "columns": np.ones((3, 16), bool), **change}
    with pytest.raises(ValueError, match=f"^{message}"):
        select_blocks(**given)
