# SPDX-License-Identifier: Apache-2.0
"""A server whose model answers by a script: the real server and engine, a tokenizer of bytes, and any chat template."""

import functools
import json
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import tokenizers
from flax import nnx

import kvjax
from models import session
from models.chat import load_template
from models.config import ModelConfig
from tests.drive import DATA, ROOT
from tests.models.serve_kit import KEY, Running

LENGTH = 4096  # positions of the script
SPECIAL = (
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
TAGS = ("<tool_call>", "</tool_call>")  # as in Qwen's tokenizer, where they are tokens, but not special ones
FAMILIES = {
    "hermes": ("hermes_tools.jinja", "<|im_end|>"),
    "llama3": ("llama_tools.jinja", "<|eot_id|>"),
    "harmony": ("harmony_tools.jinja", "<|return|>"),
}

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "Åre", "days": [1, 2]}'
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
QUESTION = "Weather in Åre, and the time?"
CALLS = [("get_weather", ARGUMENTS), ("get_time", "{}")]
THOUGHT = "<|channel|>analysis<|message|>Weather first.<|end|><|start|>assistant"


def call_in(family, name, arguments):
    """A call as the family's template writes it."""
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "harmony": f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>",
    }[family]


def text_in(family, text):
    return f"<|channel|>final<|message|>{text}" if family == "harmony" else text


@functools.cache
def make_tokenizer():
    """A tokenizer with a token for each byte, and the special tokens of all families."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


class Scripted(nnx.Module):
    """A model with a fixed token after each position. Its cache stays empty, and all servers share programs."""

    def __init__(self):
        fields = {"model_type": "llama", "vocab_size": make_tokenizer().get_vocab_size(), "hidden_size": 8}
        fields |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "eos_token_id": None}
        self.config = ModelConfig.from_hf({**fields, "max_position_embeddings": LENGTH})
        self.next_token = nnx.Variable(jnp.zeros(LENGTH, jnp.int32))

    def layer_specs(self):
        return [kvjax.LayerSpec(1, 8)]

    def play(self, start, tokens, end):
        """Makes these the tokens from a position on, and after them the end."""
        table = np.full(LENGTH, end, np.int32)
        table[start - 1 : start - 1 + len(tokens)] = tokens
        self.next_token[...] = jnp.asarray(table)

    def __call__(self, tokens, pools, view, *, last):
        positions = view.positions if last is None else view.positions[jnp.arange(tokens.shape[0]), last]
        return 20 * jax.nn.one_hot(self.next_token[...][positions], self.config.vocab_size), pools


class ScriptedServer:
    """A server of a family of templates. `says` sets its next answers.

    Attributes:
      client: OpenAI's client.
      prompts: token ids of each request so far.
      answers: token ids of each answer so far, without the last token.
    """

    def __init__(self, folder, family, *options):
        template, end = FAMILIES[family]
        (folder / "chat_template.jinja").write_text((DATA / "chat_templates" / template).read_text("utf-8"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": end}))
        self.tokenizer = make_tokenizer()
        self.model, self._end = Scripted(), self.tokenizer.token_to_id(end)
        self._call_end = [self.tokenizer.token_to_id("<|call|>")]
        self.template = load_template(str(folder))
        self.prompts, self.answers, self._texts = [], [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "load_model", self._load)
            sizes = ("--max-length", str(LENGTH), "--blocks", "2048", "--name", "scripted")
            self.running = Running(folder, *sizes, *options)
        self._submit = self.running.engine.submit
        self.running.engine.submit = self._submitting
        self.client = openai.OpenAI(base_url=f"{self.running.url}/v1", api_key=KEY, max_retries=0)

    def _load(self, parser, args, **_):
        args.chunk = 128
        return self.model, self.tokenizer

    def _submitting(self, request, **options):
        assert self.running.engine.drain(20)  # the script is the next answer's alone
        answer = self.tokenizer.encode(self._texts.pop(0)).ids
        self.prompts.append(request.prompt.tolist())
        self.answers.append(answer[:-1] if answer[-1:] == self._call_end else answer)
        self.model.play(len(request.prompt), answer, self._end)
        return self._submit(request, **options)

    def ask(self, messages, tools=None, **fields):
        """OpenAI's client's answer, or its stream."""
        fields |= {} if tools is None else {"tools": tools}
        return self.client.chat.completions.create(model="scripted", messages=messages, **fields)

    def says(self, *texts):
        """Sets the texts of the next answers. After each comes the token which ends a turn, unless <|call|> ends it."""
        self._texts = list(texts)

    def prompt_of(self, messages, tools=None):
        """The token ids of a conversation."""
        return self.tokenizer.encode(self.template.render(messages, tools), add_special_tokens=False).ids

    def close(self):
        self.client.close()
        self.running.close()


def num_common(tokens, other_tokens):
    """The number of tokens with which both begin."""
    pairs = zip(tokens, other_tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other_tokens)))


class AgentTurn(NamedTuple):
    """An answer to an agent.

    Attributes:
      items: The messages or items to repeat in the next request.
      text: The text of the answer, or None.
      calls: The id, the name and the arguments of each call.
      num_cached: Tokens of the prompt from the cache.
      num_prompt: Tokens of the prompt.
      num_generated: Tokens of the answer.
    """

    items: list[Any]
    text: str | None
    calls: list[tuple[str, str, str]]
    num_cached: int
    num_prompt: int
    num_generated: int


def run_agent(server, family, question, ask, make_result, thanks):
    """Runs an agent which calls two tools, answers, and answers again. Each turn has to find the earlier turns cached.

    Args:
      server: a `ScriptedServer`.
      family: the family of its template.
      question: the first message or item.
      ask: (messages or items) -> AgentTurn.
      make_result: (id of a call, result) -> the message or item with the result.
      thanks: the message or item after the first answer without a call.

    Returns:
      All messages or items, and the text of each turn.
    """
    server.says(
        (THOUGHT if family == "harmony" else "") + call_in(family, *CALLS[0]),
        call_in(family, *CALLS[1]),
        text_in(family, "Cold, at noon."),
        text_in(family, "You are welcome."),
    )
    functions = {"get_weather": lambda city, days: f"cold in {city} for {days}", "get_time": lambda: "12:00"}
    items = [question]
    calls = []
    texts = []
    first = len(server.prompts)
    for index in range(4):
        turn = ask(items)
        prompt = server.prompts[-1]
        assert (turn.num_prompt, turn.num_generated) == (len(prompt), len(server.answers[-1]) + 1)
        history = [*server.prompts[-2], *server.answers[-2]] if index else []
        if family == "harmony" and index == 3:  # its template leaves out thoughts once there is an answer
            assert num_common(prompt, history) == len(server.prompts[first]) == turn.num_cached
        else:
            assert prompt[: len(history)] == history and turn.num_cached == len(history)
        items += turn.items
        texts.append(turn.text)
        for call_id, name, arguments in turn.calls:
            calls.append((name, arguments))
            items.append(make_result(call_id, functions[name](**json.loads(arguments))))
        if index == 2:
            items.append(thanks)
    assert calls == CALLS
    return items, texts


def run_page(server, word):
    """Runs the example with this word from the page on serving. Returns its printed texts."""
    page = (ROOT / "docs/howto/serving.md").read_text()
    code = next(block for block in re.findall(r"^```python3\n(.*?)^```$", page, re.M | re.S) if word in block)
    code = code.replace("http://127.0.0.1:8000", server.running.url).replace('"none"', f'"{KEY}"')
    code = code.replace('"qwen3"', '"scripted"')
    server.says(call_in("hermes", "get_weather", '{"city": "Oslo"}'), "It is cold in Oslo.")
    printed = list[str]()
    names: dict[str, Any] = {"print": printed.append}
    exec(code, names)
    names["client"].close()
    return printed
