# SPDX-License-Identifier: Apache-2.0
"""Runs repeated layers in a `lax.scan`, so the time to compile does not grow with their number.

A model of 14 layers, where every sixth has full attention (F) and the others a window (s):

    layers    s s s s s F s s s s s F s s
              [run: period 6, 2 repeats ] unrolled
    held as   s s s s s F               s s

The run has six phases. The layers of a phase are held as a single module with stacked weights [repeats, ...].
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
    """A pattern of `period` layers, which begins at the layer `first` and occurs `repeats` times."""

    first: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        """The layer after the run."""
        return self.first + self.period * self.repeats

    @property
    def phases(self) -> range:
        """The layers of the first period, which stand for the phases."""
        return range(self.first, self.first + self.period)

    def layers(self, phase: int) -> range:
        """The layers of a phase, one in each repeat of the pattern."""
        return range(phase, self.end, self.period)


class ScanPosition(NamedTuple):
    """The layer of a phase in a turn of the scan: `layers[repeat]`, where `repeat` is a traced i32[]."""

    layers: range
    repeat: jax.Array

    def index(self, spec: kvjax.CacheSpec) -> jax.Array:
        """The layer's index in its pool, an i32[]. Raises a ValueError if several pools hold the phase's layers."""
        located = [spec.locate(layer) for layer in self.layers]
        if len({where[:2] for where in located}) > 1:
            raise ValueError(f"pools: got layers {[*self.layers]} in several pools, wanted one pool to scan them in")
        indices = jnp.asarray(np.array([index for *_, index in located], np.int32))
        return lax.dynamic_index_in_dim(indices, self.repeat, keepdims=False, allow_negative_indices=False)


def longest_run(layers: Sequence[Any], dense: Sequence[int] = ()) -> Run | None:
    """Finds the run of equal layer patterns with the fewest layers left to compile, or None if no pattern repeats.

    A layer whose K/V other layers reuse is not part of a run, because `Decoder.dense` passes its K/V to them. Layers in
    `dense` differ from the others by their MLP.
    """
    reused = {layer.reuses for layer in layers}
    keys = ((layer, index in dense, index if index in reused else None) for index, layer in enumerate(layers))
    kinds = {}
    pattern = [kinds.setdefault(key, len(kinds)) for key in keys]
    best_run = None
    most_saved = 0  # layers that need not be compiled separately
    for period in range(1, len(pattern) // 2 + 1):
        for first in range(len(pattern) - 2 * period + 1):
            repeats = 1
            while pattern[first + repeats * period :][:period] == pattern[first:][:period]:
                repeats += 1
            if period * (repeats - 1) > most_saved:
                best_run = Run(first, period, repeats)
                most_saved = period * (repeats - 1)
    return best_run


def stacked[L: nnx.Module](layers: Sequence[L], run: Run | None) -> list[L]:
    """Stacks the layers of a run by phase, as a decoder holds them. Without a run the layers stay as they are."""
    if run is None:
        return [*layers]
    phases = [_stack([layers[index] for index in run.layers(phase)]) for phase in run.phases]
    return [*layers[: run.first], *phases, *layers[run.end :]]


def over_layers(
    step: Callable[..., Any],
    carry: Any,
    layers: Iterable[nnx.Module],
    layer_inputs: Sequence[jax.Array | None],
    run: Run | None,
) -> Any:
    """Calls `step` for every layer in order, inside a `scan` for the layers of the run.

    Args:
      step: (carry, layer, layer index, layer input, turn) -> carry. In the run the index is the phase, and `turn`
        tells the layer of the phase. Elsewhere `turn` is None.
      carry: any pytree; in the run its shapes and dtypes do not change.
      layers: the modules from `stacked`.
      layer_inputs: the input of each layer of the model, or None.
      run: the run to scan; None disables the scan.

    Returns:
      The carry after the last layer.
    """
    before, phases, after = parted(layers, run)
    for layer_index, layer in enumerate(before):
        carry = step(carry, layer, layer_index, layer_inputs[layer_index], None)
    if run is None:
        return carry

    def period(carry, scanned):
        repeat, *modules = scanned
        for phase, layer, layer_input in zip(run.phases, *modules, strict=True):
            carry = step(carry, layer, phase, layer_input, ScanPosition(run.layers(phase), repeat))
        return carry, None

    inputs = [_stack([layer_inputs[index] for index in run.layers(phase)]) for phase in run.phases]
    carry, _ = lax.scan(period, carry, (jnp.arange(run.repeats, dtype=jnp.int32), phases, inputs))
    for layer_index, layer in enumerate(after, run.end):
        carry = step(carry, layer, layer_index, layer_inputs[layer_index], None)
    return carry


def parted[L: nnx.Module](layers: Iterable[L], run: Run | None) -> tuple[list[L], ...]:
    """The modules before the run, the modules of its phases, and the modules after it."""
    layers = [*layers]
    if run is None:
        return layers, [], []
    end = run.first + run.period
    return layers[: run.first], layers[run.first : end], layers[end:]


def _stack(trees: Sequence[Any]) -> Any:
    """Stacks the leaves of equal pytrees along a new first axis: [repeats, ...]."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
