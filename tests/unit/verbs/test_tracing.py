# SPDX-License-Identifier: Apache-2.0
"""The verbs under jit, vmap and scan: one trace a shape, equal results, in place, without copies of pool size."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax._arrays import add, put
from tests.drive import PLAIN, Driver

S, P = 3, 4
SPEC = kvjax.make_spec(num_blocks=12, max_seqs=S, max_length=16, block_size=P)


def history(state, offset):
    """Most verbs, as one function of a state."""
    tokens = jnp.arange(16, dtype=jnp.int32) % 5 + offset
    rows = jnp.arange(S, dtype=jnp.int32)
    state, one = kvjax.admit(state, rows, jnp.stack([tokens] * S), 9 + rows)
    left = state.seqs.length - state.seqs.committed
    state, two = kvjax.commit(state, jnp.stack([jnp.roll(tokens, -3)] * S), left)
    state, three = kvjax.release(state, rows[1:])
    state, four = kvjax.fork(state, 0, 1)
    state, five = kvjax.extend(state, rows < 2)
    state, six = kvjax.commit(state, jnp.full((S, 1), 7, jnp.int32) + offset, (rows < 2).astype(jnp.int32))
    state, seven = kvjax.truncate(state, 0, 5)
    state, eight = kvjax.release(state, rows[:2])
    return state, (one, two, three, four, five, six, seven, eight)


@pytest.mark.slow
def test_jit_does_what_it_does_without():
    offset = jnp.int32(0)
    with jax.disable_jit():
        plain = history(kvjax.init(SPEC), offset)
    chex.assert_trees_all_equal(plain, jax.jit(history)(kvjax.init(SPEC), offset))


@pytest.mark.slow
def test_scan_and_vmap_do_what_separate_calls_do():
    compiled = jax.jit(history)
    offsets = jnp.arange(6, dtype=jnp.int32) % 4
    state, parts = kvjax.init(SPEC), []
    for offset in offsets:
        state, events = compiled(state, offset)
        parts.append(events)
        kvjax.check(state)

    def of_size(n):
        return lax.scan(history, kvjax.init(SPEC, num_blocks=n), offsets)

    sizes, alone = jnp.array([12, 7, 3], jnp.int32), jax.jit(of_size)
    scanned, stacked = alone(sizes[0])
    chex.assert_trees_all_equal(scanned, state)
    chex.assert_trees_all_equal(stacked, jax.tree.map(lambda *x: jnp.stack(x), *parts))
    together = jax.jit(jax.vmap(of_size))(sizes)
    for i, size in enumerate(sizes):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i], together), alone(size))


@pytest.mark.long
def test_hit_and_release_in_a_scan_outlives_the_ring():
    """A program hung here: the number of cycles far exceeds the capacity of the queue of releases."""
    prompt = np.array([5] * 4 + [6] * 4 + [7] + [0] * 7, np.int32)
    cache = Driver(kvjax.init(PLAIN))
    cache.start(0, prompt[:9])
    cache.do("release", 0)

    def cycle(carry, _):
        state, prompt, length = carry
        state, admitted = kvjax.admit(state, 0, prompt, length)
        state, released = kvjax.release(state, 0)
        return (state, prompt, length), (admitted.ok & released.ok, admitted.cached[0])

    scan = jax.jit(lambda *carry: lax.scan(cycle, carry, length=500))
    (state, *_), (ok, cached) = scan(cache.state, prompt, jnp.int32(9))
    assert bool(jnp.all(ok))
    assert bool(jnp.all(cached == 8))
    kvjax.check(state)


@pytest.mark.parametrize(
    "verb", ["admit", "extend", "commit", "fork", "truncate", "trim", "release", "lookup", "pin", "reset"]
)
def test_one_trace_whatever_kind_of_number(verb):
    chex.clear_trace_counter()
    args = {
        "admit": lambda n: (n(0), np.arange(8, dtype=np.int32), n(8)), "extend": lambda n: (np.ones(S, bool),),
        "commit": lambda n: (np.zeros((S, 1), np.int32), np.zeros(S, np.int32)), "fork": lambda n: (n(0), n(1)),
        "truncate": lambda n: (n(0), n(1)), "release": lambda n: (n(0),),
        "trim": lambda n: (np.ones(S, bool),), "lookup": lambda n: (np.arange(8, dtype=np.int32), n(8)),
        "pin": lambda n: (np.zeros(2, np.int32),), "reset": lambda n: (),
    }[verb]  # fmt: skip

    # A Python int is weakly typed, which is another type for jit.
    jitted, state = jax.jit(chex.assert_max_traces(getattr(kvjax, verb), n=2)), kvjax.init(SPEC)
    for kind in (jnp.int32, np.int32):
        jitted.eval_shape(state, *args(kind))
    for number in (1, 2, 3):
        jitted.eval_shape(state, *args(lambda _, number=number: number))


def test_the_cost_of_extend_follows_the_rows_that_are_named():
    """Only their events fit. Arrays with an entry for each row are updated, and no other such array is made."""
    for most in (4, 1_009):  # a number that no other array has in its shape
        spec = kvjax.make_spec(num_blocks=12, max_seqs=most, max_length=16, block_size=P)
        state = jax.eval_shape(lambda spec=spec: kvjax.init(spec))
        run = functools.partial(kvjax.extend, active=np.ones(3, bool), seqs=np.array([2, 0, 1], np.int32))
        program, (_, events) = jax.make_jaxpr(run, return_shape=True)(state)
        assert events.records.shape[0] == 2 * 3
    made = re.findall(r"^ +\w+:\w+\[1009[,\]].* = (\w+)", str(program), re.MULTILINE)
    assert made == ["scatter"] * 2  # the table and the lengths


def test_policies_are_the_same_object_every_time():
    assert kvjax.lru() is kvjax.lru()
    assert jax.tree.structure(kvjax.init(SPEC)) == jax.tree.structure(kvjax.init(SPEC, kvjax.lru()))


@pytest.mark.parametrize("size", [12, 5000])
@pytest.mark.parametrize("write", [put, add])
def test_a_write_of_one_entry_is_no_dynamic_update_slice(write, size):
    """In a scan on CPU, that was fused into a kernel that never ended. In a small array the write is a select."""
    args = jnp.arange(size, dtype=jnp.int32), jnp.array([3]), jnp.int32(7), jnp.array([True])
    program = jax.jit(write).lower(*args).compile()
    assert "dynamic-update-slice" not in program.as_text()
    assert (" scatter(" in program.as_text()) == (size == 5000)
    assert program(*args)[3] == (7 if write is put else 10)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("held", [False, True])
def test_writes_drop_what_does_not_hold(count, held):
    where, ids = np.array([held, True][:count]), np.array([2, 0][:count])
    flat, block = np.arange(5), np.arange(20).reshape(5, 4)
    for x, index, values in (
        (flat, ids, 9), (flat, ids, np.arange(7, 7 + count)), (block, ids, -block[:count]),
        (block, (ids, ids + 1), 9), (block, (ids, ids + 1), np.arange(7, 7 + count)),
    ):  # fmt: skip
        wanted = x.copy()
        chosen = tuple(i[where] for i in index) if isinstance(index, tuple) else index[where]
        wanted[chosen] = values if np.ndim(values) == 0 else values[where]
        np.testing.assert_array_equal(put(jnp.asarray(x), index, values, jnp.asarray(where)), wanted)
    square = jnp.zeros((3, 4), jnp.int32)
    got = put(square, (np.full((count, 1), 1), np.arange(count)[:, None]), 5, jnp.asarray(where)[:, None])
    assert np.asarray(got)[1, :count].tolist() == [5 * bool(w) for w in where]
