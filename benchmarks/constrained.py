# SPDX-License-Identifier: Apache-2.0
"""Decoding under a JSON schema, inside the loop, against the same loop without a schema.

16 rows of a model of 19 million parameters choose greedily among 49,152 tokens. A grammar of all tokens has to give the
tokens of the loop without a grammar. Texts under the schema have to follow its table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import caches, common, decode_loop
from benchmarks.common import Bar, benchmark
from kvjax import grammar, serving
from models.decoder import Decoder

BARS = {
    "schema_ratio": Bar("a step under a schema, to one without", at_most=1.1),
    "any_ratio": Bar("a step under a grammar that allows every token, to one without"),
    "free_step_us": Bar("a step without a schema", "µs"),
    "compile_ms": Bar("making the schema's table", "ms"),
}
TEXT = {"type": "string", "maxLength": 20}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "tags": {"type": "array", "items": TEXT}, "size": {"type": "integer"}},
    "required": ["name", "tags", "size"],
}


def vocabulary_of(size: int) -> grammar.Vocabulary:
    """A vocabulary with a token for each byte, tokens of up to 8 letters, and a last token to end a text."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b'etaoinshrdlu ,.:"{}[]0123456789', np.uint8)
    words = [rng.choice(letters, length).tobytes() for length in rng.integers(2, 9, max(size - 257, 0))]
    return grammar.Vocabulary([*[bytes([byte]) for byte in range(min(size - 1, 256))], *words, None])


def loop(model: Decoder, start: decode_loop.Start, steps: int, constraint: serving.Constraints | None):
    """A decode loop: (begin, run). A call of `run` chooses `steps` tokens."""
    state = None if constraint is None else jnp.full(start.lengths.shape, constraint.initial_state)
    begin = start.cache, start.rows.replace(state=state), serving.decode_log(start.cache.state.spec, steps)

    @functools.partial(jax.jit, donate_argnums=2)
    def run(model, constraint, state):
        options: dict[str, Any] = {"steps": steps, "sampling": None, "stop": jnp.asarray([-1])}
        *state, decoded = serving.decode(model, *state, logits_fn=constraint, **options)
        return decoded.tokens, tuple(state)

    return caches.copy_of(begin), functools.partial(run, model, constraint)


SIZES = {
    "config": tuple(
        dataclasses.replace(config, vocab_size=size)
        for config, size in zip(caches.CONFIGS, (49_152, 512), strict=True)
    ),
    "rows": (16, 2), "context": (256, 48), "steps": (32, 16), "block_size": 16,
}  # fmt: skip


@benchmark(BARS, SIZES, rounds=(20, 1))
def measure(size):
    model = Decoder(size.config, rngs=nnx.Rngs(0))
    start = decode_loop.make_start(model, size)
    vocabulary = vocabulary_of(size.config.vocab_size)
    end = [len(vocabulary) - 1]
    make = functools.partial(grammar.compile_schema, SCHEMA, vocabulary)
    compiled, tables = common.in_turns({"table": make}, 3)
    table = tables["table"]
    any_token = grammar.TokenTable(np.zeros((1, 1), np.int32), np.zeros(len(vocabulary), np.int32), np.ones(1, bool))
    grammars = {"any": any_token, "schema": table}
    constraints = {name: serving.Constraints.of(table, end) for name, table in grammars.items()}
    programs = {
        name: loop(model, start, size.steps, constraint) for name, constraint in {"free": None, **constraints}.items()
    }
    took, ends = common.in_turns(programs, size.rounds)
    tokens = {name: np.asarray(chosen) for name, (chosen, _) in ends.items()}
    common.require(np.array_equal(tokens["free"], tokens["any"]), "a grammar of all tokens has changed the choice")
    for text in tokens["schema"].tolist():
        state = 0
        for token in text[: text.index(end[0]) if end[0] in text else None]:
            state = table.next_state[state, table.token_class[token]]
            common.require(state >= 0, f"the schema forbids {token} in {text}")
    yield common.times(took, "step_us", "least", size.steps)
    yield {f"{name}_ratio": took[name].least / took["free"].least for name in grammars}
    yield {"compile_ms": 1e3 * compiled["table"].least, "states": len(table.next_state)}
