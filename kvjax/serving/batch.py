# SPDX-License-Identifier: Apache-2.0
"""`run_batch`: all prompts are submitted at once, the scheduler's loop runs them, and the host drains the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.events.log import init_log
from kvjax.events.records import Status
from kvjax.model import Model, check_model
from kvjax.policies.retention import Retention, is_retention
from kvjax.serving.admission import has_row
from kvjax.serving.asked import Asked, bucket
from kvjax.serving.held import Held
from kvjax.serving.loops import LogitsFn, admission_events, check_cache, step
from kvjax.serving.output import Output
from kvjax.serving.requests import Finish, Serving, Stage, init_serving
from kvjax.serving.sampling import Sampling
from kvjax.serving.scheduler import Scheduler
from kvjax.serving.serve import serve, worst_step
from kvjax.serving.submission import submit
from kvjax.tiered import TieredCache

_step = OutermostJit(step)
_submit = OutermostJit(submit, static_argnames="scheduler", donate_argnums=0)
_serve = OutermostJit(
    serve, static_argnames=("scheduler", "logits_fn", "fixed_steps"), donate_argnames=("serving", "log")
)


_has_row = OutermostJit(has_row, donate_argnums=0)


def run_batch[C: (Cache, TieredCache)](
    model: Model,
    cache: C,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 32,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    seeds: Sequence[int] | None = None,
    stop_tokens: Sequence[int] = (),
    namespaces: Sequence[int] | None = None,
    names: Namespaces | None = None,
    retention: Retention | Sequence[Retention | None] | None = None,
    priorities: Sequence[int] | None = None,
    scheduler: Scheduler | None = None,
    clock: Callable[[], int] | None = None,
    logits_fn: LogitsFn | None = None,
    steps: int = 1024,
    fixed_steps: bool = False,
    progress: Callable[[list[Output]], None] | None = None,
    log_events: bool = True,
) -> tuple[list[Output], C, list[dict[str, Any]]]:
    """Generates for all prompts by continuous batching, in one program that admits, computes and evicts by itself.

    As soon as a row ends, the next prompt takes it. Prompts that share a prefix compute it once, also if they come
    together. The program returns to the host when all is done, after `steps` steps, when its log of events is nearly
    full, and where blocks are to be brought back from the host tier.

    Args:
      model: see `step`; a function closed over its weights goes in as `jax.tree_util.Partial`.
      cache: is donated: go on with the returned one. Rows in use already are left alone.
      prompts: token ids.
      max_new_tokens: for all prompts, or for each.
      sampling: how tokens are chosen, for all prompts or one for each; None: greedy.
      seeds: of each prompt's random stream; its number if None.
      stop_tokens: end a row when chosen.
      namespaces: of each prompt, as `Namespaces` numbers them; 0 if None.
      names: the `Namespaces` that gave them out; None: any number will do.
      retention: of each prompt's blocks, or one for all prompts, where the spec has it.
      priorities: of each prompt, higher first; None: they come in their order.
      scheduler: the options; None: `Scheduler()`, which preempts nobody.
      clock: () -> ms; see `generate`.
      logits_fn: static; (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits.
      steps: the most steps of the model between two returns to the host.
      fixed_steps: see `generate`.
      progress: called with the outputs so far after each return.
      log_events: whether to decode the events.

    Returns:
      list of `Output`, one per prompt; the cache, with everything released and cached; and the decoded events.

    Raises:
      ValueError: before anything is donated, as `generate` does, and for options of the scheduler that do not fit.
      GenerationInterrupted: from an error or Ctrl-C, with the cache to go on with.
    """

    def asked(retains: bool) -> Asked:
        return Asked.of(
            prompts, max_new_tokens, sampling, seeds, stop_tokens, namespaces, names, retention, priorities, retains
        )

    batch = Batch(
        model, cache, asked, scheduler or Scheduler(), steps, fixed_steps, clock, logits_fn, log_events
    )  # fmt: skip
    try:
        with batch.ctrl_c:
            more = True
            while more:
                more = batch.turn()
                if progress is not None:
                    progress(batch.outputs)
    except BaseException as cause:
        with batch.ctrl_c:
            raise batch.interrupted(cause) from cause
    return batch.outputs, batch.result, batch.events


class Batch[C: (Cache, TieredCache)](Held[C]):
    """One generation, from its prompts to their outputs, turn by turn.

    Attributes:
      serving: the requests, with the cache.
      outputs: of each prompt, so far.
      slots: the prompts that are requests, in the order of their slots.
    """

    def __init__(
        self,
        model: Model,
        cache: C,
        asked: Callable[[bool], Asked],
        scheduler: Scheduler,
        steps: int,
        fixed_steps: bool,
        clock: Callable[[], int] | None,
        logits_fn: LogitsFn | None,
        log_events: bool,
    ):
        if steps < 1:
            raise ValueError(f"steps: got {steps}, wanted at least 1")
        check_model(model)
        check_cache(cache)
        super().__init__(cache, clock, log_events)
        scheduler.check(self.spec)
        self.model, self.asked, self.scheduler = model, asked(self.spec.retention), scheduler
        self.steps, self.static = steps, {"scheduler": scheduler, "logits_fn": logits_fn, "fixed_steps": fixed_steps}
        self.outputs = [Output(len(prompt)) for prompt in self.asked.prompts]
        self.slots = self._admissible()
        self.lengths = np.array([len(self.asked.prompts[n]) for n in self.slots], np.int32)
        self.wanted = self.lengths + self.asked.max_new[self.slots]
        most = min(self.spec.max_length, int(self.cache.state.groups[0].num_blocks) * self.spec.block_size) + 1
        self.goals = np.maximum(np.minimum(self.wanted, most), self.lengths + 1)
        self.serving, self.submitted = self._empty_slots(), False
        worst = worst_step(self.spec, scheduler) + admission_events(self.spec, self.serving.width)
        self.log_size = 3 * worst + steps * self.spec.max_seqs * len(self.spec.groups) // 2

    @property
    def cache(self) -> Cache:
        """What `Held` holds: the cache as it is now, on the device."""
        return self.serving.cache if "serving" in vars(self) else self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        if "serving" in vars(self):
            self.serving = self.serving.replace(cache=cache)
        else:
            self._cache = cache

    def _admissible(self) -> list[int]:
        """The prompts that can be computed at all; the others end here."""
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        _, logits, _ = _step.eval_shape(self.model, self.cache, jax.ShapeDtypeStruct((1, 1), jnp.int32), one, one)
        found = []
        for number, ids in enumerate(self.asked.prompts):
            fits = ids.size and ids.min() >= 0 and ids.max() < logits.shape[-1]
            if not fits or ids.size > self.spec.max_length:
                self.outputs[number].finish = "row_full" if fits else "bad_request"
            else:
                found.append(number)
        if found and not self.own.any():
            raise ValueError("cache: got one without a free row")
        return found

    def turn(self) -> bool:
        """Enters the loop of the scheduler once, and drains what it did; returns whether there is more to do."""
        if not self.slots:
            return False
        if not self.submitted:
            self._submit()
        self._keep_room()
        log = init_log(self.log_size, self.spec.block_size, self.spec.extra_ids)
        self.serving, log = _serve(
            self.model, self.serving, log, steps=np.int32(self.steps), now=self._next(), **self.static
        )
        self._hear(log)
        self._drain()
        if int(self.serving.onboards) >= 0:
            self._onboard(int(self.serving.onboards))
        return bool(self.serving.busy)

    def _empty_slots(self) -> Serving:
        """A slot for each prompt, in arrays of few sizes, so that few programs are compiled."""
        spec, size, number = self.spec, self.spec.block_size, bucket(max(len(self.slots), 1), 8)
        least = number * min(spec.max_length + size, 1024)
        longest = int(self.goals.max(initial=1)) - 1
        retention, stop = self.asked.retention, self.asked.stop
        return init_serving(
            self._cache, [*self.goals.tolist(), *[0] * (number - len(self.goals))],
            capacity=bucket(max(int(np.sum(self.goals + size)), least), size),
            width=min(bucket(max(longest, 1024), size), spec.max_length),
            num_stop_tokens=bucket(max(len(stop), 1), 1),
            num_ranges=jax.tree.map(lambda one: one.ranges.shape[1], retention, is_leaf=is_retention),
            greedy=self.asked.sampling is None,
        )  # fmt: skip

    def _submit(self) -> None:
        """Makes requests of the prompts."""
        asked, number = self.asked, self.serving.requests.size
        line = np.concatenate([asked.prompts[n] for n in self.slots]).astype(np.int32)
        line = np.pad(line, (0, bucket(len(line), 256) - len(line)))

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, ((0, number - len(values)), *[(0, 0)] * (values.ndim - 1)))

        def each(values: np.ndarray) -> np.ndarray:
            return padded(values[self.slots])

        self.serving, status, _, _ = _submit(
            self.serving, line, padded(self.lengths), padded(self.goals - self.lengths), scheduler=self.scheduler,
            slots=np.arange(number, dtype=np.int32), priority=each(asked.priorities), namespace=each(asked.namespaces),
            seed=each(asked.seeds), sampling=jax.tree.map(each, asked.sampling), stop_tokens=asked.stop,
            retention=jax.tree.map(each, asked.retention),
        )  # fmt: skip
        self.submitted = True
        for n, code in zip(self.slots, np.asarray(status).tolist(), strict=False):
            if code != Status.OK:
                self.outputs[n].finish = Status(code).name.lower()

    def _drain(self) -> None:
        """Reads how far each request is."""
        requests: Any = jax.device_get(self.serving.requests)
        for slot, n in enumerate(self.slots):
            output, stage = self.outputs[n], requests.stage[slot]
            if output.finish is not None or stage == Stage.EMPTY:
                continue
            begin = int(requests.start[slot]) + output.prompt_tokens
            new = slice(begin + len(output.tokens), begin + int(requests.known[slot]) - output.prompt_tokens)
            output.tokens += requests.text[new].tolist()
            output.logprobs += requests.logprobs[new].tolist()
            output.cached_tokens = int(requests.cached[slot])
            output.preemptions = int(requests.preemptions[slot])
            if stage == Stage.DONE:
                output.finish = Finish(int(requests.finish[slot])).name.lower()
                if output.finish == "length" and requests.known[slot] < self.wanted[slot]:
                    full = requests.known[slot] > self.spec.max_length
                    output.finish = "row_full" if full else "no_blocks"

    # The host tier.

    def _keep_room(self) -> None:
        """Offloads the blocks that the loop would evict: inside it they would be lost."""
        requests, size = self.serving.requests, self.spec.block_size
        stage, known = np.asarray(requests.stage), np.asarray(requests.known)
        each = -(-self.steps // size) + 1
        free = int(np.sum(np.asarray(self.serving.free)))
        waiting = known[stage == Stage.WAITING][:free]
        need = each * (int(np.sum(stage == Stage.RUNNING)) + len(waiting)) + int(np.sum(-(-waiting // size)))
        self._empty_blocks(need, self.spec.max_seqs * (each + self.spec.max_blocks_per_seq))

    def _onboard(self, slot: int) -> None:
        """Admits a request with its blocks on the host; the loop goes on without them if that cannot be done."""
        requests: Any = jax.device_get(self.serving.requests)
        row, known = int(np.argmax(np.asarray(self.serving.free))), int(requests.known[slot])
        tokens = np.zeros((1, self.serving.width), np.int32)
        tokens[0, :known] = requests.text[requests.start[slot] :][:known]
        stated = jax.tree.map(lambda x: x[slot][None], requests.retention)
        room = self.scheduler.chunk if len(self.spec.groups) > 1 else None
        events, lost = self._tiered(
            TieredCache.admit, np.array([row], np.int32), tokens, np.array([known], np.int32),
            namespace=requests.namespace[slot][None], retention=stated, room=room,
        )  # fmt: skip
        done = events.ok & (row not in lost)
        self.serving = _has_row(self.serving, np.array([slot, row], np.int32), events.cached[0], done)
