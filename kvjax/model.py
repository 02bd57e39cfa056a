# SPDX-License-Identifier: Apache-2.0
"""The protocol of a model, and the errors of one that breaks it."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kvjax.pools.device import Pools
from kvjax.pools.views import View


class Model(Protocol):
    """Computes the next tokens of some rows: `kvjax.write`s their K/V and `kvjax.attend`s to all tokens so far.

    Any pytree with this call is one: a Flax NNX module, or `jax.tree_util.Partial(fn, weights)`.
    """

    def __call__(
        self, tokens: jax.Array, pools: Pools, view: View, /, *, last: jax.Array | None
    ) -> tuple[jax.Array, Pools]:
        """The logits, and the pools with these tokens' K/V.

        Args:
          tokens: i32[R, C]; i32[1, T] with a view on one line, ragged or mixed. Ids in 0..V-1, also where the view
            has padding.
          pools: the K/V written so far.
          view: where these tokens are, and what they see.
          last: i32[R]; the one position in 0..C-1 of each row whose logits are wanted. On one line i32[n], any n
            positions of it. `x[jnp.arange(x.shape[0]), last]` of x [R, C, E] is right for both. None: all of them;
            only `step(..., logits="all")` asks for that.

        Returns:
          Logits f32[R, V] or f32[n, V], like `last`; f32[R, C, V] if it is None. And the pools.
        """
        ...


def check_model(model: Any) -> None:
    """Raises a ValueError if this cannot be an argument of a jitted loop."""
    if not callable(model):
        raise ValueError(f"model: got a {type(model).__name__}, wanted a kvjax.serving.Model; the cache comes after it")
    if jax.tree_util.all_leaves([model]):
        raise ValueError(
            f"model: got {getattr(model, '__name__', type(model).__name__)}, which is no pytree: wrap a function as "
            "jax.tree_util.Partial(fn), or as Partial(fn, weights)"
        )


def forward(
    model: Model, tokens: jax.Array, pools: Pools, view: View, last: jax.Array | None
) -> tuple[jax.Array, Pools]:
    """Calls the model with `last` as `Model` has it; returns its logits and pools.

    Raises:
      ValueError: if the model returns something else, or cannot give all logits.
    """
    if last is not None:
        result = model(tokens, pools, view, last=last)
    else:
        try:
            result = model(tokens, pools, view, last=None)
        except Exception as error:
            raise ValueError(f'model: got {error!r} for last=None, wanted all logits (logits="all")') from error
    shape = tokens.shape if last is None else last.shape
    wanted = f"a pair of logits f32{[*shape, 'V']} and pools".replace("'", "")
    which = "last=None" if last is None else f"last=i32{list(last.shape)}"
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], Pools):
        raise ValueError(f"model: got {_described(result)} for {which}, wanted {wanted}")
    logits, pools = result
    if len(jnp.shape(logits)) != len(shape) + 1 or jnp.shape(logits)[:-1] != shape:
        raise ValueError(f"model: got logits {_described(logits)} for {which}, wanted {wanted}")
    return logits, pools


def _described(result: Any) -> str:
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_described, result))})"
    if isinstance(result, jax.Array):
        return f"{result.dtype}{list(result.shape)}"
    return type(result).__name__
