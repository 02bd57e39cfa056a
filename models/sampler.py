# SPDX-License-Identifier: Apache-2.0
"""A sampler for training loops on the host: prompts as lists of tokens, one cache, and weights that change.

Each version of the weights has a namespace of its own, so that K/V of older ones are never found. Shapes come from the
caller's limits, not from its prompts: batches of as many prompts compile nothing new.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import Cache, LayerSpec, Namespaces, make_spec
from kvjax.checks import static_int
from kvjax.serving import Finish, Model, Rollout, Sampling, Scheduler, rollout, score

__all__ = ["Options", "Sampler", "Samples"]

_CHUNK = 512  # the most tokens of a prompt in one call of the model


class Options(NamedTuple):
    """A way to choose tokens.

    Attributes:
      max_new_tokens: T, static.
      temperature: 0 chooses the likeliest token.
      top_k: 0 for all tokens.
      top_p: 1 for all tokens.
      seed: an integer or a jax key.
      stop_tokens: end a completion.
      min_p: 0 for all tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: Any = 0
    stop_tokens: Sequence[int] = ()
    min_p: float = 0.0


class Samples(NamedTuple):
    """One completion of each prompt.

    Attributes:
      tokens: of each completion, i32[n]; the stop token included.
      logprobs: likewise f32[n]; of the whole distribution after the temperature, before top-k, top-p and min-p.
      cached: i32[groups]; tokens of each group's prompt that earlier calls, or earlier groups, had computed.
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    cached: np.ndarray


class Sampler:
    """Samples and scores with one cache, which it makes when it is first used.

    Args:
      layers: of the model.
      max_length: tokens of a prompt and its completion together.
      block_size: P.
      num_blocks: N; None: enough for max_seqs rows of max_length tokens.
      max_seqs: S; None: as many as a call has completions; one that has more begins with an empty cache.
      dtype: of the K/V.
      mesh: the devices; None: the default one.
      heads: the axis of the mesh that divides kv heads; None: each device has all of the cache.
      forget: whether blocks of old weights are emptied. Else they leave when blocks are needed.
      scheduler: of rollouts; None: prompts are computed in chunks of up to 512 tokens.

    Attributes:
      version: of the weights; `renew` makes the next one.
      cache: the cache; None before the first use.
      programs: the jitted functions for this cache; None before the first use.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], max_length: int, *, block_size: int = 16, num_blocks: int | None = None,
        max_seqs: int | None = None, dtype: Any = "bfloat16", mesh: Mesh | None = None, heads: str | None = None,
        forget: bool = True, scheduler: Scheduler | None = None,
    ):  # fmt: skip
        self.layers, self.max_length = layers, static_int("max_length", max_length, 1)
        self.block_size, self.dtype = static_int("block_size", block_size, 1), dtype
        self.num_blocks = None if num_blocks is None else static_int("num_blocks", num_blocks, 1)
        self.max_seqs = None if max_seqs is None else static_int("max_seqs", max_seqs, 1)
        self.mesh, self.heads, self.forget, self.scheduler = mesh, heads, forget, scheduler
        self.version, self.cache = 0, None
        self.programs: Any = None
        self._names, self._dirty, self._groups = Namespaces(), False, {}

    def renew(self) -> None:
        """Begins a new version of the weights."""
        self.version, self._dirty = self.version + 1, True

    @property
    def namespace(self) -> int:
        """The number of the present version's namespace."""
        return self._names(weights=self.version)

    def sample(self, model: Model, prompts: Sequence[np.ndarray], width: int, options: Options) -> Samples:
        """One completion of each prompt; equal ones that stand together are computed once.

        Args:
          model: with the weights of the present version.
          prompts: i32[n] each, of 1 to `width` tokens.
          width: of the array that has them.
          options: the way to choose tokens.

        Raises:
          ValueError: naming the argument.
          RuntimeError: if the cache has too few blocks.
        """
        cache, samples, rows, mask = self._begin(model, prompts, width, options.max_new_tokens)
        found, self.cache, _ = self.programs.sample(
            model, cache, rows, mask, np.int32(self.namespace), options.seed, np.float32(options.temperature),
            np.int32(options.top_k), np.float32(options.top_p),
            np.float32(options.min_p) if options.min_p else None, np.asarray(options.stop_tokens, np.int32),
            samples=samples, max_new_tokens=options.max_new_tokens, greedy=options.temperature == 0,
            scheduler=self.scheduler or Scheduler(chunk=min(width, _CHUNK)),
        )  # fmt: skip
        return self._on_host(found)

    def score(
        self, model: Model, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], width: int, most: int
    ) -> np.ndarray:
        """Log-probabilities f32[n, most] of a completion of each prompt, 0 beyond its end.

        Args:
          model: with the weights of the present version.
          prompts: i32[n] each, of 1 to `width` tokens.
          completions: i32[n] each, of up to `most` tokens.
          width: of the array that has the prompts.
          most: of the array that has the completions.

        Raises:
          ValueError: naming the argument.
          RuntimeError: if the cache has too few blocks.
        """
        cache, samples, rows, mask = self._begin(model, prompts, width, most)
        tokens = np.stack([np.pad(one, (0, most - one.size)) for one in completions]).astype(np.int32)
        lengths = np.array([one.size for one in completions], np.int32)
        logprobs, self.cache, _ = self.programs.score(
            model, cache, rows, tokens.reshape(-1, samples, most), mask=mask,
            completion_lengths=lengths.reshape(-1, samples), namespace=np.int32(self.namespace),
            chunk=min(width, _CHUNK),
        )  # fmt: skip
        found = np.asarray(logprobs).reshape(len(prompts), most)
        if np.isnan(found).any():
            raise self._too_few(f"{np.isnan(found).any(axis=1).sum()} of {len(found)} were not computed")
        return found

    def _begin(
        self, model: Model, prompts: Sequence[np.ndarray], width: int, most: int
    ) -> tuple[Cache, int, np.ndarray, np.ndarray]:
        """A cache for `most` new tokens of each prompt, the size of groups, and their prompts at the ends of rows."""
        lengths = [one.size for one in prompts]
        if not lengths or not 1 <= min(lengths) <= max(lengths) <= width:
            raise ValueError(f"prompts: got lengths {lengths}, wanted some, of 1 to {width} tokens each")
        if max(lengths) + most > self.max_length:
            raise ValueError(
                f"prompts: got one of {max(lengths)} tokens for {most} new ones, wanted at most {self.max_length} "
                "together (max_length)"
            )
        # The size of an earlier batch's groups is taken if it serves: it is compiled.
        samples = group_size(prompts, self.max_seqs or len(prompts), self._groups.get(len(prompts)))
        self._groups[len(prompts)] = samples
        leaders = prompts[::samples]
        rows = np.stack([np.pad(one, (width - one.size, 0)) for one in leaders]).astype(np.int32)
        mask = np.arange(width) >= width - np.array([[one.size] for one in leaders])
        return self._ready(model, len(prompts)), samples, rows, mask

    def _ready(self, model: Model, completions: int) -> Cache:
        """The cache without old weights' blocks; made anew if there is none, or if it has too few rows."""
        cache, self.cache = self.cache, None
        if cache is not None and self.max_seqs is None and cache.state.spec.max_seqs < completions:
            cache = None
        if cache is None:
            cache = self._made(self.max_seqs or completions, jax.tree.leaves(model)[0])
            self.programs = _Programs(cache)
        elif self._dirty and self.forget:
            cache, _ = self.programs.forget(cache, np.array([self.namespace], np.int32))
        self._dirty = False
        return cache

    def _made(self, rows: int, weight: Any) -> Cache:
        """An empty cache, as committed to devices as the weights are: the first call is compiled for all later ones."""
        blocks = self.num_blocks or rows * -(-self.max_length // self.block_size)
        spec = make_spec(
            self.layers, num_blocks=blocks, max_seqs=rows, max_length=self.max_length, block_size=self.block_size,
            dtype=self.dtype,
        )  # fmt: skip
        if self.heads is not None:
            return Cache.create(spec, mesh=self.mesh, heads=self.heads)
        cache, sharding = Cache.create(spec), getattr(weight, "sharding", None)
        mesh = self.mesh or getattr(sharding, "mesh", None)
        if mesh is not None:
            return jax.device_put(cache, NamedSharding(mesh, PartitionSpec()))
        return jax.device_put(cache, sharding) if getattr(weight, "committed", False) else cache

    def _on_host(self, rollouts: Rollout) -> Samples:
        """The completions one after the other."""
        found = jax.device_get(rollouts)
        served = np.isin(found.finish, (Finish.STOP, Finish.LENGTH))
        if not served.all():
            reasons = sorted({Finish(one).name for one in found.finish[~served].tolist()})
            raise self._too_few(f"{np.sum(~served)} of {served.size} completions ended with {', '.join(reasons)}")
        flat = (rows.reshape(served.size, -1) for rows in (found.tokens, found.logprobs))
        lengths = found.lengths.ravel()
        tokens, logprobs = ([row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in flat)
        return Samples(tokens, logprobs, found.cached[:, 0])

    def _too_few(self, what: str) -> RuntimeError:
        assert self.cache is not None
        return RuntimeError(f"num_blocks: got {self.cache.state.spec.groups[0].num_blocks}, wanted more: {what}")


class _Programs:
    """Jitted functions that leave a cache on the devices where it is: XLA would divide it as it likes."""

    def __init__(self, cache: Cache):
        is_committed = all(leaf.committed for leaf in jax.tree.leaves(cache))
        devices = jax.tree.map(lambda leaf: leaf.sharding, cache) if is_committed else None
        static = ("samples", "max_new_tokens", "greedy", "scheduler")
        options: dict[str, Any] = {"donate_argnames": "cache", "out_shardings": (None, devices, None)}
        self.sample = jax.jit(_sample, static_argnames=static, **options)
        self.score = jax.jit(score, static_argnames="chunk", **options)
        self.forget = jax.jit(Cache.forget_namespaces, donate_argnums=0, out_shardings=(devices, None))


def group_size(prompts: Sequence[np.ndarray], most: int, usual: int | None = None) -> int:
    """The number of samples of a prompt, so that the batch is prompts with as many samples each, one after the other.

    Args:
      prompts: i32[n] each.
      most: the size is at most this.
      usual: is taken if it serves. None: the largest size is.
    """
    runs = itertools.groupby(prompts, key=lambda prompt: prompt.tolist())
    largest = int(np.gcd.reduce([len([*run]) for _, run in runs]))
    if usual is not None and usual <= most and largest % usual == 0:
        return usual
    return max(size for size in range(1, min(largest, most) + 1) if largest % size == 0)


def _sample(
    model, cache, prompts, mask, namespace, seed, temperature, top_k, top_p, min_p, stop_tokens, *, samples,
    max_new_tokens, greedy, scheduler,
):  # fmt: skip
    """`rollout` with the log-probabilities of the whole distribution, whatever top-k, top-p and min-p leave of it."""
    options: dict[str, Any] = {"sampling": Sampling()}
    if not greedy:
        each = jnp.broadcast_to(temperature, prompts.shape[:1])
        sampling = Sampling(jnp.float32(1.0), top_k, top_p, min_p=min_p)
        options = {"sampling": sampling, "logits_fn": _scaled, "logits_state": each}
    return rollout(
        model, cache, prompts, mask=mask, samples=samples, max_new_tokens=max_new_tokens, seed=seed,
        stop_tokens=stop_tokens, namespace=namespace, logprobs="raw", scheduler=scheduler, **options,
    )  # fmt: skip


def _scaled(logits: jax.Array, _: jax.Array, __: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    return logits / temperature[:, None], temperature
