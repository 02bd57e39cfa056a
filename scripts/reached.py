# SPDX-License-Identifier: Apache-2.0
"""The tests and pages that the last commits reach: CI runs these at length, and a night runs all.

    python scripts/reached.py tests [BASE]     # folders and files whose long tests are to run
    python scripts/reached.py pages [BASE]     # pages of docs/ whose cells are to run

BASE is the commit before the change, HEAD~10 by default. Without it, as in a clone without history, everything is
reached. A file of a room reaches the tests of its room; a changed test or page reaches itself; tools of tests reach
nothing but the tests that were changed with them, since the default tests use them all.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
# What is not a room of kvjax, and the tests of it.
HOMES = {
    "models": ["tests/models", "tests/project/test_commands.py", "tests/project/test_model_recipes.py"],
    "pallas_kernels": ["tests/kernels", "tests/unit/gpu"],
    "benchmarks": ["tests/project/test_benchmarks.py", "tests/project/test_pages_of_results.py"],
    "scripts": ["tests/project/test_packaging.py"],
    "docs": ["tests/project/test_pages.py"],
    "README.md": ["tests/project/test_readme.py"],
    "pyproject.toml": ["tests/project/test_packaging.py"],
}


def changed(base: str) -> list[str] | None:
    """The files that differ from those of a commit; None if git cannot tell."""
    command = ["git", "diff", "--name-only", base, "--"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def tests_of(files: Iterable[str] | None) -> list[str]:
    """The folders and files of tests that changes of these files reach; all tests for None."""
    if files is None:
        return ["tests"]
    found = set[str]()
    for file in files:
        top, *rest = pathlib.PurePath(file).parts
        if top == "kvjax":
            room = pathlib.PurePath(rest[0]).stem
            found |= {f"tests/unit/{room}", f"tests/unit/test_{room}.py"}
        elif top == "tests" and rest[-1].startswith("test_"):
            found.add(file)
        found.update(HOMES.get(top, []))
    return sorted(path for path in found if (ROOT / path).exists())


def pages_of(files: Iterable[str] | None) -> list[str]:
    """The pages with cells that were changed; all pages for None."""
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    return sorted(pages if files is None else pages & set(files))


if __name__ == "__main__":
    kind, base = [*sys.argv[1:], "HEAD~10"][:2]
    print(*{"tests": tests_of, "pages": pages_of}[kind](changed(base)))
