# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's event JSON, written and read; partly filled blocks and priorities are there too."""

from typing import TYPE_CHECKING, Any

from kvjax.interop.trtllm.write import Writer

if TYPE_CHECKING:
    from kvjax.interop.readers.trtllm import (
        Block,
        Created,
        Diff,
        Event,
        Mirror,
        Prefix,
        Removed,
        Stored,
        Updated,
        parse,
    )

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


def __getattr__(name: str) -> Any:
    """Imports what reads when it is asked for: it needs the extra `wires`, and `Writer` does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvjax.interop.readers import trtllm

    return getattr(trtllm, name)
