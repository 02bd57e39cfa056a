# SPDX-License-Identifier: Apache-2.0
"""The cached blocks of another engine: a tree for each group of layers. Hashes are opaque."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Hash = int | bytes | str


class Root(NamedTuple):
    """The empty prefix of an adapter and a tenant."""

    lora: str | None
    salt: str | None


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A cached block: tokens and keys in the form of its engine, adapter and salt as in its event."""

    parent: Hash | Root
    tokens: Any
    keys: tuple[Any, ...]
    lora: str | None
    salt: str | None
    where: Any  # the media as bits, or the level with the priority


def paths[K](groups: Mapping[K, Mapping[Hash, Node]]) -> Iterator[tuple[K, list[Node], Hash | None]]:
    """Yields the group of each block, the blocks up to it, and the hash before them (None if they begin at a root).

    Window groups lose earlier blocks first, so the path may continue in any group.
    """
    for key, nodes in groups.items():
        own_first = [nodes, *(group for other_key, group in groups.items() if other_key != key)]
        for block_hash in nodes:
            before: Hash | Root = block_hash
            path = []
            seen = set[Hash]()
            while not isinstance(before, Root) and before not in seen:  # events of other engines may create a cycle
                node = next((group[before] for group in own_first if before in group), None)
                if node is None:
                    break
                seen.add(before)
                path.append(node)
                before = node.parent
            yield key, path[::-1], None if isinstance(before, Root) else before
