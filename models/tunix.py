# SPDX-License-Identifier: Apache-2.0
"""A rollout engine for Tunix, which samples from a paged cache: `ClusterConfig(rollout_engine=KvjaxRollout)`.

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

# Fields of a RolloutConfig: for other engines, for `KvjaxRollout.__init__`, and for `generate`.
_OTHER_ENGINES = ("rollout_vllm_", "rollout_sglang_jax_")
_INIT_FIELDS = ("kv_cache_size", "data_type")
_GENERATE_FIELDS = (
    "max_tokens_to_generate",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_prompt_length",
    "eos_tokens",
    "return_logprobs",
)


class KvjaxRollout(base_rollout.BaseRollout):
    """Samples for Tunix' trainers. A group computes the K/V of its prompt once, and new weights never find old K/V.

    An engine may share its weights with the trainer. Then each call uses the present weights, and new arrays are a new
    version, as with `update_params`. A `ClusterConfig` also takes `functools.partial(KvjaxRollout, block_size=32)`.

    Args:
      rollout_actor: the decoder (see `models.paged_decoders`); it is copied if it is not on the devices of `mesh`.
      tokenizer: a tokenizer supported by Tunix.
      mesh: devices for the rollouts.
      rollout_config: a `RolloutConfig`; `kv_cache_size` is the default of `max_length`, and `data_type` the dtype for
        copied weights.
      max_length: tokens of a prompt and its completion together; None defaults to `kv_cache_size`.
      block_size, num_blocks, max_seqs, forget, scheduler: arguments for `models.sampler.Sampler`.
      dtype: dtype for the K/V; None defaults to the model's.
      heads: the axis of the mesh to divide kv heads over, if it has several devices.
      sleeps: whether each call frees the memory of the K/V at its end, for the trainer. The next call then finds
        nothing cached, and compiles nothing.

    Attributes:
      sampler: the sampler, with its cache and version.
      cached: i32[groups]; tokens of each group's prompt found in the cache by the last `generate`.

    Raises:
      ValueError: an argument is wrong.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Mesh | None = None,
        rollout_config: Any = None,
        *,
        max_length: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_seqs: int | None = None,
        dtype: Any = None,
        forget: bool = True,
        scheduler: Scheduler | None = None,
        heads: str = "tp",
        sleeps: bool = False,
    ):
        if rollout_config is None and max_length is None:
            raise ValueError("rollout_config: got None, wanted it or max_length")
        if rollout_config is not None:
            _check_fields(rollout_config)
        if not isinstance(tokenizer, tokenizer_adapter.TokenizerAdapter):
            tokenizer = tokenizer_adapter.TokenizerAdapter(tokenizer)
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self._sleeps = sleeps
        module = rollout_actor if mesh is None else reshard.reshard_model_to_mesh(rollout_actor, mesh)
        self._module = module
        self._is_shared = module is rollout_actor
        self._take_dtype(getattr(rollout_config, "data_type", None))
        model = paged(module)
        self._decoder = model.replace(arrays=[])
        self._places = [_Placed.of(array) for array in model.arrays]
        divides = mesh is not None and mesh.shape.get(heads, 1) > 1
        self.sampler = Sampler(
            model.layer_specs(),
            getattr(rollout_config, "kv_cache_size", 0) if max_length is None else max_length,
            block_size=block_size,
            num_blocks=num_blocks,
            max_seqs=max_seqs,
            dtype=dtype or model.dtype,
            mesh=mesh,
            heads=heads if divides else None,
            forget=forget,
            scheduler=scheduler,
        )
        self.cached = np.zeros(0, np.int32)

    def generate(self, prompts: Sequence[str], rollout_config: Any) -> base_rollout.RolloutOutput:
        """Samples a completion of each prompt. A prompt repeated `num_generations` times is computed once.

        Args:
          prompts: texts.
          rollout_config: a `RolloutConfig`; `top_p=None` or `temperature=0` choose the likeliest tokens.

        Returns:
          The same output as the vanilla engine's: completions without eos tokens, no logits, and log-probabilities of
          the distribution after the temperature, before top-k and top-p.

        Raises:
          ValueError: an argument or a field of the configuration is wrong.
          RuntimeError: the cache has too few blocks.
        """
        _check_fields(rollout_config)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        eos = list(rollout_config.eos_tokens or [self.eos_id()])
        options = _options(rollout_config, eos)
        width = rollout_config.max_prompt_length
        pad = self.pad_id()
        prompt_tokens = [self._tokenized(prompt) for prompt in prompts]
        longest = max((tokens.size for tokens in prompt_tokens), default=0)
        if longest > width:
            width = 1 << (longest - 1).bit_length()
        with self._lock:
            unpadded = [tokens[tokens != pad] for tokens in prompt_tokens]
            samples = self.sampler.sample(self._current(), unpadded, width, options)
            self.cached = samples.cached
            if self._sleeps:
                self.sampler.sleep()
        ends = [_end(tokens, eos) for tokens in samples.tokens]
        completions = [tokens[:end] for tokens, end in zip(samples.tokens, ends, strict=True)]
        logprobs = [values[:end].tolist() for values, end in zip(samples.logprobs, ends, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(tokens.tolist()) for tokens in completions],
            logits=[],
            tokens=completions,
            left_padded_prompt_tokens=np.stack(
                [np.pad(tokens, (width - tokens.size, 0), constant_values=pad) for tokens in prompt_tokens]
            ),
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Computes log-probabilities f32[B, T] of completions i32[B, T] after prompts i32[B, P], 0 for padding.

        Raises:
          ValueError: an argument is wrong.
          RuntimeError: the cache has too few blocks.
        """
        prompts = np.asarray(prompt_tokens)
        completions = np.asarray(completion_tokens)
        if prompts.ndim != 2 or completions.ndim != 2 or len(prompts) != len(completions):
            raise ValueError(f"completion_tokens: got shape {list(completions.shape)}, wanted [{len(prompts)}, T]")
        pad = self.pad_id()
        is_token = completions != pad
        unpadded_prompts = [row[row != pad] for row in prompts]
        unpadded = [row[mask] for row, mask in zip(completions, is_token, strict=True)]
        with self._lock:
            scores = self.sampler.score(
                self._current(), unpadded_prompts, unpadded, prompts.shape[1], completions.shape[1]
            )
            if self._sleeps:
                self.sampler.sleep()
        logprobs = np.zeros(completions.shape, np.float32)
        for row, (mask, values) in enumerate(zip(is_token, scores, strict=True)):
            logprobs[row, mask] = values[: unpadded[row].size]
        return jax.numpy.asarray(logprobs)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes new weights, all or some of them, as a new version. It finds no K/V of old versions.

        Args:
          params: weights by path, as in an `nnx.state`.
          filter_types: kinds of the weights, which are moved to this engine's devices; None leaves them in place.

        Raises:
          ValueError: the model has no such weights, or of another shape.
        """
        with self._lock:
            state = nnx.state(self._module)
            old = _by_path(state)
            new = _by_path(params)
            for path, leaf in new.items():
                if path not in old or old[path].shape != leaf.shape:
                    wanted = f"shape {list(old[path].shape)}" if path in old else "the model's weights"
                    raise ValueError(f"params: got {'.'.join(path)} of shape {list(leaf.shape)}, wanted {wanted}")
            if any(old[path] is not leaf for path, leaf in new.items()):
                leaves = [new.get(path, leaf).astype(leaf.dtype) for path, leaf in old.items()]
                if filter_types is not None:
                    leaves = [place.moved(leaf) for place, leaf in zip(self._places, leaves, strict=True)]
                if self._is_shared:  # leaves the trainer's module alone
                    graph, shared = nnx.split(self._module)
                    self._module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, shared))
                    self._is_shared = False
                nnx.update(self._module, jax.tree.unflatten(jax.tree.structure(state), leaves))
            self._note(jax.tree.leaves(nnx.state(self._module)))
            self.sampler.renew()

    def pad_id(self) -> int:
        """The tokenizer's pad token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's eos token."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """The decoder, which may be the trainer's."""
        return self._module

    def _current(self) -> PagedModel:
        """The model with its present weights. If the trainer has replaced arrays, this is a new version."""
        model = self._decoder.with_weights(self._module)
        if self._note(model.arrays):
            self.sampler.renew()
        return model.replace(arrays=[place.moved(leaf) for place, leaf in zip(self._places, model.arrays, strict=True)])

    def _note(self, arrays: Sequence[jax.Array]) -> bool:
        """Remembers the arrays of the weights. Returns whether any has changed."""
        places = [*zip(self._places, arrays, strict=True)]
        changed = any(place.last() is not leaf for place, leaf in places)
        self._places = [place._replace(last=weakref.ref(leaf)) for place, leaf in places]
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
        """The tokens i32[n] of a prompt, after a bos token if the tokenizer has it."""
        bos = self._tokenizer.bos_id()
        tokens = ([bos] if bos else []) + list(self._tokenizer.encode(prompt))
        return np.array(self._tokenizer.dedup_bos_ids(tokens), np.int32)


class _Placed(NamedTuple):
    """A weight's devices, and a reference to its last array, which is weak so old weights can be freed."""

    sharding: Any
    committed: bool
    last: Callable[[], Any]

    @classmethod
    def of(cls, array: jax.Array) -> _Placed:
        """The place of a weight on its device, even if Tunix has moved the weight to the host meanwhile."""
        kind = next(iter(array.devices())).default_memory().kind
        sharding = array.sharding
        sharding = sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)
        return cls(sharding, array.committed, weakref.ref(array))

    def moved(self, array: jax.Array) -> jax.Array:
        """The array on these devices. An array that is there stays uncommitted, so programs are not compiled again."""
        if array.sharding == self.sharding and array.committed == self.committed:
            return array
        return jax.device_put(array, self.sharding)


def _by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves of a state, or of nested dicts, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(str(key.key) for key in path if hasattr(key, "key")): leaf for path, leaf in leaves}


def _end(tokens: np.ndarray, eos: Sequence[int]) -> int:
    """The number of tokens before the first eos token."""
    is_eos = np.isin(tokens, eos)
    return int(np.argmax(is_eos)) if is_eos.any() else tokens.size


def _check_fields(config: Any) -> None:
    """Raises a ValueError for a field of a configuration without an effect in this engine."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in (*_GENERATE_FIELDS, *_INIT_FIELDS) or field.name.startswith(_OTHER_ENGINES):
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # pyright: ignore
        if value != default:
            raise ValueError(f"{field.name}: got {value!r:.80}, wanted {default!r}: this engine supports no other")


def _options(config: Any, eos: Sequence[int]) -> Options:
    """The sampler's options for a configuration."""
    for name in ("max_tokens_to_generate", "max_prompt_length"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}: got {value!r}, wanted an int of at least 1")
    top_p = config.top_p
    top_k = config.top_k
    temperature = config.temperature
    if top_p is not None and not top_p > 0:
        raise ValueError(f"top_p: got {top_p!r}, wanted None or a number in (0, 1]")
    if not temperature >= 0:
        raise ValueError(f"temperature: got {temperature!r}, wanted a number of at least 0")
    return Options(
        max_new_tokens=int(config.max_tokens_to_generate),
        temperature=0.0 if top_p is None else float(temperature),
        top_k=max(top_k or 0, 0),
        top_p=1.0 if top_p is None else min(float(top_p), 1.0),
        seed=seed_key(0 if config.seed is None else config.seed),
        stop_tokens=[int(token) for token in eos],
    )
