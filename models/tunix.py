# SPDX-License-Identifier: Apache-2.0
"""A rollout engine of Tunix that samples from a paged cache: `ClusterConfig(rollout_engine=KvjaxRollout)`.

It takes the place of Tunix' own `vanilla` engine, with the same models and configuration (docs/howto/tunix.md).
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kvjax.serving.options import Scheduler
from kvjax.serving.sampling import seed_key

from .paged_decoders import PagedModel, paged
from .sampler import Options, Sampler

try:
    from tunix.generate import tokenizer_adapter  # pyright: ignore[reportMissingImports]
    from tunix.rl import reshard  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(f'{__name__} needs google-tunix: pip install "kvjax[tunix]"') from error

__all__ = ["KvjaxRollout"]

# Fields of a RolloutConfig that an engine of another name reads, and that only the making of an engine reads.
_OF_OTHERS, _OF_INIT = ("rollout_vllm_", "rollout_sglang_jax_"), ("kv_cache_size", "data_type")
_READ = (
    "max_tokens_to_generate", "temperature", "top_p", "top_k", "seed", "max_prompt_length", "eos_tokens",
    "return_logprobs",
)  # fmt: skip


class KvjaxRollout(base_rollout.BaseRollout):
    """Samples for Tunix' trainers; K/V of a prompt are computed once for its group, and never found by new weights.

    Weights that the trainer shares are used as they are at each call: new arrays in them are a new version, and so is
    each `update_params`. `functools.partial(KvjaxRollout, block_size=32)` goes into a `ClusterConfig` too.

    Args:
      rollout_actor: the decoder; see `models.paged_decoders`. On other devices than `mesh` it is copied.
      tokenizer: what Tunix takes.
      mesh: of the rollouts.
      rollout_config: a `RolloutConfig`; `kv_cache_size` is `max_length`, and `data_type` that of copied weights.
      max_length: tokens of a prompt and its completion together. None: `kv_cache_size`.
      block_size, num_blocks, max_seqs, forget, scheduler: see `models.sampler.Sampler`.
      dtype: of the K/V; None: the model's.
      heads: the axis of the mesh that divides kv heads, if it has several devices.

    Attributes:
      sampler: the sampler, with its cache and version.
      cached: i32[groups]; tokens of each group's prompt that the last `generate` found.

    Raises:
      ValueError: naming the argument.
    """

    def __init__(
        self, rollout_actor: Any, tokenizer: Any, mesh: Mesh | None = None, rollout_config: Any = None, *,
        max_length: int | None = None, block_size: int = 16, num_blocks: int | None = None,
        max_seqs: int | None = None, dtype: Any = None, forget: bool = True, scheduler: Scheduler | None = None,
        heads: str = "tp",
    ):  # fmt: skip
        if rollout_config is None and max_length is None:
            raise ValueError("rollout_config: got None, wanted it or max_length")
        if rollout_config is not None:
            _check_fields(rollout_config)
        if not isinstance(tokenizer, tokenizer_adapter.TokenizerAdapter):
            tokenizer = tokenizer_adapter.TokenizerAdapter(tokenizer)
        self._tokenizer, self._lock = tokenizer, threading.RLock()
        module = rollout_actor if mesh is None else reshard.reshard_model_to_mesh(rollout_actor, mesh)
        self._module, self._is_shared = module, module is rollout_actor
        self._take_dtype(getattr(rollout_config, "data_type", None))
        model = paged(module)
        self._decoder, self._arrays = model.replace(arrays=[]), [_Placed.of(array) for array in model.arrays]
        divides = mesh is not None and mesh.shape.get(heads, 1) > 1
        self.sampler = Sampler(
            model.layer_specs(), getattr(rollout_config, "kv_cache_size", 0) if max_length is None else max_length,
            block_size=block_size, num_blocks=num_blocks, max_seqs=max_seqs, dtype=dtype or model.dtype,
            mesh=mesh, heads=heads if divides else None, forget=forget, scheduler=scheduler,
        )  # fmt: skip
        self.cached = np.zeros(0, np.int32)

    def generate(self, prompts: Sequence[str], rollout_config: Any) -> base_rollout.RolloutOutput:
        """One completion of each prompt; prompts that are repeated `num_generations` times are computed once.

        Args:
          prompts: texts.
          rollout_config: a `RolloutConfig`. `top_p=None` and `temperature=0` choose the likeliest tokens.

        Returns:
          What the vanilla engine returns: completions without their eos tokens, no logits, and log-probabilities of
          the distribution after the temperature, before top-k and top-p.

        Raises:
          ValueError: naming the argument, or the field of the configuration.
          RuntimeError: if the cache has too few blocks.
        """
        _check_fields(rollout_config)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        eos = list(rollout_config.eos_tokens or [self.eos_id()])
        options, width, pad = _options(rollout_config, eos), rollout_config.max_prompt_length, self.pad_id()
        tokens = [self._tokenized(prompt) for prompt in prompts]
        longest = max((one.size for one in tokens), default=0)
        if longest > width:
            width = 1 << (longest - 1).bit_length()
        with self._lock:
            found = self.sampler.sample(self._current(), [one[one != pad] for one in tokens], width, options)
            self.cached = found.cached
        ends = [_end(one, eos) for one in found.tokens]
        chosen = [one[:end] for one, end in zip(found.tokens, ends, strict=True)]
        logprobs = [one[:end].tolist() for one, end in zip(found.logprobs, ends, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(one.tolist()) for one in chosen], logits=[], tokens=chosen,
            left_padded_prompt_tokens=np.stack(
                [np.pad(one, (width - one.size, 0), constant_values=pad) for one in tokens]
            ),
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )  # fmt: skip

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Log-probabilities f32[B, T] of completions i32[B, T] of prompts i32[B, P], 0 for padding.

        Raises:
          ValueError: naming the argument.
          RuntimeError: if the cache has too few blocks.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        if prompts.ndim != 2 or completions.ndim != 2 or len(prompts) != len(completions):
            raise ValueError(f"completion_tokens: got shape {list(completions.shape)}, wanted [{len(prompts)}, T]")
        rows, is_token = ([row[row != self.pad_id()] for row in prompts]), completions != self.pad_id()
        given = [row[where] for row, where in zip(completions, is_token, strict=True)]
        with self._lock:
            found = self.sampler.score(self._current(), rows, given, prompts.shape[1], completions.shape[1])
        logprobs = np.zeros(completions.shape, np.float32)
        for number, (where, one) in enumerate(zip(is_token, found, strict=True)):
            logprobs[number, where] = one[: given[number].size]
        return jax.numpy.asarray(logprobs)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes new weights, all or some of them: a new version, which finds no K/V of the old one.

        Args:
          params: by path, as `nnx.state` gives them.
          filter_types: kinds of the weights that are moved to this engine's devices. None: they are taken as they are.

        Raises:
          ValueError: for weights that the model does not have, or of another shape.
        """
        with self._lock:
            state = nnx.state(self._module)
            old, new = _by_path(state), _by_path(params)
            for path, leaf in new.items():
                if path not in old or old[path].shape != leaf.shape:
                    wanted = f"shape {list(old[path].shape)}" if path in old else "the model's weights"
                    raise ValueError(f"params: got {'.'.join(path)} of shape {list(leaf.shape)}, wanted {wanted}")
            if any(old[path] is not leaf for path, leaf in new.items()):
                leaves = [new.get(path, leaf).astype(leaf.dtype) for path, leaf in old.items()]
                if filter_types is not None:
                    leaves = [one.moved(leaf) for one, leaf in zip(self._arrays, leaves, strict=True)]
                if self._is_shared:  # the trainer's weights stay the trainer's
                    graph, shared = nnx.split(self._module)
                    self._module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, shared))
                    self._is_shared = False
                nnx.update(self._module, jax.tree.unflatten(jax.tree.structure(state), leaves))
            self._note(jax.tree.leaves(nnx.state(self._module)))
            self.sampler.renew()

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """The decoder; the trainer's own, where they share one."""
        return self._module

    def _current(self) -> PagedModel:
        """The model with its present weights; a new version, if a trainer that shares them has put in others."""
        model = self._decoder.with_weights(self._module)
        if self._note(model.arrays):
            self.sampler.renew()
        return model.replace(arrays=[one.moved(leaf) for one, leaf in zip(self._arrays, model.arrays, strict=True)])

    def _note(self, arrays: Sequence[jax.Array]) -> bool:
        """Remembers the arrays of the weights; whether they are others than before."""
        changed = any(one.last() is not leaf for one, leaf in zip(self._arrays, arrays, strict=True))
        self._arrays = [one._replace(last=weakref.ref(leaf)) for one, leaf in zip(self._arrays, arrays, strict=True)]
        return changed

    def _take_dtype(self, dtype: Any) -> None:
        """Casts copied weights."""
        state = nnx.state(self._module, nnx.Param)
        if dtype is None or all(leaf.dtype == dtype for leaf in jax.tree.leaves(state)):
            return
        if self._is_shared:
            raise ValueError(
                f"data_type: got {np.dtype(dtype)}, wanted None: the trainer's weights are used as they are"
            )
        nnx.update(self._module, jax.tree.map(lambda leaf: leaf.astype(dtype), state))

    def _tokenized(self, prompt: str) -> np.ndarray:
        """i32[n]; the tokens of a prompt, behind one bos token if there is one."""
        bos = self._tokenizer.bos_id()
        tokens = ([bos] if bos else []) + list(self._tokenizer.encode(prompt))
        return np.array(self._tokenizer.dedup_bos_ids(tokens), np.int32)


class _Placed(NamedTuple):
    """A weight's devices, and a weak reference to its last array: a trainer's old weights are not held."""

    sharding: Any
    committed: bool
    last: Callable[[], Any]

    @classmethod
    def of(cls, array: jax.Array) -> _Placed:
        """Of a weight that Tunix may have moved to the host meanwhile."""
        kind, sharding = next(iter(array.devices())).default_memory().kind, array.sharding
        sharding = sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)
        return cls(sharding, array.committed, weakref.ref(array))

    def moved(self, array: jax.Array) -> jax.Array:
        """The array on these devices. If it is there it stays as it is: to commit it would be to compile anew."""
        if array.sharding == self.sharding and array.committed == self.committed:
            return array
        return jax.device_put(array, self.sharding)


def _by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves of a state, or of the nested dicts that are one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(str(key.key) for key in path if hasattr(key, "key")): leaf for path, leaf in leaves}


def _end(tokens: np.ndarray, eos: Sequence[int]) -> int:
    """The number of tokens before the first eos token."""
    is_eos = np.isin(tokens, eos)
    return int(np.argmax(is_eos)) if is_eos.any() else tokens.size


def _check_fields(config: Any) -> None:
    """Raises a ValueError for a field of a configuration that would have no effect."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in (*_READ, *_OF_INIT) or field.name.startswith(_OF_OTHERS):
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # pyright: ignore
        if value != default:
            raise ValueError(f"{field.name}: got {value!r:.80}, wanted {default!r}: this engine does not heed it")


def _options(config: Any, eos: Sequence[int]) -> Options:
    """The configuration in the sampler's words."""
    for name in ("max_tokens_to_generate", "max_prompt_length"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}: got {value!r}, wanted an int of at least 1")
    top_p, top_k, temperature = config.top_p, config.top_k, config.temperature
    if top_p is not None and not top_p > 0:
        raise ValueError(f"top_p: got {top_p!r}, wanted None or a number in (0, 1]")
    if not temperature >= 0:
        raise ValueError(f"temperature: got {temperature!r}, wanted a number of at least 0")
    return Options(
        int(config.max_tokens_to_generate), 0.0 if top_p is None else float(temperature), max(top_k or 0, 0),
        1.0 if top_p is None else min(float(top_p), 1.0), seed_key(0 if config.seed is None else config.seed),
        [int(token) for token in eos],
    )  # fmt: skip
