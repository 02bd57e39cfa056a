# SPDX-License-Identifier: Apache-2.0
"""A learned policy: it evicts the block with the lowest expected hit density (hits per block and time).

The hit density of a cached block depends on its class when it was released, and on its age since then. Both have few
values, so that all hit densities are one small table:

    class    hits so far (0, 1, 2-3, more) x blocks of its prompt (8 ranges) x whether it is the last one
    age      releases and publications since (`Blocks.clock`), two ranges an octave

`learn_policy` fills the table from a trace.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import pick
from kvjax.policies.classes import by_class
from kvjax.state import Blocks, EvictionPolicy

NUM_LENGTHS = 8
_HITS = (1, 2, 4)  # the least hits of each range but the first
# The range of hits, the range of lengths, and whether it is a last block, of each class.
CLASSES = tuple(np.ndindex(len(_HITS) + 1, NUM_LENGTHS, 2))
NUM_CLASSES = len(CLASSES)
_LOW = 5  # ages below 1.5 * 2^_LOW are one range
NUM_AGES = 2 * (31 - _LOW)
_FORMAT = "kvjax densities 1"


class Densities(NamedTuple):
    """Learned hit densities."""

    lengths: jax.Array  # i32[NUM_LENGTHS - 1]; the least blocks of a prompt of each range of lengths but the first
    table: jax.Array  # f32[NUM_CLASSES, NUM_AGES]; expected hits for each block and tick of the clock


def age_range(age: Any) -> jax.Array:
    """i32[...]; the range of ages i32[...]: [2^k, 1.5 * 2^k) and [1.5 * 2^k, 2^(k + 1)) by turns."""
    age = jnp.maximum(jnp.asarray(age, jnp.int32), 1 << _LOW)
    octave = 31 - lax.clz(age)
    return 2 * (octave - _LOW) + (lax.shift_right_logical(age, octave - 1) & 1)


def age_limits() -> np.ndarray:
    """f64[NUM_AGES + 1]; the first age of each range, and the end of the last one."""
    octave, half = np.divmod(np.arange(NUM_AGES + 1), 2)
    limits = 2.0 ** (_LOW + octave) * (1 + half / 2)
    limits[0] = 0
    return limits


def class_number(hits: Any, length: Any, is_last: Any, lengths: Any) -> Any:
    """i32[K]; the classes of blocks by hits i[K] since they were stored, and their prompts' length i[K] in blocks.

    `is_last` bool[K] marks the last block of a prompt, `lengths` is that of `Densities`; all of numpy, or all of jax.
    """
    hit_range = sum((hits >= least).astype(np.int32) for least in _HITS)
    length_range = (length[:, None] >= lengths[None]).astype(np.int32).sum(-1, dtype=np.int32)
    return (hit_range * NUM_LENGTHS + length_range) * 2 + is_last.astype(np.int32)


def _class_of(blocks: Blocks, ids: jax.Array, weights: Densities) -> jax.Array:
    """i32[K]; see `by_class`. A release has the blocks of one prompt; requests that still run may hold some of them."""
    depth = pick(blocks.depth, ids)
    length = jnp.max(jnp.where(ids >= 0, depth + 1, 0))
    length = jnp.broadcast_to(length, ids.shape)
    return class_number(pick(blocks.hits, ids), length, depth + 1 == length, weights.lengths)


def _hit_density(blocks: Blocks, heads: jax.Array, weights: Densities) -> jax.Array:
    """f32[C]; see `by_class`."""
    age = blocks.clock - pick(blocks.released, heads)
    return weights.table[np.arange(NUM_CLASSES), age_range(age)]


@dataclasses.dataclass(frozen=True)
class _Begin:
    """The weights as a value, so that equal ones make equal policies."""

    lengths: tuple[int, ...]  # of `Densities`
    table: bytes  # the bytes of it

    def __call__(self, num_ids: int) -> Densities:
        """See `by_class`."""
        del num_ids
        table = np.frombuffer(self.table, np.float32).reshape(NUM_CLASSES, NUM_AGES)
        return Densities(jnp.array(self.lengths, jnp.int32), jnp.array(table))


@dataclasses.dataclass(frozen=True, eq=False)
class Learned:
    """A policy that was learned from a trace; see `learn_policy`.

    It was fitted to one trace, so hits on that trace prove nothing. A part of it that was held back is no clean test
    once anything was chosen by its hits. A second trace is one, or a seed of a generator that was not looked at.

    Attributes:
      lengths: i32[NUM_LENGTHS - 1]; see `Densities`.
      table: f32[NUM_CLASSES, NUM_AGES]; likewise.
      notes: the arguments and results of learning, in values of JSON.
    """

    lengths: np.ndarray
    table: np.ndarray
    notes: dict[str, Any]

    def __post_init__(self):
        """Raises ValueError for weights of another shape or type, or that are not finite."""
        lengths, table = np.zeros(NUM_LENGTHS - 1, np.int32), np.zeros((NUM_CLASSES, NUM_AGES), np.float32)
        for name, like in (("lengths", lengths), ("table", table)):
            value, kind = np.asarray(getattr(self, name)), f"{like.dtype}{list(like.shape)}"
            if f"{value.dtype}{list(value.shape)}" != kind or not np.all(np.isfinite(value)):
                raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}, wanted finite {kind}")

    @functools.cached_property
    def policy(self) -> EvictionPolicy:
        """Evicts the block with the lowest hit density; has these weights, and costs O(blocks touched + classes)."""
        begin = _Begin(tuple(self.lengths.tolist()), self.table.tobytes())
        return by_class(_class_of, _hit_density, classes=NUM_CLASSES, init=begin, name="learned")

    @property
    def weights(self) -> Densities:
        """Of the policy: arrays, so that caches of one program can have different ones."""
        return Densities(jnp.asarray(self.lengths), jnp.asarray(self.table))

    def state(self, num_ids: int) -> Any:
        """A `policy_state` for any other learned policy, too: those then are one program."""
        return self.policy.init(num_ids)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file of numpy, .npz."""
        with open(path, "wb") as file:
            np.savez(file, format=_FORMAT, lengths=self.lengths, table=self.table, notes=json.dumps(self.notes))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Learned:
        """The densities that `save` has written.

        Raises:
          ValueError: for a file that it has not written.
        """
        try:
            with np.load(path) as file:
                saved = {name: file[name] for name in ("format", "lengths", "table", "notes")}
        except (KeyError, ValueError, EOFError) as error:
            raise ValueError(f"{os.fspath(path)}: got no learned policy, wanted what Learned.save writes") from error
        if saved["format"] != _FORMAT:
            raise ValueError(f"{os.fspath(path)}: got {saved['format']}, wanted {_FORMAT}")
        return cls(saved["lengths"], saved["table"], json.loads(str(saved["notes"])))
