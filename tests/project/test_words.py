# SPDX-License-Identifier: Apache-2.0
"""The words of CONTRIBUTING's table: names and prose that say a thing by another word than the library does."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

from tests.drive import ROOT
from tests.project.sources import sources

TREES = ("kvjax", "models", "pallas_kernels", "benchmarks", "scripts", "tests")
# A word in a name, and the word to say instead. `_` and capitals divide a name into words.
INSTEAD = {
    "anchor": "group0_block", "arriving": "pending_transfer, incoming", "asked": "request, options",
    "beside": "in_this_group", "cow": "copy_on_write", "deal": "plan_transfers", "drawn": "strategies, random",
    "far": "on_device, on_host", "feed": "PublisherThread", "forecast": "capacity", "fresh": "new, dirty",
    "g": "group, number", "goal": "max_tokens", "heard": "records, events", "here": "on_device, on_host",
    "kept": "cached, held", "known": "blocks, seqs, is_valid, num_tokens", "lasting": "offloaded",
    "look": "max_skips, inspect", "mine": "own, group", "moment": "timestamp", "naming": "hashing, with_hashes",
    "near": "on_device", "news": "dedup", "orphan": "dropped", "orphans": "dropped", "outlet": "Socket",
    "party": "fork group", "passing": "evicted", "place": "column, slot, pool row, index",
    "places": "columns, slots, pool rows, indices", "possible": "has_...", "promise": "hit_density",
    "rests": "swapped_out", "resting": "swapped_out", "room": "capacity, reserve_tokens", "rooms": "max_tokens",
    "said": "published", "shadow": "window_block", "stalled": "out_of_blocks", "starved": "skipped_steps",
    "stuck": "unevictable", "survey": "inspect", "teller": "EventEncoder", "there": "on_device, in_use",
    "told": "published", "twin": "duplicate", "twins": "duplicates", "urgency": "priority", "worth": "priority",
}  # fmt: skip
# Words that a tree or a room may still have in its names: shorten a line when it has been cleaned.
STILL = {
    "kvjax/debug": {"drawn"},  # by a drawing
    "models": {"feed", "place", "places"},  # each of `wires.Wires.feeds`; the places in the demo's documents
    "benchmarks": {"drawn", "twin", "twins"},  # random; a kernel's XLA twin; rows with equal prompts
    "tests/models": {"place", "places"},  # in the demo's documents
    "tests/project/test_house.py": {"room", "rooms"},  # of CONTRIBUTING's table
}  # fmt: skip
# Names of other libraries, and words that mean something else in a name.
ALLOWED = {
    "G", "KEPT_SECONDS", "_place_copy", "add_feed_forward_length", "anchor", "bbox_to_anchor", "g_a_proj", "g_b_proj",
    "log_room", "only_pins_hold_beside_the_tables", "parse_known_args", "so_far",
}  # fmt: skip
# Words that no docstring, comment or page has.
PROSE = (
    "anchor", "arriving", "cow", "heard", "mine", "news", "orphan", "orphans", "outlet", "party", "resting", "rests",
    "shadow", "starved", "stuck", "survey", "teller", "urgency", "worth",
)  # fmt: skip


def modules(*trees):
    """The modules of some trees, without this one, which lists the words."""
    return [module for module in sources(*trees) if module.path != pathlib.Path(__file__)]


def left(name):
    """The words that `STILL` leaves to the tree or the room of a file."""
    return set().union(*(words for part, words in STILL.items() if name.startswith(part)))


def names(module):
    """(line, name) of all that a module names: variables, attributes, arguments, functions, classes, modules."""
    for node in module.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name), value=value):
                yield value.lineno, name
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in TREES:
                yield from ((node.lineno, name) for name in module.split("."))


def words_of(name):
    """The words of a name; `in_place` is a term, of donated buffers."""
    return {word.lower() for word in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name.replace("in_place", ""))}


@pytest.mark.parametrize("tree", TREES)
def test_names_say_what_the_library_says(tree):
    found = []
    for module in modules(tree):
        banned = INSTEAD.keys() - left(module.name)
        for line, name in {(0, module.path.stem), *names(module)}:
            for word in banned & words_of(name) if name not in ALLOWED else ():
                found.append(f"{module.name}:{line}: {name}: say {INSTEAD[word]}, not {word}")
    assert not found, "\n".join(sorted(found))


def sentences(module):
    """(line, text) of the docstrings and comments of a module."""
    lines = list(enumerate(module.text.splitlines(), 1))
    found = [line for node, _ in module.docstrings() for line in lines[node.lineno - 1 : node.end_lineno]]
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return [*found, *((one.start[0], one.string) for one in tokens if one.type == tokenize.COMMENT)]


def test_sentences_say_what_the_library_says():
    texts = {module.name: sentences(module) for module in modules("kvjax", "models", "tests")}
    texts |= {page: enumerate(page.read_text().splitlines(), 1) for page in sorted((ROOT / "docs").rglob("*.md"))}
    found = [
        f"{name}:{line}: say {INSTEAD[word]}, not {word}"
        for name, lines in texts.items()
        for line, text in lines
        for word in set(PROSE) & set(re.findall(r"[a-z]+", text.lower()))
    ]
    assert not found, "\n".join(sorted(found))
