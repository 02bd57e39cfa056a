# SPDX-License-Identifier: Apache-2.0
"""A request to a server while it is answered: its choices as they come, its response, and its end with its client."""

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
from .openai_api import ApiError, Limits, Tools, Wish
from .openai_replies import Form, Usage
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
    """A model as it is served."""

    name: str
    tokenizer: Any  # a `tokenizers.Tokenizer`, or None: prompts are token ids
    longest_token: int  # the most characters of a token: longer texts are refused before they are encoded
    template: Template | None  # of chats; None: there are none
    stop_tokens: list[int]  # which end an answer
    limits: Limits
    defaults: Mapping[str, Any]  # of requests, see `openai_api.read_defaults`
    keys: Keys  # which requests have to have
    max_body: int  # bytes of a request
    max_bodies: int  # bytes of all requests that are being read
    max_open: int  # answers that are being made at a time
    timeout: float  # seconds in which an answer is made
    shows_cached: bool  # whether answers say how many tokens of their prompts were cached
    before_end: Callable[[], Any] | None  # called, on another thread, before an answer ends
    schemas: Schemas | str = "the server has none"  # of answers; a text: why there are none
    tool_format: type[Parser] | None = None  # of calls of tools in answers to chats; None: tools are refused

    def encode(self, text: str, name: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """The ids of the text of a field, with the tokenizer's special tokens or without; no other thread waits.

        Raises:
          ApiError: if it has more characters than the most tokens have, with a space between each two.
        """
        if len(text) > self.limits.max_length * (self.longest_token + 1):
            most = f"{self.limits.max_length} tokens of at most {self.longest_token} characters"
            message = f"{name}: got {len(text):,} characters, wanted at most {most}"
            raise ApiError(400, message, name, "context_length_exceeded")
        # `encode` would hold the interpreter's lock.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, tokens: list[int], *, skips_special: bool = True) -> str:
        """The text of ids."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return self.tokenizer.decode(tokens, skip_special_tokens=skips_special)

    def decode_marks(self, tokens: list[int]) -> str:
        """The text of ids, of special ones only that of the marks of calls."""
        return self.decode([token for token in tokens if token not in self._hidden], skips_special=False)

    @functools.cached_property
    def _hidden(self) -> frozenset[int]:
        """The special tokens that are no marks of calls."""
        marks = () if self.tool_format is None else self.tool_format.marks
        added = {} if self.tokenizer is None else self.tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special and token.content not in marks)

    def parser_for(self, tools: Tools | None) -> Callable[[bool], Parser] | None:
        """Makes a parser of an answer to a chat, early or not; None: the answer is all text."""
        of_format = self.tool_format
        if of_format is None or tools is None or (tools.names is None and not of_format.is_for_all):
            return None
        return lambda is_early: of_format(tools.names, is_early=is_early, is_parallel=tools.is_parallel)

    def decode_all(self, tokens: list[int]) -> str:
        """The text of ids, special ones included."""
        return self.decode(tokens, skips_special=False)


class Job:
    """The answers of one request, which an engine computes: `handles` are of each prompt's samples."""

    def __init__(
        self, served: Served, pages: Pages, wish: Wish, prompts: list[list[int]], handles: list[list[Handle]],
        stop_tokens: list[int],
    ):  # fmt: skip
        decode = served.decode if served.parser_for(wish.tools) is None else served.decode_marks
        self._served, self._pages, self._wish = served, pages, wish
        self._leaders = [of_prompt[0] for of_prompt in handles]
        self._handles = [handle for of_prompt in handles for handle in of_prompt]
        of_answer: Any = {"has_starts": wish.logprobs is not None, "min_tokens": wish.sampling.min_tokens}
        of_pieces: Any = {
            "stop_tokens": frozenset(stop_tokens), "listens": wish.streams, "has_top": served.limits.top_logprobs > 0,
            "shows_stop": wish.echoes and wish.logprobs is not None,  # each token has an entry
        }  # fmt: skip
        self._streams = [
            pieces(handle, Answer(decode, prompt, wish.stop, **of_answer), **of_pieces)
            for prompt, of_prompt in zip(prompts, handles, strict=True)
            for handle in of_prompt
        ]
        self._prompts = [prompt for prompt, of_prompt in zip(prompts, handles, strict=True) for _ in of_prompt]
        self._echoed = list[Piece | None]([None]) * self.size  # of each choice
        self._num_prompted = sum(map(len, prompts))
        self._num_tokens = [0] * self.size  # of each choice

    @property
    def size(self) -> int:
        """The number of choices."""
        return len(self._handles)

    @property
    def num_open(self) -> int:
        """The number of choices that are not made yet."""
        return sum(not handle.done for handle in self._handles)

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        cached = sum(handle.output.cached_tokens for handle in self._leaders)
        return Usage(self._num_prompted, sum(self._num_tokens), cached)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """The pieces of all choices, as they come, each with the choice's index."""
        async with contextlib.aclosing(self._merged() if self.size > 1 else self._only()) as found:
            async for index, piece in found:
                self._pages.count(self._handles[index], piece, self._num_tokens[index])
                self._num_tokens[index] = piece.num_tokens
                if piece.finish is not None and self._served.before_end is not None:
                    await asyncio.to_thread(self._served.before_end)
                if self._wish.echoes:
                    prompt = self._echoed[index]
                    if prompt is None:  # it has been scored before the answer begins
                        of_prompt = self._prompts[index], self._handles[index].output
                        prompt = await asyncio.to_thread(prompt_piece, self._served.decode, *of_prompt)
                        self._echoed[index] = prompt
                        yield index, prompt
                    piece = after_prompt(piece, prompt)
                yield index, piece

    @property
    def tells_prompts(self) -> bool:
        """Whether the response has tokens of prompts, whose texts take time to decode."""
        return self._wish.echoes or self._wish.prompt_logprobs is not None

    def prompt_logprobs(self) -> list[Any] | None:
        """The `prompt_logprobs` of each choice, which is over, as vLLM has them; None if they are not wanted."""
        num_top = self._wish.prompt_logprobs
        if num_top is None:
            return None
        by_leader = {
            id(handle): prompt_logprobs(self._served.decode_all, prompt, handle.output, num_top)
            for prompt, handle in zip(self._prompts, self._handles, strict=True)
            if handle is handle.samples[0]
        }
        return [by_leader[id(handle.samples[0])] for handle in self._handles]

    async def _only(self) -> AsyncGenerator[tuple[int, Piece]]:
        async with contextlib.aclosing(self._streams[0]) as found:
            async for piece in found:
                yield 0, piece

    async def _merged(self) -> AsyncGenerator[tuple[int, Piece]]:
        queue = asyncio.Queue[tuple[int, Piece | Exception]]()

        async def pump(index: int) -> None:
            try:
                async for piece in self._streams[index]:
                    queue.put_nowait((index, piece))
            except Exception as error:
                queue.put_nowait((index, error))

        tasks = [asyncio.create_task(pump(index)) for index in range(self.size)]
        left = len(tasks)
        try:
            while left:
                index, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece.finish is not None
                yield index, piece
        finally:
            for task in tasks:
                task.cancel()

    def cancel(self) -> None:
        """Ends what is not over."""
        for handle in self._handles:
            if not handle.done:
                handle.cancel()


class Events(Response):
    """A response of events, which ends with its client."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]], close: Callable[[], Any], *, has_types: bool = False):
        """Sends events, which say their types as server-sent events do if they have some; else [DONE] is the last."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._has_types = events, close, has_types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them."""
        try:
            await while_connected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                data = json.dumps(event, ensure_ascii=False)  # of whole characters
                first = f"event: {event['type']}\n" if self._has_types else ""
                body = f"{first}data: {data}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            body = b"" if self._has_types else b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work, which is cancelled when the client goes away: then None."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = task, _ = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole(job: Job, form: Form) -> dict[str, Any]:
    """The whole response."""
    choices: list[list[Piece]] = [[] for _ in range(job.size)]
    async with contextlib.aclosing(job.pieces()) as found:
        async for index, piece in found:
            choices[index].append(piece)
    if not job.tells_prompts and not form.is_parsed:
        return form.whole(choices, job.usage)
    return await asyncio.to_thread(lambda: form.whole(choices, job.usage, job.prompt_logprobs()))


async def events(job: Job, form: Form, request_id: str) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream; if the engine fails, the last one is an error with the request's id."""
    try:
        for event in form.first(job.size):
            yield event
        async with contextlib.aclosing(job.pieces()) as found:
            async for index, piece in found:
                for event in form.chunks(index, piece):
                    yield event
        for event in form.last(job.usage):
            yield event
    except (EngineError, Failed) as error:
        shown = failure(error)
        if shown.status >= 500:
            note_failure(request_id, error)
        for event in form.failed(shown, request_id):
            yield event


def note_failure(request_id: str, error: Exception) -> None:
    """Logs a request that the server has failed."""
    _log.error("request %s: %s: %s", request_id, type(error).__name__, error)


def failure(error: Exception) -> ApiError:
    """The error, in the API's form, of a request that was not served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    if not isinstance(error, EngineError | Failed | TimeoutError):
        return ApiError(500, "internal error", kind="server_error")
    if isinstance(error, Failed) and error.finish in REFUSED:
        message = "the cache cannot hold the prompt with its answers: fewer tokens or samples would do"
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, Failed) and error.finish == "cancelled":  # nobody else cancels it while its client is there
        headers = {"x-should-retry": "false"}  # for OpenAI's client
        return ApiError(504, "the answer takes too long", code="timeout", kind="server_error", headers=headers)
    status = 503 if isinstance(error, EngineError) else 500
    return ApiError(status, str(error), code="engine_error", kind="server_error")
