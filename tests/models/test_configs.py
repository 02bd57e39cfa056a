# SPDX-License-Identifier: Apache-2.0
"""Configs of Hugging Face: fields, their older and newer forms, defaults, and refusals.

The reference outputs (`test_goldens.py`) tell whether ropes are right.
"""

import json
import re

import numpy as np
import pytest
from flax import nnx

import kvjax
from models import Decoder, LayerConfig, ModelConfig, Rope
from models.config import num_layers
from models.rope import rope_limit
from tests.models.families import FULL, GEMMA4, GOLDENS, SLIDING, SMALL, config, dense

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0, 1.25],
    "long_factor": [1.5, 4.0],
}  # fmt: skip
GEMMA3 = {**SMALL, "model_type": "gemma3_text", "head_dim": 6, "query_pre_attn_scalar": 10, "sliding_window": 5}
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


def test_windows_are_read_per_layer():
    def windows(**fields):
        return [layer.window for layer in config(**fields).layers]

    qwen = {"model_type": "qwen2", "sliding_window": 6}
    assert windows(model_type="mistral") == [4096] * 3
    assert windows(model_type="mistral", sliding_window=None) == [None] * 3
    assert windows(**qwen) == [None] * 3
    assert windows(**qwen, use_sliding_window=True, max_window_layers=2) == [None, None, 6]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**qwen, use_sliding_window=True, layer_types=types) == [6, None, 6]
    assert [spec.window for spec in Decoder(config(**qwen), rngs=nnx.Rngs(0)).layer_specs()] == [None] * 3


def test_defaults_where_the_config_is_silent():
    assert config(num_key_value_heads=None).layers[0] == LayerConfig(4, 4)
    assert config(head_dim=10).layers[0].head_dim == 10
    assert config(model_type="qwen3").layers[0].head_dim == 128
    assert config(model_type="qwen2").qkv_bias and not config(model_type="qwen2").out_bias
    assert config(eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    assert config(eos_token_id=2).eos_token_ids == (2,)


def test_rope_in_old_and_new_form():
    old = config(rope_theta=5e5, rope_scaling=LLAMA3)
    assert old == config(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4}).layers[0].rope == Rope(
        5e5, "linear", 4.0
    )
    assert config(rope_scaling=None).layers[0].rope == Rope(10000.0)


def rope_of(**fields) -> Rope:
    return config(max_position_embeddings=256, **fields).layers[0].rope


def test_fields_that_a_rope_may_leave_out():
    """As transformers fills them in; some stand at the top of the file."""
    yarn, short = {"type": "yarn", "factor": None}, {**LONGROPE, "factor": None}
    assert rope_of(rope_scaling={**yarn, "original_max_position_embeddings": 64}).factor == 4
    assert rope_of(rope_scaling={"type": "yarn", "factor": 2.0}).original_max_position_embeddings == 256
    assert rope_of(rope_scaling=short) == rope_of(rope_scaling=LONGROPE)
    moved = rope_of(rope_scaling={**short, "original_max_position_embeddings": 9}, original_max_position_embeddings=32)
    assert (moved.original_max_position_embeddings, moved.factor) == (32, 8)
    assert rope_of(partial_rotary_factor=0.5) == rope_of(rope_parameters={"partial_rotary_factor": 0.5})


def test_the_factor_on_rotated_vectors():
    def amplitude(**fields):
        return rope_of(rope_parameters=fields).amplitude

    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert amplitude(**yarn) == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    assert amplitude(**yarn, attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0) == 1.5
    assert amplitude(**yarn, mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.2772589 / 1.1386294)
    assert amplitude(**yarn, mscale=2.0) == pytest.approx(1.1386294)  # both are needed
    assert amplitude(**LONGROPE) == pytest.approx((4 / 3) ** 0.5)  # 1 + ln 4 / ln 64
    assert amplitude(**LONGROPE, attention_factor=0.5) == 0.5
    assert amplitude(rope_type="dynamic", factor=4.0) == 1


def test_frequencies_are_those_of_one_length():
    """A cache has rotated keys, so that all its sequences have the same frequencies; a longer cache is refused."""
    plain, dynamic = Rope().frequencies(4), {"rope_type": "dynamic", "factor": 2.0}
    within = rope_of(rope_parameters=dynamic)
    np.testing.assert_array_equal(within.frequencies(4), plain)
    longer = rope_of(rope_parameters={**dynamic, "sequence_length": 512})
    np.testing.assert_allclose(longer.frequencies(4), [1, 1 / (3 * 100)], rtol=1e-6)  # the base: (2 * 2 - 1) ** 2
    assert (within.max_length, longer.max_length, Rope().max_length) == (256, 512, None)
    short = rope_of(rope_parameters=LONGROPE)
    long = rope_of(rope_parameters={**LONGROPE, "sequence_length": 65})
    np.testing.assert_allclose(short.frequencies(4), plain / [1, 1.25], rtol=1e-6)
    np.testing.assert_allclose(long.frequencies(4), plain / [1.5, 4], rtol=1e-6)
    assert (short.max_length, long.max_length) == (64, 65)

    model = Decoder(config(rope_parameters=LONGROPE), rngs=nnx.Rngs(0))
    assert rope_limit(model.config) == 64 and rope_limit(config()) is None
    tokens = np.zeros((1, 65), np.int32)
    assert dense(model, tokens[:, :64]).shape == (1, 64, 32)
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=9, max_seqs=1, max_length=65, block_size=8, dtype="float32")
    message = r"max_length: got (65|72) \(in whole blocks\), wanted at most 64: in longer sequences the rope has other"
    for call in (
        lambda: dense(model, tokens), lambda: kvjax.generate(model, kvjax.Cache.create(spec), [[1]], max_new_tokens=1)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def test_gemma_configs_in_old_and_new_form():
    """The forms of transformers 4.50 and 5.23, with and without optional fields."""

    def gemma3(**fields):
        return config(**{**GEMMA3, "num_hidden_layers": 7, **fields})

    types = [SLIDING] * 5 + [FULL, SLIDING]
    new = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, SLIDING: {"rope_theta": 1e3}}
    one = gemma3(layer_types=types, rope_parameters=new)
    assert [layer.window for layer in one.layers] == [5] * 5 + [None, 5]
    assert one.layers[5].rope == Rope(5e5, "linear", 8.0) and one.layers[6].rope == Rope(1e3)
    assert one.attention_scale == 10**-0.5 and one.embed_scale == 4.0
    old = {"rope_theta": 5e5, "rope_local_base_freq": 1e3, "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert gemma3(sliding_window_pattern=6, **old) == gemma3(**old) == one
    assert gemma3(rope_parameters={FULL: None}).layers[5].rope == gemma3().layers[5].rope == Rope(1e6)
    assert [layer.window for layer in gemma3(sliding_window_pattern=3).layers][:4] == [5, 5, None, 5]
    # The released files have few fields, and those with towers have them one level down.
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    released = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (released.num_heads, released.vocab_size, released.eos_token_ids) == (8, 262208, (1, 106))
    assert released.layers[5] == LayerConfig(4, 256, rope=Rope(1e6)) and released.layers[0].window == 1024
    assert released.tie_word_embeddings and released.attention_scale == 1 / 16


def test_gemma4_layers():
    def layers(num_layers=6, **fields):
        return config(**{**GEMMA4, "num_hidden_layers": num_layers, **fields}).layers

    rope = Rope(1e6, "proportional", share=0.25)
    assert layers()[4:] == (LayerConfig(2, 6, 5, Rope(1e4)), LayerConfig(2, 8, None, rope))
    assert layers(8)[7].window is None  # the last one is full whatever the pattern says
    assert layers(num_global_key_value_heads=1)[5].kv_heads == 2  # only where keys are values
    assert layers(num_global_key_value_heads=1, attention_k_eq_v=True)[5] == LayerConfig(1, 8, None, rope, True)
    # A layer's own shape replaces that of the full layers. Keys may have leading zeros.
    own = layers(12, per_layer_config={"05": {"head_dim": 10}, "11": {"num_key_value_heads": 4, "hidden_size": 16}})
    assert [(layer.kv_heads, layer.head_dim) for layer in own] == [(2, 6)] * 5 + [(2, 10)] + [(2, 6)] * 5 + [(4, 6)]
    assert layers(per_layer_config={})[5].head_dim == 6
    shared = layers(9, layer_types=[SLIDING, SLIDING, FULL] * 3, num_kv_shared_layers=4, attention_k_eq_v=True)
    assert [layer.reuses for layer in shared] == [None] * 5 + [2, 4, 4, 2]


def fields_of(family: str) -> dict:
    return json.loads((GOLDENS / family / "config.json").read_text())


def test_released_configs():
    """The fields of the released files, and the defaults of each family's code for the rest."""
    deepseek, qwen, kimi, gpt_oss = (ModelConfig.from_hf(fields) for fields in RELEASED.values())
    yarn = Rope(1e4, "yarn", 40.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    (latents,) = set(deepseek.layers)
    assert latents.rope == yarn and latents.interleaved and latents.query_rank == 1536
    assert (len(deepseek.layers), deepseek.dense, deepseek.experts.num_groups) == (61, (0, 1, 2), 8)
    assert latents.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert ModelConfig.from_hf({**DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64}).num_heads == 64
    attention, delta = qwen.layers[3], qwen.layers[0]
    assert attention == LayerConfig(2, 256, rope=Rope(1e7, share=0.25)) and attention.rope.width(256) == 64
    assert qwen.layers == ((delta,) * 3 + (attention,)) * 12
    assert delta.shapes == {"conv": (3, 8192), "memory": (32, 128, 128)}
    assert [n for n, layer in enumerate(kimi.layers, 1) if layer == kimi.layers[3]] == FULL_KIMI
    assert kimi.layers[3].rope is None and kimi.dense == (0,) and kimi.rms_norm_eps == 1e-5
    assert kimi.eos_token_ids == (163586,) and kimi.max_positions == 1048576
    rope = Rope(150000.0, "yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
    full, silent = LayerConfig(8, 64, rope=rope), ModelConfig.from_hf({"model_type": "gpt_oss"})
    assert gpt_oss.layers[:2] == (LayerConfig(8, 64, 128, rope), full) == silent.layers[:2]
    assert [num_layers(fields) for fields in RELEASED.values()] == [61, 48, 27, 24]


def test_configs_in_other_forms():
    """Names that other families have, types instead of numbers, a share of rope and yarn at either place."""
    fields = {name: value for name, value in fields_of("kimi_linear").items() if name != "linear_attn_config"}
    for name, other in (("num_experts", "num_local_experts"), ("model_max_length", "max_position_embeddings")):
        fields[other] = fields.pop(name)
    assert ModelConfig.from_hf(fields) == ModelConfig.from_hf(fields_of("kimi_linear"))
    dense = {name: value for name, value in fields_of("kimi_linear").items() if name != "mlp_layer_types"}
    assert ModelConfig.from_hf(dense) == ModelConfig.from_hf(fields)
    assert ModelConfig.from_hf({**QWEN, "decoder_sparse_step": 24, "mlp_only_layers": [23]}).dense == tuple(range(47))
    yarn = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 262144}
    new = {**QWEN, "rope_theta": None, "rope_parameters": {**yarn, "partial_rotary_factor": 0.5}}
    rope = ModelConfig.from_hf(new).layers[3].rope
    assert rope == Rope(1e7, "yarn", 4.0, 262144, share=0.5) and rope.width(256) == 128


def test_configs_survive_the_way_through_hugging_face_fields():
    configs = [
        config(attention_bias=True, mlp_bias=True, eos_token_id=7),
        config(rope_theta=5e5, rope_scaling=LLAMA3),
        config(rope_scaling={**LONGROPE, "attention_factor": 1.5}),
        config(rope_scaling={**LONGROPE, "factor": 1.0}),
        config(model_type="qwen2", rope_scaling={"type": "dynamic", "factor": 2.0, "sequence_length": 8192}),
        config(rope_scaling={"type": "yarn", "factor": 2.0, "attention_factor": 1.2}, partial_rotary_factor=0.5),
        config(model_type="mistral", sliding_window=9),
        config(model_type="mistral", sliding_window=None),
        config(model_type="qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
        config(model_type="qwen3", rope_scaling={"type": "linear", "factor": 2.0}, tie_word_embeddings=True),
        ModelConfig.from_hf({**QWEN, "layer_types": ["linear_attention"] * 48, "num_attention_heads": 7 * 2}),
        ModelConfig.from_hf({**QWEN, "partial_rotary_factor": 1.0}),
        config(**GEMMA3),
        config(**GEMMA3, layer_types=[FULL] * 3, final_logit_softcapping=3.0, attention_bias=True),
        config(**{**GEMMA3, "sliding_window_pattern": 2, "query_pre_attn_scalar": 144, "eos_token_id": [1, 30]}),
        config(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
        config(**GEMMA4, layer_types=[SLIDING, FULL, FULL], num_kv_shared_layers=1, use_double_wide_mlp=True),
        config(**{**GEMMA4, "hidden_size_per_layer_input": 0, "per_layer_config": {}, "tie_word_embeddings": False}),
        *(ModelConfig.from_hf(fields) for name, released in RELEASED.items() for fields in (released, fields_of(name))),
    ]
    for one in configs:
        assert ModelConfig.from_hf(json.loads(json.dumps(one.to_hf()))) == one


REFUSED = [
    (SMALL, [
        ({"model_type": "gemma2"}, "model_type: got 'gemma2', wanted 'llama' or"),
        ({"model_type": None}, "model_type: got None"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_scaling.rope_type: got 'su', wanted 'default' or"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.factor: got None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}},
         "rope_parameters.attention_factor: got -1.0, wanted a positive number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 2}}, "rope_parameters.truncate: got 2"),
        ({"rope_parameters": {**LONGROPE, "long_factor": [1.0]}}, "long_factor: got 1 numbers, wanted 2, one for each"),
        ({"rope_parameters": {**LONGROPE, "short_factor": None}}, "rope_parameters.short_factor: got None, wanted a"),
        ({"rope_parameters": {**LONGROPE, "short_factor": [1.0, 0]}}, "rope_parameters.short_factor: got 0, wanted"),
        ({"rope_parameters": {**LONGROPE, "sequence_length": 1.5}}, "rope_parameters.sequence_length: got 1.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: got"),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}, "rope_scaling: got"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "rope_scaling.factor: got None"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor: got 1.0"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor: got 0.3, which is 1 dimensions, wanted an even"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor: got 2.0, wanted at most 1"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
         "partial_rotary_factor: got 0.5, which is 2 dimensions, wanted an even number of at least 4 of head_dim=4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor"),
        ({"head_dim": 5}, "head_dim: got 5, wanted an even number"),
        ({"hidden_size": None}, "hidden_size: got None, wanted an int"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: got 0, wanted a positive number"),
        ({"attention_bias": "yes"}, "attention_bias: got 'yes'"),
        ({"eos_token_id": 3.5}, "eos_token_id: got 3.5, wanted token ids"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id: got [1, '</s>'], wanted token ids"),
        ({"layer_types": 3}, "layer_types: got 3, wanted a list"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries"),
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "layer_types[2]: got 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types[0]: got 'sliding_attention'"),
        ({"model_type": "deepseek_v32"}, "model_type: got 'deepseek_v32', which cannot be served: its indexer"),
        ({"model_type": "deepseek_v2"}, "model_type: got 'deepseek_v2', wanted 'llama' or"),
    ]),
    (GEMMA3, [
        ({"hidden_activation": "relu"}, "hidden_activation: got 'relu', wanted 'gelu_pytorch_tanh'"),
        ({"sliding_window": None}, "sliding_window: got None, wanted an int"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types[0]: got 'chunked_attention', wanted 'full_attention"),
        ({"layer_types": 3}, "layer_types: got 3, wanted a list"),
        ({"layer_types": [FULL]}, "layer_types: got 1 entries, wanted num_hidden_layers=3"),
        ({"rope_parameters": LLAMA3}, "rope_parameters: got {"),
        ({"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, f"rope_parameters.{SLIDING}.rope_type: got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}, "sliding_window_pattern": 2}, "rope_scaling.factor: got None"),
        ({"rope_scaling": 8.0}, "rope_scaling: got 8.0, wanted a set of fields"),
        ({"rope_parameters": {FULL: LLAMA3}, "rope_scaling": LLAMA3}, "rope_scaling: got"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: got True, wanted False"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: got -1.0"),
        ({"model_type": "gemma3"}, "text_config: got None"),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "text_config.model_type: got 'llama'"),
    ]),
    (GEMMA4, [
        ({"enable_moe_block": True}, "enable_moe_block: got True, wanted False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor"),
        ({"global_head_dim": 7}, "head_dim: got 7, wanted an even number"),
        ({"per_layer_config": {"3": {"head_dim": 8}}}, "per_layer_config.3: wanted layer numbers 0 to 2"),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, "per_layer_config.1.head_dim: got 0"),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config.1.hidden_size: got 8, wanted 16"),
        ({"per_layer_config": [{}]}, "per_layer_config: got [{}]"),
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
         f"rope_parameters.{FULL}.partial_rotary_factor: got 1.5, wanted at most 1"),
        ({"layer_types": [FULL, FULL, SLIDING]}, "layer_types[2]: got 'sliding_attention', wanted 'full_attention'"),
        ({"num_hidden_layers": 6, "num_kv_shared_layers": 5},
         "num_kv_shared_layers: got 5 of 6 layers, wanted some 'full_atten"),
        ({"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2, "num_kv_shared_layers": 1,
          "per_layer_config": {"5": {"head_dim": 8}}},
         "per_layer_config: got other K/V in layer 5 than in layer 2, which it reuses"),
    ]),
    (DEEPSEEK, [
        ({"index_topk": 2048}, "index_topk: got 2048, wanted None"),
        ({"topk_method": "greedy"}, "topk_method: got 'greedy', wanted 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func: got 'softmax', wanted 'sigmoid'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: got 8, wanted 128"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: got 63, wanted an even number"),
        ({"attention_bias": True}, "attention_bias: got True, wanted False"),
        ({"topk_group": 9}, "topk_group: got 9, wanted at most n_group=8"),
        ({"n_group": 5}, "n_group: got 5, wanted a divisor of the 256 experts"),
        ({"n_group": 256}, "n_group: got 256, wanted a divisor of the 256 experts, two to a group"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok: got 200, wanted at most 128"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: got 'linear'"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1}}, "rope_scaling.original_max_posit"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, wanted 1.0"),
        ({"rope_scaling": {**DEEPSEEK["rope_scaling"], "truncate": 2}}, "rope_scaling.truncate: got 2"),
    ]),
    (QWEN, [
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor of"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads: got 24, wanted a multiple of"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: got 1, wanted an int of at least 2"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: got 1.5"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries, wanted num_hidden_layers=48"),
        ({"layer_types": ["mamba"] * 48}, "layer_types[0]: got 'mamba', wanted 'full_attention' or"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers[0]: got 48, wanted a layer's number"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
    ]),
    (KIMI, [
        ({"mla_use_nope": False}, "mla_use_nope: got False, wanted True"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate: got True, wanted False"),
        ({"attn_res_block_size": 4}, "attn_res_block_size: got 4, wanted 0"),
        ({"linear_attn_config": 3}, "linear_attn_config: got 3, wanted a set of fields"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config: got {'kda_layers': [1]}, wanted"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: got 1 entries, wanted num_hidden_layers=27"),
        ({"mlp_layer_types": ["moe"] * 27}, "mlp_layer_types[0]: got 'moe', wanted 'dense' or 'sparse'"),
    ]),
    (GPT_OSS, [
        ({"attention_bias": False}, "attention_bias: got False, wanted True"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok: got 33, wanted at most num_local_experts=32"),
        ({"head_dim": 63}, "head_dim: got 63, wanted an even number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor of"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries, wanted num_hidden_layers=24"),
        ({"layer_types": ["mamba"] * 24}, "layer_types[0]: got 'mamba', wanted 'full_attention' or"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: got"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("base", "fields", "message"), [(base, *row) for base, rows in REFUSED for row in rows])
def test_configs_that_cannot_be_served_are_refused_by_name(base, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_hf({**base, **fields})
