# SPDX-License-Identifier: Apache-2.0
"""Files that their user alone can read, since prompts are in them; regular files alone to read from; whole lines."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterable
from typing import IO, Any, TextIO

_FOLDER, _FILE = 0o700, 0o600  # modes


def create(path: str | os.PathLike[str], mode: str = "w", encoding: str | None = None) -> IO[Any]:
    """Opens a file for writing that no other user can read, whatever the umask.

    A regular file that is there gets this mode before anything is written. Pipes and devices keep theirs.

    Args:
      path: the path of the file.
      mode: as for `open`.
      encoding: as for `open`.

    Returns:
      The open file.
    """
    return open(path, mode, encoding=encoding, opener=_private)


def _private(path: str, flags: int) -> int:
    handle = os.open(path, flags, _FILE)
    try:
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != _FILE:
            os.fchmod(handle, _FILE)
    except BaseException:
        os.close(handle)
        raise
    return handle


class LineFile:
    """Writes lines to a text file. A line that a full disk has cut ends before the next line begins."""

    def __init__(self, file: TextIO):
        self._file, self._is_cut = file, False

    def write(self, lines: Iterable[str]) -> None:
        """Writes lines, each with its end."""
        begin = "\n" if self._is_cut else ""
        self._is_cut = True
        self._file.write(begin + "".join(f"{line}\n" for line in lines))
        self._is_cut = False


def protect(path: pathlib.Path) -> None:
    """Takes a file or a folder from all other users, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.chmod(_FOLDER if path.is_dir() else _FILE)


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder that no other user may enter, whatever the umask. One that is there keeps its mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        folder.chmod(_FOLDER)


def check_owned(name: str, folder: pathlib.Path) -> None:
    """Raises a ValueError unless this is a folder of the user's to which nobody else may write.

    Args:
      name: the argument's, for the message.
      folder: the path.

    Raises:
      OSError: if there is none.
    """
    found = folder.stat()
    wanted = "wanted a folder to which its user alone may write"
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{name}: got {os.fspath(folder)!r}, which is no folder, {wanted}")
    if found.st_uid != os.geteuid():
        raise ValueError(f"{name}: got {os.fspath(folder)!r}, which belongs to user {found.st_uid}, {wanted}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{name}: got {os.fspath(folder)!r} of mode {stat.S_IMODE(found.st_mode):04o}, {wanted}")


def open_regular(path: str | os.PathLike[str], mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """Opens a regular file for reading. Opening a pipe would wait for its writer, and a device may have no end.

    Args:
      path: the path of the file.
      mode: as for `open`.
      encoding: as for `open`.

    Returns:
      The open file.

    Raises:
      OSError: if it cannot be opened.
      ValueError: for a folder, a pipe or a device.
    """
    return open(path, mode, encoding=encoding, opener=_regular)


def _regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{os.fspath(path)}: got a folder, a pipe or a device, wanted a regular file")
    return handle
