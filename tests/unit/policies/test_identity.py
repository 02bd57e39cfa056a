# SPDX-License-Identifier: Apache-2.0
"""Policies are values: equality, the traces that it saves, and pickling."""

import copy
import dataclasses
import functools
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import EvictionPolicy, by_score
from kvjax.policies import by_class, cost_aware, lru, vllm_v1
from kvjax.testing import SMALL
from tests import cases
from tests.drive import output_of


def fullest_last(blocks):
    return blocks.fill


def deepest_first(blocks):
    return -blocks.depth


def scaled(blocks, *, scale):
    return blocks.fill * scale


def seen_last(blocks, seen, now):
    return seen + now


def nothing_seen(num_ids):
    return jnp.zeros((num_ids,), jnp.int32)


def see(seen, blocks, ids, now):
    return seen


def nobody(pstate, blocks, eligible, wanted, now, size):
    return jnp.full((size,), -1, jnp.int32), pstate


def class_of(blocks, ids, seen=None, now=None, *, scale=1):
    return blocks.hits[ids] * scale


def head_of(blocks, heads, seen, now, *, scale):
    return blocks.stored[heads] * scale


@dataclasses.dataclass(frozen=True)
class Scale:
    """A score that is itself a value."""

    by: int

    def __call__(self, blocks):
        return blocks.fill * self.by


MAKERS = {
    **{name: policy.make for name, policy in cases.POLICIES.items()},
    "vllm_v1": vllm_v1,
    "cost_aware of another width": lambda: cost_aware(balance=6 * 4096),
    "by_score": lambda: by_score(fullest_last),
    "by_score with a name": lambda: by_score(fullest_last, name="x"),
    "by_score with all": lambda: by_score(seen_last, timed=True, init=nothing_seen, touch=see),
    "by_score with a parameter": lambda: by_score(functools.partial(scaled, scale=3)),
    "by_score of a value": lambda: by_score(Scale(3)),
    "by_class": lambda: by_class(class_of, classes=3),
    "by_class with all": lambda: by_class(
        functools.partial(class_of, scale=2),
        functools.partial(head_of, scale=3),
        classes=3,
        timed=True,
        init=nothing_seen,
        name="x",
    ),
    "by hand": lambda: EvictionPolicy(nothing_seen, see, nobody),
}


def made():
    """Every policy, made anew, because the library's makers cache theirs."""
    for policy in cases.POLICIES.values():
        policy.make.cache_clear()
    return {name: make() for name, make in MAKERS.items()}


def test_made_again_it_is_the_same_value():
    first, again = made(), made()
    assert first == again and not any(again[name] is first[name] for name in MAKERS)
    assert [hash(policy) for policy in first.values()] == [hash(policy) for policy in again.values()]
    assert len(set(first.values())) == len(MAKERS) - 2  # vllm_v1 is lru, and 24,576 is 6 * 4,096


def test_a_name_alone_makes_no_two_equal():
    one, other = lambda blocks: blocks.fill, lambda blocks: blocks.fill
    assert by_score(one, name="x") == by_score(one, name="x") != by_score(other, name="x")
    assert by_score(one) != by_score(one, name="x")
    different = [
        by_score(one, timed=True), by_score(one, init=nothing_seen), by_score(one, init=nothing_seen, touch=see),
        by_score(one, init=lambda num_ids: ()), lru(), lru()._replace(idle=False), lru()._replace(touch=see),
        *(by_score(functools.partial(scaled, scale=scale)) for scale in (0, 1, 1.0, True, 2)),
        by_score(functools.partial(scaled, scale=1), name="x"), by_score(functools.partial(one, blocks=1)),
        cost_aware(1), cost_aware(1.0), by_score(Scale(1)), by_score(Scale(2)),
        *(by_class(one, classes=classes) for classes in (1, 2)), by_class(one, one, classes=2),
        *(by_class(functools.partial(class_of, scale=scale), classes=2) for scale in (1, 1.0)),
        by_class(one, classes=2, init=nothing_seen), by_class(one, classes=2, timed=True),
        EvictionPolicy(nothing_seen, see, nobody),
    ]  # fmt: skip
    assert len({by_score(one), *different}) == 1 + len(different)
    for i, policy in enumerate(different):
        assert by_score(one) != policy and not any(policy == another for another in different[:i])


def test_what_has_no_hash_is_bound_as_it_was_or_refused():
    """An array among a partial's arguments makes it an ordinary function, equal only to itself."""
    one, other = (functools.partial(scaled, scale=np.ones(12, np.int32)) for _ in range(2))
    assert by_score(one) == by_score(one) != by_score(other)
    assert by_score(one).parameters == ()

    @dataclasses.dataclass
    class Mutable:
        def __call__(self, *args):
            return args[0]

    for options in ({"fn": Mutable()}, {"init": Mutable()}, {"init": nothing_seen, "touch": Mutable()}):
        with pytest.raises(ValueError, match=r"^(fn|init|touch): got .*Mutable\(\), which has no hash"):
            by_score(**{"fn": fullest_last, **options})


def test_a_policy_shows_its_name_and_parameters():
    shown = {name: repr(policy) for name, policy in made().items()}
    assert shown.items() >= {name: policy.shows for name, policy in cases.POLICIES.items()}.items()
    assert shown["vllm_v1"] == "lru()" and shown["cost_aware of another width"] == "cost_aware(balance=24576)"
    assert repr(by_score(fullest_last)) == "fullest_last()"
    assert repr(by_score(functools.partial(scaled, scale=0.5), name="half")) == "half(scale=0.5)"
    assert repr(by_score(lambda blocks: blocks.fill)).endswith("<lambda>()") and repr(by_score(Scale(3))) == "Scale()"
    by_hand = EvictionPolicy(nothing_seen, see, nobody, name="mine", parameters=(("a", 1), ("b", "c")))
    assert repr(by_hand) == "mine(a=1, b='c')"
    assert repr(by_hand._replace(name="")).startswith("EvictionPolicy(init=<function nothing_seen at")


def test_equal_policies_share_one_trace():
    traces = []

    @jax.jit
    def program(state):
        traces.append(state.policy)
        return state.seqs.length

    for make in (lambda: by_score(fullest_last, name="x"), lambda: cost_aware(3), lru):
        made()  # so that the makers' caches are cleared
        for policy in (make(), pickle.loads(pickle.dumps(make()))):
            program(kvjax.init(SMALL, policy))
        program(pickle.loads(pickle.dumps(kvjax.init(SMALL, make()))))
    assert traces == [by_score(fullest_last, name="x"), cost_aware(3), lru()]
    for _ in range(2):
        program(kvjax.init(SMALL, by_score(lambda blocks: blocks.fill, name="x")))
    assert len(traces) == 5


def test_equal_policies_choose_the_same():
    """A partial's parameter reaches the score."""
    blocks = kvjax.init(SMALL).groups[0].blocks
    blocks = blocks.replace(fill=jnp.arange(12, dtype=jnp.int32) % 5)
    chosen = [
        by_score(score).victims((), blocks, lambda ids: ids >= 0, jnp.int32(12), jnp.int32(0), 12)[0].tolist()
        for score in (functools.partial(scaled, scale=-3), lambda blocks: -3 * blocks.fill, deepest_first)
    ]
    assert chosen[0] == chosen[1] != chosen[2] and blocks.fill[chosen[0][0]] == 4


CHILD = """
import pickle, sys
from tests.unit.policies.test_identity import made
ours, theirs = made(), pickle.loads(bytes.fromhex(sys.argv[1]))
assert theirs == ours and list(map(hash, theirs.values())) == list(map(hash, ours.values()))
print(pickle.dumps(ours).hex())
"""


@pytest.mark.long
def test_policies_pickle_from_process_to_process():
    sent = made()
    received = output_of(sys.executable, "-c", CHILD, pickle.dumps(sent).hex())
    assert pickle.loads(bytes.fromhex(received)) == sent


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol_will_do(protocol):
    assert pickle.loads(pickle.dumps(made(), protocol)) == made()


class Unequal:
    """A score that pickles, but comes back unequal."""

    def __call__(self, blocks):
        return blocks.fill


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            by_score(lambda blocks: blocks.fill, name="mine"),
            r"got mine\(\), whose victims cannot be pickled .*<lambda>",
        ),
        (by_score(fullest_last, init=lambda num_ids: ()), r"got fullest_last\(\), whose init .*<lambda>"),
        (by_score(functools.partial(scaled, scale=np.ones(3))), "whose victims cannot be pickled"),
        (by_score(Unequal(), name="mine"), r"got mine\(\), whose victims cannot be pickled .* comes back as another"),
        (EvictionPolicy(nothing_seen, lambda *args: (), nobody), "whose touch cannot be pickled"),
    ],
)
def test_what_cannot_be_imported_is_named_on_pickling(policy, message):
    wanted = f"^policy: .*{message}.*, wanted functions that can be imported: define them by def at the top of a module"
    for value in (policy, kvjax.init(SMALL, policy)):
        with pytest.raises(pickle.PicklingError, match=wanted):
            pickle.dumps(value)
    assert copy.deepcopy(policy) is copy.copy(policy) is policy
    assert jax.tree.structure(copy.deepcopy(kvjax.init(SMALL, policy))) == jax.tree.structure(kvjax.init(SMALL, policy))
