# SPDX-License-Identifier: Apache-2.0
"""Batches of other sizes, lengths and samplings share the programs of the first one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import kvjax
from kvjax._compile import OutermostJit
from kvjax.serving import Sampling, Scheduler, driver, turns
from kvjax.serving.requests import Stage
from tests.serving_kit import NUMBERS, successor

LAYERS = [kvjax.LayerSpec(1, 2)]
SPEC = kvjax.make_spec(LAYERS, num_blocks=256, max_seqs=8, max_length=512, block_size=16, dtype="float32")
PROGRAMS = ("apply", "turn")


def ended(model, serving, log, *, scheduler, steps, logits_fn, drafter, fixed_steps, now):
    """A stand-in for `serve` that ends all requests at once. The cache of programs sees only the arguments."""
    stage = serving.requests.stage
    over = jnp.where(stage == int(Stage.WAITING), int(Stage.DONE), stage)
    return serving.replace(requests=serving.requests.replace(stage=over)), log


def use(stand_in, monkeypatch):
    """A loop's program, compiled anew, that calls a stand-in for `serve`."""
    monkeypatch.setattr(turns, "serve", stand_in)
    monkeypatch.setattr(driver, "turn", OutermostJit(turns._turn, **driver.turn._options))


def compiled():
    return [getattr(driver, name)._jitted._cache_size() for name in PROGRAMS]


@pytest.mark.long
def test_a_generation_traces_the_model_once_for_each_shape(monkeypatch):
    """A mixed step's trace also gives the size of the vocabulary."""
    shapes, serve = [], turns.serve

    def noted(tokens, pools, view, *, last):
        shapes.append(tokens.shape)
        return successor(tokens, pools, view, last=last)

    def traced(model, serving, log, **options):
        jax.eval_shape(lambda serving, log: serve(model, serving, log, **options), serving, log)
        return ended(model, serving, log, **options)

    use(traced, monkeypatch)
    kvjax.generate(Partial(noted), kvjax.Cache.create(SPEC), [[1, 2, 3]])
    assert shapes == [(1, SPEC.max_seqs + Scheduler().chunk), (SPEC.max_seqs, 1)]


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_batch_compiles_nothing(monkeypatch, real):
    if not real:
        use(ended, monkeypatch)
    model, cache, rng, seen = Partial(successor), kvjax.Cache.create(SPEC), np.random.default_rng(0), []
    before = compiled()
    for number in (1, 3, 8, 12):
        prompts = [rng.integers(0, NUMBERS, length).tolist() for length in np.linspace(10, 300, number, dtype=int)]
        for sampling in (None, Sampling(0.7, top_k=5), [Sampling(min_tokens=2)] * number):
            stop = () if sampling is None else (1, 2)
            outputs, cache, _ = kvjax.generate(
                model, cache, prompts, max_new_tokens=3 * number, sampling=sampling, stop_tokens=stop
            )
            assert not real or {output.finish for output in outputs} <= {"length", "stop"}
            seen.append([now - then for now, then in zip(compiled(), before, strict=True)])
    assert seen == seen[:1] * 12 and seen[0][-1] == 1
