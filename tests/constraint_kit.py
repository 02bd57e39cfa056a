# SPDX-License-Identifier: Apache-2.0
"""Random grammars over few tokens in plain Python, and constraints made of them."""

import dataclasses

import numpy as np

from kvjax.grammar import TokenTable
from kvjax.serving import Constraints

LIMITS = {"max_states": 9, "max_classes": 6}


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over tokens, and the tokens which end a text."""

    table: TokenTable
    stop_tokens: tuple[int, ...]

    @classmethod
    def random(cls, seed, vocabulary, stop_tokens=(0,)):
        """A grammar with up to 7 states. From each state some tokens lead to an end."""
        rng, others = np.random.default_rng(seed), np.setdiff1d(np.arange(vocabulary), stop_tokens)
        states, classes = (int(rng.integers(1, most)) for most in (8, min(6, len(others) + 1)))
        next_state = rng.integers(0, states, (states, classes)).astype(np.int32)
        next_state = np.where(rng.random((states, classes)) < 0.4, -1, next_state)
        token_class = rng.integers(0, classes, vocabulary).astype(np.int32)
        token_class[others[-classes:]] = np.arange(classes)  # each class has a token that ends nothing
        for state in range(states - 1):
            next_state[state, rng.integers(classes)] = state + 1
        may_end = rng.random(states) < 0.3
        may_end[-1] = True
        return cls(TokenTable(next_state, token_class, may_end), stop_tokens)

    @property
    def constraint(self):
        return Constraints.of(self.table, self.stop_tokens, **LIMITS)

    def after(self, tokens):
        """The state after the tokens of an answer, or None after a stop token or a forbidden token."""
        state = 0
        for token in tokens:
            if token in self.stop_tokens:
                return None
            state = int(self.table.next_state[state, self.table.token_class[token]])
            if state < 0:
                return None
        return state

    def allowed(self, tokens, vocabulary):
        """bool[V]: allowed next tokens."""
        allowed, state, stop = np.zeros(vocabulary, np.bool_), self.after(tokens), [*self.stop_tokens]
        if state is not None:
            allowed[: len(self.table.token_class)] = self.table.next_state[state, self.table.token_class] >= 0
        allowed[stop] = state is None or self.table.may_end[state]
        return allowed

    def accepts(self, output):
        """Whether an output is a text of the grammar with a stop token, or a part of a text if it was cut."""
        *text, last = output.tokens
        if output.finish != "stop":
            return self.after(output.tokens) is not None
        state = self.after(text)
        return last in self.stop_tokens and state is not None and bool(self.table.may_end[state])
