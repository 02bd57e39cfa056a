# SPDX-License-Identifier: Apache-2.0
"""Attention of a kernel over chosen blocks of a view, with NaN in all other blocks."""

from unittest import mock

import jax.numpy as jnp
import numpy as np

import kvjax
import pallas_kernels
from pallas_kernels.by_token import is_by_token
from tests.kernels.attention import Case, oracle


def check_chosen(case: Case, module, counts, *, columns, **options):
    """Compares `attend` by a module of kernels with the oracle over the chosen tokens.

    The view has the last counts of each row's tokens, and is ragged unless each row has one. Of the blocks before them
    rows read those where columns bool[R, M].
    """
    size, counts, lengths = case.block_size, np.array(counts), case.lengths
    starts = np.cumsum(counts) - counts
    is_decode = set(counts.tolist()) == {1}
    is_read = columns | (np.arange(columns.shape[1]) >= ((lengths - counts) // size)[:, None])
    pool_rows = case.tables[~is_read & (np.arange(columns.shape[1]) * size < lengths[:, None])]
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(case.kv[0].shape[2], case.width)] * case.pool.shape[1],
        num_blocks=case.pool.shape[0] - 1,
        max_seqs=len(lengths),
        max_length=columns.shape[1] * size,
        block_size=size,
        dtype=case.dtype,
        layout="tokens" if is_by_token(case.pool) else "heads",
        sparse=True,
    )
    pools = kvjax.pools.Pools(((case.pool.at[pool_rows].set(jnp.nan),),), spec)
    shape = (len(lengths), 1) if is_decode else (1, int(counts.sum()))
    positions = np.concatenate([np.arange(end - count, end) for end, count in zip(lengths, counts, strict=True)])
    arrays = [jnp.asarray(x, jnp.int32) for x in (positions.reshape(shape), lengths, counts, starts)]
    view = kvjax.pools.View(
        (jnp.asarray(case.tables),), arrays[0], arrays[1], (arrays[0],), arrays[2], None if is_decode else arrays[3]
    ).replace(spec=spec)
    q = case.queries(*shape)

    def call(name, *args, implementation, **rest):
        del implementation
        return getattr(module, name)(*args, **rest, **options)

    with mock.patch.object(pallas_kernels, "call", call):
        out = kvjax.attend(q, pools, case.layer, kvjax.pools.select_blocks(view, columns))
    out = np.asarray(out, np.float32).reshape(-1, *out.shape[2:])
    q = np.asarray(q, np.float32).reshape(-1, *q.shape[2:])
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        kv = case.kv[row][is_read[row, np.arange(lengths[row]) // size]]
        span = slice(start, start + count)
        wanted, _ = oracle(q[span], kv[:, 0], kv[:, -1], len(kv) - count, scale=case.width**-0.5)
        case.close(out[span], wanted)
