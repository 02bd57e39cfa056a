# SPDX-License-Identifier: Apache-2.0
"""Replicas of the server on Ray Serve, on one or several machines. Each prompt goes where most of it is cached.

    client ── Ray's proxy ── front: the tokens of a body ── Chooser ── replica: the application and its engine
                                                               ^ mirrors of the caches, by encrypted events ──┘

`python -m models.serve --replicas N` runs `run`. A config of Ray Serve has `models.cluster:application`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import zmq

from kvjax.interop.vllm import Curve

from . import cluster_front, cluster_options, commands, serve, stores, tenants, wires
from .cluster_asgi import Busy, Messages, NoReplica, ReplicaEnded, call_app, fetch
from .cluster_front import Page, Prompt
from .cluster_weights import Updates
from .prefix_router import Place, Router
from .serve_http import WRITE_SECONDS, with_request_ids
from .serve_pages import PATIENCE

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve as ray_serve  # pyright: ignore[reportMissingImports]
    from ray.exceptions import RayActorError, RayError  # pyright: ignore[reportMissingImports]
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig  # pyright: ignore[reportMissingImports]
    from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
        BackPressureError,
        DeploymentUnavailableError,
        RayServeException,
    )
    from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[cluster]"') from error

NAME = "kvjax"  # of the application
SAVE_SECONDS = 120.0  # for a replica to save its cache
HEALTH_SECONDS = 10.0  # between two checks of a replica
FETCH_SECONDS = 10.0  # for a replica to make a page
STATS_SECONDS = 1.0  # between two questions for the name of a replica's weights
# Of a Ray of this machine, unless they are set: a busy machine has time to start a proxy, and processes have the
# priority of a server without replicas (Ray's default is the niceness 15).
VARIABLES = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"}
_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
_NUM_PAGES = 64  # pages that a replica makes at a time, besides its answers


class StartError(ValueError):
    """A replica or a front cannot start. The message is a single line."""


class Replica:
    """A server's application and its engine, in a process of Ray's."""

    def __init__(self, args: argparse.Namespace):
        """Starts the engine of a command line. What is saved is in a folder for each rank.

        Raises:
          StartError: if the server refuses an option.
        """
        context = ray_serve.get_replica_context()
        self.name = context.replica_id.unique_id
        _name_notes(self.name)
        args = copy.copy(args)
        host = ray.util.get_node_ip_address()
        args.publish = args.replay = f"tcp://{f'[{host}]' if ':' in host else host}:*"
        args.curve = True
        self._public_key, secret_key = zmq.curve_keypair()
        os.environ[wires.CURVE_KEY] = secret_key.decode()  # for this process alone
        self._ends = False
        self._save = args.save
        self._args = args
        self._set_rank(context.rank)
        self._stack = contextlib.ExitStack()
        with _start_errors():
            commands.enable_compilation_cache(not args.no_compile_cache)
            self._server = self._stack.enter_context(serve.served(_raising_parser(), args))
        self._app = with_request_ids(self._server.app)  # the ids of the front
        self._updates = Updates(self._server, args.checkpoint)

    def _set_rank(self, rank: Any) -> None:
        if self._save is not None:
            self._args.save = os.path.join(self._save, str(rank.rank))

    async def reconfigure(self, user_config: Any, rank: Any) -> None:
        """Updates the weights in place, see `cluster_weights`. Ray calls it after the start too, and for a new rank.

        Raises:
          ValueError: if the weights cannot be used. The engine goes on with its weights, until Ray ends the replica.
        """
        self._set_rank(rank)
        if await asyncio.to_thread(self._updates.update, user_config):
            print(f"{self.name}: the weights are those of {self._updates.folder}", file=sys.stderr, flush=True)

    def record_routing_stats(self) -> dict[str, Any]:
        """Tells routers the name of the weights in the salts of events. Ray asks for it every `STATS_SECONDS`."""
        return {"weights": self._updates.name}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Tells routers where the replica publishes, and its public key."""
        feed = self._server.feeds["publish"]
        return {"events": [feed.endpoint, feed.replay_endpoint, self._public_key.decode()]}

    async def check_health(self) -> None:
        """Raises an error if the engine does not answer. Ray then ends the process, and starts another one."""
        if self._ends:
            return
        reading = asyncio.get_running_loop().run_in_executor(None, lambda: self._server.engine.state)
        await asyncio.wait_for(reading, PATIENCE)

    async def call(self, scope: dict[str, Any], body: bytes, **_: Any) -> AsyncGenerator[list[Any]]:
        """Puts a request to the application. Ray cancels the call when the client has left."""
        async with contextlib.aclosing(call_app(self._app, scope, body)) as lists:
            async for messages in lists:
                yield messages

    async def page(self, path: str, headers: list[tuple[bytes, bytes]]) -> Page:
        """Makes a page."""
        status, _, body = await fetch(self._app, path, headers)
        return Page(self.name, status, body)

    async def end(self) -> None:
        """Ends open answers after the grace period, and then the engine."""
        self._ends = True
        engine = self._server.engine
        with contextlib.suppress(Exception):
            await asyncio.to_thread(engine.drain, self._args.grace)
        await asyncio.to_thread(engine.close)

    async def __del__(self) -> None:
        """Saves the cache, and closes the wires. Ray awaits it once the replica has no request."""
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._stack.close)


class Chooser(RequestRouter):
    """Chooses the replica of a request by `Router`. Ray makes one for each process that calls replicas."""

    num_running: ClassVar[int | None] = None  # replicas that run, for this process; None until Ray has told

    def initialize_state(self) -> None:
        """Begins without mirrors."""
        self._router = Router()

    def update_replicas(self, replicas: list[Any]) -> None:
        """Follows the caches of new replicas, and forgets others."""
        super().update_replicas(replicas)
        self._follow()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Forgets the replica."""
        super().on_replica_actor_died(replica_id)
        self._follow()

    def _follow(self) -> None:
        running = {replica_id.unique_id: replica for replica_id, replica in self.curr_replicas.items()}
        Chooser.num_running = len(running)
        for name in self._router.mirrors.keys() - running.keys():
            self._router.remove(name)
        for name in running.keys() - self._router.mirrors.keys():
            endpoint, replay_endpoint, public_key = running[name].replica_metadata["events"]
            self._router.add(name, endpoint, replay_endpoint, Curve(*zmq.curve_keypair(), public_key.encode()))
        self._router.weights = {name: replica.routing_stats.get("weights") for name, replica in running.items()}

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any | None = None
    ) -> list[list[Any]]:
        """Returns the replicas, the best one first. Ray takes the next one if a replica is full."""
        prompt = None if pending_request is None else pending_request.kwargs.get("prompt")
        if pending_request is None or prompt is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise a full fleet is asked without a pause
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        places = self._router.rank(prompt.tokens, prompt.salt, names=list(replicas))
        self._begin(pending_request, places[0])
        request_id = pending_request.metadata.internal_request_id
        pending_request.future.add_done_callback(
            lambda future: self._router.drop(request_id) if future.cancelled() else None
        )
        return [[replicas[place.name]] for place in places]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Counts the request where it is, which is another place if the best replica was full."""
        prompt = pending_request.kwargs.get("prompt")
        name = replica_id.unique_id
        if prompt is not None and self._router.place_of(pending_request.metadata.internal_request_id) != name:
            self._begin(pending_request, self._router.rank(prompt.tokens, prompt.salt, names=[name])[0])

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Counts the request as computed."""
        self._router.end(internal_request_id)

    def _begin(self, pending_request: Any, place: Place) -> None:
        prompt = pending_request.kwargs["prompt"]
        request_id = pending_request.metadata.internal_request_id
        self._router.begin(request_id, place, prompt.tokens, prompt.salt, num_new=prompt.num_new)


class RayReplicas(cluster_front.Replicas):
    """The replicas of a deployment."""

    def __init__(self, handle: Any):
        self._handle = handle
        self._call = handle.options(method_name="call", stream=True)

    async def call(self, scope: Any, body: bytes, prompt: Prompt) -> Messages:
        """Calls the best replica for a prompt."""
        if Chooser.num_running == 0:
            raise NoReplica("no replica runs")
        response = self._call.remote(scope, body, prompt=prompt)
        try:
            async for messages in response:
                yield messages
        except RayActorError as error:
            raise ReplicaEnded("the replica has ended") from error
        except BackPressureError as error:
            raise Busy(error.message) from error
        except DeploymentUnavailableError as error:
            raise NoReplica(error.message) from error
        except (asyncio.CancelledError, GeneratorExit):
            with contextlib.suppress(Exception):  # the call may have failed meanwhile
                response.cancel()
            raise

    async def fetch_all(self, path: str, headers: list[tuple[bytes, bytes]]) -> list[Page]:
        """Gets a page of each replica."""
        if Chooser.num_running == 0:
            raise NoReplica("no replica runs")
        response = self._handle.broadcast("page", path, headers)
        try:
            pages = await response.results_async(timeout_s=FETCH_SECONDS, return_exceptions=True)
        except DeploymentUnavailableError as error:
            raise NoReplica(error.message) from error
        return [page for page in pages if isinstance(page, Page)]


class Front:
    """The application in front of the replicas, in a process of Ray's."""

    def __init__(self, replicas: Any, args: argparse.Namespace):
        _name_notes("front")
        with _start_errors():
            self._app = cluster_front.make_app(_raising_parser(), args, RayReplicas(replicas))

    def __serve_build_asgi_app__(self) -> Any:
        """Gives Ray the application."""
        return self._app


def application(options: Mapping[str, Any]) -> Any:
    """Makes the application of Ray Serve, for a config file or `serve.run`.

    Args:
      options: {an option of `models.serve`: its value}, with or without the two dashes. True stands for an option
        without a value, and a list for several values.

    Raises:
      ValueError: if an option is wrong.

    Example:
      >>> from ray import serve  # doctest: +SKIP
      >>> serve.run(application({"checkpoint": "DIR", "replicas": 2, "max-length": 8192}))  # doctest: +SKIP
    """
    arguments = list[str]()
    for name, value in options.items():
        if value is None or value is False:
            continue
        option = f"--{name.removeprefix('--').replace('_', '-')}"
        values = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if value is True:
            arguments.append(option)
        elif option == "--api-key":  # given several times
            arguments += [f"{option}={one}" for one in values]
        else:
            arguments += [option, *values]
    parser = _raising_parser()
    args = parser.parse_args(arguments)
    args.replicas = args.replicas or 1
    check(parser, args)
    return _application(args)


def check(parser: commands.Parser, args: argparse.Namespace) -> None:
    """Checks the options before anything starts, and makes paths and keys independent of this process."""
    wires.check(parser, args)
    stores.check(parser, args)
    cluster_options.check(parser, args)
    if not os.path.exists(args.checkpoint):
        parser.error(f"--checkpoint: {args.checkpoint}: no such folder")
    if not zmq.has("curve"):
        parser.error("--replicas: the libzmq of pyzmq has no CURVE, which encrypts events")
    args.api_key = tenants.read_keys(parser, args)
    args.api_keys = None
    for option in ("checkpoint", "save", "store"):
        path = getattr(args, option)
        if path is not None and "://" not in path:
            setattr(args, option, os.path.abspath(path))
    if args.chat_template is not None:
        args.chat_template = args.chat_template.absolute()


def _application(args: argparse.Namespace) -> Any:
    most = args.max_replicas or args.replicas
    number: dict[str, Any] = {"num_replicas": args.replicas}
    if most > args.replicas:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=args.replicas, max_replicas=most, target_ongoing_requests=args.rows
            )
        }
    # An answer takes at most --timeout, and a replica which ends waits for its answers.
    answer_seconds = args.timeout + WRITE_SECONDS
    replicas = ray_serve.deployment(
        name="replica",
        logging_config=_LOGGING,
        max_ongoing_requests=args.max_open,
        max_queued_requests=args.max_waiting,
        graceful_shutdown_timeout_s=answer_seconds + SAVE_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=PATIENCE + HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{__name__}.Chooser", request_routing_stats_period_s=STATS_SECONDS
        ),
        ray_actor_options={"num_gpus": args.gpus},
        **number,
    )(Replica)
    front = ray_serve.deployment(
        name="front",
        logging_config=_LOGGING,
        max_ongoing_requests=args.max_open * most + args.max_waiting + _NUM_PAGES,
        graceful_shutdown_timeout_s=answer_seconds,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
    )(ray_serve.ingress()(Front))
    return front.bind(replicas.bind(args), args)


def run(parser: commands.Parser, args: argparse.Namespace) -> None:
    """Serves until a signal, or until standard input ends with `--until-eof`."""
    check(parser, args)
    where: dict[str, Any] = {"address": args.address}
    if args.address is None:
        # A replica counts as a CPU for Ray, and a small machine may have more of them than CPUs.
        num_cpus = max(os.cpu_count() or 1, (args.max_replicas or args.replicas) + 1)
        where = {"address": "local", "include_dashboard": False, "num_cpus": num_cpus}
        os.environ.update(VARIABLES | os.environ)
    try:
        ray.init(**where, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError) as error:
        parser.error(f"--address: {str(error).splitlines()[0]}")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    is_ending = threading.Event()

    def interrupt(*_: Any) -> NoReturn:
        is_ending.set()
        raise KeyboardInterrupt

    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, interrupt)
    if args.until_eof:
        threading.Thread(target=serve.end_with_input, daemon=True).start()
    try:
        with _one_line(parser):
            http_options = {"host": args.host, "port": args.port}
            ray_serve.start(http_options=http_options, proxy_location="EveryNode", logging_config=_LOGGING)
            ray_serve.run(_application(args), name=NAME, route_prefix="/")
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"serving at http://{host}:{args.port}/v1", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while not is_ending.wait(1.0):  # a signal that reaches another thread of Ray's wakes nobody
                pass
        _end()
    except KeyboardInterrupt:
        pass  # before it served, or a second time
    finally:
        if args.address is not None:
            _leave()
        ray.shutdown()


def _end() -> None:
    """Ends open answers, then the application, and last Ray's proxies, which carry the answers."""
    handle = ray_serve.get_deployment_handle("replica", NAME)
    with contextlib.suppress(DeploymentUnavailableError):
        handle.broadcast("end").results(return_exceptions=True)
    ray_serve.delete(NAME, _blocking=False)
    deadline = time.monotonic() + SAVE_SECONDS + WRITE_SECONDS
    while NAME in ray_serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.1)


def _leave() -> None:
    """Ends the application on a cluster of others, and Serve if it has no other one."""
    with contextlib.suppress(RayError, RayServeException):  # Serve may not have started
        ray_serve.delete(NAME, _blocking=False)
        if not ray_serve.status().applications.keys() - {NAME}:
            ray_serve.shutdown()


@contextlib.contextmanager
def _one_line(parser: commands.Parser) -> Iterator[None]:
    """Ends the command with the line of a `StartError`, which Ray has in the state of a deployment."""
    try:
        yield
    except (RuntimeError, RayError) as error:
        made = ray_serve.status().applications.get(NAME)
        texts = [str(error), *(one.message for one in (made.deployments.values() if made else ()))]
        lines = [line for text in texts for line in re.findall(rf"{StartError.__name__}: (.*)", text)]
        parser.error(lines[-1] if lines else f"the replicas do not start: {texts[-1].strip().splitlines()[-1]}")


def _raising_parser() -> Any:
    """Makes the parser of the server. Its errors are a `StartError`."""
    parser: Any = serve.make_parser()
    parser.error = _raise
    return parser


def _raise(message: str) -> NoReturn:
    raise StartError(" ".join(message.removeprefix("argument ").split()))


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Turns the end of the process into a `StartError`. Ray would show only that the process has ended."""
    try:
        yield
    except SystemExit as error:
        raise StartError(str(error)) from error


def _name_notes(name: str) -> None:
    """Puts a name before each line that the server prints or logs in this process."""
    serve.note_prefix = f"{name}: "
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
    logging.getLogger("kvjax").handlers = [handler]
