# SPDX-License-Identifier: Apache-2.0
"""Policies: whom each evicts, and that none of them, however hostile, can break the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax.policies import EvictionPolicy
from kvjax.testing import SMALL, check_policy

STEPS = 150
NOTHING = jnp.int32(0)


def fill(size, value):
    return jnp.full((size,), value, jnp.int32)


def newest_first(blocks, eligible):
    """All that may be named, parents before their children would be wrong, so this is right."""
    order = jnp.argsort(blocks.clock - blocks.stored).astype(jnp.int32)
    return jnp.where(eligible(order), order, -1)


def packed(ids, size):
    """The first `size` of the ids that are not -1."""
    ids = ids[jnp.argsort(ids < 0, stable=True)]
    return jnp.pad(ids, (0, max(size - ids.shape[0], 0)), constant_values=-1)[:size]


HOSTILE = {
    "nobody": lambda blocks, eligible, size: fill(size, -1),
    "the same one": lambda blocks, eligible, size: jnp.repeat(packed(newest_first(blocks, eligible), 1), size),
    "each twice": lambda blocks, eligible, size: jnp.repeat(packed(newest_first(blocks, eligible), size), 2)[:size],
    "held and empty ones": lambda blocks, eligible, size: packed(
        jnp.where(eligible(jnp.arange(12, dtype=jnp.int32)), -1, jnp.arange(12, dtype=jnp.int32)), size
    ),
    "any": lambda blocks, eligible, size: packed(jnp.roll(jnp.arange(12, dtype=jnp.int32), blocks.clock), size),
    "unknown ones": lambda blocks, eligible, size: jnp.arange(size, dtype=jnp.int32) * 1_000_003 + 12,
    "far below zero": lambda blocks, eligible, size: fill(size, -(2**31)),
    "parents first": lambda blocks, eligible, size: packed(newest_first(blocks, eligible)[::-1], size),
    "all, though one was wanted": lambda blocks, eligible, size: packed(newest_first(blocks, eligible), size),
}


@functools.cache
def hostile():
    """One policy for them all, so that the verbs are compiled once; its own state says which it is."""

    def victims(which, blocks, eligible, wanted, now, size):
        choose = [functools.partial(lambda f, _: f(blocks, eligible, size), f) for f in HOSTILE.values()]
        return lax.switch(which, choose, None), which

    return EvictionPolicy(lambda num_ids: NOTHING, lambda which, blocks, ids, now: which, victims)


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_policy_cannot_break_the_cache(name):
    honest = name.startswith("all, ")
    which = jnp.int32(list(HOSTILE).index(name))
    tally = check_policy(hostile(), seed=1, steps=STEPS, delivers=honest, pstate=which)
    if honest:
        assert tally["removed"] > 10
    if name == "nobody":
        assert tally["NO_BLOCKS"] > 10


SCORES = {
    "fifo": lambda blocks: (blocks.stored - blocks.clock).astype(jnp.float32),
    "hits": lambda blocks: blocks.hits.astype(jnp.float32),
    "all the same": lambda blocks: jnp.zeros(blocks.fill.shape, jnp.float32),
    "not a number": lambda blocks: jnp.full(blocks.fill.shape, jnp.nan, jnp.float32),
    "some not a number": lambda blocks: jnp.where(blocks.fill % 2 == 0, jnp.nan, blocks.fill.astype(jnp.float32)),
    "infinite": lambda blocks: jnp.where(blocks.children > 0, -jnp.inf, jnp.inf),
    "parents first": lambda blocks: (blocks.clock - blocks.stored).astype(jnp.float32),
}


@functools.cache
def scored():
    def victims(which, blocks, eligible, wanted, now, size):
        policy = kvjax.by_score(lambda blocks: lax.switch(which, list(SCORES.values()), blocks))
        return policy.victims((), blocks, eligible, wanted, now, size)[0], which

    return EvictionPolicy(lambda num_ids: NOTHING, lambda which, blocks, ids, now: which, victims)


@pytest.mark.long
@pytest.mark.parametrize("name", SCORES)
def test_whatever_the_score_there_are_victims(name):
    """`check_policy` demands that what fits by the free count is admitted, and that leaves go first."""
    tally = check_policy(scored(), seed=2, steps=STEPS, pstate=jnp.int32(list(SCORES).index(name)))
    assert tally["removed"] > 10 and tally["NO_BLOCKS"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", [kvjax.lru, kvjax.fifo, kvjax.lfu, kvjax.random])
def test_the_librarys_policies_conform(policy):
    assert check_policy(policy(), seed=3, steps=500)["removed"] > 50


def three_documents(policy):
    """Documents 1, 2 and 3 of two blocks each, all cached, and an empty block; 1 was used twice, 2 three times."""
    spec = kvjax.make_spec(num_blocks=7, max_seqs=1, max_length=16, block_size=4, partial_reuse=False)
    state = kvjax.init(spec, policy)
    for document in (1, 2, 3, 2, 2, 1):
        state = use(state, document)
    return state


def use(state, document):
    """Admits two whole blocks and a token more, writes them and releases."""
    tokens = np.array([document] * 8 + [9] * 8, np.int32)
    state, events = VERBS["admit"](state, 0, tokens, 9)
    done = int(events.cached[0])
    state, _ = VERBS["commit"](state, np.roll(tokens, -done)[None], np.array([9 - done], np.int32))
    return VERBS["release"](state, 0)[0]


VERBS = {
    name: jax.jit(getattr(kvjax, name), compiler_options={"xla_backend_optimization_level": 0})
    for name in ("admit", "commit", "release")
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "order"),
    [(kvjax.lru, [3, 3, 2, 2, 1, 1]), (kvjax.fifo, [1, 1, 2, 2, 3, 3]), (kvjax.lfu, [3, 3, 1, 1, 2, 2])],
)
def test_who_leaves_first(policy, order):
    state = three_documents(policy())
    kvjax.check(state)
    owner = np.asarray(state.groups[0].blocks.tokens)[:, 0]
    left = []
    group = state.groups[0]
    assert int(group.num_cached) == 6
    eligible = lambda ids: (ids >= 0) & (group.blocks.fill[ids] > 0)  # noqa: E731
    for wanted in range(1, 7):
        ids, _ = state.policy.victims(group.policy, group.blocks, eligible, jnp.int32(wanted), jnp.int32(0), 6)
        ids = ids[:wanted].tolist()
        assert len(set(ids)) == wanted and ids[:-1] == left
        left = ids
    assert owner[left].tolist() == order
    assert np.asarray(group.blocks.children)[left].tolist() == [0, 1] * 3  # tails before heads


def blocks_of(spec=SMALL):
    """Eight cached blocks without parents, for a policy called by hand."""
    blocks = kvjax.init(spec).groups[0].blocks
    first = jnp.arange(blocks.fill.shape[0]) < 8
    return kvjax.Blocks(**{**vars(blocks), "fill": jnp.where(first, 4, 0)})


def chosen(policy, wanted=8):
    blocks = blocks_of()
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    ids, _ = policy.victims((), blocks, eligible, jnp.int32(wanted), jnp.int32(0), 8)
    return ids.tolist()


def test_scores_order_as_numbers_do():
    big = [2**31 - 1, 2**30 + 1, 2**30, 5, 4, -(2**24) - 1, -(2**24) - 2, -(2**31), 0, 0, 0, 0]
    assert chosen(kvjax.by_score(lambda blocks: jnp.array(big, jnp.int32))) == [7, 6, 5, 4, 3, 2, 1, 0]
    nan, inf = float("nan"), float("inf")
    odd = jnp.array([nan, inf, 3.0, -inf, -0.5, 1e38, nan, 2.0, 0, 0, 0, 0], jnp.float32)
    ids = chosen(kvjax.by_score(lambda blocks: odd))
    assert ids[:5] == [3, 4, 7, 2, 5] and set(ids[5:]) == {0, 1, 6}
    assert chosen(kvjax.by_score(lambda blocks: odd.astype(jnp.bfloat16)), 2) == [3, 4] + [-1] * 6


@pytest.mark.parametrize(
    "score", [lambda blocks: blocks.clock, lambda blocks: blocks.tokens, lambda blocks: blocks.key]
)
def test_a_score_of_the_wrong_shape_is_named(score):
    with pytest.raises(ValueError, match=r"by_score: the score has shape \(.*\), wanted one per block \(12,\)"):
        chosen(kvjax.by_score(score))


def test_the_random_policy_repeats_itself():
    blocks = kvjax.Blocks(**{**vars(blocks_of()), "released": jnp.arange(12, dtype=jnp.int32)})
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    first, again = (
        kvjax.random().victims((), blocks, eligible, jnp.int32(8), jnp.int32(0), 8)[0].tolist() for _ in range(2)
    )
    assert first == again and sorted(first) == list(range(8)) and first != sorted(first)


def test_the_same_policy_is_the_same_object():
    """It is a static argument: a new object would mean a new program."""
    assert all(make() is make() for make in (kvjax.lru, kvjax.fifo, kvjax.lfu, kvjax.random))
