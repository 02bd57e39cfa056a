# SPDX-License-Identifier: Apache-2.0
"""Restricts answers to a JSON schema, a regular expression or a list of choices, by a `logits_fn` made of arrays.

The automaton of a grammar has a row of `next_state` for each state, and a column for each class of tokens. A decoding
row keeps only its state, a number. Each step gathers the state's row, and from it an entry for each token.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import grammar
from kvjax._arrays import Pytree, described, fence, pick
from kvjax.checks import check_functions, host_integers, static_int
from kvjax.grammar import TokenTable, Vocabulary

NONE = -1  # the state of a row without a constraint
_FIRST = -2  # the state of a row before its first choice in automaton state x is `_FIRST - x`
_END = 0  # the state after a stop token, which allows only stop tokens
_FORBIDDEN = -1  # no state
_STOP_CLASS = 0
MAX_STOP_TOKENS = 16


class Constraints(Pytree):
    """The grammars of rows, as a `logits_fn` with a state. It is a pytree of arrays, so new grammars compile nothing.

    In a `chain` it comes last. `generate`, `run_batch`, `stream`, `rollout` and an engine give rows without a
    `logits_state` the `initial_state`.

    Attributes:
      next_state: i16[grammars, states, classes]; state after a token of each class, -1 if the class is forbidden. Class
        0 has the stop tokens, which lead to state 0.
      token_class: i16[grammars, V]; class of each token.
      stop_tokens: i32[grammars, 16]; padded with -1.

    Source: Outlines, whose automata over tokens run on the host. Here they are arrays in the loop.
    """

    next_state: Any
    token_class: Any
    stop_tokens: Any

    @classmethod
    def create(cls, grammars: int, vocabulary: int, *, max_states: int = 4096, max_classes: int = 1024) -> Constraints:
        """Makes space for grammars of up to `max_states` states each, over a vocabulary of V tokens.

        Until `put` fills a space with a grammar, it allows only token V - 1.
        """
        num_grammars = static_int("grammars", grammars, 1)
        size = static_int("vocabulary", vocabulary, 1)
        for name, limit in ("max_states", max_states), ("max_classes", max_classes):
            if static_int(name, limit, 1) > np.iinfo(np.int16).max - 2:
                raise ValueError(f"{name}: got {limit}, wanted at most {np.iinfo(np.int16).max - 2}")
        no_tokens = TokenTable(np.full((1, 1), -1, np.int32), np.zeros((size,), np.int32), np.ones((1,), np.bool_))
        empty = _placed(no_tokens, np.array([size - 1], np.int32), max_states, max_classes, size)
        return cls(*(jnp.asarray(np.broadcast_to(leaf, (num_grammars, *leaf.shape))) for leaf in empty))

    @classmethod
    def of(
        cls, table: TokenTable, stop_tokens: Sequence[int], *, max_states: int = 4096, max_classes: int = 1024
    ) -> Constraints:
        """The constraint of a grammar, in arrays whose shapes depend only on the limits and the vocabulary.

        Args:
          table: the grammar; see `kvjax.grammar`.
          stop_tokens: tokens that end an answer. They are allowed where the grammar's text is complete.
          max_states: maximum states, which gives the arrays their size.
          max_classes: maximum classes of tokens, which gives the arrays their size.

        Raises:
          ValueError: naming the argument.
        """
        stop = host_integers("stop_tokens", stop_tokens, np.int32, "a list of token ids")
        if not stop.size:
            raise ValueError(
                "stop_tokens: got none, wanted the tokens that end an answer, such as the tokenizer's eos_token_id: "
                "without a stop token a row would go on after its text is complete"
            )
        if stop.size > MAX_STOP_TOKENS or stop.min() < 0:
            raise ValueError(f"stop_tokens: got {reprlib.repr(stop.tolist())}, wanted at most {MAX_STOP_TOKENS} ids")
        for name, got, limit in (
            ("max_states", len(table.next_state), max_states),
            ("max_classes", table.next_state.shape[1], max_classes),
        ):
            if got > limit:
                raise ValueError(f"{name}: got {limit}, wanted at least the {got:,} of the grammar")
        size = max(len(table.token_class), int(stop.max()) + 1)
        leaves = _placed(table, stop, max_states, max_classes, size)
        return cls(*(jnp.asarray(leaf[None]) for leaf in leaves))

    @property
    def grammars(self) -> int:
        """The number of grammars."""
        return self.token_class.shape[0]

    def put(self, grammar: int, other: Constraints) -> Constraints:
        """Replaces grammar number `grammar` by the grammar of `other`.

        Rows in a state of this number continue with the new grammar, so use a number that no request has.

        Raises:
          ValueError: if the number is out of range, or the limits or the vocabulary of `other` do not fit.
        """
        self._check(grammar)
        (_, states, classes) = self.next_state.shape
        size = self.token_class.shape[1]
        if other.next_state.shape != (1, states, classes) or other.token_class.shape[1] > size:
            raise ValueError(
                f"other: got {described(other)}, wanted one grammar with max_states={states - 1}, max_classes="
                f"{classes - 2} and at most {size} tokens"
            )
        forbidden = ((0, 0), (0, size - other.token_class.shape[1]))
        token_class = jnp.pad(other.token_class, forbidden, constant_values=classes - 1)
        new = other.replace(token_class=token_class)
        return jax.tree.map(lambda leaf, one: leaf.at[grammar].set(one[0]), self, new)

    def state(self, grammar: int = 0, tokens: Sequence[int] = ()) -> np.int32:
        """The `logits_state` i32[] of a request: at the start of a grammar, or after these tokens of an answer.

        Raises:
          ValueError: if the number is out of range, or the grammar forbids a token.
        """
        self._check(grammar)
        state = 1
        chosen = host_integers("tokens", tokens, np.int32, "a list of token ids")
        if chosen.size:
            next_state, token_class = jax.device_get((self.next_state[grammar], self.token_class[grammar]))
            for position, token in enumerate(chosen.tolist()):
                new = next_state[state, token_class[token]] if 0 <= token < len(token_class) else _FORBIDDEN
                if new == _FORBIDDEN:
                    raise ValueError(f"tokens: got {token} at {position}, wanted a token that the grammar allows there")
                state = int(new)
        return np.int32(_FIRST - grammar * self.next_state.shape[1] - state)

    @property
    def initial_state(self) -> np.int32:
        """The state of a request without a `logits_state`: the start of a single grammar, or no constraint."""
        return self.state() if self.grammars == 1 else np.int32(NONE)

    def check_request(self, request: Any, state: Any) -> None:
        """Raises a ValueError for a request that could not end where its grammar ends.

        Args:
          request: a `Request`.
          state: its `logits_state`, or the `initial_state`.
        """
        if np.ndim(state):
            raise ValueError(f"logits_state: got {reprlib.repr(state)}, wanted what `state` returns")
        if state == NONE:
            return
        states = self.next_state.shape[1]
        grammar = int(_FIRST - state if state < NONE else state) // states
        self._check(grammar)
        stop = np.asarray(self.stop_tokens[grammar])
        if not np.isin(request.stop_tokens, stop).any():
            wanted = stop[stop >= 0].tolist()
            raise ValueError(f"stop_tokens: got {request.stop_tokens.tolist()}, wanted some of the grammar's, {wanted}")
        if request.sampling is not None and request.sampling.min_tokens > 0:
            raise ValueError(f"min_tokens: got {request.sampling.min_tokens}, wanted 0 under a grammar, which may end")

    def _check(self, grammar: int) -> None:
        if static_int("grammar", grammar, 0) >= self.grammars:
            raise ValueError(f"grammar: got {grammar}, wanted a number of 0..{self.grammars - 1}")

    def __call__(
        self, logits: jax.Array, last: jax.Array, positions: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Sets the logits f32[S, V] of forbidden tokens to -inf. Also returns the rows' states.

        Args:
          logits: f32[S, V]; tokens beyond the grammars' vocabulary are forbidden.
          last: i32[S]; last token of each row, at first the last token of its prompt.
          positions: i32[S]; not used.
          state: i32[S]; -1 for rows without a constraint.

        Raises:
          ValueError: while tracing, if the model has fewer tokens than the grammars.
        """
        del positions
        (rows, vocabulary) = logits.shape
        size = self.token_class.shape[1]
        if vocabulary < size:
            raise ValueError(f"logits: got {vocabulary} tokens, wanted at least the {size} of the grammars")
        is_bound = state != NONE
        is_first = state < NONE
        states = self.next_state.shape[1]
        grammar, current = jnp.divmod(jnp.maximum(jnp.where(is_first, _FIRST - state, state), 0), states)
        after = pick(self.next_state, (grammar, current, pick(self.token_class, (grammar, last)))).astype(jnp.int32)
        # If another logits_fn has forced a forbidden token, the token ends the text like a stop token.
        current = jnp.where(is_first, current, jnp.maximum(after, _END))
        # Without the fence, XLA would gather each entry from the whole table, for each token.
        (class_allowed,) = fence((pick(self.next_state, (grammar, current)) >= 0) | ~is_bound[:, None])
        token_class = pick(self.token_class, grammar).astype(jnp.int32)
        allowed = jnp.take_along_axis(class_allowed, token_class, axis=1, mode="promise_in_bounds")
        if vocabulary > size:
            beyond = jnp.broadcast_to(~is_bound[:, None], (rows, vocabulary - size))
            allowed = jnp.concatenate([allowed, beyond], axis=1)
        state = jnp.where(is_bound, grammar * states + current, NONE).astype(jnp.int32)
        return jnp.where(allowed, logits, -jnp.inf), state


def _placed(
    table: TokenTable, stop: np.ndarray, max_states: int, max_classes: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The leaves of a grammar, padded to these limits, without the axis of grammars."""
    num_states, num_classes = table.next_state.shape
    next_state = np.full((max_states + 1, max_classes + 2), _FORBIDDEN, np.int16)
    inner = next_state[1 : num_states + 1]
    inner[:, 1 : num_classes + 1] = np.where(table.next_state >= 0, table.next_state + 1, _FORBIDDEN)
    inner[table.may_end, _STOP_CLASS] = _END
    next_state[_END, _STOP_CLASS] = _END
    token_class = np.full((size,), max_classes + 1, np.int16)
    token_class[: len(table.token_class)] = table.token_class + 1
    token_class[stop] = _STOP_CLASS
    return next_state, token_class, np.concatenate([stop, np.full((MAX_STOP_TOKENS - len(stop),), -1, np.int32)])


def constrain(
    schema: dict[str, Any] | bool | str | None = None,
    *,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    tokenizer: Any,
    stop_tokens: Sequence[int],
    max_states: int = 4096,
    max_classes: int = 1024,
) -> Constraints:
    """Constrains answers to a JSON schema, a regular expression, or a list of choices.

    Pass it as `logits_fn`, with the same stop tokens. An answer with finish "stop" then has a text of the grammar
    before the stop token. If `max_new_tokens` ends an answer earlier, it is the beginning of such a text. For the same
    tokenizer and limits, all grammars have arrays of the same shapes, with 2 bytes for each pair of a state and a
    class.

    Args:
      schema: a JSON schema, or its text; see `kvjax.grammar.compile_schema`.
      regex: a regular expression for the whole answer; see `kvjax.grammar.compile_regex`.
      choices: texts to choose from.
      tokenizer: a tokenizer of `tokenizers` or `transformers`. To read it once for many grammars, pass a
        `kvjax.grammar.Vocabulary`.
      stop_tokens: tokens that end an answer, allowed only where the text is complete.
      max_states: maximum states of the automaton.
      max_classes: maximum classes of tokens in the automaton.

    Raises:
      ValueError: unless you pass exactly one of schema, regex and choices, and a stop token. A `GrammarError` names the
        place in the schema if the grammar is unsupported or too large.
    """
    given = {"schema": schema, "regex": regex, "choices": choices}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"schema: got {' and '.join(names) or 'none'}, wanted one of schema, regex and choices")
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary.of(tokenizer)
    compiler: Callable[..., TokenTable] = getattr(grammar, f"compile_{names[0]}")
    limits = {"max_states": max_states, "max_classes": max_classes}
    return Constraints.of(compiler(given[names[0]], vocabulary, **limits), stop_tokens, **limits)


class Chain(Pytree):
    """Several `logits_fn`, called in turn.

    Attributes:
      functions: the functions, in order.
    """

    functions: tuple[Any, ...]

    @property
    def initial_state(self) -> tuple[Any, ...] | None:
        """The states of a request without a `logits_state`, or None if no function has a state."""
        states = tuple(initial_state(function) for function in self.functions)
        return None if all(state is None for state in states) else states

    def check_request(self, request: Any, state: Any) -> None:
        """Raises a ValueError for a request that a function does not serve."""
        for function, function_state in zip(self.functions, state or (), strict=False):
            check_request(function, request, function_state)

    def __call__(self, logits: jax.Array, last: jax.Array, positions: jax.Array, *state: Any) -> Any:
        """Calls all functions. Returns the logits, and with a tuple of states also the new states; None is no state."""
        states = state[0] if state else (None,) * len(self.functions)
        new = []
        for function, function_state in zip(self.functions, states, strict=True):
            if function_state is None:
                logits = function(logits, last, positions)
            else:
                logits, function_state = function(logits, last, positions, function_state)
            new.append(function_state)
        return (logits, tuple(new)) if state else logits


def chain(*functions: Any) -> Chain:
    """Combines several `logits_fn`: each gets the logits of the function before it. A constraint comes last.

    The `logits_state` is a tuple with a state for each function, and None for a function without a state. A request
    without a `logits_state` gets the `initial_state` of each.

    Raises:
      ValueError: if an argument is not a function.
    """
    check_functions(**{f"functions[{position}]": function for position, function in enumerate(functions)})
    return Chain(tuple(map(as_tree, functions)))


def as_tree(logits_fn: Any) -> Any:
    """Converts a `logits_fn` to a pytree, whose arrays a program takes as arguments. A plain function is static."""
    leaves = jax.tree.leaves(logits_fn)
    return jax.tree_util.Partial(logits_fn) if leaves and leaves[0] is logits_fn else logits_fn


def initial_state(logits_fn: Any) -> Any:
    """The `logits_state` of a request without a state, or None if the function has none."""
    return getattr(logits_fn, "initial_state", None)


def check_request(logits_fn: Any, request: Any, state: Any) -> None:
    """Raises a ValueError for a request that the function does not serve, if it has a method to check this."""
    check = getattr(logits_fn, "check_request", None)
    if check is not None and state is not None:
        check(request, state)
