# SPDX-License-Identifier: Apache-2.0
"""The application in front of replicas: it reads a request as a server does, and calls the replica for its prompt.

client ── front: key, limits, body, template, tokens ── a rule, by mirrors of the caches ── replica: the server
"""

from __future__ import annotations

import abc
import argparse
import functools
import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import commands, openai_fields, serve, tenants
from .cluster_asgi import Forwarded, Messages, NoReplica, scope_of
from .loading import open_checkpoint
from .openai_api import ApiError, Limits
from .serve_app import Api, Endpoint, key_of, routed
from .serve_job import Served
from .tenants import Keys

try:
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.types import Scope
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[serve]"') from error

NUM_NEW = 128  # tokens that an answer without a limit is expected to have, and at most counts
_PROMPTED = (openai_fields.COMPLETIONS, openai_fields.CHATS, openai_fields.RESPONSES)
_IN_REPLICAS: Any = object()  # schemas that a front only knows to exist
_METRIC = re.compile(rb"([^{ ]+)(\{?)")  # the beginning of a sample


class Prompt(NamedTuple):
    """The part of a request that its router reads."""

    tokens: list[int]
    salt: str | None
    num_new: int  # expected tokens of its answers


class Page(NamedTuple):
    """The answer of a replica to a GET request."""

    replica: str
    status: int
    body: bytes


class Replicas(abc.ABC):
    """The replicas, as a front calls them."""

    @abc.abstractmethod
    def call(self, scope: Scope, body: bytes, prompt: Prompt) -> Messages:
        """Calls the best replica for a prompt. Yields the messages of its response.

        Raises:
          ReplicaEnded: if the replica ends.
          NoReplica: if there is none.
          Busy: if too many requests wait.
        """

    @abc.abstractmethod
    async def fetch_all(self, path: str, headers: list[tuple[bytes, bytes]]) -> list[Page]:
        """Gets a page of each replica. A replica that fails has none.

        Raises:
          NoReplica: if there is none.
        """


class Front(Api):
    """The endpoints of a front. Its replicas check what it reads, and refuse what is wrong."""

    def __init__(self, replicas: Replicas, served: Served, timeout: float):
        super().__init__(None, served, None)  # pyright: ignore[reportArgumentType]  # the replicas have both
        self._replicas = replicas
        self._timeout = timeout
        self._listing: bytes | None = None

    async def forward(self, request: Request) -> Response:
        """Puts a request to a replica."""
        path = request.url.path
        async with self._body(request) as body:
            prompt = Prompt([], None, 0)
            if path in _PROMPTED:
                read = functools.partial(self._prompt, endpoint=path, key=key_of(request))
                prompt = await self._read_aside(read, body, is_short=path == openai_fields.COMPLETIONS)
            request_id = request.state.request_id
            scope = scope_of(request.scope, request_id)
            call = functools.partial(self._replicas.call, scope, bytes(body), prompt)
        return Forwarded(
            call,
            timeout=self._timeout,
            request_id=request_id,
            has_types=path == openai_fields.RESPONSES,
        )

    def _prompt(self, body: bytearray, *, endpoint: str, key: str | None) -> Prompt:
        """Returns the first prompt of a body. It is empty if the replica will refuse the body."""
        try:
            params, prompts = self._read(body, endpoint=endpoint)
        except ApiError:
            return Prompt([], None, 0)
        num_new = NUM_NEW if params.max_tokens is None else min(params.max_tokens, NUM_NEW)
        others = sum(map(len, prompts[1:]))
        return Prompt(prompts[0], self._served.keys.salt(key, params.salt), num_new * len(prompts) * params.n + others)

    async def listing(self, request: Request) -> Response:
        """Answers GET /v1/models with the list of a replica, which stays the same."""
        if self._listing is None:
            pages = await self._pages_of(request)
            if not pages:
                raise ApiError(503, "no replica answers", code="engine_error", kind="server_error")
            self._listing = pages[0].body
        return Response(self._listing, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Answers GET /metrics with the metrics of all replicas, each with the label of its replica."""
        pages = await self._pages_of(request)
        text = merge_metrics([(page.replica, page.body) for page in pages])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cache(self, request: Request) -> Response:
        """Answers GET /cache with the page of each replica."""
        pages = await self._pages_of(request)
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        return HTMLResponse(merge_pages(pages), headers={"content-security-policy": policy})

    async def _pages_of(self, request: Request) -> list[Page]:
        headers = [(name, value) for name, value in request.headers.raw if name == b"authorization"]
        try:
            pages = await self._replicas.fetch_all(request.url.path, headers)
        except NoReplica as error:
            raise ApiError(503, str(error), code="engine_error", kind="server_error") from None
        return sorted(page for page in pages if page.status == 200)


def make_app(parser: commands.Parser, args: argparse.Namespace, replicas: Replicas) -> Any:
    """Makes the application of a front, with the options of `models.serve`."""
    keys = tenants.keys_of(parser, args)
    template = serve.open_template(parser, args)
    tokenizer = open_checkpoint(args.checkpoint).tokenizer()
    max_length = args.max_length or serve.DEFAULT_LENGTH
    served = Served(
        name=args.name or commands.model_name(args),
        tokenizer=tokenizer,
        longest_token=max(map(len, tokenizer.get_vocab())) if tokenizer else 0,
        template=template,
        stop_tokens=[],
        limits=Limits(max_length=max_length, samples=min(args.rows, 16), top_logprobs=args.top_logprobs),
        defaults={},
        keys=keys,
        max_body=args.max_body,
        max_bodies=args.max_bodies,
        max_open=args.max_open,
        timeout=args.timeout,
        shows_cached=not args.hide_cached_tokens,
        before_end=None,
        schemas=_IN_REPLICAS if args.schemas else "the replicas have none",
        tool_format=serve.tool_format_of(args, template),
    )
    front = Front(replicas, served, args.timeout)
    no_keys = Keys()
    endpoints: list[tuple[str, str, Endpoint, Keys]] = [
        *(("POST", path, front.forward, keys) for path in _PROMPTED),
        ("POST", openai_fields.TOKENIZE, front.forward, keys),
        ("POST", openai_fields.DETOKENIZE, front.forward, keys),
        ("GET", "/v1/models", front.listing, keys),
        ("GET", "/v1/models/{name:path}", front.forward, keys),
        ("GET", "/cache", front.cache, keys),
        ("GET", "/metrics", front.metrics, no_keys),
        ("GET", "/health", front.forward, no_keys),
        ("GET", "/version", front.version, no_keys),
    ]
    return serve.guarded_app(args, routed(endpoints))


def merge_metrics(texts: Sequence[tuple[str, bytes]]) -> bytes:
    r"""Returns the metrics of several replicas as one text: each sample gets the label `replica`.

    Args:
      texts: (the name of a replica, its metrics in the text format of Prometheus).

    Example:
      >>> from models.cluster_front import merge_metrics
      >>> texts = [("a", b"# TYPE up gauge\nup 1.0\n"), ("b", b'# TYPE up gauge\nup{on="1"} 2.0\n')]
      >>> print(merge_metrics(texts).decode().strip())
      # TYPE up gauge
      up{replica="a"} 1.0
      up{replica="b",on="1"} 2.0
    """
    heads = dict[bytes, list[bytes]]()  # of each family
    samples = dict[bytes, list[bytes]]()
    for name, text in texts:
        family = b""
        for line in text.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(family, []).append(_labelled(line, name))
                heads.setdefault(family, [])
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return b"\n".join([*lines, b""])


def _labelled(line: bytes, replica: str) -> bytes:
    """Returns a sample with the label of its replica, which stands first."""
    match = _METRIC.match(line)
    assert match is not None, line
    metric, brace = match.groups()
    label = f'{{replica="{replica}"'.encode()
    return metric + label + (b"," if brace else b"}") + line[match.end() :]


def merge_pages(pages: Sequence[Page]) -> str:
    """Returns the pages of several replicas as one page, each under the name of its replica."""
    texts = [page.body.decode() for page in pages]
    head = texts[0].partition("<body>")[0] if texts else "<!doctype html><title>kvjax</title>"
    bodies = [
        f"<h1>{html.escape(page.replica)}</h1>{text.partition('<body>')[2].partition('</body>')[0]}"
        for page, text in zip(pages, texts, strict=True)
    ]
    return f"{head}<body>{''.join(bodies)}</body></html>\n"
