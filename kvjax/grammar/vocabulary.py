# SPDX-License-Identifier: Apache-2.0
"""The bytes of each token of a vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The bytes that each token adds to a text.

    Args:
      tokens: V entries; None for a token without a text, such as an end token. A grammar forbids these tokens.

    Raises:
      ValueError: if a token is neither bytes nor None.
    """

    def __init__(self, tokens: Sequence[bytes | None]):
        wrong = next((token for token in tokens if not isinstance(token, bytes | None)), None)
        if wrong is not None:
            raise ValueError(f"tokens: got {wrong!r}, wanted bytes or None")
        self.tokens = tuple(tokens)

    def __len__(self) -> int:
        """Counts the tokens."""
        return len(self.tokens)

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> Vocabulary:
        """Reads the vocabulary of a tokenizer: byte-level BPE, or SentencePiece's with tokens for bytes.

        Args:
          tokenizer: a `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
          size: the number of tokens V of the model's logits; defaults to the tokenizer's. Other tokens have no
            text.

        Raises:
          ValueError: if the tokens' bytes depend on their neighbours, as in a vocabulary of words.
        """
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        fields = json.loads(backend.to_str())
        texts = {token_id: text for text, token_id in backend.get_vocab(with_added_tokens=True).items()}
        to_bytes = _reader(fields)
        special = {entry["id"] for entry in fields["added_tokens"] if entry["special"]}
        count = max(texts, default=-1) + 1
        if size is not None and size < count:
            raise ValueError(f"size: got {size}, wanted at least {count}, the tokenizer's")
        tokens: list[bytes | None] = [None] * (count if size is None else size)
        for token_id, text in texts.items():
            if token_id not in special:
                tokens[token_id] = to_bytes(text)
        return cls(tokens)


def _reader(fields: dict[str, Any]) -> Any:
    """Chooses the function from a token's text to its bytes by the tokenizer's decoder."""
    decoders = [*_steps(fields.get("decoder"), "decoders")]
    kinds = {step["type"] for step in decoders}
    replaces = any(step["type"] == "Replace" and step.get("content") == " " for step in decoders)
    if "ByteLevel" in kinds:
        return _from_letters
    if kinds & {"Metaspace", "ByteFallback"} or replaces:
        return _from_pieces
    wanted = "wanted byte-level BPE, or SentencePiece's pieces"
    raise ValueError(f"tokenizer: got decoders {sorted(kinds)} of a {fields['model']['type']} model, {wanted}")


def _steps(entry: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a part of a tokenizer, including the steps of a sequence."""
    if entry is not None and entry["type"] == "Sequence":
        for step in entry[name]:
            yield from _steps(step, name)
    elif entry is not None:
        yield entry


def _letters() -> dict[str, int]:
    """The letters of byte-level BPE for bytes: visible letters of Latin-1 for themselves, later letters for others.

    Source: GPT-2's `bytes_to_unicode`.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in visible]
    shifted = {chr(0x100 + token_id): value for token_id, value in enumerate(others)}
    return {**{chr(value): value for value in visible}, **shifted}


_LETTERS = _letters()


def _from_letters(text: str) -> bytes:
    if any(letter not in _LETTERS for letter in text):
        return text.encode()
    return bytes(_LETTERS[letter] for letter in text)


def _from_pieces(text: str) -> bytes:
    if match := _BYTE.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace(_SPACE, " ").encode()
