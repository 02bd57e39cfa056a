# SPDX-License-Identifier: Apache-2.0
"""The cache as a reader of TensorRT-LLM's event JSON has it. Hashes are opaque."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvjax.interop.trtllm.read import Block, Created, Event, Name, Removed, Stored, Updated, parse_line


class Prefix(NamedTuple):
    """A cached prefix.

    Attributes:
      window, group: of the layers, as on the line; the group is None where lines have none.
      lora, salt: likewise.
      tokens: all tokens (token id, extra id), or those behind `after`.
      after: the name of the prefix before, where no line has told what it is; else None.
    """

    window: int
    group: int | None
    lora: str | None
    salt: str | None
    tokens: tuple[tuple[int, int], ...]
    after: Name | None = None


class _Node(NamedTuple):
    """A cached block, with what it follows."""

    parent: Name | None
    block: Block
    salt: str | None
    lora: str | None


@dataclasses.dataclass
class _Group:
    """The blocks of a group by name; whether nothing is missing, as far as is known."""

    nodes: dict[Name, _Node] = dataclasses.field(default_factory=dict)
    complete: bool = False


class Mirror:
    """The cached blocks by the lines so far.

    Attributes:
      max_blocks: the most blocks that it takes.
      last: event_id of the last event that counts, None before the first.
      counts: events followed; lines refused and duplicates, which change nothing; gaps in the numbers; events of other
        ranks.
    """

    def __init__(self, max_blocks: int = 1 << 22, rank: int | None = None):
        """Begins with nothing; `rank`: whose events to follow where a stream has those of several, None: all."""
        self.max_blocks, self.rank, self.last = max_blocks, rank, None
        self.counts = dict.fromkeys(("events", "refused", "gaps", "duplicates", "others"), 0)
        self._groups: dict[tuple[int, int | None], _Group] = {}

    def __len__(self) -> int:
        return sum(len(group.nodes) for group in self._groups.values())

    @property
    def complete(self) -> bool:
        """Whether each group is known from its beginning (created), with no event missing since."""
        return bool(self._groups) and all(group.complete for group in self._groups.values())

    def follow(self, lines: Iterable[str | bytes | dict[str, Any]]) -> None:
        """Follows lines or dicts; what is refused is counted and changes nothing."""
        for line in lines:
            try:
                self.apply(parse_line(line))
            except ValueError:
                self.counts["refused"] += 1
                self._doubt()

    def apply(self, event: Event) -> None:
        """Follows an event.

        Raises:
          ValueError: if there would be too many blocks or groups; then nothing has changed.
        """
        if self.rank is not None and event.rank != self.rank:
            self.counts["others"] += 1
            return
        if event.number == self.last:
            self.counts["duplicates"] += 1
            return
        self._check(event)
        self._count(event.number)
        group = self._groups.setdefault((event.window, event.group), _Group())
        match event.data:
            case Created():
                self._groups[event.window, event.group] = _Group(complete=True)
            case Stored(parent, blocks, salt, lora):
                for block in blocks:
                    group.nodes[block.name] = _Node(parent, block, salt, lora)
                    parent = block.name
            case Removed(names):
                for name in names:
                    group.nodes.pop(name, None)
            case Updated(name, level, priority) if name in group.nodes:
                node = group.nodes[name]
                level = node.block.level if level is None else level.new
                priority = node.block.priority if priority is None else priority.new
                group.nodes[name] = node._replace(block=node.block._replace(level=level, priority=priority))

    @property
    def index(self) -> dict[Prefix, tuple[int, int]]:
        """{prefix: (level, priority)} of everything that is cached; for looking at and for tests."""
        found = {}
        for key, group in self._groups.items():
            for name, node in group.nodes.items():
                found[self._prefix(key, name)] = node.block.level, node.block.priority
        return found

    def _check(self, event: Event) -> None:
        more = len(event.data.blocks) if isinstance(event.data, Stored) else 0
        if len(self) + more > self.max_blocks or len(self._groups) > 1 << 10:
            raise ValueError(f"lines: got {len(self) + more} blocks, wanted at most {self.max_blocks}")

    def _count(self, number: int) -> None:
        """Notes the number of an event; one that is lower than the last is another process's."""
        self.counts["events"] += 1
        if self.last is not None and number < self.last:
            self._groups.clear()
        elif number != (0 if self.last is None else self.last + 1):
            self.counts["gaps"] += 1
            self._doubt()
        self.last = number

    def _doubt(self) -> None:
        for group in self._groups.values():
            group.complete = False

    def _prefix(self, key: tuple[int, int | None], name: Name) -> Prefix:
        """All that is told of a block's prefix, by any group: windows lose blocks ahead of those that follow them."""
        mine = self._groups[key]
        others = [group for of, group in self._groups.items() if of != key]
        node, path, seen = mine.nodes[name], [], set[Name]()
        before: Name | None = name
        while before is not None and before not in seen:  # foreign lines may go in a circle
            told = [group.nodes[before] for group in (mine, *others) if before in group.nodes]
            if not told:
                break
            seen.add(before)
            path.append(told[0].block.tokens)
            before = told[0].parent
        tokens = tuple(token for part in reversed(path) for token in part)
        return Prefix(*key, node.lora, node.salt, tokens, before)
