# SPDX-License-Identifier: Apache-2.0
"""XLA's thunks as a tree, and their counts: the kernels of a compiled program, and its stops for the host.

XLA writes the thunks of a program to the folder `xla_dump_to`: kernels, copies, loops, conditionals, and the command
buffers around them. A number joins each thunk with its instruction in the optimised HLO, which has the scope of the
trace (`op_name`), and the trip count of a loop if XLA knows it.

At a *stop* the device waits for the host to read a predicate: the predicate of a loop without a known trip count, or of
a conditional. Within a command buffer the device decides by itself.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

CONTROL = {"kWhile": "whiles", "kConditional": "conditionals", "kCommandBuffer": "command_buffers"}
COPIES = {"kCopy", "kDynamicMemcpy", "kMemset32BitValue", "kMemzero"}
STRUCTURE = {"program", "kSequential", "kAsyncStart", "kAsyncDone", "kGroup"}  # launch nothing themselves

_THUNK = re.compile(r"( *)(\d+): (k\w+)\s+\[[^]]*\](.*)")
_LABEL = re.compile(r"( *)(condition|body|false_branch|true_branch|branch_\d+):")
_LINE = re.compile(rf"{_THUNK.pattern}|{_LABEL.pattern}")


@dataclasses.dataclass
class Thunk:
    """A thunk, with the thunks inside it.

    Attributes:
      kind: its kind in XLA's words, for example kWhile, or "program" at the root.
      kernel: the name of a kernel.
      op_name: the scope and operation of its trace. A fusion has its result's.
      trips: the trip count of a loop. None if XLA does not know it, and for all other thunks.
      parts: the thunks inside, by their role: "condition" and "body", "true_branch", ... "" without a label.
      number: joins it with an instruction. 0 for a command buffer.
      instruction: its name in the optimised HLO.
      buffered: whether it is in a command buffer.
    """

    kind: str
    kernel: str = ""
    op_name: str = ""
    trips: int | None = None
    parts: dict[str, list[Thunk]] = dataclasses.field(default_factory=dict)
    number: int = 0
    instruction: str = ""
    buffered: bool = False

    @property
    def is_kernel(self) -> bool:
        """Whether the thunk launches a kernel, or an operation of a library or between GPUs."""
        return self.kind not in {*CONTROL, *COPIES, *STRUCTURE}

    @property
    def stops(self) -> bool:
        """Whether the device waits for the host at this thunk."""
        decides = self.kind == "kConditional" or (self.kind == "kWhile" and self.trips is None)
        return decides and not self.buffered

    def __iter__(self) -> Iterator[Thunk]:
        """This thunk and all inside it."""
        yield self
        for thunk in (thunk for part in self.parts.values() for thunk in part):
            yield from thunk


def read(dump: pathlib.Path, hlo: str) -> Thunk:
    """The thunks of the program whose dump is in a folder, and whose optimised HLO is given.

    Raises:
      ValueError: if a line is not understood, or thunks or instructions are missing.
    """
    # jaxlib 0.11 writes no file of the last state if its passes, which make command buffers, changed nothing.
    last = list(dump.glob("*.thunk_sequence_after_thunk_passes.txt"))
    (file,), (metadata,) = last or dump.glob("*.thunk_sequence.txt"), dump.glob("*.thunk_metadata.txt")
    root = parse(file.read_text())
    named = re.findall(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)', metadata.read_text())
    instructions = {int(number): name for name, number in named}
    if differ := {thunk.number for thunk in root} ^ {0, *instructions}:
        raise ValueError(f"thunks {sorted(differ)}: not in both the sequence and the metadata")
    lines = dict(re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = (.*)$", hlo, re.MULTILINE))
    for thunk in root:
        thunk.instruction = instructions.get(thunk.number, "")
        line = lines.get(thunk.instruction, "")
        name, trips = re.search(r'op_name="([^"]*)"', line), re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        thunk.op_name, thunk.trips = name[1] if name else "", int(trips[1]) if trips else None
        if thunk.kind == "kWhile" and " while(" not in line:
            raise ValueError(f"thunk {thunk.number}: a loop, but the HLO says {line[:200]!r}")
    return root


def parse(sequence: str) -> Thunk:
    """The tree of a thunk sequence as XLA prints it: by indentation, with labels between.

    Raises:
      ValueError: if a line is not understood.
    """
    root, label = Thunk("program"), ""
    open_thunks = [(-1, root)]
    for line in sequence.replace("No thunks.", "\n").splitlines():
        if not line.strip():
            continue
        if not (match := _LINE.fullmatch(line.rstrip())):
            raise ValueError(f"a line of thunks that is not understood: {line!r}")
        depth, number, kind, rest, label_depth, name = match.groups()
        if name:
            # "condition" stands at the margin, right after its loop. All other labels are indented below their thunk.
            while name != "condition" and open_thunks[-1][0] >= len(label_depth):
                open_thunks.pop()
            label = name
            open_thunks[-1][1].parts[label] = []
            continue
        while open_thunks[-1][0] >= len(depth):
            open_thunks.pop()
            label = next(reversed(open_thunks[-1][1].parts), "")
        parent = open_thunks[-1][1]
        buffered = parent.buffered or parent.kind == "kCommandBuffer"
        thunk = Thunk(kind, rest.split()[0] if " grid:" in rest else "", number=int(number), buffered=buffered)
        parent.parts.setdefault(label, []).append(thunk)
        open_thunks.append((len(depth), thunk))
        label = ""
    return root


Counts = collections.Counter[str]


def usual(top: Thunk, rare: Sequence[str]) -> Iterator[Thunk]:
    """A thunk and all inside it, without the bodies of loops whose scopes contain any of the names in `rare`."""
    yield top
    is_rare = any(name in top.op_name for name in rare)
    for label, part in top.parts.items():
        for thunk in part if label != "body" or not is_rare else ():
            yield from usual(thunk, rare)


def count(top: Thunk, rare: Sequence[str] = (), leave_out: Callable[[Thunk], bool] = lambda _: False) -> Counts:
    """Counts a program's launches and its stops for the host. The body of a loop counts once.

    Args:
      top: the root, or a loop, of which a single turn is counted.
      rare: parts of the scopes of loops which usually do not turn. Such a loop counts with its stop and its condition.
        Its body is counted apart.
      leave_out: (thunk) -> whether to leave it out with all thunks inside.

    Returns:
      stops, kernels, copies, whiles, conditionals and command_buffers. `launches` has kernels and copies, times the
      trip count of a loop if XLA knows it, and `rare` has kernels in bodies of rare loops.
    """
    counts: Counts = collections.Counter()

    def visit(thunk: Thunk, times: int, hidden: bool) -> None:
        if leave_out(thunk):
            return
        if hidden:
            counts["rare"] += thunk.is_kernel
        else:
            counts["stops"] += thunk.stops
            counts["kernels"] += thunk.is_kernel
            counts["copies"] += thunk.kind in COPIES
            counts["launches"] += times * (thunk.is_kernel or thunk.kind in COPIES)
            counts[CONTROL.get(thunk.kind, "")] += 1
        turns = thunk.trips or 1 if thunk is not top else 1
        for label, part in thunk.parts.items():
            if label == "condition" and thunk.trips is not None and not thunk.buffered:
                continue  # the host counts the turns
            unusual = label == "body" and any(name in thunk.op_name for name in rare)
            for inside in part:
                visit(inside, times * turns, hidden or unusual)

    visit(top, 1, False)
    del counts[""]
    return counts
