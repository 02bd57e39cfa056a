# SPDX-License-Identifier: Apache-2.0
"""A trial's model of its cache, in plain Python: the text of each row, the pins, and what every slot holds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.events.mirror import to_list
from kvjax.events.records import Events, Status
from kvjax.events.transfer import Transfer
from kvjax.spec import CacheSpec
from kvjax.state import CacheState
from kvjax.testing.request import Fields

NOTHING = -1  # in a slot that was never written, or whose move failed
Item = tuple[int, int]  # a token and its extra id


@dataclasses.dataclass
class Row:
    """The contents that a sequence should have: `items` are written, of `length` that have blocks.

    A swapped-out row is on the host; a lost row has lost K/V to a failed move, and can only be released.
    """

    namespace: int
    prompt: list[Item]
    items: list[Item]
    length: int
    swapped_out: bool = False
    lost: bool = False


class Expected:
    """The cache as it should be after the requests that were done.

    K/V depend on all tokens up to their own, so equal (namespace, path) are one id of K/V.
    """

    def __init__(self, spec: CacheSpec):
        self.spec = spec
        self.rows: dict[int, Row] = {}  # those in use
        self.pins: list[np.ndarray] = []  # the blocks of each pin that lasts
        # Per group the ids of the K/V in the pools of both tiers, [N + H, P].
        self.slots = [np.full((group.num_ids, spec.block_size), NOTHING) for group in spec.groups]
        # Transfers ordered and not completed, each with whether it was the last request.
        self.moves: collections.deque[tuple[Transfer, bool]] = collections.deque()
        self._kv_ids: dict[tuple[int, tuple[Item, ...]], int] = {}

    def is_lost(self, seq: int) -> bool:
        """Whether a row can only be released."""
        return seq in self.rows and self.rows[seq].lost

    def written(self, request: Fields) -> list[list[Item]]:
        """The tokens that each row writes: the rest of its prompt, then the request's, up to its length."""
        new: list[list[Item]] = [[] for _ in range(self.spec.max_seqs)]
        for seq, row in self.rows.items():
            if row.swapped_out or row.lost:
                continue
            extra = request["extra_ids"][seq] if self.spec.extra_ids else itertools.repeat(0)
            rest = row.prompt[len(row.items) :] + list(zip(request["tokens"][seq], extra, strict=False))
            new[seq] = rest[: min(request["num_tokens"][seq], row.length - len(row.items))]
        return new

    def items(self, path: Sequence[Any]) -> list[Item]:
        """The items of a path in the mirror."""
        return list(path) if self.spec.extra_ids else [(token, 0) for token in path]

    def kv_ids(self, namespace: int, items: Sequence[Item]) -> list[int]:
        """The id of the K/V at each position of a text."""
        items = tuple(items)
        return [self._kv_ids.setdefault((namespace, items[: i + 1]), len(self._kv_ids)) for i in range(len(items))]

    def locate(self, group: Any, seq: int, positions: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Indices of a row's positions in a group's slots; and bool[.], the positions that the row still has."""
        size = self.spec.block_size
        blocks = group.table[seq][positions // size]
        seen = blocks >= 0
        return (pool_rows(group)[blocks[seen]], positions[seen] % size), seen

    def note(self, request: Fields, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Brings rows, slots and pins up to date with a request that was done."""
        seq = request.get("seq", 0)
        match request["verb"]:
            case "commit":
                self._commit(request, events, before)
            case "admit":
                extra = request.get("extra_ids", [0] * len(request["tokens"]))
                prompt = list(zip(request["tokens"], extra, strict=True))
                self.rows[seq] = Row(request["namespace"], prompt, prompt[: int(events.cached[0])], len(prompt))
            case "extend":
                for active in np.flatnonzero(arguments["active"]).tolist():
                    self.rows[active].length += int(arguments["num_tokens"][active])
            case "fork":
                self.rows[request["dst"]] = dataclasses.replace(self.rows[request["src"]])
            case "truncate":
                row, length = self.rows[seq], int(arguments["length"])
                self.rows[seq] = Row(row.namespace, row.prompt[:length], row.items[:length], length)
            case "release":
                del self.rows[seq]
            case "pin":
                self.pins.append(arguments["blocks"])
            case "unpin":
                self.pins.pop(request["which"] % len(self.pins))
            case "swap_out" | "swap_in" as verb:
                self.rows[seq].swapped_out = verb == "swap_out"
            case "complete":
                self._fail(arguments, events, before)
        self.move(events)

    def _commit(self, request: Fields, events: Events, before: CacheState) -> None:
        """Writes the K/V of what each row commits."""
        for seq, (items, status) in enumerate(zip(self.written(request), events.status, strict=True)):
            assert status == Status.OK, f"row {seq} may not commit {len(items)} tokens: {Status(status).name}"
            if items:
                row, start = self.rows[seq], len(self.rows[seq].items)
                row.items = row.items + items
                kv_ids = np.array(self.kv_ids(row.namespace, row.items)[start:])
                for number, group in enumerate(before.groups):
                    index, seen = self.locate(group, seq, np.arange(start, len(row.items)))
                    self.slots[number][index] = kv_ids[seen]

    def move(self, events: Events) -> None:
        """Does the orders of a transition in the slots: moves between tiers, then copies."""
        self.moves = collections.deque((transfer, False) for transfer, _ in self.moves)
        moves = [m for m in events.moves.records.tolist() if m[1] >= 0]
        sources = [self.slots[number][source].copy() for number, _, _, source, _ in moves]
        for (number, _, _, _, target), slots in zip(moves, sources, strict=True):
            self.slots[number][target] = slots
        if moves:
            orders: Any = np.array(moves + [[-1] * 5] * (-len(moves) % 64), np.int32)  # one program for all
            self.moves.append((Transfer(orders), True))
        for event in to_list(events):
            if event["kind"] == "copied":
                slots, n = self.slots[event["group"]], event["num_tokens"]
                slots[event["block"], :n] = slots[event["source"], :n]

    def _fail(self, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Empties the slots that failed moves should have filled."""
        for number, block, move, _, target in arguments["transfer"].records.tolist() if not arguments["ok"] else ():
            if block >= 0 and before.groups[number].arrival(np.int32(block)) == move:
                self.slots[number][target] = NOTHING
        for seq in np.flatnonzero(events.status == Status.HELD).tolist():
            self.rows[seq].lost = True


def pool_rows(group: Any) -> np.ndarray:
    """i32[B]; the pool row of each block."""
    return np.asarray(group.pool_row(np.arange(len(group.blocks.fill), dtype=np.int32)))
