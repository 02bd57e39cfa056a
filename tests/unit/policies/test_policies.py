# SPDX-License-Identifier: Apache-2.0
"""Policies: the victims of each, and that no policy, however hostile, can break the cache."""

import collections
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax import research
from kvjax.state import EvictionPolicy
from kvjax.testing import check_policy
from tests import cases
from tests.drive import BOTH, PLAIN, Driver

STEPS = 150
NOTHING = jnp.int32(0)


def fill(size, value):
    return jnp.full((size,), value, jnp.int32)


def newest_first(blocks, eligible):
    """All possible victims, the newest first, so that children come before their parents."""
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
    """One policy for all hostile ones, chosen by its own state, so that the verbs are compiled once."""

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
def test_any_score_has_victims(name):
    """`check_policy` demands that prompts that fit by the free count are admitted, and that leaves go first."""
    tally = check_policy(scored(), seed=2, steps=STEPS, pstate=jnp.int32(list(SCORES).index(name)))
    assert tally["removed"] > 10 and tally["NO_BLOCKS"] > 0


def test_the_table_has_all_policies():
    helpers = {"Retention", "TokenRange", "by_class", "by_score", "vllm_v1"}
    assert cases.POLICIES.keys() == set(kvjax.policies.__all__) - helpers


@pytest.mark.slow
@pytest.mark.parametrize("policy", cases.POLICIES)
def test_the_librarys_policies_conform(policy):
    made = cases.POLICIES[policy]
    assert check_policy(made.make(), seed=3, steps=500, spec=made.spec)["removed"] > 50


def three_documents(policy):
    """Documents 1, 2 and 3 of two blocks each, all cached, and an empty block; 1 was used twice, 2 three times."""
    spec = kvjax.make_spec(num_blocks=7, max_seqs=1, max_length=16, block_size=4, partial_reuse=False)
    cache = Driver(kvjax.init(spec, policy))
    for document in (1, 2, 3, 2, 2, 1):
        cache.start(0, [document] * 8 + [9])
        cache.do("release", 0)
    return cache.state


@pytest.mark.long
@pytest.mark.parametrize("policy", [name for name, policy in cases.POLICIES.items() if policy.evicts])
def test_who_leaves_first(policy):
    made = cases.POLICIES[policy]
    state = three_documents(made.make())
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
    assert owner[left].tolist() == list(made.evicts)
    assert np.asarray(group.blocks.children)[left].tolist() == [0, 1] * 3  # last blocks before first ones


def blocks_of(spec=PLAIN):
    """Eight cached blocks without parents, for a policy called by hand."""
    blocks = kvjax.init(spec).groups[0].blocks
    first = jnp.arange(blocks.fill.shape[0]) < 8
    return kvjax.state.Blocks(**{**vars(blocks), "fill": jnp.where(first, 4, 0)})


def chosen(policy, wanted=8, blocks=None, pstate=()):
    blocks = blocks or blocks_of()
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    ids, _ = policy.victims(pstate, blocks, eligible, jnp.int32(wanted), jnp.int32(0), 8)
    return ids.tolist()


def test_scores_order_as_numbers_do():
    big = [2**31 - 1, 2**30 + 1, 2**30, 5, 4, -(2**24) - 1, -(2**24) - 2, -(2**31), 0, 0, 0, 0]
    assert chosen(kvjax.by_score(lambda blocks: jnp.array(big, jnp.int32))) == [7, 6, 5, 4, 3, 2, 1, 0]
    nan, inf = float("nan"), float("inf")
    odd = jnp.array([nan, inf, 3.0, -inf, -0.5, 1e38, nan, 2.0, 0, 0, 0, 0], jnp.float32)
    ids = chosen(kvjax.by_score(lambda blocks: odd))
    assert ids[:5] == [3, 4, 7, 2, 5] and set(ids[5:]) == {0, 1, 6}
    assert chosen(kvjax.by_score(lambda blocks: jnp.arange(12, dtype=jnp.int32) // 4), 3) == [0, 1, 2] + [-1] * 5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint32", "uint8", "int8", "bool"])
def test_a_score_of_coarse_or_unsigned_numbers_is_refused(dtype):
    """float16 has equal numbers above 2,048 for blocks of different ones, and unsigned ones wrap below 0."""
    with pytest.raises(ValueError, match=rf"^score of .*: got {dtype}\[12\], wanted f32\[12\] or i32\[12\]"):
        chosen(kvjax.by_score(lambda blocks: jnp.arange(12).astype(dtype)))
    policy = kvjax.policies.by_class(
        lambda blocks, ids: blocks.hits[ids], lambda blocks, heads: heads.astype(dtype), classes=2
    )
    with pytest.raises(ValueError, match=rf"^score of .*: got {dtype}\[2\], wanted f32\[2\]"):
        chosen(policy, pstate=policy.init(12))


def serve_once(policy):
    """Traces the verbs that call a policy."""

    def run(state):
        state, _ = kvjax.admit(state, 0, np.arange(8), 8)
        return kvjax.release(state, 0)

    return jax.eval_shape(run, kvjax.init(PLAIN, policy))


COUNTED = kvjax.by_score(lambda blocks, seen: seen, init=lambda number: jnp.zeros(number, jnp.int32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"touch": lambda seen, *_: None}, r"touch of .*: got None, wanted the state int32\[\d+\]"),
        ({"touch": lambda seen, *_: seen[:3]}, r"touch of .*: got int32\[3\], wanted the state"),
        ({"touch": lambda seen, *_: seen.astype(jnp.float32)}, r"touch of .*: got float32\[\d+\], wanted the state"),
        ({"victims": lambda *_: None}, r"victims of .*: got None, wanted a pair of int32\[\d+\]"),
        ({"victims": lambda seen, *_: jnp.zeros(3, jnp.int32)}, r"victims of .*: got int32\[3\], wanted a pair"),
        ({"victims": lambda seen, *_: (jnp.zeros(3, jnp.int32), seen)}, r"victims of .*: got .*int32\[3\].*, wanted"),
        ({"victims": lambda *a: (jnp.zeros(a[5]), a[0])}, r"victims of .*: got .*float32\[\d+\].*, wanted a pair"),
        ({"victims": lambda *a: (jnp.full(a[5], -1, jnp.int32), None)}, r"victims of .*: got None, wanted the state"),
        ({"touch": None}, "policy.touch: got None, wanted a function"),
        ({"victims": 3}, "policy.victims: got 3, wanted a function"),
        ({"init": None}, "policy.init: got None, wanted a function"),
    ],
)  # fmt: skip
def test_what_a_policy_returns_is_named_where_it_is_wrong(changed, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        serve_once(COUNTED._replace(**changed))


def test_a_score_that_is_none_is_named():
    for wrong in (lambda blocks: None, lambda blocks: "low"):
        with pytest.raises(ValueError, match=r"^score of .*: got .*, wanted f32\[\d+\] or i32\[\d+\]"):
            serve_once(kvjax.by_score(wrong))
    for options in ({"fn": None}, {"fn": 3}, {"init": 3}, {"init": COUNTED.init, "touch": 3}):
        with pytest.raises(ValueError, match=rf"^{list(options)[-1]}: got (None|3), wanted a function"):
            kvjax.by_score(**({"fn": lambda blocks: blocks.fill} | options))


@pytest.mark.parametrize("part", ["touch", "forget"])
def test_a_policy_that_takes_padding_for_the_last_block_is_found(part):
    """NO_BLOCK is -1, which as an index is the last element."""
    wrong = {
        "touch": lambda seen, blocks, ids, now: seen.at[ids].add(1),
        "forget": lambda seen, ids: seen.at[ids].set(0),
    }
    policy = COUNTED._replace(idle=False, **{part: wrong[part]})
    with pytest.raises(AssertionError, match=f"{part}: NO_BLOCK is padding"):
        check_policy(policy, steps=0, pstate=jnp.arange(1, 1 + kvjax.testing.SMALL.groups[0].num_ids, dtype=jnp.int32))


def test_lfu_da_forgets_what_was_popular_once():
    """The first prompt comes back eight times and then never; two others come in turn. `lfu` keeps the first one."""
    prompts = [[1], [2]] + [[1]] * 8 + [[3], [4]] * 12
    trace = research.make_trace(range(len(prompts)), [4] * len(prompts), [0] * len(prompts), prompts, block_size=4)
    hits = {
        name: int(research.simulate(trace, policy, [2], rule="papers").blocks.sum())
        for name, policy in {"lfu": kvjax.policies.lfu(), "lfu_da": kvjax.policies.lfu_da()}.items()
    }
    assert hits["lfu"] == 8 and hits["lfu_da"] > 16


def test_lfu_da_counts_from_the_age_of_the_cache():
    """Counts may wrap: they are compared by their distance to the age."""
    policy, last = kvjax.policies.lfu_da(), 2**31 - 3
    hits = jnp.array([0, 4, 2, 2, 0, 300, 1, 200, 0, 0, 0, 0], jnp.int32)
    blocks = blocks_of().replace(hits=hits, released=jnp.arange(12, dtype=jnp.int32), clock=jnp.int32(12))
    start = policy.init(12)._replace(age=jnp.int32(last))
    pstate = policy.touch(start, blocks, jnp.array([0, 1, -1, 2, 3, 4, 5, 6, 7], jnp.int32), NOTHING)
    assert chosen(policy, blocks=blocks, pstate=pstate) == [0, 4, 6, 2, 3, 1, 5, 7]
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    for wanted, age in ((0, 0), (2, 1), (3, 2), (6, 5)):
        _, after = policy.victims(pstate, blocks, eligible, jnp.int32(wanted), NOTHING, 8)
        assert int(after.age - jnp.int32(last)) == age


def test_lfu_breaks_ties_by_age():
    """Ties by block number would give [4, 5, 1, 3, 0, 2, 6, 7]."""
    hits = jnp.array([9000, 1, 121, 1, 0, 0, 120, 121, 0, 0, 0, 0], jnp.int32)
    blocks, policy = blocks_of().replace(hits=hits), kvjax.policies.lfu()
    released = jnp.array([7, 6, -1, 2, 5, 0, 4, 3, 1], jnp.int32)
    pstate = policy.touch(policy.init(12), blocks, released, NOTHING)
    assert chosen(policy, blocks=blocks, pstate=pstate) == [5, 4, 3, 1, 7, 6, 2, 0]


@pytest.mark.parametrize(
    "score", [lambda blocks: blocks.clock, lambda blocks: blocks.tokens, lambda blocks: blocks.key]
)
def test_a_score_of_the_wrong_shape_is_named(score):
    with pytest.raises(ValueError, match=r"^score of <lambda>: got u?int32\[.*\], wanted f32\[12\] or i32\[12\]"):
        chosen(kvjax.by_score(score))


def test_the_random_policy_repeats_itself():
    blocks = kvjax.state.Blocks(**{**vars(blocks_of()), "released": jnp.arange(12, dtype=jnp.int32)})
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    first, again = (
        kvjax.policies.random().victims((), blocks, eligible, jnp.int32(8), jnp.int32(0), 8)[0].tolist()
        for _ in range(2)
    )
    assert first == again and sorted(first) == list(range(8)) and first != sorted(first)


def test_the_same_policy_is_the_same_object():
    """A policy is a static argument: a new object would mean a new program."""
    assert all(policy.make() is policy.make() for policy in cases.POLICIES.values())
    assert kvjax.policies.vllm_v1() is kvjax.lru()


def test_what_costs_twice_as_much_may_lie_twice_as_long():
    """The score of eight leaves of various depths, fills and ages, against the formula in float64."""
    rng = np.random.default_rng(0)
    depth, fill, age = rng.integers(0, 20_000, 12), rng.integers(1, 5, 12), rng.permutation(12) * 7 + 1
    blocks = kvjax.state.Blocks(
        **{
            **vars(blocks_of()),
            "depth": jnp.asarray(depth, jnp.int32),
            "fill": jnp.where(jnp.arange(12) < 8, jnp.asarray(fill, jnp.int32), 0),
            "clock": jnp.int32(-(2**31) + 40),  # it has wrapped around after some of their releases
            "released": jnp.int32(-(2**31) + 40) - jnp.asarray(age, jnp.int32),
        }
    )

    def order(policy, blocks=blocks):
        eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
        return policy.victims((), blocks, eligible, jnp.int32(8), jnp.int32(0), 8)[0].tolist()

    for balance in (100, 24_576):
        wanted = fill * (balance + 4 * depth + fill / 2) / age
        assert order(kvjax.policies.cost_aware(balance)) == np.argsort(wanted[:8]).tolist()
    assert order(kvjax.policies.cost_aware()) != np.argsort(-age[:8]).tolist()
    alike = kvjax.state.Blocks(**{**vars(blocks), "depth": jnp.full(12, 3, jnp.int32), "fill": blocks_of().fill})
    assert order(kvjax.policies.cost_aware(), alike) == np.argsort(-age[:8]).tolist()  # least recently released first


# A refused verb leaves the policy's own state unchanged.


@functools.cache
def counting():
    """A policy that counts the calls of its functions in its state, and chooses no victim."""

    def called(at, counts, *args):
        return counts.at[at].add(1)

    def victims(counts, *args):
        return fill(args[-1], -1), called(1, counts)

    touch, forget = functools.partial(called, 0), functools.partial(called, 2)
    return EvictionPolicy(lambda num_ids: jnp.zeros(3, jnp.int32), touch, victims, forget)


LINE, LINES = np.arange(1, 22, dtype=np.int32), np.ones((4, 20), np.int32)
REFUSED = {
    "admit": (9, LINE, 4),  # no such row
    "extend": (np.eye(4, dtype=bool)[1],),  # a free one
    "commit": (LINES, np.full(4, -1, np.int32)),
    "release": (1,),
    "fork": (0, 0),
    "truncate": (1, 1),
    "pin": (np.full(5, 7, np.int32),),
    "unpin": (np.full(5, 7, np.int32),),
    "evict": (np.array([99], np.int32),),
    "reset": (),  # row 0 is in use
    "offload": (np.array([99, -1, -1, -1], np.int32),),
    "onboard": (np.array([99, -1, -1, -1], np.int32),),
    "swap_out": (1,),
    "swap_in": (1,),
}
TIERED = dataclasses.replace(PLAIN, groups=(dataclasses.replace(PLAIN.groups[0], num_host_blocks=4),))


def a_row_and_something_cached(state):
    cache = Driver(state)
    for row, first in ((0, 1), (1, 5)):
        cache.start(row, range(first, first + 6))
    cache.do("release", 1)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "verbs"),
    [
        pytest.param(TIERED, REFUSED, marks=pytest.mark.slow),
        (PLAIN, list(REFUSED)[:-4]),
    ],
)
def test_a_refused_verb_leaves_the_policys_own_state(spec, verbs):
    cache = a_row_and_something_cached(kvjax.init(spec, counting()))
    before = cache.state
    assert before.groups[0].policy.tolist() == [1, 0, 0]  # the release; all other requests were empty
    calls = [(verb, {"namespace": 0} if verb == "admit" else {}) for verb in verbs]
    for verb, options in [*calls, *[("admit", {"namespace": 0, "tiers": BOTH})] * spec.has_host]:
        assert set(cache.status(verb, *REFUSED[verb], **options)) != {"OK"}, verb
        chex.assert_trees_all_equal(cache.state, before)


def test_a_policy_that_is_not_as_idle_as_it_says_is_found_out():
    with pytest.raises(AssertionError, match="touch: an idle policy, an empty request, yet changed"):
        check_policy(counting()._replace(idle=True), steps=0)
    assert check_policy(counting(), steps=0) == check_policy(kvjax.lru(), steps=0) == {}
    assert kvjax.lru().idle and kvjax.policies.fifo().idle and not counting().idle


# Scores with a state of their own.


@functools.cache
def most_often_released_last():
    return kvjax.by_score(
        lambda blocks, seen: seen,
        init=lambda num_ids: jnp.zeros((num_ids,), jnp.int32),
        touch=lambda seen, blocks, ids, now: seen.at[jnp.where(ids >= 0, ids, len(seen))].add(1, mode="drop"),
    )


@functools.cache
def learned():
    """A score with weights for fill and depth, without training."""
    return kvjax.by_score(
        lambda blocks, weights, now: weights["w"][0] * blocks.fill + weights["w"][1] * blocks.depth + 0 * now,
        timed=True,
        init=lambda num_ids: {"w": jnp.zeros((2,), jnp.int32)},
    )


@pytest.mark.long
def test_a_score_may_have_a_state_of_its_own():
    state = three_documents(most_often_released_last())
    blocks = state.groups[0].blocks
    owner, seen = np.asarray(blocks.tokens)[:, 0], np.asarray(state.groups[0].policy)
    assert {int(o): int(n) for o, n in zip(owner, seen, strict=True) if n} == {1: 2, 2: 3, 3: 1}
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    policy = state.policy
    ids, after = policy.victims(seen, blocks, eligible, jnp.int32(6), jnp.int32(0), 6)
    assert owner[ids].tolist() == [3, 3, 1, 1, 2, 2] and after is seen


def test_a_learned_score_begins_with_its_weights():
    spec = kvjax.make_spec(num_blocks=12, num_host_blocks=4, max_seqs=1, max_length=16, block_size=4)
    weights = {"w": np.array([1, -5], np.int32)}
    state = kvjax.init(spec, learned(), policy_state=weights)
    (group,) = state.groups
    assert group.policy["w"].tolist() == group.host.policy["w"].tolist() == [1, -5]
    kvjax.check(jax.jit(lambda x: x, donate_argnums=0)(state))  # no array occurs twice
    state = kvjax.Cache.create(PLAIN, learned(), policy_state=weights).state
    blocks = kvjax.state.Blocks(**{**vars(blocks_of()), "depth": jnp.arange(12, dtype=jnp.int32)})
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    pstate = state.groups[0].policy
    ids, _ = learned().victims(pstate, blocks, eligible, jnp.int32(3), jnp.int32(0), 3)
    assert ids.tolist() == [7, 6, 5]
    after, events = kvjax.reset(state)
    assert events.ok and after.groups[0].policy["w"].tolist() == [1, -5]


@pytest.mark.parametrize(
    "given", [{"w": np.zeros(3, np.int32)}, {"w": np.zeros(2, np.float32)}, {"v": np.zeros(2, np.int32)}, (), 3]
)
def test_a_policys_state_of_the_wrong_shape_is_named(given):
    with pytest.raises(ValueError, match=r"^policy_state: got .*, wanted \{'w': 'int32\[2\]'\}"):
        kvjax.init(PLAIN, learned(), policy_state=given)


def test_a_touch_without_a_state_is_named():
    with pytest.raises(ValueError, match=r"^touch: got a function, wanted None"):
        kvjax.by_score(lambda blocks: blocks.fill, touch=lambda pstate, *_: pstate)


@pytest.mark.slow
def test_scores_with_a_state_conform():
    assert check_policy(most_often_released_last(), seed=5, steps=STEPS)["removed"] > 10


# The reference systems' own data structures, in plain Python. A block has an id, and its contents are the path of
# tokens that it ends. Requests are admitted, grow by a token at a time, and are released.


class FreeQueue:
    """The free queue of vLLM v1: a doubly linked list whose head and tail are no blocks."""

    def __init__(self, num_blocks):
        self.after, self.before = {}, {}
        self._link("head", "tail")
        for block in range(num_blocks):
            self.free(block, None)

    def _link(self, left, right):
        self.after[left], self.before[right] = right, left

    def take(self, contents, now):
        block = self.after["head"]
        self.touch(block)
        return block

    def touch(self, block):
        self._link(self.before.pop(block), self.after.pop(block))

    def free(self, block, contents, stated=None, now=0):
        """Frees blocks: those with contents go to the end, others to the front."""
        left = self.before["tail"] if contents else "head"
        right = self.after[left]
        self._link(left, block)
        self._link(block, right)

    def refresh(self, now):
        """Does nothing, because only the position in the queue counts."""


class PriorityQueues:
    """TensorRT-LLM's policy: a queue for each priority, and a list of expiries; leaves go first."""

    def __init__(self, num_blocks):
        self.queues = [collections.OrderedDict() for _ in range(101)]
        self.expiring = []  # (ms, block)
        self.empty = list(range(num_blocks))

    def take(self, contents, now):
        if self.empty:
            return self.empty.pop()
        parents = {path[:-SIZE] for path in contents.values()}
        block = next(b for queue in self.queues for b in queue if contents[b] not in parents)
        self.touch(block)
        return block

    def touch(self, block):
        for queue in self.queues:
            queue.pop(block, None)
        self.expiring = [entry for entry in self.expiring if entry[1] != block]

    def free(self, block, contents, stated=(35, None), now=0):
        if not contents:
            self.empty.append(block)
            return
        priority, ttl = stated
        self.queues[priority][block] = None
        if ttl is not None and priority != 35:
            self.expiring.append((now + ttl, block))

    def refresh(self, now):
        for ms, block in sorted(self.expiring, key=lambda entry: entry[0]):
            if ms <= now:
                self.touch(block)
                self.queues[35][block] = None


SIZE, NUM_BLOCKS, LONGEST = 2, 14, 16


class Manager:
    """Requests over one of these. Found blocks are touched, the rest are taken, and all are freed from the end."""

    def __init__(self, structure):
        self.free, self.removed = structure, []
        self.held, self.stated = [0] * NUM_BLOCKS, [(35, None)] * NUM_BLOCKS
        self.contents, self.rows, self.now = {}, {}, 0

    def _fits(self, count):
        return self.held.count(0) >= count

    def _take(self, stated):
        block = self.free.take(self.contents, self.now)
        if block in self.contents:
            self.removed.append(self.contents.pop(block))
        self.held[block], self.stated[block] = 1, stated
        return block

    def admit(self, row, tokens, ranges, decode):
        """Admits a prompt; whether it fits."""

        def stated(column):
            return next((w for start, end, *w in ranges if start <= column * SIZE < end), None)

        where = {path: block for block, path in self.contents.items()}
        paths = [tuple(tokens[:end]) for end in range(SIZE, len(tokens), SIZE)]
        found = [where[path] for path in paths[: next((i for i, p in enumerate(paths) if p not in where), len(paths))]]
        new = -(-len(tokens) // SIZE) - len(found)
        if not self._fits(new + sum(not self.held[block] for block in found)):
            return False
        for column, block in enumerate(found):
            if not self.held[block]:
                self.free.touch(block)
            self.held[block] += 1
            self.stated[block] = stated(column) or self.stated[block]
        table = found + [self._take(stated(len(found) + i) or (35, None)) for i in range(new)]
        self.rows[row] = (table, list(tokens), decode)
        self._fill(row)
        return True

    def grow(self, rows, token):
        """Extends each of these rows by a token, if all fit."""
        new = [row for row in rows if len(self.rows[row][1]) % SIZE == 0]
        if not self._fits(len(new)):
            return False
        for row in rows:
            table, tokens, decode = self.rows[row]
            if row in new:
                table.append(self._take(decode))
            tokens.append(token + row)
            self._fill(row)
        return True

    def _fill(self, row):
        table, tokens, _ = self.rows[row]
        self.contents |= {table[end // SIZE - 1]: tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)}

    def release(self, row):
        for block in reversed(self.rows.pop(row)[0]):
            self.held[block] -= 1
            if not self.held[block]:
                self.free.free(block, self.contents.get(block), self.stated[block], self.now)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def turn(state, leaving, growing, token, row, tokens, length, retention, now):
    """Releases row `leaving`, gives those of `growing` a token each and `row` a prompt, and commits all at once."""
    state, released = kvjax.release(state, leaving, now=now)
    state, extended = kvjax.extend(state, growing, now=now)
    state, admitted = kvjax.admit(state, row, tokens, length, retention=retention, now=now)
    rows = jnp.arange(growing.shape[0])
    new = jnp.where(rows[:, None] == row, jnp.roll(tokens, -admitted.cached[0])[None], token + rows[:, None])
    grown = (growing & extended.ok).astype(jnp.int32)
    count = jnp.where(rows == row, jnp.where(admitted.ok, length - admitted.cached[0], 0), grown)
    state, committed = kvjax.commit(state, new, count, now=now)
    return state, (released, extended, admitted, committed)


@functools.cache
def presets():
    """Both presets as one policy, chosen by its own state, so that `turn` is compiled once."""
    queue, leaf = kvjax.policies.vllm_v1(), kvjax.policies.trt_leaf()

    def touch(pstate, blocks, ids, now):
        return pstate[0], queue.touch(pstate[1], blocks, ids, now)

    def victims(pstate, *args):
        size, (is_leaf, ring) = args[-1], pstate
        of_queue, ring = queue.victims(ring, *args)
        return jnp.where(is_leaf, leaf.victims((), *args)[0], of_queue[:size]), (is_leaf, ring)

    return EvictionPolicy(lambda num_ids: (jnp.bool_(False), queue.init(num_ids)), touch, victims)


def random_prompt(rng, documents):
    """A prompt of an odd number of tokens that begins like a document, and its stated priorities."""
    length = int(rng.integers(1, LONGEST // SIZE)) * SIZE - 1
    shared = int(rng.integers(length + 1))
    tokens = [*documents[rng.integers(4), :shared].tolist(), *rng.integers(0, 3, length - shared).tolist()]
    first, last = sorted(rng.integers(0, length + 1, 2).tolist())
    *priorities, decode = zip(
        rng.choice([0, 35, 60, 90], 3).tolist(), [t or None for t in rng.integers(0, 30, 3).tolist()], strict=True
    )
    ranges = [(a, b, *stated) for a, b, stated in ((0, first, priorities[0]), (first, last, priorities[1])) if a < b]
    return tokens, ranges, decode


@pytest.mark.slow
@pytest.mark.parametrize("structure", [FreeQueue, PriorityQueues])
def test_presets_evict_what_their_models_do(structure):
    """Random histories have the same victims in the same order, by the blocks' contents.

    Prompts end inside a block, and generated tokens are all different, because the references keep equal blocks.
    """
    rng, seqs, gone = np.random.default_rng(7), 4, 0
    spec = kvjax.make_spec(
        num_blocks=NUM_BLOCKS, max_seqs=seqs, max_length=2 * LONGEST, block_size=SIZE, partial_reuse=False,
        retention=True,
    )  # fmt: skip
    documents = rng.integers(0, 3, (4, LONGEST))
    for _ in range(6):
        state, model, mirror = kvjax.init(spec, presets()), Manager(structure(NUM_BLOCKS)), kvjax.events.Mirror()
        (group,) = state.groups
        group = group.replace(policy=(jnp.bool_(structure is PriorityQueues), group.policy[1]))
        state, model.now = state.replace(groups=(group,)), 2**31 - 100
        for step in range(60):
            model.removed, model.now = [], model.now + int(rng.integers(0, 8))
            model.free.refresh(model.now)
            leaving = int(rng.choice([*model.rows] + [-1] * (len(model.rows) < seqs)))
            if leaving >= 0:
                model.release(leaving)
            short = [row for row, (_, tokens, _) in model.rows.items() if len(tokens) < 2 * LONGEST]
            growing, token = [row for row in short if rng.random() < 0.6], 10 + seqs * step
            grew = model.grow(growing, token)
            row = next(row for row in range(seqs) if row not in model.rows)
            tokens, ranges, decode = random_prompt(rng, documents)
            fits = model.admit(row, tokens, ranges, decode)
            retention = kvjax.Retention.of(ranges, decode_priority=decode[0], decode_ttl=decode[1], max_ranges=2)
            state, done = turn(
                state, np.int32(leaving), np.isin(np.arange(seqs), growing), np.int32(token), np.int32(row),
                np.array(tokens + [0] * (LONGEST - len(tokens)), np.int32), np.int32(len(tokens)), retention,
                np.uint32(model.now).view(np.int32),
            )  # fmt: skip
            events = [event for events in done for event in kvjax.to_list(events)]
            removed = [mirror.nodes[0, e["block"], e["generation"]][1] for e in events if e["kind"] == "removed"]
            assert removed == model.removed
            assert (bool(done[1].ok), bool(done[2].ok)) == (grew, fits)
            mirror, gone = kvjax.fold(events, mirror), gone + len(removed)
        kvjax.check(state)
        assert {path for _, _, path in kvjax.events.index_of(state)} == set(model.contents.values())
    assert gone > 500
