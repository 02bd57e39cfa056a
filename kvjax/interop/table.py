# SPDX-License-Identifier: Apache-2.0
"""The nodes of one group, in a table with a row for each block (`columns.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax._checks import on_state
from kvjax.interop import columns as col
from kvjax.interop.batch import parts_of
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


class Gone(NamedTuple):
    """Nodes of a group that are gone and were known outside: names u64[n] and the levels i32[n] where they were."""

    group: int
    names: np.ndarray
    levels: np.ndarray


class Nodes:
    """The nodes of one group.

    Attributes:
      table: i32[B, W]; a row of words for each block.
      names: {name of 64 bits: block} of the nodes whose status is col.SENT.
    """

    def __init__(self, table: np.ndarray, names: dict[int, int]):
        self.table, self.names = table, names

    def __deepcopy__(self, memo: dict[int, Any]) -> Nodes:
        return Nodes(self.table.copy(), dict(self.names))

    @property
    def live(self) -> np.ndarray:
        """The blocks that have nodes, parents before children."""
        blocks = np.flatnonzero(self.table[:, col.FILL])
        return blocks[np.argsort(self.table[blocks, col.DEPTH], kind="stable")]

    @property
    def namespaces(self) -> set[int]:
        """The namespaces that have nodes."""
        return set(np.unique(self.table[self.live, col.NAMESPACE]).tolist())

    def forget(self, number: int, blocks: np.ndarray) -> Gone:
        """Takes the nodes of blocks i32[n] away; those that were known outside."""
        sent = blocks[self.table[blocks, col.STATUS] == col.SENT]
        gone = Gone(number, names_of(self.table[sent, col.DIGEST : col.DIGEST + 2]), self.table[sent, col.LEVEL])
        self.table[blocks, col.FILL] = 0
        for name in gone.names.tolist():
            del self.names[name]
        return gone


def names_of(words: np.ndarray) -> np.ndarray:
    """u64[n]; the names of 64 bits by the first two words i32[n, 2] of digests; see `kvjax.names.first_64_bits`."""
    names = np.ascontiguousarray(words).view(">u8")[:, 0].astype(np.uint64)
    return np.maximum(names, np.uint64(1))


def parents_among(group: int, blocks: np.ndarray) -> dict[int, int]:
    """{block: index} of a group's blocks i32[n] that can be parents: the first group links prefixes for all groups."""
    return dict(zip(blocks.tolist(), range(len(blocks)), strict=True)) if group == 0 else {}


def parents_first(group: Nodes, blocks: np.ndarray) -> np.ndarray:
    """The blocks in an order in which parents come before their children, and chains stay together."""
    names = names_of(group.table[blocks, col.DIGEST : col.DIGEST + 2]).tolist()
    parents = names_of(group.table[blocks, col.ABOVE : col.ABOVE + 2]).tolist()
    known, children, roots = set(names), {}, []
    for at in np.argsort(group.table[blocks, col.DEPTH], kind="stable").tolist():
        if parents[at] in known and group.table[blocks[at], col.DEPTH]:
            children.setdefault(parents[at], []).append(at)
        else:
            roots.append(at)
    order, waiting = [], roots[::-1]
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting += children.get(names[at], [])[::-1]
    return blocks[order]


def empty_table(spec: CacheSpec, num_ids: int) -> np.ndarray:
    """i32[B, W]; a table without nodes."""
    table = np.zeros((num_ids, width_of(spec)), np.int32)
    table[:, col.SIZE] = spec.block_size  # of a whole block; others are not hashed
    return table


def width_of(spec: CacheSpec) -> int:
    """W, the words of a row."""
    return col.TEXT + spec.block_size * len(parts_of(spec))


@on_state
def tables_of(state: CacheState, spec: CacheSpec) -> list[np.ndarray]:
    """The tables of a cache of this spec; a window group's block has the prefix of its block in the first group."""
    if state.spec != spec:
        raise ValueError(f"state: got a cache of {state.spec}, wanted one of {spec}")
    tree, size = jax.device_get(state.groups[0].blocks), spec.block_size
    roots = _namespaces(tree)
    tables = []
    for group in state.groups:
        blocks, ids = group.blocks, group.ids
        asked = (
            blocks.fill,
            blocks.generation,
            blocks.stated_priority(ids),
            group.on_device(ids),
            group.group0_blocks(ids),
        )
        fill, generation, priority, on_device, group0_blocks = jax.device_get(asked)
        table = empty_table(spec, len(fill))
        table[:, col.GENERATION], table[:, col.FILL], table[:, col.PRIORITY] = generation, fill, priority
        table[:, col.LEVEL] = ~on_device
        group0_blocks = np.where(fill > 0, group0_blocks, 0)
        table[:, col.PARENT : col.PARENT + 2] = tree.parent[group0_blocks]
        table[:, col.NAMESPACE], table[:, col.DEPTH] = roots[group0_blocks], tree.depth[group0_blocks]
        parts = list(tree.text.parts().values())
        table[:, col.TEXT :] = np.concatenate([part[group0_blocks] for part in parts], axis=1).reshape(
            -1, len(parts) * size
        )
        tables.append(table)
    return tables


def _namespaces(tree: Any) -> np.ndarray:
    """i32[B]; the namespace of each findable block of the first group, by its root."""
    found = np.zeros(len(tree.fill), np.int32)
    blocks = np.flatnonzero(tree.fill > 0)
    for block in blocks[np.argsort(tree.depth[blocks], kind="stable")].tolist():
        parent, second = tree.parent[block].tolist()
        found[block] = second if parent < 0 else found[parent]
    return found
