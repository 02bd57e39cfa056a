# SPDX-License-Identifier: Apache-2.0
"""Parts of a state: what blocks hold, how they are linked, and where they are; and what a prompt finds there."""

from __future__ import annotations

import functools
import operator
import reprlib
from typing import Any

import jax
import numpy as np

from kvjax._arrays import Pytree
from kvjax._methods import unreadable


class Text(Pytree):
    """Tokens with their extra ids.

    Attributes:
      tokens: i32[..., P].
      extra_ids: i32[..., P], or None where the spec asks for none.
    """

    tokens: jax.Array
    extra_ids: jax.Array | None

    def equals(self, other: Text) -> jax.Array:
        """bool[..., P]; which tokens are equal, extra ids included."""
        same = jax.tree.map(operator.eq, self, other)
        return functools.reduce(operator.and_, jax.tree.leaves(same))

    def parts(self) -> dict[str, jax.Array]:
        """The arrays by name, without None."""
        return {name: array for name, array in vars(self).items() if array is not None}


class Links(Pytree):
    """The prefix index and the child index: chained hash tables over one pair of link arrays (`blocks/index.py`).

    Block b has two handles: b is linked by its key, B + b by (parent, first token, first extra id). Entries from 2B
    on are the buckets of the first table, then those of the second.

    Attributes:
      next: i32[2B + 2 * buckets]; the handle that follows, -1 at the end of a chain.
      prev: i32[2B]; the handle or bucket before.
    """

    next: jax.Array
    prev: jax.Array


class Host(Pytree):
    """The tier of each block of a group with a host tier. A block keeps its number when it moves; its pool row changes.

    Attributes:
      pool_row: i32[B]; each block's pool row, all different: 0..N-1 on the device, N..N+H-1 on the host.
      num_host_children: i32[B]; findable children on the host; `Blocks.children` counts those on the device.
      pending_transfer: i32[B]; number of the move that brings the K/V to the block's pool row, or 0. While it is not 0
        the block cannot be found. If the move fails it stays until the block is empty: lost K/V are never stored.
      num_moves: i32[]; the number of the last transition that moved something.
      unevictable: bool[B]; as of the last move: device blocks that a loop cannot evict: a descendant is on the host or
        moving.
      empty: i32[H]; stack of empty blocks on the host.
      num_empty: i32[]; height of that stack.
      policy: the eviction policy's state for blocks on the host.
    """

    pool_row: jax.Array
    num_host_children: jax.Array
    pending_transfer: jax.Array
    num_moves: jax.Array
    unevictable: jax.Array
    empty: jax.Array
    num_empty: jax.Array
    policy: Any


class Match(Pytree):
    """The longest cached prefix of a prompt.

    Attributes:
      blocks: i32[ceil(T / P)]; the whole blocks that match, NO_BLOCK after them.
      num_blocks: i32[]; how many match.
      num_uncopied: i32[]; how many match if nothing can be copied; fewer only with windows.
      source: i32[]; a block that shares further tokens and would be copied, or NO_BLOCK.
      shared: i32[]; how many tokens it shares.
      device_tokens: i32[]; matched tokens whose K/V are on the device, in every group.
      host_tokens: i32[]; matched tokens whose K/V are on the host, in some group.
    """

    blocks: jax.Array
    num_blocks: jax.Array
    num_uncopied: jax.Array
    source: jax.Array
    shared: jax.Array
    device_tokens: jax.Array
    host_tokens: jax.Array

    @property
    def cached_tokens(self) -> jax.Array:
        """i32[]; tokens that need no computation; never all of the prompt, whose last token's logits are wanted."""
        return self.device_tokens + self.host_tokens

    def __repr__(self) -> str:
        if why := unreadable(self):
            return f"Match({why})"
        host = jax.device_get(self)
        tokens, on_host = (reprlib.repr(np.asarray(one).tolist()) for one in (host.cached_tokens, host.host_tokens))
        return f"Match({tokens} tokens cached, {on_host} of them on the host)"
