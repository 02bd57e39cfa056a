# SPDX-License-Identifier: Apache-2.0
"""The host's side of a generation: it submits the prompts, enters the scheduler's loop, and reads what came of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.cache import Cache
from kvjax.events.log import init_log
from kvjax.events.records import Status
from kvjax.model import Model, forward
from kvjax.policies.retention import is_retention
from kvjax.pools import mixed
from kvjax.serving.capacity import admission_events, most_blocks, worst_step
from kvjax.serving.host_tier import HostTier
from kvjax.serving.inputs import Inputs, bucket
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Output, Serving, Stage, init_serving
from kvjax.serving.serve import serve, serve_step
from kvjax.serving.submit import submit
from kvjax.tiered import TieredCache


def _mixed_logits(model: Model, cache: Cache, scheduler: Scheduler) -> jax.Array:
    """The logits f32[S, V] of a mixed step, with its shapes: `serve` finds the model traced."""
    spec, size = cache.state.spec, scheduler.chunk_tokens(cache.state.spec)
    none = jnp.full((min(scheduler.chunk_rows, spec.max_seqs),), -1, jnp.int32)
    view = mixed(cache.state, jnp.zeros((spec.max_seqs,), jnp.bool_), none, jnp.zeros_like(none), size)
    tokens, last = jnp.zeros((1, spec.max_seqs + size), jnp.int32), jnp.zeros((spec.max_seqs,), jnp.int32)
    return forward(model, tokens, cache.pools, view, last)[0]


_mixed_logits = OutermostJit(_mixed_logits, static_argnames="scheduler")
_init_log = OutermostJit(init_log, static_argnums=(0, 1, 2))
_submit = OutermostJit(submit, static_argnames="scheduler", donate_argnums=0)
_static, _donated = ("scheduler", "logits_fn", "fixed_steps"), ("serving", "log")
_serve = OutermostJit(serve, static_argnames=_static, donate_argnames=_donated)
_serve_step = OutermostJit(serve_step, static_argnames=_static, donate_argnames=_donated)
MIN_SLOTS = 32
MOST_SPARE = 2**18  # tokens: each has a few numbers of 4 bytes


class GenerationRunner[C: (Cache, TieredCache)]:
    """One generation, from its prompts to their outputs, turn by turn."""

    def __init__(self, inputs: Inputs[C]):
        self.inputs, self.spec, options = inputs, inputs.spec, inputs.options
        # A loop ends behind the block of steps in which it reaches its limit. A turn has room for two blocks, so that
        # a limit of k - 1 steps less is not far below what was asked for.
        k = min(options.scheduler.most_steps(self.spec), (options.steps + 1) // 2)
        self.scheduler, self.limit = dataclasses.replace(options.scheduler, k=k), np.int32(options.steps - k + 1)
        self.new: dict[int, list[int]] = {}  # output number: its tokens of the last turn
        self.closing: list[dict[str, Any]] = []  # decoded events of `close`
        self.outputs = [Output(len(prompt)) for prompt in inputs.prompts]
        self.output_of_slot, self.submitted = self._admissible(), False
        lengths = np.array([len(inputs.prompts[n]) for n in self.output_of_slot], np.int32)
        self.unlimited = lengths + inputs.max_new_tokens[self.output_of_slot]
        self.max_tokens = np.maximum(np.minimum(self.unlimited, self._most_tokens() + 1), lengths + 1)
        self.state = GenerationState(inputs, self._empty_slots())
        self.host_tier = HostTier(self.state, self.scheduler, options.steps)
        worst = worst_step(self.spec, self.scheduler) + admission_events(self.spec, self.state.serving.width)
        self.log_size = 3 * worst + options.steps * self.spec.max_seqs * len(self.spec.groups) // 2

    def _admissible(self) -> list[int]:
        """The prompts that can be computed at all, which get slots in this order; the others end here."""
        logits = _mixed_logits.eval_shape(self.inputs.model, self.inputs.cache, scheduler=self.scheduler)
        vocabulary, top = logits.shape[-1], self.inputs.options.top_logprobs
        if top > vocabulary:
            raise ValueError(f"top_logprobs: got {top}, wanted at most the vocabulary, {vocabulary}")
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

    def _most_tokens(self) -> int:
        """The most tokens of a request whose K/V fit, alone in the cache."""
        most = self.spec.max_length
        max_tokens: Any = np.int32(most + 1)  # of the host, so that nothing is compiled
        blocks_of_groups = most_blocks(self.spec, self.scheduler, max_tokens)
        for group, blocks in zip(self.inputs.cache.state.groups, blocks_of_groups, strict=True):
            if blocks > (num_blocks := int(group.num_blocks)):
                most = min(most, num_blocks * self.spec.block_size)
        return most

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
        )  # fmt: skip

    def turn(self) -> bool:
        """Enters the loop of the scheduler once, and reads what it did; returns whether there is more to do."""
        state, options = self.state, self.inputs.options
        self.new = {}
        if not self.output_of_slot:
            return False
        if not self.submitted:
            self._submit()
        self.host_tier.empty_blocks()
        log = _init_log(self.log_size, self.spec.block_size, self.spec.extra_ids)
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
        requests, row, onboard_slot, refused = self._read()
        self._update_outputs(requests)
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
        serving = self.state.serving
        arguments, behind = self.inputs.submission(self.output_of_slot, self.max_tokens, serving.requests.size)
        self.state.serving, status, _, _ = _submit(serving, scheduler=self.scheduler, **arguments)
        self.submitted = True
        reasons = np.asarray(status)[np.arange(len(behind)) - behind]  # of the first one of the fork group
        for n, code in zip(self.output_of_slot, reasons.tolist(), strict=True):
            if code != Status.OK:
                self.outputs[n].finish = Status(code).name.lower()

    def _read(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
        """`requests`, `row`, `onboard_slot` and `refused` of `Serving` as numpy arrays, by which the host decides."""
        serving = self.state.serving
        return jax.device_get((serving.requests, serving.row, serving.onboard_slot, serving.refused))

    def _update_outputs(self, requests: Any) -> None:
        """Adds the new tokens of each request, and why it is over."""
        for slot, n in enumerate(self.output_of_slot):
            output = self.outputs[n]
            if output.finish is not None or requests.stage[slot] == Stage.EMPTY:
                continue
            if new := output.update(requests, slot):
                self.new[n] = new
            if output.finish == "length" and requests.num_tokens[slot] < self.unlimited[slot]:
                full = requests.num_tokens[slot] > self.spec.max_length
                output.finish = "row_full" if full else "no_blocks"

    def close(self) -> None:
        """Releases the rows of a stream that is read no further, unless the caller has gone on with its cache."""
        if self.state.alive:
            self.state.events = self.closing
            with self.state.ctrl_c, jax.ensure_compile_time_eval():  # garbage collection may call this during a trace
                self.state.release_rows()
                self.state.publish()
