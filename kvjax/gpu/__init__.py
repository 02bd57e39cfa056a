# SPDX-License-Identifier: Apache-2.0
"""The transitions of a decode step, each as one kernel for NVIDIA GPUs: equal to plain jax in every bit.

Bookkeeping is small: a row touches a block or two. As plain jax it is a hundred kernels on a GPU, and loops that stop
the device until the host has looked at their condition. One program of a lane for each row needs neither.
"""

from pallas_kernels import lowering_for

__all__ = ["lowering_for"]
