# SPDX-License-Identifier: Apache-2.0
"""Counts the kernels of whole programs on a GPU, without a GPU: `python -m tests.kernels.gpu_programs [PROGRAM ...]`.

Prints a table of all programs or of the named programs, or with --json a line of JSON for each. Needs the packages of
scripts/gpu_toolchain.sh on PYTHONPATH. `gpu_thunks.count` describes the counts. The parts of a decode loop are `block`,
a block of steps without its steps, with the loop of blocks itself; `step`, a step without the model, with the loop of
steps itself; `start`, everything before and after the loop; and `model`. `block` and `step` include the stop of their
loop. The scheduler's loop also has `mixed`, the additions of a mixed step with its model, and `seldom`, which releases,
preempts and admits. A step of three layers has `middle`, the second layer.

tests/data/gpu_step_budgets.json has a budget for each count, by version of jaxlib, and the bars and aims to which
budgets should come down. --update writes the measured counts there. `rare` names loops which usually do not turn, by
parts of their scopes.
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import kvjax
from benchmarks import gpu
from kvjax.events.log import init_log
from kvjax.pools.host import HostPools
from kvjax.serving import Scheduler, init_serving, ngram, serve, worst_step
from kvjax.serving.decode import Rows, decode, decode_log
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from tests.kernels import gpu_thunks
from tests.kernels.gpu_compile import (
    KV_HEADS,
    LAYER,
    ROWS,
    WIDTH,
    compile_for,
    divided,
    i32,
    launches,
    on_gpus,
    prepare,
    small_llama,
)
from tests.kernels.gpu_thunks import Counts, Thunk

BUDGETS = pathlib.Path(__file__).parents[1] / "data" / "gpu_step_budgets.json"
PARTS = ("all", "middle", "model", "start", "block", "step", "mixed", "seldom", "around")
HELD = ("stops", "kernels", "copies", "launches")  # against budgets
SHOWN = ("whiles", "conditionals", "command_buffers", "rare")
BUFFERS = gpu.DECIDES["device"]["xla_gpu_enable_command_buffer"]
VOCABULARY, STEPS, BLOCK = 32_000, 32, 16


def bookkeeping(tokens: int):
    """Extend and commit of so many tokens for each of 128 rows."""
    spec = kvjax.make_spec(num_blocks=8192, max_seqs=128, max_length=2048, block_size=BLOCK)

    def step(state, tokens, active):
        count = tokens.shape[1]
        state, extended = kvjax.extend(state, active, count)
        state, committed = kvjax.commit(state, tokens, jnp.where(active, count, 0))
        return state, extended, committed

    state = jax.eval_shape(lambda: kvjax.init(spec))
    return step, (state, i32(128, tokens), jax.ShapeDtypeStruct((128,), jnp.bool_)), (0,)


def null_model(tokens, pools, view, *, last):
    """A model with a single kernel, which takes all of a model's inputs and updates the pool, so XLA drops nothing."""
    from jax.experimental.pallas import triton as plt  # late: other programs compile without it

    ((pool,),) = pools.arrays
    inputs = [tokens, last, *jax.tree.leaves(view), pool]

    def kernel(tokens, *refs):
        *_, logits, pool = refs
        logits[0, 0] = pool[0, 0, 0, 0, 0, 0].astype(jnp.float32) + tokens[0, 0].astype(jnp.float32)

    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    logits, pool = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((len(last), VOCABULARY), jnp.float32), pool],
        in_specs=[any_memory] * len(inputs),
        out_specs=[any_memory] * 2,
        input_output_aliases={len(inputs) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        name="null_model",
    )(*inputs)
    return logits, pools.replace(arrays=((pool,),))


def in_scope(model, *args, **options):
    """A model whose kernels have a scope, to tell them from the loop's."""
    with jax.named_scope("model"):
        return model(*args, **options)


def loop(cache, model=null_model, *weights, steps=STEPS, k=BLOCK, fixed_steps=False):
    """The decode loop."""
    state = cache.state
    flags = jax.ShapeDtypeStruct((state.spec.max_seqs,), jnp.bool_)
    row = i32(*flags.shape)
    rows = Rows(row, flags, row, jax.ShapeDtypeStruct(row.shape, jnp.uint32))
    log = jax.eval_shape(lambda: decode_log(state.spec, steps))

    def run(weights, cache, rows, log, stop):
        called = jax.tree_util.Partial(in_scope, *(weights or [jax.tree_util.Partial(model)]))
        return decode(called, cache, rows, log, steps=steps, stop=stop, sampling=None, k=k, fixed_steps=fixed_steps)

    return run, (weights, cache, rows, log, i32(2)), (1, 3)


def make_cache(layers, rows=ROWS, num_blocks=4096, **options):
    spec = kvjax.make_spec(layers, num_blocks=num_blocks, max_seqs=rows, max_length=2048, block_size=BLOCK, **options)
    return jax.eval_shape(lambda: kvjax.Cache.create(spec))


def block(k: int):
    """A block of k steps around a model with a single kernel."""
    return loop(make_cache([kvjax.LayerSpec(KV_HEADS, WIDTH)], 128, 8192), steps=k, k=k)


def decoder_loop(layers=(LAYER,), fixed_steps=False, **options):
    """32 steps in blocks of 16 with a small decoder."""
    model = small_llama(layers)
    return loop(make_cache(model.layer_specs(), **options), None, model, fixed_steps=fixed_steps)


def sharded_loop():
    """The same on four GPUs."""
    run, ((model,), cache, *rest), donate = decoder_loop()
    cache, (weights, parts) = divided(model, cache)
    return run, ((model,), cache, *rest), donate, ((weights,), parts, *[P()] * len(rest))


def host_pools(pools):
    """The host's pools of a cache."""
    (group,) = pools.spec.groups
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct((group.num_host_blocks, *x.shape[1:]), x.dtype), pools.arrays)
    return HostPools(arrays, pools.spec)


def scheduled(k: int = BLOCK, drafter=None, in_program=False, **options):
    """The loop of the scheduler around a model with a single kernel: 128 rows, 256 requests.

    With `in_program` the loop moves blocks between the tiers.
    """
    cache = make_cache([kvjax.LayerSpec(KV_HEADS, WIDTH)], 128, 8192, **options)
    spec, scheduler = cache.state.spec, Scheduler(k=k, chunk=256, chunk_rows=4)
    requests = {"greedy": True, "speculates": drafter is not None}
    serving = jax.eval_shape(lambda: init_serving(kvjax.Cache.create(spec), [spec.max_length] * 256, **requests))
    if in_program:
        serving = serving.replace(host_pools=host_pools(cache.pools))
    log = jax.eval_shape(lambda: init_log(4 * worst_step(spec, scheduler), spec.block_size))

    def run(serving, log, steps):
        model = jax.tree_util.Partial(in_scope, jax.tree_util.Partial(null_model))
        return serve(model, serving, log, scheduler=scheduler, steps=steps, drafter=drafter)

    return run, (serving, log, i32()), (0, 1)


def step(model, rows=ROWS, scope=True):
    """A decode step: extend, copies, model, commit."""

    def run(model, cache, tokens):
        cache, extended = cache.extend(jnp.ones((rows,), jnp.bool_))
        called = jax.tree_util.Partial(in_scope, model) if scope else model
        cache, logits, committed = kvjax.step(called, cache, tokens, jnp.ones((rows,), jnp.int32))
        return cache, jnp.argmax(logits, axis=-1), extended, committed

    return run, (model, make_cache(model.layer_specs(), rows), i32(rows, 1)), (1,)


def layer():
    """A step of a decoder with a single layer."""
    return step(small_llama((LAYER,)))


def step_8b(rows):
    """A step of `rows` rows with three layers in the shapes of Llama 3 8B. XLA makes other kernels of wider layers."""
    config = ModelConfig("llama", 128_256, 4096, 14_336, 32, (LAYER,) * 3)
    model = jax.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return step(model, rows, scope=False)


WINDOWED = (LAYER, LayerConfig(KV_HEADS, WIDTH, window=512))
# By name: the maker, what goes into command buffers, and GPUs.
PROGRAMS: dict[str, tuple[Any, str | None, int]] = {
    "extend_commit_1": (functools.partial(bookkeeping, 1), BUFFERS, 1),
    "extend_commit_16": (functools.partial(bookkeeping, BLOCK), BUFFERS, 1),
    "block_1": (functools.partial(block, 1), BUFFERS, 1),
    "block_4": (functools.partial(block, 4), BUFFERS, 1),
    "block_16": (functools.partial(block, BLOCK), BUFFERS, 1),
    "layer": (layer, BUFFERS, 1),
    **{f"step_8b_{rows}": (functools.partial(step_8b, rows), BUFFERS, 1) for rows in (1, 32, 128)},
    "scheduled": (scheduled, BUFFERS, 1),
    "loop_buffered": (decoder_loop, BUFFERS, 1),
    "loop_unbuffered": (decoder_loop, "", 1),
    "loop_fixed": (functools.partial(decoder_loop, fixed_steps=True), "", 1),
    "loop_window": (functools.partial(decoder_loop, WINDOWED), BUFFERS, 1),
    "loop_host": (functools.partial(decoder_loop, num_host_blocks=1024), BUFFERS, 1),
    "loop_sharded": (sharded_loop, BUFFERS, 4),
    "loop_sharded_collectives": (sharded_loop, f"{BUFFERS},COLLECTIVES", 4),
}
# Programs which are compared with others, and have no budgets.
COMPARED = {
    "drafted": (lambda: scheduled(drafter=ngram()), BUFFERS, 1),
    "loop_backups": (functools.partial(decoder_loop, num_host_blocks=1024, backups=True), BUFFERS, 1),
    "scheduled_backups": (functools.partial(scheduled, num_host_blocks=1024, backups=True), BUFFERS, 1),
    "scheduled_tiers": (functools.partial(scheduled, in_program=True, num_host_blocks=1024, backups=True), BUFFERS, 1),
}


def is_of_model(thunk: Thunk) -> bool:
    """Whether a thunk was traced by the model."""
    return "/model/" in thunk.op_name


def loops_around_model(thunk: Thunk) -> list[Thunk]:
    """The loops around the model, from the outer to the inner."""
    for part in thunk.parts.values():
        for inside in part:
            if is_of_model(inside):
                return [thunk] if thunk.kind == "kWhile" else []
            if any(map(is_of_model, inside)):
                return [thunk] * (thunk.kind == "kWhile") + loops_around_model(inside)
    return []


def middle_layer(root: Thunk) -> list[Thunk]:
    """The second of three layers, which XLA fuses with neighbours on both sides: from its first thunk to its last.

    XLA leaves some of its products without a name.
    """
    inside = [thunk for thunk in root if not thunk.parts]
    named = [index for index, thunk in enumerate(inside) if "/layer1/" in thunk.op_name]
    return inside[named[0] : named[-1] + 1] if named else []


def parts_of(root: Thunk, rare: Sequence[str] = ()) -> dict[str, Counts]:
    """The counts of a program by its parts."""
    if not any(map(is_of_model, root)):
        middle = [gpu_thunks.count(thunk) for thunk in middle_layer(root)]
        return {"all": gpu_thunks.count(root, rare), **({"middle": sum(middle, Counts())} if middle else {})}
    loops = loops_around_model(root)
    inside = [thunk for part in loops[0].parts.values() for thunk in part if thunk.kind == "kWhile"] if loops else []
    if sum(any(map(is_of_model, thunk)) for thunk in inside) > 1:
        mixed, step = (thunk for thunk in inside if any(map(is_of_model, thunk)))
        seldom = Counts()
        for thunk in inside:
            seldom.update({} if thunk in (mixed, step) else gpu_thunks.count(thunk, rare))
        return {
            "start": gpu_thunks.count(root, rare, lambda thunk: thunk is loops[0]),
            "block": gpu_thunks.count(loops[0], rare, lambda thunk: thunk in inside),
            **steps_of(step, rare),
            "mixed": gpu_thunks.count(mixed, rare),
            "seldom": seldom,
        }
    inner = loops[-1] if loops else root
    outside = gpu_thunks.count(inner, rare, is_of_model)
    model = gpu_thunks.count(inner, rare)
    model.subtract(outside)
    if not loops:
        return {"model": model, "around": outside}
    outer, _ = loops
    return {
        "model": model,
        "start": gpu_thunks.count(root, rare, lambda thunk: thunk is outer),
        "block": gpu_thunks.count(outer, rare, lambda thunk: thunk is inner),
        "step": outside,
    }


def steps_of(step: Thunk, rare: Sequence[str]) -> dict[str, Counts]:
    """The counts of the loop of steps. With a drafter, those of a narrow and of a wide pass."""
    inside = [thunk for part in step.parts.values() for thunk in part]
    widths = [thunk for thunk in inside if thunk.kind == "kWhile" and any(map(is_of_model, thunk))]
    if not widths:
        return {"step": gpu_thunks.count(step, rare, is_of_model)}
    narrow, wide = widths
    return {
        "narrow": gpu_thunks.count(step, rare, lambda thunk: thunk is wide or is_of_model(thunk)),
        "wide": gpu_thunks.count(step, rare, lambda thunk: thunk is narrow or is_of_model(thunk)),
    }


def measure(name: str, rare: Sequence[str] = ()) -> dict[str, Counts]:
    """Compiles a program for an H200, and returns its counts."""
    make, buffers, gpus = (PROGRAMS | COMPARED)[name]
    function, args, donate, *specs = make()
    args, mesh = on_gpus("h200", {"x": gpus}, args, *specs)
    options = {} if buffers is None else gpu.DECIDES["device"] | {"xla_gpu_enable_command_buffer": buffers}
    with tempfile.TemporaryDirectory() as dump:
        _, compiled = compile_for(mesh, function, args, donate, dump, **options)
        text = compiled.as_text()
        root = gpu_thunks.read(pathlib.Path(dump), text)
    parts = parts_of(root, rare)
    next(iter(parts.values()))["large_copies"] = launches(text)["large_copies"]
    return parts


class Budgets:
    """The file of budgets.

    Attributes:
      rare: parts of the scopes of loops which usually do not turn.
      bars: {part: {count: {"bar": number, "aim": number}}}.
      budgets: {jaxlib: {part: {count: number}}}. A part is a program with a part of it, for example "block_16 step".
      jaxlib: the version whose budgets hold: the installed version, else the latest before it, else the first.
      exact: whether the installed version has budgets.
    """

    def __init__(self, file: pathlib.Path = BUDGETS, jaxlib: str | None = None):
        self.file, read = file, json.loads(file.read_text())
        self.rare, self.bars, self.budgets = read["rare"], read["bars"], read["budgets"]
        self.installed = jaxlib or importlib.metadata.version("jaxlib")
        order = sorted(self.budgets, key=_numbers)
        self.exact = self.installed in self.budgets
        before = [version for version in order if _numbers(version) <= _numbers(self.installed)]
        self.jaxlib = (before or order[:1] or [self.installed])[-1]

    def of(self, part: str) -> dict[str, int]:
        """The budgets of a part."""
        return self.budgets.get(self.jaxlib, {}).get(part, {})

    def faults(self, part: str, counts: Mapping[str, int]) -> list[str]:
        """Complaints about counts over their budget, and about budgets so loose as to hide a loss.

        With another version of jaxlib than the budgets', counts may differ by as much as budgets may be loose.
        """
        faults = []
        for what in HELD:
            counted, budget = counts.get(what, 0), self.of(part).get(what)
            if budget is None:
                faults.append(f"{part}: {counted} {what}, and no budget")
            elif counted > budget + (0 if self.exact else _slack(budget)):
                faults.append(f"{part}: {counted} {what}, the budget is {budget}")
            elif self.exact and budget > counted + _slack(counted):
                faults.append(f"{part}: {counted} {what}, the budget of {budget} is too loose")
        return faults

    def update(self, measured: Mapping[str, Mapping[str, int]]) -> None:
        """Writes counts as the budgets of the installed jaxlib. Parts without a measurement keep their budgets."""
        parts = self.budgets.setdefault(self.installed, {})
        parts |= {part: {what: counts.get(what, 0) for what in HELD} for part, counts in measured.items()}
        order = [f"{name} {part}" for name in PROGRAMS for part in PARTS]
        self.budgets[self.installed] = {part: parts[part] for part in order if part in parts}
        lines = {
            "rare": json.dumps(self.rare),
            "bars": _object(self.bars, "    "),
            "budgets": _object(self.budgets, "    ", lambda parts: _object(parts, "      ")),
        }
        self.file.write_text(_object(lines, "  ", str) + "\n")


def _object(values: Mapping[str, Any], indent: str, of: Callable[[Any], str] = json.dumps) -> str:
    """JSON with a line to each value."""
    lines = [f"{indent}{json.dumps(name)}: {of(value)}" for name, value in values.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent[2:]}}}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _slack(count: int) -> int:
    return max(2, count // 10)


def line(part: str, counts: Mapping[str, int], budgets: Budgets) -> str:
    """A line of the table."""
    cells = [f"{counts.get(what, 0):5} of {budgets.of(part).get(what, '-'):>3}" for what in HELD]
    cells += [f"{counts.get(what, 0):6}" for what in SHOWN]
    bars = [f"{what} {kind} {n}" for what, kinds in budgets.bars.get(part, {}).items() for kind, n in kinds.items()]
    return f"{part:32}{' '.join(cells)}  {', '.join(bars)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.gpu_programs", description=__doc__)
    parser.add_argument(
        "programs", nargs="*", choices=PROGRAMS | COMPARED, metavar="PROGRAM", help=", ".join(PROGRAMS | COMPARED)
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a line of JSON for each program")
    form.add_argument("--update", action="store_true", help="write what is measured as the budgets")
    args, budgets, measured = parser.parse_args(), Budgets(), {}
    if not args.json:
        print(f"{'jaxlib ' + budgets.installed:32}{' '.join(f'{what:>12}' for what in HELD)} {' '.join(SHOWN)}")
    for name in args.programs or PROGRAMS:
        parts = measure(name, budgets.rare)
        if args.json:
            print(json.dumps(parts), flush=True)
            continue
        for part, counts in parts.items():
            measured[f"{name} {part}"] = counts
            print(line(f"{name} {part}", counts, budgets), flush=True)
    if args.update:
        budgets.update(measured)


if __name__ == "__main__":
    prepare()
    main()
