# SPDX-License-Identifier: Apache-2.0
"""A cache whose K/V identify their tokens: random histories, with a comparison of every readable byte.

The K/V of a token are a hash of (namespace, all tokens up to it, layer, K or V). A namespace belongs to a tenant and a
version of the weights: rows in flight keep their version when there are new weights. After every step

- each slot of a row's written tokens, if the row's view or its blocks on the host have it, holds the row's own K/V;
- each findable block of every group, on both tiers, holds the K/V of its path;
- in recurrent layers, each row's snapshot and each findable snapshot is the name of its text;
- each block reserved for K/V from outside belongs to no one else, and holds the K/V written so far;
- no findable block holds K/V that a row computed after a hole. Their names differ from the names of their text;
- `check` passes, and the events give the index;

and everything else may be overwritten with NaN, since nothing may read it.

    python -m tests.oracle.bytes_machine host --seed 3 --steps 2000  # cuts a failure down to the requests it takes
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import Cache, CacheSpec, Status
from kvjax._arrays import Pytree
from kvjax.policies import lfu, priority
from kvjax.pools import Pools
from kvjax.pools import host as host_pool
from kvjax.serving import Scheduler, cancel, init_serving, park, results, rollout_log, serve, submit, unpark
from kvjax.serving.preempt import retire
from kvjax.state import NO_BLOCK, EvictionPolicy
from kvjax.stores import Adopted, Staged, scatter
from kvjax.testing.expected import MAX_TOKENS
from kvjax.testing.requests import Draws
from kvjax.testing.trial import verify_order
from kvjax.tiers import FailedTransfer, TieredCache
from pallas_kernels import lowering_for
from pallas_kernels.by_token import blocks_by_head, blocks_by_token, head_shape, token_rows
from pallas_kernels.loops import scan, varying
from tests import cases, drive
from tests.drafters import Guesses
from tests.drive import BOTH
from tests.oracle import draws

SIZE, ROWS, WIDTH, VOCAB, TENANTS = 4, 3, 16, 3, 2
VERSIONS = 50  # of the weights, at most
TWO = ((None, 0), (None, 0))  # layers of full attention
RECURRENT, LATENT, WIDEST = "recurrent", "latent", 3  # layers of a configuration; tokens of tiles, fewer than a block's
AT_ONCE, NAMED, EMPTIED = 2, 4, 4  # rows of admit, blocks of offload, of watermark
LEAVE = 6  # blocks of evict and forget_namespaces, where that is stated
READERS = (*cases.VIEWS, "lookup")  # they change nothing

Path = tuple[Any, ...]
Request = dict[str, Any]


# The K/V of a token.

PRIME = 65_521  # below 2^16, so that products stay below 2^31 and float32 holds it exactly


def advance(name: Any, token: Any, extra: Any = 0) -> Any:
    """The name i32[...] of a prefix with a further token."""
    return (name * 26_861 + token * 7_919 + extra * 104_729 + 1) % PRIME


@functools.cache
def name_of(namespace: int, path: Path) -> int:
    """The name of a path, 0..PRIME-1. An item is a token, or a token and its extra id."""
    if not path:
        return (namespace + 1) * 40_503 % PRIME
    token, extra = path[-1] if isinstance(path[-1], tuple) else (path[-1], 0)
    return advance(name_of(namespace, path[:-1]), token, extra)


def vectors(names: Any, layers: int, xp: Any = np) -> Any:
    """f32[..., L, 2, 2]: K and V of the tokens with these names i32[...], of width 2, exact in int8 too."""
    salt = xp.arange(2 * layers, dtype=xp.int32).reshape((1,) * names.ndim + (layers, 2)) * 4_001
    number = (names[..., None, None] + salt) % PRIME + 1
    large, part = number.astype(xp.float32), (number % 255 - 127).astype(xp.float32)
    return xp.stack([large, large * part / 127], axis=-1)


def values_of(names: Any, before: Any, layers: tuple[Any, ...], xp: Any = np) -> Any:
    """f32[..., L, 2, 2]; K and V of each layer. A recurrent layer has the states before and after the tokens.

    Each is a name and 1. `before` i32[...] has 0 before a text's first token.
    """
    found, states = vectors(names, len(layers), xp), xp.stack([before, names + 1], axis=-1).astype(xp.float32)
    states = xp.stack([states, states], axis=-1)
    each = [states if layer == RECURRENT else found[..., at, :, :] for at, layer in enumerate(layers)]
    return xp.stack(each, axis=-3)


def cell(states: dict[str, jax.Array], inputs: jax.Array, count: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A recurrent layer. Its state is the name of the text, or NaN if it began with the wrong name."""
    signs = signs_of(states["name"].shape[1])[None, :, 0]

    def step(state, at):
        before, after = (inputs[:, at, which, None] * signs for which in (0, 1))
        new = jnp.where(state == before, after, jnp.nan)
        state = jnp.where((at < count)[:, None], new, state)
        return state, state

    state, outputs = jax.lax.scan(step, states["name"], jnp.arange(inputs.shape[1], dtype=jnp.int32))
    return jnp.moveaxis(outputs, 0, 1), {"name": state}


def named(vector: Any, xp: Any = np) -> Any:
    """i32[...]: the names of keys f32[..., 2] of layer 0."""
    return xp.rint(vector[..., 0]).astype(xp.int32) - 1


class Constant(Pytree):
    """A model with constant K/V: values f32[S, C, L, 2, D]."""

    values: jax.Array

    def __call__(self, tokens, pools, view, *, last):
        del last
        return jnp.zeros((tokens.shape[0], VOCAB)), write(pools, view, self.values)


class Chain(Pytree, static=("layers",)):
    """A model which computes the next names from the names in the cache, and wrong names if it sees a NaN.

    Attributes:
      roots: i32[V]: the name before a prompt's first token, by this token, since a model does not know its tenants.
      layers: static: layers of the configuration.
    """

    roots: jax.Array
    layers: tuple[Any, ...]

    def __call__(self, tokens, pools, view, *, last):
        first = jnp.where(view.num_tokens > 0, view.lengths - view.num_tokens, 0)
        padded = view.starts is None
        opening = tokens[:, 0] if padded else tokens[0, jnp.minimum(view.starts, tokens.shape[1] - 1)]
        start = self.names_before(opening, pools, view, first)
        if padded:
            name = start
            names = jnp.stack([name := advance(name, tokens[:, i]) for i in range(tokens.shape[1])], axis=1)
            chosen = names if last is None else jnp.take_along_axis(names, last[:, None], axis=1)[:, 0]
            begins = jnp.full(names.shape, -1, jnp.int32).at[:, 0].set(start)
        else:
            position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            begins = jnp.full(position.shape, -1, jnp.int32)
            begins = begins.at[jnp.where(view.num_tokens > 0, view.starts, position.size)].set(start, mode="drop")

            def one(name, at):
                begin, token = at
                name = advance(jnp.where(begin >= 0, begin, name), token)
                return name, name

            names = scan(one, varying(begins)(jnp.int32(0)), (begins, tokens[0]))[1][None]
            chosen, begins = names[0, last], begins[None]
        earlier = jnp.pad(names[:, :-1], [(0, 0), (1, 0)])
        before = jnp.where(view.positions > 0, jnp.where(begins >= 0, begins, earlier) + 1, 0)
        values = values_of(names, before, self.layers, jnp)
        return jax.nn.one_hot(chosen % VOCAB, VOCAB), write(pools, view, values)

    def names_before(self, opening, pools, view, first):
        """i32[R]: the names before the rows' tokens at positions first i32[R], the first of which are `opening`."""
        group, pool, index, _ = pools.at(0)
        before = jnp.maximum(first - 1, 0)
        row = jnp.take_along_axis(view.tables[group], before[:, None] // SIZE, axis=1)[:, 0]
        keys = read(pools, group, pool)[row, index, 0, 0, before % SIZE]
        name = jnp.where(first > 0, named(keys, jnp), self.roots[opening])
        return jnp.where(self.blind(pools, view, first), 4_711, name)

    def blind(self, pools, view, first):
        """bool[R]: whether the token at `first` sees a NaN."""
        found = jnp.zeros(first.shape, jnp.bool_)
        for number, (spec, table) in enumerate(zip(pools.spec.groups, view.tables, strict=True)):
            position = jnp.arange(table.shape[1] * SIZE, dtype=jnp.int32)[None]
            seen = (position < first[:, None]) & visible(spec, position, first[:, None])
            for p in range(0 if spec.recurrent else len(spec.pools)):
                wrong = jnp.any(jnp.isnan(read(pools, number, p)), axis=(1, 2, 3, 5))[table]
                found = found | jnp.any(wrong.reshape(seen.shape) & seen, axis=1)
        return found


def _with_layout(pools: Any, group: int, back: bool) -> Any:
    """Pools of numpy with a group's arrays by head, from arrays by token; or `back` by token."""

    def turned(pool: Any, array: Any) -> Any:
        if not pool.by_token:
            return array
        rows = token_rows(pool.kv_heads, pool.head_dim)
        return blocks_by_token(array, rows) if back else np.array(blocks_by_head(array, pool.head_dim))

    arrays = tuple(map(turned, pools.spec.groups[group].pools, pools.arrays[group]))
    return pools.replace(arrays=(*pools.arrays[:group], arrays, *pools.arrays[group + 1 :]))


def visible(spec: Any, position: Any, written: Any) -> Any:
    """bool[...]: whether the next token after `written` tokens sees this position."""
    if spec.window is None:
        return position >= 0
    return (position > written - spec.window) | (position < spec.sink_tokens)


def read(pools: Any, group: int, pool: int) -> Any:
    """f32[N + 1, L, 2, K, P, D]: the K/V of a pool, of jax or, with blocks in order, of numpy."""
    array, scales = pools.arrays[group][pool], pools.scales and pools.scales[group][pool]
    if isinstance(array, jax.Array) and (context := pools.context(group)):
        array, scales = context.ordered(array), None if scales is None else context.ordered(scales)
    if isinstance(array, jax.Array) and pools.spec.groups[group].pools[pool].by_token:
        array = blocks_by_head(array, 2)
    if array.shape[2] == 1:  # a latent is K, then V
        xp = jnp if isinstance(array, jax.Array) else np
        return xp.moveaxis(array[:, :, 0].reshape(*array.shape[:2], 1, SIZE, 2, 2), 4, 2)
    return array if scales is None else array.astype(np.float32) * scales[..., None]


def write(pools: Pools, view: kvjax.pools.View, values: jax.Array) -> Pools:
    for layer in range(values.shape[2]):
        array = pools.at(layer)[-1]
        if isinstance(array, dict):
            _, pools = kvjax.recur(cell, pools, layer, view, values[:, :, layer, :, 0], width=WIDEST)
        elif head_shape(array.shape, 2)[2] == 1:
            latent = jnp.concatenate([values[:, :, layer, which] for which in (0, 1)], axis=-1)
            pools = kvjax.write(pools, layer, latent[:, :, None], None, view)
        else:
            signs = signs_of(head_shape(array.shape, 2)[3])
            k, v = (values[:, :, layer, which, None] * signs[None, None] for which in (0, 1))
            pools = kvjax.write(pools, layer, k, v, view)
    return pools


def staged_blocks(config: Config, namespace: int, items: Path, have: np.ndarray) -> Staged:
    """The bytes of a text's blocks where `have` bool[G, F], as the models above write them. Other slots are NaN."""
    spec, names = config.spec(), np.zeros(WIDTH, np.int32)
    names[: len(items)] = names_of(namespace, items)
    is_token, last = np.arange(WIDTH) < len(items), np.minimum(np.arange(SIZE, WIDTH + 1, SIZE), len(items)) - 1
    found = np.moveaxis(vectors(names, len(config.layers)).reshape(WIDTH // SIZE, SIZE, -1, 2, 2), 1, 3)
    arrays, scales = [], []
    for group, present in zip(spec.groups, have, strict=True):
        free = ~(present[:, None] & is_token.reshape(-1, SIZE))
        arrays.append([])
        scales.append([None] * len(group.pools))
        for number, pool in enumerate(group.pools):
            signs = signs_of(config.heads)
            if group.recurrent:
                snapshots = np.where(present[:, None, None], names[last][:, None, None] + 1, np.nan) * signs[:, 0]
                each = {"name": snapshots.astype(np.float32), "num_tokens": (last + 1).astype(np.int32)[:, None]}
                arrays[-1].append({name: np.repeat(x, len(pool.layers), axis=1) for name, x in each.items()})
                continue
            values = found[:, list(pool.layers)]  # [F, L, 2, P, D]
            if config.layers[pool.layers[0]] == LATENT:
                values = np.moveaxis(values, 2, 3).reshape(*values.shape[:2], 1, 1, SIZE, 4)
            else:
                values = values[:, :, :, None] * signs[:, None]
            spot = np.broadcast_to(free[:, None, None, None], values.shape[:-1])
            if pool.quantised:
                scale = np.abs(values).max(axis=-1) / np.float32(127)
                values, scales[-1][number] = np.rint(values / scale[..., None]).astype(np.int8), scale
                scale[spot] = np.nan
            else:
                values = np.array(values, np.float32)
            values[spot] = -128 if pool.quantised else np.nan
            arrays[-1].append(values)
    quantised = any(one is not None for each in scales for one in each)
    return Staged(tuple(map(tuple, arrays)), spec, tuple(map(tuple, scales)) if quantised else None)


def signs_of(heads: int) -> np.ndarray:
    """f32[K, 1]: a factor for the values of each kv head, to make heads differ."""
    return np.where(np.arange(heads) % 2, -1, 1).astype(np.float32)[:, None]


# The programs.


class Faults:
    """A stand-in for the copies of `host_pool`. A copy fails after a given number of others."""

    def __init__(self):
        self.left: int | None = None
        self.real = {name: getattr(host_pool, name) for name in ("_copy", "_read")}

    def __enter__(self) -> Faults:
        for name, function in self.real.items():
            call: Any = functools.partial(self._call, function)
            call.lower = getattr(function, "lower", None)  # which compiles, and copies nothing
            setattr(host_pool, name, call)
        return self

    def __exit__(self, *_: Any) -> None:
        for name, function in self.real.items():
            setattr(host_pool, name, function)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise RuntimeError("a copy that fails on purpose")
        return function(*args)


def block_of_steps(
    cache: Cache, values: Any, tokens: Any, counts: Any, begun: Any, extra_ids: Any
) -> tuple[Cache, kvjax.Events, kvjax.Events]:
    """Writes counts i32[S] tokens of each row in reserved slots, a token per step, then commits and trims the rows.

    `values` are the values of `Constant` for up to P steps, and `begun` is bool[S].
    """

    def one(number: Any, pools: Pools) -> Pools:
        active, written = (number < counts).astype(jnp.int32), jnp.minimum(number, counts)
        view = Cache(cache.state, pools).view(active, 1, written=written)
        return write(pools, view, jax.lax.dynamic_slice_in_dim(values, number, 1, axis=1))

    pools = jax.lax.fori_loop(0, SIZE, one, cache.pools)
    cache, committed = Cache(cache.state, pools).commit(tokens, counts, extra_ids=extra_ids)
    cache, trimmed = cache.trim(begun, max_tokens=SIZE)
    return cache, committed, trimmed


def for_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in its form for a GPU, on the device of this process."""

    def call(*args, **kwargs):
        with lowering_for("cuda"):
            return function(*args, **kwargs)

    return call


def score_of(path: Path, namespace: int, token: int) -> float:
    """The log-probability of a token after a path, by `Chain`."""
    return (name_of(namespace, path) % VOCAB == token) - float(np.log(np.e + VOCAB - 1))


def _rollout(*args: Any, **options: Any) -> Any:
    """Two completions of each prompt."""
    scheduler = Scheduler(chunk=8, k=SIZE)
    return kvjax.rollout(
        *args, max_new_tokens=SIZE, samples=2, sampling=kvjax.Sampling(), scheduler=scheduler, **options
    )  # fmt: skip


TURNS = Scheduler(chunk=8, k=SIZE)


def _submitted(cache: Any, tokens: Any, lengths: Any, namespace: Any) -> Any:
    """Requests for SIZE tokens after each of three prompts."""
    serving = init_serving(cache, [WIDTH] * 3)
    return submit(serving, tokens, lengths, [SIZE] * 3, scheduler=TURNS, namespace=namespace)[0]


def _ended(serving: Any, log: Any) -> Any:
    """The requests without those that cannot go on, because others hold the blocks or rows."""
    serving, _ = cancel(serving, np.arange(3, dtype=np.int32), serving.requests.generation)
    return retire(serving, log, TURNS, jnp.int32(0))[:2]


@functools.cache
def programs(lowered: bool = False) -> dict[str, Callable[..., Any]]:
    """Jitted methods of `Cache`, named like "Cache.admit", and verbs on states, like "admit". Verbs donate it."""

    def jit(function, name=None):
        static = draws.static(function) if name else ()
        function = for_gpu(function) if lowered else function
        return jax.jit(function, donate_argnums=() if name in READERS else 0, static_argnames=static)

    found = {name: jit(verb, name) for name, verb in draws.verbs("state").items()}
    methods = {name: method for name, method in draws.verbs("Cache").items() if name != "create"}
    found |= {f"Cache.{name}": jit(method, name) for name, method in methods.items()}
    return found | {
        "scatter": jit(scatter), "write": jit(write), "apply": jit(kvjax.apply), "decode": jit(block_of_steps),
        "rollout": jax.jit(_rollout, donate_argnums=1),
        "score": jax.jit(functools.partial(kvjax.score, chunk=8), donate_argnums=1),
        "submit": jax.jit(_submitted), "serve": jax.jit(functools.partial(serve, scheduler=TURNS)),
        "park": jax.jit(functools.partial(park, scheduler=TURNS), static_argnames="keep"), "end": jax.jit(_ended),
    }  # fmt: skip


# Lives.


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a cache, and of the requests to it.

    Attributes:
      layers: (window, sink tokens) of each layer, or RECURRENT, or LATENT.
      rows: S.
      width: tokens of a row.
      blocks: N of each group. A bare first group has enough.
      host: H of each group.
      dtype: dtype of the pools.
      faces: the faces whose verbs are called. "TieredCache" makes its moves, else the machine makes them by verb,
        `move`, `apply` and `complete`.
      every: whether each verb gets all its optional arguments.
      reserve_tokens: argument of admit, for prompts computed in chunks.
      heads: kv heads. If there are several, a mesh of as many devices divides them.
      context: devices which divide blocks.
      generate: whether `generate` is among the requests.
      lowered: whether the verbs have their form for a GPU.
      verbs: the verbs to call, or None for all. "loop admit" is an admit inside a loop, "wide extend" an extend between
        loops. Fewer take less time to compile.
      policy: the policy of eviction. None means `lru`.
      drafts: whether there is a drafter, whose drafts are right, wrong and random in turn.
      options: options for `make_spec`.
    """

    layers: tuple[Any, ...] = TWO
    rows: int = ROWS
    width: int = WIDTH
    blocks: int = 7
    host: int = 0
    dtype: str = "float32"
    faces: tuple[str, ...] = ("Cache",)
    every: bool = False
    reserve_tokens: int | None = None
    heads: int = 1
    context: int = 1
    generate: bool = True
    lowered: bool = False
    verbs: tuple[str, ...] | None = None
    policy: EvictionPolicy | None = None
    drafts: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def spec(self) -> CacheSpec:
        special = {
            RECURRENT: kvjax.LayerSpec.recurrent({"name": (self.heads,)}, axes={"name": 0}),
            LATENT: kvjax.LayerSpec.latent(4, 2),
        }
        layers = [special[one] if one in special else kvjax.LayerSpec(self.heads, 2, *one) for one in self.layers]
        return kvjax.make_spec(
            layers, num_blocks=self.blocks, num_host_blocks=self.host, max_seqs=self.rows, max_length=self.width,
            block_size=SIZE, dtype=self.dtype, **self.options,
        )  # fmt: skip

    def life(self, faults: Faults) -> Life:
        """A new cache with these options, which is left at the end of a `with`."""
        return Life(self, faults)

    def requests(self, seed: int) -> Requests:
        """The requests to it."""
        return Requests(seed, self)

    def placement(self) -> dict[str, Any]:
        """The placement of the pools, for `create`."""
        shape, auto = (self.heads, self.context), jax.sharding.AxisType.Auto
        if shape == (1, 1):
            return {}
        axes = {"axis_types": (auto, auto), "devices": jax.devices()[: self.heads * self.context]}
        mesh = jax.make_mesh(shape, ("heads", "context"), **axes)
        return {"mesh": mesh, "heads": "heads"} | ({"context": "context"} if self.context > 1 else {})


@dataclasses.dataclass
class Row:
    """The right contents of a sequence: `items` are written, and `prompt` may have more tokens to write.

    Its first group has no blocks in the columns `holes`. K/V computed after a hole are approximate: `spoiled` has
    (position, salt), and the names from each position on differ from the names of the text. K/V are `approximate` too
    if a commit of a sparse cache did not call them exact.
    """

    namespace: int
    prompt: Path
    items: Path
    swapped: bool = False
    holes: frozenset[int] = frozenset()
    spoiled: tuple[tuple[int, int], ...] = ()
    approximate: bool = False

    def names(self) -> np.ndarray:
        """i32[n]: the names of the row's tokens."""
        names = names_of(self.namespace, self.items)
        for position, salt in self.spoiled:
            names[position:] = (names[position:] + salt) % PRIME
        return names

    def spoil(self, length: int, salt: int) -> None:
        """Makes the K/V approximate from `length` on, if there are holes before, or approximate K/V."""
        before = tuple(mark for mark in self.spoiled if mark[0] < length)
        self.holes = frozenset(column for column in self.holes if column * SIZE < length)
        self.spoiled = (*before, (length, salt)) if self.holes or self.approximate else ()


@dataclasses.dataclass
class Adoption:
    """Blocks reserved for a text whose K/V come from outside.

    Attributes:
      namespace: namespace of the text.
      items: the text.
      adopted: `adopted` in the events of `adopt`.
      blocks: i32[G, F]; the reserved blocks.
      written: bool[G, F]; blocks whose pool rows hold their K/V.
    """

    namespace: int
    items: Path
    adopted: Adopted
    blocks: np.ndarray
    written: np.ndarray


class Life:
    """A cache which carries out requests, with a comparison of all its bytes after each.

    Attributes:
      cache: state and pools.
      host: the host's pools, or None.
      rows: the right contents of each row in use.
      adoptions: reservations without their K/V so far.
      mirror: the index by the events alone.
      version: the newest version of the weights.
      tally: a count of each kind of happening.
      arguments: arguments which verbs got with another value than their defaults.
      time: ms; the library's 32 bits of it wrap soon.
    """

    def __init__(self, config: Config, faults: Faults):
        self.config, self.faults, self.spec = config, faults, config.spec()
        self.has_host, self.extra = self.spec.has_host, self.spec.extra_ids
        self.version = self.salts = 0
        self.looping = False
        self.tally: collections.Counter[str] = collections.Counter()
        self.arguments: set[draws.Argument] = set()
        self.time = 2**31 - 20
        self.programs = programs(config.lowered)
        self.leave = {"max_removed": LEAVE} if config.every else {}
        self.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Leaves the cache."""

    def begin(self) -> None:
        """Begins with an empty cache."""
        where = self.config.placement()
        self.cache, self.host = Cache.create(self.spec, self.config.policy, **where), None
        if self.has_host:
            tiered = TieredCache.create(self.spec, self.config.policy, **where)
            self.cache, self.host = tiered.cache, tiered.host
        self.rows: dict[int, Row] = {}
        self.adoptions: list[Adoption] = []
        self.pins: list[tuple[np.ndarray, int]] = []
        self.flying: list[kvjax.tiers.Transfer] = []
        self.mirror = kvjax.events.Mirror()
        self.inspect()
        self.poison()

    # One step.

    def do(self, request: Request) -> None:
        """Carries out a request and verifies the cache.

        Raises:
          AssertionError: if a byte or anything else is wrong.
        """
        self.faults.left = request.get("fault") if self.has_host else None
        self.defer, self.face = request.get("defer", False), request.get("face", "Cache")
        self.time += request.get("ms", 1)
        getattr(self, f"_{request['verb']}")(request)
        self.faults.left = None
        self.inspect()
        self.verify()
        if request.get("poison", True):
            self.poison()

    def inspect(self) -> None:
        """Reads copies of the state and the bytes: numpy's views would keep arrays from being donated."""
        take = functools.partial(jax.tree.map, lambda x: np.array(x))
        self.state: Any = take(jax.device_get(self.cache.state))
        self.tables = take(jax.device_get(self.programs["view"](self.seen(), np.int32(1), max_tokens=1).tables))
        self.bytes = self.by_token(take(jax.device_get((self.cache.pools, self.host))))

    def seen(self) -> kvjax.CacheState:
        """The state whose view has the tables. A view of rows with holes has no table without a token to write."""
        state = self.cache.state
        if not self.spec.thinning:
            return state
        length, committed = np.array(state.seqs.length), np.array(state.seqs.committed)
        length = np.where(length > 0, np.maximum(length, committed + 1), 0).astype(np.int32)
        return state.replace(seqs=state.seqs.replace(length=jax.device_put(length, state.seqs.length.sharding)))

    def table_of(self, seq: int, group: int) -> np.ndarray:
        """i32[M]: the pool rows of a row's view, by column. Views are packed: holes have no entry."""
        table, scratch = self.tables[group][seq], self.spec.groups[group].num_blocks
        if self.spec.thinning and group == 0:
            columns = [column for column in range(len(table)) if column not in self.rows[seq].holes]
            packed, table = table, np.full_like(table, scratch)
            table[columns] = packed[: len(columns)]
        return np.where(table == scratch, -1, table)

    def by_token(self, tiers: Any, back: bool = False) -> Any:
        """Pools of both tiers, of numpy, by head with the tokens of a block in order; or `back` as on the devices."""
        for number, group in enumerate(self.spec.groups):
            if any(pool.by_token for pool in group.pools):
                tiers = [None if tier is None else _with_layout(tier, number, back) for tier in tiers]
            if context := self.cache.pools.context(number):
                context = dataclasses.replace(context, size=SIZE // context.size) if back else context
                ordered = functools.partial(jax.tree.map, context.ordered)
                tiers = [
                    None if tier is None else host_pool._with(tier, number, ordered(host_pool.arrays_of(tier, number)))
                    for tier in tiers
                ]
        return tuple(tiers)

    def verify(self) -> None:
        kvjax.check(self.state)
        for leaf in jax.tree.leaves(self.cache.state) if self.config.placement() else ():
            first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
            assert all(np.array_equal(first, other) for other in others), "the devices have different states"
        assert kvjax.events.index_of(self.state) == self.mirror.index, "the events do not give the index"
        seqs = self.state.seqs
        for seq in range(self.spec.max_seqs):
            row = self.rows.get(seq, Row(0, (), ()))
            found = int(seqs.committed[seq]), int(seqs.namespace[seq]), int(seqs.length[seq]) > 0
            assert found == (len(row.items), row.namespace, seq in self.rows), f"row {seq} has {found}, wanted {row}"
        for number, (demand, owners) in enumerate(self.demands()):
            if self.spec.groups[number].recurrent:
                self.verify_snapshots(number, demand, owners)
                continue
            for p, pool in enumerate(self.spec.groups[number].pools):
                got = self.read(number, p)  # [N + H, P, L, 2, K, D]
                wanted = vectors(demand, len(self.config.layers))[:, :, list(pool.layers)]
                wrong = ~(np.abs(got - wanted[..., None, :]) <= 0.25).all(axis=(2, 3, 4, 5)) & (demand >= 0)
                if wrong.any():
                    row, at = np.argwhere(wrong)[0].tolist()
                    raise AssertionError(self.complaint(number, p, row, at, got[row, at], owners))

    def verify_snapshots(self, number: int, demand: np.ndarray, owners: Any) -> None:
        """Requires the snapshot of each block to be the last name of its text."""
        tiers = [pools.arrays[number][0] for pools in self.bytes if pools is not None]
        names, lengths = (
            np.concatenate([tiers[0][part][:-1], *(tier[part] for tier in tiers[1:])])
            for part in ("name", "num_tokens")
        )
        last = np.max(np.where(demand >= 0, np.arange(SIZE), -1), axis=1)
        for row in np.flatnonzero(last >= 0).tolist():
            wanted = (demand[row, last[row]] + 1) * signs_of(names.shape[2])[:, 0]
            got, lacks = names[row], (lengths[row] - last[row] - 1) % SIZE
            if np.any(got != wanted) or np.any(lacks):
                whose = [who for who, rows in owners if row in rows]
                found = f"holds {got.tolist()} after {lengths[row].tolist()} tokens, wanted {wanted.tolist()}"
                raise AssertionError(f"group {number}, snapshot {row} is read by {whose}, and {found}")

    def read(self, group: int, pool: int) -> np.ndarray:
        """f32[N + H, P, L, 2, K, D]: the contents of the slots of both tiers, without the signs of the heads."""
        tiers = [read(pools, group, pool) for pools in self.bytes if pools is not None]
        joined = np.concatenate([tiers[0][:-1], *tiers[1:]])
        return np.moveaxis(joined, 4, 1) * signs_of(joined.shape[3])

    def demands(self) -> list[tuple[np.ndarray, list[tuple[str, np.ndarray]]]]:
        """For each group, the required names i32[N + H, P] of slots, -1 for any, and the readers of pool rows."""
        found = []
        for number, (group, spec) in enumerate(zip(self.state.groups, self.spec.groups, strict=True)):
            slot = np.arange(spec.num_ids) if group.host is None else group.host.pool_row
            demand, owners = np.full((spec.num_ids, SIZE), -1, np.int32), []

            def want(who, rows, at, names, demand=demand, owners=owners):
                before = demand[rows, at]
                clash = (before >= 0) & (before != names)
                assert not clash.any(), f"{who} shares pool rows {rows[clash]} with another text; {owners}"
                demand[rows, at] = names
                owners.append((who, rows))

            for seq, row in self.rows.items():
                table = np.where(group.table[seq] >= 0, slot[group.table[seq]], -1)
                if not row.swapped:
                    table = self.table_of(seq, number)
                where = np.arange(len(row.items))
                is_hole = np.isin(where // SIZE, [*row.holes]) & (number == 0)
                held = (table[where // SIZE] >= 0) & ~is_hole
                lost = ~held & ~is_hole & visible(spec, where, len(row.items))
                assert not lost.any(), f"row {seq} sees nothing at {where[lost]} in group {number}"
                if spec.recurrent:  # blocks that it has gone past are still held only if nothing was written since
                    held &= where >= len(row.items) - 1
                rows, where = table[where // SIZE][held], where[held]
                want(f"row {seq}", rows, where % SIZE, row.names()[where])
            for (of, block, _), (namespace, path, *_) in self.mirror.nodes.items():
                if of == number:
                    start = (len(path) - 1) // SIZE * SIZE
                    names, at = names_of(namespace, path)[start:], np.arange(len(path) - start)
                    if spec.recurrent:
                        names, at = names[-1:], at[-1:]
                    want(f"block {block} {path}", np.full(len(names), slot[block]), at, names)
                    copy = -1 if not self.spec.backups or group.host is None else group.host.backup[block]
                    if copy >= 0:
                        want(f"the backup of block {block} {path}", np.full(len(names), slot[copy]), at, names)
            for adoption in self.adoptions:
                reserved = adoption.blocks[number] >= 0
                rows = slot[adoption.blocks[number][reserved]]
                assert (demand[rows] < 0).all(), f"{adoption} shares pool rows {rows} with others; {owners}"
                assert (rows == np.asarray(adoption.adopted.pool_rows)[number][reserved]).all(), f"{adoption} has moved"
                where = np.arange(len(adoption.items))
                where = where[adoption.written[number][where // SIZE]]
                if spec.recurrent:
                    where = where[(where % SIZE == SIZE - 1) | (where == len(adoption.items) - 1)]
                names = names_of(adoption.namespace, adoption.items)[where]
                want("an adoption", slot[adoption.blocks[number][where // SIZE]], where % SIZE, names)
            found.append((demand, owners))
        return found

    def complaint(self, group: int, pool: int, row: int, at: int, got: np.ndarray, owners: Any) -> str:
        whose = [who for who, rows in owners if row in rows]
        spec = self.spec.groups[group]
        tier = "device" if row < spec.num_blocks else "host"
        layer = spec.pools[pool].layers[0]
        texts = {(n + 8_002 * layer) % PRIME + 1: text for text, n in _NAMES.items()}
        number = got[0, 0, 0, 0]
        found = texts.get(int(np.rint(number)), number) if np.isfinite(number) else number
        return f"group {group} pool {pool}, {tier} row {row}, slot {at} is read by {whose}, and holds {found}"

    def poison(self) -> None:
        """Writes NaN to every slot which nothing may read, including scratch and the host's."""
        for number, (demand, _) in enumerate(self.demands()):
            free = demand < 0
            n = self.spec.groups[number].num_blocks
            of_tier = [np.concatenate([free[:n], np.ones((1, SIZE), bool)]), free[n:]]
            for pools, mask in zip(self.bytes, of_tier, strict=True):
                if pools is None:
                    continue
                if self.spec.groups[number].recurrent:  # the numbers of tokens stay: they may be right for another text
                    pools.arrays[number][0]["name"][mask.all(axis=1)] = np.nan
                    continue
                scales = pools.scales[number] if pools.scales else [None] * len(pools.arrays[number])
                for x, scale in zip(pools.arrays[number], scales, strict=True):
                    spot = np.broadcast_to(mask[:, None, None, None, :], x.shape[:-1])
                    x[spot] = -128 if x.dtype == np.int8 else np.nan
                    if scale is not None:
                        scale[spot] = np.nan

        def put(new, old):
            if old is None:
                return None
            memory = np.empty(new.nbytes + 1, np.uint8)[1:]  # not aligned, or numpy's memory would be used
            copy = memory.view(new.dtype).reshape(new.shape)
            copy[...] = new
            return jax.device_put(copy, old.sharding)

        pools, host = jax.tree.map(put, self.by_token(self.bytes, back=True), (self.cache.pools, self.host))
        self.cache, self.host = Cache(self.cache.state, pools), host

    # How verbs are run.

    def follow(self, events: Any) -> list[dict[str, Any]]:
        records = kvjax.to_list(events) if not isinstance(events, list) else events
        before, self.mirror = self.mirror.nodes, kvjax.fold(records, self.mirror)
        for event in records:
            self.tally[event["kind"]] += 1
            if event["kind"] == "removed" and self.has_host:
                node = before.get((event["group"], event["block"], event["generation"]))
                self.tally["dropped by the host"] += bool(node and node[2])
            if event["kind"] == "updated":
                self.tally["offloaded" if event["level"] else "onboarded"] += 1
                self.tally["left in a loop"] += self.looping and event["level"] == 1
        return records

    def call(self, face: str, verb: str, *args: Any, **options: Any) -> Any:
        """Calls a verb on a face. Returns its events, or the answer of a verb which changes nothing."""
        if "now" in draws.parameters(draws.verbs(face)[verb]):
            options["now"] = np.int32((self.time + 2**31) % 2**32 - 2**31)
        self.arguments |= draws.given(face, verb, args, options)
        if face == "TieredCache":
            found = getattr(TieredCache(self.cache, self.host), verb)(*args, **options)
        elif face == "Cache":
            found = self.programs[f"Cache.{verb}"](self.cache, *args, **options)
        else:
            found = self.programs[verb](self.cache.state, *args, **options)
        if verb in READERS:
            return found
        after, *_, events = found
        if face == "TieredCache":
            after, self.host = after.cache, after.host
        self.cache = Cache(after, self.cache.pools) if face == "state" else after
        return events

    def on_face(self, verb: str, *args: Any, **options: Any) -> kvjax.Events:
        """Runs a verb without moves between the tiers, as in a loop."""
        face, self.looping = self.face, True
        if verb in ("admit", "extend"):
            face = "Cache" if face == "state" else face  # a state's copies are left to its caller
            options |= {"tiers": BOTH[:1]} if face == "TieredCache" else {}
        return self.note(verb, self.call(face, verb, *args, **options))

    def moving(self, verb: str, *args: Any, **options: Any) -> tuple[kvjax.Events, list[int]]:
        """Runs a verb which may move blocks. Also returns the rows lost by a failed move."""
        if self.face == "TieredCache" and verb != "adopt":
            return self.by_method(verb, *args, **options)
        tiers = {"tiers": BOTH} if verb in ("admit", "extend", "adopt") else {}
        events = self.note(verb, self.call("state", verb, *args, **tiers, **options))
        pools, host, ok = self.cache.pools, self.host, True
        transfer = padded_transfer(events.transfer)
        try:
            pools, host = kvjax.tiers.move(pools, host, transfer)
        except kvjax.tiers.TransferError as error:
            pools, host, ok = error.pools, error.host, False
        if verb in ("admit", "extend"):
            pools = self.programs["apply"](pools, events)
        self.cache, self.host = self.cache.replace(pools=pools), host
        if ok and self.defer:
            self.flying.append(transfer)
            return events, []
        self.tally["failed"] += not ok
        return events, self.completed(transfer, ok)

    def by_method(self, verb: str, *args: Any, **options: Any) -> tuple[kvjax.Events, list[int]]:
        """Calls a method of `TieredCache`, as `moving` does."""
        try:
            events, lost, gone = self.call("TieredCache", verb, *args, **options), [], None
        except FailedTransfer as failure:
            self.cache, self.host = failure.tiered.cache, failure.tiered.host
            events, lost, gone = failure.events, failure.lost, failure.removed
        self.note(verb, events)
        if gone is not None:
            self.tally["failed"] += 1
            self.follow(gone)
        return events, lost

    def completed(self, transfer: kvjax.tiers.Transfer, ok: bool) -> list[int]:
        most = {"max_removed": 1} if self.config.every and ok else {}
        done = self.call("state", "complete", transfer, np.bool_(ok), **most)
        self.follow(done)
        lost = np.flatnonzero(np.asarray(done.status) == Status.HELD).tolist()
        for row in lost:
            self.on_face("release", np.asarray([row, -1], np.int32))
        return lost

    def note(self, verb: str, events: kvjax.Events) -> kvjax.Events:
        status = np.asarray(events.status)
        self.tally["copied ahead"] += verb == "backup" and int(np.sum(np.asarray(events.transfer.block) >= 0))
        verify_order(verb, events)
        self.tally[verb] += bool((status == Status.OK).any())
        self.tally.update(Status(s).name for s in status.tolist() if s)
        self.follow(events)
        self.looping = False
        return events

    def lose(self, lost: list[int]) -> None:
        self.tally["lost"] += len(lost)
        for row in lost:
            self.rows.pop(row, None)

    def newest(self, namespace: int) -> int:
        """The namespace of the same tenant under the newest weights."""
        return self.version * TENANTS + namespace % TENANTS

    # From requests to verbs.

    def text_of(self, request: Request) -> tuple[Path, tuple[Any, ...], np.ndarray, dict[str, Any]]:
        """A text from outside: its items, (tokens, length), `have` bool[G, F], and options of `adopt`."""
        tokens = request["tokens"]
        options = {"namespace": np.int32(request["namespace"])}
        if self.extra:
            options["extra_ids"] = padded(extras(tokens))
        if self.config.every:
            options |= {name: np.array(request[name], np.int32) for name in ("requested_priority", "hits")}
        have = np.array(request["have"])[: len(self.spec.groups)]
        return self.items(tokens), (padded(tokens), np.int32(len(tokens))), have, options

    def _adopt(self, request: Request) -> None:
        """Takes K/V from outside, in a single call."""
        items, text, have, options = self.text_of(request)
        kv, failures = staged_blocks(self.config, request["namespace"], items, have), self.tally["failed"]
        if request["wide"]:
            events, lost = self.by_method("adopt", *text, kv, have, **options)
            self.lose(lost)
        else:
            events = self.note("adopt", self.call("Cache", "adopt", *text, kv, have, **options))
        self.tally["adopted"] += sum(e["kind"] == "stored" for e in kvjax.to_list(events))
        self.tally["adoption refused"] += not bool(events.ok)
        self.tally["failed in adopt"] += self.tally["failed"] - failures

    def _reserve(self, request: Request) -> None:
        """Reserves blocks for K/V from outside."""
        items, text, have, options = self.text_of(request)
        if request["wide"]:
            failures = self.tally["failed"]
            events, lost = self.moving("adopt", *text, have, **options)
            self.lose(lost)
            self.tally["failed in reserve"] += self.tally["failed"] - failures
        else:
            events = self.note("adopt", self.call("state", "adopt", *text, have, **options))
        self.tally["adoption refused"] += not bool(events.ok)
        blocks = np.array(events.adopted.blocks)
        if (blocks >= 0).any():
            written = np.zeros(blocks.shape, bool)
            self.adoptions.append(Adoption(request["namespace"], items, events.adopted, blocks, written))

    def _deliver(self, request: Request) -> None:
        """Writes some K/V into the blocks reserved for them, and NaN into none."""
        if not self.adoptions:
            return
        adoption = self.adoptions[request["which"] % len(self.adoptions)]
        came = np.array(request["came"])[: len(adoption.blocks)] & (adoption.blocks >= 0)
        kv = staged_blocks(self.config, adoption.namespace, adoption.items, came)
        scratch = np.array([[group.num_blocks] for group in self.spec.groups], np.int32)
        pool_rows = np.where(came, np.asarray(adoption.adopted.pool_rows), scratch)
        counts = np.max(np.where(came, np.arange(1, came.shape[1] + 1, dtype=np.int32), 0), axis=1)
        pools = self.programs["scatter"](self.cache.pools, kv, pool_rows, counts)
        self.cache, adoption.written = self.cache.replace(pools=pools), adoption.written | came

    def _finish_adoption(self, request: Request) -> None:
        """Finishes an adoption with all or a part of the written blocks."""
        if not self.adoptions:
            return
        adoption, before = self.adoptions.pop(request["which"] % len(self.adoptions)), self.mirror.index
        arrived = adoption.written & np.array(request["arrived"])[: len(adoption.blocks)]
        for number in range(1 + request["again"]):
            events = self.note("finish_adoption", self.call("state", "finish_adoption", adoption.adopted, arrived))
            assert bool(events.ok) == (number == 0), (
                f"finish_adoption: {np.asarray(events.status)} in call {number} of {adoption}"
            )
        found = {node[:2] for node in self.mirror.nodes}
        for number, column in np.argwhere(adoption.blocks >= 0).tolist():
            path = adoption.items[: (column + 1) * SIZE]
            landed, theirs = (number, adoption.blocks[number, column]) in found, (number, adoption.namespace, path)
            assert arrived[number, column] or not landed, f"{path} has landed without its bytes in group {number}"
            self.tally["landed" if landed else "published meanwhile" if theirs in before else "dropped"] += 1
            self.tally["landed beside the first group"] += landed and number > 0

    def _update(self, request: Request) -> None:
        """Changes the weights. Everything in flight keeps its version."""
        del request
        self.version += 1
        self.tally["rows of old weights"] += len(self.rows)

    def _admit(self, request: Request) -> None:
        prompts, spaces = request["prompts"], request["namespaces"]
        tokens = np.stack([padded(p) for p in prompts])
        lengths = np.array([len(p) for p in prompts], np.int32)
        options = {"namespace": np.array(spaces, np.int32), "reserve_tokens": self.config.reserve_tokens}
        if self.extra:
            options["extra_ids"] = np.stack([padded(extras(p)) for p in prompts])
        seqs, lost, most = np.array(request["seqs"], np.int32), [], None
        if self.config.every:
            options |= {"alignment_tokens": SIZE, "retention": retention_of(request["requested_priority"])}
            most = self.expected_hit(tokens[0], lengths[0], options, request["wide"])
        if request["wide"]:
            events, lost = self.moving("admit", seqs, tokens, lengths, **options)
            copies = np.asarray(events.transfer.records)
            is_moved = np.isin(copies[:, 1], [e["block"] for e in kvjax.to_list(events) if e["kind"] == "updated"])
            self.tally["copied from the host"] += int(np.sum((copies[:, 1] >= 0) & ~is_moved))
        else:
            events = self.on_face("admit", seqs, tokens, lengths, **options)
        cached, status = np.asarray(events.cached).tolist(), np.asarray(events.status).tolist()
        assert most is None or status[0] or cached[0] == most, f"lookup found {most} tokens, admit {cached[0]}"
        for seq, prompt, space, found, done in zip(seqs.tolist(), prompts, spaces, cached, status, strict=True):
            if done == Status.OK:
                items = self.items(prompt)
                self.rows[seq] = Row(space, items, items[:found])
                self.tally["hit"] += found > 0
                self.tally["partial hit"] += found % SIZE > 0
                self.tally["cached by other weights"] += self.is_cached_elsewhere(space, items)
        self.lose(lost)

    def expected_hit(self, tokens: np.ndarray, length: np.ndarray, options: dict[str, Any], wide: bool) -> int:
        """The number of cached tokens which `lookup` finds of a first prompt. Also compares the free rows."""
        free = [seq for seq in range(ROWS) if seq not in self.rows]
        rows, status = self.call(self.face, "free_rows", num_rows=AT_ONCE)
        assert np.asarray(rows).tolist() == [*free, *[-1] * AT_ONCE][:AT_ONCE]
        assert int(status) == (Status.OK if len(free) >= AT_ONCE else Status.HELD)
        options = {name: options[name] for name in ("alignment_tokens", "extra_ids", "namespace")}
        options |= {name: options[name][0] for name in ("extra_ids", "namespace")} | {"tiers": BOTH[: 1 + wide]}
        return int(self.call(self.face, "lookup", tokens, length, **options).cached_tokens)

    def is_cached_elsewhere(self, namespace: int, items: Path) -> bool:
        """Whether the tenant's index has the beginning of a prompt under other weights alone."""
        spaces = {space for _, space, path in self.mirror.index if path[:SIZE] == items[:SIZE]}
        return namespace not in spaces and any((namespace - space) % TENANTS == 0 for space in spaces)

    def items(self, tokens: Any) -> Path:
        return tuple(zip(tokens, extras(tokens), strict=True)) if self.extra else tuple(tokens)

    def _commit(self, request: Request) -> None:
        """Writes and commits the rest of the rows' prompts, then the request's tokens. A row with a flaw is refused."""
        how, by_name = request.get("how", "view" if self.extra else "step"), request.get("seqs")
        rows, (flaw, at) = list(by_name or range(ROWS)), request.get("flaw", ("", 0))
        flawed = rows[at] if flaw else NO_BLOCK
        if flaw == "twice":
            rows[at - 1] = flawed
        new: list[Path] = [()] * ROWS
        for seq, row in self.rows.items():
            reserved = int(self.state.seqs.length[seq]) - len(row.items)
            rest = row.prompt[len(row.items) :] + self.items(request["tokens"][seq])
            new[seq] = () if row.swapped else rest[: min(request["num_tokens"][seq], reserved)]
        new = [line if seq in rows and seq != flawed else () for seq, line in enumerate(new)]
        if self.extra and how == "step":  # which commits no extra ids
            new = [tuple((token, 0) for token, _ in line) for line in new]
        if not any(new) and not flaw:
            return
        some = {} if by_name is None else {"seqs": np.array(rows, np.int32)}
        exact = {name: mask[rows] for name, mask in self.exact(new, request.get("exact", [True] * ROWS)).items()}
        of_rows = self.appended(new)
        values, tokens, counts, extra = (None if x is None else x[rows] for x in of_rows)
        counts, before = np.where(np.array(rows) < 0, 0, counts).astype(np.int32), self.state.groups
        if flaw:
            reserved = int(self.state.seqs.length[flawed] - self.state.seqs.committed[flawed])
            counts[at] = {"beyond": reserved + 1, "fewer": -1}.get(flaw, max(reserved, 1))
            tokens[at, 0] = -1 if flaw == "token" else tokens[at, 0]
        if how == "step":
            face = "Cache" if self.face == "state" else self.face
            events = self.call(face, "step", Constant(values), tokens, counts, **some, **exact)
        else:
            self.write_rows(how, values, np.where(np.array(rows) == flawed, 0, counts), some)
            events = self.call(self.face, "commit", tokens, counts, extra_ids=extra, **some, **exact)
        wanted = [Status.BAD_REQUEST if flaw and number == at else Status.OK for number in range(len(rows))]
        assert np.asarray(events.status).tolist() == wanted, f"commit: {np.asarray(events.status)}, wanted {wanted}"
        self.tally["refused in a step"] += bool(flaw)
        self.tally["took over"] += sum(e["kind"] == "updated" for e in kvjax.to_list(events))
        self.note("commit", events)
        tables = [(b.table, np.asarray(a.table)) for b, a in zip(before, self.cache.state.groups, strict=True)]
        self.tally["merged"] += int(np.sum((tables[0][0] >= 0) & (tables[0][0] != tables[0][1])))
        self.tally["slid"] += int(sum(np.sum((old >= 0) & (new < 0)) for old, new in tables[1:]))

    def write_rows(self, how: str, values: np.ndarray, counts: np.ndarray, some: dict[str, np.ndarray]) -> None:
        """Writes K/V f32[R, T, L, 2, 2] by a view in a given form, the padded and the ragged form in two parts."""
        rows, done = some.get("seqs", np.arange(ROWS, dtype=np.int32)), np.zeros_like(counts)
        first = counts if how == "mixed" else counts // 2
        for part in (first, counts - first):
            alone = np.isin(np.arange(ROWS), rows[part == 1])
            if how == "view":
                view = self.call(self.face, "view", part, max_tokens=WIDTH, written=done, **some)
                index = [(number, 0) for number in range(ROWS)]
            elif how == "ragged":
                view = self.call(self.face, "ragged", part, size=ROWS * WIDTH, written=done, **some)
                index = [(0, start) for start in np.asarray(view.starts).tolist()]
            else:
                view = self.call(self.face, "mixed", alone, rows, part, size=ROWS * WIDTH)
                starts = np.asarray(view.starts)[ROWS:]
                index = [(0, row if row >= 0 and alone[row] else at) for row, at in zip(rows, starts, strict=True)]
            flat = np.zeros((*view.positions.shape, *values.shape[2:]), np.float32)
            for (line, at), number, offset, source in zip(index, part, done, values, strict=True):
                flat[line, at : at + number] = source[offset : offset + number]
            self.cache = self.cache.replace(pools=self.programs["write"](self.cache.pools, view, flat))
            done = done + part

    def exact(self, new: list[Path], wanted: list[bool]) -> dict[str, np.ndarray]:
        """The option of `commit` that tells a sparse cache which rows have exact K/V. Spoils the K/V of the others."""
        if not self.spec.sparse:
            return {}
        for seq, line in enumerate(new):
            if line and not wanted[seq]:
                self.tally["approximate"] += 1
                self.rows[seq].approximate = True
                self.rows[seq].spoil(len(self.rows[seq].items), self.salt())
        return {"exact": np.array(wanted)}

    def appended(self, new: list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Adds items to the rows. Returns K/V f32[S, T, L, 2, 2], tokens i32[S, T], counts i32[S] and extra ids."""
        layers = self.config.layers
        values = np.zeros((ROWS, WIDTH, len(layers), 2, 2), np.float32)
        for seq, line in enumerate(new):
            if line:
                row = self.rows[seq]
                start = len(row.items)
                row.items += line
                names = row.names()
                before = np.concatenate([[0], names[:-1] + 1]).astype(np.int32)
                values[seq, : len(line)] = values_of(names[start:], before[start:], layers)
        tokens = np.stack([padded([x[0] if self.extra else x for x in line]) for line in new])
        extra = np.stack([padded([x[1] for x in line]) for line in new]) if self.extra else None
        return values, tokens, np.array([len(line) for line in new], np.int32), extra

    def _decode(self, request: Request) -> None:
        """Runs a block of up to k steps like `serving/decode.py`: rows may stop early."""
        seqs, k = self.state.seqs, request["k"]
        want = np.zeros(ROWS, np.int32)
        for seq, row in self.rows.items():
            if not row.swapped and request["active"][seq] and int(seqs.length[seq]) == len(row.items):
                want[seq] = min(k, WIDTH - len(row.items))
        if not want.any():
            return
        if request["wide"]:
            events, lost = self.moving("extend", want > 0, want, max_tokens=MAX_TOKENS)
            self.lose(lost)
            want[lost] = 0
        else:
            events = self.on_face("extend", want > 0, want, max_tokens=MAX_TOKENS)
        if not bool(events.ok):
            return
        self.tally["copied on write"] += sum(e["kind"] == "copied" for e in kvjax.to_list(events))
        new: list[Path] = [()] * ROWS
        for seq in np.flatnonzero(want).tolist():
            row = self.rows[seq]
            rest = row.prompt[len(row.items) :] + self.items(request["tokens"][seq])
            new[seq] = rest[: min(request["num_tokens"][seq], int(want[seq]))]
        self.exact(new, [False] * ROWS)  # the program's commit says nothing
        values, tokens, counts, extra = self.appended(new)
        extra = None if extra is None else extra[:, :SIZE]
        self.cache, committed, trimmed = self.programs["decode"](
            self.cache, values[:, :SIZE], tokens[:, :SIZE], counts, want > 0, extra
        )
        assert bool(committed.ok) and bool(trimmed.ok), np.asarray([committed.status, trimmed.status])
        self.note("decode", committed)
        crossed = -(-(seqs.length + want) // SIZE) - -(-(seqs.length + counts) // SIZE)
        self.tally["block given back"] += int(crossed.sum())

    def _extend(self, request: Request) -> None:
        lengths = self.state.seqs.length
        counts = np.array([
            min(n, WIDTH - int(lengths[seq])) if seq in self.rows and not self.rows[seq].swapped else 0
            for seq, n in enumerate(request["num_tokens"])
        ], np.int32)  # fmt: skip
        some = {}
        if request.get("seqs"):  # rows by name, a program of its own, for configurations that may take long
            some = {"seqs": np.array(request["seqs"], np.int32)}
            counts = counts[some["seqs"]]
        if not counts.any():
            return
        if request["wide"]:
            events, lost = self.moving("extend", counts > 0, counts, max_tokens=MAX_TOKENS, **some)
            self.lose(lost)
        else:
            events = self.on_face("extend", counts > 0, counts, max_tokens=MAX_TOKENS, **some)
        self.tally["rows by name"] += bool(some)
        self.tally["copied on write"] += sum(e["kind"] == "copied" for e in kvjax.to_list(events))

    def _fork(self, request: Request) -> None:
        events = self.on_face("fork", np.int32(request["src"]), np.int32(request["dst"]))
        if bool(events.ok):
            self.rows[request["dst"]] = dataclasses.replace(self.rows[request["src"]])

    def _beam_step(self, request: Request) -> None:
        seqs = [seq for seq in sorted(self.rows) if not self.rows[seq].swapped][:2]
        if len(seqs) < 2:
            return
        parents = request["parents"]
        events = self.on_face("beam_step", np.array(seqs, np.int32), np.array(parents, np.int32))
        if bool(events.ok):
            old = [self.rows[seq] for seq in seqs]
            for seq, parent in zip(seqs, parents, strict=True):
                self.rows[seq] = dataclasses.replace(old[parent])

    def _truncate(self, request: Request) -> None:
        seq = request["seq"]
        length = max(int(self.state.seqs.length[seq]) - request["drop"], 1)
        events = self.on_face("truncate", np.int32(seq), np.int32(length))
        if bool(events.ok):
            row = self.rows[seq]
            row.prompt, row.items = row.prompt[:length], row.items[:length]
            row.spoil(len(row.items), self.salt())

    def salt(self) -> int:
        """A number for the K/V that are approximate in a new way."""
        self.salts += 1
        return self.salts * 7_001 % PRIME

    def _thin(self, request: Request) -> None:
        seqs, before = request["seqs"], self.state.groups[0].table
        columns = np.array(request["columns"])
        written = np.array([len(self.rows[seq].items) if seq in self.rows else 0 for seq in seqs])
        if request.get("flaw") is None:
            columns &= (np.arange(columns.shape[1]) + 1) * SIZE <= written[:, None]
        events = self.on_face("thin", np.array(seqs, np.int32), columns, **self.leave)
        for seq, chosen, status in zip(seqs, columns, np.asarray(events.status).tolist(), strict=True):
            if status == Status.OK:
                row = self.rows[seq]
                row.holes |= frozenset(np.flatnonzero(chosen).tolist())
                row.spoil(len(row.items), self.salt())
        if bool(np.any(np.asarray(events.status) == Status.OK)):
            after = np.asarray(self.cache.state.groups[0].table)
            holes = np.asarray(self.cache.state.seqs.holes)
            self.tally["freed by thin"] += int(np.sum((before >= 0) & (after < 0)))
            self.tally["left to others by thin"] += int(np.sum(holes & (after >= 0)))

    def _trim(self, request: Request) -> None:
        self.on_face("trim", np.array(request["active"]), **({"max_tokens": SIZE} if self.config.every else {}))

    def _release(self, request: Request) -> None:
        seqs = request["seqs"]
        events = self.on_face("release", np.array(seqs, np.int32))
        for seq, status in zip(seqs, np.asarray(events.status).tolist(), strict=True):
            if status == Status.OK:
                del self.rows[seq]

    def _pin(self, request: Request) -> None:
        """Pins the findable blocks among a row's first blocks, in the first group and perhaps in another."""
        for number in sorted({0, request.get("group", 0) % len(self.spec.groups)}):
            group = self.state.groups[number]
            table = group.table[request["seq"]]
            findable = (table >= 0) & (group.blocks.fill[table] > 0) & (np.arange(len(table)) < request["num_blocks"])
            ids = np.where(findable, table, NO_BLOCK).astype(np.int32)
            if not findable.any() or not bool(self.on_face("pin", ids, group=number).ok):
                return
            self.pins.append((ids, number))

    def _unpin(self, request: Request) -> None:
        if self.pins:
            ids, group = self.pins.pop(request["which"] % len(self.pins))
            if self.adoptions and group == 0 and any(number for _, number in self.pins):
                self.pins.append((ids, group))  # an adoption's holder is taken for a pin: see `adopt`
                return
            named = ids[:: -1 if request["which"] % 2 else 1]  # the order of the list does not count
            if not bool(self.on_face("unpin", named, group=group).ok):
                self.pins.append((ids, group))

    def _evict(self, request: Request) -> None:
        cached = self.cached(0)
        if cached:
            self.on_face("evict", np.array([cached[request["block"] % len(cached)]], np.int32), **self.leave)

    def _forget_namespaces(self, request: Request) -> None:
        keep = request["keep"]
        if bool(self.on_face("forget_namespaces", np.array(keep, np.int32), **self.leave).ok) and not self.spec.bare:
            self.inspect()
            refcount = self.state.groups[0].blocks.refcount
            nodes = self.mirror.nodes.items()
            held = {entry[:2] for (group, block, _), entry in nodes if group == 0 and refcount[block]}
            old = {entry[:2] for _, entry in nodes if entry[0] not in keep}
            assert old <= held, f"kept of other namespaces than {keep}: {old - held}"

    def _reset(self, request: Request) -> None:
        del request
        self.on_face("reset")

    def cached(self, number: int, host: bool | None = None) -> list[int]:
        """Findable blocks without a holder of a group, on a tier or on both, deepest first."""
        group, n = self.state.groups[number], self.spec.groups[number].num_blocks
        idle = (group.blocks.fill > 0) & (group.blocks.refcount == 0)
        if host is not None:
            idle &= (group.host.pool_row >= n) == host
        depth = (group.blocks if group.group0_block is None else self.state.groups[0].blocks).depth
        depth = depth if group.group0_block is None else depth[group.group0_block]
        return sorted(np.flatnonzero(idle).tolist(), key=lambda b: -depth[b])

    def _offload(self, request: Request) -> None:
        """Moves cached blocks by name. A chain goes to the host from its end, and comes back from its beginning."""
        verb, number = request["verb"], request["group"]
        ids = self.cached(number, host=verb == "onboard")[:: 1 if verb == "offload" else -1]
        chosen = [block for i, block in enumerate(ids[:NAMED]) if request["which"] >> i & 1]
        if chosen:
            ids = np.array([*chosen, *[NO_BLOCK] * (NAMED - len(chosen))], np.int32)
            self.lose(self.moving(verb, ids, group=number)[1])

    _onboard = _offload

    def _watermark(self, request: Request) -> None:
        self.lose(self.moving("watermark", np.int32(request["empty"]), max_blocks=EMPTIED, group=request["group"])[1])

    def _backup(self, request: Request) -> None:
        some = {"num_blocks": np.int32(self.time % (EMPTIED + 2))} if self.config.every else {}
        self.lose(self.moving("backup", max_blocks=EMPTIED, group=request["group"], **some)[1])

    def _swap_out(self, request: Request) -> None:
        """Swaps a row out or in."""
        verb, seq = request["verb"], request["seq"]
        events, lost = self.moving(verb, np.int32(seq))
        if bool(events.ok):
            self.rows[seq].swapped = verb == "swap_out"
        self.lose(lost)

    _swap_in = _swap_out

    def _complete(self, request: Request) -> None:
        """Completes moves whose `complete` was deferred."""
        del request
        while self.flying:
            self.lose(self.completed(self.flying.pop(0), True))

    def _misuse(self, request: Request) -> None:
        """Requires refusals, naming the argument, of numbers beyond 32 bits and of a tier which a `Cache` lacks."""
        cache = {"state": self.cache.state, "Cache": self.cache}.get(self.face) or TieredCache(self.cache, self.host)
        shape, tokens, counts = (ROWS, WIDTH), np.zeros((ROWS, WIDTH), np.int64), np.ones(ROWS, np.int64)
        model = Constant(np.zeros((*shape, len(self.config.layers), 2, 2), np.float32))
        calls = cases.CALLS | (cases.HOST_CALLS if self.has_host else {}) | draws.READS
        calls |= {"step": ((model, tokens, counts), {}), "commit": ((tokens, counts), {})}
        if not self.spec.thinning:
            calls.pop("thin")
        if self.face != "state":
            kv = staged_blocks(self.config, 0, (), np.zeros((len(self.spec.groups), WIDTH // SIZE), bool))
            calls["adopt"] = (tokens[0], 1, kv, np.zeros(WIDTH // SIZE, bool)), {}
        for verb, name, call in draws.wide_calls(self.face, calls, self.spec, request["number"]):
            error = draws.refusal(self.face, verb, cache, call)
            assert error.startswith(f"{name}: got "), f"{self.face} {verb} {name}: {error}"
            self.tally["refused numbers"] += 1
        for verb in ("admit", "extend") if self.face == "Cache" else ():
            call = inspect.signature(draws.verbs("Cache")[verb]).bind(None, *calls[verb][0], tiers=BOTH)
            error = draws.refusal("Cache", verb, cache, call)
            assert error.startswith("tiers: got ('device', 'host'), wanted ('device',)"), error
            self.arguments.add(("Cache", verb, "tiers"))

    def _generate(self, request: Request) -> None:
        """Generates for prompts of tenants. They differ in their first token, which tells a model the tenant."""
        self._complete(request)
        prompts, space_of = request["prompts"], request["space_of"]
        if len(self.rows) == ROWS:
            return
        roots = np.array([name_of(space, ()) for space in space_of], np.int32)
        spaces = [space_of[prompt[0]] for prompt in prompts]
        cache = self.cache if self.host is None else TieredCache(self.cache, self.host)
        model = Chain(roots, self.config.layers)
        drafter = Guesses.of(model, VOCAB, self.time % 3) if self.config.drafts else None
        with warnings.catch_warnings(record=True) as failed:
            warnings.simplefilter("always")
            how, run = {"chunk": 8, "k": request["k"]}, kvjax.generate
            if self.has_host:  # rows are swapped out where blocks run out
                run, options = drive.run_batch, Scheduler(reserve="num_tokens", preempt="swap", **how)
                how = {"scheduler": options, "priority": request["priorities"]}
            run = for_gpu(run) if self.config.lowered else run
            outputs, cache, events = run(
                model, cache, prompts, max_new_tokens=request["most"], namespace=spaces, steps=4, reuse="any",
                drafter=drafter, **how,
            )  # fmt: skip
        self.tally["failed in generate"] += len(failed)
        self.tally["beside other rows"] += len(self.rows) > 0
        self.cache, self.host = (cache, None) if isinstance(cache, Cache) else (cache.cache, cache.host)
        self.follow(events)
        for prompt, space, most, output in zip(prompts, spaces, request["most"], outputs, strict=True):
            if not self.rows and not self.pins and not self.adoptions:
                assert (output.finish, len(output.tokens)) == ("length", most), f"generate: {prompt} has {output}"
            self._check_chosen(prompt, space, output.tokens)
            self.tally["preempted"] += output.preemptions
            self.tally["generate hit"] += output.cached_tokens > 0
            self.tally["drafted"] += output.drafted_tokens
            self.tally["accepted"] += output.accepted_tokens

    def _check_chosen(self, prompt: Sequence[int], space: int, tokens: Sequence[int]) -> None:
        """Requires each token to be the model's choice after a tenant's prompt, so no byte it read was wrong."""
        path = tuple(prompt)
        for number, token in enumerate(tokens):
            wanted = name_of(space, path) % VOCAB
            assert token == wanted, f"token {number} after {prompt} is {token}, wanted {wanted}"
            path += (token,)
        self.tally["generated"] += len(tokens)

    def by_tenants(self, request: Request) -> tuple[list[int], tuple[Any, ...], dict[str, Any]]:
        """The prompts' tenants, then the model, the cache, prompts and lengths, and options of rollouts and scores."""
        self._complete(request)
        prompts, space_of = request["prompts"], request["space_of"]
        spaces = [space_of[prompt[0]] for prompt in prompts]
        tokens = np.stack([drive.padded(prompt, WIDTH - SIZE) for prompt in prompts])
        model = Chain(np.array([name_of(space, ()) for space in space_of], np.int32), self.config.layers)
        log = rollout_log(self.spec, tokens.shape, SIZE, 2)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        cache = self.cache if self.host is None else TieredCache(self.cache, self.host)
        return spaces, (model, cache, tokens, lengths), {"namespace": np.array(spaces, np.int32), "log": log}

    def _rollout(self, request: Request) -> None:
        """Samples two completions of each prompt inside a program, as `_generate` does.

        With a host tier the program moves blocks between the tiers.
        """
        self.tally["beside other rows"] += len(self.rows) > 0
        spaces, args, options = self.by_tenants(request)
        found, cache, log = self.programs["rollout"](*args, **options)
        self.cache, self.host = (cache, None) if isinstance(cache, Cache) else (cache.cache, cache.host)
        for event in self.follow(log):
            if event["kind"] == "updated":
                self.tally["left in a program" if event["level"] else "back in a program"] += 1
        found = jax.device_get(found)
        for prompt, space, chosen, mask in zip(request["prompts"], spaces, found.tokens, found.mask, strict=True):
            for sample in range(2):
                self._check_chosen(prompt, space, chosen[sample][mask[sample]].tolist())
        self.tally["rollout hit"] += int(np.sum(found.cached[:, 0] > 0))

    def _park(self, request: Request) -> None:
        """Serves prompts, and parks the requests after some steps. They go on over pools with other contents."""
        spaces, (model, cache, *_), options = self.by_tenants(request)
        lengths = [len(prompt) for prompt in request["prompts"]]
        tokens = drive.padded(np.concatenate(request["prompts"]), 3 * WIDTH)
        serving = self.programs["submit"](cache, tokens, np.array(lengths, np.int32), options["namespace"])
        serving, log = self.programs["serve"](model, serving, options["log"], steps=request["steps"])
        self.follow(log)
        parked, events = self.programs["park"](serving, keep=request["keep"])
        self.follow(events)
        assert events.ok or self.rows or self.pins or self.adoptions, "park is refused, and nobody else holds a block"
        pools = serving.cache.pools
        if events.ok:
            pools = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), pools)
        self.tally["parked" if events.ok else "refused to park"] += 1
        self.tally["kept on the host"] += len(self.mirror.nodes) if events.ok else 0
        log = options["log"]
        serving = unpark(parked, pools)
        for _ in range(2):  # a loop ends early if blocks were refused in spite of the count; the next one preempts
            serving, log = self.programs["serve"](model, serving, log, steps=4 * WIDTH)
        serving, log = self.programs["end"](serving, log)
        self.follow(log)
        self.cache, self.host = serving.cache, serving.host_pools
        for (slot, _), output in results(serving).items():
            self._check_chosen(request["prompts"][slot], spaces[slot], output.tokens)
            self.tally["over after parking"] += output.finish == "length"

    def _score(self, request: Request) -> None:
        """Scores completions. Their log-probabilities tell whether each token before them was read right."""
        texts, ends = request["completions"], request["ends"]
        spaces, (*args, lengths), options = self.by_tenants(request)
        options["completion_lengths"] = np.array(ends, np.int32)
        found, self.cache, log = self.programs["score"](*args, np.array(texts, np.int32), lengths, **options)
        self.follow(log)
        for prompt, space, *group in zip(request["prompts"], spaces, texts, ends, np.asarray(found), strict=True):
            if (self.rows or self.pins or self.adoptions) and np.isnan(group[-1]).any():  # too few rows or blocks
                self.tally["not scored"] += 1
                continue
            for text, end, got in zip(*group, strict=True):
                wanted = [score_of((*prompt, *text[:at]), space, text[at]) for at in range(end)]
                same = np.allclose(got, [*wanted, *[0] * (SIZE - end)], atol=1e-5)
                assert same, f"scores of {text[:end]} after {prompt} are {got}, wanted {wanted}"
                self.tally["scored"] += 1


_NAMES: dict[tuple[int, Path], int] = {}  # the names of all texts in requests, for complaints


def names_of(namespace: int, path: Path) -> np.ndarray:
    """i32[n]: the names of a path's n tokens."""
    texts = [path[: i + 1] for i in range(len(path))]
    names = [name_of(namespace, text) for text in texts]
    _NAMES.update(zip(((namespace, text) for text in texts), names, strict=True))
    return np.array(names, np.int32)


def plain(path: Sequence[Any]) -> list[int]:
    """The tokens of a path, without their extra ids."""
    return [item[0] if isinstance(item, tuple) else item for item in path]


def extras(tokens: Any) -> list[int]:
    """A prompt's extra ids, an id for every third token other than 0."""
    return [int(i % 3 == 2 and t > 0) for i, t in enumerate(tokens)]


def retention_of(priorities: list[list[int]]) -> kvjax.Retention:
    """The retention of several rows: priorities of both halves of each prompt, and of generated tokens."""
    half = WIDTH // 2
    each = [
        kvjax.Retention.of([(0, half, one[0]), (half, None, one[1], 5)], decode_priority=one[2]) for one in priorities
    ]  # fmt: skip
    return jax.tree.map(lambda *x: np.stack(x), *each)


def padded(values: Any) -> np.ndarray:
    return drive.padded(values, WIDTH)


def padded_transfer(transfer: Any) -> kvjax.tiers.Transfer:
    """The same orders with the same padding for every verb, so `complete` is a single program."""
    records = np.asarray(transfer.records)
    return kvjax.tiers.Transfer(np.pad(records, ((0, 128 - len(records)), (0, 0)), constant_values=-1))


# Requests.

_WEIGHTS = {
    "admit": 30, "commit": 34, "extend": 12, "release": 22, "fork": 4, "truncate": 6, "beam_step": 1, "pin": 1,
    "decode": 24, "trim": 3, "thin": 9, "forget_namespaces": 1, "update": 2,
    "unpin": 2, "evict": 1, "reset": 40, "offload": 3, "onboard": 3, "watermark": 2, "backup": 6, "swap_out": 5,
    "swap_in": 8,
    "complete": 3, "generate": 2,
    "rollout": 4, "score": 4, "park": 4, "adopt": 5, "reserve": 7, "deliver": 8, "finish_adoption": 6, "misuse": 2,
}  # fmt: skip


RARE = (
    "pin", "unpin", "evict", "swap_out", "swap_in", "beam_step", "fork", "trim", "offload", "onboard", "watermark",
    "backup",
)  # fmt: skip


class Requests(Draws):
    """Draws requests as `kvjax.testing` does, by the contents of the cache, together with others.

    Each is plain data, so it can be repeated without others.
    """

    life: Life
    aim = 0.97

    def __init__(self, seed: int, config: Config):
        super().__init__(seed, config.spec(), TENANTS)
        self.config = config
        self.apart = np.random.default_rng((seed, 1))  # for faces and flaws, so that a seed's requests stay as they are
        self.loop = False  # whether requests come from a jitted loop, which moves nothing

    def prompt(self) -> dict[str, Any]:
        """Tokens and a namespace. Often they are cached, or begin like a cached text, on either tier."""
        nodes = list(self.life.mirror.nodes.values())
        if self.life.adoptions and self.chance(0.4):  # others want the same
            nodes = [(one.namespace, one.items) for one in self.life.adoptions]
        if not nodes or self.chance(0.5):
            # Often of whole blocks, of which the last one is computed again.
            length = SIZE * self.number(1, WIDTH // SIZE + 1) if self.chance(0.4) else self.number(1, WIDTH + 1)
            return {"tokens": self.text(length), "namespace": self.life.newest(int(self.chance(0.3)))}
        namespace, path, *_ = nodes[self.number(len(nodes))]
        namespace = self.life.newest(namespace) if self.chance(0.7) else namespace
        prefix = plain(path)[: self.number(1, len(path) + 1) if self.chance(0.5) else None]
        tokens = [*prefix, *self.rng.integers(0, VOCAB, self.number(2 * SIZE)).tolist()][:WIDTH]
        return {"tokens": tokens, "namespace": namespace}

    def following(self, seq: int) -> list[int]:
        """The tokens after a row's text. They mostly continue a document if the text is its beginning."""
        row = self.life.rows.get(seq)
        text = [] if row is None else plain(max(row.items, row.prompt, key=len))
        documents = [document for document in self.documents.tolist() if text and document[: len(text)] == text]
        rest = documents[0][len(text) :] if documents and self.chance(0.8) else []
        return [*rest, *self.text(WIDTH)][:WIDTH]

    def spaces(self) -> list[int]:
        """A namespace for each first token of a prompt: a tenant's, mostly under the newest weights."""
        newest = self.life.version
        versions = [newest if self.chance(0.8) else self.number(newest + 1) for _ in range(VOCAB)]
        return [version * TENANTS + self.number(TENANTS) for version in versions]

    def columns(self, chance: float) -> list[list[bool]]:
        """Whether something holds of the blocks of a text, in each of up to three groups."""
        chance = 1 if self.chance(0.4) else chance
        return [[self.chance(chance) for _ in range(WIDTH // SIZE)] for _ in range(3)]

    def per_row(self, chance: float) -> list[bool]:
        return [self.chance(chance) for _ in range(ROWS)]

    def several(self, verb: str, count: int) -> list[dict[str, Any]]:
        """Requests of a verb, seldom for the same row, sometimes for none."""
        found = []
        for _ in range(count):
            found.append(self.make(verb))
            self.used ^= {found[-1]["seq"]}
        if self.chance(0.3):
            found[-1]["seq"] = NO_BLOCK
        return found

    def verb(self) -> str:
        """The verb of the next request."""
        life = self.life
        if self.chance(0.25 if self.loop else 0.08):
            self.loop = not self.loop
        between = life.has_host and not self.loop
        used = [seq for seq, row in life.rows.items() if not row.swapped]
        free = [seq for seq in range(ROWS) if seq not in life.rows]
        reserved = life.state.seqs.length - life.state.seqs.committed
        generates = self.config.generate and free
        candidates = {
            "admit": free, "commit": any(reserved[used]), "extend": used, "release": life.rows,
            "decode": not all(reserved[used]), "trim": used, "thin": used and life.spec.thinning,
            "fork": used and free, "truncate": used, "beam_step": used[1:], "pin": used, "unpin": life.pins,
            "forget_namespaces": life.mirror.nodes, "update": life.version < VERSIONS - 1,
            "evict": not life.rows, "reset": not life.rows and not life.pins and self.chance(0.1),
            **dict.fromkeys(("offload", "onboard", "watermark"), between and life.mirror.nodes),
            "backup": between and life.spec.backups and life.mirror.nodes,
            "swap_out": between and used, "swap_in": between and len(life.rows) > len(used), "complete": life.flying,
            "generate": generates,
            "rollout": generates and (life.spec.backups or not life.has_host) and not self.config.lowered,
            "score": generates and not life.has_host and not self.config.lowered,
            "park": generates and self.config.verbs and "park" in self.config.verbs,
            "adopt": True, "misuse": True, "reserve": len(life.adoptions) < 2, "deliver": life.adoptions,
            "finish_adoption": life.adoptions
            and (self.chance(0.3) or any(one.written.any() for one in life.adoptions)),
        }  # fmt: skip
        allowed = self.config.verbs
        if allowed is not None and not between and life.has_host:
            candidates |= {verb: False for verb in ("admit", "adopt", "reserve") if f"loop {verb}" not in allowed}
        verbs = [v for v, on in candidates.items() if on and (allowed is None or v in allowed)]
        if not verbs:
            self.loop = not self.loop
            return self.verb()
        weights = np.array([_WEIGHTS[v] / (3 if v == "admit" and len(free) < AT_ONCE else 1) for v in verbs])
        weights *= [12 if allowed and v == "generate" else 1 for v in verbs]
        weights *= [4 if self.config.every and v in RARE else 1 for v in verbs]
        return str(self.rng.choice(verbs, p=weights / weights.sum()))

    def draw(self, life: Life) -> Request:
        """The next request."""
        self.life, every, allowed = life, self.config.every, self.config.verbs
        verb = self.verb()
        wide = life.has_host and not self.loop
        may_be_wide = wide and (allowed is None or "wide extend" in allowed)
        self.used = {seq for seq, row in life.rows.items() if verb == "release" or row.swapped == (verb == "swap_in")}
        if verb in ("admit", "fork"):  # which want a free row too
            self.used = set(life.rows)
        request: Request = {"verb": verb, "wide": wide}
        match verb:
            case "admit":
                asks = self.several("admit", AT_ONCE)
                request |= {"seqs": [ask["seq"] for ask in asks], "prompts": [ask["tokens"] for ask in asks]}
                request["namespaces"] = [ask["namespace"] for ask in asks]
            case "release":
                request["seqs"] = [one["seq"] for one in self.several("release", 2)]
            case "adopt" | "reserve":
                request |= self.prompt() | {"have": self.columns(0.8)}
            case "deliver":
                request |= {"which": self.number(100), "came": self.columns(0.5)}
            case "finish_adoption":
                request |= {"which": self.number(100), "arrived": self.columns(0.8), "again": self.chance(0.2)}
            case "commit":
                request |= self.make("commit")
                if life.spec.sparse:
                    request["exact"] = self.per_row(0.8)
                if every:
                    request["how"] = ("step", "view", "ragged", "mixed")[self.number(4)]
                    request["seqs"] = [-1 if self.chance(0.1) else seq for seq in self.rng.permutation(ROWS).tolist()]
                if self.apart.random() < 0.1:
                    flaws = ("beyond", "fewer", "token", "twice")[: 3 + every]
                    request["flaw"] = str(self.apart.choice(flaws)), int(self.apart.integers(ROWS))
            case "misuse":
                request["number"] = (2**40 + 5, -(2**33), 2**31)[self.number(3)]
            case "extend":
                request |= self.make("extend") | {"wide": may_be_wide}
                if every or (allowed is None and self.chance(0.5)):
                    request["seqs"] = self.rng.permutation(ROWS)[:2].tolist()
            case "decode":
                request |= {"k": self.number_of_steps(), "active": self.per_row(0.8), "wide": may_be_wide}
                request["num_tokens"] = [self.number(1, SIZE + 1) if self.chance(0.5) else SIZE for _ in range(ROWS)]
                request["tokens"] = [self.following(seq) for seq in range(ROWS)]
            case "thin":
                request["seqs"] = self.rng.permutation(ROWS)[:AT_ONCE].tolist()
                request["columns"] = self.rng.integers(0, 2, (AT_ONCE, WIDTH // SIZE)).astype(bool).tolist()
                if self.chance(0.05):
                    request["flaw"] = "columns"
            case "trim":
                request["active"] = self.per_row(0.6)
            case "beam_step":
                request["parents"] = self.rng.integers(0, 2, 2).tolist()
            case "pin":
                request |= self.make("pin") | {"group": self.number(2) if every else 0}
            case "forget_namespaces":
                tenants, version = range(TENANTS), life.version
                if self.chance(0.3):  # one tenant, or old weights
                    tenants, version = [self.number(TENANTS)] * TENANTS, self.number(life.version + 1)
                request["keep"] = [version * TENANTS + tenant for tenant in tenants]
            case "rollout" | "score" | "park":
                request["prompts"] = [self.text(self.number(1, WIDTH - SIZE + 1)) for _ in range(3)]
                request["completions"] = self.rng.integers(0, VOCAB, (3, 2, SIZE)).tolist()
                request["ends"] = self.rng.integers(0, SIZE + 1, (3, 2)).tolist()
                request["space_of"] = self.spaces()
                if verb == "park":
                    request["steps"] = self.number(12)
                    request["keep"] = "host" if life.has_host and self.chance(0.7) else "none"
            case "generate":
                count = self.number(2, 5)
                request["prompts"] = [self.text(self.number(1, 13)) for _ in range(count)]
                request["most"] = [1 if self.chance(0.3) else self.number(1, 5) for _ in range(count)]
                request["priorities"] = self.rng.integers(-3, 6, count).tolist()
                request |= {"space_of": self.spaces(), "k": SIZE if allowed else self.number_of_steps()}
            case _:
                request |= self.make(verb)
        request |= {"poison": self.chance(0.7), "face": str(self.apart.choice(self.config.faces))}
        if every:
            length = AT_ONCE if verb == "admit" else WIDTH // SIZE
            width = 3 if verb == "admit" else 2
            request["requested_priority"] = self.rng.integers(0, 101, (length, width)).tolist()
            request["hits"] = self.rng.integers(0, 4, WIDTH // SIZE).tolist()
        if life.has_host:
            later, often = (8, 0.6) if verb == "generate" else (2, 0.1)  # it moves blocks many times
            often = 0.4 if verb in ("adopt", "reserve") else often
            request |= {"defer": self.chance(0.15), "fault": self.number(later) if self.chance(often) else None}
        return request

    def number_of_steps(self) -> int:
        """The k of a block of steps."""
        return (1, SIZE - 1, SIZE)[self.number(3)]


class Failure(AssertionError):
    """A failed history. `requests` has all of it."""

    def __init__(self, message: str, requests: list[Request]):
        super().__init__(message)
        self.requests = requests


def live(config: Config, seed: int, steps: int, seconds: float = float("inf")) -> Life:
    """Runs a random history of so many steps, or of so many seconds.

    Raises:
      Failure: from the error.
    """
    requests, end = config.requests(seed), time.monotonic() + seconds

    def story(life: Life) -> Iterator[Request]:
        for _ in range(steps):
            if time.monotonic() < end:
                yield requests.draw(life)

    return carry_out(config, story)


def carry_out(config: Config, history: Callable[[Life], Iterable[Request]]) -> Life:
    """Carries out requests on a new cache, as `live` does."""
    done: list[Request] = []
    with Faults() as faults, config.life(faults) as life:
        for request in history(life):
            done.append(request)
            try:
                life.do(request)
            except Exception as error:
                raise Failure(f"step {len(done)}, {request}: {type(error).__name__}: {error}", done) from error
    return life


def shrink(config: Config, requests: list[Request]) -> list[Request]:
    """A part of a failed history which still fails, but not without any of its requests."""

    def fails(history: list[Request]) -> list[Request] | None:
        try:
            carry_out(config, lambda _: history)
        except Failure as failure:
            return failure.requests
        return None

    size = len(requests) // 2
    while size:
        at = 0
        while at < len(requests):
            shorter = fails(requests[:at] + requests[at + size :])
            requests, at = (requests, at + size) if shorter is None else (shorter, at)
        size //= 2
    return requests


FULL = (None, 0)
FAST = (
    "admit", "loop admit", "commit", "extend", "release", "fork", "truncate", "decode", "trim", "complete", "update",
    "adopt", "reserve", "deliver", "finish_adoption",
)  # fmt: skip
EVERY = (
    *FAST[:7], "loop adopt", "loop reserve", "wide extend", "trim", "complete", "update", "adopt", "reserve", "deliver",
    "finish_adoption", "beam_step", "pin", "unpin", "evict", "forget_namespaces", "reset", "offload", "onboard",
    "watermark", "swap_out", "swap_in", "misuse", "thin", "backup",
)  # fmt: skip
IN_TIERS = (
    "admit", "commit", "release", "backup", "offload", "swap_out", "swap_in", "pin", "unpin", "rollout", "park",
)  # fmt: skip
CONFIGS = {
    "fast host": Config(host=5, faces=("Cache", "TieredCache"), generate=False, verbs=(*FAST, "misuse")),
    "fast thinning": Config(
        (FULL, (6, 1)),
        blocks=9,
        generate=False,
        verbs=("admit", "commit", "extend", "release", "fork", "truncate", "decode", "thin"),
        options={"thinning": True},
    ),
    "thinning, windows, host": Config((FULL, (6, 1)), host=5, options={"thinning": True}),
    "fast windows": Config((FULL, (6, 1)), dtype="int8", generate=False, verbs=FAST),
    "every argument": Config(
        (FULL, (6, 1)),
        host=3,
        faces=draws.FACES,
        every=True,
        reserve_tokens=5,
        generate=False,
        policy=priority(),
        verbs=EVERY,
        options={"extra_ids": True, "retention": True, "thinning": True, "sparse": True, "backups": True},
    ),
    "sparse, windows, host": Config((FULL, (6, 1)), host=5, options={"sparse": True}),
    "extra ids": Config(options={"extra_ids": True}),
    "fast lowered": Config(lowered=True, generate=False, verbs=FAST),
    "lowered, extra ids": Config(lowered=True, options={"extra_ids": True}),
    "rollouts": Config(
        verbs=("admit", "commit", "release", "update", "forget_namespaces", "pin", "unpin", "rollout", "score", "park")
    ),
    "batches": Config(
        host=8, verbs=("admit", "commit", "release", "swap_out", "swap_in", "pin", "unpin", "update", "generate")
    ),
    "host": Config(host=5),
    "fast backups": Config(
        host=8, faces=("Cache", "TieredCache"), generate=False, verbs=(*FAST, "backup"), options={"backups": True}
    ),
    "rollouts, backups": Config(
        host=9,
        verbs=IN_TIERS,
        options={"backups": True},
    ),
    "backups": Config(host=8, options={"backups": True}),
    "backups, windows, int8": Config(
        (FULL, (6, 1)), host=6, dtype="int8", faces=("TieredCache",), options={"backups": True}
    ),
    "backups, recurrent": Config((FULL, RECURRENT, LATENT), host=7, faces=("TieredCache",), options={"backups": True}),
    "backups, mesh": Config((FULL, (6, 0)), host=6, faces=("TieredCache",), heads=2, options={"backups": True}),
    "host, int8, methods": Config(host=5, dtype="int8", faces=("TieredCache",)),
    "by class, host": Config(host=5, policy=lfu()),
    "whole blocks, host": Config(host=4, options={"partial_reuse": False}),
    "windows, int8": Config((FULL, (6, 1)), reserve_tokens=5, dtype="int8"),
    "windows alone, host": Config(((5, 0), (9, 2)), host=4),
    "windows, host, int8": Config((FULL, (6, 1)), host=4, dtype="int8"),
    "fast recurrent": Config((FULL, RECURRENT, LATENT), host=5, generate=False, verbs=FAST),
    "latents": Config((FULL, LATENT, LATENT), host=5),
    "recurrent": Config((FULL, RECURRENT, (6, 1), RECURRENT), reserve_tokens=5),
    "recurrent, host": Config((FULL, RECURRENT, LATENT, RECURRENT), host=5, faces=("TieredCache",)),
    "fast tokens": Config((FULL, (6, 1)), host=5, generate=False, verbs=FAST, options={"layout": "tokens"}),
    "tokens, latents, host": Config((FULL, LATENT), host=5, faces=("TieredCache",), options={"layout": "tokens"}),
    "fast mesh": Config(host=5, heads=2, generate=False, verbs=FAST),
    "mesh, recurrent": Config((FULL, RECURRENT), heads=2),
    "drafts, mesh": Config(
        (FULL, RECURRENT), heads=2, blocks=12, drafts=True, verbs=("admit", "commit", "release", "generate")
    ),
    "mesh, windows, host": Config((FULL, (6, 0)), host=4, dtype="int8", faces=("TieredCache",), heads=2),
    "fast context": Config(host=5, heads=2, context=2, generate=False, verbs=FAST),
    "context, host, int8": Config((FULL, (6, 1)), host=4, dtype="int8", faces=("TieredCache",), heads=2, context=2),
    "context, latents": Config((FULL, LATENT, RECURRENT), host=5, context=4),
    "windows, host, methods": Config((FULL, (6, 0), (9, 1)), host=4, reserve_tokens=5, faces=("TieredCache",)),
}


def main(configs: dict[str, Any]) -> None:
    """The command line: a history of a configuration, which is cut down if it fails."""
    parser = argparse.ArgumentParser(description="Random histories with every byte compared.")
    parser.add_argument("config", choices=configs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000)
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    config, start = configs[args.config], time.monotonic()
    try:
        life = live(config, args.seed, args.steps)
    except Failure as failure:
        print(f"after {time.monotonic() - start:.1f} s: {failure}\n\nThe history, cut down:")
        requests = shrink(config, failure.requests)
        for request in requests:
            print(request)
        try:
            carry_out(config, lambda _: requests)
        except Failure as again:
            print(again)
    else:
        print(f"{args.steps} steps in {time.monotonic() - start:.1f} s: {dict(life.tally)}")


if __name__ == "__main__":
    main(CONFIGS)
