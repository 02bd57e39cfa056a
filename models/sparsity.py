# SPDX-License-Identifier: Apache-2.0
"""A study of sparse attention: perplexity, needles found, time and bytes for each policy and budget.

A model reads a prompt with full attention, and then reads a part of its blocks in each step. Without --checkpoint the
bundled model answers questions about documents.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pathlib
from typing import Any

import numpy as np

from kvjax._files import create
from kvjax.research import sparsity

from . import commands, recall
from .loading import load

_WORDS = ("mango", "violin", "copper", "winter", "falcon", "marble", "orange", "silver")
_CITIES = ("Oslo", "Lima", "Cairo", "Kyoto", "Porto", "Perth", "Delhi", "Bonn")
_FACTS = 48  # the bundled model tells so many apart
_DOCUMENTS = 16
_QUESTIONS = 8
_SMALL_BLOCK = 4


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = commands.Parser("sparsity", __doc__)
    parser.add_argument("--checkpoint", metavar="PATH", help="a Hugging Face folder or a GGUF file (default: bundled)")
    parser.add_argument("--text", metavar="FILE", type=pathlib.Path, help="a text for the perplexity of a checkpoint")
    parser.add_argument("--prompt", metavar="N", type=int, default=1200, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--tokens", metavar="N", type=int, default=256, help="tokens after a prompt (%(default)s)")
    parser.add_argument("--needles", metavar="N", type=int, default=4, help="needles in a checkpoint's prompts")
    names = f"of {', '.join(sparsity.POLICIES)}, or MODULE:NAME of your own"
    parser.add_argument("--policies", metavar="NAME", nargs="+", default=[*sparsity.POLICIES], help=names)
    shares = "shares of the blocks to read"
    parser.add_argument("--budgets", metavar="SHARE", type=float, nargs="+", default=[0.5, 0.25, 0.12], help=shares)
    parser.add_argument("--block-size", metavar="P", type=int, help="tokens of a block (16; bundled model: 4)")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="save a picture in this file")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    commands.prepare(parser, args)
    with commands.Refusing(parser, "--policies"):
        policies = {name.rpartition(":")[2]: policy_of(name) for name in args.policies}
    with commands.Refusing(parser):
        model, texts, needles = _bundled() if args.checkpoint is None else _checkpoint(args)
        block_size = args.block_size or (_SMALL_BLOCK if args.checkpoint is None else 16)
        options = {"policies": policies, "budgets": args.budgets, "block_size": block_size}
        study, lines = itertools.tee(sparsity.study(model, model.layer_specs(), texts, needles, **options))
        for text in sparsity.table(study):
            print(text, flush=True)
        lines = [*lines]
    if args.json is not None:
        with create(args.json) as file:
            file.write(json.dumps([line._asdict() for line in lines], indent=2) + "\n")
    if args.plot is not None:
        sparsity.plot_study(lines, args.plot)


def policy_of(name: str) -> sparsity.SparsityPolicy:
    """A policy by name, or of your own: MODULE:NAME, or its return value."""
    module, _, attribute = name.rpartition(":")
    if not module and name not in sparsity.POLICIES:
        raise ValueError(f"got {name!r}, wanted one of {', '.join(sparsity.POLICIES)}, or MODULE:NAME")
    value = getattr(importlib.import_module(module), attribute, None) if module else sparsity.POLICIES[name]
    policy = value() if callable(value) else value
    if not isinstance(policy, sparsity.SparsityPolicy):
        raise ValueError(f"{name} is {policy!r}, wanted a SparsityPolicy or a function that returns one")
    return policy


def _bundled() -> tuple[Any, sparsity.Texts, sparsity.Texts]:
    """The bundled model, documents with questions and answers, and documents with a question and its answer."""
    model, _ = load(recall.CHECKPOINT)
    rng = np.random.default_rng(0)
    tokens, _ = recall.make_batch(rng, _DOCUMENTS, _FACTS, _QUESTIONS)
    asked, (mark,) = recall.make_batch(rng, _DOCUMENTS, _FACTS, 1)
    num_prompt = _FACTS * recall.FACT_TOKENS
    return model, sparsity.Texts(tokens, num_prompt), sparsity.Texts(asked[:, : mark + 2], num_prompt)


def _checkpoint(args: argparse.Namespace) -> tuple[Any, sparsity.Texts, sparsity.Texts | None]:
    """A checkpoint's model, a text, and the text's beginning with needles in it."""
    model, tokenizer = load(args.checkpoint)
    if tokenizer is None:
        raise ValueError(f"--checkpoint: {args.checkpoint} has no tokenizer")
    if args.text is None:
        raise ValueError("--text: a checkpoint needs a text")
    tokens = np.array(tokenizer.encode(args.text.read_text()).ids, np.int32)
    wanted = args.prompt + args.tokens
    if tokens.size < wanted:
        raise ValueError(f"--text: got {tokens.size:,} tokens, wanted --prompt and --tokens: {wanted:,}")
    texts = sparsity.Texts(tokens[None, :wanted], args.prompt)
    return model, texts, _needles(tokenizer, tokens[: args.prompt], args.needles) if args.needles else None


def _needles(tokenizer: Any, filler: np.ndarray, count: int) -> sparsity.Texts:
    """The filler with a sentence at some depth, as a prompt of the filler's length, then a question and its answer.

    So the programs for a text of the filler's length serve these prompts too.
    """
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    sentences, ends = [], []
    for city, word in itertools.islice(zip(itertools.cycle(_CITIES), itertools.cycle(_WORDS)), count):
        sentences.append(encode(f"\nThe secret word of {city} is {word}.\n"))
        ends.append([*encode(f"\nThe secret word of {city} is"), *encode(f" {word}")[:1]])
    after = max(map(len, ends))
    rows = []
    for row, (sentence, end) in enumerate(zip(sentences, ends, strict=True)):
        num_filler = filler.size + after - len(sentence) - len(end)
        if num_filler <= 0:
            raise ValueError(f"--prompt: got {filler.size}, wanted more than {len(sentence)} tokens, for the needles")
        depth = int(num_filler * (row + 0.5) / count)
        rows.append([*filler[:depth], *sentence, *filler[depth:num_filler], *end])
    return sparsity.Texts(np.array(rows, np.int32), filler.size)


if __name__ == "__main__":
    main()
