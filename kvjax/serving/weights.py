# SPDX-License-Identifier: Apache-2.0
"""The weights of the contents of a cache, known on the host by the identity of their arrays.

Nothing of this is in a state or in a program. The weights of a cache are unknown after a change by other code, and
after a load: there the save's own name of the model counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import jax

from kvjax.state import CacheState


class Weights:
    """The arrays of a model, by identity. It keeps none of them alive."""

    def __init__(self, model: Any):
        self._leaves = [_reference(leaf) for leaf in jax.tree.leaves(model)]

    def are_of(self, model: Any) -> bool:
        """Whether these are the arrays of a model."""
        leaves = jax.tree.leaves(model)
        return len(leaves) == len(self._leaves) and all(map(_is, self._leaves, leaves))


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    except TypeError:  # a number of Python or numpy
        return leaf


def _is(reference: Any, leaf: Any) -> bool:
    return (
        reference() is leaf
        if isinstance(reference, weakref.ref)
        else type(reference) is type(leaf) and reference == leaf
    )


_known: dict[int, dict[int, Weights]] = {}  # by id of an array of a state; an entry leaves with its array


def remember(state: CacheState, weights: dict[int, Weights]) -> None:
    """Notes which arrays computed each namespace of a cache."""
    array = _contents(state)
    if weights and id(array) not in _known:
        weakref.finalize(array, _known.pop, id(array), None)
    if weights:
        _known[id(array)] = weights


def known(state: CacheState) -> dict[int, Weights]:
    """{namespace: the weights of its K/V} of a cache, as far as they are known."""
    return dict(_known.get(id(_contents(state)), {}))


def _contents(state: CacheState) -> jax.Array:
    """An array replaced by every change of the cached contents."""
    return state.groups[0].blocks.fill


def check_weights(model: Any, weights: dict[int, Weights], namespaces: Iterable[int]) -> None:
    """Raises a ValueError if other arrays have computed a namespace."""
    for namespace in namespaces:
        if namespace in weights and not weights[namespace].are_of(model):
            raise ValueError(
                f"model: got other arrays than computed namespace {namespace} of this cache, so wrong K/V would be "
                "reused; wanted the same arrays, kvjax.reset of the cache, a namespace for each version of the weights "
                "(kvjax.Namespaces: names(weights=...)), or the option reuse='any'"
            )
