# SPDX-License-Identifier: Apache-2.0
"""The kernels have no races, and need each of their barriers."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

import kvjax
from kvjax.gpu.memory import run
from kvjax.serving.decode import append_events
from tests.unit.gpu.races import barriers_of, kernels_of, races_of

pytestmark = pytest.mark.long

P = 4
SPECS = {
    name: kvjax.make_spec(num_blocks=16, max_seqs=5, max_length=32, block_size=P, extra_ids=extra)
    for name, extra in {"plain": False, "extra ids": True}.items()
}


def extended(state, counts, tokens):
    return kvjax.extend(state, counts > 0, tokens.shape[1])


def committed(state, counts, tokens):
    return kvjax.commit(state, tokens, counts)


def trimmed(state, counts, tokens):
    return kvjax.trim(state, counts > 0, max_tokens=tokens.shape[1])


def logged(state, counts, tokens):
    """The log after two transitions, without the kernels of these."""
    _, events = jax.eval_shape(lambda: kvjax.release(state, counts))
    events = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), events)
    return append_events(kvjax.events.init_log(9, P, state.spec.extra_ids), *[events] * tokens.shape[1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_tokens", [1, P])
@pytest.mark.parametrize(("verb", "least"), [(extended, 6), (committed, 6), (trimmed, 1), (logged, 1)])
def test_no_races_and_each_barrier_is_needed(verb, least, num_tokens, spec):
    state, rows = jax.eval_shape(lambda: kvjax.init(SPECS[spec])), SPECS[spec].max_seqs
    tokens = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
    (kernel,) = kernels_of(verb, state, jax.ShapeDtypeStruct((rows,), jnp.int32), tokens)
    barriers = barriers_of(kernel)
    assert len(barriers) >= least and races_of(kernel) == []
    for number, barrier in enumerate(barriers):
        assert races_of(kernel, without=barrier), f"barrier {number}: nothing needs it"


def swapped(memory):
    """Two lanes swap their values: the second store must wait for the first load."""
    lane = jnp.arange(2, dtype=jnp.int32)
    memory.put("x", 1 - lane, memory.pick("x", lane))


def looped(memory):
    """Each step loads the value that the step before stored. No single step shows that race."""

    def step(i):
        memory.put("y", i, memory.number("x"))
        memory.put("x", 0, i)
        return i + 1

    memory.loop(lambda i: i < 3, step, jnp.int32(0), barrier=False)


def branched(memory):
    """One branch stores a value that is loaded after both."""
    x = memory.pick("x", 1)
    memory.when(x > 0, lambda: memory.put("y", 0, x))
    memory.put("y", 1, memory.pick("y", 0))


@pytest.mark.parametrize(("kernel", "barriers", "races"), [(swapped, 1, 0), (looped, 1, 1), (branched, 2, 0)])
def test_races_are_found(kernel, barriers, races):
    def call(x, y):
        return run(kernel, "kernel", lanes=2, reads={}, changes={"x": x, "y": y}, makes={}, interpret=False)

    (found,) = kernels_of(call, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
    assert len(barriers_of(found)) == barriers and len(races_of(found)) == races
    assert all(races_of(found, without=barrier) for barrier in barriers_of(found))


def test_an_array_and_its_alias_are_one():
    def kernel(x_ref, y_ref):
        y_ref[0] = lax.rem(x_ref[1], 2)

    def call(x):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0} if aliased else {}
        )(x)

    for aliased in (True, False):
        (found,) = kernels_of(lambda x: call(x), jnp.zeros(2, jnp.int32))
        assert bool(races_of(found)) == aliased
