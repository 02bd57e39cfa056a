# SPDX-License-Identifier: Apache-2.0
"""The verbs with their arguments on every face, by their signatures, for the machine of bytes to draw."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import kvjax
import kvjax.stores
from kvjax.checks import static_options
from kvjax.tiers import TieredCache
from tests import cases, drive

Argument = tuple[str, str, str]  # face, verb, name
OWNERS = {"Cache": kvjax.Cache, "TieredCache": TieredCache}
FACES = ("state", *OWNERS)
TELLING = ("kvjax.debug", "kvjax.events")  # these rooms describe a state
# Patterns of arguments that the machine does not draw, each with its reason.
UNDRAWN = {
    "*.create.*": "A history makes one cache; configurations draw the policy and the mesh, test_policies.py the rest.",
    "*.step.logits": "The logits are no part of the cache; tests/models/test_paged_decoders.py reads all of them.",
}


def listed() -> set[Argument]:
    """The arguments which the machine draws, by tests/data/arguments.txt: a line for each face and verb."""
    lines = [line.split() for line in (drive.DATA / "arguments.txt").read_text().splitlines()]
    return {(*verb.split("."), name) for verb, *names in lines for name in names}


def undrawn(tried: set[Argument]) -> list[str]:
    """The arguments of all faces neither drawn nor in `UNDRAWN`, and patterns without a use."""
    missing = {".".join(argument) for argument in set(arguments()) - tried}
    excused = {pattern: fnmatch.filter(missing, pattern) for pattern in UNDRAWN}
    needless = [pattern for pattern, found in excused.items() if not found]
    return sorted(missing.difference(*excused.values())) + needless


@functools.cache
def verbs(face: str) -> dict[str, Callable[..., Any]]:
    """The public functions of a state, or the public methods of a cache, by name."""
    if face in OWNERS:
        owner = OWNERS[face]
        found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
        return {name: method for name, method in found.items() if inspect.isroutine(method) and name != "replace"}
    exported = {name: getattr(home, name) for home in drive.HOMES for name in home.__all__}
    return {
        name: function
        for name, function in exported.items()
        if inspect.isfunction(function)
        and next(iter(parameters(function)), None) == "state"
        and not function.__module__.startswith(TELLING)
    }


@functools.cache
def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def static(function: Callable[..., Any]) -> tuple[str, ...]:
    """The static options of a verb on any face."""
    if function.__name__ in cases.VIEWS:
        return tuple(name for name in ("max_tokens", "size", "num_rows") if name in parameters(function))
    return static_options(function)


def arguments() -> Iterator[Argument]:
    """Every argument of every verb on every face, the cache itself left out."""
    for face in FACES:
        for verb, function in verbs(face).items():
            yield from ((face, verb, name) for name in [*parameters(function)][1:])


def given(face: str, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> set[Argument]:
    """The arguments of a call with another value than their defaults."""
    function = verbs(face)[verb]
    bound = inspect.signature(function).bind(None, *args, **options).arguments
    defaults = {name: parameter.default for name, parameter in parameters(function).items()}
    return {(face, verb, name) for name in [*bound][1:] if _differs(bound[name], defaults[name])}


def _differs(value: Any, default: Any) -> bool:
    if default is inspect.Parameter.empty or default is None or value is None:
        return value is not default
    return value != default if isinstance(default, tuple | str) else bool(np.any(np.asarray(value) != default))


# Integers of options that no call in tests/cases.py has.
SAMPLES: dict[str, Any] = {
    "namespace": 0, "now": 0, "reserve_tokens": 4, "alignment_tokens": 4, "max_tokens": 4, "max_removed": 2, "group": 0,
    "num_tokens": 1, "seqs": np.arange(cases.ROWS), "written": 0, "requested_priority": np.zeros((4, 2)),
    "hits": np.zeros(4),
}  # fmt: skip
READS: dict[str, cases.Call] = {
    "view": ((np.ones(cases.ROWS, np.int64), 4), {}), "ragged": ((np.ones(cases.ROWS, np.int64), 4), {}),
    "mixed": ((cases.ACTIVE, np.arange(2), np.ones(2, np.int64), 4), {}), "free_rows": ((2,), {}),
}  # fmt: skip


def wide_calls(
    face: str, calls: Mapping[str, cases.Call], spec: kvjax.CacheSpec, wide: int
) -> Iterator[tuple[str, str, inspect.BoundArguments]]:
    """Calls like these with the number in place of an integer of an argument, with the verb and the name."""
    samples = SAMPLES | ({"extra_ids": cases.TEXT} if spec.extra_ids else {})
    samples |= {"retention": kvjax.Retention.of([(0, 4, 30)])} if spec.retention else {}
    for verb, function in verbs(face).items():
        if verb not in calls:
            continue
        args, options = calls[verb]
        for name in [*parameters(function)][1:]:
            call = inspect.signature(function).bind(None, *args, **options)
            value = call.arguments.get(name, samples.get(name))
            if name == "retention" and value is not None:
                value = kvjax.Retention(value.ranges, np.array([wide, -1]))
            elif np.asarray(value).dtype.kind in "iuf" and np.size(value):
                value = np.full(np.shape(value), wide) if np.ndim(value) else wide
            else:
                continue
            call.arguments[name] = value
            yield verb, name, call


def refusal(face: str, verb: str, cache: Any, call: inspect.BoundArguments) -> str:
    """The error of a call on a cache, or "done"."""
    try:
        verbs(face)[verb](cache, *call.args[1:], **call.kwargs)
    except (ValueError, OverflowError) as error:
        return str(error)
    return "done"
