# SPDX-License-Identifier: Apache-2.0
"""The modules of the checkout, each read and parsed once for all rules about them."""

import ast
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from tests.drive import ROOT

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A module.

    Attributes:
      path: path of its file.
      name: path of its file from the checkout on, for example kvjax/spec.py.
      text: text of the file.
      nodes: all nodes of its syntax tree, from the module on.
    """

    path: pathlib.Path
    name: str
    text: str
    nodes: tuple[ast.AST, ...]

    def docstrings(self) -> Iterator[tuple[ast.Expr, str]]:
        """The docstrings of the module, its classes and its functions: the statement, and the text without indents."""
        for node in self.nodes:
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield node.body[0], text

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
        """The imports anywhere in the file, under TYPE_CHECKING too, each with the name of its module."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node, node.module or ""


@functools.cache
def source(path: pathlib.Path) -> Source:
    text = path.read_text()
    return Source(path, path.relative_to(ROOT).as_posix(), text, tuple(ast.walk(ast.parse(text))))


def sources(*trees: str) -> list[Source]:
    """The modules of folders of the checkout, without scripts among the data of tests."""
    paths = [path for tree in trees for path in sorted((ROOT / tree).rglob("*.py"))]
    return [source(path) for path in paths if not path.is_relative_to(ROOT / "tests/data")]
