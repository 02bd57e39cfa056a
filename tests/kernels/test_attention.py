# SPDX-License-Identifier: Apache-2.0
"""Paged attention against a float64 oracle, over pools whose unreadable slots are NaN."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from kvjax.pools.attention import IMPLEMENTATIONS
from pallas_kernels import derivative, tuning, xla
from tests.kernels.attention import OPTIONS, Case, check_decode, check_prefill, how, options_for, prefill

# (kv heads, queries per kv head, head width, block size)
SHAPES = [
    (2, 1, 16, 4), (1, 2, 32, 8), (2, 4, 64, 16), (3, 1, 80, 4), (1, 8, 128, 128), (2, 2, 128, 8), (1, 4, 96, 32),
    (1, 2, 256, 64),
]  # fmt: skip
# By default no option, and all options at once. `long` adds windows, `slow` each option with all shapes.
SOME = list(zip(SHAPES, OPTIONS, strict=False))
QUICK = [(shape, name) for shape, name in SOME if name in ("plain", "all")]
GRID = [
    pytest.param(
        shape, name, id=f"{name}-{shape}",
        marks=() if (shape, name) in QUICK
        else pytest.mark.long if (shape, name) in SOME and name in ("window", "sink_tokens") else pytest.mark.slow,
    )
    for shape, name in itertools.product(SHAPES, OPTIONS)
]  # fmt: skip


# test_mosaic.py simulates Mosaic's kernels, test_tpu.py interprets the kernel for TPUs.
@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name not in ("mosaic", "tpu")])
def implementation(request):
    return request.param


@pytest.mark.parametrize(("shape", "name"), GRID)
def test_decode(shape, name, implementation):
    kv_heads, group, width, block_size = shape
    case = Case([1, 0, 37, 16, 70, 200], kv_heads=kv_heads, group=group, width=width, block_size=block_size)
    check_decode(case, implementation, **options_for(case, name))


@pytest.mark.parametrize(("shape", "name"), GRID)
def test_prefill_mixed_with_decode(shape, name, implementation):
    kv_heads, group, width, block_size = shape
    case = Case([9, 1, 0, 131, 70, 40], kv_heads=kv_heads, group=group, width=width, block_size=block_size)
    check_prefill(case, implementation, [9, 1, 0, 90, 1, 7], **options_for(case, name))


NARROW, BYTES = ([1, 0, 37, 130], [1, 0, 1, 30]), ([1, 0, 37, 200], [1, 0, 30, 90])
LATENTS = [1, 0, 37, 16, 90], [1, 0, 30, 1, 40]
WIDE, SMALL = {"width": 64}, {"width": 32, "block_size": 8}
INT8, FP8 = {"stored": "int8"}, {"stored": "float8_e4m3fn"}


def latents(heads, width, values, block_size):
    return {"kv_heads": 1, "group": heads, "width": width, "values": values, "block_size": block_size}


POOLS = [  # the rows' lengths, their last tokens, the pool, options of attention, options of the test
    ("", LATENTS, latents(2, 24, 16, 4), "plain", {}),
    *((mark, NARROW, {"dtype": dtype, **WIDE}, "plain", {})
      for mark, dtype in (("long", "bfloat16"), ("slow", "float16"))),
    *((mark, BYTES, {**SMALL, "dtype": "bfloat16", **INT8}, name, {})
      for mark, name in (("slow", "plain"), ("slow", "window"), ("long", "all"))),
    *((mark, BYTES, {**SMALL, "dtype": "float16", **FP8}, name, {})
      for mark, name in (("slow", "plain"), ("slow", "window"), ("slow", "all"))),
    # A softmax in float32 makes the result as exact as the K/V allow.
    ("slow", NARROW, {"dtype": "bfloat16", **WIDE}, "plain", {"queries": "float32"}),
    *(("slow", ([37, 70], [1, 70]), {"scaled": False, **stored}, "plain", {"scale": 0.005}) for stored in (INT8, FP8)),
    ("slow", ([1, 4], [1, 4]), {"kv_heads": 1, "group": 1}, "plain", {}),
    ("slow", ([80, 3, 70], [70, 0, 65]), {"group": 1}, "plain", {"gaps": 5, "max_count": 128}),
    # Latents, of which the kernels cut each in another way.
    ("long", LATENTS, {**latents(16, 576, 512, 16), "dtype": "bfloat16"}, "plain", {}),
    ("slow", LATENTS, latents(20, 40, 24, 8), "all", {}), ("slow", LATENTS, latents(3, 48, 48, 4), "window", {}),
    ("slow", LATENTS, {**latents(16, 80, 64, 16), "dtype": "bfloat16", **INT8}, "all", {}),
    ("slow", LATENTS, {**latents(4, 576, 512, 8), "dtype": "bfloat16", **INT8}, "sinks", {}),
    ("slow", LATENTS, latents(12, 120, 100, 8), "soft_cap", {}),
    ("slow", LATENTS, {**latents(40, 96, 64, 32), "dtype": "bfloat16", **FP8}, "scale", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "shape", "name", "more"),
    [pytest.param(*case, marks=getattr(pytest.mark, mark) if mark else ()) for mark, *case in POOLS],
)
def test_pools_of_all_kinds(rows, shape, name, more, implementation):
    (lengths, counts), more = rows, dict(more)
    case = Case(lengths, **shape)
    case.dtype = more.pop("queries", case.dtype)
    options = {**options_for(case, name), **({"scale": more.pop("scale")} if "scale" in more else {})}
    check_decode(case, implementation, **options)
    check_prefill(case, implementation, counts, **options, **more)


def test_latents_that_would_spill_are_refused():
    with pytest.raises(NotImplementedError, match="576 wide"):
        check_decode(Case(LATENTS[0], **latents(16, 576, 512, 16)), "triton")


@pytest.mark.long
@pytest.mark.parametrize("module", [xla, derivative], ids=["xla", "derivative"])
@pytest.mark.parametrize(
    ("parts", "stored"),
    [(4, "int8"), pytest.param(2, None, marks=pytest.mark.slow), pytest.param(8, None, marks=pytest.mark.slow)],
)
def test_parts_of_blocks_merge_to_the_whole(parts, stored, module):
    """Part s of a row has its tokens s, s + parts, ... in order, and NaN elsewhere; some parts have none."""
    counts = np.array([9, 1, 0, 90, 1, 3], np.int32)
    case = Case([9, 1, 0, 131, 70, 3], block_size=8, stored=stored)
    q, starts = case.queries(int(counts.sum()) + 4), np.cumsum(counts) - counts
    rows = jnp.asarray(case.tables), jnp.asarray(case.lengths, jnp.int32), jnp.asarray(starts, jnp.int32)
    mixed, total = np.zeros(q.shape), np.zeros(q.shape[:2])
    for offset in range(parts):
        part = functools.partial(
            module.prefill_attention, max_count=90, scale=0.25, soft_cap=3.0, return_lse=True, stride=parts,
            scales=None if case.scales is None else case.scales[..., offset::parts], offset=jnp.int32(offset),
        )  # fmt: skip
        out, lse = jax.jit(part)(q, case.pool[..., offset::parts, :], case.layer, *rows, jnp.asarray(counts))
        weight = np.exp(np.asarray(lse, np.float64))
        mixed, total = mixed + weight[..., None] * np.asarray(out, np.float64), total + weight
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own = slice(start, start + count)
        if count:
            wanted, lse = case.expect(q[own], row, count, scale=0.25, soft_cap=3.0)
            case.close(mixed[own] / total[own, :, None], wanted)
            case.close(np.log(total[own]), lse)
    np.testing.assert_array_equal(mixed[counts.sum() :], 0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "window"])
def test_chunks_of_any_size_from_any_offset(name, implementation):
    """Random rows and chunks through one compiled program, tables longer than any of them."""
    rng = np.random.default_rng(3)
    for seed in range(15):
        lengths = np.where(rng.random(4) < 0.2, 0, rng.integers(1, 150, 4))
        counts = np.minimum(rng.integers(0, 100, 4) // rng.choice([1, 100], 4), lengths)
        starts = np.cumsum(counts) - counts
        case = Case([*lengths, 160], kv_heads=1, group=2, width=16, block_size=8, seed=seed)
        q = case.queries(420)
        options = {"scale": 0.25, **OPTIONS[name]}
        out, _ = prefill(
            q, case.pool, case.layer, jnp.asarray(case.tables), jnp.asarray([*lengths, 0], jnp.int32),
            jnp.asarray([*starts, counts.sum()], jnp.int32), jnp.asarray([*counts, 0], jnp.int32), implementation,
            100, **options,
        )  # fmt: skip
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count:
                case.close(out[start : start + count], case.expect(q[start : start + count], row, count, **options)[0])
        np.testing.assert_array_equal(out[counts.sum() :], 0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["triton", "xla"])
@pytest.mark.parametrize("window", [None, pytest.param(90, marks=pytest.mark.slow)])
def test_with_a_fixed_split_the_other_rows_change_no_bit_of_a_row(kernel, window, monkeypatch):
    monkeypatch.setattr(tuning, "resident_programs", lambda _: 16)
    monkeypatch.setattr(tuning, "FIXED_SPLIT", 40)
    case = Case([200, 0, 900, 30])
    q, lengths = case.queries(4), np.array(case.lengths, np.int32)
    check_decode(case, kernel, fixed_split=True, window=window)

    def first_row(others, fixed):
        run = functools.partial(
            pallas_kernels.call, "decode_attention", scale=0.25, window=window, fixed_split=fixed, **how(kernel)
        )
        of = np.where(others, lengths, [*lengths[:1], 0, 0, 0]).astype(np.int32)
        return np.asarray(jax.jit(run)(q, case.pool, case.layer, jnp.asarray(case.tables), jnp.asarray(of)))[0]

    np.testing.assert_array_equal(first_row(True, True), first_row(False, True))
    differs = np.any(first_row(True, False) != first_row(False, False))
    assert differs == (kernel == "triton")


@pytest.mark.long
def test_attention_under_vmap(implementation):
    """Several caches at once, whose lengths differ."""
    cases = [Case([30, length], seed=seed) for seed, length in enumerate((3, 90))]
    size = max(case.tables.shape[1] for case in cases)
    tables = np.stack([np.pad(case.tables, ((0, 0), (0, size - case.tables.shape[1]))) for case in cases])
    blocks = max(case.pool.shape[0] for case in cases)
    pools = np.full((2, blocks, *cases[0].pool.shape[1:]), np.nan, np.float32)
    for i, case in enumerate(cases):
        pools[i, : case.pool.shape[0]] = case.pool
    q = jnp.stack([case.queries(2) for case in cases])
    lengths = jnp.asarray([case.lengths for case in cases], jnp.int32)
    run = functools.partial(pallas_kernels.call, "decode_attention", scale=0.25, **how(implementation))
    out = jax.jit(jax.vmap(run, in_axes=(0, 0, None, 0, 0)))(q, jnp.asarray(pools), 1, jnp.asarray(tables), lengths)
    for case, queries, got in zip(cases, q, out, strict=True):
        for row in range(2):
            case.close(got[row], case.expect(queries[row][None], row, 1, scale=0.25)[0][0])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize(("dtype", "stored"), [
    ("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn"),
])  # fmt: skip
@pytest.mark.parametrize("kernel", [name for name, platform in pallas_kernels.PLATFORMS.items() if platform == "cuda"])
def test_on_a_gpu(shape, name, dtype, stored, kernel):
    """The kernels themselves. The tests above run on a GPU too, with `-m "not slow"` and JAX_PLATFORMS=cuda,cpu."""
    kv_heads, group, width, block_size = shape
    options = {"kv_heads": kv_heads, "group": group, "width": width, "block_size": block_size}
    options |= {"dtype": dtype, "stored": stored}
    decoded, prefilled = Case([1, 0, 37, 4000, 700], **options), Case([9, 1, 0, 131, 4000], **options)
    try:
        check_decode(decoded, kernel, **options_for(decoded, name))
        check_prefill(prefilled, kernel, [9, 1, 0, 90, 300], **options_for(prefilled, name))
    except NotImplementedError as refusal:
        if kernel == "triton":  # which serves all of these
            raise
        pytest.skip(str(refusal))
