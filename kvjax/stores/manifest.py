# SPDX-License-Identifier: Apache-2.0
"""The manifest of a saved cache, and the files that it names: what is not named does not exist.

A save writes files with new names, then replaces the manifest, which is the moment at which it becomes the save, then
deletes what the manifest no longer names. Whoever is killed leaves the old save or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pathlib
import re
import reprlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from kvjax._files import create, make_folder, open_regular

VERSION = 1
MANIFEST, LOCK = "manifest.json", "save.lock"
_FORMAT = "kvjax cache"
_PART = re.compile(r"[0-9a-f]{16}-\d{5}\.safetensors")
_FIELDS = {
    "namespaces": dict, "loras": dict, "model": str, "layout": dict, "num_blocks": int, "index": dict, "parts": list,
}  # fmt: skip
_OF_PART = {"file": str, "bytes": int, "group": int, "first": int, "count": int}
_OF_INDEX = {"file": str, "bytes": int, "crc32": int}


def checked_folder(folder: Any) -> pathlib.Path:
    """`folder` as a path, or a ValueError."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"folder: got {folder!r:.80}, wanted the path of a folder")
    path = pathlib.Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder: got {os.fspath(path)!r}, which is a file, wanted a folder")
    return path


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a save.

    Raises:
      ValueError: with the file, if it is no save's, a newer version's, or broken.
    """
    path = folder / MANIFEST
    try:
        with open_file(path) as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"folder: got {os.fspath(folder)!r} without {MANIFEST}, wanted a saved cache") from error
    except ValueError as error:
        raise broken(path, f"contents that cannot be read ({error})") from error
    try:
        return _parsed(path, text)
    except RecursionError as error:
        raise broken(path, "lists in each other that are too deep") from error


def _parsed(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    """The manifest with this text."""
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise broken(path, f"text that is no JSON ({error})") from error
    if not isinstance(manifest, Mapping) or manifest.get("format") != _FORMAT:
        raise ValueError(f"folder: got {os.fspath(path)!r} of something else, wanted that of a saved cache")
    version = manifest.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"folder: got {os.fspath(path)!r} of version {version!r:.80}, wanted {VERSION}")
    save: Any = manifest.get("save")
    if manifest.get("crc32") != zlib.crc32(_dumped(save)):
        raise broken(path, "contents with another checksum")
    _check(path, "save", save, _FIELDS)
    _check(path, "index", save["index"], _OF_INDEX)
    for number, part in enumerate(save["parts"]):
        _check(path, f"parts[{number}]", part, _OF_PART)
    loras = list(save["loras"].values())
    if any(type(name) is not str for name in loras) or len(set(loras)) < len(loras):
        raise broken(path, f"loras={reprlib.repr(save['loras'])}")
    return save


def _check(path: pathlib.Path, name: str, value: Any, wanted: dict[str, type]) -> None:
    """Raises a ValueError unless a mapping has exactly these fields, and a file that can be a save's."""
    fits = isinstance(value, dict) and value.keys() == wanted.keys()
    if not fits or any(type(value[field]) is not kind for field, kind in wanted.items()):
        raise broken(path, f"{name}={reprlib.repr(value)}")
    if any(value[field] < 0 for field, kind in wanted.items() if kind is int):
        raise broken(path, f"a negative number in {name}={reprlib.repr(value)}")
    if "file" in wanted and not _PART.fullmatch(value["file"]):
        raise broken(path, f"the file {value['file']!r:.80}")


def open_file(path: pathlib.Path, size: int | None = None) -> IO[bytes]:
    """Opens a regular file of `size` bytes, or of any number; a ValueError for anything else."""
    file = open_regular(path, "rb")
    found = os.fstat(file.fileno()).st_size
    if size not in (None, found):
        file.close()
        raise ValueError(f"got {found} bytes, wanted {size}")
    return file


def broken(path: pathlib.Path, got: str) -> ValueError:
    """The error for a file of a save that holds what no save does."""
    return ValueError(f"folder: got {os.fspath(path)!r} with {got}, wanted what kvjax.stores.save has written")


def _dumped(save: Any) -> bytes:
    return json.dumps(save, sort_keys=True).encode()


def part_name(token: str, number: int) -> str:
    """The name of a save's file; `token` is the save's own."""
    return f"{token}-{number:05d}.safetensors"


def write_part(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Writes and syncs a file; returns its name and size."""
    from safetensors.numpy import save_file

    create(path, "wb").close()  # safetensors would make it with the umask's mode
    save_file(tensors, path)
    return _synced(path)


class PartWriter:
    """A safetensors file that is written some blocks at a time: its header, then all blocks of each array.

    Attributes:
      written: the file's name and size, once it is closed and synced.
    """

    def __init__(self, path: pathlib.Path, count: int, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        """`arrays` has the shape and the words' dtype of one block of each of them."""
        self.path, self.written, self._starts = path, dict[str, Any](), dict[str, tuple[int, int]]()
        header, end = {}, 0
        for name, (shape, dtype) in arrays.items():
            start, size = end, math.prod(shape) * dtype.itemsize
            end, self._starts[name] = start + count * size, (start, size)
            dtype_name = f"U{8 * dtype.itemsize}"
            header[name] = {"dtype": dtype_name, "shape": [count, *shape], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file, self._data = create(path, "wb"), 8 + len(text)
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, first: int, blocks: np.ndarray) -> None:
        """Writes an array's blocks [n, *shape] from the first one of them on."""
        start, size = self._starts[name]
        self._file.seek(self._data + start + first * size)
        self._file.write(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1))

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._file.close()
        if kind is None:
            self.written = _synced(self.path)


def _synced(path: pathlib.Path) -> dict[str, Any]:
    """Syncs a file; returns its name and size."""
    _sync(path)
    return {"file": path.name, "bytes": path.stat().st_size}


def commit_manifest(folder: pathlib.Path, save: dict[str, Any]) -> None:
    """Makes the written files the save of the folder, at one moment."""
    manifest = {"format": _FORMAT, "version": VERSION, "crc32": zlib.crc32(_dumped(save)), "save": save}
    _sync(folder)
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.unlink(missing_ok=True)  # what an interrupted save has left, or a pipe or a link of somebody else's
    with create(temporary) as file:
        json.dump(manifest, file, sort_keys=True, indent=1)
    _sync(temporary)
    os.replace(temporary, folder / MANIFEST)
    _sync(folder)


@contextlib.contextmanager
def written_by_one(folder: pathlib.Path) -> Iterator[None]:
    """Makes the folder, and keeps other saves out of it; at the end files that the manifest does not name are gone.

    Raises:
      ValueError: if the folder has a manifest that is not of a save of this version, or another save is at work.
    """
    is_new = not folder.exists()
    if (folder / MANIFEST).exists():
        read_manifest(folder)
    if (folder / LOCK).exists() and not (folder / LOCK).is_file():  # opening a pipe would wait for its reader
        raise broken(folder / LOCK, "no regular file")
    make_folder(folder)
    if is_new:
        _sync(folder.absolute().parent)
    with create(folder / LOCK, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"folder: got {os.fspath(folder)!r}, to which another save writes, wanted one") from error
        try:
            yield
        finally:
            _delete_others(folder)


def _delete_others(folder: pathlib.Path) -> None:
    """Deletes the files of saves that the manifest does not name."""
    named = set()
    if (folder / MANIFEST).exists():
        save = read_manifest(folder)
        named = {save["index"]["file"], *(part["file"] for part in save["parts"])}
    for path in folder.iterdir():
        if _PART.fullmatch(path.name) and path.name not in named:
            path.unlink()


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
