# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for requests, a kind at a time. Only `requests`, which joins them, imports this module."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis.internal.conjecture import engine
from hypothesis.strategies import SearchStrategy

from kvjax.spec import CacheSpec
from kvjax.testing.expected import MAX_TOKENS, Fields


def limit_shrinking(seconds: float) -> None:
    """Sets the time that Hypothesis may take to shrink a failing example."""
    engine.MAX_SHRINKING_SECONDS = seconds  # read when an example has failed; there is no setting for it


def parts(spec: CacheSpec, num_namespaces: int) -> SearchStrategy[list[Fields]]:
    """A request of any kind, or several requests of a sequence."""
    prompts = {"seq": _rows(spec), "tokens": _texts(spec), "namespace": st.integers(0, num_namespaces - 1)}
    admits = _with_extra_ids(spec, "admit", prompts | _tiers(spec))
    longest = spec.max_length
    full_texts = _texts(spec).map(lambda tokens: [*tokens, *[0] * longest][:longest])
    counts = _per_row(spec, st.sampled_from((longest, longest, 0, 1, spec.block_size)))
    commits = _with_extra_ids(spec, "commit", {"num_tokens": counts, "tokens": _per_row(spec, full_texts)})
    kinds = [*[admits, commits] * 2, *_other_requests(spec)]
    kinds += _host_requests(spec) if spec.has_host else []
    return st.one_of(st.one_of(kinds).map(lambda request: [request]), _lives(spec, admits))


def _other_requests(spec: CacheSpec) -> list[SearchStrategy[Fields]]:
    """Requests of every cache, except prompts and commits."""
    rows = _rows(spec)
    return [
        _request("extend", num_tokens=_per_row(spec, st.integers(0, MAX_TOKENS)), **_tiers(spec)),
        *[_request("release", seq=rows)] * 2,
        _request("fork", src=rows, dst=rows),
        _request("truncate", seq=rows, drop=st.integers(1, 2 * spec.block_size)),
        _request("evict", block=st.integers(0, spec.groups[0].num_ids - 1)),
        _request("forget_namespaces", keep=st.lists(st.integers(0, 2), min_size=1, max_size=1)),
        _request("pin", seq=rows, num_blocks=st.integers(1, spec.max_blocks_per_seq)),
        _request("unpin", which=st.integers(0, 3)),
        _request("reset"),
    ]


def _host_requests(spec: CacheSpec) -> list[SearchStrategy[Fields]]:
    """Requests of caches with a host tier."""
    group = st.sampled_from(spec.host_groups)
    return [
        *([_request("backup", group=group)] if spec.backups else []),
        *[_request("complete", ok=st.sampled_from((True, True, True, False)))] * 2,
        _request("offload", which=st.integers(1, 15), group=group),
        _request("onboard", which=st.integers(1, 15), group=group),
        _request("watermark", empty=st.integers(0, spec.groups[-1].num_blocks), group=group),
        _request("swap_out", seq=_rows(spec)),
        _request("swap_in", seq=_rows(spec)),
    ]


def _lives(spec: CacheSpec, admit: SearchStrategy[Fields]) -> SearchStrategy[list[Fields]]:
    """Sequences from their prompt to their end, perhaps forked and swapped, or parts of such sequences."""

    def life(request: Fields, seq: int, fork: int, included: list[bool]) -> list[Fields]:
        written = {"verb": "commit", "num_tokens": [spec.max_length] * spec.max_seqs, "tokens": [[]] * spec.max_seqs}
        written |= {"extra_ids": written["tokens"]} if spec.extra_ids else {}
        rest: list[Fields] = [{"verb": "swap_out", "seq": seq}, {"verb": "complete", "ok": True}]
        rest = [*rest, {"verb": "swap_in", "seq": seq}, {"verb": "complete", "ok": True}] if spec.has_host else []
        ends = [{"verb": "fork", "src": seq, "dst": fork}, *rest, {"verb": "release", "seq": seq}]
        parts = [request | {"seq": seq}, written, *ends]
        return [part for part, is_included in zip(parts, included, strict=False) if is_included]

    mostly = st.sampled_from((False, True, True, True))  # shrinks to nothing
    seqs = st.integers(0, spec.max_seqs - 1)
    return st.builds(life, admit, seqs, seqs, st.lists(mostly, min_size=8, max_size=8))


def _with_extra_ids(spec: CacheSpec, verb: str, fields: dict[str, SearchStrategy[Any]]) -> SearchStrategy[Fields]:
    """Requests with extra ids for their tokens if the spec has them, chosen by random bits."""

    def extra(request: Fields) -> Fields:
        bits = request.pop("bits")
        tokens = request["tokens"]

        def ids(text: list[int]) -> list[int]:
            return [bits >> i & 1 if token == 2 else 0 for i, token in enumerate(text)]

        return request | {"extra_ids": [ids(text) for text in tokens] if verb == "commit" else ids(tokens)}

    if not spec.extra_ids:
        return _request(verb, **fields)
    return _request(verb, **fields, bits=st.integers(0, 2**spec.max_length - 1)).map(extra)


def _request(verb: str, **fields: SearchStrategy[Any]) -> SearchStrategy[Fields]:
    return st.fixed_dictionaries({"verb": st.just(verb), **fields})


def _rows(spec: CacheSpec) -> SearchStrategy[int]:
    """Draws a row of the cache, or S, which is not a row."""
    return st.integers(0, spec.max_seqs)


def _per_row(spec: CacheSpec, values: SearchStrategy[Any]) -> SearchStrategy[list[Any]]:
    return st.lists(values, min_size=spec.max_seqs, max_size=spec.max_seqs)


def _tiers(spec: CacheSpec) -> dict[str, SearchStrategy[bool]]:
    """The field of requests for one or both tiers."""
    return {"host": st.booleans()} if spec.has_host else {}


def _texts(spec: CacheSpec) -> SearchStrategy[list[int]]:
    """A repeated token and then other tokens, at most a token more than a row can hold."""

    def text(first: int, times: int, rest: list[int]) -> list[int]:
        return [*[first] * times, *rest][: spec.max_length + 1]

    token = st.integers(0, 2)
    return st.builds(text, token, st.integers(0, spec.max_length), st.lists(token, max_size=spec.block_size))
