# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a folder in Hugging Face format. A GGUF file (`gguf_file.py`) has the methods of one."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from . import fp8
from .fields import check_file, errors_in, read_json, shortened

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_OF_DECODER = re.compile(r"(model\.)?language_model\.")  # in a checkpoint that also has towers for images or sound
# Names in a checkpoint of the stream without its output matrix, as `AutoModel` saves it.
_BARE = re.compile(r"(layers|norm|embed_tokens|embed_tokens_per_layer|per_layer_\w+|rotary_emb\w*)\.")


class Tensor(NamedTuple):
    """A tensor of a checkpoint, which stays in its file.

    Attributes:
      shape: the sizes of its axes.
      dtype: the dtype by safetensors' name, such as BF16.
      read: returns a part of it, that of a slice for each axis.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder in Hugging Face format, of which a file is read when a method asks for it.

    Attributes:
      path: of the folder.
    """

    path: pathlib.Path

    def file_of(self, name: str) -> pathlib.Path:
        """The file that has the fields of this name."""
        return self.path / name

    def fields(self, name: str) -> dict[str, Any]:
        """The fields of a file of JSON, none if it is not there; but config.json has to be."""
        path = self.path / name
        return read_json(path) if name == CONFIG or path.exists() else {}

    def files(self) -> list[pathlib.Path]:
        """The files of the model: its config and its weights."""
        return [self.path / CONFIG, *sorted(self._weight_map())]

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, None if the folder has none."""
        path = self.path / TOKENIZER
        if not path.exists():
            return None
        check_file(path)
        from tokenizers import Tokenizer  # only text needs it

        with errors_in(path, "a tokenizer", Exception):  # the library raises nothing more particular
            return Tokenizer.from_file(str(path))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names that a decoder alone gives them; weights of fp8 are dequantised as they are read.

        An index says which file has a tensor, and may leave out tensors of its files: they are taken too.
        """
        fields = self.fields(CONFIG)
        with errors_in(self.path / CONFIG):
            scheme = fp8.read_scheme(fields)
        weight_map = self._weight_map()
        indexed = {name for names in weight_map.values() for name in names}
        tensors, twice = {}, []
        for path, names in weight_map.items():
            file = _open(path)
            held = [*file.keys()]
            if lacks := set(names) - set(held):
                got = f"got tensors that {path.name} lacks: {shortened(sorted(lacks))}"
                raise ValueError(f"{self.path / INDEX}: {got}")
            for file_name in (*names, *(name for name in held if name not in indexed)):
                name, part = _own_name(file_name), file.get_slice(file_name)
                twice += [f"{name} (as {file_name})"] * (name in tensors)
                is_fp8 = part.get_dtype() == fp8.DTYPE
                read = functools.partial(fp8.read, path, file_name) if is_fp8 else part.__getitem__
                tensors[name] = Tensor(tuple(part.get_shape()), part.get_dtype(), read)
        if twice:
            raise ValueError(f"{self.path}: tensors that are there twice: {shortened(twice)}")
        with errors_in(self.path):
            return tensors if scheme is None else fp8.dequantised(tensors, scheme)

    def _weight_map(self) -> dict[pathlib.Path, list[str]]:
        """The weight files, each with the names of the tensors that an index says it has."""
        index, single = self.path / INDEX, self.path / SINGLE
        if not index.exists():
            if not single.exists():
                raise FileNotFoundError(f"{self.path}: found neither {SINGLE} nor {INDEX}")
            return {single: []}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: got no weight_map, wanted one of tensor names to files")
        files: dict[pathlib.Path, list[str]] = {}
        for name, file in weight_map.items():
            path = pathlib.PurePath(file if isinstance(file, str) else "")
            # As written: links may lead out of the folder, as all do in Hugging Face's cache.
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{index}: {name:.200}: got {file!r:.200}, wanted a file in this folder")
            files.setdefault(self.path / path, []).append(name)
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise FileNotFoundError(f"{self.path}: {INDEX} names files that are not there: {shortened(missing)}")
        return files


def _open(path: pathlib.Path) -> Any:
    check_file(path)
    with errors_in(path, "a safetensors file", SafetensorError):
        return safe_open(path, framework="numpy")


def _own_name(name: str) -> str:
    """A tensor's name in a checkpoint of the decoder alone: language_model.norm.weight is model.norm.weight."""
    prefix = _OF_DECODER.match(name)
    name = name[prefix.end() :] if prefix else name
    return f"model.{name}" if _BARE.match(name) else name
