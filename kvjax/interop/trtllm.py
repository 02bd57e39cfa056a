# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON, an event a line, written and read; partly filled blocks and priorities are there too.

    event    event_id from 0 without holes, data, window_size, attention_dp_rank if there are ranks, layer_group_id
    created  num_blocks_per_cache_level [device, host]; for each group that has K/V, the smallest window first
    stored   parent_hash, null at a root; blocks that chain; cache_salt and lora_name, if any
    removed  block_hashes, children first
    updated  block_hash; cache_level and priority, each as it was and as it is, or null

A stored block has its block_hash, tokens with extra ids, cache_level and priority. A partly filled one ends its event,
as readers look no further than to the first of these.

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
    from kvjax.interop.readers.trtllm import (  # noqa: I001
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
_MOST_TOKENS = 1 << 16  # of an event, so that no line is over about 6 MB


class Writer(EventEncoder[str]):
    """Writes a cache's events; `write` is a listener of `generate`, `stream` and `run_batch`.

    After a ValueError for events that cannot have happened nothing more can be written, until `attach` or events that
    begin with groups that are cleared, such as a snapshot of `kvjax.events.Listeners`. A bare first group is not
    written: its blocks have no K/V. Extra ids are written as numbers.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
      file: where `write` and `attach` write lines; a text file, which the caller closes.
      names, lora_names, model, key: as for `hashing.Hashing`.
      salts: "digest" writes a hash of each salt, "plain" the salt, "omit" no blocks of prompts with a salt.
      rank: the attention_dp_rank; None: the events have none.

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
        sizes = {number: window_size(spec, number) for number in range(int(spec.bare), len(spec.groups))}
        super().__init__(spec, Hashing(names, lora_names, model, key), sizes, unpublished)
        self._salt = functools.partial(salt_text, salts=salts, key=key)
        self._file, self.next_id = None if file is None else LineFile(file), 0  # event_id of the next event
        dp_rank = "" if rank is None else f',"attention_dp_rank":{rank}'
        self._ends = {  # the smallest window first
            number: f',"window_size":{size}{dp_rank},"layer_group_id":{number}}}'
            for size, number in sorted((size, number) for number, size in sizes.items())
        }
        self._begun, self._sound = False, True
        self._most_blocks = max(_MOST_TOKENS // spec.block_size, 1)
        self._template = functools.cache(self._make_template)
        self._space = functools.lru_cache(4096)(self._make_space)

    def write(self, events: Any) -> None:
        """Writes the lines of events to the file: a listener."""
        if self._file is None:
            raise ValueError("file: got None, wanted a file to write to")
        self._file.write(self.lines(events))

    def lines(self, events: Any) -> list[str]:
        """Follows events; their lines.

        Args:
          events: `Events`, an `EventLog`, or decoded events, which must be possible after those so far.
        """
        events = host_events(events, self.nodes.spec)
        if not (self._sound or events.begins_anew):
            raise ValueError("events: got more after some that cannot have happened, wanted `attach(state)` first")
        self._sound = False
        changes = self.follow(events)
        gone = [change for change in changes if change.kind == EventKind.CLEARED] if events.begins_anew else []
        found = self.messages(gone)
        if gone or not self._begun:  # the reader forgets what else it has
            found += self._created(self.nodes.spec.groups)
        found += self.messages(changes[len(gone) :])
        self._sound = True
        return found

    def dicts(self, events: Any) -> list[dict[str, Any]]:
        """The same as dicts."""
        return [json.loads(line) for line in self.lines(events)]

    def attach(self, state: CacheState) -> list[str]:
        """Begins anew with a cache that is not empty, was restored, or goes on after events that were impossible.

        Returns:
          The lines that bring a reader to its contents, which are in the file too if there is one: all that was stored
          is removed, the groups are created, and what the cache has is stored.
        """
        before = [change._replace(kind=EventKind.REMOVED, rows=change.rows[::-1]) for change in self.nodes.snapshot()]
        super().attach(state)
        found = [*self.messages(before), *self._created(state.groups), *self.messages(self.nodes.snapshot())]
        self._sound = True
        if self._file is not None:
            self._file.write(found)
        return found

    def _created(self, groups: Sequence[Any]) -> list[str]:
        self._begun, found = True, []
        for number in self._ends:
            levels = f"[{int(groups[number].num_blocks)},{self.nodes.spec.groups[number].num_host_blocks}]"
            found.append(self._event(number, f'{{"type":"created","num_blocks_per_cache_level":{levels}}}'))
        return found

    def _removed(self, number: int, rows: np.ndarray) -> list[str]:
        hashes = ",".join(map(str, col.hashes_of(rows).tolist()))
        return [self._event(number, f'{{"type":"removed","block_hashes":[{hashes}]}}')]

    def _updated(self, changes: Iterable[Change]) -> list[str]:
        """Lines of blocks that had another level or priority before."""
        found = []
        for change in changes:
            assert change.before is not None
            now = change.rows[:, [col.LEVEL, col.PRIORITY]].tolist()
            for block_hash, before, after in zip(col.hashes_of(change.rows), change.before.tolist(), now, strict=True):
                level, priority = map(_diff, before, after)
                data = f'"block_hash":{block_hash},"cache_level":{level},"priority":{priority}'
                found.append(self._event(change.group, f'{{"type":"updated",{data}}}'))
        return found

    def _stored(self, number: int, rows: np.ndarray, spaces: Mapping[int, Space]) -> list[str]:
        """Consecutive blocks that chain are one event."""
        texts, parents = self._texts(rows), col.hashes_of(rows, col.ABOVE).tolist()
        of, found = rows[:, [col.DEPTH, col.NAMESPACE]].tolist(), []
        for start, stop in pieces(col.chains_of(rows), self._most_blocks):
            depth, namespace = of[start]
            some, parent = ",".join(texts[start:stop]), parents[start] if depth else "null"
            data = f'{{"type":"stored","parent_hash":{parent},"blocks":[{some}]{self._space(spaces[namespace])}}}'
            found.append(self._event(number, data))
        return found

    def _texts(self, rows: np.ndarray) -> list[str]:
        """The stored_block of each row."""
        text = rows[:, col.TEXT :].reshape(len(rows), -1, self.nodes.spec.block_size)
        numbers = text.transpose(0, 2, 1).reshape(len(rows), -1).tolist()  # token, extra id, token, ...
        each, hashes = text.shape[1], col.hashes_of(rows).tolist()
        stated = rows[:, [col.FILL, col.LEVEL, col.PRIORITY]].tolist()
        return [
            self._template(fill) % (block_hash, *row[: fill * each], level, priority)
            for block_hash, row, (fill, level, priority) in zip(hashes, numbers, stated, strict=True)
        ]

    def _make_template(self, fill: int) -> str:
        """A stored_block of so many tokens, to be filled in by `%`."""
        token = _TOKEN % ("0", "%d")[self.nodes.spec.extra_ids]
        return _BLOCK % ",".join([token] * fill)

    def _make_space(self, space: Space) -> str:
        """The fields of a namespace in an event."""
        fields = {"cache_salt": self._salt(space.salt), "lora_name": space.lora}
        return "".join(f',"{name}":{json.dumps(value)}' for name, value in fields.items() if value is not None)

    def _event(self, number: int, data: str) -> str:
        found = f'{{"event_id":{self.next_id},"data":{data}{self._ends[number]}'
        self.next_id += 1
        return found


def window_size(spec: CacheSpec, number: int) -> int:
    """The window of a group in its events; -1 of recurrent layers; the largest, for Dynamo, of full attention."""
    group = spec.groups[number]
    if group.window is None:
        return spec.max_length
    return -1 if group.kind is Kind.RECURRENT else min(group.window, spec.max_length - 1)


def _diff(old: int, new: int) -> str:
    return "null" if old == new else f'{{"type":"event_diff","new_value":{new},"old_value":{old}}}'


def __getattr__(name: str) -> Any:
    """Imports what reads when it is asked for: it needs the extra `wires`, and `Writer` does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvjax.interop.readers import trtllm

    return getattr(trtllm, name)
