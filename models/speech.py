# SPDX-License-Identifier: Apache-2.0
"""Generated tokens as text that grows with them."""

from __future__ import annotations

from typing import Any


class Speech:
    """The text that a model adds to a prompt, with the space between them; without a tokenizer it is the token ids."""

    def __init__(self, tokenizer: Any, prompt: list[int]):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._shown = ""

    def text(self, tokens: list[int]) -> str:
        """The text of all tokens."""
        before, whole = self._decode(self._prompt), self._decode(self._prompt + tokens)
        return whole[len(before) :] if whole.startswith(before) else self._decode(tokens)

    def more(self, tokens: list[int], *, done: bool) -> str:
        """The part of the text of all tokens so far that was not returned yet.

        The bytes of an unfinished character are held back until the others come, or the tokens are `done`.
        """
        text = self.text(tokens)
        text = text if done else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = text.removeprefix(self._shown) if text.startswith(self._shown) else ""
        if done and not new and text != self._shown:  # a token has changed the text before it
            new = f"\n{text}"
        self._shown += new
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if self._tokenizer else " ".join(map(str, tokens))
