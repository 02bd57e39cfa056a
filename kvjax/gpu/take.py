# SPDX-License-Identifier: Apache-2.0
"""`blocks/take.py` in a kernel: empty blocks first, then the least recently released blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.gpu import ring
from kvjax.gpu.lanes import add, count, numbered
from kvjax.gpu.memory import Memory
from kvjax.state import NO_BLOCK


def take(memory: Memory, num_blocks: jax.Array, lanes: int) -> jax.Array:
    """Takes `num_blocks` i32[] blocks, empty or cached, for a holder each. Returns whether all could be taken.

    Writes the blocks to `taken`, followed by NO_BLOCK, or only NO_BLOCK if not all could be taken. Writes the chosen
    victims to `victims` and `generations`, and to `removed` whether a victim has left the index.
    """
    lane = numbered(lanes)
    (max_blocks,) = memory.shape("taken")
    inside = lane < max_blocks
    num_empty = memory.number("num_empty")
    from_stack = jnp.minimum(num_blocks, num_empty)
    num_evicted = num_blocks - from_stack
    memory.put("victims", lane, NO_BLOCK, inside)
    memory.put("removed", lane, 0, inside)
    ok = memory.when(num_evicted > 0, lambda: _evict(memory, num_evicted, lanes), num_evicted == 0)
    chosen = memory.pick("victims", lane, inside)
    memory.put("generations", lane, memory.pick("generation", jnp.maximum(chosen, 0)), inside)
    pops = ok & (lane < from_stack)
    stacked = memory.pick("empty", num_empty - 1 - lane, pops)
    memory.put("refcount", stacked, 1, pops)
    evicted = memory.pick("victims", lane - from_stack, ok & (lane >= from_stack) & (lane < num_blocks))
    ids = jnp.where(pops, stacked, jnp.where(ok & (lane < num_blocks), evicted, NO_BLOCK))
    memory.put("taken", lane, ids, inside)
    memory.set_number("num_empty", num_empty - jnp.where(ok, from_stack, 0))
    memory.set_number("num_cached", memory.number("num_cached") - jnp.where(ok, num_evicted, 0))
    return ok


def _evict(memory: Memory, num_evicted: jax.Array, lanes: int) -> jax.Array:
    """Evicts `num_evicted` i32[] cached blocks, all or none. Returns whether it did."""
    lane = numbered(lanes)
    head = ring.pop(memory, num_evicted, lanes)
    is_victim = lane < num_evicted
    victim = memory.pick("victims", lane, is_victim)
    is_victim = is_victim & (victim >= 0)
    parent = memory.pick("parent", (victim, 0), is_victim)
    claimed = _claim(memory, victim, parent, is_victim)
    ok = count(claimed) == num_evicted
    add(memory, ("children",), parent, 1, claimed & ~ok & (parent >= 0))
    is_evicted = claimed & ok
    memory.put("refcount", victim, is_evicted.astype(jnp.int32), is_victim)
    memory.put("fill", victim, 0, is_evicted)
    memory.put("removed", lane, 1, is_evicted)
    memory.set_number("head", jnp.where(ok, head, memory.number("head")))
    _unlink(memory, victim, is_evicted)
    return ok


def _claim(memory: Memory, victim: jax.Array, parent: jax.Array, is_victim: jax.Array) -> jax.Array:
    """bool[lanes]; the victims whose findable children are all among the victims before them.

    Subtracts these from the `children` of parent i32[lanes]. Leaves a mark in the refcount of each victim.
    """
    mark = -1 - numbered(victim.shape[0])
    has_parent = parent >= 0
    memory.put("refcount", victim, mark, is_victim)
    parent_mark = memory.pick(
        "refcount", parent, is_victim & has_parent
    )  # a parent among the victims has a mark of its own
    claimed = is_victim & ((parent_mark >= 0) | (parent_mark < mark))
    add(memory, ("children",), parent, -1, claimed & has_parent)

    def refused(claimed: jax.Array) -> jax.Array:
        return claimed & (memory.pick("children", victim, claimed) != 0)

    def refuse(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        claimed, is_refused = carry
        add(memory, ("children",), parent, 1, is_refused & has_parent)
        claimed = claimed & ~is_refused
        return claimed, refused(claimed)

    start = claimed, refused(claimed)
    return memory.loop(lambda carry: count(carry[1]) > 0, refuse, start, barrier=False)[0]


def _unlink(memory: Memory, ids: jax.Array, where: jax.Array) -> None:
    """Removes blocks ids i32[lanes], where bool[lanes], from both tables (`blocks/index.py`). Their fill is 0 already.

    Works on tiles [lanes, 2]: a block's handle in either table.
    """
    (num_ids,) = memory.shape("fill")
    node = ids[:, None] + num_ids * numbered(2)[None]
    where = jnp.broadcast_to(where[:, None], node.shape)

    def leaves(node: jax.Array, where: jax.Array) -> jax.Array:
        where = where & (node >= 0) & (node < 2 * num_ids)
        return where & (memory.pick("fill", jnp.where(node < num_ids, node, node - num_ids), where) == 0)

    def beyond(links: str) -> jax.Array:
        """The first remaining neighbour in a direction."""
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
    # A removed block keeps links to its remaining neighbours. A run of removed blocks writes the same values.
    memory.put("next", node, after, where)
    memory.put("prev", node, before, where)
    memory.put("next", before, after, where)
    memory.put("prev", after, before, where & (after >= 0))
