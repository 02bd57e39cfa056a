# SPDX-License-Identifier: Apache-2.0
"""Layers that repeat, computed by one `lax.scan`, so that the time to compile does not grow with their number.

A model of 14 layers, where every sixth has full attention (F) and the others a window (s):

    layers    s s s s s F s s s s s F s s
              [run: period 6, 2 repeats ] unrolled
    held as   s s s s s F               s s

The run has six phases. The layers of one phase are held as one module, whose weights are stacked: [repeats, ...] each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kvjax


@dataclasses.dataclass(frozen=True)
class Run:
    """The layers first, first + 1, ...: `period` of them, `repeats` times over."""

    first: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        """The layer after the last."""
        return self.first + self.period * self.repeats

    @property
    def phases(self) -> range:
        """The layers of the first period; each stands for its phase."""
        return range(self.first, self.first + self.period)

    def layers(self, phase: int) -> range:
        """All layers of a phase."""
        return range(phase, self.end, self.period)


class Turn(NamedTuple):
    """The layer of a phase that is computed: `layers[number]`, where the number i32[] is traced."""

    layers: range
    number: jax.Array

    def index(self, spec: kvjax.CacheSpec) -> jax.Array:
        """i32[]; the layer's index in its pool. ValueError if the phase's layers are in several pools."""
        located = [spec.locate(layer) for layer in self.layers]
        if len({where[:2] for where in located}) > 1:
            raise ValueError(f"pools: got layers {[*self.layers]} in several pools, wanted one pool to scan them in")
        indices = jnp.asarray(np.array([index for *_, index in located], np.int32))
        return lax.dynamic_index_in_dim(indices, self.number, keepdims=False, allow_negative_indices=False)


def longest_run(layers: Sequence[Any], dense: Sequence[int] = ()) -> Run | None:
    """The run of equal layer patterns that leaves the fewest layers to compile; None if no pattern repeats.

    A layer whose K/V others reuse is in no run: `Decoder.dense` hands its K/V to them. Layers in `dense` differ from
    the others by their MLP.
    """
    reused, kinds = {layer.reuses for layer in layers}, {}
    keys = ((layer, number in dense, number if number in reused else None) for number, layer in enumerate(layers))
    pattern = [kinds.setdefault(key, len(kinds)) for key in keys]
    best, most = None, 0
    for period in range(1, len(pattern) // 2 + 1):
        for first in range(len(pattern) - 2 * period + 1):
            repeats = 1
            while pattern[first + repeats * period :][:period] == pattern[first:][:period]:
                repeats += 1
            if period * (repeats - 1) > most:
                best, most = Run(first, period, repeats), period * (repeats - 1)
    return best


def stacked[L: nnx.Module](layers: Sequence[L], run: Run | None) -> list[L]:
    """A model's layers as its decoder holds them; without a run as they are."""
    if run is None:
        return [*layers]
    phases = [_stack([layers[number] for number in run.layers(phase)]) for phase in run.phases]
    return [*layers[: run.first], *phases, *layers[run.end :]]


def over_layers(
    step: Callable[..., Any], carry: Any, layers: Iterable[nnx.Module], own: Sequence[jax.Array | None], run: Run | None
) -> Any:
    """Calls `step` for every layer in order; in one `scan` for those of the run.

    Args:
      step: (carry, layer, number, own input, turn) -> carry. In the run `number` is the phase, and `turn` tells which
        of its layers it is; elsewhere `turn` is None.
      carry: any pytree; in the run its shapes and dtypes stay as they are.
      layers: as `stacked` returns them.
      own: for each layer of the model its own input, or None.
      run: None: there is none.

    Returns:
      The carry after the last layer.
    """
    before, phases, after = parted(layers, run)
    for number, layer in enumerate(before):
        carry = step(carry, layer, number, own[number], None)
    if run is None:
        return carry

    def period(carry, now):
        repeat, *modules = now
        for phase, layer, own in zip(run.phases, *modules, strict=True):
            carry = step(carry, layer, phase, own, Turn(run.layers(phase), repeat))
        return carry, None

    inputs = [_stack([own[number] for number in run.layers(phase)]) for phase in run.phases]
    carry, _ = lax.scan(period, carry, (jnp.arange(run.repeats, dtype=jnp.int32), phases, inputs))
    for number, layer in enumerate(after, run.end):
        carry = step(carry, layer, number, own[number], None)
    return carry


def parted[L: nnx.Module](layers: Iterable[L], run: Run | None) -> tuple[list[L], ...]:
    """The modules before the run, one for each of its phases, and those after it."""
    layers = [*layers]
    if run is None:
        return layers, [], []
    end = run.first + run.period
    return layers[: run.first], layers[run.first : end], layers[end:]


def _stack(trees: Sequence[Any]) -> Any:
    """Equal pytrees as one, whose leaves [repeats, ...] have one more axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
