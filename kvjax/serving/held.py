# SPDX-License-Identifier: Apache-2.0
"""The cache of a generation, with its events, its clock and the release of its rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from kvjax._arrays import alive
from kvjax._checks import check_alive, check_functions
from kvjax._compile import OutermostJit
from kvjax.cache import Cache
from kvjax.events.log import EventLog
from kvjax.events.mirror import to_list
from kvjax.events.records import Events
from kvjax.processes import agreed_time
from kvjax.serving.interrupt import CtrlC, GenerationInterrupted
from kvjax.serving.output import Output
from kvjax.tiered import FailedTransfer, TieredCache
from kvjax.verbs.release import release

_let_go = OutermostJit(release)
Listener = Callable[[Events | EventLog], object]


class Held[C: (Cache, TieredCache)]:
    """The cache of a generation.

    Between two jitted calls `cache` and `host` are what the last one returned. A Ctrl-C at any other time waits
    (`ctrl_c`), so that none comes between a call that takes the cache and the assignment of the cache it returns.

    Attributes:
      unheard: events that neither `events` nor the listener has got yet; none is lost with the call that made them.
    """

    def __init__(self, cache: C, clock: Callable[[], int] | None, log_events: bool, listener: Listener | None):
        self.host = cache.host if isinstance(cache, TieredCache) else None
        self.cache: Cache = cache.cache if isinstance(cache, TieredCache) else cache
        check_alive(self.cache, self.host)
        self.spec = self.cache.state.spec
        self.own = np.asarray(self.cache.state.seqs.length) == 0  # rows that this generation may use
        self.clock, self.time = clock, np.int32(0)
        self.log_events, self.listener = log_events, listener
        check_functions(clock=clock, listener=listener)
        if clock is not None:
            _reading(clock)  # before anything is donated
        self.events: list[dict[str, Any]] = []
        self.unheard: list[Events | EventLog] = []
        self.outputs: list[Output] = []
        self.ctrl_c = CtrlC()

    @property
    def result(self) -> C:
        """The cache as it is now, of the kind that was given."""
        return cast(C, self.cache if self.host is None else TieredCache(self.cache, self.host))

    def _next(self) -> np.int32:
        """Between two jitted calls: acts on Ctrl-C, and reads the clock for the next one."""
        self.ctrl_c.act()
        if self.clock is not None:
            self.time = np.int32(agreed_time(self.cache.state, _reading(self.clock)))
        return self.time

    def hear(self, *events: Events | EventLog, but: int = 0) -> None:
        """Passes events on, in their order, all but the last ones; behind a listener that raises the others stay."""
        self.unheard += events
        while len(self.unheard) > but:
            if self.log_events:
                self.events += to_list(self.unheard[0])
            heard = self.unheard.pop(0)
            if self.listener is not None:
                self.listener(heard)

    def _tiered(self, verb: Callable[..., Any], *args: Any, **options: Any) -> tuple[Events, list[int]]:
        """Calls a verb that moves blocks; returns the events and the rows that failed moves cost K/V, with a warning.

        These rows are released: their prompts wait, and find less in the cache the next time.
        """
        lost, removed, failed = [], [], None
        try:
            tiered, events = verb(self.result, *args, now=self._next(), **options)
        except FailedTransfer as failure:
            tiered, events, lost = failure.tiered, failure.events, failure.lost
            removed, failed = [failure.removed], str(failure)
        self.cache, self.host = tiered.cache, tiered.host
        self.hear(events, *removed)
        if failed is not None:  # last, since a warning may be made an error
            warnings.warn(f"what was lost is computed again: {failed}", RuntimeWarning, stacklevel=2)
        return events, lost

    def _empty_blocks(self, wanted: Callable[[], tuple[int, int]]) -> None:
        """Offloads blocks until as many are empty in each group with a host tier as wanted: a loop evicts.

        Fewer, where the host has too little room. `wanted` gives how many, and how many it ever gives.
        """
        for number, spec in enumerate(self.spec.groups):
            if self.host is None or not spec.num_host_blocks:
                continue
            need, most = (min(blocks, spec.num_blocks) for blocks in wanted())
            while (empty := int(self.cache.state.groups[number].num_empty)) < need:
                events, _ = self._tiered(TieredCache.watermark, need, most=most, group=number)
                need = empty if events.ok else (empty + need) // 2

    def interrupted(self, cause: BaseException) -> GenerationInterrupted:
        """The error that has the cache as `cause` leaves it."""
        cache, how = None, "the call that it had been donated to did not return: there is no cache"
        if alive((self.cache, self.host)):
            try:
                jax.block_until_ready((self.cache, self.host))  # shows a call that died on the device
                cache = self.result
                self._let_go()
                cache, how = self.result, "go on with this error's `cache`"
            except Exception as error:
                how = f"{'there is no cache' if cache is None else 'its rows are not released'}: {error}"
            for _ in self.unheard[:]:
                try:
                    self.hear()
                except BaseException as error:  # the generation ends already, by `cause`
                    how += f"; at its last events the listener raised {_named(error)}"
        return GenerationInterrupted(f"interrupted by {_named(cause)}; {how}", cache, self.outputs, self.events)

    def _let_go(self) -> None:
        """Releases all rows of this generation, at any point of it; the events are still to be heard.

        Donates nothing, so nothing can be lost here. The time is the last reading of the clock, since the clock may
        have failed.
        """
        state = self.cache.state
        rows = self.own & (np.asarray(state.seqs.length) > 0)
        if rows.any():
            seqs = np.where(rows, np.arange(rows.size, dtype=np.int32), -1)
            state, events = _let_go(state, seqs, now=self.time)
            self.cache = Cache(state, self.cache.pools)
            self.unheard.append(events)


def _reading(clock: Callable[[], int]) -> int:
    """A clock's reading as i32. Only differences of readings count, so they may be of any size."""
    reading = clock()
    if not isinstance(reading, int | np.integer) or isinstance(reading, bool):
        raise ValueError(f"clock: got {reading!r:.80}, wanted an int of milliseconds")
    return int(np.uint32(int(reading) & 0xFFFFFFFF).view(np.int32))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
