# SPDX-License-Identifier: Apache-2.0
"""The README's code runs unchanged."""

import re

import pytest

from tests.drive import ROOT

README = ROOT / "README.md"


BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
GENERATES = 1 + next(number for number, block in enumerate(BLOCKS) if "kvjax.generate(" in block)


FIRST = [block for block in BLOCKS[:GENERATES] if "cache.mixed(" not in block]


@pytest.mark.parametrize("blocks", [FIRST, pytest.param(BLOCKS, marks=pytest.mark.slow)], ids=["first", "all"])
def test_the_readmes_code_runs(blocks, capsys, tmp_path, monkeypatch):
    """By default it runs up to the first generation, without the blocks that need no jit."""
    monkeypatch.chdir(tmp_path)  # it saves a cache, and loads a model
    for folder in ("models", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    assert "cached" in capsys.readouterr().out


def test_the_router_is_the_demos_own():
    licence, code = (ROOT / "models/prefix_router.py").read_text().split("\n", 1)
    assert licence.startswith("# SPDX") and f"```python\n{code}```\n" in README.read_text()
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 30
