# SPDX-License-Identifier: Apache-2.0
"""Turns an automaton over bytes into a table over the tokens of a vocabulary.

A token is a function from states to states, the states after its bytes. Tokens with the same function share a class.
All tokens are read in parallel, byte by byte, and each function of a beginning gets a number. There are few such
functions, since most beginnings are forbidden in most states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvjax.grammar.automaton import distances, merged, trimmed
from kvjax.grammar.expressions import Automaton, GrammarError
from kvjax.grammar.vocabulary import Vocabulary

_MAX_ENTRIES = 1 << 26  # entries of all functions; as i32 they take 256 MiB


class TokenTable(NamedTuple):
    """The possible next tokens of a text, as arrays. State 0 is the start.

    Attributes:
      next_state: i32[states, classes]; state after a token of each class, or -1 for a forbidden token.
      token_class: i32[V]; each token's class.
      may_end: bool[states]; whether the text is complete, so a stop token may follow.
    """

    next_state: np.ndarray
    token_class: np.ndarray
    may_end: np.ndarray


class _Functions:
    """The distinct functions from states to states. Number 0 forbids everything, and number 1 is the identity."""

    def __init__(self, automaton: Automaton):
        states = len(automaton.final)
        self.steps = np.append(automaton.next_state, np.full((1, automaton.next_state.shape[1]), -1, np.int32), 0)
        self.rows = [np.full(states, -1, np.int32), np.arange(states, dtype=np.int32)]
        self.numbers = {row.tobytes(): function_index for function_index, row in enumerate(self.rows)}

    def then(self, function_index: int, byte_class: int) -> int:
        """The number of the function that reads another byte after this function."""
        row = self.steps[self.rows[function_index], byte_class]
        data = row.tobytes()
        if data not in self.numbers:
            if len(row) * len(self.rows) > _MAX_ENTRIES:
                raise GrammarError(
                    f"got over {len(self.rows):,} classes of beginnings of tokens in {len(row):,} states,"
                    f" wanted at most {_MAX_ENTRIES:,} entries"
                )
            self.numbers[data] = len(self.rows)
            self.rows.append(row)
        return self.numbers[data]


def _token_functions(functions: _Functions, automaton: Automaton, tokens: Sequence[bytes | None]) -> np.ndarray:
    """i64[V]; number of each token's function. Tokens without a text are forbidden."""
    lengths = np.array([len(token) if token else 0 for token in tokens])
    data = np.frombuffer(b"".join(token for token in tokens if token), np.uint8)
    classes = automaton.byte_class[data].astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    result = np.zeros(len(tokens), np.int64)
    active = np.flatnonzero(lengths)
    result[active] = 1
    num_classes = automaton.next_state.shape[1]
    for position in range(int(lengths.max(initial=0))):
        active = active[(lengths[active] > position) & (result[active] > 0)]
        steps, inverse = np.unique(
            result[active] * num_classes + classes[begins[active] + position], return_inverse=True
        )
        after = [functions.then(*divmod(step, num_classes)) for step in steps.tolist()]
        result[active] = np.array(after, np.int64)[inverse.reshape(-1)]
    return result


def token_table(automaton: Automaton, vocabulary: Vocabulary, max_states: int, max_classes: int) -> TokenTable:
    """Makes the table of an automaton for a vocabulary.

    States from which no tokens lead to an end are forbidden, so a text can always be completed.

    Raises:
      GrammarError: if the vocabulary spells no text of the automaton, or the table is larger than the limits.
    """
    if not automaton.final.any():
        raise GrammarError("no text matches")
    functions = _Functions(automaton)
    used, token_class = np.unique(_token_functions(functions, automaton, vocabulary.tokens), return_inverse=True)
    next_state = np.stack([functions.rows[function_index] for function_index in used.tolist()], axis=1)
    final = automaton.final
    single_bytes = {functions.then(1, byte_class) for byte_class in range(automaton.next_state.shape[1])}
    if not single_bytes <= {0, *used.tolist()}:  # otherwise each path continues, and no two states are equal
        next_state, final, column = _pruned(next_state, final)
        token_class = column[token_class]
    states, classes = next_state.shape
    if states > max_states:
        raise GrammarError(f"got {states:,} states, wanted at most max_states={max_states}")
    if classes > max_classes:
        raise GrammarError(f"got {classes:,} classes of tokens, wanted at most max_classes={max_classes}")
    return TokenTable(np.ascontiguousarray(next_state), token_class.astype(np.int32), final)


def _pruned(next_state: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Removes paths from which the tokens reach no end, then merges equal states and equal classes of tokens.

    Returns:
      next_state: i32[states, classes]
      final: bool[states]
      column: i64[K]; the class of each column before.
    """
    if distances(next_state, final)[0] < 0:
        raise GrammarError("no sequence of the vocabulary's tokens spells a text that matches")
    next_state, final = trimmed(next_state, final)
    block = merged(next_state, final)
    first = np.sort(np.unique(block, return_index=True)[1])  # the start is the first state of its block
    rank = np.empty(len(first), np.int32)
    rank[block[first]] = np.arange(len(first))
    next_state = np.append(rank[block], np.int32(-1))[next_state[first]]
    next_state, column = np.unique(next_state, axis=1, return_inverse=True)
    return next_state, final[first], column.reshape(-1)
