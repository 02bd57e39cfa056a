# SPDX-License-Identifier: Apache-2.0
"""Text of an answer that grows token by token: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

from kvjax.serving import Handle, Output

REFUSED = ("row_full", "no_blocks")  # the ends of requests that the cache cannot hold
PERIOD = 0.02  # seconds from one piece of an answer to the next: nobody reads faster
CONTEXT = 6  # tokens of the prompt that are decoded with an answer: they decide on its first space
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MOST_WAITING = 16  # tokens that end with an unfinished character
_CHARACTER = 4  # bytes of a character, and so its tokens, at most

Decode = Callable[[list[int]], str]


class Detokenizer:
    """The text of tokens, by decoding each a bounded number of times.

    The bytes of an unfinished character wait for the others. At most 16 tokens wait: of more, all but the last few are
    shown as they are, since no character has more than four bytes. The prompt's last tokens decide on the first space.

    Source: text-generation-inference and vLLM, `detokenize_incrementally`.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]):
        self._decode, self._tokens = decode, list(prompt[-CONTEXT:])
        self._from, self._to = 0, len(self._tokens)  # the tokens that decide on the next text; those before are done

    def add(self, *tokens: int) -> str:
        """The new text with these tokens; empty if a character is unfinished."""
        self._tokens += tokens
        new, end = self._new(len(self._tokens)), len(self._tokens)
        if not new or new.endswith(_UNFINISHED):
            if end - self._to <= _MOST_WAITING:
                return ""
            new, end = self._before_unfinished()
            if not new:  # special tokens, which have no text: what was before them stays the context
                del self._tokens[self._to : end]
                return ""
        self._from, self._to = self._to, end
        return new

    def end(self) -> str:
        """The text that waits: a character that nothing has finished."""
        new, self._to = self._new(len(self._tokens)), len(self._tokens)
        return new

    def _before_unfinished(self) -> tuple[str, int]:
        """The new text up to a character that may be unfinished, and the number of tokens up to there."""
        tokens = self._tokens[self._from :]
        whole, last = self._decode(tokens), len(tokens)
        # A part that ends within a finished character has another text than the whole.
        size = next(n for n in range(last - _CHARACTER + 1, last + 1) if whole.startswith(self._decode(tokens[:n])))
        return self._new(self._from + size), self._from + size

    def _new(self, end: int) -> str:
        before, whole = self._decode(self._tokens[self._from : self._to]), self._decode(self._tokens[self._from : end])
        if whole.startswith(before):
            return whole[len(before) :]
        return whole[len(before.rstrip(_UNFINISHED)) :]  # the prompt has ended within a character


class Answer:
    """An answer's text, and as much of it as may be shown.

    Text that may become a stop string is held back; a stop string ends the answer and is no part of it. Stop strings
    that are complete with the first `min_tokens` tokens are text like any other. With stop strings, or `has_starts`,
    the text is made token by token, which takes more time.
    """

    def __init__(
        self, decode: Decode, prompt: Sequence[int], stop: Sequence[str] = (), *, has_starts: bool = True,
        min_tokens: int = 0,
    ):  # fmt: skip
        self._words = Detokenizer(decode, prompt)
        self.prompt = list(prompt[-CONTEXT:])  # its last tokens, which decide on the first space of the answer
        self._stop, self._min_tokens, self._by_token = stop, min_tokens, has_starts or bool(stop)
        self._longest = max(map(len, stop), default=0)
        self.text = ""  # so far, with what is held back
        self.starts = list[int]()  # of each token: the index of its first character, or of those that came with it
        self.stopped = False  # whether a stop string was found
        self.num_tokens = 0  # that were added, those of the stop string included
        self._shown = 0

    @property
    def num_shown(self) -> int:
        """Tokens whose whole text was shown; a token without text counts with the next one."""
        begun = bisect.bisect_left(self.starts, self._shown)
        end = self.starts[begun] if begun < len(self.starts) else len(self.text)
        return begun - (end > self._shown)

    def texts(self, part: slice) -> list[str]:
        """The text of each token of a part; all together are the answer's text.

        A character of several tokens is the text of the last one, and the others have none.
        """
        bounds = [*self.starts[part.start : part.stop + 1], len(self.text)]
        return [self.text[start:end] for start, end in itertools.pairwise(bounds)][: part.stop - part.start]

    def add(self, tokens: Sequence[int], *, done: bool = False) -> str:
        """Adds tokens, the last ones if `done`; returns the text that may be shown now, and was not yet."""
        for some in ([token] for token in tokens) if self._by_token else [tokens]:
            if self.stopped:
                break
            self.starts += [len(self.text)] * len(some)
            self.num_tokens += len(some)
            self._add(self._words.add(*some))
        if done and not self.stopped:
            self._add(self._words.end())
        until = len(self.text) - (0 if done or self.stopped else self._held())
        new, self._shown = self.text[self._shown : until], max(until, self._shown)
        return new

    def _add(self, new: str) -> None:
        before = len(self.text)
        self.text += new
        stops = self._stop if new and self.num_tokens > self._min_tokens else ()
        found = [at for stop in stops if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.stopped, self.text = True, self.text[: min(found)]
            while self.starts and self.starts[-1] >= len(self.text):
                self.starts.pop()

    def _held(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        most = min(len(self.text), self._longest - 1)
        for length in range(most, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0


@dataclasses.dataclass
class Piece:
    """A part of an answer, as it comes."""

    text: str  # new
    tokens: list[int]  # whose text is shown by now, and was not yet; no stop token, and nothing of a stop string
    before: list[int]  # the last tokens before them
    texts: list[str]  # of each token
    starts: list[int]  # of each token: the index of its first character in the answer
    logprobs: list[float | None]  # None for a prompt's first token
    top_logprobs: list[dict[int, float] | None]  # empty unless the engine notes them
    finish: str | None  # "stop" or "length" with the last piece
    num_tokens: int  # of the answer, as they are billed: all that were generated up to its end


class Failed(RuntimeError):
    """The end of a request that is neither a stop nor a length."""

    def __init__(self, finish: str | None):
        super().__init__(f"the request was not served: {finish}")
        self.finish = finish  # of its output


async def pieces(
    handle: Handle, answer: Answer, stop_tokens: Collection[int], *, listens: bool, has_top: bool,
    shows_stop: bool = False,
) -> AsyncGenerator[Piece]:  # fmt: skip
    """An answer as it comes; a stop string cancels the request, and stop tokens have no text.

    With `listens` the engine is to make few tokens at a time; `has_top` says that it notes the likeliest tokens. With
    `shows_stop` the last piece has the stop token, without text.

    Raises:
      EngineError: if the engine has failed the request.
      Failed: if it was not served.
    """
    seen = shown = 0
    outputs: Any = handle.changes(is_streaming=listens, period=PERIOD)  # a generator
    async with contextlib.aclosing(outputs) as changes:
        async for output in changes:
            done = handle.done  # before the tokens are read: then they are all there
            columns = (output.tokens, output.logprobs, *([output.top_logprobs] if has_top else []))
            end = min(map(len, columns))  # another thread may be adding to them, one after the other
            new = list(itertools.takewhile(lambda token: token not in stop_tokens, output.tokens[seen:end]))
            is_stop = len(new) < end - seen
            text, seen = answer.add(new, done=done or is_stop), end
            if answer.stopped:
                handle.cancel()
            finish = "stop" if answer.stopped or is_stop else _finish(output) if done else None
            if text or finish:
                part = slice(shown, len(answer.starts) if finish else answer.num_shown)
                before = [*answer.prompt, *output.tokens[max(shown - CONTEXT, 0) : shown]][-CONTEXT:]
                texts, starts = answer.texts(part), answer.starts[part]
                if is_stop and shows_stop and not answer.stopped:
                    part = slice(part.start, part.stop + 1)
                    texts, starts = [*texts, ""], [*starts, len(answer.text)]
                yield Piece(
                    text, output.tokens[part], before, texts, starts, output.logprobs[part],
                    output.top_logprobs[part], finish, answer.num_tokens + is_stop,
                )  # fmt: skip
                shown = part.stop
            if finish:
                return


def _finish(output: Output) -> str:
    if output.finish in ("length", "stop"):
        return output.finish
    if output.finish in REFUSED and output.tokens:
        return "length"  # of what the cache holds
    raise Failed(output.finish)
