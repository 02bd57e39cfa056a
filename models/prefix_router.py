# SPDX-License-Identifier: Apache-2.0
"""A router for prompts. It mirrors the contents of caches, and picks the cache with most of a prompt."""

from collections.abc import Collection, Mapping, Sequence

from kvjax.interop.vllm import Subscriber
from kvjax.serving import choose_replica


class Router:
    """Mirrors each cache's contents, and counts the tokens it has sent to each for computing.

    Args:
      endpoints: {name: (the cache's endpoint for events, its endpoint for a replay of missed events)}.
    """

    def __init__(self, endpoints: Mapping[str, tuple[str, str]]):
        self.mirrors = {name: Subscriber(*addresses) for name, addresses in endpoints.items()}
        self.sent = dict.fromkeys(endpoints, 0)

    def route(
        self, prompt: Sequence[int], salt: str | None = None, lora: str | None = None, *, without: Collection[str] = ()
    ) -> str:
        """Picks the cache with most of a prompt, and among equals the cache with the fewest tokens sent.

        It skips the caches in `without`, and silent caches if others are left.
        """
        names = [name for name in self.mirrors if name not in without]
        names = [name for name in names if not self.mirrors[name].is_silent] or names
        cached = {name: self.mirrors[name].lookup(prompt, salt, lora).tokens for name in names}
        sent = [self.sent[name] for name in cached]
        best = list(cached)[choose_replica(list(cached.values()), sent, len(prompt))]
        self.sent[best] += len(prompt) - cached[best]
        return best

    def close(self) -> None:
        """Stops listening."""
        for mirror in self.mirrors.values():
            mirror.close()
