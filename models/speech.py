# SPDX-License-Identifier: Apache-2.0
"""Tokens as text that grows while they come."""

from __future__ import annotations

from typing import Any


class Speech:
    """What a model says after a prompt: text with the spaces that belong between them.

    Args:
      tokenizer: a `tokenizers.Tokenizer`; None: the text is the token ids.
      prompt: token ids.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._said = ""

    def text(self, tokens: list[int]) -> str:
        """The text of all tokens."""
        before, all_ = self._decode(self._prompt), self._decode(self._prompt + tokens)
        return all_[len(before) :] if all_.startswith(before) else self._decode(tokens)

    def more(self, tokens: list[int], *, done: bool) -> str:
        """What of the text of all tokens so far was not handed out yet.

        The bytes of an unfinished character are held back until the rest has come, or until the tokens are `done`.
        """
        text = self.text(tokens)
        text = text if done else text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = text.removeprefix(self._said) if text.startswith(self._said) else ""
        if done and not new and text != self._said:  # a token has changed the text before it
            new = f"\n{text}"
        self._said += new
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if self._tokenizer else " ".join(map(str, tokens))
