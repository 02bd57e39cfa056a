# SPDX-License-Identifier: Apache-2.0
"""A learned policy: it evicts the block with the lowest expected hit density (hits per block and time).

The hit density of a cached block depends on its class at its release, and on its age since then. Both have few values,
so all hit densities fit a small table:

    class    hits so far (0, 1, 2-3, more) x blocks of its prompt (8 ranges) x whether it is the prompt's last block
    age      releases and publications since (`Blocks.clock`), two ranges an octave

`learn_policy` fills the table from a trace: it fits the probability of reuse for blocks of a class at an age.

The classes, the ranges of ages and the constants below were chosen by hits in later parts of the first half of
Mooncake's conversation trace, after learning from its first 2,400 to 4,800 requests. We also looked at the second half,
so no part of this trace is a clean test.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import os
import zipfile
from typing import IO, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._arrays import pick
from kvjax._files import open_regular
from kvjax.policies.classes import by_class
from kvjax.research.simulators.hits import Rule, check_rule, num_cached
from kvjax.research.traces.trace import Trace, next_uses
from kvjax.state import Blocks, EvictionPolicy

NUM_LENGTHS = 8
_HITS = (1, 2, 4)  # the minimum hits of each range except the first
# The range of hits, the range of lengths, and whether it is a last block, for each class.
CLASSES = tuple(np.ndindex(len(_HITS) + 1, NUM_LENGTHS, 2))
NUM_CLASSES = len(CLASSES)
_LOW = 5  # ages below 1.5 * 2^_LOW are a single range
NUM_AGES = 2 * (31 - _LOW)
_FORMAT = "kvjax densities 1"
_MEMBER_BYTES = 1 << 24  # limit of an array in a file

# Parameters of the fit.
Hazard = Literal["mlp", "counted"]
_NETS = 4
_HIDDEN = 16
_STEPS = 1000
_PATIENCE = 150
_RATE = 0.02
_DECAY = 0.03
_HELD_OUT = 1 / 3  # share of the requests used to choose the number of steps


class Densities(NamedTuple):
    """Learned hit densities."""

    lengths: jax.Array  # i32[NUM_LENGTHS - 1]; the minimum blocks of a prompt for each range of lengths but the first
    table: jax.Array  # f32[NUM_CLASSES, NUM_AGES]; expected hits per block and tick of the clock


def age_range(age: Any) -> jax.Array:
    """i32[...]; the range of ages i32[...]: [2^k, 1.5 * 2^k) and [1.5 * 2^k, 2^(k + 1)) alternate."""
    age = jnp.maximum(jnp.asarray(age, jnp.int32), 1 << _LOW)
    octave = 31 - lax.clz(age)
    return 2 * (octave - _LOW) + (lax.shift_right_logical(age, octave - 1) & 1)


def age_limits() -> np.ndarray:
    """f64[NUM_AGES + 1]; the first age of each range, and the end of the last range."""
    octave, half = np.divmod(np.arange(NUM_AGES + 1), 2)
    limits = 2.0 ** (_LOW + octave) * (1 + half / 2)
    limits[0] = 0
    return limits


def class_number(hits: Any, length: Any, is_last: Any, lengths: Any) -> Any:
    """i32[K]; the classes of blocks, by hits i[K] since they were stored and their prompts' length i[K] in blocks.

    `is_last` bool[K] marks the last block of a prompt, and `lengths` is from `Densities`. All arguments are arrays of
    numpy, or all are arrays of jax.
    """
    hit_range = sum((hits >= minimum).astype(np.int32) for minimum in _HITS)
    length_range = (length[:, None] >= lengths[None]).astype(np.int32).sum(-1, dtype=np.int32)
    return (hit_range * NUM_LENGTHS + length_range) * 2 + is_last.astype(np.int32)


def _class_of(blocks: Blocks, ids: jax.Array, weights: Densities) -> jax.Array:
    """i32[K]; see `by_class`. A release has the blocks of a single prompt, without blocks held by running requests."""
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
    """The weights as a hashable value, so equal weights make equal policies."""

    lengths: tuple[int, ...]  # the lengths of `Densities`
    table: bytes  # the bytes of its table

    def __call__(self, num_ids: int) -> Densities:
        """See `by_class`."""
        del num_ids
        table = np.frombuffer(self.table, np.float32).reshape(NUM_CLASSES, NUM_AGES)
        return Densities(jnp.array(self.lengths, jnp.int32), jnp.array(table))


@dataclasses.dataclass(frozen=True, eq=False)
class Learned:
    """A policy learned from a trace. See `learn_policy`.

    It was fitted to this trace, so hits on the trace prove nothing. A part of the trace is not a clean test either, if
    you have chosen anything by its hits. A second trace is a clean test, and so is a new seed of a generator.

    Attributes:
      lengths: i32[NUM_LENGTHS - 1]; limits of the ranges of lengths, see `Densities`.
      table: f32[NUM_CLASSES, NUM_AGES]; hit densities, see `Densities`.
      notes: the arguments and results of learning, as values of JSON.
    """

    lengths: np.ndarray
    table: np.ndarray
    notes: dict[str, Any]

    def __post_init__(self):
        """Refuses weights of another shape or dtype, and infinite weights, with a ValueError."""
        lengths = np.zeros(NUM_LENGTHS - 1, np.int32)
        table = np.zeros((NUM_CLASSES, NUM_AGES), np.float32)
        for name, like in (("lengths", lengths), ("table", table)):
            value = np.asarray(getattr(self, name))
            kind = f"{like.dtype}{list(like.shape)}"
            if f"{value.dtype}{list(value.shape)}" != kind or not np.all(np.isfinite(value)):
                raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}, wanted finite {kind}")

    @functools.cached_property
    def policy(self) -> EvictionPolicy:
        """The policy with these weights: evicts the lowest hit density. Costs O(blocks touched + classes)."""
        begin = _Begin(tuple(self.lengths.tolist()), self.table.tobytes())
        return by_class(_class_of, _hit_density, classes=NUM_CLASSES, init=begin, name="learned")

    @property
    def weights(self) -> Densities:
        """The policy's weights as arrays, so caches of the same program can have different weights."""
        return Densities(jnp.asarray(self.lengths), jnp.asarray(self.table))

    def state(self, num_ids: int) -> Any:
        """A `policy_state` that fits any learned policy, so all of them can share a program."""
        return self.policy.init(num_ids)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file of numpy, .npz."""
        with open(path, "wb") as file:
            np.savez(file, format=_FORMAT, lengths=self.lengths, table=self.table, notes=json.dumps(self.notes))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Learned:
        """Reads the densities written by `save`.

        Raises:
          ValueError: for another or a damaged file.
          OSError: for a file that cannot be opened.
        """
        with open_regular(path, "rb") as file:
            try:
                saved = _arrays_of(file)
                file_format = str(saved["format"])
                if file_format == _FORMAT:
                    return cls(saved["lengths"], saved["table"], _notes_of(saved["notes"]))
            except Exception as error:  # any error of zipfile, zlib, numpy and json
                message = f"{os.fspath(path)}: got no learned policy, wanted a file of Learned.save ({error})"
                raise ValueError(message) from error
        raise ValueError(f"{os.fspath(path)}: got {file_format:.80}, wanted {_FORMAT}")


def _arrays_of(file: IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays written by `Learned.save`, if none is too large."""
    arrays = {}
    with zipfile.ZipFile(file) as members:
        for name in ("format", "lengths", "table", "notes"):
            member = members.getinfo(f"{name}.npy")
            if member.file_size > _MEMBER_BYTES:
                raise ValueError(f"{name}: got {member.file_size} bytes, wanted at most {_MEMBER_BYTES}")
            arrays[name] = np.lib.format.read_array(io.BytesIO(members.read(member)), allow_pickle=False)
    return arrays


def _notes_of(text: np.ndarray) -> dict[str, Any]:
    notes = json.loads(str(text))
    if not isinstance(notes, dict):
        raise ValueError(f"notes: got {notes!r:.80}, wanted an object")
    return notes


def learn_policy(trace: Trace, *, rule: Rule = "full", seed: int = 0, hazard: Hazard = "mlp") -> Learned:
    """Learns from a trace which blocks to evict.

    It learns the hazard: the probability that a block is reused at some age, given its class at its release. The hazard
    is the mean of small networks, fitted to the reuse of all blocks of the trace. A first fit leaves out the last third
    of the trace, and chooses the number of steps with the best likelihood there. The hazard gives the hit density of
    each class at each age, and the policy evicts the block with the lowest hit density.

    A single policy serves caches of all sizes. Its features are computed for an unbounded cache. Ages and lengths count
    blocks, so the cache's blocks should have as many tokens as the trace's.

    A comparison on this trace proves nothing. See `Learned` for a clean test.

    Args:
      trace: a trace of at least two requests, with reused blocks.
      rule: the rule of hits; see `RULES`.
      seed: the seed of the networks' first weights; equal arguments give equal policies.
      hazard: "mlp", or "counted" for the share of reused blocks, without a fit.

    Returns:
      The policy and its weights, f32[NUM_CLASSES, NUM_AGES].

    Raises:
      ImportError: without optax, for "mlp".
      ValueError: for an unknown rule or hazard, or a trace without reuse.

    Source: Beckmann et al. 2018 (LHD) for hit density, which is counted there; the hazard of censored lives by a
      network as in Gensheimer and Narasimhan 2019 (Nnet-survival).
    """
    if hazard not in ("mlp", "counted"):
        raise ValueError(f'hazard: got {hazard!r}, wanted "mlp" or "counted"')
    all_releases = releases(trace, rule)
    num_requests = len(trace)
    whole_counts = count(all_releases, 0, num_requests)
    if not whole_counts.used.any():
        raise ValueError(f"trace: got {num_requests} requests without a reused block, wanted some reuse")
    notes: dict[str, Any] = {
        "block_size": trace.block_size,
        "hazard": hazard,
        "requests": num_requests,
        "rule": rule,
        "seed": seed,
    }
    if hazard == "counted":
        share = counted(whole_counts)
    else:
        middle = num_requests - int(num_requests * _HELD_OUT)
        seen = count(all_releases, 0, middle)
        held_out = count(all_releases, middle, num_requests)
        share, fit_notes = _fitted(whole_counts, seen, held_out, seed)
        notes |= fit_notes
    oldest = int(np.flatnonzero(whole_counts.seen.any(axis=0))[-1])
    share[:, oldest + 1 :] = share[:, oldest : oldest + 1]  # the trace is too short for these ages
    return Learned(all_releases.lengths, density(share).astype(np.float32), notes)


class Releases(NamedTuple):
    """The release of each block by each request, in an unbounded cache."""

    request: np.ndarray  # i32[K]; the releasing request
    classes: np.ndarray  # i32[K]; the block's class at the release
    released: np.ndarray  # i64[K]; the clock at the release, which counts releases and publications like `Blocks.clock`
    used: np.ndarray  # i64[K]; the clock at the next use, or at the end
    again: np.ndarray  # bool[K]; whether there is a next use
    start: np.ndarray  # i64[R + 1]; the clock at the beginning of each request, and at the end
    lengths: np.ndarray  # i32[NUM_LENGTHS - 1]; see `Densities`


class Counts(NamedTuple):
    """Counts of each class at each age."""

    used: np.ndarray  # f64[NUM_CLASSES, NUM_AGES]; blocks reused at that age
    # f64[NUM_CLASSES, NUM_AGES]; blocks that reached this age. If the trace ends at this age, a block counts half
    seen: np.ndarray


def releases(trace: Trace, rule: Rule) -> Releases:
    """All releases of a trace. The ranges of lengths have equal numbers of prompts."""
    check_rule(rule)
    stored = num_cached(trace, rule)
    is_stored = trace.depths < stored[trace.owners]
    request = trace.owners[is_stored]
    depth = trace.depths[is_stored]
    ids = trace.ids[is_stored]
    following = next_uses(ids)
    again = following >= 0
    order = np.argsort(ids, kind="stable")
    first = np.flatnonzero(np.diff(ids[order], prepend=-1))
    hits = np.empty(len(ids), np.int64)  # uses before this one
    hits[order] = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))
    new = np.bincount(request[hits == 0], minlength=len(trace))
    start = np.concatenate([[0], np.cumsum(new + stored)])
    released = start[request] + new[request] + stored[request] - 1 - depth
    used = np.where(again, start[request[following]], start[-1])
    cuts = np.arange(1, NUM_LENGTHS) / NUM_LENGTHS
    lengths = np.ceil(np.quantile(stored, cuts)).astype(np.int32) if len(trace) else np.zeros(len(cuts), np.int32)
    length = stored[request]
    classes = class_number(hits, length, depth + 1 == length, lengths)
    return Releases(request, classes, released, used, again, start, lengths)


def count(all_releases: Releases, first: int, last: int) -> Counts:
    """Counts of the releases of requests first..last-1, up to the end of the last request."""
    chosen = (all_releases.request >= first) & (all_releases.request < last)
    end = all_releases.start[last]
    again = all_releases.again[chosen] & (all_releases.used[chosen] < end)
    age = np.minimum(all_releases.used[chosen], end) - all_releases.released[chosen]
    cell = all_releases.classes[chosen] * NUM_AGES + np.asarray(age_range(np.minimum(age, 2**31 - 1)))
    table = lambda weights: np.bincount(cell, weights, len(CLASSES) * NUM_AGES).reshape(-1, NUM_AGES)  # noqa: E731
    ended = table(np.ones(len(cell)))
    later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    return Counts(table(again * 1.0), later + table(np.where(again, 1.0, 0.5)))


def counted(counts: Counts, prior: float = 20.0) -> np.ndarray:
    """f64[NUM_CLASSES, NUM_AGES]; the share of blocks reused at an age among the blocks of this age.

    `prior` is a number of average blocks added to the blocks of each class.
    """
    average = counts.used.sum(axis=0) / np.maximum(counts.seen.sum(axis=0), 1)
    return (counts.used + prior * average) / (counts.seen + prior)


def density(hazard: np.ndarray) -> np.ndarray:
    """f64[C, NUM_AGES]; the expected hits per block and time of a block, from its hazard f64[C, NUM_AGES].

    Suppose a block of some age stays until it is reused, but not beyond a later age. It then yields an expected number
    of hits, and takes space for an expected time. The hit density is the maximum of hits divided by time over all later
    ages. It is the Gittins index of a block that is evicted at that age. `counted` describes the hazard.

    Source: LHD's hit density (Beckmann et al. 2018), which has the same horizon for all blocks; Gittins 1979.
    """
    hazard = np.minimum(hazard, 1 - 1e-6)  # some blocks always stay, so the remaining share never becomes 0
    remaining = np.cumprod(1 - hazard, axis=1)
    remaining = np.concatenate([np.ones((len(hazard), 1)), remaining[:, :-1]], axis=1)
    hits = remaining * hazard
    time = remaining * np.diff(age_limits()) * (1 - hazard / 2)
    best = np.empty_like(hazard)
    for age in range(NUM_AGES):
        best[:, age] = np.max(np.cumsum(hits[:, age:], axis=1) / np.cumsum(time[:, age:], axis=1), axis=1)
    return best


def _fitted(whole_counts: Counts, seen: Counts, held_out: Counts, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """The hazard f64[NUM_CLASSES, NUM_AGES], and notes on the fit."""
    fit = _program()
    keys = jax.random.split(jax.random.key(seed), _NETS)
    features = _features()
    as_floats = lambda counts: [jnp.asarray(values, jnp.float32) for values in counts]  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to a number of steps
        _, lowest_loss, best_step = fit(*features, as_floats(seen), as_floats(held_out), _STEPS, _PATIENCE, keys)
        share, _, _ = fit(*features, as_floats(whole_counts), as_floats(held_out), best_step, _STEPS, keys)
    return np.asarray(share, np.float64), {"steps": int(best_step), "held_out_loss": float(lowest_loss)}


def _features() -> tuple[np.ndarray, np.ndarray]:
    """The features of a class, f32[NUM_CLASSES, F], and of an age, f32[NUM_AGES, G]."""
    ranges = [sorted(set(values)) for values in zip(*CLASSES, strict=True)]
    one_hot = [
        [value == candidate for value, values in zip(label, ranges, strict=True) for candidate in values]
        for label in CLASSES
    ]
    age = np.linspace(-1, 1, NUM_AGES)[:, None]
    waves = [wave(np.pi * times * age / 2) for times, wave in itertools.product((1, 2, 4), (np.sin, np.cos))]
    return np.array(one_hot, np.float32), np.concatenate([age, *waves], axis=1).astype(np.float32)


@functools.cache
def _program():
    """The fit as a compiled program. See its function `fit`."""
    try:
        import optax
    except ImportError as error:
        raise ImportError('learn_policy needs optax: pip install "kvjax[learn]"') from error
    optimizer = optax.adamw(_RATE, weight_decay=_DECAY)

    def logits_of(params, classes: jax.Array, ages: jax.Array) -> jax.Array:
        """f32[C, A]; the logits of a network. Its first layer is a sum over a class and an age."""
        hidden = jnp.tanh((classes @ params["class"])[:, None] + (ages @ params["age"])[None] + params["bias"])
        return hidden @ params["out"] + params["level"]

    def begin(key: jax.Array, width: tuple[int, int], level: jax.Array):
        class_key, age_key, out_key = jax.random.split(key, 3)
        normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32)  # noqa: E731
        return {
            "class": normal(class_key, width[0], _HIDDEN) / 2,
            "age": normal(age_key, width[1], _HIDDEN) / 2,
            "bias": jnp.zeros((1, 1, _HIDDEN), jnp.float32),
            "out": normal(out_key, _HIDDEN) / 10,
            "level": level,
        }

    def loss(logit: jax.Array, counts: list[jax.Array]) -> jax.Array:
        """The mean negative log-likelihood of the counts, as if blocks were independent."""
        used, seen = counts
        likelihood = used * jax.nn.log_sigmoid(logit) + (seen - used) * jax.nn.log_sigmoid(-logit)
        return -jnp.sum(likelihood) / jnp.maximum(jnp.sum(seen), 1)

    @jax.jit
    def fit(classes, ages, counts, held_out, max_steps, patience, keys):
        """Takes up to `max_steps` steps. Ends after `patience` steps without a lower loss of held_out.

        Returns:
          f32[C, A], the mean hazard of the networks, f32[], the lowest loss of held_out, and i32[], its step.
        """
        rate = jnp.maximum(jnp.sum(counts[0]) / jnp.maximum(jnp.sum(counts[1]), 1), 1e-6)
        level = jnp.log(rate) - jnp.log1p(-rate)
        params = jax.vmap(lambda key: begin(key, (classes.shape[1], ages.shape[1]), level))(keys)
        logits = lambda params: jax.vmap(lambda network: logits_of(network, classes, ages))(params)  # noqa: E731
        total = lambda params: jnp.sum(jax.vmap(lambda logit: loss(logit, counts))(logits(params)))  # noqa: E731
        mean = lambda params: jnp.mean(jax.nn.sigmoid(logits(params)), axis=0)  # noqa: E731

        def step(carry):
            params, state, num_steps, lowest_loss, best_step = carry
            updates, state = optimizer.update(jax.grad(total)(params), state, params)
            share = mean(params)  # before the step
            params = optax.apply_updates(params, updates)
            held_out_loss = loss(jnp.log(share) - jnp.log1p(-share), held_out)
            best_step = jnp.where(held_out_loss < lowest_loss, num_steps, best_step)
            return params, state, num_steps + 1, jnp.minimum(held_out_loss, lowest_loss), best_step

        is_running = lambda carry: (carry[2] < max_steps) & (carry[2] - carry[4] < patience)  # noqa: E731
        start = (params, optimizer.init(params), jnp.int32(0), jnp.float32(jnp.inf), jnp.int32(0))
        params, _, _, lowest_loss, best_step = jax.lax.while_loop(is_running, step, start)
        return mean(params), lowest_loss, best_step

    return fit
