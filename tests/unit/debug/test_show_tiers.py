# SPDX-License-Identifier: Apache-2.0
"""`stats`, `show` and `plot_blocks` of a cache with a window and a host tier."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.debug import Stats, stats
from kvjax.events import Totals
from kvjax.events.transfer import Transfer
from tests.drive import TIERS, VERBS, Driver
from tests.unit.debug import stories
from tests.unit.debug.stories import at, changed, has_colour, pixels

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def state() -> kvjax.CacheState:
    return stories.tiers().state


def test_stats_count_each_group_by_tiers(state):
    rows = {"block_size": 4, "num_rows": 4, "active_rows": 4}
    assert stats(state) == Stats(
        num_blocks=12,
        active_blocks=5 + 1,
        cached_blocks=1,
        empty_blocks=5,
        row_tokens=19,  # rows 2 and 3 are on the host, row 1 has nothing written
        written_slots=19,
        reserved_slots=2,
        cached_slots=3,
        host_blocks=10,
        host_active_blocks=5 + 2,
        host_cached_blocks=1,  # the second block of that text had one token, and no K/V on the device
        host_empty_blocks=2,
        in_transit_blocks=2,
        **rows,
    )
    window = stats(state, 1)
    assert window == Stats(
        num_blocks=12,
        active_blocks=3 + 1,  # of row 0 the first tokens and the last eight; two blocks between have left the window
        cached_blocks=2 + 2 + 1,
        empty_blocks=3,
        row_tokens=4 + 4 + 3,
        written_slots=4 + 4 + 3,
        reserved_slots=2,
        cached_slots=4 * 4 + 3,
        host_blocks=8,
        host_active_blocks=3 + 2,
        host_cached_blocks=1,
        host_empty_blocks=2,
        in_transit_blocks=2,
        **rows,
    )
    assert window.sharing == 1.0 and window.unused_share == pytest.approx(1 - 11 / 16)
    assert str(window).endswith("; on the host 8 blocks: 5 active, 1 cached, 2 empty; 2 on the move")


def test_a_forked_window_is_shared_by_two():
    story = Driver(kvjax.init(TIERS))
    story.start(0, list(range(11, 30)))
    story.do("fork", 0, 2)
    for number, written in ((0, 19), (1, 11)):
        seen = stats(story.state, number)
        assert (seen.row_tokens, seen.written_slots, seen.sharing) == (2 * written, written, 2.0)
    assert (stats(story.state).reserved_slots, stats(story.state, 1).cached_slots) == (0, 8)


def test_totals_count_moves():
    totals = stories.tiers().totals
    assert (totals.offloaded_blocks, totals.onboarded_blocks) == (5 + 3 + 4 + 4, 0)
    assert totals.reused_tokens == 12
    refused = VERBS["release"](kvjax.init(TIERS), 1)[1]
    rows = np.array([[0, 1, 1, 3, 14], [-1] * 5, [1, 2, 1, 15, 2], [0, 4, 1, 4, 13]], np.int32)
    moved = dataclasses.replace(refused, transfer=Transfer(rows))
    assert (Totals().add(moved).offloaded_blocks, Totals().add(moved).onboarded_blocks) == (2, 1)
    twice = Totals().add(jax.tree.map(lambda x: np.stack([x, x]), moved))  # of a scan
    assert (twice.offloaded_blocks, twice.onboarded_blocks, twice.refused) == (4, 2, 2)


def test_show_draws_groups_and_tiers(state):
    legend = [
        "blocks (digit: holders (+: more than 9), c: cached, .: empty; on the host s: swapped out, h: cached,",
        "-: empty; >: on the way there, <: back)",
    ]
    assert kvjax.show(state, max_lines=40).splitlines() == [
        "group 0, full attention: blocks of 4 tokens, rows of up to 6 blocks",
        "12 blocks: 6 active, 1 cached, 5 empty; 22 of 48 slots filled; 4 of 4 rows in use",
        "on the host 10 blocks: 7 active, 1 cached, 2 empty; 2 on the move",
        "",
        "seq 0  19 tokens  blocks 0-4",
        "seq 1  2 tokens (0 written)  blocks 19",
        "seq 2  19 tokens, swapped out  blocks 6-10",
        "seq 3  6 tokens, swapped out  blocks 18 17",
        "",
        "findable, namespace 0:",
        "    0 [11 12 13 14]  1 holder",
        "       1 [15 16 17 18]  1 holder",
        "          2 [19 20 21 22]  1 holder",
        "             3 [23 24 25 26]  1 holder",
        "             5 [77 77 77 .]  cached",
        "    6 [41 42 43 44]  1 holder, on the host",
        "       7 [45 46 47 48]  1 holder, on the host",
        "          8 [49 50 51 52]  1 holder, on the host",
        "             9 [53 54 55 56]  1 holder, on the host",
        "   16 [81 82 83 84]  cached, on the host",
        "   18 [91 92 93 94]  1 holder, on its way to the host",
        "held, not yet findable:",
        "    4 [27 28 29 .]  1 holder",
        "   10 [57 58 59 .]  1 holder, on the host",
        "   17 [95 96 . .]  1 holder, on its way to the host",
        "   19 [. . . .]  1 holder",
        "",
        *legend,
        " 0 11111cssss s.....h>>1 --",
        "",
        "group 1, window of 8 and the first 2: blocks of 4 tokens, rows of up to 6 blocks",
        "12 blocks: 4 active, 5 cached, 3 empty; 30 of 48 slots filled; 4 of 4 rows in use",
        "on the host 8 blocks: 5 active, 1 cached, 2 empty; 2 on the move",
        "",
        "seq 0  19 tokens  blocks 0 - x2, 3 4",
        "seq 1  2 tokens (0 written)  blocks 17",
        "seq 2  19 tokens, swapped out  blocks 6 - x2, 9 10",
        "seq 3  6 tokens, swapped out  blocks 16 15",
        "",
        *legend,
        " 0 1cc11csccs s...h>>1--",
    ]


def test_show_draws_what_comes_back(state):
    coming = changed(state, "groups.0.host.pending_transfer", at([2, 3, 5], 1))
    text = kvjax.show(coming, max_lines=40)
    assert "2 [19 20 21 22]  1 holder, on its way to the device" in text
    assert "5 [77 77 77 .]  cached, on its way to the device" in text
    assert " 0 11<<1<ssss s.....h>>1 --" in text
    assert stats(coming).in_transit_blocks == 5


@pytest.mark.parametrize("width", [40, 100])
def test_show_of_large_tiers_stays_compact(width):
    layers = [kvjax.LayerSpec(1, 4), kvjax.LayerSpec(1, 4, 32)]
    spec = kvjax.make_spec(layers, num_blocks=30_000, num_host_blocks=60_000, max_seqs=2, max_length=4096)
    text = kvjax.show(kvjax.init(spec), width=width, max_lines=5)
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) < 40
    words = [line.strip() for line in text.splitlines()]
    assert words.count("0 to 29,999: empty") == words.count("30,000 to 89,999: empty, on the host") == 2


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([-1] * 12 + [5, 1], "- x12, 5 1"),
        ([3, 4, -1, 7, 8, 9], "3 4 - 7-9"),
        ([2, -1, -1, 1, 0], "2 - x2, 1 0"),
        ([0, 1, 2, -1, -1, -1], "0-2"),
    ],
)
def test_show_shortens_gaps(ids, words):
    layers = [kvjax.LayerSpec(1, 4), kvjax.LayerSpec(1, 4, 8)]
    state = kvjax.init(kvjax.make_spec(layers, num_blocks=12, max_seqs=1, max_length=4 * len(ids), block_size=4))
    state = changed(state, "groups.1.table", lambda x: np.array([ids], np.int32))
    assert f"blocks {words}\n" in kvjax.show(state)


def test_plot_blocks_draws_tiers_and_gaps(state, tmp_path):
    from matplotlib.figure import Figure

    from kvjax.debug.plots import _COLOURS

    for number in range(2):
        picture = pixels(state, tmp_path / f"{number}.png", group=number)
        for kind in ("active", "cached", "empty", "host active", "host cached", "host empty", "moving"):
            assert has_colour(picture, _COLOURS[kind]), kind
        assert not has_colour(picture, _COLOURS["unknown"])
    ax = kvjax.debug.plot_blocks(state, ax=Figure().subplots(), group=1)
    texts = [text.get_text() for text in ax.texts]
    assert texts.count("- x2") == 2
    assert [text.get_text() for text in ax.get_legend().get_texts()][4:] == [
        "not written", "on the host, swapped out", "on the host, cached", "on the host, empty", "on the move",
    ]  # fmt: skip


def test_the_legend_names_copies_on_the_host_where_there_may_be_some():
    from matplotlib.figure import Figure

    options = {"num_blocks": 8, "num_host_blocks": 8, "max_seqs": 2, "max_length": 16, "block_size": 4}
    legends = []
    for backups in (False, True):
        state = kvjax.init(kvjax.make_spec(backups=backups, **options))
        ax = kvjax.debug.plot_blocks(state, ax=Figure().subplots())
        legends.append([text.get_text() for text in ax.get_legend().get_texts()])
    without, with_backups = legends
    assert [name for name in with_backups if name != "on the host, a copy"] == without
    assert without[-1] == "on the move" and len(with_backups) == len(without) + 1
