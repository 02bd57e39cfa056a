# SPDX-License-Identifier: Apache-2.0
"""The front door to paged attention: checks a call once, chooses an implementation and hands it plain arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import pallas_kernels
from kvjax.pools.device import Pools
from kvjax.pools.views import View

IMPLEMENTATIONS = pallas_kernels.IMPLEMENTATIONS


def attend(
    q: jax.Array,
    pools: Pools,
    layer: int | jax.Array,
    view: View,
    *,
    index: ArrayLike | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
):
    """Causal attention of a view's tokens over their rows' paged K/V, softmax in float32.

    Each token attends to those before it in its row and to itself: call `write` first. With C = 1 this is decode;
    with more, chunked prefill from any offset; a ragged view mixes both.

    Args:
      q: [R, C, Q, D]; [1, T, Q, D] for a ragged view. Query heads g * Q / K to (g + 1) * Q / K - 1 share kv head g.
      pools: the K/V, those of the view's tokens written.
      layer: the model's layer number. It may be traced, i32[], where the spec has exactly one pool.
      view: where the tokens are.
      index: i32[]; the layer's index in its pool, as in `write`: clamped if it is out of range. None: the layer's own.
      scale: factor on the scores; None: 1 / sqrt(D).
      window: a token attends to the last `window` tokens, itself included. None: to all before it.
      soft_cap: c makes every score c * tanh(score / c).
      sinks: f32[Q]; per query head one more logit in the softmax's denominator, with no value.
      return_lse: whether to return the logarithm of the softmax's denominator too.
      implementation: one of `IMPLEMENTATIONS`, which serves or raises; None: the first that can serve.

    Returns:
      [R, C, Q, D] like q, zeros where the view has padding; with `return_lse` also f32[R, C, Q], undefined there.

    Raises:
      ValueError: on an argument that does not fit, while tracing.
      NotImplementedError: if the implementation asked for cannot serve this call.
    """
    group, pool, index, array = pools.at(layer, index)
    _check(q, array, view, window, soft_cap, sinks)
    shape, decode = q.shape, view.starts is None and q.shape[1] == 1
    name = "decode_attention" if decode else "prefill_attention"
    static = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "window": window,
        "soft_cap": soft_cap,
        "return_lse": return_lse,
        "implementation": implementation,
        **({} if decode else {"max_count": q.shape[1]}),
    }

    def compute(q, pool, index, scales, sinks, table, lengths, starts=None, num_tokens=None):
        q, rows = q[:, 0] if decode else q.reshape(-1, *q.shape[2:]), (lengths,)
        if not decode:
            rows = lengths, _starts(starts, *shape[:2]), num_tokens
        return pallas_kernels.call(name, q, pool, index, table, *rows, scales=scales, sinks=sinks, **static)

    operands = {
        "q": q,
        "pool": array,
        "index": index,
        "table": view.tables[group],
        "scales": pools.scales_of(group, pool),
        "sinks": sinks,
        "lengths": view.lengths,
        **({} if decode else {"starts": view.starts, "num_tokens": view.num_tokens}),
    }
    with jax.named_scope("attend"):
        axes = {"q": 2, "pool": 3, "scales": 3, "sinks": 0}
        result = pools.over_heads(compute, operands, axes, (1, 1) if return_lse else 1)
    return jax.tree.map(lambda x: x.reshape(*shape[:2], *x.shape[1:]), result)


def _starts(starts: jax.Array | None, rows: int, count: int) -> jax.Array:
    """i32[R]; where each row's tokens start on one line."""
    return jnp.arange(rows, dtype=jnp.int32) * count if starts is None else starts


def _check(q, array, view, window, soft_cap, sinks) -> None:
    kv_heads, width = array.shape[3], array.shape[5]
    if q.ndim != 4 or q.shape[:2] != view.positions.shape or q.shape[3] != width or q.shape[2] % kv_heads:
        batch = ", ".join(map(str, view.positions.shape))
        raise ValueError(f"q: got shape {q.shape}, wanted [{batch}, a multiple of {kv_heads}, {width}]")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: got {q.dtype}, wanted a floating dtype")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window: got {window!r}, wanted None or an int of at least 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: got {soft_cap!r}, wanted None or a positive number")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks: got shape {sinks.shape}, wanted {q.shape[2:3]}, one per query head")
