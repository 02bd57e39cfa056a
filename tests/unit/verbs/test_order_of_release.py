# SPDX-License-Identifier: Apache-2.0
"""No block is due for eviction before its children, for any order of the blocks given to a verb.

`lru` names the blocks that were released first. A block that still has children cannot leave, so that blocks would be
missing.
"""

import itertools

import numpy as np
import pytest

import kvjax
from tests.drive import PLAIN, Driver, padded

SIZE, CHAIN = 4, 3
HOST = kvjax.make_spec(num_blocks=CHAIN, max_seqs=2, max_length=5 * SIZE, block_size=SIZE, num_host_blocks=4)


def chain(spec):
    """A cache full of one sequence, which row 0 holds, and its chain of blocks."""
    driver = Driver(kvjax.init(spec, num_blocks=CHAIN))
    driver.start(0, range(CHAIN * SIZE))
    blocks = np.asarray(driver.state.groups[0].table)[0, :CHAIN]
    return driver, blocks


def assert_all_can_leave(driver):
    """Asserts that other prompts can evict one block after the other."""
    for i in range(CHAIN):
        assert driver.admit(i % 2, [100 + i] * SIZE) == ["OK"]
        driver.do("release", i % 2)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_blocks_of_released_rows_can_leave(num_rows):
    driver, _ = chain(PLAIN)
    if num_rows == 2:
        driver.do("fork", 0, 1)
    driver.do("release", np.arange(num_rows))
    assert_all_can_leave(driver)


@pytest.mark.parametrize("order", [*itertools.permutations(range(CHAIN))], ids=str)
def test_unpinned_blocks_can_leave(order):
    driver, blocks = chain(PLAIN)
    driver.do("pin", blocks[list(order)])
    driver.do("release", 0)
    driver.do("unpin", blocks[list(order)])
    assert_all_can_leave(driver)


@pytest.mark.slow
@pytest.mark.parametrize("named", [[2], [1, 2], [2, 1], [0, 1, 2], [1, 0, 2]], ids=str)
def test_what_came_back_from_the_host_and_its_prefix_can_leave(named):
    driver, blocks = chain(HOST)
    driver.do("release", 0)
    blocks_of_call = padded(blocks[named], CHAIN, kvjax.state.NO_BLOCK)
    driver.do("offload", blocks_of_call)
    driver.do("onboard", blocks_of_call)
    assert_all_can_leave(driver)
