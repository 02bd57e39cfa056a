# SPDX-License-Identifier: Apache-2.0
"""Turns an expression into the smallest deterministic automaton over bytes, with limits on the work.

A deterministic automaton can be exponentially larger than its expression: `(a|b)*a(a|b){20}` needs two million states.
The builder counts every size that a hostile expression could increase, while it grows, so it refuses such an expression
within seconds.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

import numpy as np

from kvjax.grammar.expressions import (
    Alt,
    Automaton,
    Both,
    ByteSet,
    Expression,
    Given,
    GrammarError,
    Joined,
    Minimal,
    Minus,
    Repeat,
    Seq,
)

# Automata may be larger than the result before their states are merged.
_SLACK = 8
_MAX_SIZE = 200_000  # states of an automaton that is not deterministic yet
_MAX_WORK = 4_000_000  # moves that are visited in total


class _Graph:
    """A nondeterministic automaton, with edges for sets of bytes, and jumps without input."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.edges: list[list[tuple[int, int]]] = []  # of each state: (a set of bytes as bits, the next state)
        self.jumps: list[list[int]] = []

    def state(self) -> int:
        self.edges.append([])
        self.jumps.append([])
        if len(self.edges) > _MAX_SIZE:
            raise GrammarError(f"got over {_MAX_SIZE:,} states before any are merged, wanted a smaller expression")
        return len(self.edges) - 1

    def after(self, state: int) -> int:
        """A new state to which a state jumps."""
        new = self.state()
        self.jumps[state].append(new)
        return new

    def add(self, expression: Expression, start: int) -> int:
        """Adds the paths of an expression, starting from an existing state. Returns the state at their end."""
        match expression:
            case ByteSet(mask=mask):
                end = self.state()
                self.edges[start].append((mask, end))
            case Seq(parts=parts):
                end = start
                for part in parts:
                    end = self.add(part, end)
            case Alt(parts=parts):
                end = self.state()
                for part in parts:
                    self.jumps[self.add(part, self.after(start))].append(end)
            case Repeat():
                end = self._repeat(expression, start)
            case Joined():
                end = self._joined(expression, start)
            case Minimal() | Given() | Both() | Minus():
                end = self._automaton(self.builder.build(expression), start)
            case _:
                raise TypeError(f"expression: got {expression!r}")
        return end

    def _repeat(self, expression: Repeat, start: int) -> int:
        minimum = expression.minimum
        maximum = expression.maximum
        end = self.state()
        last = start
        if minimum == 0:
            self.jumps[start].append(end)
        entry = start
        for count in range(1, (max(minimum, 1) if maximum is None else maximum) + 1):
            entry = self.after(last if count == 1 else self.add(expression.separator, last))
            last = self.add(expression.item, entry)
            if count >= minimum:
                self.jumps[last].append(end)
        if maximum is None:
            again = self.add(expression.separator, self.after(last))
            self.jumps[again].append(entry)
        return end

    def _joined(self, expression: Joined, start: int) -> int:
        """Adds two rows of states: before and after the first present part. Each part occurs once."""
        first = self.after(start)
        later = self.state()
        for part, may_miss in expression.parts:
            entry = self.after(first)
            next_first = self.state()
            next_later = self.state()
            self.jumps[self.add(expression.separator, self.after(later))].append(entry)
            self.jumps[self.add(part, entry)].append(next_later)
            if may_miss:
                self.jumps[first].append(next_first)
                self.jumps[later].append(next_later)
            first = next_first
            later = next_later
        self.jumps[first].append(later)
        return later

    def _automaton(self, automaton: Automaton, start: int) -> int:
        end = self.state()
        states = [self.state() for _ in automaton.final]
        masks = _masks(automaton.byte_class)
        self.jumps[start].append(states[0])
        for index, row in enumerate(automaton.next_state.tolist()):
            sets: dict[int, int] = collections.defaultdict(int)
            for byte_class, target in enumerate(row):
                if target >= 0:
                    sets[target] |= masks[byte_class]
            self.edges[states[index]] = [(mask, states[target]) for target, mask in sets.items()]
            if automaton.final[index]:
                self.jumps[states[index]].append(end)
        return end

    def closures(self, end: int) -> list[frozenset[int]]:
        """The states with edges, and the end, that each state reaches by jumps."""
        return [self._closure(state, end) for state in range(len(self.edges))]

    def _closure(self, state: int, end: int) -> frozenset[int]:
        reached = {state}
        stack = [state]
        while stack:
            for target in self.jumps[stack.pop()]:
                if target not in reached:
                    reached.add(target)
                    stack.append(target)
        self.builder.count(len(reached))
        return frozenset(target for target in reached if self.edges[target] or target == end)


def _masks(byte_class: np.ndarray) -> list[int]:
    """The set of bytes of each class, as bits."""
    masks = [0] * (int(byte_class.max()) + 1)
    for value, index in enumerate(byte_class.tolist()):
        masks[index] |= 1 << value
    return masks


def _byte_classes(masks: Iterable[int]) -> np.ndarray:
    """i32[256]; a class for each byte, equal for bytes in the same sets."""
    packed = [np.frombuffer(mask.to_bytes(32, "little"), np.uint8) for mask in masks]
    if not packed:
        return np.zeros(256, np.int32)
    bits = np.unpackbits(np.stack(packed), axis=1, bitorder="little")
    return np.unique(bits, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)


class Builder:
    """Builds the automata of expressions, each once, within the limits of a table of `max_states` states."""

    def __init__(self, max_states: int):
        self.max_states = max_states
        self._work = 0
        self._built: dict[Expression, Automaton] = {}

    def count(self, moves: int) -> None:
        """Counts work, which grows with the expression, and refuses too much."""
        self._work += moves
        if self._work > _MAX_WORK:
            raise GrammarError(f"got over {_MAX_WORK:,} moves while the automaton was built, wanted fewer")

    def whole(self, expression: Expression) -> Automaton:
        """Builds the minimal automaton of a whole grammar, of at most `max_states` states."""
        return minimise(self._determinised(expression), self.max_states)

    def build(self, expression: Expression) -> Automaton:
        """Builds the minimal automaton of a part. Raises a GrammarError beyond a limit."""
        if expression not in self._built:
            match expression:
                case Both(first_operand=first_operand, second_operand=second_operand):
                    automaton = self._product(self.build(first_operand), self.build(second_operand), False)
                case Minus(first_operand=first_operand, second_operand=second_operand):
                    automaton = self._product(self.build(first_operand), self.build(second_operand), True)
                case Minimal(item=item):
                    automaton = self.build(item)
                case Given(automaton=automaton):
                    automaton = minimise(automaton)
                case _:
                    automaton = minimise(self._determinised(expression))
            self._built[expression] = automaton
        return self._built[expression]

    def accepts(self, expression: Expression, text: bytes) -> bool:
        """Whether an expression matches a text."""
        automaton = self.build(expression)
        state = 0
        for value in text:
            state = int(automaton.next_state[state, automaton.byte_class[value]])
            if state < 0:
                return False
        return bool(automaton.final[state])

    def matches_nothing(self, expression: Expression) -> bool:
        """Whether no text matches."""
        return not self.build(expression).final.any()

    def _check(self, num_states: int) -> None:
        if num_states > _SLACK * self.max_states:
            raise GrammarError(
                f"got over {num_states - 1:,} states before any are merged, wanted at most {_SLACK} times"
                f" max_states={self.max_states}"
            )

    def _determinised(self, expression: Expression) -> Automaton:
        """Builds an automaton whose states are the sets of states in which the graph may be."""
        if expression.size > _MAX_SIZE:
            raise GrammarError(f"got {expression.size:,} states before any are merged, wanted at most {_MAX_SIZE:,}")
        graph = _Graph(self)
        start = graph.state()
        end = graph.add(expression, start)
        closures = graph.closures(end)
        masks = {mask for edges in graph.edges for mask, _ in edges}
        byte_class = _byte_classes(masks)
        class_masks = _masks(byte_class)
        classes = {mask: [c for c, bits in enumerate(class_masks) if bits & mask] for mask in masks}
        edges = [[(classes[mask], target) for mask, target in pairs] for pairs in graph.edges]
        numbers = {closures[start]: 0}
        by_targets: dict[frozenset[int], int] = {}
        sets = [closures[start]]
        rows = []
        for current in sets:
            moves: dict[int, list[int]] = collections.defaultdict(list)
            for state in current:
                for numbers_of_classes, target in edges[state]:
                    self.count(len(numbers_of_classes))
                    for index in numbers_of_classes:
                        moves[index].append(target)
            row = [-1] * len(class_masks)
            for index, targets in moves.items():
                key = frozenset(targets)
                if key not in by_targets:
                    reached = frozenset().union(*(closures[target] for target in key))
                    self.count(len(reached))
                    by_targets[key] = numbers.setdefault(reached, len(numbers))
                    if by_targets[key] == len(sets):
                        sets.append(reached)
                        self._check(len(sets))
                row[index] = by_targets[key]
            rows.append(row)
        final = np.array([end in states for states in sets])
        return Automaton(np.array(rows, np.int32).reshape(len(sets), -1), byte_class, final)

    def _product(self, first_operand: Automaton, second_operand: Automaton, without: bool) -> Automaton:
        """Builds the automaton of the texts of both operands, or, if `without`, of the first without the second."""
        pairs, byte_class = np.unique(
            np.stack([first_operand.byte_class, second_operand.byte_class]), axis=1, return_inverse=True
        )
        left_rows = first_operand.next_state[:, pairs[0]].tolist()
        right_rows = second_operand.next_state[:, pairs[1]].tolist()
        dead = [-1] * pairs.shape[1]
        numbers = {(0, 0): 0}
        states = [(0, 0)]
        rows = []
        for first_state, second_state in states:
            row = []
            for target in zip(
                left_rows[first_state], right_rows[second_state] if second_state >= 0 else dead, strict=True
            ):
                if target[0] < 0 or (target[1] < 0 and not without):
                    row.append(-1)
                    continue
                index = numbers.setdefault(target, len(numbers))
                if index == len(states):
                    states.append(target)
                    self._check(len(states))
                row.append(index)
            self.count(len(row))
            rows.append(row)
        final = [
            bool(first_operand.final[first_state])
            and bool(second_state >= 0 and second_operand.final[second_state]) != without
            for first_state, second_state in states
        ]
        joint = byte_class.reshape(-1).astype(np.int32)
        return minimise(Automaton(np.array(rows, np.int32).reshape(len(states), -1), joint, np.array(final)))


def distances(next_state: np.ndarray, final: np.ndarray) -> np.ndarray:
    """i64[S]; steps from each state to the nearest final state, or -1."""
    before = _states_before(next_state)
    num_steps = np.where(final, 0, -1).tolist()
    queue = np.flatnonzero(final).tolist()
    for state in queue:
        for source in before[state]:
            if num_steps[source] < 0:
                num_steps[source] = num_steps[state] + 1
                queue.append(source)
    return np.array(num_steps)


def _longest(next_state: np.ndarray) -> np.ndarray:
    """i64[S]; steps of the longest path from each state, or -1 if there is no limit."""
    before = _states_before(next_state)
    waiting = np.bincount([source for sources in before for source in sources], minlength=len(before)).tolist()
    num_steps = [-1 if count else 0 for count in waiting]
    queue = [state for state, count in enumerate(waiting) if not count]
    for state in queue:  # all states after it are known, and the last of them has the longest path
        for source in before[state]:
            waiting[source] -= 1
            if not waiting[source]:
                num_steps[source] = num_steps[state] + 1
                queue.append(source)
    return np.array(num_steps)


def _states_before(next_state: np.ndarray) -> list[list[int]]:
    """The states from which a step leads to each state."""
    states = len(next_state)
    sources, columns = np.nonzero(next_state >= 0)
    pairs = np.unique(next_state[sources, columns].astype(np.int64) * states + sources)
    bounds = np.searchsorted(pairs, np.arange(states + 1) * states).tolist()
    before = (pairs % states).tolist()
    return [before[begin:end] for begin, end in itertools.pairwise(bounds)]


def _reached(next_state: np.ndarray) -> np.ndarray:
    """Lists the states within reach of the start, the nearest first."""
    seen = {0}
    order = [0]
    for state in order:
        for target in dict.fromkeys(next_state[state].tolist()):
            if target >= 0 and target not in seen:
                seen.add(target)
                order.append(target)
    return np.array(order)


def trimmed(next_state: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Removes the states that the start does not reach, and the states that reach no end. The start stays."""
    alive = np.append(distances(next_state, final) >= 0, False)
    pruned = np.where(alive[next_state], next_state, -1)
    order = _reached(pruned)
    numbers = np.full(len(final) + 1, -1, np.int32)
    numbers[order] = np.arange(len(order))
    return numbers[pruned[order]], final[order]


def merged(next_state: np.ndarray, final: np.ndarray, max_states: int | None = None) -> np.ndarray:
    """i64[S]; numbers of the states, equal for states with the same future.

    States are partitioned into blocks. Blocks are split by the blocks of their next states until nothing changes. The
    first blocks are the states with equal shortest and longest paths to an end, which separates most states of a long
    chain. Rows are compared by random hashes, and exactly at the end. If a collision has left two futures in a block,
    the hashes are drawn again.

    Raises:
      GrammarError: if more than `max_states` remain.
    """
    columns = np.unique(next_state, axis=1)
    ways = np.stack([distances(next_state, final), _longest(next_state)])
    first_block = np.unique(ways, axis=1, return_inverse=True)[1].reshape(-1)
    random = np.random.default_rng(0)
    while True:
        factors = random.integers(1, 2**63, columns.shape[1] + 1, np.uint64) | np.uint64(1)
        block = first_block
        num_blocks = -1
        while (count := int(block.max()) + 1) > num_blocks:
            num_blocks = count
            if max_states is not None and num_blocks > max_states:
                raise GrammarError(f"got over {max_states:,} states, wanted at most max_states={max_states}")
            rows = np.append(block, -1)[columns].astype(np.uint64)
            mixed = rows @ factors[1:] + block.astype(np.uint64) * factors[0]
            block = np.unique(mixed, return_inverse=True)[1].reshape(-1)
        first = np.unique(block, return_index=True)[1]
        futures = np.append(block, -1)[columns]
        if np.array_equal(futures[first][block], futures) and np.array_equal(final[first][block], final):
            return block


def minimise(automaton: Automaton, max_states: int | None = None) -> Automaton:
    """Minimizes the automaton. Raises a GrammarError if it has over `max_states`."""
    next_state, final = trimmed(automaton.next_state, automaton.final)
    block = merged(next_state, final, max_states)
    first = np.unique(block, return_index=True)[1]
    rank = np.empty(len(first), np.int32)  # the start's block comes first
    rank[np.argsort(first)] = np.arange(len(first))
    first = np.sort(first)
    numbers = np.append(rank[block], -1).astype(np.int32)
    rows, byte_class = np.unique(numbers[next_state[first]], axis=1, return_inverse=True)
    return Automaton(rows, byte_class.reshape(-1)[automaton.byte_class].astype(np.int32), final[first])
