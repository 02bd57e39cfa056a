# SPDX-License-Identifier: Apache-2.0
"""The forms in which models write calls of tools, and the choice of one by the text of a chat template."""

from __future__ import annotations

import dataclasses
import re

from .tool_parser import HarmonyParser, HermesParser, Llama3Parser, Parser


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """A form of calls."""

    parser: type[Parser]
    marks: frozenset[str]  # special tokens whose text the parser reads; other special ones have none
    end: str | None = None  # the token that ends a call, with which the answer ends
    is_whole_answer: bool = False  # whether answers without calls have this form too


FORMATS = {
    "hermes": ToolFormat(HermesParser, frozenset({"<tool_call>", "</tool_call>"})),
    "llama3": ToolFormat(Llama3Parser, frozenset({"<|python_tag|>"}), "<|eom_id|>"),
    "harmony": ToolFormat(
        HarmonyParser,
        frozenset({
            "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
        }),  # fmt: skip
        "<|call|>", is_whole_answer=True,
    ),
}  # fmt: skip


def detect(template: str) -> str | None:
    """The name of the format that a chat template asks a model for, or None.

    Qwen3-Coder and GLM have other contents between the marks of Hermes.
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "<tool_call>" in template and not re.search(r"<function=|<arg_key>", template):
        return "hermes"
    has_header = "<|start_header_id|>" in template or "<|header_start|>" in template
    return "llama3" if has_header and re.search(r'\\?"parameters\\?"\s*:', template) else None
