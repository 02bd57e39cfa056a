# SPDX-License-Identifier: Apache-2.0
"""Requests to a cache on trial (`Trial`): a Hypothesis strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvjax.spec import CacheSpec
from kvjax.testing.workload import SMALL, Request

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def requests(spec: CacheSpec = SMALL, *, num_namespaces: int = 2, max_size: int = 40) -> SearchStrategy[list[Request]]:
    """A Hypothesis strategy for property tests of your own: lists of requests, which shrink to the few that matter.

        @hypothesis.given(requests(spec))
        def test_something(asked):
            trial = Trial(kvjax.init(spec))
            for request in asked:
                trial.do(request)

    `Request` says which requests there are, and their fields: those of its first table, and of its second where the
    spec has a host tier. Tokens are 0, 1 or 2, so that prefixes are shared; a row may be one that there is not, and a
    prompt one token too long.

    Args:
      spec: of the cache that will be asked; keep it small.
      num_namespaces: tenants.
      max_size: the most requests in a list.

    Raises:
      ImportError: without hypothesis, which `pip install "kvjax[test]"` brings.
    """
    try:
        import hypothesis.strategies as st
    except ImportError as error:
        raise ImportError('requests: needs hypothesis (pip install "kvjax[test]")') from error

    from kvjax.testing import drawn  # which imports hypothesis

    admits = drawn.admits(spec, num_namespaces)
    kinds = [*[admits, drawn.commits(spec)] * 2, *drawn.others(spec)]
    kinds += drawn.of_the_host_tier(spec) if spec.has_host else []
    part = st.one_of(st.one_of(kinds).map(lambda request: [request]), drawn.lives(spec, admits))
    # Lists of lists are longer on average than a flat list, and shrink as well.
    lists = st.lists(st.lists(part).map(_joined)).map(_joined)
    return lists.map(lambda asked: asked[:max_size])


def _joined(lists: list[list[Any]]) -> list[Any]:
    return [request for part in lists for request in part]
