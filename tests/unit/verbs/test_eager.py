# SPDX-License-Identifier: Apache-2.0
"""Verbs outside jit: the second call says how to jit the verb."""

import jax
import numpy as np

import kvjax
from kvjax import checks

SPEC = kvjax.make_spec(num_blocks=4, max_seqs=2, max_length=8, block_size=4)
ON = np.ones(2, bool)


def test_the_second_call_of_a_verb_outside_jit_is_reported_once(caplog, monkeypatch):
    monkeypatch.setattr(checks, "_eager_calls", {})
    state = kvjax.init(SPEC)
    trim = jax.jit(kvjax.trim, static_argnames="max_tokens")
    for _ in range(3):
        trim(state, ON, max_tokens=4)
    kvjax.trim(state, ON, max_tokens=4)
    assert not caplog.records
    for _ in range(2):
        kvjax.trim(state, ON, max_tokens=4)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvjax", "WARNING")
    assert "Write once trim = jax.jit(kvjax.trim, static_argnames=('max_tokens',)), or the same" in record.getMessage()


def test_a_step_outside_jit_is_reported_by_its_own_name(caplog, monkeypatch):
    monkeypatch.setattr(checks, "_eager_calls", {})
    model = jax.tree_util.Partial(next_number)
    tokens = np.zeros((2, 1), np.int32)
    for _ in range(2):
        kvjax.step(model, kvjax.Cache.create(SPEC), tokens, np.zeros(2, np.int32), logits="all")
    (record,) = caplog.records
    assert "step = jax.jit(kvjax.step, static_argnames=('logits',)), or the same with" in record.getMessage()
    jax.eval_shape(lambda cache: kvjax.step(model, cache, tokens, np.ones(2, np.int32)), kvjax.Cache.create(SPEC))
    assert checks._eager_calls == {"step": 2}


def next_number(tokens, pools, view, *, last):
    del view
    return jax.nn.one_hot(tokens if last is None else tokens[np.arange(2), last], 9), pools


def test_views_and_programs_are_not_counted(monkeypatch):
    monkeypatch.setattr(checks, "_eager_calls", {})
    state = kvjax.init(SPEC)
    kvjax.view(state, 1)
    jax.eval_shape(kvjax.release, state, 0)
    jax.eval_shape(jax.vmap(lambda seq: kvjax.release(state, seq)[1]), np.arange(2))
    assert checks._eager_calls == {}
