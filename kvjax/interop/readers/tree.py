# SPDX-License-Identifier: Apache-2.0
"""The blocks that another engine has cached: a tree for each group of layers. Hashes are opaque."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

Hash = int | bytes | str


class Root(NamedTuple):
    """The empty prefix of an adapter and a tenant."""

    lora: str | None
    salt: str | None


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A cached block.

    Attributes:
      parent: the prefix before it.
      tokens, keys: of the block, in the form of its engine.
      lora, salt: as its event has them.
      where: the media as bits, or the level and the priority.
    """

    parent: Hash | Root
    tokens: Any
    keys: tuple[Any, ...]
    lora: str | None
    salt: str | None
    where: Any

    @property
    def content(self) -> tuple[Any, ...]:
        """All that identifies it among other blocks."""
        return self.parent, self.tokens, self.keys


class Group:
    """The cached blocks of a group of layers by their hashes."""

    def __init__(self):
        self.nodes: dict[Hash, Node] = {}


class Tree[K, G: Group]:
    """The cached blocks by the events so far.

    Attributes:
      max_blocks: the most blocks that it takes.
    """

    def __init__(self, max_blocks: int = 1 << 22):
        self.max_blocks = max_blocks
        self._groups: dict[K, G] = {}

    def __len__(self) -> int:
        return sum(len(group.nodes) for group in self._groups.values())

    def _paths(self) -> Iterator[tuple[K, list[Node], Hash | None]]:
        """The group of each block; the blocks up to it; and the hash before them, None if they begin at a root.

        A window loses blocks ahead of those that follow them, so a block of any group continues a path.
        """
        for key, group in self._groups.items():
            groups = [group, *(other for of, other in self._groups.items() if of != key)]
            for block_hash in group.nodes:
                before: Hash | Root = block_hash
                path, seen = [], set[Hash]()
                while not isinstance(before, Root) and before not in seen:  # foreign events may go in a circle
                    node = next((other.nodes[before] for other in groups if before in other.nodes), None)
                    if node is None:
                        break
                    seen.add(before)
                    path.append(node)
                    before = node.parent
                yield key, path[::-1], None if isinstance(before, Root) else before
