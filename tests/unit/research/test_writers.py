# SPDX-License-Identifier: Apache-2.0
"""Written traces are read again; libCacheSim's layout by hand."""

import dataclasses
import os
import struct

import hypothesis
import numpy as np
import pytest

from kvjax.research import (
    make_trace,
    read_mooncake,
    write_libcachesim_csv,
    write_mooncake,
    write_oracle_general,
)
from tests.unit.research.cases import cut, forests, whole

SMALL = make_trace([500, 2600], [9, 8], [3, 0], [[5, 6, 7], [5, 8]], 4)


def equal(a, b):
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(trace=forests())
def test_mooncakes_lines_give_the_trace_back(tmp_path, trace):
    write_mooncake(trace, tmp_path / "trace")
    equal(read_mooncake(tmp_path / "trace", block_size=trace.block_size), trace)


@pytest.mark.parametrize("write", [write_mooncake, write_libcachesim_csv, write_oracle_general])
def test_written_traces_are_their_users_alone(tmp_path, write):
    before = os.umask(0)
    try:
        write(SMALL, tmp_path / "trace")
    finally:
        os.umask(before)
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_times_between_milliseconds_are_preserved(tmp_path):
    trace = dataclasses.replace(cut(20), time=np.arange(20) / 8)
    write_mooncake(trace, tmp_path / "trace")
    equal(read_mooncake(tmp_path / "trace"), trace)


def test_oracle_general_by_hand(tmp_path):
    write_oracle_general(SMALL, tmp_path / "trace")
    found = list(struct.iter_unpack("<IQIq", (tmp_path / "trace").read_bytes()))
    assert found == [(0, 2, 1, -1), (0, 1, 1, -1), (0, 0, 1, 4), (2, 3, 1, -1), (2, 0, 1, -1)]


def test_the_table_has_the_same_references(tmp_path):
    write_libcachesim_csv(SMALL, tmp_path / "trace")
    assert (
        tmp_path / "trace"
    ).read_text() == "time,object,size,next\n0,2,1,-1\n0,1,1,-1\n0,0,1,4\n2,3,1,-1\n2,0,1,-1\n"


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(trace=forests())
def test_next_accesses_are_the_next_ones(tmp_path, trace):
    write_oracle_general(trace, tmp_path / "trace")
    ids = [name for number in range(len(trace)) for name in trace.blocks(number)[::-1].tolist()]
    wanted = [ids.index(name, at + 1) if name in ids[at + 1 :] else -1 for at, name in enumerate(ids)]
    assert [row[3] for row in struct.iter_unpack("<IQIq", (tmp_path / "trace").read_bytes())] == wanted


@pytest.mark.slow
def test_libcachesim_reads_both(tmp_path):
    """The hit rates are of single blocks. Its Belady has the next accesses of oracleGeneral only."""
    libcachesim = pytest.importorskip("libcachesim")
    trace = whole()
    binary, table = str(tmp_path / "trace.oracleGeneral"), str(tmp_path / "trace.csv")
    write_oracle_general(trace, binary)
    write_libcachesim_csv(trace, table)
    columns = libcachesim.ReaderInitParam()
    columns.time_field, columns.obj_id_field, columns.obj_size_field, columns.next_access_vtime_field = 1, 2, 3, 4
    columns.has_header, columns.delimiter, columns.obj_id_is_num = True, ",", True

    def rate(policy, size, path=binary, **how):
        kind = "ORACLE_GENERAL_TRACE" if path == binary else "CSV_TRACE"
        reader = libcachesim.TraceReader(path, getattr(libcachesim.TraceType, kind), **how)
        assert reader.get_num_of_req() == len(trace.ids)
        return round(1 - getattr(libcachesim, policy)(size).process_trace(reader)[0], 4)

    assert rate("LRU", 10_000) == rate("LRU", 10_000, table, reader_init_params=columns) == 0.2111
    assert rate("ARC", 10_000) == 0.2225 and rate("GDSF", 10_000) == 0.2169
    assert rate("Belady", 1000) == 0.1906 and rate("Belady", 10_000) == 0.3664
