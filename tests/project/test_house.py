# SPDX-License-Identifier: Apache-2.0
"""Where things live: what each room may import, and what `kvjax` itself exports."""

import ast
import graphlib
import pathlib
import types

import kvjax

HOUSE = pathlib.Path(kvjax.__file__).parent
# Each room, or module directly under kvjax, imports from those before it and from itself.
ROOMS = (
    "_arrays", "_methods", "spec", "state", "_checks", "events", "policies", "blocks", "verbs", "pools", "model",
    "ledger", "debug", "cache", "sizing", "serving", "_workload", "testing", "tiers", "__init__",
)  # fmt: skip
# What a value shows of itself is drawn where the drawing is; imported when it is asked for.
LATE = {("kvjax.state", "kvjax.debug.text")}


def imports():
    """(module, what it imports from kvjax) wherever in the file, under TYPE_CHECKING too."""
    for path in sorted(HOUSE.rglob("*.py")):
        module = ".".join(("kvjax", *path.relative_to(HOUSE).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvjax":
                for name in node.names:
                    part = HOUSE.joinpath(*node.module.split(".")[1:], name.name)
                    is_module = part.is_dir() or part.with_suffix(".py").exists()
                    yield module, f"{node.module}.{name.name}" if is_module else node.module


def room(module):
    return ROOMS.index((module.split(".")[1:] or ["__init__"])[0])


def test_imports_go_from_room_to_room_in_one_direction():
    upward = {(a, b) for a, b in imports() if room(b) > room(a)}
    assert upward == LATE


def test_no_modules_import_each_other():
    graph = {}
    for module, imported in set(imports()) - LATE:
        graph.setdefault(module, set()).add(imported)
    assert len(tuple(graphlib.TopologicalSorter(graph).static_order())) > 40


def test_what_kvjax_exports_is_short_and_hides_no_module():
    assert len(kvjax.__all__) == len(set(kvjax.__all__)) <= 44
    modules = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(kvjax.__all__)
    assert not any(isinstance(getattr(kvjax, name), types.ModuleType) for name in kvjax.__all__)


def test_every_name_that_a_room_exports_is_there():
    for name in ("debug", "events", "policies", "pools", "serving", "testing", "tiers"):
        room = __import__(f"kvjax.{name}", fromlist=["*"])
        assert room.__all__ == sorted(room.__all__) or name == "testing"
        assert all(hasattr(room, exported) for exported in room.__all__)


def test_a_verbs_file_has_its_name():
    for path in (HOUSE / "verbs").glob("[a-z]*.py"):
        name = path.stem
        assert name == "control" or callable(getattr(kvjax, name, None) or getattr(kvjax.tiers, name))
