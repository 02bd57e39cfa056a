# SPDX-License-Identifier: Apache-2.0
"""vLLM's wire: `KVEventBatch` in msgpack over ZMQ, written and read.

`python -m kvjax.interop.vllm ENDPOINT` prints any engine's stream, a line an event.
"""

from kvjax.interop.vllm.decode import Batch, Cleared, Removed, Stored, decode
from kvjax.interop.vllm.encode import Encoder
from kvjax.interop.vllm.mirror import Found, Mirror, Prefix
from kvjax.interop.vllm.publisher import Publisher
from kvjax.interop.vllm.sockets import Curve
from kvjax.interop.vllm.subscriber import Subscriber

__all__ = [
    "Batch",
    "Cleared",
    "Curve",
    "Encoder",
    "Found",
    "Mirror",
    "Prefix",
    "Publisher",
    "Removed",
    "Stored",
    "Subscriber",
    "decode",
]
