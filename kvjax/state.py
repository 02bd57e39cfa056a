# SPDX-License-Identifier: Apache-2.0
"""The cache as data: a pytree of small arrays, and nothing else.

One group of a cache with N = 6 blocks of P = 4 tokens; two seqs share a prompt, a third is free:

    rows                    blocks              contents, by parent link           refcount
    seq 0  table 2 0 -  --> 2  [t t t t]        root <- 2                                 2
           length 6     --> 0  [t t . .]        being filled by seq 0                     1
    seq 1  table 2 4 5  --> 4  [t t t t]        root <- 2 <- 4                            1
           length 9     --> 5  [t . . .]        being filled by seq 1                     1
    seq 2  table - - -      3  [t t t t]        root <- 2 <- 3   cached, findable         0
           length 0         1  [. . . .]        empty, on the stack                       0

Every block is in one of three conditions: *active* (refcount above 0), *cached* (refcount 0, findable, evicted
when blocks are needed) or *empty*. A block is findable exactly when `fill > 0`. Its identity is (block, generation):
the generation advances each time a block is published, so a link to earlier contents never matches.

Shape legend, for every docstring of the library: N device blocks, H host blocks, B = N + H block ids, P positions
per block, S sequences, M blocks per sequence, E event slots, T tokens in a batch, L layers, Q query heads, K kv
heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import functools
import operator
import pickle
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, described, either, pick, unreadable
from kvjax.spec import CacheSpec

__all__ = [
    "DEFAULT_PRIORITY",
    "NO_BLOCK",
    "Blocks",
    "CacheState",
    "EvictionPolicy",
    "Group",
    "Host",
    "Links",
    "Match",
    "Sequences",
    "Text",
]

DEFAULT_PRIORITY = 35
NO_BLOCK = -1
LOST = -1  # `Blocks.hits` of a held block that left the index because a move failed, until it is published again
COPYING = 1 << 20  # added to the refcount of the source of a copy, during the copy; larger than any number of holders


class Text(Pytree):
    """Tokens with their extra ids.

    Attributes:
      tokens: i32[..., P]; token ids.
      extra_ids: i32[..., P]; extra ids. None if the spec has none.
    """

    tokens: jax.Array
    extra_ids: jax.Array | None

    def equals(self, text: Text) -> jax.Array:
        """bool[..., P]; whether each token is equal, extra ids included."""
        same = jax.tree.map(operator.eq, self, text)
        return functools.reduce(operator.and_, jax.tree.leaves(same))

    def parts(self) -> dict[str, jax.Array]:
        """The arrays by name, without None."""
        return {name: array for name, array in vars(self).items() if array is not None}


class Links(Pytree):
    """The prefix index and the child index: chained hash tables over a common pair of link arrays (`blocks/index.py`).

    Block b has two handles: b is linked by its key, B + b by (parent, first token, first extra id). Entries from 2B
    on are the buckets of the first table, followed by the buckets of the second.

    Attributes:
      next: i32[2B + 2 * buckets]; the next handle, -1 at the end of a chain.
      prev: i32[2B]; the handle or bucket before.
    """

    next: jax.Array
    prev: jax.Array


class Host(Pytree):
    """The tier of each block of a group with a host tier. A block keeps its id when it moves and changes its pool row.

    Attributes:
      pool_row: i32[B]; each block's pool row, all different: 0..N-1 on the device, N..N+H-1 on the host.
      num_host_children: i32[B]; findable children on the host. `Blocks.children` counts the children on the device.
      pending_transfer: i32[B]; id of the move that brings the K/V to the block's pool row, or 0. Until it is 0 the
        block cannot be found. After a failed move it stays until the block is empty, so lost K/V are never stored.
      num_moves: i32[]; the id of the last transition with a move.
      unevictable: bool[B]; device blocks that a loop cannot evict, because a descendant is on the host or moving.
        It is updated by moves.
      empty: i32[H]; stack of empty blocks on the host.
      num_empty: i32[]; height of this stack.
      policy: the eviction policy's state for blocks on the host.
      backup: i32[B]; pairs findable device blocks with the host blocks whose pool rows have copies of their K/V
        (`blocks/backups.py`). Each names the other. None unless the spec has backups.
    """

    pool_row: jax.Array
    num_host_children: jax.Array
    pending_transfer: jax.Array
    num_moves: jax.Array
    unevictable: jax.Array
    empty: jax.Array
    num_empty: jax.Array
    policy: Any
    backup: jax.Array | None = None


class Blocks(Pytree):
    """The metadata of each block.

    Attributes:
      refcount: i32[B]; rows and pins holding the block; within a transition also copies in progress.
      text: i32[B, P]; the tokens of the block's K/V, and their extra ids. None in a window group.
      fill: i32[B]; tokens of a findable block, 0 for any other block.
      key: u32[B, 2]; hash of the prefix up to here (`blocks/keys.py`): a hint, never trusted. None in a window group.
      generation: i32[B]; number of times the block was published, compared for equality only, so it may wrap.
      parent: i32[B, 2]; the prefix before this block as (block, generation), or (NO_BLOCK, namespace) at a root.
      children: i32[B]; findable blocks whose parent is this block.
      depth: i32[B]; blocks before this block in its prefix.
      hits: i32[B]; uses of the contents since they were stored: a prompt found them, or an equal block of a row was
        merged with them. LOST if a failed move has destroyed them.
      stored: i32[B]; reading of `clock` when the contents were published.
      released: i32[B]; reading of `clock` when the last holder released the block.
      clock: i32[]; counts publications and releases. Readings are compared by their distance to the present reading.
      retention: i32[B, 2]; requested priority, and time to live in ms (-1: for ever). None if the spec has no
        retention.
      expiry: i32[B, 2]; the end of a released block's time to live, in ms of 64 bits (high, low). None if the spec has
        no retention.
      time: i32[2]; the latest `now` of a verb, in 64 bits. None if the spec has no retention.
      passed: bool[B]; in a group of recurrent layers, whether a row has gone past the snapshot and it has a single
        child, so no two prompts part there. It is updated by commits. None in any other group.
    """

    refcount: jax.Array
    text: Text
    fill: jax.Array
    key: jax.Array
    generation: jax.Array
    parent: jax.Array
    children: jax.Array
    depth: jax.Array
    hits: jax.Array
    stored: jax.Array
    released: jax.Array
    clock: jax.Array
    retention: jax.Array | None = None
    expiry: jax.Array | None = None
    time: jax.Array | None = None
    passed: jax.Array | None = None

    tokens = property(lambda self: self.text.tokens)
    extra_ids = property(lambda self: self.text.extra_ids)

    def requested_priority(self, ids: jax.Array) -> jax.Array:
        """i32[...]; the requested priorities of blocks ids i32[...], or the default priority."""
        default = jnp.full(ids.shape, DEFAULT_PRIORITY, jnp.int32)
        return default if self.retention is None else pick(self.retention, ids)[..., 0]


Eligible = Callable[[jax.Array], jax.Array]


class EvictionPolicy(NamedTuple):
    """A policy: a few pure functions over a state of its own.

    A policy is a value: equal policies share compiled programs. Policies are equal if all their fields are equal, so
    two lambdas make two different policies, even under the same name. A policy of importable functions can be pickled,
    and the unpickled policy is equal to it.

    An empty call (no ids, no victims wanted) changes nothing, so a refused verb leaves the cache as it was, bit for
    bit. If your functions already obey this rule, set `idle`. Otherwise the core restores the old state after such a
    call, which costs a pass over the policy's state.

    Attributes:
      init: (num_ids: int) -> pstate.
      touch: (pstate, blocks, ids i32[K], now i32[]) -> pstate. It is called when the blocks `ids` have lost their last
        holder and stay cached. They are in the order in which they should be evicted. A cache pads with NO_BLOCK if
        the policy is `idle`, or else with num_ids, which jax drops from a scatter. Be right with either, because others
        may call your function too: `kvjax.testing.check_policy` tries both.
      victims: (pstate, blocks, eligible, wanted i32[], now i32[], size) -> (ids i32[size], pstate). It names `wanted`
        blocks to evict, in order, then padding. `eligible(ids) -> bool[...]` tells which blocks it may name, each after
        all its findable children. A block that is not eligible now may be eligible in the next call, so it must keep
        its place in the order.
      forget: (pstate, ids i32[K]) -> pstate. It is called when blocks go to another tier, which has a state of its own,
        and with all blocks by `reset`. None means there is nothing to forget.
      idle: static; whether the functions return pstate unchanged for an empty call: `touch` and `forget` with nothing
        but padding, `victims` with `wanted` 0. `kvjax.testing.check_policy` verifies it.
      name: the name in `repr`, before the parameters.
      parameters: (name, value) of each argument that the functions were made with.

    Example:
      >>> policy = kvjax.policies.cost_aware(balance=12288)
      >>> policy
      cost_aware(balance=12288)
      >>> policy == kvjax.policies.cost_aware(balance=12288)  # a value: equal policies share compiled programs
      True
    """

    init: Callable[[int], Any]
    touch: Callable[..., Any]
    victims: Callable[..., tuple[jax.Array, Any]]
    forget: Callable[..., Any] | None = None
    idle: bool = False
    name: str = ""
    parameters: tuple[tuple[str, Any], ...] = ()

    def touched(self, pstate: Any, blocks: Blocks, ids: jax.Array, now: jax.Array) -> Any:
        """Returns the policy's state after `touch`, or the old state if there is no id."""
        dropped = self._dropped(ids, blocks.fill.shape[0])
        new = self._as_before("touch", self.touch(pstate, blocks, dropped, now), pstate)
        return self._where(lambda: jnp.any(ids >= 0), new, pstate)

    def chosen(
        self, pstate: Any, blocks: Blocks, eligible: Eligible, wanted: jax.Array, now: jax.Array, size: int
    ) -> tuple[jax.Array, Any]:
        """Returns the victims and the policy's state after `victims`, or the old state if no victim is wanted."""
        result = self.victims(pstate, blocks, eligible, wanted, now, size)
        if not isinstance(result, tuple) or len(result) != 2 or described(result[0]) != f"int32[{size}]":
            raise ValueError(
                f"victims of {self}: got {described(result)}, wanted a pair of int32[{size}] and its state"
            )
        ids, new = result
        return ids, self._where(lambda: wanted > 0, self._as_before("victims", new, pstate), pstate)

    def forgot(self, pstate: Any, blocks: Blocks, ids: jax.Array) -> Any:
        """Returns the policy's state after `forget`, or the old state if there is no id."""
        if self.forget is None:
            return pstate
        dropped = self._dropped(ids, blocks.fill.shape[0])
        new = self._as_before("forget", self.forget(pstate, dropped), pstate)
        return self._where(lambda: jnp.any(ids >= 0), new, pstate)

    def _dropped(self, ids: jax.Array, num_ids: int) -> jax.Array:
        """The ids with `num_ids` for padding, which jax drops from a scatter: NO_BLOCK would be the last block."""
        return ids if self.idle else jnp.where(ids >= 0, ids, num_ids)

    def _as_before(self, function: str, new: Any, old: Any) -> Any:
        """Checks the state returned by a function of the policy: it must have the same arrays as before."""
        got = described(new)
        wanted = described(old)
        if jax.tree.structure(got) != jax.tree.structure(wanted) or jax.tree.leaves(got) != jax.tree.leaves(wanted):
            raise ValueError(
                f"{function} of {self}: got {got}, wanted the state {wanted}, as the policy's init makes it"
            )
        return new

    def _where(self, is_requested: Callable[[], jax.Array], new: Any, old: Any) -> Any:
        return new if self.idle else either(is_requested(), new, old)

    def __repr__(self) -> str:
        """A call, `cost_aware(balance=24576)`, or all fields of a policy without a name."""
        parts = self.parameters if self.name else self._asdict().items()
        return f"{self.name or type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """The fields: unpickling imports the functions.

        Raises:
          pickle.PicklingError: if a field would not be equal afterwards, such as a lambda. The error names it.
        """
        for field, value in self._asdict().items():
            try:
                reason = "" if pickle.loads(pickle.dumps(value)) == value else f"{value!r} comes back as another"
            except Exception as error:  # any error of the classes of its parts
                reason = str(error) or repr(error)
            if reason:
                raise pickle.PicklingError(
                    f"policy: got {self}, whose {field} cannot be pickled ({reason}), wanted functions that can be "
                    "imported: define them by def at the top of a module"
                )
        return type(self), tuple(self)

    def __copy__(self) -> Self:  # returns itself, as for a function: a copy by pickle would fail for a lambda
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Group(Pytree):
    """The blocks of the layers with the same window, with the indexes, stacks and tables to find, free and order them.

    Attributes:
      blocks: the metadata of each block.
      links: the prefix index and the child index. None in a window group.
      empty: i32[N]; stack of empty blocks on the device.
      num_empty: i32[]; height of this stack.
      num_cached: i32[]; findable blocks on the device without a holder.
      num_blocks: i32[]; blocks in use, 1..N, or 0 if `init` got a traced number out of range.
      table: i32[S, M]; block tables, NO_BLOCK beyond each row's blocks, before a window, and in freed holes.
      policy: the eviction policy's state.
      group0_block: i32[B]; in a window group, the first group's block with the same prefix. None in the first group.
      window_block: i32[B of the first group]; the inverse of `group0_block`: this group's block, or NO_BLOCK. None in
        the first group.
      host: the tier of each block. None without a host tier.
    """

    blocks: Blocks
    links: Links
    empty: jax.Array
    num_empty: jax.Array
    num_cached: jax.Array
    num_blocks: jax.Array
    table: jax.Array
    policy: Any
    group0_block: jax.Array | None = None
    window_block: jax.Array | None = None
    host: Host | None = None

    @property
    def tiered(self) -> bool:
        """Whether blocks can be on the host too."""
        return self.host is not None

    @property
    def host_tier(self) -> Host:
        """The tier of each block of a tiered group."""
        return cast(Host, self.host)

    @property
    def backup(self) -> jax.Array | None:
        """i32[B]; `Host.backup`. None if the group has no backups."""
        return getattr(self.host, "backup", None)

    @property
    def ids(self) -> jax.Array:
        """i32[B]; all block ids, of both tiers."""
        return jnp.arange(self.blocks.fill.shape[0], dtype=jnp.int32)

    @property
    def available(self) -> jax.Array:
        """i32[]; blocks that can be taken: empty and cached."""
        return self.num_empty + self.num_cached

    def _on_host(self, name: str, ids: jax.Array, otherwise: Any) -> Any:
        """The host tier's array `name` at blocks ids i32[...], or `otherwise` without a host tier."""
        return pick(getattr(self.host, name), ids) if self.tiered else otherwise

    def pool_row(self, ids: jax.Array) -> jax.Array:
        """i32[...]; the pool rows of blocks ids i32[...]."""
        return self._on_host("pool_row", ids, ids)

    def on_device(self, ids: jax.Array) -> jax.Array:
        """bool[...]; whether the pool rows of blocks ids i32[...] are on the device."""
        return self.pool_row(ids) < self.empty.shape[0]

    def arrival(self, ids: jax.Array) -> jax.Array:
        """i32[...]; ids of the moves that bring the K/V of blocks ids i32[...] to their pool rows, or 0."""
        return self._on_host("pending_transfer", ids, np.int32(0))

    def arrived(self, ids: jax.Array) -> jax.Array:
        """bool[...]; whether the K/V of blocks ids i32[...] are in their pool rows."""
        return (ids >= 0) & (self.arrival(ids) == 0)

    def moving(self, ids: jax.Array) -> jax.Array:
        """bool[...]; whether blocks ids i32[...] are moving between the tiers."""
        return (ids >= 0) & ~self.arrived(ids)

    def reachable(self, ids: jax.Array, tiers: tuple[str, ...]) -> jax.Array:
        """bool[...]; whether blocks ids i32[...] are on these tiers, with their K/V."""
        return self.arrived(ids) if "host" in tiers else self.arrived(ids) & self.on_device(ids)

    def evictable(self, ids: jax.Array) -> jax.Array:
        """bool[...]; whether a loop can evict the cached blocks ids i32[...]; see `Host.unevictable`."""
        return self.arrived(ids) & self.on_device(ids) & ~self._on_host("unevictable", ids, np.bool_(False))

    def childless(self, ids: jax.Array) -> jax.Array:
        """bool[...]; whether the findable blocks ids i32[...] have no findable child on either tier."""
        return (pick(self.blocks.children, ids) == 0) & (self._on_host("num_host_children", ids, np.int32(0)) == 0)

    def num_children(self, ids: jax.Array) -> jax.Array:
        """i32[...]; findable children of blocks ids i32[...], on both tiers."""
        return pick(self.blocks.children, ids) + self._on_host("num_host_children", ids, np.int32(0))

    def in_this_group(self, ids: jax.Array) -> jax.Array:
        """i32[...]; the blocks with the same prefixes as blocks ids i32[...] of the first group, or NO_BLOCK."""
        return ids if self.window_block is None else jnp.where(ids >= 0, pick(self.window_block, ids), NO_BLOCK)

    def group0_blocks(self, ids: jax.Array) -> jax.Array:
        """i32[...]; the inverse of `in_this_group`: the first group's blocks with the same prefixes as ids i32[...]."""
        return ids if self.group0_block is None else pick(self.group0_block, ids)


class Sequences(Pytree):
    """The metadata of each row.

    Attributes:
      length: i32[S]; reserved tokens of the row, 0 for a free row.
      committed: i32[S]; tokens whose K/V are written, at most `length`.
      namespace: i32[S]; number of the row's (salt, LoRA); see `keys.Namespaces`.
      retention: i32[S, M + 1, 2]; the requested retention of each of the row's blocks, then of generated blocks. None
        if the spec has no retention.
      swapped: bool[S]; whether all or some of the row's blocks are on the host. None without a host tier.
      holes: bool[S, M]; the blocks of the first group that the row no longer reads (`blocks/holes.py`). None if the
        spec has no thinning.
      approximate: bool[S]; whether the row has K/V that may be approximate, so it publishes nothing any more. None if
        the spec is not sparse.
    """

    length: jax.Array
    committed: jax.Array
    namespace: jax.Array
    retention: jax.Array | None = None
    swapped: jax.Array | None = None
    holes: jax.Array | None = None
    approximate: jax.Array | None = None

    @property
    def swapped_out(self) -> jax.Array:
        """bool[S]; whether each row is swapped out: all or some of its blocks are on the host."""
        return jnp.zeros(self.length.shape, jnp.bool_) if self.swapped is None else self.swapped


class Match(Pytree):
    """The longest cached prefix of a prompt.

    Attributes:
      blocks: i32[ceil(T / P)]; the matching whole blocks, then NO_BLOCK.
      num_blocks: i32[]; the number of matching blocks.
      num_uncopied: i32[]; the number of matching blocks if nothing can be copied, smaller only with windows.
      source: i32[]; a block to copy further tokens from, or NO_BLOCK.
      shared: i32[]; the number of tokens to copy.
      device_tokens: i32[]; matched tokens whose K/V are on the device, in every group.
      host_tokens: i32[]; matched tokens whose K/V are on the host, in some group.
      unusable_tokens: i32[]; further tokens that the first group has, but without a snapshot of the recurrent layers.
        None without recurrent layers.
    """

    blocks: jax.Array
    num_blocks: jax.Array
    num_uncopied: jax.Array
    source: jax.Array
    shared: jax.Array
    device_tokens: jax.Array
    host_tokens: jax.Array
    unusable_tokens: jax.Array | None = None

    @property
    def cached_tokens(self) -> jax.Array:
        """i32[]; tokens that need no computation; never the whole prompt, because you need the last token's logits."""
        return self.device_tokens + self.host_tokens

    def __repr__(self) -> str:
        if why := unreadable(self):
            return f"Match({why})"
        host = jax.device_get(self)
        tokens, on_host = (reprlib.repr(np.asarray(value).tolist()) for value in (host.cached_tokens, host.host_tokens))
        return f"Match({tokens} tokens cached, {on_host} of them on the host)"


class CacheState(Pytree, static=("spec", "policy")):
    """The whole cache except its bytes. Use it only with the pools made with it (`Cache` pairs the two).

    Attributes:
      groups: a group for each attention window.
      seqs: the rows, shared by all groups.
      spec: static; the shapes.
      policy: static; the eviction policy.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> before = kvjax.init(spec)
      >>> after, events = kvjax.admit(before, 0, np.arange(10), 10)
      >>> before.seqs.length.tolist(), after.seqs.length.tolist()  # a state is a value
      ([0, 0], [10, 0])
    """

    groups: tuple[Group, ...]
    seqs: Sequences
    spec: CacheSpec
    policy: EvictionPolicy

    @property
    def window_groups(self) -> tuple[Group, ...]:
        """All groups except the first, which holds the prefix tree: groups of windows and of recurrent layers."""
        return self.groups[1:]
