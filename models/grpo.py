# SPDX-License-Identifier: Apache-2.0
"""GRPO with `kvjax.rollout`: each training step samples, scores and updates in one program.

The bundled model answers a question about a document and babbles on, as it was never taught to end. Here it learns to:
a right answer is rewarded, the more the sooner <pad> comes. Each version of the weights is a namespace, whose number is
an argument of the program: new weights find no K/V of old ones, and nothing is compiled again.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
from flax import nnx
from rich.progress import Progress

import kvjax
from kvjax._pictures import AMBER, VIOLET, finish, new_figure, picture

from . import commands, demo, loading, recall

FACTS, DOCUMENTS, PROMPTS, END = 16, 4, 8, recall.IDS["<pad>"]  # a step asks 8 questions about one of 4 documents
WIDTH, MOST = FACTS * recall.FACT_TOKENS + recall.QUESTION_TOKENS, 12  # tokens of a prompt, and of a completion
RATE, UPDATES, CLIP, PENALTY = 1e-3, 2, 0.2, 0.02  # updates of a step; the penalty of drifting from the reference


class Report(NamedTuple):
    """The mean reward, the mean length of a completion, and the prompt tokens that were not computed."""

    reward: Any
    length: Any
    reused: Any


def make_step(graph: Any, optimizer: optax.GradientTransformation, samples: int) -> Any:
    """The jitted step: it samples G completions of each prompt, and makes some updates by them."""

    def step(training, reference, prompts, answers, seed, versions, num_updates) -> tuple[Any, Report]:
        """Takes prompts i32[B, P], answers i32[B], and versions i32[2] of the reference and of the weights."""
        weights, moments, cache = training  # donated
        lengths = np.full(PROMPTS, WIDTH, np.int32)  # all prompts are of one length
        found, cache, _ = kvjax.rollout(
            nnx.merge(graph, weights),
            cache,
            prompts,
            lengths,
            samples=samples,
            max_new_tokens=MOST,
            stop_tokens=[END],
            seed=seed,
            namespace=versions[1],
        )
        expected, cache, _ = kvjax.score(
            nnx.merge(graph, reference),
            cache,
            prompts,
            found.tokens,
            lengths,
            completion_lengths=found.lengths,
            namespace=versions[0],
        )
        cache, _ = cache.forget_namespaces(versions[:1])  # the updates end this version; the reference's K/V stay
        reward = jnp.where(found.tokens[:, :, 0] == answers[:, None], 1 - (found.lengths - 1) / MOST, 0)  # f32[B, G]
        advantage = jax.nn.standardize(reward, axis=1, epsilon=1e-6)[:, :, None]  # within the prompt's group
        rows = jnp.concatenate([jnp.repeat(prompts, samples, axis=0), found.tokens.reshape(-1, MOST)], axis=1)

        def loss(weights):
            logits = nnx.merge(graph, weights).dense(rows, np.arange(WIDTH - 1, WIDTH - 1 + MOST))  # of the completions
            logprobs = -optax.softmax_cross_entropy_with_integer_labels(logits, found.tokens.reshape(-1, MOST))
            logprobs = logprobs.reshape(found.tokens.shape)
            ratio, drift = jnp.exp(logprobs - found.logprobs), expected - logprobs
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
            gain -= PENALTY * (jnp.exp(drift) - drift - 1)
            return -jnp.mean(gain, where=found.mask)

        def update(_, carry):
            changes, moments = optimizer.update(jax.grad(loss)(carry[0]), carry[1], carry[0])
            return optax.apply_updates(carry[0], changes), moments

        weights, moments = jax.lax.fori_loop(0, num_updates, update, (weights, moments))
        reused = prompts.size * samples - jnp.sum(WIDTH - found.cached[:, 0])  # samples share their prompt's K/V
        return (weights, moments, cache), Report(reward.mean(), found.lengths.mean(), reused)

    return jax.jit(step, donate_argnums=0)


def run(num_steps: int, samples: int = 8, seed: int = 0) -> list[Report]:
    """Trains and prints; returns the report of each step."""
    console, rng, names = rich.console.Console(highlight=False), np.random.default_rng(seed), kvjax.Namespaces()
    graph, weights = nnx.split(model := loading.load(recall.CHECKPOINT)[0])
    optimizer, rows = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)), PROMPTS * samples
    shape: Any = {"num_blocks": 13 * rows, "max_seqs": rows, "max_length": WIDTH + MOST, "block_size": 8}
    cache = kvjax.Cache.create(kvjax.make_spec(model.layer_specs(), **shape, dtype="float32"))
    reference, training = jax.tree.map(jnp.copy, weights), (weights, optimizer.init(weights), cache)
    step, documents = make_step(graph, optimizer, samples), [recall.make_document(rng, FACTS) for _ in range(DOCUMENTS)]

    def turn(version: str, num_updates: int) -> tuple[Report, float]:
        """A step's report, and its seconds."""
        nonlocal training
        document = documents[rng.integers(DOCUMENTS)]
        pairs = demo.questions(document, rng.choice([*document.facts], PROMPTS, replace=False).tolist())
        prompts, answers = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
        versions = np.array([names(weights="reference"), names(weights=version)], np.int32)
        stream, began = np.uint32(rng.integers(1 << 32)), time.perf_counter()
        done = step(training, reference, prompts, answers, stream, versions, np.int32(num_updates))
        training, report = jax.block_until_ready(done)
        return jax.device_get(report), time.perf_counter() - began

    with console.status("compiling the step ..."):
        _, seconds = turn("start", 0)
    console.print(f"compiled in {seconds:.0f} s; rollouts, with scores, are timed in steps without updates\n")
    console.print("[bold]step  reward  tokens    prompt tokens reused  rollout   update")
    reports = list[Report]()
    with Progress(*Progress.get_default_columns(), "reward {task.fields[reward]:.2f}", console=console) as progress:
        task = progress.add_task("training", total=num_steps, reward=0.0)
        for number in range(1, num_steps + 1):
            report, seconds = turn(f"{number}", UPDATES)
            reports.append(report)
            progress.update(task, advance=1, reward=report.reward)
            if number == 1 or number % 5 == 0:
                _, sampling = turn(f"{number}, timed", 0)
                line = f"{number:4} {report.reward:7.2f} {report.length:7.1f} {report.reused:11,} of {rows * WIDTH:8,}"
                console.print(line + "".join(f"  {1e3 * part:4.0f} ms" for part in (sampling, seconds - sampling)))
    assert step._cache_size() == 1, "a step after the first one was compiled"
    return reports


@picture
def plot(reports: list[Report], path: pathlib.Path) -> None:
    """Draws rewards and lengths by step."""
    figure = new_figure(7, 4.6)
    lines = ("reward", "mean reward", VIOLET), ("length", "tokens of a completion", AMBER)
    for ax, (name, label, colour) in zip(figure.subplots(2, sharex=True), lines, strict=True):
        ax.plot(range(1, len(reports) + 1), [getattr(report, name) for report in reports], color=colour, marker="o")
        ax.set_ylim(bottom=0)
        finish(ax, "training step" if name == "length" else "", label)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = commands.Parser("grpo", "Teaches the bundled model to end its answers: GRPO, a step in one program.")
    for name, default, least, most in (("steps", 40, 1, None), ("samples", 8, 2, 64), ("seed", 0, 0, None)):
        kind = commands.number(int, least, most)
        parser.add_argument(f"--{name}", metavar="N", type=kind, default=default, help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw reward and length there when done")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    commands.prepare(parser, args)
    reports = run(args.steps, args.samples, args.seed)
    commands.save_picture(parser, args, lambda path: plot(reports, path))


if __name__ == "__main__":
    main()
