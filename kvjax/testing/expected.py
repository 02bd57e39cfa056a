# SPDX-License-Identifier: Apache-2.0
"""The expected cache of a trial, in plain Python: the text of each row, the pins, and the contents of every slot.

It also makes the arguments of a verb from a request, which depend on the model.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.events.mirror import Node, to_list
from kvjax.events.records import Events, Status
from kvjax.events.transfer import Transfer
from kvjax.spec import CacheSpec
from kvjax.state import LOST, NO_BLOCK, CacheState

NOTHING = -1  # in a slot that was never written, or lost in a failed move
MAX_TOKENS = 6  # added to a row by an `extend`
Item = tuple[int, int]  # a token and its extra id
Fields = dict[str, Any]  # the fields of a request
_MAX_BLOCKS = 4  # named by an `offload` or `onboard`
_WHOLE = ("fork", "truncate", "pin", "swap_out", "swap_in")  # not for a row that has lost K/V


@dataclasses.dataclass
class Row:
    """The expected contents of a sequence: `items` are written, and `length` tokens have blocks.

    A swapped-out row is on the host. A lost row has lost K/V to a failed move, and can only be released.
    """

    namespace: int
    prompt: list[Item]
    items: list[Item]
    length: int
    swapped_out: bool = False
    lost: bool = False


class Expected:
    """The expected cache after the successful requests.

    The K/V of a token depend on all tokens before it, so each (namespace, path) has its own id of K/V.
    """

    def __init__(self, spec: CacheSpec):
        self.spec = spec
        self.rows: dict[int, Row] = {}  # the rows in use
        self.pins: list[np.ndarray] = []  # the blocks of each present pin
        # For each group the ids of the K/V in the pools of both tiers, [N + H, P].
        self.slots = [np.full((group.num_ids, spec.block_size), NOTHING) for group in spec.groups]
        # Ordered but not completed transfers, each with whether the last request ordered it.
        self.moves: collections.deque[tuple[Transfer, bool]] = collections.deque()
        self._kv_ids: dict[tuple[int, tuple[Item, ...]], int] = {}

    def written(self, request: Fields) -> list[list[Item]]:
        """The tokens to be written by each row: the rest of its prompt, then the request's tokens, up to its length."""
        new: list[list[Item]] = [[] for _ in range(self.spec.max_seqs)]
        for seq, row in self.rows.items():
            if row.swapped_out or row.lost:
                continue
            extra = request["extra_ids"][seq] if self.spec.extra_ids else itertools.repeat(0)
            rest = row.prompt[len(row.items) :] + list(zip(request["tokens"][seq], extra, strict=False))
            new[seq] = rest[: min(request["num_tokens"][seq], row.length - len(row.items))]
        return new

    def items(self, path: Sequence[Any]) -> list[Item]:
        """Converts a path of the mirror to items."""
        return list(path) if self.spec.extra_ids else [(token, 0) for token in path]

    def kv_ids(self, namespace: int, items: Sequence[Item]) -> list[int]:
        """The id of the K/V at each position of a text."""
        items = tuple(items)
        return [self._kv_ids.setdefault((namespace, items[: i + 1]), len(self._kv_ids)) for i in range(len(items))]

    def locate(self, group: Any, seq: int, positions: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Indices of a row's positions in a group's slots, and bool[.], whether the row still has a position."""
        size = self.spec.block_size
        blocks = group.table[seq][positions // size]
        seen = blocks >= 0
        return (pool_rows(group)[blocks[seen]], positions[seen] % size), seen

    def note(self, request: Fields, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Updates rows, slots and pins after a successful request."""
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
                row = self.rows[seq]
                length = int(arguments["length"])
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
        """Writes the K/V of each row's committed tokens."""
        for seq, (items, status) in enumerate(zip(self.written(request), events.status, strict=True)):
            assert status == Status.OK, f"row {seq} may not commit {len(items)} tokens: {Status(status).name}"
            if items:
                row = self.rows[seq]
                start = len(row.items)
                row.items = row.items + items
                kv_ids = np.array(self.kv_ids(row.namespace, row.items)[start:])
                for group_index, group in enumerate(before.groups):
                    index, seen = self.locate(group, seq, np.arange(start, len(row.items)))
                    self.slots[group_index][index] = kv_ids[seen]

    def move(self, events: Events) -> None:
        """Moves slots by the orders of a transition: moves between tiers, then copies."""
        self.moves = collections.deque((transfer, False) for transfer, _ in self.moves)
        moves = [m for m in events.moves.records.tolist() if m[1] >= 0]
        sources = [self.slots[group_index][source].copy() for group_index, _, _, source, _ in moves]
        for (group_index, _, _, _, target), slots in zip(moves, sources, strict=True):
            self.slots[group_index][target] = slots
        if moves:
            orders: Any = np.array(moves + [[-1] * 5] * (-len(moves) % 64), np.int32)  # the same shape for many moves
            self.moves.append((Transfer(orders), True))
        for event in to_list(events):
            if event["kind"] == "copied":
                slots = self.slots[event["group"]]
                n = event["num_tokens"]
                slots[event["block"], :n] = slots[event["source"], :n]

    def _fail(self, arguments: dict[str, Any], events: Events, before: CacheState) -> None:
        """Empties the targets of failed moves."""
        for group_index, block, move_id, _, target in (
            arguments["transfer"].records.tolist() if not arguments["ok"] else ()
        ):
            if block >= 0 and before.groups[group_index].arrival(np.int32(block)) == move_id:
                self.slots[group_index][target] = NOTHING
        for seq in np.flatnonzero(events.status == Status.HELD).tolist():
            self.rows[seq].lost = True


def adopt(
    expected: Expected,
    before: CacheState,
    after: CacheState,
    new: Mapping[Node, tuple],
    events: Sequence[Events],
    cut: Mapping[int, int],
) -> None:
    """Updates the expected cache after a composite of verbs: moves and copies bytes, then writes the tokens.

    `after` must be sound.

    Args:
      expected: the model to update.
      before: the state before the composite.
      after: the state after the composite.
      new: nodes of the mirror stored by the composite.
      events: the events of its transitions.
      cut: {row: remaining tokens} of its truncated rows.
    """
    held = []  # the ids of the K/V in the pool rows of active or cached blocks
    for slots, group in zip(expected.slots, before.groups, strict=True):
        in_use = (group.blocks.refcount > 0) | (group.blocks.fill > 0)
        held.append(set(slots[pool_rows(group)[in_use]].flat))
    cached = [
        int(num_cached)
        for transition in events
        for num_cached, queried in zip(transition.cached, transition.queried, strict=True)
        if queried > 0
    ]
    old = expected.rows
    for transition in events:
        expected.move(transition)
    expected.rows = dict(_rows(expected, after))
    claims = []  # group, indices of slots, the ids of their K/V, whether they are new
    for seq, row in expected.rows.items():
        start = min([*_starts(old, row, seq, before, after), *cached], default=0)
        start = min(start, cut.get(seq, start))
        positions = np.arange(len(row.items))
        kv_ids = np.array(expected.kv_ids(row.namespace, row.items), int)
        for group_index, group in enumerate(after.groups if not row.lost else ()):
            index, seen = expected.locate(group, seq, positions)
            claims.append((group_index, index, kv_ids[seen], positions[seen] >= start))
    for (group_index, block, _), (namespace, path, *_) in new.items():
        items = expected.items(path)
        start = min([*_starts(old, Row(namespace, items, items, len(items))), *cached], default=0)
        positions = np.arange((len(items) - 1) // expected.spec.block_size * expected.spec.block_size, len(items))
        pool_row = pool_rows(after.groups[group_index])[block]
        index = (np.full(len(positions), pool_row), positions % expected.spec.block_size)
        kv_ids = np.array(expected.kv_ids(namespace, items))[positions]
        claims.append((group_index, index, kv_ids, positions >= start))
    computed = {kv_id for *_, kv_ids, is_new in claims for kv_id in kv_ids[is_new].tolist()}
    for group_index, index, kv_ids, is_new in claims:  # includes copies made after the computation
        is_unknown = [kv_id in computed or kv_id not in held[group_index] for kv_id in kv_ids.tolist()]
        is_new = is_new | np.array(is_unknown, bool)
        expected.slots[group_index][index[0][is_new], index[1][is_new]] = kv_ids[is_new]
    expected.pins = _pins(expected, after)


def _starts(
    old: Mapping[int, Row], row: Row, seq: int = -1, before: CacheState | None = None, after: CacheState | None = None
) -> Iterator[int]:
    """The tokens of a text that rows had before: the row itself, or a possible source of a fork."""
    former = old.get(seq)
    if former and former.namespace == row.namespace:
        common = _common(former.items, row.items)
        if common == min(len(former.items), len(row.items)):
            yield common
            return
    for source_seq, source in old.items():
        if source.namespace != row.namespace:
            continue
        common = _common(source.items, row.items)
        forked = True
        if before is not None and after is not None:
            forked = before.groups[0].table[source_seq][0] == after.groups[0].table[seq][0]
        if forked and (common > 0 or (not source.items and source.prompt[:1] == row.items[:1])):
            yield common


def _common(first: Sequence[Item], second: Sequence[Item]) -> int:
    """Number of common leading items of two texts."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rows(expected: Expected, state: CacheState) -> Iterator[tuple[int, Row]]:
    """The rows in use, with the text in their blocks of the first group."""
    tree = state.groups[0]
    size = expected.spec.block_size
    fields = (state.seqs.namespace, state.seqs.length, state.seqs.committed)
    for seq in np.flatnonzero(state.seqs.length).tolist():
        namespace, length, committed = (int(field[seq]) for field in fields)
        blocks = tree.table[seq][: -(-committed // size)]
        parts = [x[blocks].reshape(-1)[:committed].tolist() for x in tree.blocks.text.parts().values()]
        items: list[Any] = [(token, *extra, 0)[:2] for token, *extra in zip(*parts, strict=True)]
        former = expected.rows.get(seq, Row(namespace, [], [], 0))
        keeps_prompt = _common(former.prompt, items) == min(len(former.prompt), committed)
        prompt = former.prompt[:length] if keeps_prompt else items
        lost = former.lost or any(_has_lost(group, seq) for group in state.groups)
        swapped_out = bool(np.asarray(state.seqs.swapped_out)[seq])
        yield seq, Row(namespace, prompt, items, length, swapped_out, lost)


def _has_lost(group: Any, seq: int) -> bool:
    held = group.table[seq][group.table[seq] >= 0]
    return bool(np.any(group.blocks.hits[held] == LOST))


def _pins(expected: Expected, state: CacheState) -> list[np.ndarray]:
    """The remaining pins, and pins of all other blocks held by no row, each with at most a row's length."""
    group = state.groups[0]
    width = expected.spec.max_blocks_per_seq
    refcount = np.asarray(group.blocks.refcount)
    held = group.table[group.table >= 0]
    unexplained = refcount - np.bincount(held, minlength=len(refcount))
    pins = []
    for pin in expected.pins:
        if np.all(unexplained[pin[pin >= 0]] > 0):
            unexplained[pin[pin >= 0]] -= 1
            pins.append(pin)
    new_pins = np.repeat(np.arange(len(unexplained), dtype=np.int32), np.maximum(unexplained, 0))
    parts = [new_pins[i : i + width] for i in range(0, len(new_pins), width)]
    return [*pins, *(np.pad(part, (0, width - len(part)), constant_values=NO_BLOCK) for part in parts)]


def pool_rows(group: Any) -> np.ndarray:
    """i32[B]; the pool row of each block."""
    return np.asarray(group.pool_row(np.arange(len(group.blocks.fill), dtype=np.int32)))


def arguments_of(request: Fields, state: CacheState, expected: Expected) -> dict[str, Any] | None:
    """The arguments except the state, or None if a request is empty (no row to extend, no pin).

    A "complete" takes the oldest moves not yet completed.
    """
    verb = request["verb"]
    spec = state.spec
    row = expected.rows.get(request.get("src" if verb == "fork" else "seq", NO_BLOCK))
    if verb in _WHOLE and row and row.lost:
        return None
    match verb:
        case "admit":
            width = spec.max_length + 1
            text = _text(spec, *(_padded(request.get(name, []), width) for name in ("tokens", "extra_ids")))
            lengths = {"length": np.int32(len(request["tokens"])), "namespace": np.int32(request["namespace"])}
            return {"seq": np.int32(request["seq"]), **lengths, **text, **_tiers(request)}
        case "extend":
            grows = [seq for seq, row in expected.rows.items() if not row.swapped_out and not row.lost]
            counts = np.array([n if seq in grows else 0 for seq, n in enumerate(request["num_tokens"])], np.int32)
            extends = {"active": counts > 0, "num_tokens": counts, "max_tokens": MAX_TOKENS, **_tiers(request)}
            return extends if counts.any() else None
        case "commit":
            return _commit(request, spec, expected)
        case "fork":
            return {"src": np.int32(request["src"]), "dst": np.int32(request["dst"])}
        case "truncate":
            length = (row.length if row else 1) - request["drop"]
            return {"seq": np.int32(request["seq"]), "length": np.int32(length)}
        case "release" | "swap_out" | "swap_in":
            return {"seq": np.int32(request["seq"])}
        case "forget_namespaces":
            return {"keep": np.array(request["keep"], np.int32)}
        case "evict":
            return {"blocks": np.array([request["block"]], np.int32)}
        case "pin":
            table = np.asarray(state.groups[0].table)[min(request["seq"], spec.max_seqs - 1)]
            findable = (np.asarray(state.groups[0].blocks.fill)[table] > 0) & (table >= 0)
            return {"blocks": np.where(findable & (np.arange(len(table)) < request["num_blocks"]), table, NO_BLOCK)}
        case "unpin":
            return {"blocks": expected.pins[request["which"] % len(expected.pins)]} if expected.pins else None
        case "reset":
            return {}
        case "offload" | "onboard":
            return _cached_blocks(request, state, on_host=verb == "onboard")
        case "watermark":
            return {"empty": np.int32(request["empty"]), "max_blocks": _MAX_BLOCKS, "group": request["group"]}
        case "backup":
            return {"max_blocks": _MAX_BLOCKS, "group": request["group"]}
        case "complete":
            if not expected.moves:
                return None
            transfer, is_last = expected.moves.popleft()
            return {"transfer": transfer, "ok": np.bool_(request["ok"] or not is_last)}
    raise ValueError(f"verb: got {verb!r}, wanted a verb of `random_requests`")


def _text(spec: CacheSpec, tokens: np.ndarray, extra_ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": tokens, "extra_ids": extra_ids} if spec.extra_ids else {"tokens": tokens}


def _commit(request: Fields, spec: CacheSpec, expected: Expected) -> dict[str, Any] | None:
    new = expected.written(request)
    columns = [np.stack([_padded([item[i] for item in items], spec.max_length) for items in new]) for i in range(2)]
    counts = np.array([len(items) for items in new], np.int32)
    return {**_text(spec, *columns), "num_tokens": counts} if counts.any() else None


def _cached_blocks(request: Fields, state: CacheState, on_host: bool) -> dict[str, Any]:
    """A selection of the first cached blocks of a tier."""
    group = jax.device_get(state.groups[request["group"]])
    in_tier = (pool_rows(group) >= len(group.empty)) == on_host
    blocks = np.flatnonzero(in_tier & (group.blocks.fill > 0) & (group.blocks.refcount == 0))[:_MAX_BLOCKS]
    chosen = [block for i, block in enumerate(blocks.tolist()) if request["which"] >> i & 1]
    padding = [NO_BLOCK] * (_MAX_BLOCKS - len(chosen))
    return {"blocks": np.array([*chosen, *padding], np.int32), "group": request["group"]}


def _tiers(request: Fields) -> dict[str, Any]:
    return {"tiers": ("device", "host")} if request.get("host") else {}


def _padded(values: Sequence[int], width: int) -> np.ndarray:
    return np.array([*values, *[0] * (width - len(values))], np.int32)
