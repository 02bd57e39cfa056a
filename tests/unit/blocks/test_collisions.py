# SPDX-License-Identifier: Apache-2.0
"""Keys that collide all the time may cost hits, but never give a wrong one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.blocks.keys import prefix_keys
from kvjax.testing import Trial, random_requests
from tests import drive

pytestmark = pytest.mark.long
P, S, LENGTH = 2, 3, 8


@pytest.fixture(params=[0, *(pytest.param(mask, marks=pytest.mark.slow) for mask in (1, 7))])
def verbs(request, monkeypatch):
    """The verbs with keys of only a few values."""
    mask = np.uint32(request.param)

    def colliding(*args):
        return prefix_keys(*args) & mask

    for module in (kvjax.blocks.match, kvjax.blocks.dedup, kvjax.verbs.release):
        monkeypatch.setattr(module, "prefix_keys", colliding)
    # Functions of their own: jit would find programs traced with good keys.
    return drive.Verbs(lambda name: lambda *args, **options: drive.verb(name)(*args, **options))


def test_reused_tokens_are_those_of_the_prompt(verbs):
    """A trial knows the K/V in every slot, and so finds a row that would read another text's or another tenant's."""
    spec = kvjax.make_spec(num_blocks=10, max_seqs=S, max_length=LENGTH, block_size=P)
    trial, reused = Trial(kvjax.init(spec), verbs=verbs), 0
    requests = (one for one in random_requests(0, spec) if one["verb"] in ("admit", "commit", "release"))
    for request in itertools.islice(requests, 200):
        events = trial.do(request)
        reused += 0 if events is None else int(np.sum(events.cached))
    assert reused > 0


def test_equal_keys_of_one_call_are_distinguished(verbs):
    spec = kvjax.make_spec(num_blocks=10, max_seqs=S, max_length=LENGTH, block_size=P)
    state = kvjax.init(spec)
    prompts = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 7, 8]], jnp.int32)
    state, _ = verbs["admit"](state, jnp.arange(S), prompts, jnp.full(S, 4))
    state, events = verbs["commit"](state, prompts, jnp.full(S, 4))
    assert events.ok
    kvjax.check(state)
    for row in range(S):  # after any merges, each row still holds its own tokens
        held = [state.groups[0].blocks.tokens[b].tolist() for b in state.groups[0].table[row][:2]]
        assert [t for block in held for t in block] == prompts[row].tolist()


def test_a_full_pool_loses_no_entry():
    spec = kvjax.make_spec(num_blocks=512, max_seqs=1, max_length=68, block_size=4)
    state = kvjax.init(spec)

    @jax.jit
    def put(state, start):
        tokens = start * 64 + jnp.arange(64, dtype=jnp.int32)
        state, _ = kvjax.admit(state, 0, tokens, 64)
        state, _ = kvjax.commit(state, tokens[None], jnp.array([64]))
        return kvjax.release(state, 0)[0]

    for start in range(32):
        state = put(state, start)
    assert int(state.groups[0].num_cached) == 512
    kvjax.check(state)
    lookup = jax.jit(jax.vmap(lambda tokens: kvjax.lookup(state, tokens, 65).cached_tokens))
    tokens = np.concatenate([np.arange(32 * 64).reshape(32, 64), np.zeros((32, 1), int)], axis=1)
    assert lookup(tokens).tolist() == [64] * 32
