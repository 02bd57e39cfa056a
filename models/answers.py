# SPDX-License-Identifier: Apache-2.0
"""Collects the text of an answer token by token. It shows only whole characters, and no part of a stop string."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

from kvjax.serving import Handle, Output

REFUSED = ("row_full", "no_blocks")  # reasons for the end of a request if the cache has no room for it
PERIOD = 0.02  # seconds between two pieces of an answer, since nobody reads faster
CONTEXT = 6  # last tokens of the prompt to decode with an answer, because they decide on its first space
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MAX_WAITING = 16  # tokens without text, because the last character is unfinished
_CHARACTER_BYTES = 4  # the most bytes of a character, and so its most tokens

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Decodes the tokens of an answer as they arrive, each only a few times.

    An unfinished character waits for its missing bytes. At most 16 tokens wait. If there are more, all except the last
    few get their text immediately, because no character has more than four bytes.

    Source: text-generation-inference and vLLM, `detokenize_incrementally`.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]):
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT:])
        # The next text depends on the tokens from `_first_context` on. The tokens before `_first_new` have their text.
        self._first_context = 0
        self._first_new = len(self._tokens)

    def add(self, *tokens: int) -> str:
        """Adds tokens and returns the new text, which is empty while a character is unfinished."""
        self._tokens += tokens
        end = len(self._tokens)
        new_text = self._new_text(end)
        if not new_text or new_text.endswith(_UNFINISHED):
            if end - self._first_new <= _MAX_WAITING:
                return ""
            new_text, end = self._before_unfinished()
            if not new_text:  # special tokens have no text, so the context does not change
                del self._tokens[self._first_new : end]
                return ""
        self._first_context = self._first_new
        self._first_new = end
        return new_text

    def end(self) -> str:
        """Returns the waiting text, even if its last character is unfinished."""
        end = len(self._tokens)
        new_text = self._new_text(end)
        self._first_new = end
        return new_text

    def _before_unfinished(self) -> tuple[str, int]:
        """The new text before a character which may be unfinished, and the number of tokens before it."""
        tokens = self._tokens[self._first_context :]
        num_tokens = len(tokens)
        text = self._decode(tokens)
        # If a prefix ends inside a finished character, its text is not a prefix of the whole text.
        prefix_size = next(
            size
            for size in range(num_tokens - _CHARACTER_BYTES + 1, num_tokens + 1)
            if text.startswith(self._decode(tokens[:size]))
        )
        end = self._first_context + prefix_size
        return self._new_text(end), end

    def _new_text(self, end: int) -> str:
        old_text = self._decode(self._tokens[self._first_context : self._first_new])
        text = self._decode(self._tokens[self._first_context : end])
        if text.startswith(old_text):
            return text[len(old_text) :]
        return text[len(old_text.rstrip(_UNFINISHED)) :]  # the prompt has ended within a character


class Answer:
    """The text of an answer, and the part of it to show.

    For example, with the stop string "END", the text "the E" is shown as "the " until the next token decides about the
    "E". A stop string ends the answer and is not part of it. If it is complete within the first `min_tokens` tokens, it
    does not count. With stop strings or with `has_starts`, each token is decoded separately, which takes more time.

    Attributes:
      prompt: The last tokens of the prompt. They decide on the first space of the answer.
      text: The text so far, including the part held back.
      starts: For each token, the index in `text` of its first character, or of the first character of its group.
      stopped: Whether a stop string has ended the answer.
      num_tokens: The number of tokens so far, including the tokens of a stop string.
    """

    def __init__(
        self,
        decode: Decode,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        has_starts: bool = True,
        min_tokens: int = 0,
    ):
        self._detokenizer = Detokenizer(decode, prompt)
        self.prompt = list(prompt[-CONTEXT:])
        self._stop = stop
        self._min_tokens = min_tokens
        self._by_token = has_starts or bool(stop)
        self._longest_stop = max(map(len, stop), default=0)
        self.text = ""
        self.starts = list[int]()
        self.stopped = False
        self.num_tokens = 0
        self._num_shown_characters = 0

    @property
    def num_shown(self) -> int:
        """The number of tokens whose whole text was shown. A token without text counts together with the next token."""
        num_begun = bisect.bisect_left(self.starts, self._num_shown_characters)
        end = self.starts[num_begun] if num_begun < len(self.starts) else len(self.text)
        return num_begun - (end > self._num_shown_characters)

    def texts(self, part: slice) -> list[str]:
        """The text of each token of a part. Joined, the texts of all tokens are the text of the answer.

        If a character has several tokens, it belongs to the last of them, and the others have no text.
        """
        bounds = [*self.starts[part.start : part.stop + 1], len(self.text)]
        return [self.text[start:end] for start, end in itertools.pairwise(bounds)][: part.stop - part.start]

    def add(self, tokens: Sequence[int], *, done: bool = False) -> str:
        """Adds tokens and returns the text to show now. `done` says whether the answer ends with them."""
        groups = [[token] for token in tokens] if self._by_token else [tokens]
        for group in groups:
            if self.stopped:
                break
            self.starts += [len(self.text)] * len(group)
            self.num_tokens += len(group)
            self._add_text(self._detokenizer.add(*group))
        if done and not self.stopped:
            self._add_text(self._detokenizer.end())
        num_held = 0 if done or self.stopped else self._num_held()
        end = len(self.text) - num_held
        new_text = self.text[self._num_shown_characters : end]
        self._num_shown_characters = max(end, self._num_shown_characters)
        return new_text

    def _add_text(self, new_text: str) -> None:
        old_length = len(self.text)
        self.text += new_text
        if not new_text or self.num_tokens <= self._min_tokens:
            return
        indices = [self.text.find(stop, max(0, old_length - len(stop) + 1)) for stop in self._stop]
        stop_starts = [index for index in indices if index >= 0]
        if stop_starts:
            self.stopped = True
            self.text = self.text[: min(stop_starts)]
            while self.starts and self.starts[-1] >= len(self.text):
                self.starts.pop()

    def _num_held(self) -> int:
        """The length of the longest end of the text that is a beginning of a stop string."""
        max_length = min(len(self.text), self._longest_stop - 1)
        for length in range(max_length, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0


@dataclasses.dataclass
class Piece:
    """A part of an answer.

    Attributes:
      text: The new text.
      tokens: The tokens whose text has become complete, without stop tokens and the tokens of a stop string.
      before: The last tokens before `tokens`.
      texts: The text of each token.
      starts: For each token, the index of its first character in the answer.
      logprobs: The log-probability of each token. None stands for the first token of a prompt.
      top_logprobs: The likeliest tokens at each token's place. Empty if the engine does not record them.
      finish: The reason for the end, "stop" or "length", in the last piece. None in other pieces.
      num_tokens: The number of tokens to bill, which are all tokens up to the end of the piece.
    """

    text: str
    tokens: list[int]
    before: list[int]
    texts: list[str]
    starts: list[int]
    logprobs: list[float | None]
    top_logprobs: list[dict[int, float] | None]
    finish: str | None
    num_tokens: int


class Failed(RuntimeError):
    """A request ended for a reason other than a stop or its length.

    Attributes:
      finish: The reason in the output of the request.
    """

    def __init__(self, finish: str | None):
        super().__init__(f"the request was not served: {finish}")
        self.finish = finish


async def pieces(
    handle: Handle,
    answer: Answer,
    stop_tokens: Collection[int],
    *,
    is_streaming: bool,
    has_top: bool,
    shows_stop: bool = False,
) -> AsyncGenerator[Piece]:
    """Yields an answer as it arrives. A stop string cancels the request.

    Args:
      handle: The request.
      answer: Collects the text.
      stop_tokens: Tokens with which the answer ends. They have no text.
      is_streaming: Whether the engine should compute few tokens at a time.
      has_top: Whether the engine records the likeliest tokens.
      shows_stop: Whether the last piece has the stop token, without text.

    Raises:
      EngineError: if the engine has failed the request.
      Failed: if the request was not served.
    """
    num_seen = 0
    num_shown = 0
    outputs: Any = handle.changes(is_streaming=is_streaming, period=PERIOD)  # a generator
    async with contextlib.aclosing(outputs) as changes:
        async for output in changes:
            done = handle.done  # read before the tokens: if it is true, all tokens are there
            columns = (output.tokens, output.logprobs, *([output.top_logprobs] if has_top else []))
            end = min(map(len, columns))  # another thread may be appending to the columns in turn
            new_tokens = list(itertools.takewhile(lambda token: token not in stop_tokens, output.tokens[num_seen:end]))
            is_stop = len(new_tokens) < end - num_seen
            text = answer.add(new_tokens, done=done or is_stop)
            num_seen = end
            if answer.stopped:
                handle.cancel()
            finish = "stop" if answer.stopped or is_stop else _finish(output) if done else None
            if text or finish:
                part = slice(num_shown, len(answer.starts) if finish else answer.num_shown)
                before = [*answer.prompt, *output.tokens[max(num_shown - CONTEXT, 0) : num_shown]][-CONTEXT:]
                texts = answer.texts(part)
                starts = answer.starts[part]
                if is_stop and shows_stop and not answer.stopped:
                    part = slice(part.start, part.stop + 1)
                    texts.append("")
                    starts.append(len(answer.text))
                yield Piece(
                    text,
                    tokens=output.tokens[part],
                    before=before,
                    texts=texts,
                    starts=starts,
                    logprobs=output.logprobs[part],
                    top_logprobs=output.top_logprobs[part],
                    finish=finish,
                    num_tokens=answer.num_tokens + is_stop,
                )
                num_shown = part.stop
            if finish:
                return


def _finish(output: Output) -> str:
    if output.finish in ("length", "stop"):
        return output.finish
    if output.finish in REFUSED and output.tokens:
        return "length"  # the cache has room for no more
    raise Failed(output.finish)
