# SPDX-License-Identifier: Apache-2.0
"""The planted mistakes of `mutations.py` can be planted. `make test-mutations` plants them."""

import ast

import pytest

from tests.project.mutations import MISTAKES, ROOT, source


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_can_be_planted_and_has_tests(mistake):
    ast.parse(source(mistake))
    assert all((ROOT / test).exists() for test in mistake.tests.split() if "/" in test)  # "-k words" is an option


def test_mistakes_are_in_every_package():
    assert len(MISTAKES) >= 40
    homes = {tuple(mistake.file.split("/"))[:2] for mistake in MISTAKES}
    kvjax = {package for top, package in homes if top == "kvjax"}
    assert kvjax >= {"verbs", "blocks", "pools", "events", "stores", "serving", "interop"} and len(homes) > len(kvjax)
