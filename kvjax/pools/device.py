# SPDX-License-Identifier: Apache-2.0
"""The K/V bytes on the device: donated pools, updated in place, which follow the events.

A pool is an array `[N + 1, L, 2, K, P, D]`. A block is contiguous, so it is cheap to copy or move between tiers. Inside
a block each (layer, K or V, head) is a contiguous tile `[P, D]`, which attention reads. The last pool row is scratch:
padding is written there, and nothing reads it. Never slice a layer out of a pool, since a slice copies it. A scan over
layers carries the pools, and names a layer by its index in its pool.

With `make_spec(layout="tokens")`, for TPUs, a pool is `[N + 1, L, P, R, W]` instead (`pallas_kernels.by_token`). Blocks
outside of pools (`pools/stage.py`) are by head in either case.

The scales of a quantised pool are in a sibling array, which is copied and moved together with the pool. A pool of
latents is `[N + 1, L, 1, 1, P, D]`. The pool of recurrent layers is a dict of arrays, each `[N + 1, L, ...]`: a block
is a snapshot, the state of a sequence after some token (`pools/recurrent.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike

import pallas_kernels
from kvjax._arrays import Pytree, count, padded, pick, put, rank
from kvjax._compile import own_transfers
from kvjax.checks import floats
from kvjax.events.records import EventKind, Events, Records
from kvjax.layers import MeshAxes
from kvjax.pools.context import Context
from kvjax.pools.lineage import layer_at, note_write, probed_kv
from kvjax.pools.placement import Placement, placement_of
from kvjax.pools.views import View
from kvjax.spec import CacheSpec, GroupSpec, PoolSpec
from pallas_kernels.by_token import head_shape


class Pools(Pytree, static=("spec", "placement")):
    """The K/V of a cache. Valid only together with its state.

    Attributes:
      arrays: per group and pool [N + 1, L, 2, K, P, D], [N + 1, L, P, R, W] with layout="tokens", or [N + 1, L, 1, 1,
        P, D] for latents; for recurrent layers {name: [N + 1, L, ...]}.
      spec: static; shapes.
      scales: per group and pool f32[N + 1, L, 2, K, P] if it is quantised, else None; the K/V are array * scale.
      placement: static; divides the kv heads among devices, and the tokens of blocks, which then have another order
        along P (`pools/context.py`). None means a single device.
    """

    arrays: tuple[tuple[Any, ...], ...]
    spec: CacheSpec
    scales: tuple[tuple[jax.Array | None, ...], ...] | None = None
    placement: Placement | None = None

    def at(self, layer: int | jax.Array, index: ArrayLike | None = None) -> tuple[int, int, int | jax.Array, Any]:
        """Locates a model's layer: (group index, pool index in the group, layer index in the pool, the pool's arrays).

        With `index`, the layer only selects the pool, and the index is clamped to the pool's layers.
        """
        if isinstance(layer, Tracer):
            layer, traced = self._in_only_pool(layer)
            index = traced if index is None else index
        group, pool, layer_index = self.spec.locate(layer)
        array = self.arrays[group][pool]
        if index is not None:
            index = _scalar("index", index)
            num_layers = len(self.spec.groups[group].pools[pool].layers)
            layer_index = jnp.clip(index, 0, min(num_layers - 1, jnp.iinfo(index.dtype).max)).astype(jnp.int32)
        return group, pool, layer_index, array

    def _in_only_pool(self, layer: jax.Array) -> tuple[int, jax.Array]:
        """A static layer of the spec's only pool, and a traced layer's index in it, the last if the pool lacks it."""
        pools = [pool for group in self.spec.groups for pool in group.pools]
        if len(pools) != 1:
            raise ValueError(
                f"layer: got a traced value with {len(pools)} pools, wanted an int that names one of them, and index= "
                "for the position in it"
            )
        layers = pools[0].layers
        index_of = {layer_number: i for i, layer_number in enumerate(layers)}
        last = len(layers) - 1
        table = np.array([index_of.get(layer_number, last) for layer_number in range(max(layers) + 2)], np.int32)
        return layers[0], pick(jnp.asarray(table), _scalar("layer", layer))

    def scales_of(self, group: int, pool: int) -> jax.Array | None:
        """The scales of a quantised pool, None for others."""
        return None if self.scales is None else self.scales[group][pool]

    def over_devices(
        self,
        group: int,
        function: Callable[..., Any],
        operands: dict[str, Any],
        axes: dict[str, MeshAxes],
        out_axes: Any,
    ) -> Any:
        """Calls `function(**operands)` on each device with its part of a group (`Placement.over_devices`)."""
        if self.placement is None:
            return function(**operands)
        placement = self.placement.of_group(self.spec.groups[group])
        return placement.over_devices(function, operands, axes, out_axes)

    def context(self, group: int) -> Context | None:
        """The mesh axis along which a group's blocks are divided. None means whole blocks."""
        return None if self.placement is None else self.placement.of_group(self.spec.groups[group]).context

    def with_pool(self, group: int, pool: int, array: Any, scales: jax.Array | None = None) -> Pools:
        """Replaces the array of a pool, and its scales if it has any."""
        pools = self.replace(arrays=_with(self.arrays, group, pool, array))
        if self.scales is None or scales is None:
            return pools
        return pools.replace(scales=_with(self.scales, group, pool, scales))


def attention_pool(
    pools: Pools, layer: int | jax.Array, index: ArrayLike | None
) -> tuple[int, int, int | jax.Array, jax.Array, PoolSpec]:
    """Locates a layer as `Pools.at` does, and its pool's spec. Raises a ValueError for a recurrent layer."""
    group, pool, index, array = pools.at(layer, index)
    spec = pools.spec.groups[group].pools[pool]
    if spec.arrays:
        raise ValueError(f"layer: got {layer}, which is recurrent, wanted one with K/V or latents")
    return group, pool, index, array, spec


def check_fit(pools: Any, view: Any) -> None:
    """Raises a ValueError unless these are pools, and a view of a cache with the same spec."""
    _check_pools(pools)
    if not isinstance(view, View):
        wanted = "a View, such as kvjax.view or the method cache.view makes"
        raise ValueError(f"view: got a {type(view).__name__}, wanted {wanted}")
    if view.spec is not None and view.spec is not pools.spec and view.spec != pools.spec:
        raise ValueError(f"view: got one of a cache with {_difference(view.spec, pools.spec)}, as the pools have")


def heads_of(array: jax.Array, width: int) -> tuple[int, int]:
    """K and D of a pool with heads of this width. If the caller maps the step, the K heads of a single device."""
    shape = head_shape(array.shape, width)
    return shape[3], shape[5]


def checked_kv(view: View, array: jax.Array, width: int, layer: Any, **new: jax.Array | None) -> list[jax.Array]:
    """Returns a view's new K, V or latents as arrays. A ValueError names an array with a wrong shape or dtype."""
    shape = (*view.positions.shape, *heads_of(array, width))
    for name, x in new.items():
        if x is None or np.shape(x) != shape:
            got = "None" if x is None else f"shape {np.shape(x)}"
            raise ValueError(f"{name}: got {got}, wanted {shape} for this view and layer {layer}")
    return [floats(name, x) for name, x in new.items()]


def own_slots(slots: jax.Array, pool: jax.Array, context: Context | None) -> jax.Array:
    """A view's slots as i32[T], in this device's part of the pool if a mesh divides blocks."""
    slots = slots.reshape(-1)
    return slots if context is None else context.own_slots(slots, pool)


def _check_pools(pools: Any) -> None:
    if not isinstance(pools, Pools):
        wanted = "its pools: cache.pools" if hasattr(pools, "pools") else "Pools, such as kvjax.init_pools makes"
        raise ValueError(f"pools: got a {type(pools).__name__}, wanted {wanted}")


def _difference(got: Any, wanted: Any, name: str = "") -> str:
    """The first part in which two specs differ, such as "groups[0].num_blocks=12, wanted 6"."""
    parts = []
    if dataclasses.is_dataclass(wanted):
        names = [field.name for field in dataclasses.fields(wanted)]
        parts = [(f"{name}.{part}".lstrip("."), getattr(got, part), getattr(wanted, part)) for part in names]
    elif isinstance(wanted, tuple) and len(got) != len(wanted):
        return f"{len(got)} in {name}, wanted {len(wanted)}"
    elif isinstance(wanted, tuple):
        parts = [(f"{name}[{i}]", *both) for i, both in enumerate(zip(got, wanted, strict=True))]
    for part, got_part, wanted_part in parts:
        if got_part != wanted_part:
            return _difference(got_part, wanted_part, part)
    return f"{name}={got!r}, wanted {wanted!r}"


def _scalar(name: str, value: ArrayLike) -> jax.Array:
    value = jnp.asarray(value)
    if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}, wanted an int or i32[]")
    return value


def _with(arrays, group: int, pool: int, array: Any):
    arrays = [list(of_group) for of_group in arrays]
    arrays[group][pool] = array
    return tuple(map(tuple, arrays))


@own_transfers()
def init_pools(
    spec: CacheSpec, *, mesh: Mesh | None = None, heads: str | None = None, context: str | None = None
) -> Pools:
    """Makes pools of zeros. No two arrays share memory, so you can donate them.

    Args:
      spec: shapes.
      mesh: the devices among which the kv heads are divided. None means a single device.
      heads: the mesh axis to divide the kv heads. Along all other axes the pools are replicated.
      context: another mesh axis, which divides the tokens of each block of layers with full attention. Use it for
        models with fewer kv heads than devices, and for sequences longer than a device can hold. Blocks of layers with
        windows or states stay whole. None disables it.

    Raises:
      ValueError: if `mesh` lacks an axis, or if its size does not divide the kv heads of a layer or the tokens of a
        block.

    Example:
      >>> spec = kvjax.make_spec([kvjax.LayerSpec(2, 16)] * 3, num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> pools = kvjax.init_pools(spec)
      >>> pools.arrays[0][0].shape  # 8 blocks and the scratch row, layers, K and V, heads, tokens, width
      (9, 3, 2, 2, 4, 16)
    """
    placement, sharding = placement_of(spec, mesh, heads, context)

    def zeros(group: GroupSpec, shape: tuple[int, ...], dtype: Any, axes: MeshAxes) -> jax.Array:
        if sharding is None:
            return jnp.zeros(shape, dtype)
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding(group, axes))()

    def arrays(group: GroupSpec, pool: PoolSpec) -> Any:
        rows = group.num_blocks + 1, len(pool.layers)
        return jax.tree.map(
            lambda block, axes: zeros(group, (*rows, *block.shape), block.dtype, axes),
            pool.pool_shape(spec.block_size),
            pool.mesh_axes,
        )

    def scales(group: GroupSpec, pool: PoolSpec) -> jax.Array | None:
        if not pool.quantised:  # the states of recurrent layers are never quantised
            return None
        shape = group.num_blocks + 1, len(pool.layers), *pool.block_shape(spec.block_size).shape[:-1]
        return zeros(group, shape, jnp.float32, pool.mesh_axes)

    def per_pool(make: Callable[[GroupSpec, PoolSpec], Any]) -> Any:
        return tuple(tuple(make(group, pool) for pool in group.pools) for group in spec.groups)

    quantised = any(pool.quantised for group in spec.groups for pool in group.pools)
    return Pools(per_pool(arrays), spec, per_pool(scales) if quantised else None, placement)


def write(
    pools: Pools,
    layer: int | jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    view: View,
    *,
    index: ArrayLike | None = None,
    implementation: str | None = None,
) -> Pools:
    """Writes a layer's K/V, or latents, of a view's tokens into their slots.

    If you donate the pools, they are updated in place. The view's padding is dropped. The K/V become findable later, by
    `commit`. You can differentiate it like `attend`, but rounding to int8 or fp8 has no derivative.

    Args:
      pools: the K/V so far.
      layer: the model's layer number. It may be traced, i32[], if the spec has a single pool.
      k: [R, C, K, D], or [1, T, K, D] for a ragged view; for a layer of latents the latents, with K = 1.
      v: shaped like k; None for a layer of latents.
      view: the slots of the tokens.
      index: i32[]; the layer's index in its pool (`CacheSpec.locate`), for a scan over layers. `layer` then names any
        layer of the pool. An index out of range is clamped: to the last layer if it is too large, to the first if it is
        negative. None takes the index from `layer`.
      implementation: an entry of `pallas_kernels.IMPLEMENTATIONS`. None chooses the first able to serve the call.

    Returns:
      The pools with the tokens' K/V, in the pool's dtype. A quantised pool gets a scale per token and head.

    Raises:
      ValueError: if the view is of a cache with another spec, the K/V are not floating or do not fit the pool or the
        view, V is given for latents, the layer is recurrent, or it is traced and the spec has several pools.
      NotImplementedError: if the named implementation cannot serve this call, or for the derivative of rounding.
        `jax.lax.stop_gradient` of k and v avoids the derivative.

    Example:
      >>> layers = [kvjax.LayerSpec(kv_heads=1, head_dim=2)]
      >>> spec = kvjax.make_spec(layers, num_blocks=8, max_seqs=2, max_length=32, block_size=4, dtype="float32")
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> view = kvjax.view(state, [3, 0], 3)  # three tokens of row 0
      >>> k = jnp.arange(1.0, 13.0).reshape(2, 3, 1, 2)
      >>> pools = kvjax.write(kvjax.init_pools(spec), 0, k, k + 100.0, view)
      >>> pools.arrays[0][0][0, 0, :, 0].tolist()  # block 0, layer 0: its K and its V
      [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0]], [[101.0, 102.0], [103.0, 104.0], [105.0, 106.0], [0.0, 0.0]]]
    """
    check_fit(pools, view)
    given_index = index
    group, pool, index, array, spec = attention_pool(pools, layer, index)
    if v is not None and spec.values is not None:
        raise ValueError(f"v: got shape {v.shape}, wanted None: layer {layer} has latents, and V is a part of k")
    if spec.values is None:
        k, v = checked_kv(view, array, spec.head_dim, layer, k=k, v=v)
    else:
        (k,) = checked_kv(view, array, spec.head_dim, layer, k=k)
    layer_number = layer_at(pools, (group, pool), layer, given_index)
    k, v = probed_kv(layer_number, k, v)
    scales = pools.scales_of(group, pool)
    slots = view.slots[group]
    context = pools.context(group)
    operands = {"pool": array, "scales": scales, "index": index, "k": k, "v": v, "slots": slots}

    def append(pool, scales, index, k, v, slots):
        k, v = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (k, v))
        args = (pool, index, k, v, own_slots(slots, pool, context)) + (() if scales is None else (scales,))
        return pallas_kernels.call("append_kv", *args, implementation=implementation)

    quantised = operands["scales"] is not None
    with jax.named_scope("write"):
        pool_axes = spec.mesh_axes
        token_axes = MeshAxes(2 if spec.values is None else None)
        axes = {"pool": pool_axes, "scales": pool_axes, "k": token_axes, "v": token_axes}
        written = pools.over_devices(group, append, operands, axes, (pool_axes, pool_axes) if quantised else pool_axes)
    result = pools.with_pool(group, pool, *(written if quantised else (written,)))
    return note_write(pools, result, (group, pool), layer_number)


@own_transfers()
def apply(pools: Pools, events: Events, *, implementation: str | None = None) -> Pools:
    """Makes the copies of blocks that a transition ordered. Each copies a whole block in all layers.

    If you donate the pools, they are updated in place. No copy's target is the source of another copy of the same
    transition, so order does not matter. The cost depends on the number of copies, not on the capacity of the events.

    Args:
      pools: the K/V before the copies.
      events: the transition's events.
      implementation: an entry of `pallas_kernels.IMPLEMENTATIONS`. None chooses the first able to serve the call.

    Raises:
      ValueError: if `pools` is not a `Pools`.
    """
    _check_pools(pools)

    def copy(pool, sources, targets, num_copies):
        return pallas_kernels.call("copy_blocks", pool, sources, targets, num_copies, implementation=implementation)

    def copied(array: jax.Array, axes: MeshAxes, group_index: int, copies: dict[str, jax.Array]) -> jax.Array:
        return original_pools.over_devices(group_index, copy, {"pool": array, **copies}, {"pool": axes}, axes)

    original_pools = pools
    records = Records(padded(events.records))
    for group_index, group in enumerate(pools.spec.groups):
        is_copy = (records.kind == EventKind.COPIED) & (records.group == group_index)
        # Indices of the copies among the records, packed to the front.
        order = put(jnp.zeros(is_copy.size, jnp.int32), rank(is_copy), np.arange(is_copy.size, dtype=np.int32), is_copy)
        sources = pick(records.source, order)
        targets = pick(records.block, order)
        copies = {"sources": sources, "targets": targets, "num_copies": count(is_copy)}
        copy_array = functools.partial(copied, group_index=group_index, copies=copies)
        for pool, spec in enumerate(group.pools):
            scales = pools.scales_of(group_index, pool)
            with jax.named_scope("copy_blocks"):
                array = jax.tree.map(copy_array, pools.arrays[group_index][pool], spec.mesh_axes)
                scales = None if scales is None else copy_array(scales, spec.mesh_axes)
            pools = pools.with_pool(group_index, pool, array, scales)
    return pools
