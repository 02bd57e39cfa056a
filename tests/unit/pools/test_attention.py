# SPDX-License-Identifier: Apache-2.0
"""One contract of `write`, `rope_write` and `attend`: any layer, view, dtype and placement gives dense attention.

The pools begin as NaN, and so does the padding.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from kvjax.pools import init_pools
from tests.kernels.attention import how
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of
from tests.poison import poisoned
from tests.unit.pools.hand_made import (
    LAYERS,
    QUANTISED,
    TABLE,
    dense,
    in_order,
    inputs,
    normal,
    on_lines,
    paged,
    rotated,
    rows_of,
    spec_of,
    stored,
    tokens_of,
    views,
)

OPTIONS = {
    "plain": {}, "all": {"window": 5, "soft_cap": 1.5, "scale": 0.4, "sinks": True},
    "no window": {"soft_cap": 1.5, "scale": 0.4, "sinks": True},
}  # fmt: skip
AXES = {"heads": "heads", "context": "context"}
# Devices that divide heads, and blocks by token; the kind of the axes; and the placement. Else how a step is called.
MESHES = {
    "heads": (2, 1, AUTO, {"heads": "heads"}),
    "heads, rows divided": (2, 2, EXPLICIT, {"heads": "heads"}),
    "context": (1, 4, AUTO, AXES),
    "both": (2, 2, AUTO, AXES),
    "both, explicit": (2, 2, EXPLICIT, AXES),
}
SENT = {"heads": {}, "context": {"all-reduce": 2}, "both": {"all-reduce": 2}}  # one maximum and one sum
CASES = {  # kind, form, dtype, placement, options
    "": [
        ("kv", "decode", "float32", "one device", "plain"), ("kv", "mixed", "int8", "one device", "all"),
        ("latents", "mixed", "float32", "one device", "all"), ("rope", "mixed", "float32", "both", "no window"),
        ("partial rope", "ragged", "int8", "one device", "plain"),
    ],
    "long": [
        ("kv", "padded", "float8_e4m3fn", "one device", "all"), ("kv", "ragged", "bfloat16", "one device", "all"),
        ("kv", "decode", "bfloat16", "64-bit types", "all"), ("kv", "padded", "float32", "traced index", "all"),
        ("kv", "mixed", "float32", "triton", "all"), ("kv", "mixed", "float32", "both, explicit", "no window"),
        ("latents", "padded", "int8", "traced index", "all"), ("latents", "mixed", "int8", "heads", "all"),
        ("rope", "decode", "float32", "several caches", "plain"), ("rope", "ragged", "float32", "one device", "plain"),
    ],
    "slow": [
        ("partial rope", "mixed", "float32", "both", "no window"),
        ("rope", "padded", "int8", "traced index", "all"), ("kv", "padded", "float32", "both", "no window"),
        ("kv", "ragged", "int8", "several caches", "plain"), ("kv", "mixed as ragged", "float32", "one device", "all"),
        ("kv", "padded", "int8", "triton, traced index", "plain"), ("rope", "mixed", "int8", "64-bit types", "plain"),
        ("latents", "decode", "float32", "one device", "all"), ("latents", "ragged", "bfloat16", "one device", "plain"),
        ("rope", "decode", "float32", "heads", "all"), ("rope", "mixed", "int8", "both, explicit", "no window"),
        ("kv", "padded", "float32", "heads, rows divided", "all"), ("kv", "mixed", "int8", "heads", "all"),
        ("kv", "decode", "int8", "context", "plain"),
        ("kv", "padded", "float32", "without jit", "all"), ("kv", "decode", "float8_e4m3fn", "heads", "all"),
        ("kv", "ragged", "float8_e4m3fn", "both, explicit", "no window"),
        ("latents", "mixed", "float32", "context", "no window"),
        ("latents", "padded", "int8", "both, explicit", "no window"),
        ("rope", "padded", "float32", "context", "plain"),
        ("latents", "decode", "float32", "heads, rows divided", "all"),
    ],
}  # fmt: skip


def table_of(cases):
    marks = {mark: getattr(pytest.mark, mark) if mark else () for mark in cases}
    return [pytest.param(*case, marks=marks[mark]) for mark, some in cases.items() for case in some]


@pytest.fixture
def interpreted(where, monkeypatch):
    """Lets Triton's kernels run in the interpreter where the placement names them."""
    if "triton" in where:
        call = functools.partial(pallas_kernels.call, **how("triton"))
        monkeypatch.setattr(pallas_kernels, "call", lambda *args, implementation, **options: call(*args, **options))


def ran(where, step, lines, spec, sent=None):
    """The pools and the results of a step from pools of NaN, with the tokens of each block in order.

    Its devices send each other what is `sent`, if that is not None.
    """
    if where not in MESHES:
        pools = poisoned(init_pools(spec))
        if where == "several caches":
            pair = jax.tree.map(lambda x: jnp.stack([-x, x]), (lines, pools))
            return jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(step))(*pair))
        with jax.enable_x64(where == "64-bit types"):
            return (step if where == "without jit" else jax.jit(step))(lines, pools)
    heads, context, kind, axes = MESHES[where]
    with mesh_of(heads, context, kind, ("heads", "context")) as mesh:
        pools = poisoned(init_pools(spec, mesh=mesh, **axes))
        if where == "heads, rows divided":
            lines = lines | {"q": jax.device_put(lines["q"], NamedSharding(mesh, P("context")))}
        program = jax.jit(step).lower(lines, pools).compile()
        assert sent is None or collectives(program) == sent
        pools, results = program(lines, pools)
        for array, layers in zip(pools.arrays[-1], spec.groups[-1].pools, strict=True):
            (own,) = {shard.data.shape[3:5] for shard in array.addressable_shards}
            own_heads = 1 if layers.values else layers.kv_heads // heads
            assert own == (own_heads, 4 // (context if "context" in axes else 1))
        context = pools.context(0)
        ordered = jax.tree.map(lambda x: np.asarray(x) if context is None else context.ordered(np.asarray(x)), pools)
        return ordered, jax.tree.map(np.asarray, results)


def pools_after(x, form, spec, dtype):
    """The leaves of pools of NaN in which a step has written its K/V in the last layer, the second one of its pool."""
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(poisoned(init_pools(spec)))]
    of_layer = [leaf for leaf in leaves if leaf.shape[1] == 2]  # the other pool has one layer
    written = jax.jit(lambda x: [stored(kv, dtype) for kv in rows_of(rotated(x), form)])(x)
    for row, new in enumerate(written):
        token = np.arange(new[0].shape[1])
        index = np.asarray(TABLE)[row][token // 4], 1, slice(None), slice(None), token % 4
        for leaf, values in zip(of_layer, new, strict=False):
            leaf[index] = np.moveaxis(np.asarray(values), 1, 0).reshape(leaf[index].shape)
    return leaves


@pytest.mark.parametrize(("kind", "form", "dtype", "where", "options"), table_of(CASES))
def test_a_step_is_dense_attention_and_writes_nothing_else(kind, form, dtype, where, options, interpreted):
    """Each byte of the pools is known, and padding is zeros."""
    x, options = inputs(kind), OPTIONS[options]
    spec = spec_of(kind, dtype, options.get("window"))
    lines = jax.jit(functools.partial(on_lines, form=form))(x)
    step = functools.partial(paged, form=form, options=options)
    if "traced index" in where:  # `layer` is then any of the pool's
        lines = lines | {"index": jnp.int32(1)}
        step = lambda lines, pools: paged(lines, pools, form, options, layer=0, index=lines["index"])  # noqa: E731
    pools, (out, lse) = ran(where, step, lines, spec, SENT.get(where))
    assert (pools.scales is not None) == (dtype in QUANTISED)
    wanted = functools.partial(dense, form=form, options=options, values=LAYERS[kind].values, dtype=dtype)
    got = in_order((np.asarray(out), np.asarray(lse)), form)
    chex.assert_trees_all_close(got, jax.jit(wanted)(x), rtol=2e-5, atol=2e-5)
    is_padding = np.ones(out.shape[:2], bool)
    is_padding[tokens_of(views(form)[1])[0]] = False
    assert is_padding.any() and not np.any(np.asarray(out)[is_padding])
    rows = slice(None, -1 if "context" in where or "both" in where else None)  # the scratch row of parts of blocks
    for leaf, wanted in zip(jax.tree.leaves(pools), pools_after(x, form, spec, dtype), strict=True):
        assert leaf.dtype == wanted.dtype
        np.testing.assert_array_equal(*(np.asarray(x[rows]).astype(np.float32) for x in (leaf, wanted)))


GRADIENTS = {
    "": [("kv", "decode", "one device", "plain")],
    "long": [
        ("kv", "mixed", "one device", "all"), ("latents", "mixed", "one device", "plain"),
        ("kv", "padded", "heads", "all"), ("kv", "mixed", "triton", "plain"),
    ],
    "slow": [
        ("kv", "padded", "one device", "plain"),
        *[("kv", form, "one device", "all") for form in ("decode", "padded", "ragged")],
        ("latents", "decode", "one device", "plain"), ("rope", "padded", "one device", "plain"),
        ("kv", "decode", "several caches", "plain"), ("rope", "padded", "triton", "plain"),
        ("kv", "padded", "both", "no window"), ("kv", "mixed", "both, explicit", "no window"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "form", "where", "options"), table_of(GRADIENTS))
def test_gradients_are_those_of_dense_attention(kind, form, where, options, interpreted):
    """They go through two writes to q, old and new K/V, sinks and angles; and forwards, too."""
    x, options = inputs(kind), OPTIONS[options]
    spec = spec_of(kind, window=options.get("window"))

    def loss(results):  # many directions at once, with another factor for each element
        return sum(jnp.sum(jnp.sin(y) * normal(5, *y.shape)) for y in results)

    def total(x, pools):
        return loss(in_order(paged(on_lines(x, form, 0.0), pools, form, options)[1], form))

    wanted = jax.jit(jax.grad(lambda x: loss(dense(x, form, options, LAYERS[kind].values))))(x)
    direction = jax.tree.map(jnp.cos, x)

    def both(x, pools):
        return pools, (jax.grad(total)(x, pools), jax.jvp(lambda x: total(x, pools), (x,), (direction,))[1])

    _, (got, tangent) = ran(where, both, x, spec)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)
    along = sum(jnp.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (wanted, direction)), strict=True))
    chex.assert_trees_all_close(tangent, along, rtol=1e-5, atol=1e-4)
