# SPDX-License-Identifier: Apache-2.0
"""A refused request in a loop of a user's own: its logits, `checked`, and `rest`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.debug import RequestError, checked

SPEC = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
PROMPT = np.arange(10, 26, dtype=np.int32)


def next_number(tokens, pools, view, *, last):
    logits = jax.nn.one_hot(tokens + 1, 50)
    return logits if last is None else logits[jnp.arange(len(tokens)), last], pools


MODEL = jax.tree_util.Partial(next_number)
step = jax.jit(kvjax.step, static_argnames="logits")
admit = jax.jit(kvjax.Cache.admit)
release = jax.jit(kvjax.Cache.release)
TOKENS = np.stack([PROMPT, PROMPT])


def begun(length=16):
    return admit(kvjax.Cache.create(SPEC), 0, PROMPT, length)[0]


def after_a_hit():
    """A row that found 15 of its 16 tokens."""
    cache, _, _ = step(MODEL, begun(), TOKENS, np.array([16, 0]))
    cache, events = admit(release(cache, 0)[0], 0, PROMPT, 16)
    assert events.cached.tolist() == [15]
    return cache, events


@pytest.mark.parametrize("logits", ["last", "all"])
def test_a_refused_row_has_no_logits_and_another_row_has(logits):
    cache, _ = admit(begun(10), 1, PROMPT + 1, 12)
    after, computed, events = step(MODEL, cache, TOKENS, np.array([12, 12]), logits=logits)
    assert events.status.tolist() == [kvjax.Status.BAD_REQUEST, kvjax.Status.OK]
    assert np.all(np.isnan(computed[0])) and np.all(np.isfinite(computed[1]))
    assert after.state.seqs.committed.tolist() == [0, 12]


def test_the_dtype_of_logits_stays():
    half = jax.tree_util.Partial(lambda *args, last: (jnp.zeros((2, 9), jnp.bfloat16), args[1]))
    assert jax.eval_shape(kvjax.step, half, begun(), TOKENS, np.array([16, 0]))[1].dtype == jnp.bfloat16


def test_rest_is_what_a_step_takes_after_a_hit():
    cache, events = after_a_hit()
    rest = kvjax.rest(PROMPT[None], events.cached)
    assert rest.tolist() == [[25, *[0] * 15]]
    _, logits, stepped = step(MODEL, cache, rest, 16 - events.cached, np.array([0]))
    assert bool(stepped.ok) and logits[0].argmax() == 26


@pytest.mark.parametrize("shape", [(16,), (2, 16)])
def test_rest_of_each_row_is_its_slice(shape):
    tokens = np.broadcast_to(PROMPT, shape)
    for cached in (0, 3, 16, 40, np.array([1, 7])):
        got = jax.jit(kvjax.rest)(tokens, cached)
        rows = np.broadcast_to(cached, np.shape(cached) or shape[:-1])
        wanted = [[*PROMPT[skip:], *[0] * min(skip, 16)] for skip in rows.reshape(-1).tolist()]
        assert got.reshape(-1, 16).tolist() == wanted
    with pytest.raises(ValueError, match=r"^cached: got dtype float"):
        kvjax.rest(tokens, 1.5)
    with pytest.raises(ValueError, match=r"^tokens: got shape \[\], wanted \[T\] or \[R, T\]"):
        kvjax.rest(3, 1)


REFUSED = (
    r"step: row 0 of the request was refused with BAD_REQUEST: seq 0 had 10 reserved tokens, 0 of them committed, and "
    r"12 came; after a hit pass kvjax.rest"
)
BAD_COUNT = np.array([12, 0])


def test_checked_takes_a_step():
    with pytest.raises(RequestError, match=f"^{REFUSED}"):
        checked(step)(MODEL, begun(10), TOKENS, BAD_COUNT)
    _, logits, _ = checked(step)(MODEL, begun(), TOKENS, np.array([16, 0]))
    assert logits[0].argmax() == 26


class Face:
    """An object with a state, whose methods are bound to it."""

    def __init__(self):
        self.cache = begun(10)
        self.state = self.cache.state

    def release(self, seq):
        return release(self.cache, seq)


def test_checked_takes_the_methods_of_a_cache():
    with pytest.raises(RequestError, match=r"^admit: .* HELD: seq 0 had 10 reserved tokens, 0 of them committed$"):
        checked(admit)(begun(10), 0, PROMPT, 10)
    with pytest.raises(RequestError, match=r"^release: .* BAD_REQUEST: seq 1 had 0 reserved tokens"):
        checked(Face().release)(1)
    with pytest.raises(RequestError, match=r"^admit: .* seq 7 is outside 0\.\.1$"):
        checked(admit)(begun(10), 7, PROMPT, 10)
    donating = checked(jax.jit(kvjax.Cache.release, donate_argnums=0))
    with pytest.raises(RequestError, match="seq 1 had 0 reserved tokens"):
        donating(begun(10), 1)


def finished(result):
    """Waits for a program and its callbacks."""
    jax.block_until_ready(result)
    jax.effects_barrier()


def test_checked_raises_inside_a_program():
    program = jax.jit(lambda cache, count: checked(kvjax.step)(MODEL, cache, TOKENS, count)[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
        finished(program(begun(10), BAD_COUNT))
    assert program(begun(10), np.array([10, 0]))[0].argmax() == 20
    methods = jax.jit(lambda cache: checked(kvjax.Cache.admit)(cache, 0, PROMPT, 10)[0].state.seqs.length)
    with pytest.raises(jax.errors.JaxRuntimeError, match="HELD: seq 0 had 10 reserved"):
        finished(methods(begun(10)))


def test_a_commit_that_does_not_continue_its_prompt_is_found():
    """The whole prompt after a hit: one token of it is committed, so nothing is refused."""
    cache, events = after_a_hit()
    prompts = {}
    commit = checked(jax.jit(kvjax.Cache.commit), prompts=prompts)
    prompts[0] = PROMPT.tolist()
    counts = np.array([1, 0])
    with pytest.raises(ValueError, match=r"^commit: got tokens \[10\] for position 15 of seq 0, wanted \[25\]"):
        commit(cache, TOKENS, counts)
    after, committed = commit(cache, np.tile(kvjax.rest(PROMPT, events.cached[0]), (2, 1)), counts)
    assert bool(committed.ok) and after.state.seqs.committed.tolist() == [16, 0]
    taught = jax.jit(lambda cache: checked(kvjax.step, prompts=prompts)(MODEL, cache, TOKENS, counts)[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="position 15 of seq 0"):
        finished(taught(cache))


@pytest.mark.long
def test_an_extend_without_the_commit_before_is_found():
    extend, commit = checked(jax.jit(kvjax.Cache.extend)), jax.jit(kvjax.Cache.commit)
    cache, _ = commit(begun(), TOKENS, np.array([16, 0]))
    active = np.array([True, False])
    cache, _ = extend(cache, active)
    with pytest.raises(
        ValueError, match=r"^extend: seq 0 has 1 reserved tokens without a commit, wanted fewer than the"
    ):
        extend(cache, active)
    cache, _ = commit(cache, np.full((2, 1), 3), np.array([1, 0]))
    cache, _ = extend(cache, active)
    assert cache.state.seqs.length.tolist() == [18, 0]
