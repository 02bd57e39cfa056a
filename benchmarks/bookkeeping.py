# SPDX-License-Identifier: Apache-2.0
"""Time of the cache's bookkeeping: a decode step of 256 rows, and the admission of a prompt.

A step is `extend` and `commit` for all rows, in a pool full of cached blocks, so that every new block is an evicted
one. Some rows are twins that generate the same tokens, so that their blocks merge. Steps and admissions run inside
`scan`, where nothing is dispatched; the step as a jitted call of its own is reported too. Answers are checked: every
request was done, the counts of evicted, stored and merged blocks add up, and the states are sound.

The same steps in blocks of k: one `extend`, one `commit` and one `trim` for up to k tokens of each row, as
`kvjax.generate` decodes. Their time a step is compared with that of single steps, in turns.

Several caches under `vmap` serve different requests: each prompt is admitted, committed and released. Their time is
compared with that of smaller pools and with that of one cache alone.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from benchmarks import common
from benchmarks.common import Bar

ROWS, BLOCK, LENGTH = 256, 16, 2048
START = 48  # tokens of each row before the first step, and up to 15 more so that not all rows fill at once
STEPS, CALLS = 128, 64
TWINS = 16  # rows to a pair of twins
PROMPT, DOCUMENTS, REQUESTS = 256, 8, 64  # of caches under vmap; the first half of a prompt is a document
BARS = {
    "step_us": Bar("bookkeeping of a step, 256 rows, 65,536 blocks", "µs", at_most=130),
    "step_us_4k": Bar("bookkeeping of a step, 256 rows, 4,096 blocks", "µs"),
    "step_us_1m": Bar("bookkeeping of a step, 256 rows, 1,048,576 blocks", "µs"),
    "growth_4k_to_1m": Bar("a step with 1,048,576 blocks, to one with 4,096", at_most=3),
    "step_with_log_us": Bar("a step with every event in a log, 65,536 blocks", "µs"),
    "k4_to_k1": Bar("a step in blocks of 4 (`extend`, `commit`, `trim`), to a single step", at_most=0.4),
    "k16_to_k1": Bar("a step in blocks of 16, to a single step", at_most=0.25),
    "call_us": Bar("a step as a jitted, donated call of its own", "µs"),
    "admit_us": Bar("admission of a 2,048-token prompt, half cached, 64 blocks evicted", "µs", at_most=150),
    "vmap_us_2k": Bar("a 256-token prompt served, per cache: 4 of 2,048 blocks under `vmap`", "µs"),
    "vmap_us_64k": Bar("a 256-token prompt served, per cache: 4 of 65,536 blocks under `vmap`", "µs"),
    "vmap_growth": Bar("a prompt in the 4 caches of 65,536 blocks, to one in those of 2,048", at_most=2),
    "alone_us_16k": Bar("a 256-token prompt served in one cache of 16,384 blocks", "µs"),
    "vmap_64": Bar("a prompt, per cache, in 64 caches of 16,384 blocks under `vmap`, to one alone", at_most=1.2),
}
NOTES = """
The caches under `vmap` take 1 MB with 2,048 blocks and 40 MB with 65,536. Their growth depends on the machine: it was
0.8x to 1.7x in several runs on one, and 2.3x to 3.0x on another, where the small caches are faster: it misses its
bar.
"""


def tokens_of(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """The tokens of rows at positions; those of a row and its twin are the same."""
    row = jnp.where(rows % TWINS == 1, rows - 1, rows)
    return (row * 7919 + positions * 31 + 5) % 50_021


def warm(num_blocks: int) -> kvjax.CacheState:
    """A cache whose blocks are all findable, 256 rows holding some of them."""
    spec = kvjax.make_spec(num_blocks=num_blocks, max_seqs=ROWS, max_length=LENGTH, block_size=BLOCK)
    zero = jnp.zeros((1,), jnp.int32)

    def fill(state, number):
        tokens = (jnp.arange(LENGTH, dtype=jnp.int32) * 7 + number * 104_729) % 50_021 + 50_021
        state, _ = kvjax.admit(state, 0, tokens, LENGTH)
        state, _ = kvjax.commit(state, tokens[None], zero + LENGTH, seqs=zero)
        state, _ = kvjax.release(state, 0)
        return state, None

    def admit(state):
        rows = jnp.arange(ROWS, dtype=jnp.int32)
        lengths = START + rows // 2 % BLOCK
        tokens = tokens_of(rows[:, None], jnp.arange(START + BLOCK, dtype=jnp.int32)[None])
        state, admitted = kvjax.admit(state, rows, tokens, lengths)
        state, committed = kvjax.commit(state, tokens, lengths)
        return state, admitted.ok & committed.ok

    prompts = jnp.arange(num_blocks * BLOCK // LENGTH + 1, dtype=jnp.int32)
    state = jax.jit(lambda state: lax.scan(fill, state, prompts)[0], donate_argnums=0)(kvjax.init(spec))
    state, ok = jax.jit(admit, donate_argnums=0)(state)
    common.require(bool(ok), "the rows could not be admitted")
    return state


def step(state: kvjax.CacheState, number: jax.Array):
    """One decode step; the state, with counts (ok, removed, stored, merged) and events."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    tokens = tokens_of(rows, state.seqs.committed)[:, None]
    state, extended = kvjax.extend(state, jnp.ones((ROWS,), jnp.bool_))
    empty = state.groups[0].num_empty
    state, committed = kvjax.commit(state, tokens, jnp.ones((ROWS,), jnp.int32))
    ok = (extended.ok & committed.ok).astype(jnp.int32)
    merged = state.groups[0].num_empty - empty
    done = jnp.stack([ok, kvjax.events.counts(extended)["removed"], kvjax.events.counts(committed)["stored"], merged])
    return state, (done, extended, committed)


def steps(state: kvjax.CacheState):
    """STEPS steps in one program; the state, and the sums of the counts."""

    def one(carry, number):
        state, (done, *_) = step(carry[0], number)
        return (state, carry[1] + done), None

    return lax.scan(one, (state, jnp.zeros((4,), jnp.int32)), jnp.arange(STEPS))[0]


def steps_with_log(state: kvjax.CacheState):
    """The same with every event kept in a log, as a decode loop does."""

    def one(carry, number):
        state, (_, extended, committed) = step(carry[0], number)
        return (state, kvjax.events.append(carry[1], extended, committed)), None

    return lax.scan(one, (state, kvjax.events.init_log(STEPS * ROWS // 4, BLOCK)), jnp.arange(STEPS))[0]


def blocks_of_steps(state: kvjax.CacheState, k: int):
    """The same in blocks of k steps; all k tokens of each row are used."""
    rows, every = jnp.arange(ROWS, dtype=jnp.int32), jnp.ones((ROWS,), jnp.bool_)

    def one(carry, number):
        state, total = carry
        positions = state.seqs.committed[:, None] + np.arange(k, dtype=np.int32)[None]
        state, extended = kvjax.extend(state, every, jnp.full((ROWS,), k, jnp.int32), max_tokens=k)
        empty = state.groups[0].num_empty
        state, committed = kvjax.commit(state, tokens_of(rows[:, None], positions), jnp.full((ROWS,), k, jnp.int32))
        ok, merged = extended.ok & committed.ok, state.groups[0].num_empty - empty
        if k > 1:
            state, _ = kvjax.trim(state, every, max_tokens=k)
        removed, stored = kvjax.events.counts(extended)["removed"], kvjax.events.counts(committed)["stored"]
        return (state, total + jnp.stack([k * ok.astype(jnp.int32), removed, stored, merged])), None

    return lax.scan(one, (state, jnp.zeros((4,), jnp.int32)), jnp.arange(STEPS // k))[0]


def admissions(state: kvjax.CacheState):
    """A 2,048-token prompt into every row, the first half of each cached; the state, and the sums of the counts."""
    shared = (jnp.arange(LENGTH, dtype=jnp.int32) * 7 + 104_729) % 50_021 + 50_021

    def one(state, row):
        own = (jnp.arange(LENGTH, dtype=jnp.int32) * 13 + row * 7_919) % 50_021 + 200_000
        tokens = jnp.where(np.arange(LENGTH) < LENGTH // 2, shared, own)
        state, events = kvjax.admit(state, row, tokens, LENGTH)
        return state, jnp.stack([events.ok.astype(jnp.int32), kvjax.events.counts(events)["removed"], events.cached[0]])

    state, done = lax.scan(one, state, jnp.arange(ROWS, dtype=jnp.int32))
    return state, jnp.sum(done, axis=0, dtype=jnp.int32)


def copies_of_blocks(compiled, state: kvjax.CacheState) -> list[str]:
    """The compiled program's copies of an array of the state that has an entry for each block."""
    num_blocks = state.spec.groups[0].num_blocks
    shapes = {"[" + ",".join(map(str, x.shape)) + "]" for x in jax.tree.leaves(state) if x.size >= num_blocks}
    lines = re.findall(r"^ *(?:ROOT )?%\S+ = \w+(\[[\d,]*\])\S* copy\(.*$", compiled.as_text(), re.M)
    return [line for line in lines if line in shapes]


def compiled_steps(state: kvjax.CacheState, run=steps):
    return jax.jit(run, donate_argnums=0).lower(state).compile()


def measure_steps(num_blocks: int, repeats: int, run=steps):
    """Microseconds a step, and the result of the steps."""
    state = warm(num_blocks)
    compiled = compiled_steps(state, run)
    copies = copies_of_blocks(compiled, state)
    common.require(not copies, f"the compiled step copies arrays of {num_blocks} blocks: {copies}")
    seconds, result = common.best_of(compiled, lambda: (jax.tree.map(jnp.copy, state),), repeats)
    return seconds / STEPS * 1e6, result


def checked_steps(num_blocks: int, repeats: int) -> float:
    micros, (state, done) = measure_steps(num_blocks, repeats)
    ok, removed, stored, merged = done.tolist()
    print(f"{num_blocks:>9,} blocks: in {STEPS} steps {removed:,} evicted, {stored:,} stored, {merged:,} merged")
    common.require(ok == STEPS, "a step was refused")
    common.require(min(removed, stored, merged) > 0, "nothing was evicted, stored or merged")
    common.require(stored + merged == ROWS * STEPS // BLOCK, "not every filled block was stored or merged")
    if num_blocks <= 65_536:
        kvjax.check(state)
    return micros


def measure_blocks_of_steps(num_blocks: int, repeats: int) -> dict[str, float]:
    """Microseconds a step in blocks of 1, 4 and 16 steps, in turns, and the latter two to the first."""
    state, least, answers = warm(num_blocks), {}, {}
    runs = {k: compiled_steps(state, functools.partial(blocks_of_steps, k=k)) for k in (1, 4, 16)}
    for k, run in runs.items():
        common.require(not copies_of_blocks(run, state), f"a block of {k} steps copies arrays of {num_blocks} blocks")
    for _ in range(repeats):
        for k, run in runs.items():
            seconds, answers[k] = common.best_of(run, lambda: (jax.tree.map(jnp.copy, state),), 1)
            least[k] = min(seconds, least.get(k, np.inf))
    for k, (after, done) in answers.items():
        ok, removed, stored, merged = done.tolist()
        common.require(ok == STEPS and removed > 0, f"a block of {k} steps was refused")
        common.require(stored + merged == ROWS * STEPS // BLOCK, "not every filled block was stored or merged")
        kvjax.check(after)
    metrics = {f"step_us_k{k}": 1e6 * seconds / STEPS for k, seconds in least.items()}
    return metrics | {f"k{k}_to_k1": least[k] / least[1] for k in (4, 16)}


def measure_admit(num_blocks: int, repeats: int) -> float:
    state = warm(num_blocks)
    state, _ = jax.jit(kvjax.release)(state, jnp.arange(ROWS, dtype=jnp.int32))
    shared = (jnp.arange(LENGTH, dtype=jnp.int32) * 7 + 104_729) % 50_021 + 50_021
    # In a small pool the first prompts are evicted by now: the shared half is cached again.
    state, _ = kvjax.admit(state, 0, shared, LENGTH)
    zero = jnp.zeros((1,), jnp.int32)
    start = state.seqs.committed[0]
    state, _ = kvjax.commit(state, jnp.roll(shared, -start)[None], zero + LENGTH - start, seqs=zero)
    state, _ = kvjax.release(state, 0)
    compiled = compiled_steps(state, admissions)
    copies = copies_of_blocks(compiled, state)
    common.require(not copies, f"the compiled admission copies arrays of {num_blocks} blocks: {copies}")
    seconds, (state, done) = common.best_of(compiled, lambda: (jax.tree.map(jnp.copy, state),), repeats)
    ok, removed, cached = done.tolist()
    each = f"{cached / ROWS:,.0f} tokens reused each"
    print(f"{num_blocks:>9,} blocks: {ROWS} admissions, {removed:,} blocks evicted, {each}")
    common.require(ok == ROWS and removed > 0 and cached == ROWS * LENGTH // 2, "an admission went wrong")
    kvjax.check(state)
    return seconds / ROWS * 1e6


def measure_calls(num_blocks: int, repeats: int) -> float:
    """Microseconds of a step as a jitted call of its own, state donated."""
    state = warm(num_blocks)
    call = jax.jit(lambda state, number: step(state, number)[0], donate_argnums=0)

    def run(state):
        for number in range(CALLS):
            state = call(state, jnp.int32(number))
        return state

    return common.best_of(run, lambda: (jax.tree.map(jnp.copy, state),), repeats)[0] / CALLS * 1e6


def serve(state: kvjax.CacheState, cache: jax.Array, first: jax.Array, requests: int):
    """Admits, computes and releases `requests` prompts one after the other; each begins with one of few documents.

    Returns:
      The state; and i32[3], how many were served, blocks evicted, and tokens found.
    """
    position, zero = jnp.arange(PROMPT, dtype=jnp.int32), jnp.zeros((1,), jnp.int32)

    def one(state, number):
        document = (number + cache) % DOCUMENTS
        start = jnp.where(position < PROMPT // 2, document * PROMPT, (DOCUMENTS + number) * PROMPT)
        tokens = (start + position) * 97 + cache
        state, admitted = kvjax.admit(state, 0, tokens, PROMPT)
        cached = admitted.cached[0]
        state, committed = kvjax.commit(state, jnp.roll(tokens, -cached)[None], zero + PROMPT - cached, seqs=zero)
        state, released = kvjax.release(state, 0)
        ok = admitted.ok & committed.ok & released.ok
        return state, jnp.stack([ok.astype(jnp.int32), kvjax.events.counts(admitted)["removed"], cached])

    state, done = lax.scan(one, state, first + jnp.arange(requests, dtype=jnp.int32))
    return state, jnp.sum(done, axis=0, dtype=jnp.int32)


def measure_caches(num_blocks: int, caches: int, repeats: int) -> float:
    """Microseconds a request and cache, of caches under `vmap`, all of them full; of one without it."""
    spec = kvjax.make_spec(num_blocks=num_blocks, max_seqs=1, max_length=PROMPT, block_size=BLOCK)
    numbers = jnp.arange(caches, dtype=jnp.int32)
    run = functools.partial(serve, requests=REQUESTS)
    fill = functools.partial(serve, requests=2 * num_blocks * BLOCK // PROMPT + 1)
    state, start = kvjax.init(spec), fill.keywords["requests"]
    if caches > 1:
        state = jax.tree.map(lambda x: jnp.broadcast_to(x, (caches, *x.shape)), state)
        run, fill = (jax.vmap(f, in_axes=(0, 0, None)) for f in (run, fill))
    else:
        numbers = numbers[0]
    state, _ = jax.jit(fill)(state, numbers, jnp.int32(0))
    compiled = jax.jit(run, donate_argnums=0).lower(state, numbers, jnp.int32(start)).compile()
    seconds, (state, done) = common.best_of(
        compiled, lambda: (jax.tree.map(jnp.copy, state), numbers, jnp.int32(start)), repeats
    )
    served, removed, cached = np.atleast_2d(np.asarray(done)).T
    common.require((served == REQUESTS).all() and (removed > 0).all() and (cached > 0).all(), "a request went wrong")
    print(
        f"{num_blocks:>9,} blocks, {caches:>2} caches: {removed.sum():,} blocks evicted, {cached.sum():,} tokens found"
    )
    for number in (0, caches - 1):
        kvjax.check(state if caches == 1 else jax.tree.map(lambda x, number=number: x[number], state))
    return seconds / REQUESTS / caches * 1e6


def main() -> None:
    args = common.parse("bookkeeping", __doc__, lambda p: p.add_argument("--repeats", type=int, default=10))
    sizes = {"step_us": 65_536, "step_us_4k": 4_096, "step_us_1m": 1_048_576}
    metrics = {name: checked_steps(size, args.repeats) for name, size in sizes.items()}
    metrics["growth_4k_to_1m"] = metrics["step_us_1m"] / metrics["step_us_4k"]
    metrics["step_with_log_us"] = measure_steps(65_536, args.repeats, steps_with_log)[0]
    metrics |= measure_blocks_of_steps(65_536, args.repeats)
    metrics["call_us"] = measure_calls(65_536, args.repeats)
    metrics["admit_us"] = measure_admit(65_536, args.repeats)
    for name, num_blocks, caches in (
        ("vmap_us_2k", 2_048, 4),
        ("vmap_us_64k", 65_536, 4),
        ("alone_us_16k", 16_384, 1),
        ("vmap_64_us_16k", 16_384, 64),
    ):
        metrics[name] = measure_caches(num_blocks, caches, args.repeats)
    metrics["vmap_growth"] = metrics["vmap_us_64k"] / metrics["vmap_us_2k"]
    metrics["vmap_64"] = metrics["vmap_64_us_16k"] / metrics["alone_us_16k"]
    metrics["state_leaves"] = len(jax.tree.leaves(warm(4_096)))
    common.report("bookkeeping", metrics, args.json, bars=BARS)


if __name__ == "__main__":
    main()
