# SPDX-License-Identifier: Apache-2.0
"""Metrics of a server for Prometheus, and a page with its cache."""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import functools
import html
import io
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.debug import plot_blocks, stats
from kvjax.serving import Engine, Handle
from kvjax.state import CacheState

try:
    import prometheus_client
    from prometheus_client import core
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[serve]"') from error

from .answers import Decode, Piece

PATIENCE = 30.0  # seconds within which an engine answers, unless something is wrong
STALE = 0.1  # seconds for which a copy of the state is new enough
_WINDOW = 10.0  # seconds over which the tokens a second are counted
_PREFIXES = 50  # lines of the table
_HEAD = 48  # first tokens of a prompt, in its line
_TAIL = 32  # last tokens
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>kvjax: {name}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ font: 14px system-ui, sans-serif; margin: 1.5em; color: #2b2f36 }} img {{ max-width: 100% }}
td, th {{ text-align: left; padding: 2px 12px 2px 0; vertical-align: top; white-space: pre-wrap }}
td.n, th.n {{ text-align: right; white-space: nowrap }}
@media (max-width: 40em) {{ body {{ margin: 1em }} .map {{ overflow-x: auto }}
.map img {{ max-width: none; width: 42em }}
tr {{ display: flex; flex-wrap: wrap; padding-bottom: 8px }} td, th {{ width: 5em; box-sizing: border-box }}
td:last-child, th:last-child {{ width: 100% }} }}</style></head>
<body><h1>{name}</h1><p>{counts}</p><div class="map">{picture}</div><h2>Cached prompts</h2><p>{note}</p>
<table><tr><th class="n">tokens</th><th class="n">hits</th><th>in use</th><th class="n">namespace</th><th>text</th></tr>
{lines}
</table></body></html>
"""


class Pages:
    """The pages of a server and their counts, for the thread of asyncio.

    `setters` are called with a copy of the state before each scrape. The registry may have further metrics.
    """

    engine: Engine[Any]  # set before the first page is made

    def __init__(self, name: str, registry: Any, decode: Decode, *setters: Callable[[CacheState], Any]):
        self._name = name
        self._registry = registry
        self._decode = decode
        self._setters = setters
        self._reading: asyncio.Future[CacheState] | None = None
        self._read_at = -np.inf
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvjax-state")  # only waits for the engine
        self._lock = asyncio.Lock()
        self._shown: dict[str | None, tuple[float, str]] = {}  # {salt: the page, after the time when it was made}
        self._recent = collections.deque[tuple[float, int]]()  # a time, and the number of tokens made then
        registry.register(self)

        def histogram(metric: str, text: str) -> Any:
            return prometheus_client.Histogram(f"kvjax_{metric}_seconds", text, buckets=_SECONDS, registry=registry)

        def counter(metric: str, text: str, *labels: str) -> Any:
            return prometheus_client.Counter(f"kvjax_{metric}", text, labels, registry=registry)

        self._first_token = histogram("time_to_first_token", "From a request to its first token.")
        self._queued = histogram("request_queue_time", "From a request to its row.")
        self._per_token = histogram("request_time_per_output_token", "From a token to the next, by request.")
        self._latency = histogram("e2e_request_latency", "From a request to its end.")
        self._tokens = counter("generation_tokens", "Generated tokens.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Drafts that a pass of the model verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Verified drafts that are in answers.")
        self._ended = counter("request_success", "Answers that ended without a cancel or an error.", "finished_reason")

    def collect(self) -> list[Any]:
        """Returns the gauges and the counter of a scrape."""
        failures = self.engine.listener_counts["failures"]
        text = "Failures of listeners to the cache's events, such as these numbers and the wires."
        gauges = (
            ("num_requests_running", "Requests that the scheduler runs.", self.engine.running),
            ("num_requests_waiting", "Requests that wait for the scheduler.", self.engine.waiting),
            ("asleep", "Whether the pools are freed.", int(self.engine.is_asleep)),
            ("weights_version", "Updates of the weights.", self.engine.version),
            ("generation_tokens_per_second", f"Over the last {_WINDOW:.0f} seconds.", self._rate()),
        )
        return [
            core.CounterMetricFamily("kvjax_listener_failures", text, value=failures),
            *(core.GaugeMetricFamily(f"kvjax_{metric}", text, value=value) for metric, text, value in gauges),
        ]

    def _rate(self) -> float:
        until = time.monotonic() - _WINDOW
        while self._recent and self._recent[0][0] < until:
            self._recent.popleft()
        return sum(tokens for _, tokens in self._recent) / _WINDOW

    def count(self, handle: Handle, piece: Piece, before: int) -> None:
        """Counts a piece of an answer with `before` tokens until now. The last piece ends the answer."""
        now = time.monotonic()
        times = handle.times
        self._tokens.inc(piece.num_tokens - before)
        self._recent.append((now, piece.num_tokens - before))
        if not before and times.first_token is not None:
            self._first_token.observe(times.first_token - times.queued)
        if not before and times.admitted is not None:
            self._queued.observe(times.admitted - times.queued)
        if piece.finish is not None:
            self._ended.labels(piece.finish).inc()
            self._drafted.inc(handle.output.drafted_tokens)
            self._accepted.inc(handle.output.accepted_tokens)
            if piece.num_tokens:  # otherwise a prompt was scored
                self._latency.observe(now - times.queued)
            if piece.num_tokens > 1 and times.first_token is not None:
                self._per_token.observe((now - times.first_token) / (piece.num_tokens - 1))

    async def state(self) -> CacheState:
        """Returns a copy of the cache's metadata, at most `STALE` seconds old. Calls at the same time share a copy.

        Raises:
          EngineError: if the engine is closed.
          TimeoutError: if the engine does not answer.
        """
        reading = self._reading
        if reading is None or (reading.done() and (reading.exception() or time.monotonic() - self._read_at > STALE)):
            self._read_at = time.monotonic()
            reading = self._reading = asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self.engine.state
            )
        try:
            return await asyncio.wait_for(asyncio.shield(reading), PATIENCE)
        except TimeoutError:
            raise TimeoutError(f"the engine has not answered for {PATIENCE:.0f} s") from None

    async def set(self) -> None:
        """Calls the setters with a copy of the state."""
        state = await self.state()
        for setter in self._setters:
            await asyncio.to_thread(setter, state)

    async def metrics(self) -> tuple[bytes, str]:
        """Returns the text of a scrape, and its media type."""
        await self.set()
        return prometheus_client.generate_latest(self._registry), prometheus_client.CONTENT_TYPE_LATEST

    async def cache(self, salt: str | None = None) -> str:
        """Returns the page, made at most once a second. With a salt it has the prompts whose salts begin with it."""
        async with self._lock:
            made_at, page = self._shown.get(salt, (-np.inf, ""))
            if time.monotonic() - made_at > 1:
                state = await self.state()
                counts = f"{self.engine.running} running, {self.engine.waiting} waiting"
                is_shown = None if salt is None else functools.partial(_has_salt, self.engine.names, salt)
                page = await asyncio.to_thread(_page, state, self._name, counts, self._decode, is_shown)
                self._shown[salt] = time.monotonic(), page
            return page


def _has_salt(names: kvjax.Namespaces | None, salt: str, namespace: int) -> bool:
    """Whether the salt of a namespace begins with `salt`."""
    assert names is not None, "salts need names"
    try:
        namespace_salt = names.unversioned(names.describe(namespace)[0])
    except KeyError:  # its number was given back after the state was read
        return False
    return namespace_salt is not None and namespace_salt.startswith(salt)


type IsShown = Callable[[int], bool]


def _page(state: CacheState, name: str, counts: str, decode: Decode, is_shown: IsShown | None) -> str:
    """Makes the page, with the namespaces for which `is_shown` is true. None means all."""
    try:
        file = io.BytesIO()
        plot_blocks(state, group=int(state.spec.bare)).get_figure(root=True).savefig(file, format="png", dpi=100)  # pyright: ignore[reportOptionalMemberAccess]
        encoded = base64.b64encode(file.getvalue()).decode()
        picture = f'<img alt="the blocks of the cache" src="data:image/png;base64,{encoded}">'
    except ImportError as error:
        picture = f"<p>{html.escape(str(error))}</p>"
    cache_stats = stats(state, int(state.spec.bare))
    blocks = jax.device_get(state.groups[0].blocks)
    prefixes = _prefixes(blocks, is_shown)
    lines = [_line(blocks, last, decode) for last in prefixes[:_PREFIXES]]
    counts += f", {cache_stats.active_blocks:,} blocks in use, {cache_stats.cached_blocks:,} cached"
    note = f"The {len(lines)} last used of {len(prefixes):,}."
    return _PAGE.format(name=html.escape(name), counts=counts, picture=picture, note=note, lines="\n".join(lines))


def _prefixes(blocks: Any, is_shown: IsShown | None) -> list[int]:
    """Returns the last blocks of the longest prefixes, from the last used to the first used."""
    findable = np.flatnonzero(blocks.fill > 0)
    leaves = np.setdiff1d(findable, blocks.parent[findable, 0])
    if is_shown is not None:
        namespaces = _namespaces(blocks.parent)[leaves]
        leaves = leaves[
            np.isin(namespaces, [namespace for namespace in np.unique(namespaces).tolist() if is_shown(namespace)])
        ]
    age = np.where(blocks.refcount > 0, -1, (blocks.clock - blocks.released).astype(np.int64))[leaves]
    return leaves[np.argsort(age, kind="stable")].tolist()


def _namespaces(parent: np.ndarray) -> np.ndarray:
    """Returns the namespace of each block, by links i32[B, 2]. Each pass doubles the distance to the ancestor."""
    ancestor = np.where(parent[:, 0] < 0, np.arange(len(parent)), parent[:, 0])
    for _ in range(len(parent).bit_length()):
        ancestor = ancestor[ancestor]
    return parent[ancestor, 1]


def _line(blocks: Any, last: int, decode: Decode) -> str:
    """Returns the line of the prefix up to block `last`, with the hits of its first block."""
    chain = [last]
    while blocks.parent[chain[-1], 0] >= 0 and len(chain) <= len(blocks.fill):
        chain.append(int(blocks.parent[chain[-1], 0]))
    chain.reverse()
    slots = blocks.text.tokens[chain]
    tokens = slots[np.arange(slots.shape[1]) < blocks.fill[chain][:, None]]
    is_short = tokens.size <= _HEAD + _TAIL
    parts = [tokens] if is_short else [tokens[:_HEAD], tokens[-_TAIL:]]
    text = html.escape(" … ".join(decode(part.tolist()) for part in parts))
    in_use = "yes" if blocks.refcount[last] > 0 else ""
    namespace = blocks.parent[chain[0], 1]
    return (
        f'<tr><td class="n">{tokens.size}</td><td class="n">{blocks.hits[chain[0]]}</td><td>{in_use}</td>'
        f'<td class="n">{namespace}</td><td>{text}</td></tr>'
    )
