# SPDX-License-Identifier: Apache-2.0
"""Writes and reads vLLM's wire: `KVEventBatch` in msgpack over ZMQ.

`python -m kvjax.interop.vllm ENDPOINT` prints the stream of any engine, a line for each event.
"""

from kvjax.interop.readers.subscriber import Subscriber
from kvjax.interop.readers.vllm import Batch, Cleared, Mirror, Prefix, PrefixMatch, Removed, Skipped, Stored, decode
from kvjax.interop.sockets import Curve
from kvjax.interop.vllm.encode import Encoder
from kvjax.interop.vllm.publisher import Publisher

__all__ = [
    "Batch",
    "Cleared",
    "Curve",
    "Encoder",
    "Mirror",
    "Prefix",
    "PrefixMatch",
    "Publisher",
    "Removed",
    "Skipped",
    "Stored",
    "Subscriber",
    "decode",
]
