# SPDX-License-Identifier: Apache-2.0
"""Moves between the tiers inside a program: completions are right, although most blocks leave the device."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.serving import Sampling, Scheduler, rollout
from tests.oracle.bytes_machine import VOCAB, Chain, name_of

LAYERS = [kvjax.LayerSpec(1, 2)] * 2
OPTIONS = {"max_seqs": 2, "max_length": 24, "block_size": 4, "dtype": "float32"}


def answer(prompt, num_tokens):
    """The tokens of the model `Chain` after a prompt, by its text alone."""
    text = [*prompt]
    for _ in range(num_tokens):
        text.append(name_of(0, tuple(text)) % VOCAB)
    return text[len(prompt) :]


@pytest.mark.slow
def test_a_rollout_over_both_tiers_moves_blocks_in_its_program():
    """The model's next token depends on all K/V before it, so a wrong byte gives a wrong token."""
    spec = kvjax.make_spec(LAYERS, num_blocks=12, num_host_blocks=40, backups=True, **OPTIONS)
    model = Chain(np.full(VOCAB, name_of(0, ()), np.int32), ((None, 0), (None, 0)))
    scheduler, greedy = Scheduler(chunk=8, chunk_rows=2), Sampling(temperature=0.0)
    program = functools.partial(rollout, max_new_tokens=3, scheduler=scheduler, sampling=greedy)
    run = jax.jit(program, donate_argnums=1)
    tiered, rng, cached = kvjax.tiers.TieredCache.create(spec), np.random.default_rng(0), 0
    documents = rng.integers(0, VOCAB, (6, 18)).astype(np.int32)
    for _ in range(30):
        prompts, lengths = documents[rng.integers(6, size=3)], rng.integers(9, 19, 3).astype(np.int32)
        done, tiered, _ = run(model, tiered, prompts, lengths)
        wanted = [answer(prompt[:length].tolist(), 3) for prompt, length in zip(prompts, lengths, strict=True)]
        assert np.asarray(done.tokens)[:, 0].tolist() == wanted
        cached += int(np.sum(np.asarray(done.cached)))
        kvjax.check(tiered.state)
    assert tiered.host.arrays[0][0].sharding.memory_kind == "pinned_host"
    stats = kvjax.debug.stats(tiered.state)
    assert stats.host_cached_blocks > 12 and stats.host_backup_blocks > 0  # more than the device has
    assert cached > 600  # of 1,215 tokens
