# SPDX-License-Identifier: Apache-2.0
"""Figures of a trace: its size, the share of reused blocks, and caveats about these figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.research.simulators.hits import RULES, Hits, Rule, num_hittable
from kvjax.research.simulators.lru_curve import lru_curve
from kvjax.research.simulators.replay import overlapping
from kvjax.research.traces.trace import Trace, previous_uses

_SHARED = 2  # full blocks that a next turn must share; a single block may be a system prompt


@dataclasses.dataclass(frozen=True)
class Summary:
    """Figures of a trace. `str` formats them as text.

    Attributes:
      rule: the rule of hits.
      requests, references, ids, block_size: numbers of requests, of blocks of all prompts, of distinct blocks, and of
        tokens of a block.
      span_ms: time from the first request to the last.
      step_ms: the median difference between distinct times.
      blocks_median, blocks_most: the median and the maximum of the prompts' lengths in blocks.
      input_tokens, output_tokens: totals of all requests.
      partial: number of prompts with a partly filled last block.
      sessions, kinds: the number of sessions, and of requests of each class; None if the trace has none.
      rate, token_rate, mean_rate: hit rates of an unbounded cache; see `Hits`.
      used_once: number of ids in only one request.
      reuse_ms: the quartiles of the time between two uses of a block; None without reuse.
      answers_rate: an estimate of how much `rate` would grow if answers were stored. A prompt counts as the next turn
        of an earlier request if it continues at least two full blocks of the request, and is long enough to contain its
        answer.
      next_turns: the number of prompts that would find more.
      overlap: (prompt tokens/s, ms per token of an answer), the speed for `held` and `running`.
      held, running: the maximum number of blocks held, and of requests running, at the same time.
      notes: the notes of the trace.
    """

    rule: Rule
    requests: int
    references: int
    ids: int
    block_size: int
    span_ms: float
    step_ms: float
    blocks_median: float
    blocks_most: int
    input_tokens: int
    output_tokens: int
    partial: int
    sessions: int | None
    kinds: dict[str, int] | None
    rate: float
    token_rate: float
    mean_rate: float
    used_once: int
    reuse_ms: tuple[float, float, float] | None
    answers_rate: float
    next_turns: int
    overlap: tuple[float, float]
    held: int
    running: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        reuse = ""
        if self.reuse_ms is not None:
            low, middle, high = (f"{time / 1000:,.1f}" for time in self.reuse_ms)
            reuse = f"; the others' next use is {middle} s later in the median, half of them {low} to {high} s"
        speed = f"{self.overlap[0]:,g} prompt tokens/s and {self.overlap[1]:,g} ms a token of an answer"
        lines = [
            f"requests     {self.requests:,} in {self.span_ms / 1000:,.1f} s; "
            f"times are {self.step_ms:,g} ms apart in the median",
            f"tokens       {self.input_tokens:,} of prompts, {self.output_tokens:,} of answers",
            f"blocks       {self.references:,} references to {self.ids:,} ids of {self.block_size} tokens; "
            f"a prompt has {self.blocks_median:,g} in the median, {self.blocks_most:,} at most",
            f"partial      {self.partial:,} prompts have a last block that is filled in part",
            f"unbounded    hits {self.rate:.4f} by blocks, {self.token_rate:.4f} by tokens, "
            f"{self.mean_rate:.4f} in the mean of requests",
            f"rule         {self.rule}: {RULES[self.rule]}",
            f"reuse        {self.used_once:,} ids are in one request only{reuse}",
        ]
        if self.sessions is not None:
            lines.append(f"sessions     {self.sessions:,}")
        if self.kinds is not None:
            lines.append("classes      " + ", ".join(f"{name} {count:,}" for name, count in self.kinds.items()))
        lines += [
            "order        requests follow one another, each ends before the next one begins; answers are not stored",
            f"             (they would add some {self.answers_rate:.4f} to the hits, if {self.next_turns:,} prompts "
            "are the next turns that they look like)",
            f"             at {speed}, up to {self.running:,} run at once and hold {self.held:,} blocks: a smaller",
            "             cache cannot serve the trace at that speed, and one not much larger hits less than here",
            "refused      a request longer than the cache: it hits nothing and counts as requested",
        ]
        return "\n".join([*lines, *(f"note         {note}" for note in self.notes)])


def summary(trace: Trace, rule: Rule = "full", overlap: tuple[float, float] = (10_000, 50)) -> Summary:
    """Computes figures of a trace.

    Args:
      trace: a trace of at least one request.
      rule: the rule of hits.
      overlap: a speed for `overlapping`: prompt tokens/s, ms per token of an answer.

    Raises:
      ValueError: for an unknown rule, an invalid speed, or a trace without requests.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 12], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> figures = research.summary(trace)
      >>> figures.requests, figures.ids, figures.used_once, figures.rate
      (3, 6, 4, 0.25)
    """
    if not len(trace):
        raise ValueError("trace: got no requests, wanted at least one")
    hits = unbounded(trace, rule)
    overlapped = overlapping(trace, *overlap)
    gaps = reuse_times(trace)
    steps = np.diff(np.unique(trace.time))
    low, middle, high = np.quantile(gaps, (0.25, 0.5, 0.75)).tolist() if len(gaps) else (0.0, 0.0, 0.0)
    answers, turns = _hits_in_answers(trace, rule, hits.blocks[0])
    kinds = None
    if trace.kind is not None:
        kinds = dict(zip(trace.kinds, np.bincount(trace.kind, minlength=len(trace.kinds)).tolist(), strict=True))
    return Summary(
        rule=rule,
        requests=len(trace),
        references=len(trace.ids),
        ids=trace.num_ids,
        block_size=trace.block_size,
        span_ms=float(trace.time[-1] - trace.time[0]),
        step_ms=float(np.median(steps)) if len(steps) else 0.0,
        blocks_median=float(np.median(trace.lengths)),
        blocks_most=int(trace.lengths.max()),
        input_tokens=int(trace.input_length.sum(dtype=np.int64)),
        output_tokens=int(trace.output_length.sum(dtype=np.int64)),
        partial=int(np.sum(trace.full < trace.lengths)),
        sessions=None if trace.session is None else len(np.unique(trace.session)),
        kinds=kinds,
        rate=float(hits.rate[0]),
        token_rate=float(hits.token_rate[0]),
        mean_rate=float(hits.mean_rate[0]),
        used_once=int(np.sum(np.bincount(trace.ids, minlength=trace.num_ids) == 1)),
        reuse_ms=(low, middle, high) if len(gaps) else None,
        answers_rate=answers / len(trace.ids),
        next_turns=turns,
        overlap=overlap,
        held=overlapped.max_held,
        running=int(overlapped.running.max()),
        notes=trace.notes,
    )


def unbounded(trace: Trace, rule: Rule) -> Hits:
    """The hits in a cache without evictions. Its size is the number of ids plus the longest request.

    Args:
      trace: the requests.
      rule: the rule of hits.

    Raises:
      ValueError: for an unknown rule.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 12], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> hits = research.unbounded(trace, "full")
      >>> hits.blocks.tolist(), hits.rate.tolist()  # 2 of 8 blocks
      ([[0, 0, 2]], [0.25])
    """
    return lru_curve(trace, [trace.num_ids + int(trace.lengths.max(initial=0))], rule)


def reuse_times(trace: Trace) -> np.ndarray:
    """f64[K - D] ms; the time from each use of a block to its next use.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 50, 200], [4] * 3, [0] * 3, [[1], [2], [1]], block_size=4)
      >>> research.reuse_times(trace).tolist()  # ms
      [200.0]
    """
    since = _since_last_use(trace)
    return since[~np.isnan(since)]


def hits_by_depth(hits: Hits) -> tuple[np.ndarray, np.ndarray]:
    """Blocks found and requested, by their depth in the prompt.

    Args:
      hits: hits of a trace in caches of several sizes.

    Returns:
      i32[Z, W], blocks found at each depth, where W is the longest prompt, and i32[W], blocks requested at each depth.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 12], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> found, requested = research.hits_by_depth(research.unbounded(trace, "full"))
      >>> found.tolist(), requested.tolist()
      ([[1, 1, 0]], [3, 3, 2])
    """
    depths = np.arange(int(hits.trace.lengths.max(initial=0)))
    longer = lambda lengths: np.sum(lengths > depths[:, None], axis=1, dtype=np.int32)  # noqa: E731
    counts = [longer(blocks) for blocks in hits.blocks]
    return np.array(counts, np.int32).reshape(len(hits.sizes), len(depths)), longer(hits.trace.lengths)


def hits_by_age(hits: Hits, edges: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks found and requested, by the time since their last use.

    Args:
      hits: hits of a trace in caches of several sizes.
      edges: f64[E + 1] ms; the limits of intervals, in ascending order.

    Returns:
      i32[Z, E], blocks found in each interval of ages, and i32[E], blocks requested in it.

    Raises:
      ValueError: for edges that do not ascend.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 12], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> found, requested = research.hits_by_age(research.unbounded(trace, "full"), [0, 5, 10])  # ms
      >>> found.tolist(), requested.tolist()
      ([[0, 2]], [0, 2])
    """
    edges = np.asarray(edges, np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise ValueError(f"edges: got {edges}, wanted at least two times in ascending order")
    trace = hits.trace
    since = _since_last_use(trace)
    interval = np.searchsorted(edges, since, side="right") - 1
    inside = ~np.isnan(since) & (since >= edges[0]) & (since < edges[-1])
    by_age = lambda where: np.bincount(interval[where & inside], minlength=len(edges) - 1).astype(np.int32)  # noqa: E731
    counts = [by_age(trace.depths < blocks[trace.owners]) for blocks in hits.blocks]
    return np.array(counts, np.int32).reshape(len(hits.sizes), len(edges) - 1), by_age(np.ones(len(since), np.bool_))


def _since_last_use(trace: Trace) -> np.ndarray:
    """f64[K] ms; the time from the previous use of each block, or NaN."""
    time = trace.time[trace.owners]
    previous = previous_uses(trace.ids)
    return np.where(previous >= 0, time - time[previous], np.nan)


def _hits_in_answers(trace: Trace, rule: Rule, num_found: np.ndarray) -> tuple[int, int]:
    """The gain if answers were stored: blocks found in addition to num_found i32[R], and the number of such prompts.

    A prompt counts as the next turn of an earlier request if it begins with all full blocks of the earlier prompt (at
    least two), does not contain its partly filled block, and is long enough to contain its answer. It would then find
    all blocks filled by the earlier prompt and answer.
    """
    # Last full block of a prompt -> (tokens of prompt and answer, partly filled block or -1) of its requests.
    ends: dict[int, list[tuple[int, int]]] = {}
    num_blocks = 0
    num_prompts = 0
    full, tokens, limits = (x.tolist() for x in (trace.full, trace.input_length, num_hittable(trace, rule)))
    for request, answer in enumerate(trace.output_length.tolist()):
        ids = trace.blocks(request).tolist()
        distinct = set(ids)
        turns = (earlier for block in ids for earlier in ends.get(block, ()))
        reach = [
            total // trace.block_size for total, last in turns if total <= tokens[request] and last not in distinct
        ]
        gain = min(max(reach, default=0), limits[request]) - int(num_found[request])
        num_blocks += max(gain, 0)
        num_prompts += gain > 0
        if full[request] >= _SHARED:
            partial = ids[-1] if full[request] < len(ids) else -1
            ends.setdefault(ids[full[request] - 1], []).append((tokens[request] + answer, partial))
    return num_blocks, num_prompts
