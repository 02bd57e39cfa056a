# SPDX-License-Identifier: Apache-2.0
"""Verbs on states as methods of classes that have a state: their signatures, and whether arrays can be read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def alive(tree: Any) -> bool:
    """Whether no array of the tree has been donated."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    return not any(x.is_deleted() for x in arrays)


def unreadable(tree: Any) -> str:
    """Why the arrays of a tree cannot be read; "" if they can."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return "traced"
    if not leaves or not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        return "shapes alone"
    if not alive(leaves):
        return "donated"
    if not all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return "on several hosts"
    return ""


def check_alive(*trees: Any, name: str = "cache") -> None:
    """Raises a ValueError if an array of a cache, or of another argument, has been donated."""
    if not alive(trees):
        raise ValueError(f"{name}: was donated to an earlier call: go on with what that call returned")


def check_on_host(name: str, given: Any, instead: str) -> None:
    """Raises a ValueError while a program is traced: under `vmap` only what is given shows it."""
    if any(isinstance(leaf, Tracer) for leaf in [jnp.empty(()), *jax.tree.leaves(given)]):
        raise ValueError(f"{name}: got a call inside a program (jit, vmap, shard_map), wanted host code: {instead}")


def face(method: Callable[..., Any], verb: Callable[..., Any], owner: str, **given: Any) -> Any:
    """Gives a method the name, the docstring and the parameters of the verb that it calls with `given`."""
    signature = inspect.signature(functools.partial(verb, **given))
    (name, state), *rest = signature.parameters.items()
    assert name == "state"
    returns = signature.return_annotation.replace("CacheState", owner)
    method = functools.update_wrapper(method, verb)
    vars(method)["__signature__"] = signature.replace(
        parameters=[state.replace(name="self", annotation=state.empty), *(parameter for _, parameter in rest)],
        return_annotation=returns,
    )
    return method
