# SPDX-License-Identifier: Apache-2.0
"""Weights of fp8 with scales: the loaded model is that of the dequantised weights, whatever the scales' form.

`test_goldens.py` compares with transformers.
"""

import json
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import load, loading
from tests.models.families import GOLDENS, shard, where_of

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 8]}


def compressed(strategy, **weights):
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


# Of each: the config's field, the scales' name, and the shape of the scales of a matrix [outputs, inputs].
FORMS = {
    "blocks": (FP8, "weight_scale_inv", lambda n, m: (-(-n // 16), -(-m // 8))),
    "one": ({"quant_method": "fp8"}, "weight_scale_inv", lambda n, m: ()),
    "compressed, one": (compressed("tensor"), "weight_scale", lambda n, m: (1,)),
    "compressed, outputs": (compressed("channel"), "weight_scale", lambda n, m: (n, 1)),
    "compressed, blocks": (
        compressed("block", block_structure=[16, 8]), "weight_scale", lambda n, m: (-(-n // 16), -(-m // 8)),
    ),
}  # fmt: skip


def spread(scales, shape):
    """The scales of each number of a matrix."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), shape)
    if scales.shape == (shape[0], 1):
        return np.broadcast_to(scales, shape)
    return np.repeat(np.repeat(scales, 16, 0)[: shape[0]], 8, 1)[:, : shape[1]]


def quantised(tmp_path, family, form, change=None):
    """A folder with the projections of a golden in fp8, and one with the same dequantised."""
    (field, name, shape_of), rng = FORMS[form], np.random.default_rng(0)
    tensors, plain = {}, {}
    for key, tensor in load_file(GOLDENS / family / loading.SINGLE).items():
        tensors[key] = plain[key] = tensor
        if key.endswith("_proj.weight") and tensor.ndim == 2:
            scales = np.asarray(rng.uniform(0.5, 2, shape_of(*tensor.shape)), np.float32)
            tensors[key] = tensor.astype(jnp.float8_e4m3fn)
            tensors[key.replace("weight", name)] = scales
            tensors[key.replace("weight", "input_scale")] = np.ones(1, np.float32)
            plain[key] = tensors[key].astype(np.float32) * spread(scales, tensor.shape)
    if change is not None:
        change(tensors)
    fields = json.loads((GOLDENS / family / loading.CONFIG).read_text())
    for folder, content, more in (("fp8", tensors, {"quantization_config": field}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        save_file(content, tmp_path / folder / loading.SINGLE)
        (tmp_path / folder / loading.CONFIG).write_text(json.dumps(fields | more))
    return tmp_path / "fp8", tmp_path / "plain"


def assert_same(one, other):
    assert one.config == other.config
    chex.assert_trees_all_equal(nnx.state(one), nnx.state(other))


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_numbers_times_their_scales(tmp_path, form):
    fp8, plain = quantised(tmp_path, "llama_linear", form)
    model, _ = load(fp8)
    assert_same(model, load(plain)[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    loading.save(model, tmp_path / "saved")
    assert_same(model, load(tmp_path / "saved")[0])  # dequantised


def test_experts_and_shards(tmp_path):
    """The scales of a weight may be in another file than the weight."""
    tensors = {}
    fp8, plain = quantised(tmp_path, "deepseek_v3", "blocks", tensors.update)
    shard(fp8, 4, tensors)
    assert_same(load(fp8)[0], load(plain)[0])


@pytest.mark.long
def test_each_device_reads_its_part(tmp_path):
    fp8, plain = quantised(tmp_path, "llama_linear", "blocks")
    with where_of((2, 2)) as where:
        assert_same(load(fp8, **where)[0], load(plain, **where)[0])


def test_the_dtype_is_that_of_the_other_tensors(tmp_path):
    def to_bfloat16(tensors):
        for name, tensor in tensors.items():
            if tensor.dtype == np.float32 and "scale" not in name:
                tensors[name] = tensor.astype(jnp.bfloat16)

    fp8, _ = quantised(tmp_path, "llama_linear", "blocks", to_bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(load(fp8)[0]))} == {jnp.dtype(jnp.bfloat16)}


Q = "model.layers.0.self_attn.q_proj.weight"
TENSORS = [
    (lambda tensors: tensors.pop(Q + "_scale_inv"), f"{Q}: got F8_E4M3 without scales, wanted F8_E4M3 with scales ("),
    (lambda tensors: tensors.update({Q: np.ones((64, 32), np.float32)}), f"{Q}: got F32 with scales, wanted F8_E4M3"),
    (
        lambda tensors: tensors.update({Q + "_scale_inv": np.ones((3, 4), np.float32)}),
        f"{Q}_scale_inv: got shape [3, 4], wanted [4, 4] or [] or",
    ),
    (
        lambda tensors: tensors.update({Q + "_scale_inv": np.ones((4, 4), np.uint8)}),
        f"{Q}_scale_inv: got U8, wanted F64, F32, F16, BF16",
    ),
    (
        lambda tensors: tensors.update({Q: np.ones(64, jnp.float8_e4m3fn)}),
        f"{Q}: got F8_E4M3 of shape [64], wanted a matrix",
    ),
    (lambda tensors: tensors.update({"x.scale": np.ones(1, np.float32)}), "tensors unexpected: x.scale"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_faulty_tensors_are_named(tmp_path, change, message):
    fp8, _ = quantised(tmp_path, "llama_linear", "blocks", change)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(fp8)


OF = "quantization_config"
FIELDS = [
    (3, f"{OF}: got 3, wanted a set of fields"),
    ({"quant_method": "mxfp4"}, f"{OF}.quant_method: got 'mxfp4', wanted 'fp8' or 'compressed-tensors'"),
    ({**FP8, "fmt": "e5m2"}, f"{OF}.fmt: got 'e5m2', wanted 'e4m3'"),
    ({**FP8, "weight_block_size": [128]}, f"{OF}.weight_block_size: got [128], wanted two sizes"),
    ({**FP8, "weight_block_size": [128, 0]}, f"{OF}.weight_block_size: got 0, wanted an int"),
    ({**compressed("tensor"), "format": "pack-quantized"}, f"{OF}.format: got 'pack-quantized', wanted"),
    ({**compressed("tensor"), "config_groups": {}}, f"{OF}.config_groups: got {{}}, wanted groups"),
    ({**compressed("tensor"), "transform_config": {"a": 1}}, f"{OF}.transform_config: got {{'a': 1}}, wanted None"),
    (compressed("group"), f"{OF}.config_groups.group_0.weights.strategy: got 'group', wanted 'tensor' or"),
    (compressed("tensor", num_bits=4), f"{OF}.config_groups.group_0.weights.num_bits: got 4, wanted 8"),
    (compressed("tensor", type="int"), f"{OF}.config_groups.group_0.weights.type: got 'int', wanted 'float'"),
    (compressed("tensor", symmetric=False), f"{OF}.config_groups.group_0.weights.symmetric: got False, wanted True"),
    (compressed("block"), f"{OF}.config_groups.group_0.weights.block_structure: got [], wanted two sizes"),
]


@pytest.mark.parametrize(("field", "message"), FIELDS)
def test_other_quantisations_are_refused_by_name(tmp_path, field, message):
    shutil.copytree(GOLDENS / "llama_fp8", tmp_path / "model")
    path = tmp_path / "model" / loading.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {OF: field}))
    with pytest.raises(ValueError, match=f"{loading.CONFIG}: {re.escape(message)}"):
        load(tmp_path / "model")


def test_fp8_without_a_scheme_is_refused(tmp_path):
    shutil.copytree(GOLDENS / "llama_fp8", tmp_path / "model")
    path = tmp_path / "model" / loading.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {OF: None}))
    with pytest.raises(ValueError, match=r"unexpected: .*weight_scale_inv"):
        load(tmp_path / "model")
