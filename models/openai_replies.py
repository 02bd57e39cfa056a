# SPDX-License-Identifier: Apache-2.0
"""Responses of OpenAI's HTTP API, as data: whole ones, and the events of streams."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any

from .answers import CONTEXT, Decode, Piece
from .echo import finite, text_after
from .openai_api import ApiError, Wish
from .tool_calls import Parser
from .tool_json import Part


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

    The usage says how many tokens of the prompts were cached if it `shows_cached`. `make_parser` makes the parsers of
    answers with calls, early or not; None: answers are text.
    """

    def __init__(
        self,
        model: str,
        wish: Wish,
        decode: Decode,
        *,
        is_chat: bool,
        shows_cached: bool = True,
        make_parser: Callable[[bool], Parser] | None = None,
    ):
        self._make_parser = make_parser
        self._streams = dict[int, _Stream]()
        self._model, self._is_chat, self._decode, self._most = model, is_chat, decode, wish.logprobs
        self._shows_cached = shows_cached
        self._includes_usage = wish.includes_usage
        self._id, self._created = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex, int(time.time())

    @property
    def is_parsed(self) -> bool:
        """Whether answers are parsed, which takes time where they are long."""
        return self._make_parser is not None

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

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece: one, or, where answers are parsed, one for each part, and one for the end.

        The log-probabilities of a piece without parts come with the next event.
        """
        if self._make_parser is None:
            return [self._event([self._choice(index, [piece], "delta", {})])]
        if index not in self._streams:
            self._streams[index] = _Stream(self._make_parser(True))
        stream = self._streams[index]
        stream.pieces.append(piece)
        deltas = [*stream.deltas(piece), *([] if piece.finish is None else [{}])]
        found = []
        for delta in deltas:
            logprobs = self._logprobs(stream.pieces) if self._most is not None and stream.pieces else None
            stream.pieces = []
            finish = None if delta else _finish(stream.parser, piece.finish)
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            found.append(self._event([choice]))
        return found

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """The event of the usage, if it is wanted."""
        return [self._event([], usage.body(shows_cached=self._shows_cached))] if self._includes_usage else []

    def failed(self, error: ApiError, request_id: str) -> list[dict[str, Any]]:
        """The last event of a failed stream."""
        return [{**error.body, "request_id": request_id}]

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._body(".chunk", choices, **({"usage": usage} if self._includes_usage else {}))

    def _choice(self, index: int, pieces: list[Piece], part: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice with the text of some pieces; in a chat the text is in an object, with some fields more."""
        text = "".join(piece.text for piece in pieces)
        finish = pieces[-1].finish if pieces else None
        shown = {part: {**fields, "content": text}} if self._is_chat else {"text": text}
        if part == "message" and self._make_parser is not None:
            parser = self._make_parser(False)
            parts = [*parser.add(text), *parser.end(is_cut=finish == "length")]
            shown, finish = {part: fields | _message(parts)}, _finish(parser, finish)
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


class _Stream:
    """A choice of a stream whose text is parsed.

    Attributes:
      pieces: those whose log-probabilities no event has had yet.
    """

    def __init__(self, parser: Parser):
        self.parser, self.pieces = parser, list[Piece]()
        self._num_calls = 0

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """The deltas of the parts of a piece."""
        parts = self.parser.add(piece.text)
        if piece.finish is not None:
            parts += self.parser.end(is_cut=piece.finish == "length")
        return [self._delta(part) for part in parts]

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.kind in ("content", "reasoning"):
            return {_FIELDS[part.kind]: part.text}
        self._num_calls += part.kind == "name"
        call = _new_call(part.text) if part.kind == "name" else {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": self._num_calls - 1, **call}]}


_FIELDS = {"content": "content", "reasoning": "reasoning_content"}


def _message(parts: list[Part]) -> dict[str, Any]:
    """The fields of a whole message: of its content, its reasoning and its calls those that there are."""
    texts = {"content": "", "reasoning": ""}
    calls = list[dict[str, Any]]()
    for part in parts:
        if part.kind == "name":
            calls.append(_new_call(part.text))
        elif part.kind == "arguments":
            calls[-1]["function"]["arguments"] += part.text
        else:
            texts[part.kind] += part.text
    content: dict[str, Any] = {"content": texts["content"] or (None if calls else "")}
    reasoning = {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
    return {**content, **reasoning, **({"tool_calls": calls} if calls else {})}


def _new_call(name: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}


def _finish(parser: Parser, finish: str | None) -> str | None:
    """The reason why an answer has ended: `tool_calls` if all of its calls are whole and nothing has cut it."""
    return "tool_calls" if finish == "stop" and parser.num_calls and not parser.is_unfinished else finish


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """A token of a chat. Its bytes are unknown if it is a part of a character."""
    encoded = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}
