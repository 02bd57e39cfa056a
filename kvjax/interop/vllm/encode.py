# SPDX-License-Identifier: Apache-2.0
"""Events of a cache as payloads of vLLM's wire.

What readers do with a message that breaks a rule is mostly to drop it in silence. The rules:

- Hashes are ints, the parent nil at a root; parents come before children, no hash twice in an event.
- Whole blocks alone. Consecutive stored blocks that chain, of one group, level and namespace, are one event;
  consecutive removals of one group and level too.
- A change of level is a removal from the old level and a store on the new one. In a run of updated records all
  removals come first, children first, then all stores, parents first: the records come in the caller's order.
- AllBlocksCleared empties every group at its reader. It is sent only when no group keeps anything.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.blocks.keys import Namespaces
from kvjax.events.records import EventKind
from kvjax.interop import columns as col
from kvjax.interop.batch import Batch, read, runs
from kvjax.interop.naming import Naming
from kvjax.interop.nodes import NodeMap
from kvjax.interop.table import Gone, names_of, parents_first
from kvjax.interop.vllm.forms import HASH_BYTES, Form, What, pack_hashes, payload
from kvjax.spec import CacheSpec
from kvjax.state import CacheState

_TOKEN, _FRAME = 5, 512  # the most bytes of a token, and usually of what is around hashes and tokens


class Encoder:
    """Makes payloads of events, for whoever has a transport of their own; `Publisher` has one.

    Attributes:
      nodes: what is cached by the events so far.
      naming: what the wire calls it; `naming.left_out` counts the blocks that are not published.
      max_message: the most bytes of a payload.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        names: Namespaces | None = None,
        lora_names: Mapping[int, str] | None = None,
        model: str | None = None,
        key: bytes = b"",
        salts: str = "digest",
        extra_name: Callable[[int], str] | None = None,
        form: str = "map",
        rank: int = 0,
        max_message: int = 1 << 20,
    ):
        """Begins with an empty cache.

        A spec whose layers all have windows publishes its windows alone; NVIDIA Dynamo's indexer takes nothing of
        these. Blocks of a namespace that `names` never gave out are not published.

        Args:
          spec: of the cache.
          names: the `Namespaces` of the cache; None: all prompts have namespace 0.
          lora_names: adapter number to name; an adapter without one is called by its number.
          model: part of all hashes, as for `names.root`.
          key: a secret of at most 64 bytes, the same on all replicas, without which hashes can neither be made nor
            probed.
          salts: "digest" publishes a hash of each salt (without `key` short ones can be guessed from it), "plain" the
            salt, and "omit" no blocks of prompts with a salt.
          extra_name: the name of an extra id, the same on all replicas. None: blocks with extra ids other than 0, and
            what is below them, are not published.
          form: "map", "array" or "array-0.11". The default is refused by vLLM 0.11's decoder, AIBrix and kthena. The
            last has no field for adapters' names, salts, extra ids and windows: such blocks are not published.
          rank: data-parallel rank.
          max_message: the most bytes of a payload; larger batches are several. One block with very long names may have
            more.

        Raises:
          ValueError: naming the argument.
        """
        self.form = Form(form, spec.block_size)
        self.nodes = NodeMap(spec)
        self.naming = Naming(
            names, lora_names=lora_names, model=model, key=key, salts=salts, extra_name=extra_name,
            fields=self.form.fields,
        )  # fmt: skip
        least = 4 * (_FRAME + HASH_BYTES + _TOKEN * spec.block_size)
        if not isinstance(max_message, int) or max_message < least:
            raise ValueError(f"max_message: got {max_message!r}, wanted an int of at least {least}")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"rank: got {rank!r}, wanted an int of at least 0")
        self.rank, self.max_message = rank, max_message
        self.groups = frozenset(range(int(spec.bare), len(spec.groups) if self.form.tells_groups else 1))
        self._most_blocks = max_message // 2 // (HASH_BYTES + _TOKEN * spec.block_size)
        self._most_hashes = max_message // 2 // HASH_BYTES
        self._ends = functools.lru_cache(4096)(self._make_plain_ends)

    def encode(self, events: Any, now: float | None = None) -> list[bytes]:
        """The payloads of events; none if they tell this wire nothing.

        Args:
          events: `Events`, an `EventLog`, or decoded events.
          now: seconds since 1970; None: by the clock.

        Raises:
          ValueError: if they cannot have come from a cache with the contents that the events so far have given it.
        """
        return self.payloads(self.events(self.read(events)), now)

    def read(self, events: Any) -> Batch:
        """Copies events to the host, and looks up their namespaces."""
        batch = read(events, self.nodes.spec)
        self.naming.learn(batch.namespaces())
        return batch

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache; `snapshot` has its payloads."""
        self.nodes.attach(state)
        self.naming.learn(set[int]().union(*(group.namespaces for group in self.nodes.groups)))

    def snapshot(self, now: float | None = None) -> list[bytes]:
        """The payloads that bring a reader to the present contents from any others: AllBlocksCleared, then stores."""
        return self.snapshot_of(self.nodes, now)

    def snapshot_of(self, nodes: NodeMap, now: float | None = None) -> list[bytes]:
        """The same for another map, whose nodes get names."""
        return self.payloads([self.form.cleared, *self.index(nodes)], now)

    def idle(self) -> bytes:
        """The payload of an empty batch."""
        return payload([], time.time(), self.rank)

    def payloads(self, events: Sequence[bytes], now: float | None = None) -> list[bytes]:
        """Encoded events as payloads of at most `max_message` bytes."""
        moment, found, held, size = time.time() if now is None else now, [], [], _FRAME
        for event in events:
            if held and size + len(event) > self.max_message:
                found.append(payload(held, moment, self.rank))
                held, size = [], _FRAME
            held.append(event)
            size += len(event)
        return [*found, payload(held, moment, self.rank)] if held else found

    def events(self, batch: Batch) -> list[bytes]:
        """Follows a batch; its encoded events."""
        found: list[bytes] = []
        for step in batch.steps():
            if step.kind == EventKind.UPDATED:
                found += self._moved(self.nodes.update(step.records))
            elif step.kind == EventKind.CLEARED:
                found += self._removed(self.nodes.clear(step.records))
                if not any(self.nodes.groups[number].names for number in self.groups):
                    found.append(self.form.cleared)
            else:
                found += self._removed(self.nodes.remove(step.records))
                for number, blocks in self.nodes.store(step.stored, step.text):
                    found += self._stored(self.nodes, number, self.settle(self.nodes, number, blocks))
        return found

    def settle(self, nodes: NodeMap, number: int, blocks: np.ndarray) -> np.ndarray:
        """As `Naming.settle`."""
        return self.naming.settle(nodes, number, blocks, number in self.groups)

    def index(self, nodes: NodeMap) -> list[bytes]:
        """Names the nodes of a map that have no names yet; encoded events that store all that are published."""
        found: list[bytes] = []
        for number, group in enumerate(nodes.groups):
            self.settle(nodes, number, group.live)
            blocks = group.live
            found += self._stored(
                nodes, number, parents_first(group, blocks[group.table[blocks, col.STATUS] == col.SENT])
            )
        return found

    def _moved(self, before: Mapping[tuple[int, int], int]) -> list[bytes]:
        """Events of nodes that are on another level than before: {(group, block): level}."""
        removed, stored = [], []
        for number, group in enumerate(self.nodes.groups):
            levels = {block: level for (of, block), level in before.items() if of == number}
            blocks = parents_first(group, np.array(list(levels), np.int64))
            left = np.array([levels[block] for block in blocks.tolist()], np.int64)
            for level in (0, 1):
                names = names_of(group.table[blocks[left == level], col.DIGEST : col.DIGEST + 2])[
                    ::-1
                ]  # children first
                removed += self._removed([Gone(number, names, np.full(len(names), level))])
            stored += self._stored(self.nodes, number, blocks)
        return removed + stored

    def _removed(self, gone: Iterable[Gone]) -> list[bytes]:
        """Events of what is gone; consecutive removals of one group and level are one event."""
        found = []
        for number, names, levels in gone:
            if number not in self.groups:
                continue
            hashes = pack_hashes(names)
            for start, stop in _pieces(runs(levels), self._most_hashes):
                some = hashes[start * HASH_BYTES : stop * HASH_BYTES]
                found.append(self.form.removed(some, int(levels[start]), number))
        return found

    def _stored(self, nodes: NodeMap, number: int, blocks: np.ndarray) -> list[bytes]:
        """Events that store a group's nodes; consecutive ones that chain are one event."""
        if number not in self.groups or not len(blocks):
            return []
        rows, size = nodes.groups[number].table[blocks], nodes.spec.block_size
        names, parents = names_of(rows[:, col.DIGEST : col.DIGEST + 2]), names_of(rows[:, col.ABOVE : col.ABOVE + 2])
        same = (parents[1:] == names[:-1]) & (rows[1:, col.DEPTH] > 0)
        for column in (col.LEVEL, col.NAMESPACE):
            same &= rows[1:, column] == rows[:-1, column]
        cuts = [0, *(np.flatnonzero(~same) + 1).tolist(), len(rows)]
        chains = Chains(
            number, pack_hashes(names), pack_hashes(parents), rows[:, [col.LEVEL, col.NAMESPACE, col.DEPTH]].tolist(),
            rows[:, col.TEXT : col.TEXT + size].reshape(-1).tolist(), self._extra_keys(rows[:, col.TEXT + size :]),
        )  # fmt: skip
        found = []
        for start, stop in _pieces(itertools.pairwise(cuts), self._most_blocks):
            event = self._chain(chains, start, stop)
            if len(event) + _FRAME <= self.max_message:
                found.append(event)
            else:  # names are so long that it does not fit a message
                found += [self._chain(chains, at, at + 1) for at in range(start, stop)]
        return found

    def _extra_keys(self, ids: np.ndarray) -> list[list[Any] | None]:
        """For each row the extra keys of its extra ids i32[n, P or 0]; an empty list if none has any."""
        some = ids.any(axis=1)
        rows = zip(ids.tolist(), some.tolist(), strict=True) if some.any() else ()
        return [self.naming.extra_keys(row) if any_ else None for row, any_ in rows]

    def _chain(self, chains: Chains, start: int, stop: int) -> bytes:
        """The event that stores a chain."""
        level, namespace, depth = chains.columns[start]
        first, size = start * HASH_BYTES, self.nodes.spec.block_size
        if chains.extra_keys:
            ends = self._make_ends(chains.group, level, namespace, depth == 0, *chains.extra_keys[start:stop])
        else:
            ends = self._ends(chains.group, level, namespace, stop - start if depth == 0 else 0)
        return self.form.stored(
            chains.names[first : stop * HASH_BYTES],
            chains.parents[first : first + HASH_BYTES] if depth else b"",
            chains.tokens[start * size : stop * size],
            ends,
        )

    def _make_plain_ends(self, number: int, level: int, namespace: int, roots: int) -> tuple[bytes, bytes]:
        """`Form.ends` of blocks without extra ids; so many that begin at a root, 0 if they do not."""
        return self._make_ends(number, level, namespace, roots > 0, *[None] * roots)

    def _make_ends(self, number: int, level: int, namespace: int, at_root: bool, *keys: Any) -> tuple[bytes, bytes]:
        _, lora_id, lora, salt, _ = self.naming.space(namespace)
        window = self.nodes.spec.groups[number].window
        return self.form.ends(What(number, window, level, lora_id, lora, salt), keys, at_root)


class Chains(NamedTuple):
    """A group's nodes to store: packed names and parents, (level, namespace, depth), all tokens, and extra keys."""

    group: int
    names: bytes
    parents: bytes
    columns: list[list[int]]
    tokens: list[int]
    extra_keys: list[list[Any] | None]


def _pieces(parts: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Parts (start, stop) in pieces of at most `most`."""
    for start, stop in parts:
        while stop - start > most:
            yield start, start + most
            start += most
        yield start, stop
