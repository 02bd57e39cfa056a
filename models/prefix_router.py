# SPDX-License-Identifier: Apache-2.0
"""A router for prompts. It mirrors the contents of caches, and picks the cache that has the most of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax import Namespaces
from kvjax.interop.vllm import Subscriber
from kvjax.serving import choose_replica

LOAD_PRICE = 0.5  # tokens of a cached prefix that outweigh a token which its cache has yet to compute
DEALT_PRICE = 0.01  # tokens of load that outweigh a token which its cache has computed: deals out unknown prompts
MAX_DEALT = 200_000  # tokens computed by all caches; beyond it all counts are halved
LEAST_COMMON = 16  # tokens; a shorter common beginning of two prompts is usually no block


class Place(NamedTuple):
    """A cache for a prompt, and how many tokens of the prompt it has, or is about to have."""

    name: str
    cached: int


class _Open(NamedTuple):
    """A request that a cache has not answered yet."""

    name: str  # the cache's
    space: tuple[str | None, str | None]  # salt and adapter
    prompt: np.ndarray  # i32[T]
    num_tokens: int  # to compute


class Router:
    """Mirrors caches, and counts the tokens that each of them has to compute.

    Args:
      endpoints: {name: (the cache's endpoint for events, its endpoint for a replay of missed events)}; see `add`.

    Attributes:
      mirrors: the mirror of each cache by its name.
      weights: the name of each cache's weights after an `Engine.update`, as in its events. A wrong name costs hits.

    Example:
      >>> from models.prefix_router import Router
      >>> router = Router({"one": ("tcp://127.0.0.1:5601", "tcp://127.0.0.1:5611")})
      >>> router.route([1, 2, 3])
      'one'
      >>> router.close()
    """

    def __init__(self, endpoints: Mapping[str, tuple[str, str]] | None = None):
        self.mirrors = dict[str, Subscriber]()
        self.weights = dict[str, str | None]()
        self._open = dict[Hashable, _Open]()
        self._dealt = dict[str, float]()  # tokens that each cache has computed, as far as they still count
        for name, addresses in (endpoints or {}).items():
            self.add(name, *addresses)

    def add(self, name: str, endpoint: str, replay_endpoint: str, curve: Any = None) -> None:
        """Begins to mirror a cache. `curve` has the keys of encrypted events; None reads unencrypted events."""
        self.mirrors[name] = Subscriber(endpoint, replay_endpoint, curve=curve)
        self._dealt = dict.fromkeys(self.mirrors, 0.0)

    def remove(self, name: str) -> None:
        """Forgets a cache. Its open requests end by `end`."""
        self.mirrors.pop(name).close()
        self.weights.pop(name, None)
        del self._dealt[name]

    def route(
        self, prompt: Sequence[int], salt: str | None = None, lora: str | None = None, *, without: Collection[str] = ()
    ) -> str:
        """Picks a cache, and counts the prompt as computed there. See `rank` for the rule."""
        best = self.rank(prompt, salt, lora, names=[name for name in self.mirrors if name not in without])[0]
        self._deal(best.name, len(prompt) - best.cached)
        return best.name

    def rank(
        self,
        prompt: Sequence[int],
        salt: str | None = None,
        lora: str | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> list[Place]:
        """Returns the caches for a prompt, the best one first, and the others by their load.

        The best cache is the choice of `choose_replica`. A silent cache comes last. None of `names` means all caches.
        """
        names = list(self.mirrors) if names is None else names
        cached = {name: self._cached(name, prompt, salt, lora) for name in names}
        load = {name: self._load(name) for name in names}
        candidates = [name for name in names if not self._is_silent(name)] or names
        choice = choose_replica(
            [cached[name] for name in candidates],
            [load[name] for name in candidates],
            len(prompt),
            load_price=LOAD_PRICE,
        )
        best = candidates[choice]
        ranked = sorted(names, key=lambda name: (name != best, name not in candidates, load[name]))
        return [Place(name, cached[name]) for name in ranked]

    def begin(
        self,
        request: Hashable,
        place: Place,
        prompt: Sequence[int],
        salt: str | None = None,
        lora: str | None = None,
        *,
        num_new: int = 0,
    ) -> None:
        """Counts a request as open at a place, with `num_new` tokens of an answer, until `end`.

        Later prompts with the same beginning count its prompt as cached there. A second call moves the request.
        """
        num_tokens = len(prompt) - place.cached + num_new
        self._open[request] = _Open(place.name, (salt, lora), np.asarray(prompt, np.int32), num_tokens)

    def end(self, request: Hashable) -> None:
        """Counts an open request as computed. An unknown request is ignored."""
        ended = self._open.pop(request, None)
        if ended is not None:
            self._deal(ended.name, ended.num_tokens)

    def place_of(self, request: Hashable) -> str | None:
        """Returns the cache where a request is open. None means it is not open."""
        return self._open[request].name if request in self._open else None

    def drop(self, request: Hashable) -> None:
        """Forgets an open request which no cache has seen."""
        self._open.pop(request, None)

    def close(self) -> None:
        """Stops listening."""
        for mirror in self.mirrors.values():
            mirror.close()

    def _is_silent(self, name: str) -> bool:
        return name in self.mirrors and self.mirrors[name].is_silent

    def _cached(self, name: str, prompt: Sequence[int], salt: str | None, lora: str | None) -> int:
        """The number of a prompt's tokens that a cache has, or is about to compute for open requests."""
        mirror = self.mirrors.get(name)
        salt_there = Namespaces.salted(salt, self.weights.get(name))
        num_found = 0 if mirror is None else mirror.lookup(prompt, salt_there, lora).tokens
        tokens = np.asarray(prompt, np.int32)
        common = [
            _num_common(tokens, other.prompt)
            for other in self._open.values()
            if other.name == name and other.space == (salt, lora)
        ]
        return max(num_found, max(common, default=0))

    def _load(self, name: str) -> float:
        num_open = sum(request.num_tokens for request in self._open.values() if request.name == name)
        return num_open + DEALT_PRICE * self._dealt.get(name, 0.0)

    def _deal(self, name: str, num_tokens: int) -> None:
        if name in self._dealt:
            self._dealt[name] += num_tokens
        if sum(self._dealt.values()) > MAX_DEALT:
            self._dealt = {name: count / 2 for name, count in self._dealt.items()}


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    """The number of equal first tokens, or 0 if they are few."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    num_equal = int(np.argmax(differs)) if differs.any() else length
    return num_equal if num_equal >= LEAST_COMMON else 0
