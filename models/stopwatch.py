# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a generation by part: compiling, computing prompts, decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jax import monitoring

import kvjax

_COMPILE = "/jax/core/compile/"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOOP = "_turn"  # jax's name for the jitted loop of a generation


class _Turn(NamedTuple):
    """The work of a turn of a stream, and its seconds without compiling."""

    seconds: float
    computed: int  # prompt tokens
    reused: int  # prompt tokens from the cache or a store
    stored: int  # prompt tokens from a store
    steps: int  # of decoding
    decoded: int  # tokens, of all rows

    @classmethod
    def of(cls, progress: kvjax.serving.Progress, seconds: float) -> _Turn:
        """The turn that made a `Progress`."""
        outputs = progress.outputs
        num_new = {n: len(tokens) for n, tokens in progress.new.items()}
        first = [n for n, count in num_new.items() if count == len(outputs[n].tokens)]
        decoded = [count - (n in first) for n, count in num_new.items()]
        reused = sum(outputs[n].cached_tokens for n in first)
        stored = sum(outputs[n].stored_tokens for n in first)
        prompted = sum(outputs[n].prompt_tokens for n in first)
        return cls(seconds, prompted - reused, reused, stored, max(decoded, default=0), sum(decoded))


class Stopwatch:
    """Listens to jax inside `with`, and times the turns of a stream.

    jax reports the begin and end of each program's tracing, lowering and compiling. The rest of a turn is its run.
    """

    def __init__(self, note: Callable[[str], None]):
        self._note = note
        self._turns: list[_Turn] = []
        # Disjoint and in order. If a span contains others (functions traced inside functions), it replaces them.
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Stopwatch:
        monitoring.register_scalar_listener(self._begins)
        monitoring.register_event_time_span_listener(self._ends)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_scalar_listener(self._begins)
        monitoring.unregister_event_time_span_listener(self._ends)

    def _begins(self, event: str, *_: object, **details: object) -> None:
        if event == _TRACE and details.get("fun_name") == _LOOP:
            self._note("compiling the loop ...")

    def _ends(self, event: str, start_time: float, end_time: float, **_: object) -> None:
        if event.startswith(_COMPILE):
            while self._spans and self._spans[-1][0] >= start_time:
                self._spans.pop()
            self._spans.append((start_time, end_time))

    @property
    def compiled(self) -> float:
        """Seconds of compiling so far."""
        return sum(end - start for start, end in self._spans)

    def timed(self, stream: Iterable[kvjax.serving.Progress]) -> Iterator[kvjax.serving.Progress]:
        """Yields each `Progress` of the stream, and notes the time of each turn."""
        turns = iter(stream)
        while True:
            began = time.perf_counter() - self.compiled
            progress = next(turns, None)
            if progress is None:
                return
            self._turns.append(_Turn.of(progress, time.perf_counter() - self.compiled - began))
            yield progress

    def report(self) -> str:
        """A line with all times.

        A turn may both decode and compute prompts. Then decoding is assumed to be as fast as in turns without prompts.
        """
        parts = [f"compile {_seconds(self.compiled)}"]
        if not self._turns:
            return parts[0]
        total = _Turn(*(sum(column) for column in zip(*self._turns, strict=True)))
        pace = [turn for turn in self._turns if turn.steps and not turn.computed]
        stored = f", {total.stored:,} of them from the store" if total.stored else ""
        reused = f" ({total.reused:,} more reused{stored})" if total.reused else ""
        prefill = f"prefill {total.computed:,} tokens{reused}"
        if total.steps and not pace:
            return "; ".join([*parts, f"{prefill} and decode {total.decoded:,}, {_seconds(total.seconds)}"])
        decoding = total.steps * sum(turn.seconds for turn in pace) / max(sum(turn.steps for turn in pace), 1)
        parts += [f"{prefill} {_seconds(max(total.seconds - decoding, 0))}"]
        parts += [f"decode {total.decoded / decoding:,.0f} tokens/s"] if total.decoded else []
        return "; ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.{0 if value >= 10 else 1 if value >= 1 else 2}f} s"
