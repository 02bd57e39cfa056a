# SPDX-License-Identifier: Apache-2.0
"""The protocol of a model, and the errors for objects that break it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.pools.device import Pools
from kvjax.pools.lineage import Lineage, Probe, recording
from kvjax.pools.views import View

# Flax's errors for layers that draw random numbers, count, or keep averages.
_STATEFUL = ("InvalidRngError", "ModifyScopeVariableError", "TraceContextError")
_TRAINING = (
    "a layer that draws random numbers or keeps averages, such as Dropout, is in training mode: model.eval()? "
    "(Linen: deterministic=True, use_running_average=True)"
)


class Model(Protocol):
    """Computes the next tokens of some rows: writes K/V (`kvjax.write`), and attends to all tokens (`kvjax.attend`).

    Any pytree with this call is a model: a Flax NNX module, or `jax.tree_util.Partial(fn, weights)`.
    """

    def __call__(
        self, tokens: jax.Array, pools: Pools, view: View, /, *, last: jax.Array | None
    ) -> tuple[jax.Array, Pools]:
        """Returns the logits, and the pools with these tokens' K/V.

        Args:
          tokens: i32[R, C], or i32[1, T] with a flat view, ragged or mixed. All ids, including padding, are in 0..V-1.
          pools: the K/V written so far.
          view: the positions of these tokens, and the tokens that they see.
          last: i32[R]; the position in 0..C-1 of each row whose logits to return. With a flat view i32[n], any n
            positions of it. `x[jnp.arange(x.shape[0]), last]` of x [R, C, E] is right for both. None asks for all
            logits, which only `step(..., logits="all")` does.

        Returns:
          Logits f32[R, V] or f32[n, V], like `last`, or f32[R, C, V] if it is None; and the pools.
        """
        ...


def check_model(model: Any) -> None:
    """Raises a ValueError if the model cannot be an argument of a jitted loop."""
    if not callable(model):
        raise ValueError(f"model: got a {type(model).__name__}, wanted a kvjax.serving.Model; the cache comes after it")
    if jax.tree_util.all_leaves([model]):
        raise ValueError(
            f"model: got {getattr(model, '__name__', type(model).__name__)}, which is no pytree: wrap a function as "
            "jax.tree_util.Partial(fn), or as Partial(fn, weights)"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            raise ValueError(
                f"model{jax.tree_util.keystr(path)}: got {getattr(leaf, '__name__', repr(leaf)):.80}, wanted an array: "
                "partition static leaves, then jax.tree_util.Partial(fn, arrays)"
            ) from error


def check_placement(model: Any, cache: Any) -> None:
    """Raises a ValueError if the model's arrays are on other devices than the cache. jax moves unplaced arrays."""
    wanted = next((devices for _, devices in _placed(cache)), None)
    for path, devices in _placed(model):
        if wanted is not None and devices != wanted:
            got, of_cache = (", ".join(sorted(map(str, device))) for device in (devices, wanted))
            raise ValueError(f"model{path}: got an array on {got}, wanted it on {of_cache}, where the cache is")


def _placed(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the paths of arrays committed to devices, and the set of these devices."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
            yield jax.tree_util.keystr(path), leaf.sharding.device_set


def forward(model: Model, tokens: jax.Array, pools: Pools, view: View, last: jax.Array) -> tuple[jax.Array, Pools]:
    """Runs `call`, traced once for all programs of the process calling an equal model with equal shapes.

    Any other model, such as a function with weights in your own program, is traced each time.

    Raises:
      ValueError: if `call` raises it, or the call changes the model, since a loop would lose the change.
    """
    arrays = all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in jax.tree.leaves(model))
    return (_forward if arrays else call)(model, tokens, pools, view, last)


@functools.partial(jax.jit, inline=True)
def _forward(model: Model, tokens: jax.Array, pools: Pools, view: View, last: jax.Array) -> tuple[jax.Array, Pools]:
    before, structure = jax.tree.flatten(model)
    result = call(model, tokens, pools, view, last)
    after, new_structure = jax.tree.flatten(model)
    if structure == new_structure:
        has_same_arrays = all(a is b for a, b in zip(before, after, strict=True))
        if has_same_arrays or _is_kept(before, structure, tokens, pools, view, last):
            return result
    raise ValueError(f"model: got a model that its call changes, wanted one that stays as it is; {_TRAINING}")


def _is_kept(leaves: list[Any], structure: Any, *arguments: Any) -> bool:
    """Whether a model has the same values after a call, which has put other arrays into it.

    `nnx.jit`, `nnx.remat` and `nnx.scan` do so: they return the state of a module, and put it back.
    """

    def leaves_after(leaves: list[Any]) -> list[Any]:
        model = jax.tree.unflatten(structure, leaves)
        call(model, *arguments)
        return jax.tree.leaves(model)

    jaxpr = jax.make_jaxpr(leaves_after)(leaves).jaxpr
    return all(_source(jaxpr, var) is given for var, given in zip(jaxpr.outvars, jaxpr.invars, strict=True))


def _source(jaxpr: Any, var: Any) -> Any:
    """The variable that `var` is a copy of, before all calls, remats and scans that return it as it is."""
    for equation in reversed(jaxpr.eqns):
        if var in equation.outvars:
            copied = _copied(equation, equation.outvars.index(var))
            if copied is None:
                return var
            var = copied
    return var


def _copied(equation: Any, out: int) -> Any:
    """The argument of an equation that is its result number `out`. None if it computes this result."""
    inner = next((equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params), None)
    inner = getattr(inner, "jaxpr", inner)
    if inner is None or len(inner.invars) != len(equation.invars) or len(inner.outvars) != len(equation.outvars):
        return None
    source = _source(inner, inner.outvars[out])
    if source not in inner.invars:
        return None
    argument = equation.invars[inner.invars.index(source)]
    # A scan slices its inputs, and stacks these slices again.
    return argument if argument.aval == equation.outvars[out].aval else None


def call(
    model: Model, tokens: jax.Array, pools: Pools, view: View, last: jax.Array | None, probe: Probe | None = None
) -> tuple[jax.Array, Pools]:
    """Calls the model as `Model` describes. Returns its logits and pools. A `probe` sees its layers.

    Raises:
      ValueError: if the model has another signature or result, cannot give all logits, loses K/V, or reads K/V that
        it has not written.
    """
    lineage = Lineage(pools, probe)
    try:
        with recording(lineage):
            result = model(tokens, pools, view, last=last)
    except Exception as error:
        if lineage.has_failed:
            raise
        if isinstance(error, TypeError):  # perhaps from inside the model
            _check_signature(model, error)
        if type(error).__name__ in _STATEFUL:
            error.add_note(f"model: {_TRAINING}")
        if last is None:
            raise ValueError(f'model: got {error!r} for last=None, wanted all logits (logits="all")') from error
        raise
    shape = tokens.shape if last is None else last.shape
    wanted = f"a pair of logits f32{[*shape, 'V']} and pools".replace("'", "")
    argument = "last=None" if last is None else f"last=i32{list(last.shape)}"
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], Pools):
        raise ValueError(f"model: got {described(result)} for {argument}, wanted {wanted}")
    logits, pools = result
    lineage.check_result(pools)
    if len(jnp.shape(logits)) != len(shape) + 1 or jnp.shape(logits)[:-1] != shape:
        raise ValueError(f"model: got logits {described(logits)} for {argument}, wanted {wanted}")
    return logits, pools


def _check_signature(model: Any, cause: TypeError) -> None:
    """Raises a ValueError if the object cannot be called like a model."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # not every callable has a signature
        return
    try:
        signature.bind("tokens", "pools", "view", last="last")
    except TypeError as error:
        raise ValueError(
            f"model: got a model that takes {signature} ({error}), wanted one that is called as "
            "model(tokens, pools, view, last=); see kvjax.serving.Model"
        ) from cause


def described(result: Any) -> str:
    """The result of a model in an error."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(described, result))})"
    if isinstance(result, jax.Array | np.ndarray):
        return f"{result.dtype}{list(result.shape)}"
    return type(result).__name__
