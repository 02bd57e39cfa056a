# SPDX-License-Identifier: Apache-2.0
"""Cases of attention, and their right results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.by_token import blocks_by_token, token_rows

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def how(implementation):
    """Options to run an implementation on this machine. Without a GPU kernels run as plain JAX."""
    interpreted = pallas_kernels.PLATFORMS.get(implementation) == "cuda" and jax.default_backend() != "gpu"
    return {"implementation": implementation, **({"interpret": True} if interpreted else {})}


def oracle(q, keys, values, first, *, scale, window=None, sink_tokens=0, soft_cap=None, sinks=None):
    """Attention in float64 of queries [C, Q, D] at positions first.. over keys and values [T, K, D]."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    chunk, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    keys, values = (np.repeat(x, heads // kv_heads, axis=1) for x in (keys, values))
    score = np.einsum("cqd,tqd->cqt", q, keys) * scale
    if soft_cap is not None:
        score = soft_cap * np.tanh(score / soft_cap)
    distance = (first + np.arange(chunk))[:, None] - np.arange(length)[None]
    seen = (distance >= 0) & ((distance < (window or length + 1)) | (np.arange(length) < sink_tokens))
    score = np.where(seen[:, None], score, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None], (chunk, heads, 1))
        score = np.concatenate([score, sink], axis=-1)
    top = score.max(axis=-1, keepdims=True)
    weight = np.exp(score - top)
    total = weight.sum(axis=-1, keepdims=True)
    mixed = np.einsum("cqt,tqd->cqd", (weight / total)[..., :length], values)
    return mixed, (top + np.log(total))[..., 0]


class Case:
    """Rows of random K/V in random blocks of a pool. The pool is NaN everywhere else.

    A pool `stored` as int8, which has no NaN, or as float8_e4m3fn has scales, unless `scaled` is False. They are NaN
    everywhere else. With `values` it has latents. By default it is by head.
    """

    def __init__(
        self, lengths, *, kv_heads=2, group=2, width=16, block_size=4, dtype="float32", layers=2, seed=0, stored=None,
        scaled=True, values=None, layout="heads",
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.block_size = block_size
        self.lengths, self.group, self.layer, self.dtype = np.asarray(lengths), group, layers - 1, dtype
        max_blocks = -(-max(1, *lengths) // block_size) + 1
        num_blocks = len(lengths) * max_blocks + 3
        parts = 2 if values is None else 1
        shape = (num_blocks + 1, layers, parts, kv_heads, block_size, width)
        pool = np.full(shape, -128.0 if stored == "int8" else np.nan, np.float32)
        scales = np.full(shape[:5], np.nan, np.float32)
        # Beyond its row's length a table has another row's block, or the scratch row.
        self.tables = rng.integers(0, num_blocks + 1, (len(lengths), max_blocks)).astype(np.int32)
        order = rng.permutation(num_blocks)
        self.kv = []
        for row, length in enumerate(lengths):
            used = -(-length // block_size)
            self.tables[row, :used], order = order[:used], order[used:]
            kv = rng.standard_normal((length, parts, kv_heads, width))
            scale = np.ones(kv.shape[:3], np.float32)
            if stored:
                scale = rng.uniform(0.01, 0.04, scale.shape).astype(np.float32)
                kv = np.clip(kv / scale[..., None], -127, 127)
            kv = np.asarray(jnp.asarray(kv, jnp.float32).astype(stored or dtype).astype(jnp.float32))
            slot = np.arange(length)
            index = self.tables[row, slot // block_size], self.layer, slice(None), slice(None), slot % block_size
            pool[index], scales[index] = kv, scale
            self.kv.append(kv * scale[..., None] if scaled else kv)
        self.pool = jnp.asarray(pool, stored or dtype)
        if layout == "tokens":
            self.pool = blocks_by_token(self.pool, token_rows(kv_heads, width))
        self.scales = jnp.asarray(scales) if stored and scaled else None
        self.rng, self.heads, self.width, self.values = rng, kv_heads * group, width, values

    def tables_for(self, options, counts=1):
        """The block tables, without the blocks that none of a row's last tokens sees; all with sink tokens."""
        window = options.get("window")
        if window is None or options.get("sink_tokens"):
            return jnp.asarray(self.tables)
        first_block = np.maximum(self.lengths - counts - window + 1, 0) // self.block_size
        column = np.arange(self.tables.shape[1])
        return jnp.asarray(np.where(column[None] < first_block[:, None], self.pool.shape[0] - 1, self.tables))

    def queries(self, *shape):
        return jnp.asarray(self.rng.standard_normal((*shape, self.heads, self.width)), self.dtype)

    def expect(self, q, row, count, **options):
        """The oracle's answer for the last `count` tokens of a row."""
        kv = self.kv[row]
        options.setdefault("scale", self.width**-0.5)
        return oracle(q.astype(jnp.float32), kv[:, 0], kv[:, -1, :, : self.values], len(kv) - count, **options)

    def close(self, got, wanted):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, rtol=TOLERANCE[self.dtype], atol=TOLERANCE[self.dtype]
        )


OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "window_1": {"window": 1},
    "soft_cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.7},
    "all": {"window": 9, "soft_cap": 3.0, "sinks": True, "scale": 0.3},
    "sink_tokens": {"window": 5, "sink_tokens": 3, "sinks": True},
}


def options_for(case, name):
    options = dict(OPTIONS[name])
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(case.rng.standard_normal(case.heads), jnp.float32)
    return options


_STATIC = "implementation", "scale", "window", "sink_tokens", "soft_cap", "values", "fixed_split"


@functools.partial(jax.jit, static_argnames=_STATIC)
def decode(q, pool, layer, tables, lengths, implementation, scale, sinks=None, scales=None, **options):
    return pallas_kernels.call(
        "decode_attention", q, pool, layer, tables, lengths,
        scale=scale, sinks=sinks, scales=scales, return_lse=True, **options, **how(implementation),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=(*_STATIC, "max_count"))
def prefill(
    q, pool, layer, tables, lengths, starts, counts, implementation, max_count, scale, sinks=None, scales=None,
    **options,
):  # fmt: skip
    return pallas_kernels.call(
        "prefill_attention", q, pool, layer, tables, lengths, starts, counts, max_count=max_count, scale=scale,
        sinks=sinks, scales=scales, return_lse=True, **options, **how(implementation),
    )  # fmt: skip


def check_decode(case, implementation, *, fixed_split=False, **options):
    q = case.queries(len(case.lengths))
    options.setdefault("scale", case.width**-0.5)
    out, lse = decode(
        q, case.pool, case.layer, case.tables_for(options), jnp.asarray(case.lengths, jnp.int32),
        implementation, scales=case.scales, values=case.values, fixed_split=fixed_split, **options,
    )  # fmt: skip
    assert out.dtype == q.dtype and out.shape == (*q.shape[:-1], case.values or case.width)
    for row, length in enumerate(case.lengths):
        if length == 0:
            np.testing.assert_array_equal(out[row], 0)
            sinks = options.get("sinks")
            case.close(lse[row], -np.inf if sinks is None else np.asarray(sinks))
            continue
        wanted, wanted_lse = case.expect(q[row][None], row, 1, **options)
        case.close(out[row], wanted[0])
        case.close(lse[row], wanted_lse[0])


def check_prefill(case, implementation, counts, *, gaps=0, max_count=None, **options):
    """Checks prefill of rows' last tokens, packed row by row, with `gaps` tokens of padding after each."""
    counts = np.asarray(counts)
    starts = np.cumsum(counts + gaps) - counts - gaps
    total = int(np.sum(counts + gaps)) + 3
    q = case.queries(total)
    options.setdefault("scale", case.width**-0.5)
    out, lse = prefill(
        q, case.pool, case.layer, case.tables_for(options, counts),
        jnp.asarray(case.lengths, jnp.int32), jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32),
        implementation, max_count or int(max(counts)), scales=case.scales, values=case.values, **options,
    )  # fmt: skip
    padding = np.ones(total, bool)
    for row, count in enumerate(counts):
        span = slice(starts[row], starts[row] + count)
        padding[span] = False
        if count:
            wanted, wanted_lse = case.expect(q[span], row, count, **options)
            case.close(out[span], wanted)
            case.close(lse[span], wanted_lse)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[padding], 0)
