# SPDX-License-Identifier: Apache-2.0
"""Speculation: a drafter guesses the next tokens of rows, and a single pass of the model verifies the guesses.

A pass computes each row's last token together with its drafts. Each row then chooses a token after its last token as it
would without a drafter: from the same logits, with the same seed and position. While its choice equals the next draft,
the logits after this draft are the logits of its next step, so the row chooses again:

    row    last   drafts        choices        written       the next pass begins with
    0      a      b  c  d       b  c  x        a b c         x
    1      p      q  r  s       q  r  s  t     p q r s       t
    2      u      -  -  -       v              u             v

So a row gets the tokens of plain generation, greedy or sampled, whatever the drafts are. A drafter only decides how
many of them a pass brings. The next pass overwrites the K/V of rejected drafts. Nobody commits them.

Passes have two widths: a narrow pass is a plain decode step, and a wide pass has space for drafts. A pass is wide where
the accepted drafts are expected to save more time than its width costs.

Source: Leviathan et al. 2023. A draft is a single token, so their rejection sampling accepts it with its probability
under the model. Here it is accepted if the row's own random numbers choose it, which is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, fence, once, pick, put
from kvjax.cache import Cache
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.serving.decode import DecodeBlock, LogitsFn, Rows, SampledTokens, Sampler, advance, compute
from kvjax.serving.requests import Serving
from kvjax.serving.speculation_cost import estimated_pass_cost
from kvjax.serving.speculation_stats import DraftStats, best_drafts
from kvjax.serving.speculation_verify import PassResult, verify
from pallas_kernels.loops import fori_loop, while_loop


class Drafting(NamedTuple):
    """The arguments of `Drafter.propose`, for S rows.

    Attributes:
      cache: the cache. Its metadata have the tokens before this block of steps, its pools also the written tokens.
      rows: the rows. `rows.token` i32[S] is the last token of each, whose K/V are not written yet.
      wanted: bool[S]; rows with space for drafts.
      written: i32[S]; number of each row's tokens whose K/V are written, and not committed yet.
      text: i32[S, L]; the latest tokens of each row, at the front. None if the drafter's `window` is 0.
      length: i32[S]; number of tokens in `text`, the last token included.
      choose: chooses tokens from logits f32[S, V], by the rows' options and random numbers.
    """

    cache: Cache
    rows: Rows
    wanted: jax.Array
    written: jax.Array
    text: jax.Array | None
    length: jax.Array
    choose: Sampler


class Drafts(NamedTuple):
    """The guesses of a drafter.

    Attributes:
      tokens: i32[S, num_tokens]; the guesses for the next tokens of each row. Any ids are safe.
      count: i32[S]; the number of guesses of each row, from the front.
      pools: the pools, if the drafter wrote into them.
    """

    tokens: jax.Array
    count: jax.Array
    pools: Pools


class Drafter(Pytree, static=("num_tokens",)):
    """The base class of drafters. A subclass is a pytree with a static `num_tokens`, and has a pure method `propose`.

    Attributes:
      num_tokens: static; maximum drafts of a row in a pass.
      max_drafts: static; maximum drafts of all rows in a pass, which computes as many positions more than a plain step.
        None means `num_tokens` for each row.
      pass_cost: f32[]; additional time of a wide pass, as a share of a plain step's time. A pass verifies drafts only
        if they are expected to bring as many tokens more, as a share of the rows' tokens. None means an estimate from
        the number of positions; `measured_pass_cost` measures it for your model.
      window: static; number of each row's latest tokens in `Drafting.text`.
      hope: static; makes a drafter try again. Each token without a draft adds as many right drafts to the statistics.
        0 suits a drafter without costs of its own: it proposes drafts for every pass, verified or not.

    Example:
      >>> class Successor(kvjax.serving.Drafter, static=("num_tokens",)):
      ...     num_tokens: int = 2
      ...     def propose(self, drafting):
      ...         guesses = drafting.rows.token[:, None] + 1 + jnp.arange(self.num_tokens)[None]
      ...         count = jnp.where(drafting.wanted, self.num_tokens, 0)
      ...         return kvjax.serving.Drafts(guesses, count, drafting.cache.pools)
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=1, max_length=32, block_size=8)
      >>> def next_number(tokens, pools, view, *, last):  # no layers: the next token is the last token plus 1
      ...     return jax.nn.one_hot(tokens[jnp.arange(len(tokens)), last] + 1, 50), pools
      >>> model, cache = jax.tree_util.Partial(next_number), kvjax.Cache.create(spec)
      >>> outputs, *_ = kvjax.generate(model, cache, [[3, 4]], max_new_tokens=8, drafter=Successor())
      >>> outputs[0].tokens, outputs[0].accepted_tokens > 0
      ([5, 6, 7, 8, 9, 10, 11, 12], True)
    """

    num_tokens: int

    # Without types, so that they are no fields: a field of a subclass keeps its place.
    max_drafts = 16
    pass_cost = None
    window = 0
    hope = 0.0

    def propose(self, drafting: Drafting) -> Drafts:
        """Guesses the next tokens of rows where bool[S] `drafting.wanted`. The others have no guesses."""
        raise NotImplementedError

    def limits(self, num_rows: int, k: int) -> tuple[int, int]:
        """The maximum drafts of a row and of all rows, for blocks of k steps."""
        per_row = min(self.num_tokens, k - 1)
        total = num_rows * per_row
        return per_row, total if self.max_drafts is None else min(self.max_drafts, total)

    def cost(self, num_rows: int, max_total: int) -> Any:
        """f32[]; the additional time of a pass with space for `max_total` drafts, as a share of a plain step's time."""
        if self.pass_cost is None:
            return estimated_pass_cost(num_rows, max_total)
        return jnp.asarray(self.pass_cost, jnp.float32)


def decode_block(
    model: Model,
    serving: Serving,
    rows: Rows,
    new: jax.Array,
    steps: jax.Array,
    k: int,
    *,
    drafter: Drafter,
    logits_fn: LogitsFn | None,
    fixed_steps: bool,
    canonical: bool,
) -> tuple[Pools, DecodeBlock, Serving]:
    """Runs a block of decode steps like `compute`, in which a pass may write several tokens of a row.

    Each row writes at most min(new, steps) tokens, and an active row writes a token at least. The block ends early if a
    row has no space for all drafts of another pass, so a fast row never waits for slow rows. With `fixed_steps` or
    `canonical` each pass is wide, and no pass depends on the statistics of other rows. Returns the pools, the written
    tokens, and the requests with their statistics.
    """
    cache = serving.cache
    choose = Sampler.of(serving, logits_fn)
    max_drafts, max_total = drafter.limits(new.size, k)
    if max_drafts < 1:
        pools, _, written = compute(model, cache, rows, new, steps, choose, k, fixed_steps, fixed_split=canonical)
        return pools, written, serving
    request = serving.by_row
    text_start = jnp.maximum(request.num_tokens - drafter.window, 0)
    text = None
    if drafter.window:
        width = min(drafter.window, serving.width + 1) + k
        text = serving.requests.tokens(serving.row, text_start, width)
    # The fence keeps these reads before the writes of the caller.
    requests, text, stats = fence(serving.requests, text, request.draft_stats)
    always_wide = fixed_steps or canonical
    block = _Block(
        model,
        cache,
        drafter,
        choose,
        limit=jnp.minimum(new, steps),
        text_length=request.num_tokens - text_start,
        max_drafts=max_drafts,
        max_total=new.size * max_drafts if always_wide else max_total,
        always_wide=always_wide,
    )
    chosen = SampledTokens.none(new.size, k, choose.top)
    goes_on = jnp.any(rows.active & (block.limit > 0))
    zeros = jnp.zeros_like(new)
    result = PassResult(cache.pools, None, SampledTokens.none(new.size, 1 + max_drafts, choose.top), zeros)
    progress = _Progress(goes_on, result, rows, zeros, chosen, text, stats)
    if fixed_steps:
        num_passes = max(k // (1 + max_drafts), 1)
        progress = fori_loop(0, num_passes, lambda _, progress: block.run_pass(progress), progress)
    else:
        progress = while_loop(lambda progress: progress.goes_on, block.run_pass, progress)
    requests = requests.at(serving.row, serving.row >= 0, draft_stats=progress.stats)
    written = DecodeBlock(progress.written, progress.chosen, progress.rows.state)
    return progress.result.pools, written, serving.replace(requests=requests)


class _Progress(NamedTuple):
    """The state of a block between two passes."""

    goes_on: jax.Array  # bool[]
    result: PassResult  # of the latest pass, without a state. Each pass writes into its arrays.
    rows: Rows
    written: jax.Array  # i32[S]
    chosen: SampledTokens  # k columns
    text: jax.Array | None
    stats: DraftStats  # of the rows


class _Plan(NamedTuple):
    """The drafts of a pass."""

    active: jax.Array  # bool[S]
    tokens: jax.Array  # i32[S, C - 1]
    num_proposed: jax.Array  # i32[S]
    num_drafts: jax.Array  # i32[S]; drafts to verify
    is_wide: jax.Array  # bool[]


class _Block(NamedTuple):
    """A block of decode steps, apart from its progress."""

    model: Model
    cache: Cache
    drafter: Drafter
    choose: Sampler
    limit: jax.Array  # i32[S]; maximum tokens of each row in the block
    text_length: jax.Array  # i32[S]; number of tokens in the text before the block
    max_drafts: int
    max_total: int
    always_wide: bool

    def run_pass(self, progress: _Progress) -> _Progress:
        """Drafts, runs the model once, and adds the chosen tokens."""
        plan, pools = self._plan(progress)
        result = progress.result._replace(pools=pools, state=progress.rows.state)

        def narrow(result: PassResult) -> PassResult:
            return self._step(plan, progress, result)

        def wide(result: PassResult) -> PassResult:
            batch = jnp.concatenate([progress.rows.token[:, None], plan.tokens], axis=1)
            num_tokens = jnp.where(plan.active, 1 + plan.num_drafts, 0)
            current = self.cache.replace(pools=result.pools)
            size = plan.active.size + self.max_total
            return verify(self.model, current, progress.rows, batch, num_tokens, progress.written, self.choose, size)

        # Two loops of at most one turn: at a branch XLA would copy the pools.
        result = wide(result) if self.always_wide else once(plan.is_wide, wide, once(~plan.is_wide, narrow, result))
        return self._add(plan, progress, result)

    def _plan(self, progress: _Progress) -> tuple[_Plan, Pools]:
        """Asks the drafter, and chooses the drafts to verify. Also returns the drafter's pools."""
        active = progress.rows.active & (progress.written < self.limit)
        space = jnp.where(active, jnp.minimum(self.limit - progress.written - 1, self.max_drafts), 0)
        wanted = space > 0
        chance = progress.stats.chance
        threshold = self.drafter.cost(active.size, self.max_total) * count(active).astype(jnp.float32)
        if self.drafter.hope:  # the drafter has costs: it is not asked if even all its drafts would not be worth a pass
            wanted = wanted & (best_drafts(chance, space, self.max_drafts, self.max_total)[1] > threshold)
        drafting = Drafting(
            self.cache.replace(pools=progress.result.pools),
            progress.rows,
            wanted,
            progress.written,
            progress.text,
            self.text_length + progress.written,
            self.choose,
        )
        drafts = self.drafter.propose(drafting)
        num_proposed = jnp.where(wanted, jnp.clip(drafts.count, 0, space), 0)
        if self.always_wide:
            num_drafts = num_proposed
            is_wide = jnp.any(active)
        else:
            num_drafts, expected = best_drafts(chance, num_proposed, self.max_drafts, self.max_total)
            is_wide = expected > threshold
            num_drafts = jnp.where(is_wide, num_drafts, 0)
        return _Plan(active, drafts.tokens[:, : self.max_drafts], num_proposed, num_drafts, is_wide), drafts.pools

    def _step(self, plan: _Plan, progress: _Progress, result: PassResult) -> PassResult:
        """A narrow pass, which is a plain decode step."""
        rows = progress.rows
        view = self.cache.view(plan.active.astype(jnp.int32), 1, written=progress.written)
        logits, pools = forward(self.model, rows.token[:, None], result.pools, view, jnp.zeros_like(rows.token))
        choice, state = self.choose(logits, rows, self.cache.state.seqs.committed + progress.written + 1)
        chosen = result.chosen.put(SampledTokens.of(choice), jnp.int32(0))
        return PassResult(pools, state, chosen, jnp.zeros_like(result.num_accepted))

    def _add(self, plan: _Plan, progress: _Progress, result: PassResult) -> _Progress:
        """Adds the chosen tokens of a pass, and counts the drafts."""
        _, _, rows, written, chosen, text, stats = progress
        row_index = np.arange(written.size, dtype=np.int32)
        column: Any = np.arange(1 + self.max_drafts, dtype=np.int32)[None]
        active = plan.active
        tokens = result.chosen.tokens
        num_accepted = jnp.where(active, result.num_accepted, 0)
        num_new = jnp.where(active, 1 + num_accepted, 0)
        # If a draft was not verified, the chosen token still says whether it was right.
        is_first_right = (tokens[:, 0] == plan.tokens[:, 0]) & (plan.num_proposed > 0)
        num_right = jnp.where(plan.num_drafts > 0, num_accepted, is_first_right.astype(jnp.int32))
        num_tried = jnp.maximum(plan.num_drafts, jnp.minimum(plan.num_proposed, 1))
        hope = jnp.where(active, np.float32(self.drafter.hope), 0)
        stats = stats.after(num_tried, num_right, plan.num_drafts, hope)
        if text is not None:
            index = row_index[:, None], (self.text_length + written)[:, None] + column
            text = put(text, index, tokens, column < num_new[:, None])
        chosen = _inserted(chosen, result.chosen, written, num_new)
        written = written + num_new
        rows = rows.with_state(active, result.state).replace(remaining=rows.remaining - num_accepted)
        fits = self.cache.state.seqs.committed + written < self.cache.state.spec.max_length
        rows = advance(rows, active, pick(tokens, (row_index, num_accepted)), self.choose.stop, fits)
        is_cramped = rows.active & (self.limit - written < jnp.minimum(1 + self.max_drafts, rows.remaining))
        goes_on = jnp.any(rows.active & (written < self.limit)) & ~(plan.is_wide & jnp.any(is_cramped))
        return _Progress(goes_on, result._replace(state=None), rows, written, chosen, text, stats)


def _inserted(old: SampledTokens, new: SampledTokens, start: jax.Array, num_new: jax.Array) -> SampledTokens:
    """Replaces columns from start i32[S] on by the first num_new i32[S] new columns."""
    offset = np.arange(old.bits.shape[2], dtype=np.int32)[None] - start[:, None]
    source = jnp.clip(offset, 0, new.bits.shape[2] - 1)[None]
    values = jnp.take_along_axis(new.bits, source, axis=2)
    return SampledTokens(jnp.where((offset >= 0) & (offset < num_new[:, None]), values, old.bits))
