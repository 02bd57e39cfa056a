# SPDX-License-Identifier: Apache-2.0
"""Names of nodes and namespaces on wires: 64 bits that are the same on every machine (`kvjax.names`)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax import names as digests
from kvjax.blocks.keys import Namespaces
from kvjax.interop import columns as col
from kvjax.interop.nodes import NodeMap
from kvjax.interop.table import names_of, parents_among

SALTS = ("digest", "plain", "omit")
# Statuses of whole blocks that are never published, and what they are counted as.
UNKNOWN_NAMESPACE, NO_SALT, NO_EXTRA_NAME, NO_FIELD, COLLISION = range(col.PARTIAL + 1, col.PARTIAL + 6)
REASONS = {
    UNKNOWN_NAMESPACE: "unknown_namespace", NO_SALT: "salt_omitted", NO_EXTRA_NAME: "extra_id_without_name",
    NO_FIELD: "form_without_field", COLLISION: "collision",
}  # fmt: skip
_BYTES, _WORD = 16, 4  # of a digest, and of a word of a row
_FILLED = [col.FILL, col.SIZE]
_NOTHING = bytes(_BYTES)


class Space(NamedTuple):
    """A namespace as a wire has it.

    Attributes:
      root: 16 bytes; the digest of the empty prefix.
      lora_id: number of the adapter, or None.
      lora: its name, or None.
      salt: what stands for the salt, or None.
      status: col.SENT, or why its blocks are not published.
    """

    root: bytes
    lora_id: int | None
    lora: str | None
    salt: str | None
    status: int


def wire_salt(salt: str | None, salts: str, key: bytes) -> str | None:
    """The text of a salt on a wire."""
    return salt if salt is None or salts == "plain" else digests.salt_digest(salt, key=key)


class Naming:
    """Names nodes and namespaces.

    Attributes:
      left_out: how many whole blocks were not published, by reason (`REASONS`), each with those below it.
    """

    def __init__(
        self,
        names: Namespaces | None,
        *,
        lora_names: Mapping[int, str] | None,
        model: str | None,
        key: bytes,
        salts: str,
        extra_name: Callable[[int], str] | None,
        fields: Collection[str] = ("lora", "salt", "extra"),
        partial: bool = False,
    ):
        """Names as the arguments of `vllm.Encoder` say.

        `fields` are those that the wire's form has; `partial` says whether it carries partly filled blocks.
        """
        if salts not in SALTS:
            raise ValueError(f"salts: got {salts!r}, wanted {' or '.join(map(repr, SALTS))}")
        self._names = Namespaces() if names is None else names
        self._loras = {} if lora_names is None else dict(lora_names)
        if len(set(self._loras.values())) < len(self._loras):
            raise ValueError(f"lora_names: got {self._loras}, wanted another name for each adapter")
        self._model, self._key, self._salts = model, key, salts
        self._extra_name, self._fields, self._partial = extra_name, fields, partial
        self._extra_names: dict[int, str] = {}
        self._spaces: dict[int, Space] = {}
        self._block = digests.hasher(b"kvjax-block", key)
        self._unknown = Space(_NOTHING, None, None, None, UNKNOWN_NAMESPACE)
        self.left_out: collections.Counter[str] = collections.Counter()
        digests.root(model)  # refuses what is no text

    def learn(self, namespaces: Iterable[int]) -> None:
        """Looks namespaces up; to be called on the thread that calls `Namespaces`."""
        for number in set(namespaces) - self._spaces.keys():
            if number in self._names:
                self._spaces[number] = self._space(*self._names.describe(number))

    def space(self, namespace: int) -> Space:
        """A namespace as this wire has it."""
        return self._spaces.get(namespace, self._unknown)

    def _space(self, salt: str | None, lora: int | None) -> Space:
        name = None if lora is None else self._loras.get(lora, str(lora))
        root = digests.root(self._model, salt, name, key=self._key)
        status = col.SENT
        if salt is not None and self._salts == "omit":
            status = NO_SALT
        elif (salt is not None and "salt" not in self._fields) or (name is not None and "lora" not in self._fields):
            status = NO_FIELD
        return Space(root, lora, name, wire_salt(salt, self._salts, self._key), status)

    def extra_keys(self, ids: Any) -> list[list[Any]] | None:
        """[name, offset] for each run of equal extra ids i32[P] other than 0, or None.

        Raises:
          ValueError: if `extra_name` gives no text.
        """
        keys, before = [], 0
        for offset, extra in enumerate(ids):
            if extra not in (0, before):
                if extra not in self._extra_names:
                    assert self._extra_name is not None, "blocks with extra ids are left out without `extra_name`"
                    name = self._extra_name(extra)
                    if not isinstance(name, str):
                        raise ValueError(f"extra_name: got {name!r} for extra id {extra}, wanted text")
                    self._extra_names[extra] = name
                keys.append([self._extra_names[extra], offset])
            before = extra
        return keys or None

    def settle(self, nodes: NodeMap, number: int, blocks: np.ndarray, counted: bool = True) -> np.ndarray:
        """Names the nodes of a group that have no names yet, and decides which of them are published.

        Args:
          nodes: whose nodes; the first group's come before those of the others.
          number: the group's.
          blocks: i32[n]; parents before children.
          counted: whether the wire carries the group; what others leave out is not counted.

        Returns:
          Those that are published, in the same order.

        Raises:
          ValueError: if a parent went before its child.
        """
        group = nodes.groups[number]
        blocks = blocks[group.table[blocks, col.STATUS] == col.DUE]
        if not len(blocks):
            return blocks
        rows = group.table[blocks]
        where = parents_among(number, blocks)
        parents = [where.get(parent, -1) for parent in rows[:, col.PARENT].tolist()]
        statuses = self._before(nodes, rows)
        self._hash(rows, parents, statuses)
        names = names_of(rows[:, col.DIGEST : col.DIGEST + 2]).tolist()
        fresh = [name for name, status in zip(names, statuses, strict=True) if status == col.SENT]
        if len(set(fresh)) < len(fresh) or not group.names.keys().isdisjoint(fresh):
            _find_collisions(group.names, names, parents, statuses)
        rows[:, col.STATUS] = statuses
        group.table[blocks, col.STATUS : col.SIZE] = rows[:, col.STATUS : col.SIZE]
        if any(status != col.SENT for status in statuses):
            self.left_out.update(REASONS[status] for status in statuses if counted and status in REASONS)
            sent = np.flatnonzero(rows[:, col.STATUS] == col.SENT)
            names, blocks = [names[at] for at in sent.tolist()], blocks[sent]
        group.names.update(zip(names, blocks.tolist(), strict=True))
        return blocks

    def _before(self, nodes: NodeMap, rows: np.ndarray) -> list[int]:
        """The statuses of rows, before they are hashed; writes the digests of the prefixes before."""
        size, first, parent = nodes.spec.block_size, nodes.groups[0].table, rows[:, col.PARENT]
        before = first[np.maximum(parent, 0)]
        lost = (before[:, col.FILL] == 0) | (before[:, col.GENERATION] != rows[:, col.PARENT_GENERATION])
        if np.any(lost & (parent >= 0)):
            raise ValueError("events: got a node whose parent is gone, wanted children removed before their parents")
        rows[:, col.ABOVE : col.SIZE] = before[:, col.DIGEST : col.ABOVE]
        statuses = np.where(before[:, col.STATUS] == col.DUE, col.SENT, before[:, col.STATUS])
        roots = np.flatnonzero(parent < 0)
        for namespace in set(rows[roots, col.NAMESPACE].tolist()):
            of, space = roots[rows[roots, col.NAMESPACE] == namespace], self.space(namespace)
            rows[of, col.ABOVE : col.SIZE], statuses[of] = np.frombuffer(space.root, np.int32), space.status
        statuses[(statuses == col.SENT) & rows[:, col.TEXT + size :].any(axis=1)] = self._status_of_extra()
        if not self._partial:
            statuses[rows[:, col.FILL] < size] = col.PARTIAL
        return statuses.tolist()

    def _hash(self, rows: np.ndarray, parents: list[int], statuses: list[int]) -> None:
        """Writes the digests of rows, and those of the prefixes before where the parents are among the rows."""
        width, start = 4 * (rows.shape[1] - col.ABOVE), 0
        data, hashed, copy = np.ascontiguousarray(rows[:, col.ABOVE :]).tobytes(), [], self._block.copy
        for at, (parent, fill, size) in enumerate(zip(parents, *rows[:, _FILLED].T.tolist(), strict=True)):
            if parent >= 0 and statuses[at] == col.SENT:
                statuses[at] = statuses[parent]
            if statuses[at] == col.SENT:
                digest, content = copy(), data[start + _BYTES : start + width]
                digest.update(data[start : start + _BYTES] if parent < 0 else hashed[parent])
                digest.update(content if fill == size else _cut(content, fill, size))
                hashed.append(digest.digest())
            else:
                hashed.append(_NOTHING)
            start += width
        rows[:, col.DIGEST : col.ABOVE] = np.frombuffer(b"".join(hashed), np.int32).reshape(-1, 4)
        inside = np.array(parents, np.int64)
        among = np.flatnonzero(inside >= 0)
        rows[among, col.ABOVE : col.SIZE] = rows[inside[among], col.DIGEST : col.ABOVE]

    def _status_of_extra(self) -> int:
        """The status of a block with extra ids."""
        if "extra" not in self._fields:
            return NO_FIELD
        return col.SENT if self._extra_name is not None else NO_EXTRA_NAME


def _cut(content: bytes, fill: int, size: int) -> bytes:
    """The size and text of a block as `kvjax.names.block` hashes them if only some tokens are there."""
    starts = range(_WORD, len(content), _WORD * size)
    return fill.to_bytes(_WORD, "little") + b"".join(content[start : start + _WORD * fill] for start in starts)


def _find_collisions(taken: Mapping[int, int], names: list[int], parents: list[int], statuses: list[int]) -> None:
    """Marks nodes whose name another one has, and those below them; the first of such nodes keeps the name."""
    seen: set[int] = set()
    for at, (name, parent) in enumerate(zip(names, parents, strict=True)):
        if statuses[at] == col.SENT and parent >= 0:
            statuses[at] = statuses[parent]
        if statuses[at] == col.SENT and (name in taken or name in seen):
            statuses[at] = COLLISION
        seen.add(name)
