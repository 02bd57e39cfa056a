# SPDX-License-Identifier: Apache-2.0
"""Numbers about a server for Prometheus, and a page that shows its cache."""

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

PATIENCE = 30.0  # seconds in which an engine answers, unless something is wrong
STALE = 0.1  # seconds for which a copy of the state will do
_WINDOW = 10.0  # seconds of the tokens a second
_PREFIXES, _HEAD, _TAIL = 50, 48, 32  # lines of the table; tokens that a line shows
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
    """The pages of a server, and what they count, for the thread of asyncio.

    `setters` are called with a copy of the state before each scrape of the registry, which may have other metrics too.
    """

    engine: Engine[Any]  # has to be set before anything is shown

    def __init__(self, name: str, registry: Any, decode: Decode, *setters: Callable[[CacheState], Any]):
        self._name, self._registry, self._decode, self._setters = name, registry, decode, setters
        self._reading: asyncio.Future[CacheState] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvjax-state")  # waits for nothing but the engine
        self._read_at, self._lock = -np.inf, asyncio.Lock()
        self._shown: dict[str | None, tuple[float, str]] = {}  # by salt: when a page was made, and the page
        self._recent = collections.deque[tuple[float, int]]()  # when tokens came, and how many
        registry.register(self)

        def histogram(what: str, text: str) -> Any:
            return prometheus_client.Histogram(f"kvjax_{what}_seconds", text, buckets=_SECONDS, registry=registry)

        def counter(what: str, text: str, *labels: str) -> Any:
            return prometheus_client.Counter(f"kvjax_{what}", text, labels, registry=registry)

        self._first_token = histogram("time_to_first_token", "From a request to its first token.")
        self._queued = histogram("request_queue_time", "From a request to its row.")
        self._each_token = histogram("request_time_per_output_token", "From one token to the next, by request.")
        self._whole = histogram("e2e_request_latency", "From a request to its end.")
        self._tokens = counter("generation_tokens", "Tokens that were generated.")
        self._ended = counter("request_success", "Answers that have ended by themselves.", "finished_reason")

    def collect(self) -> list[Any]:
        """The gauges and the counter of a scrape."""
        failures = self.engine.listener_counts["failures"]
        text = "Failures of listeners to the cache's events, such as these numbers and the wires."
        gauges = (
            ("num_requests_running", "Requests that the scheduler has.", self.engine.running),
            ("num_requests_waiting", "Requests that wait for it.", self.engine.waiting),
            ("generation_tokens_per_second", f"Over the last {_WINDOW:.0f} seconds.", self._rate()),
        )
        return [
            core.CounterMetricFamily("kvjax_listener_failures", text, value=failures),
            *(core.GaugeMetricFamily(f"kvjax_{what}", text, value=value) for what, text, value in gauges),
        ]

    def _rate(self) -> float:
        until = time.monotonic() - _WINDOW
        while self._recent and self._recent[0][0] < until:
            self._recent.popleft()
        return sum(tokens for _, tokens in self._recent) / _WINDOW

    def count(self, handle: Handle, piece: Piece, before: int) -> None:
        """Counts a piece of an answer, which had so many tokens before; with the last piece it has ended by itself."""
        now, times = time.monotonic(), handle.times
        self._tokens.inc(piece.num_tokens - before)
        self._recent.append((now, piece.num_tokens - before))
        if not before and times.first_token is not None:
            self._first_token.observe(times.first_token - times.queued)
        if not before and times.admitted is not None:
            self._queued.observe(times.admitted - times.queued)
        if piece.finish is not None:
            self._ended.labels(piece.finish).inc()
            if piece.num_tokens:  # else only a prompt was scored
                self._whole.observe(now - times.queued)
            if piece.num_tokens > 1 and times.first_token is not None:
                self._each_token.observe((now - times.first_token) / (piece.num_tokens - 1))

    async def state(self) -> CacheState:
        """A copy of the cache's metadata, not older than `STALE`; all who want one at a time get the same.

        Raises:
          EngineError: if the engine is closed.
          TimeoutError: if it does not answer.
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
        """The text of a scrape, and its type."""
        await self.set()
        return prometheus_client.generate_latest(self._registry), prometheus_client.CONTENT_TYPE_LATEST

    async def cache(self, salt: str | None = None) -> str:
        """The page, made at most once a second; with a salt it has only the prompts whose salts begin with it."""
        async with self._lock:
            made_at, page = self._shown.get(salt, (-np.inf, ""))
            if time.monotonic() - made_at > 1:
                state, counts = await self.state(), f"{self.engine.running} running, {self.engine.waiting} waiting"
                is_shown = None if salt is None else functools.partial(_has_salt, self.engine.names, salt)
                page = await asyncio.to_thread(_page, state, self._name, counts, self._decode, is_shown)
                self._shown[salt] = time.monotonic(), page
            return page


def _has_salt(names: kvjax.Namespaces | None, salt: str, namespace: int) -> bool:
    """Whether the salt of a namespace begins with another one."""
    assert names is not None, "salts need names"
    try:
        found, _ = names.describe(namespace)
    except KeyError:  # it was given back after the state was read
        return False
    return found is not None and found.startswith(salt)


type IsShown = Callable[[int], bool]


def _page(state: CacheState, name: str, counts: str, decode: Decode, is_shown: IsShown | None) -> str:
    """The page, with the namespaces that `is_shown` names; None: with all."""
    try:
        file = io.BytesIO()
        plot_blocks(state, group=int(state.spec.bare)).get_figure(root=True).savefig(file, format="png", dpi=100)  # pyright: ignore[reportOptionalMemberAccess]
        encoded = base64.b64encode(file.getvalue()).decode()
        picture = f'<img alt="the blocks of the cache" src="data:image/png;base64,{encoded}">'
    except ImportError as error:
        picture = f"<p>{html.escape(str(error))}</p>"
    whole, blocks = stats(state, int(state.spec.bare)), jax.device_get(state.groups[0].blocks)
    prefixes = _prefixes(blocks, is_shown)
    lines = [_line(blocks, last, decode) for last in prefixes[:_PREFIXES]]
    counts += f", {whole.active_blocks:,} blocks in use, {whole.cached_blocks:,} cached"
    note = f"The {len(lines)} that were used last, of {len(prefixes):,}."
    return _PAGE.format(name=html.escape(name), counts=counts, picture=picture, note=note, lines="\n".join(lines))


def _prefixes(blocks: Any, is_shown: IsShown | None) -> list[int]:
    """The last blocks of the prefixes that no other prefix goes on, those used last first."""
    findable = np.flatnonzero(blocks.fill > 0)
    leaves = np.setdiff1d(findable, blocks.parent[findable, 0])
    if is_shown is not None:
        namespaces = _namespaces(blocks.parent)[leaves]
        leaves = leaves[np.isin(namespaces, [one for one in np.unique(namespaces).tolist() if is_shown(one)])]
    age = np.where(blocks.refcount > 0, -1, (blocks.clock - blocks.released).astype(np.int64))[leaves]
    return leaves[np.argsort(age, kind="stable")].tolist()


def _namespaces(parent: np.ndarray) -> np.ndarray:
    """The namespace of each block, by links i32[B, 2]; each pass doubles the distance to the ancestor."""
    ancestor = np.where(parent[:, 0] < 0, np.arange(len(parent)), parent[:, 0])
    for _ in range(len(parent).bit_length()):
        ancestor = ancestor[ancestor]
    return parent[ancestor, 1]


def _line(blocks: Any, last: int, decode: Decode) -> str:
    """The line of the prefix that ends with a block, with the hits of its first block."""
    chain = [last]
    while blocks.parent[chain[-1], 0] >= 0 and len(chain) <= len(blocks.fill):
        chain.append(int(blocks.parent[chain[-1], 0]))
    chain.reverse()
    slots = blocks.text.tokens[chain]
    tokens = slots[np.arange(slots.shape[1]) < blocks.fill[chain][:, None]]
    is_short = tokens.size <= _HEAD + _TAIL
    parts = [tokens] if is_short else [tokens[:_HEAD], tokens[-_TAIL:]]
    text = html.escape(" … ".join(decode(part.tolist()) for part in parts))
    in_use, namespace = "yes" if blocks.refcount[last] > 0 else "", blocks.parent[chain[0], 1]
    return (
        f'<tr><td class="n">{tokens.size}</td><td class="n">{blocks.hits[chain[0]]}</td><td>{in_use}</td>'
        f'<td class="n">{namespace}</td><td>{text}</td></tr>'
    )
