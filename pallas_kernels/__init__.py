# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement: arrays in, arrays out, on jax alone.

Each implementation is a module with these functions, all with the same signature in every module:
`decode_attention`, `prefill_attention`, `append_kv`, `copy_blocks`, `gather_blocks`, `scatter_blocks`. One that
cannot serve a platform, dtype or shape raises NotImplementedError while tracing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pallas_kernels import xla

# In order of preference.
IMPLEMENTATIONS: dict[str, ModuleType] = {"xla": xla}


def call(name: str, *args, implementation: str | None = None, **options) -> Any:
    """Calls the function `name` of an implementation.

    Args:
      name: one of the functions listed above.
      *args: its arguments.
      implementation: a key of `IMPLEMENTATIONS`, which serves or raises; None: the first that can serve.
      **options: its keyword arguments.

    Raises:
      ValueError: on an unknown implementation.
      NotImplementedError: if the implementation asked for cannot serve this call.
      ExceptionGroup: of every implementation's NotImplementedError, if none was asked for and none can serve.
    """
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: got {implementation!r}, wanted None or one of {list(IMPLEMENTATIONS)}")
        return getattr(IMPLEMENTATIONS[implementation], name)(*args, **options)
    refusals = []
    for module in IMPLEMENTATIONS.values():
        try:
            return getattr(module, name)(*args, **options)
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup(f"{name}: no implementation can serve this call", refusals)
