# SPDX-License-Identifier: Apache-2.0
"""The host's side of a generation: which prompt is in which row, and its output so far."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._checks import host_integers
from kvjax._compile import OutermostJit
from kvjax._methods import alive
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.events.records import Events, Status
from kvjax.model import Model, check_model
from kvjax.policies.retention import Retention
from kvjax.serving.asked import bucket, known_namespaces, of_each, prompt_ids, retentions, sampling_of, samplings
from kvjax.serving.held import Held
from kvjax.serving.loops import LogitsFn, Rows, check_cache, decode, decode_log, prefill, prefill_log, step
from kvjax.serving.output import Output
from kvjax.serving.sampling import Sampling
from kvjax.serving.steps import steps_of_a_block
from kvjax.tiered import TieredCache

_admit = OutermostJit(Cache.admit, static_argnames="room", donate_argnums=0)
_release = OutermostJit(Cache.release, donate_argnums=0)
_step = OutermostJit(step)
_prefill = OutermostJit(prefill, static_argnames=("logits_fn", "chunk"), donate_argnames=("cache", "log"))
_decode = OutermostJit(
    decode, static_argnames=("logits_fn", "steps", "k", "fixed_steps"), donate_argnames=("cache", "log")
)


class Run[C: (Cache, TieredCache)](Held[C]):
    """One generation, from its prompts to their outputs, turn by turn."""

    def __init__(
        self,
        model: Model,
        cache: C,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling | None] | None,
        seeds: Sequence[int] | None,
        stop_tokens: Sequence[int],
        namespaces: Sequence[int] | None,
        names: Namespaces | None,
        retention: Retention | Sequence[Retention | None] | None,
        clock: Callable[[], int] | None,
        logits_fn: LogitsFn | None,
        chunk: int,
        steps: int,
        k: int | None,
        fixed_steps: bool,
        log_events: bool,
    ):
        for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, wanted at least 1")
        check_model(model)
        check_cache(cache)
        super().__init__(cache, clock, log_events)
        self.blocks = {"k": steps_of_a_block(self.spec, k), "fixed_steps": fixed_steps}
        self.model, self.prompts = model, prompt_ids(prompts)
        self.max_new, self.chunk, self.steps = max_new_tokens, chunk, steps
        self.logits_fn = logits_fn
        num_prompts = len(self.prompts)
        self.sampling = samplings(sampling, num_prompts)
        self.stop = host_integers("stop_tokens", stop_tokens, np.int32, "a list of token ids")
        seeds = range(num_prompts) if seeds is None else seeds
        self.seeds = of_each("seeds", seeds, num_prompts, np.uint32, "a number")
        self.namespaces = known_namespaces(namespaces, num_prompts, names)
        self.retention = retentions(retention, num_prompts, self.spec.retention)
        self.outputs = [Output(len(prompt)) for prompt in self.prompts]
        self.live: dict[int, int] = {}  # row -> prompt, in order of admission
        self.again: set[int] = set()  # prompts that had to be put back
        self.full = False  # whether one was put back since a row was released
        self.free = np.flatnonzero(self.own).tolist()
        self.new: dict[int, list[int]] = collections.defaultdict(list)
        self.closing: list[dict[str, Any]] = []
        self.waiting = self._admissible()

    def _admissible(self) -> collections.deque[int]:
        """The prompts that can be computed at all; the others end here."""
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        _, logits, _ = _step.eval_shape(self.model, self.cache, jax.ShapeDtypeStruct((1, 1), jnp.int32), one, one)
        waiting: collections.deque[int] = collections.deque()
        for number, ids in enumerate(self.prompts):
            fits = ids.size and ids.min() >= 0 and ids.max() < logits.shape[-1]
            if not fits or ids.size > self.spec.max_length:
                self.outputs[number].finish = "row_full" if fits else "bad_request"
            else:
                waiting.append(number)
        if waiting and not self.free:
            raise ValueError("cache: got one without a free row")
        return waiting

    def turn(self) -> bool:
        """Admits prompts that fit, computes them, and decodes for some steps; returns whether there is more to do."""
        self._admit()
        if self.live:
            self._decode()
        self._release()
        return bool(self.waiting or self.live)

    def close(self) -> None:
        """Releases the rows of a stream that is read no further, unless the caller has gone on with its cache."""
        if self.live and alive((self.cache, self.host)):
            self.events = self.closing
            with self.ctrl_c:
                self._let_go()

    def _admit(self) -> None:
        """Admits waiting prompts into free rows and computes them."""
        ready = 0 if self.full and self.live else min(len(self.waiting), len(self.free))
        batch = [self.waiting.popleft() for _ in range(ready)]
        if not batch:
            return
        width = bucket(max(len(self.prompts[n]) for n in batch), self.spec.block_size)
        count = bucket(len(batch), 1)
        tokens, lengths = np.zeros((count, width), np.int32), np.zeros((count,), np.int32)
        for i, n in enumerate(batch):
            tokens[i, : len(self.prompts[n])], lengths[i] = self.prompts[n], len(self.prompts[n])
        seqs = np.asarray([*self.free[: len(batch)], *[-1] * (count - len(batch))], np.int32)
        pad = (0, count - len(batch))
        spaces, seeds = np.pad(self.namespaces[batch], pad), np.pad(self.seeds[batch], pad)
        asked = jax.tree.map(lambda x: np.pad(x[batch], (pad, *[(0, 0)] * (x.ndim - 1))), self.retention)
        # Without windows a whole prompt stays in the cache: it is reserved at once, so that none stops halfway.
        room, ends = (self.chunk, lengths) if len(self.spec.groups) > 1 else (None, None)
        events, lost = self._reserve(seqs, tokens, lengths, namespace=spaces, retention=asked, room=room)
        status = np.where(np.isin(seqs, lost), Status.NO_BLOCKS, np.asarray(events.status))
        self._enter(batch, seqs, status, np.asarray(events.cached), bool(lost))
        seqs = np.where(status == Status.OK, seqs, -1)
        self._prefill(batch, seqs, tokens, seeds, ends)

    def _reserve(self, *prompts: Any, **options: Any) -> tuple[Events, list[int]]:
        """Admits prompts, from both tiers if there are two; returns the events, and the rows that lost K/V."""
        if self.host is not None:
            return self._tiered(TieredCache.admit, *prompts, **options)
        self.cache, events = _admit(self.cache, *prompts, now=self._next(), **options)
        self._hear(events)
        return events, []

    def _keep_room(self, rows: int, tokens: int) -> None:
        """Offloads the blocks that a loop over rows would evict for so many tokens of each.

        Inside the loop they would be lost; those with children on the host would stay, and the loop find no block.
        """
        each = -(-tokens // self.spec.block_size) + 1
        self._empty_blocks(rows * each, self.spec.max_seqs * each)

    def _enter(self, batch: list[int], seqs: np.ndarray, status: np.ndarray, cached: np.ndarray, failed: bool) -> None:
        """Notes which prompts of the batch have a row now; the others wait on or end.

        If no row is live, the first prompt that got no blocks ends, unless failed moves may be the reason.
        """
        for i, n in enumerate(batch):
            if status[i] == Status.OK:
                self.free.remove(int(seqs[i]))
                self.live[int(seqs[i])] = n
                if n not in self.again:
                    self.outputs[n].cached_tokens = int(cached[i])
            elif status[i] != Status.NO_BLOCKS:
                self.outputs[n].finish = Status(int(status[i])).name.lower()
        refused = [n for i, n in enumerate(batch) if status[i] == Status.NO_BLOCKS]
        if refused and not self.live and not failed:
            self.outputs[refused.pop(0)].finish = "no_blocks"
        self.waiting.extendleft(reversed(refused))

    def _prefill(self, batch: list[int], seqs, prompts, seeds, lengths) -> None:
        """Computes the prompts of rows seqs i32[R], -1 for none; if blocks run out, puts the last ones back."""
        while np.any(seqs >= 0):
            if lengths is not None:  # without windows the rows have all their blocks
                self._keep_room(int(np.sum(seqs >= 0)), prompts.shape[1])
            log = prefill_log(self.spec, *prompts.shape)
            sampling = sampling_of(self.sampling, batch, range(len(batch)), len(seqs))
            stop = None if sampling is None else self.stop  # what it does not need would be another program
            self.cache, log, tokens, logprobs = _prefill(
                self.model, self.cache, seqs, prompts, seeds, log, chunk=self.chunk, lengths=lengths,
                sampling=sampling, stop=stop, logits_fn=self.logits_fn, now=self._next(),
            )  # fmt: skip
            self._hear(log)
            tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
            for i in np.flatnonzero(tokens >= 0):
                self._take(batch[i], int(tokens[i]), float(logprobs[i]))
            seqs = np.where(tokens < 0, seqs, -1)
            if np.any(seqs >= 0):
                last = np.flatnonzero(seqs >= 0)[-1]
                self._put_back(int(seqs[last]))
                seqs[last] = -1

    def _put_back(self, row: int) -> None:
        """Frees a row that finds no block for its next chunk; its prompt waits, or ends if it was alone."""
        number = self.live.pop(row)
        self._free([row])
        self.again.add(number)
        self.full = True
        if self.live:
            self.waiting.appendleft(number)
        else:
            self.outputs[number].finish = "no_blocks"

    def _decode(self) -> None:
        """One jitted loop over the live rows."""
        live = {row: n for row, n in self.live.items() if self.outputs[n].finish is None}
        if not live:
            return
        token, active, left, seed, prompt = (np.zeros((self.spec.max_seqs,), t) for t in ("i4", "?", "i4", "u4", "i4"))
        for row, n in live.items():
            token[row], active[row] = self.outputs[n].tokens[-1], True
            left[row], seed[row] = self.max_new - len(self.outputs[n].tokens), self.seeds[n]
            prompt[row] = self.outputs[n].prompt_tokens
        self._keep_room(len(live), self.steps)
        rows = Rows(*map(jnp.asarray, (token, active, left, seed, prompt)))
        sampling = sampling_of(self.sampling, list(live.values()), list(live), self.spec.max_seqs)
        log = decode_log(self.spec, self.steps)
        self.cache, _, log, decoded = _decode(
            self.model, self.cache, rows, log, steps=self.steps, stop=self.stop, sampling=sampling,
            logits_fn=self.logits_fn, now=self._next(), **self.blocks,
        )  # fmt: skip
        self._hear(log)
        tokens, logprobs = np.asarray(decoded.tokens), np.asarray(decoded.logprobs)
        for row, n in live.items():
            for token, logprob in zip(tokens[row], logprobs[row], strict=True):
                if token >= 0:
                    self._take(n, int(token), float(logprob))
        if bool(decoded.out_of_blocks):
            last = [n for n in live.values() if self.outputs[n].finish is None][-1]
            self.outputs[last].finish = "no_blocks"

    def _release(self) -> None:
        """Frees the rows of finished prompts."""
        rows = [row for row, n in self.live.items() if self.outputs[n].finish]
        if rows:
            self._free(rows)
            self.live = {row: n for row, n in self.live.items() if row not in rows}
            self.full = False

    def _free(self, rows: list[int]) -> None:
        seqs = np.asarray([*rows, *[-1] * (bucket(len(rows), 1) - len(rows))], np.int32)
        self.cache, events = _release(self.cache, seqs, now=self._next())
        self._hear(events)
        self.free += rows

    def _take(self, number: int, token: int, logprob: float) -> None:
        output = self.outputs[number]
        output.tokens.append(token)
        output.logprobs.append(logprob)
        self.new[number].append(token)
        if token in self.stop:
            output.finish = "stop"
        elif len(output.tokens) >= self.max_new:
            output.finish = "length"
        elif output.prompt_tokens + len(output.tokens) > self.spec.max_length:
            output.finish = "row_full"
