# SPDX-License-Identifier: Apache-2.0
"""The scheduler in plain Python, written to be read and to be right.

It uses the cache in plain Python (`cache.py`). A step has five parts:

    retire    finished requests leave their rows, and others are preempted while the next tokens do not fit
    grow      blocks are reserved for the next tokens of the decoding rows
    admit     waiting requests get free rows
    compute   either a mixed step, with a token of each decoding row and chunks of prompts, or a block of decode steps
    choose    rows whose tokens are all computed choose the next token, and some requests are over then

A row has no explicit phase. It wants the tokens of its request which are not in the cache. A single wanted token is
decode, more are prefill. A request which comes back after a preemption is the same case.

Samples of a prompt hold rows, without blocks, until the row which leads them has computed the prompt. Then they fork
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tests.oracle.blocks import NO_BLOCK, Event, Group, Result, Status
from tests.oracle.cache import Oracle
from tests.oracle.requests import Ask, Finish, Options, Report, Request, Stage

AMPLE = 1 << 30  # free records of a log of events


class Scheduler:
    """Requests, and the cache in whose rows they run.

    Attributes:
      cache: the cache. Rows in use without a request are left alone.
      requests: the slots.
      rows: the request of each row, or None.
      leads: rows whose samples hold rows until their prompt is computed.
      passed: for each row, mixed steps since its last chunk in which it wanted a chunk.
      out_of_blocks: rows without blocks for their chunk in the last mixed step.
      refused: the number of steps whose blocks were counted but refused in the last step, or 0.
      changed: whether something has happened since no more requests could be admitted.
      chunks_deferred: blocks of steps for which chunks have waited for others.
      steps: the number of the model's steps so far.
      events: the cache's events in the last step.
    """

    def __init__(
        self,
        cache: Oracle,
        options: Options,
        choose: Callable[[Request, int], int],
        max_tokens: Sequence[int] = (64,) * 16,
    ):
        """Makes empty slots, for so many tokens each.

        The model is `choose`: the token of a request at a position, by the tokens before it and the request's seed.
        """
        self.cache, self.options, self.model, self.max_tokens = cache, options, choose, max_tokens
        self.requests = [Request(slot) for slot in range(len(max_tokens))]
        self.rows: list[Request | None] = [None] * len(cache.rows)
        self.passed = [0] * len(cache.rows)
        self.leads: set[int] = set()
        self.out_of_blocks: set[int] = set()
        self.changed = False
        self.refused = self.chunks_deferred = self.steps = self.arrivals = 0
        self.events: list[Event] = []

    # Requests come and go.

    def submit(self, asks: Sequence[Ask], slots: Sequence[int] | None = None) -> list[tuple[Status, int, int]]:
        """Puts each request into the first empty slot, or into its slot of `slots`. Refuses a request which could never
        run.

        Returns its status, its slot and the slot's generation. The latter are -1 if it is refused.
        """
        taken: list[Request | None] = []
        answers = []
        for number, ask in enumerate(asks):
            samples = [other for other in asks if other.sample_of == number]
            sound = ask.sample_of < number and self._is_alike(ask, asks)
            among = self.requests if slots is None else [self.requests[slots[number]]]
            slot = next((request for request in among if request.stage == Stage.EMPTY), None)
            status = self._check(ask, samples, slot) if sound else Status.BAD_REQUEST
            if ask.sample_of >= 0 and status != Status.BAD_REQUEST and taken[ask.sample_of] is None:
                status = answers[ask.sample_of][0]
            taken.append(slot if status == Status.OK else None)
            if status != Status.OK or slot is None:
                answers.append((status, -1, -1))
                continue
            self.requests[slot.slot] = taken[-1] = Request(
                slot.slot, slot.generation, Stage.WAITING, list(ask.tokens), len(ask.tokens), ask.max_tokens,
                ask.priority,
                self.arrivals, ask.namespace, ask.seed, ask.stop, submitted=self.steps,
                parent=taken[ask.sample_of] if ask.sample_of >= 0 else None,
            )  # fmt: skip
            self.arrivals += 1
            self.changed = True
            answers.append((status, slot.slot, slot.generation))
        return answers

    def _is_alike(self, ask: Ask, asks: Sequence[Ask]) -> bool:
        """Whether its parent, if any, is nobody's sample and has the same prompt."""
        if ask.sample_of < 0:
            return True
        lead = asks[ask.sample_of]
        same = list(lead.tokens) == list(ask.tokens) and lead.namespace == ask.namespace
        return lead.sample_of < 0 and same

    def _check(self, ask: Ask, samples: Sequence[Ask], slot: Request | None) -> Status:
        cache, prompt = self.cache, len(ask.tokens)
        if not prompt or min(ask.tokens) < 0 or ask.max_tokens <= prompt or ask.namespace < 0:
            return Status.BAD_REQUEST
        if slot is None:
            return Status.HELD
        most = min(cache.max_blocks_per_seq * cache.block_size + 1, self.max_tokens[slot.slot])
        full = ask.max_tokens > most
        if full or len(samples) >= len(self.rows):
            return Status.ROW_FULL
        for group in cache.groups:
            more = self._for_samples(group, prompt, [sample.max_tokens for sample in samples])
            pinned = self._pinned(group)
            shared = min(pinned, prompt // cache.block_size) if group.window is None else 0  # if they are its prefix
            if self.most(group, ask.max_tokens) + more > group.num_blocks - pinned + shared:
                return Status.NO_BLOCKS
        return Status.OK

    def cancel(self, slot: int, generation: int) -> Status:
        """Ends a request. A running request keeps its row until the next step begins."""
        request = self.requests[slot] if 0 <= slot < len(self.requests) else None
        if request is None or request.generation != generation or request.stage == Stage.EMPTY or request.over:
            return Status.BAD_REQUEST
        if request.stage == Stage.WAITING:
            self._detach_samples(request)
        request.end(Finish.CANCELLED, self.steps)
        self.changed = True
        return Status.OK

    def drain(self) -> list[Request]:
        """Empties the slots of finished requests without a row, and returns these requests."""
        over = [request for request in self.requests if request.over and request not in self.rows]
        for request in over:
            self.requests[request.slot] = Request(request.slot, request.generation + 1)
        return over

    @property
    def busy(self) -> bool:
        """Whether a step would do something: a request has a row, or waits and there is a row to have."""
        waits = any(request.stage == Stage.WAITING for request in self.requests)
        return any(self.rows) or (waits and bool(self._free_rows()))

    # A step.

    def step(self, log_room: int = AMPLE, most: int = AMPLE) -> Report:
        """Runs a step, of at most `most` steps of the model, whose events fit into `log_room` free records."""
        report, self.events = Report(), []
        self.retire(report)
        tried = self.tries(report)
        self.grow(report, tried or self.mixes(), log_room, most)
        if tried:
            self.admit(report)
        if self.mixes():
            self.compute_mixed(report)
        else:
            self.compute_block(report)
        return report

    # 1. Retire.

    def retire(self, report: Report) -> None:
        """Releases the rows of finished requests, then preempts while the next tokens do not fit.

        The last request in order is preempted first, and keeps its turn. If it is the only request, it is over.
        """
        for row, request in enumerate(self.rows):
            if request and request.over:
                self._leave(row, report)
        while self._lacks_blocks():
            having = [row for row in self._running() if self.cache.rows[row].length]
            row = max(having, key=self._rank_of_row)
            request = self._request(row)
            if len(having) > 1:
                request.stage, request.preemptions = Stage.WAITING, request.preemptions + 1
                report.preempted.append(request.slot)
            else:
                request.end(Finish.NO_BLOCKS, self.steps)
            self._leave(row, report)

    def _lacks_blocks(self) -> bool:
        """Whether the next tokens of decoding rows, and chunks of rows which found no blocks, do not fit."""
        if self.refused == 1:
            return True
        wanted = dict.fromkeys(self.decoding(), 1)
        wanted |= {
            row: min(self.want(row), self.options.chunk) for row in self.prefilling() if row in self.out_of_blocks
        }
        return any(
            sum(self._needs(group, row, count) for row, count in wanted.items()) > self._available(group)
            for group in self.cache.groups
        )

    def _leave(self, row: int, report: Report) -> None:
        """Frees a row. Samples with rows for it wait again."""
        request, self.rows[row] = self._request(row), None
        for other in list(self._running()):
            sample = self._request(other)
            if sample.parent is request:
                sample.stage, self.rows[other] = Stage.WAITING, None
        if request.over:
            self._detach_samples(request)
        self.leads.discard(row)
        self.out_of_blocks.discard(row)
        self.passed[row] = 0
        if self.cache.rows[row].length:
            assert self._record(self.cache.release(row)).ok
        self.refused, self.changed = 0, True
        report.released.append(row)

    def _detach_samples(self, request: Request) -> None:
        """Turns the samples which wait for a finished request into plain requests."""
        for sample in self._samples(request):
            sample.parent = None

    # 2. Grow.

    def grow(self, report: Report, single: bool, log_room: int, steps: int = AMPLE) -> None:
        """Reserves blocks for the next tokens of all decoding rows.

        While a request waits for a row or for blocks, a block of steps ends where the first row is known to end.
        """
        most, decoding = self.options.k, self.decoding()
        left = {row: self._request(row).max_tokens - self._request(row).num_tokens for row in decoding}
        want = [min(left.get(row, 0), most) for row in range(len(self.rows))]
        limit = most
        if any(request.stage == Stage.WAITING for request in self.requests):
            limit = min(most, self.options.k_waiting, *left.values())
        n = 1 if single or self.refused > 1 else min(limit, steps, self.cache.num_steps(want, most, log_room))
        more = [max(0, min(count, n) - self._reserved(row)) for row, count in enumerate(want)]
        result = self._record(self.cache.extend([count > 0 for count in more], more))
        report.n, self.refused = (n, 0) if result.ok else (0, n)

    # 3. Admit.

    def tries(self, report: Report) -> bool:
        """Whether to try to admit: a request waits, and rows and blocks may be free."""
        idle = self.options.reserve != "batch" or not any(self.rows)
        somebody = any(request.stage == Stage.WAITING and not request.parent for request in self.requests)
        return self.changed and idle and somebody and bool(self._free_rows()) and not report.preempted

    def admit(self, report: Report) -> None:
        """Admits waiting requests in their order. Others are passed over, within their max_deferrals.

        If no row runs and no request can be admitted, the first request is over: no block will ever become free for it.
        """
        options, skipped = self.options, []
        while self._free_rows() and len(skipped) < options.max_skips and (request := self._next(skipped)):
            if self._waits_for_prefix(request) or not self._fits(request) or not self._start(request, report):
                skipped.append(request)
            else:
                for other in self.requests:
                    other.passed += other.stage == Stage.WAITING and other.arrival < request.arrival
            if any(request.passed >= options.max_deferrals for request in skipped):
                break
        self.changed = False
        if not any(self.rows) and (first := self._next([])):
            first.end(Finish.NO_BLOCKS, self.steps)
            self._detach_samples(first)
            self.changed = True

    def _next(self, skipped: Collection[Request]) -> Request | None:
        """The first waiting request, in order, outside of `skipped`."""
        waiting = [request for request in self.requests if request.stage == Stage.WAITING and not request.parent]
        waiting = [request for request in waiting if request not in skipped]
        return min(waiting, key=self._rank, default=None)

    def _start(self, request: Request, report: Report) -> bool:
        """Admits a request into the first free row, and its samples into the next. Returns False if it is refused."""
        row, *others = self._free_rows()
        result = self.cache.admit(
            row, request.tokens, namespace=request.namespace,
            reserve_tokens=self.options.chunk if len(self.cache.groups) > 1 else None,
            alignment_tokens=self.options.alignment_tokens,
        )  # fmt: skip
        if not self._record(result).ok:
            return False
        request.stage, self.rows[row] = Stage.RUNNING, request
        if not request.preemptions:
            request.cached = result.cached[0]
        report.admitted.append((request.slot, row, result.cached[0]))
        for sample, held in zip(self._samples(request), others, strict=False):
            sample.stage, self.rows[held] = Stage.RUNNING, sample
            self.leads.add(row)
        return True

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a row is about to compute the next reusable part of a request's prefix."""
        part = self.options.alignment_tokens or self.cache.block_size
        end = (self._found(request)[0] // part + 1) * part
        if not self.options.wait_for_prefix or end > request.num_tokens - 1 or end > request.prompt:
            return False
        return any(
            self._request(row).namespace == request.namespace
            and self._request(row).prompt >= end
            and self._request(row).tokens[:end] == request.tokens[:end]
            and self._committed(row) < end
            for row in self._running()
        )

    def _fits(self, request: Request) -> bool:
        """Whether rows and blocks suffice for a request and its samples, by the rule of `reserve`."""
        samples = self._samples(request)
        if len(self._free_rows()) <= len(samples):
            return False
        count = self._fits_num_tokens if self.options.reserve == "num_tokens" else self._fits_max_tokens
        cached, found = self._found(request)
        limits = [sample.max_tokens for sample in samples]
        return all(
            count(group, request, cached, found[group.number], self._for_samples(group, request.prompt, limits))
            for group in self.cache.groups
        )

    def _found(self, request: Request) -> tuple[int, list[list[int]]]:
        """The part of a request's tokens which `admit` would find, by `Oracle.found`."""
        return self.cache.found(
            request.tokens, namespace=request.namespace, alignment_tokens=self.options.alignment_tokens
        )

    def _fits_num_tokens(self, group: Group, request: Request, cached: int, found: Sequence[int], more: int) -> bool:
        """Whether a group has the blocks which the row would hold once admitted, and the watermark."""
        length = request.num_tokens
        if len(self.cache.groups) > 1:
            length = min(length, cached + self.options.chunk)
        new = self._blocks(length) - len(found)
        cold = sum(block != NO_BLOCK and not group.blocks[block].refcount for block in found)
        watermark = self.options.watermark if any(self.rows) else 0
        return new + cold + more <= self._available(group) - watermark

    def _fits_max_tokens(self, group: Group, request: Request, cached: int, found: Sequence[int], more: int) -> bool:
        """Whether a group has the blocks which this row and the running rows may still need.

        Rows of full attention keep shared blocks as long as they run, so they count once. Rows with a window drop them
        in turn, and each may then need as many blocks as alone.
        """
        most = self.most(group, request.max_tokens) + more
        if group.window is None:
            held = sum(group.blocks[block].refcount > 0 for block in found)
            return most - held + sum(self._future(group, row) for row in self._running()) <= self._available(group)
        return most + sum(self._share(group, row) for row in self._running()) <= group.num_blocks - self._others(group)

    # 4. Compute, and 5. choose.

    def mixes(self) -> bool:
        """Whether to compute chunks: enough rows want them, or have waited long enough, or no row decodes."""
        rows, coalesce = self.prefilling(), self.options.coalesce
        return bool(rows) and (len(rows) >= coalesce or self.chunks_deferred >= coalesce or not self.decoding())

    def compute_mixed(self, report: Report) -> None:
        """Computes a token of each decoding row, and chunks. Rows with all tokens computed then choose a token."""
        decode = [row for row in self.decoding() if self._reserved(row)]
        chunks = self._extend_chunks(self._plan_chunks())
        report.mixed, report.decoded, report.chunks, report.out_of_blocks = (
            True,
            decode,
            chunks,
            sorted(self.out_of_blocks),
        )
        self._commit(chunks, dict.fromkeys(decode, 1))
        computed = [row for row in chunks if not self.want(row)]
        forked = self._fork(computed)
        self.steps, self.chunks_deferred, self.changed = self.steps + 1, 0, True
        for row in sorted([*decode, *computed, *forked]):
            self._choose(row, self.steps, report)

    def _plan_chunks(self) -> dict[int, int]:
        """Divides a mixed step's positions for chunks among rows, in order.

        Rows which got none too often come before the others, the earliest request first.
        """
        options, prefilling = self.options, self.prefilling()
        left = options.chunk if options.budget is None else options.budget - len(self.rows)
        late = [row for row in prefilling if self.passed[row] >= options.max_deferrals]
        rows = sorted(late, key=lambda row: self._request(row).arrival)
        rows += sorted((row for row in prefilling if row not in late), key=self._rank_of_row)
        rows = rows[: 1 if options.canonical else options.chunk_rows]
        ask = {row: min(self.want(row), options.chunk) for row in rows}
        if options.chunks == "equal":
            levels = range(1, options.chunk + 1)
            level = max((x for x in levels if sum(min(count, x) for count in ask.values()) <= left), default=1)
            ask = {row: min(count, level) for row, count in ask.items()}
        chunks = {}
        for row, count in ask.items():
            chunks[row] = min(count, left)
            left -= chunks[row]
        for row in prefilling:
            self.passed[row] = 0 if chunks.get(row) else self.passed[row] + 1
        return {row: count for row, count in chunks.items() if count}

    def _extend_chunks(self, chunks: Mapping[int, int]) -> dict[int, int]:
        """Reserves blocks for chunks, in order as long as they suffice, where prompts were not reserved as a whole."""
        self.out_of_blocks = set()
        if len(self.cache.groups) == 1:
            return dict(chunks)
        needed, having = [0] * len(self.cache.groups), {}
        for row, count in chunks.items():
            for group in self.cache.groups:
                needed[group.number] += self._needs(group, row, count)
            if all(needed[group.number] <= self._available(group) for group in self.cache.groups):
                having[row] = count
        more = [max(0, having.get(row, 0) - self._reserved(row)) for row in range(len(self.rows))]
        if not self._record(self.cache.extend([count > 0 for count in more], more)).ok:
            having = {}
        self.out_of_blocks = set(chunks) - set(having)
        return having

    def _fork(self, ready: Sequence[int]) -> list[int]:
        """Forks computed prompts for their samples. Returns the samples' rows."""
        forked = []
        for row in self.leads.intersection(ready):
            for other in self._running():
                if self._request(other).parent is self.rows[row]:
                    assert self._record(self.cache.fork(row, other)).ok
                    self._request(other).parent, self._request(other).cached = None, self._request(row).prompt
                    forked.append(other)
        self.leads.difference_update(ready)
        return forked

    def compute_block(self, report: Report) -> None:
        """Runs up to n decode steps. A row decodes while it has reserved slots and its request is not over."""
        report.decoded = [row for row in self.decoding() if self._reserved(row)]
        written = dict.fromkeys(report.decoded, 0)
        for number in range(1, max(report.n, 1) + 1):  # after a refusal of blocks, rows may have one token reserved
            for row in report.decoded:
                if not self._request(row).over and written[row] < self._reserved(row):
                    written[row] += 1
                    self._choose(row, self.steps + number, report)
        self._commit({}, written)
        assert self._record(self.cache.trim([row in written for row in range(len(self.rows))])).ok
        self.steps += max(written.values(), default=0)
        self.chunks_deferred = self.chunks_deferred + 1 if self.prefilling() else 0

    def _choose(self, row: int, step: int, report: Report) -> None:
        """Chooses the next token of a row in this step of the model."""
        request = self._request(row)
        if request.num_tokens == request.prompt:
            request.first_token, self.changed = step, True
        token = self.model(request, request.num_tokens)
        request.tokens.append(token)
        report.chosen.setdefault(row, []).append(token)
        if token in request.stop:
            request.end(Finish.STOP, step)
        elif request.num_tokens == request.max_tokens:
            request.end(Finish.LENGTH, step)

    def _commit(self, chunks: Mapping[int, int], decoded: Mapping[int, int]) -> None:
        """Commits the next tokens of rows, in this order of the rows."""
        counts, texts = {**chunks, **decoded}, [[] for _ in self.rows]
        for row, count in counts.items():
            texts[row] = self._request(row).tokens[self._committed(row) :][:count]
        numbers = [counts.get(row, 0) for row in range(len(self.rows))]
        unpublished = list(decoded) if self.options.canonical else []
        assert self._record(self.cache.commit(texts, numbers, seqs=list(counts), unpublished=unpublished)).ok

    def _record(self, result: Result) -> Result:
        self.events += result.events
        return result

    # Rows.

    def want(self, row: int) -> int:
        """The number of tokens to compute in a row, or 0 while a sample waits in it."""
        request = self.rows[row]
        if request is None or request.stage != Stage.RUNNING or request.parent:
            return 0
        return request.num_tokens - self._committed(row)

    def decoding(self) -> list[int]:
        """Rows which want a single token. A leading row's is a chunk, since samples fork before it chooses."""
        return [row for row in range(len(self.rows)) if self.want(row) == 1 and row not in self.leads]

    def prefilling(self) -> list[int]:
        """Rows which want chunks."""
        decoding = self.decoding()
        return [row for row in range(len(self.rows)) if self.want(row) and row not in decoding]

    def _running(self) -> Iterator[int]:
        return (row for row, request in enumerate(self.rows) if request and request.stage == Stage.RUNNING)

    def _free_rows(self) -> list[int]:
        return [
            row for row, (request, seq) in enumerate(zip(self.rows, self.cache.rows, strict=True))
            if request is None and not seq.length
        ]  # fmt: skip

    def _request(self, row: int) -> Request:
        request = self.rows[row]
        assert request is not None
        return request

    def _committed(self, row: int) -> int:
        return len(self.cache.rows[row].tokens)

    def _reserved(self, row: int) -> int:
        """The number of tokens which a row can write without more blocks."""
        return self.cache.rows[row].length - self._committed(row)

    def _rank(self, request: Request) -> Any:
        """A request's key in the order. Requests which were passed over too often come before the others."""
        if request.passed >= self.options.max_deferrals:
            return 0, 0, request.arrival
        return 1, self.options.order(request, self.cache), request.arrival

    def _rank_of_row(self, row: int) -> Any:
        return self._rank(self._request(row))

    def _samples(self, request: Request) -> list[Request]:
        """The waiting samples of a request, in the order of their slots."""
        return [other for other in self.requests if other.stage == Stage.WAITING and other.parent is request]

    # Counting blocks.

    def most(self, group: Group, max_tokens: int) -> int:
        """The maximum blocks of a group held by a request at a time."""
        whole = self._blocks(max_tokens - 1)
        if group.window is None:
            return whole
        ahead = max(self.options.chunk, self.options.k)
        seen = group.window - 1 + ahead  # tokens, from anywhere in a block on
        return min(whole, self._blocks(seen - 1) + 1 + self._blocks(group.sink_tokens))

    def _for_samples(self, group: Group, prompt: int, limits: Sequence[int]) -> int:
        """The maximum blocks added by samples of a prompt. All sharers of its last block count as if they copy it."""
        shared = prompt // self.cache.block_size if group.window is None else 0
        alone = sum(max(0, self.most(group, max_tokens) - shared) for max_tokens in limits)
        return alone + (bool(limits) and self._is_cut(prompt))

    def _needs(self, group: Group, row: int, count: int) -> int:
        """The blocks which a row needs to write `count` tokens, with another if it may have to copy its last block."""
        seq = self.cache.rows[row]
        length = max(seq.length, len(seq.tokens) + count)
        new = self._blocks(length) - self._blocks(seq.length)
        return new + (length > seq.length and self.cache.may_copy(seq, group))

    def _future(self, group: Group, row: int) -> int:
        """The blocks of the group with full attention which a running row may still take."""
        held = len(self.cache.rows[row].tables[group.number])
        return max(0, self.most(group, self._request(row).max_tokens) - held) + self._copies(group, row)

    def _share(self, group: Group, row: int) -> int:
        """The maximum blocks of a group with a window which a running row holds at a time, or takes for a copy."""
        return self.most(group, self._request(row).max_tokens) + self._copies(group, row)

    def _copies(self, group: Group, row: int) -> int:
        """The blocks which a row may take for a copy, and, if it leads, for a sample's copy."""
        leads = row in self.leads and self._is_cut(self._request(row).prompt)
        return leads + self.cache.may_copy(self.cache.rows[row], group)

    def _is_cut(self, prompt: int) -> bool:
        """Whether the last block of a prompt is partly filled."""
        return prompt % self.cache.block_size > 0

    def _available(self, group: Group) -> int:
        """The number of blocks to take: empty and cached blocks."""
        counts = group.counts()
        return counts["empty"] + counts["cached"]

    def _pinned(self, group: Group) -> int:
        """The number of blocks held, but not by a row."""
        of_rows = {block for row in self.cache.rows for block in row.tables[group.number]}
        return sum(block.refcount > 0 and b not in of_rows and not block.host for b, block in enumerate(group.blocks))

    def _others(self, group: Group) -> int:
        """The number of holds on blocks of a group by others than the running rows."""
        tables = [self.cache.rows[row].tables[group.number] for row in self._running()]
        own = sum(block != NO_BLOCK for table in tables for block in table)
        return sum(block.refcount for block in group.blocks) - own

    def _blocks(self, length: int) -> int:
        return -(-length // self.cache.block_size)


def cached_tokens(
    cache: Oracle, options: Options, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> int:
    """The number of cached tokens found by prompts which arrive at once, with these outputs after each."""
    limits = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    scheduler = Scheduler(cache, options, lambda request, at: outputs[request.slot][at - request.prompt], limits)
    answers = scheduler.submit([Ask(prompt, max_tokens) for prompt, max_tokens in zip(prompts, limits, strict=True)])
    assert all(status == Status.OK for status, *_ in answers)
    while not all(request.over for request in scheduler.requests):
        scheduler.step()
    return sum(request.cached for request in scheduler.requests)
