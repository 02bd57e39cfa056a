# SPDX-License-Identifier: Apache-2.0
"""Trains the bundled associative-recall decoder in a few minutes on 2 cores: `python -m models.train [--out DIR]`.

Two layers are enough to answer. The first layer copies the person of a sentence to its place, and the person of the
question to the question mark. The second layer looks up the place by the person. Plain training finds this slowly:
until the second layer looks, the first layer's output is noise, and training removes it. So the first layer's attention
is fixed: each head looks back by a certain distance, with random values. Everything else is learned from scratch.
Documents are short at first, and only answers and the full stops after them are scored.

The seeds are fixed, so runs on the same kind of machine give the same weights.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import track

from . import recall
from .commands import Parser
from .config import LayerConfig, ModelConfig
from .decoder import Decoder
from .loading import save
from .rope import Rope

# A slow rope, because the second layer compares contents across a whole document, and fast rotations would only disturb
# it.
CONFIG = ModelConfig(
    model_type="qwen2",  # for the biases of its projections, which let a head look a fixed distance back
    vocab_size=len(recall.VOCABULARY),
    hidden_size=96,
    intermediate_size=192,
    num_heads=4,
    layers=(LayerConfig(kv_heads=2, head_dim=32, rope=Rope(theta=1e6)),) * 2,
    tie_word_embeddings=True,
    qkv_bias=True,
    max_positions=1024,
    eos_token_ids=(recall.IDS["."],),
)
# The distances that the heads look back: from the question mark to the person, from the place to the person, and two
# more.
DISTANCES = (1, 3, 0, 2)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training steps on documents of equal length."""

    num_facts: int
    num_questions: int
    num_documents: int
    num_steps: int


CURRICULUM = (Stage(4, 8, 48, 500), Stage(16, 16, 16, 200), Stage(64, 24, 4, 200))
LEARNING_RATE = 4e-3
WARMUP = 50
TEST_FACTS = (4, 16, 48, 64)


def fix_first_layer(model: Decoder, sharpness: float = 8.0) -> None:
    """Makes each head of the first layer look `DISTANCES` tokens back, for any tokens."""
    attention = model.layers[0].self_attn
    layer = model.config.layers[0]
    turn = np.outer(DISTANCES, -layer.rope.frequencies(layer.head_dim))
    queries = sharpness * np.concatenate([np.cos(turn), np.sin(turn)], axis=1)
    keys = sharpness * np.repeat([[1.0, 0.0]], layer.head_dim // 2, axis=1).repeat(layer.kv_heads, axis=0)
    for projection, bias in ((attention.q_proj, queries), (attention.k_proj, keys)):
        projection.bias = nnx.Param(jnp.asarray(bias.reshape(-1), jnp.float32))
        projection.kernel[...] = projection.kernel[...] * 0.05


def is_fixed(path: tuple, _) -> bool:
    """Whether a parameter belongs to the first layer's attention."""
    return path[:3] == ("layers", 0, "self_attn")


def score(model: Decoder, tokens: jax.Array, marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of answers and the full stops after them, and the share of right answers.

    Args:
      model: the decoder.
      tokens: i32[B, T]; documents and questions.
      marks: i32[A]; positions before the answers.
    """
    positions = jnp.concatenate([marks, marks + 1])
    logits = model.dense(tokens, positions)
    wanted = tokens[:, positions + 1]
    right = jnp.argmax(logits, axis=-1) == wanted
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    return jnp.mean(losses), jnp.mean(right[:, : marks.size].astype(jnp.float32))


def train(seed: int = 0) -> Decoder:
    """Runs the curriculum."""
    model = Decoder(CONFIG, rngs=nnx.Rngs(seed))
    fix_first_layer(model)
    graphdef, fixed, params = nnx.split(model, is_fixed, ...)
    stages = [stage for stage in CURRICULUM for _ in range(stage.num_steps)]
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, WARMUP, len(stages))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments, tokens, marks):
        def loss(params):
            return score(nnx.merge(graphdef, fixed, params), tokens, marks)

        gradient, _ = jax.grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for stage in track(stages, "training"):
        batch = recall.make_batch(rng, stage.num_documents, stage.num_facts, stage.num_questions, repeat=True)
        params, moments = step(params, moments, *batch)
    return nnx.merge(graphdef, fixed, params)


def accuracy(model: Decoder, num_facts: int, *, num_documents: int = 64, seed: int = 1) -> float:
    """Share of right answers on new documents, with questions about up to 16 different people each."""
    rng = np.random.default_rng(seed)
    run = jax.jit(score)
    batches = [recall.make_batch(rng, 8, num_facts, min(num_facts, 16)) for _ in range(-(-num_documents // 8))]
    return float(np.mean([run(model, *batch)[1] for batch in batches]))


def main(arguments: list[str] | None = None) -> None:
    """Trains, tests and saves."""
    parser = Parser("train", "Trains the bundled associative-recall decoder.")
    parser.add_argument("--out", metavar="DIR", default=recall.CHECKPOINT, help="default: %(default)s")
    folder = parser.parse_args(arguments).out
    began = time.perf_counter()
    model = train()
    print(f"trained in {time.perf_counter() - began:.0f} s")
    for num_facts in TEST_FACTS:
        print(f"{accuracy(model, num_facts):8.2%} right on new documents of {num_facts} facts")
    save(model, folder, recall.make_tokenizer())
    print(f"saved in {folder}")


if __name__ == "__main__":
    main()
