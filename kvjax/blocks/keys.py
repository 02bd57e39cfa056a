# SPDX-License-Identifier: Apache-2.0
"""Keys: a 64-bit hash of the prefix up to a block, in two u32 lanes.

A key only proposes candidates: tokens, extra ids and parent links confirm every hit. The key of a prefix is a sum with
a term for each block, a well-mixed number that depends on the block's contents and depth. So a cumulative sum gives all
keys of a prompt, and a block's key follows from its parent's key in O(P).
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._arrays import mix
from kvjax.state import Text

LANES = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)


def root_key(namespace: jax.Array) -> jax.Array:
    """u32[..., 2]; the key of the empty prefix of each namespace i32[...]."""
    return mix(namespace.astype(jnp.uint32)[..., None] + _last_axes(LANES, namespace.ndim + 1))


def content_words(words: jax.Array, position, lane) -> jax.Array:
    """u32[...]; the term of a token word u32[...] at `position` of its block, in a lane of the block's key."""
    return mix(words + (position * np.uint32(0x9E3779B1) + lane))


def block_words(depth: jax.Array, fill: jax.Array) -> jax.Array:
    """u32[...]; a word for a block's depth in its sequence and the number of its tokens, i32[...]."""
    return depth.astype(jnp.uint32) * np.uint32(0x27D4EB2F) + fill.astype(jnp.uint32) * np.uint32(0x165667B1)


def token_words(text: Text) -> jax.Array:
    """u32[...]; a word for each token i32[...] and its extra id."""
    words = text.tokens.astype(jnp.uint32) * np.uint32(0xCC9E2D51)
    return words if text.extra_ids is None else words + mix(text.extra_ids.astype(jnp.uint32))


def prefix_keys(
    start: jax.Array,
    text: Text,
    fill,
    depth: jax.Array,
    so_far: Callable[[jax.Array], jax.Array] = lambda blocks: blocks,
) -> jax.Array:
    """u32[..., 2]; the key of the prefix up to each block of text i32[..., P], of which `fill` tokens count.

    Args:
      start: u32[..., 2]; the key of the prefix before the block, or before the first summand of `so_far`.
      text: the contents of the blocks.
      fill: i32 or i32[...]; the number of valid tokens of each block.
      depth: i32[...]; the number of blocks before each block in its sequence.
      so_far: a function for the running sums of the blocks' words u32[..., 2], such as `chain`.
    """
    block_size = text.tokens.shape[-1]
    ndim = text.tokens.ndim
    position = np.arange(block_size, dtype=np.uint32)[:, None]
    words = token_words(text)[..., None]
    fill = jnp.broadcast_to(jnp.asarray(fill, jnp.int32), text.tokens.shape[:-1])
    counts = _last_axes(np.arange(block_size, dtype=np.int32), ndim) < fill[..., None]
    words = content_words(words, _last_axes(position, ndim + 1), _last_axes(LANES, ndim + 1))
    words = jnp.where(counts[..., None], words, np.uint32(0))
    content = jnp.sum(words, axis=-2, dtype=jnp.uint32)
    blocks = mix(content ^ mix(block_words(depth, fill)[..., None] + _last_axes(LANES, ndim)))
    return start + so_far(blocks)


def chain(blocks: jax.Array) -> jax.Array:
    """u32[F, 2]; the running sums of u32[F, 2]."""
    return jnp.cumsum(blocks, axis=0, dtype=jnp.uint32)


def _last_axes(x: np.ndarray, ndim: int) -> np.ndarray:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


_VERSION = 2  # of the data of `Namespaces.to_dict`; in version 1 no number could be given back
_WEIGHTS = "kvjax-weights:"  # the beginning of a salt that contains a version of the weights
MAX_NUMBER = 2**31 - 1  # of an i32
_lock = threading.Lock()  # shared by all `Namespaces`, so that they can be pickled


class Namespaces:
    """Numbers (salt, LoRA) pairs on the host. Equal pairs get the same number, and different pairs never do.

    The numbers separate tenants and versions of a model's weights: K/V of a number are never found under another
    number. A cache sees only the numbers, so a new version compiles nothing. `forget_namespaces` empties the
    cached blocks of old versions. A version becomes part of the salt (`salted`), and so of hashes and of published
    events. If you save a cache, save `to_dict()` with it: a number from a fresh `Namespaces` may be another tenant's in
    the restored cache.

    A number returned by a call belongs to its pair for ever. A number returned by `lend` is given back when nothing
    uses it any more, and its pair is forgotten. Numbers are never reused for a second pair: there are 2**31 of them.

    Example:
      >>> namespaces = kvjax.Namespaces()
      >>> namespaces(salt="tenant a"), namespaces(salt="tenant b", lora=3), namespaces(salt="tenant a")
      (1, 2, 1)
      >>> namespaces()  # 0 belongs to prompts without salt and LoRA
      0
      >>> namespaces(weights=7), namespaces(weights=8), namespaces(salt="tenant a", weights=7), namespaces(weights="7")
      (3, 4, 5, 3)
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[str | None, int | None]] = {0: (None, None)}
        self._numbers: dict[tuple[str | None, int | None], int] = {(None, None): 0}
        self._next = 1
        self._lent: dict[int, int] = {}  # the number of borrowers of each namespace that is only lent

    def __call__(self, salt: str | None = None, lora: int | None = None, *, weights: str | int | None = None) -> int:
        """Returns the number of this salt, adapter and version of the weights, to pass as `namespace`.

        None means no salt, adapter or version. Adapter 0 is an adapter. A version is any text or number: 7 and "7" are
        the same version.

        Raises:
          ValueError: if an argument has the wrong type, or a salt looks as if it contained a version.
        """
        return self._intern(*_pair(self.salted(salt, weights), lora))

    def lend(self, salt: str | None, *, weights: str | int | None = None) -> int:
        """Returns the number of a salt until `give_back`, for an engine that knows which blocks and requests use it.

        Each call adds a borrower and needs a `give_back` of its own.

        Raises:
          ValueError: if a call of the object would raise it for this salt.

        Example:
          >>> namespaces = kvjax.Namespaces()
          >>> first = namespaces.lend("tenant a")
          >>> namespaces.give_back(first)
          >>> first in namespaces, namespaces.lend("tenant a") == first  # the pair has a new number
          (False, False)
        """
        return self._lend(_pair(self.salted(salt, weights), None))

    def _lend(self, pair: Any) -> int:
        with _lock:
            is_new = pair not in self._numbers
            namespace = self._add(pair)
            if is_new or namespace in self._lent:
                self._lent[namespace] = self._lent.get(namespace, 0) + 1
            return namespace

    def give_back(self, namespace: int) -> None:
        """Gives a lent number back. The last borrower makes the object forget the pair, unless a call returned it too.

        Do so only when no block of a cache, no request and no later `admit` uses the number.
        """
        with _lock:
            if namespace not in self._lent:
                return
            self._lent[namespace] -= 1
            if not self._lent[namespace]:
                del self._lent[namespace], self._numbers[self._pairs.pop(namespace)]

    def with_weights(self, namespace: int, weights: str | int) -> int:
        """Returns the number of the same salt and adapter under another version of the weights.

        If the salt contains a version already, the number belongs to both versions.

        Raises:
          ValueError: if `weights` has the wrong type.
          KeyError: for a number without a pair.

        Example:
          >>> namespaces = kvjax.Namespaces()
          >>> tenant = namespaces(salt="tenant a")
          >>> namespaces.with_weights(tenant, 7) == namespaces(salt="tenant a", weights=7)
          True
        """
        salt, lora = self.describe(namespace)
        version = self.salted(None, weights)
        return self._intern(version if salt is None else f"{version}:{salt}", lora)

    def numbered(self, salt: str | None, lora: int | None) -> int:
        """Returns the number of a pair from `describe`, whose salt may contain a version of the weights.

        Use it for pairs of another `Namespaces`, not for a request's.

        Raises:
          ValueError: if an argument has the wrong type.
        """
        return self._intern(*_pair(salt, lora))

    @staticmethod
    def salted(salt: str | None = None, weights: str | int | None = None) -> str | None:
        """Returns the salt with the version of the weights, different for each pair, as it is hashed and published.

        Raises:
          ValueError: if an argument has the wrong type, or the salt looks as if it contained a version.

        Example:
          >>> kvjax.Namespaces.salted("tenant a", weights=7)
          'kvjax-weights:1:7:tenant a'
          >>> kvjax.Namespaces.salted("tenant a")
          'tenant a'
        """
        if not isinstance(salt, str | None):
            raise ValueError(f"salt: got {salt!r}, wanted a str or None")
        if salt is not None and salt.startswith(_WEIGHTS):  # otherwise a tenant could choose another tenant's namespace
            raise ValueError(f"salt: got {reprlib.repr(salt)}, wanted a salt that does not begin with {_WEIGHTS!r}")
        if weights is None:
            return salt
        if isinstance(weights, bool) or not isinstance(weights, str | int | np.integer):
            raise ValueError(f"weights: got {weights!r:.80}, wanted a str, an int or None")
        return f"{_WEIGHTS}{len(str(weights))}:{weights}{'' if salt is None else f':{salt}'}"

    @staticmethod
    def unversioned(salt: str | None) -> str | None:
        """Returns a salt of `salted` without the version of the weights.

        Example:
          >>> kvjax.Namespaces.unversioned("kvjax-weights:1:7:tenant a")
          'tenant a'
        """
        while salt is not None and salt.startswith(_WEIGHTS):
            length, _, rest = salt[len(_WEIGHTS) :].partition(":")
            salt = rest[int(length) + 1 :] or None
        return salt

    def _intern(self, *pair: Any) -> int:
        """Returns the number of a pair, which it keeps for ever."""
        with _lock:
            namespace = self._add(pair)
            self._lent.pop(namespace, None)
            return namespace

    def _add(self, pair: Any) -> int:
        if pair not in self._numbers:
            if self._next > MAX_NUMBER:
                raise RuntimeError(f"all {MAX_NUMBER + 1:,} numbers of namespaces are in use or were used")
            self._numbers[pair] = self._next
            self._pairs[self._next] = pair
            self._next += 1
        return self._numbers[pair]

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, namespace: object) -> bool:
        """Whether this number was issued and not given back."""
        return isinstance(namespace, int | np.integer) and int(namespace) in self._pairs

    def describe(self, namespace: int) -> tuple[str | None, int | None]:
        """Returns the (salt, LoRA) pair of a number, with the salt of `salted`; KeyError for a number without a pair.

        Example:
          >>> namespaces = kvjax.Namespaces()
          >>> namespaces.describe(namespaces(salt="tenant a", lora=3))
          ('tenant a', 3)
        """
        if namespace not in self:
            raise KeyError(namespace)
        return self._pairs[namespace]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers and their pairs as data for JSON. `from_dict` reads it."""
        with _lock:
            pairs = sorted(self._pairs.items())
            next_number = self._next
        return {
            "version": _VERSION,
            "namespaces": [[namespace, *pair] for namespace, pair in pairs],
            "next": next_number,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Namespaces:
        """Restores the numbers saved by `to_dict`, also in another process. New pairs get new numbers.

        Raises:
          ValueError: if `to_dict` cannot have written the data.

        Example:
          >>> namespaces = kvjax.Namespaces()
          >>> namespaces(salt="tenant a")
          1
          >>> restored = kvjax.Namespaces.from_dict(namespaces.to_dict())
          >>> restored(salt="tenant b"), restored(salt="tenant a")
          (2, 1)
        """
        keys = {"version", "namespaces"}
        if not isinstance(saved, Mapping) or set(saved) not in (keys, {*keys, "next"}):
            raise ValueError(f"saved: got {reprlib.repr(saved)}, wanted the result of Namespaces.to_dict")
        if type(saved["version"]) is not int or saved["version"] != (_VERSION if "next" in saved else 1):
            raise ValueError(f"saved: got version {saved['version']!r}, wanted {_VERSION} with next, or 1 without")
        namespaces = cls()
        entries = _entries(saved["namespaces"])
        if type(entries[0][0]) is not int or entries[0] != [0, None, None]:
            raise ValueError(f"saved: got {reprlib.repr(entries[0])}, wanted number 0 with (None, None)")
        for entry in entries[1:]:
            namespace = entry[0]
            pair = _pair(*entry[1:])
            is_new = type(namespace) is int and namespaces._next <= namespace <= MAX_NUMBER
            if not is_new or pair in namespaces._numbers:
                wanted = f"a number from {namespaces._next} with a pair that no other number has"
                raise ValueError(f"saved: got {reprlib.repr(entry)}, wanted {wanted}")
            namespaces._next = namespace
            namespaces._add(pair)
        next_number = saved.get("next", namespaces._next)
        if type(next_number) is not int or not namespaces._next <= next_number <= MAX_NUMBER + 1:
            raise ValueError(f"saved: got next {next_number!r}, wanted an i32 above all numbers")
        namespaces._next = next_number
        return namespaces


def _pair(salt: Any, lora: Any) -> tuple[str | None, int | None]:
    if not isinstance(salt, str | None):
        raise ValueError(f"salt: got {salt!r}, wanted a str or None")
    if isinstance(lora, bool) or not isinstance(lora, int | np.integer | None):
        raise ValueError(f"lora: got {lora!r}, wanted an int or None")
    return salt, None if lora is None else int(lora)


def _entries(saved: Any) -> list[Any]:
    """Returns the saved [number, salt, LoRA] entries, at least the entry of (None, None)."""
    is_list = isinstance(saved, list | tuple) and len(saved) > 0
    if not is_list or not all(isinstance(entry, list | tuple) and len(entry) == 3 for entry in saved):
        raise ValueError(f"saved: got namespaces {reprlib.repr(saved)}, wanted a list of [number, salt, LoRA]")
    return [list(entry) for entry in saved]
