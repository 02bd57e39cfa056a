# SPDX-License-Identifier: Apache-2.0
"""The reference of the documentation site: each public name is described on one page, and each page's names exist."""

import ast
import functools
import importlib
import re

import pytest

from tests.drive import ROOT
from tests.project.sources import source, sources

REFERENCE = {path.stem: path.read_text() for path in (ROOT / "docs/reference").glob("*.md")}
PAGES = {name: text for name, text in REFERENCE.items() if "automodule::" in text}  # of namespaces
PACKAGES = "kvjax", "models", "pallas_kernels"
# Kernels that `pallas_kernels.call` chooses by platform, with the signatures of `pallas_kernels.xla`.
SAME_AS_XLA = {f"pallas_kernels.{name}" for name in ("derivative", "mosaic", "tpu", "triton")}


def exports(module):
    """The names in a module's `__all__`, without importing it; None if it has none."""
    for node in module.nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


@functools.cache
def namespaces():
    """{module: its public names} of each module that has `__all__`, but for private ones."""
    found = {module.name.removesuffix(".py").replace("/", "."): exports(module) for module in sources(*PACKAGES)}
    found = {name.removesuffix(".__init__"): names for name, names in found.items() if names is not None}
    return {name: names for name, names in found.items() if "._" not in name and name not in SAME_AS_XLA}


def described(text):
    """The names that a page describes, in full."""
    return re.findall(r"^\.\. auto(?:class|data|exception|function):: (\S+)$", text, re.M)


def linked(text):
    """The names to whose descriptions on other pages a page links, in full."""
    return re.findall(r"\{py:obj\}`~(\S+?)`", text)


def thing(name):
    """Identifies what a name stands for, which other names may have too: an object, or itself if nothing imports it."""
    module, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), short)
    except ImportError:  # of an extra that tests do not have
        return name
    return name if isinstance(found, int | str) else id(found)


def test_every_namespace_has_a_page_with_its_names():
    assert set(PAGES) == set(namespaces())
    for module, names in namespaces().items():
        own = described(PAGES[module])
        assert all(name.rpartition(".")[0] == module for name in own), module
        on_page = [name.rpartition(".")[2] for name in own + linked(PAGES[module])]
        assert sorted(on_page) == sorted(names), module


def test_every_name_is_described_once_and_links_lead_to_the_description():
    homes = {}
    for name in (name for text in PAGES.values() for name in described(text)):
        assert homes.setdefault(thing(name), name) == name
    for module, text in PAGES.items():
        for name in linked(text):
            other = thing(f"{module}.{name.rpartition('.')[2]}")
            assert homes[other] == name, module


def test_kvjax_is_grouped_as_in_its_source():
    source = (ROOT / "kvjax/__init__.py").read_text()
    groups = [
        (title, re.findall(r'"(\w+)"', names))
        for title, names in re.findall(r"^    # (.+)\n((?:    \S.+\n)+?)(?=    #|\])", source, re.M)
    ]
    headings = re.split(r"^## (.+)$", PAGES["kvjax"], flags=re.M)[1:]
    assert groups == [
        (title.lower(), [name.rpartition(".")[2] for name in described(text)])
        for title, text in zip(headings[::2], headings[1::2], strict=True)
    ]


@pytest.mark.parametrize("module", sorted(SAME_AS_XLA))
def test_kernels_without_a_page_have_the_names_of_xlas(module):
    path = ROOT / module.replace(".", "/")
    kernels = source(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    assert set(exports(kernels)) <= set(namespaces()["pallas_kernels.xla"])
