# SPDX-License-Identifier: Apache-2.0
"""Loops that also work inside `shard_map`, where a constant in a carry would change its type in the first step.

Also a condition that is safe under `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def varying(start: Any) -> Callable[[Any], Any]:
    """Returns a function that makes arrays vary across devices inside `shard_map` if any part of `start` does.

    A constant is the same on all devices there, and jax requires each part of a loop's carry to keep its type.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return lambda carry: carry

    def axes_of(x: Any) -> frozenset[Any]:
        return jax.typeof(x).manual_axis_type.varying

    varying_axes = frozenset[Any]().union(*map(axes_of, jax.tree.leaves(start)))

    def cast(x: Any) -> Any:
        missing = tuple(axis for axis in manual if axis in varying_axes - axes_of(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return lambda carry: jax.tree.map(cast, carry)


@jax.custom_batching.custom_vmap
def unless_mapped(where: jax.Array) -> jax.Array:
    """Returns `where` bool[], or False under `vmap`, where a `lax.cond` would compute both of its branches."""
    return where


@unless_mapped.def_vmap
def _mapped(axis_size: int, in_batched: list[bool], where: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched, where
    return jnp.zeros((), bool), False


def while_loop[T](going: Callable[[T], jax.Array], step: Callable[[T], T], start: T) -> T:
    """`lax.while_loop`, also inside `shard_map`."""
    vary = varying(start)
    return lax.while_loop(going, lambda carry: vary(step(carry)), vary(start))


def fori_loop[T](begin: Any, end: Any, step: Callable[[jax.Array, T], T], start: T) -> T:
    """`lax.fori_loop`, also inside `shard_map`."""
    vary = varying(start)
    return lax.fori_loop(begin, end, lambda i, carry: vary(step(i, carry)), vary(start))


def scan(step: Callable[[Any, Any], tuple[Any, Any]], start: Any, xs: Any) -> tuple[Any, Any]:
    """`lax.scan`, also inside `shard_map`."""
    vary = varying(start)

    def varying_step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, y = step(carry, x)
        return vary(carry), y

    return lax.scan(varying_step, vary(start), xs)
