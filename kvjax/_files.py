# SPDX-License-Identifier: Apache-2.0
"""Files that only their user can read, since they contain prompts. Reads regular files only, and writes whole lines."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterable
from typing import IO, Any, TextIO

_FOLDER = 0o700
_FILE = 0o600  # modes


def create(path: str | os.PathLike[str], mode: str = "w", encoding: str | None = None) -> IO[Any]:
    """Opens a file for writing that no other user can read, whatever the umask.

    An existing regular file gets this mode before anything is written. Pipes and devices keep theirs.

    Args:
      path: the path of the file.
      mode: see `open`.
      encoding: see `open`.

    Returns:
      The open file.
    """
    return open(path, mode, encoding=encoding, opener=_private)


def _private(path: str, flags: int) -> int:
    handle = os.open(path, flags, _FILE)
    try:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) != _FILE:
            os.fchmod(handle, _FILE)
    except BaseException:
        os.close(handle)
        raise
    return handle


class LineFile:
    """Writes lines to a text file. If a full disk has cut a line, the line ends before the next line begins."""

    def __init__(self, file: TextIO):
        self._file = file
        self._is_cut = False

    def write(self, lines: Iterable[str]) -> None:
        """Writes lines, each with a newline at its end."""
        begin = "\n" if self._is_cut else ""
        self._is_cut = True
        self._file.write(begin + "".join(f"{line}\n" for line in lines))
        self._is_cut = False


def protect(path: pathlib.Path) -> None:
    """Removes the access of all other users to a file or a folder, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        path.chmod(_FOLDER if path.is_dir() else _FILE)


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder that no other user may enter, whatever the umask. An existing folder keeps its mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        folder.chmod(_FOLDER)


def check_owned(name: str, folder: pathlib.Path) -> None:
    """Raises a ValueError unless this is a folder of the user's that nobody else may write to.

    Args:
      name: the name of the argument, for the message.
      folder: the path.

    Raises:
      OSError: if the folder does not exist.
    """
    status = folder.stat()
    wanted = "wanted a folder to which its user alone may write"
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{name}: got {os.fspath(folder)!r}, which is not a folder, {wanted}")
    if status.st_uid != os.geteuid():
        raise ValueError(f"{name}: got {os.fspath(folder)!r}, which belongs to user {status.st_uid}, {wanted}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{name}: got {os.fspath(folder)!r} of mode {stat.S_IMODE(status.st_mode):04o}, {wanted}")


def open_regular(path: str | os.PathLike[str], mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """Opens a regular file for reading. A pipe would wait for its writer, and a device may have no end.

    Args:
      path: the path of the file.
      mode: see `open`.
      encoding: see `open`.

    Returns:
      The open file.

    Raises:
      OSError: if the file cannot be opened.
      ValueError: for a folder, a pipe or a device.
    """
    return open(path, mode, encoding=encoding, opener=_regular)


def _regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{os.fspath(path)}: got a folder, a pipe or a device, wanted a regular file")
    return handle
