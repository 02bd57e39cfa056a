# SPDX-License-Identifier: Apache-2.0
"""A conversation as token ids that grow from turn to turn, in the form of the checkpoint's own chat template."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any


class Template:
    """A checkpoint's chat template. It came with the checkpoint, so it runs in a sandbox.

    Attributes:
      end: the text of the token that ends a turn; None if the tokenizer's config names none.

    Source: transformers, `apply_chat_template`.
    """

    def __init__(self, text: str, fields: dict[str, Any]):
        """Compiles the template.

        Args:
          text: in Jinja.
          fields: of tokenizer_config.json.

        Raises:
          ValueError: if it is no template, or Jinja is not installed.
        """
        try:
            import jinja2.sandbox  # only a template needs it
        except ModuleNotFoundError:
            raise ValueError('a chat template needs jinja2: pip install "kvjax[models]"') from None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        tokens = {name: _text(value) for name, value in fields.items() if name.endswith("_token")}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self.end = self._tokens.get("eos_token")
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation, up to where the model is to answer.

        Raises:
          ValueError: if the template refuses it.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # a template is code
            raise ValueError(f"chat template: {error}") from error


def load_template(folder: str, other: pathlib.Path | None = None) -> Template | None:
    """The template of a folder: chat_template.jinja, or what tokenizer_config.json has; None if neither.

    Args:
      folder: of a checkpoint.
      other: a file to read in place of the folder's template.

    Raises:
      OSError, ValueError: if a file cannot be read, or is no template.
    """
    config, file = pathlib.Path(folder) / "tokenizer_config.json", pathlib.Path(folder) / "chat_template.jinja"
    try:
        fields = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    except ValueError as error:
        raise ValueError(f"{config}: not valid JSON") from error
    file = other or file
    text = file.read_text(encoding="utf-8") if other or file.exists() else fields.get("chat_template")
    if isinstance(text, list):  # several, by name
        text = {one.get("name"): one.get("template") for one in text}.get("default")
    return None if text is None else Template(text, fields)


class Chat:
    """The ids of a conversation.

    Without a template a turn is its text on a line of its own, behind what the model said.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      template: of the checkpoint, or None.
    """

    def __init__(self, tokenizer: Any, template: Template | None):
        self._tokenizer, self._template = tokenizer, template
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []

    def ask(self, text: str) -> list[int]:
        """The prompt that ends with this turn."""
        if self._template is None:
            first = not self._ids
            self._ids += self._tokenizer.encode(text if first else f"\n{text}", add_special_tokens=first).ids
            self._ids += self._tokenizer.encode("\n", add_special_tokens=False).ids
        else:  # written anew each time: a template may leave out of former answers what nobody needs any more
            self._messages.append({"role": "user", "content": text})
            self._ids = self._tokenizer.encode(self._template.render(self._messages), add_special_tokens=False).ids
        return list(self._ids)

    def answered(self, tokens: list[int], text: str) -> None:
        """Notes what the model said."""
        self._messages.append({"role": "assistant", "content": text})
        self._ids += tokens


def _text(token: Any) -> str | None:
    """The text of a special token, which may be an object with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _tojson(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise ValueError(message)
