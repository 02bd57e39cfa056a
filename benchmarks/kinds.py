# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers other than attention over K/V: the cost of each, to the same without a cache, or with more bytes.

Latents (MLA): decode attention over latents of 512 + 64 columns, 8 rows of 1,024 tokens, 16 heads, whose blocks are
scattered over the pool. It takes turns with attention over contiguous latents `[R, 1, T, D]`, in the fastest of four
forms, and with attention over K/V with K = V = the latent, which a cache without latents would hold. The answers are
compared first. Times are the least of all rounds.

Recurrent layers: `recur` (gated delta rule) over paged snapshots of 16 rows, to the same cell on states of its own, in
place. A row of 4,096 tokens is computed in blocks of 64, and its snapshots are counted: more than the bar end the
benchmark. Of a production trace the prompt tokens that are found with 1,000 snapshots are compared with those found if
snapshots left by age alone; of each of the first 200 requests the cache in plain Python must find exactly as many.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import attention, common, snapshots
from benchmarks.common import Bar

BARS = {
    "latent_over_contiguous": Bar("decode over latents, to contiguous latents", at_most=1.3),
    "latent_over_doubled": Bar("decode over latents, to K = V", at_most=1.15),
    "latent_bytes": Bar("bytes of latents, to K = V", at_most=0.5),
    **snapshots.BARS,
}
NOTES = """
The missed bar is lost in reading: on a CPU the gather of the latents' blocks alone takes as long as attention over
contiguous ones. Tile and run lengths, and products with K first, changed little. In several runs the ratio was 2.0x to
3.6x, and that to K = V 0.90x to 1.19x.
"""


class Latents(NamedTuple):
    rows: int = 8
    length: int = 1024
    heads: int = 16
    width: int = 576
    values: int = 512


def contiguous_latents(q, latents, lengths, values, first, whole):
    """Attention of q [R, 1, Q, D] over latents [R, 1, T, D]; with `whole` V's product has the columns of K too."""
    v = latents if whole else latents[..., :values]
    return attention.attend_contiguous(q, latents, v, lengths, first)[..., :values]


def measure_latents(shape: Latents, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics, and times in milliseconds."""
    case = attention.Shape(shape.rows, shape.length, shape.heads, 1, shape.width, 1)
    q, of_kv, view, [(k, _)] = attention.make_case(case)
    ((array,),) = of_kv.arrays
    (group,) = of_kv.spec.groups
    spec = kvjax.make_spec(
        [kvjax.LayerSpec.latent(shape.width, shape.values)], num_blocks=group.num_blocks, max_seqs=shape.rows,
        max_length=shape.length, block_size=of_kv.spec.block_size, dtype="float32",
    )  # fmt: skip
    of_latents = kvjax.pools.Pools(((array[:, :, :1],),), spec)
    doubled = of_kv.replace(arrays=((jnp.concatenate([array[:, :, :1]] * 2, axis=2),),))
    programs = {
        "latent": functools.partial(jax.jit(lambda q, pools: kvjax.attend(q, pools, 0, view)), q, of_latents),
        "doubled": functools.partial(
            jax.jit(lambda q, pools: kvjax.attend(q, pools, 0, view)[..., : shape.values]), q, doubled
        ),
    }
    forms = [f"{form}_{first}" for form in ("sliced", "whole") for first in ("q", "k")]
    for name in forms:
        form, first = name.split("_")
        run = functools.partial(contiguous_latents, values=shape.values, first=first, whole=form == "whole")
        programs[name] = functools.partial(jax.jit(run), q, k, view.lengths)
    answers = {name: np.asarray(run()) for name, run in programs.items()}
    for name, answer in answers.items():
        common.require(np.allclose(answer, answers["latent"], 1e-4, 1e-4), f"{name}: answers differ")
    least = attention.least_s(programs, rounds)
    num_bytes = [sum(x.nbytes for x in jax.tree.leaves(pools)) for pools in (of_latents, doubled)]
    metrics = {
        "latent_over_contiguous": least["latent"] / min(least[name] for name in forms),
        "latent_over_doubled": least["latent"] / least["doubled"],
        "latent_bytes": num_bytes[0] / num_bytes[1],
    }
    return metrics, {f"{name}_ms": 1e3 * seconds for name, seconds in least.items()}


def main() -> None:
    def add(parser):
        parser.add_argument("--rounds", type=int, default=300, help="how often each program runs")
        parser.add_argument("--quick", action="store_true", help="tiny shapes: that it runs, not how fast")

    args = common.parse("kinds", __doc__, add)
    rounds = 2 if args.quick else args.rounds
    metrics, details = {}, {}
    small = snapshots.Line(2, 2, 8, 12, 8, 2, 8)
    for measured in (
        measure_latents(Latents(2, 64, 4, 40, 24) if args.quick else Latents(), rounds),
        snapshots.measure_recur(small if args.quick else snapshots.Line(), rounds),
        snapshots.measure_row(),
        snapshots.measure_found(*((60, 100) if args.quick else (2000, 1000))),
    ):
        metrics |= measured[0]
        details |= measured[1]
    common.report("kinds", metrics, args.json, details, bars=BARS)


if __name__ == "__main__":
    main()
