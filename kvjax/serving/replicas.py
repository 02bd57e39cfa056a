# SPDX-License-Identifier: Apache-2.0
"""`Replicas`: a model and a cache on each of several devices, or meshes of them; prompts are divided among them.

    prompts ──> a rule (`routing.py`), by what each cache has ──> a thread for each replica (`replica.py`)
                        ^                                                     │
                        └──────────────── events, on the caller's thread ─────┘

Source: the routers of vLLM, Dynamo and llm-d, which know caches by their events.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import warnings
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from kvjax._compile import own_transfers
from kvjax.cache import Cache
from kvjax.checks import check_on_host
from kvjax.events.listeners import Listeners
from kvjax.model import Model, check_model
from kvjax.serving.batch import checked_requests
from kvjax.serving.interrupt import CtrlC, GenerationInterrupted
from kvjax.serving.replica import Replica, check_devices, with_weights
from kvjax.serving.request import Request, RunOptions
from kvjax.serving.requests import Output
from kvjax.serving.routing import choose_replica, hashes_of, num_leading
from kvjax.spec import CacheSpec
from kvjax.state import EvictionPolicy
from kvjax.tiered import TieredCache

_POLL = 0.1  # seconds of waiting for a report until Ctrl-C acts


class Route(NamedTuple):
    """The replica that a prompt goes to, and how many of its tokens are cached there, in whole blocks."""

    replica: int
    tokens: int


class Replicas:
    """A cache on each of some devices, with the model's weights, and prompts that go where most of them is cached.

    Attributes:
      spec: of each cache.
      caches: of the replicas, a tuple; read them while nothing runs.
    """

    def __init__(
        self,
        model: Model,
        spec: CacheSpec,
        devices: Sequence[Any],
        *,
        heads: str | None = None,
        policy: EvictionPolicy | None = None,
        num_blocks: Any = None,
        load_price: float = 0.0,
    ):
        """Makes the caches, and copies the weights.

        Args:
          model: a pytree. On a mesh each weight keeps its `PartitionSpec`; one without is on all devices.
          spec: of each cache; with host blocks each one is a `TieredCache`.
          devices: of each replica: a device, or a mesh of devices that no other one has.
          heads: the axis of the meshes that divides the kv heads.
          policy: as of `Cache.create`.
          num_blocks: likewise.
          load_price: see `choose_replica`.

        Raises:
          ValueError: naming the argument, before a cache is made.
        """
        check_model(model)
        if not isinstance(spec, CacheSpec):
            raise ValueError(f"spec: got a {type(spec).__name__}, wanted a CacheSpec")
        check_devices(devices, heads)
        self.spec = spec
        self._load_price = load_price
        self._replicas = list[Replica]()
        create = (Cache, TieredCache)[spec.has_host].create
        for device in devices:
            where = {"mesh": device, "heads": heads} if isinstance(device, Mesh) else {}
            empty = functools.partial(create, spec, policy, num_blocks, **where)
            self._replicas.append(Replica(device, with_weights(model, device), empty))

    @property
    def caches(self) -> tuple[Any, ...]:
        """The caches of the replicas."""
        return tuple(replica.cache for replica in self._replicas)

    def route(self, requests: Sequence[Request]) -> list[Route]:
        """The replica that each request would go to, if all were given to `run_batch` now."""
        return self._route(requests, range(len(self._replicas)))

    def _route(self, requests: Sequence[Request], among: Sequence[int]) -> list[Route]:
        size = self.spec.block_size
        load = [0] * len(among)
        routes = list[Route]()
        planned = [set[int]() for _ in among]  # the blocks that earlier requests of these will have brought
        for request in requests:
            prompt = request.prompt
            hashes = hashes_of(prompt, request.namespace, self.spec)
            cached = [self._replicas[number].prefixes.whole_blocks(hashes, len(prompt)) for number in among]
            will = [max(now, num_leading(hashes, plan)) for now, plan in zip(cached, planned, strict=True)]
            at = choose_replica([blocks * size for blocks in will], load, len(prompt), load_price=self._load_price)
            load[at] += len(prompt) - will[at] * size
            planned[at].update(hashes)
            routes.append(Route(among[at], cached[at] * size))
        return routes

    @own_transfers()
    def run_batch(self, requests: Sequence[Request], options: RunOptions | None = None) -> list[Output]:
        """`kvjax.run_batch` of each replica's requests; the outputs in the requests' order, each with its `replica`.

        A replica that fails leaves the others alone: its requests go to them, once, with a RuntimeWarning.

        Args:
          requests: each a `Request`.
          options: as of `kvjax.run_batch`, but the listener is called as (replica, events), on this thread; an
            `Exception` that it raises costs nothing, see `kvjax.events.Listeners`. Events are not decoded. All replicas
            use one store.

        Raises:
          ValueError: as `kvjax.run_batch`, before anything is donated.
          GenerationInterrupted: from an error or Ctrl-C; its `cache` has the caches of all replicas.
        """
        options = RunOptions() if options is None else options
        check_on_host("Replicas", (), "inside one use kvjax.serving.serve under shard_map")
        options.check(self.spec)
        run = _Run(self._replicas, checked_requests(requests, options, self.spec), options)
        everyone = range(len(self._replicas))
        failed = run.round(self._chosen(run, everyone))
        if failed and run.cause is None and len(failed) < len(everyone):
            message = f"requests of replicas that failed go to others: {next(iter(failed.values()))}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            failed = run.round(self._chosen(run, [number for number in everyone if number not in failed]))
        outputs = [output for samples in run.outputs for output in samples]
        if failed or run.cause is not None:
            cause = run.cause or next(iter(failed.values()))
            raise GenerationInterrupted(f"replicas ended: {cause}", self.caches, outputs, []) from cause
        return outputs

    def _chosen(self, run: _Run, among: Sequence[int]) -> dict[int, list[int]]:
        """{replica: the numbers of its requests}, of all requests that are not over, among these replicas."""
        left = [n for n, samples in enumerate(run.outputs) if any(output.finish is None for output in samples)]
        chosen = dict[int, list[int]]()
        for number, route in zip(left, self._route([run.requests[n] for n in left], among), strict=True):
            chosen.setdefault(route.replica, []).append(number)
        return chosen


class _Stop(BaseException):
    """The end of a replica's run, because its caller is interrupted. An `Exception` of a listener would end nothing."""


class _Run:
    """Requests that run in several replicas at a time, a thread for each: none waits for another, nor fails with it.

    Attributes:
      requests: each with a seed.
      outputs: a list for each request, in the end those of its replica.
      cause: Ctrl-C, or an interrupt of the listener, that has ended all; or None.
    """

    def __init__(self, replicas: Sequence[Replica], requests: list[Request], options: RunOptions):
        self._replicas = replicas
        self.requests = requests
        self.cause = None
        self.outputs = list[list[Output]]()
        num_outputs = 0
        for number, request in enumerate(requests):
            if request.seed is None:
                requests[number] = dataclasses.replace(request, seed=num_outputs)
            self.outputs.append([Output(len(request.prompt)) for _ in range(request.samples)])
            num_outputs += request.samples
        self._reports = queue.Queue[Any]()  # (replica, events), or None: a replica's thread has ended
        # On this thread the caller's listener, and on a replica's own the function that sends its events here.
        own = () if options.listener is None else (options.listener,)
        self._listeners = [Listeners(*own, leading=(number,)) for number in range(len(replicas))]
        self._senders = [Listeners(self._send, leading=(number,)) for number in range(len(replicas))]
        self._options = dataclasses.replace(options, log_events=False)

    def round(self, chosen: dict[int, list[int]]) -> dict[int, GenerationInterrupted]:
        """Runs requests, {replica: their numbers}; returns the errors of the replicas that failed."""
        futures = dict[int, Future[list[Output]]]()
        num_running = len(chosen)
        with CtrlC() as ctrl_c, ThreadPoolExecutor(len(self._replicas), "kvjax-replica") as threads:
            for number, of_replica in chosen.items():
                options = dataclasses.replace(self._options, listener=self._senders[number])
                requests = [self.requests[n] for n in of_replica]
                futures[number] = threads.submit(self._replicas[number].run, requests, options)
                futures[number].add_done_callback(lambda _: self._reports.put(None))
            while True:
                try:
                    ctrl_c.act()  # between two reports, so that none is lost
                    if not num_running:
                        break
                    report = self._reports.get(timeout=_POLL)
                    if report is None:
                        num_running -= 1
                    else:
                        self._tell(*report)
                except queue.Empty:
                    pass
                except BaseException as error:  # Ctrl-C, or an interrupt of the listener
                    self.cause = self.cause or error
        failed = dict[int, GenerationInterrupted]()
        for number, future in futures.items():
            error = future.exception()
            if isinstance(error, GenerationInterrupted):
                failed[number] = error
                outputs = error.outputs
            else:
                outputs = future.result()  # raises the error of an argument: nothing was donated
            for output in outputs:
                output.replica = number
            rest = iter(outputs)
            for n in chosen[number]:
                self.outputs[n] = [next(rest) for _ in self.outputs[n]]
        self._recover(failed)
        return failed

    def _recover(self, failed: Container[int]) -> None:
        """Gives a cache to replicas that lost theirs, and a snapshot of it to a listener that has missed events."""
        for number, (replica, listeners) in enumerate(zip(self._replicas, self._listeners, strict=True)):
            if number in failed and replica.recover():
                listeners.lose()
            try:
                listeners.catch_up(replica.cache.state)
            except BaseException as error:  # an interrupt of the listener
                self.cause = self.cause or error

    def _tell(self, number: int, events: Any) -> None:
        self._replicas[number].prefixes.fold(events)
        self._listeners[number](events)
        if self._listeners[number].is_due:
            self._senders[number].lose()  # the replica's thread sends a snapshot

    def _send(self, number: int, events: Any) -> None:
        """Sends a replica's events to the caller's thread."""
        self._reports.put((number, jax.device_get(events)))  # a later call may take the arrays
        if self.cause is not None:
            raise _Stop
