# SPDX-License-Identifier: Apache-2.0
"""GRPO with `kvjax.rollout`: each training step samples, scores and updates in a single program.

The bundled model answers a question about a document and then continues with other text, because it was never taught to
end. Here it learns to end: a right answer has a reward, which is higher the sooner <pad> comes. Each version of the
weights has its own namespace, so new weights find no old K/V. The namespace's number is an argument of the program, so
nothing is compiled again.
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

FACTS = 16
DOCUMENTS = 4
PROMPTS = 8  # a step's questions, all about the same document
END = recall.IDS["<pad>"]
WIDTH = FACTS * recall.FACT_TOKENS + recall.QUESTION_TOKENS  # tokens of a prompt
MAX_TOKENS = 12  # of a completion
RATE = 1e-3
UPDATES = 2  # of the weights in a step
CLIP = 0.2
PENALTY = 0.02  # for drifting from the reference


class Report(NamedTuple):
    """The mean reward, the mean length of a completion, and the number of prompt tokens found in the cache."""

    reward: Any
    length: Any
    reused: Any


def make_step(graph: Any, optimizer: optax.GradientTransformation, samples: int) -> Any:
    """Makes the jitted step. It samples G completions of each prompt, and updates the weights by them."""

    def step(training, reference, prompts, answers, seed, versions, num_updates) -> tuple[Any, Report]:
        """Takes prompts i32[B, P], answers i32[B], and namespaces i32[2] of the reference and the weights."""
        weights, moments, cache = training  # donated
        lengths = np.full(PROMPTS, WIDTH, np.int32)  # all prompts are of one length
        rollouts, cache, _ = kvjax.rollout(
            nnx.merge(graph, weights),
            cache,
            prompts,
            lengths,
            samples=samples,
            max_new_tokens=MAX_TOKENS,
            stop_tokens=[END],
            seed=seed,
            namespace=versions[1],
        )
        expected, cache, _ = kvjax.score(
            nnx.merge(graph, reference),
            cache,
            prompts,
            rollouts.tokens,
            lengths,
            completion_lengths=rollouts.lengths,
            namespace=versions[0],
        )
        cache, _ = cache.forget_namespaces(versions[:1])  # keeps the reference's K/V; the updates end this version
        is_right = rollouts.tokens[:, :, 0] == answers[:, None]
        reward = jnp.where(is_right, 1 - (rollouts.lengths - 1) / MAX_TOKENS, 0)  # f32[B, G]
        advantage = jax.nn.standardize(reward, axis=1, epsilon=1e-6)[:, :, None]  # within the prompt's group
        rows = jnp.concatenate([jnp.repeat(prompts, samples, axis=0), rollouts.tokens.reshape(-1, MAX_TOKENS)], axis=1)

        def loss(weights):
            positions = np.arange(WIDTH - 1, WIDTH - 1 + MAX_TOKENS)  # before the completions' tokens
            logits = nnx.merge(graph, weights).dense(rows, positions)
            logprobs = -optax.softmax_cross_entropy_with_integer_labels(logits, rollouts.tokens.reshape(-1, MAX_TOKENS))
            logprobs = logprobs.reshape(rollouts.tokens.shape)
            ratio = jnp.exp(logprobs - rollouts.logprobs)
            drift = expected - logprobs
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
            gain -= PENALTY * (jnp.exp(drift) - drift - 1)
            return -jnp.mean(gain, where=rollouts.mask)

        def update(_, carry):
            weights, moments = carry
            changes, moments = optimizer.update(jax.grad(loss)(weights), moments, weights)
            return optax.apply_updates(weights, changes), moments

        weights, moments = jax.lax.fori_loop(0, num_updates, update, (weights, moments))
        reused = prompts.size * samples - jnp.sum(WIDTH - rollouts.cached[:, 0])  # the samples share their prompt's K/V
        return (weights, moments, cache), Report(reward.mean(), rollouts.lengths.mean(), reused)

    return jax.jit(step, donate_argnums=0)


def run(num_steps: int, samples: int = 8, seed: int = 0) -> list[Report]:
    """Trains and prints. Returns the report of each step."""
    console = rich.console.Console(highlight=False)
    rng = np.random.default_rng(seed)
    names = kvjax.Namespaces()
    model, _ = loading.load(recall.CHECKPOINT)
    graph, weights = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))
    rows = PROMPTS * samples
    shape: Any = {"num_blocks": 13 * rows, "max_seqs": rows, "max_length": WIDTH + MAX_TOKENS, "block_size": 8}
    cache = kvjax.Cache.create(kvjax.make_spec(model.layer_specs(), **shape, dtype="float32"))
    reference = jax.tree.map(jnp.copy, weights)
    training = (weights, optimizer.init(weights), cache)
    step = make_step(graph, optimizer, samples)
    documents = [recall.make_document(rng, FACTS) for _ in range(DOCUMENTS)]

    def turn(version: str, num_updates: int) -> tuple[Report, float]:
        """Runs a step. Returns its report and its seconds."""
        nonlocal training
        document = documents[rng.integers(DOCUMENTS)]
        pairs = demo.questions(document, rng.choice([*document.facts], PROMPTS, replace=False).tolist())
        prompts, answers = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
        versions = np.array([names(weights="reference"), names(weights=version)], np.int32)
        step_seed = np.uint32(rng.integers(1 << 32))
        began = time.perf_counter()
        results = step(training, reference, prompts, answers, step_seed, versions, np.int32(num_updates))
        training, report = jax.block_until_ready(results)
        return jax.device_get(report), time.perf_counter() - began

    with console.status("compiling the step ..."):
        _, seconds = turn("start", 0)
    console.print(f"compiled in {seconds:.0f} s; rollouts, with scores, are timed in steps without updates\n")
    console.print("[bold]step  reward  tokens    prompt tokens reused  rollout   update")
    reports: list[Report] = []
    with Progress(*Progress.get_default_columns(), "reward {task.fields[reward]:.2f}", console=console) as progress:
        task = progress.add_task("training", total=num_steps, reward=0.0)
        for step_number in range(1, num_steps + 1):
            report, seconds = turn(f"{step_number}", UPDATES)
            reports.append(report)
            progress.update(task, advance=1, reward=report.reward)
            if step_number == 1 or step_number % 5 == 0:
                _, sampling = turn(f"{step_number}, timed", 0)
                line = f"{step_number:4} {report.reward:7.2f} {report.length:7.1f} {report.reused:11,}"
                line += f" of {rows * WIDTH:8,}"
                console.print(line + "".join(f"  {1e3 * part:4.0f} ms" for part in (sampling, seconds - sampling)))
    assert step._cache_size() == 1, "a step after the first one was compiled"
    return reports


@picture
def plot(reports: list[Report], path: pathlib.Path) -> None:
    """Draws rewards and lengths against the steps."""
    figure = new_figure(7, 4.6)
    lines = (("reward", "mean reward", VIOLET), ("length", "tokens of a completion", AMBER))
    for ax, (name, label, colour) in zip(figure.subplots(2, sharex=True), lines, strict=True):
        ax.plot(range(1, len(reports) + 1), [getattr(report, name) for report in reports], color=colour, marker="o")
        ax.set_ylim(bottom=0)
        finish(ax, "training step" if name == "length" else "", label)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
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
