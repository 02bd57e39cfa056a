# SPDX-License-Identifier: Apache-2.0
"""`Replicas` divides prompts among several devices or meshes, each with a copy of the model and its own cache.

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

_POLL = 0.1  # seconds of waiting for a report before Ctrl-C acts


class Route(NamedTuple):
    """The replica for a prompt, and the number of its tokens cached there, in whole blocks."""

    replica: int
    tokens: int


class Replicas:
    """A cache on each device, with the model's weights. Prompts go where most of their tokens are cached.

    Attributes:
      spec: spec of each cache.
      caches: a tuple with the replicas' caches; read them only while nothing runs.
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
          model: a pytree. On a mesh each weight keeps its `PartitionSpec`; a weight without a `PartitionSpec` is on all
            devices.
          spec: spec of each cache; with host blocks each cache is a `TieredCache`.
          devices: a device for each replica, or a mesh of devices used by no other replica.
          heads: axis of the meshes, to divide the kv heads.
          policy: see `Cache.create`.
          num_blocks: see `Cache.create`.
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
        """Predicts the replica for each request, if you passed all of them to `run_batch` now."""
        return self._route(requests, range(len(self._replicas)))

    def _route(self, requests: Sequence[Request], replicas: Sequence[int]) -> list[Route]:
        """Routes requests to some replicas. Later requests find the blocks of earlier requests."""
        block_size = self.spec.block_size
        load = [0] * len(replicas)
        planned = [set[int]() for _ in replicas]
        routes = list[Route]()
        for request in requests:
            prompt = request.prompt
            hashes = hashes_of(prompt, request.namespace, self.spec)
            cached = [self._replicas[replica].prefixes.whole_blocks(hashes, len(prompt)) for replica in replicas]
            expected = [
                max(now, num_leading(hashes, plan)) * block_size for now, plan in zip(cached, planned, strict=True)
            ]
            choice = choose_replica(expected, load, len(prompt), load_price=self._load_price)
            load[choice] += len(prompt) - expected[choice]
            planned[choice].update(hashes)
            routes.append(Route(replicas[choice], cached[choice] * block_size))
        return routes

    @own_transfers()
    def run_batch(self, requests: Sequence[Request], options: RunOptions | None = None) -> list[Output]:
        """Runs `kvjax.run_batch` on each replica for its requests. Returns the outputs in the requests' order.

        Each output has its `replica`. If a replica fails, its requests go to the others once, with a RuntimeWarning.

        Args:
          requests: `Request` objects.
          options: see `kvjax.run_batch`, except that the listener is called as (replica, events), on this thread. If it
            raises an `Exception`, nothing is lost, see `kvjax.events.Listeners`. Events are not decoded. All replicas
            use the same store.

        Raises:
          ValueError: as `kvjax.run_batch`, before anything is donated.
          GenerationInterrupted: after an error or Ctrl-C; its `cache` has the caches of all replicas.
        """
        options = RunOptions() if options is None else options
        check_on_host("Replicas", (), "inside one use kvjax.serving.serve under shard_map")
        options.check(self.spec)
        run = _Run(self._replicas, checked_requests(requests, options, self.spec), options)
        all_replicas = range(len(self._replicas))
        failed = run.round(self._chosen(run, all_replicas))
        if failed and run.cause is None and len(failed) < len(all_replicas):
            message = f"requests of replicas that failed go to others: {next(iter(failed.values()))}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            failed = run.round(self._chosen(run, [replica for replica in all_replicas if replica not in failed]))
        outputs = [output for samples in run.outputs for output in samples]
        if failed or run.cause is not None:
            cause = run.cause or next(iter(failed.values()))
            raise GenerationInterrupted(f"replicas ended: {cause}", self.caches, outputs, []) from cause
        return outputs

    def _chosen(self, run: _Run, replicas: Sequence[int]) -> dict[int, list[int]]:
        """Divides unfinished requests among replicas: {replica: positions of its requests}."""
        positions = [
            position for position, samples in enumerate(run.outputs) if any(output.finish is None for output in samples)
        ]
        routes = self._route([run.requests[position] for position in positions], replicas)
        chosen = dict[int, list[int]]()
        for position, route in zip(positions, routes, strict=True):
            chosen.setdefault(route.replica, []).append(position)
        return chosen


class _Stop(BaseException):
    """Ends a replica's run because its caller is interrupted. An `Exception` raised by a listener would not end it."""


class _Run:
    """Requests that run in several replicas, each in a thread. No replica waits for another, or fails with it.

    Attributes:
      requests: requests with seeds.
      outputs: a list for each request, at the end with the outputs of its replica.
      cause: Ctrl-C, or an interrupt of the listener, which has ended the run; or None.
    """

    def __init__(self, replicas: Sequence[Replica], requests: list[Request], options: RunOptions):
        self._replicas = replicas
        self.requests = requests
        self.cause = None
        self.outputs = list[list[Output]]()
        num_outputs = 0
        for position, request in enumerate(requests):
            if request.seed is None:
                requests[position] = dataclasses.replace(request, seed=num_outputs)
            self.outputs.append([Output(len(request.prompt)) for _ in range(request.samples)])
            num_outputs += request.samples
        self._reports = queue.Queue[Any]()  # (replica, events), or None: a replica's thread has ended
        # The caller's listener is called on this thread, and senders send events here from the replicas' threads.
        listeners = () if options.listener is None else (options.listener,)
        self._listeners = [Listeners(*listeners, leading=(replica,)) for replica in range(len(replicas))]
        self._senders = [Listeners(self._send, leading=(replica,)) for replica in range(len(replicas))]
        self._options = dataclasses.replace(options, log_events=False)

    def round(self, chosen: dict[int, list[int]]) -> dict[int, GenerationInterrupted]:
        """Runs requests, {replica: their positions}. Returns the errors of failed replicas."""
        futures = dict[int, Future[list[Output]]]()
        num_running = len(chosen)
        with CtrlC() as ctrl_c, ThreadPoolExecutor(len(self._replicas), "kvjax-replica") as threads:
            for replica, positions in chosen.items():
                options = dataclasses.replace(self._options, listener=self._senders[replica])
                requests = [self.requests[position] for position in positions]
                futures[replica] = threads.submit(self._replicas[replica].run, requests, options)
                futures[replica].add_done_callback(lambda _: self._reports.put(None))
            while True:
                try:
                    ctrl_c.act()  # between two reports, so none is lost
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
        for replica, future in futures.items():
            error = future.exception()
            if isinstance(error, GenerationInterrupted):
                failed[replica] = error
                outputs = error.outputs
            else:
                outputs = future.result()  # raises an argument's error, before anything was donated
            for output in outputs:
                output.replica = replica
            remaining = iter(outputs)
            for position in chosen[replica]:
                self.outputs[position] = [next(remaining) for _ in self.outputs[position]]
        self._recover(failed)
        return failed

    def _recover(self, failed: Container[int]) -> None:
        """Gives caches to replicas without a cache, and a snapshot to each listener with missed events."""
        for index, (replica, listeners) in enumerate(zip(self._replicas, self._listeners, strict=True)):
            if index in failed and replica.recover():
                listeners.lose()
            try:
                listeners.catch_up(replica.cache.state)
            except BaseException as error:  # an interrupt of the listener
                self.cause = self.cause or error

    def _tell(self, replica: int, events: Any) -> None:
        self._replicas[replica].prefixes.fold(events)
        self._listeners[replica](events)
        if self._listeners[replica].is_due:
            self._senders[replica].lose()  # the replica's thread sends a snapshot

    def _send(self, replica: int, events: Any) -> None:
        """Sends a replica's events to the caller's thread."""
        self._reports.put((replica, jax.device_get(events)))  # a later call may take the arrays
        if self.cause is not None:
            raise _Stop
