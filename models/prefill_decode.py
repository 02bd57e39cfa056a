# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two servers: one computes prompts and writes their blocks to a store, the other answers them.

    python -m models.serve --checkpoint DIR --port 8001 --store STORE --store-sync        # prefill: asked for one token
    python -m models.serve --checkpoint DIR --port 8002 --store STORE --store-readonly    # decode: started second

The first server answers once the blocks of a prompt are in the store. The second server computes only the tokens after
the prompt's last whole block. On a single machine, the store is a folder in /dev/shm, which is in memory. For several
machines, it is a folder in a network file system. The demo starts both servers, with the bundled model and caches for a
single prompt, and compares their answers.
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

DOCUMENTS = 4
QUESTIONS = 3  # about each document
FACTS = 24
NEW = 8  # tokens of an answer
BLOCK = 16
LENGTH = 144  # the most tokens of a prompt with its answer
SHARED = pathlib.Path("/dev/shm")


def prompts() -> list[demo.Question]:
    """Questions about several documents. Consecutive questions are about different documents."""
    rng = np.random.default_rng(11)
    documents = [recall.make_document(rng, FACTS) for _ in range(DOCUMENTS)]
    by_document = [demo.questions(document, [*document.facts][:: FACTS // QUESTIONS]) for document in documents]
    return [pair for pairs in zip(*by_document, strict=True) for pair in pairs]


def run(store: str, *extra: str) -> None:
    """Sends all prompts to a server for prefill, then to a server for decode, and prints a table.

    Args:
      store: folder of the store.
      extra: more options for both servers.

    Raises:
      SystemExit: the answers differ, or more than a block of a prompt was computed again.
      ServerEnded: a server has ended.
    """
    model = ("--checkpoint", str(recall.CHECKPOINT), "--dtype", "float32", "--rows", "1", "--max-length", str(LENGTH))
    sizes = ("--block-size", str(BLOCK), "--blocks", str(LENGTH // BLOCK))
    options = (*model, *sizes, "--store", store, *extra)
    pairs = prompts()
    answers: dict[str, list[Answer]] = {}
    with (
        contextlib.closing(ServerProcess(*options, "--store-sync")) as prefill,
        contextlib.closing(ServerProcess(*options, "--store-readonly")) as decode,
    ):
        prefill.ready()
        decode.ready()  # there is a store now
        answers["prefill"] = [prefill.complete(prompt, 1) for prompt, _ in pairs]
        answers["decode"] = [decode.complete(prompt, NEW) for prompt, _ in pairs]
        answers["one process"] = [prefill.complete(prompt, NEW, "alone") for prompt, _ in pairs]
    computed = {
        name: [len(prompt) - answer.num_cached for (prompt, _), answer in zip(pairs, way_answers, strict=True)]
        for name, way_answers in answers.items()
    }
    total = sum(len(prompt) for prompt, _ in pairs)
    lines = [(name, [f"{n:,}" for n in (total, sum(counts), total - sum(counts))]) for name, counts in computed.items()]
    console = rich.console.Console(highlight=False)
    console.print(demo.table("Tokens of prompts", ("all", "computed", "found"), lines), "")
    texts = [answer.text for answer in answers["decode"]]
    alone = [answer.text for answer in answers["one process"]]
    num_right = sum(recall.encode(text)[0] == wanted for text, (_, wanted) in zip(texts, pairs, strict=True))
    most_computed = max(computed["decode"])
    console.print(f"{len(pairs)} answers equal those of one process: {texts == alone}; {num_right} are right")
    console.print(f"at most {most_computed} tokens of a prompt computed where it is answered; a block has {BLOCK}")
    if texts != alone or most_computed > BLOCK:
        raise SystemExit("prefill_decode failed")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
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
