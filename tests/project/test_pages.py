# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: links have targets, names descriptions, commands their options. `make docs` runs the cells.

Tunix' page is run here; the Python of serving.md, which needs servers, in tests/models/test_serve_options.py.
"""

import contextlib
import itertools
import re
import warnings

import jax
import pytest

from benchmarks.pages import GROUPS, of_name
from tests.drive import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
TUNIX, SERVING = ROOT / "docs/howto/tunix.md", ROOT / "docs/howto/serving.md"
FENCE = re.compile(r"^(`{3,})(\{?[\w-]*\}?)[^\n]*\n(.*?)^\1$", re.M | re.S)
CODE_COLUMNS = 92
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
    text = page.read_text()
    assert page == TUNIX or "```python\n" not in text
    assert page == SERVING or "```python3\n" not in text
    assert ("```{code-cell}" in text) == text.startswith("---\nfile_format: mystnb\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_pages_code_fits_its_column(page):
    """At a width of 1,280 pixels a cell shows 92 columns."""
    blocks = [text for _, name, text in FENCE.findall(page.read_text()) if name[:1] != "{" or name == "{code-cell}"]
    wide = [line for text in blocks for line in text.splitlines() if len(line) > CODE_COLUMNS]
    assert not wide


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
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


def commands():
    """{module: the options with which pages run it}, and the targets of `make` on the pages."""
    options, targets = {}, set()
    for page in TEXTS:
        code = re.findall(r"^```sh\n(.*?)^```|(?<!`)`([^`]+)`(?!`)", page.read_text(), re.M | re.S)
        for line in "\n".join(block or inline for block, inline in code).replace("\\\n", " ").splitlines():
            line = line.partition(" # ")[0]
            if found := re.match(r"python -m ((?:kvjax|models|benchmarks)(?:\.[\w.]+)?)(?= |$)", line):
                options.setdefault(found[1], set()).update(re.findall(r" (--[\w-]+)", line))
            targets.update(re.findall(r"^make ([a-z][\w-]*)", line))
    return options, targets - {"bench-NAME"}


def test_commands_on_the_pages_exist_with_their_options():
    options, targets = commands()
    assert len(options) > 30 and len(targets) > 30
    for module, wanted in options.items():
        path = ROOT / module.replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert path.exists() or module == "benchmarks.NAME", module
        defined = "".join(file.read_text() for file in path.parent.glob("*.py"))
        if module.startswith("benchmarks.") and path.stem in itertools.chain(*GROUPS.values()):  # sizes are options
            defined += "".join(f'"--{size.replace("_", "-")}"' for size in of_name(path.stem).sizes)
        assert not [option for option in wanted if f'"{option}"' not in defined], module
    rules = (ROOT / "Makefile").read_text()
    names = {*re.findall(r"^([a-z-]+):", rules, re.M), *(f"bench-{path.stem}" for path in ROOT.glob("benchmarks/*.py"))}
    assert targets <= names
