# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's HTTP API, as data: what each field asks of an engine, and the errors of those that are wrong.

`SERVED`, `HARMLESS` and `REFUSED` name the fields of OpenAI's API and of vLLM's, which has more, and `fields_of` those
of one endpoint. The server ignores a field that an endpoint has in neither API.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import kvjax
from kvjax.serving.penalties import LEAST_REPETITION, MOST_REPETITION

COMPLETIONS, CHATS, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES = "/v1/responses"  # whose fields `openai_responses` has
MOST_INT = 2**30
MOST_STOP, MOST_STOP_CHARACTERS, MOST_SALT, MOST_BIASES = 4, 1024, 256, 300
RETRY_SECONDS = 1  # from a refusal to a client's next try
OWN_SALTS = "kvjax-"  # the beginning of salts that no client may choose
# The fields of generation_config.json that are defaults of requests.
OF_GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
NO_DEFAULTS: Mapping[str, Any] = types.MappingProxyType({})

SERVED = frozenset({
    "add_generation_prompt", "add_special_tokens", "best_of", "cache_salt", "chat_template_kwargs",
    "continue_final_message", "echo", "frequency_penalty", "guided_choice", "guided_json", "guided_json_object",
    "guided_regex", "ignore_eos", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "min_p", "min_tokens", "model", "n", "parallel_tool_calls",
    "presence_penalty", "priority", "prompt", "prompt_logprobs", "repetition_penalty", "response_format",
    "seed", "stop", "stop_token_ids", "stream", "stream_options", "structured_outputs", "temperature", "tool_choice",
    "tools", "top_k", "top_logprobs", "top_p",
})  # fmt: skip
# No answer depends on these, at least where all fields of `REFUSED` have no effect: the server ignores them.
HARMLESS = frozenset({
    "media_io_kwargs", "metadata", "mm_processor_kwargs", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "safety_identifier", "service_tier", "spaces_between_special_tokens", "store", "user",
})  # fmt: skip
# An answer would depend on these. Each has the values that leave an answer as it is; null does so too.
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (), "audio": (), "bad_words": ([],), "chat_template": (), "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"), "functions": ([],), "guided_decoding_backend": ("auto",),
    "guided_grammar": (), "guided_whitespace_pattern": (),
    "include_reasoning": (True,), "include_stop_str_in_output": (False,), "kv_transfer_params": (),
    "length_penalty": (1,), "logits_processors": ([],), "logprob_token_ids": ([],),
    "modalities": (["text"],), "prompt_embeds": (), "reasoning_effort": (),
    "repetition_detection": (),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "structural_tag": (), "suffix": ("",), "thinking_token_budget": (),
    "truncate_prompt_tokens": (), "use_beam_search": (False,),
    "verbosity": ("medium",), "vllm_xargs": ({},), "web_search_options": (),
}  # fmt: skip

# Fields of `SERVED` that one endpoint serves and the other refuses, as above, ignores, or does not have.
_REFUSED_BY: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {
        "add_generation_prompt": (True,), "chat_template_kwargs": ({},), "continue_final_message": (False,),
        "tool_choice": ("none", "auto"), "tools": ([],),
    },
    CHATS: {"echo": (False,)},
}  # fmt: skip
_IGNORED_BY = {COMPLETIONS: frozenset({"parallel_tool_calls"}), CHATS: frozenset[str]()}
_LACKS = {COMPLETIONS: {"messages", "top_logprobs"}, CHATS: {"prompt"}}
_OF_TEMPLATES = frozenset({
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "messages", "tools",
})  # fmt: skip


def fields_of(endpoint: str) -> tuple[frozenset[str], frozenset[str], dict[str, tuple[Any, ...]]]:
    """The fields that an endpoint serves, those that it ignores, and those that it refuses, as `REFUSED` has them."""
    if endpoint == DETOKENIZE:
        return frozenset({"model", "tokens"}), frozenset(), {}
    if endpoint == TOKENIZE:
        served = _OF_TEMPLATES | {"add_special_tokens", "model", "prompt", "return_token_strs"}
        ignored = HARMLESS & {"media_io_kwargs", "mm_processor_kwargs"}
        return served, ignored, {"chat_template": REFUSED["chat_template"]}
    refused, ignored = _REFUSED_BY[endpoint], _IGNORED_BY[endpoint]
    return SERVED - refused.keys() - ignored - _LACKS[endpoint], HARMLESS | ignored, REFUSED | refused


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


def refuse(name: str, got: Any, wanted: str, param: str | None = None) -> ApiError:
    """The error of a field with a wrong value, or of a place in the field `param`."""
    return ApiError(400, f"{name}: got {_short(got)}, wanted {wanted}", param or name)


def busy(message: str) -> ApiError:
    """The error of a request for which there is no room yet."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)


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
    choice: str  # "auto": the model decides on calls; "none": nothing is a call; "required": all is; "named": one call
    is_parallel: bool  # whether an answer may have several calls
    named: str | None = None  # the tool to call
    strict: frozenset[str] = frozenset()  # names of tools with whose schemas the arguments of calls have to agree

    @property
    def is_forced(self) -> bool:
        """Whether an answer has to be a call."""
        return self.choice in ("required", "named")

    @property
    def names(self) -> frozenset[str] | None:
        """The names that calls may have; None: nothing is a call."""
        if not self.definitions or self.choice == "none":
            return None
        return frozenset({self.named} if self.named else (tool["function"]["name"] for tool in self.definitions))


class Grammar(NamedTuple):
    """The form of answers, as data; see `openai_schemas.read_grammar`.

    Attributes:
      kind: names the function `compile_KIND` of `kvjax.grammar`.
      text: its argument, as JSON.
      param: its place in the request.
    """

    kind: Literal["schema", "regex", "choices", "structure"]
    text: str
    param: str

    @property
    def field(self) -> str:
        """The field of the request."""
        return "text.format" if self.param.startswith("text.") else self.param.partition(".")[0]


@dataclasses.dataclass
class Wish:
    """Everything of a request but its prompt."""

    max_tokens: int | None  # None: as many as fit
    usual_tokens: int | None  # the most where `max_tokens` is None; None: no limit
    sampling: kvjax.Sampling
    penalties: dict[str, Any] | None  # arguments of `Penalties.of` but its prompt; None: the request has none
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
    grammar: Grammar | None = None  # of the answer; None: any text
    repeated: dict[str, Any] | None = None  # by a response; see `openai_responses.read_request`

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

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return self.checked(name, default, "true or false", lambda value: isinstance(value, bool))

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


def read_wish(
    fields: Fields, limits: Limits, *, is_chat: bool, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> Wish:  # fmt: skip
    """Everything of a request but its prompt; refuses what is not served. `defaults` are of `read_defaults`."""
    check_refused(fields, fields_of(CHATS if is_chat else COMPLETIONS)[2])
    echoes, prompt_logprobs = fields.flag("echo") and not is_chat, _prompt_logprobs(fields, limits)
    least = 0 if echoes or prompt_logprobs is not None else 1  # an answer without tokens is no use by itself
    usual_tokens = defaults.get("max_new_tokens")
    max_tokens = fields.integer("max_tokens", None if is_chat or usual_tokens else 16, least)
    max_tokens = fields.integer("max_completion_tokens", max_tokens, least)
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    return Wish(
        max_tokens=max_tokens, usual_tokens=usual_tokens, sampling=_sampling(fields, defaults),
        penalties=_penalties(fields, defaults), seed=secrets.randbits(31) if seed is None else seed % 2**32,
        n=_samples(fields, limits), stop=fields.strings("stop", MOST_STOP, MOST_STOP_CHARACTERS),
        stop_tokens=fields.checked("stop_token_ids", [], "a list of token ids", _are_tokens),
        ignores_eos=fields.flag("ignore_eos"),
        logprobs=_logprobs(fields, limits, is_chat=is_chat), echoes=echoes, prompt_logprobs=prompt_logprobs,
        priority=-fields.integer("priority", 0),
        salt=_salt(fields), streams=fields.flag("stream"), includes_usage=_includes_usage(fields),
    )  # fmt: skip


def read_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a generation_config.json that are defaults of requests.

    Raises:
      ApiError: naming the field, if a request could not have its value.

    Source: vLLM, which takes the same fields whatever `do_sample` says.
    """
    fields = Fields({name: config.get(name) for name in OF_GENERATION})
    _sampling(fields, NO_DEFAULTS)
    _repetition(fields, NO_DEFAULTS)
    fields.integer("max_new_tokens", None, 1)
    return {name: value for name in OF_GENERATION if (value := fields.get(name)) is not None}


def _sampling(fields: Fields, defaults: Mapping[str, Any]) -> kvjax.Sampling:
    top_p = fields.number("top_p", defaults.get("top_p", 1.0), 0.0, 1.0)
    if not np.float32(top_p):
        raise refuse("top_p", top_p, "a number above 0")
    return kvjax.Sampling(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), 0.0, 100.0),
        top_k=max(fields.integer("top_k", defaults.get("top_k", 0), -1), 0), top_p=top_p,
        min_tokens=fields.integer("min_tokens", 0, 0),
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), 0.0, 1.0) or None,
    )  # fmt: skip


def _repetition(fields: Fields, defaults: Mapping[str, Any]) -> float:
    name = "repetition_penalty"
    return fields.number(name, defaults.get(name, 1.0), LEAST_REPETITION, MOST_REPETITION)


def _penalties(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = f"an object of at most {MOST_BIASES} token ids, each with a number from -100 to 100"
    bias = fields.checked("logit_bias", {}, wanted, _are_biases)
    found = {
        "frequency": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "presence": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "bias": {int(token): float(value) for token, value in bias.items()},
    }
    repetition = _repetition(fields, defaults)
    return {**found, "repetition": repetition} if any(found.values()) or repetition != 1 else None


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


def check_refused(fields: Fields, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses fields, where their values would change an answer; `refused` is of the form of `REFUSED`."""
    for name, harmless_values in refused.items():
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


def read_text(fields: Fields) -> str:
    """The text of a prompt to encode."""
    text = fields.get("prompt")
    if not isinstance(text, str):
        raise refuse("prompt", text, "a text")
    return check_text("prompt", text)


def read_tokens(fields: Fields, vocabulary: int) -> list[int]:
    """The token ids of a text to decode."""
    tokens = fields.get("tokens")
    if not _are_tokens(tokens) or max(tokens, default=0) >= vocabulary:
        raise refuse("tokens", tokens, f"a list of token ids from 0 to {vocabulary - 1}")
    return tokens


def check_length(prompt: Sequence[int], wish: Wish, limits: Limits, param: str) -> int:
    """The tokens to generate; refuses a prompt that does not fit with them."""
    rest = limits.max_length - len(prompt)
    if rest < (1 if wish.max_tokens is None else wish.max_tokens):
        more = f" and {wish.max_tokens} of its answer" if wish.max_tokens else ""
        least = "" if wish.max_tokens == 0 else " with at least one of the answer"
        wanted = f"at most {limits.max_length}{least}"
        message = f"{param}: got {len(prompt)} tokens{more}, wanted {wanted}"
        raise ApiError(400, message, param, "context_length_exceeded")
    if wish.max_tokens is not None:
        return wish.max_tokens
    return rest if wish.usual_tokens is None else min(rest, wish.usual_tokens)


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
