# SPDX-License-Identifier: Apache-2.0
"""`check` names every kind of damage and shows it; `index_of` and `snapshot` have the findable blocks."""

import functools
import itertools
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.testing import Trial, random_requests
from tests.drive import EXTRA, PLAIN, VERBS, Driver, output_of
from tests.unit.debug.stories import at, changed


@functools.cache
def story(spec=PLAIN):
    """Two rows share a prompt, and one has more to write. Some blocks are cached, and two are out of use."""
    driver = Driver(kvjax.init(spec, num_blocks=10))
    driver.start(0, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    driver.start(1, [1, 1, 1, 1, 4, 4, 4, 4, 5, 5, 5, 5])
    driver.start(2, [7, 7, 7, 7, 8])
    driver.do("release", 1)
    driver.do("release", 2)
    assert driver.admit(1, [1, 1, 1, 1, 6, 6]) == ["OK"]
    return driver


def block_names(state):
    """Names for the blocks of the story, found by their contents."""
    blocks, table = jax.device_get(state.groups[0].blocks), np.asarray(state.groups[0].table)
    first = {blocks.tokens[b, 0]: b for b in np.flatnonzero(blocks.fill > 0)}
    names = {"root": first[1], "held": first[2], "middle": first[4], "leaf": first[5], "other": first[7]}
    names |= {"tail": first[8], "open": table[0, 2], "new": table[1, 1], "empty": np.asarray(state.groups[0].empty)[0]}
    return {name: int(block) for name, block in names.items()}


BLOCKS, GROUP, LINKS, RING = "groups.blocks.", "groups.", "groups.links.", "groups.policy."
DAMAGE = {
    "committed lies within length": [("seqs.committed", lambda b: at(1, 7)), ("seqs.committed", lambda b: at(3, -1))],
    "length fits in a row": [("seqs.length", lambda b: at(0, 21))],
    "tables hold blocks for their length": [
        ("seqs.length", lambda b: at(0, 8)), ("seqs.length", lambda b: at(0, 13)),
        (GROUP + "table", lambda b: at((0, 1), -1)), (GROUP + "table", lambda b: at((3, 4), b["leaf"])),
    ],
    "table entries are blocks": [
        (GROUP + "table", lambda b: at((0, 1), 12)), (GROUP + "table", lambda b: at((0, 0), 99)),
    ],
    "entries of a row differ": [(GROUP + "table", lambda b: at((0, 1), b["root"]))],
    "refcounts cover the tables": [
        (BLOCKS + "refcount", lambda b: at(b["root"], 1)), (BLOCKS + "refcount", lambda b: at(b["open"], 0)),
        (BLOCKS + "refcount", lambda b: at(b["open"], -1)),
    ],
    "only pins hold beside the tables": [(BLOCKS + "refcount", lambda b: at(b["open"], 2))],
    "the stack is the empty blocks": [
        (GROUP + "empty", lambda b: at(0, b["root"])), (GROUP + "num_empty", lambda b: lambda x: x - 1),
        (GROUP + "num_empty", lambda b: lambda x: x + 1), (BLOCKS + "refcount", lambda b: at(b["empty"], 1)),
        (GROUP + "num_empty", lambda b: lambda x: -x),
    ],
    "num cached counts cached blocks": [
        (GROUP + "num_cached", lambda b: lambda x: x + 1), (BLOCKS + "refcount", lambda b: at(b["leaf"], 1)),
    ],
    "blocks out of use are untouched": [
        (BLOCKS + "refcount", lambda b: at(11, 1)), (BLOCKS + "fill", lambda b: at(10, 4)),
        (GROUP + "num_blocks", lambda b: lambda x: x - 8),
    ],
    "fill fits in a block": [
        (BLOCKS + "fill", lambda b: at(b["leaf"], 5)), (BLOCKS + "fill", lambda b: at(b["leaf"], -1)),
    ],
    "parents are whole and findable": [
        (BLOCKS + "fill", lambda b: at(b["middle"], 3)), (BLOCKS + "fill", lambda b: at(b["middle"], 0)),
        (BLOCKS + "parent", lambda b: at((b["leaf"], 0), 99)),
        (BLOCKS + "parent", lambda b: at((b["leaf"], 0), 2**31 - 1)),
    ],
    "parent links are of this generation": [
        (BLOCKS + "generation", lambda b: at(b["middle"], 77)), (BLOCKS + "parent", lambda b: at((b["leaf"], 1), 77)),
    ],
    "children are counted": [
        (BLOCKS + "children", lambda b: at(b["root"], 1)), (BLOCKS + "children", lambda b: at(b["leaf"], 1)),
        (BLOCKS + "parent", lambda b: at(b["leaf"], (-1, 0))),
    ],
    "only findable blocks have children": [(BLOCKS + "children", lambda b: at(b["empty"], 1))],
    "a held block has a held parent": [(BLOCKS + "refcount", lambda b: at(b["leaf"], 1))],
    "no prefix is stored twice": [
        (BLOCKS + "text.tokens", lambda b: at(b["held"], 4)), (BLOCKS + "text.tokens", lambda b: at(b["other"], 1)),
    ],
    "every findable block is linked once": [
        (LINKS + "next", lambda b: lambda x: np.where(x == b["leaf"], -1, x)),
        (LINKS + "next", lambda b: lambda x: np.where(x == b["leaf"] + 12, -1, x)),
        (LINKS + "next", lambda b: at(b["leaf"], b["empty"])),
        (BLOCKS + "fill", lambda b: at(b["empty"], 2)),
    ],
    "links agree both ways": [
        (LINKS + "prev", lambda b: at(b["leaf"], 3)), (LINKS + "prev", lambda b: at(b["leaf"] + 12, 3)),
    ],
    "every findable block is found by its key": [
        (BLOCKS + "key", lambda b: at((b["leaf"], 0), 5)), (BLOCKS + "key", lambda b: at((b["root"], 1), 5)),
    ],
    "every findable block is found by its parent": [(BLOCKS + "text.tokens", lambda b: at((b["leaf"], 0), 8))],
    "keys differ": [(BLOCKS + "key", lambda b: lambda x: np.broadcast_to(x[b["root"]], x.shape))],
    "the ring holds at most its size": [
        (RING + "tail", lambda b: lambda x: x + 64), (RING + "head", lambda b: lambda x: x + 64),
    ],
    "every cached block waits in the ring of its tier once": [
        (RING + "stamp", lambda b: at(b["leaf"], 1000)), (RING + "tail", lambda b: lambda x: x - 1),
        (RING + "order", lambda b: lambda x: np.where(x == b["leaf"], b["root"], x)),
    ],
}  # fmt: skip
CASES = [
    pytest.param(rule, path, make, id=f"{rule}: {path} {n}")
    for rule, cases in DAMAGE.items()
    for n, (path, make) in enumerate(cases)
]


def test_the_story_is_sound():
    state = story().state
    kvjax.check(state)
    blocks = block_names(state)
    assert len(set(blocks.values())) == len(blocks) and int(state.groups[0].num_cached) == 4


@pytest.mark.parametrize(("rule", "path", "make"), CASES)
def test_check_names_the_damage_and_draws_it(rule, path, make):
    state = story().state
    broken = changed(state, path, make(block_names(state)))
    with pytest.raises(AssertionError) as caught:
        kvjax.check(broken)
    message = str(caught.value)
    first, drawing = message.split("\n", 1)
    assert first.startswith("broken: ") and rule in first.removeprefix("broken: ").split("; ")
    assert drawing == kvjax.show(broken)


def endless(target):
    """The story with a link in a circle (or to nowhere), in the chain that had `leaf`."""
    state = story().state
    blocks, following = block_names(state), np.asarray(state.groups[0].links.next)
    (bucket,) = np.flatnonzero((following == blocks["leaf"]) & (np.arange(len(following)) >= 24))
    state = changed(state, LINKS + "next", at(bucket, blocks["root"]))
    return changed(state, LINKS + "next", at(blocks["root"], blocks["root"] if target is None else target))


def print_what_check_says_of_endless_chains():
    for target in (None, 10_000, 30):  # itself, nowhere, a bucket
        with pytest.raises(AssertionError) as caught:
            kvjax.check(endless(target))
        print(str(caught.value).split("\n")[0])


@pytest.mark.slow
def test_check_ends_where_links_do_not():
    """It runs in a process of its own: compiled code that never ends cannot be interrupted."""
    code = f"import {__name__} as tests; tests.print_what_check_says_of_endless_chains()"
    output = output_of(sys.executable, "-c", code)
    assert [line.startswith("broken: ") and "link" in line for line in output.splitlines()] == [True] * 3


@pytest.mark.long
def test_extra_ids_tell_blocks_apart():
    state = story(EXTRA).state
    held = block_names(state)["held"]
    duplicates = changed(state, BLOCKS + "text.tokens", at(held, 4))
    with pytest.raises(AssertionError, match="no prefix is stored twice"):
        kvjax.check(duplicates)
    with pytest.raises(AssertionError) as caught:  # in the wrong chain, but not twice
        kvjax.check(changed(duplicates, BLOCKS + "text.extra_ids", at((held, 2), 1)))
    assert str(caught.value).startswith("broken: every findable block is found by its parent\n")


def test_check_names_rows_that_should_have_been_released():
    state = story().state
    used = np.flatnonzero(state.seqs.length).tolist()
    kvjax.check(state, rows=used)
    left = "seq" + "s" * (len(used) > 2) + " " + " ".join(map(str, used[1:]))
    with pytest.raises(AssertionError, match=rf"^broken: {left} in use, wanted none but \[{used[0]}\]\n"):
        kvjax.check(state, rows=used[:1])
    kvjax.check(kvjax.init(PLAIN), rows=[])


def test_several_kinds_of_damage_are_all_named():
    state = changed(story().state, GROUP + "num_cached", lambda x: x + 1)
    state = changed(state, "seqs.committed", at(3, -1))
    with pytest.raises(AssertionError, match="broken: committed lies within length; num cached counts cached blocks"):
        kvjax.check(state)


@pytest.mark.parametrize("by", [2**31 - 64, 2**31 - 2, 2**32 - 32, 2**32 - 2])
def test_counters_of_the_ring_may_have_wrapped(by):
    """They may have wrapped between the head and the tail, too."""
    state = story().state
    assert (int(state.groups[0].policy.head), int(state.groups[0].policy.tail)) == (0, 4)
    state = changed(state, RING + "order", lambda x: np.roll(x, by))
    for name in ("head", "tail", "stamp"):
        state = changed(state, RING + name, functools.partial(moved, by=by))
    kvjax.check(state)


def moved(x, by):
    """i32 arithmetic that wraps without a warning."""
    return (x.astype(np.int64) + by).astype(np.uint32).view(np.int32)


@pytest.mark.long
def test_index_of_is_what_the_rows_and_the_released_rows_left():
    one, two, four = (1,) * 4, (1,) * 4 + (2,) * 4, (1,) * 4 + (4,) * 4
    paths = {one, two, four, four + (5,) * 4, (7,) * 4, (7, 7, 7, 7, 8)}
    assert kvjax.events.index_of(story().state) == {(0, 0, path): (0, 35) for path in paths}
    with_extra = kvjax.events.index_of(story(EXTRA).state)
    assert with_extra == {(0, 0, tuple((t, 0) for t in path)): (0, 35) for path in paths}
    assert kvjax.events.index_of(kvjax.init(PLAIN)) == {}


def test_a_snapshot_begins_with_created_and_has_parents_first():
    events = kvjax.events.snapshot(story().state)
    assert events[0] == {"kind": "created", "group": 0} and {e["kind"] for e in events[1:]} == {"stored"}
    mirror = kvjax.fold(events)  # raises if a child came first
    assert mirror.nodes == story().mirror.nodes


@pytest.mark.long
@pytest.mark.parametrize("steps", [10, 40, 80])
def test_whoever_joins_late_knows_the_same(steps):
    trial = Trial(kvjax.init(PLAIN), verbs=VERBS)
    requests = random_requests(21)
    for request in itertools.islice(requests, steps):
        trial.do(request)
    mirror = kvjax.fold(kvjax.events.snapshot(trial.state))
    assert mirror == trial.mirror
    for request in itertools.islice(requests, 30):
        events = trial.do(request)
        mirror = mirror if events is None else kvjax.fold(kvjax.to_list(events), mirror)
    assert mirror.index == kvjax.events.index_of(trial.state)


def test_a_snapshot_is_in_order_although_the_clock_has_wrapped():
    """`stored` and `clock` are compared by difference."""
    state = story().state
    by = 2**31 - int(state.groups[0].blocks.clock) + 3
    for name in ("clock", "stored", "released"):
        state = changed(state, BLOCKS + name, functools.partial(moved, by=by))
    assert kvjax.fold(kvjax.events.snapshot(state)).index == kvjax.events.index_of(story().state)
    kvjax.check(state)
