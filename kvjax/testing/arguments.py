# SPDX-License-Identifier: Apache-2.0
"""From a request to the arguments of its verb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState
from kvjax.testing.expected import Expected, pool_rows
from kvjax.testing.request import MAX_TOKENS, Fields

_MOST_BLOCKS = 4  # that one `offload` or `onboard` names
_WHOLE = ("fork", "truncate", "pin", "swap_out", "swap_in")  # for no row that has lost K/V


def arguments_of(request: Fields, state: CacheState, expected: Expected) -> dict[str, Any] | None:
    """The arguments but for the state; None if a request is empty (no row to extend, no pin).

    A "complete" takes the oldest moves that are not completed.
    """
    verb, spec = request["verb"], state.spec
    if verb in _WHOLE and expected.is_lost(request["src" if verb == "fork" else "seq"]):
        return None
    match verb:
        case "admit":
            return _admit(request, spec)
        case "extend":
            return _extend(request, expected)
        case "commit":
            return _commit(request, spec, expected)
        case "fork":
            return {"src": np.int32(request["src"]), "dst": np.int32(request["dst"])}
        case "truncate":
            row = expected.rows.get(request["seq"])
            length = (row.length if row else 1) - request["drop"]
            return {"seq": np.int32(request["seq"]), "length": np.int32(length)}
        case "release" | "swap_out" | "swap_in":
            return {"seq": np.int32(request["seq"])}
        case "evict":
            return {"blocks": np.array([request["block"]], np.int32)}
        case "pin":
            return _pin(request, state)
        case "unpin":
            return {"blocks": expected.pins[request["which"] % len(expected.pins)]} if expected.pins else None
        case "reset":
            return {}
        case "offload" | "onboard":
            return _cached_blocks(request, state, on_host=verb == "onboard")
        case "watermark":
            return {"empty": np.int32(request["empty"]), "most": _MOST_BLOCKS, "group": request["group"]}
        case "complete":
            return _complete(request, expected)
    raise ValueError(f"verb: got {verb!r}, wanted one of those of `random_requests`")


def _admit(request: Fields, spec: CacheSpec) -> dict[str, Any]:
    width = spec.max_length + 1
    tokens = _padded(request["tokens"], width)
    extra = _padded(request.get("extra_ids", []), width)
    return {
        "seq": np.int32(request["seq"]), "length": np.int32(len(request["tokens"])),
        "namespace": np.int32(request["namespace"]), **_text(spec, tokens, extra), **_tiers(request),
    }  # fmt: skip


def _text(spec: CacheSpec, tokens: np.ndarray, extra_ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": tokens, "extra_ids": extra_ids} if spec.extra_ids else {"tokens": tokens}


def _extend(request: Fields, expected: Expected) -> dict[str, Any] | None:
    grows = [seq for seq, row in expected.rows.items() if not row.swapped_out and not row.lost]
    counts = np.array([n if seq in grows else 0 for seq, n in enumerate(request["num_tokens"])], np.int32)
    if not counts.any():
        return None
    return {"active": counts > 0, "num_tokens": counts, "max_tokens": MAX_TOKENS, **_tiers(request)}


def _commit(request: Fields, spec: CacheSpec, expected: Expected) -> dict[str, Any] | None:
    new = expected.written(request)
    columns = [np.stack([_padded([item[i] for item in items], spec.max_length) for items in new]) for i in range(2)]
    counts = np.array([len(items) for items in new], np.int32)
    return {**_text(spec, *columns), "num_tokens": counts} if counts.any() else None


def _pin(request: Fields, state: CacheState) -> dict[str, Any]:
    """The findable ones of a row's first blocks."""
    table = np.asarray(state.groups[0].table)[min(request["seq"], state.spec.max_seqs - 1)]
    findable = (np.asarray(state.groups[0].blocks.fill)[table] > 0) & (table >= 0)
    return {"blocks": np.where(findable & (np.arange(len(table)) < request["num_blocks"]), table, NO_BLOCK)}


def _cached_blocks(request: Fields, state: CacheState, on_host: bool) -> dict[str, Any]:
    """Some of the first cached blocks of a tier."""
    group = jax.device_get(state.groups[request["group"]])
    in_tier = (pool_rows(group) >= len(group.empty)) == on_host
    blocks = np.flatnonzero(in_tier & (group.blocks.fill > 0) & (group.blocks.refcount == 0))[:_MOST_BLOCKS]
    chosen = [block for i, block in enumerate(blocks.tolist()) if request["which"] >> i & 1]
    padding = [NO_BLOCK] * (_MOST_BLOCKS - len(chosen))
    return {"blocks": np.array([*chosen, *padding], np.int32), "group": request["group"]}


def _complete(request: Fields, expected: Expected) -> dict[str, Any] | None:
    if not expected.moves:
        return None
    transfer, is_last = expected.moves.popleft()
    return {"transfer": transfer, "ok": np.bool_(request["ok"] or not is_last)}


def _tiers(request: Fields) -> dict[str, Any]:
    return {"tiers": ("device", "host")} if request.get("host") else {}


def _padded(values: Sequence[int], width: int) -> np.ndarray:
    return np.array([*values, *[0] * (width - len(values))], np.int32)
