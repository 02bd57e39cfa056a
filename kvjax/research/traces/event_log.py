# SPDX-License-Identifier: Apache-2.0
"""Makes a trace from the events of a cache: blocks stored and removed, in vLLM's or kvjax's format.

Such a log has no requests. A run of consecutively stored blocks, with all blocks before it, counts as a request. The
trace's `notes` describe which requests are missing.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Hashable, Sequence
from typing import Any

from kvjax.research.traces import records
from kvjax.research.traces.log_lines import LogFollower, checked_line
from kvjax.research.traces.trace import Trace, make_trace

_MAX_BLOCKS = 1 << 25  # of all prompts, each with all blocks before its stored blocks
_ON_DEVICE = (None, "GPU")
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_STORED += ("lora_name", "extra_keys", "group_idx")
_REMOVED = ("block_hashes", "medium", "group_idx")


def read_events(path: str | pathlib.Path, *, pause_ms: float = 5000.0, block_size: int | None = None) -> Trace:
    """Reads a log of events from `kvjax.interop.log`, or JSON lines of vLLM's batches (`KVEventBatch`).

    vLLM sends msgpack. Convert a payload to a line by `json.dumps(msgspec.msgpack.decode(payload), default=bytes.hex)`,
    in either form. Only events of the first group's blocks on the device are used.

    Prompts without new blocks store nothing, so they are missing. The log does not tell where an answer begins, so all
    blocks count as prompt, and answers have 0 tokens.

    Args:
      path: path of the file.
      pause_ms: the maximum pause within a request. A run that continues an earlier run belongs to the same request only
        if no more time has passed.
      block_size: tokens of a block in a log of kvjax; defaults to the tokens of its longest block.

    Raises:
      ValueError: for a line of another form.
    """
    follower = _Follower(pause_ms)
    log = LogFollower()
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
    """Joins runs of stored blocks into requests."""

    def __init__(self, pause_ms: float):
        self.requests: list[_Request] = []  # in the order of their beginning
        self.removed = self.unknown = 0  # blocks: removed, and stored after blocks that the log lacks
        self.skipped = 0  # events that do not tell the tokens of their blocks
        self.queried = self.cached = 0  # tokens looked up and found, if the log has them
        self.nodes: dict[Hashable, int] = {}  # for vLLM: ids of the cached blocks by hash
        self.sizes: list[int] = []  # the tokens of each id
        self.block_size: int | None = None  # of vLLM's events
        self._parents: list[int] = []  # id -> id, or -1
        self._depths: list[int] = []  # id -> blocks up to it
        self.ids: dict[Hashable, int] = {}  # contents, as a hash of the prefix -> id
        self._ends: dict[int, _Request] = {}  # id -> the last request that ended there
        self._pause = pause_ms

    def id_of(self, contents: Hashable, parent: int, tokens: int) -> int:
        """The id of a block with these contents. It stays the same when the block is removed and stored again."""
        block = self.ids.setdefault(contents, len(self._parents))
        if block == len(self._parents):
            self._parents.append(parent)
            self._depths.append(1 + (self._depths[parent] if parent >= 0 else 0))
            self.sizes.append(tokens)
        return block

    def store(self, where: str, now: float, parent: int, blocks: Sequence[int]) -> None:
        """Adds consecutively stored blocks to their request, or to a new request."""
        request = self._ends.pop(parent, None)
        if request is None or now - request.last > self._pause:
            request = _Request(where, now, parent, now)
            self.requests.append(request)
        request.leaf = blocks[-1]
        request.last = now
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
        records.check_blocks(((request.where, self._depths[request.leaf]) for request in self.requests), _MAX_BLOCKS)
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
            "From a log of stored blocks: a request is a run of them with all blocks before it, including answers. A "
            f"run that continues after more than {self._pause:g} ms is another request.",
            "Prompts without new blocks stored nothing and are missing, so the hit rates are below the true rates.",
        ]
        if self.queried:
            notes.append(
                f"The log counts {self.queried:,} prompt tokens looked up and {self.cached:,} found; the requests here "
                f"have {tokens:,}."
            )
        if self.unknown:
            notes.append(f"{self.unknown:,} blocks followed blocks that the log lacks: prompts begin there.")
        if self.skipped:
            notes.append(f"{self.skipped:,} events of stored blocks did not tell the tokens of each, and were skipped.")
        return [*notes, f"{self.removed:,} blocks were removed, which a trace cannot express."]


def _follow_kvjax(follower: _Follower, log: LogFollower, where: str, batch: dict[str, Any]) -> None:
    """Reads a line of `kvjax.interop.log`. A line with `created` is a snapshot, without requests."""
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
            block_id = follower.id_of(block.digest, parent, len(event["tokens"]))
            if not is_snapshot:
                follower.store(where, now, parent, [block_id])


def _follow_vllm(follower: _Follower, where: str, value: Any) -> None:
    """Reads a `KVEventBatch`. The batch and its events are maps or arrays."""
    batch: dict[str, Any] = value if isinstance(value, dict) else {"ts": value[0], "events": value[1]}
    now = 1000 * records.timestamp(where, batch, "ts")
    for event in records.field(where, batch, "events"):
        kind, event = _kind_and_fields(event)
        if kind == "AllBlocksCleared":
            follower.nodes.clear()
            continue
        if kind not in ("BlockStored", "BlockRemoved"):
            raise ValueError(f"{where}: got an event {kind!r:.40}, wanted an event of vLLM's")
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
        parent = follower.nodes.get(above, -1)
        blocks = []
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
