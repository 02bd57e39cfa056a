# SPDX-License-Identifier: Apache-2.0
"""The host tier of the cache in plain Python. It moves blocks in turn."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tests.oracle.backups import Backups
from tests.oracle.blocks import NO_BLOCK, Event, Group, Node, Result, Status, lru

Move = tuple[int, int, int]


class Tiers(Backups):
    """The verbs of the host tier, and helpers of the other verbs, as a part of `cache.Oracle`."""

    groups: list[Group]
    rows: list[Any]
    block_size: int
    min_priority: int
    turn: int
    moves: int
    score: Any

    def save(self) -> Any:
        """A copy of the fields changed by moves."""
        return copy.deepcopy([(group.blocks, group.index) for group in self.groups]), self.turn, self.moves

    def restore(self, saved: Any) -> None:
        """Restores the saved fields."""
        groups, self.turn, self.moves = saved
        for group, (blocks, index) in zip(self.groups, groups, strict=True):
            group.blocks[:] = blocks
            group.index.clear()
            group.index.update(index)

    # The verbs.

    def offload(self, blocks: Sequence[int], group: int = 0) -> Result:
        """Moves cached blocks of any priority to the host. Their descendants on the device must be named too."""
        own, wanted = self.groups[group], [block for block in blocks if block != NO_BLOCK]
        named = [own.blocks[b] for b in wanted if 0 <= b < len(own.blocks)]
        cached = [block for block in named if block.node and not block.host]
        if any(block.refcount or block.move for block in cached):
            return Result([Status.HELD])
        if len(cached) < len(wanted) or len(set(wanted)) < len(wanted):
            return Result([Status.BAD_REQUEST])
        nodes = {block.node for block in cached}
        for node, b in own.index.items() if group == 0 else ():
            if self._parent(node) in nodes and not own.blocks[b].host and node not in nodes:
                return Result([Status.BAD_REQUEST])
        deepest = sorted(wanted, key=lambda b: -self._depth(own, b))
        before = self.save()
        done = self._leave(own, deepest, True, (), (), min_priority=None, stays=True)
        if done is None:
            self.restore(before)
        return self._moved(done)

    def onboard(self, blocks: Sequence[int], group: int = 0) -> Result:
        """Moves cached blocks back. Their parents must be on the device or named too."""
        own, wanted = self.groups[group], [block for block in blocks if block != NO_BLOCK]
        named = [own.blocks[b] for b in wanted if 0 <= b < len(own.blocks)]
        on_host = [block for block in named if block.node and block.host]
        if any(block.refcount or block.move for block in on_host):
            return Result([Status.HELD])
        if len(on_host) < len(wanted) or len(set(wanted)) < len(wanted):
            return Result([Status.BAD_REQUEST])
        nodes, exempt = {block.node for block in on_host}, set()
        for node in nodes if group == 0 else ():
            above = self._parent(node)
            if above[1] and above not in nodes:
                parent = own.blocks[own.index[above]]
                if parent.host or parent.move:
                    return Result([Status.BAD_REQUEST])
            while above[1] and above not in nodes:
                exempt.add(own.index[above])
                above = self._parent(above)
        if self._missing(own, len(wanted), exempt):
            return Result([Status.NO_BLOCKS])
        before = self.save()
        victims = self._choose(own, len(wanted), True, exempt)
        done = None if victims is None else self._leave(own, victims, True, exempt, self._children_first(own, wanted))
        if done is None:
            self.restore(before)
            return Result([Status.NO_BLOCKS])
        for b in self._children_first(own, wanted):
            own.blocks[b].queued, self.turn = self.turn, self.turn + 1
        for b in self._children_first(own, sorted(exempt, key=lambda b: own.blocks[b].released)):  # as if held
            own.blocks[b].refcount += 1
            self._drop(own, b)
        return self._moved(done)

    def watermark(self, empty: int, most: int, group: int = 0) -> Result:
        """Moves cached blocks off the device until so many blocks are empty, as far as the host has space."""
        own = self.groups[group]
        counts = own.counts()
        extra = min(max(0, min(empty - counts["empty"], most)), counts["cached"], self._host_space(own))
        before = self.save()
        victims = self._choose(own, counts["empty"] + extra, True)
        done = None if victims is None else self._leave(own, victims, True, (), (), stays=True)
        if done is None:
            self.restore(before)
            return Result([Status.NO_BLOCKS])
        return self._moved(done)

    def swap_out(self, seq: int) -> Result:
        """Moves the blocks to the host which only this row holds and no other row's blocks follow."""
        row = self._row(seq)
        if row is None or row.swapped:
            return Result([Status.BAD_REQUEST])
        if self._is_moving(row):
            return Result([Status.HELD])
        before, events, moves = self.save(), [], []
        for group in self.groups:
            if not group.num_host_blocks:
                continue
            leaving: list[int] = []
            for b in reversed(row.tables[group.number]):
                if b == NO_BLOCK or group.blocks[b].refcount > 1:
                    continue
                node = group.blocks[b].node
                after = [n for n in group.index if self._parent(n) == node and not group.blocks[group.index[n]].host]
                if group.number or not node or all(group.index[n] in leaving for n in after):
                    leaving.append(b)
            done = self._leave(group, leaving, True, (), (), min_priority=None, held=True, stays=True)
            if done is None:
                self.restore(before)
                return Result([Status.NO_BLOCKS])
            events, moves = events + done[0], moves + done[1]
        row.swapped = True
        return Result([Status.OK], events, moves=moves)

    def swap_in(self, seq: int) -> Result:
        """Moves the row's blocks back."""
        row = self._row(seq)
        if row is None or not row.swapped:
            return Result([Status.BAD_REQUEST])
        if self._is_moving(row):
            return Result([Status.HELD])
        before, events, moves = self.save(), [], []
        for group in self.groups:
            if not group.num_host_blocks:
                continue
            onboarded = [b for b in row.tables[group.number] if b != NO_BLOCK and group.blocks[b].host]
            victims = None if self._missing(group, len(onboarded)) else self._choose(group, len(onboarded), True)
            done = None if victims is None else self._leave(group, victims, True, (), onboarded)
            if done is None:
                self.restore(before)
                return Result([Status.NO_BLOCKS])
            events, moves = events + done[0], moves + done[1]
        row.swapped = False
        return Result([Status.OK], events, moves=moves)

    def complete(self, moves: Sequence[Move], ok: bool) -> Result:
        """Ends moves. If they failed, the blocks and their descendants leave the index."""
        events, lost = [], []
        for number, b, move in moves:
            block = self.groups[number].blocks[b]
            if block.copying == move:
                block.copying = 0
                if not ok:
                    self._drop_copies(self.groups[number], [b] if number else self._followers([b]))
            elif block.move == move:
                if ok:
                    block.move = 0
                else:  # on the move until it is empty
                    lost.append((number, b))
        status = [Status.HELD if any(b in row.tables[number] for number, b in lost) else Status.OK for row in self.rows]
        for number, b in lost:
            block = self.groups[number].blocks[b]
            if block.node and number == 0:
                for follower in reversed(self._followers([b])):
                    events += self._remove(follower)
            elif block.node:
                events += self._remove(b, number)
        for group in self.groups if moves else ():
            self._find_unevictable(group)
        return Result(status, events)

    # Helpers of the verbs.

    def _leave(
        self,
        group: Group,
        victims: Sequence[int],
        tiers: bool,
        spared: Collection[int],
        onboarded: Sequence[int],
        min_priority: int | None = 0,
        held: bool = False,
        stays: bool = False,
    ) -> tuple[list[Event], list[Move]] | None:
        """Moves victims off the device, to the host or for good, and blocks back from the host.

        A victim which goes to the host may be the host's victim at once, unless it `stays`. Returns events and moves,
        or None if a block which has to leave can't be removed, or does not fit on the host.
        """
        blocks, events = group.blocks, []
        priorities = {b: self._priority_of(group, b) for b in victims}
        backed = [b for b in victims if group.has_backup(b)]
        to_host = [
            b
            for b in victims
            if tiers and group.num_host_blocks and (min_priority is None or priorities[b] >= self.min_priority)
        ]
        to_host = [b for b in to_host if b not in backed]
        if group.backups and tiers and (victims or onboarded):
            self._settle(group)
            self._drop_copies(group, [b for b in victims if b not in backed])
        for b in backed:  # without a move
            blocks[b].backed, blocks[b].host, blocks[b].left = False, True, not tiers
        if group.backups and tiers:
            self._make_room(group, len(to_host) - group.num_host_empty - len(onboarded))
        num_empty = group.num_host_empty
        evicted = [b for b in victims if b not in to_host and b not in backed]
        doomed = evicted if group.number else self._followers(evicted)
        if any((blocks[b].refcount or blocks[b].move) and b not in victims for b in doomed):
            return None
        offloaded = [b for b in to_host if b not in doomed]
        on_host = [b for b, block in enumerate(blocks) if block.host and (block.node or block.refcount)]
        on_host = [b for b in on_host if b not in doomed and b not in onboarded]
        queued = {
            b: self.turn + i for i, b in enumerate(b for b in victims if b in offloaded or (tiers and b in backed))
        }
        candidates = [b for b in on_host if not blocks[b].refcount and not blocks[b].move and b not in spared]
        candidates = [b for b in candidates if not (stays and b in backed)]
        num_copies = sum(block.backed for block in blocks)
        candidates += [] if stays else offloaded
        host_victims: list[int] = []
        while tiers and len(on_host) + len(offloaded) + num_copies - len(host_victims) > group.num_host_blocks:
            victim = self._host_victim(group, candidates, {*doomed, *host_victims}, queued)
            if victim is None:
                return None
            host_victims.append(victim)
        if not held:
            self.turn += len(queued)
        dropped = [b for b in doomed if b not in victims] + [b for b in host_victims if b not in offloaded]
        moves = []
        removed = sorted({*doomed, *host_victims}, key=lambda b: -self._depth(group, b))
        for b in removed:
            events += self._remove(b, group.number)
        for b in backed:
            if blocks[b].node:
                events.append(Event("updated", *blocks[b].node, group.number))
            blocks[b].queued = queued.get(b, blocks[b].queued)
        num_used = max(0, len([b for b in offloaded if b not in removed]) - len(dropped) - num_empty)
        for b in to_host:
            if b in removed:
                continue
            if blocks[b].node:
                events.append(Event("updated", *blocks[b].node, group.number))
            blocks[b].queued = queued.get(b, 0)
            blocks[b].host = True
            moves.append(self._move(group, b))
        for b in onboarded:
            blocks[b].host = False
            moves.append(self._move(group, b))
            if blocks[b].node:
                events.append(Event("updated", *blocks[b].node, group.number))
        if group.backups:
            self._keep_copies(group, onboarded, num_used)
        if tiers:
            self._find_unevictable(group)
        return events, moves

    def _host_victim(self, group: Group, candidates: Sequence[int], gone: Collection[int], queued: Any) -> int | None:
        """The candidate that leaves the host next, if the blocks `gone` have left, or None."""
        blocks = group.blocks
        nodes = [n for n, b in group.index.items() if b not in gone]
        parents = {self._parent(n) for n in nodes} if not group.number else set()
        leaves = [b for b in candidates if b not in gone and blocks[b].node not in parents]
        score = self.score if not group.number else lru

        def rank(b: int) -> Any:
            block = blocks[b]
            return (queued.get(b, block.queued) if score is lru else score(block)), block.released

        return min(leaves, key=rank) if leaves else None

    def _host_space(self, group: Group) -> int:
        """The number of blocks for which the host has space. Blocks may leave it unless they move or are held."""
        used = [b for b, block in enumerate(group.blocks) if block.host and (block.node or block.refcount)]
        fixed = {b for b in used if group.blocks[b].refcount or group.blocks[b].move}
        leaves = [b for b in used if not fixed & {b, *([] if group.number else self._followers([b]))}]
        num_copies = sum(block.backed for block in group.blocks)
        return group.num_host_blocks - len(used) - num_copies + len(leaves) + len(self._droppable(group))

    def _find_unevictable(self, group: Group) -> None:
        """Marks the device blocks which can't leave before a descendant."""
        if not group.num_host_blocks:
            return
        for block in group.blocks:
            block.unevictable = block.move > 0 or block.copying > 0
        for node in sorted(group.index, key=lambda node: -len(node[1])) if not group.number else ():
            block, above = group.blocks[group.index[node]], self._parent(node)
            if above[1] and not group.blocks[group.index[above]].host:
                stays = not group.has_backup(group.index[above]) if block.host else block.unevictable
                group.blocks[group.index[above]].unevictable |= stays

    def _mark_unevictable(self, group: Group, node: Node) -> None:
        """Marks a block as unevictable if it has just come to the device alone, with its descendants on the host."""
        if group.number or all(not group.blocks[group.index[n]].host for n in group.index if self._parent(n) == node):
            return
        while node[1]:
            group.blocks[group.index[node]].unevictable = True
            node = self._parent(node)

    def _move(self, group: Group, block: int) -> Move:
        self.moves += 1
        group.blocks[block].move = self.moves
        return group.number, block, self.moves

    def _moved(self, done: tuple[list[Event], list[Move]] | None) -> Result:
        return Result([Status.NO_BLOCKS]) if done is None else Result([Status.OK], done[0], moves=done[1])

    def _priority_of(self, group: Group, block: int) -> int:
        """The priority of a block. A window group takes it from the block's group0_block."""
        node = group.blocks[block].node
        return self.priority(self.groups[0].blocks[self.groups[0].index[node]]) if node else 0

    def _followers(self, blocks: Iterable[int]) -> list[int]:
        """Blocks of the first group with all their descendants, parents before children."""
        found = dict.fromkeys(blocks)
        for block in self.index.values():  # parents are before their children
            if self.blocks[block].parent in found:
                found[block] = None
        return list(found)

    def _depth(self, group: Group, block: int) -> int:
        node = group.blocks[block].node
        return (len(node[1]) - 1) // self.block_size if node and not group.number else 0

    def _is_moving(self, row: Any) -> bool:
        return any(group.blocks[b].move for group in self.groups for b in row.tables[group.number] if b != NO_BLOCK)
