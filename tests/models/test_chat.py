# SPDX-License-Identifier: Apache-2.0
"""Conversations: the checkpoint's own template, in a sandbox, and tokens that continue the last turn."""

import json

import pytest

pytest.importorskip("jinja2")

from models.chat import Chat, load_template
from models.recall import CHECKPOINT, make_tokenizer

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
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_one_line(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        load_template(folder(tmp_path, template)).render([])


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not valid JSON"):
        load_template(str(tmp_path))


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
