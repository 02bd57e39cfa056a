# SPDX-License-Identifier: Apache-2.0
"""The files of a saved cache: a manifest, and the index and the values that it names.

    manifest.json    format, version, a checksum, and of the save: model, layout, namespaces, names of LoRAs, number of
                     blocks, the name of its other files, the checksum of its index
    <name>.index     the blocks and their order (`Contents`): arrays of i32
    <name>.values    a value of each block and group (`values.py`): all of the first group, then of the next group
    save.lock        held by the process that saves

A file missing from the manifest is not part of the save. A save writes files under a new name, replaces the manifest,
and then deletes the older files. Replacing the manifest is atomic, so a process that is killed leaves either the old
save or the new save.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import reprlib
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from kvjax._files import create, make_folder, open_regular
from kvjax.stores.folders import locked, sync

VERSION = 2  # version 1 had safetensors files
MANIFEST = "manifest.json"
LOCK = "save.lock"
INDEX = ".index"  # after the name of a save
VALUES = ".values"  # after the name of a save
_TEMPORARY = f"{MANIFEST}.tmp"
_FORMAT = "kvjax cache"
_FILE = re.compile(r"[0-9a-f]{16}\.(index|values)")
_FIELDS = {
    "model": str,
    "layout": dict,
    "namespaces": dict,
    "loras": dict,
    "num_blocks": int,
    "name": str,
    "crc32": int,
}


def checked_folder(folder: Any) -> pathlib.Path:
    """The folder as a path. Raises a ValueError for anything else."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ValueError(f"folder: got {folder!r:.80}, wanted the path of a folder")
    path = pathlib.Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder: got {os.fspath(path)!r}, which is a file, wanted a folder")
    return path


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a save.

    Raises:
      ValueError: naming the file, if it is not the manifest of a save, has another version, or is broken.
    """
    path = folder / MANIFEST
    try:
        with open_regular(path, "rb") as file:
            manifest = json.load(file)
        checksum = zlib.crc32(_dumped(manifest.get("save"))) if isinstance(manifest, Mapping) else 0
    except OSError as error:
        raise ValueError(f"folder: got {os.fspath(folder)!r} without {MANIFEST}, wanted a saved cache") from error
    except (ValueError, RecursionError) as error:
        raise broken(path, f"contents that cannot be read ({error})") from error
    if not isinstance(manifest, Mapping) or manifest.get("format") != _FORMAT:
        raise ValueError(f"folder: got {os.fspath(path)!r} of something else, wanted that of a saved cache")
    version = manifest.get("version")
    if type(version) is not int or version != VERSION:
        reason = "a save of another version of kvjax can neither be loaded nor replaced"
        raise ValueError(f"folder: got {os.fspath(path)!r} of version {version!r:.80}, wanted {VERSION}: {reason}")
    save: Any = manifest.get("save")
    if manifest.get("crc32") != checksum:
        raise broken(path, "contents with another checksum")
    has_fields = isinstance(save, dict) and save.keys() == _FIELDS.keys()
    if not has_fields or any(type(save[field]) is not kind for field, kind in _FIELDS.items()):
        raise broken(path, f"save={reprlib.repr(save)}")
    if save["num_blocks"] < 0 or not _FILE.fullmatch(save["name"] + INDEX):
        raise broken(path, f"num_blocks={save['num_blocks']!r:.80} and name={save['name']!r:.80}")
    return save


def broken(path: pathlib.Path, got: str) -> ValueError:
    """The error for a file of a save with invalid contents."""
    return ValueError(f"folder: got {os.fspath(path)!r} with {got}, wanted what kvjax.stores.save has written")


def _dumped(save: Any) -> bytes:
    return json.dumps(save, sort_keys=True).encode()


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Creates a file that other users cannot read, and finally waits until it is on the disk."""
    with create(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def commit_manifest(folder: pathlib.Path, save: dict[str, Any]) -> None:
    """Makes the written files the folder's save, atomically."""
    manifest = {"format": _FORMAT, "version": VERSION, "crc32": zlib.crc32(_dumped(save)), "save": save}
    sync(folder)
    temporary = folder / _TEMPORARY
    temporary.unlink(missing_ok=True)  # left by an interrupted save, or another user's pipe or link
    with new_file(temporary) as file:
        file.write(json.dumps(manifest, sort_keys=True, indent=1).encode())
    os.replace(temporary, folder / MANIFEST)
    sync(folder)


class SaveFolder(NamedTuple):
    """A folder to which a cache can be saved.

    Attributes:
      has_save: whether the folder has a save.
      interrupted: the number of files left by an interrupted save.
    """

    has_save: bool
    interrupted: int


def check_folder(folder: Any) -> SaveFolder:
    """Checks whether `save` can write to a folder: creates the folder, then writes and deletes a file.

    Files of an interrupted save are deleted, as with `save`.

    Args:
      folder: the path of a saved cache, an empty folder, or a missing folder.

    Raises:
      ValueError: if the folder has other files, a broken manifest, a save of another version, or another writer.
      OSError: if the folder cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.stores.check_folder(folder)
      SaveFolder(has_save=False, interrupted=0)
    """
    path = checked_folder(folder)
    names = {child.name for child in path.iterdir()} if path.exists() else set()
    if MANIFEST not in names and any(not _FILE.fullmatch(name) for name in names - {LOCK, _TEMPORARY}):
        wanted = "wanted a saved cache, an empty folder or none"
        raise ValueError(f"folder: got {os.fspath(path)!r} without {MANIFEST}, {wanted}")
    with written_by_one(path):
        named = _named_files(path)
        with new_file(path / (secrets.token_hex(8) + VALUES)) as file:
            file.write(b"a trial")
    files = {name for name in names if _FILE.fullmatch(name)}
    return SaveFolder(MANIFEST in names, len(files - named) + (_TEMPORARY in names))


@contextlib.contextmanager
def written_by_one(folder: pathlib.Path) -> Iterator[None]:
    """Creates the folder, keeps other saves out, and finally deletes the files that the manifest does not name.

    Raises:
      ValueError: if the folder's manifest is not from a save of this version, or another save is running.
    """
    is_new = not folder.exists()
    if (folder / MANIFEST).exists():
        read_manifest(folder)
    make_folder(folder)
    if is_new:
        sync(folder.absolute().parent)
    with locked("folder", folder, LOCK):
        try:
            yield
        finally:
            _delete_others(folder)


def _delete_others(folder: pathlib.Path) -> None:
    """Deletes the files of saves that the manifest does not name."""
    named = _named_files(folder)
    for path in folder.iterdir():
        if (_FILE.fullmatch(path.name) and path.name not in named) or path.name == _TEMPORARY:
            path.unlink()


def _named_files(folder: pathlib.Path) -> set[str]:
    """The files named by the manifest, if there is a manifest."""
    if not (folder / MANIFEST).exists():
        return set()
    name = read_manifest(folder)["name"]
    return {name + INDEX, name + VALUES}
