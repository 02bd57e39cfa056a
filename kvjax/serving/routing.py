# SPDX-License-Identifier: Apache-2.0
"""The cache that a prompt is sent to: what each of several has of it, by their events alone, and one rule."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from kvjax.blocks.hashes import HASH_BYTES, block_hash
from kvjax.events.log import EventLog
from kvjax.events.mirror import snapshot, to_list
from kvjax.events.records import Events
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


def choose_replica(cached: Sequence[int], load: Sequence[int], length: int, *, load_price: float = 0.0) -> int:
    """The number of the cache to send a prompt to: that which has most of it; of equal ones the least loaded.

    One that has to compute more than twice its share of all tokens gets no more: prompts with a prefix in common stay
    together only until then.

    Args:
      cached: tokens of the prompt that each cache has.
      load: tokens that each was sent and has yet to compute.
      length: tokens of the prompt.
      load_price: tokens of the prompt that a token of load outweighs.

    Example:
      >>> kvjax.serving.choose_replica(cached=[0, 512, 0], load=[0, 100, 0], length=600)  # cache 1 has most of it
      1
      >>> kvjax.serving.choose_replica(cached=[0, 512, 0], load=[0, 9000, 50], length=600)  # but it is overloaded
      0
    """
    most = 2 * (sum(load) + length) / len(load)
    candidates = [number for number, tokens in enumerate(load) if tokens <= most]
    return max(candidates, key=lambda n: (cached[n] - load_price * load[n], -load[n], -n))


def hashes_of(prompt: np.ndarray, namespace: int, size: int) -> list[bytes]:
    """The hash of each whole block of a prompt; it stands for all of the prompt up to its end."""
    parent, found = _root(namespace), list[bytes]()
    for start in range(0, len(prompt) - size + 1, size):
        parent = block_hash(parent, prompt[start : start + size])
        found.append(parent)
    return found


def num_leading(hashes: Sequence[bytes], found: Container[bytes]) -> int:
    """The number of leading hashes that are found."""
    return len([*itertools.takewhile(found.__contains__, hashes)])


class CachedPrefixes:
    """The whole blocks that a cache has, by its events: no device is asked, and a cache in a loop is not read.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
    """

    def __init__(self, spec: CacheSpec):
        self._spec = spec
        self._clear()

    def _clear(self) -> None:
        self._of_block = [dict[int, bytes]() for _ in self._spec.groups]
        self._counts = [collections.Counter[bytes]() for _ in self._spec.groups]  # none is 0

    def attach(self, state: CacheState) -> None:
        """Begins anew with a cache that is not empty."""
        self._clear()
        self._fold(snapshot(state))

    def observe(self, events: Events | EventLog) -> None:
        """Adds events, each once and in their order."""
        self._fold(to_list(events))

    def _fold(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            number, kind = event["group"], event["kind"]
            if kind == "stored":
                self._forget(number, event["block"])
                if len(event["tokens"]) == self._spec.block_size:
                    self._store(number, event)
            elif kind == "removed":
                self._forget(number, event["block"])
            elif kind == "cleared":
                self._of_block[number].clear()
                self._counts[number].clear()

    def _store(self, number: int, event: dict[str, Any]) -> None:
        parent = event["parent"]
        above = _root(event["namespace"]) if parent is None else self._of_block[0].get(parent[0])
        if above is not None:  # else no prefix leads there
            found = self._of_block[number][event["block"]] = block_hash(above, event["tokens"])
            self._counts[number][found] += 1

    def _forget(self, number: int, block: int) -> None:
        found, counts = self._of_block[number].pop(block, None), self._counts[number]
        if found is not None and counts[found] > 1:
            counts[found] -= 1
        elif found is not None:
            del counts[found]

    def whole_blocks(self, hashes: Sequence[bytes], length: int) -> int:
        """The number of whole blocks that an admission finds of a prompt with these hashes and so many tokens.

        It is that of `lookup`, but for tokens of a block of which the prompt has a part.
        """
        spec, size = self._spec, self._spec.block_size
        end = min(num_leading(hashes, self._counts[0]), (length - 1) // size)
        while end and any(
            hashes[column] not in self._counts[number] for number, column in spec.seen_columns(end * size, end)
        ):
            end -= 1
        return end


def _root(namespace: int) -> bytes:
    return int(namespace).to_bytes(HASH_BYTES, "little")
