# SPDX-License-Identifier: Apache-2.0
"""Responses of OpenAI's HTTP API, as data: whole ones, and the events of streams."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any

from .answers import CONTEXT, Decode, Piece
from .echo import finite, text_after
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
    """The JSON of responses to one request; `decode` gives the text of special tokens too.

    The usage says how many tokens of the prompts were cached if it `shows_cached`.
    """

    def __init__(self, model: str, wish: Wish, decode: Decode, *, is_chat: bool, shows_cached: bool = True):
        self._model, self._is_chat, self._decode, self._most = model, is_chat, decode, wish.logprobs
        self._shows_cached = shows_cached
        self._includes_usage = wish.includes_usage
        self._id, self._created = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex, int(time.time())

    def _body(self, suffix: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices,
            **fields,
        }  # fmt: skip

    def whole(self, choices: list[list[Piece]], usage: Usage, of_prompts: list[Any] | None = None) -> dict[str, Any]:
        """The whole response, of the pieces of each choice.

        `of_prompts` are the `prompt_logprobs` of each choice. A chat has those of its only prompt beside the choices.
        """
        fields = {"role": "assistant", "refusal": None}
        found = [self._choice(index, pieces, "message", fields) for index, pieces in enumerate(choices)]
        of_chat: dict[str, Any] = {}
        if of_prompts is not None and self._is_chat:
            of_chat = {"prompt_logprobs": of_prompts[0]}
        elif of_prompts is not None:
            for choice, of_prompt in zip(found, of_prompts, strict=True):
                choice["prompt_logprobs"] = of_prompt
        return self._body("", found, usage=usage.body(shows_cached=self._shows_cached), **of_chat)

    def first(self, size: int) -> list[dict[str, Any]]:
        """The events that begin a stream of so many choices: in a chat one for each."""
        indices = range(size if self._is_chat else 0)
        return [self._event([self._choice(index, [], "delta", {"role": "assistant"})]) for index in indices]

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The event of a piece."""
        return self._event([self._choice(index, [piece], "delta", {})])

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """The event of the usage, if it is wanted."""
        return [self._event([], usage.body(shows_cached=self._shows_cached))] if self._includes_usage else []

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._body(".chunk", choices, **({"usage": usage} if self._includes_usage else {}))

    def _choice(self, index: int, pieces: list[Piece], part: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice with the text of some pieces; in a chat the text is in an object, with some fields more."""
        text = "".join(piece.text for piece in pieces)
        finish = pieces[-1].finish if pieces else None
        shown = {part: {**fields, "content": text}} if self._is_chat else {"text": text}
        logprobs = None if self._most is None or not pieces else self._logprobs(pieces)
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        texts = [text for piece in pieces for text in piece.texts]
        logprobs = [None if one is None else finite(one) for piece in pieces for one in piece.logprobs]
        likeliest = [top for piece in pieces for top in self._likeliest(piece)]
        if self._is_chat:
            content = [
                _token(text, logprob) | {"top_logprobs": [_token(*one) for one in top]}
                for text, logprob, top in zip(texts, logprobs, likeliest, strict=True)
            ]
            return {"content": content, "refusal": None}
        # The chosen token comes last: another one may have the same text.
        named = [
            None if logprob is None else {**dict(top), text: logprob}
            for text, logprob, top in zip(texts, logprobs, likeliest, strict=True)
        ]
        return {
            "tokens": texts, "token_logprobs": logprobs, "top_logprobs": named if self._most else None,
            "text_offset": [start for piece in pieces for start in piece.starts],
        }  # fmt: skip

    def _likeliest(self, piece: Piece) -> list[list[tuple[str, float]]]:
        """For each token of a piece the likeliest ones in its place: their texts there, and their log-probabilities."""
        found, before, tops = [], list(piece.before), piece.top_logprobs or [{}] * len(piece.tokens)
        for token, text, top in zip(piece.tokens, piece.texts, tops, strict=True):
            of_token = [
                (text if other == token else text_after(self._decode, before, other), finite(logprob))
                for other, logprob in list((top or {}).items())[: self._most]
            ]
            found.append(of_token)
            before = [*before, token][-CONTEXT:]
        return found


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """A token of a chat. Its bytes are unknown if it is a part of a character."""
    encoded = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}
