# SPDX-License-Identifier: Apache-2.0
"""`Engine`: threads and asyncio submit requests while it runs; one thread of its own has the cache.

    with kvjax.serving.Engine(model, cache) as engine:
        handle = engine.submit(prompt, max_new_tokens=64)
        for token in handle: ...                             # or: async for token in handle
        output = handle.result()

Source: vLLM's AsyncLLM and its engine core, which run apart from whoever submits.
"""

from __future__ import annotations

import itertools
import operator
import reprlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from kvjax._compile import own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.checks import check_alive, host_integers, static_int
from kvjax.model import Model, check_model, check_placement
from kvjax.serving.decode import LogitsFn, check_cache
from kvjax.serving.driver import Limits
from kvjax.serving.engine_thread import ENTRIES, MANY, EngineJob, EngineThread, Inbox
from kvjax.serving.handle import EngineError, Handle
from kvjax.serving.inputs import Listener, RunOptions, check_prompts
from kvjax.serving.options import Scheduler
from kvjax.serving.sampling import Sampling, output_seeds
from kvjax.serving.turns import Slots
from kvjax.state import CacheState
from kvjax.stores.disk import DiskStore
from kvjax.tiered import TieredCache


def _streams(seed: Any, samples: int) -> list[int]:
    """The random stream of each sample of a request."""
    try:
        first = operator.index(seed)
    except TypeError:  # a key
        return jax.device_get(output_seeds(seed, samples)).tolist()
    return [(first + sample) % 2**32 for sample in range(samples)]


class QueueFull(RuntimeError):
    """A request that was refused, since as many wait as may.

    Attributes:
      waiting: how many.
    """

    def __init__(self, waiting: int):
        super().__init__(f"{waiting:,} requests wait already")
        self.waiting = waiting


class Engine[C: (Cache, TieredCache)]:
    """Serves requests with a model and a cache, of which it is the only owner.

    Its programs are compiled when it starts; those that move blocks to a host tier or from a store at their first use.

    A step that fails costs the cache: the requests that it served end with an `EngineError`, the listener gets the
    event that all is cleared, and the engine goes on with an empty cache. A listener that raises costs no request and
    no cache: see `kvjax.events.Listeners`.

    Attributes:
      spec: of the cache.
      names: the `Namespaces` of the requests, or None.
    """

    @own_transfers()
    def __init__(
        self,
        model: Model,
        cache: C,
        *,
        scheduler: Scheduler | None = None,
        max_requests: int | None = None,
        max_waiting: int = 1024,
        num_stop_tokens: int = 4,
        top_logprobs: int = 0,
        store: DiskStore | None = None,
        names: Namespaces | None = None,
        listener: Listener | None = None,
        clock: Callable[[], int] | None = None,
        logits_fn: LogitsFn | None = None,
        logits_state: Any = None,
        fixed_steps: bool = False,
    ):
        """Starts an engine.

        Args:
          model: see `generate`.
          cache: is donated; no row of it may be in use. `close` returns the last one.
          scheduler: its options; None: `Scheduler()`.
          max_requests: W, requests that the scheduler knows at a time; None: four for each row.
          max_waiting: requests that wait for one of these; more are refused by `QueueFull`.
          num_stop_tokens: K, the most stop tokens of a request.
          top_logprobs: of how many of the likeliest tokens to note the log-probabilities, at each step.
          store: prefixes from a disk; see `generate`. It is not closed.
          names: the `Namespaces` of the requests; None: any number will do.
          listener: as of `generate`; called on the engine's thread.
          clock: as of `generate`.
          logits_fn: as of `generate`; with a `logits_state` as of `rollout`.
          logits_state: a tree of numpy arrays; what `logits_fn` keeps of a request that is submitted without one.
          fixed_steps: as of `generate`.

        Raises:
          ValueError: naming the argument, before anything is donated.
        """
        check_cache(cache)
        check_alive(cache)
        # Committed to its devices, as one that takes its place will be: jax would compile anew for that.
        cache = jax.tree.map(lambda x: jax.device_put(x, x.sharding), cache)
        check_model(model)
        check_placement(model, cache)
        self.spec, self.names, self._store = cache.state.spec, names, store
        options = RunOptions(
            Scheduler() if scheduler is None else scheduler, steps=MANY, fixed_steps=fixed_steps, clock=clock,
            logits_fn=logits_fn, log_events=False, listener=listener, top_logprobs=top_logprobs, store=store,
        )  # fmt: skip
        options.scheduler.check(self.spec)
        if np.any(np.asarray(cache.state.seqs.length)):
            raise ValueError("cache: got one with rows in use, wanted one without")
        if store is not None:
            store.check(self.spec, [0], names)
        if logits_state is not None and logits_fn is None:
            raise ValueError("logits_state: got one, wanted None without a logits_fn")
        self._logits_state = jax.tree.map(np.asarray, logits_state)
        self._max_waiting = static_int("max_waiting", max_waiting, 1)
        self._stop_tokens = static_int("num_stop_tokens", num_stop_tokens, 1)
        slots = static_int("max_requests", 4 * self.spec.max_seqs if max_requests is None else max_requests, 1)
        self._limits = Limits.of(model, cache.cache, options)
        self._most_samples = min(ENTRIES, self.spec.max_seqs, slots)
        self._numbers, self._inbox = itertools.count(), Inbox(names)
        self._thread = EngineThread(model, cache, options, self._inbox, self._slots(slots))
        self._thread.start()

    @own_transfers()
    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 32,
        sampling: Sampling | None = None,
        seed: int | jax.Array = 0,
        stop_tokens: Sequence[int] = (),
        namespace: int = 0,
        salt: str | None = None,
        priority: int = 0,
        samples: int = 1,
        timeout: float | None = None,
        logits_state: Any = None,
    ) -> Handle:
        """Submits a request, from any thread.

        Args:
          prompt: token ids.
          max_new_tokens: for each sample.
          sampling: how tokens are chosen; None: greedy.
          seed: of the random stream; sample n has `seed + n`. Of a jax key the samples have the streams that `generate`
            gives its outputs.
          stop_tokens: end it when chosen; at most `num_stop_tokens`.
          namespace: as `Namespaces` numbers them.
          salt: of a tenant, in place of a namespace: `names` lends a number for it as long as a block or a request has
            it, so that any number of salts may come. A request that is refused gets none.
          priority: higher first.
          samples: outputs of the prompt, which is computed once; see the handle's `samples`.
          timeout: seconds after which it is cancelled.
          logits_state: what `logits_fn` gets with its first logits; None: as of the engine.

        Raises:
          ValueError: naming the argument.
          QueueFull: if too many wait.
          EngineError: if the engine is closed.
        """
        tokens = self._checked_prompt(prompt)
        stop = host_integers("stop_tokens", stop_tokens, np.int32, "a list of token ids")
        if len(stop) > self._stop_tokens:
            raise ValueError(f"stop_tokens: got {len(stop)}, wanted at most num_stop_tokens, {self._stop_tokens}")
        if not isinstance(sampling, Sampling | None):
            raise ValueError(f"sampling: got {sampling!r:.80}, wanted a kvjax.Sampling or None")
        if static_int("samples", samples, 1) > (most := min(self._most_samples, self._max_waiting)):
            raise ValueError(f"samples: got {samples}, wanted at most {most}")
        self._check_namespace(namespace, salt)
        for name, value in (("priority", priority), ("namespace", namespace)):
            host_integers(name, [value], np.int32, "a 32-bit integer")
        new = static_int("max_new_tokens", max_new_tokens, 1)
        options: dict[str, Any] = {
            "unlimited": len(tokens) + new, "max_tokens": self._limits.max_tokens(len(tokens), new),
            "sampling": sampling or Sampling(), "stop_tokens": stop, "priority": int(priority),
            "namespace": int(namespace), "logits_state": self._checked_state(logits_state),
            "deadline": np.inf if timeout is None else time.monotonic() + timeout,
        }  # fmt: skip
        jobs = list[EngineJob]()
        for stream in _streams(seed, samples):
            handle = Handle(len(tokens), self._cancel)
            handle.job = EngineJob(next(self._numbers), tokens, handle.output, seed=stream, handle=handle, **options)
            jobs.append(handle.job)
        handles = [job.handle for job in jobs]
        for job in jobs:
            job.leader, job.handle.samples = jobs[0], handles
        inbox = self._inbox
        with inbox.wake:
            self._check_open()
            if len(inbox.queue) + samples > self._max_waiting:
                raise QueueFull(len(inbox.queue))
            if salt is not None:
                number = inbox.lend(salt)
                for job in jobs:
                    job.namespace = number
            inbox.queue.extend(jobs)
            inbox.is_idle = False
            inbox.wake.notify_all()
        return handles[0]

    def _check_namespace(self, namespace: int, salt: str | None) -> None:
        if self.names is not None and namespace not in self.names:
            raise ValueError(f"namespace: got {namespace}, wanted one that names gave out")
        if salt is not None and (self.names is None or namespace):
            got = "one of an engine without names" if self.names is None else f"one beside namespace {namespace}"
            raise ValueError(f"salt: got {got}, wanted None")
        Namespaces.salted(salt)
        if self._store is not None:
            self._store.root(namespace)

    def _slots(self, number: int) -> Slots:
        """Slots for any requests that the cache can hold."""
        spec = self.spec
        return Slots(
            [spec.max_length + 1] * number, steps=MANY, num_columns=MANY, entries=ENTRIES,
            entry_tokens=min(ENTRIES, spec.max_seqs) * spec.max_length, num_stop_tokens=self._stop_tokens,
            width=spec.max_length, logits_state=self._logits_state,
        )  # fmt: skip

    @property
    def vocabulary(self) -> int:
        """The number of the model's tokens."""
        return self._limits.vocabulary

    def _checked_prompt(self, prompt: Any) -> np.ndarray:
        try:
            (tokens,) = check_prompts([prompt])
        except ValueError:
            raise ValueError(f"prompt: got {reprlib.repr(prompt)}, wanted a list of token ids") from None
        refusal = self._limits.refusal(tokens)
        if refusal == "bad_request":
            wanted = f"wanted tokens of 0..{self.vocabulary - 1}, at least one"
            raise ValueError(f"prompt: got {reprlib.repr(tokens.tolist())}, {wanted}")
        if refusal == "row_full":
            raise ValueError(f"prompt: got {len(tokens)} tokens, wanted at most {self.spec.max_length}")
        return tokens

    def _checked_state(self, state: Any) -> Any:
        if state is None:
            return self._logits_state
        (got, tree), (wanted, own) = map(jax.tree.flatten, (state, self._logits_state))
        if tree != own or any(np.shape(one) != two.shape for one, two in zip(got, wanted, strict=True)):
            raise ValueError(f"logits_state: got {reprlib.repr(state)}, wanted arrays like those of the engine")
        return state

    def _cancel(self, handle: Handle) -> None:
        with self._inbox.wake:
            self._inbox.cancels.append(handle.job)
            self._inbox.wake.notify_all()

    def _check_open(self) -> None:
        if self._inbox.is_closing:
            raise EngineError("the engine is closed")

    @property
    def waiting(self) -> int:
        """Requests that the scheduler does not have yet."""
        return len(self._inbox.queue) + len(self._thread.reading)

    @property
    def listener_counts(self) -> dict[str, int]:
        """Failures of the listener, calls that it has missed, and snapshots that it has taken since."""
        return self._thread.listener_counts

    @property
    def running(self) -> int:
        """Requests that the scheduler has, and that are not over."""
        return sum(not job.is_done for job in list(self._thread.active.values()))

    @property
    def state(self) -> CacheState:
        """A copy of the cache's metadata, which any thread may read."""
        copied, copies = threading.Event(), list[CacheState]()
        with self._inbox.wake:
            self._check_open()
            self._inbox.copies.append((copied, copies))
            self._inbox.wake.notify_all()
        copied.wait()
        if not copies:
            raise EngineError("the engine was closed, or has failed")
        return copies[0]

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until every request that was submitted is over, at most `timeout` seconds; returns whether they are."""
        with self._inbox.wake:
            return self._inbox.wake.wait_for(lambda: self._inbox.is_idle, timeout)

    def close(self) -> C:
        """Ends the requests that are not over, and the engine; returns its cache."""
        with self._inbox.wake:
            self._inbox.is_closing = True
            self._inbox.wake.notify_all()
        self._thread.join()
        return cast(C, self._thread.last)

    def __enter__(self) -> Engine[C]:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
