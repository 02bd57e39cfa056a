# SPDX-License-Identifier: Apache-2.0
"""Weights of fp8 (e4m3) with their scales, dequantised as they are read: a weight is its number times its scale.

A checkpoint has the scales of `X.weight` as `X.weight_scale_inv` (fp8, as DeepSeek has them) or `X.weight_scale`
(compressed-tensors): one for the matrix, one for each output, or one for each block of the matrix. Activations are not
quantised, so that scales of activations and of K/V are left out.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .fields import count, listed, only

DTYPE = "F8_E4M3"
_OF = "quantization_config"
_NAMES = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}
_LEFT_OUT = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The form of a checkpoint's scales.

    Attributes:
      suffix: of their names, where a weight's ends with "weight".
      block: outputs and inputs that share a scale, where scales are those of blocks; None: no scales are.
    """

    suffix: str
    block: tuple[int, int] | None

    def scale_name(self, name: str) -> str:
        """The name of a weight's scales."""
        return name.removesuffix("weight") + self.suffix

    def is_scale(self, name: str) -> bool:
        """Whether a tensor has scales, of weights or of what is not quantised here."""
        return name.endswith((f".{self.suffix}", *_LEFT_OUT))


def read_scheme(fields: dict[str, Any]) -> Scheme | None:
    """The scheme of a config.json, of which it takes away the field; None: the weights are not quantised.

    Raises:
      ValueError: naming the field, its value and what was wanted.
    """
    hf = fields.pop(_OF, None)
    if hf is None:
        return None
    if not isinstance(hf, Mapping):
        raise ValueError(f"{_OF}: got {hf!r:.80}, wanted a set of fields")
    method = only(hf, "quant_method", *_NAMES, of=_OF)
    if method == "fp8":
        only(hf, "fmt", "e4m3", absent="e4m3", of=_OF)
        blocks = [] if hf.get("weight_block_size") is None else [_block(hf, "weight_block_size", _OF)]
    else:
        blocks = _read_groups(hf)
    if len({*blocks}) > 1:
        raise ValueError(f"{_OF}: got blocks of {sorted({*blocks})}, wanted one size")
    return Scheme(_NAMES[method], blocks[0] if blocks else None)


def _read_groups(hf: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The blocks of a config of compressed-tensors; a scheme that is no fp8 of weights is refused."""
    only(hf, "format", "float-quantized", absent="float-quantized", of=_OF)
    for name in ("sparsity_config", "transform_config"):
        only(hf, name, None, {}, of=_OF)
    groups, blocks = hf.get("config_groups"), []
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{_OF}.config_groups: got {groups!r:.80}, wanted groups of layers")
    for key, group in groups.items():
        of = f"{_OF}.config_groups.{key}.weights"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"{of}: got {weights!r:.80}, wanted a set of fields")
        only(weights, "num_bits", 8, of=of)
        only(weights, "type", "float", of=of)
        only(weights, "symmetric", True, absent=True, of=of)
        if only(weights, "strategy", "tensor", "channel", "block", of=of) == "block":
            blocks.append(_block(weights, "block_structure", of))
    return blocks


def _block(hf: Mapping[str, Any], name: str, of: str) -> tuple[int, int]:
    """The size of a block."""
    sizes = listed(hf, name) or []
    if len(sizes) != 2:
        raise ValueError(f"{of}.{name}: got {sizes!r:.80}, wanted two sizes")
    outputs, inputs = (count({name: size}, name, of=of) for size in sizes)
    return outputs, inputs


class Scaled:
    """A matrix of a file, [outputs, inputs], dequantised where it is indexed.

    Args:
      path: of the file.
      name: of the weight.
      scales: of the weight, as a file has them.
      scheme: of the checkpoint.
    """

    def __init__(self, path: pathlib.Path, name: str, scales: np.ndarray, scheme: Scheme):
        self._numbers = _numbers(path, name)
        shape = self._numbers.shape
        if len(shape) != 2:
            raise ValueError(f"{path}: {name}: got {DTYPE} of shape {list(shape)}, wanted a matrix")
        blocks = {(): shape, (1,): shape, (1, 1): shape, (shape[0],): (1, shape[1]), (shape[0], 1): (1, shape[1])}
        if scheme.block is not None:
            blocks = {_grid(shape, scheme.block): scheme.block, **blocks}
        if scales.shape not in blocks:
            wanted = " or ".join(str(list(each)) for each in blocks)
            raise ValueError(f"{path}: {scheme.scale_name(name)}: got shape {list(scales.shape)}, wanted {wanted}")
        self._block = blocks[scales.shape]
        self._scales = scales.astype(np.float32).reshape(_grid(shape, self._block))

    def get_shape(self) -> list[int]:
        """The shape of the matrix."""
        return list(self._numbers.shape)

    def get_dtype(self) -> str:
        """The dtype of the parts."""
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part f32[...] of the matrix."""
        rows, columns = (
            np.arange(size)[part] // block
            for size, part, block in zip(self._numbers.shape, index, self._block, strict=True)
        )
        return self._numbers[index].astype(np.float32) * self._scales[rows[:, None], columns[None]]


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The number of blocks of a matrix along each axis; the last ones may be smaller."""
    return tuple(-(-size // part) for size, part in zip(shape, block, strict=True))


def _numbers(path: pathlib.Path, name: str) -> np.ndarray:
    """A tensor of fp8 in a safetensors file that was opened before; its library has no such numbers for numpy."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))[name]
    return np.memmap(path, jnp.float8_e4m3fn, "r", 8 + length + header["data_offsets"][0], tuple(header["shape"]))
