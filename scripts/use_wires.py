# SPDX-License-Identifier: Apache-2.0
"""What must hold where the wheel is installed with its extra `wires`: a subscriber mirrors what is published."""

import pathlib

import kvjax
from kvjax.interop import vllm

assert "site-packages" in pathlib.Path(vllm.__file__).parts, vllm.__file__
spec = kvjax.make_spec(num_blocks=4, max_seqs=2, max_length=16, block_size=4)
state, _ = kvjax.admit(kvjax.init(spec), 0, list(range(8)), 8)
state, events = kvjax.commit(state, [list(range(8)), [0] * 8], [8, 0])
with (
    vllm.Publisher(spec, bind="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher,
    vllm.Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber,
):
    publisher.publish(events)
    assert subscriber.wait(lambda one: one.lookup(range(9)).tokens == 8, 20), subscriber.counts
print("wheel: kvjax.interop publishes and subscribes from", pathlib.Path(vllm.__file__).parent)
