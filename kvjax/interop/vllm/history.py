# SPDX-License-Identifier: Apache-2.0
"""The last messages of a publisher, and the index before them: a replay that has no holes.

    base        the index before the oldest batch that is kept
    batches     (number of the first message, payloads, the changes that they encode)

The changes of a batch that drops out are written into the base.

A replay that is too old begins with this base, not with the present index: readers such as vLLM's example end a replay
at the message before the first that they have, and go on with that one, which must not be in the index already.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.interop.index import Change, NodeMap

_OVERHEAD = 512  # bytes of a batch beside its payloads and arrays, about


class Sent(NamedTuple):
    """A batch that was sent."""

    first: int
    payloads: Sequence[bytes]
    changes: Sequence[Change]

    @property
    def nbytes(self) -> int:
        """The number of bytes it holds."""
        return _OVERHEAD + sum(map(len, self.payloads)) + sum(change.nbytes for change in self.changes)


class History:
    """The last messages. One thread appends; any may ask."""

    def __init__(self, nodes: NodeMap, most_batches: int, most_bytes: int):
        self._lock = threading.Lock()
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self.restart(nodes, 0)

    def restart(self, nodes: NodeMap, following: int) -> None:
        """Begins with an index, which becomes the history's own, after which the message `following` comes."""
        with self._lock:
            self._base = nodes
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
                for change in oldest.changes:
                    self._base.write(change)

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
