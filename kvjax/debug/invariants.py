# SPDX-License-Identifier: Apache-2.0
"""The invariants of a state, verified on the host."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from kvjax.blocks import index
from kvjax.blocks.backups import LEFT
from kvjax.checks import on_state
from kvjax.debug.text import seqs, show
from kvjax.policies.ring import Ring
from kvjax.state import LOST, NO_BLOCK, CacheState


@on_state
def check(state: CacheState, *, rows: Collection[int] | None = None) -> None:
    """Verifies every invariant of a state, on the host.

    Args:
      state: the cache, not traced.
      rows: rows that may be in use, such as () after a run that releases all of its rows; None means any rows.

    Raises:
      AssertionError: for broken invariants, with their names and a drawing of the state.

    Example:
      >>> state = kvjax.init(kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4))
      >>> kvjax.check(state)
      >>> try:
      ...     kvjax.check(state.replace(seqs=state.seqs.replace(length=jnp.array([5, 0]))))
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[0])
      broken: tables hold blocks for their length; entries of a row differ
    """
    host: Any = jax.device_get(state)  # numpy arrays; the type checker would expect arrays of jax
    used = set(np.flatnonzero(host.seqs.length).tolist())
    unexpected = sorted(used - set(used if rows is None else rows))
    broken = [f"{seqs(unexpected)} in use, wanted none but {sorted(rows or ())}"] if unexpected else []
    checks = [_check_prefixes, *[_check_group0_blocks] * (len(host.groups) - 1)]
    for group_index, (group, check_group) in enumerate(zip(host.groups, checks, strict=True)):
        failures = ["num_blocks out of range"] if group.num_blocks == 0 else []
        failures += _check_rows(host, group_index) + _check_counts(host, group)
        failures += check_group(host, group)
        for policy, is_device in ((group.policy, True), (getattr(group.host, "policy", None), False)):
            failures += _check_ring(group, policy, is_device) if isinstance(policy, Ring) else []
        broken += failures if len(host.groups) == 1 else [f"{rule} (group {group_index})" for rule in failures]
    if broken:
        raise AssertionError("broken: " + "; ".join(broken) + "\n" + show(state))


def _failures(**rules: Any) -> list[str]:
    return [name.replace("_", " ") for name, holds in rules.items() if not np.all(holds)]


def _check_rows(state: Any, group_index: int) -> list[str]:
    seqs = state.seqs
    size = state.spec.block_size
    group = state.groups[group_index]
    held = -(-seqs.length // size)
    keeps = state.spec.groups[group_index].keeps
    columns = np.arange(state.spec.max_blocks_per_seq, dtype=np.int32)
    inside = (columns[None] < held[:, None]) & np.asarray(keeps(columns[None], seqs.committed[:, None], size))
    holes = np.zeros_like(inside)
    if group is state.groups[0] and seqs.holes is not None:
        holes = np.asarray(seqs.holes)
    lacking = holes & (group.table == NO_BLOCK)
    inside = inside & ~lacking
    repeats = [len(set(row[mask])) < mask.sum() for row, mask in zip(group.table, inside, strict=True)]
    swapped_out = np.asarray(seqs.swapped_out)
    on_device = (group.table < 0) | _on_device(group)[_inside(group.table, group.blocks.fill)]
    return _failures(
        committed_lies_within_length=(seqs.committed >= 0) & (seqs.committed <= seqs.length),
        length_fits_in_a_row=seqs.length <= state.spec.max_length,
        tables_hold_blocks_for_their_length=np.where(inside, group.table >= 0, group.table == NO_BLOCK),
        table_entries_are_blocks=group.table < group.blocks.refcount.shape[0],
        entries_of_a_row_differ=not any(repeats),
        only_written_blocks_are_holes=~holes | ((columns[None] + 1) * size <= seqs.committed[:, None]),
        only_rows_in_use_are_swapped_out=~swapped_out | (seqs.length > 0),
        rows_that_are_not_swapped_out_are_on_the_device=on_device | swapped_out[:, None],
    )


def _inside(ids: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The ids clipped to indices of the array. The caller masks ids out of range."""
    return np.clip(ids, 0, len(array) - 1)


def _on_device(group: Any) -> np.ndarray:
    return np.asarray(group.on_device(np.arange(len(group.blocks.fill), dtype=np.int32)))


def _check_counts(state: Any, group: Any) -> list[str]:
    blocks = group.blocks
    num_ids = blocks.refcount.shape[0]
    size = len(group.empty)
    holders = np.bincount(group.table[(group.table >= 0) & (group.table < num_ids)], minlength=num_ids)
    on_device = _on_device(group)
    cached = (blocks.refcount == 0) & (blocks.fill > 0) & on_device
    unused = (np.arange(num_ids) >= group.num_blocks) & (np.arange(num_ids) < size)
    idle = (blocks.refcount == 0) & (blocks.fill == 0) & ~unused
    return _failures(
        refcounts_cover_the_tables=blocks.refcount >= holders,
        only_pins_hold_beside_the_tables=(blocks.refcount <= holders) | (blocks.fill > 0) | (blocks.hits == LOST),
        the_stack_is_the_empty_blocks=_is_stack(group.empty, group.num_empty, idle & on_device),
        num_cached_counts_cached_blocks=cached.sum() == group.num_cached,
        blocks_out_of_use_are_untouched=(blocks.refcount[unused] == 0) & (blocks.fill[unused] == 0),
        fill_fits_in_a_block=(blocks.fill >= 0) & (blocks.fill <= state.spec.block_size),
        **(_host_rules(group, idle & ~on_device, unused) if group.tiered else {}),
    )


def _after(later: Any, earlier: Any) -> np.ndarray:
    """The distance from a 32-bit counter to another. Both may have wrapped."""
    distance = np.asarray(later, np.int64) - np.asarray(earlier, np.int64)
    return (distance + 2**31) % 2**32 - 2**31


def _is_stack(stack: np.ndarray, height: int, wanted: np.ndarray) -> bool:
    return sorted(stack[:height].tolist()) == np.flatnonzero(wanted).tolist()


def _host_rules(group: Any, empty: np.ndarray, unused: np.ndarray) -> dict[str, Any]:
    blocks = group.blocks
    host = group.host
    ids = np.arange(len(host.pool_row))
    on_host = ~_on_device(group)
    parent = blocks.parent[:, 0]
    findable = blocks.fill > 0
    child = np.flatnonzero(findable & (parent >= 0) & (parent < len(ids)))
    below = np.bincount(parent[child[on_host[child]]], minlength=len(ids))
    moving = host.pending_transfer != 0
    copies = np.zeros(len(ids), bool) if host.backup is None else (host.backup >= 0) & ~findable
    empty = empty & ~copies
    rules = {} if host.backup is None else _backup_rules(group, on_host, copies)
    return rules | {
        "every_pool_row_belongs_to_one_block": sorted(host.pool_row.tolist()) == ids.tolist(),
        "blocks_out_of_use_keep_their_pool_rows": host.pool_row[unused] == ids[unused],
        "the_stack_of_the_host_is_its_empty_blocks": _is_stack(host.empty, host.num_empty, empty),
        "children_on_the_host_are_counted": host.num_host_children == below,
        "a_device_block_has_its_parent_on_the_device": on_host[child] | ~on_host[parent[child]],
        "only_blocks_with_contents_are_on_the_move": ~moving | findable | (blocks.refcount > 0) | copies,
        "moves_were_ordered": (host.pending_transfer == 0) | (_after(host.num_moves, host.pending_transfer) >= 0),
    }


def _backup_rules(group: Any, on_host: np.ndarray, copies: np.ndarray) -> dict[str, Any]:
    """The rules of a group with backups. `copies` bool[B] are backups, and `on_host` bool[B] blocks of the host."""
    blocks = group.blocks
    host = group.host
    parent = blocks.parent[:, 0]
    findable = blocks.fill > 0
    paired = np.flatnonzero(host.backup >= 0)
    backed = (host.backup >= 0) & findable
    child = np.flatnonzero(backed & (parent >= 0))
    waits = np.where(backed, host.pending_transfer[host.backup], 0)
    left = host.backup == LEFT
    followed = ~on_host & (host.num_host_children > 0) & (~backed | (waits != 0))
    return {
        "backups_name_each_other": host.backup[host.backup[paired]] == paired,
        "a_backup_belongs_to_a_findable_block": findable[host.backup[copies]],
        "a_block_with_contents_is_no_backup": copies[host.backup[backed]],
        "blocks_with_backups_are_on_the_device": ~on_host[backed],
        "backups_are_on_the_host": on_host[copies],
        "nobody_holds_a_backup": blocks.refcount[copies] == 0,
        "the_parent_of_a_block_with_a_backup_has_one": backed[parent[child]],
        "backups_arrive_after_those_of_their_prefixes": (waits[parent[child]] == 0)
        | (waits[parent[child]] == waits[child]),
        "blocks_that_left_are_on_the_host": on_host[left] & findable[left],
        "device_blocks_with_children_on_the_host_and_no_backup_stay": ~followed | host.unevictable,
    }


def _check_prefixes(state: Any, group: Any) -> list[str]:
    """The rules of the first group."""
    return _check_tree(group) + _check_links(group)


def _check_tree(group: Any) -> list[str]:
    blocks = group.blocks
    num_ids = blocks.refcount.shape[0]
    findable = np.flatnonzero(blocks.fill > 0)
    parent, generation = blocks.parent[findable].T
    has_parent = (parent >= 0) & (parent < num_ids)
    above = parent[has_parent]
    below = findable[has_parent]
    on_device = _on_device(group)
    held_below_unheld = (blocks.refcount[below] > 0) & (blocks.refcount[above] == 0)
    text = np.stack(jax.tree.leaves(blocks.text))
    prefixes = {(*blocks.parent[b], *text[:, b, : blocks.fill[b]].reshape(-1).tolist()) for b in findable}
    return _failures(
        parents_are_whole_and_findable=[*(parent < num_ids), *(blocks.fill[above] == blocks.tokens.shape[1])],
        parent_links_are_of_this_generation=blocks.generation[above] == generation[has_parent],
        children_are_counted=(np.bincount(above[on_device[below]], minlength=num_ids) == blocks.children)
        | (blocks.fill == 0),
        only_findable_blocks_have_children=(blocks.fill > 0) | (blocks.children == 0),
        a_held_block_has_a_held_parent=~held_below_unheld,
        no_prefix_is_stored_twice=len(prefixes) == len(findable),
    )


def _check_group0_blocks(state: Any, group: Any) -> list[str]:
    tree = state.groups[0]
    blocks = group.blocks
    findable = np.flatnonzero(blocks.fill > 0)
    held = _inside(group.table, blocks.fill)
    group0_blocks = _inside(group.group0_block[findable], tree.blocks.fill)
    rows = (group.table >= 0) & (tree.table >= 0) & (blocks.fill[held] > 0)
    return _failures(
        group0_blocks_are_blocks=group0_blocks == group.group0_block[findable],
        group0_blocks_hold_as_many_tokens=tree.blocks.fill[group0_blocks] == blocks.fill[findable],
        window_blocks_are_the_way_back_from_group0_blocks=group.window_block[group0_blocks] == findable,
        every_window_block_is_findable=np.sum(group.window_block >= 0) == len(findable),
        a_held_block_has_a_held_group0_block=(blocks.refcount[findable] == 0)
        | (tree.blocks.refcount[group0_blocks] > 0),
        rows_hold_blocks_of_the_same_prefixes=(group.group0_block[held] == tree.table) | ~rows,
    )


def _check_links(group: Any) -> list[str]:
    blocks = group.blocks
    links = group.links
    num_ids = blocks.refcount.shape[0]
    chain: dict[int, int] = {}  # the bucket that leads to each handle
    consistent = True
    for bucket in range(2 * num_ids, len(links.next)):
        before = bucket
        node = links.next[bucket]
        while 0 <= node < 2 * num_ids and node not in chain:
            chain[int(node)] = bucket
            consistent &= bool(links.prev[node] == before)
            before = node
            node = links.next[node]
        consistent &= bool(node == -1)
    findable = np.flatnonzero(blocks.fill > 0)
    wanted = [
        index.key_bucket(links, blocks.key[findable]),
        index.child_bucket(links, blocks.parent[findable], jax.tree.map(lambda x: x[findable, 0], blocks.text)),
    ]
    by_key, by_parent = ([chain.get(int(b) + offset, -1) for b in findable] for offset in (0, num_ids))
    return _failures(
        every_findable_block_is_linked_once=sorted(chain) == [*findable, *(findable + num_ids)],
        links_agree_both_ways=consistent,
        keys_differ=len(np.unique(blocks.key[findable], axis=0)) == len(findable),
        every_findable_block_is_found_by_its_key=by_key == wanted[0],
        every_findable_block_is_found_by_its_parent=by_parent == wanted[1],
    )


def _check_ring(group: Any, ring: Ring, device: bool) -> list[str]:
    blocks = group.blocks
    in_tier = _on_device(group) == device
    held = int(_after(ring.tail, ring.head))
    position = int(ring.head) + np.arange(max(min(held, len(ring.order)), 0))
    ids = ring.order[position & (len(ring.order) - 1)]
    live = (_after(ring.stamp[ids], position) == 0) & (blocks.refcount[ids] == 0) & (blocks.fill[ids] > 0)
    if group.backup is not None:  # the host's ring learns of LEFT blocks between loops
        in_tier = in_tier & (group.backup != LEFT)
        live = live & (group.backup[ids] != LEFT)
    cached = np.flatnonzero((blocks.refcount == 0) & (blocks.fill > 0) & in_tier)
    return _failures(
        the_ring_holds_at_most_its_size=0 <= held <= len(ring.order),
        every_cached_block_waits_in_the_ring_of_its_tier_once=sorted(ids[live].tolist()) == cached.tolist(),
    )
