# SPDX-License-Identifier: Apache-2.0
"""Serve a checkpoint in Hugging Face format or a GGUF file with OpenAI's HTTP API, through the paged cache.

Completions, chats with the checkpoint's own template, and models are under /v1, metrics for Prometheus at /metrics, and
a page that shows the cache at /cache. SIGTERM, SIGHUP and Ctrl-C end it: open answers have some seconds to end.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import pathlib
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import kvjax
from kvjax.interop import combine_listeners
from kvjax.serving import Engine, Penalties, RunOptions, Scheduler, penalize

from . import chat, commands, memory, session, stores, tenants, wires
from .checkpoint import GENERATION
from .commands import number
from .loading import open_checkpoint
from .openai_api import MOST_BIASES, ApiError, Limits, read_defaults
from .serve_schemas import Schemas, open_schemas
from .session import MOST, SIZES
from .tool_calls import FORMATS, Parser, detect

MOST_LENGTH = 4096  # tokens of a row, unless the options say otherwise
STOP_TOKENS = 8  # of a request, those of the model included; more where these and the ends of turns and calls are more


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    commands.check_extra(parser, "serve")
    wires.check(parser, args)
    stores.check(parser, args)
    commands.keep_programs(not args.no_compile_cache)
    if args.until_eof:
        threading.Thread(target=_end_with_input, daemon=True).start()
    with (
        contextlib.suppress(KeyboardInterrupt), _Signals() as signals, _bound(parser, args) as listening,
        served(parser, args) as server,
    ):  # fmt: skip
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listening.getsockname()[1]}/v1"
        signals.server = http_server(args, server, lambda: _note(f"serving at {address}"))
        signals.server.run(sockets=[listening])


def make_parser() -> commands.Parser:
    """The parser of the command line."""
    parser = commands.Parser("serve", __doc__)
    parser.add_argument("--checkpoint", metavar="PATH", required=True, help="a Hugging Face folder, or a GGUF file")
    parser.add_argument("--name", metavar="NAME", help="of the model in requests (default: the folder's)")
    parser.add_argument("--chat-template", metavar="FILE", type=pathlib.Path, help="in place of the checkpoint's")
    formats = "of calls of tools, in place of the one that the chat template shows: %(choices)s"
    parser.add_argument("--tool-format", choices=tuple(FORMATS), help=formats)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=wires.PORT, default=8000, help="to listen at; 0 chooses one (default: %(default)s)"
    )
    tenants.add_keys(parser)
    parser.add_argument(
        "--hide-cached-tokens", action="store_true", help="answers do not say how many tokens were found in the cache"
    )
    session.add_dtype(parser)
    session.add_sizes(
        parser, rows="(default: %(default)s)", length=f"the model's most, or {MOST_LENGTH}", has_budget=True
    )
    parser.set_defaults(rows=SIZES["rows"])
    limits = (
        ("--top-logprobs", 0, 5, "the most that a request may want"),
        ("--max-waiting", 1, 1024, "requests that wait for the scheduler; more get 429"),
        ("--max-open", 1, 256, "answers that are being made at a time; more get 429"),
        ("--max-connections", 1, 512, "open at a time; another one ends the one that has waited longest for a request"),
        ("--timeout", 1, 600, "seconds in which an answer is made; a longer one is cancelled"),
        ("--schemas", 0, 8, "schemas, patterns and choices of answers at a time; 0: none are served"),
        ("--grace", 0, 5, "seconds that open answers have when the server ends"),
    )
    for option, least, default, what in limits:
        parser.add_argument(
            option, type=number(int, least, MOST), default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument("--max-body", metavar="SIZE", type=commands.size, default=4 << 20, help="such as 1MB (4MiB)")
    bodies = "all that are read at a time (64MiB); more get 429"
    parser.add_argument("--max-bodies", metavar="SIZE", type=commands.size, default=64 << 20, help=bodies)
    hosts = "names that a request's Host may have (those of a loopback address: localhost and it; else any)"
    parser.add_argument("--allowed-hosts", metavar="HOST", nargs="+", help=hosts)
    origins = "pages of these origins may call the server, such as https://chat.example; * for all (none)"
    parser.add_argument("--allowed-origins", metavar="ORIGIN", nargs="+", type=_origin, default=[], help=origins)
    generation = "whether generation_config.json has the defaults of requests (default: %(default)s)"
    parser.add_argument("--generation-config", choices=("auto", "none"), default="auto", help=generation)
    session.add_mesh(parser)
    commands.add_scan(parser)
    commands.add_compile_cache(parser)
    stores.add_store(parser)
    parser.add_argument(
        "--store-sync", action="store_true", help="an answer ends when the whole blocks of its prompt are in the store"
    )
    parser.add_argument("--save", metavar="DIR", help="load what is cached from there, and save it there at the end")
    wires.add_publishers(parser)
    parser.add_argument(
        "--until-eof", action="store_true",
        help="end when standard input does, as with a program that has started this one",
    )  # fmt: skip
    return parser


def _origin(text: str) -> str:
    """An origin as browsers send it, or *."""
    if text != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r:.80}, wanted * or an origin such as https://chat.example")
    return text


class Server(NamedTuple):
    """A server that is ready to run: the application and its engine."""

    app: Any
    engine: Engine[Any]


@contextlib.contextmanager
def served(parser: commands.Parser, args: argparse.Namespace) -> Iterator[Server]:
    """The application for a checkpoint; the end of a `with` closes its engine, its store and its wires."""
    import prometheus_client  # late, as those below: they need the extra

    from kvjax.interop.metrics import Metrics

    from .serve_app import make_app
    from .serve_job import Served
    from .serve_pages import Pages

    where = session.make_mesh(parser, args)
    model, tokenizer = session.load_model(parser, args, **where)
    template, keys = _template(parser, args), tenants.keys_of(parser, args)
    spec = _spec(parser, args, model, where)
    registry, names = prometheus_client.CollectorRegistry(), kvjax.Namespaces()
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(wires.Wires(parser, args, spec, _note, names))
        store = stack.enter_context(stores.opened(parser, args, spec, args.checkpoint, names=names))
        metrics = stack.enter_context(Metrics(registry, spec, wires=wire.feeds))
        listeners = [metrics.observe, *([wire.listener] if wire.listener else [])]
        cache = session.make_cache(parser, args, spec, **where)
        saved = stack.enter_context(stores.saved(parser, args, cache, names, _note))
        _note(memory.described(args, model, saved.cache))
        for feed in wire.feeds.values() if saved.loaded else ():
            feed.attach(saved.cache.state)
        tool_format = _tool_format(args, template)
        call_end = tool_format.call_end if tool_format else None
        stop_tokens = chat.stop_tokens(model.config.eos_token_ids, tokenizer, template, call_end)
        marks = tool_format.marks if tool_format else ()
        schemas = open_schemas(args.schemas, tokenizer, model.config.vocab_size, marks, stop_tokens, args.timeout)
        if isinstance(schemas, str):
            _note(f"no schemas are served: {schemas}")
        else:
            stack.callback(schemas.close)
        engine = _engine(parser, args, model, saved.cache, combine_listeners(spec, *listeners), names, store, schemas)
        stack.callback(lambda: setattr(saved, "cache", engine.close()))
        defaults = _defaults(parser, args)
        limits = Limits(
            max_length=min(spec.max_length, session.most_tokens(args, model)),
            samples=min(args.rows, 16), top_logprobs=args.top_logprobs,
        )  # fmt: skip
        shown = Served(
            args.name or commands.model_name(args), tokenizer, max(map(len, tokenizer.get_vocab())) if tokenizer else 0,
            template, stop_tokens, limits, defaults, keys, args.max_body, args.max_bodies, args.max_open, args.timeout,
            shows_cached=not args.hide_cached_tokens,
            # The engine begins to write after a turn, and tells its state between two.
            before_end=(lambda: (engine.state, store.flush())) if store and args.store_sync else None,
            schemas=schemas, tool_format=tool_format,
        )  # fmt: skip
        pages = Pages(shown.name, registry, shown.decode_all, metrics.set, wire.set)
        pages.engine = engine
        yield Server(make_app(engine, shown, pages, sets_state=args.agent is not None), engine)


def _template(parser: commands.Parser, args: argparse.Namespace) -> chat.Template | None:
    """The template of chats; None: the checkpoint has none. With a fault of the checkpoint's, chats are refused."""
    try:
        template = chat.load_template(args.checkpoint, args.chat_template)
    except (OSError, ValueError) as error:
        template = chat.Template("", {}, fault=commands.reason(error))
    if template is not None and template.fault is not None:
        if args.chat_template is not None:
            parser.error(f"--chat-template: {template.fault}")
        _note(f"chats are refused: {template.fault}")
    return template


def _tool_format(args: argparse.Namespace, template: chat.Template | None) -> type[Parser] | None:
    """The format of calls of tools that the options or the template name."""
    name = args.tool_format or (None if template is None else detect(template.tools_text))
    return None if name is None else FORMATS[name]


def _defaults(parser: commands.Parser, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the checkpoint's generation_config.json that requests have by default."""
    checkpoint, defaults = open_checkpoint(args.checkpoint), dict[str, Any]()
    if args.generation_config == "auto":
        try:
            defaults = read_defaults(checkpoint.fields(GENERATION))
        except ApiError as error:
            parser.error(f"--generation-config: {checkpoint.file_of(GENERATION)}: {error}")
    listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    _note(f"defaults of requests: {listed} ({GENERATION})" if listed else "defaults of requests: the API's")
    return defaults


def _spec(parser: commands.Parser, args: argparse.Namespace, model: Any, where: dict[str, Any]) -> kvjax.CacheSpec:
    """The spec of the cache; sets the length of a row if none was given, and the number of blocks of a budget."""
    positions, spec = session.most_positions(args, model), None
    if args.budget is not None:
        spec = memory.fitting(parser, args, model, min(args.max_length or MOST_LENGTH, positions), where)
    session.set_length(parser, args, model, MOST_LENGTH)
    spec = spec or session.make_spec(parser, args, model)
    if spec.max_length > args.max_length:  # the budget holds no row of so many tokens
        spec = memory.fitting(parser, args, model, args.max_length, where)
    session.check_memory(parser, args, model, spec)
    return spec


def _engine(
    parser: commands.Parser, args: argparse.Namespace, model: Any, cache: Any, listener: Any,
    names: kvjax.Namespaces, store: Any, schemas: Schemas | str,
) -> Engine[Any]:  # fmt: skip
    """The engine, which compiles everything."""
    _note("compiling")
    penalties = Penalties.of(args.max_length, repetition=1.0, max_biases=MOST_BIASES)
    has_schemas = not isinstance(schemas, str)
    try:
        options = RunOptions(
            scheduler=Scheduler(reserve="num_tokens", chunk=args.chunk), top_logprobs=args.top_logprobs, store=store,
            names=names, listener=listener, logits_fn=schemas.logits_fn if has_schemas else penalize,
        )  # fmt: skip
        engine = Engine(
            model, cache, options, max_waiting=args.max_waiting,
            num_stop_tokens=max(STOP_TOKENS, len(model.config.eos_token_ids) + 2), min_p=True,
            logits_state=(penalties, schemas.state(None)) if has_schemas else penalties,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    if has_schemas:
        schemas.engine = engine
    return engine


def _bound(parser: commands.Parser, args: argparse.Namespace) -> socket.socket:
    """A socket at the address to listen at; until it listens, connections are refused."""
    found = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((args.host, args.port))
    except OSError as error:
        found.close()
        parser.error(f"--port: {commands.reason(error, f'{args.host}:{args.port}')}")
    return found


class _Signals:
    """SIGTERM, SIGHUP and Ctrl-C from the command's start to its end; another Ctrl-C interrupts the end."""

    server: Any = None  # which ends by itself; None: there is none yet

    def __enter__(self) -> _Signals:
        self._before = {one: signal.signal(one, self._end) for one in (signal.SIGINT, signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else nohup has said that it may come
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._end)
        return self

    def __exit__(self, *_: Any) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _end(self, kind: int, frame: Any) -> None:
        if self.server is None or (self.server.has_ended and kind == signal.SIGINT):
            raise KeyboardInterrupt
        self.server.handle_exit(kind, frame)


def _end_with_input() -> None:
    """Waits for the end of standard input, and then ends this process as SIGTERM does."""
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def http_server(args: argparse.Namespace, server: Server, opened: Callable[[], Any]) -> Any:
    """An `HttpServer` with the limits of the options; `opened` is called when it accepts connections."""
    from .serve_http import HttpServer, Patience, only_hosts, only_origins, with_request_ids

    hosts = args.allowed_hosts
    if hosts is None and _is_loopback(args.host):
        hosts = ["localhost", "127.0.0.1", "::1", args.host]
    app = server.app if hosts is None else only_hosts(server.app, hosts)
    app = with_request_ids(only_origins(app, args.allowed_origins))
    patience = Patience(connections=args.max_connections, grace=args.grace)
    return HttpServer(app, patience, opened=opened, close=server.engine.close)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
