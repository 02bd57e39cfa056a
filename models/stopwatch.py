# SPDX-License-Identifier: Apache-2.0
"""What the time of a generation went into: compiling, computing prompts, decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jax import monitoring

import kvjax

_COMPILE, _TRACE = "/jax/core/compile/", "/jax/core/compile/jaxpr_trace_duration"
_LOOPS = ("prefill", "decode")  # the jitted loops of a generation, as jax names them


class _Turn(NamedTuple):
    """The time between two `Progress`es but for compiling, whether prompts were computed, and the decode steps."""

    seconds: float
    prefill: bool
    steps: int


class Stopwatch:
    """Listens to jax inside `with`, and times the turns of a stream.

    jax tells of each program when it begins and ends to be traced, lowered and compiled. What a turn took beside that
    is its run.
    """

    def __init__(self, note: Callable[[str], None]):
        self._note, self._turns = note, list[_Turn]()
        # Disjoint and in order: a span that holds others (functions traced inside functions) takes their place.
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Stopwatch:
        monitoring.register_scalar_listener(self._begins)
        monitoring.register_event_time_span_listener(self._ends)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_scalar_listener(self._begins)
        monitoring.unregister_event_time_span_listener(self._ends)

    def _begins(self, event: str, *_: object, **what: object) -> None:
        if event == _TRACE and what.get("fun_name") in _LOOPS:
            self._note(f"compiling {what['fun_name']} ...")

    def _ends(self, event: str, start_time: float, end_time: float, **_: object) -> None:
        if event.startswith(_COMPILE):
            while self._spans and self._spans[-1][0] >= start_time:
                self._spans.pop()
            self._spans.append((start_time, end_time))

    @property
    def compiled(self) -> float:
        """Seconds of compiling so far."""
        return sum(end - start for start, end in self._spans)

    def timed(self, stream: Iterable[kvjax.Progress]) -> Iterator[kvjax.Progress]:
        """The stream's `Progress`es, the time of each turn noted."""
        turns = iter(stream)
        while True:
            began = time.perf_counter() - self.compiled
            progress = next(turns, None)
            if progress is None:
                return
            seconds = time.perf_counter() - self.compiled - began
            first = {n for n, new in progress.new.items() if len(new) == len(progress.outputs[n].tokens)}
            steps = max((len(new) - (n in first) for n, new in progress.new.items()), default=0)
            self._turns.append(_Turn(seconds, bool(first), steps))
            yield progress

    def report(self, outputs: list[kvjax.Output]) -> str:
        """One line. In a turn that does both, decoding is taken to be as fast as in the turns that only decode."""
        begun = [output for output in outputs if output.tokens]
        reused, asked = (sum(getattr(o, name) for o in begun) for name in ("cached_tokens", "prompt_tokens"))
        decoded = sum(len(output.tokens) for output in begun) - len(begun)
        steps, seconds = (sum(getattr(turn, name) for turn in self._turns) for name in ("steps", "seconds"))
        alone = [turn for turn in self._turns if not turn.prefill]
        prefill = f"prefill {asked - reused:,} tokens" + (f" ({reused:,} more reused)" if reused else "")
        parts = [f"compile {_seconds(self.compiled)}"]
        if steps and not any(turn.steps for turn in alone):
            return "; ".join([*parts, f"{prefill} and decode {decoded:,}, {_seconds(seconds)}"])
        decoding = steps * sum(turn.seconds for turn in alone) / max(sum(turn.steps for turn in alone), 1)
        parts += [f"{prefill} {_seconds(max(seconds - decoding, 0))}"]
        parts += [f"decode {decoded / decoding:,.0f} tokens/s"] if decoded else []
        return "; ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.{0 if value >= 10 else 1 if value >= 1 else 2}f} s"
