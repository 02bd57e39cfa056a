# SPDX-License-Identifier: Apache-2.0
"""A request in progress: collects its choices, makes its response, and ends it if the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from kvjax.serving import EngineError, Handle

from .answers import REFUSED, Answer, Failed, Piece, pieces
from .chat import Template
from .echo import after_prompt, prompt_logprobs, prompt_piece
from .openai_api import ApiError, GenerationParams, Limits, Tools
from .openai_replies import ResponseFormat, Usage
from .serve_pages import Pages
from .serve_schemas import Schemas
from .tenants import Keys
from .tool_calls import Parser

try:
    from starlette.exceptions import HTTPException
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[serve]"') from error

_log = logging.getLogger("kvjax.serve")


@dataclasses.dataclass(frozen=True)
class Served:
    """A model and the server's settings for it."""

    name: str
    tokenizer: Any  # a `tokenizers.Tokenizer`; None if prompts are token ids
    longest_token: int  # the characters of the longest token: longer texts are refused before they are encoded
    template: Template | None  # the chat template; None if the server answers no chats
    stop_tokens: list[int]  # tokens after which an answer ends
    limits: Limits
    defaults: Mapping[str, Any]  # default values of a request's fields, see `openai_api.read_defaults`
    keys: Keys  # API keys, one of which a request needs
    max_body: int  # bytes of a request
    max_bodies: int  # bytes of all requests that are being read
    max_open: int  # answers in progress
    timeout: float  # seconds until an answer is cancelled
    shows_cached: bool  # whether an answer reports how many tokens of its prompt were cached
    before_end: Callable[[], Any] | None  # called on another thread before an answer ends
    schemas: Schemas | str = "the server has none"  # the schemas of answers; a text says why there are none
    tool_format: type[Parser] | None = None  # the format of tool calls in chats; None refuses tools

    def encode(self, text: str, name: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """Encodes the text of a field, while other threads continue to run.

        Raises:
          ApiError: if the text is longer than a row of the longest tokens, with a space between each two.
        """
        if len(text) > self.limits.max_length * (self.longest_token + 1):
            wanted = f"{self.limits.max_length} tokens of at most {self.longest_token} characters"
            message = f"{name}: got {len(text):,} characters, wanted at most {wanted}"
            raise ApiError(400, message, name, "context_length_exceeded")
        # `encode` would hold the interpreter's lock.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, tokens: list[int], *, skips_special: bool = True) -> str:
        """Decodes token ids."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return self.tokenizer.decode(tokens, skip_special_tokens=skips_special)

    def decode_marks(self, tokens: list[int]) -> str:
        """Decodes token ids. Of the special tokens, only the marks of tool calls have a text."""
        return self.decode([token for token in tokens if token not in self._hidden], skips_special=False)

    @functools.cached_property
    def _hidden(self) -> frozenset[int]:
        """The special tokens, without the marks of tool calls."""
        marks = () if self.tool_format is None else self.tool_format.marks
        added = {} if self.tokenizer is None else self.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special and token.content not in marks)

    def parser_for(self, tools: Tools | None) -> Callable[[bool], Parser] | None:
        """Returns the maker of parsers for a chat's answers. None means all of an answer is text.

        The function's argument says whether the parser returns parts of the answer early.
        """
        tool_format = self.tool_format
        if tool_format is None or tools is None or (tools.names is None and not tool_format.is_for_all):
            return None
        return lambda is_early: tool_format(tools.names, is_early=is_early, is_parallel=tools.is_parallel)

    def decode_all(self, tokens: list[int]) -> str:
        """Decodes token ids, with the special tokens."""
        return self.decode(tokens, skips_special=False)


class ActiveRequest:
    """A request whose answers an engine computes.

    An answer to a prompt is a choice of the API. A request with two prompts and `n=3` has six choices, and the choices
    of the first prompt come first.
    """

    def __init__(
        self,
        served: Served,
        pages: Pages,
        params: GenerationParams,
        prompts: list[list[int]],
        handles: list[list[Handle]],
        stop_tokens: list[int],
    ):
        """Begins to read the answers. `handles` has a list for each prompt, with a handle for each sample."""
        self._served = served
        self._pages = pages
        self._params = params
        self._handles = [handle for samples in handles for handle in samples]
        self._first_samples = [samples[0] for samples in handles]
        self._prompts = [prompt for prompt, samples in zip(prompts, handles, strict=True) for _ in samples]
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_tokens = [0] * self.size  # for each choice
        self._echoed = list[Piece | None]([None]) * self.size  # the prompt of each choice, after it was sent
        self._streams = [
            self._stream(prompt, handle, frozenset(stop_tokens))
            for prompt, handle in zip(self._prompts, self._handles, strict=True)
        ]

    def _stream(self, prompt: list[int], handle: Handle, stop_tokens: frozenset[int]) -> AsyncGenerator[Piece]:
        """Returns the pieces of a choice, as the engine makes them."""
        served = self._served
        params = self._params
        has_logprobs = params.logprobs is not None
        decode = served.decode if served.parser_for(params.tools) is None else served.decode_marks
        min_tokens = params.sampling.min_tokens
        answer = Answer(decode, prompt, params.stop, has_starts=has_logprobs, min_tokens=min_tokens)
        return pieces(
            handle,
            answer,
            stop_tokens=stop_tokens,
            is_streaming=params.is_streaming,
            has_top=served.limits.top_logprobs > 0,
            shows_stop=params.echoes and has_logprobs,  # each token has an entry
        )

    @property
    def size(self) -> int:
        """The number of choices."""
        return len(self._handles)

    @property
    def num_open(self) -> int:
        """The number of unfinished choices."""
        return sum(not handle.done for handle in self._handles)

    @property
    def usage(self) -> Usage:
        """The number of tokens used so far."""
        num_cached = sum(handle.output.cached_tokens for handle in self._first_samples)
        outputs = [handle.output for handle in self._handles]
        num_drafted = sum(output.drafted_tokens for output in outputs)
        num_accepted = sum(output.accepted_tokens for output in outputs)
        return Usage(self._num_prompt_tokens, sum(self._num_tokens), num_cached, num_drafted, num_accepted)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """Yields the pieces of all choices as they arrive, each with the index of its choice."""
        async with contextlib.aclosing(merge(self._streams)) as merged:
            async for index, piece in merged:
                await self._note_piece(index, piece)
                if self._params.echoes:
                    prompt = self._echoed[index]
                    if prompt is None:  # the engine scores the prompt before the answer begins
                        prompt = await self._echo(index)
                        yield index, prompt
                    piece = after_prompt(piece, prompt)
                yield index, piece

    async def _note_piece(self, index: int, piece: Piece) -> None:
        """Counts the tokens of a piece, and calls `before_end` before the last piece of a choice."""
        self._pages.count(self._handles[index], piece, self._num_tokens[index])
        self._num_tokens[index] = piece.num_tokens
        if piece.finish is not None and self._served.before_end is not None:
            await asyncio.to_thread(self._served.before_end)

    async def _echo(self, index: int) -> Piece:
        """Makes the piece with the prompt of a choice."""
        prompt = self._prompts[index]
        output = self._handles[index].output
        piece = await asyncio.to_thread(prompt_piece, self._served.decode, prompt, output)
        self._echoed[index] = piece
        return piece

    @property
    def tells_prompts(self) -> bool:
        """Whether the response has tokens of prompts, whose texts take time to decode."""
        return self._params.echoes or self._params.prompt_logprobs is not None

    def prompt_logprobs(self) -> list[Any] | None:
        """Returns vLLM's `prompt_logprobs` for each finished choice. None means the request wants none."""
        num_top = self._params.prompt_logprobs
        if num_top is None:
            return None
        by_first_sample = {
            id(handle): prompt_logprobs(self._served.decode_all, prompt, handle.output, num_top)
            for prompt, handle in zip(self._prompts, self._handles, strict=True)
            if handle is handle.samples[0]
        }
        return [by_first_sample[id(handle.samples[0])] for handle in self._handles]

    def cancel(self) -> None:
        """Cancels the unfinished choices."""
        for handle in self._handles:
            if not handle.done:
                handle.cancel()


async def merge(streams: list[AsyncGenerator[Piece]]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yields the pieces of all streams as they arrive, each with the index of its stream."""
    if len(streams) == 1:  # avoids the delay of the queue
        async with contextlib.aclosing(streams[0]) as stream:
            async for piece in stream:
                yield 0, piece
        return
    queue = asyncio.Queue[tuple[int, Piece | Exception]]()
    tasks = [asyncio.create_task(_fill(queue, index, stream)) for index, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            num_open -= piece.finish is not None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()


async def _fill(queue: asyncio.Queue[tuple[int, Piece | Exception]], index: int, stream: AsyncGenerator[Piece]) -> None:
    """Puts the pieces of a stream into a queue. An error of the stream goes there too."""
    try:
        async for piece in stream:
            queue.put_nowait((index, piece))
    except Exception as error:
        queue.put_nowait((index, error))


class Events(Response):
    """A response of server-sent events, which ends when its client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]], close: Callable[[], Any], *, has_types: bool = False):
        """Sends events as JSON.

        Args:
          events: the events; if `has_types` is true, each has a type.
          close: called when all events were sent, or the client has left.
          has_types: whether to send a line with its type before each event. Otherwise the stream ends with [DONE].
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._has_types = has_types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                data = json.dumps(event, ensure_ascii=False)  # `Answer` splits no character
                type_line = f"event: {event['type']}\n" if self._has_types else ""
                body = f"{type_line}data: {data}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b"" if self._has_types else b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Awaits some work and returns its result. If the client leaves first, cancels the work and returns None."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.create_task(work)
    tasks = [work_task, asyncio.create_task(wait_for_disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def complete_response(request: ActiveRequest, form: ResponseFormat) -> dict[str, Any]:
    """Waits for all choices and returns the response, for a client without a stream."""
    choices: list[list[Piece]] = [[] for _ in range(request.size)]
    async with contextlib.aclosing(request.pieces()) as pieces_of_choices:
        async for index, piece in pieces_of_choices:
            choices[index].append(piece)
    if not request.tells_prompts and not form.is_parsed:
        return form.whole(choices, request.usage)
    return await asyncio.to_thread(lambda: form.whole(choices, request.usage, request.prompt_logprobs()))


async def events(request: ActiveRequest, form: ResponseFormat, request_id: str) -> AsyncGenerator[dict[str, Any]]:
    """Yields the events of a stream. If the engine fails, the last event is an error with the request's id."""
    try:
        for event in form.first(request.size):
            yield event
        async with contextlib.aclosing(request.pieces()) as pieces_of_choices:
            async for index, piece in pieces_of_choices:
                for event in form.chunks(index, piece):
                    yield event
        for event in form.last(request.usage):
            yield event
    except (EngineError, Failed) as error:
        api_error = failure(error)
        if api_error.status >= 500:
            note_failure(request_id, error)
        for event in form.failed(api_error, request_id):
            yield event


def note_failure(request_id: str, error: Exception) -> None:
    """Logs a failure of the server."""
    _log.error("request %s: %s: %s", request_id, type(error).__name__, error)


def failure(error: Exception) -> ApiError:
    """Returns the API's error for the reason why a request was not served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    if not isinstance(error, EngineError | Failed | TimeoutError):
        return ApiError(500, "internal error", kind="server_error")
    if isinstance(error, Failed) and error.finish in REFUSED:
        message = "the cache cannot hold the prompt with its answers: fewer tokens or samples would fit"
        return ApiError(400, message, code="context_length_exceeded")
    if (
        isinstance(error, Failed) and error.finish == "cancelled"
    ):  # only the timeout cancels it while its client is connected
        headers = {"x-should-retry": "false"}  # for OpenAI's client
        return ApiError(504, "the answer takes too long", code="timeout", kind="server_error", headers=headers)
    status = 503 if isinstance(error, EngineError) else 500
    return ApiError(status, str(error), code="engine_error", kind="server_error")
