# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints as Hugging Face folders, and the same as GGUF files, which are written as llama.cpp does."""

import json

import gguf
import numpy as np
from safetensors.numpy import save_file

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 8, 64
KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
TEMPLATE = "{% for message in messages %}{{ bos_token + message.content + eos_token }}{% endfor %}"
Kind = gguf.GGMLQuantizationType


def fields(architecture, width=32, layers=2):
    """The fields of a config.json."""
    common = {
        "model_type": KINDS[architecture], "vocab_size": VOCABULARY, "hidden_size": width,
        "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM if width == 32 else width // HEADS, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "tie_word_embeddings": architecture == "gemma3", "bos_token_id": 1, "eos_token_id": [2, 3],
    }  # fmt: skip
    if architecture == "gemma3":
        ropes = {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        return {**common, "rope_parameters": ropes, "sliding_window": 24, "query_pre_attn_scalar": common["head_dim"]}
    return {**common, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}


def shapes(architecture, config):
    """The shapes of a checkpoint's tensors by their names in GGUF. The embedding comes first."""
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    tensor_shapes = {"token_embd.weight": (VOCABULARY, width), "output_norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        tensor_shapes["output.weight"] = (VOCABULARY, width)
    for layer in range(config["num_hidden_layers"]):
        block = {
            "attn_norm.weight": (width,), "attn_q.weight": (HEADS * head_dim, width),
            "attn_k.weight": (KV_HEADS * head_dim, width), "attn_v.weight": (KV_HEADS * head_dim, width),
            "attn_output.weight": (width, HEADS * head_dim), "ffn_norm.weight": (width,),
            "ffn_gate.weight": (inner, width), "ffn_up.weight": (inner, width), "ffn_down.weight": (width, inner),
        }  # fmt: skip
        if architecture == "qwen2":
            rows = {"attn_q": HEADS * head_dim, "attn_k": KV_HEADS * head_dim, "attn_v": KV_HEADS * head_dim}
            block |= {f"{name}.bias": (size,) for name, size in rows.items()}
        if architecture in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if architecture == "gemma3":
            block |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
        tensor_shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return tensor_shapes


def hf_name(name, architecture):
    """The name of a tensor in a Hugging Face folder."""
    norms = {"ffn_norm": "post_attention_layernorm"}
    if architecture == "gemma3":
        norms = {
            "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }  # fmt: skip
    modules = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "attn_norm": "input_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}, **norms,
    }  # fmt: skip
    *block, module, kind = name.split(".")
    return ".".join([*(["model", "layers", block[1]] if block else []), modules[module], kind])


def pairs_apart(rows, heads):
    """The rows of llama.cpp's queries or keys: two rows which rotate together are neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def encode(rng, shape, kind):
    """Random numbers in a kind of tensor. K-quants, which the library cannot make, have random bytes."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    scales = rng.uniform(1e-3, 1e-2, (*blocks.shape[:-1], 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[..., -2:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(*shape[:-1], -1)


def make(folder, file, architecture, kind=Kind.F32, width=32, layers=2, change=None, tokenizer=None):
    """Writes a checkpoint as a folder and as a file.

    Args:
      folder: folder of the checkpoint in Hugging Face's format. None writes no folder.
      file: the GGUF file.
      architecture: its name in GGUF.
      kind: the kind of matrices. Vectors are float32.
      width: width of the stream.
      layers: the number of layers.
      change: called with the writer and its tensors before they are added.
      tokenizer: called with the writer, adds its fields.
    """
    rng, config = np.random.default_rng(0), fields(architecture, width, layers)
    writer, tensors, hf = gguf.GGUFWriter(file, architecture), {}, {}
    for name, shape in shapes(architecture, config).items():
        tensor_kind = kind if len(shape) == 2 else Kind.F32
        stored = encode(rng, shape, tensor_kind)
        hf[hf_name(name, architecture)] = np.ascontiguousarray(gguf.dequantize(stored, tensor_kind))
        if architecture == "gemma3" and "norm" in name:
            stored = stored + 1
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        if architecture == "llama" and heads is not None:
            stored = pairs_apart(stored, heads)
        tensors[name] = (np.ascontiguousarray(stored), tensor_kind)
    if folder is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(hf, folder / "model.safetensors")
    add_fields(writer, config, architecture)
    if tokenizer is not None:
        tokenizer(writer)
    if change is not None:
        change(writer, tensors)
    write(writer, tensors)
    return file


def add_fields(writer, config, architecture):
    """Adds the fields of a config."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    if architecture == "gemma3":
        writer.add_rope_freq_base(1e6)
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    else:
        writer.add_rope_freq_base(5e4)


def write(writer, tensors):
    """Writes the file."""
    for name, (stored, kind) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
