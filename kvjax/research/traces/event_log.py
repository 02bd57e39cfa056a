# SPDX-License-Identifier: Apache-2.0
"""A trace from the events of a cache: blocks stored and removed, in vLLM's events or kvjax's own.

Such a log has no requests. A run of blocks stored one behind the other, with all blocks before it, is taken for one.
The trace's `notes` say what that misses.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Hashable, Sequence
from typing import Any

from kvjax.research.traces import records
from kvjax.research.traces.log_lines import LogFollower, checked_line
from kvjax.research.traces.trace import Trace, make_trace

_MOST_BLOCKS = 1 << 25  # of all prompts: each has all blocks before its own
_ON_DEVICE = (None, "GPU")
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_STORED += ("lora_name", "extra_keys", "group_idx")
_REMOVED = ("block_hashes", "medium", "group_idx")


def read_events(path: str | pathlib.Path, *, pause_ms: float = 5000.0, block_size: int | None = None) -> Trace:
    """Reads a log of events: kvjax's own (`kvjax.interop.log`), or JSON lines of vLLM's batches (`KVEventBatch`).

    vLLM sends msgpack; `json.dumps(msgspec.msgpack.decode(payload), default=bytes.hex)` is such a line, of either form.
    Only events of blocks of the first group on the device are used.

    Prompts that only hit store nothing: the log does not have them. Nor does it mark the end of a prompt and the
    beginning of its answer: all blocks count as prompt, and answers have 0 tokens.

    Args:
      path: of the file.
      pause_ms: a run that goes on where an earlier one ended belongs to the same request if no more time has passed.
      block_size: tokens of a block of kvjax's; None: those of the longest block in the log.

    Raises:
      ValueError: for a line that is no such batch.
    """
    follower, log = _Follower(pause_ms), LogFollower()
    for where, line in records.lines(path):
        batch = records.parse_batch(where, line)
        if isinstance(batch, dict) and "queried" in batch:
            _follow_kvjax(follower, log, where, batch)
            continue
        try:
            _follow_vllm(follower, where, batch)
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"{where}: got {line:.60}, wanted a batch of events: {error!r:.80}") from error
    if not follower.requests:
        raise ValueError(f"{path}: got no stored blocks, wanted at least one")
    return follower.trace(block_size)


@dataclasses.dataclass
class _Request:
    """A request in a log: file and line of its first event, its last block, and the times (ms) of both."""

    where: str
    begun: float
    leaf: int
    last: float


class _Follower:
    """Puts requests together."""

    def __init__(self, pause_ms: float):
        self.requests: list[_Request] = []  # in the order in which they began
        self.removed = self.unknown = 0  # blocks: removed, and stored behind blocks that the log does not have
        self.skipped = 0  # events that say no tokens of their blocks
        self.queried = self.cached = 0  # tokens: looked up and found, where the log has them
        self.nodes: dict[Hashable, int] = {}  # vLLM's: ids of the blocks that are cached, by their hash
        self.sizes: list[int] = []  # the tokens of each id
        self.block_size: int | None = None  # vLLM's
        self._parents: list[int] = []  # id -> id, or -1
        self._depths: list[int] = []  # id -> blocks up to it
        self.ids: dict[Hashable, int] = {}  # contents, as a hash of the prefix -> id
        self._ends: dict[int, _Request] = {}  # id -> the request that ended there last
        self._pause = pause_ms

    def id_of(self, contents: Hashable, parent: int, tokens: int) -> int:
        """The id of a block with these contents; equal after it was removed and stored again."""
        block = self.ids.setdefault(contents, len(self._parents))
        if block == len(self._parents):
            self._parents.append(parent)
            self._depths.append(1 + (self._depths[parent] if parent >= 0 else 0))
            self.sizes.append(tokens)
        return block

    def store(self, where: str, now: float, parent: int, blocks: Sequence[int]) -> None:
        """Blocks were stored one behind the other."""
        request = self._ends.pop(parent, None)
        if request is None or now - request.last > self._pause:
            request = _Request(where, now, parent, now)
            self.requests.append(request)
        request.leaf, request.last = blocks[-1], now
        self._ends[request.leaf] = request

    def path(self, leaf: int) -> list[int]:
        """The ids from a root to a block."""
        path = []
        while leaf >= 0:
            path.append(leaf)
            leaf = self._parents[leaf]
        return path[::-1]

    def trace(self, block_size: int | None) -> Trace:
        """The requests as a trace."""
        records.check_blocks(((request.where, self._depths[request.leaf]) for request in self.requests), _MOST_BLOCKS)
        prompts = [self.path(request.leaf) for request in self.requests]
        lengths = [sum(self.sizes[block] for block in prompt) for prompt in prompts]
        first = self.requests[0].begun
        return make_trace(
            [request.begun - first for request in self.requests],
            lengths,
            [0] * len(prompts),
            prompts,
            self.block_size or block_size or max(self.sizes),
            notes=self._notes(sum(lengths)),
            where=[request.where for request in self.requests],
        )

    def _notes(self, tokens: int) -> list[str]:
        notes = [
            "From a log of stored blocks: a request is a run of them with all blocks before it, answers included; a "
            f"run that goes on after more than {self._pause:g} ms is another one.",
            "Prompts that only hit stored nothing and are missing, so hit rates are lower than they were.",
        ]
        if self.queried:
            notes.append(
                f"The log counts {self.queried:,} prompt tokens looked up and {self.cached:,} found; the requests here "
                f"have {tokens:,}."
            )
        if self.unknown:
            notes.append(f"{self.unknown:,} blocks followed blocks that the log does not have: prompts begin there.")
        if self.skipped:
            notes.append(f"{self.skipped:,} events of stored blocks did not say the tokens of each, and were skipped.")
        return [*notes, f"{self.removed:,} blocks were removed; a trace does not say so."]


def _follow_kvjax(follower: _Follower, log: LogFollower, where: str, batch: dict[str, Any]) -> None:
    """Reads a line of `kvjax.interop.log`. One with `created` is a snapshot: no requests."""
    line = checked_line(where, batch)
    now = 1000 * line.ts
    follower.queried += line.queried
    follower.cached += line.cached
    events = [event for event in line.events if event["group"] == 0]
    is_snapshot = any(event["kind"] == "created" for event in events)
    for event in events:
        for change, block in log.follow(event, now):
            follower.removed += change == "removed"
            if change != "stored":
                continue
            parent = follower.ids.get(block.parent, -1)
            follower.unknown += event.get("parent") is not None and parent < 0
            number = follower.id_of(block.digest, parent, len(event["tokens"]))
            if not is_snapshot:
                follower.store(where, now, parent, [number])


def _follow_vllm(follower: _Follower, where: str, value: Any) -> None:
    """Reads a `KVEventBatch`, as a map or as an array, with events that are maps or arrays."""
    batch: dict[str, Any] = value if isinstance(value, dict) else {"ts": value[0], "events": value[1]}
    now = 1000 * records.timestamp(where, batch, "ts")
    for event in records.field(where, batch, "events"):
        kind, event = _kind_and_fields(event)
        if kind == "AllBlocksCleared":
            follower.nodes.clear()
            continue
        if kind not in ("BlockStored", "BlockRemoved"):
            raise ValueError(f"{where}: got an event {kind!r:.40}, wanted one of vLLM's")
        hashes = event["block_hashes"]
        if event.get("medium") not in _ON_DEVICE or event.get("group_idx") or not hashes:
            continue
        if kind == "BlockRemoved":
            follower.removed += sum(follower.nodes.pop(block_hash, None) is not None for block_hash in hashes)
            continue
        size = records.count(where, event, "block_size")
        if len(event["token_ids"]) == 0 or (size and len(event["token_ids"]) > size * len(hashes)):
            follower.skipped += 1
            continue
        if size < 1 or follower.block_size not in (None, size):
            raise ValueError(f"{where}: block_size: got {size}, wanted {follower.block_size or 'at least 1'}")
        if len(event["token_ids"]) != size * len(hashes):
            raise ValueError(
                f"{where}: token_ids: got {len(event['token_ids'])}, wanted {size} for each of {len(hashes)} blocks"
            )
        follower.block_size = size
        above = event["parent_block_hash"]
        follower.unknown += above is not None and above not in follower.nodes
        parent, blocks = follower.nodes.get(above, -1), []
        for block_hash in hashes:
            blocks.append(follower.id_of(block_hash, blocks[-1] if blocks else parent, size))
            follower.nodes[block_hash] = blocks[-1]
        follower.store(where, now, parent, blocks)


def _kind_and_fields(event: Any) -> tuple[str, dict[str, Any]]:
    """The kind of an event, and its fields by name."""
    if isinstance(event, dict):
        return event["type"], event
    kind, *values = event
    return kind, dict(zip(_STORED if kind == "BlockStored" else _REMOVED, values, strict=False))
