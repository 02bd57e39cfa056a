# SPDX-License-Identifier: Apache-2.0
"""What is written is read again; libCacheSim's layout by hand."""

import dataclasses
import struct

import hypothesis
import numpy as np

from kvjax.research import (
    make_trace,
    read_mooncake,
    write_libcachesim_csv,
    write_mooncake,
    write_oracle_general,
)
from tests.unit.research.cases import cut, forests

SMALL = make_trace([500, 2600], [9, 8], [3, 0], [[5, 6, 7], [5, 8]], 4)


def equal(a, b):
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(trace=forests())
def test_mooncakes_lines_give_the_trace_back(tmp_path, trace):
    write_mooncake(trace, tmp_path / "trace")
    equal(read_mooncake(tmp_path / "trace", block_size=trace.block_size), trace)


def test_times_between_milliseconds_are_kept(tmp_path):
    trace = dataclasses.replace(cut(20), time=np.arange(20) / 8)
    write_mooncake(trace, tmp_path / "trace")
    equal(read_mooncake(tmp_path / "trace"), trace)


def test_oracle_general_by_hand(tmp_path):
    write_oracle_general(SMALL, tmp_path / "trace")
    found = list(struct.iter_unpack("<IQIq", (tmp_path / "trace").read_bytes()))
    assert found == [(0, 0, 1, 3), (0, 1, 1, -1), (0, 2, 1, -1), (2, 0, 1, -1), (2, 3, 1, -1)]


def test_the_table_has_the_same_references(tmp_path):
    write_libcachesim_csv(SMALL, tmp_path / "trace")
    assert (
        tmp_path / "trace"
    ).read_text() == "time,object,size,next\n0,0,1,3\n0,1,1,-1\n0,2,1,-1\n2,0,1,-1\n2,3,1,-1\n"


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(trace=forests())
def test_next_accesses_are_the_next_ones(tmp_path, trace):
    write_oracle_general(trace, tmp_path / "trace")
    ids = trace.ids.tolist()
    wanted = [ids.index(name, at + 1) if name in ids[at + 1 :] else -1 for at, name in enumerate(ids)]
    assert [row[3] for row in struct.iter_unpack("<IQIq", (tmp_path / "trace").read_bytes())] == wanted
