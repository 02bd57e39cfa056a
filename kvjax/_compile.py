# SPDX-License-Identifier: Apache-2.0
"""How programs with loops are compiled for a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

VARIABLE = "KVJAX_COMMAND_BUFFERS"
# XLA's usual kinds of command, and loops and branches.
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL"


def compiler_options(platform: str | None = None) -> dict[str, str]:
    """Options for the outermost `jax.jit` of a loop, which let an NVIDIA GPU run it without waiting for the host.

    XLA then records loops and branches in command buffers (CUDA graphs). Otherwise the device waits for the host at
    every turn of a loop whose length is not known. Pass them to your own outermost jit alone:
    `jax.jit(loop, compiler_options=kvjax.serving.compiler_options())`; jax refuses options of a jit inside another.

    Args:
      platform: for which programs are compiled, such as "cuda"; None: that of jax's default device.

    Returns:
      The options; none for other platforms, and where the environment variable KVJAX_COMMAND_BUFFERS is 0.
    """
    if platform is None:
        device = jax.devices()[0]
        version = device.client.platform_version
        platform = "cuda" if device.platform == "gpu" and "cuda" in version.lower() else device.platform
    if platform != "cuda" or os.environ.get(VARIABLE) == "0":
        return {}
    # A loop is one command, whatever is in it, and XLA would record no fewer than five.
    return {"xla_gpu_enable_command_buffer": COMMANDS, "xla_gpu_graph_min_graph_size": "1"}


class OutermostJit:
    """`jax.jit` with `compiler_options()`, for programs that are never called inside another.

    It asks for the options at the first call, since asking starts jax's backend.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._function, self._options = function, options

    @functools.cached_property
    def _jitted(self) -> Any:
        return jax.jit(self._function, compiler_options=compiler_options(), **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As that of `jax.jit`."""
        return self._jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As that of `jax.jit`."""
        return self._jitted.eval_shape(*args, **kwargs)
