# SPDX-License-Identifier: Apache-2.0
"""A model of a decode step on an H200, from the programs which XLA and Triton compile for it, without a GPU.

A step is `extend`, the model, `commit` and the choice of tokens, in one graph on the device. Its floor is the time to
move or multiply once: weights, K/V of all rows, logits. The time of a kernel is the longest of three: its bytes at the
bandwidth of memory, its products, and the instructions of its loop if it computes attention. Nodes of the graph follow
each other at a fixed distance. Nothing here is measured. The model leaves out the latency of kernels and caches shared
by rows. XLA chooses the tiles of its products without timing them. Bytes in the L2 cache count as memory.

The benchmark needs the compilers of `scripts/gpu_toolchain.sh`. It compiles programs of two and three layers, and their
difference stands for each further layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from benchmarks import common, gpu, gpu_step
from benchmarks.common import Bar, benchmark
from models.config import ModelConfig
from models.decoder import Decoder
from tests.kernels import gpu_compile, gpu_thunks
from tests.kernels.gpu_hlo import Module
from tests.kernels.gpu_programs import Budgets, in_scope, is_of_model

GPU, CORES = "h200", gpu_compile.MULTIPROCESSORS["h200"]
CONSTANTS = {
    "bytes_s": 4.3e12, "flops_s": 790e12, "gap_s": 1e-6, "memory_bytes": 141e9,
    "instructions_cycle": 0.6,  # of each of the four schedulers of a multiprocessor
    "cycles_s": 1.98e9,
}  # fmt: skip
INSTRUCTIONS_S = CORES * 4 * CONSTANTS["instructions_cycle"] * CONSTANTS["cycles_s"]
KINDS = {"1b": ("bfloat16",), "8b": ("bfloat16", "int8"), "tiny": ("bfloat16",)}
NAMES = {"bfloat16": "b16", "int8": "int8"}
BATCHES, LENGTHS = [1, 32, 128], [2048, 8192]
BARS = {
    f"step_{name}_{NAMES[dtype]}_b{rows}_{length}_share": Bar(
        f"floor of a step, of the step: {name.upper()}, {dtype}, {rows} x {length:,} tokens", "share"
    )
    for name in ("1b", "8b")
    for rows in BATCHES
    for length in LENGTHS
    for dtype in KINDS[name]
}
FEW, MORE = 2, 3  # layers of the programs, so that one has a layer more in the middle


class Node(NamedTuple):
    """A node of a step's graph: the name of its kernel, without a number, or "copy".

    Attributes:
      is_of_model: whether the model runs it. Other nodes keep the cache's books or choose tokens.
      bytes: bytes read and written, except K/V.
      flops: FLOPs of products, except attention's.
      kv_instructions: warp instructions of attention for each byte of K/V.
    """

    kernel: str
    is_of_model: bool
    bytes: int
    flops: int = 0
    kv_instructions: float | None = None


class Attention(NamedTuple):
    """The work of a layer's attention: bytes of K/V, bytes of their scales, and products."""

    kv_bytes: int
    scale_bytes: int
    flops: int


class Sums(NamedTuple):
    """Sums over nodes: seconds of kernels and the number of nodes, inside and outside of the model."""

    kernels_s: float = 0.0
    nodes: float = 0
    around_s: float = 0.0
    around_nodes: float = 0


class Estimate(NamedTuple):
    """Modelled microseconds of a step."""

    floor: float
    kernels: float
    gaps: float
    bookkeeping: float

    @property
    def step(self) -> float:
        return self.kernels + self.gaps + self.bookkeeping

    @property
    def share(self) -> float:
        """The floor's share of the step."""
        return self.floor / self.step


def seconds(node: Node, attention: Attention) -> float:
    """The modelled time of a kernel."""
    moved = node.bytes
    flops = node.flops
    instructions = 0.0
    if node.kv_instructions is not None:
        moved += attention.kv_bytes + attention.scale_bytes
        flops += attention.flops
        instructions = node.kv_instructions * attention.kv_bytes
    return max(moved / CONSTANTS["bytes_s"], flops / CONSTANTS["flops_s"], instructions / INSTRUCTIONS_S)


def sums(small: Iterable[Node], large: Iterable[Node], layers: int, attention: Attention) -> Sums:
    """The sums for a program of `layers` layers, from the nodes of its programs of two and three layers."""
    both = []
    for nodes in (small, large):
        took = [(seconds(node, attention), node.is_of_model) for node in nodes]
        of_model_s, around = ([s for s, of_model in took if of_model == which] for which in (True, False))
        both.append((sum(of_model_s), len(of_model_s), sum(around), len(around)))
    return Sums(*(two + (layers - FEW) * (three - two) for two, three in zip(*both, strict=True)))


def estimate(
    small: Sequence[Node], large: Sequence[Node], layers: int, attention: Attention, floor_s: float
) -> Estimate:
    """The estimate for a model of `layers` layers, from the nodes of its programs of two and three layers."""
    totals = sums(small, large, layers, attention)
    gap = CONSTANTS["gap_s"]
    around = totals.around_s + gap * totals.around_nodes
    return Estimate(*(1e6 * s for s in (floor_s, totals.kernels_s, gap * totals.nodes, around)))


class Step(NamedTuple):
    """A decode step of `rows` rows with `length` tokens each, over K/V of a dtype."""

    config: ModelConfig
    dtype: str
    rows: int
    length: int

    def spec(self) -> kvjax.CacheSpec:
        """A cache for the rows and the next block of each."""
        config = self.config
        tokens = self.length + 16
        specs = shape_of(config, max(len(config.layers), MORE)).layer_specs()
        return kvjax.make_spec(
            specs, num_blocks=self.rows * -(-tokens // 16), max_seqs=self.rows, max_length=tokens, dtype=self.dtype
        )

    def attention(self) -> Attention:
        """The work of a layer."""
        layer = self.config.layers[0]
        (pool,) = self.spec().groups[0].pools
        tokens = self.rows * self.length
        width = layer.head_dim
        kv = tokens * 2 * layer.kv_heads * width * jnp.dtype(self.dtype).itemsize
        layer_bytes = tokens * pool.block_bytes(16) // (16 * len(pool.layers))
        return Attention(kv, layer_bytes - kv, 4 * tokens * self.config.num_heads * width)

    def floor_bytes(self) -> int:
        """Bytes to move once: weights, K/V of all rows, logits in float32."""
        attention = self.attention()
        logits = 4 * self.rows * self.config.vocab_size
        kv = len(self.config.layers) * (attention.kv_bytes + attention.scale_bytes)
        return gpu_step.weight_bytes(shape_of(self.config)) + kv + logits

    def floor_s(self) -> float:
        """The longer of two times: to move these bytes, and to compute all products."""
        weights = gpu_step.weight_bytes(shape_of(self.config)) // 2  # bf16
        flops = 2 * self.rows * weights + len(self.config.layers) * self.attention().flops
        return max(self.floor_bytes() / CONSTANTS["bytes_s"], flops / CONSTANTS["flops_s"])

    @property
    def fits(self) -> bool:
        """Whether weights and pools fit into one GPU's memory."""
        held = shape_of(self.config), jax.eval_shape(lambda: kvjax.init_pools(self.spec()))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held)) < CONSTANTS["memory_bytes"]


@functools.cache
def shape_of(config: ModelConfig, layers: int | None = None) -> Decoder:
    """The shapes of a model, or of a model with another number of its layers."""
    config = config if layers is None else dataclasses.replace(config, layers=config.layers[:1] * layers)
    return jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def compile_step(step: Step, layers: int) -> tuple[list[Node], dict[str, dict[str, int]]]:
    """Compiles a step with `layers` layers for an H200, over the pools of the whole model.

    Returns:
      The nodes of the step, and ptxas's report on each kernel of attention.
    """
    cache = jax.eval_shape(lambda: kvjax.Cache.create(step.spec()))

    def run(model, cache, tokens):
        cache, extended = cache.extend(jnp.ones((step.rows,), jnp.bool_))
        called = jax.tree_util.Partial(in_scope, model)
        cache, logits, committed = kvjax.step(called, cache, tokens, jnp.ones((step.rows,), jnp.int32))
        return cache, jnp.argmax(logits, axis=-1), extended, committed

    args, mesh = gpu_compile.on_gpus(
        GPU, {"x": 1}, (shape_of(step.config, layers), cache, gpu_compile.i32(step.rows, 1))
    )
    options = {**gpu.DECIDES["device"], "xla_dump_emitter_re": "ptx"}
    with tempfile.TemporaryDirectory() as dump:
        _, compiled = gpu_compile.compile_for(mesh, run, args, (1,), dump, **options)
        folder = pathlib.Path(dump)
        hlo = compiled.as_text()
        sizes = {x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.pools)}
        kernels: dict[str, dict[str, int]] = {}
        for ptx in folder.glob("*.ptx"):
            if re.search(r"\.entry \w*decode_attention", ptx.read_text()):
                kernels |= gpu_compile.account(ptx, GPU, gpu_compile.launched(folder))
        return nodes_of(gpu_thunks.read(folder, hlo), Module(hlo, sizes), kernels), kernels


def nodes_of(root: gpu_thunks.Thunk, module: Module, kernels: dict[str, dict[str, int]]) -> list[Node]:
    """The nodes of a program: its kernels and copies, except in parts skipped by most steps.

    Raises:
      ValueError: if nodes run in a loop, so a node is many launches.
    """
    rare = Budgets().rare
    usual = gpu_thunks.usual(root, rare)
    thunks = [thunk for thunk in usual if thunk.is_kernel or thunk.kind in gpu_thunks.COPIES]
    if len(thunks) != gpu_thunks.count(root, rare)["launches"]:
        raise ValueError("kernels in a loop")
    nodes = []
    for thunk in thunks:
        cost = module.cost(thunk.instruction)
        name = thunk.kernel if thunk.is_kernel else "copy"
        of_model = is_of_model(thunk) or module.is_in(thunk.instruction, "/model/")
        instructions = instructions_of(kernels[name]) if cost.reads_pool else None
        nodes.append(Node(re.sub(r"_\d+|(?<=_remat)\d+", "", name), of_model, cost.bytes, cost.flops, instructions))
    return nodes


def instructions_of(kernel: dict[str, int]) -> float:
    """Warp instructions for a byte of K/V, as if all multiprocessors had as many programs as the busiest."""
    programs = kernel["programs"]
    return kernel["instructions_32kb"] / 32_768 * CORES * -(-programs // CORES) / programs


def by_kernel(small: Sequence[Node], large: Sequence[Node], layers: int, attention: Attention) -> dict[str, float]:
    """Modelled microseconds of each kernel, all its launches in a step together, without gaps, in falling order."""
    took = {}
    for kernel in {node.kernel for node in (*small, *large)}:
        of_kernel = ([node for node in nodes if node.kernel == kernel] for nodes in (small, large))
        totals = sums(*of_kernel, layers, attention)
        took[kernel] = common.rounded(1e6 * (totals.kernels_s + totals.around_s))
    return dict(sorted(took.items(), key=lambda item: -item[1]))


def find_compilers() -> bool:
    """Lets this process compile for GPUs, but run on none. Returns False if there are no compilers."""
    gpu_compile.prepare()
    sys.path.insert(0, str(gpu_compile.TOOLCHAIN))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for another device cannot be read again
    return (gpu_compile.TOOLCHAIN / ".installed").exists()


SIZES = {"models": (["1b", "8b"], ["tiny"]), "batches": (BATCHES, [2]), "lengths": (LENGTHS, [64])}


@benchmark(BARS, SIZES)
def measure(size):
    notes: dict[str, Any] = {"device": "none: a model of an H200", "constants": CONSTANTS}
    if not find_compilers():
        yield notes | {"not_measured": "no CUDA compiler for this jaxlib (scripts/gpu_toolchain.sh)"}
        return
    for name, rows, length in itertools.product(size.models, size.batches, size.lengths):
        for dtype in KINDS[name]:
            step = Step(gpu_step.CONFIGS[name], dtype, rows, length)
            label = f"step_{name}_{NAMES[dtype]}_b{rows}_{length}"
            if not step.fits:
                notes.setdefault("left_out", {})[label] = "weights and pools take more than a GPU's memory"
                continue
            (small, _), (large, kernels) = (compile_step(step, layers) for layers in (FEW, MORE))
            layers = len(step.config.layers)
            attention = step.attention()
            took = estimate(small, large, layers, attention, step.floor_s())
            common.require(took.share < 1, f"{label}: {took.step} µs, less than the floor of {took.floor}")
            yield {f"{label}_{part}_us": us for part, us in {**took._asdict(), "step": took.step}.items()}
            yield {f"{label}_share": took.share}
            notes.setdefault("kernels_us", {})[label] = by_kernel(small, large, layers, attention)
            notes.setdefault("attention", {})[label] = kernels
    yield notes
