# SPDX-License-Identifier: Apache-2.0
"""OpenAI's HTTP API of an engine: completions, chats, responses and models, as a Starlette application.

When a client leaves, its request is cancelled, whether it is a stream or not.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import kvjax
from kvjax import serving
from kvjax.serving import Engine, EngineError, Handle, Penalties, QueueFull

from . import openai_api, openai_fields, openai_messages, openai_responses, openai_schemas
from .answers import Failed
from .openai_api import ApiError, Fields, GenerationParams, Grammar, Tools, busy
from .openai_replies import ResponseFormat
from .openai_response_form import ResponsesFormat
from .serve_job import (
    ActiveRequest,
    Events,
    Served,
    complete_response,
    events,
    failure,
    note_failure,
    while_connected,
)
from .serve_pages import Pages
from .serve_schemas import Slot
from .serve_weights import Operator, state_of
from .tenants import Keys
from .tool_calls import FORMATS
from .tool_grammars import answer_grammar

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[serve]"') from error

SHORT = 10_000  # bytes; encoding a shorter text takes less time than starting another thread
READERS = 2  # threads that read bodies; encoding a long body takes about 100 MB
GONE = 499  # the status after a client has left; nobody receives it
# {an argument of `Engine.submit`: the field of a request for it}
_PARAMS = {
    "samples": "n",
    "stop_tokens": "stop_token_ids",
    "max_new_tokens": "max_tokens",
    "salt": "cache_salt",
    "prompt_logprobs_from": "prompt_logprobs",
}
# {an endpoint: the field of a request's prompt}, and {an endpoint: the form of its response}.
_PROMPTS = {openai_fields.COMPLETIONS: "prompt", openai_fields.CHATS: "messages", openai_fields.RESPONSES: "input"}
_FORMS = {
    openai_fields.COMPLETIONS: functools.partial(ResponseFormat, is_chat=False),
    openai_fields.CHATS: functools.partial(ResponseFormat, is_chat=True),
    openai_fields.RESPONSES: ResponsesFormat,
}


class Api:
    """The endpoints of a server."""

    def __init__(self, engine: Engine[Any], served: Served, pages: Pages):
        self._engine = engine
        self._served = served
        self._pages = pages
        self._active = set[ActiveRequest]()
        self._body_bytes = 0  # of all bodies that are being read
        self._created = int(time.time())
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "kvjax-read")

    async def answer(self, request: Request, *, endpoint: str) -> Response:
        """Answers POST /v1/chat/completions, /v1/completions and /v1/responses."""
        served = self._served
        read = functools.partial(self._read, endpoint=endpoint)
        async with self._body(request) as body:
            params, prompts = await self._read_aside(read, body, is_short=endpoint == openai_fields.COMPLETIONS)
        params.salt = served.keys.salt(key_of(request), params.salt)
        slot = None
        if params.grammar is not None:
            slot = await while_connected(request.receive, self._take(params.grammar))
            if slot is None:
                return Response(status_code=GONE)
        try:
            active = self._submit(prompts, params, slot, _PROMPTS[endpoint])
        except BaseException:
            self._release(slot)
            raise
        make_form = _FORMS[endpoint]
        form = make_form(
            served.name,
            params,
            served.decode_all,
            shows_cached=served.shows_cached,
            make_parser=served.parser_for(params.tools),
        )

        def close() -> None:
            active.cancel()
            self._active.discard(active)
            self._release(slot)

        if params.is_streaming:
            stream = events(active, form, request.state.request_id)
            return Events(stream, close, has_types=endpoint == openai_fields.RESPONSES)
        try:
            response = await while_connected(request.receive, complete_response(active, form))
        finally:
            close()
        return Response(status_code=GONE) if response is None else JSONResponse(response)

    async def _take(self, wanted: Grammar) -> Slot:
        """Waits for the slot of a grammar."""
        schemas = self._served.schemas
        if isinstance(schemas, str):
            raise ApiError(400, f"{wanted.param}: no schemas are served: {schemas}", wanted.field)
        return await schemas.take(wanted, self._served.max_open)

    def _release(self, slot: Slot | None) -> None:
        if slot is not None and not isinstance(self._served.schemas, str):
            self._served.schemas.release(slot)

    async def _read_aside[T](self, read: Callable[[bytearray], T], body: bytearray, *, is_short: bool) -> T:
        """Reads a body, on another thread if the body or its prompt may be long."""
        if len(body) < SHORT and is_short:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, body)

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Reads the body of a request, which counts towards `max_bodies` until the end of the `with`."""
        served = self._served
        body = bytearray()
        too_long = ApiError(413, f"the body has more than {served.max_body:,} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > served.max_body:
            raise too_long
        try:
            async for chunk in request.stream():
                body += chunk
                self._body_bytes += len(chunk)
                if len(body) > served.max_body:
                    raise too_long
                if len(body) > SHORT and self._body_bytes > served.max_bodies:
                    raise busy(f"bodies of {self._body_bytes:,} bytes are being read, of at most {served.max_bodies:,}")
            yield body
        finally:
            self._body_bytes -= len(body)

    def _read(self, body: bytearray, *, endpoint: str) -> tuple[GenerationParams, list[list[int]]]:
        """Returns the parameters of a body, and the token ids of its prompts."""
        fields = self._fields(body)
        if endpoint != openai_fields.RESPONSES:
            return self._read_fields(fields, is_chat=endpoint == openai_fields.CHATS)
        has_schemas = not isinstance(self._served.schemas, str)
        chat, repeated = openai_responses.read_request(fields, has_schemas=has_schemas)
        with openai_responses.own_names():
            params, prompts = self._read_fields(chat, is_chat=True, format_name="text.format")
        if params.logprobs is not None and self._served.parser_for(params.tools) is not None:
            raise openai_api.refuse("include", fields.get("include"), "no logprobs with calls or reasoning")
        params.response_fields = repeated
        return params, prompts

    def _read_fields(
        self, fields: Fields, *, is_chat: bool, format_name: str = "response_format"
    ) -> tuple[GenerationParams, list[list[int]]]:
        served = self._served
        params = openai_api.read_params(fields, served.limits, is_chat=is_chat, defaults=served.defaults)
        params.grammar = openai_schemas.read_grammar(fields, format_name)
        if is_chat:
            params.tools = openai_messages.read_tools(fields)
            prompt = self._chat(fields, params.tools)
            params.grammar = answer_grammar(params.grammar, params.tools, served.tool_format)
            openai_schemas.check_params(params)
            return params, [prompt]
        openai_schemas.check_params(params)
        encode = functools.partial(served.encode, add_special_tokens=fields.flag("add_special_tokens", True))
        return params, openai_api.read_prompts(fields, encode if served.tokenizer else None, served.limits)

    def _fields(self, body: bytearray) -> Fields:
        """Returns the fields of a body, whose model must be the server's."""
        fields = openai_api.read_json(body)
        self._check_model(fields.get("model", self._served.name))
        return fields

    def _check_model(self, name: Any) -> None:
        if name != self._served.name:
            message = f"the model {json.dumps(name)[:80]} does not exist, but {self._served.name!r} does"
            raise ApiError(404, message, "model", "model_not_found")

    def _chat(self, fields: Fields, tools: Tools) -> list[int]:
        """Returns the token ids of a chat's messages and tools."""
        served = self._served
        if served.template is None or served.tokenizer is None:
            raise ApiError(400, "the model has no chat template", "messages")
        if tools.names is not None and served.tool_format is None:
            formats = ", ".join(FORMATS)
            message = f"tools: the server does not know how the chat template writes calls; --tool-format: {formats}"
            raise ApiError(400, message, "tools")
        messages = openai_messages.read_messages(fields)
        rendering = openai_messages.read_rendering(fields)
        try:
            text = served.template.render(messages, tools.definitions, **rendering._asdict())
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None
        return served.encode(text, "messages", add_special_tokens=fields.flag("add_special_tokens"))

    async def tokenize(self, request: Request) -> Response:
        """Answers POST /tokenize with the token ids of a text or a chat."""
        async with self._body(request) as body:
            tokenized = await self._read_aside(self._tokenized, body, is_short=False)
        return JSONResponse(tokenized)

    def _tokenized(self, body: bytearray) -> dict[str, Any]:
        served = self._served
        fields = self._fields(body)
        openai_api.check_refused(fields, openai_fields.fields_of(openai_fields.TOKENIZE)[2])
        if served.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer", "prompt")
        if fields.get("messages") is None:
            text = openai_api.read_text(fields)
            tokens = served.encode(text, add_special_tokens=fields.flag("add_special_tokens", True))
        elif fields.get("prompt") is None:
            tokens = self._chat(fields, Tools(openai_messages.read_definitions(fields), "none", is_parallel=True))
        else:
            raise openai_api.refuse("prompt", fields.get("prompt"), "none with messages")
        token_strs = None
        if fields.flag("return_token_strs"):
            token_strs = [served.tokenizer.id_to_token(token) for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": served.limits.max_length,
            "tokens": tokens,
            "token_strs": token_strs,
        }

    async def detokenize(self, request: Request) -> Response:
        """Answers POST /detokenize with the text of token ids, special tokens included."""
        async with self._body(request) as body:
            return JSONResponse(await self._read_aside(self._detokenized, body, is_short=True))

    def _detokenized(self, body: bytearray) -> dict[str, Any]:
        tokens = openai_api.read_tokens(self._fields(body), self._engine.vocabulary)
        return {"prompt": self._served.decode_all(tokens)}

    async def version(self, _: Request) -> Response:
        """Answers GET /version."""
        return JSONResponse({"version": kvjax.__version__})

    def _submit(
        self, prompts: list[list[int]], params: GenerationParams, slot: Slot | None, param: str
    ) -> ActiveRequest:
        """Submits all prompts of a request, or none if it is refused. `param` is the prompt's field."""
        served = self._served
        stop_tokens = [*params.stop_tokens, *([] if params.ignores_eos else served.stop_tokens)]
        lengths = [openai_api.check_length(prompt, params, served.limits, param) for prompt in prompts]
        size = len(prompts) * params.n
        if size > served.max_open:
            name = param if params.n == 1 else "n"
            raise ApiError(400, f"{name}: got {size:,} answers, wanted at most {served.max_open:,} of a request", name)
        num_open = sum(active.num_open for active in self._active)
        if num_open + size > served.max_open:
            raise busy(f"{num_open:,} answers are open, of at most {served.max_open:,}")
        self._check_biases(params)
        handles = list[list[Handle]]()  # of each prompt: a handle for each sample
        try:
            for prompt, max_new_tokens in zip(prompts, lengths, strict=True):
                request = serving.Request(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    sampling=params.sampling,
                    seed=params.seed,
                    stop_tokens=stop_tokens,
                    priority=params.priority,
                    samples=params.n,
                    logits_state=self._logits_state(params, prompt, slot),
                    prompt_logprobs_from=params.prompt_logprobs_from(len(prompt)),
                )
                handle = self._engine.submit(request, salt=params.salt, timeout=served.timeout)
                handles.append(handle.samples)
        except Exception as error:
            for handle in itertools.chain(*handles):
                handle.cancel()
            if isinstance(error, QueueFull):
                raise busy(str(error)) from None
            if isinstance(error, ValueError):
                raise _refusal(error, param) from None
            raise
        active = ActiveRequest(served, self._pages, params, prompts, handles, stop_tokens)
        self._active.add(active)
        return active

    def _check_biases(self, params: GenerationParams) -> None:
        """Refuses biases of tokens outside the model's vocabulary."""
        last_token = self._engine.vocabulary - 1
        largest = max((params.penalties or {}).get("bias", {}), default=0)
        if largest > last_token:
            raise openai_api.refuse("logit_bias", largest, f"tokens of 0..{last_token}")

    def _logits_state(self, params: GenerationParams, prompt: list[int], slot: Slot | None) -> Any:
        """Returns the state of the engine's `logits_fn`. None means neither penalties nor a grammar."""
        if params.penalties is None and slot is None:
            return None
        options: dict[str, Any] = {"repetition": 1.0}
        if params.penalties is not None:
            options = {**params.penalties, "prompt": prompt}
        penalties = Penalties.of(self._engine.spec.max_length, **options, max_biases=openai_api.MAX_BIASES)
        schemas = self._served.schemas
        return penalties if isinstance(schemas, str) else (penalties, schemas.state(slot))

    async def models(self, _: Request) -> Response:
        """Answers GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Answers GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvjax",
            "max_model_len": self._served.limits.max_length,
        }

    async def health(self, _: Request) -> Response:
        """Answers GET /health if the engine answers, with whether it sleeps, and the version of its weights."""
        await self._pages.state()
        return JSONResponse(state_of(self._engine))

    async def operate(self, request: Request, *, act: Callable[[bytearray], Awaitable[dict[str, Any]]]) -> Response:
        """Answers POST /v1/weights, /sleep and /wake."""
        async with self._body(request) as body:
            return JSONResponse(await act(body))

    async def metrics(self, _: Request) -> Response:
        """Answers GET /metrics."""
        text, media_type = await self._pages.metrics()
        return Response(text, media_type=media_type)

    async def cache(self, request: Request) -> Response:
        """Answers GET /cache."""
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        salt = self._served.keys.salt(key_of(request), None)
        return HTMLResponse(await self._pages.cache(salt), headers={"content-security-policy": policy})


def _refusal(error: ValueError, param: str) -> ApiError:
    """Returns the API's error for an argument which `Engine.submit` refuses. `param` is the prompt's field."""
    argument, _, reason = str(error).partition(": ")
    field = param if argument == "prompt" else _PARAMS.get(argument, argument)
    return ApiError(400, f"{field}: {reason}", field)


def key_of(request: Request) -> str | None:
    """Returns the key of a request: API clients send a bearer token, browsers a password. None without a key."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
    return value if scheme.lower() in ("bearer", "basic") else None


def _check_type(request: Request) -> None:
    """Refuses a body without the type of JSON. A page of another site can make a browser send such a body."""
    got = request.headers.get("content-type", "")
    if got.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"content-type: got {json.dumps(got)[:80]}, wanted application/json")


type Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(endpoint: Endpoint, keys: Keys) -> Endpoint:
    """Wraps an endpoint: a request then needs a key, if the server has keys, and a POST needs JSON."""

    async def call(request: Request) -> Response:
        if keys and not keys.accepts(key_of(request) or ""):
            headers = {"www-authenticate": 'Basic realm="kvjax"'} if request.url.path == "/cache" else None
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        if request.method == "POST":
            _check_type(request)
        return await endpoint(request)

    return call


async def respond(request: Request, error: Exception) -> Response:
    """Makes the response to a failed request. Its id is in the body, and in the log if the server is to blame."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    api_error = failure(error)
    request_id = request.state.request_id
    if api_error.status >= 500:
        note_failure(request_id, error)
    return JSONResponse({**api_error.body, "request_id": request_id}, api_error.status, api_error.headers)


def make_app(
    engine: Engine[Any],
    served: Served,
    pages: Pages,
    *,
    sets_state: bool = False,
    operator: tuple[Operator, Keys] | None = None,
) -> Starlette:
    """Makes the application. Prompts and answers need a key, unlike /health, /metrics and /version.

    Only an `operator`, with a key, may replace the weights and let the engine sleep. Without it nobody may. With
    `sets_state` the setters of `pages` are called every second, otherwise before each scrape.
    """
    api = Api(engine, served, pages)
    keys = served.keys
    no_keys = Keys()
    endpoints: list[tuple[str, str, Endpoint, Keys]] = [
        *(("POST", path, functools.partial(api.answer, endpoint=path), keys) for path in _FORMS),
        ("POST", openai_fields.TOKENIZE, api.tokenize, keys),
        ("POST", openai_fields.DETOKENIZE, api.detokenize, keys),
        ("GET", "/v1/models", api.models, keys),
        ("GET", "/v1/models/{name:path}", api.model, keys),
        ("GET", "/cache", api.cache, keys),
        ("GET", "/metrics", api.metrics, no_keys),
        ("GET", "/health", api.health, no_keys),
        ("GET", "/version", api.version, no_keys),
    ]
    if operator is not None:
        actions, operator_keys = operator
        for path, act in (("/v1/weights", actions.weights), ("/sleep", actions.sleep), ("/wake", actions.wake)):
            endpoints.append(("POST", path, functools.partial(api.operate, act=act), operator_keys))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        setting = asyncio.create_task(_set_state(pages)) if sets_state else None
        yield
        if setting is not None:
            setting.cancel()

    return routed(endpoints, lifespan)


def routed(endpoints: Iterable[tuple[str, str, Endpoint, Keys]], lifespan: Any = None) -> Starlette:
    """Makes an application whose errors are those of the API.

    Args:
      endpoints: (method, path, endpoint, keys). A request needs one of the keys, if there are any.
      lifespan: an async context manager around the application's life. None does nothing.
    """
    routes = [Route(path, guarded(call, keys), methods=[method]) for method, path, call, keys in endpoints]
    errors = (ApiError, EngineError, Failed, TimeoutError, ClientDisconnect, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, respond), lifespan=lifespan)


async def _set_state(pages: Pages) -> None:
    while True:
        with contextlib.suppress(EngineError, TimeoutError):
            await pages.set()
        await asyncio.sleep(1)
