# SPDX-License-Identifier: Apache-2.0
"""A cache for batches of prompts, its limits and its listeners."""

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

STEPS = 8  # in a jitted loop; after each loop, text is shown and Ctrl-C takes effect
# {an option for the size of a cache: its default}
SIZES = {"blocks": 512, "host_blocks": 0, "block_size": 16, "rows": 8, "max_new_tokens": 32}
MAX_DRAFTS = 64  # limit on --speculate
LENGTH = 256  # tokens of a row, at least
CHUNKS = "512, 256 or 128"  # the values of `default_chunk`
_CHUNK_WORK = 2**35  # limit on the weights times the tokens of a chunk
MAX_OPTION = 2**30  # limit on the value of an option: a sum of two values is an int32


def add_dtype(parser: commands.Parser) -> None:
    """Adds an option for `load_model`, which also reads the options of `commands.add_scan`."""
    parser.add_argument(
        "--dtype", default="float32", choices=commands.DTYPES, help="of weights and K/V (default: %(default)s)"
    )


def add_sizes(parser: commands.Parser, rows: str, length: str, *, has_budget: bool = False) -> None:
    """Adds the options for the size of a cache.

    Args:
      parser: the parser to add them to.
      rows: the help for the default of --rows, which the caller sets.
      length: the help for the default of --max-length, which the caller sets.
      has_budget: whether to add --budget for `memory.fitting` too.
    """
    sizes = (
        ("--blocks", "N", 1, "blocks for each attention window (default: %(default)s)"),
        ("--host-blocks", "N", 0, "blocks on the host, for blocks that leave the device (default: %(default)s)"),
        ("--block-size", "P", 1, "tokens of a block (default: %(default)s)"),
        ("--rows", "S", 1, f"sequences at a time {rows}"),
        ("--max-length", "N", 1, f"tokens of a prompt with its answer (default: {length})"),
        ("--chunk", "N", 1, f"prompt tokens computed by a step (default: {CHUNKS}, by the model's size)"),
    )
    block_options = parser.add_mutually_exclusive_group()
    for option, metavar, least, text in sizes:
        default = None if option == "--rows" else SIZES.get(option.removeprefix("--").replace("-", "_"))
        group: Any = block_options if option == "--blocks" else parser
        group.add_argument(option, type=number(int, least, MAX_OPTION), default=default, metavar=metavar, help=text)
    parser.set_defaults(budget=None)
    if has_budget:
        text = "memory of each device for weights, K/V and steps, such as 20GiB; sets the number of blocks"
        block_options.add_argument("--budget", metavar="SIZE", type=commands.size, help=text)


def add_speculation(parser: commands.Parser) -> None:
    """Adds the option for `make_drafter`."""
    text = "tokens to draft in a step from the text before; the answers stay the same (default: %(default)s, none)"
    parser.add_argument("--speculate", metavar="N", type=number(int, 0, MAX_DRAFTS), default=0, help=text)


def make_drafter(args: argparse.Namespace) -> kvjax.serving.Drafter | None:
    """Makes the drafter of the option, or None."""
    return kvjax.serving.ngram(args.speculate) if args.speculate else None


def add_mesh(parser: commands.Parser) -> None:
    """Adds the options for `make_mesh`."""
    count = number(int, 1, MAX_OPTION)
    mesh_help = "devices among which weights and K/V are divided by heads (default: 1)"
    context_help = "devices for each of the N, among which the tokens of a block are divided (default: %(default)s)"
    parser.add_argument("--mesh", metavar="N", type=count, help=mesh_help)
    parser.add_argument("--context", metavar="C", type=count, default=1, help=context_help)


def make_mesh(parser: commands.Parser, args: argparse.Namespace) -> dict[str, Any]:
    """Makes the mesh of the options. Returns it with its axes as arguments of `load` and `Cache.create`."""
    if args.mesh is None and args.context == 1:
        return {}
    sizes = {"heads": args.mesh or 1} | ({"context": args.context} if args.context > 1 else {})
    total = math.prod(sizes.values())
    devices = jax.devices()
    if total > len(devices):
        names = "--mesh" if args.context == 1 else "--mesh times --context"
        parser.error(f"{names}: got {total}, wanted at most {len(devices)}, the number of devices")
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), (AxisType.Auto,) * len(sizes), devices=devices[:total])
    return {"mesh": mesh, **{name: name for name in sizes}}


def load_model(parser: commands.Parser, args: argparse.Namespace, **where: Any) -> tuple[Decoder, Any]:
    """Loads a checkpoint's model onto the mesh of `make_mesh`, and its tokenizer or None. Sets the size of a chunk."""
    try:
        model, tokenizer = load(args.checkpoint, dtype=args.dtype, scan=args.scan, **where)
        args.chunk = args.chunk or default_chunk(model)
        return model, tokenizer
    except (ImportError, OSError, ValueError) as error:
        message = commands.reason(error)
        parser.error(f"--{message}" if message.startswith("mesh: ") else f"--checkpoint: {message}")


def default_chunk(model: Decoder) -> int:
    """Returns the default for the prompt tokens in a step: 512, 256 or 128.

    The layers' weights times the tokens are at most 2**35, unless 128 tokens are already too many. A model
    with up to 67 million weights gets 512, and a model with up to 134 million gets 256. The vocabulary's matrices do
    not count, since a step has logits of a few tokens. `docs/howto/size.md` has the reasons.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model.layers)))
    return next((chunk for chunk in (512, 256) if chunk * weights <= _CHUNK_WORK), 128)


def make_spec(parser: commands.Parser, args: argparse.Namespace, model: Decoder) -> kvjax.CacheSpec:
    """Makes the cache's spec from the options."""
    with Refusing(parser):
        return kvjax.make_spec(
            model.layer_specs(),
            num_blocks=args.blocks,
            max_seqs=args.rows,
            max_length=args.max_length,
            block_size=args.block_size,
            dtype=args.dtype,
            num_host_blocks=args.host_blocks,
        )


def make_cache(parser: commands.Parser, args: argparse.Namespace, spec: kvjax.CacheSpec, **where: Any) -> Any:
    """Makes an empty cache on the devices of `make_mesh`."""
    try:
        return (kvjax.tiers.TieredCache if args.host_blocks else kvjax.Cache).create(spec, **where)
    except ValueError as error:
        parser.error(f"--{error}")


class Session:
    """A model with its cache. The end of the `with` closes the store and the wires of the options.

    `note` gets remarks, a line each.
    """

    def __init__(self, parser: commands.Parser, args: argparse.Namespace, model: Decoder, note: Callable[[str], None]):
        self._parser = parser
        self._args = args
        self._model = model
        self._note = note
        spec = make_spec(parser, args, model)
        with Refusing(parser):
            self._sampling = kvjax.Sampling(args.temperature, args.top_k, args.top_p, min_p=args.min_p)
        check_memory(parser, args, model, spec)
        self.cache = make_cache(parser, args, spec)  # the latest cache; None after a second Ctrl-C
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
          The outputs, and whether they are finished. After a Ctrl-C they are unfinished.
        """
        outputs = []
        finished = True
        progress: kvjax.serving.Progress | None = None
        requests = kvjax.serving.make_requests(
            prompts,
            max_new_tokens=self._args.max_new_tokens,
            sampling=self._sampling,
            stop_tokens=stop,
            seed=range(seed, seed + len(prompts)),
        )
        options = kvjax.serving.RunOptions(
            steps=max(STEPS, 2 * (1 + self._args.speculate)),
            drafter=make_drafter(self._args),
            log_events=False,
            listener=self._wires.listener,
            store=self.store,
            scheduler=kvjax.serving.Scheduler(chunk=self._args.chunk),
        )
        stream = kvjax.stream(self._model, self.cache, requests, options)
        try:
            for progress in self._watch.timed(stream):
                outputs = progress.outputs
                self.cache = progress.cache
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
            finished = False
            outputs = stopped.outputs
            self.cache = stopped.cache
        show(outputs, last=True)
        for i, output in enumerate(outputs, 1):
            if output.finish not in ("length", "stop"):
                self._note(f"prompt {i} ended early: {output.finish or 'interrupted'}")
        return outputs, finished

    def end(self, finished: bool) -> int:
        """Notes the times, draws the cache and closes it. With --stay it serves the cache until Ctrl-C first.

        Returns:
          The exit status.
        """
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
    """Returns the model's limit on a sequence: the whole blocks within its rope's range, otherwise its positions."""
    limit = rope_limit(model.config)
    return model.config.max_positions or MAX_OPTION if limit is None else limit // args.block_size * args.block_size


def most_tokens(args: argparse.Namespace, model: Decoder) -> int:
    """Returns the tokens for which the blocks have space, or `MAX_OPTION` if each layer has a window."""
    keeps_all = any(layer.window is None for layer in model.layer_specs())
    return args.blocks * args.block_size if keeps_all else MAX_OPTION


def set_length(parser: commands.Parser, args: argparse.Namespace, model: Decoder, default: int = MAX_OPTION) -> None:
    """Refuses a --max-length above the limits of model and blocks. Without the option sets it, up to `default`."""
    positions = most_positions(args, model)
    tokens = most_tokens(args, model)
    limit = min(positions, tokens)
    if args.max_length is None:
        args.max_length = min(limit, default)
    elif args.max_length > limit:
        wanted = f"at most {limit}: the model has {positions} positions, and the cache {tokens} tokens"
        parser.error(f"--max-length: got {args.max_length}, wanted {wanted}")


def check_length(parser: commands.Parser, args: argparse.Namespace, model: Decoder, prompts: list[list[int]]) -> None:
    """Refuses prompts and answers longer than the cache. Sets --max-length unless the option does.

    The length is rounded up to a power of two, so prompts of other lengths use the same compiled programs.
    """
    capacity = most_tokens(args, model)
    longest = max(map(len, prompts))
    length = longest + args.max_new_tokens
    limit = MAX_OPTION
    if rope_limit(model.config) is not None:
        limit = most_positions(args, model)
        if (got := max(length, args.max_length or 0)) > limit:
            reason = "in longer sequences the rope has other frequencies (sequence_length of rope_parameters)"
            parser.error(f"--max-length: got {got}, wanted at most {limit}: {reason}")
    if args.max_length is not None and args.max_length < length:
        parser.error(f"--max-length: got {args.max_length}, wanted at least {length}: a prompt with its answer")
    blocks = f"({args.blocks} blocks of {args.block_size} tokens: --blocks)"
    if longest >= capacity:
        position = 1 + [len(prompt) for prompt in prompts].index(longest)
        parser.error(f"--prompt: got {longest} tokens in prompt {position}, wanted at most {capacity - 1} {blocks}")
    if length > capacity:
        wanted = f"wanted at most {capacity - longest} after {longest} of a prompt {blocks}"
        parser.error(f"--max-new-tokens: got {args.max_new_tokens}, {wanted}")
    args.max_length = min(args.max_length or max(LENGTH, 1 << (length - 1).bit_length()), capacity, limit)


def check_memory(parser: commands.Parser, args: argparse.Namespace, model: Decoder, spec: kvjax.CacheSpec) -> None:
    """Refuses a cache too large for memory with the model and a step's logits, before the cache is made.

    The message names the option with the largest multiple of its default.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    ledger = make_ledger(spec, 0, None, weights, None)
    device_bytes = ledger.used_bytes + 4 * spec.max_seqs * model.config.vocab_size
    host_bytes = ledger.host_used_bytes
    host_limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = jax.local_devices()[0]
    device_limit = (device.memory_stats() or {}).get("bytes_limit")
    if device_limit is None:  # a CPU: both tiers are in the same memory
        device_bytes += host_bytes
        host_bytes = 0
        device_limit = host_limit
    for needed, limit, place in ((device_bytes, device_limit, device), (host_bytes, host_limit, "the host")):
        if needed > limit:
            blamed = max(SIZES, key=lambda name: getattr(args, name) / (SIZES[name] or SIZES["blocks"]))
            got = f"--{blamed.replace('_', '-')}: got {getattr(args, blamed)}, which takes {human(needed)}"
            if args.budget is not None:
                got = f"--budget: got {human(args.budget)}, which takes {human(needed)}"
            parser.error(f"{got} with the model, wanted at most the {human(limit)} of {place}")
