# SPDX-License-Identifier: Apache-2.0
"""The layout: the imports that each room may have, the names that `kvjax` exports, and how docstrings begin."""

import ast
import graphlib
import pathlib
import re
import types

import pytest

import kvjax
import kvjax.stores

HOUSE = pathlib.Path(kvjax.__file__).parent
# Each room, or module directly under kvjax, imports from those before it and from itself.
ROOMS = (
    "_files", "_arrays", "_compile", "_pictures", "layers", "spec", "state", "checks", "events", "policies", "blocks",
    "gpu", "verbs", "pools", "model", "processes", "ledger", "debug", "cache", "tiered", "sizing", "stores", "serving",
    "testing", "tiers", "interop", "research", "__init__",
)  # fmt: skip


def imports(package="kvjax"):
    """(module, a module of its package that it imports), anywhere in the file, under TYPE_CHECKING too."""
    home = HOUSE.parent / package
    for path in sorted(home.rglob("*.py")):
        parts = (package, *path.relative_to(home).with_suffix("").parts)
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            source = ".".join([*parts[: -node.level], *([node.module] if node.module else [])] if node.level else [])
            source = source or node.module or ""
            if source.split(".")[0] == package:
                for name in node.names:
                    part = home.joinpath(*source.split(".")[1:], name.name)
                    is_module = part.is_dir() or part.with_suffix(".py").exists()
                    yield module, f"{source}.{name.name}" if is_module else source


def room_of(module):
    return (module.split(".")[1:] or ["__init__"])[0]


def graph_of(pairs):
    graph = {}
    for module, imported in pairs:
        graph.setdefault(module, set()).add(imported)
    return graph


def test_imports_go_from_room_to_room_in_one_direction():
    assert not {(a, b) for a, b in imports() if ROOMS.index(room_of(b)) > ROOMS.index(room_of(a))}


@pytest.mark.parametrize("package", ["kvjax", "models", "pallas_kernels"])
def test_no_modules_import_each_other(package):
    order = tuple(graphlib.TopologicalSorter(graph_of(imports(package))).static_order())
    assert len(order) > 5


def test_rooms_are_on_few_floors():
    """The floor of a room is the length of the longest chain of imports from room to room that begins in it."""
    rooms = {(room_of(a), room_of(b)) for a, b in imports()}
    graph, floors = graph_of(pair for pair in rooms if pair[0] != pair[1]), {}
    for room in graphlib.TopologicalSorter(graph).static_order():
        floors[room] = 1 + max((floors[below] for below in graph.get(room, ())), default=0)
    files = [path.read_text() for path in HOUSE.rglob("*.py")]
    print(f"0 circles, {max(floors.values())} floors, {sum(text.count(chr(10)) for text in files):,} lines: {floors}")
    assert len(floors) > 20 and max(floors.values()) <= 14


def test_what_kvjax_exports_is_short_and_hides_no_module():
    assert len(kvjax.__all__) == len(set(kvjax.__all__)) <= 48
    modules = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(kvjax.__all__)
    assert not any(isinstance(getattr(kvjax, name), types.ModuleType) for name in kvjax.__all__)


def test_every_name_that_a_room_exports_exists():
    interop = ("interop", *(f"interop.{name}" for name in ("agent", "log", "metrics", "trtllm", "vllm")))
    for name in ("debug", "events", *interop, "policies", "pools", "research", "serving", "stores", "testing", "tiers"):
        room = __import__(f"kvjax.{name}", fromlist=["*"])
        constants_first = sorted(room.__all__, key=lambda exported: (not exported.isupper(), exported))
        assert room.__all__ == constants_first or name == "testing"
        assert all(hasattr(room, exported) for exported in room.__all__)


def test_optional_parts_of_a_group_are_named_where_they_live():
    """All other code uses the predicates of `Group`."""
    homes = {"blocks/tiers.py", "blocks/windows.py"}
    for folder in ("blocks", "events", "policies", "verbs"):
        for path in sorted((HOUSE / folder).glob("*.py")):
            named = re.findall(r"\.(?:group0_block|window_block|host)\b", path.read_text())
            assert not named or str(path.relative_to(HOUSE)) in homes, path


# Optional features of a cache: the names of arrays or tiers (None if absent), and the flags that ask for them.
ABSENT = {
    "group0_block", "expiry", "extra", "extra_id", "extra_ids", "host", "priorities", "retention", "scales",
    "window_block", "stated", "swapped", "time", "transfer",
}  # fmt: skip
FLAGS = {"bare", "extra_ids", "has_host", "num_host_blocks", "retention", "tiered", "windowed", "windows"}
NUMBERS = {"g", "number"}  # the first group differs from the others


def name_of(node):
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def compares_with_absence(node):
    """Whether it is a comparison like `host is None`, `number == 0`, `"host" in tiers`."""
    name, operator, right = name_of(node.left), node.ops[0], node.comparators[0]
    value = right.value if isinstance(right, ast.Constant) else ...
    if isinstance(operator, ast.Is | ast.IsNot):
        return value is None and name in ABSENT
    if isinstance(operator, ast.In | ast.NotIn):
        return isinstance(node.left, ast.Constant) and node.left.value == "host"
    return type(value) is int and value == 0 and name in NUMBERS


def flags_in(test):
    """The flags in a condition: alone, behind `not`, or joined by `and` and `or`."""
    if isinstance(test, ast.BoolOp):
        return [node for value in test.values for node in flags_in(value)]
    if isinstance(test, ast.UnaryOp):
        return flags_in(test.operand)
    return [test] if name_of(test) in FLAGS | NUMBERS else []


def asking_lines(tree):
    """The lines that ask for an optional feature."""
    lines = set()
    for node in ast.walk(tree):
        conditions = getattr(node, "ifs", [node.test] if hasattr(node, "test") else [])
        conditions = [*conditions, node] if isinstance(node, ast.BoolOp) else conditions
        lines |= {flag.lineno for condition in conditions for flag in flags_in(condition)}
        if isinstance(node, ast.Compare) and compares_with_absence(node):
            lines.add(node.lineno)
    return lines


def test_few_lines_ask_for_optional_features():
    """They were 167 when features had just been added one after the other, in every file that they touch."""
    found = {path: asking_lines(ast.parse(path.read_text())) for path in HOUSE.rglob("*.py")}
    assert 0 < sum(map(len, found.values())) <= 70


def test_a_verbs_file_has_its_name():
    for path in (HOUSE / "verbs").glob("[a-z]*.py"):
        name = path.stem
        assert name in ("control", "swap") or any(
            callable(getattr(home, name, None)) for home in (kvjax, kvjax.tiers, kvjax.stores, kvjax.serving)
        )


def test_tests_are_nobodys_library():
    """Code for several test files is in a module of its own: `drive.py`, a kit, or a helper in their folder."""
    for path in (HOUSE.parent / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                named = [getattr(node, "module", None) or "", *(name.name for name in node.names)]
                parts = {part for name in named for part in name.split(".")}
                assert not {part for part in parts if part.startswith("test_")}, f"{path}:{node.lineno}"


QUESTIONS = ("What", "How", "Which", "Who", "Whose", "Where")


def test_files_with_prompts_are_made_by_one_helper():
    """`kvjax._files` makes them private. Figures, pictures, learned policies and checkpoints have no prompts."""
    public = {"kvjax/research/__main__.py", "kvjax/research/learning/learned.py", "models/loading.py"}
    writes = re.compile(r"""open\([^()]*["'][wax]b?["']|\.write_(text|bytes)\(|\.mkdir\(|\.touch\(\)|makedirs\(""")
    found = {
        f"{path.relative_to(HOUSE.parent)}"
        for folder in ("kvjax", "models", "pallas_kernels")
        for path in (HOUSE.parent / folder).rglob("*.py")
        if writes.search(re.sub(r"^ *(>>>|\.\.\.).*", "", path.read_text(), flags=re.M))
    }
    assert found == {*public, "kvjax/_files.py"}


@pytest.mark.parametrize("folder", ["kvjax", "models", "pallas_kernels", "tests"])
def test_docstrings_begin_with_a_noun_or_a_verb(folder):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{path}: {text}"
        for path in sorted((HOUSE.parent / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "").split(" ")[0] in QUESTIONS
    ]
    assert found == []


def lines_of_code(node, lines):
    """The lines of a module, class or function that hold code: no blank lines, comments and docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [inner.body[0] for inner in ast.walk(node) if isinstance(inner, kinds) and ast.get_docstring(inner)]
    documented = {number for text in texts for number in range(text.lineno, text.end_lineno + 1)}
    first, last = (1, len(lines)) if isinstance(node, ast.Module) else (node.lineno, node.end_lineno)
    numbers = set(range(first, last + 1)) - documented
    return sum(bool(line) and not line.startswith("#") for line in (lines[n - 1].strip() for n in numbers))


@pytest.mark.parametrize("folder", ["kvjax", "models", "pallas_kernels", "benchmarks"])
def test_no_file_has_over_400_lines_of_code_and_no_function_over_60(folder):
    lengths = {}
    for path in sorted((HOUSE.parent / folder).rglob("*.py")):
        name, text = str(path.relative_to(HOUSE.parent)), path.read_text()
        lines, tree = text.splitlines(), ast.parse(text)
        lengths[name] = lines_of_code(tree, lines), 400
        for node in ast.walk(tree) if folder != "benchmarks" else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths[f"{name}:{node.lineno} {node.name}"] = lines_of_code(node, lines), 60
    assert lengths
    assert not {name: length for name, (length, most) in lengths.items() if length > most}
