# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two servers: one computes prompts and writes their blocks to a store, the other answers.

    python -m models.serve --checkpoint DIR --port 8001 --store STORE --store-sync        # prefill: asked for one token
    python -m models.serve --checkpoint DIR --port 8002 --store STORE --store-readonly    # decode: started second

The first server answers when the blocks of a prompt are in the store, and the second one computes of the prompt the
rest after its last whole block. A folder in /dev/shm is memory that processes of a machine share; a folder of a
network's file system is for several machines. The demo starts both, with the bundled model and caches that hold a
single prompt, and compares the answers of the second server with those of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import tempfile

import numpy as np
import rich.console

from . import commands, demo, recall
from .server_process import Answer, ServerEnded, ServerProcess

DOCUMENTS, QUESTIONS, FACTS, NEW = 4, 3, 24, 8  # questions about each document; tokens of an answer
BLOCK, LENGTH = 16, 144  # tokens; a prompt with its answer has at most as many
SHARED = pathlib.Path("/dev/shm")


def prompts() -> list[demo.Question]:
    """Questions about several documents, of which no two that follow each other are about the same one."""
    rng = np.random.default_rng(11)
    documents = [recall.make_document(rng, FACTS) for _ in range(DOCUMENTS)]
    of_each = [demo.questions(document, [*document.facts][:: FACTS // QUESTIONS]) for document in documents]
    return [pair for pairs in zip(*of_each, strict=True) for pair in pairs]


def run(store: str, *more: str) -> None:
    """Puts all prompts to a server that computes them, and then to one that reads their blocks; prints a table.

    Raises:
      SystemExit: if the answers differ, or more than a block of a prompt was computed again.
      ServerEnded: if one of the servers has ended.
    """
    model = ("--checkpoint", str(recall.CHECKPOINT), "--dtype", "float32", "--rows", "1", "--max-length", str(LENGTH))
    sizes = ("--block-size", str(BLOCK), "--blocks", str(LENGTH // BLOCK))
    options = (*model, *sizes, "--store", store, *more)
    pairs, found = prompts(), dict[str, list[Answer]]()
    with (
        contextlib.closing(ServerProcess(*options, "--store-sync")) as prefill,
        contextlib.closing(ServerProcess(*options, "--store-readonly")) as decode,
    ):
        prefill.ready()
        decode.ready()  # there is a store now
        found["prefill"] = [prefill.complete(prompt, 1) for prompt, _ in pairs]
        found["decode"] = [decode.complete(prompt, NEW) for prompt, _ in pairs]
        found["one process"] = [prefill.complete(prompt, NEW, "alone") for prompt, _ in pairs]
    computed = {
        name: [len(prompt) - answer.num_cached for (prompt, _), answer in zip(pairs, answers, strict=True)]
        for name, answers in found.items()
    }
    total = sum(len(prompt) for prompt, _ in pairs)
    lines = [(name, [f"{n:,}" for n in (total, sum(counts), total - sum(counts))]) for name, counts in computed.items()]
    console = rich.console.Console(highlight=False)
    console.print(demo.table("Tokens of prompts", ("all", "computed", "found"), lines), "")
    texts, alone = ([answer.text for answer in found[name]] for name in ("decode", "one process"))
    num_right = sum(recall.encode(text)[0] == wanted for text, (_, wanted) in zip(texts, pairs, strict=True))
    most = max(computed["decode"])
    console.print(f"{len(pairs)} answers equal those of one process: {texts == alone}; {num_right} are right")
    console.print(f"at most {most} tokens of a prompt computed where it is answered; a block has {BLOCK}")
    if texts != alone or most > BLOCK:
        raise SystemExit("prefill_decode failed")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = commands.Parser("prefill_decode", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--store", metavar="DIR", help="the folder (default: a new one)")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    for extra in ("stores", "serve"):
        commands.check_extra(parser, extra)
    shared = SHARED if os.access(SHARED, os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="kvjax-", dir=shared) as new:
            run(args.store or new, *(["--no-compile-cache"] if args.no_compile_cache else []))
    except ServerEnded as error:
        raise SystemExit(f"prefill_decode failed: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(commands.INTERRUPTED) from None


if __name__ == "__main__":
    main()
