# SPDX-License-Identifier: Apache-2.0
"""The second kernel of decode where K/V were cut into parts (flash-decoding): it merges each row's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_LOWEST = np.float32(-1e30)  # finite, so that score - maximum is never inf - inf


def merge(parts: jax.Array, lse: jax.Array, starts: jax.Array, dtype, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Merges parts f32[W, Q, D] by their lse f32[W, Q]; row r has the parts starts[r] to starts[r + 1] - 1."""
    _, heads, width = parts.shape
    rows, padded = starts.shape[0] - 1, pl.next_power_of_2(width)

    def kernel(
        parts_ref,  # f32[W, Q, D]
        lse_ref,  # f32[W, Q]
        starts_ref,  # i32[R + 1]
        out_ref,  # [R, Q, D]
        total_ref,  # f32[R, Q]
    ):
        row, head = pl.program_id(0), pl.program_id(1)
        column = jnp.arange(padded, dtype=jnp.int32)
        inside = column < width

        def step(part, carry):
            highest, total, mixed = carry
            score = lse_ref[part, head]
            new = jnp.maximum(highest, score)
            shrink, weight = jnp.exp(highest - new), jnp.exp(score - new)
            more = plt.load(parts_ref.at[part, head, column], mask=inside, other=0.0)
            return new, total * shrink + weight, mixed * shrink + weight * more

        start = _LOWEST, np.float32(0.0), jnp.zeros((padded,), jnp.float32)
        highest, total, mixed = lax.fori_loop(starts_ref[row], starts_ref[row + 1], step, start)
        any_score = total > 0
        plt.store(out_ref.at[row, head, column], (mixed / jnp.where(any_score, total, 1.0)).astype(dtype), mask=inside)
        total_ref[row, head] = jnp.where(any_score, highest + jnp.log(jnp.where(any_score, total, 1.0)), -jnp.inf)

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, width), dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        grid=(rows, heads),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(parts, lse, starts)
