# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's HTTP API, read as data for an engine, and errors about wrong fields."""

from __future__ import annotations

import dataclasses
import json
import secrets
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import kvjax
from kvjax.serving.penalties import MAX_REPETITION, MIN_REPETITION

from .openai_fields import CHATS, COMPLETIONS, fields_of

MAX_INT = 2**30
MAX_STOP = 4  # stop strings
MAX_STOP_CHARACTERS = 1024
MAX_SALT = 256  # characters
MAX_BIASES = 300
RETRY_SECONDS = 1  # wait of a client after a refusal
OWN_SALTS = "kvjax-"  # clients may not choose salts with this beginning
# Fields of generation_config.json which are defaults of requests.
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
NO_DEFAULTS: Mapping[str, Any] = types.MappingProxyType({})


class ApiError(Exception):
    """An error in the API's format: an HTTP status, a body, and headers of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = headers
        self._fields = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        """The response's body, as JSON data."""
        return {"error": self._fields}


def refuse(name: str, got: Any, wanted: str, param: str | None = None) -> ApiError:
    """The error about a wrong value of a field, or of the place `name` in the field `param`."""
    return ApiError(400, f"{name}: got {_short(got)}, wanted {wanted}", param or name)


def busy(message: str) -> ApiError:
    """The error for a request while the server has no room for it."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of requests.

    Attributes:
      max_length: Tokens of a prompt together with its answer.
      samples: Samples of a prompt.
      top_logprobs: The number of likeliest tokens which the engine records.
      prompts: Prompts of a request.
    """

    max_length: int
    samples: int
    top_logprobs: int
    prompts: int = 64


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
      definitions: The tools for the chat template.
      choice: With "auto" the model decides on calls. With "none" the answer has no call. With "required" it has only
        calls. With "named" it is a call of the named tool.
      is_parallel: Whether an answer may have several calls.
      named: The name of the tool to call. None leaves the tool to the model.
      strict: Names of tools with strict schemas, which the arguments of calls have to satisfy.
    """

    definitions: list[dict[str, Any]]
    choice: str
    is_parallel: bool
    named: str | None = None
    strict: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice in ("required", "named")

    @property
    def names(self) -> frozenset[str] | None:
        """The names of tools to call. None means no answer has a call."""
        if not self.definitions or self.choice == "none":
            return None
        return frozenset({self.named} if self.named else (tool["function"]["name"] for tool in self.definitions))


class Grammar(NamedTuple):
    """A grammar for answers, as data. `openai_schemas.read_grammar` reads it.

    Attributes:
      kind: The end of the name of the function `compile_KIND` in `kvjax.grammar`.
      text: The function's argument, as JSON.
      param: The grammar's place in the request.
    """

    kind: Literal["schema", "regex", "choices", "structure"]
    text: str
    param: str

    @property
    def field(self) -> str:
        """The field of the request which the grammar is in."""
        return "text.format" if self.param.startswith("text.") else self.param.partition(".")[0]


@dataclasses.dataclass
class GenerationParams:
    """All fields of a request except its prompt.

    Attributes:
      max_tokens: The most tokens to generate. None means no limit but the room in the cache and `default_max_tokens`.
      default_max_tokens: The most tokens to generate if `max_tokens` is None. None means no limit.
      sampling: The sampling.
      penalties: Arguments of `Penalties.of` except the prompt. None disables penalties.
      seed: The seed of the request, or a random seed.
      n: The number of samples for each prompt.
      stop: Stop strings.
      stop_tokens: Stop tokens in addition to the model's.
      ignores_eos: Whether the answer goes on after the model's stop tokens.
      logprobs: The number of likeliest tokens to return with log-probabilities. None disables log-probabilities.
      echoes: Whether the prompt comes before the answer.
      prompt_logprobs: The same as `logprobs`, for the tokens of the prompt.
      priority: The priority for the engine. Higher goes first.
      salt: The salt of the namespace. None stands for the namespace of all requests without a salt.
      is_streaming: Whether the response is a stream of events.
      includes_usage: Whether the last event of a stream is the usage.
      tools: Tools of a chat. `openai_messages.read_tools` reads them.
      grammar: The grammar of the answer. None means any text.
      response_fields: Fields to repeat in the response. `openai_responses.read_request` reads them.
    """

    max_tokens: int | None
    default_max_tokens: int | None
    sampling: kvjax.Sampling
    penalties: dict[str, Any] | None
    seed: int
    n: int
    stop: list[str]
    stop_tokens: list[int]
    ignores_eos: bool
    logprobs: int | None
    echoes: bool
    prompt_logprobs: int | None
    priority: int
    salt: str | None
    is_streaming: bool
    includes_usage: bool
    tools: Tools | None = None
    grammar: Grammar | None = None
    response_fields: dict[str, Any] | None = None

    def prompt_logprobs_from(self, length: int) -> int | None:
        """The argument `prompt_logprobs_from` of `kvjax.serving.Request`, for a prompt of this length."""
        if self.prompt_logprobs is not None or (self.echoes and self.logprobs is not None):
            return 0
        return None if self.max_tokens != 0 else length


class Fields:
    """The fields of a request. Each is checked when it is read. A field with null counts as absent."""

    def __init__(self, fields: dict[str, Any]):
        self._fields = fields

    def get(self, name: str, default: Any = None) -> Any:
        """A field without a check."""
        value = self._fields.get(name)
        return default if value is None else value

    def check_names(self, names: Collection[str]) -> None:
        """Refuses a field with another name."""
        for name, value in self._fields.items():
            if name not in names:
                raise refuse(name, value, f"one of the fields {', '.join(names) or 'of an empty object'}")

    def checked(self, name: str, default: Any, wanted: str, is_wanted: Callable[[Any], bool]) -> Any:
        """A field, or the default if it is absent. Refuses the value unless `is_wanted` accepts it."""
        value = self.get(name)
        if value is not None and not is_wanted(value):
            raise refuse(name, value, wanted)
        return default if value is None else value

    def integer(self, name: str, default: Any, low: int = -MAX_INT, high: int = MAX_INT) -> Any:
        """An integer."""
        wanted = f"an integer from {low} to {high}"
        return self.checked(name, default, wanted, lambda value: _is_number(value, int) and low <= value <= high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number."""
        wanted = f"a number from {low:g} to {high:g}"
        return float(self.checked(name, default, wanted, lambda value: _is_number(value) and low <= value <= high))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return self.checked(name, default, "true or false", lambda value: isinstance(value, bool))

    def strings(self, name: str, max_strings: int, max_characters: int) -> list[str]:
        """The strings of a field with a string or a list of strings. An empty string is refused."""
        value = self.get(name, [])
        strings = [value] if isinstance(value, str) else value
        are_strings = is_list(strings, str) and len(strings) <= max_strings
        if not are_strings or not all(0 < len(string) <= max_characters for string in strings):
            raise refuse(name, value, f"at most {max_strings} strings of 1 to {max_characters} characters")
        return [check_text(name, string) for string in strings]


def read_json(body: bytes | bytearray) -> Fields:
    """Reads the fields of a request's body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    return Fields(fields)


def read_params(
    fields: Fields, limits: Limits, *, is_chat: bool, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> GenerationParams:
    """Reads all fields of a request except its prompt. `read_defaults` returns `defaults`.

    Raises:
      ApiError: if a field is wrong or not served.
    """
    check_refused(fields, fields_of(CHATS if is_chat else COMPLETIONS)[2])
    echoes = fields.flag("echo") and not is_chat
    prompt_logprobs = _prompt_logprobs(fields, limits)
    min_tokens = 0 if echoes or prompt_logprobs is not None else 1  # an answer without tokens would be useless
    default_max_tokens = defaults.get("max_new_tokens")
    max_tokens = fields.integer("max_tokens", None if is_chat or default_max_tokens else 16, min_tokens)
    max_tokens = fields.integer("max_completion_tokens", max_tokens, min_tokens)
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    return GenerationParams(
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        sampling=_sampling(fields, defaults),
        penalties=_penalties(fields, defaults),
        seed=secrets.randbits(31) if seed is None else seed % 2**32,
        n=_samples(fields, limits),
        stop=fields.strings("stop", MAX_STOP, MAX_STOP_CHARACTERS),
        stop_tokens=fields.checked("stop_token_ids", [], "a list of token ids", _are_tokens),
        ignores_eos=fields.flag("ignore_eos"),
        logprobs=_logprobs(fields, limits, is_chat=is_chat),
        echoes=echoes,
        prompt_logprobs=prompt_logprobs,
        priority=-fields.integer("priority", 0),
        salt=_salt(fields),
        is_streaming=fields.flag("stream"),
        includes_usage=_includes_usage(fields),
    )


def read_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the defaults of requests from a generation_config.json.

    Raises:
      ApiError: if a request may not have the value of a field.

    Source: vLLM, which reads the same fields, even if `do_sample` is false.
    """
    fields = Fields({name: config.get(name) for name in GENERATION_FIELDS})
    _sampling(fields, NO_DEFAULTS)
    _repetition(fields, NO_DEFAULTS)
    fields.integer("max_new_tokens", None, 1)
    return {name: value for name in GENERATION_FIELDS if (value := fields.get(name)) is not None}


def _sampling(fields: Fields, defaults: Mapping[str, Any]) -> kvjax.Sampling:
    top_p = fields.number("top_p", defaults.get("top_p", 1.0), 0.0, 1.0)
    if not np.float32(top_p):
        raise refuse("top_p", top_p, "a number above 0")
    return kvjax.Sampling(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), 0.0, 100.0),
        top_k=max(fields.integer("top_k", defaults.get("top_k", 0), -1), 0),
        top_p=top_p,
        min_tokens=fields.integer("min_tokens", 0, 0),
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), 0.0, 1.0) or None,
    )


def _repetition(fields: Fields, defaults: Mapping[str, Any]) -> float:
    name = "repetition_penalty"
    return fields.number(name, defaults.get(name, 1.0), MIN_REPETITION, MAX_REPETITION)


def _penalties(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = f"an object of at most {MAX_BIASES} token ids, each with a number from -100 to 100"
    bias = fields.checked("logit_bias", {}, wanted, _are_biases)
    penalties = {
        "frequency": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "presence": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "bias": {int(token): float(value) for token, value in bias.items()},
    }
    repetition = _repetition(fields, defaults)
    return {**penalties, "repetition": repetition} if any(penalties.values()) or repetition != 1 else None


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MAX_BIASES and all(map(_is_bias, value, value.values()))


def _is_bias(token: str, value: Any) -> bool:
    is_token = token.isascii() and token.isdecimal() and len(token) < 10
    return is_token and _is_number(value) and -100 <= value <= 100


def _logprobs(fields: Fields, limits: Limits, *, is_chat: bool) -> int | None:
    if not is_chat:
        return fields.integer("logprobs", None, 0, limits.top_logprobs)
    num_likeliest = fields.integer("top_logprobs", 0, 0, limits.top_logprobs)
    has_logprobs = fields.flag("logprobs")
    if num_likeliest and not has_logprobs:
        raise refuse("top_logprobs", num_likeliest, "none without logprobs")
    return num_likeliest if has_logprobs else None


def _prompt_logprobs(fields: Fields, limits: Limits) -> int | None:
    num_likeliest = fields.integer("prompt_logprobs", None, 0, limits.top_logprobs)
    if num_likeliest is not None and fields.flag("stream"):  # as in vLLM
        raise refuse("prompt_logprobs", num_likeliest, "none with stream")
    return num_likeliest


def _samples(fields: Fields, limits: Limits) -> int:
    samples = fields.integer("n", 1, 1, limits.samples)
    if fields.integer("best_of", samples) not in (1, samples):
        raise refuse("best_of", fields.get("best_of"), "as many as n")
    return samples


def _salt(fields: Fields) -> str | None:
    salts = fields.strings("cache_salt", 1, MAX_SALT)
    if salts and salts[0].startswith(OWN_SALTS):
        raise refuse("cache_salt", salts[0], f"a salt that does not begin with {OWN_SALTS!r}")
    return salts[0] if salts else None


def _includes_usage(fields: Fields) -> bool:
    name = "stream_options"
    is_streaming = fields.flag("stream")
    wanted = "an object, and only with stream"
    options = fields.checked(name, {}, wanted, lambda value: is_streaming and isinstance(value, dict))
    flags = ("include_usage", "include_obfuscation", "continuous_usage_stats")
    if not all(isinstance(options.get(flag), bool | None) for flag in flags):
        raise refuse(name, options, f"true or false for {', '.join(flags)}")
    if options.get("continuous_usage_stats"):
        raise refuse(name, options, "no continuous_usage_stats: the server sends the usage at the end")
    return bool(options.get("include_usage"))


def check_refused(fields: Fields, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses fields whose values would change an answer. `refused` has harmless values, as `REFUSED` does."""
    for name, harmless_values in refused.items():
        value = fields.get(name)
        if value is not None and not any(_is_equal(value, harmless) for harmless in harmless_values):
            wanted = " or ".join(["none", *map(json.dumps, harmless_values)])
            raise refuse(name, value, f"{wanted}: nothing else is served")


def _is_equal(value: Any, harmless: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def read_prompts(fields: Fields, encode: Callable[[str], list[int]] | None, limits: Limits) -> list[list[int]]:
    """Reads the prompts of a completion, as token ids."""
    value = fields.get("prompt")
    prompts = [value] if isinstance(value, str) or is_list(value, int) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= limits.prompts:
        raise refuse("prompt", value, f"text, token ids, or a list of 1 to {limits.prompts} of them")
    token_ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if encode is None:
                raise refuse("prompt", prompt, "token ids: the model has no tokenizer")
            prompt = encode(check_text("prompt", prompt))
        if not is_list(prompt, int):
            raise refuse("prompt", prompt, "text or token ids")
        token_ids.append(prompt)
    return token_ids


def read_text(fields: Fields) -> str:
    """Reads the text to encode."""
    text = fields.get("prompt")
    if not isinstance(text, str):
        raise refuse("prompt", text, "a text")
    return check_text("prompt", text)


def read_tokens(fields: Fields, vocabulary: int) -> list[int]:
    """Reads the token ids to decode."""
    tokens = fields.get("tokens")
    if not _are_tokens(tokens) or max(tokens, default=0) >= vocabulary:
        raise refuse("tokens", tokens, f"a list of token ids from 0 to {vocabulary - 1}")
    return tokens


def check_length(prompt: Sequence[int], params: GenerationParams, limits: Limits, param: str) -> int:
    """Refuses a prompt if there is no room for the answer. Returns the most tokens to generate."""
    room = limits.max_length - len(prompt)
    if room < (1 if params.max_tokens is None else params.max_tokens):
        got_answer = f" and {params.max_tokens} of its answer" if params.max_tokens else ""
        wanted_answer = "" if params.max_tokens == 0 else " with at least one of the answer"
        wanted = f"at most {limits.max_length}{wanted_answer}"
        message = f"{param}: got {len(prompt)} tokens{got_answer}, wanted {wanted}"
        raise ApiError(400, message, param, "context_length_exceeded")
    if params.max_tokens is not None:
        return params.max_tokens
    return room if params.default_max_tokens is None else min(room, params.default_max_tokens)


def _is_number(value: Any, kind: Any = int | float) -> bool:
    """Whether a value is a number. In Python, true is also a number."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    return is_list(value, int) and all(0 <= token <= MAX_INT for token in value)


def is_list(value: Any, kind: type) -> bool:
    """Whether a value is a list of values of a kind, where true is not a number."""
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)


def check_text(name: str, text: str) -> str:
    """Refuses lone surrogates, which JSON may have and UTF-8 may not. Returns the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{name}: got text that is not Unicode", name) from None
    return text
