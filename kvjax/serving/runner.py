# SPDX-License-Identifier: Apache-2.0
"""The host's side of a generation: it submits the prompts, enters the scheduler's loop, and reads what came of it.

With a host tier, blocks move between two loops (`HostTier`), since a loop moves none between the tiers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._compile import OutermostJit, own_transfers
from kvjax.cache import Cache
from kvjax.events.log import init_log
from kvjax.events.records import Events, Status
from kvjax.model import Model, forward
from kvjax.policies.retention import is_retention
from kvjax.pools import mixed
from kvjax.pools.host import HostPools, compile_moves
from kvjax.serving.admit import has_row
from kvjax.serving.capacity import admission_events, most_blocks, worst_step
from kvjax.serving.inputs import Inputs, bucket
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.preempt import leave, swaps
from kvjax.serving.requests import Output, Serving, Stage, init_serving
from kvjax.serving.serve import serve, serve_step
from kvjax.serving.stored import StoredPrefixes, growth
from kvjax.serving.submit import submit
from kvjax.state import CacheState
from kvjax.tiered import FailedTransfer, TieredCache


def _mixed_logits(model: Model, cache: Cache, scheduler: Scheduler) -> jax.Array:
    """The logits f32[S, V] of a mixed step, with its shapes: `serve` finds the model traced."""
    spec, size = cache.state.spec, scheduler.chunk_tokens(cache.state.spec)
    none = jnp.full((scheduler.most_chunks(spec),), -1, jnp.int32)
    view = mixed(cache.state, jnp.zeros((spec.max_seqs,), jnp.bool_), none, jnp.zeros_like(none), size)
    tokens, last = jnp.zeros((1, spec.max_seqs + size), jnp.int32), jnp.zeros((spec.max_seqs,), jnp.int32)
    return forward(model, tokens, cache.pools, view, last)[0]


_mixed_logits = OutermostJit(_mixed_logits, static_argnames="scheduler")
_init_log = OutermostJit(init_log, static_argnums=(0, 1, 2, 3))
_submit = OutermostJit(submit, static_argnames="scheduler", donate_argnums=0)
_static, _donated = ("scheduler", "logits_fn", "fixed_steps"), ("serving", "log")
_serve = OutermostJit(serve, static_argnames=_static, donate_argnames=_donated)
_serve_step = OutermostJit(serve_step, static_argnames=_static, donate_argnames=_donated)
_has_row = OutermostJit(has_row, donate_argnums=0)
_leave = OutermostJit(leave, donate_argnums=0)
_swaps = OutermostJit(swaps, static_argnames="scheduler")
MIN_SLOTS = 32
MOST_SPARE = 2**18  # tokens: each has a few numbers of 4 bytes


def vocabulary_size(model: Model, cache: Cache, scheduler: Scheduler, top_logprobs: int = 0) -> int:
    """The number of logits of a model; a ValueError if fewer than the `top_logprobs` that are to be noted."""
    vocabulary = _mixed_logits.eval_shape(model, cache, scheduler=scheduler).shape[-1]
    if top_logprobs > vocabulary:
        raise ValueError(f"top_logprobs: got {top_logprobs}, wanted at most the vocabulary, {vocabulary}")
    return vocabulary


def most_tokens(state: CacheState, scheduler: Scheduler) -> int:
    """The most tokens of a request whose K/V fit, alone in the cache."""
    spec = state.spec
    most, max_tokens = spec.max_length, np.int32(spec.max_length + 1)  # of the host, so that nothing is compiled
    for group, blocks in zip(state.groups, most_blocks(spec, scheduler, cast(Any, max_tokens)), strict=True):
        if blocks > (num_blocks := int(group.num_blocks)):
            most = min(most, num_blocks * spec.block_size)
    return most


class GenerationRunner[C: (Cache, TieredCache)]:
    """One generation, from its prompts to their outputs, turn by turn."""

    @own_transfers()
    def __init__(self, inputs: Inputs[C]):
        self.inputs, self.spec, options = inputs, inputs.spec, inputs.options
        k = min(options.scheduler.most_steps(self.spec), options.steps)
        self.scheduler, self.limit = dataclasses.replace(options.scheduler, k=k), np.int32(options.steps)
        self.new: dict[int, list[int]] = {}  # output number: its tokens of the last turn
        self.closing: list[dict[str, Any]] = []  # decoded events of `close`
        self.outputs = [Output(len(prompt)) for prompt in inputs.prompts]
        self.output_of_slot, self.submitted = self._admissible(), False
        self.requests: Any = None  # as the last loop left them
        lengths = np.array([len(inputs.prompts[n]) for n in self.output_of_slot], np.int32)
        self.unlimited = lengths + inputs.max_new_tokens[self.output_of_slot]
        self.max_tokens = np.maximum(
            np.minimum(self.unlimited, most_tokens(inputs.cache.state, self.scheduler) + 1), lengths + 1
        )
        self.state: GenerationState[C] = GenerationState(self._empty_slots(), inputs.host, inputs.own_rows, options)
        self.host_tier = HostTier(self.state, self.scheduler, options.steps)
        self.stored = options.store and StoredPrefixes(options.store, self.state, self.scheduler)
        worst = worst_step(self.spec, self.scheduler) + admission_events(self.spec, self.state.serving.width)
        self.log_size = 3 * worst + options.steps * self.spec.max_seqs * len(self.spec.groups) // 2

    def _admissible(self) -> list[int]:
        """The prompts that can be computed at all, which get slots in this order; the others end here."""
        inputs = self.inputs
        vocabulary = vocabulary_size(inputs.model, inputs.cache, self.scheduler, inputs.options.top_logprobs)
        found = []
        for number, prompt in enumerate(self.inputs.prompts):
            is_valid = prompt.size and prompt.min() >= 0 and prompt.max() < vocabulary
            if not is_valid or prompt.size > self.spec.max_length:
                self.outputs[number].finish = "row_full" if is_valid else "bad_request"
            else:
                found.append(number)
        if found and not self.inputs.own_rows.any():
            raise ValueError("cache: got one without a free row")
        return found

    def _empty_slots(self) -> Serving:
        """A slot for each prompt, in arrays of few sizes: most batches find the programs of the first one."""
        spec, inputs, size, max_tokens = self.spec, self.inputs, self.spec.block_size, self.max_tokens
        number = bucket(max(len(max_tokens), 1), MIN_SLOTS)
        least = min(spec.max_seqs * (spec.max_length + size), MOST_SPARE)
        longest = int(max_tokens.max(initial=1)) - 1
        return init_serving(
            inputs.cache, [*max_tokens.tolist(), *[0] * (number - len(max_tokens))],
            capacity=bucket(max(int(np.sum(max_tokens + size)), least), size),
            width=min(bucket(max(longest, 1024), size), spec.max_length),
            num_stop_tokens=len(inputs.stop_tokens),
            num_ranges=jax.tree.map(lambda one: one.ranges.shape[1], inputs.retention, is_leaf=is_retention),
            greedy=inputs.sampling is None, top_logprobs=inputs.options.top_logprobs,
            logprobs=inputs.options.logprobs,
        )  # fmt: skip

    @own_transfers()
    def turn(self) -> bool:
        """Enters the loop of the scheduler once, and reads what it did; returns whether there is more to do."""
        try:
            return self._turn()
        except BaseException:
            if self.stored:
                self.stored.drop()
            raise

    def _turn(self) -> bool:
        state, options = self.state, self.inputs.options
        self.new = {}
        if not self.output_of_slot:
            return False
        if not self.submitted:
            self._submit()
        if self.stored:
            wait_for = int(self.inputs.own_rows.sum()) if self.requests is None else 0
            self.stored.adopt(self.host_tier.call, growth(self.requests, self.spec.block_size), wait_for)
        self.host_tier.empty_blocks()
        log = _init_log(self.log_size, self.spec.block_size, self.spec.extra_ids, self.spec.has_recurrent)
        arguments = {
            "scheduler": self.scheduler, "logits_fn": options.logits_fn, "fixed_steps": options.fixed_steps,
            "now": state.now(),
        }  # fmt: skip
        if options.loop:
            state.serving, log = _serve(self.inputs.model, state.serving, log, steps=self.limit, **arguments)
        else:
            state.serving, log, _ = _serve_step(self.inputs.model, state.serving, log, **arguments)
        state.unpublished.append(log)
        state.publish(keep=1)  # what the turns before left, while the device works; this turn's events stay
        self.requests, row, onboard_slot, refused = self._read()
        requests = self.requests
        admitted = self._update_outputs(requests)
        if self.stored:
            self.stored.after_loop(log, {n: (int(self.inputs.first_sample[n]), self.outputs[n]) for n in admitted})
        if refused == 1:
            self.host_tier.empty_refused()
        if onboard_slot >= 0:
            self.host_tier.onboard(requests, int(onboard_slot), int(np.argmax(self.inputs.own_rows & (row < 0))))
        while self.host_tier.swap():
            pass
        more = bool(np.any(row >= 0) or np.any(requests.stage == Stage.WAITING))
        if not more and (rows := state.rows_in_use()).size:
            raise RuntimeError(f"rows {rows.tolist()} are in use, and no request has them")
        return more

    def _submit(self) -> None:
        """Makes requests of the prompts."""
        serving, inputs = self.state.serving, self.inputs
        arguments = inputs.submission(self.output_of_slot, self.max_tokens, serving.requests.size)
        self.state.serving, status, _, _ = _submit(serving, scheduler=self.scheduler, **arguments)
        self.submitted = True
        for n, code in zip(self.output_of_slot, np.asarray(status).tolist(), strict=False):  # then slots without one
            if code != Status.OK:
                self.outputs[n].finish = Status(code).name.lower()
        if self.stored:
            waiting = [n for n in self.output_of_slot if self.outputs[n].finish is None]
            firsts = sorted(dict.fromkeys(inputs.first_sample[waiting].tolist()), key=lambda n: -inputs.priorities[n])
            self.stored.begin({n: (inputs.prompts[n], int(inputs.namespaces[n])) for n in firsts})

    def _read(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """`requests`, `row`, `onboard_slot` and `refused` of `Serving` as numpy arrays, by which the host decides."""
        serving = self.state.serving
        return jax.device_get((serving.requests, serving.row, serving.onboard_slot, serving.refused))

    def _update_outputs(self, requests: Any) -> list[int]:
        """Adds the new tokens of each request, and why it is over; returns the outputs that run, or do not any more."""
        admitted = []
        for slot, n in enumerate(self.output_of_slot):
            output = self.outputs[n]
            if output.finish is not None or requests.stage[slot] == Stage.EMPTY:
                continue
            if new := output.update(requests, slot):
                self.new[n] = new
            if output.finish == "length" and requests.num_tokens[slot] < self.unlimited[slot]:
                full = requests.num_tokens[slot] > self.spec.max_length
                output.finish = "row_full" if full else "no_blocks"
            if requests.stage[slot] != Stage.WAITING:
                admitted.append(n)
        return admitted

    @own_transfers()
    def close(self) -> None:
        """Releases the rows of a stream that is read no further, unless the caller has gone on with its cache."""
        if self.stored:
            self.stored.drop()
        if self.state.alive:
            self.state.events = self.closing
            with self.state.ctrl_c, jax.ensure_compile_time_eval():  # garbage collection may call this during a trace
                self.state.release_rows()
                self.state.publish()


class HostTier[C: (Cache, TieredCache)]:
    """Moves blocks between the tiers; `steps` are the most in a loop. Where a move cannot be made, a step preempts."""

    def __init__(self, state: GenerationState[C], scheduler: Scheduler, steps: int):
        self.state, self.scheduler, self.steps = state, scheduler, steps
        self.spec = state.cache.state.spec
        self.groups = () if state.host is None else self.spec.host_groups

    def compile(self) -> None:
        """Compiles all that moves blocks, while no request is there; changes nothing."""
        state, host = self.state, self.state.host
        for number in self.groups:
            compile_moves(state.cache.pools, cast(HostPools, host), number)
            self.call(TieredCache.watermark, 0, most=self._most_taken(number), group=number)
        if self.groups:
            self.onboard(jax.device_get(state.serving.requests), 0, 0)  # no tokens: it is refused
            state.serving = _leave(state.serving, np.int32(0), np.bool_(False))
        if self.scheduler.preempt == "swap":
            rows = jax.device_get(_swaps(state.serving, scheduler=self.scheduler))
            for verb in (TieredCache.swap_out, TieredCache.swap_in):
                self.call(verb, rows.out)  # no row: it is refused

    def _most_taken(self, number: int) -> int:
        """The most blocks of a group that any loop takes."""
        columns = -(-self.steps // self.spec.block_size) + 1
        if len(self.spec.groups) > 1:  # prompts take their blocks chunk by chunk
            columns += self.spec.max_blocks_per_seq
        return min(self.spec.max_seqs * columns, self.spec.groups[number].num_blocks)

    def empty_blocks(self) -> None:
        """Offloads blocks until as many are empty as the next loop may take, if the host has space for them."""
        if not self.groups:
            return
        requests, slots = self.state.serving.requests, np.asarray(self.state.serving.row)
        num_tokens, max_tokens = (
            np.asarray(values)[slots[slots >= 0]] for values in (requests.num_tokens, requests.max_tokens)
        )
        size = self.spec.block_size
        need = int(np.sum(-(-np.minimum(max_tokens - num_tokens, self.steps) // size) + 1))
        if len(self.spec.groups) > 1:
            need += int(np.sum(-(-num_tokens // size)))
        for number in self.groups:
            target = min(need, self.spec.groups[number].num_blocks)
            options = {"most": self._most_taken(number), "group": number}
            while (empty := int(self.state.cache.state.groups[number].num_empty)) < target:
                events, _, has_failed = self.call(TieredCache.watermark, target, **options)
                is_over = events.ok or has_failed  # fewer moves would fail as well
                target = empty if is_over else (empty + target) // 2

    def empty_refused(self) -> None:
        """Empties blocks that the loop was refused, since their children are on the host."""
        before = [int(group.num_empty) for group in self.state.cache.state.groups]
        self.empty_blocks()
        groups = self.state.cache.state.groups
        if any(int(group.num_empty) > number for group, number in zip(groups, before, strict=True)):
            self.state.serving = self.state.serving.replace(refused=jnp.int32(0))

    def onboard(self, requests: Any, slot: int, row: int) -> None:
        """Admits a request, in numpy arrays, with its blocks on the host; without them if that cannot be done."""
        num_tokens = int(requests.num_tokens[slot])
        tokens = np.zeros((1, self.state.serving.width), np.int32)
        tokens[0, :num_tokens] = requests.text[requests.start[slot] :][:num_tokens]
        options = {
            "namespace": requests.namespace[slot][None],
            "retention": jax.tree.map(lambda x: x[slot][None], requests.retention),
            "reserve_tokens": self.scheduler.chunk if len(self.spec.groups) > 1 else None,
            "alignment_tokens": self.scheduler.alignment_tokens,
        }
        lost = [row]
        while row in lost:  # once in any case; a move that fails takes its blocks out of the index
            events, lost, _ = self.call(
                TieredCache.admit, np.array([row], np.int32), tokens, np.array([num_tokens], np.int32), **options
            )
        placed = np.array([slot, row], np.int32)
        self.state.serving = _has_row(self.state.serving, placed, events.cached[0], events.ok)

    def swap(self) -> bool:
        """Swaps a row out or in, if one is to be; whether there was one."""
        if self.scheduler.preempt != "swap":
            return False
        rows = jax.device_get(_swaps(self.state.serving, scheduler=self.scheduler))
        if not rows.any:
            return False
        verb, row = (TieredCache.swap_out, rows.out) if rows.out >= 0 else (TieredCache.swap_in, rows.back)
        events, *_ = self.call(verb, row)
        if not bool(events.ok):
            self.state.serving = self.state.serving.replace(refused=jnp.int32(1))
        return True

    def call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> tuple[Events, list[int], bool]:
        """Calls a verb; returns the events, rows whose K/V were lost, and whether moves failed, with a warning."""
        state, lost, removed, failed = self.state, [], [], None
        try:
            cache, events = verb(state.result, *args, now=state.now(), **options)
        except FailedTransfer as failure:
            cache, events, lost = failure.tiered, failure.events, failure.lost
            removed, failed = [failure.removed], str(failure)
        state.replace(cache)
        state.publish(events, *removed)
        if failed is not None:  # behind what must not be lost, since a warning may be made an error
            warnings.warn(f"what was lost is computed again: {failed}", RuntimeWarning, stacklevel=2)
        for row in lost:  # their requests wait again, and find less in the cache the next time
            state.serving = _leave(state.serving, np.int32(row), np.bool_(False))
        return events, lost, failed is not None
