# SPDX-License-Identifier: Apache-2.0
"""Meshes of virtual devices (tests/conftest.py asks for eight), and the traffic of a program compiled for them."""

import collections
import contextlib
import re

import jax
from jax.sharding import AxisType

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
_COLLECTIVE = re.compile(r"= (\S+?)(?:\{\S*)? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(")


@contextlib.contextmanager
def mesh_of(first: int, second: int, kind: AxisType = AUTO, names: tuple[str, str] = ("data", "heads")):
    """A mesh of the first devices. It is in context if its axes are Explicit."""
    devices = jax.devices()[: first * second]
    mesh = jax.make_mesh((first, second), names, axis_types=(kind, kind), devices=devices)
    with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
        yield mesh


def collectives(compiled) -> collections.Counter[str]:
    """The number of collectives of each kind in a compiled program."""
    return collections.Counter(kind for _, kind in _COLLECTIVE.findall(compiled.as_text()))


def sent_shapes(compiled) -> list[str]:
    """The shapes of results of collectives, for example f32[4,1,64]."""
    return [shape for shape, _ in _COLLECTIVE.findall(compiled.as_text())]
