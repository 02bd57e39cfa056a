# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's HTTP API, as data: what each field asks of an engine, and the errors of those that are wrong.

`SERVED`, `HARMLESS` and `REFUSED` name the fields of OpenAI's API and of vLLM's, which has more. The server ignores a
field that neither of them has.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvjax

MOST_INT = 2**30
MOST_STOP, MOST_STOP_CHARACTERS, MOST_SALT, MOST_BIASES = 4, 1024, 256, 300
OWN_SALTS = "kvjax-"  # the beginning of salts that no client may choose

SERVED = frozenset({
    "best_of", "cache_salt", "echo", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "min_tokens", "model", "n", "parallel_tool_calls",
    "presence_penalty", "priority", "prompt", "prompt_logprobs", "seed", "stop", "stop_token_ids", "stream",
    "stream_options", "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p",
})  # fmt: skip
# No answer depends on these, at least where all fields of `REFUSED` have no effect: the server ignores them.
HARMLESS = frozenset({
    "guided_decoding_backend", "guided_whitespace_pattern", "media_io_kwargs", "metadata", "mm_processor_kwargs",
    "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "spaces_between_special_tokens", "store", "user",
})  # fmt: skip
# An answer would depend on these. Each has the values that leave an answer as it is; null does so too. One more field,
# `add_special_tokens`, has only the value by which the server encodes: true for completions, false for chats.
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "allowed_token_ids": (), "audio": (), "bad_words": ([],), "chat_template": (),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "documents": ([],), "early_stopping": (False,),
    "function_call": ("none", "auto"), "functions": ([],), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_json_object": (False,), "guided_regex": (),
    "include_reasoning": (True,), "include_stop_str_in_output": (False,), "kv_transfer_params": (),
    "length_penalty": (1,), "logits_processors": ([],), "logprob_token_ids": ([],), "min_p": (0,),
    "modalities": (["text"],), "prompt_embeds": (), "reasoning_effort": (),
    "repetition_detection": (), "repetition_penalty": (1,), "response_format": ({"type": "text"},),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "structural_tag": (), "structured_outputs": (), "suffix": ("",), "thinking_token_budget": (),
    "truncate_prompt_tokens": (), "use_beam_search": (False,),
    "verbosity": ("medium",), "vllm_xargs": ({},), "web_search_options": (),
}  # fmt: skip


class ApiError(Exception):
    """An error in the API's form: a status of HTTP, a body, and headers of the response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, *,
        kind: str = "invalid_request_error", headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers
        self._fields = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON."""
        return {"error": self._fields}


def refuse(name: str, got: Any, wanted: str) -> ApiError:
    """The error of a field with a wrong value."""
    return ApiError(400, f"{name}: got {_short(got)}, wanted {wanted}", name)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of requests."""

    max_length: int  # tokens of a prompt with its answer
    samples: int  # the most of a prompt
    top_logprobs: int  # the most that an engine notes
    prompts: int = 64  # the most of a request


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request."""

    definitions: list[dict[str, Any]]  # for the template
    choice: str  # "auto": the model decides on calls; "none": nothing is a call
    is_parallel: bool  # whether an answer may have several calls

    @property
    def names(self) -> frozenset[str] | None:
        """The names that calls may have; None: nothing is a call."""
        if not self.definitions or self.choice == "none":
            return None
        return frozenset(tool["function"]["name"] for tool in self.definitions)


@dataclasses.dataclass
class Wish:
    """Everything of a request but its prompt."""

    max_tokens: int | None  # None: as many as fit
    sampling: kvjax.Sampling
    penalties: dict[str, Any] | None  # arguments of `Penalties.of`; None: the request has none
    seed: int  # a random one if the request has none
    n: int  # samples
    stop: list[str]
    stop_tokens: list[int]  # besides the model's
    ignores_eos: bool  # whether the model's stop tokens do not end it
    logprobs: int | None  # the number of likeliest tokens to tell; None: no log-probabilities
    echoes: bool  # whether the prompt comes before the answer
    prompt_logprobs: int | None  # as `logprobs`, of the prompt
    priority: int  # an engine's: higher first
    salt: str | None  # of the namespace; None: the namespace of all who have none
    streams: bool  # whether it is answered by events
    includes_usage: bool  # whether the last event is the usage
    tools: Tools | None = None  # of a chat; see `openai_messages.read_tools`

    def prompt_logprobs_from(self, length: int) -> int | None:
        """The first token, of a prompt of this length, whose log-probability is wanted; see `kvjax.serving.Request`."""
        if self.prompt_logprobs is not None or (self.echoes and self.logprobs is not None):
            return 0
        return None if self.max_tokens != 0 else length


class Fields:
    """The fields of a request, each checked as it is read; null is like none."""

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it is."""
        value = self._fields.get(name)
        return default if value is None else value

    def checked(self, name: str, default: Any, wanted: str, is_wanted: Callable[[Any], bool]) -> Any:
        """A field with a value that is wanted; the default if there is none."""
        value = self.get(name)
        if value is not None and not is_wanted(value):
            raise refuse(name, value, wanted)
        return default if value is None else value

    def integer(self, name: str, default: Any, least: int = -MOST_INT, most: int = MOST_INT) -> Any:
        """A whole number."""
        wanted = f"an integer from {least} to {most}"
        return self.checked(name, default, wanted, lambda value: _is_number(value, int) and least <= value <= most)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number."""
        wanted = f"a number from {least:g} to {most:g}"
        return float(self.checked(name, default, wanted, lambda value: _is_number(value) and least <= value <= most))

    def flag(self, name: str) -> bool:
        """True or false, which is the default."""
        return self.checked(name, False, "true or false", lambda value: isinstance(value, bool))

    def strings(self, name: str, most: int, longest: int) -> list[str]:
        """A string or a list of them, none of them empty."""
        value = self.get(name, [])
        values = [value] if isinstance(value, str) else value
        if not is_list(values, str) or len(values) > most or not all(0 < len(one) <= longest for one in values):
            raise refuse(name, value, f"at most {most} strings of 1 to {longest} characters")
        return [check_text(name, one) for one in values]


def read_json(body: bytes | bytearray) -> Fields:
    """The fields of a request's body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    return Fields(fields)


def read_wish(fields: Fields, limits: Limits, *, is_chat: bool) -> Wish:
    """Everything of a request but its prompt; refuses what is not served."""
    _check_refused(fields, is_chat=is_chat)
    echoes, prompt_logprobs = _echoes(fields, is_chat=is_chat), _prompt_logprobs(fields, limits)
    least = 0 if echoes or prompt_logprobs is not None else 1  # an answer without tokens is no use by itself
    max_tokens = fields.integer("max_tokens", None if is_chat else 16, least)
    max_tokens = fields.integer("max_completion_tokens", max_tokens, least)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if not np.float32(top_p):
        raise refuse("top_p", top_p, "a number above 0")
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    return Wish(
        max_tokens=max_tokens,
        sampling=kvjax.Sampling(
            temperature=fields.number("temperature", 1.0, 0.0, 100.0),
            top_k=max(fields.integer("top_k", 0, -1), 0), top_p=top_p, min_tokens=fields.integer("min_tokens", 0, 0),
        ),
        penalties=_penalties(fields), seed=secrets.randbits(31) if seed is None else seed % 2**32,
        n=_samples(fields, limits), stop=fields.strings("stop", MOST_STOP, MOST_STOP_CHARACTERS),
        stop_tokens=fields.checked("stop_token_ids", [], "a list of token ids", _are_tokens),
        ignores_eos=fields.flag("ignore_eos"),
        logprobs=_logprobs(fields, limits, is_chat=is_chat), echoes=echoes, prompt_logprobs=prompt_logprobs,
        priority=-fields.integer("priority", 0),
        salt=_salt(fields), streams=fields.flag("stream"), includes_usage=_includes_usage(fields),
    )  # fmt: skip


def _penalties(fields: Fields) -> dict[str, Any] | None:
    wanted = f"an object of at most {MOST_BIASES} token ids, each with a number from -100 to 100"
    bias = fields.checked("logit_bias", {}, wanted, _are_biases)
    found = {
        "frequency": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "presence": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "bias": {int(token): float(value) for token, value in bias.items()},
    }
    return found if any(found.values()) else None


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MOST_BIASES and all(map(_is_bias, value, value.values()))


def _is_bias(token: str, value: Any) -> bool:
    is_token = token.isascii() and token.isdecimal() and len(token) < 10
    return is_token and _is_number(value) and -100 <= value <= 100


def _logprobs(fields: Fields, limits: Limits, *, is_chat: bool) -> int | None:
    if not is_chat:
        return fields.integer("logprobs", None, 0, limits.top_logprobs)
    most = fields.integer("top_logprobs", 0, 0, limits.top_logprobs)
    has_logprobs = fields.flag("logprobs")
    if most and not has_logprobs:
        raise refuse("top_logprobs", most, "none without logprobs")
    return most if has_logprobs else None


def _echoes(fields: Fields, *, is_chat: bool) -> bool:
    echoes = fields.flag("echo")
    if echoes and is_chat:
        raise refuse("echo", echoes, "none or false in a chat")
    return echoes


def _prompt_logprobs(fields: Fields, limits: Limits) -> int | None:
    most = fields.integer("prompt_logprobs", None, 0, limits.top_logprobs)
    if most is not None and fields.flag("stream"):  # as in vLLM
        raise refuse("prompt_logprobs", most, "none with stream")
    return most


def _samples(fields: Fields, limits: Limits) -> int:
    samples = fields.integer("n", 1, 1, limits.samples)
    if fields.integer("best_of", samples) not in (1, samples):
        raise refuse("best_of", fields.get("best_of"), "as many as n")
    return samples


def _salt(fields: Fields) -> str | None:
    salts = fields.strings("cache_salt", 1, MOST_SALT)
    if salts and salts[0].startswith(OWN_SALTS):
        raise refuse("cache_salt", salts[0], f"a salt that does not begin with {OWN_SALTS!r}")
    return salts[0] if salts else None


def _includes_usage(fields: Fields) -> bool:
    name = "stream_options"
    streams = fields.flag("stream")
    wanted = "an object, and only with stream"
    options = fields.checked(name, {}, wanted, lambda value: streams and isinstance(value, dict))
    flags = ("include_usage", "include_obfuscation", "continuous_usage_stats")
    if not all(isinstance(options.get(flag), bool | None) for flag in flags):
        raise refuse(name, options, f"true or false for {', '.join(flags)}")
    if options.get("continuous_usage_stats"):
        raise refuse(name, options, "no continuous_usage_stats: the server sends the usage at the end")
    return bool(options.get("include_usage"))


def _check_refused(fields: Fields, *, is_chat: bool) -> None:
    """Refuses the fields of `REFUSED` whose values would change an answer."""
    for name, harmless_values in {**REFUSED, "add_special_tokens": (not is_chat,)}.items():
        value = fields.get(name)
        if value is not None and not any(_is_equal(value, harmless) for harmless in harmless_values):
            wanted = " or ".join(["none", *map(json.dumps, harmless_values)])
            raise refuse(name, value, f"{wanted}: nothing else is served")


def _is_equal(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def read_prompts(fields: Fields, encode: Callable[[str], list[int]] | None, limits: Limits) -> list[list[int]]:
    """The token ids of the prompts of a completion."""
    value = fields.get("prompt")
    prompts = [value] if isinstance(value, str) or is_list(value, int) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= limits.prompts:
        raise refuse("prompt", value, f"text, token ids, or a list of 1 to {limits.prompts} of them")
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if encode is None:
                raise refuse("prompt", prompt, "token ids: the model has no tokenizer")
            prompt = encode(check_text("prompt", prompt))
        if not is_list(prompt, int):
            raise refuse("prompt", prompt, "text or token ids")
        found.append(prompt)
    return found


def check_length(prompt: Sequence[int], wish: Wish, limits: Limits, param: str) -> int:
    """The tokens to generate; refuses a prompt that does not fit with them."""
    rest = limits.max_length - len(prompt)
    if rest < (1 if wish.max_tokens is None else wish.max_tokens):
        more = f" and {wish.max_tokens} of its answer" if wish.max_tokens else ""
        least = "" if wish.max_tokens == 0 else " with at least one of the answer"
        wanted = f"at most {limits.max_length}{least}"
        message = f"{param}: got {len(prompt)} tokens{more}, wanted {wanted}"
        raise ApiError(400, message, param, "context_length_exceeded")
    return rest if wish.max_tokens is None else wish.max_tokens


def _is_number(value: Any, kind: Any = int | float) -> bool:
    """Whether a value is a number: Python takes true for 1."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    return is_list(value, int) and all(0 <= token <= MOST_INT for token in value)


def is_list(value: Any, kind: type) -> bool:
    """Whether a value is a list of values of a kind, where true is not 1."""
    return isinstance(value, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)


def check_text(name: str, text: str) -> str:
    """Refuses lone surrogates, which JSON can have and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{name}: got text that is not Unicode", name) from None
    return text
