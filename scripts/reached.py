# SPDX-License-Identifier: Apache-2.0
"""The tests and pages reached by the last commits: CI runs these at length, and a night runs all.

    python scripts/reached.py tests [BASE]     # folders and files whose long tests are to run
    python scripts/reached.py pages [BASE]     # pages of docs/ whose cells are to run

BASE is the commit before the change, HEAD~10 by default. In a clone without history, everything is reached. A module
reaches the tests of its room, and any test with an import of its name. The names in `kvjax/__init__.py`, which the
default tests use, reach the tests of packaging. The core also reaches the oracle's machines. A module of models/
reaches the tests that import it, also through other modules, or name it in a command. Programs over pools reach their
table of copies. A test or a page reaches itself. Tools of tests reach nothing, because the default tests use them all.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
CORE = ("state", "cache", "tiered", "blocks", "verbs", "policies", "events", "pools")
COPIES = "tests/unit/test_copies.py"  # of the core, of loops and of kernels
PACKAGING = "tests/project/test_packaging.py"
COMMANDS = ["tests/project/test_commands.py", "tests/project/test_model_recipes.py"]
# Folders and files outside kvjax's rooms, and their tests.
HOMES = {
    "models": ["tests/models", *COMMANDS],
    "pallas_kernels": ["tests/kernels", "tests/unit/gpu", COPIES],
    "benchmarks": ["tests/project/test_benchmarks.py", "tests/project/test_pages_of_results.py"],
    "scripts": [PACKAGING],
    "docs": ["tests/project/test_pages.py"],
    "README.md": ["tests/project/test_readme.py"],
    "pyproject.toml": [PACKAGING],
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
            if rest == ["__init__.py"]:
                found.add(PACKAGING)
                continue
            package = pathlib.PurePath(rest[0]).stem
            home = {f"tests/unit/{package}", f"tests/unit/test_{package.removeprefix('_')}.py"}
            found |= home if any((ROOT / path).exists() for path in home) else importers(f"kvjax/{package}")
            found |= importers(file) | ({"tests/oracle"} if package in CORE else set())
            found |= {COPIES} if package in (*CORE, "serving") else set()
        elif top == "tests" and rest[-1].startswith("test_"):
            found.add(file)
        if top == "models" and file.endswith(".py") and (ROOT / file).exists():
            found |= {path for path in dependents(file) if pathlib.PurePath(path).name.startswith("test_")}
            found.update(COMMANDS)
        else:
            found.update(HOMES.get(top, []))
    return sorted(path for path in found if (ROOT / path).exists())


def importers(file: str) -> set[str]:
    """The files of tests with an import of a module's name."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    home, _, name = module.rpartition(".")
    line = re.compile(rf"^(?:from {module} |import {module}$|from {home} import .*\b{name}\b)", re.MULTILINE)
    tests = (ROOT / "tests").rglob("test_*.py")
    return {str(path.relative_to(ROOT)) for path in tests if line.search(path.read_text())}


def dependents(file: str) -> set[str]:
    """The files in models/ and tests/ that import a module of models/, also through others of them, and itself."""
    found = {file}
    while more := {path for path, imported in _imports().items() if path not in found and imported & found}:
        found |= more
    return found


@functools.cache
def _imports() -> dict[str, set[str]]:
    """The files of models/ and tests/ with the files that each may import. Commands in strings count too."""
    found = {}
    for path in (path for folder in ("models", "tests") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        names = set(re.findall(r"\bmodels\.\w+", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = ".".join(filter(None, ["models" if node.level else "", node.module]))
                names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        files = {name.replace(".", "/") for name in names}
        found[str(path.relative_to(ROOT))] = {f"{file}{end}" for file in files for end in (".py", "/__init__.py")}
    return found


def pages_of(files: Iterable[str] | None) -> list[str]:
    """The changed pages with cells, or all pages for None."""
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    return sorted(pages if files is None else pages & set(files))


if __name__ == "__main__":
    kind, base = [*sys.argv[1:], "HEAD~10"][:2]
    print(*{"tests": tests_of, "pages": pages_of}[kind](changed(base)))
