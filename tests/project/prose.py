# SPDX-License-Identifier: Apache-2.0
"""Rates of words and names which make code and pages hard to read.

    python -m tests.project.prose PATH...    # the rates of each path, then the places to look at
    python -m tests.project.prose --lower    # lowers the limits in tests/data/prose_limits.json to the present rates

`BARS` has the rate which each tree should reach. A tree above a bar has a limit in the file, and `test_words.py` fails
if its rate passes the limit. Limits only fall.
"""

from __future__ import annotations

import ast
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.drive import DATA, ROOT
from tests.project.sources import Source, source

LIMITS = DATA / "prose_limits.json"
ROOMS = (
    "blocks",
    "debug",
    "events",
    "grammar",
    "interop",
    "policies",
    "pools",
    "research",
    "serving",
    "stores",
    "testing",
)
CODE = ("kvjax", "kvjax/verbs", *(f"kvjax/{room}" for room in ROOMS), "models", "pallas_kernels", "benchmarks")
TEXTS = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# The rates, and the most that each should be. Shares are in percent, counts of words for 1,000 words.
BARS = {
    "vague names": 1.0,
    "packed assignments": 3.0,
    "vague descriptions": 3.0,
    "that": 8.0,
    "one": 3.0,
    "what": 0.5,
    "those": 0.5,
    "semicolons": 5.0,
}
MIN_YOU = 5.0  # `you` in 1,000 words of a page
MAX_FORMAT_SKIPS = 20  # `# fmt: skip` in all trees of code

VAGUE_NAMES = re.compile(
    "(all_|at|each|everything|few|found|good|it|its|left|many|mine|more|most|number|of|one|other|own|real|some|their"
    "|theirs|these|thing|way|whole)"
)
VAGUE_BEGINNING = re.compile(r"(of|as|likewise|how|what|where|those|which)\b", re.I)
WORDS = {
    "that": re.compile(r"\bthat\b", re.I),
    "one": re.compile(r"\bones?\b", re.I),
    "what": re.compile(r"\bwhat\b", re.I),
    "those": re.compile(r"\bthose\b", re.I),
    "semicolons": re.compile(r";"),
}
YOU = re.compile(r"\byour?s?\b", re.I)
WORD = re.compile(r"[A-Za-z']+")
# "name: " at the start of an argument's line; a dtype or a shape may follow, up to a semicolon.
ARGUMENT = re.compile(r"^\s*\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*(?: \([^)]*\))?: (?:[a-z]\w*\[[^\]]*\]; )?(?=\S)")
SHAPE_END = re.compile(r"(?<=\]);")  # after a dtype and shape, where a description follows
SECTION = re.compile(r"^\s*(Args|Arguments|Attributes|Columns|Yields|Raises):$")
GENERATED = {ROOT / "docs/performance/all.md"}  # benchmarks/pages.py writes it from docstrings


class Place(NamedTuple):
    """A place counted by a rate.

    Attributes:
      file: path of the file from the checkout on.
      line: number of the line, from 1.
      rate: a key of `BARS`, or "you".
      text: the name, or the line.
    """

    file: str
    line: int
    rate: str
    text: str


class Counts:
    """Counts of a tree: the places of each rate, and the number of names or words to divide by."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.names = 0
        self.assignments = 0
        self.descriptions = 0
        self.words = 0

    def rates(self) -> dict[str, float]:
        """Every rate of the tree, and the number of `# fmt: skip`. `you` is counted on pages alone."""
        divisors = {
            "vague names": self.names / 100,
            "packed assignments": self.assignments / 100,
            "vague descriptions": self.descriptions / 100,
            "format skips": self.names and 1,
        }
        divisors |= dict.fromkeys(WORDS, self.words / 1000)
        divisors |= {} if self.names else {"you": self.words / 1000}
        counted = [place.rate for place in self.places]
        return {rate: counted.count(rate) / divisor for rate, divisor in divisors.items() if divisor}

    def add_module(self, module: Source) -> None:
        """Counts the names, assignments and docstrings of a module."""
        for node in module.nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    self.names += 1
                    if VAGUE_NAMES.fullmatch(name):
                        self.places.append(Place(module.name, node.lineno, "vague names", name))
                case ast.Assign(targets=[target, *_], value=value):
                    self.assignments += 1
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        text = ast.unparse(target)
                        self.places.append(Place(module.name, node.lineno, "packed assignments", text))
        for statement, _ in module.docstrings():
            self._add_docstring(module, statement)
        for line, text in enumerate(module.text.splitlines(), 1):
            if "# fmt: " + "skip" in text:
                self.places.append(Place(module.name, line, "format skips", text.strip()))

    def _add_docstring(self, module: Source, statement: ast.Expr) -> None:
        lines = module.text.splitlines()[statement.lineno - 1 : statement.end_lineno]
        in_arguments = False
        for line_number, line in enumerate(lines, statement.lineno):
            if ">>>" in line or line.strip().startswith("..."):
                continue
            if SECTION.match(line):
                in_arguments = True
            elif not line.strip() or re.match(r"^\s*(Returns|Example|Source):$", line):
                in_arguments = False
            prose = SHAPE_END.sub("", line, count=1)
            if in_arguments and (argument := ARGUMENT.match(line)):
                self.descriptions += 1
                if VAGUE_BEGINNING.match(line, argument.end()):
                    self.places.append(Place(module.name, line_number, "vague descriptions", line.strip()))
                prose = line.replace(";", "", 1)
            self._add_prose(module.name, line_number, prose, line)

    def add_page(self, path: pathlib.Path) -> None:
        """Counts the words of a page: no code, no tables, no tags."""
        name = path.relative_to(ROOT).as_posix()
        for line_number, line in prose_lines(path.read_text()):
            self._add_prose(name, line_number, line, line)
            self.places += [Place(name, line_number, "you", line.strip())] * len(YOU.findall(line))

    def _add_prose(self, file: str, line_number: int, prose: str, line: str) -> None:
        self.words += len(WORD.findall(prose))
        for rate, pattern in WORDS.items():
            self.places += [Place(file, line_number, rate, line.strip())] * len(pattern.findall(prose))


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page with prose, each with its number. Inline code is shortened to X."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"\A---\n.*?^---$", blank, text, flags=re.M | re.S)
    text = re.sub(r"^( *)(`{3,}|:{3,}).*?^\1\2$", blank, text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", lambda match: "X" + blank(match), text)
    text = re.sub(r"<[^>]+>", blank, text)
    for line_number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("|"):
            yield line_number, line


def files_of(tree: str) -> list[pathlib.Path]:
    """The files of a tree: modules and pages in a folder and below it, but `kvjax` stands for its own modules alone."""
    path = ROOT / tree
    if path.is_file():
        return [path]
    modules = path.glob("*.py") if tree == "kvjax" else path.rglob("*.py")
    pages = path.rglob("*.md") if tree.startswith("docs") else ()
    return sorted({*modules, *pages} - GENERATED)


def counts_of(tree: str) -> Counts:
    """The counts of a tree or a file. Modules among pages are examples, and do not count."""
    counts = Counts()
    for path in files_of(tree):
        if path.suffix == ".md":
            counts.add_page(path)
        elif not tree.startswith("docs"):
            counts.add_module(source(path))
    return counts


def limits() -> dict[str, dict[str, float]]:
    """The limits of trees whose rates are above their bars, by tree and rate."""
    return json.loads(LIMITS.read_text())


def lowered(tree: str, old: dict[str, float] | None) -> dict[str, float]:
    """The limits of a tree from its present rates, none above an old limit, without rates which meet their bars."""
    rates = counts_of(tree).rates()
    new = {}
    for rate, bar in (BARS | {"format skips": 0}).items():
        limit = math.ceil(10 * rates.get(rate, 0)) / 10
        if old is not None:
            limit = min(limit, old.get(rate, bar))
        if limit > bar:
            new[rate] = limit
    return new


def main(arguments: list[str]) -> None:
    """The command."""
    if arguments == ["--lower"]:
        old = limits() if LIMITS.exists() else {}
        new = {tree: lowered(tree, old.get(tree, {}) if old else None) for tree in (*CODE, *TEXTS)}
        LIMITS.write_text(json.dumps({tree: rates for tree, rates in new.items() if rates}, indent=1) + "\n")
        return
    counts = {tree: counts_of(tree.removesuffix("/")) for tree in arguments}
    for tree, counted in counts.items():
        figures = ", ".join(f"{rate} {value:.1f}" for rate, value in counted.rates().items())
        print(f"{tree}: {counted.words:,} words; {figures}")
    for place in sorted(place for counted in counts.values() for place in counted.places):
        if place.rate != "you":
            print(f"{place.file}:{place.line}: {place.rate}: {place.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
