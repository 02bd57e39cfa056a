# SPDX-License-Identifier: Apache-2.0
"""A router: sends each prompt to the cache that has most of it, by mirrors of what the caches publish."""

from collections.abc import Collection, Mapping, Sequence

from kvjax.interop.vllm import Subscriber
from kvjax.serving import choose_replica


class Router:
    """Knows what each cache holds, and how many tokens each was sent to compute.

    Args:
      endpoints: {name: (where the cache publishes, where it answers who missed something)}.
    """

    def __init__(self, endpoints: Mapping[str, tuple[str, str]]):
        self.mirrors = {name: Subscriber(*addresses) for name, addresses in endpoints.items()}
        self.sent = dict.fromkeys(endpoints, 0)

    def route(
        self, prompt: Sequence[int], salt: str | None = None, lora: str | None = None, *, without: Collection[str] = ()
    ) -> str:
        """The cache that has most of a prompt, of equal ones that which was sent least; none in `without` or silent."""
        names = [name for name in self.mirrors if name not in without]
        names = [name for name in names if not self.mirrors[name].is_silent] or names
        cached = {name: self.mirrors[name].lookup(prompt, salt, lora).tokens for name in names}
        sent = [self.sent[name] for name in cached]
        best = list(cached)[choose_replica(list(cached.values()), sent, len(prompt))]
        self.sent[best] += len(prompt) - cached[best]
        return best

    def close(self) -> None:
        """Listens no more."""
        for mirror in self.mirrors.values():
            mirror.close()
