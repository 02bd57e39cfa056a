# SPDX-License-Identifier: Apache-2.0
"""Histories of requests, run by the scheduler in plain Python and verified after each step."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

from tests.oracle.blocks import NO_BLOCK, Status
from tests.oracle.requests import Ask, Finish, Report, Request, Stage
from tests.oracle.scheduler import Scheduler

VOCAB = 3  # so small that rows fill equal blocks by chance


def choose(request: Request, position: int) -> int:
    """A model and its sampling: the next token of a request, by all tokens before it and the seed."""
    assert position == len(request.tokens)
    return hash((*request.tokens, request.seed)) % VOCAB


def alone(ask: Ask, model: Callable[[Request, int], int] = choose) -> tuple[list[int], Finish]:
    """A request's tokens and finish, if it runs by itself."""
    request = Request(0, tokens=list(ask.tokens), seed=ask.seed, namespace=ask.namespace)
    while len(request.tokens) < ask.max_tokens:
        request.tokens.append(model(request, len(request.tokens)))
        if request.tokens[-1] in ask.stop:
            return request.tokens, Finish.STOP
    return request.tokens, Finish.LENGTH


class Watch:
    """A scheduler whose steps are verified.

    Attributes:
      scheduler: the scheduler.
      asks: the `Ask` of each accepted request.
      passed: the number of later requests admitted before each request, counted from the reports.
      over: the finished requests, in order.
      pins: the pinned blocks of each group.
      others: rows in use outside of all requests.
      computed: the number of computed tokens.
      happened: a count of each kind of happening.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.cache, self.options = scheduler, scheduler.cache, scheduler.options
        self.asks: dict[Request, Ask] = {}
        self.passed: collections.Counter[Request] = collections.Counter()
        self.over: list[Request] = []
        self.pins: list[list[int]] = [[] for _ in self.cache.groups]
        self.others = [row for row, seq in enumerate(self.cache.rows) if seq.length]
        self.computed = 0
        self.happened: collections.Counter[str] = collections.Counter()

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests."""
        return [request for request in self.scheduler.requests if request.stage == Stage.WAITING]

    @property
    def idle(self) -> bool:
        """Whether nothing waits and no row runs."""
        return not self.waiting and not any(self.scheduler.rows)

    def submit(self, *asks: Ask) -> list[Request | None]:
        """Submits a batch. Returns a request for each ask, or None if it was refused."""
        accepted = []
        for ask, (status, slot, generation) in zip(asks, self.scheduler.submit(asks), strict=True):
            self.happened[f"submit {status.name}"] += 1
            request = self.scheduler.requests[slot] if status == Status.OK else None
            if request:
                assert request.generation == generation and request not in self.asks
                self.asks[request] = ask
            accepted.append(request)
        return accepted

    def cancel(self, request: Request) -> bool:
        """Cancels a request. Returns False if it is too late."""
        is_open = self.scheduler.requests[request.slot] is request and not request.over
        status = self.scheduler.cancel(request.slot, request.generation)
        assert (status == Status.OK) == is_open
        return is_open

    def pin(self, rng: random.Random) -> None:
        """Pins the blocks of some cached text, or unpins all."""
        if self.pins[0]:
            for group in reversed(self.cache.groups):
                assert self.cache.unpin(self.pins[group.number], group.number).ok
                self.pins[group.number] = []
        elif self.cache.index:
            namespace, path = rng.choice(sorted(self.cache.index))
            ends = [*range(self.cache.block_size, len(path), self.cache.block_size), len(path)]
            for group in self.cache.groups:
                blocks = [group.index[namespace, path[:end]] for end in ends if (namespace, path[:end]) in group.index]
                assert self.cache.pin(blocks, group.number).ok
                self.pins[group.number] = blocks

    @property
    def bound(self) -> int:
        """The maximum number of steps for the accepted requests.

        Each step computes at least one token of the first running request. As many steps again are allowed for tokens
        computed twice, after a preemption or, seldom, a refusal of blocks.
        """
        return 2 * sum(ask.max_tokens for ask in self.asks.values()) + 2 * len(self.asks) + 2

    def finish(self) -> None:
        """Runs steps until nothing is left to do, and verifies the end."""
        bound = self.bound
        while not self.idle:
            self.step()
            bound -= 1
            assert bound > 0, "it does not come to an end"
        self.step()  # the last rows are released
        self.verify_end()

    def step(self) -> Report:
        """Runs a step, and verifies it."""
        scheduler, requests = self.scheduler, list(self.scheduler.requests)
        steps, parents = scheduler.steps, {request: request.parent for request in requests}
        before = [len(row.tokens) for row in self.cache.rows]
        report = scheduler.step()
        self._verify_passes(report, parents)
        self._verify_shape(report, scheduler.steps - steps)
        cached = {row: found for _, row, found in report.admitted}
        for row, request in enumerate(scheduler.rows):
            if request is None:
                assert (row in self.others) == (self.cache.rows[row].length > 0)
                continue
            forked = parents[request] is not None and request.parent is None
            start = cached.get(row, request.prompt if forked else before[row])
            self._verify_row(request, row, start, report)
        self._verify_blocks()
        self.over += scheduler.drain()
        for what in ("preempted", "mixed", "out_of_blocks"):
            self.happened[what] += bool(getattr(report, what))
        self.happened["forked"] += any(parent and not r.parent and r in scheduler.rows for r, parent in parents.items())
        self.happened["block of steps"] += report.n > 1 and not report.mixed
        self.happened["refused"] += report.n == 0
        return report

    def _verify_passes(self, report: Report, parents: dict[Request, Request | None]) -> None:
        """Requires no request to be passed over more often than max_deferrals allows."""
        assert not (report.preempted and report.admitted), "preempts and admits in one step"
        admitted = [self.scheduler.requests[slot] for slot, *_ in report.admitted]
        for number, first in enumerate(admitted, 1):
            later = admitted[number:]
            waiting = {*self.waiting, *later, *(r for r, parent in parents.items() if parent in later)}
            self.passed.update(request for request in waiting if request.arrival < first.arrival)
        assert all(self.passed[request] == request.passed for request in self.waiting)
        assert max(self.passed.values(), default=0) <= self.options.max_deferrals

    def _verify_shape(self, report: Report, steps: int) -> None:
        """Requires the limits of the options to hold, and each decode row to run."""
        options, chunks, decoded = self.options, report.chunks, report.decoded
        assert 0 <= report.n <= options.k
        self.computed += sum(chunks.values())
        if report.mixed:
            budget = options.chunk if options.budget is None else options.budget - len(self.cache.rows)
            assert steps == 1 and sum(chunks.values()) <= budget and len(chunks) <= options.chunk_rows
            assert max(chunks.values(), default=0) <= options.chunk
            assert all(len(tokens) == 1 for tokens in report.chosen.values()) and set(decoded) <= set(report.chosen)
            self.computed += len(decoded)
        else:
            assert not chunks and set(decoded) == set(report.chosen)
            assert steps == max((len(tokens) for tokens in report.chosen.values()), default=0) <= max(report.n, 1)
            self.computed += sum(len(tokens) for tokens in report.chosen.values())
        assert not (set(chunks) | set(report.out_of_blocks)) & set(decoded)
        for row, request in enumerate(self.scheduler.rows):
            marked = row in self.scheduler.out_of_blocks | self.scheduler.leads or self.scheduler.passed[row] > 0
            assert not marked or (request and (row in self.scheduler.prefilling() or request.over))

    def _verify_row(self, request: Request, row: int, start: int, report: Report) -> None:
        """Requires a row to write its request's tokens, as reported, and to choose only after all of them."""
        seq, chosen = self.cache.rows[row], report.chosen.get(row, [])
        written = len(seq.tokens)
        assert [token for token, _ in seq.tokens] == request.tokens[:written]
        if request.parent:
            assert not seq.length and not chosen
            return
        counted = report.chunks.get(row, 0) + (len(chosen) if row in report.decoded else 0)
        assert written - start == counted
        if chosen:
            assert request.tokens[-len(chosen) :] == chosen and written == request.num_tokens - 1 == seq.length
        elif request.stage == Stage.RUNNING:
            assert request.num_tokens > written

    def _verify_blocks(self) -> None:
        """Requires only rows and pins to hold blocks, and the counts to add up."""
        for group in self.cache.groups:
            held = collections.Counter(self.pins[group.number])
            for row in self.cache.rows:
                held.update(block for block in row.tables[group.number] if block != NO_BLOCK)
            assert held == {b: block.refcount for b, block in enumerate(group.blocks) if block.refcount}
            assert group.counts()["empty"] >= 0

    def verify_end(self) -> None:
        """Requires each request to end once, with the tokens which it has alone, and no block to be held."""
        assert collections.Counter(self.over) == collections.Counter(list(self.asks))
        for request, ask in self.asks.items():
            tokens, finish = alone(ask, self.scheduler.model)
            assert request.over and request.ended >= request.first_token and request.ended >= request.submitted
            if request.finish in (Finish.STOP, Finish.LENGTH):
                assert (request.tokens, request.finish) == (tokens, finish)
            else:
                assert request.tokens == tokens[: request.num_tokens]
        assert not any(row.length for number, row in enumerate(self.cache.rows) if number not in self.others)
