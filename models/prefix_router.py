# SPDX-License-Identifier: Apache-2.0
"""A router for prompts. It mirrors the contents of caches, and picks the cache that has the most of a prompt."""

from collections.abc import Collection, Mapping, Sequence

from kvjax.interop.vllm import Subscriber
from kvjax.serving import choose_replica


class Router:
    """Mirrors the contents of each cache, and counts the tokens that it has sent there to be computed.

    Args:
      endpoints: {name: (the cache's endpoint for events, its endpoint for a replay of missed events)}.
    """

    def __init__(self, endpoints: Mapping[str, tuple[str, str]]):
        self.mirrors = {name: Subscriber(*addresses) for name, addresses in endpoints.items()}
        self.sent = dict.fromkeys(endpoints, 0)

    def route(
        self, prompt: Sequence[int], salt: str | None = None, lora: str | None = None, *, without: Collection[str] = ()
    ) -> str:
        """Picks the cache that has the most of a prompt, or among equals the cache that was sent the fewest tokens.

        It skips the caches in `without`, and also silent caches if there are others.
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
