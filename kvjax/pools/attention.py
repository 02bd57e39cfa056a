# SPDX-License-Identifier: Apache-2.0
"""The front door to paged attention: checks a call once, chooses an implementation and hands it plain arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import pallas_kernels
from kvjax.checks import floats, static_int
from kvjax.layers import MeshAxes
from kvjax.pools.device import Pools, attention_pool, check_fit
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
    with more, and in a ragged view, chunked prefill from any offset; of a mixed view each part is served as what it is.
    Over latents all query heads share one kv head, and V is the first columns of K: the queries are absorbed ones, and
    so are the results.

    jax differentiates it with respect to q, sinks and the pools. XLA computes the derivative, over all slots of the
    block tables, and the result too unless a kernel is named.

    Args:
      q: [R, C, Q, D]; [1, T, Q, D] for a flat view, ragged or mixed. Query heads g * Q / K to
        (g + 1) * Q / K - 1 share kv head g.
      pools: the K/V, those of the view's tokens written.
      layer: the model's layer number. It may be traced, i32[], where the spec has exactly one pool.
      view: where the tokens are.
      index: i32[]; the layer's index in its pool, as in `write`: clamped if it is out of range. None: the layer's own.
      scale: factor on the scores; None: 1 / sqrt(D). Over latents a model has one of its own.
      window: a token attends to the last `window` tokens, itself included. None: to all before it.
      soft_cap: c makes every score c * tanh(score / c).
      sinks: f32[Q]; per query head one more logit in the softmax's denominator, with no value.
      return_lse: whether to return the logarithm of the softmax's denominator too.
      implementation: one of `IMPLEMENTATIONS`, which serves or raises; None: the first that can serve.

    Returns:
      [R, C, Q, D] like q, [R, C, Q, values] over latents; zeros where the view has padding. With `return_lse` also
      f32[R, C, Q], undefined there.

    Raises:
      ValueError: on an argument that does not fit, while tracing; on a view of a cache with another spec; on a
        recurrent layer; on query heads of latents that a mesh cannot divide; on a window that the layer's spec lacks,
        where a mesh divides blocks.
      NotImplementedError: if the named implementation cannot serve this call.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=1, head_dim=2)]
      >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=2, max_length=32, block_size=4, dtype="float32")
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> view = kvjax.view(state, [3, 0], 3)
      >>> zeros, v = jnp.zeros((2, 3, 1, 2)), jnp.full((2, 3, 1, 2), 3.0).at[0, 2].set(9.0)
      >>> pools = kvjax.write(kvjax.init_pools(spec), 0, zeros, v, view)
      >>> kvjax.attend(zeros, pools, 0, view)[0, :, 0, 0].tolist()  # equal scores: the mean of V up to each token
      [3.0, 3.0, 5.0]
    """
    check_fit(pools, view)
    group, pool, index, array, spec = attention_pool(pools, layer, index)
    context = pools.context(group)
    q = floats("q", q)
    window = None if window is None else static_int("window", window, 1)
    sinks = None if sinks is None else floats("sinks", sinks)
    _check(q, array, view, window, soft_cap, sinks, layer, context)
    shape = q.shape
    is_decode = view.starts is None and q.shape[1] == 1
    decodes = q.shape[0] if is_decode else view.decodes
    call = functools.partial(
        pallas_kernels.call,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        values=spec.values,
        return_lse=return_lse or context is not None,
        implementation=implementation,
    )

    def compute(q, pool, index, scales, sinks, table, lengths, starts=None, num_tokens=None):
        q = q.reshape(-1, *q.shape[2:])
        parts = []
        options = {"scales": scales, "sinks": sinks if context is None else None}  # the merge has them once
        if decodes:
            first = slice(0, decodes)
            rows = table[first], lengths[first] if context is None else context.own_lengths(lengths[first])
            parts.append(
                call("decode_attention", q[first], pool, index, *rows, fixed_split=view.fixed_split, **options)
            )
        if num_tokens is not None:
            rest = slice(decodes, None)
            starts = jnp.arange(shape[0], dtype=jnp.int32) * shape[1] if starts is None else starts
            rows = table[rest], lengths[rest], starts[rest] - decodes, num_tokens[rest]
            options["max_count"] = shape[1] - decodes
            if context is not None:
                options |= {"stride": context.size, "offset": context.shard()}
            parts.append(call("prefill_attention", q[rest], pool, index, *rows, **options))
        result = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
        if context is None:
            return result
        out, lse = context.merge(result[0], result[1], sinks)
        return (out, lse) if return_lse else out

    operands = {
        "q": q,
        "pool": array,
        "index": index,
        "table": view.tables[group],
        "scales": pools.scales_of(group, pool),
        "sinks": sinks,
        "lengths": view.lengths,
        **({} if is_decode else {"starts": view.starts, "num_tokens": view.num_tokens}),
    }
    with jax.named_scope("attend"):
        own = spec.mesh_axes
        of_results = MeshAxes(1)
        axes = {"q": MeshAxes(2), "pool": own, "scales": own, "sinks": MeshAxes(0)}
        result = pools.over_devices(group, compute, operands, axes, (of_results,) * 2 if return_lse else of_results)
    return jax.tree.map(lambda x: x.reshape(*shape[:2], *x.shape[1:]), result)


def _check(q, array, view, window, soft_cap, sinks, layer, context) -> None:
    kv_heads = array.shape[3]
    width = array.shape[5]
    if q.ndim != 4 or q.shape[:2] != view.positions.shape or q.shape[3] != width or q.shape[2] % kv_heads:
        batch = ", ".join(map(str, view.positions.shape))
        raise ValueError(f"q: got shape {q.shape}, wanted [{batch}, a multiple of {kv_heads}, {width}]")
    if context is not None and window is not None:
        whole = f"a kvjax.LayerSpec with this window, whose blocks axis {context.axis!r} does not divide"
        raise ValueError(f"window: got {window} for layer {layer}, which has none in its spec, wanted {whole}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: got {soft_cap!r}, wanted None or a positive number")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks: got shape {sinks.shape}, wanted {q.shape[2:3]}, one per query head")
