# SPDX-License-Identifier: Apache-2.0
"""Drafts by a cheap model: a draft model with layers of its own in the cache, or the first layers of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._arrays import Pytree
from kvjax.checks import static_int
from kvjax.model import Model, forward
from kvjax.pools.device import Pools
from kvjax.pools.lineage import partial_models
from kvjax.pools.views import View
from kvjax.serving.speculation import Drafter, Drafting, Drafts
from kvjax.serving.speculation_cost import share_of
from kvjax.serving.speculation_ngram import check_max_drafts
from kvjax.serving.speculation_verify import Snapshots
from pallas_kernels.loops import fori_loop


def draft_model(
    model: Model,
    draft: Model,
    *,
    first_layer: int,
    num_tokens: int = 3,
    max_drafts: int | None = 16,
    pass_cost: float | None = 0.7,
) -> tuple[Model, Drafter]:
    """Makes a drafter of a smaller model with the same vocabulary, and a model to write the K/V of both.

    Both models share the rows and blocks of a cache. So they find the same prefixes, and the verbs serve both:

        layers = [*model.layer_specs(), *draft.layer_specs()]
        cache = kvjax.Cache.create(kvjax.make_spec(layers, num_blocks=256, max_seqs=8, max_length=2048))
        model, drafter = kvjax.serving.draft_model(model, draft, first_layer=len(model.layer_specs()))
        outputs, cache, _ = kvjax.generate(model, cache, prompts, drafter=drafter)

    Args:
      model: see `kvjax.step`.
      draft: the smaller model.
      first_layer: static; the number of the draft's first layer in the cache's spec. Its layers come last.
      num_tokens: static; maximum drafts of a row in a pass.
      max_drafts: static; see `Drafter`.
      pass_cost: see `Drafter`. Count the draft model's own steps too.

    Returns:
      The model to generate with, and the drafter.

    Raises:
      ValueError: naming the argument.

    Source: Leviathan et al. 2023. The draft chooses with the row's own random numbers, so a sampled draft agrees with
    the row's choice as often as it can.
    """
    draft = _Renumbered(draft, static_int("first_layer", first_layer, 1))
    return _Joint(model, draft), ModelDrafter(num_tokens, draft, max_drafts, share_of("pass_cost", pass_cost))


def early_exit(
    layers: Model, *, num_tokens: int = 3, max_drafts: int | None = 16, pass_cost: float | None = 0.7
) -> Drafter:
    """Makes a drafter of a model's first layers, which share the K/V of the whole model.

    The whole model then overwrites the K/V of the drafts, so the cache needs no more space.

    Args:
      layers: a model of the first layers, with the same weights, such as `models.first_layers` makes.
      num_tokens: static; maximum drafts of a row in a pass.
      max_drafts: static; see `Drafter`.
      pass_cost: see `Drafter`. Count the steps of the first layers too.

    Raises:
      ValueError: naming the argument.

    Source: LayerSkip's self-speculative decoding (Elhoushi et al. 2024), without its training.
    """
    return ModelDrafter(num_tokens, layers, max_drafts, share_of("pass_cost", pass_cost))


class ModelDrafter(Drafter, static=("num_tokens", "max_drafts")):
    """See `draft_model` and `early_exit`."""

    model: Model
    max_drafts: int | None
    pass_cost: Any

    hope = 0.02

    def __post_init__(self):
        static_int("num_tokens", self.num_tokens, 1)
        check_max_drafts(self.max_drafts)

    def propose(self, drafting: Drafting) -> Drafts:
        """See `Drafter`."""
        cache = drafting.cache
        wanted = drafting.wanted.astype(jnp.int32)
        committed = cache.state.seqs.committed + drafting.written
        first_view = cache.view(wanted, 1, written=drafting.written)
        pools, snapshots = Snapshots.before(cache.pools, first_view, cache.pools)
        tokens = jnp.zeros((wanted.size, self.num_tokens), jnp.int32)

        def guess(position: jax.Array, carry: Any) -> Any:
            pools, rows, tokens = carry
            view = cache.view(wanted, 1, written=drafting.written + position)
            with partial_models():
                logits, pools = forward(self.model, rows.token[:, None], pools, view, jnp.zeros_like(rows.token))
            choice, state = drafting.choose(logits, rows, committed + position + 1)
            rows = rows.with_state(drafting.wanted, state).replace(token=choice.tokens)
            return pools, rows, tokens.at[:, position].set(choice.tokens)

        turns = jnp.where(jnp.any(drafting.wanted), self.num_tokens, 0)
        pools, _, tokens = fori_loop(0, turns, guess, (pools, drafting.rows, tokens))
        # A draft without a slot has seen no K/V of its own, and is cut off by the row's space.
        return Drafts(tokens, wanted * self.num_tokens, snapshots.put_back(pools))


class _Renumbered(Pytree, static=("first_layer",)):
    """A model whose layer 0 is layer `first_layer` of the cache."""

    model: Model
    first_layer: int

    def __call__(self, tokens: jax.Array, pools: Pools, view: View, /, *, last: Any) -> tuple[jax.Array, Pools]:
        """See `Model`."""
        spec = pools.spec
        groups = []
        for group in spec.groups:
            renumbered = [
                dataclasses.replace(pool, layers=tuple(layer - self.first_layer for layer in pool.layers))
                for pool in group.pools
            ]
            groups.append(dataclasses.replace(group, pools=tuple(renumbered)))
        own_spec = dataclasses.replace(spec, groups=tuple(groups))
        logits, pools = self.model(tokens, pools.replace(spec=own_spec), view.replace(spec=own_spec), last=last)
        return logits, pools.replace(spec=spec)


class _Joint(Pytree):
    """A model together with a draft model: both write the K/V of every token."""

    model: Model
    draft: Model

    def __call__(self, tokens: jax.Array, pools: Pools, view: View, /, *, last: Any) -> tuple[jax.Array, Pools]:
        """See `Model`. Logits of the draft model are computed for a single position, and not used."""
        unused = jnp.zeros((tokens.shape[0],), jnp.int32)
        _, pools = self.draft(tokens, pools, view, last=unused)
        return self.model(tokens, pools, view, last=last)
