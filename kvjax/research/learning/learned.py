# SPDX-License-Identifier: Apache-2.0
"""A learned policy: it evicts the block with the lowest expected hit density (hits per block and time).

The hit density of a cached block depends on its class when it was released, and on its age since then. Both have few
values, so that all hit densities are one small table:

    class    hits so far (0, 1, 2-3, more) x blocks of its prompt (8 ranges) x whether it is the last one
    age      releases and publications since (`Blocks.clock`), two ranges an octave

`learn_policy` fills the table from a trace: it fits the probability that blocks of a class are used again at an age.

The classes, the ranges of ages and the constants below were chosen by hits in later parts of the first half of
Mooncake's conversation trace (learned from its first 2,400 to 4,800 requests). Its other half was looked at too. No
part of it is a clean test.
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
_HITS = (1, 2, 4)  # the least hits of each range but the first
# The range of hits, the range of lengths, and whether it is a last block, of each class.
CLASSES = tuple(np.ndindex(len(_HITS) + 1, NUM_LENGTHS, 2))
NUM_CLASSES = len(CLASSES)
_LOW = 5  # ages below 1.5 * 2^_LOW are one range
NUM_AGES = 2 * (31 - _LOW)
_FORMAT = "kvjax densities 1"
_MEMBER_BYTES = 1 << 24  # the most of an array in a file

# Of the fit.
Hazard = Literal["mlp", "counted"]
_NETS, _HIDDEN = 4, 16
_STEPS, _PATIENCE = 1000, 150
_RATE, _DECAY = 0.02, 0.03
_HELD_OUT = 1 / 3  # of the requests, to choose the number of steps by


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
          ValueError: for a file that it has not written, or that is damaged.
          OSError: for a file that cannot be opened.
        """
        with open_regular(path, "rb") as file:
            try:
                saved = _arrays_of(file)
                found = str(saved["format"])
                if found == _FORMAT:
                    return cls(saved["lengths"], saved["table"], _notes_of(saved["notes"]))
            except Exception as error:  # whatever zipfile, zlib, numpy and json raise
                message = f"{os.fspath(path)}: got no learned policy, wanted what Learned.save writes ({error})"
                raise ValueError(message) from error
        raise ValueError(f"{os.fspath(path)}: got {found:.80}, wanted {_FORMAT}")


def _arrays_of(file: IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays that `Learned.save` writes, none of which may be large."""
    arrays = {}
    with zipfile.ZipFile(file) as members:
        for name in ("format", "lengths", "table", "notes"):
            member = members.getinfo(f"{name}.npy")
            if member.file_size > _MEMBER_BYTES:
                raise ValueError(f"{name} of {member.file_size} bytes, wanted at most {_MEMBER_BYTES}")
            arrays[name] = np.lib.format.read_array(io.BytesIO(members.read(member)), allow_pickle=False)
    return arrays


def _notes_of(text: np.ndarray) -> dict[str, Any]:
    notes = json.loads(str(text))
    if not isinstance(notes, dict):
        raise ValueError(f"notes: got {notes!r:.80}, wanted an object")
    return notes


def learn_policy(trace: Trace, *, rule: Rule = "full", seed: int = 0, hazard: Hazard = "mlp") -> Learned:
    """Learns from a trace which blocks to evict.

    It learns the hazard: the probability that a block is used again at some age, given its class when it was released.
    It is the mean of small networks that are fitted to the reuse of all blocks of the trace. The number of steps is the
    one with the best likelihood of the last third of the trace, which a first fit does not see. The hazard gives the
    hit density of each class at each age, and the policy evicts the block with the lowest.

    It takes no size: one policy serves caches of all sizes. Features are those of a cache that throws nothing out. Ages
    and lengths count blocks, so the cache's blocks should have as many tokens as the trace's.

    A comparison on this trace proves nothing; see `Learned` for a clean test.

    Args:
      trace: of at least two requests, whose blocks come back, in part.
      rule: what counts as a hit; see `RULES`.
      seed: of the networks' first weights; equal arguments give equal policies.
      hazard: "mlp", or "counted": the share of blocks that were used again, with nothing fitted.

    Returns:
      The policy and its weights, f32[NUM_CLASSES, NUM_AGES].

    Raises:
      ImportError: without optax, for "mlp".
      ValueError: for a rule or a hazard that does not exist; for a trace in which nothing can be learned.

    Source: Beckmann et al. 2018 (LHD) for hit density, which is counted there; the hazard of censored lives by a
      network as in Gensheimer and Narasimhan 2019 (Nnet-survival).
    """
    if hazard not in ("mlp", "counted"):
        raise ValueError(f'hazard: got {hazard!r}, wanted "mlp" or "counted"')
    all_releases, number = releases(trace, rule), len(trace)
    whole = count(all_releases, 0, number)
    if not whole.used.any():
        raise ValueError(f"trace: got {number} requests that use no block again, wanted some that do")
    notes: dict[str, Any] = {
        "block_size": trace.block_size,
        "hazard": hazard,
        "requests": number,
        "rule": rule,
        "seed": seed,
    }
    if hazard == "counted":
        share = counted(whole)
    else:
        middle = number - int(number * _HELD_OUT)
        seen, held_out = count(all_releases, 0, middle), count(all_releases, middle, number)
        share, fit_notes = _fitted(whole, seen, held_out, seed)
        notes |= fit_notes
    oldest = int(np.flatnonzero(whole.seen.any(axis=0))[-1])
    share[:, oldest + 1 :] = share[:, oldest : oldest + 1]  # ages that the trace is too short for
    return Learned(all_releases.lengths, density(share).astype(np.float32), notes)


class Releases(NamedTuple):
    """The release of each block by each request, in a cache that throws nothing out."""

    request: np.ndarray  # i32[K]; the request that releases it
    classes: np.ndarray  # i32[K]; its class then
    released: np.ndarray  # i64[K]; the clock then, which counts releases and publications, as `Blocks.clock` does
    used: np.ndarray  # i64[K]; the clock when the next request uses it, or at the end
    again: np.ndarray  # bool[K]; whether one does
    start: np.ndarray  # i64[R + 1]; the clock when each request comes, and at the end
    lengths: np.ndarray  # i32[NUM_LENGTHS - 1]; see `Densities`


class Counts(NamedTuple):
    """Counts of each class at each age."""

    used: np.ndarray  # f64[NUM_CLASSES, NUM_AGES]; blocks that were used again at that age
    # f64[NUM_CLASSES, NUM_AGES]; blocks that became as old as that, those half that the trace leaves there
    seen: np.ndarray


def releases(trace: Trace, rule: Rule) -> Releases:
    """All releases of a trace. Prompts are divided into ranges of lengths that are equally frequent."""
    check_rule(rule)
    stored, request, depth = num_cached(trace, rule), trace.owners, trace.depths
    is_stored = depth < stored[request]
    request, depth, ids = request[is_stored], depth[is_stored], trace.ids[is_stored]
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
    """Counts of the releases of requests first..last-1, until the last of them is over."""
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
    """f64[NUM_CLASSES, NUM_AGES]; the share of blocks that are used again at an age, of those that become as old.

    To the blocks of each class it adds `prior` blocks of all classes together.
    """
    together = counts.used.sum(axis=0) / np.maximum(counts.seen.sum(axis=0), 1)
    return (counts.used + prior * together) / (counts.seen + prior)


def density(hazard: np.ndarray) -> np.ndarray:
    """f64[C, NUM_AGES]; the expected hits per block and time of a block, by its hazard f64[C, NUM_AGES]; see `counted`.

    A block of some age that stays until it is used again, or else until a later age, yields a share of a hit and takes
    a block for some time. Its hit density is the most of hits over time that any later age gives. It is the Gittins
    index of a block that is evicted for good at that age.

    Source: LHD's hit density (Beckmann et al. 2018), whose horizon is one for all; Gittins 1979.
    """
    hazard = np.minimum(hazard, 1 - 1e-6)  # some always stay: the share that is left never becomes 0
    left = np.cumprod(1 - hazard, axis=1)
    left = np.concatenate([np.ones((len(hazard), 1)), left[:, :-1]], axis=1)
    hits, time = left * hazard, left * np.diff(age_limits()) * (1 - hazard / 2)
    best = np.empty_like(hazard)
    for age in range(NUM_AGES):
        best[:, age] = np.max(np.cumsum(hits[:, age:], axis=1) / np.cumsum(time[:, age:], axis=1), axis=1)
    return best


def _fitted(whole: Counts, seen: Counts, held_out: Counts, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """The hazard f64[NUM_CLASSES, NUM_AGES], and notes on the fit."""
    fit = _program()
    keys = jax.random.split(jax.random.key(seed), _NETS)
    features = _features()
    as_floats = lambda counts: [jnp.asarray(each, jnp.float32) for each in counts]  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to a number of steps
        _, least, best = fit(*features, as_floats(seen), as_floats(held_out), _STEPS, _PATIENCE, keys)
        share, _, _ = fit(*features, as_floats(whole), as_floats(held_out), best, _STEPS, keys)
    return np.asarray(share, np.float64), {"steps": int(best), "held_out_loss": float(least)}


def _features() -> tuple[np.ndarray, np.ndarray]:
    """f32[NUM_CLASSES, F] and f32[NUM_AGES, G]; the features of a class and of an age."""
    ranges = [sorted(set(values)) for values in zip(*CLASSES, strict=True)]
    one_hot = [[one == value for one, values in zip(own, ranges, strict=True) for value in values] for own in CLASSES]
    age = np.linspace(-1, 1, NUM_AGES)[:, None]
    waves = [wave(np.pi * times * age / 2) for times, wave in itertools.product((1, 2, 4), (np.sin, np.cos))]
    return np.array(one_hot, np.float32), np.concatenate([age, *waves], axis=1).astype(np.float32)


@functools.cache
def _program():
    """The fit as one compiled program; see `fit` in it."""
    try:
        import optax
    except ImportError as error:
        raise ImportError('learn_policy needs optax: pip install "kvjax[learn]"') from error
    optimizer = optax.adamw(_RATE, weight_decay=_DECAY)

    def one(params, classes: jax.Array, ages: jax.Array) -> jax.Array:
        """f32[C, A]; the logits of one network. Its first layer is a sum over a class and an age."""
        hidden = jnp.tanh((classes @ params["class"])[:, None] + (ages @ params["age"])[None] + params["bias"])
        return hidden @ params["out"] + params["level"]

    def begin(key: jax.Array, width: tuple[int, int], level: jax.Array):
        of_class, of_age, out = jax.random.split(key, 3)
        normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32)  # noqa: E731
        return {
            "class": normal(of_class, width[0], _HIDDEN) / 2,
            "age": normal(of_age, width[1], _HIDDEN) / 2,
            "bias": jnp.zeros((1, 1, _HIDDEN), jnp.float32),
            "out": normal(out, _HIDDEN) / 10,
            "level": level,
        }

    def loss(logit: jax.Array, counts: list[jax.Array]) -> jax.Array:
        """The mean of -log likelihood of the counts, as if blocks were independent."""
        used, seen = counts
        each = used * jax.nn.log_sigmoid(logit) + (seen - used) * jax.nn.log_sigmoid(-logit)
        return -jnp.sum(each) / jnp.maximum(jnp.sum(seen), 1)

    @jax.jit
    def fit(classes, ages, counts, held_out, most, patience, keys):
        """Takes up to `most` steps, and ends if the loss of held_out has not become less for `patience` steps.

        Returns:
          f32[C, A], the mean hazard of the networks; f32[], the least loss of held_out; i32[], the step that gave it.
        """
        rate = jnp.maximum(jnp.sum(counts[0]) / jnp.maximum(jnp.sum(counts[1]), 1), 1e-6)
        level = jnp.log(rate) - jnp.log1p(-rate)
        params = jax.vmap(lambda key: begin(key, (classes.shape[1], ages.shape[1]), level))(keys)
        logits = lambda params: jax.vmap(lambda own: one(own, classes, ages))(params)  # noqa: E731
        total = lambda params: jnp.sum(jax.vmap(lambda logit: loss(logit, counts))(logits(params)))  # noqa: E731
        mean = lambda params: jnp.mean(jax.nn.sigmoid(logits(params)), axis=0)  # noqa: E731

        def step(carry):
            params, state, number, least, best = carry
            updates, state = optimizer.update(jax.grad(total)(params), state, params)
            params, share = optax.apply_updates(params, updates), mean(params)
            own = loss(jnp.log(share) - jnp.log1p(-share), held_out)  # of the step before
            best = jnp.where(own < least, number, best)
            return params, state, number + 1, jnp.minimum(own, least), best

        going = lambda carry: (carry[2] < most) & (carry[2] - carry[4] < patience)  # noqa: E731
        start = (params, optimizer.init(params), jnp.int32(0), jnp.float32(jnp.inf), jnp.int32(0))
        params, _, _, least, best = jax.lax.while_loop(going, step, start)
        return mean(params), least, best

    return fit
