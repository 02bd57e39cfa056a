# SPDX-License-Identifier: Apache-2.0
"""`run_batch`: rows that are swapped out and come back, and runs that the caller's functions end.

`test_contract.py` has what all ways do; `tests/oracle/` compares every byte of batches whose moves fail.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Cache
from kvjax.serving import GenerationInterrupted, driver
from kvjax.serving.preempt import swaps
from kvjax.serving.requests import Stage, init_serving
from tests import drive
from tests.serving_kit import (
    DIM,
    HOST,
    MODEL,
    SCHEDULER,
    SIZE,
    assert_chained,
    batched,
    count_swaps,
    empty,
    make_cache,
    prompts_of,
    state_of,
)

pytestmark = pytest.mark.long
SWAP = dataclasses.replace(SCHEDULER, reserve="num_tokens", chunk_rows=2, preempt="swap", wait_for_prefix=False)
PROMPTS = [[i % 3, *prompt[: 3 + i * 5 % 8]] for i, prompt in enumerate(prompts_of(0) + prompts_of(1) + prompts_of(2))]


def swapped(num_blocks=9):
    """The outputs of prompts for which there are too few blocks, and the cache behind them."""
    outputs, cache, _ = batched(make_cache(num_blocks, HOST), PROMPTS, scheduler=SWAP, max_new_tokens=10)
    assert {output.finish for output in outputs} == {"length"}
    assert_chained(PROMPTS, outputs)
    kvjax.check(state_of(cache), rows=())
    return outputs


def test_an_error_of_progress_leaves_the_cache_whole():
    def fails(outputs):
        raise RuntimeError("enough")

    with pytest.raises(GenerationInterrupted, match="interrupted by RuntimeError: enough; go on") as caught:
        batched(make_cache(9), PROMPTS, progress=fails)
    state = caught.value.cache.state
    kvjax.check(state, rows=())
    assert kvjax.fold(caught.value.events).index == kvjax.events.index_of(state)
    assert caught.value.outputs[0].tokens


@pytest.mark.slow
def test_rows_are_swapped_out_instead_of_being_preempted(monkeypatch):
    """The host holds each row that is swapped out."""
    moved = count_swaps(monkeypatch)
    outputs = swapped()
    assert sum(output.preemptions for output in outputs) == 0
    assert any(moved["swap_out"]) and sum(moved["swap_in"]) == sum(moved["swap_out"])


def test_a_row_that_stays_in_use_is_an_error(monkeypatch):
    """No code leaves a row in use today. The test drops a row's release."""
    monkeypatch.setattr(driver.Driver, "_move", occupy_a_row)
    with pytest.raises(GenerationInterrupted, match=r"rows \[2\] are in use without a request") as caught:
        batched(make_cache(), [[1, 2]])
    assert not np.asarray(caught.value.cache.state.seqs.length).any()


def occupy_a_row(self, result):
    """Admits a prompt into the last row, for no request."""
    serving = self.state.serving
    if not int(serving.cache.state.seqs.length[2]):
        cache, _ = jax.jit(Cache.admit)(serving.cache, 2, np.arange(4, dtype=np.int32), 4)
        self.state.serving = serving.replace(cache=cache)


@pytest.mark.slow
def test_a_row_whose_blocks_do_not_come_back_is_preempted(monkeypatch):
    """The move is not tried again and again: the loop continues without the row."""
    refusals, swap_in = [], kvjax.tiers.TieredCache.swap_in

    def refuse(cache, row, **options):
        refusals.append(row)
        assert len(refusals) < 50
        cache, events = swap_in(cache, np.full_like(row, -1), **options)
        return cache, events.replace(status=jnp.full_like(events.status, kvjax.Status.NO_BLOCKS))

    monkeypatch.setattr(kvjax.tiers.TieredCache, "swap_in", refuse)
    assert sum(output.preemptions for output in swapped()) and refusals


@pytest.mark.slow
def test_a_row_is_swapped_out_until_the_chunks_of_the_others_fit(monkeypatch):
    """Two prompts, of 11 and 8 blocks, run in chunks of 4. With windows a prompt takes its blocks chunk by chunk.

    There are 11 blocks, so that 3 are left after the first chunks, and the second row is swapped out. If it came back
    before the first row has its next chunk, it would be swapped out again before anything is computed.
    """
    calls, swap_out = [], kvjax.tiers.TieredCache.swap_out

    def bounded(cache, row, **options):
        calls.append(row)
        assert len(calls) < 20
        return swap_out(cache, row, **options)

    monkeypatch.setattr(kvjax.tiers.TieredCache, "swap_out", bounded)
    layers = [kvjax.LayerSpec(1, DIM), kvjax.LayerSpec(1, DIM, window=8)]
    spec = kvjax.make_spec(
        layers, num_blocks=11, num_host_blocks=12, max_seqs=2, max_length=64, block_size=SIZE, dtype="float32"
    )
    prompts = [[1, *[0, 1, 2] * 13, 1], [2, *[1, 0, 2] * 10]]
    options = dataclasses.replace(SWAP, chunk=16, budget=2 + 32)
    outputs, cache, _ = drive.run_batch(MODEL, empty(spec), prompts, max_new_tokens=3, scheduler=options)
    assert [(output.finish, output.preemptions) for output in outputs] == [("length", 0)] * 2
    assert len(calls) == 1
    kvjax.check(state_of(cache))


@pytest.mark.slow
@pytest.mark.parametrize(("parent", "back"), [(0, 0), (-1, -1)], ids=["sample", "another prompt"])
def test_a_row_comes_back_where_only_its_samples_are_awake(parent, back):
    """With any number of blocks they wait for its prompt. Another prompt runs, and the row waits for its blocks."""
    cache, _ = make_cache(9, HOST).admit(0, np.arange(8, dtype=np.int32), 8)
    cache, _ = cache.swap_out(0)
    serving = init_serving(cache.cache, [12, 12], capacity=64, width=32)
    running, slots = np.full(2, Stage.RUNNING, np.int32), np.array([0, 1, -1], np.int32)
    requests = serving.requests.replace(
        stage=running, num_tokens=np.full(2, 8, np.int32), parent=np.array([-1, parent], np.int32)
    )
    options = dataclasses.replace(SWAP, wait_for_prefix=True, watermark=9)
    assert int(swaps(serving.replace(requests=requests, row=slots), options).back) == back
