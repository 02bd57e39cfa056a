# SPDX-License-Identifier: Apache-2.0
"""Changes of the engines in `engines.py`: they sleep, wake, and get new weights at any turn.

New weights are a `Chain` with other roots, so each of its K/V belongs to a namespace of the new version. A row that
goes on over old K/V writes names of its old namespace, and none of its blocks may be findable.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import kvjax
from kvjax.serving.changes import Change
from tests.oracle.bytes_machine import Chain, name_of

MODES = "finish", "recompute", "continue"


def draw_change(random: np.random.Generator, is_asleep: bool) -> list[Any] | None:
    """A change for the next turn, or None."""
    if is_asleep and random.random() < 0.4:
        return ["wake"]
    if random.random() > 0.08:
        return None
    if random.random() < 0.3:
        return ["sleep", str(random.choice(["none", "host"]))]
    return ["update", str(random.choice(MODES)), bool(random.random() < 0.5)]


@dataclasses.dataclass(frozen=True)
class Spaces:
    """The namespaces that an output's tokens come from."""

    spaces: dict[int, int]  # by version
    output: Any
    of_scores: int  # the namespace in which the prompt was scored

    @property
    def is_single(self) -> bool:
        """Whether a single version has chosen all tokens."""
        return len(set(self.output.versions)) <= 1 and not self.output.mixed

    @property
    def first(self) -> int:
        """The namespace of the first token."""
        return self.spaces[self.output.versions[0] if self.output.versions else max(self.spaces)]

    def of_token(self, at: int) -> list[int]:
        """The possible namespaces of a token. A mixed output may go on in the namespace of an earlier version."""
        version = self.output.versions[at]
        if not self.output.mixed:
            return [self.spaces[version]]
        return [space for of, space in sorted(self.spaces.items(), reverse=True) if of <= version]


def note_spaces(sent: Any, version: int) -> None:
    """Notes the present namespace of a request, and of its scores until its prompt is scored."""
    sent.spaces[version] = sent.handle.job.namespace
    first = sent.request.prompt_logprobs_from
    is_scored = first is not None and len(sent.handle.output.prompt_logprobs) == len(sent.request.prompt) - first
    if not (is_scored and sent.is_scored):
        sent.scored_in = sent.handle.job.namespace
    sent.is_scored = is_scored


class Changing:
    """The part of `Served` that makes changes."""

    engine: Any
    change: Change | None

    def begin_change(self, change: list[Any] | None) -> None:
        """Gives the engine a change, unless it has one."""
        if change is not None and self.change is None:
            kind, *options = change
            if kind == "sleep":
                self.change = Change("sleep", keep=options[0] if self.has_host else "none")
            elif kind == "wake":
                self.change = Change("wake")
            else:
                self.updates += 1
                weights = f"weights {self.updates}"
                self.change = Change("update", in_flight=options[0], weights=weights, forget=options[1])
            self.engine._inbox.changes.append(self.change)
        if self.change is not None and self.change.kind == "update":
            self.change.model = self.model_under(self.change.weights)

    def spaces_under(self, weights: Any) -> list[int]:
        """The namespace of each first token under weights of this name."""
        inbox = self.engine._inbox
        return [inbox.number(namespace, salt, weights) for namespace, salt in self.tenant_of]

    def model_under(self, weights: Any) -> Chain:
        roots = np.array([name_of(space, ()) for space in self.spaces_under(weights)], np.int32)
        return Chain(roots, self.config.layers)

    def end_change(self) -> None:
        """Looks at a change that is made, or has failed."""
        change = self.change
        if change is None or not change.done.done():
            return
        self.change = None
        error = change.done.exception()
        if error is not None:
            assert "pin" in str(error) or "sleeps" in str(error) or "on purpose" in str(error), error
            self.tally[f"{change.kind} failed"] += 1
            return
        self.tally[change.kind] += 1
        if change.kind == "update":
            self.tally[f"update {change.in_flight}"] += 1
            self.space_of = self.spaces_under(change.weights)

    @property
    def is_asleep(self) -> bool:
        return self.engine is not None and self.engine._thread.is_asleep

    def space_in(self, seq: int, job: Any) -> int:
        """The namespace of a row's K/V. None of its blocks may be findable if it is not the request's."""
        state = self.cache.state
        space = int(state.seqs.namespace[seq])
        if space == job.namespace:
            return space
        assert job.output.mixed, f"row {seq} has namespace {space}, and {job} is not marked"
        group = state.groups[0]
        table = np.asarray(group.table)[seq]
        fill = np.asarray(group.blocks.fill)[table[table >= 0]]
        assert not fill.any(), f"row {seq} is marked, and its blocks are findable: {fill}"
        self.tally["rows over old K/V"] += 1
        return space

    def inspect(self) -> None:
        if not self.is_asleep:
            super().inspect()

    def verify(self) -> None:
        """While the engine sleeps there are no bytes to compare, and every findable block is on the host."""
        if not self.is_asleep:
            super().verify()
            return
        state = self.cache.state
        kvjax.check(state)
        assert kvjax.events.index_of(state) == self.mirror.index, "the events do not give the index"
        for group in state.groups:
            found = np.asarray(group.blocks.fill) > 0
            assert not (found & np.asarray(group.on_device(group.ids))).any(), "a block without a pool is findable"
        self.tally["blocks kept asleep"] += len(self.mirror.nodes)
        self.tally["turns asleep"] += 1

    def poison(self) -> None:
        if not self.is_asleep:
            super().poison()
