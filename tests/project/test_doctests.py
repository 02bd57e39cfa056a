# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings: each gives what it shows, and most names that readers see first have one."""

import doctest
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.drive import ROOT

pytestmark = pytest.mark.long


def public_names():
    """(full name, object) of each public name of kvjax, under the uppermost of the modules that export it."""
    modules = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "kvjax").rglob("[!_]*.py"))]
    modules += [path.relative_to(ROOT).parent for path in sorted((ROOT / "kvjax").rglob("__init__.py"))]
    found = {}
    for parts in sorted((module.parts for module in modules), key=lambda parts: (len(parts), parts)):
        try:
            module = importlib.import_module(".".join(parts))
        except ImportError:  # needs an extra that is not installed
            continue
        for name in getattr(module, "__all__", ()):
            found.setdefault(id(getattr(module, name)), (f"{module.__name__}.{name}", getattr(module, name)))
    return list(found.values())


def examples():
    """The examples of public names, and of the methods of public classes. A verb as a method of a cache has none."""
    finder, names = doctest.DocTestFinder(), {"kvjax": kvjax, "jax": jax, "jnp": jnp, "np": np}
    return [
        example
        for name, thing in public_names()
        if inspect.isclass(thing) or callable(thing)
        for example in finder.find(thing, name, inspect.getmodule(thing), names)
        if example.examples
    ]


EXAMPLES = examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_gives_what_it_shows(example):
    report = []
    results = doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert results.attempted and not results.failed, "".join(report)


def test_many_public_names_have_an_example():
    assert len({example.name for example in EXAMPLES}) >= 45
