# SPDX-License-Identifier: Apache-2.0
"""Fields of the server's endpoints: which of them it serves, ignores or refuses.

`SERVED`, `HARMLESS` and `REFUSED` name the fields of OpenAI's API and of vLLM's, which has more. `fields_of` returns
the fields of an endpoint. The server ignores a field which the endpoint has in neither API.
"""

from __future__ import annotations

from typing import Any

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
RESPONSES = "/v1/responses"  # `openai_responses` has its fields

SERVED = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "best_of",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "echo",
        "frequency_penalty",
        "guided_choice",
        "guided_json",
        "guided_json_object",
        "guided_regex",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "prompt",
        "prompt_logprobs",
        "repetition_penalty",
        "response_format",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "structured_outputs",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)
# The server ignores these, because no answer depends on them unless a field of `REFUSED` has an effect.
HARMLESS = frozenset(
    {
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
# Answers would depend on these fields. Each has harmless values, which do not change an answer, like null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto",),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# Fields of `SERVED` which an endpoint refuses, with their harmless values, ignores, or does not have.
_REFUSED_BY: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {
        "add_generation_prompt": (True,),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    },
    CHATS: {"echo": (False,)},
}
_IGNORED_BY = {COMPLETIONS: frozenset({"parallel_tool_calls"}), CHATS: frozenset[str]()}
_LACKS = {COMPLETIONS: {"messages", "top_logprobs"}, CHATS: {"prompt"}}
_TEMPLATE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "messages",
        "tools",
    }
)


def fields_of(endpoint: str) -> tuple[frozenset[str], frozenset[str], dict[str, tuple[Any, ...]]]:
    """The served, the ignored and the refused fields of an endpoint. Refused fields have their harmless values."""
    if endpoint == DETOKENIZE:
        return frozenset({"model", "tokens"}), frozenset(), {}
    if endpoint == TOKENIZE:
        served = _TEMPLATE_FIELDS | {"add_special_tokens", "model", "prompt", "return_token_strs"}
        ignored = HARMLESS & {"media_io_kwargs", "mm_processor_kwargs"}
        return served, ignored, {"chat_template": REFUSED["chat_template"]}
    refused = _REFUSED_BY[endpoint]
    ignored = _IGNORED_BY[endpoint]
    return SERVED - refused.keys() - ignored - _LACKS[endpoint], HARMLESS | ignored, REFUSED | refused
