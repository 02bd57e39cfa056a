# SPDX-License-Identifier: Apache-2.0
"""The layout: the imports that each room may have, the names that `kvjax` exports, and how docstrings begin."""

import ast
import graphlib
import pathlib
import re
import sys
import types

import pytest

import kvjax
import kvjax.stores
from tests.drive import ROOT
from tests.project.sources import sources

HOUSE = pathlib.Path(kvjax.__file__).parent
# Each room, or module directly under kvjax, imports from those before it and from itself.
ROOMS = (
    "_files", "_arrays", "_compile", "_pictures", "layers", "spec", "state", "checks", "events", "policies", "blocks",
    "verbs", "pools", "model", "processes", "ledger", "debug", "cache", "tiered", "sizing", "stores", "grammar",
    "serving", "testing", "tiers", "interop", "research", "__init__",
)  # fmt: skip


def imports(package="kvjax"):
    """(module, a module of its package that it imports)."""
    for module in sources(package):
        parts = module.name.removesuffix(".py").split("/")
        for node, named in module.imports():
            if isinstance(node, ast.Import):
                continue
            home = [*parts[: -node.level], *([named] if named else [])] if node.level else named.split(".")
            if home[0] == package:
                for name in node.names:
                    part = ROOT.joinpath(*".".join(home).split("."), name.name)
                    is_module = part.is_dir() or part.with_suffix(".py").exists()
                    yield (
                        ".".join(parts).removesuffix(".__init__"),
                        ".".join([*home, *([name.name] if is_module else [])]),
                    )


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
    files = [module.text for module in sources("kvjax")]
    print(f"0 circles, {max(floors.values())} floors, {sum(text.count(chr(10)) for text in files):,} lines: {floors}")
    assert len(floors) > 20 and max(floors.values()) <= 14


# models -> kvjax -> pallas_kernels -> jax, and other packages only where an extra is named.
MAY_IMPORT = {
    "pallas_kernels": {"jax", "numpy", "pallas_kernels"},
    "kvjax": {
        "jax", "numpy", "pallas_kernels", "kvjax", "matplotlib", "hypothesis", "msgspec", "zmq", "grpc", "grpc_tools",
        "google", "prometheus_client", "tensorstore",
    },
}  # fmt: skip
WIRES = {"msgspec", "zmq", "grpc", "grpc_tools", "google", "prometheus_client"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_of_packages_go_one_way(package):
    for module in sources(package):
        found = {named.split(".")[0] for node, named in module.imports() if not getattr(node, "level", 0)}
        assert found - set(sys.stdlib_module_names) <= MAY_IMPORT[package], module.name


def test_nothing_else_imports_the_wires():
    for module in sources("kvjax"):
        inside, named = module.name.startswith("kvjax/interop/"), [name for _, name in module.imports()]
        assert inside or not any(name.startswith("kvjax.interop") for name in named), module.name
        guarded = inside and "\nexcept ImportError as error:\n" in module.text
        assert guarded or not WIRES & {name.split(".")[0] for name in named}, module.name


def test_what_kvjax_exports_is_short_and_hides_no_module():
    assert len(kvjax.__all__) == len(set(kvjax.__all__)) <= 50  # with `thin`, a verb, and `rest`, after each `admit`
    modules = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(kvjax.__all__)
    assert not any(isinstance(getattr(kvjax, name), types.ModuleType) for name in kvjax.__all__)


def test_every_name_that_a_room_exports_exists():
    interop = ("interop", *(f"interop.{name}" for name in ("agent", "log", "metrics", "trtllm", "vllm")))
    rooms = "debug", "events", "grammar", "policies", "pools", "research", "serving", "stores", "testing", "tiers"
    for name in (*rooms, *interop):
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
    "window_block", "requested_priority", "swapped", "time", "transfer",
}  # fmt: skip
FLAGS = {"bare", "extra_ids", "has_host", "num_host_blocks", "retention", "tiered", "windowed", "windows"}
NUMBERS = {"g", "group_index", "number"}  # the first group differs from the others


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


def asking_lines(module):
    """The lines that ask for an optional feature."""
    lines = set()
    for node in module.nodes:
        conditions = getattr(node, "ifs", [node.test] if hasattr(node, "test") else [])
        conditions = [*conditions, node] if isinstance(node, ast.BoolOp) else conditions
        lines |= {flag.lineno for condition in conditions for flag in flags_in(condition)}
        if isinstance(node, ast.Compare) and compares_with_absence(node):
            lines.add(node.lineno)
    return lines


def test_few_lines_ask_for_optional_features():
    """They were 167 when features had just been added one after the other, in every file that they touch."""
    assert 0 < sum(len(asking_lines(module)) for module in sources("kvjax")) <= 70


def test_a_verbs_file_has_its_name():
    for path in (HOUSE / "verbs").glob("[a-z]*.py"):
        name = path.stem
        assert name in ("control", "swap") or any(
            callable(getattr(home, name, None)) for home in (kvjax, kvjax.tiers, kvjax.stores, kvjax.serving)
        )


def test_tests_are_nobodys_library():
    """Code for several test files is in a module of its own: `drive.py`, a kit, or a helper in their folder."""
    for module in sources("tests"):
        for node, named in module.imports():
            parts = {part for name in (named, *(alias.name for alias in node.names)) for part in name.split(".")}
            assert not {part for part in parts if part.startswith("test_")}, f"{module.name}:{node.lineno}"


def test_files_with_prompts_are_made_by_one_helper():
    """`kvjax._files` makes them private. Figures, pictures and checkpoints have no prompts."""
    public = {"kvjax/research/__main__.py", "models/loading.py"}
    writes = re.compile(r"""open\([^()]*["'][wax]b?["']|\.write_(text|bytes)\(|\.mkdir\(|\.touch\(\)|makedirs\(""")
    modules = sources("kvjax", "models", "pallas_kernels")
    found = {module.name for module in modules if writes.search(re.sub(r"(?m)^ *(>>>|\.\.\.).*", "", module.text))}
    assert found == {*public, "kvjax/_files.py"}


QUESTIONS = ("What", "How", "Which", "Who", "Whose", "Where")


@pytest.mark.parametrize("folder", ["kvjax", "models", "pallas_kernels", "tests"])
def test_docstrings_begin_with_a_noun_or_a_verb(folder):
    texts = [(module.name, text) for module in sources(folder) for _, text in module.docstrings()]
    assert [(name, text) for name, text in texts if text.split(" ")[0] in QUESTIONS] == []


@pytest.mark.parametrize("package", ["kvjax", "models", "pallas_kernels"])
def test_code_in_docstrings_touches_no_letters(package):
    """Sphinx takes the backtick in `name`s for no end, and what follows up to the next backtick for code."""
    for module in sources(package):
        for _, text in module.docstrings():
            for code in re.finditer(r"`[^`]+`", text):
                around = text[max(code.start() - 1, 0) : code.start()] + text[code.end() : code.end() + 1]
                assert not re.search(r"\w", around), f"{module.name}: {code[0]}"


@pytest.mark.parametrize("folder", ["kvjax", "pallas_kernels", "models", "tests", "benchmarks", "scripts", "docs"])
def test_sources_name_their_licence_and_nothing_outside_the_checkout(folder):
    outside = re.compile(r"\.\./" + "shared" + r"|[\"'(= ]/(home|root|work|tmp)/")
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert not outside.search(text), (path, outside.search(text))


def lines_of_code(module):
    """The numbers of the lines that hold code: no blank lines, comments and docstrings."""
    documented = {number for node, _ in module.docstrings() for number in range(node.lineno, node.end_lineno + 1)}
    lines = ((number, line.strip()) for number, line in enumerate(module.text.splitlines(), 1))
    return [number for number, line in lines if line and not line.startswith("#") and number not in documented]


@pytest.mark.parametrize("folder", ["kvjax", "models", "pallas_kernels", "benchmarks"])
def test_no_file_has_over_500_lines_of_code_and_no_function_over_80(folder):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef) if folder != "benchmarks" else ()
    for module in sources(folder):
        code = lines_of_code(module)
        assert len(code) <= 500, module.name
        for node in module.nodes:
            if isinstance(node, functions):
                own = sum(node.lineno <= number <= node.end_lineno for number in code)
                assert own <= 80, f"{module.name}:{node.lineno} {node.name}"
