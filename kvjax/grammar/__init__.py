# SPDX-License-Identifier: Apache-2.0
"""Grammars for decoding: a JSON schema, a regular expression or choices as tables over a vocabulary's tokens.

    vocabulary = kvjax.grammar.Vocabulary.of(tokenizer)
    table = kvjax.grammar.compile_regex(r"[a-z]+@[a-z]+\\.(com|org)", vocabulary)

The tables are arrays of numpy, so that a decode loop follows them without a host: the tokens that may come next in
state `s` are those with `table.next_state[s, table.token_class] >= 0`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.grammar.automaton import Builder
from kvjax.grammar.expressions import Expression, GrammarError, alt, literal
from kvjax.grammar.patterns import pattern_expression
from kvjax.grammar.tokens import TokenTable, token_table
from kvjax.grammar.vocabulary import Vocabulary

__all__ = ["GrammarError", "TokenTable", "Vocabulary", "compile_choices", "compile_regex"]


def _compiled(
    name: str, expression: Expression, vocabulary: Vocabulary, max_states: int, max_classes: int
) -> TokenTable:
    try:
        return token_table(Builder(max_states).build(expression), vocabulary, max_states, max_classes)
    except GrammarError as error:
        raise GrammarError(f"{name}: {error}") from None


def compile_regex(
    pattern: str, vocabulary: Vocabulary, *, max_states: int = 4096, max_classes: int = 512
) -> TokenTable:
    r"""Makes the table of the texts that a regular expression matches as a whole, as by Python's `re.fullmatch`.

    `\d`, `\w` and `\s` are ASCII's; a text is UTF-8. Lookaround, backreferences, word boundaries and inline flags are
    refused.

    Args:
      pattern: the regular expression.
      vocabulary: the tokens' bytes.
      max_states: limit on the table's states.
      max_classes: limit on its classes of tokens.

    Raises:
      GrammarError: naming the construct or the limit.
    """
    try:
        expression = pattern_expression(pattern)
    except GrammarError as error:
        raise GrammarError(f"regex: {error}") from None
    return _compiled("regex", expression, vocabulary, max_states, max_classes)


def compile_choices(
    choices: Sequence[str], vocabulary: Vocabulary, *, max_states: int = 4096, max_classes: int = 512
) -> TokenTable:
    """Makes the table of some texts.

    Args:
      choices: the texts.
      vocabulary: the tokens' bytes.
      max_states: limit on the table's states.
      max_classes: limit on its classes of tokens.

    Raises:
      GrammarError: naming the choice or the limit.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError(f"choices: got {choices!r:.80}, wanted a list of texts")
    return _compiled("choices", alt(*map(literal, choices)), vocabulary, max_states, max_classes)
