# SPDX-License-Identifier: Apache-2.0
"""Compiled programs cached in a folder."""

import functools
import logging
import os
import pathlib
import stat
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import _compile, _files

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    """jax without settings, in a process that already caches programs elsewhere."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(SETTINGS[0], None)
    jax.config.update(SETTINGS[1], 1.0)
    yield
    kvjax.enable_compilation_cache(before[SETTINGS[0]] or tmp_path)
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("no_folder")
def test_programs_are_cached_in_the_users_folder(monkeypatch, tmp_path):
    assert kvjax.enable_compilation_cache() == str(tmp_path / "kvjax") == jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1
    jax.config.update(SETTINGS[0], None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.os.path, "expanduser", lambda path: path.replace("~", f"{tmp_path}/users"))
    assert kvjax.enable_compilation_cache() == f"{tmp_path}/users/.cache/kvjax"


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_is_set_stays_unless_another_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    jax.config.update(SETTINGS[0], "set")  # like jax with JAX_COMPILATION_CACHE_DIR
    jax.config.update(SETTINGS[1], 0.05)
    assert kvjax.enable_compilation_cache() == "set" == jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.05
    assert kvjax.enable_compilation_cache(tmp_path) == str(tmp_path) == jax.config.jax_compilation_cache_dir
    for wrong in ("", 3):
        with pytest.raises(ValueError, match=r"^folder: got .*, wanted a path or None"):
            kvjax.enable_compilation_cache(wrong)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


@pytest.mark.usefixtures("no_folder")
def test_a_folder_is_the_users_alone(monkeypatch, tmp_path):
    """Programs from it are run, so that whoever may write to it may run any code."""
    before = os.umask(0o002)
    try:
        kvjax.enable_compilation_cache(tmp_path / "a" / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "new").stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    for mode in (0o777, 0o775, 0o757, 0o1777, 0o720):
        (tmp_path / "mine").chmod(mode)
        with pytest.raises(ValueError, match=rf"^folder: got .*mine' of mode {mode:04o}, wanted a folder to which its"):
            kvjax.enable_compilation_cache(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        kvjax.enable_compilation_cache(tmp_path / "file")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a" / "new")
    jax.config.update(SETTINGS[0], str(tmp_path / "mine"))  # like jax with JAX_COMPILATION_CACHE_DIR
    with pytest.raises(ValueError, match=r"^folder: got .*mine' of mode 0720"):
        kvjax.enable_compilation_cache()
    (tmp_path / "mine").chmod(0o755)
    assert kvjax.enable_compilation_cache() == str(tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr(_files.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ValueError, match=r"^folder: got .*mine', which belongs to user \d+, wanted"):
            kvjax.enable_compilation_cache()
    assert kvjax.enable_compilation_cache("gs://bucket/programs") == "gs://bucket/programs"


@pytest.mark.usefixtures("no_folder")
def test_the_next_program_is_cached_in_the_new_folder(tmp_path):
    """It is cached there also if another folder already has programs, and if no program was cached before."""
    jax.config.update(SETTINGS[1], 0.0)
    for number, name in enumerate(("one", "two")):
        kvjax.enable_compilation_cache(tmp_path / name)
        jax.jit(lambda x, number=number: jnp.sin(x) + number)(1.0)
    for name in ("one", "two"):
        assert any(path.name.startswith("jit__lambda") for path in (tmp_path / name).iterdir())


def test_to_import_kvjax_sets_nothing():
    text = pathlib.Path(kvjax.__file__).parent.glob("**/*.py")
    calls = [path.name for path in text if "enable_compilation_cache(" in path.read_text()]
    assert calls == ["_compile.py"]


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_what_compiles_for_long_is_logged(monkeypatch, caplog, level):
    """Only if anybody reads it a thread waits, and none after the call, not even after one that fails."""
    monkeypatch.setattr(_compile, "NOTICE_SECONDS", 0.05)
    caplog.set_level(level, "kvjax")
    threads = []

    def slow(x, *, fails):
        threads.append(threading.active_count())
        time.sleep(0.2)
        if fails:
            raise RuntimeError("no program")
        return x + 1

    fails, works = (_compile.OutermostJit(functools.partial(slow, fails=fails)) for fails in (True, False))
    before, x = threading.active_count(), jnp.zeros(3)
    with pytest.raises(RuntimeError, match="no program"):
        fails(x)
    messages = ["compiling slow: the first call with these shapes"] * (level == logging.INFO)
    assert [record.message.split(";")[0] for record in caplog.records] == messages
    works(x)
    works(x)  # is compiled
    assert [record.message.split(";")[0] for record in caplog.records] == 2 * messages
    assert threads == [before + len(messages)] * 2 and threading.active_count() == before


def test_a_program_that_compiles_quickly_says_nothing(caplog):
    caplog.set_level(logging.INFO, "kvjax")
    quick = _compile.OutermostJit(lambda x: x + 1)
    assert quick(jnp.zeros(3)).tolist() == [1, 1, 1] and not caplog.records
