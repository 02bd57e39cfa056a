# SPDX-License-Identifier: Apache-2.0
"""Makes texts.json: what transformers renders of the templates in this folder; run by hand, never by the tests.

    python -m venv ENV && ENV/bin/pip install transformers==5.24.0 jinja2==3.1.6
    ENV/bin/python tests/data/chat_templates/make_texts.py

The templates are small, and have the constructions of the templates that they are named after.
"""

from __future__ import annotations

import json
import pathlib

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


def rendered(template: str, messages: list[dict[str, str]]) -> dict[str, str]:
    """The text, or the message of the template's error."""
    try:
        texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **TOKENS)
        return {"text": texts[0]}
    except TemplateError as error:
        return {"error": str(error)}


def main() -> None:
    """Writes the file."""
    texts = {
        path.name: {name: rendered(path.read_text("utf-8"), messages) for name, messages in CONVERSATIONS.items()}
        for path in sorted(HERE.glob("*.jinja"))
    }
    found = {"tokens": TOKENS, "conversations": CONVERSATIONS, "texts": texts}
    (HERE / "texts.json").write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
