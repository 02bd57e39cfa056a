# SPDX-License-Identifier: Apache-2.0
"""A generation and a store: prefixes are read ahead and adopted between loops; what a loop has computed is written.

submit    prompts are hashed, in their order, and what the cache lacks and the store has begins to be read
adopt     before a loop, what has come is adopted for prompts that can be admitted soon; the first loop waits for it
write     after a loop, blocks that it stored are copied out, before the next loop takes the pools
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
_SLICE = 0.05  # seconds of waiting between two looks for Ctrl-C


@functools.partial(OutermostJit, static_argnames="alignment_tokens")
def _cached_tokens(state: CacheState, tokens: Any, length: Any, namespace: Any, alignment_tokens: int | None) -> Any:
    return lookup(state, tokens, length, namespace=namespace, alignment_tokens=alignment_tokens).cached_tokens


@dataclasses.dataclass(eq=False)
class Prefix:
    """The stored part of one prompt, on its way into the cache.

    Attributes:
      tokens: i32[n]; the prompt.
      namespace: of the prompt.
      blocks: its whole blocks.
      deadline: when it is computed without what has not come by then; of `time.monotonic`.
      end: how many of them are to be in the cache; -1: not planned yet.
      reads: (group, column) of the blocks to read, in this order: the read, or None until it starts.
    """

    tokens: np.ndarray
    namespace: int
    blocks: list[Block]
    deadline: float
    end: int = -1
    reads: dict[tuple[int, int], Future[Words | None] | None] = dataclasses.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether nothing is read for it any more."""
        return self.end >= 0 and not self.reads


class StoredPrefixes:
    """The reads of a generation from its store, and its writes to it."""

    def __init__(self, store: DiskStore, state: GenerationState[Any], scheduler: Scheduler):
        self.store, self.state, self.scheduler = store, state, scheduler
        self.spec = state.cache.state.spec
        self.size = self.spec.block_size
        self.groups = [number for number in range(len(self.spec.groups)) if store.values.has_bytes(number)]
        self.prefixes: dict[int, Prefix] = {}  # by the number that the caller has given each prompt
        self.waiting: dict[int, Prefix] = {}  # those of prompts that were not admitted yet, in the order of their reads
        self.reading: set[tuple[int, bytes]] = set()  # (group, hash) of all reads; each is for one prompt
        self.adopted: set[bytes] = set()  # hashes of blocks that came from the store
        self.hashes: dict[tuple[int, int], bytes] = {}  # of the first group's nodes (block, generation)
        self.counted: set[int] = set()  # outputs

    def compile(self, call: Any) -> None:
        """Compiles all that reads and writes; `call` is as of `adopt`. The cache stays as it is."""
        self._cached_tokens(np.zeros((0,), np.int32), 0)
        state = self.state.cache.state  # operations outside a program are compiled too
        jax.block_until_ready((state.groups[0].available, [group.pool_row(group.ids) for group in state.groups]))
        for columns in widths():
            call(compile_adoption, columns)
            if columns >= self.spec.max_blocks_per_seq:
                return

    def _cached_tokens(self, prompt: np.ndarray, namespace: int) -> int:
        """The tokens of a prompt that the cache has."""
        tokens = np.zeros((self.state.serving.width,), np.int32)
        tokens[: len(prompt)] = prompt
        options = np.int32(len(prompt)), np.int32(namespace), self.scheduler.alignment_tokens
        return int(_cached_tokens(self.state.cache.state, tokens, *options))

    def begin(self, jobs: Sequence[Job]) -> None:
        """Starts to read for the prompts of requests, in this order, that are not known yet."""
        new = {job.leader.number: job for job in jobs if job.leader.number not in self.prefixes}
        if not new:
            return
        if self.store.readonly:
            self.store.refresh()
        deadline = time.monotonic() + self.store.read_timeout_ms / 1000
        for n, job in new.items():
            blocks = self.store.blocks(job.tokens, job.namespace)
            self.prefixes[n] = self.waiting[n] = Prefix(job.tokens, job.namespace, blocks, deadline)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Starts reads in the order of the prompts, as many as may be in flight."""
        sizes, reads = self.store.values.sizes, [prefix.reads for prefix in self.waiting.values()]
        in_flight = sum(sizes[number] for own in reads for (number, _), future in own.items() if future is not None)
        for prefix in self.waiting.values():
            if prefix.end < 0:
                self._plan(prefix)
            for (number, column), future in prefix.reads.items():
                if future is None:
                    in_flight += sizes[number]
                    if in_flight > self.store.max_in_flight:
                        return
                    prefix.reads[number, column] = self.store.read(prefix.blocks[column], number)

    def _plan(self, prefix: Prefix) -> None:
        """Finds how much of a prompt the cache can have with the store's help, and what is to be read for it."""
        prefix.end, blocks, has = 0, prefix.blocks, self.store.has
        if not any(has(block, number) for block in blocks for number in self.groups):
            return
        cached = self._cached_tokens(prefix.tokens, prefix.namespace)
        whole = cached // self.size
        reached = whole
        while reached < len(blocks) and has(blocks[reached], 0):
            reached += 1
        for end in range(reached, whole, -1):
            used = self._reused(end, len(prefix.tokens))
            if used <= cached:
                continue
            wanted = [*((0, column) for column in range(whole, end)), *self.spec.seen_columns(used, end)]
            if all(has(blocks[column], number) for number, column in wanted):
                prefix.end = end
                for number, column in wanted:
                    key = number, blocks[column].hash
                    if number in self.groups and key not in self.reading:
                        self.reading.add(key)
                        prefix.reads[number, column] = None
                return

    def _reused(self, end: int, length: int) -> int:
        """The tokens of a prompt that are reused if `end` blocks of it are cached; 0 if that is no end of a reuse."""
        tokens, alignment = end * self.size, self.scheduler.alignment_tokens
        if tokens < length:
            return tokens if alignment is None or tokens % alignment == 0 else 0
        return length - 1 if alignment is None and self.spec.partial_reuse else 0

    def adopt(self, call: Any, blocks_ahead: int = 0, wait_for: int = 0) -> None:
        """Adopts what has been read for prompts that are likely to be admitted next.

        Args:
          call: makes the moves and the events of a verb, as `HostTier.call`.
          blocks_ahead: blocks that running requests may still take.
          wait_for: for so many prompts it waits, until their deadline.
        """
        if not self.waiting:
            return
        available, need = int(self.state.cache.state.groups[0].available), blocks_ahead
        for at, prefix in enumerate(self.waiting.values()):
            need += -(-len(prefix.tokens) // self.size)
            if need > available:
                break
            is_first, has_come = at < wait_for, True
            while has_come and not prefix.is_done:
                self._read_ahead()
                has_come = self._has_come(prefix, wait_for_it=is_first)
                if has_come or is_first:
                    self._take(prefix, call, is_late=not has_come)
        self._read_ahead()

    def _has_come(self, prefix: Prefix, wait_for_it: bool) -> bool:
        """Whether all reads that were started for a prompt are over; waits until the deadline."""
        futures = [future for future in prefix.reads.values() if future is not None]
        for future in futures:
            while not future.done():
                left = prefix.deadline - time.monotonic()
                if not wait_for_it or left <= 0:
                    return False
                wait([future], min(left, _SLICE))
                self.state.ctrl_c.act()
        return bool(futures)  # others may have what may be in flight

    def _take(self, prefix: Prefix, call: Any, is_late: bool) -> None:
        """Adopts what has come for a prompt; if something is missing, plans anew, or drops the rest if it is late."""
        started = [where for where, future in prefix.reads.items() if future is not None]
        words = {where: self._end(prefix, *where) for where in started}
        come = {where: found for where, found in words.items() if found is not None}
        is_adopted = not come or self._adopt(prefix, come, call)
        if is_late or not is_adopted:
            self._give_up(prefix)
        elif len(come) < len(words):
            self._give_up(prefix)
            self._plan(prefix)

    def _end(self, prefix: Prefix, number: int, column: int) -> Words | None:
        """Ends a read of a prompt; returns its words if they have come."""
        self.reading.discard((number, prefix.blocks[column].hash))
        future = prefix.reads.pop((number, column))
        if future is None or future.cancel() or not future.done():  # a closed store has cancelled it
            return None
        return future.result()

    def _give_up(self, prefix: Prefix) -> None:
        """Drops what is still to come for a prompt: it is computed."""
        for where in list(prefix.reads):
            self._end(prefix, *where)

    def _adopt(self, prefix: Prefix, words: dict[tuple[int, int], Words], call: Any) -> bool:
        """Adopts blocks of a prompt; returns whether there was room for them."""
        end, size = prefix.end, self.size
        have = np.zeros((len(self.spec.groups), end), np.bool_)
        have[[number for number in range(len(have)) if number not in self.groups]] = True
        have[tuple(np.array(list(words)).T)] = True

        def read(number: int, columns: list[int]) -> dict[int, Words]:
            self.adopted.update(prefix.blocks[column].hash for column in columns)
            return {column: words.get((number, column), []) for column in columns}

        tokens: Any = np.asarray(prefix.tokens[: end * size], np.int32).reshape(end, size)
        events, *_ = call(adopt_prefix, Text(tokens, None), have, read, length=end * size, namespace=prefix.namespace)
        return bool(events.ok)

    def has_read(self, number: int) -> bool:
        """Whether a prompt need not wait any more: nothing is read for it, or its deadline is over."""
        prefix = self.waiting.get(number)
        if prefix is not None and prefix.end >= 0 and time.monotonic() > prefix.deadline:
            self._give_up(prefix)
        return prefix is None or prefix.is_done

    def forget_others(self, prompts: set[int]) -> None:
        """Forgets all prompts but these."""
        self.drop(self.prefixes.keys() - prompts)
        self.prefixes = {number: prefix for number, prefix in self.prefixes.items() if number in prompts}

    def drop(self, prompts: Iterable[int] | None = None) -> None:
        """Drops what is read for these prompts, which have been admitted or are over; for all of None."""
        for n in list(self.waiting if prompts is None else prompts):
            if (prefix := self.waiting.pop(n, None)) is not None:
                self._give_up(prefix)

    def after_loop(self, log: EventLog, admitted: Sequence[Job]) -> None:
        """Counts stored tokens, and writes what the loop has stored.

        Args:
          log: of the loop.
          admitted: all that do not wait any more; one that is over once.
        """
        self.drop(job.leader.number for job in admitted)
        for job in admitted:
            if job.number not in self.counted:
                self.counted.add(job.number)
                blocks, cached = self.prefixes[job.leader.number].blocks, job.output.cached_tokens
                starts = [at * self.size for at, block in enumerate(blocks) if block.hash in self.adopted]
                job.output.stored_tokens += sum(min(max(cached - start, 0), self.size) for start in starts)
        self.write(log)
        for job in admitted:
            if job.output.finish is not None:
                self.counted.discard(job.number)
                text = np.concatenate([job.tokens, np.asarray(job.output.tokens, np.int32)])
                self.store.touch(self.store.blocks(text, job.namespace))
        for hashes in (self.adopted, self.hashes):
            if len(hashes) > 4 * self.spec.groups[0].num_ids:  # most are of blocks that are gone
                hashes.clear()

    def write(self, log: EventLog) -> None:
        """Writes the whole blocks that a program stored and that are still there."""
        records = np.asarray(log.records)[: int(log.appended)]
        kind, num_tokens, level = records[:, 0], records[:, 6], records[:, 7]
        is_whole = (kind == EventKind.STORED) & (num_tokens == self.size) & (level == 0)
        if not is_whole.any():
            return
        texts = np.stack([np.asarray(part).astype("<i4") for part in log.text.parts().values()], axis=1)
        state = self.state.cache.state
        for of_group, group in enumerate(state.groups):
            found, rows = dict[Block, int](), np.asarray(group.pool_row(group.ids))
            fill, generations = np.asarray(group.blocks.fill), np.asarray(group.blocks.generation)
            for at in np.flatnonzero(is_whole & (records[:, 1] == of_group)).tolist():
                block, generation, *parent = records[at, 2:6].tolist()
                if generations[block] == generation and fill[block] == self.size:
                    stored = self.store.values.block(self._hash(state, *parent), texts[at].tobytes())
                    found[stored] = int(rows[block])
                    if of_group == 0:
                        self.hashes[block, generation] = stored.hash
                        self.adopted.discard(stored.hash)
            # No block has gone to the host yet: that happens between loops alone.
            self.store.write(self.state.cache.pools, of_group, list(found), list(found.values()))

    def _hash(self, state: CacheState, block: int, generation: int) -> bytes:
        """The hash of the prefix that ends in a node of the first group; (NO_BLOCK, namespace) is a root."""
        above = list[tuple[int, int]]()
        while block != NO_BLOCK and (block, generation) not in self.hashes:
            above.append((block, generation))
            block, generation = np.asarray(state.groups[0].blocks.parent)[block].tolist()
        found = self.store.root(generation) if block == NO_BLOCK else self.hashes[block, generation]
        for node in reversed(above):
            parts = state.groups[0].blocks.text.parts().values()
            text = b"".join(np.asarray(part)[node[0]].astype("<i4").tobytes() for part in parts)
            found = self.hashes[node] = self.store.values.block(found, text).hash
        return found
