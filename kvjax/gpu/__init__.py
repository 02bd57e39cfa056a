# SPDX-License-Identifier: Apache-2.0
"""The transitions of a decode step, each as a single kernel for NVIDIA GPUs, equal to plain jax in every bit.

The work is small, because a row touches a block or two. But on a GPU plain jax needs a hundred kernels for it, and
loops whose conditions the host has to read while the device waits. A single kernel with a lane for each row avoids
both.
"""

from pallas_kernels import lowering_for

__all__ = ["lowering_for"]
