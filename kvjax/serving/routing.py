# SPDX-License-Identifier: Apache-2.0
"""The cache that a prompt is sent to: what each of several has of it, by their events alone, and one rule."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

import numpy as np

from kvjax.blocks.hashes import Hashing, block_hash, first_64_bits, root_hash
from kvjax.events.host_events import parts_of
from kvjax.events.index import NodeMap, Space
from kvjax.spec import CacheSpec


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


class _NumberedSpaces(Hashing):
    """Hashes of one process, in which a namespace is its number."""

    def space(self, namespace: int) -> Space:
        return Space(root_hash(salt=str(namespace)), 0)


_HASHING = _NumberedSpaces(None, None, None, b"")


def hashes_of(prompt: np.ndarray, namespace: int, spec: CacheSpec) -> list[int]:
    """The hash of each whole block of a prompt; it stands for all of the prompt up to its end."""
    parent = _HASHING.space(namespace).root
    size = spec.block_size
    hashes = list[int]()
    extra_ids = np.zeros((len(parts_of(spec)) - 1, size), np.int32)  # of a prompt without images
    for start in range(0, len(prompt) - size + 1, size):
        parent = block_hash(parent, prompt[start : start + size], *extra_ids)
        hashes.append(first_64_bits(parent))
    return hashes


def num_leading(hashes: Sequence[int], found: Container[int]) -> int:
    """The number of leading hashes that are found."""
    return len([*itertools.takewhile(found.__contains__, hashes)])


class CachedPrefixes(NodeMap):
    """The index of a cache, by its events: no device is asked, and a cache in a loop is not read.

    Args:
      spec: of the cache, which is empty; see `attach` for others.
    """

    def __init__(self, spec: CacheSpec):
        super().__init__(spec, _HASHING)

    def whole_blocks(self, hashes: Sequence[int], length: int) -> int:
        """The number of whole blocks that an admission finds of a prompt with these hashes and so many tokens.

        It is that of `lookup`, but for tokens of a block of which the prompt has a part.
        """
        spec = self.spec
        groups = self.groups
        size = self.spec.block_size
        end = min(num_leading(hashes, groups[0].hashes), max(length - 1, 0) // size)
        while end and any(
            hashes[column] not in groups[number].hashes for number, column in spec.seen_columns(end * size, end)
        ):
            end -= 1
        return end
