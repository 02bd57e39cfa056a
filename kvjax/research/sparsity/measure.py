# SPDX-License-Identifier: Apache-2.0
"""A study of policies: quality, time and blocks of a model that reads a part of its cache."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._pictures import INK, LINES, finish, legend_below, new_figure, picture, saved
from kvjax.layers import LayerSpec
from kvjax.model import Model, call
from kvjax.pools.device import init_pools
from kvjax.pools.views import view
from kvjax.research.sparsity.calls import call_sparse, check_budget, init_states
from kvjax.research.sparsity.policies import SparsityPolicy, attention_mass, h2o, quest, random, snapkv, streaming
from kvjax.spec import CacheSpec, make_spec
from kvjax.verbs.admit import admit
from kvjax.verbs.commit import commit
from kvjax.verbs.extend import extend
from kvjax.verbs.init import init

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES: dict[str, SparsityPolicy] = {
    "streaming": streaming(),
    "random": random(),
    "h2o": h2o(),
    "snapkv": snapkv(),
    "quest": quest(),
    "attention_mass": attention_mass(),
}
_CHUNK = 256  # tokens of a prompt at a time


class Texts(NamedTuple):
    """Texts of the same length, whose beginnings are prompts.

    Attributes:
      tokens: i32[S, T].
      num_prompt: the number of first tokens, which the model reads with full attention.
    """

    tokens: np.ndarray
    num_prompt: int


class Followed(NamedTuple):
    """Predictions of a model that follows texts, token by token, after their prompts.

    Attributes:
      log_probabilities: f32[S, T - num_prompt]; the log-probability of each token after the prompt.
      greedy: i32[S, T - num_prompt]; the model's own choice at each position.
      milliseconds: the median time of a step.
      blocks: blocks of a row at the last step.
      blocks_read: the mean number of a row's blocks read by a layer, at the last step.
      blocks_held: the blocks of a row still readable by some layer, at the last step.
    """

    log_probabilities: np.ndarray
    greedy: np.ndarray
    milliseconds: float
    blocks: float
    blocks_read: float
    blocks_held: float


class Measurement(NamedTuple):
    """A line of a study.

    Attributes:
      policy: the policy's name, "full" for full attention.
      budget: the share of blocks to read.
      perplexity: the perplexity of the tokens after the prompts.
      recall: the share of needles found, or None without needles.
      milliseconds: the median time of a step.
      bytes_read: a row's bytes read by a step, in all layers with full attention.
      bytes_held: a row's bytes there that a later step may read.
    """

    policy: str
    budget: float
    perplexity: float
    recall: float | None
    milliseconds: float
    bytes_read: float
    bytes_held: float


def study(
    model: Model,
    layers: Sequence[LayerSpec],
    texts: Texts,
    needles: Texts | None = None,
    *,
    policies: Mapping[str, SparsityPolicy] = POLICIES,
    budgets: Sequence[float] = (0.5, 0.25, 0.12),
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = "float32",
) -> Iterator[Measurement]:
    """Measures full attention, then each policy with each budget.

    Args:
      model: a model, with its layers unrolled.
      layers: the specs of its layers.
      texts: texts for the perplexity of the tokens after the prompts.
      needles: texts whose last token can be told only from their prompts. None leaves recall out.
      policies: the policies by name.
      budgets: shares of blocks to read.
      block_size: P.
      dtype: dtype of the K/V.

    Yields:
      A line for full attention, then a line for each policy and budget.

    Example:
      >>> from kvjax.research import sparsity
      >>> from models import loading, recall
      >>> model, _ = loading.load(recall.CHECKPOINT)
      >>> text = "alice is in paris . bob is in oslo . carla is in rome . where is bob ? oslo"
      >>> needles = sparsity.Texts(np.array([recall.encode(text)]), num_prompt=15)
      >>> policies = {"quest": sparsity.quest()}
      >>> lines = sparsity.study(
      ...     model, model.layer_specs(), needles, needles, policies=policies, budgets=[0.5], block_size=4
      ... )
      >>> [(line.policy, line.budget, line.recall) for line in lines]
      [('full', 1.0, 1.0), ('quest', 0.5, 1.0)]
    """
    max_length = max(np.shape(given.tokens)[1] for given in (texts, needles or texts))
    for name, policy in {"full": None, **policies}.items():
        reader = _Reader(model, layers, policy, max_length, block_size, dtype)
        shares = [1.0] if policy is None else budgets
        of_texts = reader.follow(texts, shares)
        parts = [of_texts]  # for the same texts
        if needles is not None and needles is not texts:
            rows = len(texts.tokens)  # so the programs for the texts serve needles with prompts of the same length
            starts = range(0, len(needles.tokens), rows)
            parts = [
                reader.follow(needles._replace(tokens=needles.tokens[start : start + rows]), shares) for start in starts
            ]
        recalls = [None] * len(shares) if needles is None else _recalls(needles, parts)
        for budget, text, recall in zip(shares, of_texts, recalls, strict=True):
            yield Measurement(
                name,
                budget,
                float(np.exp(-np.mean(text.log_probabilities))),
                recall,
                text.milliseconds,
                text.blocks_read * reader.block_bytes(texts),
                text.blocks_held * reader.block_bytes(texts),
            )


def follow(
    model: Model,
    layers: Sequence[LayerSpec],
    texts: Texts,
    *,
    policy: SparsityPolicy | None = None,
    budget: float = 1.0,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = "float32",
) -> Followed:
    """Lets a model read prompts with full attention, and then follow the texts token by token under a policy.

    Args:
      model: a model, with its layers unrolled.
      layers: the specs of its layers.
      texts: the texts.
      policy: the policy. None reads all blocks.
      budget: the share of blocks to read.
      block_size: P.
      dtype: dtype of the K/V.

    Raises:
      ValueError: if the budget is not in (0, 1], or a prompt is not shorter than its text.
    """
    max_length = np.shape(texts.tokens)[1]
    return _Reader(model, layers, policy, max_length, block_size, dtype).follow(texts, [budget])[0]


def _recalls(needles: Texts, parts: Iterable[Sequence[Followed]]) -> Iterator[float]:
    """The share of needles found with each budget, by what a model said to each part of the needles."""
    for of_budget in zip(*parts, strict=True):
        said = np.concatenate([followed.greedy[:, -1] for followed in of_budget])
        yield float(np.mean(said == needles.tokens[:, -1]))


class _Reader:
    """A model that follows texts under a policy. Its programs serve all budgets, and all texts of a shape."""

    def __init__(self, model, layers, policy, max_length, block_size, dtype):
        self.model = model
        self.layers = layers
        self.policy = policy
        self.noted = None if policy is None else _noted(policy)
        self.options = {"max_length": max_length, "block_size": block_size, "dtype": dtype}
        self.step = jax.jit(functools.partial(_step, policy=self.noted), donate_argnums=(1, 2, 3))
        self.admit = jax.jit(admit, static_argnames="length", donate_argnums=0)

    def spec(self, texts: Texts) -> CacheSpec:
        rows = len(texts.tokens)
        num_blocks = rows * -(-self.options["max_length"] // self.options["block_size"])
        return make_spec(self.layers, num_blocks=num_blocks, max_seqs=rows, sparse=True, **self.options)

    def block_bytes(self, texts: Texts) -> int:
        """Bytes of a block in all layers with full attention."""
        return self.spec(texts).groups[0].block_bytes(self.options["block_size"])

    def follow(self, texts: Texts, budgets: Sequence[float]) -> list[Followed]:
        """Reads the prompts once, and then follows the texts with each budget."""
        for budget in budgets:
            check_budget(budget)
        length = np.shape(texts.tokens)[1]
        if not 0 < texts.num_prompt < length:
            raise ValueError(f"num_prompt: got {texts.num_prompt}, wanted 1 to {length - 1}, with a token after it")
        said, *read = self._read(texts)
        return [self._follow(texts, said, jax.tree.map(jnp.copy, read), budget) for budget in budgets]

    def _read(self, texts: Texts) -> tuple[Any, ...]:
        """Reads the prompts in equal chunks. Returns the model's predictions of the next tokens, and the cache."""
        spec = self.spec(texts)
        tokens = np.asarray(texts.tokens, np.int32)
        state = init(spec)
        for row, prompt in enumerate(tokens[:, : texts.num_prompt]):
            state, events = self.admit(state, np.int32(row), prompt, length=texts.num_prompt)
            assert events.ok
        pools = init_pools(spec)
        states = {} if self.noted is None else init_states(self.noted, spec)
        said = None
        chunk = -(-texts.num_prompt // -(-texts.num_prompt // _CHUNK))
        for start in range(0, texts.num_prompt, chunk):
            end = min(start + chunk, texts.num_prompt)
            padded = np.pad(tokens[:, start:end], [(0, 0), (0, chunk - end + start)])
            given = padded, np.int32(end - start), tokens[:, end], np.float32(1)
            said, state, pools, states = self.step(self.model, state, pools, states, *given)
        return said, state, pools, states

    def _follow(self, texts: Texts, said: Any, cache: Sequence[Any], budget: float) -> Followed:
        """Follows the texts after their prompts."""
        state, pools, states = cache
        tokens = np.asarray(texts.tokens, np.int32)
        steps = [said]
        seconds = []
        for position in range(texts.num_prompt, tokens.shape[1] - 1):
            began = time.perf_counter()
            given = tokens[:, position : position + 1], np.int32(1), tokens[:, position + 1], np.float32(budget)
            said, state, pools, states = self.step(self.model, state, pools, states, *given)
            steps.append(jax.block_until_ready(said))
            seconds.append(time.perf_counter() - began)
        log_probabilities, greedy = (np.stack(parts, axis=1) for parts in zip(*steps, strict=True))
        blocks = float(np.mean(-(-np.asarray(state.seqs.length) // self.options["block_size"])))
        blocks_read = blocks_held = blocks
        if states:
            columns = np.stack([np.asarray(columns) for _, columns in states.values()])  # [L, S, M]
            blocks_read = float(columns.sum(axis=2).mean())
            if not self.policy.returns:
                blocks_held = float(columns.any(axis=0).sum(axis=1).mean())
        milliseconds = 1e3 * float(np.median(seconds or [0.0]))
        return Followed(log_probabilities, greedy, milliseconds, blocks, blocks_read, blocks_held)


def _step(model, state, pools, states, tokens, num_tokens, following, budget, *, policy):
    """Runs a chunk of each row's prompt, or the next token of each row.

    Returns:
      A pair for the tokens i32[S] `following`: their log-probabilities f32[S], and the model's choices i32[S]. Then
      the state, the pools and the policy's states.
    """
    rows, width = tokens.shape
    if width == 1:
        state, _ = extend(state, np.ones(rows, bool), 1)
    now = view(state, num_tokens, width)
    last = jnp.broadcast_to(num_tokens - 1, (rows,))
    if policy is None:
        logits, pools = call(model, tokens, pools, now, last)
    else:
        logits, pools, states = call_sparse(
            model, tokens, pools, now, last=last, policy=policy, budget=budget, states=states
        )
    state, _ = commit(state, tokens, now.num_tokens)
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    said = jnp.take_along_axis(log_probabilities, following[:, None], axis=1)[:, 0]
    return (said, jnp.argmax(logits, axis=-1).astype(jnp.int32)), state, pools, states


def _noted(policy: SparsityPolicy) -> SparsityPolicy:
    """The policy with its last choice as a part of its state."""

    def choose(scores, state):
        columns, inner = policy.choose(scores, state[0])
        columns = (columns | scores.recent(scores.num_blocks - scores.first_own)) & scores.all
        return columns, (inner, columns)

    def make(*shape: int):
        return None if policy.init is None else policy.init(*shape), jnp.zeros(shape[:2], bool)

    return policy._replace(choose=choose, init=make)


def table(lines: Iterable[Measurement]) -> Iterator[str]:
    """The lines of a study as text, below a head. Each is ready when it is measured."""
    yield f"{'policy':<16}{'budget':>8}{'perplexity':>12}{'recall':>8}{'ms a step':>11}{'MB read':>9}{'MB held':>9}"
    for line in lines:
        recall = "" if line.recall is None else f"{line.recall:.0%}"
        yield (
            f"{line.policy:<16}{line.budget:>8.0%}{line.perplexity:>12.2f}{recall:>8}{line.milliseconds:>11.2f}"
            f"{line.bytes_read / 1e6:>9.2f}{line.bytes_held / 1e6:>9.2f}"
        )


@picture
def plot_study(
    lines: Sequence[Measurement], path: str | os.PathLike[str] | None = None, *, figure: Figure | None = None
) -> Figure:
    """Draws perplexity, and recall if it was measured, by the share of blocks read.

    Args:
      lines: the lines of a study.
      path: saves the picture to this file; None disables saving.
      figure: the figure to draw in; defaults to a new figure.

    Returns:
      The figure, with an axis for each measure.

    Raises:
      ImportError: without matplotlib.
    """
    has_recall = any(line.recall is not None for line in lines)
    figure = new_figure(10 if has_recall else 6, 4.2) if figure is None else figure
    axes = figure.subplots(1, 1 + has_recall, squeeze=False)[0]
    names = dict.fromkeys(line.policy for line in lines if line.policy != "full")
    measures = ["perplexity", *(["recall"] if has_recall else [])]
    for ax, measure in zip(axes, measures, strict=True):
        for name, colour in zip(names, itertools.cycle(LINES)):
            points = sorted((line.budget, getattr(line, measure)) for line in lines if line.policy == name)
            ax.plot(*zip(*points, strict=True), marker="o", color=colour, label=name if ax is axes[0] else None)
        for line in lines:
            if line.policy == "full":
                label = "full attention" if ax is axes[0] else None
                ax.axhline(getattr(line, measure), color=INK, linestyle="--", linewidth=1.0, label=label)
        ax.set_xlim(left=0)
        is_share = measure == "recall"
        finish(ax, "share of blocks read", "needles found, %" if is_share else measure, percent=is_share)
    axes[0].set_yscale("log")
    legend_below(figure)
    return saved(figure, path)
