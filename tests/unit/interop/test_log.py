# SPDX-License-Identifier: Apache-2.0
"""Lines of a log by hand, and the index that they give. Reports of logs: `tests/unit/research/test_log_report.py`."""

import io
import json

import numpy as np
import pytest

import kvjax
from kvjax.interop.log import Log, entry
from tests.unit.debug import stories
from tests.unit.interop.forest import Forest, arrays_of, spec_of
from tests.wire_kit import removed, stored

A = stored(1, 1, 0, [1, 2, 3, 4])


def test_lines_by_hand():
    file, times, spec = io.StringIO(), iter((5.0, 6.5, 8.0)), spec_of("plain")
    log = Log(file, clock=lambda: next(times))
    log.write(arrays_of([], spec).replace(queried=np.array([5, 2], np.int32), cached=np.array([4, 0], np.int32)))
    log.write(arrays_of([A, removed(1, 1)], spec, log=True).replace(queried=np.int32(3)))
    a = '{"kind": "stored", "group": 0, "block": 1, "generation": 1, "parent": null, "namespace": 0, '
    a += '"tokens": [1, 2, 3, 4], "level": 0, "priority": 35}'
    gone = '{"kind": "removed", "group": 0, "block": 1, "generation": 1}'
    assert file.getvalue().splitlines() == [
        '{"ts": 5.0, "events": [], "queried": 7, "cached": 4}',
        f'{{"ts": 6.5, "events": [{a}, {gone}], "queried": 3, "cached": 0}}',
    ]
    with pytest.raises(ValueError, match=r"^events: got list, wanted Events or an EventLog"):
        log.write([A])
    assert entry(arrays_of([A], spec))["ts"] > 1e9


def test_what_is_in_the_file_gives_the_index():
    spec = spec_of("windows")
    forest, file = Forest(spec, 1), io.StringIO()
    log = Log(file)
    for at in range(6):
        log.write(arrays_of(forest.draw(12), spec, log=at % 2 == 0))
    events = [event for text in file.getvalue().splitlines() for event in json.loads(text)["events"]]
    assert kvjax.fold(events).index == forest.mirror.index != {}


def test_a_log_is_attached_to_a_cache():
    file = io.StringIO()
    Log(file).attach(stories.plain().state)
    [text] = file.getvalue().splitlines()
    assert kvjax.fold(json.loads(text)["events"]).index == kvjax.events.index_of(stories.plain().state) != {}
