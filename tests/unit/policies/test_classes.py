# SPDX-License-Identifier: Apache-2.0
"""`by_class` against lists in plain Python: random forests are released, held, released again and evicted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._arrays import pick
from kvjax.policies import by_class
from kvjax.testing import check_policy
from tests.drive import PLAIN

NUMBER, CLASSES, SIZE = 24, 4, 10
FIELDS = ("refcount", "fill", "children", "hits", "stored")


def label(blocks, ids):
    return blocks.hits[ids]


def stored(blocks, heads):
    return blocks.stored[heads]


def weighted(blocks, heads, weights, now):
    """NaN, which leaves last, for one value of `stored`."""
    value = blocks.stored[heads].astype(jnp.float32)
    return jnp.where(value == 7, jnp.nan, value * weights["w"] - now.astype(jnp.float32))


def weights(num_ids):
    return {"w": jnp.float32(-1)}


POLICIES = {
    "lower classes first": (by_class(label, classes=CLASSES), lambda own, value: own),
    "by score": (by_class(label, stored, classes=CLASSES), lambda own, value: value),
    "with weights": (
        by_class(lambda blocks, ids, own, now: label(blocks, ids), weighted, classes=CLASSES, init=weights, timed=True),
        lambda own, value: np.inf if value == 7 else -value,
    ),
}


class Forest:
    """The arrays of blocks, and for each class a list of blocks in order of release."""

    def __init__(self, score):
        self.score = score
        self.fields = {name: np.zeros(NUMBER, np.int32) for name in FIELDS}
        self.parent = np.full(NUMBER, -1, np.int32)
        self.classes = [[] for _ in range(CLASSES)]
        self.parked, self.due = set(), None
        self.passed_over = 0

    def cached(self):
        return np.flatnonzero((self.fields["fill"] > 0) & (self.fields["refcount"] == 0)).tolist()

    def path(self, block):
        """The block and its ancestors."""
        return [block, *self.path(self.parent[block])] if block >= 0 else []

    def blocks(self):
        blocks = kvjax.init(kvjax.make_spec(num_blocks=NUMBER, max_seqs=1, max_length=4)).groups[0].blocks
        parent = np.stack([self.parent, np.zeros_like(self.parent)], axis=1)
        return blocks.replace(parent=jnp.array(parent), **{name: jnp.array(self.fields[name]) for name in FIELDS})

    def release(self, ids):
        self.parked -= set(ids)
        for block in ids:
            self.fields["refcount"][block] = 0
            self.classes = [[each for each in members if each != block] for members in self.classes]
            self.classes[min(max(self.fields["hits"][block], 0), CLASSES - 1)].append(block)

    def victims(self, wanted, copied):
        """The victims by `by_class`'s rule, one by one. A leaf that is copied keeps its turn, as do those after it."""
        idle = lambda block: self.fields["refcount"][block] == 0 and self.fields["fill"][block] > 0  # noqa: E731
        children, named = self.fields["children"].copy(), []
        self.parked &= {block for block in range(NUMBER) if idle(block)}
        due = self.due if wanted and self.due in self.parked and not children[self.due] else None
        self.due = None if wanted else self.due
        due = None if due == copied else due
        for attempt in range(2):
            if len(named) == wanted:
                break
            if attempt:  # too few were found: all blocks are tried again
                self.parked = set()
            rest = [[each for each in members if idle(each) and each not in self.parked] for members in self.classes]
            rest = [[each for each in members if each not in named] for members in rest]
            passed, stops = [[] for _ in self.classes], None
            while len(named) < wanted and (due is not None or any(rest)):
                if due is None:
                    stored = self.fields["stored"]
                    _, own = min((self.score(c, stored[each[0]]), c) for c, each in enumerate(rest) if each)
                    block = rest[own].pop(0)
                    if children[block] or block == copied:
                        stops = stops or (own, len(passed[own])) if not children[block] else stops
                        passed[own].append(block)
                        self.passed_over += 1
                        continue
                else:
                    block = due
                named.append(block)
                above = int(self.parent[block])
                children[above] -= above >= 0
                waits = above in self.parked or any(above in each for each in passed)
                due = above if waits and not children[above] and above != copied else None
            for own, each in enumerate(passed):
                self.parked |= set(each[: stops[1]] if stops and stops[0] == own else each)
            self.due = due
        return named

    def evict(self, ids):
        for block in ids:
            self.fields["fill"][block] = 0
            if self.parent[block] >= 0:
                self.fields["children"][self.parent[block]] -= 1
        self.parked -= set(ids)
        self.classes = [[each for each in members if each not in ids] for members in self.classes]


def grow(forest, rng):
    """Publishes a path of new blocks after a random one; returns the blocks to release, last ones first."""
    empty = np.flatnonzero(forest.fields["fill"] == 0)
    above = int(rng.choice([-1, *np.flatnonzero(forest.fields["fill"])]))
    for block in rng.permutation(empty)[: rng.integers(0, 5)].tolist():
        forest.parent[block] = above
        forest.fields["children"][above] += above >= 0
        for name, value in (("fill", 1), ("children", 0)):
            forest.fields[name][block] = value
        above = block
    ids = forest.path(above)
    for block in ids:
        forest.fields["hits"][block] = rng.integers(-1, CLASSES + 1)
        forest.fields["stored"][block] = rng.integers(0, 9)
    return ids


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "lower classes first" else pytest.mark.slow)
        for name in POLICIES
    ],
)
def test_victims_are_those_of_lists_in_plain_python(name):
    """Parents may have lower classes and scores than their children, and the log fills up several times."""
    policy, score = POLICIES[name]
    touch = jax.jit(policy.touch)
    now = jnp.int32(3)

    @jax.jit
    def choose(pstate, blocks, wanted, copied):
        refcount = blocks.refcount + jnp.where(jnp.arange(NUMBER) == copied, kvjax.state.COPYING, 0)
        blocks = blocks.replace(refcount=refcount.astype(jnp.int32))
        eligible = lambda ids: (ids >= 0) & (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)  # noqa: E731
        return policy.victims(pstate, blocks, eligible, wanted, now, SIZE)

    rng, forest, pstate = np.random.default_rng(0), Forest(score), policy.init(NUMBER)
    filled = 0
    for _ in range(250):
        ids = grow(forest, rng)
        held = ids[: rng.integers(0, 2) * len(ids)]
        forest.fields["refcount"][held] = 1  # a running request
        released = [] if held else ids
        forest.release(released)
        padded = np.full(NUMBER, -1, np.int32)
        padded[np.sort(rng.permutation(NUMBER)[: len(released)])] = released
        end = int(pstate.end)
        pstate = touch(pstate, forest.blocks(), jnp.array(padded), now)
        filled += int(pstate.end) < end
        wanted, copied = rng.integers(0, SIZE - 2), rng.choice([-1, -1, *forest.cached()])
        found, pstate = choose(pstate, forest.blocks(), jnp.int32(wanted), jnp.int32(copied))
        named = forest.victims(wanted, copied)
        assert found.tolist() == named + [-1] * (SIZE - len(named))
        forest.evict(named)
        forest.release(held)
        pstate = touch(pstate, forest.blocks(), jnp.array((held + [-1] * NUMBER)[:NUMBER], jnp.int32), now)
    assert filled > 3 and forest.passed_over > 100


@pytest.mark.slow
def test_a_score_with_a_state_conforms():
    policy, _ = POLICIES["with weights"]
    state = policy.init(PLAIN.groups[0].num_ids)._replace(state={"w": jnp.float32(2)})
    assert check_policy(policy, seed=4, steps=200, policy_state=state)["removed"] > 10


def test_what_is_no_policy_is_refused():
    with pytest.raises(ValueError, match="classes: got 0, wanted an int of at least 1"):
        by_class(label, classes=0)
    with pytest.raises(ValueError, match=r"score: got array\(.*, wanted a function"):
        by_class(label, np.ones(2), classes=2)
    blocks = Forest(None).blocks()
    for wrong in (lambda blocks, ids: blocks.hits, lambda blocks, ids: jnp.ones(ids.shape)):
        policy = by_class(wrong, classes=2)
        with pytest.raises(ValueError, match=r"^classes of .*: got .*, wanted (integers|\[3\])"):
            policy.touch(policy.init(NUMBER), blocks, jnp.full((3,), -1, jnp.int32), jnp.int32(0))
    policy = by_class(label, lambda blocks, heads: blocks.stored, classes=2)
    with pytest.raises(ValueError, match=r"^score of .*: got int32\[24\], wanted f32\[2\] or i32\[2\]"):
        policy.victims(policy.init(NUMBER), blocks, lambda ids: ids >= 0, jnp.int32(1), jnp.int32(0), SIZE)
