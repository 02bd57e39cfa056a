# SPDX-License-Identifier: Apache-2.0
"""What every verb does at its edges: checks its arguments while tracing, and assembles its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import pick
from kvjax.events import Events, Status
from kvjax.spec import CacheSpec
from kvjax.state import CacheState
from kvjax.transfer import Transfer


class Prompt(NamedTuple):
    """A checked prompt: tokens and extra ids in blocks i32[F, P], length i32[], and whether its values are in range."""

    tokens: jax.Array
    extra_ids: jax.Array | None
    length: jax.Array
    namespace: jax.Array
    valid: jax.Array


def integers(name: str, value: Any, shape: tuple[int | str, ...] | None = None) -> jax.Array:
    """`value` as i32 of the wanted shape (a string stands for any size), or a ValueError that names it."""
    if isinstance(value, np.ndarray | np.integer) and value.size and np.issubdtype(value.dtype, np.integer):
        low, high = int(np.min(value)), int(np.max(value))
        if low < -(2**31) or high >= 2**31:  # jax would cut them short, and token 2**32 + 5 become token 5
            raise ValueError(f"{name}: got numbers from {low} to {high}, wanted 32-bit integers")
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted integers")
    if shape is not None and (
        array.ndim != len(shape) or any(isinstance(w, int) and w != g for g, w in zip(array.shape, shape, strict=True))
    ):
        raise ValueError(f"{name}: got shape {list(array.shape)}, wanted [{', '.join(map(str, shape))}]")
    return array.astype(jnp.int32)


def each_row(name: str, value: Any, rows: tuple[int, ...]) -> jax.Array:
    """`value` as i32 of shape `rows`; one number stands for all rows."""
    array = integers(name, value)
    return jnp.broadcast_to(array, rows) if array.ndim == 0 else integers(name, array, rows)


def static_int(name: str, value: Any, least: int) -> int:
    """`value` as a Python int of at least `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: got {value!r}, wanted an int of at least {least}")
    return int(value)


TIERS = (("device",), ("device", "host"))


def known_tiers(tiers: Any) -> tuple[str, ...]:
    """`tiers` as one of the tuples that a verb can take."""
    if tiers not in TIERS:
        raise ValueError(f"tiers: got {tiers!r}, wanted one of {TIERS}")
    return tiers


def row_mask(name: str, value: Any, rows: int) -> jax.Array:
    """`value` as bool[rows]."""
    array = jnp.asarray(value)
    if array.dtype != jnp.bool_ or array.shape != (rows,):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, wanted bool[{rows}]")
    return array


def extra_like(spec: CacheSpec, extra_ids: Any, tokens: jax.Array) -> jax.Array | None:
    """The extra ids of `tokens`: given exactly where the spec asks for them (absent ones are zeros)."""
    if not spec.extra_ids:
        if extra_ids is not None:
            raise ValueError("extra_ids: got an array, wanted None (the spec was made with extra_ids=False)")
        return None
    if extra_ids is None:
        return jnp.zeros_like(tokens)
    return integers("extra_ids", extra_ids, tokens.shape)


def prompt(spec: CacheSpec, tokens: jax.Array, length: Any, namespace: Any, extra_ids: jax.Array | None) -> Prompt:
    """Checks one prompt i32[T] and cuts it into blocks."""
    size, width = spec.block_size, tokens.shape[0]
    if width == 0:
        raise ValueError("tokens: got shape [0], wanted room for at least one token")
    length, namespace = integers("length", length, ()), integers("namespace", namespace, ())
    real = jnp.arange(width) < length
    valid = (length >= 1) & (length <= width) & (namespace >= 0) & ~jnp.any(real & (tokens < 0))
    tail = (0, -width % size)
    return Prompt(
        tokens=jnp.pad(tokens, tail).reshape(-1, size),
        extra_ids=None if extra_ids is None else jnp.pad(extra_ids, tail).reshape(-1, size),
        length=length,
        namespace=namespace,
        valid=valid,
    )


def first_failure(*causes: tuple[jax.Array, Status]) -> jax.Array:
    """i32[...]; the status of the first cause that holds, else OK."""
    status = jnp.full(causes[0][0].shape, Status.OK, jnp.int32)
    for cause, code in reversed(causes):
        status = jnp.where(cause, jnp.int32(code), status)
    return status


def assemble(
    state: CacheState,
    status: jax.Array,
    *,
    removed: Sequence[jax.Array] = (),
    updated: Sequence[jax.Array] = (),
    stored: Sequence[jax.Array] = (),
    copied: Sequence[jax.Array] = (),
    other: Sequence[jax.Array] = (),
    queried: jax.Array | int = 0,
    cached: jax.Array | int = 0,
    shortfall: jax.Array | int = 0,
    moves: Sequence[jax.Array] = (),
) -> Events:
    """Puts a transition's records i32[., 9] together in their order; stored ones, one a group, with their contents."""
    status = jnp.atleast_1d(status)
    blocks = state.groups[0].blocks
    before, after = [*removed, *updated], [*copied, *other]
    ids = [
        r[:, 2] if group.anchor is None else pick(group.anchor, r[:, 2])
        for r, group in zip(stored, state.groups, strict=False)
    ]

    def contents(of: jax.Array) -> jax.Array:
        parts = [jnp.zeros((sum(map(len, before)), state.spec.block_size), jnp.int32), *(pick(of, i) for i in ids)]
        return jnp.concatenate([*parts, jnp.zeros((sum(map(len, after)), state.spec.block_size), jnp.int32)])

    return Events(
        records=jnp.concatenate([jnp.zeros((0, 9), jnp.int32), *before, *stored, *after]),
        tokens=contents(blocks.tokens),
        extra_ids=None if blocks.extra_ids is None else contents(blocks.extra_ids),
        status=status,
        queried=jnp.broadcast_to(jnp.asarray(queried, jnp.int32), status.shape),
        cached=jnp.broadcast_to(jnp.asarray(cached, jnp.int32), status.shape),
        shortfall=jnp.asarray(shortfall, jnp.int32),
        transfer=Transfer(jnp.concatenate(moves)) if any(m.size for m in moves) else None,
    )


def flatten_rows(events: Events) -> Events:
    """Events of rows that were done one after the other, stacked by `scan`, as those of one transition."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else jnp.sum(x, dtype=x.dtype), events)
