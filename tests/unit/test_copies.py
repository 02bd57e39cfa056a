# SPDX-License-Identifier: Apache-2.0
"""No program copies a pool or the metadata of all blocks: one table of programs, compiled and not run."""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
import pallas_kernels
from benchmarks import bookkeeping
from kvjax import Cache, LayerSpec, make_spec
from kvjax.events.log import init_log
from kvjax.pools import apply, attend, init_pools, view, write
from kvjax.pools import host as host_pool
from kvjax.serving import (
    Rows,
    Scheduler,
    decode,
    decode_log,
    early_exit,
    init_serving,
    ngram,
    serve,
    worst_step,
)
from pallas_kernels import xla
from tests.mesh import collectives, mesh_of, sent_shapes
from tests.serving_kit import DIM, MODEL
from tests.unit.pools.hand_made import no_events


class Program(NamedTuple):
    """A program that takes large arrays.

    Attributes:
      lowered: the program.
      donated: the arrays that it updates in place, or a number of bytes.
      temporaries: bytes that it may have beside them.
      sent: what its devices send each other.
    """

    lowered: Any
    donated: Any
    temporaries: float
    sent: tuple[str, ...] = ()


def size(tree):
    return tree if isinstance(tree, int) else sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Steps over pools.


def pool_steps(kind, loop, dtype):
    """Three decode steps: copies, then write and attention in every layer. With "layers" the layers are a scan, too."""
    layer, layers = {"kv": LayerSpec(4, 64), "latents": LayerSpec.latent(64, 48)}[kind], 4
    width = layer.head_dim
    options = {"num_blocks": 8191, "max_seqs": 16, "max_length": 8192, "block_size": 16, "dtype": dtype}
    spec, values = make_spec([layer] * layers, **options), layer.values or width

    def one(carry, records):
        number, pools, q, state = carry
        pools, now = apply(pools, no_events(records)), view(state, 1)

        def through_layer(carry, index):
            pools, q = carry
            k, v = q[:, :, : layer.kv_heads], None if layer.values else q[:, :, layer.kv_heads :]
            pools = write(pools, index, k, v, now)
            return (pools, q.at[..., :values].add(attend(q, pools, index, now).astype(q.dtype))), None

        if loop == "layers":
            (pools, q), _ = lax.scan(through_layer, (pools, q), jnp.arange(layers, dtype=jnp.int32))
        else:
            for index in range(layers):
                (pools, q), _ = through_layer((pools, q), index)
        seqs = state.seqs.replace(committed=state.seqs.committed + 1)
        return number + 1, pools, q, state.replace(seqs=seqs)

    def run(pools, q, state, records):
        carry = (jnp.int32(0), pools, q, state)
        if loop == "while":
            return lax.while_loop(lambda c: c[0] < 3, lambda c: one(c, records), carry)
        return lax.scan(lambda c, _: (one(c, records), None), carry, None, length=3)[0]

    pools, q = jax.eval_shape(lambda: init_pools(spec)), jax.ShapeDtypeStruct((16, 1, 2 * layer.kv_heads, width), dtype)
    lowered = jax.jit(run, donate_argnums=0).lower(pools, q, jax.eval_shape(lambda: kvjax.init(spec)), i32(256, 9))
    return Program(lowered, pools, 0.05 * size(pools))


def step_of_two_layers(dtype, layout="heads"):
    """Writes and attends in both layers; scales are donated too."""
    sizes = {"num_blocks": 512, "max_seqs": 2, "max_length": 24, "block_size": 4}
    spec = make_spec([LayerSpec(2, 32)] * 2, **sizes, dtype=dtype, layout=layout)
    pools = jax.eval_shape(lambda: init_pools(spec))
    assert size(pools) == 513 * sum(pool.block_bytes(4) for pool in spec.groups[0].pools)

    def step(pools, state, q):
        now = view(state, 1)
        for layer in range(2):
            pools = write(pools, layer, q[:, :, :2], q[:, :, 2:], now)
            q = q + attend(q, pools, layer, now)
        return pools, q

    lowered = jax.jit(step, donate_argnums=0).lower(pools, jax.eval_shape(lambda: kvjax.init(spec)), f32(2, 1, 4, 32))
    return Program(lowered, pools, 0.2 * size(pools))


def recurrent_step(form):
    """A step of states of 64 KB: 2.5 times those of the rows where XLA optimises, which it does not here."""
    wide, rows = {"state": (4, 64, 64)}, 3
    spec = make_spec([LayerSpec.recurrent(wide)], num_blocks=500, max_seqs=rows, max_length=64, block_size=8)
    cache = Cache.create(spec)
    chunk = (np.arange(rows) < 2, np.array([2]), np.array([16]), 16)
    now, tokens = (cache.view(1), (rows, 1)) if form == "decode" else (cache.mixed(*chunk), (1, rows + 16))

    def decayed(states, inputs, count):
        def step(state, at):
            state = jnp.where((at < count)[:, None, None, None], 0.9 * state + inputs[:, at, :, :, None], state)
            return state, jnp.sum(state, axis=-1)

        state, outputs = lax.scan(step, states["state"], jnp.arange(inputs.shape[1]))
        return jnp.moveaxis(outputs, 0, 1), {"state": state}

    step = jax.jit(lambda pools, now, x: kvjax.recur(decayed, pools, 0, now, x), donate_argnums=0)
    return Program(step.lower(cache.pools, now, f32(*tokens, 4, 64)), cache.pools, 4 * 4 * rows * 4 * 64 * 64)


def skewed_rows_step():
    """Two layers of writes and attention, each with a condition on the rows' lengths."""
    pool, rows, columns = f32(4097, 2, 2, 2, 16, 16), 8, 128

    def step(q, pool, tables, lengths, slots):
        for layer in range(2):
            pool = pallas_kernels.call("append_kv", pool, layer, q[:, :2], q[:, 2:], slots)
            q = q + pallas_kernels.call("decode_attention", q, pool, layer, tables, lengths, scale=0.25)
        return q, pool

    lowered = jax.jit(step, donate_argnums=1).lower(f32(rows, 4, 16), pool, i32(rows, columns), i32(rows), i32(rows))
    return Program(lowered, pool, 0.05 * size(pool))


def long_tables():
    """Decode follows the longest live length: its trip count is data, and no table of 4,096 blocks is gathered."""
    run = jax.jit(functools.partial(pallas_kernels.call, "decode_attention", scale=1.0))
    return Program(run.lower(f32(1, 1, 64), f32(2, 1, 2, 1, 16, 64), 0, i32(1, 4096), i32(1)), 0, 4096 * 16 * 64)


def gradient():
    """For any number of layers two or three arrays of the pool's size."""
    options = {"num_blocks": 256, "max_seqs": 1, "max_length": 32, "block_size": 16, "dtype": "float32"}
    cache = Cache.create(make_spec([LayerSpec(1, 64)] * 6, **options))
    now = cache.view(4)

    def total(q, pools, now):
        for layer in range(6):
            pools = write(pools, layer, q[:, :, :1], q[:, :, 1:], now)
            q = q + attend(q, pools, layer, now)
        return jnp.sum(q)

    return Program(jax.jit(jax.grad(total)).lower(f32(1, 4, 2, 64), cache.pools, now), 0, 3.5 * size(cache.pools))


# Moves.


def moved_blocks(move, shape):
    """Layers, parts, heads, positions and width. Where one of them was 1, XLA's CPU backend has copied whole pools."""
    pool, ids = f32(20_001, *shape), i32(8)
    args = (ids, ids, i32()) if move == "copy_blocks" else (f32(8, *shape), ids, i32())
    return Program(jax.jit(getattr(xla, move), donate_argnums=0).lower(pool, *args), pool, 0.05 * size(pool))


def host_move(direction, heads, block_size):
    layers = kvjax.spec.PoolSpec((0,), heads, 16, "float32"), kvjax.spec.PoolSpec((1, 2), heads, 16, "int8")
    group = kvjax.spec.GroupSpec(500, layers, None, 600)
    pools, host = host_pool.init_host_pools(init_pools(kvjax.CacheSpec((group,), block_size, 2, 4)))
    device, tier = host_pool.arrays_of(pools, 0), host_pool.arrays_of(host, 0)
    if direction == "read":
        return Program(host_pool._read.lower(tier, np.zeros(16, np.int32)), 0, size(device) / 20)
    target, source = (tier, device) if direction == "to the host" else (device, tier)
    return Program(host_pool._copy.lower(target, source, np.zeros((2, 16), np.int32)), target, size(target) / 20)


def adoption():
    spec = make_spec([LayerSpec(2, 16)] * 2, num_blocks=500, max_seqs=2, max_length=64, block_size=16)
    cache = jax.eval_shape(lambda: Cache.create(spec))
    kv = jax.eval_shape(kvjax.stores.gather, cache.pools, [np.zeros(4, np.int32)])
    args = np.zeros(64, np.int32), np.int32(60), kv, np.ones(4, bool)
    return Program(jax.jit(Cache.adopt, donate_argnums=0).lower(cache, *args), cache.pools, 2 * size(kv) + 20_000)


# Verbs and loops.


def new_state(verb, kind):
    """No two fields of a new state share a buffer, so that it can be donated."""
    state = kvjax.init(make_spec(num_blocks=12, max_seqs=3, max_length=16, block_size=4, retention=kind == "retention"))
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    args = {"admit": (0, i32(8), 8), "commit": (i32(3, 1), i32(3)), "release": (0,)}[verb]
    return Program(jax.jit(getattr(kvjax, verb), donate_argnums=0).lower(state, *args), state, math.inf)


def scanned_verbs(run, kind):
    windows = {None: 60_000, 256: 61_000, 512: 62_000} if kind == "windows" else {}
    options = {"max_seqs": bookkeeping.ROWS, "max_length": bookkeeping.LENGTH, "block_size": bookkeeping.BLOCK}
    options |= {"num_blocks": windows or 65_536, "retention": kind == "retention"}
    state = jax.eval_shape(lambda: kvjax.init(make_spec([LayerSpec(1, 1, window) for window in windows], **options)))
    return Program(jax.jit(run, donate_argnums=0).lower(state), state, 0.1 * size(state))


def scheduler_loop(drafter=None):
    options = {"num_blocks": 16_384, "max_seqs": 4, "max_length": 64, "block_size": 4, "dtype": "float32"}
    spec, scheduler = make_spec([LayerSpec(1, DIM)] * 2, **options), Scheduler(chunk=6, chunk_rows=2, k=4)
    drafters = {None: None, "ngram": ngram(3), "early_exit": early_exit(MODEL)}
    speculates = drafter is not None
    serving = jax.eval_shape(lambda: init_serving(Cache.create(spec), [65] * 8, speculates=speculates))
    log = jax.eval_shape(lambda: init_log(4 * worst_step(spec, scheduler), 4))
    run = jax.jit(functools.partial(serve, scheduler=scheduler, steps=64), donate_argnums=(1, 2))
    pools = serving.cache.pools
    return Program(run.lower(MODEL, serving, log, drafter=drafters[drafter]), pools, 0.05 * size(pools) + size(log))


def decode_loop(choice):
    options = {"num_blocks": 20_000, "max_seqs": 8, "max_length": 256, "block_size": 4, "dtype": "float32"}
    cache = jax.eval_shape(lambda: Cache.create(make_spec([LayerSpec(1, DIM)] * 2, **options)))
    log = jax.eval_shape(lambda: decode_log(cache.state.spec, 4))
    rows = Rows(i32(8), jax.ShapeDtypeStruct((8,), jnp.bool_), i32(8), jax.ShapeDtypeStruct((8,), jnp.uint32), i32(8))
    sampling = None if choice == "greedy" else jax.tree.map(lambda x: np.repeat(x, 8), kvjax.Sampling(0.5, 40, 0.9, 3))
    run = jax.jit(functools.partial(decode, steps=4), donate_argnames=("cache", "rows", "log"))
    lowered = run.lower(MODEL, cache, rows, log, stop=i32(1), sampling=sampling)
    return Program(lowered, cache.pools, 0.05 * size(cache.pools))


# On a mesh.


def divided(program, heads, context=1):
    """A verb sends nothing. A layer sends one maximum f32[T, Q] and one sum f32[T, Q, D + 1] if blocks are divided."""
    with mesh_of(heads, context, names=("heads", "context")) as mesh:
        axes = {"heads": "heads"} | ({"context": "context"} if context > 1 else {})
        spec = make_spec(
            [LayerSpec(4, 16)] * 2, num_blocks=256, max_seqs=2, max_length=32, block_size=8, dtype="float32"
        )
        cache = Cache.create(spec, mesh=mesh, **axes)

        def step(cache, tokens, count, q, kv):
            pools, now = cache.pools, cache.view(count, tokens.shape[1])
            for layer in range(2):
                pools = write(pools, layer, kv[0], kv[1], now)
                y = attend(q, pools, layer, now)
                kv = kv + 0.1 * y.reshape(*y.shape[:2], 4, 2, 16)[None, :, :, :, 0]  # as in a model
            return cache.replace(pools=pools).commit(tokens, count)[0], y

        def inputs(length):
            q, kv = np.zeros((2, length, 8, 16), np.float32), np.zeros((2, 2, length, 4, 16), np.float32)
            return np.zeros((2, length), np.int32), np.full(2, length, np.int32), q, kv

        function, args, tokens = {
            "step": (step, inputs(1), 2), "chunk": (step, inputs(6), 12),
            "extend": (Cache.extend, (np.ones(2, bool),), 0),
            "admit": (Cache.admit, (0, np.arange(6, dtype=np.int32), 6), 0),
        }[program]  # fmt: skip
        sent = (f"f32[{tokens},{8 // heads}]", f"f32[{tokens},{8 // heads},17]") * 2 if tokens and context > 1 else ()
        own = size(cache.pools) // (heads * context)
        return Program(jax.jit(function, donate_argnums=0).lower(cache, *args), own, own / 2, sent)


LONG, SLOW = pytest.mark.long, pytest.mark.slow
PROGRAMS = [
    ((), pool_steps, ("kv", "layers", "float32")), ((), pool_steps, ("latents", "layers", "float32")),
    *((SLOW, pool_steps, ("kv", loop, dtype)) for loop, dtype in (
        ("while", "float32"), ("scan", "bfloat16"), ("scan", "float32"), ("while", "bfloat16"), ("layers", "bfloat16"),
    )),
    (LONG, step_of_two_layers, ("int8",)), (SLOW, step_of_two_layers, ("float8_e4m3fn",)),
    (LONG, step_of_two_layers, ("float32", "tokens")),
    ((), recurrent_step, ("decode",)), ((), recurrent_step, ("mixed",)),
    ((), long_tables, ()), (LONG, skewed_rows_step, ()), (LONG, gradient, ()),
    *(((), moved_blocks, (move, shape)) for move in ("copy_blocks", "scatter_blocks") for shape in (
        (4, 2, 3, 2, 8), (1, 2, 2, 2, 8), (2, 2, 1, 2, 8), (2, 2, 2, 1, 8), (2, 2, 2, 2, 1), (4, 1, 1, 2, 8),
    )),
    *(((), host_move, (direction, *of)) for direction in ("to the host", "back", "read") for of in (
        (2, 8), (1, 8), (2, 1),
    )),
    (LONG, adoption, ()),
    *((LONG, new_state, (verb, "plain")) for verb in ("admit", "commit", "release")),
    *((SLOW, new_state, (verb, "retention")) for verb in ("admit", "commit", "release")),
    *((LONG if (run, kind) == (bookkeeping.steps, "windows") else SLOW, scanned_verbs, (run, kind))
      for run in (bookkeeping.steps, bookkeeping.admissions) for kind in ("plain", "retention", "windows")),
    (LONG, scheduler_loop, ()), (LONG, scheduler_loop, ("ngram",)), (SLOW, scheduler_loop, ("early_exit",)),
    (SLOW, decode_loop, ("greedy",)), (SLOW, decode_loop, ("by row",)),
    *((LONG, divided, ("step", *axes)) for axes in ((4,), (1, 4))),
    *((SLOW, divided, (program, 4)) for program in ("extend", "admit")),
    *((SLOW, divided, (program, 1, 4)) for program in ("chunk", "extend", "admit")),
    *((SLOW, divided, (program, 2, 2)) for program in ("step", "chunk", "extend", "admit")),
]  # fmt: skip
UPDATES = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "dynamic-update-slice", "scatter"}


def copies(text, donated):
    """The instructions that make an array like one of the large ones, but do not update it."""
    large = {",".join(map(str, x.shape)) for x in jax.tree.leaves(donated) if math.prod(np.shape(x)) >= 10_000}
    found = re.findall(r"%?([\w.-]+) = (?!pred)\w+\[([\d,]+)\]\S* ([\w-]+)\(", text)
    made = [(name, shape, kind) for name, shape, kind in found if shape in large and kind not in UPDATES]
    return [one for one in made if one[2] != "fusion" or not re.search("scatter|update-slice", one[0])]


def name_of(make, args):
    return " ".join([make.__name__, *(getattr(x, "__name__", str(x)) for x in args)])


@pytest.mark.parametrize(
    ("make", "args"),
    [pytest.param(make, args, marks=mark, id=name_of(make, args)) for mark, make, args in PROGRAMS],
)
def test_no_program_copies_what_it_updates(make, args):
    lowered, donated, temporaries, sent = make(*args)
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes + memory.host_alias_size_in_bytes >= size(donated)
    assert memory.temp_size_in_bytes + memory.host_temp_size_in_bytes <= temporaries
    assert sorted(sent_shapes(compiled)) == sorted(sent) and set(collectives(compiled)) <= {"all-reduce"}
    assert "callback" not in text and copies(text, donated) == []
