# SPDX-License-Identifier: Apache-2.0
"""Makes responses of OpenAI's HTTP API, as data: whole responses, and the events of streams."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any

from .answers import CONTEXT, Decode, Piece
from .echo import finite, text_after
from .openai_api import ApiError, GenerationParams
from .tool_calls import Parser
from .tool_json import Part


@dataclasses.dataclass
class Usage:
    """The numbers of tokens of a request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    drafted: int = 0  # verified drafts
    accepted: int = 0

    def body(self, *, shows_cached: bool = True) -> dict[str, Any]:
        """The response's body, as JSON data."""
        details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": self.cached}} if shows_cached else {}
        if self.drafted:
            details["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            }
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            **details,
        }


class ResponseFormat:
    """Makes the JSON of the response to a request, whole or as the events of a stream."""

    def __init__(
        self,
        model: str,
        params: GenerationParams,
        decode: Decode,
        *,
        is_chat: bool,
        shows_cached: bool = True,
        make_parser: Callable[[bool], Parser] | None = None,
    ):
        """Begins a response.

        Args:
          model: The model's name.
          params: The parameters of the request.
          decode: Decodes tokens, including the text of special tokens.
          is_chat: Whether the response is to a chat, not to a completion.
          shows_cached: Whether the usage has the number of cached tokens.
          make_parser: Makes the parser of an answer with calls, and takes whether it is early. None disables parsing.
        """
        self._make_parser = make_parser
        self._streams = dict[int, _Stream]()
        self._model = model
        self._is_chat = is_chat
        self._decode = decode
        self._num_likeliest = params.logprobs
        self._shows_cached = shows_cached
        self._includes_usage = params.includes_usage
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    @property
    def is_parsed(self) -> bool:
        """Whether answers are parsed, which takes time if they are long."""
        return self._make_parser is not None

    def _body(self, suffix: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **fields,
        }

    def whole(
        self, choices: list[list[Piece]], usage: Usage, prompt_logprobs: list[Any] | None = None
    ) -> dict[str, Any]:
        """The whole response.

        Args:
          choices: The pieces of each choice.
          usage: The usage.
          prompt_logprobs: The field `prompt_logprobs` of each choice. A chat has a single prompt, and so its response
            has the field outside the choices. None leaves the field out.
        """
        fields = {"role": "assistant", "refusal": None}
        choice_bodies = [self._choice(index, pieces, "message", fields) for index, pieces in enumerate(choices)]
        chat_fields: dict[str, Any] = {}
        if prompt_logprobs is not None and self._is_chat:
            chat_fields = {"prompt_logprobs": prompt_logprobs[0]}
        elif prompt_logprobs is not None:
            for choice, logprobs in zip(choice_bodies, prompt_logprobs, strict=True):
                choice["prompt_logprobs"] = logprobs
        return self._body("", choice_bodies, usage=usage.body(shows_cached=self._shows_cached), **chat_fields)

    def first(self, num_choices: int) -> list[dict[str, Any]]:
        """The events at the beginning of a stream. A chat has an event for each choice, a completion has none."""
        indices = range(num_choices if self._is_chat else 0)
        return [self._event([self._choice(index, [], "delta", {"role": "assistant"})]) for index in indices]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece.

        A piece is an event. If answers are parsed, each part of the piece is an event, and so is the end of the
        answer. The log-probabilities of a piece without parts come with the next event.
        """
        if self._make_parser is None:
            return [self._event([self._choice(index, [piece], "delta", {})])]
        if index not in self._streams:
            self._streams[index] = _Stream(self._make_parser(True))
        stream = self._streams[index]
        stream.pieces.append(piece)
        deltas = [*stream.deltas(piece), *([] if piece.finish is None else [{}])]
        events = []
        for delta in deltas:
            has_logprobs = self._num_likeliest is not None and stream.pieces
            logprobs = self._logprobs(stream.pieces) if has_logprobs else None
            stream.pieces = []
            finish = None if delta else _finish(stream.parser, piece.finish)
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            events.append(self._event([choice]))
        return events

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """The event with the usage, if the request asks for it."""
        return [self._event([], usage.body(shows_cached=self._shows_cached))] if self._includes_usage else []

    def failed(self, error: ApiError, request_id: str) -> list[dict[str, Any]]:
        """The last event of a failed stream."""
        return [{**error.body, "request_id": request_id}]

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._body(".chunk", choices, **({"usage": usage} if self._includes_usage else {}))

    def _choice(self, index: int, pieces: list[Piece], part: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice with the text of some pieces. In a chat, the object `part` has the text and `fields`."""
        text = "".join(piece.text for piece in pieces)
        finish = pieces[-1].finish if pieces else None
        shown = {part: {**fields, "content": text}} if self._is_chat else {"text": text}
        if part == "message" and self._make_parser is not None:
            parser = self._make_parser(False)
            parts = [*parser.add(text), *parser.end(is_cut=finish == "length")]
            shown = {part: fields | _message(parts)}
            finish = _finish(parser, finish)
        logprobs = None if self._num_likeliest is None or not pieces else self._logprobs(pieces)
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        texts = [text for piece in pieces for text in piece.texts]
        logprobs = [None if logprob is None else finite(logprob) for piece in pieces for logprob in piece.logprobs]
        likeliest = [top for piece in pieces for top in self._likeliest(piece)]
        if self._is_chat:
            content = [
                _token(text, logprob) | {"top_logprobs": [_token(*entry) for entry in top]}
                for text, logprob, top in zip(texts, logprobs, likeliest, strict=True)
            ]
            return {"content": content, "refusal": None}
        # The chosen token comes last, because another token may have the same text.
        likeliest_by_text = [
            None if logprob is None else {**dict(top), text: logprob}
            for text, logprob, top in zip(texts, logprobs, likeliest, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": likeliest_by_text if self._num_likeliest else None,
            "text_offset": [start for piece in pieces for start in piece.starts],
        }

    def _likeliest(self, piece: Piece) -> list[list[tuple[str, float]]]:
        """For each token of a piece, the texts and the log-probabilities of the likeliest tokens in its place."""
        entries = []
        before = list(piece.before)
        tops = piece.top_logprobs or [{}] * len(piece.tokens)
        for token, text, top in zip(piece.tokens, piece.texts, tops, strict=True):
            token_entries = [
                (text if likely_token == token else text_after(self._decode, before, likely_token), finite(logprob))
                for likely_token, logprob in list((top or {}).items())[: self._num_likeliest]
            ]
            entries.append(token_entries)
            before = [*before, token][-CONTEXT:]
        return entries


class _Stream:
    """A choice of a stream with parsed text.

    Attributes:
      parser: Parses the text.
      pieces: Pieces whose log-probabilities have to come with the next event.
    """

    def __init__(self, parser: Parser):
        self.parser = parser
        self.pieces = list[Piece]()
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
    """The fields of a whole message: its content, and its reasoning and calls if it has any."""
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
    """The finish reason of an answer: `tool_calls` if its calls are whole and the answer was not cut short."""
    return "tool_calls" if finish == "stop" and parser.num_calls and not parser.is_unfinished else finish


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """A token in a chat's log-probabilities. The bytes of a part of a character are unknown."""
    encoded = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}
