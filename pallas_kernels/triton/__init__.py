# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement as Triton kernels, for NVIDIA GPUs from sm_80 on.

The functions and shapes are the same as in `pallas_kernels.xla`. With `interpret=True` a function runs as plain jax on
any platform. Tests compare the functions in this way. Pallas's Triton backend is deprecated. Only this folder depends
on it, and nothing imports the folder but `pallas_kernels.call`, so it can be deleted as a whole.
"""

from pallas_kernels.triton.attention import prefill_attention
from pallas_kernels.triton.decode import decode_attention
from pallas_kernels.triton.move import append_kv, copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.triton.rope import rope_append

__all__ = [
    "append_kv",
    "copy_blocks",
    "decode_attention",
    "gather_blocks",
    "prefill_attention",
    "rope_append",
    "scatter_blocks",
]
