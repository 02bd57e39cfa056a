# SPDX-License-Identifier: Apache-2.0
"""Vocabularies, walks through tables, and Hypothesis' strategies of patterns and schemas."""

import json
import random
import re

import hypothesis.strategies as st

from kvjax.grammar import TokenTable, Vocabulary
from kvjax.grammar.automaton import distances

BYTES = tuple(bytes([value]) for value in range(256))
# Every byte, so that each text can be written, and tokens as a tokenizer has them: words, cuts through characters.
PIECES = (
    b'{"', b'"}', b'":', b'": ', b'", "', b'","', b"}, {", b"[[", b"]}", b" ", b"  ", b"true", b"fal", b"se", b"null",
    b"-1", b"10", b"00", b".5", b"e+1", b"\\u", b"\\n", b"00e9", b"\\ud83d", b"\\ude00", b"name", b"nam", b'e":',
    b"ab", b"ba", b"aba", b"aaaa", b"20", b"24-0", b"T1", b"://", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xe6\x97",
    b"\xa5\xe6\x9c\xac", b"\xf0\x9f", b"\x98\x80", b"a\xf0\x9f\x98", b"\xed\xa0\x80", b"\xff\xfe", b"\n", b"\n\n",
    b"\t", b"@", b".com", b"\x00",
)  # fmt: skip
VOCABULARY = Vocabulary([None, *BYTES, *PIECES, b"", None])


def next_state(table: TokenTable, state: int, token: int) -> int:
    return int(table.next_state[state, table.token_class[token]])


def accepts(table: TokenTable, text: str | bytes, vocabulary: Vocabulary = VOCABULARY) -> bool:
    """Whether a table accepts a text, written byte by byte."""
    numbers = {token: index for index, token in enumerate(vocabulary.tokens)}
    state = 0
    for value in text.encode() if isinstance(text, str) else text:
        state = next_state(table, state, numbers[bytes([value])])
        if state < 0:
            return False
    return bool(table.may_end[state])


def walk(table: TokenTable, vocabulary: Vocabulary, seed: int, max_tokens: int = 60) -> bytes:
    """The text of a random walk through a table, which goes to the nearest end after some tokens."""
    source, ways = random.Random(seed), distances(table.next_state, table.may_end)
    state, text = 0, b""
    stop = source.choice((0.02, 0.3))
    for step in range(100_000):
        if table.may_end[state] and (step >= max_tokens or source.random() < stop):
            return text
        targets = table.next_state[state][table.token_class].tolist()
        tokens = [token for token, target in enumerate(targets) if target >= 0]
        if not tokens:
            assert table.may_end[state], "a state without a way on that is no end"
            return text
        if step >= max_tokens:
            nearest = min(ways[targets[token]] for token in tokens)
            tokens = [token for token in tokens if ways[targets[token]] == nearest]
        else:  # each next state has the same chance, so that a walk leaves its strings
            target = source.choice(sorted({targets[token] for token in tokens}))
            tokens = [token for token in tokens if targets[token] == target]
        token = source.choice(tokens)
        piece = vocabulary.tokens[token]
        assert piece, "a token without a text"
        text += piece
        state = targets[token]
    raise AssertionError("no end")


@st.composite
def vocabularies(draw):
    """All bytes, and random tokens: parts of JSON, and bytes which cut characters."""
    words = st.sampled_from(PIECES) | st.binary(min_size=1, max_size=4) | st.text(max_size=4).map(str.encode)
    tokens = [None, *BYTES, *draw(st.lists(words, max_size=30))]
    return Vocabulary(draw(st.permutations(tokens[:40])) + tokens[40:])


def patterns():
    """Patterns which Python's `re` reads as a grammar does, with ASCII's classes.

    They have at most three repetitions, and none inside another: `re` could take years for more.
    """
    return _patterns().filter(lambda pattern: len(re.findall(r"\)[*+{]", pattern)) <= 3)


@st.composite
def _patterns(draw, depth=3, repeats=True):
    kinds = ["text", "class", "dot"] + (["sequence", "alternatives", "group"] * 2 if depth else [])
    match draw(st.sampled_from(kinds)):
        case "text":
            return re.escape(draw(st.text("abé日😀.\n-]{", min_size=1, max_size=3)))
        case "class":
            members = st.sampled_from(
                ["a", "b-d", "é", "ß-ƀ", "0-9", "日-本", r"\n", r"\]", r"\d", r"\w", r"\s", "😀", r"\u00e9"]
            )
            negation = draw(st.sampled_from(["", "^"]))
            return f"[{negation}{''.join(draw(st.lists(members, min_size=1, max_size=3)))}]"
        case "dot":
            return draw(st.sampled_from([".", r"\d", r"\w", r"\s", r"\S"]))
        case "sequence":
            return "".join(draw(st.lists(_patterns(depth - 1, repeats), max_size=3)))
        case "alternatives":
            return f"(?:{'|'.join(draw(st.lists(_patterns(depth - 1, repeats), min_size=1, max_size=3)))})"
    quantifiers = ["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{,2}"] if repeats else [""]
    return f"({draw(_patterns(depth - 1, False))}){draw(st.sampled_from(quantifiers))}"


NAMES = ("a", "ab", "abc", "name", "größe", 'quo"te', "tab\t", "x y")
PATTERNS = ("^a+b?$", "b", "^[a-zé]{2,4}", r"\d$", r"^(yes|no)$", "")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def _limits(draw, low, high, largest=4):
    first, last = sorted([draw(st.integers(0, largest)), draw(st.integers(0, largest))])
    return {low: first, high: last} if draw(st.booleans()) else draw(st.sampled_from([{}, {low: first}, {high: last}]))


def _string(draw):
    match draw(st.sampled_from(["free", "limits", "pattern", "format"])):
        case "limits":
            return {"type": "string", **_limits(draw, "minLength", "maxLength")}
        case "pattern":
            return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
        case "format":
            return {"type": "string", "format": draw(st.sampled_from(FORMATS))}
    return {"type": "string"}


def _bounded(draw, kind):
    bounds = (
        st.integers(-130, 130) if kind == "integer" else st.sampled_from([-20.5, -3, -0.25, 0, 0.1, 1, 2.75, 99.99])
    )
    low, high = sorted([draw(bounds), draw(bounds)])
    pairs = {"minimum": low, "exclusiveMinimum": low, "maximum": high + 1, "exclusiveMaximum": high + 2}
    keywords = draw(st.sets(st.sampled_from(sorted(pairs)), max_size=2))
    return {"type": kind, **{keyword: pairs[keyword] for keyword in sorted(keywords)}}


SCALARS = st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.5, -2.25]) | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=2)


def _object(draw, depth):
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    schema = {"type": "object", "properties": {name: draw(_schemas(depth - 1)) for name in names}}
    schema["required"] = draw(st.permutations([name for name in names if draw(st.booleans())]))
    additional = draw(st.sampled_from([None, False, True, "schema"]))
    if additional is not None:
        schema["additionalProperties"] = draw(_schemas(depth - 1)) if additional == "schema" else additional
    return schema


def _array(draw, depth):
    schema = {"type": "array", **_limits(draw, "minItems", "maxItems", 3)}
    if draw(st.booleans()):
        schema["items"] = draw(_schemas(depth - 1))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(_schemas(depth - 1), min_size=1, max_size=2))
    return schema


@st.composite
def _schemas(draw, depth):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "types"]
    kinds += ["object", "array"] * 2 + ["anyOf", "allOf", "ref", "oneOf"] if depth else []
    match draw(st.sampled_from(kinds)):
        case "string":
            return _string(draw)
        case ("integer" | "number") as kind:
            if kind == "integer" and draw(st.booleans()):
                return {"type": kind, "multipleOf": draw(st.sampled_from([1, 3, 7, 10]))}
            return _bounded(draw, kind)
        case ("boolean" | "null") as kind:
            return {"type": kind}
        case "enum":
            return {"enum": draw(st.lists(VALUES, min_size=1, max_size=4))}
        case "const":
            return {"const": draw(VALUES)}
        case "types":
            return {
                "type": draw(
                    st.lists(st.sampled_from(["string", "integer", "null", "boolean"]), min_size=1, unique=True)
                )
            }
        case "object":
            return _object(draw, depth)
        case "array":
            return _array(draw, depth)
        case "anyOf":
            return {"anyOf": draw(st.lists(_schemas(depth - 1), min_size=1, max_size=3))}
        case "allOf":
            return {
                "allOf": [{**_object(draw, depth), "additionalProperties": True}, {"properties": {"ab": _string(draw)}}]
            }
        case "ref":
            return {"$ref": f"#/$defs/{draw(st.sampled_from(['word', 'tree']))}"}
    return {
        "oneOf": [_object(draw, depth), _string(draw), {"type": "integer"}, {"type": "array", "items": _string(draw)}]
    }


@st.composite
def schemas(draw):
    """JSON schemas of objects, arrays and scalars with constraints, with references into `$defs`."""
    tree = {
        "type": "object",
        "properties": {"v": _bounded(draw, "integer"), "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    return {
        **draw(_schemas(draw(st.integers(0, 2)))),
        "$defs": {"word": _string(draw), "tree": {**tree, "required": ["v"]}},
    }


def canonical(value, spaces=True):
    """A value as JSON in the form of a grammar."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": ") if spaces else (",", ":"))


TEXTS = {
    "date": "2024-02-29", "time": "23:59:59.5Z", "date-time": "1999-12-31T00:00:00+01:00", "ipv4": "192.168.0.1",
    "uuid": "01234567-89ab-cdef-0123-456789abcdef", "email": "a.b+c@example.org",
}  # fmt: skip
PLAIN = 'ab"\\\n\té日😀 /\x7f'  # characters that a string with constraints may have


def instance(draw, schema, root, level=0):
    """Draws a value which probably satisfies a schema, in the order of its properties. A test validates it."""
    if schema is True or not set(schema) - {"$defs"}:
        return draw(VALUES)
    if "$ref" in schema:
        return instance(draw, root["$defs"][schema["$ref"].split("/")[-1]], root, level + 1)
    if "allOf" in schema:
        first, second = schema["allOf"]
        joint = first["properties"] | second["properties"]
        return instance(draw, {**first, "properties": joint}, root, level)
    for keyword in ("anyOf", "oneOf", "enum"):
        if keyword in schema:
            chosen = draw(st.sampled_from(schema[keyword]))
            return chosen if keyword == "enum" else instance(draw, chosen, root, level)
    if "const" in schema:
        return schema["const"]
    kind = schema["type"] if isinstance(schema["type"], str) else draw(st.sampled_from(schema["type"]))
    match kind:
        case "object":
            optional = [name for name in schema["properties"] if name not in schema.get("required", [])]
            absent = {name for name in optional if level > 2 or draw(st.booleans())}
            members = {name: child for name, child in schema["properties"].items() if name not in absent}
            additional = schema.get("additionalProperties", False)
            if additional and draw(st.booleans()):
                members |= {"zzz": additional}
            return {name: instance(draw, child, root, level + 1) for name, child in members.items()}
        case "array":
            first = schema.get("prefixItems", [])
            max_items = (
                schema.get("maxItems", 4)
                if "items" in schema or not first
                else min(len(first), schema.get("maxItems", 4))
            )
            least = schema.get("minItems", 0)
            count = draw(st.integers(least, max(max_items, least) if level < 2 else least))
            children = [*first, *[schema.get("items", {})] * 4][:count]
            return [instance(draw, child, root, level + 1) for child in children]
        case "string":
            if "format" in schema:
                return TEXTS[schema["format"]]
            if "pattern" in schema:
                return draw(st.from_regex(schema["pattern"].replace("$", r"\Z"), alphabet=PLAIN + "123yesnoaé"))
            if {"minLength", "maxLength"} & schema.keys():
                return draw(st.text(PLAIN, min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 6)))
            return draw(st.text(max_size=5))
        case "integer":
            step = schema.get("multipleOf", 1)
            return step * draw(st.integers(schema.get("minimum", schema.get("exclusiveMinimum", -300)), 300))
        case "number":
            return draw(st.sampled_from([-20.5, -3, -1.75, -0.0, 0, 0.1, 0.11, 0.3, 1, 2.75, 2.8, 99.99, 100.5, 101]))
        case "boolean":
            return draw(st.booleans())
    return None
