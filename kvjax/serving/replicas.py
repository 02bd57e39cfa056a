# SPDX-License-Identifier: Apache-2.0
"""`Replicas`: a model and a cache on each of several devices, or meshes of them; prompts are divided among them.

    prompts ──> a rule (`routing.py`), by what each cache has ──> a thread for each replica (`replica_job.py`)
                        ^                                                     │
                        └──────────────── events, on the caller's thread ─────┘

Source: the routers of vLLM, Dynamo and llm-d, which know caches by their events.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax._compile import own_transfers
from kvjax.cache import Cache
from kvjax.checks import check_functions, check_on_host
from kvjax.model import Model
from kvjax.serving.generation import generate, run_batch
from kvjax.serving.inputs import check_prompts, of_each, positive, seeds_of
from kvjax.serving.interrupt import GenerationInterrupted
from kvjax.serving.replica_devices import check_devices, on, where, with_weights
from kvjax.serving.replica_job import ReplicaJob, check_lengths
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

    def route(self, prompts: Sequence[Sequence[int]], namespaces: Sequence[int] | None = None) -> list[Route]:
        """The replica that each prompt would go to, if all were given to `run_batch` now."""
        checked = check_prompts(prompts)
        return self._route(checked, _namespaces(namespaces, len(checked)), range(len(self._devices)))

    def _route(self, prompts: Sequence[np.ndarray], namespaces: Sequence[int], among: Sequence[int]) -> list[Route]:
        size, load, found = self.spec.block_size, [0] * len(among), list[Route]()
        planned = [set[bytes]() for _ in among]  # what earlier prompts of these will have brought
        for prompt, namespace in zip(prompts, namespaces, strict=True):
            hashes = hashes_of(prompt, namespace, self.spec)
            has = [self._prefixes[number].whole_blocks(hashes, len(prompt)) for number in among]
            will = [max(now, num_leading(hashes, plan)) for now, plan in zip(has, planned, strict=True)]
            at = choose_replica([blocks * size for blocks in will], load, len(prompt), load_price=self._load_price)
            load[at] += len(prompt) - will[at] * size
            planned[at].update(hashes)
            found.append(Route(among[at], has[at] * size))
        return found

    def run_batch(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Output]:
        """`kvjax.run_batch` of each replica's prompts; the outputs in the prompts' order, each with its `replica`.

        A replica that fails leaves the others alone: its prompts go to them, once, with a RuntimeWarning.

        Args:
          prompts: token ids.
          options: of `kvjax.run_batch`, but for `progress`; `listener` is called as (replica, events), on this thread;
            what it raises costs nothing, see `kvjax.events.Listeners`. Events are not decoded. All replicas use one
            `store`.

        Raises:
          ValueError: as `kvjax.run_batch`, before anything is donated.
          GenerationInterrupted: from an error or Ctrl-C; its `cache` has the caches of all replicas.
        """
        return self._run(run_batch, prompts, options)

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Output]:
        """The same with `kvjax.generate`."""
        return self._run(generate, prompts, options)

    @own_transfers()
    def _run(self, run: Callable[..., Any], prompts: Sequence[Any], options: dict[str, Any]) -> list[Output]:
        check_on_host("Replicas", (prompts, options), "inside one use kvjax.serving.serve under shard_map")
        checked = check_prompts(prompts)
        check_functions(listener=options.get("listener"))
        if options.get("progress") is not None:
            raise ValueError("progress: got one, wanted None: replicas do not go on together")
        copies = positive("samples", options.get("samples", 1), len(checked)).tolist()
        namespaces = _namespaces(options.get("namespaces"), len(checked))
        check_lengths(options, len(checked))
        spans = [range(end - number, end) for end, number in zip(np.cumsum(copies).tolist(), copies, strict=True)]
        seeds = seeds_of(options.get("seed"), options.get("seeds"), sum(copies), "outputs").tolist()
        options = options | {"seeds": seeds, "seed": None, "log_events": False}
        outputs = [Output(len(prompt)) for prompt, span in zip(checked, spans, strict=True) for _ in span]
        left, healthy = list(range(len(checked))), list(range(len(self._devices)))
        while left:
            routes = self._route([checked[n] for n in left], [namespaces[n] for n in left], healthy)
            chosen = {r: [n for n, route in zip(left, routes, strict=True) if route.replica == r] for r in healthy}
            job = ReplicaJob(run, checked, spans, outputs, options, self._prefixes)
            of_replicas = {r: (self._devices[r], self._models[r], numbers) for r, numbers in chosen.items() if numbers}
            failed = job.run(of_replicas, self._caches)
            lost = [number for number in failed if self._recover(number)]
            job.catch_up([cache.state for cache in self._caches], lost)
            if job.cause is not None or (failed and (len(healthy) < len(self._devices) or len(failed) == len(healthy))):
                cause = job.cause or next(iter(failed.values()))
                raise GenerationInterrupted(f"replicas ended: {cause}", self.caches, outputs, []) from cause
            if failed:
                message = f"prompts of replicas that failed go to others: {next(iter(failed.values()))}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
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


def _namespaces(namespaces: Sequence[int] | None, number: int) -> list[int]:
    """The namespace of each prompt."""
    return of_each("namespaces", namespaces, number, default=[0] * number).tolist()
