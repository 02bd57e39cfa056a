# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two processes: one computes prompts and writes their blocks to a store, the other answers.

    python -m models.prefill_decode     # both, and a process that does all by itself, to compare
    python -m models.prefill_decode prefill --store DIR | python -m models.prefill_decode decode --store DIR

The first process prints a line for each prompt when its blocks are in the folder; the second one reads these lines, and
computes of a prompt what is behind its last whole block. A folder in /dev/shm is memory that processes of a machine
share; one of a network's file system is for several machines.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import rich.console

import kvjax
from kvjax.stores import DiskStore

from . import commands, demo, recall, stores
from .generate import INTERRUPTED
from .loading import load

DOCUMENTS, QUESTIONS, FACTS, NEW = 4, 3, 24, 8  # questions about each document; tokens of an answer
BLOCK, BLOCKS, LENGTH, MAX_BYTES = 16, 64, 160, 256 << 20
SHARED = pathlib.Path("/dev/shm")
Answer = dict[str, Any]  # a line of JSON


def prompts() -> list[demo.Question]:
    """Questions about several documents, the same in every process."""
    rng = np.random.default_rng(11)
    documents = [recall.make_document(rng, FACTS) for _ in range(DOCUMENTS)]
    return [pair for one in documents for pair in demo.questions(one, [*one.facts][:: FACTS // QUESTIONS])]


class Worker:
    """The model and a cache that generates for one prompt after the other, perhaps with a store.

    Attributes:
      store: to be closed by the caller; None without a folder.
    """

    def __init__(self, folder: str | None = None, *, readonly: bool = False):
        self.model, _ = load(recall.CHECKPOINT)
        spec = kvjax.make_spec(
            self.model.layer_specs(), num_blocks=BLOCKS, max_seqs=1, max_length=LENGTH, block_size=BLOCK,
            dtype="float32",
        )  # fmt: skip
        self.cache = kvjax.Cache.create(spec)
        self.store = None if folder is None else DiskStore(
            folder, spec, model=stores.checkpoint_name(recall.CHECKPOINT), names=kvjax.Namespaces(),
            max_bytes=None if readonly else MAX_BYTES, patience_ms=demo.PATIENCE_MS, readonly=readonly,
        )  # fmt: skip

    def generate(self, prompt: list[int], max_new_tokens: int) -> Answer:
        """Generates, and reports how much of the prompt had to be computed."""
        (output,), self.cache, _ = kvjax.generate(
            self.model, self.cache, [prompt], max_new_tokens=max_new_tokens, log_events=False, store=self.store
        )
        computed = output.prompt_tokens - output.cached_tokens
        return {"prompt": prompt, "computed": computed, "stored": output.stored_tokens, "tokens": output.tokens}


def prefill(folder: str) -> Iterator[Answer]:
    """Computes prompts; each is yielded when its blocks are in the folder."""
    worker = Worker(folder)
    assert worker.store is not None
    with worker.store as store:
        for prompt, _ in prompts():
            answer = worker.generate(prompt, 1)
            store.flush()
            yield answer


def decode(folder: str, lines: Iterator[str]) -> Iterator[Answer]:
    """Answers prompts, as they come, each with an empty cache: what is not computed came from the folder."""
    first = next(lines, None)
    if first is None:
        return
    worker = Worker(folder, readonly=True)  # from the first line on there is a store
    assert worker.store is not None
    with worker.store:
        for line in itertools.chain([first], lines):
            worker.cache, _ = worker.cache.reset()
            yield worker.generate(json.loads(line)["prompt"], NEW)


def both(folder: str) -> tuple[list[Answer], list[Answer]]:
    """The lines of a process that computes prompts, and of one that answers them at the same time."""

    def start(role: str, **pipes: Any) -> subprocess.Popen[str]:
        assert __spec__ is not None
        command = [sys.executable, "-m", f"{__spec__.parent}.prefill_decode", role, "--store", folder]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)

    with start("prefill") as first, start("decode", stdin=subprocess.PIPE) as second:
        assert first.stdout and second.stdin and second.stdout
        computed = []
        with contextlib.suppress(BrokenPipeError), second.stdin:
            for line in first.stdout:
                print(line, end="", file=second.stdin, flush=True)
                computed.append(json.loads(line))
        answers = [json.loads(line) for line in second.stdout]
    if first.returncode or second.returncode:
        raise SystemExit("prefill_decode failed: a process did")
    return computed, answers


def compare(folder: str) -> None:
    """Runs both processes, and the same in this one; prints a table.

    Raises:
      SystemExit: if the tokens differ, or more than a block of a prompt was computed again.
    """
    console, pairs = rich.console.Console(highlight=False), prompts()
    computed, answers = both(folder)
    worker = Worker()
    alone = [worker.generate(prompt, NEW) for prompt, _ in pairs]
    right = [one["tokens"][0] == answer for one, (_, answer) in zip(answers, pairs, strict=True)]
    total = sum(len(prompt) for prompt, _ in pairs)
    lines = [
        (name, [f"{total:,}", *(f"{sum(one[part] for one in done):,}" for part in ("computed", "stored"))])
        for name, done in {"prefill": computed, "decode": answers, "one process": alone}.items()
    ]
    console.print(demo.table("Tokens of prompts", ("all", "computed", "from store"), lines), "")
    agrees = [one["tokens"] for one in answers] == [one["tokens"] for one in alone]
    most = max(one["computed"] for one in answers)
    console.print(f"{len(pairs)} answers equal those of one process: {agrees}; {sum(right)} are right")
    console.print(f"at most {most} tokens of a prompt computed where it is answered; a block has {BLOCK}")
    if not agrees or most > BLOCK:
        raise SystemExit("prefill_decode failed")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = commands.Parser("prefill_decode", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("role", nargs="?", choices=("prefill", "decode"), help="one of the two processes; without: all")
    parser.add_argument("--store", metavar="DIR", help="the folder; without a role a new one, by default")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    if args.role and args.store is None:
        parser.error(f"--store: got none, wanted the folder for {args.role}")
    commands.check_extra(parser, "stores")
    commands.keep_programs(not args.no_compile_cache)
    try:
        if args.role is None:
            with tempfile.TemporaryDirectory(
                prefix="kvjax-", dir=SHARED if os.access(SHARED, os.W_OK) else None
            ) as new:
                return compare(args.store or new)
        for answer in prefill(args.store) if args.role == "prefill" else decode(args.store, sys.stdin):
            print(json.dumps(answer), flush=True)
    except (OSError, ValueError) as error:
        parser.error(f"--store: {commands.reason(error, args.store).removeprefix('location: ')}")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
