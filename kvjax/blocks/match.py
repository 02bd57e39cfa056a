# SPDX-License-Identifier: Apache-2.0
"""Finds the cached prefix of a prompt, before the prompt is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import count, leading, pick
from kvjax.blocks import index
from kvjax.blocks.dedup import link, same_content
from kvjax.blocks.keys import chain, prefix_keys, root_key
from kvjax.spec import GroupSpec
from kvjax.state import NO_BLOCK, CacheState, Group, Match, Text
from pallas_kernels.loops import while_loop


def longest_match(
    state: CacheState,
    text: Text,
    length: jax.Array,
    namespace: jax.Array,
    tiers: tuple[str, ...],
    alignment_tokens: int | None = None,
) -> Match:
    """Finds the longest cached prefix of a prompt in blocks i32[F, P]: whole blocks, then tokens of their best child.

    With windows, every group must also have all blocks that the next token can see. Each copied token may move a window
    forward, so a prefix may be valid only together with a copy. `tiers`, static, selects the tiers to search. With
    `alignment_tokens`, static, nothing is copied, and the prefix ends at a multiple of them.
    """
    group = state.groups[0]
    windows = state.window_groups
    (num_blocks, block_size) = text.tokens.shape
    blocks = group.blocks
    keys = prefix_keys(root_key(namespace)[None], text, block_size, jnp.arange(num_blocks, dtype=jnp.int32), chain)
    ids = index.find(blocks, group.links, keys)
    parents = link(blocks, jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), ids[:-1]]), namespace)
    matches = (
        same_content(blocks, ids, text)
        & jnp.all(pick(blocks.parent, ids) == parents, axis=-1)
        & (np.arange(num_blocks, dtype=np.int32) < (length - 1) // block_size)
        & group.reachable(ids, tiers)
    )
    num_whole = leading(matches)

    def usable(block: jax.Array) -> jax.Array:
        reachable = [group.reachable(group.in_this_group(block), tiers) for group in state.groups]
        return functools.reduce(jnp.logical_and, reachable)

    def child(num_whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        last = jnp.where(num_whole > 0, pick(ids, num_whole - 1), NO_BLOCK)
        rest = jnp.clip(length - 1 - num_whole * block_size, 0, block_size)
        parent = link(blocks, last, namespace)
        return index.longest_child(blocks, group.links, parent, pick(text, num_whole), rest, usable)

    num_uncopied = num_whole
    source = jnp.int32(NO_BLOCK)
    shared = jnp.int32(0)
    copies = state.spec.partial_reuse and alignment_tokens is None
    if windows or alignment_tokens is not None:
        ends = np.arange(num_blocks + 1, dtype=np.int32)
        to_copy = jnp.zeros((num_blocks + 1,), jnp.int32)
        for window, spec in zip(windows, state.spec.window_groups, strict=True):
            to_copy = jnp.maximum(to_copy, _tokens_to_copy(window, spec, ids, block_size, tiers))
        whole_ends = ends <= num_whole
        if alignment_tokens is not None:
            whole_ends = whole_ends & (ends * block_size % alignment_tokens == 0)
        num_uncopied = jnp.max(jnp.where((to_copy == 0) & whole_ends, ends, 0))
        if copies:
            num_whole, source, shared = _longest_with_copy(to_copy, (to_copy < block_size) & (ends <= num_whole), child)
        else:
            num_whole = num_uncopied
    elif copies:
        source, shared = child(num_whole)
    matched = jnp.where(np.arange(num_blocks, dtype=np.int32) < num_whole, ids, NO_BLOCK)
    on_host = _on_host(state, matched)
    source_on_host = _on_host(state, source)
    host_tokens = count(on_host) * block_size + jnp.where(source_on_host, shared, 0)
    device_tokens = num_whole * block_size + shared - host_tokens
    unusable = leading(matches) * block_size - device_tokens - host_tokens if state.spec.has_recurrent else None
    return Match(matched, num_whole, num_uncopied, source, shared, device_tokens, host_tokens, unusable)


def _longest_with_copy(
    to_copy: jax.Array, fits: jax.Array, child: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the longest end, among the possible ends bool[F + 1], whose copy is long enough.

    Such an end exists, because the empty prefix needs no copy. Returns it, the source of the copy and its shared
    tokens.
    """
    ends = np.arange(fits.shape[0], dtype=np.int32)
    num_whole = jnp.max(jnp.where(fits, ends, 0))
    return while_loop(
        lambda carry: carry[2] < pick(to_copy, carry[0]),
        lambda carry: (w := jnp.max(jnp.where(fits & (ends < carry[0]), ends, 0)), *child(w)),
        (num_whole, *child(num_whole)),
    )


def _on_host(state: CacheState, ids: jax.Array) -> jax.Array:
    """bool[...]; whether the host holds blocks ids i32[...] of the first group, or their blocks in another group."""
    group_blocks = [(group, group.in_this_group(ids)) for group in state.groups]
    return functools.reduce(
        jnp.logical_or, [(blocks >= 0) & ~group.on_device(blocks) for group, blocks in group_blocks]
    )


def _tokens_to_copy(
    group: Group, spec: GroupSpec, ids: jax.Array, block_size: int, tiers: tuple[str, ...]
) -> jax.Array:
    """i32[F + 1]; tokens to copy after 0..F blocks until this window group has all blocks that the next token sees.

    The number is 0 if the group has them already, less than P if copying moves the window off a missing block, else P.
    """
    assert spec.window is not None
    lacks = jnp.cumsum(~group.reachable(group.in_this_group(ids), tiers), dtype=jnp.int32)
    lacks = jnp.concatenate([jnp.zeros((1,), jnp.int32), lacks])  # among the first 0..F blocks
    end = jnp.arange(lacks.shape[0], dtype=jnp.int32)
    start = spec.first_column(end * block_size, block_size)
    moved = (
        (start + 1) * block_size + spec.window - 1 - end * block_size
    )  # tokens after which the window starts a block later

    def complete(start: jax.Array) -> jax.Array:
        sinks = jnp.minimum(start, -(-spec.sink_tokens // block_size))
        return (start <= end) & (lacks - pick(lacks, start) + pick(lacks, sinks) == 0)

    later = jnp.where(complete(start + 1), jnp.minimum(moved, block_size), block_size)
    return jnp.where(complete(start), 0, later)
