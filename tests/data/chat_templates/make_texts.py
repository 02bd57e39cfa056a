# SPDX-License-Identifier: Apache-2.0
"""Makes texts.json: texts which transformers renders with the templates of this folder. Run it by hand.

    python -m venv ENV && ENV/bin/pip install transformers==5.24.0 jinja2==3.1.6
    ENV/bin/python tests/data/chat_templates/make_texts.py

The templates are small, and have the constructions of the templates after which they are named.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": " Wo ist <Bob> & wer?\n"}
CONVERSATIONS = {
    "question": [USER],
    "turns": [
        {"role": "system", "content": 'Kurz, bitte – "höflich" \N{GRINNING FACE}.'},
        USER,
        {"role": "assistant", "content": "<think>\nIn Oslo?\n</think>\n\nIn Oslo. "},
        {"role": "user", "content": "Und 'Eve'?"},
    ],
    "roles": [USER, USER, {"role": "assistant", "content": "?"}],
    "tool": [USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": "{}"}],
}
PARAMETERS = {"type": "object", "properties": {"stadt": {"type": "string", "enum": ["Oslo", "Åre"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "wetter", "description": "Das Wetter <heute>", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "zeit"}},
]
WEATHER = {"name": "wetter", "arguments": {"stadt": "Åre", "tage": [1, 2.5, None]}}
TIME = {"name": "zeit", "arguments": {}}
WITH_TOOLS = {
    "question": [USER],
    "call": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": WEATHER}],
        },
        {"role": "tool", "content": "kalt & 'klar'", "tool_call_id": "call_1", "name": "wetter"},
    ],
    "calls": [
        USER,
        {
            "role": "assistant",
            "content": "Moment.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": WEATHER},
                {"id": "call_2", "type": "function", "function": TIME},
            ],
        },
        {"role": "tool", "content": "kalt", "tool_call_id": "call_1", "name": "wetter"},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_2", "name": "zeit"},
        {"role": "assistant", "content": "Kalt, um 12."},
        {"role": "user", "content": "Danke."},
    ],
}


def rendered(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> dict[str, str]:
    """The text, or the message of the template's error."""
    options = {"chat_template": template, "add_generation_prompt": True, "tools": tools}
    try:
        texts, _ = render_jinja_template([messages], **options, **TOKENS)
        return {"text": texts[0]}
    except TemplateError as error:
        return {"error": str(error)}


def main() -> None:
    """Writes the file."""
    texts = {
        path.name: {name: rendered(path.read_text("utf-8"), messages) for name, messages in CONVERSATIONS.items()}
        for path in sorted(HERE.glob("*.jinja"))
    }
    with_tools = {
        path.name: {name: rendered(path.read_text("utf-8"), messages, TOOLS) for name, messages in WITH_TOOLS.items()}
        for path in sorted(HERE.glob("*.jinja"))
    }
    found = {
        "tokens": TOKENS,
        "conversations": CONVERSATIONS,
        "texts": texts,
        "tools": TOOLS,
        "conversations_with_tools": WITH_TOOLS,
        "texts_with_tools": with_tools,
    }
    (HERE / "texts.json").write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
