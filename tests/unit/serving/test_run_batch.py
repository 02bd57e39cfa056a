# SPDX-License-Identifier: Apache-2.0
"""`run_batch`: many prompts in one program, with and without a host tier.

Each number of prompts up to 8, or 16, and each set of options is a program for each spec of `serving_kit.py`.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Cache
from kvjax.pools import host as host_pool
from kvjax.serving import GenerationInterrupted, Scheduler, driver
from kvjax.serving.preempt import swaps
from kvjax.serving.requests import Stage, init_serving
from tests import drive
from tests.oracle.bytes_machine import SIZE, VOCAB
from tests.serving_kit import HOST, MODEL, assert_chained, count_swaps, make_cache, state_of

pytestmark = pytest.mark.long
OPTIONS = Scheduler(reserve="num_tokens", chunk=8, chunk_rows=2)
TIERED = kvjax.tiers.TieredCache
SWAP = dataclasses.replace(OPTIONS, preempt="swap", wait_for_prefix=False)


def prompts_of(number, seed=0):
    rng = np.random.default_rng(seed)
    documents = rng.integers(0, VOCAB, (3, 16)).tolist()
    return [
        [*documents[i % 3][: rng.integers(17)], *rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()]
        for i in range(number)
    ]


@pytest.mark.slow
def test_an_error_between_loops_leaves_the_cache_whole():
    def fails(outputs):
        raise RuntimeError("enough")

    with pytest.raises(GenerationInterrupted, match="interrupted by RuntimeError: enough; go on") as caught:
        drive.run_batch(MODEL, make_cache(9), prompts_of(16), scheduler=OPTIONS, steps=25, progress=fails)
    kvjax.check(caught.value.cache.state)
    assert not np.asarray(caught.value.cache.state.seqs.length).any()
    assert kvjax.fold(caught.value.events).index == kvjax.events.index_of(caught.value.cache.state)
    assert caught.value.outputs[0].tokens


def test_no_prompt_no_program():
    outputs, cache, events = drive.run_batch(MODEL, make_cache(), [])
    assert (outputs, events) == ([], [])
    assert int(jnp.sum(cache.state.seqs.length)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("host", [HOST, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_are_swapped_out_instead_of_being_preempted(host, monkeypatch):
    """The host's 12 blocks hold each row that is swapped out. With 2 some rows are preempted after all."""
    moved = count_swaps(monkeypatch)
    prompts = [[i % VOCAB, *prompt] for i, prompt in enumerate(prompts_of(9, seed=4))]
    outputs, cache, _ = drive.run_batch(MODEL, make_cache(9, host), prompts, max_new_tokens=10, scheduler=SWAP)
    assert {output.finish for output in outputs} == {"length"}
    assert_chained(prompts, outputs)
    preemptions = sum(output.preemptions for output in outputs)
    if host == HOST:
        assert preemptions == 0 and any(moved["swap_out"]) and sum(moved["swap_in"]) == sum(moved["swap_out"])
    else:
        assert preemptions > 0 and not all(moved["swap_out"])
    kvjax.check(state_of(cache))
    assert not np.asarray(state_of(cache).seqs.length).any()


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "seed"), [(5, 25), (8, 32)])
def test_a_request_goes_on_where_the_host_can_empty_blocks(num_blocks, seed):
    """A loop cannot evict cached blocks with children on the host, and there are no others."""
    rng = np.random.default_rng(seed)
    prompts = [[i % VOCAB, *prompt] for i, prompt in enumerate(prompts_of(9, seed))]
    most, priorities = [int(rng.choice([1, 12])) for _ in prompts], rng.integers(-3, 6, 9).tolist()
    outputs, cache, _ = drive.run_batch(
        MODEL, make_cache(num_blocks, HOST), prompts, max_new_tokens=most, priority=priorities, scheduler=SWAP
    )
    for prompt, output, new in zip(prompts, outputs, most, strict=True):
        fits = len(prompt) + new - 1 <= num_blocks * SIZE
        assert not fits or (output.finish, len(output.tokens)) == ("length", new)
    assert_chained(prompts, outputs)
    kvjax.check(state_of(cache))


def test_a_failed_move_costs_the_other_rows_nothing(monkeypatch):
    """A prompt is to be onboarded while two others run, and the copy fails once."""
    prompts, copy, failed = prompts_of(9, seed=3), host_pool._copy, []
    _, cache, _ = drive.run_batch(MODEL, make_cache(9, HOST), prompts, max_new_tokens=1, scheduler=SWAP)

    def copy_or_fail(targets, sources, rows):
        if targets[0][0].sharding.memory_kind != "pinned_host" and not failed:
            failed.append(rows)
            raise MemoryError("no memory")
        return copy(targets, sources, rows)

    monkeypatch.setattr(host_pool, "_copy", copy_or_fail)
    first, most = np.random.default_rng(0).integers(0, VOCAB, (2, 7)).tolist(), [20, 18, *[2] * 9]
    with pytest.warns(RuntimeWarning, match="computed again"):
        outputs, cache, _ = drive.run_batch(MODEL, cache, first + prompts, max_new_tokens=most, scheduler=SWAP)
    assert failed
    assert [(output.finish, len(output.tokens)) for output in outputs] == [("length", new) for new in most]
    assert_chained(first + prompts, outputs)
    kvjax.check(state_of(cache))
    assert not np.asarray(state_of(cache).seqs.length).any()


def test_a_row_whose_move_to_the_host_fails_stays_where_it_is(monkeypatch):
    """Its blocks are on the device still. The next step preempts a row, as where the host has too few blocks."""
    prompts, failures, swap_out = [[i, *prompt] for i, prompt in enumerate(prompts_of(9, seed=4))], [], TIERED.swap_out

    def fails(*args):
        raise MemoryError("no memory")

    def swap_out_in_vain(cache, row, **options):
        before = jax.device_get(cache.state.seqs)
        with monkeypatch.context() as patch:
            patch.setattr(host_pool, "_copy", fails)
            with pytest.raises(kvjax.tiers.FailedTransfer) as caught:
                swap_out(cache, row, **options)
        failures.append(row)
        assert caught.value.lost == [] and caught.value.events.status.tolist() == [kvjax.Status.NO_BLOCKS]
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(caught.value.tiered.state.seqs))
        raise caught.value

    monkeypatch.setattr(TIERED, "swap_out", swap_out_in_vain)
    with pytest.warns(RuntimeWarning, match="computed again"):
        outputs, cache, _ = drive.run_batch(MODEL, make_cache(9, HOST), prompts, max_new_tokens=10, scheduler=SWAP)
    assert failures and sum(output.preemptions for output in outputs)
    assert_chained(prompts, outputs)
    kvjax.check(state_of(cache), rows=())


def test_a_row_that_stays_in_use_is_an_error(monkeypatch):
    """No code leaves a row in use today. The test drops a row's release."""
    monkeypatch.setattr(driver.Driver, "_move", occupy_a_row)
    with pytest.raises(GenerationInterrupted, match=r"rows \[2\] are in use, and no request has them") as caught:
        drive.run_batch(MODEL, make_cache(9, HOST), [[1, 2]], max_new_tokens=1, scheduler=SWAP)
    assert not np.asarray(state_of(caught.value.cache).seqs.length).any()


def occupy_a_row(self, result):
    """Admits a prompt into the last row, for no request."""
    serving = self.state.serving
    if not int(serving.cache.state.seqs.length[2]):
        cache, _ = jax.jit(Cache.admit)(serving.cache, 2, np.arange(4, dtype=np.int32) % VOCAB, 4)
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
    prompts = [[i % VOCAB, *prompt] for i, prompt in enumerate(prompts_of(9, seed=4))]
    outputs, cache, _ = drive.run_batch(MODEL, make_cache(9, HOST), prompts, max_new_tokens=10, scheduler=SWAP)
    assert refusals and sum(output.preemptions for output in outputs)
    assert_chained(prompts, outputs)
    kvjax.check(state_of(cache))


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
    layers = [kvjax.LayerSpec(1, 2), kvjax.LayerSpec(1, 2, window=8)]
    spec = kvjax.make_spec(
        layers, num_blocks=11, num_host_blocks=12, max_seqs=2, max_length=64, block_size=SIZE, dtype="float32"
    )
    prompts = [[1, *[0, 1, 2] * 13, 1], [2, *[1, 0, 2] * 10]]
    options = Scheduler(
        reserve="num_tokens", chunk=16, chunk_rows=2, budget=2 + 32, preempt="swap", wait_for_prefix=False
    )
    outputs, cache, _ = drive.run_batch(
        MODEL, kvjax.tiers.TieredCache.create(spec), prompts, max_new_tokens=3, scheduler=options
    )
    assert [(output.finish, output.preemptions) for output in outputs] == [("length", 0)] * 2
    assert_chained(prompts, outputs)
    assert len(calls) == 1
    kvjax.check(state_of(cache))


@pytest.mark.slow
@pytest.mark.parametrize(("parent", "back"), [(0, 0), (-1, -1)], ids=["sample", "another prompt"])
def test_a_row_comes_back_where_only_its_samples_are_awake(parent, back):
    """With any number of blocks they wait for its prompt. Another prompt runs, and the row waits for its blocks."""
    cache, _ = make_cache(9, HOST).admit(0, np.arange(8, dtype=np.int32) % VOCAB, 8)
    cache, _ = cache.swap_out(0)
    serving = init_serving(cache.cache, [12, 12], capacity=64, width=32)
    running, slots = np.full(2, Stage.RUNNING, np.int32), np.array([0, 1, -1], np.int32)
    requests = serving.requests.replace(
        stage=running, num_tokens=np.full(2, 8, np.int32), parent=np.array([-1, parent], np.int32)
    )
    options = dataclasses.replace(OPTIONS, preempt="swap", watermark=9)
    assert int(swaps(serving.replace(requests=requests, row=slots), options).back) == back


@pytest.mark.slow
def test_urgent_prompts_come_first_and_are_not_preempted():
    """Blocks suffice for two rows of three, and two prompts are the most urgent."""
    prompts = [[*first, 0, 1, 2] for first in itertools.product((1, 2), (0, 1), (0, 2), (1,))]
    priorities = [0, 2, 0, 1, 2, 0, 1, 0]
    options = {"max_new_tokens": 12, "scheduler": OPTIONS, "steps": 25}

    def begun(events):
        """The prompts in the order in which their first blocks are stored."""
        stored = [event["tokens"] for event in events if event["kind"] == "stored" and event["parent"] is None]
        return [next(n for n, prompt in enumerate(prompts) if prompt[:SIZE] == tokens[:SIZE]) for tokens in stored]

    outputs, _, events = drive.run_batch(MODEL, make_cache(12), prompts, priority=priorities, **options)
    assert_chained(prompts, outputs)
    order = [*dict.fromkeys(begun(events))]
    assert sorted(order, key=lambda n: (-priorities[n], n)) == order
    assert any(output.preemptions for output in outputs)
    assert not any(output.preemptions for output, one in zip(outputs, priorities, strict=True) if one == 2)
    same, _, events = drive.run_batch(MODEL, make_cache(12), prompts, **options)
    assert [*dict.fromkeys(begun(events))] == [*range(8)]
    assert [output.tokens for output in same] == [output.tokens for output in outputs]


def successor(tokens, pools, view, *, last):
    """A model that always predicts the next number, and stores nothing."""
    del view
    return jax.nn.one_hot((tokens[jnp.arange(tokens.shape[0]), last] + 1) % 1000, 1000), pools


@pytest.mark.slow
def test_a_retained_prompt_survives_what_evicts_the_others():
    """Eight prompts have 3 blocks each, 4 with output, of 16 blocks. Then the first prompt's beginning comes again."""
    spec = kvjax.make_spec(
        [kvjax.LayerSpec(1, 1)], num_blocks=16, max_seqs=3, max_length=32, block_size=SIZE, dtype="float32",
        retention=True,
    )  # fmt: skip
    prompts = [list(range(100 * number, 100 * number + 12)) for number in range(8)]
    run = functools.partial(
        drive.run_batch, jax.tree_util.Partial(successor), max_new_tokens=4, scheduler=OPTIONS, steps=25
    )
    nothing = kvjax.Retention.of([(0, 8, 35)])
    for retention, cached in ((kvjax.Retention.of([(0, 8, 100)]), 8), (nothing, 0)):
        cache = Cache.create(spec, kvjax.policies.priority())
        outputs, cache, events = run(cache, prompts, retention=[retention, *[nothing] * 7])
        assert [output.tokens for output in outputs] == [[prompt[-1] + i for i in range(1, 5)] for prompt in prompts]
        assert any(event["kind"] == "removed" for event in events)
        outputs, cache, _ = run(cache, [[*prompts[0][:8], 990, 991]], retention=[nothing])
        assert outputs[0].cached_tokens == cached
        kvjax.check(cache.state)
