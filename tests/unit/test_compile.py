# SPDX-License-Identifier: Apache-2.0
"""Compiled programs cached in a folder."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import kvjax

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    """jax without settings, in a process that already caches programs elsewhere."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(SETTINGS[0], None)
    jax.config.update(SETTINGS[1], 1.0)
    yield
    kvjax.keep_programs(before[SETTINGS[0]] or tmp_path)
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("no_folder")
def test_programs_are_cached_in_the_users_folder(monkeypatch, tmp_path):
    assert kvjax.keep_programs() == str(tmp_path / "kvjax") == jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1
    jax.config.update(SETTINGS[0], None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.os.path, "expanduser", lambda path: path.replace("~", "users"))
    assert kvjax.keep_programs() == "users/.cache/kvjax"


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_is_set_stays_unless_another_is_named(tmp_path):
    jax.config.update(SETTINGS[0], "set")  # like jax with JAX_COMPILATION_CACHE_DIR
    jax.config.update(SETTINGS[1], 0.05)
    assert kvjax.keep_programs() == "set" == jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.05
    assert kvjax.keep_programs(tmp_path) == str(tmp_path) == jax.config.jax_compilation_cache_dir
    for wrong in ("", 3):
        with pytest.raises(ValueError, match=r"^folder: got .*, wanted a path or None"):
            kvjax.keep_programs(wrong)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


@pytest.mark.usefixtures("no_folder")
def test_the_next_program_is_cached_in_the_new_folder(tmp_path):
    """It is cached there also if another folder already has programs, and if no program was cached before."""
    jax.config.update(SETTINGS[1], 0.0)
    for number, name in enumerate(("one", "two")):
        kvjax.keep_programs(tmp_path / name)
        jax.jit(lambda x, number=number: jnp.sin(x) + number)(1.0)
    for name in ("one", "two"):
        assert any(path.name.startswith("jit__lambda") for path in (tmp_path / name).iterdir())


def test_to_import_kvjax_sets_nothing():
    text = pathlib.Path(kvjax.__file__).parent.glob("**/*.py")
    calls = [path.name for path in text if "keep_programs(" in path.read_text()]
    assert calls == ["_compile.py"]
