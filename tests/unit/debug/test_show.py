# SPDX-License-Identifier: Apache-2.0
"""`show`, `stats` and `plot_blocks` of a cache with known contents, and of broken ones."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import cache
from kvjax.debug import Stats, stats
from kvjax.debug.plots import plot_blocks
from kvjax.debug.text import show
from kvjax.spec import make_spec
from tests.drive import PLAIN as SPEC
from tests.drive import TIERS, VERBS, Driver
from tests.unit.debug import stories
from tests.unit.debug.stories import has_colour, pixels


@pytest.fixture(scope="module")
def story() -> Driver:
    return stories.plain()


def test_stats_count_blocks_slots_and_rows(story):
    assert stats(story.state) == Stats(
        block_size=4,
        num_blocks=12,
        active_blocks=7,
        cached_blocks=2,
        empty_blocks=3,
        num_rows=4,
        active_rows=4,
        row_tokens=6 + 9 + 2 + 6,
        written_slots=4 + (2 + 2) + (4 + 1) + 2,  # the shared block once, both copies of the tail, rows 1 and 2
        reserved_slots=2 + 1,  # row 0 grew from 6 to 9 tokens: the rest of one block and the first of another
        cached_slots=4 + 1,
    )


def test_stats_figures(story):
    seen = stats(story.state)
    assert seen.total_slots == 48
    assert seen.filled_slots == 20
    assert seen.active_share == pytest.approx(7 / 12)
    assert seen.filled_share == pytest.approx(20 / 48)
    assert seen.unused_share == pytest.approx(1 - 15 / 28)
    assert seen.sharing == pytest.approx(23 / 15)
    assert str(seen) == "12 blocks: 7 active, 2 cached, 3 empty; 20 of 48 slots filled; 4 of 4 rows in use"


def test_stats_of_an_empty_cache_divide_by_nothing():
    seen = stats(cache.init(SPEC))
    assert (seen.active_share, seen.filled_share, seen.unused_share, seen.sharing) == (0, 0, 0, 1)


def test_stats_leave_out_blocks_beyond_the_capacity():
    seen = stats(cache.init(SPEC, num_blocks=5))
    assert (seen.num_blocks, seen.empty_blocks, seen.total_slots) == (5, 5, 20)


def test_stats_want_one_cache():
    states = jax.vmap(lambda n: cache.init(SPEC, num_blocks=n))(jnp.array([3, 4]))
    with pytest.raises(ValueError, match="batch axes"):
        stats(states)
    assert stats(jax.tree.map(lambda x: x[1], states)).num_blocks == 4


def test_totals_add_up_the_events(story):
    totals = story.totals
    assert totals.queried_tokens == 6 + 9 + 9 + 2
    assert totals.reused_tokens == 4 + 4
    assert totals.reused_share == pytest.approx(8 / 26)
    assert (totals.stored_blocks, totals.removed_blocks, totals.copied_blocks, totals.refused) == (4, 0, 1, 0)
    _, refusal = VERBS["release"](cache.init(SPEC), 1)
    assert totals.add(refusal).refused == 1


def test_show_draws_the_whole_of_a_small_cache(story):
    assert show(story.state) == "\n".join(
        [
            "blocks of 4 tokens, rows of up to 5 blocks",
            "12 blocks: 7 active, 2 cached, 3 empty; 20 of 48 slots filled; 4 of 4 rows in use",
            "",
            "seq 0  9 tokens (6 written)  blocks 0 7 8",
            "seq 1  9 tokens  blocks 0 2 3",
            "seq 2  2 tokens  blocks 6",
            "seq 3  6 tokens  blocks 0 1",
            "",
            "shared prefixes and their branches:",
            "0       seqs 0 1 3  4 tokens  11 12 13 14",
            "   7 8  seq 0       2 tokens  15 16",
            "   2 3  seq 1       5 tokens  21 22 23 24 25",
            "   1    seq 3       2 tokens  15 16",
            "",
            "findable, namespace 0:",
            "    0 [11 12 13 14]  3 holders",
            "       2 [21 22 23 24]  1 holder",
            "       4 [31 32 33 34]  cached",
            "          5 [35 . . .]  cached",
            "held, not yet findable:",
            "    1 [15 16 . .]  1 holder",
            "    3 [25 . . .]  1 holder",
            "    6 [7 7 . .]  1 holder",
            "    7 [15 16 . .]  1 holder",
            "    8 [. . . .]  1 holder",
            "",
            "blocks (digit: holders (+: more than 9), c: cached, .: empty)",
            " 0 3111cc111. ..",
        ]
    )


def test_show_draws_an_empty_cache():
    text = show(cache.init(SPEC, num_blocks=5))
    assert "no row in use" in text
    assert text.endswith("\n 0 .....")  # the seven others are out of use


def test_show_says_when_it_leaves_its_tree_out(story):
    few, all_of_it = show(story.state, max_lines=8), show(story.state, max_lines=9)
    assert "the tree of 9 blocks is left out; show(state, max_lines=9) draws it" in few.splitlines()
    assert "findable, namespace 0:" in all_of_it and "left out" not in all_of_it and "findable, namespace" not in few


@pytest.mark.parametrize("num_blocks", [1, 11, 160, 161, 4096, 1_000_003])
def test_show_stays_compact(num_blocks):
    state = cache.init(make_spec(num_blocks=num_blocks, max_seqs=64, max_length=4096))
    rows = np.full((64, 256), -1, np.int32)
    rows[:, :200] = np.random.default_rng(0).integers(0, num_blocks, (64, 200))
    group = state.groups[0].replace(table=rows)
    state = state.replace(groups=(group,))
    for width in (40, 100):
        lines = show(state, width=width, max_lines=5).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= 32
        assert "and 59 more rows in use" in lines
    legend = next(n for n, line in enumerate(lines) if line.startswith("blocks ("))
    per_cell = int(lines[legend].split()[4].replace(",", "")) if "a character for" in lines[legend] else 1
    assert mapped(lines[legend + 1 :], per_cell) == -(-num_blocks // per_cell) * per_cell


def mapped(lines, per_cell):
    """The number of blocks in the lines of a map."""
    words = [line.replace(",", "").split() for line in lines]
    ranges = [int(line[2].rstrip(":")) + 1 - int(line[0]) for line in words if line[1] == "to"]
    return sum(ranges) + per_cell * sum(len("".join(line[1:])) for line in words if line[1] != "to")


def filled(num_blocks):
    """A cache of any size in which two rows share one block and have one more each."""
    state = cache.init(make_spec(num_blocks=num_blocks, max_seqs=32, max_length=64, block_size=4))
    table, lengths = np.full((32, 16), -1, np.int32), np.zeros(32, np.int32)
    table[:2, :2], lengths[:2] = [[0, 1], [0, 2]], 5
    blocks = state.groups[0].blocks
    text = blocks.text.replace(tokens=blocks.tokens.at[:3].set([[1, 2, 3, 4], [5] * 4, [6] * 4]))
    state = broken(state, refcount=blocks.refcount.at[:3].set([2, 1, 1]), fill=blocks.fill.at[0].set(4), text=text)
    state = with_table(state, table)
    return state.replace(seqs=state.seqs.replace(length=lengths, committed=lengths))


def with_table(state, table):
    return state.replace(groups=(state.groups[0].replace(table=table), *state.groups[1:]))


def test_show_counts_the_blocks_in_use():
    """A pool of any size with few blocks in use is shown block by block, with its contents."""
    small, large = show(filled(12)).splitlines(), show(filled(5000)).splitlines()
    assert "    0 [1 2 3 4]  2 holders" in large and small[2:-1] == large[2:-2]
    assert large[-3:] == [
        "blocks (digit: holders (+: more than 9), c: cached, .: empty)",
        "    0 211....... .......... .......... .......... .......... .......... .......... ..........",
        "   80 to 4,999: empty",
    ]
    state = filled(5000)
    state = broken(state, refcount=state.groups[0].blocks.refcount.at[4500:4560].set(1))
    full = show(state).splitlines()
    assert not any(line.startswith("findable") for line in full)
    assert full[-3:] == [
        "   80 to 4,479: empty",
        "4,480 .......... .........." + 6 * " 1111111111",
        "4,560 to 4,999: empty",
    ]


def test_show_draws_what_rows_share():
    lines = show(filled(12)).splitlines()
    assert lines[lines.index("shared prefixes and their branches:") :][1:5] == [
        "0     seqs 0 1  4 tokens  1 2 3 4",
        "   1  seq 0     1 tokens  5",
        "   2  seq 1     1 tokens  6",
        "",
    ]


def shared_by(tables, **options):
    """The lines of `show` about the sharing of rows with these tables."""
    table = np.full((32, 16), -1, np.int32)
    for seq, blocks in enumerate(tables):
        table[seq, : len(blocks)] = blocks
    parts = show(with_table(cache.init(filled(64).spec), table), **options).split("\n\n")
    return [
        line.removesuffix("nothing written").rstrip() for part in parts if "shared" in part for line in part.split("\n")
    ]


def test_show_puts_together_what_rows_share_further_on():
    tables = [[7], [0, 1, 2], [0, 1, 2, 5, 6], [8, 9], [0, 1, 3], [0, 1, 3]]
    assert shared_by(tables)[1:] == [
        "0 1        seqs 1 2 4 5",
        "   2       seqs 1 2",
        "      5 6  seq 2",
        "   3       seqs 4 5",
    ]
    assert shared_by([[0, 1], [1, 0]]) == []
    crowd = [*tables, *([0, 20 + n] for n in range(10))]
    assert shared_by(crowd)[1:] == [
        "0             seqs 1 2 4-15",
        "   1          seqs 1 2 4 5",
        "      2       seqs 1 2",
        "         5 6  seq 2",
        "      3       seqs 4 5",
        "   ...        seqs 6-15, each alone",
    ]
    assert shared_by(crowd, max_lines=2)[1:] == ["0     seqs 1 2 4-15", "   1  seqs 1 2 4 5", "and more branches"]
    assert max(map(len, show(filled(64), width=40).splitlines())) <= 40


@pytest.mark.parametrize("ids", ["4 9", "3-7", "7-3", "1 2", "5 4 2-0 9 9", "0 1 3-5 8"])
def test_show_shortens_runs_of_blocks_and_nothing_else(ids):
    expand = {"3-7": [3, 4, 5, 6, 7], "7-3": [7, 6, 5, 4, 3], "2-0": [2, 1, 0], "3-5": [3, 4, 5]}
    table = [block for word in ids.split() for block in expand.get(word, [int(word)] if "-" not in word else [])]
    state = cache.init(make_spec(num_blocks=12, max_seqs=1, max_length=4 * len(table), block_size=4))
    group = state.groups[0].replace(table=np.array([table], np.int32))
    assert f"blocks {ids}\n" in show(state.replace(groups=(group,)))


def broken(state, **arrays):
    blocks = state.groups[0].blocks
    table = arrays.pop("table", state.groups[0].table)
    group = state.groups[0].replace(blocks=blocks.replace(**arrays), table=table)
    return state.replace(groups=(group,))


def test_broken_states_can_be_shown(story):
    """`check` shows the broken state, so `show` must not follow circles or go out of range."""
    blocks, generation = story.state.groups[0].blocks, int(story.state.groups[0].blocks.generation[4])
    circle = broken(story.state, parent=blocks.parent.at[0].set(jnp.array([4, generation])))
    assert "NO WAY TO A ROOT   0 [" in show(circle)
    dangling = broken(story.state, parent=blocks.parent.at[4].set(jnp.array([99, 1])))
    assert "NO WAY TO A ROOT   4 [" in show(dangling)
    wild = broken(
        story.state,
        table=jnp.full_like(story.state.groups[0].table, 77),
        refcount=blocks.refcount.at[3].set(1000).at[2].set(-5),
        fill=blocks.fill.at[0].set(99),
        text=blocks.text.replace(tokens=blocks.tokens.at[0].set(-(2**31))),
    )
    assert "blocks 77 77 77" in show(wild)
    assert "1000 holders" in show(wild)
    for state in (circle, dangling, wild):
        stats(state)
        plot_blocks(state)


def test_plot_blocks_draws_every_condition(story, tmp_path):
    from kvjax.debug.plots import _COLOURS

    picture = pixels(story.state, tmp_path / "map.png", title="a map")
    assert min(picture.shape[:2]) > 200
    for kind in ("active", "shared", "cached", "empty"):
        assert has_colour(picture, _COLOURS[kind])
    assert not has_colour(picture, _COLOURS["unknown"])


@pytest.mark.long
def test_plot_blocks_draws_a_large_cache_and_long_rows(tmp_path):
    state = cache.init(make_spec(num_blocks=100_000, max_seqs=40, max_length=8192))
    table = jnp.arange(40 * 512, dtype=jnp.int32).reshape(40, 512)
    picture = pixels(broken(state, table=table, refcount=jnp.ones(100_000, jnp.int32)), tmp_path / "big.png")
    assert picture.shape[1] > 1000


def test_plot_blocks_draws_into_given_axes(story):
    from matplotlib.figure import Figure

    before, after = Figure().subplots(1, 2)
    assert plot_blocks(cache.init(SPEC), ax=before, title="before") is before
    assert plot_blocks(story.state, ax=after) is after
    assert "before" in before.get_title(loc="left")
    assert "7 active" in after.get_title(loc="left")


def test_the_legend_has_the_cells_own_colours(story):
    from matplotlib.patches import Rectangle

    ax = plot_blocks(story.state)
    cells = {tuple(colour) for colour in ax.collections[0].get_facecolor()}
    assert cells <= {patch.get_facecolor() for patch in ax.get_legend().findobj(Rectangle)}


def test_without_matplotlib_the_extra_is_named(story, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"kvjax\[plot\]"):
        plot_blocks(story.state)


# In one line, and in a notebook.

CACHE = make_spec([kvjax.LayerSpec(2, 4)], num_blocks=4, max_seqs=2, max_length=8, block_size=4, dtype="float32")


def test_a_cache_in_one_line(story):
    shape = "blocks of 4 tokens, 4 rows of up to 5 blocks"
    assert repr(story.state) == f"CacheState({shape}; {stats(story.state)})" == str(story.state)
    shape = "blocks of 4 tokens, 2 rows of up to 2 blocks, 1.2 KiB of K/V"
    empty = "4 blocks: 0 active, 0 cached, 4 empty; 0 of 16 slots filled; 0 of 2 rows in use"
    assert repr(kvjax.Cache.create(CACHE)) == f"Cache({shape}; {empty})"
    assert repr(jax.device_get(kvjax.Cache.create(CACHE))) == f"Cache({shape}; {empty})"
    group = dataclasses.replace(CACHE.groups[0], num_host_blocks=8)
    tiered = repr(kvjax.tiers.TieredCache.create(dataclasses.replace(CACHE, groups=(group,))))
    assert tiered.startswith(f"TieredCache({shape}, 2.0 KiB on the host; 4 blocks: 0 active")
    assert "on the host 8 blocks: 0 active, 0 cached, 8 empty" in tiered
    windows = repr(cache.init(TIERS))
    assert windows.count("\n") == 0 and "; group 1, window of 8 and the first 2: 12 blocks: " in windows


def test_a_cache_that_cannot_be_counted_says_why():
    shape = "blocks of 4 tokens, 2 rows of up to 2 blocks, 1.2 KiB of K/V; 4 blocks"
    shown, cache = [], kvjax.Cache.create(CACHE)

    def show_all(cache):
        shown.append((repr(cache), repr(cache.state), cache._repr_html_(), cache.state._repr_html_()))
        return cache

    shapes = jax.eval_shape(show_all, cache)
    batch = jax.vmap(show_all)(jax.tree.map(lambda x: jnp.stack([x, x]), cache))
    for found in shown:
        assert found == (
            f"Cache({shape}; traced)", "CacheState(blocks of 4 tokens, 2 rows of up to 2 blocks; 4 blocks; traced)",
            f"<pre>Cache({shape}; traced)</pre>",
            "<pre>CacheState(blocks of 4 tokens, 2 rows of up to 2 blocks; 4 blocks; traced)</pre>",
        )  # fmt: skip
    assert repr(shapes) == f"Cache({shape}; shapes alone)"
    assert repr(batch) == f"Cache({shape}; batched, [2])"
    for odd in (lambda x: 0, lambda x: None, lambda x: object()):
        assert repr(jax.tree.map(odd, cache)) == f"Cache({shape}; shapes alone)"
    assert repr(jax.tree.map(lambda x: x.sum(), cache)) == f"Cache({shape}; of other shapes)"
    for leaf in jax.tree.leaves(cache.pools):
        leaf.delete()
    assert repr(cache) == f"Cache({shape}; donated)"
    assert "4 empty" in repr(cache.state)


def test_a_notebook_draws_what_show_does(story):
    page = story.state._repr_html_()
    assert page.startswith("<pre>CacheState(") and show(story.state).splitlines()[-1] in page
    broken_page = broken(story.state, parent=story.state.groups[0].blocks.parent.at[4].set(jnp.array([99, 1])))
    assert "NO WAY" in broken_page._repr_html_()
