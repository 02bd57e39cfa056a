# SPDX-License-Identifier: Apache-2.0
"""A generation and a store: prefixes are read ahead and adopted between loops; what a loop has computed is written.

submit    prompts are hashed, in their order, and what the cache lacks and the store has begins to be read
adopt     before a loop, what has come is adopted for prompts that can be admitted soon; the first loop waits for it
write     after a loop, blocks that it stored are copied out, before the next loop takes the pools
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
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


def _cached_tokens(state: CacheState, tokens: Any, length: Any, namespace: Any, alignment_tokens: int | None) -> Any:
    return lookup(state, tokens, length, namespace=namespace, alignment_tokens=alignment_tokens).cached_tokens


_cached_tokens = OutermostJit(_cached_tokens, static_argnames="alignment_tokens")


@dataclasses.dataclass
class Prefix:
    """The stored part of one prompt, on its way into the cache.

    Attributes:
      tokens: i32[n]; the prompt.
      namespace: of the prompt.
      blocks: its whole blocks.
      deadline: when it is computed without what has not come by then; of `time.monotonic`.
      end: how many of them are to be in the cache; -1: not planned yet.
      wanted: (group, column) to read, in this order.
      reads: those that are being read, or have been.
    """

    tokens: np.ndarray
    namespace: int
    blocks: list[Block]
    deadline: float
    end: int = -1
    wanted: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    reads: deque[tuple[int, int, Future[Words | None]]] = dataclasses.field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether nothing is read for it any more."""
        return self.end >= 0 and not self.wanted and not self.reads


class StoredPrefixes:
    """The reads of a generation from its store, and its writes to it."""

    def __init__(self, store: DiskStore, state: GenerationState[Any], scheduler: Scheduler):
        self.store, self.state, self.scheduler = store, state, scheduler
        self.spec = state.cache.state.spec
        self.size = self.spec.block_size
        self.prefixes: dict[int, Prefix] = {}  # by the number that the caller has given each prompt
        self.waiting: dict[int, Prefix] = {}  # those of prompts that were not admitted yet, in the order of their reads
        self.in_flight = 0  # bytes
        self.reading: set[tuple[int, bytes]] = set()  # (group, hash); each is read for one prompt
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
        deadline = time.monotonic() + self.store.patience_ms / 1000
        for n, job in new.items():
            blocks = self.store.blocks(job.tokens, job.namespace)
            self.prefixes[n] = self.waiting[n] = Prefix(job.tokens, job.namespace, blocks, deadline)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Starts reads in the order of the prompts, as many as may be in flight."""
        for prefix in self.waiting.values():
            if prefix.end < 0:
                self._plan(prefix)
            while prefix.wanted:
                number, column = prefix.wanted[0]
                size = self.store.values.sizes[number]
                if self.in_flight + size > self.store.max_in_flight:
                    return
                prefix.wanted.popleft()
                prefix.reads.append((number, column, self.store.read(prefix.blocks[column], number)))
                self.in_flight += size

    def _plan(self, prefix: Prefix) -> None:
        """Finds how much of a prompt the cache can have with the store's help, and what is to be read for it."""
        prefix.end, length = 0, len(prefix.tokens)
        if not any(self.store.has(block, number) for block in prefix.blocks for number in self._groups):
            return
        cached = self._cached_tokens(prefix.tokens, prefix.namespace)
        whole = cached // self.size
        reached = whole
        while reached < len(prefix.blocks) and self.store.has(prefix.blocks[reached], 0):
            reached += 1
        for end in range(reached, whole, -1):
            used = self._reused(end, length)
            if used <= cached:
                continue
            wanted = self._wanted(used, whole, end)
            if all(self.store.has(prefix.blocks[column], number) for number, column in wanted):
                prefix.end = end
                prefix.wanted.extend(one for one in wanted if self._is_new(prefix, *one))
                return

    def _reused(self, end: int, length: int) -> int:
        """The tokens of a prompt that are reused if `end` blocks of it are cached; 0 if that is no end of a reuse."""
        if (alignment := self.scheduler.alignment_tokens) is not None:
            return end * self.size if end * self.size < length and end * self.size % alignment == 0 else 0
        if end * self.size < length:
            return end * self.size
        return length - 1 if self.spec.partial_reuse else 0

    @property
    def _groups(self) -> list[int]:
        """The numbers of the groups whose blocks have K/V."""
        return [number for number in range(len(self.spec.groups)) if self.store.values.has_bytes(number)]

    def _wanted(self, used: int, whole: int, end: int) -> list[tuple[int, int]]:
        """(group, column) of what is needed behind `used` tokens, below `end`; of the first group without `whole`."""
        found = [*((0, column) for column in range(whole, end)), *self.spec.seen_columns(used, end)]
        return [(number, column) for number, column in found if number in self._groups]

    def _is_new(self, prefix: Prefix, number: int, column: int) -> bool:
        """Whether a block is not being read for an earlier prompt; from then on it is."""
        key = number, prefix.blocks[column].hash
        is_new = key not in self.reading
        self.reading.add(key)
        return is_new

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
            is_first = at < wait_for
            while not prefix.is_done:
                self._read_ahead()
                if not self._has_come(prefix, wait_for_it=is_first):
                    break
                self._take(prefix, call)
            if is_first and not prefix.is_done:  # too late
                self._take(prefix, call, more=False)
        self._read_ahead()

    def _has_come(self, prefix: Prefix, wait_for_it: bool) -> bool:
        """Whether all reads that were started for a prompt are over; waits until the deadline."""
        if not prefix.reads:  # others have what may be in flight
            return False
        for _, _, future in prefix.reads:
            while not future.done():
                left = prefix.deadline - time.monotonic()
                if not wait_for_it or left <= 0:
                    return False
                wait([future], min(left, _SLICE))
                self.state.ctrl_c.act()
        return True

    def _take(self, prefix: Prefix, call: Any, more: bool = True) -> None:
        """Adopts what has come for a prompt; if something is missing, plans anew; without `more` drops the rest."""
        words, missed = dict[tuple[int, int], Words](), False
        while prefix.reads:
            number, column, found = self._next(prefix)
            missed = missed or found is None
            if found is not None:
                words[number, column] = found
        is_adopted = not words or self._adopt(prefix, words, call)
        if missed or not is_adopted or not more:
            self._give_up(prefix)
        if missed and is_adopted and more:
            self._plan(prefix)

    def _next(self, prefix: Prefix) -> tuple[int, int, Words | None]:
        """Takes the first read of a prompt, which is over or is dropped."""
        number, column, future = prefix.reads.popleft()
        self.in_flight -= self.store.values.sizes[number]
        self.reading.discard((number, prefix.blocks[column].hash))
        if not future.done():
            future.cancel()
            return number, column, None
        try:
            return number, column, future.result()
        except CancelledError:  # the store was closed
            return number, column, None

    def _adopt(self, prefix: Prefix, words: dict[tuple[int, int], Words], call: Any) -> bool:
        """Adopts blocks of a prompt; returns whether there was room for them."""
        end, size = prefix.end, self.size
        have = np.zeros((len(self.spec.groups), end), np.bool_)
        have[[number for number in range(len(have)) if number not in self._groups]] = True
        have[tuple(np.array(list(words)).T)] = True

        if len(self.adopted) > 4 * self.spec.groups[0].num_ids:  # most are of blocks that are gone
            self.adopted.clear()

        def read(number: int, columns: list[int]) -> dict[int, Words]:
            self.adopted.update(prefix.blocks[column].hash for column in columns)
            return {column: words.get((number, column), []) for column in columns}

        tokens: Any = np.asarray(prefix.tokens[: end * size], np.int32).reshape(end, size)
        events, *_ = call(adopt_prefix, Text(tokens, None), have, read, length=end * size, namespace=prefix.namespace)
        return bool(events.ok)

    def _give_up(self, prefix: Prefix) -> None:
        """Drops what is still to come for a prompt: it is computed."""
        while prefix.reads:
            self._next(prefix)
        for number, column in prefix.wanted:
            self.reading.discard((number, prefix.blocks[column].hash))
        prefix.wanted.clear()

    def has_read(self, number: int) -> bool:
        """Whether a prompt need not wait any more: nothing is read for it, or its deadline is over."""
        prefix = self.waiting.get(number)
        if prefix is not None and prefix.end >= 0 and time.monotonic() > prefix.deadline:
            self._give_up(prefix)
        return prefix is None or prefix.is_done

    def forget_others(self, prompts: set[int]) -> None:
        """Forgets all prompts but these."""
        gone = self.prefixes.keys() - prompts
        self.drop(gone)
        for n in gone:
            del self.prefixes[n]

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
                for column, block in enumerate(self.prefixes[job.leader.number].blocks):
                    if block.hash in self.adopted:
                        cached = job.output.cached_tokens - column * self.size
                        job.output.stored_tokens += min(max(cached, 0), self.size)
        self._write(log)
        for job in admitted:
            if job.output.finish is not None:
                self.counted.discard(job.number)
                text = np.concatenate([job.tokens, np.asarray(job.output.tokens, np.int32)])
                self.store.touch(self.store.blocks(text, job.namespace))

    def _write(self, log: EventLog) -> None:
        """Writes the whole blocks that a loop stored and that are still there."""
        records = np.asarray(log.records)[: int(log.appended)]
        kind, number, block, generation, _, _, num_tokens, level, _ = records.T
        is_whole = (kind == EventKind.STORED) & (num_tokens == self.size) & (level == 0)
        if not is_whole.any():
            return
        texts = np.stack([np.asarray(part).astype("<i4") for part in log.text.parts().values()], axis=1)
        state = self.state.cache.state
        if len(self.hashes) > 4 * self.spec.groups[0].num_ids:  # most are of blocks that are gone; `_hash` finds others
            self.hashes.clear()
        for of_group, group in enumerate(state.groups):
            found, rows = dict[Block, int](), np.asarray(group.pool_row(group.ids))
            fill, generations = np.asarray(group.blocks.fill), np.asarray(group.blocks.generation)
            for at in np.flatnonzero(is_whole & (number == of_group)).tolist():
                own, parent = int(block[at]), (int(records[at, 4]), int(records[at, 5]))
                if generations[own] == generation[at] and fill[own] == self.size:
                    stored = self.store.values.block(self._hash(state, *parent), texts[at].tobytes())
                    found[stored] = int(rows[own])
                    if of_group == 0:
                        self.hashes[own, int(generation[at])] = stored.hash
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
