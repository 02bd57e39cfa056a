# SPDX-License-Identifier: Apache-2.0
"""Answers of OpenAI's Responses API, as data: a whole response, or the events of a stream.

An answer is a list of output items. The same class makes the items for both, so the last event of a stream has the
whole response.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from .answers import Decode, Piece
from .openai_api import ApiError, GenerationParams
from .openai_replies import ResponseFormat, Usage
from .tool_calls import Parser
from .tool_json import JsonScanner, Part, units

type Event = dict[str, Any]


class ResponsesFormat(ResponseFormat):
    """Makes the JSON of the response to a request of this API, whole or as the events of a stream."""

    def __init__(
        self,
        model: str,
        params: GenerationParams,
        decode: Decode,
        *,
        shows_cached: bool = True,
        make_parser: Callable[[bool], Parser] | None = None,
    ):
        super().__init__(model, params, decode, is_chat=True, shows_cached=shows_cached, make_parser=make_parser)
        self._id = _new_id("resp")
        self._items = _Items()
        self._parser = None if make_parser is None else make_parser(True)
        self._finish: str | None = None
        self._num_events = 0
        sampling = {name: float(str(getattr(params.sampling, name))) for name in ("temperature", "top_p")}  # as written
        self._fields = {
            **(params.response_fields or {}),
            **sampling,
            "max_output_tokens": params.max_tokens,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }

    def whole(
        self, choices: list[list[Piece]], usage: Usage, prompt_logprobs: list[Any] | None = None
    ) -> dict[str, Any]:
        """The whole response, from the pieces of its only choice."""
        del prompt_logprobs
        (pieces,) = choices
        text = "".join(piece.text for piece in pieces)
        self._finish = pieces[-1].finish
        self._parser = None if self._make_parser is None else self._make_parser(False)
        for _ in self._item_events(text, pieces):
            pass
        return self._ended(usage)

    def first(self, num_choices: int) -> list[Event]:
        """The first events of a stream."""
        del num_choices
        response = self._response("in_progress")
        return self._numbered({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def chunks(self, index: int, piece: Piece) -> list[Event]:
        """The events of a piece. The last piece ends the last item."""
        del index
        self._finish = piece.finish
        return self._numbered(self._item_events(piece.text, [piece]))

    def last(self, usage: Usage) -> list[Event]:
        """The event with the whole response."""
        response = self._ended(usage)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError, request_id: str) -> list[Event]:
        """The event of a failed response, with the items before the failure."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        shown = {"code": code, "message": str(error)}
        response = self._response("failed", output=self._items.output, error=shown)
        return self._numbered([{"type": "response.failed", "response": response, "request_id": request_id}])

    def _numbered(self, events: Iterator[Event] | list[Event]) -> list[Event]:
        first_index = self._num_events
        numbered = [{**event, "sequence_number": index} for index, event in enumerate(events, first_index)]
        self._num_events = first_index + len(numbered)
        return numbered

    def _item_events(self, text: str, pieces: list[Piece]) -> Iterator[Event]:
        """Adds text to the items. The last piece also ends them."""
        is_cut = self._finish == "length"
        if self._parser is None:
            entries = [] if self._num_likeliest is None else self._logprobs(pieces)["content"]
            parts = [Part("content", text)] if text or entries else []
        else:
            entries = []  # a request with a parser may not ask for log-probabilities
            parts = self._parser.add(text)
            if self._finish is not None:
                parts += self._parser.end(is_cut=is_cut)
        for part in parts:
            yield from self._items.add(part, entries)
        if self._finish is not None:
            yield from self._items.end(is_cut=is_cut)

    def _ended(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._finish == "length"
        details = {"reason": "max_output_tokens"} if is_cut else None
        return self._response(
            "incomplete" if is_cut else "completed",
            output=self._items.output,
            incomplete_details=details,
            usage=self._usage(usage),
        )

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The numbers of tokens. Reasoning tokens are not counted, so their number is only there if it is zero."""
        has_reasoning = any(item["type"] == "reasoning" for item in self._items.output)
        cached = {"input_tokens_details": {"cached_tokens": usage.cached}} if self._shows_cached else {}
        reasoning = {} if has_reasoning else {"output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "input_tokens": usage.prompt,
            **cached,
            "output_tokens": usage.completion,
            **reasoning,
            "total_tokens": usage.prompt + usage.completion,
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        defaults = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            **self._fields,
            **defaults,
            **fields,
        }


class _Items:
    """The output items of an answer, made from its parts. Only the last item may be open.

    Attributes:
      output: The items before the open item.
    """

    def __init__(self):
        self.output = list[dict[str, Any]]()
        self._open: _Text | _Call | None = None

    def add(self, part: Part, logprobs: list[Any]) -> Iterator[Event]:
        """Adds a part with the log-probabilities of its tokens, and yields its events."""
        if part.kind == "arguments":
            assert isinstance(self._open, _Call)  # the name came before, and the arguments are not whole
            yield from self._open.add(part.text)
            if self._open.is_whole:
                yield from self._end("completed")
            return
        if part.kind == "name" or self._open is None or self._open.kind != part.kind:
            yield from self._end("completed")
            yield from self._begin(part)
        if isinstance(self._open, _Text):
            yield from self._open.add(part.text, logprobs)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """Yields the last events. A whole answer without a message or a call gets an empty message."""
        yield from self._end("incomplete" if is_cut else "completed")
        if not is_cut and all(item["type"] == "reasoning" for item in self.output):
            yield from self._begin(Part("content", ""))
            yield from self._end("completed")

    def _begin(self, part: Part) -> Iterator[Event]:
        index = len(self.output)
        self._open = _Call(index, part.text) if part.kind == "name" else _Text(index, part.kind)
        yield from self._open.begin()

    def _end(self, status: str) -> Iterator[Event]:
        """Ends the open item, if any."""
        item = self._open
        self._open = None
        if item is not None:
            yield from item.end(status)
            self.output.append(item.body(status))


class _Text:
    """A message, or reasoning: an item with a single part of text."""

    def __init__(self, index: int, kind: str):
        is_message = kind == "content"
        self.kind = kind
        self._index = index
        self._id = _new_id("msg" if is_message else "rs")
        self._name = "output_text" if is_message else "reasoning_text"
        self._fields = {"type": "message", "role": "assistant"} if is_message else {"type": "reasoning", "summary": []}
        self._part_fields: dict[str, Any] = {"annotations": []} if is_message else {}
        self._place = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._texts = list[str]()
        self._logprobs = list[Any]()

    def begin(self) -> Iterator[Event]:
        """The events that open a message without text."""
        yield _added(self._index, {"id": self._id, **self._fields, "status": "in_progress", "content": []})
        yield {"type": "response.content_part.added", **self._place, "part": self._part()}

    def add(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        """The event that adds text."""
        self._texts.append(text)
        self._logprobs += logprobs
        if text:
            yield {"type": f"response.{self._name}.delta", **self._place, "delta": text, **self._entries(logprobs)}

    def end(self, status: str) -> Iterator[Event]:
        """The events of the end."""
        part = self._part()
        shown = {"text": part["text"], **self._entries(self._logprobs)}
        yield {"type": f"response.{self._name}.done", **self._place, **shown}
        yield {"type": "response.content_part.done", **self._place, "part": part}
        yield _done(self._index, self.body(status))

    def body(self, status: str) -> dict[str, Any]:
        """The JSON."""
        return {"id": self._id, **self._fields, "status": status, "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": self._name, "text": text, **self._part_fields, **self._entries(list(self._logprobs))}

    def _entries(self, logprobs: list[Any]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind == "content" else {}


class _Call:
    """A call of a function."""

    kind = "name"

    def __init__(self, index: int, name: str):
        self._index = index
        self._id = _new_id("fc")
        self._call_id = _new_id("call")
        self._name = name
        self._texts = list[str]()
        self._scanner = JsonScanner()
        self._is_json = True
        self._place = {"item_id": self._id, "output_index": index}

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a whole object."""
        return self._is_json and self._scanner.is_done

    def begin(self) -> Iterator[Event]:
        """The event that opens a call without arguments."""
        yield _added(self._index, self.body("in_progress"))

    def add(self, text: str) -> Iterator[Event]:
        """The event that adds to the arguments."""
        self._texts.append(text)
        for _, characters in units(text, self._scanner):
            self._is_json = self._is_json and self._scanner.add(characters)
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        """The events of the end."""
        shown = {"name": self._name, "arguments": "".join(self._texts)}
        yield {"type": "response.function_call_arguments.done", **self._place, **shown}
        yield _done(self._index, self.body(status))

    def body(self, status: str) -> dict[str, Any]:
        """The JSON. A call without valid arguments is never completed."""
        return {
            "id": self._id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._texts),
            "status": "incomplete" if status == "completed" and not self.is_whole else status,
        }


def _added(index: int, item: dict[str, Any]) -> Event:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: dict[str, Any]) -> Event:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
