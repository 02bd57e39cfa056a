# SPDX-License-Identifier: Apache-2.0
"""Connects a generation with a store: reads prefixes ahead, adopts them between loops, and writes computed blocks.

submit    hashes the prompts, in their order, and starts to read stored blocks missing in the cache
adopt     before a loop, adopts the blocks read for prompts close to admission (the first loop waits for them)
write     after a loop, copies the newly stored blocks, before the next loop takes the pools
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from kvjax._compile import OutermostJit
from kvjax.events.log import EventLog
from kvjax.events.records import EventKind
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.turns import Job
from kvjax.state import NO_BLOCK, CacheState, Text
from kvjax.stores.adoption import adopt_prefix, compile_adoption, widths
from kvjax.stores.disk import DiskStore
from kvjax.stores.values import Block
from kvjax.verbs.admit import lookup

Words = list[np.ndarray]
Place = tuple[int, int]  # (group, column) of a block in a prompt
_SLICE = 0.05  # seconds of waiting between two checks for Ctrl-C


@functools.partial(OutermostJit, static_argnames="alignment_tokens")
def _cached_tokens(state: CacheState, tokens: Any, length: Any, namespace: Any, alignment_tokens: int | None) -> Any:
    return lookup(state, tokens, length, namespace=namespace, alignment_tokens=alignment_tokens).cached_tokens


@dataclasses.dataclass(eq=False)
class Prefix:
    """The stored part of a prompt, on its way into the cache.

    Attributes:
      tokens: i32[n]; the prompt.
      namespace: the prompt's namespace.
      blocks: the whole blocks of the prompt.
      deadline: time of `time.monotonic` after which missing blocks are computed.
      end: number of leading blocks that should be in the cache; -1 before this is planned.
      reads: reads by (group, column), in the order in which they start; None for a read that has not started.
    """

    tokens: np.ndarray
    namespace: int
    blocks: list[Block]
    deadline: float
    end: int = -1
    reads: dict[Place, Future[Words | None] | None] = dataclasses.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all reads of the prompt are finished."""
        return self.end >= 0 and not self.reads


class StoredPrefixes:
    """The reads and writes of a generation in its store."""

    def __init__(self, store: DiskStore, state: GenerationState[Any], scheduler: Scheduler):
        self.store = store
        self.state = state
        self.scheduler = scheduler
        self.spec = state.cache.state.spec
        self.block_size = self.spec.block_size
        self.groups = [group for group in range(len(self.spec.groups)) if store.values.has_bytes(group)]

        self.prefixes: dict[int, Prefix] = {}  # by the prompt's number
        self.waiting: dict[int, Prefix] = {}  # prefixes of prompts not yet admitted, in the order of their reads
        self.reading: set[tuple[int, bytes]] = set()  # (group, hash) of all reads; a block is read for a single prompt
        self.adopted: set[bytes] = set()  # hashes of blocks that came from the store
        self.hashes: dict[tuple[int, int], bytes] = {}  # by (block, generation) of the first group
        self.counted: set[int] = set()  # numbers of outputs whose stored tokens are counted

    def compile(self, call: Any) -> None:
        """Compiles the programs for reads and writes, and leaves the cache as it is. See `adopt` for `call`."""
        self._cached_tokens(np.zeros((0,), np.int32), 0)
        state = self.state.cache.state  # operations outside a program are compiled too
        jax.block_until_ready((state.groups[0].available, [group.pool_row(group.ids) for group in state.groups]))
        for columns in widths():
            call(compile_adoption, columns)
            if columns >= self.spec.max_blocks_per_seq:
                return

    def _cached_tokens(self, prompt: np.ndarray, namespace: int) -> int:
        """The number of cached tokens of a prompt."""
        tokens = np.zeros((self.state.serving.width,), np.int32)
        tokens[: len(prompt)] = prompt
        state = self.state.cache.state
        length = np.int32(len(prompt))
        return int(_cached_tokens(state, tokens, length, np.int32(namespace), self.scheduler.alignment_tokens))

    def begin(self, jobs: Sequence[Job]) -> None:
        """Starts reads for the prompts of requests, in this order, and skips known prompts."""
        new_jobs = {job.leader.number: job for job in jobs if job.leader.number not in self.prefixes}
        if not new_jobs:
            return
        if self.store.readonly:
            self.store.refresh()
        deadline = time.monotonic() + self.store.read_timeout_ms / 1000
        for prompt, job in new_jobs.items():
            blocks = self.store.blocks(job.tokens, job.namespace)
            prefix = Prefix(job.tokens, job.namespace, blocks, deadline)
            self.prefixes[prompt] = prefix
            self.waiting[prompt] = prefix
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Starts reads in the order of the prompts, as many as may be in flight."""
        num_bytes = self.store.values.sizes  # the bytes of a block, for each group
        in_flight = 0
        for prefix in self.waiting.values():
            in_flight += sum(num_bytes[group] for (group, _), future in prefix.reads.items() if future is not None)
        for prefix in self.waiting.values():
            if prefix.end < 0:
                self._plan(prefix)
            for (group, column), future in prefix.reads.items():
                if future is None:
                    in_flight += num_bytes[group]
                    if in_flight > self.store.max_in_flight:
                        return
                    prefix.reads[group, column] = self.store.read(prefix.blocks[column], group)

    def _plan(self, prefix: Prefix) -> None:
        """Chooses how many leading blocks of a prompt should be in the cache, and which of them to read."""
        prefix.end = 0
        if not any(self.store.has(block, group) for block in prefix.blocks for group in self.groups):
            return
        cached_tokens = self._cached_tokens(prefix.tokens, prefix.namespace)
        num_cached = cached_tokens // self.block_size
        for end in range(self._stored_end(prefix, num_cached), num_cached, -1):
            reused_tokens = self._reused_tokens(end, len(prefix.tokens))
            if reused_tokens <= cached_tokens:
                continue
            missing = self._missing(reused_tokens, num_cached, end)
            if all(self.store.has(prefix.blocks[column], group) for group, column in missing):
                prefix.end = end
                self._add_reads(prefix, missing)
                return

    def _stored_end(self, prefix: Prefix, num_cached: int) -> int:
        """The number of leading blocks of the first group, in the cache or in the store."""
        end = num_cached
        while end < len(prefix.blocks) and self.store.has(prefix.blocks[end], 0):
            end += 1
        return end

    def _missing(self, reused_tokens: int, num_cached: int, end: int) -> list[Place]:
        """The (group, column) of blocks that the cache may lack to reuse this many tokens, in `end` blocks."""
        first_group = [(0, column) for column in range(num_cached, end)]
        return [*first_group, *self.spec.seen_columns(reused_tokens, end)]

    def _add_reads(self, prefix: Prefix, places: Iterable[Place]) -> None:
        """Adds reads for a prompt, except for blocks that are being read for another prompt."""
        for group, column in places:
            key = group, prefix.blocks[column].hash
            if group in self.groups and key not in self.reading:
                self.reading.add(key)
                prefix.reads[group, column] = None

    def _reused_tokens(self, end: int, length: int) -> int:
        """The tokens of `end` cached blocks reused by a prompt of `length` tokens, or 0 if reuse may not end there."""
        alignment = self.scheduler.alignment_tokens
        tokens = end * self.block_size
        if tokens < length:
            return tokens if alignment is None or tokens % alignment == 0 else 0
        return length - 1 if alignment is None and self.spec.partial_reuse else 0

    def adopt(self, call: Any, blocks_ahead: int = 0, wait_for: int = 0) -> None:
        """Adopts the blocks read for the prompts likely to be admitted next.

        Args:
          call: makes the moves and the events of a verb, like `HostTier.call`.
          blocks_ahead: number of blocks that running requests may still take.
          wait_for: number of first prompts to wait for, each until its deadline.
        """
        if not self.waiting:
            return
        available = int(self.state.cache.state.groups[0].available)
        num_needed = blocks_ahead
        for position, prefix in enumerate(self.waiting.values()):
            num_needed += -(-len(prefix.tokens) // self.block_size)
            if num_needed > available:
                break
            self._adopt_read(prefix, call, waits=position < wait_for)
        self._read_ahead()

    def _adopt_read(self, prefix: Prefix, call: Any, waits: bool) -> None:
        """Adopts the blocks read for a prompt, up to its first unfinished read. If `waits`, waits to the deadline."""
        has_ended = True
        while has_ended and not prefix.is_done:
            self._read_ahead()
            has_ended = self._reads_ended(prefix, waits)
            if has_ended or waits:
                self._take(prefix, call, is_late=not has_ended)

    def _reads_ended(self, prefix: Prefix, waits: bool) -> bool:
        """Whether all started reads of a prompt have ended. If `waits`, waits until the deadline."""
        futures = [future for future in prefix.reads.values() if future is not None]
        for future in futures:
            while not future.done():
                remaining = prefix.deadline - time.monotonic()
                if not waits or remaining <= 0:
                    return False
                wait([future], min(remaining, _SLICE))
                self.state.ctrl_c.act()
        return bool(futures)  # False if reads of other prompts leave no room

    def _take(self, prefix: Prefix, call: Any, is_late: bool) -> None:
        """Adopts the blocks read for a prompt. If some are missing, plans again, or gives up if it is late."""
        started = [place for place, future in prefix.reads.items() if future is not None]
        words = {place: self._end_read(prefix, *place) for place in started}
        arrived = {place: block_words for place, block_words in words.items() if block_words is not None}
        is_adopted = not arrived or self._adopt(prefix, arrived, call)
        if is_late or not is_adopted:
            self._give_up(prefix)
        elif len(arrived) < len(words):
            self._give_up(prefix)
            self._plan(prefix)

    def _end_read(self, prefix: Prefix, group: int, column: int) -> Words | None:
        """Ends a read of a prompt. Returns its words, or None if they have not arrived."""
        self.reading.discard((group, prefix.blocks[column].hash))
        future = prefix.reads.pop((group, column))
        if future is None or future.cancel() or not future.done():  # a closed store has cancelled it
            return None
        return future.result()

    def _give_up(self, prefix: Prefix) -> None:
        """Ends the remaining reads of a prompt, so it is computed."""
        for place in list(prefix.reads):
            self._end_read(prefix, *place)

    def _adopt(self, prefix: Prefix, words: dict[Place, Words], call: Any) -> bool:
        """Adopts blocks of a prompt. Returns whether there was room for them."""
        end = prefix.end
        length = end * self.block_size
        have = np.zeros((len(self.spec.groups), end), np.bool_)
        have[[group for group in range(len(have)) if group not in self.groups]] = True
        have[tuple(np.array(list(words)).T)] = True

        def read(group: int, columns: list[int]) -> dict[int, Words]:
            self.adopted.update(prefix.blocks[column].hash for column in columns)
            return {column: words.get((group, column), []) for column in columns}

        tokens: Any = np.asarray(prefix.tokens[:length], np.int32).reshape(end, self.block_size)
        events, *_ = call(adopt_prefix, Text(tokens, None), have, read, length=length, namespace=prefix.namespace)
        return bool(events.ok)

    def has_read(self, prompt: int) -> bool:
        """Whether a prompt has no more reads to wait for, or its deadline has passed."""
        prefix = self.waiting.get(prompt)
        if prefix is not None and prefix.end >= 0 and time.monotonic() > prefix.deadline:
            self._give_up(prefix)
        return prefix is None or prefix.is_done

    def keep_only(self, prompts: set[int]) -> None:
        """Forgets all prompts except these."""
        self.drop(self.prefixes.keys() - prompts)
        self.prefixes = {prompt: prefix for prompt, prefix in self.prefixes.items() if prompt in prompts}

    def drop(self, prompts: Iterable[int] | None = None) -> None:
        """Drops the reads of admitted or finished prompts. None drops all reads."""
        for prompt in list(self.waiting if prompts is None else prompts):
            if (prefix := self.waiting.pop(prompt, None)) is not None:
                self._give_up(prefix)

    def after_loop(self, log: EventLog, admitted: Sequence[Job]) -> None:
        """Counts stored tokens, and writes the blocks stored by the loop.

        Args:
          log: events of the loop.
          admitted: jobs that no longer wait. A finished job is passed only once.
        """
        self.drop(job.leader.number for job in admitted)
        for job in admitted:
            self._count_stored(job)
        self.write(log)
        for job in admitted:
            if job.output.finish is not None:
                self.counted.discard(job.number)
                text = np.concatenate([job.tokens, np.asarray(job.output.tokens, np.int32)])
                self.store.touch(self.store.blocks(text, job.namespace))
        for hashes in (self.adopted, self.hashes):
            if len(hashes) > 4 * self.spec.groups[0].num_ids:  # most of these blocks are gone
                hashes.clear()

    def _count_stored(self, job: Job) -> None:
        """Counts the cached tokens of a job from the store, at its first admission."""
        if job.number in self.counted:
            return
        self.counted.add(job.number)
        blocks = self.prefixes[job.leader.number].blocks
        cached_tokens = job.output.cached_tokens
        for column, block in enumerate(blocks):
            if block.hash in self.adopted:
                job.output.stored_tokens += min(max(cached_tokens - column * self.block_size, 0), self.block_size)

    def write(self, log: EventLog) -> None:
        """Writes the whole blocks stored by a program, if the cache still has them."""
        records = np.asarray(log.records)[: int(log.appended)]
        is_stored = records[:, 0] == EventKind.STORED
        is_full = records[:, 6] == self.block_size
        is_whole = is_stored & is_full & (records[:, 7] == 0)  # on the device
        if not is_whole.any():
            return
        texts = np.stack([np.asarray(part).astype("<i4") for part in log.text.parts().values()], axis=1)
        state = self.state.cache.state
        for group_index, group in enumerate(state.groups):
            pool_rows = np.asarray(group.pool_row(group.ids))
            fill = np.asarray(group.blocks.fill)
            generations = np.asarray(group.blocks.generation)
            written = dict[Block, int]()
            for index in np.flatnonzero(is_whole & (records[:, 1] == group_index)).tolist():
                block, generation, *parent = records[index, 2:6].tolist()
                if generations[block] == generation and fill[block] == self.block_size:
                    stored = self.store.values.block(self._hash(state, *parent), texts[index].tobytes())
                    written[stored] = int(pool_rows[block])
                    if group_index == 0:
                        self.hashes[block, generation] = stored.hash
                        self.adopted.discard(stored.hash)
            # No block has gone to the host yet, because this happens only between loops.
            self.store.write(self.state.cache.pools, group_index, list(written), list(written.values()))

    def _hash(self, state: CacheState, block: int, generation: int) -> bytes:
        """The hash of the prefix ending in a node of the first group. (NO_BLOCK, namespace) is a root."""
        above = list[tuple[int, int]]()
        while block != NO_BLOCK and (block, generation) not in self.hashes:
            above.append((block, generation))
            block, generation = np.asarray(state.groups[0].blocks.parent)[block].tolist()
        prefix_hash = self.store.root(generation) if block == NO_BLOCK else self.hashes[block, generation]
        for node in reversed(above):
            parts = state.groups[0].blocks.text.parts().values()
            text = b"".join(np.asarray(part)[node[0]].astype("<i4").tobytes() for part in parts)
            prefix_hash = self.store.values.block(prefix_hash, text).hash
            self.hashes[node] = prefix_hash
        return prefix_hash
