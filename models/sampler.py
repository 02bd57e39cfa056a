# SPDX-License-Identifier: Apache-2.0
"""A sampler for training loops on the host, with lists of tokens as prompts, a cache, and changing weights.

Each version of the weights has its own namespace, so no version finds the K/V of another. Shapes depend on the caller's
limits, not on the prompts, so a batch compiles nothing new if an earlier batch had the same number of prompts.
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

_CHUNK = 512  # a call of the model takes at most this many tokens of a prompt


class Options(NamedTuple):
    """Options for choosing tokens, with the meaning they have in `kvjax.serving.Sampling`.

    Attributes:
      max_new_tokens: T, static.
      temperature: factor to divide the logits by; 0 chooses the likeliest token.
      top_k: number of likeliest tokens to choose from; 0 means no limit.
      top_p: smallest share of the distribution to choose from; 1 means no limit.
      seed: an integer or a jax key.
      stop_tokens: tokens to end a completion with.
      min_p: smallest probability of a token, relative to the likeliest; 0 means no limit.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: Any = 0
    stop_tokens: Sequence[int] = ()
    min_p: float = 0.0


class Samples(NamedTuple):
    """A completion of each prompt.

    Attributes:
      tokens: an i32[n] for each completion; it includes the stop token.
      logprobs: an f32[n] for each completion; log-probabilities after the temperature, before top-k, top-p and min-p.
      cached: i32[groups]; tokens of each group's prompt found in the cache, from earlier calls or earlier groups.
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    cached: np.ndarray


class Sampler:
    """Samples and scores with a cache, which the first use creates.

    Args:
      layers: the model's layers.
      max_length: tokens of a prompt and its completion together.
      block_size: P.
      num_blocks: N; None defaults to enough blocks for max_seqs rows of max_length tokens.
      max_seqs: S; None defaults to the number of completions in a call, and a call with more completions begins with an
        empty cache.
      dtype: dtype for the K/V.
      mesh: the devices; None defaults to the default device.
      heads: the axis of the mesh to divide kv heads over; None gives each device all of the cache.
      forget: whether `renew` empties the blocks of old weights. Otherwise they leave when blocks are needed.
      scheduler: scheduler for rollouts; None computes prompts in chunks of up to 512 tokens.

    Attributes:
      version: version of the weights, which `renew` increments.
      cache: the cache, or None before the first use.
      programs: the jitted functions for this cache, or None before the first use.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        max_length: int,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_seqs: int | None = None,
        dtype: Any = "bfloat16",
        mesh: Mesh | None = None,
        heads: str | None = None,
        forget: bool = True,
        scheduler: Scheduler | None = None,
    ):
        self.layers = layers
        self.max_length = static_int("max_length", max_length, 1)
        self.block_size = static_int("block_size", block_size, 1)
        self.num_blocks = None if num_blocks is None else static_int("num_blocks", num_blocks, 1)
        self.max_seqs = None if max_seqs is None else static_int("max_seqs", max_seqs, 1)
        self.dtype = dtype
        self.mesh = mesh
        self.heads = heads
        self.forget = forget
        self.scheduler = scheduler

        self.version = 0
        self.cache = None
        self.programs: Any = None
        self._names = Namespaces()
        self._has_old_blocks = False
        self._num_rows = 0  # of the cache
        self._group_sizes = {}  # of the last batch with a number of prompts

    def renew(self) -> None:
        """Begins a new version of the weights."""
        self.version += 1
        self._has_old_blocks = True

    def sleep(self) -> None:
        """Frees the memory of the cache until the next call, which finds nothing cached. That call compiles nothing."""
        cache, self.cache = self.cache, None
        for array in jax.tree.leaves(cache):
            array.delete()

    @property
    def namespace(self) -> int:
        """The number of the namespace of the present weights."""
        return self._names(weights=self.version)

    def sample(self, model: Model, prompts: Sequence[np.ndarray], width: int, options: Options) -> Samples:
        """Samples a completion of each prompt. Equal prompts next to each other are computed once.

        Args:
          model: the model with the weights of the present version.
          prompts: an i32[n] for each, of 1 to `width` tokens.
          width: tokens of the array for all prompts.
          options: options for choosing tokens.

        Raises:
          ValueError: an argument is wrong.
          RuntimeError: the cache has too few blocks.
        """
        cache, samples, rows, mask = self._begin(model, prompts, width, options.max_new_tokens)
        rollouts, self.cache, _ = self.programs.sample(
            model,
            cache,
            rows,
            mask,
            np.int32(self.namespace),
            options.seed,
            np.float32(options.temperature),
            np.int32(options.top_k),
            np.float32(options.top_p),
            np.float32(options.min_p) if options.min_p else None,
            np.asarray(options.stop_tokens, np.int32),
            samples=samples,
            max_new_tokens=options.max_new_tokens,
            greedy=options.temperature == 0,
            scheduler=self.scheduler or Scheduler(chunk=min(width, _CHUNK)),
        )
        return self._on_host(rollouts)

    def score(
        self,
        model: Model,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        width: int,
        max_new_tokens: int,
    ) -> np.ndarray:
        """Computes log-probabilities f32[n, max_new_tokens] of a completion of each prompt, 0 beyond its end.

        Args:
          model: the model with the weights of the present version.
          prompts: an i32[n] for each, of 1 to `width` tokens.
          completions: an i32[n] for each, of up to `max_new_tokens` tokens.
          width: tokens of the array for all prompts.
          max_new_tokens: tokens of the array for all completions.

        Raises:
          ValueError: an argument is wrong.
          RuntimeError: the cache has too few blocks.
        """
        cache, samples, rows, mask = self._begin(model, prompts, width, max_new_tokens)
        padded = [np.pad(completion, (0, max_new_tokens - completion.size)) for completion in completions]
        tokens = np.stack(padded).astype(np.int32)
        lengths = np.array([completion.size for completion in completions], np.int32)
        logprobs, self.cache, _ = self.programs.score(
            model,
            cache,
            rows,
            tokens.reshape(-1, samples, max_new_tokens),
            mask=mask,
            completion_lengths=lengths.reshape(-1, samples),
            namespace=np.int32(self.namespace),
            chunk=min(width, _CHUNK),
        )
        logprobs = np.asarray(logprobs).reshape(len(prompts), max_new_tokens)
        is_missing = np.isnan(logprobs).any(axis=1)
        if is_missing.any():
            raise self._too_few(f"{is_missing.sum()} of {len(logprobs)} were not computed")
        return logprobs

    def _begin(
        self, model: Model, prompts: Sequence[np.ndarray], width: int, max_new_tokens: int
    ) -> tuple[Cache, int, np.ndarray, np.ndarray]:
        """Prepares a call.

        Returns:
          A cache for `max_new_tokens` tokens after each prompt, the size of groups, the groups' prompts i32[groups,
          width] at the ends of rows, and their mask.
        """
        lengths = [prompt.size for prompt in prompts]
        if not lengths or not 1 <= min(lengths) <= max(lengths) <= width:
            raise ValueError(f"prompts: got lengths {lengths}, wanted some, of 1 to {width} tokens each")
        if max(lengths) + max_new_tokens > self.max_length:
            raise ValueError(
                f"prompts: got one of {max(lengths)} tokens for {max_new_tokens} new ones, wanted at most "
                f"{self.max_length} together (max_length)"
            )
        # The size from an earlier batch is preferred, because its program is compiled.
        samples = group_size(prompts, self.max_seqs or len(prompts), self._group_sizes.get(len(prompts)))
        self._group_sizes[len(prompts)] = samples
        leaders = prompts[::samples]
        rows = np.stack([np.pad(prompt, (width - prompt.size, 0)) for prompt in leaders]).astype(np.int32)
        mask = np.arange(width) >= width - np.array([[prompt.size] for prompt in leaders])
        return self._ready_cache(model, len(prompts)), samples, rows, mask

    def _ready_cache(self, model: Model, num_completions: int) -> Cache:
        """Takes the cache, without blocks of old weights. Makes a new cache if it is missing or too small."""
        cache, self.cache = self.cache, None
        if cache is not None and self.max_seqs is None and cache.state.spec.max_seqs < num_completions:
            cache = None
        if cache is None:
            self._num_rows = self.max_seqs or max(num_completions, self._num_rows)
            cache = self._new_cache(self._num_rows, jax.tree.leaves(model)[0])
            if self.programs is None or self.programs.spec != cache.state.spec:
                self.programs = _Programs(cache)
        elif self._has_old_blocks and self.forget:
            cache, _ = self.programs.forget(cache, np.array([self.namespace], np.int32))
        self._has_old_blocks = False
        return cache

    def _new_cache(self, rows: int, weight: Any) -> Cache:
        """Makes an empty cache. It is committed to devices if the weights are, so that calls compile only once."""
        num_blocks = self.num_blocks or rows * -(-self.max_length // self.block_size)
        spec = make_spec(
            self.layers,
            num_blocks=num_blocks,
            max_seqs=rows,
            max_length=self.max_length,
            block_size=self.block_size,
            dtype=self.dtype,
        )
        if self.heads is not None:
            return Cache.create(spec, mesh=self.mesh, heads=self.heads)
        cache = Cache.create(spec)
        sharding = getattr(weight, "sharding", None)
        mesh = self.mesh or getattr(sharding, "mesh", None)
        if mesh is not None:
            return jax.device_put(cache, NamedSharding(mesh, PartitionSpec()))
        return jax.device_put(cache, sharding) if getattr(weight, "committed", False) else cache

    def _on_host(self, rollouts: Rollout) -> Samples:
        """Brings the completions to the host, as a list. Raises a RuntimeError if any is unfinished."""
        fetched = jax.device_get(rollouts)
        is_done = np.isin(fetched.finish, (Finish.STOP, Finish.LENGTH))
        if not is_done.all():
            reasons = sorted({Finish(finish).name for finish in fetched.finish[~is_done].tolist()})
            raise self._too_few(f"{np.sum(~is_done)} of {is_done.size} completions ended with {', '.join(reasons)}")
        lengths = fetched.lengths.ravel()

        def without_padding(array: np.ndarray) -> list[np.ndarray]:
            return [row[:length] for row, length in zip(array.reshape(lengths.size, -1), lengths, strict=True)]

        return Samples(without_padding(fetched.tokens), without_padding(fetched.logprobs), fetched.cached[:, 0])

    def _too_few(self, reason: str) -> RuntimeError:
        assert self.cache is not None
        return RuntimeError(f"num_blocks: got {self.cache.state.spec.groups[0].num_blocks}, wanted more: {reason}")


class _Programs:
    """Jitted functions. They keep a cache on its devices, because XLA might otherwise divide it."""

    def __init__(self, cache: Cache):
        is_committed = all(leaf.committed for leaf in jax.tree.leaves(cache))
        devices = jax.tree.map(lambda leaf: leaf.sharding, cache) if is_committed else None
        static = ("samples", "max_new_tokens", "greedy", "scheduler")
        options: dict[str, Any] = {"donate_argnames": "cache", "out_shardings": (None, devices, None)}
        self.spec = cache.state.spec
        self.sample = jax.jit(_sample, static_argnames=static, **options)
        self.score = jax.jit(score, static_argnames="chunk", **options)
        self.forget = jax.jit(Cache.forget_namespaces, donate_argnums=0, out_shardings=(devices, None))


def group_size(prompts: Sequence[np.ndarray], max_size: int, preferred: int | None = None) -> int:
    """The size of groups such that all prompts in a group are equal, if the batch is divided into such groups.

    For the prompts A A A A B B, the largest size is 2: two groups of A and a group of B.

    Args:
      prompts: an i32[n] for each.
      max_size: largest size allowed.
      preferred: size to take if it divides the batch; None defaults to the largest size.
    """
    runs = itertools.groupby(prompts, key=lambda prompt: prompt.tolist())
    largest = int(np.gcd.reduce([len([*run]) for _, run in runs]))
    if preferred is not None and preferred <= max_size and largest % preferred == 0:
        return preferred
    return max(size for size in range(1, min(largest, max_size) + 1) if largest % size == 0)


def _sample(
    model,
    cache,
    prompts,
    mask,
    namespace,
    seed,
    temperature,
    top_k,
    top_p,
    min_p,
    stop_tokens,
    *,
    samples,
    max_new_tokens,
    greedy,
    scheduler,
):
    """Calls `rollout` for log-probabilities of the whole distribution, before top-k, top-p and min-p."""
    options: dict[str, Any] = {"sampling": Sampling()}
    if not greedy:
        temperatures = jnp.broadcast_to(temperature, prompts.shape[:1])
        sampling = Sampling(jnp.float32(1.0), top_k, top_p, min_p=min_p)
        options = {"sampling": sampling, "logits_fn": _scaled, "logits_state": temperatures}
    return rollout(
        model,
        cache,
        prompts,
        mask=mask,
        samples=samples,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_tokens=stop_tokens,
        namespace=namespace,
        logprobs="raw",
        scheduler=scheduler,
        **options,
    )


def _scaled(logits: jax.Array, _: jax.Array, __: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    return logits / temperature[:, None], temperature
