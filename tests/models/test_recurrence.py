# SPDX-License-Identifier: Apache-2.0
"""The cell of the gated delta rule: token by token and in chunks, padding, and states carried from part to part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.recurrence import DeltaCell, DeltaConfig, DeltaInputs, convolve, delta_by_chunk, delta_by_token

ROWS, LENGTH = 2, 37
CONFIG = DeltaConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=5, taps=4)


def make(by_channel: bool, length: int = LENGTH, seed: int = 0):
    """A cell, and inputs whose heads range from one that forgets nothing to one that forgets at once."""
    rng = np.random.default_rng(seed)
    columns, heads = sum(CONFIG.parts), CONFIG.value_heads
    rates = np.array([0.0, 0.05, 1.0, 40.0])[:, None]
    decay = -rates * rng.uniform(0.1, 1, (ROWS, length, heads, CONFIG.key_dim if by_channel else 1))
    filters = jnp.asarray(rng.normal(size=(CONFIG.taps, columns)), jnp.float32)
    arrays = rng.normal(size=(ROWS, length, columns)), decay, rng.uniform(size=(ROWS, length, heads))
    return DeltaCell(CONFIG, filters), DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))


def rule(by_channel: bool, length: int = LENGTH):
    """The arguments of the rule, with keys of length one and a memory that is not empty."""
    rng, config = np.random.default_rng(1), CONFIG
    q, k = rng.normal(size=(2, ROWS, length, config.value_heads, config.key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(ROWS, length, config.value_heads, config.value_dim))
    memory = rng.normal(size=(ROWS, *config.shapes["memory"]))
    _, inputs = make(by_channel, length)
    return [jnp.asarray(x, jnp.float32) for x in (memory, q, k, v, inputs.decay, inputs.beta)]


def by_hand(memory, q, k, v, decay, beta):
    """The rule in numpy, in float64."""
    memory, q, k, v, decay, beta = (np.asarray(x, np.float64) for x in (memory, q, k, v, decay, beta))
    outputs = np.zeros_like(v)
    for token in range(q.shape[1]):
        memory = memory * np.exp(decay[:, token])[..., None]
        error = v[:, token] - np.einsum("bhk,bhkv->bhv", k[:, token], memory)
        memory = memory + np.einsum("bh,bhk,bhv->bhkv", beta[:, token], k[:, token], error)
        outputs[:, token] = np.einsum("bhk,bhkv->bhv", q[:, token], memory)
    return outputs, memory


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("width", [1, 5, None])
def test_chunks_are_the_rule_token_by_token(by_channel, width):
    arguments = rule(by_channel)
    wanted = by_hand(*arguments)
    for got in (
        jax.jit(delta_by_token)(*arguments),
        jax.jit(delta_by_chunk, static_argnames="width")(*arguments, width=width),
    ):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_small_decays_after_large_ones_keep_their_digits(by_channel):
    """Sums of logarithms from a chunk's beginning would be in the thousands."""
    memory, q, k, v, decay, beta = rule(by_channel)
    decay = decay.at[:, ::2].set(-300.0).at[:, 1::2].set(-0.01)
    wanted = by_hand(memory, q, k, v, decay, beta)
    for one, other in zip(jax.jit(delta_by_chunk)(memory, q, k, v, decay, beta), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_cell_goes_on_where_it_ended_and_padding_changes_nothing(by_channel):
    """Whole rows at once, and the same rows in parts of other lengths whose padding is NaN."""
    cell, inputs = make(by_channel)
    run = jax.jit(cell.__call__)
    full = jnp.full(ROWS, LENGTH, jnp.int32)
    wanted, after = run(cell.zeros(ROWS), inputs, full)
    states, begun = cell.zeros(ROWS), np.zeros(ROWS, int)
    got = np.full(wanted.shape, np.nan)
    for counts in ((1, 1), (0, 3), (9, 2), (1, 0), (9, 9), (9, 9), (8, 9), (0, 4)):
        width = 1 if max(counts) == 1 else 9
        part = DeltaInputs(*(np.full((ROWS, width, *x.shape[2:]), np.nan, np.float32) for x in inputs))
        for row, count in enumerate(counts):
            for x, whole in zip(part, inputs, strict=True):
                x[row, :count] = whole[row, begun[row] : begun[row] + count]
        outputs, new = run(states, part, jnp.array(counts, jnp.int32))
        for row, count in enumerate(counts):
            got[row, begun[row] : begun[row] + count] = outputs[row, :count]
            if not count:
                assert all(np.array_equal(new[name][row], states[name][row]) for name in states)
        states, begun = new, begun + counts
    assert list(begun) == [LENGTH, LENGTH]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    for name, state in after.items():
        np.testing.assert_allclose(states[name], state, rtol=1e-4, atol=1e-5)


def test_the_convolution_sees_the_tokens_before():
    rng = np.random.default_rng(0)
    x, filters = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 9, 3), (4, 3)))
    y, last = convolve(jnp.zeros((1, 3, 3)), jnp.asarray(x), jnp.asarray(filters), jnp.array([7]))
    padded = np.concatenate([np.zeros((1, 3, 3)), x], axis=1)
    plain = np.stack([np.sum(padded[0, t : t + 4] * filters, axis=0) for t in range(9)])
    np.testing.assert_allclose(y[0], plain / (1 + np.exp(-plain)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last[0], x[0, 4:7])


def test_a_state_that_is_not_a_number_shows():
    """`kvjax.recur` gives NaN to a row whose state is not the one after the tokens before."""
    cell, inputs = make(by_channel=False)
    states = jax.tree.map(lambda x: x.at[0].set(jnp.nan), cell.zeros(ROWS))
    outputs, _ = jax.jit(cell.__call__)(states, inputs, jnp.full(ROWS, LENGTH, jnp.int32))
    assert np.all(np.isnan(outputs[0])) and np.all(np.isfinite(outputs[1]))
