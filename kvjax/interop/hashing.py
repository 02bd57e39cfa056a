# SPDX-License-Identifier: Apache-2.0
"""Hashes of cached prefixes, equal in every process, from events.

`blocks/hashes.py` defines the hashed content. A reader of events keeps the hashes of the cached blocks, as `fold` keeps
a mirror::

    hashes = hashing.block_hashes(kvjax.events.snapshot(state), names=names)
    events, hashes = hashing.with_hashes(kvjax.to_list(events), hashes, names=names)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.blocks.hashes import (
    Hashing,
    block_hash,
    checked_loras,
    encoded,
    hasher,
    namespace_root,
    root_hash,
)
from kvjax.blocks.keys import Namespaces
from kvjax.events.mirror import Node, decoded, node_of, parent_of

__all__ = ["Hashing", "block_hash", "block_hashes", "root_hash", "salt_hash", "with_hashes"]

_LACKS = "wanted a node of `hashes`: the hashes after all events before these"


def salt_hash(salt: str, *, key: bytes = b"") -> str:
    """A hash of a salt's UTF-8: 32 hexadecimal digits. Without a `key` a short salt can be guessed from its hash.

    Args:
      salt: a tenant's salt, as in `Namespaces`.
      key: a secret, as for `root_hash`.

    Example:
      >>> from kvjax.interop.hashing import salt_hash
      >>> salt_hash("tenant a")
      '3a779d9a0f9d58a66187a31f5f83e267'
      >>> salt_hash("tenant a", key=b"secret") == salt_hash("tenant a")
      False
    """
    return hasher(b"kvjax-salt", key, encoded("salt", salt)).hexdigest()


def salt_text(salt: str | None, salts: str, key: bytes) -> str | None:
    """A salt in its published form."""
    return salt if salt is None or salts == "plain" else salt_hash(salt, key=key)


def block_hashes(
    events: Iterable[dict[str, Any]], hashes: Mapping[Node, bytes] | None = None, **options: Any
) -> dict[Node, bytes]:
    """{(group, block, generation): hash of the whole prefix} of all cached blocks after events, by `with_hashes`.

    Example:
      >>> from kvjax.interop.hashing import block_hash, block_hashes, root_hash
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> hashes = block_hashes(kvjax.to_list(events))
      >>> sorted(hashes)  # (group, block, generation)
      [(0, 0, 1), (0, 1, 1)]
      >>> hashes[0, 0, 1] == block_hash(root_hash(), [0, 1, 2, 3])
      True
    """
    return with_hashes(events, hashes, **options)[1]


def with_hashes(
    events: Iterable[dict[str, Any]],
    hashes: Mapping[Node, bytes] | None = None,
    *,
    names: Namespaces | None = None,
    loras: Mapping[int, str] | None = None,
    model: str | None = None,
    key: bytes = b"",
) -> tuple[list[dict[str, Any]], dict[Node, bytes]]:
    """Adds hashes to decoded events, and updates the hashes of the cached blocks.

    Args:
      events: from `to_list`, in their order, or from `snapshot` for a reader who joins late.
      hashes: the hashes before these events, which this call leaves unchanged; None for an empty cache.
      names: the `Namespaces` of the cache, for salts and LoRAs; None if all prompts had namespace 0.
      loras: the name of each adapter in use, by number. Adapters need different names, because their K/V differ.
      model: the model's name, as for `root_hash`.
      key: a secret, as for `root_hash`.

    Returns:
      The events, and the hashes after them, as from `block_hashes`. Stored, updated and removed events also have
      "block_hash". Stored events also have "parent_hash", the hash of the empty prefix at a root.

    Example:
      >>> from kvjax.interop.hashing import with_hashes
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(10), 10)
      >>> state, events = kvjax.commit(state, np.arange(10)[None], [10], seqs=[0])
      >>> (first, second), hashes = with_hashes(kvjax.to_list(events), model="llama")
      >>> second["parent_hash"] == first["block_hash"], len(hashes)
      (True, 2)
    """
    adapters = checked_loras("loras", loras)
    names = Namespaces() if names is None else names
    after = dict(hashes or {})
    hashed = []
    for event in decoded(events):
        if event["kind"] == "cleared":
            after = {node: value for node, value in after.items() if node[0] != event["group"]}
        if event["kind"] in ("stored", "updated", "removed"):
            node = node_of(event, after, _LACKS)
            if event["kind"] == "stored":
                parent = parent_of(event, after, _LACKS)
                if parent is None:
                    parent = namespace_root(event["namespace"], names, adapters, model, key)
                after[node] = block_hash(parent, event["tokens"], event.get("extra_ids"), key=key)
                event = {**event, "parent_hash": parent}
            event = {**event, "block_hash": after[node]}
            if event["kind"] == "removed":
                del after[node]
        hashed.append(event)
    return hashed, after
