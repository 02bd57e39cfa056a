# SPDX-License-Identifier: Apache-2.0
"""Policies: the victims of each, and that no policy, however hostile, can break the cache."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax import research
from kvjax.state import EvictionPolicy
from kvjax.testing import Trial, check_policy, random_requests
from kvjax.testing.policy_trial import check_victims
from tests import cases, drive
from tests.drive import PLAIN, Driver

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


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_policy_cannot_break_the_cache(name):
    honest = name.startswith("all, ")
    which = jnp.int32(list(HOSTILE).index(name))
    if honest or name == "nobody":
        tally = check_policy(hostile(), seed=1, steps=STEPS, must_admit=honest, policy_state=which)
        assert tally["removed" if honest else "NO_BLOCKS"] > 10
        return
    trial = Trial(kvjax.init(PLAIN, hostile(), policy_state=which))
    for request in itertools.islice(random_requests(1, PLAIN), STEPS):
        trial.do(request)
    with pytest.raises(AssertionError, match=f"victims of .* named block {NAMED[name]}"):
        check_policy(hostile(), seed=1, steps=STEPS, must_admit=False, policy_state=which)


NAMED = {  # the first fault that `check_policy` finds
    "the same one": r"\d+ twice",
    "each twice": r"\d+ twice",
    "held and empty ones": r"\d+, which (seqs? [\d ]+ holds?|is empty)",
    "any": r"\d+, which (seqs? [\d ]+ holds?|is empty)",
    "unknown ones": r"12, which does not exist",
    "far below zero": r"-2147483648, which does not exist",
    "parents first": r"\d+ before its child \d+",
}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_any_score_has_victims(name):
    """`check_policy` demands that prompts that fit by the free count are admitted, and that leaves go first."""
    tally = check_policy(scored(), seed=2, steps=STEPS, policy_state=jnp.int32(list(SCORES).index(name)))
    assert tally["removed"] > 10 and tally["NO_BLOCKS"] > 0


def test_the_table_has_all_policies():
    helpers = {"Retention", "TokenRange", "by_class", "by_score", "vllm_v1"}
    assert cases.POLICIES.keys() == set(kvjax.policies.__all__) - helpers


@pytest.mark.slow
@pytest.mark.parametrize("policy", cases.POLICIES)
def test_the_librarys_policies_conform(policy):
    made = cases.POLICIES[policy]
    assert check_policy(made.make(), seed=3, steps=500, spec=made.spec)["removed"] > 50


def victims_of(policy, pstate, blocks, wanted, size=8):
    """The victims that a policy names of blocks that all may leave, and its state after that."""
    eligible = lambda ids: (ids >= 0) & (blocks.fill[ids] > 0)  # noqa: E731
    ids, after = policy.victims(pstate, blocks, eligible, jnp.int32(wanted), NOTHING, size)
    return ids.tolist(), after


def chosen(policy, wanted=8, blocks=None, pstate=()):
    return victims_of(policy, pstate, blocks or blocks_of(), wanted)[0]


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
    left, group = [], state.groups[0]
    assert int(group.num_cached) == 6
    for wanted in range(1, 7):
        ids = victims_of(state.policy, group.policy, group.blocks, wanted, size=6)[0][:wanted]
        assert len(set(ids)) == wanted and ids[:-1] == left
        left = ids
    assert owner[left].tolist() == list(made.evicts)
    assert np.asarray(group.blocks.children)[left].tolist() == [0, 1] * 3  # last blocks before first ones


def blocks_of(spec=PLAIN):
    """Eight cached blocks without parents, for a policy called by hand."""
    blocks = kvjax.init(spec).groups[0].blocks
    return blocks.replace(fill=jnp.where(jnp.arange(blocks.fill.shape[0]) < 8, 4, 0))


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


def test_a_score_that_is_none_or_of_another_shape_is_named():
    shapes = (lambda blocks: blocks.clock, lambda blocks: blocks.tokens, lambda blocks: blocks.key)
    for wrong in (lambda blocks: None, lambda blocks: "low", *shapes):
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
    with pytest.raises(AssertionError, match=rf"{part}: NO_BLOCK is padding among the ids \(take jnp.where"):
        check_policy(
            policy, steps=0, policy_state=jnp.arange(1, 1 + kvjax.testing.SMALL.groups[0].num_ids, dtype=jnp.int32)
        )


def choosing(victims, name):
    """A policy without a state."""
    return EvictionPolicy(lambda num_ids: (), lambda pstate, *_: pstate, victims, name=name)


@pytest.mark.parametrize("name", ["held", "empty"])
def test_a_block_that_may_not_leave_is_named_with_its_holder(name):
    def victims(pstate, blocks, eligible, wanted, now, size):
        ids = jnp.arange(blocks.fill.shape[0], dtype=jnp.int32)
        may_not = (blocks.refcount > 0) if name == "held" else (blocks.fill == 0) & (blocks.refcount == 0)
        return packed(jnp.where(may_not, ids, -1), size), pstate

    def check(cache):
        (group,) = cache.state.groups
        policy = choosing(victims, name)
        check_victims(cache.state.replace(policy=policy, groups=(group.replace(policy=()),)), 1)

    cache = Driver(kvjax.init(PLAIN))
    cache.start(2, [7] * 8)
    cache.do("release", 2)
    cache.start(0, [1] * 5)
    words = {"held": "which seq 0 holds", "empty": "which is empty"}
    with pytest.raises(AssertionError, match=rf"^victims of {name}\(\) named block \d+, {words[name]}$"):
        check(cache)
    cache.do("fork", 0, 1)
    pinned = cache.state.groups[0].table[0, :1]
    cache.do("pin", drive.padded(pinned, PLAIN.max_blocks_per_seq, -1))
    for row in (0, 1):
        holders = {0: "seqs 0 1 hold", 1: "seq 1 holds"}
        if name == "held":
            with pytest.raises(AssertionError, match=rf"named block \d+, which {holders[row]}$"):
                check(cache)
        cache.do("release", row)
    if name == "held":
        with pytest.raises(AssertionError, match=rf"named block {pinned[0]}, which a pin holds$"):
            check(cache)


@pytest.mark.parametrize("part", ["touch", "forget"])
def test_the_plain_line_counts_no_padding_in_a_cache(part):
    """The cache passes the number of ids for padding, which jax drops."""
    plain = {
        "touch": lambda seen, blocks, ids, now: seen.at[ids].add(1),
        "forget": lambda seen, ids: seen.at[ids].set(7),
    }
    policy = COUNTED._replace(idle=False, **{part: plain[part]})
    blocks = blocks_of()
    ids = jnp.array([3, -1, 0, -1], jnp.int32)
    before = policy.init(12)
    after = policy.touched(before, blocks, ids, NOTHING) if part == "touch" else policy.forgot(before, blocks, ids)
    assert np.flatnonzero(np.asarray(after) != np.asarray(before)).tolist() == [0, 3]


@pytest.mark.long
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
    for wanted, age in ((0, 0), (2, 1), (3, 2), (6, 5)):
        _, after = victims_of(policy, pstate, blocks, wanted)
        assert int(after.age - jnp.int32(last)) == age


def test_lfu_breaks_ties_by_age():
    """Ties by block number would give [4, 5, 1, 3, 0, 2, 6, 7]."""
    hits = jnp.array([9000, 1, 121, 1, 0, 0, 120, 121, 0, 0, 0, 0], jnp.int32)
    blocks, policy = blocks_of().replace(hits=hits), kvjax.policies.lfu()
    released = jnp.array([7, 6, -1, 2, 5, 0, 4, 3, 1], jnp.int32)
    pstate = policy.touch(policy.init(12), blocks, released, NOTHING)
    assert chosen(policy, blocks=blocks, pstate=pstate) == [5, 4, 3, 1, 7, 6, 2, 0]


def test_the_same_policy_is_the_same_object():
    """A policy is a static argument: a new object would mean a new program."""
    assert all(policy.make() is policy.make() for policy in cases.POLICIES.values())
    assert kvjax.policies.vllm_v1() is kvjax.lru()


def test_what_costs_twice_as_much_may_lie_twice_as_long():
    """The score of eight leaves of various depths, fills and ages, against the formula in float64."""
    rng = np.random.default_rng(0)
    depth, fill, age = rng.integers(0, 20_000, 12), rng.integers(1, 5, 12), rng.permutation(12) * 7 + 1
    clock = jnp.int32(-(2**31) + 40)  # it has wrapped around after some of their releases
    blocks = blocks_of().replace(
        depth=jnp.asarray(depth, jnp.int32), fill=jnp.where(jnp.arange(12) < 8, jnp.asarray(fill, jnp.int32), 0),
        clock=clock, released=clock - jnp.asarray(age, jnp.int32),
    )  # fmt: skip
    for balance in (100, 24_576):
        wanted = fill * (balance + 4 * depth + fill / 2) / age
        assert chosen(kvjax.policies.cost_aware(balance), blocks=blocks) == np.argsort(wanted[:8]).tolist()
    longest_ago = np.argsort(-age[:8]).tolist()
    assert chosen(kvjax.policies.cost_aware(), blocks=blocks) != longest_ago
    alike = blocks.replace(depth=jnp.full(12, 3, jnp.int32), fill=blocks_of().fill)
    assert chosen(kvjax.policies.cost_aware(), blocks=alike) == longest_ago


def test_the_random_policy_repeats_itself():
    blocks = blocks_of().replace(released=jnp.arange(12, dtype=jnp.int32))
    first, again = (chosen(kvjax.policies.random(), blocks=blocks) for _ in range(2))
    assert first == again and sorted(first) == list(range(8)) and first != sorted(first)


@functools.cache
def counting():
    """A policy that counts the calls of its functions in its state, and chooses no victim."""

    def called(at, counts, *args):
        return counts.at[at].add(1)

    def victims(counts, *args):
        return fill(args[-1], -1), called(1, counts)

    touch, forget = functools.partial(called, 0), functools.partial(called, 2)
    return EvictionPolicy(lambda num_ids: jnp.zeros(3, jnp.int32), touch, victims, forget)


@pytest.mark.long
def test_a_refused_verb_leaves_the_policys_own_state():
    """A trial verifies that a refused verb changes nothing; here the policy counts all calls of its functions."""
    tally = check_policy(counting(), seed=1, steps=STEPS, must_admit=False)
    assert min(tally["BAD_REQUEST"], tally["HELD"], tally["NO_BLOCKS"]) > 0


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
    ids, after = victims_of(state.policy, seen, blocks, wanted=6, size=6)
    assert owner[ids].tolist() == [3, 3, 1, 1, 2, 2] and after is seen


def test_a_learned_score_begins_with_its_weights():
    spec = kvjax.make_spec(num_blocks=12, num_host_blocks=4, max_seqs=1, max_length=16, block_size=4)
    weights = {"w": np.array([1, -5], np.int32)}
    state = kvjax.init(spec, learned(), policy_state=weights)
    (group,) = state.groups
    assert group.policy["w"].tolist() == group.host.policy["w"].tolist() == [1, -5]
    kvjax.check(jax.jit(lambda x: x, donate_argnums=0)(state))  # no array occurs twice
    state = kvjax.Cache.create(PLAIN, learned(), policy_state=weights).state
    blocks = blocks_of().replace(depth=jnp.arange(12, dtype=jnp.int32))
    assert victims_of(learned(), state.groups[0].policy, blocks, wanted=3, size=3)[0] == [7, 6, 5]
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
