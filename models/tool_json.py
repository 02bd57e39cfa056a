# SPDX-License-Identifier: Apache-2.0
"""Readers for the JSON of a tool call, which arrives character by character."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

_SPACE = " \t\r\n"
_RUN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_STRING = r'"((?:[^"\\]|\\.)*)"'
# A call up to the first brace of its arguments. From here on, a stream may show its name.
_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*(?P<name>{_STRING})\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*\{',
    re.DOTALL,
)
_FIRST_KEY = re.compile(rf"\{{\s*{_STRING}", re.DOTALL)
CALL_KEYS = ("arguments", "function", "id", "name", "parameters", "type")


class Part(NamedTuple):
    """A part of an answer. A name begins a call, and is followed by the arguments of this call."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str


class Progress(enum.Enum):
    """The state of a call after a character."""

    OPEN = "the call goes on"
    DONE = "the call is whole, the last character included"
    AFTER = "the call is whole, and the last character comes after it"
    REFUSED = "the text is not a call, the last character is not a part of it, and nothing has been returned"
    NO_CALL = "the text is not a call, the last character included, and nothing has been returned"
    BROKEN = "a part of the call has been returned, and its arguments are not JSON"


class JsonScanner:
    """Checks whether characters are an object in JSON. Strings may have control characters, such as line breaks.

    Attributes:
      in_string: Whether the last character is within a string.
      is_done: Whether the object is whole.
    """

    def __init__(self, *, in_object: bool = False):
        """Begins before an object. With `in_object`, begins after a value in it."""
        self._open = ["{"] if in_object else []
        self._wants = "comma or end" if in_object else "object"
        self._scalar = ""
        self._hex_digits = 0
        self._is_escaped = False
        self.in_string = self.is_done = False

    @property
    def depth(self) -> int:
        """The number of open objects and lists."""
        return len(self._open)

    @property
    def takes_runs(self) -> bool:
        """Whether `add` takes a run: characters of a string without quotes, escapes and control characters."""
        return self.in_string and not self._is_escaped and not self._hex_digits

    def add(self, character: str) -> bool:
        """Adds a character or a run. Returns whether the text is still the beginning of an object."""
        if self.in_string:
            return len(character) > 1 or self._in_string(character)
        if self._scalar:
            if character in "+-." or (character.isascii() and character.isalnum()):
                self._scalar += character
                return len(self._scalar) < 6 or self._scalar[0] in "-0123456789"
            if self._scalar not in ("true", "false", "null") and not _NUMBER.fullmatch(self._scalar):
                return False
            self._scalar = ""
            self._wants = "comma or end"
        return character in _SPACE or self._between(character)

    def _in_string(self, character: str) -> bool:
        if self._hex_digits:
            self._hex_digits -= 1
            return character in "0123456789abcdefABCDEF"
        if self._is_escaped:
            self._is_escaped = False
            self._hex_digits = 4 if character == "u" else 0
            return character in '"\\/bfnrtu'
        self._is_escaped = character == "\\"
        if character == '"':
            self.in_string = False
            self._wants = "colon" if "key" in self._wants else "comma or end"
        return True

    def _between(self, character: str) -> bool:
        """Takes a character between values which is not a space."""
        wants = self._wants
        if character in "}]":
            may_end = wants == "comma or end" or wants == ("key or end" if character == "}" else "value or end")
            if not may_end or not self._open or self._open.pop() != {"}": "{", "]": "["}[character]:
                return False
            self._wants = "comma or end"
            self.is_done = not self._open
            return True
        if self.is_done:
            return False
        if character == "," and wants == "comma or end":
            self._wants = "key" if self._open[-1] == "{" else "value"
            return True
        if character == ":" and wants == "colon":
            self._wants = "value"
            return True
        if character == "{" and wants in ("object", "value", "value or end"):
            self._open.append(character)
            self._wants = "key or end"
            return True
        if wants not in ("key", "key or end", "value", "value or end"):
            return False
        if character == '"':
            self.in_string = True
            return True
        return "value" in wants and self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if character == "[":
            self._open.append(character)
            self._wants = "value or end"
            return True
        self._scalar = character
        return character in "-0123456789tfn"


def units(text: str, reader: Arguments | CallReader | JsonScanner) -> Iterator[tuple[int, str]]:
    """Yields the characters and runs for a reader, each with the index after it."""
    end = 0
    while end < len(text):
        run = _RUN.match(text, end) if reader.takes_runs else None
        start = end
        end = end + 1 if run is None else run.end()
        yield end, text[start:end]


class Arguments:
    """Reads the arguments of a call, from their first brace on.

    Models write line breaks and other control characters into strings with code. JSON does not allow them, so they
    become escapes. With `is_early`, `add` returns the arguments as they arrive, and otherwise when they are whole.
    """

    def __init__(self, name: str, *, is_early: bool):
        self._new = [Part("name", name)]
        self._is_early = is_early
        self._scanner = JsonScanner()
        self._characters: list[str] = []

    @property
    def text(self) -> str:
        """The characters read so far."""
        return "".join(self._characters)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments have ended."""
        return self._scanner.is_done

    @property
    def takes_runs(self) -> bool:
        """Whether `add` takes a run, as in `JsonScanner`."""
        return self._scanner.takes_runs

    def add(self, character: str) -> tuple[Progress, list[Part]]:
        """Adds a character or a run. Returns the state and the new parts."""
        in_string = self._scanner.in_string
        is_json = self._scanner.add(character)
        if not is_json and not (self._is_early and self._characters):
            return Progress.REFUSED, []
        self._characters.append(character)
        self._new.append(Part("arguments", json.dumps(character)[1:-1] if in_string and character < " " else character))
        if not self._is_early and not self.is_whole:
            return Progress.OPEN, []
        new_parts = self._new
        self._new = []
        return (Progress.BROKEN if not is_json else Progress.DONE if self.is_whole else Progress.OPEN), new_parts


class CallReader:
    """Reads a call which is an object: {"name": text, "arguments": object}, or "parameters" for the arguments.

    If the name comes first, `add` returns the call as its arguments arrive. Any other call, for example with arguments
    in a string or without arguments, has to be whole first. Text after the arguments has no effect.
    """

    def __init__(self, names: Collection[str] | None, *, is_early: bool):
        """Begins before a call. With `names`, the call needs arguments and a name in `names`."""
        self._names = names
        self._is_early = is_early
        self._head: list[str] = []
        self._has_first_key = self._has_inner = False
        self._scanner = JsonScanner()
        self._arguments: Arguments | None = None
        self._tail: JsonScanner | None = None

    @property
    def text(self) -> str:
        """The characters so far, up to the end of the arguments."""
        return "".join(self._head) + ("" if self._arguments is None else self._arguments.text)

    @property
    def takes_runs(self) -> bool:
        """Whether `add` takes a run, as in `JsonScanner`."""
        return (self._tail or self._arguments or self._scanner).takes_runs

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return self._arguments is not None

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are whole."""
        return self._tail is not None

    def add(self, character: str) -> tuple[Progress, list[Part]]:
        """Adds a character or a run. Returns the state and the new parts."""
        if self._tail is not None:
            if not self._tail.add(character):
                return Progress.AFTER, []
            return (Progress.DONE if self._tail.is_done else Progress.OPEN), []
        if self._arguments is None:
            return self._add_to_head(character)
        progress, parts = self._arguments.add(character)
        if progress is Progress.DONE:
            self._tail = JsonScanner(in_object=True)
            progress = Progress.OPEN
        return progress, parts

    def _add_to_head(self, character: str) -> tuple[Progress, list[Part]]:
        if not self._scanner.add(character):
            return Progress.REFUSED, []
        self._head.append(character)
        if self._scanner.is_done:
            call = _call_of(self.text, self._names)
            return (Progress.NO_CALL, []) if call is None else (Progress.DONE, call)
        if character == '"' and not self._scanner.in_string and not self._has_first_key:
            self._has_first_key = True
            first_key = _FIRST_KEY.fullmatch(self.text)
            if self._names is not None and first_key is not None and first_key[1] not in CALL_KEYS:
                return Progress.NO_CALL, []
        if self._scanner.depth == 2 and not self._has_inner:
            self._has_inner = True
            head = _HEAD.fullmatch(self.text)
            if head is None:
                return Progress.OPEN, []
            name = _checked_name(json.loads(head["name"], strict=False), self._names)
            if name is None:
                return Progress.NO_CALL, []
            self._head.pop()
            self._arguments = Arguments(name, is_early=self._is_early)
            return self._arguments.add(character)
        return Progress.OPEN, []


def _call_of(text: str, names: Collection[str] | None) -> list[Part] | None:
    """The parts of a whole call, or None if the text is no call."""
    try:
        call = json.loads(text, strict=False)
        call = call["function"] if isinstance(call.get("function"), dict) else call
        key = "arguments" if "arguments" in call else "parameters"
        arguments = call.get(key)
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False) if arguments.strip() else None
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # an error for halves of surrogate pairs
    except (ValueError, RecursionError):
        return None
    name = _checked_name(call.get("name"), names)
    if name is None or not isinstance(arguments, dict | None) or (names is not None and key not in call):
        return None
    return [Part("name", name), Part("arguments", text)]


def _checked_name(name: Any, names: Collection[str] | None) -> str | None:
    is_name = isinstance(name, str) and name.isprintable() and name != ""
    return name if is_name and (names is None or name in names) else None
