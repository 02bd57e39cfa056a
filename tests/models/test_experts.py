# SPDX-License-Identifier: Apache-2.0
"""Experts: the choice of each token, and the sum of what it chose."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.experts import ExpertsConfig, Mixture, Router

WIDTH = 12
X = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)
GROUPED = ExpertsConfig(
    num_experts=12, per_token=3, width=7, shared_width=9, corrected=True, num_groups=4, num_chosen_groups=2, factor=2.5
)
SOFTMAX = ExpertsConfig(num_experts=6, per_token=2, width=7, shared_width=9, shared_gate=True, softmax=True)
PLAIN = ExpertsConfig(num_experts=5, per_token=5, width=7, normalised=False)


def make(config: ExpertsConfig, dtype=jnp.float32) -> Mixture:
    """A mixture with random biases."""
    mixture = Mixture(WIDTH, config, dtype, nnx.Rngs(0))
    if config.corrected:
        bias = np.random.default_rng(1).normal(size=config.num_experts) / 2
        mixture.gate.e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return mixture


def chosen_by_hand(router: Router, x: np.ndarray) -> dict[int, float]:
    """The experts that one token chooses, with their weights."""
    config = router.config
    logits = x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64)
    scores = np.exp(logits) / np.sum(np.exp(logits)) if config.softmax else 1 / (1 + np.exp(-logits))
    choice = scores + (np.asarray(router.e_score_correction_bias[...]) if config.corrected else 0)
    groups = choice.reshape(config.num_groups, -1)
    best = np.argsort(-np.sum(-np.sort(-groups, axis=1)[:, :2], axis=1))[: config.num_chosen_groups]
    allowed = [n for n in range(config.num_experts) if n // groups.shape[1] in best]
    chosen = sorted(allowed, key=lambda n: -choice[n])[: config.per_token]
    total = sum(scores[n] for n in chosen) if config.normalised else 1
    return {n: scores[n] / total * config.factor for n in chosen}


@pytest.mark.parametrize("config", [GROUPED, SOFTMAX, PLAIN])
def test_a_token_gets_the_sum_of_the_experts_that_it_chose(config):
    mixture = make(config)
    got = jax.device_get(jax.jit(lambda module, x: (module.gate(x), module(x)))(mixture, X))

    def silu(x):
        return x / (1 + np.exp(-x))

    def gated(x, *matrices):
        gate, up, down = (np.asarray(matrix, np.float64) for matrix in matrices)
        return (silu(x @ gate) * (x @ up)) @ down

    kernels = [getattr(mixture.experts, name).kernel[...] for name in mixture.experts.names]
    for index in np.ndindex(X.shape[:2]):
        x = X[index].astype(np.float64)
        weights = chosen_by_hand(mixture.gate, X[index])
        assert np.flatnonzero(got[0][index]).tolist() == sorted(weights)
        np.testing.assert_allclose(got[0][index][sorted(weights)], [weights[n] for n in sorted(weights)], rtol=1e-5)
        y = sum(weight * gated(x, *(kernel[n] for kernel in kernels)) for n, weight in weights.items())
        if config.shared_width:
            shared = mixture.shared_expert if config.shared_gate else mixture.shared_experts
            parts = (shared.gate_proj, shared.up_proj, shared.down_proj)
            one = gated(x, *(part.kernel[...] for part in parts))
            gate = np.asarray(mixture.shared_expert_gate.kernel[...])[:, 0] @ x if config.shared_gate else np.inf
            y = y + one / (1 + np.exp(-gate))
        np.testing.assert_allclose(got[1][index], y, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_outputs_have_the_streams_dtype():
    mixture = make(GROUPED, jnp.bfloat16)
    assert mixture.gate.e_score_correction_bias[...].dtype == jnp.float32
    y = jax.jit(Mixture.__call__)(mixture, jnp.asarray(X, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    wide = make(GROUPED)
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(mixture)))
    wanted = wide(jnp.asarray(X, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, atol=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_groups": 5}, "n_group: got 5, wanted a divisor of the 12 experts"),
        ({"num_groups": 12}, "n_group: got 12, wanted a divisor of the 12 experts, two to a group"),
        ({"num_groups": 2, "num_chosen_groups": 3}, "topk_group: got 3, wanted at most n_group=2"),
        ({"num_groups": 4, "per_token": 4}, "num_experts_per_tok: got 4, wanted at most 3"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ExpertsConfig(**{"num_experts": 12, "per_token": 2, "width": 7, **fields}).check()
