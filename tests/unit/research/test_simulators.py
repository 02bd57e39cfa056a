# SPDX-License-Identifier: Apache-2.0
"""A trace through the verbs (`replay`) and without them (`simulate`) has the hits of plain Python, by request."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.policies import cost_aware, fifo, lfu, lru, priority
from kvjax.research import in_blocks, make_trace, overlapping, replay, simulate
from kvjax.research.simulators.hits import RULES
from kvjax.research.simulators.replay import _serve, request_arrays
from kvjax.research.simulators.simulate import _arguments, _serve_all, missing_fields
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
    small_trace,
)

OF_VERBS = "full", "kvjax"
RUNS = {replay: OF_VERBS, simulate: tuple(RULES)}
both = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
both_by_night = pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=pytest.mark.slow if run is replay else pytest.mark.long, id=run.__name__) for run in RUNS],
)
policies = pytest.mark.parametrize(
    "name", [name if name == "lru" else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)


@pytest.mark.slow
@both
@policies
@given(data=st.data())
def test_requests_of_a_forest_find_what_they_find_in_plain_python(run, name, data):
    """A cache of the longest request's size serves it. One of a block less refuses it, and evicts nothing for it."""
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(RUNS[run]))
    sizes = [LONGEST - 1, LONGEST, data.draw(st.integers(1, MOST)), MOST]
    policy, score = POLICIES[name]
    hits = assert_same(run, trace, policy, score, sizes, rule)
    assert hits.refused[:2].tolist() == [LENGTHS.count(LONGEST), 0]
    if name == "lru":
        np.testing.assert_array_equal(hits.blocks, [lru_hits(trace, size, rule) for size in sizes])


@pytest.mark.slow
@both
@policies
def test_requests_of_a_production_trace_find_what_they_find_in_plain_python(run, name):
    """Prompts have 1 to 226 blocks; without the verbs they are served in 16, 64 and 256 columns."""
    trace = cases.cut(400)
    policy, score = POLICIES[name]
    score = oracle.cost_aware(5 * BLOCK / trace.block_size) if name == "cost_aware" else score
    for rule in RUNS[run]:
        hits = assert_same(run, trace, policy, score, [100, 600, 1500, 3000], rule)
        assert hits.rate[-1] > hits.rate[0] > 0 and hits.refused[0] > 0


@pytest.mark.slow
@both
@pytest.mark.parametrize("name", POLICIES)
def test_all_requests_of_a_production_trace_find_what_they_find_in_plain_python(run, name):
    trace = cases.whole()
    policy, score = (cost_aware(), oracle.cost_aware(48)) if name == "cost_aware" else POLICIES[name]
    published = {("lru", "full"): 0.2149, ("lru", "kvjax"): 0.2113, ("cost_aware", "kvjax"): 0.1863}
    for rule in RUNS[run]:
        hits = assert_same(run, trace, policy, score, [247, 1000, 3000, 5859, 10_000], rule)
        assert round(hits.rate[-1], 4) == published.get((name, rule), round(hits.rate[-1], 4))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_all_requests_at_twenty_sizes(rule):
    trace, sizes = cases.whole(), (np.arange(1, 21) * 1500).tolist()
    prompts, full = cases.prompts_of(trace), trace.full.tolist()
    for policy, hits in ((lru(), research.lru), (lfu(), research.lfu)):
        wanted = [hits(prompts, full, size, rule) for size in sizes]
        np.testing.assert_array_equal(simulate(trace, policy, sizes, rule=rule).blocks, wanted)


@pytest.mark.slow
def test_prefixes_of_the_conversation_trace_leave_leaves_first():
    """So `lfu` has somewhat fewer hits than one for single blocks, and `fifo` nearly as many as `lru`."""
    trace, sizes = cases.whole(), [1000, 10_000, 30_000]
    assert simulate(trace, lfu(), sizes, rule="papers").rate.round(4).tolist() == [0.0481, 0.1317, 0.2760]
    blocks = [simulate(trace, policy, [10_000], rule="kvjax").blocks[0] for policy in (fifo(), lru())]
    assert [round(each.sum() / len(trace.ids), 4) for each in blocks] == [0.2107, 0.2113]
    assert np.sum(blocks[0] != blocks[1]) == 14


# Requests that overlap, and blocks that are filled in part: only with the verbs.


@pytest.mark.slow
@pytest.mark.parametrize("rule", OF_VERBS)
def test_requests_that_overlap_find_what_they_find_in_plain_python(rule):
    """The smallest cache refuses many. Those that it serves hold blocks that no other request gets."""
    trace, speed, sizes = cases.cut(300), (10_000, 50), [300, 600, 1000, 3000]
    hits, overlap = replay(trace, lru(), sizes, rule=rule, overlap=speed), overlapping(trace, *speed)
    wanted, refused = zip(
        *(oracle.overlapped_hits(trace, overlap, size, rule, oracle.lru) for size in sizes), strict=True
    )
    np.testing.assert_array_equal(hits.blocks, wanted)
    assert hits.refused.tolist() == list(refused) and refused[0] > refused[-1] == 0


@pytest.mark.slow
def test_a_request_that_gets_no_blocks_for_its_answer_holds_none():
    """The first request needs four blocks of three, and the third one finds the second one's."""
    trace = make_trace(
        [0, 1, 2000], [2 * BLOCK, 2 * BLOCK, 3 * BLOCK], [2 * BLOCK, 0, 0], [[0, 1], [2, 3], [2, 3, 4]], BLOCK
    )
    hits = replay(trace, lru(), [3], overlap=(10, 1))
    assert hits.blocks.tolist() == [[0, 0, 2]] and hits.refused.tolist() == [1]


@pytest.mark.slow
def test_the_conversation_trace_hits_less_where_requests_overlap():
    hits = replay(cases.whole(), lru(), [3000, 5859], rule="kvjax", overlap=(10_000, 50))
    assert hits.rate.round(4).tolist() == [0.0618, 0.1304] and hits.refused.tolist() == [0, 0]


@both_by_night
def test_a_block_filled_in_part_is_held_and_not_cached(run):
    """There are two blocks. By rule "kvjax" the second prompt's block stays, and the third's evicts the first's."""
    prompts, tokens = [[0], [1], [2], [0, 3]], [BLOCK, BLOCK - 1, BLOCK, 2 * BLOCK]
    trace = make_trace(range(4), tokens, [0] * 4, prompts, BLOCK)
    assert run(trace, lru(), [2]).blocks.tolist() == [[0, 0, 0, 1]]
    assert run(trace, lru(), [2], rule="kvjax").blocks.tolist() == [[0, 0, 0, 0]]


# What policies get.


def stored_at(blocks):
    return blocks.stored - blocks.clock


OLDEST_FIRST, NEWEST_FIRST, MIXED = [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0], [0] * 6


@both_by_night
def test_weights_of_a_score_differ_from_cache_to_cache(run):
    policy = kvjax.by_score(lambda blocks, weight: weight * stored_at(blocks), init=lambda num_ids: jnp.int32(0))
    hits = run(small_trace(), policy, [3, 3], policy_state=jnp.array([1, -1], jnp.int32))
    assert hits.blocks.tolist() == [OLDEST_FIRST, NEWEST_FIRST]
    with pytest.raises(ValueError, match="policy_state: got"):
        run(small_trace(), policy, [3, 3], policy_state=jnp.zeros((2,), jnp.float32))


@both_by_night
def test_a_policy_gets_the_ms_since_the_first_request(run):
    """The times may wrap: 2^31 ms later they are negative, and the newest blocks leave first."""
    trace = dataclasses.replace(small_trace(), time=np.full(6, 7e11))
    late = dataclasses.replace(trace, time=trace.time + np.repeat([0, 2**31], [4, 2]))
    policy = kvjax.by_score(lambda blocks, now: jnp.where(now < 0, -1, 1) * stored_at(blocks), timed=True)
    assert run(trace, policy, [3]).blocks.tolist() == [OLDEST_FIRST]
    assert run(late, policy, [3]).blocks.tolist() == [MIXED]


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


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(kvjax.by_score(by_fill), marks=pytest.mark.long, id="all fields"),
        pytest.param(by_classes(), marks=pytest.mark.slow, id="classes"),
    ],
)
@given(data=st.data())
def test_policies_get_what_the_verbs_give_them(policy, data):
    trace, rule = data.draw(forests()), data.draw(st.sampled_from(OF_VERBS))
    sizes = [LONGEST - 1, LONGEST, data.draw(st.integers(1, MOST)), MOST]
    ours, theirs = (run(trace, policy, sizes, rule=rule).blocks for run in RUNS)
    np.testing.assert_array_equal(ours, theirs)


def test_a_policy_of_keys_and_perhaps_of_retention_runs_without_the_verbs():
    assert missing_fields(kvjax.policies.adaptive(), 4) == ()
    assert missing_fields(priority(), 4) == ("expiry", "retention", "time")


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (kvjax.by_score(lambda blocks: blocks.tokens[:, 0]), "tokens"),
        (kvjax.by_score(lambda blocks: blocks.extra_ids[:, 0]), "extra_ids"),
        (priority(), "expiry, retention, time"),
    ],
)
def test_a_policy_that_reads_what_a_trace_does_not_tell_is_named(policy, names):
    with pytest.raises(ValueError, match=rf"policy: got .*, which reads {names} of blocks, wanted a policy"):
        simulate(small_trace(), policy, [3])


@pytest.mark.long
def test_a_policy_that_names_wrong_blocks_is_noticed():
    def nobody(pstate, blocks, eligible, wanted, now, size):
        return jnp.full((size,), -1, jnp.int32), pstate

    policy = EvictionPolicy(lambda num_ids: (), lambda pstate, blocks, ids, now: pstate, nobody, name="nobody")
    assert simulate(small_trace(), policy, [6]).blocks.tolist() == [[0, 0, 0, 0, 1, 1]]
    for run in (simulate, replay):
        with pytest.raises(ValueError, match=r"policy: got nobody\(\), which named ineligible blocks"):
            run(small_trace(), policy, [3])


def test_the_balance_of_cost_aware_is_counted_in_blocks():
    assert in_blocks(cost_aware(), 512) == cost_aware(48.0)
    for policy in (lru(), lfu(), kvjax.by_score(functools.partial(lambda blocks, balance: blocks.hits, balance=1))):
        assert in_blocks(policy, 512) == policy


@pytest.mark.parametrize("run", [simulate, pytest.param(replay, marks=pytest.mark.slow)])
def test_a_trace_without_requests_has_no_hits(run):
    hits = run(small_trace()[:0], lru(), [3, 4])
    assert hits.blocks.shape == (2, 0) and hits.rate.tolist() == [0, 0]


@both
def test_what_cannot_be_run_is_refused(run):
    with pytest.raises(ValueError, match="rule: got 'vllm', wanted one of"):
        run(small_trace(), lru(), [3], rule="vllm")
    with pytest.raises(ValueError, match="got the function lru"):
        run(small_trace(), lru, [3])
    with pytest.raises(ValueError, match='rule: got "papers", wanted "kvjax" or "full"'):
        replay(small_trace(), lru(), [3], rule="papers")


# Cost.


def compiled(run, policy, most=4099):
    """The program of a run in four caches of up to `most` blocks."""
    trace, sizes = small_trace(), [1, 2, 3, most]
    if run is simulate:
        return _serve_all.lower(*_arguments(trace, policy, sizes, "full", None)).compile().as_text()
    spec = kvjax.make_spec(num_blocks=most, max_seqs=1, max_length=2, block_size=1, partial_reuse=False)
    ids, requests = np.concatenate([trace.ids, np.zeros(2, np.int32)]), request_arrays(trace, "full")
    return _serve.lower(spec, policy, 0, np.array(sizes, np.int32), None, requests, None, ids).compile().as_text()


@both_by_night
@pytest.mark.parametrize("policy", [lru(), lfu(), by_classes()], ids=str)
def test_no_request_selects_or_copies_all_blocks(run, policy):
    assert lines_of_size(compiled(run, policy), 4099) == []


@both_by_night
def test_a_score_selects_over_all_blocks_and_is_found(run):
    assert lines_of_size(compiled(run, fifo()), 4099)
