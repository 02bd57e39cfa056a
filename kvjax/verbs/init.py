# SPDX-License-Identifier: Apache-2.0
"""`init` makes an empty cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from kvjax._arrays import described
from kvjax._compile import own_transfers
from kvjax.blocks import index, windows
from kvjax.checks import integers
from kvjax.spec import CacheSpec, GroupSpec, check_keys, of_group
from kvjax.state import NO_BLOCK, Blocks, CacheState, EvictionPolicy, Group, Host, Sequences, Text
from kvjax.verbs._request import checked_policy


@own_transfers()
def init(
    spec: CacheSpec,
    policy: EvictionPolicy | None = None,
    num_blocks: ArrayLike | Mapping[int | str | None, ArrayLike] | None = None,
    *,
    policy_state: Any = None,
) -> CacheState:
    """Makes an empty cache.

    Args:
      spec: the shapes of the cache.
      policy: static; the eviction policy. None means `lru()`. Equal policies share compiled programs.
      num_blocks: i32[]; device blocks in use in every group except a bare first group, at most the spec's N. Pass
        {window: number} for a number for each window, as in `make_spec`. None uses all blocks. The number may be
        traced, so a single `vmap` covers caches of many sizes. A traced number above N or below the minimum of
        `make_spec` counts as 0 blocks: every `admit` returns NO_BLOCKS, and `check` and `stats` report "num_blocks out
        of range".
      policy_state: the initial state of the policy on both tiers, such as a learned score's weights, which is copied.
        None calls the policy's `init`.

    Raises:
      ValueError: if `num_blocks` is out of range and not traced, `policy` is not a policy, or `policy_state` differs
        from the result of the policy's `init` in structure, shapes or dtypes.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> print(kvjax.debug.stats(kvjax.init(spec)))
      8 blocks: 0 active, 0 cached, 8 empty; 0 of 32 slots filled; 0 of 2 rows in use
      >>> print(kvjax.debug.stats(kvjax.init(spec, num_blocks=6)))  # the same shapes, a smaller cache
      6 blocks: 0 active, 0 cached, 6 empty; 0 of 24 slots filled; 0 of 2 rows in use
    """
    policy = checked_policy(policy)
    sizes = [group.num_blocks for group in spec.groups]
    if num_blocks is not None:
        check_keys("num_blocks", num_blocks, spec.groups)
        sizes_in_use = [of_group("num_blocks", num_blocks, group) for group in spec.groups[spec.bare :]]
        sizes = sizes[: spec.bare] + sizes_in_use
    sizes = [_in_range(size, spec, group) for size, group in zip(sizes, spec.groups, strict=True)]
    return _init(spec, policy, sizes, policy_state)


@functools.partial(jax.jit, static_argnums=(0, 1))  # one program, not one for each array
def _init(spec: CacheSpec, policy: EvictionPolicy, sizes: list[jax.Array], policy_state: Any) -> CacheState:
    groups = [init_group(spec, group_index, policy, size, policy_state) for group_index, size in enumerate(sizes)]
    seqs = Sequences(*(jnp.zeros((spec.max_seqs,), jnp.int32) for _ in range(3)))
    if spec.retention:
        seqs = seqs.replace(retention=jnp.zeros((spec.max_seqs, spec.max_blocks_per_seq + 1, 2), jnp.int32))
    if spec.has_host:
        seqs = seqs.replace(swapped=jnp.zeros((spec.max_seqs,), jnp.bool_))
    if spec.thinning:
        seqs = seqs.replace(holes=jnp.zeros((spec.max_seqs, spec.max_blocks_per_seq), jnp.bool_))
    if spec.sparse:
        seqs = seqs.replace(approximate=jnp.zeros((spec.max_seqs,), jnp.bool_))
    return CacheState(tuple(groups), seqs, spec, policy)


def _in_range(num_blocks: Any, spec: CacheSpec, group: GroupSpec) -> jax.Array:
    """i32[]; `num_blocks`, or 0 for a traced number out of range."""
    size = integers("num_blocks", num_blocks, ())
    min_blocks = spec.least_blocks(group)
    max_blocks = group.num_blocks
    if isinstance(num_blocks, Tracer):
        return jnp.where((size >= min_blocks) & (size <= max_blocks), size, 0)
    if not min_blocks <= int(num_blocks) <= max_blocks:
        raise ValueError(f"num_blocks: got {num_blocks}, wanted {min_blocks}..{max_blocks}")
    return size


def init_group(
    spec: CacheSpec, group_index: int, policy: EvictionPolicy, num_blocks: jax.Array, policy_state: Any = None
) -> Group:
    """Makes a group with its first `num_blocks` i32[] device blocks empty and the others out of use; see `init`."""
    group = spec.groups[group_index]
    num_ids = spec.groups[group_index].num_ids
    if group_index == 0:
        blocks = _init_blocks(num_ids, spec)
        group_arrays = dict[str, Any](links=index.init_links(num_ids))
    else:  # the first group has the contents and the index for all groups
        passed = jnp.zeros((num_ids,), jnp.bool_) if group.recurrent else None
        blocks = _init_blocks(num_ids, dataclasses.replace(spec, retention=False))
        blocks = blocks.replace(text=None, key=None, passed=passed)
        policy = windows.own_policy(blocks)
        policy_state = None
        group_arrays = dict[str, Any](
            links=None, group0_block=_none(num_ids), window_block=_none(spec.groups[0].num_ids)
        )
    return Group(
        blocks=blocks,
        empty=num_blocks - 1 - jnp.arange(group.num_blocks, dtype=jnp.int32),
        num_empty=jnp.array(num_blocks),
        num_cached=jnp.int32(0),
        num_blocks=jnp.array(num_blocks),
        table=_none(spec.max_seqs, spec.max_blocks_per_seq),
        policy=_init_policy(policy, num_ids, policy_state),
        host=_init_host(group, policy, policy_state, spec.backups) if group.num_host_blocks else None,
        **group_arrays,
    )


def _none(*shape: int) -> jax.Array:
    return jnp.full(shape, NO_BLOCK, jnp.int32)


def _init_blocks(num_ids: int, spec: CacheSpec) -> Blocks:
    """Makes blocks without contents or holders."""

    def zeros(*shape: int, dtype=jnp.int32) -> jax.Array:
        return jnp.zeros((num_ids, *shape), dtype)

    text = Text(zeros(spec.block_size), zeros(spec.block_size) if spec.extra_ids else None)
    optional = {"retention": zeros(2), "expiry": zeros(2), "time": jnp.zeros((2,), jnp.int32)} if spec.retention else {}
    return Blocks(
        refcount=zeros(),
        text=text,
        fill=zeros(),
        key=zeros(2, dtype=jnp.uint32),
        generation=zeros(),
        parent=_none(num_ids, 2),
        children=zeros(),
        depth=zeros(),
        hits=zeros(),
        stored=zeros(),
        released=zeros(),
        clock=jnp.int32(0),
        **optional,
    )


def _init_policy(policy: EvictionPolicy, num_ids: int, policy_state: Any) -> Any:
    """Makes the policy's state: a copy of `policy_state`, since no two fields of a cache may share an array."""
    if policy_state is None:
        return policy.init(num_ids)
    policy_state = jax.tree.map(jnp.array, policy_state)
    init_state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, policy.init(num_ids)))
    got = described(policy_state)
    wanted = described(init_state)
    if jax.tree.structure(got) != jax.tree.structure(wanted) or jax.tree.leaves(got) != jax.tree.leaves(wanted):
        raise ValueError(f"policy_state: got {got}, wanted {wanted}, as the policy's init makes it")
    return policy_state


def _init_host(group: GroupSpec, policy: EvictionPolicy, policy_state: Any, backups: bool) -> Host:
    ids = jnp.arange(group.num_ids, dtype=jnp.int32)
    return Host(
        pool_row=ids,
        num_host_children=jnp.zeros_like(ids),
        pending_transfer=jnp.zeros_like(ids),
        num_moves=jnp.int32(0),
        unevictable=jnp.zeros(ids.shape, jnp.bool_),
        empty=ids[::-1][: group.num_host_blocks],
        num_empty=jnp.int32(group.num_host_blocks),
        policy=_init_policy(policy, group.num_ids, policy_state),
        backup=_none(group.num_ids) if backups else None,
    )
