# SPDX-License-Identifier: Apache-2.0
"""What every verb does at its edges: checks its arguments while tracing, and assembles its events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import pick
from kvjax.events import Events, Status
from kvjax.policies import EvictionPolicy, lru
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


def on_state[F: Callable[..., Any]](verb: F) -> F:
    """A function of a state that says so where it gets something else, such as the `Cache` around one."""

    @functools.wraps(verb)
    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, CacheState):
            return verb(state, *args, **kwargs)
        kind, name, wanted = type(state).__name__, verb.__name__, "a CacheState, such as kvjax.init makes"
        if isinstance(getattr(state, "state", None), CacheState):
            method = f", or the method cache.{name}" if hasattr(state, name) else ""
            wanted = f"its state: cache.state{method}"
        raise ValueError(f"state: got a {kind}, wanted {wanted}")

    return cast(F, call)


def known_policy(policy: EvictionPolicy | None) -> EvictionPolicy:
    """The policy, `lru()` for None."""
    if policy is None or isinstance(policy, EvictionPolicy):
        return lru() if policy is None else policy
    name = getattr(policy, "__name__", None)
    if callable(policy) and name:
        raise ValueError(
            f"policy: got the function {name}, wanted a policy: what {name}() returns, or by_score({name})"
        )
    raise ValueError(f"policy: got {policy!r}, wanted an EvictionPolicy, such as kvjax.lru()")


def _array(name: str, value: Any, wanted: str) -> jax.Array:
    """`value` as an array; text, ragged lists and the like are a ValueError that names it."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        if name == "namespace":
            wanted += "; kvjax.Namespaces numbers salts and LoRAs"
        raise ValueError(f"{name}: got {value!r:.80}, wanted {wanted}") from error


def integers(name: str, value: Any, shape: tuple[int | str, ...] | None = None) -> jax.Array:
    """`value` as i32 of the wanted shape (a string stands for any size), or a ValueError that names it."""
    if isinstance(value, np.ndarray | np.integer) and value.size and np.issubdtype(value.dtype, np.integer):
        low, high = int(np.min(value)), int(np.max(value))
        if low < -(2**31) or high >= 2**31:  # jax would cut them short, and token 2**32 + 5 become token 5
            raise ValueError(f"{name}: got numbers from {low} to {high}, wanted 32-bit integers")
    array = _array(name, value, "integers")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted integers")
    if shape is not None and (
        array.ndim != len(shape) or any(isinstance(w, int) and w != g for g, w in zip(array.shape, shape, strict=True))
    ):
        raise ValueError(f"{name}: got shape {list(array.shape)}, wanted [{', '.join(map(str, shape))}]")
    return array.astype(jnp.int32)


def one_or_more(name: str, value: Any) -> jax.Array:
    """`value` as i32[] or i32[R]."""
    array = integers(name, value)
    return array if array.ndim == 0 else integers(name, array, ("R",))


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
    array = _array(name, value, f"bool[{rows}]")
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
    real = jnp.arange(width, dtype=jnp.int32) < length
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


def one_after_the_other(verb: Callable[..., Any], state: CacheState, *rows: jax.Array) -> tuple[CacheState, Events]:
    """A verb on one row, on several: `rows` are its arguments i32[R]."""
    state, events = lax.scan(lambda state, row: verb(state, *row), state, rows)
    return state, flatten_rows(events)


def flatten_rows(events: Events) -> Events:
    """Events of rows that were done one after the other, stacked by `scan`, as those of one transition."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else jnp.sum(x, dtype=x.dtype), events)
