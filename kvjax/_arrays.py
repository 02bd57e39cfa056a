# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters that skip NO_BLOCK, and the base class of pytrees. No other file uses jax's index modes."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

import pallas_kernels
from pallas_kernels.loops import while_loop

# A kernel handles a list of up to this many entries as fast as a shorter list. At 64 entries, the prefix sums take as
# long in a single kernel as in a cumulative sum.
FEW = 32
# On a GPU, up to this many entries are compared each with each in a kernel or two: a sort is a kernel between others.
PAIRS = 512
# The largest array that a single pass may write: its elements, and its entries along the first axis.
_SMALL = 4096
_ENTRIES = 1024


def pick[T](x: T, index: Any) -> T:
    """x[index] of an array, or of each array of a tree.

    `index` is i32[...], or a tuple of such arrays for the leading axes. An index out of range reads an arbitrary
    element, so mask the result.
    """
    is_row = not isinstance(index, tuple) and np.ndim(index) == 0 and not pallas_kernels.lowers_for("cuda")

    def read(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        array_index = _by_element(array, index)
        if is_row and array_index is index:
            return _row(array, index)
        return array.at[array_index].get(mode="clip", wrap_negative_indices=False)

    return jax.tree.map(read, x)


def _by_element(x: jax.Array, index: Any) -> Any:
    """On a TPU the index of every element of pairs x[..., 2], else `index`.

    To read or write whole pairs, XLA for TPUs copies the array into rows of 128 elements.
    """
    leading = index if isinstance(index, tuple) else (index,)
    if x.ndim != len(leading) + 1 or x.shape[-1] != 2 or not pallas_kernels.lowers_for("tpu"):
        return index
    return *(jnp.asarray(axis_index)[..., None] for axis_index in leading), np.arange(2, dtype=np.int32)


def _row(x: jax.Array, index: Any) -> jax.Array:
    """x[index] for an index i32[], as a gather.

    jax's own `dynamic_slice` might end up in the same fusion as a dynamic slice made by XLA. On a CPU, jaxlib 0.12
    gives both functions the same name, and the function then calls itself until the stack overflows.
    """
    dimensions = lax.GatherDimensionNumbers(tuple(range(x.ndim - 1)), (0,), (0,))
    return lax.gather(x, jnp.reshape(index, 1), dimensions, (1, *x.shape[1:]), mode=lax.GatherScatterMode.CLIP)


def put[T](x: T, index, values: Any, where: jax.Array, *, unique: bool = True) -> T:
    """Writes `values` at `index` where `where` holds, in place under donation.

    Args:
      x: the array to write into, or a tree of arrays.
      index: i32[K], or a tuple of them for the leading axes.
      values: a scalar or an array [K, ...] to write. For a tree, a tree of these.
      where: bool[K]; entries to write, all of them in range.
      unique: whether all written entries have different indices. If False, an arbitrary entry wins where indices
        repeat.
    """

    def write(array: jax.Array, value: Any) -> jax.Array:
        if _is_lone(array, where):
            return jnp.where(_at(array, index, where), _lone(array, value, where), array)
        entry_index, value = _entries(array, index, value, where)
        entry_index = _by_element(array, entry_index)
        return array.at[entry_index].set(value, mode="drop", wrap_negative_indices=False, unique_indices=unique)

    return jax.tree.map(write, x, values)


def add(x: jax.Array, index, values, where: jax.Array, *, unique: bool = True) -> jax.Array:
    """Adds `values` at `index` where `where` holds; see `put`."""
    if _is_lone(x, where):
        return jnp.where(_at(x, index, where), x + _lone(x, values, where), x)
    index, values = _entries(x, index, values, where)
    return x.at[index].add(values, mode="drop", wrap_negative_indices=False, unique_indices=unique)


def either[T](where: jax.Array, new: T, old: T) -> T:
    """Selects tree `new` if where bool[] holds, else `old`. A shared array is not copied."""
    return jax.tree.map(lambda n, o: n if n is o else jnp.where(where, n, o), new, old)


@jax.custom_batching.custom_vmap
def in_any(where: jax.Array) -> jax.Array:
    """bool[...]; `where`. Under `vmap`, whether it holds in any of the caches, the same answer for all of them."""
    return where


@in_any.def_vmap
def _in_any_of_a_batch(axis_size: int, in_batched: list[bool], where: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return in_any(jnp.any(where, axis=0) if in_batched[0] else where), False


def loop[T](going: Callable[[T], jax.Array], step: Callable[[T], T], start: T) -> T:
    """`while_loop` for a carry with an array of the pool's size.

    Under `vmap` the loop runs until all caches are done. With a condition for each cache, jax would select between the
    old and the new carry in each step, which copies N elements. So `step` also runs for caches where `going` no longer
    holds, and must not change them in a way that matters.
    """
    return while_loop(lambda carry: in_any(going(carry)), step, start)


def last_of_each(counts: jax.Array, ids: jax.Array, where: jax.Array, below: int = 0) -> tuple[jax.Array, jax.Array]:
    """Finds the last occurrence of each of ids i32[K], where bool[K]. An id may occur several times.

    Each occurrence writes a mark, its own negative number, into the counts i32[B], which were not negative before. The
    scatter takes the minimum, so the last occurrence writes the smallest number and reads its own number back. `below`,
    static, keeps these marks apart from the marks of other calls until they are overwritten. Returns the counts with
    marks (-1 - below - k for entry k), which the caller must overwrite, and bool[K], the last entry of each id.
    """
    mark = -1 - below - np.arange(ids.shape[0], dtype=np.int32)
    marked = counts.at[jnp.where(where, ids, counts.shape[0])].min(mark, mode="drop")
    return fence(marked, where & (pick(marked, ids) == mark))


def every(where: jax.Array) -> jax.Array:
    """bool[...]; whether all of bool[..., n] hold. On a GPU it is no reduction, which would be a kernel of its own."""
    if not pallas_kernels.lowers_for("cuda"):
        return jnp.all(where, axis=-1)
    return functools.reduce(jnp.logical_and, [where[..., column] for column in range(where.shape[-1])])


def some(where: jax.Array) -> jax.Array:
    """bool[...]; whether any of bool[..., n] holds, like `every`."""
    if not pallas_kernels.lowers_for("cuda"):
        return jnp.any(where, axis=-1)
    return functools.reduce(jnp.logical_or, [where[..., column] for column in range(where.shape[-1])])


def rank(where: jax.Array) -> jax.Array:
    """i32[K]; for each entry, the number of true entries before it."""
    return sum_before(where.astype(jnp.int32))


def sum_before(x: jax.Array) -> jax.Array:
    """i32[K]; for each entry of i32[K], the sum of the entries before it."""
    size = x.shape[0]
    if size > FEW:
        return jnp.cumsum(x, dtype=jnp.int32) - x
    entry = _numbers(size)
    earlier = entry[None] < entry[:, None]
    return jnp.sum(jnp.where(earlier, x[None], 0), axis=1, dtype=jnp.int32)  # one kernel; a cumulative sum is five


def ranked(where: jax.Array, *, small: bool = False, start: jax.Array | int = 0) -> tuple[jax.Array, jax.Array]:
    """i32[K]; for each entry, the number of true entries before it. Also returns i32[], `start` plus their number.

    On a CPU the last rank gives the total, because a sum would add a fusion or two. In a long list a sum is faster, and
    is used unless `small`, static, asks for a small program.
    """
    before = rank(where)
    if not where.size or (where.size > FEW and not small) or pallas_kernels.lowers_for("cuda"):
        return before, count_on(start, where)
    num_all = before[-1] + where[-1].astype(jnp.int32)
    return before, num_all if isinstance(start, int) and not start else start + num_all


def _numbers(size: int, first: int = 0) -> Any:
    """i32[size]; first, first + 1, ...

    On a CPU the numbers of a short list are a constant: if XLA computed them, they would be a fusion for each `first`,
    and a part of many other fusions. On a GPU they are computed where they are used, because a loop would copy a
    constant in each turn.
    """
    if size > _ENTRIES or pallas_kernels.lowers_for("cuda"):
        return first + jnp.arange(size, dtype=jnp.int32)
    return np.arange(first, first + size, dtype=np.int32)


def leading(where: jax.Array) -> jax.Array:
    """i32[...]; the number of leading true entries of bool[..., K]."""
    size = where.shape[-1]
    return jnp.min(jnp.where(where, size, np.arange(size, dtype=np.int32)), axis=-1, initial=size)


def count(where: jax.Array) -> jax.Array:
    """i32[]; the number of true entries."""
    return jnp.sum(where, dtype=jnp.int32)


def count_on(total: jax.Array | int, where: jax.Array) -> jax.Array:
    """i32[]; total i32[] plus the number of true entries of bool[K]. On a GPU it is one kernel, as part of the sum."""
    if isinstance(total, int) and not total:
        return count(where)
    if not where.size or not pallas_kernels.lowers_for("cuda"):
        return total + count(where)
    is_first = jnp.arange(where.size, dtype=jnp.int32) == 0
    return jnp.sum(where.reshape(-1).astype(jnp.int32) + jnp.where(is_first, total, 0), dtype=jnp.int32)


def compact(*lists: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Packs lists of ids i32[.], where -1 is a gap, into a list padded with -1. Also returns i32[], their number."""
    ids = jnp.concatenate(lists)
    present = ids >= 0
    return put(jnp.full_like(ids, -1), rank(present), ids, present), count(present)


def padded(x: jax.Array) -> jax.Array:
    """On a CPU, pads an array with zeros to FEW entries if it has fewer, since equal shapes are compiled only once."""
    if x.shape[0] >= FEW or pallas_kernels.lowers_for("cuda"):
        return x
    return jnp.pad(x, [(0, FEW - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def repeated(ids: jax.Array) -> jax.Array:
    """bool[K]; whether each of ids i32[K] occurs more than once."""
    order = jnp.argsort(ids).astype(jnp.int32)
    ordered = ids[order]
    same = ordered[1:] == ordered[:-1]
    same = (jnp.pad(same, (1, 0)) | jnp.pad(same, (0, 1)))[: ids.shape[0]]
    return put(jnp.zeros(ids.shape, jnp.bool_), order, True, same)


def is_among(size: int, ids: jax.Array, where: jax.Array) -> jax.Array:
    """bool[size]; whether each number is among ids i32[K] with where bool[K]. An id may occur several times."""
    return put(jnp.zeros((size,), jnp.bool_), ids, True, where, unique=False)


def fence(tree, *reads):
    """Returns its arguments, and makes XLA finish `reads` before it writes into the arrays of `tree`.

    Without a fence XLA may keep an array's old contents for a later reader, which copies N elements in every step.
    """
    return lax.optimization_barrier((tree, *reads))


def once[T](where: jax.Array, do: Callable[[T], T], carry: T) -> T:
    """do(carry) if where bool[] holds, else `carry`: a loop of at most one turn, since XLA copies pools at a branch."""
    return while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(where), do(c[1])), (where, carry))[1]


def skip_unless[T](where: Callable[[], jax.Array], do: Callable[[T], T], carry: T, scope: str = "seldom") -> T:
    """do(carry), which must equal `carry` unless where() bool[] holds. On a GPU a loop of at most one turn skips `do`.

    A GPU pays for each kernel, even if it writes nothing, and in a command buffer the device itself decides to skip.
    On a CPU `do` costs less than a loop, and `where` is not called. `scope` names the kernels of `do`: "seldom", if
    most calls skip them.
    """
    if not pallas_kernels.lowers_for("cuda"):
        return do(carry)
    with jax.named_scope(scope):
        start = where(), jax.tree.map(jnp.asarray, carry)
        return loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), do(c[1])), start)[1]


def runs(first: jax.Array, width: int) -> jax.Array:
    """i32[R, width]; first, first + 1, ... for each of first i32[R]."""
    return first[:, None] + np.arange(width, dtype=np.int32)[None]


def _is_lone(x: jax.Array, where: jax.Array) -> bool:
    """Whether a single entry is written into a small array. A select then takes one kernel, a scatter three.

    With 2,048 entries a select is slower than a scatter when caches are vmapped, by a fifth of an admission.
    """
    return where.size == 1 and x.size <= _SMALL and x.shape[0] <= _ENTRIES


def _at(x: jax.Array, index: Any, where: jax.Array) -> jax.Array:
    """bool, broadcasts to the shape of x; true at the index of the single entry, if its `where` holds."""
    index = index if isinstance(index, tuple) else (index,)
    matches = jnp.reshape(where, [1] * x.ndim)
    for axis, position in enumerate(index):
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        matches = matches & (lax.broadcasted_iota(jnp.int32, shape, axis) == jnp.reshape(position, [1] * x.ndim))
    return matches


def _lone(x: jax.Array, values: Any, where: jax.Array) -> jax.Array:
    """Reshapes the value of a single entry to broadcast to the shape of x."""
    values = jnp.asarray(values, x.dtype)
    inner = values.shape[where.ndim :] if values.ndim > where.ndim else ()
    return jnp.reshape(values, [1] * (x.ndim - len(inner)) + list(inner))


def _entries(x: jax.Array, index, values, where: jax.Array):
    """The index and values of a scatter without the entries where `where` is False.

    Each dropped entry gets an index of its own beyond the end, so XLA may assume uniqueness. A lone entry gets a
    dropped entry as its neighbour: XLA's CPU backend (seen in jax 0.11 and 0.12) turns a scatter of a single entry into
    a dynamic-update-slice, and some fusions of these into an endless kernel.
    """
    index = index if isinstance(index, tuple) else (index,)
    if where.size == 1:
        values = jnp.asarray(values)
        inner = values.shape[where.ndim :] if values.ndim > where.ndim else ()
        index = tuple(jnp.broadcast_to(jnp.reshape(i, ()), (2,)) for i in index)
        values = jnp.broadcast_to(jnp.reshape(values, inner), (2, *inner))
        where = jnp.array([jnp.reshape(where, ()), False])
    beyond = _numbers(where.size, x.shape[0]).reshape(where.shape)
    return (jnp.where(where, index[0], beyond), *index[1:]), values


def mix(x: jax.Array) -> jax.Array:
    """Mixes u32 words bijectively, each input bit into each output bit. Source: MurmurHash3's finaliser."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def alive(tree: Any) -> bool:
    """Whether no array of the tree has been donated."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    return not any(x.is_deleted() for x in arrays)


def unreadable(tree: Any) -> str:
    """The reason why the arrays of a tree cannot be read, or ""."""
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


def described(tree: Any) -> Any:
    """The tree with the dtype and shape of each array as text."""

    def of_leaf(leaf: Any) -> str:
        is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        return f"{leaf.dtype}{list(leaf.shape)}" if is_array else repr(leaf)

    return jax.tree.map(of_leaf, tree)


@typing.dataclass_transform(frozen_default=True)
class Pytree:
    """Makes each subclass a frozen dataclass and a pytree. `static` fields are part of its structure."""

    def __init_subclass__(cls, static: tuple[str, ...] = ()) -> None:
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        fields = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        jax.tree_util.register_dataclass(cls, [name for name in fields if name not in static], list(static))

    def _contents(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # pyright: ignore[reportArgumentType]

    # Defined once here: a dataclass would compile both for each class, a tenth of the time of importing the library.
    def __eq__(self, other: object) -> bool:
        return self._contents() == other._contents() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._contents())

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with new contents in some fields."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]
