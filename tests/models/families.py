# SPDX-License-Identifier: Apache-2.0
"""The families of models that tests load, and small models of them."""

from models import ModelConfig
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
