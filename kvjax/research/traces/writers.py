# SPDX-License-Identifier: Apache-2.0
"""Writes traces for other tools: Mooncake's JSON lines, and libCacheSim's tables in text and binary form."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from kvjax._files import create
from kvjax.research.traces.trace import Trace, next_uses

# libCacheSim's oracleGeneral: seconds, object, bytes, index of the next access to the object; packed.
ORACLE_GENERAL = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])


def write_mooncake(trace: Trace, path: str | pathlib.Path) -> None:
    """Writes JSON lines with `timestamp` (ms), lengths and `hash_ids`.

    `read_mooncake` with the trace's block size restores it, except classes, sessions and notes.

    Example:
      >>> import pathlib, tempfile
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5], [12, 12], [2, 2], [[1, 2, 3], [1, 2, 4]], block_size=4)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     research.write_mooncake(trace, pathlib.Path(folder, "trace.jsonl"))
      ...     print(pathlib.Path(folder, "trace.jsonl").read_text(), end="")
      {"timestamp": 0, "input_length": 12, "output_length": 2, "hash_ids": [0, 1, 2]}
      {"timestamp": 5, "input_length": 12, "output_length": 2, "hash_ids": [0, 1, 3]}
    """
    with create(path, encoding="utf-8") as file:
        for request in range(len(trace)):
            time = float(trace.time[request])
            record = {
                "timestamp": int(time) if time.is_integer() else time,
                "input_length": int(trace.input_length[request]),
                "output_length": int(trace.output_length[request]),
                "hash_ids": trace.blocks(request).tolist(),
            }
            file.write(json.dumps(record) + "\n")


def write_libcachesim_csv(trace: Trace, path: str | pathlib.Path) -> None:
    """Writes a table of references for libCacheSim: time (s), object, size, and the index of the next access.

    Blocks are objects of size 1 with a reference each. The table cannot express that a block needs the blocks before
    it. A prompt's last block comes first, in the order of kvjax's releases. The next access is -1 if there is none.

    The columns are 1 to 4, under a header. libCacheSim 0.3.5 ignores the fourth column, so its Belady is wrong for this
    table. Use `write_oracle_general` for Belady.
    """
    with create(path, encoding="utf-8") as file:
        file.write("time,object,size,next\n")
        file.writelines(",".join(map(str, reference)) + "\n" for reference in _references(trace).tolist())


def write_oracle_general(trace: Trace, path: str | pathlib.Path) -> None:
    """Writes libCacheSim's oracleGeneral: 24 bytes for each reference, little-endian, in the form of `ORACLE_GENERAL`.

    The references are equal to `write_libcachesim_csv`, including the next accesses.
    """
    with create(path, "wb") as file:
        file.write(_references(trace).tobytes())


def _references(trace: Trace) -> np.ndarray:
    """ORACLE_GENERAL[K]; prompt by prompt, the last block first."""
    ends = np.repeat(trace.starts[:-1] + trace.starts[1:] - 1, trace.lengths)
    ids = trace.ids[ends - np.arange(len(trace.ids))]
    references = np.empty(len(trace.ids), ORACLE_GENERAL)
    references["time"] = np.repeat((trace.time - trace.time[:1]) // 1000, trace.lengths)
    references["object"] = ids
    references["size"] = 1
    references["next"] = next_uses(ids)
    return references
