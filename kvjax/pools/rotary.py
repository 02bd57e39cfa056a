# SPDX-License-Identifier: Apache-2.0
"""Rotates Q and K by their tokens' positions, and writes K and V. On a GPU this is a single kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import pallas_kernels
from kvjax.checks import floats
from kvjax.layers import MeshAxes
from kvjax.pools.device import Pools, attention_pool, check_fit, checked_kv, heads_of, own_slots, write
from kvjax.pools.lineage import layer_at, note_write, probed_kv
from kvjax.pools.views import View
from pallas_kernels.rotary import rotate


def rope_write(
    pools: Pools,
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    view: View,
    *,
    index: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Pools]:
    """Rotates a layer's Q and K (RoPE), and writes K/V of a view's tokens into their slots as `write` does.

    The pairs of dimensions are (i, i + W / 2) for the first W dimensions, all D or a part of them. Q and K are rotated
    in float32 and rounded to their dtype. On a GPU this is a single kernel if W is D. If q, k and v are products with
    the same x, XLA computes the products together. Apply norms of q and k before the call.

    Args:
      pools: the K/V so far.
      layer: the model's layer number; traced as in `write`.
      q: [R, C, Q, D], not rotated; [1, T, Q, D] for a flat view, ragged or mixed.
      k: [R, C, K, D], not rotated; [1, T, K, D] for a flat view.
      v: shaped like k.
      angles: cosine and sine of each token's and pair's angle, f32[R, C, 1, W / 2] each.
      view: the slots of the tokens.
      index: i32[]; the layer's index in its pool, as in `write`. None takes the index from `layer`.
      implementation: an entry of `pallas_kernels.IMPLEMENTATIONS`. None chooses the first able to serve the call.

    Returns:
      The rotated q, for `attend`; and the pools with the tokens' K/V.

    Raises:
      ValueError: as `write`; also if the layer has latents, or q or angles do not fit.
      NotImplementedError: if the named implementation cannot serve this call, or for the derivative of rounding.
        `jax.lax.stop_gradient` of q, k and v avoids the derivative.
    """
    check_fit(pools, view)
    group, pool, pool_index, array, spec = attention_pool(pools, layer, index)
    if spec.values is not None:
        raise ValueError(f"layer: got {layer}, which has latents, wanted one with K/V")
    k, v = checked_kv(view, array, spec.head_dim, layer, k=k, v=v)
    q = floats("q", q)
    angles = (floats("angles", angles[0]), floats("angles", angles[1]))
    _check(q, angles, view, heads_of(array, spec.head_dim))
    if 2 * angles[0].shape[-1] < q.shape[-1]:
        pools = write(pools, layer, rotate(k, angles), v, view, index=index, implementation=implementation)
        return rotate(q, angles), pools
    layer_number = layer_at(pools, (group, pool), layer, index)
    k, v = probed_kv(layer_number, k, v)
    scales = pools.scales_of(group, pool)
    context = pools.context(group)

    def append(pool, scales, index, q, k, v, cos, sin, slots):
        args = q, k, v, cos, sin, pool, index, own_slots(slots, pool, context), scales
        return pallas_kernels.call("rope_append", *args, implementation=implementation)

    operands = {
        "pool": array,
        "scales": scales,
        "index": pool_index,
        "q": q,
        "k": k,
        "v": v,
        "cos": angles[0],
        "sin": angles[1],
        "slots": view.slots[group],
    }
    with jax.named_scope("rope_write"):
        pool_axes = spec.mesh_axes
        token_axes = MeshAxes(2)
        axes = {"pool": pool_axes, "scales": pool_axes, "q": token_axes, "k": token_axes, "v": token_axes}
        out_axes = token_axes, *(pool_axes for _ in jax.tree.leaves((array, scales)))
        q, *written = pools.over_devices(group, append, operands, axes, out_axes)
    result = pools.with_pool(group, pool, *written)
    return q, note_write(pools, result, (group, pool), layer_number)


def _check(q: jax.Array, angles: tuple[jax.Array, jax.Array], view: View, heads: tuple[int, int]) -> None:
    batch = view.positions.shape
    kv_heads, width = heads
    if q.ndim != 4 or q.shape != (*batch, q.shape[2], width) or q.shape[2] % kv_heads:
        raise ValueError(
            f"q: got shape {q.shape}, wanted [{', '.join(map(str, batch))}, a multiple of {kv_heads}, {width}]"
        )
    (pairs,) = angles[0].shape[-1:] or (0,)
    wanted = (*batch, 1, pairs if 0 < pairs < width // 2 else width // 2)
    if width < 2 or any(x.shape != wanted or x.dtype != jnp.float32 for x in angles):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in angles)
        raise ValueError(f"angles: got {got}, wanted cosine and sine float32{list(wanted)}, at most half of the width")
