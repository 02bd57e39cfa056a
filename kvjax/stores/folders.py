# SPDX-License-Identifier: Apache-2.0
"""Folders with a single writer at a time."""

from __future__ import annotations

import fcntl
import os
import pathlib
from typing import IO

from kvjax._files import create


def locked(argument: str, folder: pathlib.Path, name: str, wanted: str = "a folder without a writer") -> IO[bytes]:
    """Locks a folder, and returns the lock as an open file.

    When you close it, or the process ends, another writer may lock the folder.

    Args:
      argument: the folder's name in errors.
      folder: an existing folder.
      name: the name of the lock's file.
      wanted: the end of the error for a folder with another writer.

    Raises:
      ValueError: if the folder has another writer, or if the lock's name belongs to something other than a file.
    """
    path = folder / name
    if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
        raise ValueError(f"{argument}: got {os.fspath(folder)!r} with a {name} that is no file, wanted a regular file")
    lock = create(path, "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ValueError(f"{argument}: got {os.fspath(folder)!r}, which has a writer, wanted {wanted}") from error
    return lock


def sync(path: pathlib.Path) -> None:
    """Waits until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
