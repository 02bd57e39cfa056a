# SPDX-License-Identifier: Apache-2.0
"""Rates of hard words and vague names, of each tree of code and of the pages: see `prose.py`."""

import pytest

from tests.project import prose, sources

LIMITS = prose.limits()


@pytest.mark.parametrize("tree", [*prose.CODE, *prose.TEXTS])
def test_rates_are_within_their_limits(tree):
    """A rate above its bar has a limit of its own; the command lowers it after a room has been rewritten."""
    counts = prose.counts_of(tree)
    allowed = prose.BARS | LIMITS.get(tree, {})
    above = {rate: value for rate, value in counts.rates().items() if value > allowed.get(rate, 1e9)}
    places = [f"{place.file}:{place.line}: {place.text}" for place in counts.places if place.rate in above]
    assert not above, f"{tree}: {above}\n" + "\n".join(places[-40:])


def test_few_lines_skip_the_formatter():
    """Each tree has a limit of its own until all of them together meet the bar."""
    counts = {tree: prose.counts_of(tree).rates()["format skips"] for tree in prose.CODE}
    limits = {tree: LIMITS.get(tree, {}).get("format skips", 0) for tree in prose.CODE}
    within = all(counts[tree] <= limits[tree] for tree in counts)
    assert within or sum(counts.values()) <= prose.MAX_FORMAT_SKIPS, counts


@pytest.mark.parametrize("tree", ["README.md", "docs"])
def test_pages_speak_to_the_reader(tree):
    assert prose.counts_of(tree).rates()["you"] >= prose.MIN_YOU


def test_limits_are_those_of_trees_and_above_their_bars():
    bars = prose.BARS | {"format skips": 0}
    assert set(LIMITS) <= {*prose.CODE, *prose.TEXTS}
    assert all(limit > bars[rate] for limits in LIMITS.values() for rate, limit in limits.items())


MODULE = '''"""Of that; the rest.

Args:
  first: i32[K]; of what; and more.
  second: the number; of one.
"""

a, b = 1, 2
found = (a, b)


def f(own, value):  # fmt: %s
    return value
'''
PAGE = """# You and your cache

One `that` in code; that in prose.

```sh
that
```

| those | what |
"""


def counted(counts, rate):
    return sum(place.rate == rate for place in counts.places)


def test_rates_count_what_they_name(tmp_path, monkeypatch):
    for module in (prose, sources):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(MODULE % "skip")
    counts = prose.counts_of("module.py")
    assert [place.text for place in counts.places if place.rate == "vague names"] == ["found", "own"]
    shares = ("vague names", "packed assignments", "vague descriptions", "format skips")
    assert [counts.rates()[rate] for rate in shares] == [40, 50, 50, 1]
    assert [counted(counts, rate) for rate in prose.WORDS] == [1, 1, 1, 0, 2]
    (tmp_path / "page.md").write_text(PAGE)
    counts = prose.counts_of("page.md")
    assert [counted(counts, rate) for rate in (*prose.WORDS, "you")] == [1, 1, 0, 0, 1, 2]
    assert counts.words == 11  # You and your cache One X in code that in prose
