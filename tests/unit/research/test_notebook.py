# SPDX-License-Identifier: Apache-2.0
"""The notebook runs from top to bottom, and prints the output shown."""

import contextlib
import io
import json

import pytest

from tests.drive import ROOT

NOTEBOOK = ROOT / "docs/which_policy.ipynb"


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    scope, pictures = {"__name__": "notebook"}, 0
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), scope)
        shown = [out for out in cell["outputs"] if out["output_type"] == "stream"]
        assert printed.getvalue() == "".join(line for out in shown for line in out["text"])
        pictures += len(cell["outputs"]) - len(shown)
    assert pictures == 2 and len(scope["found"]["mine"].rate) == 4
