# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: their code runs unchanged and prints the output shown; all links have targets."""

import contextlib
import re
import warnings

import jax
import pytest

from tests.drive import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@contextlib.contextmanager
def needs_of(page):
    """Skips a page whose package is not installed. Tunix relies on promotion of types and ranks, and warns."""
    if page.stem != "tunix":
        yield
        return
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix", reason="needs google-tunix: make test-tunix")
        yield


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem == "rollouts" else ())
        for page in PAGES
        if "```python" in page.read_text()
    ],
)
def test_a_page_prints_what_it_says(page, capsys):
    """A block without a language is the output of the Python since the last such block; other ones are not run."""
    with needs_of(page):
        assert_prints(page, capsys)


def assert_prints(page, capsys):
    names, shown = {"__name__": page.stem}, 0
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(text, str(page), "exec"), names)
        elif not language:
            assert capsys.readouterr().out == text
            shown += 1
    assert shown > 0 and not capsys.readouterr().out


LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    assert all((page.parent / link).exists() for link in links), links
    assert links or page not in PAGES


def test_readme_leads_to_every_page():
    readme = (ROOT / "README.md").read_text()
    assert PAGES and all(f"(docs/{page.name})" in readme for page in PAGES)
