# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for a GPU on a machine that has none: `python -m tests.gpu_compile TARGET CASE [CASE ...]`.

Needs what scripts/gpu_toolchain.sh installs, on PYTHONPATH. One target per process; bad parameters can abort it, so
each case's result is printed as soon as it is there, a line of JSON: ptxas's account of each kernel (registers, bytes
of stack and spills), how many asynchronous 16-byte copies and matrix products are in its PTX, and the temporaries of
the whole program.
"""

import functools
import glob
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
import pallas_kernels
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder

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
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """


TARGETS = {
    "h200": ("sm_90a", _description("NVIDIA H200", 9, 132, 233472, 232448, 4_800_000_000_000, 150_000_000_000,
                                    52_428_800, 1.98, 128)),
    "a100": ("sm_80", _description("NVIDIA A100", 8, 108, 167936, 166912, 2_039_000_000_000, 85_000_000_000,
                                   41_943_040, 1.41, 64)),
}  # fmt: skip


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def pool_of(size=16, width=WIDTH):
    return bf16(ROWS * LENGTH // size + 1, LAYERS, 2, KV_HEADS, size, width)


def kernel(name, **options):
    return functools.partial(pallas_kernels.call, name, **options)


def decode(size=16, width=WIDTH):
    table = i32(ROWS, LENGTH // size)
    args = bf16(ROWS, HEADS, width), pool_of(size, width), i32(), table, i32(ROWS)
    return kernel("decode_attention", scale=width**-0.5), args, ()


def prefill(size=16, width=WIDTH):
    table, rows = i32(ROWS, LENGTH // size), i32(ROWS)
    args = bf16(LENGTH, HEADS, width), pool_of(size, width), i32(), table, rows, rows, rows
    return kernel("prefill_attention", scale=width**-0.5, max_count=LENGTH), args, ()


def whole_step():
    """A decode step of a small Llama over pools of a gigabyte: extend, copies, model, commit."""
    layers = (LayerConfig(KV_HEADS, WIDTH),) * LAYERS
    config = ModelConfig("llama", 32_000, 1024, 2048, HEADS, layers)
    model = jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=_rngs()))
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=2**12, max_seqs=ROWS, max_length=LENGTH)
    cache = jax.eval_shape(lambda: kvjax.Cache.create(spec))

    def step(model, cache, tokens):
        cache, extended = cache.extend(jnp.ones((ROWS,), jnp.bool_))
        cache, logits, committed = kvjax.step(model, cache, tokens, jnp.ones((ROWS,), jnp.int32))
        return cache, jnp.argmax(logits, axis=-1), extended, committed

    return step, (model, cache, i32(ROWS, 1)), (1,)


def _rngs():
    from flax import nnx

    return nnx.Rngs(0)


CASES = {
    "decode_16": decode,
    "decode_64": functools.partial(decode, 64),
    "decode_width_80": functools.partial(decode, 16, 80),
    "prefill_16": prefill,
    "prefill_width_256": functools.partial(prefill, 16, 256),
    "append": lambda: (
        kernel("append_kv"), (pool_of(), i32(), *[bf16(256, KV_HEADS, WIDTH)] * 2, i32(256)), (0,)
    ),
    "copy": lambda: (kernel("copy_blocks"), (pool_of(), i32(64), i32(64), i32()), (0,)),
    "gather": lambda: (kernel("gather_blocks"), (pool_of(), i32(64)), ()),
    "scatter": lambda: (
        kernel("scatter_blocks"), (pool_of(), bf16(64, *pool_of().shape[1:]), i32(64), i32()), (0,)
    ),
    "step": whole_step,
}  # fmt: skip


def compile_for(target: str, function, args, donate, dump: str):
    """Compiles for one GPU; `dump` receives the PTX."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGETS[target][1], topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*args)
    return lowered.compile({"xla_dump_to": dump, "xla_dump_emitter_re": ".*"})


def account(ptx: pathlib.Path, arch: str) -> dict[str, dict[str, int]]:
    """What ptxas says of each Pallas kernel of a file."""
    (ptxas,) = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/bin/ptxas")][:1]
    command = [ptxas, "-v", f"-arch={arch}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    text, kernels = ptx.read_text(), {}
    for name, stack, stores, loads, registers in re.findall(
        r"function '(\w+(?:_attention|_kv|_blocks))'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers", said, re.DOTALL,
    ):  # fmt: skip
        body = text[text.index(f".entry {name}") :]
        body = body[: body.find(".entry ", 10)]
        kernels[name] = {
            "registers": int(registers), "stack": int(stack), "spills": int(stores) + int(loads),
            "async_copies": len(re.findall(r"cp\.async\.cg\S* .*0x10", body)),
            "products": len(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*", body)),
            "wide_stores": len(re.findall(r"st\.global\S*\.v4\.b32", body)),
        }  # fmt: skip
    return kernels


def measure(target: str, case: str) -> dict[str, Any]:
    """Compiles one case; what came of it."""
    function, args, donate = CASES[case]()
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_for(target, function, args, donate, dump)
        kernels: dict[str, dict[str, int]] = {}
        for ptx in pathlib.Path(dump).rglob("*.ptx"):
            kernels |= account(ptx, TARGETS[target][0])
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = next(a for a in jax.tree.leaves(args) if len(a.shape) == 6)
    shape = ",".join(map(str, pool.shape))
    moved = re.findall(rf"bf16\[{shape}\]\S* (copy|dynamic-slice|dynamic-update-slice)\(", text)
    return {
        "case": case, "kernels": kernels, "pool": pool.size * pool.dtype.itemsize, "pool_copies": len(moved),
        "temporaries": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*[Tt]riton.*")
    for name in sys.argv[2:]:
        print(json.dumps(measure(sys.argv[1], name)), flush=True)
