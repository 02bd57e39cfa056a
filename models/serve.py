# SPDX-License-Identifier: Apache-2.0
"""Serve a checkpoint in Hugging Face format or a GGUF file with OpenAI's HTTP API, through the paged cache.

Completions, chats with the checkpoint's template, responses and models are under /v1. Prometheus reads /metrics, and a
page at /cache shows the cache. SIGTERM, SIGHUP and Ctrl-C end the server, after a few seconds for open answers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
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

from . import chat, cluster_options, commands, memory, serve_weights, session, stores, tenants, wires
from .checkpoint import GENERATION
from .commands import number
from .loading import load, open_checkpoint
from .openai_api import MAX_BIASES, ApiError, Limits, read_defaults
from .serve_schemas import Schemas, open_schemas
from .session import MAX_OPTION, SIZES
from .tool_calls import FORMATS, Parser, detect

DEFAULT_LENGTH = 4096  # tokens of a row without --max-length
note_prefix = ""  # of each line on standard error, such as the name of a replica
STOP_TOKENS = 8  # of a request and the model together, unless the model alone has more


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. See --help."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    commands.check_extra(parser, "serve")
    wires.check(parser, args)
    stores.check(parser, args)
    cluster_options.check(parser, args)
    if args.replicas is not None:
        # Imported late because it needs the extra, and by its name because it starts from this module's parts.
        cluster = importlib.import_module(".cluster", __package__)
        return cluster.run(parser, args)
    commands.enable_compilation_cache(not args.no_compile_cache)
    if args.until_eof:
        threading.Thread(target=end_with_input, daemon=True).start()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _Signals() as signals,
        _bound(parser, args) as listening,
        served(parser, args) as server,
    ):
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listening.getsockname()[1]}/v1"
        signals.server = http_server(args, server, lambda: _note(f"serving at {address}"))
        signals.server.run(sockets=[listening])


def make_parser() -> commands.Parser:
    """Makes the parser of the command line."""
    parser = commands.Parser("serve", __doc__)
    parser.add_argument("--checkpoint", metavar="PATH", required=True, help="Hugging Face folder, or GGUF file")
    parser.add_argument("--name", metavar="NAME", help="name of the model in requests (default: the folder's)")
    parser.add_argument(
        "--chat-template", metavar="FILE", type=pathlib.Path, help="template to use in place of the checkpoint's"
    )
    formats = "format of tool calls, if the chat template does not show it: %(choices)s"
    parser.add_argument("--tool-format", choices=tuple(FORMATS), help=formats)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=wires.PORT, default=8000, help="port to listen at; 0 chooses a free port (default: %(default)s)"
    )
    tenants.add_keys(parser)
    serve_weights.add_operator(parser)
    parser.add_argument(
        "--hide-cached-tokens", action="store_true", help="do not report how many tokens of a prompt were cached"
    )
    session.add_dtype(parser)
    session.add_sizes(
        parser, rows="(default: %(default)s)", length=f"the model's limit, at most {DEFAULT_LENGTH}", has_budget=True
    )
    parser.set_defaults(rows=SIZES["rows"])
    limits = (
        ("--top-logprobs", 0, 5, "limit on a request's top_logprobs"),
        ("--max-waiting", 1, 1024, "requests waiting for the scheduler; further requests get 429"),
        ("--max-open", 1, 256, "answers in progress; requests for more get 429"),
        ("--max-connections", 1, 512, "open connections; a further connection closes an idle one"),
        ("--timeout", 1, 600, "seconds until an answer is cancelled"),
        ("--schemas", 0, 8, "schemas, patterns and choices of answers at a time; 0 refuses them"),
        ("--grace", 0, 5, "seconds for open answers when the server ends"),
    )
    for option, least, default, text in limits:
        parser.add_argument(
            option,
            type=number(int, least, MAX_OPTION),
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--max-body", metavar="SIZE", type=commands.size, default=4 << 20, help="size of a request, such as 1MB (4MiB)"
    )
    bodies = "size of all requests that are being read (64MiB); further requests get 429"
    parser.add_argument("--max-bodies", metavar="SIZE", type=commands.size, default=64 << 20, help=bodies)
    hosts = "accept only requests with these Host names (default at a loopback address: its names; else any)"
    parser.add_argument("--allowed-hosts", metavar="HOST", nargs="+", help=hosts)
    origins = "origins whose pages may call the server, such as https://chat.example; * for all (none)"
    parser.add_argument("--allowed-origins", metavar="ORIGIN", nargs="+", type=_origin, default=[], help=origins)
    generation = "auto takes the defaults of requests from generation_config.json (default: %(default)s)"
    parser.add_argument("--generation-config", choices=("auto", "none"), default="auto", help=generation)
    session.add_mesh(parser)
    session.add_speculation(parser)
    commands.add_scan(parser)
    commands.add_compile_cache(parser)
    stores.add_store(parser)
    parser.add_argument(
        "--store-sync",
        action="store_true",
        help="write the whole blocks of a prompt to the store before its answer ends",
    )
    parser.add_argument("--save", metavar="DIR", help="folder to load the cache from, and to save it to at the end")
    wires.add_publishers(parser)
    cluster_options.add_options(parser)
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="end when standard input ends, such as with the program that started it",
    )
    return parser


def _origin(text: str) -> str:
    """Reads an origin as browsers send it, or *."""
    if text != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r:.80}, wanted * or an origin such as https://chat.example")
    return text


class Server(NamedTuple):
    """The application of a server and its engine.

    Attributes:
      feeds: the wires by their options' names.
      load_weights: loads a checkpoint's model like the server's, for `Engine.update`.
    """

    app: Any
    engine: Engine[Any]
    feeds: dict[str, Any]
    load_weights: Callable[[pathlib.Path], Any]


@contextlib.contextmanager
def served(parser: commands.Parser, args: argparse.Namespace) -> Iterator[Server]:
    """Makes the application for a checkpoint. The end of the `with` closes its engine, its store and its wires."""
    import prometheus_client  # late, like the imports below: they need the extra

    from kvjax.interop.metrics import Metrics

    from .serve_app import make_app
    from .serve_job import Served
    from .serve_pages import Pages

    where = session.make_mesh(parser, args)
    model, tokenizer = session.load_model(parser, args, **where)
    template = open_template(parser, args)
    keys = tenants.keys_of(parser, args)
    operator_keys = serve_weights.operator_keys(parser, args)
    spec = _spec(parser, args, model, where)
    registry = prometheus_client.CollectorRegistry()
    names = kvjax.Namespaces()
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
        tool_format = tool_format_of(args, template)
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
        served_model = Served(
            name=args.name or commands.model_name(args),
            tokenizer=tokenizer,
            longest_token=max(map(len, tokenizer.get_vocab())) if tokenizer else 0,
            template=template,
            stop_tokens=stop_tokens,
            limits=Limits(
                max_length=min(spec.max_length, session.most_tokens(args, model)),
                samples=min(args.rows, 16),
                top_logprobs=args.top_logprobs,
            ),
            defaults=_defaults(parser, args),
            keys=keys,
            max_body=args.max_body,
            max_bodies=args.max_bodies,
            max_open=args.max_open,
            timeout=args.timeout,
            shows_cached=not args.hide_cached_tokens,
            # The engine starts writing after a turn, and returns its state between two turns.
            before_end=(lambda: (engine.state, store.flush())) if store and args.store_sync else None,
            schemas=schemas,
            tool_format=tool_format,
        )
        pages = Pages(served_model.name, registry, served_model.decode_all, metrics.set, wire.set)
        pages.engine = engine

        def load_weights(folder: pathlib.Path) -> Any:
            return load(folder, dtype=args.dtype, scan=args.scan, **where)[0]

        operator = None
        if operator_keys:
            operator = serve_weights.Operator(engine, args.weights, load_weights), operator_keys
        app = make_app(engine, served_model, pages, sets_state=args.agent is not None, operator=operator)
        yield Server(app, engine, wire.feeds, load_weights)


def open_template(parser: commands.Parser, args: argparse.Namespace) -> chat.Template | None:
    """Loads the chat template. None means the checkpoint has none.

    If the checkpoint's template has a fault, chats are refused. If --chat-template has a fault, the command ends.
    """
    try:
        template = chat.load_template(args.checkpoint, args.chat_template)
    except (OSError, ValueError) as error:
        template = chat.Template("", {}, fault=commands.reason(error))
    if template is not None and template.fault is not None:
        if args.chat_template is not None:
            parser.error(f"--chat-template: {template.fault}")
        _note(f"chats are refused: {template.fault}")
    return template


def tool_format_of(args: argparse.Namespace, template: chat.Template | None) -> type[Parser] | None:
    """Returns the format of tool calls, by the option or from the text of the template. None if neither shows it."""
    name = args.tool_format or (None if template is None else detect(template.tools_text))
    return None if name is None else FORMATS[name]


def _defaults(parser: commands.Parser, args: argparse.Namespace) -> dict[str, Any]:
    """Reads the default fields of requests from the checkpoint's generation_config.json."""
    checkpoint = open_checkpoint(args.checkpoint)
    defaults = dict[str, Any]()
    if args.generation_config == "auto":
        try:
            defaults = read_defaults(checkpoint.fields(GENERATION))
        except ApiError as error:
            parser.error(f"--generation-config: {checkpoint.file_of(GENERATION)}: {error}")
    listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    _note(f"defaults of requests: {listed} ({GENERATION})" if listed else "defaults of requests: the API's")
    return defaults


def _spec(parser: commands.Parser, args: argparse.Namespace, model: Any, where: dict[str, Any]) -> kvjax.CacheSpec:
    """Makes the cache's spec. Sets the length of a row if no option does, and the number of blocks for a budget."""
    positions = session.most_positions(args, model)
    spec = None
    if args.budget is not None:
        spec = memory.fitting(parser, args, model, min(args.max_length or DEFAULT_LENGTH, positions), where)
    session.set_length(parser, args, model, DEFAULT_LENGTH)
    spec = spec or session.make_spec(parser, args, model)
    if spec.max_length > args.max_length:  # the budget has no space for such a long row
        spec = memory.fitting(parser, args, model, args.max_length, where)
    session.check_memory(parser, args, model, spec)
    return spec


def _engine(
    parser: commands.Parser,
    args: argparse.Namespace,
    model: Any,
    cache: Any,
    listener: Any,
    names: kvjax.Namespaces,
    store: Any,
    schemas: Schemas | str,
) -> Engine[Any]:
    """Makes the engine, and compiles all its programs."""
    _note("compiling")
    penalties = Penalties.of(args.max_length, repetition=1.0, max_biases=MAX_BIASES)
    has_schemas = not isinstance(schemas, str)
    try:
        options = RunOptions(
            scheduler=Scheduler(reserve="num_tokens", chunk=args.chunk),
            top_logprobs=args.top_logprobs,
            store=store,
            names=names,
            listener=listener,
            logits_fn=schemas.logits_fn if has_schemas else penalize,
            drafter=session.make_drafter(args),
        )
        engine = Engine(
            model,
            cache,
            options,
            max_waiting=args.max_waiting,
            # The ends of a turn and of a call are added to the ends of a text.
            num_stop_tokens=max(STOP_TOKENS, len(model.config.eos_token_ids) + 2),
            min_p=True,
            logits_state=(penalties, schemas.state(None)) if has_schemas else penalties,
        )
    except ValueError as error:
        parser.error(str(error))
    if has_schemas:
        schemas.engine = engine
    return engine


def _bound(parser: commands.Parser, args: argparse.Namespace) -> socket.socket:
    """Binds a socket to the address of the options. Until the socket listens, connections are refused."""
    bound = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((args.host, args.port))
    except OSError as error:
        bound.close()
        parser.error(f"--port: {commands.reason(error, f'{args.host}:{args.port}')}")
    return bound


class _Signals:
    """Handles SIGTERM, SIGHUP and Ctrl-C while the command runs. A second Ctrl-C interrupts the shutdown."""

    server: Any = None  # ends by itself after a signal; None until there is a server

    def __enter__(self) -> _Signals:
        self._before = {kind: signal.signal(kind, self._end) for kind in (signal.SIGINT, signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._end)
        return self

    def __exit__(self, *_: Any) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _end(self, kind: int, frame: Any) -> None:
        if self.server is None or (self.server.has_ended and kind == signal.SIGINT):
            raise KeyboardInterrupt
        self.server.handle_exit(kind, frame)


def end_with_input() -> None:
    """Waits for the end of standard input, and then sends SIGTERM to this process."""
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def http_server(args: argparse.Namespace, server: Server, opened: Callable[[], Any]) -> Any:
    """Makes an `HttpServer` with the limits of the options, which calls `opened` when it accepts connections."""
    from .serve_http import HttpServer, Patience

    patience = Patience(connections=args.max_connections, grace=args.grace)
    return HttpServer(guarded_app(args, server.app), patience, opened=opened, close=server.engine.close)


def guarded_app(args: argparse.Namespace, app: Any) -> Any:
    """Wraps an application: its responses have ids, and it answers only the hosts and origins of the options."""
    from .serve_http import only_hosts, only_origins, with_request_ids

    hosts = args.allowed_hosts
    if hosts is None and _is_loopback(args.host):
        hosts = ["localhost", "127.0.0.1", "::1", args.host]
    app = app if hosts is None else only_hosts(app, hosts)
    return with_request_ids(only_origins(app, args.allowed_origins))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _note(text: str) -> None:
    print(f"{note_prefix}{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
