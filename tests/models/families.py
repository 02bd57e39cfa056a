# SPDX-License-Identifier: Apache-2.0
"""The families of models which tests load, small models of them, and comparisons with the references."""

import contextlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import kvjax
from models import ModelConfig, load, loading
from models.golden import read_golden
from models.rope import rope_limit
from tests.drive import DATA
from tests.mesh import AUTO, mesh_of
from tests.poison import poisoned

GOLDENS = DATA / "goldens"
FAMILIES = ("llama", "llama_heads", "mistral", "qwen3", "gemma3", "gemma3_options", "gemma4", "gemma4_options")
# Ropes, and weights of fp8.
OPTIONS = (
    "llama_linear", "llama_dynamic", "llama_longrope", "qwen2_yarn", "qwen3_yarn", "qwen3_longrope", "llama_fp8",
    "qwen3_fp8",
)  # fmt: skip
# Those whose layers keep latents or states, or have experts.
OWN_FAMILIES = ("deepseek_v3", "deepseek_v3_options", "qwen3_next", "qwen3_next_options", "kimi_linear", "gpt_oss")
SMALL = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
GEMMA4 = {
    **SMALL, "model_type": "gemma4_text", "head_dim": 6, "global_head_dim": 8, "sliding_window": 5,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
HEADS, CONTEXT = ("data", "heads"), ("heads", "context")  # the axes of meshes
ROWS = 3


def shard(folder: pathlib.Path, num_files: int = 3, tensors: dict | None = None) -> None:
    """Splits the tensors of model.safetensors into several files with an index. Pass `tensors` if you have them."""
    tensors = load_file(folder / loading.SINGLE) if tensors is None else tensors
    weight_map = {}
    for file_index in range(num_files):
        name = f"model-{file_index + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[file_index::num_files])
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / loading.SINGLE).unlink()
    (folder / loading.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def config(**fields) -> ModelConfig:
    return ModelConfig.from_hf({**SMALL, **fields})


def dense(model, tokens) -> np.ndarray:
    return np.asarray(jax.jit(type(model).dense)(model, tokens))


def check_dense(family: str, tolerance: float):
    """The logits of whole sequences are the reference's."""
    model, _ = load(GOLDENS / family)
    golden = read_golden(GOLDENS / family, model.config.vocab_size)
    texts = [golden.text(row) for row in range(len(golden.lengths))]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    logits = dense(model, tokens)
    for row, text in enumerate(texts):
        wanted = np.stack([golden.reference(row, position) for position in range(len(text) - 1)])
        np.testing.assert_allclose(logits[row, : len(text) - 1], wanted, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def where_of(shape=None, axes=HEADS, kind=AUTO):
    """The arguments with which `load` and `Cache.create` divide a model and a cache among so many devices."""
    if shape is None:
        yield {}
    else:
        with mesh_of(*shape, kind, axes) as mesh:
            yield {"mesh": mesh, **{axis: axis for axis in axes if axis != "data"}}


def make_cache(layers, dtype="float32", num_blocks=40, max_length=96, **where):
    """A cache of three rows whose pools are poisoned."""
    spec = kvjax.make_spec(
        layers, num_blocks=num_blocks, max_seqs=ROWS, max_length=max_length, block_size=8, dtype=dtype
    )  # fmt: skip
    cache = kvjax.Cache.create(spec, **where)
    return cache.replace(pools=poisoned(cache.pools))


def check_cached(family: str, *, scan=False, **where):
    """Compares the logits of three prompts, through a poisoned cache, with the reference. Returns model and cache."""
    model, _ = load(GOLDENS / family, scan=scan, **where)
    assert (model.run is not None) == scan
    golden = read_golden(GOLDENS / family, model.config.vocab_size)
    lengths = golden.lengths[:ROWS]
    tokens = np.maximum(golden.prompts[:ROWS, : lengths.max()], 0)
    empty = make_cache(model.layer_specs(), max_length=rope_limit(model.config) or 96, **where)
    cache, events = jax.jit(kvjax.Cache.admit)(empty, np.arange(ROWS), tokens, lengths)
    assert events.ok.all()
    step = jax.jit(lambda model, cache: kvjax.step(model, cache, jnp.asarray(tokens), lengths, logits="all")[1])
    logits = np.asarray(step(model, cache))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], golden.logits[row, :length], rtol=1e-3, atol=1e-3)
    return model, empty
