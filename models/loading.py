# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders (config.json, safetensors in one file or several, tokenizer.json), and GGUF files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import fp8
from .config import LayerConfig, ModelConfig, num_layers
from .decoder import Decoder, scanned, unrolled
from .fields import check_file, ids, read_json
from .placement import check_axes, placed
from .rope import Rope

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jax.numpy.bfloat16}  # a weight's dtypes
_ALWAYS_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")  # whatever dtype the weights have
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PART = 1 << 22  # numbers of a matrix that are compared at a time
# The decoder's prefixes in a checkpoint that also has towers for images or sound, whose tensors are ignored.
_DECODER = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    "language_model.": "model.",
}  # fmt: skip
_TOWERS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.")
# Names in a checkpoint of the stream without its output matrix, as `AutoModel` saves it.
_BARE = re.compile(r"(layers|norm|embed_tokens|embed_tokens_per_layer|per_layer_\w+|rotary_emb\w*)\.")
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
    """Reads a model, one tensor at a time: at most one is held in another dtype than the wanted one.

    A model whose config is tied is loaded untied if the file has an output matrix other than the embedding; each
    process compares all of the matrix. A tensor without a parameter is an error, unless it follows from the config, as
    frequencies do, or belongs to a part that is not served: a tower, or a layer that predicts a token further on.

    Args:
      checkpoint: a folder with config.json, model.safetensors or its shards with their index, and perhaps
        tokenizer.json and generation_config.json, whose eos_token_id is joined with that of config.json; or a .gguf
        file of a Llama, Qwen2, Qwen3 or Gemma 3 (extra `gguf`).
      dtype: of the weights; None for the one they are stored in, which is float32 if they are quantised. Rates of decay
        and the bias of a choice of experts are float32.
      scan: whether layers that repeat are scanned, for fast compiles (`scanned`).
      mesh: the devices among which the weights are divided (`placement.py`). Of each tensor only the parts are read
        that this process's devices need. None: one device has all. Only attention with an MLP can be divided.
      heads: the mesh's axis that divides them, the one that `kvjax.Cache.create` is given.
      context: likewise, its other axis; what both axes can divide is divided by both. None: none.

    Returns:
      The model; and the `tokenizers.Tokenizer`, None if the checkpoint has none.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: naming the file that is none, the config field that is not supported, the tensors that are missing,
        unexpected or of the wrong shape or dtype, or the axis that cannot divide the weights. Names are compared before
        anything is built.
    """
    source = pathlib.Path(checkpoint)
    check_axes(mesh, heads, context)
    fields = gguf_file(source).config if is_gguf(source) else read_json(source / CONFIG)
    files = weight_files(source)
    scales = _Scales(source, fields, files)
    config, tokenizer = _config(source, fields, files), load_tokenizer(source)
    _check_mesh(config, mesh)
    dtype = _stored_dtype(files, scales) if dtype is None else dtype
    if config.tie_word_embeddings and not _is_tied(files, dtype):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    parameters = dict(nnx.to_flat_state(state))
    wanted = {name: part for path, leaf in parameters.items() for name, part in _hf_parts(path, leaf.shape).items()}
    shapes = {name: _hf_shape(path, parameters[path].shape) for name, (path, _) in wanted.items()}
    _check_names(files, scales, shapes, config, has_towers=fields["model_type"] != config.model_type)
    flat, stacks = [], {}
    for name, tensor in _tensors(files, scales):
        if _own_name(name) in wanted:
            path, expert = wanted[_own_name(name)]
            leaf = parameters[path]
            read = functools.partial(_read, tensor, path[-1] == "kernel", leaf.dtype)
            if expert is None:
                flat.append(
                    (path, leaf.replace(placed(read, ".".join(map(str, path)), leaf.shape, mesh, heads, context)))
                )
            else:
                stacks.setdefault(path, _Stack(leaf)).put(expert, read)
                if stacks[path].missing == 0:
                    flat.append((path, leaf.replace(jnp.array(stacks.pop(path).array))))
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    return scanned(model) if scan else model, tokenizer


class _Stack:
    """The matrices of a layer's experts, of which a checkpoint has a tensor each."""

    def __init__(self, leaf: Any):
        self.array, self.missing = np.empty(leaf.shape, leaf.dtype), leaf.shape[0]

    def put(self, expert: int, read: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        """Takes the matrix of one expert."""
        self.array[expert] = read((slice(None), slice(None)))
        self.missing -= 1


def _check_mesh(config: ModelConfig, mesh: Mesh | None) -> None:
    """Refuses to divide experts, and mixers other than attention."""
    is_plain = config.experts is None and all(isinstance(layer, LayerConfig) for layer in config.layers)
    if mesh is not None and not is_plain:
        raise ValueError(f"mesh: got one, wanted None: the weights of {config.model_type} are not divided")


def save(
    model: Decoder,
    folder: str | os.PathLike,
    tokenizer: Any = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that `load` reads: config.json, generation_config.json and model.safetensors.

    If the folder has an index of shards, it is removed, since `load` would read them.

    Args:
      model: the model.
      folder: is made if it is missing.
      tokenizer: a `tokenizers.Tokenizer`, for tokenizer.json; None: that file is not written.
      tokenizer_config: the fields of tokenizer_config.json, such as a chat template; None: that file is not written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(unrolled(model))):
        value = np.asarray(leaf[...])
        for name, (_, expert) in _hf_parts(path, value.shape).items():
            tensor = value if expert is None else value[expert]
            tensors[name] = np.ascontiguousarray(tensor.T if path[-1] == "kernel" else tensor)
    fields = {**model.config.to_hf(), "dtype": next(iter(tensors.values())).dtype.name}
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    generation = {name: fields[name] for name in ("bos_token_id", "eos_token_id")}
    (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / INDEX).unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether a checkpoint is a GGUF file, by its name."""
    return pathlib.Path(path).suffix == ".gguf"


def gguf_file(path: str | os.PathLike) -> Any:
    """The open GGUF file."""
    from .gguf_file import open_gguf  # late: it needs the extra

    return open_gguf(path)


def load_tokenizer(path: str | os.PathLike) -> Any:
    """The `tokenizers.Tokenizer` of a checkpoint, None if it has none."""
    if is_gguf(path):
        return gguf_file(path).tokenizer()
    path = pathlib.Path(path) / "tokenizer.json"
    if not path.exists():
        return None
    check_file(path)
    from tokenizers import Tokenizer  # only text needs it

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"{path}: not a tokenizer ({error})") from error


def _hf_name(path: tuple) -> str:
    """Checkpoint name of a parameter: (layers, 0, mlp, up_proj, kernel) is model.layers.0.mlp.up_proj.weight."""
    *modules, leaf = path
    prefix = () if modules[0] == "lm_head" else ("model",)
    leaf = "weight" if leaf in ("kernel", "scale", "embedding") else leaf
    return ".".join(map(str, (*prefix, *modules, leaf)))


def _hf_parts(path: tuple, shape: tuple[int, ...]) -> dict[str, tuple[tuple, int | None]]:
    """The tensors of a checkpoint that make a parameter: one, or one for each expert: {name: (path, expert)}.

    (layers, 1, mlp, experts, up_proj, kernel) is model.layers.1.mlp.experts.0.up_proj.weight and so on.
    """
    if path[-1] != "kernel" or len(shape) != 3:
        return {_hf_name(path): (path, None)}
    *above, name, leaf = path
    return {_hf_name((*above, expert, name, leaf)): (path, expert) for expert in range(shape[0])}


def _own_name(name: str) -> str:
    """A tensor's name in a checkpoint of the decoder alone.

    language_model.model.norm.weight and norm.weight are model.norm.weight.
    """
    for prefix, own in _DECODER.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return f"model.{name}" if _BARE.match(name) else name


def _hf_shape(path: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Checkpoints keep matrices as [outputs, inputs], Flax as [inputs, outputs]; of each expert by itself."""
    return shape[-2:][::-1] if path[-1] == "kernel" else shape


def _config(checkpoint: pathlib.Path, fields: dict[str, Any], files: dict[pathlib.Path, list[str]]) -> ModelConfig:
    """The config of config.json's fields, for weights that have all of its layers: it has one entry per layer.

    Tokens that end a text are those of generation_config.json too: models for chats have more than config.json tells.
    """
    path, more = checkpoint if is_gguf(checkpoint) else checkpoint / CONFIG, checkpoint / GENERATION
    generation = read_json(more) if more.exists() else {}
    try:
        found = {
            int(layer[1]) for names in files.values() for layer in map(_LAYER.match, map(_own_name, names)) if layer
        }
        number, lacks = num_layers(fields), next(n for n in itertools.count() if n not in found)
        if number > len(found):
            raise ValueError(f"num_hidden_layers: got {number}, wanted {len(found)}: no tensor is of layer {lacks}")
        config = ModelConfig.from_hf(fields)
        path = more
        ends = *config.eos_token_ids, *ids(generation, "eos_token_id", config.vocab_size)
        return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def weight_files(checkpoint: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """Each weight file with the names of the tensors to take from it; a GGUF file is the only one.

    An index says which file has a tensor, and may leave out tensors of its files: they are taken too.
    """
    if is_gguf(checkpoint):
        return {checkpoint: gguf_file(checkpoint).keys()}
    folder = checkpoint
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX}: got no weight_map, wanted one of tensor names to files")
        files: dict[pathlib.Path, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_below(pathlib.PurePath(file)):
                raise ValueError(f"{folder / INDEX}: {name:.200}: got {file!r:.200}, wanted a file in this folder")
            files.setdefault(folder / file, []).append(name)
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise FileNotFoundError(f"{folder}: {INDEX} names files that are not there: {_some(missing)}")
        for path, names in files.items():
            with _open(path) as file:
                held = set(file.keys())
            if lacks := set(names) - held:
                raise ValueError(f"{folder / INDEX}: got tensors that {path.name} lacks: {_some(sorted(lacks))}")
            names += sorted(held - weight_map.keys())
        return files
    if not (folder / SINGLE).exists():
        raise FileNotFoundError(f"{folder}: found neither {SINGLE} nor {INDEX}")
    with _open(folder / SINGLE) as file:
        return {folder / SINGLE: list(file.keys())}


def _is_below(path: pathlib.PurePath) -> bool:
    """Whether a path as written leads to something in its folder; where links lead is not asked.

    The folders of Hugging Face's cache have nothing but links that lead out of them.
    """
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _open(path: pathlib.Path):
    if is_gguf(path):
        return gguf_file(path)
    check_file(path)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file ({error})") from error


def _read(tensor: Any, transposed: bool, dtype: jax.typing.DTypeLike, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor of a file; a copy even where nothing is converted, since it may be a view of the file."""
    part = tensor[index[::-1]].T if transposed else tensor[index]
    return np.array(part, dtype=dtype, copy=True)


def _stored_dtype(files: dict[pathlib.Path, list[str]], scales: _Scales) -> np.dtype:
    """The dtype of the first tensor of floats; a folder that mixes several is unusual, and is converted to this one."""
    for name, tensor in _tensors(files, scales):
        if isinstance(tensor, fp8.Scaled):
            continue
        if tensor.get_dtype() in _FLOATS and not name.endswith(_ALWAYS_FLOAT32):
            return jax.dtypes.canonicalize_dtype(_FLOATS[tensor.get_dtype()])
    return np.dtype(np.float32)  # no weight at all: refused by `_check_names`


def _tensors(files: dict[pathlib.Path, list[str]], scales: _Scales) -> Iterator[tuple[str, Any]]:
    """The tensors' names but for scales, and what reads a tensor or a part of it where it is indexed."""
    for path, names in files.items():
        with _open(path) as file:
            for name in names:
                if not scales.is_scale(name):
                    yield name, scales.dequantised(path, name, file.get_slice(name))


class _Scales:
    """The scales of a folder's weights of fp8, if its config says that it has any; takes away the config's field."""

    def __init__(self, folder: pathlib.Path, fields: dict[str, Any], files: dict[pathlib.Path, list[str]]):
        try:
            self._scheme = fp8.read_scheme(fields)
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG}: {error}") from error
        self._paths = {name: path for path, names in files.items() for name in names}

    def is_scale(self, name: str) -> bool:
        """Whether a tensor has scales alone."""
        return self._scheme is not None and self._scheme.is_scale(name)

    def dequantised(self, path: pathlib.Path, name: str, tensor: Any) -> Any:
        """The tensor; of fp8, one that is dequantised where it is indexed."""
        scale_name = "" if self._scheme is None else self._scheme.scale_name(name)
        has_scales, dtype = scale_name in self._paths, tensor.get_dtype()
        if self._scheme is None or not (has_scales or dtype == fp8.DTYPE):
            return tensor
        if not has_scales or dtype != fp8.DTYPE:
            wanted = f"{fp8.DTYPE} with scales ({scale_name})"
            raise ValueError(
                f"{path}: {name}: got {dtype} {'with' if has_scales else 'without'} scales, wanted {wanted}"
            )
        with _open(self._paths[scale_name]) as file:
            of_scales = file.get_slice(scale_name).get_dtype()
            if of_scales not in _FLOATS:
                raise ValueError(f"{path}: {scale_name}: got {of_scales}, wanted {', '.join(_FLOATS)}")
            return fp8.Scaled(path, name, file.get_tensor(scale_name), self._scheme)


def _is_tied(files: dict[pathlib.Path, list[str]], dtype: jax.typing.DTypeLike) -> bool:
    """Whether the output matrix of a tied config is left out, or equals the embedding in the wanted dtype.

    A matrix of the wrong shape or dtype is no copy: `_check_names` reports it.
    """
    where = {_own_name(name): (path, name) for path, names in files.items() for name in names}
    if _HEAD not in where or _EMBEDDING not in where:
        return _HEAD not in where
    (path, name), (other_path, other_name) = where[_HEAD], where[_EMBEDDING]
    with _open(path) as file, _open(other_path) as other:
        head, embedding = file.get_slice(name), other.get_slice(other_name)
        shape, dtypes = head.get_shape(), {head.get_dtype(), embedding.get_dtype()}
        if shape != embedding.get_shape() or len(shape) != 2 or not dtypes <= {*_FLOATS}:
            return False
        step = max(1, _PART // max(1, shape[1]))
        parts = ((slice(first, min(first + step, shape[0])), slice(None)) for first in range(0, shape[0], step))
        same = (np.array_equal(_read(head, False, dtype, part), _read(embedding, False, dtype, part)) for part in parts)
        return all(same)


def _check_names(
    files, scales: _Scales, wanted: dict[str, tuple[int, ...]], config: ModelConfig, *, has_towers: bool
) -> None:
    """Compares names, shapes and dtypes with the model's, by the files' headers, and frequencies with the config's."""
    found, dtypes, twice, strange = {}, {}, [], []
    for file_name, tensor in _tensors(files, scales):
        name = _own_name(file_name)
        twice += [f"{name} (as {file_name})"] * (name in found)
        found[name], dtypes[name] = tuple(tensor.get_shape()), tensor.get_dtype()
        if name.endswith(".inv_freq") and not _has_frequencies(name, tensor, config):
            strange.append(name)
    faults = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [
            name for name in found if name not in wanted and not _is_left_out(name, found, config, has_towers)
        ],
        "that are there twice": twice,
        "of other frequencies than the config's": strange,
        "of the wrong shape": [
            f"{name} {list(found[name])}, wanted {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
        "of the wrong dtype": [
            f"{name} {dtypes[name]}, wanted {', '.join(_FLOATS)}"
            for name in wanted
            if dtypes.get(name, "F32") not in _FLOATS
        ],
    }
    if any(faults.values()):
        path = next(iter(files))
        text = "; ".join(f"{what}: {_some(names)}" for what, names in faults.items() if names)
        raise ValueError(f"{path if is_gguf(path) else path.parent}: tensors {text}")


def _has_frequencies(name: str, tensor: Any, config: ModelConfig) -> bool:
    """Whether a tensor has the frequencies of its layer's rope, or without a layer those of any layer.

    Old checkpoints carry them, perhaps as they are before the rope stretches them.
    """
    layer, rotations = _LAYER.match(name), config.rotations
    of_layer = rotations[int(layer[1]) :][:1] if layer else ()
    likes = [
        frequencies
        for rope, width in filter(None, set(of_layer or rotations))
        for frequencies in (rope.frequencies(width), Rope(rope.theta).frequencies(rope.width(width)))
        if [*frequencies.shape] == tensor.get_shape()
    ]
    if not likes or tensor.get_dtype() not in _FLOATS:
        return False
    values = tensor[:]
    limits = jnp.finfo(values.dtype)
    relative, absolute = max(float(limits.eps), 1e-5), float(limits.smallest_subnormal)
    return any(np.allclose(values.astype(np.float64), like, relative, absolute) for like in likes)


def _is_left_out(name: str, shapes: dict[str, tuple[int, ...]], config: ModelConfig, has_towers: bool) -> bool:
    """Whether the model has a reason to leave out a tensor of its checkpoint; `shapes` are those of all tensors."""
    if name == _HEAD or name.endswith(".inv_freq"):  # a copy by `_is_tied`; `_has_frequencies` has compared them
        return True
    if shapes.get(_joining_matrix(name, config)) == (config.hidden_size, 2 * config.hidden_size):
        return True
    layer = _REUSED.fullmatch(name)
    if layer is not None and int(layer[1]) < len(config.layers):
        return config.layers[int(layer[1])].reuses is not None
    return has_towers and _TOWERS.match(name) is not None


def _joining_matrix(name: str, config: ModelConfig) -> str:
    """The matrix that joins stream and embedding for layers that predict a token further on, if a tensor is theirs."""
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= len(config.layers):
        return f"{layer[0]}eh_proj.weight"
    return "mtp.fc.weight" if name.startswith("mtp.") else ""


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
