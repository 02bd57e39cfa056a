# SPDX-License-Identifier: Apache-2.0
"""A trace without the verbs has the hits of plain Python and of the verbs, request by request."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.policies import cost_aware, fifo, lfu, lru, priority
from kvjax.research import replay, simulate
from kvjax.research.simulators.hits import RULES
from kvjax.research.simulators.simulate import _arguments, _serve_all
from kvjax.state import EvictionPolicy
from tests.oracle import research
from tests.oracle import research_policies as oracle
from tests.unit.research import cases
from tests.unit.research.policies import (
    BLOCK,
    LENGTHS,
    LONGEST,
    MOST,
    POLICIES,
    assert_same,
    by_classes,
    forests,
    lines_of_size,
    lru_hits,
    marked,
    small_trace,
)


@pytest.mark.parametrize("name", marked(pytest.mark.long))
@given(st.data())
def test_requests_of_a_forest_find_what_they_find_in_plain_python(name, data):
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(list(RULES)))
    sizes = [LONGEST - 1, LONGEST, data.draw(st.integers(1, MOST)), MOST]
    policy, score = POLICIES[name]
    hits = assert_same(simulate, trace, policy, score, sizes, rule)
    assert hits.refused[:2].tolist() == [LENGTHS.count(LONGEST), 0]
    if name == "lru":
        np.testing.assert_array_equal(hits.blocks, [lru_hits(trace, size, rule) for size in sizes])


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(pytest.mark.slow))
def test_requests_of_a_production_trace_find_what_they_find_in_plain_python(name):
    """Prompts have 1 to 226 blocks, and are served in 16, 64 and 256 columns."""
    trace = cases.cut(400)
    policy, score = POLICIES[name]
    score = oracle.cost_aware(5 * BLOCK / trace.block_size) if name == "cost_aware" else score
    for rule in RULES:
        hits = assert_same(simulate, trace, policy, score, [100, 600, 1500, 3000], rule)
        assert hits.rate[-1] > hits.rate[0] > 0 and hits.refused[0] > 0


@pytest.mark.slow
@given(st.data())
def test_a_policy_by_class_finds_what_it_finds_on_the_verbs(data):
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(["full", "kvjax"]))
    sizes = [LONGEST - 1, LONGEST, data.draw(st.integers(1, MOST)), MOST]
    ours, theirs = (run(trace, by_classes(), sizes, rule=rule).blocks for run in RUNS)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_all_requests_of_a_production_trace_find_what_they_find_in_plain_python(name):
    trace = cases.whole()
    policy, score = (cost_aware(), oracle.cost_aware(48)) if name == "cost_aware" else POLICIES[name]
    for rule in RULES:
        hits = assert_same(simulate, trace, policy, score, [247, 1000, 3000, 5859, 10_000], rule)
        if name == "cost_aware" and rule == "kvjax":
            assert round(hits.rate[-1], 4) == 0.1863


@pytest.mark.slow
def test_prefixes_of_the_conversation_trace_leave_leaves_first():
    """So `lfu` has somewhat fewer hits than one for single blocks, and `fifo` nearly as many as `lru`."""
    trace, sizes = cases.whole(), [1000, 10_000, 30_000]
    assert simulate(trace, lfu(), sizes, rule="papers").rate.round(4).tolist() == [0.0481, 0.1317, 0.2760]
    blocks = [simulate(trace, policy, [10_000], rule="kvjax").blocks[0] for policy in (fifo(), lru())]
    assert [round(each.sum() / len(trace.ids), 4) for each in blocks] == [0.2107, 0.2113]
    assert np.sum(blocks[0] != blocks[1]) == 14


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_all_requests_at_twenty_sizes(rule):
    trace, sizes = cases.whole(), (np.arange(1, 21) * 1500).tolist()
    np.testing.assert_array_equal(
        simulate(trace, lru(), sizes, rule=rule).blocks, [lru_hits(trace, size, rule) for size in sizes]
    )
    prompts, full = cases.prompts_of(trace), trace.full.tolist()
    np.testing.assert_array_equal(
        simulate(trace, lfu(), sizes, rule=rule).blocks, [research.lfu(prompts, full, size, rule) for size in sizes]
    )


RUNS = (simulate, replay)


def by_fill(blocks):
    """A number that changes with every field that a policy may read."""
    parts = (
        blocks.hits, blocks.released, blocks.stored, blocks.depth, blocks.children, blocks.generation, blocks.fill,
        blocks.parent[:, 0], blocks.parent[:, 1], blocks.refcount,
    )  # fmt: skip
    number = jnp.zeros_like(blocks.hits) + blocks.clock
    for part in parts:
        number = number * 31 + part
    return (number.astype(jnp.uint32) >> np.uint32(3)).astype(jnp.int32)


@pytest.mark.long
@given(st.data())
def test_policies_get_what_the_verbs_give_them(data):
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(["full", "kvjax"]))
    sizes, policy = [LONGEST, 17, MOST], kvjax.by_score(by_fill)
    ours, theirs = (run(trace, policy, sizes, rule=rule).blocks for run in RUNS)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_a_policy_begins_with_its_state_and_gets_the_time():
    """The weights differ from cache to cache. The time reverses the order from the fifth request on."""
    policy = kvjax.by_score(
        lambda blocks, weight, now: weight * jnp.where(now < 0, -1, 1) * (blocks.stored - blocks.clock),
        init=lambda num_ids: jnp.int32(0), timed=True,
    )  # fmt: skip
    trace = dataclasses.replace(small_trace(), time=7e11 + np.repeat([0, 2**31], [4, 2]))
    for each in (trace, small_trace()):
        ours, theirs = (run(each, policy, [3, 3], policy_state=jnp.array([1, -1], jnp.int32)) for run in RUNS)
        np.testing.assert_array_equal(ours.blocks, theirs.blocks)
        assert ours.blocks.any()
    with pytest.raises(ValueError, match="policy_state: got"):
        simulate(small_trace(), policy, [3, 3], policy_state=jnp.zeros((2,), jnp.float32))


def test_a_trace_without_requests_has_no_hits():
    hits = simulate(small_trace()[:0], lru(), [3, 4])
    assert hits.blocks.shape == (2, 0) and hits.rate.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (kvjax.by_score(lambda blocks: blocks.tokens[:, 0]), "tokens"),
        (kvjax.by_score(lambda blocks: blocks.extra_ids[:, 0]), "extra_ids"),
        (kvjax.by_score(lambda blocks: blocks.key[:, 0].astype(jnp.int32)), "key"),
        (priority(), "expiry, retention, time"),
    ],
)
def test_a_policy_that_reads_what_a_trace_does_not_tell_is_named(policy, names):
    with pytest.raises(ValueError, match=rf"policy: got .*, which reads {names} of blocks, wanted one that reads only"):
        simulate(small_trace(), policy, [3])


@pytest.mark.long
def test_a_policy_that_names_wrong_blocks_is_noticed():
    def nobody(pstate, blocks, eligible, wanted, now, size):
        return jnp.full((size,), -1, jnp.int32), pstate

    policy = EvictionPolicy(lambda num_ids: (), lambda pstate, blocks, ids, now: pstate, nobody, name="nobody")
    assert simulate(small_trace(), policy, [6]).blocks.tolist() == [[0, 0, 0, 0, 1, 1]]
    with pytest.raises(ValueError, match=r"policy: got nobody\(\), which named blocks that may not leave"):
        simulate(small_trace(), policy, [3])


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match="rule: got 'vllm', wanted one of"):
        simulate(small_trace(), lru(), [3], rule="vllm")
    with pytest.raises(ValueError, match=r"sizes: got .*, wanted at least one number of blocks, each at least 1"):
        simulate(small_trace(), lru(), [3, 0])
    with pytest.raises(ValueError, match="got the function lru"):
        simulate(small_trace(), lru, [3])


def compiled(policy, most):
    """The program of a simulation of four caches of up to `most` blocks."""
    arguments = _arguments(small_trace(), policy, [1, 2, 3, most], "full", None)
    return _serve_all.lower(*arguments).compile().as_text()


@pytest.mark.long
@pytest.mark.parametrize("policy", [lru(), lfu(), by_classes()], ids=str)
def test_no_request_selects_or_copies_all_blocks(policy):
    assert lines_of_size(compiled(policy, 4099), 4099) == []


@pytest.mark.long
def test_a_score_selects_over_all_blocks_and_is_found():
    assert lines_of_size(compiled(fifo(), 4099), 4099)
