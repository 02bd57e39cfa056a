# SPDX-License-Identifier: Apache-2.0
"""The loops of attention kernels, from SASS: the instructions of an innermost loop with matrix products."""

from __future__ import annotations

import collections
import glob
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

_KERNEL = re.compile(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)([^;]*);")
_PRODUCTS = "HMMA", "HGMMA", "IMMA"
_SHARED = {"h200": 233_472, "a100": 167_936}  # bytes of a multiprocessor; a program takes 1,024 more than it asks for


class Loop(NamedTuple):
    """An innermost loop: the count of each instruction in it, and the copies in flight after its waits."""

    instructions: collections.Counter[str]
    in_flight: list[int]

    def count(self, *prefixes: str) -> int:
        """The number of instructions with any of these prefixes."""
        return sum(number for name, number in self.instructions.items() if name.startswith(prefixes))


def loops_of(sass: str) -> dict[str, list[Loop]]:
    """The innermost loops of each kernel with matrix products, in order, from nvdisasm's text."""
    found = {}
    for kernel, body in _KERNEL.findall(sass):
        labels, names, jumps, waits = {}, [], [], {}
        for label, name, operands in _LINE.findall(body):
            if label:
                labels[label] = len(names)
                continue
            target = re.search(r"\.L_x_\d+", operands)
            if name.startswith("BRA") and target and target[0] in labels:  # backwards
                jumps.append((labels[target[0]], len(names)))
            if name == "DEPBAR.LE":  # of a scoreboard, and how many groups of copies may go on
                waits[len(names)] = int(operands.split(",")[1].strip(" ;"), 16)
            names.append(name)
        inner = [a for a in jumps if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in jumps)]
        loops = [
            Loop(collections.Counter(names[begin : end + 1]), [n for at, n in waits.items() if begin <= at <= end])
            for begin, end in sorted(inner)
        ]
        found[kernel] = [loop for loop in loops if loop.count(*_PRODUCTS)]
    return found


def disassembled(cubin: pathlib.Path) -> str:
    """The SASS of a cubin."""
    (tool,) = [path for folder in sys.path for path in glob.glob(f"{folder}/nvidia/*/bin/nvdisasm")][:1]
    return subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def loop_counts(loop: Loop) -> dict[str, int]:
    """The counts of a loop for a warp, and for instructions also for all warps over 32 KB of K/V."""
    copied = 32 * (16 * loop.count("LDGSTS.E.BYPASS.128") + 8 * loop.count("LDGSTS.E.64"))  # bytes by a warp
    return {
        "loop_instructions": loop.count(""),
        **({"instructions_32kb": -(-loop.count("") * 32_768 // copied)} if copied else {}),
        "loop_global_loads": loop.count("LDG.", "LD."),  # not the asynchronous copies, LDGSTS
        "loop_byte_loads": loop.count("LDS.U8", "LDS.S8"),
        "loop_slow_conversions": loop.count("F2F."),
        "loop_barriers": loop.count("BAR"),
        **({"loop_in_flight": min(loop.in_flight)} if loop.in_flight else {}),
    }


def resident(registers: int, threads: int, shared: int, target: str) -> int:
    """Programs which fit on a multiprocessor at once, by registers, shared memory and threads."""
    by_registers = 65_536 // (-(-registers // 8) * 8 * threads)
    return min(by_registers, _SHARED[target] // (shared + 1024), 2048 // threads)
