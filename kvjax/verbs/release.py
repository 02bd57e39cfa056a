# SPDX-License-Identifier: Apache-2.0
"""`release` frees a row and the blocks that only this row holds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import fence, pick
from kvjax.blocks import holes, index, windows
from kvjax.blocks.dedup import link, same_content
from kvjax.blocks.holders import give_back
from kvjax.blocks.keys import prefix_keys, root_key
from kvjax.blocks.publish import publish
from kvjax.blocks.rows import Row, read_row, write_row
from kvjax.checks import integers, on_state, one_or_more
from kvjax.events.records import Events, Records, Status
from kvjax.state import NO_BLOCK, CacheState
from kvjax.verbs._request import assemble, first_failure, scan_rows


@on_state
def release(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Frees a row. Its findable blocks stay cached, and the others become empty. Tails will be evicted before heads.

    If a block is partly filled when its last holder releases it, it becomes findable with all its written tokens,
    unless a cached block covers them. Several rows in a call are released in order.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; rows in use.
      now: i32[]; the time in ms.

    Returns:
      The cache, and events with E = 1 record a row and group: stored. Status BAD_REQUEST for a row already free or
      unknown.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, prompt = kvjax.init(spec), np.arange(10)
      >>> state, _ = kvjax.admit(state, 0, prompt, 10)
      >>> state, _ = kvjax.commit(state, prompt[None], [10], seqs=[0])
      >>> state, events = kvjax.release(state, 0)
      >>> [(event["kind"], event["tokens"]) for event in kvjax.to_list(events)]  # its partly filled last block
      [('stored', [8, 9])]
      >>> kvjax.lookup(state, prompt, 10)  # all but the last token, whose logits are wanted
      Match(9 tokens cached, 0 of them on the host)

    Source: TensorRT-LLM's removeSequence, which stores partial blocks; vLLM's free, in reverse order.
    """
    seq = one_or_more("seq", seq)
    now = integers("now", now, ())
    if seq.ndim > 0:
        return scan_rows(functools.partial(release, now=now), state, seq)
    row = read_row(state, seq)
    stored = []
    ok = row.exists & (row.length > 0)
    if state.spec.partial_reuse:
        state, stored = store_tail(state, row, holes.unless_private(row.metadata, ok))
    groups = [
        give_back(group, windows.policy_of(state, group_index), table[::-1], (ok & (table >= 0))[::-1], now)
        for group_index, (group, table) in enumerate(zip(state.groups, row.tables, strict=True))
    ]
    state = state.replace(groups=tuple(groups))
    free = jax.tree.map(jnp.zeros_like, row.metadata)
    state = write_row(state, seq, ok, free, [jnp.full_like(table, NO_BLOCK) for table in row.tables])
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)), stored=stored)


def store_tail(state: CacheState, row: Row, where: jax.Array) -> tuple[CacheState, list[Records]]:
    """Publishes the written part of a row's partly filled last block, where bool[], in every group.

    The block is skipped if another row holds it (its release decides), if it is findable already, if its K/V
    have not arrived, if a findable block present in every group covers it, or if its row is swapped out. If the first
    group has an equal block, the groups without such a block publish theirs. Also returns a record, stored, for each
    group.
    """
    group = state.groups[0]
    blocks = group.blocks
    block_size = group.blocks.tokens.shape[1]
    num_whole = row.committed // block_size
    fill = row.committed % block_size
    tail = pick(row.tables[0], num_whole)
    before = jnp.where(num_whole > 0, pick(row.tables[0], num_whole - 1), NO_BLOCK)
    text = pick(blocks.text, tail)
    parent = link(blocks, before, row.namespace)
    start = jnp.where(before >= 0, pick(blocks.key, before), root_key(row.namespace))
    key = prefix_keys(start, text, fill, num_whole)[None]
    intact = (before < 0) | (pick(blocks.fill, before) > 0)
    private = (
        (pick(blocks.refcount, tail) == 1) & (pick(blocks.fill, tail) == 0) & group.arrived(tail) & ~row.swapped_out
    )
    window_groups = state.window_groups

    def everywhere(block: jax.Array) -> jax.Array:
        return functools.reduce(
            jnp.logical_and, [window_group.in_this_group(block) >= 0 for window_group in window_groups], block >= 0
        )

    _, covered = index.longest_child(blocks, group.links, parent, text, fill, everywhere)
    duplicate = index.find(blocks, group.links, key)[0]
    publishable = where & (fill > 0) & intact & private & (covered < fill)
    target = tail
    follows = publishable & (duplicate < 0)
    if window_groups:
        same = same_content(blocks, duplicate, text, fill) & jnp.all(pick(blocks.parent, duplicate) == parent)
        target = jnp.where(same, duplicate, tail)
        follows = publishable & (same | (duplicate < 0))
    (group, window_groups), is_new, target, follows = fence(
        (group, window_groups), publishable & (duplicate < 0), target, follows
    )
    above = jnp.stack([before, row.namespace])[None]
    group, stored = publish(group, tail[None], is_new[None], key, above, num_whole[None], fill)
    groups = [group]
    records = [stored]
    for group_index, window_group in enumerate(window_groups, 1):
        last = pick(row.tables[group_index], num_whole)
        where = follows & window_group.arrived(last) & (window_group.in_this_group(target) < 0)
        window_group, where = fence(window_group, where)
        window_group, stored = windows.link_blocks(
            window_group, group_index, group.blocks, last[None], target[None], where[None], fill
        )
        groups.append(window_group)
        records.append(stored)
    return state.replace(groups=tuple(groups)), records
