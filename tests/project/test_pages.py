# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: links have targets, names have descriptions. `make docs` runs their cells, this Tunix' page."""

import contextlib
import re
import warnings

import jax
import pytest

from tests.drive import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TUNIX = ROOT / "docs/howto/tunix.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@contextlib.contextmanager
def tunix():
    """Tunix relies on promotion of types and ranks, and warns."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix", reason="needs google-tunix: make test-tunix")
        yield


@pytest.mark.long
def test_the_page_of_tunix_prints_what_it_says(capsys):
    """A block without a language is the output of the Python since the last such block; other ones are not run."""
    names, shown = {"__name__": "tunix"}, 0
    with tunix():
        for language, text in BLOCK.findall(TUNIX.read_text()):
            if language == "python":
                exec(compile(text, str(TUNIX), "exec"), names)
            elif not language:
                assert capsys.readouterr().out == text
                shown += 1
    assert shown > 0 and not capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_pages_python_is_in_cells(page):
    """A block of `python3` needs a server, a cluster or a GPU."""
    text = page.read_text()
    assert page == TUNIX or "```python\n" not in text
    assert ("```{code-cell}" in text) == text.startswith("---\nfile_format: mystnb\n")


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert all((page.parent / link).exists() for link in links), links


def test_names_that_pages_link_to_are_described():
    described = {
        name
        for page in PAGES
        for name in re.findall(r"^\.\. auto(?:class|data|exception|function|module):: (\S+)$", page.read_text(), re.M)
    }
    for page in PAGES:
        for name in re.findall(r"\{py:obj\}`(?:[^`<]*<)?~?([\w.]+)>?`", page.read_text()):
            owner = name.rpartition(".")[0]
            assert name in described or owner in described, (page, name)
