# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON, written and read; partly filled blocks and priorities are there too."""

from kvjax.interop.trtllm.mirror import Mirror, Prefix
from kvjax.interop.trtllm.read import Block, Created, Diff, Event, Removed, Stored, Updated, parse
from kvjax.interop.trtllm.write import Writer

__all__ = [
    "Block",
    "Created",
    "Diff",
    "Event",
    "Mirror",
    "Prefix",
    "Removed",
    "Stored",
    "Updated",
    "Writer",
    "parse",
]
