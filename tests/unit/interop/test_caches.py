# SPDX-License-Identifier: Apache-2.0
"""The law of all wires for real caches: windows, tiers, namespaces, partial blocks, failed moves."""

import contextlib

import hypothesis
import pytest

import kvjax
from kvjax.testing import Trial, requests
from tests.drive import EXTRA, TIERS
from tests.oracle import bytes_machine
from tests.oracle.bytes_machine import CONFIGS
from tests.unit.interop.forest import Lines, named, projected
from tests.wire_kit import Lossy, Reader, agent, agrees, hurried, publisher, subscriber

__all__ = ["hurried"]  # peers need not wait in these tests either
STEPS = {"fast host": 400, "fast windows": 400, "windows, host, int8": 300, "windows alone, host": 300}


def given_out(tenants, versions=1):
    """Names of the namespaces of tenants, of which the first has no salt, under each version of the weights."""
    names = kvjax.Namespaces()
    for version in range(versions):
        for tenant in range(tenants):
            names(f"tenant {tenant}" if tenant else None, weights=version or None)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_it_holds_under_histories_whose_bytes_are_compared(name, monkeypatch):
    """One reader reads from the beginning, one loses messages, one joins in the middle. At last the cache is attached.

    An agent serves the same events to a reader of the first group, and to others that request all groups.
    """
    names = given_out(bytes_machine.TENANTS, bytes_machine.VERSIONS)
    with contextlib.ExitStack() as stack:
        config = CONFIGS[name]
        extra = {"extra_name": "image {}".format} if config.spec().extra_ids else {}
        options = {"names": names, "buffer_batches": 20, **extra}
        source = stack.enter_context(publisher(config.spec(), **options))
        subs = [stack.enter_context(subscriber(source, replay_timeout=1.0)) for _ in range(2)]
        served = stack.enter_context(agent(config.spec(), names=names))
        every = range(int(config.spec().bare), len(config.spec().groups))
        readers = [stack.enter_context(Reader(served.address, groups)) for groups in ((), every)]
        lines = Lines(config.spec(), names)
        lossy, follow_events, steps = Lossy(subs[1], 1), bytes_machine.Life.follow, iter(range(10**9))

        def follow(life, events):
            source.publish(events)
            served.publish(events)
            lines.follow(events)
            found = follow_events(life, events)
            step = next(steps)
            if step == STEPS[name] // 2:
                subs.append(stack.enter_context(subscriber(source, replay_timeout=1.0)))
                readers.append(stack.enter_context(Reader(served.address, every)))
            if step % 40 == 39:
                wanted = projected(life.mirror, life.spec, names, **extra)
                assert all(agrees(sub, wanted) for sub in subs) and lines.agrees(life.mirror)
                assert readers[0].agrees(named(life.mirror, life.spec, names))
                wanted = named(life.mirror, life.spec, names, groups=every)
                assert all(reader.agrees(wanted) for reader in readers[1:])
            return found

        monkeypatch.setattr(bytes_machine.Life, "follow", follow)
        life = bytes_machine.live(config, seed=5, steps=STEPS[name])
        wanted = projected(life.mirror, life.spec, names, **extra)
        assert lossy.lost and all(agrees(sub, wanted) for sub in subs) and lines.agrees(life.mirror)
        assert life.tally["removed"] and (life.tally["failed"] or not life.has_host)
        source.attach(life.state)
        lines.mirror.follow(lines.writer.attach(life.state))
        assert all(agrees(sub, wanted) for sub in subs) and lines.agrees(life.mirror)
        served.attach(life.state)
        index = kvjax.fold(kvjax.events.snapshot(life.state))
        assert readers[0].agrees(named(index, life.spec, names)) and readers[0].parents  # it got some
        assert all(reader.agrees(named(index, life.spec, names, groups=every)) for reader in readers[1:])


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(requests(TIERS, num_namespaces=3, max_size=60))
def test_it_holds_over_windows_and_tiers(history):
    assert_law(TIERS, history)


@pytest.mark.slow
@hypothesis.given(requests(EXTRA, num_namespaces=3, max_size=60))
def test_it_holds_with_extra_ids(history):
    assert_law(EXTRA, history, extra_name="image {}".format)


def assert_law(spec, history, **extra):
    names, trial = given_out(3), Trial(kvjax.init(spec))
    lines, every = Lines(spec, names), range(int(spec.bare), len(spec.groups))
    with (
        publisher(spec, names=names, **extra) as source, subscriber(source) as sub, agent(spec, names=names) as served,
        Reader(served.address, every) as reader,
    ):  # fmt: skip
        for request in history:
            events = trial.do(request)
            if events is not None:
                source.publish(events)
                served.publish(events)
                lines.follow(events)
        assert agrees(sub, projected(trial.mirror, spec, names, **extra)) and lines.agrees(trial.mirror)
        assert reader.agrees(named(trial.mirror, spec, names, groups=every))
