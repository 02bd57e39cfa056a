# SPDX-License-Identifier: Apache-2.0
"""The prompt as a part of the response, for `echo` of the API and for vLLM's `prompt_logprobs`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvjax.serving import Output

from .answers import CONTEXT, Answer, Decode, Detokenizer, Piece

IMPOSSIBLE = -9999.0  # the API's log-probability of an impossible token


def prompt_piece(decode: Decode, prompt: Sequence[int], output: Output) -> Piece:
    """The piece with a prompt's text and tokens, and with their log-probabilities if the output has them."""
    answer = Answer(decode, [])
    text = answer.add(prompt, done=True)
    texts = answer.texts(slice(0, len(prompt)))
    return Piece(
        text,
        list(prompt),
        [],
        texts,
        answer.starts,
        list(output.prompt_logprobs),
        list(output.prompt_top_logprobs),
        None,
        0,
    )


def after_prompt(piece: Piece, prompt: Piece) -> Piece:
    """A piece of an answer, with its positions moved to come after the prompt's text."""
    return dataclasses.replace(piece, starts=[start + len(prompt.text) for start in piece.starts])


def prompt_logprobs(
    decode: Decode, prompt: Sequence[int], output: Output, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The log-probabilities of each prompt token and of the likeliest tokens in its place, by token id as text.

    Each has its rank, 1 for the likeliest token, and its text. The first token has None.

    Source: vLLM's `Logprob` in completions and chats.
    """
    logprobs: list[dict[str, dict[str, Any]] | None] = []
    tops = output.prompt_top_logprobs or [{}] * len(prompt)
    columns = zip(prompt, output.prompt_logprobs, output.prompt_ranks, tops, strict=True)
    for position, (token, logprob, rank, top) in enumerate(columns):
        if logprob is None or rank is None:
            logprobs.append(None)
            continue
        entries = {token: (logprob, rank)}
        likeliest = [*(top or {}).items()][:num_top]
        for likely_rank, (likely_token, likely_logprob) in enumerate(likeliest, 1):
            entries.setdefault(likely_token, (likely_logprob, likely_rank))
        before = list(prompt[max(position - CONTEXT, 0) : position])
        logprobs.append(
            {
                str(entry_token): {
                    "logprob": finite(entry_logprob),
                    "rank": entry_rank,
                    "decoded_token": text_after(decode, before, entry_token),
                }
                for entry_token, (entry_logprob, entry_rank) in entries.items()
            }
        )
    return logprobs


def text_after(decode: Decode, before: list[int], token: int) -> str:
    """The text of a token after other tokens, or its own text if it is a part of a character."""
    return Detokenizer(decode, before).add(token) or decode([token])


def finite(logprob: float) -> float:
    """The log-probability as a number for JSON."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
