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
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np

from kvjax._compile import OutermostJit
from kvjax.events.log import EventLog
from kvjax.events.records import EventKind
from kvjax.serving.inputs import Inputs
from kvjax.serving.interrupt import GenerationState
from kvjax.serving.options import Scheduler
from kvjax.serving.requests import Output, Stage
from kvjax.state import NO_BLOCK, CacheState
from kvjax.stores.adoption import adopt_prefix
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
      output: the number of its first output.
      namespace: of the prompt.
      blocks: its whole blocks.
      end: how many of them are to be in the cache; -1: not planned yet.
      wanted: (group, column) to read, in this order.
      reads: those that are being read, or have been.
    """

    output: int
    namespace: int
    blocks: list[Block]
    end: int = -1
    wanted: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    reads: deque[tuple[int, int, Future[Words | None]]] = dataclasses.field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether nothing is read for it any more."""
        return self.end >= 0 and not self.wanted and not self.reads


class StoredPrefixes:
    """What a generation reads from its store, and writes to it."""

    def __init__(self, store: DiskStore, inputs: Inputs[Any], state: GenerationState[Any], scheduler: Scheduler):
        self.store, self.inputs, self.state, self.scheduler = store, inputs, state, scheduler
        self.spec, self.size = inputs.spec, inputs.spec.block_size
        self.waiting: list[Prefix] = []  # of prompts that were not admitted yet
        self.blocks: dict[int, list[Block]] = {}  # by the number of a prompt's first output
        self.in_flight = 0  # bytes
        self.reading: set[tuple[int, bytes]] = set()  # (group, hash); each is read for one prompt
        self.adopted: set[bytes] = set()  # hashes of blocks that came from the store
        self.hashes: dict[tuple[int, int], bytes] = {}  # of the first group's nodes (block, generation)
        self.counted: set[int] = set()  # outputs
        self.deadline = 0.0

    def begin(self, outputs: Iterable[int]) -> None:
        """Starts to read for prompts, those of the highest priority first; samples of one prompt read together."""
        if self.store.readonly:
            self.store.refresh()
        firsts = dict.fromkeys(self.inputs.first_sample[list(outputs)].tolist())
        for n in sorted(firsts, key=lambda n: -int(self.inputs.priorities[n])):
            namespace = int(self.inputs.namespaces[n])
            self.blocks[n] = self.store.blocks(self.inputs.prompts[n], namespace)
            self.store.touch(self.blocks[n])
            self.waiting.append(Prefix(n, namespace, self.blocks[n]))
        self.deadline = time.monotonic() + self.store.patience_ms / 1000
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Starts reads in the order of the prompts, as many as may be in flight."""
        for prefix in self.waiting:
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
        prefix.end, length = 0, len(self.inputs.prompts[prefix.output])
        if not any(self.store.has(block, number) for block in prefix.blocks for number in self._groups):
            return
        tokens = np.zeros((self.state.serving.width,), np.int32)
        tokens[:length] = self.inputs.prompts[prefix.output]
        prompt = tokens, np.int32(length), np.int32(prefix.namespace)
        cached = int(_cached_tokens(self.state.cache.state, *prompt, self.scheduler.alignment_tokens))
        whole = cached // self.size
        reached = whole
        while reached < len(prefix.blocks) and self.store.has(prefix.blocks[reached], 0):
            reached += 1
        for end in range(reached, whole, -1):
            used = self._reused(end, length)
            if used <= cached:
                continue
            wanted = [(number, column) for number in self._groups for column in self._seen(number, used, end, whole)]
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

    def _seen(self, number: int, used: int, end: int, whole: int) -> list[int]:
        """The columns below `end` that a group needs behind `used` tokens; of the first group those that it lacks."""
        columns = np.arange(self.spec.max_blocks_per_seq, dtype=np.int32)
        seen = np.flatnonzero(np.asarray(self.spec.groups[number].keeps(columns, np.int32(used), self.size)))
        return [column for column in seen.tolist() if (whole if number == 0 else 0) <= column < end]

    def _is_new(self, prefix: Prefix, number: int, column: int) -> bool:
        """Whether a block is not being read for an earlier prompt; from then on it is."""
        key = number, prefix.blocks[column].hash
        is_new = key not in self.reading
        self.reading.add(key)
        return is_new

    def adopt(self, call: Any, requests: Any = None) -> None:
        """Adopts what has been read for prompts that are likely to be admitted next.

        Args:
          call: makes the moves and the events of a verb, as `HostTier.call`.
          requests: in numpy arrays; None before the first loop, which waits for the prompts that get the first rows.
        """
        if not self.waiting:
            return
        available, need = int(self.state.cache.state.groups[0].available), self._growth(requests)
        for at, prefix in enumerate(self.waiting):
            need += -(-len(self.inputs.prompts[prefix.output]) // self.size)
            if need > available:
                break
            is_first = requests is None and at < self.inputs.own_rows.sum()
            while not prefix.is_done:
                self._read_ahead()
                if not self._has_come(prefix, wait_for_it=is_first):
                    break
                self._take(prefix, call)
            if is_first and not prefix.is_done:  # too late
                self._take(prefix, call, more=False)
        self._read_ahead()

    def _growth(self, requests: Any) -> int:
        """The blocks that running requests may still take."""
        if requests is None:
            return 0
        left = (requests.max_tokens - requests.num_tokens)[requests.stage == Stage.RUNNING]
        return int(np.sum(-(-left // self.size) + 1))

    def _has_come(self, prefix: Prefix, wait_for_it: bool) -> bool:
        """Whether all reads that were started for a prompt are over; waits until the deadline."""
        if not prefix.reads:  # others have what may be in flight
            return False
        for _, _, future in prefix.reads:
            while not future.done():
                left = self.deadline - time.monotonic()
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
            if found is not None and (number > 0 or not missed):
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

        def read(number: int, columns: list[int]) -> dict[int, Words]:
            if number == 0:
                self.adopted.update(prefix.blocks[column].hash for column in columns)
            return {column: words.get((number, column), []) for column in columns}

        tokens = np.asarray(self.inputs.prompts[prefix.output][: end * size], np.int32).reshape(end, size)
        events, _ = call(adopt_prefix, tokens, have, read, length=end * size, namespace=prefix.namespace)
        return bool(events.ok)

    def _give_up(self, prefix: Prefix) -> None:
        """Drops what is still to come for a prompt: it is computed."""
        while prefix.reads:
            self._next(prefix)
        for number, column in prefix.wanted:
            self.reading.discard((number, prefix.blocks[column].hash))
        prefix.wanted.clear()

    def drop(self, outputs: Iterable[int] | None = None) -> None:
        """Drops what is read for these prompts, which have been admitted or are over; for all of None."""
        gone = None if outputs is None else set(outputs)
        for prefix in self.waiting:
            if gone is None or prefix.output in gone:
                self._give_up(prefix)
        self.waiting = [] if gone is None else [prefix for prefix in self.waiting if prefix.output not in gone]

    def after_loop(self, log: EventLog, admitted: dict[int, Output]) -> None:
        """Counts the stored tokens of outputs that do not wait any more, and writes what the loop has stored."""
        self.drop(admitted)
        for n in admitted.keys() - self.counted:
            self.counted.add(n)
            for column, block in enumerate(self.blocks.get(int(self.inputs.first_sample[n]), [])):
                if block.hash in self.adopted:
                    rest = admitted[n].cached_tokens - column * self.size
                    admitted[n].stored_tokens += min(max(rest, 0), self.size)
        self._write(log)

    def _write(self, log: EventLog) -> None:
        """Writes the whole blocks that a loop stored and that are still there."""
        records = np.asarray(log.records)[: int(log.size)]
        kind, number, block, generation, _, _, num_tokens, level, _ = records.T
        is_whole = (kind == EventKind.STORED) & (num_tokens == self.size) & (level == 0)
        if not is_whole.any():
            return
        texts = np.stack([np.asarray(part).astype("<i4") for part in log.text.parts().values()], axis=1)
        state = self.state.cache.state
        for of_group, group in enumerate(state.groups):
            found, rows = dict[Block, int](), np.asarray(group.pool_row(group.ids))
            fill, generations = np.asarray(group.blocks.fill), np.asarray(group.blocks.generation)
            for at in np.flatnonzero(is_whole & (number == of_group)).tolist():
                here, node = block[at], (int(records[at, 4]), int(records[at, 5]))
                if generations[here] == generation[at] and fill[here] == self.size:
                    stored = self.store.values.block(self._hash(state, *node), texts[at].tobytes())
                    found[stored] = int(rows[here])
                    if of_group == 0:
                        self.hashes[int(here), int(generation[at])] = stored.hash
                        self.adopted.discard(stored.hash)
            on_device = {one: row for one, row in found.items() if row < self.spec.groups[of_group].num_blocks}
            self.store.write(self.state.cache.pools, of_group, list(on_device), list(on_device.values()))

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
