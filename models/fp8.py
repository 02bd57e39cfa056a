# SPDX-License-Identifier: Apache-2.0
"""Reads weights of fp8 (e4m3) with their scales, and dequantises them: a weight is its number times its scale.

A checkpoint has the scales of `X.weight` as `X.weight_scale_inv` (fp8, as in DeepSeek) or `X.weight_scale`
(compressed-tensors). There is a scale for the whole matrix, for each output, or for each block of the matrix.
Activations are not quantised here, so the scales of activations and K/V are left out.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .fields import count, listed, only

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}  # dtypes of other weights
DTYPE = "F8_E4M3"
SCALED = "F8_E4M3 with scales"
_SECTION = "quantization_config"
_NAMES = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}
_LEFT_OUT = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale")


class Scheme(NamedTuple):
    """The form of a checkpoint's scales.

    Attributes:
      suffix: ending of the scales' names, in place of a weight's "weight".
      block: outputs and inputs of a block with a scale of its own; None disables scales for blocks.
    """

    suffix: str
    block: tuple[int, int] | None


def read_scheme(fields: Mapping[str, Any]) -> Scheme | None:
    """Reads the scheme of a config.json, or None if the weights are not quantised. A ValueError names the field."""
    hf = fields.get(_SECTION)
    if hf is None:
        return None
    if not isinstance(hf, Mapping):
        raise ValueError(f"{_SECTION}: got {hf!r:.80}, wanted a set of fields")
    method = only(hf, "quant_method", *_NAMES, section=_SECTION)
    if method == "fp8":
        only(hf, "fmt", "e4m3", absent="e4m3", section=_SECTION)
        blocks = set() if hf.get("weight_block_size") is None else {_block(hf, "weight_block_size", _SECTION)}
    else:
        blocks = _read_groups(hf)
    if len(blocks) > 1:
        raise ValueError(f"{_SECTION}: got blocks of {sorted(blocks)}, wanted one size")
    return Scheme(_NAMES[method], next(iter(blocks), None))


def _read_groups(hf: Mapping[str, Any]) -> set[tuple[int, int]]:
    """The sizes of blocks in a config of compressed-tensors. Only schemes with fp8 weights are accepted."""
    only(hf, "format", "float-quantized", absent="float-quantized", section=_SECTION)
    for name in ("sparsity_config", "transform_config"):
        only(hf, name, None, {}, section=_SECTION)
    groups = hf.get("config_groups")
    blocks = set()
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{_SECTION}.config_groups: got {groups!r:.80}, wanted groups of layers")
    for key, group in groups.items():
        section = f"{_SECTION}.config_groups.{key}.weights"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"{section}: got {weights!r:.80}, wanted a set of fields")
        only(weights, "num_bits", 8, section=section)
        only(weights, "type", "float", section=section)
        only(weights, "symmetric", True, absent=True, section=section)
        if only(weights, "strategy", "tensor", "channel", "block", section=section) == "block":
            blocks.add(_block(weights, "block_structure", section))
    return blocks


def _block(hf: Mapping[str, Any], name: str, section: str) -> tuple[int, int]:
    """Reads the size of a block: outputs, then inputs."""
    sizes = listed(hf, name) or []
    if len(sizes) != 2:
        raise ValueError(f"{section}.{name}: got {sizes!r:.80}, wanted two sizes")
    outputs, inputs = (count({name: size}, name, section=section) for size in sizes)
    return outputs, inputs


def dequantised(tensors: Mapping[str, Any], scheme: Scheme) -> dict[str, Any]:
    """The tensors without scales. Reading a weight of fp8 dequantises it. A ValueError names the tensor."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith((f".{scheme.suffix}", *_LEFT_OUT)):
            continue
        scale_name = name.removesuffix("weight") + scheme.suffix
        scales = tensors.get(scale_name)
        if (tensor.dtype == DTYPE) != (scales is not None):
            got = f"got {tensor.dtype} {'without' if scales is None else 'with'} scales"
            raise ValueError(f"{name}: {got}, wanted {DTYPE} with scales ({scale_name})")
        if scales is not None:
            if len(tensor.shape) != 2:
                raise ValueError(f"{name}: got {DTYPE} of shape {[*tensor.shape]}, wanted a matrix")
            if scales.dtype not in FLOATS:
                raise ValueError(f"{scale_name}: got {scales.dtype}, wanted {', '.join(FLOATS)}")
            block = _block_of(scales.shape, tensor.shape, scheme, scale_name)
            tensor = tensor._replace(dtype=SCALED, read=functools.partial(_read_scaled, tensor, scales, block))
        result[name] = tensor
    return result


def _block_of(scales: tuple[int, ...], shape: tuple[int, int], scheme: Scheme, name: str) -> tuple[int, int]:
    """The outputs and inputs of a block with the same scale, from the shapes of the scales and the matrix."""
    outputs, inputs = shape
    blocks = {(): shape, (1,): shape, (1, 1): shape, (outputs,): (1, inputs), (outputs, 1): (1, inputs)}
    if scheme.block is not None:
        blocks = {_grid(shape, scheme.block): scheme.block, **blocks}
    if scales not in blocks:
        raise ValueError(f"{name}: got shape {[*scales]}, wanted {' or '.join(str([*wanted]) for wanted in blocks)}")
    return blocks[scales]


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, ...]:
    """The number of blocks of a matrix along each axis. The last blocks may be smaller."""
    return tuple(-(-size // part) for size, part in zip(shape, block, strict=True))


def _read_scaled(numbers: Any, scales: Any, block: tuple[int, int], index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part f32[...] of a matrix [outputs, inputs]."""
    rows, columns = (
        np.arange(size)[part] // width for size, part, width in zip(numbers.shape, index, block, strict=True)
    )
    factors = scales.read((slice(None),) * len(scales.shape)).astype(np.float32).reshape(_grid(numbers.shape, block))
    return numbers.read(index).astype(np.float32) * factors[rows[:, None], columns[None]]


def read(path: pathlib.Path, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of an fp8 tensor in a safetensors file, because its library cannot do so for numpy."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))[name]
    start = 8 + length + header["data_offsets"][0]
    return np.memmap(path, jnp.float8_e4m3fn, "r", start, tuple(header["shape"]))[index]
