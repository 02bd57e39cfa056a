# SPDX-License-Identifier: Apache-2.0
"""Generate text through the paged cache, with a checkpoint in Hugging Face format.

A prompt is text if the checkpoint has a tokenizer, else token ids separated by commas or spaces. Answers go to standard
output, all else to standard error. Without a checkpoint the demo runs on the bundled recall model.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

import kvjax

from . import commands, demo, wires
from .commands import number
from .decoder import Decoder
from .loading import load
from .speech import Speech
from .stopwatch import Stopwatch

INTERRUPTED = 130  # the exit status that shells give a command which Ctrl-C ended
STEPS = 8  # to a jitted loop: after each loop text is shown, and Ctrl-C takes effect


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.checkpoint is None and (args.prompt or args.prompts or args.json):
        parser.error("--checkpoint: got none, wanted the folder of a model")
    wires.check(parser, args)
    commands.prepare(parser, args)
    try:
        if args.checkpoint is None:
            entries, cache = demo.run()
            commands.save(parser, args, entries)
            return commands.draw(parser, args, cache)
        texts = _texts(parser, args)
        model, tokenizer = _load(parser, args)
        prompts = _encode(parser, texts, tokenizer, model.config.vocab_size)
        screen = (_Lines if args.json else _Screen)(texts, [Speech(tokenizer, prompt) for prompt in prompts])
        cache, finished = _generate(parser, args, model, prompts, screen)
        commands.draw(parser, args, cache)
    except KeyboardInterrupt:  # before anything was generated
        finished = False
    if not finished:
        raise SystemExit(INTERRUPTED)


def _parser() -> commands.Parser:
    parser = commands.Parser("generate", __doc__)
    parser.add_argument("--checkpoint", metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", type=pathlib.Path, help="more prompts, one a line")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each prompt, a line each, and nothing else"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and K/V (default: %(default)s)",
    )
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=number(float, 0.0), default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=number(int, 1), metavar="K")
    parser.add_argument("--top-p", type=number(float, 0.0, 1.0), metavar="P")
    parser.add_argument(
        "--seed", type=number(int, 0, 2**31), default=0, help="of the first prompt; the next has the next"
    )
    parser.add_argument(
        "--stop",
        type=number(int, 0, 2**31 - 1),
        action="append",
        default=[],
        metavar="ID",
        help="a stop token; may be repeated (default: the checkpoint's)",
    )
    parser.add_argument(
        "--blocks",
        type=number(int, 1),
        default=512,
        metavar="N",
        help="blocks for each attention window (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size", type=number(int, 1), default=16, metavar="P", help="tokens a block (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=number(int, 1), default=8, metavar="S", help="sequences at a time (default: %(default)s)"
    )
    commands.add_scan(parser)
    commands.add_outputs(parser)
    wires.add_wires(parser)
    return parser


def _texts(parser: commands.Parser, args: argparse.Namespace) -> list[str]:
    try:
        texts = args.prompt + (args.prompts.read_text().splitlines() if args.prompts else [])
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {commands.reason(error)}")
    if not texts:
        parser.error("--prompt: got none, wanted at least one (or --prompts FILE)")
    return texts


def _load(parser: commands.Parser, args: argparse.Namespace) -> tuple[Decoder, Any]:
    if not os.path.isdir(args.checkpoint):
        parser.error(f"--checkpoint: {args.checkpoint}: no such folder")
    try:
        return load(args.checkpoint, dtype=args.dtype, scan=args.scan)
    except (OSError, ValueError) as error:
        parser.error(f"--checkpoint: {commands.reason(error)}")


def _encode(parser: commands.Parser, texts: list[str], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The prompts' token ids, all of them in the model's vocabulary."""
    prompts = [tokenizer.encode(text).ids if tokenizer else _ids(parser, text) for text in texts]
    for i, prompt in enumerate(prompts, 1):
        if not prompt:
            parser.error(f"--prompt: got no token in prompt {i}, wanted at least one")
        for token in prompt:
            if not 0 <= token < vocab_size:
                parser.error(
                    f"--prompt: got token id {token} in prompt {i}, wanted 0 to {vocab_size - 1} "
                    f"(the vocabulary has {vocab_size})"
                )
    return prompts


def _ids(parser: commands.Parser, text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        parser.error(f"--prompt: got {text!r}, wanted token ids (the checkpoint has no tokenizer.json)")


def _generate(
    parser: commands.Parser, args: argparse.Namespace, model: Decoder, prompts: list[list[int]], screen: _Screen
) -> tuple[Any, bool]:
    """Generates and shows text; returns the cache, and whether it finished (false: ended by Ctrl-C)."""
    try:
        spec = kvjax.make_spec(
            model.layer_specs(),
            num_blocks=args.blocks,
            max_seqs=args.rows,
            max_length=max(map(len, prompts)) + args.max_new_tokens,
            block_size=args.block_size,
            dtype=args.dtype,
        )
        sampling = kvjax.Sampling(args.temperature, args.top_k, args.top_p)
    except ValueError as error:
        parser.error(str(error))
    outputs, cache, finished = [], kvjax.Cache.create(spec), True
    with wires.Wires(parser, args, spec, _note) as told, Stopwatch(_note) as watch:
        stream = kvjax.stream(
            model,
            cache,
            prompts,
            max_new_tokens=args.max_new_tokens,
            sampling=sampling,
            seeds=range(args.seed, args.seed + len(prompts)),
            stop_tokens=args.stop or model.config.eos_token_ids,
            steps=STEPS,
            log_events=False,
            listener=told.listener,
        )
        progress: kvjax.serving.Progress | None = None
        try:
            for progress in watch.timed(stream):
                outputs, cache = progress.outputs, progress.cache
                screen.show(outputs)
                told.see(progress)
        except KeyboardInterrupt:  # during `show`: the stream did not receive it
            finished = False
            stream.close()
            if progress is not None:
                cache = progress.cache
        except kvjax.serving.GenerationInterrupted as stop:
            if not isinstance(stop.__cause__, KeyboardInterrupt):
                raise
            finished, outputs, cache = False, stop.outputs, stop.cache
    screen.show(outputs, last=True)
    for i, output in enumerate(outputs, 1):
        if output.finish not in ("length", "stop"):
            _note(f"prompt {i} ended early: {output.finish or 'interrupted'}")
    _note(watch.report())
    return cache, finished


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Screen:
    """Prompts and answers on standard output, in the order of the prompts; the first unfinished answer grows.

    Args:
      texts: the prompts.
      speeches: of each prompt.
    """

    def __init__(self, texts: list[str], speeches: list[Speech]):
        self.texts, self.speeches = texts, speeches
        self.number = 0  # of the prompt whose answer is being shown
        self.begun = False

    def show(self, outputs: list[kvjax.serving.Output], *, last: bool = False) -> None:
        """Shows new text; with `last` all of it, finished or not."""
        for output in outputs[self.number :]:
            done = last or output.finish is not None
            self.say(output, done)
            if not done:
                break
            self.number, self.begun = self.number + 1, False

    def say(self, output: kvjax.serving.Output, done: bool) -> None:
        """Shows the new text of the current prompt."""
        prompt, self.begun = "" if self.begun else self.texts[self.number], True
        more = self.speeches[self.number].more(output.tokens, done=done)
        print(prompt, more, sep="", end="\n" if done else "", flush=True)


class _Lines(_Screen):
    """A JSON object a line for each prompt that is done."""

    def say(self, output: kvjax.serving.Output, done: bool) -> None:
        """Prints the object."""
        if not done:
            return
        fields = {
            "prompt": self.texts[self.number],
            "text": self.speeches[self.number].text(output.tokens),
            "tokens": output.tokens,
            "logprobs": output.logprobs,
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.cached_tokens,
            "finish": output.finish,
        }
        print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
