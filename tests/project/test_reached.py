# SPDX-License-Identifier: Apache-2.0
"""The tests and pages that CI chooses by what the last commits changed."""

import pytest

from scripts import reached
from tests.drive import ROOT


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ([], []),
        (["CHANGELOG.md", "tests/drive.py"], []),
        (["kvjax/stores/folders.py"], ["tests/unit/stores"]),
        (["kvjax/__init__.py"], [reached.PACKAGING]),
        (["kvjax/sizing.py", "tests/oracle/test_bytes.py"], ["tests/oracle/test_bytes.py", "tests/unit/test_plan.py"]),
        (["kvjax/verbs/trim.py"], ["tests/oracle", "tests/unit/test_copies.py", "tests/unit/verbs"]),
        (["pallas_kernels/decode.py"], ["tests/kernels", "tests/unit/gpu", "tests/unit/test_copies.py"]),
        (["tests/unit/gone/test_gone.py"], []),
        (["models/checkpoints/recall/config.json"], ["tests/models", *reached.COMMANDS]),
        (["models/sparsity.py"], [*reached.COMMANDS, "tests/unit/research/test_sparsity.py"]),
        (["models/gone.py"], ["tests/models", *reached.COMMANDS]),
        (None, ["tests"]),
    ],
)
def test_a_package_reaches_its_tests_and_a_test_itself(files, wanted):
    assert reached.tests_of(files) == wanted


def test_a_module_of_models_reaches_tests_through_others_and_by_commands():
    found = reached.tests_of(["models/serve_http.py"])
    assert "tests/models/test_serve_hostile.py" in found and "tests/models/test_fp8.py" not in found
    assert "tests/models/test_prefill_decode.py" in reached.tests_of(["models/prefill_decode.py"])
    assert "tests/models/test_models.py" in reached.tests_of(["models/rope.py"])


def test_a_page_reaches_itself():
    assert reached.pages_of(["docs/howto/save.md", "README.md", "docs/gone.md"]) == ["docs/howto/save.md"]
    assert len(reached.pages_of(None)) == len(list((ROOT / "docs").rglob("*.md")))


def test_a_commit_that_git_does_not_know_reaches_everything():
    assert reached.changed("no-such-commit") is None


def test_every_package_has_tests():
    packages = {path for path in (ROOT / "kvjax").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    for package in packages:
        assert reached.tests_of([f"kvjax/{package.name}/file.py"]), package
