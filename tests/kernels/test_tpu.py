# SPDX-License-Identifier: Apache-2.0
"""Attention over pools by token: by XLA bit for bit as by head, and by jax's kernel for TPUs in interpret mode."""

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import pallas_kernels
from kvjax.pools.views import mixed
from pallas_kernels import derivative, mosaic, tpu, triton, xla
from pallas_kernels.by_token import blocks_by_head, blocks_by_token, token_rows
from tests.drive import output_of
from tests.kernels import interpret_tpu
from tests.kernels.attention import Case, options_for
from tests.kernels.chosen import check_chosen
from tests.poison import poisoned

LENGTHS, COUNTS = [1, 0, 37, 16, 70], [1, 0, 20, 1, 7]
SHAPES = [(2, 2, 16, 4), (3, 1, 64, 8), (2, 2, 128, 4), (1, 4, 160, 8)]  # kv heads, group, width, block size


def prefill_args(case, counts):
    counts = np.asarray(counts)
    starts = np.cumsum(counts) - counts
    arrays = (jnp.asarray(x, jnp.int32) for x in (case.lengths, starts, counts))
    return (case.queries(int(counts.sum()) + 3), case.pool, case.layer, jnp.asarray(case.tables), *arrays)


def decode_args(case):
    lengths = jnp.asarray(case.lengths, jnp.int32)
    return case.queries(len(case.lengths)), case.pool, case.layer, jnp.asarray(case.tables), lengths


@pytest.mark.parametrize(
    ("rows", "kv_heads", "width"),
    [((4, 128), 2, 128), ((2, 128), 2, 64), ((1, 128), 2, 32), ((3, 128), 3, 64), ((1, 64), 2, 16), ((2, 160), 1, 160)],
)
def test_narrow_heads_share_rows(rows, kv_heads, width):
    assert token_rows(kv_heads, width) == rows
    blocks = np.arange(3 * 2 * 2 * kv_heads * 4 * width).reshape(3, 2, 2, kv_heads, 4, width)
    by_token = np.asarray(blocks_by_token(jnp.asarray(blocks), rows))
    assert by_token.shape == (3, 2, 4, *rows)
    # A token's row, head by head: K, then V.
    np.testing.assert_array_equal(by_token[1, 0, 2].reshape(kv_heads, 2, width), blocks[1, 0, :, :, 2].swapaxes(0, 1))
    np.testing.assert_array_equal(blocks_by_head(jnp.asarray(by_token), width), blocks)


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_that_share_rows_are_cut_out_of_them_on_a_tpu(shape):
    kv_heads, group, width, block_size = shape
    case = Case(LENGTHS, kv_heads=kv_heads, group=group, width=width, block_size=block_size, layout="tokens")
    args = decode_args(case)
    wanted = jax.jit(functools.partial(xla.decode_attention, scale=0.3))(*args)
    with pallas_kernels.lowering_for("tpu"):  # the program for a TPU runs here
        got = jax.jit(functools.partial(xla.decode_attention, scale=0.3))(*args)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.long), "all"])
@pytest.mark.parametrize("shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.long) for shape in SHAPES[1:])])
def test_xla_gives_the_same_bits_by_token_as_by_head(shape, name):
    kv_heads, group, width, block_size = shape
    results = []
    for layout in ("heads", "tokens"):
        case = Case(LENGTHS, kv_heads=kv_heads, group=group, width=width, block_size=block_size, layout=layout)
        options = options_for(case, name)
        scale = options.pop("scale", 0.3)
        run = functools.partial(xla.decode_attention, scale=scale, **options)
        chunks = functools.partial(xla.prefill_attention, scale=scale, max_count=max(COUNTS), **options)
        plain = functools.partial(derivative.prefill_attention, scale=scale, max_count=max(COUNTS), **options)
        args = prefill_args(case, COUNTS)
        results.append([jax.jit(run)(*decode_args(case)), jax.jit(chunks)(*args), jax.jit(plain)(*args)])
        if layout == "tokens":
            k, v = (case.queries(5)[:, :kv_heads] for _ in range(2))
            slots = jnp.array([3, 9, case.pool.shape[0] * block_size - 1, 5, 16], jnp.int32)
            written = jax.jit(xla.append_kv)(case.pool, 1, k, v, slots)
            by_head = jax.jit(xla.append_kv)(blocks_by_head(case.pool, width), 1, k, v, slots)
            np.testing.assert_array_equal(blocks_by_head(written, width), by_head)
            np.testing.assert_array_equal(jax.jit(tpu.append_kv)(case.pool, 1, k, v, slots), written)
    for by_head, by_token in zip(*results, strict=True):
        np.testing.assert_array_equal(by_head, by_token)


@pytest.mark.parametrize("module", [xla, tpu, triton, derivative])
def test_the_first_tokens_of_a_block_are_copied_by_token_as_by_head(module):
    by_head = jnp.asarray(np.random.default_rng(0).standard_normal((9, 2, 2, 3, 4, 64)), jnp.float32)
    by_token = blocks_by_token(by_head, token_rows(3, 64))
    moves = (jnp.array([1, 2, 3], jnp.int32), jnp.array([4, 5, 6], jnp.int32), jnp.int32(2))
    tokens = jnp.array([3, 1, 4], jnp.int32)
    interpret = {"interpret": True} if module is triton else {}
    copied = module.copy_blocks(by_token, *moves, tokens, by_token=True, **interpret)
    wanted = np.array(by_head)
    wanted[4, :, :, :, :3] = wanted[1, :, :, :, :3]
    wanted[5, :, :, :, :1] = wanted[2, :, :, :, :1]
    np.testing.assert_array_equal(blocks_by_head(copied, 64), wanted)
    np.testing.assert_array_equal(module.copy_blocks(by_head, *moves, tokens, **interpret), wanted)


@pytest.mark.parametrize(
    ("dtype", "platform", "is_exact"), [("float32", True, True), ("bfloat16", True, False), ("float32", False, False)]
)
def test_float32_is_multiplied_exactly_on_a_tpu_alone(dtype, platform, is_exact):
    """XLA for TPUs would otherwise round all of the pool to bfloat16 before it reads a few blocks."""
    args = decode_args(Case([5, 40], kv_heads=2, group=8, width=64, block_size=16, layout="tokens", dtype=dtype))
    with pallas_kernels.lowering_for("tpu") if platform else contextlib.nullcontext():
        text = jax.jit(functools.partial(xla.decode_attention, scale=1.0)).lower(*args).as_text()
    assert ("precision = [HIGHEST, HIGHEST]" in text) == is_exact


def kernel_case(lengths, dtype="float32", **options):
    options = {"kv_heads": 2, "group": 2, "width": 128, "block_size": 16, "layout": "tokens", **options}
    return Case(lengths, dtype=dtype, **options)


TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}


def check(function, oracle, args, dtype, **options):
    """Compares jax's kernel, which sees NaN in every unused slot, with XLA."""
    with interpret_tpu.installed():
        got = np.asarray(jax.jit(functools.partial(function, **options))(*args), np.float32)
    wanted = np.asarray(jax.jit(functools.partial(oracle, **options))(*args), np.float32)
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


OPTIONS = {"plain": {}, "window": {"window": 5}, "soft_cap": {"soft_cap": 1.5}, "both": {"window": 20, "soft_cap": 3.0}}
# Rows without tokens first, in the middle, last, and alone.
ROWS = {"middle": [5, 0, 37, 16], "first": [0, 0, 20], "last": [20, 3, 0, 0], "all": [0, 0], "none": [17, 33]}
QUICK = [("float32", "middle", "both"), ("bfloat16", "middle", "plain")]
ALL = [
    (dtype, rows, name)
    for dtype in TOLERANCE
    for rows, name in [
        *((rows, "both") for rows in ROWS),
        *(("middle", name) for name in ("plain", "window", "soft_cap")),
    ]
]
GRID = [pytest.param(*case, marks=pytest.mark.long if case in QUICK else pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("dtype", "rows", "name"), GRID)
def test_the_kernel_decodes(dtype, rows, name):
    case = kernel_case(ROWS[rows], dtype)
    check(tpu.decode_attention, xla.decode_attention, decode_args(case), dtype, scale=0.1, **OPTIONS[name])


@pytest.mark.parametrize(("dtype", "rows", "name"), GRID)
def test_the_kernel_prefills(dtype, rows, name):
    case = kernel_case(ROWS[rows], dtype)
    counts = [min(length, count) for length, count in zip(ROWS[rows], (3, 5, 7, 1), strict=False)]
    options = {"scale": 0.1, "max_count": 7, **OPTIONS[name]}
    check(tpu.prefill_attention, xla.prefill_attention, prefill_args(case, counts), dtype, **options)


# Four rows, of which the third is free: tokens to attend to, and how many of them are queries.
TOKENS, QUERIES = [20, 5, 0, 9], [3, 1, 0, 7]
VIEWS = {
    "decode": lambda state: kvjax.view(state, [1, 1, 0, 1], 1),
    "padded": lambda state: kvjax.view(state, QUERIES, 8),
    "ragged": lambda state: kvjax.ragged(state, QUERIES, size=14),
    "mixed": lambda state: mixed(state, [False, True, False, False], [3, 0, -1], [7, 3, 0], 12),
}


@pytest.mark.parametrize(
    "form", ["mixed", *(pytest.param(form, marks=pytest.mark.slow) for form in VIEWS if form != "mixed")]
)
@pytest.mark.long
def test_the_kernel_serves_all_views(form, monkeypatch):
    """`attend` of each form of view, over pools with NaN in each slot without a token, by jax's kernel and by XLA."""
    layers = [kvjax.LayerSpec(2, 128)] * 2
    sizes = {"num_blocks": 12, "max_seqs": 4, "max_length": 32, "block_size": 8, "dtype": "float32"}
    cache = kvjax.Cache.create(kvjax.make_spec(layers, layout="tokens", **sizes))
    cache = cache.replace(pools=poisoned(cache.pools))
    state = cache.state
    for seq, length in enumerate(TOKENS):
        if length:
            state, _ = kvjax.admit(state, seq, np.arange(seq, seq + 32), length)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((4, 32, 2, 128)), jnp.float32) for _ in range(2))
    pools = kvjax.write(cache.pools, 1, k, v, kvjax.view(state, TOKENS, 32))
    written = np.array(TOKENS) - QUERIES
    state, _ = kvjax.commit(state, np.arange(32) + np.arange(4)[:, None], written)
    view = VIEWS[form](state)
    q = jnp.asarray(rng.standard_normal((*view.positions.shape, 4, 128)), jnp.float32)
    wanted = kvjax.attend(q, pools, 1, view, soft_cap=2.0, implementation="xla")
    monkeypatch.delitem(pallas_kernels.PLATFORMS, "tpu")  # the interpreter runs it here
    with interpret_tpu.installed():
        got = jax.jit(lambda q: kvjax.attend(q, pools, 1, view, soft_cap=2.0, implementation="tpu"))(q)
    np.testing.assert_allclose(got, wanted, rtol=5e-6, atol=5e-6)
    assert np.any(np.asarray(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[1, 1], [20, 3]])
def test_the_kernel_reads_chosen_blocks(counts):
    columns = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)
    with interpret_tpu.installed():
        check_chosen(kernel_case([70, 50]), tpu, counts, columns=columns)


@pytest.mark.parametrize(
    ("options", "case_options", "message"),
    [
        ({"sinks": np.zeros(4, np.float32)}, {}, "tpu: got sinks"),
        ({"return_lse": True}, {}, "tpu: got return_lse"),
        ({"sink_tokens": 4}, {}, "tpu: got sink_tokens"),
        ({}, {"layout": "heads"}, "tpu: got a pool with layout='heads'"),
        ({}, {"width": 64}, "tpu: got heads of width 64, wanted 128"),
        ({}, {"kv_heads": 3, "dtype": "bfloat16"}, "tpu: .*XLA fully tiled"),
        ({}, {"dtype": "float16"}, "tpu: got q in float16"),
    ],
)
def test_calls_beyond_the_kernel_are_refused_by_name(options, case_options, message):
    args = decode_args(kernel_case([5], **case_options))
    with pytest.raises(NotImplementedError, match=message):
        tpu.decode_attention(*args, scale=1.0, **options)


def test_a_jax_without_the_kernel_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(tpu, "_KERNEL", "jax.experimental.pallas.ops.tpu.gone")
    with pytest.raises(NotImplementedError, match=r"tpu: this jax lacks .*gone"):
        tpu.decode_attention(*decode_args(kernel_case([5])), scale=1.0)


def test_other_kernels_refuse_pools_by_token():
    case = kernel_case([5], dtype="bfloat16")
    k = jnp.zeros((1, 2, 128), jnp.bfloat16)
    for module in (triton, mosaic):
        with pytest.raises(NotImplementedError, match="got a pool with layout='tokens'"):
            module.decode_attention(*decode_args(case), scale=1.0, interpret=True)
    with pytest.raises(NotImplementedError, match="triton: got a pool with layout='tokens'"):
        triton.append_kv(case.pool, 0, k, k, jnp.zeros(1, jnp.int32))


# A process without kvjax: the program is read from a file, and its results are compared.
LOADED = """
import sys
import jax
import numpy as np
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
arrays = list(np.load(sys.argv[2]).values())
num_args = int(sys.argv[3])
for got, wanted in zip(exported.call(*arrays[:num_args]), arrays[num_args:], strict=True):
    np.testing.assert_array_equal(got, wanted)
assert not any(name.startswith(("kvjax", "pallas_kernels")) for name in sys.modules)
"""


@pytest.mark.long
def test_a_decode_block_exported_for_tpus_has_the_kernel_and_for_cpus_too_runs_there(tmp_path):
    """Four steps of extend, write, attend and commit. Pallas refuses to export a kernel for several platforms."""
    pytest.importorskip("flatbuffers", reason="jax writes exported programs with flatbuffers")
    num_seqs = 2
    table = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50, 2, 128)), jnp.float32)

    def block(table, state, pools, token):
        cache, _ = kvjax.Cache(state, pools).extend(np.ones(num_seqs, bool), 4)

        def step(i, carry):
            pools, token, text = carry
            view = cache.view(np.ones(num_seqs, np.int32), 1, written=i)
            q, k, v = table[:, token][:, :, None]
            pools = kvjax.write(pools, 0, k[:, :, :1], v[:, :, :1], view)
            out = kvjax.attend(q, pools, 0, view)
            scores = jnp.einsum("sqd,vqd->sv", out[:, 0], table[0])
            return pools, jnp.argmax(scores, axis=1).astype(jnp.int32), text.at[:, i].set(token)

        pools, token, text = jax.lax.fori_loop(0, 4, step, (cache.pools, token, jnp.zeros((num_seqs, 4), jnp.int32)))
        cache, _ = cache.replace(pools=pools).commit(text, np.full(num_seqs, 4, np.int32))
        return cache.state, cache.pools, text

    with pallas_kernels.lowering_for("tpu"):
        layers = [kvjax.LayerSpec(1, 128)]
        spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=num_seqs, max_length=32, block_size=8, dtype="float32")
    assert spec.groups[0].pools[0].by_token
    cache = kvjax.Cache.create(spec)
    for seq in range(num_seqs):
        cache, _ = cache.admit(seq, np.arange(seq, seq + 5), 5)
    cache, _ = cache.commit(np.arange(10).reshape(num_seqs, 5), np.full(num_seqs, 5))
    leaves, tree = jax.tree.flatten((table, cache.state, cache.pools, jnp.array([3, 7], jnp.int32)))

    def run(*leaves):
        return jax.tree.leaves(block(*tree.unflatten(leaves)))

    with pallas_kernels.lowering_for("tpu"), jax.sharding.use_abstract_mesh(interpret_tpu.CHIP):
        assert "tpu_custom_call" in jax.export.export(jax.jit(run), platforms=["tpu"])(*leaves).mlir_module()
    exported = jax.export.export(jax.jit(run), platforms=["tpu", "cpu"])(*leaves)
    assert exported.platforms == ("tpu", "cpu")
    (tmp_path / "block").write_bytes(exported.serialize())
    wanted = jax.jit(lambda *leaves: run(*leaves))(*leaves)
    file_of_wanted = tmp_path / "wanted.npz"
    np.savez(file_of_wanted, *map(np.asarray, (*leaves, *wanted)))
    output_of(sys.executable, "-c", LOADED, tmp_path / "block", file_of_wanted, str(len(leaves)))
