# SPDX-License-Identifier: Apache-2.0
"""Compares a model run through the paged cache with reference outputs: `python -m models.verify DIR [DIR ...]`.

DIR is a golden folder (see `golden.py`). Every prompt goes through the cache in three ways:

    cold    its blocks are scattered over the pool
    reuse   after prompts with a common prefix, and then after itself
    churn   in a pool so small that each round evicts the blocks of the round before

Prompts are computed in chunks of several rows. Then the reference's continuation is computed token by token. Pools
start as NaN, so reading an unwritten slot shows up. In the first way, "cold", layers with a window have only enough
blocks for the tokens in their windows, so a row can continue only if it releases blocks outside its window. With
`--kv-dtype` the K/V have a format other than float32. The error of the logits is then reported, but not judged.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

from .commands import Parser, add_scan
from .decoder import Decoder
from .golden import Golden, read_golden
from .loading import load
from .session import add_mesh, make_mesh

TOLERANCE = 1e-3  # |a - b| <= TOLERANCE * (1 + |b|)
MARGIN = 2e-3  # between the reference's two best logits; below it both tokens count as right
ROWS = 8
CHUNK = 32
BLOCK_SIZE = 16


@dataclasses.dataclass
class Tally:
    """The results of a way through the cache."""

    compared: int = 0  # positions with compared logits
    error: float = 0.0  # largest |a - b|
    excess: float = 0.0  # largest |a - b| / (1 + |b|); above TOLERANCE is a failure
    greedy: int = 0  # continuation tokens compared
    same: int = 0  # continuation tokens equal to the reference's
    wrong: int = 0  # continuation tokens unlike the reference's despite a clear margin
    reused: int = 0  # prompt tokens found in the cache
    evicted: int = 0  # blocks

    @property
    def ok(self) -> bool:
        """Whether all compared positions are within tolerance."""
        return self.compared > 0 and self.excess <= TOLERANCE and self.wrong == 0

    def compare(self, logits: np.ndarray, reference: np.ndarray, greedy: int | None) -> None:
        """Compares the logits f32[V] at a position. `greedy` is the reference's choice, or None."""
        error = np.abs(logits - reference)
        self.compared += 1
        error = np.where(np.isnan(error), np.inf, error)  # every comparison with NaN is False
        self.error = max(self.error, float(np.max(error)))
        self.excess = max(self.excess, float(np.max(error / (1 + np.abs(reference)))))
        if greedy is not None:
            same = int(np.argmax(logits)) == greedy
            second, best = np.partition(reference, -2)[-2:]
            self.greedy += 1
            self.same += same
            self.wrong += not same and best - second > MARGIN


admit = jax.jit(partial(kvjax.Cache.admit, reserve_tokens=CHUNK), donate_argnums=0)
release = jax.jit(kvjax.Cache.release, donate_argnums=0)


@partial(jax.jit, donate_argnames="cache")
def advance(model: Decoder, cache: kvjax.Cache, tokens: jax.Array, count: jax.Array):
    """Reserves blocks for the next tokens i32[S, C] of every row, computes the tokens and commits them."""
    missing = cache.state.seqs.committed + count - cache.state.seqs.length
    cache, extended = cache.extend(missing > 0, jnp.maximum(missing, 0), max_tokens=tokens.shape[1])
    cache, logits, committed = kvjax.step(model, cache, tokens, count, logits="all")
    return cache, logits, extended, committed


class Runner:
    """Runs prompts through caches and compares every computed logit."""

    def __init__(self, model: Decoder, golden: Golden, spec: kvjax.CacheSpec, where: dict[str, Any]):
        self.model = model
        self.golden = golden
        self.spec = spec
        self.where = where
        self.tallies = {"cold": Tally(), "reuse": Tally(), "churn": Tally()}

    def start(self, way: str, num_blocks: Sequence[int], seed: int) -> None:
        """Begins a way with an empty cache: `num_blocks` in each group, in random order, and pools of NaN."""
        self.tally = self.tallies[way]
        cache = kvjax.Cache.create(self.spec, _LRU, **self.where)
        rng = np.random.default_rng(seed)
        groups = []
        for group, count in zip(cache.state.groups, num_blocks, strict=True):
            empty = np.arange(group.empty.shape[0], dtype=np.int32)
            empty[:count] = rng.permutation(count)
            used = jnp.array(count, jnp.int32)
            groups.append(group.replace(empty=jnp.asarray(empty), num_empty=used, num_blocks=jnp.copy(used)))
        state = cache.state.replace(groups=tuple(groups))
        self.cache = kvjax.Cache(state, jax.tree.map(_without_numbers, cache.pools))

    def run(self, texts: dict[int, np.ndarray], prompt: dict[int, int], rows: dict[int, int]) -> None:
        """Admits the texts' prompts, computes the rest of each text but its last token, and releases the texts.

        Args:
          texts: tokens of each seq.
          prompt: number of tokens to admit; the other tokens are fed one by one.
          rows: golden row of each seq to compare; {} compares nothing.
        """
        for seq, text in texts.items():
            padded = np.zeros(self.spec.max_length, np.int32)
            padded[: prompt[seq]] = text[: prompt[seq]]
            self.cache, events = admit(self.cache, np.int32(seq), padded, np.int32(prompt[seq]))
            self._done("admit", events)
            self.tally.reused += int(np.sum(events.cached)) if rows else 0
        last_tokens = {seq: max(len(text) - 1, prompt[seq]) for seq, text in texts.items()}
        for ends, width in ((prompt, CHUNK), (last_tokens, 1)):
            while self._advance(texts, ends, width, rows):
                pass
        for seq in texts:
            self.cache, events = release(self.cache, np.int32(seq))
            self._done("release", events)

    def _advance(self, texts, ends, width: int, rows) -> bool:
        """Calls the model for up to `width` tokens of each unfinished row. Returns False if all rows are finished."""
        begin = np.asarray(self.cache.state.seqs.committed)
        tokens = np.zeros((ROWS, width), np.int32)
        count = np.zeros(ROWS, np.int32)
        for seq, text in texts.items():
            part = text[begin[seq] : min(begin[seq] + width, ends[seq])]
            tokens[seq, : len(part)] = part
            count[seq] = len(part)
        if not np.any(count):
            return False
        self.cache, logits, extended, committed = advance(self.model, self.cache, tokens, count)
        self._done("extend", extended)
        self._done("commit", committed)
        logits = np.asarray(logits)
        for seq, row in rows.items():
            for offset in range(count[seq]):
                position = int(begin[seq]) + offset
                step = position - int(self.golden.lengths[row]) + 1
                greedy = int(self.golden.greedy[row, step]) if 0 <= step < self.golden.steps(row) else None
                self.tally.compare(logits[seq, offset], self.golden.reference(row, position), greedy)
        return True

    def _done(self, verb: str, events: kvjax.Events) -> None:
        if not events.ok:
            raise RuntimeError(f"{verb} was refused:\n{kvjax.show(self.cache.state)}")
        self.tally.evicted += int(np.sum(np.asarray(events.kind) == kvjax.events.EventKind.REMOVED))


def _without_numbers(array: jax.Array) -> jax.Array:
    """Fills an array with NaN, or an array of integers with the lowest number, as their scales are NaN."""
    lowest = jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo(array.dtype).min
    return jnp.full_like(array, lowest)


_LRU = kvjax.lru()  # a single object, so all ways share their compiled programs


def verify(
    folder: pathlib.Path, kv_dtype: str = "float32", *, scan: bool = False, where: dict[str, Any] | None = None
) -> dict[str, Tally]:
    """Runs a golden folder's prompts through the cache in the three ways.

    Errors are the same as for `load` and `read_golden`. `where` has the arguments `mesh`, `heads` and `context` for
    `load` and `Cache.create`; None uses a single device.
    """
    where = where or {}
    with jax.default_matmul_precision("highest"):
        model, _ = load(folder, dtype=jnp.float32, scan=scan, **where)
        golden = read_golden(folder, model.config.vocab_size)
        longest = max(len(golden.text(row)) for row in range(len(golden.lengths)))
        blocks = ROWS * -(-longest // BLOCK_SIZE)
        spec = kvjax.make_spec(
            model.layer_specs(),
            num_blocks=2 * blocks,
            max_seqs=ROWS,
            max_length=longest,
            block_size=BLOCK_SIZE,
            dtype=kv_dtype,
        )
        runner = Runner(model, golden, spec, where)
        for first in range(0, len(golden.lengths), ROWS):
            _three_ways(runner, range(first, min(first + ROWS, len(golden.lengths))))
        tallies = runner.tallies
        if not tallies["churn"].evicted or (np.any(golden.lengths > 1) and not tallies["reuse"].reused):
            raise RuntimeError(f"{folder}: nothing was reused, or nothing evicted, so that nothing was proved")
        return tallies


def _three_ways(runner: Runner, batch: range) -> None:
    """Runs up to ROWS prompts in each way, each with a new cache."""
    golden = runner.golden
    rows = dict(enumerate(batch))
    texts = {seq: golden.text(row) for seq, row in rows.items()}
    prompts = {seq: int(golden.lengths[row]) for seq, row in rows.items()}

    groups = runner.spec.groups
    columns = [-(-len(text) // BLOCK_SIZE) for text in texts.values()]
    blocks = [group.num_blocks for group in groups]
    # The fewest blocks for computing these rows together, chunk by chunk.
    fewest = [sum(group.max_blocks(count, BLOCK_SIZE, CHUNK) for count in columns) for group in groups]
    if runner.spec.bare:  # group 0 holds the prefix tree of the others too
        fewest[0] = blocks[0]

    runner.start("cold", [blocks[0], *fewest[1:]], seed=0)
    runner.run(texts, prompts, rows)

    runner.start("reuse", blocks, seed=1)
    for seq in rows:  # one after the other, so that a text finds its common prefixes with earlier texts
        runner.run({seq: texts[seq]}, prompts, rows)
    runner.run(texts, prompts, rows)  # each text finds itself

    # Just enough blocks, so other texts of the same lengths evict everything, and half of them evict a part. Groups
    # with windows get half as many blocks again. Otherwise a row would take the blocks that it has just released, and
    # none would stay.
    runner.start("churn", [fewest[0], *(3 * count // 2 for count in fewest[1:])], seed=2)
    rng = np.random.default_rng(3)
    vocab_size = golden.logits.shape[2]
    for driven in (list(texts), list(texts)[::2]):
        strangers = {seq: rng.integers(vocab_size, size=len(texts[seq])).astype(np.int32) for seq in driven}
        runner.run(strangers, {seq: len(text) for seq, text in strangers.items()}, rows={})
        runner.run(texts, prompts, rows)


def report(name: str, tallies: dict[str, Tally], judged: bool = True) -> str:
    """A line for each way, and a line with the verdict."""
    lines = [
        f"{name:<16}{way:<7}largest logit error {tally.error:.1e} at {tally.compared:,} positions; "
        f"greedy {tally.same:,} of {tally.greedy:,}; {tally.reused:,} tokens reused, {tally.evicted:,} evicted"
        for way, tally in tallies.items()
    ]
    worst = max(tally.error for tally in tallies.values())
    same = sum(tally.same for tally in tallies.values())
    greedy = sum(tally.greedy for tally in tallies.values())
    verdict = "ok" if all(tally.ok for tally in tallies.values()) else "FAILED"
    verdict = verdict if judged else "not judged"
    return "\n".join([*lines, f"{name:<16}{verdict}: largest logit error {worst:.1e}, greedy {same:,} of {greedy:,}"])


def main(arguments: list[str] | None = None) -> int:
    """Verifies each folder. Returns 0 if all are within tolerance."""
    parser = Parser("verify", "Compares a model run through the paged cache with reference outputs.")
    parser.add_argument("folders", metavar="DIR", nargs="+", type=pathlib.Path, help="a golden folder")
    parser.add_argument("--kv-dtype", default="float32", help="format of the K/V, such as int8 (default: %(default)s)")
    add_scan(parser)
    add_mesh(parser)
    args = parser.parse_args(arguments)
    where = make_mesh(parser, args)
    failed = 0
    judged = args.kv_dtype == "float32"
    for folder in args.folders:
        try:
            tallies = verify(folder, args.kv_dtype, scan=args.scan, where=where)
        except (OSError, ValueError) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            failed += 1
            continue
        print(report(folder.resolve().name, tallies, judged), flush=True)
        failed += not all(tally.ok if judged else np.isfinite(tally.error) for tally in tallies.values())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
