# SPDX-License-Identifier: Apache-2.0
"""Events for readers who know nodes by names: which are stored and which removed, and on which level."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvjax.events.records import EventKind
from kvjax.interop import columns as col
from kvjax.interop.batch import Batch, read
from kvjax.interop.naming import Naming
from kvjax.interop.nodes import NodeMap
from kvjax.interop.table import Gone, names_of, parents_first
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


class Teller[W](abc.ABC):
    """Tells events in the words `W` of a wire, which says how a node is removed and how it is stored.

    A change of level is a removal from the old level and a store on the new one, unless the wire has a word for it
    (`_updated`). In a run of updated records all removals come first, children first, then all stores, parents first:
    the records come in the caller's order.

    Attributes:
      nodes: what is cached by the events so far.
      naming: what the wire calls it; `naming.left_out` counts the blocks that are not published.
      groups: numbers of those that the wire carries.
    """

    def __init__(self, spec: CacheSpec, naming: Naming, groups: Iterable[int]):
        """Begins with an empty cache."""
        self.nodes, self.naming, self.groups = NodeMap(spec), naming, frozenset(groups)

    def read(self, events: Any) -> Batch:
        """Copies events to the host, and looks up their namespaces."""
        batch = read(events, self.nodes.spec)
        self.naming.learn(batch.namespaces())
        return batch

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache; `index` tells its contents."""
        self.nodes.attach(state)
        self.naming.learn(set[int]().union(*(group.namespaces for group in self.nodes.groups)))

    def events(self, batch: Batch) -> list[W]:
        """Follows a batch; what it tells."""
        found: list[W] = []
        for step in batch.steps:
            if step.kind == EventKind.UPDATED:
                found += self._updated(step.records)
            elif step.kind == EventKind.CLEARED:
                found += self._removed(self.nodes.clear(step.records))
                if not any(self.nodes.groups[number].names for number in self.groups):
                    found += self._cleared()
            else:
                found += self._removed(self.nodes.remove(step.records))
                for number, blocks in self.nodes.store(step.stored, step.text):
                    found += self._stored(self.nodes, number, self.settle(self.nodes, number, blocks))
        return found

    def settle(self, nodes: NodeMap, number: int, blocks: np.ndarray) -> np.ndarray:
        """As `Naming.settle`."""
        return self.naming.settle(nodes, number, blocks, number in self.groups)

    def index(self, nodes: NodeMap) -> list[W]:
        """Names the nodes of a map that have no names yet; what stores all that are published."""
        found: list[W] = []
        for number, group in enumerate(nodes.groups):
            self.settle(nodes, number, group.live)
            blocks = group.live
            found += self._stored(
                nodes, number, parents_first(group, blocks[group.table[blocks, col.STATUS] == col.SENT])
            )
        return found

    def _updated(self, records: np.ndarray) -> list[W]:
        """Follows updated records; tells of nodes that are on another level than before."""
        before, removed, stored = self.nodes.update(records), [], []
        for number, group in enumerate(self.nodes.groups):
            levels = {block: level for (of, block), level in before.items() if of == number}
            blocks = parents_first(group, np.array(list(levels), np.int64))
            left = np.array([levels[block] for block in blocks.tolist()], np.int64)
            for level in (0, 1):
                names = names_of(group.table[blocks[left == level], col.DIGEST : col.DIGEST + 2])[
                    ::-1
                ]  # children first
                removed += self._removed([Gone(number, names, np.full(len(names), level))])
            stored += self._stored(self.nodes, number, blocks)
        return removed + stored

    @abc.abstractmethod
    def _removed(self, gone: Iterable[Gone]) -> list[W]:
        """Tells what is gone."""

    @abc.abstractmethod
    def _stored(self, nodes: NodeMap, number: int, blocks: np.ndarray) -> list[W]:
        """Tells of a group's nodes that are stored; parents come before children."""

    def _cleared(self) -> list[W]:
        """Tells that nothing is left in any group."""
        return []
