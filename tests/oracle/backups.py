# SPDX-License-Identifier: Apache-2.0
"""The host tier in plain Python: copies on the host of blocks which stay on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tests.oracle.blocks import Group, Node, Result, Status


class Backups:
    """The verb `backup`, and helpers of the other verbs, as a part of `cache.Oracle`."""

    groups: list[Group]
    min_priority: int
    turn: int
    moves: int
    clock: int
    _followers: Any
    _find_unevictable: Any
    _mark_unevictable: Any
    _priority_of: Any
    _depth: Any
    _parent: Any
    _remove: Any
    _host_victim: Any
    _victims: Any

    def backup(self, max_blocks: int, group: int = 0) -> Result:
        """Copies the next victims and their prefixes to the host, as far as the host has space."""
        own = self.groups[group]
        blocks, events, moves = own.blocks, [], []
        self._settle(own)
        size = min(max_blocks, own.num_device_ids)
        on_move = {b for b in own.index.values() if blocks[b].move and not blocks[b].host}
        victims = self._victims(own, min(size, own.counts()["cached"]), on_move)
        turns: dict[int, int] = {}
        for turn, victim in enumerate(victims):
            if self._priority_of(own, victim) >= self.min_priority:
                for b in self._prefix(own, victim):
                    turns.setdefault(b, turn)
        waiting = {b for b in own.index.values() if not blocks[b].host and (blocks[b].move or blocks[b].copying)}
        waiting |= set() if own.number else {*self._followers(waiting)}
        lacking = [b for b in turns if not blocks[b].backed and b not in waiting]
        lacking = sorted(lacking, key=lambda b: (turns[b], self._depth(own, b)))[:size]
        self._make_room(own, len(lacking) - own.num_host_empty, turns)
        used = [b for b, block in enumerate(blocks) if block.host and block.node]
        candidates = [b for b in used if not blocks[b].refcount and not blocks[b].move]
        host_victims: list[int] = []
        while len(lacking) - own.num_host_empty > len(host_victims):
            host_victim = self._host_victim(own, candidates, host_victims, {})
            if host_victim is None:
                break
            host_victims.append(host_victim)
        for b in host_victims:
            events += self._remove(b, own.number)
        for b in lacking[: own.num_host_empty]:
            self.moves += 1
            blocks[b].backed, blocks[b].copying = True, self.moves
            moves.append((own.number, b, self.moves))
        self._find_unevictable(own)
        return Result([Status.OK], events, moves=moves)

    def _prefix(self, group: Group, block: int) -> list[int]:
        """A block and the blocks before it."""
        node, found = group.blocks[block].node, [block]
        while not group.number and self._parent(node)[1]:
            node = self._parent(node)
            found.append(group.index[node])
        return found

    def _settle(self, group: Group) -> None:
        """Lets the blocks which left in loops begin to wait on the host, in the order of their release."""
        for block in sorted((block for block in group.blocks if block.left), key=lambda block: block.released):
            block.left = False
            if block.refcount == block.copies:
                block.queued, self.turn = self.turn, self.turn + 1

    def _drop_copies(self, group: Group, blocks: Iterable[int]) -> None:
        for b in blocks:
            group.blocks[b].backed, group.blocks[b].copying = False, 0

    def _droppable(self, group: Group, exempt: Collection[int] = ()) -> dict[int, int]:
        """Blocks whose copies may be dropped, and the time that each has waited, a prefix as long as its followers."""
        blocks, waited = group.blocks, dict[int, int]()
        stay: set[int] = set()
        followed = {self._parent(node) for node, b in group.index.items() if blocks[b].host and not group.number}
        for node, b in group.index.items():
            if not blocks[b].backed:
                continue
            stays = b in exempt or node in followed
            is_held = blocks[b].refcount > blocks[b].copies
            time = -1 if is_held else self.clock - blocks[b].released
            for above in self._prefix(group, b):
                waited[above] = max(waited.get(above, -1), time)
                stay |= {above} if stays else set()
        return {b: time for b, time in waited.items() if b not in stay}

    def _make_room(self, group: Group, wanted: int, exempt: Collection[int] = ()) -> None:
        """Drops the copies of the blocks which will leave last: held ones, and then the youngest."""
        waited = self._droppable(group, exempt)
        order = sorted(waited, key=lambda b: (waited[b], -self._depth(group, b), -group.blocks[b].stored))
        self._drop_copies(group, order[: max(wanted, 0)])

    def _keep_copies(self, group: Group, onboarded: Sequence[int], num_used: int) -> None:
        """Blocks which came back keep their copies, except the first `num_used`, whose places were needed."""
        blocks = group.blocks
        order = sorted(onboarded, key=lambda b: (blocks[b].node is not None, -self._depth(group, b)))
        keeps = [b for b in order[num_used:] if blocks[b].node]
        for b in sorted(keeps, key=lambda b: self._depth(group, b)):
            blocks[b].backed = group.number > 0 or all(group.has_backup(above) for above in self._prefix(group, b)[1:])

    def _take_over(self, group: Group, block: int, backed: Collection[Node]) -> None:
        """A block has its contents on the device again. The old ones are its copy, if `backed` has its prefix."""
        own, parent = group.blocks[block], self._parent(group.blocks[block].node)
        is_rooted = group.number > 0 or not parent[1] or parent in backed
        own.backed = group.backups and not own.move and is_rooted
        own.host, own.move, own.left = False, 0, False
        if not own.backed:
            self._mark_unevictable(group, own.node)
