# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement: arrays in, arrays out, on jax alone.

Each implementation is a module with these functions, all with the same signature in every module:
`decode_attention`, `prefill_attention`, `append_kv`, `copy_blocks`, `gather_blocks`, `scatter_blocks`. One that
cannot serve a dtype or shape raises NotImplementedError while tracing, one that cannot serve a platform while lowering.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from jax import lax

from pallas_kernels import triton, xla

# In order of preference.
IMPLEMENTATIONS: dict[str, ModuleType] = {"triton": triton, "xla": xla}
# What each runs on; the others run everywhere.
PLATFORMS = {"triton": "cuda"}


def call(name: str, *args, implementation: str | None = None, **options) -> Any:
    """Calls the function `name` of an implementation.

    Without a name the choice is made when a program is lowered, for the platform that it is lowered for.

    Args:
      name: one of the functions listed above.
      *args: its arguments.
      implementation: a key of `IMPLEMENTATIONS`, which serves or raises; None: the first that can serve.
      **options: its keyword arguments. With `interpret=True` a kernel runs on any platform, for tests.

    Raises:
      ValueError: on an unknown implementation.
      NotImplementedError: if the implementation asked for cannot serve this call.
      ExceptionGroup: of every implementation's NotImplementedError, if none was asked for and none can serve.
    """
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: got {implementation!r}, wanted None or one of {list(IMPLEMENTATIONS)}")
        function = functools.partial(getattr(IMPLEMENTATIONS[implementation], name), **options)
        if implementation in PLATFORMS and not options.get("interpret"):
            return lax.platform_dependent(*args, **{PLATFORMS[implementation]: function})
        return function(*args)
    functions = {key: functools.partial(getattr(module, name), **options) for key, module in IMPLEMENTATIONS.items()}
    everywhere = {key: function for key, function in functions.items() if key not in PLATFORMS}
    refusals = []
    for key, function in functions.items():
        try:
            if key in PLATFORMS:
                return lax.platform_dependent(*args, default=_first(everywhere), **{PLATFORMS[key]: function})
            return function(*args)
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup(f"{name}: no implementation can serve this call", refusals)


def _first(functions):
    """The one that runs where no kernel does."""
    return next(iter(functions.values()))
