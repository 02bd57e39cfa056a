# SPDX-License-Identifier: Apache-2.0
"""Maps, encoders and publishers that are attached to a cache with contents."""

import pytest

import kvjax
from kvjax.events import NodeMap
from kvjax.interop.vllm import Encoder, Mirror, Publisher, Subscriber, decode
from tests.drive import PLAIN
from tests.unit.debug import stories
from tests.unit.interop.forest import projected
from tests.wire_kit import removed, stored

LONG = 20.0
STORIES = pytest.mark.parametrize(
    "story", [stories.plain, pytest.param(stories.tiers, marks=pytest.mark.long)], ids=["plain", "tiers"]
)
OTHER = kvjax.make_spec(num_blocks=1, max_seqs=1, max_length=1)


@STORIES
def test_a_map_is_attached_to_a_cache(story):
    state, mirror = story().state, story().mirror
    nodes = NodeMap(state.spec)
    nodes.fold([stored(0, 9, 0, [1] * state.spec.block_size)])  # which the cache does not have
    nodes.attach(state)
    assert nodes.index == kvjax.events.index_of(state)
    children_first = sorted(mirror.nodes, key=lambda node: (-len(mirror.nodes[node][1]), -node[0]))
    nodes.fold([removed(*node[1:], node[0]) for node in children_first])
    assert not nodes.index


@STORIES
def test_an_encoder_is_attached_to_a_cache(story):
    state = story().state
    encoder, mirror = Encoder(state.spec), Mirror()
    encoder.attach(state)
    for payload in encoder.snapshot():
        mirror.apply(decode(payload))
    assert mirror.index == projected(story().mirror, state.spec, kvjax.Namespaces()) != {}


@STORIES
def test_a_publisher_is_attached_to_a_cache(story):
    state, ours = story().state, {"bind": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "heartbeat": 0.1}
    wanted = projected(story().mirror, state.spec, kvjax.Namespaces())
    source = Publisher(state.spec, **ours)
    with source, Subscriber(source.endpoint, source.replay_endpoint) as sub:
        source.publish([stored(0, 1, 0, [1, 2, 3, 4])])
        source.attach(state)
        assert sub.wait(lambda one: one.complete and one.index == wanted != {}, LONG)
        source.publish([removed(77, 1)])  # which is impossible
        assert sub.wait(lambda one: one.complete and len(one) == 0, LONG)
        source.attach(state)
        assert sub.wait(lambda one: one.complete and one.index == wanted, LONG)
        with pytest.raises(ValueError, match=r"^state: got a cache of CacheSpec"):
            source.attach(kvjax.init(OTHER))
        assert sub.wait(lambda one: one.complete and one.index == wanted, LONG)
    with pytest.raises(ValueError, match=r"^publish: got events after `close`, wanted an open publisher"):
        source.attach(state)


def test_a_cache_of_another_spec_is_refused():
    state = stories.plain().state
    for one in (NodeMap, Encoder):
        with pytest.raises(ValueError, match=r"^state: got a cache of CacheSpec.*, wanted one of CacheSpec"):
            one(OTHER).attach(state)
    with pytest.raises(ValueError, match=r"^state: got a Cache"):
        NodeMap(PLAIN).attach(kvjax.Cache.create(PLAIN))
