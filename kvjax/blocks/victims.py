# SPDX-License-Identifier: Apache-2.0
"""Claims the blocks that a policy names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, add, last_of_each, loop, pick, put
from kvjax.events.records import Records
from kvjax.events.transfer import Transfer
from kvjax.state import Blocks, Group


class Taken(Pytree):
    """The result of `take`."""

    group: Group  # the group after `take`
    ids: jax.Array  # i32[.]; the taken blocks, then NO_BLOCK
    ok: jax.Array  # bool[]; whether all blocks were taken; if not, nothing has changed
    removed: Records  # records of blocks that are no longer findable
    updated: Records  # records of blocks that changed tier
    orders: Transfer  # the moves between tiers


def claim(blocks: Blocks, ids: jax.Array, where: jax.Array) -> tuple[Blocks, jax.Array]:
    """Gives each victim a holder and subtracts it from its parent's `children`.

    Even if the policy names other blocks, the claimed blocks are all different, each after all its findable children.
    """
    refcount, named = last_of_each(blocks.refcount, ids, where)
    parent = pick(blocks.parent, ids)[:, 0]
    above = jnp.where(parent >= 0, pick(refcount, parent), 0)
    # If a parent is among the victims, its mark of `last_of_each` is smaller than its child's if it is named later.
    in_order = named & ((above >= 0) | (above < -1 - np.arange(ids.shape[0], dtype=np.int32)))
    children = add(blocks.children, parent, -1, in_order & (parent >= 0), unique=False)

    def reject(carry):
        children, claimed = carry
        rejected = claimed & (pick(children, ids) != 0)
        return add(children, parent, 1, rejected & (parent >= 0), unique=False), claimed & ~rejected

    children, claimed = loop(lambda carry: jnp.any(carry[1] & (pick(carry[0], ids) != 0)), reject, (children, in_order))
    refcount = put(refcount, ids, claimed.astype(jnp.int32), named)
    return blocks.replace(refcount=refcount, children=children), claimed


def unclaim(blocks: Blocks, ids: jax.Array, where: jax.Array) -> Blocks:
    """Undoes `claim` for ids i32[K], where bool[K]."""
    parent = pick(blocks.parent, ids)[:, 0]
    return blocks.replace(
        refcount=add(blocks.refcount, ids, -1, where),
        children=add(blocks.children, parent, 1, where & (parent >= 0), unique=False),
    )
