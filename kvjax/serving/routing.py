# SPDX-License-Identifier: Apache-2.0
"""Chooses a cache for a prompt: finds the cached part in each cache from its events, and applies a rule."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

import numpy as np

from kvjax.blocks.hashes import Hashing, block_hash, first_64_bits, root_hash
from kvjax.events.host_events import parts_of
from kvjax.events.index import NodeMap, Space
from kvjax.spec import CacheSpec


def choose_replica(cached: Sequence[int], load: Sequence[float], length: int, *, load_price: float = 0.0) -> int:
    """Returns the index of the cache for a prompt: the cache with most of it, or the least loaded among equals.

    Prompts with a common prefix stay together, until their cache is overloaded: it has more than twice as many tokens
    to compute as each other cache would have on average with this prompt. An overloaded cache gets no more prompts.

    Args:
      cached: number of the prompt's tokens in each cache.
      load: number of tokens sent to each cache and not computed yet.
      length: number of prompt tokens.
      load_price: number of prompt tokens outweighing a token of load.

    Example:
      >>> kvjax.serving.choose_replica(cached=[0, 512, 0], load=[0, 100, 0], length=600)  # cache 1 has most of it
      1
      >>> kvjax.serving.choose_replica(cached=[0, 512, 0], load=[0, 9000, 50], length=600)  # but it is overloaded
      0
    """
    total = sum(load) + length
    num_others = len(load) - 1
    # For the least loaded cache this always holds, also if it is alone.
    candidates = [index for index, tokens in enumerate(load) if tokens * num_others <= 2 * (total - tokens)]
    return max(candidates, key=lambda n: (cached[n] - load_price * load[n], -load[n], -n))


class _NumberedSpaces(Hashing):
    """Hashes for use in this process. The number of a namespace stands for it."""

    def space(self, namespace: int) -> Space:
        return Space(root_hash(salt=str(namespace)), 0)


_HASHING = _NumberedSpaces(None, None, None, b"")


def hashes_of(prompt: np.ndarray, namespace: int, spec: CacheSpec) -> list[int]:
    """The hash of each whole block of a prompt. It identifies the prompt up to the block's end."""
    parent = _HASHING.space(namespace).root
    block_size = spec.block_size
    hashes = list[int]()
    extra_ids = np.zeros((len(parts_of(spec)) - 1, block_size), np.int32)  # a prompt without images has zeros
    for start in range(0, len(prompt) - block_size + 1, block_size):
        parent = block_hash(parent, prompt[start : start + block_size], *extra_ids)
        hashes.append(first_64_bits(parent))
    return hashes


def num_leading(hashes: Sequence[int], known: Container[int]) -> int:
    """The number of known leading hashes."""
    return len([*itertools.takewhile(known.__contains__, hashes)])


class CachedPrefixes(NodeMap):
    """The index of a cache, built from its events. It asks no device, and never reads a cache that a loop has taken.

    Args:
      spec: spec of an empty cache; see `attach` for other caches.
    """

    def __init__(self, spec: CacheSpec):
        super().__init__(spec, _HASHING)

    def whole_blocks(self, hashes: Sequence[int], length: int) -> int:
        """The number of whole blocks found by an admission for a prompt of `length` tokens with these hashes.

        It equals the result of `lookup`, except for tokens of a block that matches only in part.
        """
        spec = self.spec
        groups = self.groups
        block_size = self.spec.block_size
        end = min(num_leading(hashes, groups[0].hashes), max(length - 1, 0) // block_size)
        while end and any(
            hashes[column] not in groups[group_index].hashes
            for group_index, column in spec.seen_columns(end * block_size, end)
        ):
            end -= 1
        return end
