# SPDX-License-Identifier: Apache-2.0
"""Places the decoder's weights on several devices. Attention is divided by heads, and the MLP by its inner width.

A device has whole heads, so attention needs no communication. Each layer sums the results of its devices twice, after
`o_proj` and after `down_proj`. The vocabulary's matrices are divided by tokens. If the cache's blocks are divided too
(`context`), weights are divided over both axes, and a layer gathers its queries, keys and values over `context`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The first pattern found in a parameter's path determines the axis to divide, and whether the axis must be divisible. A
# parameter without a match is whole on every device, and so is a vocabulary of an indivisible size.
DIVIDED = (
    (r"\.(q|k|v|gate|up)_proj\.kernel$", 1, True),
    (r"\.(q|k|v|gate|up)_proj\.bias$", 0, True),
    (r"\.(o|down)_proj\.kernel$", 0, True),
    (r"^embed_tokens(_per_layer)?\.embedding$", 0, False),
    (r"^lm_head\.kernel$", 1, False),
)


def partition_spec(path: str, shape: tuple[int, ...], mesh: Mesh, heads: str, context: str | None = None) -> P:
    """The partition of a parameter over an axis of a mesh, or two.

    Args:
      path: the parameter's path in the decoder, such as layers.0.mlp.up_proj.kernel.
      shape: the parameter's shape.
      mesh: the devices.
      heads: name of the axis.
      context: name of a second axis, which divides each part further if it can; None disables it.

    Raises:
      ValueError: the number of devices does not divide the heads or an inner width.
    """
    for pattern, axis, is_needed in DIVIDED:
        if re.search(pattern, path):
            if context is not None and shape[axis] % (mesh.shape[heads] * mesh.shape[context]) == 0:
                return P(*[None] * axis, (heads, context))
            if shape[axis] % mesh.shape[heads] == 0:
                return P(*[None] * axis, heads)
            if is_needed:
                got = f"{mesh.shape[heads]} devices along {heads!r}"
                raise ValueError(f"mesh: got {got}, wanted a divisor of {shape[axis]} ({path})")
    return P()


def check_axes(mesh: Mesh | None, heads: str | None, context: str | None) -> None:
    """Raises a ValueError unless `heads` is an axis of the mesh and `context` another or None, or all are None."""
    for name, axis in (("heads", heads), ("context", context)):
        if mesh is None and axis is not None:
            raise ValueError(f"{name}: got {axis!r} without a mesh, wanted None")
    if mesh is not None and heads not in mesh.axis_names:
        raise ValueError(f"heads: got {heads!r}, wanted one of the mesh's axes {mesh.axis_names}")
    if mesh is not None and context is not None and (context not in mesh.axis_names or context == heads):
        raise ValueError(f"context: got {context!r}, wanted another of the mesh's axes {mesh.axis_names}")


def placed(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    path: str,
    shape: tuple[int, ...],
    mesh: Mesh | None,
    heads: str | None,
    context: str | None,
) -> jax.Array:
    """Makes a parameter from its parts. `read` is called once for each part on this process's devices."""
    if mesh is None or heads is None:
        return jnp.array(read((slice(None),) * len(shape)))  # a copy: numpy's memory cannot be donated
    sharding = NamedSharding(mesh, partition_spec(path, shape, mesh, heads, context))
    return jax.make_array_from_callback(shape, sharding, functools.cache(read))


def under_auto_axes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Lets XLA place the inner values of a model's call, even if the axes of the mesh in context are Explicit.

    Otherwise each product of divided matrices would have to specify the placement of its result.
    """

    @functools.wraps(call)
    def call_placed(model: Any, tokens: jax.Array, pools: Any, view: Any, *, last: jax.Array | None = None) -> Any:
        if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
            return call(model, tokens, pools, view, last=last)
        # The logits are divided like the vocabulary, so the logits are gathered instead of the matrix.
        matrix, axis = model.vocabulary()
        divided = P(*[None] * (tokens.ndim if last is None else 1), jax.typeof(matrix).sharding.spec[axis])
        specs = divided, jax.tree.map(lambda x: jax.typeof(x).sharding.spec, pools)

        def positional(model, tokens, pools, view, last):
            return call(model, tokens, pools, view, last=last)

        run: Any = jax.sharding.auto_axes(positional, out_sharding=specs)
        logits, pools = run(model, tokens, pools, view, last)
        return jax.sharding.reshard(logits, P()), pools

    return call_placed
