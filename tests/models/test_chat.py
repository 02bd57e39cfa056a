# SPDX-License-Identifier: Apache-2.0
"""Conversations: the checkpoint's own template, in a process with limits, and tokens that continue the last turn."""

import json
import os
import re
import signal
import time

import pytest

pytest.importorskip("jinja2")

from models import chat, serve
from models.chat import Chat, Template, load_template
from models.recall import CHECKPOINT, make_tokenizer
from tests.drive import DATA

# What transformers renders of templates with the constructions of Llama's, Qwen's and so on; `make_texts.py` made it.
RENDERED = json.loads((DATA / "chat_templates" / "texts.json").read_text(encoding="utf-8"))

# Like the templates of Llama 3 and Qwen: its own line breaks and indents must not show.
TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}
        {{- raise_exception("roles are user and assistant") }}
    {%- endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {{- "<" + message.role + "> " + (message.content | trim) + " <end> " }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<assistant> " }}
{%- endif %}
"""
WHOLE = "<s><user> hi <end> <assistant> yes <end> <user> why <end> <assistant> "
MESSAGES = [{"role": role, "content": text} for role, text in (("user", " hi"), ("assistant", "yes"), ("user", "why"))]


def folder(path, template=TEMPLATE, **fields):
    fields = {"bos_token": {"content": "<s>"}, "eos_token": "<end>", "chat_template": template, **fields}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return str(path)


def test_a_template_is_rendered_as_transformers_does(tmp_path):
    template = load_template(folder(tmp_path))
    assert template.render(MESSAGES) == WHOLE
    assert template.end == "<end>"
    now = load_template(folder(tmp_path, "{{ strftime_now('%Y') }} {{ ['<'] | tojson }}")).render([])
    assert now[:2] == "20" and now.endswith(' ["<"]')


def test_a_template_is_found_where_checkpoints_have_it(tmp_path):
    assert load_template(str(tmp_path)) is None
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    assert load_template(folder(tmp_path, named)).render(MESSAGES) == WHOLE
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_template(str(tmp_path)).render([]) == "from the file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template: Expected an expression"),
        ("{{ raise_exception('no system') }}", "chat template: no system"),
        ("{{ messages.append(1) }}", "chat template: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ '\ud83d' }}", "chat template: 'utf-8' codec can't encode character"),
        ("{{ raise_exception('a' * 9999) }}", "chat template: a{500}$"),
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_one_line(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        load_template(folder(tmp_path, template)).render([])


@pytest.mark.parametrize("name", RENDERED["texts"])
def test_texts_are_those_of_transformers(name):
    template = Template((DATA / "chat_templates" / name).read_text(encoding="utf-8"), RENDERED["tokens"])
    for conversation, wanted in RENDERED["texts"][name].items():
        try:
            found = {"text": template.render(RENDERED["conversations"][conversation])}
        except ValueError as error:
            found = {"error": str(error).removeprefix("chat template: ")}
        assert found == wanted, conversation
    for conversation, wanted in RENDERED["texts_with_tools"][name].items():
        messages = RENDERED["conversations_with_tools"][conversation]
        try:
            found = {"text": template.render(messages, RENDERED["tools"])}
        except ValueError as error:
            found = {"error": str(error).removeprefix("chat template: ")}
        assert found == wanted, conversation


# Templates that would stop whoever renders them: each of them is an error, after which the next text is made.

MEMORY = "chat template: it needs more memory than it may have"
HOSTILE = {
    "{{ 'a' * 10 ** 10 }}": MEMORY,
    "{{ ['a'] * 10 ** 10 }}": MEMORY,
    "{{ 'a'.ljust(10 ** 10) }}": MEMORY,
    "{{ 'a' | center(10 ** 10) }}": MEMORY,
    "{{ '%10000000000d' % 1 }}": MEMORY,
    "{% set it = namespace(text='aa') %}{% for _ in range(99) %}{% set it.text = it.text ~ it.text %}{% endfor %}":
        "chat template: it (needs more memory|takes more than 1 s)",
    "{{ messages[0].role * 5000000 }}": "chat template: it makes 20,000,004 characters, and the most are 16,777,216",
    "{{ 10 ** (10 ** 10) }}": "chat template: it takes more than 1 s",
    "{% for _ in range(9999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}":
        "chat template: it takes more than 1 s",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}": "chat template: maximum recursion depth exceeded",
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_template_takes_more_than_its_process_has(monkeypatch, hostile):
    monkeypatch.setattr(chat, "SECONDS", 1)
    template = Template("{% if messages[0].content == 'go' %}" + hostile + "{% endif %}done", {})
    began = time.thread_time()
    for _ in range(2):
        with pytest.raises(ValueError, match=HOSTILE[hostile]):
            template.render([{"role": "user", "content": "go"}])
        if template.fault is None:  # else it was the compiler that computed a constant
            assert template.render(MESSAGES) == "done"
    assert time.thread_time() - began < 0.5


def test_a_process_that_was_ended_is_started_anew_and_ends_with_its_template():
    template = Template("{{ messages[0].content }}", {})
    for _ in range(2):
        assert template.render(MESSAGES) == " hi"
        template._process.process.send_signal(signal.SIGINT)  # Ctrl-C goes to it too
    template._process.process.kill()
    template._process.process.wait()
    assert template.render(MESSAGES) == " hi"
    process = template._process.process
    del template
    assert process.returncode == -signal.SIGKILL


BROKEN = {
    "{% if %}": "chat template: Expected an expression",
    "{{ 10 ** (10 ** 10) }}": "takes more than 1 s",
    None: "tokenizer_config.json: not valid JSON",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_server_starts_without_chats_where_the_checkpoints_files_are_broken(tmp_path, monkeypatch, template):
    notes, parser = list[str](), serve.make_parser()
    monkeypatch.setattr(serve, "_note", notes.append)
    monkeypatch.setattr(chat, "SECONDS", 1)
    if template is None:
        (tmp_path / "tokenizer_config.json").write_text("{")
    else:
        folder(tmp_path, template)
    found = serve.open_template(parser, parser.parse_args(["--checkpoint", str(tmp_path)]))
    assert found is not None and found.end == (template and "<end>") and len(notes) == 1
    assert notes[0].startswith("chats are refused: ") and BROKEN[template] in notes[0]
    with pytest.raises(ValueError, match=re.escape(BROKEN[template])):
        found.render(MESSAGES)

    (tmp_path / "own.jinja").write_text(template or "{% if %}")
    args = parser.parse_args(["--checkpoint", str(tmp_path), "--chat-template", str(tmp_path / "own.jinja")])
    with pytest.raises(SystemExit):
        serve.open_template(parser, args)


# Files of tokenizers, as folders have them.


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", "\xff", r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: got a JSON list, wanted an object"),
        ("tokenizer_config.json", "null", r"tokenizer_config\.json: got a JSON NoneType, wanted an object"),
        *(("tokenizer_config.json", json.dumps({"chat_template": value}),
           r"tokenizer_config\.json: chat_template: got .*, wanted a text, or a list of objects with name and template")
          for value in (5, True, {}, ["x"], [None], [], [{"name": "rag", "template": "x"}], [{"name": "default"}])),
        *(("tokenizer_config.json", json.dumps({"chat_template": "x", "bos_token": value}),
           r"tokenizer_config\.json: bos_token: got .*, wanted a text, or an object with it as content")
          for value in (5, True, ["<s>"], {}, {"content": 5})),
        ("special_tokens_map.json", "[]", r"special_tokens_map\.json: got a JSON list, wanted an object"),
        ("special_tokens_map.json", '{"eos_token": 2}', r"special_tokens_map\.json: eos_token: got 2, wanted a text"),
        ("chat_template.jinja", "\xff", r"chat_template\.jinja: not UTF-8"),
    ],
)  # fmt: skip
def test_files_with_odd_values_are_named(tmp_path, name, content, complaint):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=complaint) as caught:
        load_template(str(tmp_path))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_file_that_is_none_is_refused_and_does_not_block(tmp_path, name):
    folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    (tmp_path / "chat_template.jinja").exists() or (tmp_path / "chat_template.jinja").write_text("x")
    with pytest.raises(ValueError, match=rf"{name}: got a folder, a pipe or a device, wanted a file$"):
        load_template(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_may_begin_with_a_byte_order_mark(tmp_path, encoding):
    fields = {"bos_token": "<ß>", "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields, ensure_ascii=False), encoding=encoding)
    assert load_template(str(tmp_path)).render([]) == "<ß>"
    (tmp_path / "chat_template.jinja").write_text("-{{ bos_token }}", encoding=encoding)
    assert load_template(str(tmp_path)).render([]) == "-<ß>"


def test_special_tokens_come_from_both_files(tmp_path):
    """As in transformers: flags are no tokens, and the map is left alone beside a table of added tokens."""
    text = "{{ bos_token }} {{ eos_token }} {{ image_token }} {{ call_token }} {{ add_bos_token is defined }}"
    fields = {"add_bos_token": True, "image_token": "<image>", "extra_special_tokens": {"call_token": "<call>"}}
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    template = load_template(folder(tmp_path, text, **fields, bos_token="<bos>"))
    assert template.render([]) == "<s> </s> <image> <call> False" and template.end == "</s>"
    template = load_template(folder(tmp_path, text, **fields, bos_token="<bos>", added_tokens_decoder={}))
    assert template.render([]) == "<bos> <end> <image> <call> False" and template.end == "<end>"


def test_turns_are_put_into_the_template(tmp_path):
    tokenizer, template = (
        make_tokenizer(),
        load_template(folder(tmp_path, "{{ messages | length }} where is {{ messages[-1].content }} ?")),
    )
    chat = Chat(tokenizer, template)
    ask = tokenizer.encode("1 where is bob ?").ids
    assert chat.ask("bob") == ask
    chat.answered(tokenizer.encode("oslo").ids, "oslo")
    assert chat.ask("alice") == tokenizer.encode("3 where is alice ?").ids


def test_the_bundled_model_has_a_template():
    messages = [{"role": "user", "content": "where is bob ?"}]
    for answer in ("oslo", "oslo ."):
        turns = [*messages, {"role": "assistant", "content": answer}, *messages]
        assert load_template(str(CHECKPOINT)).render(turns) == "where is bob ? oslo . where is bob ? "
