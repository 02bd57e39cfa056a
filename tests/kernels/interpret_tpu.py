# SPDX-License-Identifier: Apache-2.0
"""Lets jax's interpreter of TPU kernels load and store through reshaped and bitcast references, which it lacks.

`installed()` is a context with the patched interpreter, for kernels that are traced and run inside it.
"""

import contextlib

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import utils
from jax._src.state import types
from jax.experimental.pallas import tpu as pltpu

CHIP = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu"))
_SHAPES = types.BitcastTransform, types.ReshapeTransform


def _split(transforms):
    """The transforms that the interpreter knows, and the rest from the first reshape or bitcast on."""
    first = next((i for i, transform in enumerate(transforms) if isinstance(transform, _SHAPES)), len(transforms))
    return tuple(transforms[:first]), jax.tree.map(int, tuple(transforms[first:]))


def _bitcast(x, dtype):
    """Elements of another width: a TPU packs narrow elements of successive rows into a word."""
    dtype = np.dtype(dtype)
    if x.dtype.itemsize == dtype.itemsize:
        return x.view(dtype)
    *shape, rows, columns = x.shape
    if x.dtype.itemsize < dtype.itemsize:
        packing = dtype.itemsize // x.dtype.itemsize
        pairs = x.reshape(*shape, rows // packing, packing, columns).swapaxes(-1, -2)
        return np.ascontiguousarray(pairs).view(dtype)[..., 0]
    packing = x.dtype.itemsize // dtype.itemsize
    parts = np.ascontiguousarray(x)[..., None].view(dtype)
    return parts.swapaxes(-1, -2).reshape(*shape, rows * packing, columns)


def _read(x, transforms):
    """The value after the transforms, and the values before each."""
    before = []
    for transform in transforms:
        before.append(x)
        if isinstance(transform, types.BitcastTransform):
            x = _bitcast(x, transform.dtype)
        elif isinstance(transform, types.ReshapeTransform):
            x = x.reshape(transform.shape)
        else:
            x = x[utils.to_range((transform,))]
    return x, before


def _written(before, transforms, new):
    """The value before the transforms, with a new value after them."""
    for x, transform in zip(reversed(before), reversed(transforms), strict=True):
        if isinstance(transform, types.BitcastTransform):
            new = _bitcast(new, x.dtype).reshape(x.shape)
        elif isinstance(transform, types.ReshapeTransform):
            new = new.reshape(x.shape)
        else:
            whole = x.copy()
            whole[utils.to_range((transform,))] = new
            new = whole
    return new


def _patched(get, swap, store):
    def new_get(token, device, core, memory, buffer, transforms, *args, **options):
        first, rest = _split(transforms)
        token, x = get(token, device, core, memory, buffer, first, *args, **options)
        return token, _read(np.asarray(x), rest)[0] if rest else x

    def new_swap(token, device, core, memory, buffer, transforms, value, mask, **options):
        first, rest = _split(transforms)
        if not rest and mask is None:
            return swap(token, device, core, memory, buffer, first, value, mask, **options)
        token, x = get(token, device, core, memory, buffer, first)
        old, before = _read(np.asarray(x), rest)
        new = np.asarray(value).reshape(old.shape)
        new = new if mask is None else np.where(np.asarray(mask), new, old)
        token, _ = swap(token, device, core, memory, buffer, first, _written(before, rest, new), None, **options)
        return token, old

    def new_store(token, device, core, memory, buffer, transforms, value, *args, **options):
        first, rest = _split(transforms)
        if rest:
            token, x = get(token, device, core, memory, buffer, first)
            old, before = _read(np.asarray(x), rest)
            value = _written(before, rest, np.asarray(value).reshape(old.shape))
        return store(token, device, core, memory, buffer, first, value, *args, **options)

    return new_get, new_swap, new_store


_NAMES = "get", "swap", "store"


@contextlib.contextmanager
def installed():
    """The patched interpreter, a kind of TPU to ask, and NaN in memory that no one has written."""
    functions = [getattr(interpreter, name) for name in _NAMES]
    patched = _patched(*functions)
    for function, inner in zip(patched, _patched(*(function.__wrapped__ for function in functions)), strict=True):
        function.__wrapped__ = inner  # which the interpreter's own functions call
    for name, function in zip(_NAMES, patched, strict=True):
        setattr(interpreter, name, function)
    try:
        with jax.sharding.use_abstract_mesh(CHIP), pltpu.force_tpu_interpret_mode():
            yield
    finally:
        for name, function in zip(_NAMES, functions, strict=True):
            setattr(interpreter, name, function)
