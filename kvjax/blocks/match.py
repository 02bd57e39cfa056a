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

    With windows, every group must also have all that the next token can see. Each copied token may move a window on,
    so a prefix may be valid only together with a copy. `tiers`, static, says where to look. With `alignment_tokens`,
    static, nothing is copied, and the prefix ends at a multiple of them.

    Source: TensorRT-LLM's reuse tree, which compares tokens; here the tree is flat arrays and the walk one gather.
    """
    group, windows, (num, size) = state.groups[0], state.window_groups, text.tokens.shape
    blocks = group.blocks
    keys = prefix_keys(root_key(namespace)[None], text, size, jnp.arange(num, dtype=jnp.int32), chain)
    ids = index.find(blocks, group.links, keys)
    parents = link(blocks, jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), ids[:-1]]), namespace)
    matches = (
        same_content(blocks, ids, text)
        & jnp.all(pick(blocks.parent, ids) == parents, axis=-1)
        & (np.arange(num, dtype=np.int32) < (length - 1) // size)
        & group.reachable(ids, tiers)
    )
    whole = leading(matches)

    def usable(block: jax.Array) -> jax.Array:
        each = [group.reachable(group.in_this_group(block), tiers) for group in state.groups]
        return functools.reduce(jnp.logical_and, each)

    def child(whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        last = jnp.where(whole > 0, pick(ids, whole - 1), NO_BLOCK)
        rest = jnp.clip(length - 1 - whole * size, 0, size)
        parent = link(blocks, last, namespace)
        return index.longest_child(blocks, group.links, parent, pick(text, whole), rest, usable)

    uncopied, source, shared = whole, jnp.int32(NO_BLOCK), jnp.int32(0)
    copies = state.spec.partial_reuse and alignment_tokens is None
    if windows or alignment_tokens is not None:
        ends, to_copy = np.arange(num + 1, dtype=np.int32), jnp.zeros((num + 1,), jnp.int32)
        for window, spec in zip(windows, state.spec.window_groups, strict=True):
            to_copy = jnp.maximum(to_copy, _tokens_to_copy(window, spec, ids, size, tiers))
        whole_ends = ends <= whole
        if alignment_tokens is not None:
            whole_ends = whole_ends & (ends * size % alignment_tokens == 0)
        uncopied = jnp.max(jnp.where((to_copy == 0) & whole_ends, ends, 0))
        if copies:
            whole, source, shared = _longest_with_copy(to_copy, (to_copy < size) & (ends <= whole), child)
        else:
            whole = uncopied
    elif copies:
        source, shared = child(whole)
    found = jnp.where(np.arange(num, dtype=np.int32) < whole, ids, NO_BLOCK)
    on_host, source_on_host = _on_host(state, found), _on_host(state, source)
    host_tokens = count(on_host) * size + jnp.where(source_on_host, shared, 0)
    device_tokens = whole * size + shared - host_tokens
    unusable = leading(matches) * size - device_tokens - host_tokens if state.spec.has_recurrent else None
    return Match(found, whole, uncopied, source, shared, device_tokens, host_tokens, unusable)


def _longest_with_copy(
    to_copy: jax.Array, fits: jax.Array, child: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The longest end, of those that fit, bool[F + 1], whose copy is long enough; its source; and the tokens shared.

    The empty prefix needs no copy, so there is one.
    """
    ends = np.arange(fits.shape[0], dtype=np.int32)
    whole = jnp.max(jnp.where(fits, ends, 0))
    return while_loop(
        lambda carry: carry[2] < pick(to_copy, carry[0]),
        lambda carry: (w := jnp.max(jnp.where(fits & (ends < carry[0]), ends, 0)), *child(w)),
        (whole, *child(whole)),
    )


def _on_host(state: CacheState, ids: jax.Array) -> jax.Array:
    """bool[...]; whether blocks ids i32[...] of the first group are on the host, there or in another group."""
    own = [(group, group.in_this_group(ids)) for group in state.groups]
    return functools.reduce(jnp.logical_or, [(blocks >= 0) & ~group.on_device(blocks) for group, blocks in own])


def _tokens_to_copy(group: Group, spec: GroupSpec, ids: jax.Array, size: int, tiers: tuple[str, ...]) -> jax.Array:
    """i32[F + 1]; tokens to copy after 0..F blocks until this window group has all that the next token sees.

    0 if it has all at once; less than P if copying moves the window off a block that the group lacks; else P.
    """
    assert spec.window is not None
    lacks = jnp.cumsum(~group.reachable(group.in_this_group(ids), tiers), dtype=jnp.int32)
    lacks = jnp.concatenate([jnp.zeros((1,), jnp.int32), lacks])  # among the first 0..F blocks
    end = jnp.arange(lacks.shape[0], dtype=jnp.int32)
    start = spec.first_column(end * size, size)
    moved = (start + 1) * size + spec.window - 1 - end * size  # tokens after which the window starts a block later

    def complete(start: jax.Array) -> jax.Array:
        sinks = jnp.minimum(start, -(-spec.sink_tokens // size))
        return (start <= end) & (lacks - pick(lacks, start) + pick(lacks, sinks) == 0)

    later = jnp.where(complete(start + 1), jnp.minimum(moved, size), size)
    return jnp.where(complete(start), 0, later)
