# SPDX-License-Identifier: Apache-2.0
"""A conversation as token ids that grow from turn to turn, in the form of the checkpoint's own chat template."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .checkpoint import TOKENIZER_CONFIG
from .fields import read_json, read_text
from .limited_process import LimitedProcess, Stopped
from .loading import open_checkpoint

SECONDS = 2  # of CPU time for a template to compile, and for each text
MOST_BYTES = 512 << 20  # of memory of its process
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # behind a message; transformers' tag, which some templates know
_PROGRAM = pathlib.Path(__file__).with_name("template_process.py")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Template:
    """A checkpoint's chat template. It came with the checkpoint, so it runs in a sandbox, in a process with limits.

    Attributes:
      end: the text of the token that ends a turn; None if the tokenizer's config names none.
      fault: why there are no texts, such as an error of its syntax; None if it compiles.

    Source: transformers, `apply_chat_template`.
    """

    def __init__(
        self, text: str, tokens: dict[str, str], fault: str | None = None, *, for_tools: Template | None = None
    ):
        """Compiles a text in Jinja, or notes why it could not be read; `tokens` are the special ones by name.

        A checkpoint may have another template `for_tools`.
        """
        self._text, self._tokens, self.end, self.fault = text, tokens, tokens.get("eos_token"), fault
        self._for_tools = for_tools
        if fault is None and importlib.util.find_spec("jinja2") is None:
            self.fault = 'a chat template needs jinja2: pip install "kvjax[models]"'
        elif fault is None:
            first = {"template": text}
            self._process = LimitedProcess(_PROGRAM, seconds=SECONDS, most_bytes=MOST_BYTES, first=first)
            try:
                self._text_of(self._process.start)
            except ValueError as error:
                self.fault = str(error)
                self._process.close()

    @property
    def tools_text(self) -> str:
        """The text in Jinja of the template that renders tools."""
        return self._text if self._for_tools is None else self._for_tools.tools_text

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The text of a conversation, up to where the model is to answer.

        Any thread may call it, and waits until the texts of the others are made.

        Args:
          messages: of the conversation.
          tools: that the model may call, as the API has them.
          add_generation_prompt: whether the text ends with the beginning of an answer.
          continue_final_message: whether the text ends with that of the last message, which the model goes on with.
          values: more values for the template by their names, such as `enable_thinking`.

        Raises:
          ValueError: if the template has a fault, refuses the conversation, drops the message that is to be continued,
            or takes too much time or memory.
        """
        if self.fault is not None:
            raise ValueError(self.fault)
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages, tools, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, values=values,
            )  # fmt: skip
        if continue_final_message:
            *others, last = messages
            if not isinstance(last.get("content"), str):
                raise ValueError("chat template: the last message, which was to be continued, has no text")
            messages = [*others, {**last, "content": last["content"] + _CONTINUED}]
        own_values = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        request = {"values": {"documents": None, **self._tokens, **(values or {}), **own_values}}
        text = self._text_of(lambda: self._process.ask(request))
        return _before_end(text) if continue_final_message else text

    def _text_of(self, ask: Callable[[], dict[str, Any]]) -> str:
        """The process's answer."""
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
    """The text up to the end of the message with `_CONTINUED`; a template that trims messages has trimmed its end."""
    before, mark, after = text.rpartition(_CONTINUED.strip())
    if not mark:
        raise ValueError("chat template: it drops the last message, which was to be continued")
    return before if after.startswith(" ") else before.rstrip()


def load_template(folder: str, other: pathlib.Path | None = None) -> Template | None:
    """A checkpoint's template: chat_template.jinja, or what tokenizer_config.json or a GGUF file has; None if neither.

    Args:
      folder: of a checkpoint, or a GGUF file.
      other: a file to read in place of the checkpoint's template.

    Raises:
      OSError, ValueError: if a file cannot be read, or has a value that is neither a template nor a token. An error of
        Jinja's is the template's `fault`.
    """
    checkpoint, file = open_checkpoint(folder), pathlib.Path(folder, "chat_template.jinja")
    config, fields = checkpoint.file_of(TOKENIZER_CONFIG), checkpoint.fields(TOKENIZER_CONFIG)
    of_tools = file.with_name("additional_chat_templates") / "tool_use.jinja"
    if other is not None or file.exists():
        text = read_text(other or file)
        tools_text = read_text(of_tools) if other is None and of_tools.exists() else None
    else:
        text, tools_text = _named(config, fields.get("chat_template"))
    if text is None:
        return None
    tokens = _special_tokens(config, fields)
    return Template(text, tokens, for_tools=None if tools_text is None else Template(tools_text, tokens))


def stop_tokens(
    ends: Iterable[int], tokenizer: Any, template: Template | None, call_end: str | None = None
) -> list[int]:
    """The tokens that end an answer: those that end a text, a turn, and perhaps a call of a tool."""
    texts = [text for text in (template.end if template else None, call_end) if text]
    found = [tokenizer.token_to_id(text) for text in texts] if tokenizer else []
    return [*dict.fromkeys([*ends, *(token for token in found if token is not None)])]


def _named(config: pathlib.Path, template: Any) -> tuple[str | None, str | None]:
    """The template that tokenizer_config.json has, and the one for tools.

    It is a text, or a list of several with names, one of them "default" and perhaps another one "tool_use".
    """
    if template is None or isinstance(template, str):
        return template, None
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        texts = {str(entry.get("name")): entry.get("template") for entry in template}
        text, tools_text = texts.get("default"), texts.get("tool_use")
        if isinstance(text, str) and isinstance(tools_text, str | None):
            return text, tools_text
    wanted = "a text, or a list of objects with name and template, one of them with the name 'default'"
    raise ValueError(f"{config}: chat_template: got {template!r:.80}, wanted {wanted}")


def _special_tokens(config: pathlib.Path, fields: dict[str, Any]) -> dict[str, str]:
    """The special tokens of tokenizer_config.json and special_tokens_map.json by their names.

    As in transformers the map goes first, and is for folders whose tokenizer_config.json has no added_tokens_decoder.
    """
    sources, special = [(config, fields)], config.with_name("special_tokens_map.json")
    if "added_tokens_decoder" not in fields and special.exists():
        sources.append((special, read_json(special)))
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
    """The ids of a conversation. Without a template a turn is a line of its own, after what the model said."""

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
