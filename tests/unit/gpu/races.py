# SPDX-License-Identifier: Apache-2.0
"""Finds races in a kernel's jaxpr: accesses to the same array, with a store among them, and no barrier between them.

The lanes of a program run in several warps, which only a barrier synchronises. The order of two accesses without a
barrier between them is not defined, whichever elements they touch. This rule is simple to verify. It does not cover the
lanes of a single store, which must write different elements or equal values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend import core

from kvjax.gpu import lowering_for

LOADS, STORES = ("masked_load", "get"), ("masked_swap", "swap")
BARRIERS = ("debug_barrier", "debug_barrier_p")  # the second until jax 0.11
# For each array, the accesses since a barrier.
Pending = dict[Any, frozenset[str]]


def kernels_of(fn, *args) -> list[Any]:
    """The `pallas_call` equations of a function, at any depth."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield eqn
            else:
                for value in eqn.params.values():
                    for part in value if isinstance(value, tuple | list) else (value,):
                        if isinstance(part, core.Jaxpr | core.ClosedJaxpr):
                            yield from inside(opened(part))

    with lowering_for("cuda"):
        return list(inside(opened(jax.make_jaxpr(fn)(*args))))


def barriers_of(kernel) -> list[Any]:
    """The barriers of a kernel."""
    races: list[Any] = []
    _Walk(found=races).over(kernel)
    return races


def races_of(kernel, without: Any = None) -> list[str]:
    """The races of a kernel, unchanged or without a barrier."""
    walk = _Walk(without=without)
    walk.over(kernel)
    return sorted(walk.races)


def opened(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


@dataclasses.dataclass
class _Walk:
    """A walk through a kernel, into every branch and every loop.

    Attributes:
      without: a barrier to leave out.
      found: the barriers.
      races: the races.
    """

    without: Any = None
    found: list[Any] = dataclasses.field(default_factory=list)
    races: set[str] = dataclasses.field(default_factory=set)

    def over(self, kernel) -> None:
        jaxpr, aliases = opened(kernel.params["jaxpr"]), kernel.params["input_output_aliases"]
        inputs = len(jaxpr.invars) - len(kernel.outvars)
        names: list[Any] = list(range(len(jaxpr.invars)))
        for source, target in aliases:
            names[source] = inputs + target  # one array
        self.through(jaxpr, names, {})

    def through(self, jaxpr, arrays: list[Any], pending: Pending) -> Pending:
        """The pending accesses after a jaxpr whose arguments are these arrays, None for values."""
        jaxpr = opened(jaxpr)
        values = dict(zip(jaxpr.invars, arrays, strict=True))
        for eqn in jaxpr.eqns:
            operands = [None if isinstance(var, core.Literal) else values.get(var) for var in eqn.invars]
            pending = self.after(eqn, operands, pending)
        return pending

    def after(self, eqn, operands: list[Any], pending: Pending) -> Pending:
        name, params = eqn.primitive.name, eqn.params
        if name in BARRIERS:
            if not any(eqn is barrier for barrier in self.found):
                self.found.append(eqn)
            return pending if eqn is self.without else {}
        if name in LOADS + STORES:
            return self.accessed(eqn, operands[0], pending)
        if name == "cond":
            return joined(*(self.through(branch, operands[1:], pending) for branch in params["branches"]))
        if name == "while":
            split, consts = params["cond_nconsts"], params["body_nconsts"]
            carry = operands[split + consts :]

            def step(pending):
                pending = self.through(params["cond_jaxpr"], [*operands[:split], *carry], pending)
                return self.through(params["body_jaxpr"], operands[split:], pending)

            return self.repeated(step, pending)
        if name == "scan":
            return self.repeated(lambda pending: self.through(params["jaxpr"], operands, pending), pending)
        if name in ("jit", "pjit", "closed_call"):
            return self.through(params["jaxpr"], operands, pending)
        assert all(operand is None for operand in operands), f"what does {name} do to an array?"
        return pending

    def repeated(self, step, pending: Pending) -> Pending:
        """The pending accesses after a loop, whose body follows itself, or does not run."""
        while True:
            after = joined(pending, step(pending))
            if after == pending:
                return after
            pending = after

    def accessed(self, eqn, array: Any, pending: Pending) -> Pending:
        kinds = {"load"} if eqn.primitive.name in LOADS else {"store"}
        before = pending.get(array, frozenset())
        if "store" in kinds | before and before:
            self.races.add(f"array {array}: {' '.join(sorted(kinds))} after {' '.join(sorted(before))} ({eqn})")
        return {**pending, array: before | kinds}


def joined(*parts: Pending) -> Pending:
    return {key: frozenset().union(*(part.get(key, frozenset()) for part in parts)) for part in parts for key in part}
