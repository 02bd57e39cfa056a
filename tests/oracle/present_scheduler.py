# SPDX-License-Identifier: Apache-2.0
"""What `kvjax/serving` does at present, in plain Python; `scheduler.py` has the rules that it has yet to follow.

Nothing is a model here: `choose(request)` gives the next token of a request whose tokens are all written.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.serving.scheduler import Scheduler as Options
from tests.oracle.blocks import NO_BLOCK
from tests.oracle.cache import Oracle


@dataclasses.dataclass(eq=False)
class Request:
    """What is wanted, and how far it is; `tokens` are the prompt's and then those that were generated."""

    slot: int
    tokens: list[int]
    goal: int
    arrival: int
    priority: int = 0
    namespace: int = 0
    stop: Sequence[int] = ()
    parent: Request | None = None
    stage: str = "waiting"
    prompt: int = 0
    row: int | None = None
    passed: int = 0
    cached: int = 0
    preemptions: int = 0
    finish: str | None = None
    submitted: int = 0
    admitted: int = -1
    first_token: int = -1
    ended: int = -1

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.arrival


@dataclasses.dataclass
class Report:
    """What one step did: slots and rows, in order."""

    released: list[int] = dataclasses.field(default_factory=list)
    preempted: list[int] = dataclasses.field(default_factory=list)
    admitted: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # slot, row, tokens found
    n: int = 0
    mixed: bool = False
    chunks: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # row, tokens
    chosen: dict[int, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))


class Scheduler:
    """Requests and the cache whose rows they run in.

    Attributes:
      events: of the verbs of the last step.
    """

    def __init__(
        self, cache: Oracle, slots: int, options: Options, choose: Callable[[Request], int], log_room: int = 2**30
    ):
        self.cache, self.options, self.choose, self.log_room = cache, options, choose, log_room
        self.k = options.k or cache.block_size
        self.slots: list[Request | None] = [None] * slots
        self.steps = self.arrivals = self.put_off = 0
        self.fresh = False
        self.stalled: set[int] = set()
        self.events: list[Any] = []

    # From outside.

    def submit(self, batch: Sequence[dict[str, Any]]) -> list[str]:
        """Puts requests into the first empty slots; returns their statuses.

        Each is {tokens, new, of, ...}: `of` is the number of the entry that it is another sample of, or -1.
        """
        statuses: list[str] = []
        entered: list[Request | None] = []
        for number, asked in enumerate(batch):
            samples = sum(other["of"] == number for other in batch)
            lead = asked["of"]
            status = self._status(asked["tokens"], asked["new"], samples)
            if lead >= 0 and not (lead < number and _alike(asked, batch[lead]) and statuses[lead] in ("OK", "HELD")):
                status = "BAD_REQUEST"
            statuses.append(status)
            entered.append(None)
            if status == "OK":
                options = {name: value for name, value in asked.items() if name not in ("tokens", "new", "of")}
                slot, tokens = self.slots.index(None), list(asked["tokens"])
                request = Request(slot, tokens, len(tokens) + asked["new"], self.arrivals, **options)
                request.prompt, request.submitted = len(tokens), self.steps
                request.parent = entered[lead] if lead >= 0 else None
                self.slots[slot] = entered[-1] = request
                self.arrivals, self.fresh = self.arrivals + 1, True
        return statuses

    def _status(self, tokens: Sequence[int], new: int, samples: int) -> str:
        goal = len(tokens) + new
        if not tokens or min(tokens) < 0 or new < 1:
            return "BAD_REQUEST"
        if goal - 1 > self.cache.max_blocks_per_seq * self.cache.block_size or samples >= len(self.cache.rows):
            return "ROW_FULL"
        for group in self.cache.groups:
            most = self._most(group, goal)
            need = most + samples * self._of_sample(group, goal, len(tokens))
            if need > group.num_blocks - self._pinned(group):
                return "NO_BLOCKS"
        return "OK" if None in self.slots else "HELD"

    def _of_sample(self, group: Any, goal: int, prompt: int) -> int:
        """Blocks that a sample takes besides those of its prompt."""
        return max(self._most(group, goal) - (prompt // self.cache.block_size if group.number == 0 else 0), 0)

    def cancel(self, slot: int) -> bool:
        request = self.slots[slot]
        if request is None or request.stage not in ("waiting", "running"):
            return False
        self._end(request, "cancelled")
        if request.row is None:
            self._orphan(request)
        self.fresh = True
        return True

    def drain(self) -> list[Request]:
        """Empties the slots of requests that are over and have no row."""
        over = [r for r in self._requests() if r.stage not in ("waiting", "running") and r.row is None]
        for request in over:
            self.slots[request.slot] = None
        return over

    def step(self) -> Report:
        report, self.events = Report(), []
        self._retire(report)
        tried = self._tries(report)
        extended = self._grow(report, single=self._has_chunks() or tried)
        if tried:
            self._admit(report)
        report.mixed = self._has_chunks()
        decode = {s: r for s, r in self._decoding().items() if self._room(s)}
        if report.mixed:
            wrote = self._mixed_step(report, decode)
        else:
            wrote = {s: self._decode(r, min(extended.get(s, 1), report.n or 1), report) for s, r in decode.items()}
        self._commit(wrote, range(len(self.cache.rows)))
        if self.k > 1:
            self.cache.trim([s in decode for s in range(len(self.cache.rows))])
        self.steps += 1 if report.mixed else max(map(len, wrote.values()), default=0)
        self.fresh = self.fresh or report.mixed
        self.put_off = 0 if report.mixed or not self._prefilling() else self.put_off + 1
        for s, tokens in report.chosen.items():
            self._record(self._at(s), len(tokens))
        return report

    # 1. Retire.

    def _retire(self, report: Report) -> None:
        for s in range(len(self.cache.rows)):
            request = self._at(s)
            if request is not None and request.stage != "running":
                self._let_go(request, report)
        while self._lacks():
            victim = max((r for r in self._running() if self.cache.rows[r.row].length), key=lambda r: r.order)
            alone = sum(self.cache.rows[r.row].length > 0 for r in self._running()) == 1
            if alone:
                self._end(victim, "no_blocks")
            else:
                victim.stage, victim.preemptions = "waiting", victim.preemptions + 1
                report.preempted.append(victim.slot)
            self._let_go(victim, report)

    def _lacks(self) -> bool:
        """Whether blocks are missing for the next tokens of rows that decode, or were stalled."""
        ends = {s: self._written(s) + 1 for s in self._decoding()}
        ends |= {s: self._written(s) + min(self._want(s), self.options.chunk) for s in self.stalled}
        return not all(self._fit(ends))

    def _let_go(self, request: Request, report: Report) -> None:
        row, self.fresh = request.row, True
        report.released.append(row)
        if self.cache.rows[row].length:
            self.events += self.cache.release(row).events
        request.row = None
        self.stalled.discard(row)
        for sample in self._requests():
            if sample.parent is request and sample.stage == "running":
                sample.stage, sample.row = "waiting", None
        if request.stage != "waiting":
            self._orphan(request)

    # 2. Grow.

    def _grow(self, report: Report, single: bool) -> dict[int, int]:
        """Makes room for the decode rows; returns how many tokens each may write."""
        rows = self._decoding()
        left = {s: r.goal - len(r.tokens) for s, r in rows.items()}
        limit = self.k
        if any(r.stage == "waiting" for r in self._requests()):
            limit = min([limit, self.options.k_waiting, *left.values()])
        limit = 1 if single else min(limit, self._num_steps(left))
        want = {s: min(n, self.k, limit) for s, n in left.items()}
        more = [max(want.get(s, 0) - self._room(s), 0) for s in range(len(self.cache.rows))]
        result = self.cache.extend([n > 0 for n in more], more)
        self.events += result.events
        assert result.ok, "room that was counted is not there"
        report.n = limit
        return want

    def _num_steps(self, left: dict[int, int]) -> int:
        """For how many steps there are blocks, and the log has room."""
        for n in range(self.k, 1, -1):
            ends = {s: self._written(s) + min(tokens, n) for s, tokens in left.items()}
            if all(self._fit(ends)) and self._most_events(ends) <= self.log_room:
                return n
        return 1

    def _most_events(self, ends: dict[int, int]) -> int:
        size, groups = self.cache.block_size, self.cache.groups
        entered = sum(self._new(s, end) for s, end in ends.items())
        copied = max(sum(self._copies(s, end, g) for s, end in ends.items()) for g in groups)
        filled = sum(end // size - self._written(s) // size for s, end in ends.items())
        return (entered + copied) * (2 * len(groups) - 1) + copied * len(groups) + filled * len(groups)

    # 3. Admit.

    def _tries(self, report: Report) -> bool:
        waits = any(r.stage == "waiting" and r.parent is None for r in self._requests())
        busy = self.options.reserve == "batch" and any(r.row is not None for r in self._requests())
        return self.fresh and waits and bool(self._free_rows()) and not report.preempted and not busy

    def _admit(self, report: Report) -> None:
        skipped: list[Request] = []
        while self._free_rows() and len(skipped) <= self.options.look:
            waiting = [r for r in self._requests() if r.stage == "waiting" and r.parent is None and r not in skipped]
            if not waiting:
                break
            late = [r for r in waiting if r.passed >= self.options.patience]
            request = min(late, key=lambda r: r.arrival) if late else min(waiting, key=lambda r: r.order)
            if not self._take_in(request, report):
                skipped.append(request)
                if late:
                    break
        self.fresh = False
        waiting = [r for r in self._requests() if r.stage == "waiting" and r.parent is None]
        if waiting and not any(r.row is not None for r in self._requests()):
            late = [r for r in waiting if r.passed >= self.options.patience]
            first = min(late, key=lambda r: r.arrival) if late else min(waiting, key=lambda r: r.order)
            self._end(first, "no_blocks")
            self._orphan(first)
            self.fresh = True

    def _take_in(self, request: Request, report: Report) -> bool:
        """Admits a request into the first free row, with its samples, if blocks suffice and it need not wait."""
        samples = [r for r in self._requests() if r.parent is request and r.stage == "waiting"]
        whole, _, cached = self.cache._match(request.namespace, [(t, 0) for t in request.tokens], False)
        rows = self._free_rows()
        if len(rows) <= len(samples) or not self._enough(request, len(samples), whole, cached):
            return False
        if self.options.wait_for_prefix and self._computed_now(request, len(whole)):
            return False
        room = self.options.chunk if len(self.cache.groups) > 1 else None
        result = self.cache.admit(rows[0], request.tokens, namespace=request.namespace, room=room)
        if not result.ok:
            return False
        self.events += result.events
        for row, each in zip(rows, [request, *samples], strict=False):
            each.row, each.stage = row, "running"
            each.admitted = self.steps if each.admitted < 0 else each.admitted
        if not request.preemptions:
            request.cached = sum(result.cached)
        for other in self._requests():
            other.passed += other.stage == "waiting" and other.arrival < request.arrival
        report.admitted.append((request.slot, rows[0], sum(result.cached)))
        return True

    def _enough(self, request: Request, samples: int, whole: list[Any], cached: int) -> bool:
        known, size = len(request.tokens), self.cache.block_size
        target = known if len(self.cache.groups) == 1 else min(known, cached + self.options.chunk)
        for group in self.cache.groups:
            found = [self.cache._beside(group, node, cached, i) for i, node in enumerate(whole)]
            hits = [block for block in found if block != NO_BLOCK]
            held = sum(group.blocks[block].refcount > 0 for block in hits)
            most = self._most(group, request.goal)
            if self.options.reserve == "known":
                need = -(-target // size) - len(whole) + len(hits) - held
                need += self.options.watermark if any(self._running()) else 0
            else:
                need = most - held + sum(self._future(r, group) for r in self._running())
            need += samples * self._of_sample(group, request.goal, request.prompt)
            if need > self._available(group):
                return False
        return True

    def _future(self, request: Request, group: Any) -> int:
        """Blocks that a running request may still take until its goal."""
        row = self.cache.rows[request.row]
        held = sum(block != NO_BLOCK for block in row.tables[group.number]) if row.length else 0
        return max(self._most(group, request.goal) - held, 0) + self._copies(request.row, row.length + 1, group)

    def _computed_now(self, request: Request, whole: int) -> bool:
        """Whether a row is about to compute the request's next whole block."""
        end = (whole + 1) * self.cache.block_size
        if end > len(request.tokens) - 1 or end > request.prompt:
            return False
        others = [r for r in self._running() if r is not request and r.namespace == request.namespace]
        return any(
            r.prompt >= end and r.tokens[:end] == request.tokens[:end] and self._written(r.row) < end for r in others
        )

    # 4. Compute, and 5. choose.

    def _has_chunks(self) -> bool:
        rows, least = self._prefilling(), self.options.coalesce
        return bool(rows) and (len(rows) >= least or self.put_off >= least or not self._decoding())

    def _mixed_step(self, report: Report, decode: dict[int, Request]) -> dict[int, list[int]]:
        """One token of every decode row, and chunks, which are committed here."""
        chunks = self._make_room(self._plan())
        report.chunks = [(r.row, count) for r, count in chunks]
        new = {r.row: r.tokens[self._written(r.row) :][:count] for r, count in chunks if count}
        self._commit(new, [r.row for r, _ in chunks])
        for request, count in chunks:
            if count and self._want(request.row) == 0:
                for sample in [r for r in self._requests() if r.parent is request and r.stage == "running"]:
                    self.cache.fork(request.row, sample.row)
                    sample.parent, sample.cached = None, sample.prompt
                    self._choose(sample, report)
                self._choose(request, report)
        wrote = {s: [r.tokens[-1]] for s, r in decode.items()}
        for request in decode.values():
            self._choose(request, report)
        return wrote

    def _plan(self) -> list[tuple[Request, int]]:
        """Deals the line's tokens out to the first rows that want chunks."""
        size = self.options.chunk if self.options.budget is None else self.options.budget - len(self.cache.rows)
        rows = sorted(self._prefilling().values(), key=lambda r: r.order)[: self.options.chunk_rows]
        asks = [min(self._want(r.row), self.options.chunk) for r in rows]
        if self.options.chunks == "equal":
            levels = [n for n in range(1, self.options.chunk + 1) if sum(min(ask, n) for ask in asks) <= size]
            asks = [min(ask, max(levels, default=1)) for ask in asks]
        counts = []
        for ask in asks:
            counts.append(min(ask, size))
            size -= counts[-1]
        return list(zip(rows, counts, strict=True))

    def _make_room(self, chunks: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """With windows a prompt has no room as a whole: gives rows room in their order, as far as blocks suffice."""
        if len(self.cache.groups) == 1:
            return chunks
        done: list[tuple[Request, int]] = []
        ends: dict[int, int] = {}
        full = False
        for request, count in chunks:
            ends[request.row] = self._written(request.row) + count
            full = full or not all(self._fit(ends))
            done.append((request, 0 if full else count))
        more = [
            max(self._written(r.row) + count - self.cache.rows[r.row].length, 0) if count else 0 for r, count in done
        ]
        result = self.cache.extend([n > 0 for n in more], more, seqs=[r.row for r, _ in done])
        self.events += result.events
        assert result.ok, "room that was counted is not there"
        self.stalled = {r.row for (r, asked), (_, count) in zip(chunks, done, strict=True) if asked and not count}
        return done

    def _decode(self, request: Request, most: int, report: Report) -> list[int]:
        """Up to so many steps of a row; returns the tokens that it has written."""
        wrote: list[int] = []
        while len(wrote) < most:
            wrote.append(request.tokens[-1])
            if self._choose(request, report):
                break
        return wrote

    def _choose(self, request: Request, report: Report) -> bool:
        """Chooses the next token; whether the request is over then."""
        token = self.choose(request)
        request.tokens.append(token)
        report.chosen[request.row].append(token)
        return token in request.stop or len(request.tokens) >= request.goal

    def _commit(self, new: dict[int, list[int]], order: Sequence[int]) -> None:
        """Commits tokens of rows in this order."""
        rows, order = self.cache.rows, list(order)
        self.cache.rows = [rows[s] for s in order]  # as `commit(seqs=)` has them
        result = self.cache.commit([new.get(s, []) for s in order], [len(new.get(s, [])) for s in order])
        self.cache.rows = rows
        self.events += result.events

    def _record(self, request: Request, number: int) -> None:
        if len(request.tokens) - number == request.prompt:
            request.first_token = self.steps - number + 1
        if request.tokens[-1] in request.stop:
            self._end(request, "stop")
        elif len(request.tokens) >= request.goal:
            self._end(request, "length")

    # Who and how many.

    def _requests(self) -> list[Request]:
        return [request for request in self.slots if request is not None]

    def _at(self, row: int) -> Any:
        return next((r for r in self._requests() if r.row == row), None)

    def _running(self) -> list[Request]:
        return [r for r in self._requests() if r.row is not None and r.stage == "running"]

    def _free_rows(self) -> list[int]:
        taken = {r.row for r in self._requests()}
        return [s for s, row in enumerate(self.cache.rows) if not row.length and s not in taken]

    def _end(self, request: Request, finish: str) -> None:
        request.stage, request.finish, request.ended = "over", finish, self.steps

    def _orphan(self, request: Request) -> None:
        for sample in self._requests():
            if sample.parent is request:
                sample.parent = None

    def _written(self, row: int) -> int:
        return len(self.cache.rows[row].tokens)

    def _room(self, row: int) -> int:
        return self.cache.rows[row].length - self._written(row)

    def _want(self, row: int) -> int:
        request = self._at(row)
        waits = request is None or request.stage != "running" or request.parent is not None
        return 0 if waits else len(request.tokens) - self._written(row)

    def _leads(self, row: int) -> bool:
        return any(r.parent is self._at(row) and r.stage == "running" for r in self._requests())

    def _decoding(self) -> dict[int, Request]:
        return {r.row: r for r in self._running() if self._want(r.row) == 1 and not self._leads(r.row)}

    def _prefilling(self) -> dict[int, Request]:
        return {r.row: r for r in self._running() if self._want(r.row) > 0 and r.row not in self._decoding()}

    def _available(self, group: Any) -> int:
        counts = group.counts()
        return counts["empty"] + counts["cached"]

    def _most(self, group: Any, goal: int) -> int:
        """The most blocks of a group that a request holds at a time."""
        size, whole = self.cache.block_size, -(-(goal - 1) // self.cache.block_size)
        if group.window is None:
            return whole
        ahead = max(self.options.chunk, self.k)
        return min(whole, -(-(group.window - 1 + ahead) // size) + 1 + -(-group.sink_tokens // size))

    def _pinned(self, group: Any) -> int:
        of_rows = {block for row in self.cache.rows if row.length for block in row.tables[group.number]}
        return sum(block.refcount > 0 and number not in of_rows for number, block in enumerate(group.blocks))

    def _new(self, row: int, end: int) -> int:
        length = self.cache.rows[row].length
        return self.cache._blocks_for(max(end, length)) - self.cache._blocks_for(length)

    def _copies(self, row: int, end: int, group: Any) -> int:
        """Whether a row may have to copy the block that it is in, to have room up to `end`."""
        known = self.cache.rows[row]
        if end <= known.length or known.length % self.cache.block_size == 0:
            return 0
        last = group.blocks[known.tables[group.number][-1]]
        return int(last.refcount > 1 or last.node is not None)

    def _fit(self, ends: dict[int, int]) -> list[bool]:
        """Whether each group has the blocks for rows to have room up to these ends."""
        return [
            sum(self._new(s, end) + self._copies(s, end, group) for s, end in ends.items()) <= self._available(group)
            for group in self.cache.groups
        ]


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one can be a sample of the other."""
    same = one["tokens"] == other["tokens"] and one.get("namespace", 0) == other.get("namespace", 0)
    return same and other["of"] < 0
