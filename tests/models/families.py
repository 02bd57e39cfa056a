# SPDX-License-Identifier: Apache-2.0
"""The families of models that tests load, and small models of them."""

import jax
import numpy as np

from models import ModelConfig, load
from models.golden import read_golden
from tests.drive import DATA

GOLDENS = DATA / "goldens"
FAMILIES = ("llama", "llama_heads", "mistral", "qwen3", "gemma3", "gemma3_options", "gemma4", "gemma4_options")
# Those whose layers keep latents or states, as `LanguageModel`s.
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
