# SPDX-License-Identifier: Apache-2.0
"""Names of cached prefixes that are the same in every process: digests of 128 bits, made on the host from events.

A block's number and a namespace's number mean something in one process only. A digest names the whole prefix that ends
in a block: model, salt, LoRA and all tokens so far. So equal prefixes have equal digests in all caches of one block
size, and others never do, by the strength of BLAKE2b. Who does not know the secret `key` cannot compute them.

    root    person kvjax-root   text(model) + text(salt) + text(LoRA name)
    block   person kvjax-block  the parent's 16 bytes, u32 number of tokens, tokens i32; with extra ids, these too, i32
    text    00 for None; else 01, u32 length, UTF-8                                          all little-endian

A reader of events keeps the digests of what is cached, as `fold` keeps its mirror:

    digests = kvjax.names.digests(kvjax.events.snapshot(state), names=names)
    labelled, digests = kvjax.names.label(kvjax.to_list(events), digests, names=names)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvjax._checks import host_integers
from kvjax.blocks.keys import Namespaces
from kvjax.events.mirror import Node, decoded, node_of, parent_of

_DIGEST_BYTES = 16
_LACKS = "wanted one that `known` has: the digests after all events before these"


def root(model: str | None = None, salt: str | None = None, lora: str | None = None, *, key: bytes = b"") -> bytes:
    """The digest of the empty prefix.

    Args:
      model: whatever tells apart models whose K/V differ, such as a checkpoint's name and the dtype of its K/V.
      salt: the tenant's, as in `Namespaces`.
      lora: the adapter's name; its number may be another one's in another process.
      key: a secret of at most 64 bytes, the same for all that compare digests.

    Returns:
      16 bytes.

    Raises:
      ValueError: if one of them is no text, or the key is too long.
    """
    return _digest(b"kvjax-root", _text("model", model) + _text("salt", salt) + _text("lora", lora), key)


def block(parent: bytes, tokens: ArrayLike, extra_ids: ArrayLike | None = None, *, key: bytes = b"") -> bytes:
    """The digest of the prefix that ends with a block.

    Args:
      parent: 16 bytes; the digest of the prefix before the block.
      tokens: i32[n]; the tokens of the block, fewer than P in the last one of a prefix.
      extra_ids: i32[n]; where the spec has them, zeros too; else None.
      key: as for `root`.

    Returns:
      16 bytes.

    Raises:
      ValueError: if the parent is no digest, or the integers are not of 32 bits or not one extra id for each token.
    """
    if not isinstance(parent, bytes) or len(parent) != _DIGEST_BYTES:
        raise ValueError(f"parent: got {parent!r:.80}, wanted a digest of {_DIGEST_BYTES} bytes")
    words = [_words("tokens", tokens), *(_words("extra_ids", ids) for ids in [extra_ids] if ids is not None)]
    size = words[0].size
    if any(ids.size != size for ids in words):
        raise ValueError(f"extra_ids: got {words[1].size}, wanted one for each of {size} tokens")
    content = parent + struct.pack("<I", size) + b"".join(ids.tobytes() for ids in words)
    return _digest(b"kvjax-block", content, key)


def first_64_bits(digest: bytes) -> int:
    """The first 8 bytes of a digest as an unsigned big-endian integer, for wires whose names have 64 bits.

    0 becomes 1: some readers take the parent 0 for none.
    """
    return int.from_bytes(digest[:8], "big") or 1


def salt_digest(salt: str, *, key: bytes = b"") -> str:
    """A name of a salt that does not tell it: 32 hexadecimal digits, by a hash of its UTF-8.

    Without `key` a short salt can be guessed from it.

    Args:
      salt: the tenant's, as in `Namespaces`.
      key: as for `root`.

    Raises:
      ValueError: if the salt is no text, or the key is too long.
    """
    return hasher(b"kvjax-salt", key, _encoded("salt", salt)).hexdigest()


def hasher(person: bytes, key: bytes = b"", content: bytes = b"") -> hashlib.blake2b:
    """The hash that makes digests, after some content; whoever makes many copies one, which has read the key.

    Args:
      person: what is hashed: `kvjax-root`, `kvjax-block` or `kvjax-salt`.
      key: as for `root`.
      content: the first bytes.

    Raises:
      ValueError: if the key is too long.
    """
    if not isinstance(key, bytes) or len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"  # a secret is not shown
        raise ValueError(f"key: got {got}, wanted at most {hashlib.blake2b.MAX_KEY_SIZE} bytes")
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=key, person=person)


def digests(
    events: Iterable[dict[str, Any]],
    known: Mapping[Node, bytes] | None = None,
    *,
    names: Namespaces | None = None,
    loras: Mapping[int, str] | None = None,
    model: str | None = None,
    key: bytes = b"",
) -> dict[Node, bytes]:
    """The digests of all prefixes that are cached after some events; see `label` for the arguments.

    Returns:
      {(group, block, generation): digest}; a window group's block has the digest of its whole prefix.
    """
    return label(events, known, names=names, loras=loras, model=model, key=key)[1]


def label(
    events: Iterable[dict[str, Any]],
    known: Mapping[Node, bytes] | None = None,
    *,
    names: Namespaces | None = None,
    loras: Mapping[int, str] | None = None,
    model: str | None = None,
    key: bytes = b"",
) -> tuple[list[dict[str, Any]], dict[Node, bytes]]:
    """Adds digests to decoded events, and keeps the digests of what is cached.

    Args:
      events: from `to_list`, in their order, or from `snapshot`, for a reader who begins late.
      known: the digests before these events; None: of an empty cache. It is left as it is.
      names: the `Namespaces` of the cache, for salts and LoRAs; None: all prompts had namespace 0.
      loras: adapter number to name, for each adapter in use. Two adapters need two names: their K/V differ.
      model: as for `root`.
      key: as for `root`.

    Returns:
      The events: stored, updated and removed ones have "digest" too, stored ones "parent_digest", which at a root is
      that of the empty prefix; and the digests after the events, as from `digests`.

    Raises:
      ValueError: if the events cannot have come from a cache with the known digests, or a namespace or an adapter has
        no name.
    """
    adapters = {} if loras is None else loras
    if len(set(adapters.values())) < len(adapters):
        raise ValueError(f"loras: got {dict(adapters)}, wanted another name for each adapter")
    names = Namespaces() if names is None else names
    nodes, labelled = dict(known or {}), []
    for event in decoded(events):
        if event["kind"] == "cleared":
            nodes = {node: digest for node, digest in nodes.items() if node[0] != event["group"]}
        if event["kind"] in ("stored", "updated", "removed"):
            node = node_of(event, nodes, _LACKS)
            if event["kind"] == "stored":
                parent = parent_of(event, nodes, _LACKS)
                if parent is None:
                    parent = _root_of(event["namespace"], names, adapters, model, key)
                nodes[node] = block(parent, event["tokens"], event.get("extra_ids"), key=key)
                event = {**event, "parent_digest": parent}
            event = {**event, "digest": nodes[node]}
            if event["kind"] == "removed":
                del nodes[node]
        labelled.append(event)
    return labelled, nodes


def _root_of(namespace: int, names: Namespaces, loras: Mapping[int, str], model: str | None, key: bytes) -> bytes:
    """The root of a namespace."""
    if namespace not in names:
        raise ValueError(f"names: got none of namespace {namespace}, wanted the Namespaces that gave it out")
    salt, lora = names.describe(namespace)
    name = None if lora is None else loras.get(lora)
    if name is None and lora is not None:  # as None it would be the name of the model without an adapter
        raise ValueError(f"loras: got no name of adapter {lora}, wanted one for each adapter in use")
    return root(model, salt, name, key=key)


def _words(name: str, values: ArrayLike) -> np.ndarray:
    return host_integers(name, values, np.int32, "a list of integers").astype("<i4")


def _text(name: str, value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    data = _encoded(name, value, "text or None")
    return b"\x01" + struct.pack("<I", len(data)) + data


def _encoded(name: str, value: str, wanted: str = "text") -> bytes:
    try:
        return value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(f"{name}: got {value!r}, wanted {wanted}") from error


def _digest(person: bytes, content: bytes, key: bytes) -> bytes:
    return hasher(person, key, content).digest()
