# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3, Qwen3-Next, Kimi Linear and GptOss: reference outputs, configs, files, the way through the cache."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import load, loading, save
from models.families import num_layers, read_config
from models.rope import Rope
from models.yarn import Yarn
from tests.models.families import GOLDENS

MAIN = ("deepseek_v3", "qwen3_next", "kimi_linear", "gpt_oss")


def fields_of(family: str) -> dict:
    return json.loads((GOLDENS / family / "config.json").read_text())


def test_small_parameters_stay_float32_and_say_nothing_about_the_others(tmp_path):
    """safetensors puts tensors of float32 before those of bfloat16."""
    save(load(GOLDENS / "kimi_linear", dtype=jnp.bfloat16)[0], tmp_path)
    tensors = load_file(tmp_path / loading.SINGLE)
    small = {name for name, tensor in tensors.items() if tensor.dtype == np.float32}
    assert {name.split(".")[-1] for name in small} == {"A_log", "dt_bias", "e_score_correction_bias"}
    model, _ = load(tmp_path)
    attention = model.layers[0].self_attn
    assert attention.q_proj.kernel[...].dtype == jnp.bfloat16 and attention.A_log[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("family", "extra", "strange"),
    [
        ("deepseek_v3", {"model.layers.3.eh_proj.weight": (48, 96), "model.layers.3.mlp.x": (2,)}, "model.layers.2.x"),
        ("qwen3_next", {"mtp.fc.weight": (48, 96), "mtp.layers.0.mlp.gate.weight": (2, 2)}, "mpt.weight"),
        ("kimi_linear", {}, "model.layers.3.self_attn.A_log"),
    ],
)
def test_tensors_that_the_model_lacks(tmp_path, family, extra, strange):
    """Layers that predict a token further on are left out; a missing expert is named like an unknown tensor."""
    shutil.copytree(GOLDENS / family, tmp_path / "model")
    path = tmp_path / "model" / loading.SINGLE
    tensors = load_file(path)
    save_file({**tensors, **{name: np.ones(shape, np.float32) for name, shape in extra.items()}}, path)
    load(tmp_path / "model")
    expert = next(name for name in tensors if ".experts.5." in name)
    save_file({**{name: x for name, x in tensors.items() if name != expert}, strange: np.ones(2, np.float32)}, path)
    with pytest.raises(ValueError, match=re.escape(f"missing: {expert}; unexpected: {strange}")):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("deepseek_v3", "model.layers.3.mlp.up_proj.weight"),  # of a layer like the others: config.json has too few
        ("qwen3_next", "mtp.norm.weight"),
        ("kimi_linear", "model.layers.4.eh_proj.weight"),  # a family that has no such layers
    ],
)
def test_layers_that_only_have_the_name_of_others_are_unexpected(tmp_path, family, extra):
    shutil.copytree(GOLDENS / family, tmp_path / "model")
    path = tmp_path / "model" / loading.SINGLE
    save_file({**load_file(path), extra: np.ones((48, 48), np.float32)}, path)
    with pytest.raises(ValueError, match=rf"unexpected: {re.escape(extra)}$"):
        load(tmp_path / "model")


@pytest.mark.parametrize("family", MAIN)
def test_frequencies_are_compared_with_the_config(tmp_path, family):
    """Those before yarn stretches them are taken too. A family without a rope has none."""
    model, _ = load(GOLDENS / family)
    shutil.copytree(GOLDENS / family, tmp_path / "model")
    path, name = tmp_path / "model" / loading.SINGLE, "model.layers.1.self_attn.rotary_emb.inv_freq"
    tensors, right, wrong = load_file(path), [], [np.ones(4, np.float32)]
    if model.config.rotation is not None:
        rope, width = model.config.rotation
        right = [rope.frequencies(width), Rope(rope.theta).frequencies(width)]
        wrong.append(Rope(2 * rope.theta).frequencies(width))
    for value in right:
        save_file({**tensors, name: value}, path)
        load(tmp_path / "model")
    for value in wrong:
        save_file({**tensors, name: value}, path)
        with pytest.raises(ValueError, match=rf"of other frequencies than the config's: {re.escape(name)}$"):
            load(tmp_path / "model")


DEEPSEEK = {
    "model_type": "deepseek_v3", "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_next", "full_attention_interval": 4, "max_position_embeddings": 262144, "rope_theta": 10000000,
    "partial_rotary_factor": 0.25, "rope_scaling": None, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
FULL_KIMI = [4, 8, 12, 16, 20, 24, 27]
KIMI = {
    "model_type": "kimi_linear", "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "rope_scaling": None,
    "linear_attn_config": {
        "full_attn_layers": FULL_KIMI, "kda_layers": sorted({*range(1, 28)} - {*FULL_KIMI}), "head_dim": 128,
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "experts_per_token": 4,
    "attention_bias": True, "rope_theta": 150000, "eos_token_id": 200002,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
RELEASED = {"deepseek_v3": DEEPSEEK, "qwen3_next": QWEN, "kimi_linear": KIMI, "gpt_oss": GPT_OSS}


def test_released_configs():
    """The fields of the released files, and the defaults of each family's code for the rest."""
    deepseek, qwen, kimi, gpt_oss = (read_config(fields) for fields in RELEASED.values())
    assert deepseek.latents.rope == Yarn(10000.0, 40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert deepseek.latents.interleaved and deepseek.latents.query_rank == 1536
    assert (deepseek.num_layers, deepseek.num_dense, deepseek.experts.num_groups) == (61, 3, 8)
    assert deepseek.latents.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert read_config({**DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64}).num_heads == 64
    assert qwen.rope == Rope(1e7) and qwen.rotated == 64
    assert qwen.types.count("full_attention") == 12 and qwen.types[3] == "full_attention"
    assert qwen.delta.shapes == {"conv": (3, 8192), "memory": (32, 128, 128)}
    assert [n for n, kind in enumerate(kimi.types, 1) if kind == "full_attention"] == FULL_KIMI
    assert kimi.latents.rope is None and kimi.dense == (0,) and kimi.rms_norm_eps == 1e-5
    assert kimi.eos_token_ids == (163586,) and kimi.max_positions == 1048576
    assert gpt_oss.rope == Yarn(150000.0, 32.0, 4096, truncate=False) == read_config({"model_type": "gpt_oss"}).rope
    assert gpt_oss.types[:2] == ("sliding_attention", "full_attention") and gpt_oss.window == 128
    assert [num_layers(fields) for fields in RELEASED.values()] == [61, 48, 27, 24]


@pytest.mark.parametrize("family", MAIN)
def test_configs_survive_the_way_through_hugging_face_fields(family):
    for fields in (RELEASED[family], fields_of(family)):
        config = read_config(fields)
        assert read_config(json.loads(json.dumps(config.to_hf()))) == config


def test_configs_in_other_forms():
    """Names that other families have, types instead of numbers, a share of rope and yarn at either place."""
    fields = {name: value for name, value in fields_of("kimi_linear").items() if name != "linear_attn_config"}
    for name, other in (("num_experts", "num_local_experts"), ("model_max_length", "max_position_embeddings")):
        fields[other] = fields.pop(name)
    assert read_config(fields) == read_config(fields_of("kimi_linear"))
    dense = {name: value for name, value in fields_of("kimi_linear").items() if name != "mlp_layer_types"}
    assert read_config(dense) == read_config(fields)
    assert read_config({**QWEN, "decoder_sparse_step": 24, "mlp_only_layers": [23]}).dense == tuple(range(47))
    yarn = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 262144}
    new = {**QWEN, "rope_theta": None, "rope_parameters": {**yarn, "partial_rotary_factor": 0.5}}
    assert read_config(new).rope == Yarn(1e7, 4.0, 262144) and read_config(new).rotated == 128


def test_yarn_keeps_short_waves_and_stretches_long_ones():
    yarn, plain = Yarn(1e4, 40.0, 4096), Rope(1e4).frequencies(64)
    frequencies, turns = yarn.frequencies(64), 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(frequencies[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(frequencies[turns < 0.8], plain[turns < 0.8] / 40, rtol=1e-6)
    assert np.all(np.diff(frequencies) < 0)
    cos, sin = yarn.angles(jnp.zeros((1, 1), jnp.int32), 64)
    assert cos[0, 0, 0, 0] == pytest.approx(0.1 * np.log(40) + 1) and not np.any(sin)
    assert yarn.score_factor == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deepseek_v32"}, "model_type: got 'deepseek_v32', which cannot be served: its indexer"),
        ({"model_type": "deepseek_v2"}, "model_type: got 'deepseek_v2', wanted 'llama' or"),
        ({**DEEPSEEK, "index_topk": 2048}, "index_topk: got 2048, wanted None"),
        ({**DEEPSEEK, "topk_method": "greedy"}, "topk_method: got 'greedy', wanted 'noaux_tc'"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func: got 'softmax', wanted 'sigmoid'"),
        ({**DEEPSEEK, "quantization_config": {"quant_method": "fp8"}}, "quantization_config: got"),
        ({**DEEPSEEK, "num_key_value_heads": 8}, "num_key_value_heads: got 8, wanted 128"),
        ({**DEEPSEEK, "qk_rope_head_dim": 63}, "qk_rope_head_dim: got 63, wanted an even number"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias: got True, wanted False"),
        ({**DEEPSEEK, "topk_group": 9}, "topk_group: got 9, wanted at most n_group=8"),
        ({**DEEPSEEK, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: got 'linear'"),
        ({**DEEPSEEK, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.original_max_position_embe"),
        ({**DEEPSEEK, "rope_scaling": {**DEEPSEEK["rope_scaling"], "truncate": 2}}, "rope_scaling.truncate: got 2"),
        ({**QWEN, "num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor of"),
        ({**QWEN, "linear_num_value_heads": 24}, "linear_num_value_heads: got 24, wanted a multiple of"),
        ({**QWEN, "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: got 1, wanted an int of at least 2"),
        ({**QWEN, "partial_rotary_factor": 1.5}, "partial_rotary_factor: got 1.5"),
        ({**QWEN, "layer_types": ["full_attention"]}, "layer_types: got 1 entries, wanted num_hidden_layers=48"),
        ({**QWEN, "layer_types": ["mamba"] * 48}, "layer_types[0]: got 'mamba', wanted 'full_attention' or"),
        ({**QWEN, "mlp_only_layers": [48]}, "mlp_only_layers[0]: got 48, wanted a layer's number"),
        ({**QWEN, "hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
        ({**KIMI, "mla_use_nope": False}, "mla_use_nope: got False, wanted True"),
        ({**KIMI, "mla_use_output_gate": True}, "mla_use_output_gate: got True, wanted False"),
        ({**KIMI, "attn_res_block_size": 4}, "attn_res_block_size: got 4, wanted 0"),
        ({**KIMI, "linear_attn_config": 3}, "linear_attn_config: got 3, wanted a set of fields"),
        ({**KIMI, "linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config: got {'kda_layers': [1]}, wanted"),
        ({**KIMI, "mlp_layer_types": ["dense"]}, "mlp_layer_types: got 1 entries, wanted num_hidden_layers=27"),
        ({**KIMI, "mlp_layer_types": ["moe"] * 27}, "mlp_layer_types[0]: got 'moe', wanted 'dense' or 'sparse'"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias: got False, wanted True"),
        ({**GPT_OSS, "num_experts_per_tok": 33}, "num_experts_per_tok: got 33, wanted at most num_local_experts=32"),
        ({**GPT_OSS, "head_dim": 63}, "head_dim: got 63, wanted an even number"),
        ({**GPT_OSS, "num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor of"),
        ({**GPT_OSS, "layer_types": ["full_attention"]}, "layer_types: got 1 entries, wanted num_hidden_layers=24"),
        ({**GPT_OSS, "layer_types": ["mamba"] * 24}, "layer_types[0]: got 'mamba', wanted 'full_attention' or"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: got"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_served_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(fields)
