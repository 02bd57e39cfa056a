# SPDX-License-Identifier: Apache-2.0
"""`backup` copies the next victims of the device to the host. It orders moves as `offload` does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax._arrays import count, either, loop, pick, put
from kvjax.blocks import windows
from kvjax.blocks.backups import backs_up, make_room, settle, with_backups
from kvjax.blocks.publish import descendants, leave_index
from kvjax.blocks.tiers import find_unevictable, host_of, next_move, priorities, push_empty, with_ancestors
from kvjax.blocks.transfers import Outgoing, choose_host_victims
from kvjax.blocks.victims import Taken
from kvjax.checks import integers, on_state, static_int32
from kvjax.events.records import Events, Records, no_records
from kvjax.events.transfer import orders
from kvjax.policies.retention import advance_time
from kvjax.state import NO_BLOCK, CacheState, EvictionPolicy, Group
from kvjax.verbs._request import assemble, put_taken
from kvjax.verbs.offload import tiered_group


@on_state
def backup(
    state: CacheState,
    *,
    num_blocks: ArrayLike | None = None,
    max_blocks: int,
    now: ArrayLike = 0,
    group: int = 0,
) -> tuple[CacheState, Events]:
    """Copies the next victims of the device to the host. They stay on the device too.

    A block with a copy leaves the device without a move, inside a jitted loop too: it is found on the host from then
    on. The call looks at the policy's next `max_blocks` victims, and copies all without a copy, after the blocks of
    their prefixes. On the host, copies take the place of empty blocks, then of the copies with the most time left,
    then of the host's next victims.

    Until `complete`, no loop evicts a block whose copy is on the move. If copies fail, `complete` drops them, and
    nothing else changes. A block coming back from the host keeps its copy there, as long as the host has other blocks
    to give.

    Args:
      state: the cache. Its spec has backups.
      num_blocks: i32[]; the number of victims to look at, at most `max_blocks`. None means `max_blocks`.
      max_blocks: static; the largest number of victims to look at, and of blocks to copy.
      now: i32[]; the time in ms.
      group: static; the index of the group.

    Returns:
      The cache, and events with `transfer` and E = max_blocks records: removed (from a full host). Never refused: if
      the host has too few blocks to give, fewer blocks are copied.

    Example:
      >>> from kvjax import tiers
      >>> options = {"num_blocks": 4, "num_host_blocks": 4, "backups": True}
      >>> spec = kvjax.make_spec(max_seqs=2, max_length=16, block_size=4, **options)
      >>> state, prompt = kvjax.init(spec), np.arange(8)
      >>> state, _ = kvjax.admit(state, 0, prompt, 8)
      >>> state, _ = kvjax.commit(state, prompt[None], [8], seqs=[0])
      >>> state, _ = kvjax.release(state, 0)  # two cached blocks
      >>> state, events = tiers.backup(state, max_blocks=2)
      >>> state, _ = tiers.complete(state, events.transfer, True)  # after `tiers.move`
      >>> state, events = kvjax.admit(state, 0, np.arange(20, 36), 16)  # as in a loop: it moves nothing
      >>> [(event["kind"], event["block"], event["level"]) for event in kvjax.to_list(events)]
      [('updated', 1, 1), ('updated', 0, 1)]

    Source: SGLang's HiCache, whose write-through copies blocks to the host before they are evicted.
    """
    chosen_group = tiered_group(state, group)
    now = integers("now", now, ())
    max_blocks = static_int32("max_blocks", max_blocks, 1)
    if not backs_up(chosen_group):
        raise ValueError("state: got a cache without backups, wanted make_spec(backups=True)")
    policy = windows.policy_of(state, group)
    size = min(max_blocks, chosen_group.empty.shape[0])
    num_victims = size if num_blocks is None else jnp.clip(integers("num_blocks", num_blocks, ()), 0, size)
    num_victims = jnp.minimum(num_victims, chosen_group.num_cached)
    is_kept = priorities(state, now)[group] >= state.spec.offload_min_priority
    chosen_group = settle(chosen_group, policy, now)
    order, num_wanted, soon = _next_to_copy(chosen_group, policy, is_kept, num_victims, size, now)
    num_lacking = num_wanted - host_of(chosen_group).num_empty
    chosen_group = make_room(chosen_group, num_lacking, size, exempt=soon)
    chosen_group, removed = _evict_from_host(chosen_group, group, policy, num_wanted, size, now)

    host = host_of(chosen_group)
    index = jnp.arange(size, dtype=jnp.int32)
    where = index < jnp.minimum(num_wanted, host.num_empty)
    copies = jnp.where(where, pick(host.empty, host.num_empty - 1 - index), NO_BLOCK)
    move = next_move(host)
    ordered = orders(
        where,
        group=group,
        block=copies,
        move_id=move,
        source=chosen_group.pool_row(order),
        target=chosen_group.pool_row(copies),
    )
    pair = jnp.concatenate([order, copies])
    host = host.replace(
        backup=put(host.backup, pair, jnp.concatenate([copies, order]), jnp.concatenate([where, where])),
        pending_transfer=put(host.pending_transfer, copies, move, where),
        num_moves=jnp.where(jnp.any(where), move, host.num_moves),
        num_empty=host.num_empty - count(where),
    )
    blocks = advance_time(chosen_group.blocks, now, jnp.any(where))
    chosen_group = find_unevictable(chosen_group.replace(host=host, blocks=blocks))
    taken = Taken(chosen_group, order, jnp.bool_(True), removed, no_records(), ordered)
    after, removed = put_taken(state, group, taken)
    return after, assemble(after, jnp.zeros((1,), jnp.int32), removed=removed, moves=[ordered])


def _next_to_copy(
    group: Group, policy: EvictionPolicy, is_kept: jax.Array, num_victims: jax.Array, size: int, now: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the blocks to copy: i32[size], in order and packed to the front, and i32[], their number.

    Among the policy's next `num_victims` i32[] victims, at most `size`, it takes blocks with bool[B] `is_kept`, after
    the blocks of their prefixes. Also returns bool[B], all such blocks, with a backup or without.
    """
    blocks = group.blocks
    host, backup = with_backups(group)
    num_ids = group.ids.size
    is_findable = (blocks.fill > 0) & group.on_device(group.ids)

    on_move = with_ancestors(group, host.pending_transfer != 0, group.on_device(group.ids))

    def eligible(ids: jax.Array) -> jax.Array:
        cached = (pick(blocks.refcount, ids) == 0) & (pick(blocks.fill, ids) > 0)
        return (ids >= 0) & cached & ~pick(on_move, ids) & group.on_device(ids)

    victims, _ = policy.chosen(group.policy, blocks, eligible, num_victims, now, size)
    index = jnp.arange(size, dtype=jnp.int32)
    named = (index < num_victims) & eligible(victims) & pick(is_kept, victims)
    turn = jnp.full((num_ids,), num_ids, jnp.int32)
    turn = turn.at[jnp.where(named, victims, num_ids)].min(index, mode="drop")
    parent = blocks.parent[:, 0]

    def up(turn: jax.Array) -> jax.Array:
        return turn.at[jnp.where(is_findable & (parent >= 0), parent, num_ids)].min(turn, mode="drop")

    turn = loop(lambda turn: jnp.any(up(turn) != turn), up, turn)
    soon = is_findable & (turn < num_ids)
    # A follower of a block on the move waits, so that the copies of a prefix always arrive before those after it.
    moving = (host.pending_transfer != 0) | ((backup >= 0) & pick(host.pending_transfer != 0, backup))
    lacks = soon & (backup < 0) & ~descendants(blocks, is_findable & moving)
    order = jnp.lexsort((blocks.depth, turn, ~lacks)).astype(jnp.int32)[:size]
    return order, jnp.minimum(count(lacks), size), soon


def _evict_from_host(
    group: Group, group_index: int, policy: EvictionPolicy, num_wanted: jax.Array, size: int, now: jax.Array
) -> tuple[Group, Records]:
    """Evicts the host's victims until `num_wanted` i32[] of its blocks are empty, as far as it has any.

    All of them leave or none, because the policy's state has already lost the named blocks. Also returns records,
    removed.
    """
    host = host_of(group)
    blocks = group.blocks
    num_ids = group.ids.size
    on_device = group.on_device(group.ids)
    moving = with_ancestors(group, host.pending_transfer != 0, on_device)
    num_cached = count(~on_device & ~moving & (blocks.refcount == 0) & (blocks.fill > 0))
    num_victims = jnp.clip(num_wanted - host.num_empty, 0, num_cached)
    nothing = jnp.zeros((size,), jnp.bool_)
    nobody = Outgoing(jnp.full((size,), NO_BLOCK, jnp.int32), nothing, nothing)
    onboarded = jnp.full((1,), NO_BLOCK, jnp.int32)
    nowhere = jnp.zeros((num_ids,), jnp.bool_)
    victims, without = choose_host_victims(group, host, policy, nobody, nothing, nowhere, onboarded, num_victims, now)
    found_all = count(victims >= 0) == num_victims
    victims = jnp.where(found_all, victims, NO_BLOCK)
    group = group.replace(host=either(found_all, without, host))
    group, removed = leave_index(group, group_index, victims, victims >= 0, counted=False, backed=False)
    return push_empty(group, policy, victims, victims >= 0), removed
