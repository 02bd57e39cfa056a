# SPDX-License-Identifier: Apache-2.0
"""`admit` gives a row a prompt and its cached prefix; `lookup` only looks."""

from __future__ import annotations

from jax import lax
from jax.typing import ArrayLike

from kvjax._checks import each_row, integers, on_state, static_int
from kvjax.events.records import Events
from kvjax.policies.retention import Retention
from kvjax.state import CacheState, Match
from kvjax.verbs._admission import admit_row, find, let_go
from kvjax.verbs._request import flatten_rows, known_text, known_tiers, prompt


@on_state
def admit(
    state: CacheState,
    seq: ArrayLike,
    tokens: ArrayLike,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    retention: Retention | None = None,
    now: ArrayLike = 0,
    reserve_tokens: int | None = None,
    tiers: tuple[str, ...] = ("device",),
) -> tuple[CacheState, Events]:
    """Gives a free row a prompt: finds its longest cached prefix, holds it, and reserves blocks for the rest.

    Whole blocks are shared; inside the next block reuse goes on token by token, by a copy. The last token is never
    taken from the cache: its logits are wanted. Nothing becomes findable before `commit`. Several sequences at once
    (a leading axis R) equal one after the other in row order, each all or nothing, with one difference: the source of
    a copy stays held until the call ends. A later row that needs its space is NO_BLOCKS; admit it by another call.

    Args:
      state: the cache.
      seq: i32[] or i32[R]; a free row.
      tokens: i32[T] or i32[R, T]; the prompt, padded with anything.
      length: i32[] or i32[R]; its tokens, 1..T.
      namespace: i32[] or i32[R]; see `Namespaces`.
      extra_ids: as tokens, where the spec asks for them.
      retention: priorities and times to live of the row's blocks, where the spec has it (with R rows its arrays have
        that axis too); found blocks in its ranges get the new priority, an updated event if it differs.
      now: i32[] ms.
      reserve_tokens: static; reserve blocks for only this many tokens beyond the cached ones (chunked prefill); None:
        for all.
      tiers: static; ("device", "host") between loops: then blocks on the host are found too and brought back, and
        blocks that have to leave the device are offloaded, as `events.transfer` says.

    Returns:
      The cache; and events, E = ceil(T / P) + 1 a row and group (more with retention or with both tiers): removed,
      updated, copied. `events.cached` is the number of tokens found, where the row's `committed` starts. Status
      BAD_REQUEST, HELD (row in use), ROW_FULL or NO_BLOCKS.

    Source: vLLM's KVCacheManager (get_computed_blocks, allocate_slots); partial blocks as in TensorRT-LLM.
    """
    seq, tokens = integers("seq", seq), integers("tokens", tokens)
    text, now = known_text(state.spec, tokens, extra_ids), integers("now", now, ())
    tiers = known_tiers(tiers)
    if reserve_tokens is not None:
        reserve_tokens = static_int("reserve_tokens", reserve_tokens, 1)

    def one(state, request):
        seq, text, length, namespace, retention = request
        ask = prompt(text, length, namespace, state.spec.block_size)
        match = find(state, ask, tiers)
        state, events, sources = admit_row(state, seq, ask, match, retention, now, reserve_tokens, tiers)
        return state, (events, sources)

    rows = seq.shape if seq.ndim == 0 else integers("seq", seq, ("R",)).shape
    length, namespace = each_row("length", length, rows), each_row("namespace", namespace, rows)
    if retention is not None and not state.spec.retention:
        raise ValueError("retention: got one, wanted None (the spec was made with retention=False)")
    integers("tokens", tokens, (*rows, "T"))
    requests = (seq, text, length, namespace, retention)
    state, (events, sources) = lax.scan(one, state, requests) if rows else one(state, requests)
    return let_go(state, sources), flatten_rows(events) if rows else events


@on_state
def lookup(
    state: CacheState,
    tokens: ArrayLike,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    extra_ids: ArrayLike | None = None,
    tiers: tuple[str, ...] = ("device", "host"),
) -> Match:
    """Tells what `admit` would reuse of a prompt, without changing anything; `vmap` it for many.

    Args:
      state: the cache.
      tokens: i32[T]; the prompt, padded with anything.
      length: i32[]; its tokens, 1..T; otherwise nothing matches.
      namespace: i32[].
      extra_ids: i32[T], where the spec asks for them.
      tiers: static; as in `admit`.

    Returns:
      A `Match`; `match.cached_tokens` is the sum over the tiers.
    """
    tokens = integers("tokens", tokens, ("T",))
    ask = prompt(known_text(state.spec, tokens, extra_ids), length, namespace, state.spec.block_size)
    return find(state, ask, known_tiers(tiers))
