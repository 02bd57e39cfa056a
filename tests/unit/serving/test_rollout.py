# SPDX-License-Identifier: Apache-2.0
"""Rollouts: completions inside the caller's program. `test_contract.py` has what they share with other ways."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
from kvjax import Sampling
from kvjax.serving import Finish, rollout_log
from tests import drive
from tests.mesh import AUTO, mesh_of
from tests.serving_kit import MODEL, ROWS, SCHEDULER, VOCAB, answer, make_cache, make_spec, prompts_of, start

GREEDY, MOST, SAMPLES, WIDTH = Sampling(), 4, 2, 13
PROMPTS = np.array([*prompts_of(0), *prompts_of(1)], np.int32)
LENGTHS = np.array([13, 9, 5, 13], np.int32)
IS_PROMPT = np.arange(WIDTH)[None] < LENGTHS[:, None]
BOTH = ("max_new_tokens", "samples", "scheduler", "logprobs", "logits_fn", "keep_rows")
rollout = jax.jit(functools.partial(kvjax.rollout, max_new_tokens=MOST, samples=SAMPLES), static_argnames=BOTH)


def run(cache, prompts=PROMPTS, mask=IS_PROMPT, model=MODEL, namespace=0, **options):
    """Greedy completions."""
    return rollout(model, cache, prompts, mask=mask, sampling=GREEDY, namespace=np.int32(namespace), **options)


def chosen(prompt):
    """The tokens that the model chooses after a prompt."""
    return answer(prompt, MOST).tokens


def assert_chosen(found, prompts=PROMPTS, lengths=LENGTHS):
    wanted = [[chosen(prompt[:length])] * SAMPLES for prompt, length in zip(prompts, lengths, strict=True)]
    np.testing.assert_array_equal(found.tokens, wanted)
    assert np.all(found.mask) and np.all(found.lengths == MOST) and np.all(found.finish == Finish.LENGTH)


@pytest.mark.long
def test_completions_of_prompts_with_padding_on_either_side_and_what_a_second_call_finds():
    found, cache, log = run(make_cache())
    assert log is None
    assert_chosen(found)
    assert np.all(np.asarray(cache.state.seqs.length) == 0)
    kvjax.check(cache.state)
    left = np.stack([np.roll(prompt, WIDTH - length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)])
    again, cache, _ = run(cache, left, IS_PROMPT[:, ::-1])
    assert_chosen(again)
    assert np.sum(again.cached[:, 0]) > np.sum(found.cached[:, 0])
    kvjax.check(cache.state)


@pytest.mark.long
def test_prompts_that_cannot_be_served_and_rows_of_others():
    """Two rows are somebody else's, so that the samples of a prompt come one after the other."""
    cache, mask = start(), IS_PROMPT.copy()
    before = np.asarray(cache.state.groups[0].table[1:])
    mask[1] = False
    found, cache, _ = run(cache, mask=mask)
    assert np.asarray(found.finish)[1].tolist() == [Finish.BAD_REQUEST] * 2
    assert not np.any(found.mask[1]) and not np.any(found.tokens[1]) and not np.any(found.logprobs[1])
    for row in (0, 2, 3):
        assert np.asarray(found.tokens)[row].tolist() == [chosen(PROMPTS[row, : LENGTHS[row]])] * 2
    np.testing.assert_array_equal(cache.state.groups[0].table[1:], before)
    kvjax.check(cache.state)


@pytest.mark.slow
def test_no_row_too_many_tokens_and_too_few_blocks():
    cache, events = start().admit(0, np.full(16, 1, np.int32), 3)
    assert bool(events.ok)
    found, after, _ = run(cache)
    assert np.all(found.finish == Finish.CANCELLED) and np.all(found.lengths == 0)
    chex.assert_trees_all_equal(after.state.groups[0].table, cache.state.groups[0].table)
    found, cache, _ = run(make_cache(), max_new_tokens=24)
    assert np.asarray(found.finish)[:, 0].tolist() == [Finish.ROW_FULL, Finish.LENGTH, Finish.LENGTH, Finish.ROW_FULL]
    found, cache, _ = run(make_cache(4))
    assert np.asarray(found.finish)[0, 0] == Finish.NO_BLOCKS
    kvjax.check(cache.state)


@pytest.mark.slow
def test_events_are_those_of_the_cache_and_a_full_log_ends_the_rollout():
    log = rollout_log(make_spec(), PROMPTS.shape, MOST, SAMPLES)
    found, cache, log = run(make_cache(), log=log)
    assert_chosen(found)
    mirror = kvjax.fold(kvjax.to_list(log))
    assert mirror == kvjax.fold(kvjax.events.snapshot(cache.state))
    log = rollout_log(make_spec(), (1, 1), 1)
    found, cache, log = run(make_cache(), log=log)
    assert np.any(found.finish == Finish.CANCELLED)
    assert kvjax.fold(kvjax.to_list(log)) == kvjax.fold(kvjax.events.snapshot(cache.state))
    assert np.all(np.asarray(cache.state.seqs.length) == 0)


@pytest.mark.slow
def test_under_vmap_and_in_replicas():
    """A cache for each of two replicas, with `check_vma`; they choose as caches under `vmap` do."""
    if jax.version.__version_info__ < (0, 12):
        pytest.skip("XLA of jaxlib 0.11 crashes while it compiles a rollout inside shard_map")
    caches = jax.vmap(lambda n: kvjax.Cache.create(make_spec(), num_blocks=n))(np.array([16, 12], np.int32))
    prompts = np.stack([PROMPTS, PROMPTS[::-1]])
    lengths = np.stack([LENGTHS, LENGTHS[::-1]])
    own = functools.partial(kvjax.rollout, max_new_tokens=MOST, samples=SAMPLES, sampling=GREEDY)
    found, after, _ = jax.jit(jax.vmap(own, in_axes=(None, 0, 0, 0)))(MODEL, caches, prompts, lengths)
    for one, text, length in zip((0, 1), prompts, lengths, strict=True):
        assert_chosen(jax.tree.map(lambda x, one=one: x[one], found), text, length)

    def replica(model, *arguments):
        found, cache, _ = own(model, *jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], (found, cache))

    with mesh_of(2, 1, AUTO) as mesh:
        data = PartitionSpec("data")
        specs = {"in_specs": (PartitionSpec(), *[data] * 3), "out_specs": (data, data)}
        program = jax.shard_map(replica, mesh=mesh, **specs)
        replicas = jax.jit(program)(jax.tree.map(np.asarray, MODEL), caches, prompts, lengths)
    chex.assert_trees_all_equal(jax.device_get(replicas), jax.device_get((found, after)))


@pytest.mark.slow
def test_turns_go_on_from_rows_that_are_held():
    """New weights sample between two turns, and evict what nobody holds. The second turn goes on under the old ones."""
    prompt, newer = PROMPTS[0].tolist(), jax.tree.map(lambda weights: weights * 1.5, MODEL)

    def turn(cache, text, rows):
        tokens, mask = np.array([drive.padded(text, 20)]), np.arange(20)[None] < len(text)
        return run(cache, tokens, mask, resume_rows=rows, keep_rows=True, samples=1)

    first, cache, _ = turn(make_cache(14), prompt, np.full((1, 1), -1, np.int32))
    (row,) = np.asarray(first.rows).reshape(-1).tolist()
    assert int(cache.state.seqs.committed[row]) == WIDTH + MOST - 1
    others = np.stack([prompts_of(number)[0] for number in range(3, 7)]).astype(np.int32)
    _, cache, _ = run(cache, others, np.ones_like(IS_PROMPT), newer, namespace=1)
    text = [*prompt, *np.asarray(first.tokens)[0, 0].tolist(), 2, 2]
    second, cache, _ = turn(cache, text, np.asarray(first.rows))
    assert int(second.cached[0, 0]) == WIDTH + MOST - 1
    assert np.asarray(second.tokens)[0, 0].tolist() == chosen(text)
    cache, events = cache.release(np.asarray(second.rows).reshape(-1))
    assert bool(events.ok) and not np.any(cache.state.seqs.length)
    kvjax.check(cache.state)


def counting(logits, last, positions, state):
    """Allows only the token whose number is the count of those so far, from a start of each prompt's own."""
    assert last.shape == positions.shape == state["count"].shape == (ROWS,)
    allowed = jnp.arange(VOCAB)[None] == (state["count"] % VOCAB)[:, None]
    return jnp.where(allowed, logits, -jnp.inf), {"count": state["count"] + 1}


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4])
def test_a_constraint_has_a_state_of_each_row_through_preemption(k):
    """Few blocks, so that requests are preempted; each completion goes on from its own state."""
    scheduler, most = dataclasses.replace(SCHEDULER, reserve="num_tokens", k=k), 11
    state = {"count": np.array([0, 1, 2, 7], np.int32)}
    lengths = np.array([13, 9, 5, 12], np.int32)
    found, cache, _ = rollout(
        MODEL, make_cache(8), PROMPTS, lengths, sampling=GREEDY, logits_fn=counting, logits_state=state,
        max_new_tokens=most, samples=1, scheduler=scheduler,
    )  # fmt: skip
    wanted = (state["count"][:, None, None] + np.arange(most)) % VOCAB
    np.testing.assert_array_equal(found.tokens, wanted)
    assert np.any(found.preemptions) and np.all(found.logprobs == 0) and np.all(found.finish == Finish.LENGTH)
    kvjax.check(cache.state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": ROWS + 1}, f"samples: got {ROWS + 1}, wanted at most the {ROWS} rows"),
        ({"keep_rows": True}, "samples: got 2 of each of 4 prompts with keep_rows=True, wanted at most the 3 rows"),
        ({"lengths": None}, "lengths: got None without a mask, wanted lengths or a mask"),
        ({"mask": np.ones((4, 13), bool)}, "lengths: got lengths together with a mask, wanted None"),
        ({"lengths": None, "mask": np.ones((4, 12), bool)}, r"mask: got bool\[4, 12\], wanted bool\[4, 13\]"),
        ({"lengths": LENGTHS[:3]}, "lengths: got"),
        ({"seeds": np.zeros((4, 3), np.uint32)}, r"seeds: got uint32\[4, 3\], wanted u32\[4, 2\]"),
        ({"seed": 0.5}, "seed: got 0.5, wanted an integer or a jax key"),
        ({"logprobs": "all"}, "logprobs: got 'all'"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"namespace": np.zeros(3, np.int32)}, "namespace: got"),
        ({"sampling": Sampling(temperature=np.ones(3))}, r"sampling.temperature: got shape \[3\]"),
        ({"scheduler": kvjax.serving.Scheduler(k=5)}, "k: got 5, wanted at most the block size"),
        ({"scheduler": kvjax.Sampling()}, "scheduler: got"),
        ({"logits_state": {"count": np.zeros(3)}}, r"logits_state\['count'\]: got shape \[3\], wanted \[4, ...\]"),
    ],
)
def test_bad_arguments(options, message):
    arguments = {"lengths": LENGTHS, "max_new_tokens": MOST, "samples": SAMPLES, **options}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda cache: kvjax.rollout(MODEL, cache, PROMPTS, **arguments), make_cache())


DRAWN = Sampling(temperature=1.0)


@pytest.mark.long
def test_a_rollout_that_stops_at_a_budget_goes_on_with_the_same_tokens():
    """It is resumed until all completions have ended. With the same weights its tokens are those of a whole rollout."""
    options = {"mask": IS_PROMPT, "sampling": DRAWN, "seed": np.uint32(5)}
    whole, *_ = rollout(MODEL, make_cache(), PROMPTS, **options)
    partial, cache, _ = rollout(MODEL, make_cache(), PROMPTS, max_steps=np.int32(3), version=np.int32(0), **options)
    assert np.any(partial.finish == Finish.NONE) and np.all(np.asarray(cache.state.seqs.length) == 0)
    for version in range(1, 30):
        lengths = np.asarray(partial.lengths)
        is_over = np.asarray(partial.finish) != Finish.NONE
        partial, cache, _ = rollout(
            MODEL, cache, PROMPTS, resume=partial, max_steps=np.int32(3), version=np.int32(version), **options
        )
        is_new = np.asarray(partial.mask) & (np.arange(MOST) >= lengths[..., None])
        assert np.all(np.asarray(partial.versions)[is_new] == version)
        assert np.all(np.asarray(partial.lengths)[is_over] == lengths[is_over])
        if not np.any(partial.finish == Finish.NONE):
            break
    assert version > 2
    for name in ("tokens", "mask", "lengths", "finish"):
        np.testing.assert_array_equal(getattr(partial, name), getattr(whole, name))
    np.testing.assert_allclose(partial.logprobs, whole.logprobs, atol=1e-5)
    assert whole.versions is None
    kvjax.check(cache.state)


@pytest.mark.long
def test_tokens_of_a_resumed_rollout_are_chosen_by_the_weights_of_their_version():
    other = MODEL.replace(head=MODEL.head * -1.3)
    options = {"mask": IS_PROMPT, "sampling": GREEDY, "version": np.int32(3)}
    partial, cache, _ = rollout(MODEL, make_cache(), PROMPTS, max_steps=np.int32(4), **options)
    assert 0 < np.sum(partial.mask) < partial.mask.size
    options["version"] = np.int32(4)
    found, *_ = rollout(other, cache, PROMPTS, resume=partial, namespace=np.int32(1), **options)
    tokens, versions = np.asarray(found.tokens), np.asarray(found.versions)
    np.testing.assert_array_equal(versions, np.where(partial.mask, 3, 4))
    dense = jax.jit(lambda model, text, at: jnp.argmax(model.dense(text)[at - 1]))
    for prompt in range(len(PROMPTS)):
        text = PROMPTS[prompt, : LENGTHS[prompt]].tolist()
        for token, version in zip(tokens[prompt, 0].tolist(), versions[prompt, 0].tolist(), strict=True):
            padded = np.resize(np.array(text, np.int32), 32)
            assert token == int(dense(other if version == 4 else MODEL, padded, np.int32(len(text))))
            text.append(token)


def test_a_resumed_rollout_has_the_shapes_of_the_first():
    cache = make_cache()
    shape = jax.eval_shape(lambda cache: rollout(MODEL, cache, PROMPTS, mask=IS_PROMPT)[0], cache)

    def resumed(prompts, lengths, max_new_tokens):
        return jax.eval_shape(
            lambda cache: kvjax.rollout(
                MODEL, cache, prompts, lengths, resume=shape, samples=2, max_new_tokens=max_new_tokens
            ),
            cache,
        )

    with pytest.raises(ValueError, match=r"^resume: got shape \[4, 2, 4\], wanted a kvjax.serving.Rollout of \[2, 2\]"):
        resumed(PROMPTS[:2], LENGTHS[:2], 4)
    with pytest.raises(ValueError, match=r"^max_new_tokens: got 3, wanted at least those of resume, 4"):
        resumed(PROMPTS, LENGTHS, 3)
