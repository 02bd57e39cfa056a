# SPDX-License-Identifier: Apache-2.0
"""`Replicas`: a model and a cache on each of several devices, or meshes of them; prompts are divided among them.

    prompts ──> a rule (`routing.py`), by what each cache has ──> a thread for each replica (`replica_job.py`)
                        ^                                                     │
                        └──────────────── events, on the caller's thread ─────┘

Source: the routers of vLLM, Dynamo and llm-d, which know caches by their events.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax._compile import own_transfers
from kvjax.cache import Cache
from kvjax.checks import check_on_host
from kvjax.model import Model, check_model
from kvjax.serving.batch import checked_requests
from kvjax.serving.interrupt import GenerationInterrupted
from kvjax.serving.replica_devices import check_devices, on, where, with_weights
from kvjax.serving.replica_job import ReplicaJob
from kvjax.serving.request import Request, RunOptions
from kvjax.serving.requests import Output
from kvjax.serving.routing import CachedPrefixes, choose_replica, hashes_of, num_leading
from kvjax.spec import CacheSpec
from kvjax.state import EvictionPolicy
from kvjax.tiered import TieredCache


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
        create = (Cache, TieredCache)[spec.has_host].create
        self.spec, self._load_price, self._devices = spec, load_price, list(devices)

        def empty(number: int) -> Any:
            with on(devices[number]):
                return create(spec, policy, num_blocks, **where(devices[number], heads))

        self._empty, self._models = empty, [with_weights(model, one) for one in devices]
        self._caches = [empty(number) for number in range(len(devices))]
        self._prefixes = [CachedPrefixes(spec) for _ in devices]

    @property
    def caches(self) -> tuple[Any, ...]:
        """The caches of the replicas."""
        return tuple(self._caches)

    def route(self, requests: Sequence[Request]) -> list[Route]:
        """The replica that each request would go to, if all were given to `run_batch` now."""
        return self._route(requests, range(len(self._devices)))

    def _route(self, requests: Sequence[Request], among: Sequence[int]) -> list[Route]:
        size, load, routes = self.spec.block_size, [0] * len(among), list[Route]()
        planned = [set[bytes]() for _ in among]  # the blocks that earlier requests of these will have brought
        for request in requests:
            prompt = request.prompt
            hashes = hashes_of(prompt, request.namespace, self.spec)
            cached = [self._prefixes[number].whole_blocks(hashes, len(prompt)) for number in among]
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
        requests, spans, outputs = checked_requests(requests, options, self.spec), list[range](), list[Output]()
        for number, request in enumerate(requests):
            spans.append(range(len(outputs), len(outputs) + request.samples))
            if request.seed is None:
                requests[number] = dataclasses.replace(request, seed=len(outputs))
            outputs += [Output(len(request.prompt)) for _ in range(request.samples)]
        left, healthy = list(range(len(requests))), list(range(len(self._devices)))
        while left:
            routes = self._route([requests[n] for n in left], healthy)
            chosen = {r: [n for n, route in zip(left, routes, strict=True) if route.replica == r] for r in healthy}
            job = ReplicaJob(requests, spans, outputs, options, self._prefixes)
            of_replicas = {r: (self._devices[r], self._models[r], numbers) for r, numbers in chosen.items() if numbers}
            failed = job.run(of_replicas, self._caches)
            lost = [number for number in failed if self._recover(number)]
            job.catch_up([cache.state for cache in self._caches], lost)
            if job.cause is not None or (failed and (len(healthy) < len(self._devices) or len(failed) == len(healthy))):
                cause = job.cause or next(iter(failed.values()))
                raise GenerationInterrupted(f"replicas ended: {cause}", self.caches, outputs, []) from cause
            if failed:
                message = f"requests of replicas that failed go to others: {next(iter(failed.values()))}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            healthy = [r for r in healthy if r not in failed]
            left = [n for r in failed for n in chosen[r] if any(outputs[at].finish is None for at in spans[n])]
        return outputs

    def _recover(self, number: int) -> bool:
        """Goes on with the cache that a failure has left, or with an empty one; whether the cache was lost."""
        is_lost = self._caches[number] is None
        if is_lost:
            self._caches[number] = self._empty(number)
        self._prefixes[number].attach(self._caches[number].state)
        return is_lost
