# SPDX-License-Identifier: Apache-2.0
"""Answers many prompts by Ray Data: each of its actors has a model and a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvjax
from kvjax.serving import RunOptions, make_requests

from . import load

try:
    import ray.data  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[cluster]"') from error


class Generate:
    """A model and a cache, which Ray Data calls with batches of rows."""

    def __init__(self, folder: str, max_new_tokens: int, dtype: str, sizes: dict[str, Any]):
        kvjax.enable_compilation_cache()
        self._model, self._tokenizer = load(folder)
        self._max_new_tokens = max_new_tokens
        spec = kvjax.make_spec(self._model.layer_specs(), dtype=dtype, **sizes)
        self._cache = kvjax.Cache.create(spec)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Adds the answers to the prompts of a batch, and how many tokens of each prompt were cached."""
        prompts = [self._tokenizer.encode(text).ids for text in batch["prompt"]]
        requests = make_requests(prompts, max_new_tokens=self._max_new_tokens)
        outputs, self._cache, _ = kvjax.run_batch(self._model, self._cache, requests, RunOptions(log_events=False))
        answers = [self._tokenizer.decode(output.tokens) for output in outputs]
        num_cached = [output.cached_tokens for output in outputs]
        return {**batch, "answer": answers, "cached_tokens": num_cached}


def map_prompts(
    folder: str,
    texts: Sequence[str],
    *,
    max_new_tokens: int,
    actors: int,
    batch_size: int,
    dtype: str = "float32",
    **sizes: int,
) -> list[dict[str, Any]]:
    """Answers prompts in actors of Ray Data. Prompts with the same beginning go to the same actor, one after the other.

    If an actor ends, Ray computes its batch again in another actor.

    Args:
      folder: the checkpoint, on each machine.
      texts: the prompts.
      max_new_tokens: the most tokens of an answer.
      actors: number of actors.
      batch_size: number of prompts that an actor gets at a time.
      dtype: dtype of K/V.
      sizes: sizes of each cache, see `kvjax.make_spec`.

    Returns:
      A row for each prompt, in the order of `texts`: {"index", "prompt", "answer", "cached_tokens"}.
    """
    rows = [{"index": index, "prompt": text} for index, text in enumerate(texts)]
    rows.sort(key=lambda row: row["prompt"])  # the sort of Ray Data wants CPUs that the actors hold
    dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // batch_size))
    answered = dataset.map_batches(
        Generate,
        fn_constructor_args=(folder, max_new_tokens, dtype, sizes),
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=actors),
    )
    return sorted(answered.take_all(), key=lambda row: row["index"])
