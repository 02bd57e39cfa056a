# SPDX-License-Identifier: Apache-2.0
"""Generate text through the paged cache: `python -m models.generate [--checkpoint DIR --prompt TEXT ...]`.

Without a checkpoint it runs the demo on the bundled recall model. A prompt is text if the checkpoint has a
tokenizer, else token ids separated by commas or spaces.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import rich.console
import rich.progress

import kvjax
from models.loading import load


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    args = _parser().parse_args(arguments)
    if args.checkpoint is None and not args.prompt and args.prompts is None:
        from models import demo

        events, cache = demo.run()
    else:
        events, cache = _generate(args)
    if args.events is not None:
        with args.events.open("w") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)
    if args.plot is not None:
        kvjax.plot_blocks(cache.state, args.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.generate", description=__doc__)
    parser.add_argument("--checkpoint", metavar="DIR", type=pathlib.Path, help="a Hugging Face folder")
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", type=pathlib.Path, help="more prompts, one a line")
    parser.add_argument("--dtype", default="float32", help="of weights and K/V (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the next has the next")
    parser.add_argument(
        "--stop",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="a stop token; may be repeated (default: the checkpoint's)",
    )
    parser.add_argument(
        "--blocks", type=int, default=512, metavar="N", help="blocks for each attention window (default: %(default)s)"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="P", help="tokens a block (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, metavar="S", help="sequences at a time (default: %(default)s)")
    parser.add_argument("--events", metavar="FILE.jsonl", type=pathlib.Path, help="write the cache's events there")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw the blocks there when done")
    return parser


def _generate(args: argparse.Namespace) -> tuple[list[dict[str, Any]], kvjax.Cache]:
    texts = args.prompt + (args.prompts.read_text().splitlines() if args.prompts else [])
    if args.checkpoint is None:
        raise SystemExit("--checkpoint: got none, wanted the folder of a model for these prompts")
    if not texts:
        raise SystemExit("--prompt: got none, wanted at least one (or --prompts FILE)")
    model, tokenizer = load(args.checkpoint, dtype=args.dtype)
    prompts = [tokenizer.encode(text).ids if tokenizer else _ids(text) for text in texts]
    longest = max(map(len, prompts)) + args.max_new_tokens
    spec = kvjax.make_spec(
        model.layer_specs(),
        num_blocks=args.blocks,
        max_seqs=args.rows,
        max_length=longest,
        block_size=args.block_size,
        dtype=args.dtype,
    )
    cache, events, outputs = kvjax.Cache.create(spec), [], []
    console, began = rich.console.Console(), time.perf_counter()
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("generating", total=len(prompts) * args.max_new_tokens)
        for progress in kvjax.stream(
            model,
            cache,
            prompts,
            max_new_tokens=args.max_new_tokens,
            sampling=kvjax.Sampling(args.temperature, args.top_k, args.top_p),
            seeds=range(args.seed, args.seed + len(prompts)),
            stop_tokens=args.stop or model.config.eos_token_ids,
        ):
            cache, outputs = progress.cache, progress.outputs
            events += progress.events
            bar.advance(task, sum(map(len, progress.new.values())))
    seconds = time.perf_counter() - began
    for text, output in zip(texts, outputs, strict=True):
        answer = tokenizer.decode(output.tokens) if tokenizer else " ".join(map(str, output.tokens))
        console.print(f"[bold]{text}[/bold] {answer}", highlight=False, soft_wrap=True)
        if output.finish not in ("length", "stop"):
            console.print(f"  ended early: {output.finish}", style="red")
    reused, asked = sum(o.cached_tokens for o in outputs), sum(o.prompt_tokens for o in outputs)
    made = sum(len(o.tokens) for o in outputs)
    console.print(f"{asked:,} prompt tokens, {reused:,} of them reused; {made:,} tokens generated in {seconds:.1f} s")
    return events, cache


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise SystemExit(f"--prompt: got {text!r}, wanted token ids (the checkpoint has no tokenizer.json)") from None


if __name__ == "__main__":
    main()
