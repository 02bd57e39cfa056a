# SPDX-License-Identifier: Apache-2.0
r"""Grammars for decoding: turns a JSON schema, a regular expression or choices into tables over a vocabulary's tokens.

    vocabulary = kvjax.grammar.Vocabulary.of(tokenizer)
    table = kvjax.grammar.compile_regex(r"[a-z]+@[a-z]+\.(com|org)", vocabulary)

The tables are numpy arrays, so a decode loop on the device can follow them. In state `s` the next token may be any
token with `table.next_state[s, table.token_class] >= 0`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvjax.grammar.automaton import Builder
from kvjax.grammar.expressions import Expression, GrammarError, alt, literal
from kvjax.grammar.json_schema import schema_expression
from kvjax.grammar.patterns import pattern_expression
from kvjax.grammar.structures import structure_expression
from kvjax.grammar.tokens import TokenTable, token_table
from kvjax.grammar.vocabulary import Vocabulary

__all__ = [
    "GrammarError",
    "TokenTable",
    "Vocabulary",
    "compile_choices",
    "compile_regex",
    "compile_schema",
    "compile_structure",
]


def _compiled(
    name: str, read: Callable[[Builder], Expression], vocabulary: Vocabulary, max_states: int, max_classes: int
) -> TokenTable:
    """Makes the table of the expression from `read`. An error begins with the path of a part, or with `name`."""
    builder = Builder(max_states)
    try:
        return token_table(builder.whole(read(builder)), vocabulary, max_states, max_classes)
    except GrammarError as error:
        message = str(error)
        raise GrammarError(message if message.startswith(name) else f"{name}: {message}") from None
    except RecursionError:
        raise GrammarError(f"{name}: has too many levels within each other") from None


def compile_regex(
    pattern: str, vocabulary: Vocabulary, *, max_states: int = 4096, max_classes: int = 1024
) -> TokenTable:
    r"""Makes the table of a regular expression, which matches whole texts like Python's `re.fullmatch`.

    `\d`, `\w` and `\s` match only ASCII, and a text is UTF-8. Lookaround, backreferences, word boundaries and inline
    flags are refused.

    Args:
      pattern: the regular expression.
      vocabulary: the tokens' bytes.
      max_states: limit on the table's states.
      max_classes: limit on its classes of tokens.

    Raises:
      GrammarError: naming the construct or the limit.
    """
    return _compiled("regex", lambda _: pattern_expression(pattern), vocabulary, max_states, max_classes)


def compile_choices(
    choices: Sequence[str], vocabulary: Vocabulary, *, max_states: int = 4096, max_classes: int = 1024
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
    return _compiled("choices", lambda _: alt(*map(literal, choices)), vocabulary, max_states, max_classes)


def compile_schema(
    schema: dict[str, Any] | bool | str, vocabulary: Vocabulary, *, max_states: int = 4096, max_classes: int = 1024
) -> TokenTable:
    r"""Makes the table of the JSON texts of a schema. `{"type": "object"}` allows any object.

    The table accepts only valid texts, but not all of them:

    - Properties come in the order of the schema, then additional properties. Without `additionalProperties`, an object
      with named properties has no others. An array with `prefixItems` and without `items` has no further items.
    - A text is compact, with at most one space after `:` and `,`.
    - A string is UTF-8. Without constraints it may have all escapes, with surrogates only in pairs. With a length, a
      pattern or a format, and as the name of an additional property, it has a single spelling: a character stands for
      itself, and `\"`, `\\`, `\b`, `\f`, `\n`, `\r`, `\t` for characters with an escape in JSON. Other control
      characters do not occur. A `pattern` may match anywhere in the string, as in ECMAScript, with ASCII classes.
    - A number may have an exponent of two digits. With bounds or `multipleOf` it is a plain decimal.
    - A schema without `type` has the types of its keywords.
    - A value without a schema has at most 3 levels of objects and arrays, or 5 if `{"type": "object"}` is the whole
      schema. A recursive schema is expanded at most 3 times.

    Annotations are ignored. Other unsupported keywords are refused: `not`, `if`, `contains`,
    `dependentRequired`, `unevaluatedProperties`, `uniqueItems: true`, and `oneOf` unless its branches visibly differ. A
    `maxLength` of N takes 8 N states.

    Args:
      schema: a JSON schema, or its text.
      vocabulary: the tokens' bytes.
      max_states: limit on the table's states.
      max_classes: limit on its classes of tokens.

    Raises:
      GrammarError: naming the unsupported keyword, or the limit.
    """
    return _compiled("schema", lambda builder: schema_expression(schema, builder), vocabulary, max_states, max_classes)


def compile_structure(
    structure: dict[str, Any], vocabulary: Vocabulary, *, max_states: int = 4096, max_classes: int = 1024
) -> TokenTable:
    r"""Makes the table of texts that contain JSON of schemas, such as tool calls in a model's own format.

    An object has one of these types:

    - `const_string`: the text `value`.
    - `json_schema`: a JSON text of the schema `json_schema`.
    - `regex`: a text whose whole matches `pattern`.
    - `any_text`: a text.
    - `sequence`: the `elements` in order.
    - `or`: any of the `elements`.
    - `plus`: `content`, at least once, with the text `separator` in between.

    `json_schema`, `regex` and `any_text` may have a `name`, which errors use for the place. They may also have
    `excludes`, a list of texts and objects. These texts, and the texts of these objects, do not occur in the text.

    Args:
      structure: an object of one of these types.
      vocabulary: the tokens' bytes.
      max_states: limit on the table's states.
      max_classes: limit on its classes of tokens.

    Raises:
      GrammarError: naming the place and the unsupported part, or the limit.

    Example:
      >>> vocabulary = kvjax.grammar.Vocabulary([bytes([value]) for value in range(256)])
      >>> value = {"type": "json_schema", "json_schema": {"type": "boolean"}}
      >>> begin, end = ({"type": "const_string", "value": text} for text in ("<answer>", "</answer>"))
      >>> structure = {"type": "sequence", "elements": [begin, value, end]}
      >>> kvjax.grammar.compile_structure(structure, vocabulary).next_state.shape[0]  # an e ends "true" and "false"
      25

    Source: XGrammar's structural tags.
    """
    return _compiled(
        "structure", lambda builder: structure_expression(structure, builder), vocabulary, max_states, max_classes
    )
