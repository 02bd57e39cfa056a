# SPDX-License-Identifier: Apache-2.0
"""Parsers of answers with calls of tools, and the choice of a parser by a chat template."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import chat
from models.recall import CHECKPOINT
from models.tool_calls import FORMATS, detect
from models.tool_json import JsonScanner
from tests.drive import DATA

NAMES = frozenset({"f", "get_weather"})


def parsed(name, text, cuts=(), *, is_cut=False, names=NAMES, **options):
    """The parts of an answer that comes in pieces, those of a kind joined, and its parser."""
    parser, joined = FORMATS[name](names, **options), []
    bounds = [0, *sorted(cuts), len(text)]
    parts = [part for start, end in itertools.pairwise(bounds) for part in parser.add(text[start:end])]
    for kind, part in [*parts, *parser.end(is_cut=is_cut)]:
        assert part or kind == "name"
        if joined and joined[-1][0] == kind != "name":
            joined[-1] = (kind, joined[-1][1] + part)
        else:
            joined.append((kind, part))
    return joined, parser


def calls_of(parts):
    """(name, arguments as a value) of each call."""
    names = [text for kind, text in parts if kind == "name"]
    return list(zip(names, (json.loads(text) for kind, text in parts if kind == "arguments"), strict=True))


def content_of(parts):
    return "".join(text for kind, text in parts if kind == "content")


# Answers as models write them.

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TRICKY = st.sampled_from(
    ["</tool_call>", "<tool_call>{", "<|call|", "}", '"', "\\", "[{", "\u2028", "\N{GRINNING FACE}"]
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=6) | TRICKY
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)
STYLES = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 2]),
        "separators": st.sampled_from([(",", ":"), (", ", ": ")]),
    }
)


def written(name, calls, style, content):
    """An answer with calls in a format."""
    texts = [(called, json.dumps(arguments, **style)) for called, arguments in calls]
    if name == "hermes":
        objects = [f'<tool_call>\n{{"name": "{called}", "arguments": {text}}}\n</tool_call>' for called, text in texts]
        return "\n".join([*([content] if content else []), *objects])
    if name == "llama3":
        return content + "; ".join(f'{{"name": "{called}", "parameters": {text}}}' for called, text in texts)
    messages = [f"<|channel|>final<|message|>{content}<|end|>"] if content else []
    messages += [
        f"<|channel|>commentary to=functions.{called} <|constrain|>json<|message|>{text}<|call|>"
        for called, text in texts
    ]
    return "<|start|>assistant".join(messages)


@pytest.mark.parametrize("name", FORMATS)
@given(
    calls=CALLS, style=STYLES, content=st.sampled_from(["", "Well:", "a < b {"]), is_early=st.booleans(), data=st.data()
)
def test_calls_are_found_with_their_arguments_however_the_text_is_cut(name, calls, style, content, is_early, data):
    text = written(name, calls, style, content)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=9))
    parts, parser = parsed(name, text, cuts, is_early=is_early)
    assert (calls_of(parts), content_of(parts)) == (calls, content)
    assert parser.num_calls == len(calls) and not parser.is_unfinished
    assert [kind for kind, _ in parts] == ["content"] * bool(content) + ["name", "arguments"] * len(calls)
    only_first, _ = parsed(name, text, cuts, is_early=is_early, is_parallel=False)
    assert calls_of(only_first) == calls[:1] and content_of(only_first) == content


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "_call>",
            "<|python_tag|>",
            "<|py",
            "{",
            "}",
            "[",
            "]",
            ";",
            ",",
            " ",
            "\n",
            '{"name": "f", ',
            '"arguments": ',
            '"parameters": {',
            '"a": 1',
            "tru",
            '"x',
            '"',
            "\\",
            "ab",
            "<|channel|>",
            "<|end|>",
            "final",
            "analysis",
            "commentary to=functions.f",
            "<|message|>",
            "<|start|>assistant",
            "<|",
            "to=f",
        ]
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", FORMATS)
@given(fragments=FRAGMENTS, is_cut=st.booleans(), is_early=st.booleans(), data=st.data())
def test_any_text_has_the_same_parts_however_it_is_cut(name, fragments, is_cut, is_early, data):
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    whole, parser = parsed(name, text, is_cut=is_cut, is_early=is_early)
    for some in (cuts, range(len(text))):
        assert parsed(name, text, some, is_cut=is_cut, is_early=is_early)[0] == whole
    early, of_early = parsed(name, text, is_cut=is_cut, is_early=True)
    late, of_late = parsed(name, text, is_cut=is_cut)
    assert not of_late.is_unfinished and all(isinstance(value, dict) for _, value in calls_of(late))
    assert of_early.is_unfinished or early == late
    if not parser.num_calls and name != "harmony":
        assert content_of(whole) == text and len(whole) <= 1


MALFORMED = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": True}}\n</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call><function=f></function></tool_call>",
        "<tool_call> no",
        "<tool_call>",
        '{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": "a b"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}</tool_call>',
    ],
    "llama3": [
        '{"name": "other", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "Bob", "age": 3}',
        '{"city": "Oslo"}',
        "[1, 2]",
        "<|python_tag|>brave_search.call(query='a')",
        '{"name": "f", "parameters": {"a": nul}}',
        "{{}}",
        "[",
        "{",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_text(name, text):
    for before in ("", "See: "):
        parts, parser = parsed(name, before + text)
        assert parts == [("content", before + text)] and not parser.num_calls


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),  # the model ends without the tag
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', [("unheard_of", {})]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
            [("f", {"a": 1})],
        ),  # a brace is missing
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\t"}}</tool_call>', [("f", {"a": "x\ny\t"})]),
        (
            "hermes",
            '<tool_call>\n{"name": "f"}\n{"name": "get_weather"}\n</tool_call>',
            [("f", {}), ("get_weather", {})],
        ),
        ("llama3", '<|python_tag|>{"name": "unheard_of", "parameters": {"a": 1}}', [("unheard_of", {"a": 1})]),
        ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ("llama3", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', [("f", {"a": 1})]),
        (
            "llama3",
            '[{"name": "f", "parameters": {}},\n {"name": "f", "arguments": {"a": 1}}]',
            [("f", {}), ("f", {"a": 1})],
        ),
        ("llama3", '{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}', [("f", {}), ("f", {})]),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}", [("f", {})]),
        ("harmony", "<|channel|>analysis to=functions.f code<|message|>\n{}\n<|call|>", [("f", {})]),
        ("harmony", "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", [("f", {})]),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>", [("f", {})]),
    ],
)
def test_forms_that_models_drift_to_are_calls_too(name, text, wanted):
    for is_early in (False, True):
        parts, parser = parsed(name, text, is_early=is_early)
        assert calls_of(parts) == wanted and not content_of(parts) and not parser.is_unfinished


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Oslo.", [("content", "Oslo.")]),
        ("<|channel|>final<|message|>Oslo.<|return|>", [("content", "Oslo.")]),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Oslo.",
            [("reasoning", "Hm."), ("content", "Oslo.")],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>commentary<|message|>I look.",  # no end
            [("reasoning", "Hm."), ("content", "I look.")],
        ),
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", [("content", "1 + 1")]),
        ('<|channel|>commentary to=functions.f<|message|>{"a": tru}<|call|>', [("content", '{"a": tru}')]),
        ("<|channel|>commentary to=functions.f<|message|>none<|call|>", [("content", "none")]),
        ("<|channel|>commentary to=fun", []),
    ],
)
def test_channels_are_reasoning_and_content(text, wanted):
    assert parsed("harmony", text)[0] == wanted
    assert parsed("harmony", text, is_early=True)[0] == wanted or "tru}" in text


def test_a_call_that_is_cut_is_no_call_of_a_whole_answer_and_unfinished_in_a_stream():
    beginnings = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1',
        "llama3": '{"name": "f", "parameters": {"a": 1',
        "harmony": '<|channel|>commentary to=functions.f<|message|>{"a": 1',
    }
    for name, text in beginnings.items():
        whole, _ = parsed(name, text, is_cut=True)
        assert [kind for kind, _ in whole] == ["content"]
        early, parser = parsed(name, text, is_cut=True, is_early=True)
        assert early == [("name", "f"), ("arguments", '{"a": 1')] and parser.is_unfinished
    assert parsed("harmony", "<|channel|>commentary to=functions.f<|message|>", is_cut=True)[0] == []


def test_a_stream_gives_a_call_as_it_comes_and_its_rest_if_it_turns_out_malformed():
    parser = FORMATS["hermes"](NAMES, is_early=True)
    text = '<tool_call>{"name": "f", "arguments": {"a": tru}} \n</tool_call> ok'
    found = [parser.add(character) for character in text]
    assert found[text.index('{"a"')] == [("name", "f"), ("arguments", "{")]
    assert found[text.index('"a"')] == [("arguments", '"')]
    parts = parsed("hermes", text, is_early=True)[0]
    assert parts == [("name", "f"), ("arguments", '{"a": tru}}'), ("content", "ok")] and parser.is_unfinished


def test_nothing_is_a_call_where_no_tool_is():
    assert parsed("harmony", "<|channel|>commentary to=functions.f<|message|>{}", names=None)[0] == [("content", "{}")]


@given(
    st.lists(
        st.sampled_from(
            [
                '{"a": ',
                "{",
                "}",
                "[",
                "]",
                ",",
                ":",
                '"',
                "a",
                "\\",
                "u00e9",
                "-0",
                "1",
                ".5",
                "e+1",
                "01",
                "true",
                "null",
                "nul",
                " ",
                "\n",
                '"b"',
                '{"c": []}',
                "NaN",
                "é",
            ]
        ),
        max_size=10,
    )
    | VALUES.map(json.dumps).map(list)
)
def test_the_scanner_takes_what_json_takes(pieces):
    text = '{"x": ' + "".join(pieces) + "}"
    scanner = JsonScanner()
    is_json = all(scanner.add(character) for character in text) and scanner.is_done
    try:
        json.loads(text, strict=False, parse_constant=lambda _: 1 / 0)
        wanted = True
    except (ValueError, ZeroDivisionError):
        wanted = False
    assert is_json == wanted


# The choice of a format.


def test_a_template_shows_its_format():
    files = {path.stem: path.read_text("utf-8") for path in (DATA / "chat_templates").glob("*_tools.jinja")}
    assert {stem: detect(text) for stem, text in files.items()} == {
        "hermes_tools": "hermes",
        "llama_tools": "llama3",
        "harmony_tools": "harmony",
    }
    assert detect("<tool_call>\n<function=example>") is None is detect("<tool_call>{name}\n<arg_key>")
    assert detect(chat.load_template(str(CHECKPOINT)).tools_text) is None


def test_a_checkpoint_may_have_another_template_for_tools(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "<tool_call>{{ tools | length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "files" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "files" / "chat_template.jinja").write_text("plain")
    (tmp_path / "files" / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>{{ tools | length }}")
    for folder in (tmp_path, tmp_path / "files"):
        template = chat.load_template(str(folder))
        assert template.render([]) == template.render([], []) == "plain" and detect(template.tools_text) == "hermes"
        assert template.render([], [{}, {}]) == "<tool_call>2"
