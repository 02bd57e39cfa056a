# SPDX-License-Identifier: Apache-2.0
"""Parsers for the formats in which models call tools.

An answer arrives in pieces, and the result does not depend on where they are cut. A parser returns a call when it is
whole. A malformed call stays text. With `is_early`, for streams, a parser returns a call as it arrives, from the
beginning of its arguments on. If the arguments turn out not to be JSON, they include the rest of the call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal

from .tool_json import Arguments, CallReader, Part, Progress, units

_SPACE = " \t\r\n"
_MESSAGE = "<|message|>"
_BEGINNINGS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINNINGS)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=(functions\.)?([^\s<]+)")


class Parser:
    """Splits an answer into its parts. A subclass reads one format.

    Attributes:
      marks: Special tokens which the parser reads as text. Other special tokens have no text.
      call_end: The token at the end of a call, which also ends the answer.
      is_for_all: Whether answers without calls have the format too.
      num_calls: The number of calls so far.
      is_unfinished: Whether the parser has returned a part of a call which is not whole.
    """

    marks: tuple[str, ...] = ()
    call_end: str | None = None
    is_for_all = False

    def __init__(self, names: Collection[str] | None, *, is_early: bool = False, is_parallel: bool = True):
        """Begins an answer.

        Args:
          names: Names of the tools in the request. None disables calls.
          is_early: Whether to return a call before it is whole.
          is_parallel: Whether to return calls after the first call.
        """
        self._names = names
        self._is_early = is_early
        self._is_parallel = is_parallel
        self._buffer = ""
        self._new: list[Part] = []
        self.num_calls = 0
        self.is_unfinished = False

    def add(self, text: str) -> list[Part]:
        """Adds text and returns the new parts which are already certain. Adjacent parts of the same kind are joined."""
        self._buffer += text
        while self._step():
            pass
        return self._joined()

    def end(self, *, is_cut: bool = False) -> list[Part]:
        """Returns the last parts, after the last text. `is_cut` says whether the answer was cut short."""
        self._finish(is_cut=is_cut)
        self._buffer = ""
        return self._joined()

    def _step(self) -> bool:
        """Takes a part of the buffer. Returns whether there may be more to take."""
        raise NotImplementedError

    def _finish(self, *, is_cut: bool) -> None:
        """Takes the rest of the buffer, at the end of an answer."""
        raise NotImplementedError

    def _return(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if text:
            self._new.append(Part(kind, text))

    def _joined(self) -> list[Part]:
        joined: list[Part] = []
        for part in self._new:
            self.num_calls += part.kind == "name"
            if part.kind in ("name", "arguments") and self.num_calls > 1 and not self._is_parallel:
                continue
            if joined and joined[-1].kind == part.kind != "name":
                part = Part(part.kind, joined.pop().text + part.text)
            joined.append(part)
        self._new.clear()
        return joined


class _ObjectParser(Parser):
    """Reads calls which are objects with a name, between other text.

    A call includes the white space and the marks next to it.

    Attributes:
      closing: The mark after a call. None if there is no mark.
      after: Characters which may come between two calls.
    """

    closing: str | None = None
    after = _SPACE

    def __init__(self, names: Collection[str] | None, *, is_early: bool = False, is_parallel: bool = True):
        super().__init__(names, is_early=is_early, is_parallel=is_parallel)
        self._state = self._in_text
        self._before = ""  # the space and the marks before the call
        self._reader = CallReader(None, is_early=False)
        self._is_closed = True

    def _opening(self, text: str) -> int | None:
        """The index at which a text's last mark begins. None if an object after the text would be no call."""
        raise NotImplementedError

    def _held_from(self, text: str) -> int:
        """The index from which a text may belong to the next call."""
        raise NotImplementedError

    def _step(self) -> bool:
        return self._buffer != "" and self._state()

    def _in_text(self) -> bool:
        brace = self._buffer.find("{")
        start = self._opening(self._buffer[:brace]) if brace >= 0 else None
        if start is not None:
            self._return("content", self._buffer[:start])
            self._begin(self._buffer[start:brace], self._buffer[brace:])
            return True
        shown = brace + 1 or self._held_from(self._buffer)
        self._return("content", self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return brace >= 0

    def _begin(self, before: str, rest: str) -> None:
        self._before = before
        self._buffer = rest
        self._is_closed = False
        self._reader = CallReader(self._names_for(before), is_early=self._is_early)
        self._state = self._in_call

    def _names_for(self, before: str) -> Collection[str] | None:
        """The names which a call may have after the marks in `before`. None means any name."""
        del before
        return None

    def _in_call(self) -> bool:
        for end, character in units(self._buffer, self._reader):
            progress, parts = self._reader.add(character)
            self._new += parts
            if progress is Progress.OPEN:
                continue
            is_after = progress in (Progress.AFTER, Progress.REFUSED)
            self._buffer = self._buffer[end - is_after :]
            if progress in (Progress.REFUSED, Progress.NO_CALL):
                self._return("content", self._before + self._reader.text)
                self._state = self._in_text
            else:
                self._state = self._after_call if progress is not Progress.BROKEN else self._in_broken
                self.is_unfinished |= progress is Progress.BROKEN
            return True
        self._buffer = ""
        return False

    def _after_call(self) -> bool:
        self._buffer = self._buffer.lstrip(self.after)
        if self.closing is not None:
            if self._buffer.startswith(self.closing):
                self._buffer = self._buffer.removeprefix(self.closing)
                self._is_closed = True
                return True
            if self.closing.startswith(self._buffer):
                return False
            if self._buffer[0] == "{" and not self._is_closed:
                self._begin("", self._buffer)
                return True
        if self._buffer:
            self._state = self._in_text
        return self._buffer != ""

    def _in_broken(self) -> bool:
        end = -1 if self.closing is None else self._buffer.find(self.closing)
        if end >= 0:
            self._return("arguments", self._buffer[:end].rstrip(_SPACE))
            self._buffer = self._buffer[end:]
            self._state = self._after_call
            return True
        shown = len(self._buffer) if self.closing is None else held_from(self._buffer, [self.closing])
        self._return("arguments", self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return False

    def _finish(self, *, is_cut: bool) -> None:
        del is_cut
        if self._state == self._in_broken:
            self._return("arguments", self._buffer)
        elif self._state != self._in_call:
            self._return("content", self._buffer)
        elif not self._reader.is_whole:
            is_returned = self._is_early and self._reader.has_arguments
            self.is_unfinished |= is_returned
            self._return("content", "" if is_returned else self._before + self._reader.text)


class HermesParser(_ObjectParser):
    """Reads calls of Hermes and Qwen. Each object is between <tool_call> and </tool_call>."""

    marks = opening, closing = "<tool_call>", "</tool_call>"

    def _opening(self, text: str) -> int | None:
        text = text.rstrip(_SPACE)
        return len(text.removesuffix(self.opening).rstrip(_SPACE)) if text.endswith(self.opening) else None

    def _held_from(self, text: str) -> int:
        start = self._opening(text)
        return held_from(text, [self.opening]) if start is None else start


class Llama3Parser(_ObjectParser):
    """Reads calls of Llama 3: objects, perhaps in a list, with or without <|python_tag|> before them.

    Without the tag, an object is a call only if it has arguments and the name of a tool.
    """

    marks = (opening,) = ("<|python_tag|>",)
    call_end = "<|eom_id|>"
    after = _SPACE + ";,]"

    def _opening(self, text: str) -> int:
        text = text.rstrip(_SPACE).removesuffix("[").rstrip(_SPACE)
        return len(text.removesuffix(self.opening).rstrip(_SPACE))

    def _held_from(self, text: str) -> int:
        return min(self._opening(text), held_from(text, [self.opening]))

    def _names_for(self, before: str) -> Collection[str] | None:
        return None if self.opening in before else self._names


class HarmonyParser(Parser):
    """Reads messages of gpt-oss. A message has a header and a body. The header has a channel, and may name a tool.

    A message to a tool is a call in any channel. Other messages are reasoning in the channel `analysis`, and content
    in other channels. A message ends with a mark, or at the beginning of the next message. An answer without any
    header is content.
    """

    marks = ("<|constrain|>", _MESSAGE, *_ENDS)
    call_end = "<|call|>"
    is_for_all = True

    def __init__(self, names: Collection[str] | None, *, is_early: bool = False, is_parallel: bool = True):
        super().__init__(names, is_early=is_early, is_parallel=is_parallel)
        self._is_first = self._in_header = True
        self._kind: Literal["content", "reasoning", "arguments"] = "content"
        self._name: str | None = None  # the tool's name, while the body is a call
        self._arguments: Arguments | None = None

    def _step(self) -> bool:
        return self._header() if self._in_header else self._body()

    def _header(self) -> bool:
        if self._is_first and not _may_be_header(self._buffer):
            self._is_first = self._in_header = False
            return True
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            return False
        self._buffer = rest
        self._is_first = False
        self._in_header = False
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        self._arguments = self._name = None
        if recipient is not None and self._names is not None:
            is_function = recipient[1] is not None or recipient[2] in self._names
            self._name = recipient[2] if is_function else None
        return True

    def _body(self) -> bool:
        end = _END.search(self._buffer)
        shown = held_from(self._buffer, _ENDS, with_space=False) if end is None else end.start()
        self._add_body(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        if end is None:
            return False
        if end[0] not in _BEGINNINGS:
            self._buffer = self._buffer.removeprefix(end[0])
        self._end_body(is_cut=False)
        self._in_header = True
        return True

    def _add_body(self, text: str) -> None:
        if self._name is None:
            self._return(self._kind, text)
            return
        if self._arguments is None:
            text = text.lstrip(_SPACE)
            if not text:
                return
            self._arguments = Arguments(self._name, is_early=self._is_early)
        if not self._arguments.is_whole:
            text = self._add_to_call(self._arguments, text)
        text = text.lstrip(_SPACE) if self._name is not None else text
        if text:  # the rest of the body is not part of a call
            self._kind = "content" if self._name is not None else self._kind
            self._name = None
            self._return(self._kind, text)

    def _add_to_call(self, arguments: Arguments, text: str) -> str:
        """Adds text to the arguments. Returns the text after them."""
        for end, character in units(text, arguments):
            progress, parts = arguments.add(character)
            self._new += parts
            if progress is Progress.OPEN:
                continue
            if progress is Progress.BROKEN:
                self.is_unfinished = True
                self._name = None
                self._kind = "arguments"
            elif progress is Progress.REFUSED:
                self._name = None
                self._kind = "content"
                return arguments.text + text[end - 1 :]
            return text[end:]
        return ""

    def _end_body(self, *, is_cut: bool) -> None:
        if self._name is None:
            return
        if self._arguments is None and not is_cut:
            self._new += [Part("name", self._name), Part("arguments", "{}")]
        elif self._arguments is not None and not self._arguments.is_whole:
            self.is_unfinished |= self._is_early
            self._return("content", "" if self._is_early else self._arguments.text)
        self._name = None

    def _finish(self, *, is_cut: bool) -> None:
        if self._in_header:
            is_header = _may_be_header(self._buffer)
            self._return("content", "" if is_header else self._buffer)
            return
        self._add_body(self._buffer)
        self._end_body(is_cut=is_cut)


def _may_be_header(text: str) -> bool:
    """Whether a text may be the beginning of a header."""
    text = text.lstrip(_SPACE)
    return any(text.startswith(begin) or begin.startswith(text) for begin in ("<|", "to="))


def held_from(text: str, marks: Iterable[str], *, with_space: bool = True) -> int:
    """The index from which a text may begin a mark, or the space before it."""
    sizes = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    longest = max(sizes, default=0)
    end = len(text) - longest
    return len(text[:end].rstrip(_SPACE)) if with_space else end


FORMATS: dict[str, type[Parser]] = {"hermes": HermesParser, "llama3": Llama3Parser, "harmony": HarmonyParser}


def detect(template: str) -> str | None:
    """Detects the format of calls in a chat template. Returns its name, or None.

    Qwen3-Coder and GLM have other contents between the marks of Hermes.
    """
    if "<|channel|>" in template and _MESSAGE in template:
        return "harmony"
    if "<tool_call>" in template and not re.search(r"<function=|<arg_key>", template):
        return "hermes"
    has_header = "<|start_header_id|>" in template or "<|header_start|>" in template
    return "llama3" if has_header and re.search(r'\\?"parameters\\?"\s*:', template) else None
