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
many of them a pass brings. K/V of rejected drafts are in slots that the next pass overwrites. Nobody commits them.

Passes have two widths: a narrow pass is a plain decode step, and a wide pass has space for drafts. A pass is wide where
the accepted drafts are expected to save more time than its width costs.

Source: Leviathan et al. 2023. A draft is a single token, so their rejection sampling accepts it with the probability
that the model gives to it. Here it is accepted if the row's own random numbers choose it, which is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, count, fence, leading, once, pick, put, runs
from kvjax.cache import Cache
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.pools.views import View
from kvjax.serving.decode import DecodeBlock, LogitsFn, Rows, SampledTokens, Sampler, advance, compute
from kvjax.serving.requests import Serving
from kvjax.serving.speculation_stats import best_drafts
from kvjax.spec import Kind
from pallas_kernels.loops import fori_loop, scan, while_loop


class Drafting(NamedTuple):
    """The data that a drafter sees before a pass, for S rows.

    Attributes:
      cache: the cache. Its metadata have the tokens before this block of steps, its pools also the written tokens.
      rows: the rows. `rows.token` i32[S] is the last token of each, whose K/V are not written yet.
      wanted: bool[S]; rows with space for drafts.
      written: i32[S]; tokens of each row that are written, and not committed yet.
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


class Drafter(Pytree):
    """The base class of drafters. A subclass is a pytree with a static `num_tokens`, and has a pure method `propose`.

    Attributes:
      num_tokens: static; maximum drafts of a row in a pass.
      max_drafts: static; maximum drafts of all rows in a pass. None means `num_tokens` for each row.
      pass_cost: static; the time that a wide pass takes beyond a plain step, as a share of the plain step's time. A
        pass verifies drafts only if it is expected to bring as many tokens more.
      window: static; number of the latest tokens of each row that `propose` sees as `Drafting.text`.
      hope: static; makes a drafter try again. Each token without a draft adds as many right drafts to the statistics.
        0 suits a drafter that costs next to nothing, because it proposes drafts for every pass, verified or not.

    Example:
      >>> class Successor(kvjax.serving.Drafter, static=("num_tokens",)):
      ...     num_tokens: int = 2
      ...     def propose(self, drafting):
      ...         guesses = drafting.rows.token[:, None] + 1 + jnp.arange(self.num_tokens)
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

    max_drafts = None
    pass_cost = 0.5
    window = 0
    hope = 0.0

    def propose(self, drafting: Drafting) -> Drafts:
        """Guesses the next tokens of rows where bool[S] `drafting.wanted`. The others have no guesses."""
        raise NotImplementedError

    def limits(self, num_rows: int, k: int) -> tuple[int, int]:
        """The maximum drafts of a row and of all rows, for blocks of k steps."""
        per_row = min(self.num_tokens, k - 1)  # pyright: ignore[reportAttributeAccessIssue]
        total = num_rows * per_row
        return per_row, total if self.max_drafts is None else min(self.max_drafts, total)


class _Pass(NamedTuple):
    """The result of a pass, for C columns: the last token and the drafts."""

    pools: Pools
    state: Any  # state of `logits_fn` for each row after its choices
    chosen: SampledTokens  # C columns
    num_accepted: jax.Array  # i32[S]


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

    Each row writes at most min(new, steps) tokens, and at least one of them if it is active. The block ends early if a
    row has no space for all drafts of another pass, so a fast row never waits for slow rows. With `fixed_steps` or
    `canonical` each pass is wide, so that no pass depends on the statistics of other rows. Returns the pools, the
    written tokens, and the requests with their statistics.
    """
    cache = serving.cache
    choose = Sampler.of(serving, logits_fn)
    max_drafts, max_total = drafter.limits(new.size, k)
    if max_drafts < 1:
        pools, _, written = compute(model, cache, rows, new, steps, choose, k, fixed_steps, fixed_split=canonical)
        return pools, written, serving
    always_wide = fixed_steps or canonical
    if always_wide:
        max_total = new.size * max_drafts
    request = serving.by_row
    text_start = jnp.maximum(request.num_tokens - drafter.window, 0)
    text = None
    if drafter.window:
        width = min(drafter.window, serving.width + 1) + k
        text = serving.requests.tokens(serving.row, text_start, width)
    # The fence keeps these reads before the writes of the caller.
    requests, text, stats = fence(serving.requests, text, request.draft_stats)
    limit = jnp.minimum(new, steps)
    committed = cache.state.seqs.committed
    row_index = np.arange(new.size, dtype=np.int32)
    column = np.arange(1 + max_drafts, dtype=np.int32)[None]

    def run_pass(carry):
        _, pools, rows, written, chosen, text, stats = carry
        active = rows.active & (written < limit)
        current = cache.replace(pools=pools)
        space = jnp.where(active, jnp.minimum(limit - written - 1, max_drafts), 0)
        threshold = np.float32(drafter.pass_cost) * count(active).astype(jnp.float32)
        wanted = space > 0
        if drafter.hope:  # no draft can be worth its cost
            wanted = wanted & (best_drafts(stats.chance, space, max_drafts, max_total)[1] > threshold)
        length = request.num_tokens - text_start + written
        drafts = drafter.propose(Drafting(current, rows, wanted, written, text, length, choose))
        num_proposed = jnp.where(wanted, jnp.clip(drafts.count, 0, space), 0)
        if always_wide:
            num_drafts = num_proposed
            is_wide = jnp.any(active)
        else:
            num_drafts, expected = best_drafts(stats.chance, num_proposed, max_drafts, max_total)
            is_wide = expected > threshold
            num_drafts = jnp.where(is_wide, num_drafts, 0)

        def narrow(result: _Pass) -> _Pass:
            view = cache.view(active.astype(jnp.int32), 1, written=written)
            logits, pools = forward(model, rows.token[:, None], result.pools, view, jnp.zeros_like(rows.token))
            choice, state = choose(logits, rows, committed + written + 1)
            chosen = result.chosen.put(SampledTokens.of(choice), jnp.int32(0))
            return _Pass(pools, state, chosen, result.num_accepted)

        def wide(result: _Pass) -> _Pass:
            batch = jnp.concatenate([rows.token[:, None], drafts.tokens[:, :max_drafts]], axis=1)
            at = cache.replace(pools=result.pools)
            num_tokens = jnp.where(active, 1 + num_drafts, 0)
            return _verify(model, at, rows, batch, num_tokens, written, choose, new.size + max_total)

        none = SampledTokens.none(new.size, 1 + max_drafts, choose.top)
        result = _Pass(drafts.pools, rows.state, none, jnp.zeros_like(new))
        if always_wide:
            result = wide(result)
        else:
            result = once(~is_wide, narrow, result)
            result = once(is_wide, wide, result)

        pools, state, new_tokens, num_accepted = result
        num_accepted = jnp.where(active, num_accepted, 0)
        num_new = jnp.where(active, 1 + num_accepted, 0)
        first_right = (new_tokens.tokens[:, 0] == drafts.tokens[:, 0]) & (num_proposed > 0)
        num_right = jnp.where(num_drafts > 0, num_accepted, first_right.astype(jnp.int32))
        num_tried = jnp.maximum(num_drafts, jnp.minimum(num_proposed, 1))
        hope = jnp.where(active & ~wanted, np.float32(drafter.hope), 0)
        stats = stats.after(num_tried, num_right, num_drafts, hope)
        if text is not None:
            text = put(
                text, (row_index[:, None], length[:, None] + column), new_tokens.tokens, column < num_new[:, None]
            )
        chosen = _inserted(chosen, new_tokens, written, num_new)
        written = written + num_new
        final = pick(new_tokens.tokens, (row_index, num_accepted))
        rows = rows.with_state(active, state).replace(remaining=rows.remaining - num_accepted)
        rows = advance(rows, active, final, choose.stop, committed + written < cache.state.spec.max_length)
        is_cramped = rows.active & (limit - written < jnp.minimum(1 + max_drafts, rows.remaining))
        goes_on = jnp.any(rows.active & (written < limit)) & ~(is_wide & jnp.any(is_cramped))
        return goes_on, pools, rows, written, chosen, text, stats

    zeros = jnp.zeros_like(new)
    chosen = SampledTokens.none(new.size, k, choose.top)
    carry = jnp.any(rows.active & (limit > 0)), cache.pools, rows, zeros, chosen, text, stats
    if fixed_steps:
        carry = fori_loop(0, max(k // (1 + max_drafts), 1), lambda _, carry: run_pass(carry), carry)
    else:
        carry = while_loop(lambda carry: carry[0], run_pass, carry)
    _, pools, rows, written, chosen, _, stats = carry
    requests = requests.at(serving.row, serving.row >= 0, draft_stats=stats)
    return pools, DecodeBlock(written, chosen, rows.state), serving.replace(requests=requests)


def _inserted(old: SampledTokens, new: SampledTokens, start: jax.Array, num_new: jax.Array) -> SampledTokens:
    """Replaces columns start[row] to start[row] + num_new[row], both i32[S], by the first new columns."""
    offset = np.arange(old.bits.shape[2], dtype=np.int32)[None] - start[:, None]
    source = jnp.clip(offset, 0, new.bits.shape[2] - 1)[None]
    values = jnp.take_along_axis(new.bits, source, axis=2)
    return SampledTokens(jnp.where((offset >= 0) & (offset < num_new[:, None]), values, old.bits))


def _verify(
    model: Model,
    cache: Cache,
    rows: Rows,
    batch: jax.Array,
    num_tokens: jax.Array,
    written: jax.Array,
    choose: Sampler,
    size: int,
) -> _Pass:
    """Runs the model on the first num_tokens i32[S] of batch i32[S, C], a flat batch of T = `size`, and chooses."""
    row_index = np.arange(num_tokens.size, dtype=np.int32)
    column = np.arange(batch.shape[1], dtype=np.int32)[None]
    view = cache.ragged(num_tokens, size, written=written)
    logits, pools = forward(model, _flat(batch, view)[None], cache.pools, view, np.arange(size, dtype=np.int32))
    state = rows.state
    states = None
    if choose.logits_fn is not None:
        logits, states = _changed_logits(logits, view, batch, rows, choose)
    owners = _flat(jnp.broadcast_to(row_index[:, None], batch.shape), view)
    choice, _ = _of_owners(choose, owners)(logits, _rows_of_owners(rows, owners), view.positions[0] + 1)
    index = jnp.minimum(view.starts[:, None] + column, size - 1)
    is_token = column < num_tokens[:, None]
    chosen = SampledTokens(SampledTokens.of(choice).bits[:, index, 0]).only(is_token)
    tokens = chosen.tokens
    is_draft = column[:, 1:] < num_tokens[:, None]
    is_stop = jnp.any(tokens[:, :-1, None] == jnp.reshape(choose.stop, (-1, 1, choose.stop.shape[-1])), axis=2)
    num_accepted = leading((tokens[:, :-1] == batch[:, 1:]) & is_draft & ~is_stop)
    if states is not None:  # each row's state after its last choice
        state = jax.tree.map(lambda x: x[num_accepted, row_index], states)
    pools = _without_rejected(model, cache, pools, view, batch, num_tokens, num_accepted, written)
    return _Pass(pools, state, chosen, num_accepted)


def _flat(values: jax.Array, view: View) -> jax.Array:
    """i32[T]; the values [S, C] of the tokens of a ragged view, 0 for padding."""
    index = runs(view.starts, values.shape[1])
    is_token = np.arange(values.shape[1], dtype=np.int32)[None] < view.num_tokens[:, None]
    return put(jnp.zeros((view.positions.shape[1],), jnp.int32), index, values, is_token)


def _of_owners(choose: Sampler, owners: jax.Array) -> Sampler:
    """The sampler of each token's row, for tokens of rows owners i32[T]. Its logits are those after `logits_fn`."""
    sampling = None if choose.sampling is None else choose.sampling.each_row(choose.stop.shape[0])
    stop, sampling = pick((choose.stop, sampling), owners)
    return choose._replace(stop=stop, sampling=sampling, logits_fn=None)


def _rows_of_owners(rows: Rows, owners: jax.Array) -> Rows:
    """The row of each token, without a state of `logits_fn`."""
    return pick(rows.replace(state=None), owners)


def _changed_logits(
    logits: jax.Array, view: View, batch: jax.Array, rows: Rows, choose: Sampler
) -> tuple[jax.Array, Any]:
    """Calls `logits_fn` column after column on logits f32[T, V]. The next column follows if its draft is accepted.

    Also returns the state of each row after each column [C, S, ...], or None without a state.
    """
    logits_fn = choose.logits_fn
    assert logits_fn is not None
    position = pick(view.positions[0], view.starts)

    def one_column(carry: tuple[jax.Array, Any], number_and_tokens: Any) -> tuple[tuple[jax.Array, Any], Any]:
        logits, state = carry
        number, tokens = number_and_tokens
        index = view.starts + number
        args = pick(logits, index), tokens, position + number + 1
        if state is None:
            new = logits_fn(*args)
        else:
            new, state = logits_fn(*args, state)
        return (put(logits, index, new, number < view.num_tokens), state), state

    columns = np.arange(batch.shape[1], dtype=np.int32), batch.T
    (logits, _), states = scan(one_column, (logits, rows.state), columns)
    return logits, states


def _without_rejected(
    model: Model,
    cache: Cache,
    pools: Pools,
    view: View,
    batch: jax.Array,
    num_tokens: jax.Array,
    num_accepted: jax.Array,
    written: jax.Array,
) -> Pools:
    """The pools after a pass. If a draft was rejected, recurrent layers run the accepted tokens again.

    Attention needs none of this: the next pass overwrites the slots of rejected drafts.
    """
    pools, snapshots = Snapshots.before(cache.pools, view, pools)
    if not snapshots.groups:
        return pools
    num_right = jnp.where(num_tokens > 0, 1 + num_accepted, 0)

    def run_again(pools: Pools) -> Pools:
        again = cache.ragged(num_right, view.positions.shape[1], written=written)
        last = np.zeros((1,), np.int32)
        return forward(model, _flat(batch, again)[None], snapshots.put_back(pools), again, last)[1]

    return once(jnp.any(num_right < num_tokens), run_again, pools)


class Snapshots(NamedTuple):
    """The snapshots of recurrent layers from which rows continue.

    The snapshot in a block is the state after the last token of a view in this block. If this token was a rejected
    draft, the row gets its earlier snapshot back.
    """

    groups: tuple[int, ...]  # groups of recurrent layers
    pool_rows: tuple[jax.Array, ...]  # i32[S] of each group; the scratch row for rows without tokens in the view
    arrays: tuple[Any, ...]  # of each group, leaves [S, ...]

    @classmethod
    def before(cls, pools: Pools, view: View, written: Pools) -> tuple[Pools, Snapshots]:
        """Reads them from the pools before a view's tokens. Also returns the written pools, fenced from the reads."""
        spec = pools.spec
        groups = tuple(number for number, group in enumerate(spec.groups) if group.kind is Kind.RECURRENT)
        if not groups:
            return written, cls((), (), ())
        row_index = np.arange(view.num_tokens.size, dtype=np.int32)
        column = jnp.maximum(view.lengths - view.num_tokens - 1, 0) // spec.block_size
        pool_rows = []
        for number in groups:
            pool_row = pick(view.tables[number], (row_index, column))
            pool_rows.append(jnp.where(view.num_tokens > 0, pool_row, spec.groups[number].num_blocks))
        arrays = [pick(pools.arrays[number], index) for number, index in zip(groups, pool_rows, strict=True)]
        written, arrays = fence(written, arrays)
        return written, cls(groups, tuple(pool_rows), tuple(arrays))

    def put_back(self, pools: Pools) -> Pools:
        """Writes the snapshots where they were."""
        arrays = list(pools.arrays)
        for number, index, old in zip(self.groups, self.pool_rows, self.arrays, strict=True):
            arrays[number] = jax.tree.map(lambda x, old, at=index: x.at[at].set(old), arrays[number], old)
        return pools.replace(arrays=tuple(arrays))
