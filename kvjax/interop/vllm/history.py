# SPDX-License-Identifier: Apache-2.0
"""The last messages of a publisher, and the index before them: a replay that has no holes.

    base        the nodes before the oldest batch that is kept
    batches     (number of the first message, payloads, what the batch left in the blocks that it touched)

A batch that drops out is folded into the base by writing what it left there.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.events.records import EventKind
from kvjax.interop.batch import Batch
from kvjax.interop.nodes import NodeMap

_OVERHEAD = 512  # bytes of a batch beside its payloads and arrays, about


class Image(NamedTuple):
    """The state of the blocks of a group that a batch touched: blocks i32[n], perhaps repeated, rows i32[n, W]."""

    group: int
    blocks: np.ndarray
    rows: np.ndarray


class Sent(NamedTuple):
    """A batch that was sent."""

    first: int
    payloads: Sequence[bytes]
    images: Sequence[Image]

    @property
    def nbytes(self) -> int:
        """The number of bytes it holds."""
        arrays = sum(image.rows.nbytes + image.blocks.nbytes for image in self.images)
        return _OVERHEAD + sum(map(len, self.payloads)) + arrays


def images_of(batch: Batch, nodes: NodeMap) -> list[Image]:
    """The images of a batch that was followed."""
    images, numbers = [], batch.records[:, 1]
    for number in sorted(set(numbers.tolist())):
        records, table = batch.records[numbers == number], nodes.groups[number].table
        cleared = np.any(records[:, 0] == EventKind.CLEARED)
        blocks = np.arange(len(table)) if cleared else records[:, 2]
        images.append(Image(number, blocks, table[blocks]))
    return images


class History:
    """The last messages. One thread appends; any may ask."""

    def __init__(self, nodes: NodeMap, most_batches: int, most_bytes: int):
        self._lock = threading.Lock()
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self.restart(nodes, 0)

    def restart(self, nodes: NodeMap, following: int) -> None:
        """Begins with an index, after which the message `following` comes."""
        with self._lock:
            self._base = nodes.copy()
            self._batches: collections.deque[Sent] = collections.deque()
            self._bytes, self._next = 0, following

    def append(self, sent: Sent) -> None:
        """Adds a batch, before it is sent: what a reader has seen can be asked for."""
        with self._lock:
            self._batches.append(sent)
            self._bytes += sent.nbytes
            self._next = sent.first + len(sent.payloads)
            while self._batches and (len(self._batches) > self._most_batches or self._bytes > self._most_bytes):
                oldest = self._batches.popleft()
                self._bytes -= oldest.nbytes
                for number, blocks, rows in oldest.images:
                    self._base.groups[number].table[blocks] = rows

    def since(self, start: int) -> tuple[NodeMap | None, int, list[tuple[int, bytes]]]:
        """The reply to a reader who asks for the messages from `start` on.

        Returns:
          The index before the oldest message kept, or None if the reader has it; the number of that message; and the
          messages, with their numbers.
        """
        with self._lock:
            oldest = self._batches[0].first if self._batches else self._next
            found = [
                (number, payload)
                for sent in self._batches
                for number, payload in enumerate(sent.payloads, sent.first)
                if number >= start
            ]
            return (self._base.copy() if start < oldest else None), oldest, found
