# SPDX-License-Identifier: Apache-2.0
"""Paged attention: checks a call once, chooses an implementation and passes it plain arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import pallas_kernels
from kvjax._arrays import pick
from kvjax.checks import floats, static_int
from kvjax.layers import MeshAxes
from kvjax.pools.device import Pools, attention_pool, check_fit, heads_of
from kvjax.pools.lineage import layer_at, layer_name, note, note_read, probed_scale
from kvjax.pools.selection import chosen_view
from kvjax.pools.views import View
from kvjax.spec import CacheSpec, GroupSpec

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
    sink_q: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
):
    """Causal attention of a view's tokens over their rows' paged K/V, with the softmax in float32.

    Each token attends to itself and to the earlier tokens of its row, so call `write` first. With C = 1 this is decode.
    With a larger C, and in a ragged view, it is chunked prefill from any offset. In a mixed view the first part is
    decode and the second is prefill.

    Over latents, all query heads share a kv head, and V is the first columns of K. You pass absorbed queries, and get
    absorbed results.

    You can differentiate it with respect to q, sink_q, sinks and the pools. XLA then computes both the result and the
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
      sink_q: queries like q for the `sink_tokens` that the window has passed. In StreamingLLM a position is a place in
        the cache: rotate the queries for positions of at most `window + sink_tokens - 1`, and no distance grows with
        the text. None takes q, so the distance to the first tokens grows.
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
    layer_number = layer_at(pools, (group, pool), layer, given_index)
    note_read(pools, (group, pool), layer_number)
    context = pools.context(group)
    q = floats("q", q)
    window = _window_of(pools.spec.groups[group].window, window, layer)
    sinks = None if sinks is None else floats("sinks", sinks)
    _check(q, heads_of(array, spec.head_dim), view, soft_cap, sinks)
    sink_q = _checked_sink_q(sink_q, q, pools.spec.groups[group], layer)
    view = chosen_view(view, window, q, pools, layer, index=given_index, scale=scale, soft_cap=soft_cap)
    shape = q.shape
    table, lengths, sink_options = _seen(view, group, pools.spec, window, sink_q)
    is_decode = view.starts is None and q.shape[1] == 1
    call = functools.partial(
        pallas_kernels.call,
        scale=probed_scale(layer_number, q.shape[-1] ** -0.5 if scale is None else scale, q.shape[-1]),
        soft_cap=soft_cap,
        values=spec.values,
        implementation=implementation,
    )
    has_parts = context is not None or sink_q is not None
    call_seen = functools.partial(call, window=window, return_lse=return_lse or has_parts, **sink_options)

    def compute(q, pool, index, scales, sinks, table, lengths, starts=None, num_tokens=None, **passed):
        rows = table, lengths, starts, num_tokens
        # Where devices divide blocks the merge adds the sinks, once.
        options = {"scales": scales, "sinks": sinks if context is None else None}
        result = _over_tables(functools.partial(call_seen, **options), view, context, q, pool, index, *rows)
        if passed:
            of_sinks = functools.partial(call, scales=scales, fixed_split=view.fixed_split, return_lse=True)
            result = _merged(result, _over_passed(of_sinks, pool, index, **passed))
        if context is not None:
            result = context.merge(result[0], result[1], sinks)
        return result if return_lse or not has_parts else result[0]

    operands = {
        "q": q,
        "pool": array,
        "index": index,
        "table": table,
        "scales": pools.scales_of(group, pool),
        "sinks": sinks,
        "lengths": lengths,
        **({} if is_decode else {"starts": view.starts, "num_tokens": view.num_tokens}),
        **({} if sink_q is None else _passed(sink_q, view, group, pools.spec)),
    }
    with jax.named_scope("attend"):
        pool_axes = spec.mesh_axes
        result_axes = MeshAxes(1)
        axes = {"q": MeshAxes(2), "pool": pool_axes, "scales": pool_axes, "sinks": MeshAxes(0)}
        axes |= {} if sink_q is None else {"sink_q": MeshAxes(2)}
        result = pools.over_devices(group, compute, operands, axes, (result_axes,) * 2 if return_lse else result_axes)
    result = jax.tree.map(lambda x: x.reshape(*shape[:2], *x.shape[1:]), result)
    note(layer_number, q=q, out=result[0] if return_lse else result)
    return result


def _window_of(of_layer: int | None, given: int | None, layer: int | jax.Array) -> int | None:
    """The window of a layer's spec, by which its rows release blocks. Another given window is refused."""
    given = None if given is None else static_int("window", given, 1)
    if given not in (None, of_layer):
        wanted = f"kvjax.LayerSpec(window={given})" if of_layer is None else f"{of_layer} as in its LayerSpec"
        raise ValueError(f"window: got {given} for {layer_name(layer)}, wanted {wanted}, or None")
    return of_layer


def _seen(
    view: View, group: int, spec: CacheSpec, window: int | None, sink_q: jax.Array | None
) -> tuple[jax.Array, jax.Array, dict[str, int]]:
    """A group's table and lengths, and the kernels' option for sinks.

    With sinks the table lacks the columns between them and the window, unless they have queries of their own.
    """
    table = view.tables[group]
    lengths = view.lengths_of(group)
    group_spec = spec.groups[group]
    if window is None or not group_spec.sink_tokens or sink_q is not None:
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


def _over_tables(call, view, context, q, pool, index, table, lengths, starts, num_tokens):
    """Attention over the tokens in the tables of rows: decode of the first rows, then prefill of the others."""
    num_rows, width = q.shape[:2]
    q = q.reshape(-1, *q.shape[2:])
    decodes = view.num_decode_rows
    parts = []
    if decodes:
        first = slice(0, decodes)
        rows = table[first], lengths[first] if context is None else context.own_lengths(lengths[first])
        parts.append(call("decode_attention", q[first], pool, index, *rows, fixed_split=view.fixed_split))
    if num_tokens is not None:
        rest = slice(decodes, None)
        starts = jnp.arange(num_rows, dtype=jnp.int32) * width if starts is None else starts
        rows = table[rest], lengths[rest], starts[rest] - decodes, num_tokens[rest]
        divided = {} if context is None else {"stride": context.size, "offset": context.shard()}
        parts.append(call("prefill_attention", q[rest], pool, index, *rows, max_count=width - decodes, **divided))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)


def _passed(sink_q: jax.Array, view: View, group: int, cache_spec: CacheSpec) -> dict[str, jax.Array]:
    """The operands of attention over the sinks that windows have passed.

    Each of the view's T tokens has a row of its own: the sinks' blocks i32[T, B], and the number of their tokens that
    its window has passed i32[T], 0 for padding.
    """
    spec = cache_spec.groups[group]
    assert spec.window is not None
    rows, width = sink_q.shape[:2]
    token = np.arange(rows * width, dtype=np.int32)
    if view.starts is None:
        owner = jnp.asarray(token // width)
        offset = token % width
    else:  # a row without tokens starts where the next row does
        owner = jnp.sum(token[:, None] >= view.starts[None], axis=1, dtype=jnp.int32) - 1
        offset = token - pick(view.starts, owner)
    num_tokens = pick(view.num_tokens, owner)
    num_passed = pick(view.lengths_of(group), owner) - num_tokens + offset + 1 - spec.window
    num_passed = jnp.where(offset < num_tokens, jnp.clip(num_passed, 0, spec.sink_tokens), 0)
    num_blocks = -(-spec.sink_tokens // cache_spec.block_size)
    return {"sink_q": sink_q, "sink_table": pick(view.tables[group][:, :num_blocks], owner), "num_passed": num_passed}


def _over_passed(call, pool, index, sink_q, sink_table, num_passed):
    """Attention over the sinks that windows have passed: [T, Q, D] and f32[T, Q]."""
    return call("decode_attention", sink_q.reshape(-1, *sink_q.shape[2:]), pool, index, sink_table, num_passed)


def _merged(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over the tokens of two parts, from the results [T, Q, D] of each and their log-sum-exps f32[T, Q]."""
    highest = jnp.maximum(jax.lax.stop_gradient(jnp.maximum(first[1], second[1])), np.float32(-1e30))
    weights = [jnp.where(lse > -jnp.inf, jnp.exp(lse - highest), 0.0) for _, lse in (first, second)]
    total = weights[0] + weights[1]
    divisor = jnp.where(total > 0, total, 1.0)
    mixed = sum(
        out.astype(jnp.float32) * weight[..., None] for (out, _), weight in zip((first, second), weights, strict=True)
    )
    lse = jnp.where(total > 0, highest + jnp.log(divisor), -jnp.inf)
    return (mixed / divisor[..., None]).astype(first[0].dtype), lse


def _checked_sink_q(
    sink_q: jax.Array | None, q: jax.Array, spec: GroupSpec, layer: int | jax.Array
) -> jax.Array | None:
    if sink_q is None:
        return None
    sink_q = floats("sink_q", sink_q)
    if not spec.sink_tokens:
        raise ValueError(f"sink_q: got queries for layer {layer}, wanted None: its LayerSpec has no sink_tokens")
    if sink_q.shape != q.shape or sink_q.dtype != q.dtype:
        raise ValueError(f"sink_q: got {sink_q.dtype}{list(sink_q.shape)}, wanted {q.dtype}{list(q.shape)} as q")
    return sink_q


def _check(q, heads, view, soft_cap, sinks) -> None:
    kv_heads, width = heads
    if q.ndim != 4 or q.shape[:2] != view.positions.shape or q.shape[3] != width or q.shape[2] % kv_heads:
        batch = ", ".join(map(str, view.positions.shape))
        raise ValueError(f"q: got shape {q.shape}, wanted [{batch}, a multiple of {kv_heads}, {width}]")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: got {soft_cap!r}, wanted None or a positive number")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks: got shape {sinks.shape}, wanted {q.shape[2:3]}, one per query head")
