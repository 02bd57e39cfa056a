# SPDX-License-Identifier: Apache-2.0
"""The kernels of `extend` and `commit` against plain jax, bit by bit, over histories that reach every part of them."""

import pytest

import kvjax
from tests.drive import EXTRA, PLAIN
from tests.unit.gpu.histories import History

EXTEND = {
    "extend: OK", "extend: NO_BLOCKS", "extend: BAD_REQUEST", "extend: removed", "extend: copied",
    "squeezed", "copied twice", "a victim refused",
}  # fmt: skip


def spec_of(num_blocks, max_seqs, columns, size, **options):
    return kvjax.make_spec(
        num_blocks=num_blocks, max_seqs=max_seqs, max_length=columns * size, block_size=size, **options
    )


SPECS = {
    "blocks of one token": spec_of(7, 3, 5, 1),
    "of three": spec_of(11, 5, 4, 3, extra_ids=True),
    "of sixteen": spec_of(9, 6, 3, 16),
    "more rows than blocks": spec_of(5, 9, 3, 4),
    "twelve rows": spec_of(24, 12, 4, 4, partial_reuse=False),
    "two rows": spec_of(3, 2, 3, 2),
}


@pytest.mark.parametrize("spec", [PLAIN, pytest.param(EXTRA, marks=pytest.mark.long)], ids=["plain", "extra ids"])
def test_kernels_are_equal_to_plain_jax(spec):
    history = History(spec, seed=2, num_blocks=9)
    reached = history.run(150)
    assert reached.keys() >= EXTEND, EXTEND - reached.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_kernels_are_equal_to_plain_jax_in_other_shapes(name):
    reached = History(SPECS[name], seed=1).run(150)
    assert {"extend: OK", "extend: NO_BLOCKS", "extend: removed"} <= reached.keys()
