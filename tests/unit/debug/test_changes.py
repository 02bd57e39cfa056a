# SPDX-License-Identifier: Apache-2.0
"""`show(state, since=)` of two states shows only the changes, or that nothing changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.spec import make_spec
from tests.drive import PLAIN, TIERS, Driver
from tests.unit.debug import stories


@pytest.fixture(scope="module")
def moments():
    """States of one cache, step by step."""
    story = Driver(kvjax.init(PLAIN))
    found = [story.state]
    for step in (
        lambda: story.start(0, [11, 12, 13, 14, 15, 16]),
        lambda: story.do("fork", 0, 1),
        lambda: story.grow(3, 1, 0, 0),
        lambda: story.do("release", 0),
    ):
        step()
        found.append(story.state)
    return found


STEPS = [
    [
        "12 blocks: 0 -> 2 active, 0 cached, 12 -> 10 empty; 0 -> 1 of 4 rows in use", "",
        "seq 0  new, 6 tokens  gains 0 1", "",
        "empty -> 1 holder                0",
        "empty -> 1 holder, not findable  1",
    ],
    [
        "12 blocks: 2 active, 0 cached, 10 empty; 1 -> 2 of 4 rows in use", "",
        "seq 1  new, 6 tokens  gains 0 1", "",
        "              1 holder -> 2 holders                0",
        "1 holder, not findable -> 2 holders, not findable  1",
    ],
    [
        "12 blocks: 2 -> 4 active, 0 cached, 10 -> 8 empty; 2 of 4 rows in use", "",
        "seq 0  6 -> 9 tokens (6 written)  gains 2 3  loses 1",
        "seq 1  6 -> 7 tokens (6 written)", "",
        "2 holders, not findable -> 1 holder, not findable  1",
        "                  empty -> 1 holder, not findable  2 3",
    ],
    [
        "12 blocks: 4 -> 2 active, 0 -> 1 cached, 8 -> 9 empty; 2 -> 1 of 4 rows in use", "",
        "seq 0  free, had 9 tokens  loses 0 2 3", "",
        "             2 holders -> 1 holder  0",
        "1 holder, not findable -> cached    2",
        "1 holder, not findable -> empty     3",
    ],
]  # fmt: skip


def test_show_draws_what_has_changed(moments):
    for n, wanted in enumerate(STEPS):
        assert kvjax.show(moments[n + 1], since=moments[n], width=80).splitlines() == wanted


def test_any_two_states_can_be_compared(moments):
    back = kvjax.show(moments[0], since=moments[-1]).splitlines()
    assert back[0] == "12 blocks: 2 -> 0 active, 1 -> 0 cached, 9 -> 12 empty; 1 -> 0 of 4 rows in use"
    assert back[-1].split() == ["cached", "->", "empty", "2"]
    fewer = kvjax.show(kvjax.init(PLAIN, num_blocks=5), since=moments[0])
    assert fewer == "12 -> 5 blocks: 0 active, 0 cached, 12 -> 5 empty; 0 of 4 rows in use\n\nempty -> not in use  5-11"


def test_show_says_that_nothing_has_changed(moments):
    again = jax.tree.map(jnp.array, moments[3])
    assert kvjax.show(again, since=moments[3]) == "nothing has changed"
    blocks = again.groups[0].blocks
    ticked = again.replace(groups=(again.groups[0].replace(blocks=blocks.replace(clock=blocks.clock + 1)),))
    assert kvjax.show(ticked, since=again) == "no row and no block has changed, but .groups[0].blocks.clock"
    other_policy = kvjax.show(kvjax.init(PLAIN, kvjax.policies.fifo()), since=kvjax.init(PLAIN))
    assert other_policy.startswith("no row and no block has changed, but .groups[0].policy")


def test_contents_that_were_replaced_are_a_change(moments):
    group = moments[-1].groups[0]
    blocks = group.blocks.replace(generation=group.blocks.generation.at[2].add(1))
    text = kvjax.show(moments[-1].replace(groups=(group.replace(blocks=blocks),)), since=moments[-1])
    assert text.splitlines()[-1] == "cached -> cached, other contents  2"


@pytest.mark.slow
def test_groups_and_tiers_are_compared():
    state = stories.tiers().state
    text = kvjax.show(state, since=kvjax.init(TIERS), width=80).splitlines()
    assert max(map(len, text)) <= 80
    assert "on the host 10 blocks: 0 -> 7 active, 0 -> 1 cached, 10 -> 2 empty; 0 -> 2 on" in text
    assert "group 1, window of 8 and the first 2: 12 blocks: 0 -> 4 active, 0 -> 5 cached," in text
    assert "seq 2  new, 19 tokens, swapped out  gains 6 9 10" in text
    assert "empty, on the host -> 1 holder, on its way to the host                18" in text
    assert not any(line.startswith("empty, on the host -> empty") for line in text)  # they only changed their pool rows
    group = state.groups[1].replace(
        host=state.groups[1].host.replace(pending_transfer=state.groups[1].host.pending_transfer * 0)
    )
    arrived = kvjax.show(state.replace(groups=(state.groups[0], group)), since=state).splitlines()
    assert arrived[0].startswith("group 1, ") and arrived[-1].endswith("-> 1 holder, on the host                16")
    seqs = state.seqs.replace(swapped=state.seqs.swapped.at[2].set(False))
    assert "seq 2  19 tokens, swapped in" in kvjax.show(state.replace(seqs=seqs), since=state)


def test_many_changes_stay_compact():
    state = kvjax.init(make_spec(num_blocks=5000, max_seqs=64, max_length=4096))
    rng = np.random.default_rng(0)
    table = np.full((64, 256), -1, np.int32)
    table[:, :200] = rng.integers(0, 5000, (64, 200))
    blocks = state.groups[0].blocks.replace(refcount=rng.integers(0, 99, 5000, dtype=np.int32))
    full = state.replace(groups=(state.groups[0].replace(table=table, blocks=blocks),))
    for width in (40, 100):
        lines = kvjax.show(full, since=state, width=width, max_lines=5).splitlines()
        assert max(map(len, lines)) <= width and len(lines) < 20
        assert "and 59 more rows" in lines and lines[-1].startswith("and 4,") and lines[-1].endswith("more blocks")


def test_states_of_other_specs_are_refused(moments):
    with pytest.raises(ValueError, match=r"^since: got a state of another spec, wanted a state of the same spec as"):
        kvjax.show(moments[0], since=kvjax.init(TIERS))
    spec = make_spec([kvjax.LayerSpec(2, 4)], num_blocks=4, max_seqs=2, max_length=8, block_size=4, dtype="float32")
    with pytest.raises(ValueError, match=r"^since: got a Cache, wanted a CacheState, such as an earlier cache.state$"):
        kvjax.show(moments[0], since=kvjax.Cache.create(spec))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), moments[0])
    with pytest.raises(ValueError, match="batch axes"):
        kvjax.show(moments[0], since=batch)
