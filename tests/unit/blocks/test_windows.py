# SPDX-License-Identifier: Apache-2.0
"""Window groups: the blocks of a growing row, of a prefix that is found again, and of a row that is cut."""

import chex
import jax
import numpy as np
import pytest

import kvjax
from benchmarks import snapshots
from tests.drive import Driver

P, S, T, WINDOW = 4, 3, 24, 6  # the next token sees 5 before it
TEXT = (np.arange(T, dtype=np.int32) * 7 + 3) % 50
OTHER = TEXT + 100


def spec_of(*layers, **options):
    """A cache for layers given as (window, sink tokens); 24 blocks of full attention, 6 of each window."""
    options = {"num_blocks": {None: 24, WINDOW: 6}, "max_seqs": S, "max_length": T, "block_size": P, **options}
    return kvjax.make_spec([kvjax.LayerSpec(1, 1, *layer) for layer in layers], **options)


BOTH = spec_of((None,), (WINDOW,))
SINKS = spec_of((WINDOW, 5))


class Story(Driver):
    """A cache with windows, and the blocks that its rows hold."""

    def __init__(self, spec=BOTH, **blocks):
        """`full` and `window` are the numbers of blocks in use: caches of several sizes share programs."""
        state = kvjax.init(spec)
        few = [kvjax.init(spec, num_blocks=blocks.get(name)).groups for name in ("full", "window")]
        groups = tuple(groups[number] for number, groups in enumerate(few[: len(state.groups)]))
        super().__init__(state.replace(groups=groups))

    def step(self, *rows):
        """Adds a token to some rows, given as (row, token); returns the number of blocks copied for that."""
        assert self.grow(*[int(row in dict(rows)) for row in range(S)]) == ["OK"] * S
        copied = int(kvjax.events.counts(self.events)["copied"])
        assert self.write({row: [token] for row, token in rows}) == ["OK"] * S
        return copied

    def held(self, group, row=0):
        """{column: block} of a row."""
        table = self.state.groups[group].table[row].tolist()
        return {column: block for column, block in enumerate(table) if block != kvjax.state.NO_BLOCK}

    def columns(self, group, row=0):
        return list(self.held(group, row))


@pytest.mark.long
def test_a_row_holds_what_its_window_needs_and_no_more():
    """A window of 32 in blocks of 16 needs 3 blocks, and in prefill those of a chunk. The group has no more."""
    most, chunk = -(-32 // 16) + 1, 64 // 16
    layers, blocks = [kvjax.LayerSpec(1, 1), kvjax.LayerSpec(1, 1, 32)], {None: 256, 32: most + chunk}
    spec = kvjax.make_spec(layers, num_blocks=blocks, max_seqs=1, max_length=4096, block_size=16)
    ok, state, chunks, steps = snapshots.long_row(spec, 2048, 64, 2048)
    assert ok and np.max(chunks[:, 0, 1]) <= most + chunk and np.max(chunks[:, 1, 1]) <= most
    assert np.max(steps[:, 0, 1]) == np.max(steps[:, 1, 1]) == most
    assert steps[-1, 1].tolist() == [256, 2] and state.seqs.committed.tolist() == [4096]
    kvjax.check(jax.device_get(state))


@pytest.mark.slow
def test_blocks_leave_with_the_last_token_that_is_seen_and_stay_cached():
    story, held = Story(), []
    story.start(0, TEXT[:3])
    for token in TEXT[3:14]:
        story.step((0, token))
        held.append(story.columns(1))
    assert held == [[0], *[[0, 1]] * 4, *[[1, 2]] * 4, *[[2, 3]] * 2]
    assert story.columns(0) == [0, 1, 2, 3]
    assert int(story.state.groups[1].num_cached) == 2
    assert story.found(TEXT[:8]) == 7


@pytest.mark.long
def test_a_prefix_is_found_where_every_group_has_what_is_seen():
    story = Story()
    story.start(0, TEXT[:20])
    assert (story.columns(0), story.columns(1)) == ([0, 1, 2, 3, 4], [3, 4])
    story.do("release", 0)
    assert [story.found(TEXT[:n]) for n in (20, 12, 5)] == [19, 11, 4]
    story.start(0, OTHER[:12])  # takes the empty block, and those that left the window first
    story.do("release", 0)
    # The first two blocks are in one group only. After the third block the next token still sees the second, but three
    # tokens later it does not.
    assert [story.found(TEXT[:n]) for n in (20, 17, 16, 14, 13, 5)] == [19, 16, 15, 13, 0, 0]
    assert sum(group == 0 for group, *_ in kvjax.events.index_of(story.state)) == 8

    assert story.start(1, TEXT[:20]) == 19
    assert (story.columns(0, 1), story.columns(1, 1)) == ([0, 1, 2, 3, 4], [3, 4])
    # A block that is recomputed for one group only goes there. The other group keeps its block.
    blocks = story.held(0, 1)
    assert story.start(0, TEXT[:12]) == 0
    assert list(story.held(0).values()) == list(blocks.values())[:3]
    assert story.found(TEXT[:12]) == 11


@pytest.mark.long
def test_a_copy_moves_a_window_off_a_block_that_is_gone():
    story = Story(window=4)
    story.start(0, TEXT[:12])
    story.do("release", 0)
    story.start(1, OTHER[:5])  # takes the window group's last empty block, and of the text the first
    story.do("release", 1)
    assert kvjax.events.index_of(story.state).keys() >= {
        (1, 0, tuple(TEXT[:8].tolist())),
        (1, 0, tuple(TEXT[:12].tolist())),
    }
    assert (1, 0, tuple(TEXT[:4].tolist())) not in kvjax.events.index_of(story.state)
    # After 8 tokens the next one sees 3 to 7, so the first block is wanted; after 9 it sees 4 to 8.
    assert story.found([*TEXT[:8], 99]) == 0
    assert story.found([*TEXT[:9], 99]) == 9
    assert story.start(0, np.asarray([*TEXT[:9], 99])) == 9
    assert story.columns(1) == [1, 2]


@pytest.mark.long
def test_without_a_block_for_its_copy_a_prefix_over_a_gap_is_not_taken():
    story = Story(full=5, window=4)
    story.start(0, TEXT[:12])
    story.do("release", 0)
    story.start(1, OTHER[:5])
    blocks = np.asarray(story.state.groups[0].table[1, :2])
    story.do("release", 1)
    story.do("pin", blocks)  # in the first group a block is left, and that the prompt would be copied from
    assert story.found([*TEXT[:9], 99]) == 9
    assert story.start(0, np.asarray([*TEXT[:9], 99])) == 0


@pytest.mark.long
def test_a_tail_is_stored_again_in_a_window_that_lost_it():
    story = Story(window=3)
    story.start(0, TEXT[:6])
    story.do("release", 0)
    story.start(1, OTHER[:12])  # takes all of the window's blocks
    story.do("release", 1)
    assert story.found(TEXT[:8]) == 0
    story.start(0, TEXT[:6])
    story.do("release", 0)
    assert story.found(TEXT[:8]) == 6


@pytest.mark.long
def test_a_cut_over_the_edge_brings_blocks_back_if_they_are_cached():
    story = Story()
    story.start(0, TEXT[:20])
    left = dict(story.held(1))
    story.do("truncate", 0, 14)
    assert story.columns(1) == [2, 3] and story.held(1)[3] == left[3]
    for token in TEXT[14:20]:
        story.step((0, token))
    assert story.held(1) == left  # the same contents again, merged with the cached blocks
    story.start(1, OTHER[:16])  # takes all blocks that are not held
    assert story.status("truncate", 0, 14) != ["OK"]
    story.do("truncate", 0, 17)
    assert story.columns(1) == [3, 4]
    assert story.status("truncate", 0, 3) != ["OK"]
    story.step((0, 99))
    story.do("release", 0)


@pytest.mark.long
def test_forks_and_beams_share_windows():
    story = Story()
    story.start(0, TEXT[:14])
    story.do("fork", 0, 1)
    assert story.held(1) == story.held(1, 1) and story.columns(1) == [2, 3]
    assert story.step((0, 1), (1, 2)) == 2  # one of the rows keeps its last block, in each group
    for token in range(3, 7):
        assert story.step((0, token), (1, token + 10)) == 0
    assert story.columns(1) == story.columns(1, 1) == [3, 4]
    assert not set(story.held(1).values()) & set(story.held(1, 1).values())
    story.do("beam_step", np.array([0, 1]), np.array([1, 1]))
    assert story.held(1) == story.held(1, 1) and story.held(0) == story.held(0, 1)
    for token in range(20, 24):
        story.step((0, token), (1, token + 10))
    story.do("beam_step", np.array([0, 1]), np.array([1, 0]))
    for row in (0, 1):
        story.do("release", row)
    assert all(not np.any(group.blocks.refcount) for group in story.state.groups)


@pytest.mark.slow  # tests/oracle/test_machine.py has sinks too
def test_sinks_stay():
    story = Story(SINKS)
    story.start(0, TEXT[:8])
    for token in TEXT[8:20]:
        story.step((0, token))
    assert (story.columns(0), story.columns(1)) == ([0, 1, 2, 3, 4], [0, 1, 3, 4])
    story.do("release", 0)
    assert story.found(TEXT[:20]) == 19 and story.start(0, TEXT[:20]) == 19
    assert story.columns(1) == [0, 1, 3, 4]
    story.do("release", 0)
    story.start(0, OTHER[:20])  # of six blocks five are its own, and the last one is the first block
    assert story.columns(1) == [0, 1, 3, 4]
    assert story.found(TEXT[:20]) == 4


@pytest.mark.parametrize("verb", ["admit", "beam_step", "commit", "extend", "fork", "lookup", "release", "truncate"])
def test_one_trace_a_shape(verb):
    args = {
        "admit": (0, TEXT, 20), "beam_step": (np.arange(2), np.zeros(2, np.int32)), "fork": (0, 1), "release": (0,),
        "commit": (np.zeros((S, 1), np.int32), np.ones(S, np.int32)), "extend": (np.ones(S, np.bool_),),
        "lookup": (TEXT, 20), "truncate": (0, 1),
    }[verb]  # fmt: skip

    for spec in (BOTH, SINKS):
        chex.clear_trace_counter()
        jitted, state = jax.jit(chex.assert_max_traces(getattr(kvjax, verb), n=1)), kvjax.init(spec)
        for _ in range(3):
            result = jitted.eval_shape(state, *args)
            state = state if verb == "lookup" else result[0]


def test_layers_are_grouped_by_what_they_see():
    layers = [
        kvjax.LayerSpec(1, 8, 32), kvjax.LayerSpec(1, 8), kvjax.LayerSpec(2, 8, 32), kvjax.LayerSpec(1, 8, 16),
        kvjax.LayerSpec(1, 8, 32), kvjax.LayerSpec(1, 8, 16, sink_tokens=4),
    ]  # fmt: skip
    shape = {"max_seqs": 2, "max_length": 64}
    spec = kvjax.make_spec(layers, num_blocks={None: 9, 16: 5, 32: 7}, num_host_blocks={None: 3, 16: 1, 32: 0}, **shape)
    assert [(group.window, group.sink_tokens, group.num_blocks, group.num_host_blocks) for group in spec.groups] == [
        (None, 0, 9, 3), (16, 0, 5, 1), (16, 4, 5, 1), (32, 0, 7, 0)
    ]  # fmt: skip
    assert [[pool.layers for pool in group.pools] for group in spec.groups] == [[(1,)], [(3,)], [(5,)], [(0, 4), (2,)]]
    assert [spec.locate(layer) for layer in range(6)] == [
        (3, 0, 0), (0, 0, 0), (3, 1, 0), (1, 0, 0), (3, 0, 1), (2, 0, 0)
    ]  # fmt: skip
    assert not spec.bare and {each.num_blocks for each in kvjax.make_spec(layers, num_blocks=4, **shape).groups} == {4}

    bare = kvjax.make_spec(layers[:1], num_blocks={32: 7}, **shape)  # blocks for 2 rows of 4, and for cached ones
    assert bare.bare and [group.num_blocks for group in bare.groups] == [2 * 4 + 7, 7]
    assert [array.shape[0] for group in kvjax.init_pools(bare).arrays for array in group] == [8]
    state = kvjax.init(bare, num_blocks=3)
    assert [int(group.num_empty) for group in state.groups] == [15, 3]
    assert not kvjax.make_spec(num_blocks=4, **shape).bare


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([(None,), (8,)], {"num_blocks": {None: 4}}, r"num_blocks: got \{None: 4\}, wanted a number for window 8"),
        ([(None,), (8,)], {"num_blocks": {8: 4}}, r"num_blocks: got \{8: 4\}, wanted a number for window None"),
        ([(8,)], {"num_blocks": 4, "num_host_blocks": {}}, r"num_host_blocks: got \{\}, wanted a number for window 8"),
        ([(8,)], {"num_blocks": {8: 0}}, "num_blocks: got 0, wanted an int of at least 1"),
        ([(0,)], {"num_blocks": 4}, "window: got 0, wanted an int of at least 1"),
        ([(8, -1)], {"num_blocks": 4}, "sink_tokens: got -1, wanted an int of at least 0"),
        ([(None,), (None, 2)], {"num_blocks": 4}, r"layers\[1\].sink_tokens: got 2 without a window, wanted 0"),
    ],
)
def test_windows_that_cannot_be_are_named(layers, options, message):
    with pytest.raises(ValueError, match=message):
        spec_of(*layers, **options)


def test_groups_are_in_order():
    windows = [kvjax.spec.GroupSpec(4, window=8), kvjax.spec.GroupSpec(4)]
    with pytest.raises(
        ValueError, match=r"groups: got windows and sinks \[\(8, 0\), \(None, 0\)\], wanted \(None, 0\)"
    ):
        kvjax.CacheSpec(tuple(windows), block_size=4, max_seqs=1, max_blocks_per_seq=4)
