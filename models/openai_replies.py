# SPDX-License-Identifier: Apache-2.0
"""Responses of OpenAI's HTTP API, as data: whole ones, and the events of streams."""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from typing import Any

from .answers import Decode, Piece
from .openai_api import Wish


@dataclasses.dataclass
class Usage:
    """The tokens of a request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def body(self, *, shows_cached: bool = True) -> dict[str, Any]:
        """The JSON."""
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}} if shows_cached else {}
        return {
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion, **details,
        }  # fmt: skip


class Form:
    """The JSON of responses to one request.

    Args:
      model: its name.
      is_chat: which of the two APIs.
      wish: the request.
      decode: from token ids to text, special tokens included.
      shows_cached: whether the usage says how many tokens of the prompts were cached.
    """

    def __init__(self, model: str, wish: Wish, decode: Decode, *, is_chat: bool, shows_cached: bool = True):
        self._model, self._is_chat, self._decode, self._most = model, is_chat, decode, wish.logprobs
        self._shows_cached = shows_cached
        self._usage_of_chunks = {"usage": None} if wish.includes_usage else {}
        self._id, self._created = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex, int(time.time())

    def _body(self, suffix: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices,
            **fields,
        }  # fmt: skip

    def whole(self, choices: list[list[Piece]], usage: Usage) -> dict[str, Any]:
        """The whole response, of the pieces of each choice."""
        found = []
        for index, pieces in enumerate(choices):
            text, finish = "".join(piece.text for piece in pieces), pieces[-1].finish
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}}
            found.append(self._choice(index, shown if self._is_chat else {"text": text}, pieces, finish))
        return self._body("", found, usage=usage.body(shows_cached=self._shows_cached))

    def first(self, index: int) -> dict[str, Any]:
        """The event that begins a choice of a chat."""
        choice = self._choice(index, {"delta": {"role": "assistant", "content": ""}}, [], None)
        return self._body(".chunk", [choice], **self._usage_of_chunks)

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The event of a piece."""
        shown = {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
        return self._body(".chunk", [self._choice(index, shown, [piece], piece.finish)], **self._usage_of_chunks)

    def last(self, usage: Usage) -> dict[str, Any]:
        """The event of the usage."""
        return self._body(".chunk", [], usage=usage.body(shows_cached=self._shows_cached))

    def _choice(self, index: int, shown: dict[str, Any], pieces: list[Piece], finish: str | None) -> dict[str, Any]:
        logprobs = None if self._most is None or not pieces else self._logprobs(pieces)
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        rows = []
        for piece in pieces:
            tops = piece.top_logprobs or [{}] * len(piece.tokens)
            rows += zip(piece.tokens, piece.starts, piece.logprobs, tops, strict=True)
        likeliest = [list(top.items())[: self._most] for *_, top in rows]
        if self._is_chat:
            content = [
                self._token(token, logprob) | {"top_logprobs": [self._token(*one) for one in top]}
                for (token, _, logprob, _), top in zip(rows, likeliest, strict=True)
            ]
            return {"content": content, "refusal": None}
        # The chosen token comes last: another one may have the same text.
        named = [
            {self._decode([one]): _finite(logprob) for one, logprob in [*top, (row[0], row[2])]}
            for row, top in zip(rows, likeliest, strict=True)
        ]
        return {
            "tokens": [self._decode([row[0]]) for row in rows], "token_logprobs": [_finite(row[2]) for row in rows],
            "top_logprobs": named if self._most else None, "text_offset": [row[1] for row in rows],
        }  # fmt: skip

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token])
        encoded = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": encoded}


def _finite(logprob: float) -> float:
    """A number that JSON can hold; the API says -9999.0 for what is impossible."""
    return logprob if math.isfinite(logprob) else -9999.0
