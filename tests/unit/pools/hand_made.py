# SPDX-License-Identifier: Apache-2.0
"""Caches with tables made by hand."""

import jax.numpy as jnp

import kvjax
from kvjax import LayerSpec, make_spec
from kvjax.events.records import EventKind, Events, Records, joined, record
from kvjax.state import Text

SPEC = make_spec(
    [LayerSpec(2, 16), LayerSpec(1, 32), LayerSpec(2, 16)],
    num_blocks=12, max_seqs=4, max_length=20, block_size=4, dtype="float32",
)  # fmt: skip
# Rows with 6, 0, 9 and 20 reserved tokens, of which 3, 0, 9 and 10 are committed.
LENGTHS, COMMITTED = [6, 0, 9, 20], [3, 0, 9, 10]
TABLE = [[2, 0, -1, -1, -1], [-1] * 5, [5, 7, 1, -1, -1], [3, 4, 6, 8, 9]]


def hand_made_state(committed=COMMITTED, table=TABLE):
    state = kvjax.init(SPEC)
    group = state.groups[0].replace(table=jnp.asarray(table, jnp.int32))
    seqs = kvjax.state.Sequences(*(jnp.asarray(x, jnp.int32) for x in (LENGTHS, committed, [0] * 4)))
    return state.replace(groups=(group,), seqs=seqs)


def no_events(records):
    none = jnp.zeros(1, jnp.int32)
    text = Text(jnp.zeros((records.shape[0], SPEC.block_size), jnp.int32), None)
    return Events(records, text, none, none, none, none[0])


def copied(sources, targets, group=0):
    """Records of copies, with padding and other events between them."""
    real = record(
        EventKind.COPIED, jnp.ones(len(sources), bool),
        source=jnp.asarray(sources), block=jnp.asarray(targets), group=group, num_tokens=2,
    )  # fmt: skip
    other = record(EventKind.REMOVED, jnp.asarray([True, False]), block=jnp.asarray([1, 0]))
    return joined(other, *(joined(line, other) for line in map(Records, real.records[:, None]))).records
