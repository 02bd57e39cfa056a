# SPDX-License-Identifier: Apache-2.0
"""Writes and reads TensorRT-LLM's event JSON, a line for each event, with partly filled blocks and priorities.

    event    event_id from 0 without holes, data, window_size, attention_dp_rank if there are ranks, layer_group_id
    created  num_blocks_per_cache_level [device, host]; for each group with K/V, the smallest window first
    stored   parent_hash, null at a root; blocks that chain; cache_salt and lora_name, if any
    removed  block_hashes, children first
    updated  block_hash; cache_level and priority, each as a diff or null

A stored block has its block_hash, tokens with extra ids, cache_level and priority. A partly filled block is the last of
its event, because readers ignore the blocks after it.

Source: TensorRT-LLM's `_utils.py`, `KVCacheEventSerializer`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from kvjax._files import LineFile
from kvjax.blocks.keys import Namespaces
from kvjax.checks import static_int
from kvjax.events import columns as col
from kvjax.events.host_events import host_events, pieces
from kvjax.events.index import Change, Space
from kvjax.events.records import EventKind
from kvjax.interop.encoder import WHOLE, EventEncoder, omitted_salts
from kvjax.interop.hashing import Hashing, salt_text
from kvjax.spec import CacheSpec, Kind
from kvjax.state import CacheState

if TYPE_CHECKING:
    from kvjax.interop.readers.trtllm import (
        Block,
        Created,
        Diff,
        Event,
        Mirror,
        Prefix,
        Removed,
        Stored,
        Updated,
        parse,
    )

__all__ = ["Block", "Created", "Diff", "Event", "Mirror", "Prefix", "Removed", "Stored", "Updated", "Writer", "parse"]

_TOKEN = '{"type":"unique_token","token_id":%%d,"token_extra_id":%s}'
_BLOCK = '{"type":"stored_block","block_hash":%%d,"tokens":[%s],"cache_level":%%d,"priority":%%d}'
_MAX_TOKENS = 1 << 16  # of an event, so lines stay below about 6 MB


class Writer(EventEncoder[str]):
    """Writes a cache's events. Use `write` as a listener of `generate`, `stream` and `run_batch`.

    After a ValueError for impossible events, nothing is written until you call `attach`, or pass events that begin with
    cleared groups, such as a snapshot of `kvjax.events.Listeners`. A bare first group is not written, because its
    blocks have no K/V. Extra ids are written as numbers.

    Args:
      spec: the spec of the cache, which must be empty; otherwise call `attach`.
      file: a text file for the lines of `write` and `attach`. You close it yourself.
      names, lora_names, model, key: options of `hashing.Hashing`.
      salts: "digest" writes a hash of each salt, "plain" the salt, "omit" no blocks of prompts with a salt.
      rank: the events' attention_dp_rank; None omits it.

    Example:
      >>> import json
      >>> from kvjax.interop.trtllm import Writer
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> created, stored = (json.loads(line)["data"] for line in Writer(spec).lines(events))
      >>> stored["type"], [[token["token_id"] for token in block["tokens"]] for block in stored["blocks"]]
      ('stored', [[0, 1, 2, 3], [4, 5, 6, 7]])
    """

    def __init__(
        self,
        spec: CacheSpec,
        file: TextIO | None = None,
        *,
        names: Namespaces | None = None,
        lora_names: Mapping[int, str] | None = None,
        model: str | None = None,
        key: bytes = b"",
        salts: str = "digest",
        rank: int | None = None,
    ):
        rank = None if rank is None else static_int("rank", rank, 0)
        unpublished = {flag: reason for flag, reason in WHOLE.items() if flag != col.PARTIAL} | omitted_salts(salts)
        sizes = {index: window_size(spec, index) for index in range(int(spec.bare), len(spec.groups))}
        super().__init__(spec, Hashing(names, lora_names, model, key), sizes, unpublished)
        self._salt = functools.partial(salt_text, salts=salts, key=key)
        self._file = None if file is None else LineFile(file)
        self.next_id = 0  # event_id of the next event
        dp_rank = "" if rank is None else f',"attention_dp_rank":{rank}'
        self._ends = {  # the smallest window first
            group_index: f',"window_size":{size}{dp_rank},"layer_group_id":{group_index}}}'
            for size, group_index in sorted((size, group_index) for group_index, size in sizes.items())
        }
        self._begun = False
        self._sound = True
        self._max_blocks = max(_MAX_TOKENS // spec.block_size, 1)
        self._template = functools.cache(self._make_template)
        self._space = functools.lru_cache(4096)(self._make_space)

    def write(self, events: Any) -> None:
        """Writes the lines of events to the file; for use as a listener."""
        if self._file is None:
            raise ValueError("file: got None, wanted a file to write to")
        self._file.write(self.lines(events))

    def lines(self, events: Any) -> list[str]:
        """Applies events and returns their lines.

        Args:
          events: `Events`, an `EventLog`, or decoded events, possible after all events so far.
        """
        events = host_events(events, self.nodes.spec)
        if not (self._sound or events.begins_anew):
            raise ValueError("events: got events after impossible events, wanted `attach(state)` first")
        self._sound = False
        changes = self.follow(events)
        cleared = [change for change in changes if change.kind == EventKind.CLEARED] if events.begins_anew else []
        lines = self.messages(cleared)
        if cleared or not self._begun:  # created groups make a reader forget everything else
            lines += self._created(self.nodes.spec.groups)
        lines += self.messages(changes[len(cleared) :])
        self._sound = True
        return lines

    def dicts(self, events: Any) -> list[dict[str, Any]]:
        """Applies events and returns their lines as dicts."""
        return [json.loads(line) for line in self.lines(events)]

    def attach(self, state: CacheState) -> list[str]:
        """Takes over the index of a cache that is not empty, was restored, or made impossible events.

        Returns:
          The lines for a reader, also written to the file if there is one: all stored blocks are removed, the groups
          are created, and the cache's blocks are stored.
        """
        before = [change._replace(kind=EventKind.REMOVED, rows=change.rows[::-1]) for change in self.nodes.snapshot()]
        super().attach(state)
        lines = [*self.messages(before), *self._created(state.groups), *self.messages(self.nodes.snapshot())]
        self._sound = True
        if self._file is not None:
            self._file.write(lines)
        return lines

    def _created(self, groups: Sequence[Any]) -> list[str]:
        self._begun = True
        lines = []
        for group_index in self._ends:
            num_host_blocks = self.nodes.spec.groups[group_index].num_host_blocks
            levels = f"[{int(groups[group_index].num_blocks)},{num_host_blocks}]"
            lines.append(self._event(group_index, f'{{"type":"created","num_blocks_per_cache_level":{levels}}}'))
        return lines

    def _removed(self, group_index: int, rows: np.ndarray) -> list[str]:
        hashes = ",".join(map(str, col.hashes_of(rows).tolist()))
        return [self._event(group_index, f'{{"type":"removed","block_hashes":[{hashes}]}}')]

    def _updated(self, changes: Iterable[Change]) -> list[str]:
        """Lines for blocks with another level or priority than before."""
        lines = []
        for change in changes:
            assert change.before is not None
            now = change.rows[:, [col.LEVEL, col.PRIORITY]].tolist()
            for block_hash, before, after in zip(col.hashes_of(change.rows), change.before.tolist(), now, strict=True):
                level, priority = map(_diff, before, after)
                data = f'"block_hash":{block_hash},"cache_level":{level},"priority":{priority}'
                lines.append(self._event(change.group, f'{{"type":"updated",{data}}}'))
        return lines

    def _stored(self, group_index: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[str]:
        """Writes each chain of consecutive blocks as an event."""
        texts = self._texts(rows)
        parents = col.hashes_of(rows, col.ABOVE).tolist()
        prefixes = rows[:, [col.DEPTH, col.NAMESPACE]].tolist()
        lines = []
        for start, stop in pieces(col.chains_of(rows), self._max_blocks):
            depth, namespace = prefixes[start]
            blocks = ",".join(texts[start:stop])
            parent = parents[start] if depth else "null"
            data = f'{{"type":"stored","parent_hash":{parent},"blocks":[{blocks}]{self._space(spaces[namespace])}}}'
            lines.append(self._event(group_index, data))
        return lines

    def _texts(self, rows: np.ndarray) -> list[str]:
        """Formats each row as a stored block."""
        text = rows[:, col.TEXT :].reshape(len(rows), -1, self.nodes.spec.block_size)
        values = text.transpose(0, 2, 1).reshape(len(rows), -1).tolist()  # token, extra id, token, ...
        values_per_token = text.shape[1]
        hashes = col.hashes_of(rows).tolist()
        details = rows[:, [col.FILL, col.LEVEL, col.PRIORITY]].tolist()
        return [
            self._template(fill) % (block_hash, *row[: fill * values_per_token], level, priority)
            for block_hash, row, (fill, level, priority) in zip(hashes, values, details, strict=True)
        ]

    def _make_template(self, fill: int) -> str:
        """A stored_block of `fill` tokens, to be filled in by `%`."""
        token = _TOKEN % ("0", "%d")[self.nodes.spec.extra_ids]
        return _BLOCK % ",".join([token] * fill)

    def _make_space(self, space: Space) -> str:
        """The fields of an event that identify its namespace."""
        fields = {"cache_salt": self._salt(space.salt), "lora_name": space.lora}
        return "".join(f',"{name}":{json.dumps(value)}' for name, value in fields.items() if value is not None)

    def _event(self, group_index: int, data: str) -> str:
        line = f'{{"event_id":{self.next_id},"data":{data}{self._ends[group_index]}'
        self.next_id += 1
        return line


def window_size(spec: CacheSpec, group_index: int) -> int:
    """The window of a group in its events: -1 for recurrent layers, and the largest for full attention, for Dynamo."""
    group = spec.groups[group_index]
    if group.window is None:
        return spec.max_length
    return -1 if group.kind is Kind.RECURRENT else min(group.window, spec.max_length - 1)


def _diff(old: int, new: int) -> str:
    return "null" if old == new else f'{{"type":"event_diff","new_value":{new},"old_value":{old}}}'


def __getattr__(name: str) -> Any:
    """Imports a reader on first use, because readers need the extra `wires`, while `Writer` does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvjax.interop.readers import trtllm

    return getattr(trtllm, name)
