# SPDX-License-Identifier: Apache-2.0
"""The host's side of a generation: it submits the prompts, enters the scheduler's loop, and drains what came of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import alive
from kvjax._checks import check_functions, check_on_host, static_int
from kvjax._compile import OutermostJit
from kvjax.cache import Cache
from kvjax.events.log import init_log
from kvjax.events.records import Status
from kvjax.model import Model, check_model, forward
from kvjax.policies.retention import is_retention
from kvjax.pools import mixed
from kvjax.serving.admit import has_row
from kvjax.serving.capacity import admission_events, most_blocks, worst_step
from kvjax.serving.decode import LogitsFn
from kvjax.serving.ending import top_of
from kvjax.serving.held import Held, Listener
from kvjax.serving.inputs import Inputs, bucket
from kvjax.serving.loops import check_cache
from kvjax.serving.options import Scheduler
from kvjax.serving.output import Output
from kvjax.serving.preempt import leave
from kvjax.serving.requests import Finish, Serving, Stage, init_serving
from kvjax.serving.serve import serve, serve_step
from kvjax.serving.submit import submit
from kvjax.serving.swap import swaps
from kvjax.tiered import TieredCache


def _of_a_line(model: Model, cache: Cache, scheduler: Scheduler) -> jax.Array:
    """The logits f32[S, V] of a mixed step, with its shapes: `serve` finds the model traced."""
    spec, size = cache.state.spec, scheduler.chunk_tokens(cache.state.spec)
    none = jnp.full((min(scheduler.chunk_rows, spec.max_seqs),), -1, jnp.int32)
    view = mixed(cache.state, jnp.zeros((spec.max_seqs,), jnp.bool_), none, jnp.zeros_like(none), size)
    tokens, last = jnp.zeros((1, spec.max_seqs + size), jnp.int32), jnp.zeros((spec.max_seqs,), jnp.int32)
    return forward(model, tokens, cache.pools, view, last)[0]


_line = OutermostJit(_of_a_line, static_argnames="scheduler")
_init_log = OutermostJit(init_log, static_argnums=(0, 1, 2))
_submit = OutermostJit(submit, static_argnames="scheduler", donate_argnums=0)
_serve = OutermostJit(
    serve, static_argnames=("scheduler", "logits_fn", "fixed_steps"), donate_argnames=("serving", "log")
)
_serve_step = OutermostJit(
    serve_step, static_argnames=("scheduler", "logits_fn", "fixed_steps"), donate_argnames=("serving", "log")
)
_has_row = OutermostJit(has_row, donate_argnums=0)
_leave = OutermostJit(leave, donate_argnums=0)
_swaps = OutermostJit(swaps, static_argnames="scheduler")
SLOTS = 32
MOST_SPARE = 2**18  # tokens: each has a few numbers of 4 bytes


class Batch[C: (Cache, TieredCache)](Held[C]):
    """One generation, from its prompts to their outputs, turn by turn.

    Attributes:
      serving: the requests, with the cache.
      outputs: of each prompt, so far.
      slots: the prompts that are requests, in the order of their slots.
      new: {prompt: its tokens of the last turn}.
      closing: decoded events of `close`.
    """

    def __init__(
        self,
        model: Model,
        cache: C,
        inputs: functools.partial[Inputs],
        scheduler: Scheduler,
        *,
        steps: int,
        fixed_steps: bool,
        clock: Callable[[], int] | None,
        logits_fn: LogitsFn | None,
        log_events: bool,
        listener: Listener | None,
        top_logprobs: int = 0,
        loop: bool = True,
    ):
        """`inputs` gets whether the spec has retention; `steps` are the most steps of the model in a turn.

        Without `loop` a turn is one step of the scheduler.
        """
        steps = static_int("steps", steps, 1)
        if not isinstance(scheduler, Scheduler):
            raise ValueError(f"scheduler: got {scheduler!r:.80}, wanted a kvjax.serving.Scheduler or None")
        check_functions(logits_fn=logits_fn)
        check_model(model)
        check_cache(cache)
        instead = "inside one use kvjax.serving.serve or kvjax.serving.decode"
        check_on_host("generation", (model, cache.state, cache.pools, inputs.args, inputs.keywords), instead)
        super().__init__(cache, clock, log_events, listener)
        scheduler.check(self.spec)
        self.model, self.inputs = model, inputs(self.spec.retention)
        self.top_logprobs = static_int("top_logprobs", top_logprobs, 0)
        # A loop ends behind the block of steps in which it reaches its limit. A turn has room for two blocks, so that
        # a limit of k - 1 steps less is not far below what was asked for.
        k = min(scheduler.most_steps(self.spec), (steps + 1) // 2)
        self.scheduler = dataclasses.replace(scheduler, k=k)
        self.steps, self.limit = steps, np.int32(steps - k + 1)
        self.static = {"scheduler": self.scheduler, "logits_fn": logits_fn, "fixed_steps": fixed_steps}
        self.loop = loop
        self.new: dict[int, list[int]] = {}
        self.closing: list[dict[str, Any]] = []
        self.outputs = [Output(len(prompt)) for prompt in self.inputs.prompts]
        self.slots = self._admissible()
        lengths = np.array([len(self.inputs.prompts[n]) for n in self.slots], np.int32)
        self.wanted = lengths + self.inputs.max_new[self.slots]
        self.goals = np.maximum(np.minimum(self.wanted, self._most_tokens() + 1), lengths + 1)
        self.serving, self.submitted = self._empty_slots(), False
        worst = worst_step(self.spec, self.scheduler) + admission_events(self.spec, self.serving.width)
        self.log_size = 3 * worst + steps * self.spec.max_seqs * len(self.spec.groups) // 2

    @property
    def cache(self) -> Cache:
        """The cache as it is now, on the device."""
        return self.serving.cache if "serving" in vars(self) else self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        if "serving" in vars(self):
            self.serving = self.serving.replace(cache=cache)
        else:
            self._cache = cache

    def _admissible(self) -> list[int]:
        """The prompts that can be computed at all; the others end here."""
        vocabulary = _line.eval_shape(self.model, self.cache, scheduler=self.scheduler).shape[-1]
        if self.top_logprobs > vocabulary:
            raise ValueError(f"top_logprobs: got {self.top_logprobs}, wanted at most the vocabulary, {vocabulary}")
        found = []
        for number, ids in enumerate(self.inputs.prompts):
            fits = ids.size and ids.min() >= 0 and ids.max() < vocabulary
            if not fits or ids.size > self.spec.max_length:
                self.outputs[number].finish = "row_full" if fits else "bad_request"
            else:
                found.append(number)
        if found and not self.own.any():
            raise ValueError("cache: got one without a free row")
        return found

    def _most_tokens(self) -> int:
        """The most tokens of a request whose K/V fit, alone in the cache."""
        most = self.spec.max_length
        goal: Any = np.int32(most + 1)  # of the host, so that nothing is compiled
        for group, blocks in zip(self.cache.state.groups, most_blocks(self.spec, self.scheduler, goal), strict=True):
            if blocks > (there := int(group.num_blocks)):
                most = min(most, there * self.spec.block_size)
        return most

    def turn(self) -> bool:
        """Enters the loop of the scheduler once, and drains what it did; returns whether there is more to do.

        Its events may stay to be heard (`hear`).
        """
        self.new = {}
        if not self.slots:
            return False
        if not self.submitted:
            self._submit()
        self._empty_blocks(self._room_to_grow)
        log = _init_log(self.log_size, self.spec.block_size, self.spec.extra_ids)
        given = {"now": self._next(), **self.static}
        if self.loop:
            self.serving, log = _serve(self.model, self.serving, log, steps=self.limit, **given)
        else:
            self.serving, log, _ = _serve_step(self.model, self.serving, log, **given)
        self.unheard.append(log)
        self.hear(but=1)  # what the turns before left, while the device works
        requests, row, onboard_slot, refused = self._read()
        self._drain(requests)
        if refused == 1:
            self._empty_refused()
        if onboard_slot >= 0:
            self._onboard(requests, int(onboard_slot), int(np.argmax(self.own & (row < 0))))
        while self.scheduler.preempt == "swap" and self._swap():
            pass
        more = bool(np.any(row >= 0) or np.any(requests.stage == Stage.WAITING))
        if not more:
            self._check_released()
        return more

    def _check_released(self) -> None:
        """Raises a RuntimeError if rows of this generation are in use behind its last request."""
        rows = np.flatnonzero(self.own & (np.asarray(self.cache.state.seqs.length) > 0)).tolist()
        if rows:
            raise RuntimeError(f"rows {rows} are in use, and no request has them")

    def close(self) -> None:
        """Releases the rows of a stream that is read no further, unless the caller has gone on with its cache."""
        if alive((self.cache, self.host)):
            self.events = self.closing
            with self.ctrl_c, jax.ensure_compile_time_eval():  # garbage collection may call this during a trace
                self._let_go()
                self.hear()

    def _empty_slots(self) -> Serving:
        """A slot for each prompt, in arrays of few sizes: most batches find the programs of the first one.

        Slots and tokens are rounded up, at least to `SLOTS` and to what the rows hold.
        """
        spec, size, number = self.spec, self.spec.block_size, bucket(max(len(self.slots), 1), SLOTS)
        least = min(spec.max_seqs * (spec.max_length + size), MOST_SPARE)
        longest = int(self.goals.max(initial=1)) - 1
        retention = self.inputs.retention
        return init_serving(
            self._cache, [*self.goals.tolist(), *[0] * (number - len(self.goals))],
            capacity=bucket(max(int(np.sum(self.goals + size)), least), size),
            width=min(bucket(max(longest, 1024), size), spec.max_length),
            num_stop_tokens=len(self.inputs.stop),
            num_ranges=jax.tree.map(lambda one: one.ranges.shape[1], retention, is_leaf=is_retention),
            greedy=self.inputs.sampling is None, top_logprobs=self.top_logprobs,
        )  # fmt: skip

    def _submit(self) -> None:
        """Makes requests of the prompts."""
        given, behind = self.inputs.requests(self.slots, self.goals, self.serving.requests.size, int(self.own.sum()))
        self.serving, status, _, _ = _submit(self.serving, scheduler=self.scheduler, **given)
        self.submitted = True
        reasons = np.asarray(status)[np.arange(len(behind)) - behind]  # of the first one of the party
        for n, code in zip(self.slots, reasons.tolist(), strict=True):
            if code != Status.OK:
                self.outputs[n].finish = Status(code).name.lower()

    def _read(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """`requests`, `row`, `onboard_slot` and `refused` of `Serving` as numpy arrays, by which the host decides."""
        serving = self.serving
        return jax.device_get((serving.requests, serving.row, serving.onboard_slot, serving.refused))

    def _drain(self, requests: Any) -> None:
        """Notes how far each request is."""
        for slot, n in enumerate(self.slots):
            output, stage = self.outputs[n], requests.stage[slot]
            if output.finish is not None or stage == Stage.EMPTY:
                continue
            begin = int(requests.start[slot]) + output.prompt_tokens
            new = slice(begin + len(output.tokens), begin + int(requests.num_tokens[slot]) - output.prompt_tokens)
            if new.start < new.stop:
                self.new[n] = requests.text[new].tolist()
                output.tokens += self.new[n]
                output.logprobs += requests.logprobs[new].tolist()
                output.top_logprobs += top_of(requests, new)
            output.cached_tokens = int(requests.cached[slot])
            output.preemptions = int(requests.preemptions[slot])
            if stage == Stage.DONE:
                output.finish = Finish(int(requests.finish[slot])).name.lower()
                if output.finish == "length" and requests.num_tokens[slot] < self.wanted[slot]:
                    full = requests.num_tokens[slot] > self.spec.max_length
                    output.finish = "row_full" if full else "no_blocks"

    # The host tier.

    def _room_to_grow(self) -> tuple[int, int]:
        """Blocks that the rows may take in the loop, and the most that they ever take: those evicted there are lost.

        A request that is admitted where blocks have to be evicted for it comes back to `_onboard`.
        """
        requests, row, _, _ = self._read()
        known, goal = (values[row[row >= 0]] for values in (requests.num_tokens, requests.max_tokens))
        need = np.sum(self._blocks(np.minimum(goal - known, self.steps)) + 1)
        most = self.spec.max_seqs * (self._blocks(self.steps) + 1)
        if len(self.spec.groups) > 1:  # prompts take their blocks chunk by chunk
            need += np.sum(self._blocks(known))
            most += self.spec.max_seqs * self.spec.max_blocks_per_seq
        return int(need), most

    def _empty_refused(self) -> None:
        """Empties blocks that the loop was refused, since their children are on the host.

        If none can be emptied, the next step preempts.
        """
        before = self._num_empty()
        self._empty_blocks(self._room_to_grow)
        if np.any(self._num_empty() > before):
            self.serving = self.serving.replace(refused=jnp.int32(0))

    def _num_empty(self) -> np.ndarray:
        """Empty blocks of each group."""
        return np.array([int(group.num_empty) for group in self.cache.state.groups])

    def _blocks(self, tokens: Any) -> Any:
        """The blocks that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.spec.block_size)

    def _onboard(self, requests: Any, slot: int, row: int) -> None:
        """Admits a request with its blocks on the host; the loop goes on without them if that cannot be done.

        A move that fails takes its blocks out of the index, so that the request is tried again without them.
        """
        known = int(requests.num_tokens[slot])
        tokens = np.zeros((1, self.serving.width), np.int32)
        tokens[0, :known] = requests.text[requests.start[slot] :][:known]
        stated = jax.tree.map(lambda x: x[slot][None], requests.retention)
        room = self.scheduler.chunk if len(self.spec.groups) > 1 else None
        admit = functools.partial(
            self._tiered, TieredCache.admit, np.array([row], np.int32), tokens, np.array([known], np.int32),
            namespace=requests.namespace[slot][None], retention=stated, reserve_tokens=room,
        )  # fmt: skip
        events, lost = admit()
        while row in lost:
            self._forget(lost)
            events, lost = admit()
        self._forget(lost)
        self.serving = _has_row(self.serving, np.array([slot, row], np.int32), events.cached[0], events.ok)

    def _swap(self) -> bool:
        """Swaps a row out or in, if one is to be; whether there was one.

        If that cannot be done, the next step preempts.
        """
        swaps = jax.device_get(_swaps(self.serving, scheduler=self.scheduler))
        if not swaps.any:
            return False
        verb, row = (TieredCache.swap_out, swaps.out) if swaps.out >= 0 else (TieredCache.swap_in, swaps.back)
        events, lost = self._tiered(verb, row)
        self._forget(lost)
        if not bool(events.ok):
            self.serving = self.serving.replace(refused=jnp.int32(1))
        return True

    def _forget(self, lost: list[int]) -> None:
        """Takes rows that have been released, since they lost K/V, from their requests, which wait again."""
        for row in lost:
            self.serving = _leave(self.serving, np.int32(row), np.bool_(False))
