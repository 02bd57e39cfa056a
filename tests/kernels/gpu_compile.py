# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for a GPU on a machine without a GPU: `python -m tests.kernels.gpu_compile TARGET CASE [CASE ...]`.

Needs the packages of scripts/gpu_toolchain.sh on PYTHONPATH (.gpu-toolchain/<version of jaxlib>). A process has a
single target. Bad parameters can abort it, so each case's result is printed at once, as a line of JSON. It has ptxas's
report on each kernel (registers, bytes of stack and spills), the number of asynchronous 16-byte copies, tensor copies
and matrix products in its PTX, the number of programs which fit on a multiprocessor, the counts of `gpu_sass` in its
loop, the form in which kernels were emitted, and the program's collectives and temporaries.
"""

import functools
import glob
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
import kvjax.stores
import pallas_kernels
from kvjax.pools.context import Context
from kvjax.pools.host import HostPools
from kvjax.pools.placement import Placement
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from models.placement import partition_spec
from pallas_kernels import lowering_for
from tests.kernels import gpu_sass

TOOLCHAIN = pathlib.Path(__file__).parents[2] / ".gpu-toolchain" / importlib.metadata.version("jaxlib")
ROWS, HEADS, KV_HEADS, WIDTH, LENGTH, LAYERS = 32, 32, 8, 128, 4096, 4


def _description(name, major, cores, smem_core, smem_block, bandwidth, memory, l2, clock_ghz, fpus) -> str:
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {smem_core} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock_ghz} device_memory_size: {memory}
      shared_memory_per_block_optin: {smem_block}
      cuda_compute_capability {{ major: {major} feature_extension: {extension} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """


TARGETS = {
    "h200": ("sm_90a", _description("NVIDIA H200", 9, 132, 233472, 232448, 4_800_000_000_000, 150_000_000_000,
                                    52_428_800, 1.98, 128)),
    "a100": ("sm_80", _description("NVIDIA A100", 8, 108, 167936, 166912, 2_039_000_000_000, 85_000_000_000,
                                   41_943_040, 1.41, 64)),
}  # fmt: skip


MULTIPROCESSORS = {"h200": 132, "a100": 108}


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def pool_of(size=16, width=WIDTH):
    return bf16(ROWS * LENGTH // size + 1, LAYERS, 2, KV_HEADS, size, width)


def kernel(name, **options):
    return functools.partial(pallas_kernels.call, name, **options)


def decode(size=16, width=WIDTH, implementation=None, fixed_split=False):
    table = i32(ROWS, LENGTH // size)
    args = bf16(ROWS, HEADS, width), pool_of(size, width), i32(), table, i32(ROWS)
    options = {"scale": width**-0.5, "implementation": implementation, "fixed_split": fixed_split}
    return kernel("decode_attention", **options), args, ()


def float32(case):
    """Another case with all its floats in float32."""
    function, args, donate = CASES[case]()
    return function, jax.tree.map(lambda a: i32(*a.shape) if a.dtype == jnp.int32 else f32(*a.shape), args), donate


def quantised(dtype, shape=None):
    """A pool and its scales."""
    shape = shape or pool_of().shape
    return jax.ShapeDtypeStruct(shape, dtype), f32(*shape[:5])


def attention_quantised(case, dtype):
    """Another case over a quantised pool."""
    function, (q, pool, *rest), _ = CASES[case]()
    pool, scales = quantised(dtype, pool.shape)
    return lambda scales, *args: function(*args, scales=scales), (scales, q, pool, *rest), ()


def append_quantised(dtype):
    pool, scales = quantised(dtype)
    return kernel("append_kv"), (pool, i32(), *[bf16(256, KV_HEADS, WIDTH)] * 2, i32(256), scales), (0, 5)


def rope_append(dtype=None):
    """Rotation and append of tokens, into a pool which is quantised if `dtype` is given."""
    pool, *scales = (pool_of(),) if dtype is None else quantised(dtype)
    new, angles = [bf16(256, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)], [f32(256, 1, WIDTH // 2)] * 2
    return kernel("rope_append"), (*new, *angles, pool, i32(), i32(256), *scales), (5, *(8 for _ in scales))


def by_mosaic(name, case):
    """Another case of a function, by Mosaic."""
    _, args, donate = CASES[case]()
    return kernel(name, implementation="mosaic"), args, donate


def moved(name, *args, donate=()):
    """A move of blocks by Mosaic."""
    return kernel(name, implementation="mosaic"), (pool_of(), *args), donate


def prefill(size=16, width=WIDTH, implementation=None):
    table, rows = i32(ROWS, LENGTH // size), i32(ROWS)
    args = bf16(LENGTH, HEADS, width), pool_of(size, width), i32(), table, rows, rows, rows
    options = {"scale": width**-0.5, "max_count": LENGTH, "implementation": implementation}
    return kernel("prefill_attention", **options), args, ()


def latents(case, heads=16, dtype=jnp.bfloat16):
    """Attention over latents of 512 + 64 columns, DeepSeek V3's, or their append."""
    function, (q, pool, *rest), _ = CASES[case]()
    pool = jax.ShapeDtypeStruct((*pool.shape[:2], 1, 1, 16, 576), dtype)
    scales = None if dtype == jnp.bfloat16 else f32(*pool.shape[:5])
    args = bf16(q.shape[0], heads, 576), pool, scales, *rest
    return lambda q, pool, scales, *rest: function(q, pool, *rest, scales=scales, values=512), args, ()


LAYER = LayerConfig(KV_HEADS, WIDTH)


def small_llama(layers=(LAYER,) * LAYERS, scan=False):
    config = ModelConfig("llama", 32_000, 1024, 2048, HEADS, layers)
    return jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, scan=scan, rngs=nnx.Rngs(0)))


def whole_step(scan=False):
    """A decode step of a small Llama over pools of a gigabyte: extend, copies, model, commit."""
    model = small_llama(scan=scan)
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=2**12, max_seqs=ROWS, max_length=LENGTH)
    cache = jax.eval_shape(lambda: kvjax.Cache.create(spec))

    def step(model, cache, tokens):
        cache, extended = cache.extend(jnp.ones((ROWS,), jnp.bool_))
        cache, logits, committed = kvjax.step(model, cache, tokens, jnp.ones((ROWS,), jnp.int32))
        return cache, jnp.argmax(logits, axis=-1), extended, committed

    return step, (model, cache, i32(ROWS, 1)), (1,)


def divided(model, cache, context: int = 1):
    """A model and a cache for a mesh of four, with their shardings: heads, the MLP's inner width, the vocabulary.

    `context` devices of each heads' divide blocks.
    """
    mesh = AbstractMesh((4 // context, context), ("x", "c")) if context > 1 else AbstractMesh((4,), ("x",))
    parts = Context("c", context) if context > 1 else None

    def weight(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return partition_spec(name, leaf.shape, mesh, "x")

    cache = cache.replace(pools=cache.pools.replace(placement=Placement(mesh, "x", parts)))
    weights = jax.tree_util.tree_map_with_path(weight, model)
    return cache, (weights, kvjax.Cache(P(), P(None, None, None, "x", "c" if parts else None)))


def sharded_step(context: int = 1):
    """The same step on a mesh. The metadata is not divided."""
    step, (model, cache, tokens), donate = whole_step()
    cache, specs = divided(model, cache, context)
    return step, (model, cache, tokens), donate, (*specs, P())


def adopt():
    """64 blocks from outside enter a cache with pools of a gigabyte: adopt, bytes, land."""
    layers = [kvjax.LayerSpec(KV_HEADS, WIDTH)] * LAYERS
    spec = kvjax.make_spec(layers, num_blocks=2**12, max_seqs=ROWS, max_length=LENGTH)
    cache = jax.eval_shape(lambda: kvjax.Cache.create(spec))
    kv = jax.eval_shape(kvjax.stores.gather, cache.pools, [i32(64)])
    return (
        kvjax.Cache.adopt,
        (cache, i32(64 * spec.block_size), i32(), kv, jax.ShapeDtypeStruct((64,), jnp.bool_)),
        (0,),
    )


CASES = {
    "adopt": adopt,
    "decode_16": decode,
    "decode_fixed_split": functools.partial(decode, fixed_split=True),
    "decode_64": functools.partial(decode, 64),
    "decode_width_80": functools.partial(decode, 16, 80),
    "decode_int8": functools.partial(attention_quantised, "decode_16", jnp.int8),
    "decode_fp8": functools.partial(attention_quantised, "decode_16", jnp.float8_e4m3fn),
    "triton_prefill_int8": functools.partial(attention_quantised, "prefill_16", jnp.int8),
    "triton_prefill_fp8": functools.partial(attention_quantised, "prefill_16", jnp.float8_e4m3fn),
    "prefill_16": prefill,
    "prefill_8": functools.partial(prefill, 8),
    "prefill_128_width_256": functools.partial(prefill, 128, 256),
    "triton_prefill_16": functools.partial(prefill, implementation="triton"),
    "triton_prefill_width_256": functools.partial(prefill, 16, 256, "triton"),
    "decode_width_64": functools.partial(decode, 16, 64),
    "decode_width_256": functools.partial(decode, 16, 256),
    **{
        f"decode_int8_width_{width}": functools.partial(attention_quantised, f"{kind}_{width}", jnp.int8)
        for kind, width in (("decode_width", 64), ("decode_width", 256), ("wide_decode", 512))
    },
    "wide_decode_512": functools.partial(decode, 16, 512),
    "wide_decode_1024": functools.partial(decode, 16, 1024),
    "wide_prefill_512": functools.partial(prefill, 16, 512),  # Gemma 4's full attention
    "wide_prefill_1024": functools.partial(prefill, 16, 1024),
    "decode_f32": functools.partial(float32, "decode_16"),
    "triton_prefill_f32_width_256": functools.partial(float32, "triton_prefill_width_256"),
    "mosaic_decode_16": functools.partial(decode, implementation="mosaic"),
    "mosaic_decode_128_width_256": functools.partial(decode, 128, 256, "mosaic"),
    "append": lambda: (
        kernel("append_kv"), (pool_of(), i32(), *[bf16(256, KV_HEADS, WIDTH)] * 2, i32(256)), (0,)
    ),
    "append_int8": functools.partial(append_quantised, jnp.int8),
    "rope_append": rope_append,
    "rope_append_int8": functools.partial(rope_append, jnp.int8),
    "copy": lambda: (kernel("copy_blocks"), (pool_of(), i32(64), i32(64), i32()), (0,)),
    "copy_partial": lambda: (kernel("copy_blocks"), (pool_of(), i32(64), i32(64), i32(), i32(64)), (0,)),
    "gather": lambda: (kernel("gather_blocks"), (pool_of(), i32(64)), ()),
    "scatter": lambda: (
        kernel("scatter_blocks"), (pool_of(), bf16(64, *pool_of().shape[1:]), i32(64), i32()), (0,)
    ),
    "mosaic_copy": lambda: moved("copy_blocks", i32(64), i32(64), i32(), donate=(0,)),
    "mosaic_gather": lambda: moved("gather_blocks", i32(64)),
    "mosaic_scatter": lambda: moved("scatter_blocks", bf16(64, *pool_of().shape[1:]), i32(64), i32(), donate=(0,)),
    "mosaic_decode_int8": functools.partial(attention_quantised, "mosaic_decode_16", jnp.int8),
    "mosaic_decode_fp8": functools.partial(attention_quantised, "mosaic_decode_16", jnp.float8_e4m3fn),
    "mosaic_append": functools.partial(by_mosaic, "append_kv", "append"),
    "mosaic_rope_append": functools.partial(by_mosaic, "rope_append", "rope_append"),
    "latent_decode": functools.partial(latents, "decode_16"),
    "latent_decode_128": functools.partial(latents, "decode_16", 128),
    "latent_decode_int8": functools.partial(latents, "decode_16", dtype=jnp.int8),
    "latent_prefill": functools.partial(latents, "prefill_16"),
    "latent_prefill_128": functools.partial(latents, "prefill_16", 128),
    "latent_prefill_int8": functools.partial(latents, "prefill_16", dtype=jnp.int8),
    "latent_append": lambda: (
        lambda pool, layer, latent, slots: kernel("append_kv")(pool, layer, latent, None, slots),
        (bf16(*pool_of().shape[:2], 1, 1, 16, 576), i32(), bf16(256, 1, 576), i32(256)), (0,),
    ),
    "step": whole_step,
    "step_scanned": functools.partial(whole_step, scan=True),
    "step_sharded": sharded_step,
    "step_context": functools.partial(sharded_step, 2),
}  # fmt: skip
GPUS: dict[str, dict[str, int]] = {"step_sharded": {"x": 4}, "step_context": {"x": 2, "c": 2}}  # all others: one


def on_gpus(target: str, gpus: dict[str, int], args, *specs):
    """The arguments on a mesh of GPUs, divided by a prefix of specs if it is given, and the mesh."""
    layout = f"1x1x{math.prod(gpus.values())}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGETS[target][1], topology=layout)
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(*gpus.values(),), axis_names=(*gpus,))

    def put(arg, spec):
        return jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(put, args, jax.tree.broadcast(specs[0] if specs else P(), args)), mesh


def host_flags(tree: Any) -> list[bool]:
    """Whether each leaf of a tree belongs to the host's pools."""
    parts = jax.tree.leaves(tree, is_leaf=_is_on_host)
    return [_is_on_host(part) for part in parts for _ in jax.tree.leaves(part)]


def _is_on_host(part: Any) -> bool:
    return isinstance(part, HostPools)


def with_host_pools(function):
    """The function, with all host pools among its arguments in host memory."""

    def call(*args):
        def put(part):
            return jax.device_put(part, jax.memory.Space.Host) if _is_on_host(part) else part

        return function(*jax.tree.map(put, args, is_leaf=_is_on_host))

    return call


def mark_memories(lowered: Any, arguments: list[bool], results: list[bool]) -> None:
    """Puts arguments and results of a lowered program in pinned host memory, by a flag for each leaf.

    jax does not pass on the memory kind of a ShapeDtypeStruct if it has no device to ask.
    """
    ir = importlib.import_module("jax._src.lib.mlir").ir
    module = lowered.compiler_ir()

    def marked(attributes, flags):
        leaves = [{x.name: x.attr for x in map(old.__getitem__, range(len(old)))} for old in attributes]
        for leaf, is_on_host in zip(leaves, flags, strict=True):
            leaf["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host" if is_on_host else "device")
        return ir.ArrayAttr.get([ir.DictAttr.get(leaf) for leaf in leaves])

    with module.context:
        (main,) = [x for x in module.body.operations if str(x.attributes["sym_name"]) == '"main"']
        main.attributes["arg_attrs"] = marked(main.attributes["arg_attrs"], arguments)
        main.attributes["res_attrs"] = marked(main.attributes["res_attrs"], results)


def compile_for(mesh, function, args, donate, dump: str, **options):
    """The lowered and the compiled program. XLA writes its dump to the folder `dump`, and `options` are XLA's."""
    flags = host_flags(args)
    function = with_host_pools(function) if any(flags) else function
    with lowering_for("cuda"), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=donate, keep_unused=any(flags)).lower(*args)
    if any(flags):
        mark_memories(lowered, flags, host_flags(lowered.out_info))
    return lowered, lowered.compile({"xla_dump_to": dump, **options})


def account(ptx: pathlib.Path, target: str, sizes: dict[str, tuple[int, int, int]]) -> dict[str, dict[str, int]]:
    """ptxas's report on each Pallas kernel of a file, and the counts of its loop.

    `sizes` has the programs of each kernel, their threads, and their bytes of shared memory.
    """
    arch, cubin = TARGETS[target][0], ptx.with_suffix(".cubin")
    (ptxas,) = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/bin/ptxas")][:1]
    command = [ptxas, "-v", f"-arch={arch}", str(ptx), "-o", str(cubin)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    text, kernels, loops = ptx.read_text(), {}, gpu_sass.loops_of(gpu_sass.disassembled(cubin))
    for name, stack, stores, loads, registers in re.findall(
        r"function '(\w+(?:_attention|_kv|_append|_blocks|_tiles)(?:_mosaic_gpu_kernel)?)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        output, re.DOTALL,
    ):  # fmt: skip
        body = text[text.index(f".entry {name}") :]
        body = body[: body.find(".entry ", 10)]
        kernels[name.removesuffix("_mosaic_gpu_kernel")] = {
            "registers": int(registers), "stack": int(stack), "spills": int(stores) + int(loads),
            "async_copies": len(re.findall(r"cp\.async\.cg\S* .*0x10", body)),
            "bulk_copies": len(re.findall(r"cp\.async\.bulk\.tensor\S*complete_tx", body)),
            "warpgroup_products": len(re.findall(r"wgmma\.mma_async", body)),
            "products": len(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*", body)),
            "wide_stores": len(re.findall(r"st\.global\S*\.v4\.b32", body)),
            **(gpu_sass.loop_counts(loops[name][0]) if loops[name] else {}),
        }  # fmt: skip
        if name in sizes:
            kernels[name]["programs"], *size = sizes[name]
            kernels[name]["resident"] = gpu_sass.resident(int(registers), *size, target)
    return kernels


def launched(dump: pathlib.Path) -> dict[str, tuple[int, int, int]]:
    """The programs of each kernel of a dumped program, their threads, and their bytes of shared memory."""
    text = "".join(path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    launches = re.findall(r"\] (\w+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)", text)
    return {
        name: (*(math.prod(map(int, size.split(","))) for size in sizes), int(shared))
        for name, *sizes, shared in launches
    }


def collectives(text: str) -> list[str]:
    """The operations between GPUs of a compiled program, each with its part of the model."""
    operations = []
    for line in text.splitlines():
        kind = re.search(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(", line)
        if kind:
            where = re.search(r"layer\d+/\w+", line) or re.search(r'op_name="[^"]*"', line)
            operations.append(f"{kind[1]} in {where[0] if where else 'no place'}")
    return operations


def launches(text: str) -> dict[str, int]:
    """Counts of a program's entry: kernels, stops (the device waits for the host), and copies of large arrays."""
    entry = text[text.index("\nENTRY ") :]
    names = "fusion|custom-call|scatter|sort|reduce|dot|convolution|all-reduce"
    unbounded = [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line]
    copied = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]\S* copy\(", text)]
    return {
        "launches": len(re.findall(rf" (?:{names})\(", entry[: entry.index("\n}")])),
        "stops": len(unbounded) + len(re.findall(r" conditional\(", text)),
        "large_copies": sum(size >= 8192 for size in copied),
    }


def layer_bytes(args) -> int:
    """Bytes of a layer's weights, if a model is among the arguments. Its layers are equal, stacked or not."""
    layers = [arg.layers for arg in args if isinstance(arg, Decoder)]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers)) // LAYERS


def measure(target: str, case: str) -> dict[str, Any]:
    """Compiles a case, and returns its measurements."""
    function, args, donate, *specs = CASES[case]()
    args, mesh = on_gpus(target, GPUS.get(case, {"x": 1}), args, *specs)
    with tempfile.TemporaryDirectory() as dump:
        os.environ["MOSAIC_GPU_DUMP_TO"] = dump
        lowered, compiled = compile_for(mesh, function, args, donate, dump, xla_dump_emitter_re=".*")
        kernels: dict[str, dict[str, int]] = {}
        sizes = launched(pathlib.Path(dump))
        for ptx in pathlib.Path(dump).rglob("*.ptx"):
            kernels |= account(ptx, target, sizes)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = max(jax.tree.leaves(args), key=lambda a: (len(a.shape), a.size))  # without a pool, the largest array
    part = pool.sharding.shard_shape(pool.shape)  # one GPU's part of it
    moved = re.findall(rf"\w+\[{','.join(map(str, part))}\]\S* (copy|dynamic-slice|dynamic-update-slice)\(", text)
    return {
        "case": case, "kernels": kernels, "pool": math.prod(part) * pool.dtype.itemsize, "pool_copies": len(moved),
        "layer": layer_bytes(args), "temporaries": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes,
        "emitted": sorted(set(re.findall(r'custom_call @"?([\w$.]*(?:triton|mosaic)[\w$.]*)', lowered.as_text()))),
        "collectives": sorted(collectives(text)), **launches(text),
    }  # fmt: skip


def prepare() -> None:
    """Settings to compile for GPUs. A process has to make them before anything else."""
    warnings.filterwarnings("ignore", message=".*[Tt]riton.*")
    # With dumps XLA's warnings have stack traces. llvm-symbolizer, if installed, takes seconds for each.
    os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"


if __name__ == "__main__":
    prepare()
    for name in sys.argv[2:]:
        print(json.dumps(measure(sys.argv[1], name)), flush=True)
