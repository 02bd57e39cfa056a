# SPDX-License-Identifier: Apache-2.0
"""Files of DeepSeek V3, Qwen3-Next, Kimi Linear and GptOss: what each has that the others lack."""

import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import load, loading, save
from models.rope import Rope
from tests.models.families import GOLDENS

MAIN = ("deepseek_v3", "qwen3_next", "kimi_linear", "gpt_oss")


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
    rotated = [number for number, rotation in enumerate(model.config.rotations) if rotation is not None]
    name = f"model.layers.{rotated[0] if rotated else 1}.self_attn.rotary_emb.inv_freq"
    path = tmp_path / "model" / loading.SINGLE
    tensors, right, wrong = load_file(path), [], [np.ones(4, np.float32)]
    for rope, head_dim in {model.config.rotations[number] for number in rotated}:
        width = rope.width(head_dim)
        right = [rope.frequencies(head_dim), Rope(rope.theta).frequencies(width)]
        wrong.append(Rope(2 * rope.theta).frequencies(width))
    for value in right:
        save_file({**tensors, name: value}, path)
        load(tmp_path / "model")
    for value in wrong:
        save_file({**tensors, name: value}, path)
        with pytest.raises(ValueError, match=rf"of other frequencies than the config's: {re.escape(name)}$"):
            load(tmp_path / "model")
