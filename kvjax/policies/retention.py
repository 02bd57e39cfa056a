# SPDX-License-Identifier: Apache-2.0
"""Retention: the priorities that parts of a sequence have after their release, and how long they last.

Each block has a priority from 0 to 100 and perhaps a time to live, counted from its last release. After that time its
priority is the default, 35. Needs a spec made with `retention=True` and a policy such as `policies.priority`.

`now` is 32 bits of ms, which wrap after 49 days. The cache extends it to 64 bits, so an expired time to live stays
expired, as long as verbs take, release or move blocks at least every 24 days.

Source: TensorRT-LLM's KvCacheRetentionConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import Pytree, fence, pick, put
from kvjax.state import DEFAULT_PRIORITY, Blocks

UNSTATED = -1  # as a priority: keep the block's own; as a time to live: no limit
HIGHEST_PRIORITY = 100


class TokenRange(NamedTuple):
    """Tokens start..end-1 of a prompt, and the retention of their blocks.

    Attributes:
      start: index of the first token.
      end: index after the last token; None means the end of the prompt.
      priority: 0 to 100.
      ttl: time to live in ms after the release; None means no limit.

    Example:
      >>> kvjax.policies.TokenRange(start=0, end=400, priority=90)  # a system prompt
      TokenRange(start=0, end=400, priority=90, ttl=None)
    """

    start: int
    end: int | None
    priority: int
    ttl: int | None = None


class Retention(Pytree):
    """Priorities and times to live of a request's blocks, as arrays. Make it with `Retention.of`.

    Attributes:
      ranges: i32[K, 4]; start, end, priority, ttl of token ranges, padded with empty ranges.
      decode: i32[2]; priority and ttl of blocks whose first token is generated.
    """

    ranges: jax.Array | np.ndarray
    decode: jax.Array | np.ndarray

    @staticmethod
    def of(
        ranges: Sequence[TokenRange | tuple[Any, ...]] = (),
        *,
        decode_priority: int = DEFAULT_PRIORITY,
        decode_ttl: int | None = None,
        max_ranges: int | None = None,
    ) -> Retention:
        """Sets the priorities of a sequence's blocks. A block of the prompt belongs to the range of its first token.

        Blocks outside every range get priority 35 if they are new, and keep their own if they are cached.

        Args:
          ranges: token ranges, in ascending order.
          decode_priority: 0 to 100, for blocks whose first token is generated.
          decode_ttl: time to live of these blocks in ms; None means no limit.
          max_ranges: pads to this many ranges, so a single compiled program serves any number; None disables padding.

        Raises:
          ValueError: for overlapping or reversed ranges, an open range before the last, a priority outside 0..100, or
            for a negative time; the message names the argument.

        Example:
          >>> retention = kvjax.Retention.of([(0, 400, 90), (400, None, 40, 60_000)], decode_priority=10)
          >>> retention.ranges[0].tolist(), retention.decode.tolist()  # a time to live of -1 means no limit
          ([0, 400, 90, -1], [10, -1])
        """
        checked: list[tuple[int, int, int, int]] = []
        for i, entry in enumerate(ranges):
            start, end, priority, ttl = TokenRange._make([*entry, None][:4])
            name = f"ranges[{i}]"
            before = checked[-1][1] if checked else 0
            if end is None and i + 1 < len(ranges):
                raise ValueError(f"{name}: got an open range, which must be the last")
            end = np.iinfo(np.int32).max if end is None else end
            if start < before:
                raise ValueError(f"{name}.start: got {start}, wanted at least {before}, the end of the range before")
            if end <= start:
                raise ValueError(f"{name}.end: got {end}, wanted more than the start {start}")
            checked.append((start, end, _priority(f"{name}.priority", priority), _time(f"{name}.ttl", ttl)))
        num_ranges = len(checked) if max_ranges is None else max_ranges
        if len(checked) > num_ranges:
            raise ValueError(f"ranges: got {len(checked)}, wanted at most max_ranges={num_ranges}")
        filled = [*checked, *[(0, 0, UNSTATED, UNSTATED)] * (num_ranges - len(checked))]
        decode = (_priority("decode_priority", decode_priority), _time("decode_ttl", decode_ttl))
        return Retention(np.array(filled, np.int32).reshape(-1, 4), np.array(decode, np.int32))


def is_retention(tree: Any) -> bool:
    """Whether a tree is a `Retention`, for `jax.tree.map` over retentions or None."""
    return isinstance(tree, Retention)


def _priority(name: str, value: int) -> int:
    if not 0 <= value <= HIGHEST_PRIORITY:
        raise ValueError(f"{name}: got {value}, wanted 0..{HIGHEST_PRIORITY}")
    return value


def _time(name: str, value: int | None) -> int:
    if value is not None and value < 0:
        raise ValueError(f"{name}: got {value} ms, wanted None or at least 0")
    return UNSTATED if value is None else value


def by_column(request: Retention | None, length: jax.Array, block_size: int, num_columns: int) -> jax.Array:
    """i32[num_columns, 2]; priority and ttl of the blocks of a row with a prompt of length i32[].

    UNSTATED for the prompt's blocks outside every range, and for all of them without a request.
    """
    if request is None:
        request = Retention.of()
    first = np.arange(num_columns, dtype=np.int32) * block_size
    ranges = jnp.asarray(request.ranges, jnp.int32)
    requested_priority = jnp.full((num_columns, 2), UNSTATED, jnp.int32)
    if ranges.shape[0]:
        inside = (first[:, None] >= ranges[None, :, 0]) & (first[:, None] < ranges[None, :, 1])
        of_range = pick(ranges, jnp.argmax(inside, axis=1))[:, 2:]
        requested_priority = jnp.where(jnp.any(inside, axis=1)[:, None], of_range, requested_priority)
    return jnp.where((first < length)[:, None], requested_priority, jnp.asarray(request.decode, jnp.int32)[None])


def cut_off(requested_priority: jax.Array | None, length: jax.Array, block_size: int) -> jax.Array | None:
    """Retention i32[M + 1, 2] of a row cut to length i32[]: blocks after the cut count as generated.

    None if the spec has no retention.
    """

    def cut(requested_priority: jax.Array) -> jax.Array:
        is_prompt = np.arange(requested_priority.shape[0], dtype=np.int32) * block_size < length
        return jnp.where(is_prompt[:, None], requested_priority, requested_priority[-1:])

    return jax.tree.map(cut, requested_priority)


def apply_retention(blocks: Blocks, ids: jax.Array, requested_priority: jax.Array | None, where: jax.Array) -> Blocks:
    """Gives blocks ids i32[K], where bool[K], the requested priority and ttl i32[K, 2], or the default if UNSTATED.

    Without retention `requested_priority` and the blocks' retention are None, and nothing changes.
    """

    def give(retention: jax.Array, requested_priority: jax.Array) -> jax.Array:
        default = jnp.broadcast_to(np.array([DEFAULT_PRIORITY, UNSTATED], np.int32), requested_priority.shape)
        return put(retention, ids, jnp.where(requested_priority[..., :1] < 0, default, requested_priority), where)

    retention, expiry = fence(blocks.retention, blocks.expiry)  # the caller may have just derived expiry from retention
    return blocks.replace(retention=jax.tree.map(give, retention, requested_priority), expiry=expiry)


def priority_at(blocks: Blocks, now: jax.Array) -> jax.Array:
    """i32[B]; each block's priority at `now`: the requested priority, or 35 after its time to live."""
    if blocks.retention is None or blocks.expiry is None or blocks.time is None:
        raise ValueError("retention: got a spec made with retention=False, wanted retention=True")
    high, low = time_at(blocks.time, now)
    expiry = blocks.expiry
    reached = (high > expiry[:, 0]) | ((high == expiry[:, 0]) & (low >= expiry[:, 1]))
    return jnp.where(reached & (blocks.retention[:, 1] >= 0), DEFAULT_PRIORITY, blocks.retention[:, 0])


def time_at(latest: jax.Array, now: jax.Array) -> jax.Array:
    """i32[2]; `now` i32[] in 64 bits: the time nearest to the latest time i32[2]."""
    return later(latest, now - latest[1])


def later(time: jax.Array, ms: jax.Array) -> jax.Array:
    """i32[..., 2]; time i32[..., 2] (upper word, lower word) plus ms i32[...], which may be negative."""
    before = time[..., 1]
    low = before + ms
    carry = (low < before).astype(jnp.int32) - (ms < 0).astype(jnp.int32)
    return jnp.stack([time[..., 0] + carry, low], axis=-1)


def set_expiry(blocks: Blocks, ids: jax.Array, where: jax.Array, now: jax.Array) -> Blocks:
    """Starts the time to live of distinct blocks ids i32[K], where bool[K], at `now`. See `apply_retention`."""

    def begin(expiry: jax.Array, retention: jax.Array, time: jax.Array) -> jax.Array:
        return put(expiry, ids, later(time_at(time, now), pick(retention, ids)[:, 1]), where)

    expiry = jax.tree.map(begin, blocks.expiry, blocks.retention, blocks.time)
    return advance_time(blocks.replace(expiry=expiry), now, jnp.any(where))


def advance_time(blocks: Blocks, now: jax.Array, where: jax.Array) -> Blocks:
    """Advances `Blocks.time` to `now` where bool[] holds. A time before the latest changes nothing."""

    def advance(time: jax.Array) -> jax.Array:
        return jnp.where(where & (now - time[1] > 0), time_at(time, now), time)

    return blocks.replace(time=jax.tree.map(advance, blocks.time))
