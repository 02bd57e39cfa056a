# SPDX-License-Identifier: Apache-2.0
"""The law of all wires for generations, whose listener writes the wires. They end in every possible way.

Windows, tiers, namespaces, failed moves, Ctrl-C, abandoned streams, and a listener that raises.
"""

import random
import warnings

import numpy as np
import pytest

import kvjax
from kvjax.events import Listeners, NodeMap
from kvjax.pools import host as host_pool
from kvjax.serving import GenerationInterrupted
from tests import drive
from tests.serving_kit import (
    HOST,
    MODEL,
    OPTIONS,
    WAYS,
    Calls,
    ctrl_c_acts,
    fail,
    make_spec,
    press,
    prompts_of,
    start,
    state_of,
)  # fmt: skip
from tests.wire_kit import all_wires, hurried

ENDS = {"length", "closed", "KeyboardInterrupt", "MemoryError", "failed moves", "behind"}
__all__ = ["ctrl_c_acts", "hurried"]
pytestmark = pytest.mark.long


def closed(cache, prompts, **options):
    """A stream that is read once."""
    stream = drive.stream(MODEL, cache, prompts, **OPTIONS, **options)
    progress = next(stream)
    stream.close()
    return progress.outputs, progress.cache, progress.events + progress.closing


class Runs:
    """Random generations over one cache, all with the same listener, which fails at some calls.

    Attributes:
      ended: the ways in which they ended.
    """

    def __init__(self, cache, names, monkeypatch, seed, moves, listener):
        self.cache, self.names, self.rng, self.ended = cache, names, random.Random(seed), set()
        self.listener, self.failing, self.count = listener, 0.0, 0
        self.calls, copy = Calls(monkeypatch), host_pool._copy

        def copy_or_fail(*args):
            return fail() if self.rng.random() < moves else copy(*args)

        monkeypatch.setattr(host_pool, "_copy", copy_or_fail)

    def listen(self, events):
        """Calls the listener; some calls fail before it, and some after it."""
        if self.rng.random() < self.failing:
            raise EOFError
        self.listener(events)
        if self.failing and self.rng.random() < 0.1:
            raise EOFError

    def run(self):
        """Runs one of them. In turn it is stopped, its listener fails at some calls or at all, and nothing happens."""
        rng, calls = self.rng, self.calls
        prompts = [prompt for number in rng.sample(range(3), 2) for prompt in prompts_of(number)]
        namespaces = [rng.randrange(len(self.names)) for _ in prompts]
        way = rng.choice([*WAYS, closed])
        pressed, self.failing = [(True, 0.0), (False, 0.5), (False, 0.0), (False, 1.0)][self.count % 4]
        calls.count, calls.at = 0, rng.randrange(1, 12) if pressed else 0
        calls.before, calls.after = [(press, None), (fail, None), (None, press)][self.count // 4 % 3]
        self.count += 1

        options = {"namespace": namespaces, "names": self.names, "listener": self.listen, "log_events": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outputs, self.cache, _ = way(self.cache, prompts, **options)
                self.ended.add("closed" if way is closed else outputs[0].finish)
            except GenerationInterrupted as error:
                self.cache = error.cache
                self.ended.add(type(error.__cause__).__name__)
        self.ended.update("failed moves" for _ in caught)
        self.failing, listeners = 0.0, Listeners(self.listen)
        self.ended.update(["behind"] if listeners.is_behind else [])
        if listeners.is_behind and rng.random() < 0.5:  # else the next generation gives it a snapshot
            listeners.catch_up(state_of(self.cache))
        return not listeners.is_behind


@pytest.mark.parametrize(("kind", "runs"), [("plain", 24), pytest.param("windows", 40, marks=pytest.mark.slow)])
def test_events_give_the_index_and_so_do_readers(kind, runs, monkeypatch):
    names, spec = kvjax.Namespaces(), make_spec(kind, host=HOST)
    names(salt="tenant a"), names(lora=3)
    nodes, mirror = NodeMap(spec), kvjax.events.Mirror()
    with all_wires(spec, names, buffer_batches=5) as wires:

        def listener(events):
            nonlocal mirror
            wires.publish(events)
            nodes.fold(events)
            mirror = kvjax.fold(kvjax.to_list(events), mirror)

        lives = Runs(start(kind, host=HOST), names, monkeypatch, 3, 0.1, listener)
        for number in range(runs):
            if not lives.run() and number < runs - 1:
                continue
            Listeners(lives.listen).catch_up(state_of(lives.cache))
            state = state_of(lives.cache)
            kvjax.check(state)
            assert np.count_nonzero(state.seqs.length) == 2  # the rows of no generation
            assert mirror.index == nodes.index == kvjax.events.index_of(state)
            if number == runs // 2:
                wires.join()
            if number % 4 == 3 or number == runs - 1:
                wires.agree(mirror)
        assert mirror.index and wires.lossy.lost and lives.ended >= ENDS
