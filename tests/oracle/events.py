# SPDX-License-Identifier: Apache-2.0
"""The events of the library and of the cache in plain Python in the same terms, to be compared."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import kvjax
from kvjax.events import Mirror
from tests.oracle.blocks import Event, Path

Terms = collections.Counter[tuple[Any, ...]]


def plain(path: Iterable[int]) -> Path:
    """The oracle's path of tokens without extra ids."""
    return tuple((token, 0) for token in path)


def named(records: Iterable[dict[str, Any]], mirror: Mirror, paired: Callable[[Any], Path] = plain) -> Terms:
    """The library's decoded events after a mirror's, by the paths of their blocks. `paired` adds extra ids.

    A block may be stored and removed among them.
    """
    terms: list[tuple[Any, ...]] = []
    for event in records:
        kind, group, nodes = event["kind"], event["group"], mirror.nodes
        mirror = kvjax.fold([event], mirror)
        if kind == "copied":
            terms.append((kind, event["num_tokens"], group))
        elif kind == "cleared":
            terms.append((kind, 0, (), group))
        else:
            namespace, path, *_ = {**nodes, **mirror.nodes}[group, event["block"], event["generation"]]
            terms.append((kind, namespace, paired(path), group))
    return collections.Counter(terms)


def without_copied_paths(events: Iterable[Event], size: int) -> Terms:
    """The oracle's events. A copy only has the number of tokens of its block."""
    return collections.Counter(
        (e.kind, (len(e.path) - 1) % size + 1, e.group) if e.kind == "copied" else tuple(e) for e in events
    )
