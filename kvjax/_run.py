# SPDX-License-Identifier: Apache-2.0
"""The host's side of a generation: which prompt is in which row, and what has come of it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.engine import Rows, decode, decode_log, prefill, prefill_log, step
from kvjax.events import Events, Status, to_list
from kvjax.paired import Cache
from kvjax.retention import UNSTATED, Retention
from kvjax.tiered import FailedTransfer, TieredCache

_STATIC = ("sampling", "logits_fn")
_admit = jax.jit(Cache.admit, static_argnames="room", donate_argnums=0)
_release = jax.jit(Cache.release, donate_argnums=0)
_step = jax.jit(step)
_prefill = jax.jit(prefill, static_argnames=(*_STATIC, "chunk"), donate_argnames=("cache", "log"))
_decode = jax.jit(decode, static_argnames=(*_STATIC, "steps"), donate_argnames=("cache", "log"))


@dataclasses.dataclass
class Output:
    """One prompt's result.

    Attributes:
      tokens: what was generated, the stop token included.
      logprobs: their log-probabilities.
      prompt_tokens: tokens of the prompt.
      cached_tokens: those that were found in the cache and not computed, when it was first admitted.
      finish: "stop" (a stop token), "length" (as many as wanted), "row_full", "no_blocks" or "bad_request"; None
        while it goes on.
    """

    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    finish: str | None = None


class Run:
    """One generation, from its prompts to their outputs; `generation.stream` calls `admit`, `decode` and `release`."""

    def __init__(self, model, cache, prompts, max_new_tokens, stop, seeds, namespaces, retention, clock, log_events):
        self.host = cache.host if isinstance(cache, TieredCache) else None
        cache = cache.cache if isinstance(cache, TieredCache) else cache
        spec = cache.state.spec
        self.model, self.cache, self.spec, self.prompts = model, cache, spec, prompts
        self.stop, self.max_new, self.log_events = stop, max_new_tokens, log_events
        self.seeds = np.asarray(range(len(prompts)) if seeds is None else seeds, np.uint32)
        self.namespaces = np.asarray([0] * len(prompts) if namespaces is None else namespaces, np.int32)
        for name, given in (("seeds", self.seeds), ("namespaces", self.namespaces)):
            if given.shape != (len(prompts),):
                raise ValueError(f"{name}: got {given.size}, wanted one for each of {len(prompts)} prompts")
        self.retention, self.clock = _of_each(retention, len(prompts), spec.retention), clock
        self.outputs = [Output(len(prompt)) for prompt in prompts]
        self.live: dict[int, int] = {}  # row -> prompt, in order of admission
        self.again: set[int] = set()  # prompts that had to be put back
        self.full = False  # whether one was put back since a row was released
        self.free = np.flatnonzero(np.asarray(cache.state.seqs.length) == 0).tolist()
        if not self.free:
            raise ValueError("cache: got one without a free row")
        self.new: dict[int, list[int]] = {}
        self.events: list[dict[str, Any]] = []
        vocab = self._vocabulary()
        self.waiting: collections.deque[int] = collections.deque()
        for number, prompt in enumerate(prompts):
            fits = len(prompt) and min(prompt) >= 0 and max(prompt) < vocab
            if not fits or len(prompt) > spec.max_length:
                self.outputs[number].finish = "row_full" if fits else "bad_request"
            else:
                self.waiting.append(number)

    def _vocabulary(self) -> int:
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        _, logits, _ = _step.eval_shape(self.model, self.cache, jax.ShapeDtypeStruct((1, 1), jnp.int32), one, one)
        return logits.shape[-1]

    def admit(self, chunk: int, options: dict[str, Any]) -> None:
        """Admits waiting prompts into free rows and computes them."""
        ready = 0 if self.full and self.live else min(len(self.waiting), len(self.free))
        batch = [self.waiting.popleft() for _ in range(ready)]
        if not batch:
            return
        width = _bucket(max(len(self.prompts[n]) for n in batch), self.spec.block_size)
        count = _bucket(len(batch), 1)
        tokens, lengths = np.zeros((count, width), np.int32), np.zeros((count,), np.int32)
        for i, n in enumerate(batch):
            tokens[i, : len(self.prompts[n])], lengths[i] = self.prompts[n], len(self.prompts[n])
        seqs = np.asarray([*self.free[: len(batch)], *[-1] * (count - len(batch))], np.int32)
        pad = (0, count - len(batch))
        spaces, seeds = np.pad(self.namespaces[batch], pad), np.pad(self.seeds[batch], pad)
        asked = None
        if self.retention is not None:
            ranges, decode = self.retention.ranges[batch], self.retention.decode[batch]
            asked = Retention(np.pad(ranges, (pad, (0, 0), (0, 0))), np.pad(decode, (pad, (0, 0))))
        # Without windows all of a prompt has to stay: it is reserved at once, and nobody stops halfway.
        windows = len(self.spec.groups) > 1
        events, status = self._admitted(
            seqs, tokens, lengths, namespace=spaces, retention=asked, now=self.now(), room=chunk if windows else None
        )
        self._enter(batch, seqs, status, np.asarray(events.cached))
        seqs = np.where(status == Status.OK, seqs, -1)
        options = {"lengths": lengths if windows else None, "chunk": chunk, **options}
        self._prefill(batch, seqs, tokens, seeds, options)

    def _admitted(self, seqs: np.ndarray, *prompts: Any, **options: Any) -> tuple[Events, np.ndarray]:
        """Admits prompts, from both tiers if there are two; the events, and what came of each."""
        lost: list[int] = []
        if self.host is None:
            self.cache, events = _admit(self.cache, seqs, *prompts, **options)
            self._hear(events)
        else:
            try:
                tiered, events = TieredCache(self.cache, self.host).admit(seqs, *prompts, **options)
                self._hear(events)
            except FailedTransfer as failure:  # its rows wait, and find less the next time
                tiered, events, lost = failure.tiered, failure.events, failure.lost
                self._hear(events)
                self._hear(failure.removed)
            self.cache, self.host = tiered.cache, tiered.host
        return events, np.where(np.isin(seqs, lost), Status.NO_BLOCKS, np.asarray(events.status))

    def _keep_room(self, steps: int, rows: int) -> None:
        """Offloads what the loop would evict, which would be lost."""
        for group, spec in enumerate(self.spec.groups):
            if self.host is None or not spec.num_host_blocks:
                continue
            each = -(-steps // self.spec.block_size) + 1
            if int(self.cache.state.groups[group].num_empty) < rows * each:
                most = min(self.spec.max_seqs * each, spec.num_blocks)
                tiered = TieredCache(self.cache, self.host)
                try:
                    tiered, events = tiered.watermark(rows * each, most=most, now=self.now(), group=group)
                except FailedTransfer as failure:
                    tiered, events = failure.tiered, failure.events
                    self._hear(events)
                    events = failure.removed
                self._hear(events)
                self.cache, self.host = tiered.cache, tiered.host

    @property
    def result(self) -> Any:
        """The cache as it is now, of the kind that was given."""
        return self.cache if self.host is None else TieredCache(self.cache, self.host)

    def _enter(self, batch: list[int], seqs: np.ndarray, status: np.ndarray, cached: np.ndarray) -> None:
        """Notes which prompts of the batch have a row now; the others wait on or end."""
        for i, n in enumerate(batch):
            if status[i] == Status.OK:
                self.free.remove(int(seqs[i]))
                self.live[int(seqs[i])] = n
                if n not in self.again:
                    self.outputs[n].cached_tokens = int(cached[i])
            elif status[i] != Status.NO_BLOCKS:
                self.outputs[n].finish = Status(int(status[i])).name.lower()
        refused = [n for i, n in enumerate(batch) if status[i] == Status.NO_BLOCKS]
        if refused and not self.live:
            self.outputs[refused.pop(0)].finish = "no_blocks"
        self.waiting.extendleft(reversed(refused))

    def _prefill(self, batch: list[int], seqs, prompts, seeds, options: dict[str, Any]) -> None:
        """Computes the prompts of rows seqs i32[R], -1 for none; if blocks run out, without those that came last."""
        while np.any(seqs >= 0):
            log = prefill_log(self.spec, *prompts.shape)
            self.cache, log, tokens, logprobs = _prefill(
                self.model, self.cache, seqs, prompts, seeds, log, now=self.now(), **options
            )
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

    def decode(self, steps: int, options: dict[str, Any]) -> None:
        """One jitted loop over the live rows."""
        live = {row: n for row, n in self.live.items() if self.outputs[n].finish is None}
        if not live:
            return
        token, active, left, seed = (np.zeros((self.spec.max_seqs,), t) for t in ("i4", "?", "i4", "u4"))
        for row, n in live.items():
            token[row], active[row] = self.outputs[n].tokens[-1], True
            left[row], seed[row] = self.max_new - len(self.outputs[n].tokens), self.seeds[n]
        self._keep_room(steps, len(live))
        rows = Rows(*map(jnp.asarray, (token, active, left, seed)))
        stop = np.asarray(self.stop, np.int32)
        log = decode_log(self.spec, steps)
        self.cache, _, log, decoded = _decode(
            self.model, self.cache, rows, log, steps=steps, stop=stop, now=self.now(), **options
        )
        self._hear(log)
        tokens, logprobs = np.asarray(decoded.tokens), np.asarray(decoded.logprobs)
        for row, n in live.items():
            for token, logprob in zip(tokens[row], logprobs[row], strict=True):
                if token >= 0:
                    self._take(n, int(token), float(logprob))
        if bool(decoded.out_of_blocks):
            last = [n for n in live.values() if self.outputs[n].finish is None][-1]
            self.outputs[last].finish = "no_blocks"

    def release(self) -> None:
        """Frees the rows of finished prompts."""
        rows = [row for row, n in self.live.items() if self.outputs[n].finish]
        if rows:
            self._free(rows)
            self.live = {row: n for row, n in self.live.items() if row not in rows}
            self.full = False

    def _free(self, rows: list[int]) -> None:
        seqs = np.asarray([*rows, *[-1] * (_bucket(len(rows), 1) - len(rows))], np.int32)
        self.cache, events = _release(self.cache, seqs, now=self.now())
        self._hear(events)
        self.free += rows

    def now(self) -> np.int32:
        """The clock's reading; only differences count, so it may be of any size."""
        return np.uint32(0 if self.clock is None else self.clock() & 0xFFFFFFFF).view(np.int32)

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

    def _hear(self, events: Any) -> None:
        if self.log_events:
            self.events += to_list(events)


def _of_each(retention: Any, prompts: int, possible: bool) -> Retention | None:
    """The prompts' retentions as one: ranges [prompts, K, 4], decode [prompts, 2]; None if nothing is said."""
    given = [retention] * prompts if retention is None or isinstance(retention, Retention) else list(retention)
    if len(given) != prompts:
        raise ValueError(f"retention: got {len(given)}, wanted one for each of {prompts} prompts")
    if all(one is None for one in given):
        return None
    if not possible:
        raise ValueError("retention: got one, wanted None (the spec was made with retention=False)")
    each = [Retention.of() if one is None else one for one in given]
    ranges = np.full((prompts, _bucket(max(len(one.ranges) for one in each), 1), 4), UNSTATED, np.int32)
    ranges[:, :, :2] = 0  # empty ranges, so that prompts with few and with many share programs
    for i, one in enumerate(each):
        ranges[i, : len(one.ranges)] = one.ranges
    return Retention(ranges, np.stack([np.asarray(one.decode, np.int32) for one in each]))


def _bucket(size: int, least: int) -> int:
    """`size` rounded up to `least` times a power of two, so that few shapes are compiled."""
    return least << max(-(-size // least) - 1, 0).bit_length()
