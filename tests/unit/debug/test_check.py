# SPDX-License-Identifier: Apache-2.0
"""`check` names every kind of damage and shows it; `index_of` and `snapshot` have the findable blocks."""

import functools
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.debug import stats
from kvjax.debug.inspect import inspect_group
from tests.drive import EXTRA, PLAIN, TIERS, Driver, output_of
from tests.unit.debug import stories
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


def tiers_names(state):
    """Names for the blocks of the story in both groups: those of row 0, of row 2 (swapped out), and the cached ones."""
    names = {}
    for number, group in enumerate(jax.device_get(state.groups)):
        fill, idle = group.blocks.fill, group.blocks.refcount == 0
        on_host = group.host.pool_row >= len(group.empty)
        more = {
            "first": group.table[0, 0], "second": group.table[0, 1], "last": group.table[0, 4],
            "swapped out": group.table[2, 0], "swapped end": group.table[2, 4], "moving": group.table[3, 0],
            "cached": np.flatnonzero(idle & (fill > 0) & ~on_host)[-1],
            "host cached": np.flatnonzero(idle & (fill > 0) & on_host)[0],
            "empty": group.empty[0], "host empty": group.host.empty[0],
        }  # fmt: skip
        names |= {(number, name): int(block) for name, block in more.items()}
    return names


def swap(one, two):
    def change(array):
        array[[one, two]] = array[[two, one]]

    return change


BLOCKS, GROUP, LINKS, RING = "groups.blocks.", "groups.", "groups.links.", "groups.policy."
# For each rule the fields and the damage, by the blocks' names.
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
# Of two groups over two tiers, with the number of the group that is named.
TIERS_DAMAGE = {
    "rows that are not swapped out are on the device": [
        (0, "seqs.swapped", lambda b: at(2, False)),
        (1, "seqs.swapped", lambda b: at(3, False)),
    ],
    "only rows in use are swapped out": [(0, "seqs.length", lambda b: at(2, 0))],
    "tables hold blocks for their length": [
        (1, "groups.1.table", lambda b: at((0, 1), b[1, "cached"])),  # behind the window
        (1, "groups.1.table", lambda b: at((0, 0), -1)),  # the first tokens stay
        (1, "groups.1.table", lambda b: at((0, 3), -1)),
    ],
    "table entries are blocks": [(1, "groups.1.table", lambda b: at((0, 3), 99))],
    "refcounts cover the tables": [(1, "groups.1.blocks.refcount", lambda b: at(b[1, "swapped end"], 0))],
    "num cached counts cached blocks": [
        (0, "groups.0.num_cached", lambda b: lambda x: x + 1),  # with that block on the host it would be right
        (1, "groups.1.num_cached", lambda b: lambda x: x - 1),
    ],
    "the stack is the empty blocks": [
        (0, "groups.0.empty", lambda b: at(0, b[0, "host empty"])),
        (1, "groups.1.num_empty", lambda b: lambda x: x - 1),
    ],
    "the stack of the host is its empty blocks": [
        (0, "groups.0.host.empty", lambda b: at(0, b[0, "empty"])),
        (1, "groups.1.host.num_empty", lambda b: lambda x: x + 1),
        (1, "groups.1.host.empty", lambda b: at(0, b[1, "host cached"])),
    ],
    "every pool row belongs to one block": [
        (0, "groups.0.host.pool_row", lambda b: at(b[0, "first"], 3)),
        (1, "groups.1.host.pool_row", lambda b: at(b[1, "first"], 20)),
        (1, "groups.1.host.pool_row", lambda b: at(b[1, "host cached"], -1)),
    ],
    "children on the host are counted": [
        (0, "groups.0.host.num_host_children", lambda b: at(b[0, "swapped out"], 2)),
        (0, "groups.0.host.num_host_children", lambda b: at(b[0, "last"], 1)),
        (1, "groups.1.host.num_host_children", lambda b: at(b[1, "first"], 1)),
    ],
    "children are counted": [(0, "groups.0.blocks.children", lambda b: at(b[0, "swapped out"], 1))],
    "a device block has its parent on the device": [
        (0, "groups.0.host.pool_row", lambda b: swap(b[0, "first"], b[0, "host empty"])),
        (0, "groups.0.host.pool_row", lambda b: swap(b[0, "second"], b[0, "swapped out"])),
    ],
    "only blocks with contents are on the move": [
        (0, "groups.0.host.pending_transfer", lambda b: at(b[0, "empty"], 1)),
        (1, "groups.1.host.pending_transfer", lambda b: at(b[1, "host empty"], 1)),
    ],
    "moves were ordered": [
        (0, "groups.0.host.pending_transfer", lambda b: at(b[0, "moving"], 4)),
        (1, "groups.1.host.pending_transfer", lambda b: at(b[1, "moving"], 2**31 - 1)),
        (1, "groups.1.host.num_moves", lambda b: lambda x: x * 0),
    ],
    "every cached block waits in the ring of its tier once": [
        (0, "groups.0.policy.tail", lambda b: lambda x: x - 1),
        (0, "groups.0.host.policy.stamp", lambda b: at(b[0, "host cached"], 77)),
        (1, "groups.1.policy.stamp", lambda b: at(b[1, "cached"], 77)),
        (1, "groups.1.host.policy.head", lambda b: lambda x: x + 1),
    ],
    "the ring holds at most its size": [(1, "groups.1.host.policy.tail", lambda b: lambda x: x + 64)],
    "group0 blocks are blocks": [
        (1, "groups.1.group0_block", lambda b: at(b[1, "first"], 22)),
        (1, "groups.1.group0_block", lambda b: at(b[1, "cached"], -1)),
    ],
    "group0 blocks hold as many tokens": [
        (1, "groups.1.blocks.fill", lambda b: at(b[1, "cached"], 1)),
        (1, "groups.0.blocks.fill", lambda b: at(b[0, "cached"], 2)),
    ],
    "window blocks are the way back from group0 blocks": [
        (1, "groups.1.window_block", lambda b: at(b[0, "first"], b[1, "cached"])),
        (1, "groups.1.group0_block", lambda b: at(b[1, "first"], b[0, "second"])),
    ],
    "every window block is findable": [
        (1, "groups.1.window_block", lambda b: at(b[0, "empty"], 0)),
        (1, "groups.1.window_block", lambda b: at(b[0, "first"], -1)),
    ],
    "a held block has a held group0 block": [(1, "groups.1.blocks.refcount", lambda b: at(b[1, "host cached"], 1))],
    "rows hold blocks of the same prefixes": [(1, "groups.0.table", lambda b: lambda x: x[:, [1, 0, 2, 3, 4, 5]])],
}
CASES = [
    *(
        pytest.param(rule, path, make, False, id=f"{rule}: {path} {n}")
        for rule, cases in DAMAGE.items()
        for n, (path, make) in enumerate(cases)
    ),
    *(
        pytest.param(f"{rule} (group {number})", path, make, True, id=f"{rule}: {path} {n}", marks=pytest.mark.long)
        for rule, cases in TIERS_DAMAGE.items()
        for n, (number, path, make) in enumerate(cases)
    ),
]


@pytest.mark.parametrize(("rule", "path", "make", "tiered"), CASES)
def test_check_names_the_damage_and_draws_it(rule, path, make, tiered):
    state = stories.tiers().state if tiered else story().state
    broken = changed(state, path, make(tiers_names(state) if tiered else block_names(state)))
    with pytest.raises(AssertionError) as caught:
        kvjax.check(broken)
    first, drawing = str(caught.value).split("\n", 1)
    assert first.startswith("broken: ") and rule in first.removeprefix("broken: ").split("; ")
    assert drawing == kvjax.show(broken)


def test_the_story_is_sound():
    state = story().state
    kvjax.check(state)
    blocks = block_names(state)
    assert len(set(blocks.values())) == len(blocks) and int(state.groups[0].num_cached) == 4


@pytest.mark.long
def test_the_story_of_tiers_is_sound_and_its_blocks_differ():
    state = stories.tiers().state
    kvjax.check(state)
    names = tiers_names(state)
    for number in range(2):
        own = [block for (group, name), block in names.items() if group == number and name != "second"]
        assert len(set(own)) == len(own)


@pytest.mark.long
def test_the_number_of_moves_may_have_wrapped():
    """The latest move is number -2**31 now, and the pending ones were ordered just before it."""
    state = stories.tiers().state
    for number in range(2):
        state = changed(state, f"groups.{number}.host.num_moves", lambda x: np.full_like(x, -(2**31)))
        state = changed(
            state, f"groups.{number}.host.pending_transfer", lambda x: np.where(x > 0, np.int32(2**31 - 1), x)
        )
    kvjax.check(state)


@pytest.mark.long
def test_blocks_out_of_use_keep_their_pool_rows():
    state = kvjax.init(TIERS, num_blocks=9)
    kvjax.check(state)
    broken = changed(state, "groups.1.host.pool_row", swap(3, 11))
    with pytest.raises(AssertionError, match=r"^broken: blocks out of use keep their pool rows \(group 1\)\n"):
        kvjax.check(broken)


@pytest.mark.long
@pytest.mark.parametrize(
    "path", ["group0_block", "window_block", "table", "host.pool_row", "blocks.fill", "blocks.parent", "host.empty"]
)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("value", [-5, 99])
def test_any_numbers_can_be_checked_and_plotted(path, number, value):
    state = stories.tiers().state
    if number == 0 and path in ("group0_block", "window_block"):
        return
    broken = changed(state, f"groups.{number}.{path}", lambda x: np.full_like(x, value))
    if path != "blocks.parent" or number == 0:  # a window group's blocks have none
        with pytest.raises(AssertionError, match="broken: "):
            kvjax.check(broken)
    kvjax.debug.plot_blocks(broken, group=number)
    stats(broken, number)


@pytest.mark.long
def test_a_window_groups_blocks_hold_what_their_group0_blocks_do():
    state = stories.tiers().state
    first, window = inspect_group(state), inspect_group(state, 1)
    names = tiers_names(state)
    for name in ("first", "last", "swapped out", "swapped end", "moving", "cached", "host cached"):
        block = names[1, name]
        first_block = names[0, name] if name != "cached" else int(state.groups[1].group0_block[block])
        n = int(window.written[block])
        assert window.tokens[block, :n].tolist() == first.tokens[first_block, :n].tolist() and n > 0


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


def test_a_snapshot_is_in_order_although_the_clock_has_wrapped():
    """`stored` and `clock` are compared by difference."""
    state = story().state
    by = 2**31 - int(state.groups[0].blocks.clock) + 3
    for name in ("clock", "stored", "released"):
        state = changed(state, BLOCKS + name, functools.partial(moved, by=by))
    assert kvjax.fold(kvjax.events.snapshot(state)).index == kvjax.events.index_of(story().state)
    kvjax.check(state)
