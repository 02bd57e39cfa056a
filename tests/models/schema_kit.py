# SPDX-License-Identifier: Apache-2.0
"""A server whose model writes at random: the real server and engine, a tokenizer of bytes and of parts of JSON."""

import asyncio
import functools
import json

import jax
import jax.numpy as jnp
import openai
import pytest
import tokenizers
from flax import nnx

import kvjax
from models import serve, session
from models.config import ModelConfig
from models.serve_schemas import open_schemas
from tests.drive import DATA
from tests.models.scripted_kit import FAMILIES, SPECIAL, TAGS
from tests.models.serve_kit import KEY, Running

LENGTH = 2048
PARTS = ('{"', '": ', '"}', ", ", "true", "null", "10", "-", "ab", "é", "\n", "}}", "日")
LIKELY = {'"': 4.0, "}": 2.0, "]": 2.0, '"}': 3.0}  # so that random texts end


@functools.cache
def make_tokenizer():
    """A token for each byte, parts of JSON, and the special tokens of all families."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([*TAGS, *PARTS])
    return tokenizer


class Random(nnx.Module):
    """A model with random logits for each token and its position. It stores nothing in its cache."""

    def __init__(self, end):
        tokenizer = make_tokenizer()
        fields = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 8}
        fields |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "eos_token_id": None}
        self.config = ModelConfig.from_hf({**fields, "max_position_embeddings": LENGTH})
        bias = jnp.zeros(self.config.vocab_size)
        for text, value in {**LIKELY, end: 4.0}.items():
            bias = bias.at[tokenizer.encode(text).ids[0]].set(value)
        self.bias = nnx.Variable(bias[None])

    def layer_specs(self):
        return [kvjax.LayerSpec(1, 8)]

    def __call__(self, tokens, pools, view, *, last):
        positions = view.positions
        if last is not None:
            rows = jnp.arange(tokens.shape[0])
            tokens, positions = tokens[rows, last], positions[rows, last]

        def logits(token, position):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), position), token)
            return jax.random.normal(key, self.bias.shape[1:]) + self.bias[0]

        each = jax.vmap(logits) if tokens.ndim == 1 else jax.vmap(jax.vmap(logits))
        return each(tokens, positions), pools


class RandomServer:
    """A server of a family of templates.

    Attributes:
      running: the server.
      client: OpenAI's client.
      schemas: its compiled schemas.
    """

    def __init__(self, folder, family, *options):
        template, end = FAMILIES[family]
        (folder / "chat_template.jinja").write_text((DATA / "chat_templates" / template).read_text("utf-8"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": end}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "load_model", lambda parser, args, **_: (Random(end), make_tokenizer()))
            patch.setattr(serve, "open_schemas", self._open)
            sizes = ("--max-length", str(LENGTH), "--blocks", "2048", "--name", "random")
            self.running = Running(folder, *sizes, *options)
        self.client = openai.OpenAI(base_url=f"{self.running.url}/v1", api_key=KEY, max_retries=0)

    def _open(self, *arguments):
        self.schemas = open_schemas(*arguments)
        take = self.schemas.take

        async def taking(*arguments):
            self._loop = asyncio.get_running_loop()
            return await take(*arguments)

        self.schemas.take = taking
        return self.schemas

    def release(self, slot):
        """Gives a slot back, on the server's thread."""
        self._loop.call_soon_threadsafe(self.schemas.release, slot)

    def token(self, text):
        """The id of a token."""
        (token,) = make_tokenizer().encode(text).ids
        return token

    def ask(self, question="hi", **fields):
        """OpenAI's client's answer to a chat, or its stream."""
        messages = [{"role": "user", "content": question}]
        return self.client.chat.completions.create(model="random", messages=messages, **fields)

    def complete(self, prompt="hi", **fields):
        """The answer to a completion."""
        fields = {"max_tokens": 200, **fields}
        return self.client.completions.create(model="random", prompt=prompt, **fields)

    def close(self):
        self.client.close()
        self.running.close()
