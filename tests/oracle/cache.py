# SPDX-License-Identifier: Apache-2.0
"""The cache in plain Python, written to be read and to be right.

It uses dicts and lists instead of arrays, and handles blocks in turn instead of with masks. It is slow.

A token is a pair (token id, extra id). A *path* is the tuple of all tokens from the start of a prompt to the end of a
block. A *node* is (namespace, path). The index maps each node to the block which holds its last tokens, so two prompts
share a block exactly when everything up to its end is equal, and no hash is needed. Every block is *active* (a row or a
pin holds it), *cached* (nothing holds it, but it is in the index) or *empty*. Only a block of `block_size` tokens has
children. A shorter block is the tail of a released sequence.

With sliding windows there are several groups of blocks. The first group has all blocks of every sequence. Each other
group has, for a window, the blocks visible to the next token of a sequence. It has its own index, whose nodes are all
in the first group's index too.

Every verb first decides and then acts: a status other than OK leaves everything as it was.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.oracle.blocks import (
    DEFAULT,
    NO_BLOCK,
    RETENTION,
    Adopted,
    Block,
    Event,
    Group,
    Node,
    Path,
    Priority,
    Result,
    Retention,
    Row,
    Status,
    lru,
    snapshots,
)
from tests.oracle.tiers import Tiers

__all__ = ["NO_BLOCK", "Block", "Event", "Oracle", "Priority", "Result", "Retention", "Row", "Status", "lru"]


class Oracle(Tiers):
    """The cache.

    Attributes:
      groups: the groups of blocks. The first has full attention.
      rows: the sequences. A free row has length 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        partial_reuse: bool = True,
        score: Callable[[Block], Any] = lru,
        windows: Sequence[tuple[int, int, int]] = (),
        num_host_blocks: int = 0,
        offload_min_priority: int = 0,
        bare: bool = False,
        recurrent: int = 0,
        sparse: bool = False,
        backups: bool = False,
    ):
        """Makes an empty cache. The leaf of the lowest `score` is evicted first, among equals the oldest.

        `windows` are (tokens, sink tokens, blocks) of further groups. A last group of recurrent layers has `recurrent`
        blocks. Each group has so many host blocks, except a `bare` first group. A `sparse` cache takes written K/V for
        approximate, unless `commit` is told that they are exact.
        """
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.partial_reuse = partial_reuse
        self.sparse = sparse
        self.score = score
        self.min_priority = offload_min_priority
        self.groups = [self._group(0, num_blocks, 0 if bare else num_host_blocks)]
        for number, (window, sinks, blocks) in enumerate(windows, 1):
            self.groups.append(self._group(number, blocks, num_host_blocks, window, sinks))
        if recurrent:
            self.groups.append(self._group(len(self.groups), recurrent, num_host_blocks, 2, recurrent=True))
        for group in self.groups:
            group.backups = backups and group.num_host_blocks > 0
        self.rows = [self._free_row() for _ in range(max_seqs)]
        self.clock = self.turn = self.moves = 0
        self.now = 0  # ms; set by the caller

    # What a test compares.

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the first group."""
        return self.groups[0].blocks

    @property
    def index(self) -> dict[Node, int]:
        """The index of the first group."""
        return self.groups[0].index

    def snapshot(self) -> Any:
        """The whole cache as a value."""
        groups = [([dataclasses.replace(block) for block in group.blocks], dict(group.index)) for group in self.groups]
        return groups, [row.copy() for row in self.rows], self.clock, self.turn

    def counts(self, group: int = 0) -> dict[str, int]:
        """The numbers of empty, cached and active blocks."""
        return self.groups[group].counts()

    def tables(self, group: int = 0) -> list[list[int]]:
        """The block table of each row."""
        return [list(row.tables[group]) for row in self.rows]

    def priority(self, block: Block) -> int:
        """The priority of a block without holders now."""
        over = block.expiry is not None and self.now >= block.expiry
        return DEFAULT.priority if over else block.requested_priority.priority

    def queue_position(self, block: Block) -> tuple[int, int]:
        """The score of `trt_leaf`: a block whose time is over begins to wait anew, with the default priority."""
        current = self.priority(block)
        is_over = current != block.requested_priority.priority
        return current, block.expiry if is_over else block.freed

    # The verbs.

    def admit(
        self, seq, tokens, *, namespace=0, extra_ids=None, reserve_tokens=None, alignment_tokens=None,
        retention=RETENTION, tiers=False,
    ) -> Result:  # fmt: skip
        """Starts free row `seq` with the cached part of a prompt, and blocks for the rest, or for `reserve_tokens`.

        With `alignment_tokens` the cached part is whole blocks, up to a multiple of them. With `tiers` it finds blocks
        on the host too, and blocks which have to leave the device go there.
        """
        return self.admit_batch(
            [{"seq": seq, "tokens": tokens, "namespace": namespace, "extra_ids": extra_ids, "retention": retention}],
            reserve_tokens=reserve_tokens, alignment_tokens=alignment_tokens, tiers=tiers,
        )[0]  # fmt: skip

    def admit_batch(self, requests: Sequence[dict[str, Any]], **options) -> list[Result]:
        """Admits rows in turn. The sources of copies stay held until all are done."""
        results = [self._admit(**request, **options) for request in requests]
        for group in self.groups:
            for block in group.blocks:
                block.refcount, block.copies = block.refcount - block.copies, 0
        return results

    def _admit(
        self, seq, tokens, *, namespace=0, extra_ids=None, reserve_tokens=None, alignment_tokens=None,
        retention=RETENTION, tiers=False,
    ):  # fmt: skip
        if not 0 <= seq < len(self.rows) or not tokens or min(tokens) < 0 or namespace < 0 or (reserve_tokens or 1) < 1:
            return Result([Status.BAD_REQUEST])
        if self.rows[seq].length:
            return Result([Status.HELD])
        prompt = self._pair(tokens, extra_ids)
        for copied in (True, False):
            whole, source, cached = self._match(namespace, prompt, tiers, copied, alignment_tokens)
            if copied and source is None:
                continue
            found = [[self._in_group(group, node, cached, i) for i, node in enumerate(whole)] for group in self.groups]
            pairs = list(zip(self.groups, found, strict=True))
            back = [[b for b in ids if b != NO_BLOCK and group.blocks[b].host] for group, ids in pairs]
            length = len(prompt) if reserve_tokens is None else min(len(prompt), cached + reserve_tokens)
            if self._blocks_for(length) > self.max_blocks_per_seq:
                return Result([Status.ROW_FULL])
            needed = self._blocks_for(length) - len(whole)
            # The source is needed until the copy is made. It is given up only if there is no other way.
            spared = [{*found[group.number], group.index[source] if source else NO_BLOCK} for group in self.groups]
            missing = max(
                self._missing(group, needed + len(back[group.number]), spared[group.number]) for group in self.groups
            )
            if not missing:
                break
        else:
            return Result([Status.NO_BLOCKS], shortfall=missing)
        fixed = any(group.blocks[b].copies for group in self.groups for b in back[group.number])
        taken = None if fixed else self._take([needed] * len(self.groups), tiers, spared, back)
        if taken is None:
            return Result([Status.NO_BLOCKS], shortfall=1)
        new, events, moves = taken
        tables = [hits + own for hits, own in zip(found, new, strict=True)]
        row = self.rows[seq] = Row(namespace, length, prompt[:cached], tables, len(prompt), retention)
        for group in self.groups:
            for block in found[group.number]:
                if block != NO_BLOCK:
                    group.blocks[block].refcount += 1
                    group.blocks[block].hits += 1
        for i, block in enumerate(found[0]):
            requested = row.requested_priority(i * self.block_size)
            before = self.blocks[block].requested_priority
            node = self.blocks[block].node
            if requested and requested.priority != before.priority and node and block not in back[0]:
                events.append(Event("updated", *node))  # a block that comes back has its event already
            self.blocks[block].requested_priority = requested or before
        self._state_priorities(row, len(whole))
        if source is not None:
            for group in self.groups:
                lender = group.blocks[group.index[source]]
                lender.refcount, lender.copies = lender.refcount + 1, lender.copies + 1
                if lender.host:
                    moves.append(self._move(group, row.tables[group.number][len(whole)]))
                    for block in found[group.number]:
                        group.blocks[block].unevictable = group.blocks[block].unevictable or block != NO_BLOCK
                else:
                    events.append(Event("copied", namespace, tuple(prompt[:cached]), group.number))
        return Result([Status.OK], events, [len(prompt)], [cached], moves=moves)

    def extend(self, active, num_tokens=1, tiers=False, seqs=None) -> Result:
        """Reserves `num_tokens` (an int, or a list by row) more tokens in every active row, or in none.

        A row copies its last block before it writes there, if others hold the block too or it is findable. If several
        rows share a block, the last row need not copy once the others have. `seqs` selects rows, and their order.
        """
        seqs = list(range(len(self.rows)) if seqs is None else seqs)
        counts = [num_tokens] * len(seqs) if isinstance(num_tokens, int) else list(num_tokens)
        status = [Status.OK] * len(seqs)
        for i, (seq, count, on) in enumerate(zip(seqs, counts, active, strict=True)):
            row = self._row(seq)
            if not on:
                continue
            if row is None or count < 0 or seqs.count(seq) > 1:
                status[i] = Status.BAD_REQUEST
            elif row.swapped:
                status[i] = Status.HELD
            elif self._blocks_for(row.length + count) > self.max_blocks_per_seq:
                status[i] = Status.ROW_FULL
        if any(status):
            return Result(status)
        wanted = {seq: count for seq, count, on in zip(seqs, counts, active, strict=True) if on and count}
        copies = [self._copies(group, wanted) for group in self.groups]
        grown = sum(self._blocks_for(self.rows[q].length + n) - len(self.rows[q].tables[0]) for q, n in wanted.items())
        needed = [grown + len(rows) for rows in copies]
        missing = max(self._missing(group, needed[group.number]) for group in self.groups)
        taken = None if missing else self._take(needed, tiers)
        if taken is None:
            status = [Status.NO_BLOCKS if on else Status.OK for on in active]
            return Result(status, shortfall=max(missing, 1))
        new, events, moves = taken
        for seq, count in wanted.items():
            row, first = self.rows[seq], len(self.rows[seq].tables[0]) - (seq in copies[0])
            length = row.length + count
            for group in self.groups:
                table, own = row.tables[group.number], new[group.number]
                if seq in copies[group.number]:
                    source, table[-1] = table[-1], own.pop()
                    self._drop(group, source)
                    if len(row.tokens) > row.length // self.block_size * self.block_size:
                        events.append(Event("copied", row.namespace, tuple(row.tokens), group.number))
                while len(table) < self._blocks_for(length):
                    table.append(own.pop())
            row.length = length
            self._state_priorities(row, first)
        return Result(status, events, moves=moves)

    def _copies(self, group: Group, wanted: Iterable[int]) -> list[int]:
        """The rows which may not write into their last block of this group."""
        holders = [block.refcount for block in group.blocks]
        copies = []
        for seq in wanted:
            row = self.rows[seq]
            last = row.tables[group.number][-1]
            if row.length % self.block_size and (holders[last] > 1 or group.blocks[last].node):
                holders[last] -= 1
                copies.append(seq)
        return copies

    def commit(self, tokens, num_tokens, *, extra_ids=None, seqs=None, unpublished=(), exact=()) -> Result:
        """Records the K/V of each row's next `num_tokens[seq]` tokens as written. Full blocks become findable.

        A block whose content is already cached is swapped for the cached block. Rows follow the order of `seqs` (None:
        all rows, by number), so if several fill equal blocks, the first row's block stays. Blocks of the rows
        `unpublished` do not become findable. In a sparse cache only rows `exact` stay findable.
        """
        status, events, slid, filled, published = [Status.OK] * len(self.rows), [], [], [], []
        backed = {node for node, block in self.index.items() if self.groups[0].has_backup(block)}
        for seq in range(len(self.rows)) if seqs is None else seqs:
            row, count = self.rows[seq], num_tokens[seq]
            new = list(tokens[seq][: max(count, 0)])
            most = min(row.length - len(row.tokens), len(tokens[seq]))
            if not 0 <= count <= most or min(new, default=0) < 0 or (count and row.swapped):
                status[seq] = Status.BAD_REQUEST
                continue
            before = len(row.tokens)
            row.approximate |= self.sparse and count > 0 and seq not in exact
            row.tokens += self._pair(new, None if extra_ids is None else extra_ids[seq][:count])
            for i in range(before // self.block_size, len(row.tokens) // self.block_size):
                node = (row.namespace, tuple(row.tokens[: (i + 1) * self.block_size]))
                if seq in unpublished or row.is_private or not self._intact(node) or self.blocks[row.tables[0][i]].move:
                    break  # K/V are approximate, or a move has failed
                filled.append(node)
                for group in self.groups:
                    table, duplicate = row.tables[group.number], group.index.get(node)
                    if table[i] != NO_BLOCK and group.blocks[table[i]].move:
                        continue
                    if duplicate is None:
                        events.append(self._publish(group, table[i], node))
                        published += [node] if group.number == 0 else []
                    else:
                        if group.blocks[duplicate].host:  # its contents are on the device now
                            self._take_over(group, duplicate, backed)
                            events.append(Event("updated", *node, group.number))
                        group.blocks[duplicate].refcount += 1
                        group.blocks[duplicate].hits += 1
                        self._drop(group, table[i])
                        table[i] = duplicate
            slid.append((row, before))
        self._mark_passed([*filled, *(self._parent(node) for node in published)])
        for row, before in slid:
            self._slide(row, before)
        return Result(status, events)

    def _mark_passed(self, nodes: list[Node]) -> None:
        """Marks snapshots with a single child, which rows have passed. A changed one waits anew if nothing holds it."""
        for i, node in enumerate(nodes):
            for group in self.groups:
                block = group.blocks[group.index[node]] if group.recurrent and node in group.index else None
                is_passed = len(self._children(node)) == 1
                if block is not None and block.passed != is_passed and node not in nodes[i + 1 :]:
                    block.passed = is_passed
                    if not block.refcount:
                        block.queued, self.turn = self.turn, self.turn + 1

    def fork(self, src, dst) -> Result:
        """Lets free row `dst` share all blocks of row `src`, whose tokens must all be written."""
        row = self._row(src)
        if row is None or row.length != len(row.tokens) or src == dst or not 0 <= dst < len(self.rows) or row.swapped:
            return Result([Status.BAD_REQUEST])
        if self.rows[dst].length:
            return Result([Status.HELD])
        for group in self.groups:
            for block in row.tables[group.number]:
                if block != NO_BLOCK:
                    group.blocks[block].refcount += 1
        self.rows[dst] = row.copy()
        return Result([Status.OK])

    def truncate(self, seq, length) -> Result:
        """Keeps the first `length` tokens of a row.

        A cut may fall inside a findable block. If nothing else holds it and it has no findable children, it leaves the
        index, and the row may write into it. The next write copies any other findable block.
        """
        row = self._row(seq)
        if row is None or not 1 <= length <= row.length or row.swapped:
            return Result([Status.BAD_REQUEST])
        if length % self.block_size and length // self.block_size in row.holes:
            return Result([Status.BAD_REQUEST])  # nothing can be written to a hole
        committed, last = min(len(row.tokens), length), self._blocks_for(length)
        has_recurrent = any(group.recurrent for group in self.groups)
        if has_recurrent and length < len(row.tokens) and length % self.block_size:
            return Result([Status.BAD_REQUEST])  # no state after the token before is kept
        regained = []
        for group in self.groups[1:]:
            for i in range(last):
                if row.tables[group.number][i] == NO_BLOCK and group.sees(i, committed, self.block_size):
                    above = row.tables[0][i]
                    node = None if above == NO_BLOCK else self.blocks[above].node
                    if node is None or not self._reachable(group, node, False):
                        return Result([Status.BAD_REQUEST])
                    regained.append((group, i, group.index[node]))
        for group, i, block in regained:
            row.tables[group.number][i] = block
            group.blocks[block].refcount += 1
            group.blocks[block].hits += 1
        for group in self.groups:
            table = row.tables[group.number]
            while len(table) > last:
                self._drop(group, table.pop())
        row.length, row.prompt = length, min(row.prompt, length)
        row.holes = frozenset(column for column in row.holes if column < last)
        del row.tokens[length:]
        events, end = [], self.blocks[row.tables[0][-1]]
        if length % self.block_size and end.node and end.refcount == 1 and not self._children(end.node):
            events += self._remove(row.tables[0][-1])
        return Result([Status.OK], events)

    def thin(self, seqs, columns, max_removed=None) -> Result:
        """Makes columns of rows holes: their blocks are not read any more. A block that nobody reads is freed.

        A holder of a findable block holds its whole prefix. So the findable blocks after a freed one that somebody
        still holds, in any group, leave the index, with all their descendants.
        """
        status, holes = [], [row.holes for row in self.rows]
        for seq, chosen in zip(seqs, columns, strict=True):
            row = self._row(seq)
            if row is None or list(seqs).count(seq) > 1 or any(c >= len(row.tokens) // self.block_size for c in chosen):
                status.append(Status.BAD_REQUEST)
            elif row.swapped:
                status.append(Status.HELD)
            else:
                status.append(Status.OK)
                holes[seq] = row.holes | frozenset(chosen)
        if Status.OK not in status:
            return Result(status)
        entries = [(column, seq) for seq, columns in enumerate(holes) for column in columns]
        entries = [(column, seq) for column, seq in entries if self.rows[seq].tables[0][column] != NO_BLOCK]
        unread = collections.Counter(self.rows[seq].tables[0][column] for column, seq in entries)
        freed = {b for b, n in unread.items() if n == self.blocks[b].refcount and not self.blocks[b].move}
        below = self._followers([b for b in self.index.values() if b in freed])
        stranded = [b for b in below if (self.blocks[b].refcount and b not in freed) or self._is_held_beside(b)]
        leaving = self._followers(stranded)
        doomed = [b for b in self.index.values() if b in leaving]
        over = max(0, len(doomed) - (len(self.blocks) if max_removed is None else max_removed))
        if over or any(self.blocks[b].move for b in doomed):
            reason = Status.BAD_REQUEST if over else Status.HELD
            status = [Status.BAD_REQUEST if one == Status.BAD_REQUEST else reason for one in status]
            return Result(status, shortfall=over)
        for row, own in zip(self.rows, holes, strict=True):
            row.holes = own
        for column, seq in sorted(entries, key=lambda entry: (-entry[0], entry[1])):  # tails before heads
            table = self.rows[seq].tables[0]
            if table[column] in freed:
                self._drop(self.groups[0], table[column])
                table[column] = NO_BLOCK
        events = [event for block in reversed(doomed) for event in self._remove(block)]
        self._find_unevictable(self.groups[0])
        return Result(status, events)

    def _is_held_beside(self, block: int) -> bool:
        """Whether another group's block of the same prefix is held."""
        node = self.blocks[block].node
        return any(group.blocks[group.index[node]].refcount for group in self.groups[1:] if node in group.index)

    def trim(self, active, max_tokens=None) -> Result:
        """Gives back the blocks which active rows have reserved beyond their written tokens."""
        status = []
        for row, on in zip(self.rows, active, strict=True):
            unused = row.length - len(row.tokens)
            if on and (not row.tokens or (max_tokens is not None and unused > max_tokens)):
                status.append(Status.BAD_REQUEST)
            elif on and row.swapped:
                status.append(Status.HELD)
            else:
                status.append(Status.OK)
            if on and status[-1] == Status.OK:
                row.length = len(row.tokens)
                for group in self.groups:
                    table = row.tables[group.number]
                    while len(table) > self._blocks_for(row.length):
                        self._drop(group, table.pop())
        return Result(status)

    def release(self, seqs) -> Result:
        """Ends rows (an int or several) in turn. Blocks in the index stay cached, and tails age first.

        The last holder of a partial block makes it findable, unless every group has a cached sibling with its tokens.
        """
        status, events = [], []
        for seq in [seqs] if isinstance(seqs, int) else seqs:
            row = self._row(seq)
            status.append(Status.BAD_REQUEST if row is None else Status.OK)
            if row is None:
                continue
            written, path = len(row.tokens), tuple(row.tokens)
            for i in reversed(range(len(row.tables[0]))):
                block = self.blocks[row.tables[0][i]]
                is_tail = i * self.block_size < written < (i + 1) * self.block_size
                node = (row.namespace, path)
                private = block.refcount == 1 and block.node is None and not block.move and self._intact(node)
                if self.partial_reuse and is_tail and private and not row.swapped and not row.is_private:
                    siblings = [
                        (row.namespace, s) for s in self._children((row.namespace, path[: i * self.block_size]))
                    ]
                    joint = [node for node in siblings if all(node in group.index for group in self.groups)]
                    if not any(sibling[:written] == path for _, sibling in joint):
                        for group in self.groups:
                            own = group.blocks[row.tables[group.number][i]]
                            if node not in group.index and not own.move:
                                events.append(self._publish(group, row.tables[group.number][i], node))
                for group in self.groups:
                    self._drop(group, row.tables[group.number][i])
            self.rows[seq] = self._free_row()
        return Result(status, events)

    def beam_step(self, seqs, parents) -> Result:
        """Replaces row seqs[i] by row seqs[parents[i]]. Rows which are not a parent are dropped."""
        rows = [self._row(seq) for seq in seqs]
        sound = all(row is not None and row.length == len(row.tokens) and not row.swapped for row in rows)
        if not sound or len(set(seqs)) < len(seqs) or not all(0 <= parent < len(seqs) for parent in parents):
            return Result([Status.BAD_REQUEST] * len(seqs))
        for group in self.groups:
            for parent in parents:
                for block in rows[parent].tables[group.number]:
                    if block != NO_BLOCK:
                        group.blocks[block].refcount += 1
            for column in reversed(range(self.max_blocks_per_seq)):
                for row in rows:
                    if column < len(row.tables[group.number]):
                        self._drop(group, row.tables[group.number][column])
        for seq, row in zip(seqs, [rows[parent].copy() for parent in parents], strict=True):
            self.rows[seq] = row
        return Result([Status.OK] * len(seqs))

    def lookup(self, tokens, *, namespace=0, extra_ids=None, alignment_tokens=None, tiers=True) -> int:
        """The number of tokens of a prompt which `admit` would find. Changes nothing."""
        return self._match(namespace, self._pair(tokens, extra_ids), tiers, alignment_tokens=alignment_tokens)[2]

    def unusable(self, tokens, *, namespace=0, extra_ids=None, alignment_tokens=None, tiers=True) -> int:
        """The number of further tokens in the first group."""
        prompt = tuple(self._pair(tokens, extra_ids)[:-1])
        ends = range(self.block_size, len(prompt) + 1, self.block_size)
        whole = list(
            itertools.takewhile(lambda end: self._reachable(self.groups[0], (namespace, prompt[:end]), tiers), ends)
        )
        usable = self.lookup(
            tokens, namespace=namespace, extra_ids=extra_ids, alignment_tokens=alignment_tokens, tiers=tiers
        )
        return len(whole) * self.block_size - usable

    def found(self, tokens, *, namespace=0, alignment_tokens=None) -> tuple[int, list[list[int]]]:
        """The number of tokens which `admit` would find on the device, and each group's whole blocks of them.

        A block is NO_BLOCK if the next token cannot see it through its group's window.
        """
        whole, _, cached = self._match(namespace, self._pair(tokens, None), False, alignment_tokens=alignment_tokens)
        return cached, [
            [self._in_group(group, node, cached, i) for i, node in enumerate(whole)] for group in self.groups
        ]

    def pin(self, blocks, group: int = 0) -> Result:
        """Holds blocks of the index. NO_BLOCK entries are skipped."""
        own, wanted = self.groups[group].blocks, [block for block in blocks if block != NO_BLOCK]
        if len(set(wanted)) < len(wanted) or not all(0 <= b < len(own) and own[b].node for b in wanted):
            return Result([Status.BAD_REQUEST])
        if not self._prefixes_pinned(group, collections.Counter(wanted)):
            return Result([Status.BAD_REQUEST])
        for block in wanted:
            own[block].refcount += 1
        return Result([Status.OK])

    def unpin(self, blocks, group: int = 0) -> Result:
        """Drops a hold on each block: the last of the list first, like a row's tail, but children before parents."""
        own, wanted = self.groups[group], [block for block in blocks if block != NO_BLOCK]
        if len(set(wanted)) < len(wanted) or not all(0 <= b < len(own.blocks) for b in wanted):
            return Result([Status.BAD_REQUEST])
        pins = self._pins(own)
        if not all(pins[b] for b in wanted):
            return Result([Status.BAD_REQUEST])
        if not self._prefixes_pinned(group, collections.Counter(dict.fromkeys(wanted, -1))):
            return Result([Status.BAD_REQUEST])
        for block in self._children_first(own, reversed(wanted)):
            self._drop(own, block)
        return Result([Status.OK])

    def _pins(self, group: Group) -> collections.Counter[int]:
        """The number of holders of each block other than rows."""
        held = collections.Counter({b: block.refcount for b, block in enumerate(group.blocks)})
        return held - collections.Counter(block for row in self.rows for block in row.tables[group.number])

    def _prefixes_pinned(self, changed: int, change: collections.Counter[int]) -> bool:
        """Whether after this change of a group's pins every pinned block has a pinned parent, or `group0_block`."""
        nodes = []
        for group in self.groups:
            pins, more = self._pins(group), change if group.number == changed else collections.Counter()
            nodes.append({node for node, block in group.index.items() if pins[block] + more[block] > 0})
        parents = {self._parent(node) for node in nodes[0] if self._parent(node)[1]}
        return parents <= nodes[0] and all(others <= nodes[0] for others in nodes[1:])

    def evict(self, blocks) -> Result:
        """Empties cached blocks and all their findable descendants, children first, or none if any of them is held."""
        wanted = {block for block in blocks if block != NO_BLOCK}
        if not all(0 <= block < len(self.blocks) for block in wanted):
            return Result([Status.BAD_REQUEST])
        doomed: dict[Node, int] = {}
        for node, block in self.index.items():  # parents are before their children
            if block in wanted or self._parent(node) in doomed:
                doomed[node] = block
        if any(self.blocks[b].refcount or self.blocks[b].move for b in wanted | set(doomed.values())):
            return Result([Status.HELD])
        events = [event for block in reversed(doomed.values()) for event in self._remove(block)]
        self._find_unevictable(self.groups[0])
        return Result([Status.OK], events)

    def forget_namespaces(self, keep) -> Result:
        """Empties the cached blocks without holders of all other namespaces, children first."""
        forgotten = {node: block for node, block in self.index.items() if node[0] not in keep}
        if any(self.blocks[b].move for b in forgotten.values()):
            return Result([Status.HELD])
        doomed = [block for block in forgotten.values() if not self.blocks[block].refcount]
        events = [event for block in reversed(doomed) for event in self._remove(block)]
        self._find_unevictable(self.groups[0])
        return Result([Status.OK], events)

    def adopt(
        self, tokens, have, *, namespace=0, extra_ids=None, requested_priority=None, hits=None, tiers=False
    ) -> tuple[Result, Adopted]:
        """Holds the cached part of a text and reserves blocks for the rest, as far as `have[group][i]` holds.

        Also returns an argument for `finish_adoption`.
        """
        if not tokens or min(tokens) < 0 or namespace < 0:
            return Result([Status.BAD_REQUEST]), Adopted()
        text, size = tuple(self._pair(tokens, extra_ids)), self.block_size
        nodes = [(namespace, text[: end + size]) for end in range(0, len(text), size)]
        found = list(itertools.takewhile(lambda node: self._reachable(self.groups[0], node, tiers), nodes))
        new = list(itertools.takewhile(
            lambda i: have[0][i] and nodes[i] not in self.index, range(len(found), len(nodes))
        ))  # fmt: skip
        prefix = nodes[: len(found) + len(new)]
        columns = [new] + [
            [i for i, node in enumerate(prefix) if have[group.number][i] and node not in group.index]
            for group in self.groups[1:]
        ]
        if not any(columns):
            return Result([Status.OK]), Adopted()
        held = [self.index[node] for node in found]
        spared, back = [set() for _ in self.groups], [[] for _ in self.groups]
        spared[0], back[0] = set(held), [block for block in held if self.blocks[block].host]
        missing = max(
            self._missing(group, len(own) + len(back[group.number]), spared[group.number])
            for group, own in zip(self.groups, columns, strict=True)
        )
        if missing:
            return Result([Status.NO_BLOCKS], shortfall=missing), Adopted()
        taken = self._take([len(own) for own in columns], tiers, spared, back)
        if taken is None:
            return Result([Status.NO_BLOCKS], shortfall=1), Adopted()
        new_blocks, events, moves = taken
        for block in held:
            self.blocks[block].refcount += 1
        reserved = [dict(zip(own, blocks, strict=True)) for own, blocks in zip(columns, new_blocks, strict=True)]
        for i, block in reserved[0].items():
            self.blocks[block].requested_priority = (requested_priority and requested_priority[i]) or DEFAULT
        return Result([Status.OK], events, moves=moves), Adopted(prefix, held, reserved, hits or [0] * len(prefix))

    def finish_adoption(self, adopted: Adopted, arrived) -> Result:
        """Makes the arrived blocks findable, after the blocks on the device, and releases the other reserved blocks."""
        path, published, events = [], [], []
        if not adopted.nodes:
            return Result([Status.OK])
        for i, node in enumerate(adopted.nodes):
            cached, own = self.index.get(node), adopted.reserved[0].get(i)
            if cached is not None:
                if self.blocks[cached].move or self.blocks[cached].host:
                    break
                self.blocks[cached].refcount += cached not in adopted.held[i : i + 1]
                path.append(cached)
            elif own is not None and arrived[0][i]:
                events.append(self._publish(self.groups[0], own, node))
                self.blocks[own].hits = adopted.hits[i]
                published.append(node)
                path.append(own)
            else:
                break
        for group, reserved in zip(self.groups[1:], adopted.reserved[1:], strict=True):
            for i, own in reserved.items():
                if i < len(path) and arrived[group.number][i] and adopted.nodes[i] not in group.index:
                    events.append(self._publish(group, own, adopted.nodes[i]))
        self._mark_passed([*published, *(self._parent(node) for node in published)])
        for group, reserved in zip(self.groups[1:], adopted.reserved[1:], strict=True):
            for own in reversed(reserved.values()):
                self._drop(group, own)
        for block in [*reversed(path), *(b for b in [*adopted.reserved[0].values(), *adopted.held] if b not in path)]:
            self._drop(self.groups[0], block)
        return Result([Status.OK], events)

    def reset(self) -> Result:
        """Forgets everything cached, once nothing is held."""
        if any(block.refcount or block.move or block.copying for group in self.groups for block in group.blocks):
            return Result([Status.HELD])
        for group in self.groups:
            group.index.clear()
            for block in group.blocks:
                block.backed, block.left = False, False
                block.node, block.children, block.host, block.unevictable = None, 0, False, False
        return Result([Status.OK], [Event("cleared", group=group.number) for group in self.groups])

    # Blocks of steps.

    def num_steps(self, want, most, max_events) -> int:
        """The steps, 1 to `most`, for whose wanted tokens the blocks and `max_events` free records of a log suffice.

        A row may have reserved some of its tokens already. Each sharer of a last block counts as if it copies the
        block.
        """
        fits = (n for n in range(most, 1, -1) if self._enough([min(tokens, n) for tokens in want], max_events))
        return next(fits, 1)

    def _enough(self, counts: Sequence[int], max_events: int) -> bool:
        """Whether blocks and events suffice for rows which write and commit these numbers of tokens."""
        rows, size = [(row, count) for row, count in zip(self.rows, counts, strict=True) if count], self.block_size
        grown = [(row, len(row.tokens) + count) for row, count in rows if len(row.tokens) + count > row.length]
        entered = sum(self._blocks_for(length) - self._blocks_for(row.length) for row, length in grown)
        filled = sum((len(row.tokens) + count) // size - len(row.tokens) // size for row, count in rows)
        copied = []
        for group in self.groups:
            copied.append(sum(self.may_copy(row, group) for row, _ in grown))
            if self._missing(group, entered + copied[-1]):
                return False
        events = 0
        for group in self.groups:
            indexes = len(self.groups) if group.number == 0 else 1  # a node that leaves the first index leaves all
            events += (entered + max(copied)) * indexes + max(copied)
            events += filled * (2 if group.num_host_blocks else 1)  # a stored block may replace one on the host
        return events <= max_events

    def may_copy(self, row: Row, group: Group) -> bool:
        """Whether a row may not write into its last block, since others hold it or can find it."""
        last = group.blocks[row.tables[group.number][-1]] if row.length % self.block_size else None
        return last is not None and (last.refcount > 1 or last.node is not None)

    # The index.

    def _match(
        self, namespace: int, prompt: list, tiers: bool, copied: bool = True, alignment_tokens: int | None = None
    ) -> tuple[list[Node], Node | None, int]:
        """Cached blocks of a prompt, a block to copy the next tokens from, and the number of all tokens found.

        With `alignment_tokens` there is no such block, and the number is a multiple of them. With windows it is the
        longest prefix after which every group has the blocks visible to the next token.
        """
        findable, whole = tuple(prompt[:-1]), []  # the last token must be computed for its logits
        end = self.block_size
        while end <= len(findable) and self._reachable(self.groups[0], (namespace, findable[:end]), tiers):
            whole.append((namespace, findable[:end]))
            end += self.block_size
        while True:
            source, cached = None, len(whole) * self.block_size
            if alignment_tokens is not None and cached % alignment_tokens:
                whole.pop()
                continue
            if self.partial_reuse and copied and alignment_tokens is None:
                source, cached = self._longest_child(namespace, findable, cached, tiers)
            if all(
                self._reachable(group, node, tiers) or not group.sees(i, cached, self.block_size)
                for group in self.groups
                for i, node in enumerate(whole)
            ):
                return whole, source, cached
            whole.pop()

    def _longest_child(self, namespace: int, findable: Path, start: int, tiers: bool) -> tuple[Node | None, int]:
        """The block after `start` tokens which shares most of the next tokens, or None, and the tokens found."""
        source, shared = None, start
        for child in self._children((namespace, findable[:start])):
            pairs = zip(findable, child, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            everywhere = all(self._reachable(group, (namespace, child), tiers) for group in self.groups)
            # Of several equally good blocks the one stored last.
            if everywhere and (common > shared or common == shared > start):
                source, shared = (namespace, child), common
        return source, shared

    def _reachable(self, group: Group, node: Node, tiers: bool) -> bool:
        """Whether the group has the node and its K/V in these tiers."""
        block = group.blocks[group.index[node]] if node in group.index else None
        return block is not None and not block.move and (tiers or not block.host)

    def _in_group(self, group: Group, node: Node, written: int, column: int) -> int:
        """The group's block of a node, if the next token after `written` tokens sees it at `column`."""
        return group.index[node] if group.sees(column, written, self.block_size) else NO_BLOCK

    def _children(self, node: Node) -> list[Path]:
        """Paths of the findable blocks after a node."""
        namespace, prefix = node
        block, blocks = self.index.get(node), self.blocks
        if prefix and (block is None or not blocks[block].children):
            return []
        return [path for (space, path), b in self.index.items() if blocks[b].parent == block and space == namespace]

    def _children_first(self, group: Group, blocks: Iterable[int]) -> list[int]:
        """Blocks of the index before the others, and children before their parents."""

        def key(block: int) -> int:
            node = group.blocks[block].node
            return 1 if node is None else 0 if group.number else -((len(node[1]) - 1) // self.block_size)

        return sorted(blocks, key=key)

    def _parent(self, node: Node) -> Node:
        """The prefix before a node's own block: all whole blocks before its last token."""
        namespace, path = node
        return namespace, path[: (len(path) - 1) // self.block_size * self.block_size]

    def _intact(self, node: Node) -> bool:
        """Whether the parent of a node is in the index."""
        return not self._parent(node)[1] or self._parent(node) in self.index

    def _publish(self, group: Group, block: int, node: Node) -> Event:
        group.index[node] = block
        above = self.index.get(self._parent(node))
        if above is not None and group.number == 0:
            self.blocks[above].children += 1
        group.blocks[block] = dataclasses.replace(
            group.blocks[block], node=node, parent=above, hits=0, stored=self.clock, passed=False
        )
        self.clock += 1
        return Event("stored", *node, group.number)

    def _remove(self, block: int, number: int = 0) -> list[Event]:
        """Takes a block out of the index of its group. A node which leaves the first index leaves all."""
        node = self.groups[number].blocks[block].node
        assert node is not None
        assert number or not self._children(node), f"block {block} is not a leaf of the index"
        groups = [group for group in self.groups if group.number == number or (not number and node in group.index)]
        for group in groups:
            block = group.blocks[group.index.pop(node)]
            if block.parent is not None and group.number == 0:
                self.blocks[block.parent].children -= 1
            block.node, block.backed, block.copying, block.left = None, False, 0, False
            if not block.refcount:
                block.host, block.move, block.unevictable = False, 0, False
        return [Event("removed", *node, group.number) for group in groups]

    # Blocks.

    def _missing(self, group: Group, count: int, spared: Sequence[int] | set = ()) -> int:
        """The number of blocks missing for `count`, by the numbers of empty and of cached blocks."""
        cached = sum(
            not block.refcount and block.node is not None and not block.host and b not in spared
            for b, block in enumerate(group.blocks)
        )
        return max(0, count - group.counts()["empty"] - cached)

    def _choose(self, group: Group, count: int, tiers: bool, spared: Sequence[int] | set = ()) -> list[int] | None:
        """Victims on the device, in order, to make `count` blocks free, or None if there are too few."""
        missing = max(0, count - group.counts()["empty"])
        if not missing:
            return []
        unevictable = [] if tiers else [b for b, block in enumerate(group.blocks) if block.unevictable]
        victims = self._victims(group, missing, {*spared, *unevictable})
        return victims if len(victims) == missing else None

    def _victims(self, group: Group, most: int, spared: Sequence[int] | set = ()) -> list[int]:
        """The next victims on the device, in order, at most so many. None of `spared` and of their prefixes leaves."""
        victims: list[int] = []
        blocks = group.blocks
        candidates = {
            b for b in group.index.values() if not blocks[b].refcount and not blocks[b].host and not blocks[b].move
        } - set(spared)
        on_device = [b for b in self.index.values() if not self.blocks[b].host] if group.number == 0 else []
        children = collections.Counter(self.blocks[b].parent for b in on_device)
        score = self.score if group.number == 0 else snapshots if group.recurrent else lru
        while len(victims) < most:
            leaves = [b for b in candidates if not children[b]]
            if not leaves:
                break
            victim = min(leaves, key=lambda b: (score(blocks[b]), blocks[b].released))
            victims.append(victim)
            candidates.remove(victim)
            if group.number == 0:
                children[blocks[victim].parent] -= 1
        return victims

    def _take(self, counts: list[int], tiers: bool, spared: Sequence[set] = (), back: Sequence[list] = ()) -> Any:
        """Takes `counts` blocks of each group, empty blocks first, then victims. Their refcount becomes 1.

        Blocks `back` of each group come to the device, which takes blocks too. Returns the blocks, events and moves, or
        None, with nothing done, if there are not enough.
        """
        before = self.save() if any(group.num_host_blocks for group in self.groups) else None  # else counting suffices
        events, moves, taken = [], [], []
        for group, count in zip(self.groups, counts, strict=True):
            exempt = spared[group.number] if spared else set()
            onboarded = back[group.number] if back else []
            victims = self._choose(group, count + len(onboarded), tiers, exempt)
            done = None if victims is None else self._leave(group, victims, tiers, exempt, onboarded)
            if done is None:
                self.restore(before)
                return None
            events, moves = events + done[0], moves + done[1]
            free = [b for b, block in enumerate(group.blocks) if not block.refcount and not block.node]
            new = ([b for b in free if b not in victims] + [b for b in free if b in victims])[:count]
            for block in new:
                group.blocks[block].refcount, group.blocks[block].host = 1, False
            taken.append(new)
        return taken, events, moves

    def _drop(self, group: Group, block: int) -> None:
        """Drops a holder of a block. NO_BLOCK has none."""
        if block == NO_BLOCK:
            return
        own = group.blocks[block]
        own.refcount -= 1
        if not own.refcount and own.node:
            own.released, own.queued, own.freed = self.clock, self.turn, self.now
            self.clock, self.turn = self.clock + 1, self.turn + 1
            own.expiry = None if own.requested_priority.ttl is None else self.now + own.requested_priority.ttl
        elif not own.refcount:
            own.host, own.move, own.unevictable = False, 0, False

    def _slide(self, row: Row, before: int) -> None:
        """Drops a row's blocks which have left the windows since `before` tokens were written."""
        for group in self.groups[1:]:
            table = row.tables[group.number]
            for i, block in enumerate(table):
                if group.sees(i, before, self.block_size) and not group.sees(i, len(row.tokens), self.block_size):
                    self._drop(group, block)
                    table[i] = NO_BLOCK

    def _state_priorities(self, row: Row, first: int) -> None:
        """Gives a row's new blocks, from column `first` on, the priorities which the row requests."""
        for i in range(first, len(row.tables[0])):
            self.blocks[row.tables[0][i]].requested_priority = row.requested_priority(i * self.block_size) or DEFAULT

    # Small things.

    def _group(
        self, number: int, blocks: int, host: int, window: int | None = None, sinks: int = 0, recurrent: bool = False
    ) -> Group:
        return Group(number, blocks, host, [Block() for _ in range(blocks + host)], window, sinks, recurrent)

    def _free_row(self) -> Row:
        return Row(tables=[[] for _ in self.groups])

    def _row(self, seq: int) -> Row | None:
        """A row in use, or None."""
        return self.rows[seq] if 0 <= seq < len(self.rows) and self.rows[seq].length else None

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _pair(self, tokens: Sequence[int], extra_ids: Sequence[int] | None) -> list[tuple[int, int]]:
        return list(zip(tokens, [0] * len(tokens) if extra_ids is None else extra_ids, strict=True))
