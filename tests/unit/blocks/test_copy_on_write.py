# SPDX-License-Identifier: Apache-2.0
"""A row that copies its last block into the place of a cached block."""

import pytest

import kvjax
from tests.drive import PLAIN, Driver

SEQS = range(PLAIN.max_seqs)


@pytest.mark.parametrize("seq", SEQS)
def test_a_child_of_the_block_that_is_copied_can_leave(seq):
    """Every row's number is tried: it marks the block's refcount while the child is claimed."""
    cache = Driver(kvjax.init(PLAIN, num_blocks=4))
    cache.start(seq, range(1, 13))
    cache.do("truncate", seq, 6)  # into a block that has a cached child
    cache.start((seq + 1) % len(SEQS), [90, 91])
    assert int(cache.state.groups[0].num_empty) == 0
    counts = [int(row == seq) for row in SEQS]
    assert cache.grow(*counts) == ["OK"] * len(SEQS)
    assert [event["kind"] for event in kvjax.to_list(cache.events)] == ["removed", "copied"]


def test_a_prompt_is_never_found_whole():
    """Its last token has to be computed, so that there are logits."""
    cache, prompt = Driver(kvjax.init(PLAIN)), [*range(1, 2 * PLAIN.block_size + 1)]
    cache.start(0, prompt)
    cache.do("release", 0)
    assert cache.found([*prompt, 99]) == len(prompt) and cache.found(prompt) == len(prompt) - 1
