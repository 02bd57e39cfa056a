# SPDX-License-Identifier: Apache-2.0
"""Tunix' own rollout engine and `KvjaxRollout`, with one Qwen3 of Tunix and prompts that are as long as may be."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.config import ModelConfig


def version() -> str | None:
    """The version of google-tunix; None if it is not installed."""
    try:
        return metadata.version("google-tunix")
    except metadata.PackageNotFoundError:
        return None


class Numbers:
    """A tokenizer of texts that are numbers. Padding and ends are no tokens of the model."""

    def encode(self, text: str) -> list[int]:
        return [int(one) for one in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return -2

    def pad_id(self) -> int:
        return -1


def make_model(config: ModelConfig) -> Any:
    """A Qwen3 of a configuration's sizes, with random weights everywhere."""
    from tunix.models.qwen3 import model as qwen3

    layer = config.layers[0]
    sizes = qwen3.ModelConfig(
        num_layers=len(config.layers), vocab_size=config.vocab_size, embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size, num_heads=config.num_heads, head_dim=layer.head_dim,
        num_kv_heads=layer.kv_heads, rope_theta=1_000_000, norm_eps=1e-6,
    )  # fmt: skip
    model, rng = qwen3.Qwen3(sizes, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(nnx.state(model))
    leaves = [leaf + 0.02 * rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in leaves]
    nnx.update(model, jax.tree.unflatten(tree, leaves))
    return model


def engines(config: ModelConfig, prompt: np.ndarray, samples: int, new: int, block_size: int) -> dict[str, Any]:
    """Programs for `common.in_turns`: `samples` greedy completions i32[G, T] of a prompt i32[P], by either engine.

    Each call of kvjax' engine is the first of its version of the weights, which finds nothing and empties old blocks.
    """
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from models.tunix import KvjaxRollout

    model, layer, length = make_model(config), config.layers[0], prompt.size + new
    rollout_config = RolloutConfig(new, top_p=None, max_prompt_length=prompt.size, kv_cache_size=length)
    cache_config = CacheConfig(length, len(config.layers), layer.kv_heads, layer.head_dim)
    vanilla = VanillaRollout(model, Numbers(), cache_config)
    paged = KvjaxRollout(model, Numbers(), rollout_config=rollout_config, block_size=block_size)
    texts = [" ".join(map(str, prompt.tolist()))] * samples

    def run(engine: Any) -> Callable[[Any], np.ndarray]:
        return lambda _: np.stack(engine.generate(texts, rollout_config).tokens)

    run(paged)(None)  # the program that empties old blocks is compiled by the second call
    return {"vanilla": (lambda: None, run(vanilla)), "engine": (paged.sampler.renew, run(paged))}
