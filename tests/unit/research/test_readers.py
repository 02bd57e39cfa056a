# SPDX-License-Identifier: Apache-2.0
"""Readers of published traces, on files written by hand."""

import json
import os

import numpy as np
import pytest

from kvjax.research import Sessions, read_azure, read_bailian, read_burst, read_mooncake, read_trace
from tests.unit.research.cases import BAILIAN, MOONCAKE, jsonl, prompts_of, text

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.6805900,374,44
2023-11-17 00:00:00.9951690,400,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,480,0,480,API log
"""
SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,9,1.5,ChatGPT,40,8,48,Conversation log
6,,1.5,ChatGPT,40,8,48,API log
7,9,1.5,ChatGPT,80,8,88,Conversation log
8,,1.5,ChatGPT,80,8,88,API log
"""


def test_mooncake_by_hand(tmp_path):
    trace = read_mooncake(jsonl(tmp_path / "trace", MOONCAKE))
    assert trace.time.tolist() == [0, 3000] and trace.block_size == 512
    assert trace.input_length.tolist() == [1000, 1300] and trace.output_length.tolist() == [5, 0]
    assert prompts_of(trace) == [[0, 1], [0, 1, 2]] and trace.parent.tolist() == [-1, 0, 1]
    assert trace.kind is None and trace.session is None and not trace.notes


def test_mooncakes_ids_with_two_parents_are_refused_or_renamed(tmp_path):
    rows = [*MOONCAKE, {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [7, 4]}]
    path = jsonl(tmp_path / "trace", rows)
    with pytest.raises(ValueError, match="trace:3: hash_ids: 4 follows another block"):
        read_mooncake(path)
    assert prompts_of(read_mooncake(path, two_parents="rename")) == [[0, 1], [0, 1, 2], [0, 3]]


def test_bailian_by_hand(tmp_path):
    """Id 2 hashes only a block: after 1, after 3 and after itself it ends three prefixes."""
    path = jsonl(tmp_path / "trace", BAILIAN)
    trace = read_bailian(path)
    assert trace.time.tolist() == [500, 500, 1250, 2000, 3000] and trace.block_size == 16
    assert prompts_of(trace) == [[0, 1], [2, 3], [0, 1, 4], [0], [0]]
    assert trace.kinds == ("text", "image") and trace.kind.tolist() == [0, 1, 0, 0, 0]
    assert trace.session.tolist() == [0, 1, 0, 0, 2]
    with pytest.raises(ValueError, match="trace:2: hash_ids: 2 follows another block"):
        read_bailian(path, two_parents="refuse")


def test_azure_by_hand(tmp_path):
    trace = read_azure(text(tmp_path / "trace", AZURE))
    np.testing.assert_allclose(trace.time, [0, 1314.579], atol=1e-3)
    assert trace.input_length.tolist() == [374, 400] and trace.output_length.tolist() == [44, 109]
    assert len(trace.ids) == trace.num_ids == 24 + 25  # nothing is shared
    assert "nothing can hit" in trace.notes[0] and trace.session is None


def test_burst_by_hand(tmp_path):
    trace = read_burst(text(tmp_path / "trace", BURST))
    assert trace.time.tolist() == [5000, 45500] and trace.output_length.tolist() == [18, 0]
    assert trace.kinds == ("ChatGPT, Conversation log", "GPT-4, API log") and trace.kind.tolist() == [0, 1]
    assert len(trace.ids) == trace.num_ids and "nothing can hit" in trace.notes[0]


def test_sessions_that_burst_tells_are_taken_if_a_model_asks_for_reuse(tmp_path):
    path = text(tmp_path / "trace", SESSIONS)
    apart, together = read_burst(path), read_burst(path, sessions=Sessions())
    assert apart.session.tolist() == together.session.tolist() == [0, 1, 0, 2]
    assert len(apart.ids) == apart.num_ids
    # 40 tokens are 2 full blocks of 16 and 8 tokens more.
    assert prompts_of(together) == [[0, 1, 2], [3, 4, 5], [0, 1, 6, 7, 8], [9, 10, 11, 12, 13]]
    assert "assumed" in together.notes[0]


def test_random_sessions_are_seeded_and_say_so(tmp_path):
    random = np.random.default_rng(0)
    rows = [f"2024-05-10 00:{n // 60:02}:{n % 60:02}+00:00,{random.integers(1, 400)},9" for n in range(300)]
    path = text(tmp_path / "trace", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    model = Sessions(seed=3, share=0.6, turns=3, open=5)
    trace, again, other = (read_azure(path, sessions=Sessions(seed, 0.6, 3, 5)) for seed in (3, 3, 4))
    assert trace.ids.tolist() == again.ids.tolist() != other.ids.tolist()
    assert str(model) in trace.notes[0] and "not measured but random" in trace.notes[0]
    turns = np.bincount(trace.session)
    assert turns.max() == 3 and 0.4 < 1 - len(turns) / 300 < 0.65
    last = {}
    for number, session in enumerate(trace.session.tolist()):
        before = last.get(session)
        if before is not None:  # only blocks that were full there are the same
            assert trace.input_length[number] > trace.input_length[before]
            shared = trace.full[before]
            assert trace.blocks(number)[:shared].tolist() == trace.blocks(before)[:shared].tolist()
            assert not set(trace.blocks(number)[shared:]) & set(trace.blocks(before)[shared:])
        last[session] = number
    assert trace.num_ids < len(trace.ids)
    assert (read_azure(path, sessions=Sessions(share=0.0)).num_ids) == len(trace.ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"share": 1.5}, "share: got 1.5"), ({"turns": 0}, "turns: got 0"), ({"open": 0}, "open: got 0")],
)
def test_what_is_no_model_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sessions(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": "soon"}, "timestamp: got 'soon', wanted a finite number"),
        ({"timestamp": float("nan")}, "timestamp: got nan"),
        ({"timestamp": True}, "timestamp: got True"),
        *(({"timestamp": value}, "timestamp: got 1.*, wanted a finite number") for value in (10**400, 1e306)),
        ({"input_length": "9" * 5000}, "input_length: got '999"),
        ({"timestamp": -1}, "time: got"),
        ({"input_length": 1.5}, "input_length: got 1.5"),
        ({"input_length": 2**31}, "input_length: got 2147483648"),
        ({"input_length": 0}, "input_length: got 0, wanted an integer from 1"),
        ({"input_length": 2000}, "hash_ids: got 3, wanted 4"),
        ({"output_length": -1}, "output_length: got -1"),
        ({"output_length": None}, "output_length: got None"),
        ({"hash_ids": 3}, "hash_ids: got 3, wanted a list"),
        ({"hash_ids": [7, 9, "4"]}, "hash_ids: got"),
    ],
)
def test_a_line_of_mooncakes_that_is_none_is_refused_with_its_number(tmp_path, change, message):
    path = jsonl(tmp_path / "trace", [MOONCAKE[0], MOONCAKE[1] | change])
    with pytest.raises(ValueError, match=rf"trace:2: .*{message}"):
        read_mooncake(path)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_field_is_refused(tmp_path, field):
    path = jsonl(tmp_path / "trace", [{name: value for name, value in MOONCAKE[0].items() if name != field}])
    with pytest.raises(ValueError, match=f"trace:1: {field}: got no such field"):
        read_mooncake(path)


@pytest.mark.parametrize("line", ["{", "[1]", "3", "[" * 100_000])
def test_what_is_no_object_is_refused(tmp_path, line):
    """Blank lines count in the numbers of lines."""
    path = text(tmp_path / "trace", json.dumps(MOONCAKE[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"trace:3: got .*wanted"):
        read_mooncake(path)


@pytest.mark.parametrize(
    ("read", "good", "old", "new", "message"),
    [
        (read_azure, AZURE, "2023-11-17", "soon", "trace:3: TIMESTAMP: got 'soon"),
        (read_azure, AZURE, "400,109", "400", "trace:3: got 2 cells, wanted 3"),
        (read_azure, AZURE, "400,109", "400,x", "trace:3: GeneratedTokens: got 'x'"),
        (read_azure, AZURE, "400,109", "0,109", "trace:3: got a prompt of 0 tokens"),
        (read_azure, AZURE, "400,109", "400," + "9" * 200_000, "trace:3: got .*, wanted cells: field larger"),
        (read_azure, AZURE, "2023-11-17", "2023-11-15", "trace:3: time: got"),
        (read_azure, AZURE, "ContextTokens", "Tokens", "trace:1: got the columns .* wanted ContextTokens too"),
        (read_burst, BURST, "45.5", "x", "trace:3: Timestamp: got 'x'"),
        (read_burst, BURST, "480,API", "481,API", "trace:3: Total tokens: got 481, wanted 480"),
        (read_burst, BURST, "Log Type", "Type", "trace:1: got the columns .* wanted Log Type too"),
    ],
)
def test_rows_that_are_none_are_refused_with_their_number(tmp_path, read, good, old, new, message):
    assert len(read(text(tmp_path / "trace", good))) == 2
    with pytest.raises(ValueError, match=message):
        read(text(tmp_path / "trace", good.replace(old, new)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2147483632,1", r"trace:4: got a prompt of 134217727 blocks, wanted at most 1048576"),
        ("1600,1", r"trace:4: got 149 blocks up to this request, wanted at most 100"),
    ],
)
@pytest.mark.parametrize("sessions", [None, Sessions()])
def test_a_short_row_cannot_make_many_ids(tmp_path, row, message, sessions):
    path = text(tmp_path / "trace", f"{AZURE}2023-11-17 00:00:01,{row}\n")
    with pytest.raises(ValueError, match=message):
        read_trace(path, max_blocks=100, sessions=sessions)
    model, *rows = BURST.splitlines()
    path = text(
        tmp_path / "trace", "\n".join([model, *rows, f"50,GPT-4,{row},{sum(map(int, row.split(',')))},API log"])
    )
    with pytest.raises(ValueError, match=message.replace("149", "160")):
        read_trace(path, max_blocks=100, sessions=sessions)


def test_blocks_have_a_size_where_ids_are_made(tmp_path):
    with pytest.raises(ValueError, match="block_size: got 0, wanted at least 1 token"):
        read_azure(text(tmp_path / "trace", AZURE), block_size=0)


def test_cells_may_be_quoted(tmp_path):
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in AZURE.splitlines())
    assert prompts_of(read_trace(text(tmp_path / "trace", quoted))) == prompts_of(
        read_azure(text(tmp_path / "a", AZURE))
    )
    quoted = BURST.replace("Log Type", '"Log Type"').replace("API log", '"API log"')
    assert read_trace(text(tmp_path / "trace", quoted)).kinds == ("ChatGPT, Conversation log", "GPT-4, API log")
    with pytest.raises(ValueError, match=r"trace:1: got .*, wanted cells: field larger"):
        read_trace(text(tmp_path / "trace", "x" * 200_000))


@pytest.mark.parametrize("form", [None, "mooncake", "bailian", "events"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_named(tmp_path, form, indent):
    path = text(tmp_path / "trace", json.dumps(MOONCAKE, indent=indent))
    with pytest.raises(ValueError, match=r"trace:1: got a JSON array of objects, wanted JSON lines: an object a line"):
        read_trace(path, form)


@pytest.mark.parametrize("form", [None, "mooncake", "azure", "events"])
def test_pipes_and_devices_are_refused(tmp_path, form):
    """A pipe without a writer would wait for ever, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match=rf"^{path}: got a folder, a pipe or a device, wanted a regular file"):
            read_trace(path, form)


@pytest.mark.parametrize("change", [{"chat_id": "a"}, {"parent_chat_id": None}])
def test_chats_without_numbers_are_refused(tmp_path, change):
    path = jsonl(tmp_path / "trace", [BAILIAN[0], BAILIAN[1] | change])
    with pytest.raises(ValueError, match=f"trace:2: {next(iter(change))}: got .* wanted an integer"):
        read_bailian(path)


@pytest.mark.parametrize("read", [read_mooncake, read_bailian])
def test_a_file_without_requests_is_refused(tmp_path, read):
    with pytest.raises(ValueError, match="got no requests"):
        read(text(tmp_path / "trace", "\n"))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "trace").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="trace:1: got bytes that are not UTF-8, wanted text"):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("number", [2, 3, 900])
def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path, number, end):
    """A file of text would be read and decoded far ahead of the line."""
    lines = [json.dumps(MOONCAKE[0] | {"timestamp": time}).encode() for time in range(1000)]
    lines[number - 1] = lines[number - 1].replace(b"timestamp", b"time\xffstamp")
    (tmp_path / "trace").write_bytes(end.join([lines[0], b"", *lines[1:]]))
    with pytest.raises(ValueError, match=f"trace:{number + 1}: got bytes that are not UTF-8, wanted text"):
        read_trace(tmp_path / "trace")


def test_an_unknown_form_points_to_make_trace(tmp_path):
    with pytest.raises(
        ValueError, match=r"trace:1: got 'hello', wanted .*; use kvjax\.research\.make_trace for requests"
    ):
        read_trace(text(tmp_path / "trace", "hello"))


def test_the_first_line_tells_the_format(tmp_path):
    """A byte order mark, with which some tables begin, is no part of it."""
    assert read_trace(jsonl(tmp_path / "a", MOONCAKE)).block_size == 512
    assert read_trace(jsonl(tmp_path / "b", BAILIAN)).kinds == ("text", "image")
    assert read_trace(text(tmp_path / "c", "\ufeff" + AZURE)).num_ids == 49
    assert read_trace(text(tmp_path / "d", SESSIONS), sessions=Sessions()).num_ids == 14
    assert read_trace(jsonl(tmp_path / "a", MOONCAKE), "mooncake", block_size=512).num_ids == 3


@pytest.mark.parametrize("line", ["", "time,object,size,next", '{"timestamp": 3}', "{", "[1, 2"])
def test_a_format_that_no_reader_has_is_refused(tmp_path, line):
    with pytest.raises(ValueError, match=r"trace:1: got .*wanted"):
        read_trace(text(tmp_path / "trace", line))
    with pytest.raises(ValueError, match="format: got 'csv', wanted one of 'mooncake'"):
        read_trace(tmp_path / "trace", "csv")
