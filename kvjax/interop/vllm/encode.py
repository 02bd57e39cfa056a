# SPDX-License-Identifier: Apache-2.0
"""Events of a cache as payloads of vLLM's wire.

What readers do with a message that breaks a rule is mostly to drop it in silence. The rules:

- Hashes are ints, the parent nil at a root; parents come before children, no hash twice in an event.
- Whole blocks alone. Consecutive stored blocks that chain, of one group, level and namespace, are one event;
  consecutive removals of one group and level too.
- A change of level is a removal and a store (`interop/encoder.py`).
- AllBlocksCleared empties every group at its reader. It is sent only when no group keeps anything.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.blocks.keys import Namespaces
from kvjax.interop import columns as col
from kvjax.interop.columns import chains_of, hashes_of, parents_of
from kvjax.interop.encoder import WHOLE, EventEncoder, omitted_salts
from kvjax.interop.events import pieces, runs
from kvjax.interop.hashing import Hashing, salt_text
from kvjax.interop.index import NodeMap
from kvjax.interop.vllm.forms import HASH_BYTES, Form, What, kind_of, pack_hashes, payload
from kvjax.spec import CacheSpec

_TOKEN, _FRAME = 5, 512  # the most bytes of a token, and usually of what is around hashes and tokens


class Encoder(EventEncoder[bytes]):
    """Makes payloads of events, for whoever has a transport of their own; `Publisher` has one.

    Attributes:
      nodes: what is cached by the events so far.
      left_out: how many whole blocks were not published, by reason, each with those below it.
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
          model: part of all hashes, as for `hashing.root_hash`.
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
        without_field = () if self.form.has_groups else (col.SALT, col.LORA, col.EXTRA)
        unpublished = WHOLE | ({col.EXTRA: "extra_id_without_name"} if extra_name is None else {})
        unpublished |= dict.fromkeys(without_field, "form_without_field") | omitted_salts(salts)
        groups = range(int(spec.bare), len(spec.groups) if self.form.has_groups else 1)
        super().__init__(spec, Hashing(names, lora_names, model, key), groups, unpublished)
        self._salt, self._extra_name = functools.partial(salt_text, salts=salts, key=key), extra_name
        self._extra_names: dict[int, str] = {}
        least = 4 * (_FRAME + HASH_BYTES + _TOKEN * spec.block_size)
        if not isinstance(max_message, int) or max_message < least:
            raise ValueError(f"max_message: got {max_message!r}, wanted an int of at least {least}")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"rank: got {rank!r}, wanted an int of at least 0")
        self.rank, self.max_message = rank, max_message
        self._most_blocks = max_message // 2 // (HASH_BYTES + _TOKEN * spec.block_size)
        self._most_hashes = max_message // 2 // HASH_BYTES
        self._ends = functools.lru_cache(4096)(self._make_plain_ends)

    def encode(self, events: Any, now: float | None = None) -> list[bytes]:
        """The payloads of events; none if nothing of them is published.

        Args:
          events: `Events`, an `EventLog`, or decoded events.
          now: seconds since 1970; None: by the clock.

        Raises:
          ValueError: if they cannot have come from a cache with the contents that the events so far have given it.
        """
        return self.payloads(self.messages(self.follow(events)), now)

    def snapshot(self, now: float | None = None) -> list[bytes]:
        """The payloads that bring a reader to the present contents from any others: AllBlocksCleared, then stores."""
        return self.snapshot_of(self.nodes, now)

    def snapshot_of(self, nodes: NodeMap, now: float | None = None) -> list[bytes]:
        """The same for a copy of the index."""
        return self.payloads([self.form.cleared, *self.messages(nodes.snapshot())], now)

    def idle(self) -> bytes:
        """The payload of an empty batch."""
        return payload([], time.time(), self.rank)

    def payloads(self, events: Sequence[bytes], now: float | None = None) -> list[bytes]:
        """Encoded events as payloads of at most `max_message` bytes."""
        timestamp, found, some, size = time.time() if now is None else now, [], [], _FRAME
        for event in events:
            if some and size + len(event) > self.max_message:
                found.append(payload(some, timestamp, self.rank))
                some, size = [], _FRAME
            some.append(event)
            size += len(event)
        return [*found, payload(some, timestamp, self.rank)] if some else found

    def _removed(self, number: int, rows: np.ndarray) -> list[bytes]:
        """Consecutive removals from one level are one event."""
        hashes, levels = pack_hashes(hashes_of(rows)), rows[:, col.LEVEL]
        return [
            self.form.removed(hashes[start * HASH_BYTES : stop * HASH_BYTES], int(levels[start]), number)
            for start, stop in pieces(runs(levels), self._most_hashes)
        ]

    def _cleared(self) -> list[bytes]:
        return [self.form.cleared]

    def _stored(self, number: int, rows: np.ndarray) -> list[bytes]:
        """Consecutive blocks that chain are one event."""
        cuts, text = chains_of(rows, col.LEVEL, col.NAMESPACE), rows[:, col.TEXT :]
        tokens, extra_ids = np.split(text, [self.nodes.spec.block_size], axis=1)
        chains = Chains(
            number, pack_hashes(hashes_of(rows)), pack_hashes(parents_of(rows)),
            rows[:, [col.LEVEL, col.NAMESPACE, col.DEPTH]].tolist(), tokens.reshape(-1).tolist(),
            self._extra_keys(extra_ids),
        )  # fmt: skip
        found = []
        for start, stop in pieces(itertools.pairwise(cuts), self._most_blocks):
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
        return [self._extra_keys_of(row) if any_ else None for row, any_ in rows]

    def _extra_keys_of(self, ids: list[int]) -> list[list[Any]]:
        """[name, offset] for each run of equal extra ids other than 0.

        Raises:
          ValueError: if `extra_name` gives no text.
        """
        keys, before = [], 0
        for offset, extra in enumerate(ids):
            if extra not in (0, before):
                if extra not in self._extra_names:
                    assert self._extra_name is not None, "blocks with extra ids are left out without `extra_name`"
                    name = self._extra_name(extra)
                    if not isinstance(name, str):
                        raise ValueError(f"extra_name: got {name!r} for extra id {extra}, wanted text")
                    self._extra_names[extra] = name
                keys.append([self._extra_names[extra], offset])
            before = extra
        return keys

    def _chain(self, chains: Chains, start: int, stop: int) -> bytes:
        """The event that stores a chain."""
        level, namespace, depth = chains.columns[start]
        first, size = start * HASH_BYTES, self.nodes.spec.block_size
        if chains.extra_keys:
            ends = self._make_ends(chains.group, level, namespace, depth == 0, *chains.extra_keys[start:stop])
        else:
            ends = self._ends(chains.group, level, namespace, stop - start if depth == 0 else 0)
        return self.form.stored(
            chains.hashes[first : stop * HASH_BYTES],
            chains.parents[first : first + HASH_BYTES] if depth else b"",
            chains.tokens[start * size : stop * size],
            ends,
        )

    def _make_plain_ends(self, number: int, level: int, namespace: int, roots: int) -> tuple[bytes, bytes]:
        """`Form.ends` of blocks without extra ids; so many that begin at a root, 0 if they do not."""
        return self._make_ends(number, level, namespace, roots > 0, *[None] * roots)

    def _make_ends(self, number: int, level: int, namespace: int, at_root: bool, *keys: Any) -> tuple[bytes, bytes]:
        space, group = self.hashing.space(namespace), self.nodes.spec.groups[number]
        window, salt = None if group.recurrent else group.window, self._salt(space.salt)
        what = What(number, kind_of(group), window, level, space.lora_id, space.lora, salt)
        return self.form.ends(what, keys, at_root)


class Chains(NamedTuple):
    """A group's blocks to store: packed hashes and parents, (level, namespace, depth), all tokens, and extra keys."""

    group: int
    hashes: bytes
    parents: bytes
    columns: list[list[int]]
    tokens: list[int]
    extra_keys: list[list[Any] | None]
