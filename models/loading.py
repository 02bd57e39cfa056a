# SPDX-License-Identifier: Apache-2.0
"""Loads models from checkpoints, and saves them in folders in Hugging Face format."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from .checkpoint import CONFIG, GENERATION, INDEX, SINGLE, TOKENIZER, TOKENIZER_CONFIG, Folder, Tensor
from .config import LayerConfig, ModelConfig, num_layers
from .decoder import Decoder, scanned, unrolled
from .fields import errors_in, ids, shortened
from .fp8 import FLOATS, SCALED
from .placement import check_axes, placed
from .rope import Rope

_ALWAYS_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")  # for every dtype of the weights
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_PART = 1 << 22  # numbers of a matrix to compare at a time
_TOWERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.")
_REUSED = re.compile(_LAYER.pattern + r"self_attn\.[kv]_(proj|norm)\.(weight|bias)")


def load(
    checkpoint: str | os.PathLike,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    scan: bool = False,
    mesh: Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
) -> tuple[Decoder, Any]:
    """Reads a model from a checkpoint.

    Tensors are read one after the other, so memory holds at most a single tensor in a dtype other than the model's.

    A config may say that the output matrix is the embedding (`tie_word_embeddings`). If the file has a different
    output matrix, the model is loaded with it. Each process compares the whole matrix.

    A tensor without a parameter is an error, with two exceptions: frequencies, which follow from the config, and
    unsupported parts, such as towers and layers for multi-token prediction.

    Args:
      checkpoint: a folder in Hugging Face format, or a .gguf file of a Llama, Qwen2, Qwen3 or Gemma 3 (extra `gguf`).
        The folder has config.json, model.safetensors or its shards with their index, and perhaps tokenizer.json and
        generation_config.json, which adds to the eos_token_id of config.json.
      dtype: dtype for the weights; None keeps the stored dtype, or takes float32 if the weights are quantised. Decay
        rates and the bias for choosing experts are always float32.
      scan: whether to scan layers with equal patterns, for fast compiles (see `scanned`).
      mesh: devices to divide the weights among (`placement.py`); each process reads the parts for its own devices.
        None loads all weights on a single device. Only models with attention and an MLP can be divided.
      heads: name of the mesh's axis for heads, as for `kvjax.Cache.create`.
      context: name of a second axis, which divides the weights further if possible; None disables it.

    Returns:
      The model, and the `tokenizers.Tokenizer` or None if the checkpoint has none.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: a GGUF file needs the extra.
      ValueError: the message has the name of the broken file, the unsupported config field, the axis of the mesh, or
        the tensors, which may be missing, unexpected, or of the wrong shape or dtype. Names are compared before
        anything is built.
    """
    check_axes(mesh, heads, context)
    source = open_checkpoint(checkpoint)
    tensors = source.tensors()
    config = _config(source, tensors)
    tokenizer = source.tokenizer()
    is_plain = config.experts is None and all(isinstance(layer, LayerConfig) for layer in config.layers)
    if mesh is not None and not is_plain:
        raise ValueError(f"mesh: got one, wanted None: the weights of {config.model_type} are not divided")
    dtype = _stored_dtype(tensors) if dtype is None else dtype
    if config.tie_word_embeddings and not _is_tied(tensors, dtype):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    parameters = dict(nnx.to_flat_state(state))
    _check_tensors(source, tensors, {path: leaf.shape for path, leaf in parameters.items()}, config)
    flat = []
    for path, leaf in parameters.items():
        read = functools.partial(_read_parameter, tensors, path, leaf)
        flat.append((path, leaf.replace(placed(read, ".".join(map(str, path)), leaf.shape, mesh, heads, context))))
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    return scanned(model) if scan else model, tokenizer


def open_checkpoint(path: str | os.PathLike) -> Any:
    """Opens a `checkpoint.Folder`, or a GGUF file, which has the same methods. Errors are the same as for `load`."""
    if pathlib.Path(path).suffix == ".gguf":
        from .gguf_file import GgufFile  # imported late because it needs the extra

        return GgufFile(path)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{os.fspath(path)}: no such folder")
    return Folder(pathlib.Path(path))


def save(
    model: Decoder,
    folder: str | os.PathLike,
    tokenizer: Any = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder for `load`: config.json, generation_config.json and model.safetensors.

    If the folder has an index of shards, it is removed, since `load` would read the shards.

    Args:
      model: the model.
      folder: the folder; it is made if it is missing.
      tokenizer: a `tokenizers.Tokenizer` for tokenizer.json; None skips the file.
      tokenizer_config: the fields of tokenizer_config.json, such as a chat template; None skips the file.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(unrolled(model))):
        value = np.asarray(leaf[...])
        for name, expert in _hf_parts(path, value.shape).items():
            tensor = value[expert]
            tensors[name] = np.ascontiguousarray(tensor.T if path[-1] == "kernel" else tensor)
    fields = {**model.config.to_hf(), "dtype": next(iter(tensors.values())).dtype.name}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    generation = {name: fields[name] for name in ("bos_token_id", "eos_token_id")}
    (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / INDEX).unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZER))
    if tokenizer_config is not None:
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def _hf_parts(path: tuple, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The names of a parameter's tensors in a checkpoint, each with its index in the parameter.

    The parameter (layers, 0, mlp, up_proj, kernel) is the tensor model.layers.0.mlp.up_proj.weight. A stack of experts
    (layers, 0, mlp, experts, up_proj, kernel) is a tensor for each: model.layers.0.mlp.experts.0.up_proj.weight and so
    on.
    """
    *modules, leaf = path
    prefix = [] if path[0] == "lm_head" else ["model"]
    weight = "weight" if leaf in ("kernel", "scale", "embedding") else leaf
    parts = {(): modules}
    if leaf == "kernel" and len(shape) == 3:
        parts = {(expert,): [*modules[:-1], expert, modules[-1]] for expert in range(shape[0])}
    return {".".join(map(str, [*prefix, *modules, weight])): index for index, modules in parts.items()}


def _config(source: Any, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """Reads the config of a checkpoint, and checks that each of its layers has tensors.

    The tokens that end a text also come from generation_config.json, which has more of them than config.json in chat
    models.
    """
    fields = source.fields(CONFIG)
    generation = source.fields(GENERATION)
    fields.pop("quantization_config", None)  # the tensors are dequantised
    with errors_in(source.file_of(CONFIG)):
        layers = {int(layer[1]) for layer in map(_LAYER.match, tensors) if layer}
        missing = next(layer for layer in itertools.count() if layer not in layers)
        num_wanted = num_layers(fields)
        if num_wanted > len(layers):
            got = f"got {num_wanted}, wanted {len(layers)}"
            raise ValueError(f"num_hidden_layers: {got}: no tensor is of layer {missing}")
        config = ModelConfig.from_hf(fields)
    with errors_in(source.file_of(GENERATION)):
        ends = *config.eos_token_ids, *ids(generation, "eos_token_id", config.vocab_size)
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))


def _read(tensor: Tensor, transposed: bool, dtype: jax.typing.DTypeLike, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a tensor. The result is always a copy, since the part may be a view of the file."""
    part = tensor.read(index[::-1]).T if transposed else tensor.read(index)
    return np.array(part, dtype=dtype, copy=True)


def _read_parameter(tensors: Mapping[str, Tensor], path: tuple, leaf: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a parameter, or of all experts in a stack."""
    parts = [
        _read(tensors[name], path[-1] == "kernel", leaf.dtype, index[len(expert) :])
        for name, expert in _hf_parts(path, leaf.shape).items()
    ]
    return parts[0] if parts[0].ndim == len(index) else np.stack(parts)


def _stored_dtype(tensors: Mapping[str, Tensor]) -> np.dtype:
    """The dtype of the first tensor of floats. If a folder has several dtypes, all are converted to this dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and not name.endswith(_ALWAYS_FLOAT32):
            return jax.dtypes.canonicalize_dtype(FLOATS[tensor.dtype])
    return np.dtype(np.float32)  # without weights, which `_check_tensors` refuses


def _is_tied(tensors: Mapping[str, Tensor], dtype: jax.typing.DTypeLike) -> bool:
    """Whether the output matrix of a tied config is absent, or equals the embedding in the wanted dtype.

    A matrix of the wrong shape or dtype counts as different. `_check_tensors` reports it.
    """
    head = tensors.get(_HEAD)
    embedding = tensors.get(_EMBEDDING)
    if head is None or embedding is None:
        return head is None
    shape = head.shape
    if shape != embedding.shape or len(shape) != 2 or not {head.dtype, embedding.dtype} <= {*FLOATS, SCALED}:
        return False
    step = max(1, _PART // max(1, shape[1]))
    parts = ((slice(first, min(first + step, shape[0])), slice(None)) for first in range(0, shape[0], step))
    same = (np.array_equal(_read(head, False, dtype, part), _read(embedding, False, dtype, part)) for part in parts)
    return all(same)


def _check_tensors(
    source: Any, tensors: Mapping[str, Tensor], parameters: Mapping[tuple, tuple[int, ...]], config: ModelConfig
) -> None:
    """Compares names, shapes and dtypes with the parameters, and frequencies with the config's."""
    wanted: dict[str, tuple[int, ...]] = {}
    for path, shape in parameters.items():  # a file has matrices as [outputs, inputs]
        wanted |= dict.fromkeys(_hf_parts(path, shape), shape[-2:][::-1] if path[-1] == "kernel" else shape)
    has_towers = source.fields(CONFIG)["model_type"] != config.model_type
    faults = collections.defaultdict(list, missing=[name for name in wanted if name not in tensors])
    for name, tensor in tensors.items():
        if name in wanted:
            if tensor.shape != wanted[name]:
                faults["of the wrong shape"].append(f"{name} {[*tensor.shape]}, wanted {[*wanted[name]]}")
            if tensor.dtype not in (*FLOATS, SCALED):
                faults["of the wrong dtype"].append(f"{name} {tensor.dtype}, wanted {', '.join(FLOATS)}")
        elif name.endswith(".inv_freq"):
            if not _has_frequencies(name, tensor, config):
                faults["of other frequencies than the config's"].append(name)
        elif not _is_left_out(name, tensors, config, has_towers):
            faults["unexpected"].append(name)
    if any(faults.values()):
        text = "; ".join(f"{fault}: {shortened(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"{source.path}: tensors {text}")


def _has_frequencies(name: str, tensor: Tensor, config: ModelConfig) -> bool:
    """Whether a tensor has the frequencies of its layer's rope, or, if its name has no layer, of any layer's rope.

    Old checkpoints contain frequencies, perhaps without the stretching of the rope.
    """
    layer = _LAYER.match(name)
    rotations = config.rotations
    layer_rotations = rotations[int(layer[1]) :][:1] if layer else ()
    candidates = [
        frequencies
        for rope, width in filter(None, set(layer_rotations or rotations))
        for frequencies in (rope.frequencies(width), Rope(rope.theta).frequencies(rope.width(width)))
        if frequencies.shape == tensor.shape
    ]
    if not candidates or tensor.dtype not in FLOATS:
        return False
    values = tensor.read((slice(None),))
    limits = jnp.finfo(values.dtype)
    relative = max(float(limits.eps), 1e-5)
    absolute = float(limits.smallest_subnormal)
    return any(np.allclose(values.astype(np.float64), candidate, relative, absolute) for candidate in candidates)


def _is_left_out(name: str, tensors: Mapping[str, Tensor], config: ModelConfig, has_towers: bool) -> bool:
    """Whether the model may ignore a tensor of its checkpoint."""
    if name == _HEAD:  # `_is_tied` found it to be a copy
        return True
    layer = _LAYER.match(name)
    joining = "mtp.fc.weight" if name.startswith("mtp.") else ""
    if layer is not None and int(layer[1]) < len(config.layers):
        return _REUSED.fullmatch(name) is not None and config.layers[int(layer[1])].reuses is not None
    if layer is not None:
        joining = f"{layer[0]}eh_proj.weight"
    if joining in tensors:  # joins stream and embedding for multi-token prediction
        return tensors[joining].shape == (config.hidden_size, 2 * config.hidden_size)
    return has_towers and _TOWERS.match(name) is not None
