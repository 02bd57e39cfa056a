# SPDX-License-Identifier: Apache-2.0
"""Generate text through the paged cache, with a checkpoint in Hugging Face format or a GGUF file.

A prompt is text if the checkpoint has a tokenizer, else token ids separated by commas or spaces. Prompts and answers go
to standard output, and everything else to standard error. In a chat each turn finds the earlier turns in the cache.
Without a checkpoint the demo runs on the bundled recall model.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import kvjax

from . import chat, commands, demo, session, stores, wires
from .answers import Detokenizer
from .commands import INTERRUPTED, Refusing, number
from .session import MAX_OPTION, SIZES, Session


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.checkpoint is None and (args.prompt or args.prompts or args.json or args.chat):
        parser.error("--checkpoint: got none, wanted the folder of a model")
    if args.chat and (args.prompt or args.prompts):
        parser.error("--chat: got a prompt too, wanted turns from standard input alone")
    if args.rows is None:
        args.rows = 1 if args.chat else SIZES["rows"]
    wires.check(parser, args)
    stores.check(parser, args)
    commands.prepare(parser, args)
    try:
        if args.checkpoint is None:
            return demo.run_command(parser, args)
        status = (_chat if args.chat else _answer)(parser, args)
    except KeyboardInterrupt:  # before anything was generated, or while waiting for a turn
        status = INTERRUPTED
    if status:
        raise SystemExit(status)


def _answer(parser: commands.Parser, args: argparse.Namespace) -> int:
    """Answers the prompts. Returns the exit status."""
    texts = _texts(parser, args)
    model, tokenizer = session.load_model(parser, args)
    prompts = _encode(parser, texts, tokenizer, model.config.vocab_size)
    session.check_length(parser, args, model, prompts)
    screen = (_Lines if args.json else _Screen)(args, texts, prompts, tokenizer)
    with Session(parser, args, model, _note) as answering:
        _, finished = answering.answer(prompts, screen.show, args.seed, args.stop or model.config.eos_token_ids)
        return answering.end(finished)


def _chat(parser: commands.Parser, args: argparse.Namespace) -> int:
    """Answers turns from standard input. Returns the exit status."""
    model, tokenizer = session.load_model(parser, args)
    if tokenizer is None:
        parser.error(f"--chat: {args.checkpoint}: wanted a checkpoint with a tokenizer.json")
    with Refusing(parser, "--chat"):
        template = chat.load_template(args.checkpoint)
    if template is not None and template.fault is not None:
        parser.error(f"--chat: {template.fault}")
    stop = args.stop or chat.stop_tokens(model.config.eos_token_ids, tokenizer, template)
    session.set_length(parser, args, model)
    talk = chat.Chat(tokenizer, template)
    with Session(parser, args, model, _note) as answering:
        for turn, text in enumerate(_turns(parser)):
            with Refusing(parser, "--chat"):
                prompt = talk.ask(text)
            if len(prompt) >= args.max_length:
                _note(f"the chat ends: it has {len(prompt)} tokens, and the most are {args.max_length}")
                break
            screen = (_Lines if args.json else _Screen)(args, [text], [prompt], tokenizer)
            [output], _ = answering.answer([prompt], screen.show, args.seed + turn, stop)
            if answering.cache is None:
                return INTERRUPTED
            talk.answered(output.tokens, screen.answers[0])
            stored = "" if answering.store is None else f", {output.stored_tokens} of them from the store"
            line = f"{output.cached_tokens} of {output.prompt_tokens} prompt tokens reused{stored}"
            if args.speculate:
                line += f", {output.accepted_tokens} of {output.drafted_tokens} drafts accepted"
            _note(f"\033[2m{line}\033[0m" if sys.stderr.isatty() else line)  # dim
        return answering.end(finished=True)


def _turns(parser: commands.Parser) -> Iterator[str]:
    """Yields the lines of standard input, except empty lines. In a terminal, it prompts for each line."""
    prompted = sys.stdin.isatty()
    if prompted:
        _note("a line is a turn; Ctrl-C ends an answer, Ctrl-D the chat")
    while True:
        if prompted:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            line = "\udcff"
        if not line:
            return _note("") if prompted else None
        _check_text(parser, "--chat", line, "a turn")
        if line.strip():
            yield line.rstrip("\n")


def _parser() -> commands.Parser:
    parser = commands.Parser("generate", __doc__)
    parser.add_argument("--checkpoint", metavar="PATH", help="a Hugging Face folder, or a GGUF file")
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", type=pathlib.Path, help="more prompts, one a line")
    parser.add_argument("--chat", action="store_true", help="answer turns from standard input, one a line")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each prompt, a line each, and nothing else"
    )
    session.add_dtype(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=number(int, 1, MAX_OPTION),
        default=SIZES["max_new_tokens"],
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument("--temperature", type=number(float, 0.0), default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=number(int, 1, MAX_OPTION), metavar="K")
    parser.add_argument("--top-p", type=number(float, 0.0, 1.0), metavar="P")
    parser.add_argument("--min-p", type=number(float, 0.0, 1.0), metavar="P", help="of the likeliest token's")
    parser.add_argument(
        "--seed", type=number(int, 0, 2**31), default=0, help="of the first prompt; the next has the next"
    )
    stop = "a stop token; may be repeated (default: the checkpoint's)"
    parser.add_argument("--stop", type=number(int, 0, 2**31 - 1), action="append", default=[], metavar="ID", help=stop)
    session.add_sizes(parser, rows=f"(default: {SIZES['rows']}, in a chat 1)", length="as many, up to a power of two")
    session.add_speculation(parser)
    commands.add_scan(parser)
    commands.add_outputs(parser)
    stores.add_store(parser)
    wires.add_wires(parser)
    return parser


def _texts(parser: commands.Parser, args: argparse.Namespace) -> list[str]:
    with Refusing(parser, "--prompts", args.prompts):
        texts = args.prompt + (args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else [])
    if not texts:
        parser.error("--prompt: got none, wanted at least one (or --prompts FILE)")
    for i, text in enumerate(texts, 1):
        _check_text(parser, "--prompt", text, f"prompt {i}")
    return texts


def _check_text(parser: commands.Parser, option: str, text: str, place: str) -> None:
    """Refuses text from bytes outside UTF-8, which Python replaces by lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        parser.error(f"{option}: got bytes that are not UTF-8 in {place}")


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


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Screen:
    """Prompts and answers on standard output, in the order of the prompts. The first unfinished answer grows.

    An answer begins on a new line under its prompt, and an empty line follows it. In a chat the user has typed the
    prompts, so they are not printed.
    """

    def __init__(self, args: argparse.Namespace, texts: list[str], prompts: list[list[int]], tokenizer: Any):
        decode = tokenizer.decode if tokenizer else lambda tokens: " ".join(map(str, tokens))
        self.args = args
        self.texts = texts
        self.words = [Detokenizer(decode, prompt) for prompt in prompts]
        self.answers: list[str] = []  # the texts so far
        self.num_done = 0  # finished answers
        self.num_tokens = 0  # tokens shown of the last answer

    def show(self, outputs: list[kvjax.serving.Output], *, last: bool = False) -> None:
        """Shows new text. With `last` it shows all text, finished or not."""
        for output in outputs[self.num_done :]:
            if len(self.answers) == self.num_done:
                self.begin()
            words = self.words[self.num_done]
            done = last or output.finish is not None
            num_shown = len(self.answers[-1].lstrip())  # without the space between prompt and answer
            self.answers[-1] += words.add(*output.tokens[self.num_tokens :]) + (words.end() if done else "")
            self.num_tokens = len(output.tokens)
            self.say(self.answers[-1].lstrip()[num_shown:], output, done)
            if not done:
                break
            self.num_done += 1

    def begin(self) -> None:
        """Begins an answer, after its prompt."""
        if not self.args.chat and not self.args.json:
            print("\n" if self.answers else "", "> ", self.texts[self.num_done], sep="", flush=True)
        self.answers.append("")
        self.num_tokens = 0

    def say(self, new: str, output: kvjax.serving.Output, done: bool) -> None:
        """Shows the new text of the last answer."""
        print(new, end="\n" if done else "", flush=True)


class _Lines(_Screen):
    """A line with a JSON object for each finished prompt. A store and a drafter add their numbers of tokens."""

    def say(self, new: str, output: kvjax.serving.Output, done: bool) -> None:
        """Prints the object."""
        if not done:
            return
        fields = {
            "prompt": self.texts[self.num_done],
            "text": self.answers[-1],
            "tokens": output.tokens,
            "logprobs": output.logprobs,
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.cached_tokens,
            **({} if self.args.store is None else {"stored_tokens": output.stored_tokens}),
            "finish": output.finish,
        }
        if self.args.speculate:
            fields |= {"drafted_tokens": output.drafted_tokens, "accepted_tokens": output.accepted_tokens}
        print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
