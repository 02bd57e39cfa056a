# SPDX-License-Identifier: Apache-2.0
"""`python -m kvjax.interop.vllm ENDPOINT`: any engine's stream, as one line for each event."""

import os
import subprocess
import sys
import time

import msgspec
import pytest

import kvjax
from kvjax.interop.vllm import Encoder, Publisher, __main__
from tests.drive import ROOT, TIMEOUT
from tests.unit.interop.forest import namespaces, spec_of
from tests.wire_kit import removed, stored

SEVEN = (7).to_bytes(8, "big")


def lines(payload, number=SEVEN):
    return list(__main__.lines([b"topic", number, payload]))


def test_each_event_is_a_line():
    names = kvjax.Namespaces()
    store = [stored(1, 1, 0, [1, 2, 3, 4]), stored(2, 1, (1, 1), [5] * 4), stored(3, 1, names("a", 3), [6] * 4)]
    encoder = Encoder(spec_of("plain"), names=names, salts="plain", lora_names={3: "sql"})
    [payload] = encoder.encode(store)
    a, b, c = (f"{name:016x}" for event in msgspec.msgpack.decode(payload)[1] for name in event["block_hashes"])
    assert lines(payload) == [
        f"7 stored GPU group 0: {a} {b} of 4 tokens: 1 2 3 4 5 5 5 5",
        f"7 stored GPU group 0: {c} of 4 tokens lora 'sql' salt 'a': 6 6 6 6",
    ]
    [payload] = encoder.encode([stored(4, 1, (2, 1), [7] * 4, level=1), removed(4, 1), {"kind": "cleared", "group": 0}])
    first, *rest = lines(payload)
    assert first.endswith(f" after {b} of 4 tokens: 7 7 7 7") and first.startswith("7 stored CPU group 0: ")
    assert rest[0].startswith("7 removed CPU group 0: ") and rest[1] == f"7 removed GPU group 0: {b} {c} {a}"
    assert rest[2:] == ["7 cleared"]


def test_hashes_of_bytes_long_events_and_what_is_none_are_printed_too():
    event = {"type": "BlockStored", "block_hashes": [b"\x01\xff", *range(20)], "parent_block_hash": b"\x02",
             "token_ids": [1] * 21, "block_size": 1, "extra_keys": [[["image", 0]], *[None] * 20]}  # fmt: skip
    [line] = lines(msgspec.msgpack.encode([1.0, [event], None]))
    assert line.startswith("7 stored GPU group 0: 01ff 0000000000000000 ") and line.endswith(" 1 1 and 13 more")
    assert " after 02 of 1 tokens keys [(('image', 0),)" in line
    odd = [["BlockStored", [1], None, [], 0, None, "CPU"], ["BlockMoved"]]
    assert lines(msgspec.msgpack.encode([1.0, odd, None])) == [
        "7 stored CPU group 0: 0000000000000001 without tokens",
        "7 skipped: Invalid value 'BlockMoved' - at `$[0]`",
    ]
    assert lines(msgspec.msgpack.encode([1.0, [], 0])) == ["7 idle"]
    assert lines(b"\xc1")[0].startswith("7 refused: payload: got b'\\xc1', wanted a KVEventBatch")
    assert lines(b"", b"short") == ["refused: 3 frames, wanted a topic, a number of 8 bytes and a payload"]


@pytest.mark.long
def test_the_command_prints_a_stream():
    command = [sys.executable, "-m", "kvjax.interop.vllm"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with Publisher(spec_of("plain"), bind="tcp://127.0.0.1:*", heartbeat=0.05, names=namespaces()) as source:
        process = subprocess.Popen([*command, source.endpoint], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline().endswith(" idle\n")
            source.publish([stored(1, 1, 0, [1, 2, 3, 4])])
            until, line = time.monotonic() + TIMEOUT, ""
            while " stored " not in line and time.monotonic() < until:
                line = process.stdout.readline()
            assert line.endswith(" of 4 tokens: 1 2 3 4\n")
        finally:
            process.kill()
            process.communicate()
    done = subprocess.run([*command, "nowhere"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    wanted = "python -m kvjax.interop.vllm: ENDPOINT: got 'nowhere', wanted tcp://HOST:PORT or ipc://PATH\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_an_address_that_cannot_be_bound_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["tcp://256.0.0.1:5", "--bind"])
    assert capsys.readouterr().err.startswith("python -m kvjax.interop.vllm: ENDPOINT: tcp://256.0.0.1:5: ")
