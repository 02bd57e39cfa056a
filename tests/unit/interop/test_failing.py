# SPDX-License-Identifier: Apache-2.0
"""Consumers of events that fail at random calls: what each then has is the cache's index, and nobody else notices."""

import errno
import io
import json
import logging
import random

import numpy as np
import pytest

import kvjax
from kvjax.events import Listeners, NodeMap
from kvjax.events.host_events import arrays
from kvjax.interop import combine_listeners, trtllm
from kvjax.interop.log import Log
from kvjax.research import log_report
from tests.drive import EXTRA, PLAIN, TIERS, Driver
from tests.unit.interop.forest import projected, written
from tests.wire_kit import agrees, all_wires, hurried, publisher, subscriber

__all__ = ["hurried"]


class Published(Driver):
    """A cache whose events listeners get; `catch_up` gives them a snapshot."""

    def __init__(self, spec, *listeners):
        super().__init__(kvjax.init(spec))
        self.listeners = combine_listeners(spec, *listeners)

    def follow(self, events):
        super().follow(events)
        self.listeners(events)

    def live(self, rng, steps):
        """Prompts of few tokens come and go."""
        for _ in range(steps):
            row = rng.randrange(self.state.spec.max_seqs)
            if self.state.seqs.length[row]:
                self.do("release", row)
            text = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            if self.admit(row, text) == ["OK"]:
                self.write({row: text[int(self.state.seqs.committed[row]) :]})

    @property
    def index(self):
        return kvjax.events.index_of(self.state)


class Unkind:
    """Calls a consumer of events; some calls fail before it, and some after it.

    Attributes:
      fails: how it fails; "" for not.
    """

    def __init__(self, consume, rng):
        self.consume, self.rng, self.fails = consume, rng, "random"

    def listen(self, events):
        before, after = (self.fails and self.rng.random() < 0.2 for _ in range(2))
        if before or self.fails == "ever":
            raise ConnectionError("away")
        self.consume(events)
        if after:
            raise ConnectionError("away")


class Mirrored:
    """The index by `fold`."""

    def __init__(self):
        self.mirror = kvjax.events.Mirror()

    def fold(self, events):
        self.mirror = kvjax.fold(kvjax.to_list(arrays(events)), self.mirror)


class FullDisk(io.StringIO):
    """A file that takes a part of some texts, and then has no space."""

    def __init__(self, rng):
        super().__init__()
        self.rng, self.is_full = rng, False

    def write(self, text):
        if self.is_full or self.rng.random() < 0.1:
            super().write(text[: self.rng.randrange(len(text))])
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(text)


@pytest.mark.long
@pytest.mark.parametrize("spec", [PLAIN, pytest.param(TIERS, marks=pytest.mark.slow)], ids=["plain", "tiers"])
def test_what_each_consumer_has_in_the_end_is_the_index(spec):
    rng, names = random.Random(2), kvjax.Namespaces()
    mirrored, nodes, kind = Mirrored(), NodeMap(spec), NodeMap(spec)
    with all_wires(spec, names) as wires:
        unkind = [Unkind(consume, rng) for consume in (mirrored.fold, nodes.fold, *wires.listeners)]
        driver = Published(spec, *(one.listen for one in unkind), kind.fold)
        for _ in range(4):
            driver.live(rng, 8)
            assert kind.index == driver.index
            while driver.listeners.is_behind:
                driver.listeners.catch_up(driver.state)
            assert mirrored.mirror.index == nodes.index == driver.index
            wires.agree(driver.mirror)
    counts = driver.listeners.counts
    assert counts["failures"] > counts["snapshots"] > 5 and counts["missed"]


def test_files_on_a_disk_that_is_full_at_times_tell_the_whole_in_the_end():
    rng, names = random.Random(3), kvjax.Namespaces()
    files = [FullDisk(rng) for _ in range(2)]
    writer = trtllm.Writer(PLAIN, files[1], names=names)
    driver = Published(PLAIN, Log(files[0]).write, writer.write)
    for _ in range(5):
        driver.live(rng, 8)
        while driver.listeners.is_behind:
            driver.listeners.catch_up(driver.state)
    mirror, follower = kvjax.events.Mirror(), trtllm.Mirror()
    follower.follow(filter(None, files[1].getvalue().splitlines()))
    assert follower.index == written(driver.mirror, PLAIN, names) and follower.complete
    lines, whole = files[0].getvalue().splitlines(), []
    for line in filter(None, lines):
        try:
            whole.append(json.loads(line)["events"])
        except ValueError:
            whole = []  # a line that was cut, after which a snapshot comes
    for events in whole:
        mirror = kvjax.fold(events, mirror)
    assert mirror.index == driver.index
    assert log_report(lines).refused and log_report(lines).blocks[-1][0] == len(mirror.nodes)


def test_a_listener_that_raises_keeps_no_events_from_the_others(caplog):
    """Its own map shares no more, and keeps what it has until it gets a snapshot."""
    failing, maps = Unkind(None, random.Random(0)), [NodeMap(PLAIN) for _ in range(2)]
    failing.nodes = NodeMap(PLAIN)
    failing.consume = failing.nodes.fold
    driver = Published(PLAIN, maps[0].fold, failing.listen, maps[1].fold)
    failing.fails = ""
    driver.start(0, range(9))
    assert maps[0].groups is maps[1].groups is failing.nodes.groups
    failing.fails = "ever"
    with caplog.at_level(logging.INFO, logger="kvjax"):
        driver.do("release", 0)
        driver.start(1, range(20, 29))
        assert maps[0].groups is maps[1].groups is not failing.nodes.groups
        assert maps[0].index == driver.index != failing.nodes.index
        driver.listeners.catch_up(driver.state)
        failing.fails = ""
        assert driver.listeners.is_behind
        driver.listeners.catch_up(driver.state)
    assert failing.nodes.index == driver.index
    assert driver.listeners.counts == Listeners(failing.listen).counts == {"failures": 2, "missed": 2, "snapshots": 1}
    first, second, third = caplog.records
    assert first.levelname == second.levelname == "ERROR" and "ConnectionError: away" in first.getMessage()
    assert first.exc_info and not second.exc_info and "works again" in third.getMessage()


@pytest.mark.long
def test_a_name_that_is_no_text_ends_no_wire_for_good():
    """The publisher's thread finds it."""
    extra_names, spec, names = ["image {}".format], EXTRA, kvjax.Namespaces()
    with publisher(spec, extra_name=lambda number: extra_names[-1](number)) as source, subscriber(source) as sub:
        driver = Published(spec, source.publish)
        driver.start(0, range(9))
        extra_names.append(lambda number: None)
        assert driver.admit(1, range(20, 29), extra_ids=np.full(spec.max_length + 1, 5, np.int32)) == ["OK"]
        driver.write({1: range(20, 29)}, extra_ids=np.full((spec.max_seqs, spec.max_length), 5, np.int32))
        assert sub.wait(lambda one: one.complete and not one.index, 20.0)
        driver.do("release", 1)
        assert driver.listeners.is_behind
        extra_names.pop()
        driver.listeners.catch_up(driver.state)
        assert agrees(sub, projected(driver.mirror, spec, names, extra_name="image {}".format))
        assert source.counts["ignored"] == 1
