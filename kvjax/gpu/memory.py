# SPDX-License-Identifier: Apache-2.0
"""A kernel's arrays, and the barriers at which its threads wait for each other.

A kernel is a program of at least a warp. A value in it is a tensor with an entry for each lane. Warps do not run in
lockstep, so a warp may load an entry stored by another warp only after a barrier that both have reached. `Memory` adds
a barrier wherever an array would otherwise be loaded and stored, or stored twice, without a barrier in between.
tests/unit/gpu/races.py verifies the kernels independently of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.state import CacheState, Text

TEXT = ("tokens", "extra_ids")
_LINKS = ("next", "prev")
_RING = ("order", "stamp", "head", "tail")
_SEQS = ("length", "committed", "namespace")
_GROUP = ("empty", "num_empty", "num_cached", "table")
WARP = 32  # threads
LANES_PER_THREAD = 16  # of a tile that a thread can hold in registers next to everything else


class Memory:
    """The arrays of a kernel by name. `warps`, static, is the number of its warps."""

    def __init__(self, refs: Mapping[str, Any], warps: int, interpret: bool):
        self.warps = warps
        self._refs = refs
        self._interpret = interpret
        self._loaded = set[str]()  # since the last barrier
        self._stored = set[str]()  # since the last barrier

    def __contains__(self, name: str) -> bool:
        return name in self._refs

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of array `name`."""
        return self._refs[name].shape

    def tile(self, lanes: int) -> int:
        """The number of columns of a tile with `lanes` rows: a power of two."""
        return max(self.warps * WARP * LANES_PER_THREAD // lanes, 1)

    def pick(self, name: str, index: Any, where: jax.Array | None = None) -> jax.Array:
        """Loads x[index] of array `name` where bool[...] holds, and 0 elsewhere. Used indices must be in range.

        The index is i32[...], or a tuple of such arrays for all axes, which are broadcast.
        """
        if name in self._stored:
            self._barrier()
        self._loaded.add(name)
        index = _each_axis(index)
        if where is None:
            return plt.load(self._refs[name].at[index])
        return plt.load(self._refs[name].at[index], mask=where, other=np.zeros((), self._refs[name].dtype))

    def put(self, name: str, index: Any, values: Any, where: jax.Array | None = None) -> None:
        """Writes `values` at `index` where bool[...] holds, as in `pick`. Equal indices must have equal values."""
        if name in self._loaded | self._stored:
            self._barrier()
        self._stored.add(name)
        ref = self._refs[name]
        (first, *others) = _each_axis(index)
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in (first, *others)))
        values = jnp.broadcast_to(jnp.asarray(values, ref.dtype), shape)
        if where is None:
            plt.store(ref.at[(first, *others)], values)
        else:  # outside of a mask the interpreter stores an old value: beyond the end it is dropped
            first = jnp.broadcast_to(first, shape)
            where = jnp.broadcast_to(where, shape)
            plt.store(ref.at[(jnp.where(where, first, ref.shape[0]), *others)], values, mask=where)

    def number(self, name: str) -> jax.Array:
        """Loads the only element of array `name`."""
        return self.pick(name, 0)

    def set_number(self, name: str, value: jax.Array) -> None:
        """Writes the only element of array `name`."""
        self.put(name, 0, value)

    def loop[T](self, going: Callable[[T], jax.Array], step: Callable[[T], T], start: T, *, barrier: bool = True) -> T:
        """Runs `while_loop` for a step with stores. For a step that only loads, use a loop of `lax` after `settle`.

        `barrier`, static, is whether a barrier has to separate consecutive steps.
        """
        before = self._loaded.copy(), self._stored.copy()

        def run(carry: T) -> T:
            if barrier:
                self._barrier()
            return step(carry)

        end = lax.while_loop(going, run, start)
        self._since(before)
        return end

    def when[T](self, where: jax.Array, do: Callable[[], T], otherwise: T = None) -> T:
        """Returns the result of `do` if where bool[] holds. Otherwise returns `otherwise`, without a call of `do`."""
        before = self._loaded.copy(), self._stored.copy()
        result = lax.cond(where, do, lambda: otherwise)
        self._since(before)
        return result

    def settle(self, *names: str) -> None:
        """Prepares the arrays for loads in a loop of `lax`."""
        if self._stored & set(names):
            self._barrier()

    def _since(self, before: tuple[set[str], set[str]]) -> None:
        """Restores the accesses from before a part that may be skipped, because its barriers may be skipped too."""
        self._loaded |= before[0]
        self._stored |= before[1]

    def _barrier(self) -> None:
        self._loaded = set()
        self._stored = set()
        if not self._interpret:  # the interpreter runs lanes in step
            plt.debug_barrier()


def _each_axis(index: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in (index if isinstance(index, tuple) else (index,)))


def run(
    kernel: Callable[[Memory], None],
    name: str,
    *,
    lanes: int,
    reads: Mapping[str, jax.Array],
    changes: Mapping[str, jax.Array],
    makes: Mapping[str, Sequence[int]],
    interpret: bool,
) -> dict[str, jax.Array]:
    """Runs a kernel as a single program, or, with `interpret`, as plain jax anywhere. `name` appears in profiles.

    Most of its tensors have `lanes` entries. It only reads `reads`, and changes `changes`, in place if they are
    donated. `makes` are shapes of further i32 arrays with undefined contents, for results or for values to exchange
    between lanes. Returns the arrays of `changes` and `makes` afterwards.
    """
    warps = min(max(lanes // WARP, 1), 8)
    changed = {key: value.reshape(value.shape or 1) for key, value in changes.items()}
    out_shape = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in changed.values()]
    out_shape += [jax.ShapeDtypeStruct(tuple(shape), jnp.int32) for shape in makes.values()]

    def body(*refs: Any) -> None:
        inputs = refs[: len(reads)]
        outputs = refs[len(reads) + len(changed) :]  # a changed array is only an output
        kernel(Memory(dict(zip([*reads, *changed, *makes], [*inputs, *outputs], strict=True)), warps, interpret))

    outputs = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(1,),
        input_output_aliases={len(reads) + i: i for i in range(len(changed))},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*reads.values(), *changed.values())
    arrays = dict(zip([*changed, *makes], outputs, strict=True))
    return {key: value.reshape(changes[key].shape) if key in changes else value for key, value in arrays.items()}


def arrays_of(state: CacheState, names: Sequence[str]) -> dict[str, jax.Array]:
    """The named arrays of a state with a single group and the policy `lru()`, without missing extra ids."""
    (group,) = state.groups
    all_arrays = vars(group.blocks) | group.blocks.text.parts() | vars(group.links) | group.policy._asdict()
    all_arrays |= {name: getattr(group, name) for name in _GROUP} | {name: getattr(state.seqs, name) for name in _SEQS}
    return {name: all_arrays[name] for name in names if name in all_arrays}


def with_arrays(state: CacheState, arrays: Mapping[str, jax.Array]) -> CacheState:
    """Replaces arrays of the state by the arrays of these names. The inverse of `arrays_of`."""
    (group,) = state.groups
    blocks = state.groups[0].blocks

    def changed(home: Mapping[str, object] | Sequence[str]) -> dict[str, jax.Array]:
        return {name: arrays[name] for name in home if name in arrays}

    text = Text(**{"extra_ids": None, **blocks.text.parts(), **changed(TEXT)})
    blocks = blocks.replace(text=text, **changed(vars(blocks)))
    group = group.replace(
        blocks=blocks,
        links=group.links.replace(**changed(_LINKS)),
        policy=group.policy._replace(**changed(_RING)),
        **changed(_GROUP),
    )
    return state.replace(groups=(group,), seqs=state.seqs.replace(**changed(_SEQS)))
