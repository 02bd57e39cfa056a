# SPDX-License-Identifier: Apache-2.0
"""Turns conversations into token ids, by the checkpoint's chat template."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .checkpoint import TOKENIZER_CONFIG
from .fields import read_json, read_text
from .limited_process import LimitedProcess, Stopped
from .loading import open_checkpoint

SECONDS = 2  # CPU time for a template to compile, and for each text
MAX_BYTES = 512 << 20  # memory of the template's process
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # ends a message to continue: transformers' tag, which some templates know
_PROGRAM = pathlib.Path(__file__).with_name("template_process.py")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Template:
    """A checkpoint's chat template.

    A template is a program by the checkpoint's author, so it runs in a sandbox, in a process with limits.

    Attributes:
      end: the text of the token after a turn; None if the tokenizer's config names none.
      fault: the reason why the template renders nothing, such as a syntax error; None if it compiles.

    Source: transformers, `apply_chat_template`.
    """

    def __init__(
        self, text: str, tokens: dict[str, str], fault: str | None = None, *, for_tools: Template | None = None
    ):
        """Compiles a template.

        Args:
          text: the template in Jinja.
          tokens: the special tokens by name, such as `{"eos_token": "</s>"}`.
          fault: the reason why the text could not be read; None if it was.
          for_tools: the template for conversations with tools; None if this template renders them too.
        """
        self._text = text
        self._tokens = tokens
        self._for_tools = for_tools
        self.end = tokens.get("eos_token")
        self.fault = fault
        if fault is None and importlib.util.find_spec("jinja2") is None:
            self.fault = 'a chat template needs jinja2: pip install "kvjax[models]"'
        elif fault is None:
            self._process = LimitedProcess(_PROGRAM, seconds=SECONDS, max_bytes=MAX_BYTES, first={"template": text})
            try:
                self._text_of(self._process.start)
            except ValueError as error:
                self.fault = str(error)
                self._process.close()

    @property
    def tools_text(self) -> str:
        """The template for tools, in Jinja."""
        return self._text if self._for_tools is None else self._for_tools.tools_text

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation up to the model's next answer.

        Any thread may call it. Calls wait for each other.

        Args:
          messages: the conversation's messages.
          tools: tools for the model, in the API's form.
          add_generation_prompt: whether the text ends with the beginning of an answer.
          continue_final_message: whether the text ends with the last message, for the model to continue it.
          values: further values for the template by their names, such as `enable_thinking`.

        Raises:
          ValueError: if the template has a fault, refuses the conversation, drops the message to continue, or takes
            too much time or memory.
        """
        if self.fault is not None:
            raise ValueError(self.fault)
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                values=values,
            )
        if continue_final_message:
            *before, last = messages
            if not isinstance(last.get("content"), str):
                raise ValueError("chat template: the last message, which was to be continued, has no text")
            messages = [*before, {**last, "content": last["content"] + _CONTINUED}]
        reserved = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        request = {"values": {"documents": None, **self._tokens, **(values or {}), **reserved}}
        text = self._text_of(lambda: self._process.ask(request))
        return _before_end(text) if continue_final_message else text

    def _text_of(self, ask: Callable[[], dict[str, Any]]) -> str:
        """Returns the text in the process's answer."""
        try:
            answer = ask()
        except Stopped as error:
            raise ValueError(f"chat template: {error}") from None
        except RecursionError:
            raise ValueError("chat template: the values are nested too deeply") from None
        if "error" in answer:
            raise ValueError(f"chat template: {answer['error']}")
        return answer["text"]


def _before_end(text: str) -> str:
    """Returns the text before `_CONTINUED`. Trims it if the template trims messages."""
    before, mark, after = text.rpartition(_CONTINUED.strip())
    if not mark:
        raise ValueError("chat template: it drops the last message, which was to be continued")
    return before if after.startswith(" ") else before.rstrip()


def load_template(folder: str, replacement: pathlib.Path | None = None) -> Template | None:
    """Loads a checkpoint's template from chat_template.jinja, tokenizer_config.json or a GGUF file.

    Returns None if the checkpoint has no template.

    Args:
      folder: folder of a checkpoint, or GGUF file.
      replacement: a file to read in place of the checkpoint's template.

    Raises:
      OSError, ValueError: if a file cannot be read, or a template or token has a value of another type. The template's
        `fault` has errors in Jinja.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.file_of(TOKENIZER_CONFIG)
    fields = checkpoint.fields(TOKENIZER_CONFIG)
    file = pathlib.Path(folder, "chat_template.jinja")
    tools_file = file.with_name("additional_chat_templates") / "tool_use.jinja"
    if replacement is not None or file.exists():
        text = read_text(replacement or file)
        tools_text = read_text(tools_file) if replacement is None and tools_file.exists() else None
    else:
        text, tools_text = _named(config, fields.get("chat_template"))
    if text is None:
        return None
    tokens = _special_tokens(config, fields)
    return Template(text, tokens, for_tools=None if tools_text is None else Template(tools_text, tokens))


def stop_tokens(
    ends: Iterable[int], tokenizer: Any, template: Template | None, call_end: str | None = None
) -> list[int]:
    """Returns the tokens after which an answer ends: the ends of a text, of a turn and of a tool call."""
    texts = [text for text in (template.end if template else None, call_end) if text]
    more_ends = [tokenizer.token_to_id(text) for text in texts] if tokenizer else []
    return [*dict.fromkeys([*ends, *(token for token in more_ends if token is not None)])]


def _named(config: pathlib.Path, template: Any) -> tuple[str | None, str | None]:
    """Returns the texts of the templates "default" and "tool_use" in tokenizer_config.json.

    The file has a single text, or a list of texts with names.
    """
    if template is None or isinstance(template, str):
        return template, None
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        texts = {str(entry.get("name")): entry.get("template") for entry in template}
        text = texts.get("default")
        tools_text = texts.get("tool_use")
        if isinstance(text, str) and isinstance(tools_text, str | None):
            return text, tools_text
    wanted = "a text, or a list of objects with name and template, among them 'default'"
    raise ValueError(f"{config}: chat_template: got {template!r:.80}, wanted {wanted}")


def _special_tokens(config: pathlib.Path, fields: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens of tokenizer_config.json and special_tokens_map.json by their names.

    As in transformers, the map counts only if tokenizer_config.json has no added_tokens_decoder, and then overrides it.
    """
    sources = [(config, fields)]
    token_map = config.with_name("special_tokens_map.json")
    if "added_tokens_decoder" not in fields and token_map.exists():
        sources.append((token_map, read_json(token_map)))
    tokens = {}
    for file, values in sources:
        extra = values.get("extra_special_tokens")
        for name, value in {**values, **(extra if isinstance(extra, dict) else {})}.items():
            text = value.get("content") if isinstance(value, dict) else value  # an object has properties too
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
            elif name in _NAMED and value is not None:  # add_bos_token is a flag
                raise ValueError(f"{file}: {name}: got {value!r:.80}, wanted a text, or an object with it as content")
    return tokens


class Chat:
    """The token ids of a conversation. Without a template each turn is a line."""

    def __init__(self, tokenizer: Any, template: Template | None):
        self._tokenizer = tokenizer
        self._template = template
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []

    def ask(self, text: str) -> list[int]:
        """Returns the prompt up to the end of this turn of the user."""
        if self._template is None:
            is_first = not self._ids
            self._ids += self._tokenizer.encode(text if is_first else f"\n{text}", add_special_tokens=is_first).ids
            self._ids += self._tokenizer.encode("\n", add_special_tokens=False).ids
        else:  # written anew each time: a template may drop parts of earlier answers
            self._messages.append({"role": "user", "content": text})
            self._ids = self._tokenizer.encode(self._template.render(self._messages), add_special_tokens=False).ids
        return list(self._ids)

    def answered(self, tokens: list[int], text: str) -> None:
        """Adds the model's answer to the conversation."""
        self._messages.append({"role": "assistant", "content": text})
        self._ids += tokens
