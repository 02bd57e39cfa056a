# SPDX-License-Identifier: Apache-2.0
"""Paged attention and block movement, as functions of arrays. The only dependency is jax.

Each implementation is a module with some or all of these functions, with the same signatures in every module:
`decode_attention`, `prefill_attention`, `append_kv`, `rope_append`, `copy_blocks`, `gather_blocks`, `scatter_blocks`. A
function raises NotImplementedError while tracing if it cannot serve a dtype or shape, and while lowering if it cannot
serve the platform. The module `derivative` has the derivatives of all implementations.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

# Importing Pallas changes the keys of jax's caches, so a later import would compile every program again.
import jax.experimental.pallas
from jax import lax

from pallas_kernels import tuning

__all__ = ["IMPLEMENTATIONS", "PLATFORMS", "call", "lowering_for", "lowers_for"]

# The modules' names in order of preference. `tuning.FIRST` overrides the order for a function. `call` imports a module
# when it is first used, because the import of Mosaic takes a third of jax's import time.
IMPLEMENTATIONS = ("triton", "mosaic", "tpu", "xla")
# The platform of an implementation. Without an entry it runs everywhere.
PLATFORMS = {"triton": "cuda", "mosaic": "cuda", "tpu": "tpu"}
_lowered_for = jax.make_user_context(None)  # a part of the keys of jax's caches


def lowering_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """A context in which traces use the kernels of a platform, "cuda" or "tpu", even without such a device.

    Outside of this context a program has kernels only if the process has a device for them, so a CPU does not pay for
    tracing them. For example, on a machine without a GPU `jax.export` for CUDA exports plain XLA.
    """
    if platform not in PLATFORMS.values():
        raise ValueError(f"platform: got {platform!r}, wanted one of {sorted({*PLATFORMS.values()})}")
    return _lowered_for(platform)


def lowers_for(platform: str) -> bool:
    """Whether programs have a branch for this platform, because the process has it or `lowering_for` names it."""
    return _lowered_for.value == platform or _has(platform)


@functools.cache
def _has(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def call(name: str, *args, implementation: str | None = None, **options) -> Any:
    """Calls the function `name` of an implementation.

    Without `implementation` the choice is made when a program is lowered, for the platform of this process or of
    `lowering_for`. If jax differentiates the call, XLA computes the derivative and, unless you name a kernel, also the
    result.

    Args:
      name: the name of a function listed above.
      *args: the function's arguments.
      implementation: an entry of `IMPLEMENTATIONS`, which serves the call or raises. None chooses the first able to
        serve the call.
      **options: the function's keyword arguments. With `interpret=True` a kernel runs on any platform, for tests.

    Raises:
      ValueError: if the implementation is unknown.
      NotImplementedError: if the named implementation cannot serve this call.
      ExceptionGroup: if none is named and none can serve. It has the NotImplementedError of each implementation.
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
        # An unnamed kernel does not compute the result as well, because XLA would then copy the pool.
        return (serve(*arrays) if implementation in PLATFORMS else out), tangent

    return serve(*arrays)


def _serve(name: str, implementation: str | None, *args, **options) -> Any:
    """The result of the named implementation, or of the first able to serve."""
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
    except ImportError as error:  # for example of a Pallas backend that jax has removed
        raise NotImplementedError(f"{implementation}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise NotImplementedError(f"{implementation}: has no {name}")
    return functools.partial(function, **options)
