# SPDX-License-Identifier: Apache-2.0
"""Generate text through the paged cache, with a checkpoint in Hugging Face format or a GGUF file.

A prompt is text if the checkpoint has a tokenizer, else token ids separated by commas or spaces. Prompts and answers go
to standard output, all else to standard error. In a chat each turn finds those before it in the cache. Without a
checkpoint the demo runs on the bundled recall model.
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
from .commands import INTERRUPTED, number
from .session import MOST, SIZES, Session
from .speech import Speech


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
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
    except KeyboardInterrupt:  # before anything was generated, or while a turn is waited for
        status = INTERRUPTED
    if status:
        raise SystemExit(status)


def _answer(parser: commands.Parser, args: argparse.Namespace) -> int:
    """Answers the prompts; returns the exit status."""
    texts = _texts(parser, args)
    model, tokenizer = session.load_model(parser, args)
    prompts = _encode(parser, texts, tokenizer, model.config.vocab_size)
    session.check_length(parser, args, model, prompts)
    speeches, has_store = [Speech(tokenizer, prompt) for prompt in prompts], args.store is not None
    screen = _Lines(texts, speeches, has_store=has_store) if args.json else _Screen(texts, speeches)
    with Session(parser, args, model, _note) as answering:
        _, finished = answering.answer(prompts, screen, args.seed, args.stop or model.config.eos_token_ids)
        return _end(parser, args, answering, finished)


def _chat(parser: commands.Parser, args: argparse.Namespace) -> int:
    """Answers turns from standard input; returns the exit status."""
    model, tokenizer = session.load_model(parser, args)
    if tokenizer is None:
        parser.error(f"--chat: {args.checkpoint}: wanted a checkpoint with a tokenizer.json")
    try:
        template = chat.load_template(args.checkpoint)
    except (OSError, ValueError) as error:
        parser.error(f"--chat: {commands.reason(error)}")
    if template is not None and template.fault is not None:
        parser.error(f"--chat: {template.fault}")
    stop = args.stop or chat.stop_tokens(model.config.eos_token_ids, tokenizer, template)
    session.set_length(parser, args, model)
    most = args.max_length
    talk = chat.Chat(tokenizer, template)
    with Session(parser, args, model, _note) as answering:
        for turn, text in enumerate(_turns(parser)):
            try:
                prompt = talk.ask(text)
            except ValueError as error:
                parser.error(f"--chat: {error}")
            if len(prompt) >= most:
                _note(f"the chat ends: it has {len(prompt)} tokens, and the most are {most}")
                break
            speech = Speech(tokenizer, prompt)
            has_store, shown = args.store is not None, ([text], [speech])
            screen = _Lines(*shown, has_store=has_store) if args.json else _Screen(*shown, echo=False)
            [output], _ = answering.answer([prompt], screen, args.seed + turn, stop)
            if answering.cache is None:
                return INTERRUPTED
            talk.answered(output.tokens, speech.text(output.tokens))
            stored = "" if answering.store is None else f", {output.stored_tokens} of them from the store"
            _note(_dim(f"{output.cached_tokens} of {output.prompt_tokens} prompt tokens reused{stored}"))
        return _end(parser, args, answering, finished=True)


def _end(parser: commands.Parser, args: argparse.Namespace, answering: Session, finished: bool) -> int:
    """Draws the cache, and serves it on if that is wanted; returns the exit status."""
    answering.report()
    commands.draw(parser, args, answering.cache)
    if args.stay and finished:
        answering.stay()
    return answering.close() or (0 if finished else INTERRUPTED)


def _turns(parser: commands.Parser) -> Iterator[str]:
    """The lines of standard input, but for empty ones; a person is prompted for each."""
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
        "--max-new-tokens", type=number(int, 1, MOST), default=SIZES["max_new_tokens"], metavar="N",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--temperature", type=number(float, 0.0), default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=number(int, 1, MOST), metavar="K")
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
    session.add_sizes(parser, rows=f"(default: {SIZES['rows']}, in a chat 1)", length="as many, up to a power of two")
    commands.add_scan(parser)
    commands.add_outputs(parser)
    stores.add_store(parser)
    wires.add_wires(parser)
    return parser


def _texts(parser: commands.Parser, args: argparse.Namespace) -> list[str]:
    try:
        texts = args.prompt + (args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else [])
    except UnicodeDecodeError as error:
        parser.error(f"--prompts: {args.prompts}: not UTF-8 at byte {error.start}")
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {commands.reason(error, args.prompts)}")
    if not texts:
        parser.error("--prompt: got none, wanted at least one (or --prompts FILE)")
    for i, text in enumerate(texts, 1):
        _check_text(parser, "--prompt", text, f"prompt {i}")
    return texts


def _check_text(parser: commands.Parser, option: str, text: str, what: str) -> None:
    """Refuses text from bytes that were not UTF-8, for which Python puts lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        parser.error(f"{option}: got bytes that are not UTF-8 in {what}")


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


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text


class _Screen:
    """Prompts and answers on standard output, in the order of the prompts; the first unfinished answer grows.

    An answer has lines of its own, under its prompt; an empty line separates it from the next prompt.

    Args:
      texts: the prompts.
      speeches: of each prompt.
      echo: whether to show the prompts.
    """

    def __init__(self, texts: list[str], speeches: list[Speech], *, echo: bool = True):
        self.texts, self.speeches, self.echo = texts, speeches, echo
        self.number = 0  # of the prompt whose answer is being shown
        self.begun = self.shown = False

    def show(self, outputs: list[kvjax.serving.Output], *, last: bool = False) -> None:
        """Shows new text; with `last` all of it, finished or not."""
        for output in outputs[self.number :]:
            done = last or output.finish is not None
            self.say(output, done)
            if not done:
                break
            self.number, self.begun, self.shown = self.number + 1, False, False

    def say(self, output: kvjax.serving.Output, done: bool) -> None:
        """Shows the new text of the current prompt."""
        if self.echo and not self.begun:
            print("\n" if self.number else "", "> ", self.texts[self.number], sep="", flush=True)
        more = self.speeches[self.number].more(output.tokens, done=done)
        more = more if self.shown else more.lstrip()  # the space between prompt and answer
        self.begun, self.shown = True, self.shown or bool(more)
        print(more, end="\n" if done else "", flush=True)


class _Lines(_Screen):
    """A JSON object a line for each prompt that is done; with a store it also has the tokens that came from there."""

    def __init__(self, texts: list[str], speeches: list[Speech], *, has_store: bool):
        super().__init__(texts, speeches)
        self.has_store = has_store

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
            **({"stored_tokens": output.stored_tokens} if self.has_store else {}),
            "finish": output.finish,
        }
        print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
