# SPDX-License-Identifier: Apache-2.0
"""The location of a store: a folder with a single writer, or anything else that tensorstore can open."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from typing import IO, Any

from kvjax._files import make_folder, protect
from kvjax.stores.folders import locked

LOCK = "store.lock"


class Location:
    """An open location.

    Attributes:
      kv: the `tensorstore.KvStore`.
    """

    def __init__(self, location: Any, readonly: bool):
        import tensorstore

        self._lock: Any = None
        self._folder: pathlib.Path | None = None
        if isinstance(location, tensorstore.KvStore):
            self.kv = location
            self._text = "a KvStore"
            return
        if not isinstance(location, str | os.PathLike) or not os.fspath(location):
            raise ValueError(f"location: got {location!r:.80}, wanted a folder, a URL or an open tensorstore.KvStore")
        self._text = os.fspath(location)
        if "://" in self._text and not self._text.startswith("file://"):
            spec: Any = self._text
        else:
            folder = self._folder = pathlib.Path(_path_of(self._text)).absolute()
            _open_folder(folder, readonly)
            self._lock = None if readonly else _locked(folder)
            spec = {"driver": "file", "path": f"{folder}/"}
        try:
            self.kv = tensorstore.KvStore.open(spec).result()
        except Exception as error:  # whatever tensorstore raises
            self.close()
            raise ValueError(f"location: got {self._text!r}, wanted one that can be opened ({error})") from error

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The value of a name, or None if it has no value. Larger values and irregular files give b"".

        tensorstore would wait for a pipe's writer, and would end the process for a file larger than its memory.
        """
        if self._folder is not None:
            try:
                status = (self._folder / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
                return b""
        result = self.kv.read(name).result()
        return result.value if result.state == "value" else None

    def protect(self, name: str) -> None:
        """Hides a written value and its folder from other users, since tensorstore creates both with the umask's modes.

        Until then the mode of the store's own folder keeps other users out.
        """
        if self._folder is not None:
            path = self._folder / name
            protect(path.parent)
            protect(path)

    def close(self) -> None:
        """Closes the location, so another writer may open it."""
        if self._lock is not None:
            self._lock.close()

    def __str__(self) -> str:
        return self._text


def _path_of(text: str) -> str:
    import urllib.parse
    import urllib.request  # late: its import takes a fortieth of jax's import time

    return urllib.request.url2pathname(urllib.parse.urlsplit(text).path) if text.startswith("file://") else text


def _open_folder(folder: pathlib.Path, readonly: bool) -> None:
    """Creates the folder of a store, or checks that a folder is a store."""
    wanted = "a folder of a store, an empty one or none"
    try:
        if not readonly:
            make_folder(folder)
        file_names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ValueError(f"location: got {os.fspath(folder)!r}, wanted {wanted} ({error})") from error
    if LOCK not in file_names and (file_names or readonly):
        raise ValueError(
            f"location: got {os.fspath(folder)!r} without {LOCK}, wanted {'a store' if readonly else wanted}"
        )


def _locked(folder: pathlib.Path) -> IO[bytes]:
    """Locks the folder, and returns the lock as an open file. Deletes the locks of killed writers on values."""
    lock = locked("location", folder, LOCK, "one without a writer, or readonly=True")
    protect(folder)
    for path in folder.rglob("*.__lock"):
        with contextlib.suppress(OSError):  # a folder of this name is not a lock
            path.unlink()
    return lock
