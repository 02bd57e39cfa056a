# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of every verb: checks of its arguments against the spec, and its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import either, pick
from kvjax.blocks.publish import forget_all
from kvjax.blocks.rows import Prompt
from kvjax.blocks.victims import Taken
from kvjax.checks import integers, static_int32
from kvjax.events.records import Events, Records, Status, joined, no_records
from kvjax.events.transfer import Transfer
from kvjax.policies.ring import lru
from kvjax.spec import CacheSpec
from kvjax.state import CacheState, EvictionPolicy, Group, Text
from pallas_kernels.loops import scan


def checked_policy(policy: EvictionPolicy | None) -> EvictionPolicy:
    """Returns the policy, or `lru()` for None."""
    if policy is None:
        return lru()
    if isinstance(policy, EvictionPolicy):
        for field in ("init", "touch", "victims", *(() if policy.forget is None else ("forget",))):
            if not callable(function := getattr(policy, field)):
                raise ValueError(f"policy.{field}: got {function!r:.80}, wanted a function")
        return policy
    name = getattr(policy, "__name__", None)
    if callable(policy) and name:
        raise ValueError(
            f"policy: got the function {name}, wanted a policy: what {name}() returns, or by_score({name})"
        )
    raise ValueError(f"policy: got {policy!r}, wanted an EvictionPolicy, such as kvjax.lru()")


TIERS = (("device",), ("device", "host"))


def checked_tiers(tiers: Any) -> tuple[str, ...]:
    """Returns `tiers`, which must be a tuple of `TIERS`."""
    if tiers not in TIERS:
        raise ValueError(f"tiers: got {tiers!r}, wanted one of {TIERS}")
    return tiers


def checked_alignment(alignment_tokens: Any, block_size: int) -> int | None:
    """Returns `alignment_tokens` as an int, a multiple of the block size, or None."""
    if alignment_tokens is None:
        return None
    tokens = static_int32("alignment_tokens", alignment_tokens, 1)
    if tokens % block_size:
        raise ValueError(f"alignment_tokens: got {tokens}, wanted a multiple of the block size, {block_size}")
    return tokens


def check_retention(spec: CacheSpec, **given: Any) -> None:
    """Raises a ValueError if an argument is given (not None) for a spec without retention."""
    for name in [name for name, value in given.items() if value is not None and not spec.retention]:
        raise ValueError(f"{name}: got a value, wanted None (the spec was made with retention=False)")


def checked_text(spec: CacheSpec, tokens: jax.Array, extra_ids: Any) -> Text:
    """Pairs the tokens with extra ids (zeros by default) if the spec has them."""
    if not spec.extra_ids and extra_ids is not None:
        raise ValueError("extra_ids: got an array, wanted None (the spec was made with extra_ids=False)")
    if spec.extra_ids:
        extra_ids = jnp.zeros_like(tokens) if extra_ids is None else integers("extra_ids", extra_ids, tokens.shape)
    return Text(tokens, extra_ids)


def checked_prompt(text: Text, length: Any, namespace: Any, block_size: int) -> Prompt:
    """Checks a prompt i32[T] and cuts it into blocks of `block_size` tokens."""
    tokens = text.tokens
    width = text.tokens.shape[0]
    if width == 0:
        raise ValueError("tokens: got shape [0], wanted room for at least one token")
    length = integers("length", length, ())
    namespace = integers("namespace", namespace, ())
    in_prompt = jnp.arange(width, dtype=jnp.int32) < length
    valid = (length >= 1) & (length <= width) & (namespace >= 0) & ~jnp.any(in_prompt & (tokens < 0))
    tail = (0, -width % block_size)
    return Prompt(jax.tree.map(lambda x: jnp.pad(x, tail).reshape(-1, block_size), text), length, namespace, valid)


def first_failure(*causes: tuple[jax.Array, Status]) -> jax.Array:
    """i32[...]; the status of the first cause to hold, or OK."""
    status = jnp.full(causes[0][0].shape, Status.OK, jnp.int32)
    for cause, code in reversed(causes):
        status = jnp.where(cause, jnp.int32(code), status)
    return status


def assemble(
    state: CacheState,
    status: jax.Array,
    *,
    removed: Sequence[Records] = (),
    updated: Sequence[Records] = (),
    stored: Sequence[Records] = (),
    copied: Sequence[Records] = (),
    cleared: Sequence[Records] = (),
    queried: jax.Array | int = 0,
    cached: jax.Array | int = 0,
    unusable: jax.Array | int = 0,
    shortfall: jax.Array | int = 0,
    moves: Sequence[Transfer] = (),
) -> Events:
    """Joins the records of a transition in the order of the arguments.

    `stored` has one list a group. The events have the contents of these blocks.
    """
    status = jnp.atleast_1d(status)
    before = [*removed, *updated]
    after = [*copied, *cleared]
    ids = [group.group0_blocks(records.block) for records, group in zip(stored, state.groups, strict=False)]

    def contents(array: jax.Array) -> jax.Array:
        heights = [sum(part.block.size for part in parts) for parts in (before, after)]
        head, tail = (jnp.zeros((height, state.spec.block_size), jnp.int32) for height in heights)
        return jnp.concatenate([head, *(pick(array, blocks) for blocks in ids), tail])

    def per_row(value: jax.Array | int) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), status.shape)

    return Events(
        records=joined(no_records(), *before, *stored, *after).records,
        text=jax.tree.map(contents, state.groups[0].blocks.text),
        status=status,
        queried=per_row(queried),
        cached=per_row(cached),
        shortfall=jnp.asarray(shortfall, jnp.int32),
        transfer=Transfer(jnp.concatenate([m.records for m in moves])) if any(m.block.size for m in moves) else None,
        unusable=per_row(unusable) if state.spec.has_recurrent else None,
    )


def scan_rows(verb: Callable[..., Any], state: CacheState, *rows: jax.Array) -> tuple[CacheState, Events]:
    """Applies a verb of a single row to several rows in order; `rows` are its arguments i32[R]."""
    state, events = scan(lambda state, row: verb(state, *row), state, rows)
    return state, flatten_rows(events)


def flatten_rows(events: Events) -> Events:
    """Joins the events stacked by `scan`, row by row, into the events of one transition."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else jnp.sum(x, dtype=x.dtype), events)


def all_or_nothing(
    before: CacheState, after: CacheState, ok: jax.Array, *reports: list[Any]
) -> tuple[CacheState, *tuple[list[Any], ...]]:
    """Selects the state after and its reports (lists of records or of moves) if ok bool[], else the state before.

    A group that fails changes nothing, but groups before it may have changed. This can happen only with several groups
    and a host tier, because then fewer blocks can leave than are cached. Only such a cache pays for the selection, with
    a pass over the state.
    """
    if not before.spec.has_host or len(before.groups) == 1:
        return after, *reports
    return either(ok, after, before), *([part.only(ok) for part in parts] for parts in reports)


def put_taken(state: CacheState, group_index: int, taken: Taken) -> tuple[CacheState, list[Records]]:
    """Puts a group back into the state after blocks of it were taken. Also returns records, removed, of all groups."""
    return forget_all(replace_group(state, group_index, taken.group), group_index, taken.removed)


def conclude(
    before: CacheState, after: CacheState, status: jax.Array, taken: Sequence[Taken], removed: Sequence[Records]
) -> tuple[CacheState, Events]:
    """Returns the new state, with the events of the taken blocks, if status i32[] is OK, and else the old state."""
    ok = status == Status.OK
    state = either(ok, after, before)
    return state, assemble(
        state,
        status,
        removed=[records.only(ok) for records in removed],
        updated=[result.updated.only(ok) for result in taken],
        moves=[result.orders.only(ok) for result in taken],
    )


def checked_group(state: CacheState, group: int) -> Group:
    """Returns the group with index `group`, or raises a ValueError."""
    if not isinstance(group, int | np.integer) or not 0 <= group < len(state.groups):
        raise ValueError(f"group: got {group!r}, wanted 0..{len(state.groups) - 1}")
    return state.groups[int(group)]


def replace_group(state: CacheState, group_index: int, group: Group) -> CacheState:
    """Returns the state with another group at this index."""
    groups = (*state.groups[:group_index], group, *state.groups[group_index + 1 :])
    return state.replace(groups=groups)
