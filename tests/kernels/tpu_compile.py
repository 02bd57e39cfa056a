# SPDX-License-Identifier: Apache-2.0
"""Compiles programs for TPUs on a machine that has none.

    python -m tests.kernels.tpu_compile FOLDER [TARGET ...]    all cases, or those of some targets, and the page
    python -m tests.kernels.tpu_compile one TARGET CASE ...    prints the results of some cases
    python -m tests.kernels.tpu_compile limit TARGET CASE      prints the least memory that the compiler asks for

Needs libtpu, which `make tpu-check` installs into an environment of its own. Each case's result is a line of JSON: the
bytes of its pools and of its temporaries, the bytes of its code, the CPU's seconds to compile, and its collectives. The
folder has a file for each target. A program that it has with the same versions of jax and libtpu is not compiled again.
A case that ends with "mesh" is divided over the four chips of a 2 x 2 slice by kv heads, and its bytes are of one chip.

Temporaries are all that a program allocates on a chip beyond its arguments and results, with the gaps between them. The
`temp_size_in_bytes` of libtpu has these gaps twice. A chip without memory makes the compiler tell what it needs.
"""

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
import kvjax.serving
import pallas_kernels
from kvjax import tiers
from kvjax.events.log import init_log
from kvjax.pools import host, stage
from kvjax.pools.device import Pools
from kvjax.pools.placement import Placement
from kvjax.serving import init_serving, worst_step
from kvjax.serving.decode import Rows, decode, decode_log
from kvjax.verbs.adopt import adopt, finish_adoption
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from models.placement import partition_spec

# Slices of four chips. A v4 and a v5p also have a third axis.
TARGETS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LIMIT = 0.2  # of the pools' bytes, for temporaries
# The bundled model has tiny blocks, so the index is large beside them: a copy of its tokens takes 4 % of the pool.
LIMITS = {"serve_tiers_tokens": 0.3}
WITH_MODEL = "block", "step", "serve", "rollout"  # the first words of cases
SEPARATE = *WITH_MODEL, "verbs"  # the first words of cases that take long to compile
BLOCKS_OF = Pools, host.HostPools, stage.Staged
ROWS, HEADS, KV_HEADS, WIDTH, LENGTH, LAYERS, BLOCKS, MOVED = 16, 32, 8, 128, 2048, 2, 2048, 8


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def spec_of(width=WIDTH, kv_heads=KV_HEADS, **options) -> kvjax.CacheSpec:
    layers = [kvjax.LayerSpec(kv_heads, width)] * LAYERS
    options = {"num_blocks": BLOCKS, "max_seqs": ROWS, "max_length": LENGTH, "block_size": 16, **options}
    return kvjax.make_spec(layers, **options)


def cache_of(**options) -> kvjax.Cache:
    return jax.eval_shape(lambda: kvjax.Cache.create(spec_of(**options)))


def admit(**options):
    """A prompt of 1,024 tokens enters, with the copies of blocks."""

    def run(cache, tokens, length, row):
        return cache.admit(row, tokens, length)

    return run, (cache_of(**options), i32(1024), i32(), i32()), (0,)


def gather(**options):
    return lambda pools, rows: stage.gather(pools, [rows]), (cache_of(**options).pools, i32(MOVED)), ()


def scatter(**options):
    def run(pools, staged, rows, count):
        return stage.scatter(pools, staged, [rows], [count])

    pools = cache_of(**options).pools
    staged = jax.eval_shape(lambda pools: stage.gather(pools, [jnp.zeros(MOVED, jnp.int32)]), pools)
    return run, (pools, staged, i32(MOVED), i32()), (0,)


def write(width=WIDTH, **options):
    """The K/V of 64 tokens each of two rows enter a layer."""

    def run(cache, k, v, counts, rows):
        return cache.replace(pools=kvjax.write(cache.pools, 1, k, v, cache.view(counts, 64, rows)))

    kv = bf16(2, 64, KV_HEADS, width)
    return run, (cache_of(width=width, **options), kv, kv, i32(2), i32(2)), (0,)


def verbs(**options):
    """All verbs but admit and those of tiers, one after the other. Other cases too have extend, commit and trim."""

    def run(cache, tokens, seqs, ids, flags):
        state = cache.state
        has_block = flags[: tokens.size // state.spec.block_size]
        row = seqs[0]
        num_tokens = jnp.ones_like(seqs)
        found = kvjax.lookup(state, tokens, tokens[0])
        state, extended = kvjax.extend(state, seqs > 0)
        state, _ = kvjax.commit(state, tokens[: seqs.size, None], num_tokens, seqs=seqs)
        state, _ = kvjax.trim(state, seqs > 0, max_tokens=1)
        state, _ = kvjax.fork(state, row, seqs[1])
        state, _ = kvjax.beam_step(state, seqs[:4], seqs[:4])
        state, _ = kvjax.truncate(state, row, tokens[0])
        state, _ = kvjax.thin(state, row, flags)
        state, _ = kvjax.pin(state, ids)
        state, _ = kvjax.unpin(state, ids)
        state, adopted = adopt(state, tokens, tokens[0], has_block)
        state, _ = finish_adoption(state, adopted.adopted, has_block)
        state, _ = kvjax.release(state, seqs)
        state, _ = kvjax.evict(state, ids)
        state, _ = kvjax.forget_namespaces(state, ids)
        state, _ = kvjax.reset(state)
        return cache.replace(state=state, pools=kvjax.apply(cache.pools, extended)), found

    cache = cache_of(num_host_blocks=BLOCKS, thinning=True, **options)
    flags = jax.ShapeDtypeStruct((LENGTH // cache.state.spec.block_size,), jnp.bool_)
    return run, (cache, i32(256), i32(ROWS), i32(MOVED), flags), (0,)


def verbs_of_tiers(**options):
    """The verbs of `kvjax.tiers`, one after the other."""

    def run(cache, seq, ids, num_empty):
        state = cache.state
        for move in (tiers.offload, tiers.onboard):
            state, moved = move(state, ids)
            state, _ = tiers.complete(state, moved.transfer, moved.ok)
        state, _ = tiers.watermark(state, num_empty, max_blocks=MOVED)
        state, copied = tiers.backup(state, max_blocks=MOVED)
        state, _ = tiers.complete(state, copied.transfer, copied.ok)
        for swap in (tiers.swap_out, tiers.swap_in):
            state, _ = swap(state, seq)
        return cache.replace(state=state)

    cache = cache_of(num_host_blocks=BLOCKS, backups=True, **options)
    return run, (cache, i32(), i32(MOVED), i32()), (0,)


def small_llama(width=WIDTH) -> Any:
    """A decoder with few weights: XLA turns some of them, which counts among the temporaries."""
    config = ModelConfig("llama", 1024, 512, 1024, HEADS, (LayerConfig(KV_HEADS, width),) * LAYERS)
    return jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def block(width=WIDTH, steps=8, **options):
    """A block of decode steps: extend, eight times view, rope_write, attend and a choice of tokens, commit, trim."""
    cache = cache_of(width=width, **options)
    flags = jax.ShapeDtypeStruct((ROWS,), jnp.bool_)
    rows = Rows(i32(ROWS), flags, i32(ROWS), jax.ShapeDtypeStruct((ROWS,), jnp.uint32))
    log = jax.eval_shape(lambda: decode_log(cache.state.spec, steps))

    def run(model, cache, rows, log, stop):
        return decode(model, cache, rows, log, steps=steps, stop=stop, sampling=None, k=steps)

    return run, (small_llama(width), cache, rows, log, i32(2)), (1, 3)


def step(width=WIDTH, **options):
    """A step of `kvjax.step`: 64 tokens each of two rows."""
    return kvjax.step, (small_llama(width), cache_of(width=width, **options), i32(2, 64), i32(2), i32(2)), (1,)


def serve(in_program=False, **options):
    """The loop of the scheduler around the bundled model, for 256 requests in 16 rows.

    With `in_program` the loop moves blocks between the tiers.
    """
    config = ModelConfig("qwen2", 249, 96, 192, 4, (LayerConfig(2, 32),) * 2)
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    options = {"num_blocks": 4 * BLOCKS, "max_seqs": ROWS, "max_length": LENGTH, "dtype": "float32", **options}
    spec = kvjax.make_spec(model.layer_specs(), **options)
    scheduler = kvjax.serving.Scheduler(k=8, chunk=256, chunk_rows=4)
    requests = jax.eval_shape(lambda: init_serving(kvjax.Cache.create(spec), [spec.max_length] * 256, greedy=True))
    if in_program:
        requests = requests.replace(host_pools=host_pools(requests.cache.pools))
    log = jax.eval_shape(lambda: init_log(4 * worst_step(spec, scheduler), spec.block_size))

    def run(model, requests, log, steps):
        return kvjax.serving.serve(model, requests, log, scheduler=scheduler, steps=steps)

    return run, (model, requests, log, i32()), (1, 2)


def rollout(**options):
    """Eight completions of 64 tokens for each of two prompts."""

    def run(model, cache, prompts, lengths):
        return kvjax.serving.rollout(model, cache, prompts, lengths, max_new_tokens=64, samples=8)

    return run, (small_llama(), cache_of(**options), i32(2, 128), i32(2)), (1,)


def host_pools(pools: Pools) -> host.HostPools:
    """The host's pools of a cache, with BLOCKS blocks."""
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct((BLOCKS, *x.shape[1:]), x.dtype), (pools.arrays, pools.scales))
    return host.HostPools(arrays[0], pools.spec, arrays[1])


def move(to_host: bool, **options):
    """64 blocks move between the tiers."""
    pools = cache_of(num_host_blocks=BLOCKS, **options).pools
    on_host = host_pools(pools)

    def run(targets, sources, index):
        return host._copy_blocks(host.arrays_of(targets, 0), host.arrays_of(sources, 0), index)

    return run, ((on_host, pools) if to_host else (pools, on_host)) + (i32(2, 64),), (0,)


# XLA turns the scales of shorter blocks.
INT8 = {"dtype": "int8", "block_size": 128, "num_blocks": BLOCKS // 4}
MAKERS = admit, gather, scatter, write, block, step
CASES = {
    "admit": admit,
    "gather": gather,
    "scatter": scatter,
    "write": write,
    "block": block,
    "step": step,
    **{f"{case.__name__}_int8": functools.partial(case, **INT8) for case in MAKERS},
    # Four times the blocks: each chip has as much of the pool as in the cases above.
    **{f"{case.__name__}_mesh": functools.partial(case, num_blocks=4 * BLOCKS) for case in MAKERS},
    **{f"{case.__name__}_tokens": functools.partial(case, layout="tokens") for case in MAKERS},
    **{
        f"{case.__name__}_tokens_64": functools.partial(case, layout="tokens", width=64)
        for case in (write, gather, block)
    },
    "verbs_tokens": functools.partial(verbs, layout="tokens"),
    "verbs_of_tiers_tokens": functools.partial(verbs_of_tiers, layout="tokens"),
    "to_host_tokens": functools.partial(move, True, layout="tokens"),
    "to_device_tokens": functools.partial(move, False, layout="tokens"),
    "serve_tokens": functools.partial(serve, layout="tokens"),
    "serve_tiers_tokens": functools.partial(
        serve, in_program=True, layout="tokens", num_host_blocks=BLOCKS, backups=True
    ),
    "rollout_tokens": functools.partial(rollout, layout="tokens"),
    "block_tokens_mesh": functools.partial(block, layout="tokens", num_blocks=4 * BLOCKS),
}


def on_tpus(topology, args, num_chips: int):
    """The arguments on a mesh of the first chips, divided by kv heads; and the mesh."""
    mesh = Mesh(np.array(topology.devices[:num_chips]), ("x",))

    def put(x, partition, memory=None):
        place = NamedSharding(mesh, partition, memory_kind=memory)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def put_weight(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return put(x, partition_spec(name, x.shape, mesh, "x"))

    def put_part(part):
        if isinstance(part, Pools) and num_chips > 1:
            part = part.replace(placement=Placement(mesh.abstract_mesh, "x"))
        if isinstance(part, BLOCKS_OF):
            memory = "pinned_host" if isinstance(part, host.HostPools) else None
            return jax.tree.map(lambda x: put(x, P(None, None, None, "x"), memory), part)
        if isinstance(part, Decoder):
            return jax.tree_util.tree_map_with_path(put_weight, part)
        return put(part, P())

    return jax.tree.map(put_part, args, is_leaf=lambda x: isinstance(x, (*BLOCKS_OF, Decoder))), mesh


def collectives(text: str) -> list[str]:
    """The operations between chips in a compiled program, each with the part of the model that it belongs to."""
    pattern = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
    matches = [(match[1], line) for line in text.splitlines() if (match := re.search(pattern, line))]
    places = [re.search(r'op_name="([^"]*)"', line) for _, line in matches]
    return [f"{kind} in {place[1] if place else 'no place'}" for (kind, _), place in zip(matches, places, strict=True)]


def cases_of(target: str) -> list[str]:
    """The cases to compile for a kind of chip. The older chips get the layout that a process with a TPU chooses."""
    return [case for case in CASES if target in ("v5e", "v6e") or "tokens" in case]


def lower(target: str, case: str) -> tuple[Any, jax.stages.Lowered]:
    """The arguments of a case on its chips, and its program."""
    function, args, donate = CASES[case]()
    topology = topologies.get_topology_desc(TARGETS[target], "tpu")
    args, mesh = on_tpus(topology, args, 4 if case.endswith("mesh") else 1)
    with pallas_kernels.lowering_for("tpu"), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return args, jax.jit(function, donate_argnums=donate).lower(*args)


def measure(target: str, case: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Compiles a case, and returns its measurements, or those that are known of its program."""
    args, lowered = lower(target, case)
    program = hashlib.sha256(f"{lowered.as_text()} {versions()}".encode()).hexdigest()
    if known.get(case, {}).get("program") == program:
        return known[case]
    begin = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - begin
    memory = compiled.memory_analysis()
    without_temporaries = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    pools = [part for part in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, Pools)) if isinstance(part, Pools)]
    arrays = [x for part in pools for x in jax.tree.leaves(part)]
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays]
    return {
        "case": case,
        "program": program,
        "pool": sum(sizes),
        "temporaries": memory.total_allocation_bytes - without_temporaries,
        "temp_size": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "seconds": round(seconds, 1),
        "collectives": sorted(collectives(compiled.as_text())),
    }


def compare_with_limit(target: str, case: str) -> dict[str, float]:
    """MiB that a program allocates, by its memory analysis and by the compiler's refusal of a chip with 1 MiB."""
    _, lowered = lower(target, case)
    memory = lowered.compile().memory_analysis()
    try:
        lowered.compile(compiler_options={"xla_tpu_max_hbm_size_mib": 1})
    except jax.errors.JaxRuntimeError as error:
        match = re.search(r"memory required for HLO temporaries \(([0-9.]+)M\)", str(error))
        if match is None:
            raise
        return {"analysis": memory.total_allocation_bytes / 2**20, "refusal": float(match[1])}
    raise AssertionError(f"{case} fits on a {target} with 1 MiB of memory")


PAGE = """\
<!-- `make tpu-check` has written this page: edit no figure. -->

# Compiled for TPUs

**Compiled, not run.** No figure on this page is a speed. jax {jax} and libtpu {libtpu} compiled each program on a
machine without a TPU. A cell has the bytes of temporaries in % of the pool's. A test holds a limit of {limit:.0%}.

An empty cell was not compiled: v4 and v5p get the layout that a process with a TPU chooses. The pool is {pool} MiB of
K/V: {layers} layers, {kv_heads} kv heads of width {width} in bfloat16, blocks of 16 tokens. Heads of width 64 have
half of it, and int8 has blocks of 128 tokens. Code and seconds, the CPU's, are those of the first chip with a figure.

The limit of **serve tiers** is {tiers_limit:.0%}. No large temporary there has bytes of the pool. The bundled model has
tiny blocks, so the index is large beside them: copies of its tokens, i32[10240, 16], take 5 MiB each, because a TPU
fills rows of 16 elements up to 128.

Temporaries are all that a program allocates on a chip beyond its arguments and results. The compiler leaves gaps
between them, which count. libtpu's `temp_size_in_bytes` counts gaps twice: {twice_case} on a {twice_target} would have
{twice}, not {once}. A test compares this measure with the memory that the compiler asks for when it refuses a chip.

The programs:

- **admit**: a prompt of 1,024 tokens enters, with the copies of blocks. **write**: K/V of 128 tokens enter a layer.
- **gather** and **scatter**: 8 blocks leave the pool, or enter it. **to host** and **to device**: 64 blocks change the
  tier.
- **verbs**: all verbs but admit, one after the other, with a host tier. **verbs of tiers**: those of `kvjax.tiers`.
- **block**: a block of 8 decode steps of a small decoder, 16 rows. **step**: `kvjax.step` of 2 x 64 tokens.
- **serve**: the loop of the scheduler with the bundled model. **serve tiers**: the same loop moves blocks between the
  tiers. **rollout**: 8 completions of 64 tokens of 2 prompts.

A **mesh** is 2 x 2 chips that divide the kv heads. Names with **tokens** have `layout="tokens"`, all others "heads".

| program | {names} | MiB of code | seconds to compile |
| --- | {rules} | --- | --- |
"""


def versions() -> dict[str, str]:
    """The versions that determine a compiled program."""
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def share(result: dict[str, Any]) -> str:
    return f"{result['temporaries'] / result['pool']:.1%}"


def page(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The page of results by chip and case. Code and seconds are those of the first chip."""
    first = next(cases for cases in results.values() if "write" in cases)
    measured = [(target, cell) for target, cases in results.items() for cell in cases.values()]
    widest_target, widest = max(measured, key=lambda pair: pair[1]["temp_size"] / pair[1]["pool"])
    text = PAGE.format(
        **versions(),
        twice=f"{widest['temp_size'] / widest['pool']:.1%}",
        twice_case=widest["case"].replace("_", " "),
        twice_target=widest_target,
        once=share(widest),
        limit=LIMIT,
        tiers_limit=LIMITS["serve_tiers_tokens"],
        pool=round(first["write"]["pool"] / 2**20),
        layers=LAYERS,
        kv_heads=KV_HEADS,
        width=WIDTH,
        names=" | ".join(results),
        rules=" | ".join("---" for _ in results),
    )
    for case in CASES:
        cells = [cases.get(case) for cases in results.values()]
        shares = [share(cell) if cell else "" for cell in cells]
        leading = next((cell for cell in cells if cell), None)
        rest = [f"{leading['code'] / 2**20:.1f}", f"{leading['seconds']:.0f}"] if leading else ["", ""]
        text += f"| {case.replace('_', ' ')} | {' | '.join(shares + rest)} |\n"
    return text


def prepare() -> None:
    """Settings of a process that compiles for TPUs without one.

    libtpu asks no machine of Google's for its own description, and lets several processes compile at once.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def check(folder: pathlib.Path, target: str) -> None:
    """Compiles a target's cases into a file of the folder. The file has each result as soon as it is there."""
    file = folder / f"{target}.json"
    known = results_in(file)
    for case in cases_of(target):
        known[case] = measure(target, case, known)
        print(target, json.dumps(known[case]), flush=True)
        file.write_text("".join(f"{json.dumps(result)}\n" for result in known.values()))


def results_in(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The results of a target by case, of those cases that exist."""
    lines = file.read_text().splitlines() if file.exists() else ()
    results = {line["case"]: line for line in map(json.loads, lines)}
    return {case: results[case] for case in CASES if case in results}


def main() -> None:
    """Compiles cases; see the top of this file."""
    if sys.argv[1] == "one":
        for case in sys.argv[3:]:
            print(json.dumps(measure(sys.argv[2], case, {})), flush=True)
        return
    if sys.argv[1] == "limit":
        print(json.dumps(compare_with_limit(*sys.argv[2:])))
        return
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for target in sys.argv[2:] or TARGETS:
        check(folder, target)
    if len(sys.argv) == 2:
        results = {target: results_in(folder / f"{target}.json") for target in TARGETS}
        (pathlib.Path(__file__).parents[2] / "docs" / "performance" / "tpu.md").write_text(page(results))


if __name__ == "__main__":
    prepare()
    main()
