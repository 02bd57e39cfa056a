# SPDX-License-Identifier: Apache-2.0
"""Generation with priorities and times to live: blocks of high priority are found again until their time ends.

Prompts have 9 to 16 tokens and two ranges each, and run in pairs, so that all tests share the same few programs.
"""

import jax
import pytest

import kvjax
from tests.serving_kit import successor

pytestmark = pytest.mark.long
SYSTEM = [7, 3, 9, 1, 7, 7, 2, 5]  # two whole blocks
LAYERS = [kvjax.LayerSpec(kv_heads=1, head_dim=1)]
SHAPE = {"max_seqs": 2, "max_length": 32, "block_size": 4, "dtype": "float32"}
SPEC = kvjax.make_spec(LAYERS, num_blocks=12, retention=True, **SHAPE)


MODEL = jax.tree_util.Partial(successor)


def generate(cache, prompts, new, retention=None, **options):
    """Generates, with `retention` for the first prompt."""
    each = [retention or retention_of(35), *[None] * (len(prompts) - 1)]
    return kvjax.generate(MODEL, cache, prompts, max_new_tokens=new, chunk=16, steps=16, retention=each, **options)


def retention_of(priority, ttl=None, **options):
    return kvjax.Retention.of([(0, 4, priority, ttl), (4, 8, priority, ttl)], **options)


def cached_tokens(retention, later=0):
    """The cached tokens of a system prompt that comes again after others took blocks, `later` ms after its release.

    Of 12 blocks 3 hold the system prompt and its answer, and 3 another prompt of about the same age. Two more prompts
    are given the 6 empty ones, and take 4 others in the decode loop.
    """
    time = 2**31 - 20  # a clock may be of any size; this one passes 2**31 on the way

    def clock():
        return time

    _, cache, _ = generate(
        kvjax.Cache.create(SPEC, kvjax.policies.priority()), [[*SYSTEM, 50], [60] * 9], 2, retention, clock=clock
    )
    time += later
    outputs, cache, events = generate(cache, [[100] * 9, [200] * 9], 11, clock=clock)
    assert [output.finish for output in outputs] == ["length"] * 2
    assert sum(event["kind"] == "removed" for event in events) == 4
    outputs, cache, _ = generate(cache, [[*SYSTEM, 70], [80] * 9], 2, clock=clock)
    kvjax.check(cache.state)
    return outputs[0].cached_tokens


@pytest.mark.slow
def test_a_system_prompt_survives_what_evicts_the_others():
    assert cached_tokens(retention_of(100)) == 8
    assert cached_tokens(retention_of(35)) == 0


@pytest.mark.slow
def test_a_time_to_live_ends_by_the_clock():
    assert cached_tokens(retention_of(100, 50), later=49) == 8
    assert cached_tokens(retention_of(100, 50), later=50) == 0
    assert cached_tokens(retention_of(0, 50), later=50) == 0


def test_each_prompt_has_a_retention_of_its_own():
    """So has each that waits, and the events have the priorities."""
    each = [
        kvjax.Retention.of([(0, 4, 10), (4, None, 20)]),
        None,
        kvjax.Retention.of(decode_priority=60),
        retention_of(90),
    ]
    prompts = [[n] * 9 for n in (1, 2, 3, 4)]
    cache = kvjax.Cache.create(SPEC, kvjax.policies.priority())
    _, cache, events = kvjax.generate(MODEL, cache, prompts, max_new_tokens=8, chunk=16, steps=16, retention=each)
    stored = {tuple(e["tokens"]): e["priority"] for e in events if e["kind"] == "stored" and len(e["tokens"]) == 4}
    assert [stored[n, n, n, n] for n in (1, 2, 3, 4)] == [20, 35, 35, 90]  # of equal blocks the second
    assert [stored[n, n + 1, n + 2, n + 3] for n in (1, 2, 3, 4)] == [20, 35, 35, 35]  # begun by the prompt
    assert [stored[n + 4, n + 5, n + 6, n + 7] for n in (1, 2, 3, 4)] == [35, 35, 60, 35]
    assert kvjax.fold(events).index == kvjax.events.index_of(cache.state)
