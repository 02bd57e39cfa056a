# SPDX-License-Identifier: Apache-2.0
"""Checks a wheel installed with the extras of all wires: readers get the published events."""

import pathlib
import urllib.request

import grpc
import prometheus_client

import kvjax
from kvjax.interop import agent, metrics, trtllm, vllm

assert "site-packages" in pathlib.Path(vllm.__file__).parts, vllm.__file__
spec = kvjax.make_spec(num_blocks=4, max_seqs=2, max_length=16, block_size=4)
state, _ = kvjax.admit(kvjax.init(spec), 0, list(range(8)), 8)
state, events = kvjax.commit(state, [list(range(8)), [0] * 8], [8, 0])
with (
    vllm.Publisher(spec, bind="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher,
    vllm.Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
):
    publisher.publish(events)
    assert subscriber.wait(lambda mirror: mirror.lookup(range(9)).tokens == 8, 20), subscriber.counts
assert len(trtllm.parse(trtllm.Writer(spec).lines(events))) > 1
with agent.Agent(spec, port=0) as served, grpc.insecure_channel(served.address) as channel:
    served.publish(events)
    assert served.flush(20)
    stub = agent.services.KVCacheAgentServiceStub(channel)
    assert len(next(stub.SubscribeToUpdates(agent.messages.SubscriptionRequest())).cache_ids) == 2
assert metrics.dashboard()["panels"]
with metrics.Metrics(prometheus_client.CollectorRegistry(), spec) as exported:
    exported.observe(events)
    with urllib.request.urlopen(exported.serve(0), timeout=20) as page:
        assert b"kvjax_stored_blocks_total 2.0" in page.read()
print("wheel: kvjax.interop publishes and subscribes from", pathlib.Path(vllm.__file__).parent)
