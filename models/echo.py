# SPDX-License-Identifier: Apache-2.0
"""The prompt in an answer: `echo`, whose tokens come before the answer's, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvjax.serving import Output

from .answers import CONTEXT, Answer, Decode, Detokenizer, Piece

IMPOSSIBLE = -9999.0  # the API's log-probability of a token that cannot come


def prompt_piece(decode: Decode, prompt: Sequence[int], output: Output) -> Piece:
    """The piece with a prompt's text and tokens, and with their log-probabilities if the output has them."""
    answer = Answer(decode, [])
    text = answer.add(prompt, done=True)
    every = slice(0, len(prompt))
    return Piece(
        text,
        list(prompt),
        [],
        answer.texts(every),
        answer.starts,
        list(output.prompt_logprobs),
        list(output.prompt_top_logprobs),
        None,
        0,
    )


def after_prompt(piece: Piece, prompt: Piece) -> Piece:
    """A piece of an answer that comes after its prompt's text."""
    return dataclasses.replace(piece, starts=[start + len(prompt.text) for start in piece.starts])


def prompt_logprobs(
    decode: Decode, prompt: Sequence[int], output: Output, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The log-probabilities of each prompt token and of the likeliest ones in its place; None for the first token.

    The ids name them. Each has its rank, 1 for the likeliest token, and its text.

    Source: vLLM's `Logprob` in completions and chats.
    """
    found: list[dict[str, dict[str, Any]] | None] = []
    tops = output.prompt_top_logprobs or [{}] * len(prompt)
    columns = zip(prompt, output.prompt_logprobs, output.prompt_ranks, tops, strict=True)
    for position, (token, logprob, rank, top) in enumerate(columns):
        if logprob is None or rank is None:
            found.append(None)
            continue
        likeliest = [(other, value, 1 + order) for order, (other, value) in enumerate((top or {}).items())]
        entries = {token: (logprob, rank)}
        entries |= {other: (value, order) for other, value, order in likeliest[:num_top] if other != token}
        before = list(prompt[max(position - CONTEXT, 0) : position])
        found.append(
            {
                str(other): {
                    "logprob": finite(value),
                    "rank": order,
                    "decoded_token": text_after(decode, before, other),
                }
                for other, (value, order) in entries.items()
            }
        )
    return found


def text_after(decode: Decode, before: list[int], token: int) -> str:
    """The text of a token after others; by itself if it is a part of a character."""
    return Detokenizer(decode, before).add(token) or decode([token])


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
