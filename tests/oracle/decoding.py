# SPDX-License-Identifier: Apache-2.0
"""Decoding, verified after each call of its loop, with a model which reads every byte visible to its rows."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import serving
from kvjax.serving.capacity import num_steps
from kvjax.serving.decode import Rows
from tests import drive
from tests.oracle import single_steps
from tests.oracle.bytes_machine import PRIME, visible
from tests.poison import poisoned

SIZE, S, WIDTH, BLOCKS, VOCAB = 4, 4, 24, 28, 13
LAYERS = {"full": ((None, 0),), "windows": ((None, 0), (6, 3)), "narrow": ((3, 0), (9, 1))}


@functools.cache
def make_spec(layers: str, **options: Any) -> kvjax.CacheSpec:
    return kvjax.make_spec(
        [kvjax.LayerSpec(1, 2, *layer) for layer in LAYERS[layers]], num_blocks=BLOCKS, max_seqs=S, max_length=WIDTH,
        block_size=SIZE, dtype="float32", **options,
    )  # fmt: skip


# The model.


def read_all(tokens: jax.Array, pools: Any, view: Any, *, last: jax.Array) -> Any:
    """A model which makes a number of a token, its position and all visible K and V. It writes it, and chooses by it.

    A wrong position or a wrong byte changes everything after it. `calls` counts the model's calls.
    """
    del last
    position = view.positions[:, 0]
    number = (tokens[:, 0] * 7_919 + position * 26_861 + 1) % PRIME
    at = np.arange(view.tables[0].shape[1] * SIZE, dtype=np.int32)[None]
    for layer in range(num_layers(pools.spec)):
        group, _, index, array = pools.at(layer)
        seen = (at < view.lengths[:, None] - 1) & visible(pools.spec.groups[group], at, position[:, None])
        for which in (0, 1):
            values = array[view.tables[group], index, which, 0, :, 0].reshape(seen.shape)
            parts = jnp.where(jnp.isnan(values), 4_711.0, values).astype(jnp.int32) * (at % 5 + which + 1) % PRIME
            number = (number + jnp.sum(jnp.where(seen, parts, 0), axis=1)) % PRIME
    for layer in range(num_layers(pools.spec)):
        key = ((number + layer) % PRIME).astype(jnp.float32)[:, None, None, None]
        pools = kvjax.write(pools, layer, *(jnp.concatenate([x, -x], axis=3) for x in (key, key + 1)), view)
    group, pool, _, array = pools.at(0)
    pools = pools.with_pool(group, pool, array.at[-1, 0, 0, 0, -1, 0].add(1))
    return (number[:, None] * (3 + np.arange(VOCAB, dtype=np.int32)[None]) % 61).astype(jnp.float32) / 8, pools


def num_layers(spec: Any) -> int:
    return sum(len(pool.layers) for group in spec.groups for pool in group.pools)


def calls(cache: kvjax.Cache) -> int:
    """The number of the model's calls, in a slot of the scratch row to which no padding is written."""
    return int(cache.pools.at(0)[3][-1, 0, 0, 0, -1, 0])


MODEL = jax.tree_util.Partial(read_all)


# The loops.


@functools.cache
def single(steps: int, **options: Any) -> Callable[..., Any]:
    """The loop of single steps, jitted."""
    return _jit(single_steps.decode, steps=steps, **options)


@functools.cache
def in_blocks(k: int, steps: int, **options: Any) -> Callable[..., Any]:
    """`decode` in blocks of up to k steps, jitted, with its arguments `fixed_steps` and `logits_fn`."""
    return _jit(serving.decode, steps=steps, k=k, **options)


def _jit(decode: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(decode, **options), compiler_options={"xla_backend_optimization_level": 0})


STEP = jax.jit(kvjax.step)
NUM_STEPS = jax.jit(num_steps, static_argnames="k")


# A start.


@dataclasses.dataclass(frozen=True)
class Start:
    """The situation before the first step.

    Attributes:
      prompts: prompts of the rows in use.
      served: prompts computed and released before.
      forks: (row, free row). The copy continues with another token.
      ahead: {row: tokens which it has chosen before the others begin}.
      idle: rows in use which do not decode, with three more tokens reserved.
      left: tokens which each row still wants.
      stop: up to four tokens.
      options: options of `admit`.
    """

    prompts: Mapping[int, Sequence[int]]
    served: Sequence[Sequence[int]] = ()
    forks: Sequence[tuple[int, int]] = ()
    ahead: Mapping[int, int] = dataclasses.field(default_factory=dict)
    idle: Sequence[int] = ()
    left: Sequence[int] = (9,) * S
    stop: Sequence[int] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Decoding:
    """A cache and its decoding rows, verified after each call of a loop.

    Attributes:
      cache: state and pools.
      rows: the `Rows` of the loop.
      texts: (token, log-probability) of all chosen tokens of each row.
      recorded: events since `begin`, with texts in place of block numbers.
      counted: the results of `num_steps` before each call, for blocks of up to P steps.
      out_of_blocks: whether the loop ended for lack of blocks.
    """

    def __init__(self, spec: Any, num_blocks: int = BLOCKS, policy: Any = None):
        cache = kvjax.Cache.create(spec, policy, num_blocks=num_blocks)
        pools = poisoned(cache.pools)
        group, pool, _, array = pools.at(0)
        self.cache = cache.replace(pools=pools.with_pool(group, pool, array.at[-1, 0, 0, 0, -1, 0].set(0)))
        self.rows = Rows(
            jnp.zeros(S, jnp.int32), jnp.zeros(S, bool), jnp.zeros(S, jnp.int32), jnp.arange(S, dtype="u4"),
            jnp.zeros(S, jnp.int32),
        )  # fmt: skip
        self.mirror, self.recorded, self.counted = kvjax.events.Mirror(), collections.Counter(), []
        self.texts: list[list[tuple[int, float]]] = [[] for _ in range(S)]
        self.out_of_blocks, self.log_room, self.stop = False, 200, jnp.full((4,), -7, jnp.int32)
        self.log = kvjax.events.init_log(200, SIZE)
        self.first_call = 0

    # Before the first step.

    def begin(self, start: Start) -> Decoding:
        """Admits and computes the prompts."""
        for prompt in start.served:
            self.compute({0: prompt}, start.options)
            self.ask("release", np.int32(0))
        self.compute(start.prompts, start.options)
        for source, target in start.forks:
            self.ask("fork", np.int32(source), np.int32(target))
            token = (self.rows.token[source] + 1) % VOCAB
            self.rows = self.rows.replace(token=self.rows.token.at[target].set(token))
        for seq, count in start.ahead.items():
            self.activate([seq], [count] * S)
            self.run(single(6))
        used = np.asarray(self.cache.state.seqs.length) > 0
        idle = np.isin(np.arange(S), start.idle)
        if start.idle:
            self.ask("extend", idle, np.where(idle, 3, 0).astype(np.int32), max_tokens=drive.MOST)
        self.activate(np.flatnonzero(used & ~idle), start.left)
        self.rows = self.rows.replace(prompt=self.cache.state.seqs.committed)
        self.stop = jnp.asarray(drive.padded(start.stop, 4, -7))
        self.recorded, self.counted, self.first_call = collections.Counter(), [], calls(self.cache)
        self.texts = [[] for _ in range(S)]
        return self

    def compute(self, prompts: Mapping[int, Sequence[int]], options: Mapping[str, Any]) -> None:
        for seq, prompt in prompts.items():
            self.ask(
                "admit", np.int32(seq), drive.padded(prompt, WIDTH), np.int32(len(prompt)), namespace=np.int32(0),
                **options,
            )  # fmt: skip
        lines = np.stack([drive.padded(prompts.get(seq, ()), WIDTH) for seq in range(S)])
        lengths = np.array([len(prompts.get(seq, ())) for seq in range(S)], np.int32)
        while np.any(left := np.maximum(lengths - np.asarray(self.cache.state.seqs.committed), 0)):
            tokens = np.take_along_axis(lines, (lengths - left)[:, None] % WIDTH, axis=1)
            self.cache, logits, events = STEP(MODEL, self.cache, tokens, np.minimum(left, 1))
            self.follow(kvjax.to_list(events))
            chosen = jnp.argmax(logits, axis=1).astype(jnp.int32)
            self.rows = self.rows.replace(token=jnp.where(left == 1, chosen, self.rows.token))

    def ask(self, verb: str, *args: Any, **options: Any) -> None:
        self.cache, events = drive.METHODS[verb](self.cache, *args, **options)
        assert bool(events.ok), (verb, drive.names(events))
        self.follow(kvjax.to_list(events))

    def activate(self, seqs: Any, left: Sequence[int]) -> None:
        active = jnp.isin(jnp.arange(S), jnp.asarray(seqs))
        self.rows = self.rows.replace(active=active, remaining=jnp.asarray(left, jnp.int32))

    # Decoding.

    def run(self, loop: Callable[..., Any], **options: Any) -> Decoding:
        """Calls a loop until no row is active or blocks are missing."""
        while bool(jnp.any(self.rows.active)) and not self.out_of_blocks:
            assert self.call(loop, **options) or self.out_of_blocks, "the loop does nothing"
        return self

    def call(self, loop: Callable[..., Any], now: int = 0, sampling: kvjax.Sampling | None = None) -> int:
        """Calls a loop once, and returns the maximum number of tokens chosen by a row."""
        before, rows, spec = self.cache.state, self.rows, self.cache.state.spec
        want = jnp.where(rows.active, jnp.minimum(rows.remaining, jnp.maximum(WIDTH - before.seqs.length, 1)), 0)
        self.counted.append(int(NUM_STEPS(before, jnp.minimum(want, SIZE), SIZE, jnp.int32(self.log_room))))
        log = self.log.replace(appended=self.log.num_free - self.log_room)
        self.cache, self.rows, log, decoded = loop(
            MODEL, self.cache, rows, log, stop=self.stop, now=np.int32(now), sampling=sampling
        )
        self.records = np.asarray(log.records)[int(self.log.num_free) - self.log_room : int(log.appended)]
        self.follow(kvjax.to_list(log))
        self.out_of_blocks = bool(decoded.out_of_blocks)
        state = self.cache.state
        kvjax.check(state)
        assert kvjax.events.index_of(state) == self.mirror.index, "the events do not give the index"
        length, committed = np.asarray(state.seqs.length), np.asarray(state.seqs.committed)
        active = np.asarray(rows.active)
        assert np.array_equal(length[active], committed[active])
        assert np.array_equal(length[~active], np.asarray(before.seqs.length)[~active])
        new = np.asarray(decoded.tokens) >= 0
        grown = committed - np.asarray(before.seqs.committed)
        assert np.array_equal(new.sum(axis=1), grown)
        for seq, (tokens, logprobs) in enumerate(zip(decoded.tokens.tolist(), decoded.logprobs.tolist(), strict=True)):
            assert tokens[grown[seq] :] == [-1] * (len(tokens) - grown[seq])
            assert logprobs[grown[seq] :] == [0.0] * (len(tokens) - grown[seq])
            self.texts[seq] += list(zip(tokens, logprobs, strict=True))[: grown[seq]]
        assert spec.max_length == WIDTH
        return int(grown.max())

    def follow(self, decoded: Sequence[dict[str, Any]]) -> None:
        """Folds events, and records them by the texts of their blocks."""
        for event in decoded:
            nodes, self.mirror = self.mirror.nodes, kvjax.fold([event], self.mirror)
            node = event["group"], event.get("block"), event.get("generation")
            text = {**nodes, **self.mirror.nodes}.get(node, (event.get("num_tokens"),))
            self.recorded[event["kind"], event["group"], text] += 1

    # After the loop.

    @property
    def steps(self) -> int:
        """The model's calls since `begin`."""
        return calls(self.cache) - self.first_call

    @property
    def evicts(self) -> bool:
        return any(kind == "removed" for kind, *_ in self.recorded)

    def rows_left(self) -> dict[str, Any]:
        """The fields of each row when the loop has ended."""
        seqs, rows = self.cache.state.seqs, self.rows
        fields = {"length": seqs.length, "committed": seqs.committed, "token": rows.token, "left": rows.remaining,
                "active": rows.active}  # fmt: skip
        return {name: np.asarray(x).tolist() for name, x in fields.items()} | {"out of blocks": self.out_of_blocks}

    def held(self) -> list[int]:
        """The number of blocks of each group held by rows."""
        groups = self.cache.state.groups
        return [int(group.num_blocks) - int(group.num_empty) - int(group.num_cached) for group in groups]

    def bytes(self) -> list[Any]:
        """The K/V visible to each row's next token, in every layer."""
        state, pools = self.cache.state, self.cache.pools
        tables, found = kvjax.view(state, 1).tables, []
        for seq, written in enumerate(state.seqs.committed.tolist()):
            at = np.arange(written)
            for layer in range(num_layers(pools.spec)):
                group, _, index, array = pools.at(layer)
                seen = at[np.asarray(visible(pools.spec.groups[group], at, written))]
                values = np.asarray(array)[np.asarray(tables[group])[seq, seen // SIZE], index, :, 0, seen % SIZE]
                found.append(values.tolist())
        return found
