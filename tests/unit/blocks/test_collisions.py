# SPDX-License-Identifier: Apache-2.0
"""Keys that collide all the time may cost hits, but never give a wrong one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.blocks.keys import prefix_keys
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
    """A model of the slots records each block's real K/V as (namespace, prefix) of every written token."""
    spec = kvjax.make_spec(num_blocks=10, max_seqs=S, max_length=LENGTH, block_size=P)
    cache = drive.Driver(kvjax.init(spec), verbs)
    rng, slots, rows, reused = np.random.default_rng(0), {}, set(), 0

    def copy():
        for event in kvjax.to_list(cache.events):
            if event["kind"] == "copied":
                for i in range(event["num_tokens"]):
                    slots[event["block"], i] = slots[event["source"], i]

    for _ in range(100):
        seq = int(rng.integers(S))
        if seq in rows:
            cache.do("release", seq)
            copy()
            rows.remove(seq)
        else:
            tokens, length = rng.integers(0, 2, LENGTH), int(rng.integers(1, LENGTH + 1))
            namespace = int(rng.integers(2))
            if cache.admit(seq, tokens[:length], namespace=namespace) == ["OK"]:
                copy()
                cached = int(cache.events.cached[0])
                reused += cached
                table = np.asarray(cache.state.groups[0].table[seq])
                for i in range(cached):
                    assert slots[table[i // P], i % P] == (namespace, *tokens[: i + 1])
                for i in range(cached, length):
                    slots[table[i // P], i % P] = (namespace, *tokens[: i + 1])
                cache.write({seq: tokens[cached:length]})
                copy()
                rows.add(seq)
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
