# SPDX-License-Identifier: Apache-2.0
"""What is in the cache already: of a prompt before it is computed, and of blocks that have just been filled."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import index
from kvjax._arrays import count, pick, put, runs
from kvjax.keys import mix, prefix_keys, root_key
from kvjax.spec import GroupSpec
from kvjax.state import NO_BLOCK, Blocks, CacheState, Group, Sequences, pytree


@pytree()
class Match:
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


def longest_match(
    state: CacheState,
    tokens: jax.Array,
    extra_ids: jax.Array | None,
    length: jax.Array,
    namespace: jax.Array,
    tiers: tuple[str, ...],
) -> Match:
    """Finds the longest cached prefix: whole blocks all at once, then tokens of the best block that follows them.

    With windows it is the longest of which every group has what the next token can see. Each token that is copied may
    move a window on, so a prefix may be valid only together with a copy.

    Args:
      state: where to look; not changed.
      tokens: i32[F, P]; the prompt in blocks.
      extra_ids: i32[F, P] or None.
      length: i32[]; tokens of the prompt.
      namespace: i32[].
      tiers: static; "device", "host" or both.

    Source: TensorRT-LLM's reuse tree, which compares tokens; here the tree is flat arrays and the walk one gather.
    """
    group, windows, (num, size) = state.groups[0], state.groups[1:], tokens.shape
    blocks = group.blocks
    keys = prefix_keys(root_key(namespace), tokens, extra_ids, size, jnp.arange(num, dtype=jnp.int32))
    ids = index.find(blocks, group.links, keys)
    parents = link(blocks, jnp.concatenate([jnp.full((1,), NO_BLOCK, jnp.int32), ids[:-1]]), namespace)
    matches = (
        same_content(blocks, ids, tokens, extra_ids)
        & jnp.all(pick(blocks.parent, ids) == parents, axis=-1)
        & (np.arange(num, dtype=np.int32) < (length - 1) // size)
        & group.reachable(ids, tiers)
    )
    whole = jnp.sum(jnp.cumprod(matches, dtype=jnp.int32), dtype=jnp.int32)

    def child(whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        last = jnp.where(whole > 0, pick(ids, whole - 1), NO_BLOCK)
        rest = jnp.clip(length - 1 - whole * size, 0, size)
        extra = None if extra_ids is None else pick(extra_ids, whole)
        return index.longest_child(
            blocks, group.links, link(blocks, last, namespace), pick(tokens, whole), extra, rest,
            usable=lambda block: functools.reduce(
                jnp.logical_and, [g.reachable(g.beside(block), tiers) for g in state.groups]
            ),
        )  # fmt: skip

    uncopied, source, shared = whole, jnp.int32(NO_BLOCK), jnp.int32(0)
    if windows:
        ends, wanted = np.arange(num + 1, dtype=np.int32), jnp.zeros((num + 1,), jnp.int32)
        for window, spec in zip(windows, state.spec.groups[1:], strict=True):
            wanted = jnp.maximum(wanted, _copies_wanted(window, spec, ids, size, tiers))
        uncopied = jnp.max(jnp.where((wanted == 0) & (ends <= whole), ends, 0))
        if state.spec.partial_reuse:
            # The longest end whose copy is long enough. Nothing is wanted of the empty prefix, so there is one.
            possible = (wanted < size) & (ends <= whole)
            whole = jnp.max(jnp.where(possible, ends, 0))
            whole, source, shared = lax.while_loop(
                lambda carry: carry[2] < pick(wanted, carry[0]),
                lambda carry: (w := jnp.max(jnp.where(possible & (ends < carry[0]), ends, 0)), *child(w)),
                (whole, *child(whole)),
            )
        else:
            whole = uncopied
    elif state.spec.partial_reuse:
        source, shared = child(whole)
    found = jnp.where(np.arange(num, dtype=np.int32) < whole, ids, NO_BLOCK)
    far = jnp.int32(0)
    if state.spec.has_host:
        away = functools.reduce(jnp.logical_or, [_on_host(group, found) for group in state.groups])
        source_away = functools.reduce(jnp.logical_or, [_on_host(group, source) for group in state.groups])
        far = count(away) * size + jnp.where(source_away, shared, 0)
    return Match(found, whole, uncopied, source, shared, device_tokens=whole * size + shared - far, host_tokens=far)


def _on_host(group: Group, ids: jax.Array) -> jax.Array:
    own = group.beside(ids)
    return (own >= 0) & ~group.on_device(own)


def _copies_wanted(group: Group, spec: GroupSpec, ids: jax.Array, size: int, tiers: tuple[str, ...]) -> jax.Array:
    """i32[F + 1]; tokens to copy after so many blocks, until this window group has all that the next token sees.

    0 if it has at once; less than P if copying moves the window off a block that it lacks; else P.
    """
    assert spec.window is not None
    lacks = jnp.cumsum(~group.reachable(group.beside(ids), tiers), dtype=jnp.int32)
    lacks = jnp.concatenate([jnp.zeros((1,), jnp.int32), lacks])  # of the first so many blocks
    end = jnp.arange(lacks.shape[0], dtype=jnp.int32)
    start = spec.first_place(end * size, size)
    moved = (start + 1) * size + spec.window - 1 - end * size  # tokens after which the window starts a block later

    def complete(start: jax.Array) -> jax.Array:
        sinks = jnp.minimum(start, -(-spec.sink_tokens // size))
        return (start <= end) & (lacks - pick(lacks, start) + pick(lacks, sinks) == 0)

    later = jnp.where(complete(start + 1), jnp.minimum(moved, size), size)
    return jnp.where(complete(start), 0, later)


def link(blocks: Blocks, block: jax.Array, namespace: jax.Array) -> jax.Array:
    """i32[..., 2]; the node of each block i32[...], or the root of `namespace` where it is NO_BLOCK."""
    return jnp.stack([block, jnp.where(block >= 0, pick(blocks.generation, block), namespace)], axis=-1)


def same_content(
    blocks: Blocks, ids: jax.Array, tokens: jax.Array, extra_ids: jax.Array | None, fill: jax.Array | None = None
) -> jax.Array:
    """bool[...]; whether ids are findable blocks that hold just these tokens i32[..., P], or just the first `fill`."""
    size = tokens.shape[-1]

    def equal(known: jax.Array, wanted: jax.Array) -> jax.Array:
        same = pick(known, ids) == wanted
        return jnp.all(same if fill is None else same | (np.arange(size, dtype=np.int32) >= fill), axis=-1)

    same = (ids >= 0) & (pick(blocks.fill, ids) == (size if fill is None else fill)) & equal(blocks.tokens, tokens)
    if extra_ids is not None and blocks.extra_ids is not None:
        same = same & equal(blocks.extra_ids, extra_ids)
    return same


@pytree()
class Resolution:
    """What becomes of blocks that have just been filled, all [R * F].

    Attributes:
      own: i32; the block that was filled.
      target: i32; the block that the row holds from now on: its own, or an equal one.
      publish: bool; own becomes findable.
      merge: bool; own is given back for the target.
      first: bool; no entry before this one has the same key (so counting by it counts blocks once).
      key: u32[R * F, 2].
      parent: i32[R * F, 2]; (block, namespace) as `group.publish` wants it.
    """

    own: jax.Array
    target: jax.Array
    publish: jax.Array
    merge: jax.Array
    first: jax.Array
    key: jax.Array
    parent: jax.Array


def resolve(group: Group, seqs: Sequences, rows: jax.Array, first: jax.Array, filled: jax.Array) -> Resolution:
    """Decides for each filled block whether to publish it or to merge it with an equal one, cached or filled just now.

    Of equal blocks filled in one call the first row's is published. A key that belongs to other contents already is
    a collision: then the row publishes nothing of this call, which can cost a hit later and never gives a wrong one.

    Args:
      group: the group, `blocks.tokens` up to date.
      seqs: the rows' namespaces.
      rows: i32[R]; the rows.
      first: i32[R]; each row's first table index that may have been filled.
      filled: bool[R, F]; whether the block at `first + f` was.
    """
    blocks, num = group.blocks, filled.shape[1]
    depth = runs(first, num)
    own = group.table.at[rows[:, None], depth].get(mode="clip", wrap_negative_indices=False)
    tokens = pick(blocks.tokens, own)
    extra = None if blocks.extra_ids is None else pick(blocks.extra_ids, own)
    before = group.table.at[rows, first - 1].get(mode="clip", wrap_negative_indices=False)
    before = jnp.where(first > 0, before, NO_BLOCK)
    filled = filled & ((before < 0) | (pick(blocks.fill, before) > 0))[:, None]  # no children of unpublished blocks
    if group.host is not None:  # nor what has not arrived, which a failed move has lost, and all that follows it
        filled = filled & (jnp.cumsum(filled & ~group.arrived(own), axis=1, dtype=jnp.int32) == 0)
    namespace = pick(seqs.namespace, rows)
    start = jnp.where((before >= 0)[:, None], pick(blocks.key, before), root_key(namespace))
    key = prefix_keys(start, tokens, extra, tokens.shape[-1], depth).reshape(-1, 2)

    found = index.find(blocks, group.links, key).reshape(filled.shape)
    earliest = _earliest(key, filled.reshape(-1)).reshape(filled.shape)
    is_first = earliest == np.arange(filled.size, dtype=np.int32).reshape(filled.shape)
    target = jnp.where(found >= 0, found, pick(own.reshape(-1), earliest))
    parent = jnp.concatenate([before[:, None], target[:, :-1]], axis=1)

    # Equal keys were taken for equal contents so far; now compare.
    findable_parent = (parent < 0) | (pick(blocks.fill, parent) > 0)
    same_parent = jnp.all(pick(blocks.parent, found) == link(blocks, parent, namespace[:, None]), axis=-1)
    as_found = same_content(blocks, found, tokens, extra) & findable_parent & same_parent
    twin = jnp.all(key == pick(key, earliest.reshape(-1)), axis=-1).reshape(filled.shape)
    twin = twin & jnp.all(tokens == pick(tokens.reshape(-1, tokens.shape[-1]), earliest), axis=-1)
    twin = twin & (parent == pick(parent.reshape(-1), earliest))
    twin = twin & (namespace[:, None] == pick(namespace, earliest // num))
    if extra is not None:
        twin = twin & jnp.all(extra == pick(extra.reshape(-1, extra.shape[-1]), earliest), axis=-1)
    sound = jnp.where(found >= 0, as_found, twin)
    broken = jnp.any(filled & ~sound, axis=1)
    broken = lax.while_loop(  # a row that leans on a broken row is broken
        lambda b: jnp.any(~b & jnp.any(filled & pick(b, earliest // num), axis=1)),
        lambda b: b | jnp.any(filled & pick(b, earliest // num), axis=1),
        broken,
    )
    good = (filled & ~broken[:, None]).reshape(-1)
    spaces = jnp.broadcast_to(namespace[:, None], parent.shape)
    own, target, is_first = own.reshape(-1), target.reshape(-1), is_first.reshape(-1)
    return Resolution(
        own=own,
        target=target,
        publish=good & (found.reshape(-1) < 0) & is_first,
        merge=good & (target != own),
        first=is_first,
        key=key,
        parent=jnp.stack([parent.reshape(-1), spaces.reshape(-1)], axis=-1),
    )


def _earliest(key: jax.Array, where: jax.Array) -> jax.Array:
    """i32[K]; the first entry whose key u32[K, 2] looks the same, among those where bool[K] holds; else itself."""
    at = jnp.arange(where.size, dtype=jnp.int32)
    digest = jnp.where(
        where, mix(key[:, 0] ^ mix(key[:, 1])) >> np.uint32(1), at.astype(jnp.uint32) | np.uint32(1 << 31)
    )
    digest, order = lax.sort((digest, at), num_keys=1)
    starts = jnp.pad(digest[1:] != digest[:-1], (1, 0), constant_values=True)
    return put(at, order, pick(order, lax.cummax(jnp.where(starts, at, 0))), where=jnp.ones_like(where))
