# SPDX-License-Identifier: Apache-2.0
"""Files and folders that other users cannot read, whatever the umask, and regular files to read from."""

import os
import pathlib
import stat

import pytest

from kvjax._files import create, make_folder, open_regular, protect


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_files_and_folders_are_their_users(tmp_path):
    make_folder(tmp_path / "new")
    assert mode_of(tmp_path / "new") == 0o700
    for mode in ("w", "wb", "ab", "x"):
        path = tmp_path / "new" / mode
        with create(path, mode) as file:
            assert mode_of(path) == 0o600
            file.write(b"secret" if "b" in mode else "secret")
        assert path.read_bytes() == b"secret"


def test_an_old_file_is_taken_from_others_and_an_old_folder_keeps_its_mode(tmp_path):
    for name in ("file", "folder"):
        (tmp_path / name).write_text("old") if name == "file" else (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    with create(tmp_path / "file"):
        assert mode_of(tmp_path / "file") == 0o600
    make_folder(tmp_path / "folder")
    assert mode_of(tmp_path / "folder") == 0o755
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
    protect(tmp_path / "folder")
    protect(tmp_path / "nothing")
    assert mode_of(tmp_path / "folder") == 0o700


def test_a_pipe_that_is_written_to_keeps_its_mode(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").chmod(0o644)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        create(tmp_path / "pipe").close()
    finally:
        os.close(reader)
    assert mode_of(tmp_path / "pipe") == 0o644


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_read(tmp_path, kind):
    """Opening a pipe without a writer would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    path = {"pipe": tmp_path / "pipe", "device": pathlib.Path("/dev/zero"), "folder": tmp_path}[kind]
    with pytest.raises(ValueError, match=rf"^{path}: got a folder, a pipe or a device, wanted a regular file"):
        open_regular(path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
    (tmp_path / "file").write_text("text")
    os.symlink(tmp_path / "file", tmp_path / "link")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == "text"
