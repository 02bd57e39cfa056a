# SPDX-License-Identifier: Apache-2.0
"""A trace: the requests to a server, with ids for the blocks of their prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvjax.checks import static_int

_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Each block has an id. Equal ids mean equal prefixes: the same block after the same blocks. So an id always follows
    the same parent, and the ids form a forest. Ids are numbered from 0 in the order of their first use, so a parent
    comes before its children. `make_trace` builds and checks a trace.

    Attributes:
      time: f64[R] ms; the arrival of each request.
      input_length: i32[R]; tokens of its prompt.
      output_length: i32[R]; tokens of its answer.
      ids: i32[K]; the blocks of all prompts, prompt after prompt.
      starts: i32[R + 1]; the index in `ids` of each prompt's first block, and at the end the length of `ids`.
      parent: i32[D]; the id before each id, or -1 at the beginning of a prompt.
      block_size: tokens of a block. The last block of a prompt may be partly filled.
      kind: i32[R] or None; the class of each request, an index into `kinds`.
      kinds: names of the classes.
      session: i32[R] or None; the session of each request. The requests of a session are its turns.
      notes: caveats for readers of figures, such as randomly generated reuse.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 10], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> trace.lengths.tolist(), trace.full.tolist()  # the last block of the last prompt is partly filled
      ([3, 2, 3], [3, 2, 2])
    """

    time: np.ndarray
    input_length: np.ndarray
    output_length: np.ndarray
    ids: np.ndarray
    starts: np.ndarray
    parent: np.ndarray
    block_size: int
    kind: np.ndarray | None = None
    kinds: tuple[str, ...] = ()
    session: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """The number of requests, R."""
        return len(self.time)

    def __getitem__(self, part: slice) -> Trace:
        """The requests of a slice without a step, as a trace with newly numbered ids."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise ValueError(f"trace[part]: got {part!r}, wanted a slice without a step")
        first, last, _ = part.indices(len(self))
        return self.select(np.arange(first, max(first, last)))

    def select(self, requests: np.ndarray) -> Trace:
        """The requests at these indices i[R], in ascending order, as a trace with newly numbered ids."""
        prompts = [self.blocks(request) for request in requests.tolist()]
        ids, parent = _forest([prompt.tolist() for prompt in prompts])
        part_of = lambda values: None if values is None else values[requests]  # noqa: E731
        return dataclasses.replace(
            self,
            time=self.time[requests],
            input_length=self.input_length[requests],
            output_length=self.output_length[requests],
            ids=ids,
            parent=parent,
            starts=np.cumsum([0, *map(len, prompts)], dtype=np.int32),
            kind=part_of(self.kind),
            session=part_of(self.session),
        )

    @property
    def num_ids(self) -> int:
        """The number of distinct ids, D."""
        return len(self.parent)

    @property
    def lengths(self) -> np.ndarray:
        """i32[R]; the number of blocks of each prompt."""
        return np.diff(self.starts)

    @property
    def full(self) -> np.ndarray:
        """i32[R]; the number of full blocks of each prompt: all blocks, or all but the last."""
        return np.minimum(self.input_length // self.block_size, self.lengths)

    @property
    def owners(self) -> np.ndarray:
        """i32[K]; the request of each block."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.lengths)

    @property
    def depths(self) -> np.ndarray:
        """i32[K]; the number of blocks before each block in its prompt."""
        return np.arange(len(self.ids), dtype=np.int32) - np.repeat(self.starts[:-1], self.lengths)

    def blocks(self, request: int) -> np.ndarray:
        """i32[n]; the ids of a prompt."""
        return self.ids[self.starts[request] : self.starts[request + 1]]


def next_uses(ids: np.ndarray) -> np.ndarray:
    """i64[K]; the index of the next equal id for ids i32[K], or -1."""
    order = np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    following = np.full(len(ids), -1, np.int64)
    following[order[:-1][again]] = order[1:][again]
    return following


def previous_uses(ids: np.ndarray) -> np.ndarray:
    """i64[K]; the index of the previous equal id, or -1. See `next_uses`."""
    following = next_uses(ids[::-1])
    return np.where(following >= 0, len(ids) - 1 - following, -1)[::-1]


class Runs(NamedTuple):
    """Runs of blocks that are reused together, in the order of their blocks in the trace.

    Whenever a child was used, its parent was used too. So the blocks of a prompt fall into runs, and the blocks of a
    run were all last used by the same earlier prompt. In a prompt, runs from later prompts come first. A run has the
    same depth in both prompts. The whole trace of Mooncake has 28,621 runs of 288,500 blocks.
    """

    request: np.ndarray  # i32[U]; the prompt with the run
    before: np.ndarray  # i32[U]; the previous prompt that used these blocks, or -1
    depth: np.ndarray  # i32[U]; the column of its first block, equal in both prompts
    length: np.ndarray  # i32[U]; its number of blocks


def runs(trace: Trace, used: np.ndarray) -> Runs:
    """The runs of the first used i32[R] blocks of each prompt. The other blocks are ignored."""
    is_used = trace.depths < used[trace.owners]
    request = trace.owners[is_used]
    depth = trace.depths[is_used]
    ids = trace.ids[is_used]
    previous = previous_uses(ids)
    before = np.where(previous >= 0, request[previous], np.int32(-1))
    begins = np.ones(len(ids), np.bool_)
    begins[1:] = (request[1:] != request[:-1]) | (before[1:] != before[:-1])
    first = np.flatnonzero(begins)
    length = np.diff(first, append=len(ids)).astype(np.int32)
    return Runs(request[first], before[first], depth[first], length)


def make_trace(
    time: Sequence[float],
    input_length: Sequence[int],
    output_length: Sequence[int],
    hash_ids: Sequence[Sequence[int]],
    block_size: int,
    *,
    two_parents: Literal["refuse", "rename"] = "refuse",
    kind: Sequence[str] | None = None,
    session: Sequence[object] | None = None,
    notes: Sequence[str] = (),
    where: Sequence[str] | None = None,
) -> Trace:
    """Makes a trace of requests whose blocks have any ids.

    Args:
      time: arrival times in ms, finite and in ascending order.
      input_length: tokens of each prompt, at least 1.
      output_length: tokens of each answer, at least 0.
      hash_ids: the ids of each prompt, an id for each block of `block_size` tokens, including a partly filled last
        block.
      block_size: tokens of a block.
      two_parents: the treatment of an id that follows different ids in different prompts, such as a hash of only the
        block's own tokens. "rename" distinguishes prefixes by all their ids, and "refuse" raises an error.
      kind: the name of each request's class; None means no classes.
      session: the session of each request, any value; None means unknown.
      notes: the trace's `notes`.
      where: the source of each request for error messages; defaults to its index.

    Raises:
      ValueError: for an invalid request, with its source.

    Example:
      >>> from kvjax import research
      >>> trace = research.make_trace([0, 5, 9], [12, 8, 12], [0, 0, 0], [[1, 2, 3], [4, 5], [1, 2, 6]], block_size=4)
      >>> trace.blocks(0).tolist(), trace.blocks(2).tolist()  # numbered from 0 in the order of their first use
      ([0, 1, 2], [0, 1, 5])
      >>> trace.parent.tolist()
      [-1, 0, 1, -1, 3, 1]
    """
    num_prompts = len(hash_ids)
    where = where if where is not None else [f"request {n}" for n in range(num_prompts)]
    fields = {"time": time, "input_length": input_length, "output_length": output_length, "kind": kind}
    for name, values in (fields | {"session": session}).items():
        if values is not None and len(values) != num_prompts:
            raise ValueError(f"{name}: got {len(values)} values, wanted a value for each of {num_prompts} prompts")
    block_size = static_int("block_size", block_size, 1)
    prompts = _tokens("input_length", input_length, where, 1)
    answers = _tokens("output_length", output_length, where, 0)
    times = _times(time, where)
    for n, tokens in enumerate(prompts.tolist()):
        num_blocks = len(hash_ids[n])
        num_begun = -(-tokens // block_size)
        if num_blocks != num_begun:
            wanted = f"{num_begun} for {tokens} tokens in blocks of {block_size}"
            raise ValueError(f"{where[n]}: hash_ids: got {num_blocks}, wanted {wanted}")
    if len(late := np.flatnonzero(np.diff(times) < 0) + 1):
        n = int(late[0])
        raise ValueError(f"{where[n]}: time: got {time[n]} ms after {time[n - 1]}, wanted requests in order")
    ids, parent = _forest(hash_ids, two_parents, where)
    starts = np.cumsum([0, *map(len, hash_ids)], dtype=np.int32)
    kinds = () if kind is None else tuple(dict.fromkeys(kind))
    return Trace(
        times,
        prompts,
        answers,
        ids,
        starts,
        parent,
        block_size,
        _numbered(kind),
        kinds,
        _numbered(session),
        tuple(notes),
    )


def _tokens(name: str, values: Sequence[int], where: Sequence[str], minimum: int) -> np.ndarray:
    """i32[R]; the tokens of each request, at least `minimum`. Other values are a ValueError with the source."""
    for n, value in enumerate(values):
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= _LARGEST:
            raise ValueError(f"{where[n]}: {name}: got {value!r:.40}, wanted an integer from {minimum} to {_LARGEST}")
    return np.asarray(values, np.int32)


def _times(values: Sequence[float], where: Sequence[str]) -> np.ndarray:
    """f64[R]; the arrival of each request. Other values are a ValueError with the source."""
    for n, value in enumerate(values):
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not np.isfinite(np.float64(value)):
            raise ValueError(f"{where[n]}: time: got {value!r:.40}, wanted a finite number of ms")
    return np.asarray(values, np.float64)


def _forest(
    hash_ids: Sequence[Sequence[int]], two_parents: str = "rename", where: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all prompts, i32[K], numbered by first use, and the parent of each, i32[D]. See `make_trace`."""
    numbers: dict[tuple[int, int], int] = {}  # (parent, id of the source) -> id
    parents: dict[int, int] = {}  # id of the source -> its parent
    ids: list[int] = []
    parent: list[int] = []
    for n, prompt in enumerate(hash_ids):
        above = -1
        for hash_id in prompt:
            if two_parents == "refuse" and parents.setdefault(hash_id, above) != above:
                raise ValueError(
                    f"{where[n]}: hash_ids: {hash_id} follows another block than before, wanted the same parent for "
                    'each id (two_parents="rename" distinguishes equal ids by the blocks before them)'
                )
            block = numbers.setdefault((above, hash_id), len(parent))
            if block == len(parent):
                parent.append(above)
            ids.append(block)
            above = block
    return np.asarray(ids, np.int32), np.asarray(parent, np.int32)


def _numbered(values: Sequence[object] | None) -> np.ndarray | None:
    """i32[R]; equal numbers for equal values, from 0 in order of first use. None for None."""
    seen: dict[object, int] = {}
    return None if values is None else np.asarray([seen.setdefault(value, len(seen)) for value in values], np.int32)
