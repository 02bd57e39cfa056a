# SPDX-License-Identifier: Apache-2.0
"""Window groups: the blocks of a growing row, of a prefix that is found again, and of a row that is cut."""

import jax
import numpy as np
import pytest

import kvjax
from benchmarks import kinds

P, S, T, WINDOW = 4, 3, 24, 6  # the next token sees 5 before it


def spec_of(*layers, **options):
    """A cache for layers given as (window, sink tokens); 24 blocks of full attention, 6 of each window."""
    options = {"num_blocks": {None: 24, WINDOW: 6}, "max_seqs": S, "max_length": T, "block_size": P, **options}
    return kvjax.make_spec([kvjax.LayerSpec(1, 1, *layer) for layer in layers], **options)


@pytest.mark.slow
def test_a_row_holds_what_its_window_needs_and_no_more():
    """A window of 32 in blocks of 16 needs 3 blocks, and in prefill those of a chunk. The group has no more."""
    most, chunk = -(-32 // 16) + 1, 64 // 16
    layers, blocks = [kvjax.LayerSpec(1, 1), kvjax.LayerSpec(1, 1, 32)], {None: 256, 32: most + chunk}
    spec = kvjax.make_spec(layers, num_blocks=blocks, max_seqs=1, max_length=4096, block_size=16)
    ok, state, chunks, steps = kinds.long_row(spec, 2048, 64, 2048)
    assert ok and np.max(chunks[:, 0, 1]) <= most + chunk and np.max(chunks[:, 1, 1]) <= most
    assert np.max(steps[:, 0, 1]) == np.max(steps[:, 1, 1]) == most
    assert steps[-1, 1].tolist() == [256, 2] and state.seqs.committed.tolist() == [4096]
    kvjax.check(jax.device_get(state))


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
    ],
)
def test_windows_that_cannot_be_are_named(layers, options, message):
    with pytest.raises(ValueError, match=message):
        spec_of(*layers, **options)
