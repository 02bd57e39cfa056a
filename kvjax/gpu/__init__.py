# SPDX-License-Identifier: Apache-2.0
"""The transitions of a decode step, each as a single kernel for NVIDIA GPUs, equal to plain jax in every bit.

Bookkeeping is small: a row touches a block or two. Plain jax makes it a hundred kernels on a GPU, with loops whose
conditions the host has to read, while the device waits. A single program with a lane for each row needs neither.
"""

from pallas_kernels import lowering_for

__all__ = ["lowering_for"]
