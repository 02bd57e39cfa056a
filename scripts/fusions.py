# SPDX-License-Identifier: Apache-2.0
"""The functions of this repository with the most instructions and distinct fusions in a program, on a CPU.

python scripts/fusions.py                 # of the scheduler's loop (`benchmarks.compile` explains the numbers)
python scripts/fusions.py admit --top 50  # of a verb's program
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import pathlib
import re
import sys
from collections.abc import Callable

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import compile as programs


def functions(text: str) -> Callable[[str], str]:
    """Returns a function from an instruction of a compiled program to its function in this repository."""
    heads = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    tables: dict[str, dict[int, str]] = {head: {} for head in heads}
    table: dict[int, str] = {}
    for line in text.splitlines():
        if line in heads:
            table = tables[line]
        elif entry := re.match(r"(\d+) (.*)", line):
            table[int(entry[1])] = entry[2].strip('"')

    def number(field: str, entry: str) -> int:
        match = re.search(rf"{field}=(\d+)", entry)
        return int(match[1]) if match else 0

    @functools.cache
    def function(frame: int) -> str:
        entry = tables["StackFrames"].get(frame, "")
        location = tables["FileLocations"].get(number("file_location_id", entry), "")
        file = tables["FileNames"].get(number("file_name_id", location), "")
        name = tables["FunctionNames"].get(number("function_name_id", location), "")
        if "/kvjax/" in file and not file.endswith("_arrays.py"):
            return f"{file[file.rindex('/kvjax/') + 1 :]} {name.replace('.<locals>', '')}"
        above = number("parent_frame_id", entry) - 1  # XLA prints one more
        return function(above) if above > 0 else "elsewhere"

    return lambda line: function(number("stack_frame_id", line))


def print_functions(compiled: jax.stages.Compiled, top: int) -> None:
    """Prints the functions with the most instructions and distinct fusions."""
    text = compiled.as_text() or ""
    owner = functions(text)
    lines = [
        line for line in itertools.chain.from_iterable(programs.computations(text).values()) if "stack_frame_id" in line
    ]
    first = {body: owner(line) for line, body in reversed([*programs.bodies(text)])}
    for what, owners in (("instructions", map(owner, lines)), ("distinct fusions", first.values())):
        print(f"{what} by function")
        for name, number in collections.Counter(owners).most_common(top):
            print(f"{number:>7,}  {name}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="serve", choices=programs.programs())
    parser.add_argument("--top", type=int, default=25, metavar="N", help="functions (default: %(default)s)")
    args = parser.parse_args()
    _, compiled, _ = programs.compile_program(programs.programs()[args.program]())
    print_functions(compiled, args.top)


if __name__ == "__main__":
    main()
