# SPDX-License-Identifier: Apache-2.0
"""Caches under vmap cost as much as they touch: no program selects or copies an array over all blocks."""

import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import kvjax
from kvjax._arrays import loop
from kvjax.stores import adopt, finish_adoption

N, S, P = 4099, 4, 4  # N: a number that no other array has in its shape
BATCHES = {"one cache": (), "4 caches": (4,), "2 x 4 caches": (2, 4)}
LAYERS = {
    "full": [kvjax.LayerSpec(1, 4)],
    "windows": [kvjax.LayerSpec(1, 4), kvjax.LayerSpec(1, 4, window=8)],
    "recurrent": [kvjax.LayerSpec(1, 4), kvjax.LayerSpec.recurrent({"state": (2,)})],
}


def adopt_and_land(state):
    state, events = adopt(state, jnp.arange(32, dtype=jnp.int32), 30, jnp.ones((8,), jnp.bool_))
    return finish_adoption(state, events.adopted, jnp.ones((8,), jnp.bool_))


VERBS = {
    "adopt and finish_adoption": adopt_and_land,
    "admit": lambda state: kvjax.admit(state, 0, jnp.arange(32, dtype=jnp.int32), 30),
    "admit rows": lambda state: kvjax.admit(
        state, jnp.arange(2, dtype=jnp.int32), jnp.zeros((2, 32), jnp.int32), jnp.full((2,), 30, jnp.int32)
    ),
    "extend": lambda state: kvjax.extend(state, jnp.ones((S,), jnp.bool_)),
    "extend rows": lambda state: kvjax.extend(
        state, jnp.ones((2,), jnp.bool_), 6, seqs=jnp.arange(2, dtype=jnp.int32)[::-1]
    ),
    "commit": lambda state: kvjax.commit(state, jnp.zeros((S, 1), jnp.int32), jnp.ones((S,), jnp.int32)),
    "trim": lambda state: kvjax.trim(state, jnp.ones((S,), jnp.bool_), max_tokens=4),
    "release": lambda state: kvjax.release(state, 0),
    "release rows": lambda state: kvjax.release(state, jnp.arange(2, dtype=jnp.int32)),
}


def large(run, batch, *args):
    """The lines that select or copy N elements in the compiled program of `run`, for caches in these batch axes."""
    for _ in batch:
        run = jax.vmap(run)
    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*batch, *x.shape), x.dtype), args)
    text = jax.jit(run, donate_argnums=tuple(range(len(args)))).lower(*batched).compile().as_text()
    found = re.findall(r"^ *(?:ROOT )?%?\S+ = \(?\w+\[([\d,]*)\]\S* (?:copy|select)\((.*)$", text, re.M)
    sizes = {str(size) for x in jax.tree.leaves(args) for size in x.shape if size >= N}
    return [line for shape, line in found if sizes & set(shape.split(","))]


def assert_small(verb, layers, batch, policy=None):
    spec = kvjax.make_spec(LAYERS[layers], num_blocks=N, max_seqs=S, max_length=64, block_size=P)
    state = jax.eval_shape(lambda: kvjax.init(spec, policy or kvjax.lru()))
    found = large(VERBS[verb], BATCHES[batch], state)
    # A policy by score reads all scores if it has to evict, in a branch of its own.
    assert [line for line in found if policy is None or "/cond/branch" not in line] == []


@pytest.mark.long
def test_no_select_and_no_copy_of_all_blocks():
    assert_small("commit", "windows", "2 x 4 caches")


# Two batch axes cover one, and windows come with full attention. A night runs the rest.
MOST = ("windows", "2 x 4 caches")
ALL = [
    pytest.param(layers, batch, marks=pytest.mark.long if {layers, batch} <= {*MOST} else pytest.mark.slow)
    for layers in LAYERS
    for batch in BATCHES
]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "batch"), ALL)
@pytest.mark.parametrize("verb", VERBS)
def test_no_select_and_no_copy_of_all_blocks_in_any_batch(verb, layers, batch):
    assert_small(verb, layers, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [pytest.param(name, marks=pytest.mark.long if name in MOST else pytest.mark.slow) for name in BATCHES]
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_policy_by_score_selects_over_its_scores_alone(verb, batch):
    assert_small(verb, "full", batch, kvjax.policies.fifo())


@pytest.mark.long
def test_caches_that_fill_different_numbers_of_blocks_are_those_filled_alone():
    """One cache fills more blocks than `commit` publishes at a time, the second fewer, the third none."""
    spec = kvjax.make_spec(num_blocks=96, max_seqs=40, max_length=8, block_size=P)
    rows = jnp.arange(40, dtype=jnp.int32)
    tokens = rows[:, None] * 8 + jnp.arange(8, dtype=jnp.int32)[None]

    def fill(state, filled):
        state, _ = kvjax.admit(state, rows, tokens, jnp.full((40,), 5, jnp.int32))
        state, committed = kvjax.commit(state, tokens[:, :5], jnp.where(rows < filled, 5, 3))
        return state, committed

    counts, empty = jnp.array([40, 7, 0], jnp.int32), kvjax.init(spec)
    together = jax.jit(jax.vmap(fill, in_axes=(None, 0)))(empty, counts)
    alone = jax.jit(fill)
    for number, filled in enumerate(counts):
        state, events = jax.tree.map(lambda x, number=number: x[number], together)
        wanted, alone_events = alone(empty, filled)
        chex.assert_trees_all_equal(state, wanted)
        assert kvjax.to_list(events) == kvjax.to_list(alone_events)
        kvjax.check(state)
        assert len(kvjax.events.index_of(state)) == filled


def countdown(while_loop):
    """A loop of n steps over an array of N elements."""

    def run(array, n):
        def step(carry):
            array, left = carry
            return array.at[jnp.where(left > 0, left, N)].set(left, mode="drop"), left - 1

        return while_loop(lambda carry: carry[1] > 0, step, (array, n))

    return run


def test_a_loop_with_a_condition_of_each_cache_would_be_found():
    array, n = jnp.zeros((N,), jnp.int32), jnp.int32(3)
    assert large(countdown(lax.while_loop), (4,), array, n)
    assert large(countdown(loop), (4,), array, n) == []


@pytest.mark.parametrize("axes", [1, 2])
def test_a_loop_goes_on_until_all_have_ended_and_changes_nothing_of_those_that_have(axes):
    arrays, counts = jnp.zeros((2, 3, 8), jnp.int32), jnp.array([[0, 5, 1], [2, 7, 3]], jnp.int32)
    arrays, counts = (arrays, counts) if axes == 2 else (arrays[0], counts[0])
    plain, ours = countdown(lax.while_loop), countdown(loop)
    for _ in range(axes):
        plain, ours = jax.vmap(plain), jax.vmap(ours)
    assert (plain(arrays, counts)[0] == ours(arrays, counts)[0]).all()
    assert (ours(arrays, counts)[1] <= 0).all()


def test_only_some_of_the_arguments_are_batched():
    def run(array, n):
        return countdown(loop)(array, n)[0]

    array = jnp.zeros((8,), jnp.int32)
    got = jax.vmap(run, in_axes=(None, 0))(array, jnp.array([2, 5], jnp.int32))
    assert (got == jnp.stack([run(array, jnp.int32(2)), run(array, jnp.int32(5))])).all()
    assert (jax.vmap(run, in_axes=(0, None))(got, jnp.int32(1)) == got).all()
