# SPDX-License-Identifier: Apache-2.0
"""`free_rows` finds rows for `admit` and `fork`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import compact
from kvjax.blocks.rows import fit
from kvjax.checks import on_state, static_int32
from kvjax.events.records import Status
from kvjax.state import CacheState


@on_state
def free_rows(state: CacheState, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Finds the first free rows, for `admit` or `fork`. The rows stay free until a verb uses them.

    Args:
      state: the cache.
      num_rows: static; the number of rows to find.

    Returns:
      The rows, i32[num_rows], and a `Status`, i32[]: OK, or HELD if fewer rows are free. Missing rows are -1, at the
      end. A verb refuses such a row and accepts the others.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=3, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 1, np.arange(10), 10)
      >>> rows, status = kvjax.serving.free_rows(state, 2)
      >>> rows.tolist(), kvjax.Status(int(status))
      ([0, 2], Status.OK)
      >>> rows, status = kvjax.serving.free_rows(state, 3)
      >>> rows.tolist(), kvjax.Status(int(status))
      ([0, 2, -1], Status.HELD)
    """
    num_rows = static_int32("num_rows", num_rows, 1)
    all_rows = np.arange(state.spec.max_seqs, dtype=np.int32)
    rows, num_free = compact(jnp.where(state.seqs.length == 0, all_rows, -1))
    return fit(rows, num_rows, -1), jnp.where(num_free >= num_rows, jnp.int32(Status.OK), jnp.int32(Status.HELD))
