# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement: arrays in, arrays out, on jax alone.

Each implementation is a module with these functions, or some of them, with the same signature in every module:
`decode_attention`, `prefill_attention`, `append_kv`, `rope_append`, `copy_blocks`, `gather_blocks`, `scatter_blocks`.
A function raises NotImplementedError for a dtype or shape that it cannot serve while tracing, for a platform while
lowering. The derivative of all of them is that of `derivative`, which is one more such module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

# Importing Pallas adds to the keys of jax's caches: a later import would compile every program again.
import jax.experimental.pallas
from jax import lax

from pallas_kernels import tuning

__all__ = ["IMPLEMENTATIONS", "PLATFORMS", "call", "lowering_for", "lowers_for"]

# The modules' names in order of preference, which `tuning.FIRST` overrides for a function. `call` imports a module when
# it first asks it: the import of Mosaic's takes a third of the time of jax's.
IMPLEMENTATIONS = ("triton", "mosaic", "xla")
# The platform of an implementation; one without an entry runs everywhere.
PLATFORMS = {"triton": "cuda", "mosaic": "cuda"}
_lowered_for = jax.make_user_context(None)  # a part of the keys of jax's caches


def lowering_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """A context whose traces have the kernels of a platform that this process need not have: "cuda".

    Without it a program has kernels only if the process has a device for them, so that a CPU does not pay for tracing
    them. `jax.export` for CUDA on a machine without it, for example, exports plain XLA outside of this context.
    """
    if platform not in PLATFORMS.values():
        raise ValueError(f"platform: got {platform!r}, wanted one of {sorted({*PLATFORMS.values()})}")
    return _lowered_for(platform)


def lowers_for(platform: str) -> bool:
    """Whether programs have a branch for a platform: one of this process, or that of `lowering_for`."""
    return _lowered_for.value == platform or _has(platform)


@functools.cache
def _has(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def call(name: str, *args, implementation: str | None = None, **options) -> Any:
    """Calls the function `name` of an implementation.

    Without `implementation` the choice is made when a program is lowered, for its platform: one of this process, or
    that of `lowering_for`. Where jax differentiates the call, XLA computes the derivative, and the result too unless a
    kernel is named.

    Args:
      name: one of the functions listed above.
      *args: its arguments.
      implementation: one of `IMPLEMENTATIONS`, which serves or raises; None: the first that can serve.
      **options: its keyword arguments. With `interpret=True` a kernel runs on any platform, for tests.

    Raises:
      ValueError: on an unknown implementation.
      NotImplementedError: if the named implementation cannot serve this call.
      ExceptionGroup: of every implementation's NotImplementedError, if none is named and none can serve.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation: got {implementation!r}, wanted None or one of {IMPLEMENTATIONS}")
    leaves, tree = jax.tree.flatten((args, options))
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    static = [None if isinstance(x, jax.Array) else x for x in leaves]

    def called(function, arrays):
        rest = iter(arrays)
        args, options = tree.unflatten([next(rest) if x is None else x for x in static])
        return function(*args, **options)

    @jax.custom_jvp
    def serve(*arrays):
        return called(functools.partial(_serve, name, implementation), arrays)

    @serve.defjvp
    def _differentiate(arrays, tangents):
        def plain(*args, interpret=False, **options):
            return _function("derivative", name, options)(*args)

        out, tangent = jax.jvp(lambda *arrays: called(plain, arrays), arrays, tangents)
        # Not also by the implementation that would be chosen: the pool would be copied, to be read by both.
        return (serve(*arrays) if implementation in PLATFORMS else out), tangent

    return serve(*arrays)


def _serve(name: str, implementation: str | None, *args, **options) -> Any:
    """The named implementation's result, or that of the first that can serve."""
    if implementation is not None:
        function = _function(implementation, name, options)
        if implementation in PLATFORMS and not options.get("interpret"):
            if not lowers_for(platform := PLATFORMS[implementation]):
                raise NotImplementedError(
                    f"implementation: {implementation!r} runs on {platform} alone, which this process does not have; "
                    f"None chooses one that runs, and pallas_kernels.lowering_for({platform!r}) compiles for it"
                )
            return lax.platform_dependent(*args, **{PLATFORMS[implementation]: function})
        return function(*args)
    refusals = []
    usable = [key for key in IMPLEMENTATIONS if key not in PLATFORMS or lowers_for(PLATFORMS[key])]
    for key in sorted(usable, key=lambda key: key != tuning.FIRST.get(name)):
        try:
            function = _function(key, name, options)
            if key not in PLATFORMS:
                return function(*args)
            default = next(_function(key, name, options) for key in IMPLEMENTATIONS if key not in PLATFORMS)
            return lax.platform_dependent(*args, default=default, **{PLATFORMS[key]: function})
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup(f"{name}: no implementation can serve this call", refusals)


def _function(implementation: str, name: str, options: dict[str, Any]) -> Callable[..., Any]:
    try:
        module = importlib.import_module(f"{__name__}.{implementation}")
    except ImportError as error:  # such as that of a Pallas backend which jax has no more
        raise NotImplementedError(f"{implementation}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise NotImplementedError(f"{implementation}: has no {name}")
    return functools.partial(function, **options)
