# SPDX-License-Identifier: Apache-2.0
"""Caches whose rows grow in chunks through the verbs, up to the last tokens, and the K/V to write on the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import LayerSpec, make_spec
from kvjax.pools import init_pools, mixed, ragged, view, write
from pallas_kernels.quantise import quantise
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
    return make_spec(
        [KINDS[kind]], num_blocks=num_blocks, max_seqs=3, max_length=64, block_size=SIZE, dtype=dtype, sparse=True
    )


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
