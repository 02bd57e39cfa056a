# SPDX-License-Identifier: Apache-2.0
"""The law of all wires for real caches: windows, tiers, namespaces, partial blocks, failed moves."""

import hypothesis
import hypothesis.strategies as st
import pytest

import kvjax
from kvjax.testing import Trial, requests
from tests.drive import EXTRA, TIERS
from tests.oracle import bytes_machine
from tests.oracle.bytes_machine import CONFIGS
from tests.wire_kit import all_wires, hurried

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
    """Readers join in the middle. At last the cache is attached."""
    config = CONFIGS[name]
    names = given_out(bytes_machine.TENANTS, bytes_machine.VERSIONS)
    extra_name = "image {}".format if config.spec().extra_ids else None
    with all_wires(config.spec(), names, extra_name=extra_name, buffer_batches=20) as wires:
        follow_events, steps = bytes_machine.Life.follow, iter(range(10**9))

        def follow(life, events):
            wires.publish(events)
            found = follow_events(life, events)
            step = next(steps)
            if step == STEPS[name] // 2:
                wires.join()
            if step % 40 == 39:
                wires.agree(life.mirror)
            return found

        monkeypatch.setattr(bytes_machine.Life, "follow", follow)
        life = bytes_machine.live(config, seed=5, steps=STEPS[name])
        wires.agree(life.mirror)
        assert wires.lossy.lost and life.tally["removed"] and (life.tally["failed"] or not life.has_host)
        wires.attach(life.state)
        wires.agree(kvjax.fold(kvjax.events.snapshot(life.state)))
        assert wires.readers[0][0].parents  # it got some


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(st.data())
@pytest.mark.parametrize(("spec", "extra"), [(TIERS, {}), (EXTRA, {"extra_name": "image {}".format})])
def test_it_holds_over_windows_and_tiers_and_with_extra_ids(spec, extra, data):
    names, trial = given_out(3), Trial(kvjax.init(spec))
    with all_wires(spec, names, **extra) as wires:
        for request in data.draw(requests(spec, num_namespaces=3, max_size=60)):
            events = trial.do(request)
            if events is not None:
                wires.publish(events)
        wires.agree(trial.mirror)
