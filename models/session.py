# SPDX-License-Identifier: Apache-2.0
"""A cache that prompts are answered through, one batch after the other: its limits, and its listeners."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import AxisType

import kvjax
from kvjax.ledger import human, make_ledger

from . import commands, stores, wires
from .commands import Refusing, number
from .decoder import Decoder
from .loading import load
from .rope import rope_limit
from .stopwatch import Stopwatch

STEPS = 8  # to a jitted loop: after each loop text is shown, and Ctrl-C takes effect
# The options that size a cache, with their defaults.
SIZES = {"blocks": 512, "host_blocks": 0, "block_size": 16, "rows": 8, "max_new_tokens": 32}
LENGTH = 256  # tokens of a row, at least
CHUNKS = "512, 256 or 128"  # of which `default_chunk` returns one
_CHUNK_WORK = 2**35  # products of a weight and a token in a step of a chunk, at most
MOST = 2**30  # of what an option counts: sums of two are int32


def add_dtype(parser: commands.Parser) -> None:
    """The option that `load_model` reads; so is `commands.add_scan`'s."""
    parser.add_argument(
        "--dtype", default="float32", choices=commands.DTYPES, help="of weights and K/V (default: %(default)s)"
    )


def add_sizes(parser: commands.Parser, rows: str, length: str, *, has_budget: bool = False) -> None:
    """The options that size a cache; `rows` and `length` are the help of defaults that the caller sets.

    With `has_budget` there is `--budget` too, which `memory.fitting` reads.
    """
    sizes = (
        ("--blocks", "N", 1, "blocks for each attention window (default: %(default)s)"),
        ("--host-blocks", "N", 0, "and on the host, where blocks go that have to leave (default: %(default)s)"),
        ("--block-size", "P", 1, "tokens a block (default: %(default)s)"),
        ("--rows", "S", 1, f"sequences at a time {rows}"),
        ("--max-length", "N", 1, f"tokens of a prompt with its answer (default: {length})"),
        ("--chunk", "N", 1, f"tokens of prompts that a step computes (default: {CHUNKS}, by the model's size)"),
    )
    of_blocks = parser.add_mutually_exclusive_group()
    for option, name, least, what in sizes:
        default = None if option == "--rows" else SIZES.get(option.removeprefix("--").replace("-", "_"))
        of: Any = of_blocks if option == "--blocks" else parser
        of.add_argument(option, type=number(int, least, MOST), default=default, metavar=name, help=what)
    parser.set_defaults(budget=None)
    if has_budget:
        what = "of each device for weights, K/V and steps, such as 20GiB: as many blocks as fit"
        of_blocks.add_argument("--budget", metavar="SIZE", type=commands.size, help=what)


def add_mesh(parser: commands.Parser) -> None:
    """The options that `make_mesh` reads."""
    count, heads = number(int, 1, MOST), "devices that divide weights and K/V by heads (default: one)"
    tokens = "for each of these, devices that divide the tokens of blocks (default: %(default)s)"
    parser.add_argument("--mesh", metavar="N", type=count, help=heads)
    parser.add_argument("--context", metavar="C", type=count, default=1, help=tokens)


def make_mesh(parser: commands.Parser, args: argparse.Namespace) -> dict[str, Any]:
    """The mesh that the options want, and its axes: arguments of `load` and `Cache.create`."""
    if args.mesh is None and args.context == 1:
        return {}
    sizes = {"heads": args.mesh or 1} | ({"context": args.context} if args.context > 1 else {})
    total, devices = math.prod(sizes.values()), jax.devices()
    if total > len(devices):
        names = "--mesh" if args.context == 1 else "--mesh times --context"
        parser.error(f"{names}: got {total}, wanted at most {len(devices)}, the devices that there are")
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes), devices=devices[:total])
    return {"mesh": mesh, **{name: name for name in sizes}}


def load_model(parser: commands.Parser, args: argparse.Namespace, **where: Any) -> tuple[Decoder, Any]:
    """The model of a checkpoint, placed as `make_mesh` says, and its tokenizer or None; sets the size of a chunk."""
    try:
        model, tokenizer = load(args.checkpoint, dtype=args.dtype, scan=args.scan, **where)
        args.chunk = args.chunk or default_chunk(model)
        return model, tokenizer
    except (ImportError, OSError, ValueError) as error:
        message = commands.reason(error)
        parser.error(f"--{message}" if message.startswith("mesh: ") else f"--checkpoint: {message}")


def default_chunk(model: Decoder) -> int:
    """Tokens of prompts that a step computes where no option says: 512, 256 or 128.

    As many as multiply at most 2**35 weights of layers by a token, but at least 128: 512 for up to 67 million weights,
    256 for up to 134 million. The vocabulary's matrices are not counted: a step has logits of a few tokens.
    `docs/howto/size.md` has the reasons.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model.layers)))
    return next((chunk for chunk in (512, 256) if chunk * weights <= _CHUNK_WORK), 128)


def make_spec(parser: commands.Parser, args: argparse.Namespace, model: Decoder) -> kvjax.CacheSpec:
    """The spec of the cache that the options size."""
    with Refusing(parser):
        return kvjax.make_spec(
            model.layer_specs(), num_blocks=args.blocks, max_seqs=args.rows, max_length=args.max_length,
            block_size=args.block_size, dtype=args.dtype, num_host_blocks=args.host_blocks,
        )  # fmt: skip


def make_cache(parser: commands.Parser, args: argparse.Namespace, spec: kvjax.CacheSpec, **where: Any) -> Any:
    """An empty cache, on the devices of `make_mesh`."""
    try:
        return (kvjax.tiers.TieredCache if args.host_blocks else kvjax.Cache).create(spec, **where)
    except ValueError as error:
        parser.error(f"--{error}")


class Session:
    """A model with its cache; the end of a `with` closes what the options opened. `note` gets remarks, a line each."""

    def __init__(self, parser: commands.Parser, args: argparse.Namespace, model: Decoder, note: Callable[[str], None]):
        self._parser, self._args, self._model, self._note = parser, args, model, note
        spec = make_spec(parser, args, model)
        with Refusing(parser):
            self._sampling = kvjax.Sampling(args.temperature, args.top_k, args.top_p, min_p=args.min_p)
        check_memory(parser, args, model, spec)
        self.cache = make_cache(parser, args, spec)  # the latest one; None if a second Ctrl-C has cost it
        with contextlib.ExitStack() as stack:
            self._wires = stack.enter_context(wires.Wires(parser, args, spec, note))
            self.store = stack.enter_context(stores.opened(parser, args, spec, args.checkpoint))
            self._watch = stack.enter_context(Stopwatch(note))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        return self._stack.__exit__(kind, error, trace)

    def answer(
        self, prompts: list[list[int]], show: Callable[..., None], seed: int, stop: Sequence[int]
    ) -> tuple[list[kvjax.serving.Output], bool]:
        """Generates text, and calls `show` with the outputs as they grow, at the end with last=True.

        Returns:
          The outputs; and whether they are finished (false: Ctrl-C has ended them).
        """
        outputs, finished = [], True
        progress: kvjax.serving.Progress | None = None
        requests = kvjax.serving.make_requests(
            prompts, max_new_tokens=self._args.max_new_tokens, sampling=self._sampling, stop_tokens=stop,
            seed=range(seed, seed + len(prompts)),
        )  # fmt: skip
        options = kvjax.serving.RunOptions(
            steps=STEPS, log_events=False, listener=self._wires.listener, store=self.store,
            scheduler=kvjax.serving.Scheduler(chunk=self._args.chunk),
        )  # fmt: skip
        stream = kvjax.stream(self._model, self.cache, requests, options)
        try:
            for progress in self._watch.timed(stream):
                outputs, self.cache = progress.outputs, progress.cache
                show(outputs)
                self._wires.see(progress)
        except KeyboardInterrupt:  # during `show`: the stream did not receive it
            finished = False
            stream.close()
            if progress is not None:
                self.cache = progress.cache
        except kvjax.serving.GenerationInterrupted as stopped:
            if not isinstance(stopped.__cause__, KeyboardInterrupt):
                raise
            finished, outputs, self.cache = False, stopped.outputs, stopped.cache
        show(outputs, last=True)
        for i, output in enumerate(outputs, 1):
            if output.finish not in ("length", "stop"):
                self._note(f"prompt {i} ended early: {output.finish or 'interrupted'}")
        return outputs, finished

    def end(self, finished: bool) -> int:
        """Notes the times, draws the cache, serves it on if that is wanted, and closes it; returns the exit status."""
        self._note(self._watch.report())
        commands.draw(self._parser, self._args, self.cache)
        if self._args.stay and finished:
            self._wires.flush()
            if self.store is not None:
                self.store.flush()
            self._note("all is answered, and the cache is served on: Ctrl-C ends it")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
        self._stack.close()
        return self._wires.unwritten or (0 if finished else commands.INTERRUPTED)


def most_positions(args: argparse.Namespace, model: Decoder) -> int:
    """The most tokens of a sequence for the model: in whole blocks as many as its rope is for, else its positions."""
    limit = rope_limit(model.config)
    return model.config.max_positions or MOST if limit is None else limit // args.block_size * args.block_size


def most_tokens(args: argparse.Namespace, model: Decoder) -> int:
    """The most tokens of a sequence that the blocks hold; `MOST` if no layer keeps all of them."""
    full = any(layer.window is None for layer in model.layer_specs())
    return args.blocks * args.block_size if full else MOST


def set_length(parser: commands.Parser, args: argparse.Namespace, model: Decoder, default: int = MOST) -> None:
    """Refuses rows that are longer than model and blocks allow; without a length takes the most, up to `default`."""
    positions, tokens = most_positions(args, model), most_tokens(args, model)
    most = min(positions, tokens)
    if args.max_length is None:
        args.max_length = min(most, default)
    elif args.max_length > most:
        wanted = f"at most {most}: the model has {positions} positions, and the cache {tokens} tokens"
        parser.error(f"--max-length: got {args.max_length}, wanted {wanted}")


def check_length(parser: commands.Parser, args: argparse.Namespace, model: Decoder, prompts: list[list[int]]) -> None:
    """Refuses prompts and answers that are longer than the whole cache; sets the length of a row if none was given.

    It is rounded up to a power of two, so that prompts of other lengths find the compiled programs.
    """
    most, longest = most_tokens(args, model), max(map(len, prompts))
    length, limit = longest + args.max_new_tokens, MOST
    if rope_limit(model.config) is not None:
        limit = most_positions(args, model)
        if (got := max(length, args.max_length or 0)) > limit:
            reason = "in longer sequences the rope has other frequencies (sequence_length of rope_parameters)"
            parser.error(f"--max-length: got {got}, wanted at most {limit}: {reason}")
    if args.max_length is not None and args.max_length < length:
        parser.error(f"--max-length: got {args.max_length}, wanted at least {length}: a prompt with its answer")
    blocks = f"({args.blocks} blocks of {args.block_size} tokens: --blocks)"
    if longest >= most:
        number = 1 + [len(prompt) for prompt in prompts].index(longest)
        parser.error(f"--prompt: got {longest} tokens in prompt {number}, wanted at most {most - 1} {blocks}")
    if length > most:
        wanted = f"wanted at most {most - longest} after {longest} of a prompt {blocks}"
        parser.error(f"--max-new-tokens: got {args.max_new_tokens}, {wanted}")
    args.max_length = min(args.max_length or max(LENGTH, 1 << (length - 1).bit_length()), most, limit)


def check_memory(parser: commands.Parser, args: argparse.Namespace, model: Decoder, spec: kvjax.CacheSpec) -> None:
    """Refuses a cache that cannot fit into memory with the model and a step's logits, before it is made.

    The option that is the most times its default is the one to blame.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    ledger = make_ledger(spec, 0, None, weights, None)
    needed, host = ledger.used_bytes + 4 * spec.max_seqs * model.config.vocab_size, ledger.host_used_bytes
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:  # a CPU: both tiers are in one memory
        needed, host, limit = needed + host, 0, machine
    for taken, most, where in ((needed, limit, device), (host, machine, "the host")):
        if taken > most:
            blamed = max(SIZES, key=lambda name: getattr(args, name) / (SIZES[name] or SIZES["blocks"]))
            got = f"--{blamed.replace('_', '-')}: got {getattr(args, blamed)}, which takes {human(taken)}"
            if args.budget is not None:
                got = f"--budget: got {human(args.budget)}, which takes {human(taken)}"
            parser.error(f"{got} with the model, wanted at most the {human(most)} of {where}")
