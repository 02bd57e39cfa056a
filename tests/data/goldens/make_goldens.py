# SPDX-License-Identifier: Apache-2.0
"""Makes the goldens of the families in `models/config.py`. Run it by hand.

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 transformers==5.23.0
    ENV/bin/pip install accelerate==1.15.0 compressed-tensors==0.20.1  # for weights of fp8
    ENV/bin/python tests/data/goldens/make_goldens.py [NAME ...]

Each golden is a small random checkpoint saved by transformers, with its outputs on a CPU: float32, eager attention, no
cache, every prompt alone. Recurrent layers are computed token by token: in chunks transformers loses digits where a
head forgets at once. Llama, Qwen2 and Qwen3 of transformers cannot rotate a part of a head, so they take the rotation
of Phi3, which can, and which is the same for whole heads. transformers and compressed-tensors dequantise weights of
fp8. `models/golden.py` describes the arrays.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

HERE = pathlib.Path(__file__).parent
# (lengths of the prompts, tokens after each, first prompt of those that share a prefix, its length)
PROMPTS = {
    "full": ((1, 7, 17, 40, 65, 150, 61, 97), 48, 5, 50),
    "options": ((40, 17, 33), 8, 1, 17),
    "equal": ((96, 96, 96), 0, 1, 17),
}
COMMON = {
    "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 20, "num_attention_heads": 4,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
DEEPSEEK = {
    **COMMON, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.7, "norm_topk_prob": True, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.2, "mscale_all_dim": 0.8,
}  # fmt: skip
QWEN = {
    **COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 28, "norm_topk_prob": True,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
KIMI = {
    **COMMON, "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "num_experts": 8,
    "num_shared_experts": 1, "num_experts_per_token": 3, "num_expert_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.446, "moe_renormalize": True, "rms_norm_eps": 1e-5, "model_max_length": 2048,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
GPT_OSS = {
    **COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24,
    "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 32, "swiglu_limit": 0.8,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
SMALL = {
    **COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip
PARTS = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1}  # of more than one block of 128
YARN_2 = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3,
    "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "sequence_length": 96}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "sequence_length": 64, "factor": 4.0,
    "short_factor": [1.0, 1.0, 1.05, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.3, 1.9, 2.7, 3.6, 4.4],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
SHORT = {
    "rope_type": "longrope", "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6], "long_factor": [1.0, 1.3, 1.9, 2.7, 3.6, 4.4, 5.0, 6.0],
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5}
# name: (configuration of transformers, its arguments, vocabulary, prompts)
GOLDENS = {
    "deepseek_v3": (transformers.DeepseekV3Config, {**DEEPSEEK, "rope_parameters": YARN}, 128, "full"),
    "deepseek_v3_options": (
        transformers.DeepseekV3Config,
        {
            **DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
        64, "options",
    ),
    "qwen3_next": (transformers.Qwen3NextConfig, QWEN, 128, "full"),
    "qwen3_next_options": (
        transformers.Qwen3NextConfig,
        {
            **QWEN, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3,
            "mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
        64, "options",
    ),
    "kimi_linear": (transformers.KimiLinearConfig, KIMI, 128, "full"),
    "gpt_oss": (transformers.GptOssConfig, GPT_OSS, 128, "full"),
    "llama_linear": (transformers.LlamaConfig, {**SMALL, "rope_parameters": LINEAR}, 64, "options"),
    "llama_dynamic": (
        transformers.LlamaConfig, {**SMALL, "max_position_embeddings": 32, "rope_parameters": DYNAMIC}, 64, "equal",
    ),
    "llama_longrope": (transformers.LlamaConfig, {**SMALL, "rope_parameters": SHORT}, 64, "options"),
    "qwen2_yarn": (transformers.Qwen2Config, {**SMALL, "rope_parameters": YARN_2}, 64, "options"),
    "qwen3_yarn": (
        transformers.Qwen3Config,
        {**SMALL, "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}},
        64, "options",
    ),
    "qwen3_longrope": (transformers.Qwen3Config, {**SMALL, "rope_parameters": LONG}, 64, "options"),
    "llama_fp8": (transformers.LlamaConfig, {**SMALL, **PARTS}, 64, "options"),
    "qwen3_fp8": (transformers.Qwen3Config, {**SMALL, **PARTS}, 64, "options"),
}  # fmt: skip
# name: (quantization_config, the scale's name, the part of a matrix that shares a scale: None is all of that axis)
FP8 = {
    "llama_fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "weight_scale_inv", (128, 128),
    ),
    "qwen3_fp8": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {
                "group_0": {
                    "targets": ["re:.*self_attn.*"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                },
                "group_1": {
                    "targets": ["re:.*mlp.*"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
                },
            },
        },
        "weight_scale", (1, None),
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Makes the goldens with these names, or all goldens without a name."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    qwen3_next.torch_chunk_gated_delta_rule = qwen3_next.torch_recurrent_gated_delta_rule
    kimi_linear.chunk_kimi_delta_attention = kimi_linear.recurrent_kimi_delta_attention
    for family in (llama, qwen2, qwen3):
        family.apply_rotary_pos_emb = phi3.apply_rotary_pos_emb
    for name in names or GOLDENS:
        kind, fields, vocab_size, prompts = GOLDENS[name]
        torch.manual_seed(0)
        config = kind(**fields, vocab_size=vocab_size)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        randomise(model)
        save(model, HERE / name)
        if name in FP8:
            to_fp8(HERE / name, *FP8[name])
            model = transformers.AutoModelForCausalLM.from_pretrained(
                HERE / name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        np.savez_compressed(HERE / name / "golden.npz", **outputs(model, *PROMPTS[prompts]))


def randomise(model: torch.nn.Module) -> None:
    """Gives every parameter random numbers of its kind, even if it starts with ones or zeros."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.split(".")[-1]
        if leaf == "A_log":  # from heads that remember to heads that forget at once
            tensor.copy_(torch.linspace(math.log(0.02), math.log(16), tensor.numel()).reshape(tensor.shape))
        elif leaf == "sinks":
            tensor.normal_(0, 1)
        elif leaf.endswith("bias"):
            tensor.normal_(0, 0.5 if leaf == "dt_bias" else 0.2)
        elif tensor.ndim == 1 and leaf == "weight":
            ones = 0 if is_offset(model, name) else 1
            tensor.copy_(ones + 0.2 * torch.randn_like(tensor))
        elif tensor.ndim > 1:
            tensor.normal_(0, 1 / math.sqrt(tensor.shape[-1]))


def is_offset(model: torch.nn.Module, name: str) -> bool:
    """Whether this norm adds 1 to its weights, as Qwen3-Next's norms do, except gated norms."""
    return model.config.model_type == "qwen3_next" and ".linear_attn." not in name


def save(model: torch.nn.Module, folder: pathlib.Path) -> None:
    """Writes config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        (folder / "config.json").write_bytes((pathlib.Path(temporary) / "config.json").read_bytes())
        tensors = load_file(pathlib.Path(temporary) / "model.safetensors")
    # Moonshot's files have this name for experts alone, transformers' for the MLP of a layer without experts too.
    named = {re.sub(r"block_sparse_moe\.(?=\w+_proj)", "mlp.", name): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def to_fp8(folder: pathlib.Path, quantisation: dict, scale_name: str, part: tuple[int, int | None]) -> None:
    """Rewrites the matrices of a folder's layers in fp8. An MLP's matrix has a single scale unless parts are blocks."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        height, width = part[0], part[1] or tensor.shape[1]
        if part[1] is None and ".mlp." in name:
            height = tensor.shape[0]
        scales = [[block.abs().max() / 448 for block in row.split(width, 1)] for row in tensor.split(height)]
        scales = torch.tensor(scales)
        spread = scales.repeat_interleave(height, 0)[: tensor.shape[0]].repeat_interleave(width, 1)
        tensors[name] = (tensor / spread[:, : tensor.shape[1]]).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", scale_name)] = scales.reshape(1) if scales.numel() == 1 else scales
        if part[1] is None and ".mlp." in name:
            tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {**json.loads((folder / "config.json").read_text()), "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def outputs(model: torch.nn.Module, lengths: tuple[int, ...], steps: int, shared: int, prefix: int) -> dict:
    """The arrays of golden.npz. Prompts from index `shared` on have their first `prefix` tokens in common."""
    rng, vocab_size, rows = np.random.default_rng(0), model.config.vocab_size, len(lengths)
    prompts = np.full((rows, max(lengths)), -1, np.int32)
    logits = np.zeros((rows, max(lengths), vocab_size), np.float32)
    greedy = np.zeros((rows, steps), np.int32)
    greedy_logits = np.zeros((rows, steps, vocab_size), np.float32)
    for row, length in enumerate(lengths):
        prompts[row, :length] = rng.integers(vocab_size, size=length)
        if row > shared:
            prompts[row, :prefix] = prompts[shared, :prefix]
        text = prompts[row, :length].tolist()
        logits[row, :length] = model(torch.tensor([text]), use_cache=False).logits[0].numpy()
        for step in range(steps):
            found = model(torch.tensor([text]), use_cache=False).logits[0].numpy()
            greedy_logits[row, step] = found[-1]
            greedy[row, step] = np.argmax(found[-1])
            text.append(int(greedy[row, step]))
    return {
        "prompts": prompts, "lengths": np.array(lengths, np.int32), "logits": logits, "greedy": greedy,
        "greedy_logits": greedy_logits,
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
