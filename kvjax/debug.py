# SPDX-License-Identifier: Apache-2.0
"""Looking at a state from the host: is it sound, what does it hold, and was a request done?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax import index
from kvjax.events import DEFAULT_PRIORITY, Events, Mirror, Status, fold
from kvjax.policies import Ring
from kvjax.show import show
from kvjax.state import NO_BLOCK, CacheState, Group, Host


class RequestError(ValueError):
    """A request that a checked verb did not do; `status` and `row` say which and why."""

    def __init__(self, verb: str, row: int, status: Status):
        super().__init__(f"{verb}: row {row} of the request was refused with {status.name}")
        self.row, self.status = row, status


def checked(verb: Callable[..., tuple[Any, Events]]) -> Callable[..., tuple[Any, Events]]:
    """Wraps a verb, jitted or not, so that it raises where a precondition is broken; reads the status on the host.

    A full pool or row is not an error: NO_BLOCKS and ROW_FULL come back as data.

    Raises:
      RequestError: naming the row and the status, BAD_REQUEST or HELD.
    """

    @functools.wraps(verb)
    def call(*args, **kwargs):
        result, events = verb(*args, **kwargs)
        for row, status in enumerate(np.asarray(events.status).tolist()):
            if status in (Status.BAD_REQUEST, Status.HELD):
                raise RequestError(getattr(verb, "__name__", "verb"), row, Status(status))
        return result, events

    return call


def snapshot(state: CacheState) -> list[dict[str, Any]]:
    """The cache as the events that would build its index, for somebody who joins late: created, then stored."""
    events: list[dict[str, Any]] = []
    groups = jax.device_get(state.groups)
    for number, group in enumerate(groups):
        events.append({"kind": "created", "group": number})
        blocks, tree = group.blocks, groups[0].blocks
        findable = np.flatnonzero(blocks.fill > 0)
        age = (blocks.clock - blocks.stored)[findable].astype(np.int64)
        for block in findable[np.argsort(-age, kind="stable")].tolist():
            anchor = block if group.anchor is None else int(group.anchor[block])
            n, (above, which) = int(blocks.fill[block]), tree.parent[anchor].tolist()
            event = {"kind": "stored", "group": number, "block": block, "generation": int(blocks.generation[block])}
            event |= {"parent": None, "namespace": which} if above < 0 else {"parent": (above, which)}
            event |= {"tokens": tree.tokens[anchor, :n].tolist()}
            event["level"] = 0 if group.host is None else int(group.host.slot[block] >= group.empty.shape[0])
            event["priority"] = DEFAULT_PRIORITY if blocks.retention is None else int(blocks.retention[block, 0])
            if tree.extra_ids is not None:
                event["extra_ids"] = tree.extra_ids[anchor, :n].tolist()
            events.append(event)
    return events


def index_of(state: CacheState) -> dict[tuple[int, int, tuple], tuple[int, int]]:
    """{(group, namespace, token path): (level, stated priority)} of everything that is findable."""
    return fold(snapshot(state), Mirror()).index


def check(state: CacheState) -> None:
    """Verifies every invariant of a state, on the host.

    Raises:
      AssertionError: naming the invariants that are broken, with a drawing of the state.
    """
    host = jax.device_get(state)
    broken = []
    for number, group in enumerate(host.groups):
        broken += _check_rows(host, number) + _check_counts(host, group)
        broken += _check_tree(group) + _check_links(group) if number == 0 else _check_anchors(host, group)
        if isinstance(group.policy, Ring):
            broken += _check_ring(group, group.policy, True)
            broken += [] if group.host is None else _check_ring(group, group.host.policy, False)
    if broken:
        raise AssertionError("broken: " + "; ".join(broken) + "\n" + show(state))


def _failures(**rules: Any) -> list[str]:
    return [name.replace("_", " ") for name, holds in rules.items() if not np.all(holds)]


def _check_rows(state: CacheState, number: int) -> list[str]:
    seqs, group, size = state.seqs, state.groups[number], state.spec.block_size
    held = -(-seqs.length // size)
    place = np.arange(state.spec.max_blocks_per_seq)
    inside = place[None] < held[:, None]
    inside &= np.asarray(state.spec.groups[number].keeps(place[None], seqs.committed[:, None], size))
    repeats = [len(set(row[mask])) < mask.sum() for row, mask in zip(group.table, inside, strict=True)]
    return _failures(
        committed_lies_within_length=(seqs.committed >= 0) & (seqs.committed <= seqs.length),
        length_fits_in_a_row=seqs.length <= state.spec.max_length,
        tables_hold_blocks_for_their_length=np.where(inside, group.table >= 0, group.table == NO_BLOCK),
        table_entries_are_blocks=group.table < group.blocks.refcount.shape[0],
        entries_of_a_row_differ=not any(repeats),
    )


def _check_counts(state: CacheState, group: Group) -> list[str]:
    blocks, num_ids, size = group.blocks, group.blocks.refcount.shape[0], len(group.empty)
    holders = np.bincount(group.table[(group.table >= 0) & (group.table < num_ids)], minlength=num_ids)
    here = (np.arange(num_ids) if group.host is None else group.host.slot) < size
    cached = (blocks.refcount == 0) & (blocks.fill > 0) & here
    unused = (np.arange(num_ids) >= group.num_blocks) & (np.arange(num_ids) < size)
    idle = (blocks.refcount == 0) & (blocks.fill == 0) & ~unused
    return _failures(
        refcounts_cover_the_tables=blocks.refcount >= holders,
        the_stack_is_the_empty_blocks=_is_stack(group.empty, group.num_empty, idle & here),
        num_cached_counts_cached_blocks=cached.sum() == group.num_cached,
        blocks_out_of_use_are_untouched=(blocks.refcount[unused] == 0) & (blocks.fill[unused] == 0),
        fill_fits_in_a_block=(blocks.fill >= 0) & (blocks.fill <= state.spec.block_size),
        **({} if group.host is None else _host_rules(group, group.host, idle & ~here, unused)),
    )


def _is_stack(stack: np.ndarray, height: int, wanted: np.ndarray) -> bool:
    return sorted(stack[:height].tolist()) == np.flatnonzero(wanted).tolist()


def _host_rules(group: Group, host: Host, empty: np.ndarray, unused: np.ndarray) -> dict[str, Any]:
    blocks, ids = group.blocks, np.arange(len(host.slot))
    away, above, findable = host.slot >= len(group.empty), blocks.parent[:, 0], blocks.fill > 0
    child = np.flatnonzero(findable & (above >= 0))
    return {
        "every_row_belongs_to_one_block": sorted(host.slot.tolist()) == ids.tolist(),
        "blocks_out_of_use_keep_their_rows": host.slot[unused] == ids[unused],
        "the_host's_stack_is_its_empty_blocks": _is_stack(host.empty, host.num_empty, empty),
        "children_on_the_host_are_counted": np.bincount(above[child[away[child]]], minlength=len(ids)) == host.below,
        "a_device_block_has_its_parent_there": away[child] | ~away[above[child]],
        "only_blocks_with_contents_are_on_the_move": ~host.arriving | findable | (blocks.refcount > 0),
    }


def _check_tree(group: Group) -> list[str]:
    blocks, num_ids = group.blocks, group.blocks.refcount.shape[0]
    findable = np.flatnonzero(blocks.fill > 0)
    parent, generation = blocks.parent[findable].T
    known = (parent >= 0) & (parent < num_ids)
    above, below = parent[known], findable[known]
    here = np.ones(num_ids, bool) if group.host is None else group.host.slot < len(group.empty)
    held_below_unheld = (blocks.refcount[below] > 0) & (blocks.refcount[above] == 0)
    contents = [blocks.tokens] if blocks.extra_ids is None else [blocks.tokens, blocks.extra_ids]
    prefixes = {(*blocks.parent[b], *(x for part in contents for x in part[b, : blocks.fill[b]])) for b in findable}
    return _failures(
        parents_are_whole_and_findable=[*(parent < num_ids), *(blocks.fill[above] == blocks.tokens.shape[1])],
        parent_links_are_of_this_generation=blocks.generation[above] == generation[known],
        children_are_counted=(np.bincount(above[here[below]], minlength=num_ids) == blocks.children)
        | (blocks.fill == 0),
        only_findable_blocks_have_children=(blocks.fill > 0) | (blocks.children == 0),
        a_held_block_has_a_held_parent=~held_below_unheld,
        no_prefix_is_stored_twice=len(prefixes) == len(findable),
    )


def _check_anchors(state: CacheState, group: Group) -> list[str]:
    tree, blocks = state.groups[0], group.blocks
    findable = np.flatnonzero(blocks.fill > 0)
    anchors = group.anchor[findable]
    rows = (group.table >= 0) & (tree.table >= 0) & (blocks.fill[group.table] > 0)
    return _failures(
        anchors_hold_as_many_tokens=tree.blocks.fill[anchors] == blocks.fill[findable],
        shadows_are_the_way_back_from_anchors=group.shadow[anchors] == findable,
        every_shadow_is_findable=np.sum(group.shadow >= 0) == len(findable),
        a_held_block_has_a_held_anchor=(blocks.refcount[findable] == 0) | (tree.blocks.refcount[anchors] > 0),
        rows_hold_blocks_beside_each_other=(group.anchor[group.table] == tree.table) | ~rows,
    )


def _check_links(group: Group) -> list[str]:
    blocks, links, num_ids = group.blocks, group.links, group.blocks.refcount.shape[0]
    chain: dict[int, int] = {}  # which bucket each handle was reached from
    consistent = True
    for bucket in range(2 * num_ids, len(links.next)):
        before, node = bucket, links.next[bucket]
        while 0 <= node < 2 * num_ids and node not in chain:
            chain[int(node)] = bucket
            consistent &= bool(links.prev[node] == before)
            before, node = node, links.next[node]
        consistent &= bool(node == -1)
    findable = np.flatnonzero(blocks.fill > 0)
    extra = None if blocks.extra_ids is None else blocks.extra_ids[findable, 0]
    wanted = [
        index.key_bucket(links, blocks.key[findable]),
        index.child_bucket(links, blocks.parent[findable], blocks.tokens[findable, 0], extra),
    ]
    by_key, by_parent = ([chain.get(int(b) + offset, -1) for b in findable] for offset in (0, num_ids))
    return _failures(
        every_findable_block_is_linked_once=sorted(chain) == [*findable, *(findable + num_ids)],
        links_agree_both_ways=consistent,
        keys_differ=len(np.unique(blocks.key[findable], axis=0)) == len(findable),
        every_findable_block_is_found_by_its_key=by_key == wanted[0],
        every_findable_block_is_found_by_its_parent=by_parent == wanted[1],
    )


def _check_ring(group: Group, ring: Ring, device: bool) -> list[str]:
    blocks = group.blocks
    here = np.ones(len(blocks.fill), bool) if group.host is None else (group.host.slot < len(group.empty)) == device
    held = int(ring.tail) - int(ring.head)
    at = (int(ring.head) + np.arange(max(held, 0))).astype(np.int64)
    ids = ring.order[at & (len(ring.order) - 1)]
    live = (ring.stamp[ids] == at) & (blocks.refcount[ids] == 0) & (blocks.fill[ids] > 0)
    cached = np.flatnonzero((blocks.refcount == 0) & (blocks.fill > 0) & here)
    return _failures(
        the_ring_holds_at_most_its_size=0 <= held <= len(ring.order),
        every_cached_block_waits_in_its_tiers_ring_once=sorted(ids[live].tolist()) == cached.tolist(),
    )
