# SPDX-License-Identifier: Apache-2.0
"""A cancelled request, in any stage, holds nothing after the next step; drained requests hold no slot.

The programs are those of `test_scheduler.py`.
"""

import logging
import re

import jax
import numpy as np
import pytest

from kvjax.serving import cancel, drain, results
from kvjax.serving.requests import Stage
from tests.oracle.bytes_machine import VOCAB
from tests.oracle.serving import COLUMNS, SIZE, SLOTS, program
from tests.unit.serving.stories import OVERCOMMITS, Story

pytestmark = pytest.mark.long
PROMPT = [1, 2, 0, 1, 2, 2, 0, 0, 1, 2, 0, 1, 1, 0]  # three blocks and a half, computed in three chunks
BLOCKS = 24
_cancel, _drain = jax.jit(cancel), jax.jit(drain)

# The situation of the first named request when it is cancelled, its slot, and the steps until then. The slots 0, 1 and
# 2 share a prompt.
SITUATIONS = {
    "waits for a prefix": (1, 1),
    "prefills": (0, 1),
    "decodes": (0, 4),
    "leads samples": (0, 1),
    "holds a row as a sample": (2, 1),
    "waits as a sample": (2, 0),
}


def does(serving, slot, situation):
    """Whether request `slot` is in a situation."""
    requests, having = serving.requests, np.flatnonzero(np.asarray(serving.row) == slot)
    row = having[0] if having.size else None
    if situation.startswith("waits"):
        sample = int(requests.parent[slot]) >= 0
        return row is None and requests.stage[slot] == Stage.WAITING and sample == (situation == "waits as a sample")
    if situation == "holds a row as a sample":
        return int(requests.parent[slot]) == 0 and not int(serving.cache.state.seqs.length[row])
    rows = {"prefills": serving.prefilling, "decodes": serving.decoding, "leads samples": serving.leads}
    return bool(rows[situation][row])


def holders(serving):
    """The held blocks; those in the tables of rows; and the slots of the requests that have rows."""
    (group,) = serving.cache.state.groups
    held = np.flatnonzero(np.asarray(group.blocks.refcount))
    tables = np.unique(np.asarray(group.table))
    return held.tolist(), tables[tables >= 0].tolist(), [slot for slot in np.asarray(serving.row).tolist() if slot >= 0]


def assert_nothing_is_held(serving):
    assert holders(serving) == ([], [], [])
    assert (np.asarray(serving.requests.stage) == Stage.EMPTY).all()
    assert int(serving.cache.state.groups[0].available) == BLOCKS
    for name in ("leads", "out_of_blocks", "skipped_steps", "refused", "chunks_deferred"):
        assert not np.asarray(getattr(serving, name)).any(), name
    assert not bool(serving.busy)
    assert results(serving) == {}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("others", [True, False])
def test_a_cancelled_request_holds_nothing_after_the_next_step(situation, others):
    """If it was alone, no block is held then. With others, only blocks that they hold are held."""
    slot, steps = SITUATIONS[situation]
    samples = "sample" in situation
    story = Story(BLOCKS)
    _, _, generations = story.submit(
        PROMPT, *[PROMPT] * 2 * (samples or slot > 0), new=6, sample_of=[-1, 0, 0] if samples else -1
    )
    if others:
        story.submit([2, 2, 0, 1, 0], [2, 0] * 4, new=8)
    story.step(steps) if steps else None
    assert does(story.serving, slot, situation)
    named = np.array([slot], np.int32), np.array([generations[slot]], np.int32)
    story.serving, _ = _cancel(story.serving, *named)
    before = results(story.serving)[slot, generations[slot]]
    story.step()
    held, tables, slots = holders(story.serving)
    assert slot not in slots
    assert held == tables
    alone = situation in ("prefills", "decodes") and not others
    assert (held == []) == alone
    assert all(stage == Stage.RUNNING for stage in np.asarray(story.serving.requests.stage)[slots])
    found = story.until_done()
    assert found[slot, generations[slot]] == before
    assert before.finish == "cancelled"
    assert {output.finish for name, output in found.items() if name[0] != slot} == (set() if alone else {"length"})
    story.step()
    story.serving = _drain(story.serving)
    assert_nothing_is_held(story.serving)


def compiled(caplog):
    """The names of the compiled programs."""
    messages = (record.getMessage() for record in caplog.records)
    return [name for message in messages for name in re.findall(r"^Compiling jit\((\w+)\)", message)]


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_round_of_2000_requests(caplog):
    """Requests of all kinds come, some are cancelled, and all are drained."""
    story, rng, ends = Story(BLOCKS), np.random.default_rng(0), []

    def round_of_all(cancels):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, COLUMNS * SIZE - 3)).tolist() for _ in range(3)]
        lead = [-1, *rng.integers(-1, 1, 2)]
        prompts = [prompt if of < 0 else prompts[0] for prompt, of in zip(prompts, lead, strict=True)]
        story.submit(*prompts, new=rng.integers(1, 4, 3), priority=rng.integers(3, size=3), sample_of=lead)
        story.step(int(rng.integers(1, 7)))
        slot = rng.integers(SLOTS, size=1).astype(np.int32)
        if cancels:
            story.serving, _ = _cancel(story.serving, slot, np.asarray(story.serving.requests.generation)[slot])
        ends.extend(output.finish for output in results(story.serving).values() if output.finish)
        story.serving = _drain(story.serving)

    def something_new(x):
        return x + 1

    round_of_all(True)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        while int(story.serving.arrivals) < 2000:
            round_of_all(rng.random() < 0.2)
        jax.jit(something_new)(np.int32(1))
    assert compiled(caplog) == ["something_new"]
    assert {"length", "cancelled"} <= set(ends)
    assert program(OVERCOMMITS)._cache_size() == 1
    story.until_done()
    story.step()
    story.serving = _drain(story.serving)
    assert_nothing_is_held(story.serving)
