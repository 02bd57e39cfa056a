# SPDX-License-Identifier: Apache-2.0
"""`release`: a row lets go of its blocks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import fence, pick
from kvjax.blocks import index, windows
from kvjax.blocks.dedup import link, same_content
from kvjax.blocks.holders import give_back
from kvjax.blocks.keys import prefix_keys, root_key
from kvjax.blocks.publish import publish
from kvjax.blocks.rows import Row, read_row, write_row
from kvjax.checks import integers, on_state, one_or_more
from kvjax.events.records import Events, Records, Status
from kvjax.state import NO_BLOCK, CacheState
from kvjax.verbs._request import assemble, first_failure, one_after_the_other


@on_state
def release(state: CacheState, seq: ArrayLike, *, now: ArrayLike = 0) -> tuple[CacheState, Events]:
    """Frees a row: its findable blocks stay cached, tails to be evicted before heads; the others become empty.

    A partly filled last block becomes findable too, with all its written tokens, when its last holder lets go,
    unless a cached block covers it. Several rows at once equal one after the other.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; rows in use.
      now: i32[] ms.

    Returns:
      The cache; and events, E = 1 a row and group: stored. Status BAD_REQUEST for a row that is free or unknown.

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
    seq, now = one_or_more("seq", seq), integers("now", now, ())
    if seq.ndim > 0:
        return one_after_the_other(functools.partial(release, now=now), state, seq)
    row, stored = read_row(state, seq), []
    ok = row.exists & (row.length > 0)
    if state.spec.partial_reuse:
        state, stored = store_tail(state, row, ok)
    groups = [
        give_back(group, windows.policy_of(state, number), table[::-1], (ok & (table >= 0))[::-1], now)
        for number, (group, table) in enumerate(zip(state.groups, row.tables, strict=True))
    ]
    state = state.replace(groups=tuple(groups))
    free = jax.tree.map(jnp.zeros_like, row.metadata)
    state = write_row(state, seq, ok, free, [jnp.full_like(table, NO_BLOCK) for table in row.tables])
    return state, assemble(state, first_failure((~ok, Status.BAD_REQUEST)), stored=stored)


def store_tail(state: CacheState, row: Row, where: jax.Array) -> tuple[CacheState, list[Records]]:
    """Publishes the written part of a row's partly filled last block, where bool[], in every group.

    Skips a block that others hold (their release decides), that is findable already, whose K/V have not arrived, that a
    findable block present in every group covers, or whose row is swapped out. Where the first group has an equal
    block, the groups that lack one publish theirs. Also returns for each group a record, stored.
    """
    group = state.groups[0]
    blocks, size = group.blocks, group.blocks.tokens.shape[1]
    whole, fill = row.committed // size, row.committed % size
    tail = pick(row.tables[0], whole)
    before = jnp.where(whole > 0, pick(row.tables[0], whole - 1), NO_BLOCK)
    text = pick(blocks.text, tail)
    parent = link(blocks, before, row.namespace)
    start = jnp.where(before >= 0, pick(blocks.key, before), root_key(row.namespace))
    key = prefix_keys(start, text, fill, whole)[None]
    intact = (before < 0) | (pick(blocks.fill, before) > 0)
    private = (
        (pick(blocks.refcount, tail) == 1) & (pick(blocks.fill, tail) == 0) & group.arrived(tail) & ~row.swapped_out
    )
    others = state.window_groups

    def everywhere(block: jax.Array) -> jax.Array:
        return functools.reduce(jnp.logical_and, [other.in_this_group(block) >= 0 for other in others], block >= 0)

    _, covered = index.longest_child(blocks, group.links, parent, text, fill, everywhere)
    duplicate = index.find(blocks, group.links, key)[0]
    good = where & (fill > 0) & intact & private & (covered < fill)
    target, follows = tail, good & (duplicate < 0)
    if others:
        same = same_content(blocks, duplicate, text, fill) & jnp.all(pick(blocks.parent, duplicate) == parent)
        target, follows = jnp.where(same, duplicate, tail), good & (same | (duplicate < 0))
    (group, others), good, target, follows = fence((group, others), good & (duplicate < 0), target, follows)
    above = jnp.stack([before, row.namespace])[None]
    group, stored = publish(group, tail[None], good[None], key, above, whole[None], fill)
    groups, records = [group], [stored]
    for number, other in enumerate(others, 1):
        last = pick(row.tables[number], whole)
        other, where = fence(other, follows & other.arrived(last) & (other.in_this_group(target) < 0))
        other, stored = windows.link_blocks(other, number, group.blocks, last[None], target[None], where[None], fill)
        groups, records = [*groups, other], [*records, stored]
    return state.replace(groups=tuple(groups)), records
