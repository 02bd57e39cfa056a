# SPDX-License-Identifier: Apache-2.0
"""Policies that adapt: `adaptive` is the plain Python's, forgets nothing that it needs, and beats LRU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import research
from kvjax.policies import adaptive, t_lru
from kvjax.policies.adaptive import AGES, LEVELS, age_range, densities, learn
from kvjax.testing import check_policy
from tests.drive import PLAIN
from tests.oracle import research_adaptive as oracle

BLOCK = 4


def trace_of(prompts):
    return research.make_trace(
        range(len(prompts)), [BLOCK * len(p) for p in prompts], [0] * len(prompts), prompts, BLOCK
    )


def sessions_and_one_shots(number=400):
    """Eight sessions in turn with prompts of 3 blocks, and between them prompts of 6 blocks that occur once."""
    prompts = []
    for turn in range(number // 2):
        prompts += [[turn % 8 * 3 + column for column in range(3)], [24 + 6 * turn + column for column in range(6)]]
    return trace_of(prompts)


def test_ages_fall_into_the_ranges_of_plain_python():
    ages = sorted({max(first + step, 0) for k in range(31) for first in (2**k, 3 * 2**k // 2) for step in (-1, 0, 1)})
    ages = [*ages, 2**31 - 1]
    assert age_range(jnp.array(ages, jnp.int32)).tolist() == [oracle.age_range(age) for age in ages]
    assert oracle.age_range(ages[-1]) == AGES - 1


@pytest.mark.long
@pytest.mark.parametrize("rule", ["full", "papers"])
def test_caches_evict_the_blocks_of_plain_python(rule):
    """Request by request, in two caches of a program, with prompts that fall out of the memory too."""
    trace, sizes = research.draw_trace(seed=5, requests=150), [500, 700]
    slots = 1 << (16 * max(sizes) - 1).bit_length()
    found = research.simulate(trace, adaptive(), sizes, rule=rule).blocks
    wanted = [oracle.adaptive_hits(trace, size, rule, slots)[0] for size in sizes]
    np.testing.assert_array_equal(found, wanted)
    plain = research.lru_curve(trace, sizes, rule).blocks
    assert (found != plain).any(axis=1).all()
    assert (found.sum(axis=1) > plain.sum(axis=1)).all()


@pytest.mark.long
def test_it_keeps_sessions_among_prompts_that_never_return():
    """LRU finds nothing: a one-shot prompt is newer than every session."""
    trace = sessions_and_one_shots()
    assert research.lru_curve(trace, [40]).blocks.sum() == 0
    found = research.simulate(trace, adaptive(), [40]).blocks[0]
    assert found[200:].sum() > 0.9 * 100 * 2


def test_a_density_is_plain_pythons_and_never_rises():
    trace = research.draw_trace(seed=1, requests=60)
    _, cache = oracle.adaptive_hits(trace, 300, "full", 1 << 13)
    policy = adaptive()
    counts = policy.init(4).state.counts
    table = lambda rows: jnp.array([rows[name] for name in oracle.NAMES], jnp.float32)  # noqa: E731
    counts = counts._replace(
        released=table(cache.released_by),
        reused=table(cache.reused_by),
        ages=jnp.array(cache.ages, jnp.float32),
        squares=jnp.float32(cache.squares),
    )
    found = densities(counts, jnp.float32(len(cache.seen)))
    assert found.shape == (LEVELS, AGES) and jnp.all(found[:, 1:] <= found[:, :-1]) and found.max() > 0
    np.testing.assert_allclose(found, cache.density, rtol=2e-4, atol=1e-12)


def test_a_request_without_blocks_changes_nothing():
    state = kvjax.init(PLAIN, adaptive())
    group = state.groups[0]
    after = jax.jit(learn)(group.policy.state, group.blocks, jnp.full((4,), -1, jnp.int32))
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(group.policy.state), strict=True):
        np.testing.assert_array_equal(new, old)


@jax.jit
def serve(state, prompt, hint):
    """Admits a prompt of two blocks, commits and releases it; the events of its admission."""
    state, events = kvjax.admit(state, 0, prompt, 8, retention=hint)
    state, _ = kvjax.commit(state, prompt[None], np.array([8]), seqs=np.array([0]))
    return kvjax.release(state, 0)[0], events


def removed_by_fourth(ended):
    """Prompts 0, 1 and 2 fill the cache, one of them with priority 0; the prompts whose blocks leave for a fourth."""
    spec = kvjax.make_spec(num_blocks=6, max_seqs=1, max_length=16, block_size=4, partial_reuse=False, retention=True)
    state = kvjax.init(spec, adaptive())
    for number, prompt in enumerate(np.arange(32, dtype=np.int32).reshape(4, 8)):
        state, events = serve(state, prompt, kvjax.Retention.of([(0, 8, 0 if number == ended else 35)]))
    return [event["block"] // 2 for event in kvjax.to_list(events) if event["kind"] == "removed"]


@pytest.mark.long
def test_without_reuse_it_is_lru_and_a_session_that_ends_leaves_first():
    assert removed_by_fourth(ended=None) == [0, 0]
    assert removed_by_fourth(ended=1) == [1, 1]


@pytest.mark.slow
def test_it_conforms():
    with jax.numpy_dtype_promotion("strict"):
        assert check_policy(adaptive())["removed"] > 50


@pytest.mark.long
def test_the_tails_of_prompts_leave_first():
    """Of two documents each keeps its first two blocks, and loses the last one."""
    trace = trace_of([[0, 1, 2], [10, 11, 12], [20, 21], [0, 1, 2], [10, 11, 12]])
    found = research.simulate(trace, t_lru(tail_blocks=1), [6]).blocks[0].tolist()
    assert found == [0, 0, 0, 2, 2]
    assert research.lru_curve(trace, [6]).blocks[0].tolist() == [0, 0, 0, 1, 1]


def test_a_tail_needs_a_block():
    with pytest.raises(ValueError, match="tail_blocks: got 0, wanted an int of at least 1"):
        t_lru(tail_blocks=0)
    assert repr(t_lru(tail_blocks=3)) == "t_lru(tail_blocks=3)"
    assert t_lru(tail_blocks=3) == t_lru(tail_blocks=3) != t_lru(tail_blocks=2)
