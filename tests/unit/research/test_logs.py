# SPDX-License-Identifier: Apache-2.0
"""Logs of events as traces: by hand, and of a cache with known requests."""

import io
import json

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

import kvjax
from kvjax.interop.log import Log
from kvjax.interop.vllm import Encoder
from kvjax.research import read_events, read_trace
from kvjax.research.traces import event_log
from tests.drive import PLAIN, Driver
from tests.unit.research.cases import BAILIAN, MOONCAKE, jsonl, prompts_of, text


def stored(hashes, parent, size=2, **more):
    tokens = list(range(size * len(hashes)))
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": size} | more  # fmt: skip


def batch(time, *events):
    return {"ts": time, "events": list(events), "data_parallel_rank": 0}


VLLM = [
    batch(10.0, stored(["a", "b"], None)),
    batch(10.5, stored(["c"], "b")),  # the same request continues
    batch(30.0, stored(["d", "e"], "a"), stored(["f"], None)),
    batch(40.0, stored(["g"], "c")),  # after a pause it counts as another request
    batch(41.0, {"type": "BlockRemoved", "block_hashes": ["e", "f"]}, stored(["x"], None, medium="CPU")),
    batch(42.0, stored(["e"], "d"), stored(["y"], None, size=8, group_idx=1)),  # stored again: the same id
    batch(43.0, {"type": "AllBlocksCleared"}, stored(["h"], "g")),
]
IDS = [[0, 1, 2], [0, 3, 4], [5], [0, 1, 2, 6], [0, 3, 4], [7]]


def test_vllms_batches_by_hand(tmp_path):
    trace = read_events(jsonl(tmp_path / "log", VLLM))
    assert prompts_of(trace) == IDS and trace.block_size == 2
    assert trace.time.tolist() == [0, 20_000, 20_000, 30_000, 32_000, 33_000]
    assert trace.input_length.tolist() == [6, 6, 2, 8, 6, 2] and not trace.output_length.any()
    assert "Prompts without new blocks stored nothing and are missing" in trace.notes[1]
    assert trace.notes[2:] == (
        "1 blocks followed blocks that the log lacks: prompts begin there.",
        "2 blocks were removed, which a trace cannot express.",
    )
    assert len(read_trace(tmp_path / "log", pause_ms=0.0)) == len(trace) + 1


def test_arrays_are_read_too(tmp_path):
    rows = []
    for number, row in enumerate(VLLM):
        events = [
            [event["type"], *(value for name, value in event.items() if name != "type")] for event in row["events"]
        ]
        if number == 4:
            events[1] = [*events[1][:-1], None, "CPU"]  # after the adapter's number
        if number == 5:
            events[1] = [*events[1][:-1], None, "GPU", None, None, 1]
        rows.append([row["ts"], events, 0])
    assert prompts_of(read_trace(jsonl(tmp_path / "log", rows))) == IDS


def test_events_that_say_no_tokens_of_their_blocks_are_skipped(tmp_path):
    """vLLM's offloading connector leaves tokens out, and a group of Mamba layers hashes some of its blocks."""
    odd = [stored(["z"], None) | change for change in ({"token_ids": [], "block_size": 0}, {"token_ids": [1] * 6})]
    trace = read_events(jsonl(tmp_path / "log", [*VLLM[:3], batch(31.0, *odd), *VLLM[3:]]))
    assert prompts_of(trace) == IDS
    assert "2 events of stored blocks did not tell the tokens of each, and were skipped." in trace.notes


def test_a_log_cannot_make_more_ids_than_a_trace_may_have(tmp_path, monkeypatch):
    """Each request has all blocks before its own, so that n lines make up to n * n / 2 ids."""
    monkeypatch.setattr(event_log, "_MAX_BLOCKS", 1000)
    rows = [batch(10.0 * n, stored([n], n - 1 if n else None)) for n in range(100)]
    with pytest.raises(ValueError, match=r"log:45: got 1035 blocks up to this request, wanted at most 1000"):
        read_events(jsonl(tmp_path / "log", rows))
    assert len(read_events(jsonl(tmp_path / "log", rows[:40]))) == 40


def kvjax_log(time, *events, queried=0, cached=0):
    return {"ts": time, "events": list(events), "queried": queried, "cached": cached}


def event(kind, block, generation=0, group=0, **more):
    level = {"level": 0} if kind == "stored" else {}
    return {"kind": kind, "group": group, "block": block, "generation": generation} | level | more


def test_kvjaxs_lines_by_hand(tmp_path):
    """Blocks cached before the log begins make no request. Equal contents in other blocks have the same id."""
    root = {"parent": None, "namespace": 0, "priority": -1}
    rows = [
        kvjax_log(1.0, {"kind": "created", "group": 0}, event("stored", 4, tokens=[1, 2], **root)),
        kvjax_log(2.0, event("stored", 5, parent=(4, 0), tokens=[3, 4]), queried=5, cached=2),
        kvjax_log(2.0, event("stored", 6, parent=(5, 0), tokens=[5])),
        kvjax_log(9.0, event("removed", 6), event("removed", 5), event("stored", 7, tokens=[1, 2], group=1, **root)),
        kvjax_log(10.0, event("stored", 8, 3, parent=(4, 0), tokens=[3, 4]), queried=4, cached=2),
        kvjax_log(11.0, event("stored", 9, tokens=[1, 2], **(root | {"namespace": 1}))),
        kvjax_log(12.0, event("stored", 3, parent=(2, 0), tokens=[1, 2])),
        kvjax_log(13.0, {"kind": "cleared", "group": 0}, event("stored", 1, 9, parent=(4, 0), tokens=[3, 4])),
    ]
    trace = read_events(jsonl(tmp_path / "log", rows))
    assert prompts_of(trace) == [[0, 1, 2], [0, 1], [3], [4], [5]] and trace.block_size == 2
    assert trace.input_length.tolist() == [5, 4, 2, 2, 2]
    assert trace.time.tolist() == [0, 8000, 9000, 10_000, 11_000]
    assert trace.notes[2:] == (
        "The log counts 9 prompt tokens looked up and 4 found; the requests here have 15.",
        "2 blocks followed blocks that the log lacks: prompts begin there.",
        "2 blocks were removed, which a trace cannot express.",
    )


def test_a_caches_own_log_and_its_wire_give_the_requests(tmp_path):
    """Of three prompts the second shares one block of 4 tokens with the first, and the third only hits."""
    cache = Driver(kvjax.init(PLAIN))
    file, payloads = io.StringIO(), []
    log, encoder, follow_events = Log(file, clock=lambda: 0.0), Encoder(PLAIN), cache.follow

    def follow(events):
        follow_events(events)
        log.write(events)
        payloads.extend(encoder.encode(events, 0.0))

    cache.follow = follow
    for seq, tokens in enumerate(([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5])):
        cache.start(seq, tokens)
        cache.do("release", seq)
    own = read_events(text(tmp_path / "own", file.getvalue()))
    assert prompts_of(own) == [[0, 1, 2], [0, 3, 4]] and own.input_length.tolist() == [9, 9]  # with their last tokens
    lines = "\n".join(json.dumps(msgspec.msgpack.decode(payload), default=bytes.hex) for payload in payloads)
    wire = read_events(text(tmp_path / "wire", lines))
    assert prompts_of(wire) == [[0, 1], [0, 2]] and wire.block_size == PLAIN.block_size


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (batch(1.0, {"type": "BlockMoved", "block_hashes": []}), "got an event 'BlockMoved'"),
        (batch(1.0, stored(["q"], None, size=4)), "block_size: got 4, wanted 2"),
        (batch(1.0, stored(["q"], None) | {"token_ids": [1]}), "token_ids: got 1, wanted 2 for each of 1"),
        (batch(1.0, {"type": "BlockStored"}), "wanted a batch of events: KeyError"),
        (batch(1.0, 3), "wanted a batch of events"),
        (batch("x"), "ts: got 'x'"),
        ({"ts": 50.0}, "events: got no such field"),
        ([50.0], "wanted a batch of events: IndexError"),
        (batch(1.0, stored(["q"], None)), "time: got"),
        (kvjax_log(50.0, event("stored", 1, parent=None)), "tokens: got no such field"),
        (kvjax_log(50.0, event("stored", 1, parent=None, tokens=["a"], namespace=0)), "tokens: got"),
        (kvjax_log(50.0, 3), "events: got 3, wanted an event"),
    ],
)
def test_a_line_that_is_none_is_refused_with_its_number(tmp_path, row, message):
    path = jsonl(tmp_path / "log", [*VLLM, row])
    with pytest.raises(ValueError, match=rf"log:8: .*{message}"):
        read_events(path)


def test_a_log_without_stored_blocks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got no stored blocks"):
        read_events(jsonl(tmp_path / "log", [batch(1.0)]))


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_any_text_is_read_or_refused(tmp_path, data):
    """Random combinations of pieces of valid lines."""
    rows = [*VLLM, kvjax_log(50.0, event("stored", 1, parent=None, tokens=[1], namespace=0)), *MOONCAKE, *BAILIAN]
    line = json.dumps(data.draw(st.sampled_from(rows)))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(line))] * 2)))
    found = line[:start] + data.draw(st.sampled_from(["", "null", "[]", "{}", "-1", '"a"', "1e999"])) + line[end:]
    path, refused = text(tmp_path / "log", json.dumps(data.draw(st.sampled_from(rows))) + "\n" + found + "\n"), ""
    try:
        read_trace(path)
    except ValueError as error:
        refused = str(error)
    assert not refused or str(path) in refused
