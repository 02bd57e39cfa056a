# SPDX-License-Identifier: Apache-2.0
"""vLLM's wire: `KVEventBatch` in msgpack over ZMQ, written and read.

`python -m kvjax.interop.vllm ENDPOINT` prints any engine's stream, a line an event.
"""

from kvjax.interop.readers.subscriber import Subscriber
from kvjax.interop.readers.vllm import Batch, Cleared, Found, Mirror, Prefix, Removed, Skipped, Stored, decode
from kvjax.interop.sockets import Curve
from kvjax.interop.vllm.encode import Encoder
from kvjax.interop.vllm.publisher import Publisher

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
    "Skipped",
    "Stored",
    "Subscriber",
    "decode",
]
