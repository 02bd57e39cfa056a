# SPDX-License-Identifier: Apache-2.0
"""Paged attention: checks a call once, chooses an implementation and passes it plain arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import pallas_kernels
from kvjax.checks import floats, static_int
from kvjax.layers import MeshAxes
from kvjax.pools.device import Pools, attention_pool, check_fit, heads_of
from kvjax.pools.lineage import layer_name, note, note_read, probed_scale
from kvjax.pools.selection import chosen_view
from kvjax.pools.views import View
from kvjax.spec import CacheSpec

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
    """Causal attention of a view's tokens over their rows' paged K/V, with the softmax in float32.

    Each token attends to itself and to the earlier tokens of its row, so call `write` first. With C = 1 this is decode.
    With a larger C, and in a ragged view, it is chunked prefill from any offset. In a mixed view the first part is
    decode and the second is prefill.

    Over latents, all query heads share a kv head, and V is the first columns of K. You pass absorbed queries, and get
    absorbed results.

    You can differentiate it with respect to q, sinks and the pools. XLA then computes both the result and the
    derivative, over all slots of the block tables. If you name a kernel, the kernel still computes the result.

    Args:
      q: [R, C, Q, D]; [1, T, Q, D] for a flat view, ragged or mixed. Query heads g * Q / K to (g + 1) * Q / K - 1 share
        kv head g.
      pools: the K/V, already written for the view's tokens.
      layer: the model's layer number. It may be traced, i32[], if the spec has a single pool.
      view: the positions of the tokens.
      index: i32[]; the layer's index in its pool, clamped to the pool as in `write`. None takes the index from `layer`.
      scale: factor on the scores. Defaults to 1 / sqrt(D); models with latents have a scale of their own.
      window: the window of the layer's `LayerSpec`, or None, which means the same: each token attends to the last
        `window` tokens only, itself included. If the `LayerSpec` has `sink_tokens`, each token attends to these first
        tokens too, as in StreamingLLM. Both limits are exact to the token. Any other window is an error.
      soft_cap: a soft cap c replaces every score by c * tanh(score / c). None disables it.
      sinks: f32[Q]; an additional logit per query head in the softmax's denominator, without a value. These sinks of
        gpt-oss have nothing to do with `sink_tokens`.
      return_lse: whether to return the logarithm of the softmax's denominator too.
      implementation: an entry of `IMPLEMENTATIONS`, which serves the call or raises. None chooses the first able to
        serve the call.

    Returns:
      [R, C, Q, D] like q, or [R, C, Q, values] over latents, with zeros where the view has padding. With `return_lse`
      also f32[R, C, Q], undefined at padding.

    Raises:
      ValueError: while tracing, if an argument does not fit, the window is not the layer's, the view is of a cache with
        another spec, the layer is recurrent, or a mesh cannot divide the query heads of latents.
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
    given_index = index
    group, pool, index, array, spec = attention_pool(pools, layer, index)
    note_read(pools, (group, pool), layer, given_index)
    context = pools.context(group)
    q = floats("q", q)
    window = _window_of(pools.spec.groups[group].window, window, layer)
    sinks = None if sinks is None else floats("sinks", sinks)
    _check(q, heads_of(array, spec.head_dim), view, soft_cap, sinks)
    view = chosen_view(view, window, q, pools, layer, index=given_index, scale=scale, soft_cap=soft_cap)
    shape = q.shape
    table, lengths, sink_options = _seen(view, group, pools.spec, window)
    is_decode = view.starts is None and q.shape[1] == 1
    decodes = view.num_decode_rows
    call = functools.partial(
        pallas_kernels.call,
        scale=probed_scale(layer, q.shape[-1] ** -0.5 if scale is None else scale, q.shape[-1]),
        window=window,
        soft_cap=soft_cap,
        values=spec.values,
        return_lse=return_lse or context is not None,
        **sink_options,
        implementation=implementation,
    )

    def compute(q, pool, index, scales, sinks, table, lengths, starts=None, num_tokens=None):
        q = q.reshape(-1, *q.shape[2:])
        parts = []
        # Where devices divide blocks the merge adds the sinks, once.
        options = {"scales": scales, "sinks": sinks if context is None else None}
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
        "table": table,
        "scales": pools.scales_of(group, pool),
        "sinks": sinks,
        "lengths": lengths,
        **({} if is_decode else {"starts": view.starts, "num_tokens": view.num_tokens}),
    }
    with jax.named_scope("attend"):
        pool_axes = spec.mesh_axes
        result_axes = MeshAxes(1)
        axes = {"q": MeshAxes(2), "pool": pool_axes, "scales": pool_axes, "sinks": MeshAxes(0)}
        result = pools.over_devices(group, compute, operands, axes, (result_axes,) * 2 if return_lse else result_axes)
    result = jax.tree.map(lambda x: x.reshape(*shape[:2], *x.shape[1:]), result)
    note(layer, q=q, out=result[0] if return_lse else result)
    return result


def _window_of(of_layer: int | None, given: int | None, layer: int | jax.Array) -> int | None:
    """The window of a layer's spec, by which its rows release blocks. Another given window is refused."""
    given = None if given is None else static_int("window", given, 1)
    if given not in (None, of_layer):
        wanted = f"kvjax.LayerSpec(window={given})" if of_layer is None else f"{of_layer} as in its LayerSpec"
        raise ValueError(f"window: got {given} for {layer_name(layer)}, wanted {wanted}, or None")
    return of_layer


def _seen(view: View, group: int, spec: CacheSpec, window: int | None) -> tuple[jax.Array, jax.Array, dict[str, int]]:
    """A group's table and lengths, and the kernels' option for sinks.

    With sinks the table lacks the columns between them and the window.
    """
    table = view.tables[group]
    lengths = view.lengths_of(group)
    group_spec = spec.groups[group]
    if window is None or not group_spec.sink_tokens:
        return table, lengths, {}
    options = {"sink_tokens": group_spec.sink_tokens}
    if view.is_packed(group):
        return table, lengths, options
    num_sinks = -(-group_spec.sink_tokens // spec.block_size)
    first_column = group_spec.first_column(lengths - view.num_tokens, spec.block_size)
    gap = jnp.maximum(first_column - num_sinks, 0)
    column = np.arange(table.shape[1], dtype=np.int32)[None]
    column = column + jnp.where(column < num_sinks, 0, gap[:, None])
    return jnp.take_along_axis(table, column, axis=1, mode="clip"), lengths - gap * spec.block_size, options


def _check(q, heads, view, soft_cap, sinks) -> None:
    kv_heads, width = heads
    if q.ndim != 4 or q.shape[:2] != view.positions.shape or q.shape[3] != width or q.shape[2] % kv_heads:
        batch = ", ".join(map(str, view.positions.shape))
        raise ValueError(f"q: got shape {q.shape}, wanted [{batch}, a multiple of {kv_heads}, {width}]")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: got {soft_cap!r}, wanted None or a positive number")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks: got shape {sinks.shape}, wanted {q.shape[2:3]}, one per query head")
