# SPDX-License-Identifier: Apache-2.0
"""The tests and pages reached by the last commits: CI runs these at length, and a night runs all.

    python scripts/reached.py tests [BASE]     # folders and files whose long tests are to run
    python scripts/reached.py pages [BASE]     # pages of docs/ whose cells are to run

BASE is the commit before the change, HEAD~10 by default. In a clone without history, everything is reached. A module
reaches the tests of its room, and any test with an import of its name. The core also reaches the oracle's machines.
Programs over pools reach their table of copies. A test or a page reaches itself. Tools of tests reach nothing, because
the default tests use them all.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
CORE = ("state", "cache", "tiered", "blocks", "verbs", "policies", "events", "pools")
COPIES = "tests/unit/test_copies.py"  # of the core, of loops and of kernels
# Folders and files outside kvjax's rooms, and their tests.
HOMES = {
    "models": ["tests/models", "tests/project/test_commands.py", "tests/project/test_model_recipes.py"],
    "pallas_kernels": ["tests/kernels", "tests/unit/gpu", COPIES],
    "benchmarks": ["tests/project/test_benchmarks.py", "tests/project/test_pages_of_results.py"],
    "scripts": ["tests/project/test_packaging.py"],
    "docs": ["tests/project/test_pages.py"],
    "README.md": ["tests/project/test_readme.py"],
    "pyproject.toml": ["tests/project/test_packaging.py"],
}


def changed(base: str) -> list[str] | None:
    """The files with differences from a commit, or None if git cannot tell."""
    command = ["git", "diff", "--name-only", base, "--"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def tests_of(files: Iterable[str] | None) -> list[str]:
    """The folders and files of tests reached by changes of these files, or all tests for None."""
    if files is None:
        return ["tests"]
    found = set[str]()
    for file in files:
        top, *rest = pathlib.PurePath(file).parts
        if top == "kvjax":
            package = pathlib.PurePath(rest[0]).stem
            home = {f"tests/unit/{package}", f"tests/unit/test_{package.removeprefix('_')}.py"}
            found |= home if any((ROOT / path).exists() for path in home) else importers(f"kvjax/{package}")
            found |= importers(file) | ({"tests/oracle"} if package in CORE else set())
            found |= {COPIES} if package in (*CORE, "serving") else set()
        elif top == "tests" and rest[-1].startswith("test_"):
            found.add(file)
        found.update(HOMES.get(top, []))
    return sorted(path for path in found if (ROOT / path).exists())


def importers(file: str) -> set[str]:
    """The files of tests with an import of a module's name."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    home, _, name = module.rpartition(".")
    line = re.compile(rf"^(?:from {module} |import {module}$|from {home} import .*\b{name}\b)", re.MULTILINE)
    tests = (ROOT / "tests").rglob("test_*.py")
    return {str(path.relative_to(ROOT)) for path in tests if line.search(path.read_text())}


def pages_of(files: Iterable[str] | None) -> list[str]:
    """The changed pages with cells, or all pages for None."""
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    return sorted(pages if files is None else pages & set(files))


if __name__ == "__main__":
    kind, base = [*sys.argv[1:], "HEAD~10"][:2]
    print(*{"tests": tests_of, "pages": pages_of}[kind](changed(base)))
