# SPDX-License-Identifier: Apache-2.0
"""An engine behind OpenAI's HTTP API: completions, chats, responses and models, as a Starlette application.

A request whose client goes away is cancelled, whether it is answered by events or at once.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import kvjax
from kvjax import serving
from kvjax.serving import Engine, EngineError, Handle, Penalties, QueueFull

from . import openai_api, openai_messages, openai_responses, openai_schemas
from .answers import Failed
from .openai_api import ApiError, Fields, Grammar, Tools, Wish, busy
from .openai_replies import Form
from .openai_response_form import ResponseForm
from .serve_job import Events, Job, Served, events, failure, note_failure, while_connected, whole
from .serve_pages import Pages
from .serve_schemas import Slot
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

SHORT = 10_000  # bytes of a request whose text takes less time to encode than another thread to begin
READERS = 2  # threads that read bodies: a long one takes some 100 MB while it is encoded
GONE = 499  # the status of a request whose client has gone away; nobody gets it
# The arguments of `Engine.submit` by the names that requests have for them.
_PARAMS = {
    "samples": "n", "stop_tokens": "stop_token_ids", "max_new_tokens": "max_tokens", "salt": "cache_salt",
    "prompt_logprobs_from": "prompt_logprobs",
}  # fmt: skip
# The field of a request's prompt, and the form of its response.
_PROMPTS = {openai_api.COMPLETIONS: "prompt", openai_api.CHATS: "messages", openai_api.RESPONSES: "input"}
_FORMS = {
    openai_api.COMPLETIONS: functools.partial(Form, is_chat=False),
    openai_api.CHATS: functools.partial(Form, is_chat=True),
    openai_api.RESPONSES: ResponseForm,
}


class Api:
    """The endpoints."""

    def __init__(self, engine: Engine[Any], served: Served, pages: Pages):
        self._engine, self._served, self._pages = engine, served, pages
        self._jobs, self._body_bytes, self._created = set[Job](), 0, int(time.time())
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "kvjax-read")

    async def answer(self, request: Request, *, endpoint: str) -> Response:
        """POST /v1/chat/completions, /v1/completions, or /v1/responses."""
        served = self._served
        read = functools.partial(self._read, endpoint=endpoint)
        async with self._body(request) as body:
            wish, prompts = await self._read_aside(read, body, is_short=endpoint == openai_api.COMPLETIONS)
        wish.salt = served.keys.salt(_key_of(request), wish.salt)
        slot = None
        if wish.grammar is not None:
            slot = await while_connected(request.receive, self._take(wish.grammar))
            if slot is None:
                return Response(status_code=GONE)
        try:
            job = self._submit(prompts, wish, slot, _PROMPTS[endpoint])
        except BaseException:
            self._release(slot)
            raise
        make_form = _FORMS[endpoint]
        form = make_form(
            served.name,
            wish,
            served.decode_all,
            shows_cached=served.shows_cached,
            make_parser=served.parser_for(wish.tools),
        )

        def close() -> None:
            job.cancel()
            self._jobs.discard(job)
            self._release(slot)

        if wish.streams:
            found = events(job, form, request.state.request_id)
            return Events(found, close, has_types=endpoint == openai_api.RESPONSES)
        try:
            body = await while_connected(request.receive, whole(job, form))
        finally:
            close()
        return Response(status_code=GONE) if body is None else JSONResponse(body)

    async def _take(self, wanted: Grammar) -> Slot:
        """The slot of a grammar."""
        schemas = self._served.schemas
        if isinstance(schemas, str):
            raise ApiError(400, f"{wanted.param}: no schemas are served: {schemas}", wanted.field)
        return await schemas.take(wanted, self._served.max_open)

    def _release(self, slot: Slot | None) -> None:
        if slot is not None and not isinstance(self._served.schemas, str):
            self._served.schemas.release(slot)

    async def _read_aside[T](self, read: Callable[[bytearray], T], body: bytearray, *, is_short: bool) -> T:
        """Reads a body, on another thread if it is long, or if its text may be longer than it is."""
        if len(body) < SHORT and is_short:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, body)

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of a request; it counts among `max_bodies` until the end of the `with`."""
        served, body = self._served, bytearray()
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

    def _read(self, body: bytearray, *, endpoint: str) -> tuple[Wish, list[list[int]]]:
        """Reads a body: the wish, and the token ids of its prompts."""
        fields = self._fields(body)
        if endpoint != openai_api.RESPONSES:
            return self._read_fields(fields, is_chat=endpoint == openai_api.CHATS)
        has_schemas = not isinstance(self._served.schemas, str)
        chat, repeated = openai_responses.read_request(fields, has_schemas=has_schemas)
        with openai_responses.own_names():
            wish, prompts = self._read_fields(chat, is_chat=True, format_name="text.format")
        if wish.logprobs is not None and self._served.parser_for(wish.tools) is not None:
            raise openai_api.refuse("include", fields.get("include"), "no logprobs with calls or reasoning")
        wish.repeated = repeated
        return wish, prompts

    def _read_fields(
        self, fields: Fields, *, is_chat: bool, format_name: str = "response_format"
    ) -> tuple[Wish, list[list[int]]]:
        served = self._served
        wish = openai_api.read_wish(fields, served.limits, is_chat=is_chat, defaults=served.defaults)
        wish.grammar = openai_schemas.read_grammar(fields, format_name)
        if is_chat:
            wish.tools = openai_messages.read_tools(fields)
            prompt = self._chat(fields, wish.tools)
            wish.grammar = answer_grammar(wish.grammar, wish.tools, served.tool_format)
            openai_schemas.check_wish(wish)
            return wish, [prompt]
        openai_schemas.check_wish(wish)
        encode = functools.partial(served.encode, add_special_tokens=fields.flag("add_special_tokens", True))
        return wish, openai_api.read_prompts(fields, encode if served.tokenizer else None, served.limits)

    def _fields(self, body: bytearray) -> Fields:
        """The fields of a body for the model that is served."""
        fields = openai_api.read_json(body)
        self._check_model(fields.get("model", self._served.name))
        return fields

    def _check_model(self, name: Any) -> None:
        if name != self._served.name:
            message = f"the model {json.dumps(name)[:80]} does not exist, but {self._served.name!r} does"
            raise ApiError(404, message, "model", "model_not_found")

    def _chat(self, fields: Fields, tools: Tools) -> list[int]:
        """The token ids of a chat's messages, with its tools."""
        served = self._served
        if served.template is None or served.tokenizer is None:
            raise ApiError(400, "the model has no chat template", "messages")
        if tools.names is not None and served.tool_format is None:
            formats = ", ".join(FORMATS)
            message = f"tools: the chat template has no format of calls that the server reads; --tool-format: {formats}"
            raise ApiError(400, message, "tools")
        messages, rendering = openai_messages.read_messages(fields), openai_messages.read_rendering(fields)
        try:
            text = served.template.render(messages, tools.definitions, **rendering._asdict())
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None
        return served.encode(text, "messages", add_special_tokens=fields.flag("add_special_tokens"))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the token ids of a text, or of a chat."""
        async with self._body(request) as body:
            found = await self._read_aside(self._tokenized, body, is_short=False)
        return JSONResponse(found)

    def _tokenized(self, body: bytearray) -> dict[str, Any]:
        fields, served = self._fields(body), self._served
        openai_api.check_refused(fields, openai_api.fields_of(openai_api.TOKENIZE)[2])
        if served.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer", "prompt")
        if fields.get("messages") is None:
            text, adds_special = openai_api.read_text(fields), fields.flag("add_special_tokens", True)
            tokens = served.encode(text, add_special_tokens=adds_special)
        elif fields.get("prompt") is None:
            tokens = self._chat(fields, Tools(openai_messages.read_definitions(fields), "none", is_parallel=True))
        else:
            raise openai_api.refuse("prompt", fields.get("prompt"), "none with messages")
        pieces = [served.tokenizer.id_to_token(token) for token in tokens] if fields.flag("return_token_strs") else None
        most = served.limits.max_length
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": pieces}

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, special ones included."""
        async with self._body(request) as body:
            return JSONResponse(await self._read_aside(self._detokenized, body, is_short=True))

    def _detokenized(self, body: bytearray) -> dict[str, Any]:
        tokens = openai_api.read_tokens(self._fields(body), self._engine.vocabulary)
        return {"prompt": self._served.decode_all(tokens)}

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": kvjax.__version__})

    def _submit(self, prompts: list[list[int]], wish: Wish, slot: Slot | None, param: str) -> Job:
        """Submits all of a request, or nothing."""
        served, stop_tokens = self._served, list(wish.stop_tokens)
        stop_tokens += [] if wish.ignores_eos else served.stop_tokens
        lengths = [openai_api.check_length(prompt, wish, served.limits, param) for prompt in prompts]
        size, num_open = len(prompts) * wish.n, sum(job.num_open for job in self._jobs)
        if size > served.max_open:
            name = param if wish.n == 1 else "n"
            raise ApiError(400, f"{name}: got {size:,} answers, wanted at most {served.max_open:,} of a request", name)
        if num_open + size > served.max_open:
            raise busy(f"{num_open:,} answers are open, of at most {served.max_open:,}")
        handles = list[list[Handle]]()
        self._check_biases(wish)
        try:
            for prompt, max_new_tokens in zip(prompts, lengths, strict=True):
                request = serving.Request(
                    prompt, max_new_tokens=max_new_tokens, sampling=wish.sampling, seed=wish.seed,
                    stop_tokens=stop_tokens, priority=wish.priority, samples=wish.n,
                    logits_state=self._logits_state(wish, prompt, slot),
                    prompt_logprobs_from=wish.prompt_logprobs_from(len(prompt)),
                )  # fmt: skip
                handle = self._engine.submit(request, salt=wish.salt, timeout=served.timeout)
                handles.append(handle.samples)
        except Exception as error:
            for handle in (one for of_prompt in handles for one in of_prompt):
                handle.cancel()
            if isinstance(error, QueueFull):
                raise busy(str(error)) from None
            if not isinstance(error, ValueError):
                raise
            name, _, rest = str(error).partition(": ")
            name = param if name == "prompt" else _PARAMS.get(name, name)
            raise ApiError(400, f"{name}: {rest}", name) from None
        job = Job(served, self._pages, wish, prompts, handles, stop_tokens)
        self._jobs.add(job)
        return job

    def _check_biases(self, wish: Wish) -> None:
        """Refuses biases of tokens that the model does not have."""
        most, bias = self._engine.vocabulary - 1, (wish.penalties or {}).get("bias", {})
        if (largest := max(bias, default=0)) > most:
            raise openai_api.refuse("logit_bias", largest, f"tokens of 0..{most}")

    def _logits_state(self, wish: Wish, prompt: list[int], slot: Slot | None) -> Any:
        """The state of the engine's `logits_fn`; None: neither penalties nor a grammar."""
        if wish.penalties is None and slot is None:
            return None
        of_prompt: dict[str, Any] = (
            {"repetition": 1.0} if wish.penalties is None else {**wish.penalties, "prompt": prompt}
        )
        penalties = Penalties.of(self._engine.spec.max_length, **of_prompt, most=openai_api.MOST_BIASES)
        schemas = self._served.schemas
        return penalties if isinstance(schemas, str) else (penalties, schemas.state(slot))

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name, "object": "model", "created": self._created, "owned_by": "kvjax",
            "max_model_len": self._served.limits.max_length,
        }  # fmt: skip

    async def health(self, _: Request) -> Response:
        """GET /health: whether the engine answers."""
        await self._pages.state()
        return JSONResponse({})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        text, media_type = await self._pages.metrics()
        return Response(text, media_type=media_type)

    async def cache(self, request: Request) -> Response:
        """GET /cache."""
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        own_salt = self._served.keys.salt(_key_of(request), None)
        return HTMLResponse(await self._pages.cache(own_salt), headers={"content-security-policy": policy})


def _key_of(request: Request) -> str | None:
    """The key that a request has, if any: as API clients send it, or as a password, as browsers do."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
    return value if scheme.lower() in ("bearer", "basic") else None


def _check_type(request: Request) -> None:
    """Refuses a body that is not said to be JSON: pages of other sites can have browsers send such ones."""
    got = request.headers.get("content-type", "")
    if got.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"content-type: got {json.dumps(got)[:80]}, wanted application/json")


type Endpoint = Callable[[Request], Awaitable[Response]]


def _guarded(endpoint: Endpoint, keys: Keys) -> Endpoint:
    """An endpoint that wants one of the keys, if there are any, and JSON from a POST."""

    async def call(request: Request) -> Response:
        if keys and not keys.accepts(_key_of(request) or ""):
            headers = {"www-authenticate": 'Basic realm="kvjax"'} if request.url.path == "/cache" else None
            raise ApiError(401, "a wrong API key, or none", code="invalid_api_key", headers=headers)
        if request.method == "POST":
            _check_type(request)
        return await endpoint(request)

    return call


async def _respond(request: Request, error: Exception) -> Response:
    """The response to a request that has failed; its id is in the body, and in the log if the server is to blame."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    shown, request_id = failure(error), request.state.request_id
    if shown.status >= 500:
        note_failure(request_id, error)
    return JSONResponse({**shown.body, "request_id": request_id}, shown.status, shown.headers)


def make_app(engine: Engine[Any], served: Served, pages: Pages, *, sets_state: bool = False) -> Starlette:
    """The application; only prompts and answers are behind a key: /health and /metrics are not.

    With `sets_state` the setters of `pages` are called every second, else before each scrape.
    """
    api, keys, no_keys = Api(engine, served, pages), served.keys, Keys()
    endpoints: list[tuple[str, str, Endpoint, Keys]] = [
        *(("POST", path, functools.partial(api.answer, endpoint=path), keys) for path in _FORMS),
        ("POST", openai_api.TOKENIZE, api.tokenize, keys),
        ("POST", openai_api.DETOKENIZE, api.detokenize, keys),
        ("GET", "/v1/models", api.models, keys),
        ("GET", "/v1/models/{name:path}", api.model, keys),
        ("GET", "/cache", api.cache, keys),
        ("GET", "/metrics", api.metrics, no_keys),
        ("GET", "/health", api.health, no_keys),
        ("GET", "/version", api.version, no_keys),
    ]
    routes = [Route(path, _guarded(call, guard), methods=[method]) for method, path, call, guard in endpoints]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        setting = asyncio.create_task(_set_state(pages)) if sets_state else None
        yield
        if setting is not None:
            setting.cancel()

    errors = (ApiError, EngineError, Failed, TimeoutError, ClientDisconnect, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _respond), lifespan=lifespan)


async def _set_state(pages: Pages) -> None:
    while True:
        with contextlib.suppress(EngineError, TimeoutError):
            await pages.set()
        await asyncio.sleep(1)
