# SPDX-License-Identifier: Apache-2.0
"""`blocks/take.py` in a kernel: empty blocks first, then those that were released longest ago."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.gpu import ring
from kvjax.gpu.lanes import add, count, numbered
from kvjax.gpu.memory import Memory
from kvjax.state import NO_BLOCK


def take(memory: Memory, need: jax.Array, lanes: int) -> jax.Array:
    """Takes `need` i32[] blocks, no more than are empty or cached, for one holder each; whether all could be taken.

    Writes the blocks to `taken`, NO_BLOCK after them or if not all could be taken; to `victims` and `generations` those
    that were chosen to leave, and to `removed` which of them have left the index.
    """
    lane = numbered(lanes)
    (most,) = memory.shape("taken")
    inside = lane < most
    num_empty = memory.number("num_empty")
    from_stack = jnp.minimum(need, num_empty)
    wanted = need - from_stack
    memory.put("victims", lane, NO_BLOCK, inside)
    memory.put("removed", lane, 0, inside)
    ok = memory.when(wanted > 0, lambda: _evict(memory, wanted, lanes), wanted == 0)
    chosen = memory.pick("victims", lane, inside)
    memory.put("generations", lane, memory.pick("generation", jnp.maximum(chosen, 0)), inside)
    pops = ok & (lane < from_stack)
    stacked = memory.pick("empty", num_empty - 1 - lane, pops)
    memory.put("refcount", stacked, 1, pops)
    evicted = memory.pick("victims", lane - from_stack, ok & (lane >= from_stack) & (lane < need))
    ids = jnp.where(pops, stacked, jnp.where(ok & (lane < need), evicted, NO_BLOCK))
    memory.put("taken", lane, ids, inside)
    memory.set_number("num_empty", num_empty - jnp.where(ok, from_stack, 0))
    memory.set_number("num_cached", memory.number("num_cached") - jnp.where(ok, wanted, 0))
    return ok


def _evict(memory: Memory, wanted: jax.Array, lanes: int) -> jax.Array:
    """Evicts `wanted` i32[] cached blocks, all or none; whether it did."""
    lane = numbered(lanes)
    head = ring.pop(memory, wanted, lanes)
    named = lane < wanted
    victim = memory.pick("victims", lane, named)
    named = named & (victim >= 0)
    parent = memory.pick("parent", (victim, 0), named)
    claimed = _claim(memory, victim, parent, named)
    ok = count(claimed) == wanted
    add(memory, ("children",), parent, 1, claimed & ~ok & (parent >= 0))
    gone = claimed & ok
    memory.put("refcount", victim, gone.astype(jnp.int32), named)
    memory.put("fill", victim, 0, gone)
    memory.put("removed", lane, 1, gone)
    memory.set_number("head", jnp.where(ok, head, memory.number("head")))
    _unlink(memory, victim, gone)
    return ok


def _claim(memory: Memory, victim: jax.Array, parent: jax.Array, named: jax.Array) -> jax.Array:
    """bool[lanes]; which of the named victims have all their findable children among the victims before them.

    Subtracts those from the `children` of parent i32[lanes]. Leaves a mark in the refcount of each that is named.
    """
    mark = -1 - numbered(victim.shape[0])
    has_parent = parent >= 0
    memory.put("refcount", victim, mark, named)
    above = memory.pick("refcount", parent, named & has_parent)  # a parent among the victims has a mark of its own
    claimed = named & ((above >= 0) | (above < mark))
    add(memory, ("children",), parent, -1, claimed & has_parent)

    def refused(claimed: jax.Array) -> jax.Array:
        return claimed & (memory.pick("children", victim, claimed) != 0)

    def refuse(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        claimed, bad = carry
        add(memory, ("children",), parent, 1, bad & has_parent)
        claimed = claimed & ~bad
        return claimed, refused(claimed)

    start = claimed, refused(claimed)
    return memory.loop(lambda carry: count(carry[1]) > 0, refuse, start, barrier=False)[0]


def _unlink(memory: Memory, ids: jax.Array, where: jax.Array) -> None:
    """Takes blocks ids i32[lanes], where bool[lanes], out of both tables (`blocks/index.py`); they have fill 0 already.

    Works on tiles [lanes, 2]: a block's handle in either table.
    """
    (num_ids,) = memory.shape("fill")
    node = ids[:, None] + num_ids * numbered(2)[None]
    where = jnp.broadcast_to(where[:, None], node.shape)

    def leaves(node: jax.Array, where: jax.Array) -> jax.Array:
        where = where & (node >= 0) & (node < 2 * num_ids)
        return where & (memory.pick("fill", jnp.where(node < num_ids, node, node - num_ids), where) == 0)

    def beyond(links: str) -> jax.Array:
        """The first neighbour on one side that stays."""
        neighbour = memory.pick(links, node, where)
        memory.settle("fill")

        def skip(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            neighbour, is_removed = carry
            neighbour = jnp.where(is_removed, memory.pick(links, neighbour, is_removed), neighbour)
            return neighbour, leaves(neighbour, is_removed)

        def going(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jnp.max(jnp.max(carry[1].astype(jnp.int32), axis=1)) > 0

        return lax.while_loop(going, skip, (neighbour, leaves(neighbour, where)))[0]

    after = beyond("next")
    before = beyond("prev")
    # A block that has left keeps the neighbours that it would have. A run of such blocks writes the same values.
    memory.put("next", node, after, where)
    memory.put("prev", node, before, where)
    memory.put("next", before, after, where)
    memory.put("prev", after, before, where & (after >= 0))
