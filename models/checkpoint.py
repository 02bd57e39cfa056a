# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in a folder in Hugging Face format. A GGUF file (`gguf_file.py`) has the same methods."""

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

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_DECODER_PREFIX = re.compile(r"(model\.)?language_model\.")  # in a checkpoint with towers for images or sound
# Names in a checkpoint without an output matrix, as `AutoModel` saves it.
_BARE = re.compile(r"(layers|norm|embed_tokens|embed_tokens_per_layer|per_layer_\w+|rotary_emb\w*)\.")


class Tensor(NamedTuple):
    """A tensor of a checkpoint, which stays in its file.

    Attributes:
      shape: the sizes of its axes.
      dtype: name of the dtype in safetensors, such as BF16.
      read: returns the part at an index, a slice for each axis.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder in Hugging Face format. Methods read its files when you call them.

    Attributes:
      path: the folder's path.
    """

    path: pathlib.Path

    def file_of(self, name: str) -> pathlib.Path:
        """The file with the fields of this name."""
        return self.path / name

    def fields(self, name: str) -> dict[str, Any]:
        """Reads the fields of a file of JSON. A missing file has none, except config.json, which is required."""
        path = self.path / name
        return read_json(path) if name == CONFIG or path.exists() else {}

    def files(self) -> list[pathlib.Path]:
        """The files of the model: its config and its weights."""
        return [self.path / CONFIG, *sorted(self._weight_map())]

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, or None if the folder has none."""
        path = self.path / TOKENIZER
        if not path.exists():
            return None
        check_file(path)
        from tokenizers import Tokenizer  # only text needs it

        with errors_in(path, "a tokenizer", Exception):  # the library raises nothing more particular
            return Tokenizer.from_file(str(path))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by their names in a checkpoint of only the decoder. Weights of fp8 are dequantised when read.

        The index names the file of each tensor. Tensors that are in these files but not in the index are included too.
        """
        fields = self.fields(CONFIG)
        with errors_in(self.path / CONFIG):
            scheme = fp8.read_scheme(fields)
        weight_map = self._weight_map()
        indexed = {name for names in weight_map.values() for name in names}
        tensors = {}
        duplicates = []
        for path, names in weight_map.items():
            file = _open(path)
            held = [*file.keys()]
            if lacks := set(names) - set(held):
                got = f"got tensors that {path.name} lacks: {shortened(sorted(lacks))}"
                raise ValueError(f"{self.path / INDEX}: {got}")
            for file_name in (*names, *(name for name in held if name not in indexed)):
                name = _decoder_name(file_name)
                part = file.get_slice(file_name)
                if name in tensors:
                    duplicates.append(f"{name} (as {file_name})")
                is_fp8 = part.get_dtype() == fp8.DTYPE
                read = functools.partial(fp8.read, path, file_name) if is_fp8 else part.__getitem__
                tensors[name] = Tensor(tuple(part.get_shape()), part.get_dtype(), read)
        if duplicates:
            raise ValueError(f"{self.path}: tensors that are there twice: {shortened(duplicates)}")
        with errors_in(self.path):
            return tensors if scheme is None else fp8.dequantised(tensors, scheme)

    def _weight_map(self) -> dict[pathlib.Path, list[str]]:
        """The weight files, each with the names of its tensors in the index."""
        index = self.path / INDEX
        single = self.path / SINGLE
        if not index.exists():
            if not single.exists():
                raise FileNotFoundError(f"{self.path}: found neither {SINGLE} nor {INDEX}")
            return {single: []}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: got no weight_map, wanted one from tensor names to files")
        files: dict[pathlib.Path, list[str]] = {}
        for name, file in weight_map.items():
            path = pathlib.PurePath(file if isinstance(file, str) else "")
            # Checked as written, because links may lead out of the folder, as they all do in Hugging Face's cache.
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


def _decoder_name(name: str) -> str:
    """A tensor's name in a checkpoint of only the decoder: language_model.norm.weight is model.norm.weight."""
    prefix = _DECODER_PREFIX.match(name)
    name = name[prefix.end() :] if prefix else name
    return f"model.{name}" if _BARE.match(name) else name
